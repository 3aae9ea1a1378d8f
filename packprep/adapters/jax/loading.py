"""A dataset as an iterator over global arrays: each process reads the rows that its devices hold,
as numpy arrays of fixed shapes, each laid so that JAX on a CPU need not copy it; and the loss that
its labels are made for.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from packprep.adapters import opened, tasks_of, weights_spans
from packprep.adapters.jax.maxtext import (
    IN_PLACE_NAMES,
    MAXTEXT_NAMES,
    NOISED_SLOTS,
    TRAINED_SEGMENT_IDS,
    TRAINED_SLOTS,
    check_maxtext,
)
from packprep.dataset import boundaries, encoder_decoder, order
from packprep.dataset.attention import RULES, pad_cu_seqlens, thd
from packprep.dataset.batches import refuse_columns
from packprep.dataset.loader import COLUMNS, Dataset
from packprep.dataset.manifest import StoredTask, is_in_place
from packprep.dataset.mixture import Mixture
from packprep.dataset.rows import AHEAD, BY_ROW, MEDIA, MORE_COLUMNS
from packprep.errors import ArgumentError

ROW_COLUMNS = tuple(name for name in COLUMNS + MORE_COLUMNS if name not in BY_ROW)
LAYOUT_COLUMNS = ("cu_seqlens", "cu_seqlens_padded", "seqlens", "offsets")

_ALIGNMENT = 64  # bytes: an array that begins elsewhere is copied
# all others are int32
_DTYPES = {"loss_mask": np.dtype(bool), "loss_weights": np.dtype(np.float32)}
_DTYPES |= {
    name: _DTYPES[next_slot] for name, (next_slot, _) in AHEAD.items() if next_slot in _DTYPES
}
_STEPS_AHEAD = 64

ATTENTION: dict[str, frozenset[str]] = {
    "causal": frozenset(),
    "splash": frozenset({"prefix_ends"}),
    "dense": frozenset({"prefix_ends", "position_ids", "block_lengths"}),
}
"""Attention path → the columns beside segment_ids that it reads, and so the rules that it can do.
"causal": a kernel that is told segments alone."""

NAMES = {
    "maxtext": MAXTEXT_NAMES,
    # The fields of GrugLmExample, whose loss_weight stands at the predicting slot; the ids go into
    # its attn_mask.
    "levanter": {
        "tokens": "tokens",
        "loss_weight": "loss_weights",
        "segment_ids": "segment_ids",
        "position_ids": "position_ids",
    },
    # T5X's, of rows with an encoder's side.
    "seqio": {name: name for name in encoder_decoder.NAMES},
}
"""Trainer → its name → the column. Columns that it has no name for keep their own."""


class _Form(NamedTuple):
    """What a batch holds."""

    names: Mapping[str, str]  # name in the batch → column
    max_segments: int | None
    prefix_bidirectional: bool
    noised_alone: bool  # x_t without x_0, in rows half as long
    is_split: bool  # an encoder's and a decoder's arrays


class Loader:
    """An iterator over global batches, dicts of jax.Arrays; made by `loader`. Its state is that of
    packprep's own.

    dataset, sharding, batch_size: as given. names: of a batch's arrays. seq_length: slots of its
    rows. rank, world_size: this process' share of every batch's rows.
    """

    def __init__(
        self,
        dataset: Dataset | Mixture,
        sharding: Sharding,
        batch_size: int,
        form: _Form,
        options: Mapping[str, Any],
    ):
        # It checks the arguments, and its state says where all processes stand: the rows of one
        # rank of one, with the global batch, are those of all ranks with their shares.
        self._position = dataset.batches(batch_size, **options)
        self._redraw, self._accelerate = options["redraw"], options["accelerate"]
        self._form = form
        self._ahead: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self.dataset, self.sharding, self.batch_size = dataset, sharding, batch_size
        self.names = tuple(form.names)
        self.seq_length = dataset.seq_length // 2 if form.noised_alone else dataset.seq_length
        self.rank, self.world_size = data_rank(sharding, (batch_size, self.seq_length))

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> dict[str, Any]:
        state = self._position.state_dict()
        end = state["rows"] + self.batch_size
        if self._position.end is not None:
            end = min(end, self._position.end)
        if end <= state["rows"]:
            raise StopIteration
        self._position.refuse_exhausted(end)
        if state["rows"] not in self._ahead:
            self._ahead = self._drawn(state["rows"])
        samples, rows, epochs = self._ahead[state["rows"]]
        rows, anew = rows[samples < end], epochs[samples < end] if self._redraw else None
        names = self._form.names
        columns = tuple(dict.fromkeys(names.values()))
        batch = read(self.dataset, rows, anew, len(samples), columns, self._form, self._accelerate)
        arrays = global_arrays(self.sharding, batch, columns, self.batch_size)
        # last: a batch that could not be read is not delivered
        self._position.load_state_dict({**state, "rows": end})
        named: dict[str, Any] = {name: arrays[column] for name, column in names.items()}
        if self.dataset.encoder_length and not self._form.is_split:
            named["encoder_length"] = self.dataset.encoder_length
        return named

    def _drawn(self, begin: int) -> dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Rows delivered before a step → (global samples, rows, their epochs) of this process'
        share, for that after `begin` and some more, since the order costs as much for many samples
        as for a few."""
        n_rows, size = len(self.dataset), self.batch_size // self.world_size
        # each epoch in them costs once more
        n_steps = max(1, min(_STEPS_AHEAD, n_rows // self.batch_size))
        steps = [
            order.samples_of_step(begin, k, size, self.rank, self.world_size)
            for k in range(n_steps)
        ]
        samples = np.array(steps, np.int64)
        rows, epochs = self._position.rows_of_samples(samples)
        return {
            begin + k * self.batch_size: (samples[k], rows[k], epochs[k]) for k in range(n_steps)
        }

    def state_dict(self) -> dict[str, Any]:
        """{fingerprint, digest, seed, shuffle, redraw, rows}, for json: any process' state serves
        all."""
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the rows that `state` has delivered, at any batch size and sharding;
        StateError if it is another dataset's, seed's or order's."""
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
    accelerate: str = "numpy",
    balance: tuple[str | tuple[float, float], int] | None = None,
    window: int | None = None,
    columns: Sequence[str] | None = None,
    names: str = "packprep",
    attention: str | None = None,
    prefix_bidirectional: bool = True,
    max_segments: int | None = None,
    loss_weights: str = "refuse",
) -> Loader:
    """An iterator over global batches, dicts of jax.Arrays of fixed shapes, with state_dict and
    load_state_dict.

    directory: or what open_dataset gives. A mixture's columns are those that the tasks of any of
    its datasets need.
    sharding: of arrays [batch_size, T], over the devices of all processes; each process reads the
    rows that its own hold. Default: all on the first device, for one process. batch_size: rows of
    the global batch.

        tokens labels segment_ids position_ids   int32[batch_size, T]
        loss_mask                                bool[batch_size, T]
        loss_weights                             float32[batch_size, T], where a task predicts in place or documents give weights
        prefix_ends                              int32[batch_size, T], unless attention is "causal"
        block_lengths                            int32[batch_size, T], with "dense" where a task is block diffusion: 0
                                                 outside of it, and prefix_ends is −1 inside
        cu_seqlens cu_seqlens_padded offsets     int32[batch_size, max_segments + 1], with max_segments
        seqlens                                  int32[batch_size, max_segments], with max_segments

    A last batch that is short, with `epochs` or `samples`, is filled up with rows of padding, so
    that shapes stay as they are.

    seed, shuffle, epochs, samples, redraw, accelerate, balance, window: as of `Dataset.batches`.
    columns: these instead. names: "packprep", "maxtext" or "levanter", whose words the columns then
    have, or "seqio": the arrays of `packprep.dataset.encoder_decoder.split`, [batch_size,
    encoder_length] and [batch_size, T − encoder_length], of a dataset with packing.encoder_length,
    which is an int of each batch else. attention: the path that the model takes, which refuses by
    name tasks that it cannot do: "causal" (a kernel that is told segments alone; the default of
    MaxText and Levanter), "splash" (the default else), "dense". prefix_bidirectional=False reads
    prefixes causally; what predicts in place sees both ways all the same. max_segments: most
    segments of a row, with the padding behind them as one more; a row with more is refused. seqlens
    (by id, filled with 0) and offsets (filled with −1) are TransformerEngine's.

    With names="maxtext" tasks that predict in place give what its block diffusion takes:
    corruption_mask (1 where the input is not the text) and targets_loss_mask, int32[batch_size, T].
    Of tasks of block diffusion they are x_t alone, int32 [batch_size, T/2], which earlier blocks
    see as it is. loss_weights: MaxText's loss reads none, so tasks and documents that weight theirs
    are refused, unless "ignore" says that they should not count. Raises ArgumentError and
    DatasetError.
    """
    dataset = opened(directory)
    if dataset.seq_lengths is not None:
        raise ArgumentError(
            f"{dataset!r} has rows of several seq_lengths, and arrays have one shape here: make a"
            " loader for each of its datasets"
        )
    tasks = tasks_of(dataset)
    if sharding is None:
        if jax.process_count() > 1:
            raise ArgumentError(
                f"{jax.process_count()} processes need a sharding over the devices of all"
            )
        sharding = SingleDeviceSharding(jax.local_devices()[0])
    check_names(tasks, names)
    if loss_weights not in ("refuse", "ignore"):
        raise ArgumentError(f"loss_weights is {loss_weights!r} and should be 'refuse' or 'ignore'")
    weighted, in_place = weights_spans(dataset), False
    if names == "maxtext":
        in_place = check_maxtext(dataset, attention, weighted, loss_weights)
    noised_alone = (
        in_place and attention is None and any(RULES[task["attention"]].in_blocks for task in tasks)
    )
    if names == "seqio":
        _check_seqio(dataset, attention, prefix_bidirectional, max_segments)
    elif not in_place or attention is not None:
        attention = attention or ("splash" if names == "packprep" else "causal")
        check_attention(tasks, attention, prefix_bidirectional)
    if max_segments is not None and max_segments < 1:
        raise ArgumentError(f"max_segments is {max_segments} and should be at least 1")
    if columns is not None:
        if names != "packprep":
            raise ArgumentError(f"names={names!r} says which columns there are: leave columns out")
        refuse_columns(columns, without=(*BY_ROW, MEDIA))
        dataset.checked_columns(columns)
    named = _named(tasks, weighted, columns, names, attention or "causal", max_segments)
    named |= IN_PLACE_NAMES if in_place else {}
    form = _Form(named, max_segments, prefix_bidirectional, noised_alone, names == "seqio")
    given: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "epochs": epochs, "samples": samples}
    options = {
        **given,
        "redraw": redraw,
        "accelerate": accelerate,
        "balance": balance,
        "window": window,
    }
    return Loader(dataset, sharding, batch_size, form, options)


def _named(
    tasks: Sequence[StoredTask],
    weighted: bool,
    columns: Sequence[str] | None,
    names: str,
    attention: str,
    max_segments: int | None,
) -> dict[str, str]:
    """Name in the batch → column. weighted: whether documents give weights."""
    if columns is not None:
        own = list(columns)
    else:
        own = [] if names in NAMES else list(COLUMNS)
        if names not in NAMES and (weighted or any(is_in_place(task) for task in tasks)):
            own.append("loss_weights")
        if attention != "causal":
            own.append("prefix_ends")
        if attention == "dense" and any(RULES[task["attention"]].in_blocks for task in tasks):
            own.append("block_lengths")
    own += LAYOUT_COLUMNS if max_segments is not None else ()
    return {**NAMES.get(names, {}), **{name: name for name in own}}


# What the model and the trainer can do


def check_attention(
    tasks: Sequence[StoredTask], attention: str, prefix_bidirectional: bool
) -> None:
    """ArgumentError, by the task's name, if the path cannot do the attention rule of one of the
    tasks."""
    if attention not in ATTENTION:
        raise ArgumentError(
            f"attention is {attention!r} and should be one of {', '.join(map(repr, ATTENTION))}"
        )
    for task in tasks:
        rule = RULES[task["attention"]]
        read = () if rule.ahead == "prefix" and not prefix_bidirectional else rule.columns
        if not ATTENTION[attention].issuperset(read):
            ways = [
                f"attention={name!r}"
                for name, columns in ATTENTION.items()
                if columns.issuperset(read)
            ]
            if rule.ahead == "prefix":
                ways.append("prefix_bidirectional=False, which reads prefixes causally")
            raise ArgumentError(
                f"{attention} attention cannot do task {task['name']!r}, whose attention rule is"
                f" {task['attention']}; use {' or '.join(ways) or 'a model of your own'}"
            )


def check_names(tasks: Sequence[StoredTask], names: str) -> None:
    """ArgumentError if there is no such trainer, or if it cannot train one of the tasks."""
    if names not in ("packprep", *NAMES):
        raise ArgumentError(
            f"names is {names!r} and should be 'packprep', {', '.join(map(repr, NAMES))}"
        )
    if names == "levanter":
        for task in tasks:
            if is_in_place(task):
                raise ArgumentError(
                    f"Levanter's target is the next slot's token, but task {task['name']!r}"
                    " predicts in place"
                )


def _check_seqio(
    dataset: Dataset | Mixture,
    attention: str | None,
    prefix_bidirectional: bool,
    max_segments: int | None,
) -> None:
    """Raises what `encoder_decoder.check_length` does, and ArgumentError for options that say
    nothing of these arrays."""
    encoder_decoder.check_length(dataset.encoder_length)
    if attention is not None or not prefix_bidirectional or max_segments is not None:
        raise ArgumentError(
            "names='seqio' gives the prefixes to an encoder, and lays each side's segments one"
            " behind another: leave attention, prefix_bidirectional and max_segments out"
        )


# The rows of this process


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A new array, not filled in, that JAX on a CPU takes without a copy. Arrays made of it share
    its memory, so it is written to once and never used again."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)


def read(
    dataset: Dataset | Mixture,
    rows: np.ndarray,
    epochs: np.ndarray | None,
    n_rows: int,
    columns: Collection[str],
    form: _Form,
    accelerate: str,
) -> dict[str, np.ndarray]:
    """The columns of `rows`, [n_rows, T] each; rows that are missing are padding.

    columns: of ROW_COLUMNS, those that follow from them, and with max_segments of LAYOUT_COLUMNS;
    segment_ids come in any case. epochs, accelerate: as of `Dataset.batch`.
    """
    shape = (n_rows, dataset.seq_length)
    stored = {name for name in ROW_COLUMNS if name in columns} | {"segment_ids"}
    if form.is_split:
        stored |= {*encoder_decoder.READ, "loss_weights"}
    if TRAINED_SEGMENT_IDS in columns or TRAINED_SLOTS in columns:
        stored.add("loss_mask")
    batch = {name: aligned(shape, _DTYPES.get(name, np.dtype(np.int32))) for name in sorted(stored)}
    dataset.batch(
        rows,
        out={name: values[: len(rows)] for name, values in batch.items()},
        epochs=epochs,
        accelerate=accelerate,
    )
    for name, values in batch.items():
        values[len(rows) :] = dataset.pad_id if _is_token(name) else 0
    if "prefix_ends" in batch and not form.prefix_bidirectional:
        _read_prefixes_causally(dataset, rows, batch["prefix_ends"])
    if form.noised_alone:
        batch = _noised_alone(batch, dataset.pad_id)
    if form.is_split:
        return encoder_decoder.split({**batch, "encoder_length": dataset.encoder_length})
    ids = batch["segment_ids"]
    if TRAINED_SEGMENT_IDS in columns:
        trained = aligned(ids.shape, np.dtype(np.int32))
        batch[TRAINED_SEGMENT_IDS] = np.multiply(ids, batch["loss_mask"], out=trained)
    if TRAINED_SLOTS in columns:
        trained = aligned(ids.shape, np.dtype(np.int32))
        np.copyto(trained, batch["loss_mask"])
        noised = aligned(ids.shape, np.dtype(np.int32))
        np.copyto(noised, (batch["tokens"] != batch["labels"]) & (ids > 0))
        batch |= {TRAINED_SLOTS: trained, NOISED_SLOTS: noised}
    if form.max_segments is not None:
        batch |= _layouts(ids, rows, form.max_segments)
    return batch


def _is_token(name: str) -> bool:
    return AHEAD.get(name, (name,))[0] in ("tokens", "labels")


def _noised_alone(batch: Mapping[str, np.ndarray], pad_id: int) -> dict[str, np.ndarray]:
    """The columns with the first of each segment's two copies, [n_rows, T // 2] each: it begins at
    half of where the segment did.

        segment_ids   1  1  1  1  1  1  .  .  2  2  2  2        two copies of 3, and of 2
        of them       1  1  1  .  2  2
    """
    ids = batch["segment_ids"]
    n_rows, length = ids.shape
    slots = np.arange(length)
    begin, end = boundaries.runs(
        ids, slots, np, lambda values: np.maximum.accumulate(values, axis=-1)
    )
    row, slot = np.nonzero((ids > 0) & (slots < (begin + end) // 2))
    at = slot - (begin[row, slot] + 1) // 2
    halves = {}
    for name, values in batch.items():
        halves[name] = aligned((n_rows, length // 2), values.dtype)
        halves[name][:] = pad_id if _is_token(name) else 0
        halves[name][row, at] = values[row, slot]
    return halves


def _read_prefixes_causally(
    dataset: Dataset | Mixture, rows: np.ndarray, prefix_ends: np.ndarray
) -> None:
    """Put the begin of its segment into prefix_ends, [n_rows, T], wherever a task's rule is a
    prefix."""
    for number, ends in zip(rows.tolist(), prefix_ends, strict=False):
        row = dataset.row(number)
        is_prefix = np.array(
            [RULES[task["attention"]].ahead == "prefix" for task in row.dataset.tasks]
        )
        begin = np.append(-1, np.where(is_prefix[row.segments["task"]], row.segments["begin"], -1))[
            row.segment_ids
        ]
        np.copyto(ends, begin, where=begin >= 0, casting="unsafe")


def _layouts(
    segment_ids: np.ndarray, rows: Sequence[int] | np.ndarray, max_segments: int
) -> dict[str, np.ndarray]:
    """LAYOUT_COLUMNS of a batch's rows, whose numbers in the dataset are for messages."""
    n_rows, length = segment_ids.shape
    made = {
        name: aligned((n_rows, max_segments + (name != "seqlens")), np.dtype(np.int32))
        for name in LAYOUT_COLUMNS
    }
    for i, ids in enumerate(segment_ids):
        try:
            seqlens, offsets = thd(ids, max_segments)
            n = int(ids.max(initial=0))
            real = np.append(0, np.cumsum(seqlens[:n]))
            end = int(offsets[n - 1] + seqlens[n - 1]) if n else 0
            physical = np.append(offsets[:n], end)
            if (
                end < length
                # the padding behind them: kernels leave what is in no segment unwritten, and 0 ·
                # NaN is NaN
            ):
                real, physical = (
                    np.append(real, real[-1] + length - end),
                    np.append(physical, length),
                )
            made["cu_seqlens"][i] = pad_cu_seqlens(real, max_segments + 1)
            made["cu_seqlens_padded"][i] = pad_cu_seqlens(physical, max_segments + 1)
        except ArgumentError as error:
            raise ArgumentError(
                f"row {rows[i]} does not fit max_segments={max_segments}, which counts the padding"
                f" behind a row's segments as one more: {error}"
            ) from error
        made["seqlens"][i], made["offsets"][i] = seqlens, offsets
    return made


# Global arrays


def data_rank(sharding: Any, shape: tuple[int, int]) -> tuple[int, int]:
    """(rank, world size) of this process among those that share the rows of a global batch of
    `shape`, [B, T].

    The rows that this process' devices hold are [rank · B/world size, (rank + 1) · B/world size).
    Axes that do not cut rows do not count: processes that are replicas have the same rank. Raises
    ArgumentError if the sharding does not fit the shape, or if those rows are no such share.
    """
    if not hasattr(sharding, "addressable_devices_indices_map"):
        raise ArgumentError(
            f"sharding is {sharding!r} and should be a jax.sharding.Sharding, as"
            ' NamedSharding(mesh, PartitionSpec("data"))'
        )
    try:
        indices = sharding.addressable_devices_indices_map(shape).values()
    except ValueError as error:
        raise ArgumentError(
            f"the sharding does not fit a batch of {list(shape)}: {error}"
        ) from error
    n_rows = shape[0]
    held = np.zeros(n_rows, bool)
    for rows, *_ in indices:
        held[rows] = True
    rows = np.flatnonzero(held)
    if len(rows) == 0:
        raise ArgumentError(
            "the sharding has no device of this process: build the mesh over the devices of all"
        )
    begin, size = int(rows[0]), len(rows)
    if rows[-1] - begin + 1 != size:
        apart = int(rows[int(np.argmax(np.diff(rows) > 1))])
        raise ArgumentError(
            f"this process' devices hold rows {begin} … {apart} and then row"
            f" {rows[rows > apart][0]} of {n_rows}: order the mesh so that each process' devices"
            " are neighbours on the axes that cut rows"
        )
    if n_rows % size or begin % size:
        raise ArgumentError(
            f"this process' devices hold rows [{begin}, {begin + size}) of {n_rows}, no equal share"
            " of them: give every process equally many devices on the axes that cut rows"
        )
    return begin // size, n_rows // size


def _row_sharding(sharding: Sharding) -> Sharding:
    """The sharding of arrays whose second axis is not the row's slots: only rows are cut."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
    return sharding


def global_arrays(
    sharding: Sharding, batch: Mapping[str, np.ndarray], columns: Collection[str], n_rows: int
) -> dict[str, jax.Array]:
    """These columns of this process' rows as global arrays of `n_rows` rows, which all processes
    make together."""
    cut_by_rows = _row_sharding(sharding)
    arrays = {}
    for name in columns:
        its_sharding = cut_by_rows if name in LAYOUT_COLUMNS else sharding
        shape = (n_rows, batch[name].shape[1])
        arrays[name] = jax.make_array_from_process_local_data(its_sharding, batch[name], shape)
    return arrays


# The loss


def masked_loss(
    logits: jax.Array,
    labels: jax.Array,
    loss_mask: jax.Array,
    loss_weights: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(sum of the trained slots' cross entropies, number of trained slots), float32 and int32
    scalars.

    logits: [B, T, vocabulary]; labels, loss_mask, loss_weights: [B, T]. The prediction made at a
    slot is trained where its loss_mask is not 0, times its loss_weights if given: nothing is
    shifted. What to divide by is the trainer's choice. Logits of other slots take part in neither
    the sum nor its gradient, whatever they are, NaN too: they are replaced before anything is
    computed from them, since 0 · NaN is NaN.
    """
    trained = loss_mask != 0
    logits = jnp.where(trained[..., None], logits.astype(jnp.float32), 0)
    chosen = jnp.take_along_axis(logits, labels[..., None].astype(jnp.int32), axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - chosen
    if loss_weights is not None:
        losses = losses * loss_weights
    return jnp.where(trained, losses, 0).sum(), trained.sum(dtype=jnp.int32)
