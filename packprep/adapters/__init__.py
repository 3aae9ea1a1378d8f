"""What trainers type: batches and attention arguments in their library's own words, each module
imported only on demand.

```
torch.py ──────────── loader, iterable, Rows, BatchSampler        batches as tensors, with and without worker processes
torch_attention.py ── SDPA, FlexAttention, varlen                 masks and keyword arguments from a batch
torch_loss.py ─────── masked_loss                                 the loss that packprep's labels are made for
huggingface.py ────── Collator, model_inputs, check_tokenizer     Transformers models and their Trainer
tokenizer_match.py ── check_tokenizer                             the same without torch
megatron.py ───────── GPTRows, packed_seq_params, torchtitan      Megatron-LM, and torchtitan up to 0.3.0
torchtitan.py ─────── source, processor, collator                 torchtitan's main branch
remote.py ─────────── open_remote                                 datasets at a URL, through a local cache
jax/ ──── loader, splash_attention, dense_mask, masked_loss       JAX, MaxText, Levanter, TransformerEngine, Grain
```
Nothing here is imported by the rest of packprep, and only `packprep.dataset` and `packprep.format`
are imported from it; by remote.py and tokenizer_match.py, storage, too. What they share stands
here: what a trainer's adapter is given to read.
"""

import os

from packprep.dataset.attention import RULES
from packprep.dataset.loader import COLUMNS, Dataset, open_dataset
from packprep.dataset.manifest import StoredTask, has_weighted_spans, is_in_place
from packprep.dataset.mixture import Mixture
from packprep.errors import ArgumentError


def opened(directory: str | os.PathLike | Dataset | Mixture) -> Dataset | Mixture:
    """The dataset in the directory, or the dataset or mixture itself; ArgumentError for a list of
    directories."""
    if isinstance(directory, list | tuple):
        raise ArgumentError(
            f"a list of {len(directory)} directories says no shares: open the mixture first, with "
            "packprep.open_dataset([…], shares=[…]), and give that"
        )
    return open_dataset(directory) if isinstance(directory, str | os.PathLike) else directory


def opened_alone(directory: str | os.PathLike | Dataset | Mixture, instead: str) -> Dataset:
    """The dataset at a folder, or the one that is given, for rows drawn by number. ArgumentError
    for a mixture, whose shares that would lose.

    instead: what to do, for the message.
    """
    dataset = opened(directory)
    if isinstance(dataset, Mixture):
        raise ArgumentError(
            f"{dataset!r} is a mixture, and rows that are drawn by number would pass its shares"
            f" over; {instead}"
        )
    return dataset


def datasets_of(dataset: Dataset | Mixture) -> tuple[Dataset, ...]:
    """The datasets of a mixture; a dataset alone."""
    return dataset.datasets if isinstance(dataset, Mixture) else (dataset,)


def tasks_of(dataset: Dataset | Mixture) -> list[StoredTask]:
    """The tasks of all of its datasets, one dataset after the other."""
    return [task for each in datasets_of(dataset) for task in each.tasks]


def weights_spans(dataset: Dataset | Mixture) -> bool:
    """Whether documents of some of its datasets give weights other than 1 to what is trained of
    them."""
    return any(has_weighted_spans(each.manifest) for each in datasets_of(dataset))


def weighted_tasks(dataset: Dataset | Mixture) -> list[StoredTask]:
    """Return the tasks whose noise weights what is trained of a segment."""
    return [
        t
        for t in tasks_of(dataset)
        if is_in_place(t) and t["parameters"].get("weighting") != "none"
    ]


def default_columns(dataset: Dataset | Mixture) -> tuple[str, ...]:
    """All that a trainer needs for the tasks of every dataset: prefix_ends, loss_weights where
    tasks or documents have some, and block_lengths with block diffusion."""
    names, tasks = list(COLUMNS), tasks_of(dataset)
    if any(is_in_place(task) for task in tasks) or weights_spans(dataset):
        names.append("loss_weights")
    names.append("prefix_ends")
    if any(RULES[task["attention"]].in_blocks for task in tasks):
        names.append("block_lengths")
    return tuple(names)
