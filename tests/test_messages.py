"""What is said while work goes on."""

import multiprocessing
import re
import shutil
import sys

import pytest

from packprep import messages
from packprep.building.processes import in_processes, one_by_one
from packprep.building.run import build
from packprep.exporting.export import export_dataset
from packprep.messages import Bar, heard_by, say
from packprep.recipe import read_recipe
from packprep.verification import verify_dataset
from tests import made


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(messages, "_said", set())


def test_once_is_once_and_other_messages_are_said_each_time(capfd):
    for _ in range(2):
        say("this", once=True)
        say("that")
    assert capfd.readouterr().err == "packprep: this\npackprep: that\npackprep: that\n"


def test_messages_without_a_stderr_stop_nothing_and_are_not_written_to_stdout(capfd, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    say("this")
    Bar().begin(1, 1, 1)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        say("that")
        say("more")
    assert capfd.readouterr() == ("", "")


def test_processes_of_somebody_else_s_pool_say_nothing_that_is_said_once(capfd, monkeypatch):
    monkeypatch.setattr(multiprocessing.process, "parent_process", lambda: object())
    say("this", once=True)
    say("that")
    assert capfd.readouterr().err == "packprep: that\n"


def test_who_listens_hears_instead(capfd):
    heard = []
    with heard_by(lambda *said: heard.append(said)):
        say("this")
        say("that", once=True)
    say("those")
    assert (
        heard == [("this", False), ("that", True)] and capfd.readouterr().err == "packprep: those\n"
    )


def test_what_is_shown_is_errors_alone_or_stages_with_their_seconds_too(capfd, monkeypatch):
    def said(what):
        monkeypatch.setattr(messages, "_shown", what)
        say("this")
        messages.say_stage("shard 1: done")
        messages.write("error: that", error=True)
        return capfd.readouterr().err

    assert said(messages.USUAL) == "packprep: this\npackprep: error: that\n"
    assert said(messages.ERRORS) == "packprep: error: that\n"
    seconds = r"packprep: \d+\.\d\d s: "
    assert re.fullmatch(
        rf"{seconds}this\n{seconds}shard 1: done\npackprep: error: that\n", said(messages.STAGES)
    )


def speaks():
    def do(item, report):
        say("all of us", once=True)
        say(f"item {item}")
        return item

    return one_by_one(do)


def test_what_workers_say_their_parent_says_once_where_it_is_once(capfd):
    assert len(list(in_processes(speaks, (), [1, 2, 3], 3, lambda *counts: None))) == 3
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "packprep: all of us"
    assert sorted(lines[1:]) == [f"packprep: item {i}" for i in (1, 2, 3)]


def test_no_room_s_message_tells_a_secret(capfd):
    say(
        "cannot reach s3://me:hush@host/a?X-Amz-Signature=hush&part=1, nor"
        " 'https://host/b?token=hush'"
    )
    said = "cannot reach s3://…@host/a?X-Amz-Signature=…&part=1, nor 'https://host/b?token=…'"
    assert capfd.readouterr().err == f"packprep: {said}\n"


# The bar


def shown(monkeypatch, capsys, *reports):
    """What a bar in a terminal shows at its end."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    bar = Bar()
    bar.begin(1000, 2, 2)
    for report in reports:
        bar.add(*report)
    bar.end()
    return capsys.readouterr().err


def test_a_bar_shows_what_was_counted_and_no_other_number(monkeypatch, capsys):
    said = shown(monkeypatch, capsys, (3, 400, 100, 1), (4, 600, 1100, 0))
    assert "1,200 tokens, 7 documents, 1 rejects" in said
    said = shown(monkeypatch, capsys, (0, 1000, 1200, 0))  # as verify reports
    assert "1,200 tokens" in said and "document" not in said and "reject" not in said


@pytest.fixture
def bar(monkeypatch, capsys):
    """A bar in a terminal, and how it ends: done of all, in percent."""
    monkeypatch.setenv("COLUMNS", "200")

    def ends(work):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        work(Bar())
        return re.findall(r"(\d+)%\|", capsys.readouterr().err)[-1:]

    return ends


def test_it_ends_at_100_percent_with_rejects_compressed_files_resumes_and_array_tasks(
    bar, tmp_path
):
    made.write_lines(tmp_path / "a.jsonl.zst", [*made.texts(60), *[""] * 300])
    made.write(tmp_path / "b.jsonl", b"no JSON\n" * 500)
    table = made.table(
        [{"paths": ["a.jsonl.zst", "b.jsonl"]}],
        documents={"max_bad_fraction": 1.0},
        output={"shard_text_bytes": 9000},
    )
    recipe, out = read_recipe(table, tmp_path), tmp_path / "out"
    for array in ((0, 2), (1, 2)):
        assert bar(lambda shown, array=array: build(recipe, out, shown, 0, array=array)) == ["100"]
    assert bar(lambda shown: verify_dataset(out, None, {}, (0, 1), 0, shown)) == ["100"]
    assert bar(lambda shown: export_dataset(out, "parquet", tmp_path / "parquet", shown, 0)) == [
        "100"
    ]
    assert bar(lambda shown: build(recipe, out, shown, 0)) == []  # nothing to make
    (out / "receipts/000/000001.json").unlink()
    (out / "dataset.json").unlink()
    assert bar(lambda shown: build(recipe, out, shown, 0)) == ["100"]
    damaged = shutil.copytree(out, tmp_path / "damaged")
    (damaged / "shards/000/000000.safetensors").unlink()
    assert bar(lambda shown: verify_dataset(damaged, None, {}, (0, 1), 0, shown)) == ["100"]


def test_it_never_shows_more_than_all_and_does_not_end_at_100_percent_where_work_did_not_end(bar):
    def one_of_two(text_bytes):
        def work(shown):
            shown.begin(1000, 2, 2)
            shown.add(1, text_bytes, 10, 0)
            shown.done("shard 0")
            shown.end()

        return work

    assert bar(one_of_two(1500)) == ["100"] and bar(one_of_two(400)) == ["40"]
