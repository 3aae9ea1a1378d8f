"""A dataset as an iterator over global arrays: each process reads the rows that its devices hold."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from packprep.adapters.jax.columns import LAYOUT_COLUMNS, ROW_COLUMNS, read
from packprep.adapters.jax.names import NAMES, check_attention, check_names
from packprep.adapters.jax.sharding import data_rank, global_arrays
from packprep.adapters.opening import opened, tasks_of
from packprep.dataset import order
from packprep.dataset.loader import COLUMNS, Dataset
from packprep.dataset.manifest import StoredTask
from packprep.dataset.mixture import Mixture
from packprep.errors import ArgumentError

_STEPS_AHEAD = 64


class _Form(NamedTuple):
    """What a batch holds."""

    names: Mapping[str, str]  # name in the batch → column
    max_segments: int | None
    prefix_bidirectional: bool


class Loader:
    """An iterator over global batches, dicts of jax.Arrays; made by `loader`. Its state is that of packprep's own.

    dataset, sharding, batch_size: as given. rank, world_size: this process' share of every batch's rows.
    """

    def __init__(
        self,
        dataset: Dataset | Mixture,
        sharding: Sharding,
        batch_size: int,
        form: _Form,
        options: Mapping[str, Any],
    ):
        # It checks the arguments, and its state says where all processes stand: the rows of one rank of one, with the
        # global batch, are those of all ranks with their shares.
        self._position = dataset.batches(batch_size, **options)
        self._seed, self._shuffle, self._redraw = options["seed"], options["shuffle"], options["redraw"]
        self._form = form
        self._ahead: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self.dataset, self.sharding, self.batch_size = dataset, sharding, batch_size
        self.rank, self.world_size = data_rank(sharding, (batch_size, dataset.seq_length))

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> dict[str, jax.Array]:
        state = self._position.state_dict()
        end = state["rows"] + self.batch_size
        if self._position.end is not None:
            end = min(end, self._position.end)
        if end <= state["rows"]:
            raise StopIteration
        if state["rows"] not in self._ahead:
            self._ahead = self._drawn(state["rows"])
        samples, rows, epochs = self._ahead[state["rows"]]
        rows, anew = rows[samples < end], epochs[samples < end] if self._redraw else None
        names, max_segments, prefix_bidirectional = self._form
        columns = tuple(dict.fromkeys(names.values()))
        batch = read(self.dataset, rows, anew, len(samples), columns, max_segments, prefix_bidirectional)
        arrays = global_arrays(self.sharding, batch, columns, self.batch_size)
        self._position.load_state_dict({**state, "rows": end})  # last: a batch that could not be read is not delivered
        return {name: arrays[column] for name, column in names.items()}

    def _drawn(self, begin: int) -> dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Rows delivered before a step → (global samples, rows, their epochs) of this process' share, for that after
        `begin` and some more, since the order costs as much for many samples as for a few."""
        n_rows, size = len(self.dataset), self.batch_size // self.world_size
        n_steps = max(1, min(_STEPS_AHEAD, n_rows // self.batch_size))  # each epoch in them costs once more
        steps = [order.samples_of_step(begin, k, size, self.rank, self.world_size) for k in range(n_steps)]
        samples = np.array(steps, np.int64)
        rows, epochs = self.dataset.rows_of_samples(samples, self._seed, self._shuffle)
        return {begin + k * self.batch_size: (samples[k], rows[k], epochs[k]) for k in range(n_steps)}

    def state_dict(self) -> dict[str, Any]:
        """{fingerprint, digest, seed, shuffle, redraw, rows}, for json: any process' state serves all."""
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the rows that `state` has delivered, at any batch size and sharding; StateError if it is another
        dataset's, seed's or order's."""
        self._position.load_state_dict(state)


def loader(
    directory: str | os.PathLike | Dataset | Mixture,
    sharding: Sharding | None = None,
    *,
    batch_size: int,
    seed: int = 0,
    shuffle: bool = True,
    epochs: int | None = None,
    samples: int | None = None,
    redraw: bool = False,
    columns: Sequence[str] | None = None,
    names: str = "packprep",
    attention: str | None = None,
    prefix_bidirectional: bool = True,
    max_segments: int | None = None,
) -> Loader:
    """An iterator over global batches, dicts of jax.Arrays of fixed shapes, with state_dict and load_state_dict.

    directory: or what open_dataset gives. A mixture's columns are those that the tasks of any of its datasets need.
    sharding: of arrays [batch_size, T], over the devices of all processes; each process reads the rows that its own
    hold. Default: all on the first device, for one process. batch_size: rows of the global batch.

        tokens labels segment_ids position_ids   int32[batch_size, T]
        loss_mask                                bool[batch_size, T]
        loss_weights                             float32[batch_size, T], where a task predicts in place
        prefix_ends                              int32[batch_size, T], unless attention is "causal"
        block_lengths                            int32[batch_size, T], with "dense" where a task is block diffusion: 0
                                                 outside of it, and prefix_ends is −1 inside
        cu_seqlens cu_seqlens_padded offsets     int32[batch_size, max_segments + 1], with max_segments
        seqlens                                  int32[batch_size, max_segments], with max_segments

    A last batch that is short, with `epochs` or `samples`, is filled up with rows of padding, so that shapes stay as they are.

    seed, shuffle, epochs, samples, redraw: as of `Dataset.batches`. columns: these instead. names: "packprep", "maxtext" or
    "levanter", whose words the columns then have. attention: the path that the model takes, which refuses by name tasks
    that it cannot do: "causal" (a kernel that is told segments alone; the default of MaxText and Levanter), "splash"
    (the default else), "dense". prefix_bidirectional=False reads prefixes causally; what predicts in place sees both
    ways all the same. max_segments: most segments of a row, with the padding behind them as one more; a row with more
    is refused. seqlens (by id, filled with 0) and offsets (filled with −1) are TransformerEngine's.
    Raises ArgumentError and DatasetError.
    """
    dataset = opened(directory)
    tasks = tasks_of(dataset)
    if sharding is None:
        if jax.process_count() > 1:
            raise ArgumentError(f"{jax.process_count()} processes need a sharding over the devices of all")
        sharding = SingleDeviceSharding(jax.local_devices()[0])
    check_names(tasks, names)
    attention = attention or ("splash" if names == "packprep" else "causal")
    check_attention(tasks, attention, prefix_bidirectional)
    if max_segments is not None and max_segments < 1:
        raise ArgumentError(f"max_segments is {max_segments} and should be at least 1")
    if columns is not None:
        if names != "packprep":
            raise ArgumentError(f"names={names!r} says which columns there are: leave columns out")
        for name in columns:
            if name not in ROW_COLUMNS:
                raise ArgumentError(f"no column is called {name!r}; there are {', '.join(ROW_COLUMNS)}")
    form = _Form(_named(tasks, columns, names, attention, max_segments), max_segments, prefix_bidirectional)
    options = {"seed": seed, "shuffle": shuffle, "epochs": epochs, "samples": samples, "redraw": redraw}
    return Loader(dataset, sharding, batch_size, form, options)


def _named(
    tasks: Sequence[StoredTask], columns: Sequence[str] | None, names: str, attention: str, max_segments: int | None
) -> dict[str, str]:
    """Name in the batch → column."""
    if columns is not None:
        own = list(columns)
    else:
        own = [] if names in NAMES else list(COLUMNS)
        if names not in NAMES and any(task["label_alignment"] == "same_slot" for task in tasks):
            own.append("loss_weights")
        if attention != "causal":
            own.append("prefix_ends")
        if attention == "dense" and any(task["attention"] == "block_diffusion" for task in tasks):
            own.append("block_lengths")
    own += LAYOUT_COLUMNS if max_segments is not None else ()
    return {**NAMES.get(names, {}), **{name: name for name in own}}
