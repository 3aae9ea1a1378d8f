"""The cases of cases.json, computed with reference implementations of other systems."""

import json
from functools import cache
from pathlib import Path

_FILE = Path(__file__).parent / "cases.json"


@cache
def _all_cases() -> list[dict]:
    return json.loads(_FILE.read_text(encoding="utf-8"))["cases"]


def cases(fn: str) -> list[tuple[str, dict, dict]]:
    """(id, inputs, expected) of every case of the function `fn`; a name without cases is an
    error."""
    found = [
        (case["id"], case["inputs"], case["expected"]) for case in _all_cases() if case["fn"] == fn
    ]
    if not found:
        raise KeyError(f"golden/cases.json has no case of {fn!r}")
    return found
