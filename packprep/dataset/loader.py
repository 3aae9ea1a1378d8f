"""Open a dataset and read its rows and batches.

    open_dataset(dir) ─► Dataset ── ds[i] ────────── dict of [T] arrays
                          │     ├── ds.row(i) ────── Row, a view of the mapped shard
                          │     └── ds.batch([…]) ── dict of [B, T] arrays
                          └── ds.batches(…) ──────── Batches, a resumable iterator
    open_dataset([dir, dir], shares=[…]) ─► Mixture, with the same interface

Opening reads only the manifest. Each shard is checked and opened at its first use, and at most
`max_open` shards stay open.
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
from packprep.dataset.segments import records_of_document
from packprep.dataset.shard import IO, Shard, check_io, shard_of
from packprep.errors import ArgumentError, DatasetError
from packprep.forking import lazy
from packprep.format.json_files import (
    MANIFEST_NAME,
    MIXTURE_NAME,
    PLAN_NAME,
    TOKENIZER_NAME,
    decode,
)

try:
    import resource
except ImportError:  # Windows does not have it.
    resource = None  # type: ignore[assignment]

__all__ = ["COLUMNS", "Dataset", "Mixture", "Row", "open_dataset", "write_mixture"]
Shares: TypeAlias = Sequence[float] | Sequence[tuple[int, Sequence[float]]]
Held: TypeAlias = Callable[[ShardEntry], AbstractContextManager[Path]]
_ROWS_AT_ONCE = 64
# The columns of `task_params`.
TASK_PARAMS = ("mode_token", "noise_density", "mean_span_length", "random_roll")


def default_max_open() -> int:
    """Return the default limit of open shards.

    Each open shard needs an open file. So the default is 1024, but at most half of the system's
    limit of open files. On Windows, which does not report its limit, the default is 256.
    """
    if resource is None:
        return 256
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1024 if soft == resource.RLIM_INFINITY else max(1, min(1024, soft // 2))


class Dataset(Reader):
    """A dataset on disk: its rows in the order of the shards. `open_dataset` opens it.

    A Dataset can be pickled, forked, and read by several threads. A process that unpickles it opens
    the shards again.

    Attributes:
        directory: The folder of the dataset, or its URL.
        manifest: The content of dataset.json as a dict.
        tasks: The task table of the manifest.
        seq_length: Number of slots of a row.
        vocab_size: Size of the vocabulary. A model's embedding needs at least this number of rows.
        pad_id: The token of padding.
        token_dtype: uint16 or int32.
        encoder_length: The recipe's encoder_length, or 0 if the recipe does not set it.
        io: How shards are read, "mmap" or "pread", see `open_dataset`.
        max_open: Maximum number of open shards.

    Example:
        >>> ds = packprep.open_dataset("packed")
        >>> len(ds), ds.seq_length
        (1000, 2048)
        >>> ds[0]["tokens"].shape
        (2048,)
    """

    def __init__(
        self,
        directory: Path | str,
        manifest: Manifest,
        max_open: int,
        io: IO = "mmap",
        hold_shard: Held | None = None,
        read_file: Callable[[str], bytes] | None = None,
    ):
        """Initialize a dataset from its manifest. To open a dataset, call `open_dataset`.

        Args:
            directory: The folder of the shards. With `hold_shard`, it is the dataset's name in
                messages, such as its URL.
            manifest: The checked manifest.
            max_open: Maximum number of open shards.
            io: "mmap" or "pread".
            hold_shard: A function that takes a shard's entry in the manifest, and returns a
                context manager. Entering the context gives the path of the shard's file. The file
                exists until the context ends. None opens the shards in `directory`.
            read_file: A function that takes the name of another file of the dataset, and returns
                its bytes. None reads files in `directory`.
        """
        self.directory, self._held, self.max_open, self.io = directory, hold_shard, max_open, io
        self._read_file = read_file or partial(_read_in, Path(directory))
        self.manifest = manifest
        self.seq_length, self.vocab_size, self.pad_id = (
            manifest[k] for k in ("seq_length", "vocab_size", "pad_id")
        )
        self.token_dtype = np.dtype(manifest["token_dtype"])
        self.encoder_length = encoder_length(manifest)
        self.facts = Facts.of(str(directory), manifest)
        self._first_row = first_rows(manifest)
        self._row_bounds, self._n_rows = np.array(self._first_row), self._first_row[-1]
        in_place = [task["attention"] for task in self.tasks if is_in_place(task)]
        self._predicts_in_place = bool(in_place)
        self._stores_labels = stores_labels(stored_columns(manifest), in_place)
        self._n_shards = len(manifest["shards"])
        self._open: dict[int, tuple[Any, int, Shard]] = {}
        # True if there are more shards than may be open. The least recently used shard is then
        # closed first.
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
        """The fingerprint in the manifest, a hash of everything that determines the rows."""
        return self.manifest["fingerprint"]

    @property
    def digest(self) -> str:
        """The digest of the manifest, which includes the digests of all shards."""
        return self.manifest["digest"]

    def fingerprint_at(self, digest: str) -> str | None:
        """Return the fingerprint of the version of this dataset that has the given digest.

        Each removal of documents makes a new version of a dataset. All versions have the same rows
        at the same indices, except for the removed documents.

        Args:
            digest: The digest of a version.

        Returns:
            The fingerprint, or None if no version has the digest.
        """
        fingerprints = {entry["digest"]: entry["fingerprint"] for entry in replaced(self.manifest)}
        return {**fingerprints, self.digest: self.fingerprint}.get(digest)

    @property
    def tasks(self) -> list[StoredTask]:
        return self.manifest["tasks"]

    @lazy
    def task_params(self) -> np.ndarray:
        """Return the numeric parameters of the tasks, float32[n_tasks, 4].

        The columns are mode_token, noise_density, mean_span_length and random_roll (0 or 1). The
        value is NaN if the task does not have the parameter.
        """
        values = [{**task["parameters"], "mode_token": task["mode_token"]} for task in self.tasks]
        numbers = [[parameters.get(name) for name in TASK_PARAMS] for parameters in values]
        table = [[v if isinstance(v, int | float) else np.nan for v in row] for row in numbers]
        return read_only(np.array(table, np.float32))

    @lazy
    def _resampling(self) -> Resampling:
        return resampling_of(self.manifest, partial(self._read_file, TOKENIZER_NAME))

    @lazy
    def _file_names(self) -> list[str]:
        """Return the names of the source files, indexed by segment_file.

        Raises:
            DatasetError: If plan.json cannot be read.
        """
        where = f"{self.directory}/{PLAN_NAME}"
        try:
            data = self._read_file(PLAN_NAME)
        except OSError as error:
            raise DatasetError(
                f"{where}: cannot be read: {error}. It has the names of the documents' files\n"
                "hint: copy it from the folder of the build"
            ) from error
        return [file["name"] for file in decode(data, where)["files"]]

    def documents(self, row: int) -> list[dict[str, Any]]:
        """Return the documents of a row's segments, in the order of the segments.

        With group_by, each document has records, as [{position, tokens}]. `position` is a record's
        position in the file, and `tokens` is [first, end) of the document's tokens.

        Args:
            row: Row index. Negative indices count from the end.

        Returns:
            A dict for each segment:

            - segment: Number of the segment in the row, from 1.
            - source, file, document: Name of the source, name of the file, position in the file.
            - repeat: Number of the pass over the document.
            - tokens: [first, end) of the document's tokens.
            - task: Name of the task.
            - records: With group_by, the records with tokens in the segment. Otherwise missing.

        Raises:
            IndexError: If the row does not exist.
            DatasetError: If plan.json is missing, or a file is damaged.

        Example:
            >>> ds.documents(0)[0]["file"], ds.documents(0)[0]["document"]
            ('web/a.jsonl', 81932)
        """
        places = self._find(np.array([self._place(row)], np.int64))
        segments = RowSegments(self.facts, places)
        sources = np.array([source["name"] for source in self.manifest["sources"]], object)
        tasks = np.array([task["name"] for task in self.tasks], object)
        start = segments.column("start").astype(np.int64)
        files = segments.column("file")
        # A damaged file index must not select another file's name.
        if len(files) and int(files.max()) >= len(self._file_names):
            raise segments.fault(0, f"segment_file {files.max()} is beyond the files of the plan")
        columns = (
            segments.looked_up("source", sources).tolist(),
            files.tolist(),
            segments.column("doc").tolist(),
            segments.column("repeat").tolist(),
            start.tolist(),
            (start + segments.column("tokens")).tolist(),
            segments.looked_up("task", tasks).tolist(),
        )
        described = [
            {
                "segment": number,
                "source": source,
                "file": self._file_names[file],
                "document": doc,
                "repeat": repeat,
                "tokens": [first_token, end],
                "task": task,
            }
            for number, (source, file, doc, repeat, first_token, end, task) in enumerate(
                zip(*columns, strict=True), 1
            )
        ]
        # The first segment of a document has all of its records. Each segment lists only those with
        # tokens in it.
        ((shard, _),) = places
        for description, file in zip(described, files.tolist(), strict=True):
            if "record_offsets" in shard.layout:
                own_records = records_of_document(
                    shard.arrays, file, description["document"], description["repeat"]
                )
                begin, end = description["tokens"]
                if own_records is not None:
                    description["records"] = [
                        record
                        for record in own_records.listed()
                        if max(record["tokens"][0], begin) < min(record["tokens"][1], end)
                    ]
        return described

    def _at_hand(self, number: int) -> tuple[Any, int, Shard]:
        """Return (tokens, first_row, shard) for a shard number.

        The shard's first row has the index `first_row` in the dataset. The shard is checked and
        opened at its first use.
        """
        # This code has no lock, because it could stay locked in a forked child. Single dict
        # operations are atomic, so at worst two threads open the same shard twice.
        opened_shard = self._open.pop(number, None) if self._forgets else self._open.get(number)
        if opened_shard is None:
            entry = self.manifest["shards"][number]
            with (
                self._held(entry)
                if self._held
                else nullcontext(Path(self.directory, entry["file"]))
            ) as path:
                shard = shard_of(path, self.manifest, number, self.io)
                # `shard.tokens` opens the file, which may be removed afterwards.
                opened_shard = (shard.tokens, self._first_row[number], shard)
            if self._stores_labels and "labels" not in shard.layout:
                raise DatasetError(
                    f"{shard.path}: array 'labels' is missing, although a task predicts the same"
                    " position"
                )
        self._open[number] = opened_shard  # The last entry is the most recently used one.
        if self._forgets and len(self._open) > self.max_open:
            for least_recent in list(self._open)[: -self.max_open]:
                self._open.pop(least_recent, None)
        return opened_shard

    def _find(self, rows: np.ndarray) -> list[Place]:
        """Return for each row index in `rows` a tuple: the shard, and the row's index in the shard.

        `rows` must not have negative indices.
        """
        numbers = (np.searchsorted(self._row_bounds, rows, side="right") - 1).tolist()
        at_hand = self._open
        if self._forgets:  # A batch may need more shards than stay open.
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
        """Return one row: in epoch 0 a view of its shard, in later epochs a resampled row.

        Args:
            index: Row index. Negative indices count from the end.
            epoch: The epoch. The row is resampled in epochs above 0, and as stored in epoch 0.

        Returns:
            A `Row`, whose columns are arrays of shape [T].

        Raises:
            IndexError: If the row does not exist.
            ArgumentError: If the epoch is invalid, or a task cannot be resampled.
            DatasetError: If the shard is damaged or cannot be read.

        Example:
            >>> row = ds.row(-1)
            >>> row.tokens.shape, row.n_segments
            ((2048,), 3)
        """
        if epoch:
            self.check_redraw()
            stored, row_in_epoch = self.row(index), RowInEpoch()
            row_in_epoch.epoch = integer("epoch", epoch, 0, 1 << 63)
            row_in_epoch.dataset = self
            row_in_epoch.index = stored.index
            row_in_epoch._opened = stored._opened
            row_in_epoch._row = stored._row
            return row_in_epoch
        # This code runs once per row, so it must be fast. Copying a row takes about 1 µs, and a
        # function call or a cache miss takes about 0.1 µs. So the code first guesses the shard as
        # if all shards had the same size, and does not mark an open shard as used. A Row has no
        # __init__ for the same reason.
        row = Row()
        row.dataset, row.index = self, index
        try:
            row._opened = tokens, first_row, _ = self._open[index * self._n_shards // self._n_rows]
            row._row = place = index - first_row
            if place >= 0 and type(index) is int:
                row.tokens = tokens[place]
                return row
        except (LookupError, TypeError, ZeroDivisionError):
            pass  # The guess was wrong, the shard is not open, or the row does not exist.
        row.index = index = self._place(index)
        number = bisect_right(self._first_row, index) - 1
        row._opened = tokens, first_row, _ = self._open.get(number) or self._at_hand(number)
        row._row = index - first_row
        row.tokens = tokens[row._row]
        return row

    def _fill(
        self,
        places: list[Place],
        batch: dict[str, np.ndarray],
        epochs: Sequence[int] | None,
        accelerate: str,
    ) -> None:
        if epochs is None or not any(epochs):
            gather(self.facts, places, batch)
        else:
            # If resampling overwrites all rows, the stored values of those columns need not be
            # read.
            whole_columns: tuple[str, ...] = ()
            if all(epoch % EPOCHS for epoch in epochs) and self._resampling.has_chance:
                read = ("labels",) if self._predicts_in_place else ()
                whole_columns = tuple(name for name in self._resampling.written if name not in read)
            gather(
                self.facts,
                places,
                batch,
                partial(self.redraw, epochs=epochs, accelerate=accelerate),
                whole_columns,
            )

    @lazy
    def kinds(self) -> tuple[str, ...]:  # type: ignore[override]
        """Return the names of the dataset's kinds of media."""
        return kinds_of(self.manifest)

    def _media(self, places: list[Place]) -> Media:
        return media_of(places, self.kinds)

    def redraw(
        self,
        segments: RowSegments,
        columns: Mapping[str, np.ndarray],
        epochs: Sequence[int],
        accelerate: str = "numpy",
    ) -> None:
        """Resample the rows with an epoch above 0, in place.

        Args:
            segments: The segments of the rows. The new header columns are put into
                `segments.changed`.
            columns: name → [B, T]. On entry, the arrays contain the stored rows.
            epochs: The epoch of each row, [B].
            accelerate: The implementation that resamples, as in `batches`.

        Raises:
            ArgumentError: If a task cannot be resampled, or `accelerate` is invalid.
            DatasetError: If a row's header is damaged.
        """
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
        """Return the rows and epochs of global samples.

        Args:
            samples: Global samples g ≥ 0, integers of any shape.
            seed: Random seed of the order.
            shuffle: Whether rows are shuffled.

        Returns:
            The rows and their epochs, int64, shaped as `samples`.
        """
        return order.rows_of_samples(samples, len(self), seed, shuffle), np.asarray(samples) // len(
            self
        )

    def samples_of_row(
        self,
        row: int,
        epochs: int,
        seed: int,
        shuffle: bool,
        step_rows: Mapping[int, int] | None = None,
    ) -> list[tuple[int, int, int]]:
        """Return when a row is read in the first epochs, the inverse of `rows_of_samples`.

        Args:
            row: Row index.
            epochs: Number of epochs to search.
            seed: Random seed of the order.
            shuffle: Whether rows are shuffled.
            step_rows: Not used. A `Mixture` of several seq_lengths needs it.

        Returns:
            For each epoch, a tuple (epoch, global sample, 0).
        """
        samples = order.samples_of_row(self._place(row), epochs, len(self), seed, shuffle)
        return [(epoch, sample, 0) for epoch, sample in enumerate(samples.tolist())]

    @property
    def epoch_rows(self) -> int:
        """The number of rows in an epoch."""
        return len(self)

    def costs(self, rows: np.ndarray, attention: float = 1, linear: float = 0) -> np.ndarray:
        """Return the cost of each row.

        The cost of a row is attention · Σn² + linear · Σn over its segments of n slots. Only the
        boundaries of segments are read from the shards.

        Args:
            rows: Row indices, int64[k].
            attention: Weight of Σn².
            linear: Weight of Σn.

        Returns:
            float64[k].
        """
        costs, by_place = np.empty(len(rows)), np.argsort(rows, kind="stable")
        for begin in range(0, len(rows), _ROWS_AT_ONCE):  # Few shards are open at a time.
            indices = by_place[begin : begin + _ROWS_AT_ONCE]
            costs[indices] = RowSegments(self.facts, self._find(rows[indices])).costs(
                attention, linear
            )
        return costs

    def samples_of_epochs(self, epochs: int) -> int:
        """Return the number of samples in `epochs` epochs."""
        return epochs * len(self)

    def check_redraw(self) -> None:
        """Check that all tasks whose objectives use random numbers can be resampled.

        Raises:
            ArgumentError: If a task cannot be resampled.
            DatasetError: If the manifest does not have the values that resampling needs.
        """
        _ = self._resampling

    def tasks_with_loss(self) -> list[StoredTask]:
        """Return the tasks that contribute to the loss.

        The result leaves out tasks that `with_loss_on` excludes, and tasks with 0 segments in the
        ledger.
        """
        counts, loss_on = self.manifest["ledger"].get("tasks"), self.facts.loss_on
        sources, is_kept = loss_on or (np.ones(1, bool), np.ones(len(self.tasks), bool))
        with_loss = [
            task
            for task, on in zip(self.tasks, (is_kept & sources.any()).tolist(), strict=True)
            if on
        ]
        if not isinstance(counts, dict):  # Opening a dataset does not check its ledger.
            return with_loss
        empty = [
            name
            for name, counts_of_task in counts.items()
            if isinstance(counts_of_task, dict) and counts_of_task.get("segments") == 0
        ]
        return [task for task in with_loss if task["name"] not in empty]

    def with_loss_on(
        self, source: str | Iterable[str] | None = None, task: str | Iterable[str] | None = None
    ) -> "Dataset":
        """Return a view of the dataset with loss only on the given sources and tasks.

        All other segments get a loss_mask of 0.

        Args:
            source: Name of a source, or several names. None keeps all sources.
            task: Name of a task, or several names. None keeps all tasks.

        Returns:
            A `Dataset` with the same rows. Only the columns about loss differ.

        Raises:
            ArgumentError: If a name does not exist.

        Example:
            >>> code = ds.with_loss_on(source="code")
        """
        masks = []
        for kind, wanted_names, entries in (
            ("source", source, self.manifest["sources"]),
            ("task", task, self.tasks),
        ):
            names = [entry["name"] for entry in entries]
            wanted_names = (
                names
                if wanted_names is None
                else [wanted_names]
                if isinstance(wanted_names, str)
                else list(wanted_names)
            )
            for name in wanted_names:
                if name not in names:
                    choices = ", ".join(map(repr, dict.fromkeys(names)))
                    raise ArgumentError(f"unknown {kind} {name!r}; there are {choices}")
            masks.append(np.array([name in wanted_names for name in names], np.bool_))
        return self._with(facts=self.facts.restricted(*masks))


def _read_in(folder: Path, name: str) -> bytes:
    return (folder / name).read_bytes()


def segments_of(shard: Shard, manifest: Manifest, rows: range | None = None) -> RowSegments:
    """Return the segments of a shard's rows.

    Args:
        shard: The open shard.
        manifest: The manifest of its dataset.
        rows: A range of at least one row index. None takes all rows.

    Returns:
        The `RowSegments` of these rows.
    """
    facts = Facts.of(str(shard.path), manifest)
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
    """Open a packed dataset, or a mixture of several.

    Only the manifest is read. Each shard is checked and opened at its first use.

    Args:
        directory: The folder of a dataset; a mixture.json or its folder; or a list of dataset
            folders, which become a `Mixture`.
        shares: Sampling weights, required for a list of folders. For constant shares, give one
            number above 0 per dataset. For shares that change, give a list of points (sample,
            [number, …]), where the numbers are the shares at this sample. The first point is at
            sample 0. After the last point, shares stay the same.
        interpolate: How shares change between points. "step" (the default) keeps the shares of a
            point until the next one. "linear" changes them linearly.
        max_epochs: How many times each dataset of a list may be read: a list with an integer or
            None (no limit) for each dataset. Beyond a limit, `Exhausted` is raised. If the end of
            the iteration is known, `batches` raises it at once; otherwise the first step beyond the
            limit raises it.
        io: "mmap" maps shards, and rows are views of the map. "pread" reads rows from the files. If
            the connection to a file server is lost, "pread" raises DatasetError with file and row,
            but access to a map ends the process with SIGBUS.
        max_open: Maximum number of open shards over all directories. The default is 1024, or half
            of the system's limit of open files if that is less. A shard that a `Row` uses stays
            open until the `Row` is deleted.

    Returns:
        A `Dataset`, or a `Mixture` for a list or a mixture.json.

    Raises:
        DatasetError: If a manifest or a mixture.json is missing or invalid.
        ArgumentError: If an argument is invalid, or the datasets cannot be mixed.

    Example:
        >>> ds = packprep.open_dataset("packed")
        >>> next(ds.batches(batch_size=8))["tokens"].shape
        (8, 2048)
        >>> mixed = packprep.open_dataset(["packed_web", "packed_code"], shares=[0.7, 0.3])
    """
    check_io(io)
    limit = default_max_open() if max_open is None else integer("max_open", max_open, 1, 1 << 31)
    # A path may be a dataset, a mixture.json, or a folder with a mixture.json and no manifest.
    if isinstance(directory, str | os.PathLike):
        mixture = Path(directory)
        if mixture.is_dir() and not (mixture / MANIFEST_NAME).exists():
            mixture /= MIXTURE_NAME
        if mixture.is_file() and (mixture.suffix == ".json" and mixture.name != MANIFEST_NAME):
            if shares is not None or interpolate is not None or max_epochs is not None:
                raise ArgumentError(
                    f"{mixture} already sets shares, interpolate and max_epochs\n"
                    "hint: change them in this file, or leave them out"
                )
            try:
                return open_dataset(**read_mixture(mixture), io=io, max_open=max_open)
            except ArgumentError as error:
                raise DatasetError(f"{mixture}: {error}") from error
        for name, value in (
            ("shares", shares),
            ("interpolate", interpolate),
            ("max_epochs", max_epochs),
        ):
            if value is not None:
                raise ArgumentError(
                    f"{name} = {value!r} requires a list of directories, but {str(directory)!r}"
                    " is a single directory"
                )
        return Dataset(Path(directory), read_manifest(directory), limit, io)
    if directory is None:
        raise ArgumentError(
            "directory is None\nhint: give the folder of a dataset, or a list of several"
        )
    # Shares are checked before any file is read, so a wrong argument is reported at once.
    directories = list(directory)
    counts = order.dealing_of(shares, directories, interpolate)
    manifests = [read_manifest(path) for path in directories]
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
    """Write a mixture.json that `open_dataset` opens as a mixture of these datasets.

    The file contains the folders' paths relative to its own folder, so that file and folders can be
    moved together. The datasets are opened first to check the arguments.

    Args:
        path: The file to write. An existing file is replaced atomically.
        directories: The folders of the datasets.
        shares: Sampling weights, as in `open_dataset`.
        interpolate: How shares change between points, as in `open_dataset`.
        max_epochs: How many times each dataset may be read, as in `open_dataset`.

    Raises:
        DatasetError: If a dataset cannot be opened.
        ArgumentError: If an argument is invalid, or the datasets cannot be mixed.

    Example:
        >>> from packprep.dataset.loader import write_mixture
        >>> write_mixture("mix/mixture.json", ["mix/web", "mix/code"], shares=[0.7, 0.3])
        >>> mixed = packprep.open_dataset("mix")
    """
    options: dict[str, Any] = {
        "shares": shares,
        "interpolate": interpolate,
        "max_epochs": max_epochs,
    }
    open_dataset(list(directories), **options)
    temporary = Path(path).with_name(f".{Path(path).name}.{os.getpid()}")
    temporary.write_bytes(mixture_file(Path(path).absolute(), directories, **options))
    os.replace(temporary, path)


class RowInEpoch(Row):
    """A row in an epoch above 0. Its columns and header are resampled at their first use.

    `Dataset.row` creates it.
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
