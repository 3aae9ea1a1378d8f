"""`@kernel`, the one way to compile a function, and the compiled twins of `randomness`.

Flags are set once here: no fast-math (IEEE results are part of the law), numpy's error model, the GIL released,
no threads (processes scale, and forking after a thread pool hangs).
Numba keys its cache by the one file of a function, so that a changed callee in another file would go unnoticed.
Here the cache's folder is named by the digest of all of packprep's sources instead: any change starts a new one.
"""

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from packprep.digests import digest_of_buffers
from packprep.randomness import SEGMENT_KEY, TASK


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
            os.makedirs(folder, mode=0o700, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    return None


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
def copy_ranges(source, source_begin, n, target, target_begin):
    """Copy n[i] items from source[source_begin[i]:] to target[target_begin[i]:], for each i."""
    for i in range(n.shape[0]):
        s, t = source_begin[i], target_begin[i]
        for j in range(n[i]):
            target[t + j] = source[s + j]


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


trailing_zeros: Any = intrinsic(_trailing_zeros)
leading_zeros: Any = intrinsic(_leading_zeros)
