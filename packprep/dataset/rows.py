"""Fill the columns of rows: copy stored columns, and derive other columns from the segments.

Several rows are handled as flat slots. This example has two rows of T = 8 slots, and a dot is
padding:

    row          ┌────────── 0 ──────────┐┌────────── 1 ──────────┐
    flat slot    0  1  2  3  4  5  6  7   8  9 10 11 12 13 14 15
    segment      a  a  a  ·  b  b  b  ·   c  c  c  c  c  ·  ·  ·
    at 0 4 8     slots 3 3 5              gaps 3 7 13 14 15

`fill` writes one column for any number of rows. `Row` in row.py has the columns of a single row.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from packprep.dataset import attention
from packprep.dataset.blocks import (
    Answers,
    Blocks,
    answers_of_ranges,
    block_starts,
    blocks_of,
    joined_blocks,
    put_by_block,
    starts_at_answers,
)
from packprep.dataset.boundaries import (
    boundaries,
    descents,
    fill_slots,
    next_token_loss_mask,
    owners,
    put_block_labels,
    ranks,
    segment_ids,
)
from packprep.dataset.epochs.noise import levels_by_block
from packprep.dataset.manifest import Manifest, StoredTask, is_in_place
from packprep.dataset.shard import Shard
from packprep.errors import ArgumentError, DatasetError
from packprep.forking import lazy

Place = tuple[Shard, int]
"""The location of a row: its shard, and the row's index in the shard."""


@dataclass(frozen=True, eq=False)
class Facts:
    """The metadata that the columns of rows need, from the manifest.

    Attributes:
        where: The name of the dataset, for error messages.
        seq_length: Number of slots of a row.
        pad_id: The token of padding.
        token_dtype: uint16 or int32.
        tasks: The task table of the manifest.
        prepend_bos: Whether documents begin with bos.
        loss_on: Two arrays, bool[sources] and bool[tasks]. A segment keeps its loss only if the
            flags of its source and of its task are both True. None keeps the loss of all segments.
    """

    where: str
    seq_length: int
    pad_id: int
    token_dtype: np.dtype
    tasks: list[StoredTask]
    prepend_bos: bool
    loss_on: tuple[np.ndarray, np.ndarray] | None = None

    @lazy
    def in_blocks(self) -> np.ndarray:
        """Return which tasks use block diffusion, bool[tasks]."""
        return np.array([attention.RULES[task["attention"]].in_blocks for task in self.tasks])

    @lazy
    def in_place(self) -> np.ndarray:
        """Return which tasks noise tokens and predict the original tokens, bool[tasks].

        The result is True where `is_in_place` returns True.
        """
        return np.array([is_in_place(task) for task in self.tasks])

    @lazy
    def shift(self) -> np.ndarray:
        """Return which tasks predict a noised slot's token at the slot before it, bool[tasks]."""
        return np.array([task["label_alignment"] == "next_slot" for task in self.tasks])

    @lazy
    def two_way_prefix(self) -> np.ndarray:
        """Return which tasks have a prefix whose slots see each other, bool[tasks]."""
        return np.array(
            [attention.RULES[task["attention"]].ahead == "prefix" for task in self.tasks]
        )

    @classmethod
    def of(cls, where: str, manifest: Manifest) -> "Facts":
        """Return the metadata of a dataset.

        Args:
            where: The name of the dataset, for error messages.
            manifest: The manifest of the dataset.
        """
        return cls(
            where,
            manifest["seq_length"],
            manifest["pad_id"],
            np.dtype(manifest["token_dtype"]),
            manifest["tasks"],
            bool(manifest["recipe"].get("documents", {}).get("prepend_bos", False)),
        )

    @lazy
    def mode(self) -> np.ndarray:
        """Return the number of slots of each task's mode token, 0 or 1, int64[tasks]."""
        return np.array([int(task["mode_token"] is not None) for task in self.tasks])

    @lazy
    def levels_by_block(self) -> np.ndarray:
        """Return which tasks have a noise level and a loss weight for each block, bool[tasks]."""
        return self.in_blocks & np.array(
            [levels_by_block(task["parameters"]) for task in self.tasks]
        )

    def restricted(self, sources: np.ndarray, tasks: np.ndarray) -> "Facts":
        """Return a copy with loss only on the given sources and tasks.

        Earlier restrictions in `loss_on` still apply.

        Args:
            sources: bool[sources], the sources that keep their loss.
            tasks: bool[tasks], the tasks that keep their loss.

        Returns:
            The restricted `Facts`.
        """
        if self.loss_on is not None:
            sources, tasks = sources & self.loss_on[0], tasks & self.loss_on[1]
        return replace(self, loss_on=(sources, tasks))

    def block_lengths(self) -> np.ndarray:
        """Return the block length of each task, int64[tasks]. It is 0 without block diffusion.

        Raises:
            DatasetError: If a block-diffusion task has no valid block_length in the manifest.
        """
        table = np.zeros(len(self.tasks), np.int64)
        for i in np.flatnonzero(self.in_blocks).tolist():
            length = self.tasks[i]["parameters"].get("block_length")
            if type(length) is not int or not 1 <= length < 1 << 31:
                name = self.tasks[i]["name"]
                raise DatasetError(
                    f"{self.where}: task {name} has no block_length in the manifest\n"
                    "hint: build the dataset again"
                )
            table[i] = length
        return table


class RowSegments:
    """The segments of one or more rows, in slot order. They are read from the shards at first use.

    Reading checks that segments lie inside their rows, do not overlap, and are in order. Otherwise
    it raises a DatasetError that names file and row.

    Attributes:
        facts: The metadata of the dataset.
        places: The locations of the rows, at least one.
        row: int64[m], the row of each segment as an index into `places`.
        at: int64[m], the first slot of each segment in the flat rows.
        slots: int64[m], the number of slots of each segment, without padding.
        size: Number of slots of all rows together.
        changed: Resampled header columns by name. They replace the stored columns.
    """

    def __init__(self, facts: Facts, places: Sequence[Place]):
        self.facts, self.places = facts, places
        self.changed: dict[str, np.ndarray] = {}
        self.size = len(places) * facts.seq_length

    @lazy
    def _ranges(self) -> list[tuple[int, int]]:
        return [shard.segment_range(row) for shard, row in self.places]

    def parts(self, name: str, more_entries: int = 0, rows: int = 0) -> list[np.ndarray]:
        """Return, for each row, the entries of a shard's array that belong to the row's segments.

        Args:
            name: Name of an array with one entry per segment. It may have one extra entry per row,
                such as cu_seqlens, or one at its end, such as trained_offsets.
            more_entries: Number of entries to read after the entry of a row's last segment. With 1,
                the extra entry is read too.
            rows: 1 if the array has an extra entry per row, otherwise 0. It only shifts the index
                of a row's first entry.

        Returns:
            A list with one array per row.
        """
        return [
            shard.part(name, row, begin + rows * row, end + rows * row + more_entries)
            for (shard, row), (begin, end) in zip(self.places, self._ranges, strict=True)
        ]

    @lazy
    def _laid(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        real = physical = np.concatenate(self.parts("cu_seqlens", 1, 1), dtype=np.int64)
        if padded := "cu_seqlens_padded" in self.places[0][0].layout:
            physical = np.concatenate(self.parts("cu_seqlens_padded", 1, 1), dtype=np.int64)
        segment_counts = np.array([end - begin for begin, end in self._ranges])
        row, begin, slots = boundaries(segment_counts, real, physical)
        # A row with n segments has n + 1 entries. Entry last_entries[r] is the end of row r,
        # and entry last_entries[r] − n is its start.
        last_entries = np.cumsum(segment_counts + 1) - 1
        is_wrong = (real[last_entries - segment_counts] != 0) | (
            physical[last_entries] > self.facts.seq_length
        )
        is_wrong[row[slots < 1]] = True
        # The padded arrays give the physical slots. No segment may be longer than its physical
        # slots.
        if padded:
            is_wrong |= physical[last_entries - segment_counts] != 0
            is_wrong[row[physical[np.arange(len(row)) + row + 1] - begin < slots]] = True
        if is_wrong.any():
            name = "cu_seqlens or cu_seqlens_padded" if padded else "cu_seqlens"
            problem = f"its {name} are not ascending from 0 to at most {self.facts.seq_length}"
            raise self.fault(int(np.argmax(is_wrong)), problem)
        return row, begin + row * self.facts.seq_length, slots

    row = property(lambda self: self._laid[0])
    at = property(lambda self: self._laid[1])
    slots = property(lambda self: self._laid[2])

    def __len__(self) -> int:
        return len(self.row)

    def fault(self, place: int, problem: str) -> DatasetError:
        """Return the error for a damaged row.

        Args:
            place: Index of the row in `places`.
            problem: Description of the fault.

        Returns:
            A DatasetError that names file and row.
        """
        shard, row = self.places[place]
        return DatasetError(
            f"{shard.path}: row {row}: {problem}\nhint: run `packprep verify` to find all faults"
        )

    def column(self, name: str) -> np.ndarray:
        """Return a header column, [m]: from `changed`, or from the shards' array segment_NAME."""
        if name in self.changed:
            return self.changed[name]
        parts = self.parts(f"segment_{name}")
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def looked_up(self, name: str, table: np.ndarray) -> np.ndarray:
        """Return for each segment the value that a table has for its task or source.

        Args:
            name: "task" or "source".
            table: One value per task or source.

        Returns:
            One value per segment, [m].

        Raises:
            DatasetError: If a segment's task or source is not in the table.
        """
        index = self.column(name)
        if len(index) and index.max() >= len(table):
            i = int(index.argmax())
            problem = f"segment_{name} {index[i]} is beyond the manifest's {len(table)} {name}s"
            raise self.fault(int(self.row[i]), problem)
        return table[index]

    def at_slots(self, values: np.ndarray, elsewhere) -> np.ndarray:
        """Return an array with the value of each slot's segment.

        Args:
            values: One value per segment, [m].
            elsewhere: The value at slots outside all segments.

        Returns:
            An array [size] with the dtype of `values`.
        """
        return fill_slots(self.at, self.slots, values, elsewhere, self.size)

    @lazy
    def gaps(self) -> np.ndarray:
        """Return the flat slots outside all segments, int64, ascending."""
        # Each gap is between two neighbouring segments of the flat rows, so it may reach into the
        # next row.
        begin = np.concatenate((np.zeros(1, np.int64), self.at + self.slots))
        gap_lengths = np.concatenate((self.at, np.array([self.size]))) - begin
        ends = np.cumsum(gap_lengths)
        return np.repeat(begin - (ends - gap_lengths), gap_lengths) + np.arange(ends[-1])

    def without_next(self, distance: int = 1) -> np.ndarray:
        """Return the last `distance` slots of each segment and all gaps, as flat slots, int64.

        These are the slots whose segment does not contain the slot `distance` slots later. The
        result is not sorted.
        """
        earlier = [(self.at + self.slots - d)[self.slots >= d] for d in range(2, distance + 1)]
        return np.concatenate((self.at + self.slots - 1, *earlier, self.gaps))

    def kept(self) -> np.ndarray:
        """Return which slots are in segments that keep their loss, by `facts.loss_on`, bool[size].

        Padding is False.
        """
        assert self.facts.loss_on is not None
        sources, tasks = self.facts.loss_on
        return self.at_slots(
            self.looked_up("source", sources) & self.looked_up("task", tasks), False
        )

    def lengths_of_blocks(self) -> np.ndarray:
        """Return the block length of each segment, int64[m]. It is 0 without block diffusion."""
        if not self.facts.in_blocks.any():
            return np.zeros(len(self), np.int64)
        return self.looked_up("task", self.facts.block_lengths())

    @lazy
    def blocks(self) -> Blocks:
        """Return the blocks of all segments. Segments without block diffusion have none."""
        lengths, answers = self.facts.block_lengths(), self._answers()
        half = self.slots // 2
        # Blocks of answers may include bos and mode token. Only the first segment of a document has
        # bos.
        is_first = self.column("start") == 0
        slots_before = is_first * self.facts.prepend_bos + self.looked_up("task", self.facts.mode)
        # Tasks have different parameters, so blocks are computed task by task and then put into
        # segment order.
        parts = []
        for t in np.flatnonzero(lengths).tolist():
            chosen = np.flatnonzero(self.task == t)
            of_task = None if answers is None else answers.of_segments(chosen)
            parameters = self.facts.tasks[t]["parameters"]
            parts.append(
                (chosen, blocks_of(parameters, half[chosen], slots_before[chosen], of_task))
            )
        return joined_blocks(len(self), parts)

    def _answers(self) -> Answers | None:
        """Return the runs of trained slots, or None if no shard has trained ranges.

        In shards without trained ranges, each half of a segment is one run.
        """
        rows = self._with_ranges
        if not rows:
            return None
        # Only shards with trained ranges can be asked for ranges, so `own_segments` has only
        # `rows`.
        own_segments = self
        if len(rows) < len(self.places):
            own_segments = RowSegments(self.facts, [self.places[i] for i in rows])
        segment, ranges, _ = own_segments.trained()
        # `own_segments` numbers its segments from 0. of_own maps these numbers to all segments.
        of_own = np.flatnonzero(np.isin(self.row, rows))
        stored = answers_of_ranges(of_own[segment], ranges)
        # A shard without ranges is trained everywhere, so each half is one answer.
        other_segments = np.setdiff1d(np.arange(len(self)), of_own)
        whole_answers = Answers(
            other_segments, np.zeros_like(other_segments), self.slots[other_segments] // 2
        )
        all_answers = Answers(*map(np.concatenate, zip(stored, whole_answers, strict=True)))
        order = np.argsort(all_answers.segment, kind="stable")
        return Answers(*(column[order] for column in all_answers))

    @lazy
    def _with_ranges(self) -> list[int]:
        """Return the indices of the rows whose shards have trained ranges."""
        return [i for i, (shard, _) in enumerate(self.places) if "trained_ranges" in shard.layout]

    @property
    def have_answers(self) -> bool:
        """Whether blocks of these rows may start at answers."""
        tasks = (self.facts.tasks[t] for t in np.flatnonzero(self.facts.in_blocks).tolist())
        return bool(self._with_ranges) and any(
            starts_at_answers(task["parameters"]) for task in tasks
        )

    @lazy
    def task(self) -> np.ndarray:
        """Return the index of each segment's task, int64[m]."""
        return self.looked_up("task", np.arange(len(self.facts.tasks)))

    # These methods derive columns that a shard does not store, [size] each.

    def next_token_loss_mask(self) -> np.ndarray:
        # A segment without tokens trains nothing.
        prefix = np.where(self.column("tokens") > 0, self.column("prefix"), self.slots)
        return next_token_loss_mask(self.at, self.slots, prefix, self.size)

    def position_ids(self) -> np.ndarray:
        first_slots, slots = self.at.astype(np.int32), self.slots
        if (
            self.facts.in_blocks.any()
            and (halved := self.looked_up("task", self.facts.in_blocks)).any()
        ):
            # Positions count from 0 in each half, so a segment of block diffusion becomes two
            # ranges.
            half = slots // 2
            first_slots, slots = np.repeat(first_slots, 1 + halved), np.repeat(slots, 1 + halved)
            second = np.cumsum(1 + halved)[halved] - 1
            first_slots[second] += half[halved].astype(np.int32)
            slots[second - 1] = half[halved]
            slots[second] -= half[halved]
        # Each slot first gets the start of its range, which is then subtracted from the slot.
        positions = fill_slots(first_slots, slots, first_slots, 0, self.size)
        np.subtract(np.arange(self.size, dtype=np.int32), positions, out=positions)
        positions[self.gaps] = 0
        return positions

    def block_starts(self) -> np.ndarray:
        """Return for each slot the position at which its block begins, int32[size].

        A slot outside all blocks is a block of its own. Slots without block diffusion have −1.
        """
        starts = np.full(self.size, -1, np.int32)
        halved_segments = np.flatnonzero(self.lengths_of_blocks())
        half = self.slots[halved_segments] // 2
        of_half = block_starts(self.blocks.select(halved_segments), half)
        # x_t and x_0 have the same blocks.
        for copy in (0, 1):
            first_slots = self.at[halved_segments] + copy * half
            starts[np.repeat(first_slots, half) + ranks(half)] = of_half
        return starts

    def seq_idx(self) -> np.ndarray:
        """Return for each slot the number of its segment in the row, int32[size].

        Segments count 0, 1, …. All padding of a row with k segments has the number k.
        """
        number = segment_ids(self.row, self.at, self.slots, self.size).astype(np.int32) - 1
        number[self.gaps] = np.bincount(self.row, minlength=len(self.places))[
            self.gaps // self.facts.seq_length
        ]
        return number

    def prefix_ends(self, with_blocks: bool = False) -> np.ndarray:
        """Return for each slot the end of its segment's prefix, as a slot of the row, int32[size].

        Padding has 0.

        Args:
            with_blocks: If True, slots of block-diffusion segments get −1. If False, a
                block-diffusion segment raises an error.

        Raises:
            DatasetError: If a prefix is not inside its segment, or a segment uses block diffusion
                without `with_blocks`.
        """
        prefix = self.column("prefix").astype(np.int64)
        is_wrong = (prefix < 0) | (prefix > self.slots)
        if with_blocks:
            blocks = self.lengths_of_blocks() > 0
            is_wrong &= ~blocks
        if is_wrong.any():
            i = int(np.argmax(is_wrong))
            why = f"it has {self.slots[i]} positions"
            if prefix[i] == -1:
                why = "it has the attention pattern of block diffusion, see block_mask"
            segment = i - int(np.searchsorted(self.row, self.row[i]))
            problem = (
                f"prefix_ends is not available: segment {segment} has prefix {prefix[i]}: {why}"
            )
            raise self.fault(int(self.row[i]), problem)
        ends = (self.at - self.row * self.facts.seq_length + prefix).astype(np.int32)
        if with_blocks:
            ends[blocks] = -1
        return self.at_slots(ends, 0)

    def trained(self) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int]]]:
        """Return the trained ranges of the rows. All shards of the rows must have trained ranges.

        Returns:
            Three values:

            - int64[k]: the segment of each range.
            - int64[k, 2]: the slots [start, end) of each range, counted from the first slot of its
              segment.
            - A list with a tuple (first, end) for each row: the row's ranges are entries first …
              end − 1 of the shard's array trained_ranges.

        Raises:
            DatasetError: If ranges overlap, are out of order, or lie outside their segments.
        """
        range_counts, ranges, parts = [], [], []
        # The offsets of a damaged shard must not lead to reads outside its arrays.
        for i, ((shard, row), offsets) in enumerate(
            zip(self.places, self.parts("trained_offsets", 1), strict=True)
        ):
            stored = shard.layout["trained_ranges"][1][0]
            if offsets[0] < 0 or descents(offsets).any() or offsets[-1] > stored:
                raise self.fault(i, "trained_offsets are not ascending")
            range_counts.append(np.diff(offsets))
            parts.append((int(offsets[0]), int(offsets[-1])))
            ranges.append(shard.part("trained_ranges", row, *parts[-1]))
        segment = owners(np.concatenate(range_counts))
        all_ranges = np.concatenate(ranges).astype(np.int64)
        # Ranges are inside their segment, not empty, and do not overlap (P19).
        is_wrong = (
            (all_ranges[:, 0] < 0)
            | (all_ranges[:, 1] <= all_ranges[:, 0])
            | (all_ranges[:, 1] > self.slots[segment])
        )
        is_wrong[1:] |= (segment[1:] == segment[:-1]) & (all_ranges[1:, 0] < all_ranges[:-1, 1])
        if is_wrong.any():
            g = segment[np.argmax(is_wrong)]
            raise self.fault(
                int(self.row[g]),
                "a trained range is outside its segment or overlaps another,"
                f" {all_ranges[is_wrong][0]}",
            )
        return segment, all_ranges, parts

    def weights_of_ranges(self, parts: Sequence[tuple[int, int]]) -> np.ndarray:
        """Return the weight of each trained range of the rows, float32[k].

        All shards of the rows must store trained_weights. `parts` is the list that `trained`
        returns.
        """
        places = zip(self.places, parts, strict=True)
        return np.concatenate(
            [shard.part("trained_weights", row, *bounds) for (shard, row), bounds in places]
        )

    def range_weights(self) -> np.ndarray | None:
        """Return for each slot the weight of the trained range that contains its target token.

        The target is the token that the slot predicts: the next token, or in same-position tasks
        without shift the original token of this slot. If the target is outside trained ranges, the
        weight is 1.

        Returns:
            float32[size], or None if no shard of the rows stores trained_weights.
        """
        rows = [i for i, (shard, _) in enumerate(self.places) if "trained_weights" in shard.layout]
        if not rows:
            return None
        own_segments = (
            self
            if len(rows) == len(self.places)
            else RowSegments(self.facts, [self.places[i] for i in rows])
        )
        segment, ranges, parts = own_segments.trained()
        is_ahead = ~self.facts.in_place | self.facts.shift
        # A next-token slot predicts the next slot. So weights move one slot to the left of their
        # tokens.
        lead = own_segments.looked_up("task", is_ahead.astype(np.int64))[segment]
        begins, ends = np.maximum(ranges[:, 0] - lead, 0), ranges[:, 1] - lead
        # Distance from a slot in `own_segments` to the same slot in `self`.
        moved = (np.array(rows) - np.arange(len(rows))) * self.facts.seq_length
        first_slots = (own_segments.at + moved[own_segments.row])[segment] + begins
        return fill_slots(
            first_slots, ends - begins, own_segments.weights_of_ranges(parts), 1, self.size
        )

    def costs(self, attention: float = 1, linear: float = 0) -> np.ndarray:
        """Return the cost of each row, attention · Σn² + linear · Σn over its segments of n slots.

        Args:
            attention: Weight of Σn².
            linear: Weight of Σn.

        Returns:
            float64[rows], exact below 2⁵³.
        """
        slots = self.slots.astype(np.float64)
        return np.bincount(self.row, attention * slots**2 + linear * slots, len(self.places))

    def loss_weights(self) -> np.ndarray:
        """Return the loss weight of each slot, float32[size], before the loss_mask is applied.

        The loss weight is the weight of the slot's segment or block, times the weight that
        `range_weights` returns for the slot.
        """
        weights, of_ranges = self._own_weights(), self.range_weights()
        return weights if of_ranges is None else np.multiply(weights, of_ranges, out=weights)

    def _own_weights(self) -> np.ndarray:
        """Return for each slot the loss weight of its block or segment, float32[size]."""
        weights = self.at_slots(self.column("loss_weight"), 0)
        if not self.facts.levels_by_block.any() or "block_offsets" not in self.places[0][0].layout:
            return weights
        has_levels = self.looked_up("task", self.facts.levels_by_block)
        # The stored counts must equal the computed ones, because weights are assigned to blocks by
        # their order.
        needed = np.where(has_levels, self.blocks.count, 0)
        values, begin = [], 0
        for i, ((shard, row), own_offsets) in enumerate(
            zip(self.places, self.parts("block_offsets", 1), strict=True)
        ):
            count, stored = np.diff(own_offsets), shard.layout["block_loss_weight"][1][0]
            should = needed[begin : begin + len(count)]
            begin += len(count)
            if own_offsets[0] < 0 or own_offsets[-1] > stored or (count != should).any():
                raise self.fault(
                    i, f"block_offsets do not give its segments {should.tolist()} blocks"
                )
            values.append(
                shard.part("block_loss_weight", row, int(own_offsets[0]), int(own_offsets[-1]))
            )
        indices = np.flatnonzero(has_levels)
        # With `shift`, the slot before a block predicts its first token. So its weights move one
        # slot earlier.
        ahead = self.looked_up("task", self.facts.shift.astype(np.int64))[indices]
        blocks = self.blocks.select(indices)
        put_by_block(weights, self.at[indices], blocks, np.concatenate(values), ahead)
        return weights


class SlotColumn(NamedTuple):
    """A column with one value per slot.

    Attributes:
        dtype: The default dtype. None means the dtype of tokens.
        cast: Whether a single dtype, given as `dtype` to `batch`, applies to this column.
        derived: A function that computes the column, [size], if a shard does not store it. Columns
            that every shard stores, or that `fill` or `look_ahead` computes, have None.
    """

    dtype: np.dtype | None
    cast: bool
    derived: Callable[[RowSegments], np.ndarray] | None


SLOTS: dict[str, SlotColumn] = {
    "tokens": SlotColumn(None, True, None),
    "labels": SlotColumn(None, True, None),
    "segment_ids": SlotColumn(
        np.dtype("u2"), True, lambda s: segment_ids(s.row, s.at, s.slots, s.size)
    ),
    "position_ids": SlotColumn(np.dtype("i4"), True, RowSegments.position_ids),
    "loss_mask": SlotColumn(np.dtype("u1"), False, RowSegments.next_token_loss_mask),
    "loss_weights": SlotColumn(np.dtype("f4"), False, RowSegments.loss_weights),
    "prefix_ends": SlotColumn(np.dtype("i4"), True, RowSegments.prefix_ends),
    "block_lengths": SlotColumn(
        np.dtype("i4"), False, lambda s: s.at_slots(s.lengths_of_blocks(), 0)
    ),
    "block_starts": SlotColumn(np.dtype("i4"), False, RowSegments.block_starts),
    "seq_idx": SlotColumn(np.dtype("i4"), False, RowSegments.seq_idx),
}
BLOCK_COLUMNS = ("block_lengths", "block_starts")
"""Columns that describe the blocks of block diffusion. With one of them, prefix_ends may be −1."""
DISTANCES = range(2, 9)
AHEAD = {
    f"{name}_{k}": (name, k) for name in ("labels", "loss_mask", "loss_weights") for k in DISTANCES
}
"""Column → (its column for the next token, k), such as "labels_3" → ("labels", 3)."""
SLOTS |= {name: SLOTS[next_slot]._replace(derived=None) for name, (next_slot, _) in AHEAD.items()}
# Each of these columns has the row sums of a slot column, [B]. n_trained counts nonzero values.
SUMS = {"n_trained": "loss_mask", "loss_weight_sum": "loss_weights"}
BY_ROW = (*SUMS, "row_cost")
"""All columns with one number per row, [B]."""
MADE_FROM = {**SUMS, **{name: next_slot for name, (next_slot, _) in AHEAD.items()}}
"""Column → the slot column from which it is computed, after resampling."""
COLUMNS = ("tokens", "labels", "segment_ids", "position_ids", "loss_mask")
# A batch has these columns only on request.
MORE_COLUMNS = (*(name for name in SLOTS if name not in COLUMNS), *BY_ROW)
MEDIA = "media"
"""A column that is not an array: the `Media` of the rows, see `dataset/row_media.py`."""
KNOWN = frozenset((*COLUMNS, *MORE_COLUMNS, MEDIA))


def refuse_columns(names: Iterable[str], without: Iterable[str] = ()) -> None:
    """Check that all names are columns.

    Args:
        names: Names to check.
        without: Names of columns that the caller cannot provide. They count as unknown.

    Raises:
        ArgumentError: If a name is refused. The message lists the columns.
    """
    known_columns = KNOWN.difference(without) if without else KNOWN
    for name in names:
        if name not in known_columns:
            columns = [
                column
                for column in (*COLUMNS, *MORE_COLUMNS, MEDIA)
                if column in known_columns and column not in AHEAD
            ]
            ahead = (
                f"labels_k, loss_mask_k and loss_weights_k with k = {DISTANCES[0]} …"
                f" {DISTANCES[-1]}"
            )
            layout = ""
            if name in ("cu_seqlens", "max_seqlen"):
                layout = (
                    f". {name} belongs to a batch flattened into one row: use"
                    " packprep.dataset.attention.flatten(batch)"
                )
            raise ArgumentError(
                f"unknown column {name!r}; the columns are {', '.join(columns)}, and"
                f" {ahead}{layout}"
            )


def padding_value(name: str, pad_id: int) -> int:
    """Return the value of a column in a row of padding, which has no segments.

    Args:
        name: The name of the column.
        pad_id: The token of padding.
    """
    name = AHEAD.get(name, (name,))[0]
    return pad_id if name in ("tokens", "labels") else -1 if name == "block_starts" else 0


def own_dtype(name: str, token_dtype: np.dtype) -> np.dtype:
    """Return the default dtype of a column.

    Args:
        name: The name of the column.
        token_dtype: The dtype of tokens.

    Returns:
        The dtype of the column unless the caller requests another dtype.
    """
    if name in BY_ROW:
        return np.dtype({"n_trained": "i4", "row_cost": "i8"}.get(name, "f4"))
    return SLOTS[name].dtype or token_dtype


def fill(segments: RowSegments, name: str, values: np.ndarray, with_blocks: bool = False) -> None:
    """Write a column with one value per slot into an array.

    Args:
        segments: The segments of the rows.
        name: The name of the column.
        values: The array to write, [B, T], of any dtype.
        with_blocks: The argument of `RowSegments.prefix_ends`, used for the column prefix_ends.

    Raises:
        DatasetError: If a row is damaged, or if block_lengths do not describe its blocks.
    """
    if name == "block_lengths" and segments.have_answers:
        raise DatasetError(
            f"{segments.facts.where}: blocks start at the answers of supervised documents, so"
            " block_lengths would give a wrong attention mask\n"
            "hint: ask for the column block_starts instead"
        )
    places, lacking = segments.places, []
    mapped = places[0][0].io == "mmap"
    for i, (shard, row) in enumerate(places):
        if name not in shard.layout:
            lacking.append(i)
        elif mapped:
            values[i] = shard.arrays[name][row]
        else:
            shard.read_arrays[name].read_row(row, values[i])
    # Either all shards store labels, or no shard does.
    if lacking and name == "labels":
        # A label is the next token. The last slot of a segment has no next token, so its label is
        # pad_id (P10).
        for target, (shard, row) in zip(values, places, strict=True):
            target[:-1] = shard.tokens[row][1:]
        values[np.divmod(segments.without_next(), values.shape[1])] = segments.facts.pad_id
        # The labels of block diffusion come from the clean half, so they are written over these.
        if segments.facts.in_blocks.any():
            _fill_block_labels(segments, values)
    elif lacking:
        derive = SLOTS[name].derived
        assert derive is not None
        derived = (
            segments.prefix_ends(True)
            if with_blocks and name == "prefix_ends"
            else derive(segments)
        )
        derived = derived.reshape(values.shape)
        # Slots without loss get weight 0, so that a trainer can use the column as it is.
        if name == "loss_weights":
            loss_mask = np.empty(values.shape, np.uint8)
            fill(segments, "loss_mask", loss_mask)
            np.multiply(derived, loss_mask, out=derived)
        # A compact dataset stores loss_mask in some shards only, so a batch may need both ways.
        if len(lacking) == len(places):
            values[...] = derived
        else:
            values[lacking] = derived[lacking]
    # `with_loss_on` also applies to stored masks.
    if name == "loss_mask" and segments.facts.loss_on is not None:
        np.multiply(values, segments.kept().reshape(values.shape), out=values, casting="unsafe")


def _fill_block_labels(segments: RowSegments, labels: np.ndarray) -> None:
    """Write the labels of all block-diffusion segments of the rows into `labels`, [B, T]."""
    # With `shift`, a label is the next token of the clean half instead of the slot's own token.
    twice, shift = (
        segments.looked_up("task", flags_of_tasks)
        for flags_of_tasks in (segments.facts.in_blocks, segments.facts.shift)
    )
    for i, (target, (shard, of_shard)) in enumerate(zip(labels, segments.places, strict=True)):
        indices = np.flatnonzero(twice & (segments.row == i))
        first_slots, half = segments.at[indices] - i * labels.shape[1], segments.slots[indices] // 2
        put_block_labels(
            target, shard.tokens[of_shard], first_slots, half, shift[indices], segments.facts.pad_id
        )


def gather(
    facts: Facts,
    places: Sequence[Place],
    batch: Mapping[str, np.ndarray],
    redraw: Callable[[RowSegments, Mapping[str, np.ndarray]], None] | None = None,
    redrawn: Sequence[str] = (),
) -> None:
    """Fill the arrays of a batch.

    Args:
        facts: The metadata of the dataset.
        places: The locations of the rows.
        batch: The arrays to fill, column → [B, T] or [B], of any dtype.
        redraw: A function that resamples rows. It is called after the slot columns have been
            filled, and overwrites some of them.
        redrawn: The columns that `redraw` overwrites in every row. They are not filled before the
            call.

    Raises:
        DatasetError: If a row is damaged.
    """
    if not places:
        return
    segments, made_names = RowSegments(facts, places), [name for name in batch if name in MADE_FROM]
    slots = {name: values for name, values in batch.items() if name in SLOTS and name not in AHEAD}
    if "row_cost" in batch:
        np.copyto(batch["row_cost"], segments.costs(), casting="unsafe")
    # Sums and columns of later tokens need a source column, even if the batch does not have it.
    for name in made_names:
        source = MADE_FROM[name]
        source_dtype = own_dtype(source, facts.token_dtype)
        # Sum the weights in their own dtype, before they are cast to the dtype in `batch`.
        cut = source == "loss_weights" and source in slots and slots[source].dtype != source_dtype
        if source not in slots or cut:
            slots[source] = np.empty((len(places), facts.seq_length), source_dtype)
    for name, values in slots.items():
        if name not in redrawn:
            fill(segments, name, values, not slots.keys().isdisjoint(BLOCK_COLUMNS))
    # Resampling changes the source columns, so the columns made from them come last.
    if redraw is not None:
        redraw(segments, slots)
    for name in made_names:
        source = MADE_FROM[name]
        source_values = slots[source]
        if name in AHEAD:
            look_ahead(segments, name, source_values, batch[name])
        elif name == "n_trained":
            batch[name][...] = [np.count_nonzero(row) for row in source_values]
        else:
            np.copyto(batch[name], source_values.sum(axis=1, dtype=np.float64), casting="unsafe")
        # If the source was made in another dtype, the batch gets a converted copy.
        if batch.get(source) is not None and batch[source] is not source_values:
            np.copyto(batch[source], source_values, casting="unsafe")


def look_ahead(segments: RowSegments, name: str, source: np.ndarray, values: np.ndarray) -> None:
    """Write a column that describes the prediction of the token k slots later.

    For example, the column labels_3 (k = 3) describes the prediction of the token 3 slots later. At
    slot i, it has the value of labels at slot i + 2. In general, slot i gets the value that the
    column for the next token (`source`) has at slot i + k − 1. There are three exceptions: slot i +
    k is not in the same segment, slot i is padding, or the segment is from a same-position task. In
    these cases, labels get the pad id, and other columns get 0.

    In a two-way prefix, only the last slot trains a later token. At all other slots, a head that
    also reads the tokens in between, as in DeepSeek-V3, would see the target.

    Args:
        segments: The segments of the rows.
        name: The name of the column, a key of AHEAD.
        source: The column for the next token, [B, T].
        values: The array to write, [B, T].
    """
    next_slot, distance = AHEAD[name]
    steps, length = distance - 1, values.shape[1]
    values[:, : max(0, length - steps)] = source[:, steps:]
    # The copy ignores segments. Slots whose target is in another segment, or is not a next token,
    # are cleared below.
    none = segments.facts.pad_id if next_slot == "labels" else 0
    values[np.divmod(segments.without_next(steps), length)] = none
    if segments.facts.in_place.any():
        in_place = segments.at_slots(segments.looked_up("task", segments.facts.in_place), False)
        values[in_place.reshape(values.shape)] = none
    if next_slot != "labels" and segments.facts.two_way_prefix.any():
        two_way = segments.looked_up("task", segments.facts.two_way_prefix)
        inside = np.clip(segments.column("prefix") - 1, 0, segments.slots) * two_way
        values[
            fill_slots(segments.at, inside, two_way, False, segments.size).reshape(values.shape)
        ] = 0
