"""The header columns of a dataset's shards, one shard at a time, checked as far as indexing by them needs."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from packprep.dataset.manifest import Manifest
from packprep.dataset.shard import Shard
from packprep.errors import DatasetError


class SegmentColumns(NamedTuple):
    """The segments of a shard, int64[segments] each: row in the shard, first slot in it, real slots, task."""

    row: np.ndarray
    begin: np.ndarray
    slots: np.ndarray
    task: np.ndarray


def segments_of(shard: Shard, manifest: Manifest) -> SegmentColumns:
    """The segments of a shard; DatasetError where its columns cannot be right."""
    arrays = shard.arrays
    offsets, task = arrays["row_offsets"], arrays["segment_task"].astype(np.int64)
    counts = np.diff(offsets)
    if offsets[0] != 0 or (counts < 0).any() or offsets[-1] != shard.segments:
        raise _damaged(shard, f"row_offsets do not ascend from 0 to its {shard.segments} segments")
    if len(task) and task.max() >= len(manifest["tasks"]):
        raise _damaged(shard, f"segment_task {task.max()} is beyond the manifest's {len(manifest['tasks'])} tasks")
    row = np.repeat(np.arange(shard.rows), counts)
    at = np.arange(shard.segments) + row
    real = arrays["cu_seqlens"].astype(np.int64)
    begin = arrays.get("cu_seqlens_padded", arrays["cu_seqlens"]).astype(np.int64)[at]
    slots = real[at + 1] - real[at]
    if (begin < 0).any() or (slots < 1).any() or (begin + slots > shard.seq_length).any():
        raise _damaged(shard, f"cu_seqlens gives segments that do not lie in 0 … {shard.seq_length}")
    return SegmentColumns(row, begin, slots, task)


def _damaged(shard: Shard, what: str) -> DatasetError:
    return DatasetError(f"{shard.path}: {what}; the file is damaged: `packprep verify` says where else")


def spread(shards: int, most: int) -> Sequence[int]:
    """All shard numbers, or `most` of them at even distances."""
    return range(shards) if shards <= most else [i * shards // most for i in range(most)]
