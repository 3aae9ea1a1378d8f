"""Memory that a process keeps from one shard to the next: fresh pages cost more than what is written to them."""

import mmap
from typing import Any

import numpy as np

LARGE_BYTES = 4 << 20
"""From how much memory on numpy asks for huge pages."""


class Buffers:
    """Memory under names. What was given under a name ends where the next array of that name begins.

    A process that makes one shard after another keeps one of these; a shard made with its own is memory of its own.
    """

    def __init__(self) -> None:
        self._kept: dict[str, np.ndarray] = {}

    def room(self, name: str, dtype: np.dtype | type, size: int, keep: int = 0) -> np.ndarray:
        """All memory of a name, `size` items or more of which the first `keep` are what they were."""
        dtype = np.dtype(dtype)
        kept = self._kept.get(name)
        if kept is None or kept.nbytes < size * dtype.itemsize:
            if not keep:
                self._kept.pop(name, None)  # before more is asked for
                kept = None
            more = _fresh(size * dtype.itemsize * 9 // 8)  # a plan estimates, and the next shard may be a little larger
            if kept is not None:
                more[: keep * dtype.itemsize] = kept[: keep * dtype.itemsize]
            kept = self._kept[name] = more
        return kept[: len(kept) // dtype.itemsize * dtype.itemsize].view(dtype)

    def array(self, name: str, dtype: np.dtype | type, size: int) -> np.ndarray:
        """An array of `size` items, whatever they are."""
        return self.room(name, dtype, size)[:size]

    def zeros(self, name: str, dtype: np.dtype | type, size: int) -> np.ndarray:
        """An array of `size` zeros."""
        array = self.array(name, dtype, size)
        array.fill(0)
        return array


def _fresh(n_bytes: int) -> np.ndarray:
    """Memory of its own, uint8[n_bytes].

    In pages as small as the system has them. numpy asks for huge ones, which the system cuts from its largest free blocks,
    and those are what a virtual machine has given back to its host: to touch them first takes twice as long.
    """
    if n_bytes < LARGE_BYTES:
        return np.empty(n_bytes, np.uint8)
    return np.frombuffer(mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


class Column:
    """An array that grows at its end, in the memory of `buffers`. expected: the size at which it need not grow."""

    def __init__(self, buffers: Buffers, name: str, dtype: np.dtype | type, expected: int = 1024):
        self._buffers, self._name, self.dtype = buffers, name, np.dtype(dtype)
        self._array, self.size = buffers.room(name, dtype, expected), 0

    def extend(self, values: Any, count: int | None = None) -> None:
        """Append an array, or one value `count` times."""
        count = len(values) if count is None else count
        end = self.size + count
        if end > len(self._array):
            self._array = self._buffers.room(self._name, self.dtype, max(end, 2 * len(self._array)), self.size)
        self._array[self.size : end] = values
        self.size = end

    def array(self) -> np.ndarray:
        """What has been appended."""
        return self._array[: self.size]
