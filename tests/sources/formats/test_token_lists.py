"""packprep.sources.formats: columns of lists of token ids in Parquet and Arrow files."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep.errors import SourceError
from packprep.sources.formats import Slice, bytes_of_pieces, bytes_per_token, count_pieces
from packprep.sources.formats import batch as limits
from tests.sources.formats.test_megatron import cut_points
from tests.sources.formats.test_megatron import read_all as read_ids

WIDTHS = {
    "int8": 7,
    "uint8": 8,
    "int16": 15,
    "uint16": 16,
    "int32": 31,
    "uint32": 32,
    "int64": 63,
    "uint64": 64,
}
FORMS = ["parquet", "file", "lz4", "stream"]


def write_table(folder, table, form, rows):
    path = f"{folder}/a.{'parquet' if form == 'parquet' else 'arrow'}"
    if form == "parquet":
        pq.write_table(table, path, row_group_size=rows)
        return path
    options = pa.ipc.IpcWriteOptions(compression="lz4" if form == "lz4" else None)
    new = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
    with pa.OSFile(path, "wb") as sink, new(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def parts(path, cuts=(0, 1)):
    format = "parquet_tokens" if path.endswith("parquet") else "arrow_tokens"
    size = os.path.getsize(path)
    for piece in range(count_pieces(path, format, "", size)):
        for lo, hi in zip(cuts[:-1], cuts[1:], strict=True):
            yield Slice(path, 7, size, format, "", piece, lo, hi, cuts[-1], 1)


def read_all(path, cuts=(0, 1), text_key="text", **options):
    found, rejects = [], []
    for part in parts(path, cuts):
        some, bad = _read(part, text_key, **options)
        found, rejects = found + some, rejects + bad
    return found, rejects


def _read(part, text_key, **options):
    if text_key == "text":
        return read_ids(part, **options)
    from packprep.sources.formats import read

    found = []
    for batch in read(part, text_key, **options):
        ids, offsets = batch.tokens
        found += [
            (int(p), ids[a:b].tolist())
            for p, a, b in zip(batch.positions, offsets[:-1], offsets[1:], strict=True)
        ]
    return found, []


@st.composite
def columns(draw):
    """(an Arrow column of lists, the same as Python values)."""
    kind = draw(st.sampled_from(["list", "large_list", "fixed"]))
    width = draw(st.sampled_from(sorted(WIDTHS)))
    size = draw(st.integers(0, 4))
    bounds = {"min_size": size, "max_size": size} if kind == "fixed" else {"max_size": 5}
    id = st.integers(0, 2 ** WIDTHS[width] - 1)
    if draw(st.booleans()):
        id |= st.none()
    row = st.lists(id, **bounds)
    if draw(st.booleans()):
        row |= st.none()
    lists = draw(st.lists(row, max_size=25))
    value = getattr(pa, width)()
    types = {
        "list": pa.list_(value),
        "large_list": pa.large_list(value),
        "fixed": pa.list_(value, size),
    }
    return pa.array(lists, types[kind]), lists


def by_hand(lists):
    found, rejects = [], []
    for i, ids in enumerate(lists):
        if ids is None:
            rejects.append((i, "not_tokens", "the value is null"))
        elif None in ids:
            rejects.append((i, "not_tokens", f"token {ids.index(None)} is null"))
        else:
            found.append((i, ids))
    return found, rejects


@settings(max_examples=200, deadline=None)
@given(columns(), st.sampled_from(FORMS), st.integers(1, 12), cut_points, st.integers(1, 60))
def test_fault_17_each_row_is_in_exactly_one_part(column, form, rows, cuts, batch_bytes):
    values, lists = column
    if (
        form == "parquet"
        and pa.types.is_fixed_size_list(values.type)
        and values.type.list_size == 0
    ):
        return  # Parquet has none
    table = pa.table(
        {"number": np.arange(len(lists)), "input_ids": values, "input_ids.x": ["y"] * len(lists)}
    )
    with tempfile.TemporaryDirectory() as folder:
        found = read_all(write_table(folder, table, form, rows), cuts, batch_bytes=batch_bytes)
    assert found == by_hand(lists)


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_are_not_kept_leave_no_trace(tmp_path, form):
    lists = [[i, i + 1] if i % 5 else None for i in range(60)]
    path = write_table(
        tmp_path, pa.table({"tokens": pa.array(lists, pa.list_(pa.int64()))}), form, 17
    )
    found, rejects = read_all(path, keep=lambda file, positions: positions % 3 == 1)
    assert found == [(i, lists[i]) for i in range(1, 60, 3) if i % 5]
    assert [place for place, *_ in rejects] == [i for i in range(1, 60, 3) if not i % 5]


@pytest.mark.parametrize("form", FORMS)
def test_lists_beyond_the_limit_are_rejects(tmp_path, form, monkeypatch):
    monkeypatch.setattr(limits, "MAX_DOCUMENT_TOKENS", 10)
    lists = [[1] * 10, [2] * 11, None, [3, None], [4] * 10]
    path = write_table(
        tmp_path, pa.table({"input_ids": pa.array(lists, pa.list_(pa.int16()))}), form, 5
    )
    found, rejects = read_all(path)
    assert found == [(0, [1] * 10), (4, [4] * 10)]
    assert rejects == [
        (1, "too_large", "11 tokens; at most 10"),
        (2, "not_tokens", "the value is null"),
        (3, "not_tokens", "token 1 is null"),
    ]


@pytest.mark.parametrize("form", FORMS)
def test_batches_are_small_whatever_a_row_group_holds(tmp_path, form):
    lists = [[7] * 1000 for _ in range(300)]
    path = write_table(
        tmp_path, pa.table({"input_ids": pa.array(lists, pa.list_(pa.int32()))}), form, 300
    )
    from packprep.sources.formats import read

    sizes = [
        len(batch.tokens.ids)
        for part in parts(path)
        for batch in read(part, "text", batch_bytes=20_000)
    ]
    assert sum(sizes) == 300_000 and max(sizes) <= 5000


def test_the_column_is_input_ids_or_tokens_or_the_one_that_is_named(tmp_path):
    lists = pa.array([[1, 2]])
    both = pa.table({"tokens": pa.array([[3]]), "input_ids": lists, "mine": pa.array([[4]])})
    path = write_table(tmp_path, both, "parquet", 5)
    assert read_all(path)[0] == [(0, [1, 2])]
    assert read_all(path, text_key="mine")[0] == [(0, [4])]
    path = write_table(tmp_path, both.drop_columns("input_ids"), "stream", 5)
    assert read_all(path)[0] == [(0, [3])]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "table, text_key, said",
    [
        (
            {"ids": [[1]], "text": ["a"]},
            "text",
            "no column named 'input_ids' or 'tokens'; the columns are 'ids', 'text'",
        ),
        ({"input_ids": [[1]]}, "ids", "no column named 'ids'; the columns are 'input_ids'"),
        (
            {"input_ids": ["a"]},
            "text",
            "the column 'input_ids' holds string, not lists of integers",
        ),
        ({"input_ids": [1]}, "text", "holds int64, not lists"),
        ({"input_ids": [[1.5]]}, "text", "double>, not lists of integers"),
        ({"input_ids": [[[1]]]}, "text", ">, not lists of integers"),
        ({"input_ids": [["a"]]}, "text", "string>, not lists of integers"),
    ],
)
def test_a_missing_or_unfit_column_is_an_error_that_lists_the_columns(
    tmp_path, form, table, text_key, said
):
    path = write_table(tmp_path, pa.table(table), form, 5)
    with pytest.raises(SourceError) as error:
        read_all(path, text_key=text_key)
    assert said in str(error.value) and path in str(error.value)


@pytest.mark.parametrize("form", ["file", "lz4", "stream"])
def test_columns_of_nothing_but_nulls_are_rejects(tmp_path, form):
    table = pa.table(
        {"input_ids": pa.nulls(2), "tokens": pa.array([[], [None]], pa.list_(pa.null()))}
    )
    path = write_table(tmp_path, table, form, 5)
    assert read_all(path)[1] == [(i, "not_tokens", "the value is null") for i in (0, 1)]
    path = write_table(tmp_path, table.drop_columns("input_ids"), form, 5)
    assert read_all(path) == ([(0, [])], [(1, "not_tokens", "token 0 is null")])


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_file_gives_documents_or_an_error_and_nothing_else(tmp_path, form):
    table = pa.table(
        {"input_ids": pa.array([[i] * (i % 7) for i in range(40)], pa.list_(pa.int32()))}
    )
    path = write_table(tmp_path, table, form, 10)
    data = Path(path).read_bytes()
    for at in range(0, len(data), max(1, len(data) // 150)):
        for changed in (data[:at], data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :]):
            Path(path).write_bytes(changed)
            try:
                read_all(path)
            except SourceError as error:
                assert path in str(error)


def test_footers_and_batches_tell_the_bytes_of_a_token(tmp_path):
    table = pa.table(
        {"input_ids": pa.array([[1, 2, 3]] * 50, pa.list_(pa.int32())), "number": [1] * 50}
    )
    path = write_table(tmp_path, table, "parquet", 20)
    part = next(parts(path))
    assert bytes_per_token(part, "text") == 4.0
    assert bytes_of_pieces(path, "parquet_tokens", os.path.getsize(path)) == [240, 240, 120]
    for form in ("file", "stream"):
        path = write_table(tmp_path, table, form, 20)
        found = [
            bytes_per_token(part, "text") * tokens
            for part, tokens in zip(parts(path), (60, 60, 30), strict=True)
        ]
        assert 0.6 * os.path.getsize(path) < sum(found) < os.path.getsize(path)
        assert abs(found[0] - found[1]) <= 8
