"""Read a dataset as JAX global arrays, and compute the loss that its labels are made for.

Each process reads the rows that its devices hold, as NumPy arrays of fixed shapes. The arrays are
aligned so that JAX on a CPU need not copy them.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from packprep.adapters import columns_of_blocks, opened, tasks_of, weights_spans
from packprep.adapters.jax.maxtext import (
    IN_PLACE_NAMES,
    MAXTEXT_NAMES,
    NOISED_SLOTS,
    TRAINED_SEGMENT_IDS,
    TRAINED_SLOTS,
    check_maxtext,
)
from packprep.dataset import boundaries, encoder_decoder, order
from packprep.dataset.attention import RULES, check_segments, pad_cu_seqlens, thd
from packprep.dataset.loader import COLUMNS, Dataset
from packprep.dataset.manifest import StoredTask, is_in_place
from packprep.dataset.mixture import Mixture
from packprep.dataset.rows import AHEAD, BY_ROW, MEDIA, MORE_COLUMNS, padding_value, refuse_columns
from packprep.errors import ArgumentError

ROW_COLUMNS = tuple(name for name in COLUMNS + MORE_COLUMNS if name not in BY_ROW)
LAYOUT_COLUMNS = ("cu_seqlens", "cu_seqlens_padded", "seqlens", "offsets")

# JAX on a CPU copies an array that does not start at a multiple of this many bytes.
_ALIGNMENT = 64
# All other columns are int32.
_DTYPES = {"loss_mask": np.dtype(bool), "loss_weights": np.dtype(np.float32)}
_DTYPES |= {
    name: _DTYPES[next_slot] for name, (next_slot, _) in AHEAD.items() if next_slot in _DTYPES
}

ATTENTION: dict[str, frozenset[str]] = {
    "causal": frozenset(),
    "splash": frozenset({"prefix_ends"}),
    "dense": frozenset({"prefix_ends", "position_ids", "block_lengths", "block_starts"}),
}
"""Columns that each attention path reads in addition to segment_ids.

They determine which attention patterns the path can compute. "causal" is a kernel that reads only
segment ids.
"""

NAMES = {
    "maxtext": MAXTEXT_NAMES,
    # These are the fields of GrugLmExample. Its loss_weight belongs to the predicting slot. Pass
    # the segment ids to its attn_mask.
    "levanter": {
        "tokens": "tokens",
        "loss_weight": "loss_weights",
        "segment_ids": "segment_ids",
        "position_ids": "position_ids",
    },
    # T5X uses these names for rows with an encoder and a decoder sequence.
    "seqio": {name: name for name in encoder_decoder.NAMES},
}
"""Naming scheme → (name in the batch → column). Other columns keep their own names."""


class _Form(NamedTuple):
    """The contents of a batch."""

    names: Mapping[str, str]  # name in the batch → column
    max_segments: int | None
    prefix_bidirectional: bool
    noised_alone: bool  # batches hold only x_t of block diffusion, in rows half as long
    is_split: bool  # batches hold the arrays of an encoder and a decoder


class Loader:
    """An iterator over global batches, created by `loader`. Each batch is a dict of jax.Arrays.

    Its state has the same keys and meaning as the state of `packprep.dataset.Batches`.

    Attributes:
        dataset: The dataset or mixture.
        sharding: Sharding of arrays [batch_size, T].
        batch_size: Rows of a global batch, or a dict from seq_length to rows.
        names: Names of the arrays in a batch.
        seq_length: Slots of a row in the batch, or of the longest rows in any batch.
        rank: Index of this process' share of every batch's rows.
        world_size: Number of shares of a batch's rows.
    """

    def __init__(
        self,
        dataset: Dataset | Mixture,
        sharding: Sharding,
        batch_size: int | Mapping[int, int],
        form: _Form,
        options: Mapping[str, Any],
    ):
        dataset.batches(batch_size, **options)  # This checks the arguments.
        self._redraw, self._accelerate = options["redraw"], options["accelerate"]
        self._form = form
        self.dataset, self.sharding, self.batch_size = dataset, sharding, batch_size
        self.names = tuple(form.names)
        copies = 2 if form.noised_alone else 1
        self.seq_length = dataset.seq_length // copies
        sizes = batch_size if isinstance(batch_size, Mapping) else {dataset.seq_length: batch_size}
        # One state serves all row lengths, so this process must have the same share of each.
        shares = {
            length: data_rank(sharding, (n_rows, length // copies))
            for length, n_rows in sizes.items()
        }
        if len(set(shares.values())) > 1:
            raise ArgumentError(
                "this process has another share of the rows at each seq_length; (index, number of"
                f" shares) is {shares}\n"
                "hint: use a sharding that divides the rows of every length by the same number"
            )
        self.rank, self.world_size = shares[dataset.seq_length]
        # seq_length → this process' rows of a batch. The state of `_position` is valid for all
        # processes, because it counts the rows of all shares.
        self._sizes = {length: n_rows // self.world_size for length, n_rows in sizes.items()}
        self._position = dataset.batches(
            self._sizes, rank=self.rank, world_size=self.world_size, **options
        )

    def __repr__(self) -> str:
        return f"Loader({self._position!r})"

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> dict[str, Any]:
        rows, epochs = self._position.next_rows()
        redrawn_epochs = epochs if self._redraw else None
        n_rows = self._sizes[self.dataset.row_length(rows)]
        names = self._form.names
        columns = tuple(dict.fromkeys(names.values()))
        batch = read(
            self.dataset, rows, redrawn_epochs, n_rows, columns, self._form, self._accelerate
        )
        arrays = global_arrays(self.sharding, batch, columns, n_rows * self.world_size)
        # This comes last, because a batch that could not be read is not delivered.
        self._position.count_delivered()
        named: dict[str, Any] = {name: arrays[column] for name, column in names.items()}
        if self.dataset.encoder_length and not self._form.is_split:
            named["encoder_length"] = self.dataset.encoder_length
        return named

    def state_dict(self) -> dict[str, Any]:
        """Return the state, a dict {fingerprint, digest, seed, shuffle, redraw, rows} for JSON.

        The state of any process restores all processes.
        """
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after the rows that were delivered when `state` was saved.

        The batch size and the sharding may have changed since.

        Raises:
            StateError: If the state belongs to another dataset, seed or order.
        """
        self._position.load_state_dict(state)


def loader(
    directory: str | os.PathLike | Dataset | Mixture,
    sharding: Sharding | None = None,
    *,
    batch_size: int | Mapping[int, int],
    seed: int = 0,
    shuffle: bool = True,
    epochs: int | None = None,
    samples: int | None = None,
    redraw: bool = False,
    accelerate: str = "numpy",
    balance: tuple[str | tuple[float, float], int] | None = None,
    window: int | None = None,
    skip: Sequence[tuple[int, int]] | None = None,
    columns: Sequence[str] | None = None,
    names: str = "packprep",
    attention: str | None = None,
    prefix_bidirectional: bool = True,
    max_segments: int | None = None,
    loss_weights: str = "refuse",
) -> Loader:
    """Return an iterator over global batches. Each batch is a dict of jax.Arrays of fixed shapes.

    The arrays of a batch:

        tokens labels segment_ids position_ids   int32[batch_size, T]
        loss_mask                                bool[batch_size, T]
        loss_weights                             float32[batch_size, T], if losses have weights
        prefix_ends                              int32[batch_size, T], unless attention is "causal"
        block_lengths or block_starts            int32[batch_size, T], if a task is block diffusion
        cu_seqlens cu_seqlens_padded offsets     int32[batch_size, max_segments + 1]
        seqlens                                  int32[batch_size, max_segments], with max_segments

    Slots of block diffusion have prefix_ends −1. Slots of other tasks have block_lengths 0. If
    blocks start at the answers of conversations, batches have block_starts instead of
    block_lengths, and it is −1 at slots of other tasks.

    `seqlens` and `offsets` follow TransformerEngine's layout: one entry per segment, filled up with
    0 in `seqlens` and −1 in `offsets`. Pass one row per call to TransformerEngine, because others
    measured wrong results for several rows with padding (docs/guides/jax.md).

    If `epochs` or `samples` leaves the last batch short, rows of padding fill it up, so that shapes
    stay the same. A mixture's batches have each column that at least one of its datasets needs. In
    a mixture of several seq_lengths, each batch has one of the lengths as T, so a step compiles
    once for each length.

    With names="maxtext", same-position tasks also give the two masks that MaxText's block diffusion
    reads, int32[batch_size, T] each. `corruption_mask` is 1 where the input differs from the text,
    and `targets_loss_mask` is 1 where a slot is trained. If a task uses block diffusion and
    `attention` is None, all arrays contain only x_t and have shape [batch_size, T/2]. A block then
    attends to earlier blocks in their noised form, because the clean x_0 is missing.

    With names="seqio", a batch has the arrays of `packprep.dataset.encoder_decoder.split`,
    [batch_size, encoder_length] and [batch_size, T − encoder_length]. The dataset must have
    `packing.encoder_length`. Under other names, batches of such a dataset have the int
    `encoder_length`.

    Args:
        directory: Dataset folder, or an open `Dataset` or `Mixture`.
        sharding: Sharding of arrays [batch_size, T] over the devices of all processes. Each process
            reads the rows of its devices. By default all arrays are on the first device, which
            works for one process only.
        batch_size: Rows of the global batch. A mixture of several seq_lengths takes {seq_length:
            rows}, as in `Dataset.batches`.
        seed: As in `Dataset.batches`.
        shuffle: As in `Dataset.batches`.
        epochs: As in `Dataset.batches`.
        samples: As in `Dataset.batches`.
        redraw: As in `Dataset.batches`.
        accelerate: As in `Dataset.batches`.
        balance: As in `Dataset.batches`.
        window: As in `Dataset.batches`.
        skip: As in `Dataset.batches`.
        columns: Columns to return instead of the default columns. Only with names="packprep".
        names: Naming scheme of the arrays: "packprep", "maxtext", "levanter" or "seqio".
        attention: Attention path of the model. Tasks that the path cannot compute are refused.
            "causal" is a kernel that reads only segment ids, and the default for MaxText and
            Levanter. "splash" is the default otherwise. "dense" can compute every pattern.
        prefix_bidirectional: Pass False for causal attention also in prefixes. Same-position tasks
            keep their bidirectional attention.
        max_segments: Maximum number of segments per row, where trailing padding counts as one
            segment. A row with more segments is refused when its batch is read.
        loss_weights: Only with names="maxtext", whose loss reads no weights. "refuse" raises an
            error if tasks or documents weight their loss. "ignore" drops the weights.

    Returns:
        A `Loader`, an iterator with `state_dict` and `load_state_dict`.

    Raises:
        ArgumentError: If an argument is invalid, or if the attention path or the trainer cannot
            train a task.
        DatasetError: If the dataset is missing or damaged, or has no encoder_length although
            names="seqio" needs it.

    Example:
        batches = loader("packed", batch_size=8)
        batch = next(batches)
        mask = dense_mask(batch["segment_ids"], batch.get("prefix_ends"))
    """
    dataset = opened(directory)
    if dataset.seq_lengths is not None and names == "maxtext":
        raise ArgumentError(
            f"{dataset!r} has rows of several seq_lengths, but MaxText has one max_target_length\n"
            "hint: make a loader for each of its datasets"
        )
    tasks = tasks_of(dataset)
    # A single process may use one device. Several processes need a sharding that divides the rows.
    if sharding is None:
        if jax.process_count() > 1:
            raise ArgumentError(
                f"{jax.process_count()} processes need a sharding over all of their devices"
            )
        sharding = SingleDeviceSharding(jax.local_devices()[0])
    # Every task is checked before the first batch, because a wrong mask or loss would raise no
    # error later.
    check_names(tasks, names)
    if loss_weights not in ("refuse", "ignore"):
        raise ArgumentError(f"loss_weights is {loss_weights!r} and should be 'refuse' or 'ignore'")
    weighted, in_place = weights_spans(dataset), False
    if names == "maxtext":
        in_place = check_maxtext(dataset, attention, weighted, loss_weights)
    # MaxText builds its own mask, which has no x_0. So its rows contain only x_t.
    noised_alone = (
        in_place and attention is None and any(RULES[task["attention"]].in_blocks for task in tasks)
    )
    # The check of MaxText covers its own mask. All other attention paths are checked here.
    if names == "seqio":
        _check_seqio(dataset, attention, prefix_bidirectional, max_segments)
    elif not in_place or attention is not None:
        attention = attention or ("splash" if names == "packprep" else "causal")
        check_attention(tasks, attention, prefix_bidirectional)
    if max_segments is not None:
        order.integer("max_segments", max_segments, 1, 1 << 31)
    if columns is not None:
        if names != "packprep":
            raise ArgumentError(f"names={names!r} determines the columns\nhint: leave columns out")
        refuse_columns(columns, without=(*BY_ROW, MEDIA))
        dataset.checked_columns(columns)
    named = _named(dataset, weighted, columns, names, attention or "causal", max_segments)
    named |= IN_PLACE_NAMES if in_place else {}
    form = _Form(named, max_segments, prefix_bidirectional, noised_alone, names == "seqio")
    iteration_options: dict[str, Any] = {
        "seed": seed,
        "shuffle": shuffle,
        "epochs": epochs,
        "samples": samples,
    }
    options = {
        **iteration_options,
        "redraw": redraw,
        "accelerate": accelerate,
        "balance": balance,
        "window": window,
        "skip": skip,
    }
    return Loader(dataset, sharding, batch_size, form, options)


def _named(
    dataset: Dataset | Mixture,
    weighted: bool,
    columns: Sequence[str] | None,
    names: str,
    attention: str,
    max_segments: int | None,
) -> dict[str, str]:
    """Return a dict that maps the name of each array in the batch to packprep's column.

    Args:
        dataset: The dataset, or the mixture.
        weighted: Whether documents give loss weights.
        columns: The columns that were asked for, or None for the default columns.
        names: Naming scheme, as in `loader`.
        attention: Attention path, as in `loader`.
        max_segments: As in `loader`.
    """
    if columns is not None:
        column_names = list(columns)
    else:
        column_names = [] if names in NAMES else list(COLUMNS)
        if names not in NAMES and (weighted or any(map(is_in_place, tasks_of(dataset)))):
            column_names.append("loss_weights")
        if attention != "causal":
            column_names.append("prefix_ends")
        if attention == "dense":
            column_names += columns_of_blocks(dataset)
    column_names += LAYOUT_COLUMNS if max_segments is not None else ()
    return {**NAMES.get(names, {}), **{name: name for name in column_names}}


# What the model and the trainer can do


def check_attention(
    tasks: Sequence[StoredTask], attention: str, prefix_bidirectional: bool
) -> None:
    """Check that an attention path can compute the attention pattern of every task.

    Args:
        tasks: The tasks of all datasets.
        attention: "causal", "splash" or "dense".
        prefix_bidirectional: Whether the slots of a prefix attend to each other.

    Raises:
        ArgumentError: If the path is unknown, or if it cannot compute the pattern of a task. The
            message names the task.
    """
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
                f"{attention} attention does not support task {task['name']!r}, whose attention"
                f" pattern is {task['attention']}\n"
                f"hint: use {' or '.join(ways) or 'your own model'}"
            )


def check_names(tasks: Sequence[StoredTask], names: str) -> None:
    """Check that a naming scheme exists and that its trainer can train every task.

    Args:
        tasks: The tasks of all datasets.
        names: Naming scheme, as in `loader`.

    Raises:
        ArgumentError: If the scheme is unknown, or if names="levanter" and a task is a
            same-position task.
    """
    if names not in ("packprep", *NAMES):
        raise ArgumentError(
            f"names is {names!r} and should be 'packprep', {', '.join(map(repr, NAMES))}"
        )
    if names == "levanter":
        for task in tasks:
            if is_in_place(task):
                raise ArgumentError(
                    f"Levanter's target is the next position's token, but task {task['name']!r}"
                    " predicts the same position"
                )


def _check_seqio(
    dataset: Dataset | Mixture,
    attention: str | None,
    prefix_bidirectional: bool,
    max_segments: int | None,
) -> None:
    """Check that the dataset and the options suit names="seqio".

    Raises:
        DatasetError: If encoder_length is missing, as in `encoder_decoder.check_length`.
        ArgumentError: If an option is given that has no meaning for these arrays.
    """
    encoder_decoder.check_length(dataset.encoder_length)
    if attention is not None or not prefix_bidirectional or max_segments is not None:
        raise ArgumentError(
            "names='seqio' gives the prefixes to an encoder, and joins the segments of each"
            " sequence\n"
            "hint: leave attention, prefix_bidirectional and max_segments out"
        )


# The rows of this process


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return a new, uninitialized array that JAX on a CPU takes without a copy.

    JAX arrays made from it share its memory. Fill it once and do not reuse it.

    Args:
        shape: Shape of the array.
        dtype: Data type of the array.

    Returns:
        An array that starts at a multiple of 64 bytes.
    """
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
    """Read columns of `rows` from a dataset, and add rows of padding up to `n_rows` rows.

    Args:
        dataset: The dataset or mixture.
        rows: int64[≤ n_rows], row indices.
        epochs: As in `Dataset.batch`.
        n_rows: Number of rows to return.
        columns: Names from ROW_COLUMNS and columns derived from them. With max_segments, also names
            from LAYOUT_COLUMNS.
        form: The contents of a batch.
        accelerate: As in `Dataset.batch`.

    Returns:
        The columns by name, [n_rows, T] each, where T is the length of the rows. `segment_ids` is
        always among them, except in the arrays of an encoder and a decoder.
    """
    shape = (n_rows, dataset.row_length(rows))
    # Some columns are computed from others, so these are read too.
    stored = {name for name in ROW_COLUMNS if name in columns} | {"segment_ids"}
    if form.is_split:
        stored |= {*encoder_decoder.READ, "loss_weights"}
    if TRAINED_SEGMENT_IDS in columns or TRAINED_SLOTS in columns:
        stored.add("loss_mask")
    batch = {name: aligned(shape, _DTYPES.get(name, np.dtype(np.int32))) for name in sorted(stored)}
    # The arrays are aligned, and the rows are read directly into them.
    dataset.batch(
        rows,
        out={name: values[: len(rows)] for name, values in batch.items()},
        epochs=epochs,
        accelerate=accelerate,
    )
    # XLA compiles a step for each shape, so padding fills up the last batch.
    for name, values in batch.items():
        values[len(rows) :] = padding_value(name, dataset.pad_id)
    if "prefix_ends" in batch and not form.prefix_bidirectional:
        _read_prefixes_causally(dataset, rows, batch["prefix_ends"])
    if form.noised_alone:
        batch = _noised_alone(batch, dataset.pad_id)
    if form.is_split:
        return encoder_decoder.split({**batch, "encoder_length": dataset.encoder_length})
    # MaxText reads its masks as int32 columns, which no shard stores.
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


def _noised_alone(batch: Mapping[str, np.ndarray], pad_id: int) -> dict[str, np.ndarray]:
    """Return only the first half (x_t) of each segment, as columns [n_rows, T // 2].

    A segment's new start is half of its old start. For segments of 3 and 2 tokens:

        segment_ids before   1  1  1  1  1  1  .  .  2  2  2  2
        segment_ids after    1  1  1  .  2  2
    """
    ids = batch["segment_ids"]
    n_rows, length = ids.shape
    slots = np.arange(length)
    begin, end = boundaries.runs(
        ids, slots, np, lambda values: np.maximum.accumulate(values, axis=-1)
    )
    row, slot = np.nonzero((ids > 0) & (slots < (begin + end) // 2))
    # An old start b becomes b // 2, so the halves of a row stay in order and never overlap.
    new_slot = slot - (begin[row, slot] + 1) // 2
    halves = {}
    for name, values in batch.items():
        halves[name] = aligned((n_rows, length // 2), values.dtype)
        halves[name][:] = padding_value(name, pad_id)
        halves[name][row, new_slot] = values[row, slot]
    return halves


def _read_prefixes_causally(
    dataset: Dataset | Mixture, rows: np.ndarray, prefix_ends: np.ndarray
) -> None:
    """Set prefix_ends to the segment's start in segments with a prefix, so that they are causal.

    Args:
        dataset: The dataset or mixture.
        rows: Row indices.
        prefix_ends: int32[n_rows, T], changed in place.
    """
    for number, ends in zip(rows.tolist(), prefix_ends, strict=False):
        row = dataset.row(number)
        is_prefix = np.array(
            [RULES[task["attention"]].ahead == "prefix" for task in row.dataset.tasks]
        )
        # Segment ids count from 1, so entry 0 belongs to padding.
        begin = np.append(-1, np.where(is_prefix[row.segments["task"]], row.segments["begin"], -1))[
            row.segment_ids
        ]
        np.copyto(ends, begin, where=begin >= 0, casting="unsafe")


def _layouts(
    segment_ids: np.ndarray, rows: Sequence[int] | np.ndarray, max_segments: int
) -> dict[str, np.ndarray]:
    """Return a dict with the columns of a batch that LAYOUT_COLUMNS names.

    Args:
        segment_ids: int[n_rows, T].
        rows: Row indices in the dataset, for error messages.
        max_segments: Maximum number of segments per row, including trailing padding.

    Returns:
        int32 arrays: `seqlens` [n_rows, max_segments], the others [n_rows, max_segments + 1].

    Raises:
        ArgumentError: If a row has more segments than `max_segments`.
    """
    n_rows, length = segment_ids.shape
    layout_columns = {
        name: aligned((n_rows, max_segments + (name != "seqlens")), np.dtype(np.int32))
        for name in LAYOUT_COLUMNS
    }
    # Ids count 1, 2, …, so the largest id of a row is its number of segments.
    counts = segment_ids.max(axis=1, initial=0)
    check_segments(counts + (segment_ids[:, -1] == 0), max_segments, rows)
    seqlens, offsets = thd(segment_ids, max_segments)
    layout_columns["seqlens"][:], layout_columns["offsets"][:] = seqlens, offsets
    for i, n in enumerate(counts.tolist()):
        real = np.append(0, np.cumsum(seqlens[i, :n]))
        end = int(offsets[i, n - 1] + seqlens[i, n - 1]) if n else 0
        # Trailing padding becomes a segment, because kernels do not write slots outside segments,
        # and 0 · NaN is NaN.
        physical = pad_cu_seqlens(
            np.append(offsets[i, :n], end), max_segments + 1, length, "segment"
        )
        layout_columns["cu_seqlens_padded"][i] = physical
        layout_columns["cu_seqlens"][i] = pad_cu_seqlens(
            real, max_segments + 1, real[-1] + length - end, "segment"
        )
    return layout_columns


# Global arrays


def data_rank(sharding: Any, shape: tuple[int, int]) -> tuple[int, int]:
    """Return this process' rank and world size among the processes that share a batch's rows.

    The devices of this process hold rows [rank · B/world_size, (rank + 1) · B/world_size). Mesh
    axes that do not partition rows do not count, so processes that are replicas have the same rank.

    Args:
        sharding: A `jax.sharding.Sharding`.
        shape: Shape [B, T] of the global batch.

    Returns:
        (rank, world size).

    Raises:
        ArgumentError: If the sharding does not fit the shape, or if the rows of this process are
            not one equal, contiguous share.
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
    # Devices may be replicas with the same rows, so rows are marked and not counted.
    has_row = np.zeros(n_rows, bool)
    for rows, *_ in indices:
        has_row[rows] = True
    rows = np.flatnonzero(has_row)
    if len(rows) == 0:
        raise ArgumentError(
            "the sharding has no device of this process\n"
            "hint: build the mesh over the devices of all processes"
        )
    begin, size = int(rows[0]), len(rows)
    if rows[-1] - begin + 1 != size:
        apart = int(rows[int(np.argmax(np.diff(rows) > 1))])
        raise ArgumentError(
            f"this process' devices have rows {begin} … {apart} and then row"
            f" {rows[rows > apart][0]} of {n_rows}\n"
            "hint: order the mesh so that each process' devices are adjacent on the axes that"
            " split rows"
        )
    if n_rows % size or begin % size:
        raise ArgumentError(
            f"this process' devices have rows [{begin}, {begin + size}) of {n_rows}, which is not"
            " an equal share\n"
            "hint: give every process equally many devices on the axes that split rows"
        )
    return begin // size, n_rows // size


def _row_sharding(sharding: Sharding) -> Sharding:
    """Return the sharding of arrays [n_rows, …] without an axis of slots, such as `seqlens`.

    Only the row axis is partitioned.
    """
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
    return sharding


def global_arrays(
    sharding: Sharding, batch: Mapping[str, np.ndarray], columns: Collection[str], n_rows: int
) -> dict[str, jax.Array]:
    """Return columns as global arrays, which all processes build together from their rows.

    Args:
        sharding: Sharding of arrays [n_rows, T].
        batch: The columns of this process' rows.
        columns: Names of the columns to convert.
        n_rows: Rows of the global batch.

    Returns:
        A dict from column to jax.Array [n_rows, …].
    """
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
    """Return the summed cross entropy of the trained slots, and the number of trained slots.

    labels[t] is the target of logits[t]: do not shift labels again. The caller chooses the divisor.
    Logits of untrained slots affect neither the sum nor its gradient, even if they are NaN. These
    logits are replaced before anything is computed from them, since 0 · NaN is NaN.

    Args:
        logits: float[B, T, vocabulary].
        labels: int[B, T].
        loss_mask: bool or int[B, T]. A slot is trained where it is not 0.
        loss_weights: float[B, T], factors of each slot's loss, or None for 1.

    Returns:
        A float32 scalar and an int32 scalar.

    Example:
        total, count = masked_loss(logits, batch["labels"], batch["loss_mask"])
        loss = total / count
    """
    trained = loss_mask != 0
    logits = jnp.where(trained[..., None], logits.astype(jnp.float32), 0)
    chosen = jnp.take_along_axis(logits, labels[..., None].astype(jnp.int32), axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - chosen
    if loss_weights is not None:
        losses = losses * loss_weights
    return jnp.where(trained, losses, 0).sum(), trained.sum(dtype=jnp.int32)
