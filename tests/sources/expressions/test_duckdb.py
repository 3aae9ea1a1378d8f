"""Expressions select the rows that DuckDB selects, from tables of its own reading."""

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from packprep.recipe import Source
from packprep.sources.expressions import Expression
from packprep.sources.formats import Slice, count_pieces, detect_format, read
from packprep.sources.passes import ByFields, Passes
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
    with duckdb.connect(config={"threads": 1}) as connection:
        of_parquet = f"'{tmp_path / 'a.parquet'}'"
        connection.register("of_arrow", table)
        for text, sql in CASES:
            for relation, read in (
                (of_parquet, pq.read_table(tmp_path / "a.parquet")),
                ("of_arrow", table),
            ):
                wanted = selected(relation, sql or text, connection)
                assert condition(text, read).tolist() == wanted, text


OF_TABLES = ("single", "kind", "hash", "price", "made", "nothing")
"""Fields with types that JSON does not have."""
SUFFIXES = ("parquet", "arrow", "jsonl")


def used(path: Path, text: str) -> list[int]:
    """The numbers of the documents that packprep's reader keeps."""
    format, _ = detect_format(path.name)
    size = path.stat().st_size
    pieces = count_pieces(str(path), format, "", size)
    passes, kept, found = Passes.of(Source(paths=("a",), where=text), 0), Counter(), []
    for piece in range(pieces):
        keep = ByFields(passes, 0, lambda file: np.uint64(0))
        part = Slice(str(path), 0, size, format, "", piece, 0, 1, 1, 1)
        for batch in read(part, "text", keep):
            assert not batch.rejects
            found += map(int, batch.texts)
        kept.update(keep.counts)
    assert kept[1] == len(found) and kept[0] + kept[1] == 400
    return found


def test_readers_of_each_format_keep_what_duckdb_selects(table, tmp_path):
    table = table.add_column(0, "text", pa.array([str(i) for i in range(len(table))]))
    lines = table.drop(list(OF_TABLES)).to_pylist()
    for i, line in enumerate(lines):  # A missing key is null as well.
        lines[i] = {k: v for k, v in line.items() if v is not None or i % 2}
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)), "utf-8")
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=150)
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=150)
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.register("of_arrow", pa.ipc.open_file(tmp_path / "a.arrow").read_all())
        kinds = {
            **{"text": "varchar", "score": "bigint", "quality": "double", "lang": "varchar"},
            **{"ok": "boolean", "big": "bigint", "tags": "varchar[]"},
            "meta": "struct(k bigint, s varchar)",
        }
        relations = f"'{tmp_path / 'a.parquet'}'", "of_arrow"
        of_lines = f"read_json('{tmp_path / 'a.jsonl'}', columns={kinds})"
        for text, sql in CASES:
            for suffix, relation in zip(SUFFIXES, (*relations, of_lines), strict=True):
                if suffix == "jsonl" and any(name in text for name in OF_TABLES):
                    continue
                query = f"select text from {relation} where {sql or text}"
                wanted = [int(row[0]) for row in connection.execute(query).fetchall()]
                assert used(tmp_path / f"a.{suffix}", text) == sorted(wanted), (text, suffix)


def test_values_of_mixed_types_are_judged_one_by_one(tmp_path):
    """DuckDB's try_cast knows no rejects: packprep names the records that it cannot judge."""
    values = [1, "3", 4.5, None, True, [5], {"a": 1}, 7, "x", 2**70]
    lines = [json.dumps({"text": str(i), "score": value}) for i, value in enumerate(values)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), "utf-8")
    of_lines = (
        f"read_json('{tmp_path / 'a.jsonl'}', columns={{'text': 'varchar', 'score': 'json'}})"
    )
    is_number = "json_type(score) in ('BIGINT', 'UBIGINT', 'HUGEINT', 'UHUGEINT', 'DOUBLE')"
    query = f"select text from {of_lines} where {is_number} and try_cast(score as double) >= 3"
    with duckdb.connect(config={"threads": 1}) as connection:
        wanted = sorted(row[0] for row in connection.execute(query).fetchall())
    keep = ByFields(Passes.of(Source(paths=("a",), where="score >= 3"), 0), 0, None)
    size = (tmp_path / "a.jsonl").stat().st_size
    part = Slice(str(tmp_path / "a.jsonl"), 0, size, "jsonl", "", 0, 0, 1, 1, 1)
    (batch,) = read(part, "text", keep)
    assert batch.texts == wanted == ["2", "7", "9"]
    assert [reject.reason for reject in batch.rejects] == ["bad_field"] * 5
    assert "score is a text and 3 is a number" in batch.rejects[0].detail


def test_random_conditions_select_what_duckdb_selects():
    rng, compared = random.Random(49), 0
    with duckdb.connect(config={"threads": 1}) as connection:
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
