"""packprep.sources.formats.parquet: headers of pages, chosen rows and the footer."""

import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packprep.recipe import Source
from packprep.sources.formats import Decoders, Slice, parquet, read
from packprep.sources.formats.parquet import _struct
from packprep.sources.passes import ByFields, Passes

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


def chosen_texts(path, where: str, piece: int = 0, batch_bytes: int = 4 << 20, decoders=None):
    """The texts of a row group with their row numbers, in batches."""
    passes = Passes.of(Source(paths=("a",), where=where), 0)
    keep = ByFields(passes, 0, lambda file: np.uint64(0))
    part = Slice(str(path), 0, path.stat().st_size, "parquet", "", piece, 0, 1, 1, 1)
    return [
        list(zip(batch.positions.tolist(), batch.texts, strict=True))
        for batch in read(part, "doc.text", keep, batch_bytes, decoders)
    ]


def test_rows_are_chosen_from_any_number_of_batches(tmp_path, monkeypatch):
    # The long text allows only few rows per batch, because it may occur in each row.
    monkeypatch.setattr(parquet, "REPEATED_BYTES", 40_000)
    path, texts = tmp_path / "a.parquet", [f"{i % 40} é" * 3 for i in range(300)]
    texts[7] *= 300
    scores = [(i * 37) % 100 for i in range(300)]
    for kind in (pa.string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())):
        column = pa.StructArray.from_arrays([pa.array(texts).cast(kind)], ["text"])
        pq.write_table(pa.table({"doc": column, "score": scores}), path)
        for where, least in (("score >= 90", 90), ("score >= 0", 0), ("score == 99", 99)):
            expected = [(i, texts[i]) for i in range(300) if scores[i] >= least]
            for batch_bytes in (1, 300, 5000, 4 << 20):
                found = chosen_texts(path, where, batch_bytes=batch_bytes)
                assert [document for batch in found for document in batch] == expected
                assert batch_bytes > 1 or len(found) == len(expected)


def test_a_footer_is_parsed_once_for_all_row_groups(tmp_path, monkeypatch):
    path, parsed, decoders = tmp_path / "a.parquet", [], Decoders()
    groups = parquet._groups
    monkeypatch.setattr(parquet, "_groups", lambda *given: parsed.append(1) or groups(*given))
    for texts in ("abcdefgh", "ijklmn"):  # The second file replaces the first.
        table = pa.table({"doc": [{"text": text} for text in texts], "score": range(len(texts))})
        parsed.clear()
        pq.write_table(table, path, row_group_size=2)
        found = [chosen_texts(path, "score != 3", k, decoders=decoders) for k in range(3)]
        assert [text for (batch,) in found for _, text in batch] == [*texts[:3], *texts[4:6]]
        assert len(parsed) == 1
