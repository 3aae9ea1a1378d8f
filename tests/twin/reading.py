"""Which parts of which files belong to a shard, in which order, which of their documents are kept,
and what these say.

Sources are the plan's, as dicts: name, seed, prefix, repeat, where, by (the text of a repeat by
fields), pass_shares, sample, format, keys, ratios,
step_bytes, stream (token_dtype, the vocabulary's size and eos), first_file (the number of its first
file among all of the plan's), files, (name, size, pieces) each, and piece_bytes: about how much each piece of a file holds, of files of which the plan
says it.
"""

import math
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from packprep.errors import SourceError
from tests.twin import chance, expressions, records
from tests.twin.records import (
    MAX_LINE,
    MAX_TEXT,
    Keys,
    Passage,
    Picture,
    Talk,
    at,
    in_float32,
    pictures_of,
    ranges_of,
)

PIECE_BYTES = 4 * 2**20
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".bin": "megatron",
    ".idx": "megatron",
    ".ds": "datatrove",
    ".npy": "token_stream",
}
TOKEN_FORMATS = (
    "megatron",
    "datatrove",
    "token_stream",
    "parquet_tokens",
    "arrow_tokens",
    "jsonl_tokens",
)
LINE_FORMATS = ("jsonl", "jsonl_tokens")
BYTE_FORMATS = (*LINE_FORMATS, "token_stream")
BOM = b"\xef\xbb\xbf"
MOST_IDS = 8 * 2**20  # of a document
CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}

Listed = Callable[[int, int], list[tuple[int, int]]]
"""(file, part) → (position, size) of all documents of a part, in order."""


class Piece(NamedTuple):
    """What can be entered by itself: a part of one file, or some whole text files, and their stored
    bytes."""

    files: list[int]
    part: int
    size: int


class Slice(NamedTuple):
    """What a shard takes of a file's piece in one use: the units from low · units // weight to high
    · units // weight."""

    file: int
    piece: int
    use: int
    low: int
    high: int
    weight: int

    def units(self, count: int) -> range:
        """The piece's own units, bytes, rows or steps, of `count`."""
        return range(self.low * count // self.weight, self.high * count // self.weight)


def format_of(source: dict[str, Any], name: str) -> tuple[str, str]:
    """(format, compression) of a file."""
    name, compression = name.lower(), ""
    for ending, value in COMPRESSIONS.items():
        if name.endswith(ending):
            name, compression = name[: -len(ending)], value
            break
    found = next((value for ending, value in FORMATS.items() if name.endswith(ending)), "text")
    if source["format"] == "tokens":
        return f"{found}_tokens", compression
    return (found if source["format"] == "auto" else source["format"]), compression


def pieces(source: dict[str, Any]) -> list[Piece]:
    """All pieces of a source in the order of its files: 4 MiB of a line file, a row group or batch,
    a run of Megatron's documents, a compressed file, or neighbouring text files of together at most
    4 MiB.
    """
    found: list[Piece] = []
    of_text = False
    for i, (name, size, count) in enumerate(source["files"]):
        format, compression = format_of(source, name)
        if format == "text":
            if of_text and found[-1].size + size <= PIECE_BYTES:
                found[-1] = Piece([*found[-1].files, i], 0, found[-1].size + size)
            else:
                found.append(Piece([i], 0, size))
            of_text = True
            continue
        of_text = of_text and not count
        for part in range(count):
            if format in BYTE_FORMATS and not compression:
                stored = min(PIECE_BYTES, size - part * PIECE_BYTES)
            else:
                stored = (part + 1) * size // count - part * size // count
            found.append(Piece([i], part, stored))
    return found


def weighted_list(source: dict[str, Any]) -> list[tuple[Piece, int, int]]:
    """(piece, use, weight): the source's pieces once per use, each use in its own keyed order. A
    weight is the estimated text bytes that are kept."""
    all_pieces = pieces(source)
    low, high = (Fraction(bound) for bound in source["sample"])
    result = []
    for use in range(uses(source)):
        shares = source.get("pass_shares")
        share = kept_of_use(source, use) if shares is None else Fraction(shares[use])
        kept_share = int(share * (high - low) * 2**16)
        key = chance.bits64(
            chance.text_key(source["seed"], source["name"], use), chance.PIECE_ORDER
        )
        for i in range(len(all_pieces)):
            piece = all_pieces[chance.permute(i, len(all_pieces), key)]
            format, compression = format_of(source, source["files"][piece.files[0]][0])
            ratio = source["ratios"][f"{format}.{compression}" if compression else format]
            part_bytes = source["piece_bytes"].get(piece.files[0])
            text_bytes = max(
                (piece.size if part_bytes is None else part_bytes[piece.part]) * ratio // 1024, 1
            )
            result.append((piece, use, max(text_bytes * kept_share // 2**16, 1)))
    return result


def uses(source: dict[str, Any]) -> int:
    """How often its documents are gone through, the last time perhaps not all."""
    whole = int(source["repeat"])
    return whole if whole == source["repeat"] else whole + 1


def kept_of_use(source: dict[str, Any], use: int) -> Fraction:
    """The part of the documents that a use takes; 1 if their fields say which."""
    return (
        Fraction(1)
        if source.get("by") is not None
        else min(Fraction(1), Fraction(source["repeat"]) - use)
    )


def slices(source: dict[str, Any], shard: int, shards: int) -> list[Slice]:
    """What shard number `shard` of `shards` takes of a source, in order."""
    if "weighted" not in source:
        source["weighted"] = weighted_list(source)
    total = sum(weight for _, _, weight in source["weighted"])
    begin, end = shard * total // shards, (shard + 1) * total // shards
    found, at = [], 0
    for piece, use, weight in source["weighted"]:
        low, high = max(begin - at, 0), min(end - at, weight)
        at += weight
        if low < high:
            found += _of_piece(source, piece, use, low, high, weight)
    return found


def _of_piece(
    source: dict[str, Any], piece: Piece, use: int, low: int, high: int, weight: int
) -> list[Slice]:
    if format_of(source, source["files"][piece.files[0]][0])[0] != "text":
        return [Slice(piece.files[0], piece.part, use, low, high, weight)]
    # A text file belongs to where its first byte lies in the piece; an empty last one, to the
    # piece's last byte.
    units = Slice(0, 0, use, low, high, weight).units(max(1, piece.size))
    found, at = [], 0
    for file in piece.files:
        if min(at, max(1, piece.size) - 1) in units:
            found.append(Slice(file, 0, use, 0, 1, 1))
        at += source["files"][file][1]
    return found


def is_sampled(source: dict[str, Any], file: int, position: int) -> bool:
    """Whether `sample` keeps a document."""
    low, high = (int(Fraction(bound) * 2**53) for bound in source["sample"])
    key = chance.segment_key(chance.text_key("sample", source["files"][file][0]), position, 0, 0)
    return low <= chance.bits64(key, chance.SAMPLE) >> 11 < high


def is_kept(source: dict[str, Any], part: Slice, position: int, listed: Listed) -> bool:
    """Whether `sample`, `where` and `repeat` keep a document of a slice in its use."""
    if not is_sampled(source, part.file, position):
        return False
    of_document = passes(source, part.file, part.piece, position)
    if of_document is None or of_document <= (0 if source.get("by") is None else part.use):
        return False
    if kept_of_use(source, part.use) == 1:
        return True
    taken_from = part.file, part.piece, part.use
    taken = source.setdefault("taken", {})
    if taken_from not in taken:
        piece = next(p for p in pieces(source) if part.file in p.files and part.piece == p.part)
        chosen = chosen_of_piece(source, piece, part.use, listed)
        taken.update({(file, piece.part, part.use): chosen for file in piece.files})
    return (part.file, position) in taken[taken_from]


def chosen_of_piece(
    source: dict[str, Any], piece: Piece, use: int, listed: Listed
) -> set[tuple[int, int]]:
    """(file, position) of what a use takes of a piece's documents: of each class of sizes, those at
    which the fraction, summed up from a keyed begin, passes a whole number. Sizes with as many bits
    are a class."""
    part = int(kept_of_use(source, use) * 2**32)
    key = chance.segment_key(file_key(source, piece.files[0]), piece.part, use, 0)
    summed: dict[int, int] = {}
    taken = set()
    for file in piece.files:
        for position, size in listed(file, piece.part):
            of_document = passes(source, file, piece.part, position)
            if is_sampled(source, file, position) and of_document != 0:
                bits = size.bit_length()
                before = summed.get(bits, chance.words(key, chance.REPEAT, bits))
                summed[bits] = before + part
                if summed[bits] // 2**32 > before // 2**32:
                    taken.add((file, position))
    return taken


def passes(source: dict[str, Any], file: int, part: int, position: int) -> int | None:
    """How many uses `where` and a `repeat` by fields give to a document; 1 without them. None: its
    fields cannot be judged."""
    texts = [text for text in (source.get("where"), source.get("by")) if text is not None]
    if not texts:
        return 1
    known = source.setdefault("numbers", {})
    if (file, part) not in known:
        known[file, part] = {
            at: _judged(source, record) for at, record in _field_records(source, file, part, texts)
        }
    number = known[file, part][position]
    if number is None or source.get("by") is None:
        return None if number is None else int(number)
    key = chance.segment_key(file_key(source, file), position, 0, 0)
    whole = math.floor(number)
    return whole + (chance.bits64(key, chance.PASSES) >> 11 < (number - whole) * 2**53)


def _judged(source: dict[str, Any], record: dict[str, Any] | None) -> float | None:
    """The number of uses of a record, 1 for one that cannot be read."""
    if record is None:
        return 1.0

    def get(name: str) -> Any:
        return at(record, name)

    try:
        holds = source.get("where") is None or expressions.condition(source.get("where"), get)
        found = 1.0 if source.get("by") is None else expressions.number(source.get("by"), get)
    except expressions.Unusable:
        return None
    return holds * min(
        max(found or 0.0, 0.0), 1.0 if source.get("by") is None else source["repeat"]
    )


def _field_records(
    source: dict[str, Any], file: int, part: int, texts: list[str]
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(position, record with the fields of the texts) of a part's documents; None for a line that is
    no object."""
    name, size, _ = source["files"][file]
    path, (format, compression) = _path(source, name), format_of(source, name)
    if format in LINE_FORMATS:
        whole = Slice(file, part, 0, 0, 1, 1)
        for position, line in _lines(path, size, compression, source["step_bytes"], whole):
            text = None if line is None else _text_of_bytes(line)
            try:
                record = None if text is None else records.parsed(text)
            except ValueError:
                record = None
            yield position, record if isinstance(record, dict) else None
        return
    names = [name for text in texts for name in expressions.fields(text)]
    names += [name.partition(".")[0] for name in names]
    first, table = _table(path, format.removesuffix("_tokens"), part, names)
    columns = {n: table.column(n).to_pylist() for n in table.schema.names if n in names}
    for i in range(table.num_rows):
        yield first + i, {name: values[i] for name, values in columns.items()}


def file_key(source: dict[str, Any], file: int) -> int:
    """The 64-bit key of a file's documents."""
    return chance.text_key(source["seed"], source["name"], source["files"][file][0])


class Text(NamedTuple):
    """A document's text, and what it says of its training.

    spans       (begin, end, weight) of characters that are trained, ascending; None: it says nothing
    chat        it is a conversation, the special tokens of whose template mean these
    boundaries  of a chat: the characters at which messages after the first begin
    roles       of a chat: of the first message and of each at `boundaries`
    system_end  of a chat: how many characters the leading system message and tools take
    strings     of a chat: all that is not the template's
    blocks      of a chat: the characters at which trained {% generation %} blocks begin
    media       places of media, in the text's order
    weight      of a document that says nothing else of its training
    later       of a chat: the document's texts after this one
    document_weight  the record's weight, which is multiplied into those of the spans
    """

    text: str
    spans: Sequence[tuple[int, int, float]] | None = None
    chat: bool = False
    boundaries: Sequence[int] = ()
    roles: Sequence[str] = ()
    system_end: int = 0
    strings: Sequence[str] = ()
    blocks: Sequence[int] = ()
    media: Sequence[Picture] = ()
    weight: float = 1.0
    later: Sequence["Text"] = ()
    document_weight: float = 1.0


class TextReader(NamedTuple):
    """How documents are read.

    supervision: whether loss_spans and messages are looked at
    conversation: a Talk → its text; None where it is turned away
    """

    supervision: bool
    conversation: Callable[[Talk], Text | None]


def documents(
    source: dict[str, Any], part: Slice, reader: TextReader, wanted: Callable[[int], bool]
) -> Iterator[tuple[int, Text]]:
    """(position, text) of the wanted documents of a slice that can be used, in order. SourceError
    for a file that cannot be read or has another size than planned."""
    name, size, _ = source["files"][part.file]
    path = _path(source, name)
    try:
        _check_size(path, size)
        format, compression = format_of(source, name)
        if format == "jsonl":
            found = _lines(path, size, compression, source["step_bytes"], part)
            for position, line in found:
                if (
                    wanted(position)
                    and (text := _text_of_line(line, source["keys"], reader)) is not None
                ):
                    yield position, text
        elif format == "text":
            data = _whole(path, compression) if wanted(0) else b""
            if wanted(0) and len(data) <= MAX_TEXT and (whole := _text_of_bytes(data)) is not None:
                yield 0, Text(whole.removeprefix("\ufeff"))
        else:
            yield from _rows(path, format, part, source["keys"], reader, wanted)
    except OSError as error:
        raise SourceError(f"{path}: {error}") from error


def _path(source: dict[str, Any], name: str) -> str:
    path = os.path.join(source["prefix"], name)
    if "://" in path:
        raise SourceError(
            f"{path}: the twin reads local files alone; copy the source and say --source"
            " NAME=FOLDER"
        )
    return path


def _check_size(path: str, size: int) -> None:
    if os.path.getsize(path) != size:
        raise SourceError(
            f"{path} has {os.path.getsize(path)} bytes and had {size} when the build was planned"
        )


def sizes(
    source: dict[str, Any], file: int, part: int, reader: TextReader
) -> list[tuple[int, int]]:
    """(position, size) of all documents of a part of a file: bytes of a line, a text or a text
    file; of messages, how many; of ids, how many."""
    name, size, _ = source["files"][file]
    path, whole = os.path.join(source["prefix"], name), Slice(file, part, 0, 0, 1, 1)
    format, compression = format_of(source, name)
    if format == "text":
        return [(0, size)]
    if format in TOKEN_FORMATS and format not in LINE_FORMATS:
        return [
            (position, len(ids or []))
            for position, ids, *_ in _lists(source, whole, lambda position: True)
        ]
    if format in LINE_FORMATS:
        lines = _lines(path, size, compression, source["step_bytes"], whole)
        return [
            (position, MAX_TEXT + 1 if line is None else min(len(line), MAX_TEXT + 1))
            for position, line in lines
        ]
    found = []
    for position, record in _records(
        path, format, whole, source["keys"], reader, lambda position: True
    ):
        found.append((position, records.size(record, source["keys"])))
    return found


def _lines(
    path: str, size: int, compression: str, step_bytes: int, part: Slice
) -> Iterator[tuple[int, bytes | None]]:
    """(position, line) of the lines that begin in the slice and are not blank; None for one that is
    too large."""
    found = _compressed_lines(path, size, compression, step_bytes, part)
    for position, line in found if compression else _plain_lines(path, size, part):
        if len(line) > MAX_LINE:
            yield position, None
            continue
        line = line.removeprefix(BOM) if position == 0 else line
        if line.strip():
            yield position, line


def _plain_lines(path: str, size: int, part: Slice) -> Iterator[tuple[int, bytes]]:
    first = part.piece * PIECE_BYTES
    units = part.units(min(PIECE_BYTES, size - first))
    begin, end = first + units.start, first + units.stop
    if begin >= end:
        return
    with open(path, "rb") as file:
        file.seek(max(begin - 1, 0))
        if begin:
            file.readline()  # the rest of a line that began before
        while (position := file.tell()) < end:
            yield position, file.readline().removesuffix(b"\n")


def _compressed_lines(
    path: str, size: int, compression: str, step_bytes: int, part: Slice
) -> Iterator[tuple[int, bytes]]:
    """A line belongs to the step of the input that its first byte comes out of."""
    steps = part.units(-(-size // step_bytes))
    line_begin: tuple[int, int] | None = None  # step and position of the line's first byte
    parts: list[bytes] = []
    at = 0
    for step, data in _decompressed(path, compression, step_bytes):
        if step >= steps.stop and (line_begin is None or line_begin[0] not in steps):
            return
        lines = data.split(b"\n")
        for i, line in enumerate(lines):
            if line_begin is None and (line or i < len(lines) - 1):
                line_begin = step, at
            parts.append(line)
            at += len(line)
            if i < len(lines) - 1:
                assert line_begin is not None
                if line_begin[0] in steps:
                    yield line_begin[1], b"".join(parts)
                line_begin, parts = None, []
                at += 1
    if line_begin is not None and line_begin[0] in steps:
        yield line_begin[1], b"".join(parts)


def _decompressed(path: str, compression: str, step_bytes: int) -> Iterator[tuple[int, bytes]]:
    """(step, what comes out while this step's bytes are fed), of gzip members or zstd frames one
    after the other."""
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
                    decoder = (
                        zlib.decompressobj(wbits=31)
                        if compression == "gzip"
                        else of_zstd.decompressobj()
                    )
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
        return data.decode()
    except UnicodeDecodeError:
        return None


def _text_of_line(line: bytes | None, keys: Keys, reader: TextReader) -> Text | None:
    source = None if line is None else _text_of_bytes(line)
    try:
        record = None if source is None else records.parsed(source)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    return text_of(record, keys, reader)


def text_of(record: dict[str, Any], keys: Keys, reader: TextReader) -> Text | None:
    """A document of these fields; None where it cannot be used. A field that is the text's is the
    text and nothing else."""
    found = records.read(record, keys) if reader.supervision else Passage(at(record, keys.text))
    if isinstance(found, Talk):
        talk = reader.conversation(found)
        texts = [] if talk is None else [talk.text, *(text.text for text in talk.later)]
        return None if len("".join(texts).encode()) > MAX_TEXT else talk
    if found is None:
        return None
    text, spans, weight, media = found
    if not isinstance(text, str):
        return None
    try:
        if len(text.encode()) > MAX_TEXT:
            return None
    except UnicodeEncodeError:  # half of a surrogate pair
        return None
    media = pictures_of(media if keys.kinds else None, text, keys.kinds)
    if media is None:
        return None
    of_document = in_float32(1 if weight is None else weight)
    if of_document is None:
        return None
    if spans is None and not media:
        return Text(text, weight=of_document, document_weight=of_document)
    spans = [[0, len(text)]] if spans is None else spans
    ranges = ranges_of(spans, len(text), weight)
    if ranges is None:
        return None
    return Text(text, ranges, media=media, document_weight=of_document)


def _rows(
    path: str,
    format: str,
    part: Slice,
    keys: Keys,
    reader: TextReader,
    wanted: Callable[[int], bool],
) -> Iterator[tuple[int, Text]]:
    """(position, text) of the rows that can be used."""
    for position, record in _records(path, format, part, keys, reader, wanted):
        decoded = _decoded(record)
        if decoded is not None:
            decoded = records.of_table(decoded)
        if decoded is not None and (found := text_of(decoded, keys, reader)) is not None:
            yield position, found


def _decoded(record: dict[str, Any]) -> dict[str, Any] | None:
    """A row's bytes as texts; None where some are no UTF-8."""
    made = {
        key: _text_of_bytes(value) if isinstance(value, bytes) else value
        for key, value in record.items()
    }
    return (
        None
        if any(made[key] is None and value is not None for key, value in record.items())
        else made
    )


def _records(
    path: str,
    format: str,
    part: Slice,
    keys: Keys,
    reader: TextReader,
    wanted: Callable[[int], bool],
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a Parquet row group or an Arrow record batch. A position counts through the
    file's rows."""
    import pyarrow as pa

    try:
        every = keys.names() if reader.supervision else [keys.text]
        first, table = _table(
            path, format, part.piece, [*every, *(name.partition(".")[0] for name in every)]
        )
        names = _columns(table.schema, keys, every)
        columns = {
            name: _values(table.column(name)) for name in table.schema.names if name in names
        }
    except pa.ArrowException as error:
        raise SourceError(f"{path}: not readable: {error}") from error
    for i in part.units(table.num_rows):
        if wanted(first + i):
            yield first + i, {name: values[i] for name, values in columns.items()}


def _columns(schema: Any, keys: Keys, every: list[str]) -> set[str]:
    """The columns that matter: where a format is said no texts."""
    every = [name for name in every if name != keys.text or keys.format == "auto"]
    return {name if name in schema.names else name.partition(".")[0] for name in every}


def _table(path: str, format: str, number: int, names: list[str]) -> tuple[int, Any]:
    """(position of its first row in the file, columns, at least those of the names that are there)
    of a Parquet file's row group or an Arrow file's record batch."""
    import pyarrow as pa
    from pyarrow import parquet

    if format == "parquet":
        with parquet.ParquetFile(path) as file:
            first = sum(file.metadata.row_group(i).num_rows for i in range(number))
            known = [name for name in file.schema_arrow.names if name in names]
            return first, file.read_row_group(number, columns=known)
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
        column = (
            column.dictionary_decode()
            if isinstance(column, pa.Array)
            else column.cast(kind.value_type)
        )
        kind = column.type
    texts = ("string", "large_string", "string_view", "binary", "binary_view")
    if any(getattr(pa.types, f"is_{name}")(kind) for name in texts):
        column = column.cast(pa.large_binary())
    return column.to_pylist()


def token_documents(
    source: dict[str, Any], part: Slice, weights: bool, wanted: Callable[[int], bool]
) -> Iterator[tuple[int, list[int], list[float], float]]:
    """(position, ids without padding, the weight of each, the record's) of a slice's wanted
    documents that are
    lists of at most MOST_IDS integers and whose weights and masks are such. weights: whether these
    are looked at."""
    for position, ids, given, masks in _lists(source, part, wanted):
        weight = in_float32(1 if given is None or not weights else given)
        if ids is None or None in ids or len(ids) > MOST_IDS or weight is None:
            continue
        unmasked = _unmasked(ids, masks if weights else {})
        if unmasked is not None:
            kept, of_tokens = unmasked
            own_weights = [in_float32(weight * own) for own in of_tokens]
            if None not in own_weights:
                yield position, kept, own_weights, weight


def _unmasked(
    ids: list[int], masks: Mapping[str, list[Any] | None]
) -> tuple[list[int], list[float]] | None:
    """(ids with attention, their weights); None where masks cannot be read."""
    if any(mask is None or None in mask or len(mask) != len(ids) for mask in masks.values()):
        return None
    attention = masks.get("attention_mask") or [1] * len(ids)
    if set(attention) - {0, 1} or "0" in "".join(str(int(one)) for one in attention).strip("0"):
        return None
    kept = [i for i, one in enumerate(attention) if one]
    says = []
    for name in ("labels", "loss_mask", "completion_mask", "assistant_masks"):
        if name in masks:
            mask = masks[name] or []
            values = [mask[i] for i in kept]
            if name == "labels":
                if any(v not in (-100, ids[i]) for i, v in zip(kept, values, strict=True)):
                    return None
                says.append([v != -100 for v in values])
            elif set(values) - {0, 1}:
                return None
            else:
                says.append([v == 1 for v in values])
    if any(one != says[0] for one in says):
        return None
    given = masks.get("loss_weights") or [1.0] * len(ids)
    own = [in_float32(float(given[i])) for i in kept]
    if None in own:
        return None
    trained = says[0] if says else [True] * len(kept)
    return [ids[i] for i in kept], [
        (w or 0.0) if on else 0.0 for w, on in zip(own, trained, strict=True)
    ]


MASKS = (
    "attention_mask",
    "labels",
    "loss_mask",
    "completion_mask",
    "assistant_masks",
    "loss_weights",
)


def _lists(
    source: dict[str, Any], part: Slice, wanted: Callable[[int], bool]
) -> Iterator[tuple[int, list[int] | None, Any, dict[str, list[Any] | None]]]:
    """(position, ids, what stands for a weight, masks) of a slice's wanted documents."""
    name, size, count = source["files"][part.file]
    path = _path(source, name)
    format, compression = format_of(source, name)
    try:
        if format == "jsonl_tokens":
            _check_size(path, size)
            for position, line in _lines(path, size, compression, source["step_bytes"], part):
                if wanted(position):
                    yield position, *_of_line(line, source["keys"].text)
        elif format == "megatron":
            yield from (
                (position, ids, None, {})
                for position, ids in _of_pair(path, size, count, part, wanted)
            )
        elif format == "datatrove":
            yield from _of_datatrove(path, size, count, part, wanted)
        elif format == "token_stream":
            yield from (
                (position, ids, None, {})
                for position, ids in _of_stream(path, size, part, source["stream"])
                if wanted(position)
            )
        else:
            yield from _of_table(
                path, size, format.removesuffix("_tokens"), part, source["keys"].text, wanted
            )
    except (OSError, struct.error) as error:
        raise SourceError(f"{path}: {error}") from error


def _of_line(
    line: bytes | None, text_key: str
) -> tuple[list[int] | None, Any, dict[str, list[Any] | None]]:
    """(ids, what stands for a weight, masks) of a line; the ids are None where they cannot be
    used."""
    source = None if line is None else _text_of_bytes(line)
    try:
        record = None if source is None else records.parsed(source)
    except ValueError:
        record = None
    record = record if isinstance(record, dict) else {}
    names = ["input_ids", "tokens"] if text_key == "text" else [text_key]
    present = [name for name in names if name in record]
    ids = record[present[0]] if present else None
    is_list = isinstance(ids, list) and all(type(one) is int for one in ids)
    weight = records.unless_nan(record["weight"]) if "weight" in record not in names else None
    masks = {
        name: [] if record[name] is None else record[name]
        for name in MASKS
        if name in record and name not in names
    }
    for name, mask in masks.items():
        if not isinstance(mask, list) or any(type(v) not in (int, float, bool) for v in mask):
            masks[name] = None
    return ids if is_list else None, weight, masks


def _of_pair(
    path: str, size: int, count: int, part: Slice, wanted: Callable[[int], bool]
) -> Iterator[tuple[int, list[int] | None]]:
    """Piece number p of `count` is the documents from p · D // count to (p + 1) · D // count."""
    index = path[:-4] + (".IDX" if path.endswith(".BIN") else ".idx")
    if os.path.getsize(path) + os.path.getsize(index) != size:
        raise SourceError(
            f"{path} and its .idx have not the {size} bytes that they had when the build was"
            " planned"
        )
    with open(index, "rb") as entries, open(path, "rb") as ids:

        def number(form: str, at: int) -> int:
            entries.seek(at)
            return int(struct.unpack("<" + form, entries.read(struct.calcsize("<" + form)))[0])

        code, sequences, bounds = CODES[number("B", 17)], number("Q", 18), number("Q", 26)
        pointers = 34 + 4 * sequences
        item = struct.calcsize("<" + code)
        first, end = (p * (bounds - 1) // count for p in (part.piece, part.piece + 1))
        for i in part.units(end - first):
            position = first + i
            if not wanted(position):
                continue
            at = pointers + 8 * sequences + 8 * position
            found: list[int] = []
            for s in range(number("q", at), number("q", at + 8)):
                length = number("i", 34 + 4 * s)
                ids.seek(number("q", pointers + 8 * s))
                found += struct.unpack(f"<{length}{code}", ids.read(length * item))
            yield position, found


def _of_datatrove(
    path: str, size: int, count: int, part: Slice, wanted: Callable[[int], bool]
) -> Iterator[tuple[int, list[int] | None, Any, dict[str, list[Any] | None]]]:
    """As `_of_pair`. A document's loss mask is in the .loss, which is there if `size` says so."""
    has_loss = os.path.getsize(path) + os.path.getsize(path + ".index") != size
    with open(path, "rb") as ids, open(path + ".index", "rb") as entries:
        ends = [int(one) for (one,) in struct.iter_unpack("<Q", entries.read())]
        code = "H" if os.path.getsize(path) == 2 * ends[-1] else "I"
        item = struct.calcsize(code)
        first, end = (p * len(ends) // count for p in (part.piece, part.piece + 1))
        for i in part.units(end - first):
            position = first + i
            if not wanted(position):
                continue
            begin = ends[position - 1] if position else 0
            length = ends[position] - begin
            ids.seek(begin * item)
            found = list(struct.unpack(f"<{length}{code}", ids.read(length * item)))
            masks: dict[str, list[Any] | None] = {}
            if has_loss:
                with open(path + ".loss", "rb") as loss:
                    loss.seek(begin)
                    masks["loss_mask"] = list(loss.read(length))
            yield position, found, None, masks


def _of_stream(
    path: str, size: int, part: Slice, stream: tuple[str, int, int]
) -> Iterator[tuple[int, list[int]]]:
    """(position, ids with their eos) of the documents that begin in the slice."""
    import numpy as np

    _check_size(path, size)
    dtype, vocab_size, eos = stream
    with open(path, "rb") as file:
        head = file.read(1024)
    numbers = struct.unpack("<3i", head[:12]) if len(head) >= 12 else (0, 0, 0)
    if head.startswith(b"\x93NUMPY"):
        ids = np.load(path, allow_pickle=False)
        header = size - ids.nbytes
    elif len(head) == 1024 and numbers[:2] in ((20240520, 1), (20240801, 7)):
        header, form = 1024, "<u2" if numbers[1] == 1 else "<u4"
        ids = np.fromfile(path, form, offset=header)
    else:
        if dtype == "auto":
            widths = [8, 16, 32] if path.endswith(".npy") else [16]
            dtype = f"uint{next(width for width in widths if vocab_size <= 2**width)}"
        header, ids = 0, np.fromfile(path, np.dtype(dtype).newbyteorder("<"))
    first = part.piece * PIECE_BYTES
    units = part.units(min(PIECE_BYTES, size - first))
    begin = 0
    for end in [*(np.flatnonzero(ids == eos) + 1).tolist(), len(ids)]:
        position = header + begin * ids.itemsize
        if begin < end and first + units.start <= position < first + units.stop:
            yield position, ids[begin:end].tolist()
        begin = end


def _of_table(
    path: str, size: int, format: str, part: Slice, text_key: str, wanted: Callable[[int], bool]
) -> Iterator[tuple[int, list[int] | None, Any, dict[str, list[Any] | None]]]:
    import pyarrow as pa

    _check_size(path, size)
    names = ["input_ids", "tokens"] if text_key == "text" else [text_key]
    try:
        first, table = _table(path, format, part.piece, [*names, "weight", *MASKS])
    except pa.ArrowException as error:
        raise SourceError(f"{path}: not readable: {error}") from error
    present = [name for name in names if name in table.schema.names]
    if not present:
        raise SourceError(f"{path}: no column {' or '.join(map(repr, names))}")
    column = table.column(present[0])
    of_rows = (
        table.column("weight").to_pylist()
        if "weight" in table.schema.names and present[0] != "weight"
        else None
    )
    is_list = pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list
    masks = [
        (name, table.column(name))
        for name in MASKS
        if name in table.schema.names and name != present[0]
        if any(is_one(table.column(name).type) for is_one in is_list)
    ]
    for i in part.units(table.num_rows):
        if wanted(first + i):
            of_row = {name: mask[i].as_py() for name, mask in masks}
            weight = of_rows and records.unless_nan(of_rows[i])
            yield first + i, column[i].as_py(), weight, of_row
