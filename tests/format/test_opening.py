"""Files are opened only if they are regular, and nothing waits."""

import os
import signal

import pytest

from packprep.format import open_file, read_file


@pytest.fixture(autouse=True)
def ends_soon():
    """A file that is waited for ends the test, not the patience."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("waited for a file"))
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_a_regular_file_is_read_whole_also_through_a_link(tmp_path):
    (tmp_path / "a").write_bytes(b"bytes" * 100_000)
    (tmp_path / "link").symlink_to("a")
    for name in ("a", "link"):
        assert read_file(tmp_path / name) == b"bytes" * 100_000
        with open_file(tmp_path / name) as file:
            assert file.read(5) == b"bytes"


@pytest.mark.parametrize("kind", ["FIFO", "folder", "device", "loop"])
def test_what_is_no_regular_file_is_an_error_that_names_it(tmp_path, kind):
    path = tmp_path / "it"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else "it")
    before = len(os.listdir("/proc/self/fd"))
    for opening in (open_file, read_file):
        with pytest.raises(OSError, match="it") as caught:
            opening(path)
        assert kind == "loop" or f"a {kind}" in str(caught.value)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_name_that_no_file_can_have_and_one_that_is_not_there(tmp_path):
    with pytest.raises(OSError, match="null"):
        read_file(str(tmp_path / "a\0b"))
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none")


def test_a_pipe_that_takes_a_files_place_between_look_and_opening_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe")
    opened = os.open
    monkeypatch.setattr(os, "open", lambda path, flags: opened(tmp_path / "pipe", flags))
    with pytest.raises(OSError, match="FIFO"):
        read_file(tmp_path / "a")
