"""Errors of the disk at every call by which a build writes: what, where, what to do; and the same
command finishes."""

import errno
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from packprep.building.planning import made_with
from packprep.format.json_files import MANIFEST_NAME
from tests import command_line, made
from tests.crash import disturbed
from tests.crash.disturbed import check_goes_on, check_truth
from tests.crash.mounting import (
    loop_mounted,
    needs_loop_mounts,
    needs_mounts,
    run_checked,
    unmounted,
)

ERRORS = {
    errno.ENOSPC: "No space left on device; the disk is full",
    errno.EIO: "Input/output error; the disk reports an error",
    errno.EDQUOT: "the quota is used up",
}


def check_refusal(ended, out: Path, said: str) -> None:
    """Exit status 2, and one message that names a file of the output, the error, and what to do."""
    assert ended.status == 2, ended
    messages = [line for line in ended.err.splitlines() if line.startswith("packprep: error: ")]
    assert len(messages) == 1 and "Traceback" not in ended.err
    assert messages[0].startswith(f"packprep: error: {out}") and said in messages[0], messages
    assert "\n  hint: " in ended.err and "run the same command again to resume" in ended.err


@pytest.mark.long
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("number", ERRORS, ids=lambda number: errno.errorcode[number])
def test_fault_24_an_error_of_any_call_stops_the_build_says_why_and_it_goes_on_later(
    plain, folder, number, workers, every, record_property
):
    calls = disturbed.run(plain.command(folder / "out", workers), folder / "out").calls
    step = every * (1 if number == errno.EIO else 2) * (1 if workers == 1 else 4)
    points = disturbed.different(calls)[::step]
    survived = []

    def harmless(call):
        """What a temporary leaves, and with two workers a folder that the other one has made
        meanwhile."""
        return (call.startswith("unlink ") and call.endswith(".tmp")) or (
            workers > 1 and call.startswith("mkdir ")
        )

    for at in points:
        out = folder / f"out{at}"
        ended = disturbed.run(plain.command(out, workers), out, at, strike=number)
        if ended.status == 0:  # a temporary that cannot be removed does no harm
            # Where two processes call at the same moment, either may read the answer that strikes.
            near = ended.calls[at - 2 : at + 1] if workers > 1 else ended.calls[at - 1 : at]
            survived.append(next(filter(harmless, near), ended.calls[at - 1]))
            assert made.contents(out).items() >= plain.expected.items()
        else:
            check_refusal(ended, out, ERRORS[number])
        check_truth(plain, out)
        check_goes_on(plain, out, workers)
        shutil.rmtree(out)
    assert all(map(harmless, survived)), set(survived)
    record_property("error points", len(points))


@pytest.mark.parametrize("at", [1, 60, 100])
def test_writes_that_take_a_part_go_on_with_the_rest(plain, folder, at):
    ended = disturbed.run(plain.command(folder / "out"), folder / "out", at, strike=disturbed.SHORT)
    assert ended.status == 0 and made.contents(folder / "out") == plain.expected
    undisturbed = disturbed.run(plain.command(folder / "again"), folder / "again").calls
    assert len(ended.calls) > len(undisturbed) + 100


@pytest.mark.parametrize("workers", [1, 2])
def test_fault_24_a_file_larger_than_this_process_may_write_is_named(plain, folder, workers):
    out = folder / "out"
    sizes = {name: len(data) for name, data in plain.expected.items() if name.startswith("shards/")}
    largest = max(sizes, key=sizes.__getitem__)
    limit = sizes[largest] - 1  # all but the largest shard can be written
    ended = disturbed.run(
        plain.command(out, workers),
        out,
        before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    check_refusal(
        ended,
        out / largest,
        "File too large; the file would be larger than this process may write (ulimit -f)",
    )
    assert (
        largest not in made.contents(out)
        and MANIFEST_NAME not in made.contents(out)
        and not made.temporaries(out)
    )
    check_truth(plain, out)
    check_goes_on(plain, out, workers)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


@pytest.mark.long
@needs_mounts
@pytest.mark.parametrize("workers", [1, 2])
def test_fault_24_a_full_file_system_in_memory(plain, tmp_path, workers):
    point = tmp_path / "full"
    point.mkdir()
    run_checked("mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", point)
    with unmounted(point):
        out = point / "out"
        check_refusal(disturbed.run(plain.command(out, workers), out), out, ERRORS[errno.ENOSPC])
        check_truth(plain, out)
        assert not made.temporaries(out)
        run_checked("mount", "-o", "remount,size=8m", point)
        check_goes_on(plain, out, workers)


@needs_loop_mounts
@pytest.mark.parametrize("room", [20, 60, 150, 200])
def test_fault_24_a_full_disk(plain, tmp_path, room):
    with loop_mounted(tmp_path, "2M") as point:
        free = shutil.disk_usage(point).free
        made.write(point / "else", bytes(free - (room << 10)))
        out = point / "out"
        check_refusal(disturbed.run(plain.command(out), out), out, ERRORS[errno.ENOSPC])
        check_truth(plain, out)
        assert not made.temporaries(out)
        (point / "else").unlink()
        check_goes_on(plain, out)


# Folders that cannot be written


@pytest.mark.parametrize("below", ["", "below"])
def test_an_output_that_is_a_file_or_below_one_is_named(plain, folder, below):
    out = made.write(folder / "out", b"a file stands here") / below
    said = command_line.refused(*plain.command(out))
    assert str(out) in said and made.contents(folder) == {"out": b"a file stands here"}


@pytest.mark.long
@needs_mounts
def test_a_file_system_that_is_read_only_is_named_at_every_moment_of_a_build(plain, tmp_path):
    point = tmp_path / "mounted"
    point.mkdir()
    run_checked("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", point)
    with unmounted(point):
        out = point / "out"
        for at in (0, 100):
            if at:
                assert disturbed.run(plain.command(out), out, at).status < 0
            before = made.contents(point)
            run_checked("mount", "-o", "remount,ro", point)
            said = "Read-only file system; the folder cannot be written"
            check_refusal(disturbed.run(plain.command(out), out), out, said)
            assert made.contents(point) == before
            check_truth(plain, out)
            run_checked("mount", "-o", "remount,rw", point)
        check_goes_on(plain, out)
        run_checked("mount", "-o", "remount,ro", point)
        check_goes_on(plain, out)  # there is nothing to do


@pytest.fixture
def readable() -> Iterator[disturbed.Project]:
    """A project that every user can read."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield disturbed.project(Path(name) / "project")


@pytest.mark.parametrize("begun", [False, True])
def test_a_folder_without_permission_is_named(readable, begun, monkeypatch):
    plain, out = readable, readable.base.parent / "out"
    facts = made_with()  # somebody else may not read where the libraries lie
    monkeypatch.setattr("packprep.building.planning.made_with", lambda: facts)
    if begun:
        assert disturbed.run(plain.command(out), out, 100).status < 0
    out.mkdir(exist_ok=True)
    for path in (out, *out.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)

    def drop():  # root may write everywhere
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)

    try:
        ended = disturbed.run(plain.command(out), out, before=drop)
        check_refusal(
            ended,
            out,
            "Permission denied; the folder cannot be written",
        )
    finally:
        for path in (out, *out.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
    check_truth(plain, out)
    check_goes_on(plain, out)
