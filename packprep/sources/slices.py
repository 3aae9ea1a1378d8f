"""Divide sources into splits and shards, as index arithmetic.

A **split** (`piece` in the code) is the smallest part of a source that can be read independently.
It is a row group, a record batch, a compressed file, 4 MiB of a line file, or a few adjacent small
text files. Each pass (`use` in the code) reads the splits in the order of a keyed permutation. The
passes are concatenated into one list. In each pass, a split has a weight: the estimated number of
text bytes that the pass keeps from it.

Shard b of B takes the interval [b/B, (b+1)/B) of each source's summed weight. So all sources end
together, and every shard mixes them at the recipe's shares. The result does not depend on the
process that builds a shard.

    pieces of one source, in keyed order   |--5--|-2-|----9----|---6---|-2-|      weights
    shards                                 |     0     |     1     |    2    |
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from packprep.errors import RecipeError, SourceError
from packprep.messages import nearest
from packprep.randomness import PIECE_ORDER, bits64, permute, text_key
from packprep.recipe import Source
from packprep.sources.files import Files, Pieces
from packprep.sources.formats import (
    FORMATS,
    PIECE_BYTES,
    Grouping,
    IdStream,
    Slice,
    position_of,
)
from packprep.sources.passes import Passes
from packprep.storage import is_url

_WEIGHT_BITS = 16  # The kept fraction of a split is an integer in units of 2⁻¹⁶.
# Number of splits processed at once. Chunks of this size stay in the processor's cache.
_AT_ONCE = 1 << 18
MOST_PIECES = 1 << 26
"""Maximum number of splits of all sources, counted once per pass. This equals 256 TiB of line
files. Every process stores twelve bytes per split.
"""
PIECES_OF_A_USE = 256
"""A pass counts as at least this many splits, because each pass has a fixed cost in time."""
ALL = 0, 1 << 53
"""The hash split (`sample`) that keeps all documents: the interval [low, high) in units of 2⁻⁵³,
as in `PlannedSource.sample`.
"""
UNREAD = ""
"""Value of `PlannedSource.prefix` for a source with files that must not be read."""
IN_STORE = "store:"
"""Start of `PlannedSource.prefix` for a source in a token store. The store's location follows."""


def _chunks(size: int) -> Iterator[slice]:
    return (slice(begin, min(begin + _AT_ONCE, size)) for begin in range(0, size, _AT_ONCE))


class PlannedSource:
    """A source with the values that the plan resolved: files, ratios, passes and hash split.

    A ratio is the estimated number of text bytes per 1024 bytes of a format's splits. Only the
    documents that `where` and `repeat` keep in pass 0 count.
    """

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
        stream: IdStream | None = None,
    ):
        """Create a source from its settings and the plan.

        Args:
            source: The source's settings in the recipe.
            index: Index of the source.
            prefix: Folder or URL of the files, UNREAD, or IN_STORE followed by a store's location.
            files: The files of the source.
            first_file: Index of the source's first file among all files of the plan.
            resolved: The plan's record of the source, with `ratios`, `repeat`, `pass_shares`,
                `step_bytes`, `prefix` and `store`.
            seed: Random seed of the build.
            in_order: Whether passes read the splits in file order instead of a keyed order. This is
                the case when a token store is written.
            open_store: Function that opens the token store at a path or URL. It is needed only if
                `prefix` starts with IN_STORE.
            kinds: Names of the media kinds.
            stream: The facts that token streams are read with. None if no file is read.
        """
        self.kinds, self.stream = kinds, stream
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
        self.pass_shares: Sequence[float] | None = resolved.get("pass_shares")
        """For each pass, the estimated text bytes relative to pass 0. None if each pass reads all
        documents, except a partial last pass. It is set if `repeat` is an expression."""
        self.step_bytes: int = resolved["step_bytes"]
        self._store_digest: str | None = resolved.get("store")
        self.formats = files.formats
        self.grouping: Grouping | None = None
        if source.group_by:
            self.grouping = Grouping(source.group_by, source.order_by, len(source.between))
        low, high = (int(Fraction(bound) * 2**53) for bound in source.sample)
        self.sample = low, high

    @property
    def in_store(self) -> bool:
        """Return whether the documents are read from a token store instead of the files."""
        return self.prefix.startswith(IN_STORE)

    @cached_property
    def store(self) -> Any:
        """Return the token store (`documents/store.py`), opened at first use.

        Raises:
            SourceError: If no version of the store has the digest in the plan.
        """
        assert self._open_store is not None
        store = self._open_store(self.prefix.removeprefix(IN_STORE))
        if self._store_digest not in (None, *store.digests):
            raise SourceError(
                f"{other_store(self.name, store, self._store_digest)}\n"
                "hint: restore the store that the plan names"
            )
        return store

    @cached_property
    def passes(self) -> Passes | None:
        """Return the expressions that determine the passes of each document, or None."""
        return Passes.of(self.source, self.index)

    @property
    def uses(self) -> int:
        """Return the number of passes over the documents. The last pass may be partial."""
        whole_passes = int(self.repeat)
        return whole_passes + (self.repeat > whole_passes)

    def kept_of_use(self, use: int) -> Fraction:
        """Return the fraction of all documents to read in pass number `use`.

        The fraction is 1, except in the last pass if `repeat` is not an integer. It is also 1 if
        `repeat` is an expression, because a `ByFields` then selects the documents of each pass.
        """
        if isinstance(self.source.repeat, str):
            return Fraction(1)
        return min(Fraction(1), Fraction(self.repeat) - use)

    def _share_of_use(self, use: int) -> Fraction:
        """Return the estimated text bytes of pass `use`, relative to a whole pass."""
        return (
            self.kept_of_use(use) if self.pass_shares is None else Fraction(self.pass_shares[use])
        )

    @cached_property
    def pieces(self) -> Pieces:
        """Return the splits of the files, in file order."""
        return Pieces(self.files)

    def pieces_of_kind(self, kind: int) -> np.ndarray:
        """Return the indices of the splits of all files with format `files.kinds[kind]`.

        The result is int32[k], ascending.
        """
        piece_arrays = [np.zeros(0, np.int32)]
        for chunk in _chunks(len(self.pieces)):
            pieces = np.arange(chunk.start, chunk.stop)
            own_pieces = pieces[self.files.kind[self.pieces.at(pieces).file] == kind]
            piece_arrays.append(own_pieces.astype(np.int32))
        return np.concatenate(piece_arrays)

    def weights(self) -> np.ndarray:
        """Return the estimated text bytes of each split, int64[P], at least 1 each."""
        ratio = np.array([self.ratios[format_name(*f)] for f in self.files.kinds], np.int64)
        weights = np.empty(len(self.pieces), np.int64)
        for chunk in _chunks(len(weights)):
            columns = self.pieces.at(np.arange(chunk.start, chunk.stop))
            sizes = self.files.held(columns.file, columns.part, columns.bytes)
            weights[chunk] = np.maximum((sizes * ratio[self.files.kind[columns.file]]) >> 10, 1)
        return weights

    def order(self, uses: range) -> np.ndarray:
        """Return the indices of the P splits in the reading order of each pass.

        The result is int32[len(uses), P]. The order is random and depends on the seed, the source's
        name and the pass. With `in_order`, it is the file order.
        """
        size = len(self.pieces)
        order = np.empty((len(uses), size), np.int32)
        if self.in_order:
            order[:] = np.arange(size)
            return order
        keys = bits64(np.array([text_key(self.seed, self.name, use) for use in uses]), PIECE_ORDER)[
            :, None
        ]
        for chunk in _chunks(size):
            pieces = np.tile(np.arange(chunk.start, chunk.stop), (len(uses), 1))
            order[:, chunk] = permute(pieces, size, keys)
        return order

    @cached_property
    def _list(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (pieces, ends): the list of the splits of all passes.

        The list has passes · P entries. `pieces`, int32, has the index of each entry's split.
        `ends`, int64, has the sum of the weights up to and including each entry.
        """
        low, high = self.source.sample
        size, piece_weights = len(self.pieces), self.weights()
        pieces = np.empty((self.uses, size), np.int32)
        ends = np.empty((self.uses, size), np.int64)
        sampled, weight_before, at_once = (
            Fraction(high) - Fraction(low),
            0,
            max(1, _AT_ONCE // max(1, size)),
        )
        # The passes of a small source are computed together, in few calls of NumPy.
        for first_use in range(0, self.uses if size else 0, at_once):
            uses = range(first_use, min(first_use + at_once, self.uses))
            rows = slice(uses.start, uses.stop)
            factors = [int(self._share_of_use(use) * sampled * (1 << _WEIGHT_BITS)) for use in uses]
            pieces[rows] = order = self.order(uses)
            weights = piece_weights[order]
            weights *= np.array(factors, np.int64)[:, None]
            weights >>= _WEIGHT_BITS
            # A weight of at least 1 puts every split into the interval of some shard.
            np.maximum(weights, 1, out=weights)
            # The running sum continues from pass to pass, as if all passes were one list.
            np.cumsum(weights, out=ends[rows].reshape(-1))
            ends[rows] += weight_before
            weight_before = int(ends[uses.stop - 1, -1])
        return pieces.reshape(-1), ends.reshape(-1)

    def reads_like(self, other: "PlannedSource") -> bool:
        """Return whether the same source in another plan has the same list of splits."""
        return all(
            np.array_equal(*columns) for columns in zip(self._list, other._list, strict=True)
        )

    @cached_property
    def weight(self) -> int:
        """Return the summed weight of all splits in all passes."""
        ends = self._list[1]
        return int(ends[-1]) if len(ends) else 0

    def places(self, shard: int, shards: int) -> range:
        """Return the range of entries that a shard reads.

        Entries are counted in the list of the splits of all passes. The shard may read only a part
        of the first entry and of the last entry.
        """
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
        """Yield the part of each given split that a shard reads.

        Args:
            shard: Index of the shard.
            shards: Number of shards.
            places: Indices in the list of the splits of all passes. They are in the range that the
                method `places` returns for the shard.

        Yields:
            (piece, use, lo, hi, weight). `piece` is the index of the split, `use` the number of the
            pass, and `weight` the split's weight in this pass. The shard reads the split from
            lo / weight to hi / weight of its length.
        """
        pieces, ends = self._list
        begin, end = (b * self.weight // shards for b in (shard, shard + 1))
        for place in places:
            start = int(ends[place - 1]) if place else 0
            weight = int(ends[place]) - start
            use = place // len(self.pieces)
            yield int(pieces[place]), use, max(begin - start, 0), min(end - start, weight), weight

    def slices(self, shard: int, shards: int) -> Iterator[Slice]:
        """Yield the work ranges (`Slice`) of shard number `shard` of `shards`, in order."""
        for of_piece in self.taken(shard, shards, self.places(shard, shards)):
            yield from self.slices_of(*of_piece)

    def slices_of(
        self, piece: int, use: int = 0, lo: int = 0, hi: int = 1, weight: int = 1
    ) -> Iterator[Slice]:
        """Yield the work ranges for a split's part from lo / weight to hi / weight of its length.

        If the split consists of text files, there is one work range for each file that starts in
        this part. For any other split, there is one work range. `Slice.file` is an index into all
        files of the plan.
        """
        columns = self.pieces.at(np.array([piece]))
        i = int(columns.file[0])
        format, ranges = self.formats[i][0], [(i, int(columns.part[0]), lo, hi, weight)]
        # Text files are not divided. A file belongs to the part that contains its start.
        if FORMATS[format].position == "whole":
            files, units = self.files_of_piece(piece), max(1, int(columns.bytes[0]))
            sizes = self.files.sizes[files.start : files.stop]
            # An empty last file would start at the end of the split, which is in no part.
            begins = np.minimum(np.cumsum(sizes) - sizes, units - 1)
            inside = (lo * units // weight <= begins) & (begins < hi * units // weight)
            ranges = [(files.start + k, 0, 0, 1, 1) for k in np.flatnonzero(inside).tolist()]
        for i, piece_number, low, high, total_weight in ranges:
            yield Slice(
                path=self.path(i),
                file=self.first_file + i,
                size=int(self.files.sizes[i]),
                format=format,
                compression=self.formats[i][1],
                piece=piece_number,
                lo=low,
                hi=high,
                weight=total_weight,
                step_bytes=self.step_bytes,
                use=use,
                stream=self.stream,
                grouping=self.grouping,
            )

    def at_places(self, places: range) -> tuple[np.ndarray, np.ndarray]:
        """Return (pieces, uses): the split and the pass of each of n entries, int64[n] each.

        `places` is the range of the entries, from the method `places`.
        """
        pieces = self._list[0][places.start : places.stop].astype(np.int64)
        return pieces, np.arange(places.start, places.stop) // max(1, len(self.pieces))

    def shards_of(self, pieces: np.ndarray, shards: int) -> np.ndarray:
        """Return the shards that read from at least one of the splits in `pieces`.

        All passes are searched.

        Args:
            pieces: int64[n], indices of splits.
            shards: Number of shards.

        Returns:
            int64[k], ascending indices of the k shards.
        """
        listed, ends = self._list
        shard_indices: set[int] = set()
        if self.weight:
            # In file order, the index of a split is also its index in the list.
            places = pieces if self.in_order else np.flatnonzero(np.isin(listed, pieces))
            starts = np.where(places > 0, ends[places - 1], 0).tolist()
            for start, end in zip(starts, ends[places].tolist(), strict=True):
                # Shard b takes the interval [b · weight // shards, (b + 1) · weight // shards).
                low, high = (-(-unit * shards // self.weight) - 1 for unit in (start + 1, end))
                shard_indices.update(range(low, high + 1))
        return np.array(sorted(shard_indices), np.int64)

    def files_of_piece(self, piece: int) -> range:
        """Return the indices of the source's files that have bytes in a split.

        This is one file, or several text files that share the split.
        """
        columns = self.pieces.at(np.array([piece]))
        return range(int(columns.file[0]), int(columns.file[0] + columns.files[0]))

    def pieces_at(self, i: int, positions: np.ndarray) -> np.ndarray:
        """For file `i`, return the splits that may contain the documents at `positions`.

        `positions`, int64[n], are positions in the file. The result, int64[k], has ascending
        indices of splits in the source. With group_by, they are positions of records, and the
        document of a record may begin in any earlier split.
        """
        pieces = np.array(self.pieces.of_file(i), np.int64)
        # A position gives the split only if it is a byte of the file.
        if position_of(*self.formats[i]) != "byte":
            return pieces
        if self.grouping:
            return pieces[: int(positions.max(initial=-1)) // PIECE_BYTES + 1]
        numbers = np.unique(positions // PIECE_BYTES)
        return pieces[numbers[numbers < len(pieces)]]

    def path(self, i: int) -> str:
        """Return the path or URL of file `i` of the source.

        Raises:
            SourceError: If `prefix` is UNREAD. The source's files must not be read in this case.
        """
        if self.prefix == UNREAD:
            raise SourceError(
                f"source {self.name!r} is not read, because only the plan gives its location\n"
                f"hint: pass --source {self.name}=PREFIX, or --from-plan to trust the plan"
            )
        return os.path.join(self.prefix, self.files.names[i])


def common_slices(
    readers: Sequence[tuple[PlannedSource, int, int]],
) -> Iterator[tuple[Slice, list[int]]]:
    """Yield the work ranges of several shards, with the shards that read each work range.

    A part that several shards have in common is one work range, so that it can be read once. The
    work ranges of a shard are in its reading order. Together, they cover the same documents as
    `PlannedSource.slices`.

        shards 0, 1 of 2    |------0------|------1------|
        shard 0 of 3        |----2----|
        work ranges         |---0,2---|-0-|------1------|

    Args:
        readers: (source, shard, number of shards) for each shard. The sources are the same source
            in different plans. They may differ only in `step_bytes`.

    Yields:
        (work range, indices of its shards in `readers`).
    """
    step = min(source.step_bytes for source, _, _ in readers)
    # `parts_by_place` maps each entry of the list to the parts of it that the shards read.
    parts_by_place: dict[int, list[tuple[int, tuple[int, int, int, int, int]]]] = {}
    for reader, (source, shard, shards) in enumerate(readers):
        places = source.places(shard, shards)
        for place, of_piece in zip(places, source.taken(shard, shards, places), strict=True):
            parts_by_place.setdefault(place, []).append((reader, of_piece))
    for _, of_pieces in sorted(parts_by_place.items()):
        # A split of text files has a work range for each file.
        by_file: dict[int, list[tuple[int, Slice]]] = {}
        for reader, of_piece in of_pieces:
            for work_range in readers[reader][0].slices_of(*of_piece):
                by_file.setdefault(work_range.file, []).append(
                    (reader, _in_steps(work_range, step))
                )
        for _, parts in sorted(by_file.items()):
            # Between two neighbouring bounds, the same shards read the file.
            bounds = sorted(
                {bound for _, work_range in parts for bound in (work_range.lo, work_range.hi)}
            )
            for lo, hi in pairwise(bounds):
                inside = [
                    reader
                    for reader, work_range in parts
                    if work_range.lo <= lo and hi <= work_range.hi
                ]
                if inside:
                    yield parts[0][1]._replace(lo=lo, hi=hi), inside


def _in_steps(work_range: Slice, step_bytes: int) -> Slice:
    """Return the same work range, with steps of `step_bytes` as the units of lo, hi and weight.

    `step_bytes` divides the steps of `work_range`. Only compressed line files have steps.
    """
    if position_of(work_range.format, work_range.compression) != "stream":
        return work_range
    scale, steps = work_range.step_bytes // step_bytes, -(-work_range.size // step_bytes)
    lo, hi = (
        min(s * scale, steps)
        for s in work_range.range(-(-work_range.size // work_range.step_bytes))
    )
    return work_range._replace(lo=lo, hi=hi, weight=steps, step_bytes=step_bytes)


def other_store(name: str, store: Any, planned: str | None) -> str:
    """Return an error message for a token store with a digest that differs from the plan's.

    Args:
        name: Name of the source.
        store: The opened token store.
        planned: Digest of the store in the plan.
    """
    return (
        f"source {name!r}: the token store {store} has the digest {store.digest}, but the plan"
        f" names {planned}: the store was made again since"
    )


def pieces_of_all_uses(sources: Sequence[PlannedSource]) -> int:
    """Return the number of splits of all sources, with each split counted once per pass.

    A pass that reads fewer than PIECES_OF_A_USE splits counts as PIECES_OF_A_USE splits.
    """
    return sum(source.uses * max(PIECES_OF_A_USE, len(source.pieces)) for source in sources)


def format_name(format: str, compression: str) -> str:
    """Return the key of a format in `PlannedSource.ratios`, such as "jsonl" or "jsonl.zstd"."""
    return f"{format}.{compression}" if compression else format


def step_bytes(stored: int, shards: int) -> int:
    """Return the bytes per step for the compressed files of a source.

    This is the largest power of two that gives at least 16 steps per shard. It is at least 16 KiB
    and at most 1 MiB. A shard of a small source may therefore have fewer than 16 steps.

    Args:
        stored: Stored bytes of the source.
        shards: Number of shards.
    """
    per_shard = max(1, stored // max(1, shards) // 16)
    return min(1 << 20, max(1 << 14, 1 << (per_shard.bit_length() - 1)))


def place_of(source: PlannedSource, place: str, option: str = "--doc") -> tuple[int | None, int]:
    """Parse a document's location "FILE:POSITION" or "POSITION", such as "a.jsonl:1024".

    Args:
        source: The source of the document.
        place: The location. FILE is a name relative to the source's prefix.
        option: Name of the option, for error messages.

    Returns:
        (file, position). `file` is the file's index in the source, or None if the location has no
        FILE.

    Raises:
        RecipeError: If the location is malformed or the source has no file named FILE.
    """
    file, colon, text = place.rpartition(":")
    if (
        not text.isascii()
        or not text.isdecimal()
        or int(text) >= np.iinfo(np.int64).max
        or (colon and not file)
    ):
        raise RecipeError(
            f"{option} {place}: expected POSITION or FILE:POSITION\n"
            "hint: give the byte at which a document's line starts, its row number, or 0 for a"
            " text file"
        )
    if not colon:
        return None, int(text)
    names = source.files.names
    if file not in names:
        raise RecipeError(
            f"{option} {place}: source {source.name!r} has no file {file!r}, relative to its"
            f" prefix. Its files are {nearest(file, names)}"
        )
    return list(names).index(file), int(text)
