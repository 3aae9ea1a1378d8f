"""One process' rows of a batch as numpy arrays of fixed shapes, each laid so that JAX on a CPU need not copy it."""

from collections.abc import Collection, Sequence

import numpy as np

from packprep.dataset import attention
from packprep.dataset.gathering import COLUMNS, MORE_COLUMNS, SUMS
from packprep.dataset.loader import Dataset
from packprep.dataset.mixture import Mixture
from packprep.errors import ArgumentError

ROW_COLUMNS = tuple(name for name in COLUMNS + MORE_COLUMNS if name not in SUMS)
LAYOUT_COLUMNS = ("cu_seqlens", "cu_seqlens_padded", "seqlens", "offsets")
TRAINED_SEGMENT_IDS = "trained_segment_ids"  # segment_ids where loss_mask is not 0, elsewhere 0

_ALIGNMENT = 64  # bytes: an array that begins elsewhere is copied
_DTYPES = {"loss_mask": np.dtype(bool), "loss_weights": np.dtype(np.float32)}  # all others are int32


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A new array, not filled in, that JAX on a CPU takes without a copy. Arrays made of it share its memory, so it is
    written to once and never used again."""
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
    max_segments: int | None,
    prefix_bidirectional: bool,
) -> dict[str, np.ndarray]:
    """The columns of `rows`, [n_rows, T] each; rows that are missing are padding.

    columns: of ROW_COLUMNS, TRAINED_SEGMENT_IDS, and with max_segments of LAYOUT_COLUMNS; segment_ids come in any case.
    epochs: as of `Dataset.batch`.
    """
    shape = (n_rows, dataset.seq_length)
    stored = {name for name in ROW_COLUMNS if name in columns} | {"segment_ids"}
    if TRAINED_SEGMENT_IDS in columns:
        stored.add("loss_mask")
    batch = {name: aligned(shape, _DTYPES.get(name, np.dtype(np.int32))) for name in sorted(stored)}
    dataset.batch(rows, out={name: values[: len(rows)] for name, values in batch.items()}, epochs=epochs)
    for name, values in batch.items():
        values[len(rows) :] = dataset.pad_id if name in ("tokens", "labels") else 0
    if "prefix_ends" in batch and not prefix_bidirectional:
        _read_prefixes_causally(dataset, rows, batch["prefix_ends"])
    if TRAINED_SEGMENT_IDS in columns:
        trained = aligned(shape, np.dtype(np.int32))
        batch[TRAINED_SEGMENT_IDS] = np.multiply(batch["segment_ids"], batch["loss_mask"], out=trained)
    if max_segments is not None:
        batch |= _layouts(batch["segment_ids"], rows, max_segments)
    return batch


def _read_prefixes_causally(dataset: Dataset | Mixture, rows: np.ndarray, prefix_ends: np.ndarray) -> None:
    """Put the begin of its segment into prefix_ends, [n_rows, T], wherever a task's rule is a prefix."""
    for number, ends in zip(rows.tolist(), prefix_ends, strict=False):
        row = dataset.row(number)
        is_prefix = np.array([task["attention"] == "prefix" for task in row.dataset.tasks])
        begin = np.append(-1, np.where(is_prefix[row.segments["task"]], row.segments["begin"], -1))[row.segment_ids]
        np.copyto(ends, begin, where=begin >= 0, casting="unsafe")


def _layouts(segment_ids: np.ndarray, rows: Sequence[int] | np.ndarray, max_segments: int) -> dict[str, np.ndarray]:
    """LAYOUT_COLUMNS of a batch's rows, whose numbers in the dataset are for messages."""
    n_rows, length = segment_ids.shape
    made = {name: aligned((n_rows, max_segments + (name != "seqlens")), np.dtype(np.int32)) for name in LAYOUT_COLUMNS}
    for i, ids in enumerate(segment_ids):
        try:
            seqlens, offsets = attention.thd(ids, max_segments)
            n = int(ids.max(initial=0))
            real = np.append(0, np.cumsum(seqlens[:n]))
            end = int(offsets[n - 1] + seqlens[n - 1]) if n else 0
            physical = np.append(offsets[:n], end)
            if (
                end < length
            ):  # the padding behind them: kernels leave what is in no segment unwritten, and 0 · NaN is NaN
                real, physical = np.append(real, real[-1] + length - end), np.append(physical, length)
            made["cu_seqlens"][i] = attention.pad_cu_seqlens(real, max_segments + 1)
            made["cu_seqlens_padded"][i] = attention.pad_cu_seqlens(physical, max_segments + 1)
        except ArgumentError as error:
            raise ArgumentError(
                f"row {rows[i]} does not fit max_segments={max_segments}, which counts the padding behind a row's "
                f"segments as one more: {error}"
            ) from error
        made["seqlens"][i], made["offsets"][i] = seqlens, offsets
    return made
