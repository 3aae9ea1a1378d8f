import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep.dataset import shares
from packprep.errors import ArgumentError

many_shares = st.one_of(st.lists(kind, min_size=1, max_size=5) for kind in (st.integers(1, 50), st.floats(0.01, 1)))
seeds = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize(
    "given, counts",
    [
        ([0.7, 0.3], [7, 3]),
        ([7, 3], [7, 3]),
        ([1], [1]),
        ([0.2], [1]),
        ([1, 1, 1], [1, 1, 1]),
        ([1 / 3, 2 / 3], [1, 2]),
        ([0.1, 0.2, 0.7], [1, 2, 7]),
        ([0.123, 0.877], [123, 877]),
        ([1e308, 1e308], [1, 1]),
        ([2, 1, 1003], [2, 1, 997]),  # 1.99, 0.99, 997.0: the largest remainders get what is left
        ([1001, 1001, 999.5], [334, 333, 333]),  # 333.5, 333.5, 333.0: a tie goes to the first
        ([np.float32(0.5), np.int64(1)], [1, 2]),
    ],
)
def test_a_cycle_is_as_short_as_shares_allow_and_1000_at_most(given, counts):
    assert shares.counts_of(given).tolist() == counts


@given(st.lists(st.floats(0.05, 1), min_size=1, max_size=30))
def test_counts_are_the_shares_to_a_thousandth(given):
    counts, exact = shares.counts_of(given), np.array(given) / sum(given)
    assert 1 <= counts.sum() <= 1000 and (np.abs(counts / counts.sum() - exact) < 1 / 1000 + 1e-9).all()


@pytest.mark.parametrize("bad", [0, -0.1, float("nan"), float("inf"), "0.5", None, True])
def test_a_share_that_is_no_number_above_0_is_refused(bad):
    with pytest.raises(ArgumentError, match=r"shares\[1\]"):
        shares.counts_of([0.5, bad])


def test_a_share_that_rounds_to_nothing_is_refused():
    with pytest.raises(ArgumentError, match=r"shares\[0\] is 0.0001.*no sample in 1000"):
        shares.counts_of([0.0001, 0.9999])


@settings(max_examples=60, deadline=None)
@given(many_shares, seeds, st.booleans(), st.integers(0, 2**50), st.integers(0, 2500))
def test_counts_in_closed_form_are_those_that_are_counted(given, seed, shuffle, begin, n):
    counts = shares.counts_of(given)
    samples = np.arange(begin, begin + n)
    datasets, numbers = shares.of_samples(samples, counts, seed, shuffle)
    before, after = (shares.among_first(g, counts, seed, shuffle) for g in (begin, begin + n))
    assert before.sum() == begin and after.sum() == begin + n
    for d in range(len(counts)):
        assert numbers[datasets == d].tolist() == list(range(before[d], after[d]))
    whole = begin // counts.sum()
    assert (whole * counts <= before).all() and (before <= (whole + 1) * counts).all()


@settings(max_examples=40, deadline=None)
@given(many_shares, seeds, st.booleans(), st.data())
def test_any_sample_is_found_without_the_others(given, seed, shuffle, data):
    counts = shares.counts_of(given)
    some = np.array(data.draw(st.lists(st.integers(0, 3000), min_size=1, max_size=12)))
    whole = shares.of_samples(np.arange(3001), counts, seed, shuffle)
    for found, expected in zip(shares.of_samples(some.reshape(-1, 1), counts, seed, shuffle), whole, strict=True):
        assert found.shape == (len(some), 1) and found.ravel().tolist() == expected[some].tolist()


def test_samples_far_apart_are_found_in_parts(monkeypatch):
    counts, samples = shares.counts_of([0.123, 0.877]), np.arange(300).reshape(30, 10) * 777
    whole = shares.of_samples(samples, counts, 3, True)
    monkeypatch.setattr(shares, "_PLACES_AT_ONCE", 1)
    assert all(np.array_equal(a, b) for a, b in zip(whole, shares.of_samples(samples, counts, 3, True), strict=True))


def test_patterns_differ_by_cycle_and_seed_and_in_order_all_are_one():
    counts = shares.counts_of([0.501, 0.499])
    cycles = np.array([0, 1, 2**32, 2**33 + 1])
    drawn = np.concatenate([shares.pattern(cycles, counts, seed, True) for seed in (0, 1)])
    assert (drawn.sum(axis=1) == 499).all()
    for i in range(8):
        for j in range(i):
            assert abs((drawn[i] == drawn[j]).mean() - 0.5) < 0.08
    assert np.array_equal(drawn[:4], shares.pattern(cycles, counts, 0, True))
    spread = shares.pattern(np.arange(3), np.array([3, 1, 2]), 5, False)
    assert spread.tolist() == [[0, 2, 0, 1, 2, 0]] * 3


def test_the_pattern_is_fixed():
    """What stands here is part of the law: a change of it would repeat and skip rows of runs that are resumed."""
    counts = np.array([7, 3])
    assert shares.pattern(np.arange(2), counts, 0, True).tolist() == [
        [1, 0, 0, 0, 1, 0, 0, 0, 0, 1],
        [0, 0, 0, 1, 0, 0, 0, 0, 1, 1],
    ]
    assert [shares.seed_of(5, d) for d in range(3)] == [5, 1090765562399520473, 579784312063952927]


def test_a_place_of_a_cycle_goes_to_each_dataset_by_its_share():
    found = shares.pattern(np.arange(4000), np.array([7, 3]), 11, True)
    assert np.abs(found.mean(axis=0) - 0.3).max() < 5 * (0.21 / 4000) ** 0.5
