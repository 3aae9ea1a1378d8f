"""Rows of a shard → Arrow tables, in one of two forms.

nemo   what the readers of packed sequences in NVIDIA NeMo and Megatron-Bridge take: `input_ids`, `loss_mask`, `seq_start_id`.
       Of each segment they make inputs [:-1], targets [1:] and mask [:-1] (`GPTSFTPackedDataset.collate_fn` and
       `_build_loss_mask`): the mask at the predicting slot, where packprep has it too, and nothing across segments.
full   the loader's columns at every slot, labels among them, and what the row's segments are. Nothing is to be shifted.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from packprep.dataset.loader import Dataset
from packprep.dataset.segments import Segments
from packprep.dataset.shard import Shard

SLOTS_AT_ONCE = 1 << 20
"""Slots of a row group, about: what a reader of one row has to decode."""
_FULL = ("tokens", "labels", "loss_mask", "loss_weights", "segment_ids", "position_ids", "prefix_ends")
_TYPES = {"tokens": "i4", "labels": "i4", "segment_ids": "i4"}  # torch can do little with uint16


def row_groups(rows: int, seq_length: int) -> list[range]:
    """The rows of each row group."""
    many = max(1, SLOTS_AT_ONCE // seq_length)
    return [range(begin, min(begin + many, rows)) for begin in range(0, rows, many)]


def schema_of(columns: str, has_blocks: bool, metadata: dict[bytes, bytes]) -> pa.Schema:
    """The columns of a form. has_blocks: whether a task is block diffusion."""
    i4, u1, f4, name = pa.int32(), pa.uint8(), pa.float32(), pa.string()
    if columns == "nemo":
        types = {"input_ids": i4, "loss_mask": u1, "seq_start_id": i4}
    else:
        types = {column: {"loss_mask": u1, "loss_weights": f4}.get(column, i4) for column in _slot_columns(has_blocks)}
        types |= {"segment_begin": i4, "segment_end": i4, "segment_task": name, "segment_source": name}
    return pa.schema([pa.field(key, pa.list_(kind), nullable=False) for key, kind in types.items()], metadata)


def _slot_columns(has_blocks: bool) -> tuple[str, ...]:
    return (*_FULL, "block_lengths") if has_blocks else _FULL


def nemo_table(
    dataset: Dataset, shard: Shard, first_row: int, rows: range, multiple: int, schema: pa.Schema
) -> tuple[pa.Table, int]:
    """Segments one after the other, without the row's padding; and how many of them have two eos among their inputs.

    multiple: the recipe's pad_seq_to_mult. Above 1 a segment is filled up with pad_id to a multiple of it and one more,
    since its last token is no input: what Megatron-Bridge's `pad_seq_to_mult` stores for context parallelism.
    """
    batch = dataset.batch(_numbers(first_row, rows), columns=("tokens", "loss_mask"))
    segments = Segments([(shard, row) for row in rows], dataset.seq_length)
    slots = segments.slots
    stored = -(-(slots - 1) // multiple) * multiple + 1 if multiple > 1 else slots
    begins = np.cumsum(stored) - stored
    within = np.arange(int(slots.sum())) - np.repeat(np.cumsum(slots) - slots, slots)
    source, target = np.repeat(segments.at, slots) + within, np.repeat(begins, slots) + within
    tokens = np.full(int(stored.sum()), dataset.pad_id, np.int32)
    mask = np.zeros(len(tokens), np.uint8)
    tokens[target] = batch["tokens"].reshape(-1)[source]
    mask[target] = batch["loss_mask"].reshape(-1)[source]
    in_row = _offsets(np.bincount(segments.row, stored, len(rows)).astype(np.int64))
    counts = _offsets(np.bincount(segments.row, minlength=len(rows)))
    starts = (begins - in_row[segments.row]).astype(np.int32)
    lists = [_lists(in_row, tokens), _lists(in_row, mask), _lists(counts, starts)]
    eos = batch["tokens"].reshape(-1) == dataset.manifest["specials"].get("eos", -1)
    eos_before = _offsets(eos.astype(np.int64))  # each slot of the rows
    inside = eos_before[segments.at + slots - 1] - eos_before[segments.at] > 1
    return pa.Table.from_arrays(lists, schema=schema), int(inside.sum())


def full_table(dataset: Dataset, shard: Shard, first_row: int, rows: range, schema: pa.Schema) -> pa.Table:
    """All slots of the rows, padding too."""
    names = [name for name in schema.names if not name.startswith("segment_") or name == "segment_ids"]
    batch = dataset.batch(_numbers(first_row, rows), columns=names, dtype=_TYPES)
    segments = Segments([(shard, row) for row in rows], dataset.seq_length)
    counts = _offsets(np.bincount(segments.row, minlength=len(rows)))
    every = _offsets(np.full(len(rows), dataset.seq_length))
    begin = segments.at - segments.row * dataset.seq_length
    lists = [_lists(every, batch[name].reshape(-1)) for name in names]
    lists += [_lists(counts, values.astype(np.int32)) for values in (begin, begin + segments.slots)]
    for what, entries in (("task", dataset.tasks), ("source", dataset.manifest["sources"])):
        index = segments.looked_up(what, np.arange(len(entries), dtype=np.int32))
        lists.append(_lists(counts, pa.array([entry["name"] for entry in entries], pa.string()).take(pa.array(index))))
    return pa.Table.from_arrays(lists, schema=schema)


def _numbers(first_row: int, rows: Sequence[int]) -> np.ndarray:
    return first_row + np.asarray(rows, np.int64)


def _offsets(counts: np.ndarray) -> np.ndarray:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))


def _lists(offsets: np.ndarray, values: Any) -> pa.ListArray:
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), values if isinstance(values, pa.Array) else pa.array(values)
    )
