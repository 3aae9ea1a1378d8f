"""A dataset as a trainer sees it: rows and batches of its shards, which are opened as they are
asked for.

    open_dataset(dir) ─► Dataset ── ds[i] ────────── dict of [T] arrays
                          │     ├── ds.row(i) ────── Row, a view of the mapped shard
                          │     └── ds.batch([…]) ── dict of [B, T] arrays
                          └── ds.batches(…) ──────── Batches, an iterator with a state
    open_dataset([dir, dir], shares=[…]) ─► Mixture, with the same face

Opening reads the manifest alone. A shard is checked and opened at its first use, and at most
`max_open` stay open.
"""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, overload

import numpy as np

from packprep.dataset import order
from packprep.dataset.batches import Reader
from packprep.dataset.boundaries import read_only
from packprep.dataset.epochs.resampling import (
    EPOCHS,
    Resampling,
    check_accelerate,
    resample,
    resampling_of,
)
from packprep.dataset.manifest import (
    Manifest,
    ShardEntry,
    StoredTask,
    encoder_length,
    first_rows,
    is_in_place,
    outline,
    read_manifest,
    replaced,
    stored_columns,
    stores_labels,
)
from packprep.dataset.mixture import Mixture, mixed_opened, mixture_file, read_mixture
from packprep.dataset.order import integer
from packprep.dataset.row import Row
from packprep.dataset.row_media import Media, kinds_of, media_of
from packprep.dataset.rows import COLUMNS, Facts, Place, RowSegments, gather
from packprep.dataset.shard import CAN_PREAD, IO, Shard, shard_of
from packprep.errors import ArgumentError, DatasetError
from packprep.forking import lazy
from packprep.format.json_files import MANIFEST_NAME, MIXTURE_NAME, TOKENIZER_NAME

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

__all__ = ["COLUMNS", "Dataset", "Mixture", "Row", "open_dataset", "write_mixture"]
Shares: TypeAlias = Sequence[float] | Sequence[tuple[int, Sequence[float]]]
Held: TypeAlias = Callable[[ShardEntry], AbstractContextManager[Path]]
_ROWS_AT_ONCE = 64
# the columns of task_params
TASK_PARAMS = ("mode_token", "noise_density", "mean_span_length", "random_roll")


def default_max_open() -> int:
    """1024 maps, or half of the open files that the system allows: a map holds its file open."""
    if resource is None:
        return 256
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1024 if soft == resource.RLIM_INFINITY else max(1, min(1024, soft // 2))


class Dataset(Reader):
    """The rows of a dataset on disk, in shard order; made by open_dataset.

    manifest: dataset.json as a dict. tasks: its task table. seq_length: slots of a row. vocab_size:
    rows that an embedding needs. pad_id: the token of padding. token_dtype: uint16 or int32.
    encoder_length: as the recipe's; 0: none. io: "mmap" or "pread". It may be pickled (workers open
    it again), forked, and read by several threads.
    """

    def __init__(
        self,
        directory: Path | str,
        manifest: Manifest,
        max_open: int,
        io: IO = "mmap",
        held: Held | None = None,
    ):
        """directory: where it lies, for messages, and for its shards unless `held` gives a shard's
        file while it is opened."""
        self.directory, self._held, self.max_open, self.io = directory, held, max_open, io
        self.manifest = manifest
        self.seq_length, self.vocab_size, self.pad_id = (
            manifest[k] for k in ("seq_length", "vocab_size", "pad_id")
        )
        self.token_dtype, self.encoder_length = (
            np.dtype(manifest["token_dtype"]),
            encoder_length(manifest),
        )
        self.facts = Facts(
            str(directory), self.seq_length, self.pad_id, self.token_dtype, manifest["tasks"]
        )
        self._first_row = first_rows(manifest)
        self._row_bounds, self._n_rows = np.array(self._first_row), self._first_row[-1]
        in_place = [task["attention"] for task in self.tasks if is_in_place(task)]
        self._predicts_in_place, self._stores_labels = (
            bool(in_place),
            stores_labels(stored_columns(manifest), in_place),
        )
        self._n_shards = len(manifest["shards"])
        self._open: dict[int, tuple[Any, int, Shard]] = {}
        # whether shards are closed again, those longest unused first
        self._forgets = self._n_shards > max_open

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": {}}

    def _with(self, **changes: Any) -> "Dataset":
        return super()._with(_open={}, **changes)

    def __repr__(self) -> str:
        return f"Dataset({str(self.directory)!r}: {len(self)} rows of {self.seq_length} slots)"

    def __str__(self) -> str:
        return outline(self.manifest, str(self.directory))

    def __len__(self) -> int:
        return self._n_rows

    @property
    def fingerprint(self) -> str:
        """The manifest's: of what determines the rows."""
        return self.manifest["fingerprint"]

    @property
    def digest(self) -> str:
        """The manifest's own: of what was built, the shards' digests among it."""
        return self.manifest["digest"]

    def fingerprint_at(self, digest: str) -> str | None:
        """The fingerprint that went with this digest: its own, or that of a dataset of which it has
        all rows where they were, and lost documents; None for any other."""
        known = {entry["digest"]: entry["fingerprint"] for entry in replaced(self.manifest)}
        return {**known, self.digest: self.fingerprint}.get(digest)

    @property
    def tasks(self) -> list[StoredTask]:
        return self.manifest["tasks"]

    @lazy
    def task_params(self) -> np.ndarray:
        """float32[n_tasks, 4]: mode_token, noise_density, mean_span_length, random_roll (0 or 1);
        NaN: it has none."""
        values = [{**task["parameters"], "mode_token": task["mode_token"]} for task in self.tasks]
        numbers = [[own.get(name) for name in TASK_PARAMS] for own in values]
        table = [[v if isinstance(v, int | float) else np.nan for v in own] for own in numbers]
        return read_only(np.array(table, np.float32))

    @lazy
    def _resampling(self) -> Resampling:
        return resampling_of(self.manifest, Path(self.directory, TOKENIZER_NAME).read_bytes)

    def _at_hand(self, number: int) -> tuple[Any, int, Shard]:
        """Shard `number`, which is checked and opened at its first use."""
        # No lock, which a fork could leave held: single dict operations are atomic, and two threads
        # that miss at once only open a shard twice.
        known = self._open.pop(number, None) if self._forgets else self._open.get(number)
        if known is None:
            entry = self.manifest["shards"][number]
            with (
                self._held(entry)
                if self._held
                else nullcontext(Path(self.directory, entry["file"]))
            ) as path:
                shard = shard_of(path, self.manifest, number, self.io)
                # opened, after which the file may be removed
                known = (shard.tokens, self._first_row[number], shard)
            if self._stores_labels and "labels" not in shard.layout:
                raise DatasetError(
                    f"{shard.path}: array 'labels' is missing, though a task predicts in place"
                )
        self._open[number] = known  # last: the one used most recently
        if self._forgets and len(self._open) > self.max_open:
            for least_recent in list(self._open)[: -self.max_open]:
                self._open.pop(least_recent, None)
        return known

    def _find(self, rows: np.ndarray) -> list[Place]:
        """(shard, row in it) of each row, 0 … n − 1."""
        numbers = (np.searchsorted(self._row_bounds, rows, side="right") - 1).tolist()
        at_hand = self._open
        if self._forgets:  # a batch may need more shards than stay open
            at_hand = {number: self._at_hand(number) for number in dict.fromkeys(numbers)}
        else:
            for number in numbers:
                if number not in at_hand:
                    self._at_hand(number)
        return [
            (at_hand[n][2], row - at_hand[n][1])
            for n, row in zip(numbers, rows.tolist(), strict=True)
        ]

    def row(self, index: int, epoch: int = 0) -> Row:
        """Row `index` as a view of its shard, or, above epoch 0, drawn anew; negative indices count
        from the end; IndexError beyond."""
        if epoch:
            self.check_redraw()
            stored, anew = self.row(index), RowInEpoch()
            anew.epoch = integer("epoch", epoch, 0, 1 << 63)
            anew.dataset, anew.index, anew._opened, anew._row = (
                self,
                stored.index,
                stored._opened,
                stored._row,
            )
            return anew
        # This is called once a row, where copying the row costs about a microsecond, of which a
        # call is a tenth, and so is memory that was not looked at lately: so where shards are of
        # like size, the row's is guessed, one that is open is not noted as used, and a Row has no
        # __init__.
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
        row.index = index = self._place(index)
        number = bisect_right(self._first_row, index) - 1
        row._opened = tokens, first_row, _ = self._open.get(number) or self._at_hand(number)
        row._row = index - first_row
        row.tokens = tokens[row._row]
        return row

    def _fill(
        self,
        found: list[Place],
        batch: dict[str, np.ndarray],
        epochs: Sequence[int] | None,
        accelerate: str,
    ) -> None:
        if epochs is None or not any(epochs):
            gather(self.facts, found, batch)
        else:
            whole: tuple[str, ...] = ()
            if all(epoch % EPOCHS for epoch in epochs) and self._resampling.has_chance:
                read = ("labels",) if self._predicts_in_place else ()
                whole = tuple(name for name in self._resampling.written if name not in read)
            gather(
                self.facts,
                found,
                batch,
                partial(self.redraw, epochs=epochs, accelerate=accelerate),
                whole,
            )

    @lazy
    def kinds(self) -> tuple[str, ...]:  # type: ignore[override]
        """The kinds of media, by name."""
        return kinds_of(self.manifest)

    def _media(self, found: list[Place]) -> Media:
        return media_of(found, self.kinds)

    def redraw(
        self,
        segments: RowSegments,
        columns: Mapping[str, np.ndarray],
        epochs: Sequence[int],
        accelerate: str = "numpy",
    ) -> None:
        """Write the rows of epochs above 0 into columns, name → [B, T], that hold those of epoch 0;
        `segments.changed` gets their header. epochs: one for each row. accelerate: as of
        `batches`."""
        kernels = check_accelerate(accelerate)
        if self._resampling.has_chance:
            resample(
                self._resampling,
                np.array([epoch % EPOCHS for epoch in epochs]),
                segments,
                columns,
                kernels,
            )

    def rows_of_samples(
        self, samples: np.ndarray, seed: int, shuffle: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """(rows, epochs), int64, shaped as `samples`: global samples g ≥ 0."""
        return order.rows_of_samples(samples, len(self), seed, shuffle), np.asarray(samples) // len(
            self
        )

    @property
    def epoch_rows(self) -> int:
        """The rows of an epoch."""
        return len(self)

    def costs(self, rows: np.ndarray, attention: float = 1, linear: float = 0) -> np.ndarray:
        """float64, one for each of `rows`: attention · Σn² + linear · Σn over its segments of n
        slots; by boundaries alone."""
        costs, by_place = np.empty(len(rows)), np.argsort(rows, kind="stable")
        for begin in range(0, len(rows), _ROWS_AT_ONCE):  # few shards at a time
            some = by_place[begin : begin + _ROWS_AT_ONCE]
            costs[some] = RowSegments(self.facts, self._find(rows[some])).costs(attention, linear)
        return costs

    def samples_of_epochs(self, epochs: int) -> int:
        """The samples of so many epochs."""
        return epochs * len(self)

    def check_redraw(self) -> None:
        """ArgumentError if a task has chance and cannot be drawn anew."""
        _ = self._resampling

    def tasks_with_loss(self) -> list[StoredTask]:
        """The tasks whose segments keep their loss, but for those of which the ledger counts no
        segment."""
        counts, loss_on = self.manifest["ledger"].get("tasks"), self.facts.loss_on
        sources, kept = loss_on or (np.ones(1, bool), np.ones(len(self.tasks), bool))
        with_loss = [
            task for task, on in zip(self.tasks, (kept & sources.any()).tolist(), strict=True) if on
        ]
        if not isinstance(counts, dict):  # a manifest may say anything there
            return with_loss
        empty = [
            name for name, of in counts.items() if isinstance(of, dict) and of.get("segments") == 0
        ]
        return [task for task in with_loss if task["name"] not in empty]

    def with_loss_on(
        self, source: str | Iterable[str] | None = None, task: str | Iterable[str] | None = None
    ) -> "Dataset":
        """A dataset of these rows, with loss_mask 0 outside the segments of these sources and tasks
        (a name or several)."""
        kept = []
        for what, wanted, entries in (
            ("source", source, self.manifest["sources"]),
            ("task", task, self.tasks),
        ):
            names = [entry["name"] for entry in entries]
            wanted = (
                names if wanted is None else [wanted] if isinstance(wanted, str) else list(wanted)
            )
            for name in wanted:
                if name not in names:
                    there = ", ".join(map(repr, dict.fromkeys(names)))
                    raise ArgumentError(f"no {what} is called {name!r}; there are {there}")
            kept.append(np.array([name in wanted for name in names], np.bool_))
        return self._with(facts=self.facts.restricted(*kept))


def segments_of(shard: Shard, manifest: Manifest, rows: range | None = None) -> RowSegments:
    """The segments of a shard's rows, at least one: all, or those of a range."""
    dtype = np.dtype(manifest["token_dtype"])
    facts = Facts(str(shard.path), shard.seq_length, manifest["pad_id"], dtype, manifest["tasks"])
    return RowSegments(
        facts, [(shard, row) for row in (range(shard.rows) if rows is None else rows)]
    )


@overload
def open_dataset(
    directory: str | os.PathLike,
    *,
    shares: None = None,
    io: IO = "mmap",
    max_open: int | None = None,
) -> Dataset: ...
@overload
def open_dataset(
    directory: Sequence[str | os.PathLike],
    *,
    shares: Shares,
    interpolate: str | None = None,
    max_epochs: Sequence[int | None] | None = None,
    io: IO = "mmap",
    max_open: int | None = None,
) -> Mixture: ...
def open_dataset(
    directory, *, shares=None, interpolate=None, max_epochs=None, io="mmap", max_open=None
):
    """The dataset in `directory`, by its manifest alone; shards are checked and opened at first
    use.

    directory: a dataset's folder; or a mixture.json, by its path or folder; or a list of datasets'
    folders, which are read as a Mixture, by `shares`: a number above 0 for each, or points
    [(sample, [number, …]), …] from sample 0 on, between which shares stay (interpolate "step", the
    default) or change evenly ("linear"), and behind the last stay. max_epochs: how often each
    dataset may be read, a whole number or None; what goes beyond raises Exhausted: `batches` at
    once where an end is given, else the step that would hold such a sample.
    io: "mmap", where rows are views of mapped files; or "pread", where they are read, so that a
    file server that is lost is a DatasetError with file and row, not the end of the process by
    SIGBUS. max_open: how many shards stay open at most (default: 1024, or half of the files that
    may be open), over all directories; a shard that a Row still uses stays until that Row goes.
    Raises DatasetError if there is no manifest or it cannot be used, ArgumentError if datasets
    cannot be mixed.
    """
    if io not in ("mmap", "pread"):
        raise ArgumentError(f"io is {io!r} and should be 'mmap' or 'pread'")
    if io == "pread" and not CAN_PREAD:
        raise ArgumentError(
            "io = 'pread' needs preadv, which this system does not have; use 'mmap'"
        )
    limit = default_max_open() if max_open is None else integer("max_open", max_open, 1, 1 << 31)
    if isinstance(directory, str | os.PathLike):
        mixture = Path(directory)
        if mixture.is_dir() and not (mixture / MANIFEST_NAME).exists():
            mixture /= MIXTURE_NAME
        if mixture.is_file() and (mixture.suffix == ".json" and mixture.name != MANIFEST_NAME):
            if shares is not None or interpolate is not None or max_epochs is not None:
                raise ArgumentError(
                    f"{mixture} says shares, interpolate and max_epochs itself: change them there,"
                    " or leave them out"
                )
            try:
                return open_dataset(**read_mixture(mixture), io=io, max_open=max_open)
            except ArgumentError as error:
                raise DatasetError(f"{mixture}: {error}") from error
        for name, given in (
            ("shares", shares),
            ("interpolate", interpolate),
            ("max_epochs", max_epochs),
        ):
            if given is not None:
                raise ArgumentError(
                    f"{name} = {given!r} is for a list of directories, and {str(directory)!r}"
                    " is one"
                )
        return Dataset(Path(directory), read_manifest(directory), limit, io)
    if directory is None:
        raise ArgumentError(
            "directory is None and should be the folder of a dataset, or a list of several"
        )
    directories = list(directory)
    counts = order.dealing_of(shares, directories, interpolate)
    manifests = [read_manifest(one) for one in directories]
    return mixed_opened(
        counts,
        max_epochs,
        manifests,
        limit,
        lambda i, bound: Dataset(Path(directories[i]), manifests[i], bound, io),
    )


def write_mixture(
    path: str | os.PathLike,
    directories: Sequence[str | os.PathLike],
    *,
    shares: Shares,
    interpolate: str | None = None,
    max_epochs: Sequence[int | None] | None = None,
) -> None:
    """Write the mixture.json by which open_dataset(path) gives the mixture of these folders,
    wherever all are moved together.

    shares, interpolate, max_epochs: as of open_dataset, which is asked whether it can open them.
    """
    given: dict[str, Any] = {"shares": shares, "interpolate": interpolate, "max_epochs": max_epochs}
    open_dataset(list(directories), **given)
    temporary = Path(path).with_name(f".{Path(path).name}.{os.getpid()}")
    temporary.write_bytes(mixture_file(Path(path).absolute(), directories, **given))
    os.replace(temporary, path)


class RowInEpoch(Row):
    """Row `index` with the chance of an epoch above 0: a Row whose columns and header are that
    epoch's, made at first use.

    Made by Dataset.row.
    """

    __slots__ = ("epoch",)
    epoch: int

    def _column(self, name: str) -> np.ndarray:
        batch = self.dataset.batch([self.index], columns=[name], epochs=[self.epoch])
        return read_only(batch[name][0])

    @lazy
    def _segments(self) -> RowSegments:
        segments = RowSegments(self.dataset.facts, [(self._shard, self._row)])
        tokens = np.array(self._shard.row("tokens", self._row))[None]
        self.dataset.redraw(segments, {"tokens": tokens}, [self.epoch])
        return segments
