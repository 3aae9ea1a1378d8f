"""File systems of a test's own: in memory, or in a file. Both need root, and a kernel that lets it
mount."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest


def run_checked(*command: object) -> None:
    """Run a command; an error with what it said if it fails."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, (command, done.stderr)


@contextmanager
def unmounted(point: Path) -> Iterator[Path]:
    """A mount point, unmounted at the end."""
    try:
        yield point
    finally:
        run_checked("umount", point)


def make_image(image: Path, size: str) -> None:
    """An empty ext4 in a file."""
    with open(image, "wb"):
        run_checked("truncate", "-s", size, image)
    run_checked("mkfs.ext4", "-q", "-m0", image)


def mount_image(image: Path, point: Path) -> None:
    """Mount the ext4 of a file such that nothing is written to it but what is asked for."""
    point.mkdir(exist_ok=True)
    run_checked("mount", "-o", "loop,noauto_da_alloc,commit=300", image, point)


@contextmanager
def loop_mounted(folder: Path, size: str) -> Iterator[Path]:
    """The mount point of a fresh ext4 in a file, `folder`/image."""
    make_image(folder / "image", size)
    mount_image(folder / "image", folder / "mounted")
    with unmounted(folder / "mounted"):
        yield folder / "mounted"


@cache
def _can_mount(loop: bool) -> bool:
    if os.geteuid() != 0 or not all(
        shutil.which(tool) for tool in ("mount", "umount", "truncate", "mkfs.ext4")
    ):
        return False
    with tempfile.TemporaryDirectory() as name:
        try:
            if loop:
                with loop_mounted(Path(name), "2M"):
                    return True
            run_checked("mount", "-t", "tmpfs", "tmpfs", name)
            with unmounted(Path(name)):
                return True
        except AssertionError:
            return False


needs_mounts = pytest.mark.skipif(not _can_mount(loop=False), reason="mounting needs root")
needs_loop_mounts = pytest.mark.skipif(
    not _can_mount(loop=True), reason="loop mounts need root and a loop device"
)
