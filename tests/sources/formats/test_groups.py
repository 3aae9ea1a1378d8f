"""Neighbouring records of a file with the same value become one document, wherever work ranges
begin and end."""

import gzip
import itertools
import json
import random
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet
import pytest

from packprep.errors import SourceError
from packprep.sources.formats import Choice, Grouping, Slice, batch, groups, read
from packprep.sources.formats.fields import Fields

BY_REPO = Grouping("repo", "path", 1)
COUNTS = (1, 2, 3, 7)  # of the work ranges of a split


@pytest.fixture(autouse=True)
def _near(monkeypatch):
    """Little is read before and after a work range, so that it is read in several steps."""
    monkeypatch.setattr(groups, "NEAR_BYTES", 50)
    monkeypatch.setattr(groups, "NEAR_ROWS", 1)


class Read(NamedTuple):
    """What some work ranges gave: (position, texts) of each document, and positions of rejects."""

    documents: list[tuple[int, list[str]]]
    rejects: list[int]
    cuts: int
    alone: int


def records(count=60):
    """Records of groups of 1 to 9, of values of several types, some of them alike in other
    languages."""
    chance, found = random.Random(count), []
    for g in range(count):
        value = chance.choice([g, str(g), float(g), None, True])
        for _ in range(chance.choice([1, 1, 2, 5, 9])):
            text = f"{'x' * chance.randint(0, 60)} é{len(found)}"
            found.append({"text": text, "repo": value, "path": str(chance.randint(0, 9))})
    return found


def expected(rows):
    """The texts of the documents, by itertools."""
    groups = itertools.groupby(rows, lambda row: (type(row["repo"]), row["repo"]))
    found = []
    for (_, value), group in groups:
        members = list(group)
        found += [[row] for row in members] if value is None else [members]
    return [[row["text"] for row in sorted(g, key=lambda row: row["path"])] for g in found]


def data_of(rows, seed=0):
    """JSON Lines with bad lines at the begin and between records."""
    chance, lines = random.Random(seed), [b"{", b"7"]
    for row in rows:
        lines += [b'{"text": null, "repo": "other"}'] * (chance.random() < 0.1)
        lines.append(json.dumps(row).encode())
    return b"\n".join(lines) + b"\n"


def read_all(parts, keep=None):
    documents, rejects, cuts, alone = [], [], 0, 0
    for part in parts:
        for found in read(part, "text", keep, batch_bytes=2000):
            columns = zip(
                found.groups.number.tolist(), found.positions.tolist(), found.texts, strict=True
            )
            for _, members in itertools.groupby(columns, lambda column: column[0]):
                _, positions, texts = zip(*members, strict=True)
                documents.append((min(positions), list(texts)))
            rejects += [reject.position for reject in found.rejects]
            cuts, alone = cuts + found.groups.cuts, alone + found.groups.alone
    return Read(documents, rejects, cuts, alone)


def parts_of(path, format, compression, pieces, count, grouping=BY_REPO, **more):
    """All work ranges of a file, `count` per split."""
    size = path.stat().st_size
    given = {"step_bytes": 1 << 20, "grouping": grouping, **more}
    return [
        Slice(str(path), 0, size, format, compression, piece, k, k + 1, count, **given)
        for piece in range(pieces)
        for k in range(count)
    ]


def test_work_ranges_of_lines_give_the_documents_of_the_file(tmp_path):
    rows = records()
    path = tmp_path / "a.jsonl"
    path.write_bytes(data_of(rows))
    whole = read_all(parts_of(path, "jsonl", "", 1, 1))
    assert [texts for _, texts in whole.documents] == expected(rows)
    assert whole.alone == sum(row["repo"] is None for row in rows) > 0
    (part,) = parts_of(path, "jsonl", "", 1, 1)
    sizes = [sum(map(len, found.texts)) for found in read(part, "text", batch_bytes=1000)]
    assert max(sizes) < 1100 and len(sizes) > sum(sizes) / 1000
    for piece_bytes, count in itertools.product((1 << 20, 321), COUNTS):
        pieces = -(-path.stat().st_size // piece_bytes)
        parts = parts_of(path, "jsonl", "", pieces, count, piece_bytes=piece_bytes)
        assert read_all(parts) == whole


@pytest.mark.long
def test_work_ranges_of_compressed_lines_give_the_same_documents(tmp_path):
    rows = records()
    (tmp_path / "a.jsonl").write_bytes(data_of(rows))
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(data_of(rows)))
    whole = read_all(parts_of(tmp_path / "a.jsonl", "jsonl", "", 1, 1))
    for step_bytes, count in itertools.product((64, 1000, 1 << 14), COUNTS):
        parts = parts_of(path, "jsonl", "gzip", 1, count, step_bytes=step_bytes)
        assert read_all(parts) == whole


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_work_ranges_of_tables_give_the_documents_of_the_file(tmp_path, format):
    rows = [row | {"repo": None if row["repo"] is None else repr(row["repo"])} for row in records()]
    table, path = pa.Table.from_pylist(rows), tmp_path / f"a.{format}"
    for size, count in itertools.product((9, 1000), COUNTS[::2]):
        if format == "parquet":
            pyarrow.parquet.write_table(table, path, row_group_size=size)
        else:
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=size)
        found = read_all(parts_of(path, format, "", -(-len(rows) // size), count))
        assert [texts for _, texts in found.documents] == expected(rows)


def test_times_that_python_cannot_hold_are_grouped_and_sorted_exactly(tmp_path):
    # Python's times have microseconds and end in the year 9999.
    far, path = 10**18, tmp_path / "a.parquet"
    for kind, first in ((pa.time64("ns"), 1), (pa.timestamp("ns"), 1), (pa.timestamp("us"), far)):
        repo, order = pa.array([first, first, first + 1], kind), pa.array([2, 1, 3], kind)
        pyarrow.parquet.write_table(
            pa.table({"text": list("abc"), "repo": repo, "path": order}), path
        )
        found = read_all(parts_of(path, "parquet", "", 1, 1))
        assert [texts for _, texts in found.documents] == [["b", "a"], ["c"]]


@pytest.mark.long
def test_a_fraction_takes_the_same_documents_in_every_work_range(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(data_of(records()))

    def taken(count):
        of_piece = parts_of(path, "jsonl", "", 1, count)
        return [
            document
            for part in of_piece
            for document in read_all([part], Choice(77, 1 << 31)).documents
        ]

    whole = taken(1)
    assert 9 < len(whole) < len(expected(records()))
    assert all(taken(count) == whole for count in COUNTS)


def test_a_group_that_is_longer_than_a_document_may_be_is_cut_and_counted(tmp_path, monkeypatch):
    rows = [{"text": "y" * 30, "repo": 1, "path": str(9 - i)} for i in range(8)]
    path = tmp_path / "a.jsonl"
    path.write_bytes(data_of(rows))
    # Each record has 34 bytes, with the token after it.
    for most, sizes in ((100, [2, 2, 2, 2]), (101, [2, 2, 2, 2]), (102, [3, 3, 2])):
        monkeypatch.setattr(batch, "MAX_DOCUMENT_BYTES", most)
        for count in COUNTS:
            found = read_all(parts_of(path, "jsonl", "", 1, count))
            assert [len(texts) for _, texts in found.documents] == sizes
            assert found.cuts == len(sizes) - 1


@pytest.mark.parametrize(
    ("row", "grouping", "message"),
    [
        ({"repo": ["a"]}, BY_REPO, "'repo' is a list, but group_by takes"),
        ({"repo": "a", "path": {"b": 1}}, BY_REPO, "'path' is an object, but order_by takes"),
        ({"repo": "a", "weight": 2}, BY_REPO, "has messages, loss_spans, media or a weight"),
        ({"a": {"b": [1]}}, Grouping("a.b", "", 0), "'a.b' is a list"),
    ],
)
def test_values_that_cannot_be_grouped_are_refused(tmp_path, row, grouping, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps({"text": "x", **row}).encode())
    (part,) = parts_of(path, "jsonl", "", 1, 1, grouping)
    with pytest.raises(SourceError, match=message):
        list(read(part, "text", fields=Fields()))


@pytest.mark.long
def test_a_table_without_the_column_and_a_text_file_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pa.table({"text": ["x"], "tags": [["a"]]}), path)
    for grouping, message in ((BY_REPO, "no columns named 'repo'; the columns are 'text', 'tags'"),
                              (Grouping("tags", "", 0), "holds list<.*>, but group_by takes")):  # fmt: skip
        with pytest.raises(SourceError, match=message):
            read_all(parts_of(path, "parquet", "", 1, 1, grouping))
    (tmp_path / "a.txt").write_bytes(b"x")
    with pytest.raises(SourceError, match="this is a file of format text"):
        read_all(parts_of(tmp_path / "a.txt", "text", "", 1, 1))


@pytest.mark.long
def test_nested_and_repeated_keys_are_read_as_elsewhere(tmp_path):
    lines = (
        b'{"text": "1", "a": {"b": 1}, "c": 2}\n{"text": "2", "a": {"b": 1}}\n'
        b'{"text": "3", "a": {"b": 2}, "a.b": 1}\n{"text": "4", "a": {"b": 2}, "a": {"b": 1}}\n'
        b'{"text": "5", "a": 7}\n{"text": "6", "a": {"b": NaN}}\n'
    )
    (tmp_path / "a.jsonl").write_bytes(lines)
    found = read_all(parts_of(tmp_path / "a.jsonl", "jsonl", "", 1, 1, Grouping("a.b", "", 0)))
    assert [texts for _, texts in found.documents] == [["1", "2", "3", "4"], ["5"], ["6"]]
