"""Megatron-core's indexed dataset, written: PREFIX.bin holds tokens alone, PREFIX.idx where each document lies.

    .idx   MMIDIDX\\0\\0   u64 version 1   u8 dtype   u64 sequences   u64 documents + 1
           i32[sequences] tokens of each   i64[sequences] first byte of each in .bin   i64[documents + 1] first sequence

All little-endian. The format is that of `megatron.core.datasets.indexed_dataset` (megatron-core 0.16), whose `DType` numbers
the dtypes and takes uint16 below 65 500 ids. A document is one sequence here, as its `preprocess_data.py` writes them.
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np

from packprep.building.files import Growing
from packprep.errors import DatasetError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_CODES = {np.dtype("<u2"): 8, np.dtype("<i4"): 4}
_MOST_UINT16_IDS = 65500
_AT_ONCE = 1 << 20  # entries of the index that are made at a time


def dtype_for(vocab_size: int) -> np.dtype:
    """The dtype that Megatron takes for a vocabulary."""
    return np.dtype("<u2" if vocab_size < _MOST_UINT16_IDS else "<i4")


class Pair:
    """A .bin and its .idx in the making: `add` documents, then `commit`; or `discard`. Four bytes a document in memory."""

    def __init__(self, prefix: Path, dtype: np.dtype):
        self.prefix, self.dtype = prefix, dtype
        self._bin = Growing(prefix.with_name(f"{prefix.name}.bin"))
        self._idx = Growing(prefix.with_name(f"{prefix.name}.idx"))
        self._lengths: list[np.ndarray] = []
        self.documents = self.tokens = 0

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents: tokens[Σ lengths] of any integer dtype, lengths int64[d]."""
        if len(lengths) and lengths.max() >= 1 << 31:
            raise DatasetError(f"{self.prefix}: a document of {lengths.max()} tokens; the format ends at 2147483647")
        self._bin.append(np.ascontiguousarray(tokens, self.dtype))
        self._lengths.append(lengths.astype("<i4"))
        self.documents += len(lengths)
        self.tokens += len(tokens)

    def commit(self) -> list[dict[str, Any]]:
        """Make both files appear, .idx last: [{file, bytes, digest}]."""
        lengths = np.concatenate([np.zeros(0, "<i4"), *self._lengths])
        n = len(lengths)
        self._idx.append(MAGIC + struct.pack("<QBQQ", VERSION, _CODES[self.dtype], n, n + 1))
        self._idx.append(lengths)
        byte = 0
        for begin in range(0, n, _AT_ONCE):
            ends = byte + np.cumsum(lengths[begin : begin + _AT_ONCE], dtype="<i8") * self.dtype.itemsize
            self._idx.append(np.concatenate(([byte], ends[:-1])).astype("<i8"))
            byte = int(ends[-1])
        for begin in range(0, n + 1, _AT_ONCE):
            self._idx.append(np.arange(begin, min(begin + _AT_ONCE, n + 1), dtype="<i8"))
        return [self._bin.commit(), self._idx.commit()]

    def discard(self) -> None:
        """Leave nothing behind."""
        self._bin.discard()
        self._idx.discard()
