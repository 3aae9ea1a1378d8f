"""SIGKILL at every call by which a build writes: what stands is whole and true, and the same
command finishes."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import made
from tests.crash import disturbed
from tests.crash.disturbed import check_goes_on, check_truth

PARTS = 7  # the first is of every seventh call; a campaign strikes the others too


def is_of_both(calls, name):
    """Whether a call of this name was made on a shard and on a receipt."""
    return all(
        any(c.startswith(f"{name} {folder}/") for c in calls) for folder in ("shards", "receipts")
    )


def test_the_points_are_all_calls_of_all_kinds(plain, folder):
    ended = disturbed.run(plain.command(folder / "out"), folder / "out")
    assert ended.status == 0 and made.contents(folder / "out") == plain.expected
    assert len(ended.calls) > 150
    assert all(
        is_of_both(ended.calls, name) for name in ("open", "write", "fsync", "close", "mkdir")
    )
    assert sum(call.startswith("rename shards/") for call in ended.calls) == 3
    # receipts; tokenizer, plan, note, manifest
    assert sum(call.startswith("link ") for call in ended.calls) == 3 + 4


@pytest.mark.long
@pytest.mark.alike(1)
@pytest.mark.parametrize("part", range(PARTS))
def test_fault_23_a_build_killed_at_any_call_goes_on_to_the_same_bytes(
    plain, folder, part, record_property
):
    count = len(disturbed.run(plain.command(folder / "out"), folder / "out").calls)
    for at in range(1 + part, count + 1, PARTS):
        out = folder / f"out{at}"
        killed = disturbed.run(plain.command(out), out, at)
        assert (killed.status, len(killed.calls)) == (-signal.SIGKILL, at), killed
        check_truth(plain, out)
        check_goes_on(plain, out)
        shutil.rmtree(out)
    record_property("kill points", len(range(1 + part, count + 1, PARTS)))


@pytest.mark.long
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("where", ["first", "worker"])
def test_fault_23_a_process_of_two_workers_build_killed_at_any_call(
    plain, folder, where, every, record_property
):
    command = plain.command(folder / "out", 2)
    points = disturbed.different(disturbed.run(command, folder / "out", where=where).calls)
    points = points[::every] if where == "first" else points[:: 5 * every]
    for at in points:
        out = folder / f"out{at}"
        killed = disturbed.run(plain.command(out, 2), out, at, where=where)
        if where == "first":
            assert killed.status == -signal.SIGKILL
        else:
            assert (
                killed.status == 2 and "its worker process was killed by signal 9" in killed.err
            ), killed.err
            assert not made.temporaries(out)
        check_truth(plain, out)
        check_goes_on(plain, out, 1 + at % 2)
        shutil.rmtree(out)
    record_property("kill points", len(points))


@pytest.mark.long
@pytest.mark.parametrize("step", [15, pytest.param(5, marks=pytest.mark.campaign)])
def test_a_build_that_is_killed_again_and_again_ends_with_the_same_bytes(
    plain, folder, step, record_property
):
    out, killed, done = folder / "out", 0, 0
    while disturbed.run(plain.command(out), out, 5 + step * killed).status == -signal.SIGKILL:
        before, done = done, check_truth(plain, out)
        assert done >= before
        killed += 1
    check_goes_on(plain, out)
    assert killed >= 50 // step
    record_property("kill points", killed)


def test_a_clock_that_was_set_back_and_odd_times_of_files_change_nothing(plain, folder):
    out = folder / "out"
    assert disturbed.run(plain.command(out), out, 130).status == -signal.SIGKILL
    for path in out.rglob("*"):
        os.utime(path, (4e9, 4e9))
    shifted = time.time() - 4e8

    def set_back():
        time.time = lambda: shifted
        time.time_ns = lambda: int(shifted * 1e9)

    assert disturbed.run(plain.command(out), out, 30, before=set_back).status == -signal.SIGKILL
    check_truth(plain, out)
    for path in out.rglob("*"):
        os.utime(path, (0, 0))
    assert disturbed.run(plain.command(out), out, before=set_back).status == 0
    assert made.contents(out) == plain.expected


# The real calls


STRACE_POINTS = {
    "fsync": (1, 2, 5, 9, 13, 24, 41),
    "rename": (1, 2, 3, 4, 6),
    "link": (1, 2, 3),
    "unlink": (1, 2, 3),
    "mkdir": (1, 2, 4),
}


def can_strace() -> bool:
    command = ["strace", "-o", os.devnull, "-e", "inject=close:retval=0:when=60000", "true"]
    return (
        bool(shutil.which("strace"))
        and subprocess.run(command, capture_output=True).returncode == 0
    )


def traced(plain, out: Path, injections: list[str], log: Path) -> subprocess.CompletedProcess:
    """The command in a process of its own under strace, which injects."""
    command = [sys.executable, "-m", "packprep", *map(str, plain.command(out))]
    inject = [part for injection in injections for part in ("-e", f"inject={injection}")]
    whole = [
        "strace",
        "-f",
        "-qq",
        "-o",
        str(log),
        "-e",
        "trace=fsync,rename,link,unlink,mkdir,write",
        *inject,
        *command,
    ]
    return subprocess.run(
        whole, env=made.environment(), capture_output=True, text=True, timeout=120
    )


@pytest.mark.long
@pytest.mark.skipif(not can_strace(), reason="no strace that may trace")
@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("call", STRACE_POINTS)
def test_fault_23_a_command_killed_in_a_real_call_goes_on_to_the_same_bytes(
    plain, folder, call, every, record_property
):
    tried = 0
    for when in STRACE_POINTS[call][::every]:
        out = folder / f"out{when}"
        done = traced(plain, out, [f"{call}:signal=SIGKILL:when={when}"], folder / "log")
        if done.returncode == 0:
            continue  # mkdir and unlink: libraries may make the first ones
        lost = done.returncode == 2 and "its worker process was killed by signal 9" in done.stderr
        assert lost or done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), done.stderr
        check_truth(plain, out)
        check_goes_on(plain, out)
        tried += 1
    assert tried >= (3 if every == 1 else 2)
    record_property("kill points", tried)


@pytest.mark.long
@pytest.mark.skipif(not can_strace(), reason="no strace that may trace")
def test_real_calls_that_are_interrupted_are_made_again(plain, folder):
    log = folder / "log"
    done = traced(
        plain, folder / "out", ["fsync:error=EINTR:when=1+2", "write:error=EINTR:when=1+3"], log
    )
    assert done.returncode == 0, done.stderr
    assert log.read_text().count("EINTR") > 30
    assert made.contents(folder / "out") == plain.expected
