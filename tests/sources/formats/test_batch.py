"""packprep.sources.formats.batch: sizes of texts, batches and chosen documents."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packprep.sources.formats import batch
from packprep.sources.formats.batch import (
    MAX_DETAIL,
    BatchBuilder,
    Choice,
    Slice,
    large_text,
    slices,
)

SIZES = st.lists(st.integers(0, 5000), max_size=60)


@given(st.text(st.sampled_from("aé水😀"), max_size=40))
def test_a_text_is_too_large_by_its_bytes_whatever_its_characters_take(text):
    with mock.patch.object(batch, "MAX_DOCUMENT_BYTES", 60):
        size = len(text.encode())
        said = f"{size} bytes; at most 60 bytes"
        assert large_text(text) == (("too_large", said) if size > 60 else None)


@given(SIZES, st.integers(1, 3000))
def test_slices_are_as_long_as_a_limit_allows_and_a_longer_document_is_alone(sizes, limit):
    found = list(slices(np.array(sizes, np.int64), limit))
    assert [i for part in found for i in range(part.start, part.stop)] == list(range(len(sizes)))
    for part in found:
        own = sizes[part]
        assert len(own) == 1 or sum(own) <= limit
        assert part.stop == len(sizes) or sum(own) + sizes[part.stop] > limit


@given(SIZES, st.integers(100, 3000), st.integers(1, 7))
def test_a_batch_is_complete_with_the_document_that_reaches_its_bytes(sizes, limit, step):
    """A document counts as 64 bytes at least."""
    builder, found = BatchBuilder(file=3), []
    for begin in range(0, len(sizes), step):
        own = np.arange(begin, min(begin + step, len(sizes)))
        texts = [str(i) for i in own]
        found += builder.extend(10 * own, texts, np.array(sizes, np.int64)[own], limit)
    unfinished = len(found)
    found += builder.take()
    assert [int(text) for each in found for text in each.texts] == list(range(len(sizes)))
    counted = [max(size, 64) for size in sizes]
    for number, each in enumerate(found):
        assert each.files.tolist() == [3] * len(each.texts)
        assert each.positions.tolist() == [10 * int(text) for text in each.texts]
        own = [counted[int(text)] for text in each.texts]
        assert sum(own[:-1]) < limit and (sum(own) >= limit) == (number < unfinished)


@pytest.mark.long
def test_rejects_count_as_bytes_of_a_batch_and_their_details_are_cut():
    builder = BatchBuilder(file=0)
    assert list(builder.take()) == []
    for i in range(3):
        builder.reject(i, "malformed_json", "x" * 1000)
    assert builder.bytes == 3 * MAX_DETAIL
    (only,) = builder.take()
    assert [len(reject.detail) for reject in only.rejects] == [MAX_DETAIL] * 3
    assert builder.bytes == 0 and list(builder.take()) == []


@given(st.integers(1, 9), st.integers(0, 30))
def test_work_ranges_next_to_each_other_share_no_unit_and_leave_none_out(weight, units):
    parts = [Slice("a", 0, 9, "jsonl", "", 0, i, i + 1, weight, 1) for i in range(weight)]
    found = [i for part in parts for i in range(*part.range(units))]
    assert found == list(range(units))


@pytest.mark.parametrize("fraction", [1 << 30, 3 << 30, 12345])
def test_a_choice_takes_the_fraction_of_each_size_class_however_it_is_called(fraction):
    sizes = np.random.default_rng(0).integers(0, 3000, 4000)
    positions = np.arange(len(sizes))
    taken = Choice(np.uint64(5), fraction)(0, positions, sizes)
    for low in (0, *(1 << k for k in range(12))):
        own = taken[(low <= sizes) & (sizes < max(1, 2 * low))]
        assert abs(own.sum() - len(own) * fraction / 2**32) < 1
    of_parts = Choice(np.uint64(5), fraction)
    found = [of_parts(0, positions[i : i + 7], sizes[i : i + 7]) for i in range(0, 4000, 7)]
    assert np.array_equal(np.concatenate(found), taken)
    only = Choice(np.uint64(5), fraction, lambda file, positions: positions % 3 == file)
    some = only(1, positions, sizes)
    assert not some[positions % 3 != 1].any()
    assert np.array_equal(
        some[1::3], Choice(np.uint64(5), fraction)(0, positions[1::3], sizes[1::3])
    )


@pytest.mark.long
def test_over_many_keys_the_first_document_is_taken_as_often_as_any_other():
    sizes = np.full(8, 100)
    found = [Choice(np.uint64(k), 1 << 30)(0, np.arange(8), sizes) for k in range(2000)]
    assert np.abs(np.mean(found, axis=0) - 0.25).max() < 0.04
