"""Read rows with Megatron-LM and torchtitan.

    GPTRows(dir) ────────── a map-style dataset with GPTDataset's keys, and segment boundaries
    packed_seq_params(…) ── PackedSeqParams for a batch of such rows
    alignment_factor(…) ─── the pad_seq_to_mult that a parallel layout needs
    torchtitan(dir, …) ──── ({input, positions}, labels) with -100 where nothing is trained

Like packprep, both trainers store the label and the mask at the predicting slot, so labels are not
shifted again. Both attend causally inside a segment. If a task has another attention pattern, an
error names the task, unless prefix_bidirectional=False requests causal attention instead.
"""

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset as TorchDataset

from packprep.adapters import opened, opened_alone, weighted_tasks, weights_spans
from packprep.adapters.torch import DTYPES, loader
from packprep.adapters.torch_attention import varlen_causal
from packprep.dataset import attention
from packprep.dataset.loader import COLUMNS, Dataset
from packprep.dataset.mixture import Mixture
from packprep.errors import ArgumentError

_MXFP8, _FP8 = 32, 16


def alignment_factor(
    tp_size: int = 1, cp_size: int = 1, sequence_parallel: bool = False, fp8: str | None = None
) -> int:
    """Return the smallest value of pad_seq_to_mult that suits a parallel layout.

    It is the least common multiple of several factors. Context parallelism needs 2 · cp_size.
    Sequence parallelism multiplies this factor by tp_size. Without context parallelism, sequence
    parallelism needs the factor tp_size. fp8 needs 16 and mxfp8 needs 32.

    Args:
        tp_size: Tensor-parallel size.
        cp_size: Context-parallel size.
        sequence_parallel: Whether sequence parallelism is on.
        fp8: "fp8", "mxfp8" or None.

    Returns:
        The multiple in slots.

    Raises:
        ArgumentError: If an argument is invalid.
    """
    if fp8 not in (None, "fp8", "mxfp8"):
        raise ArgumentError(f"fp8 is {fp8!r} and should be None, 'fp8' or 'mxfp8'")
    if tp_size < 1 or cp_size < 1:
        raise ArgumentError(f"tp_size {tp_size} and cp_size {cp_size} should be at least 1")
    chunks = 2 * cp_size if cp_size > 1 else 1
    return math.lcm(
        chunks * (tp_size if sequence_parallel else 1), {None: 1, "fp8": _FP8, "mxfp8": _MXFP8}[fp8]
    )


def _causal(dataset: Dataset | Mixture, prefix_bidirectional: bool) -> None:
    if not varlen_causal(dataset, prefix_bidirectional):
        raise ArgumentError(
            "every task of this dataset attends bidirectionally to its segments, but this"
            " trainer's attention is causal\n"
            "hint: use prefix_bidirectional=False to read the segments causally"
        )


class GPTRows(TorchDataset):
    """A map-style dataset of rows with the keys of Megatron-core's GPTDataset.

        tokens labels position_ids   int64[T]     loss_mask    float32[T], the column loss_weights
        cu_seqlens   int32[max_segments + 2]      max_seqlen   int32[]

    In cu_seqlens, the gap that pad_seq_to_mult leaves after a segment counts as the last slots of
    this segment. Under causal attention, no token of the segment attends to these slots. The
    padding at the end of the row is one more segment, so that kernels write every slot. cu_seqlens
    has a fixed width and is filled up with its last value.

    Args:
        directory: Dataset folder, or an open `Dataset`.
        max_segments: Maximum number of segments per row, which sets the width of cu_seqlens. The
            default is the recipe's max_segments_per_row. Without this key, the default is T, the
            most that a row can have.
        prefix_bidirectional: Pass False for causal attention also in prefixes and in segments of
            same-position tasks, such as masked diffusion.

    Attributes:
        dataset: The dataset.
        max_segments: Maximum number of segments per row.

    Raises:
        ArgumentError: If the dataset is a mixture, since Megatron draws rows by index, or if a task
            needs more than causal attention.
        DatasetError: If the dataset is missing or damaged.

    Example:
        rows = GPTRows("packed", max_segments=64)
    """

    def __init__(
        self,
        directory: str | os.PathLike | Dataset,
        max_segments: int | None = None,
        prefix_bidirectional: bool = True,
    ):
        self.dataset = opened_alone(
            directory,
            "make GPTRows of each dataset, and give their weights to Megatron's own blending",
        )
        _causal(self.dataset, prefix_bidirectional)
        packing = self.dataset.manifest["recipe"].get("packing", {})
        self.max_segments = (
            max_segments or packing.get("max_segments_per_row") or self.dataset.seq_length
        )

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        """Return one row, or row 0 without loss if the index is None.

        Megatron's samplers use None to fill a batch.

        Raises:
            ArgumentError: If the row has more than max_segments segments.
        """
        if index is None:
            row = self[0]
            return {**row, "loss_mask": torch.zeros_like(row["loss_mask"])}
        columns = ("tokens", "labels", "position_ids", "loss_weights")
        arrays = self.dataset.batch([index], columns=columns, dtype=DTYPES)
        view = self.dataset.row(index)
        physical = view.cu_seqlens if view.cu_seqlens_padded is None else view.cu_seqlens_padded
        try:
            cu_seqlens = attention.pad_cu_seqlens(
                physical, self.max_segments + 2, self.dataset.seq_length, "segment"
            )
        except ArgumentError as error:
            raise ArgumentError(
                f"row {index}: {error}\nhint: raise max_segments = {self.max_segments}"
            ) from error
        return {
            **{name: torch.from_numpy(arrays[name][0]) for name in columns[:3]},
            "loss_mask": torch.from_numpy(arrays["loss_weights"][0]),
            "cu_seqlens": torch.from_numpy(cu_seqlens),
            "max_seqlen": torch.tensor(int(np.diff(cu_seqlens).max(initial=0)), dtype=torch.int32),
        }


def packed_seq_params(batch: Mapping[str, torch.Tensor]) -> Any:
    """Return the PackedSeqParams for a batch of GPTRows.

    If megatron is not installed, the result is a dict with the fields of PackedSeqParams.

    The batch has arrays [B, …], or the arrays of one row. Its B rows become one THD row of B · T
    slots, so pass the tokens as `tokens.view(1, -1)`. The boundaries of each row are offset by the
    length of the rows before it.
    """
    length = batch["tokens"].shape[-1]
    rows = torch.atleast_2d(batch["cu_seqlens"])
    # Each row ends where the next row starts, so only the first row keeps its leading 0.
    moved = rows[:, 1:] + length * torch.arange(len(rows), device=rows.device)[:, None]
    cu_seqlens = torch.cat((rows.new_zeros(1), moved.flatten())).int()
    longest = int(batch["max_seqlen"].max())
    fields = {
        "qkv_format": "thd",
        **{f"cu_seqlens_{name}": cu_seqlens for name in ("q", "kv", "q_padded", "kv_padded")},
        **{f"max_seqlen_{name}": longest for name in ("q", "kv")},
    }
    try:
        from megatron.core.packed_seq_params import PackedSeqParams
    except ImportError:
        return fields
    return PackedSeqParams(**fields)


def check_for_torchtitan(dataset: Dataset | Mixture, prefix_bidirectional: bool) -> None:
    """Check that torchtitan can train a dataset.

    Args:
        dataset: The dataset or mixture.
        prefix_bidirectional: Pass False for causal attention also in prefixes and in segments of
            same-position tasks, such as masked diffusion.

    Raises:
        ArgumentError: If a task needs more than causal attention, or if tasks or documents weight
            their loss. torchtitan's loss reads no weights.
    """
    _causal(dataset, prefix_bidirectional)
    if weights_spans(dataset):
        raise ArgumentError(
            "documents of this dataset have loss weights, which torchtitan's loss does not"
            " read\n"
            "hint: use masked_loss of packprep.adapters.torch_loss, or remove the weights from"
            " the documents"
        )
    if weighted := weighted_tasks(dataset):
        raise ArgumentError(
            f"task {weighted[0]['name']!r} weights its loss, which torchtitan's loss does not"
            " read\n"
            "hint: use masked_loss of packprep.adapters.torch_loss, or build with weighting ="
            " 'none'"
        )


def torchtitan(
    directory: str | os.PathLike | Dataset | Mixture,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    *,
    prefix_bidirectional: bool = True,
    **options: Any,
) -> "TitanBatches":
    """Return batches in the form that trainers of torchtitan up to 0.3.0 expect.

    Positions restart at 0 in each segment, and torchtitan derives its document masks from them.

    Args:
        directory: Dataset folder, or an open `Dataset` or `Mixture`.
        batch_size: Rows per rank and step.
        rank: Index of this data-parallel rank.
        world_size: Number of data-parallel ranks.
        prefix_bidirectional: Pass False for causal attention also in prefixes and in segments of
            same-position tasks, such as masked diffusion.
        options: Further arguments of adapters.torch.loader, except layout, columns and
            ignore_index.

    Returns:
        An iterator of ({"input", "positions"}, labels), int64[B, T] each. Labels are -100 where
        nothing is trained.

    Raises:
        ArgumentError: If an argument is invalid, if a task needs more than causal attention, or if
            tasks or documents weight their loss. torchtitan's loss reads no weights.
        DatasetError: If the dataset is missing or damaged.

    Example:
        for inputs, labels in torchtitan("packed", batch_size=8):
            …
    """
    dataset = opened(directory)
    check_for_torchtitan(dataset, prefix_bidirectional)
    return TitanBatches(
        loader(dataset, batch_size, rank, world_size, columns=COLUMNS, ignore_index=-100, **options)
    )


class TitanBatches:
    """An iterator over torchtitan's batches. Its state is the state of the loader that it reads."""

    def __init__(self, batches: Any):
        self._batches = batches

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        return self

    def __next__(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        batch = next(self._batches)
        return {"input": batch["tokens"], "positions": batch["position_ids"]}, batch["labels"]

    def state_dict(self) -> dict[str, Any]:
        return self._batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._batches.load_state_dict(state)
