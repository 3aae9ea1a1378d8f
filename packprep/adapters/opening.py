"""What a trainer's adapter is given to read: a directory, or what open_dataset made, a Dataset or a Mixture."""

import os

from packprep.dataset.loader import Dataset, open_dataset
from packprep.dataset.manifest import StoredTask
from packprep.dataset.mixture import Mixture
from packprep.errors import ArgumentError


def opened(directory: str | os.PathLike | Dataset | Mixture) -> Dataset | Mixture:
    """The dataset in the directory, or the dataset or mixture itself; ArgumentError for a list of directories."""
    if isinstance(directory, list | tuple):
        raise ArgumentError(
            f"a list of {len(directory)} directories says no shares: open the mixture first, with "
            "packprep.open_dataset([…], shares=[…]), and give that"
        )
    return open_dataset(directory) if isinstance(directory, str | os.PathLike) else directory


def opened_alone(directory: str | os.PathLike | Dataset | Mixture, instead: str) -> Dataset:
    """The same where rows are drawn by number, by which a mixture's shares would be lost: one is refused.

    instead: what to do, for the message.
    """
    dataset = opened(directory)
    if isinstance(dataset, Mixture):
        raise ArgumentError(
            f"{dataset!r} is a mixture, and rows that are drawn by number would pass its shares over; {instead}"
        )
    return dataset


def datasets_of(dataset: Dataset | Mixture) -> tuple[Dataset, ...]:
    """The datasets of a mixture; a dataset alone."""
    return dataset.datasets if isinstance(dataset, Mixture) else (dataset,)


def tasks_of(dataset: Dataset | Mixture) -> list[StoredTask]:
    """The tasks of all of its datasets, one dataset after the other."""
    return [task for each in datasets_of(dataset) for task in each.tasks]
