"""packprep.sources.formats: Parquet row groups and Arrow record batches."""

import tempfile

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep.errors import SourceError
from packprep.sources.formats import Decoders, read
from packprep.sources.formats import batch as limits
from packprep.sources.formats.parquet import _varint
from packprep.sources.formats.table import MAX_BLOCK_BYTES, check_block
from tests.sources.formats.parts import part_of, pieces_of, read_all, read_cut, write

texts = st.lists(st.none() | st.text(max_size=10), max_size=30)
kinds = st.sampled_from(
    ["string", "large_string", "binary", "large_binary", "string_view", "dictionary"]
)
cut_points = st.lists(st.integers(0, 40), max_size=6).map(lambda cuts: [0, *sorted(cuts), 40])


def table_of(texts, kind="string"):
    column = pa.array(texts, pa.string())
    column = (
        column.dictionary_encode() if kind == "dictionary" else column.cast(getattr(pa, kind)())
    )
    return pa.table({"id": np.arange(len(texts)), "text": column, "a.b": ["x"] * len(texts)})


def write_table(folder, table, form, rows_at_once):
    """The table as Parquet ("parquet"), an IPC file ("file", "lz4") or an IPC stream ("stream")."""
    path = write(folder, "a.parquet" if form == "parquet" else "a.arrow", b"")
    if form == "parquet":
        pq.write_table(table, path, row_group_size=rows_at_once)
        return path
    options = pa.ipc.IpcWriteOptions(
        compression="lz4" if form == "lz4" else None, emit_dictionary_deltas=form == "stream"
    )
    new = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows_at_once)
    return path


def by_hand(texts):
    found = [(i, text) for i, text in enumerate(texts) if text is not None]
    return found, [(i, "not_a_string") for i, text in enumerate(texts) if text is None]


@settings(max_examples=150, deadline=None)
@given(
    texts,
    kinds,
    st.sampled_from(["parquet", "file", "lz4", "stream"]),
    st.integers(1, 12),
    cut_points,
    st.booleans(),
)
def test_fault_17_each_row_is_in_exactly_one_part(texts, kind, form, rows_at_once, cuts, remembers):
    with tempfile.TemporaryDirectory() as folder:
        path = write_table(folder, table_of(texts, kind), form, rows_at_once)
        found = read_cut(path, cuts, batch_bytes=20, decoders=Decoders() if remembers else None)
    assert found == by_hand(texts)


@pytest.mark.parametrize("form", ["parquet", "file", "stream"])
def test_pieces_are_row_groups_or_record_batches_and_positions_count_through_the_file(
    tmp_path, form
):
    path = write_table(tmp_path, table_of([str(i) for i in range(10)]), form, 4)
    assert pieces_of(path) == 3
    assert read_all(part_of(path, 1))[0] == [(i, str(i)) for i in range(4, 8)]
    assert read_all(part_of(path, 2, 1, 2, 2))[0] == [(9, "9")]


@pytest.mark.parametrize("form", ["parquet", "file", "stream"])
def test_row_groups_larger_than_a_slice_are_read_in_slices(tmp_path, form):
    texts = [str(i) * 20 for i in range(5000)]
    path = write_table(tmp_path, table_of(texts), form, 5000)
    assert read_all(part_of(path, 0, 1, 3, 4))[0] == by_hand(texts)[0][1250:3750]
    assert (
        max(sum(map(len, batch.texts)) for batch in read(part_of(path), "text", batch_bytes=1000))
        < 1100
    )


@pytest.mark.parametrize("form", ["parquet", "file", "stream"])
def test_rows_that_are_not_kept_leave_no_trace(tmp_path, form):
    path = write_table(tmp_path, table_of(["a", None, "b", None, "c"]), form, 3)
    found = read_cut(path, [0, 1], keep=lambda file, positions: positions >= 2)
    assert found == ([(2, "b"), (4, "c")], [(3, "not_a_string")])


@pytest.mark.parametrize("form", ["parquet", "file", "stream"])
@pytest.mark.parametrize("kind", ["string", "large_binary", "string_view", "dictionary"])
def test_bytes_that_are_not_utf8_are_rejected_row_by_row(tmp_path, form, kind):
    values = pa.array([b"a", b"\xff", "é".encode(), b"\xed\xa0\x80" + b"x" * 20], pa.binary())
    if kind == "dictionary":
        column = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, 3]), values.view(pa.string()))
    elif kind == "string_view":
        column = values.cast(pa.binary_view()).view(pa.string_view())
    else:
        column = values.view(pa.string()) if kind == "string" else values.cast(pa.large_binary())
    path = write_table(tmp_path, pa.table({"text": column}), form, 10)
    if (form, kind) == ("parquet", "dictionary"):  # pyarrow refuses the column as a whole
        with pytest.raises(SourceError, match="UTF8"):
            read_all(part_of(path))
        return
    assert read_all(part_of(path)) == (
        [(0, "a"), (2, "é")],
        [(1, "invalid_utf8"), (3, "invalid_utf8")],
    )


@pytest.mark.parametrize("form", ["parquet", "file", "stream"])
def test_a_column_of_nulls_and_texts_that_are_too_large_are_rejects(tmp_path, form, monkeypatch):
    path = write_table(tmp_path, pa.table({"text": pa.nulls(2)}), form, 10)
    assert read_all(part_of(path)) == ([], [(0, "not_a_string"), (1, "not_a_string")])
    monkeypatch.setattr(limits, "MAX_DOCUMENT_BYTES", 4)
    path = write_table(tmp_path, table_of(["éé", "ééa", "b"]), form, 10)
    assert read_all(part_of(path)) == ([(0, "éé"), (2, "b")], [(1, "too_large")])


@pytest.mark.parametrize("form", ["parquet", "file", "stream"])
def test_a_missing_or_unfit_column_is_an_error_that_lists_the_columns(tmp_path, form):
    path = write_table(tmp_path, table_of(["a"]), form, 10)
    assert read_all(part_of(path), "a.b")[0] == [(0, "x")]
    with pytest.raises(
        SourceError,
        match=r"a\.\w+: no column named 'content'; the columns are 'id', 'text', 'a.b'",
    ):
        read_all(part_of(path), "content")
    with pytest.raises(SourceError, match="the column 'id' holds int64, not strings"):
        read_all(part_of(path), "id")
    ids = pa.array([[1, 2]], pa.list_(pa.int32()))
    for columns, advice in (
        (
            {"id": [1], "title": ["a"], "body": ["b" * 99]},
            r"\(--text-key\) .* text \(one of 'title', 'body'\), as in text_key = \"body\"$",
        ),
        (
            {"title": ["a" * 99], "body": ["b"]},
            (
                r"text_key \(--text-key\) to the column that holds the text, as in text_key ="
                r" \"title\"$"
            ),
        ),
        (
            {"blob": [b"x" * 999], "doc": [{"lang": "en", "body": "b" * 99}]},
            r"\(one of 'doc.lang', 'doc.body'\), as in text_key = \"doc.body\"$",
        ),
        (
            {"input_ids": ids},
            r"set format = \"tokens\" for its lists of token ids, and give the tokenizer that made them$",
        ),
    ):
        with pytest.raises(SourceError, match=advice):
            read_all(part_of(write_table(tmp_path, pa.table(columns), form, 10)))


@pytest.mark.parametrize("form", ["parquet", "file", "stream", "lz4"])
def test_a_truncated_file_is_an_error(tmp_path, form):
    path = write_table(tmp_path, table_of([str(i) * 50 for i in range(100)]), form, 30)
    data = path.read_bytes()
    ends = range(0, len(data) - 8, 501)
    for n in ends:
        path.write_bytes(data[:n])
        with pytest.raises(SourceError, match=rf"{path}: not a readable"):
            pieces_of(path)


@pytest.mark.parametrize("form", ["parquet", "file", "stream", "lz4"])
def test_a_damaged_file_gives_documents_or_an_error_and_nothing_else(tmp_path, form):
    path = write_table(tmp_path, table_of([str(i) * 50 for i in range(40)]), form, 20)
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    errors = 0
    for _ in range(150):
        damaged = bytearray(data)
        for at in rng.integers(0, len(data), 20):
            damaged[at] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            for piece in range(min(pieces_of(path), 2)):
                read_all(part_of(path, piece))
        except SourceError as error:
            errors += 1
            assert str(path) in str(error)
    assert errors


@pytest.mark.parametrize("deltas", [False, True])
def test_dictionaries_that_change_between_the_batches_of_a_stream_are_followed(tmp_path, deltas):
    path = tmp_path / "a.arrow"
    batches = [
        ["a", "b", "a"],
        ["a", "b", "c", "c"],
        ["d", "a"] if not deltas else ["a", "b", "c", "d"],
    ]
    arrays = [pa.array(batch).dictionary_encode() for batch in batches]
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=deltas)
    schema = pa.schema([("text", arrays[0].type)])
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_stream(sink, schema, options=options) as writer,
    ):
        for array in arrays:
            writer.write_batch(pa.record_batch([array], schema))
    for piece in (2, 0, 1):
        assert [text for _, text in read_all(part_of(path, piece))[0]] == batches[piece]


@pytest.mark.filterwarnings("ignore:Feather V1")
def test_an_old_feather_file_is_refused(tmp_path):
    path = write(tmp_path, "a.feather", b"")
    pyarrow.feather.write_feather(pa.table({"text": ["a"]}), path, version=1)
    with pytest.raises(SourceError, match="not a readable Arrow"):
        pieces_of(path)


def test_an_empty_stream_has_no_pieces(tmp_path):
    for form in ("file", "stream", "parquet"):
        path = write_table(tmp_path, table_of([]), form, 5)
        assert read_cut(path, [0, 1]) == ([], [])


def test_a_block_may_have_so_many_bytes_and_no_more():
    check_block("a.parquet", "a page", MAX_BLOCK_BYTES, "")
    with pytest.raises(SourceError, match=f"a.parquet: a page has {MAX_BLOCK_BYTES + 1} bytes"):
        check_block("a.parquet", "a page", MAX_BLOCK_BYTES + 1, "write it again")


def test_a_number_in_a_page_s_header_takes_ten_bytes_at_most():
    for value in (0, 1, 127, 128, 1 << 62, (1 << 64) - 1):
        data, rest = b"", value
        while rest > 127 or not data:
            data, rest = data + bytes([rest & 127 | (128 if rest > 127 else 0)]), rest >> 7
        data += bytes([rest]) if value > 127 else b""
        assert _varint(b"x" + data + b"y", 1) == (value, 1 + len(data)) and len(data) <= 10
    with pytest.raises(pa.ArrowInvalid, match="impossible number"):
        _varint(b"\xff" * 11, 0)
