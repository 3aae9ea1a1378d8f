"""Sources → pieces → shards, as index arithmetic.

A **piece** is what can be entered by itself: 4 MiB of a line file, a row group, a record batch, a
compressed file, or some neighbouring small text files. A source's pieces, once per use, each use in
its own keyed order, form one list; a piece's weight is its estimated text bytes that are kept.
Shard b of B takes from every source what begins in [b/B, (b+1)/B) of the source's summed weight. So
all sources end together, every shard mixes them at the recipe's shares, and which process makes
which shard never shows.

    pieces of one source, in keyed order   |--5--|-2-|----9----|---6---|-2-|      weights
    shards                                 |     0     |     1     |    2    |
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from packprep.errors import RecipeError, SourceError
from packprep.messages import nearest
from packprep.randomness import PIECE_ORDER, bits64, permute, text_key
from packprep.recipe import Source
from packprep.sources.files import Files, Pieces
from packprep.sources.formats import FORMATS, PIECE_BYTES, Slice, position_of
from packprep.storage import is_url

_WEIGHT_BITS = 16  # the kept part of a piece is an integer per 2¹⁶
# pieces: millions of them are worked on in parts that stay in the processor's cache
_AT_ONCE = 1 << 18
MOST_PIECES = 1 << 26
"""Pieces of all sources, once for each use: 256 TiB of lines. Every process holds twelve bytes of
each."""
PIECES_OF_A_USE = 256
"""As many pieces, at least, a use takes the time of."""
ALL = 0, 1 << 53
"""The sample of a source that keeps all documents: as `PlannedSource.sample`, [low, high) in
2⁻⁵³."""
UNREAD = ""
"""The prefix of a source whose files are not to be read."""
IN_STORE = "store:"
"""What the prefix of a source begins with that lies in a token store; the store's path or URL
follows."""


def _chunks(size: int) -> Iterator[slice]:
    return (slice(begin, min(begin + _AT_ONCE, size)) for begin in range(0, size, _AT_ONCE))


class PlannedSource:
    """A source with what the plan resolved: its files, the ratios of its formats, its repeat and
    sample."""

    def __init__(
        self,
        source: Source,
        index: int,
        prefix: str,
        files: Files,
        first_file: int,
        resolved: Mapping[str, Any],
        seed: int,
        in_order: bool = False,
        open_store: Callable[[str], Any] | None = None,
        kinds: tuple[str, ...] = (),
    ):
        """resolved: the plan's ratios, repeat, step_bytes and prefix.
        in_order: the pieces stay in the files' order, as in a token store. open_store: a store's
        place → the store. kinds: of media, by name."""
        self.kinds = kinds
        self.in_order = in_order
        self._open_store = open_store
        self.source, self.index, self.prefix, self.files, self.first_file = (
            source,
            index,
            prefix,
            files,
            first_file,
        )
        self.name, self.seed = source.name, seed
        self.planned_at_url = is_url(resolved.get("prefix", prefix))
        self.ratios: Mapping[str, int] = resolved["ratios"]
        self.repeat: float = resolved["repeat"]
        self.step_bytes: int = resolved.get("step_bytes", 1 << 20)
        self._store_digest: str | None = resolved.get("store")
        self.formats = files.formats
        low, high = (int(Fraction(bound) * 2**53) for bound in source.sample)
        self.sample = low, high

    @property
    def in_store(self) -> bool:
        """Whether a token store is read in place of its files."""
        return self.prefix.startswith(IN_STORE)

    @cached_property
    def store(self) -> Any:
        """The token store (`documents/store.py`), opened when it is first read.

        SourceError where it is not the plan's.
        """
        assert self._open_store is not None
        found = self._open_store(self.prefix.removeprefix(IN_STORE))
        if self._store_digest not in (None, *found.digests):
            raise SourceError(
                f"{other_store(self.name, found, self._store_digest)}; put the plan's back"
            )
        return found

    @property
    def uses(self) -> int:
        """How often the documents are gone through: the last time perhaps not for all."""
        whole = int(self.repeat)
        return whole + (self.repeat > whole)

    def kept_of_use(self, use: int) -> Fraction:
        """The part of the documents that use number `use` takes by its repeat: 1, or for the last
        use a fraction."""
        return min(Fraction(1), Fraction(self.repeat) - use)

    @cached_property
    def pieces(self) -> Pieces:
        """The pieces of the files, in the files' order."""
        return Pieces(self.files)

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
            held = self.files.held(found.file, found.part, found.bytes)
            weights[some] = np.maximum((held * ratio[self.files.kind[found.file]]) >> 10, 1)
        return weights

    def order(self, uses: range) -> np.ndarray:
        """int32 or int64[uses, P]: the pieces in the keyed order of each of these uses, or in the
        files'."""
        size = len(self.pieces)
        order = np.empty((len(uses), size), np.int32 if size < 1 << 31 else np.int64)
        if self.in_order:
            order[:] = np.arange(size)
            return order
        keys = bits64(np.array([text_key(self.seed, self.name, use) for use in uses]), PIECE_ORDER)[
            :, None
        ]
        for some in _chunks(size):
            pieces = np.tile(np.arange(some.start, some.stop), (len(uses), 1))
            order[:, some] = permute(pieces, size, keys)
        return order

    @cached_property
    def _list(self) -> tuple[np.ndarray, np.ndarray]:
        """(pieces [uses · P] in one order, ends int64[uses · P] of their weights summed)."""
        low, high = self.source.sample
        size, own = len(self.pieces), self.weights()
        pieces = np.empty((self.uses, size), np.int32 if size < 1 << 31 else np.int64)
        ends = np.empty((self.uses, size), np.int64)
        sampled, before, at_once = (
            Fraction(high) - Fraction(low),
            0,
            max(1, _AT_ONCE // max(1, size)),
        )
        for first in range(0, self.uses if size else 0, at_once):
            uses = range(first, min(first + at_once, self.uses))
            some = slice(uses.start, uses.stop)
            kept = [int(self.kept_of_use(use) * sampled * (1 << _WEIGHT_BITS)) for use in uses]
            pieces[some] = order = self.order(uses)
            weights = own[order]
            weights *= np.array(kept, np.int64)[:, None]
            weights >>= _WEIGHT_BITS
            np.maximum(weights, 1, out=weights)
            np.cumsum(weights, out=ends[some].reshape(-1))
            ends[some] += before
            before = int(ends[uses.stop - 1, -1])
        return pieces.reshape(-1), ends.reshape(-1)

    @cached_property
    def weight(self) -> int:
        """The summed weight: estimated text bytes that are kept, over all uses."""
        ends = self._list[1]
        return int(ends[-1]) if len(ends) else 0

    def places(self, shard: int, shards: int) -> range:
        """The places, in the list of all pieces and uses, of what a shard takes: of the first and
        the last perhaps a part."""
        ends = self._list[1]
        begin, end = (b * self.weight // shards for b in (shard, shard + 1))
        if begin == end:
            return range(0)
        return range(
            int(np.searchsorted(ends, begin, "right")), int(np.searchsorted(ends, end, "left")) + 1
        )

    def taken(
        self, shard: int, shards: int, places: Iterable[int]
    ) -> Iterator[tuple[int, int, int, int, int]]:
        """(piece, use, lo, hi, weight) of what a shard takes at some of its places: [lo, hi) of the
        piece's weight."""
        pieces, ends = self._list
        begin, end = (b * self.weight // shards for b in (shard, shard + 1))
        for place in places:
            first = int(ends[place - 1]) if place else 0
            weight = int(ends[place]) - first
            use = place // len(self.pieces)
            yield int(pieces[place]), use, max(begin - first, 0), min(end - first, weight), weight

    def slices(self, shard: int, shards: int) -> Iterator[Slice]:
        """What shard number `shard` of `shards` takes, in order."""
        for of_piece in self.taken(shard, shards, self.places(shard, shards)):
            yield from self.slices_of(*of_piece)

    def slices_of(
        self, piece: int, use: int = 0, lo: int = 0, hi: int = 1, weight: int = 1
    ) -> Iterator[Slice]:
        """The slices that are [lo, hi) of a piece's weight: one, or one for each whole text file
        that begins there.

        `file` in them is the index into the plan's files.
        """
        found = self.pieces.at(np.array([piece]))
        i = int(found.file[0])
        format, own = self.formats[i][0], [(i, int(found.part[0]), lo, hi, weight)]
        if FORMATS[format].position == "whole":
            files, units = self.files_of_piece(piece), max(1, int(found.bytes[0]))
            sizes = self.files.sizes[files.start : files.stop]
            begins = np.minimum(np.cumsum(sizes) - sizes, units - 1)
            inside = (lo * units // weight <= begins) & (begins < hi * units // weight)
            own = [(files.start + k, 0, 0, 1, 1) for k in np.flatnonzero(inside).tolist()]
        for i, part, low, high, of in own:
            yield Slice(
                path=self.path(i),
                file=self.first_file + i,
                size=int(self.files.sizes[i]),
                format=format,
                compression=self.formats[i][1],
                piece=part,
                lo=low,
                hi=high,
                weight=of,
                step_bytes=self.step_bytes,
                use=use,
            )

    def at_places(self, places: range) -> tuple[np.ndarray, np.ndarray]:
        """(pieces, uses), int64[n] each, at some places of that list."""
        pieces = self._list[0][places.start : places.stop].astype(np.int64)
        return pieces, np.arange(places.start, places.stop) // max(1, len(self.pieces))

    def shards_of(self, pieces: np.ndarray, shards: int) -> np.ndarray:
        """int64[k]: which of `shards` shards take something of any of these pieces, int64[n], in
        any use; ascending."""
        listed, ends = self._list
        found: set[int] = set()
        if self.weight:
            at = pieces if self.in_order else np.flatnonzero(np.isin(listed, pieces))
            firsts = np.where(at > 0, ends[at - 1], 0).tolist()
            for first, end in zip(firsts, ends[at].tolist(), strict=True):
                # Shard b takes [b · weight // shards, (b + 1) · weight // shards).
                low, high = (-(-unit * shards // self.weight) - 1 for unit in (first + 1, end))
                found.update(range(low, high + 1))
        return np.array(sorted(found), np.int64)

    def files_of_piece(self, piece: int) -> range:
        """The source's files that have a part in a piece: one, or the text files that share it."""
        found = self.pieces.at(np.array([piece]))
        return range(int(found.file[0]), int(found.file[0] + found.files[0]))

    def pieces_at(self, i: int, positions: np.ndarray) -> np.ndarray:
        """int64[n]: the pieces of file i that may hold a document at one of these positions."""
        pieces = np.array(self.pieces.of_file(i), np.int64)
        if position_of(*self.formats[i]) != "byte":
            return pieces
        numbers = np.unique(positions // PIECE_BYTES)
        return pieces[numbers[numbers < len(pieces)]]

    def path(self, i: int) -> str:
        """Where file i of the source lies. SourceError where its files are not to be read."""
        if self.prefix == UNREAD:
            raise SourceError(
                f"source {self.name!r} is not read where a plan alone says that it lies: --source"
                f" {self.name}=PREFIX names a place, --from-plan believes the plan"
            )
        return os.path.join(self.prefix, self.files.names[i])


def other_store(name: str, store: Any, planned: str | None) -> str:
    """Say that the token store of a source is not the one whose digest its plan has."""
    return (
        f"source {name!r}: the token store {store} is another than the plan names (digest"
        f" {store.digest}, in the plan {planned}): it was made again since"
    )


def pieces_of_all_uses(sources: Sequence[PlannedSource]) -> int:
    """The pieces of all sources, once for each use, which counts as PIECES_OF_A_USE where it has
    fewer."""
    return sum(source.uses * max(PIECES_OF_A_USE, len(source.pieces)) for source in sources)


def format_name(format: str, compression: str) -> str:
    """The name of a format in the plan's ratios: "jsonl", "jsonl.zstd", …"""
    return f"{format}.{compression}" if compression else format


def step_bytes(stored: int, shards: int) -> int:
    """A source's step: the largest power of two ≤ 1 MiB that gives 16 steps per shard, at least 16
    KiB."""
    per_shard = max(1, stored // max(1, shards) // 16)
    return min(1 << 20, max(1 << 14, 1 << (per_shard.bit_length() - 1)))


def place_of(source: PlannedSource, place: str, what: str = "--doc") -> tuple[int | None, int]:
    """(the file's place in the source or None, position) of "FILE:POSITION" or "POSITION";
    RecipeError, with `what` it is, for a place that is none."""
    file, colon, text = place.rpartition(":")
    if (
        not text.isascii()
        or not text.isdecimal()
        or int(text) >= np.iinfo(np.int64).max
        or (colon and not file)
    ):
        raise RecipeError(
            f"{what} {place}: expected POSITION or FILE:POSITION; a position is the byte at which a"
            " document's line begins, its row number, or 0 of a text file"
        )
    if not colon:
        return None, int(text)
    names = source.files.names
    if file not in names:
        raise RecipeError(
            f"{what} {place}: source {source.name!r} has no file {file!r}, named relative to its"
            f" prefix; it has {nearest(file, names)}"
        )
    return list(names).index(file), int(text)
