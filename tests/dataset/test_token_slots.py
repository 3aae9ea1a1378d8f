"""Where tokens stand in an epoch: as the kernels put them, and distributed as the law says."""

from itertools import combinations

import numpy as np
import pytest

from packprep.dataset import token_slots
from packprep.objectives import span_corruption

SENTINELS = np.arange(1000, 1300)
N, DENSITY, MEAN = 12, 0.5, 2.0  # 6 tokens of noise in 3 spans
LAW = {"noise_density": DENSITY, "mean_span_length": MEAN, "random_roll": False}


def is_improbable(counts, expected):
    """Whether χ² of the counts is one of the 10⁻⁴ greatest: by Wilson and Hilferty (1931) its cube root is nearly normal."""
    assert expected.min() > 5 and not counts[expected == 0].any()
    freedom = len(expected) - 1
    chi = ((counts - expected) ** 2 / expected).sum()
    z = ((chi / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom))
    return z > 3.72


def compositions(total, parts):
    for cuts in combinations(range(1, total), parts - 1):
        bounds = (0, *cuts, total)
        yield [b - a for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def masks():
    """Every mask of the law without a roll, bool[k, N]; each is as likely as another."""
    noise, spans = span_corruption.span_counts(N, DENSITY, MEAN)
    found = []
    for text in compositions(N - noise, spans):
        for noised in compositions(noise, spans):
            runs = [run for pair in zip(text, noised, strict=True) for run in pair]
            found.append(np.repeat(np.arange(2 * spans) % 2 == 1, runs))
    return np.array(found)


def drawn(law, keys, epoch):
    """bool[m, N]: which tokens stand behind the prefix, in segments of N tokens."""
    n, first = np.full(len(keys), N), np.arange(len(keys)) * 100
    placed = token_slots.span_slots(law, 50, keys, n, first, epoch)
    return (placed.token.reshape(-1, N) - first[:, None]) >= placed.prefix[:, None]


def numbers(found):
    """int64[m]: a number for each mask."""
    return found @ (1 << np.arange(N))


def cuts_a_span(rolled):
    """bool[m]: whether a mask ends and begins with noise, as one does that is rotated inside of a span."""
    return rolled[:, 0] & rolled[:, -1]


@pytest.mark.parametrize("roll", [False, True])
@pytest.mark.parametrize("density, mean, count", [(0.15, 3.0, 300), (0.9, 1.0, 300), (0.3, 2.0, 7), (0.5, 32.0, 3)])
def test_tokens_stand_where_the_kernels_put_them(density, mean, count, roll):
    chance = np.random.default_rng(1)
    m = 200
    n, key = chance.integers(3, 600, m), chance.integers(0, 1 << 63, m).astype(np.uint64)
    law = {"noise_density": density, "mean_span_length": mean, "random_roll": roll}
    most = count - int(roll)
    slots = token_slots.span_slots(law, count, key, n, np.zeros(m, np.int64), 0).slots
    first, begin = np.cumsum(slots) - slots, np.cumsum(n) - n
    tokens = np.arange(n.sum())
    for epoch in (0, 1, 77, (1 << 32) - 1):
        rows = np.full(int(slots.sum()) + 64, -1)
        span_corruption._render(
            tokens, begin, n, key, epoch, first, density, mean, most, roll, SENTINELS, int(n.max()), rows
        )
        placed = token_slots.span_slots(law, count, key, n, first, epoch)
        again = np.full_like(rows, -1)
        again[placed.token], again[placed.sentinel] = tokens, SENTINELS[placed.number]
        assert np.array_equal(placed.slots, slots)
        assert np.array_equal(again[: slots.sum()], rows[: slots.sum()]) and (again[: slots.sum()] >= 0).all()


def test_every_mask_is_as_likely_over_segments_and_over_epochs():
    every = numbers(masks())
    key = np.arange(60_000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for epoch in (0, 5):
        found = numbers(drawn(LAW, key, epoch))
        counts = np.array([(found == number).sum() for number in every])
        assert counts.sum() == len(key) and not is_improbable(counts, np.full(len(every), len(key) / len(every)))
    found = np.concatenate([numbers(drawn(LAW, key[:1], epoch)) for epoch in range(1, 3001)])
    counts = np.array([(found == number).sum() for number in every])
    assert not is_improbable(counts, np.full(len(every), len(found) / len(every)))


def test_under_a_roll_a_segment_keeps_its_kind_and_every_rotation_of_it_is_as_likely():
    law = {**LAW, "random_roll": True}
    rotated = np.concatenate([np.roll(masks(), -offset, axis=1) for offset in range(N)])
    kinds = cuts_a_span(rotated)
    key = np.arange(60_000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    stored = cuts_a_span(drawn(law, key, 0))
    for epoch in (0, 9):
        found = drawn(law, key, epoch)
        assert np.array_equal(cuts_a_span(found), stored)
        for kind in (False, True):
            every, weights = np.unique(numbers(rotated[kinds == kind]), return_counts=True)
            own = numbers(found[stored == kind])
            counts = np.array([(own == number).sum() for number in every])
            expected = len(own) * weights / weights.sum()
            assert counts.sum() == len(own) and not is_improbable(counts, expected)
    for kind in (False, True):
        one = key[np.flatnonzero(stored == kind)[:1]]
        every, weights = np.unique(numbers(rotated[kinds == kind]), return_counts=True)
        own = np.concatenate([numbers(drawn(law, one, epoch)) for epoch in range(1, 6001)])
        counts = np.array([(own == number).sum() for number in every])
        assert counts.sum() == len(own) and not is_improbable(counts, len(own) * weights / weights.sum())


def test_every_pivot_is_as_likely():
    key = np.arange(60_000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    n, first = np.full(len(key), N), np.arange(len(key)) * 100
    stored = token_slots.pivot_slots({"sentinel": True}, 1, key, n, first, 0).prefix
    anew = token_slots.pivot_slots({"sentinel": True}, 1, key, n, first, 3).prefix
    joint = np.bincount((stored - 1) * (N - 1) + anew - 1, minlength=(N - 1) ** 2)
    assert not is_improbable(joint, np.full((N - 1) ** 2, len(key) / (N - 1) ** 2))
