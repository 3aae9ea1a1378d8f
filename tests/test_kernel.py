import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import packprep
from packprep import kernel as kernels
from packprep import randomness
from packprep.kernel import compiling, kernel
from packprep.twin import chance
from tests import made

KEYS = st.integers(0, 2**64 - 1)


@kernel
def compiled_words(key, purpose, index, epoch, attempt):
    return kernels.word(key, purpose, index, epoch, attempt)


@kernel
def compiled_bits64(key, purpose, index, epoch):
    return kernels.bits64(key, purpose, index, epoch)


@kernel
def compiled_integer(key, purpose, index, bound, epoch):
    return kernels.integer(key, purpose, index, bound, epoch)


@kernel
def compiled_segment_key(file_key, document, repeat, start):
    return kernels.segment_key(file_key, document, repeat, start)


@kernel
def compiled_draw(key, thresholds):
    return kernels.draw_task(key, thresholds)


@kernel
def compiled_zeros(value):
    return kernels.trailing_zeros(value), kernels.leading_zeros(value)


@kernel
def compiled_bits(flags, begin):
    bits = kernels.flags_as_bits(flags, begin)
    return bits, kernels.bits_set(bits)


@kernel
def compiled_copy(target, at, source, begin, n):
    kernels.copy_items(target, at, source, begin, n)


@kernel
def compiled_run(target, at, source, begin, n, end):
    kernels.copy_run(target, at, source, begin, n, end)


@given(KEYS, st.integers(1, 20), st.integers(0, 2**34 - 1), st.integers(0, 2**32 - 1), st.integers(0, 9))
@settings(max_examples=200)
def test_words_and_bits_equal_numpy_s_and_the_twin_s(key, purpose, index, epoch, attempt):
    found = int(compiled_words(np.uint64(key), purpose, index, epoch, attempt))
    assert found == chance.words(key, purpose, index, epoch, attempt)
    assert found == int(randomness.words(np.uint64(key), purpose, index, epoch, attempt))
    found = int(compiled_bits64(np.uint64(key), purpose, index % 2**32, epoch))
    assert found == chance.bits64(key, purpose, index % 2**32, epoch)


@given(KEYS, st.integers(0, 10**6), st.integers(1, 2**32 - 1) | st.integers(1, 50) | st.just(2**31 + 1))
@settings(max_examples=300)
def test_integers_equal_numpy_s_and_the_twin_s_rejections_included(key, index, bound):
    found = int(compiled_integer(np.uint64(key), randomness.PIVOT, index, bound, 0))
    assert found == chance.integers(key, randomness.PIVOT, index, bound)
    assert found == int(randomness.integers(np.uint64(key), randomness.PIVOT, index, bound))


def test_rejections_do_happen_in_that_test():
    bound = 2**31 + 1  # nearly every second word is drawn again
    first = [chance.words(7, randomness.PIVOT, i) * bound % 2**32 < 2**32 % bound for i in range(100)]
    assert 20 < sum(first) < 80
    for i in range(100):
        found = int(compiled_integer(np.uint64(7), randomness.PIVOT, i, bound, 0))
        assert found == chance.integers(7, randomness.PIVOT, i, bound)


@given(KEYS, st.integers(0, 2**50), st.integers(0, 1000), st.integers(0, 2**31))
def test_segment_keys_equal_numpy_s_and_the_twin_s(file_key, document, repeat, start):
    found = int(compiled_segment_key(np.uint64(file_key), document, repeat, start))
    assert found == chance.segment_key(file_key, document, repeat, start)
    assert found == int(randomness.segment_key(np.uint64(file_key), document, repeat, start))


@given(KEYS, st.lists(st.integers(0, 2**53), min_size=1, max_size=6))
def test_a_task_is_the_first_whose_threshold_lies_above_the_draw(key, thresholds):
    thresholds = [*sorted(thresholds), 2**53]
    u = chance.bits64(key, randomness.TASK) >> 11
    expected = next(i for i, threshold in enumerate(thresholds) if u < threshold)
    assert int(compiled_draw(np.uint64(key), np.array(thresholds, np.int64))) == expected


@given(st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**63, 2**64 - 1]))
def test_zeros_at_both_ends_are_counted(value):
    trailing, leading = (int(n) for n in compiled_zeros(np.uint64(value)))
    assert leading == 64 - value.bit_length()
    assert trailing == (64 if value == 0 else (value & -value).bit_length() - 1)


@given(KEYS, st.integers(1, 20), st.integers(0, 2**32 - 1), st.integers(0, 70))
def test_blocks_side_by_side_are_the_words_one_by_one(key, purpose, epoch, blocks):
    out = np.zeros(4 * blocks + 28, np.uint32)
    kernels.philox_blocks(np.uint64(key), purpose, epoch, blocks, out)
    assert (
        out[: 4 * blocks].tolist() == randomness.words(np.uint64(key), purpose, np.arange(4 * blocks), epoch).tolist()
    )


@given(st.lists(KEYS, max_size=40), st.integers(1, 20))
def test_bits_of_keys_are_each_key_s_own(keys, purpose):
    out = np.zeros(len(keys), np.uint64)
    kernels.bits64_of_keys(np.array(keys, np.uint64), purpose, out)
    assert out.tolist() == [chance.bits64(key, purpose) for key in keys]


@given(st.lists(st.sampled_from([0, 0, 1, 255]), min_size=64, max_size=80), st.integers(0, 16))
def test_flags_are_gathered_into_bits(flags, begin):
    begin = min(begin, len(flags) - 64)
    bits, many = (int(x) for x in compiled_bits(np.array(flags, np.uint8), begin))
    assert bits == sum(1 << j for j in range(64) if flags[begin + j])
    assert many == bits.bit_count()


@given(st.data(), st.sampled_from(["uint16", "int32", "int64"]), st.sampled_from(["uint16", "int32"]))
def test_copies_are_exact_and_runs_write_nothing_beyond_their_end(data, source_type, target_type):
    n = data.draw(st.integers(0, 70))
    begin, behind, at, room = (data.draw(st.integers(0, 40)) for _ in range(4))
    source = np.arange(1, begin + n + behind + 1).astype(source_type)
    for end in (None, at + n + room):
        target = np.zeros(at + n + room + 5, target_type)
        if end is None:
            compiled_copy(target, at, source, begin, n)
            end = at + n
        else:
            compiled_run(target, at, source, begin, n, end)
        assert target[at : at + n].tolist() == source[begin : begin + n].tolist()
        assert not target[:at].any() and not target[end:].any()


# The cache


@pytest.fixture
def copied(tmp_path):
    """A copy of the package, to be changed."""
    source = Path(packprep.__file__).parent
    shutil.copytree(source, tmp_path / "packprep", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def run(folder: Path, code: str) -> str:
    done = made.run_python(code, folder, PYTHONPATH=str(folder), NUMBA_CACHE_DIR=str(folder / "cache"))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


PIVOTS = """
import numpy as np
from packprep.objectives.objective import Bodies
from packprep.objectives.prefix_lm import body_prefix, _pivots
bodies = Bodies(np.full(20, 9), np.arange(20, dtype=np.uint64), np.full(20, -1))
print(body_prefix(None, bodies).tolist(), sum(_pivots.compiled.stats.cache_hits.values()))
"""


def test_fault_27_a_changed_callee_in_another_file_is_compiled_anew(copied):
    before = run(copied, PIVOTS)
    pivots, hits = before.rsplit(" ", 1)
    assert hits == "0" and run(copied, PIVOTS) == f"{pivots} 1"  # found in the cache
    path = copied / "packprep" / "kernel" / "chance.py"
    text = path.read_text()
    old = "    return below(word(key, purpose, index, epoch, 0), key, purpose, index, bound, epoch)\n"
    assert old in text
    path.write_text(text.replace(old, "    return np.int64(bound) - 1\n"))
    assert run(copied, PIVOTS) == f"{[8] * 20} 0"


ROWS = """
import sys
import numpy as np
from packprep.building.packing import pack
print(pack(np.array([3, 5, 2, 4]), 8, "best_fit")[0].tolist(), "numba.np.linalg" in sys.modules)
"""


def test_what_is_kept_is_loaded_without_what_compiles_and_others_can_be_compiled_then(copied):
    first = run(copied, ROWS)
    rows, compiles = first.rsplit(" ", 1)
    assert compiles == "True" and run(copied, ROWS) == f"{rows} False"  # where rows are made arrays are allocated
    then = run(copied, ROWS + PIVOTS)
    assert then.splitlines()[0] == f"{rows} False" and then.endswith(" 0")  # the latter was not kept
    assert run(copied, PIVOTS) == f"{then.splitlines()[1].rsplit(' ', 1)[0]} 1"


def test_fault_27_the_cache_s_folder_changes_with_any_source_and_with_nothing_else(copied):
    code = "from packprep.kernel import cache_folder; print(cache_folder())"
    first = run(copied, code)
    assert first.startswith(str(copied / "cache" / "packprep" / "kernels-")) and run(copied, code) == first
    seen = {first}
    for name in ("objectives/causal.py", "building/packing.py", "errors.py"):
        path = copied / "packprep" / name
        path.write_text(path.read_text() + "\n# changed\n")
        seen.add(run(copied, code))
    (copied / "packprep" / "more.py").write_text("")
    seen.add(run(copied, code))
    assert len(seen) == 5
    (copied / "packprep" / "more.py").unlink()
    assert run(copied, code) in seen


def test_without_a_folder_that_can_be_written_kernels_are_compiled_in_every_process(copied):
    file = made.write(copied / "file", b"")  # a file is no folder
    done = made.run_python(
        f"import tempfile; tempfile.tempdir = {str(file)!r}\n"
        "from packprep.kernel import cache_folder; import packprep.objectives.causal as c, numpy as np\n"
        "a = np.zeros(1, np.int64); c.copy_ranges(a, a, a, a, a); print(cache_folder())",
        copied, PYTHONPATH=str(copied), NUMBA_CACHE_DIR=str(file), XDG_CACHE_HOME=str(file), HOME=str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "None"


def test_a_folder_of_temporaries_that_others_can_write_is_no_cache(tmp_path, monkeypatch):
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(made.write(tmp_path / "file", b"")))
    monkeypatch.setattr(compiling.tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"packprep-{os.getuid()}"
    find = compiling.cache_folder.__wrapped__
    assert find().startswith(str(own)) and own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o777)
    assert find() is None


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
    folder = compiling.cache_folder.__wrapped__()
    assert os.path.dirname(folder) == str(old_folders)
    assert names_of(old_folders) == list(range(7))  # and the new one
    assert all(other.exists() for other in others) and (old_folders / "kernels-link").is_symlink()
    assert not list(old_folders.glob(".*"))


def test_folders_that_were_used_lately_stay(old_folders):
    for i in (9, 10):
        os.utime(old_folders / f"kernels-{i:016x}")
    compiling.cache_folder.__wrapped__()
    assert names_of(old_folders) == [*range(5), 9, 10]
    for path in old_folders.glob("kernels-*"):
        os.utime(path, (0, time.time() - 29 * 86400))
    for i in range(20, 30):
        (old_folders / f"kernels-{i:016x}").mkdir()
    compiling._remove_old_folders(str(old_folders))
    assert names_of(old_folders) == [*range(5), 9, 10, *range(20, 30)]


def test_a_folder_that_is_there_is_marked_as_used_and_no_other_is_looked_at(old_folders):
    folder = compiling.cache_folder.__wrapped__()
    os.utime(folder, (0, 0))
    made.write(old_folders / "kernels-00000000000000ff" / "file", b"x")
    os.utime(old_folders / "kernels-00000000000000ff", (0, 0))
    assert compiling.cache_folder.__wrapped__() == folder and os.stat(folder).st_mtime > time.time() - 60
    assert 255 in names_of(old_folders)


def test_a_folder_that_is_used_again_while_it_is_removed_is_put_back(old_folders, monkeypatch):
    rename = os.rename

    def used_before_it_is_renamed(old, new):
        if not os.path.basename(old).startswith("."):
            os.utime(old)
        rename(old, new)

    monkeypatch.setattr(os, "rename", used_before_it_is_renamed)
    compiling._remove_old_folders(str(old_folders))
    assert names_of(old_folders) == list(range(12)) and not list(old_folders.glob(".*"))


def test_processes_that_remove_old_folders_at_once_leave_the_same(old_folders):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(compiling._remove_old_folders, [str(old_folders)] * 8))
    assert names_of(old_folders) == list(range(8))


def test_what_cannot_be_removed_stays(old_folders, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "rename", refuse)
    assert compiling.cache_folder.__wrapped__() and names_of(old_folders) == list(range(12))
    compiling._remove_old_folders(str(old_folders / "absent"))


def test_kernels_release_the_gil_and_use_no_fast_math():
    options = kernels.integer.compiled.targetoptions
    assert options["nogil"] and not options.get("fastmath") and not options.get("parallel")
    assert options["error_model"] == "numpy"


def test_numba_s_own_setting_is_left_as_it_was():
    import numba

    before = numba.config.CACHE_DIR

    @kernel
    def nothing(x):
        return x

    assert nothing(3) == 3
    assert before == numba.config.CACHE_DIR
