"""One process' rows of a batch as numpy arrays of fixed shapes, each laid so that JAX on a CPU need not copy it."""

from collections.abc import Collection, Sequence

import numpy as np

from packprep.dataset import attention
from packprep.dataset.loader import COLUMNS, MORE_COLUMNS, Dataset
from packprep.errors import ArgumentError

ROW_COLUMNS = (*COLUMNS, *MORE_COLUMNS, "block_lengths")
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
    dataset: Dataset,
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
    by_header = "block_lengths" in columns or ("prefix_ends" in columns and not prefix_bidirectional)
    stored = {name for name in COLUMNS + MORE_COLUMNS if name in columns} | {"segment_ids"}
    if TRAINED_SEGMENT_IDS in columns:
        stored.add("loss_mask")
    if by_header:
        stored.discard("prefix_ends")
    batch = {name: aligned(shape, _DTYPES.get(name, np.dtype(np.int32))) for name in sorted(stored)}
    dataset.batch(rows, out={name: values[: len(rows)] for name, values in batch.items()}, epochs=epochs)
    for name, values in batch.items():
        values[len(rows) :] = dataset.pad_id if name in ("tokens", "labels") else 0
    if by_header:
        batch |= _from_headers(dataset, rows, shape, prefix_bidirectional)
    if TRAINED_SEGMENT_IDS in columns:
        trained = aligned(shape, np.dtype(np.int32))
        batch[TRAINED_SEGMENT_IDS] = np.multiply(batch["segment_ids"], batch["loss_mask"], out=trained)
    if max_segments is not None:
        batch |= _layouts(batch["segment_ids"], rows, max_segments)
    return batch


def _from_headers(
    dataset: Dataset, rows: np.ndarray, shape: tuple[int, int], prefix_bidirectional: bool
) -> dict[str, np.ndarray]:
    """prefix_ends, −1 in block diffusion, and block_lengths, 0 outside of it; int32."""
    ends, blocks = (aligned(shape, np.dtype(np.int32)) for _ in range(2))
    ends[len(rows) :] = blocks[len(rows) :] = 0
    is_prefix = np.array([task["attention"] == "prefix" for task in dataset.tasks])
    block_length = np.array([_block_length(task) for task in dataset.tasks], np.int32)
    for i, number in enumerate(rows.tolist()):
        row = dataset.row(number)
        task = row.segments["task"]
        read_causally = block_length[task] > 0
        if not prefix_bidirectional:
            read_causally |= is_prefix[task]
        prefix = np.where(read_causally, 0, row.segments["prefix"])
        ends[i] = attention.prefix_ends(row.cu_seqlens, prefix, shape[1], row.cu_seqlens_padded)
        blocks[i] = np.append(0, block_length[task])[row.segment_ids]
        ends[i][blocks[i] > 0] = -1
    return {"prefix_ends": ends, "block_lengths": blocks}


def _block_length(task) -> int:
    return task["parameters"]["block_length"] if task["attention"] == "block_diffusion" else 0


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
