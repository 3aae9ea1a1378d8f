"""Two builds of the same folder at the same time: no lock, both end well, and the bytes are those
of one."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest

from packprep.building import run as building_run
from packprep.format.json_files import MANIFEST_NAME, receipt_name, shard_name
from tests import made
from tests.crash import disturbed
from tests.crash.disturbed import check_goes_on


def stamps(out):
    """Name → (inode, time of the last change) of all files."""
    return {
        path: (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in out.rglob("*")
        if path.is_file()
    }


@pytest.mark.long
@pytest.mark.alike(3)
@pytest.mark.parametrize("workers", [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("offset_s", [0, 0.3])
def test_two_commands_at_the_same_time_give_the_bytes_of_one(plain, folder, workers, offset_s):
    out = folder / "out"
    commands = []
    for count in workers:
        command = [sys.executable, "-m", "packprep", *map(str, plain.command(out, count))]
        commands.append(
            subprocess.Popen(
                command,
                env=made.environment(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        time.sleep(offset_s)
    said = [command.communicate(timeout=120)[1] for command in commands]
    assert [command.returncode for command in commands] == [0, 0], said
    assert made.contents(out) == plain.expected


@pytest.mark.long
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("workers", [1, 2])
def test_two_builds_interleaved_call_by_call(plain, folder, workers, every, record_property):
    """One is stopped before a call, the other makes the whole dataset and tidies up, the first goes
    on."""
    points = disturbed.different(
        disturbed.run(plain.command(folder / "out"), folder / "out").calls
    )[:: 3 - workers]
    points = points[::every] if workers == 1 else points[:: 4 * every]
    for at in points:
        out = folder / f"out{at}"
        first = disturbed.start(plain.command(out), out, [at], strike=disturbed.STOP)
        first.wait_until_stopped()
        second = disturbed.run(plain.command(out, workers), out)
        assert second.status == 0, (at, second.err)
        assert (out / MANIFEST_NAME).read_bytes() == plain.expected[MANIFEST_NAME]
        before = stamps(out)
        first.go_on()
        ended = first.wait()
        assert ended.status == 0, (ended.calls[at - 1], ended.err)
        assert made.contents(out) == plain.expected
        after = stamps(out)
        changed = [path for path in before if before[path] != after[path]]
        assert len({path.stem for path in changed}) <= 1, (
            "no shard but the one that the first had in its hands"
        )
    record_property("points of two builds", len(points))


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.03, 0.06, 0.1])
def test_builds_side_by_side_with_small_offsets(plain, folder, delay_s):
    out = folder / "out"
    running = []
    for _ in range(3):
        running.append(disturbed.start(plain.command(out), out))
        time.sleep(delay_s)
    assert [build.wait().status for build in running] == [0, 0, 0]
    assert made.contents(out) == plain.expected


@pytest.mark.long
def test_a_build_again_writes_no_file(plain, folder):
    out = folder / "out"
    check_goes_on(plain, out)
    before = stamps(out)
    for workers in (1, 2):
        check_goes_on(plain, out, workers)
        assert stamps(out) == before
    (out / MANIFEST_NAME).unlink()
    check_goes_on(plain, out)
    after = stamps(out)
    assert {path for path in before if before[path] != after[path]} <= {out / MANIFEST_NAME}


def test_a_shard_that_comes_out_differently_stops_the_build_with_both_digests_and_nothing_is_lost(
    plain, folder
):
    out = folder / "out"
    calls = disturbed.run(plain.command(folder / "other"), folder / "other").calls
    first_is_done = (
        calls.index(next(c for c in calls if c.startswith("link receipts/000/.000000.json"))) + 2
    )

    def change_a_token():
        make = building_run.make_shard

        def make_differently(plan, number, *others):
            shard = make(plan, number, *others)
            if number == 1:
                shard.arrays["tokens"][0, 0] ^= 1
            return shard

        building_run.make_shard = make_differently

    first = disturbed.start(
        plain.command(out), out, [first_is_done], disturbed.STOP, before=change_a_token
    )
    first.wait_until_stopped()
    check_goes_on(plain, out)
    before = stamps(out)
    first.go_on()
    ended = first.wait()
    stands = json.loads(plain.expected[receipt_name(1)])["digest"]
    said = (
        rf"error: {shard_name(1)}: made again with digest [0-9a-f]{{32}}, but .* has"
        rf" {stands}\. The input files changed"
    )
    assert ended.status == 2 and re.search(said, ended.err) and ended.err.count(stands) == 1, (
        ended.err
    )
    assert stamps(out) == before and made.contents(out) == plain.expected


def test_a_build_that_is_killed_beside_another_does_no_harm(plain, folder):
    out = folder / "out"
    first = disturbed.start(plain.command(out), out, [90], strike=disturbed.STOP)
    first.wait_until_stopped()
    second = disturbed.start(plain.command(out), out, [60], strike=disturbed.STOP)
    second.wait_until_stopped()
    first.kill()
    assert first.wait().status == -signal.SIGKILL
    second.go_on()
    assert second.wait().status == 0
    assert made.contents(out) == plain.expected
