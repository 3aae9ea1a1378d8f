"""The folder of what is kept from one run to the next."""

import os
import pickle
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from packprep import cache
from packprep.digests import digest_of
from packprep.kernel import kernel
from tests import made
from tests.command_line import packprep
from tests.crash.mounting import needs_mounts, run_checked, unmounted

OTHER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="what belongs to another user needs root")
find = cache.cache_folder.__wrapped__


def test_fault_27_the_cache_s_folder_changes_with_any_source_and_with_nothing_else(copied):
    code = "from packprep.cache import cache_folder; print(cache_folder())"
    first = made.run_copied(copied, code)
    assert first.startswith(str(copied / "cache" / "packprep" / "kernels-")) and made.run_copied(copied, code) == first
    seen = {first}
    for name in ("objectives/causal.py", "building/packing.py", "errors.py"):
        path = copied / "packprep" / name
        path.write_text(path.read_text() + "\n# changed\n")
        seen.add(made.run_copied(copied, code))
    (copied / "packprep" / "more.py").write_text("")
    seen.add(made.run_copied(copied, code))
    assert len(seen) == 5
    (copied / "packprep" / "more.py").unlink()
    assert made.run_copied(copied, code) in seen


def test_where_the_sources_cannot_be_read_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(cache, "__file__", "/dev/null/packprep/cache.py")  # as in a package that is no folder
    assert find() is None


@pytest.fixture
def old_folders(tmp_path, monkeypatch):
    """Twelve folders of other sources, used 31 to 42 days ago, and the folder that they lie in."""
    for name in ("NUMBA_CACHE_DIR", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    parent = tmp_path / "packprep"
    parent.mkdir(mode=0o700)
    for i in range(12):
        path = made.write(parent / f"kernels-{i:016x}" / "deeper" / "kernel.nbi", b"x").parents[1]
        os.utime(path, (0, time.time() - (31 + i) * 86400))
    return parent


def names_of(parent):
    return sorted(int(path.name[8:], 16) for path in parent.glob("kernels-00000000*"))


def test_folders_that_nobody_used_for_long_are_removed_when_a_new_one_begins(old_folders):
    others = [made.write(old_folders / name / "file", b"x") for name in ("other", "kernels")]
    (old_folders / "kernels-link").symlink_to(others[0].parent)
    left = made.write(old_folders / ".kernels-00000000000000aa-12345678" / "file", b"x").parent
    os.utime(left, (0, 0))
    folder = find()
    assert os.path.dirname(folder) == str(old_folders)
    assert names_of(old_folders) == list(range(7))  # and the new one
    assert all(other.exists() for other in others) and (old_folders / "kernels-link").is_symlink()
    assert not list(old_folders.glob(".*"))


def test_folders_that_were_used_lately_stay(old_folders):
    for i in (9, 10):
        os.utime(old_folders / f"kernels-{i:016x}")
    find()
    assert names_of(old_folders) == [*range(5), 9, 10]
    for path in old_folders.glob("kernels-*"):
        os.utime(path, (0, time.time() - 29 * 86400))
    for i in range(20, 30):
        (old_folders / f"kernels-{i:016x}").mkdir()
    cache._remove_old_folders(str(old_folders))
    assert names_of(old_folders) == [*range(5), 9, 10, *range(20, 30)]


def test_a_folder_that_is_there_is_marked_as_used_and_no_other_is_looked_at(old_folders):
    folder = find()
    os.utime(folder, (0, 0))
    made.write(old_folders / "kernels-00000000000000ff" / "file", b"x")
    os.utime(old_folders / "kernels-00000000000000ff", (0, 0))
    assert find() == folder and os.stat(folder).st_mtime > time.time() - 60
    assert 255 in names_of(old_folders)


def test_a_folder_that_is_used_again_while_it_is_removed_is_put_back(old_folders, monkeypatch):
    rename = os.rename

    def used_before_it_is_renamed(old, new):
        if not os.path.basename(old).startswith("."):
            os.utime(old)
        rename(old, new)

    monkeypatch.setattr(os, "rename", used_before_it_is_renamed)
    cache._remove_old_folders(str(old_folders))
    assert names_of(old_folders) == list(range(12)) and not list(old_folders.glob(".*"))


def test_processes_that_remove_old_folders_at_once_leave_the_same(old_folders):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(cache._remove_old_folders, [str(old_folders)] * 8))
    assert names_of(old_folders) == list(range(8))


def test_what_cannot_be_removed_stays(old_folders, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "rename", refuse)
    assert find() and names_of(old_folders) == list(range(12))
    cache._remove_old_folders(str(old_folders / "absent"))


# Where others can write


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The four places where the folder may lie, in order, under a folder that is the user's own."""
    names = ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME")
    for name in names:
        monkeypatch.setenv(name, str(tmp_path / name))
    (tmp_path / "TMPDIR").mkdir(0o700)
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path / "TMPDIR"))
    of_user = tmp_path / "TMPDIR" / f"packprep-{os.geteuid()}"
    return [tmp_path / names[0], tmp_path / names[1], tmp_path / names[2] / ".cache", of_user]


def test_the_first_place_that_can_be_used_is_taken_and_is_the_user_s_alone(places):
    before = os.umask(0)
    try:
        for place in places:
            folder = Path(find())
            assert folder.parent == place / "packprep"
            modes = {path.stat().st_mode & 0o777 for path in (place, *place.rglob("*"))}
            assert modes == {0o700}
            shutil.rmtree(place)
            made.write(place, b"a file is no folder")
    finally:
        os.umask(before)
    assert find() is None


def kernels_folder(place):
    """The folder under a place, with those above it."""
    folder = place / "packprep" / f"kernels-{cache._sources_digest()[:16]}"
    folder.mkdir(0o700, parents=True, exist_ok=True)
    for path in (place, place / "packprep"):
        path.chmod(0o700)
    return folder


def links_to_another_s(place):
    kernels_folder(place.with_name("other"))
    os.chown(place.with_name("other"), OTHER, 0)
    place.symlink_to("other")


def links_from_a_place_of_all_to_another_s(place):
    folder = kernels_folder(place)
    moved = folder.rename(place.with_name("other"))
    os.chown(moved, OTHER, 0)
    folder.symlink_to(moved)
    (place / "packprep").chmod(0o1777)


NEED_NO_ROOT = {
    "the place is of the group": (lambda place: (kernels_folder(place), place.chmod(0o770)), "NUMBA_CACHE_DIR can be"),
    "the place is of all": (lambda place: (kernels_folder(place), place.chmod(0o777)), "NUMBA_CACHE_DIR can be"),
    "the folder between is of the group": (lambda place: kernels_folder(place).parent.chmod(0o775), "packprep can be"),
    "the folder is of the group": (lambda place: kernels_folder(place).chmod(0o720), "can be written"),
    "the folder is of all and sticky": (lambda place: kernels_folder(place).chmod(0o1777), "can be written"),
    "absent in a folder of all": (lambda place: (place.mkdir(), place.chmod(0o777)), "NUMBA_CACHE_DIR can be"),
}
NEED_ROOT = {
    "the place is another's": (lambda place: (kernels_folder(place), os.chown(place, OTHER, 0)), f"user {OTHER}"),
    "the folder is another's, in a sticky one": (
        lambda place: (os.chown(kernels_folder(place), OTHER, 0), (place / "packprep").chmod(0o1777)),
        f"user {OTHER}",
    ),
    "a link to another's": (links_to_another_s, f"other belongs to user {OTHER}"),
    "a link in a sticky folder to another's": (
        links_from_a_place_of_all_to_another_s,
        f"other belongs to user {OTHER}",
    ),
}


@pytest.mark.parametrize(
    "expose, said",
    [pytest.param(*case, id=name) for name, case in NEED_NO_ROOT.items()]
    + [pytest.param(*case, id=name, marks=needs_root) for name, case in NEED_ROOT.items()],
)
def test_a_place_where_others_can_write_is_passed_over_in_one_line(places, capfd, expose, said):
    expose(places[0])
    before = list(places[0].rglob("*"))
    assert Path(find()).parent == places[1] / "packprep"
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f"packprep: nothing is kept in {places[0]} ") and said in line
    assert list(places[0].rglob("*")) == before


def test_a_place_below_a_folder_of_all_is_passed_over_and_below_a_sticky_one_taken(places, capfd):
    folder = kernels_folder(places[0])
    places[0].parent.chmod(0o777)
    assert find() is None  # all places lie below it
    *lines, last = capfd.readouterr().err.splitlines()
    assert len(lines) == 4 and last.startswith("packprep: kernels are compiled anew by every command; set ")
    places[0].parent.chmod(0o1777)
    assert find() == str(folder) and not capfd.readouterr().err


def test_without_a_folder_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(cache, "cache_folder", lambda: None)
    cache.keep("thing", b"", b"data")
    assert cache.kept("thing", b"") is None


def test_a_link_to_a_folder_of_the_user_s_own_is_followed(places):
    folder = kernels_folder(places[0].with_name("own"))
    places[0].symlink_to("own")
    assert find() == str(folder)


@needs_root
def test_folders_above_may_belong_to_root_and_to_whom_the_root_folder_belongs(places, monkeypatch, capfd):
    folder = kernels_folder(places[0])
    for path in (places[0], folder.parent, folder):
        os.chown(path, OTHER, 0)
    assert find() != str(folder)
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    assert find() == str(folder)  # below pytest's folders, which are root's
    os.chown(places[0], 65534, 0)
    assert find() != str(folder)
    stat = os.stat
    mapped = SimpleNamespace(st_uid=65534)  # as in a container in which root is nobody
    monkeypatch.setattr(os, "stat", lambda path, *args, **kw: mapped if path == "/" else stat(path, *args, **kw))
    assert find() == str(folder)


def test_workers_do_not_repeat_what_the_command_says(capfd, monkeypatch):
    cache._say("this")
    monkeypatch.setattr("multiprocessing.parent_process", lambda: object())
    cache._say("that")
    assert capfd.readouterr().err == "packprep: this\n"


# What is kept


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder for what is kept."""
    folder = tmp_path / "folder"
    folder.mkdir(0o700)
    monkeypatch.setattr(cache, "cache_folder", lambda: str(folder))
    return folder


def only(folder):
    [path] = folder.iterdir()
    return path


def test_bytes_are_kept_by_what_they_depend_on(folder):
    assert cache.kept("thing", b"a") is None
    for data in (b"data", b"", b"other data"):
        cache.keep("thing", b"a", data)
        assert cache.kept("thing", b"a") == data and only(folder).stat().st_mode & 0o777 == 0o600
    assert cache.kept("thing", b"b") is None and cache.kept("other", b"a") is None


def test_a_file_that_is_cut_or_has_any_other_bit_is_none_and_is_replaced(folder):
    cache.keep("thing", b"", b"data of some bytes")
    path = only(folder)
    sound = path.read_bytes()
    flipped = [int.from_bytes(sound, "big") ^ 1 << i for i in range(8 * len(sound))]
    damaged = [sound[:n] for n in range(len(sound))] + [bits.to_bytes(len(sound), "big") for bits in flipped]
    for data in (*damaged, sound + b"x", bytes(len(sound)), b"x" + sound):
        path.write_bytes(data)
        assert cache.kept("thing", b"") is None
    cache.keep("thing", b"", b"data of some bytes")
    assert cache.kept("thing", b"") == b"data of some bytes"


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_not_read_and_is_replaced(folder, mode):
    cache.keep("thing", b"", b"data")
    only(folder).chmod(mode)
    assert cache.kept("thing", b"") is None
    cache.keep("thing", b"", b"data")
    assert cache.kept("thing", b"") == b"data"


@pytest.mark.parametrize("put", [lambda path: path.mkdir(), os.mkfifo], ids=["folder", "FIFO"])
def test_what_is_no_file_is_not_read(folder, put):
    cache.keep("thing", b"", b"data")
    path = only(folder)
    path.unlink()
    put(path)
    assert cache.kept("thing", b"") is None
    cache.keep("thing", b"", b"data")
    assert cache.kept("thing", b"") == (None if path.is_dir() else b"data") and only(folder) == path


def test_who_writes_and_reads_at_once_sees_whole_files(folder):
    data = [bytes([i]) * 100_000 for i in range(8)]
    cache.keep("thing", b"", data[0])

    def write_and_read(i):
        cache.keep("thing", b"", data[i % 8])
        return cache.kept("thing", b"")

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(write_and_read, range(200))) <= set(data)
    assert only(folder)


@kernel
def tripled(x):
    return 3 * x


def triple(x):
    """The same kernel as of a new process: (what it gives, whether it was found)."""
    fresh = kernel(tripled.function)
    return fresh(x), sum(fresh.compiled.stats.cache_hits.values()) == 1


@needs_mounts
def test_a_full_disk_and_one_that_cannot_be_written_end_nothing(tmp_path, places, monkeypatch):
    places[0].mkdir(0o700)
    run_checked("mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", places[0])
    with unmounted(places[0]):
        folder = Path(find())
        monkeypatch.setattr(cache, "cache_folder", lambda: str(folder))
        assert triple(2) == (6, False) and triple(2) == (6, True)
        cache.keep("thing", b"", b"data")
        cache.keep("thing", b"", bytes(100_000))
        assert cache.kept("thing", b"") == b"data"
        with pytest.raises(OSError, match="No space left"):
            made.write(places[0] / "filler", bytes(100_000))
        assert triple(2.0) == (6.0, False) and triple(2) == (6, True)
        assert len(list(folder.iterdir())) == 2
        assert find() == str(folder)  # which others may still read
        (places[0] / "filler").unlink()
        run_checked("mount", "-o", "remount,ro", places[0])
        assert triple(2.0) == (6.0, False) and triple(2) == (6, True)
        assert Path(find()).parent == places[1] / "packprep"


# Code of others


class MakesFolder:
    """Its pickle makes a folder when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def forged(canary):
    """A file that is kept, whose code makes the folder `canary`."""
    data = pickle.dumps(MakesFolder(canary))
    return data + digest_of(data).encode()


@needs_root
def test_code_in_another_s_file_does_not_run(folder, tmp_path):
    triple(2)
    path, canary = only(folder), tmp_path / "canary"
    path.write_bytes(forged(canary))
    os.chown(path, OTHER, 0)
    assert triple(2) == (6, False) and not canary.exists()
    assert triple(2) == (6, True)  # it was replaced
    path.write_bytes(forged(canary))
    with pytest.raises(TypeError):
        triple(2)
    assert canary.exists()  # the user's own would run


def small_build(folder, **changes):
    """What a build of few kernels said, and its files without their times."""
    made.write_lines(folder / "a.jsonl", made.texts(5))
    recipe = 'seq_length = 256\ntokenizer = "bytes"\n[[sources]]\npaths = ["a.jsonl"]\n[[tasks]]\npreset = "causal"\n'
    made.write(folder / "r.toml", recipe.encode())
    shutil.rmtree(folder / "out", ignore_errors=True)
    said = packprep("build", "r.toml", "--out", "out", "--workers", 1, at=folder, **changes)
    assert said.status == 0, said.err
    return said, made.contents(folder / "out", "shard")


@needs_root
def test_a_build_where_another_user_s_code_lies_passes_it_over(tmp_path):
    own = find()  # this run's
    _, expected = small_build(tmp_path)
    hostile, canary = kernels_folder(tmp_path / "hostile"), tmp_path / "canary"
    for name in os.listdir(own):
        os.chown(made.write(hostile / name, forged(canary)), OTHER, 0)
    os.chown(hostile, OTHER, 0)
    (tmp_path / "hostile").chmod(0o1777)
    others = {"NUMBA_CACHE_DIR": str(tmp_path / "hostile"), "XDG_CACHE_HOME": str(Path(own).parents[1])}
    said, files = small_build(tmp_path, **others)
    assert files == expected and not canary.exists()
    assert said.err.count("packprep: nothing is kept in ") == 1 and f"{hostile} belongs to user {OTHER}" in said.err
    for path in (hostile, *hostile.iterdir()):
        os.chown(path, 0, 0)
        path.chmod(0o700)  # whatever the umask
    with pytest.raises(AssertionError):
        small_build(tmp_path, **others)
    assert canary.exists()  # in the user's own folder they would run


@pytest.mark.long
def test_commands_go_on_where_every_kept_file_is_damaged(tmp_path):
    place = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def commands():
        """The shards of a build, and what other commands print of it."""
        _, files = small_build(tmp_path, **place)
        others = (("verify", "out", "--replay", "all"), ("inspect", "out", "--row", 0), ("plan", "r.toml"))
        said = [packprep(*command, at=tmp_path, **place) for command in others]
        assert not any(one.status for one in said), said
        return files, [one.out for one in said[1:]]  # the first says how long it took

    expected = commands()
    [folder] = (tmp_path / "cache" / "packprep").iterdir()
    sound = made.contents(folder)
    assert sum(name.startswith("packprep.") for name in sound) > 10 and len(sound) > 15
    for i, (name, data) in enumerate(sound.items()):
        at = i * 7919 % len(data)
        flipped = data[:at] + bytes([data[at] ^ 1 << i % 8]) + data[at + 1 :]
        made.write(folder / name, (b"", data[:at], flipped, bytes(len(data)))[i % 4])
    damaged = made.contents(folder)
    assert commands() == expected
    healed = made.contents(folder)
    assert set(healed) == set(sound) and not any(healed[name] == damaged[name] for name in sound)


def test_processes_that_compile_at_once_give_the_same(tmp_path):
    code = (
        "import numpy as np; from packprep.kernel import copy_ranges; a = np.zeros(1, np.int64)\n"
        "b = np.array([7]); copy_ranges(b, a, a + 1, a, a); print(*a)"
    )
    environment = made.environment(NUMBA_CACHE_DIR=str(tmp_path))
    started = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [process.communicate()[0] for process in started] == ["7\n"] * 3
    [folder] = (tmp_path / "packprep").iterdir()
    assert only(folder).name.startswith("packprep.kernel.memory.copy_ranges-")
