"""A shard's arrays as an epoch has them, from the loader's own redraw, so that what checks the stored ones checks them too."""

from collections.abc import Mapping

import numpy as np

from packprep.dataset.loader import Dataset
from packprep.dataset.rows import Segments, fill, own_dtype, read_only
from packprep.dataset.shard import Shard

SLOTS_AT_ONCE = 1 << 20
"""Slots of rows that are drawn anew at a time: redraw takes some hundred bytes for each."""
HEADER = ("prefix", "noise", "loss_weight")
"""The columns of the header that follow the epoch."""
WEIGHTS = "loss_weights"
"""What an epoch gives beside the arrays of a shard, [rows, seq_length], and in the place of BLOCKS."""
BLOCKS = ("block_noise", "block_loss_weight")


def arrays_in_epoch(dataset: Dataset, shard: Shard, epoch: int) -> Mapping[str, np.ndarray]:
    """The arrays of a shard of `dataset` as redraw gives its rows in `epoch`, but for those of BLOCKS, which are as stored; also
    loss_mask where it is not stored, and loss_weights.

    DatasetError where what is stored cannot be drawn anew.
    """
    names = ["tokens", *(["labels"] if "labels" in shard.layout else []), "loss_mask", WEIGHTS]
    shape = (shard.rows, shard.seq_length)
    columns = {name: np.empty(shape, own_dtype(name, dataset.token_dtype)) for name in names}
    header: dict[str, list[np.ndarray]] = {name: [shard.arrays[f"segment_{name}"][:0]] for name in HEADER}
    at_once = max(1, SLOTS_AT_ONCE // shard.seq_length)
    for first in range(0, shard.rows, at_once):
        places = [(shard, row) for row in range(first, min(first + at_once, shard.rows))]
        segments = Segments(dataset.facts, places)
        rows = {name: values[first : first + len(places)] for name, values in columns.items()}
        for name, values in rows.items():
            fill(segments, name, values)
        dataset.redraw(segments, rows, [epoch] * len(places))
        for name, parts in header.items():
            parts.append(segments.column(name))
    for name, parts in header.items():
        stored = shard.arrays[f"segment_{name}"]
        columns[f"segment_{name}"] = np.concatenate(parts, dtype=stored.dtype, casting="same_kind")
    return {**shard.arrays, **{name: read_only(values) for name, values in columns.items()}}
