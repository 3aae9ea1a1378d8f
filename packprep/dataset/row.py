"""One row as a view of its mapped shard; what is not stored is derived from it at first use."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from packprep.dataset import attention
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


def derived_labels(tokens: np.ndarray, segment_ids: np.ndarray, pad_id: int, out: np.ndarray) -> np.ndarray:
    """out [..., T]: the next slot's token of the same segment, elsewhere pad_id."""
    same = (segment_ids[..., 1:] == segment_ids[..., :-1]) & (segment_ids[..., 1:] != 0)
    out[...] = pad_id
    np.copyto(out[..., :-1], tokens[..., 1:], where=same, casting="unsafe")
    return out


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@dataclass(frozen=True, eq=False)
class Row:
    """Row `index` of a dataset: views of the mapped shard, or what is derived from them at first use; read-only.

        tokens        token_dtype[T]    loss_mask     uint8[T]
        labels        token_dtype[T]    loss_weights  float32[T]
        segment_ids   uint16[T]         position_ids  int32[T]
        cu_seqlens, cu_seqlens_padded   int32[n_segments + 1]; the latter None where segments are contiguous
        segments      the header's columns by their short names, [n_segments] each, and begin, end: physical slots

    Reading a part that is damaged raises DatasetError with file and row.
    """

    dataset: "Dataset" = field(repr=False)
    index: int
    _shard: Shard = field(repr=False)
    _row: int = field(repr=False)  # in its shard

    def _fault(self, what: str) -> DatasetError:
        return DatasetError(f"{self._shard.path}: row {self._row}: {what}; `packprep verify` says where else")

    @cached_property
    def _range(self) -> tuple[int, int]:
        return self._shard.segment_range(self._row)

    def _offsets(self, name: str) -> np.ndarray:
        begin, end = self._range
        offsets = self._shard.arrays[name][begin + self._row : end + self._row + 1]
        if offsets[0] != 0 or offsets[-1] > self.dataset.seq_length or (offsets[1:] <= offsets[:-1]).any():
            raise self._fault(f"{name} does not ascend from 0 to at most {self.dataset.seq_length}")
        return offsets

    @property
    def tokens(self) -> np.ndarray:
        return self._shard.arrays["tokens"][self._row]

    @cached_property
    def labels(self) -> np.ndarray:
        labels = self._shard.arrays.get("labels")
        if labels is not None:
            return labels[self._row]
        out = np.empty_like(self.tokens)
        return read_only(derived_labels(self.tokens, self.segment_ids, self.dataset.pad_id, out))

    @property
    def segment_ids(self) -> np.ndarray:
        return self._shard.arrays["segment_ids"][self._row]

    @cached_property
    def loss_mask(self) -> np.ndarray:
        stored = self._shard.arrays["loss_mask"][self._row]
        return stored if self.dataset._loss_on is None else read_only(stored * self._loss_is_on())

    def _loss_is_on(self) -> np.ndarray:
        """bool[T]: the slots of the segments that `with_loss_on` kept; padding False."""
        assert self.dataset._loss_on is not None
        sources, tasks = self.dataset._loss_on
        kept = self._of_segment("source", sources) & self._of_segment("task", tasks)
        return self._at_slots(kept, False)

    def _of_segment(self, column: str, table: np.ndarray) -> np.ndarray:
        """What `table` says of each segment's task or source."""
        index = self.segments[column]
        if len(index) and index.max() >= len(table):
            raise self._fault(f"segment_{column} {index.max()} is beyond the manifest's {len(table)} {column}s")
        return table[index]

    def _at_slots(self, per_segment: np.ndarray, padding) -> np.ndarray:
        """Each slot's value of its segment."""
        values = np.append(np.asarray(padding, per_segment.dtype), per_segment)
        if self.segment_ids.max(initial=0) >= len(values):
            raise self._fault(f"segment id {self.segment_ids.max()} is beyond its {self.n_segments} segments")
        return values[self.segment_ids]

    @cached_property
    def cu_seqlens(self) -> np.ndarray:
        return self._offsets("cu_seqlens")

    @cached_property
    def cu_seqlens_padded(self) -> np.ndarray | None:
        if "cu_seqlens_padded" not in self._shard.arrays:
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
        columns = {name: self._shard.arrays[f"segment_{name}"][begin:end] for name in _SEGMENT_COLUMNS}
        physical = self.cu_seqlens if self.cu_seqlens_padded is None else self.cu_seqlens_padded
        columns["begin"] = physical[:-1]
        columns["end"] = read_only(physical[:-1] + np.diff(self.cu_seqlens))
        return columns

    @cached_property
    def position_ids(self) -> np.ndarray:
        """int32[T]: from 0 in each segment, and in each half of a block-diffusion segment; padding 0."""
        positions = attention.position_ids(self.cu_seqlens, self.dataset.seq_length, self.cu_seqlens_padded)
        if self.dataset._is_block_diffusion.any():
            for i in np.flatnonzero(self._of_segment("task", self.dataset._is_block_diffusion)):
                begin, end = int(self.segments["begin"][i]), int(self.segments["end"][i])
                half = (end - begin) // 2
                positions[begin + half : end] -= half
        return read_only(positions)

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

    @cached_property
    def loss_weights(self) -> np.ndarray:
        """float32[T]: loss_mask times the weight of the slot's segment, or of its block in block diffusion."""
        weights = self._at_slots(self.segments["loss_weight"], 0)
        if "block_offsets" in self._shard.arrays:
            for i in np.flatnonzero(self._of_segment("task", self.dataset._is_block_diffusion)):
                self._put_block_weights(weights, int(i))
        return read_only(weights * self.loss_mask)

    def _put_block_weights(self, weights: np.ndarray, i: int) -> None:
        first, last = (int(n) for n in self._shard.arrays["block_offsets"][self._range[0] + i :][:2])
        block_weights = self._shard.arrays["block_loss_weight"]
        begin, end = int(self.segments["begin"][i]), int(self.segments["end"][i])
        length = (end - begin) // 2
        block_length = self.dataset.tasks[int(self.segments["task"][i])]["parameters"].get("block_length")
        if type(block_length) is not int or block_length < 1:
            raise self._fault(f"segment {i}: its task has no block_length in the manifest")
        n_blocks = -(-length // block_length)
        if not 0 <= first <= last <= len(block_weights) or last - first != n_blocks:
            raise self._fault(f"segment {i}: block_offsets {first}, {last} should give {n_blocks} blocks")
        weights[begin : begin + length] = np.repeat(block_weights[first:last], block_length)[:length]
