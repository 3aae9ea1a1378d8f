"""Whole builds: the same bytes however the work is spread or divided; what is refused, and what is
left out."""

import gc
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

import packprep
from packprep.building import run as building_run
from packprep.building.array_tasks import share_of
from packprep.building.distributed import status_of
from packprep.building.plan import open_plan, stored_plan
from packprep.building.run import build as run_build
from packprep.errors import BuildError, PlanError, RecipeError, SourceError
from packprep.format.json_files import MANIFEST_NAME, receipt_name, shard_name
from packprep.inspection.card import origin
from packprep.objectives.tasks import complete
from packprep.recipe import read_recipe
from packprep.removing import remove_documents
from packprep.storage import LocalFolder
from packprep.verification import ALL, verify_dataset
from tests import made
from tests.tokenizer import tokenizers_made
from tests.verification.damage import edit_manifest

# The same bytes


@pytest.mark.alike(1)
@pytest.mark.parametrize("workers", [2, 5])
def test_fault_22_any_number_of_workers_gives_the_same_bytes(built, tmp_path, workers):
    outcome = made.build(built.table, built.base, tmp_path / "out", workers)
    assert outcome.made == len(outcome.manifest["shards"]) > 5
    assert not building_run._plans  # a later build into the same folder reads its own plan
    assert made.contents(tmp_path / "out") == made.contents(built.out)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_fault_22_array_tasks_in_any_order_give_the_same_bytes_and_the_last_publishes(
    built, tmp_path, order, monkeypatch
):
    monkeypatch.setattr("packprep.building.run.LIST_AGAIN_S", 0)
    for i in order:
        outcome = made.build(built.table, built.base, tmp_path / "out", array=(i, 4))
        assert (outcome.manifest is not None) == (i == order[-1])
        assert outcome.made == len(share_of(i, 4, outcome.plan.shards))
    assert made.contents(tmp_path / "out") == made.contents(built.out)


@pytest.mark.long
def test_array_tasks_at_the_same_time_give_the_same_bytes_and_any_build_publishes(built, tmp_path):
    shutil.copytree(built.base, tmp_path / "c", ignore=shutil.ignore_patterns("out"))
    out = tmp_path / "out"
    code = "import functools; made.build = functools.partial(made.build, array=({}, 4))"
    tasks = [
        made.start_build(tmp_path / "c", built.table, out, before=code.format(i)) for i in range(4)
    ]
    said = [task.communicate(timeout=120)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0] * 4, said
    outcome = made.build(built.table, tmp_path / "c", out)
    assert outcome.made == 0 and outcome.manifest is not None
    for folder in ("shards", "rejects"):
        assert made.contents(out, folder) == made.contents(built.out, folder)
    assert not made.temporaries(out)


SILENT = """
import os, re, signal
from packprep.building import processes, run
from tests.building.test_processes import go_on_when_stopped
processes.SILENT_S, parent, begin = 0.5, os.getpid(), run.make_shard

def stopped(plan, number, *rest):
    if number == 1 and os.getpid() != parent:
        os.kill(os.getpid(), signal.SIGSTOP)
    return begin(plan, number, *rest)

def say(progress, message):
    print(message, flush=True)
    if "shard 1: worker" in message and "nothing" in message:
        go_on_when_stopped(int(re.findall(r"process (\\d+)", message)[0]))

run.make_shard, made.Silent.say = stopped, say
"""


@pytest.mark.long
def test_a_worker_that_was_stopped_is_said_to_be_waited_for(built, tmp_path):
    shutil.copytree(built.base, tmp_path / "c", ignore=shutil.ignore_patterns("out"))
    said, _ = made.start_build(
        tmp_path / "c", built.table, tmp_path / "out", 2, SILENT
    ).communicate(timeout=120)
    told = re.findall(
        r"shard 1: worker process \d+ (has reported nothing for 0.5 s|reports again)", said
    )
    pair = ["has reported nothing for 0.5 s", "reports again"]
    # a busy machine may keep it silent once more
    assert told == pair * (len(told) // 2) and told, said
    assert made.contents(tmp_path / "out", "shards") == made.contents(built.out, "shards")


def test_the_same_corpus_at_another_path_gives_the_same_shards(built, tmp_path):
    moved = tmp_path / "far" / "away"
    shutil.copytree(built.base, moved, ignore=shutil.ignore_patterns("out"))
    made.build(built.table, moved, tmp_path / "out")
    for folder in ("shards", "rejects"):
        assert made.contents(tmp_path / "out", folder) == made.contents(built.out, folder) != {}


@pytest.mark.long
def test_moved_files_go_on_and_change_no_byte(built, tmp_path):
    base, out = tmp_path / "c", tmp_path / "out"
    shutil.copytree(built.base, base, ignore=shutil.ignore_patterns("out"))
    made.build(built.table, base, out, array=(0, 2))
    shutil.move(base / "web", tmp_path / "elsewhere")
    with pytest.raises(SourceError, match=r"source 'web': web/\* matches no file"):
        made.build(built.table, base, out)
    outcome = made.build(built.table, base, out, moved={"web": str(tmp_path / "elsewhere")})
    assert outcome.manifest is not None
    assert made.contents(out, "shards") == made.contents(built.out, "shards")


def test_another_seed_gives_other_bytes_of_the_same_tokens(built, tmp_path):
    outcome = made.build({**built.table, "seed": 1}, built.base, tmp_path / "out")
    assert made.contents(tmp_path / "out", "shards") != made.contents(built.out, "shards")
    web = [o.manifest["ledger"]["sources"]["web"]["tokens"] for o in (outcome, built.outcome)]
    assert web[0] == web[1]


# What a build did before


def test_a_second_build_makes_nothing_and_says_so(built):
    before = made.contents(built.out)
    progress = made.Silent()
    outcome = made.build(built.table, built.base, built.out, progress=progress)
    assert outcome.made == 0 and outcome.missing == 0 and outcome.manifest == built.outcome.manifest
    shards = len(outcome.manifest["shards"])
    assert progress.begun == [(0, shards, 0)] and progress.ended == 1
    assert f"nothing to make: all {shards} shards are done" in progress.said
    assert made.contents(built.out) == before


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 3, 7])
def test_where_shards_are_fewer_than_workers_the_line_names_what_gives_each_one_shard(
    tmp_path, monkeypatch, workers
):
    monkeypatch.setattr(building_run, "WORKER_TEXT_BYTES", 1000)
    made.write_lines(tmp_path / "in/a.jsonl", [f"document {k} of some" for k in range(1000)])
    table = made.table([{"paths": ["a.jsonl"]}])

    def told_and_shards(out, **output):
        progress = made.Silent()
        outcome = made.build(
            {**table, "output": output}, tmp_path / "in", tmp_path / out, workers, progress=progress
        )
        return " ".join(progress.said), len(outcome.manifest["shards"])

    said, shards = told_and_shards("one")
    assert shards == 1 and f"1 shard for {workers} workers" in said
    [printed] = re.findall(r"--set output\.shard_text_bytes=(\d+) ", said)
    said, shards = told_and_shards("each", shard_text_bytes=int(printed))
    assert shards == workers and "--set" not in said


def test_a_task_of_an_array_says_how_many_shards_others_have_still_to_make(
    built, tmp_path, monkeypatch
):
    monkeypatch.setattr("packprep.building.run.LIST_AGAIN_S", 0)
    outcome = made.build(built.table, built.base, tmp_path / "out", array=(0, 2))
    assert (
        outcome.manifest is None
        and outcome.made > 0
        and outcome.missing == outcome.plan.shards - outcome.made > 0
    )


@pytest.fixture
def copied(built, tmp_path):
    """A build of its own, over a corpus of its own, to be changed."""
    shutil.copytree(built.base, tmp_path / "c", ignore=shutil.ignore_patterns("out"))
    made.build(built.table, tmp_path / "c", tmp_path / "out")
    return tmp_path / "c", tmp_path / "out"


def test_only_what_is_missing_is_made_again_and_the_result_is_the_same(built, copied):
    base, out = copied
    before = made.contents(out)
    for shard, name in ((1, shard_name(1)), (3, receipt_name(3)), (4, MANIFEST_NAME)):
        (out / name).unlink()
        outcome = made.build(built.table, base, out)
        assert outcome.made == (0 if name == MANIFEST_NAME else 1), shard
        assert made.contents(out) == before


def test_fault_23_a_shard_that_was_half_written_is_not_complete(built, copied):
    base, out = copied
    before = made.contents(out)
    half = before[shard_name(2)][: len(before[shard_name(2)]) // 2]
    (out / shard_name(2)).write_bytes(half)
    assert status_of(out)["missing"] == [2] and not status_of(out)["published"]
    assert made.build(built.table, base, out).made == 1
    assert made.contents(out) == before
    (out / receipt_name(5)).write_bytes(before[receipt_name(5)][:50])
    assert made.build(built.table, base, out).made == 1
    assert made.contents(out) == before


@pytest.mark.parametrize(
    "change, said",
    [
        ({"seed": 3}, "seed is 3 here and 0 in the plan"),
        ({"seq_length": 256}, "seq_length is 256 here and 512 in the plan"),
        (
            {"documents": {"prepend_bos": False}},
            "documents.prepend_bos is False here and True in the plan",
        ),
        ({"tasks": [{"preset": "causal"}]}, "tasks is .* in the plan"),
        (
            {"packing": {"algorithm": "next_fit"}},
            "packing.algorithm is 'next_fit' here and 'best_fit' in the plan",
        ),
        (
            {"output": {"shard_text_bytes": 99}},
            "output.shard_text_bytes is 99 here and 50000 in the plan",
        ),
    ],
)
def test_a_changed_recipe_is_refused_with_the_key_and_both_values(built, change, said):
    before = made.contents(built.out)
    with pytest.raises(
        PlanError,
        match=f"was started with another recipe or other inputs: .*{said}.*\n.*build into another folder",
    ):
        made.build({**built.table, **change}, built.base, built.out)
    assert made.contents(built.out) == before


def test_a_changed_key_of_a_source_or_a_task_is_named_with_its_place(built):
    sources = [dict(source) for source in built.table["sources"]]
    sources[1]["repeat"] = 2
    with pytest.raises(PlanError, match=r"sources\[1\].repeat is 2.0 here and 1.5 in the plan"):
        made.build({**built.table, "sources": sources}, built.base, built.out)


def test_a_changed_engine_goes_on(built):
    assert made.build({**built.table, "engine": "bytes"}, built.base, built.out).made == 0


def test_a_changed_tokenizer_is_refused(tmp_path):
    from tests.tokenizer import tokenizers_made

    made.write_lines(tmp_path / "a.jsonl", made.texts(20))
    table = made.table("a.jsonl", tasks=[{"preset": "causal"}])
    tokenizers = [tokenizers_made.gpt2_like(), tokenizers_made.llama3_like()]
    for i, tokenizer in enumerate(tokenizers):
        tokenizers_made.write(tmp_path / f"t{i}", tokenizer)
    made.build({**table, "tokenizer": "t0"}, tmp_path, tmp_path / "out")
    tokenizers_made.write(tmp_path / "t0", tokenizers[1])
    with pytest.raises(PlanError, match="the tokenizer changed .digest "):
        made.build({**table, "tokenizer": "t0"}, tmp_path, tmp_path / "out")


def test_a_changed_input_size_or_list_of_files_is_refused_by_name(built, copied):
    base, out = copied
    with open(base / "web" / "a.jsonl", "ab") as file:
        size = file.tell()
        file.write(b'{"text": "more"}\n')
    with pytest.raises(
        PlanError,
        match=f"input 'a.jsonl' of source 'web': {size} bytes in the plan, {size + 17} bytes now",
    ):
        made.build(built.table, base, out)
    os.truncate(base / "web" / "a.jsonl", size)
    made.write_texts(base / "notes", ["new"], prefix="z")
    with pytest.raises(
        PlanError, match="input 'z0000.txt' of source 'notes': no file in the plan, 3 bytes now"
    ):
        made.build(built.table, base, out)
    (base / "notes" / "z0000.txt").unlink()
    (base / "books" / "d.parquet").rename(base / "books" / "e.parquet")
    with pytest.raises(
        PlanError,
        match="input 'd.parquet' of source 'books': [0-9]+ bytes in the plan, no file now",
    ):
        made.build(built.table, base, out)


def test_an_output_without_its_plan_or_tokenizer_is_refused(built, copied):
    base, out = copied
    tokenizer = (out / "tokenizer.json").read_bytes()
    (out / "tokenizer.json").write_bytes(tokenizer.replace(b"<pad>", b"<bad>"))
    with pytest.raises(
        PlanError, match="tokenizer.json has digest .*\nhint: restore the original file"
    ):
        made.build(built.table, base, out)
    (out / "tokenizer.json").write_bytes(tokenizer)
    (out / "plan.json").unlink()
    with pytest.raises(
        PlanError, match="has files of a build, but no plan.json\nhint: restore plan.json"
    ):
        made.build(built.table, base, out)
    assert stored_plan(out) is None
    with pytest.raises(PlanError, match="no plan.json, so this is not a packprep output"):
        open_plan(out)


@pytest.mark.long
def test_a_plan_that_another_process_writes_after_one_looked_for_it_is_taken(built, tmp_path):
    class LateFolder(LocalFolder):
        """Another task plans, and makes its shards, between two looks of this one."""

        def exists(self, name: str) -> bool:
            if name == "receipts" and self.size("plan.json") is None:
                made.build(built.table, built.base, self.path, array=(1, 2))
            return super().exists(name)

    out = LateFolder(tmp_path / "out")
    outcome = run_build(read_recipe(built.table, built.base), out, made.Silent())
    assert outcome.manifest is not None and made.contents(out.path) == made.contents(built.out)


def test_a_tokenizer_that_was_left_without_a_plan_is_not_taken_for_the_recipe_s(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", ["x"])
    left = made.write(tmp_path / "out" / "tokenizer.json", b"{}\n")
    with pytest.raises(
        PlanError, match="tokenizer.json is another tokenizer, without a plan\nhint: remove it"
    ):
        made.build(made.table("a.jsonl"), tmp_path, tmp_path / "out")
    assert set(made.contents(tmp_path / "out")) == {"tokenizer.json"}
    left.unlink()
    assert made.build(made.table("a.jsonl"), tmp_path, tmp_path / "out").manifest is not None


def test_a_build_needs_bytes_to_read(tmp_path):
    made.write(tmp_path / "a.jsonl", b"")
    with pytest.raises(RecipeError, match="the inputs are empty"):
        made.build(made.table("a.jsonl"), tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Bad documents


def corpus_with_bad(folder, good, bad):
    lines = [json.dumps({"text": text}) for text in made.texts(good)] + ["{broken"] * bad
    np.random.default_rng(0).shuffle(lines)
    made.write(folder / "a.jsonl", "\n".join(lines).encode())


def test_bad_documents_are_counted_listed_and_left_out(tmp_path):
    corpus_with_bad(tmp_path, 300, 90)
    outcome = made.build(
        made.table("a.jsonl", documents={"max_bad_fraction": 0.3}), tmp_path, tmp_path / "out"
    )
    documents = outcome.manifest["ledger"]["sources"]["source0"]["documents"]
    assert documents == {"read": 390, "used": 300, "rejected": {"malformed_json": 90}}
    records = b"".join(made.contents(tmp_path / "out", "rejects").values()).splitlines()
    assert len(records) == 90
    record = json.loads(records[0])
    assert set(record) == {"source", "file", "position", "repeat", "reason", "detail"}
    data = (tmp_path / "a.jsonl").read_bytes()
    assert all(data[json.loads(r)["position"] :].startswith(b"{broken") for r in records)


def test_bad_documents_fail_stops_the_build_and_names_the_first(tmp_path):
    corpus_with_bad(tmp_path, 300, 90)
    table = made.table("a.jsonl", documents={"bad_documents": "fail"})
    for workers in (1, 2):
        with pytest.raises(
            SourceError, match="a.jsonl: document at [0-9]+: malformed_json.*\nhint: fix the file"
        ):
            made.build(table, tmp_path, tmp_path / f"out{workers}", workers)
        assert not (tmp_path / f"out{workers}" / MANIFEST_NAME).exists()
        assert not made.temporaries(tmp_path / f"out{workers}")


@pytest.mark.parametrize("is_store", [False, True])
def test_too_many_bad_documents_stop_a_build_at_its_start(tmp_path, is_store):
    corpus_with_bad(tmp_path, 300, 101)
    with pytest.raises(
        BuildError,
        match=(
            r"101 of 401 documents are bad \(malformed_json 101\), more than"
            r" documents.max_bad_fraction = 0.001 allows. "
            r".*a.jsonl: document at \d+: malformed_json: not JSON.*Nothing was built"
        ),
    ):
        made.build(made.table("a.jsonl"), tmp_path, tmp_path / "out", is_store=is_store)
    assert not (tmp_path / "out").exists() or not made.contents(tmp_path / "out")
    allowed = made.table("a.jsonl", documents={"max_bad_fraction": 0.3})
    assert made.build(allowed, tmp_path, tmp_path / "out", is_store=is_store).manifest is not None


def test_a_sample_that_leaves_it_open_whether_too_many_are_bad_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr("packprep.documents.sample.WHOLE_BYTES", 1 << 10)
    lines = [json.dumps({"text": text}) for text in made.texts(2000)]
    lines[::50] = [json.dumps({"tex": "word " * 50})] * 40
    made.write(tmp_path / "a.jsonl", "\n".join(lines * 5).encode())
    said = made.Silent()
    said.say = (messages := []).append
    recipe = read_recipe(made.table("a.jsonl"), tmp_path)
    with pytest.raises(
        BuildError,
        match=r"200 of 10000 documents are bad.*\n.* with the same --out .*: finished shards are kept",
    ):
        run_build(recipe, tmp_path / "out", said)
    assert [
        m
        for m in messages
        if re.search(
            r"warning: a build may fail: about \d\.\d% of the documents are bad, \d+ of a sample of",
            m,
        )
    ]


def test_a_sample_that_is_clear_stops_a_build_at_its_start(tmp_path, monkeypatch):
    monkeypatch.setattr("packprep.documents.sample.WHOLE_BYTES", 1 << 10)
    lines = [
        json.dumps({"tex" if i % 4 == 0 else "text": text})
        for i, text in enumerate(made.texts(2000))
    ]
    made.write(tmp_path / "a.jsonl", "\n".join(lines).encode())
    with pytest.raises(
        BuildError,
        match=r"about 2\d\.\d% of the documents are bad.*missing_text.*Nothing was built",
    ):
        made.build(made.table("a.jsonl"), tmp_path, tmp_path / "out")


def limited(fraction):
    return made.table("a.jsonl", documents={"max_bad_fraction": fraction})


def test_a_higher_max_bad_fraction_publishes_what_was_built(tmp_path):
    corpus_with_bad(tmp_path, 300, 101)
    out, plan = tmp_path / "out", tmp_path / "out/plan.json"
    with mock.patch("packprep.building.run.publish", lambda out, plan: None):
        made.build(limited(0.5), tmp_path, out)
    before = plan.read_bytes()
    assert "refused" not in status_of(out)  # by the limit of the plan they are let pass
    with pytest.raises(
        BuildError,
        match="101 of 401.*\n.*run the same command with the same --out and a higher documents.max_bad_fraction",
    ):
        made.build(limited(0.001), tmp_path, out)
    outcome = made.build(limited(0.3), tmp_path, out)
    assert (outcome.made, outcome.manifest["max_bad_fraction"]) == (
        0,
        0.3,
    ) and plan.read_bytes() == before
    assert outcome.manifest["recipe"]["documents"]["max_bad_fraction"] == 0.5
    for fraction in (0.3, 0.5, 0.001):  # what is published stays so
        assert made.build(limited(fraction), tmp_path, out).manifest == outcome.manifest
    same = made.build(limited(0.5), tmp_path, tmp_path / "same").manifest
    assert "max_bad_fraction" not in same and same["fingerprint"] == outcome.manifest["fingerprint"]
    # Verification, the card and what is made without some documents go by the limit that was used.
    for fraction, faults in ((0.3, 0), (0.5, 1)):
        recipe = complete(read_recipe(limited(fraction), tmp_path))
        report = verify_dataset(out, ALL, {}, (0, 1), 0, made.Silent(), recipe=recipe)
        assert len(report["listed"]) == faults, report
    assert "max_bad_fraction = 0.3" in origin(outcome.manifest, None)["recipe"]
    good = next(
        i
        for i, line in enumerate((tmp_path / "a.jsonl").read_bytes().split(b"\n"))
        if line != b"{broken"
    )
    position = sum(
        len(line) + 1 for line in (tmp_path / "a.jsonl").read_bytes().split(b"\n")[:good]
    )
    made.write(tmp_path / "list", json.dumps({"doc": position}).encode())
    remove_documents(out, tmp_path / "list", tmp_path / "less", made.Silent())
    assert packprep.open_dataset(tmp_path / "less").manifest["max_bad_fraction"] == 0.3


def test_a_limit_in_dataset_json_counts_for_p22_and_is_not_written_where_it_is_the_recipe_s(
    tmp_path,
):
    corpus_with_bad(tmp_path, 300, 101)
    made.build(limited(0.5), tmp_path, tmp_path / "out")
    for fraction, promise in ((0.1, "P22"), (0.5, "P2")):
        edit_manifest(
            tmp_path / "out",
            lambda manifest, limit=fraction: manifest.update(max_bad_fraction=limit),
        )
        report = verify_dataset(tmp_path / "out", None, {}, (0, 1), 0, made.Silent())
        assert [fault["promise"] for fault in report["listed"]] == [promise]


# Faults that show in a built dataset


def rows_of(out):
    return list(packprep.open_dataset(out))


def test_fault_26_text_of_special_tokens_stays_text_through_a_build(tmp_path):
    text = "<pad><eos><extra_id_0>[NLU]"
    made.write_lines(tmp_path / "a.jsonl", [text] * 5)
    table = made.table("a.jsonl", tasks=[{"preset": "causal"}], seq_length=64)
    made.build(table, tmp_path, tmp_path / "out")
    row = rows_of(tmp_path / "out")[0]
    content = row["tokens"][row["segment_ids"] == 1]
    assert bytes(content[:-1].astype(np.uint8)).decode() == text and content[-1] == 258
    made.build({**table, "documents": {"special_text": "special"}}, tmp_path, tmp_path / "special")
    row = rows_of(tmp_path / "special")[0]
    assert row["tokens"][row["segment_ids"] == 1].tolist() == [256, 258, 266, 260, 258]


def test_fault_28_no_id_of_a_dataset_reaches_its_vocab_size(built):
    ds = packprep.open_dataset(built.out)
    assert max(int(row["tokens"].max()) for row in ds) < ds.vocab_size == 528
    assert max(i for i in np.ravel(list(ds.manifest["specials"]["sentinels"]))) < ds.vocab_size


def test_fault_05_equal_documents_get_different_masks_through_a_build(tmp_path):
    text = made.texts(1, 3, 400)[0]
    made.write_lines(tmp_path / "a.jsonl", [text] * 6)
    table = made.table(
        [{"paths": ["a.jsonl"], "repeat": 2}], tasks=[{"preset": "t5"}], seq_length=2048
    )
    made.build(table, tmp_path, tmp_path / "out")
    seen = set()
    for row in rows_of(tmp_path / "out"):
        for number in range(1, int(row["segment_ids"].max()) + 1):
            seen.add(row["tokens"][row["segment_ids"] == number].tobytes())
    assert len(seen) == 12


def test_fault_18_and_21_every_token_of_every_document_is_used_once(built):
    ds = packprep.open_dataset(built.out)
    used: dict[tuple, list[tuple[int, int]]] = {}
    for i in range(len(ds)):
        segments = ds.row(i).segments
        for key in zip(
            *(segments[name].tolist() for name in ("source", "file", "doc", "repeat")), strict=True
        ):
            used.setdefault(key, [])
        for k in range(len(segments["doc"])):
            place = tuple(int(segments[name][k]) for name in ("source", "file", "doc", "repeat"))
            used[place].append((int(segments["start"][k]), int(segments["tokens"][k])))
    total = 0
    for ranges in used.values():
        ends = [0]
        for start, n in sorted(ranges):
            assert start == ends[-1]  # no overlap, no gap
            ends.append(start + n)
        total += ends[-1]
    ledger = built.outcome.manifest["ledger"]["sources"]
    assert total == sum(source["tokens"]["read"] for source in ledger.values())
    assert len(used) == sum(source["documents"]["used"] for source in ledger.values())


@pytest.mark.long
def test_int32_tokens_are_the_same_tokens(built, tmp_path):
    made.build(
        {**built.table, "output": {**built.table["output"], "token_dtype": "int32"}},
        built.base,
        tmp_path / "out",
    )
    wide, narrow = packprep.open_dataset(tmp_path / "out"), packprep.open_dataset(built.out)
    assert (
        len(wide) == len(narrow)
        and wide.row(0).tokens.dtype == np.int32
        and narrow.row(0).tokens.dtype == np.uint16
    )
    for i in range(0, len(wide), 7):
        assert np.array_equal(wide.row(i).tokens, narrow.row(i).tokens)
        assert np.array_equal(wide.row(i).loss_mask, narrow.row(i).loss_mask)


def test_pad_seq_to_mult_through_a_build_aligns_every_segment(built, tmp_path):
    table = {**built.table, "packing": {"pad_seq_to_mult": 16}}
    made.build(table, built.base, tmp_path / "out")
    ds = packprep.open_dataset(tmp_path / "out")
    for i in range(0, len(ds), 20):
        row = ds.row(i)
        assert (row.segments["begin"] % 16 == 0).all()
        real = np.diff(row.cu_seqlens)
        for number, (begin, n) in enumerate(zip(row.segments["begin"], real, strict=True), start=1):
            assert (row.segment_ids[begin : begin + n] == number).all()
            assert (row.segment_ids[begin + n : -(-(begin + n) // 16) * 16] == 0).all()


@pytest.mark.long
def test_concat_through_a_build_leaves_almost_no_padding(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", made.texts(600))
    table = made.table("a.jsonl", tasks=[{"preset": "causal"}], packing={"algorithm": "concat"})
    ledger = made.build(table, tmp_path, tmp_path / "out").manifest["ledger"]
    assert ledger["row_padding"] - ledger["last_row_padding"] <= ledger["rows"]


# Memory


MEMORY = """
import json, resource, sys
from pathlib import Path
from tests import made
if __name__ == "__main__":
    peaks = []
    for name in ("warm", "small", "large"):
        base = Path(sys.argv[1]) / name
        table = made.table("a.jsonl", seq_length=2048, output={"shard_text_bytes": "2MiB"})
        made.build(table, base, Path(sys.argv[1]) / f"out-{name}")
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    print(json.dumps(peaks))
"""


@pytest.mark.long
def test_peak_memory_does_not_grow_with_the_corpus(tmp_path):
    block = b"".join(
        json.dumps({"text": text}).encode() + b"\n" for text in made.texts(3000, mean_bytes=2000)
    )
    for name, copies in (("warm", 1), ("small", 1), ("large", 10)):
        path = made.write(tmp_path / name / "a.jsonl", block * copies)
    assert path.stat().st_size > 40 << 20
    script = made.write(tmp_path / "memory.py", MEMORY.encode())
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(
        command, env=made.environment(), capture_output=True, text=True, check=True
    )
    _, small, large = json.loads(done.stdout)
    assert large <= 1.15 * small, (small, large)


# The face of `build`


def test_build_takes_a_recipe_and_tells_its_progress(tmp_path):
    texts = made.texts(100)
    made.write_lines(tmp_path / "a.jsonl", texts)
    progress = made.Silent()
    outcome = run_build(read_recipe(made.table("a.jsonl"), tmp_path), tmp_path / "out", progress)
    assert (progress.documents, progress.rejects, progress.ended) == (100, 0, 1)
    size = sum(len(text.encode()) for text in texts)
    assert progress.text_bytes == progress.tokens == size
    planned, shards, missing = progress.begun[0]
    assert (
        abs(planned / size - 1) < 0.01 and shards == missing == outcome.made == outcome.plan.shards
    )
    assert outcome.out == tmp_path / "out" and outcome.missing == 0


def test_a_source_that_is_not_there_is_refused_before_work_starts(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", ["x"])
    with pytest.raises(
        RecipeError,
        match="--source b=…: the recipe has no source of that name, only source0\nhint: give the",
    ):
        made.build(made.table("a.jsonl"), tmp_path, tmp_path / "out", moved={"b": "/x"})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_who_builds_is_told_once_that_it_has_begun(built, tmp_path, workers):
    begun = []
    for time in (1, 2):  # the second makes nothing
        outcome = made.build(
            built.table, built.base, tmp_path / "out", workers, on_start=begun.append
        )
        assert len(begun) == time and begun[-1].digest == outcome.plan.digest


@pytest.mark.parametrize("workers", [1, 2])
def test_what_goes_wrong_when_it_has_begun_stops_the_build(built, tmp_path, workers):
    def fail(plan):
        raise SourceError("not this one")

    with pytest.raises(SourceError, match="not this one"):
        made.build(built.table, built.base, tmp_path / "out", workers, on_start=fail)
    assert not made.temporaries(tmp_path / "out")
    assert made.build(built.table, built.base, tmp_path / "out").manifest == built.outcome.manifest


# One shard is written beside the making of the next


def test_the_next_shard_is_begun_while_one_is_written(built, tmp_path, monkeypatch):
    told, begun = [], {b: threading.Event() for b in range(100)}
    make, commit = building_run.make_shard, building_run.commit_shard

    def make_noted(plan, number, *others):
        begun[number].set()
        shard = make(plan, number, *others)
        told.append(("make", number))
        return shard

    def commit_noted(out, plan, number, shard):
        if number + 1 < plan.shards:
            assert begun[number + 1].wait(60), (
                "the next shard is not begun before this one is written"
            )
        receipt = commit(out, plan, number, shard)
        told.append(("commit", number))
        return receipt

    monkeypatch.setattr(building_run, "make_shard", make_noted)
    monkeypatch.setattr(building_run, "commit_shard", commit_noted)
    shards = made.build(built.table, built.base, tmp_path / "out").plan.shards
    assert made.contents(tmp_path / "out") == made.contents(built.out)
    assert sorted(told) == sorted((what, b) for what in ("make", "commit") for b in range(shards))
    for b in range(shards - 2):
        assert told.index(("commit", b)) < told.index(("make", b + 2)), (
            "no more than two shards are in memory"
        )


def test_what_goes_wrong_in_a_shard_leaves_the_one_before_it_written(built, tmp_path, monkeypatch):
    make, commit = building_run.make_shard, building_run.commit_shard
    failed = threading.Event()

    def fail_at_1(plan, number, *others):
        if number == 1:
            failed.set()
            raise SourceError("shard 1: cannot be read")
        return make(plan, number, *others)

    def commit_late(*arguments):
        assert failed.wait(60)
        return commit(*arguments)

    monkeypatch.setattr(building_run, "make_shard", fail_at_1)
    monkeypatch.setattr(building_run, "commit_shard", commit_late)
    with pytest.raises(SourceError, match="shard 1: cannot be read"):
        made.build(built.table, built.base, tmp_path / "out")
    assert list(made.contents(tmp_path / "out", "receipts")) == [receipt_name(0)]


def test_a_shard_that_cannot_be_written_stops_the_build(built, tmp_path, monkeypatch):
    def fail(*_):
        raise BuildError("x: the disk is full")

    monkeypatch.setattr(building_run, "commit_shard", fail)
    with pytest.raises(BuildError, match="x: the disk is full"):
        made.build(built.table, built.base, tmp_path / "out")


def test_planning_leaves_the_search_for_garbage_on_and_nothing_frozen(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", ["text"])
    frozen = gc.get_freeze_count()  # by tests/conftest.py
    made.build(made.table("a.jsonl"), tmp_path, tmp_path / "out")
    assert gc.isenabled() and gc.get_freeze_count() == frozen


def test_a_search_for_garbage_that_is_off_stays_off(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", ["text"])
    gc.disable()
    try:
        made.build(made.table("a.jsonl"), tmp_path, tmp_path / "out")
        assert not gc.isenabled()
    finally:
        gc.enable()


# Messages


MIB = 1 << 20


def test_a_build_with_fewer_shards_than_workers_says_how_all_of_them_get_one(monkeypatch):
    monkeypatch.setattr(building_run, "available_cpus", lambda: 8)
    workers = [building_run.workers_for(n * MIB) for n in (0, 15, 16, 24, 31, 32, 64, 999)]
    assert workers == [1, 1, 2, 3, 3, 4, 8, 8]
    stored = "tokens from stores: no tokenizer runs"

    def said(shards, workers, array_count=1, mib=40):
        plan = {"sources": [{"text_bytes": mib * MIB}, {"text_bytes": 1}], "shards": shards}
        return building_run.pace(plan, None, None, workers, array_count)

    for enough in (said(4, 4), said(3, 3), said(5, 99), said(5, None), said(1, None, mib=15)):
        assert enough == stored
    for few, count, at_work in (
        (said(3, 4), "3 shards", 4),
        (said(1, 2), "1 shard", 2),
        (said(4, 99), "4 shards", 5),  # A worker has at least 8 MiB of text.
        (said(4, None), "4 shards", 5),
        (said(3, 2, array_count=2), "3 shards", 4),
        (said(2, None, array_count=2), "2 shards", 4),
    ):
        size = -(-(40 * MIB + 1) // at_work)
        assert few.startswith(f"{stored}; {count} for {at_work} workers. ")
        assert f"output.shard_text_bytes={size} " in few


def test_the_shards_to_make_are_counted_among_those_of_the_array_task():
    assert [building_run._to_do(*numbers) for numbers in ((0, 0, 8), (8, 3, 8), (2, 1, 8))] == [
        "nothing to make: this array task has none of the 8 shards",
        "3 of all 8 shards to make",
        "1 of this array task's 2 shards to make",
    ]
    assert building_run._to_do(2, 0, 8) == "nothing to make: this array task's 2 shards are done"
    assert building_run._to_do(8, 0, 8) == "nothing to make: all 8 shards are done"


def test_a_task_that_fills_up_no_block_of_its_answers_is_warned_of():
    parameters = {"a": {"eos_fill": "block"}, "b": {"eos_fill": "none"}, "c": {}}
    plan = SimpleNamespace(
        tasks=[SimpleNamespace(name=n, parameters=p) for n, p in parameters.items()]
    )

    def warned(answers, added):
        tasks = {"a": answers, "b": {"answers": 3}, "c": {}}
        ledger = {"tasks": tasks, "sources": {s: {"slots": {"added": a}} for s, a in added.items()}}
        return building_run._unfilled(plan, {"ledger": ledger})

    (warning,) = warned({"answers": 3}, {"x": {"eos": 1}, "y": {}})
    assert warning.startswith("eos_fill filled up no block of task a, because no conversation ends")
    assert warned({"answers": 3}, {"x": {"eos": 1}, "y": {"eos_fill": 1}}) == []
    assert warned({}, {"x": {}}) == warned({"answers": 0}, {"x": {}}) == []


def test_a_build_resumes_with_the_engine_of_its_plan_and_says_so(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", made.texts(9))
    tokenizers_made.write(tmp_path / "bpe", tokenizers_made.byte_level("<eos>", "<pad>"))
    out, said = tmp_path / "out", made.Silent()
    said.say = (messages := []).append
    for engine in ("reference", "auto", "reference", "fastokens"):
        messages.clear()
        table = made.table("a.jsonl", tokenizer="bpe", engine=engine, tasks=[{"preset": "causal"}])
        outcome = run_build(read_recipe(table, tmp_path), out, said)
        assert outcome.plan.engine.name == "reference"
        resumed = [
            message for message in messages if "the build resumes with engine ref" in message
        ]
        assert len(resumed) == (engine == "fastokens")
