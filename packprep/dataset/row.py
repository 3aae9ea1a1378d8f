"""One row as a view of its mapped shard, or read from it; what is not stored is derived from it at first use."""

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from packprep.dataset import attention
from packprep.dataset.reading import FileArray
from packprep.dataset.segments import Segments
from packprep.dataset.shard import Shard
from packprep.errors import ArgumentError, DatasetError

if TYPE_CHECKING:
    from packprep.dataset.loader import Dataset

_SEGMENT_COLUMNS = (
    "task",
    "source",
    "file",
    "doc",
    "start",
    "tokens",
    "prefix",
    "noise",
    "loss_weight",
    "key",
    "repeat",
)


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


OpenShard: TypeAlias = tuple[np.ndarray | FileArray, int, Shard]
"""A shard's tokens, its first row in the dataset, itself."""


class Row:
    """Row `index` of a dataset: views of the mapped shard, or read from it or derived at first use; read-only.

        tokens        token_dtype[T]    loss_mask     uint8[T]
        labels        token_dtype[T]    loss_weights  float32[T]
        segment_ids   uint16[T]         position_ids  int32[T]
        cu_seqlens, cu_seqlens_padded   int32[n_segments + 1]; the latter None where segments are contiguous
        segments      the header's columns by their short names, [n_segments] each, and begin, end: physical slots

    Made by Dataset.row. Reading a part that is damaged raises DatasetError with file and row.
    """

    __slots__ = ("__dict__", "_opened", "_row", "dataset", "index", "tokens")  # the dict: what is derived
    dataset: "Dataset"
    index: int
    tokens: np.ndarray
    _opened: OpenShard
    _row: int  # in its shard

    def __repr__(self) -> str:
        return f"Row({self.index})"

    @property
    def _shard(self) -> Shard:
        return self._opened[2]

    def _fault(self, what: str) -> DatasetError:
        return DatasetError(f"{self._shard.path}: row {self._row}: {what}; `packprep verify` says where else")

    @cached_property
    def _range(self) -> tuple[int, int]:
        return self._shard.segment_range(self._row)

    @cached_property
    def _segments(self) -> Segments:
        return Segments([(self._shard, self._row)], self.dataset.seq_length)

    def _part(self, name: str, begin: int, end: int) -> np.ndarray:
        return self._shard.part(name, self._row, begin, end)

    def _stored(self, name: str) -> np.ndarray | None:
        return self._shard.row(name, self._row) if name in self._shard.layout else None

    def _offsets(self, name: str) -> np.ndarray:
        begin, end = self._range
        offsets = self._part(name, begin + self._row, end + self._row + 1)
        if offsets[0] != 0 or offsets[-1] > self.dataset.seq_length or (offsets[1:] <= offsets[:-1]).any():
            raise self._fault(f"{name} does not ascend from 0 to at most {self.dataset.seq_length}")
        return offsets

    @cached_property
    def labels(self) -> np.ndarray:
        stored = self._stored("labels")
        if stored is not None:
            return stored
        labels = np.empty_like(self.tokens)
        labels[:-1] = self.tokens[1:]
        labels[self._segments.without_next()] = self.dataset.pad_id
        return read_only(labels)

    @cached_property
    def segment_ids(self) -> np.ndarray:
        stored = self._stored("segment_ids")
        return read_only(self._segments.segment_ids()) if stored is None else stored

    @cached_property
    def loss_mask(self) -> np.ndarray:
        stored = self._stored("loss_mask")
        mask = read_only(self._segments.next_token_loss_mask()) if stored is None else stored
        return mask if self.dataset._loss_on is None else read_only(mask * self.dataset._loss_is_on(self._segments))

    @cached_property
    def cu_seqlens(self) -> np.ndarray:
        return self._offsets("cu_seqlens")

    @cached_property
    def cu_seqlens_padded(self) -> np.ndarray | None:
        if "cu_seqlens_padded" not in self._shard.layout:
            return None
        padded = self._offsets("cu_seqlens_padded")
        if (np.diff(padded) < np.diff(self.cu_seqlens)).any():
            raise self._fault("cu_seqlens_padded gives a segment fewer slots than cu_seqlens")
        return padded

    @property
    def n_segments(self) -> int:
        begin, end = self._range
        return end - begin

    @property
    def n_tokens(self) -> int:
        """Slots of segments: all but padding."""
        return int(self.cu_seqlens[-1])

    @property
    def max_seqlen(self) -> int:
        """Slots of the longest segment; 0 without one."""
        return int(np.diff(self.cu_seqlens).max(initial=0))

    @cached_property
    def segments(self) -> dict[str, np.ndarray]:
        begin, end = self._range
        columns = {name: self._part(f"segment_{name}", begin, end) for name in _SEGMENT_COLUMNS}
        physical = self.cu_seqlens if self.cu_seqlens_padded is None else self.cu_seqlens_padded
        columns["begin"] = physical[:-1]
        columns["end"] = read_only(physical[:-1] + np.diff(self.cu_seqlens))
        return columns

    @cached_property
    def position_ids(self) -> np.ndarray:
        """int32[T]: from 0 in each segment, and in each half of a block-diffusion segment; padding 0."""
        return read_only(self._segments.position_ids(self.dataset._is_in_halves(self._segments)))

    @cached_property
    def prefix_ends(self) -> np.ndarray:
        """int32[T], as attention.prefix_ends; refused where a segment has another attention rule."""
        try:
            ends = attention.prefix_ends(
                self.cu_seqlens, self.segments["prefix"], self.dataset.seq_length, self.cu_seqlens_padded
            )
        except ArgumentError as error:
            raise self._fault(f"prefix_ends cannot be given: {error}") from error
        return read_only(ends)

    def micro_sequences(self, size: int) -> Iterator[tuple[slice, attention.MicroSequence]]:
        """The row in windows of at most `size` slots, in order: (slots of the queries, their layout).

        Windows end where attention.cut_points allows it: not inside of a two-way prefix, and a longer one is refused.
        The keys of a window are the slots from its first_document_begin to its end.
        """
        begin = 0
        for end in attention.cut_points(self, size).tolist():
            layout = attention.micro_sequence(
                self.cu_seqlens, begin, end, self.segments["prefix"], self.cu_seqlens_padded
            )
            yield slice(begin, end), layout
            begin = end

    @cached_property
    def loss_weights(self) -> np.ndarray:
        """float32[T]: loss_mask times the weight of the slot's segment, or of its block in block diffusion."""
        weights = self._segments.at_slots(self.segments["loss_weight"], 0)
        if "block_offsets" in self._shard.layout:
            in_halves = self.dataset._is_in_halves(self._segments)
            for i in np.flatnonzero(in_halves) if in_halves is not None else ():
                self._put_block_weights(weights, int(i))
        return read_only(weights * self.loss_mask)

    def _put_block_weights(self, weights: np.ndarray, i: int) -> None:
        at = self._range[0] + i
        first, last = self._part("block_offsets", at, at + 2).tolist()
        stored_blocks = self._shard.layout["block_loss_weight"][1][0]
        begin, end = int(self.segments["begin"][i]), int(self.segments["end"][i])
        length = (end - begin) // 2
        block_length = self.dataset.tasks[int(self.segments["task"][i])]["parameters"].get("block_length")
        if type(block_length) is not int or block_length < 1:
            raise self._fault(f"segment {i}: its task has no block_length in the manifest")
        n_blocks = -(-length // block_length)
        if not 0 <= first <= last <= stored_blocks or last - first != n_blocks:
            raise self._fault(f"segment {i}: block_offsets {first}, {last} should give {n_blocks} blocks")
        of_blocks = self._part("block_loss_weight", first, last)
        weights[begin : begin + length] = np.repeat(of_blocks, min(block_length, length))[:length]


def row_of(dataset: "Dataset", index: int, shard: Shard, place: int) -> Row:
    """Row `place` of an open shard; Dataset.row does the same by itself, since it is called once a row."""
    row = Row()
    row.dataset, row.index, row._opened, row._row = dataset, index, (shard.tokens, index - place, shard), place
    row.tokens = shard.tokens[place]
    return row
