"""A dataset as torch reads it: batches of tensors, in this process or through DataLoader's workers.

    loader(dir, batch_size, …) ── iterator of batches with an exact state; num_workers = 0 is the fast default
    iterable(dir, …) ──────────── IterableDataset of the same batches, for DataLoader(…, batch_size=None)
    Rows(dir) ─────────────────── map-style dataset of rows, for DataLoader with a sampler
    BatchSampler(rows, …) ─────── packprep's order over ranks for such a DataLoader

The step s of rank r is made by worker s mod W, and DataLoader takes its workers in turn, so the order is that of
packprep.dataset.order whatever W is. Sending a batch from a worker costs more than making it: processes help only where
files are slow.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data import Dataset as TorchDataset

from packprep.dataset import attention, order
from packprep.dataset.loader import COLUMNS, Dataset, open_dataset
from packprep.errors import ArgumentError, StateError

LAYOUTS = ("bshd", "thd")
# torch has no arithmetic on uint16, and embeddings and cross_entropy want int64.
DTYPES = {
    "tokens": np.dtype(np.int64),
    "labels": np.dtype(np.int64),
    "position_ids": np.dtype(np.int64),
    "segment_ids": np.dtype(np.int32),
    "prefix_ends": np.dtype(np.int32),
    "loss_mask": np.dtype(bool),
    "loss_weights": np.dtype(np.float32),
}


def opened(directory: str | os.PathLike | Dataset) -> Dataset:
    """The dataset itself, or the one in the directory."""
    return open_dataset(directory) if isinstance(directory, str | os.PathLike) else directory


def default_columns(dataset: Dataset) -> tuple[str, ...]:
    """All that a trainer needs: loss_weights where a task has some, prefix_ends where a task sees ahead."""
    names = list(COLUMNS)
    if any(task["label_alignment"] == "same_slot" for task in dataset.tasks):
        names.append("loss_weights")
    return (*names, "prefix_ends")


def batch_sums(batch: Mapping[str, np.ndarray]) -> dict[str, int | float]:
    """trained: the slots that loss_mask trains; loss_weight: the sum of their weights, 1 each without loss_weights."""
    trained = int(np.count_nonzero(batch["loss_mask"]))
    weights = batch.get("loss_weights")
    return {"trained": trained, "loss_weight": float(trained if weights is None else weights.sum(dtype=np.float64))}


def _block_columns(dataset: Dataset, rows: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(prefix_ends, block_lengths) int32[B, T] of rows in which block diffusion may stand beside other rules.

    Its slots have prefix_ends −1 and their task's block length; all others have block length 0.
    """
    ends = np.zeros((len(rows), dataset.seq_length), np.int32)
    blocks = np.zeros_like(ends)
    for i, number in enumerate(rows):
        row = dataset.row(int(number))
        prefix = row.segments["prefix"].astype(np.int64)
        other = prefix == -1
        own = attention.prefix_ends(
            row.cu_seqlens, np.where(other, 0, prefix), dataset.seq_length, row.cu_seqlens_padded
        )
        lengths = [dataset.tasks[int(task)]["parameters"].get("block_length", 0) for task in row.segments["task"]]
        blocks[i] = np.append(0, np.where(other, lengths, 0))[row.segment_ids]
        ends[i] = np.where(blocks[i] > 0, -1, own)
    return ends, blocks


class _Form:
    """How a batch of the loader becomes a batch of tensors; a picklable record, since workers make batches too."""

    def __init__(
        self, dataset: Dataset, layout: str, columns: Sequence[str] | None, ignore_index: int | None, tail: str
    ):
        if layout not in LAYOUTS:
            raise ArgumentError(f"layout is {layout!r} and should be 'bshd' or 'thd'")
        if tail not in ("segment", "drop"):
            raise ArgumentError(f"tail is {tail!r} and should be 'segment' or 'drop'")
        self.layout, self.ignore_index, self.tail = layout, ignore_index, tail
        wanted = default_columns(dataset) if columns is None else tuple(columns)
        self.has_blocks = any(task["attention"] == "block_diffusion" for task in dataset.tasks)
        self.by_row = self.has_blocks and "prefix_ends" in wanted
        # The layout and the sums are made from these two; labels need the mask where an ignore_index goes into them.
        needed = ["segment_ids"] if layout == "thd" or self.by_row else []
        if ignore_index is not None or "loss_weights" in wanted:
            needed.append("loss_mask")
        self.columns = tuple(
            dict.fromkeys([name for name in (*wanted, *needed) if not (self.by_row and name == "prefix_ends")])
        )

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


class _Steps:
    """The steps of one rank that one worker makes, as an iterator with a state; StatefulDataLoader finds the latter."""

    def __init__(self, batches: "RankBatches", worker: int, n_workers: int):
        self._of, self._worker, self._n_workers = batches, worker, n_workers
        self._goto(batches.start["rows"], 0)

    def _goto(self, rows: int, steps: int) -> None:
        """Stand after `steps` own steps of a run that began after `rows` rows."""
        of = self._of
        stride = of.batch_size * of.world_size * self._n_workers
        self._rows, self._steps = rows, steps
        # Worker w of W with its rank r of R is rank w·R + r of W·R: the same samples, by the same index arithmetic.
        self._batches = of.dataset.batches(
            of.batch_size,
            of.start["seed"],
            self._worker * of.world_size + of.rank,
            self._n_workers * of.world_size,
            of.start["shuffle"],
            of.epochs,
            of.form.columns,
            DTYPES,
            redraw=of.redraw,
        )
        self._batches.load_state_dict({**of.start, "rows": rows + steps * stride})

    def __iter__(self) -> "_Steps":
        return self

    def __next__(self) -> dict[str, Any]:
        of = self._of
        step = self._steps * self._n_workers + self._worker
        if of.epochs is not None and step >= of.n_steps(self._rows):
            raise StopIteration
        batch = next(self._batches)
        if of.form.by_row:
            begin = self._rows + (step * of.world_size + of.rank) * of.batch_size
            samples = np.arange(begin, begin + len(batch["segment_ids"]))
            rows = order.rows_of_samples(samples, len(of.dataset), of.start["seed"], of.start["shuffle"])
            batch["prefix_ends"], batch["block_lengths"] = _block_columns(of.dataset, rows)
        self._steps += 1
        return tensors(of.form.arrays(batch))

    def state_dict(self) -> dict[str, Any]:
        return {**self._of.start, "rows": self._rows, "steps": self._steps, "workers": self._n_workers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        mine = self.state_dict()
        for key in ("fingerprint", "seed", "shuffle", "workers"):
            if state.get(key) != mine[key]:
                raise StateError(
                    f"the state's {key} is {state.get(key)!r}, here it is {mine[key]!r}: going on would repeat and skip "
                    "rows; with another number of workers use packprep.adapters.torch.loader and its own state"
                )
        self._goto(int(state["rows"]), int(state["steps"]))


class RankBatches(IterableDataset):
    """One rank's batches as an IterableDataset, for `DataLoader(batches, batch_size=None, num_workers=W)`; see iterable.

    start: the loader state from which every iteration begins; `load_state_dict` sets it.
    """

    def __init__(self, dataset: Dataset, form: _Form, batch_size: int, options: Mapping[str, Any]):
        super().__init__()
        self.dataset, self.form, self.batch_size = dataset, form, batch_size
        self.rank, self.world_size = options["rank"], options["world_size"]
        self.epochs, self.redraw = options["epochs"], options["redraw"]
        # Arguments are checked here, in the main process, by the loader itself.
        self._position = dataset.batches(
            batch_size,
            options["seed"],
            self.rank,
            self.world_size,
            options["shuffle"],
            self.epochs,
            form.columns,
            redraw=self.redraw,
        )
        self.start = self._position.state_dict()

    def __iter__(self) -> _Steps:
        worker = get_worker_info()
        return _Steps(self, 0, 1) if worker is None else _Steps(self, worker.id, worker.num_workers)

    def n_steps(self, rows: int) -> int:
        """The steps that every rank makes after `rows` rows until the epochs are over."""
        assert self.epochs is not None
        return order.n_steps(rows, len(self.dataset), self.epochs, self.batch_size, self.world_size)

    def state_after(self, steps: int) -> dict[str, Any]:
        """The loader state after `steps` batches have been taken from an iteration that began at `start`."""
        rows = self.start["rows"] + steps * self.batch_size * self.world_size
        if self.epochs is not None:
            rows = max(self.start["rows"], min(rows, self.epochs * len(self.dataset)))
        return {**self.start, "rows": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next iteration where `state` ends; StateError if it is another dataset's, seed's or order's."""
        self._position.load_state_dict(state)
        self.start = self._position.state_dict()


class Loader:
    """An iterator over one rank's batches; made by `loader`. Its state is that of packprep's own loader.

    {fingerprint, seed, shuffle, rows}: batches delivered, not batches that workers have made ahead, so it goes on
    exactly with any number of workers, ranks and rows in a batch.
    """

    def __init__(self, batches: RankBatches, num_workers: int, pin_memory: bool):
        self.batches, self._num_workers, self._pin_memory = batches, num_workers, pin_memory
        self._steps = 0
        self._source: Iterator[dict[str, Any]] | None = None

    @property
    def dataset(self) -> Dataset:
        return self.batches.dataset

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> dict[str, Any]:
        if self._source is None:
            self._source = iter(self.batches)
            if self._num_workers:
                self._source = iter(DataLoader(self.batches, batch_size=None, num_workers=self._num_workers))
        batch = next(self._source)
        self._steps += 1
        if self._pin_memory:
            batch = {name: v.pin_memory() if isinstance(v, torch.Tensor) else v for name, v in batch.items()}
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self.batches.state_after(self._steps)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.batches.load_state_dict(state)
        self._steps, self._source = 0, None


def iterable(
    directory: str | os.PathLike | Dataset,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    layout: str = "bshd",
    *,
    seed: int = 0,
    shuffle: bool = True,
    epochs: int | None = None,
    columns: Sequence[str] | None = None,
    redraw: bool = False,
    ignore_index: int | None = None,
    tail: str = "segment",
) -> RankBatches:
    """What `loader` gives, as an IterableDataset for DataLoader and StatefulDataLoader with batch_size=None.

    A StatefulDataLoader's state goes on with as many workers as it was taken with, which torchdata demands; `loader`'s
    goes on with any.
    """
    dataset = opened(directory)
    form = _Form(dataset, layout, columns, ignore_index, tail)
    given = {"seed": seed, "rank": rank, "world_size": world_size, "shuffle": shuffle, "epochs": epochs}
    return RankBatches(dataset, form, batch_size, {**given, "redraw": redraw})


def loader(
    directory: str | os.PathLike | Dataset,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    layout: str = "bshd",
    *,
    num_workers: int = 0,
    pin_memory: bool = False,
    **options: Any,
) -> Loader:
    """An iterator over one rank's batches, dicts of tensors, with state_dict and load_state_dict.

    layout "bshd": [batch_size, T] each

        tokens labels position_ids   int64     loss_mask      bool: cross_entropy(logits[t], labels[t]) where it is True
        segment_ids prefix_ends      int32     loss_weights   float32, where a task predicts in place
        trained, loss_weight         int, float: the sums that a loss over all ranks is divided by

    layout "thd": the same as one row, [1, slots], and cu_seqlens int32[segments + 1], max_seqlen int. tail "segment":
    each run of padding is a segment of its own, so that no kernel leaves a slot unwritten; "drop": padding is left out.

    Where the dataset has block diffusion, its slots have prefix_ends −1, and block_lengths int32 is above 0 there.

    options: seed, shuffle, epochs, columns, redraw as of `Dataset.batches`; tail; ignore_index: goes into labels where
    loss_mask is False. pin_memory: batches lie in page-locked memory, from torch's own cache of it. num_workers:
    processes; 0, the fast default, makes batches here.
    """
    if num_workers < 0:
        raise ArgumentError(f"num_workers is {num_workers} and should be at least 0")
    if pin_memory and not torch.accelerator.is_available():
        raise ArgumentError("pin_memory=True needs an accelerator, and torch sees none; leave it out on a CPU")
    return Loader(iterable(directory, batch_size, rank, world_size, layout, **options), num_workers, pin_memory)


class Rows(TorchDataset):
    """A dataset as a map-style dataset of rows: dicts of [T] tensors in the dtypes of `loader`.

    The dataset that open_dataset gives works under DataLoader too, with tokens in their stored dtype: torch can hold
    uint16, but can neither add it nor look it up in an embedding.
    """

    def __init__(self, directory: str | os.PathLike | Dataset, columns: Sequence[str] | None = None):
        self.dataset = opened(directory)
        self._form = _Form(self.dataset, "bshd", columns, None, "segment")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Rows by one gather; DataLoader asks for a batch at once."""
        rows = np.asarray(indices, np.int64)
        batch = self.dataset.batch(rows, columns=self._form.columns, dtype=DTYPES)
        if self._form.by_row:
            batch["prefix_ends"], batch["block_lengths"] = _block_columns(self.dataset, rows)
        return [{name: torch.from_numpy(values[i]) for name, values in batch.items()} for i in range(len(rows))]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([index])[0]


class BatchSampler:
    """Lists of row numbers of one rank in packprep's order, for `DataLoader(rows, batch_sampler=…)`.

    The state is a loader's. Under StatefulDataLoader it is exact; a plain DataLoader with workers draws lists ahead.
    """

    def __init__(
        self,
        rows: "Rows | Dataset",
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = 1,
    ):
        self._dataset = rows.dataset if isinstance(rows, Rows) else rows
        self._batch_size, self._rank, self._world_size, self._epochs = batch_size, rank, world_size, epochs
        self._position = self._dataset.batches(batch_size, seed, rank, world_size, shuffle, epochs)
        self._state = self._position.state_dict()

    def __iter__(self) -> Iterator[list[int]]:
        n = len(self._dataset)
        while True:
            state, end = self._state, None if self._epochs is None else self._epochs * n
            if end is not None and state["rows"] >= end:
                return
            samples = np.array(order.samples_of_step(state["rows"], 0, self._batch_size, self._rank, self._world_size))
            samples = samples if end is None else samples[samples < end]
            rows = state["rows"] + self._batch_size * self._world_size
            self._state = {**state, "rows": rows if end is None else min(rows, end)}
            yield order.rows_of_samples(samples, n, state["seed"], state["shuffle"]).tolist()

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._position.load_state_dict(state)
        self._state = self._position.state_dict()
