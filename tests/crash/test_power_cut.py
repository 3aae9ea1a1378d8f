"""A power cut at several moments of a build: what has reached the disk is whole, and the same
command finishes.

The output lies on an ext4 in a file. A copy of that file holds what has reached the disk at that
instant, and nothing that the system still keeps in memory; mounting the copy replays its journal,
as after a power cut.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from packprep.format.json_files import receipt_name
from tests import made
from tests.crash import disturbed
from tests.crash.disturbed import check_goes_on, check_truth
from tests.crash.mounting import (
    loop_mounted,
    mount_image,
    needs_loop_mounts,
    run_checked,
    unmounted,
)

pytestmark = needs_loop_mounts


def cuts(
    plain, folder: Path, every: int, before: Callable[[], object] = lambda: None
) -> Iterator[tuple[str, Path]]:
    """(the call that was about to be made, the output as it is after a power cut) at every so many
    calls of a build."""
    with loop_mounted(folder, "16M") as point:
        out = point / "out"
        count = len(
            disturbed.run(plain.command(folder / "out"), folder / "out", before=before).calls
        )
        os.sync()
        at = range(1, count + 1, every)
        build = disturbed.start(plain.command(out), out, at, strike=disturbed.STOP, before=before)
        try:
            for number in at:
                build.wait_until_stopped()
                if number % 2:
                    write_the_journal(point)
                with copy_mounted(folder) as after:
                    yield f"call {number}", after / "out"
                build.go_on()
            ended = build.wait()
        except BaseException:
            build.kill()
            build.wait()
            raise
        assert ended.status == 0 and made.contents(out) == plain.expected
        with copy_mounted(folder) as after:
            yield "the end", after / "out"


def write_the_journal(point: Path) -> None:
    """As another program's fsync does: names reach the disk, of files whose bytes may not have."""
    with open(point / "unrelated", "ab") as file:
        file.write(b"1")
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def copy_mounted(folder: Path) -> Iterator[Path]:
    """A mount point of what has reached the disk."""
    run_checked("cp", "--sparse=always", folder / "image", folder / "cut")
    mount_image(folder / "cut", folder / "after")
    with unmounted(folder / "after"):
        yield folder / "after"


@pytest.mark.long
def test_fault_23_after_a_power_cut_nothing_is_half_and_the_same_command_finishes(
    plain, tmp_path, record_property
):
    shards_done, moments = [], 0
    for moment, out in cuts(plain, tmp_path, every=9):
        shards_done.append(check_truth(plain, out))
        if moment == "the end":
            assert made.contents(out) == plain.expected, (
                "a build that says that it is done is on disk"
            )
        check_goes_on(plain, out)
        moments += 1
    assert shards_done == sorted(shards_done) and set(shards_done) == {0, 1, 2, 3}
    record_property("power cuts", moments)


@pytest.mark.long
def test_without_fsync_the_same_test_finds_files_that_are_not_whole(plain, tmp_path):
    def patch_away():
        os.fsync = lambda descriptor: None

    found = []
    for moment, out in cuts(plain, tmp_path, every=15, before=patch_away):
        torn = {
            name
            for name, data in (made.contents(out).items() if out.exists() else ())
            if name in plain.expected and data != plain.expected[name]
        }
        found += [(moment, name) for name in torn]
        if torn:
            with pytest.raises(
                AssertionError, match="a file that is not as the undisturbed build's"
            ):
                check_truth(plain, out)
    names = {name for _, name in found}
    assert receipt_name(0) in names or any(name.startswith("shards/") for name in names), found
