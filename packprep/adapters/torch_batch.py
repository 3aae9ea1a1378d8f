"""How rows of the loader become a batch of tensors: columns, types, layout, sums."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from packprep.adapters.opening import tasks_of
from packprep.dataset import attention
from packprep.dataset.loader import COLUMNS, Dataset
from packprep.dataset.mixture import Mixture
from packprep.errors import ArgumentError

LAYOUTS = ("bshd", "thd")
# torch has no arithmetic on uint16, and embeddings and cross_entropy want int64.
DTYPES = {
    "tokens": np.dtype(np.int64),
    "labels": np.dtype(np.int64),
    "position_ids": np.dtype(np.int64),
    "segment_ids": np.dtype(np.int32),
    "prefix_ends": np.dtype(np.int32),
    "block_lengths": np.dtype(np.int32),
    "loss_mask": np.dtype(bool),
    "loss_weights": np.dtype(np.float32),
}


def default_columns(dataset: Dataset | Mixture) -> tuple[str, ...]:
    """All that a trainer needs for the tasks of every dataset: loss_weights where a task has some, and prefix_ends."""
    names = list(COLUMNS)
    if any(task["label_alignment"] == "same_slot" for task in tasks_of(dataset)):
        names.append("loss_weights")
    return (*names, "prefix_ends")


def batch_sums(batch: Mapping[str, np.ndarray]) -> dict[str, int | float]:
    """n_trained: the slots that loss_mask trains; loss_weight_sum: that of their weights, 1 each without loss_weights."""
    n = int(np.count_nonzero(batch["loss_mask"]))
    weights = batch.get("loss_weights")
    return {"n_trained": n, "loss_weight_sum": float(n if weights is None else weights.sum(dtype=np.float64))}


class Form:
    """How a batch of the loader becomes a batch of tensors; a picklable record, since workers make batches too."""

    def __init__(
        self,
        dataset: Dataset | Mixture,
        layout: str,
        columns: Sequence[str] | None,
        ignore_index: int | None,
        tail: str,
    ):
        if layout not in LAYOUTS:
            raise ArgumentError(f"layout is {layout!r} and should be 'bshd' or 'thd'")
        if tail not in ("segment", "drop"):
            raise ArgumentError(f"tail is {tail!r} and should be 'segment' or 'drop'")
        self.layout, self.ignore_index, self.tail = layout, ignore_index, tail
        wanted = default_columns(dataset) if columns is None else tuple(columns)
        # The layout and the sums are made from these two; labels need the mask where an ignore_index goes into them.
        needed = ["segment_ids"] if layout == "thd" else []
        if "prefix_ends" in wanted and any(task["attention"] == "block_diffusion" for task in tasks_of(dataset)):
            needed.append("block_lengths")
        if ignore_index is not None or "loss_weights" in wanted:
            needed.append("loss_mask")
        self.columns = tuple(dict.fromkeys((*wanted, *needed)))

    def arrays(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        """A batch of numpy arrays, in the layout and with its sums."""
        sums = batch_sums(batch) if "loss_mask" in batch else {}
        if self.ignore_index is not None and "labels" in batch:
            batch["labels"][~batch["loss_mask"]] = self.ignore_index
        if self.layout == "bshd":
            return {**batch, **sums}
        blocks = batch.get("prefix_ends", np.zeros(0)) < 0
        flat, cu_seqlens, max_seqlen = attention.flatten(_without_negative(batch, blocks), self.tail)
        if blocks.any():
            flat["prefix_ends"][flat["block_lengths"] > 0] = -1
        rows = {name: values[None] for name, values in flat.items()}
        return {**rows, "cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, **sums}


def _without_negative(batch: dict[str, np.ndarray], negative: np.ndarray) -> dict[str, np.ndarray]:
    """The batch with prefix_ends 0 where they are −1, which attention.flatten could not count on from."""
    return {**batch, "prefix_ends": np.where(negative, 0, batch["prefix_ends"])} if negative.any() else batch


def tensors(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The same batch with its arrays as tensors that share their memory."""
    return {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in batch.items()}
