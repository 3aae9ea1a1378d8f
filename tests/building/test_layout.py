import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packprep.building.layout import arrange
from packprep.randomness import bits64, text_key
from packprep.twin import chance
from packprep.twin import rows as twin_rows


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(0, 2**32))
def test_rows_and_segments_are_put_in_keyed_order(drawn, seed):
    rows = np.unique(drawn, return_inverse=True)[1]
    keys = np.array([text_key(seed, i) for i in range(len(rows))], np.uint64)
    physical = np.arange(1, len(rows) + 1)
    for algorithm in ("best_fit", "next_fit"):
        row = np.sort(rows) if algorithm == "next_fit" else rows
        layout = arrange(keys, physical, row, algorithm == "next_fit")
        expected = twin_rows.ordered_rows(row.tolist(), keys.tolist(), algorithm)
        assert layout.order.tolist() == [i for members in expected for i in members]
        assert layout.row.tolist() == [r for r, members in enumerate(expected) for _ in members]
        begins = [int(physical[members[:k]].sum()) for members in expected for k in range(len(members))]
        assert layout.begin.tolist() == begins and layout.rows == len(expected)


def test_equal_keys_keep_the_table_s_order():
    layout = arrange(np.full(6, 9, np.uint64), np.ones(6, np.int64), np.array([0, 1, 0, 2, 1, 2]), False)
    assert layout.order.tolist() == [0, 2, 1, 4, 3, 5]


def test_the_twins_know_every_purpose_that_the_order_uses():
    from packprep import randomness

    assert (chance.SEGMENT_ORDER, chance.ROW_ORDER) == (randomness.SEGMENT_ORDER, randomness.ROW_ORDER)


@pytest.mark.parametrize("most", [24, 25, 300, 65_535])
def test_long_rows_are_sorted_by_their_draws(most):
    row = np.repeat(np.arange(3), [1, most, 5])
    keys = bits64(np.uint64(8), 0, np.arange(len(row)))
    keys[50:60] = keys[2]  # ties, where the row is that long
    layout = arrange(keys, np.ones(len(row), np.int64), row, False)
    draws = bits64(keys, chance.SEGMENT_ORDER)
    by_draw = np.lexsort((np.arange(len(row)), draws, row))
    lengths = np.bincount(layout.row)
    assert sorted(lengths.tolist()) == sorted([1, most, 5]) and layout.begin.tolist() == [
        i for n in lengths for i in range(n)
    ]
    for r in range(3):
        mine = layout.order[layout.row == r]
        assert mine.tolist() == by_draw[row[by_draw] == row[mine[0]]].tolist()
