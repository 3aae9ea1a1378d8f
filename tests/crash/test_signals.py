"""Builds that are met at work by a signal, in processes of their own: stopped at a safe point, or killed with a worker or all."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from packprep.dataset.json_files import MANIFEST_NAME
from tests import made


def slow(seconds: float) -> str:
    """Code after which every commit takes longer, so that a build can be met at work. With one worker only."""
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
    assert outcome.job.shards > 25
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
    made.write(out / "shards" / "000" / ".000001.safetensors.host-1-aa.tmp", b"half")  # as a kill may leave
    outcome = made.build(table, base, out, 2)
    assert outcome.manifest is not None
    assert made.contents(out) == expected  # no temporaries either


def made_temporaries(out: Path) -> bool:
    return any(out.glob("*/*/.*.tmp"))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_build_with_status_75_and_it_goes_on_later(undisturbed, tmp_path, workers, number):
    base, table, expected = undisturbed
    out = tmp_path / "out"
    process = made.start_build(base, table, out, workers, before=slow(0.05) if workers == 1 else "")
    wait_until(lambda: shards_done(out) >= 2, process)
    process.send_signal(number)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 75, said
    assert "Stopped: by a signal; what is committed stays, and the same command goes on" in said
    assert not (out / MANIFEST_NAME).exists() and shards_done(out) >= 2 and not made.temporaries(out)
    assert made.build(table, base, out).manifest is not None
    assert made.contents(out) == expected


def children_of(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_a_build_whose_worker_is_killed_says_which_shard_and_what_to_do(undisturbed, tmp_path):
    base, table, expected = undisturbed
    out = tmp_path / "out"
    process = made.start_build(base, table, out, workers=2)
    wait_until(lambda: shards_done(out) >= 1, process)
    os.kill(int(children_of(process.pid)[0]), signal.SIGKILL)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "BuildError: shard " in said and "its worker process was killed by signal 9" in said
    assert "try fewer --workers or a smaller output.shard_text_bytes" in said
    assert not made.temporaries(out) and not (out / MANIFEST_NAME).exists()
    made.build(table, base, out)
    assert made.contents(out) == expected
