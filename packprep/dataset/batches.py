"""Iteration over batches that can be stopped and taken up exactly, at any number of ranks."""

import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from packprep.dataset import order
from packprep.dataset.gathering import checked_columns, dtypes_chosen
from packprep.errors import ArgumentError, StateError

_AHEAD = (1, 64, 4096)  # the order is drawn for about so many samples at once: at first, then, and from then on
_MOST_ROWS = 1 << 62  # what a state may count
_COUNTS = ("rows", "steps")  # of a state, which differ
_JOINED = {  # keys that joined later, and what nobody knows without them
    "digest": "whether the dataset is the one that it was taken with, or was built again since",
    "redraw": "whether later epochs were noised anew",
}
_INSTEAD = {
    "digest": "a dataset that was built again may hold other rows; open the one whose dataset.json has that digest. If you know "
    "that the rows are the same, take digest out of the state: it is not checked then",
    "redraw": "later epochs would hold other noise; give the redraw that it was taken with",
}


class Reader(Protocol):
    """What is iterated over: a Dataset or a Mixture."""

    @property
    def fingerprint(self) -> str:
        """What determines its rows and their order, but for seed and shuffle."""

    @property
    def digest(self) -> str:
        """Of its manifest, and so of its files."""

    @property
    def token_dtype(self) -> np.dtype:
        """Of its tokens."""

    def __len__(self) -> int:
        """Its rows."""

    def rows_of_samples(self, samples: np.ndarray, seed: int, shuffle: bool) -> tuple[np.ndarray, np.ndarray]:
        """(rows, epoch of each), int64, shaped as `samples`: global samples g ≥ 0."""

    def samples_of_epochs(self, epochs: int) -> int:
        """The samples of so many epochs; ArgumentError where it has no epochs."""

    def check_redraw(self) -> None:
        """ArgumentError if a task cannot be noised anew."""

    def batch(self, indices, out=None, columns=None, dtype=None, epochs=None) -> dict[str, np.ndarray]:
        """Rows `indices` as arrays."""

    def will_need(self, indices: np.ndarray, columns: Sequence[str] | None) -> None:
        """Ask the system to begin reading what `batch` will need of these rows."""


class Batches:
    """Batches of one rank, without end or until `epochs` or `samples`; its state goes on at any world size and batch
    size.

    end: the first global sample that is not delivered; None: it never ends.
    """

    def __init__(
        self,
        dataset: Reader,
        batch_size: int,
        seed: int,
        rank: int,
        world_size: int,
        shuffle: bool,
        epochs: int | None,
        samples: int | None,
        columns: Sequence[str] | None,
        dtype: Any,
        redraw: bool,
        read_ahead: int,
    ):
        self._batch_size = integer("batch_size", batch_size, 1, 1 << 31)
        self._world_size = integer("world_size", world_size, 1, 1 << 31)
        self._rank = integer("rank", rank, 0, world_size)
        if epochs is not None and samples is not None:
            raise ArgumentError(
                f"epochs = {epochs!r} and samples = {samples!r} both say where to end: give one of them"
            )
        self.end: int | None = None
        if epochs is not None:
            self.end = dataset.samples_of_epochs(integer("epochs", epochs, 0, 1 << 31))
        elif samples is not None:
            self.end = integer("samples", samples, 0, _MOST_ROWS)
        if len(dataset) == 0 and self.end != 0:
            raise ArgumentError(f"{dataset!r} has no rows: no batch would ever come")
        if columns is not None:
            columns = checked_columns(columns)
        self.dataset = dataset
        self._seed = integer("seed", seed, 0, 1 << 64)
        self._shuffle = bool(shuffle)
        self._columns = columns
        self._dtype = None if dtype is None else dtypes_chosen(dtype, dataset.token_dtype)  # now, not at a batch
        self._redraw = bool(redraw)
        if self._redraw:
            dataset.check_redraw()  # now, not after an epoch
        self._read_ahead = integer("read_ahead", read_ahead, 0, 1 << 31)
        self._restart(0)

    def _restart(self, rows: int) -> None:
        self._rows = rows  # delivered over all ranks before `_step` 0
        self._step = 0
        self._ahead: deque[tuple[np.ndarray, np.ndarray]] = deque()  # rows and epochs of the next steps
        self._hinted = 0  # of them, from the next one on
        self._draws = 0

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if len(self._ahead) <= self._read_ahead:
            self._draw(self._read_ahead + 1)
        if not self._ahead:
            raise StopIteration
        rows, epochs = self._ahead[0]
        while self._hinted < min(len(self._ahead), self._read_ahead + 1):
            if self._hinted:  # the batch that is read at once needs no hint
                self.dataset.will_need(self._ahead[self._hinted][0], self._columns)
            self._hinted += 1
        anew = epochs if self._redraw else None
        batch = self.dataset.batch(rows, columns=self._columns, dtype=self._dtype, epochs=anew)
        self._ahead.popleft()  # only now: a batch that could not be read is not delivered
        self._hinted -= self._hinted > 0
        self._step += 1
        return batch

    def _draw(self, least: int) -> None:
        """Rows and epochs of further steps, until there are at least so many ahead, or the end is."""
        size, world = self._batch_size, self._world_size
        first = self._step + len(self._ahead)
        steps = max(1, least - len(self._ahead), _AHEAD[min(self._draws, len(_AHEAD) - 1)] // size)
        self._draws += 1
        if self.end is not None:
            steps = min(steps, order.n_steps(self._rows, self.end, size, world) - first)
        if steps <= 0:
            return
        at = [order.samples_of_step(self._rows, first + k, size, self._rank, world) for k in range(steps)]
        samples = np.array(at, np.int64)
        rows, epochs = self.dataset.rows_of_samples(samples, self._seed, self._shuffle)
        kept = samples < (np.iinfo(np.int64).max if self.end is None else self.end)
        self._ahead.extend((r[k], e[k]) for r, e, k in zip(rows, epochs, kept, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """{fingerprint, digest, seed, shuffle, redraw, rows}, for json: where all ranks stand after the steps made so far."""
        rows = self._rows + self._step * self._batch_size * self._world_size
        if self.end is not None:
            rows = max(self._rows, min(rows, self.end))
        of = {"fingerprint": self.dataset.fingerprint, "digest": self.dataset.digest}
        return {**of, "seed": self._seed, "shuffle": self._shuffle, "redraw": self._redraw, "rows": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the rows that `state` has delivered; StateError if it is another dataset's, seed's or order's.

        A state without digest or redraw, of an older packprep, is taken with a warning; the next one has them.
        """
        check_state(state, self.state_dict())
        rows = state["rows"]
        if type(rows) is not int or not 0 <= rows < _MOST_ROWS:
            raise StateError(f"the state's rows is {rows!r} and should be an integer of at least 0")
        self._restart(rows)


def check_state(state: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """StateError unless `state` has the keys of `mine`, and their values where they are no counts; a warning for keys that
    joined later and are absent."""
    if not isinstance(state, Mapping) or not mine.keys() - _JOINED.keys() <= state.keys() <= mine.keys():
        keys = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise StateError(f"a loader state has the keys {sorted(mine)}, not {keys}: give what state_dict() gave")
    for key in mine:
        if key not in _COUNTS and key in state and (type(state[key]), state[key]) != (type(mine[key]), mine[key]):
            instead = "going on would repeat and skip rows; open that dataset, with that seed and shuffle"
            raise StateError(
                f"the state's {key} is {state[key]!r}, this loader's is {mine[key]!r}: {_INSTEAD.get(key, instead)}"
            )
    absent = [key for key in _JOINED if key in mine and key not in state]
    if absent:
        unknown = ", and ".join(_JOINED[key] for key in absent)
        warnings.warn(
            f"the loader state has no {' and no '.join(absent)}, as an older packprep left it: it is taken, and nothing tells "
            f"{unknown}; the next state has {'it' if len(absent) == 1 else 'both'}",
            stacklevel=3,
        )


def integer(name: str, value: Any, least: int, below: int) -> int:
    """`value` as an int in least … below − 1."""
    try:
        number = int(value.__index__())
    except AttributeError:
        number = None
    if number is None or isinstance(value, bool | np.bool_) or not least <= number < below:
        raise ArgumentError(f"{name} is {value!r} and should be an integer in {least} … {below - 1}")
    return number
