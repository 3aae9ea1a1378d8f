import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packprep.building.packing import assign, pack, pack_sides, placement
from packprep.building.segments import cut
from packprep.errors import RecipeError
from packprep.randomness import bits64, text_key
from tests import golden, made
from tests.properties import few_and_many
from tests.twin import chance, cutting, shard

BY_LENGTH = ("best_fit", "first_fit", "next_fit")


@st.composite
def loads(draw):
    """(lengths, capacity): few different lengths, or many; small rows, or rows that hold
    hundreds."""
    capacity = draw(st.integers(1, 40) | st.integers(41, 400) | st.sampled_from([64, 128, 256]))
    top = draw(st.integers(1, capacity))
    some = draw(st.lists(st.integers(1, top), min_size=1, max_size=6))
    one = st.sampled_from(some) if draw(st.booleans()) else st.integers(1, top)
    return draw(st.lists(one, max_size=150)), capacity


@few_and_many(
    150, 600, loads(), st.sampled_from(BY_LENGTH), st.sampled_from([0, 1, 2, 3, 7, 65535])
)
def test_pack_equals_its_twin(load, algorithm, max_segments):
    lengths, capacity = load
    row, offset = pack(np.array(lengths, np.int64), capacity, algorithm, max_segments)
    assert row.dtype == offset.dtype == np.int64
    assert (row.tolist(), offset.tolist()) == cutting.pack(
        lengths, capacity, algorithm, max_segments
    )


@pytest.mark.parametrize("algorithm", BY_LENGTH)
@pytest.mark.parametrize("capacity", [1000, 1024, 1025])
def test_pack_equals_its_twin_on_a_thousand_ordinary_lengths(algorithm, capacity):
    lengths = lognormal(1500, 3, capacity, mean=capacity / 4)
    row, offset = pack(lengths, capacity, algorithm)
    assert (row.tolist(), offset.tolist()) == cutting.pack(lengths.tolist(), capacity, algorithm)


@st.composite
def loads_of_two_sides(draw):
    """(inputs, targets, room of each): as of one task, or any."""
    room = (
        draw(st.integers(1, 30) | st.sampled_from([64, 127, 128])),
        draw(st.integers(1, 30) | st.just(200)),
    )
    one = st.tuples(*(st.integers(1, draw(st.integers(1, side))) for side in room))
    some = draw(st.lists(one, max_size=120))
    return [a for a, _ in some], [b for _, b in some], room


@few_and_many(150, 600, loads_of_two_sides(), st.sampled_from([1, 2, 7, 65535]))
def test_packing_of_two_sides_equals_its_twin_and_fits(load, max_segments):
    inputs, targets, room = load
    row = pack_sides(np.array(inputs, np.int64), np.array(targets, np.int64), room, max_segments)
    assert row.dtype == np.int64 and row.tolist() == cutting.pack_sides(
        inputs, targets, room, max_segments
    )
    for part, side in zip((inputs, targets), room, strict=True):
        assert (np.bincount(row, part) <= side).all()
    assert (np.bincount(row) <= max_segments).all() and set(row.tolist()) == set(
        range(max(row, default=-1) + 1)
    )


def lognormal(count, seed, most, mean=600, sigma=1.0):
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(drawn.astype(np.int64), 1, most)


@pytest.mark.parametrize("id, inputs, expected", golden.cases("pack_documents"))
def test_next_fit_is_the_golden_file_s(id, inputs, expected):
    if "error" in expected:
        with pytest.raises(
            RecipeError, match="segment 1 has length 9, but a row fits lengths 1 … 8"
        ):
            pack(np.array(inputs["lengths"]), inputs["max_length"], "next_fit")
        return
    row, _ = pack(
        np.array(inputs["lengths"]), inputs["max_length"], "next_fit", inputs["max_segments"] or 0
    )
    assert row.tolist() == [
        r for r, (begin, end) in enumerate(expected["ranges"]) for _ in range(begin, end)
    ]
    assert np.bincount(row, inputs["lengths"]).tolist() == expected["fill"]


@given(loads(), st.sampled_from([0, 1, 3]))
def test_what_is_assigned_is_where_the_documents_are_put(load, max_segments):
    lengths, capacity = load
    row, offset = pack(np.array(lengths, np.int64), capacity, "best_fit", max_segments)
    expected = []
    for first, step, rows, each, fill in assign(
        np.bincount(lengths, minlength=capacity + 1), capacity, max_segments
    ).tolist():
        for r in range(rows):
            expected += [(first + r * step, fill, k) for k in range(each)]
    order = np.argsort(-np.array(lengths, np.int64), kind="stable")
    found = [(int(row[i]), int(offset[i]), lengths[i]) for i in order]
    assert found == [
        (r, fill + k * n, n) for (r, fill, k), (_, _, n) in zip(expected, found, strict=True)
    ]


def test_pack_takes_lists_and_the_contract_s_example():
    row, offset = pack([5, 3, 4, 6, 2], 8, "next_fit")
    assert row.tolist() == [0, 0, 1, 2, 2] and offset.tolist() == [0, 5, 0, 0, 6]
    assert [column.tolist() for column in pack([], 8, "best_fit")] == [[], []]


def test_fault_21_a_length_that_no_row_holds_is_refused_and_never_skipped():
    for algorithm in BY_LENGTH:
        for bad in (0, -1, 9):
            with pytest.raises(
                RecipeError, match=f"segment 1 has length {bad}, but a row fits lengths 1 … 8"
            ):
                pack([3, bad, 2], 8, algorithm)
    with pytest.raises(RecipeError, match="use best_fit, first_fit or next_fit"):
        pack([3], 8, "concat")


def check_valid(lengths, capacity, row, offset, max_segments=0):
    """Every segment lies in one row, none overlap, no row is over full, rows are numbered without
    gaps and contiguous."""
    order = np.lexsort((offset, row))
    ends = offset[order] + lengths[order]
    same_row = row[order][1:] == row[order][:-1]
    assert (offset[order][1:][same_row] == ends[:-1][same_row]).all() and (
        offset[order][1:][~same_row] == 0
    ).all()
    assert offset[order][0] == 0 and ends.max() <= capacity
    assert np.array_equal(np.unique(row), np.arange(row.max() + 1))
    assert not max_segments or np.bincount(row).max() <= max_segments


def utilisation(lengths, capacity, row):
    """Without the row that is filled least."""
    fill = np.bincount(row, lengths)
    return (fill.sum() - fill.min()) / (capacity * max(1, len(fill) - 1))


@pytest.mark.parametrize(
    "algorithm, least", [("best_fit", 0.9999), ("first_fit", 0.98), ("next_fit", 0.9)]
)
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
def test_ordinary_documents_under_ul2r_fill_best_fit_rows_to_999_thousandths_and_none_is_cut_short(
    seq_length,
):
    slots_wanted = 40_000_000 if seq_length == 65_544 else 6_000_000
    recipe, tasks = made.mix(
        {"seq_length": seq_length, "tasks": [{"preset": "ul2r"}]}, made.ids(12_000)
    )
    sizes = lognormal(slots_wanted // 680, seq_length, 1 << 20)
    documents = made.documents(sizes)
    segments, lost = cut(recipe, tasks, documents)
    used = np.bincount(segments.document, segments.tokens, len(sizes))
    # fault 18: nothing is truncated
    assert not lost.untrained.any() and np.array_equal(used, sizes)
    slots = segments.slots
    assert slots.sum() > slots_wanted * 0.9 and 500 < sizes.mean() < 700
    row, offset = pack(slots, seq_length, "best_fit", 65535)
    check_valid(slots, seq_length, row, offset)
    assert utilisation(slots, seq_length, row) >= 0.999


# The order of rows, and of segments in a row


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(0, 2**32))
def test_rows_and_segments_are_put_in_keyed_order(drawn, seed):
    rows = np.unique(drawn, return_inverse=True)[1]
    keys = np.array([text_key(seed, i) for i in range(len(rows))], np.uint64)
    physical = np.arange(1, len(rows) + 1)
    for algorithm in ("best_fit", "next_fit"):
        row = np.sort(rows) if algorithm == "next_fit" else rows
        order, placed, begin = placement(keys, physical, row, algorithm == "next_fit")
        expected = shard.ordered_rows(row.tolist(), keys.tolist(), algorithm)
        assert order.tolist() == [i for members in expected for i in members]
        assert placed.tolist() == [r for r, members in enumerate(expected) for _ in members]
        begins = [
            int(physical[members[:k]].sum()) for members in expected for k in range(len(members))
        ]
        assert begin.tolist() == begins


def test_equal_keys_keep_the_table_s_order():
    order, *_ = placement(
        np.full(6, 9, np.uint64), np.ones(6, np.int64), np.array([0, 1, 0, 2, 1, 2]), False
    )
    assert order.tolist() == [0, 2, 1, 4, 3, 5]


def test_the_twins_know_every_purpose_that_the_order_uses():
    from packprep import randomness

    assert (chance.SEGMENT_ORDER, chance.ROW_ORDER) == (
        randomness.SEGMENT_ORDER,
        randomness.ROW_ORDER,
    )


@pytest.mark.parametrize("most", [24, 25, 300, 65_535])
def test_long_rows_are_sorted_by_their_draws(most):
    row = np.repeat(np.arange(3), [1, most, 5])
    keys = bits64(np.uint64(8), 0, np.arange(len(row)))
    keys[50:60] = keys[2]  # ties, where the row is that long
    order, placed, begin = placement(keys, np.ones(len(row), np.int64), row, False)
    draws = bits64(keys, chance.SEGMENT_ORDER)
    by_draw = np.lexsort((np.arange(len(row)), draws, row))
    lengths = np.bincount(placed)
    assert sorted(lengths.tolist()) == sorted([1, most, 5]) and begin.tolist() == [
        i for n in lengths for i in range(n)
    ]
    for r in range(3):
        mine = order[placed == r]
        assert mine.tolist() == by_draw[row[by_draw] == row[mine[0]]].tolist()
