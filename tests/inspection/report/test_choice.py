"""Which rows are shown."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from packprep.inspection.report.choice import FEWEST_ROWS, MOST_ROWS, chosen_rows, places, rows_with_tasks


@given(st.integers(0, 500), st.integers(1, 60))
def test_places_ascend_and_are_even(count, most):
    found = places(count, most).tolist()
    assert found == sorted(set(found)) and len(found) == min(count, most)
    assert all(0 <= place < count for place in found)


@given(
    st.lists(st.tuples(st.integers(0, 80), st.integers(0, 30)), min_size=1),
    st.sampled_from([8, 2048, 1 << 16, 1 << 20]),
)
def test_every_task_has_a_row(segments, length):
    row, task = (np.array(column) for column in zip(*sorted(segments), strict=True))
    by_task, best, most = rows_with_tasks(row, task, 100)
    assert most == max(len({t for r, t in segments if r == one}) for one, _ in segments)
    chosen = chosen_rows([range(100, 181)], [by_task], best, length)
    assert chosen == sorted(set(chosen)) and best in chosen and set(chosen) <= set(range(100, 181))
    shown = {t for r, t in segments if r + 100 in chosen}
    assert shown == {t for _, t in segments}
    assert len(chosen) <= max(MOST_ROWS, len(shown) + 1) and len(chosen) >= FEWEST_ROWS - 1


def test_a_small_dataset_is_shown_whole():
    assert chosen_rows([range(3), range(3, 5)], [], -1, 2048) == [0, 1, 2, 3, 4]
    assert chosen_rows([], [], -1, 2048) == []
