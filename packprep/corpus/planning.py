"""Sources → pieces → shards, as index arithmetic.

A **piece** is what can be entered by itself: 4 MiB of a line file, a row group, a record batch, a compressed file, or some
neighbouring small text files. A source's pieces, once per use, each use in its own keyed order, form one list; a piece's
weight is its estimated text bytes that are kept. Shard b of B takes from every source what begins in
[b/B, (b+1)/B) of the source's summed weight. So all sources end together, every shard mixes them at the recipe's shares,
and which process makes which shard never shows.

    pieces of one source, in keyed order   |--5--|-2-|----9----|---6---|-2-|      weights
    shards                                 |     0     |     1     |    2    |
"""

import glob
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from packprep.corpus.files import Files, Pieces, pieces_of
from packprep.corpus.readers import Part
from packprep.errors import SourceError
from packprep.randomness import PIECE_ORDER, bits64, permute, text_key
from packprep.recipe import Source

_WEIGHT_BITS = 16  # the kept part of a piece is an integer per 2¹⁶
_AT_ONCE = 1 << 18  # pieces: millions of them are worked on in parts that stay in the processor's cache


def _chunks(size: int) -> Iterator[slice]:
    return (slice(begin, min(begin + _AT_ONCE, size)) for begin in range(0, size, _AT_ONCE))


def _has_wildcard(part: str) -> bool:
    return any(c in part for c in "*?[")


def fixed_prefix(patterns: Sequence[str], base: str = os.sep) -> str:
    """The longest folder common to all absolute patterns up to their first wildcard; for a file, its folder.

    Nothing in `base`, the recipe's folder, is a wildcard.
    """
    folders = []
    for pattern in patterns:
        parts = pattern.split(os.sep)
        literal = len(os.path.commonprefix([parts, base.split(os.sep)]))
        wild = (i for i, part in enumerate(parts) if i >= literal and _has_wildcard(part))
        folders.append(os.sep.join(parts[: next(wild, len(parts) - 1)]) or os.sep)
    return os.path.commonpath(folders)


def find_files(source: Source, index: int, base: Path, prefix: str | None) -> tuple[str, Files]:
    """(prefix, files sorted bytewise by name) of a source. `prefix` says where the files lie now, if they were moved.

    SourceError for a pattern that matches nothing, a folder, a pipe or device, a name that is not valid UTF-8, or a file
    that cannot be read.
    """
    patterns = [os.path.abspath(os.path.join(base, os.path.expanduser(path))) for path in source.paths]
    for path in source.paths:
        if "://" in path:
            raise SourceError(f"source {source.name!r}: {path}: URLs cannot be read yet; give local files")
    root = fixed_prefix(patterns, os.path.abspath(base))
    if prefix is not None:
        moved = os.path.abspath(prefix)
        patterns = [os.path.join(moved, os.path.relpath(pattern, root)) for pattern in patterns]
        root = moved
    sizes: dict[str, int] = {}
    for pattern, given in zip(patterns, source.paths, strict=True):
        name = os.path.relpath(pattern, root)
        if _has_wildcard(name) and not os.path.exists(pattern):
            matched = False
            for found in glob.iglob(name, root_dir=root, recursive=True):
                size = _size(os.path.join(root, found))  # the one call for each file that the file system sees
                if size is not None:
                    sizes[found], matched = size, True
            if not matched:
                raise SourceError(f"source {source.name!r}: {given} matches no file (looked for {pattern})")
        elif os.path.isdir(pattern):
            raise SourceError(
                f"source {source.name!r}: {given} is a folder; say which files, as in {given.rstrip('/')}/**/*.jsonl"
            )
        elif not os.path.exists(pattern):
            raise SourceError(f"source {source.name!r}: {given}: no such file (looked for {pattern})")
        elif not os.path.isfile(pattern):
            raise SourceError(
                f"source {source.name!r}: {given} is no regular file but a pipe, a device or a socket, which cannot be "
                "read twice; write what it gives to a file"
            )
        else:
            try:
                sizes[name] = os.path.getsize(pattern)
            except OSError as error:
                raise SourceError(f"source {source.name!r}: {pattern}: {error.strerror}") from None
    for name in sizes:
        try:
            name.encode("utf-8")
        except UnicodeEncodeError:
            raise SourceError(
                f"source {source.name!r}: the name {os.fsencode(name)!r} is not valid UTF-8; rename the file"
            ) from None
    ordered = sorted(sizes)  # code points sort as their UTF-8 does
    return root, Files(index, ordered, np.array([sizes[name] for name in ordered], np.int64), source.format, root)


def _size(path: str) -> int | None:
    """The bytes of a regular file; None if it is none, or cannot be asked for."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


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
        files: Files,
        first_file: int,
        resolved: Mapping[str, Any],
        seed: int,
    ):
        self.source, self.index, self.prefix, self.files, self.first_file = source, index, prefix, files, first_file
        self.name, self.seed = source.name, seed
        self.ratios: Mapping[str, int] = resolved["ratios"]
        self.repeat: float = resolved["repeat"]
        self.step_bytes: int = resolved.get("step_bytes", 1 << 20)
        self.formats = files.formats

    @property
    def uses(self) -> int:
        """How often the documents are gone through: the last time perhaps not for all."""
        whole = int(self.repeat)
        return whole + (self.repeat > whole)

    def kept_of_use(self, use: int) -> Fraction:
        """The part of the documents that use number `use` takes by its repeat: 1, or for the last use a fraction."""
        return min(Fraction(1), Fraction(self.repeat) - use)

    @cached_property
    def pieces(self) -> Pieces:
        """The pieces of the files, in the files' order."""
        return pieces_of(self.files)

    def pieces_of_kind(self, kind: int) -> np.ndarray:
        """The pieces of the files of one of `files.kinds`, ascending."""
        found = [np.zeros(0, np.int32)]
        for some in _chunks(len(self.pieces)):
            pieces = np.arange(some.start, some.stop)
            own = pieces[self.files.kind[self.pieces.at(pieces).file] == kind]
            found.append(own.astype(np.int32 if len(self.pieces) < 1 << 31 else np.int64))
        return np.concatenate(found)

    def weights(self) -> np.ndarray:
        """int64[P]: estimated text bytes of each piece, at least 1."""
        ratio = np.array([self.ratios[format_name(*f)] for f in self.files.kinds], np.int64)
        weights = np.empty(len(self.pieces), np.int64)
        for some in _chunks(len(weights)):
            found = self.pieces.at(np.arange(some.start, some.stop))
            weights[some] = np.maximum((found.bytes * ratio[self.files.kind[found.file]]) >> 10, 1)
        return weights

    def order(self, use: int) -> np.ndarray:
        """int32 or int64[P]: the pieces in the keyed order of one use."""
        size = len(self.pieces)
        order = np.empty(size, np.int32 if size < 1 << 31 else np.int64)
        key = bits64(text_key(self.seed, self.name, use), PIECE_ORDER)
        for some in _chunks(size):
            order[some] = permute(np.arange(some.start, some.stop), size, key)
        return order

    @cached_property
    def _list(self) -> tuple[np.ndarray, np.ndarray]:
        """(pieces [uses · P] in one order, ends int64[uses · P] of their weights summed)."""
        low, high = self.source.sample
        size, own = len(self.pieces), self.weights()
        pieces, ends = np.empty(self.uses * size, np.int32 if size < 1 << 31 else np.int64), []
        before = 0
        for use in range(self.uses):
            kept = int(self.kept_of_use(use) * (Fraction(high) - Fraction(low)) * (1 << _WEIGHT_BITS))
            pieces[use * size : (use + 1) * size] = order = self.order(use)
            weights = own[order]
            weights *= kept
            weights >>= _WEIGHT_BITS
            np.maximum(weights, 1, out=weights)
            np.cumsum(weights, out=weights)
            weights += before
            before = int(weights[-1]) if size else 0
            ends.append(weights)
        return pieces, np.concatenate(ends) if len(ends) != 1 else ends[0]

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
        per_use = len(self.pieces)
        for i in range(int(np.searchsorted(ends, begin, "right")), int(np.searchsorted(ends, end, "left")) + 1):
            first = int(ends[i - 1]) if i else 0
            weight = int(ends[i]) - first
            yield Extent(int(pieces[i]), i // per_use, max(begin - first, 0), min(end - first, weight), weight)

    def parts(self, extent: Extent) -> Iterator[Part]:
        """The parts of files that an extent names; `file` in them is the index into the plan's files."""
        piece = self.pieces.at(np.array([extent.piece]))
        first = int(piece.file[0])
        if self.formats[first][0] != "text":
            yield self._part(first, int(piece.part[0]), extent.lo, extent.hi, extent.weight)
            return
        units = max(1, int(piece.bytes[0]))
        low, high = extent.lo * units // extent.weight, extent.hi * units // extent.weight
        begin = 0
        for i in range(first, first + int(piece.files[0])):
            if low <= min(begin, units - 1) < high:
                yield self._part(i, 0, 0, 1, 1)
            begin += int(self.files.sizes[i])

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
