"""Where tokens stand in an epoch: as the kernels put them, and distributed as the law says."""

from itertools import combinations

import numpy as np
import pytest

from packprep.dataset.epochs import token_slots
from packprep.dataset.epochs.token_slots import SpecialIds, Stretches
from packprep.kernel import read_only
from packprep.objectives import fill_in_the_middle, span_corruption
from packprep.objectives.objective import Bodies, BodySlots

SENTINELS, NONE = np.arange(1000, 1300), np.zeros(0, np.uint8)
KEYS = np.arange(60_000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
N, DENSITY, MEAN = 12, 0.5, 2.0  # 6 tokens of noise in 3 spans
LAW = {
    "noise_density": DENSITY,
    "mean_span_length": MEAN,
    "random_roll": False,
    "eos_after_inputs": False,
}
EOS = 7


def is_improbable(counts, expected):
    """Whether χ² of the counts is one of the 10⁻⁴ greatest: by Wilson and Hilferty (1931) its cube
    root is nearly normal."""
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


def columns_of(begin, n, key, epoch, first_slot):
    """Return the columns that kernels take."""
    return BodySlots(begin, Bodies(n, key, np.full(len(n), -1), 0 * n, epoch), first_slot)


def ids(sentinels):
    return SpecialIds(SENTINELS[:sentinels], (-1, -1, -1), NONE, EOS)


def drawn(law, keys, epoch):
    """bool[m, N]: which tokens stand behind the prefix, in segments of N tokens."""
    n, first = np.full(len(keys), N), np.arange(len(keys)) * 100
    placed = token_slots.span_slots(law, ids(50), Stretches(keys, n, first), epoch, NONE)
    return (placed.token.reshape(-1, N) - first[:, None]) >= placed.prefix[:, None]


def numbers(found):
    """int64[m]: a number for each mask."""
    return found @ (1 << np.arange(N))


def cuts_a_span(rolled):
    """bool[m]: whether a mask ends and begins with noise, as one does that is rotated inside of a
    span."""
    return rolled[:, 0] & rolled[:, -1]


@pytest.mark.parametrize("roll", [False, True])
@pytest.mark.parametrize(
    "density, mean, count", [(0.15, 3.0, 300), (0.9, 1.0, 300), (0.3, 2.0, 7), (0.5, 32.0, 3)]
)
def test_tokens_stand_where_the_kernels_put_them(density, mean, count, roll):
    chance = np.random.default_rng(1)
    m = 200
    n, key = chance.integers(3, 600, m), chance.integers(0, 1 << 63, m).astype(np.uint64)
    ended = not roll and count > 5
    law = {
        "noise_density": density,
        "mean_span_length": mean,
        "random_roll": roll,
        "eos_after_inputs": ended,
    }
    most = count - int(roll)
    slots = token_slots.span_slots(
        law, ids(count), Stretches(key, n, np.zeros(m, np.int64)), 0, NONE
    ).slots
    first, begin = np.cumsum(slots) - slots, np.cumsum(n) - n
    tokens = np.arange(n.sum(), dtype=np.int32)
    for epoch in (0, 1, 77, (1 << 32) - 1):
        rows = np.full(int(slots.sum()) + 64, -1, np.int32)
        spans = span_corruption._Spans(density, mean, most, roll, SENTINELS, EOS if ended else -1)
        span_corruption._render(tokens, columns_of(begin, n, key, epoch, first), spans, rows)
        placed = token_slots.span_slots(law, ids(count), Stretches(key, n, first), epoch, NONE)
        again = np.full_like(rows, -1)
        again[placed.token], again[placed.special] = tokens, placed.id
        assert np.array_equal(placed.slots, slots)
        assert (
            np.array_equal(again[: slots.sum()], rows[: slots.sum()])
            and (again[: slots.sum()] >= 0).all()
        )


@pytest.mark.long
@pytest.mark.parametrize("epochs", [1000, pytest.param(3000, marks=pytest.mark.campaign)])
def test_every_mask_is_as_likely_over_segments_and_over_epochs(epochs):
    every, key = numbers(masks()), KEYS
    for epoch in (0, 5):
        found = numbers(drawn(LAW, key, epoch))
        counts = np.array([(found == number).sum() for number in every])
        assert counts.sum() == len(key) and not is_improbable(
            counts, np.full(len(every), len(key) / len(every))
        )
    found = np.concatenate([numbers(drawn(LAW, key[:1], epoch)) for epoch in range(1, epochs + 1)])
    counts = np.array([(found == number).sum() for number in every])
    assert not is_improbable(counts, np.full(len(every), len(found) / len(every)))


@pytest.mark.long
@pytest.mark.parametrize("epochs", [2000, pytest.param(6000, marks=pytest.mark.campaign)])
def test_under_a_roll_a_segment_keeps_its_kind_and_every_rotation_of_it_is_as_likely(epochs):
    law = {**LAW, "random_roll": True}
    rotated = np.concatenate([np.roll(masks(), -offset, axis=1) for offset in range(N)])
    kinds, key = cuts_a_span(rotated), KEYS
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
        own = np.concatenate([numbers(drawn(law, one, epoch)) for epoch in range(1, epochs + 1)])
        counts = np.array([(own == number).sum() for number in every])
        assert counts.sum() == len(own) and not is_improbable(
            counts, len(own) * weights / weights.sum()
        )


@pytest.mark.parametrize("epochs", [550, pytest.param(2200, marks=pytest.mark.campaign)])
def test_every_pivot_is_as_likely(epochs):
    own = Stretches(KEYS, np.full(len(KEYS), N), np.arange(len(KEYS)) * 100)
    stored, anew = (
        token_slots.pivot_slots(
            {"sentinel": True, "eos_after_inputs": False}, ids(1), own, epoch, NONE
        ).prefix
        for epoch in (0, 3)
    )
    joint = np.bincount((stored - 1) * (N - 1) + anew - 1, minlength=(N - 1) ** 2)
    assert not is_improbable(joint, np.full((N - 1) ** 2, len(KEYS) / (N - 1) ** 2))
    one = Stretches(KEYS[:1], own.n[:1], own.first_slot[:1])
    pivots = [
        token_slots.pivot_slots(
            {"sentinel": False, "eos_after_inputs": False}, ids(0), one, e, NONE
        ).prefix[0]
        for e in range(1, epochs + 1)
    ]
    assert not is_improbable(np.bincount(pivots)[1:], np.full(N - 1, epochs / (N - 1)))


def cut_law(rate=0.7, spm_rate=0.4, text_safe=True):
    return {"rate": rate, "spm_rate": spm_rate, "text_safe": text_safe}


PRE, MID, SUF = 90, 91, 92


@pytest.mark.parametrize("in_text", [0.0, 0.01])
@pytest.mark.parametrize("inside", [0.0, 0.2, 0.9])
def test_cuts_are_found_where_the_kernels_made_them_and_go_where_they_make_others(inside, in_text):
    chance = np.random.default_rng(3)
    m = 3000
    n, key = chance.integers(1, 60, m), chance.integers(0, 1 << 63, m).astype(np.uint64)
    n[:50] = 1
    continues = read_only((np.arange(100) < 90 * inside).astype(np.uint8))
    tokens = chance.integers(0, 90, n.sum()).astype(np.int32)
    own_roles = np.flatnonzero(chance.random(len(tokens)) < in_text)
    tokens[own_roles] = chance.integers(PRE, SUF + 1, len(own_roles))
    special, begin = SpecialIds(SENTINELS[:0], (PRE, MID, SUF), continues), np.cumsum(n) - n
    first = np.cumsum(n + 3) - n - 3
    own, law, rows = Stretches(key, n, first), cut_law(), {}
    for epoch in (0, 1, 77, (1 << 32) - 1):
        there = rows[epoch] = np.full(int(n.sum()) + 3 * m, -1, np.int32)
        cutting = fill_in_the_middle._Cutting(*token_slots.rates(law), continues, PRE, MID, SUF)
        columns = columns_of(begin, n, key, epoch, first)
        fill_in_the_middle._render(tokens, columns, cutting, there)
        placed = token_slots.cut_slots(law, special, own, epoch, tokens if epoch else there)
        out, fits = np.full_like(tokens, -1), np.zeros(m, np.bool_)
        fill_in_the_middle._restore(read_only(there), columns, cutting, out, fits)
        assert fits.all() and (there[placed.special] == placed.id).all()
        assert np.array_equal(
            placed.slots - n, 3 * (there[np.minimum(first + n, len(there) - 1)] >= 0)
        )
        if epoch or not in_text:
            assert np.array_equal(there[placed.token], tokens)
        else:  # two places may fit
            assert np.array_equal(there[placed.token], out)
        wrong = np.unique(np.repeat(np.arange(m), n)[out != tokens])
        assert len(wrong) <= (m // 100 if in_text and inside else 0)
    moved = (placed.slots > n).mean()
    assert abs(moved - 0.7) < 0.05 and (rows[1] != rows[0]).mean() > 0.2


@pytest.mark.long
@pytest.mark.parametrize("drawn", [1500, pytest.param(6000, marks=pytest.mark.campaign)])
def test_every_pair_of_cuts_is_as_likely_in_both_orders(drawn):
    law, n = cut_law(text_safe=False), np.full(len(KEYS), 5)
    special = SpecialIds(SENTINELS[:0], (PRE, MID, SUF), NONE)

    def counts_of(key, epochs):
        own = Stretches(key, n[: len(key)], np.arange(len(key)) * 8)
        found = np.zeros((6, 6))
        for epoch in epochs:
            placed = token_slots.cut_slots(law, special, own, epoch, NONE)
            moved = placed.slots > 5
            _, middle, suffix = (placed.special - np.tile(own.first_slot[moved], 3)).reshape(3, -1)
            np.add.at(found, (suffix, middle - suffix), 1)
        return found

    pairs = [(a, b) for a in range(6) for b in range(a + 1, 6)]
    for key, epochs in ((KEYS, [0]), (KEYS, [4])):
        placed = token_slots.cut_slots(
            law, special, Stretches(key, n, np.arange(len(key)) * 8), epochs[0], NONE
        )
        moved = int((placed.slots > 5).sum())
        assert abs(moved / len(key) - 0.7) < 0.01
        found = counts_of(key, epochs)
        check_cuts(found, pairs, moved)
    one = KEYS[np.flatnonzero(placed.slots > 5)[:1]]
    check_cuts(counts_of(one, range(1, drawn + 1)), pairs, drawn)
    still = KEYS[np.flatnonzero(placed.slots == 5)[:1]]
    assert not counts_of(still, range(1, 201)).any()


def check_cuts(found, pairs, moved):
    """found[s, m]: how often the suffix token stood at slot s and the middle token m slots behind;
    5 tokens."""
    expected = np.zeros((6, 6))
    for a, b in pairs:
        expected[1 + a, 1 + 5 - b] += 0.6 * moved / len(pairs)
        expected[1, 1 + 5 - b] += 0.4 * moved / len(pairs)
    there = expected > 0
    assert found[there].sum() == moved and not is_improbable(found[there], expected[there])


def test_a_body_that_rows_end_before_fits_nowhere_or_has_other_slots():
    continues, chance = (np.arange(100) < 50).astype(np.uint8), np.random.default_rng(0)
    special = SpecialIds(SENTINELS[:0], (PRE, MID, SUF), continues)
    for _ in range(300):
        n = int(chance.integers(4, 30))
        rows, key = (
            chance.integers(0, 100, n).astype(np.uint16),
            chance.integers(0, 1 << 60, 1).astype(np.uint64),
        )
        own = Stretches(key, np.array([n]), np.zeros(1, np.int64))
        assert token_slots.cut_slots(cut_law(rate=1.0), special, own, 0, rows).slots[0] == n + 3
