"""Cut documents into segments, draw each segment's task, and compute its slots.

document      10 11 12 13 14 15 16 17 18 19       10 tokens, a row holds 6 with bos and eos
segments      10 11 12 13 14 │ 15 16 17 18 19     start 0, 5   tokens 5, 5   bos 1, 0   eos 0, 1
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from packprep.conversations.training import ANYWHERE, END_OF_HISTORY, NEW_TEXT, Training
from packprep.dataset.attention import RULES
from packprep.dataset.segments import Bodies, Segments
from packprep.documents.reading import Documents
from packprep.errors import RecipeError
from packprep.kernel import bits64, draw_task, integer, kernel, segment_key
from packprep.objectives.objective import Task
from packprep.objectives.tasks import SHORTEST, capacities, check_supervised, thresholds
from packprep.randomness import SEGMENT_LENGTH
from packprep.recipe import Recipe

SPLIT, TRUNCATE, DROP, DECOMPOSE = range(4)
LONG = {"split": SPLIT, "truncate": TRUNCATE, "drop": DROP, "decompose": DECOMPOSE}
FORMAT_MAX_SEGMENTS = 65535
"""Maximum number of segments per row. Segment ids are 16-bit, and 0 is padding."""


def expected_prefix(task: Task, bodies: Bodies, bos: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Return the length of each segment's bidirectional prefix, in slots, int64[m].

    The slots of a prefix attend to each other in both directions. The objective's attention pattern
    determines the length. It is -1 for patterns that a prefix cannot describe.
    """
    ahead = RULES[task.objective.attention].ahead
    if ahead == "prefix":
        assert task.objective.body_prefix is not None
        return bos + task.mode + task.objective.body_prefix(task, bodies)
    if ahead == "segment":
        return slots
    return np.full(len(slots), 0 if ahead == "never" else -1, np.int64)


def inputs_of(tasks: Sequence[Task], segments: Segments) -> np.ndarray:
    """Return the slots of the segments' prefixes in the stored rows, int64[m]."""
    inputs = np.zeros(len(segments), np.int64)
    for t, task in enumerate(tasks):
        chosen = np.flatnonzero(segments.task == t)
        if len(chosen):
            of_task = segments.select(chosen)
            inputs[chosen] = expected_prefix(task, of_task.bodies(), of_task.bos, of_task.slots)
    return inputs


class CutLimits(NamedTuple):
    """The limits that cutting takes from a recipe and its tasks, equal for every shard."""

    drawn: np.ndarray  # int64[sources, tasks]: thresholds for drawing a segment's task
    # int64[sources, tasks]: thresholds for segments of supervised documents
    drawn_supervised: np.ndarray
    # int64[lengths, tasks, 2], by row length and bos: maximum tokens of a document's last chunk
    capacity: np.ndarray
    inner: np.ndarray  # int64[lengths, tasks, 2]: maximum tokens of the earlier chunks
    # int64[tasks]: probability of cutting a segment to a random length, times 2⁵³
    random_length: np.ndarray
    # int64[tasks, 2], by bos: leading tokens of a supervised body that no slot predicts
    unpredicted: np.ndarray


def cut_limits(recipe: Recipe, tasks: Sequence[Task]) -> CutLimits:
    """Return the limits that `cut` applies for these tasks of a recipe."""
    by_length = [capacities(replace(recipe, seq_length=length), tasks) for length in recipe.lengths]
    last, inner = (np.stack(capacity) for capacity in zip(*by_length, strict=True))
    capacity = np.ascontiguousarray(last[..., int(recipe.documents.eos_after_document)])
    random_length = np.array(
        [int(task.parameters.get("random_length", 0.0) * 2**53) for task in tasks], np.int64
    )
    drawn, drawn_supervised = thresholds(recipe), thresholds(recipe, supervised=True)
    unpredicted = np.array(
        [[_unpredicted(task, bos) for bos in (0, 1)] for task in tasks], np.int64
    )
    return CutLimits(drawn, drawn_supervised, capacity, inner, random_length, unpredicted)


def uncut_tokens(recipe: Recipe, limits: CutLimits) -> int:
    """Return the maximum length of a supervised document that `cut` keeps whole with any task."""
    if recipe.packing.algorithm == "concat" or recipe.documents.long == "decompose":
        return 0
    length, bos = recipe.lengths.index(recipe.seq_length), int(recipe.documents.prepend_bos)
    return int(limits.capacity[length, :, bos].min())


def _unpredicted(task: Task, bos: int) -> int:
    """Return the number of leading tokens of a supervised body that no slot predicts: 0 or 1.

    It is 1 if the body starts the segment, or if a prefix contains the body's first token. Tasks
    with same-position prediction and without shift predict each token at its own slot, so it is 0.
    """
    if task.in_place and not task.shift:
        return 0
    return int(RULES[task.objective.attention].ahead == "prefix" or bos + task.mode == 0)


class LeftOut(NamedTuple):
    """The document tokens that are in no segment, or are untrained although they should be trained.

    All arrays are int64[D].
    """

    untrained: np.ndarray  # tokens of chunks of supervised documents without a trained token
    apart: np.ndarray  # tokens of answers in chunks without the message that they answer
    elsewhere: np.ndarray  # tokens that the datasets of other row lengths contain
    too_long: np.ndarray  # tokens of texts of supervised documents that `long = "drop"` drops
    unfit: np.ndarray  # length of the longest media span if a span fits in no segment; otherwise 0


class _Documents(NamedTuple):
    """The columns of `Documents` that cutting reads."""

    offsets: np.ndarray
    position: np.ndarray
    repeat: np.ndarray
    source: np.ndarray
    file_key: np.ndarray


class _Supervision(NamedTuple):
    """The columns of `Training` that cutting reads."""

    span_offsets: np.ndarray
    spans: np.ndarray
    turns: np.ndarray
    eos_weight: np.ndarray
    cut_offsets: np.ndarray
    cuts: np.ndarray
    ranks: np.ndarray
    system: np.ndarray
    place_offsets: np.ndarray
    places: np.ndarray  # int64[k, 2]: the media spans


class _Policy(NamedTuple):
    """The keys of a recipe that determine cuts."""

    min_tail: int
    long: int  # a value of LONG
    bos: int  # 1 if documents start with bos, otherwise 0
    eos_last: int  # 1 if eos ends a document's last chunk, otherwise 0
    eos_inner: int  # 1 if eos ends each earlier chunk, otherwise 0
    length: int  # index of the dataset's row length in the recipe's lengths
    has_sides: int  # 1 if rows have an encoder and a decoder sequence, otherwise 0


class _RowLimits(NamedTuple):
    """The limits that `concat` applies."""

    drawn: np.ndarray  # int64[sources, tasks]
    overhead: np.ndarray  # int64[tasks]: slots beyond tokens, bos and eos
    tokens: int  # maximum tokens of a segment
    seq_length: int
    segments: int  # maximum segments of a row


class Cuts(NamedTuple):
    """The columns of `Segments` that the kernels write."""

    document: np.ndarray
    start: np.ndarray
    tokens: np.ndarray
    task: np.ndarray
    bos: np.ndarray
    eos: np.ndarray
    key: np.ndarray
    repeated: np.ndarray
    first_trained: np.ndarray

    @classmethod
    def empty(cls, count: int) -> "Cuts":
        """Return columns for `count` segments with undefined values."""
        dtypes = [np.uint64 if name == "key" else np.int64 for name in cls._fields]
        return cls(*(np.empty(count, dtype) for dtype in dtypes))


def segments_of_cuts(
    tasks: Sequence[Task], documents: Documents, cuts: Cuts, row: np.ndarray | None = None
) -> Segments:
    """Return the segments that the kernels have cut, with their slots.

    Args:
        tasks: The plan's tasks.
        documents: The documents that were cut.
        cuts: The columns that the kernels wrote.
        row: The row of each segment, int64[m], if cutting determines it.
    """
    document = cuts.document
    segments = Segments.create(
        len(document),
        **cuts._asdict(),
        source=documents.source[document],
        file=documents.file[document],
        doc=documents.position[document],
        repeat=documents.repeat[document],
        slots=np.zeros(len(document), np.int64),
    )
    for t, task in enumerate(tasks):
        chosen = np.flatnonzero(segments.task == t)
        if len(chosen):
            of_task = segments.select(chosen)
            segments.slots[chosen] = task.slots(of_task.bodies(), of_task.bos, of_task.eos)
    return segments if row is None else segments.replace(row=row)


@kernel(inline=True)
def _shortened(key, tokens, min_tail, probability):
    """Return a segment's tokens, cut to a random length with the task's probability.

    The length is uniform over min_tail … tokens − min_tail. The probability is an int64, times 2⁵³.
    """
    if probability == 0 or tokens < 2 * min_tail:
        return tokens
    if np.int64(bits64(key, SEGMENT_LENGTH, 0, 0) >> np.uint64(11)) >= probability:
        return tokens
    return min_tail + integer(key, SEGMENT_LENGTH, 4, tokens - 2 * min_tail + 1, 0)


@kernel
def _lengths_of(documents, supervised, limits, bos, length):
    """Write the index of the row length that takes each document.

    It is the first length that holds the document whole, otherwise the one that holds most of it.
    """
    capacity = limits.capacity
    for d in range(documents.offsets.shape[0] - 1):
        total = documents.offsets[d + 1] - documents.offsets[d]
        task = np.int64(capacity.shape[1] - 1)
        if total >= SHORTEST:
            key = segment_key(
                documents.file_key[d], documents.position[d], documents.repeat[d], np.int64(0)
            )
            source = documents.source[d]
            task = draw_task(
                key, limits.drawn_supervised[source] if supervised[d] else limits.drawn[source]
            )
        chosen = np.int64(0)
        for longer in range(1, capacity.shape[0]):
            if capacity[chosen, task, bos] < min(total, capacity[longer, task, bos]):
                chosen = np.int64(longer)
        length[d] = chosen


@kernel(inline=True)
def _longest_filled(capacity, task, bos, rest):
    """Return the index of the longest row length that the rest of a document fills.

    If it fills none, return 0, the index of the shortest.
    """
    chosen = np.int64(0)
    for longer in range(1, capacity.shape[0]):
        if capacity[chosen, task, bos] < capacity[longer, task, bos] <= rest:
            chosen = np.int64(longer)
    return chosen


@kernel
def _cut(documents, skip, limits, policy, write, cuts, elsewhere):
    """Cut the documents that are not skipped, and return the number of segments.

    Args:
        documents: The columns of the documents.
        skip: uint8[D]: 1 for documents to skip.
        limits: The limits of the tasks.
        policy: The recipe's keys.
        write: Write `cuts` and `elsewhere`. Otherwise only count the segments.
        cuts: Receives the segments.
        elsewhere: int64[D]: receives the tokens of chunks that fill rows of another length.
    """
    count, long = np.int64(0), policy.long
    too_short = limits.capacity.shape[1] - 1
    for d in range(documents.offsets.shape[0] - 1):
        total = documents.offsets[d + 1] - documents.offsets[d]
        start = np.int64(0)
        while start < total and not skip[d]:
            rest = total - start
            key = segment_key(
                documents.file_key[d], documents.position[d], documents.repeat[d], start
            )
            task = np.int64(too_short)
            if rest >= SHORTEST:
                task = draw_task(key, limits.drawn[documents.source[d]])
            bos = policy.bos if start == 0 else np.int64(0)
            length = np.int64(policy.length)
            if long == DECOMPOSE:
                length = _longest_filled(limits.capacity, task, bos, rest)
            # Determine the segment's tokens and its eos.
            tokens, eos = rest, np.int64(policy.eos_last)
            if rest >= SHORTEST and rest > limits.capacity[length, task, bos]:
                if long == DROP:
                    break
                room = limits.inner[length, task, bos]
                tokens = min(room, rest if long == TRUNCATE else rest - policy.min_tail)
                eos = np.int64(policy.eos_inner)
            if long == SPLIT:
                shorter = _shortened(key, tokens, policy.min_tail, limits.random_length[task])
                if shorter < tokens:
                    tokens, eos = shorter, np.int64(policy.eos_inner)
            if length != policy.length:
                if write:
                    elsewhere[d] += tokens
                start += tokens
                continue
            if write:
                cuts.document[count], cuts.start[count], cuts.tokens[count] = d, start, tokens
                cuts.task[count], cuts.key[count] = task, key
                cuts.bos[count], cuts.eos[count] = bos, eos
                cuts.repeated[count], cuts.first_trained[count] = 0, -1
            count += 1
            start += tokens
            if long == TRUNCATE:
                break
    return count


@kernel(inline=True)
def trained_in(turns, span, start):
    """Return whether a chunk trains its part of a span, by the rules of `Training`.

    The chunk starts at token `start` of its document.
    """
    return start < turns[span, 1] or turns[span, 0] < start


@kernel(inline=True)
def _cut_at_message(supervision, d, first, start, room, last_start):
    """Return the start of the last message of the highest rank within reach; 0 if there is none.

    Args:
        supervision: The columns of `Training`.
        d: Index of the document.
        first: Index of the first boundary to consider.
        start: First token of the chunk.
        room: Maximum tokens of the chunk.
        last_start: Last token that the next chunk can start at.
    """
    best_cut, best_rank, i = np.int64(0), ANYWHERE, first
    while i < supervision.cut_offsets[d + 1]:
        cut, rank = supervision.cuts[i], supervision.ranks[i] % END_OF_HISTORY
        if cut > start + room or cut > last_start:
            break
        if rank >= best_rank:
            best_cut, best_rank = cut, rank
        i += 1
    return best_cut


@kernel(inline=True)
def _text_end(supervision, d, first, document_end):
    """Return the end of the text that contains the boundary `first`.

    The text ends where the document's next text starts, or where the document ends.
    """
    for i in range(first, supervision.cut_offsets[d + 1]):
        if supervision.ranks[i] == NEW_TEXT:
            return supervision.cuts[i]
    return document_end


@kernel(inline=True)
def _trained_part(supervision, d, first_span, start, end):
    """Return the trained tokens of the chunk [start, end) of a document.

    Args:
        supervision: The columns of `Training`.
        d: Index of the document.
        first_span: Index of the first span that ends after `start`.
        start: First token of the chunk.
        end: First token after the chunk.

    Returns:
        The first trained token or -1, the last one or -1, and the number of tokens that should be
        trained but stay untrained.
    """
    first, last, apart, span = np.int64(-1), np.int64(-1), np.int64(0), first_span
    while span < supervision.span_offsets[d + 1] and supervision.spans[span, 0] < end:
        begin = max(supervision.spans[span, 0], start)
        stop = min(supervision.spans[span, 1], end)
        if trained_in(supervision.turns, span, start):
            first, last = (begin if first < 0 else first), stop - 1
        else:
            apart += stop - begin
        span += 1
    return first, last, apart


@kernel(inline=True)
def _widest_place(supervision, d):
    """Return the tokens of a document's longest media span."""
    widest = np.int64(0)
    for place in range(supervision.place_offsets[d], supervision.place_offsets[d + 1]):
        widest = max(widest, supervision.places[place, 1] - supervision.places[place, 0])
    return widest


@kernel
def _cut_supervised(documents, wanted, limits, policy, supervision, write, cuts, lost):
    """Cut the wanted supervised documents, and return the number of segments.

    `cuts` and `lost` (a `LeftOut`) are written only if `write`.

    - Each text of a document is cut at the last message of the highest rank in reach. Without such
      a message, it is cut inside a message.
    - A cut inside a media span moves to the span's start. If the chunk starts with the span, the
      cut moves to the span's end. If the span does not fit then, the document is rejected.
    - Later chunks repeat the system message if that leaves enough tokens for two tails and for any
      media span.
    - Segments without a trained token are left out, as are segments with a single trained token
      that no slot predicts. If rows have two sequences, segments of `too_short` are left out,
      because that task has only one.
    """
    count = np.int64(0)
    capacity, inner = limits.capacity[policy.length], limits.inner[policy.length]
    too_short = capacity.shape[0] - 1
    for d in range(documents.offsets.shape[0] - 1):
        total, count_before = documents.offsets[d + 1] - documents.offsets[d], count
        start, span = np.int64(0), supervision.span_offsets[d]
        boundary, place = supervision.cut_offsets[d], supervision.place_offsets[d]
        last_boundary = supervision.cut_offsets[d + 1]
        widest = _widest_place(supervision, d)
        text_begin, text_end = np.int64(0), _text_end(supervision, d, boundary, total)
        while start < total and wanted[d]:
            if start == text_end:
                text_begin = start
                while boundary < last_boundary and supervision.cuts[boundary] <= start:
                    boundary += 1
                text_end = _text_end(supervision, d, boundary, total)
            rest = text_end - start
            key = segment_key(
                documents.file_key[d], documents.position[d], documents.repeat[d], start
            )
            task = np.int64(too_short)
            if rest >= SHORTEST:
                task = draw_task(key, limits.drawn_supervised[documents.source[d]])
            bos = policy.bos if start == 0 else np.int64(0)
            # The chunk repeats the system message if enough tokens remain.
            repeated = supervision.system[d] if start > text_begin else np.int64(0)
            room = min(capacity[task, bos], inner[task, bos]) - repeated
            if room < max(2 * policy.min_tail - 1, widest):
                repeated = np.int64(0)
            # Determine the end of the chunk.
            tokens, eos = rest, np.int64(policy.eos_last)
            if rest > capacity[task, bos] - repeated:
                if policy.long == DROP:
                    if write:
                        lost.too_long[d] += rest
                    start = text_end
                    continue
                eos, room = np.int64(policy.eos_inner), inner[task, bos] - repeated
                tokens = min(room, rest if policy.long == TRUNCATE else rest - policy.min_tail)
                while boundary < last_boundary and supervision.cuts[boundary] < start + SHORTEST:
                    boundary += 1
                last_start = text_end - policy.min_tail
                cut = _cut_at_message(supervision, d, boundary, start, room, last_start)
                if cut > 0:
                    tokens = cut - start
                # A cut inside a media span moves to the span's start or end.
                last_place = supervision.place_offsets[d + 1]
                while place < last_place and supervision.places[place, 1] <= start + tokens:
                    place += 1
                if place < last_place and supervision.places[place, 0] < start + tokens:
                    tokens = supervision.places[place, 0] - start
                    if tokens == 0:
                        tokens = supervision.places[place, 1] - start
                        if tokens == rest or tokens > max(room, capacity[task, bos] - repeated):
                            count = count_before
                            if write:
                                lost.untrained[d], lost.apart[d], lost.unfit[d] = 0, 0, widest
                            break
                    if tokens < SHORTEST:
                        task = np.int64(too_short)
            # Determine the trained tokens, and whether a slot predicts them.
            last_span = supervision.span_offsets[d + 1]
            while span < last_span and supervision.spans[span, 1] <= start:
                span += 1
            first, last, apart = _trained_part(supervision, d, span, start, start + tokens)
            is_end_trained = last == start + tokens - 1
            if start + tokens == total:
                is_end_trained = supervision.eos_weight[d] > 0 and trained_in(
                    supervision.turns, last_span - 1, start
                )
            is_predicted = repeated + last - start >= limits.unpredicted[task, bos]
            is_trained = first >= 0 and (is_predicted or (eos > 0 and is_end_trained))
            if write:
                lost.apart[d] += apart
            if is_trained and not (policy.has_sides and task == too_short):
                # A document that is rejected later is not counted in the size of `cuts`.
                if write and count < cuts.document.shape[0]:
                    cuts.document[count], cuts.start[count], cuts.tokens[count] = d, start, tokens
                    cuts.task[count], cuts.key[count] = task, key
                    cuts.bos[count], cuts.eos[count] = bos, eos
                    cuts.repeated[count] = repeated
                    cuts.first_trained[count] = repeated + first - start
                count += 1
            elif write:
                lost.untrained[d] += tokens
            start += tokens
            if policy.long == TRUNCATE:
                start = text_end
    return count


@kernel
def _cut_at_row_ends(documents, limits, policy, write, cuts, row):
    """Cut the concatenated documents where rows end (`concat`), and return the number of segments.

    `cuts` and `row` are written only if `write`. If fewer than 2 slots of a row remain, they become
    padding. A document's last token moves to the next row if otherwise only its eos would. A row
    with the maximum number of segments ends early.
    """
    count, r, fill, in_row = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    too_short = limits.overhead.shape[0] - 1
    for d in range(documents.offsets.shape[0] - 1):
        total = documents.offsets[d + 1] - documents.offsets[d]
        start = np.int64(0)
        while start < total:
            rest, room = total - start, limits.seq_length - fill
            if room < 2 or in_row == limits.segments:
                r, fill, in_row = r + 1, np.int64(0), np.int64(0)
                continue
            key = segment_key(
                documents.file_key[d], documents.position[d], documents.repeat[d], start
            )
            bos = policy.bos if start == 0 else np.int64(0)
            task = np.int64(too_short)
            if rest >= SHORTEST:
                task = draw_task(key, limits.drawn[documents.source[d]])
            # If the drawn task would get too few tokens, `too_short` takes them.
            tokens, eos = np.int64(0), np.int64(0)
            while True:
                space = room - limits.overhead[task] - bos
                if rest <= min(space - policy.eos_last, limits.tokens):
                    tokens, eos = rest, np.int64(policy.eos_last)
                else:
                    tokens = min(space - policy.eos_inner, rest - 1, limits.tokens)
                    eos = np.int64(policy.eos_inner)
                if tokens >= SHORTEST or task == too_short:
                    break
                task = np.int64(too_short)
            if tokens < 1:
                r, fill, in_row = r + 1, np.int64(0), np.int64(0)
                continue
            if write:
                cuts.document[count], cuts.start[count], cuts.tokens[count] = d, start, tokens
                cuts.task[count], cuts.key[count] = task, key
                cuts.bos[count], cuts.eos[count] = bos, eos
                cuts.repeated[count], cuts.first_trained[count] = 0, -1
                row[count] = r
            count += 1
            in_row += 1
            fill += tokens + limits.overhead[task] + bos + eos
            start += tokens
    return count


def cut(
    recipe: Recipe, tasks: Sequence[Task], documents: Documents, limits: CutLimits | None = None
) -> tuple[Segments, LeftOut]:
    """Return the segments of documents, in document order, and the tokens that are left out.

    - A document that fits with its eos is one segment. A longer one is cut into chunks of up to
      `inner` tokens, and its last chunk has at least max(3, min_tokens) tokens.
    - Each segment draws its own task; fewer than 3 tokens go to `too_short`. A supervised document
      draws from the tasks that allow it.
    - `concat` cuts where rows end, and assigns each segment its row.
    - If a recipe has several `seq_lengths`, each document belongs to one of them; with "decompose",
      each chunk does. The tokens that belong to other lengths are left out.

    Every segment has at least one token.

    Args:
        recipe: The recipe.
        tasks: The recipe's tasks.
        documents: The documents to cut.
        limits: The limits of the recipe and the tasks, if they are already computed.

    Raises:
        RecipeError: If a source of supervised documents has no task that allows them, or if
            `concat` cannot cut these documents.
    """
    count = len(documents.position)
    lost = LeftOut(*(np.zeros(count, np.int64) for _ in LeftOut._fields))
    columns = _Documents(*(getattr(documents, name) for name in _Documents._fields))
    if recipe.packing.algorithm == "concat":
        return segments_of_cuts(
            tasks, documents, *_cut_by_rows(recipe, tasks, documents, columns)
        ), lost
    training = documents.training
    supervised = np.zeros(count, np.uint8) if training is None else training.supervised
    for s in np.unique(documents.source[supervised != 0]):
        check_supervised(recipe, int(s))
    limits, policy = limits or cut_limits(recipe, tasks), _policy_of(recipe)
    is_elsewhere = np.zeros(count, np.bool_)
    if recipe.seq_lengths and recipe.documents.long != "decompose":
        length = np.empty(count, np.int64)
        _lengths_of(columns, supervised, limits, policy.bos, length)
        is_elsewhere = length != policy.length
        lost.elsewhere[is_elsewhere] = np.diff(documents.offsets)[is_elsewhere]
    skip = ((supervised != 0) | is_elsewhere).astype(np.uint8)
    plain = (columns, skip, limits, policy)
    cuts = Cuts.empty(_cut(*plain, False, Cuts.empty(0), lost.elsewhere))
    _cut(*plain, True, cuts, lost.elsewhere)
    if training is None:
        return segments_of_cuts(tasks, documents, cuts), lost
    wanted = ((supervised != 0) & ~is_elsewhere).astype(np.uint8)
    by_messages = (columns, wanted, limits, policy, _supervision_of(training))
    cuts_at_messages = Cuts.empty(_cut_supervised(*by_messages, False, Cuts.empty(0), lost))
    _cut_supervised(*by_messages, True, cuts_at_messages, lost)
    both = Cuts(*(np.concatenate(pair) for pair in zip(cuts, cuts_at_messages, strict=True)))
    in_document_order = np.argsort(both.document, kind="stable")
    return segments_of_cuts(tasks, documents, Cuts(*(c[in_document_order] for c in both))), lost


def _policy_of(recipe: Recipe) -> _Policy:
    """Return the keys of a recipe that determine cuts."""
    return _Policy(
        recipe.min_tail,
        LONG[recipe.documents.long],
        int(recipe.documents.prepend_bos),
        int(recipe.documents.eos_after_document),
        int(recipe.documents.eos_after_segment),
        recipe.lengths.index(recipe.seq_length),
        int(recipe.packing.sides is not None),
    )


def _supervision_of(training: Training) -> _Supervision:
    """Return the columns of `Training` that cutting reads."""
    names = _Supervision._fields[:-1]
    return _Supervision._make((*(getattr(training, name) for name in names), training.places.spans))


def _cut_by_rows(
    recipe: Recipe, tasks: Sequence[Task], documents: Documents, columns: _Documents
) -> tuple[Cuts, np.ndarray]:
    """Return the cuts of `concat` and the row of each segment, int64[m]."""
    if documents.training is not None and documents.training.supervised.any():
        raise RecipeError(
            'packing.algorithm = "concat" cuts where rows end, and so through messages\n'
            'hint: use "best_fit"'
        )
    if recipe.documents.long != "split":
        raise RecipeError(
            f'documents.long = "{recipe.documents.long}", but concat cuts documents at row ends\n'
            'hint: use "split"'
        )
    one = np.ones(1, np.int64)
    a_token = Bodies(one, one.astype(np.uint64), -one)
    overhead = [task.slots(a_token, 0 * one, 0 * one)[0] - 1 for task in tasks]
    limits = _RowLimits(
        thresholds(recipe),
        np.array(overhead, np.int64),
        recipe.documents.max_tokens or recipe.seq_length,
        recipe.seq_length,
        recipe.packing.max_segments_per_row or FORMAT_MAX_SEGMENTS,
    )
    arguments = (columns, limits, _policy_of(recipe))
    count = _cut_at_row_ends(*arguments, False, Cuts.empty(0), np.empty(0, np.int64))
    cuts, row = Cuts.empty(count), np.empty(count, np.int64)
    _cut_at_row_ends(*arguments, True, cuts, row)
    return cuts, row
