"""Determine which values a column of a Parquet row group can have, from the file's footer."""

import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from packprep.sources.expressions import Range


def column_range(
    chunks: Sequence[pq.ColumnChunkMetaData], kind: pa.DataType, is_nested: bool, n_rows: int
) -> Range:
    """Return the range of a column's values, as an expression reads them.

    The result contains every value if statistics are missing, or if their order differs from the
    order of an expression. A text's statistics may be shortened, because they remain bounds. The
    statistics of lists and structs describe their entries, and an empty list counts as null there.

    Args:
        chunks: The footer's metadata of all leaf columns with the column's name. pyarrow's reader
            accepted them before, because damaged metadata would abort the process here.
        kind: Arrow type of the values.
        is_nested: Whether the column is a field of a struct column.
        n_rows: Number of rows of the row group.
    """
    statistics = chunks[0].statistics if len(chunks) == 1 else None
    if statistics is None or pa.types.is_nested(getattr(kind, "storage_type", kind)):
        return Range()
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_float = pa.types.is_floating(kind)
    has_null_count = statistics.has_null_count
    if has_null_count and statistics.null_count == n_rows:
        return Range(value=False)
    # A float can be NaN, which counts as null, and a value is null if its struct is null.
    null = is_float or is_nested or not has_null_count or statistics.null_count > 0
    low, high = _ends(statistics, kind)
    return Range(low, high, null=null, single=kind == pa.float32())


def _ends(statistics: pq.Statistics, kind: pa.DataType) -> tuple[Any, Any]:
    """Return the smallest and the largest value, or (None, None) if they are not known."""
    if not statistics.has_min_max:
        return None, None
    if kind in (pa.float32(), pa.float64()):
        ends = statistics.min, statistics.max
        return (None, None) if any(map(math.isnan, ends)) else ends
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        wanted_type: type = bool if pa.types.is_boolean(kind) else int
        ends = statistics.min, statistics.max
        return ends if all(type(end) is wanted_type for end in ends) else (None, None)
    if statistics.physical_type == "BYTE_ARRAY" and statistics.logical_type.type in _OF_TEXT:
        return statistics.min_raw, statistics.max_raw
    return None, None


_OF_TEXT = ("STRING", "NONE")
"""Logical types whose statistics are ordered by their bytes."""
