"""A token store keeps fields, by which its datasets choose documents as datasets of the text do."""

import json
import math
from datetime import date

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packprep.building.plan import open_plan
from packprep.documents.kept_fields import (
    TEXT,
    TYPES,
    FieldNotes,
    reader_of_part,
    without_fields,
    wrong_fields,
)
from packprep.documents.store import _Columns, fields_of_parts, open_arrays
from packprep.errors import RecipeError, SourceError
from packprep.format.json_files import shard_name
from packprep.removing import remove_documents
from packprep.sources.passes import FieldColumns
from tests import made
from tests.sources.test_passes import FILES, UL2R, contents, records, sources, write
from tests.verification.damage import faults_of

ALL = -1
KEEP = ["score", "quality", "meta.lang"]
MIXED = (
    {"text": "a score of another type", "score": "high"},
    {"text": "a list", "score": [5], "meta": {"lang": "de"}},
    {"text": "a large score", "score": 2**64 - 1, "quality": 1.5, "meta": {"lang": "fr"}},
    {"text": "no fields"},
    {"text": 7, "score": 5},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of four formats, one with mixed types and broken lines, and a store with their fields."""
    folder = tmp_path_factory.mktemp("kept")
    write(folder, records(120, 1))
    with (folder / FILES[0]).open("ab") as file:
        file.write(b"\n" + b"\n".join(json.dumps(row).encode() for row in MIXED) + b'\n{"sco\n')
    made.build(recipe(sources(keep=KEEP)), folder, folder / "store", is_store=True)
    return folder


def recipe(own, **changes):
    changes = {"tasks": UL2R, "documents": {"max_bad_fraction": 1}, **changes}
    return made.table(own, **{"output": {"shard_text_bytes": 20_000}, **changes})


def of_store(own, store="store"):
    """Sources of the text, as sources of their store."""
    return [
        {
            **{key: value for key, value in one.items() if key != "keep"},
            "paths": [store],
            "format": "store",
        }
        for one in own
    ]


@pytest.mark.parametrize(
    "keys",
    [
        {"where": "score >= 3 and meta.lang in ('de', 'fr')"},
        {"where": "score >= 2", "repeat": 1.5, "sample": [0.1, 1.0]},
        {"repeat": "clip(quality, 0, 3)"},
        {"where": "meta.lang != 'en' or quality is null"},
    ],
    ids=str,
)
def test_a_dataset_of_the_store_uses_the_documents_that_one_of_the_text_uses(
    folder, tmp_path, keys
):
    own = sources(**keys)
    text = made.build(recipe(own), folder, tmp_path / "text")
    stored = made.build(recipe(of_store(own)), folder, tmp_path / "stored")
    assert contents(tmp_path / "text") == contents(tmp_path / "stored") != {}
    ledgers = [outcome.manifest["ledger"]["sources"] for outcome in (text, stored)]
    for name in ledgers[0]:
        for kind in ("documents", "tokens"):
            assert ledgers[0][name][kind] == ledgers[1][name][kind], name
    assert stored.manifest["fingerprint"] == text.manifest["fingerprint"]
    assert faults_of(tmp_path / "stored", -1) == []


@pytest.mark.long
def test_a_dataset_can_be_verified_from_the_text_and_from_the_store(folder, tmp_path):
    own = sources(where="score >= 3", repeat="clip(quality, 0, 2)")
    made.build(recipe(own), folder, tmp_path / "text")
    made.build(recipe(of_store(own)), folder, tmp_path / "stored")
    moved = {one["name"]: f"store:{folder / 'store'}" for one in own}
    assert faults_of(tmp_path / "text", -1, **moved) == []
    assert faults_of(tmp_path / "stored", -1, **dict.fromkeys(moved, str(folder))) == []


def test_a_store_with_fields_is_sound_and_the_same_with_any_workers(folder, tmp_path):
    assert faults_of(folder / "store", -1) == []
    made.build(recipe(sources(keep=KEEP)), folder, tmp_path / "again", 2, is_store=True)
    assert made.contents(folder / "store", "shards") == made.contents(tmp_path / "again", "shards")
    without = made.build(recipe(sources()), folder, tmp_path / "without", is_store=True)
    names = open_arrays((without.out / shard_name(0)).read_bytes(), "").keys()
    assert not [name for name in names if name.startswith("field_")]


def test_fields_that_are_not_kept_or_not_there_are_refused(folder, tmp_path):
    with pytest.raises(RecipeError, match="reads 'lang', which the token store .* score, quality"):
        made.build(recipe(of_store(sources(where="lang == 'de'"))), folder, tmp_path / "out")
    with pytest.raises(
        SourceError, match="there is no field 'scoer' to keep; the fields are 'text'"
    ):
        table = recipe([{"name": "c", "paths": ["c.parquet"], "keep": ["scoer"]}])
        made.build(table, folder, tmp_path / "out", is_store=True)
    made.write_texts(tmp_path, ["one", "two"])
    with pytest.raises(RecipeError, match=r"sources\[0\].keep: .*whose documents have no fields"):
        made.build(
            recipe([{"paths": ["*.txt"], "keep": ["a"]}]), tmp_path, tmp_path / "o", is_store=True
        )
    with pytest.raises(RecipeError, match="keep comes from the store"):
        made.build(
            recipe([{**of_store(sources())[0], "keep": ["score"]}]), folder, tmp_path / "out"
        )


TABLE = pa.table(
    {
        "i": pa.array([1, None, -(2**63)]),
        "u": pa.array([2**64 - 1, 0, None], pa.uint64()),
        "b": pa.array([1, 2, None], pa.int8()),
        "x": [0.1, math.nan, math.inf],
        "f": pa.array([0.1, 0.7, None], pa.float32()),
        "h": pa.array(np.array([0.1, 0.5, 2], np.float16)),
        "ok": [True, None, False],
        "t": ["b", "a", None],
        "d": pa.array(["b", None, "b"]).dictionary_encode(),
        "n": pa.nulls(3),
        "l": [[1], None, []],
        "o": [{"a": 1}, None, {"a": 2}],
        "p": pa.array(["1.10", "2.20", None]).cast(pa.decimal128(9, 2)),
        "day": pa.array([date(2026, 1, 31), None, date(1960, 1, 1)]),
        "hour": pa.array([86_400_001, None, -86_400_000]).view(pa.date64()),
        "at": pa.array([1, None, -1], pa.timestamp("ms")),
        "zone": pa.array([1, None, -1], pa.timestamp("ns", "Europe/Berlin")),
    }
)


def test_each_type_is_kept_as_an_expression_reads_it():
    notes, names = FieldNotes(TABLE.column_names), TABLE.column_names
    columns = dict(zip(names, TABLE.combine_chunks().columns, strict=True))
    columns = {name: column.combine_chunks() for name, column in columns.items()}
    notes.add(5, [FieldColumns(np.array([0, 2, 4]), columns)])  # Documents 1 and 3 are unreadable.
    kept = notes.at(np.arange(5))
    assert kept.texts == [b"a", b"b"] and kept.kinds.max() == len(TYPES)
    shard = _Columns()
    shard.add(part_offsets=[5], **kept.columns(0))
    arrays = {name: shard.array(name) for name in ("part_offsets", *shard.of)}
    found: dict[str, list] = {name: [None] * 5 for name in names}
    for rows, of_rows in reader_of_part(arrays, 0, names, slice(0, 5))(names):
        for name, column in of_rows.items():
            for row, value in zip(rows.tolist(), column.to_pylist(), strict=True):
                found[name][row] = value.decode() if isinstance(value, bytes) else value
    wanted = {name: column.to_pylist() for name, column in columns.items()}
    wanted["x"][1], wanted["l"], wanted["o"] = None, [[], None, []], [{}, None, {}]
    wanted["p"] = [1.1, 2.2, None]
    for name, values in found.items():
        assert values[::2] == wanted[name] and values[1::2] == [None, None], name


def test_removed_documents_lose_their_fields(folder, tmp_path):
    own = [{"name": "a", "paths": ["a.jsonl"], "keep": ["score", "text"]}]
    made.build(recipe(own), folder, tmp_path / "store", is_store=True)
    (folder / "lists.jsonl").write_text('{"source": "a", "file": "a.jsonl", "doc": 0}\n')
    remove_documents(tmp_path / "store", folder / "lists.jsonl", tmp_path / "less", made.Silent())
    first = json.loads((folder / "a.jsonl").read_bytes().split(b"\n")[0])["text"].encode()
    assert first in b"".join(made.contents(tmp_path / "store", "shards").values())
    assert first not in b"".join(made.contents(tmp_path / "less", "shards").values())
    assert faults_of(tmp_path / "less") == []
    chosen = [{"name": "a", "paths": [str(tmp_path / "less")], "format": "store"}]
    chosen[0]["where"] = "text is not null"
    made.build(recipe(chosen), folder, tmp_path / "built")
    assert faults_of(tmp_path / "built", ALL) == []
    with pytest.raises(SourceError, match="from a token store without the fields of removed"):
        faults_of(tmp_path / "built", ALL, a=folder)


def test_forged_fields_are_found(folder):
    plan = open_plan(folder / "store")
    name = next(name for name in made.contents(folder / "store", "shards"))
    arrays = dict(open_arrays((folder / "store" / name).read_bytes(), name))
    counts, removed = fields_of_parts(plan, arrays), np.zeros(len(arrays["position"]), bool)
    assert set(counts) == {3} and wrong_fields(arrays, removed, counts) == []
    is_text = np.flatnonzero(arrays["field_kinds"] == TEXT)[0]

    def changed(name, place, value):
        array = np.array(arrays[name])
        array[place] = value
        return wrong_fields({**arrays, name: array}, removed, counts)

    assert changed("field_kinds", 0, len(TYPES) + 1)[0][0] == "P4"
    assert changed("field_values", is_text, -1)[0][0] == "P4"
    assert changed("field_values", is_text, 1 << 40)[0][0] == "P4"
    assert changed("field_offsets", -1, 5)[0][0] == "P4"
    assert changed("field_text_offsets", 0, 1)[0][0] == "P4"
    without = {key: value for key, value in arrays.items() if not key.startswith("field_")}
    assert wrong_fields(without, removed, counts)[0][0] == "P4"
    removed[0] = True
    assert wrong_fields(arrays, removed, counts) == [("P23", "a removed document has fields")]
    erased = {**arrays, **without_fields(arrays, removed, counts)}
    assert wrong_fields(erased, removed, counts) == []


def test_a_store_of_tokens_keeps_fields(tmp_path):
    rows = [{"input_ids": [i, i + 1, 5], "score": i % 4} for i in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet", row_group_size=20)
    own = [
        {"name": name[0], "paths": [name], "format": "tokens"} for name in ("a.jsonl", "b.parquet")
    ]
    kept = [{**one, "keep": "score"} for one in own]
    made.build(recipe(kept), tmp_path, tmp_path / "store", is_store=True)
    chosen = [{**one, "where": "score == 3"} for one in own]
    made.build(recipe(chosen), tmp_path, tmp_path / "text")
    made.build(recipe(of_store(chosen)), tmp_path, tmp_path / "stored")
    assert contents(tmp_path / "text") == contents(tmp_path / "stored")
    assert sum(contents(tmp_path / "stored").values()) == 30


def test_a_dataset_of_the_text_does_not_use_keep(folder, tmp_path):
    own = {"name": "c", "paths": ["c.parquet"]}
    made.build(recipe([own]), folder, tmp_path / "out")
    before = made.contents(tmp_path / "out")
    made.build(recipe([{**own, "keep": KEEP}]), folder, tmp_path / "out")  # This resumes the build.
    made.build(recipe([{**own, "keep": KEEP}]), folder, tmp_path / "again")
    assert made.contents(tmp_path / "out") == before == made.contents(tmp_path / "again")
