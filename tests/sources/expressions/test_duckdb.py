"""Expressions select the rows that DuckDB selects, from tables of its own reading."""

import random

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from packprep.sources.expressions import Expression
from tests.sources.expressions import random_expressions as made

duckdb = pytest.importorskip("duckdb", reason="the judge of expressions")

KEY = ("sources", 0, "where")
BIG = "between -9223372036854775808 and 9223372036854775807"
CASES = (
    ("score >= 3", ""),
    ("score >= 3 and lang in ('de', 'fr')", ""),
    ("not score >= 3", ""),
    ("0 < score < 4", "0 < score and score < 4"),
    ("score > 1 or lang == 'de' and ok", ""),
    ("quality > 0.3", ""),
    ("single == 0.1", ""),
    ("single >= 0.7", ""),
    ("single > quality", ""),
    ("single in (0.1, 1)", ""),
    ("lang < 'e'", ""),
    ("lang != 'de'", ""),
    ("lang > 'd' and lang <= 'ä'", ""),
    ("kind != 'code'", ""),
    ("kind in ('code', 'web') or score is null", ""),
    ("ok", ""),
    ("not ok", ""),
    ("ok == false", ""),
    ("ok is not null and not ok", ""),
    ("big > 9007199254740992", ""),
    ("big == 9007199254740993", ""),
    ("hash > 9223372036854775807", ""),
    ("hash % 100 < 50", ""),
    ("hash > big", ""),
    ("big % 3 == -1", ""),
    ("score + big > 5", f"score + big::hugeint > 5 and score + big::hugeint {BIG}"),
    ("price >= 3.3", ""),
    ("price == 1.1", ""),
    ("made >= '2023-11-17'", ""),
    ("made < '2023-11-17 12:00:00'", ""),
    ("nothing is null", ""),
    ("nothing > 3", ""),
    ("tags is null", ""),
    ("meta.k >= 4", ""),
    ("meta.s == '7'", ""),
    ("meta is null", ""),
    ("score / 2 >= 1.5", ""),
    ("abs(quality) < 1", ""),
    ("floor(quality * 10) == 7", ""),
    ("coalesce(score, 10) > 4", ""),
    ("(1 if lang == 'de' else score) >= 3", "(case when lang = 'de' then 1 else score end) >= 3"),
    ("max(score, 2) == 2", "score is not null and greatest(score, 2) = 2"),
    ("clip(score, 1, 3) == 3", "score is not null and least(greatest(score, 1), 3) = 3"),
    ("lang in ('de') and score not in (3, 4)", ""),
    ("1 / score > 0.3", "1 / nullif(score, 0) > 0.3"),
)


@pytest.fixture(scope="module")
def table() -> pa.Table:
    rng, n = random.Random(49), 400

    def some(*values):
        return [None if rng.random() < 0.15 else rng.choice(values) for _ in range(n)]

    return pa.table(
        {
            "score": some(*range(6)),
            "quality": pa.array(some(-1.0, 0.1, 0.3, 0.7, 1.0, 2.5)),
            "single": pa.array(some(-1.0, 0.1, 0.3, 0.7, 1.0, 2.5), pa.float32()),
            "lang": some("de", "fr", "en", "it", "", "ä", "zz"),
            "kind": pa.array(some("code", "web", "book")).dictionary_encode(),
            "ok": some(True, False),
            "big": some(2**53, 2**53 + 1, 2**63 - 1, -(2**63), 0, 7, -7),
            "hash": pa.array([rng.getrandbits(64) for _ in range(n)], pa.uint64()),
            "price": pa.array(some("1.10", "2.20", "3.30", "4.40")).cast(pa.decimal128(10, 2)),
            "made": pa.array(some(*range(1700000000, 1700600000, 86400)), pa.timestamp("us")),
            "nothing": pa.nulls(n),
            "tags": some(["a"], ["b", "c"], []),
            "meta": some(*({"k": k, "s": str(k)} for k in range(9)), {"k": None, "s": "x"}),
        }
    )


def column(table: pa.Table, name: str) -> pa.Array:
    first, *inside = name.split(".")
    values = table[first].combine_chunks()
    for part in inside:
        values = pc.struct_field(values, [part])
    return values


def condition(text: str, table: pa.Table) -> np.ndarray:
    expression = Expression.parse_condition(text, KEY)
    return expression.condition({name: column(table, name) for name in expression.fields})


def selected(relation: str, sql: str, connection) -> list[int]:
    """The rows that DuckDB selects. It orders NaN above every number; packprep takes it as null."""
    return [
        bool(row[0]) for row in connection.execute(f"select ({sql}) from {relation}").fetchall()
    ]


def test_conditions_on_tables_select_what_duckdb_selects(table, tmp_path):
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    with duckdb.connect() as connection:
        of_parquet = f"'{tmp_path / 'a.parquet'}'"
        connection.register("of_arrow", table)
        for text, sql in CASES:
            for relation, read in (
                (of_parquet, pq.read_table(tmp_path / "a.parquet")),
                ("of_arrow", table),
            ):
                wanted = selected(relation, sql or text, connection)
                assert condition(text, read).tolist() == wanted, text


def test_random_conditions_select_what_duckdb_selects():
    rng, compared = random.Random(49), 0
    with duckdb.connect() as connection:
        for _ in range(300):
            table = made.random_table(rng, 6, small=True)
            text = made.truth(rng, 2)
            try:
                expression = Expression.parse_condition(text, KEY)
            except made.REFUSED:
                continue
            if any(word in text for word in ("%", "/", " if ", "min", "max", "clip")):
                continue
            connection.register("t", table.select(expression.fields))
            sql = text.replace("-(", "(-1) * (")
            try:
                wanted = selected("t", sql, connection)
            except duckdb.Error:
                continue
            compared += 1
            assert condition(text, table).tolist() == wanted, (text, table.to_pylist())
    assert compared > 100, compared
