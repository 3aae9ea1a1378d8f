"""Parquet files: a piece is a row group."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from packprep.corpus.conversations import MESSAGES, MarkReader
from packprep.corpus.readers.choice import Choice
from packprep.corpus.readers.columnar import REPEATED_BYTES, SLICE_ROWS, Columns, arrow_errors, find_columns, read_rows
from packprep.corpus.readers.documents import TOKEN_TEXT_BYTES, Batch, BatchBuilder, Keep, Part, open_source
from packprep.corpus.readers.token_lists import COLUMNS, SLICE_LISTS, find_token_column, read_lists

_BUFFER_BYTES = 1 << 20  # how much of a column is read ahead; without it pyarrow reads a whole row group's column


def row_group_bytes(path: str, size: int, text_key: str, tokens: bool) -> list[int]:
    """By the footer, of each row group: the bytes of its column of texts or messages before compression, or of all columns
    where it has neither; with `tokens` TOKEN_TEXT_BYTES for each id."""
    names = [*COLUMNS, text_key] if tokens else [MESSAGES, text_key]
    with _opened(path, size) as (_, file):
        held = []
        for group in _groups(file, file.num_row_groups):
            found = _chunks(group, names)
            of_ids = TOKEN_TEXT_BYTES * sum(c.num_values for c in found)
            held.append(of_ids if tokens else sum(c.total_uncompressed_size for c in found) or group.total_byte_size)
        if any(not 0 <= n_bytes < 1 << 47 for n_bytes in held):
            raise pa.ArrowInvalid("its footer gives sizes that cannot be")
        return held


def read_row_group(
    part: Part, text_key: str, keep: Keep | None, batch_bytes: int, marks: MarkReader | None = None
) -> Iterator[Batch]:
    """The documents of a part of a row group; see `readers.read`."""
    with _opened(part.path, part.size) as (source, file):
        tokens = part.format == "parquet_tokens"
        if tokens:
            columns = Columns(find_token_column(part.path, file.schema_arrow, text_key))
        else:
            columns = find_columns(part.path, file.schema_arrow, text_key, marks)
        names = [file.schema_arrow.names[i] for i in columns.there()]
        groups = _groups(file, part.piece + 1)
        first = sum(group.num_rows for group in groups[:-1])
        begin, end = part.range(groups[-1].num_rows)
        if begin == end:
            return
        batch = BatchBuilder(part.file)
        row = 0
        rows_at_once = _rows_at_once(source, groups[-1], names, batch_bytes, tokens)
        for rows in file.iter_batches(rows_at_once, row_groups=[part.piece], columns=names, use_threads=False):
            low, high = 0 if isinstance(keep, Choice) else max(begin - row, 0), min(end - row, rows.num_rows)
            if low < high:
                values = columns.of([rows.column(name).slice(low, high - low) for name in names])
                at = first + row + low
                if tokens:
                    yield from read_lists(part.file, values.text, at, keep, batch_bytes, first + begin)
                else:
                    yield from read_rows(batch, values, at, keep, batch_bytes, marks, first + begin)
            row += rows.num_rows
            if row >= end:
                break
        if row < end:
            raise pa.ArrowInvalid(f"row group {part.piece} has {row} rows, and its footer says {groups[-1].num_rows}")
        yield from batch.take()


def _groups(file: pq.ParquetFile, count: int) -> list[pq.RowGroupMetaData]:
    """The first `count` row groups of a footer whose numbers of rows can be."""
    groups = [file.metadata.row_group(i) for i in range(count)]
    if any(group.num_rows < 0 for group in groups) or sum(group.num_rows for group in groups) >= 1 << 62:
        raise pa.ArrowInvalid("its footer gives numbers of rows that cannot be")
    return groups


def _rows_at_once(
    source: BinaryIO, group: pq.RowGroupMetaData, names: Sequence[str], batch_bytes: int, tokens: bool
) -> int:
    """As many rows as hold about `batch_bytes`; fewer where a dictionary hides how long the texts are."""
    found = _chunks(group, names)
    if tokens:  # of repeated ids any number takes a few bytes, so they are counted
        per_row = max(1, 8 * sum(c.num_values for c in found) // max(1, group.num_rows))
        return max(1, min(SLICE_LISTS, batch_bytes // per_row))
    per_row = max(1, sum(c.total_uncompressed_size for c in found) // max(1, group.num_rows))
    longest = max(
        (_dictionary_bytes(source, c.dictionary_page_offset) for c in found if c.has_dictionary_page), default=0
    )
    return max(1, min(SLICE_ROWS, batch_bytes // per_row, REPEATED_BYTES // max(1, longest)))


def _chunks(group: pq.RowGroupMetaData, names: Sequence[str]) -> list[pq.ColumnChunkMetaData]:
    """What a row group's footer says of the leaves of some columns."""
    columns = [group.column(i) for i in range(group.num_columns)]
    return [c for c in columns if any((c.path_in_schema + ".").startswith(name + ".") for name in names)]


def _dictionary_bytes(source: BinaryIO, offset: int) -> int:
    """The bytes of a dictionary's page, and so at most of its longest value; 0 if there is no such page.

    From the page's header: Parquet's PageHeader in Thrift's compact protocol begins with the fields 1, type, and
    2, uncompressed_page_size, each a byte 0x15 and a zigzag varint; type 2 is a dictionary's.
    """
    source.seek(offset)
    header = source.read(9)
    if header[:3] != b"\x15\x04\x15":
        return 0
    value = shift = 0
    for byte in header[3:]:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    return value >> 1


@contextmanager
def _opened(path: str, size: int) -> Iterator[tuple[BinaryIO, pq.ParquetFile]]:
    with (
        open_source(path, size) as source,
        arrow_errors(path, "Parquet file"),
        pq.ParquetFile(source, pre_buffer=False, buffer_size=_BUFFER_BYTES, page_checksum_verification=True) as file,
    ):
        yield source, file
