"""Sources → pieces → shards, as index arithmetic.

A **piece** is what can be entered by itself: 4 MiB of a line file, a row group, a record batch, a compressed file, or some
neighbouring small text files. A source's pieces, once per use, each use in its own keyed order, form one list; a piece's
weight is its estimated text bytes that are kept. Shard b of B takes from every source what begins in
[b/B, (b+1)/B) of the source's summed weight. So all sources end together, every shard mixes them at the recipe's shares,
and which process makes which shard never shows.

    pieces of one source, in keyed order   |--5--|-2-|----9----|---6---|-2-|      weights
    shards                                 |     0     |     1     |    2    |
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from packprep.corpus.finding import File, format_of
from packprep.corpus.readers import PIECE_BYTES, Part
from packprep.randomness import PIECE_ORDER, bits64, permute, text_key
from packprep.recipe import Source

_WEIGHT_BITS = 16  # the kept part of a piece is an integer per 2¹⁶


class Pieces(NamedTuple):
    """The pieces of one source, one array a column, int64[P]."""

    file: np.ndarray  # the first file's place in the source
    files: np.ndarray  # how many files: 1, or more for small text files
    part: np.ndarray  # which piece of the file
    bytes: np.ndarray  # stored bytes


def pieces_of(source: Source, files: Sequence[File]) -> Pieces:
    """The pieces of a source's files, in the files' order. Neighbouring text files share a piece of about 4 MiB."""
    columns: list[tuple[int, int, int, int]] = []
    group_bytes = 0
    for i, file in enumerate(files):
        format, compression = format_of(source, file.name)
        if format == "text":
            grows = columns and columns[-1][2] < 0 and group_bytes + file.size <= PIECE_BYTES
            if grows:
                first, many, _, size = columns[-1]
                columns[-1] = (first, many + 1, -1, size + file.size)
            else:
                columns.append((i, 1, -1, file.size))
                group_bytes = 0
            group_bytes += file.size
        elif format == "jsonl" and not compression:
            for part in range(file.pieces):
                columns.append((i, 1, part, min(PIECE_BYTES, file.size - part * PIECE_BYTES)))
        else:
            for part in range(file.pieces):
                columns.append((i, 1, part, (part + 1) * file.size // file.pieces - part * file.size // file.pieces))
    table = np.array(columns, np.int64).reshape(-1, 4)
    return Pieces(table[:, 0], table[:, 1], np.maximum(table[:, 2], 0), table[:, 3])


@dataclass(frozen=True)
class Extent:
    """What a shard takes from one piece in one use: [lo, hi) of the piece's `weight`."""

    piece: int
    use: int
    lo: int
    hi: int
    weight: int


class PlannedSource:
    """A source with what the plan resolved: its files, the ratios of its formats, its repeat and sample."""

    def __init__(
        self,
        source: Source,
        index: int,
        prefix: str,
        files: Sequence[File],
        first_file: int,
        resolved: Mapping[str, Any],
        seed: int,
    ):
        self.source, self.index, self.prefix, self.files, self.first_file = source, index, prefix, files, first_file
        self.name, self.seed = source.name, seed
        self.ratios: Mapping[str, int] = resolved["ratios"]
        self.repeat: float = resolved["repeat"]
        self.step_bytes: int = resolved.get("step_bytes", 1 << 20)
        self.formats = [format_of(source, file.name) for file in files]

    @cached_property
    def pieces(self) -> Pieces:
        """The pieces of its files, listed when text is to be read: there may be many."""
        return pieces_of(self.source, self.files)

    @property
    def uses(self) -> int:
        """How often the documents are gone through: the last time perhaps not for all."""
        whole = int(self.repeat)
        return whole + (self.repeat > whole)

    def kept_of_use(self, use: int) -> Fraction:
        """The part of the documents that use number `use` takes by its repeat: 1, or for the last use a fraction."""
        return min(Fraction(1), Fraction(self.repeat) - use)

    @cached_property
    def weights(self) -> np.ndarray:
        """int64[P]: estimated text bytes of each piece, at least 1."""
        ratio = np.array([self.ratios[format_name(*f)] for f in self.formats], np.int64)
        return np.maximum((self.pieces.bytes * ratio[self.pieces.file]) >> 10, 1)

    def order(self, use: int) -> np.ndarray:
        """int64[P]: the pieces in the keyed order of one use."""
        size = len(self.pieces.file)
        key = bits64(text_key(self.seed, self.name, use), PIECE_ORDER)
        return permute(np.arange(size), size, key) if size else np.zeros(0, np.int64)

    @cached_property
    def _list(self) -> tuple[np.ndarray, np.ndarray]:
        """(pieces int64[uses · P] in one order, ends int64[uses · P] of their weights summed)."""
        low, high = self.source.sample
        pieces, weights = [], []
        for use in range(self.uses):
            kept = int(self.kept_of_use(use) * (Fraction(high) - Fraction(low)) * (1 << _WEIGHT_BITS))
            order = self.order(use)
            pieces.append(order)
            weights.append(np.maximum((self.weights[order] * kept) >> _WEIGHT_BITS, 1))
        if not pieces:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        return np.concatenate(pieces), np.cumsum(np.concatenate(weights))

    @property
    def weight(self) -> int:
        """The summed weight: estimated text bytes that are kept, over all uses."""
        ends = self._list[1]
        return int(ends[-1]) if len(ends) else 0

    def extents(self, shard: int, shards: int) -> Iterator[Extent]:
        """What shard number `shard` of `shards` takes, in order."""
        pieces, ends = self._list
        if not len(ends):
            return
        begin, end = shard * self.weight // shards, (shard + 1) * self.weight // shards
        if begin == end:
            return
        per_use = len(self.pieces.file)
        for i in range(int(np.searchsorted(ends, begin, "right")), int(np.searchsorted(ends, end, "left")) + 1):
            first = int(ends[i - 1]) if i else 0
            weight = int(ends[i]) - first
            yield Extent(int(pieces[i]), i // per_use, max(begin - first, 0), min(end - first, weight), weight)

    def parts(self, extent: Extent) -> Iterator[Part]:
        """The parts of files that an extent names; `file` in them is the index into the plan's files."""
        first = int(self.pieces.file[extent.piece])
        if self.formats[first][0] != "text":
            yield self._part(first, int(self.pieces.part[extent.piece]), extent.lo, extent.hi, extent.weight)
            return
        units = max(1, int(self.pieces.bytes[extent.piece]))
        low, high = extent.lo * units // extent.weight, extent.hi * units // extent.weight
        begin = 0
        for i in range(first, first + int(self.pieces.files[extent.piece])):
            if low <= min(begin, units - 1) < high:
                yield self._part(i, 0, 0, 1, 1)
            begin += self.files[i].size

    def _part(self, i: int, piece: int, lo: int, hi: int, weight: int) -> Part:
        file = self.files[i]
        format, compression = self.formats[i]
        return Part(
            path=os.path.join(self.prefix, file.name),
            file=self.first_file + i,
            size=file.size,
            format=format,
            compression=compression,
            piece=piece,
            lo=lo,
            hi=hi,
            weight=weight,
            step_bytes=self.step_bytes,
        )


def format_name(format: str, compression: str) -> str:
    """The name of a format in the plan's ratios: "jsonl", "jsonl.zstd", …"""
    return f"{format}.{compression}" if compression else format


def step_bytes(stored: int, shards: int) -> int:
    """A source's step: the largest power of two ≤ 1 MiB that gives 16 steps per shard, at least 16 KiB."""
    per_shard = max(1, stored // max(1, shards) // 16)
    return min(1 << 20, max(1 << 14, 1 << (per_shard.bit_length() - 1)))
