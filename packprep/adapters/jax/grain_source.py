"""Read packprep's batches as a Grain dataset, with their exact state in Grain's checkpoints.

Grain also takes the result of `open_dataset` as a random-access source. Grain then determines the
order and the state.
"""

import os
from typing import Any

from packprep.adapters import default_columns, opened
from packprep.dataset.loader import Dataset
from packprep.dataset.mixture import Mixture

try:
    import grain
except ImportError as error:
    raise ImportError(
        "packprep.adapters.jax.grain_source needs Grain, which is not installed\n"
        "hint: pip install grain"
    ) from error


class _Batches(grain.IterDataset):
    def __init__(self, dataset: Dataset | Mixture, batch_size: int, options: dict[str, Any]):
        super().__init__()
        self._dataset, self._batch_size, self._options = dataset, batch_size, options
        iter(self)  # Invalid arguments raise here, where they are given.

    def __iter__(self) -> "_Iterator":
        return _Iterator(self._dataset.batches(self._batch_size, **self._options))


class _Iterator(grain.DatasetIterator):
    def __init__(self, batches: Any):
        super().__init__()
        self._batches = batches

    def __next__(self) -> dict[str, Any]:
        self._assert_not_closed()
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        return self._batches.state_dict()

    def set_state(self, state: dict[str, Any]) -> None:
        self._batches.load_state_dict(state)


def grain_batches(
    directory: str | os.PathLike | Dataset | Mixture, batch_size: int, **options: Any
) -> grain.IterDataset:
    """Return a grain.IterDataset over one rank's batches.

    Each batch is a dict of NumPy arrays [batch_size, T].

    The state of its iterators is packprep's {fingerprint, digest, seed, shuffle, redraw, rows}. One
    rank's state restores every rank, with any batch size and world size.

    Args:
        directory: Dataset folder, or an open `Dataset` or `Mixture`.
        batch_size: Rows per rank and step.
        options: As in `Dataset.batches`. `columns` defaults to all columns that the tasks need,
            including prefix_ends and, where needed, loss_weights.

    Returns:
        The dataset.

    Raises:
        ArgumentError: If an argument is invalid, as in `Dataset.batches`.
        DatasetError: If the dataset is missing or damaged.

    Example:
        batches = grain_batches("packed", batch_size=8, seed=1)
    """
    dataset = opened(directory)
    return _Batches(dataset, batch_size, {"columns": default_columns(dataset), **options})
