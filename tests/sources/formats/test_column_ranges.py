"""Statistics of a Parquet file never exclude a row that an expression selects."""

import itertools
import math
import random
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packprep.errors import SourceError
from packprep.recipe import Source
from packprep.sources.expressions import Expression, Range
from packprep.sources.formats import Slice, read
from packprep.sources.formats.column_ranges import column_range
from packprep.sources.passes import ByFields, Passes
from tests.sources.expressions import random_expressions as made


def ranges_of(path, n_rows: int) -> list[dict[str, Range]]:
    with pq.ParquetFile(path) as file:
        return [
            {
                name: column_range(
                    [file.metadata.row_group(g).column(i)],
                    file.schema_arrow.field(i).type,
                    False,
                    file.metadata.row_group(g).num_rows,
                )
                for i, name in enumerate(file.schema_arrow.names)
            }
            for g in range(file.num_row_groups)
        ]


def check(rng: random.Random, path) -> int:
    """Write a random table, and count the row groups that random expressions leave out."""
    table, excluded = made.random_table(rng, 12), 0
    options = {
        "write_statistics": rng.choice((True, True, ["i", "lang"])),
        "use_dictionary": rng.random() < 0.5,
        "version": rng.choice(("1.0", "2.6")),
        "data_page_version": rng.choice(("1.0", "2.0")),
        "store_schema": rng.random() < 0.5,
    }
    pq.write_table(table, path, row_group_size=rng.choice((1, 3, 5)), **options)
    with pq.ParquetFile(path) as file:
        groups = [file.read_row_group(g) for g in range(file.num_row_groups)]
    of_groups = ranges_of(path, len(table))
    for _ in range(20):
        try:
            expression = Expression.parse_condition(made.truth(rng, 2), ("sources", 0, "where"))
        except made.REFUSED:
            continue
        for group, ranges in zip(groups, of_groups, strict=True):
            if not expression.may_hold(ranges):
                excluded += 1
                assert not expression.condition(
                    dict(zip(group.column_names, group.columns, strict=True))
                ).any(), (
                    expression.text,
                    group.to_pylist(),
                )
    return excluded


def test_no_row_group_is_left_out_that_has_a_selected_row(tmp_path):
    rng = random.Random(49)
    assert sum(check(rng, tmp_path / "a.parquet") for _ in range(20)) > 250


@pytest.mark.campaign
def test_no_row_group_of_many_is_left_out_that_has_a_selected_row(tmp_path):
    rng = random.Random(50)
    for _ in range(5000):
        check(rng, tmp_path / "a.parquet")


def test_a_column_has_the_range_of_its_statistics(tmp_path):
    table = pa.table(
        {
            "i": [1, 2, None],
            "u": pa.array([2**64 - 1, 2**63, 5], pa.uint64()),
            "x": [1.0, math.nan, 2.0],
            "nan": [math.nan] * 3,
            "f": pa.array([0.5, 0.25, 1.0], pa.float32()),
            "half": pa.array(np.array([0.1, 0.2, 0.3], np.float16)),
            "ok": [True, False, True],
            "text": ["a", "ä", "b"],
            "kind": pa.array(["a", "b", "a"]).dictionary_encode(),
            "binary": [b"\xff", b"a", None],
            "none": pa.array([None] * 3, pa.int64()),
            "price": pa.array(["1.1", "2.2", "3.3"]).cast(pa.decimal128(10, 1)),
            "made": pa.array([1, 2, 3], pa.timestamp("ns")),
            "tags": [[], None, []],
            "meta": [{"lang": None}, None, {"lang": None}],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    (ranges,) = ranges_of(tmp_path / "a.parquet", 3)
    assert ranges == {
        "i": Range(1, 2),
        "u": Range(5, 2**64 - 1, null=False),
        "x": Range(1.0, 2.0),
        "nan": Range(),
        "f": Range(0.25, 1.0, single=True),
        "half": Range(),
        "ok": Range(False, True, null=False),
        "text": Range(b"a", "ä".encode(), null=False),
        "kind": Range(b"a", b"b", null=False),
        "binary": Range(b"a", b"\xff"),
        "none": Range(value=False),
        "price": Range(null=False),
        "made": Range(null=False),
        "tags": Range(),
        "meta": Range(),
    }


def test_a_row_group_that_no_pass_uses_is_counted_and_not_read(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"{i} " * 50 for i in range(400)], "score": range(400)})
    pq.write_table(table, path, row_group_size=100, use_dictionary=False, compression="none")
    groups = [pq.ParquetFile(path).metadata.row_group(g) for g in range(4)]
    data = bytearray(path.read_bytes())
    for group in groups[:3]:  # Only a reader that skips these texts can read the file.
        data[group.column(0).data_page_offset] ^= 255
    path.write_bytes(data)
    for keys, kept in (
        ({"where": "score >= 350"}, 50),
        ({"where": "score >= 350", "repeat": "clip(score - 300, 0, 1)"}, 50),
        ({"repeat": "clip(score - 300, 0, 1)"}, 99),
        ({"where": "score > 500"}, 0),
    ):
        passes, counts, texts = Passes.of(Source(paths=("a",), **keys), 0), Counter(), 0
        for piece in range(4):
            keep = ByFields(passes, 0, lambda file: np.uint64(0))
            part = Slice(str(path), 0, len(data), "parquet", "", piece, 0, 1, 1, 1)
            texts += sum(len(batch.texts) for batch in read(part, "text", keep))
            counts.update(keep.counts)
        assert (texts, counts[0], counts[1]) == (kept, 400 - kept, kept)
    keep = ByFields(Passes.of(Source(paths=("a",), where="score >= 0"), 0), 0, None)
    with pytest.raises(SourceError, match="is damaged|corrupt|truncated|page"):
        list(read(part._replace(piece=0), "text", keep))


def test_chosen_rows_are_read_in_parts_of_their_row_group(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [{"text": f"{i} {'x' * 50}", "score": i * i % 7} for i in range(300)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=200)
    passes, size = Passes.of(Source(paths=("a",), where="score == 2"), 0), path.stat().st_size
    for batch_bytes, count in itertools.product((100, 2000, 1 << 20), (1, 3)):
        found = []
        for piece, k in itertools.product(range(2), range(count)):
            keep = ByFields(passes, 0, lambda file: np.uint64(0))
            part = Slice(str(path), 0, size, "parquet", "", piece, k, k + 1, count, 1)
            found += read(part, "text", keep, batch_bytes=batch_bytes)
        texts = [text for batch in found for text in batch.texts]
        positions = [position for batch in found for position in batch.positions.tolist()]
        assert positions == [i for i, row in enumerate(rows) if row["score"] == 2]
        assert texts == [rows[i]["text"] for i in positions]
        assert len(found) == 2 * count if batch_bytes == 1 << 20 else len(found) >= 2 * count
        assert len(found) > 10 or batch_bytes > 100


def test_damaged_statistics_are_an_error_and_do_not_end_the_process(tmp_path):
    path, value = tmp_path / "a.parquet", (0x1122334455667701).to_bytes(8, "little")
    table = pa.table({"text": ["a"], "score": [int.from_bytes(value, "little")]})
    pq.write_table(table, path, use_dictionary=False)
    data = path.read_bytes()
    size = int.from_bytes(data[-8:-4], "little")
    pages, footer = data[: -8 - size], data[-8 - size : -8]
    assert b"\x08" + value in footer
    footer = footer.replace(b"\x08" + value, b"\x03" + value[:3])
    path.write_bytes(pages + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    keep = ByFields(Passes.of(Source(paths=("a",), where="score >= 3"), 0), 0, None)
    part = Slice(str(path), 0, path.stat().st_size, "parquet", "", 0, 0, 1, 1, 1)
    with pytest.raises(SourceError, match="a.parquet"):
        list(read(part, "text", keep))
