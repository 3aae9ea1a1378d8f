"""Rows → a batch: which columns there are, and how each is gathered or derived for all rows at once."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from packprep.dataset.redraw import redrawn
from packprep.dataset.row import row_of
from packprep.dataset.segments import Place, Segments
from packprep.errors import ArgumentError, DatasetError

if TYPE_CHECKING:
    from packprep.dataset.loader import Dataset

COLUMNS = ("tokens", "labels", "segment_ids", "position_ids", "loss_mask")
SUMS = {"n_trained": "loss_mask", "loss_weight_sum": "loss_weights"}  # one number a row, [B], and what it sums
MORE_COLUMNS = ("loss_weights", "prefix_ends", "block_lengths", *SUMS)  # given on request
_KNOWN = frozenset(COLUMNS + MORE_COLUMNS)
_CAST_BY_ONE_DTYPE = ("tokens", "labels", "segment_ids", "position_ids", "prefix_ends")
_OWN_DTYPES: dict[str, np.dtype] = {
    "segment_ids": np.dtype("u2"),
    "loss_mask": np.dtype("u1"),
    "loss_weights": np.dtype("f4"),
    "position_ids": np.dtype("i4"),
    "prefix_ends": np.dtype("i4"),
    "block_lengths": np.dtype("i4"),
    "n_trained": np.dtype("i4"),
    "loss_weight_sum": np.dtype("f4"),
}


def checked_columns(columns: Iterable[str]) -> tuple[str, ...]:
    """The names as a tuple; ArgumentError if one is no column."""
    names = (columns,) if isinstance(columns, str) else tuple(columns)
    for name in names:
        if name not in COLUMNS + MORE_COLUMNS:
            raise ArgumentError(f"no column is called {name!r}; there are {', '.join(COLUMNS + MORE_COLUMNS)}")
    return names


def columns_wanted(
    columns: Iterable[str] | None, out: Mapping[str, np.ndarray] | None, default: tuple[str, ...]
) -> tuple[str, ...]:
    """The columns of a batch: those that are asked for, or else those of `out`, or else the default ones."""
    if columns is not None:
        return checked_columns(columns)
    return default if out is None else checked_columns(out)


def columns_chosen(
    columns: Iterable[str], dtype: Any, token_dtype: np.dtype
) -> tuple[tuple[str, ...], dict[str, np.dtype]]:
    """(columns, column → dtype) that `with_columns` makes the default."""
    return checked_columns(columns), dtypes_chosen(dtype, token_dtype)


def dtypes_chosen(dtype: Any, token_dtype: np.dtype) -> dict[str, np.dtype]:
    """Column → dtype, of every column, where `dtype` is asked for; ArgumentError if it is none, or names no column."""
    _check_keys(dtype)
    return {name: dtype_of(name, token_dtype, dtype) for name in COLUMNS + MORE_COLUMNS}


def _check_keys(dtype: Any) -> None:
    """ArgumentError if `dtype`, as it is asked for, is a mapping with a key that is no column."""
    if isinstance(dtype, Mapping) and not dtype.keys() <= _KNOWN:
        checked_columns(dtype)


def checked_row(index: Any, n_rows: int, of: str) -> int:
    """A row in 0 … n_rows − 1, of an index that may count from the end; IndexError beyond. of: "dataset" or "mixture"."""
    index = operator.index(index)
    if not -n_rows <= index < n_rows:
        raise IndexError(f"row {index} of a {of} of {n_rows} rows")
    return index % n_rows


def check_epochs(epochs: Sequence[int] | np.ndarray, n_rows: int) -> None:
    """ArgumentError unless there is an epoch for each row."""
    if len(epochs) != n_rows:
        raise ArgumentError(f"{len(epochs)} epochs are given for {n_rows} rows")


def checked_rows(indices: Any, n_rows: int) -> np.ndarray:
    """int64[B]: row indices in 0 … n_rows − 1, of those given, which may count from the end; IndexError beyond."""
    given = np.asarray(indices, None if len(indices) else np.int64)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise ArgumentError(f"row indices should be a list of integers, not {given.dtype}{list(given.shape)}")
    outside = (given < -n_rows) | (given >= n_rows)
    if outside.any():
        raise IndexError(f"row {given[outside][0]} of a dataset of {n_rows} rows")
    rows = given.astype(np.int64)
    rows[rows < 0] += n_rows
    return rows


def own_dtype(name: str, token_dtype: np.dtype) -> np.dtype:
    """The dtype that a column has where none is asked for."""
    return _OWN_DTYPES.get(name, token_dtype)


def stored_for(names: Iterable[str]) -> set[str]:
    """The arrays of slots that columns are read from, where a shard has them; boundaries are read besides."""
    wanted = {SUMS.get(name, name) for name in names}
    of: dict[str, tuple[str, ...]] = {"labels": ("labels", "tokens"), "loss_weights": ("loss_mask",)}
    of |= {name: () for name in ("position_ids", "prefix_ends", "block_lengths")}
    return {stored for name in wanted for stored in of.get(name, (name,))}


def dtype_of(name: str, token_dtype: np.dtype, dtype: Any) -> np.dtype:
    """The dtype of a column where `dtype` is asked for: a mapping column → dtype, or one for all columns of ids."""
    if isinstance(dtype, Mapping):
        dtype = dtype.get(name)
    elif name not in _CAST_BY_ONE_DTYPE:
        dtype = None
    if dtype is None:
        return own_dtype(name, token_dtype)
    try:
        return np.dtype(dtype)
    except TypeError as error:
        raise ArgumentError(f"the dtype of {name!r} is {dtype!r} and should be one of numpy's: {error}") from error


def allocated(
    names: Sequence[str],
    rows: int,
    seq_length: int,
    token_dtype: np.dtype,
    dtype: Any,
    out: Mapping[str, np.ndarray] | None,
) -> dict[str, np.ndarray]:
    """The arrays of a batch of so many rows: those of `out`, whose shapes are checked, or else new ones."""
    _check_keys(dtype)
    batch = {}
    for name in names:
        shape = (rows,) if name in SUMS else (rows, seq_length)
        if out is None:
            batch[name] = np.empty(shape, dtype_of(name, token_dtype, dtype))
            continue
        if name not in out:
            raise ArgumentError(f"out has no array for column {name!r}")
        if out[name].shape != shape:
            raise ArgumentError(f"out[{name!r}] has shape {list(out[name].shape)} and should have {list(shape)}")
        batch[name] = out[name]
    return batch


def items_of(batch: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """The rows of a batch one by one, views of it."""
    if len(batch) == 1:
        [(name, rows)] = batch.items()
        return [{name: values} for values in rows]
    return [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]


def gather(dataset: "Dataset", places: Sequence[Place], batch: dict[str, np.ndarray], anew: Mapping[int, int]) -> None:
    """Fill the arrays of `batch`, column → [B, T] of any dtype; `anew`: place in it → epoch, of rows noised anew."""
    if not places:
        return
    sums = {name: batch[name] for name in SUMS if name in batch}
    if not sums:
        _gather_slots(dataset, places, batch, anew)
        return
    slots = {name: values for name, values in batch.items() if name not in SUMS}
    for name in sums:
        column, own = SUMS[name], _OWN_DTYPES[SUMS[name]]
        if column not in slots or slots[column].dtype != own:  # what it is cast to may lose something
            slots[column] = np.empty((len(places), dataset.seq_length), own)
    _gather_slots(dataset, places, slots, anew)
    for name, values in sums.items():
        summed = slots[SUMS[name]]
        if name == "n_trained":
            values[...] = [np.count_nonzero(row) for row in summed]
        else:
            np.copyto(values, summed.sum(axis=1, dtype=np.float64), casting="unsafe")
        if SUMS[name] in batch and batch[SUMS[name]] is not summed:
            np.copyto(batch[SUMS[name]], summed, casting="unsafe")


def _gather_slots(
    dataset: "Dataset", places: Sequence[Place], batch: dict[str, np.ndarray], anew: Mapping[int, int]
) -> None:
    """The same of the columns that have a value for each slot."""
    segments: Segments | None = None
    for name, values in batch.items():
        if name == "loss_weights" and dataset._has_block_diffusion:
            _copy_weights(dataset, values, places, anew)
            continue
        if name in MORE_COLUMNS:
            segments = segments or Segments(places, dataset.seq_length)
            derived = _derived_for_all(dataset, name, segments, "block_lengths" in batch)
            values[...] = derived.reshape(values.shape)
            continue
        lacking = _copy_stored(name, values, places)
        restricted = name == "loss_mask" and dataset._loss_on is not None
        if not lacking and not restricted:
            continue
        if segments is None:
            segments = Segments(places, dataset.seq_length)
        if lacking:
            _derive(dataset, name, values, segments, lacking)
        if restricted:
            kept = dataset._loss_is_on(segments).reshape(values.shape)
            np.multiply(values, kept, out=values, casting="unsafe")
    if anew:
        _redraw(dataset, batch, places, anew)


def _copy_stored(name: str, values: np.ndarray, places: Sequence[Place]) -> list[int]:
    """Copy a column's rows from the shards that have it; gives the places of the rows whose shards have not."""
    if places[0][0].io == "pread":
        lacking = [i for i, (shard, _) in enumerate(places) if name not in shard.layout]
        for target, (shard, row) in zip(values, places, strict=True):
            if name in shard.layout:
                shard.read_arrays[name].read_row(row, target)
        return lacking
    if name == "tokens":
        for target, (shard, row) in zip(values, places, strict=True):
            target[...] = shard.tokens[row]
        return []
    lacking = []
    for i, (shard, row) in enumerate(places):
        stored = shard.arrays.get(name)
        if stored is None:
            lacking.append(i)
        else:
            values[i] = stored[row]
    return lacking


def _derive(dataset: "Dataset", name: str, values: np.ndarray, segments: Segments, lacking: list[int]) -> None:
    """Derive a column that the header determines, for the rows at `lacking` places."""
    if name == "labels":  # all shards have them, or none
        for target, (shard, row) in zip(values, segments.places, strict=True):
            target[:-1] = shard.tokens[row][1:]
        rows, slots = np.divmod(segments.without_next(), values.shape[1])
        values[rows, slots] = dataset.pad_id
        return
    if name == "position_ids":
        flat = segments.position_ids(dataset._is_in_halves(segments))
    elif name == "segment_ids":
        flat = segments.segment_ids()
    else:
        flat = segments.next_token_loss_mask()
    derived = flat.reshape(values.shape)
    if len(lacking) == len(values):
        values[...] = derived
    else:
        values[lacking] = derived[lacking]


def _derived_for_all(dataset: "Dataset", name: str, segments: Segments, with_blocks: bool) -> np.ndarray:
    """block_lengths, prefix_ends (−1 in block diffusion with_blocks), or loss_weights of rows without block diffusion,
    one row after the other."""
    if name in ("block_lengths", "prefix_ends"):
        of_segments = _block_lengths(dataset, segments) if with_blocks and dataset._has_block_diffusion else None
        if name == "prefix_ends":
            return segments.prefix_ends(None if of_segments is None else of_segments > 0)
        return np.zeros(segments.size, np.int32) if of_segments is None else segments.at_slots(of_segments, 0)
    loss_mask = np.empty((len(segments.places), dataset.seq_length), np.uint8)
    _gather_slots(dataset, segments.places, {"loss_mask": loss_mask}, {})
    return segments.at_slots(segments.column("loss_weight"), 0) * loss_mask.reshape(-1)


def _block_lengths(dataset: "Dataset", segments: Segments) -> np.ndarray:
    """int32[m]: each segment's block length, 0 without block diffusion; DatasetError if the manifest has none."""
    table = np.zeros(len(dataset.tasks), np.int32)
    for i in np.flatnonzero(dataset._is_block_diffusion).tolist():
        length = dataset.tasks[i]["parameters"].get("block_length")
        if type(length) is not int or not 1 <= length < 1 << 31:
            name = dataset.tasks[i]["name"]
            raise DatasetError(f"{dataset.directory}: task {name} has no block_length in the manifest; build it again")
        table[i] = length
    return segments.looked_up("task", table)


def _copy_weights(dataset: "Dataset", values: np.ndarray, places: Sequence[Place], anew: Mapping[int, int]) -> None:
    """loss_weights of rows in which a block may have its own, row by row."""
    for i, (shard, row) in enumerate(places):
        if i not in anew:
            values[i] = row_of(dataset, -1, shard, row).loss_weights


def _redraw(dataset: "Dataset", batch: dict[str, np.ndarray], places: Sequence[Place], anew: Mapping[int, int]) -> None:
    """Fill in tokens, loss_mask and loss_weights of the rows that are noised anew, as far as they are wanted."""
    if not {"tokens", "loss_mask", "loss_weights"} & set(batch):
        return
    by_ranges: dict[bool, list[int]] = {}  # shards without a supervised document have no ranges that limit noise
    for i in anew:
        by_ranges.setdefault("trained_ranges" in places[i][0].layout, []).append(i)
    for which in by_ranges.values():
        _redraw_alike(dataset, batch, places, which, np.array([anew[i] for i in which], np.int64))


def _redraw_alike(
    dataset: "Dataset", batch: dict[str, np.ndarray], places: Sequence[Place], which: list[int], epochs: np.ndarray
) -> None:
    """Redraw the rows at the places `which`, whose shards all have trained ranges, or none of them."""
    own = [places[i] for i in which]
    every = len(which) == len(places)
    direct: dict[str, np.ndarray] = {
        name: batch[name]
        for name in ("tokens", "loss_mask")
        if every
        and name in batch
        and batch[name].flags.c_contiguous
        and batch[name].dtype == own_dtype(name, dataset.token_dtype)
    }
    made = redrawn(dataset._laws, own, epochs, dataset.seq_length, "loss_weights" in batch, direct)
    if dataset._loss_on is not None:
        kept = dataset._loss_is_on(Segments(own, dataset.seq_length))
        np.multiply(made.loss_mask, kept.reshape(made.loss_mask.shape), out=made.loss_mask)
    if made.loss_weights is not None:
        np.multiply(made.loss_weights, made.loss_mask, out=made.loss_weights)
    for name, rows in made._asdict().items():
        if name in batch and name not in direct:
            batch[name][slice(None) if every else which] = rows
