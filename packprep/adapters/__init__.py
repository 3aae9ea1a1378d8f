"""Adapt batches and attention arguments to trainers, in the terms of each library.

Each module is imported only on demand.

```
torch.py             loader, iterable, Rows, BatchSampler: batches as tensors
torch_attention.py   SDPA, FlexAttention and varlen: masks and keyword arguments from a batch
torch_loss.py        masked_loss: the loss that packprep's labels are made for
huggingface.py       Collator, model_inputs, check_tokenizer for Transformers and its Trainer
tokenizer_match.py   check_tokenizer without torch
megatron.py          GPTRows, packed_seq_params for Megatron-LM; torchtitan for versions ≤ 0.3.0
torchtitan.py        source, processor, collator for torchtitan's main branch
remote.py            open_remote: datasets at a URL, through a local cache
jax/                 loader, splash_attention, dense_mask, masked_loss for JAX, MaxText,
                     Levanter, TransformerEngine and Grain
```
The rest of packprep imports nothing from here. The adapters import only from `packprep.dataset` and
`packprep.format`; remote.py and tokenizer_match.py also import `packprep.storage`. This file has
the code that the adapters share.
"""

import os

from packprep.dataset.loader import COLUMNS, Dataset, open_dataset
from packprep.dataset.manifest import StoredTask, block_columns, has_weighted_spans, is_in_place
from packprep.dataset.mixture import Mixture
from packprep.errors import ArgumentError


def opened(directory: str | os.PathLike | Dataset | Mixture) -> Dataset | Mixture:
    """Return an open dataset or mixture.

    Args:
        directory: Dataset folder, or an open `Dataset` or `Mixture`. An open object is returned as
            it is.

    Raises:
        ArgumentError: If `directory` is a list of directories, because a list has no shares.
        DatasetError: If the dataset is missing or damaged.
    """
    if isinstance(directory, list | tuple):
        raise ArgumentError(
            f"a list of {len(directory)} directories has no shares\n"
            "hint: open the mixture first, with packprep.open_dataset([…], shares=[…]), and give"
            " it"
        )
    return open_dataset(directory) if isinstance(directory, str | os.PathLike) else directory


def opened_alone(directory: str | os.PathLike | Dataset | Mixture, instead: str) -> Dataset:
    """Return an open dataset whose rows a trainer draws by index.

    Args:
        directory: Dataset folder, or an open `Dataset`.
        instead: The hint of the error that is raised for a mixture.

    Returns:
        The dataset.

    Raises:
        ArgumentError: If `directory` is a mixture, because drawing by index ignores its shares.
        DatasetError: If the dataset is missing or damaged.
    """
    dataset = opened(directory)
    if isinstance(dataset, Mixture):
        raise ArgumentError(
            f"{dataset!r} is a mixture, and drawing rows by number would ignore its shares\n"
            f"hint: {instead}"
        )
    return dataset


def datasets_of(dataset: Dataset | Mixture) -> tuple[Dataset, ...]:
    """Return the datasets of a mixture, or a tuple with the one dataset."""
    return dataset.datasets if isinstance(dataset, Mixture) else (dataset,)


def tasks_of(dataset: Dataset | Mixture) -> list[StoredTask]:
    """Return the tasks of all datasets, in the order of the datasets."""
    return [task for member in datasets_of(dataset) for task in member.tasks]


def weights_spans(dataset: Dataset | Mixture) -> bool:
    """Return whether the ledger of any dataset has slots with a loss weight other than 1."""
    return any(has_weighted_spans(member.manifest) for member in datasets_of(dataset))


def weighted_tasks(dataset: Dataset | Mixture) -> list[StoredTask]:
    """Return the same-position tasks with a loss weight that depends on the noise level."""
    return [
        t
        for t in tasks_of(dataset)
        if is_in_place(t) and t["parameters"].get("weighting") != "none"
    ]


def default_columns(dataset: Dataset | Mixture) -> tuple[str, ...]:
    """Return the columns that a trainer needs for the tasks of every dataset.

    They are COLUMNS and `prefix_ends`. If a task is a same-position task, or if documents give loss
    weights, `loss_weights` is added. `columns_of_blocks` are added too.
    """
    names, tasks = list(COLUMNS), tasks_of(dataset)
    if any(is_in_place(task) for task in tasks) or weights_spans(dataset):
        names.append("loss_weights")
    return (*names, "prefix_ends", *columns_of_blocks(dataset))


def columns_of_blocks(dataset: Dataset | Mixture) -> list[str]:
    """Return the `block_columns` that serve all of the datasets."""
    columns = {name for member in datasets_of(dataset) for name in block_columns(member.manifest)}
    return ["block_starts"] if "block_starts" in columns else list(columns)
