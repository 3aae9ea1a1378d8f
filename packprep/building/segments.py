"""Cut documents into segments. Draw the task and count the slots of each segment.

document      10 11 12 13 14 15 16 17 18 19       10 tokens, a row holds 6 with bos and eos
segments      10 11 12 13 14 │ 15 16 17 18 19     start 0, 5   tokens 5, 5   bos 1, 0   eos 0, 1
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

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
    determines the length. The length is -1 if the pattern cannot be described by a prefix.
    """
    ahead = RULES[task.objective.attention].ahead
    if ahead == "prefix":
        assert task.objective.body_prefix is not None
        return bos + task.mode + task.objective.body_prefix(task, bodies)
    if ahead == "segment":
        return slots
    return np.full(len(slots), 0 if ahead == "never" else -1, np.int64)


def inputs_of(tasks: Sequence[Task], segments: Segments) -> np.ndarray:
    """Return the number of prefix slots of each segment in the stored rows, int64[m]."""
    inputs = np.zeros(len(segments), np.int64)
    for t, task in enumerate(tasks):
        chosen = np.flatnonzero(segments.task == t)
        if len(chosen):
            of_task = segments.select(chosen)
            inputs[chosen] = expected_prefix(task, of_task.bodies(), of_task.bos, of_task.slots)
    return inputs


class CutLimits(NamedTuple):
    """The limits that cutting takes from a recipe and its tasks. They are equal for all shards."""

    drawn: np.ndarray  # int64[sources, tasks]: thresholds for drawing a segment's task
    # int64[sources, tasks]: thresholds for segments of supervised documents
    drawn_supervised: np.ndarray
    # int64[lengths, tasks, 2], by row length, task and bos (0 or 1): maximum tokens of a document's
    # last chunk
    capacity: np.ndarray
    inner: np.ndarray  # int64[lengths, tasks, 2]: maximum tokens of each earlier chunk
    # int64[tasks]: probability of cutting a segment to a random length, times 2⁵³
    random_length: np.ndarray
    # int64[tasks, 2], by bos: number of leading tokens of a supervised body that no slot predicts
    unpredicted: np.ndarray
    blocks: "_BlockLimits"


class _BlockLimits(NamedTuple):
    """What cutting has to know of the blocks of block-diffusion tasks. All arrays are [tasks]."""

    length: np.ndarray  # int64: slots of a block, 0 for tasks without blocks
    from_segment: np.ndarray  # bool: blocks start at the segment, not at the answer
    fills: np.ndarray  # bool: eos fills up the last block of a text
    mode: np.ndarray  # int64: slots of the mode token, 0 or 1

    @property
    def most_fill(self) -> np.ndarray:
        """The most eos that can fill a block, int64[tasks]."""
        return np.where(self.fills, self.length - 1, 0)


def _block_limits(tasks: Sequence[Task]) -> _BlockLimits:
    in_blocks = [task.parameters for task in tasks]
    return _BlockLimits(
        np.array([parameters.get("block_length", 0) for parameters in in_blocks], np.int64),
        np.array([parameters.get("block_origin") == "segment" for parameters in in_blocks]),
        np.array([parameters.get("eos_fill") == "block" for parameters in in_blocks]),
        np.array([task.mode for task in tasks], np.int64),
    )


def cut_limits(recipe: Recipe, tasks: Sequence[Task]) -> CutLimits:
    """Return the limits that `cut` applies for a recipe and its tasks."""
    by_length = [capacities(replace(recipe, seq_length=length), tasks) for length in recipe.lengths]
    last_capacities, inner_capacities = (
        np.stack(capacity) for capacity in zip(*by_length, strict=True)
    )
    # The last axis of `last_capacities` is without and with eos. The recipe selects one of them.
    capacity = np.ascontiguousarray(last_capacities[..., int(recipe.documents.eos_after_document)])
    random_length = np.array(
        [int(task.parameters.get("random_length", 0.0) * 2**53) for task in tasks], np.int64
    )
    drawn, drawn_supervised = thresholds(recipe), thresholds(recipe, supervised=True)
    unpredicted = np.array(
        [[_unpredicted(task, bos) for bos in (0, 1)] for task in tasks], np.int64
    )
    blocks = _block_limits(tasks)
    of_tasks = random_length, unpredicted, blocks
    return CutLimits(drawn, drawn_supervised, capacity, inner_capacities, *of_tasks)


def uncut_tokens(recipe: Recipe, limits: CutLimits) -> int:
    """Return the number of tokens up to which `cut` never cuts a supervised document.

    The number depends on the drawn task. The result is the minimum over all tasks, or 0 if `cut`
    may cut a document of any length, or if eos_fill needs the boundaries of all messages.
    """
    if recipe.packing.algorithm == "concat" or recipe.documents.long == "decompose":
        return 0
    if (limits.blocks.fills & limits.blocks.from_segment).any():
        return 0
    length, bos = recipe.lengths.index(recipe.seq_length), int(recipe.documents.prepend_bos)
    return max(int((limits.capacity[length, :, bos] - limits.blocks.most_fill).min()), 0)


def _unpredicted(task: Task, bos: int) -> int:
    """Return the number of leading tokens of a supervised body that no slot predicts: 0 or 1.

    It is 1 if the body starts the segment, or if a prefix contains the body's first token. It is 0
    for same-position prediction without shift, because each token is then predicted at its own
    slot.
    """
    if task.in_place and not task.shift:
        return 0
    return int(RULES[task.objective.attention].ahead == "prefix" or bos + task.mode == 0)


class LeftOut(NamedTuple):
    """Counts of two kinds of tokens: tokens in no segment, and answer tokens that are not trained.

    Each array is int64[D], with one count per document.
    """

    untrained: np.ndarray  # tokens of supervised documents in chunks that train nothing
    apart: np.ndarray  # answer tokens that are untrained, because another chunk has the question
    elsewhere: np.ndarray  # tokens that go to the datasets of other row lengths
    too_long: np.ndarray  # tokens that `long = "drop"` drops from supervised documents
    # tokens of the document's longest media span if a media span fits in no segment; otherwise 0
    unfit: np.ndarray


class _Documents(NamedTuple):
    """The columns of `Documents` that are needed to cut documents, and a flag for each document."""

    offsets: np.ndarray
    position: np.ndarray
    repeat: np.ndarray
    source: np.ndarray
    file_key: np.ndarray
    wanted: np.ndarray  # uint8[D]: 1 for documents to cut


class _Supervision(NamedTuple):
    """The columns of `Training` that are needed to cut documents."""

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


class Cut(NamedTuple):
    """One segment that a kernel has cut. All fields are int64 except `key`, which is uint64."""

    document: Any
    start: Any
    tokens: Any
    task: Any
    bos: Any
    eos: Any
    key: Any
    repeated: Any
    first_trained: Any
    fill: Any = 0


class Cuts(NamedTuple):
    """The columns of `Segments` that the kernels write, with the fields of `Cut`."""

    document: np.ndarray
    start: np.ndarray
    tokens: np.ndarray
    task: np.ndarray
    bos: np.ndarray
    eos: np.ndarray
    key: np.ndarray
    repeated: np.ndarray
    first_trained: np.ndarray
    fill: np.ndarray

    @classmethod
    def empty(cls, count: int) -> "Cuts":
        """Return columns for `count` segments with undefined values."""
        dtypes = [np.uint64 if name == "key" else np.int64 for name in cls._fields]
        return cls(*(np.empty(count, dtype) for dtype in dtypes))


def segments_of_cuts(
    tasks: Sequence[Task], documents: Documents, cuts: Cuts, row: np.ndarray | None = None
) -> Segments:
    """Return the segments that the kernels have cut, and compute the slots of each segment.

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
    # The slots follow from the length formula, before any token is rendered (P12).
    for t, task in enumerate(tasks):
        chosen = np.flatnonzero(segments.task == t)
        if len(chosen):
            of_task = segments.select(chosen)
            segments.slots[chosen] = task.slots(of_task.bodies(), of_task.bos, of_task.eos)
    return segments if row is None else segments.replace(row=row)


@kernel(inline=True)
def _drawn_task(documents, d, start, rest_tokens, drawn):
    """Return (key, task index) of the segment that starts at token `start` of document d.

    The task is drawn by the thresholds `drawn`, int64[sources, tasks]. `rest_tokens` is the number
    of remaining tokens. If it is below SHORTEST, the task is `too_short`, with the index
    `drawn.shape[1]`.
    """
    key = segment_key(documents.file_key[d], documents.position[d], documents.repeat[d], start)
    if rest_tokens < SHORTEST:
        return key, np.int64(drawn.shape[1])
    return key, np.int64(draw_task(key, drawn[documents.source[d]]))


@kernel(inline=True)
def _write_cut(cuts, count, cut):
    """Write the segment `cut` to index `count` of each column of `cuts`.

    If the columns have no index `count`, nothing is written. In the first run of a kernel, which
    only counts the segments, the columns are empty. In the second run, only a segment of a rejected
    document can have an index beyond the columns. Such a segment is not needed.
    """
    if count >= cuts.document.shape[0]:
        return
    cuts.document[count] = cut.document
    cuts.start[count], cuts.tokens[count] = cut.start, cut.tokens
    cuts.task[count], cuts.bos[count], cuts.eos[count] = cut.task, cut.bos, cut.eos
    cuts.key[count], cuts.repeated[count] = cut.key, cut.repeated
    cuts.first_trained[count], cuts.fill[count] = cut.first_trained, cut.fill


@kernel(inline=True)
def _shortened(key, tokens, min_tail, probability):
    """Return the number of tokens of a segment: `tokens`, or fewer after a random draw.

    The draw reduces the number with probability `probability` / 2⁵³. The reduced number is uniform
    over min_tail … tokens − min_tail. A segment of fewer than 2 · min_tail tokens keeps all of
    them.
    """
    if probability == 0 or tokens < 2 * min_tail:
        return tokens
    if np.int64(bits64(key, SEGMENT_LENGTH, 0, 0) >> np.uint64(11)) >= probability:
        return tokens
    return min_tail + integer(key, SEGMENT_LENGTH, 4, tokens - 2 * min_tail + 1, 0)


@kernel
def _lengths_of(documents, supervised, limits, bos, length):
    """For each document, write the index of its row length to `length`, int64[D].

    A document goes to the shortest row length that fits all of its tokens. If no row length fits
    all, it goes to the row length that fits the most tokens, and to the shortest of several such
    row lengths. For a supervised document, the longest possible eos_fill counts too.
    """
    capacity, first_token = limits.capacity, np.int64(0)
    for d in range(documents.offsets.shape[0] - 1):
        # The task of the first segment decides, because the maximum tokens depend on the task.
        total = documents.offsets[d + 1] - documents.offsets[d]
        drawn = limits.drawn_supervised if supervised[d] else limits.drawn
        _, task = _drawn_task(documents, d, first_token, total, drawn)
        if supervised[d] and limits.blocks.fills[task]:
            total += limits.blocks.length[task] - 1
        chosen = np.int64(0)
        # A longer row length is chosen only if it fits more of the document than each shorter one.
        for longer in range(1, capacity.shape[0]):
            if capacity[chosen, task, bos] < min(total, capacity[longer, task, bos]):
                chosen = np.int64(longer)
        length[d] = chosen


@kernel(inline=True)
def _longest_filled(capacity, task, bos, rest_tokens):
    """Return the index of the longest row length that `rest_tokens` tokens fill.

    If the tokens fill no row length, return 0, the index of the shortest.
    """
    chosen = np.int64(0)
    for longer in range(1, capacity.shape[0]):
        if capacity[chosen, task, bos] < capacity[longer, task, bos] <= rest_tokens:
            chosen = np.int64(longer)
    return chosen


@kernel
def _cut(documents, limits, policy, cuts, elsewhere):
    """Cut each document whose flag `wanted` is 1, and return the number of segments.

    Args:
        documents: The columns of the documents.
        limits: The limits of the tasks.
        policy: The recipe's keys.
        cuts: Receives the segments.
        elsewhere: int64[D]: receives each document's number of tokens in chunks for other row
            lengths.
    """
    count, long = np.int64(0), policy.long
    for d in range(documents.offsets.shape[0] - 1):
        total = documents.offsets[d + 1] - documents.offsets[d]
        start = np.int64(0)
        while start < total and documents.wanted[d]:
            rest_tokens = total - start
            key, task = _drawn_task(documents, d, start, rest_tokens, limits.drawn)
            bos = policy.bos if start == 0 else np.int64(0)
            # With "decompose", the chunk is for the longest rows that the remaining tokens fill.
            length = np.int64(policy.length)
            if long == DECOMPOSE:
                length = _longest_filled(limits.capacity, task, bos, rest_tokens)
            # Determine the segment's tokens and its eos.
            tokens, eos = rest_tokens, np.int64(policy.eos_last)
            if rest_tokens >= SHORTEST and rest_tokens > limits.capacity[length, task, bos]:
                if long == DROP:
                    break
                room = limits.inner[length, task, bos]
                tokens = min(
                    room, rest_tokens if long == TRUNCATE else rest_tokens - policy.min_tail
                )
                eos = np.int64(policy.eos_inner)
            if long == SPLIT:
                shorter = _shortened(key, tokens, policy.min_tail, limits.random_length[task])
                if shorter < tokens:
                    tokens, eos = shorter, np.int64(policy.eos_inner)
            # Chunks for other row lengths are only counted, because other datasets contain them.
            if length == policy.length:
                _write_cut(cuts, count, Cut(d, start, tokens, task, bos, eos, key, 0, -1, 0))
                count += 1
            else:
                elsewhere[d] += tokens
            start += tokens
            if long == TRUNCATE:
                break
    return count


@kernel(inline=True)
def trained_in(turns, span, start):
    """Return whether a chunk may train its tokens of a trained span.

    `span` is the index of the span, `start` is the index of the chunk's first token, and `turns` is
    `Training.turns`. `Training` explains the rule.
    """
    return start < turns[span, 1] or turns[span, 0] < start


@kernel(inline=True)
def _first_from(ascending, begin, end, least):
    """Return the first index in [begin, end) with a value ≥ `least`, or `end` if there is none."""
    while begin < end and ascending[begin] < least:
        begin += 1
    return begin


@kernel(inline=True)
def _first_after(ranges, begin, end, token):
    """Return the index of the first range in [begin, end) that ends after `token`, or `end`."""
    while begin < end and ranges[begin, 1] <= token:
        begin += 1
    return begin


@kernel(inline=True)
def _text_end(cuts, ranks, boundary, last_boundary, document_end):
    """Return the index after the last token of a document's current text.

    With trained_turns = "each", a document may consist of several texts, one after another. The
    result is the index of the next text's first token, or `document_end` if the current text is the
    last.

    Args:
        cuts: The tokens where messages start, as in `Training`.
        ranks: The rank of each of these tokens. NEW_TEXT marks the start of a text.
        boundary: Index in `cuts` of the first message after the start of the current text.
        last_boundary: Index in `cuts` after the document's last message.
        document_end: The number of tokens of the document.
    """
    for i in range(boundary, last_boundary):
        if ranks[i] == NEW_TEXT:
            return cuts[i]
    return document_end


@kernel(inline=True)
def _repeated_tokens(system, room, min_room):
    """Return how many tokens of the system message a later chunk repeats: all of them or 0.

    Args:
        system: Tokens of the system message.
        room: Maximum tokens of the chunk, with the repeated message.
        min_room: Tokens that must remain for the rest of the chunk. Otherwise the message is not
            repeated.
    """
    return system if room - system >= min_room else np.int64(0)


@kernel(inline=True)
def _message_in_reach(cuts, ranks, boundary, last_boundary, reach):
    """Return the start of the message before which a chunk should end, or 0 without such a message.

    Only messages that start at or before `reach` are considered. The message with the highest rank
    is chosen. If several messages have this rank, the last one is chosen.

    Args:
        cuts: The tokens where messages start, as in `Training`.
        ranks: The rank of each of these tokens.
        boundary: Index in `cuts` of the first message to consider.
        last_boundary: Index in `cuts` after the document's last message.
        reach: Last token that the message may start at.
    """
    best_cut, best_rank = np.int64(0), ANYWHERE
    while boundary < last_boundary and cuts[boundary] <= reach:
        rank = ranks[boundary] % END_OF_HISTORY
        if rank >= best_rank:
            best_cut, best_rank = cuts[boundary], rank
        boundary += 1
    return best_cut


@kernel(inline=True)
def _end_beside_span(span_begin, span_end, start, end):
    """Return the end of the chunk [start, end), moved so that it does not divide a media span.

    The media span [span_begin, span_end) is the first that ends after `end`. If `end` is inside the
    span, the chunk ends at the span's start. But if the chunk starts with the span, the chunk ends
    at the span's end.
    """
    if span_begin >= end:
        return end
    return span_begin if span_begin != start else span_end


@kernel(inline=True)
def _trained_part(spans, turns, span, last_span, start, end):
    """Find the trained tokens of the chunk [start, end).

    Args:
        spans: `Training.spans`, the trained ranges.
        turns: `Training.turns`, the messages of the ranges.
        span: Index of the first range that ends after `start`.
        last_span: Index after the document's last range.
        start: Index of the chunk's first token in the document.
        end: Index of the first token after the chunk.

    Returns:
        Four values: the index of the first trained token, the index of the last trained token, the
        first index of the run of trained tokens that contains the last one, and the number of
        tokens in ranges that `trained_in` excludes. The indices are -1 without a trained token.
    """
    first_token, last_token, run, apart = np.int64(-1), np.int64(-1), np.int64(-1), np.int64(0)
    while span < last_span and spans[span, 0] < end:
        # Clip the span to the chunk. It counts as apart if the chunk may not train it.
        begin, stop = max(spans[span, 0], start), min(spans[span, 1], end)
        if trained_in(turns, span, start):
            # Trained spans that touch form one run, such as spans that differ only in weight.
            run = run if last_token == begin - 1 and first_token >= 0 else begin
            first_token, last_token = (begin if first_token < 0 else first_token), stop - 1
        else:
            apart += stop - begin
        span += 1
    return first_token, last_token, run, apart


@kernel(inline=True)
def _block_origin(blocks, task, run, start, repeated, bos):
    """Return the slot at which the blocks of the answer start that begins at token `run`.

    Slots count from the first slot of the chunk that starts at token `start`. `blocks_of` has the
    rule: bos and mode token belong to the first block of an answer that directly follows them.
    """
    body_token = run - start + repeated
    if blocks.from_segment[task] or body_token == 0:
        return np.int64(0)
    return bos + blocks.mode[task] + body_token


@kernel(inline=True)
def _eos_fill(blocks, task, origin, half, is_ended):
    """Return the number of eos that fill up the last block of a chunk of `half` slots.

    The block is filled up only if `is_ended`: with block_origin "answer", if a trained token ends
    the chunk; with "segment", if the message with the last trained token ends it.
    """
    if not blocks.fills[task] or not is_ended:
        return np.int64(0)
    return -(half - origin) % blocks.length[task]


@kernel(inline=True)
def _end_at_block(blocks, task, origin, run, slots_before, start, end):
    """Return the end of the chunk [start, end), moved to the last border of a block in its answer.

    The chunk ends inside the answer that begins at token `run`. `slots_before` is the number of
    slots before token `start`, and of an eos at the end. If the chunk has no whole block of the
    answer, its end stays.
    """
    length = blocks.length[task]
    if length == 0:
        return end
    at_border = end - (slots_before + end - start - origin) % length
    return at_border if at_border > max(run, start + SHORTEST - 1) else end


@kernel(inline=True)
def _widest_place(places, place, last_place):
    """Return the number of tokens of a document's longest media span; 0 if it has no media."""
    widest = np.int64(0)
    for i in range(place, last_place):
        widest = max(widest, places[i, 1] - places[i, 0])
    return widest


@kernel
def _cut_supervised(documents, limits, policy, supervision, cuts, lost):
    """Cut each supervised document whose flag `wanted` is 1, and return the number of segments.

    The segments are written to `cuts`. The counts of left-out tokens are added to `lost`, a
    `LeftOut`.

    - A text that is too long for one segment is cut before the message that `_message_in_reach`
      returns. If there is no such message, the text is cut inside a message.
    - If a cut would divide a media span and no segment can hold the span, the document is rejected.
    - Later chunks of a text repeat the system message if room for enough other tokens remains: for
      the longest media span, and for at least 2 · min_tail − 1 tokens.
    - A segment is left out if none of its slots predicts a trained token or a trained eos.
    - If rows have an encoder and a decoder sequence, segments of the task `too_short` are left out,
      because that task would fill only one of the two.
    - With block diffusion, a cut inside an answer is at the border of a block. With `eos_fill`, the
      eos that fill up the last block of a text must fit too.
    """
    capacity, inner_capacity = limits.capacity[policy.length], limits.inner[policy.length]
    messages, ranks, turns = supervision.cuts, supervision.ranks, supervision.turns
    spans, places, blocks = supervision.spans, supervision.places, limits.blocks
    count, too_short = np.int64(0), capacity.shape[0] - 1
    for d in range(documents.offsets.shape[0] - 1):
        total, count_before = documents.offsets[d + 1] - documents.offsets[d], count
        # These indices only grow, because later chunks need no earlier boundary or range.
        boundary, last_boundary = supervision.cut_offsets[d], supervision.cut_offsets[d + 1]
        place, last_place = supervision.place_offsets[d], supervision.place_offsets[d + 1]
        span, last_span = supervision.span_offsets[d], supervision.span_offsets[d + 1]
        widest = _widest_place(places, place, last_place)
        start, text_begin, text_end = np.int64(0), np.int64(0), np.int64(0)
        while start < total and documents.wanted[d]:
            # A new text starts. No chunk crosses its end.
            if start == text_end:
                boundary = _first_from(messages, boundary, last_boundary, start + 1)
                text_begin = start
                text_end = _text_end(messages, ranks, boundary, last_boundary, total)
            key, task = _drawn_task(documents, d, start, text_end - start, limits.drawn_supervised)
            bos, repeated = (policy.bos if start == 0 else np.int64(0)), np.int64(0)
            # `last_room` limits a chunk that ends its text, and `room` limits every earlier chunk.
            last_room, room = capacity[task, bos], inner_capacity[task, bos]
            # A later chunk repeats the system message, because the message applies to all turns.
            if start > text_begin:
                min_room = max(2 * policy.min_tail - 1, widest)
                if blocks.fills[task]:
                    min_room += blocks.length[task]
                repeated = _repeated_tokens(supervision.system[d], min(last_room, room), min_room)
            last_room, room = last_room - repeated, room - repeated
            # First assume that the chunk takes the rest of the text.
            end, eos, fill = text_end, np.int64(policy.eos_last), np.int64(0)
            span = _first_after(spans, span, last_span, start)
            slots_before = bos + blocks.mode[task] + repeated
            # The eos that fill up the last block need slots too, so they can cause a cut.
            if blocks.fills[task]:
                _, last_token, run, _ = _trained_part(spans, turns, span, last_span, start, end)
                is_ended = last_token == end - 1
                if end == total and eos > 0:
                    # The eos may be trained without the token before it.
                    run = run if is_ended else end
                    is_ended = supervision.eos_weight[d] > 0 and trained_in(
                        turns, last_span - 1, start
                    )
                if blocks.from_segment[task]:
                    later = _first_from(messages, boundary, last_boundary, last_token + 1)
                    is_ended = last_token >= 0 and (
                        later == last_boundary or messages[later] >= text_end
                    )
                origin = _block_origin(blocks, task, run, start, repeated, bos)
                half = slots_before + end - start + eos
                fill = _eos_fill(blocks, task, origin, half, is_ended)
            # The rest does not fit. Find an earlier end for this chunk, or drop the rest of the
            # text.
            if text_end - start + fill > last_room:
                if policy.long == DROP:
                    lost.too_long[d] += text_end - start
                    start = text_end
                    continue
                # Prefer to cut before a message, so that the next chunk has a complete question.
                eos, before_tail = np.int64(policy.eos_inner), text_end - policy.min_tail
                keeps_tail = policy.long != TRUNCATE or fill > 0
                fill = np.int64(0)
                end = min(start + room, before_tail if keeps_tail else text_end)
                # A chunk before an earlier message would have fewer than SHORTEST tokens.
                boundary = _first_from(messages, boundary, last_boundary, start + SHORTEST)
                reach = min(start + room, before_tail)
                message = _message_in_reach(messages, ranks, boundary, last_boundary, reach)
                if message > 0:
                    end = message
                # Without a message in reach, the cut may be inside an answer. It then moves to the
                # border of a block.
                elif blocks.length[task] > 0:
                    _, last_token, run, _ = _trained_part(
                        spans, turns, span, last_span, start, end + 1
                    )
                    if last_token == end and run < end:
                        origin = _block_origin(blocks, task, run, start, repeated, bos)
                        around = slots_before + eos
                        end = _end_at_block(blocks, task, origin, run, around, start, end)
                # A media span stays whole, because a segment holds all tokens of a medium or none.
                place = _first_after(places, place, last_place, end)
                if place < last_place and places[place, 0] < end:
                    inside, end = (
                        end,
                        _end_beside_span(places[place, 0], places[place, 1], start, end),
                    )
                    # No segment can hold the span, so the document is rejected and its earlier
                    # segments are discarded.
                    if end > inside and (end == text_end or end - start > max(room, last_room)):
                        count = count_before
                        lost.untrained[d], lost.apart[d], lost.unfit[d] = 0, 0, widest
                        break
                    task = task if end - start >= SHORTEST else np.int64(too_short)
            # A segment without loss is left out, because it would only take space.
            first_token, last_token, _, apart = _trained_part(
                spans, turns, span, last_span, start, end
            )
            is_eos_trained = last_token == end - 1
            if end == total:
                is_eos_trained = supervision.eos_weight[d] > 0 and trained_in(
                    turns, last_span - 1, start
                )
            # A trained token counts only if a slot predicts it. The body's first token may have no
            # such slot.
            is_predicted = repeated + last_token - start >= limits.unpredicted[task, bos]
            is_trained = first_token >= 0 and (is_predicted or (eos > 0 and is_eos_trained))
            if is_trained and not (policy.has_sides and task == too_short):
                first_trained = repeated + first_token - start
                length = end - start
                cut = Cut(d, start, length, task, bos, eos, key, repeated, first_trained, fill)
                _write_cut(cuts, count, cut)
                count += 1
            else:
                lost.untrained[d] += end - start
            lost.apart[d] += apart
            # With "truncate", the rest of this text is left out. The next text of the document
            # follows.
            start = text_end if policy.long == TRUNCATE else end
    return count


@kernel(inline=True)
def _tokens_in_row(room, rest_tokens, overhead, limits, policy):
    """Return the number of tokens of a `concat` segment, and 1 if an eos ends it, otherwise 0.

    Args:
        room: Slots that remain in the row.
        rest_tokens: Tokens that remain of the document.
        overhead: Slots of the segment beyond tokens and eos.
        limits: The limits of rows.
        policy: The recipe's keys.
    """
    space = room - overhead
    if rest_tokens <= min(space - policy.eos_last, limits.tokens):
        return rest_tokens, np.int64(policy.eos_last)
    return min(space - policy.eos_inner, rest_tokens - 1, limits.tokens), np.int64(policy.eos_inner)


@kernel
def _cut_at_row_ends(documents, limits, policy, cuts, row):
    """Cut the concatenated documents where rows end (`concat`), and return the number of segments.

    `row` receives the row of each segment. If fewer than 2 slots of a row remain, they become
    padding. If only the eos of a document does not fit into a row, the document's last token and
    the eos both go into the next row. A row with the maximum number of segments ends early.
    """
    count, r, fill, in_row = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    too_short = limits.overhead.shape[0] - 1
    for d in range(documents.offsets.shape[0] - 1):
        total = documents.offsets[d + 1] - documents.offsets[d]
        start = np.int64(0)
        while start < total:
            rest_tokens, room, tokens = total - start, limits.seq_length - fill, np.int64(0)
            if room >= 2 and in_row < limits.segments:
                key, task = _drawn_task(documents, d, start, rest_tokens, limits.drawn)
                bos = policy.bos if start == 0 else np.int64(0)
                overhead = limits.overhead[task] + bos
                tokens, eos = _tokens_in_row(room, rest_tokens, overhead, limits, policy)
                # If the drawn task would get too few tokens, `too_short` takes them.
                if tokens < SHORTEST and task != too_short:
                    task = np.int64(too_short)
                    overhead = limits.overhead[task] + bos
                    tokens, eos = _tokens_in_row(room, rest_tokens, overhead, limits, policy)
            # Start a new row if no token fits in this one.
            if tokens < 1:
                r, fill, in_row = r + 1, np.int64(0), np.int64(0)
                continue
            _write_cut(cuts, count, Cut(d, start, tokens, task, bos, eos, key, 0, -1, 0))
            # The first run only counts the segments, and `row` is empty.
            if count < row.shape[0]:
                row[count] = r
            count += 1
            in_row += 1
            fill += tokens + overhead + eos
            start += tokens
    return count


def cut(
    recipe: Recipe, tasks: Sequence[Task], documents: Documents, limits: CutLimits | None = None
) -> tuple[Segments, LeftOut]:
    """Cut documents. Return the segments in document order, and the counts of left-out tokens.

    - If a document and its eos fit into one segment, the document is one segment. A longer document
      is cut into chunks of up to `limits.inner` tokens, and its last chunk has at least max(3,
      min_tokens) tokens.
    - Each segment draws its own task, but segments of fewer than 3 tokens get `too_short`. Segments
      of supervised documents draw only from the tasks that allow them.
    - `concat` cuts where rows end, and assigns each segment its row.
    - If a recipe has several `seq_lengths`, each document belongs to one row length. With
      "decompose", each chunk belongs to one row length. Tokens that belong to other row lengths are
      left out.

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
    # Each kernel runs twice. The first run only counts the segments, and its `LeftOut` is ignored.
    ignored, lost = (LeftOut(*np.zeros((len(LeftOut._fields), count), np.int64)) for _ in range(2))
    read_columns = (getattr(documents, name) for name in _Documents._fields[:-1])
    columns = _Documents._make((*read_columns, np.ones(count, np.uint8)))
    if recipe.packing.algorithm == "concat":
        return segments_of_cuts(
            tasks, documents, *_cut_by_rows(recipe, tasks, documents, columns)
        ), lost
    training = documents.training
    supervised = np.zeros(count, np.uint8) if training is None else training.supervised
    # Refuse sources whose tasks cannot draw supervised documents, before any cut.
    for s in np.unique(documents.source[supervised != 0]):
        check_supervised(recipe, int(s))
    limits, policy = limits or cut_limits(recipe, tasks), _policy_of(recipe)
    # With several row lengths, a whole document belongs to one of them. With "decompose", `_cut`
    # decides per chunk.
    is_elsewhere = np.zeros(count, np.bool_)
    if recipe.seq_lengths and recipe.documents.long != "decompose":
        length = np.empty(count, np.int64)
        _lengths_of(columns, supervised, limits, policy.bos, length)
        is_elsewhere = length != policy.length
        lost.elsewhere[is_elsewhere] = np.diff(documents.offsets)[is_elsewhere]
    # The two kernels share the documents: each cuts those with its flag `wanted`.
    unsupervised = ((supervised == 0) & ~is_elsewhere).astype(np.uint8)
    plain = (columns._replace(wanted=unsupervised), limits, policy)
    cuts = Cuts.empty(_cut(*plain, Cuts.empty(0), ignored.elsewhere))
    _cut(*plain, cuts, lost.elsewhere)
    if training is None:
        return segments_of_cuts(tasks, documents, cuts), lost
    with_messages = columns._replace(wanted=((supervised != 0) & ~is_elsewhere).astype(np.uint8))
    by_messages = (with_messages, limits, policy, _supervision_of(training))
    cuts_at_messages = Cuts.empty(_cut_supervised(*by_messages, Cuts.empty(0), ignored))
    _cut_supervised(*by_messages, cuts_at_messages, lost)
    # Each kernel wrote its segments in document order. A stable sort merges them and keeps chunks
    # in order.
    all_cuts = Cuts(*(np.concatenate(pair) for pair in zip(cuts, cuts_at_messages, strict=True)))
    in_document_order = np.argsort(all_cuts.document, kind="stable")
    return segments_of_cuts(tasks, documents, Cuts(*(c[in_document_order] for c in all_cuts))), lost


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
    """Return the columns of `Training` that are needed to cut documents."""
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
    # All tasks have n + constant slots here, so a body of one token shows the constant.
    one_token = np.ones(1, np.int64)
    a_token = Bodies(one_token, one_token.astype(np.uint64), -one_token, 0 * one_token)
    overhead = [task.slots(a_token, 0 * one_token, 0 * one_token)[0] - 1 for task in tasks]
    limits = _RowLimits(
        thresholds(recipe),
        np.array(overhead, np.int64),
        recipe.documents.max_tokens or recipe.seq_length,
        recipe.seq_length,
        recipe.packing.max_segments_per_row or FORMAT_MAX_SEGMENTS,
    )
    arguments = (columns, limits, _policy_of(recipe))
    # Count the segments first, so that the columns get the right size.
    count = _cut_at_row_ends(*arguments, Cuts.empty(0), np.empty(0, np.int64))
    cuts, row = Cuts.empty(count), np.empty(count, np.int64)
    _cut_at_row_ends(*arguments, cuts, row)
    return cuts, row
