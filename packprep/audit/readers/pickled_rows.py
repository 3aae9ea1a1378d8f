"""Read the .npy files of packed rows of NeMo and Megatron-Bridge without unpickling them.

Such a file is an array of Python objects, which NumPy stores as a pickle. Each row is a dict:

    {"input_ids": [11, 12, 2, 21, 2], "loss_mask": [1, 1, 0, 1, 0], "seq_start_id": [0, 3]}

A pickle can run any code, and takes 40 bytes of memory per token. This reader accepts only the
operations that such rows need, and reads one row after another. The operations are those of
protocols 2 to 5 in Python's `pickletools`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from packprep.audit.readers.columns import StoredRows, joined_values, packed_data, stored_rows
from packprep.audit.rows import Choices, PackedData
from packprep.errors import SourceError
from packprep.kernel import kernel, read_only
from packprep.sources.formats.token_stream import numpy_header

_BEGIN = 1024  # bytes that contain the header of a .npy file
_NAMES = ("input_ids", "loss_mask", "seq_start_id")
_READ_BYTES = 1 << 20
_LONGEST = 16  # bytes of the longest operation without a text
_MOST_DECODED = 1 << 16
_BYTE, _SHORT, _INTEGER, _FLOAT, _TRUE, _FALSE = b"KMJG\x88\x89"
"""BININT1, BININT2, BININT, BINFLOAT, NEWTRUE and NEWFALSE."""
_FRAME, _MARK, _APPENDS, _APPEND = b"\x95(ea"
"""Operations between the numbers of a list."""


@kernel
def numbers_at(data, offset, decoded):
    """Decode the operations of a list of numbers, up to the first other operation.

    A float becomes 1 if it is not 0, because only masks may be floats.

    Args:
        data: uint8[n], bytes of a pickle.
        offset: Index of the first operation.
        decoded: int64[m], receives the numbers.

    Returns:
        The index of the next operation, the number of numbers, and how many of them are floats.
    """
    count, floats = 0, 0
    while count < decoded.shape[0] and offset < data.shape[0]:
        code = data[offset]
        # These operations may be between two numbers, and have no value.
        if code == _FRAME and offset + 9 <= data.shape[0]:
            offset += 9
            continue
        if code in (_MARK, _APPENDS, _APPEND):
            offset += 1
            continue
        size = 0
        if code == _BYTE:
            size = 1
        elif code == _SHORT:
            size = 2
        elif code == _INTEGER:
            size = 4
        elif code == _FLOAT:
            size = 8
        elif code != _TRUE and code != _FALSE:
            break
        # The last number may not be complete yet.
        if offset + 1 + size > data.shape[0]:
            break
        value = np.int64(0)
        if code == _FLOAT:
            floats += 1
            # A float is 0 if all bits except the sign are 0.
            value = np.int64(data[offset + 1] & 127)  # without the sign, since -0.0 is 0
            for i in range(2, 9):
                value |= np.int64(data[offset + i])
            value = np.int64(value != 0)
        elif size == 0:
            value = np.int64(code == _TRUE)
        else:
            # Integers are little-endian. Only integers of four bytes have a sign.
            for i in range(size):
                value |= np.int64(data[offset + 1 + i]) << np.int64(8 * i)
            if size == 4 and value >= 1 << 31:
                value -= 1 << 32
        decoded[count] = value
        count += 1
        offset += 1 + size
    return offset, count, floats


def recognizes(path: Path) -> bool:
    """Return whether a path is a .npy file of Python objects."""
    try:
        with path.open("rb") as file:
            _, dtype, _ = numpy_header(str(path), file.read(_BEGIN))
    except (OSError, SourceError):
        return False
    return dtype.hasobject


def open_rows(path: Path, choices: Choices) -> PackedData:
    """Open a file of packed rows.

    Raises:
        SourceError: If the file has other objects than rows.
    """

    def stored() -> Iterator[StoredRows]:
        first_row, tokens, rows = 0, 0, []
        for row in _rows(path):
            rows.append(row)
            tokens += len(row["input_ids"])
            if tokens >= choices.batch_tokens:
                yield _stored(path, first_row, rows)
                first_row, tokens, rows = first_row + len(rows), 0, []
        if rows:
            yield _stored(path, first_row, rows)

    return packed_data("packed .npy of NeMo and Megatron-Bridge", stored, _NAMES)


def _stored(path: Path, first_row: int, rows: list[dict[str, np.ndarray]]) -> StoredRows:
    columns = {name: joined_values([row[name] for row in rows]) for name in _NAMES}
    return stored_rows(path, first_row, columns, "input_ids")


def _rows(path: Path) -> Iterator[dict[str, np.ndarray]]:
    """Yield the rows of a file.

    Raises:
        SourceError: If the file has other objects than rows, or ends too early.
    """
    with path.open("rb") as file:
        _, _, begin = numpy_header(str(path), file.read(_BEGIN))
        file.seek(begin)
        operations = _Operations(file)
        number = 0
        try:
            for row in operations.rows():
                missing = [name for name in _NAMES if name not in row]
                if missing:
                    raise ValueError(f"no {missing[0]}")
                if row["input_ids"].dtype.kind != "i":
                    raise ValueError("input_ids are not integers")
                yield row
                number += 1
        except (ValueError, IndexError, KeyError) as error:
            raise SourceError(
                f"{path}: row {number}: not a packed row of NeMo or Megatron-Bridge: {error}\n"
                "hint: give a file of dicts with input_ids, loss_mask and seq_start_id"
            ) from error


class _Operations:
    """The operations of a pickle, read as a stream."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._data, self._at = file, b"", 0
        self._texts: dict[int, str] = {}  # memo, of texts only
        self._memoized = 0
        self._decoded = np.empty(_MOST_DECODED, np.int64)

    def rows(self) -> Iterator[dict[str, np.ndarray]]:
        """Yield each dict of lists of integers."""
        row: dict[str, np.ndarray] | None = None
        key: str | None = None
        values: list[np.ndarray] | None = None
        text: str | None = None

        def ended() -> None:
            nonlocal values, key
            if values is not None and row is not None and key is not None:
                row[key] = np.concatenate(values) if values else np.zeros(0, np.int64)
            values = key = None

        # A row is pickled as keys, each followed by a list of numbers. Nothing is executed.
        while (operation := self._take(1)) != b".":
            code = operation[0]
            if values is not None and code in b"KMJG\x88\x89":
                values.append(self._numbers())
            elif code in b"X\x8c":  # BINUNICODE, SHORT_BINUNICODE
                ended()
                size = int.from_bytes(self._take(4 if code == 88 else 1), "little")
                text = key = self._take(min(size, 1 << 10)).decode()
            elif code in b"hj":  # BINGET, LONG_BINGET
                number = int.from_bytes(self._take(1 if code == 104 else 4), "little")
                # Pickle writes each key once, and later refers to it.
                if number in self._texts:
                    ended()
                    key = self._texts[number]
                elif values is not None or row is not None:
                    raise ValueError("it refers to an earlier object")
            elif code in b"qr\x94":  # BINPUT, LONG_BINPUT, MEMOIZE
                number = self._memoized
                if code != 0x94:
                    number = int.from_bytes(self._take(1 if code == 113 else 4), "little")
                if text is not None:
                    self._texts[number] = text
                self._memoized += 1
                text = None
            elif code == 125:  # EMPTY_DICT
                ended()
                if row:
                    yield row
                row, key = {}, None
            elif code == 93 and row is not None:  # EMPTY_LIST
                if key is None or values is not None:
                    raise ValueError("a list inside of a list")
                values = []
            elif code == 0x80:  # PROTO
                self._take(1)
            elif code == 0x95:  # FRAME
                self._take(8)
            # Until the first row, the operations describe the NumPy array. They are skipped.
            elif row is None and code in b"c":  # GLOBAL
                self._line()
                self._line()
            elif row is None and code in b"KMJ":
                self._take({75: 1, 77: 2, 74: 4}[code])
            elif row is None and code in b"UC":  # SHORT_BINSTRING, SHORT_BINBYTES
                self._take(self._take(1)[0])
            elif code not in b"(eausb]" + (
                b"\x93\x85\x86\x87tR\x89\x88N)" if row is None else b"tbR"
            ):
                raise ValueError(f"operation {chr(code)!r} of a pickle")
        ended()
        if row:
            yield row

    def _numbers(self) -> np.ndarray:
        """Return a run of numbers. The code of the first one was taken."""
        self._at -= 1
        if len(self._data) - self._at < 2 * _LONGEST:
            self._fill()
        data = read_only(np.frombuffer(self._data, np.uint8))
        next_offset, count, floats = numbers_at(data, self._at, self._decoded)
        if not count:
            raise ValueError("it ends too early")
        self._at = int(next_offset)
        numbers = self._decoded[:count]
        return numbers.astype(np.float64) if floats else numbers.copy()

    def _take(self, count: int) -> bytes:
        if len(self._data) - self._at < count:
            self._fill()
        data = self._data[self._at : self._at + count]
        if len(data) < count:
            raise ValueError("it ends too early")
        self._at += count
        return data

    def _line(self) -> None:
        while self._take(1) != b"\n":
            pass

    def _fill(self) -> None:
        self._data = self._data[self._at :] + self._file.read(_READ_BYTES)
        self._at = 0
