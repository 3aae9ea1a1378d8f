"""Segment table + tokens → the shard's arrays."""

from collections.abc import Sequence

import numpy as np

from packprep.building.segments import SegmentTable, expected_prefix, trained_in
from packprep.conversations.supervision import Training
from packprep.dataset import noise
from packprep.dataset.attention import RULES
from packprep.dataset.boundaries import ranks
from packprep.dataset.noise import Noised, Target
from packprep.documents.reading import Documents
from packprep.kernel import copy_items, copy_ranges, kernel
from packprep.objectives.objective import Bodies, BodySlots, Task
from packprep.tokenizer.engines.engine import offsets_of

_1 = np.uint64(1)


@kernel
def _frame(first_slot, slots, bos, mode, eos, number, bos_id, mode_id, eos_id, tokens, segment_ids):
    """Write what is the same for every objective: bos, mode token, eos and segment ids."""
    for i in range(first_slot.shape[0]):
        begin, end = np.uint64(first_slot[i]), np.uint64(first_slot[i] + slots[i])
        if bos[i]:
            tokens[begin] = bos_id
        if mode:
            tokens[first_slot[i] + bos[i]] = mode_id
        if eos[i]:
            tokens[end - _1] = eos_id
        segment_id = np.uint16(number[i])
        for t in range(begin, end):
            segment_ids[t] = segment_id


@kernel
def _next_token(first_slot, slots, prefix, pad, tokens, labels, loss_mask, trainable):
    """Labels and loss of next-token kinds: trained is the prediction of what follows the prefix,
    where it is trainable."""
    for i in range(first_slot.shape[0]):
        begin, n, seen = first_slot[i], slots[i], max(prefix[i] - 1, 0)
        if trainable.shape[0] > 0:
            copy_items(loss_mask, begin + seen, trainable, begin + seen + 1, max(n - 1 - seen, 0))
        else:
            for t in range(np.uint64(begin + seen), np.uint64(begin + max(n - 1, seen))):
                loss_mask[t] = 1
        if labels.shape[0] > 0:
            copy_items(labels, begin, tokens, begin + 1, n - 1)
            labels[begin + n - 1] = pad


@kernel
def _mark(
    supervised,
    body,
    mode,
    n,
    eos,
    start,
    copy,
    span_begin,
    span_end,
    spans,
    span_weights,
    turns,
    last,
    eos_weight,
    has_prefix,
    pivot,
    shift,
    trainable,
    weights,
):
    """Set the trainable slots: all of the body and eos, and the mode token of next-token kinds, as
    in a shard without supervised documents, with the document's weight; of a supervised segment its
    trained tokens, what is added at its pivot, and eos where the last span reaches the end and is
    trained. The eos of a segment that is not its document's last is trained like the token before
    it. mode: how many slots before the body hold such a mode token. Of a document's spans only
    those that reach into the segment are walked: it may have a million, and be cut into many.

    weights: float32, 1 each, takes those of the trained slots of supervised segments; of no slots
    where all are 1. What is added weighs as much as the trained token behind it, or before it where
    that one is not trained.

    has_prefix: whether the task's prefix holds each segment's first token. Where all of a
    supervised segment's tokens are trained, its range then begins after that token, which tells the
    segment from those of other documents.
    """
    weighted = weights.shape[0] > 0
    for i in range(n.shape[0]):
        end = body[i] + n[i] + shift[i]
        if not supervised[i]:
            for t in range(body[i] - mode, end + eos[i]):
                trainable[t] = 1
                if weighted and span_begin[i] < span_end[i]:  # the document has a weight
                    weights[t] = span_weights[span_begin[i]]
            continue
        k, above, marked = span_begin[i], span_end[i], np.int64(0)
        while k < above:  # the first that ends behind the segment's begin
            middle = (k + above) >> 1
            if spans[middle, 1] <= start[i]:
                k = middle + 1
            else:
                above = middle
        stop, end_weight = start[i] + n[i] - copy[i], np.float32(0)
        while k < span_end[i] and spans[k, 0] < stop:
            if trained_in(turns, k, start[i]):
                if spans[k, 1] >= stop:
                    end_weight = span_weights[k]
                for token in range(
                    max(spans[k, 0] - start[i], 0) + copy[i],
                    min(spans[k, 1] - start[i] + copy[i], n[i]),
                ):
                    slot = body[i] + token + (shift[i] if token >= pivot[i] else 0)
                    trainable[slot] = 1
                    marked += 1
                    if weighted:
                        weights[slot] = span_weights[k]
            k += 1
        for slot in range(body[i] + pivot[i], body[i] + pivot[i] + shift[i]):
            trainable[slot] = 1
            if weighted:
                behind = body[i] + pivot[i] + shift[i]
                weights[slot] = weights[behind if trainable[behind] else body[i] + pivot[i] - 1]
        if has_prefix and marked == n[i]:
            trainable[body[i]] = 0
        if last[i]:
            end_weight = (
                eos_weight[i] if trained_in(turns, span_end[i] - 1, start[i]) else np.float32(0)
            )
        if eos[i] and end_weight > 0:
            trainable[end] = 1
            if weighted:
                weights[end] = end_weight


@kernel
def _runs(first_slot, slots, trainable, weights, offsets, ranges):
    """The runs of `trainable` of one weight in each segment, relative to its begin; only counts
    them if `ranges` is empty.

    weights: float32, of the slots; of no slots where all are 1."""
    count, weighted = np.int64(0), weights.shape[0] > 0
    for i in range(first_slot.shape[0]):
        inside = False
        for t in range(first_slot[i], first_slot[i] + slots[i]):
            if inside and (trainable[t] == 0 or (weighted and weights[t] != weights[t - 1])):
                if ranges.shape[0] > 0:
                    ranges[count, 1] = t - first_slot[i]
                inside = False
                count += 1
            if trainable[t] != 0 and not inside:
                if ranges.shape[0] > 0:
                    ranges[count, 0] = t - first_slot[i]
                inside = True
        if inside:
            if ranges.shape[0] > 0:
                ranges[count, 1] = slots[i]
            count += 1
        offsets[i + 1] = count
    return count


def render_rows(
    tasks: Sequence[Task],
    table: SegmentTable,
    begin: np.ndarray,
    ids: np.ndarray,
    training: Training | None,
    seq_length: int,
    token_dtype: np.dtype,
    epoch: int = 0,
    last: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Write every segment of a table in row order to its slots; gives the shard's arrays of slots,
    and the columns of segments that follow from rendering.

    begin: int64[m], index of each body's first token in the flat tokens `ids`. training: of the
    documents that the table names. epoch: whose chance the rows have, as redraw gives them; what is
    stored is 0's.
    last: bool[m], which segments are their documents' last; None: all are.
    """
    with_labels, with_blocks = (
        any(task.in_place for task in tasks),
        any(RULES[task.objective.attention].in_blocks for task in tasks),
    )
    m, pad, rows = (
        len(table.task),
        tasks[0].ids.pad,
        int(table.row[-1]) + 1 if len(table.row) else 0,
    )
    size, first_slot = rows * seq_length, table.row * seq_length + table.first_slot
    number = np.arange(m) - np.searchsorted(table.row, table.row) + 1
    tokens, labels = (np.full(n, pad, token_dtype) for n in (size, size if with_labels else 0))
    segment_ids, loss_mask = np.zeros(size, np.uint16), np.zeros(size, np.uint8)
    trainable = np.zeros(0 if training is None else size, np.uint8)
    weights = np.ones(size if training is not None and _is_weighted(training) else 0, np.float32)
    last = np.ones(m, np.bool_) if last is None else last
    prefixes, level, weight = np.zeros(m, np.int64), np.zeros(m, np.float32), np.ones(m, np.float32)
    block_counts, block_parts = np.zeros(m, np.int64), []
    for t, task in enumerate(tasks):
        chosen = np.flatnonzero(table.task == t)
        if not len(chosen):
            continue
        segments, first_slots, begins, numbers = (
            table.of(chosen),
            first_slot[chosen],
            begin[chosen],
            number[chosen],
        )
        bodies = segments.bodies(epoch)
        prefixes[chosen] = prefix = expected_prefix(task, bodies, segments.bos, segments.slots)
        if training is not None:
            _mark_trained(
                task, segments, bodies, last[chosen], first_slots, training, trainable, weights
            )
        body = first_slots + segments.bos + task.mode
        half = segments.slots // task.objective.copies
        facts = (task.ids.bos, task.mode_token, task.ids.eos)
        if task.in_place:
            for copy in range(task.objective.copies):
                copy_ranges(ids, begins, bodies.n, tokens, body + copy * half)
                _frame(
                    first_slots + copy * half,
                    half,
                    segments.bos,
                    task.mode,
                    segments.eos,
                    numbers,
                    *facts,
                    tokens,
                    segment_ids,
                )
            if task.shift:
                for copy in range(task.objective.copies):  # and pad at the end of each
                    at = first_slots + copy * half
                    copy_ranges(tokens, at + 1, half - 1, labels, at)
            else:
                copy_ranges(tokens, first_slots, segments.slots, labels, first_slots)
            target = target_of(
                task,
                segments,
                first_slots,
                tokens,
                loss_mask,
                trainable if training is not None else None,
            )
            noised = draw_noise(t, task, target, epoch)
            level[chosen], weight[chosen] = noised.level, noised.weight
            if noised.blocks is not None:
                block_counts[chosen] = noised.blocks[0]
                block_parts.append((chosen, *noised.blocks))
        else:
            assert task.objective.render is not None
            task.objective.render(task, BodySlots(begins, bodies, body), ids, tokens)
            _frame(
                first_slots,
                segments.slots,
                segments.bos,
                task.mode,
                segments.eos,
                numbers,
                *facts,
                tokens,
                segment_ids,
            )
            _next_token(
                first_slots, segments.slots, prefix, pad, tokens, labels, loss_mask, trainable
            )
    shape = (rows, seq_length)
    arrays: dict[str, np.ndarray] = {"tokens": tokens.reshape(shape)}
    if with_labels:
        arrays["labels"] = labels.reshape(shape)
    arrays["segment_ids"], arrays["loss_mask"] = (
        segment_ids.reshape(shape),
        loss_mask.reshape(shape),
    )
    arrays["segment_prefix"] = prefixes.astype(np.int32)
    arrays["segment_noise"], arrays["segment_loss_weight"] = level, weight
    if with_blocks:
        blocks = _joined_blocks(block_counts, block_parts)
        arrays["block_offsets"], arrays["block_noise"], arrays["block_loss_weight"] = blocks
    if training is not None:
        arrays |= _trained_ranges(first_slot, table.slots, trainable, weights)
    return arrays


def target_of(
    task: Task,
    segments: SegmentTable,
    first_slot: np.ndarray,
    tokens: np.ndarray,
    loss_mask: np.ndarray,
    trainable: np.ndarray | None,
) -> Target:
    """Where a task's in-place noise goes: its candidates are the body and, unless noise_eos is off,
    eos.

    segments: the task's; first_slot: int64[m], of each in the flat rows.
    """
    before = segments.bos + task.mode
    count = (
        segments.n + segments.copy + (segments.eos if task.parameters.get("noise_eos", True) else 0)
    )
    candidates = noise.Candidates(segments.key, first_slot + before, count, segments.row)
    return Target(
        candidates, before, segments.slots // task.objective.copies, trainable, tokens, loss_mask
    )


def draw_noise(index: int, task: Task, target: Target, epoch: int = 0) -> Noised:
    """Noise one in-place task's segments as the stored rows have it, or as redraw gives it in a
    later epoch."""
    assert task.objective.noise is not None
    return task.objective.noise(
        index, task.parameters, task.resolved, task.ids.for_noise, target, epoch
    )


def _mark_trained(
    task: Task,
    segments: SegmentTable,
    bodies: Bodies,
    last: np.ndarray,
    first_slot: np.ndarray,
    training: Training,
    trainable: np.ndarray,
    weights: np.ndarray,
) -> None:
    pivot = np.zeros(len(segments.task), np.int64)
    shift = np.zeros(len(segments.task), np.int64)
    if task.objective.token_slots is not None:
        pivot, shift = task.objective.token_slots(task, bodies).T
    elif not task.in_place:  # what the body has beyond its tokens may be trained with them
        shift = task.body_slots(bodies) - bodies.n
    d = segments.document
    eos = segments.eos if task.parameters.get("noise_eos", True) else np.zeros_like(segments.eos)
    _mark(
        training.supervised[d],
        first_slot + segments.bos + task.mode,
        0 if task.in_place else task.mode,
        bodies.n,
        eos,
        segments.start,
        segments.copy,
        training.span_offsets[d],
        training.span_offsets[d + 1],
        training.spans,
        training.weights,
        training.turns,
        last,
        training.eos_weight[d],
        RULES[task.objective.attention].ahead == "prefix",
        np.ascontiguousarray(pivot),
        np.ascontiguousarray(shift),
        trainable,
        weights,
    )


def _is_weighted(training: Training) -> bool:
    """Whether a trained token has another weight than 1."""
    return bool(
        (training.weights != 1).any()
        or ((training.eos_weight != 1) & (training.eos_weight != 0)).any()
    )


def _trained_ranges(
    first_slot: np.ndarray, slots: np.ndarray, trainable: np.ndarray, weights: np.ndarray
) -> dict[str, np.ndarray]:
    """trained_offsets, trained_ranges, and, where one differs from 1, trained_weights."""
    offsets = np.zeros(len(first_slot) + 1, np.int64)
    count = _runs(first_slot, slots, trainable, weights, offsets, np.zeros((0, 2), np.int32))
    ranges = np.zeros((count, 2), np.int32)
    _runs(first_slot, slots, trainable, weights, offsets, ranges)
    arrays = {"trained_offsets": offsets, "trained_ranges": ranges}
    if len(weights):
        of_ranges = weights[np.repeat(first_slot, np.diff(offsets)) + ranges[:, 0]]
        if (of_ranges != 1).any():
            arrays["trained_weights"] = of_ranges
    return arrays


def _joined_blocks(counts: np.ndarray, parts: list) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tasks' blocks as one column in segment order."""
    offsets = offsets_of(counts)
    if len(parts) == 1:
        return offsets, *parts[0][2:]
    level, weight = np.empty((2, offsets[-1]), np.float32)
    for segment, many, *own in parts:
        here = np.repeat(offsets[segment], many) + ranks(many)
        level[here], weight[here] = own
    return offsets, level, weight


def render(
    tasks: Sequence[Task],
    documents: Documents,
    table: SegmentTable,
    seq_length: int,
    pad_seq_to_mult: int,
    epoch: int = 0,
) -> dict[str, np.ndarray]:
    """All arrays of a shard, by name, as `dataset/shard.py` lists them. table: in row order. epoch:
    as in `render_rows`."""
    row, document = table.row, table.document
    row_offsets = np.searchsorted(row, np.arange(int(row[-1]) + 2 if len(row) else 1)).astype(
        np.int64
    )
    begin, ids = body_tokens(documents, table)
    texts = begin, ids, documents.training, seq_length, documents.ids.dtype
    last = table.start + table.n == np.diff(documents.offsets)[document]
    arrays = render_rows(tasks, table, *texts, epoch, last)
    arrays["row_offsets"] = row_offsets
    arrays["segment_doc"] = documents.position[document]
    arrays["segment_start"] = table.start
    arrays["segment_key"] = table.key
    arrays["cu_seqlens"] = _cumulative(table.slots, row, row_offsets)
    if pad_seq_to_mult > 1:
        physical = table.slots + -table.slots % pad_seq_to_mult
        arrays["cu_seqlens_padded"] = _cumulative(physical, row, row_offsets)
    arrays["segment_tokens"] = table.n.astype(np.int32)
    arrays["segment_file"] = documents.file[document].astype(np.uint32)
    arrays["segment_task"] = table.task.astype(np.uint16)
    arrays["segment_source"] = documents.source[document].astype(np.uint16)
    arrays["segment_repeat"] = documents.repeat[document].astype(np.uint16)
    if documents.training is not None and len(documents.training.places.first):
        arrays |= _media(tasks, table, documents, documents.training)
    return arrays


def _media(
    tasks: Sequence[Task], table: SegmentTable, documents: Documents, training: Training
) -> dict[str, np.ndarray]:
    """The arrays of places of media; none where no segment has a place."""
    places, many = training.places, np.diff(training.place_offsets)
    # ascending: in all documents' tokens
    first = places.first + np.repeat(documents.offsets[:-1], many)
    begin = documents.offsets[table.document] + table.start
    low, high = np.searchsorted(first, begin), np.searchsorted(first, begin + table.n)
    count = high - low
    if not count.any():
        return {}
    offsets = offsets_of(count)
    segment = np.repeat(np.arange(len(count)), count)
    which = np.repeat(low, count) + ranks(count)
    token = first[which] - begin[segment] + table.copy[segment]  # of the body
    slot = (table.first_slot + table.bos)[segment] + token
    for t, task in enumerate(tasks):
        own = np.flatnonzero(table.task[segment] == t)
        slot[own] += task.mode
        if len(own) and task.objective.token_slots is not None:
            pivot, shift = task.objective.token_slots(task, table.of(segment[own]).bodies()).T
            slot[own] += np.where(token[own] >= pivot, shift, 0)
    found = places.at(which)
    return {
        "media_offsets": offsets,
        "media_ref_offsets": found.ref_offsets,
        "media_slot": slot.astype(np.int32),
        "media_tokens": found.tokens.astype(np.int32),
        "media_kind": found.kind.astype(np.uint16),
        "media_ref": found.refs,
    }


def body_tokens(documents: Documents, segments: SegmentTable) -> tuple[np.ndarray, np.ndarray]:
    """(begin int64[m], flat ids): where each body's tokens lie. Bodies that repeat a system message
    are laid behind the ids."""
    begin = documents.offsets[segments.document] + segments.start
    repeating = np.flatnonzero(segments.copy)
    if not len(repeating):
        return begin, documents.ids
    parts, at = [documents.ids], len(documents.ids)
    for g in repeating:
        first = documents.offsets[segments.document[g]]
        content = first + segments.start[g]
        parts += [
            documents.ids[first : first + segments.copy[g]],
            documents.ids[content : content + segments.n[g]],
        ]
        begin[g] = at
        at += int(segments.copy[g] + segments.n[g])
    return begin, np.concatenate(parts)


def _cumulative(lengths: np.ndarray, row: np.ndarray, row_offsets: np.ndarray) -> np.ndarray:
    """int32[segments + rows]: for each row 0 and the running sum of its segments' lengths."""
    rows = len(row_offsets) - 1
    total = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
    out = np.zeros(len(lengths) + rows, np.int32)
    out[np.arange(len(lengths)) + row + 1] = total[1:] - total[row_offsets[row]]
    return out
