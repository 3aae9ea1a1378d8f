import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packprep.errors import BuildError
from packprep.storage import local as files
from packprep.storage.local import LocalFolder, remove_temporaries, write_error
from tests import made


def test_write_replaces_a_file_and_removes_this_file_s_temporaries_alone(tmp_path):
    made.write(tmp_path / "d" / "x", b"old")
    for name in (".x.other-1-aa.tmp", ".y.other-1-aa.tmp", ".xy.other-1-aa.tmp"):
        made.write(tmp_path / "d" / name, b"")
    LocalFolder(tmp_path).write("d/x", [b"ne", memoryview(b"w")])
    assert set(made.contents(tmp_path)) == {"d/x", "d/.y.other-1-aa.tmp", "d/.xy.other-1-aa.tmp"}
    assert (tmp_path / "d" / "x").read_bytes() == b"new"


def test_a_name_with_wildcards_removes_no_other_file_s_temporaries(tmp_path):
    made.write(tmp_path / ".x1.other-1-aa.tmp", b"")
    LocalFolder(tmp_path).write("x[1]", [b"new"])
    assert set(made.contents(tmp_path)) == {"x[1]", ".x1.other-1-aa.tmp"}


def test_a_temporary_names_file_host_and_process(tmp_path, monkeypatch):
    monkeypatch.setattr(files.socket, "gethostname", lambda: "a/b.c")
    seen = []
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda a, b: (seen.append(os.path.basename(a)), rename(a, b)))
    LocalFolder(tmp_path).write("x.json", [b"1"])
    assert seen[0].startswith(f".x.json.a-b-c-{os.getpid()}-") and seen[0].endswith(".tmp")


def test_a_committer_whose_temporary_was_removed_checks_the_committed_file_instead(
    tmp_path, monkeypatch
):
    rename = os.rename
    for content in (b"same", b"other", None):

        def lose(temporary, path, content=content):
            os.unlink(temporary)  # as another committer of the same file does after its own commit
            if content is not None:
                path.write_bytes(content)
            rename(temporary, path)

        monkeypatch.setattr(os, "rename", lose)
        (tmp_path / "x").unlink(missing_ok=True)
        if content == b"same":
            LocalFolder(tmp_path).write("x", [b"sa", b"me"])
        else:
            with pytest.raises(
                BuildError,
                match=r"/x: its temporary file .x..* was removed while this process wrote it",
            ):
                LocalFolder(tmp_path).write("x", [b"sa", b"me"])


@pytest.mark.parametrize(
    "number, said",
    [
        (errno.ENOSPC, "No space left on device; the disk is full\nhint: free some space"),
        (errno.EDQUOT, "the quota is used up\nhint: free some space"),
        (errno.EIO, "the disk reports an error"),
        (errno.EACCES, "cannot be written\nhint: choose another --out"),
        (errno.EMFILE, "the write failed\nhint: fix the cause"),
    ],
)
@pytest.mark.parametrize("where", ["write", "fsync", "rename"])
def test_fault_24_a_failed_write_is_an_error_with_the_file_and_what_to_do_and_the_old_file_stays(
    tmp_path, monkeypatch, number, said, where
):
    made.write(tmp_path / "x", b"old")

    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, where, fail)
    with pytest.raises(
        BuildError, match=f"{tmp_path / 'x'}: .*{said}[^/]*run the same command again"
    ):
        LocalFolder(tmp_path).write("x", [b"new"])
    monkeypatch.undo()
    assert made.contents(tmp_path) == {"x": b"old"}


def test_write_error_without_a_number_still_says_what_happened():
    assert "x: something odd; the write failed\nhint: fix the cause" in str(
        write_error("x", OSError("something odd"))
    )


def test_create_leaves_a_file_that_stands(tmp_path):
    assert LocalFolder(tmp_path / "a").create("x", b"first")
    assert not LocalFolder(tmp_path / "a").create("x", b"second")
    assert made.contents(tmp_path) == {"a/x": b"first"}


def test_of_many_writers_at_once_one_is_first_and_the_file_is_whole(tmp_path):
    results = []
    barrier = threading.Barrier(8)

    def write(i):
        barrier.wait()
        results.append((LocalFolder(tmp_path).create("x", bytes([i]) * 100_000), i))

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [i for won, i in results if won]
    assert len(winners) == 1 and made.contents(tmp_path) == {"x": bytes(winners) * 100_000}


def test_create_without_hard_links(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    assert LocalFolder(tmp_path).create("x", b"first") and not LocalFolder(tmp_path).create(
        "x", b"second"
    )
    assert made.contents(tmp_path) == {"x": b"first"}


@pytest.mark.parametrize("taken", [True, False])
def test_create_whose_temporary_was_removed_leaves_what_stands_or_says_so(
    tmp_path, monkeypatch, taken
):
    link = os.link

    def lose(temporary, path):
        os.unlink(temporary)  # as another process does that publishes the same
        if taken:
            path.write_bytes(b"theirs")
        link(temporary, path)

    monkeypatch.setattr(os, "link", lose)
    if taken:
        assert not LocalFolder(tmp_path).create("x", b"ours") and made.contents(tmp_path) == {
            "x": b"theirs"
        }
    else:
        with pytest.raises(
            BuildError,
            match="/x: No such file or directory; the write failed\nhint: fix the cause; then run",
        ):
            LocalFolder(tmp_path).create("x", b"ours")


def test_create_whose_temporary_another_publisher_tidied_up_writes_it_again(tmp_path, monkeypatch):
    link, lost = os.link, []

    def lose_twice(temporary, path):
        if len(lost) < 2:
            os.unlink(temporary)
            lost.append(temporary)
        link(temporary, path)

    monkeypatch.setattr(os, "link", lose_twice)
    assert LocalFolder(tmp_path).create("x", b"ours") and made.contents(tmp_path) == {"x": b"ours"}
    assert len(set(lost)) == 2


@pytest.mark.parametrize("sizes", [[9_999], [10_000], [1] * 10_000, [25_000, 0, 7_000, 4_000], []])
def test_large_files_are_stored_while_they_are_written_and_have_all_bytes(
    tmp_path, monkeypatch, sizes
):
    calls = []
    advise, write, fsync = os.posix_fadvise, os.write, os.fsync

    def note(name, call):
        def noted(*given):
            calls.append((name, *given[1:]) if name == "advise" else name)
            return call(*given)

        return noted

    monkeypatch.setattr(os, "posix_fadvise", note("advise", advise))
    monkeypatch.setattr(os, "write", note("write", write))
    monkeypatch.setattr(os, "fsync", note("fsync", fsync))
    monkeypatch.setattr(files, "PIECE_BYTES", 10_000)
    buffers = [np.arange(size, dtype=np.uint8) for size in sizes]
    LocalFolder(tmp_path).write("x", buffers)
    assert made.contents(tmp_path) == {"x": b"".join(buffer.tobytes() for buffer in buffers)}
    before = calls[: calls.index("fsync")]  # of the file itself
    assert before.count(("advise", 0, 0, os.POSIX_FADV_DONTNEED)) == len(before) - before.count(
        "write"
    )
    assert len(before) - before.count("write") == sum(sizes) // 10_000
    assert not before or before[-1] != "write" or sum(sizes) % 10_000


def test_a_system_that_takes_no_advice_writes_all_the_same(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EINVAL, "no advice")

    monkeypatch.setattr(files, "PIECE_BYTES", 1000)
    monkeypatch.setattr(os, "posix_fadvise", refuse)
    LocalFolder(tmp_path).write("x", [b"1" * 2500])
    monkeypatch.delattr(os, "posix_fadvise")
    LocalFolder(tmp_path).write("y", [b"1" * 2500])
    assert made.contents(tmp_path) == {"x": b"1" * 2500, "y": b"1" * 2500}


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.integers(0, 5000)), st.sampled_from([None, 1000]))
def test_any_buffers_give_a_file_of_their_bytes(tmp_path, sizes, most):
    write = os.write
    given = [
        np.random.default_rng(i).integers(0, 256, size, np.uint8) for i, size in enumerate(sizes)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "PIECE_BYTES", 2000)
        if most:  # a system may take less than it is given
            patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:most]))
        LocalFolder(tmp_path).write("x", given)
    assert (tmp_path / "x").read_bytes() == b"".join(buffer.tobytes() for buffer in given)


def test_folders_that_are_made_are_on_disk_before_what_is_written_into_them(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    )
    LocalFolder(tmp_path / "a" / "b").create("x", b"1")
    at = [str(tmp_path / part) for part in ("", "a", "a/b")]
    assert flushed[:2] == at[:2] and flushed[2].startswith(at[2] + "/.x.") and flushed[3:] == at[2:]


def test_a_folder_that_another_process_makes_first_is_taken(tmp_path, monkeypatch):
    is_dir = Path.is_dir

    def missing(path):
        found = is_dir(path)
        os.makedirs(path, exist_ok=True)  # by another, right after it was looked for
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_dir", missing)
        LocalFolder(tmp_path).write("a/b/x", [b"data"])
    assert (tmp_path / "a" / "b" / "x").read_bytes() == b"data"


def test_temporaries_of_a_process_or_all_are_removed_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(files.socket, "gethostname", lambda: "here")
    own = ("shards/000/.000001.safetensors.here-12-aa.tmp", ".plan.json.here-12-cc.tmp")
    others = (
        "receipts/000/.000001.json.here-7-bb.tmp",
        "shards/000/.000002.safetensors.there-12-aa.tmp",
    )
    kept = ("shards/000/000001.safetensors", ".hidden", "shards/000/x.tmp")
    for name in (*own, *others, *kept):
        made.write(tmp_path / name, b"")
    # of this host: elsewhere 12 may be at work
    LocalFolder(tmp_path).remove_temporaries(of_process=12)
    assert set(made.contents(tmp_path)) == {*others, *kept}
    LocalFolder(tmp_path).remove_temporaries()
    assert set(made.contents(tmp_path)) == set(kept)
    remove_temporaries(tmp_path / "nowhere")


def test_the_folders_of_a_file_are_flushed_up_to_its_output_and_not_beyond(tmp_path, monkeypatch):
    out = tmp_path / "out"
    LocalFolder(out).write("a/b/x", [b"1"])
    flushed, fsync = [], os.fsync

    def noted(descriptor):
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    LocalFolder(out).write("a/b/x", [b"2"])
    assert flushed[1:] == [out / "a" / "b", out / "a", out]  # the first is the file


def test_the_room_of_a_folder_that_is_not_there_is_that_of_the_one_above(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    free = os.statvfs(tmp_path)
    for path in (tmp_path, tmp_path / "a/b", Path("c")):
        assert abs(LocalFolder(path).free_bytes() - free.f_bavail * free.f_frsize) < 1 << 30
