"""The folder of what is kept from one run to the next."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from packprep import cache
from tests import made


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


def test_a_folder_of_temporaries_that_others_can_write_is_no_cache(tmp_path, monkeypatch):
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(made.write(tmp_path / "file", b"")))
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"packprep-{os.getuid()}"
    find = cache.cache_folder.__wrapped__
    assert find().startswith(str(own)) and own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o777)
    assert find() is None


def test_where_the_sources_cannot_be_read_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(cache, "__file__", "/dev/null/packprep/cache.py")  # as in a package that is no folder
    assert cache.cache_folder.__wrapped__() is None


@pytest.fixture
def old_folders(tmp_path, monkeypatch):
    """Twelve folders of other sources, used 31 to 42 days ago, and the folder that they lie in."""
    for name in ("NUMBA_CACHE_DIR", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    parent = tmp_path / "packprep"
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
    folder = cache.cache_folder.__wrapped__()
    assert os.path.dirname(folder) == str(old_folders)
    assert names_of(old_folders) == list(range(7))  # and the new one
    assert all(other.exists() for other in others) and (old_folders / "kernels-link").is_symlink()
    assert not list(old_folders.glob(".*"))


def test_folders_that_were_used_lately_stay(old_folders):
    for i in (9, 10):
        os.utime(old_folders / f"kernels-{i:016x}")
    cache.cache_folder.__wrapped__()
    assert names_of(old_folders) == [*range(5), 9, 10]
    for path in old_folders.glob("kernels-*"):
        os.utime(path, (0, time.time() - 29 * 86400))
    for i in range(20, 30):
        (old_folders / f"kernels-{i:016x}").mkdir()
    cache._remove_old_folders(str(old_folders))
    assert names_of(old_folders) == [*range(5), 9, 10, *range(20, 30)]


def test_a_folder_that_is_there_is_marked_as_used_and_no_other_is_looked_at(old_folders):
    folder = cache.cache_folder.__wrapped__()
    os.utime(folder, (0, 0))
    made.write(old_folders / "kernels-00000000000000ff" / "file", b"x")
    os.utime(old_folders / "kernels-00000000000000ff", (0, 0))
    assert cache.cache_folder.__wrapped__() == folder and os.stat(folder).st_mtime > time.time() - 60
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
    assert cache.cache_folder.__wrapped__() and names_of(old_folders) == list(range(12))
    cache._remove_old_folders(str(old_folders / "absent"))
