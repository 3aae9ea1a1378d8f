"""The blocks of answers and segments, next to a walk over the slots of each segment."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep.dataset.blocks import (
    Answers,
    answers_of_flags,
    answers_of_ranges,
    block_ranges,
    block_starts,
    blocks_of,
    candidate_ranges,
    joined_blocks,
    put_by_block,
    range_offsets,
)
from packprep.dataset.boundaries import starts_of


@st.composite
def segments(draw, most=6):
    """Lists (flags of the slots of a half, slots before the body) of some segments. Neither bos nor
    mode token is trained."""
    made = []
    for _ in range(draw(st.integers(0, most))):
        before = draw(st.integers(0, 2))
        body = draw(st.lists(st.sampled_from([0, 1, 1]), max_size=20))
        made.append(([0] * before + body, before))
    return made


def walked(flags, before, parameters):
    """The number of each slot's block, −1 outside of blocks."""
    length, half = parameters["block_length"], len(flags)
    if parameters["block_origin"] != "answer":
        return [t // length for t in range(half)]
    number, block, t = [-1] * half, -1, 0
    while t < half:
        if not flags[t]:
            t += 1
            continue
        first, stop = (0 if t <= before else t), t
        while stop < half and flags[stop]:
            stop += 1
        for slot in range(first, stop):
            block += (slot - first) % length == 0
            number[slot] = block
        t = stop
    return number


def flat_of(made, gap):
    """(flags, first slots, numbers of slots) of segments in one flat array, `gap` slots apart."""
    flags, first = [1] * gap, []
    for own, _ in made:
        first.append(len(flags))
        flags += [*own, *[1] * gap]
    half = np.array([len(own) for own, _ in made], np.int64)
    return np.array(flags, np.uint8), np.array(first, np.int64), half


parameters_of = st.fixed_dictionaries(
    {
        "block_length": st.sampled_from([1, 2, 3, 5, 100]),
        "block_origin": st.sampled_from(["answer", "segment"]),
    }
)


@given(segments(), parameters_of, st.integers(0, 2))
@settings(max_examples=150)
def test_blocks_are_those_of_a_walk(made, parameters, gap):
    flags, first, half = flat_of(made, gap)
    before = np.array([b for _, b in made], np.int64)
    blocks = blocks_of(parameters, half, before, answers_of_flags(flags, first, half))
    walks = [walked(own, b, parameters) for own, b in made]
    assert blocks.count.tolist() == [max(walk, default=-1) + 1 for walk in walks]
    assert blocks.segment.tolist() == np.repeat(np.arange(len(made)), blocks.count).tolist()
    k = 0
    for walk, count in zip(walks, blocks.count.tolist(), strict=True):
        for block in range(count):
            slots = [t for t, number in enumerate(walk) if number == block]
            begin, end = int(blocks.begin[k]), int(blocks.end[k])
            assert slots == list(range(begin, end)) and 0 < len(slots) <= parameters["block_length"]
            k += 1
    # The position at which each slot's block begins; a slot of context is a block of its own.
    expected = [
        walk.index(number) if number >= 0 else t for walk in walks for t, number in enumerate(walk)
    ]
    assert block_starts(blocks, half).tolist() == expected
    assert block_starts(blocks, half).dtype == np.int32
    # One value for each block, at its own slots and one slot earlier.
    for ahead in (0, 1):
        values = np.arange(1, len(blocks.begin) + 1)
        slots = np.zeros(len(flags), np.int64)
        put_by_block(slots, first, blocks, values, ahead)
        expected = np.zeros(len(flags), np.int64)
        for at, walk, number in zip(first, walks, starts_of(blocks.count).tolist(), strict=True):
            for t, block in enumerate(walk):
                if block >= 0 and t >= ahead:
                    expected[at + t - ahead] = values[number + block]
        assert slots.tolist() == expected.tolist()


@given(segments(), parameters_of, st.integers(0, 3))
@settings(max_examples=100)
def test_candidates_are_divided_where_blocks_begin_and_end(made, parameters, missing):
    """Candidates are the slots from `before` on, but for `missing` at the end."""
    flags, first, half = flat_of(made, 1)
    before = np.array([b for _, b in made], np.int64)
    blocks = blocks_of(parameters, half, before, answers_of_flags(flags, first, half))
    candidates = np.maximum(half - before - missing, 0)
    lengths, offsets = candidate_ranges(blocks, before, candidates), range_offsets(blocks)
    of_block, k = set(block_ranges(blocks).tolist()), 0
    for g, (own, b) in enumerate(made):
        walk = walked(own, b, parameters)[b : b + int(candidates[g])]
        ranges = range(offsets[g], offsets[g + 1])
        assert lengths[ranges.start : ranges.stop].sum() == len(walk)
        at = 0
        for r in ranges:
            part = walk[at : at + lengths[r]]
            if r in of_block:
                assert part == [r - ranges.start >> 1] * len(part)
                k += 1
            else:
                assert part == [-1] * len(part)
            at += int(lengths[r])
    assert k == len(of_block) == len(blocks.begin)


def test_the_example_of_candidate_ranges():
    answers = Answers(np.array([0]), np.array([2]), np.array([8]))
    blocks = blocks_of(
        {"block_length": 3, "block_origin": "answer"}, np.array([10]), np.array([0]), answers
    )
    found = candidate_ranges(blocks, np.array([0]), np.array([10]))
    assert found.tolist() == [2, 3, 0, 3, 2]


@given(segments(), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_ranges_that_touch_are_one_answer(made, chance_of):
    """Ranges are divided where weights change."""
    flags, first, half = flat_of(made, 0)
    found = answers_of_flags(flags, first, half)
    ranges = []
    for g, begin, end in zip(*(column.tolist() for column in found), strict=True):
        inner = range(begin + 1, end)
        cuts = sorted(chance_of.sample(inner, chance_of.randint(0, min(2, len(inner)))))
        ranges += [(g, a, b) for a, b in zip([begin, *cuts], [*cuts, end], strict=True)]
    columns = np.array(ranges, np.int64).reshape(-1, 3)
    joined = answers_of_ranges(columns[:, 0], columns[:, 1:].astype(np.int32))
    for one, other in zip(joined, found, strict=True):
        assert one.tolist() == other.tolist()


@given(segments(most=8), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_blocks_of_tasks_are_joined_and_chosen_again(made, chance_of):
    """Each segment has one of two tasks, or none with blocks."""
    flags, first, half = flat_of(made, 1)
    before = np.array([b for _, b in made], np.int64)
    answers = answers_of_flags(flags, first, half)
    tasks = [
        {"block_length": 2, "block_origin": "segment"},
        {"block_length": 3, "block_origin": "answer"},
    ]
    task = np.array([chance_of.randint(0, 2) for _ in made], np.int64)
    parts = []
    for t, parameters in enumerate(tasks):
        chosen = np.flatnonzero(task == t)
        own = answers.of_segments(chosen)
        parts.append((chosen, blocks_of(parameters, half[chosen], before[chosen], own)))
    blocks = joined_blocks(len(made), parts)
    for g, (own, b) in enumerate(made):
        one = blocks.select(np.array([g]))
        if task[g] == 2:
            assert one.count.tolist() == [0]
            continue
        walk = walked(own, b, tasks[task[g]])
        bounds = {n: [t for t, m in enumerate(walk) if m == n] for n in set(walk) - {-1}}
        assert one.begin.tolist() == [bounds[n][0] for n in sorted(bounds)]
        assert one.end.tolist() == [bounds[n][-1] + 1 for n in sorted(bounds)]


@pytest.mark.parametrize("seed", range(3))
def test_a_document_without_a_prompt_has_the_blocks_of_an_unsupervised_one(seed):
    chance = random.Random(seed)
    half = np.array([chance.randint(3, 40) for _ in range(20)])
    before = np.array([chance.randint(0, 2) for _ in half])
    whole = Answers(np.arange(20), before, half)
    parameters = {"block_length": chance.randint(1, 9), "block_origin": "answer"}
    for one, other in zip(
        blocks_of(parameters, half, before, whole),
        blocks_of(parameters, half, before, None),
        strict=True,
    ):
        assert one.tolist() == other.tolist()
