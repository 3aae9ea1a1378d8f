"""Read several datasets as one dataset. Each one provides a given share of the batches' rows.

Row indices count through the datasets, in their order.

open_dataset([a, b], shares=[0.7, 0.3]) ─► Mixture ── batches(…)
    order.py: sample → (dataset, number in the dataset), number → (row, epoch)
    shares=[(0, [0.9, 0.1]), (10**6, [0.5, 0.5])], interpolate="linear": shares that change
"""

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from packprep.dataset import order
from packprep.dataset.batches import Reader
from packprep.dataset.manifest import StoredTask
from packprep.dataset.order import integer, true_or_false
from packprep.dataset.row import Row
from packprep.dataset.row_media import Media, joined
from packprep.dataset.skips import skips_of_state
from packprep.errors import ArgumentError, DatasetError, StateError
from packprep.format import read_file
from packprep.format.json_files import FORMAT, VERSION, decode, encode


class Mixture(Reader):
    """Several datasets, read as one. `open_dataset` opens it.

    Row indices count through the datasets, in their order. Like a `Dataset`, a Mixture can be
    pickled, forked, and read by several threads. If the datasets differ in seq_length, each step of
    `batches` reads one dataset.

    Attributes:
        datasets: The `Dataset` objects, with their tasks, sources and manifests.
        counts: Constant shares as numbers of samples, int64[D]: each cycle of sum(counts) samples
            has counts[d] samples of dataset d. For shares that change, a `Schedule`.
        shares: The delivered shares, float64[D]. For shares that change, float64[points, D].
        vocab_size: Size of the vocabulary, the same in all datasets. A model's embedding needs at
            least this number of rows.
        pad_id: The token of padding, the same in all datasets.
        seq_length: Number of slots of the longest rows.
        seq_lengths: The seq_length of each dataset if the datasets differ in it, otherwise None.
        encoder_length: The encoder_length of the datasets, or 0 if the datasets differ in it.
        token_dtype: The widest token dtype of the datasets.
        max_epochs: For each dataset, how many times it may be read, or None for no limit.

    Example:
        >>> mixed = packprep.open_dataset(["packed_web", "packed_code"], shares=[0.7, 0.3])
        >>> for batch in mixed.batches(batch_size=8, samples=8000):
        ...     tokens = batch["tokens"]
    """

    what = "mixture"

    def __init__(
        self, datasets: Sequence[Any], counts: np.ndarray | order.Schedule, max_epochs: Any = None
    ):
        _check_alike(datasets)
        self.datasets = tuple(datasets)
        lengths = tuple(dataset.seq_length for dataset in datasets)
        self.seq_length, self.seq_lengths = max(lengths), lengths if len(set(lengths)) > 1 else None
        self.counts = counts
        if isinstance(counts, order.Schedule):
            self.shares = np.array([counts.shares(point) for point in counts.points])
            self.samples_at_once = order.SCHEDULED_AT_ONCE
        else:
            self.shares = counts / counts.sum()
        encoders = {dataset.encoder_length for dataset in datasets}
        self.encoder_length = encoders.pop() if len(encoders) == 1 else 0
        first_dataset = datasets[0]
        self.vocab_size, self.pad_id = first_dataset.vocab_size, first_dataset.pad_id
        self.token_dtype = np.result_type(*(dataset.token_dtype for dataset in datasets))
        # The index of each dataset's first row, and the number of all rows.
        self._first_row = [0, *accumulate(map(len, datasets))]
        self.max_epochs = _checked_epochs(max_epochs, len(self.datasets))

    def __repr__(self) -> str:
        return f"Mixture({', '.join(map(repr, self.datasets))}: shares {self.shares.tolist()})"

    def __str__(self) -> str:
        shares = (
            " → ".join(f"{share:.2%}" for share in np.atleast_1d(shares_of_dataset))
            for shares_of_dataset in self.shares.T
        )
        unit = "samples" if self.seq_lengths is None else "steps"
        trees = (
            f"{share} of {unit}: {dataset}"
            for share, dataset in zip(shares, self.datasets, strict=True)
        )
        lines = [f"mixture of {len(self.datasets)} datasets", *trees]
        if isinstance(self.counts, order.Schedule) and len(self.counts.points) > 1:
            lines[0] += (
                f", shares at {unit} {', '.join(f'{point:,}' for point in self.counts.points)}"
            )
        return "\n".join(lines)

    def exhausted_at(
        self, seed: int = 0, shuffle: bool = True, step_rows: Mapping[int, int] | None = None
    ) -> int | None:
        """Return the first sample that would exceed the max_epochs of a dataset.

        Args:
            seed: Random seed of the order.
            shuffle: Whether rows are shuffled.
            step_rows: A dict seq_length → rows of a step over all ranks. It is required if the
                datasets differ in seq_length, because a sample is then a whole step.

        Returns:
            The global sample, or None if all samples are allowed.

        Raises:
            ArgumentError: If `step_rows` is required and missing.
        """
        if self.seq_lengths is not None and step_rows is None:
            raise ArgumentError(
                "rows differ in seq_length\n"
                "hint: give step_rows = {seq_length: rows of a step over all ranks}"
            )
        exhaustion = self.exhaustion(seed, shuffle, step_rows)
        return None if exhaustion is None else exhaustion[0]

    def exhaustion(
        self, seed: int, shuffle: bool, step_rows: Mapping[int, int] | None
    ) -> tuple[int, str] | None:
        """Return the first sample beyond the max_epochs of a dataset, and an error message.

        Args:
            seed: Random seed of the order.
            shuffle: Whether rows are shuffled.
            step_rows: A dict seq_length → rows of a step over all ranks, if the datasets differ in
                seq_length and a sample is a whole step. Otherwise None.

        Returns:
            The global sample, and the start of an error message that names the exhausted dataset.
            None if no sample exceeds a limit.
        """
        ends = []
        for d, epochs in enumerate(self.max_epochs):
            if epochs is not None:
                # If a sample is a whole step, a limit allows only whole steps.
                rows = (
                    1
                    if self.seq_lengths is None or step_rows is None
                    else step_rows[self.seq_lengths[d]]
                )
                end = order.first_beyond(
                    d, epochs * len(self.datasets[d]) // rows, self.counts, seed, shuffle
                )
                ends += [(end, d)] if end is not None else []
        if not ends:
            return None
        end, d = min(ends)
        dataset, epochs = self.datasets[d], self.max_epochs[d]
        return (
            end,
            (
                f"dataset {d} of the mixture, {dataset.directory}, has used its max_epochs ="
                f" {epochs}, of {len(dataset)} rows,"
            ),
        )

    def __len__(self) -> int:
        """Return the number of rows of all datasets, regardless of their shares."""
        return self._first_row[-1]

    @property
    def fingerprint(self) -> str:
        """A hash of the datasets' fingerprints and of `counts`, 32 hex digits."""
        return self._fingerprint([dataset.fingerprint for dataset in self.datasets])

    def fingerprint_at(self, digest: str) -> str | None:
        """Return the fingerprint of the version of this mixture that has the given digest.

        Each removal of documents makes a new version of a dataset, see `Dataset.fingerprint_at`. A
        version of the mixture has one version of each dataset.

        Args:
            digest: The digest of a version.

        Returns:
            The fingerprint, or None if no version has the digest.
        """
        digests = digest.split(",")
        if len(digests) != len(self.datasets):
            return None
        fingerprints = [
            dataset.fingerprint_at(own_digest)
            for dataset, own_digest in zip(self.datasets, digests, strict=True)
        ]
        return None if None in fingerprints else self._fingerprint(fingerprints)

    def _fingerprint(self, parts: list[Any]) -> str:
        if isinstance(self.counts, order.Schedule):
            parts += self.counts.parts()
        else:
            parts = [
                [fingerprint, count]
                for fingerprint, count in zip(parts, self.counts.tolist(), strict=True)
            ]
        encoded = json.dumps(parts, separators=(",", ":")).encode()
        return hashlib.blake2b(encoded, digest_size=16).hexdigest()

    @property
    def digest(self) -> str:
        """The digests of the datasets in their order, joined by commas."""
        return ",".join(dataset.digest for dataset in self.datasets)

    def row(self, index: int, epoch: int = 0) -> Row:
        """Return one row: in epoch 0 a view of its shard, in later epochs a resampled row.

        Args:
            index: Row index among the rows of all datasets. Negative indices count from the end.
            epoch: The epoch. The row is resampled in epochs above 0, and as stored in epoch 0.

        Returns:
            A `Row`. Its attribute `dataset` is the dataset that contains it, and `index` is its
            index in that dataset.

        Raises:
            IndexError: If the row does not exist.
            ArgumentError: If the epoch is invalid, or a task cannot be resampled.
            DatasetError: If the shard is damaged or cannot be read.
        """
        index = self._place(index)
        number = bisect_right(self._first_row, index) - 1
        return self.datasets[number].row(index - self._first_row[number], epoch)

    def documents(self, row: int) -> list[dict[str, Any]]:
        """Return the documents of a row's segments, as `Dataset.documents` does.

        Each dict also has the index of the dataset, as "dataset".

        Args:
            row: Row index among the rows of all datasets. Negative indices count from the end.

        Returns:
            A dict for each segment.

        Raises:
            IndexError: If the row does not exist.
            DatasetError: If plan.json is missing, or a file is damaged.
        """
        row = self._place(row)
        number = bisect_right(self._first_row, row) - 1
        documents_of_row = self.datasets[number].documents(row - self._first_row[number])
        return [{"dataset": number, **document} for document in documents_of_row]

    def _split(self, rows: np.ndarray) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
        """Split row indices of the mixture by dataset.

        Yields:
            For each dataset that contains some of the rows, a tuple of the dataset and two int64
            arrays [k]: the positions of these rows in `rows`, and their indices in the dataset.
        """
        numbers = np.searchsorted(self._first_row, rows, side="right") - 1
        for number, dataset in enumerate(self.datasets):
            where = np.flatnonzero(numbers == number)
            if len(where):
                yield dataset, where, rows[where] - self._first_row[number]

    def _find(self, rows: np.ndarray) -> list[tuple[Any, np.ndarray, np.ndarray]]:
        return list(self._split(rows))

    def _fill(
        self,
        places: list[Any],
        batch: dict[str, np.ndarray],
        epochs: Sequence[int] | None,
        accelerate: str,
    ) -> None:
        for dataset, where, own_rows in places:
            own_epochs = [epochs[i] for i in where.tolist()] if epochs is not None else None
            # If several datasets provide rows, their rows alternate in the batch, so each writes to
            # its own arrays.
            own_batch = batch
            if len(places) > 1:
                own_batch = {
                    name: np.empty((len(own_rows), *values.shape[1:]), values.dtype)
                    for name, values in batch.items()
                }
            dataset._fill(dataset._find(own_rows), own_batch, own_epochs, accelerate)
            if own_batch is not batch:
                for name, values in own_batch.items():
                    batch[name][where] = values

    @property
    def kinds(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of all kinds of media in the datasets."""
        return tuple(sorted({kind for dataset in self.datasets for kind in dataset.kinds}))

    def _media(self, places: list[Any]) -> Media:
        parts = [dataset._media(dataset._find(own_rows)) for dataset, _, own_rows in places]
        return joined(
            parts,
            self.kinds,
            np.concatenate([np.zeros(0, np.int64), *(where for _, where, _ in places)]),
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
            The row of each sample and its epoch in the row's dataset, int64, shaped as `samples`.
        """
        dataset_numbers, numbers = order.of_samples(samples, self.counts, seed, shuffle)
        rows, epochs = np.empty_like(numbers), np.empty_like(numbers)
        for d, dataset in enumerate(self.datasets):
            is_own = dataset_numbers == d
            if is_own.any():
                # Each dataset is shuffled with another seed, so two copies of a dataset differ in
                # their order.
                own_rows = order.rows_of_samples(
                    numbers[is_own], len(dataset), order.seed_of(seed, d), shuffle
                )
                rows[is_own] = self._first_row[d] + own_rows
                epochs[is_own] = numbers[is_own] // len(dataset)
        return rows, epochs

    def samples_of_row(
        self,
        row: int,
        epochs: int,
        seed: int,
        shuffle: bool,
        step_rows: Mapping[int, int] | None = None,
    ) -> list[tuple[int, int, int]]:
        """Return when a row is read in the first epochs of its dataset.

        Args:
            row: Row index among the rows of all datasets.
            epochs: Number of epochs of the row's dataset to search.
            seed: Random seed of the order.
            shuffle: Whether rows are shuffled.
            step_rows: A dict seq_length → rows of a step over all ranks, if the datasets differ in
                seq_length and a sample is a whole step. Otherwise None.

        Returns:
            For each epoch, a tuple (epoch, global sample, index of the row in the sample). The
            index is 0 unless a sample is a whole step. Epochs that the shares never reach are
            missing.
        """
        row = self._place(row)
        d = bisect_right(self._first_row, row) - 1
        numbers = order.samples_of_row(
            row - self._first_row[d], epochs, len(self.datasets[d]), order.seed_of(seed, d), shuffle
        )
        size = 1
        if self.seq_lengths is not None:
            assert step_rows is not None
            size = step_rows[self.seq_lengths[d]]
        samples_found = []
        for epoch, number in enumerate(numbers.tolist()):
            # The first sample beyond a limit of k samples is the sample with the number k, counted
            # from 0.
            sample = order.first_beyond(d, number // size, self.counts, seed, shuffle)
            if sample is not None:
                samples_found.append((epoch, sample, number % size))
        return samples_found

    def rows_of_steps(
        self,
        steps: np.ndarray,
        seed: int,
        shuffle: bool,
        step_rows: Mapping[int, int],
        rank: int,
        world_size: int,
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the rows that one rank reads in some steps, if the datasets differ in seq_length.

        Each step then reads one dataset. If k earlier steps read this dataset, and its steps have n
        rows over all ranks, the step reads samples k · n … (k + 1) · n − 1 of the dataset.

        Args:
            steps: Numbers of steps.
            seed: Random seed of the order.
            shuffle: Whether rows are shuffled.
            step_rows: A dict seq_length → rows of a step over all ranks.
            rank: Index of the rank.
            world_size: Number of ranks.

        Returns:
            A list with a tuple for each step: the rank's rows and their epochs, int64[B] each.
        """
        assert self.seq_lengths is not None
        dataset_numbers, numbers = order.of_samples(steps, self.counts, seed, shuffle)
        rows_and_epochs: list[Any] = [None] * len(dataset_numbers)
        for d, dataset in enumerate(self.datasets):
            indices, of_step = np.flatnonzero(dataset_numbers == d), step_rows[self.seq_lengths[d]]
            own_samples = order.samples_of_step(0, 0, of_step // world_size, rank, world_size)
            samples = numbers[indices][:, None] * of_step + np.array(own_samples)
            rows = order.rows_of_samples(samples, len(dataset), order.seed_of(seed, d), shuffle)
            for i, own_rows, epochs in zip(
                indices.tolist(), self._first_row[d] + rows, samples // len(dataset), strict=True
            ):
                rows_and_epochs[i] = own_rows, epochs
        return rows_and_epochs

    def row_length(self, rows: np.ndarray) -> int:
        """Return the length that all given rows have, in slots.

        Raises:
            ArgumentError: If the rows differ in length.
        """
        if self.seq_lengths is None:
            return self.seq_length
        lengths = {dataset.seq_length for dataset, _, _ in self._split(rows)}
        if len(lengths) > 1:
            raise ArgumentError(
                f"rows of {' and '.join(map(str, sorted(lengths)))} positions cannot be in one"
                " batch\n"
                "hint: request each length separately"
            )
        return lengths.pop() if lengths else self.seq_length

    @property
    def epoch_rows(self) -> None:
        """None, because a mixture has no epochs."""
        return None

    def costs(self, rows: np.ndarray, attention: float = 1, linear: float = 0) -> np.ndarray:
        """Return the cost of each row.

        The cost of a row is attention · Σn² + linear · Σn over its segments of n slots.

        Args:
            rows: Row indices, int64[k].
            attention: Weight of Σn².
            linear: Weight of Σn.

        Returns:
            float64[k].
        """
        costs = np.empty(len(rows))
        for dataset, where, own_rows in self._split(rows):
            costs[where] = dataset.costs(own_rows, attention, linear)
        return costs

    def samples_of_epochs(self, epochs: int) -> int:
        """Raise ArgumentError, because the datasets of a mixture end at different samples."""
        raise ArgumentError(
            f"epochs = {epochs}: a mixture has no epochs, because its datasets end at different"
            " times\n"
            "hint: give samples = N to end after N rows over all ranks"
        )

    def check_redraw(self) -> None:
        """Check that all tasks whose objectives use random numbers can be resampled.

        Raises:
            ArgumentError: If a task of a dataset cannot be resampled.
            DatasetError: If a manifest does not have the values that resampling needs.
        """
        for dataset in self.datasets:
            dataset.check_redraw()

    def tasks_with_loss(self) -> list[StoredTask]:
        """Return the tasks of all datasets that contribute to the loss, dataset after dataset."""
        return [task for dataset in self.datasets for task in dataset.tasks_with_loss()]

    def delivered(self, state: Mapping[str, Any]) -> list[int]:
        """Return how many rows of each dataset had been delivered when a state was saved.

        The numbers are sums over all ranks. They are computed by a formula, without visiting all
        earlier samples. Only for balanced steps, the order of one window is computed.

        Args:
            state: A state from `Batches.state_dict`.

        Returns:
            The number of rows of each dataset.

        Raises:
            StateError: If `state` is not a loader state of this mixture.
        """
        try:
            return self._delivered(state)
        except (ArgumentError, LookupError, TypeError, AttributeError) as error:
            raise StateError(
                f"not a loader state of the mixture ({error!s:.200})\n"
                "hint: pass the result of state_dict()"
            ) from None

    def _delivered(self, state: Mapping[str, Any]) -> list[int]:
        rows = integer("rows", state["rows"], 0, 1 << 62)
        skips = skips_of_state(state)
        position = skips.position(rows)
        counts = self._among_first(position, state)
        # A skipped range is before `position` as a whole, or after it. Its samples were counted,
        # but not delivered.
        for begin, end in skips.ranges:
            if end <= position:
                counts -= self._among_first(end, state) - self._among_first(begin, state)
        if self.seq_lengths is None:
            return counts.tolist()
        sizes = [
            integer(f"step_rows of {length}", state["step_rows"][str(length)], 1, 1 << 62)
            for length in self.seq_lengths
        ]
        return [n * size for n, size in zip(counts.tolist(), sizes, strict=True)]

    def _among_first(self, samples: int, state: Mapping[str, Any]) -> np.ndarray:
        """Count the samples of each dataset among the first samples of the order of a state.

        Args:
            samples: Number of samples, as if nothing were left out.
            state: A state of this mixture, with its seed, shuffle and balance.

        Returns:
            The number of samples of each dataset, int64[D].
        """
        seed = integer("seed", state["seed"], 0, 1 << 64)
        shuffle, balance = true_or_false("shuffle", state["shuffle"]), state.get("balance")
        if balance is None:
            return order.among_first(samples, self.counts, seed, shuffle)
        weights = balance["attention"], balance["linear"]
        batches = self.batches(
            1, seed, balance=(weights, balance["group"]), window=balance["window"]
        )
        # Balancing moves samples only inside windows. So all windows before this one are counted by
        # the formula.
        begin, _ = order.window_of(samples, balance["window"], None)
        begun, _ = order.of_samples(
            batches.plain_samples(np.arange(begin, samples)), self.counts, seed, shuffle
        )
        counts = order.among_first(begin, self.counts, seed, shuffle)
        return counts + np.bincount(begun, minlength=len(counts))

    def with_loss_on(
        self,
        source: str | Iterable[str] | None = None,
        task: str | Iterable[str] | None = None,
        dataset: int | Iterable[int] | None = None,
    ) -> "Mixture":
        """Return a view of the mixture with loss only on the given sources, tasks and datasets.

        All other segments get a loss_mask of 0. Each given name must exist in at least one dataset.
        If a dataset has none of the given sources, or none of the given tasks, all its segments get
        a loss_mask of 0.

        Args:
            source: Name of a source, or several names. None keeps all sources.
            task: Name of a task, or several names. None keeps all tasks.
            dataset: Index of a dataset, or several indices. None keeps all datasets.

        Returns:
            A `Mixture` with the same rows. Only the columns about loss differ.

        Raises:
            ArgumentError: If a name or a dataset does not exist.

        Example:
            >>> web = mixed.with_loss_on(dataset=0)
        """
        names = {
            "source": [
                [entry["name"] for entry in member.manifest["sources"]] for member in self.datasets
            ],
            "task": [[entry["name"] for entry in member.tasks] for member in self.datasets],
        }
        wanted_names = {}
        for kind, choice in (("source", source), ("task", task)):
            wanted_names[kind] = (
                choice if choice is None else [choice] if isinstance(choice, str) else list(choice)
            )
            # A name is valid if any dataset has it.
            known_names = list(
                dict.fromkeys(name for of_dataset in names[kind] for name in of_dataset)
            )
            for name in wanted_names[kind] or ():
                if name not in known_names:
                    choices = ", ".join(map(repr, known_names))
                    raise ArgumentError(
                        f"unknown {kind} {name!r} in all datasets; there are {choices}"
                    )
        every = range(len(self.datasets))
        places = (
            every if dataset is None else [dataset] if isinstance(dataset, int) else list(dataset)
        )
        places = [integer("dataset", place, 0, len(every)) for place in places]
        restricted = []
        for d, member in enumerate(self.datasets):
            # A dataset gets only the names that it has. None keeps all its loss, and an empty list
            # removes it.
            own_choice = {
                kind: choice if choice is None else [n for n in choice if n in names[kind][d]]
                for kind, choice in wanted_names.items()
            }
            restricted.append(
                member.with_loss_on(**own_choice) if d in places else member.with_loss_on(source=[])
            )
        return self._with(datasets=tuple(restricted))


def read_mixture(path: Path) -> dict[str, Any]:
    """Read a mixture.json and return the arguments of `open_dataset`.

    The result has the keys `directory`, `shares`, `interpolate` and `max_epochs`. The paths in the
    file are relative to the file's folder. In the result, each path starts with that folder.

    Raises:
        DatasetError: If the file cannot be read or is invalid.
    """
    try:
        value = mixture_of(read_file(path), str(path))
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error}") from error
    options = {key: value.get(key) for key in ("shares", "interpolate", "max_epochs")}
    return {"directory": [path.parent / name for name in value["datasets"]], **options}


def mixture_of(data: bytes, path: str) -> dict[str, Any]:
    """Parse a mixture.json.

    The shares are not checked here, but when the mixture is opened.

    Args:
        data: The bytes of the file.
        path: Path of the file, for error messages.

    Returns:
        The parsed object. It has the keys `datasets` and `shares`, and may have `interpolate` and
        `max_epochs`.

    Raises:
        DatasetError: If the bytes are not a valid mixture.json.
    """
    value = decode(data, path, canonical=False)  # People may write the file by hand.
    if (
        not isinstance(value, dict)
        or value.get("format") != _FORMAT
        or value.get("version") != VERSION
    ):
        raise DatasetError(
            f'{path} is not a mixture: its format should be "{_FORMAT}", and its version {VERSION}'
        )
    for key in ("datasets", "shares"):
        if key not in value:
            raise DatasetError(f"{path}: key {key!r} is missing")
    for key in value:
        if key not in ("format", "version", "datasets", "shares", "interpolate", "max_epochs"):
            raise DatasetError(
                f"{path}: unknown key {key!r}. It is misspelt, or a newer packprep wrote it"
            )
    names = value["datasets"]
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise DatasetError(
            f"{path}: datasets is {names!r} and should be a list of folders, relative to this file"
        )
    return value


def mixture_file(path: Path, directories: Sequence[str | os.PathLike], **options: Any) -> bytes:
    """Return the bytes of a mixture.json.

    Args:
        path: The path where the file will be written. The datasets' paths in the file are relative
            to the file's folder.
        directories: The folders of the datasets.
        **options: shares, interpolate and max_epochs. Options that are None are left out.

    Returns:
        Canonical JSON.
    """
    names = [Path(os.path.relpath(directory, path.parent)).as_posix() for directory in directories]
    given_options = {key: value for key, value in options.items() if value is not None}
    return encode({"format": _FORMAT, "version": VERSION, "datasets": names, **given_options})


_FORMAT = f"{FORMAT} mixture"


def mixed_opened(
    counts: np.ndarray | order.Schedule,
    max_epochs: Any,
    manifests: Sequence[Any],
    limit: int,
    opened: Callable[[int, int], Any],
) -> Mixture:
    """Open datasets that share one limit of open shards, and return their mixture.

    Args:
        counts: The number of samples of each dataset in a cycle, int64[D], or a `Schedule`.
        max_epochs: The argument of `open_dataset`.
        manifests: The manifests of the datasets.
        limit: Maximum number of open shards over all datasets.
        opened: A function (index of a dataset, its limit of open shards) → the open dataset.

    Returns:
        The `Mixture`.

    Raises:
        ArgumentError: If the datasets cannot be mixed, or max_epochs are invalid.
    """
    bounds = split_bound(limit, [len(manifest["shards"]) for manifest in manifests])
    return Mixture([opened(i, bound) for i, bound in enumerate(bounds)], counts, max_epochs)


def _checked_epochs(max_epochs: Any, n_datasets: int) -> list[int | None]:
    if max_epochs is None:
        return [None] * n_datasets
    if not isinstance(max_epochs, tuple | list) or len(max_epochs) != n_datasets:
        raise ArgumentError(
            f"max_epochs is {max_epochs!r} and should be a list of {n_datasets}: for each dataset"
            " a whole number, or None"
        )
    return [
        None if e is None else integer(f"max_epochs[{d}]", e, 1, 1 << 31)
        for d, e in enumerate(max_epochs)
    ]


def split_bound(max_open: int, shards: Sequence[int]) -> list[int]:
    """Divide a limit of open shards between datasets.

    Datasets with few shards may keep all of them open. The other datasets get equal parts of the
    rest, at least 1 each. A limit of 10 for datasets with 2, 9 and 30 shards gives [2, 4, 4].

    Args:
        max_open: Maximum number of open shards over all datasets.
        shards: Number of shards of each dataset.

    Returns:
        The limit of each dataset.
    """
    bounds, remaining = [1] * len(shards), max_open
    # Small datasets come first, so the shards that they do not need are left for larger ones.
    for n_done, d in enumerate(sorted(range(len(shards)), key=shards.__getitem__)):
        bounds[d] = max(1, min(shards[d], remaining // (len(shards) - n_done)))
        remaining -= bounds[d]
    return bounds


def _check_alike(datasets: Sequence[Any]) -> None:
    """Check that all datasets fit one model, and that each dataset has rows.

    Raises:
        ArgumentError: If datasets differ in tokenizer, vocab_size or pad_id, or a dataset has no
            rows.
    """
    first_dataset = datasets[0]
    for dataset in datasets:
        for name, value_of in _ALIKE.items():
            if value_of(dataset) != value_of(first_dataset):
                raise ArgumentError(
                    f"{name} is {value_of(dataset)!r} in {dataset.directory}, but"
                    f" {value_of(first_dataset)!r} in {first_dataset.directory}, so one model"
                    " cannot read both\n"
                    "hint: build one of them again with the value of the other"
                )
        if len(dataset) == 0:
            raise ArgumentError(
                f"{dataset.directory} has no rows\nhint: leave it out of the mixture"
            )


_ALIKE: dict[str, Callable[[Any], Any]] = {
    "the tokenizer's digest": lambda dataset: dataset.manifest["tokenizer"]["digest"],
    "vocab_size": lambda dataset: dataset.vocab_size,
    "pad_id": lambda dataset: dataset.pad_id,
}
