"""packprep.dataset.skips: the samples that are left out, by brute force over single samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packprep.dataset.order import SAMPLES_END
from packprep.dataset.skips import Skips, skips_of_state, skips_of_steps
from packprep.errors import ArgumentError, StateError

STEPS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=5).map(
    lambda pairs: [(first, first + more) for first, more in pairs]
)


def left_out(skips: Skips) -> set[int]:
    return {sample for begin, end in skips.ranges for sample in range(begin, end)}


@given(STEPS, st.integers(1, 4))
def test_skipped_steps_are_ranges_of_samples_that_do_not_touch(steps, step_samples):
    skips = skips_of_steps(steps, step_samples)
    expected = {
        sample
        for first, last in steps
        for sample in range(first * step_samples, (last + 1) * step_samples)
    }
    assert left_out(skips) == expected
    bounds = [bound for pair in skips.ranges for bound in pair]
    assert bounds == sorted(set(bounds))
    assert skips_of_state({"skip": skips.stored()}) == skips


@given(STEPS)
def test_delivered_samples_are_those_of_the_order_without_the_skipped(steps):
    skips = skips_of_steps(steps, 1)
    kept = [sample for sample in range(60) if sample not in left_out(skips)]
    delivered = np.arange(len(kept)).reshape(1, -1)
    assert skips.of_delivered(delivered).tolist() == [kept]
    for sample in range(60):
        assert skips.n_delivered(sample) == sum(one < sample for one in kept)
    assert [skips.position(n) for n in range(len(kept))] == [0, *(one + 1 for one in kept[:-1])]


@given(STEPS, STEPS, st.integers(0, 30))
def test_ranges_join_unless_they_leave_out_what_was_delivered(own, others, rows):
    skips, more = skips_of_steps(own, 1), skips_of_steps(others, 1)
    delivered = set(skips.of_delivered(np.arange(rows)).tolist())
    if left_out(more) & delivered:
        with pytest.raises(StateError, match="already delivered some of them"):
            skips.joined(more, rows)
    else:
        joined = skips.joined(more, rows)
        assert left_out(joined) == left_out(skips) | left_out(more)
        assert joined == skips_of_steps([*own, *others], 1)


@pytest.mark.long
@pytest.mark.parametrize(
    "stored", [[[3, 3]], [[3, 2]], [[0, 2], [2, 3]], [[4, 5], [0, 1]], [[-1, 2]], [[0.0, 1]]]
)
def test_a_state_with_other_ranges_is_refused(stored):
    with pytest.raises(StateError, match="should be a list of ascending"):
        skips_of_state({"skip": stored})


def test_states_and_steps_reach_to_the_end_of_all_samples_and_not_beyond():
    assert skips_of_state({"skip": [[0, SAMPLES_END - 1]]}).ranges == ((0, SAMPLES_END - 1),)
    assert skips_of_state({}) == skips_of_state(None) == skips_of_steps(None, 3) == Skips()
    for stored in ([[0, SAMPLES_END]], [[True, 2]], [[0, 1, 2]], [3], {"0": 1}, "01"):
        with pytest.raises(StateError, match="should be a list of ascending"):
            skips_of_state({"skip": stored})
    for steps in ([(2, 1)], [(-1, 2)], [(0, SAMPLES_END // 3)], [(1,)], ["12"], "12", 7):
        with pytest.raises(ArgumentError, match=r"skip|the (first|last) step"):
            skips_of_steps(steps, 3)
