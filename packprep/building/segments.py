"""Documents → segment table: where each document is cut, which task each segment draws, how many slots it will take."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from packprep.corpus.reading import Documents
from packprep.errors import RecipeError
from packprep.kernel import draw_task, kernel, segment_key
from packprep.objectives.objective import Task
from packprep.objectives.tasks import SHORTEST, capacities, thresholds
from packprep.recipe import Recipe

LONG = {"split": 0, "truncate": 1, "drop": 2}
FORMAT_MAX_SEGMENTS = 65535
"""Segments of a row: their ids are 16-bit, and 0 is padding."""


class Segments(NamedTuple):
    """Segments in document order, one array a column, [m] each."""

    document: np.ndarray  # int64: index into the shard's documents
    start: np.ndarray  # int64: first content token used
    n: np.ndarray  # int64: content tokens
    task: np.ndarray  # int64
    bos: np.ndarray  # int64: 0 or 1
    eos: np.ndarray  # int64: 0 or 1
    key: np.ndarray  # uint64


def _empty(count: int) -> Segments:
    return Segments(*(np.empty(count, np.uint64 if name == "key" else np.int64) for name in Segments._fields))


@kernel
def _cut(
    offsets, position, repeat, source, file_key, limits, capacity, min_tail, long, bos_on, eos_on, write,
    document, start, n, task, bos, eos, key,
):  # fmt: skip
    """Cut every document; gives (segments, documents dropped). Writes the columns only if `write`."""
    count, dropped = np.int64(0), np.int64(0)
    too_short = capacity.shape[0] - 1
    for d in range(offsets.shape[0] - 1):
        total = offsets[d + 1] - offsets[d]
        at = np.int64(0)
        while at < total:
            rest = total - at
            k = segment_key(file_key[d], position[d], repeat[d], at)
            t = draw_task(k, limits[source[d]]) if rest >= SHORTEST else np.int64(too_short)
            b = bos_on if at == 0 else np.int64(0)
            e = eos_on
            take = rest
            if rest >= SHORTEST and rest > capacity[t, b, eos_on]:
                if long == 2:
                    dropped += 1
                    break
                e = np.int64(0)
                take = min(capacity[t, b, 0], rest if long == 1 else rest - min_tail)
            if write:
                document[count], start[count], n[count], task[count] = d, at, take, t
                bos[count], eos[count], key[count] = b, e, k
            count += 1
            at += take
            if long == 1:
                break
    return count, dropped


@kernel
def _cut_at_row_ends(
    offsets, position, repeat, source, file_key, limits, overhead, most, length, most_segments, bos_on, eos_on, write,
    document, start, n, task, bos, eos, key, row, offset,
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
                row[count], offset[count] = r, fill
            count += 1
            in_row += 1
            fill += take + overhead[t] + b + e
            at += take
    return count


def cut(recipe: Recipe, tasks: Sequence[Task], documents: Documents) -> tuple[Segments, int]:
    """(segments, documents dropped by long = "drop") of documents, all of at least one token.

    A document is taken whole if it fits with eos; else as much as fits without, leaving a tail of at least
    max(3, min_tokens). Every segment draws its own task; fewer than 3 tokens go to `too_short`.
    """
    arguments = (
        documents.offsets,
        documents.position,
        documents.repeat,
        documents.source,
        documents.file_key,
        thresholds(recipe),
        capacities(recipe, tasks),
        recipe.min_tail,
        LONG[recipe.documents.long],
        int(recipe.documents.prepend_bos),
        int(recipe.documents.append_eos),
    )
    count, dropped = _cut(*arguments, False, *_empty(0))
    segments = _empty(count)
    _cut(*arguments, True, *segments)
    return segments, dropped


def cut_at_row_ends(
    recipe: Recipe, tasks: Sequence[Task], documents: Documents
) -> tuple[Segments, np.ndarray, np.ndarray]:
    """(segments, row int64[m], offset int64[m]) of `concat`."""
    if recipe.documents.long != "split":
        raise RecipeError(f'documents.long = "{recipe.documents.long}": concat cuts documents at row ends; use "split"')
    one = np.ones(1, np.int64)
    overhead = np.array([task.slots(one, 0 * one, 0 * one, one.astype(np.uint64))[0] - 1 for task in tasks], np.int64)
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


def slots_of(tasks: Sequence[Task], segments: Segments) -> np.ndarray:
    """int64[m]: the length law of each segment's task."""
    slots = np.empty(len(segments.n), np.int64)
    for t, task in enumerate(tasks):
        of_task = segments.task == t
        if of_task.any():
            slots[of_task] = task.slots(
                segments.n[of_task], segments.bos[of_task], segments.eos[of_task], segments.key[of_task]
            )
    return slots
