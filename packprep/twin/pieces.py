"""Which parts of which files belong to a shard, in which order, and which of their documents are kept.

Sources are the plan's, as dicts: name, seed, prefix, repeat, sample, format, text_key, ratios, step_bytes, first_file (the
number of its first file among all of the plan's), files, (name, size, pieces) each, and piece_bytes: about how much each
piece of a file holds, of files of which the plan says it.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

from packprep.twin import chance

PIECE_BYTES = 4 * 2**20
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
FORMATS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow",
    ".feather": "arrow", ".ipc": "arrow", ".bin": "megatron", ".idx": "megatron",
}  # fmt: skip


Listed = Callable[[int, int], list[tuple[int, int]]]
"""(file, part) → (position, size) of all documents of a part, in order."""


class Piece(NamedTuple):
    """What can be entered by itself: a part of one file, or some whole text files, and their stored bytes."""

    files: list[int]
    part: int
    size: int


class Extent(NamedTuple):
    """What a shard takes of a file's part in one use: the units from low · units // weight to high · units // weight."""

    file: int
    part: int
    use: int
    low: int
    high: int
    weight: int

    def units(self, count: int) -> range:
        """The part's own units, bytes, rows or steps, of `count`."""
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
        return f"{found}_tokens", ""
    return (found if source["format"] == "auto" else source["format"]), compression


def pieces(source: dict[str, Any]) -> list[Piece]:
    """All pieces of a source in the order of its files: 4 MiB of a line file, a row group or batch, a run of
    Megatron's documents, a compressed file, or neighbouring text files of together at most 4 MiB."""
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
            if format == "jsonl" and not compression:
                stored = min(PIECE_BYTES, size - part * PIECE_BYTES)
            else:
                stored = (part + 1) * size // count - part * size // count
            found.append(Piece([i], part, stored))
    return found


def weighted_list(source: dict[str, Any]) -> list[tuple[Piece, int, int]]:
    """(piece, use, weight): the source's pieces once per use, each use in its own keyed order. A weight is the estimated
    text bytes that are kept."""
    own = pieces(source)
    low, high = (Fraction(bound) for bound in source["sample"])
    result = []
    for use in range(uses(source)):
        kept = int(kept_of_use(source, use) * (high - low) * 2**16)
        key = chance.bits64(chance.text_key(source["seed"], source["name"], use), chance.PIECE_ORDER)
        for i in range(len(own)):
            piece = own[chance.permute(i, len(own), key)]
            format, compression = format_of(source, source["files"][piece.files[0]][0])
            ratio = source["ratios"][f"{format}.{compression}" if compression else format]
            held = source["piece_bytes"].get(piece.files[0])
            text_bytes = max((piece.size if held is None else held[piece.part]) * ratio // 1024, 1)
            result.append((piece, use, max(text_bytes * kept // 2**16, 1)))
    return result


def uses(source: dict[str, Any]) -> int:
    """How often its documents are gone through, the last time perhaps not all."""
    whole = int(source["repeat"])
    return whole if whole == source["repeat"] else whole + 1


def kept_of_use(source: dict[str, Any], use: int) -> Fraction:
    """The part of the documents that a use takes."""
    return min(Fraction(1), Fraction(source["repeat"]) - use)


def extents(source: dict[str, Any], shard: int, shards: int) -> list[Extent]:
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


def _of_piece(source: dict[str, Any], piece: Piece, use: int, low: int, high: int, weight: int) -> list[Extent]:
    if format_of(source, source["files"][piece.files[0]][0])[0] != "text":
        return [Extent(piece.files[0], piece.part, use, low, high, weight)]
    # A text file belongs to where its first byte lies in the piece; an empty last one, to the piece's last byte.
    own = Extent(0, 0, use, low, high, weight).units(max(1, piece.size))
    found, at = [], 0
    for file in piece.files:
        if min(at, max(1, piece.size) - 1) in own:
            found.append(Extent(file, 0, use, 0, 1, 1))
        at += source["files"][file][1]
    return found


def is_sampled(source: dict[str, Any], file: int, position: int) -> bool:
    """Whether `sample` keeps a document."""
    low, high = (int(Fraction(bound) * 2**53) for bound in source["sample"])
    key = chance.segment_key(chance.text_key("sample", source["files"][file][0]), position, 0, 0)
    return low <= chance.bits64(key, chance.SAMPLE) >> 11 < high


def is_kept(source: dict[str, Any], extent: Extent, position: int, listed: Listed) -> bool:
    """Whether `sample` and the fraction of `repeat` keep a document of an extent in its use."""
    if not is_sampled(source, extent.file, position):
        return False
    if kept_of_use(source, extent.use) == 1:
        return True
    place = extent.file, extent.part, extent.use
    taken = source.setdefault("taken", {})
    if place not in taken:
        piece = next(p for p in pieces(source) if extent.file in p.files and extent.part == p.part)
        chosen = chosen_of_piece(source, piece, extent.use, listed)
        taken.update({(file, piece.part, extent.use): chosen for file in piece.files})
    return (extent.file, position) in taken[place]


def chosen_of_piece(source: dict[str, Any], piece: Piece, use: int, listed: Listed) -> set[tuple[int, int]]:
    """(file, position) of what a use takes of a piece's documents: of each class of sizes, those at which the fraction,
    summed up from a keyed begin, passes a whole number. Sizes with as many bits are a class."""
    part = int(kept_of_use(source, use) * 2**32)
    key = chance.segment_key(file_key(source, piece.files[0]), piece.part, use, 0)
    summed: dict[int, int] = {}
    taken = set()
    for file in piece.files:
        for position, size in listed(file, piece.part):
            if is_sampled(source, file, position):
                bits = size.bit_length()
                before = summed.get(bits, chance.words(key, chance.REPEAT, bits))
                summed[bits] = before + part
                if summed[bits] // 2**32 > before // 2**32:
                    taken.add((file, position))
    return taken


def file_key(source: dict[str, Any], file: int) -> int:
    """The 64-bit key of a file's documents."""
    return chance.text_key(source["seed"], source["name"], source["files"][file][0])
