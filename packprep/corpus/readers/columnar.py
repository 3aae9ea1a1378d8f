"""Rows of an Arrow column → documents; what Parquet and Arrow files have in common."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packprep.corpus.readers import documents
from packprep.corpus.readers.documents import Batch, BatchBuilder, Keep, invalid_utf8, kept, too_large
from packprep.errors import SourceError

SLICE_ROWS = 1024  # rows that become Python objects at once


def check_text_column(path: str, schema: pa.Schema, text_key: str) -> int:
    """The index of the column `text_key`; SourceError unless it exists once and holds strings or bytes.

    A column of nothing but nulls is accepted: each of its rows is a reject.
    """
    found = schema.get_all_field_indices(text_key)
    if len(found) != 1:
        problem = "no column" if not found else f"{len(found)} columns"
        names = ", ".join(map(repr, schema.names[:50])) or "none"
        raise SourceError(
            f"{path}: {problem} named {text_key!r}; the columns are: {names}. "
            f"Set text_key to the one that holds the text."
        )
    kind = schema.field(found[0]).type
    if not _is_text(kind.value_type if pa.types.is_dictionary(kind) else kind):
        raise SourceError(
            f"{path}: the column {text_key!r} holds {kind}, not strings. Set text_key to the one that holds the text."
        )
    return found[0]


def _is_text(kind: pa.DataType) -> bool:
    kinds = "string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null"
    return any(getattr(pa.types, f"is_{name}")(kind) for name in kinds)


@contextmanager
def arrow_errors(path: str, what: str) -> Iterator[None]:
    """Turns what pyarrow says about damaged data into a SourceError; errors of the operating system pass."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        # pyarrow reports damaged data as an OSError, too, but without a number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise SourceError(
            f"{path}: not a readable {what}: {error}. Fetch the file again, or take it out of the recipe."
        ) from error


def read_rows(
    batch: BatchBuilder, column: pa.Array, first: int, keep: Keep | None, batch_bytes: int
) -> Iterator[Batch]:
    """Adds the rows of a column to a batch; gives the batch whenever it holds `batch_bytes`.

    first: position of the column's first row in the file
    """
    for begin in range(0, len(column), SLICE_ROWS):
        rows = column.slice(begin, SLICE_ROWS)
        positions = np.arange(first + begin, first + begin + len(rows), dtype=np.int64)
        wanted = kept(keep, batch.file, positions)
        if rows.type in (pa.string_view(), pa.binary_view()):
            rows = rows.cast(pa.large_binary())  # pyarrow filters no views
        if not wanted.all():
            positions, rows = positions[wanted], rows.filter(pa.array(wanted))
        if pa.types.is_dictionary(rows.type):
            rows = rows.dictionary_decode()
        if pa.types.is_null(rows.type):
            rows = rows.cast(pa.string())
        yield from _add_rows(batch, rows.cast(pa.large_binary()), positions.tolist(), batch_bytes)


def _add_rows(batch: BatchBuilder, rows: pa.Array, positions: list[int], batch_bytes: int) -> Iterator[Batch]:
    sizes = pc.binary_length(rows).to_pylist()
    for i, (position, size) in enumerate(zip(positions, sizes, strict=True)):
        if size is None:
            batch.reject(position, "not_a_string", "the value is null")
        elif size > documents.MAX_DOCUMENT_BYTES:
            batch.reject(position, *too_large(size))
        else:
            try:
                batch.add(position, rows[i].as_buffer().to_pybytes().decode(), size)
            except UnicodeDecodeError as error:
                batch.reject(position, *invalid_utf8(error, "text"))
        if batch.bytes >= batch_bytes:
            yield from batch.take()
