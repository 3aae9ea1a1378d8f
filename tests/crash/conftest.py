"""A corpus, its recipe and its undisturbed build, which all tests of this folder compare with."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import conftest
from tests.crash.disturbed import Project, project


@pytest.fixture(scope="session")
def plain(tmp_path_factory) -> Project:
    """Three shards, one of them with rejects."""
    return project(tmp_path_factory.mktemp("plain"))


@pytest.fixture(autouse=True)
def durable(monkeypatch) -> None:
    """Wait for the disk, as builds outside of tests do."""
    monkeypatch.setattr(os, "fsync", conftest.fsync)


@pytest.fixture
def folder(tmp_path) -> Iterator[Path]:
    """A folder of the test's own, in memory where there is room: hundreds of builds wait for no
    disk."""
    if not os.access("/dev/shm", os.W_OK) or shutil.disk_usage("/dev/shm").free < 32 << 20:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="packprep-") as name:
        yield Path(name)
