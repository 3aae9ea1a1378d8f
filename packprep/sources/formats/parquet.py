"""Read Parquet files. A split is a row group."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packprep.sources.expressions import Range
from packprep.sources.formats.batch import (
    MESSAGES,
    TOKEN_TEXT_BYTES,
    Batch,
    BatchBuilder,
    Choice,
    Keep,
    Slice,
    by_fields,
    open_source,
)
from packprep.sources.formats.column_ranges import column_range
from packprep.sources.formats.compressed import Decoders
from packprep.sources.formats.fields import Fields
from packprep.sources.formats.flat_ids import size_on_disk
from packprep.sources.formats.table import (
    REPEATED_BYTES,
    SLICE_LISTS,
    SLICE_ROWS,
    Column,
    RowSelection,
    arrow_errors,
    check_block,
    find_columns,
    find_field_columns,
    find_group_columns,
    find_token_columns,
    mask_of,
    note_groups,
    read_lists,
    read_rows,
    rows_of,
    without_views,
)
from packprep.sources.formats.token_rows import COLUMNS
from packprep.sources.passes import ByFields
from packprep.storage import is_url

# Bytes of a column that are buffered. Without this limit, pyarrow reads a row group's whole column.
_BUFFER_BYTES = 1 << 20
_COUNTED_ROWS = 1 << 20  # rows of a left out row group that are counted at once
_MOST_SKIPPED_ROWS = 1 << 28
"""Maximum rows of a row group that is left out by its statistics. A footer can name any number."""


def pieces(path: str, size: int, text_key: str, tokens: bool, piece_bytes: int) -> list[int]:
    """Return the approximate content size of each row group in bytes, from the footer.

    For a file of texts, this is the uncompressed size of the text and messages columns, or of all
    columns if the file has neither. For a file of token ids (`tokens`), it is TOKEN_TEXT_BYTES for
    each id.
    """
    names = [*COLUMNS, text_key] if tokens else [MESSAGES, text_key]
    with _opened(path, size) as (source, file):
        content_sizes = []
        groups = _groups(file, file.num_row_groups)
        for group, chunks_of_group in zip(
            groups, _chunks(source, file, range(len(groups)), names), strict=True
        ):
            of_ids = TOKEN_TEXT_BYTES * sum(c.num_values for c in chunks_of_group)
            content_sizes.append(
                of_ids
                if tokens
                else sum(c.total_uncompressed_size for c in chunks_of_group)
                or group.total_byte_size
            )
        if any(not 0 <= n_bytes < 1 << 47 for n_bytes in content_sizes):
            raise pa.ArrowInvalid("its footer gives impossible sizes")
        return content_sizes


def bytes_per_token(work_range: Slice, text_key: str) -> float:
    """Return TOKEN_TEXT_BYTES, because `pieces` counts each token id as this many bytes."""
    return float(TOKEN_TEXT_BYTES)


def read(
    work_range: Slice,
    text_key: str,
    keep: Keep | None,
    batch_bytes: int,
    decoders: Decoders,
    fields: Fields | None,
) -> Iterator[Batch]:
    """Yield the documents of a work range of a row group; see `formats.read`."""
    footer = _footer(work_range, decoders)
    with _opened(work_range.path, work_range.size, footer.metadata) as (source, file):
        tokens = work_range.format == "parquet_tokens"
        if tokens:
            columns = find_token_columns(work_range.path, file.schema_arrow, text_key, fields)
        else:

            def sizes_of(keys: Sequence[str]) -> list[int]:
                chunks = [next(_chunks(source, file, [work_range.piece], [key])) for key in keys]
                return [sum(chunk.total_uncompressed_size for chunk in of_key) for of_key in chunks]

            columns = find_columns(work_range.path, file.schema_arrow, text_key, fields, sizes_of)
            columns |= find_group_columns(work_range.path, file.schema_arrow, work_range.grouping)
        chosen_by = find_field_columns(work_range.path, file.schema_arrow, keep)
        # `begin` and `end` count rows of the group. `first_row` is the number of the group's first
        # row in the file.
        first_row, n_rows = sum(footer.rows[: work_range.piece]), footer.rows[work_range.piece]
        begin, end = work_range.range(n_rows)
        if begin == end:
            return
        group = _Group(work_range, source, file, first_row, n_rows, batch_bytes)
        chosen = by_fields(keep)
        # The footer's statistics may prove that no row is taken.
        if chosen is not None and not chosen.passes.may_use(group.ranges(chosen_by)):
            for row in range(begin, end, _COUNTED_ROWS):
                rows = np.arange(first_row + row, first_row + min(row + _COUNTED_ROWS, end))
                chosen.leave_out(work_range.file, rows)
            return
        if isinstance(keep, ByFields):
            # The other columns are not read if no row is left.
            wanted_rows = group.wanted(keep, chosen_by, begin, end)
            values_of_rows, keep = group.rows_at(wanted_rows, columns, tokens), None
        else:
            low = 0 if isinstance(keep, Choice) else begin
            values_of_rows = group.rows(columns, chosen_by, low, end, tokens)
        batch = BatchBuilder(work_range.file)
        for numbers, values, by in values_of_rows:
            selection = RowSelection(numbers, keep, first_row + begin, by)
            if tokens:
                yield from read_lists(work_range.file, values, text_key, selection, batch_bytes)
            else:
                values = note_groups(batch, work_range, values, numbers)
                yield from read_rows(batch, values, text_key, fields, selection, batch_bytes)
        yield from batch.take()


@dataclass
class _Group:
    """An open row group, and the settings for reading it.

    Attributes:
        part: A work range of the row group.
        source: The opened file.
        file: The opened file, as pyarrow reads it.
        first: Row number in the file of the group's first row.
        n_rows: Number of rows of the group, as the footer says.
        batch_bytes: Approximate content size of the rows that are read at once, in bytes.
    """

    part: Slice
    source: "_Source"
    file: pq.ParquetFile
    first: int
    n_rows: int
    batch_bytes: int
    _known: dict[tuple[str, ...], list[pq.ColumnChunkMetaData]] = field(default_factory=dict)

    def rows(
        self,
        columns: Mapping[str, Column],
        chosen_by: Mapping[str, Column],
        begin: int,
        end: int,
        tokens: bool,
    ) -> Iterator[tuple[np.ndarray, dict[str, pa.Array], dict[str, pa.Array]]]:
        """Yield (row numbers, values, fields) of consecutive rows of the group.

        The row numbers, int64[n], count from the start of the file.

        Args:
            columns: The columns of `values`.
            chosen_by: The columns of `fields`, which a selector reads.
            begin: First row in the group.
            end: Row in the group after the last row.
            tokens: Whether `columns` has lists of token ids.
        """
        row = self.first + begin
        batches = self._batches((*columns.values(), *chosen_by.values()), begin, end, tokens)
        for table in _tables(batches, self.batch_bytes):
            values, fields = (
                {
                    key: of_key.combine_chunks()
                    for key, of_key in self._values(table, columns_of_kind).items()
                }
                for columns_of_kind in (columns, chosen_by)
            )
            yield np.arange(row, row + table.num_rows, dtype=np.int64), values, fields
            row += table.num_rows

    def rows_at(
        self, wanted_rows: np.ndarray, columns: Mapping[str, Column], tokens: bool
    ) -> Iterator[tuple[np.ndarray, dict[str, pa.Array], dict[str, pa.Array]]]:
        """Yield (row numbers, values, {}) of some rows of the group, as `rows`.

        `wanted_rows`, int64[k], has the ascending row numbers.
        """
        if not len(wanted_rows):
            return
        row, end = int(wanted_rows[0]), int(wanted_rows[-1]) + 1
        batches = self._batches(columns.values(), row - self.first, end - self.first, tokens)
        for table in _tables(batches, self.batch_bytes):
            # `wanted_rows` ascends, so the wanted rows of a table are a range of it.
            low, high = np.searchsorted(wanted_rows, [row, row + table.num_rows])
            is_wanted = np.zeros(table.num_rows, np.bool_)
            is_wanted[wanted_rows[low:high] - row] = True
            row, mask = row + table.num_rows, mask_of(is_wanted)
            values = {
                key: without_views(of_key).filter(mask).combine_chunks()
                for key, of_key in self._values(table, columns).items()
            }
            yield wanted_rows[low:high], values, {}

    def _batches(
        self, columns: Iterable[Column], begin: int, end: int, tokens: bool
    ) -> Iterator[pa.RecordBatch]:
        """Yield consecutive rows of the group. The arguments are as in `rows`."""
        names, row = self._names(columns), 0
        rows_at_once = _rows_at_once(
            self.source, self._chunks(names), self.n_rows, self.batch_bytes, tokens
        )
        for rows in self.file.iter_batches(
            rows_at_once, row_groups=[self.part.piece], columns=names, use_threads=False
        ):
            # pyarrow reads a group from its first row, so cut each batch to the wanted rows.
            low, high = max(begin - row, 0), min(end - row, rows.num_rows)
            if low < high:
                yield rows.slice(low, high - low)
            row += rows.num_rows
            if row >= end:
                break
        # Without this check, a wrong footer would lose rows without a message.
        if row < end:
            raise pa.ArrowInvalid(
                f"row group {self.part.piece} has {row} rows, but its footer says {self.n_rows}"
            )

    def _values(self, rows: pa.RecordBatch | pa.Table, columns: Mapping[str, Column]) -> Any:
        """Return the values of each key in `columns`, as arrays or as chunked arrays."""
        names = self.file.schema_arrow.names
        return {key: c.of(rows.column(names[c.number])) for key, c in columns.items()}

    def ranges(self, chosen_by: Mapping[str, Column]) -> dict[str, Range]:
        """Return the range of each field that a selector reads, as the footer's statistics say.

        Damaged statistics would abort the process, but pyarrow's reader raises an exception for
        them. Therefore the reader reads one row first.
        """
        schema = self.file.schema_arrow
        if self.n_rows > _MOST_SKIPPED_ROWS:
            return {}
        names = self._names(chosen_by.values())
        self._chunks(names)
        groups = [self.part.piece]
        next(self.file.iter_batches(1, row_groups=groups, columns=names, use_threads=False), None)
        return {
            name: column_range(
                self._chunks(self._names([column])),
                column.type_in(schema),
                bool(column.inside),
                self.n_rows,
            )
            for name, column in chosen_by.items()
        }

    def wanted(
        self, keep: ByFields, chosen_by: Mapping[str, Column], begin: int, end: int
    ) -> np.ndarray:
        """Return the row numbers in the file of the rows that a selector takes, int64[k].

        The other arguments are as in `rows`. Only the columns in `chosen_by` are read.
        """
        wanted_rows = [np.zeros(0, np.int64)]
        for positions, _, fields in self.rows({}, chosen_by, begin, end, False):
            read_fields = rows_of(fields, 0, len(positions))
            is_own = np.ones(len(positions), np.bool_)
            wanted_rows.append(positions[keep(self.part.file, positions, read_fields, is_own)])
        return np.concatenate(wanted_rows)

    def _names(self, columns: Iterable[Column]) -> list[str]:
        schema = self.file.schema_arrow
        return list(dict.fromkeys(column.name(schema) for column in columns))

    def _chunks(self, names: Sequence[str]) -> list[pq.ColumnChunkMetaData]:
        """Return the footer's metadata of some columns, after a check of their pages."""
        part, key = self.part, tuple(names)
        if key not in self._known:
            (self._known[key],) = _chunks(self.source, self.file, [part.piece], names)
            if not is_url(part.path):  # At a URL, each page would need a request.
                _check_pages(part.path, self.source, part.size, self._known[key])
        return self._known[key]


def _tables(batches: Iterable[pa.RecordBatch], n_bytes: int) -> Iterator[pa.Table]:
    """Yield consecutive batches together, as tables of at least `n_bytes`, or less at the end."""
    held, size = list[pa.RecordBatch](), 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        if size >= n_bytes:
            yield pa.Table.from_batches(held)
            held, size = [], 0
    if held:
        yield pa.Table.from_batches(held)


def schema_of(path: str) -> pa.Schema:
    """Return the schema of a file.

    Raises:
        SourceError: If the file is missing or damaged.
    """
    with _opened(path, size_on_disk(path)) as (_, file):
        return file.schema_arrow


def record_batches(path: str, names: Sequence[str], values: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file in batches.

    Args:
        path: Path of the file.
        names: Columns to read.
        values: Approximate number of values per batch in the longest of these columns.

    Raises:
        SourceError: If the file is missing or damaged.
    """
    size = size_on_disk(path)
    with _opened(path, size) as (source, file):
        groups = _groups(file, file.num_row_groups)
        for number, chunks in enumerate(_chunks(source, file, range(len(groups)), names)):
            _check_pages(path, source, size, chunks)
            longest = max((chunk.num_values for chunk in chunks), default=0)
            rows = max(1, values * groups[number].num_rows // max(1, longest))
            yield from file.iter_batches(rows, row_groups=[number], columns=names)


def numbers(work_range: Slice, decoders: Decoders) -> range:
    """Return the row numbers of the whole row group that a work range belongs to.

    Row numbers count from the start of the file.
    """
    rows = rows_of_splits(work_range, decoders)
    first_row = sum(rows[: work_range.piece])
    return range(first_row, first_row + rows[work_range.piece])


def rows_of_splits(work_range: Slice, decoders: Decoders) -> list[int]:
    """Return the number of rows of each row group of the file of a work range."""
    return _footer(work_range, decoders).rows


class _Footer(NamedTuple):
    """The footer of a file, and the number of rows of each row group."""

    metadata: pq.FileMetaData
    rows: list[int]


def _footer(part: Slice, decoders: Decoders) -> _Footer:
    """Return the footer of the file of a work range. It is parsed once for many work ranges."""

    def read_footer() -> _Footer:
        with _opened(part.path, part.size) as (_, file):
            groups = _groups(file, file.num_row_groups)
            return _Footer(file.metadata, [group.num_rows for group in groups])

    return decoders.fact(part.path, read_footer)


def _groups(file: pq.ParquetFile, count: int) -> list[pq.RowGroupMetaData]:
    """Return the first `count` row groups of a footer, after a check of their row counts.

    Raises:
        ArrowInvalid: If a row count is negative or their sum is impossibly large.
    """
    groups = [file.metadata.row_group(i) for i in range(count)]
    if (
        any(group.num_rows < 0 for group in groups)
        or sum(group.num_rows for group in groups) >= 1 << 62
    ):
        raise pa.ArrowInvalid("its footer gives impossible numbers of rows")
    return groups


def _rows_at_once(
    source: "_Source",
    chunks: Sequence[pq.ColumnChunkMetaData],
    n_rows: int,
    batch_bytes: int,
    tokens: bool,
) -> int:
    """Return the number of rows to read at once.

    These rows have about `batch_bytes` of content. The number is smaller if the texts are in a
    dictionary: each row could then be the dictionary's longest text, and all rows must fit in
    REPEATED_BYTES.
    """
    n_rows = max(1, n_rows)
    if tokens:  # Repeated ids compress to a few bytes, so the ids are counted instead.
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
    """For each row group in `groups`, yield a list with the footer's metadata of some columns.

    These are the leaf columns at or below the columns in `names`. For damaged or encrypted
    metadata, pyarrow's RowGroupMetaData aborts the process, but pyarrow's reader raises an
    exception. Therefore the reader is called first.
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
    """An attempt to read page data while only the footer may be read."""


class _Source:
    """A file object that pyarrow's ParquetFile reads from.

    `only_footer` is set to True after the footer was read. While it is True, `read` raises
    _NotInFooter.
    """

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
        """Do nothing. The code that opened the underlying file closes it."""


class _Page(NamedTuple):
    """The location and sizes of a column's page, from the page's header."""

    begin: int  # file offset of the byte after the header
    decoded: int  # uncompressed bytes; no value of a dictionary page is longer
    stored: int  # compressed bytes


def _check_pages(
    path: str, source: _Source, size: int, chunks: Sequence[pq.ColumnChunkMetaData]
) -> None:
    """Check that no page of the column chunks in `chunks` is too large to decode.

    The check is necessary because pyarrow always decodes a complete page.

    Raises:
        SourceError: If a page is too large.
    """
    for chunk in chunks:
        offset = (
            chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
        )
        end = min(offset + chunk.total_compressed_size, size)
        while offset < end:
            page = _page(source, offset)
            check_block(
                path,
                "a page",
                page.decoded,
                "write it with fewer rows per page (write_batch_size, data_page_size)",
            )
            offset = page.begin + page.stored


def _page(source: _Source, offset: int) -> _Page:
    """Read the page header at byte `offset` of a file, and return the page's location and sizes.

    The header is Parquet's PageHeader in Thrift's compact protocol. Its fields are 1 (type), 2
    (uncompressed_page_size) and 3 (compressed_page_size). The fields after them are skipped: a
    checksum, and fields that depend on the type.
    """
    for n_bytes in _HEADER_BYTES:
        source.seek(offset)
        data = source.read(n_bytes)
        try:
            fields, end = _struct(data, 0, 0)
        except IndexError:  # The header is longer, for example because of long statistics.
            continue
        page = _Page(offset + end, fields.get(2, -1), fields.get(3, -1))
        if page.decoded < 0 or page.stored < 0:
            break
        return page
    raise pa.ArrowInvalid(f"the data at byte {offset} is not a page")


_HEADER_BYTES = (1 << 8, 1 << 16, 1 << 24)
_MAX_DEPTH = 8
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _STRUCT = 1, 2, 3, 7, 8, 12


def _struct(data: bytes, offset: int, depth: int) -> tuple[dict[int, int], int]:
    """Return (fields, end) of the Thrift struct at `offset`.

    `fields` maps the number of each integer field to its value, for example {1: 0, 2: 4096}. `end`
    is the offset of the byte after the struct.

    Raises:
        IndexError: If the data ends inside the struct.
    """
    if depth > _MAX_DEPTH:
        raise pa.ArrowInvalid("a page's header is nested too deeply")
    fields: dict[int, int] = {}
    number = 0
    while head := data[offset]:
        # The low half of the byte is the type, the high half the difference to the last number.
        kind, offset = head & 15, offset + 1
        if head >> 4:
            number += head >> 4
        else:
            # A difference of 0 means that the number follows, in zigzag form.
            number, offset = _varint(data, offset)
            number = number >> 1 ^ -(number & 1)
        if kind in (4, 5, 6):
            value, offset = _varint(data, offset)
            fields[number] = value >> 1 ^ -(value & 1)
        else:
            offset = _past(data, offset, kind, depth)
    return fields, offset + 1


def _past(data: bytes, offset: int, kind: int, depth: int) -> int:
    """Return the offset of the byte after a value that starts at `offset`.

    `kind` is the Thrift type of the value, but not one of the integer types.
    """
    if kind in (_TRUE, _FALSE):
        return offset
    if kind in (_BYTE, _DOUBLE):
        return offset + (1 if kind == _BYTE else 8)
    if kind == _BINARY:
        size, offset = _varint(data, offset)
        if offset + size > len(data):
            raise IndexError
        return offset + size
    if kind == _STRUCT:
        return _struct(data, offset, depth + 1)[1]
    raise pa.ArrowInvalid("a page's header has a field of an unknown type")


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[offset]
        value |= (byte & 127) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 128:
            return value, offset
        if shift > 63:
            raise pa.ArrowInvalid("a page's header has an impossible number")


@contextmanager
def _opened(
    path: str, size: int, metadata: pq.FileMetaData | None = None
) -> Iterator[tuple[_Source, pq.ParquetFile]]:
    options = {
        "pre_buffer": False,
        "buffer_size": _BUFFER_BYTES,
        "page_checksum_verification": True,
    }
    with (
        open_source(path, size) as opened,
        arrow_errors(path, "Parquet file"),
        pq.ParquetFile(source := _Source(opened), metadata=metadata, **options) as file,
    ):
        yield source, file
