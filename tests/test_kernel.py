import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep import kernel as kernels
from packprep import randomness
from packprep.kernel import kernel
from tests import made
from tests.twin import chance

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


@given(
    KEYS,
    st.integers(1, 20),
    st.integers(0, 2**34 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 9),
)
@settings(max_examples=200)
def test_words_and_bits_equal_numpy_s_and_the_twin_s(key, purpose, index, epoch, attempt):
    found = int(compiled_words(np.uint64(key), purpose, index, epoch, attempt))
    assert found == chance.words(key, purpose, index, epoch, attempt)
    assert found == int(randomness.words(np.uint64(key), purpose, index, epoch, attempt))
    found = int(compiled_bits64(np.uint64(key), purpose, index % 2**32, epoch))
    assert found == chance.bits64(key, purpose, index % 2**32, epoch)


@given(
    KEYS, st.integers(0, 10**6), st.integers(1, 2**32 - 1) | st.integers(1, 50) | st.just(2**31 + 1)
)
@settings(max_examples=300)
def test_integers_equal_numpy_s_and_the_twin_s_rejections_included(key, index, bound):
    found = int(compiled_integer(np.uint64(key), randomness.PIVOT, index, bound, 0))
    assert found == chance.integers(key, randomness.PIVOT, index, bound)
    assert found == int(randomness.integers(np.uint64(key), randomness.PIVOT, index, bound))


def test_rejections_do_happen_in_that_test():
    bound = 2**31 + 1  # nearly every second word is drawn again
    first = [
        chance.words(7, randomness.PIVOT, i) * bound % 2**32 < 2**32 % bound for i in range(100)
    ]
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
        out[: 4 * blocks].tolist()
        == randomness.words(np.uint64(key), purpose, np.arange(4 * blocks), epoch).tolist()
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


@pytest.mark.long
@given(
    st.data(), st.sampled_from(["uint16", "int32", "int64"]), st.sampled_from(["uint16", "int32"])
)
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


PIVOTS = """
import numpy as np
from packprep.objectives.objective import Bodies
from packprep.objectives.prefix_lm import _draw_pivots
bodies, pivots = Bodies(np.full(20, 9), np.arange(20, dtype=np.uint64), np.full(20, -1), np.zeros(20, int)), np.empty(20, np.int64)
_draw_pivots(bodies, pivots)
print(pivots.tolist(), sum(_draw_pivots.compiled.stats.cache_hits.values()))
"""


@pytest.mark.long
def test_fault_27_a_changed_callee_in_another_file_is_compiled_anew(copied):
    before = made.run_copied(copied, PIVOTS)
    pivots, hits = before.rsplit(" ", 1)
    assert hits == "0" and made.run_copied(copied, PIVOTS) == f"{pivots} 1"  # found in the cache
    path = copied / "packprep" / "kernel" / "chance.py"
    text = path.read_text()
    old = (
        "    return below(word(key, purpose, index, epoch, 0), key, purpose, index, bound, epoch)\n"
    )
    assert old in text
    path.write_text(text.replace(old, "    return np.int64(bound) - 1\n"))
    assert made.run_copied(copied, PIVOTS) == f"{[8] * 20} 0"


ROWS = """
import sys
import numpy as np
from packprep.building.packing import pack
rows = pack(np.array([3, 5, 2, 4]), 8, "best_fit")[0].tolist()
extended = sys.modules["numba.core.entrypoints"]._already_initialized
print(rows, "numba.np.linalg" in sys.modules or extended)
"""


@pytest.mark.long
def test_what_is_kept_is_loaded_without_what_compiles_and_others_can_be_compiled_then(copied):
    first = made.run_copied(copied, ROWS)
    rows, compiles = first.rsplit(" ", 1)
    # where rows are made arrays are allocated
    assert compiles == "True" and made.run_copied(copied, ROWS) == f"{rows} False"
    then = made.run_copied(copied, ROWS + PIVOTS)
    # the latter was not kept
    assert then.splitlines()[0] == f"{rows} False" and then.endswith(" 0")
    assert made.run_copied(copied, PIVOTS) == f"{then.splitlines()[1].rsplit(' ', 1)[0]} 1"


def test_without_a_folder_that_can_be_written_kernels_are_compiled_in_every_process(copied):
    file = made.write(copied / "file", b"")  # a file is no folder
    done = made.run_python(
        f"import tempfile; tempfile.tempdir = {str(file)!r}\nfrom packprep.cache import"
        " cache_folders; import packprep.objectives.causal as c, numpy as np\na = np.zeros(1,"
        " np.int64); c.copy_ranges(a, a, a, a, a); print(cache_folders().own)",
        copied,
        PYTHONPATH=str(copied),
        NUMBA_CACHE_DIR=str(file),
        XDG_CACHE_HOME=str(file),
        HOME=str(file),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "None"


def test_kernels_release_the_gil_and_use_no_fast_math():
    options = kernels.integer.compiled.targetoptions
    assert options["nogil"] and not options.get("fastmath") and not options.get("parallel")
    assert options["error_model"] == "numpy"


HELD = """
import sys
from packprep.kernel import kernel
@kernel
def scaled(x):
    return SCALE * x
SCALE = 2
def closed(scale):
    return kernel(lambda x: scale * x)
exec("def fileless(x): return 5 * x")
if __name__ == "__main__":
    for one in (scaled, closed(3), closed(4), kernel(fileless)):
        print(one(1), sum(one.compiled.stats.cache_hits.values()), end=" ")
"""


@pytest.mark.long
def test_a_kernel_elsewhere_is_kept_by_its_file_and_not_at_all_where_that_does_not_say_all(copied):
    run = "import runpy; runpy.run_path('held.py', run_name='__main__')"
    path = made.write(copied / "held.py", HELD.encode())
    assert made.run_copied(copied, run) == "2 0 3 0 4 0 5 0"
    assert made.run_copied(copied, run) == "2 1 3 0 4 0 5 0"
    path.write_text(HELD.replace("SCALE = 2", "SCALE = 7"))
    assert made.run_copied(copied, run) == "7 0 3 0 4 0 5 0"
