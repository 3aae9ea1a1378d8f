"""Random numbers for kernels: compiled versions of functions in `randomness.py`."""

import numpy as np

from packprep.kernel.compiling import kernel
from packprep.randomness import SEGMENT_KEY, TASK

_MUL_0, _MUL_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEP_0, _KEY_STEP_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)


@kernel(inline=True)
def philox(key, c0, c1, c2, c3):
    """Return the four random words of the Philox block with the counter (c0, c1, c2, c3).

    All arguments are uint64 scalars. The words are uint64 below 2³². `randomness.philox` does the
    same for arrays.
    """
    k0, k1 = key & _LOW, key >> _32
    for _ in range(10):
        p0, p1 = _MUL_0 * c0, _MUL_1 * c2
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _KEY_STEP_0) & _LOW, (k1 + _KEY_STEP_1) & _LOW
    return c0, c1, c2, c3


@kernel(inline=True)
def word(key, purpose, index, epoch, attempt):
    """Return one random word, a uint64 below 2³².

    It is the word that `randomness.words` returns for `index`.
    """
    i = np.uint64(index)
    w0, w1, w2, w3 = philox(
        key, i >> np.uint64(2), np.uint64(attempt), np.uint64(purpose), np.uint64(epoch)
    )
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
    """Return one random uint64, the same as `randomness.bits64` for `index`."""
    w0, w1, _, _ = philox(key, np.uint64(index), np.uint64(0), np.uint64(purpose), np.uint64(epoch))
    return w0 | (w1 << _32)


@kernel(inline=True)
def below(first_word, key, purpose, index, bound, epoch):
    """Return one random int64 in 0 … bound − 1, the same as `randomness.integers` for `index`.

    `first_word` is the result of `word` with attempt 0.
    """
    b = np.uint64(bound)
    product = first_word * b
    # The low half can only be below 2³² mod bound if it is below bound. This saves a division.
    if (product & _LOW) < b:
        threshold = (np.uint64(1) << _32) % b
        attempt = 0
        while (product & _LOW) < threshold:
            attempt += 1
            product = word(key, purpose, index, epoch, attempt) * b
    return np.int64(product >> _32)


@kernel(inline=True)
def integer(key, purpose, index, bound, epoch):
    """Return one random int64 in 0 … bound − 1, the same as `randomness.integers` for `index`."""
    return below(word(key, purpose, index, epoch, 0), key, purpose, index, bound, epoch)


@kernel(inline=True)
def segment_key(file_key, document, repeat, start):
    """Return the key of one segment, the same as `randomness.segment_key`."""
    d = np.uint64(document)
    w0, w1, _, _ = philox(
        file_key,
        d & _LOW,
        d >> _32,
        np.uint64(start),
        np.uint64(repeat) * np.uint64(256) + np.uint64(SEGMENT_KEY),
    )
    return w0 | (w1 << _32)


@kernel(inline=True)
def draw_task(key, thresholds):
    """Return the index of a segment's task, drawn at random from the segment's key.

    `thresholds`, int64[tasks], has the cumulative shares of the tasks times 2⁵³. The key gives a
    number in 0 … 2⁵³ − 1. The first task with a threshold above this number is drawn, or the last
    task if no threshold is above it.
    """
    u = np.int64(bits64(key, TASK, 0, 0) >> np.uint64(11))
    for task in range(thresholds.shape[0]):
        if u < thresholds[task]:
            return task
    return thresholds.shape[0] - 1


@kernel
def philox_blocks(key, purpose, epoch, blocks, out):
    """Write the random words with indices 0 … 4 · blocks − 1 to `out`, a uint32 array.

    The words are those of `randomness.words`. The number of written blocks is rounded up to a
    multiple of 8, so `out` needs up to 4 · blocks + 28 items. The compiler computes 8 blocks side
    by side, which costs a fraction of 8 single blocks.
    """
    key_0, key_1 = key & _LOW, key >> _32
    p, e = np.uint64(purpose), np.uint64(epoch)
    # A block depends only on its counter, so the compiler can compute several blocks at once.
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
    """For each key, write the result of `randomness.bits64` to `out`.

    `key` is uint64[m], and `out` is uint64 with at least m items.
    """
    p, zero = np.uint64(purpose), np.uint64(0)
    for i in range(key.shape[0]):
        w0, w1, _, _ = philox(key[i], zero, zero, p, zero)
        out[i] = w0 | (w1 << _32)


def warm_kernels() -> None:
    """Import numba and load a kernel. Together they take half a second in a new process."""
    nothing = np.empty(0, np.uint64)
    bits64_of_keys(nothing, np.uint64(SEGMENT_KEY), nothing)
