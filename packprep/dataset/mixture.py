"""Several datasets as one: their rows one dataset after the other, and batches that take from each by its share.

open_dataset([a, b], shares=[0.7, 0.3]) ─► Mixture ── batches(…) ── shares.py: sample → (dataset, its number)
                                                                    order.py: its number → (row, epoch)
"""

import hashlib
import json
import operator
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from packprep.dataset import order
from packprep.dataset import shares as sharing
from packprep.dataset.batches import Batches, integer
from packprep.dataset.gathering import (
    COLUMNS,
    allocated,
    check_epochs,
    checked_row,
    checked_rows,
    columns_chosen,
    columns_wanted,
    items_of,
)
from packprep.dataset.row import Row
from packprep.errors import ArgumentError

if TYPE_CHECKING:
    from packprep.dataset.loader import Dataset


class Mixture:
    """Rows of several datasets, in the order in which they were given; made by open_dataset.

    datasets: each as a Dataset of its own, with its tasks, sources and manifest. counts: int64[D], samples of each in a
    cycle. shares: float64[D], what they come to. seq_length, vocab_size, pad_id: as all of them have. token_dtype: the
    widest. It may be pickled, forked, and read by several threads, as a Dataset.
    """

    def __init__(self, datasets: Sequence["Dataset"], counts: np.ndarray):
        _check_alike(datasets)
        self.datasets = tuple(datasets)
        self.counts = np.asarray(counts, np.int64)
        self.shares = self.counts / self.counts.sum()
        first = datasets[0]
        self.seq_length, self.vocab_size, self.pad_id = first.seq_length, first.vocab_size, first.pad_id
        self.token_dtype = np.result_type(*(dataset.token_dtype for dataset in datasets))
        self._first_row = [0, *accumulate(map(len, datasets))]  # of each dataset, and the end
        self._columns: tuple[str, ...] = COLUMNS
        self._dtype: Any = None

    def __reduce__(self):
        return _remade, (self.datasets, self.counts, self._columns, self._dtype)

    def __repr__(self) -> str:
        return f"Mixture({', '.join(map(repr, self.datasets))}: shares {self.shares.tolist()})"

    def __len__(self) -> int:
        """The rows of all datasets together; their shares do not enter."""
        return self._first_row[-1]

    @property
    def fingerprint(self) -> str:
        """32 hex digits, of the datasets' fingerprints and their samples in a cycle."""
        parts = [[ds.fingerprint, count] for ds, count in zip(self.datasets, self.counts.tolist(), strict=True)]
        encoded = json.dumps(parts, separators=(",", ":")).encode()
        return hashlib.blake2b(encoded, digest_size=16).hexdigest()

    @property
    def digest(self) -> str:
        """Those of the datasets, in their order, with commas between them."""
        return ",".join(dataset.digest for dataset in self.datasets)

    def row(self, index: int) -> Row:
        """Row `index` of all rows, dataset after dataset; the Row's own index and dataset are those of its dataset."""
        index = checked_row(index, len(self), "mixture")
        number = bisect_right(self._first_row, index) - 1
        return self.datasets[number].row(index - self._first_row[number])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """As Dataset's, of all rows dataset after dataset."""
        return {name: values[0] for name, values in self.batch([operator.index(index)]).items()}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """A list of what mixture[i] gives, views of one gathered batch; torch's DataLoader calls it."""
        return items_of(self.batch(indices))

    def batch(
        self,
        indices: Sequence[int] | np.ndarray,
        out: Mapping[str, np.ndarray] | None = None,
        columns: Sequence[str] | None = None,
        dtype: Any = None,
        epochs: Sequence[int] | np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """Rows `indices` as a dict of arrays, as Dataset.batch."""
        names = columns_wanted(columns, out, self._columns)
        rows = checked_rows(indices, len(self))
        if epochs is not None:
            check_epochs(epochs, len(rows))
        dtype = self._dtype if dtype is None else dtype
        batch = allocated(names, len(rows), self.seq_length, self.token_dtype, dtype, out)
        for dataset, where, own in self._split(rows):
            anew = None if epochs is None else [epochs[i] for i in where.tolist()]
            if len(where) == len(rows):
                dataset.batch(own, out=batch, epochs=anew)
                continue
            for name, values in dataset.batch(own, columns=names, epochs=anew).items():
                batch[name][where] = values
        return batch

    def _split(self, rows: np.ndarray) -> Iterator[tuple["Dataset", np.ndarray, np.ndarray]]:
        """(dataset, places in `rows`, rows of it) of each dataset that has some of the rows."""
        numbers = np.searchsorted(self._first_row, rows, side="right") - 1
        for number, dataset in enumerate(self.datasets):
            where = np.flatnonzero(numbers == number)
            if len(where):
                yield dataset, where, rows[where] - self._first_row[number]

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
        """An iterator over `batch`es, each dataset's rows by its share, in the order of packprep.dataset.shares.

        All as Dataset.batches, but that a mixture has no `epochs`, since its datasets do not end together: `samples` is
        where it ends. Each dataset goes through its own epochs, which are what `redraw` counts.
        """
        return Batches(
            self, batch_size, seed, rank, world_size, shuffle, epochs, samples, columns, dtype, redraw, read_ahead
        )

    def rows_of_samples(self, samples: np.ndarray, seed: int, shuffle: bool) -> tuple[np.ndarray, np.ndarray]:
        """(rows, epoch of each in its dataset), int64, shaped as `samples`: global samples g ≥ 0."""
        which, numbers = sharing.of_samples(samples, self.counts, seed, shuffle)
        rows, epochs = np.empty_like(numbers), np.empty_like(numbers)
        for d, dataset in enumerate(self.datasets):
            here = which == d
            if here.any():
                own = order.rows_of_samples(numbers[here], len(dataset), sharing.seed_of(seed, d), shuffle)
                rows[here] = self._first_row[d] + own
                epochs[here] = numbers[here] // len(dataset)
        return rows, epochs

    def samples_of_epochs(self, epochs: int) -> int:
        """Refused."""
        raise ArgumentError(
            f"epochs = {epochs}: a mixture has none, since its datasets do not end together; give samples = N for an end "
            f"after N rows over all ranks"
        )

    def check_redraw(self) -> None:
        """ArgumentError if a task of some dataset has chance and cannot be drawn anew."""
        for dataset in self.datasets:
            dataset.check_redraw()

    def will_need(self, indices: np.ndarray, columns: Sequence[str] | None = None) -> None:
        """As Dataset.will_need."""
        for dataset, _, own in self._split(checked_rows(indices, len(self))):
            dataset.will_need(own, self._columns if columns is None else columns)

    def delivered(self, state: Mapping[str, Any]) -> list[int]:
        """How many rows of each dataset the batches with this state have delivered, over all ranks: a closed form."""
        counts = sharing.among_first(state["rows"], self.counts, state["seed"], state["shuffle"])
        return counts.tolist()

    def with_loss_on(
        self,
        source: str | Iterable[str] | None = None,
        task: str | Iterable[str] | None = None,
        dataset: int | Iterable[int] | None = None,
    ) -> "Mixture":
        """The same rows, with loss_mask 0 outside these sources, tasks and datasets (a name or place, or several).

        A name has to exist in some dataset; those that have none of the names keep no loss.
        """
        wanted = {"source": _listed(source), "task": _listed(task)}
        for what, names in wanted.items():
            known = [name for each in self.datasets for name in _names_of(each, what)]
            for name in names or ():
                if name not in known:
                    there = ", ".join(map(repr, dict.fromkeys(known)))
                    raise ArgumentError(f"no {what} of any dataset is called {name!r}; there are {there}")
        places = (
            range(len(self.datasets)) if dataset is None else [dataset] if isinstance(dataset, int) else list(dataset)
        )
        places = [integer("dataset", place, 0, len(self.datasets)) for place in places]
        kept = []
        for d, each in enumerate(self.datasets):
            own = {
                what: None if names is None else [name for name in names if name in _names_of(each, what)]
                for what, names in wanted.items()
            }
            kept.append(each.with_loss_on(**own) if d in places else each.with_loss_on(source=[]))
        return _remade(kept, self.counts, self._columns, self._dtype)

    def with_columns(self, columns: Iterable[str] = COLUMNS, dtype: Any = None) -> "Mixture":
        """As Dataset.with_columns."""
        names, chosen = columns_chosen(columns, dtype, self.token_dtype)
        return _remade(self.datasets, self.counts, names, chosen)


def _remade(datasets: Sequence["Dataset"], counts: np.ndarray, columns: tuple[str, ...], dtype: Any) -> Mixture:
    mixture = Mixture(datasets, counts)
    mixture._columns, mixture._dtype = columns, dtype
    return mixture


def split_bound(max_open: int, shards: Sequence[int]) -> list[int]:
    """How many shards each dataset may hold open, at least one: small datasets all of theirs, others the same of the rest.

    10, [2, 9, 30] → [2, 4, 4]
    """
    bounds, left = [1] * len(shards), max_open
    for done, d in enumerate(sorted(range(len(shards)), key=shards.__getitem__)):
        bounds[d] = max(1, min(shards[d], left // (len(shards) - done)))
        left -= bounds[d]
    return bounds


def _listed(names: str | Iterable[str] | None) -> list[str] | None:
    if names is None:
        return None
    return [names] if isinstance(names, str) else list(names)


def _names_of(dataset: "Dataset", what: str) -> list[str]:
    return [entry["name"] for entry in (dataset.tasks if what == "task" else dataset._head["sources"])]


def _check_alike(datasets: Sequence["Dataset"]) -> None:
    """Refuse, by name, what one model cannot read together, and a dataset without rows."""
    first = datasets[0]
    for dataset in datasets:
        for name, of in _ALIKE.items():
            if of(dataset) != of(first):
                raise ArgumentError(
                    f"{name} of {dataset.directory} is {of(dataset)!r}, of {first.directory} {of(first)!r}: one model "
                    "cannot read both; build one of them again with the other's"
                )
        if len(dataset) == 0:
            raise ArgumentError(f"{dataset.directory} has no rows: leave it out of the mixture")


_ALIKE = {
    "seq_length": lambda dataset: dataset.seq_length,
    "the tokenizer's digest": lambda dataset: dataset._head["tokenizer"]["digest"],
    "vocab_size": lambda dataset: dataset.vocab_size,
    "pad_id": lambda dataset: dataset.pad_id,
}
