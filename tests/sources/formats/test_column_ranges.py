"""Statistics of a Parquet file never exclude a row that an expression selects."""

import math
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packprep.sources.expressions import Expression, Range
from packprep.sources.formats.column_ranges import column_range
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
    assert sum(check(rng, tmp_path / "a.parquet") for _ in range(40)) > 500


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
    }
