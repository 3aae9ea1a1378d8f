"""Where block diffusion cuts documents with answers, and which of them eos fill up."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

from packprep.building.segments import cut
from packprep.conversations.supervision import Conversation
from packprep.conversations.training import trained_tokens, training_columns
from packprep.errors import RecipeError
from tests import made
from tests.building.test_segments import conversation
from tests.properties import few_and_many

MIN_TAIL = 3
TASK = {
    "objective": "block_diffusion",
    "block_length": 4,
    "block_origin": "answer",
    "eos_fill": "block",
}


def cut_of(conversations, begins=None, **table):
    """(recipe, training, segments, counts of what is left out) of documents of one task."""
    recipe, tasks = made.mix({"tasks": [TASK], **table})
    trained = {
        i: trained_tokens(one, np.arange(len(one.text)) if begins is None else begins)
        for i, one in enumerate(conversations)
    }
    training = training_columns(trained, len(trained), recipe.documents.long_answers)
    sizes = [len(one.text) if begins is None else len(begins) for one in conversations]
    documents = replace(made.documents(sizes), training=training)
    segments, lost = cut(recipe, tasks, documents)
    return recipe, training, segments, lost


def pieces_of(segments, d):
    """(start, end, fill, eos, repeated) of each segment of document d."""
    of_document = segments.select(np.flatnonzero(segments.document == d))
    columns = "start", "tokens", "fill", "eos", "repeated"
    rows = zip(*(getattr(of_document, name).tolist() for name in columns), strict=True)
    return [(start, start + n, *rest) for start, n, *rest in rows]


@st.composite
def tables(draw):
    return {
        "seq_length": draw(st.sampled_from([64, 96, 160])),
        "tasks": [
            {
                **TASK,
                "block_length": draw(st.sampled_from([2, 3, 4, 7])),
                "block_origin": draw(st.sampled_from(["answer", "segment"])),
                "eos_fill": draw(st.sampled_from(["none", "block"])),
                **draw(st.sampled_from([{}, {"mode_token": "[NLG]"}])),
            }
        ],
        "documents": {
            "append_eos": draw(st.sampled_from(made.ENDS)),
            "prepend_bos": draw(st.booleans()),
            "long": draw(st.sampled_from(["split", "truncate", "drop"])),
            "long_answers": draw(st.sampled_from(["continue", "untrained"])),
        },
    }


def trains(training, k, start):
    """Whether a piece trains its tokens of span k: the rule that `Training` states."""
    first, question_end = training.turns[k].tolist()
    return start < question_end or first < start


def flags_of(training, d, piece, before, n_tokens):
    """Whether each slot of a piece's half is trained, without the eos that fill its last block."""
    start, end, _, eos, repeated = piece
    flags = [False] * (before + repeated + end - start + eos)
    spans = range(*training.span_offsets[d : d + 2].tolist())
    for k in spans:
        if trains(training, k, start):
            for token in range(*training.spans[k].tolist()):
                if start <= token < end:
                    flags[before + repeated + token - start] = True
    if eos and end == n_tokens:
        flags[-1] = bool(training.eos_weight[d] > 0 and trains(training, spans[-1], start))
    elif eos:
        flags[-1] = flags[-2]
    return flags


def begins_of_blocks(flags, before, length, origin):
    """The first slot of each block, by a walk."""
    if origin == "segment":
        return set(range(0, len(flags), length))
    found, t = set(), 0
    while t < len(flags):
        if flags[t]:
            first = 0 if t <= before else t
            while t < len(flags) and flags[t]:
                t += 1
            found |= set(range(first, t, length))
        t += 1
    return found


@few_and_many(40, 300, tables(), st.integers(1, 6), st.randoms(use_true_random=False))
def test_answers_are_cut_between_blocks_and_filled_blocks_are_whole(table, count, chance_of):
    conversations = [conversation(chance_of, chance_of.randint(1, 150)) for _ in range(count)]
    try:
        recipe, training, segments, lost = cut_of(conversations, **table)
    except RecipeError as error:
        assert "eos_fill needs room" in str(error)
        return
    parameters = table["tasks"][0]
    length, origin = parameters["block_length"], parameters["block_origin"]
    assert (segments.slots <= recipe.seq_length).all()
    assert (segments.fill < length).all()
    truncated = np.zeros(count, np.int64)
    for d, one in enumerate(conversations):
        n_tokens, pieces = len(one.text), pieces_of(segments, d)
        for piece in pieces:
            start, end, fill, eos, repeated = piece
            is_blocks = end - start >= MIN_TAIL  # otherwise the task too_short has them
            bos = int(start == 0 and recipe.documents.prepend_bos)
            before = bos + (is_blocks and "mode_token" in parameters)
            flags = flags_of(training, d, piece, before, n_tokens)
            begins = begins_of_blocks(flags, before, length, origin)
            may_fill = parameters["eos_fill"] == "block" and is_blocks and end == n_tokens
            if origin == "segment":
                last = max(
                    (t for t in range(before + repeated, len(flags)) if flags[t]), default=-1
                )
                after = start + last - before - repeated + 1
                is_ended = last >= 0 and not any(after <= c < n_tokens for c in one.boundaries)
            else:
                is_ended = flags[-1]
            if may_fill and is_ended:
                assert (len(flags) + fill - max(begins)) % length == 0
            else:
                assert fill == 0
            # a cut inside an answer
            slot = before + repeated + end - start
            ahead = (*piece[:1], end + 1, 0, 0, repeated)
            if end < n_tokens and is_blocks:
                further = flags_of(training, d, ahead, before, n_tokens)
                if further[slot] and further[slot - 1] and end not in one.boundaries:
                    run = slot
                    while run > 0 and further[run - 1]:
                        run -= 1
                    borders = begins_of_blocks(further, before, length, origin)

                    def ends_block(t, borders=borders, eos=eos):
                        return (t + eos - max(b for b in borders if b < t)) % length == 0

                    least = max(run + 1, before + repeated + MIN_TAIL)
                    assert ends_block(slot) or not any(map(ends_block, range(least, slot)))
        in_segments = sum(end - start for start, end, *_ in pieces)
        left = n_tokens - in_segments - int(lost.untrained[d] + lost.too_long[d])
        truncated[d] = left
    assert (truncated >= 0).all()
    assert recipe.documents.long == "truncate" or not truncated.any()


@few_and_many(20, 100, tables(), st.integers(1, 6), st.randoms(use_true_random=False))
def test_no_answer_loses_its_question(table, count, chance_of):
    """Every piece begins with a question, where a question and its answer fit into a piece."""
    conversations = [chat(chance_of) for _ in range(count)]
    try:
        _, _, segments, lost = cut_of(conversations, **table)
    except RecipeError:
        return
    for d, one in enumerate(conversations):
        starts = [start for start, *_ in pieces_of(segments, d)]
        assert set(starts) <= {0, *one.boundaries[1::2]}
    assert not lost.apart.any()


def chat(chance_of):
    """Questions of 2 to 6 tokens and answers of 2 to 12, which fit into the shortest rows."""
    bounds = [0]
    for turn in range(chance_of.randint(2, 16)):
        bounds.append(bounds[-1] + chance_of.randint(2, 6 if turn % 2 == 0 else 12))
    bounds = bounds if len(bounds) % 2 else bounds[:-1]
    spans = tuple(zip(bounds[1::2], bounds[2::2], strict=True))
    roles = ("user", "assistant") * len(spans)
    weights = (1.0,) * len(spans)
    return Conversation("x" * bounds[-1], spans, tuple(bounds[1:-1]), roles, 0, weights=weights)


def test_a_long_answer_is_cut_into_whole_blocks_and_its_last_one_is_filled():
    # A half has 32 slots: 10 of the question and 20 of the answer, five blocks. Then 32 of it, and
    # what is left with its eos.
    (long,) = [Conversation("x" * 80, ((10, 80),), weights=(1.0,))]
    _, _, segments, _ = cut_of([long], seq_length=64)
    assert pieces_of(segments, 0) == [
        (0, 30, 0, 0, 0),
        (30, 62, 0, 0, 0),
        (62, 80, 1, 1, 0),
    ]


def test_an_answer_without_a_whole_block_is_cut_where_the_row_ends():
    (late,) = [Conversation("x" * 60, ((30, 60),), weights=(1.0,))]
    _, _, segments, _ = cut_of([late], seq_length=64)
    assert pieces_of(segments, 0)[0] == (0, 32, 0, 0, 0)


@pytest.mark.parametrize("origin, fill", [("answer", 3), ("segment", 1)])
def test_an_eos_that_is_trained_without_the_token_before_it_is_filled_up(origin, fill):
    """The last token begins before the span, so that only eos is trained."""
    one = Conversation("x" * 20, ((4, 8), (19, 20)), weights=(1.0, 1.0))
    task = {**TASK, "block_origin": origin}
    _, _, segments, _ = cut_of([one], begins=np.arange(0, 20, 2), seq_length=64, tasks=[task])
    assert pieces_of(segments, 0) == [(0, 10, fill, 1, 0)]


def test_a_row_without_room_for_a_filled_block_is_refused():
    with pytest.raises(RecipeError, match="eos_fill needs room for a block of 40 and 5 tokens"):
        cut_of([chat(random.Random(0))], tasks=[{**TASK, "block_length": 40}], seq_length=64)
