"""Segment table + tokens → the shard's arrays."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from packprep.building.segments import Segments
from packprep.corpus.reading import Documents
from packprep.kernel import kernel
from packprep.objectives.objective import Columns, Slots, Task
from packprep.randomness import ROW_ORDER, SEGMENT_ORDER, bits64


class Layout(NamedTuple):
    """Where each segment of the final table lies."""

    order: np.ndarray  # int64[m]: the final table's i-th segment is segment order[i] of the cut
    row: np.ndarray  # int64[m], ascending
    begin: np.ndarray  # int64[m]: first slot in the row
    rows: int


def arrange(key: np.ndarray, physical: np.ndarray, row: np.ndarray, keep_order: bool) -> Layout:
    """Put rows, and the segments inside a row, in keyed order. `keep_order` (next_fit) leaves both as packed.

    key: uint64[m]; physical: int64[m], slots with the padding inside; row: int64[m], as packed.
    """
    rows = int(row.max()) + 1 if len(row) else 0
    if keep_order:
        order = np.argsort(row, kind="stable")
    else:
        order = np.lexsort((np.arange(len(row)), bits64(key, SEGMENT_ORDER), row))
    row = row[order]
    if rows and not keep_order:
        first = np.searchsorted(row, np.arange(rows))
        shuffled = np.lexsort((np.arange(rows), bits64(key[order[first]], ROW_ORDER)))
        place = np.empty(rows, np.int64)
        place[shuffled] = np.arange(rows)
        again = np.argsort(place[row], kind="stable")
        order, row = order[again], place[row][again]
    ends = np.cumsum(physical[order])
    begins = ends - physical[order]
    first = np.searchsorted(row, np.arange(rows))
    return Layout(order, row, begins - begins[first][row] if rows else begins, rows)


@kernel
def _frame(
    at, slots, bos, mode, eos, prefix, number, next_token, bos_id, mode_id, eos_id,
    tokens, labels, segment_ids, loss_mask, with_labels,
):  # fmt: skip
    """Write what is the same for every objective: bos, mode, eos, segment ids; for next-token kinds labels and loss."""
    for i in range(at.shape[0]):
        begin, end = at[i], at[i] + slots[i]
        if bos[i]:
            tokens[begin] = bos_id
        if mode:
            tokens[begin + bos[i]] = mode_id
        if eos[i]:
            tokens[end - 1] = eos_id
        for t in range(begin, end):
            segment_ids[t] = number[i]
        if next_token:
            for t in range(begin + max(prefix[i] - 1, 0), end - 1):
                loss_mask[t] = 1
            if with_labels:
                for t in range(begin, end - 1):
                    labels[t] = tokens[t + 1]


class Table(NamedTuple):
    """The final segment table: everything that render needs, one array a column, [m] each, in row order."""

    begin: np.ndarray  # int64: index of the first content token in the flat ids
    n: np.ndarray  # int64
    task: np.ndarray  # int64
    bos: np.ndarray  # int64
    eos: np.ndarray  # int64
    key: np.ndarray  # uint64
    slots: np.ndarray  # int64: real slots
    at: np.ndarray  # int64: first slot in the flat rows
    number: np.ndarray  # int64: 1, 2, … in its row


def render_rows(
    tasks: Sequence[Task],
    table: Table,
    ids: np.ndarray,
    rows: int,
    seq_length: int,
    token_dtype: np.dtype,
    with_labels: bool,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(row arrays, prefix int64[m]): tokens, segment_ids, loss_mask and, if asked for, labels, each [rows, seq_length]."""
    pad = tasks[0].ids.pad
    size = rows * seq_length
    tokens = np.full(size, pad, token_dtype)
    labels = np.full(size if with_labels else 0, pad, token_dtype)
    segment_ids, loss_mask = np.zeros(size, np.uint16), np.zeros(size, np.uint8)
    prefixes = np.zeros(len(table.n), np.int64)
    for t, task in enumerate(tasks):
        chosen = np.flatnonzero(table.task == t)
        if not len(chosen):
            continue
        own = Table(*(column[chosen] for column in table))
        prefix = expected_prefix(task, own.n, own.key, own.bos, own.slots)
        prefixes[chosen] = prefix
        task.objective.render(
            task, Columns(own.begin, own.n, own.key, own.at + own.bos + task.mode), ids, Slots(tokens)
        )
        _frame(
            own.at, own.slots, own.bos, task.mode, own.eos, prefix, own.number,
            task.objective.label_alignment == "next_token", task.ids.bos, task.mode_token, task.ids.eos,
            tokens, labels, segment_ids, loss_mask, with_labels,
        )  # fmt: skip
    shape = (rows, seq_length)
    arrays = {"tokens": tokens.reshape(shape)}
    if with_labels:
        arrays["labels"] = labels.reshape(shape)
    arrays["segment_ids"], arrays["loss_mask"] = segment_ids.reshape(shape), loss_mask.reshape(shape)
    return arrays, prefixes


def expected_prefix(task: Task, n: np.ndarray, key: np.ndarray, bos: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """int64[m]: the leading slots that see each other both ways, by the objective's rule of attention."""
    if task.objective.attention == "prefix":
        assert task.objective.body_prefix is not None
        return bos + task.mode + task.objective.body_prefix(task, n, key)
    if task.objective.attention == "bidirectional":
        return slots
    return np.full(len(n), 0 if task.objective.attention == "causal" else -1, np.int64)


def render(
    tasks: Sequence[Task],
    documents: Documents,
    segments: Segments,
    slots: np.ndarray,
    layout: Layout,
    seq_length: int,
    pad_seq_to_mult: int,
) -> dict[str, np.ndarray]:
    """All arrays of a shard, by name, as `dataset/shard.py` lists them."""
    order, row = layout.order, layout.row
    own, real = Segments(*(column[order] for column in segments)), slots[order]
    document = own.document
    row_offsets = np.searchsorted(row, np.arange(layout.rows + 1)).astype(np.int64)
    table = Table(
        documents.offsets[document] + own.start,
        own.n,
        own.task,
        own.bos,
        own.eos,
        own.key,
        real,
        row * seq_length + layout.begin,
        np.arange(len(row)) - row_offsets[row] + 1,
    )
    with_labels = any(task.objective.label_alignment == "same_slot" for task in tasks)
    arrays, prefixes = render_rows(
        tasks, table, documents.ids, layout.rows, seq_length, documents.ids.dtype, with_labels
    )
    arrays["row_offsets"] = row_offsets
    arrays["segment_doc"] = documents.position[document]
    arrays["segment_start"] = own.start
    arrays["segment_key"] = own.key
    arrays["cu_seqlens"] = _cumulative(real, row, row_offsets)
    if pad_seq_to_mult > 1:
        arrays["cu_seqlens_padded"] = _cumulative(rounded_up(real, pad_seq_to_mult), row, row_offsets)
    arrays["segment_tokens"] = own.n.astype(np.int32)
    arrays["segment_prefix"] = prefixes.astype(np.int32)
    arrays["segment_noise"] = np.zeros(len(row), np.float32)
    arrays["segment_loss_weight"] = np.ones(len(row), np.float32)
    arrays["segment_file"] = documents.file[document].astype(np.uint32)
    arrays["segment_task"] = own.task.astype(np.uint16)
    arrays["segment_source"] = documents.source[document].astype(np.uint16)
    arrays["segment_repeat"] = documents.repeat[document].astype(np.uint16)
    return arrays


def rounded_up(slots: np.ndarray, multiple: int) -> np.ndarray:
    """The physical lengths: slots rounded up to a multiple."""
    return -(-slots // multiple) * multiple


def _cumulative(lengths: np.ndarray, row: np.ndarray, row_offsets: np.ndarray) -> np.ndarray:
    """int32[segments + rows]: for each row 0 and the running sum of its segments' lengths."""
    rows = len(row_offsets) - 1
    total = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
    out = np.zeros(len(lengths) + rows, np.int32)
    out[np.arange(len(lengths)) + row + 1] = total[1:] - total[row_offsets[row]]
    return out
