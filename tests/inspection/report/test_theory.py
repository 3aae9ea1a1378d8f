"""Expected histograms against all compositions, rotations and pivots that there are."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packprep.inspection.report.theory import (
    corrupted_shares,
    counts_of,
    expected_runs,
    expected_spans,
    part_shares,
    pivot_bins,
)


def compositions(n, parts):
    for cuts in combinations(range(1, n), parts - 1):
        yield [b - a for a, b in zip((0, *cuts), (*cuts, n), strict=True)]


@given(st.integers(1, 3000).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))))
def test_shares_of_parts_sum_to_one_and_have_the_right_mean(case):
    n, parts = case
    shares = part_shares(n, parts)
    assert len(shares) == n + 1 and (shares >= 0).all()
    assert shares.sum() == pytest.approx(1, abs=1e-9)
    assert np.arange(n + 1) @ shares == pytest.approx(n / parts)


@pytest.mark.parametrize("n, parts", [(1, 1), (2, 1), (2, 2), (5, 2), (7, 3), (9, 9), (10, 4)])
def test_shares_of_parts_are_those_of_all_compositions(n, parts):
    every = [length for one in compositions(n, parts) for length in one]
    assert part_shares(n, parts) == pytest.approx(np.bincount(every, minlength=n + 1) / len(every))


@pytest.mark.parametrize("n, n_noise, n_spans", [(4, 2, 1), (5, 2, 2), (8, 4, 2), (9, 5, 3)])
def test_runs_under_a_roll_are_those_of_all_masks(n, n_noise, n_spans):
    counts, masks = np.zeros(n_noise + 1), 0
    for text, noise in product(compositions(n - n_noise, n_spans), compositions(n_noise, n_spans)):
        mask = [flag for a, b in zip(text, noise, strict=True) for flag in [0] * a + [1] * b]
        for offset in range(n):
            rolled = mask[offset:] + mask[:offset]
            for run in "".join(map(str, rolled)).split("0"):
                counts[len(run)] += bool(run)
            masks += 1
    assert expected_runs(n, n_noise, n_spans, True) == pytest.approx(counts / masks)


def test_the_sum_over_segments_has_all_their_noise():
    parameters = {"noise_density": 0.5, "mean_span_length": 3.0, "random_roll": True, "too_many_spans": "lower"}
    task, segments = {"parameters": parameters}, {3: 2, 50: 7, 400: 1, 5000: 3}
    expected = expected_spans(task, 100, segments)
    noise = sum(count * counts_of(parameters, 100, n)[0] for n, count in segments.items())
    assert np.arange(len(expected)) @ expected == pytest.approx(noise)


@given(st.lists(st.integers(2, 500), min_size=1, max_size=5), st.integers(1, 30))
def test_pivots_are_uniform(lengths, bins):
    expected = np.zeros(bins)
    for n in lengths:
        for pivot in range(1, n):
            expected[pivot * bins // n] += 1 / (n - 1)
    assert pivot_bins(np.array(lengths), bins) == pytest.approx(expected)


def test_shares_of_corrupted_candidates():
    masked = {"objective": "masked_diffusion", "parameters": {"exact_count": False, "epsilon": 0.1}}
    level, many = np.array([0.0, 0.5, 1.0], np.float32), np.array([10, 10, 10])
    assert corrupted_shares(masked, level, many) == pytest.approx([0.1, 0.55, 1.0])
    exact = {"objective": "masked_diffusion", "parameters": {"exact_count": True}}
    assert corrupted_shares(exact, level, np.array([10, 5, 0])) == pytest.approx([0.1, 0.4, 0.0])
    assert corrupted_shares({"objective": "block_diffusion", "parameters": {}}, level, many) == pytest.approx(level)
