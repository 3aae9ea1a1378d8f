"""The compiled writers of noise equal the numpy ones, which equal the twins
(tests/dataset/test_noise.py)."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packprep.dataset.epochs import noise
from packprep.objectives import REGISTRY, noising
from packprep.randomness import bits64
from tests.dataset.test_noise import (
    BLOCK_LAWS,
    BLOCKS,
    MASK,
    MASKED,
    UNIFORM,
    block_laws,
    block_lengths,
    cases,
    columns,
    epochs,
    ids_of,
    level_ranges,
    ranges,
    share_kinds,
    with_trainable_bodies,
)

many = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))


def both(law, case, parameters, resolved=None, ids=None, task=0, epoch=0):
    """(tokens, loss_mask, level, weight, blocks) by numpy and by the objective's own writer."""
    segments, before, tokens, may, dtype, _ = case
    found = []
    for write in (noise.SCHEDULES[law].draw, REGISTRY[law].noise):
        made, loss_mask = np.array(tokens, dtype), np.zeros(len(tokens), np.uint8)
        length = np.array([b + s[2] for b, s in zip(before, segments, strict=True)], np.int64)
        flags = None if may is None else np.array(may, np.uint8)
        target = noise.Target(
            columns(segments), np.array(before, np.int64), length, flags, made, loss_mask
        )
        noised = write(task, parameters, resolved or {}, ids or ids_of(), target, epoch)
        found.append((made, loss_mask, noised.level, noised.weight, *of_blocks(noised)))
    return found


def of_blocks(noised):
    if noised.blocks is None:
        return ()
    return (*noised.blocks.blocks, noised.blocks.level, noised.blocks.weight)


def assert_equal(found):
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        assert one.tolist() == other.tolist()


@given(
    cases(), ranges, st.sampled_from([0.0, 1e-3, 0.3]), st.booleans(), st.booleans(), st.sampled_from(share_kinds),
    st.integers(0, 300), epochs,
)  # fmt: skip
@many
def test_masks_are_numpy_s(case, noise_range, epsilon, exact, stratified, shares, task, epoch):
    changes = {
        "noise_range": noise_range,
        "epsilon": epsilon,
        "exact_count": exact,
        "stratified": stratified,
    }
    ids = ids_of(mask=MASK if shares[0] else -1)
    assert_equal(
        both(
            "masked_diffusion", case, {**MASKED, **changes, "replace": shares}, {}, ids, task, epoch
        )
    )


@given(
    cases(),
    ranges,
    st.sampled_from(["all", "corrupted"]),
    epochs,
    st.sampled_from([0, 1, 2**39, 2**40 - 1, 2**40]),
)
@many
def test_flips_are_numpy_s(case, noise_range, loss_on, epoch, constant):
    limits = [constant if step % 2 else step * 2**40 // 4096 for step in range(4096)]
    changes = {"noise_range": noise_range, "loss_on": loss_on}
    assert_equal(
        both(
            "uniform_diffusion",
            case,
            {**UNIFORM, **changes},
            {"flip_thresholds": limits},
            None,
            0,
            epoch,
        )
    )


@given(cases(), level_ranges, block_lengths, epochs, block_laws)
@many
def test_blocks_are_numpy_s(case, noise_range, block_length, epoch, law):
    parameters = {**BLOCKS, "noise_range": noise_range, "block_length": block_length, **law}
    assert_equal(both("block_diffusion", with_trainable_bodies(case), parameters, epoch=epoch))


@pytest.mark.parametrize("law", BLOCK_LAWS)
@pytest.mark.parametrize("origin", ["answer", "segment"])
def test_blocks_of_several_answers_are_numpy_s(law, origin):
    """Answers of 1 to 300 slots in segments of a thousand, the last of which ends its segment."""
    segments, before, tokens, _, dtype, chunk = long_case([1000, 1000, 5], 39, "uint16", masks=7)
    may = [0] * len(tokens)
    for (_, at, _, _), answers in zip(
        segments, ([(0, 1), (3, 9), (200, 500), (990, 1000)], [(1, 301), (302, 303)], []),
        strict=True,
    ):  # fmt: skip
        for begin, end in answers:
            may[at + begin : at + end] = [1] * (end - begin)
    case = segments, before, tokens, may, dtype, chunk
    parameters = {**BLOCKS, "block_length": 8, "block_origin": origin, **BLOCK_LAWS[law]}
    found = both("block_diffusion", case, parameters)
    assert_equal(found)
    tokens_now, loss_mask = found[0][0], found[0][1]
    assert loss_mask.any() and (loss_mask <= np.array(may)).all()
    changed = tokens_now != np.array(tokens, dtype)
    assert (changed <= np.array(may, bool)).all()


def long_case(lengths, tokens_below, dtype, masks=0):
    """Segments of these lengths, one gap slot before each, tokens at random; `masks`: every so
    manieth is the mask."""
    ends = np.cumsum(np.array(lengths) + 1)
    keys = bits64(np.uint64(4), 0, np.arange(len(lengths)))
    segments = [
        (int(k), int(e - n), n, i // 3)
        for i, (k, e, n) in enumerate(zip(keys, ends, lengths, strict=True))
    ]
    tokens = bits64(np.uint64(9), 0, np.arange(int(ends[-1]) + 5)) % np.uint64(tokens_below)
    if masks:
        tokens[::masks] = MASK
    return segments, [1] * len(lengths), tokens.tolist(), None, dtype, 1 << 17


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"stratified": True},
        {"exact_count": True, "noise_range": (0.15, 0.99)},
        {"exact_count": True, "noise_range": (1.0, 1.0), "replace": (0.0, 1.0, 0.0)},
        {"noise_range": (0.15, 0.15), "replace": (0.8, 0.1, 0.1)},
        {"noise_range": (1.0, 1.0)},
        {"noise_range": (0.0, 0.0), "epsilon": 2.0**-33},  # the high byte decides nothing
    ],
)
def test_long_segments_are_numpy_s(changes, dtype):
    case = long_case(
        [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500, 2047, 70_000], 39, dtype, masks=11
    )
    assert_equal(both("masked_diffusion", case, {**MASKED, **changes}))


@pytest.mark.parametrize("law", BLOCK_LAWS)
@pytest.mark.parametrize("block_length", [1, 4, 32, 100_000])
def test_long_segments_in_blocks_are_numpy_s(block_length, law):
    for noise_range in ((0.3, 0.8), (1.0 - 1e-12, 1.0), (1.0, 1.0))[: 1 if law != "level" else 3]:
        parameters = {
            **BLOCKS,
            "block_length": block_length,
            "noise_range": noise_range,
            **BLOCK_LAWS[law],
        }
        assert_equal(
            both(
                "block_diffusion",
                long_case([3, 500, 64, 30_000], 39, "uint16", masks=7),
                parameters,
            )
        )


@given(st.lists(st.integers(0, 8), min_size=1, max_size=40), st.integers(0, 40))
@settings(max_examples=300, deadline=None)
def test_the_least_are_marked_by_place_where_they_are_tied(values, k):
    values, k = np.array(values, np.float64), min(k, len(values))
    hit = np.full(len(values), 7, np.uint8)
    noising._mark_least(values, k, hit)
    expected = np.zeros(len(values), np.uint8)
    expected[np.argsort(values, kind="stable")[:k]] = 1
    assert hit.tolist() == expected.tolist()


def test_first_draws_of_flips_that_are_rejected_are_drawn_again_as_numpy_does():
    vocab = 2**31 + 2  # nearly every second draw of the 2³¹ + 1 others is rejected
    ordinary = np.arange(40, dtype=np.int32)
    found = []
    for flip in (noise.flip, noising.flip):
        tokens, loss_mask = np.full(300, 7, np.int32), np.zeros(300, np.uint8)
        segments = columns([(5, 0, 300, 0)])
        rank = np.full(8, -1, np.int32)
        wide = np.lib.stride_tricks.as_strided(ordinary, (vocab,), (0,))  # as long, of one value
        target = noise.Target(segments, *np.array([[0], [300]]), None, tokens, loss_mask)
        flip(target, np.array([2**39], np.uint64), False, noise.NoiseIds(-1, wide, rank))
        found.append((tokens, loss_mask))
    assert_equal(found)


def test_segments_outside_the_rows_are_never_written():
    for at, count in ((-1, 3), (8, 3), (0, -1)):
        rows = np.zeros(10, np.uint16), np.zeros(10, np.uint8)
        target = noise.Target(columns([(1, at, count, 0)]), *np.array([[0], [3]]), None, *rows)
        with pytest.raises(AssertionError):
            noising.mask(target, np.ones(1), None, (1.0, 0.0, 0.0), ids_of())
