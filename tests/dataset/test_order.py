import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep.dataset import order
from packprep.errors import ArgumentError

many_shares = st.one_of(
    st.lists(kind, min_size=1, max_size=5) for kind in (st.integers(1, 50), st.floats(0.01, 1))
)
seeds = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize(
    "sizes", [range(1, 300), range(300, 5001, 131), [255, 256, 257, 4095, 4096, 4097, 5000]]
)
def test_an_epochs_order_is_a_bijection(
    sizes,
):  # of every size to 5000: in tests/test_randomness.py
    for n in sizes:
        rows = order.permutation(n, 3, n, np.arange(n))
        assert rows.dtype == np.int64
        assert np.array_equal(np.bincount(rows, minlength=n), np.ones(n, np.int64)), n


def test_an_order_of_four_billion_rows_is_without_repeats_and_goes_everywhere():
    n = 4 * 10**9
    places = np.concatenate(
        [np.arange(30_000), n - 1 - np.arange(30_000), np.arange(1, 30_000) * 133_331]
    )
    rows = order.permutation(7, 1, n, np.unique(places))
    assert len(np.unique(rows)) == len(rows) and rows.min() >= 0 and rows.max() < n
    assert np.bincount(rows // (n // 100), minlength=100).min() > len(rows) / 200


def test_samples_of_many_epochs_at_once_are_those_of_each():
    samples = np.arange(200).reshape(20, 10)
    whole = order.rows_of_samples(samples, 7, 5, True)
    assert whole.ravel().tolist() == [
        int(order.rows_of_samples(np.array([g]), 7, 5, True)[0]) for g in range(200)
    ]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_any_seed_and_epoch_give_a_bijection(n, seed, epoch):
    assert len(np.unique(order.permutation(seed, epoch, n, np.arange(n)))) == n


def test_the_order_is_fixed_by_its_seed_and_epoch():
    assert order.permutation(0, 0, 10, np.arange(10)).tolist() == [4, 7, 9, 1, 6, 2, 5, 8, 3, 0]
    other_epoch, other_seed = (
        order.permutation(s, e, 1000, np.arange(1000)) for s, e in ((0, 1), (1, 0))
    )
    here = order.permutation(0, 0, 1000, np.arange(1000))
    assert (here == other_epoch).mean() < 0.02 and (here == other_seed).mean() < 0.02


def test_a_place_is_found_without_the_others():
    whole = order.permutation(5, 2, 10**12, np.arange(4))
    assert [
        int(order.permutation(5, 2, 10**12, np.array([i]))[0]) for i in range(4)
    ] == whole.tolist()


@given(
    st.integers(1, 30),
    st.integers(0, 100),
    st.integers(1, 7),
    st.integers(1, 5),
    st.integers(0, 9),
    st.booleans(),
)
def test_samples_follow_the_formula(n, rows, batch_size, world_size, step, shuffle):
    for rank in range(world_size):
        samples = np.array(order.samples_of_step(rows, step, batch_size, rank, world_size))
        assert samples.tolist() == [
            rows + step * batch_size * world_size + rank * batch_size + j for j in range(batch_size)
        ]
        got = order.rows_of_samples(samples, n, 11, shuffle)
        for g, row in zip(samples.tolist(), got.tolist(), strict=True):
            at = np.array([g % n])
            assert row == (int(order.permutation(11, g // n, n, at)[0]) if shuffle else g % n)


@given(
    st.integers(0, 50), st.integers(0, 20), st.integers(0, 4), st.integers(1, 7), st.integers(1, 5)
)
def test_steps_until_the_end_cover_it_and_no_step_is_empty_on_all_ranks(
    rows, n, epochs, batch_size, world_size
):
    steps = order.n_steps(rows, epochs * n, batch_size, world_size)
    left = max(0, epochs * n - rows)
    assert (
        steps - 1
    ) * batch_size * world_size < left <= steps * batch_size * world_size or steps == left == 0


@pytest.mark.long
def test_only_truth_values_and_0_and_1_are_true_or_false():
    for value in (True, False, 0, 1, np.True_, np.False_):
        assert order.true_or_false("shuffle", value) is bool(value)
    for value in (2, -1, 0.0, 1.0, "false", None, [True], np.int64(1)):
        with pytest.raises(ArgumentError, match="shuffle is .* should be True or False"):
            order.true_or_false("shuffle", value)


# Several datasets


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
    assert order.counts_of(given).tolist() == counts


@given(st.lists(st.floats(0.05, 1), min_size=1, max_size=30))
def test_counts_are_the_shares_to_a_thousandth(given):
    counts, exact = order.counts_of(given), np.array(given) / sum(given)
    assert (
        1 <= counts.sum() <= 1000
        and (np.abs(counts / counts.sum() - exact) < 1 / 1000 + 1e-9).all()
    )


@pytest.mark.parametrize("bad", [0, -0.1, float("nan"), float("inf"), "0.5", None, True])
def test_a_share_that_is_no_number_above_0_is_refused(bad):
    with pytest.raises(ArgumentError, match=r"shares\[1\]"):
        order.counts_of([0.5, bad])


def test_a_share_that_rounds_to_nothing_is_refused():
    with pytest.raises(ArgumentError, match=r"shares\[0\] is 0.0001.*less than one sample in 1000"):
        order.counts_of([0.0001, 0.9999])


@settings(max_examples=60, deadline=None)
@given(many_shares, seeds, st.booleans(), st.integers(0, 2**50), st.integers(0, 2500))
def test_counts_in_closed_form_are_those_that_are_counted(given, seed, shuffle, begin, n):
    counts = order.counts_of(given)
    samples = np.arange(begin, begin + n)
    datasets, numbers = order.of_samples(samples, counts, seed, shuffle)
    before, after = (order.among_first(g, counts, seed, shuffle) for g in (begin, begin + n))
    assert before.sum() == begin and after.sum() == begin + n
    for d in range(len(counts)):
        assert numbers[datasets == d].tolist() == list(range(before[d], after[d]))
    whole = begin // counts.sum()
    assert (whole * counts <= before).all() and (before <= (whole + 1) * counts).all()


@settings(max_examples=40, deadline=None)
@given(many_shares, seeds, st.booleans(), st.data())
def test_any_sample_is_found_without_the_others(given, seed, shuffle, data):
    counts = order.counts_of(given)
    some = np.array(data.draw(st.lists(st.integers(0, 3000), min_size=1, max_size=12)))
    whole = order.of_samples(np.arange(3001), counts, seed, shuffle)
    for found, expected in zip(
        order.of_samples(some.reshape(-1, 1), counts, seed, shuffle), whole, strict=True
    ):
        assert found.shape == (len(some), 1) and found.ravel().tolist() == expected[some].tolist()


def test_samples_far_apart_are_found_in_parts(monkeypatch):
    counts, samples = order.counts_of([0.123, 0.877]), np.arange(300).reshape(30, 10) * 777
    whole = order.of_samples(samples, counts, 3, True)
    monkeypatch.setattr(order, "_PLACES_AT_ONCE", 1)
    assert all(
        np.array_equal(a, b)
        for a, b in zip(whole, order.of_samples(samples, counts, 3, True), strict=True)
    )


def test_patterns_differ_by_cycle_and_seed_and_in_order_all_are_one():
    counts = order.counts_of([0.501, 0.499])
    cycles = np.array([0, 1, 2**32, 2**33 + 1])
    drawn = np.concatenate([order.pattern(cycles, counts, seed, True) for seed in (0, 1)])
    assert (drawn.sum(axis=1) == 499).all()
    for i in range(8):
        for j in range(i):
            assert abs((drawn[i] == drawn[j]).mean() - 0.5) < 0.08
    assert np.array_equal(drawn[:4], order.pattern(cycles, counts, 0, True))
    spread = order.pattern(np.arange(3), np.array([3, 1, 2]), 5, False)
    assert spread.tolist() == [[0, 2, 0, 1, 2, 0]] * 3


def test_the_pattern_is_fixed():
    """What stands here is part of the law: a change of it would repeat and skip rows of runs that
    are resumed."""
    counts = np.array([7, 3])
    assert order.pattern(np.arange(2), counts, 0, True).tolist() == [
        [1, 0, 0, 0, 1, 0, 0, 0, 0, 1],
        [0, 0, 0, 1, 0, 0, 0, 0, 1, 1],
    ]
    assert [order.seed_of(5, d) for d in range(3)] == [5, 1090765562399520473, 579784312063952927]


def test_a_place_of_a_cycle_goes_to_each_dataset_by_its_share():
    found = order.pattern(np.arange(4000), np.array([7, 3]), 11, True)
    assert np.abs(found.mean(axis=0) - 0.3).max() < 5 * (0.21 / 4000) ** 0.5


# Shares that change


@st.composite
def schedules(draw):
    """A schedule of up to 9 datasets with points among the first 700 samples."""
    n = draw(st.integers(1, 9), "datasets")
    points = [0, *sorted(draw(st.sets(st.integers(1, 700), max_size=4), "points"))]
    number = st.one_of(st.integers(0, 9), st.floats(0, 1), st.sampled_from([0, 0.001, 1e-9]))
    shares = [
        (point, draw(st.lists(number, min_size=n, max_size=n).filter(any), "shares"))
        for point in points
    ]
    first = [max(numbers[d] for _, numbers in shares) for d in range(n)]
    shares[0] = (0, [a if b else 1 for a, b in zip(shares[0][1], first, strict=True)])
    return order.schedule_of(shares, n, draw(st.sampled_from(["step", "linear"])))


def integrals(schedule, samples):
    """Of each dataset over the first samples, by summing shares: that of a straight line is its
    middle's."""
    parts, ends = [], [*schedule.points[1:], samples]
    for m, (begin, end) in enumerate(zip(schedule.points, ends, strict=True)):
        end = min(end, samples)
        if end <= begin:
            break
        now, then = (
            [Fraction(w, sum(schedule.weights[i])) for w in schedule.weights[i]]
            for i in (m, min(m + 1, len(ends) - 1) if schedule.linear else m)
        )
        x = Fraction(end - begin, 2 * (ends[m] - begin)) if m + 1 < len(ends) else 0
        parts.append([(a + (b - a) * x) * (end - begin) for a, b in zip(now, then, strict=True)])
    return [sum(own) for own in zip(*parts, strict=True)]


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(schedules(), st.data())
def test_every_prefix_of_a_schedule_has_what_the_shares_integrals_say(schedule, data):
    n = len(schedule.weights[0])
    datasets, numbers = order.of_samples(np.arange(900), schedule, 0, True)
    height = (n - 1).bit_length()
    bound = max(1, Fraction(height, 2))  # 1 up to four datasets
    counted = np.cumsum(datasets[:, None] == np.arange(n), axis=0)
    for samples in {
        *data.draw(st.sets(st.integers(1, 900), max_size=40)),
        *schedule.points[1:],
        900,
    }:
        exact, counts = integrals(schedule, samples), counted[samples - 1].tolist()
        assert all(
            abs(count - integral) <= bound for count, integral in zip(counts, exact, strict=True)
        )
        assert order.among_first(samples, schedule, 0, True).tolist() == counts
    for d in range(n):
        assert numbers[datasets == d].tolist() == list(range(counted[-1, d]))
    some = np.array(data.draw(st.lists(st.integers(0, 899), min_size=1, max_size=9)))
    again = order.of_samples(some[:, None], schedule, 7, False)
    assert (
        again[0].ravel().tolist() == datasets[some].tolist()
        and again[1].ravel().tolist() == numbers[some].tolist()
    )
    d, most = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, 60))
    beyond, found = (
        np.flatnonzero((datasets == d) & (numbers == most)),
        order.first_beyond(d, most, schedule, 0, True),
    )
    assert found == beyond[0] if len(beyond) else found is None or found >= 900


def test_the_millionth_batch_of_a_schedule_over_four_billion_samples_takes_milliseconds():
    shares = [(0, [0.8, 0.2, 0, 0]), (10**9, [0.5, 0.2, 0.3, 0]), (4 * 10**9, [0.1, 0.2, 0.3, 0.4])]
    schedule = order.schedule_of(shares, 4, "linear")
    for sample in (4096 * 10**6, 4 * 10**9 - 16, 123_456_789):
        begun = time.perf_counter()
        datasets, numbers = order.of_samples(np.arange(sample, sample + 32), schedule, 0, True)
        assert time.perf_counter() - begun < 0.2  # 4 ms, on a machine that does nothing else
        before, after = (order.among_first(s, schedule, 0, True) for s in (sample, sample + 32))
        assert (
            np.array_equal(before + np.bincount(datasets, minlength=4), after)
            and before.sum() == sample
        )
        exact = [float(integral) for integral in integrals(schedule, sample)]
        assert np.abs(before - exact).max() <= 1


def test_shares_of_a_schedule_at_a_sample_are_between_its_points():
    given = [(0, [0.7, 0.3]), (100, [0.2, 0.8])]
    linear, step = (order.schedule_of(given, 2, how) for how in ("linear", "step"))
    assert linear.weights == ((7, 3), (1, 4))  # decimals mean what is written
    assert np.allclose([linear.shares(s)[0] for s in (0, 50, 100, 10**9)], [0.7, 0.45, 0.2, 0.2])
    assert np.allclose([step.shares(s)[0] for s in (0, 99, 100, 10**9)], [0.7, 0.7, 0.2, 0.2])


def test_the_order_of_a_schedule_is_fixed():
    """What stands here is part of the law: a change of it would repeat and skip rows of runs that
    are resumed."""
    schedule = order.schedule_of([(0, [0.7, 0.2, 0.1]), (20, [0, 0.5, 0.5])], 3, "linear")
    assert (
        "".join(map(str, order.of_samples(np.arange(40), schedule, 0, True)[0]))
        == "0100201201021201212112121212121212121212"
    )


@pytest.mark.parametrize(
    "shares, words",
    [
        ([(0, [1, 1]), (5, [1])], r"shares\[1\] has 1 numbers, but there are 2 datasets"),
        ([(5, [1, 1])], r"shares\[0\] is at sample 5 and should be at 0"),
        (
            [(0, [1, 1]), (0, [1, 2])],
            r"shares\[1\] is at sample 0 and should be at an integer above 0, the point before",
        ),
        ([(0, [1, 1]), (2.5, [1, 2])], r"sample 2.5"),
        ([(0, [1, -1])], r"shares\[0\]\[1\]\[1\] is -1 and should be a number of at least 0"),
        ([(0, [1, float("nan")])], r"\[1\] is nan"),
        ([(0, [1, "1"])], r"\[1\] is '1'"),
        ([(0, [1, 1]), (9, [0, 0])], r"shares\[1\] has no number above 0"),
        (
            [(0, [1, 0]), (9, [2, 0])],
            "dataset 1 has a share of 0 at every point\nhint: leave it out",
        ),
        (
            [(0, [1, 1]), 0.5],
            r"shares\[1\] is 0.5 and should be \(sample, \[a number for each dataset\]\)",
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(shares, words):
    with pytest.raises(ArgumentError, match=words):
        order.dealing_of(shares, ["a", "b"], None)


def test_interpolate_is_of_points():
    with pytest.raises(
        ArgumentError, match="interpolate is 'cubic' and should be 'step' or 'linear'"
    ):
        order.dealing_of([(0, [1])], ["a"], "cubic")
    with pytest.raises(ArgumentError, match="interpolate = 'step' requires shares by sample"):
        order.dealing_of([1], ["a"], "step")
