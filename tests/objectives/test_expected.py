"""What chance should give, which the report draws: against all compositions, rotations and pivots
that there are."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packprep.objectives.span_corruption import expected_runs, part_shares, span_counts
from tests import made


def expected_of(table, x, y):
    """What the one task of a table expects of some lengths and their numbers, or of some levels and
    their candidates."""
    task = made.mix({"tasks": [table]})[1][0]
    return task.objective.expected(task, np.array(x), np.array(y))


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
    table = {
        "objective": "span_corruption",
        "noise_density": 0.5,
        "random_roll": True,
        "too_many_spans": "lower",
    }
    segments = {3: 2, 50: 7, 400: 1, 5000: 3}
    expected = expected_of(table, list(segments), list(segments.values()))
    most = len(made.ids().sentinels) - 1
    noise = sum(count * span_counts(n, 0.5, 3.0, most)[0] for n, count in segments.items())
    assert np.arange(len(expected)) @ expected == pytest.approx(noise)


@given(st.lists(st.integers(2, 500), min_size=1, max_size=5))
def test_continuations_are_uniform(lengths):
    expected = np.zeros(max(lengths) + 1)
    for n in lengths:
        for pivot in range(1, n):
            expected[n - pivot] += 1 / (n - 1)
    assert expected_of({"objective": "prefix_lm"}, lengths, [1] * len(lengths)) == pytest.approx(
        expected
    )


def test_shares_of_corrupted_candidates():
    level, many = np.array([0.0, 0.5, 1.0], np.float32), [10, 10, 10]
    masked = {"objective": "masked_diffusion", "epsilon": 0.1}
    assert expected_of(masked, level, many) == pytest.approx([0.1, 0.55, 1.0])
    exact = {"objective": "masked_diffusion", "exact_count": True, "noise_range": [0.1, 1.0]}
    assert expected_of(exact, level, [10, 5, 0]) == pytest.approx([0.1, 0.4, 0.0])
    assert expected_of({"objective": "block_diffusion"}, level, many) == pytest.approx(level)
    flip = {"objective": "uniform_diffusion", "schedule": "flip", "noise_range": [0.0, 1.0]}
    assert expected_of(flip, level, many) == pytest.approx(level, abs=1e-3)
