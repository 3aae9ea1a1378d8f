"""Render segments and tokens into the arrays of a shard.

Rendering writes the slots of the rows. It also computes columns of segments, such as the prefix and
the noise level.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from packprep.building.segments import expected_prefix, trained_in
from packprep.conversations.training import Training
from packprep.dataset.attention import RULES
from packprep.dataset.boundaries import offsets_of, owners, ranks
from packprep.dataset.epochs import noise
from packprep.dataset.epochs.noise import Noised, NoisedBlocks, Target
from packprep.dataset.segments import (
    Bodies,
    MediaSpans,
    NoiseBlocks,
    Records,
    Segments,
    TrainedRanges,
)
from packprep.documents.reading import Documents
from packprep.kernel import copy_items, copy_ranges, kernel
from packprep.objectives.objective import BodySlots, Task, TaskTable

_LEAST_WEIGHT = np.finfo(np.float32).tiny
"""Minimum loss weight of a trained slot. A weight that rounds to 0 would leave the slot untrained.
"""


class _Rows(NamedTuple):
    """The rows to write, as flat arrays. Columns that are not needed are empty."""

    tokens: np.ndarray
    labels: np.ndarray
    segment_ids: np.ndarray  # uint16
    loss_mask: np.ndarray  # uint8
    trainable: np.ndarray  # uint8: 1 for slots that may be trained; empty if all may be
    weights: np.ndarray  # float32: loss weights of trained slots; empty if all are 1
    group: np.ndarray  # int64: the group of each trained slot, see _Groups; empty without groups


class _Frames(NamedTuple):
    """One task's segments, with the columns that `_write_frames` reads.

    All columns are int64[m].
    """

    first_slot: np.ndarray  # in the flat rows
    slots: np.ndarray  # of the segment
    bos: np.ndarray  # 0 or 1
    eos: np.ndarray  # number of eos: 0 or 1, and the eos that fill up the last block
    segment_id: np.ndarray


class _Marked(NamedTuple):
    """One task's segments, with the columns that `_mark_bodies` and `_mark_spans` read.

    Columns are int64[m] unless noted.
    """

    supervised: np.ndarray  # uint8: 1 if the segment's document is supervised
    body: np.ndarray  # first slot of the body in the flat rows
    n: np.ndarray  # tokens of the body
    eos: np.ndarray  # 1 if the segment has an eos that may be trained, otherwise 0
    fill: np.ndarray  # number of eos that fill up the last block
    start: np.ndarray
    repeated: np.ndarray
    is_last: np.ndarray  # bool: True if the document ends with the segment
    span_begin: np.ndarray  # index of the document's first span
    span_end: np.ndarray  # index after the document's last span
    eos_weight: np.ndarray  # float32
    # group of the document's last span; without spans, the document's own group
    group: np.ndarray
    pivot: np.ndarray  # first body token that is shifted
    shift: np.ndarray  # number of slots that tokens from `pivot` on are shifted by


class _Spans(NamedTuple):
    """The trained spans of all documents."""

    spans: np.ndarray
    weights: np.ndarray
    turns: np.ndarray
    group: np.ndarray  # int64[k]: group of each span, see _Groups; empty without groups


class _Groups(NamedTuple):
    """The groups of trained tokens. The weights of each group are scaled to its sum in `sums`.

    A group is a document or a turn, as `documents.loss_weighting` says. Groups 0 … D − 1 are the
    documents. Group D + k is the turn that starts with span number k.
    """

    of_spans: np.ndarray  # int64[k]: group of each span
    # int64[D]: group of the document's last span; without spans, the document's own group
    of_documents: np.ndarray
    sums: np.ndarray  # float64[D + k]: the sum of the weights of each group


@kernel
def _write_frames(frames, mode, bos_id, mode_id, eos_id, rows):
    """For one task's segments, write bos, mode token, eos and segment ids."""
    for i in range(frames.first_slot.shape[0]):
        first_slot = frames.first_slot[i]
        begin, end = np.uint64(first_slot), np.uint64(first_slot + frames.slots[i])
        if frames.bos[i]:
            rows.tokens[begin] = bos_id
        if mode:
            rows.tokens[first_slot + frames.bos[i]] = mode_id
        for t in range(end - np.uint64(frames.eos[i]), end):
            rows.tokens[t] = eos_id
        segment_id = np.uint16(frames.segment_id[i])
        # Slots that no segment covers keep the segment id 0 (P6).
        for t in range(begin, end):
            rows.segment_ids[t] = segment_id


@kernel
def _write_next_tokens(first_slot, slots, prefix, pad, rows):
    """For the segments of one next-token task, write the labels and the loss mask.

    The trainable tokens after the prefix are trained. The mask is 1 at the slot before each trained
    token, because that slot predicts the token.
    """
    for i in range(first_slot.shape[0]):
        # The prefix's last slot predicts the first token after it, so only the `seen` slots before
        # it are untrained.
        begin, n, seen = first_slot[i], slots[i], max(prefix[i] - 1, 0)
        # A slot is trained if the next slot, which has its target, is trainable (P9).
        if rows.trainable.shape[0] > 0:
            slot, count = begin + seen, max(n - 1 - seen, 0)
            copy_items(rows.loss_mask, slot, rows.trainable, slot + 1, count)
        else:
            for t in range(np.uint64(begin + seen), np.uint64(begin + max(n - 1, seen))):
                rows.loss_mask[t] = 1
        # The last slot has no target in its own segment, so its label is pad (P10).
        if rows.labels.shape[0] > 0:
            copy_items(rows.labels, begin, rows.tokens, begin + 1, n - 1)
            rows.labels[begin + n - 1] = pad


@kernel(inline=True)
def _first_span(spans, low, high, start):
    """Return the index of the first span in [low, high) that ends after `start`, or `high`."""
    while low < high:
        middle = (low + high) >> 1
        if spans[middle, 1] <= start:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def _mark_bodies(segments, trained, mode, rows):
    """For one task, mark the trainable slots of the segments of unsupervised documents.

    The whole body and eos are trainable, as in a shard without supervised documents. The mode token
    of next-token tasks is trainable too. All these slots have the document's weight.

    Args:
        segments: The segments.
        trained: The trained spans of all documents. An unsupervised document has a span only if its
            record sets a weight.
        mode: 1 if a mode token before the body is trainable, otherwise 0.
        rows: The rows to write to.
    """
    # Arrays that the shard does not need are empty.
    trainable, weights, group = rows.trainable, rows.weights, rows.group
    weighted, grouped = weights.shape[0] > 0, group.shape[0] > 0
    for i in range(segments.n.shape[0]):
        if segments.supervised[i]:
            continue
        first_span = segments.span_begin[i]
        has_weight = weighted and first_span < segments.span_end[i]
        # Mode token, body, the objective's added slots and eos are consecutive.
        end = segments.body[i] + segments.n[i] + segments.shift[i] + segments.eos[i]
        for slot in range(segments.body[i] - mode, end):
            trainable[slot] = 1
            if has_weight:
                weights[slot] = trained.weights[first_span]
            if grouped:
                group[slot] = segments.group[i]


@kernel(inline=True)
def _mark_added(rows, begin, count):
    """Mark slots that an objective added to a body as trainable: `count` slots from `begin` on.

    They get the weight and group of the slot after them. If that slot is untrained, they get the
    weight and group of the slot before them.
    """
    like = begin + count if rows.trainable[begin + count] else begin - 1
    for slot in range(begin, begin + count):
        rows.trainable[slot] = 1
        if rows.weights.shape[0] > 0:
            rows.weights[slot] = rows.weights[like]
        if rows.group.shape[0] > 0:
            rows.group[slot] = rows.group[like]


@kernel
def _mark_spans(segments, trained, has_prefix, rows):
    """Mark the trainable slots of one task's supervised segments, and write their weights.

    Trained tokens are trainable, and so are the slots that an objective adds before the body token
    `pivot`. If the document continues after the segment, the segment's eos is trained like the
    token before it. At the end of the document, eos has the weight `eos_weight`. This eos is
    trainable if `eos_weight` is above 0 and `trained_in` allows the segment to train the document's
    last span. The eos that fill up the last block have the weight of the last trained slot.

    Args:
        segments: The segments.
        trained: The trained spans of all documents.
        has_prefix: True if the task's prefix contains each segment's first token. For such a task,
            the first token of a segment is unmarked if all tokens of the segment are trained. This
            distinguishes the segment from segments of unsupervised documents.
        rows: The rows to write to.
    """
    trainable, weights, group = rows.trainable, rows.weights, rows.group
    weighted, grouped = weights.shape[0] > 0, group.shape[0] > 0
    for i in range(segments.n.shape[0]):
        if not segments.supervised[i]:
            continue
        body, n, start = segments.body[i], segments.n[i], segments.start[i]
        pivot, shift, repeated = segments.pivot[i], segments.shift[i], segments.repeated[i]
        # Mark the trained tokens. A document may have a million spans and many segments, so only
        # spans that overlap the segment are visited.
        span_end = segments.span_end[i]
        k = _first_span(trained.spans, segments.span_begin[i], span_end, start)
        stop, marked = start + n - repeated, 0
        end_weight, end_group = np.float32(0), segments.group[i]
        while k < span_end and trained.spans[k, 0] < stop:
            if trained_in(trained.turns, k, start):
                span_stop = trained.spans[k, 1]
                if span_stop >= stop:
                    end_weight = trained.weights[k]
                    if grouped:
                        end_group = trained.group[k]
                first_token = max(trained.spans[k, 0] - start, 0) + repeated
                for token in range(first_token, min(span_stop - start + repeated, n)):
                    slot = body + token + (shift if token >= pivot else 0)
                    trainable[slot] = 1
                    marked += 1
                    if weighted:
                        weights[slot] = trained.weights[k]
                    if grouped:
                        group[slot] = trained.group[k]
            k += 1
        # The slots that the objective added are between tokens, so they follow the marks of their
        # neighbours.
        if shift > 0:
            _mark_added(rows, body + pivot, shift)
        if has_prefix and marked == n:
            trainable[body] = 0
        # Mark the eos. At the end of a document it has its own weight.
        if segments.is_last[i]:
            is_trained = trained_in(trained.turns, span_end - 1, start)
            end_weight = segments.eos_weight[i] if is_trained else np.float32(0)
            end_group = segments.group[i]
        end = body + n + shift
        if segments.eos[i]:
            if end_weight > 0:
                trainable[end] = 1
                if weighted:
                    weights[end] = end_weight
                if grouped:
                    group[end] = end_group
            end += 1
        # The eos that fill up a block continue the last answer, so they take the weight of its last
        # trained slot.
        if segments.fill[i] > 0:
            like = end - 1
            while not trainable[like]:
                like -= 1
            for slot in range(end, end + segments.fill[i]):
                trainable[slot] = 1
                if weighted:
                    weights[slot] = weights[like]
                if grouped:
                    group[slot] = group[like]


@kernel
def _scale_weights(order, first_slot, first_target, slots, sums, rows):
    """Scale the weights of trainable slots, so that the weights of group g sum to `sums[g]`.

    The sum excludes slots before a segment's `first_target`, because no slot predicts them. Weights
    are added in float64, slot by slot. `order` has the indices of the segments in the order in
    which their weights are added.
    """
    # Add up the weights of each group. The order is fixed, because float sums depend on it.
    totals = np.zeros(sums.shape[0], np.float64)
    for i in order:
        for t in range(first_slot[i] + first_target[i], first_slot[i] + slots[i]):
            if rows.trainable[t]:
                totals[rows.group[t]] += np.float64(rows.weights[t])
    # Slots that no slot predicts are scaled too, so that a trained range keeps one weight.
    for i in order:
        for t in range(first_slot[i], first_slot[i] + slots[i]):
            if rows.trainable[t] and totals[rows.group[t]] > 0:
                scaled = sums[rows.group[t]] * np.float64(rows.weights[t]) / totals[rows.group[t]]
                rows.weights[t] = max(np.float32(scaled), _LEAST_WEIGHT)


@kernel
def _runs(first_slot, slots, trainable, weights, offsets, ranges):
    """Write the range of each run of trainable slots with equal weights to `ranges`, int32[k, 2].

    A run does not cross the end of its segment. Its range counts from the segment's first slot. If
    `ranges` is empty, the runs are only counted.

    Returns:
        The number of runs. `offsets`, int64[m + 1], receives the end of each segment's runs.
    """
    count, weighted = np.int64(0), weights.shape[0] > 0
    for i in range(first_slot.shape[0]):
        inside = False
        for t in range(first_slot[i], first_slot[i] + slots[i]):
            # A change of weight ends a run, because a range has one weight.
            if inside and (trainable[t] == 0 or (weighted and weights[t] != weights[t - 1])):
                if ranges.shape[0] > 0:
                    ranges[count, 1] = t - first_slot[i]
                inside = False
                count += 1
            if trainable[t] != 0 and not inside:
                if ranges.shape[0] > 0:
                    ranges[count, 0] = t - first_slot[i]
                inside = True
        # Ranges are relative to a segment, so a run never continues in the next segment.
        if inside:
            if ranges.shape[0] > 0:
                ranges[count, 1] = slots[i]
            count += 1
        offsets[i + 1] = count
    return count


class Texts(NamedTuple):
    """The tokens of the segments to render, and the `Training` of the segments' documents."""

    begin: np.ndarray  # int64[m]: index in `ids` of each body's first token
    ids: np.ndarray  # uint16 or int32: flat tokens
    training: Training | None = None  # the training of the segments' documents
    # as in a recipe; unless it is "token", all segments of each document must be present
    loss_weighting: str = "token"
    # bool[m]: True if the document ends with the segment; None if all do
    is_last: np.ndarray | None = None


def render_rows(
    tasks: Sequence[Task], segments: Segments, texts: Texts, seq_length: int, epoch: int = 0
) -> tuple[dict[str, np.ndarray], Segments]:
    """Write every segment to its slots, and return the rows.

    Args:
        tasks: The plan's tasks.
        segments: The segments in row order.
        texts: The tokens of the segments.
        seq_length: Slots per row.
        epoch: The epoch whose random numbers are used. Shards store epoch 0. Resampling uses later
            epochs.

    Returns:
        A dict of arrays [rows, seq_length], such as tokens and loss_mask, and the segments with the
        columns that rendering computes.
    """
    with_labels = any(task.in_place for task in tasks)
    m, pad = len(segments), tasks[0].ids.pad
    n_rows = int(segments.row[-1]) + 1 if m else 0
    first_slot = segments.flat_slots(seq_length)
    groups = _groups_of(texts)
    rows = _empty_rows(n_rows * seq_length, texts, pad, with_labels, groups is not None)
    writer = _Writer(segments, texts, first_slot, rows, epoch, groups)
    # Write the segments task by task, and collect the columns that writing determines.
    prefix = np.zeros(m, np.int64)
    level, weight = np.zeros(m, np.float32), np.ones(m, np.float32)
    block_parts: list[tuple[np.ndarray, NoisedBlocks]] = []
    for t, task in enumerate(tasks):
        chosen = np.flatnonzero(segments.task == t)
        if not len(chosen):
            continue
        of_task = segments.select(chosen)
        bodies = of_task.bodies(epoch)
        prefix[chosen] = expected_prefix(task, bodies, of_task.bos, of_task.slots)
        # Mark before writing noise and loss, because both are limited to trainable slots.
        if texts.training is not None:
            writer.mark_trained(task, chosen, of_task, bodies)
        if task.in_place:
            noised = writer.write_in_place(t, task, chosen, of_task, bodies)
            level[chosen], weight[chosen] = noised.level, noised.weight
            if noised.blocks is not None:
                block_parts.append((chosen, noised.blocks))
        else:
            writer.write_next_token(task, chosen, of_task, bodies, prefix[chosen])
    # The weights of a group depend on all its segments, which may have different tasks.
    rendered = segments.replace(prefix=prefix, noise=level, loss_weight=weight)
    if groups is not None:
        _scale_groups(tasks, rendered, first_slot, groups, rows)
    # Trained ranges exist only with a `Training`, and noise blocks only if a task has blocks (P3).
    trained = None if texts.training is None else _trained_ranges(first_slot, segments, rows)
    with_blocks = any(RULES[task.objective.attention].in_blocks for task in tasks)
    blocks = _joined_blocks(m, block_parts) if with_blocks else None
    slots = {
        name: getattr(rows, name).reshape(n_rows, seq_length)
        for name in ("tokens", "labels", "segment_ids", "loss_mask")
        if with_labels or name != "labels"
    }
    return slots, rendered.replace(trained=trained, blocks=blocks)


def _scale_groups(
    tasks: Sequence[Task],
    segments: Segments,
    first_slot: np.ndarray,
    groups: _Groups,
    rows: _Rows,
) -> None:
    """Scale the weights of trained tokens, so that each group has its sum in `groups.sums`."""
    by_task = TaskTable.of(tasks)
    in_place, shift = by_task.in_place[segments.task], by_task.shift[segments.task]
    first_target = np.where(in_place, shift, np.maximum(segments.prefix, 1))
    order = np.lexsort((segments.start, segments.document))
    _scale_weights(order, first_slot, first_target, segments.slots, groups.sums, rows)


def _groups_of(texts: Texts) -> _Groups | None:
    """Return the groups of the trained tokens, or None if weights are not scaled.

    Weights are not scaled if the shard has no supervised documents or `loss_weighting` is "token".
    """
    training, weighting = texts.training, texts.loss_weighting
    if training is None or weighting == "token":
        return None
    count = np.diff(training.span_offsets)
    documents = np.arange(len(count))
    document = np.repeat(documents, count)
    of_spans = document if weighting == "document" else len(count) + training.turn
    # The eos of a document belongs to the group of the document's last span.
    of_documents = documents.copy()
    of_documents[count > 0] = of_spans[training.span_offsets[1:][count > 0] - 1]
    weight = training.document_weight.astype(np.float64)
    # The sum of a document or turn is the weight of the document.
    return _Groups(of_spans, of_documents, np.concatenate((weight, weight[document])))


def _empty_rows(size: int, texts: Texts, pad: int, with_labels: bool, with_groups: bool) -> _Rows:
    """Return flat rows with `size` slots of padding."""
    training, dtype = texts.training, texts.ids.dtype
    is_weighted = training is not None and (with_groups or _is_weighted(training))
    return _Rows(
        np.full(size, pad, dtype),
        np.full(size if with_labels else 0, pad, dtype),
        np.zeros(size, np.uint16),
        np.zeros(size, np.uint8),
        np.zeros(0 if training is None else size, np.uint8),
        np.ones(size if is_weighted else 0, np.float32),
        np.zeros(size if with_groups else 0, np.int64),
    )


class _Writer:
    """A writer that fills the rows with one task's segments at a time."""

    def __init__(
        self,
        segments: Segments,
        texts: Texts,
        first_slot: np.ndarray,
        rows: _Rows,
        epoch: int,
        groups: _Groups | None,
    ):
        self.groups = groups
        self.texts, self.rows, self.epoch = texts, rows, epoch
        self.first_slot = first_slot
        in_row = np.arange(len(segments)) - np.searchsorted(segments.row, segments.row)
        self.segment_id = in_row + 1

    def _write_frames(
        self, task: Task, chosen: np.ndarray, of_task: Segments, copy: int = 0
    ) -> None:
        """Write bos, mode token, eos and segment ids of one copy of the chosen segments."""
        slots = of_task.slots // task.objective.copies
        first_slot = self.first_slot[chosen] + copy * slots
        eos = of_task.eos + of_task.fill
        frames = _Frames(first_slot, slots, of_task.bos, eos, self.segment_id[chosen])
        ids = task.ids.bos, task.mode_token, task.ids.eos
        _write_frames(frames, task.mode, *ids, self.rows)

    def write_next_token(
        self,
        task: Task,
        chosen: np.ndarray,
        of_task: Segments,
        bodies: Bodies,
        prefix: np.ndarray,
    ) -> None:
        """Write the segments of a next-token task."""
        assert task.objective.render is not None
        first_slot, rows = self.first_slot[chosen], self.rows
        columns = BodySlots(self.texts.begin[chosen], bodies, first_slot + of_task.bos + task.mode)
        task.objective.render(task, columns, self.texts.ids, rows.tokens)
        self._write_frames(task, chosen, of_task)
        _write_next_tokens(first_slot, of_task.slots, prefix, task.ids.pad, rows)

    def write_in_place(
        self, t: int, task: Task, chosen: np.ndarray, of_task: Segments, bodies: Bodies
    ) -> Noised:
        """Write the segments of the same-position task with index `t`, and return their noise."""
        texts, rows, first_slot = self.texts, self.rows, self.first_slot[chosen]
        copies = task.objective.copies
        half = of_task.slots // copies
        body = first_slot + of_task.bos + task.mode
        # Every copy gets the original tokens. The noise later replaces tokens of the first copy
        # only.
        for copy in range(copies):
            begin = texts.begin[chosen]
            copy_ranges(texts.ids, begin, bodies.n, rows.tokens, body + copy * half)
            self._write_frames(task, chosen, of_task, copy)
        # Labels are copied before the noise replaces tokens, so they are the original tokens (P10).
        if task.shift:
            for copy in range(copies):  # The labels of each copy end with pad.
                copy_slot = first_slot + copy * half
                copy_ranges(rows.tokens, copy_slot + 1, half - 1, rows.labels, copy_slot)
        else:
            copy_ranges(rows.tokens, first_slot, of_task.slots, rows.labels, first_slot)
        trainable = None if texts.training is None else rows.trainable
        target = target_of(task, of_task, first_slot, rows.tokens, rows.loss_mask, trainable)
        return draw_noise(t, task, target, self.epoch)

    def mark_trained(
        self, task: Task, chosen: np.ndarray, of_task: Segments, bodies: Bodies
    ) -> None:
        """Mark the trainable slots of a task's segments in a shard with supervised documents."""
        training, objective = self.texts.training, task.objective
        assert training is not None
        # Find the slots that the objective adds to the body: `shift` slots before body token
        # `pivot`.
        pivot = np.zeros(len(chosen), np.int64)
        shift = np.zeros(len(chosen), np.int64)
        if objective.token_slots is not None:
            pivot, shift = objective.token_slots(task, bodies).T
        elif not task.in_place:  # Slots that the objective adds to the body are trainable too.
            shift = task.body_slots(bodies) - bodies.n
        # An eos that is never noised is never trained, so it gets no mark.
        noises_eos = task.parameters.get("noise_eos", True)
        is_last, document = self.texts.is_last, of_task.document
        marked = _Marked(
            training.supervised[document],
            self.first_slot[chosen] + of_task.bos + task.mode,
            bodies.n,
            of_task.eos if noises_eos else np.zeros_like(of_task.eos),
            of_task.fill,
            of_task.start,
            of_task.repeated,
            np.ones(len(chosen), np.bool_) if is_last is None else is_last[chosen],
            training.span_offsets[document],
            training.span_offsets[document + 1],
            training.eos_weight[document],
            document if self.groups is None else self.groups.of_documents[document],
            np.ascontiguousarray(pivot),
            np.ascontiguousarray(shift),
        )
        of_spans = np.zeros(0, np.int64) if self.groups is None else self.groups.of_spans
        spans = _Spans(training.spans, training.weights, training.turns, of_spans)
        has_prefix = RULES[objective.attention].ahead == "prefix"
        # Each kernel skips the segments of the other kind of document.
        _mark_bodies(marked, spans, 0 if task.in_place else task.mode, self.rows)
        _mark_spans(marked, spans, has_prefix, self.rows)


def target_of(
    task: Task,
    segments: Segments,
    first_slot: np.ndarray,
    tokens: np.ndarray,
    loss_mask: np.ndarray,
    trainable: np.ndarray | None,
) -> Target:
    """Return the slots that a same-position task may noise: the body and, by default, eos.

    Args:
        task: The task. Its parameter noise_eos = false excludes eos.
        segments: The segments of the task.
        first_slot: int64[m]: first slot of each segment in the flat rows.
        tokens: The flat tokens, which the noise replaces.
        loss_mask: The flat loss mask, which receives the noised slots.
        trainable: One flag per flat slot, or None if all slots are trainable.
    """
    slots_before = segments.bos + task.mode
    eos = segments.eos if task.parameters.get("noise_eos", True) else 0
    count = segments.tokens + segments.repeated + eos + segments.fill
    count = np.where(segments.has_tokens, count, 0)  # Removed documents have no candidates.
    candidates = noise.Candidates(segments.key, first_slot + slots_before, count, segments.row)
    return Target(
        candidates,
        slots_before,
        segments.slots // task.objective.copies,
        trainable,
        tokens,
        loss_mask,
    )


def draw_noise(index: int, task: Task, target: Target, epoch: int = 0) -> Noised:
    """Add noise to the segments of one same-position task.

    Args:
        index: Index of the task.
        task: The task.
        target: The slots to noise, from `target_of`.
        epoch: The epoch. 0 gives the stored noise; later epochs are resampled.

    Returns:
        The noise level and the loss weight of each segment, and its noise blocks if the task has
        them.
    """
    assert task.objective.noise is not None
    return task.objective.noise(
        index, task.parameters, task.resolved, task.ids.for_noise, target, epoch
    )


def _is_weighted(training: Training) -> bool:
    """Return whether any trained token has a weight other than 1."""
    return bool(
        (training.weights != 1).any()
        or ((training.eos_weight != 1) & (training.eos_weight != 0)).any()
    )


def _trained_ranges(first_slot: np.ndarray, segments: Segments, rows: _Rows) -> TrainedRanges:
    """Return the trained ranges of the segments, with weights if any weight is not 1."""
    offsets = np.zeros(len(segments) + 1, np.int64)
    runs = first_slot, segments.slots, rows.trainable, rows.weights, offsets
    # The first run counts the ranges, and the second run writes them.
    ranges = np.zeros((_runs(*runs, np.zeros((0, 2), np.int32)), 2), np.int32)
    _runs(*runs, ranges)
    if len(rows.weights):
        weights = rows.weights[np.repeat(first_slot, np.diff(offsets)) + ranges[:, 0]]
        if (weights != 1).any():
            return TrainedRanges(offsets, ranges, weights)
    return TrainedRanges(offsets, ranges)


def _joined_blocks(count: int, parts: list[tuple[np.ndarray, NoisedBlocks]]) -> NoiseBlocks:
    """Return the noise blocks of all tasks in segment order.

    Args:
        count: Number of all segments.
        parts: For each task, the indices of its segments, and the blocks of these segments.
    """
    counts = np.zeros(count, np.int64)
    for segment, noised in parts:
        counts[segment] = noised.blocks.count
    offsets = offsets_of(counts)
    # The blocks of a single task are already in segment order.
    if len(parts) == 1:
        return NoiseBlocks(offsets, parts[0][1].level, parts[0][1].weight)
    level, weight = np.empty((2, offsets[-1]), np.float32)
    for segment, noised in parts:
        block_counts = noised.blocks.count
        # Block j of a segment goes to index offsets[segment] + j.
        block_indices = np.repeat(offsets[segment], block_counts) + ranks(block_counts)
        level[block_indices], weight[block_indices] = noised.level, noised.weight
    return NoiseBlocks(offsets, level, weight)


def render_shard(
    tasks: Sequence[Task],
    documents: Documents,
    segments: Segments,
    seq_length: int,
    epoch: int = 0,
    loss_weighting: str = "token",
) -> tuple[dict[str, np.ndarray], Segments]:
    """Render segments as `render_rows` does, and add media spans and records of the segments.

    Unless `loss_weighting` is "token", `segments` must have all segments of each document.
    """
    begin, ids = body_tokens(documents, segments)
    document_tokens = np.diff(documents.offsets)[segments.document]
    # If the rest of a document was truncated or left out, none of its segments is the last.
    is_last = segments.start + segments.tokens == document_tokens
    texts = Texts(begin, ids, documents.training, loss_weighting, is_last)
    slots, rendered = render_rows(tasks, segments, texts, seq_length, epoch)
    if documents.training is not None and len(documents.training.places.first):
        rendered = rendered.replace(media=_media(tasks, segments, documents, documents.training))
    if documents.records is not None:
        rendered = rendered.replace(records=_records(segments, documents.records))
    return slots, rendered


def _records(segments: Segments, records: Records) -> Records:
    """Return the records of the segments. The first segment of a document has all of them.

    `records` has the records of all documents. A document without a segment has none in the result.
    """
    # Segments are in row order. Sort them to find the first segment of each document.
    order = np.lexsort((segments.start, segments.document))
    document = segments.document[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = document[1:] != document[:-1]
    counts = np.zeros(len(segments), np.int64)
    counts[order[is_first]] = np.diff(records.offsets)[document[is_first]]
    begin = records.offsets[segments.document]
    record_indices = np.repeat(begin, counts) + ranks(counts)
    position, start, tokens = (column[record_indices] for column in records[1:])
    return Records(offsets_of(counts), position, start, tokens.astype(np.int32))


def render(
    tasks: Sequence[Task],
    documents: Documents,
    segments: Segments,
    seq_length: int,
    pad_seq_to_mult: int,
    epoch: int = 0,
) -> dict[str, np.ndarray]:
    """Return all arrays of a shard by name, as listed in `dataset/shard.py`.

    Args:
        tasks: The plan's tasks.
        documents: The documents.
        segments: The segments in row order.
        seq_length: Slots per row.
        pad_seq_to_mult: Each segment is padded to a multiple of this number of slots.
        epoch: As in `render_rows`.
    """
    slots, rendered = render_shard(tasks, documents, segments, seq_length, epoch)
    return slots | rendered.header_arrays(pad_seq_to_mult)


def _media(
    tasks: Sequence[Task], segments: Segments, documents: Documents, training: Training
) -> MediaSpans | None:
    """Return the media spans of the segments, or None if no segment has a media span."""
    places, counts = training.places, np.diff(training.place_offsets)
    # First token of each media span in the flat tokens of all documents, ascending.
    first_tokens = places.first + np.repeat(documents.offsets[:-1], counts)
    begin = documents.offsets[segments.document] + segments.start
    # Cuts keep media spans whole. A span that starts inside a segment therefore also ends there
    # (P25).
    low, high = (
        np.searchsorted(first_tokens, begin),
        np.searchsorted(first_tokens, begin + segments.tokens),
    )
    count = high - low
    if not count.any():
        return None
    segment = owners(count)
    place_indices = np.repeat(low, count) + ranks(count)
    # `token` is the index of the span's first token in the body.
    token = first_tokens[place_indices] - begin[segment] + segments.repeated[segment]
    slot = (segments.first_slot + segments.bos)[segment] + token
    # The mode token and the slots that an objective adds move a span to later slots.
    for t, task in enumerate(tasks):
        of_task = np.flatnonzero(segments.task[segment] == t)
        slot[of_task] += task.mode
        if len(of_task) and task.objective.token_slots is not None:
            bodies = segments.select(segment[of_task]).bodies()
            pivot, shift = task.objective.token_slots(task, bodies).T
            slot[of_task] += np.where(token[of_task] >= pivot, shift, 0)
    spans = places.at(place_indices)
    return MediaSpans(
        offsets_of(count),
        spans.ref_offsets,
        slot.astype(np.int32),
        spans.tokens.astype(np.int32),
        spans.kind.astype(np.uint16),
        spans.refs,
    )


def body_tokens(documents: Documents, segments: Segments) -> tuple[np.ndarray, np.ndarray]:
    """Return (begin, ids). The first token of segment i's body is ids[begin[i]].

    `begin` is int64[m]. `ids` starts with the tokens of all documents. If a body repeats a system
    message, the message is not next to the body's other tokens in the document. A copy of each such
    body is therefore added at the end of `ids`.
    """
    begin = documents.offsets[segments.document] + segments.start
    repeating = np.flatnonzero(segments.repeated)
    if not len(repeating):
        return begin, documents.ids
    parts, end = [documents.ids], len(documents.ids)
    for g in repeating:
        first_token = documents.offsets[segments.document[g]]
        content = first_token + segments.start[g]
        parts += [
            documents.ids[first_token : first_token + segments.repeated[g]],
            documents.ids[content : content + segments.tokens[g]],
        ]
        begin[g] = end
        end += int(segments.repeated[g] + segments.tokens[g])
    return begin, np.concatenate(parts)
