"""A dataset as a trainer sees it: rows, batches, iteration that can be stopped and taken up exactly.

    open_dataset(dir) ─► Dataset ── ds[i] ────────── dict of [T] arrays
                          │     ├── ds.row(i) ────── Row, a view of the mapped shard
                          │     └── ds.batch([…]) ── dict of [B, T] arrays
                          └── ds.batches(…) ──────── Batches, an iterator with a state

Opening reads the manifest alone. A shard is checked and mapped at its first use, and at most `max_open` stay mapped.
"""

import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from packprep.dataset import order
from packprep.dataset.manifest import Manifest, Task, read_manifest
from packprep.dataset.redraw import Laws, laws_of, redrawn
from packprep.dataset.row import Row, derived_labels, read_only
from packprep.dataset.shard import Shard, open_shard
from packprep.errors import ArgumentError, DatasetError, StateError

COLUMNS = ("tokens", "labels", "segment_ids", "position_ids", "loss_mask")
MORE_COLUMNS = ("loss_weights", "prefix_ends")  # given on request
_CAST_BY_ONE_DTYPE = ("tokens", "labels", "segment_ids", "position_ids", "prefix_ends")

TASK_PARAMS = ("mode_token", "noise_density", "mean_span_length", "random_roll")  # the columns of task_params

_SAMPLES_AHEAD = 4096  # the order is drawn for about so many samples at once
_MOST_ROWS = 1 << 62  # what a state may count


def _derived_position_ids(segment_ids: np.ndarray) -> np.ndarray:
    """int32 [B, T]: the distance from the begin of each run of one segment id, 0 on padding."""
    slots = np.arange(segment_ids.shape[-1], dtype=np.int32)
    begins = np.zeros(segment_ids.shape, np.int32)
    begins[..., 1:] = np.where(segment_ids[..., 1:] != segment_ids[..., :-1], slots[1:], 0)
    np.maximum.accumulate(begins, axis=-1, out=begins)
    return np.where(segment_ids != 0, slots - begins, 0)


def _names(what: str, wanted: str | Iterable[str] | None, entries: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """bool[entries]: those that are called one of the `wanted` names; all for None."""
    if wanted is None:
        return np.ones(len(entries), bool)
    wanted = [wanted] if isinstance(wanted, str) else list(wanted)
    names = [entry["name"] for entry in entries]
    for name in wanted:
        if name not in names:
            raise ArgumentError(f"no {what} is called {name!r}; there are {', '.join(map(repr, dict.fromkeys(names)))}")
    return np.array([name in wanted for name in names], bool)


def _default_max_open() -> int:
    """1024 maps, or half of the open files that the system allows: a map holds its file open."""
    try:
        import resource
    except ImportError:
        return 256
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1024 if soft == resource.RLIM_INFINITY else max(1, min(1024, soft // 2))


class Dataset:
    """The rows of a dataset on disk, in shard order; made by open_dataset.

    manifest: dataset.json as a dict. tasks: its task table. It may be pickled (workers open it again), forked, and read
    by several threads.
    """

    def __init__(self, directory: Path, manifest: Manifest, max_open: int):
        self.directory = directory
        self.manifest = manifest
        self.max_open = max_open
        rows = np.array([entry["rows"] for entry in manifest["shards"]], np.int64)
        self._first_row = np.concatenate(([0], np.cumsum(rows)))
        self._is_block_diffusion = np.array([task["attention"] == "block_diffusion" for task in self.tasks])
        self._predicts_in_place = any(task["label_alignment"] == "same_slot" for task in self.tasks)
        self._loss_on: tuple[np.ndarray, np.ndarray] | None = None
        self._open: dict[int, Shard] = {}

    def __reduce__(self):
        return _reopen, (self.directory, self.manifest, self.max_open, self._loss_on)

    def __repr__(self) -> str:
        return f"Dataset({str(self.directory)!r}: {len(self)} rows of {self.seq_length} slots)"

    def __len__(self) -> int:
        return int(self._first_row[-1])

    @property
    def seq_length(self) -> int:
        return self.manifest["seq_length"]

    @property
    def vocab_size(self) -> int:
        return self.manifest["vocab_size"]

    @property
    def pad_id(self) -> int:
        return self.manifest["pad_id"]

    @property
    def token_dtype(self) -> np.dtype:
        return np.dtype(self.manifest["token_dtype"])

    @property
    def tasks(self) -> list[Task]:
        return self.manifest["tasks"]

    @cached_property
    def task_params(self) -> np.ndarray:
        """float32[n_tasks, 4]: mode_token, noise_density, mean_span_length, random_roll (0 or 1); NaN: it has none."""
        table = np.full((len(self.tasks), len(TASK_PARAMS)), np.nan, np.float32)
        for i, task in enumerate(self.tasks):
            values = {**task["parameters"], "mode_token": task["mode_token"]}
            for k, name in enumerate(TASK_PARAMS):
                if isinstance(values.get(name), int | float):
                    table[i, k] = values[name]
        return read_only(table)

    @cached_property
    def _laws(self) -> Laws:
        return laws_of(self.manifest)

    def _shard(self, number: int) -> Shard:
        # No lock, which a fork could leave held: single dict operations are atomic, and two threads that miss at once
        # only map a shard twice.
        shard = self._open.pop(number, None)
        if shard is None:
            entry = self.manifest["shards"][number]
            shard = open_shard(
                self.directory / entry["file"],
                self.seq_length,
                self.token_dtype,
                rows=entry["rows"],
                segments=entry["segments"],
            )
            if self._predicts_in_place and "labels" not in shard.layout:
                raise DatasetError(f"{shard.path}: array 'labels' is missing, though a task predicts in place")
        self._open[number] = shard  # last: the one used most recently
        if len(self._open) > self.max_open:
            for least_recent in list(self._open)[: -self.max_open]:
                self._open.pop(least_recent, None)
        return shard

    def _locate(self, indices: np.ndarray) -> list[tuple[Shard, int]]:
        """(shard, row in it) of each index, which may count from the end; IndexError beyond."""
        if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
            raise ArgumentError(f"row indices should be a list of integers, not {indices.dtype}{list(indices.shape)}")
        n = len(self)
        outside = (indices < -n) | (indices >= n)
        if outside.any():
            raise IndexError(f"row {indices[outside][0]} of a dataset of {n} rows")
        rows = indices.astype(np.int64)
        rows[rows < 0] += n
        numbers = np.searchsorted(self._first_row, rows, side="right") - 1
        places = rows - self._first_row[numbers]
        return [(self._shard(b), r) for b, r in zip(numbers.tolist(), places.tolist(), strict=True)]

    def row(self, index: int) -> Row:
        """Row `index` as a view of its shard; negative indices count from the end; IndexError beyond."""
        index = self._index(index)
        [(shard, row)] = self._locate(np.array([index]))
        return Row(self, index, shard, row)

    def _index(self, index: int) -> int:
        n = len(self)
        index = operator.index(index)
        if not -n <= index < n:
            raise IndexError(f"row {index} of a dataset of {n} rows")
        return index % n

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """tokens, labels, segment_ids, position_ids, loss_mask of one row, [T] each, writable copies."""
        return {name: values[0] for name, values in self.batch([self._index(index)]).items()}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """A list of what ds[i] gives, by one gather; torch's DataLoader calls it."""
        batch = self.batch(indices)
        return [{name: values[i] for name, values in batch.items()} for i in range(len(indices))]

    def batch(
        self,
        indices: Sequence[int] | np.ndarray,
        out: Mapping[str, np.ndarray] | None = None,
        columns: Sequence[str] | None = None,
        dtype: Any = None,
        epochs: Sequence[int] | np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """Rows `indices` as a dict of [B, T] arrays.

        columns: names of COLUMNS (all, the default) and of MORE_COLUMNS. dtype: of tokens, labels, segment_ids,
        position_ids and prefix_ends, or a mapping column → dtype. out: name → [B, T] array to write into, whose dtypes
        then decide; its arrays are returned. epochs: one for each row; above 0, its in-place segments are noised anew.
        """
        names = _checked_columns(columns, out)
        places = self._locate(np.asarray(indices, None if len(indices) else np.int64))
        anew = self._anew(epochs, len(places))
        shape = (len(places), self.seq_length)
        batch: dict[str, np.ndarray] = {}
        for name in names:
            if out is None:
                batch[name] = np.empty(shape, self._dtype_of(name, dtype))
            elif out[name].shape != shape:
                raise ArgumentError(f"out[{name!r}] has shape {list(out[name].shape)} and should have {list(shape)}")
            else:
                batch[name] = out[name]

        derive_labels = "labels" in names and not all("labels" in shard.layout for shard, _ in places)
        scratch: dict[str, np.ndarray] = {}

        def gathered(name: str) -> np.ndarray:
            """The stored array `name` of all rows, in its own dtype."""
            if name in batch and batch[name].dtype == self._dtype_of(name, None):
                return batch[name]
            if name not in scratch:
                scratch[name] = np.empty(shape, self._dtype_of(name, None))
                for i, (shard, row) in enumerate(places):
                    scratch[name][i] = shard.arrays[name][row]
            return scratch[name]

        for name in ("tokens", "segment_ids", "loss_mask", "labels"):
            if name in names and not (name == "labels" and derive_labels):
                if name == "loss_mask" and self._loss_on is not None:
                    continue
                for i, (shard, row) in enumerate(places):
                    if name in ("tokens", "loss_mask") and i in anew:
                        continue
                    np.copyto(batch[name][i], shard.arrays[name][row], casting="unsafe")
        if derive_labels:
            derived_labels(gathered("tokens"), gathered("segment_ids"), self.pad_id, batch["labels"])
        by_row = [name for name in MORE_COLUMNS if name in names]
        if "loss_mask" in names and self._loss_on is not None:
            by_row.append("loss_mask")
        if "position_ids" in names:
            if self._is_block_diffusion.any():
                by_row.append("position_ids")
            else:
                np.copyto(batch["position_ids"], _derived_position_ids(gathered("segment_ids")), casting="unsafe")
        if by_row:
            for i, (shard, row) in enumerate(places):
                view = Row(self, -1, shard, row)
                for name in by_row:
                    if name in ("loss_mask", "loss_weights") and i in anew:
                        continue
                    np.copyto(batch[name][i], getattr(view, name), casting="unsafe")
        if anew:
            self._redraw(batch, places, anew)
        return batch

    def _anew(self, epochs: Sequence[int] | np.ndarray | None, n_rows: int) -> dict[int, int]:
        """Place in the batch → epoch, of the rows that are noised anew."""
        if epochs is None:
            return {}
        if len(epochs) != n_rows:
            raise ArgumentError(f"{len(epochs)} epochs are given for {n_rows} rows")
        numbers = [_integer(f"epochs[{i}]", epoch, 0, 1 << 63) for i, epoch in enumerate(epochs)]
        return {i: epoch for i, epoch in enumerate(numbers) if epoch} if self._predicts_in_place else {}

    def _redraw(self, batch: dict[str, np.ndarray], places: list[tuple[Shard, int]], anew: dict[int, int]) -> None:
        """Fill in tokens, loss_mask and loss_weights of the rows that are noised anew, as far as they are wanted."""
        if not {"tokens", "loss_mask", "loss_weights"} & set(batch):
            return
        which = list(anew)
        own = [places[i] for i in which]
        every = len(which) == len(places)
        direct: dict[str, np.ndarray] = {
            name: batch[name]
            for name in ("tokens", "loss_mask")
            if every
            and name in batch
            and batch[name].flags.c_contiguous
            and batch[name].dtype == self._dtype_of(name, None)
        }
        weighted = "loss_weights" in batch
        epochs = np.array(list(anew.values()), np.int64)
        made = redrawn(self._laws, own, epochs, self.seq_length, weighted, direct)
        if self._loss_on is not None:
            for i, (shard, row) in enumerate(own):
                made.loss_mask[i] *= Row(self, -1, shard, row)._loss_is_on()
        if made.loss_weights is not None:
            np.multiply(made.loss_weights, made.loss_mask, out=made.loss_weights)
        for name, rows in made._asdict().items():
            if name in batch and name not in direct:
                batch[name][slice(None) if every else which] = rows

    def _dtype_of(self, name: str, dtype: Any) -> np.dtype:
        if isinstance(dtype, Mapping):
            dtype = dtype.get(name)
        elif name not in _CAST_BY_ONE_DTYPE:
            dtype = None
        if dtype is not None:
            return np.dtype(dtype)
        if name in ("tokens", "labels"):
            return self.token_dtype
        return np.dtype({"segment_ids": "u2", "loss_mask": "u1", "loss_weights": "f4"}.get(name, "i4"))

    def batches(
        self,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        epochs: int | None = None,
        columns: Sequence[str] | None = None,
        dtype: Any = None,
        redraw: bool = False,
    ) -> "Batches":
        """An iterator over `batch`es, in the order of packprep.dataset.order; without `epochs` it never ends.

        redraw: epoch 0 is the stored rows, in later ones the in-place segments are noised anew, by the same law.
        """
        return Batches(self, batch_size, seed, rank, world_size, shuffle, epochs, columns, dtype, redraw)

    def with_loss_on(
        self, source: str | Iterable[str] | None = None, task: str | Iterable[str] | None = None
    ) -> "Dataset":
        """The same rows, with loss_mask 0 outside the segments of these sources and tasks (a name or several)."""
        sources, tasks = _names("source", source, self.manifest["sources"]), _names("task", task, self.tasks)
        if self._loss_on is not None:
            sources, tasks = sources & self._loss_on[0], tasks & self._loss_on[1]
        return _reopen(self.directory, self.manifest, self.max_open, (sources, tasks))


def _checked_columns(columns: Sequence[str] | None, out: Mapping[str, np.ndarray] | None) -> tuple[str, ...]:
    names = tuple(columns) if columns is not None else tuple(out) if out is not None else COLUMNS
    for name in names:
        if name not in COLUMNS + MORE_COLUMNS:
            raise ArgumentError(f"no column is called {name!r}; there are {', '.join(COLUMNS + MORE_COLUMNS)}")
        if out is not None and name not in out:
            raise ArgumentError(f"out has no array for column {name!r}")
    return names


def _reopen(directory: Path, manifest: Manifest, max_open: int, loss_on) -> Dataset:
    dataset = Dataset(directory, manifest, max_open)
    dataset._loss_on = loss_on
    return dataset


class Batches:
    """Batches of one rank, without end or for `epochs`; its state goes on at any world size and batch size."""

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        seed: int,
        rank: int,
        world_size: int,
        shuffle: bool,
        epochs: int | None,
        columns: Sequence[str] | None,
        dtype: Any,
        redraw: bool = False,
    ):
        batch_size = _integer("batch_size", batch_size, 1, 1 << 31)
        world_size = _integer("world_size", world_size, 1, 1 << 31)
        rank = _integer("rank", rank, 0, world_size)
        if epochs is not None:
            epochs = _integer("epochs", epochs, 0, 1 << 31)
        elif len(dataset) == 0:
            raise ArgumentError(f"{dataset.directory} has no rows: batches without `epochs` would never come")
        _checked_columns(columns, None)
        self.dataset = dataset
        self._seed = _integer("seed", seed, 0, 1 << 64)
        self._shuffle = bool(shuffle)
        self._batch_size, self._rank, self._world_size, self._epochs = batch_size, rank, world_size, epochs
        self._columns, self._dtype = columns, dtype
        self._redraw = bool(redraw)
        if self._redraw:
            _ = dataset._laws  # refuses a task without one now, not after an epoch
        self._rows = 0  # delivered over all ranks before `_step` 0
        self._step = 0
        self._ahead: list[tuple[np.ndarray, np.ndarray]] = []  # rows and epochs of the next steps, the next one last

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if not self._ahead:
            self._ahead = self._draw()
            if not self._ahead:
                raise StopIteration
        rows, epochs = self._ahead[-1]
        anew = epochs if self._redraw else None
        batch = self.dataset.batch(rows, columns=self._columns, dtype=self._dtype, epochs=anew)
        self._ahead.pop()  # only now: a batch that could not be read is not delivered
        self._step += 1
        return batch

    def _draw(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Rows and epochs of the next steps, the next one last; empty at the end."""
        n, size, world = len(self.dataset), self._batch_size, self._world_size
        steps = max(1, min(_SAMPLES_AHEAD // size, n // (size * world)))  # no more epochs at once than one and its end
        if self._epochs is not None:
            all_steps = order.n_steps(self._rows, n, self._epochs, size, world)
            steps = min(steps, all_steps - self._step)
            if steps <= 0:
                return []
        at = [order.samples_of_step(self._rows, self._step + k, size, self._rank, world) for k in range(steps)]
        samples = np.array(at, np.int64)
        rows = order.rows_of_samples(samples, n, self._seed, self._shuffle)
        end = np.iinfo(np.int64).max if self._epochs is None else self._epochs * n
        kept = samples < end
        return [(r[k], g[k] // n) for r, g, k in zip(rows, samples, kept, strict=True)][::-1]

    def state_dict(self) -> dict[str, Any]:
        """{fingerprint, seed, shuffle, rows}, for json: where all ranks stand after the steps made so far."""
        rows = self._rows + self._step * self._batch_size * self._world_size
        if self._epochs is not None:
            rows = max(self._rows, min(rows, self._epochs * len(self.dataset)))
        return {
            "fingerprint": self.dataset.manifest["fingerprint"],
            "seed": self._seed,
            "shuffle": self._shuffle,
            "rows": rows,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the rows that `state` has delivered; StateError if it is another dataset's, seed's or order's."""
        mine = self.state_dict()
        if not isinstance(state, Mapping) or set(state) != set(mine):
            keys = sorted(state) if isinstance(state, Mapping) else type(state).__name__
            raise StateError(f"a loader state has the keys {sorted(mine)}, not {keys}")
        for key in ("fingerprint", "seed", "shuffle"):
            if type(state[key]) is not type(mine[key]) or state[key] != mine[key]:
                raise StateError(
                    f"the state's {key} is {state[key]!r}, this loader's is {mine[key]!r}: going on would repeat and "
                    f"skip rows; open that dataset, with that seed and shuffle"
                )
        rows = state["rows"]
        if type(rows) is not int or not 0 <= rows < _MOST_ROWS:
            raise StateError(f"the state's rows is {rows!r} and should be an integer of at least 0")
        self._rows, self._step, self._ahead = rows, 0, []


def _integer(name: str, value: Any, least: int, below: int) -> int:
    """`value` as an int in least … below − 1."""
    try:
        number = int(value.__index__())
    except AttributeError:
        number = None
    if number is None or isinstance(value, bool | np.bool_) or not least <= number < below:
        raise ArgumentError(f"{name} is {value!r} and should be an integer in {least} … {below - 1}")
    return number


def open_dataset(directory: str | os.PathLike, *, max_open: int | None = None) -> Dataset:
    """The dataset in `directory`, by its manifest alone; shards are checked and mapped at first use.

    max_open: how many shards stay mapped at most (default: 1024, or half of the files that may be open). A map that a
    Row still uses stays until that Row goes. Raises DatasetError if there is no manifest or it cannot be used.
    """
    if not isinstance(directory, str | os.PathLike):
        raise ArgumentError(f"open_dataset takes one directory; mixtures of several are not supported: {directory!r}")
    limit = _default_max_open() if max_open is None else _integer("max_open", max_open, 1, 1 << 31)
    return Dataset(Path(directory), read_manifest(directory), limit)
