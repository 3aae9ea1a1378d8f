"""Read fields of JSON lines as columns, to select documents by them.

A column has one type, but the values of a field may have several. Lines whose fields have equal
types are therefore read together, so that the result for a line does not depend on other lines.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from packprep.sources.formats.fields import field_at
from packprep.sources.formats.jsonl import MIN_NESTED_BYTES, Lines, nested_too_deep, parse_object
from packprep.sources.passes import Records

_INT64 = range(-(1 << 63), 1 << 63)


def read_line_fields(lines: Lines, names: Sequence[str]) -> list[Records]:
    """Return the values of some fields of JSON lines.

    A missing field is null. Invalid and too large lines are in no `Records`.

    Args:
        lines: The lines.
        names: Names of the fields. "a.b" is b in a, unless a record has a key "a.b".
    """
    values_of = _decoder(tuple(names))
    by_types: dict[tuple[str, ...], tuple[list[int], list[list[Any]]]] = {}
    for i in range(len(lines.positions)):
        line = lines.line(i)
        values = None if line is None else values_of(line)
        if values is not None:
            types = tuple(map(_type_of, values))
            rows, of_rows = by_types.setdefault(types, ([], []))
            rows.append(i)
            of_rows.append(values)
    return [
        Records(
            np.array(rows, np.int64),
            {
                name: _column(kind, [values[k] for values in of_rows])
                for k, (name, kind) in enumerate(zip(names, types, strict=True))
            },
        )
        for types, (rows, of_rows) in by_types.items()
    ]


@lru_cache(maxsize=64)
def _decoder(names: tuple[str, ...]) -> Callable[[bytes], list[Any] | None]:
    """Return a function that decodes the values of the fields `names` of a line.

    The returned function takes the bytes of a line. It returns None if the line is invalid.
    """
    keys = list(dict.fromkeys(key for name in names for key in (name, name.partition(".")[0])))
    own = [(f"field{i}", Any, msgspec.UNSET) for i in range(len(keys))]
    rename = {f"field{i}": key for i, key in enumerate(keys)}
    try:
        parse = msgspec.json.Decoder(
            msgspec.defstruct("Record", own, rename=rename, gc=False)
        ).decode
    except ValueError:  # msgspec refuses keys that need JSON escapes.
        parse = None

    def decode(line: bytes) -> list[Any] | None:
        if parse is not None:
            try:
                found = msgspec.structs.astuple(parse(line))
                # msgspec checks neither the UTF-8 nor the nesting depth of skipped data.
                if not line.isascii():
                    line.decode()
                if len(line) < MIN_NESTED_BYTES or not nested_too_deep(line):
                    given = zip(keys, found, strict=True)
                    record = {key: value for key, value in given if value is not msgspec.UNSET}
                    return [field_at(record, name) for name in names]
            except (ValueError, msgspec.MsgspecError, RecursionError):
                pass
        slowly = parse_object(line, has_numbers=True)
        return None if isinstance(slowly, tuple) else [field_at(slowly, name) for name in names]

    return decode


def _type_of(value: Any) -> str:
    """Return the Arrow type of a column that holds a JSON value."""
    if type(value) is int:
        return "int64" if value in _INT64 else "float64"
    return _TYPES[type(value)]


_TYPES = {
    type(None): "null",
    bool: "bool",
    float: "float64",
    str: "string",
    list: "list",
    dict: "struct",
}


def _column(kind: str, values: Sequence[Any]) -> Any:
    """Return the values of a field as a `pyarrow.Array`.

    For lists and objects, the array only shows that the field is not null.
    """
    import pyarrow as pa

    if kind == "struct":
        return pa.array([{}] * len(values), pa.struct([]))
    if kind == "list":
        return pa.array([[]] * len(values), pa.list_(pa.null()))
    if kind == "string":
        return pa.array([_text(value) for value in values], pa.string())
    if kind == "float64":
        return pa.array([_number(value) for value in values], pa.float64())
    return pa.array(values, pa.type_for_alias(kind))


def _text(value: str) -> str:
    """Return a text that can be encoded as UTF-8. A lone surrogate becomes U+FFFD."""
    return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode(
        "utf-16", "replace"
    )


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # The integer is outside the range of float64.
        return float("inf") if value > 0 else float("-inf")
