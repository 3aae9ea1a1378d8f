"""Copies and bits in kernels: what compilers have and Python has not. Here in plain Python;
compiled by `overloads.py`."""

import numpy as np


def copy_items(target, at, source, begin, n):
    """target[at : at + n] = source[begin : begin + n], for kernels; the ranges lie inside their
    arrays, which share nothing."""
    target[at : at + n] = source[begin : begin + n]


def copy_run(target, at, source, begin, n, end):
    """`copy_items` for short runs, which may also write what it likes to target[at + n : end], and
    read as much behind the source's run if that lies in its array."""
    copy_items(target, at, source, begin, n)


def copy_ranges(source, source_begin, n, target, target_begin):
    """Copy n[i] items from source[source_begin[i]:] to target[target_begin[i]:], for each i."""
    for i in range(n.shape[0]):
        copy_items(target, target_begin[i], source, source_begin[i], n[i])


def trailing_zeros(value):
    """How many low bits of a uint64 are zero; 64 for 0."""
    return (int(value) & -int(value)).bit_length() - 1 if int(value) else 64


def leading_zeros(value):
    """How many high bits of a uint64 are zero; 64 for 0."""
    return 64 - int(value).bit_length()


def bits_set(value):
    """How many bits of a uint64 are set."""
    return int(value).bit_count()


def flags_as_bits(flags, begin):
    """uint64: bit j says whether flags[begin + j] (uint8) is not 0, j = 0 … 63."""
    packed = np.packbits(flags[begin : begin + 64] != 0, bitorder="little")
    return np.uint64(int.from_bytes(packed.tobytes(), "little"))
