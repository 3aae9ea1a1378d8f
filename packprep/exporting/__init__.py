"""A dataset in the formats of other tools. One is a line in EXPORTS and
`packprep/exporting/NAME.py`.

```
check ─► write ─► located ─► said        what cannot be exported so; the files; where they lie, and how to use them
```
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from packprep.errors import RecipeError


@dataclass(frozen=True)
class Export:
    """A format that datasets are exported to.

    files    what is written, in a word or two, for `--help`.
    option   the option that chooses a form of it, choices: its values → what each is; the first is the default.
    weighted the choices that have loss_weights; "" where there is no choice.

    Its file, imported when it is asked for, has
    check    (Exporting): RecipeError for what cannot be exported so; what is lost is said.
    write    (Exporting) → what the receipt says: files, [{file, bytes, digest}], and more.
    located  (receipt, out) → the receipt with places, where what it says to type names files; else there is none.
    said     (that) → lines for people: what was made, and how a trainer is told of it.
    """

    files: str
    option: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)
    weighted: tuple[str, ...] = ()


EXPORTS = {
    "megatron": Export(
        ".bin and .idx", "what", {"documents": "documents as they were", "rows": "packed rows"}
    ),
    "parquet": Export(
        "Parquet",
        "columns",
        {"nemo": "NeMo's packed sequences", "trl": "TRL's", "full": "the loader's columns"},
        ("full",),
    ),
    "hf": Export(
        "a Hugging Face dataset",
        "trainer",
        {"trl": "TRL", "llamafactory": "LLaMA-Factory", "axolotl": "Axolotl", "swift": "ms-swift"},
    ),
    "jsonl": Export(
        "JSON lines", "what", {"documents": "documents as they were", "rows": "packed rows"}
    ),
    "mds": Export("a StreamingDataset", weighted=("",)),
}


def export_module(name: str) -> Any:
    """The file of an export, with `check`, `write`, `said`, and perhaps `located`."""
    return import_module(f"{__name__}.{name}")


def exports_with(option: str) -> str:
    """The exports that have an option, as they are asked for."""
    return (
        " or ".join(f"--to {name}" for name, export in EXPORTS.items() if export.option == option)
        or "no export"
    )


def chosen_form(name: str, given: Mapping[str, str | None]) -> dict[str, str]:
    """{"to": name, its option: the choice}. given: option → value or None. RecipeError for what
    this export has not."""
    if name not in EXPORTS:
        raise RecipeError(f"--to {name}: expected {' or '.join(EXPORTS)}")
    option, choices = EXPORTS[name].option, list(EXPORTS[name].choices)
    for other, value in given.items():
        if value is not None and other != option:
            instead = " or ".join(f"--{option} {choice}" for choice in choices) or "no such option"
            raise RecipeError(
                f"--{other} goes with {exports_with(other)}: with --to {name} give {instead}"
            )
    value = given.get(option)
    if value is not None and value not in choices:
        raise RecipeError(f"--{option} {value}: expected {' or '.join(choices)}")
    return {"to": name, **({option: value or choices[0]} if option else {})}
