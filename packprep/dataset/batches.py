"""Iteration over a dataset's batches that can be stopped and taken up exactly, at any number of ranks."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from packprep.dataset import order
from packprep.dataset.gathering import checked_columns
from packprep.errors import ArgumentError, StateError

if TYPE_CHECKING:
    from packprep.dataset.loader import Dataset

_FIRST_AHEAD, _SAMPLES_AHEAD = 64, 4096  # the order is drawn for about so many samples at once: at first, and then
_MOST_ROWS = 1 << 62  # what a state may count


class Batches:
    """Batches of one rank, without end or for `epochs`; its state goes on at any world size and batch size."""

    def __init__(
        self,
        dataset: "Dataset",
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
        batch_size = integer("batch_size", batch_size, 1, 1 << 31)
        world_size = integer("world_size", world_size, 1, 1 << 31)
        rank = integer("rank", rank, 0, world_size)
        if epochs is not None:
            epochs = integer("epochs", epochs, 0, 1 << 31)
        elif len(dataset) == 0:
            raise ArgumentError(f"{dataset.directory} has no rows: batches without `epochs` would never come")
        if columns is not None:
            checked_columns(columns)
        self.dataset = dataset
        self._seed = integer("seed", seed, 0, 1 << 64)
        self._shuffle = bool(shuffle)
        self._batch_size, self._rank, self._world_size, self._epochs = batch_size, rank, world_size, epochs
        self._columns, self._dtype = columns, dtype
        self._redraw = bool(redraw)
        if self._redraw:
            _ = dataset._laws  # refuses a task without one now, not after an epoch
        self._rows = 0  # delivered over all ranks before `_step` 0
        self._step = 0
        self._ahead: list[tuple[np.ndarray, np.ndarray]] = []  # rows and epochs of the next steps, the next one last
        self._next_ahead = _FIRST_AHEAD

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
        steps = max(
            1, min(self._next_ahead // size, n // (size * world))
        )  # no more epochs at once than one and its end
        self._next_ahead = _SAMPLES_AHEAD
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


def integer(name: str, value: Any, least: int, below: int) -> int:
    """`value` as an int in least … below − 1."""
    try:
        number = int(value.__index__())
    except AttributeError:
        number = None
    if number is None or isinstance(value, bool | np.bool_) or not least <= number < below:
        raise ArgumentError(f"{name} is {value!r} and should be an integer in {least} … {below - 1}")
    return number
