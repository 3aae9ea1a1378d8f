"""Several datasets as one: their rows one dataset after the other, and batches that take from each
by its share.

open_dataset([a, b], shares=[0.7, 0.3]) ─► Mixture ── batches(…) ── order.py: sample → (dataset, its number)
                                                                    its number → (row, epoch)
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
from packprep.errors import ArgumentError, DatasetError, StateError
from packprep.format import read_file
from packprep.format.json_files import FORMAT, VERSION, decode, encode


class Mixture(Reader):
    """Rows of several datasets, in the order in which they were given; made by open_dataset.

    datasets: each as a Dataset of its own, with its tasks, sources and manifest. counts: int64[D],
    samples of each in a cycle, or the Schedule of shares that change. shares: float64[D], what they
    come to; of a schedule float64[points, D]. vocab_size, pad_id: as all of them have. seq_length:
    the longest; where they differ, seq_lengths has that of each dataset, and each step is of one.
    encoder_length: 0 where they differ. token_dtype: the widest. max_epochs: of each dataset, or
    None. It may be pickled, forked, and read by several threads, as a Dataset.
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
        first = datasets[0]
        self.vocab_size, self.pad_id = first.vocab_size, first.pad_id
        self.token_dtype = np.result_type(*(dataset.token_dtype for dataset in datasets))
        self._first_row = [0, *accumulate(map(len, datasets))]  # of each dataset, and the end
        self.max_epochs = _checked_epochs(max_epochs, len(self.datasets))

    def __repr__(self) -> str:
        return f"Mixture({', '.join(map(repr, self.datasets))}: shares {self.shares.tolist()})"

    def __str__(self) -> str:
        shares = (
            " → ".join(f"{share:.2%}" for share in np.atleast_1d(own)) for own in self.shares.T
        )
        what = "samples" if self.seq_lengths is None else "steps"
        trees = (
            f"{share} of {what}: {dataset}"
            for share, dataset in zip(shares, self.datasets, strict=True)
        )
        lines = [f"mixture of {len(self.datasets)} datasets", *trees]
        if isinstance(self.counts, order.Schedule) and len(self.counts.points) > 1:
            lines[0] += (
                f", shares at {what} {', '.join(f'{point:,}' for point in self.counts.points)}"
            )
        return "\n".join(lines)

    def exhausted_at(
        self, seed: int = 0, shuffle: bool = True, step_rows: Mapping[int, int] | None = None
    ) -> int | None:
        """The first sample that a dataset's max_epochs do not allow; None: there is none.

        step_rows: where seq_lengths differ, and a sample is a step: {seq_length: rows of a step
        over all ranks}.
        """
        if self.seq_lengths is not None and step_rows is None:
            raise ArgumentError(
                "rows differ in seq_length: give step_rows = {seq_length: rows of a step over all"
                " ranks}"
            )
        found = self.exhaustion(seed, shuffle, step_rows)
        return None if found is None else found[0]

    def exhaustion(
        self, seed: int, shuffle: bool, step_rows: Mapping[int, int] | None
    ) -> tuple[int, str] | None:
        """(the first sample that cannot be given, which dataset is exhausted); None: all can be
        given."""
        ends = []
        for d, epochs in enumerate(self.max_epochs):
            if epochs is not None:
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
        of, epochs = self.datasets[d], self.max_epochs[d]
        return (
            end,
            (
                f"dataset {d} of the mixture, {of.directory}, has given its max_epochs = {epochs},"
                f" of {len(of)} rows,"
            ),
        )

    def __len__(self) -> int:
        """The rows of all datasets together; their shares do not enter."""
        return self._first_row[-1]

    @property
    def fingerprint(self) -> str:
        """32 hex digits, of the datasets' fingerprints and their samples in a cycle, or their
        schedule."""
        return self._fingerprint([dataset.fingerprint for dataset in self.datasets])

    def fingerprint_at(self, digest: str) -> str | None:
        """The fingerprint that went with this digest, as of a Dataset: each dataset may have lost
        documents since."""
        digests = digest.split(",")
        if len(digests) != len(self.datasets):
            return None
        known = [
            dataset.fingerprint_at(own) for dataset, own in zip(self.datasets, digests, strict=True)
        ]
        return None if None in known else self._fingerprint(known)

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
        """Those of the datasets, in their order, with commas between them."""
        return ",".join(dataset.digest for dataset in self.datasets)

    def row(self, index: int, epoch: int = 0) -> Row:
        """Row `index` of all rows, dataset after dataset, drawn anew above epoch 0; the Row's own
        index and dataset are those of its dataset."""
        index = self._place(index)
        number = bisect_right(self._first_row, index) - 1
        return self.datasets[number].row(index - self._first_row[number], epoch)

    def _split(self, rows: np.ndarray) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
        """(dataset, places in `rows`, rows of it) of each dataset that has some of the rows."""
        numbers = np.searchsorted(self._first_row, rows, side="right") - 1
        for number, dataset in enumerate(self.datasets):
            where = np.flatnonzero(numbers == number)
            if len(where):
                yield dataset, where, rows[where] - self._first_row[number]

    def _find(self, rows: np.ndarray) -> list[tuple[Any, np.ndarray, np.ndarray]]:
        return list(self._split(rows))

    def _fill(
        self,
        found: list[Any],
        batch: dict[str, np.ndarray],
        epochs: Sequence[int] | None,
        accelerate: str,
    ) -> None:
        for dataset, where, own in found:
            anew = [epochs[i] for i in where.tolist()] if epochs is not None else None
            part = batch
            if len(found) > 1:
                part = {
                    name: np.empty((len(own), *values.shape[1:]), values.dtype)
                    for name, values in batch.items()
                }
            dataset._fill(dataset._find(own), part, anew, accelerate)
            if part is not batch:
                for name, values in part.items():
                    batch[name][where] = values

    @property
    def kinds(self) -> tuple[str, ...]:  # type: ignore[override]
        """The kinds of media that any of its datasets has, by name."""
        return tuple(sorted({kind for dataset in self.datasets for kind in dataset.kinds}))

    def _media(self, found: list[Any]) -> Media:
        parts = [dataset._media(dataset._find(own)) for dataset, _, own in found]
        return joined(
            parts,
            self.kinds,
            np.concatenate([np.zeros(0, np.int64), *(where for _, where, _ in found)]),
        )

    def rows_of_samples(
        self, samples: np.ndarray, seed: int, shuffle: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """(rows, epoch of each in its dataset), int64, shaped as `samples`: global samples g ≥
        0."""
        which, numbers = order.of_samples(samples, self.counts, seed, shuffle)
        rows, epochs = np.empty_like(numbers), np.empty_like(numbers)
        for d, dataset in enumerate(self.datasets):
            here = which == d
            if here.any():
                own = order.rows_of_samples(
                    numbers[here], len(dataset), order.seed_of(seed, d), shuffle
                )
                rows[here] = self._first_row[d] + own
                epochs[here] = numbers[here] // len(dataset)
        return rows, epochs

    def rows_of_steps(
        self,
        steps: np.ndarray,
        seed: int,
        shuffle: bool,
        step_rows: Mapping[int, int],
        rank: int,
        world_size: int,
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """(rows, epochs), int64[B], of one rank in each of the steps, which are of one dataset
        each: its k-th has its rows from k · step_rows on."""
        assert self.seq_lengths is not None
        which, numbers = order.of_samples(steps, self.counts, seed, shuffle)
        found: list[Any] = [None] * len(which)
        for d, dataset in enumerate(self.datasets):
            here, of_step = np.flatnonzero(which == d), step_rows[self.seq_lengths[d]]
            own = order.samples_of_step(0, 0, of_step // world_size, rank, world_size)
            samples = numbers[here][:, None] * of_step + np.array(own)
            rows = order.rows_of_samples(samples, len(dataset), order.seed_of(seed, d), shuffle)
            for i, step, epochs in zip(
                here.tolist(), self._first_row[d] + rows, samples // len(dataset), strict=True
            ):
                found[i] = step, epochs
        return found

    def row_length(self, rows: np.ndarray) -> int:
        """Slots of each of these rows; ArgumentError if they differ."""
        if self.seq_lengths is None:
            return self.seq_length
        lengths = {dataset.seq_length for dataset, _, _ in self._split(rows)}
        if len(lengths) > 1:
            raise ArgumentError(
                f"rows of {' and '.join(map(str, sorted(lengths)))} slots make no one batch: ask"
                " for them apart"
            )
        return lengths.pop() if lengths else self.seq_length

    @property
    def epoch_rows(self) -> None:
        """None: a mixture has no epochs."""
        return None

    def costs(self, rows: np.ndarray, attention: float = 1, linear: float = 0) -> np.ndarray:
        """float64, one for each of `rows`: attention · Σn² + linear · Σn over its segments of n
        slots."""
        costs = np.empty(len(rows))
        for dataset, where, own in self._split(rows):
            costs[where] = dataset.costs(own, attention, linear)
        return costs

    def samples_of_epochs(self, epochs: int) -> int:
        """Refused."""
        raise ArgumentError(
            f"epochs = {epochs}: a mixture has none, since its datasets do not end together; give"
            " samples = N for an end after N rows over all ranks"
        )

    def check_redraw(self) -> None:
        """ArgumentError if a task of some dataset has chance and cannot be drawn anew."""
        for dataset in self.datasets:
            dataset.check_redraw()

    def tasks_with_loss(self) -> list[StoredTask]:
        """Those of all datasets, one dataset after the other."""
        return [task for dataset in self.datasets for task in dataset.tasks_with_loss()]

    def delivered(self, state: Mapping[str, Any]) -> list[int]:
        """How many rows of each dataset the batches with this state have delivered, over all ranks:
        a closed form, but for the window of balanced steps that was begun. StateError where it is
        no loader state."""
        try:
            return self._delivered(state)
        except (ArgumentError, LookupError, TypeError, AttributeError) as error:
            raise StateError(
                f"this is no loader state of the mixture ({error!s:.200}): give what state_dict()"
                " gave"
            ) from None

    def _delivered(self, state: Mapping[str, Any]) -> list[int]:
        rows, seed = (
            integer("rows", state["rows"], 0, 1 << 62),
            integer("seed", state["seed"], 0, 1 << 64),
        )
        shuffle, balance = true_or_false("shuffle", state["shuffle"]), state.get("balance")
        if self.seq_lengths is not None:
            sizes = [
                integer(f"step_rows of {length}", state["step_rows"][str(length)], 1, 1 << 62)
                for length in self.seq_lengths
            ]
            steps = order.among_first(rows, self.counts, seed, shuffle).tolist()
            return [n * size for n, size in zip(steps, sizes, strict=True)]
        if balance is None:
            return order.among_first(rows, self.counts, seed, shuffle).tolist()
        weights = balance["attention"], balance["linear"]
        batches = self.batches(
            1, seed, balance=(weights, balance["group"]), window=balance["window"]
        )
        begin, _ = order.window_of(rows, balance["window"], None)
        begun, _ = order.of_samples(
            batches.plain_samples(np.arange(begin, rows)), self.counts, seed, shuffle
        )
        whole = order.among_first(begin, self.counts, seed, shuffle)
        return (whole + np.bincount(begun, minlength=len(whole))).tolist()

    def with_loss_on(
        self,
        source: str | Iterable[str] | None = None,
        task: str | Iterable[str] | None = None,
        dataset: int | Iterable[int] | None = None,
    ) -> "Mixture":
        """A mixture of these rows, with loss_mask 0 outside these sources, tasks and datasets (a
        name or place, or several).

        A name has to exist in some dataset; those that have none of the names keep no loss.
        """
        names = {
            "source": [
                [entry["name"] for entry in each.manifest["sources"]] for each in self.datasets
            ],
            "task": [[entry["name"] for entry in each.tasks] for each in self.datasets],
        }
        wanted = {}
        for what, given in (("source", source), ("task", task)):
            wanted[what] = (
                given if given is None else [given] if isinstance(given, str) else list(given)
            )
            known = list(dict.fromkeys(name for own in names[what] for name in own))
            for name in wanted[what] or ():
                if name not in known:
                    there = ", ".join(map(repr, known))
                    raise ArgumentError(
                        f"no {what} of any dataset is called {name!r}; there are {there}"
                    )
        every = range(len(self.datasets))
        places = (
            every if dataset is None else [dataset] if isinstance(dataset, int) else list(dataset)
        )
        places = [integer("dataset", place, 0, len(every)) for place in places]
        kept = []
        for d, each in enumerate(self.datasets):
            own = {
                w: g if g is None else [name for name in g if name in names[w][d]]
                for w, g in wanted.items()
            }
            kept.append(each.with_loss_on(**own) if d in places else each.with_loss_on(source=[]))
        return self._with(datasets=tuple(kept))


def read_mixture(path: Path) -> dict[str, Any]:
    """What a mixture.json says, as open_dataset takes it: the datasets' folders, which are named
    from where it lies, shares, interpolate, max_epochs. DatasetError where it cannot be read."""
    try:
        value = mixture_of(read_file(path), str(path))
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error}") from error
    options = {key: value.get(key) for key in ("shares", "interpolate", "max_epochs")}
    return {"directory": [path.parent / name for name in value["datasets"]], **options}


def mixture_of(data: bytes, path: str) -> dict[str, Any]:
    """The value of a mixture.json that lies at `path`, of which its shares are for who opens it to
    check. DatasetError if it is none."""
    value = decode(data, path, canonical=False)  # people may write it
    if (
        not isinstance(value, dict)
        or value.get("format") != _FORMAT
        or value.get("version") != VERSION
    ):
        raise DatasetError(
            f'{path} is no mixture: its format should be "{_FORMAT}", and its version {VERSION}'
        )
    for key in ("datasets", "shares"):
        if key not in value:
            raise DatasetError(f"{path}: key {key!r} is missing")
    for key in value:
        if key not in ("format", "version", "datasets", "shares", "interpolate", "max_epochs"):
            raise DatasetError(
                f"{path}: key {key!r} is not known; it is misspelt, or a newer packprep wrote it"
            )
    names = value["datasets"]
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise DatasetError(
            f"{path}: datasets is {names!r} and should be a list of folders, named from where this"
            " file lies"
        )
    return value


def mixture_file(path: Path, directories: Sequence[str | os.PathLike], **options: Any) -> bytes:
    """The bytes of a mixture.json at `path`. options: shares, and interpolate and max_epochs where
    they are given."""
    names = [Path(os.path.relpath(directory, path.parent)).as_posix() for directory in directories]
    given = {key: value for key, value in options.items() if value is not None}
    return encode({"format": _FORMAT, "version": VERSION, "datasets": names, **given})


_FORMAT = f"{FORMAT} mixture"


def mixed_opened(
    counts: np.ndarray | order.Schedule,
    max_epochs: Any,
    manifests: Sequence[Any],
    limit: int,
    opened: Callable[[int, int], Any],
) -> Mixture:
    """The mixture of the datasets that `opened` gives by place and bound on open shards, together
    at most `limit`."""
    bounds = split_bound(limit, [len(manifest["shards"]) for manifest in manifests])
    return Mixture([opened(i, bound) for i, bound in enumerate(bounds)], counts, max_epochs)


def _checked_epochs(max_epochs: Any, n_datasets: int) -> list[int | None]:
    if max_epochs is None:
        return [None] * n_datasets
    if not isinstance(max_epochs, tuple | list) or len(max_epochs) != n_datasets:
        raise ArgumentError(
            f"max_epochs is {max_epochs!r} and should be a list of {n_datasets}, one for each"
            " dataset: a whole number, or None"
        )
    return [
        None if e is None else integer(f"max_epochs[{d}]", e, 1, 1 << 31)
        for d, e in enumerate(max_epochs)
    ]


def split_bound(max_open: int, shards: Sequence[int]) -> list[int]:
    """How many shards each dataset may hold open, at least one: small datasets all of theirs,
    others the same of the rest.

    10, [2, 9, 30] → [2, 4, 4]
    """
    bounds, left = [1] * len(shards), max_open
    for done, d in enumerate(sorted(range(len(shards)), key=shards.__getitem__)):
        bounds[d] = max(1, min(shards[d], left // (len(shards) - done)))
        left -= bounds[d]
    return bounds


def _check_alike(datasets: Sequence[Any]) -> None:
    """Refuse, by name, what one model cannot read together, and a dataset without rows."""
    first = datasets[0]
    for dataset in datasets:
        for name, of in _ALIKE.items():
            if of(dataset) != of(first):
                raise ArgumentError(
                    f"{name} of {dataset.directory} is {of(dataset)!r}, of {first.directory}"
                    f" {of(first)!r}: one model cannot read both; build one of them again with the"
                    " other's"
                )
        if len(dataset) == 0:
            raise ArgumentError(f"{dataset.directory} has no rows: leave it out of the mixture")


_ALIKE: dict[str, Callable[[Any], Any]] = {
    "the tokenizer's digest": lambda dataset: dataset.manifest["tokenizer"]["digest"],
    "vocab_size": lambda dataset: dataset.vocab_size,
    "pad_id": lambda dataset: dataset.pad_id,
}
