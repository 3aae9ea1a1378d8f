"""Documents → segment table: where each document is cut, which task each segment draws, how many
slots it takes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from packprep.conversations.supervision import ANYWHERE
from packprep.dataset.attention import RULES
from packprep.documents.reading import Documents
from packprep.errors import RecipeError
from packprep.kernel import bits64, draw_task, integer, kernel, segment_key
from packprep.objectives.objective import Bodies, Task
from packprep.objectives.tasks import SHORTEST, capacities, check_supervised, thresholds
from packprep.randomness import SEGMENT_LENGTH
from packprep.recipe import Recipe

LONG = {"split": 0, "truncate": 1, "drop": 2, "decompose": 3}
FORMAT_MAX_SEGMENTS = 65535
"""Segments of a row: their ids are 16-bit, and 0 is padding."""


class SegmentTable(NamedTuple):
    """Segments, one array a column, [m] each: in document order as `cut` makes it, in row order as
    `packing.place` gives it."""

    document: np.ndarray  # int64: index into the shard's documents
    start: np.ndarray  # int64: first content token used
    n: np.ndarray  # int64: content tokens
    task: np.ndarray  # int64
    bos: np.ndarray  # int64: 0 or 1
    eos: np.ndarray  # int64: 0 or 1
    key: np.ndarray  # uint64
    # int64: tokens of the document's system message that are repeated before the content
    copy: np.ndarray
    # int64: first trained body token of a supervised document; −1 of others
    first_trained: np.ndarray
    slots: np.ndarray  # int64: by the length law
    row: np.ndarray  # int64: of `concat`, which cuts where rows end; else packing gives it
    first_slot: np.ndarray  # int64: in the row

    def of(self, which: np.ndarray) -> "SegmentTable":
        """Some of its segments, or all in another order."""
        return SegmentTable(*(column[which] for column in self))

    def bodies(self, epoch: int = 0) -> Bodies:
        """What decides the form of their bodies in an epoch."""
        return Bodies(self.n + self.copy, self.key, self.first_trained, epoch)


def expected_prefix(task: Task, bodies: Bodies, bos: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """int64[m]: the leading slots that see each other both ways, by the objective's rule of
    attention."""
    ahead = RULES[task.objective.attention].ahead
    if ahead == "prefix":
        assert task.objective.body_prefix is not None
        return bos + task.mode + task.objective.body_prefix(task, bodies)
    if ahead == "segment":
        return slots
    return np.full(len(slots), 0 if ahead == "never" else -1, np.int64)


def inputs_of(tasks: Sequence[Task], table: SegmentTable) -> np.ndarray:
    """int64[m]: the slots of the segments' prefixes, in the stored rows."""
    inputs = np.zeros(len(table.task), np.int64)
    for t, task in enumerate(tasks):
        chosen = np.flatnonzero(table.task == t)
        if len(chosen):
            segments = table.of(chosen)
            inputs[chosen] = expected_prefix(task, segments.bodies(), segments.bos, segments.slots)
    return inputs


class CutLimits(NamedTuple):
    """What cutting takes from a recipe and its tasks alone: the same for every shard."""

    drawn: np.ndarray  # int64[sources, tasks]: thresholds of the tasks that segments draw
    drawn_supervised: np.ndarray  # … that segments of supervised documents draw
    # int64[lengths, tasks, 2], by row length and bos: the most tokens of a document's last piece
    capacity: np.ndarray
    inner: np.ndarray  # int64[lengths, tasks, 2], by bos: of those before it
    # int64[tasks]: how probably a segment is cut to a random length, · 2⁵³
    random_length: np.ndarray
    # int64[tasks, 2], by bos: leading tokens of a supervised body that nothing predicts
    unpredicted: np.ndarray


def cut_limits(recipe: Recipe, tasks: Sequence[Task]) -> CutLimits:
    """The limits by which `cut` cuts for these tasks of a recipe."""
    found = [capacities(replace(recipe, seq_length=length), tasks) for length in recipe.lengths]
    last, inner = (np.stack(of_lengths) for of_lengths in zip(*found, strict=True))
    capacity = np.ascontiguousarray(last[..., int(recipe.documents.eos_after_document)])
    random_length = np.array(
        [int(task.parameters.get("random_length", 0.0) * 2**53) for task in tasks], np.int64
    )
    drawn, drawn_supervised = thresholds(recipe), thresholds(recipe, supervised=True)
    unpredicted = np.array(
        [[_unpredicted(task, bos) for bos in (0, 1)] for task in tasks], np.int64
    )
    return CutLimits(drawn, drawn_supervised, capacity, inner, random_length, unpredicted)


def _unpredicted(task: Task, bos: int) -> int:
    """Return how many leading tokens of a supervised body nothing predicts: 1 where the body begins
    the segment, or a prefix, which holds its first token. In-place tasks without shift predict each
    token at its own slot."""
    if task.in_place and not task.shift:
        return 0
    return int(RULES[task.objective.attention].ahead == "prefix" or bos + task.mode == 0)


class LeftOut(NamedTuple):
    """Tokens of documents that are in no segment, or in one where they should be trained and are
    not; int64[D] each."""

    # of segments of supervised documents that are left out, for nothing in them is trained
    untrained: np.ndarray
    apart: np.ndarray  # of answers in pieces without the message that they answer, left out or not
    elsewhere: np.ndarray  # that the datasets of other row lengths have
    # of a document's longest place of media, where one fits into no segment; 0: all do
    unfit: np.ndarray


_CUT = SegmentTable._fields[: SegmentTable._fields.index("slots")]  # the columns that kernels write
_DTYPES = [np.uint64 if name == "key" else np.int64 for name in _CUT]
_NO_COLUMNS = [np.empty(0, dtype) for dtype in _DTYPES]  # where segments are only counted


def table_of(
    tasks: Sequence[Task], columns: Sequence[np.ndarray], row: np.ndarray | None = None
) -> SegmentTable:
    """The table of the columns that cutting gives, `document` … `first_trained`, and of their rows
    where it gives these."""
    nowhere = np.zeros(len(columns[0]), np.int64)
    table = SegmentTable(*[*columns, nowhere.copy(), nowhere if row is None else row, nowhere])
    for t, task in enumerate(tasks):
        chosen = np.flatnonzero(table.task == t)
        if len(chosen):
            segments = table.of(chosen)
            table.slots[chosen] = task.slots(segments.bodies(), segments.bos, segments.eos)
    return table


@kernel(inline=True)
def _random_length(key, take, min_tail, probability):
    """The segment's tokens, cut to U{min_tail … take − min_tail} with the task's probability
    (int64, · 2⁵³)."""
    if probability == 0 or take < 2 * min_tail:
        return take
    if np.int64(bits64(key, SEGMENT_LENGTH, 0, 0) >> np.uint64(11)) >= probability:
        return take
    return min_tail + integer(key, SEGMENT_LENGTH, 4, take - 2 * min_tail + 1, 0)


@kernel
def _lengths_of(
    offsets,
    position,
    repeat,
    source,
    file_key,
    supervised,
    drawn,
    drawn_supervised,
    capacity,
    bos,
    length,
):
    """Write the number of the row length that takes each document: the first that holds it whole,
    else most of it."""
    for d in range(offsets.shape[0] - 1):
        total = offsets[d + 1] - offsets[d]
        t = np.int64(capacity.shape[1] - 1)
        if total >= SHORTEST:
            k = segment_key(file_key[d], position[d], repeat[d], np.int64(0))
            t = draw_task(k, drawn_supervised[source[d]] if supervised[d] else drawn[source[d]])
        chosen = np.int64(0)
        for longer in range(1, capacity.shape[0]):
            if capacity[chosen, t, bos] < min(total, capacity[longer, t, bos]):
                chosen = np.int64(longer)
        length[d] = chosen


@kernel
def _cut(
    offsets,
    position,
    repeat,
    source,
    file_key,
    skip,
    limits,
    capacity,
    inner,
    own,
    random_length,
    min_tail,
    long,
    bos_on,
    eos_last,
    eos_inner,
    write,
    document,
    start,
    n,
    task,
    bos,
    eos,
    key,
    copy,
    first_trained,
    elsewhere,
):
    """Cut the documents that are not to be skipped; gives the number of segments. Writes the
    columns only if `write`.

    capacity, inner: int64[lengths, tasks, 2] by row length, task and bos: the most tokens of a
    document's last piece, and of those before it. own: the number of the dataset's row length.
    elsewhere: tokens of pieces that fill rows of another one. eos_last, eos_inner: 0 or 1, whether
    eos ends a document's last piece, and each piece before it.
    """
    count = np.int64(0)
    too_short = capacity.shape[1] - 1
    for d in range(offsets.shape[0] - 1):
        total = offsets[d + 1] - offsets[d]
        at = np.int64(0)
        while at < total and not skip[d]:
            rest = total - at
            k = segment_key(file_key[d], position[d], repeat[d], at)
            t = draw_task(k, limits[source[d]]) if rest >= SHORTEST else np.int64(too_short)
            b = bos_on if at == 0 else np.int64(0)
            e = eos_last
            take = rest
            row = own
            if long == 3:  # the longest that the rest fills, else the shortest
                row = np.int64(0)
                for longer in range(1, capacity.shape[0]):
                    if capacity[row, t, b] < capacity[longer, t, b] <= rest:
                        row = np.int64(longer)
            if rest >= SHORTEST and rest > capacity[row, t, b]:
                if long == 2:
                    break
                e = eos_inner
                take = min(inner[row, t, b], rest if long == 1 else rest - min_tail)
            if long == 0:
                shorter = _random_length(k, take, min_tail, random_length[t])
                if shorter < take:
                    take, e = shorter, eos_inner
            if row != own:
                if write:
                    elsewhere[d] += take
                at += take
                continue
            if write:
                document[count], start[count], n[count], task[count] = d, at, take, t
                bos[count], eos[count], key[count] = b, e, k
                copy[count], first_trained[count] = 0, -1
            count += 1
            at += take
            if long == 1:
                break
    return count


@kernel(inline=True)
def trained_in(turns, span, at):
    """Whether a piece that begins at token `at` of its document trains what it holds of a span, as
    `Training` says."""
    return at < turns[span, 1] or turns[span, 0] < at


@kernel
def _cut_supervised(
    offsets,
    position,
    repeat,
    source,
    file_key,
    wanted,
    limits,
    capacity,
    inner,
    unpredicted,
    min_tail,
    long,
    bos_on,
    eos_last,
    eos_inner,
    has_sides,
    span_offsets,
    spans,
    turns,
    eos_weight,
    cut_offsets,
    cuts,
    ranks,
    system,
    place_offsets,
    places,
    write,
    document,
    start,
    n,
    task,
    bos,
    eos,
    key,
    copy,
    first_trained,
    untrained,
    apart,
    unfit,
):
    """Cut the wanted documents, at the last message of the highest rank in reach, else inside;
    segments without a trained token, or whose only one nothing predicts, are left out, and of rows
    of two sides those of `too_short`, which has but one.

    A cut that would fall into a place falls before it, or behind one with which its piece begins;
    where that does not fit, the document is turned away. Later pieces repeat the system message
    where that leaves room for two tails and any place. Gives the number of segments. capacity,
    inner: as for `_cut`, of the dataset's row length. unpredicted: as in CutLimits. apart: tokens
    of trained spans that are not trained where they stand. places: int64[k, 2], of media.
    """
    count = np.int64(0)
    too_short = capacity.shape[0] - 1
    for d in range(offsets.shape[0] - 1):
        total, before = offsets[d + 1] - offsets[d], count
        at, span, boundary = np.int64(0), span_offsets[d], cut_offsets[d]
        place, widest = place_offsets[d], np.int64(0)
        for p in range(place_offsets[d], place_offsets[d + 1]):
            widest = max(widest, places[p, 1] - places[p, 0])
        while at < total and wanted[d]:
            rest = total - at
            k = segment_key(file_key[d], position[d], repeat[d], at)
            t = draw_task(k, limits[source[d]]) if rest >= SHORTEST else np.int64(too_short)
            b = bos_on if at == 0 else np.int64(0)
            repeated = system[d] if at > 0 else np.int64(0)
            if min(capacity[t, b], inner[t, b]) - repeated < max(2 * min_tail - 1, widest):
                repeated = np.int64(0)
            take, e = rest, eos_last
            if rest > capacity[t, b] - repeated:
                if long == 2:
                    break
                e = eos_inner
                space = inner[t, b] - repeated
                take = min(space, rest if long == 1 else rest - min_tail)
                while boundary < cut_offsets[d + 1] and cuts[boundary] < at + SHORTEST:
                    boundary += 1
                last, best = boundary, ANYWHERE
                while (
                    last < cut_offsets[d + 1]
                    and cuts[last] <= at + space
                    and total - cuts[last] >= min_tail
                ):
                    if ranks[last] >= best:
                        take, best = cuts[last] - at, ranks[last]
                    last += 1
                while place < place_offsets[d + 1] and places[place, 1] <= at + take:
                    place += 1
                if place < place_offsets[d + 1] and places[place, 0] < at + take:
                    take = places[place, 0] - at
                    if take == 0:
                        take = places[place, 1] - at
                        if take == rest or take > max(space, capacity[t, b] - repeated):
                            count = before
                            if write:
                                untrained[d], apart[d], unfit[d] = 0, 0, widest
                            break
                    if take < SHORTEST:
                        t = np.int64(too_short)
            while span < span_offsets[d + 1] and spans[span, 1] <= at:
                span += 1
            inside, first, last = span, np.int64(-1), np.int64(-1)
            while inside < span_offsets[d + 1] and spans[inside, 0] < at + take:
                begin, end = max(spans[inside, 0], at), min(spans[inside, 1], at + take)
                if trained_in(turns, inside, at):
                    first, last = (begin if first < 0 else first), end - 1
                elif write:
                    apart[d] += end - begin
                inside += 1
            if take == rest:
                is_end_trained = eos_weight[d] > 0 and trained_in(
                    turns, span_offsets[d + 1] - 1, at
                )
            else:
                is_end_trained = last == at + take - 1
            is_trained = first >= 0 and (
                repeated + last - at >= unpredicted[t, b] or (e > 0 and is_end_trained)
            )
            if is_trained and not (has_sides and t == too_short):
                # of a document that is turned away later, there may be no room
                if write and count < document.shape[0]:
                    document[count], start[count], n[count], task[count] = d, at, take, t
                    bos[count], eos[count], key[count] = b, e, k
                    copy[count], first_trained[count] = repeated, repeated + first - at
                count += 1
            elif write:
                untrained[d] += take
            at += take
            if long == 1:
                break
    return count


@kernel
def _cut_at_row_ends(
    offsets, position, repeat, source, file_key, limits, overhead, most, length, most_segments,
    bos_on, eos_last, eos_inner, write,
    document, start, n, task, bos, eos, key, copy, first_trained, row,
):  # fmt: skip
    """`concat`: lay the documents end to end and cut where rows end; gives the number of segments.

    overhead: int64[tasks], slots beyond tokens, bos and eos. A remainder of fewer than 2 slots
    stays padding; the last token waits for the next row if its eos would stand there alone. A row
    ends early with its `most_segments`-th segment.
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
                if rest <= min(space - eos_last, most):
                    take, e = rest, eos_last
                else:
                    take, e = min(space - eos_inner, rest - 1, most), eos_inner
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
                row[count] = r
            count += 1
            in_row += 1
            fill += take + overhead[t] + b + e
            at += take
    return count


def cut(
    recipe: Recipe, tasks: Sequence[Task], documents: Documents, limits: CutLimits | None = None
) -> tuple[SegmentTable, LeftOut]:
    """The segments of documents, all of at least one token, in document order; and what they leave
    out.

    A document is taken whole if it fits with eos; else as much as `inner_capacity` says, leaving a
    tail of at least max(3, min_tokens). Every segment draws its own task; fewer than 3 tokens go to
    `too_short`. A supervised document draws among the tasks that allow it; RecipeError if its
    source has none. `concat` cuts where rows end, and gives each segment its row. Of several
    seq_lengths a document, or with "decompose" each piece, is of one, and those of others are left
    out. limits: those of recipe and tasks, where they are known.
    """
    training = documents.training
    lost = LeftOut(*(np.zeros(len(documents.position), np.int64) for _ in LeftOut._fields))
    if recipe.packing.algorithm == "concat":
        return table_of(tasks, *_columns_of_concat(recipe, tasks, documents)), lost
    supervised = (
        np.zeros(len(documents.position), np.uint8) if training is None else training.supervised
    )
    for s in np.unique(documents.source[supervised != 0]):
        check_supervised(recipe, int(s))
    of_documents = (
        documents.offsets,
        documents.position,
        documents.repeat,
        documents.source,
        documents.file_key,
    )
    limits, own = limits or cut_limits(recipe, tasks), recipe.lengths.index(recipe.seq_length)
    others = np.zeros(len(supervised), np.bool_)
    if recipe.seq_lengths and recipe.documents.long != "decompose":
        length, drawn = np.empty(len(supervised), np.int64), (limits.drawn, limits.drawn_supervised)
        _lengths_of(
            *of_documents,
            supervised,
            *drawn,
            limits.capacity,
            int(recipe.documents.prepend_bos),
            length,
        )
        others = length != own
        lost.elsewhere[others] = np.diff(documents.offsets)[others]
    policy = (
        recipe.min_tail,
        LONG[recipe.documents.long],
        int(recipe.documents.prepend_bos),
        int(recipe.documents.eos_after_document),
        int(recipe.documents.eos_after_segment),
    )
    skip = (supervised != 0) | others
    arguments = (
        *of_documents,
        skip.astype(np.uint8),
        limits.drawn,
        limits.capacity,
        limits.inner,
        own,
        limits.random_length,
        *policy,
    )
    count = _cut(*arguments, False, *_NO_COLUMNS, lost.elsewhere)
    plain = [np.empty(count, dtype) for dtype in _DTYPES]
    _cut(*arguments, True, *plain, lost.elsewhere)
    if training is None:
        return table_of(tasks, plain), lost
    wanted = ((supervised != 0) & ~others).astype(np.uint8)
    supervision = (
        training.span_offsets, training.spans, training.turns, training.eos_weight,
        training.cut_offsets, training.cuts, training.ranks, training.system,
        training.place_offsets, training.places.spans,
    )  # fmt: skip
    of_one_length = (
        limits.drawn_supervised,
        limits.capacity[own],
        limits.inner[own],
        limits.unpredicted,
    )
    of_lost = lost.untrained, lost.apart, lost.unfit
    of_supervised = (
        *of_documents,
        wanted,
        *of_one_length,
        *policy,
        int(recipe.packing.sides is not None),
        *supervision,
    )
    count = _cut_supervised(*of_supervised, False, *_NO_COLUMNS, *of_lost)
    cut_at_messages = [np.empty(count, dtype) for dtype in _DTYPES]
    _cut_supervised(*of_supervised, True, *cut_at_messages, *of_lost)
    together = table_of(
        tasks, [np.concatenate(column) for column in zip(plain, cut_at_messages, strict=True)]
    )
    return together.of(np.argsort(together.document, kind="stable")), lost


def _columns_of_concat(
    recipe: Recipe, tasks: Sequence[Task], documents: Documents
) -> tuple[list[np.ndarray], np.ndarray]:
    """(columns of the table, row int64[m]) of `concat`."""
    if documents.training is not None and documents.training.supervised.any():
        raise RecipeError(
            "concat cuts where rows end, and so through messages; use packing.algorithm ="
            ' "best_fit"'
        )
    if recipe.documents.long != "split":
        raise RecipeError(
            f'documents.long = "{recipe.documents.long}": concat cuts documents at row ends; use'
            ' "split"'
        )
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
        int(recipe.documents.eos_after_document),
        int(recipe.documents.eos_after_segment),
    )
    count = _cut_at_row_ends(*arguments, False, *_NO_COLUMNS, np.empty(0, np.int64))
    columns, row = [np.empty(count, dtype) for dtype in _DTYPES], np.empty(count, np.int64)
    _cut_at_row_ends(*arguments, True, *columns, row)
    return columns, row
