"""The folder of what is kept from one run to the next."""

import errno
import importlib
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from packprep import cache, messages
from packprep.cache import remembered
from packprep.format.digests import digest_of_buffers
from packprep.kernel import compiling, kernel
from tests import made
from tests.command_line import packprep
from tests.crash.mounting import needs_mounts, run_checked, unmounted

OTHER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="what belongs to another user needs root")


NOWHERE = cache.CacheFolders((), None)
_find = cache.cache_folders.__wrapped__  # where tests put another in its place


def alone(folder):
    """One folder, to read and write."""
    return cache.CacheFolders((str(folder),), str(folder))


def find():
    """The folder to write to, found anew."""
    return _find().own


CODE = """
import os
from packprep import cache, messages
root = os.path.dirname(cache.__file__)
print(*(cache.code_digest(f"{root}/{name}.py") for name in ("building/packing", "building/render", "errors")))
"""


def test_fault_27_what_is_kept_is_by_all_the_code_that_a_file_names_and_by_no_other(copied):
    def digests_with(name, more):
        """Digests of the code of three files, `more` at the end of a file."""
        path = copied / "packprep" / name
        before = path.read_bytes() if path.exists() else None
        path.write_bytes((before or b"") + more.encode())
        digests = made.run_copied(copied, CODE).split()
        path.unlink() if before is None else path.write_bytes(before)
        return digests

    sound = made.run_copied(copied, CODE).split()
    assert len(set(sound)) == 3 and digests_with("errors.py", "") == sound
    same = {
        name: [
            one == other
            for one, other in zip(digests_with(name, "\n# changed\n"), sound, strict=True)
        ]
        for name in (
            "building/packing.py",
            "errors.py",
            "kernel/overloads.py",
            "building/render.py",
            "cli/building.py",
            "new.py",
        )
    }
    assert same == {
        "building/packing.py": [False, True, True],
        "errors.py": [False, False, False],
        "kernel/overloads.py": [False, False, True],  # named as a text, and imported by it
        "building/render.py": [True, False, True],
        "cli/building.py": [True, True, True],
        "new.py": [True, True, True],
    }
    (copied / "packprep" / "new.py").write_bytes(b"")
    names_it = "\nfrom packprep import (\n    new,\n)\n"
    without = digests_with("errors.py", names_it)
    (copied / "packprep" / "new.py").write_bytes(b"# changed")
    assert not set(digests_with("errors.py", names_it)) & set(without)


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
            assert folder == place / "packprep"
            modes = {path.stat().st_mode & 0o777 for path in (place, *place.rglob("*"))}
            assert modes == {0o700}
            shutil.rmtree(place)
            made.write(place, b"a file is no folder")
    finally:
        os.umask(before)
    assert find() is None


def kernels_folder(place):
    """The folder under a place, with those above it."""
    folder = place / "packprep"
    folder.mkdir(0o700, parents=True, exist_ok=True)
    place.chmod(0o700)
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
    place.chmod(0o1777)


NEED_NO_ROOT = {
    "the place is of the group": (
        lambda place: (kernels_folder(place), place.chmod(0o770)),
        "NUMBA_CACHE_DIR can be",
    ),
    "the place is of all": (
        lambda place: (kernels_folder(place), place.chmod(0o777)),
        "NUMBA_CACHE_DIR can be",
    ),
    "the folder is of the group": (
        lambda place: kernels_folder(place).chmod(0o720),
        "can be written",
    ),
    "the folder is of all and sticky": (
        lambda place: kernels_folder(place).chmod(0o1777),
        "can be written",
    ),
    "absent in a folder of all": (
        lambda place: (place.mkdir(), place.chmod(0o777)),
        "NUMBA_CACHE_DIR can be",
    ),
}
NEED_ROOT = {
    "the place is another's": (
        lambda place: (kernels_folder(place), os.chown(place, OTHER, 0)),
        f"user {OTHER}",
    ),
    "the folder is another's, in a sticky one": (
        lambda place: (os.chown(kernels_folder(place), OTHER, 0), place.chmod(0o1777)),
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
    assert Path(find()) == places[1] / "packprep"
    line, hint = capfd.readouterr().err.splitlines()
    assert line.startswith(f"packprep: the cache in {places[0]} ") and said in line
    assert hint.startswith("  hint: set NUMBA_CACHE_DIR")
    assert list(places[0].rglob("*")) == before


def test_a_place_below_a_folder_of_all_is_passed_over_and_below_a_sticky_one_taken(places, capfd):
    folder = kernels_folder(places[0])
    places[0].parent.chmod(0o777)
    assert find() is None  # all places lie below it
    lines = capfd.readouterr().err.splitlines()
    *lines, last = (line for line in lines if not line.startswith("  hint: "))
    assert len(lines) == 4 and last.startswith(
        "packprep: every command compiles its kernels again: none "
    )
    assert str(places[0]) in last
    places[0].parent.chmod(0o1777)
    assert find() == str(folder) and not capfd.readouterr().err


def test_without_a_folder_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(cache, "cache_folders", lambda: NOWHERE)
    cache.keep("thing", b"", "code", b"data")
    assert cache.kept("thing", b"", "code") is None


def test_a_link_to_a_folder_of_the_user_s_own_is_followed(places):
    folder = kernels_folder(places[0].with_name("own"))
    places[0].symlink_to("own")
    assert find() == str(folder)


@needs_root
def test_folders_above_may_belong_to_root_and_to_whom_the_root_folder_belongs(
    places, monkeypatch, capfd
):
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
    monkeypatch.setattr(
        os, "stat", lambda path, *args, **kw: mapped if path == "/" else stat(path, *args, **kw)
    )
    assert find() == str(folder)


# What is kept


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder for what is kept."""
    folder = tmp_path / "folder"
    folder.mkdir(0o700)
    monkeypatch.setattr(cache, "cache_folders", lambda: alone(folder))
    return folder


def only(folder):
    [path] = folder.iterdir()
    return path


def test_bytes_are_kept_by_what_they_depend_on(folder):
    assert cache.kept("thing", b"a", "code") is None
    for data in (b"data", b"", b"other data"):
        cache.keep("thing", b"a", "code", data)
        assert (
            cache.kept("thing", b"a", "code") == data
            and only(folder).stat().st_mode & 0o777 == 0o600
        )
    assert cache.kept("thing", b"b", "code") is None and cache.kept("other", b"a", "code") is None
    assert cache.kept("thing", b"a", "other code") is None
    cache.keep("thing", b"a", "other code", b"again")
    assert (
        cache.kept("thing", b"a", "other code") == b"again"
        and cache.kept("thing", b"a", "code") is None
        and only(folder)
    )


def test_a_file_that_is_cut_or_has_any_other_bit_is_none_and_is_replaced(folder):
    cache.keep("thing", b"", "code", b"data of some bytes")
    path = only(folder)
    sound = path.read_bytes()
    flipped = [int.from_bytes(sound, "big") ^ 1 << i for i in range(8 * len(sound))]
    damaged = [sound[:n] for n in range(len(sound))] + [
        bits.to_bytes(len(sound), "big") for bits in flipped
    ]
    for data in (*damaged, sound + b"x", bytes(len(sound)), b"x" + sound):
        path.write_bytes(data)
        assert cache.kept("thing", b"", "code") is None
    cache.keep("thing", b"", "code", b"data of some bytes")
    assert cache.kept("thing", b"", "code") == b"data of some bytes"


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_not_read_and_is_replaced(folder, mode):
    cache.keep("thing", b"", "code", b"data")
    only(folder).chmod(mode)
    assert cache.kept("thing", b"", "code") is None
    cache.keep("thing", b"", "code", b"data")
    assert cache.kept("thing", b"", "code") == b"data"


@pytest.mark.parametrize("put", [lambda path: path.mkdir(), os.mkfifo], ids=["folder", "FIFO"])
def test_what_is_no_file_is_not_read(folder, put):
    cache.keep("thing", b"", "code", b"data")
    path = only(folder)
    path.unlink()
    put(path)
    assert cache.kept("thing", b"", "code") is None
    cache.keep("thing", b"", "code", b"data")
    assert (
        cache.kept("thing", b"", "code") == (None if path.is_dir() else b"data")
        and only(folder) == path
    )


def test_who_writes_and_reads_at_once_sees_whole_files(folder):
    data = [bytes([i]) * 100_000 for i in range(8)]
    cache.keep("thing", b"", "code", data[0])

    def write_and_read(i):
        cache.keep("thing", b"", "code", data[i % 8])
        return cache.kept("thing", b"", "code")

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


def test_it_is_said_that_kernels_are_compiled_and_where_they_are_kept_before_it_begins(
    folder, monkeypatch, capfd
):
    from numba.core import dispatcher

    compiles = dispatcher._FunctionCompiler.compile
    monkeypatch.setattr(messages, "_said", set())
    said = []

    def begins(*given):
        said.append(capfd.readouterr().err)
        return compiles(*given)

    monkeypatch.setattr(dispatcher._FunctionCompiler, "compile", begins)
    monkeypatch.setattr(compiling, "cache_folders", lambda: alone(folder))
    assert [triple(2)[1], triple(2)[1], triple(2.0)[1]] == [False, True, False]
    first = f"packprep: compiling kernels that {folder} lacks, up to 10 s: they are kept there\n"
    of = "packprep: compiling tests.test_cache.tripled of {}\n".format
    assert said == [first + of("int64"), of("float64")]
    monkeypatch.setattr(messages, "_said", set())
    monkeypatch.setattr(cache, "cache_folders", lambda: NOWHERE)
    monkeypatch.setattr(compiling, "cache_folders", lambda: NOWHERE)
    triple(2)
    assert said[2].startswith("packprep: compiling kernels, about 10 s: none is kept\n")


@needs_mounts
def test_a_full_disk_and_one_that_cannot_be_written_end_nothing(tmp_path, places, monkeypatch):
    places[0].mkdir(0o700)
    run_checked("mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", places[0])
    with unmounted(places[0]):
        folder = Path(find())
        monkeypatch.setattr(cache, "cache_folders", lambda: alone(folder))
        assert triple(2) == (6, False) and triple(2) == (6, True)
        cache.keep("thing", b"", "code", b"data")
        cache.keep("thing", b"", "code", bytes(100_000))
        assert cache.kept("thing", b"", "code") == b"data"
        with pytest.raises(OSError, match="No space left"):
            made.write(places[0] / "filler", bytes(100_000))
        assert triple(2.0) == (6.0, False) and triple(2) == (6, True)
        assert len(list(folder.iterdir())) == 2
        assert find() == str(folder)  # which others may still read
        (places[0] / "filler").unlink()
        run_checked("mount", "-o", "remount,ro", places[0])
        assert triple(2.0) == (6.0, False) and triple(2) == (6, True)
        assert Path(find()) == places[1] / "packprep"


# Code of others


class MakesFolder:
    """Its pickle makes a folder when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def forged(canary, kernel):
    """A file that is kept in place of a kernel, whose code makes the folder `canary`."""
    data, code = pickle.dumps(MakesFolder(canary)), kernel.compiled._cache._code
    return data + digest_of_buffers([code.encode(), data]).encode()


@needs_root
def test_code_in_another_s_file_does_not_run(folder, tmp_path):
    triple(2)
    path, canary = only(folder), tmp_path / "canary"
    path.write_bytes(forged(canary, tripled))
    os.chown(path, OTHER, 0)
    assert triple(2) == (6, False) and not canary.exists()
    assert triple(2) == (6, True)  # it was replaced
    path.write_bytes(forged(canary, tripled))
    with pytest.raises(TypeError):
        triple(2)
    assert canary.exists()  # the user's own would run


def small_build(folder, **changes):
    """What a build of few kernels said, and its files without their times."""
    made.write_lines(folder / "a.jsonl", made.texts(5))
    recipe = (
        'seq_length = 256\ntokenizer = "bytes"\n[[sources]]\npaths = ["a.jsonl"]\n[[tasks]]\npreset'
        ' = "causal"\n'
    )
    made.write(folder / "r.toml", recipe.encode())
    shutil.rmtree(folder / "out", ignore_errors=True)
    said = packprep("build", "r.toml", "--out", "out", "--workers", 1, at=folder, **changes)
    assert said.status == 0, said.err
    return said, made.contents(folder / "out", "shard")


@pytest.mark.long
@needs_root
def test_a_build_where_another_user_s_code_lies_passes_it_over(tmp_path):
    own = tmp_path / "own"
    _, expected = small_build(tmp_path, NUMBA_CACHE_DIR=str(own))
    hostile, canary = kernels_folder(tmp_path / "hostile"), tmp_path / "canary"
    files = sorted((own / "packprep").iterdir())
    for file in files:
        name = file.name.rpartition("-")[0].split(".")
        places = [
            importlib.import_module(module)
            for module in ("packprep.kernel", ".".join(name[:-1]) or "packprep")
        ]
        kernels = (getattr(place, name[-1], None) for place in places)
        kernel = next((found for found in kernels if hasattr(found, "compiled")), tripled)
        os.chown(made.write(hostile / file.name, forged(canary, kernel)), OTHER, 0)
    os.chown(hostile, OTHER, 0)
    (tmp_path / "hostile").chmod(0o1777)
    others = {"NUMBA_CACHE_DIR": str(tmp_path / "hostile"), "XDG_CACHE_HOME": str(own)}
    said, made_again = small_build(tmp_path, **others)
    assert made_again == expected and not canary.exists()
    assert (
        said.err.count("packprep: the cache in ") == 1
        and f"{hostile} belongs to user {OTHER}" in said.err
    )
    for path in (hostile, *hostile.iterdir()):
        os.chown(path, 0, 0)
        path.chmod(0o700)  # whatever the umask
    (tmp_path / "hostile").chmod(0o700)
    with pytest.raises(AssertionError):
        small_build(tmp_path, **others)
    assert canary.exists()  # in the user's own folder they would run


@pytest.mark.long
def test_commands_go_on_where_every_kept_file_is_damaged(tmp_path):
    place = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def commands():
        """The shards of a build, and what other commands print of it."""
        _, files = small_build(tmp_path, **place)
        others = (
            ("verify", "out", "--replay", "all"),
            ("inspect", "out", "--row", 0),
            ("plan", "r.toml", "--workers", 1),
        )
        said = [packprep(*command, at=tmp_path, **place) for command in others]
        assert not any(one.status for one in said), said
        # Of plan's lines, the one with seconds differs from run to run.
        plan = [line for line in said[2].out.splitlines() if "with 1 worker" not in line]
        return files, said[1].out, plan

    expected = commands()
    folder = tmp_path / "cache" / "packprep"
    sound = made.contents(folder)
    assert sum(name.startswith("packprep.") for name in sound) > 8 and len(sound) > 13
    for i, (name, data) in enumerate(sound.items()):
        at = i * 7919 % len(data)
        flipped = data[:at] + bytes([data[at] ^ 1 << i % 8]) + data[at + 1 :]
        made.write(folder / name, (b"", data[:at], flipped, bytes(len(data)))[i % 4])
    damaged = made.contents(folder)
    assert commands() == expected
    healed = made.contents(folder)
    assert set(healed) == set(sound) and not any(healed[name] == damaged[name] for name in sound)


@pytest.mark.long
def test_processes_that_compile_at_once_give_the_same(tmp_path):
    code = (
        "import numpy as np; from packprep.kernel import copy_ranges; a = np.zeros(1, np.int64)\n"
        "b = np.array([7]); copy_ranges(b, a, a + 1, a, a); print(*a)"
    )
    environment = made.environment(NUMBA_CACHE_DIR=str(tmp_path))
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    assert [process.communicate()[0] for process in started] == ["7\n"] * 3
    assert only(tmp_path / "packprep").name.startswith("packprep.kernel.memory.copy_ranges-")


def test_kernels_are_read_where_they_cannot_be_written_and_others_kept_behind(
    places, capfd, monkeypatch
):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(places[0]))
    folders = [place / "packprep" for place in places[:2]]
    cache.cache_folders.cache_clear()
    try:
        assert cache.keep("thing", b"", "code", b"data")
        monkeypatch.setattr(cache.tempfile, "TemporaryFile", not_below(places[0]))
        cache.cache_folders.cache_clear()
        assert cache.cache_folders() == ((*map(str, folders),), str(folders[1]))
        assert cache.kept("thing", b"", "code") == b"data" and cache.is_kept("thing")
        assert cache.kept("thing", b"", "new code") is None and not cache.is_kept("other")
        assert (
            cache.keep("thing", b"", "new code", b"new")
            and cache.kept("thing", b"", "new code") == b"new"
        )
        assert (
            only(places[0] / "packprep").read_bytes().startswith(b"data")
            and not capfd.readouterr().err
        )
    finally:
        cache.cache_folders.cache_clear()


def not_below(place, opens=tempfile.TemporaryFile):
    """A TemporaryFile of a disk that cannot be written below a place."""

    def open_temporary(dir):
        if Path(dir).is_relative_to(place):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opens(dir=dir)

    return open_temporary


@needs_root
def test_what_root_made_is_read_by_others(folder, monkeypatch):
    cache.keep("thing", b"", "code", b"data")
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    assert cache.kept("thing", b"", "code") == b"data"


@pytest.fixture
def facts(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "cache_folders", lambda: alone(tmp_path))
    return tmp_path


def counted(answer):
    """(a function that gives the answer, the list of its calls)."""
    calls = []

    def find():
        calls.append(1)
        return answer

    return find, calls


def remember(depends_on, kind, find):
    """`find()`, remembered."""
    return remembered(kind, lambda: depends_on)(find)()


def test_what_was_found_is_found_once(facts):
    find, calls = counted({"a": [1, 2]})
    for _ in range(3):
        assert remember(("x", 1), dict, find) == {"a": [1, 2]}
    assert len(calls) == 1 and len(list(facts.iterdir())) == 1


@pytest.mark.parametrize("other", [("x", 2), ("y", 1), ("x", 1, None)])
def test_it_depends_on_all_that_it_is_said_to_depend_on(facts, other):
    find, calls = counted(True)
    remember(("x", 1), bool, find)
    remember(other, bool, find)
    assert len(calls) == 2


def test_what_depends_on_nothing_that_is_known_is_found_out_each_time(facts):
    find, calls = counted(True)
    assert [remember(None, bool, find) for _ in range(2)] == [True, True]
    assert len(calls) == 2 and not list(facts.iterdir())


def test_a_damaged_file_is_found_out_again(facts):
    find, calls = counted([1, 2, 3])
    remember((), list, find)
    [path] = facts.iterdir()
    kept = path.read_bytes()
    for damaged in (b"", kept[:-1], bytes([kept[0] ^ 1]) + kept[1:], b"x" * len(kept)):
        path.write_bytes(damaged)
        assert remember((), list, find) == [1, 2, 3]
        assert path.read_bytes() == kept
    assert len(calls) == 5


def test_what_is_of_another_type_is_found_out_again(facts):
    remember((), list, lambda: [1])
    assert remember((), dict, lambda: {"a": 1}) == {"a": 1}


def test_an_error_is_not_remembered(facts):
    def fails():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        remember((), bool, fails)
    assert not list(facts.iterdir())


@pytest.mark.parametrize("place", [None, "/dev/null/nowhere"])
def test_without_a_folder_it_is_found_out_each_time(monkeypatch, place):
    monkeypatch.setattr(cache, "cache_folders", lambda: alone(place) if place else NOWHERE)
    find, calls = counted(7)
    assert [remember((), int, find) for _ in range(2)] == [7, 7] and len(calls) == 2
