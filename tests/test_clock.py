import json

import pytest

from packprep import clock
from packprep.building import run
from packprep.cli.printing import print_profile
from packprep.clock import WAITING, Clock, Profile, describe_profile
from tests import made


@pytest.fixture
def now(monkeypatch):
    """What the clock on the wall says, to be set."""
    time = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: time[0])
    return time


def test_a_stage_inside_another_counts_for_itself_alone(now):
    measured = Clock()
    with measured.stage("write"):
        now[0] = 1.0
        with measured.stage("render"):
            now[0] = 3.0
        now[0] = 10.0
    assert measured.seconds == {"write": 8.0, "render": 2.0}


def test_a_generator_is_measured_step_by_step_and_gives_the_same(now):
    def slow():
        for i in range(3):
            now[0] += 1.0
            yield i

    measured, items = Clock(), []
    for item in measured.steps("read", slow()):
        now[0] += 100.0
        items.append(item)
    assert measured.seconds == {"read": 3.0} and items == [0, 1, 2]


def test_a_stage_that_fails_is_measured_all_the_same(now):
    measured = Clock()
    with pytest.raises(ValueError), measured.stage("read"):
        now[0] = 2.0
        raise ValueError
    with measured.stage("read"):
        now[0] = 3.0
    assert measured.take() == {"read": 3.0} and measured.take() == {}


def test_clocks_add_up():
    measured = Clock()
    measured.add({"read": 1.0, "write": 2.0})
    measured.add({"read": 0.5})
    assert measured.take() == {"read": 1.5, "write": 2.0}


STAGES = [
    "plan",
    "start-up",
    "other",
    "read",
    "tokenize",
    "cut",
    "pack",
    "render",
    "ledger",
    "write",
    "publish",
]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_build_says_where_its_time_went(tmp_path, workers):
    texts = made.texts(200)
    made.write_lines(tmp_path / "a.jsonl", texts)
    profile = made.build(made.table("a.jsonl"), tmp_path, tmp_path / "out", workers=workers).profile
    assert list(profile.seconds) == STAGES and all(
        seconds >= 0 for seconds in profile.seconds.values()
    )
    assert profile.workers == workers and profile.documents == len(texts)
    assert profile.text_bytes == sum(len(text.encode()) for text in texts) == profile.tokens
    assert sum(profile.seconds.values()) <= profile.wall_s * workers
    again = made.build(made.table("a.jsonl"), tmp_path, tmp_path / "out", workers=workers).profile
    assert (
        again.documents == 0 and list(again.seconds) == ["plan", "publish"] and again.workers == 1
    )


def test_shares_and_rates(capsys):
    profile = Profile(2.0, 2, {"read": 1.0, "write": 2.0}, 10, 6_000_000, 2_000_000)
    described = describe_profile(profile)
    assert described["text_bytes_per_s"] == 3e6 and described["tokens_per_s"] == 1e6
    assert [(s["stage"], s["seconds"], s["share"]) for s in described["stages"]] == [
        ("read", 1.0, 0.25),
        ("write", 2.0, 0.5),
        (WAITING, 1.0, 0.25),
    ]
    assert described["stages"][1]["text_bytes_per_s"] == 3e6
    print_profile(described)
    assert capsys.readouterr().out.splitlines() == [
        (
            "2.00 s with 2 workers, from plan to publication: 10 documents, 2,000,000 tokens, 6.0"
            " MB of text: 1.00 M tokens/s, 3.0 MB/s of text"
        ),
        (
            "stage        seconds   share      MB/s  M tokens/s   (seconds: all workers together;"
            " rates: one worker, in this stage only)"
        ),
        "read            1.00   25.0%         6         2.0",
        "write           2.00   50.0%         3         1.0",
        "waiting         1.00   25.0%",
    ]
    json.dumps(described)


def test_a_build_of_nothing_has_no_rates(capsys):
    described = describe_profile(Profile(1.0, 1, {"plan": 0.5}, 0, 0, 0))
    assert [stage["share"] for stage in described["stages"]] == [0.5, 0.5]
    assert {
        described["tokens_per_s"],
        *(stage["text_bytes_per_s"] for stage in described["stages"]),
    } == {None}
    print_profile(described)
    assert capsys.readouterr().out.splitlines() == [
        "1.00 s with 1 worker, from plan to publication: nothing was read",
        (
            "stage        seconds   share      MB/s  M tokens/s   (seconds: all workers together;"
            " rates: one worker, in this stage only)"
        ),
        "plan            0.50   50.0%",
        "waiting         0.50   50.0%",
    ]
    assert describe_profile(Profile(0.0, 1, {}, 0, 0, 0))["stages"][0]["share"] == 0.0


@pytest.mark.parametrize(
    ("text_bytes", "workers"), [(0, 1), (9 << 20, 1), (16 << 20, 2), (1 << 40, 4)]
)
def test_a_worker_is_worth_some_text(monkeypatch, text_bytes, workers):
    monkeypatch.setattr(run, "available_cpus", lambda: 4)
    assert run.workers_for(text_bytes) == workers
