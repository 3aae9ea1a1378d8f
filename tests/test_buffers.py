import os

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from packprep.buffers import Buffers, Column


@given(st.lists(st.tuples(st.sampled_from([np.uint8, np.uint16, np.int64]), st.integers(0, 5000)), max_size=20))
def test_an_array_has_the_size_and_type_that_were_asked_for(asked):
    buffers = Buffers()
    for dtype, size in asked:
        array = buffers.array("a", dtype, size)
        assert array.dtype == dtype and array.shape == (size,)
        array.fill(1)
        zeros = buffers.zeros("a", dtype, size)
        assert zeros.dtype == dtype and zeros.shape == (size,) and not zeros.any()


def test_memory_is_gone_on_with_under_its_name_alone():
    buffers = Buffers()
    first, other = buffers.array("a", np.uint8, 64), buffers.array("b", np.uint8, 64)
    assert np.shares_memory(first, buffers.array("a", np.int32, 16))
    assert not np.shares_memory(first, other)
    assert not np.shares_memory(first, Buffers().array("a", np.uint8, 64))


@given(
    st.lists(st.one_of(st.lists(st.integers(0, 255), max_size=900), st.tuples(st.integers(0, 9), st.integers(0, 900))))
)
def test_a_column_holds_what_was_appended(parts):
    buffers = Buffers()
    for _ in range(2):  # the second goes on with the memory of the first
        column, expected = Column(buffers, "c", np.uint16), []
        for part in parts:
            if isinstance(part, tuple):
                column.extend(*part)
                expected += [part[0]] * part[1]
            else:
                column.extend(np.array(part, np.uint8))
                expected += part
        assert column.size == len(expected) and column.array().tolist() == expected


def test_a_column_whose_size_was_expected_stays_where_it_is():
    buffers = Buffers()
    column = Column(buffers, "c", np.int32, 5000)
    column.extend(np.arange(1))
    begin = column.array()
    for _ in range(4999):
        column.extend(7, 1)
    assert np.shares_memory(begin, column.array()) and column.array()[:3].tolist() == [0, 7, 7]
    column.extend(8, 10_000)
    assert column.array()[[0, 4999, 5000, -1]].tolist() == [0, 7, 8, 8] and column.size == 15_000


def test_large_memory_is_a_process_own_and_what_it_kept_when_it_grows(monkeypatch):
    monkeypatch.setattr("packprep.buffers.LARGE_BYTES", 1000)
    buffers = Buffers()
    column = Column(buffers, "c", np.int32, 300)
    column.extend(np.arange(300))
    child = os.fork()
    if not child:
        column.array().fill(-1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    column.extend(7, 1000)
    assert column.array().tolist() == [*range(300), *[7] * 1000]
    assert not buffers.zeros("c", np.uint8, 5200).any()
