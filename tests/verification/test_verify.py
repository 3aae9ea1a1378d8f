"""A whole dataset: shares of array tasks, processes, progress, and the report as it is printed."""

import json
import os
import signal

import pytest

from packprep.building.array_tasks import share_of
from packprep.errors import Stopped
from packprep.verification import print_report, verify_dataset
from tests.made import Silent
from tests.verification.damage import copied, edit_manifest, made, manifest_of, report_of, resigned


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return made(tmp_path_factory.mktemp("dataset"), output={"shard_text_bytes": 4_000})


@pytest.fixture
def directory(dataset, tmp_path):
    return copied(dataset, tmp_path)


def damage(directory, shard):
    with resigned(directory, shard) as arrays:
        arrays["loss_mask"][0, 0] ^= 1


def test_the_report_counts_what_the_manifest_lists(dataset):
    report, entries = report_of(dataset), manifest_of(dataset)["shards"]
    assert report["shards"] == len(entries) >= 6
    for key in ("rows", "segments", "tokens"):
        assert report[key] == sum(entry[key] for entry in entries)
    assert report["faults"] == 0 and report["listed"] == [] and report["replayed"] == 0


def test_a_report_is_json(directory):
    damage(directory, 0)
    report = report_of(directory)
    assert json.loads(json.dumps(report, allow_nan=False)) == report


@pytest.mark.long
def test_array_tasks_share_the_shards(directory):
    for shard in (0, 3, 5):
        damage(directory, shard)
    (directory / "extra").write_bytes(b"")
    shards = len(manifest_of(directory)["shards"])
    for count in (1, 2, 3, 5, shards, shards + 4):
        reports = [
            verify_dataset(directory, None, {}, (i, count), 1, Silent()) for i in range(count)
        ]
        assert [r["shards"] for r in reports] == [
            len(share_of(i, count, shards)) for i in range(count)
        ]
        listed = [fault["file"] for report in reports for fault in report["listed"]]
        assert sorted(listed) == sorted(
            [
                "extra",
                "shards/000/000000.safetensors",
                "shards/000/000003.safetensors",
                "shards/000/000005.safetensors",
            ]
        )
        assert "extra" in [fault["file"] for fault in reports[0]["listed"]]


@pytest.mark.long
def test_the_first_task_of_an_array_adds_up_all_ledgers(directory):
    edit_manifest(
        directory, lambda manifest: manifest["ledger"].update(rows=manifest["ledger"]["rows"] + 1)
    )
    for i in range(3):
        listed = verify_dataset(directory, None, {}, (i, 3), 1, Silent())["listed"]
        assert [f["message"] for f in listed] == [
            "the ledger is not the sum of the receipts' ledgers"
        ][i:]


@pytest.mark.long
def test_processes_find_what_one_finds(directory):
    damage(directory, 1)
    damage(directory, 4)
    alone = verify_dataset(directory, 30, {}, (0, 1), 0, Silent())
    assert {fault["file"] for fault in alone["listed"]} == {
        f"shards/000/{shard:06d}.safetensors" for shard in (1, 4)
    }
    assert verify_dataset(directory, 30, {}, (0, 1), 2, Silent()) == alone


@pytest.mark.long
def test_which_segments_are_replayed_does_not_depend_on_processes_or_time(dataset):
    reports = [verify_dataset(dataset, 17, {}, (0, 1), workers, Silent()) for workers in (1, 1, 2)]
    assert [report["replayed"] for report in reports] == [17] * 3


def test_progress_is_told_all_bytes(dataset):
    progress = Silent()
    verify_dataset(dataset, None, {}, (0, 1), 0, progress)
    entries = manifest_of(dataset)["shards"]
    size = sum(entry["bytes"] for entry in entries)
    assert (
        progress.begun == [(size, len(entries), len(entries))]
        and progress.text_bytes == size
        and progress.ended == 1
    )


def test_progress_is_told_all_bytes_of_damaged_shards_too(directory):
    damage(directory, 0)
    (directory / "shards/000/000001.safetensors").unlink()
    (directory / "shards/000/000002.safetensors").write_bytes(b"")
    progress = Silent()
    verify_dataset(directory, None, {}, (0, 1), 0, progress)
    assert progress.text_bytes == progress.begun[0][0]


def test_a_manifest_with_fewer_shards_than_the_plan(directory):
    edit_manifest(directory, lambda manifest: manifest["shards"].pop())
    report = report_of(directory, replay=-1)
    words = [fault["message"] for fault in report["listed"]]
    shards = len(manifest_of(directory)["shards"])
    assert any(
        f"lists {shards} shards, but the plan has {shards + 1}" in message for message in words
    )
    assert sum("does not belong to a dataset" in message for message in words) >= 2


def test_a_manifest_with_more_shards_than_the_plan(directory):
    shards = len(manifest_of(directory)["shards"])
    entry = {**manifest_of(directory)["shards"][-1], "file": f"shards/000/{shards:06d}.safetensors"}
    for kind, ending in (("shards", "safetensors"), ("receipts", "json")):
        old, new = (directory / f"{kind}/000/{b:06d}.{ending}" for b in (shards - 1, shards))
        new.write_bytes(old.read_bytes())
    edit_manifest(directory, lambda manifest: manifest["shards"].append(entry))
    report = report_of(directory, replay=-1)
    assert any(
        f"lists {shards + 1} shards, but the plan has {shards}" in f["message"]
        for f in report["listed"]
    )


def test_verification_stops_between_shards(dataset):
    class Impatient(Silent):
        def add(self, *counts):
            super().add(*counts)
            os.kill(os.getpid(), signal.SIGTERM)

    progress = Impatient()
    with pytest.raises(Stopped):
        verify_dataset(dataset, None, {}, (0, 1), 1, progress)
    assert progress.ended == 1 and 0 < progress.text_bytes < progress.begun[0][0]


def test_the_report_as_text(directory, capsys):
    damage(directory, 3)
    print_report(report_of(directory))
    line, verdict = capsys.readouterr().out.splitlines()
    assert (
        line.startswith("P9 shards/000/000003.safetensors, row 0, slot 0: loss_mask does not match")
        and "(value " in line
    )
    assert verdict.startswith(f"{directory}: 1 fault (") and " rows, " in verdict


def test_the_report_of_a_good_dataset_as_text(dataset, capsys):
    print_report(report_of(dataset, replay=9))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{dataset}: every invariant holds (") and "; 9 segments rebuilt" in line


def test_the_report_says_how_many_faults_it_does_not_list(directory, capsys):
    with resigned(directory) as arrays:
        arrays["loss_mask"][:] ^= 1
    report = report_of(directory)
    print_report(report)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == f"… and {report['faults'] - 40} more" and report["faults"] > 1000
