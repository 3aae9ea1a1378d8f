"""Builds that are met by a signal, in processes of their own: stopped at a safe point, at any
moment from their start on, or killed with a worker or all."""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from packprep.format.json_files import MANIFEST_NAME
from tests import made
from tests.crash.disturbed import Project, check_goes_on, check_truth


def slow(seconds: float) -> str:
    """Code after which every commit takes longer, so that a build can be met at work. With one
    worker only."""
    return (
        "import time, packprep.building.run as run\n"
        "commit = run.commit_shard\n"
        f"run.commit_shard = lambda *a: (commit(*a), time.sleep({seconds}))[0]"
    )


def shards_done(out: Path) -> int:
    return len(list(out.glob("receipts/*/*.json")))


def wait_until(condition, process: subprocess.Popen, timeout: float = 60) -> None:
    """Until a condition holds; an error if the process ends before."""
    begun = time.monotonic()
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() - begun < timeout
        time.sleep(0.002)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """(folder of a corpus, recipe's table, contents of its build): some forty shards."""
    base = tmp_path_factory.mktemp("undisturbed")
    sources = made.mixed_corpus(base, 7, scale=2)
    table = made.table(sources, output={"shard_text_bytes": 20_000})
    outcome = made.build(table, base, base / "out", 2)
    assert outcome.plan.shards > 25
    return base, table, made.contents(base / "out")


@pytest.mark.parametrize("moment", ["plan", "first shards", "a temporary"])
def test_fault_23_a_killed_build_goes_on_to_the_same_bytes(undisturbed, tmp_path, moment):
    base, table, expected = undisturbed
    out = tmp_path / "out"
    reached = {
        "plan": lambda: (out / "plan.json").exists(),
        "first shards": lambda: shards_done(out) >= 3,
        "a temporary": lambda: shards_done(out) >= 8 and made_temporaries(out),
    }[moment]
    process = made.start_build(base, table, out, workers=2)
    wait_until(reached, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
    assert not (out / MANIFEST_NAME).exists()
    # as a kill may leave
    made.write(out / "shards" / "000" / ".000001.safetensors.host-1-aa.tmp", b"half")
    outcome = made.build(table, base, out, 2)
    assert outcome.manifest is not None
    assert made.contents(out) == expected  # no temporaries either


def made_temporaries(out: Path) -> bool:
    return any(out.glob("*/*/.*.tmp"))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_build_with_status_75_and_it_goes_on_later(
    undisturbed, tmp_path, workers, number
):
    base, table, expected = undisturbed
    out = tmp_path / "out"
    process = made.start_build(base, table, out, workers, before=slow(0.05) if workers == 1 else "")
    wait_until(lambda: shards_done(out) >= 2, process)
    process.send_signal(number)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 75, said
    assert "Stopped: by a signal; committed work is kept" in said
    assert (
        not (out / MANIFEST_NAME).exists() and shards_done(out) >= 2 and not made.temporaries(out)
    )
    assert made.build(table, base, out).manifest is not None
    assert made.contents(out) == expected


def children_of(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.long
def test_a_build_whose_worker_is_killed_says_which_shard_and_what_to_do(undisturbed, tmp_path):
    base, table, expected = undisturbed
    out = tmp_path / "out"
    process = made.start_build(base, table, out, workers=2)
    wait_until(lambda: shards_done(out) >= 1, process)
    os.kill(int(children_of(process.pid)[0]), signal.SIGKILL)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "BuildError: shard " in said and "its worker process was killed by signal 9" in said
    assert "run the same command again with fewer --workers" in said
    assert not made.temporaries(out) and not (out / MANIFEST_NAME).exists()
    made.build(table, base, out)
    assert made.contents(out) == expected


# At any moment

WORKERS = ([], ["--workers", "1"], ["--workers", "2"])
OURS = re.compile(rf'File "{re.escape(str(made.ROOT))}/packprep/(\S+)", line \d+, in (\S+)')
FIRST = {(name, "<module>") for name in ("__init__.py", "__main__.py", "cli/__init__.py")}
"""The imports with which packprep begins. Until they are done Python has its own way with
signals."""


def begin_build(plain: Project, out: Path, workers: list[str]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "packprep", "build", plain.recipe, "--out", out, *workers],
        env=made.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def seconds_of(plain: Project, out: Path, workers: list[str]) -> float:
    """How long a build takes, from the start of its process on."""
    begun = time.monotonic()
    process = begin_build(plain, out, workers)
    process.communicate(timeout=120)
    assert process.returncode == 0
    return time.monotonic() - begun


def strike(
    plain: Project, out: Path, workers: list[str], longest: float, chance: random.Random
) -> str:
    """Send a build one signal or two at a random moment, and let it go on; gives what became of
    it."""
    moments = [chance.uniform(0, longest)]
    if chance.random() < 1 / 3:
        moments.append(chance.uniform(0, 0.3))
    numbers = [chance.choice((signal.SIGTERM, signal.SIGINT)) for _ in moments]
    to_group = chance.random() < 0.5  # as from a terminal
    process = begin_build(plain, out, workers)
    with contextlib.suppress(ProcessLookupError):
        for moment, number in zip(moments, numbers, strict=True):
            time.sleep(moment)
            (os.killpg if to_group else os.kill)(process.pid, number)
    _, err = process.communicate(timeout=60)
    said = f"{workers} {numbers} at {moments}, {to_group=}: status {process.returncode}, {err}"
    if process.returncode in (0, 75):
        assert "Traceback" not in err and "Exception ignored" not in err, said
        assert (process.returncode == 75) == ("packprep: stopped: " in err), said
    else:
        assert process.returncode in (1, -signal.SIGTERM, -signal.SIGINT), said
        assert {*OURS.findall(err)} <= FIRST and not out.exists(), said
    wait_until_gone(process.pid)
    if out.exists():
        check_truth(plain, out)
    check_goes_on(plain, out, 2 if "2" in workers else 1)
    if process.returncode not in (0, 75):
        return "before packprep's first line"
    return "finished" if process.returncode == 0 else "stopped"


def wait_until_gone(group: int, timeout: float = 20) -> None:
    """Until no process of a group is left."""
    begun = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() - begun < timeout:
            os.killpg(group, 0)
            time.sleep(0.002)
        raise AssertionError("a build has ended, and processes of it are left")


def strike_many(plain: Project, folder: Path, count: int, seed: int) -> Counter:
    """(workers, what became of it) of `count` builds that are struck, and how often."""
    longest = [
        max(seconds_of(plain, folder / f"whole{i}{j}", w) for j in range(2))
        for i, w in enumerate(WORKERS)
    ]
    became: Counter = Counter()
    for i in range(count):
        kind, out = i % len(WORKERS), folder / "out"
        chance = random.Random(f"{seed} {i}")
        try:
            became[
                " ".join(WORKERS[kind]), strike(plain, out, WORKERS[kind], longest[kind], chance)
            ] += 1
        except BaseException as error:
            error.add_note(f"signal {i} of seed {seed}")
            raise
        shutil.rmtree(out)
    return became


@pytest.mark.long
def test_a_signal_at_any_moment_ends_a_build_well(plain, folder):
    became = strike_many(plain, folder, 12, 0)
    assert (
        became.total() == 12 and sum(became[kind] for kind in became if kind[1] == "stopped") >= 3
    ), became


@pytest.mark.campaign
def test_a_thousand_signals_at_any_moment_end_builds_well(plain, folder):
    """PACKPREP_SIGNALS sets another number, PACKPREP_SEED the seed of their moments."""
    count, seed = (
        int(os.environ.get("PACKPREP_SIGNALS", "1000")),
        int(os.environ.get("PACKPREP_SEED", time.time_ns())),
    )
    print(f"PACKPREP_SEED={seed}")
    became = strike_many(plain, folder, count, seed)
    for (workers, what), times in sorted(became.items()):
        print(f"{workers or 'no --workers':14}{what:32}{times:5}")
    assert became.total() == count
