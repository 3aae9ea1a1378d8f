"""A dataset as a trainer sees it: rows and batches of its shards, which are opened as they are asked for.

    open_dataset(dir) ─► Dataset ── ds[i] ────────── dict of [T] arrays
                          │     ├── ds.row(i) ────── Row, a view of the mapped shard
                          │     └── ds.batch([…]) ── dict of [B, T] arrays
                          └── ds.batches(…) ──────── Batches, an iterator with a state
    open_dataset([dir, dir], shares=[…]) ─► Mixture, with the same face

Opening reads the manifest alone. A shard is checked and opened at its first use, and at most `max_open` stay open.
"""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, overload

import numpy as np

from packprep.dataset import order
from packprep.dataset.batches import Batches, integer
from packprep.dataset.gathering import (
    COLUMNS,
    allocated,
    check_epochs,
    checked_columns,
    checked_row,
    checked_rows,
    columns_chosen,
    columns_wanted,
    gather,
    items_of,
    stored_for,
)
from packprep.dataset.laws import Laws, laws_of
from packprep.dataset.manifest import Manifest, ShardEntry, StoredTask, first_rows, open_manifest, plain
from packprep.dataset.mixture import Mixture, split_bound
from packprep.dataset.reading import CAN_PREAD
from packprep.dataset.row import OpenShard, Row, read_only
from packprep.dataset.segments import Place, Segments
from packprep.dataset.shard import IO, Shard, shard_of
from packprep.dataset.shares import counts_of
from packprep.errors import ArgumentError, DatasetError, PackprepError

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

Held: TypeAlias = Callable[[ShardEntry], AbstractContextManager[Path]]

TASK_PARAMS = ("mode_token", "noise_density", "mean_span_length", "random_roll")  # the columns of task_params


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


def default_max_open() -> int:
    """1024 maps, or half of the open files that the system allows: a map holds its file open."""
    if resource is None:
        return 256
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1024 if soft == resource.RLIM_INFINITY else max(1, min(1024, soft // 2))


class Dataset:
    """The rows of a dataset on disk, in shard order; made by open_dataset.

    manifest: dataset.json as a dict. tasks: its task table. seq_length: slots of a row. vocab_size: rows that an
    embedding needs. pad_id: the token of padding. token_dtype: uint16 or int32. io: "mmap" or "pread". It may be pickled
    (workers open it again), forked, and read by several threads.
    """

    def __init__(
        self, directory: Path | str, manifest: Manifest, max_open: int, io: IO = "mmap", held: Held | None = None
    ):
        """directory: where it lies, for messages, and for its shards unless `held` gives a shard's file while it is opened."""
        self.directory = directory
        self._held = held
        self._head = manifest  # with a list of shards that may not be parsed yet
        self.max_open = max_open
        self.io = io
        self.seq_length, self.vocab_size, self.pad_id = (manifest[k] for k in ("seq_length", "vocab_size", "pad_id"))
        self.token_dtype = np.dtype(manifest["token_dtype"])
        self._first_row = first_rows(manifest)
        self._row_bounds = np.array(self._first_row)
        self._n_rows = self._first_row[-1]
        self._is_block_diffusion = np.array([task["attention"] == "block_diffusion" for task in self.tasks])
        self._has_block_diffusion = bool(self._is_block_diffusion.any())
        self._predicts_in_place = any(task["label_alignment"] == "same_slot" for task in self.tasks)
        self._loss_on: tuple[np.ndarray, np.ndarray] | None = None
        self._columns: tuple[str, ...] = COLUMNS
        self._dtype: Any = None
        self._n_shards = len(manifest["shards"])
        self._open: dict[int, OpenShard] = {}
        self._forgets = self._n_shards > max_open  # whether shards are closed again, those longest unused first

    def __reduce__(self):
        return _remade, (
            self.directory,
            self._head,
            self.max_open,
            self.io,
            self._held,
            self._loss_on,
            self._columns,
            self._dtype,
        )

    def __repr__(self) -> str:
        return f"Dataset({str(self.directory)!r}: {len(self)} rows of {self.seq_length} slots)"

    def __len__(self) -> int:
        return self._n_rows

    @cached_property
    def manifest(self) -> Manifest:
        """dataset.json as a plain dict."""
        return plain(self._head)

    @property
    def fingerprint(self) -> str:
        """The manifest's: of what determines the rows."""
        return self._head["fingerprint"]

    @property
    def digest(self) -> str:
        """The manifest's own: of what was built, the shards' digests among it."""
        return self._head["digest"]

    @property
    def tasks(self) -> list[StoredTask]:
        return self._head["tasks"]

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
        return laws_of(self._head)

    def _at_hand(self, number: int) -> OpenShard:
        """Shard `number`, which is checked and opened at its first use."""
        # No lock, which a fork could leave held: single dict operations are atomic, and two threads that miss at once
        # only open a shard twice.
        known = self._open.pop(number, None) if self._forgets else self._open.get(number)
        if known is None:
            shard = self._opened(number)
            known = (shard.tokens, self._first_row[number], shard)
        self._open[number] = known  # last: the one used most recently
        if self._forgets and len(self._open) > self.max_open:
            for least_recent in list(self._open)[: -self.max_open]:
                self._open.pop(least_recent, None)
        return known

    def _opened(self, number: int) -> Shard:
        entry = self._head["shards"][number]
        with self._held(entry) if self._held else nullcontext(Path(self.directory, entry["file"])) as path:
            shard = shard_of(path, self._head, number, self.io)
            _ = shard.tokens  # maps or opens the file, after which it may be removed
        if self._predicts_in_place and "labels" not in shard.layout:
            raise DatasetError(f"{shard.path}: array 'labels' is missing, though a task predicts in place")
        return shard

    def _locate(self, rows: np.ndarray) -> list[Place]:
        """(shard, row in it) of each row, 0 … n − 1."""
        numbers = (np.searchsorted(self._row_bounds, rows, side="right") - 1).tolist()
        if self._forgets:  # a batch may need more shards than stay open
            at_hand = {number: self._at_hand(number) for number in dict.fromkeys(numbers)}
        else:
            at_hand = self._open
            for number in numbers:
                if number not in at_hand:
                    self._at_hand(number)
        places = []
        for number, row in zip(numbers, rows.tolist(), strict=True):
            _, first_row, shard = at_hand[number]
            places.append((shard, row - first_row))
        return places

    def row(self, index: int) -> Row:
        """Row `index` as a view of its shard; negative indices count from the end; IndexError beyond."""
        # This is called once a row, where copying the row costs about a microsecond, of which a call is a tenth, and so is
        # memory that was not looked at lately: so where shards are of like size, the row's is guessed, one that is open is
        # not noted as used, and a Row has no __init__.
        row = Row()
        row.dataset, row.index = self, index
        try:
            row._opened = tokens, first_row, _ = self._open[index * self._n_shards // self._n_rows]
            row._row = place = index - first_row
            if place >= 0 and type(index) is int:
                row.tokens = tokens[place]
                return row
        except (LookupError, TypeError, ZeroDivisionError):
            pass  # guessed wrong, not open, or no row at all
        row.index = index = checked_row(index, self._n_rows, "dataset")
        number = bisect_right(self._first_row, index) - 1
        row._opened = tokens, first_row, _ = self._open.get(number) or self._at_hand(number)
        row._row = index - first_row
        row.tokens = tokens[row._row]
        return row

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """tokens, labels, segment_ids, position_ids, loss_mask of one row, or the columns of `with_columns`: [T] each,
        writable copies."""
        return {name: values[0] for name, values in self.batch([checked_row(index, self._n_rows, "dataset")]).items()}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """A list of what ds[i] gives, views of one gathered batch; torch's DataLoader calls it."""
        return items_of(self.batch(indices))

    def batch(
        self,
        indices: Sequence[int] | np.ndarray,
        out: Mapping[str, np.ndarray] | None = None,
        columns: Sequence[str] | None = None,
        dtype: Any = None,
        epochs: Sequence[int] | np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """Rows `indices` as a dict of [B, T] arrays; n_trained (slots with loss) and loss_weight_sum are [B].

        columns: names of COLUMNS (all, the default) and of MORE_COLUMNS. dtype: of tokens, labels, segment_ids,
        position_ids and prefix_ends, or a mapping column → dtype. out: name → [B, T] array to write into, whose dtypes
        then decide; its arrays are returned. epochs: one for each row; above 0, its in-place segments are noised anew.
        """
        names = columns_wanted(columns, out, self._columns)
        places = self._locate(checked_rows(indices, self._n_rows))
        anew = self._anew(epochs, len(places))
        dtype = self._dtype if dtype is None else dtype
        batch = allocated(names, len(places), self.seq_length, self.token_dtype, dtype, out)
        gather(self, places, batch, anew)
        return batch

    def _anew(self, epochs: Sequence[int] | np.ndarray | None, n_rows: int) -> dict[int, int]:
        """Place in the batch → epoch, of the rows that are noised anew."""
        if epochs is None:
            return {}
        check_epochs(epochs, n_rows)
        numbers = [integer(f"epochs[{i}]", epoch, 0, 1 << 63) for i, epoch in enumerate(epochs)]
        anew = {i: epoch for i, epoch in enumerate(numbers) if epoch}
        if anew:
            self.check_redraw()
        return anew if self._predicts_in_place else {}

    def _loss_is_on(self, segments: Segments) -> np.ndarray:
        """bool, flat: the slots of the segments that `with_loss_on` kept; padding False."""
        assert self._loss_on is not None
        sources, tasks = self._loss_on
        return segments.at_slots(segments.looked_up("source", sources) & segments.looked_up("task", tasks), False)

    def _is_in_halves(self, segments: Segments) -> np.ndarray | None:
        """bool[m]: the segments of block diffusion; None where no task is."""
        return segments.looked_up("task", self._is_block_diffusion) if self._has_block_diffusion else None

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
        samples: int | None = None,
        read_ahead: int = 0,
    ) -> Batches:
        """An iterator over `batch`es, in the order of packprep.dataset.order; without `epochs` it never ends.

        samples: an end in place of `epochs`, after so many rows over all ranks. redraw: epoch 0 is the stored rows, in
        later ones the in-place segments are noised anew, by the same law. read_ahead: for so many batches beyond the one
        that is read, the system is asked to begin reading their rows; it changes nothing that is delivered.
        """
        return Batches(
            self, batch_size, seed, rank, world_size, shuffle, epochs, samples, columns, dtype, redraw, read_ahead
        )

    def rows_of_samples(self, samples: np.ndarray, seed: int, shuffle: bool) -> tuple[np.ndarray, np.ndarray]:
        """(rows, epochs), int64, shaped as `samples`: global samples g ≥ 0."""
        return order.rows_of_samples(samples, len(self), seed, shuffle), np.asarray(samples) // len(self)

    def samples_of_epochs(self, epochs: int) -> int:
        """The samples of so many epochs."""
        return epochs * len(self)

    def check_redraw(self) -> None:
        """ArgumentError if a task has chance and cannot be drawn anew."""
        _ = self._laws

    def will_need(self, indices: Sequence[int] | np.ndarray, columns: Sequence[str] | None = None) -> None:
        """Ask the system to begin reading the rows' stored slots; nothing waits for it, and no error comes of it."""
        names = self._columns if columns is None else checked_columns(columns)
        wanted, rows = sorted(stored_for(names)), checked_rows(indices, self._n_rows)
        try:
            for shard, row in self._locate(rows):
                for name in wanted:
                    if name in shard.layout:
                        shard.will_need(name, row)
        except (PackprepError, OSError):
            pass  # the read that comes says what is wrong

    def with_loss_on(
        self, source: str | Iterable[str] | None = None, task: str | Iterable[str] | None = None
    ) -> "Dataset":
        """The same rows, with loss_mask 0 outside the segments of these sources and tasks (a name or several)."""
        sources, tasks = _names("source", source, self._head["sources"]), _names("task", task, self.tasks)
        if self._loss_on is not None:
            sources, tasks = sources & self._loss_on[0], tasks & self._loss_on[1]
        return self._with(_loss_on=(sources, tasks))

    def with_columns(self, columns: Iterable[str] = COLUMNS, dtype: Any = None) -> "Dataset":
        """The same rows, of which ds[i], ds.__getitems__, batch and batches give these columns in this dtype, unless they
        are asked for others; both as in `batch`. A torch DataLoader over it reads no more than it needs:

            DataLoader(ds.with_columns(["tokens", "loss_mask"], dtype=np.int64), batch_size=8)
        """
        names, chosen = columns_chosen(columns, dtype, self.token_dtype)
        return self._with(_columns=names, _dtype=chosen)

    def _with(self, **changes: Any) -> "Dataset":
        """Another Dataset over the same files, with these attributes changed."""
        remade, arguments = self.__reduce__()
        dataset = remade(*arguments)
        vars(dataset).update(changes)
        return dataset


def _remade(
    directory: Path,
    manifest: Manifest,
    max_open: int,
    io: IO,
    held: Held | None,
    loss_on: tuple[np.ndarray, np.ndarray] | None,
    columns: tuple[str, ...],
    dtype: Any,
) -> Dataset:
    dataset = Dataset(directory, manifest, max_open, io, held)
    dataset._loss_on, dataset._columns, dataset._dtype = loss_on, columns, dtype
    return dataset


@overload
def open_dataset(
    directory: str | os.PathLike, *, shares: None = None, io: IO = "mmap", max_open: int | None = None
) -> Dataset: ...
@overload
def open_dataset(
    directory: Sequence[str | os.PathLike], *, shares: Sequence[float], io: IO = "mmap", max_open: int | None = None
) -> Mixture: ...
def open_dataset(directory, *, shares=None, io="mmap", max_open=None):
    """The dataset in `directory`, by its manifest alone; shards are checked and opened at first use.

    directory: one, or a list of several, which are read as a Mixture, by `shares`: a number above 0 for each.
    io: "mmap", where rows are views of mapped files; or "pread", where they are read, so that a file server that is lost
    is a DatasetError with file and row, not the end of the process by SIGBUS. max_open: how many shards stay open at most
    (default: 1024, or half of the files that may be open), over all directories; a shard that a Row still uses stays
    until that Row goes. Raises DatasetError if there is no manifest or it cannot be used, ArgumentError if datasets
    cannot be mixed.
    """
    if io not in ("mmap", "pread"):
        raise ArgumentError(f"io is {io!r} and should be 'mmap' or 'pread'")
    if io == "pread" and not CAN_PREAD:
        raise ArgumentError("io = 'pread' needs preadv, which this system does not have; use 'mmap'")
    limit = default_max_open() if max_open is None else integer("max_open", max_open, 1, 1 << 31)
    if isinstance(directory, str | os.PathLike):
        if shares is not None:
            raise ArgumentError(f"shares = {shares!r} is for a list of directories, and {str(directory)!r} is one")
        return Dataset(Path(directory), open_manifest(directory), limit, io)
    directories = list(directory)
    if shares is None or len(shares) != len(directories) or not directories:
        raise ArgumentError(
            f"a list of {len(directories)} directories needs shares = […], one for each and at least one; "
            f"there are {0 if shares is None else len(shares)}"
        )
    counts = counts_of(shares)
    manifests = [open_manifest(one) for one in directories]
    bounds = split_bound(limit, [len(manifest["shards"]) for manifest in manifests])
    return Mixture([Dataset(Path(d), m, b, io) for d, m, b in zip(directories, manifests, bounds, strict=True)], counts)
