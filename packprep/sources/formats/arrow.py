"""Read Arrow IPC files and streams, as Hugging Face `datasets` writes them.

A split is a record batch. pyarrow can only count the rows before a batch by decoding them all. The
message headers contain the counts, so this module reads the headers itself. The framing is
described in "Serialization and Interprocess Communication" of the Arrow columnar format and in
format/Message.fbs and format/File.fbs. FlatBuffers' "Internals" describes the tables.

A folder that `save_to_disk` of `datasets` wrote contains Arrow IPC streams, and a state.json with
their names.
"""

import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from packprep.errors import SourceError
from packprep.sources.formats.batch import Batch, BatchBuilder, Choice, Keep, Slice, open_source
from packprep.sources.formats.compressed import Decoders
from packprep.sources.formats.fields import Fields
from packprep.sources.formats.flat_ids import size_on_disk
from packprep.sources.formats.table import (
    Column,
    RowSelection,
    arrow_errors,
    check_block,
    find_columns,
    find_field_columns,
    find_group_columns,
    find_token_columns,
    list_lengths,
    note_groups,
    read_lists,
    read_rows,
)
from packprep.storage import is_url

_MAGIC = b"ARROW1"
_CONTINUATION = 0xFFFFFFFF
_SCHEMA, _DICTIONARY_BATCH, _RECORD_BATCH = 1, 2, 3  # Message.fbs, MessageHeader
_MAX_HEADER_BYTES = 1 << 28


class BatchIndex(NamedTuple):
    """The locations and sizes of the record batches in an Arrow file."""

    is_stream: bool
    dictionaries: list[int]  # offset of each dictionary's message
    offsets: list[int]  # offset of each batch's message
    rows: list[int]  # number of rows of each batch
    sizes: list[int]  # size of each batch's message in bytes


def pieces(path: str, size: int, text_key: str, tokens: bool, piece_bytes: int) -> list[int]:
    """Return the size of each record batch in bytes, from the headers of a file or stream."""
    with _opened(path, size) as file:
        return _index(file, size).sizes


def read(
    work_range: Slice,
    text_key: str,
    keep: Keep | None,
    batch_bytes: int,
    decoders: Decoders,
    fields: Fields | None,
) -> Iterator[Batch]:
    """Yield the documents of a work range of a record batch; see `formats.read`."""
    with _opened(work_range.path, work_range.size) as file:
        index = decoders.fact(work_range.path, lambda: _index(file, work_range.size))
        begin, end = work_range.range(index.rows[work_range.piece])
        if begin == end:
            return
        if not is_url(work_range.path):  # At a URL, each buffer would need a request.
            # pyarrow decompresses whole buffers, so their sizes are checked first.
            for offset in (*index.dictionaries, index.offsets[work_range.piece]):
                advice = "write it with fewer rows per batch"
                check_block(
                    work_range.path, "a record batch", _largest_decompressed(file, offset), advice
                )
        # The file is mapped, so only the pages of the needed columns are loaded.
        with (
            pa.PythonFile(file, "r")
            if is_url(work_range.path)
            else pa.memory_map(work_range.path) as source
        ):
            all_columns = _columns(work_range, source, index, text_key, fields, keep)
            # A Choice needs all rows of the batch before the work range.
            low = 0 if isinstance(keep, Choice) else begin
            columns, chosen_by = (
                {key: column.slice(low, end - low) for key, column in columns_of_kind.items()}
                for columns_of_kind in all_columns
            )
            batch = BatchBuilder(work_range.file)
            first_row = sum(index.rows[: work_range.piece])
            numbers = np.arange(first_row + low, first_row + end, dtype=np.int64)
            selection = RowSelection(numbers, keep, first_row + begin, chosen_by)
            if work_range.format == "arrow_tokens":
                yield from read_lists(work_range.file, columns, text_key, selection, batch_bytes)
                return
            columns = note_groups(batch, work_range, columns, numbers)
            yield from read_rows(batch, columns, text_key, fields, selection, batch_bytes)
            yield from batch.take()


def schema_of(path: str) -> pa.Schema:
    """Return the schema of a file or stream.

    Raises:
        SourceError: If the file is missing or damaged.
    """
    with _opened(path, size_on_disk(path)) as file:
        index = _index(file, size_on_disk(path))
        with pa.memory_map(path) as source:
            return _schema(source, index)


def record_batches(path: str, names: Sequence[str], values: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file or stream in batches.

    Args:
        path: Path of the file.
        names: Columns to read. The first one contains lists.
        values: Approximate number of values per batch in the first column.

    Raises:
        SourceError: If the file is missing or damaged.
    """
    size = size_on_disk(path)
    with _opened(path, size) as file:
        index = _index(file, size)
        for piece, n_rows in enumerate(index.rows):
            for offset in (*index.dictionaries, index.offsets[piece]):
                advice = "write it with fewer rows per batch"
                check_block(path, "a record batch", _largest_decompressed(file, offset), advice)
            # A new mapping for each batch frees the pages of the batches before.
            with pa.memory_map(path) as source:
                schema = _schema(source, index)
                column_indices = [schema.get_field_index(name) for name in names]
                arrays = list(
                    map(_validated, _arrays(piece, source, index, schema, column_indices))
                )
                # `count` rows have about `values` values, because lists have their mean length.
                count = max(1, values * n_rows // max(1, int(list_lengths(arrays[0]).sum())))
                for begin in range(0, n_rows, count):
                    columns_of_slice = [array.slice(begin, count) for array in arrays]
                    yield pa.RecordBatch.from_arrays(columns_of_slice, names=list(names))


def numbers(work_range: Slice, decoders: Decoders) -> range:
    """Return the row numbers of the whole record batch that a work range belongs to.

    Row numbers count from the start of the file.
    """
    rows = rows_of_splits(work_range, decoders)
    first_row = sum(rows[: work_range.piece])
    return range(first_row, first_row + rows[work_range.piece])


def rows_of_splits(work_range: Slice, decoders: Decoders) -> list[int]:
    """Return the number of rows of each record batch of the file of a work range."""
    with _opened(work_range.path, work_range.size) as file:
        return decoders.fact(work_range.path, lambda: _index(file, work_range.size)).rows


def bytes_per_token(work_range: Slice, text_key: str) -> float | None:
    """Return the bytes per token id in the record batch that a work range belongs to.

    Return None if the record batch contains no token ids.
    """
    with _opened(work_range.path, work_range.size) as file:
        index = _index(file, work_range.size)
        with (
            pa.PythonFile(file, "r")
            if is_url(work_range.path)
            else pa.memory_map(work_range.path) as source
        ):
            columns, _ = _columns(work_range, source, index, text_key, None, None)
            lengths = list_lengths(columns[text_key])
    begin = index.offsets[work_range.piece]
    end = min((offset for offset in index.offsets if offset > begin), default=work_range.size)
    return (end - begin) / int(lengths.sum()) if lengths.any() else None


def _columns(
    work_range: Slice,
    source: pa.NativeFile,
    index: BatchIndex,
    text_key: str,
    fields: Fields | None,
    keep: Keep | None,
) -> tuple[dict[str, pa.Array], dict[str, pa.Array]]:
    """Return values of the record batch that a work range belongs to.

    The first dict maps the keys that `find_columns` or `find_token_columns` selects to their
    values. The second dict maps the fields that `keep` reads to their values.
    """
    schema = _schema(source, index)
    if work_range.format == "arrow_tokens":
        columns = find_token_columns(work_range.path, schema, text_key, fields)
    else:

        def sizes_of(keys: Sequence[str]) -> list[int]:
            places = [
                find_columns(work_range.path, schema, key, None, sizes_of)[key] for key in keys
            ]
            column_arrays = [
                _arrays(work_range.piece, source, index, schema, [place.number])[0]
                for place in places
            ]
            return [
                place.of(_validated(array)).nbytes
                for place, array in zip(places, column_arrays, strict=True)
            ]

        columns = find_columns(work_range.path, schema, text_key, fields, sizes_of)
        columns |= find_group_columns(work_range.path, schema, work_range.grouping)
    chosen_by = find_field_columns(work_range.path, schema, keep)
    # A column is read once, even if several keys are inside it.
    column_indices = sorted({column.number for column in (*columns.values(), *chosen_by.values())})
    arrays = [
        _validated(array)
        for array in _arrays(work_range.piece, source, index, schema, column_indices)
    ]

    def values_of(column: Column) -> pa.Array:
        return column.of(arrays[column_indices.index(column.number)])

    values, field_values = (
        {key: values_of(column) for key, column in columns_of_kind.items()}
        for columns_of_kind in (columns, chosen_by)
    )
    return values, field_values


def _schema(source: pa.NativeFile, index: BatchIndex) -> pa.Schema:
    source.seek(0)  # At a URL, this is the same file object that the index was read from.
    return (pa.ipc.open_stream if index.is_stream else pa.ipc.open_file)(source).schema


def _arrays(
    piece: int,
    source: pa.NativeFile,
    index: BatchIndex,
    schema: pa.Schema,
    column_indices: Sequence[int],
) -> list[pa.Array]:
    """Return the columns with the indices in `column_indices`, from record batch number `piece`."""
    if index.is_stream and not index.dictionaries:
        source.seek(index.offsets[piece])
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(source), schema)
        return [batch.column(i) for i in column_indices]
    only_wanted = pa.ipc.IpcReadOptions(included_fields=list(column_indices), use_threads=False)
    if not index.is_stream:
        return list(pa.ipc.open_file(source, options=only_wanted).get_batch(piece).columns)
    # The batch may use the dictionaries before it, so all preceding messages are read. Their
    # data is not copied.
    source.seek(0)
    reader = pa.ipc.open_stream(source, options=only_wanted)
    for _ in range(piece):
        reader.read_next_batch()
    return list(reader.read_next_batch().columns)


def _validated(column: pa.Array) -> pa.Array:
    """Return a column after full validation. A column of strings is returned as binary data.

    The validation raises an error for damaged data, which could otherwise lead to reads outside the
    buffers.
    """
    if pa.types.is_dictionary(column.type):
        return pa.DictionaryArray.from_arrays(column.indices, _validated(column.dictionary))
    as_bytes = {
        pa.string(): pa.binary(),
        pa.large_string(): pa.large_binary(),
        pa.string_view(): pa.binary_view(),
    }
    # Full validation of a string column would refuse all texts if one has invalid UTF-8.
    if column.type in as_bytes:
        column = column.view(as_bytes[column.type])
    column.validate(full=True)
    return column


@contextmanager
def _opened(path: str, size: int) -> Iterator[BinaryIO]:
    with open_source(path, size) as file, arrow_errors(path, "Arrow IPC file or stream"):
        try:
            yield file
        except (struct.error, IndexError, StopIteration) as error:
            raise pa.ArrowInvalid("it ends too early, or its headers are damaged") from error


def _index(file: BinaryIO, size: int) -> BatchIndex:
    if _read(file, 0, min(size, len(_MAGIC))) != _MAGIC:
        return _index_of_stream(file, size)
    # A file ends with the footer, the footer's size as i32, and the magic.
    (footer_bytes,) = struct.unpack("<i", _read(file, size - 10, 4))
    footer = _read(file, size - 10 - footer_bytes, footer_bytes)
    root = _root(footer)
    # In a Footer, field 2 has the dictionaries and field 3 the record batches.
    offsets = _block_offsets(footer, _field(footer, root, 3))
    headers = [_read_header(file, offset) for offset in offsets]
    if any(header is None or header.kind != _RECORD_BATCH for header in headers):
        raise pa.ArrowInvalid("its footer does not point to record batches")
    dictionaries = _block_offsets(footer, _field(footer, root, 2))
    batches = [header for header in headers if header]
    sizes = [
        min(header.end, size) - offset for header, offset in zip(batches, offsets, strict=True)
    ]
    return BatchIndex(False, dictionaries, offsets, [header.rows for header in batches], sizes)


def _index_of_stream(file: BinaryIO, size: int) -> BatchIndex:
    offsets, rows, sizes, dictionaries = [], [], [], []
    offset = 0
    while offset < size and (header := _read_header(file, offset)):
        if offset == 0 and header.kind != _SCHEMA:
            raise pa.ArrowInvalid("it does not start with a schema")
        if header.kind == _RECORD_BATCH:
            offsets.append(offset)
            rows.append(header.rows)
            sizes.append(header.end - offset)
        elif header.kind == _DICTIONARY_BATCH:
            dictionaries.append(offset)
        offset = header.end
        if offset > size:
            raise pa.ArrowInvalid(
                f"a message ends at byte {offset}, but the file has only {size}: it is truncated"
            )
    if offset == 0:
        raise pa.ArrowInvalid("it is empty")
    return BatchIndex(True, dictionaries, offsets, rows, sizes)


class _Header(NamedTuple):
    kind: int
    rows: int  # rows of a record batch, 0 for other messages
    end: int  # byte after the message's body


def _read_header(file: BinaryIO, offset: int) -> _Header | None:
    """Return the header of the message at byte `offset`, or None at the end-of-stream mark."""
    message = _read_message(file, offset)
    if message is None:
        return None
    data, body = message
    root = _root(data)
    # In a Message, field 1 is the header's type, field 2 the header, field 3 the body's size.
    kind_at, header_at, body_at = (_field(data, root, k) for k in (1, 2, 3))
    kind = data[kind_at] if kind_at else 0
    body_bytes = struct.unpack_from("<q", data, body_at)[0] if body_at else 0
    rows = 0
    # Field 0 of a record batch is its number of rows.
    if kind == _RECORD_BATCH and header_at:
        rows_at = _field(data, _table(data, header_at), 0)
        rows = struct.unpack_from("<q", data, rows_at)[0] if rows_at else 0
    if body_bytes < 0 or rows < 0:
        raise pa.ArrowInvalid(f"the data at byte {offset} is not a message")
    return _Header(kind, rows, body + body_bytes)


def _largest_decompressed(file: BinaryIO, message_offset: int) -> int:
    """Return the decompressed size of the largest compressed buffer of a message, in bytes.

    The message is a record batch or a dictionary. Each of its buffers starts with its decompressed
    size, or with -1 if the buffer is not compressed. The result is 0 if no buffer is compressed.
    """
    message = _read_message(file, message_offset)
    if message is None:
        return 0
    data, body = message
    root = _root(data)
    kind_at, header_at = _field(data, root, 1), _field(data, root, 2)
    if not (kind_at and header_at):
        return 0
    batch = _table(data, header_at)
    # Field 1 of a dictionary is a record batch with the dictionary's values.
    if data[kind_at] == _DICTIONARY_BATCH:
        batch = _table(data, _field(data, batch, 1))
    largest, buffers = 0, _field(data, batch, 2)
    # Field 3 is the compression. The buffers are a vector of structs of 16 bytes.
    if _field(data, batch, 3) and buffers:
        buffers = _table(data, buffers)
        for i in range(struct.unpack_from("<I", data, buffers)[0]):
            offset, stored = struct.unpack_from("<qq", data, buffers + 4 + 16 * i)
            if stored:
                largest = max(largest, *struct.unpack("<q", _read(file, body + offset, 8)))
    return largest


def _read_message(file: BinaryIO, offset: int) -> tuple[bytes, int] | None:
    """Return (header bytes, file offset of the body) of the message at byte `offset`.

    Return None if the end-of-stream mark is at byte `offset`.
    """
    mark, n_bytes = struct.unpack("<II", _read(file, offset, 8))
    begin = offset + 8
    if mark != _CONTINUATION:  # Format versions before 0.15 have no mark.
        n_bytes, begin = mark, offset + 4
    if n_bytes == 0:
        return None
    if n_bytes > _MAX_HEADER_BYTES:
        raise pa.ArrowInvalid(f"the data at byte {offset} is not a message")
    return _read(file, begin, n_bytes), begin + n_bytes


def _block_offsets(footer: bytes, offset: int) -> list[int]:
    """Return the offset of each message in the footer's vector of `Block` structs.

    The FlatBuffers offset at `offset` refers to the vector. If `offset` is 0, the footer has no
    such vector, and the result is [].
    """
    if not offset:
        return []
    offset += struct.unpack_from("<I", footer, offset)[0]
    (count,) = struct.unpack_from("<I", footer, offset)
    return [struct.unpack_from("<q", footer, offset + 4 + 24 * i)[0] for i in range(count)]


def _table(data: bytes, offset: int) -> int:
    """Return the target of the FlatBuffers offset at index `offset` of `data`.

    The target is a table or a vector, and the result is its index in `data`.
    """
    return offset + int(struct.unpack_from("<I", data, offset)[0])


def _root(data: bytes) -> int:
    return int(struct.unpack_from("<I", data, 0)[0])


def _field(data: bytes, table: int, k: int) -> int:
    """Return the index in `data` of field `k` of the FlatBuffers table at index `table`.

    Return 0 if the table does not have the field.
    """
    vtable = table - struct.unpack_from("<i", data, table)[0]
    (vtable_bytes,) = struct.unpack_from("<H", data, vtable)
    if 4 + 2 * k >= vtable_bytes:
        return 0
    (offset,) = struct.unpack_from("<H", data, vtable + 4 + 2 * k)
    return table + offset if offset else 0


def _read(file: BinaryIO, offset: int, n_bytes: int) -> bytes:
    if offset < 0 or n_bytes < 0:
        raise pa.ArrowInvalid("it ends too early")
    file.seek(offset)
    data = file.read(n_bytes)
    if len(data) != n_bytes:
        raise pa.ArrowInvalid("it ends too early")
    return data


_MOST_BYTES = 64 << 20  # maximum size of a state.json


def saved_files(folder: str) -> list[str]:
    """Return the sorted names of the Arrow files in the folder of a saved Hugging Face dataset.

    Raises:
        SourceError: If state.json is damaged or lists a missing file. Also if the dataset has an
            indices mapping, because the dataset then has other rows than its files.
    """
    path = Path(folder) / "state.json"
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        state = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(
            f"{path}: cannot be read: {error}\n"
            "hint: save the dataset again, or name its .arrow files"
        ) from error
    if not isinstance(state, dict) or not isinstance(state.get("_data_files"), list):
        raise SourceError(
            f"{path}: it lists no _data_files\n"
            "hint: save the dataset again, or name its .arrow files"
        )
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise SourceError(
            f"{path}: the dataset has an indices mapping (_indices_files), which selects other"
            " rows than its files\n"
            "hint: save it again with save_to_disk, after flatten_indices()"
        )
    return sorted(_name_of(path, entry) for entry in state["_data_files"])


def _name_of(path: Path, entry: Any) -> str:
    name = entry.get("filename") if isinstance(entry, dict) else None
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise SourceError(
            f"{path}: {name!r} is not the name of a file in its folder\n"
            "hint: save the dataset again"
        )
    if not (path.parent / name).is_file():
        raise SourceError(
            f"{path.parent / name}: the file is missing, but state.json lists it\n"
            "hint: restore the file"
        )
    return name
