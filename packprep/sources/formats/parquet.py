"""Parquet files: a piece is a row group."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from packprep.sources.formats.batch import (
    MESSAGES,
    TOKEN_TEXT_BYTES,
    Batch,
    BatchBuilder,
    Choice,
    Keep,
    Slice,
    open_source,
)
from packprep.sources.formats.compressed import Decoders
from packprep.sources.formats.fields import Fields
from packprep.sources.formats.table import (
    COLUMNS,
    REPEATED_BYTES,
    SLICE_LISTS,
    SLICE_ROWS,
    arrow_errors,
    check_block,
    find_columns,
    find_token_columns,
    read_lists,
    read_rows,
)
from packprep.storage import is_url

# how much of a column is read ahead; without it pyarrow reads a whole row group's column
_BUFFER_BYTES = 1 << 20


def pieces(path: str, size: int, text_key: str, tokens: bool, piece_bytes: int) -> list[int]:
    """By the footer, of each row group: the bytes of its column of texts or messages before
    compression, or of all columns where it has neither; with `tokens` TOKEN_TEXT_BYTES for each
    id."""
    names = [*COLUMNS, text_key] if tokens else [MESSAGES, text_key]
    with _opened(path, size) as (source, file):
        held = []
        groups = _groups(file, file.num_row_groups)
        for group, found in zip(
            groups, _chunks(source, file, range(len(groups)), names), strict=True
        ):
            of_ids = TOKEN_TEXT_BYTES * sum(c.num_values for c in found)
            held.append(
                of_ids
                if tokens
                else sum(c.total_uncompressed_size for c in found) or group.total_byte_size
            )
        if any(not 0 <= n_bytes < 1 << 47 for n_bytes in held):
            raise pa.ArrowInvalid("its footer gives sizes that cannot be")
        return held


def bytes_per_token(part: Slice, text_key: str) -> float:
    """TOKEN_TEXT_BYTES, as which `pieces` counts each."""
    return float(TOKEN_TEXT_BYTES)


def read(
    part: Slice,
    text_key: str,
    keep: Keep | None,
    batch_bytes: int,
    decoders: Decoders,
    fields: Fields | None,
) -> Iterator[Batch]:
    """The documents of a slice of a row group; see `formats.read`."""
    with _opened(part.path, part.size) as (source, file):
        tokens = part.format == "parquet_tokens"
        if tokens:
            columns = find_token_columns(part.path, file.schema_arrow, text_key, fields)
        else:

            def sizes_of(keys: Sequence[str]) -> list[int]:
                chunks = [next(_chunks(source, file, [part.piece], [key])) for key in keys]
                return [sum(chunk.total_uncompressed_size for chunk in of_key) for of_key in chunks]

            columns = find_columns(part.path, file.schema_arrow, text_key, fields, sizes_of)
        names = list(dict.fromkeys(column.name(file.schema_arrow) for column in columns.values()))
        groups = _groups(file, part.piece + 1)
        first = sum(group.num_rows for group in groups[:-1])
        begin, end = part.range(groups[-1].num_rows)
        if begin == end:
            return
        (chunks,) = _chunks(source, file, [part.piece], names)
        if not is_url(part.path):  # there each page would be a request
            _check_pages(part.path, source, part.size, chunks)
        batch = BatchBuilder(part.file)
        row = 0
        rows_at_once = _rows_at_once(source, chunks, groups[-1].num_rows, batch_bytes, tokens)
        for rows in file.iter_batches(
            rows_at_once, row_groups=[part.piece], columns=names, use_threads=False
        ):
            low, high = (
                0 if isinstance(keep, Choice) else max(begin - row, 0),
                min(end - row, rows.num_rows),
            )
            if low < high:
                table = rows.slice(low, high - low)
                values = {
                    key: c.of(table.column(file.schema_arrow.names[c.number]))
                    for key, c in columns.items()
                }
                at = first + row + low
                if tokens:
                    rows_of = values, text_key, at, keep, batch_bytes, first + begin
                    yield from read_lists(part.file, *rows_of)
                else:
                    yield from read_rows(
                        batch, values, text_key, fields, at, keep, batch_bytes, first + begin
                    )
            row += rows.num_rows
            if row >= end:
                break
        if row < end:
            raise pa.ArrowInvalid(
                f"row group {part.piece} has {row} rows, and its footer says {groups[-1].num_rows}"
            )
        yield from batch.take()


def numbers(part: Slice, decoders: Decoders) -> range:
    """The rows of a slice's row group."""
    with _opened(part.path, part.size) as (_, file):
        groups = _groups(file, part.piece + 1)
        first = sum(group.num_rows for group in groups[:-1])
        return range(first, first + groups[-1].num_rows)


def _groups(file: pq.ParquetFile, count: int) -> list[pq.RowGroupMetaData]:
    """The first `count` row groups of a footer whose numbers of rows can be."""
    groups = [file.metadata.row_group(i) for i in range(count)]
    if (
        any(group.num_rows < 0 for group in groups)
        or sum(group.num_rows for group in groups) >= 1 << 62
    ):
        raise pa.ArrowInvalid("its footer gives numbers of rows that cannot be")
    return groups


def _rows_at_once(
    source: "_Source",
    chunks: Sequence[pq.ColumnChunkMetaData],
    n_rows: int,
    batch_bytes: int,
    tokens: bool,
) -> int:
    """As many rows as hold about `batch_bytes`; fewer where a dictionary hides how long the texts
    are."""
    n_rows = max(1, n_rows)
    if tokens:  # of repeated ids any number takes a few bytes, so they are counted
        per_row = max(1, 8 * sum(c.num_values for c in chunks) // n_rows)
        return max(1, min(SLICE_LISTS, batch_bytes // per_row))
    per_row = max(1, sum(c.total_uncompressed_size for c in chunks) // n_rows)
    longest = max(
        (_page(source, c.dictionary_page_offset).decoded for c in chunks if c.has_dictionary_page),
        default=0,
    )
    return max(1, min(SLICE_ROWS, batch_bytes // per_row, REPEATED_BYTES // max(1, longest)))


def _chunks(
    source: "_Source", file: pq.ParquetFile, groups: Iterable[int], names: Sequence[str]
) -> Iterator[list[pq.ColumnChunkMetaData]]:
    """What the footer says of the leaves of some columns in each of some row groups.

    Asked for what is damaged or encrypted, pyarrow's RowGroupMetaData ends the process. Its reader
    raises, and is asked first.
    """
    paths = [file.schema.column(i).path + "." for i in range(len(file.schema))]
    leaves = [
        i for i, path in enumerate(paths) if any(path.startswith(name + ".") for name in names)
    ]
    for group in groups:
        source.only_footer = True
        with contextlib.suppress(_NotInFooter):
            next(file.iter_batches(1, row_groups=[group], columns=names, use_threads=False), None)
        source.only_footer = False
        yield [file.metadata.row_group(group).column(i) for i in leaves]


class _NotInFooter(Exception):
    """What is asked for lies in a page."""


class _Source:
    """The file below a Parquet file. only_footer: nothing may be read of it; the footer has
    been."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.only_footer, self.closed = file, False, False
        self.seek, self.tell = file.seek, file.tell

    def read(self, n_bytes: int = -1) -> bytes:
        if self.only_footer:
            raise _NotInFooter
        return self._file.read(n_bytes)

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        """Whoever opened the file closes it."""


class _Page(NamedTuple):
    """A page of a column: what its header says of its bytes."""

    begin: int  # of what follows the header, in the file
    decoded: int  # bytes; of a dictionary's page at most so many are its longest value
    stored: int


def _check_pages(
    path: str, source: _Source, size: int, chunks: Sequence[pq.ColumnChunkMetaData]
) -> None:
    """Raises SourceError for a page of some columns that is too large to be decoded: a page is
    decoded whole."""
    for chunk in chunks:
        at = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
        end = min(at + chunk.total_compressed_size, size)
        while at < end:
            page = _page(source, at)
            check_block(
                path,
                "a page",
                page.decoded,
                "Write it with fewer rows a page (write_batch_size, data_page_size)",
            )
            at = page.begin + page.stored


def _page(source: _Source, at: int) -> _Page:
    """The page at a byte of a file.

    Its header is Parquet's PageHeader in Thrift's compact protocol: the fields 1, type, 2,
    uncompressed_page_size, 3, compressed_page_size, then a checksum and what depends on the type,
    which is passed over.
    """
    for n_bytes in _HEADER_BYTES:
        source.seek(at)
        data = source.read(n_bytes)
        try:
            fields, end = _struct(data, 0, 0)
        except IndexError:  # it is longer, as with long values among its statistics
            continue
        page = _Page(at + end, fields.get(2, -1), fields.get(3, -1))
        if page.decoded < 0 or page.stored < 0:
            break
        return page
    raise pa.ArrowInvalid(f"what should be a page at byte {at} is none")


_HEADER_BYTES = (1 << 8, 1 << 16, 1 << 24)
_MAX_DEPTH = 8
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _STRUCT = 1, 2, 3, 7, 8, 12


def _struct(data: bytes, at: int, depth: int) -> tuple[dict[int, int], int]:
    """(the integers among a Thrift struct's fields, by number, and the byte after it). IndexError
    where the data ends."""
    if depth > _MAX_DEPTH:
        raise pa.ArrowInvalid("a page's header is nested too deep")
    fields: dict[int, int] = {}
    number = 0
    while head := data[at]:
        kind, at = head & 15, at + 1
        if head >> 4:
            number += head >> 4
        else:
            number, at = _varint(data, at)
            number = number >> 1 ^ -(number & 1)
        if kind in (4, 5, 6):
            value, at = _varint(data, at)
            fields[number] = value >> 1 ^ -(value & 1)
        else:
            at = _past(data, at, kind, depth)
    return fields, at + 1


def _past(data: bytes, at: int, kind: int, depth: int) -> int:
    """The byte after a value that is no integer."""
    if kind in (_TRUE, _FALSE):
        return at
    if kind in (_BYTE, _DOUBLE):
        return at + (1 if kind == _BYTE else 8)
    if kind == _BINARY:
        size, at = _varint(data, at)
        if at + size > len(data):
            raise IndexError
        return at + size
    if kind == _STRUCT:
        return _struct(data, at, depth + 1)[1]
    raise pa.ArrowInvalid("a page's header has a field of an unknown kind")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise pa.ArrowInvalid("a page's header has a number that cannot be")


@contextmanager
def _opened(path: str, size: int) -> Iterator[tuple[_Source, pq.ParquetFile]]:
    options = {
        "pre_buffer": False,
        "buffer_size": _BUFFER_BYTES,
        "page_checksum_verification": True,
    }
    with (
        open_source(path, size) as opened,
        arrow_errors(path, "Parquet file"),
        pq.ParquetFile(source := _Source(opened), **options) as file,
    ):
        yield source, file
