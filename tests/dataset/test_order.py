import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep.dataset import order


@pytest.mark.parametrize("sizes", [range(1, 300), range(300, 5001, 131), [255, 256, 257, 4095, 4096, 4097, 5000]])
def test_an_epochs_order_is_a_bijection(sizes):  # of every size to 5000: in tests/test_randomness.py
    for n in sizes:
        rows = order.permutation(n, 3, n, np.arange(n))
        assert rows.dtype == np.int64
        assert np.array_equal(np.bincount(rows, minlength=n), np.ones(n, np.int64)), n


def test_an_order_of_four_billion_rows_is_without_repeats_and_goes_everywhere():
    n = 4 * 10**9
    places = np.concatenate([np.arange(30_000), n - 1 - np.arange(30_000), np.arange(1, 30_000) * 133_331])
    rows = order.permutation(7, 1, n, np.unique(places))
    assert len(np.unique(rows)) == len(rows) and rows.min() >= 0 and rows.max() < n
    assert np.bincount(rows // (n // 100), minlength=100).min() > len(rows) / 200


def test_samples_of_many_epochs_at_once_are_those_of_each():
    samples = np.arange(200).reshape(20, 10)
    whole = order.rows_of_samples(samples, 7, 5, True)
    assert whole.ravel().tolist() == [int(order.rows_of_samples(np.array([g]), 7, 5, True)[0]) for g in range(200)]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_any_seed_and_epoch_give_a_bijection(n, seed, epoch):
    assert len(np.unique(order.permutation(seed, epoch, n, np.arange(n)))) == n


def test_the_order_is_fixed_by_its_seed_and_epoch():
    assert order.permutation(0, 0, 10, np.arange(10)).tolist() == [4, 7, 9, 1, 6, 2, 5, 8, 3, 0]
    other_epoch, other_seed = (order.permutation(s, e, 1000, np.arange(1000)) for s, e in ((0, 1), (1, 0)))
    here = order.permutation(0, 0, 1000, np.arange(1000))
    assert (here == other_epoch).mean() < 0.02 and (here == other_seed).mean() < 0.02


def test_a_place_is_found_without_the_others():
    whole = order.permutation(5, 2, 10**12, np.arange(4))
    assert [int(order.permutation(5, 2, 10**12, np.array([i]))[0]) for i in range(4)] == whole.tolist()


@given(st.integers(1, 30), st.integers(0, 100), st.integers(1, 7), st.integers(1, 5), st.integers(0, 9), st.booleans())
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


@given(st.integers(0, 50), st.integers(0, 20), st.integers(0, 4), st.integers(1, 7), st.integers(1, 5))
def test_steps_until_the_end_cover_it_and_no_step_is_empty_on_all_ranks(rows, n, epochs, batch_size, world_size):
    steps = order.n_steps(rows, epochs * n, batch_size, world_size)
    left = max(0, epochs * n - rows)
    assert (steps - 1) * batch_size * world_size < left <= steps * batch_size * world_size or steps == left == 0
