"""Compile functions with `@kernel`, and give kernels random numbers, copies and bit operations.

Importing this package does not import numba. The first call of a kernel imports numba. Commands
without kernels therefore do not wait for this import.
"""

from packprep.kernel import memory
from packprep.kernel.chance import (
    below,
    bits64,
    bits64_of_keys,
    draw_task,
    integer,
    philox,
    philox_blocks,
    segment_key,
    warm_kernels,
    word,
)
from packprep.kernel.compiling import kernel, read_only
from packprep.kernel.memory import (
    bits_set,
    copy_items,
    copy_run,
    flags_as_bits,
    leading_zeros,
    trailing_zeros,
)

__all__ = [
    "below",
    "bits64",
    "bits64_of_keys",
    "bits_set",
    "copy_items",
    "copy_ranges",
    "copy_run",
    "draw_task",
    "flags_as_bits",
    "integer",
    "kernel",
    "leading_zeros",
    "philox",
    "philox_blocks",
    "read_only",
    "segment_key",
    "trailing_zeros",
    "warm_kernels",
    "word",
]

copy_ranges = kernel(memory.copy_ranges)
