"""Decode fields of JSON lines, to select documents by them."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from packprep.sources.formats.fields import field_at
from packprep.sources.formats.jsonl import MIN_NESTED_BYTES, Lines, nested_too_deep, parse_object
from packprep.sources.passes import Records


def read_line_fields(lines: Lines, names: Sequence[str]) -> Records:
    """Return the values of some fields of JSON lines. A missing field is None.

    Invalid and too large lines are not in the result.

    Args:
        lines: The lines.
        names: Names of the fields. "a.b" is b in a, unless a record has a key "a.b".
    """
    decode = _decoder(tuple(names))
    held = (lines.line(i) for i in range(len(lines.positions)))
    every = [None if line is None else decode(line) for line in held]
    rows = [i for i, values in enumerate(every) if values is not None]
    columns = {
        name: [values[k] for values in every if values is not None] for k, name in enumerate(names)
    }
    return Records(np.array(rows, np.int64), columns, is_json=True)


@lru_cache(maxsize=64)
def _decoder(names: tuple[str, ...]) -> Callable[[bytes], list[Any] | None]:
    """Return a function that decodes the values of the fields `names` of a line.

    The returned function takes the bytes of a line. It returns None if the line is invalid.
    """
    keys = list(dict.fromkeys(key for name in names for key in (name, name.partition(".")[0])))
    own = [(f"field{i}", Any, msgspec.UNSET) for i in range(len(keys))]
    rename = {f"field{i}": key for i, key in enumerate(keys)}
    parse = None
    try:
        record = msgspec.defstruct("Record", own, rename=rename, gc=False)
        parse = msgspec.json.Decoder(record).decode
    except ValueError:  # msgspec refuses keys that need JSON escapes.
        pass

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
