"""Copies and bit operations for kernels, in plain Python.

`overloads.py` compiles them to processor instructions.
"""

import numpy as np


def copy_items(target, target_begin, source, begin, n):
    """Copy source[begin : begin + n] to target[target_begin : target_begin + n].

    Both ranges must lie inside their arrays, and the arrays must not share memory.
    """
    target[target_begin : target_begin + n] = source[begin : begin + n]


def copy_run(target, target_begin, source, begin, n, end):
    """Copy n items like `copy_items`, but faster if n is small.

    The function may also overwrite target[target_begin + n : end] with arbitrary values, and may
    read items of `source` after the copied ones.
    """
    copy_items(target, target_begin, source, begin, n)


def copy_ranges(source, source_begin, n, target, target_begin):
    """Copy n[i] items from source[source_begin[i]:] to target[target_begin[i]:], for each i."""
    for i in range(n.shape[0]):
        copy_items(target, target_begin[i], source, source_begin[i], n[i])


def trailing_zeros(value):
    """Return how many low bits of a uint64 are zero; 64 for 0."""
    return (int(value) & -int(value)).bit_length() - 1 if int(value) else 64


def leading_zeros(value):
    """Return how many high bits of a uint64 are zero; 64 for 0."""
    return 64 - int(value).bit_length()


def bits_set(value):
    """Return how many bits of a uint64 are set."""
    return int(value).bit_count()


def flags_as_bits(flags, begin):
    """Return a uint64 in which bit j (0 … 63) is 1 if flags[begin + j] (uint8) is not 0."""
    packed = np.packbits(flags[begin : begin + 64] != 0, bitorder="little")
    return np.uint64(int.from_bytes(packed.tobytes(), "little"))
