"""Read a dataset as batches of torch tensors, in this process or in DataLoader's workers.

    loader(dir, batch_size, …) ── iterator of batches with an exact state; num_workers = 0 is fast
    iterable(dir, …) ──────────── IterableDataset of batches, for DataLoader(…, batch_size=None)
    Rows(dir) ─────────────────── map-style dataset of rows, for DataLoader with a sampler
    BatchSampler(rows, …) ─────── packprep's order over ranks for such a DataLoader

With W workers, worker s mod W makes step s of a rank, and DataLoader reads its workers in turn. So
the order follows packprep.dataset.order for any W. Sending a batch from a worker costs more than
making it, so worker processes help only where files are slow.
"""

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data import Dataset as TorchDataset

from packprep.adapters import columns_of_blocks, default_columns, opened
from packprep.dataset import attention, order
from packprep.dataset.batches import Batches, check_state
from packprep.dataset.encoder_decoder import NAMES, READ, check_length, split
from packprep.dataset.loader import Dataset
from packprep.dataset.mixture import Mixture
from packprep.dataset.order import integer
from packprep.dataset.rows import AHEAD, MEDIA, padding_value
from packprep.errors import ArgumentError, StateError

LAYOUTS = ("bshd", "thd")
# torch has no arithmetic on uint16, and embeddings and cross_entropy need int64.
DTYPES = {
    "tokens": np.dtype(np.int64),
    "labels": np.dtype(np.int64),
    "position_ids": np.dtype(np.int64),
    "segment_ids": np.dtype(np.int32),
    "prefix_ends": np.dtype(np.int32),
    "block_lengths": np.dtype(np.int32),
    "block_starts": np.dtype(np.int32),
    "loss_mask": np.dtype(bool),
    "loss_weights": np.dtype(np.float32),
    "seq_idx": np.dtype(np.int32),
}
DTYPES |= {name: DTYPES[next_slot] for name, (next_slot, _) in AHEAD.items()}
_SEQIO_DTYPES = {
    name: np.dtype(np.int64) for name in NAMES if name.endswith(("tokens", "positions"))
}
MASKS = {name: name.replace("labels", "loss_mask") for name in DTYPES if name.startswith("labels")}
"""Name of each column of labels → name of the mask that is 1 where the label is trained."""


def batch_sums(batch: Mapping[str, np.ndarray]) -> dict[str, int | float]:
    """Return the sums of one batch that are used as the denominator of the loss.

    For a loss over several ranks or accumulated batches, add the sums of all their batches.

    Args:
        batch: A batch with `loss_mask` and perhaps `loss_weights`.

    Returns:
        `n_trained`, the number of trained slots, and `loss_weight_sum`, the sum of their weights.
        Each weight is 1 without `loss_weights`.
    """
    n = int(np.count_nonzero(batch["loss_mask"]))
    weights = batch.get("loss_weights")
    return {
        "n_trained": n,
        "loss_weight_sum": float(n if weights is None else weights.sum(dtype=np.float64)),
    }


class Form:
    """The conversion of a loader's batch to a batch of tensors.

    It can be pickled, because worker processes make batches too.
    """

    def __init__(
        self,
        dataset: Dataset | Mixture,
        layout: str,
        columns: Sequence[str] | None,
        ignore_index: int | None,
        tail: str,
        names: str = "packprep",
        max_segments: int | None = None,
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
                f"ignore_index is {ignore_index}, an id of the dataset, so a loss would ignore"
                " its trained labels\n"
                "hint: give a value below 0, as -100"
            )
        if max_segments is not None:
            if layout != "thd":
                raise ArgumentError(
                    f"max_segments is {max_segments!r}, but layout {layout!r} has no cu_seqlens\n"
                    "hint: use layout='thd', or leave max_segments out"
                )
            if tail == "drop":
                raise ArgumentError(
                    "tail is 'drop', so the number of slots varies despite max_segments\n"
                    "hint: use tail='segment'"
                )
            integer("max_segments", max_segments, 1, 1 << 31)
        self.layout, self.ignore_index, self.tail = layout, ignore_index, tail
        self.max_segments, self.pad_id = max_segments, dataset.pad_id
        self.is_split = _is_split(names, dataset, layout, columns, ignore_index)
        wanted_columns = (
            default_columns(dataset) if columns is None else dataset.checked_columns(columns)
        )
        if layout == "thd" and MEDIA in wanted_columns:
            raise ArgumentError(
                "layout 'thd' joins rows, so the positions of media would be wrong\n"
                "hint: use 'bshd', or leave media out"
            )
        if self.is_split:
            wanted_columns = (
                *READ,
                *("loss_weights" for name in wanted_columns if name == "loss_weights"),
            )
        # The layout needs segment_ids and the sums need loss_mask. Labels need their mask if
        # ignore_index is written to them.
        needed = ["segment_ids"] if layout == "thd" else []
        if "prefix_ends" in wanted_columns:
            needed += columns_of_blocks(dataset)
        if ignore_index is not None or "loss_weights" in wanted_columns:
            needed.append("loss_mask")
        if ignore_index is not None:
            needed += [MASKS[name] for name in wanted_columns if name in MASKS]
        self.columns = tuple(dict.fromkeys((*wanted_columns, *needed)))

    def arrays(
        self, batch: dict[str, np.ndarray], batch_size: int | Mapping[int, int]
    ) -> dict[str, Any]:
        """Return the arrays of `batch` in the form's layout, and its `batch_sums`.

        Args:
            batch: A batch of packprep's loader, with the columns of the form.
            batch_size: Rows of a whole batch, or a dict from seq_length to rows. With max_segments,
                rows of padding complete the batch.
        """
        # Rows of padding complete a short last batch, so that a compiled step can take it.
        if self.max_segments is not None:
            length = batch["segment_ids"].shape[1]
            n_rows = batch_size[length] if isinstance(batch_size, Mapping) else batch_size
            batch = _filled(batch, n_rows, self.pad_id)
        # `split` drops loss_mask, so the sums come first.
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
        flat, cu_seqlens, max_seqlen = attention.flatten(batch, self.tail, self.max_segments)
        rows = {
            name: values[None] if isinstance(values, np.ndarray) else values
            for name, values in flat.items()
        }
        return {**rows, "cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, **sums}


def _is_split(
    names: str, dataset: Dataset | Mixture, layout: str, columns: Any, ignore_index: Any
) -> bool:
    """Return whether batches hold the arrays of an encoder and a decoder.

    Raises:
        ArgumentError: If `names` is unknown, or if names="seqio" and an option does not suit it.
        DatasetError: If names="seqio" and encoder_length is missing.
    """
    if names not in ("packprep", "seqio"):
        raise ArgumentError(f"names is {names!r} and should be 'packprep' or 'seqio'")
    if names == "packprep":
        return False
    if layout != "bshd" or columns is not None or ignore_index is not None:
        raise ArgumentError(
            "names='seqio' determines the arrays, [batch_size, …] each, and decoder_loss_weights"
            " marks trained tokens\n"
            "hint: leave layout, columns and ignore_index out"
        )
    check_length(dataset.encoder_length)
    return True


def _filled(batch: Mapping[str, Any], n_rows: int, pad_id: int) -> dict[str, Any]:
    """Return the batch with rows of padding after its rows, so that it has `n_rows` rows."""

    def fill_column(name: str, values: np.ndarray) -> np.ndarray:
        shape = (n_rows - len(values), *values.shape[1:])
        return np.concatenate((values, np.full(shape, padding_value(name, pad_id), values.dtype)))

    return {
        name: fill_column(name, values) if isinstance(values, np.ndarray) else values
        for name, values in batch.items()
    }


def tensors(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch with its arrays as tensors that share the memory of the arrays."""
    return {
        name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in batch.items()
    }


def _warn_of_ranks(world_size: int) -> None:
    """Warn if torch.distributed has several processes, but `world_size` is 1.

    Each process would then read all rows.
    """
    if world_size == 1 and torch.distributed.is_available() and torch.distributed.is_initialized():
        processes = torch.distributed.get_world_size()
        if processes > 1:
            warnings.warn(
                f"each of the {processes} processes of torch.distributed reads the same rows\n"
                "hint: give rank and world_size, unless the processes are parts of one model and"
                " share each batch",
                stacklevel=3,
            )


def _warn_of_end(state: Mapping[str, Any], end: int | None) -> None:
    """Warn if a finished run is iterated again, because it yields no more batches."""
    if end is not None and state["rows"] >= end:
        warnings.warn(
            f"all {end} rows of this run are delivered, and no batch follows\n"
            "hint: give one run as many epochs or samples as it should train, or start another"
            " run",
            stacklevel=3,
        )


class _Steps:
    """An iterator over the steps that one worker makes for one rank.

    StatefulDataLoader reads and restores the state of this iterator.
    """

    def __init__(self, batches: "RankBatches", worker: int, n_workers: int):
        self._of, self._worker, self._n_workers = batches, worker, n_workers
        self._goto(batches.start["rows"], 0)

    def _goto(self, rows: int, steps: int) -> None:
        """Move to the state after `steps` steps of this worker.

        Args:
            rows: Number of rows that all ranks delivered before the run started.
            steps: Number of steps that this worker has made since the run started.
        """
        rank_batches = self._of
        self._rows, self._steps = rows, steps
        self._batches = rank_batches.batches(DTYPES)
        self._batches.load_state_dict({**rank_batches.start, "rows": rows})
        # Worker w of W makes every W-th step, from step w on.
        self._batches.part(self._worker, self._n_workers, steps)

    def __iter__(self) -> "_Steps":
        return self

    def __next__(self) -> dict[str, Any]:
        batch = next(self._batches)
        self._steps += 1
        return tensors(self._of.form.arrays(batch, self._of.batch_size))

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
                f"the state's workers is {state.get('workers')!r}, but here it is"
                f" {self._n_workers}, so resuming would repeat and skip rows\n"
                "hint: for another number of workers, use packprep.adapters.torch.loader and its"
                " own state"
            )
        check_state(state, self.state_dict(), self._of.dataset)
        self._goto(int(state["rows"]), int(state["steps"]))


class RankBatches(IterableDataset):
    """An IterableDataset of one rank's batches, created by `iterable`.

    Use it as `DataLoader(batches, batch_size=None, num_workers=W)`.

    Attributes:
        dataset: The dataset or mixture.
        form: The conversion to tensors.
        batch_size: Rows per step, or a dict from seq_length to rows.
        position: packprep's iterator over the batches. It stays at `start`; no batch is read
            from it.
        end: Number of rows of the run over all ranks, or None for an endless run.
        world_size: Number of ranks.
        start: The loader state at the start of every iteration. `load_state_dict` sets it.
    """

    def __init__(
        self, dataset: Dataset | Mixture, form: Form, batch_size: Any, options: Mapping[str, Any]
    ):
        super().__init__()
        self.dataset, self.form, self.batch_size, self._options = dataset, form, batch_size, options
        self.position = self.batches()  # This checks the arguments in the main process.
        self.world_size = options["world_size"]
        self.start = self.position.state_dict()

    @property
    def end(self) -> int | None:
        return self.position.end

    def __repr__(self) -> str:
        return f"RankBatches({self.position!r})"

    def batches(self, dtype: Any = None) -> Batches:
        """Return packprep's iterator over the rank's batches, before its first batch."""
        return self.dataset.batches(
            self.batch_size, columns=self.form.columns, dtype=dtype, **self._options
        )

    def __len__(self) -> int:
        """Return the number of batches of the whole run at this batch size.

        The number includes batches before `start`. A trainer may prefetch a batch if it does not
        know the length. A resumed run would then skip the prefetched batch.

        Raises:
            TypeError: If the run is endless.
        """
        if self.end is None:
            raise TypeError("a run without an end has no length\nhint: give epochs or samples")
        of_step, begin = self.position.step_samples, self.start["rows"]
        return order.n_steps(0, begin, of_step, 1) + order.n_steps(begin, self.end, of_step, 1)

    def __iter__(self) -> _Steps:
        worker = get_worker_info()
        if worker is None:
            _warn_of_ranks(self.world_size)
        return _Steps(self, 0, 1) if worker is None else _Steps(self, worker.id, worker.num_workers)

    def state_after(self, steps: int) -> dict[str, Any]:
        """Return the loader state after `steps` batches of an iteration that started at `start`."""
        return self.position.state_after(steps)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next iteration where `state` ends.

        Raises:
            StateError: As in `packprep.dataset.Batches.load_state_dict`.
        """
        self.position.load_state_dict(state)
        self.start = self.position.state_dict()


class Loader:
    """An iterator over one rank's batches, created by `loader`.

    Its state is {fingerprint, digest, seed, shuffle, redraw, rows}, as in packprep's own loader.
    The state counts delivered batches, not batches that workers have prefetched. So a run resumes
    exactly with any number of workers, ranks and rows per batch.

    Attributes:
        batches: The `RankBatches` that this loader reads.
        dataset: The dataset or mixture.
    """

    def __init__(self, batches: RankBatches, num_workers: int, pin_memory: bool):
        self.batches, self._num_workers, self._pin_memory = batches, num_workers, pin_memory
        self._steps = 0
        self._source: Iterator[dict[str, Any]] | None = None

    def __repr__(self) -> str:
        return f"Loader({self.batches!r}, {self._steps} batches delivered)"

    @property
    def dataset(self) -> Dataset | Mixture:
        return self.batches.dataset

    def __len__(self) -> int:
        """Return the number of batches of the whole run, as `RankBatches` does.

        Raises:
            TypeError: If the run is endless.
        """
        return len(self.batches)

    def __iter__(self) -> "Loader":
        _warn_of_end(self.state_dict(), self.batches.end)
        return self

    def __next__(self) -> dict[str, Any]:
        if self._source is None:
            self._source = iter(self.batches)
            if self._num_workers:
                _warn_of_ranks(self.batches.world_size)
                # A separate generator keeps DataLoader from drawing from torch's default one,
                # which would change a model's dropout.
                generator = torch.Generator()
                data_loader = DataLoader(
                    self.batches,
                    batch_size=None,
                    num_workers=self._num_workers,
                    generator=generator,
                )
                self._source = iter(data_loader)
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
    skip: Sequence[tuple[int, int]] | None = None,
    ignore_index: int | None = None,
    tail: str = "segment",
    names: str = "packprep",
    max_segments: int | None = None,
) -> RankBatches:
    """Return the batches of `loader` as an IterableDataset.

    Use it with DataLoader or StatefulDataLoader and batch_size=None. torchdata requires that the
    state of a StatefulDataLoader is loaded with the same number of workers. The state of `loader`
    can be loaded with any number of workers.

    Args:
        directory: As in `loader`.
        batch_size: As in `loader`.
        rank: As in `loader`.
        world_size: As in `loader`.
        layout: As in `loader`.
        seed: As in `Dataset.batches`.
        shuffle: As in `Dataset.batches`.
        epochs: As in `Dataset.batches`.
        samples: As in `Dataset.batches`.
        columns: As in `Dataset.batches`. The default is all columns that the tasks need.
        redraw: As in `Dataset.batches`.
        accelerate: As in `Dataset.batches`.
        balance: As in `Dataset.batches`.
        window: As in `Dataset.batches`.
        skip: As in `Dataset.batches`.
        ignore_index: As in `loader`.
        tail: As in `loader`.
        names: As in `loader`.
        max_segments: As in `loader`.

    Returns:
        The batches of one rank.

    Raises:
        ArgumentError: If an argument is invalid.
        DatasetError: If the dataset is missing or damaged, or has no encoder_length although
            names="seqio" needs it.

    Example:
        batches = iterable("packed", 8, rank, world_size)
        for batch in DataLoader(batches, batch_size=None, num_workers=2):
            …
    """
    dataset = opened(directory)
    form = Form(dataset, layout, columns, ignore_index, tail, names, max_segments)
    options: dict[str, Any] = {
        "seed": seed,
        "rank": rank,
        "world_size": world_size,
        "shuffle": shuffle,
        "epochs": epochs,
    }
    options |= {
        "samples": samples,
        "redraw": redraw,
        "accelerate": accelerate,
        "balance": balance,
        "window": window,
        "skip": skip,
    }
    return RankBatches(dataset, form, batch_size, options)


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
    """Return an iterator over one rank's batches. Each batch is a dict of tensors.

    A mixture's batches have each column that at least one of its datasets needs.

    layout "bshd": [batch_size, T] each

        tokens labels position_ids   int64     loss_mask      bool: where labels[t] counts
        segment_ids prefix_ends      int32     loss_weights   float32, if losses have weights
        n_trained, loss_weight_sum   int, float: trained slots of this batch, sum of their weights

    To get the denominator of the loss, add `n_trained` or `loss_weight_sum` over all ranks and
    accumulated batches. Without `loss_weights`, each weight is 1.

    layout "thd": the same arrays with all rows joined, [1, slots] each. The batch also has
    cu_seqlens, int32[segments + 1], and the int max_seqlen.

    With max_segments, all batches have the same shapes, so a step compiles once and can be captured
    in a CUDA graph. cu_seqlens is int32[batch_size · max_segments + 1], where unused entries repeat
    the end: kernels see segments of length 0. max_seqlen is T, an upper bound. Rows of padding fill
    a short last batch.

    If a dataset has block diffusion, batches also have block_lengths, int32. Slots of block
    diffusion have prefix_ends −1 and block_lengths above 0. Other slots have block_lengths 0. If
    blocks start at the answers of conversations, batches have block_starts instead, int32, which is
    −1 at other slots.

    With names="seqio", a batch has the arrays of `packprep.dataset.encoder_decoder.split`,
    n_trained and loss_weight_sum. Tokens and positions are int64. The dataset must have
    packing.encoder_length. With names="packprep", batches of such a dataset have the int
    `encoder_length`.

    Args:
        directory: Dataset folder, or an open `Dataset` or `Mixture`.
        batch_size: Rows per rank and step. A mixture of several seq_lengths takes {seq_length:
            rows}, and each batch has one seq_length.
        rank: Index of this data-parallel rank.
        world_size: Number of data-parallel ranks.
        layout: "bshd" for rows, or "thd" for one row of all slots.
        num_workers: Number of worker processes. 0, the fast default, makes batches in this process.
        pin_memory: Whether to return tensors in page-locked memory. This needs an accelerator.
        options: seed, shuffle, epochs, samples, columns, redraw, accelerate, balance, window and
            skip as in `Dataset.batches`. `ignore_index` is the value of `labels` where loss_mask is
            False, and of `labels_k` where loss_mask_k is False. `tail` is for the layout "thd":
            With "segment", each run of padding is a segment, so that kernels write every slot. With
            "drop", padding is left out. `names` is "packprep" or "seqio". `max_segments`, for the
            layout "thd" with tail "segment", is the maximum number of segments per row, where each
            run of padding counts as one segment. A row with more segments is refused when its batch
            is read.

    Returns:
        A `Loader`, an iterator with `state_dict` and `load_state_dict`.

    Raises:
        ArgumentError: If an argument is invalid.
        DatasetError: If the dataset is missing or damaged, or has no encoder_length although
            names="seqio" needs it.

    Example:
        for batch in loader("packed", batch_size=8, rank=rank, world_size=world_size, epochs=1):
            logits = model(batch["tokens"], batch["position_ids"])
            loss = masked_loss(logits, batch)
    """
    integer("num_workers", num_workers, 0, 1 << 31)
    if pin_memory and not torch.accelerator.is_available():
        raise ArgumentError(
            "pin_memory=True needs an accelerator, but torch finds none\n"
            "hint: leave it out on a CPU"
        )
    return Loader(
        iterable(directory, batch_size, rank, world_size, layout, **options),
        num_workers,
        pin_memory,
    )


class Rows(TorchDataset):
    """A map-style dataset of rows. A row is a dict of [T] tensors in the dtypes of `loader`.

    DataLoader also accepts the result of `open_dataset`, but then tokens have their stored dtype.
    torch can neither add uint16 tokens nor look them up in an embedding. A mixture's rows are the
    rows of its datasets in order. BatchSampler draws rows by the shares of the datasets. Other
    samplers ignore the shares.

    Args:
        directory: Dataset folder, or an open `Dataset` or `Mixture`.
        columns: Columns to return. The default is all columns that the tasks need.

    Attributes:
        dataset: The dataset or mixture.

    Example:
        rows = Rows("packed")
        DataLoader(rows, batch_sampler=BatchSampler(rows, batch_size=8))
    """

    def __init__(
        self, directory: str | os.PathLike | Dataset | Mixture, columns: Sequence[str] | None = None
    ):
        self.dataset = opened(directory)
        self._form = Form(self.dataset, "bshd", columns, None, "segment")

    def __repr__(self) -> str:
        return f"Rows({self.dataset!r})"

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Return several rows with one read. DataLoader asks for a whole batch at once."""
        rows = np.asarray(indices, np.int64)
        batch = self.dataset.batch(rows, columns=self._form.columns, dtype=DTYPES)
        return [
            tensors({name: batch[name][i] for name in self._form.columns}) for i in range(len(rows))
        ]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([index])[0]


class BatchSampler:
    """A batch sampler that yields one rank's row indices in packprep's order, one list per step.

    Pass it as `DataLoader(rows, batch_sampler=…)`. Its state has the form of a loader's state. The
    state is exact under StatefulDataLoader. A plain DataLoader with workers prefetches lists, so
    the state is then ahead of the delivered batches.

    Args:
        rows: `Rows`, or an open `Dataset` or `Mixture` with one seq_length.
        batch_size: Rows per rank and step.
        rank: Index of this data-parallel rank.
        world_size: Number of data-parallel ranks.
        seed: As in `Dataset.batches`.
        shuffle: As in `Dataset.batches`.
        epochs: Number of epochs, or None for an endless order. A mixture needs None or `samples`.
        samples: Number of rows over all ranks. With `samples`, the default of one epoch does not
            apply.
        balance: As in `Dataset.batches`.
        window: As in `Dataset.batches`.
        skip: As in `Dataset.batches`.

    Raises:
        ArgumentError: If an argument is invalid, or if the rows have several seq_lengths.

    Example:
        rows = Rows("packed")
        DataLoader(rows, batch_sampler=BatchSampler(rows, batch_size=8))
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
        skip: Sequence[tuple[int, int]] | None = None,
    ):
        self._dataset = rows.dataset if isinstance(rows, Rows) else opened(rows)
        if self._dataset.seq_lengths is not None:
            raise ArgumentError(
                f"{self._dataset!r} has rows of several seq_lengths, which a sampler does not"
                " separate\n"
                "hint: use loader"
            )
        self._batch_size, self._rank, self._world_size = batch_size, rank, world_size
        epochs = None if samples is not None and epochs == 1 else epochs
        options: dict[str, Any] = {"samples": samples, "balance": balance, "window": window}
        options["skip"] = skip
        self._position = self._dataset.batches(
            batch_size, seed, rank, world_size, shuffle, epochs, **options
        )
        self._state = self._position.state_dict()

    def __repr__(self) -> str:
        return f"BatchSampler({self._position!r})"

    def __iter__(self) -> Iterator[list[int]]:
        _warn_of_ranks(self._world_size)
        _warn_of_end(self._state, self._position.end)
        while True:
            state, end = self._state, self._position.end  # A state may be loaded between batches.
            if end is not None and state["rows"] >= end:
                return
            # The state counts the rows of all ranks. So the step after it is always step 0.
            samples = np.array(
                order.samples_of_step(
                    state["rows"], 0, self._batch_size, self._rank, self._world_size
                )
            )
            samples = samples if end is None else samples[samples < end]
            # This check also covers the rows of other ranks, so all ranks stop at the same step.
            rows = state["rows"] + self._batch_size * self._world_size
            self._position.refuse_exhausted(rows if end is None else min(rows, end))
            self._state = {**state, "rows": rows if end is None else min(rows, end)}
            yield self._position.rows_of_samples(samples)[0].tolist()

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._position.load_state_dict(state)
        self._state = self._position.state_dict()
