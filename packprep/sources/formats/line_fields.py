"""Read fields of JSON lines, to select or group documents by them.

A column has one type, but the values of a field may have several. Lines whose fields have equal
types are therefore read together, so that the result for a line does not depend on other lines.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from packprep.sources.formats.fields import field_at
from packprep.sources.formats.jsonl import MIN_NESTED_BYTES, Lines, nested_too_deep, parse_object
from packprep.sources.passes import FieldColumns

_TYPES = {
    type(None): pa.null(),
    bool: pa.bool_(),
    float: pa.float64(),
    str: pa.large_binary(),
    list: pa.list_(pa.null()),
    dict: pa.struct([]),
}


def read_line_fields(lines: Lines, names: Sequence[str]) -> list[FieldColumns]:
    """Return the values of some fields of JSON lines.

    A missing field is null. Invalid and too large lines are in no `FieldColumns`.

    Args:
        lines: The lines.
        names: Names of the fields. "a.b" is b in a, unless a record has a key "a.b".
    """
    decode = values_decoder(tuple(names))
    by_types: dict[tuple[pa.DataType, ...], tuple[list[int], list[list[Any]]]] = {}
    for i in range(len(lines.positions)):
        line = lines.line(i)
        values = None if line is None else decode(line)
        if values is not None:
            rows, of_rows = by_types.setdefault(tuple(map(_type_of, values)), ([], []))
            rows.append(i)
            of_rows.append(values)
    field_columns = []
    for types, (rows, of_rows) in by_types.items():
        columns = map(_column, types, zip(*of_rows, strict=True))
        field_columns.append(
            FieldColumns(np.array(rows, np.int64), dict(zip(names, columns, strict=True)))
        )
    return field_columns


@lru_cache(maxsize=64)
def values_decoder(names: tuple[str, ...]) -> Callable[[bytes], list[Any] | None]:
    """Return a function that decodes the values of the fields `names` of a line.

    The returned function takes the bytes of a line. It returns None if the line is invalid.
    """
    # The name a.b may be a key, or b in the object at key a, so both keys are read.
    keys = list(dict.fromkeys(key for name in names for key in (name, name.partition(".")[0])))
    record_fields = [(f"field{i}", Any, msgspec.UNSET) for i in range(len(keys))]
    rename = {f"field{i}": key for i, key in enumerate(keys)}
    parse = None
    try:
        record = msgspec.defstruct("Record", record_fields, rename=rename, gc=False)
        parse = msgspec.json.Decoder(record).decode
    except ValueError:  # msgspec refuses keys that need JSON escapes.
        pass

    def decode(line: bytes) -> list[Any] | None:
        if parse is not None:
            try:
                values = msgspec.structs.astuple(parse(line))
                # msgspec checks neither the UTF-8 nor the nesting depth of skipped data.
                if not line.isascii():
                    line.decode()
                if len(line) < MIN_NESTED_BYTES or not nested_too_deep(line):
                    pairs = zip(keys, values, strict=True)
                    record = {key: value for key, value in pairs if value is not msgspec.UNSET}
                    return [field_at(record, name) for name in names]
            except (ValueError, msgspec.MsgspecError, RecursionError):
                pass
        slowly = parse_object(line, has_numbers=True)
        return None if isinstance(slowly, tuple) else [field_at(slowly, name) for name in names]

    return decode


def _type_of(value: Any) -> pa.DataType:
    """Return the type of a column that holds a JSON value."""
    if type(value) is not int:
        return _TYPES[type(value)]
    if -(1 << 63) <= value < 1 << 63:
        return pa.int64()
    return pa.uint64() if 0 <= value < 1 << 64 else pa.float64()


def _column(kind: pa.DataType, values: Sequence[Any]) -> pa.Array:
    """Return the values of a field as a column.

    For lists and objects, the column only shows that the field is not null.
    """
    if pa.types.is_struct(kind) or pa.types.is_list(kind):
        empty: Any = {} if pa.types.is_struct(kind) else []
        return pa.array([empty] * len(values), kind)
    if pa.types.is_large_binary(kind):
        return pa.array([value.encode("utf-8", "surrogatepass") for value in values], kind)
    return pa.array(map(_number, values) if pa.types.is_float64(kind) else values, kind)


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # The integer is outside the range of float64.
        return math.copysign(math.inf, value)
