"""Documents → segment table: where each document is cut, which task each segment draws, how many slots it will take."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from packprep.corpus.reading import Documents
from packprep.errors import RecipeError
from packprep.kernel import bits64, draw_task, integer, kernel, segment_key
from packprep.objectives.objective import Bodies, Task
from packprep.objectives.tasks import SHORTEST, capacities, check_supervised, inner_capacities, thresholds
from packprep.randomness import SEGMENT_LENGTH
from packprep.recipe import Recipe

LONG = {"split": 0, "truncate": 1, "drop": 2}
FORMAT_MAX_SEGMENTS = 65535
"""Segments of a row: their ids are 16-bit, and 0 is padding."""


class SegmentTable(NamedTuple):
    """Segments in document order, one array a column, [m] each."""

    document: np.ndarray  # int64: index into the shard's documents
    start: np.ndarray  # int64: first content token used
    n: np.ndarray  # int64: content tokens
    task: np.ndarray  # int64
    bos: np.ndarray  # int64: 0 or 1
    eos: np.ndarray  # int64: 0 or 1
    key: np.ndarray  # uint64
    copy: np.ndarray  # int64: tokens of the document's system message that are repeated before the content
    first_trained: np.ndarray  # int64: first body token that may be trained; −1 where all may

    def bodies(self) -> Bodies:
        """What decides the form of their bodies."""
        return Bodies(self.n + self.copy, self.key, self.first_trained)


class Cut(NamedTuple):
    """What cutting gives: segments, and the tokens left out, by document."""

    segments: SegmentTable
    untrained: np.ndarray  # int64[D]: tokens of segments without a trained token, in supervised documents


def _empty(count: int) -> SegmentTable:
    return SegmentTable(*(np.empty(count, np.uint64 if name == "key" else np.int64) for name in SegmentTable._fields))


@kernel(inline=True)
def _random_length(key, take, min_tail, probability):
    """The segment's tokens, cut to U{min_tail … take − min_tail} with the task's probability (int64, · 2⁵³)."""
    if probability == 0 or take < 2 * min_tail:
        return take
    if np.int64(bits64(key, SEGMENT_LENGTH, 0, 0) >> np.uint64(11)) >= probability:
        return take
    return min_tail + integer(key, SEGMENT_LENGTH, 4, take - 2 * min_tail + 1, 0)


@kernel
def _cut(
    offsets, position, repeat, source, file_key, skip, limits, capacity, inner, random_length, min_tail, long, bos_on, eos_on,
    write,
    document, start, n, task, bos, eos, key, copy, first_trained,
):  # fmt: skip
    """Cut the documents that are not to be skipped; gives the number of segments. Writes the columns only if `write`.

    capacity, inner: int64[tasks, 2] by task and bos: the most tokens of a document's last piece, and of those before it.
    """
    count = np.int64(0)
    too_short = capacity.shape[0] - 1
    for d in range(offsets.shape[0] - 1):
        total = offsets[d + 1] - offsets[d]
        at = np.int64(0)
        while at < total and not skip[d]:
            rest = total - at
            k = segment_key(file_key[d], position[d], repeat[d], at)
            t = draw_task(k, limits[source[d]]) if rest >= SHORTEST else np.int64(too_short)
            b = bos_on if at == 0 else np.int64(0)
            e = eos_on
            take = rest
            if rest >= SHORTEST and rest > capacity[t, b]:
                if long == 2:
                    break
                e = np.int64(0)
                take = min(inner[t, b], rest if long == 1 else rest - min_tail)
            if long == 0:
                shorter = _random_length(k, take, min_tail, random_length[t])
                if shorter < take:
                    take, e = shorter, np.int64(0)
            if write:
                document[count], start[count], n[count], task[count] = d, at, take, t
                bos[count], eos[count], key[count] = b, e, k
                copy[count], first_trained[count] = 0, -1
            count += 1
            at += take
            if long == 1:
                break
    return count


@kernel
def _cut_supervised(
    offsets, position, repeat, source, file_key, wanted, limits, capacity, inner, min_tail, long, bos_on, eos_on,
    span_offsets, spans, cut_offsets, cuts, system, write,
    document, start, n, task, bos, eos, key, copy, first_trained, untrained,
):  # fmt: skip
    """Cut the wanted documents, at message boundaries where they fit; segments without a trained token are left out.

    Later pieces repeat the system message where that leaves room for two tails. Gives the number of segments. capacity,
    inner: as for `_cut`.
    """
    count = np.int64(0)
    too_short = capacity.shape[0] - 1
    for d in range(offsets.shape[0] - 1):
        total = offsets[d + 1] - offsets[d]
        at, span, boundary = np.int64(0), span_offsets[d], cut_offsets[d]
        while at < total and wanted[d]:
            rest = total - at
            k = segment_key(file_key[d], position[d], repeat[d], at)
            t = draw_task(k, limits[source[d]]) if rest >= SHORTEST else np.int64(too_short)
            b = bos_on if at == 0 else np.int64(0)
            repeated = system[d] if at > 0 else np.int64(0)
            if min(capacity[t, b], inner[t, b]) - repeated < 2 * min_tail - 1:
                repeated = np.int64(0)
            take, e = rest, eos_on
            if rest > capacity[t, b] - repeated:
                if long == 2:
                    break
                e = np.int64(0)
                space = inner[t, b] - repeated
                take = min(space, rest if long == 1 else rest - min_tail)
                while boundary < cut_offsets[d + 1] and cuts[boundary] < at + SHORTEST:
                    boundary += 1
                last = boundary
                while last < cut_offsets[d + 1] and cuts[last] <= at + space and total - cuts[last] >= min_tail:
                    take = cuts[last] - at
                    last += 1
            while span < span_offsets[d + 1] and spans[span, 1] <= at:
                span += 1
            if span < span_offsets[d + 1] and spans[span, 0] < at + take:
                if write:
                    document[count], start[count], n[count], task[count] = d, at, take, t
                    bos[count], eos[count], key[count] = b, e, k
                    copy[count], first_trained[count] = repeated, repeated + max(spans[span, 0] - at, 0)
                    if repeated == 0 and spans[span, 0] <= at and spans[span, 1] >= at + take:
                        first_trained[count] = -1  # all of it is trained
                count += 1
            elif write:
                untrained[d] += take
            at += take
            if long == 1:
                break
    return count


@kernel
def _cut_at_row_ends(
    offsets, position, repeat, source, file_key, limits, overhead, most, length, most_segments, bos_on, eos_on, write,
    document, start, n, task, bos, eos, key, copy, first_trained, row, offset,
):  # fmt: skip
    """`concat`: lay the documents end to end and cut where rows end; gives the number of segments.

    overhead: int64[tasks], slots beyond tokens, bos and eos. A remainder of fewer than 2 slots stays padding; the last
    token waits for the next row if its eos would stand there alone. A row ends early with its `most_segments`-th segment.
    """
    count, r, fill, in_row = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    too_short = overhead.shape[0] - 1
    for d in range(offsets.shape[0] - 1):
        total = offsets[d + 1] - offsets[d]
        at = np.int64(0)
        while at < total:
            rest, room = total - at, length - fill
            if room < 2 or in_row == most_segments:
                r, fill, in_row = r + 1, np.int64(0), np.int64(0)
                continue
            k = segment_key(file_key[d], position[d], repeat[d], at)
            b = bos_on if at == 0 else np.int64(0)
            t = draw_task(k, limits[source[d]]) if rest >= SHORTEST else np.int64(too_short)
            take, e = np.int64(0), np.int64(0)
            while True:
                space = room - overhead[t] - b
                if rest <= min(space - eos_on, most):
                    take, e = rest, eos_on
                else:
                    take, e = min(space, rest - 1, most), np.int64(0)
                if take >= SHORTEST or t == too_short:
                    break
                t = np.int64(too_short)
            if take < 1:
                r, fill, in_row = r + 1, np.int64(0), np.int64(0)
                continue
            if write:
                document[count], start[count], n[count], task[count] = d, at, take, t
                bos[count], eos[count], key[count] = b, e, k
                copy[count], first_trained[count] = 0, -1
                row[count], offset[count] = r, fill
            count += 1
            in_row += 1
            fill += take + overhead[t] + b + e
            at += take
    return count


def cut(recipe: Recipe, tasks: Sequence[Task], documents: Documents) -> Cut:
    """The segments of documents, all of at least one token, in document order.

    A document is taken whole if it fits with eos; else as much as `inner_capacity` says, leaving a tail of at least
    max(3, min_tokens). Every segment draws its own task; fewer than 3 tokens go to `too_short`.
    A supervised document draws among the tasks that allow it; RecipeError if its source has none.
    """
    training = documents.training
    skip = np.zeros(len(documents.position), np.uint8) if training is None else training.supervised
    places = (documents.offsets, documents.position, documents.repeat, documents.source, documents.file_key, skip)
    capacity = np.ascontiguousarray(capacities(recipe, tasks)[:, :, int(recipe.documents.append_eos)])
    inner = inner_capacities(recipe, tasks)
    policy = (
        recipe.min_tail,
        LONG[recipe.documents.long],
        int(recipe.documents.prepend_bos),
        int(recipe.documents.append_eos),
    )
    lengths = np.array([int(task.parameters.get("random_length", 0.0) * 2**53) for task in tasks], np.int64)
    arguments = (*places, thresholds(recipe), capacity, inner, lengths, *policy)
    plain = _empty(_cut(*arguments, False, *_empty(0)))
    _cut(*arguments, True, *plain)
    untrained = np.zeros(len(documents.position), np.int64)
    if training is None:
        return Cut(plain, untrained)
    limits = thresholds(recipe, supervised=True)
    for s in np.unique(documents.source[training.supervised != 0]):
        check_supervised(recipe, int(s))
    marks = (training.span_offsets, training.spans, training.cut_offsets, training.cuts, training.system)
    of_marked = (*places, limits, capacity, inner, *policy, *marks)
    marked = _empty(_cut_supervised(*of_marked, False, *_empty(0), untrained))
    _cut_supervised(*of_marked, True, *marked, untrained)
    together = SegmentTable(*(np.concatenate(columns) for columns in zip(plain, marked, strict=True)))
    order = np.argsort(together.document, kind="stable")
    return Cut(SegmentTable(*(column[order] for column in together)), untrained)


def cut_at_row_ends(
    recipe: Recipe, tasks: Sequence[Task], documents: Documents
) -> tuple[SegmentTable, np.ndarray, np.ndarray]:
    """(segments, row int64[m], offset int64[m]) of `concat`."""
    if documents.training is not None:
        raise RecipeError('concat cuts where rows end, and so through messages; use packing.algorithm = "best_fit"')
    if recipe.documents.long != "split":
        raise RecipeError(f'documents.long = "{recipe.documents.long}": concat cuts documents at row ends; use "split"')
    one = np.ones(1, np.int64)
    a_token = Bodies(one, one.astype(np.uint64), -one)
    overhead = np.array([task.slots(a_token, 0 * one, 0 * one)[0] - 1 for task in tasks], np.int64)
    arguments = (
        documents.offsets,
        documents.position,
        documents.repeat,
        documents.source,
        documents.file_key,
        thresholds(recipe),
        overhead,
        recipe.documents.max_tokens or recipe.seq_length,
        recipe.seq_length,
        recipe.packing.max_segments_per_row or FORMAT_MAX_SEGMENTS,
        int(recipe.documents.prepend_bos),
        int(recipe.documents.append_eos),
    )
    nothing = np.empty(0, np.int64)
    count = _cut_at_row_ends(*arguments, False, *_empty(0), nothing, nothing)
    segments, row, offset = _empty(count), np.empty(count, np.int64), np.empty(count, np.int64)
    _cut_at_row_ends(*arguments, True, *segments, row, offset)
    return segments, row, offset


def slots_of(tasks: Sequence[Task], segments: SegmentTable) -> np.ndarray:
    """int64[m]: the length law of each segment's task."""
    slots = np.empty(len(segments.n), np.int64)
    for t, task in enumerate(tasks):
        own = np.flatnonzero(segments.task == t)
        if len(own):
            some = SegmentTable(*(column[own] for column in segments))
            slots[own] = task.slots(some.bodies(), some.bos, some.eos)
    return slots
