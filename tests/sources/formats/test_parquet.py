"""packprep.sources.formats.parquet: headers of pages, in Thrift's compact protocol."""

import struct

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packprep.sources.formats.parquet import _struct

INTEGERS = {4: 16, 5: 32, 6: 64}
VALUES = st.recursive(
    st.one_of(
        st.tuples(st.sampled_from([1, 2]), st.none()),
        st.tuples(st.just(3), st.integers(0, 255)),
        *(
            st.tuples(st.just(kind), st.integers(-(1 << bits - 1), (1 << bits - 1) - 1))
            for kind, bits in INTEGERS.items()
        ),
        st.tuples(st.just(7), st.floats(allow_nan=False)),
        st.tuples(st.just(8), st.binary(max_size=200)),
    ),
    lambda inner: st.tuples(st.just(12), st.dictionaries(st.integers(1, 60), inner, max_size=4)),
    max_leaves=8,
)


def varint(value: int) -> bytes:
    low = value & 127
    return bytes([low]) if value < 128 else bytes([low | 128]) + varint(value >> 7)


def zigzag(value: int) -> bytes:
    return varint(2 * value if value >= 0 else -2 * value - 1)


def encoded(kind: int, value) -> bytes:
    """A value as Thrift's specification of the compact protocol writes it."""
    if kind == 12:
        data, before = b"", 0
        for number in value:  # in any order; a distance of 1 … 15 fits into the type's byte
            of_kind, step = value[number][0], number - before
            is_short = 0 < step < 16
            data += bytes([step << 4 | of_kind]) if is_short else bytes([of_kind]) + zigzag(number)
            data, before = data + encoded(*value[number]), number
        return data + b"\0"
    if kind in INTEGERS:
        return zigzag(value)
    if kind == 8:
        return varint(len(value)) + value
    if kind == 7:
        return struct.pack("<d", value)
    return bytes([value]) if kind == 3 else b""  # The type of a field tells true from false.


@given(st.dictionaries(st.integers(1, 60), VALUES, max_size=6), st.binary(max_size=9))
def test_a_header_gives_its_integers_and_its_end_whatever_other_fields_it_has(fields, after):
    data = encoded(12, fields)
    expected = {number: value for number, (kind, value) in fields.items() if kind in INTEGERS}
    assert _struct(b"before" + data + after, 6, 0) == (expected, 6 + len(data))
    for size in range(len(data)):
        with pytest.raises(IndexError):
            _struct(data[:size], 0, 0)


def test_a_header_with_structs_in_structs_beyond_a_depth_or_of_unknown_types_is_refused():
    nested = (4, 7)
    for depth in range(12):
        data = encoded(12, {1: nested})
        if depth <= 8:
            assert _struct(data, 0, 0)[1] == len(data)
        else:
            with pytest.raises(pa.ArrowInvalid, match="nested too deeply"):
                _struct(data, 0, 0)
        nested = (12, {1: nested})
    for kind in (9, 10, 11, 13, 14, 15):
        with pytest.raises(pa.ArrowInvalid, match="a field of an unknown type"):
            _struct(bytes([1 << 4 | kind, 0, 0, 0]), 0, 0)
