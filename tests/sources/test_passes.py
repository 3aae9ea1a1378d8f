"""Documents that are chosen and weighted by the fields of their records."""

import gzip
import json
import math
import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packprep.building.forecast import forecast
from packprep.building.plan import open_plan, stored_plan
from packprep.building.planning import look_up, make_plan
from packprep.dataset.shard import open_shard
from packprep.documents import sample
from packprep.errors import BuildError, PlanError, RecipeError, SourceError
from packprep.format.json_files import receipt_name, shard_name
from packprep.inspection.document import describe_document
from packprep.recipe import Source, read_recipe
from packprep.removing import remove_documents
from packprep.restoring import restored_documents
from packprep.sources.formats import Choice, parquet
from packprep.sources.passes import ByFields, FieldColumns, Passes
from tests import made
from tests.twin.check import verify_with_twin
from tests.verification.damage import edit_manifest, edit_plan, edit_receipt, faults_of, sign

WHERE = "score >= 3 and meta.lang in ('de', 'fr')"
FILES = ("a.jsonl", "b.jsonl.gz", "c.parquet", "d.arrow")
CAUSAL, UL2R = [{"preset": "causal"}], [{"preset": "ul2r"}]


def records(count: int, seed: int) -> list[dict]:
    """Records with a whole score or none, a quality and a nested language."""
    chance = random.Random(seed)
    return [
        {
            "text": f"{i} {text}",
            "score": chance.choice([0, 1, 2, 3, 4, 5, None]),
            "quality": chance.random() * 3,
            "meta": {"lang": chance.choice(["de", "fr", "en"])},
        }
        for i, text in enumerate(made.texts(count, seed))
    ]


def write(folder, rows):
    """The records as JSON Lines, compressed lines, Parquet and Arrow."""
    lines = "\n".join(json.dumps(row) for row in rows).encode()
    made.write(folder / FILES[0], lines)
    made.write(folder / FILES[1], gzip.compress(lines))
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, folder / FILES[2], row_group_size=30)
    with (
        pa.OSFile(str(folder / FILES[3]), "wb") as file,
        pa.ipc.new_file(file, table.schema) as writer,
    ):
        for batch in table.to_batches(max_chunksize=35):
            writer.write_batch(batch)


def sources(**keys):
    return [{"name": name[0], "paths": [name], **keys} for name in FILES]


def build(folder, out, own, workers=0, **changes):
    changes = {"tasks": CAUSAL, "output": {"shard_text_bytes": 20_000}, **changes}
    return made.build(made.table(own, **changes), folder, folder / out, workers)


def contents(out):
    """How often each source uses each document, by its content tokens."""
    plan, found = open_plan(out), Counter()
    for number in range(plan.shards):
        shard = open_shard(out / shard_name(number), plan.recipe.seq_length, plan.token_dtype)
        documents = restored_documents(plan, shard.arrays, "")
        for d, end in enumerate(np.cumsum(documents.lengths).tolist()):
            begin = end - int(documents.lengths[d]) + int(documents.bos[d])
            ids = documents.tokens[begin : end - int(documents.eos[d])]
            found[int(documents.source[d]), ids.tobytes()] += 1
    return found


def counts(outcome):
    """(used documents, used tokens) by source."""
    ledger = outcome.manifest["ledger"]["sources"]
    return {name: (own["documents"]["used"], own["tokens"]["used"]) for name, own in ledger.items()}


def is_wanted(row):
    return row["score"] is not None and row["score"] >= 3 and row["meta"]["lang"] in ("de", "fr")


@pytest.mark.every_case
@pytest.mark.parametrize("tasks", [CAUSAL, UL2R], ids=["causal", "ul2r"])
def test_where_and_repeat_use_the_documents_of_a_corpus_that_was_made_so_before(tmp_path, tasks):
    rows = records(60, 1)
    given, before = tmp_path / "given", tmp_path / "before"
    write(given, rows)
    twice = [row for row in rows if is_wanted(row) for _ in range(int(row["score"]) - 2)]
    write(before, twice)
    own = sources(where=WHERE, repeat="clip(score - 2, 0, 4)")
    outcome = build(given, "out", own, tasks=tasks)
    expected = build(before, "out", sources(), tasks=tasks)
    assert contents(given / "out") == contents(before / "out") != Counter()
    assert counts(outcome) == counts(expected)
    wanted = [row for row in rows if is_wanted(row)]
    passes = Counter(str(int(row["score"]) - 2) for row in wanted)
    for own in outcome.manifest["ledger"]["sources"].values():
        assert own["documents"]["passes"] == passes
        assert own["documents"]["filtered"] == len(rows) - len(wanted)
        assert own["documents"]["rejected"] == {}
    if tasks == UL2R:
        report = verify_with_twin(given / "out", -1)
        assert report["listed"] == [] and report["twin"] == report["segments"]


def test_where_leaves_out_documents_of_a_repeated_source_as_the_twin_does(tmp_path):
    rows = records(60, 2)
    write(tmp_path, rows)
    own = sources(where=WHERE, repeat=2.5, sample=[0.1, 1.0])
    outcome = build(tmp_path, "out", own, output={"shard_text_bytes": 10_000})
    assert len(outcome.manifest["shards"]) > 2
    for name, source in outcome.manifest["ledger"]["sources"].items():
        assert 0 < source["documents"]["filtered"] < len(rows), name
        assert "passes" not in source["documents"]
    report = verify_with_twin(tmp_path / "out", -1)
    assert report["listed"] == [] and report["twin"] == report["segments"]


@pytest.mark.long
def test_workers_tasks_of_an_array_and_resumed_builds_give_the_same_bytes(tmp_path):
    write(tmp_path, records(60, 2))
    own = sources(where=WHERE, repeat="clip(quality, 0, 3)")
    build(tmp_path, "one", own)
    expected = made.contents(tmp_path / "one")
    build(tmp_path, "two", own, 2)
    assert made.contents(tmp_path / "two") == expected
    recipe = made.table(own, tasks=CAUSAL, output={"shard_text_bytes": 20_000})
    for task in range(2):
        made.build(recipe, tmp_path, tmp_path / "array", array=(task, 2))
    assert made.contents(tmp_path / "array") == expected
    for name in ("dataset.json", shard_name(1), receipt_name(1)):
        (tmp_path / "two" / name).unlink()
    build(tmp_path, "two", own)
    assert made.contents(tmp_path / "two") == expected


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_gives_the_same_passes(tmp_path, workers):
    write(tmp_path, records(120, 2))
    own = sources(where=WHERE, repeat="clip(quality, 0, 3)")
    build(tmp_path, "none", own)
    build(tmp_path, "some", own, workers)
    assert made.contents(tmp_path / "none") == made.contents(tmp_path / "some")


def test_a_build_uses_and_repeats_the_documents_that_duckdb_counts(tmp_path):
    """DuckDB reads the same files, and counts in SQL."""
    duckdb = pytest.importorskip("duckdb", reason="the judge of expressions")
    write(tmp_path, records(90, 13))
    where, repeat = "not (score < 2) or meta.lang is null", "coalesce(score, 1) - 2 * (quality / 2)"
    in_sql = "NOT (score < 2) OR meta.lang IS NULL", "coalesce(score, 1) - 2 * (quality / 2)"
    whole = f"greatest(0, least(3, floor({in_sql[1]})))"
    for name in (FILES[0], FILES[1], FILES[2]):
        found = duckdb.sql(
            f"SELECT {whole}, count(*) FROM '{tmp_path / name}' WHERE {in_sql[0]} GROUP BY ALL"
        ).fetchall()
        own = {"name": "s", "paths": [name], "where": where, "repeat": f"floor({repeat})"}
        outcome = build(tmp_path, f"out_{name[0]}", [{**own, "max_repeat": 3}])
        documents = outcome.manifest["ledger"]["sources"]["s"]["documents"]
        expected = {str(int(number)): count for number, count in found if number}
        assert documents["passes"] == expected and len(expected) == 3
        assert documents["filtered"] == 90 - sum(expected.values())


def test_fractions_of_repeat_are_drawn_by_document_and_not_by_shard_or_other_documents(tmp_path):
    rows = records(300, 3)
    write(tmp_path, rows)
    own = sources(repeat="quality", max_repeat=2.5)
    few = build(tmp_path, "few", own, output={"shard_text_bytes": 1 << 20})
    many = build(tmp_path, "many", own)
    assert len(few.manifest["shards"]) < len(many.manifest["shards"])
    used = contents(tmp_path / "few")
    assert used == contents(tmp_path / "many")
    for s in range(len(FILES)):
        numbers = {row["text"].encode(): min(row["quality"], 2.5) for row in rows}
        drawn = 0.0
        for text, number in numbers.items():
            passes = used[s, np.frombuffer(text, np.uint8).astype(np.uint16).tobytes()]
            assert passes in (math.floor(number), math.ceil(number))
            drawn += passes - number
        # Each fraction f has the variance f (1 − f), at most 1/4.
        assert abs(drawn) < 4 * math.sqrt(len(rows) / 4)
    plan = stored_plan(tmp_path / "many")
    for source, own in zip(
        plan["sources"], many.manifest["ledger"]["sources"].values(), strict=True
    ):
        assert source["repeat"] == 2.5 and source["pass_shares"][0] == 1.0
        assert all(b <= a for a, b in pairwise(source["pass_shares"]))
        error = max(source["relative_error"], 0.001) * source["tokens"]
        assert abs(source["tokens"] - own["tokens"]["used"]) < 4 * error


def rare_records(folder):
    """Lines and a table that are larger than a sample. A few long documents have a high score, and
    lie together."""
    chance, rows = random.Random(5), []
    for i, text in enumerate(made.texts(5000, 5)):
        is_rare = i % 1000 < 40
        rows.append({"text": text * (1 + 2 * is_rare), "score": is_rare * 5 + chance.random()})
    lines = "\n".join(json.dumps(row) for row in rows).encode()
    made.write(folder / "a.jsonl", lines)
    pq.write_table(pa.Table.from_pylist(rows), folder / "c.parquet", row_group_size=500)
    own = [
        {"name": name[0], "paths": [name], "where": "score >= 5"} for name in (FILES[0], FILES[2])
    ]
    return own, [row for row in rows if row["score"] >= 5]


def planned(folder, own):
    """The sources of a plan, and the warnings of its forecast."""
    inputs = look_up(read_recipe(made.table(own, tasks=CAUSAL, output={}), folder), {})
    samples = []
    plan = make_plan(inputs, samples=samples)
    return plan["sources"], forecast(plan, inputs, samples)["warnings"]


def test_shares_and_totals_of_rare_documents_are_as_accurate_as_without_a_filter(
    tmp_path, monkeypatch
):
    own, kept = rare_records(tmp_path)
    tokens = sum(len(row["text"].encode()) for row in kept)
    for source in planned(tmp_path, own)[0]:
        assert source["tokens"] == pytest.approx(tokens, rel=0.01)
        assert source["documents"] == pytest.approx(len(kept), rel=0.1)
    shared = [{**one, "share": share} for one, share in zip(own, (0.75, 0.25), strict=True)]
    first, second = planned(tmp_path, shared)[0]
    assert first["tokens"] == pytest.approx(3 * second["tokens"], rel=0.01)
    assert first["repeat"] == 1.0 and second["repeat"] == pytest.approx(1 / 3, rel=0.01)
    # If a sample keeps few documents, all that the table has are counted.
    rarest = [len(row["text"].encode()) for row in kept if row["score"] >= 5.95]
    monkeypatch.setattr(sample, "PRECISE_WHOLE_BYTES", 1000)
    (source,), _ = planned(tmp_path, [{**own[1], "where": "score >= 5.95"}])
    assert 0 < len(rarest) < 20
    assert source["documents"] == len(rarest)
    assert source["tokens"] == pytest.approx(sum(rarest), rel=0.001)


def test_a_plan_says_how_uncertain_it_is_if_a_large_source_has_few_chosen_documents(
    tmp_path, monkeypatch
):
    own, kept = rare_records(tmp_path)
    monkeypatch.setattr(sample, "READ_BYTES", 200_000)
    tokens = sum(len(row["text"].encode()) for row in kept)
    found, warnings = planned(tmp_path, own)
    for source in found:
        assert 0.1 < source["relative_error"] < 2
        assert abs(source["tokens"] - tokens) < 4 * source["relative_error"] * source["tokens"]
        said = f"source {source['name']}: where keeps only"
        assert any(warning.startswith(said) for warning in warnings)


def test_a_record_that_cannot_be_judged_or_read_is_rejected_once(tmp_path):
    rows = [{"text": text, "score": 1} for text in made.texts(40, 6)]
    lines = [json.dumps(row).encode() for row in rows]
    lines[3] = b'{"text": "a score of another type", "score": "high"}'
    lines[5] = b'{"text": "broken", "score": 1'
    lines[7] = b'{"text": 7, "score": 1}'
    lines[9] = b'{"text": 7, "score": 0}'
    made.write(tmp_path / "a.jsonl", b"\n".join(lines))
    own = {"name": "a", "paths": ["a.jsonl"], "repeat": "clip(score * 2, 0, 2)"}
    outcome = build(tmp_path, "out", [own], documents={"max_bad_fraction": 1.0})
    documents = outcome.manifest["ledger"]["sources"]["a"]["documents"]
    assert documents["rejected"] == {"bad_field": 1, "malformed_json": 1, "not_a_string": 2}
    assert documents["filtered"] == 1
    assert documents["passes"] == {"1": 2, "2": 37} and documents["used"] == 72
    report = verify_with_twin(tmp_path / "out", -1)
    assert report["listed"] == []


def test_a_filtered_document_is_shown_as_such_and_pruned_passes_are_named(tmp_path):
    rows = records(60, 7)
    write(tmp_path, rows)
    build(tmp_path, "out", sources(where="score >= 3", repeat="clip(score - 2, 0, 3)"))
    for i, row in enumerate(rows[:12]):
        found = describe_document(tmp_path / "out", "c", str(i), {}, from_plan=True)
        outcomes = [use["outcome"] for use in found["files"][0]["uses"]]
        passes = max(0, int(row["score"] or 0) - 2)
        assert outcomes == ["used"] * passes + ["not repeated" if passes else "filtered"] * (
            3 - passes
        )


@pytest.mark.long
def test_removing_and_several_lengths_keep_the_counts_of_passes(tmp_path):
    write(tmp_path, records(80, 8))
    own = sources(where="score >= 2", repeat="clip(quality, 0, 2)")
    recipe = made.table(own, tasks=CAUSAL, seq_lengths=[256, 1024])
    del recipe["seq_length"]
    outcomes = made.build_lengths(recipe, tmp_path, tmp_path / "lengths")
    passes = [one.manifest["ledger"]["sources"]["d"]["documents"]["passes"] for one in outcomes]
    assert passes[0] == passes[1] and sum(passes[0].values())
    for one in outcomes:
        assert faults_of(one.out, -1) == []
    listed = [{"source": "d", "file": "d.arrow", "doc": i} for i in range(30)]
    made.write(tmp_path / "list", b"".join(json.dumps(one).encode() + b"\n" for one in listed))
    remove_documents(outcomes[0].out, tmp_path / "list", tmp_path / "without", made.Silent())
    assert faults_of(tmp_path / "without", -1) == []


def test_forged_passes_are_found(tmp_path):
    write(tmp_path, records(30, 9))
    build(tmp_path, "out", sources(repeat="clip(score, 0, 2)"))
    assert faults_of(tmp_path / "out") == []

    def change(receipt):
        passes = receipt["ledger"]["sources"]["c"]["documents"]["passes"]
        passes["1"], passes["2"] = passes["1"] + 2, passes["2"] - 1

    def change_sum(manifest):
        change({"ledger": manifest["ledger"]})

    edit_receipt(tmp_path / "out", change)
    edit_manifest(tmp_path / "out", change_sum)
    sign(tmp_path / "out")
    assert {fault["promise"] for fault in faults_of(tmp_path / "out")} == {"P21"}
    # Other shares of the passes would divide the source in another way.
    edit_plan(tmp_path / "out", lambda plan: plan["sources"][2].update(pass_shares=[1.0, 0.1]))
    assert "P22" in {fault["promise"] for fault in faults_of(tmp_path / "out")}
    edit_plan(tmp_path / "out", lambda plan: plan["sources"][2].update(pass_shares=[1.0]))
    with pytest.raises(PlanError, match="pass_shares does not match the passes of its repeat"):
        faults_of(tmp_path / "out")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"where": "score >="}, r"sources\[0\].where = 'score >=': "),
        ({"where": "score + 1"}, r"sources\[0\].where"),
        ({"where": "1 > 0"}, "no field of the record"),
        ({"repeat": "2"}, "is a number in quotes\nhint: write 2, without quotes"),
        ({"repeat": "score"}, "has no upper limit, but a document has at most 1000 passes"),
        ({"repeat": "clip(score, 0, 2000)"}, "may be 2000"),
        ({"repeat": "clip(score, -2, 0)"}, "is never above 0"),
        ({"max_repeat": 3.0}, "max_repeat limits a repeat that is an expression"),
        ({"where": "scoer >= 3"}, r"no field 'scoer'; the fields are .*'score' \(int64\)"),
        ({"where": "meta.lang >= 3"}, "meta.lang"),
    ],
    ids=lambda case: str(case)[:30],
)
def test_expressions_that_cannot_be_used_are_refused(tmp_path, keys, message):
    write(tmp_path, records(10, 10))
    with pytest.raises((RecipeError, SourceError), match=message):
        build(tmp_path, "out", [{"name": "c", "paths": ["c.parquet"], **keys}])


def test_a_field_that_no_json_record_has_or_that_has_another_type_is_refused(tmp_path):
    write(tmp_path, records(10, 10))
    there = r"the fields are 'text' \(a string\), 'score' .*, 'meta.lang' \(a string\)"
    wrong = {
        "scoer >= 3": "where keeps none of 10 sampled documents: no record has the field scoer",
        "meta.lang > 3": "where: > takes values of one kind, but meta.lang is a text",
    }
    for where, message in wrong.items():
        own = {"name": "a", "paths": ["a.jsonl"], "where": where}
        with pytest.raises(RecipeError, match=f"{message}.*{there}"):
            build(tmp_path, "out", [own])


def test_a_source_whose_documents_are_all_left_out_is_refused(tmp_path, monkeypatch):
    write(tmp_path, [{"text": f"{i} " * 99, "score": i} for i in range(300)])
    monkeypatch.setattr(sample, "WHOLE_BYTES", 2000)
    monkeypatch.setattr(sample, "READ_BYTES", 9000)
    own = {"name": "a", "paths": ["a.jsonl"], "where": "score > 999"}
    with pytest.raises(BuildError, match="leaves out all 300 documents of source 'a'"):
        build(tmp_path, "out", [own, {"paths": ["d.arrow"]}])
    with pytest.raises(RecipeError, match=r"where keeps none of \d+ sampled documents"):
        build(tmp_path, "share", [{**own, "share": 1.0}])


def test_a_token_store_without_fields_is_refused(tmp_path):
    write(tmp_path, records(20, 12))
    own = {"name": "a", "paths": ["a.jsonl"], "where": "score >= 1"}
    made.build(made.table([own]), tmp_path, tmp_path / "store", is_store=True)
    assert stored_plan(tmp_path / "store")["sources"][0]["documents"] == 20
    with pytest.raises(RecipeError, match="the token store of source 'a' does not keep"):
        build(tmp_path, "out", [{**own, "paths": ["store"], "format": "store"}])
    build(tmp_path, "out", [own])
    faults = faults_of(tmp_path / "out", -1, a=f"store:{tmp_path / 'store'}")
    assert "does not keep the field 'score', but where = 'score >= 1' reads it" in str(faults)


def test_files_without_fields_are_refused(tmp_path):
    made.write_texts(tmp_path, ["one", "two"])
    with pytest.raises(RecipeError, match=r"sources\[0\].where: .*d0000.txt is read as text"):
        build(tmp_path, "out", [{"paths": ["*.txt"], "where": "score >= 3"}])


def of_rows(**columns):
    arrays = {name: pa.array(values) for name, values in columns.items()}
    return lambda names: [FieldColumns(np.arange(len(next(iter(arrays.values())))), arrays)]


def test_numbers_are_limited_and_null_is_no_pass():
    passes = Passes.of(Source(paths=("a",), where="ok", repeat="x", max_repeat=3), 0)
    found, bad = passes.numbers(
        6,
        of_rows(
            x=[1.5, -2.0, 9.0, None, math.inf, math.nan], ok=[True, True, True, True, True, True]
        ),
    )
    assert found.tolist() == [1.5, 0.0, 3.0, 0.0, 3.0, 0.0] and not bad
    assert passes.fields == ("ok", "x") and passes.most == 3.0 and passes.uses == 3
    assert passes.shares(np.array([4.0, 2.0, 5.0])) == [1.0, 0.5, 1.0]
    assert passes.shares(np.zeros(3)) == [0.0] * 3
    assert Passes.of(Source(paths=("a",), where="ok"), 0).shares(np.ones(1)) is None


def test_the_passes_of_a_document_are_its_first_ones():
    passes = Passes.of(Source(paths=("a",), repeat="clip(x, 0, 4)"), 0)
    positions = np.arange(2000)
    read_fields = of_rows(x=[1.25] * len(positions))
    own = np.ones(len(positions), bool)
    taken = []
    for use in range(4):
        selector = ByFields(passes, use, lambda file: np.uint64(7))
        taken.append(selector(0, positions, read_fields, own))
        assert selector.counts == ({1: 1490, 2: 510} if use == 0 else {})
    assert taken[0].all() and taken[1].sum() == 510 and not taken[2].any()
    for own, count in ((positions < 100, 100), (None, 2000)):  # Only the work range is counted.
        selector = ByFields(passes, 0, lambda file: np.uint64(7))
        choice = Choice(np.uint64(1), 1 << 31, selector)
        assert choice(0, positions, positions, read_fields, own).sum() == pytest.approx(1000, abs=9)
        assert selector.counts.total() == count


def test_a_row_group_without_a_used_row_is_counted_and_not_read(tmp_path, monkeypatch):
    rows = sorted(records(120, 11), key=lambda row: row["quality"])
    write(tmp_path, rows)
    read_texts = []
    read_rows = parquet.read_rows
    monkeypatch.setattr(
        parquet,
        "read_rows",
        lambda batch, values, *others: (
            read_texts.append(len(values["text"])) or read_rows(batch, values, *others)
        ),
    )
    own = [{"name": "c", "paths": ["c.parquet"], "where": "quality > 2.9"}]
    outcome = build(tmp_path, "out", own)
    documents = outcome.manifest["ledger"]["sources"]["c"]["documents"]
    wanted = sum(row["quality"] > 2.9 for row in rows)
    assert documents["used"] == wanted > 0 and documents["filtered"] == len(rows) - wanted
    assert sum(read_texts) == 2 * wanted  # once for the sample
