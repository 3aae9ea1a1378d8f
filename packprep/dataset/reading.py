"""Arrays of a file that are read, not mapped: a file server that is lost is an error here, and under a map a SIGBUS.

    FileArray ── [row], part(…), read_row(…) ─► File.read ─► preadv into the caller's array

preadv has no file position, so threads and forked processes may share a File.
"""

import os
from pathlib import Path

import numpy as np

from packprep.dataset.opening import open_descriptor
from packprep.errors import DatasetError

CAN_PREAD = hasattr(os, "preadv")  # not on Windows
_CAN_ADVISE = hasattr(os, "posix_fadvise")  # not on macOS


class _Descriptor:
    """An open file's descriptor, closed when nobody reads from it any more."""

    def __init__(self, path: Path):
        self.number = open_descriptor(path)

    def __del__(self):
        number = self.__dict__.pop("number", None)  # None: it could not be opened
        if number is not None:
            os.close(number)


class ShardBytes:
    """A file of `size` bytes, held open from the first read on; opened anew by the read after one that failed."""

    def __init__(self, path: Path, size: int):
        self.path = path
        self.size = size
        self._open: _Descriptor | None = None

    def _opened(self) -> _Descriptor:
        descriptor = _Descriptor(self.path)
        size = os.fstat(descriptor.number).st_size
        if size != self.size:
            raise DatasetError(
                f"{self.path}: its size changed since it was opened ({self.size} bytes then, {size} now)"
            )
        self._open = descriptor
        return descriptor

    def open(self) -> None:
        """Open it now; DatasetError if that fails or its size is another."""
        try:
            self._opened()
        except OSError as error:
            raise DatasetError(f"{self.path}: cannot be opened: {error}") from error

    def read(self, at: int, target: np.ndarray, name: str, row: int) -> None:
        """Fill `target` (C-contiguous) with the bytes from `at` on, which are of array `name` and of `row`."""
        done, size = 0, target.nbytes
        if not size:
            return
        view = target.view(np.uint8).data
        try:
            descriptor = self._open or self._opened()  # held here: another thread may drop it
            while done < size:
                got = os.preadv(descriptor.number, [view[done:]], at + done)
                if not got:
                    self._open = None
                    raise DatasetError(
                        f"{self.path}: row {row}: array {name!r}: the file ends {size - done} bytes before the row does; "
                        "it was truncated since it was opened: put it back, or build it again"
                    )
                done += got
        except OSError as error:
            self._open = None
            raise DatasetError(
                f"{self.path}: row {row}: array {name!r}: cannot be read: {error}; once the file can be read "
                "again, ask again: a batch that failed does not count as delivered"
            ) from error

    def will_need(self, at: int, size: int) -> None:
        """Ask the system to begin reading these bytes; it may as well not."""
        descriptor = self._open
        if _CAN_ADVISE and descriptor is not None:
            os.posix_fadvise(descriptor.number, at, size, os.POSIX_FADV_WILLNEED)


class FileArray:
    """An array that lies in a file from byte `at` on; whatever is asked of it is read into fresh memory, read-only."""

    def __init__(self, file: ShardBytes, name: str, dtype: np.dtype, shape: tuple[int, ...], at: int):
        self.file, self.name, self.dtype, self.shape, self.at = file, name, dtype, shape, at
        self._entry_bytes = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))

    def __getitem__(self, row: int) -> np.ndarray:
        """Row `row` of an array that has one entry for each row; IndexError where it has none."""
        if not 0 <= row < self.shape[0]:
            raise IndexError(f"row {row} of array {self.name!r} of {self.shape[0]} rows")
        values = np.empty(self.shape[1:], self.dtype)
        self.read_row(row, values)
        values.flags.writeable = False
        return values

    def read_row(self, row: int, target: np.ndarray) -> None:
        """The same into `target`, of any dtype: without a copy where it is contiguous and of this array's dtype."""
        if target.dtype == self.dtype and target.flags.c_contiguous:
            self.file.read(self.at + row * self._entry_bytes, target, self.name, row)
        else:
            target[...] = self[row]

    def part(self, row: int, begin: int, end: int) -> np.ndarray:
        """Entries begin … end − 1, cut at the array's end; `row` is what they are read for."""
        end = min(end, self.shape[0])
        values = np.empty((max(0, end - begin), *self.shape[1:]), self.dtype)
        self.file.read(self.at + begin * self._entry_bytes, values, self.name, row)
        values.flags.writeable = False
        return values
