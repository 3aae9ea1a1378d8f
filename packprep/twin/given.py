"""Documents of sources that hold token ids: what a shard's part of them says, by the plainest means there are."""

import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

from packprep.errors import SourceError
from packprep.twin import pieces, texts
from packprep.twin.pieces import Extent

FORMATS = ("megatron", "parquet_tokens", "arrow_tokens")
MOST = 8 * 2**20  # tokens of a document
CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}


def documents(source: dict[str, Any], extent: Extent, wanted: Callable[[int], bool]) -> Iterator[tuple[int, list[int]]]:
    """(position, ids as they stand in the source) of an extent's wanted documents that are lists of at most MOST integers."""
    for position, ids in _lists(source, extent, wanted):
        if ids is not None and None not in ids and len(ids) <= MOST:
            yield position, ids


def sizes(source: dict[str, Any], file: int, part: int) -> list[tuple[int, int]]:
    """(position, tokens) of all documents of a part of a file."""
    whole = Extent(file, part, 0, 0, 1, 1)
    return [(position, len(ids or [])) for position, ids in _lists(source, whole, lambda position: True)]


def _lists(
    source: dict[str, Any], extent: Extent, wanted: Callable[[int], bool]
) -> Iterator[tuple[int, list[int] | None]]:
    name, size, count = source["files"][extent.file]
    path = os.path.join(source["prefix"], name)
    if "://" in path:
        raise SourceError(f"{path}: the twin reads local files alone; copy the source and say --source NAME=FOLDER")
    format, _ = pieces.format_of(source, name)
    try:
        if format == "megatron":
            yield from _of_pair(path, size, count, extent, wanted)
        else:
            yield from _of_table(path, size, format.removesuffix("_tokens"), extent, source["text_key"], wanted)
    except (OSError, struct.error) as error:
        raise SourceError(f"{path}: {error}") from error


def _of_pair(
    path: str, size: int, count: int, extent: Extent, wanted: Callable[[int], bool]
) -> Iterator[tuple[int, list[int] | None]]:
    """Piece number p of `count` is the documents from p · D // count to (p + 1) · D // count."""
    index = path[:-4] + (".IDX" if path.endswith(".BIN") else ".idx")
    if os.path.getsize(path) + os.path.getsize(index) != size:
        raise SourceError(f"{path} and its .idx have not the {size} bytes that they had when the build was planned")
    with open(index, "rb") as entries, open(path, "rb") as ids:

        def number(form: str, at: int) -> int:
            entries.seek(at)
            return int(struct.unpack("<" + form, entries.read(struct.calcsize("<" + form)))[0])

        code, sequences, bounds = CODES[number("B", 17)], number("Q", 18), number("Q", 26)
        pointers = 34 + 4 * sequences
        item = struct.calcsize("<" + code)
        first, end = (p * (bounds - 1) // count for p in (extent.part, extent.part + 1))
        for i in extent.units(end - first):
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


def _of_table(
    path: str, size: int, format: str, extent: Extent, text_key: str, wanted: Callable[[int], bool]
) -> Iterator[tuple[int, list[int] | None]]:
    import pyarrow as pa

    if os.path.getsize(path) != size:
        raise SourceError(f"{path} has {os.path.getsize(path)} bytes and had {size} when the build was planned")
    names = ["input_ids", "tokens"] if text_key == "text" else [text_key]
    try:
        first, table = (texts.row_group if format == "parquet" else texts.record_batch)(path, extent.part, names)
    except pa.ArrowException as error:
        raise SourceError(f"{path}: not readable: {error}") from error
    there = [name for name in names if name in table.schema.names]
    if not there:
        raise SourceError(f"{path}: no column {' or '.join(map(repr, names))}")
    column = table.column(there[0])
    for i in extent.units(table.num_rows):
        if wanted(first + i):
            yield first + i, column[i].as_py()


def content(
    ids: list[int], vocab_size: int, forbidden: set[int], append_eos: int | None, prepend_bos: int | None
) -> list[int] | None:
    """The ids without one eos at the end, if packprep appends it, and without one bos at the begin, if it is prepended.

    None: an id is none of the vocabulary's, or the content has a forbidden one. append_eos, prepend_bos: the ids, or None.
    """
    if not all(0 <= i < vocab_size for i in ids):
        return None
    if ids and ids[-1] == append_eos:
        ids = ids[:-1]
    if ids and ids[0] == prepend_bos:
        ids = ids[1:]
    return ids if forbidden.isdisjoint(ids) else None
