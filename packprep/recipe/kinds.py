"""Kinds of values: how each is named in messages and the docs, and how one is accepted."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """A kind of value: how it is named in messages and the docs, and the function that accepts one."""

    name: str
    accept: Callable[[Any], Any]


def only(expected: type | tuple[type, ...]) -> Callable[[Any], Any]:
    def accept(value):
        if type(value) not in (expected if isinstance(expected, tuple) else (expected,)):
            raise ValueError
        return value

    return accept


def whole(low: int, high: int = 2**63 - 1) -> Kind:
    def accept(value):
        if type(value) is not int or not low <= value <= high:
            raise ValueError
        return value

    top = f" … {high}" if high < 2**63 - 1 else " or more"
    return Kind(f"a whole number, {low}{top}", accept)


def number(name: str, low: float, high: float, low_open: bool = False) -> Kind:
    def accept(value):
        if type(value) not in (int, float) or not low <= value <= high:  # NaN is in no range
            raise ValueError
        if low_open and value == low:
            raise ValueError
        return float(value)

    return Kind(name, accept)


def choice(*choices: str) -> Kind:
    def accept(value):
        if value not in choices:
            raise ValueError
        return value

    return Kind(" | ".join(choices), accept)


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(value: int | str) -> int:
    """Bytes of a size such as 1048576, "1MiB" or "64 MB"; ValueError if it is none."""
    if type(value) is int and 0 < value < 2**63:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value) if type(value) is str else None
    if not match or match[2].upper() not in _UNITS or not 0 < float(match[1]) < 2**63:
        raise ValueError
    return max(1, round(float(match[1]) * _UNITS[match[2].upper()]))


def accept_strings(value):
    if type(value) is str:
        value = [value]
    if type(value) not in (list, tuple) or not value or any(type(item) is not str or not item for item in value):
        raise ValueError
    return tuple(value)


def accept_interval(value):
    if type(value) not in (list, tuple) or len(value) != 2:
        raise ValueError
    low, high = (number("", 0, 1).accept(v) for v in value)
    if not low < high:
        raise ValueError
    return (low, high)


def accept_role(value):
    if not ((type(value) is str and value) or (type(value) is int and value >= 0)):
        raise ValueError
    return value


MOST_SENTINELS = 1 << 20


def accept_name(value):
    if type(value) is not str or any(ord(c) < 32 or ord(c) == 127 or "\ud800" <= c <= "\udfff" for c in value):
        raise ValueError
    return value


def accept_sentinels(value):
    if type(value) is str and (value == "auto" or "{}" in value):
        return value
    if type(value) is dict and set(value) == {"first", "count"}:
        first, count = value["first"], value["count"]
        if type(first) is int and type(count) is int and 0 <= first < 1 << 31 and 1 <= count <= MOST_SENTINELS:
            return {"first": first, "count": count}
    if type(value) in (list, tuple) and 0 < len(value) <= MOST_SENTINELS:
        return tuple(accept_role(item) for item in value)
    raise ValueError


def accept_auto_size(value):
    return "auto" if value == "auto" else parse_size(value)


BOOLEAN = Kind("true or false", only(bool))
TEXT = Kind("a text", only(str))
NAME = Kind("a text of one line, without control characters", accept_name)
STRINGS = Kind("a text or a list of texts", accept_strings)
ROLE = Kind("a token's text or its id", accept_role)
