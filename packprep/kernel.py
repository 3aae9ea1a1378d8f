"""`@kernel`, the one way to compile a function, and the compiled twins of `randomness`.

Flags are set once here: no fast-math (IEEE results are part of the law), numpy's error model, the GIL released,
no threads (processes scale, and forking after a thread pool hangs).
Numba keys its cache by the one file of a function, so that a changed callee in another file would go unnoticed.
Here the cache's folder is named by the digest of all of packprep's sources instead: any change starts a new one.
"""

import contextlib
import functools
import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from packprep.digests import digest_of_buffers
from packprep.randomness import SEGMENT_KEY, TASK

KEPT_FOLDERS, KEPT_DAYS = 8, 30
"""Of the folders of compiled kernels: how many stay however old they are, and how long the others stay after their last use."""


def _sources_digest() -> str:
    root = Path(__file__).parent
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py"))
    return digest_of_buffers(part for name in names for part in (name.encode(), (root / name).read_bytes()))


@functools.cache
def cache_folder() -> str | None:
    """The folder for compiled kernels: the first of $NUMBA_CACHE_DIR, $XDG_CACHE_HOME, ~/.cache and the folder of
    temporaries that can be written; None (kernels are compiled in every process) if none can."""
    candidates = [
        os.environ.get("NUMBA_CACHE_DIR"),
        os.environ.get("XDG_CACHE_HOME"),
        os.path.join(os.path.expanduser("~"), ".cache"),
        own := os.path.join(tempfile.gettempdir(), f"packprep-{os.getuid()}"),
    ]
    for candidate in candidates:
        if not candidate or not os.path.isabs(candidate):
            continue
        folder = os.path.join(candidate, "packprep", "kernels-" + _sources_digest()[:16])
        try:
            if candidate == own:
                _refuse_foreign(own)
            is_new = not os.path.isdir(folder)
            os.makedirs(folder, mode=0o700, exist_ok=True)
            os.utime(folder)  # when it was used last
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError:
            continue
        if is_new:
            _remove_old_folders(os.path.dirname(folder))
        return folder
    return None


def _remove_old_folders(parent: str) -> None:
    """Remove the folders of other sources that nobody used for long, but for the last KEPT_FOLDERS: each holds megabytes.

    One that is used again while it is removed is put back; what cannot be removed stays. A name with a dot is what was left
    by a process that was killed here.
    """
    used: list[tuple[float, str]] = []
    left: list[str] = []
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(".kernels-"):
                left.append(entry.path)
            elif entry.name.startswith("kernels-") and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    used.append((entry.stat(follow_symlinks=False).st_mtime, entry.path))
    oldest = time.time() - KEPT_DAYS * 86400
    for folder in left + [path for _, path in sorted(used, reverse=True)[KEPT_FOLDERS:]]:
        aside = os.path.join(parent, f".{os.path.basename(folder).lstrip('.')}-{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            if os.stat(folder).st_mtime >= oldest:
                continue
            os.rename(folder, aside)
            if os.stat(aside).st_mtime >= oldest:
                os.rename(aside, folder)
            else:
                shutil.rmtree(aside, ignore_errors=True)


def _refuse_foreign(folder: str) -> None:
    """PermissionError if somebody else can write there: a compiled kernel in the cache is code that will run."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    status = os.lstat(folder)
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} can be written by others")


def kernel(function: Any = None, *, inline: bool = False) -> Any:
    """Compile `function` at its first call; keep the result on disk for the other processes.

    inline=True is for small functions that kernels call: LLVM merges them into their callers.
    """
    if function is None:
        return functools.partial(kernel, inline=inline)
    compiled: Any = njit(nogil=True, error_model="numpy", forceinline=inline)
    folder = None if inline else cache_folder()
    if folder is None:
        return compiled(function)
    settings: Any = numba.config
    before, settings.CACHE_DIR = settings.CACHE_DIR, folder
    try:
        dispatcher = compiled(function)
        dispatcher.enable_caching()
        return dispatcher
    finally:
        settings.CACHE_DIR = before


_MUL_0, _MUL_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEP_0, _KEY_STEP_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)


@kernel(inline=True)
def philox(key, c0, c1, c2, c3):
    """`randomness.philox` for one block; all arguments and the four results are uint64 (results below 2³²)."""
    k0, k1 = key & _LOW, key >> _32
    for _ in range(10):
        p0, p1 = _MUL_0 * c0, _MUL_1 * c2
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _KEY_STEP_0) & _LOW, (k1 + _KEY_STEP_1) & _LOW
    return c0, c1, c2, c3


@kernel(inline=True)
def word(key, purpose, index, epoch, attempt):
    """`randomness.words` for one index; uint64 below 2³²."""
    i = np.uint64(index)
    w0, w1, w2, w3 = philox(key, i >> np.uint64(2), np.uint64(attempt), np.uint64(purpose), np.uint64(epoch))
    lane = i & np.uint64(3)
    if lane == np.uint64(0):
        return w0
    if lane == np.uint64(1):
        return w1
    if lane == np.uint64(2):
        return w2
    return w3


@kernel(inline=True)
def bits64(key, purpose, index, epoch):
    """`randomness.bits64` for one block."""
    w0, w1, _, _ = philox(key, np.uint64(index), np.uint64(0), np.uint64(purpose), np.uint64(epoch))
    return w0 | (w1 << _32)


@kernel(inline=True)
def below(first_word, key, purpose, index, bound, epoch):
    """`randomness.integers` for one index whose word of attempt 0 is at hand; int64 in 0 … bound − 1."""
    b = np.uint64(bound)
    product = first_word * b
    if (product & _LOW) < b:  # only then can it be below 2³² mod bound; saves a division
        threshold = (np.uint64(1) << _32) % b
        attempt = 0
        while (product & _LOW) < threshold:
            attempt += 1
            product = word(key, purpose, index, epoch, attempt) * b
    return np.int64(product >> _32)


@kernel(inline=True)
def integer(key, purpose, index, bound, epoch):
    """`randomness.integers` for one index; int64 in 0 … bound − 1."""
    return below(word(key, purpose, index, epoch, 0), key, purpose, index, bound, epoch)


@kernel(inline=True)
def segment_key(file_key, document, repeat, start):
    """`randomness.segment_key` for one segment."""
    d = np.uint64(document)
    w0, w1, _, _ = philox(
        file_key, d & _LOW, d >> _32, np.uint64(start), np.uint64(repeat) * np.uint64(256) + np.uint64(SEGMENT_KEY)
    )
    return w0 | (w1 << _32)


@kernel(inline=True)
def draw_task(key, thresholds):
    """int64: the first task whose threshold (int64, cumulative share · 2⁵³) lies above the key's draw."""
    u = np.int64(bits64(key, TASK, 0, 0) >> np.uint64(11))
    for task in range(thresholds.shape[0]):
        if u < thresholds[task]:
            return task
    return thresholds.shape[0] - 1


@kernel
def philox_blocks(key, purpose, epoch, blocks, out):
    """`randomness.words` of indices 0 … 4 · blocks − 1 into out (uint32[≥ 4 · blocks + 28]): whole eights of
    blocks are written.

    The compiler runs eight blocks side by side, so that each costs a fraction of one that is asked for alone.
    """
    key_0, key_1 = key & _LOW, key >> _32
    p, e = np.uint64(purpose), np.uint64(epoch)
    for block in range((blocks + 7) & ~7):
        c0, c1, c2, c3 = np.uint64(block), np.uint64(0), p, e
        k0, k1 = key_0, key_1
        for _ in range(10):
            p0, p1 = _MUL_0 * c0, _MUL_1 * c2
            c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
            k0, k1 = (k0 + _KEY_STEP_0) & _LOW, (k1 + _KEY_STEP_1) & _LOW
        out[4 * block], out[4 * block + 1], out[4 * block + 2], out[4 * block + 3] = c0, c1, c2, c3


@kernel
def bits64_of_keys(key, purpose, out):
    """`randomness.bits64(key, purpose)` of each key (uint64[m]) into out (uint64[≥ m])."""
    p, zero = np.uint64(purpose), np.uint64(0)
    for i in range(key.shape[0]):
        w0, w1, _, _ = philox(key[i], zero, zero, p, zero)
        out[i] = w0 | (w1 << _32)


# Copies


def warm_kernels() -> None:
    """Load what the first kernel of a process brings along: half a second of numba."""
    nothing = np.empty(0, np.uint64)
    bits64_of_keys(nothing, np.uint64(SEGMENT_KEY), nothing)


def _copy_bytes(typing_context, target, at, source, begin, n):
    """memcpy of n items of two contiguous arrays of one dtype."""

    def generate(context, builder, signature, arguments):
        to, size = _pointer(context, builder, signature.args[0], arguments[0], arguments[1])
        of, _ = _pointer(context, builder, signature.args[2], arguments[2], arguments[3])
        cgutils.raw_memcpy(builder, to, of, arguments[4], size)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.int64), generate


def _copy_chunk(typing_context, target, at, source, begin):
    """CHUNK_BYTES from one array to another of its dtype, as one load and one store."""

    def generate(context, builder, signature, arguments):
        to, _ = _pointer(context, builder, signature.args[0], arguments[0], arguments[1])
        of, _ = _pointer(context, builder, signature.args[2], arguments[2], arguments[3])
        chunk = ir.VectorType(ir.IntType(8), CHUNK_BYTES).as_pointer()
        loaded = builder.load(builder.bitcast(of, chunk), align=1)
        builder.store(loaded, builder.bitcast(to, chunk), align=1)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64), generate


def _pointer(context, builder, array_type, array, index):
    """(pointer to an item of a contiguous array, bytes of an item)."""
    data = context.make_array(array_type)(context, builder, array).data
    size = context.get_abi_sizeof(context.get_data_type(array_type.dtype))
    return builder.gep(data, [index]), size


CHUNK_BYTES = 32
_copy_bytes_of: Any = intrinsic(_copy_bytes)
_copy_chunk_of: Any = intrinsic(_copy_chunk)


def copy_items(target, at, source, begin, n):
    """target[at : at + n] = source[begin : begin + n], for kernels; the ranges lie inside their arrays, which share nothing."""
    target[at : at + n] = source[begin : begin + n]


def copy_run(target, at, source, begin, n, end):
    """`copy_items` for short runs, which may also write what it likes to target[at + n : end], and read as much behind the
    source's run if that lies in its array."""
    copy_items(target, at, source, begin, n)


@overload(copy_items, jit_options={"forceinline": True})
def _copy_items(target, at, source, begin, n):
    if target.dtype == source.dtype:

        def copy(target, at, source, begin, n):
            _copy_bytes_of(target, at, source, begin, n)

        return copy

    def cast(target, at, source, begin, n):
        for i in range(n):
            target[at + i] = source[begin + i]

    return cast


@overload(copy_run, jit_options={"forceinline": True})
def _copy_run(target, at, source, begin, n, end):
    if target.dtype == source.dtype:
        chunk = CHUNK_BYTES // (target.dtype.bitwidth // 8)

        def copy(target, at, source, begin, n, end):
            if at + n + chunk <= end and begin + n + chunk <= source.shape[0]:
                _copy_chunk_of(target, at, source, begin)
                for done in range(chunk, n, chunk):
                    _copy_chunk_of(target, at + done, source, begin + done)
            else:
                for i in range(n):
                    target[at + i] = source[begin + i]

        return copy

    def cast(target, at, source, begin, n, end):
        for i in range(n):
            target[at + i] = source[begin + i]

    return cast


@kernel
def copy_ranges(source, source_begin, n, target, target_begin):
    """Copy n[i] items from source[source_begin[i]:] to target[target_begin[i]:], for each i."""
    for i in range(n.shape[0]):
        copy_items(target, target_begin[i], source, source_begin[i], n[i])


# Bits


def _trailing_zeros(typing_context, value):
    """How many low bits of a uint64 are zero; 64 for 0."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


def _leading_zeros(typing_context, value):
    """How many high bits of a uint64 are zero; 64 for 0."""

    def generate(context, builder, signature, arguments):
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


def _bits_set(typing_context, value):
    """How many bits of a uint64 are set."""

    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


def _flags_as_bits(typing_context, flags, begin):
    """uint64: bit j says whether flags[begin + j] (uint8) is not 0, j = 0 … 63."""

    def generate(context, builder, signature, arguments):
        at, _ = _pointer(context, builder, signature.args[0], arguments[0], arguments[1])
        of_64 = ir.VectorType(ir.IntType(8), 64)
        loaded = builder.load(builder.bitcast(at, of_64.as_pointer()), align=1)
        return builder.bitcast(builder.icmp_unsigned("!=", loaded, ir.Constant(of_64, None)), ir.IntType(64))

    return types.uint64(flags, types.int64), generate


trailing_zeros: Any = intrinsic(_trailing_zeros)
leading_zeros: Any = intrinsic(_leading_zeros)
bits_set: Any = intrinsic(_bits_set)
flags_as_bits: Any = intrinsic(_flags_as_bits)
