import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep.building.packing import ALGORITHMS, assigned, pack
from packprep.building.segments import cut, slots_of
from packprep.errors import RecipeError
from packprep.twin import packing
from tests import golden, made

BY_LENGTH = ("best_fit", "first_fit", "next_fit")


@st.composite
def loads(draw):
    """(lengths, capacity): few different lengths, or many; small rows, or rows that hold hundreds."""
    capacity = draw(st.integers(1, 40) | st.integers(41, 400) | st.sampled_from([64, 128, 256]))
    top = draw(st.integers(1, capacity))
    some = draw(st.lists(st.integers(1, top), min_size=1, max_size=6))
    one = st.sampled_from(some) if draw(st.booleans()) else st.integers(1, top)
    return draw(st.lists(one, max_size=150)), capacity


@given(loads(), st.sampled_from(BY_LENGTH), st.sampled_from([0, 1, 2, 3, 7, 65535]))
@settings(max_examples=600)
def test_pack_equals_its_twin(load, algorithm, max_segments):
    lengths, capacity = load
    row, offset = pack(np.array(lengths, np.int64), capacity, algorithm, max_segments)
    assert row.dtype == offset.dtype == np.int64
    assert (row.tolist(), offset.tolist()) == packing.pack(lengths, capacity, algorithm, max_segments)


@pytest.mark.parametrize("algorithm", BY_LENGTH)
@pytest.mark.parametrize("capacity", [1000, 1024, 1025])
def test_pack_equals_its_twin_on_a_thousand_ordinary_lengths(algorithm, capacity):
    lengths = lognormal(1500, 3, capacity, mean=capacity / 4)
    row, offset = pack(lengths, capacity, algorithm)
    assert (row.tolist(), offset.tolist()) == packing.pack(lengths.tolist(), capacity, algorithm)


def lognormal(count, seed, most, mean=600, sigma=1.0):
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(drawn.astype(np.int64), 1, most)


@pytest.mark.parametrize("id, inputs, expected", golden.cases("pack_documents"))
def test_next_fit_is_the_golden_file_s(id, inputs, expected):
    if "error" in expected:
        with pytest.raises(RecipeError, match="segment 1 has length 9: a row holds lengths 1 … 8"):
            pack(np.array(inputs["lengths"]), inputs["max_length"], "next_fit")
        return
    row, _ = pack(np.array(inputs["lengths"]), inputs["max_length"], "next_fit", inputs["max_segments"] or 0)
    assert row.tolist() == [r for r, (begin, end) in enumerate(expected["ranges"]) for _ in range(begin, end)]
    assert np.bincount(row, inputs["lengths"]).tolist() == expected["fill"]


@given(loads(), st.sampled_from([0, 1, 3]))
def test_what_is_assigned_is_where_the_documents_are_put(load, max_segments):
    lengths, capacity = load
    row, offset = pack(np.array(lengths, np.int64), capacity, "best_fit", max_segments)
    expected = []
    for first, step, rows, each, fill in assigned(lengths, capacity, max_segments).tolist():
        for r in range(rows):
            expected += [(first + r * step, fill, k) for k in range(each)]
    order = np.argsort(-np.array(lengths, np.int64), kind="stable")
    found = [(int(row[i]), int(offset[i]), lengths[i]) for i in order]
    assert found == [(r, fill + k * n, n) for (r, fill, k), (_, _, n) in zip(expected, found, strict=True)]


def test_pack_takes_lists_and_the_contract_s_example():
    row, offset = pack([5, 3, 4, 6, 2], 8, "next_fit")
    assert row.tolist() == [0, 0, 1, 2, 2] and offset.tolist() == [0, 5, 0, 0, 6]
    assert [column.tolist() for column in pack([], 8, "best_fit")] == [[], []]


def test_fault_21_a_length_that_no_row_holds_is_refused_and_never_skipped():
    for algorithm in BY_LENGTH:
        for bad in (0, -1, 9):
            with pytest.raises(RecipeError, match=f"segment 1 has length {bad}: a row holds lengths 1 … 8"):
                pack([3, bad, 2], 8, algorithm)
    with pytest.raises(RecipeError, match="one of best_fit, first_fit, next_fit"):
        pack([3], 8, "concat")
    assert (*BY_LENGTH, "concat") == ALGORITHMS


def check_valid(lengths, capacity, row, offset, max_segments=0):
    """Every segment lies in one row, none overlap, no row is over full, rows are numbered without gaps and contiguous."""
    order = np.lexsort((offset, row))
    ends = offset[order] + lengths[order]
    same_row = row[order][1:] == row[order][:-1]
    assert (offset[order][1:][same_row] == ends[:-1][same_row]).all() and (offset[order][1:][~same_row] == 0).all()
    assert offset[order][0] == 0 and ends.max() <= capacity
    assert np.array_equal(np.unique(row), np.arange(row.max() + 1))
    assert not max_segments or np.bincount(row).max() <= max_segments


def utilisation(lengths, capacity, row):
    """Without the row that is filled least."""
    fill = np.bincount(row, lengths)
    return (fill.sum() - fill.min()) / (capacity * max(1, len(fill) - 1))


@pytest.mark.parametrize("algorithm, least", [("best_fit", 0.9999), ("first_fit", 0.98), ("next_fit", 0.9)])
@pytest.mark.parametrize("capacity", [8191, 8192, 8193, 16384, 16385, 24577])
def test_fault_19_rows_beyond_a_power_of_two_are_packed_as_well(capacity, algorithm, least):
    lengths = lognormal(60_000, capacity, capacity)
    row, offset = pack(lengths, capacity, algorithm)
    check_valid(lengths, capacity, row, offset)
    assert utilisation(lengths, capacity, row) > least


@pytest.mark.parametrize("algorithm", BY_LENGTH)
def test_fault_10_a_row_never_has_more_segments_than_asked_for_and_none_is_dropped(algorithm):
    lengths = np.ones(200_000, np.int64)
    row, offset = pack(lengths, 1 << 20, algorithm, 65535)
    check_valid(lengths, 1 << 20, row, offset, 65535)
    assert np.bincount(row).tolist() == [65535] * 3 + [200_000 - 3 * 65535]


@pytest.mark.parametrize("seq_length", [2048, 4096, 65_544])
def test_ordinary_documents_under_ul2r_fill_best_fit_rows_to_999_thousandths_and_none_is_cut_short(seq_length):
    slots_wanted = 40_000_000 if seq_length == 65_544 else 6_000_000
    recipe, tasks = made.mix({"seq_length": seq_length, "tasks": [{"preset": "ul2r"}]}, made.ids(12_000))
    sizes = lognormal(slots_wanted // 680, seq_length, 1 << 20)
    documents = made.documents(sizes)
    segments, untrained = cut(recipe, tasks, documents)
    used = np.bincount(segments.document, segments.n, len(sizes))
    assert not untrained.any() and np.array_equal(used, sizes)  # fault 18: nothing is truncated
    slots = slots_of(tasks, segments)
    assert slots.sum() > slots_wanted * 0.9 and 500 < sizes.mean() < 700
    row, offset = pack(slots, seq_length, "best_fit", 65535)
    check_valid(slots, seq_length, row, offset)
    assert utilisation(slots, seq_length, row) >= 0.999
