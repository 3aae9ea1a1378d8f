"""Changes of bytes and of JSON values that a careless or hostile writer would make; each is a function of its chance."""

import copy
import json
import random
from typing import Any

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 10**12, 10**18, (1 << 63) - 1, 1 << 63, 1 << 64,
    10**400, -(10**18), 0.0, -0.5, 0.5, 1.0, 1e18, 1e308, "", "a", "/etc/passwd", "../../etc/passwd", "a\0b", "x" * 5000,
    "é🙂", "0" * 32, [], [0], [[]], [1.5], [-1], [10**18], ["a"], [None], {}, {"a": 1}, {"file": "../x"},
]  # fmt: skip
"""What a value of a JSON file is replaced by."""
PIECES = [
    b"\0", b"\xff", b"\xef\xbb\xbf", b"[" * 3000, b'{"a":' * 2000, b"9" * 5000, b"1e999", b"NaN", b"Infinity", b"-0",
    b"\\ud800", b"\\u0000", b"true", b"null", b"0x" + b"f" * 4000, b"\n", b"'''", b'"', b"]", b"}", b"[[", b"..", b"inf",
]  # fmt: skip


def bytes_changed(data: bytes, chance: random.Random) -> bytes:
    """Some flips, cuts, copies, and pieces that parsers stumble over."""
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 4, 16])):
        at = chance.randrange(len(changed) + 1)
        kind = chance.randrange(6)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << chance.randrange(8)
        elif kind == 1 and at < len(changed):
            changed[at] = chance.randrange(256)
        elif kind == 2:
            del changed[at : at + chance.choice([1, 2, 8, 100, 5000])]
        elif kind == 3:
            changed[at:at] = chance.choice(PIECES)
        elif kind == 4:
            other = chance.randrange(len(changed) + 1)
            changed[at:at] = changed[other : other + chance.choice([1, 8, 64])]
        else:
            number = chance.choice([0, 1, 255, 1 << 31, (1 << 63) - 1, (1 << 64) - 1]).to_bytes(8, "little")
            changed[at : at + 8] = number[: len(changed) - at]
    return bytes(changed)


def _places(value: Any, of: Any = None, key: Any = None) -> list[tuple[Any, Any]]:
    """(container, key) of the values inside; of long lists a few."""
    found = [] if of is None else [(of, key)]
    if isinstance(value, dict):
        inside = list(value.items())
    elif isinstance(value, list):
        inside = list(enumerate(value))
        inside = inside if len(inside) <= 8 else inside[:4] + inside[-4:]
    else:
        inside = []
    for name, item in inside:
        found += _places(item, value, name)
    return found


def value_changed(value: Any, chance: random.Random) -> Any:
    """A JSON value with one of its parts replaced, left out, added or doubled."""
    value = copy.deepcopy(value)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        places = _places(value)
        if not places:
            return chance.choice(VALUES)
        of, key = chance.choice(places)
        kind = chance.randrange(10)
        if kind < 6:
            of[key] = copy.deepcopy(chance.choice(VALUES))
        elif kind == 6 and type(of[key]) in (int, float):
            of[key] += chance.choice([-1, 1, 8])
        elif kind == 7 and isinstance(of, dict):
            of[chance.choice(["a", "", "shards", "é"])] = of.pop(key)
        elif kind == 8 and isinstance(of, list):
            of.insert(key, copy.deepcopy(of[key]))
        else:
            del of[key]
    return value


def encoded(value: Any) -> bytes:
    """Canonical JSON of a value, infinities included, so that a file is refused for what it says and not for its form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass") + b"\n"


def json_changed(data: bytes, chance: random.Random) -> bytes:
    """A JSON file with a changed value, or, one time in four, with changed bytes."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return bytes_changed(data, chance)
    if chance.random() < 0.25:
        return bytes_changed(data, chance)
    return encoded(value_changed(value, chance))
