"""Replay: segments and shards are rebuilt from their sources, and whoever changed is named: the
dataset or the source."""

import gzip
import json
import random
import re
from dataclasses import replace

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from packprep.building.plan import open_plan
from packprep.errors import RecipeError
from packprep.format.digests import digest_of
from packprep.format.json_files import encode, rejects_name
from packprep.restoring import replay_segments
from packprep.tokenizer.engines import ENGINES
from packprep.verification import verify_dataset
from tests.made import Silent
from tests.tokenizer.tokenizers_made import gpt2_like
from tests.verification.damage import (
    arrays_of,
    copied,
    edit_receipt,
    faults_of,
    made,
    manifest_of,
    places_of,
    promises_of,
    report_of,
    resigned,
    segments_of,
    text,
    write_corpus,
)

ALL = -1


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return made(tmp_path_factory.mktemp("dataset"))


@pytest.fixture
def directory(dataset, tmp_path):
    return copied(dataset, tmp_path)


@pytest.fixture
def own(tmp_path):
    """A dataset whose sources may be changed too."""
    return made(tmp_path)


def messages(faults):
    return [fault["message"] for fault in faults]


def test_all_segments_are_built_again(dataset):
    report = report_of(dataset, replay=ALL)
    assert report["faults"] == 0 and report["replayed"] == report["segments"] > 200


@pytest.mark.parametrize("wanted", [1, 5, 40, 10**6])
def test_so_many_segments_are_built_again_as_asked_for(dataset, wanted):
    report = report_of(dataset, replay=wanted)
    assert report["faults"] == 0 and report["replayed"] == min(wanted, report["segments"])


def test_without_the_engine_of_the_plan_the_reference_builds_again_and_says_so(
    tmp_path, monkeypatch
):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/tokenizer.json").write_text(json.dumps(gpt2_like()))
    lines = [json.dumps({"text": f"the lazy dog, {k} times"}) for k in range(100)]
    (tmp_path / "in/a.jsonl").write_text("\n".join(lines))
    own = made(
        tmp_path,
        tokenizer="tokenizer.json",
        engine="fastokens",
        sources=[{"name": "a", "paths": ["a.jsonl"]}],
        tasks=[{"preset": "causal"}],
        output={"shard_text_bytes": 1000},
    )
    monkeypatch.setitem(ENGINES, "fastokens", replace(ENGINES["fastokens"], version=lambda: None))
    for replay, said in ((None, False), (10, True)):
        progress = Silent()
        report = verify_dataset(own, replay, {}, (0, 1), 0, progress)
        assert report["faults"] == 0 and report["replayed"] == (replay or 0)
        assert said == any(
            "instead of the plan's fastokens" in message for message in progress.said
        )


def other_text(path):
    """Other letters in the same places: the file keeps its size, its lines and their ends."""
    data = path.read_bytes()
    path.write_bytes(
        re.sub(rb"(?<=[a-z] )[a-y](?=[a-z]{2} )", lambda m: bytes([m[0][0] + 1]), data)
    )
    assert len(path.read_bytes()) == len(data) and path.read_bytes() != data


@pytest.mark.parametrize("replay", [60, ALL])
def test_a_source_that_changed_is_named(own, replay):
    for name in "ab":
        other_text(own.parent / f"in/web/{name}.jsonl")
    assert faults_of(own) == []  # the dataset is as it was
    faults = faults_of(own, replay)
    assert promises_of(faults) == {"P17"}
    assert all("source 'web' changed since the build" in message for message in messages(faults))
    assert not any("books" in message for message in messages(faults))


@pytest.mark.long
@pytest.mark.parametrize("replay", [60, ALL])
def test_a_source_whose_documents_moved_inside_the_file_changed(own, replay):
    for name in "ab":
        path = own.parent / f"in/web/{name}.jsonl"
        path.write_bytes(b"".join(reversed(path.read_bytes().splitlines(keepends=True))))
    faults = faults_of(own, replay)
    assert promises_of(faults) == {"P17"}
    assert all("source 'web' changed since the build" in message for message in messages(faults))


@pytest.mark.parametrize("replay", [60, ALL])
def test_a_source_of_another_size_is_named(own, replay):
    path = own.parent / "in/web/a.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    faults = faults_of(own, replay)
    assert promises_of(faults) == {"P17"} and all(
        str(path) in message for message in messages(faults)
    )
    assert all("bytes" in message for message in messages(faults))


@pytest.mark.parametrize("replay", [60, ALL])
def test_a_missing_source_is_named(own, replay):
    path = own.parent / "in/books.jsonl.zst"
    path.unlink()
    assert faults_of(own) == []
    faults = faults_of(own, replay)
    assert promises_of(faults) == ({"P17", "P22"} if replay == ALL else {"P17"})
    again = messages(fault for fault in faults if fault["promise"] == "P17")
    assert all(f"cannot be rebuilt: {path}: the file is missing" in message for message in again)


@pytest.mark.parametrize("replay", [60, ALL])
def test_a_moved_source_is_found_where_it_is_said_to_be(own, replay, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (own.parent / "in/web").rename(tmp_path / "elsewhere/web")
    assert promises_of(faults_of(own, replay)) == ({"P17", "P22"} if replay == ALL else {"P17"})
    assert faults_of(own, replay, web=tmp_path / "elsewhere/web") == []
    (own.parent / "in").rename(tmp_path / "elsewhere/in")
    moved = {"web": tmp_path / "elsewhere/web", "books": tmp_path / "elsewhere/in"}
    assert faults_of(own, replay, **moved) == []


def test_a_source_that_is_none_is_refused(dataset, tmp_path):
    with pytest.raises(
        RecipeError, match="no source of that name, only web, books\nhint: give the name"
    ):
        faults_of(dataset, ALL, wep=tmp_path)


# Damage that only the source gives away. What the arrays tell by themselves is found before replay:
# test_promises.py.


@pytest.mark.parametrize("replay", [10**6, ALL])
@pytest.mark.parametrize("task", ["r", "x-long", "x-dense", "s", "causal", "too_short"])
def test_another_token_of_each_task(directory, task, replay):
    with resigned(directory) as arrays:
        rows, begin, end = places_of(arrays)
        g = int(segments_of(directory, arrays, task)[-1])
        row = int(rows[g])
        slots = [t for t in range(begin[g], end[g]) if arrays["tokens"][row, t] < 256]
        slot = int(random.Random(task).choice(slots))
        arrays["tokens"][row, slot] ^= 1
    assert faults_of(directory) == []
    faults = faults_of(directory, replay)
    assert promises_of(faults) == {"P17"} and any(fault["row"] == row for fault in faults)
    assert any(f"slot {slot}" in f["message"] or f["slot"] == slot for f in faults)


def test_rows_in_another_order(directory):
    """Each segment is what it should be; the shard is not."""
    with resigned(directory) as arrays:
        counts = np.diff(arrays["row_offsets"])
        row = int(next(r for r in range(len(counts) - 1) if counts[r] == counts[r + 1]))
        n, first = int(counts[row]), int(arrays["row_offsets"][row])
        for name, array in arrays.items():
            if array.ndim == 2:
                array[[row, row + 1]] = array[[row + 1, row]]
            elif name.startswith("segment_"):
                array[first : first + 2 * n] = np.roll(array[first : first + 2 * n], n)
            elif name == "cu_seqlens":
                at = first + row
                array[at : at + 2 * (n + 1)] = np.roll(array[at : at + 2 * (n + 1)], n + 1)
    assert faults_of(directory) == [] and faults_of(directory, 10**6) == []
    faults = faults_of(directory, ALL)
    assert promises_of(faults) == {"P17"} and row in {fault["row"] for fault in faults}


def test_a_reject_with_another_reason_in_words(directory):
    path = directory / rejects_name(0)
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    records[0]["detail"] = "because"
    data = b"".join(encode(record) for record in records)
    path.write_bytes(data)
    edit_receipt(
        directory,
        lambda receipt: receipt["rejects"].update(bytes=len(data), digest=digest_of(data)),
    )
    assert faults_of(directory) == []
    (fault,) = faults_of(directory, ALL)
    assert (fault["promise"], fault["file"]) == ("P17", rejects_name(0))


def test_a_ledger_that_says_less_was_read(directory):
    """Documents read and used fall together, so it balances; the arrays have one more."""

    def change(receipt):
        receipt["ledger"]["sources"]["web"]["documents"]["read"] -= 1
        receipt["ledger"]["sources"]["web"]["documents"]["used"] -= 1

    edit_receipt(directory, change)
    # the manifest's ledger was not changed with it
    assert promises_of(faults_of(directory)) == {"P16", "P21"}
    faults = [f for f in faults_of(directory, ALL) if f["promise"] == "P17"]
    assert messages(faults) == ["the ledger differs from the rebuilt shard"]


def test_without_its_receipt_a_shard_is_still_built_again(directory):
    with resigned(directory) as arrays:
        g = int(segments_of(directory, arrays, "causal")[0])
        rows, begin, _ = places_of(arrays)
        arrays["tokens"][rows[g], begin[g]] ^= 1
    (directory / "receipts/000/000000.json").unlink()
    for replay in (10**6, ALL):
        assert promises_of(faults_of(directory, replay)) == {"P1", "P17"}


# What `replay_segments` says of a segment, by itself.


def difference_of(dataset, change, task):
    """What replay says of the last segment of a task that was changed by `change(arrays, g, row,
    begin, end)`."""
    arrays = arrays_of(dataset)
    rows, begin, end = places_of(arrays)
    g = int(segments_of(dataset, arrays, task)[-1])
    change(arrays, g, int(rows[g]), int(begin[g]), int(end[g]))
    return replay_segments(open_plan(dataset), arrays, np.array([g]))[0]


def test_a_segment_that_is_right_differs_in_nothing(dataset):
    assert difference_of(dataset, lambda *place: None, "r") == ""


def test_a_wrong_key(dataset):
    def change(arrays, g, *place):
        arrays["segment_key"][g] ^= np.uint64(4)

    assert "segment_key is" in difference_of(dataset, change, "causal")


def test_a_wrong_pivot(dataset):
    def change(arrays, g, row, begin, end):
        arrays["segment_prefix"][g] += 1

    assert "segment_prefix is" in difference_of(dataset, change, "s")


def test_a_wrong_loss(dataset):
    def change(arrays, g, row, begin, end):
        arrays["loss_mask"][row, end - 2] ^= 1

    assert "loss_mask at slot" in difference_of(dataset, change, "x-dense")


def test_labels_are_built_again_where_a_shard_has_them(tmp_path):
    directory = made(tmp_path, tasks=[{"preset": "mlm"}, {"preset": "mdlm"}, {"preset": "causal"}])

    def wrong(arrays, g, row, begin, end):
        arrays["labels"][row, begin + 1] ^= 1

    for task in ("mlm", "mdlm", "causal"):
        assert difference_of(directory, lambda *place: None, task) == ""
        assert "labels at slot" in difference_of(directory, wrong, task)


def test_trained_ranges_that_the_document_does_not_have(tmp_path):
    """Stratified noise depends on the row: what may be noised is compared by itself."""
    write_corpus(tmp_path / "in")
    records = [
        {"text": "a question and its answer " * (1 + i % 9), "loss_spans": [[5, 9], [12, 20]]}
        for i in range(40)
    ]
    (tmp_path / "in/spans.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    sources = [{"name": "all", "paths": ["*.jsonl", "web/*.jsonl"]}]
    directory = made(
        tmp_path,
        sources=sources,
        tasks=[{"preset": "mdlm"}, {"preset": "bd3"}],
        output={"shard_text_bytes": 8000},
    )
    shard = next(
        b
        for b in range(len(manifest_of(directory)["shards"]))
        if (np.diff(arrays_of(directory, b).get("trained_offsets", np.arange(2))) == 2).any()
    )
    plan, arrays = open_plan(directory), arrays_of(directory, shard)
    everything = np.arange(len(arrays["segment_key"]))
    assert not any(replay_segments(plan, arrays, everything))
    g = int(np.flatnonzero(np.diff(arrays["trained_offsets"]) == 2)[0])
    arrays["trained_ranges"][arrays["trained_offsets"][g], 1] -= 1
    assert replay_segments(plan, arrays, np.array([g]))[0].startswith(
        "its trained ranges are [[5, 8], [12, 20]]"
    )


def test_more_tokens_than_the_document_has(dataset):
    def change(arrays, g, row, begin, end):
        arrays["segment_tokens"][g] += 1

    assert difference_of(dataset, change, "too_short") == "segment_tokens is 3, but should be 2"


def test_a_document_that_ends_without_eos(dataset):
    def change(arrays, g, row, begin, end):
        arrays["cu_seqlens"][g + row + 1] -= 1

    assert difference_of(dataset, change, "too_short") == "it has 2 slots, but should have 3"


def test_a_segment_that_begins_inside_another(dataset):
    def change(arrays, g, row, begin, end):
        arrays["segment_start"][g] += 1

    assert "its document has no cut at token" in difference_of(dataset, change, "causal")


# Every kind of source


def write_kinds(folder):
    chance = random.Random(8)
    texts = [text(chance, n) for n in (1, 4, 40, 300, 900, 150, 20, 260) for _ in range(9)]
    table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
    pyarrow.parquet.write_table(table, folder / "p.parquet", row_group_size=17)
    with pyarrow.ipc.new_file(folder / "a.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=13)
    lines = "".join(json.dumps({"text": t}) + "\n" for t in texts).encode()
    (folder / "l.jsonl").write_bytes(lines)
    (folder / "g.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "t").mkdir()
    for i, t in enumerate(texts[::2]):
        (folder / f"t/{i}.txt").write_text(t)


@pytest.mark.parametrize(
    "paths", ["p.parquet", "a.arrow", "l.jsonl", "g.jsonl.gz", "t/*.txt", "?.*"]
)
@pytest.mark.parametrize(
    "more", [{}, {"repeat": 2.3, "sample": [0.2, 0.9]}], ids=["once", "repeated"]
)
def test_every_kind_of_source_is_built_again(tmp_path, paths, more):
    (tmp_path / "in").mkdir()
    write_kinds(tmp_path / "in")
    directory = made(
        tmp_path,
        sources=[{"paths": [paths], **more}],
        seq_length=128,
        output={"shard_text_bytes": 1500},
    )
    for replay in (ALL, 10**6):
        report = report_of(directory, replay)
        assert report["faults"] == 0 and report["replayed"] == report["segments"] > 20


def test_files_of_one_source_in_folders(tmp_path):
    for folder in ("in/x/1", "in/x/2", "in/y"):
        write_corpus(tmp_path / folder)
    directory = made(
        tmp_path, sources=[{"name": "all", "paths": ["x/**/*.jsonl", "y/web/*.jsonl"]}]
    )
    assert faults_of(directory, ALL) == []
    (tmp_path / "in/x").rename(tmp_path / "in/z")
    assert promises_of(faults_of(directory, 10)) == {"P17"}
    assert manifest_of(directory)["sources"][0]["name"] == "all"
