"""What a shard's documents say: files read by the plainest means there are."""

import json
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from packprep.errors import SourceError
from packprep.twin import pieces
from packprep.twin.pieces import PIECE_BYTES, Extent

MAX_BYTES = 32 * 2**20
MAX_DEPTH = 256
BOM = b"\xef\xbb\xbf"
SPANS, MESSAGES = "loss_spans", "messages"


class Text(NamedTuple):
    """A document's text, and what it says of its training: as the fields of the same names of a rendered conversation."""

    text: str
    spans: Any = None  # ranges of characters that are trained; None: it says nothing
    boundaries: Any = ()
    system_end: int = 0
    chat: bool = False
    strings: Any = ()


class TextReader(NamedTuple):
    """How documents are read.

    marks: whether loss_spans and messages are looked at
    conversation: messages → a record with the fields of `Text`, or a tuple where they are rejected
    """

    marks: bool
    conversation: Callable[[Any], Any]


def documents(
    source: dict[str, Any], extent: Extent, reader: TextReader, wanted: Callable[[int], bool]
) -> Iterator[tuple[int, Text]]:
    """(position, text) of the wanted documents of an extent that can be used, in order. SourceError for a file that cannot
    be read or has another size than planned."""
    name, size, _ = source["files"][extent.file]
    path = os.path.join(source["prefix"], name)
    if "://" in path:
        raise SourceError(f"{path}: the twin reads local files alone; copy the source and say --source NAME=FOLDER")
    try:
        if os.path.getsize(path) != size:
            raise SourceError(f"{path} has {os.path.getsize(path)} bytes and had {size} when the build was planned")
        format, compression = pieces.format_of(source, name)
        if format == "jsonl":
            found = _lines(path, size, compression, source["step_bytes"], extent)
            for position, line in found:
                if wanted(position) and (text := _text_of_line(line, source["text_key"], reader)) is not None:
                    yield position, text
        elif format == "text":
            if wanted(0) and (data := _text_of_bytes(_whole(path, compression))) is not None:
                yield 0, Text(data.removeprefix("\ufeff"))
        else:
            yield from _rows(path, format, extent, source["text_key"], reader, wanted)
    except OSError as error:
        raise SourceError(f"{path}: {error}") from error


def sizes(source: dict[str, Any], file: int, part: int, reader: TextReader) -> list[tuple[int, int]]:
    """(position, size) of all documents of a part of a file: bytes of a line, a text or a text file; of messages, how many."""
    name, size, _ = source["files"][file]
    path, whole = os.path.join(source["prefix"], name), Extent(file, part, 0, 0, 1, 1)
    format, compression = pieces.format_of(source, name)
    if format == "text":
        return [(0, size)]
    if format == "jsonl":
        lines = _lines(path, size, compression, source["step_bytes"], whole)
        return [(position, MAX_BYTES + 1 if line is None else len(line)) for position, line in lines]
    found = []
    for position, record in _records(path, format, whole, source["text_key"], reader, lambda position: True):
        text, messages = record.get(source["text_key"]), record.get(MESSAGES)
        found.append((position, len(text if text is not None else messages if isinstance(messages, list) else [])))
    return found


def _lines(
    path: str, size: int, compression: str, step_bytes: int, extent: Extent
) -> Iterator[tuple[int, bytes | None]]:
    """(position, line) of the lines that begin in the extent and are not blank; None for one that is too large."""
    found = _compressed_lines(path, size, compression, step_bytes, extent)
    for position, line in found if compression else _plain_lines(path, size, extent):
        if len(line) > MAX_BYTES:
            yield position, None
            continue
        line = line.removeprefix(BOM) if position == 0 else line
        if line.strip():
            yield position, line


def _plain_lines(path: str, size: int, extent: Extent) -> Iterator[tuple[int, bytes]]:
    first = extent.part * PIECE_BYTES
    own = extent.units(min(PIECE_BYTES, size - first))
    begin, end = first + own.start, first + own.stop
    if begin >= end:
        return
    with open(path, "rb") as file:
        file.seek(max(begin - 1, 0))
        if begin:
            file.readline()  # the rest of a line that began before
        while (position := file.tell()) < end:
            yield position, file.readline().removesuffix(b"\n")


def _compressed_lines(
    path: str, size: int, compression: str, step_bytes: int, extent: Extent
) -> Iterator[tuple[int, bytes]]:
    """A line belongs to the step of the input that its first byte comes out of."""
    own = extent.units(-(-size // step_bytes))
    begun: tuple[int, int] | None = None  # step and position of the line's first byte
    parts: list[bytes] = []
    at = 0
    for step, data in _decompressed(path, compression, step_bytes):
        if step >= own.stop and (begun is None or begun[0] not in own):
            return
        lines = data.split(b"\n")
        for i, line in enumerate(lines):
            if begun is None and (line or i < len(lines) - 1):
                begun = step, at
            parts.append(line)
            at += len(line)
            if i < len(lines) - 1:
                assert begun is not None
                if begun[0] in own:
                    yield begun[1], b"".join(parts)
                begun, parts = None, []
                at += 1
    if begun is not None and begun[0] in own:
        yield begun[1], b"".join(parts)


def _decompressed(path: str, compression: str, step_bytes: int) -> Iterator[tuple[int, bytes]]:
    """(step, what comes out while this step's bytes are fed), of gzip members or zstd frames one after the other."""
    import zstandard

    decoder: Any = None
    members = 0
    with open(path, "rb") as file:
        for step in range(-(-os.path.getsize(path) // step_bytes)):
            data, out = file.read(step_bytes), []
            while data:
                if decoder is None:
                    if compression == "gzip" and members and not (data := data.lstrip(b"\0")):
                        break  # padding
                    of_zstd = zstandard.ZstdDecompressor(max_window_size=2**31)
                    decoder = zlib.decompressobj(wbits=31) if compression == "gzip" else of_zstd.decompressobj()
                    members += 1
                try:
                    out.append(decoder.decompress(data))
                except (zlib.error, zstandard.ZstdError) as error:
                    raise SourceError(f"{path}: corrupt {compression} data: {error}") from error
                data = b""
                if decoder.eof:
                    data, decoder = decoder.unused_data, None
            yield step, b"".join(out)
    if decoder is not None:
        raise SourceError(f"{path}: the {compression} data is truncated")


def _whole(path: str, compression: str) -> bytes:
    if compression:
        return b"".join(data for _, data in _decompressed(path, compression, 2**20))
    with open(path, "rb") as file:
        return file.read()


def _text_of_bytes(data: bytes) -> str | None:
    try:
        return data.decode() if len(data) <= MAX_BYTES else None
    except UnicodeDecodeError:
        return None


def _text_of_line(line: bytes | None, text_key: str, reader: TextReader) -> Text | None:
    source = None if line is None else _text_of_bytes(line)
    if source is None or _too_deep(source):
        return None
    try:
        record = json.loads(source, parse_constant=_refuse, parse_int=_integer)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    return text_of(record, text_key, reader)


def text_of(record: dict[str, Any], text_key: str, reader: TextReader) -> Text | None:
    """A document of these fields; None where it cannot be used. A field that is the text_key is the text and nothing else."""
    text = record.get(text_key)
    spans, messages = (record.get(key) if reader.marks and key != text_key else None for key in (SPANS, MESSAGES))
    if messages is not None:
        if text is not None or spans is not None:
            return None
        rendered = reader.conversation(messages)
        if isinstance(rendered, tuple):
            return None
        names = ("text", "spans", "boundaries", "system_end", "chat", "strings")
        return Text(*(getattr(rendered, name) for name in names))
    if not isinstance(text, str):
        return None
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return None
    if spans is None:
        return Text(text)
    return Text(text, _ranges(spans, len(text))) if isinstance(spans, list) and all(map(_sound, spans)) else None


def _sound(span: Any) -> bool:
    """Whether it is [begin, end] or [begin, end, weight], the weight 1."""
    if not isinstance(span, list) or [type(bound) for bound in span[:2]] != [int, int] or len(span) > 3:
        return False
    weighs_1 = len(span) == 2 or (isinstance(span[2], int | float) and span[2] is not True and span[2] == 1)
    return weighs_1 and 0 <= span[0] <= span[1]


def _ranges(spans: list[list[int]], characters: int) -> list[tuple[int, int]]:
    """The runs of the text's characters that lie in any span, by how many spans are open at each place where one begins or
    ends."""
    opened: dict[int, int] = {}
    for begin, end, *_ in spans:
        if begin < min(end, characters):
            opened[begin] = opened.get(begin, 0) + 1
            opened[min(end, characters)] = opened.get(min(end, characters), 0) - 1
    found, first, depth = [], 0, 0
    for place in sorted(opened):
        if depth == 0 and opened[place] > 0:
            first = place
        depth += opened[place]
        if depth == 0 and opened[place] < 0:
            found.append((first, place))
    return found


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _integer(digits: str) -> int:
    return int(digits) if len(digits) <= 4000 else (-1) ** digits.startswith("-") * 2**64


def _too_deep(source: str) -> bool:
    if source.count("[") + source.count("{") <= MAX_DEPTH:
        return False
    depth, in_string, escaped = 0, False, False
    for character in source:
        if in_string:
            in_string = escaped or character != '"'
            escaped = not escaped and character == "\\"
        elif character == '"':
            in_string = True
        elif character in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                return True
        elif character in "]}":
            depth -= 1
    return False


def _rows(
    path: str, format: str, extent: Extent, text_key: str, reader: TextReader, wanted: Callable[[int], bool]
) -> Iterator[tuple[int, Text]]:
    """(position, text) of the rows that can be used."""
    for position, record in _records(path, format, extent, text_key, reader, wanted):
        if isinstance(record.get(text_key), bytes):
            record[text_key] = _text_of_bytes(record[text_key])
        if (found := text_of(record, text_key, reader)) is not None:
            yield position, found


def _records(
    path: str, format: str, extent: Extent, text_key: str, reader: TextReader, wanted: Callable[[int], bool]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a Parquet row group or an Arrow record batch. A position counts through the file's rows."""
    import pyarrow as pa

    names = [text_key, *(name for name in (SPANS, MESSAGES) if reader.marks and name != text_key)]
    try:
        first, table = (row_group if format == "parquet" else record_batch)(path, extent.part, names)
        columns = {name: _values(table.column(name)) for name in table.schema.names if name in names}
    except pa.ArrowException as error:
        raise SourceError(f"{path}: not readable: {error}") from error
    if text_key not in columns and MESSAGES not in columns:
        raise SourceError(f"{path}: no column {text_key!r}")
    for i in extent.units(table.num_rows):
        if wanted(first + i):
            yield first + i, {name: values[i] for name, values in columns.items()}


def row_group(path: str, number: int, names: list[str]) -> tuple[int, Any]:
    """(position of its first row in the file, those of the named columns that are there) of a Parquet file's row group."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        first = sum(file.metadata.row_group(i).num_rows for i in range(number))
        there = [name for name in file.schema_arrow.names if name in names]
        return first, file.read_row_group(number, columns=there)


def record_batch(path: str, number: int, names: list[str]) -> tuple[int, Any]:
    """(position of its first row in the file, all columns) of an Arrow file's record batch."""
    import pyarrow as pa

    with open(path, "rb") as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
        first = 0
        for i in range(number + 1):
            batch = reader.get_batch(i) if is_file else reader.read_next_batch()
            first += batch.num_rows if i < number else 0
    return first, batch


def _values(column: Any) -> list[Any]:
    """A column's values; texts as bytes, since one that is not UTF-8 would refuse them all."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.dictionary_decode() if isinstance(column, pa.Array) else column.cast(kind.value_type)
        kind = column.type
    texts = ("string", "large_string", "string_view", "binary", "binary_view")
    if any(getattr(pa.types, f"is_{name}")(kind) for name in texts):
        column = column.cast(pa.large_binary())
    return column.to_pylist()
