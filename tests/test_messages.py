"""What is said while work goes on."""

import multiprocessing
import re

import pytest

from packprep import messages
from packprep.building.processes import in_processes, one_by_one
from packprep.messages import heard_by, say


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(messages, "_said", set())


def test_once_is_once_and_other_messages_are_said_each_time(capfd):
    for _ in range(2):
        say("this", once=True)
        say("that")
    assert capfd.readouterr().err == "packprep: this\npackprep: that\npackprep: that\n"


def test_processes_of_somebody_else_s_pool_say_nothing_that_is_said_once(capfd, monkeypatch):
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    say("this", once=True)
    say("that")
    assert capfd.readouterr().err == "packprep: that\n"


def test_who_listens_hears_instead(capfd):
    heard = []
    with heard_by(lambda *said: heard.append(said)):
        say("this")
        say("that", once=True)
    say("those")
    assert heard == [("this", False), ("that", True)] and capfd.readouterr().err == "packprep: those\n"


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
    assert re.fullmatch(rf"{seconds}this\n{seconds}shard 1: done\npackprep: error: that\n", said(messages.STAGES))


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
