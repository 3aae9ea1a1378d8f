from types import SimpleNamespace

import numpy as np
import pytest

from packprep.building import work
from packprep.building.plan import open_plan
from packprep.building.segments import LeftOut
from packprep.building.work import make_shard
from packprep.dataset.shard import encode
from packprep.sources.formats import Decoders
from tests import made


def bytes_of(made_shard):
    return b"".join(encode(made_shard.arrays))


def test_a_shard_is_a_function_of_plan_and_number_alone(built):
    plan = open_plan(built.out)
    alone = [bytes_of(make_shard(plan, b)) for b in range(plan.shards)]
    again = open_plan(built.out)
    decoders = Decoders()
    backwards = [bytes_of(make_shard(again, b, decoders)) for b in reversed(range(plan.shards))]
    assert backwards[::-1] == alone
    assert alone == list(made.contents(built.out, "shards").values())


def test_a_shard_may_have_no_rows(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", ["x" * 3000, "y"])
    table = made.table("a.jsonl", output={"shard_text_bytes": 300})
    outcome = made.build(table, tmp_path, tmp_path / "out")
    rows = [entry["rows"] for entry in outcome.manifest["shards"]]
    assert len(rows) >= 9 and rows.count(0) >= 7 and sum(rows) >= 6
    nothing = make_shard(outcome.plan, rows.index(0))
    assert nothing.arrays["tokens"].shape == (0, 512) and nothing.ledger["rows"] == 0
    # A document without a segment is rejected for the first reason that applies.
    for long, counts, words in [
        ("split", {"elsewhere": 1, "unfit": 5}, "9 tokens"),
        ("split", {"unfit": 5, "too_long": 1}, "a place of media of up to 5 tokens fits into no"),
        ("split", {"too_long": 1}, "9 tokens do not fit in one segment"),
        ("drop", {}, "9 tokens do not fit in one segment"),
        ("drop", {"untrained": 4}, "nothing predicts what is trained"),
        ("truncate", {"apart": 1}, 'none of the tokens that documents.long = "truncate" keeps'),
        ("split", {"apart": 1}, "each of its answers is in another piece"),
        ("split", {}, "nothing predicts what is trained"),
    ]:
        lost = LeftOut(*(np.array([counts.get(name, 0)]) for name in LeftOut._fields))
        plan = SimpleNamespace(recipe=SimpleNamespace(documents=SimpleNamespace(long=long)))
        assert work._why_left_out(plan, lost, 0, 9)[1].startswith(words)


@pytest.mark.parametrize("algorithm", ["best_fit", "first_fit", "next_fit", "concat"])
@pytest.mark.parametrize("mult", [1, 8])
def test_every_algorithm_makes_shards_that_balance(built, tmp_path, algorithm, mult):
    if algorithm == "concat" and mult > 1:
        return
    packing = {"algorithm": algorithm, "pad_seq_to_mult": mult}
    tasks = [{"preset": "prefix_lm" if algorithm == "concat" else "ul2r"}]
    table = {
        **built.table,
        "packing": packing,
        "tasks": tasks,
        "output": {"shard_text_bytes": "1MiB"},
    }
    manifest = made.build(table, built.base, tmp_path / "out").manifest
    ledger, whole = manifest["ledger"], built.outcome.manifest["ledger"]
    for name in ("web", "books", "notes"):
        assert ledger["sources"][name]["tokens"] == whole["sources"][name]["tokens"]
    assert ("cu_seqlens_padded" in make_shard(open_plan(tmp_path / "out"), 0).arrays) == (mult > 1)


def test_next_fit_keeps_document_order(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", made.texts(300))
    table = made.table("a.jsonl", packing={"algorithm": "next_fit"}, output={})
    arrays = make_shard(made.build(table, tmp_path, tmp_path / "out").plan, 0).arrays
    places = list(
        zip(arrays["segment_doc"].tolist(), arrays["segment_start"].tolist(), strict=True)
    )
    assert places == sorted(places)


def test_max_segments_per_row_is_kept_and_loses_nothing(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", made.texts(300, mean_bytes=60))
    table = made.table("a.jsonl", packing={"max_segments_per_row": 2}, output={})
    outcome = made.build(table, tmp_path, tmp_path / "out")
    arrays = make_shard(outcome.plan, 0).arrays
    assert np.diff(arrays["row_offsets"]).max() == 2
    assert outcome.manifest["ledger"]["sources"]["source0"]["documents"]["used"] == 300


def test_the_last_row_s_padding_is_told_apart(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", ["x" * 100])
    for multiple, physical in ((1, 101), (8, 104)):
        table = made.table(
            "a.jsonl", tasks=[{"preset": "causal"}], packing={"pad_seq_to_mult": multiple}
        )
        ledger = made.build(table, tmp_path, tmp_path / f"out{multiple}").manifest["ledger"]
        assert ledger["row_padding"] == 512 - physical
        # what is inside of it, too
        assert ledger["last_row_padding"] == 512 - 101 and ledger["last_rows"] == 1


def test_progress_is_told(built):
    told = []
    reading = make_shard(
        open_plan(built.out), 0, progress=lambda *counts: told.append(counts)
    ).documents
    assert np.sum(told, axis=0)[0] == sum(reading.read.values())
