"""Read rows in torchtitan's Grain pipeline, which its main branch has since August 2026.

    GrainDataLoader.Config(
        dataset=SingleDatasetConfig(source=source("packed"), processor=processor()),
        collator=collator("packed")
    )

torchtitan determines the order, the ranks' shares and the state. Its trainer derives masks from the
positions, which restart at 0 in each segment, and attends causally inside a segment. If a task has
another attention pattern, an error names the task, unless prefix_bidirectional=False requests
causal attention instead. torchtitan's releases up to 0.3.0 have no such pipeline; use
`packprep.adapters.megatron.torchtitan` with them.

    source     row i → {"input_ids", "labels", "positions"}: int64[seq_length], untrained -100
    processor  converts such a row to torchtitan's TextSequence
    collator   joins as many rows as a token batch holds; torchtitan's TextCollator takes one row
"""

import os
from typing import Any

import numpy as np

from packprep.adapters import opened_alone
from packprep.adapters.megatron import check_for_torchtitan
from packprep.dataset.loader import Dataset
from packprep.errors import ArgumentError

IGNORE_INDEX = -100


class RowSource:
    """A random-access source of rows, for `SingleDatasetConfig.source` of torchtitan.

    The dataset is open before torchtitan builds its pipeline, so `build` returns the source itself.
    """

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def build(self, *, dataset_iteration_policy: Any) -> "RowSource":
        return self

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        columns = ("tokens", "labels", "position_ids", "segment_ids", "loss_mask")
        batch = self.dataset.batch([int(index)], columns=columns)
        row = {name: batch[name][0] for name in columns}
        slots = np.arange(self.dataset.seq_length)
        padding = row["segment_ids"] == 0
        # The last slot outside padding gives each slot of padding its distance from the run's
        # start.
        after_padding = np.maximum.accumulate(np.where(padding, -1, slots))
        return {
            "input_ids": row["tokens"].astype(np.int64),
            "labels": np.where(row["loss_mask"] > 0, row["labels"].astype(np.int64), IGNORE_INDEX),
            # Each run of padding becomes one document, not one document per slot.
            "positions": (
                np.where(padding, slots - after_padding - 1, row["position_ids"]).astype(np.int64)
            ),
        }


def source(
    directory: str | os.PathLike | Dataset, *, prefix_bidirectional: bool = True
) -> RowSource:
    """Return a dataset's rows for `SingleDatasetConfig.source`.

    Args:
        directory: Dataset folder, or an open `Dataset`.
        prefix_bidirectional: Pass False for causal attention also in prefixes and in segments of
            same-position tasks, such as masked diffusion.

    Returns:
        A random-access source of {"input_ids", "labels", "positions"}, int64[seq_length] each.

    Raises:
        ArgumentError: If the dataset is a mixture, if a task needs more than causal attention, or
            if tasks or documents weight their loss. torchtitan's loss reads no weights.

    Example:
        SingleDatasetConfig(source=source("packed"), processor=processor())
    """
    dataset = opened_alone(
        directory, "give torchtitan's DatasetMixConfig a source for each dataset, with its weight"
    )
    check_for_torchtitan(dataset, prefix_bidirectional)
    return RowSource(dataset)


class _Processor:
    def build(self, *, context: Any) -> Any:
        from torchtitan.components.data import TextSequence

        return lambda row, rng: TextSequence(**row)


def processor() -> Any:
    """Return a `SingleDatasetConfig.processor` that converts a row of `source` to a TextSequence.

    It does not shift labels, because they are shifted already.
    """
    return _Processor()


class _Collator:
    def __init__(self, seq_length: int):
        self._seq_length = seq_length

    def build(self, *, context: Any) -> Any:
        from torchtitan.components.data import TextCollator

        rows, remainder = divmod(context.num_tokens_per_batch, self._seq_length)
        if remainder or not rows:
            raise ArgumentError(
                f"a batch of {context.num_tokens_per_batch} tokens does not consist of whole rows"
                f" of {self._seq_length}\n"
                "hint: set torchtitan's local batch and sequence length to a multiple of the"
                " dataset's seq_length"
            )

        class RowCollator(TextCollator):
            def num_rows_per_batch(self) -> int:
                return rows

        return RowCollator(TextCollator.Config(), context=context)


def collator(directory: str | os.PathLike | Dataset) -> Any:
    """Return a `GrainDataLoader.Config.collator` that fills a token batch with whole rows.

    The collator adds no padding. The token batch must be a multiple of the dataset's seq_length.
    Otherwise torchtitan's call of the collator's `build` raises ArgumentError.
    """
    return _Collator(opened_alone(directory, "give the dataset with the longest rows").seq_length)
