"""Segment table + tokens → the shard's arrays."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from packprep.buffers import Buffers
from packprep.building.layout import Layout
from packprep.building.segments import SegmentTable
from packprep.corpus.reading import Documents
from packprep.corpus.training import Training
from packprep.dataset import noise
from packprep.dataset.noise import Noised, Target
from packprep.kernel import copy_items, copy_ranges, kernel
from packprep.objectives.objective import Bodies, BodySlots, Task

_1 = np.uint64(1)


@kernel
def _frame(at, slots, bos, mode, eos, number, bos_id, mode_id, eos_id, tokens, segment_ids):
    """Write what is the same for every objective: bos, mode token, eos and segment ids."""
    for i in range(at.shape[0]):
        begin, end = np.uint64(at[i]), np.uint64(at[i] + slots[i])
        if bos[i]:
            tokens[begin] = bos_id
        if mode:
            tokens[at[i] + bos[i]] = mode_id
        if eos[i]:
            tokens[end - _1] = eos_id
        own = np.uint16(number[i])
        for t in range(begin, end):
            segment_ids[t] = own


@kernel
def _next_token(at, slots, prefix, pad, tokens, labels, loss_mask, may):
    """Labels and loss of next-token kinds: trained is the prediction of what follows the prefix, and may be trained."""
    for i in range(at.shape[0]):
        begin, n, seen = at[i], slots[i], max(prefix[i] - 1, 0)
        if may.shape[0] > 0:
            copy_items(loss_mask, begin + seen, may, begin + seen + 1, max(n - 1 - seen, 0))
        else:
            for t in range(np.uint64(begin + seen), np.uint64(begin + max(n - 1, seen))):
                loss_mask[t] = 1
        if labels.shape[0] > 0:
            copy_items(labels, begin, tokens, begin + 1, n - 1)
            labels[begin + n - 1] = pad


@kernel
def _pad(at, slots, pad, column):
    """Write pad between the segments, which lie in row order, and behind the last."""
    free = np.int64(0)
    for i in range(at.shape[0]):
        for t in range(np.uint64(free), np.uint64(at[i])):
            column[t] = pad
        free = at[i] + slots[i]
    for t in range(np.uint64(free), np.uint64(column.shape[0])):
        column[t] = pad


@kernel
def _mark(supervised, body, mode, n, eos, start, copy, span_begin, span_end, spans, eos_trained, pivot, shift, may):
    """Set the slots that may be trained: all of the body and eos, and the mode token of next-token kinds, as in a shard
    without supervised documents; of a supervised segment its trained tokens, the sentinel at its pivot, and eos where the
    last span reaches the end. mode: how many slots before the body hold such a mode token. Of a document's spans only those
    that reach into the segment are walked: it may have a million, and be cut into many."""
    for i in range(n.shape[0]):
        end = body[i] + n[i] + shift[i]
        if not supervised[i]:
            for t in range(body[i] - mode, end + eos[i]):
                may[t] = 1
            continue
        k, above = span_begin[i], span_end[i]
        while k < above:  # the first that ends behind the segment's begin
            middle = (k + above) >> 1
            if spans[middle, 1] <= start[i]:
                k = middle + 1
            else:
                above = middle
        while k < span_end[i] and spans[k, 0] < start[i] + n[i] - copy[i]:
            for token in range(max(spans[k, 0] - start[i], 0) + copy[i], min(spans[k, 1] - start[i] + copy[i], n[i])):
                may[body[i] + token + (shift[i] if token >= pivot[i] else 0)] = 1
            k += 1
        if shift[i]:
            may[body[i] + pivot[i]] = 1
        if eos[i] and eos_trained[i]:
            may[end] = 1


@kernel
def _runs(at, slots, may, offsets, ranges):
    """The runs of `may` in each segment, relative to its begin; only counts them if `ranges` is empty."""
    count = np.int64(0)
    for i in range(at.shape[0]):
        inside = False
        for t in range(at[i], at[i] + slots[i]):
            if may[t] != 0 and not inside:
                if ranges.shape[0] > 0:
                    ranges[count, 0] = t - at[i]
                inside = True
            elif may[t] == 0 and inside:
                if ranges.shape[0] > 0:
                    ranges[count, 1] = t - at[i]
                inside = False
                count += 1
        if inside:
            if ranges.shape[0] > 0:
                ranges[count, 1] = slots[i]
            count += 1
        offsets[i + 1] = count
    return count


class Table(NamedTuple):
    """The final segment table: everything that render needs, one array a column, [m] each, in row order."""

    begin: np.ndarray  # int64: index of the body's first token in the flat ids
    bodies: Bodies
    task: np.ndarray  # int64
    bos: np.ndarray  # int64
    eos: np.ndarray  # int64
    slots: np.ndarray  # int64: real slots
    at: np.ndarray  # int64: first slot in the flat rows
    row: np.ndarray  # int64
    number: np.ndarray  # int64: 1, 2, … in its row
    start: np.ndarray  # int64: first content token used
    copy: np.ndarray  # int64: body tokens before the content
    document: np.ndarray  # int64: into the documents of `training`

    def some(self, which: np.ndarray) -> "Table":
        """The table of some of its segments."""
        columns: dict[str, Any] = dict(zip(self._fields, self, strict=True))
        bodies: Bodies = columns.pop("bodies")
        return Table(
            bodies=Bodies(*(column[which] for column in bodies)),
            **{name: column[which] for name, column in columns.items()},
        )


class Rendered(NamedTuple):
    """The rows, [rows, seq_length] each, and what rendering adds to the segments' headers."""

    rows: dict[str, np.ndarray]  # tokens, labels (if a task predicts in place), segment_ids, loss_mask
    prefix: np.ndarray  # int64[m]
    noise: np.ndarray  # float32[m]
    loss_weight: np.ndarray  # float32[m]
    blocks: tuple[np.ndarray, np.ndarray, np.ndarray] | None  # offsets int64[m + 1], levels and weights float32[blocks]
    trained: tuple[np.ndarray, np.ndarray] | None  # offsets int64[m + 1], ranges int32[k, 2]


def render_rows(
    tasks: Sequence[Task],
    table: Table,
    ids: np.ndarray,
    training: Training | None,
    rows: int,
    seq_length: int,
    token_dtype: np.dtype,
    buffers: Buffers | None = None,
) -> Rendered:
    """Write every segment of the table to its slots. ids: the flat tokens that `table.begin` points into.

    buffers: hold the rows; None: memory of their own.
    """
    buffers = buffers or Buffers()
    with_labels, with_blocks = (
        any(task.in_place for task in tasks),
        any(task.objective.attention == "block_diffusion" for task in tasks),
    )
    size, m, pad = rows * seq_length, len(table.task), tasks[0].ids.pad
    tokens = buffers.array("tokens", token_dtype, size)
    labels = buffers.array("labels", token_dtype, size if with_labels else 0)
    segment_ids, loss_mask = buffers.array("segment_ids", np.uint16, size), buffers.zeros("loss_mask", np.uint8, size)
    for column, value in ((tokens, pad), (segment_ids, 0), (labels, pad))[: 2 + with_labels]:
        _pad(table.at, table.slots, value, column)
    may = buffers.zeros("may", np.uint8, 0 if training is None else size)
    prefixes, level, weight = np.zeros(m, np.int64), np.zeros(m, np.float32), np.ones(m, np.float32)
    block_counts, block_parts = np.zeros(m, np.int64), []
    for t, task in enumerate(tasks):
        chosen = np.flatnonzero(table.task == t)
        if not len(chosen):
            continue
        own = table.some(chosen)
        prefixes[chosen] = prefix = expected_prefix(task, own.bodies, own.bos, own.slots)
        if training is not None:
            _mark_trained(task, own, training, may)
        body = own.at + own.bos + task.mode
        half = own.slots // task.objective.copies
        facts = (task.ids.bos, task.mode_token, task.ids.eos)
        if task.in_place:
            for copy in range(task.objective.copies):
                copy_ranges(ids, own.begin, own.bodies.n, tokens, body + copy * half)
                _frame(own.at + copy * half, half, own.bos, task.mode, own.eos, own.number, *facts, tokens, segment_ids)
            copy_ranges(tokens, own.at, own.slots, labels, own.at)
            target = target_of(task, own, tokens, loss_mask, may if training is not None else None)
            noised = draw_noise(t, task, target)
            level[chosen], weight[chosen] = noised.level, noised.weight
            if noised.blocks is not None:
                block_counts[chosen] = noised.blocks[0]
                block_parts.append((np.repeat(chosen, noised.blocks[0]), *noised.blocks[1:]))
        else:
            assert task.objective.render is not None
            task.objective.render(task, BodySlots(own.begin, own.bodies, body), ids, tokens)
            _frame(own.at, own.slots, own.bos, task.mode, own.eos, own.number, *facts, tokens, segment_ids)
            _next_token(own.at, own.slots, prefix, pad, tokens, labels, loss_mask, may)
    shape = (rows, seq_length)
    arrays = {"tokens": tokens.reshape(shape)}
    if with_labels:
        arrays["labels"] = labels.reshape(shape)
    arrays["segment_ids"], arrays["loss_mask"] = segment_ids.reshape(shape), loss_mask.reshape(shape)
    blocks = _joined_blocks(block_counts, block_parts) if with_blocks else None
    trained = None if training is None else _trained_ranges(table, may)
    return Rendered(arrays, prefixes, level, weight, blocks, trained)


def target_of(task: Task, own: Table, tokens: np.ndarray, loss_mask: np.ndarray, may: np.ndarray | None) -> Target:
    """Where a task's in-place noise goes: its candidates are the body and, unless noise_eos is off, eos."""
    before = own.bos + task.mode
    count = own.bodies.n + (own.eos if task.parameters.get("noise_eos", True) else 0)
    segments = noise.Candidates(own.bodies.key, own.at + before, count, own.row)
    return Target(segments, before, own.slots // task.objective.copies, may, tokens, loss_mask)


def draw_noise(index: int, task: Task, target: Target) -> Noised:
    """Noise one in-place task's segments as the stored rows have it; redraw does the same with a later epoch."""
    assert task.objective.noise is not None
    return task.objective.noise(index, task.parameters, task.resolved, task.ids.for_noise, target, 0)


def _mark_trained(task: Task, own: Table, training: Training, may: np.ndarray) -> None:
    pivot = np.zeros(len(own.task), np.int64)
    shift = np.zeros(len(own.task), np.int64)
    if task.objective.token_slots is not None:
        pivot, shift = task.objective.token_slots(task, own.bodies).T
    elif not task.in_place:  # what the body has beyond its tokens may be trained with them
        shift = task.body_slots(own.bodies) - own.bodies.n
    d = own.document
    eos = own.eos if task.parameters.get("noise_eos", True) else np.zeros_like(own.eos)
    _mark(
        training.supervised[d], own.at + own.bos + task.mode, 0 if task.in_place else task.mode,
        own.bodies.n, eos, own.start, own.copy,
        training.span_offsets[d], training.span_offsets[d + 1], training.spans, training.eos_trained[d],
        np.ascontiguousarray(pivot), np.ascontiguousarray(shift), may,
    )  # fmt: skip


def _trained_ranges(table: Table, may: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.zeros(len(table.task) + 1, np.int64)
    count = _runs(table.at, table.slots, may, offsets, np.zeros((0, 2), np.int32))
    ranges = np.zeros((count, 2), np.int32)
    _runs(table.at, table.slots, may, offsets, ranges)
    return offsets, ranges


def _joined_blocks(counts: np.ndarray, parts: list) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tasks' blocks as one column in segment order."""
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    if not parts:
        return offsets, np.zeros(0, np.float32), np.zeros(0, np.float32)
    segment, level, weight = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(segment, kind="stable")
    return offsets, level[order], weight[order]


def expected_prefix(task: Task, bodies: Bodies, bos: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """int64[m]: the leading slots that see each other both ways, by the objective's rule of attention."""
    if task.objective.attention == "prefix":
        assert task.objective.body_prefix is not None
        return bos + task.mode + task.objective.body_prefix(task, bodies)
    if task.objective.attention == "bidirectional":
        return slots
    return np.full(len(slots), 0 if task.objective.attention == "causal" else -1, np.int64)


def render(
    tasks: Sequence[Task],
    documents: Documents,
    segments: SegmentTable,
    slots: np.ndarray,
    layout: Layout,
    seq_length: int,
    pad_seq_to_mult: int,
    buffers: Buffers | None = None,
) -> dict[str, np.ndarray]:
    """All arrays of a shard, by name, as `dataset/shard.py` lists them. buffers: hold the rows."""
    order, row = layout.order, layout.row
    own, real = SegmentTable(*(column[order] for column in segments)), slots[order]
    document = own.document
    row_offsets = np.searchsorted(row, np.arange(layout.rows + 1)).astype(np.int64)
    begin, ids = body_tokens(documents, own)
    table = Table(
        begin=begin,
        bodies=own.bodies(),
        task=own.task,
        bos=own.bos,
        eos=own.eos,
        slots=real,
        at=row * seq_length + layout.begin,
        row=row,
        number=np.arange(len(row)) - row_offsets[row] + 1,
        start=own.start,
        copy=own.copy,
        document=document,
    )
    made = render_rows(tasks, table, ids, documents.training, layout.rows, seq_length, documents.ids.dtype, buffers)
    arrays = made.rows
    arrays["row_offsets"] = row_offsets
    arrays["segment_doc"] = documents.position[document]
    arrays["segment_start"] = own.start
    arrays["segment_key"] = own.key
    arrays["cu_seqlens"] = _cumulative(real, row, row_offsets)
    if pad_seq_to_mult > 1:
        arrays["cu_seqlens_padded"] = _cumulative(rounded_up(real, pad_seq_to_mult), row, row_offsets)
    arrays["segment_tokens"] = own.n.astype(np.int32)
    arrays["segment_prefix"] = made.prefix.astype(np.int32)
    arrays["segment_noise"] = made.noise
    arrays["segment_loss_weight"] = made.loss_weight
    arrays["segment_file"] = documents.file[document].astype(np.uint32)
    if made.blocks is not None:
        arrays["block_offsets"], arrays["block_noise"], arrays["block_loss_weight"] = made.blocks
    if made.trained is not None:
        arrays["trained_offsets"], arrays["trained_ranges"] = made.trained
    arrays["segment_task"] = own.task.astype(np.uint16)
    arrays["segment_source"] = documents.source[document].astype(np.uint16)
    arrays["segment_repeat"] = documents.repeat[document].astype(np.uint16)
    return arrays


def body_tokens(documents: Documents, segments: SegmentTable) -> tuple[np.ndarray, np.ndarray]:
    """(begin int64[m], flat ids): where each body's tokens lie. Bodies that repeat a system message are laid behind the ids."""
    begin = documents.offsets[segments.document] + segments.start
    repeating = np.flatnonzero(segments.copy)
    if not len(repeating):
        return begin, documents.ids
    parts, at = [documents.ids], len(documents.ids)
    for g in repeating:
        first = documents.offsets[segments.document[g]]
        content = first + segments.start[g]
        parts += [documents.ids[first : first + segments.copy[g]], documents.ids[content : content + segments.n[g]]]
        begin[g] = at
        at += int(segments.copy[g] + segments.n[g])
    return begin, np.concatenate(parts)


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
