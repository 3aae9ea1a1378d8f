"""The segments of some rows, laid out one row after the other, and what their boundaries imply slot by slot.

    row          ┌────────── 0 ──────────┐┌────────── 1 ──────────┐
    flat slot    0  1  2  3  4  5  6  7   8  9 10 11 12 13 14 15      T = 8
    segment      a  a  a  ·  b  b  b  ·   c  c  c  c  c  ·  ·  ·
    at 0 4 8     slots 3 3 5              gaps 3 7 13 14 15

Whatever a shard leaves out because its header determines it (labels, segment_ids, loss_mask, position_ids) is derived
here, in a few passes over all rows at once.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from packprep.dataset.shard import Shard
from packprep.errors import DatasetError

Place = tuple[Shard, int]
"""A row: its shard, and which of the shard's rows it is."""


class Segments:
    """The segments of the rows at `places`, [m] each in slot order; at least one place.

    row: int64, place in the batch. at: int64, first slot in the flat rows. slots: int64, real length.
    Raises DatasetError, naming file and row, where the boundaries are damaged; so slots can be trusted to lie inside
    their rows, apart from one another and in order.
    """

    def __init__(self, places: Sequence[Place], seq_length: int):
        self.places = places
        self.size = len(places) * seq_length
        self._ranges = [shard.segment_range(row) for shard, row in places]
        real, physical = self._offsets("cu_seqlens"), None
        if "cu_seqlens_padded" in places[0][0].layout:
            physical = self._offsets("cu_seqlens_padded")
        many = np.array([end - begin for begin, end in self._ranges])
        last = np.cumsum(many + 1) - 1
        self.row = np.repeat(np.arange(len(places)), many)
        here = np.arange(len(self.row)) + self.row
        self.slots = real[here + 1] - real[here]
        wrong = real[last - many] != 0
        wrong[self.row[self.slots < 1]] = True
        if physical is None:
            physical = real
        else:
            wrong |= physical[last - many] != 0
            wrong[self.row[physical[here + 1] - physical[here] < self.slots]] = True
        wrong |= physical[last] > seq_length
        if wrong.any():
            name = "cu_seqlens" if physical is real else "cu_seqlens or cu_seqlens_padded"
            raise self.fault(int(np.argmax(wrong)), f"its {name} do not ascend from 0 to at most {seq_length}")
        self.at = physical[here] + self.row * seq_length

    def _offsets(self, name: str) -> np.ndarray:
        return np.concatenate(
            [
                shard.part(name, row, begin + row, end + row + 1)
                for (shard, row), (begin, end) in zip(self.places, self._ranges, strict=True)
            ],
            dtype=np.int64,
        )

    def __len__(self) -> int:
        return len(self.row)

    def fault(self, place: int, what: str) -> DatasetError:
        """The error of a damaged row."""
        shard, row = self.places[place]
        return DatasetError(f"{shard.path}: row {row}: {what}; `packprep verify` says where else")

    def column(self, name: str) -> np.ndarray:
        """The header column segment_`name`."""
        key = f"segment_{name}"
        parts = [
            shard.part(key, row, begin, end)
            for (shard, row), (begin, end) in zip(self.places, self._ranges, strict=True)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def looked_up(self, name: str, table: np.ndarray) -> np.ndarray:
        """What `table` says of each segment's task or source."""
        index = self.column(name)
        if len(index) and index.max() >= len(table):
            i = int(index.argmax())
            raise self.fault(
                int(self.row[i]), f"segment_{name} {index[i]} is beyond the manifest's {len(table)} {name}s"
            )
        return table[index]

    @cached_property
    def gaps(self) -> np.ndarray:
        """int64: the flat slots of no segment, ascending."""
        begin = np.concatenate((np.zeros(1, np.int64), self.at + self.slots))
        many = np.concatenate((self.at, np.array([self.size]))) - begin
        ends = np.cumsum(many)
        return np.repeat(begin - (ends - many), many) + np.arange(ends[-1])

    def at_slots(self, values: np.ndarray, elsewhere) -> np.ndarray:
        """[size], of the dtype of `values`: each slot's value of its segment, and `elsewhere` between segments."""
        return spread(self.at, self.slots, values, elsewhere, self.size)

    def segment_ids(self) -> np.ndarray:
        """uint16[size], as segment_ids."""
        return segment_ids(self.row, self.at, self.slots, self.size)

    def position_ids(self, in_halves: np.ndarray | None = None) -> np.ndarray:
        """int32[size]: each slot's distance from its segment's begin, or, in_halves bool[m], from its half's; padding 0."""
        at, slots = self.at.astype(np.int32), self.slots
        if in_halves is not None and in_halves.any():
            parts = 1 + in_halves
            half = slots // 2
            at, slots = np.repeat(at, parts), np.repeat(slots, parts)
            second = np.cumsum(parts)[in_halves] - 1
            at[second] += half[in_halves].astype(np.int32)
            slots[second - 1] = half[in_halves]
            slots[second] -= half[in_halves]
        positions = spread(at, slots, at, 0, self.size)
        np.subtract(np.arange(self.size, dtype=np.int32), positions, out=positions)
        positions[self.gaps] = 0
        return positions

    def prefix_ends(self, in_blocks: np.ndarray | None = None) -> np.ndarray:
        """int32[size]: the slot of the row at which the prefix of each slot's segment ends; padding 0.

        in_blocks: bool[m], the segments of block diffusion, which have −1. Raises DatasetError where a prefix is longer
        than its segment, or, outside of these, −1: another rule of attention.
        """
        prefix = self.column("prefix").astype(np.int64)
        wrong = (prefix < 0) | (prefix > self.slots)
        if in_blocks is not None:
            wrong &= ~in_blocks
        if wrong.any():
            i = int(np.argmax(wrong))
            why = "another attention rule" if prefix[i] == -1 else f"a prefix of {prefix[i]} of {self.slots[i]} slots"
            raise self.fault(int(self.row[i]), f"prefix_ends cannot be given: a segment has {why}")
        in_row = self.at - self.row * (self.size // len(self.places))
        ends = (in_row + prefix).astype(np.int32)
        return self.at_slots(ends if in_blocks is None else np.where(in_blocks, np.int32(-1), ends), 0)

    def next_token_loss_mask(self) -> np.ndarray:
        """uint8[size], as next_token_loss_mask."""
        return next_token_loss_mask(self.at, self.slots, self.column("prefix"), self.size)

    def without_next(self) -> np.ndarray:
        """int64: the flat slots after which no slot of their segment comes: last slots, then gaps."""
        return np.concatenate((self.at + self.slots - 1, self.gaps))


def segment_ids(row: np.ndarray, at: np.ndarray, slots: np.ndarray, size: int) -> np.ndarray:
    """uint16[size]: 1, 2, … over the segments of each row; padding 0. row ascends; at, slots: as in Segments."""
    first = np.searchsorted(row, row)  # the first segment of each one's row
    return spread(at, slots, (np.arange(1, len(row) + 1) - first).astype(np.uint16), 0, size)


def next_token_loss_mask(at: np.ndarray, slots: np.ndarray, prefix: np.ndarray, size: int) -> np.ndarray:
    """uint8[size]: 1 where the next slot is of the same segment and lies after its prefix."""
    lead = np.clip(prefix.astype(np.int64) - 1, 0, slots - 1)
    return spread(at + lead, slots - 1 - lead, np.ones(len(at), np.uint8), 0, size)


def spread(begin: np.ndarray, length: np.ndarray, values: np.ndarray, elsewhere, size: int) -> np.ndarray:
    """[size]: values[i] at the `length[i]` slots from begin[i] on (ascending, apart), `elsewhere` at all others."""
    runs, parts = np.empty(2 * len(values) + 1, np.int64), np.empty(2 * len(values) + 1, values.dtype)
    runs[0:-1:2], runs[-1], runs[1::2] = begin, size, length
    runs[2::2] -= begin + length
    parts[0::2], parts[1::2] = elsewhere, values
    return np.repeat(parts, runs)
