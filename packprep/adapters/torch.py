"""A dataset as torch reads it: batches of tensors, in this process or through DataLoader's workers.

    loader(dir, batch_size, …) ── iterator of batches with an exact state; num_workers = 0 is the fast default
    iterable(dir, …) ──────────── IterableDataset of the same batches, for DataLoader(…, batch_size=None)
    Rows(dir) ─────────────────── map-style dataset of rows, for DataLoader with a sampler
    BatchSampler(rows, …) ─────── packprep's order over ranks for such a DataLoader

The step s of rank r is made by worker s mod W, and DataLoader takes its workers in turn, so the
order is that of packprep.dataset.order whatever W is. Sending a batch from a worker costs more than
making it: processes help only where files are slow.
"""

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data import Dataset as TorchDataset

from packprep.adapters import default_columns, opened, tasks_of
from packprep.dataset import attention, order
from packprep.dataset.attention import RULES
from packprep.dataset.batches import Batches, check_state
from packprep.dataset.encoder_decoder import NAMES, READ, check_length, split
from packprep.dataset.loader import Dataset
from packprep.dataset.mixture import Mixture
from packprep.dataset.order import integer
from packprep.dataset.rows import AHEAD, MEDIA
from packprep.errors import ArgumentError, StateError

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
    "seq_idx": np.dtype(np.int32),
}
DTYPES |= {name: DTYPES[next_slot] for name, (next_slot, _) in AHEAD.items()}
_SEQIO_DTYPES = {
    name: np.dtype(np.int64) for name in NAMES if name.endswith(("tokens", "positions"))
}
MASKS = {name: name.replace("labels", "loss_mask") for name in DTYPES if name.startswith("labels")}
"""Column of labels → that which says where they are trained."""


def batch_sums(batch: Mapping[str, np.ndarray]) -> dict[str, int | float]:
    """n_trained: the slots that loss_mask trains; loss_weight_sum: that of their weights, 1 each
    without loss_weights."""
    n = int(np.count_nonzero(batch["loss_mask"]))
    weights = batch.get("loss_weights")
    return {
        "n_trained": n,
        "loss_weight_sum": float(n if weights is None else weights.sum(dtype=np.float64)),
    }


class Form:
    """How a batch of the loader becomes a batch of tensors; a picklable record, since workers make
    batches too."""

    def __init__(
        self,
        dataset: Dataset | Mixture,
        layout: str,
        columns: Sequence[str] | None,
        ignore_index: int | None,
        tail: str,
        names: str = "packprep",
    ):
        if layout not in LAYOUTS:
            raise ArgumentError(f"layout is {layout!r} and should be 'bshd' or 'thd'")
        if tail not in ("segment", "drop"):
            raise ArgumentError(f"tail is {tail!r} and should be 'segment' or 'drop'")
        if (
            ignore_index is not None
            and 0 <= integer("ignore_index", ignore_index, -(1 << 63), 1 << 63) < dataset.vocab_size
        ):
            raise ArgumentError(
                f"ignore_index is {ignore_index}, an id of the dataset, whose trained labels a loss"
                " would leave out: give one below 0, as -100"
            )
        self.layout, self.ignore_index, self.tail = layout, ignore_index, tail
        self.is_split = _is_split(names, dataset, layout, columns, ignore_index)
        wanted = default_columns(dataset) if columns is None else dataset.checked_columns(columns)
        if layout == "thd" and MEDIA in wanted:
            raise ArgumentError(
                "layout 'thd' lays rows end to end, in which slots of media are others: take"
                " 'bshd', or leave media out"
            )
        if self.is_split:
            wanted = (*READ, *("loss_weights" for name in wanted if name == "loss_weights"))
        # The layout and the sums are made from these two; labels need the mask where an
        # ignore_index goes into them.
        needed = ["segment_ids"] if layout == "thd" else []
        if "prefix_ends" in wanted and any(
            RULES[task["attention"]].in_blocks for task in tasks_of(dataset)
        ):
            needed.append("block_lengths")
        if ignore_index is not None or "loss_weights" in wanted:
            needed.append("loss_mask")
        if ignore_index is not None:
            needed += [MASKS[name] for name in wanted if name in MASKS]
        self.columns = tuple(dict.fromkeys((*wanted, *needed)))

    def arrays(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        """A batch of numpy arrays, in the layout and with its sums."""
        sums = batch_sums(batch) if "loss_mask" in batch else {}
        if self.ignore_index is not None:
            for name in MASKS.keys() & batch.keys():
                batch[name][~batch[MASKS[name]]] = self.ignore_index
        if self.is_split:
            batch = {
                name: v.astype(_SEQIO_DTYPES.get(name, v.dtype), copy=False)
                for name, v in split(batch).items()
            }
        if self.layout == "bshd":
            return {**batch, **sums}
        blocks = batch.get("prefix_ends", np.zeros(0)) < 0
        flat, cu_seqlens, max_seqlen = attention.flatten(
            _without_negative(batch, blocks), self.tail
        )
        if blocks.any():
            flat["prefix_ends"][flat["block_lengths"] > 0] = -1
        rows = {
            name: values[None] if isinstance(values, np.ndarray) else values
            for name, values in flat.items()
        }
        return {**rows, "cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, **sums}


def _is_split(
    names: str, dataset: Dataset | Mixture, layout: str, columns: Any, ignore_index: Any
) -> bool:
    """Whether batches are an encoder's and a decoder's arrays; ArgumentError for what does not go
    with `names`."""
    if names not in ("packprep", "seqio"):
        raise ArgumentError(f"names is {names!r} and should be 'packprep' or 'seqio'")
    if names == "packprep":
        return False
    if layout != "bshd" or columns is not None or ignore_index is not None:
        raise ArgumentError(
            "names='seqio' says which arrays there are, [batch_size, …] each, and"
            " decoder_loss_weights what is trained: leave layout, columns and ignore_index out"
        )
    check_length(dataset.encoder_length)
    return True


def _without_negative(batch: dict[str, np.ndarray], negative: np.ndarray) -> dict[str, np.ndarray]:
    """The batch with prefix_ends 0 where they are −1, which attention.flatten could not count on
    from."""
    return (
        {**batch, "prefix_ends": np.where(negative, 0, batch["prefix_ends"])}
        if negative.any()
        else batch
    )


def tensors(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The same batch with its arrays as tensors that share their memory."""
    return {
        name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in batch.items()
    }


def _warn_of_ranks(world_size: int) -> None:
    """Warn where torch.distributed has several processes, and each would read all rows."""
    if world_size == 1 and torch.distributed.is_available() and torch.distributed.is_initialized():
        processes = torch.distributed.get_world_size()
        if processes > 1:
            warnings.warn(
                f"each of the {processes} processes of torch.distributed reads the same rows: give"
                " rank and world_size, unless they are parts of one model and share each batch",
                stacklevel=3,
            )


def _warn_of_end(state: Mapping[str, Any], end: int | None) -> None:
    """Warn where a run that is over is iterated once more, which gives nothing."""
    if end is not None and state["rows"] >= end:
        warnings.warn(
            f"all {end} rows of this run have been given, and no batch follows: give one run as"
            " many epochs or samples as are to be trained, or begin another",
            stacklevel=3,
        )


class _Steps:
    """The steps of one rank that one worker makes, as an iterator with a state; StatefulDataLoader
    finds the latter."""

    def __init__(self, batches: "RankBatches", worker: int, n_workers: int):
        self._of, self._worker, self._n_workers = batches, worker, n_workers
        self._goto(batches.start["rows"], 0)

    def _goto(self, rows: int, steps: int) -> None:
        """Stand after `steps` own steps of a run that began after `rows` rows."""
        of = self._of
        self._rows, self._steps = rows, steps
        self._batches = of.batches(DTYPES)
        self._batches.load_state_dict({**of.start, "rows": rows})
        self._batches.part(self._worker, self._n_workers, steps)

    def __iter__(self) -> "_Steps":
        return self

    def __next__(self) -> dict[str, Any]:
        batch = next(self._batches)
        self._steps += 1
        return tensors(self._of.form.arrays(batch))

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._of.start,
            "rows": self._rows,
            "steps": self._steps,
            "workers": self._n_workers,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("workers") != self._n_workers:
            raise StateError(
                f"the state's workers is {state.get('workers')!r}, here it is {self._n_workers}:"
                " going on would repeat and skip rows; with another number of workers use"
                " packprep.adapters.torch.loader and its own state"
            )
        check_state(state, self.state_dict(), self._of.dataset)
        self._goto(int(state["rows"]), int(state["steps"]))


class RankBatches(IterableDataset):
    """One rank's batches as an IterableDataset, for `DataLoader(batches, batch_size=None,
    num_workers=W)`; see iterable.

    start: the loader state from which every iteration begins; `load_state_dict` sets it.
    """

    def __init__(
        self, dataset: Dataset | Mixture, form: Form, batch_size: Any, options: Mapping[str, Any]
    ):
        super().__init__()
        self.dataset, self.form, self.batch_size, self._options = dataset, form, batch_size, options
        self.position = self.batches()  # arguments are checked here, in the main process
        self.end, self.world_size = self.position.end, options["world_size"]
        self.start = self.position.state_dict()

    def batches(self, dtype: Any = None) -> Batches:
        """packprep's own iterator over them, at its begin."""
        return self.dataset.batches(
            self.batch_size, columns=self.form.columns, dtype=dtype, **self._options
        )

    def __len__(self) -> int:
        """The batches of a whole run, those before `start` too, at this batch size; TypeError if it
        has no end.

        Trainers that are told it ask for no batch ahead, which would be missing after their
        checkpoints.
        """
        if self.end is None:
            raise TypeError("a run without an end has no length; give epochs or samples")
        of_step, done = self.position.step_samples, self.start["rows"]
        return order.n_steps(0, done, of_step, 1) + order.n_steps(done, self.end, of_step, 1)

    def __iter__(self) -> _Steps:
        worker = get_worker_info()
        if worker is None:
            _warn_of_ranks(self.world_size)
        return _Steps(self, 0, 1) if worker is None else _Steps(self, worker.id, worker.num_workers)

    def state_after(self, steps: int) -> dict[str, Any]:
        """The loader state after `steps` batches have been taken from an iteration that began at
        `start`."""
        return self.position.state_after(steps)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next iteration where `state` ends; StateError as packprep's own loader."""
        self.position.load_state_dict(state)
        self.start = self.position.state_dict()


class Loader:
    """An iterator over one rank's batches; made by `loader`. Its state is that of packprep's own
    loader.

    {fingerprint, digest, seed, shuffle, redraw, rows}: batches delivered, not batches that workers
    have made ahead, so it goes on exactly with any number of workers, ranks and rows in a batch.
    """

    def __init__(self, batches: RankBatches, num_workers: int, pin_memory: bool):
        self.batches, self._num_workers, self._pin_memory = batches, num_workers, pin_memory
        self._steps = 0
        self._source: Iterator[dict[str, Any]] | None = None

    @property
    def dataset(self) -> Dataset | Mixture:
        return self.batches.dataset

    def __len__(self) -> int:
        """As that of `iterable`: the batches of a whole run, or TypeError."""
        return len(self.batches)

    def __iter__(self) -> "Loader":
        _warn_of_end(self.state_dict(), self.batches.end)
        return self

    def __next__(self) -> dict[str, Any]:
        if self._source is None:
            self._source = iter(self.batches)
            if self._num_workers:
                _warn_of_ranks(self.batches.world_size)
                # A generator of its own: else DataLoader draws from torch's, and a model's dropout
                # would notice workers.
                own = torch.Generator()
                made = DataLoader(
                    self.batches, batch_size=None, num_workers=self._num_workers, generator=own
                )
                self._source = iter(made)
        batch = next(self._source)
        self._steps += 1
        if self._pin_memory:
            batch = {
                name: v.pin_memory() if isinstance(v, torch.Tensor) else v
                for name, v in batch.items()
            }
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self.batches.state_after(self._steps)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.batches.load_state_dict(state)
        self._steps, self._source = 0, None


def iterable(
    directory: str | os.PathLike | Dataset | Mixture,
    batch_size: int | Mapping[int, int],
    rank: int = 0,
    world_size: int = 1,
    layout: str = "bshd",
    *,
    seed: int = 0,
    shuffle: bool = True,
    epochs: int | None = None,
    samples: int | None = None,
    columns: Sequence[str] | None = None,
    redraw: bool = False,
    accelerate: str = "numpy",
    balance: tuple[str | tuple[float, float], int] | None = None,
    window: int | None = None,
    ignore_index: int | None = None,
    tail: str = "segment",
    names: str = "packprep",
) -> RankBatches:
    """What `loader` gives, as an IterableDataset for DataLoader and StatefulDataLoader with
    batch_size=None.

    A StatefulDataLoader's state goes on with as many workers as it was taken with, which torchdata
    demands; `loader`'s goes on with any.
    """
    dataset = opened(directory)
    form = Form(dataset, layout, columns, ignore_index, tail, names)
    given: dict[str, Any] = {
        "seed": seed,
        "rank": rank,
        "world_size": world_size,
        "shuffle": shuffle,
        "epochs": epochs,
    }
    given |= {
        "samples": samples,
        "redraw": redraw,
        "accelerate": accelerate,
        "balance": balance,
        "window": window,
    }
    return RankBatches(dataset, form, batch_size, given)


def loader(
    directory: str | os.PathLike | Dataset | Mixture,
    batch_size: int | Mapping[int, int],
    rank: int = 0,
    world_size: int = 1,
    layout: str = "bshd",
    *,
    num_workers: int = 0,
    pin_memory: bool = False,
    **options: Any,
) -> Loader:
    """An iterator over one rank's batches, dicts of tensors, with state_dict and load_state_dict.

    directory: or what open_dataset gives. A mixture's columns are those that the tasks of any of
    its datasets need; one of several seq_lengths takes batch_size = {seq_length: rows}, and each
    batch is of one.

    layout "bshd": [batch_size, T] each

        tokens labels position_ids   int64     loss_mask      bool: cross_entropy(logits[t], labels[t]) where it is True
        segment_ids prefix_ends      int32     loss_weights   float32, where a task predicts in place or documents give weights
        n_trained, loss_weight_sum   int, float: the sums that a loss over all ranks is divided by

    layout "thd": the same as one row, [1, slots], and cu_seqlens int32[segments + 1], max_seqlen
    int. tail "segment": each run of padding is a segment of its own, so that no kernel leaves a
    slot unwritten; "drop": padding is left out.

    Where a dataset has block diffusion, its slots have prefix_ends −1, and block_lengths int32 is
    above 0 there.

    names "seqio": the arrays of `packprep.dataset.encoder_decoder.split` and those sums, tokens and
    positions int64, of a dataset with packing.encoder_length, which is an int of each batch else.

    options: seed, shuffle, epochs, samples, columns, redraw, accelerate, balance, window as of
    `Dataset.batches`; tail;
    ignore_index: goes into labels where loss_mask is False, and into labels_k where loss_mask_k is.
    pin_memory: batches lie in page-locked memory, from torch's own cache of it. num_workers:
    processes; 0, the fast default, makes batches here.
    """
    integer("num_workers", num_workers, 0, 1 << 31)
    if pin_memory and not torch.accelerator.is_available():
        raise ArgumentError(
            "pin_memory=True needs an accelerator, and torch sees none; leave it out on a CPU"
        )
    return Loader(
        iterable(directory, batch_size, rank, world_size, layout, **options),
        num_workers,
        pin_memory,
    )


class Rows(TorchDataset):
    """A dataset as a map-style dataset of rows: dicts of [T] tensors in the dtypes of `loader`.

    The dataset that open_dataset gives works under DataLoader too, with tokens in their stored
    dtype: torch can hold uint16, but can neither add it nor look it up in an embedding. A mixture's
    rows are those of its datasets one after the other: it is BatchSampler that draws them by their
    shares, and another sampler does not.
    """

    def __init__(
        self, directory: str | os.PathLike | Dataset | Mixture, columns: Sequence[str] | None = None
    ):
        self.dataset = opened(directory)
        self._form = Form(self.dataset, "bshd", columns, None, "segment")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Rows by one gather; DataLoader asks for a batch at once."""
        rows = np.asarray(indices, np.int64)
        batch = self.dataset.batch(rows, columns=self._form.columns, dtype=DTYPES)
        return [
            tensors({name: batch[name][i] for name in self._form.columns}) for i in range(len(rows))
        ]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([index])[0]


class BatchSampler:
    """Lists of row numbers of one rank in packprep's order, for `DataLoader(rows,
    batch_sampler=…)`.

    The state is a loader's. Under StatefulDataLoader it is exact; a plain DataLoader with workers
    draws lists ahead.
    samples: an end in place of the one epoch; a mixture needs it, or epochs=None.
    """

    def __init__(
        self,
        rows: Rows | Dataset | Mixture,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = 1,
        samples: int | None = None,
        balance: tuple[str | tuple[float, float], int] | None = None,
        window: int | None = None,
    ):
        self._dataset = rows.dataset if isinstance(rows, Rows) else opened(rows)
        if self._dataset.seq_lengths is not None:
            raise ArgumentError(
                f"{self._dataset!r} has rows of several seq_lengths, which a sampler does not keep"
                " apart: use loader"
            )
        self._batch_size, self._rank, self._world_size = batch_size, rank, world_size
        epochs = None if samples is not None and epochs == 1 else epochs
        given: dict[str, Any] = {"samples": samples, "balance": balance, "window": window}
        self._position = self._dataset.batches(
            batch_size, seed, rank, world_size, shuffle, epochs, **given
        )
        self._state = self._position.state_dict()

    def __iter__(self) -> Iterator[list[int]]:
        end = self._position.end
        _warn_of_ranks(self._world_size)
        _warn_of_end(self._state, end)
        while True:
            state = self._state
            if end is not None and state["rows"] >= end:
                return
            samples = np.array(
                order.samples_of_step(
                    state["rows"], 0, self._batch_size, self._rank, self._world_size
                )
            )
            samples = samples if end is None else samples[samples < end]
            rows = state["rows"] + self._batch_size * self._world_size
            self._position.refuse_exhausted(rows if end is None else min(rows, end))
            self._state = {**state, "rows": rows if end is None else min(rows, end)}
            yield self._position.rows_of_samples(samples)[0].tolist()

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._position.load_state_dict(state)
        self._state = self._position.state_dict()
