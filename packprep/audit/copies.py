"""Count the copies among 128-bit hashes exactly, in bounded memory.

Up to MOST_HASHES_IN_MEMORY hashes are kept in memory. Beyond that they are spilled to a temporary
folder, into one file per leading byte of the hash, and each file is later sorted separately.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

MOST_HASHES_IN_MEMORY = 2_000_000
_FILES = 256
RECORD = np.dtype([("x", "<u8"), ("y", "<u8"), ("row", "<i8"), ("token", "<i8"), ("head", "<u8")])
"""A hash of two halves, the place of its document (row, and first token in the row), and the hash
of the document's first tokens."""


class Copies(NamedTuple):
    """The result of `HashTable.copies`: the number of copies, and the first copies.

    Attributes:
        number: Number of records with the hash of an earlier record.
        pairs: (place of a copy, place of the first record with its hash), by place of the copy.
    """

    number: int
    pairs: list[tuple[tuple[int, int], tuple[int, int]]]


class HashTable:
    """A collection of hashes with their places.

    Attributes:
        spilled_bytes: Number of bytes in the temporary folder.
    """

    def __init__(self, most_in_memory: int = MOST_HASHES_IN_MEMORY):
        self._most, self._count = most_in_memory, 0
        self._blocks: list[np.ndarray] = []
        self._folder: tempfile.TemporaryDirectory | None = None
        self.spilled_bytes = 0

    def add(
        self, hashes: np.ndarray, row: np.ndarray, token: np.ndarray, heads: np.ndarray | int = 0
    ) -> None:
        """Add hashes, uint64[k, 2], with the fields of RECORD, [k] each."""
        records = np.empty(len(hashes), RECORD)
        records["x"], records["y"] = hashes[:, 0], hashes[:, 1]
        records["row"], records["token"] = row, token
        records["head"] = heads
        self._blocks.append(records)
        self._count += len(records)
        if self._count > self._most:
            self._spill()

    def _spill(self) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="packprep-audit-")
        for block in self._blocks:
            # The top byte of a hash chooses its file, so equal hashes are in the same file.
            number = (block["x"] >> np.uint64(56)).astype(np.int64)
            order = np.argsort(number, kind="stable")
            bounds = np.searchsorted(number[order], np.arange(_FILES + 1))
            for f in np.flatnonzero(np.diff(bounds)).tolist():
                with (Path(self._folder.name) / f"{f:02x}").open("ab") as file:
                    file.write(block[order[bounds[f] : bounds[f + 1]]].tobytes())
            self.spilled_bytes += block.nbytes
        self._blocks, self._count = [], 0

    def groups(self) -> Iterator[np.ndarray]:
        """Yield all records as arrays, sorted by hash, then by place.

        Equal hashes are in the same array. Tables that both spilled, or both did not, have their
        groups in the same order.
        """
        for block in self._unsorted():
            # Records are added in the order of their places, so a stable sort keeps this order.
            ordered = block[np.argsort(np.ascontiguousarray(block["x"]), kind="stable")]
            x, y = ordered["x"], ordered["y"]
            # Sorting by one half takes a third of the time. It is enough, unless different hashes
            # have the same `x`, which almost never happens.
            if ((x[1:] == x[:-1]) & (y[1:] != y[:-1])).any():
                ordered = block[np.lexsort((block["y"], block["x"]))]
            yield ordered

    def _unsorted(self) -> Iterator[np.ndarray]:
        if self._folder is None:
            yield np.concatenate([np.empty(0, RECORD), *self._blocks])
            return
        self._spill()
        for f in range(_FILES):
            path = Path(self._folder.name) / f"{f:02x}"
            yield np.fromfile(path, RECORD) if path.exists() else np.empty(0, RECORD)

    def divided_by(self, other_table: "HashTable") -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the records whose hashes are not in `other_table`, and the records in both."""
        # The groups of both tables must match, so both spill if one did.
        if self._folder is not None or other_table._folder is not None:
            self._spill()
            other_table._spill()
        for records, other_records in zip(self.groups(), other_table.groups(), strict=True):
            if not len(other_records):
                yield records, records[:0]
                continue
            indices = np.minimum(
                np.searchsorted(other_records["x"], records["x"]), len(other_records) - 1
            )
            is_in = other_records["x"][indices] == records["x"]
            # Another hash with the same `x` may come first, which almost never happens.
            for i in np.flatnonzero(is_in & (other_records["y"][indices] != records["y"])):
                is_in[i] = (
                    records["y"][i] in other_records["y"][other_records["x"] == records["x"][i]]
                )
            yield records[~is_in], records[is_in]

    def copies(self, most_pairs: int) -> Copies:
        """Return the number of copies, and the pairs of the `most_pairs` first copies."""
        count = 0
        pairs: list[tuple[tuple[int, int], tuple[int, int]]] = []
        for block in self.groups():
            if not len(block):
                continue
            is_copy = np.zeros(len(block), np.bool_)
            is_copy[1:] = (block["x"][1:] == block["x"][:-1]) & (block["y"][1:] == block["y"][:-1])
            count += int(is_copy.sum())
            firsts = np.flatnonzero(~is_copy)
            copies = np.flatnonzero(is_copy)
            # The first copies of all groups are among the first copies of each group.
            order = np.lexsort((block["token"][copies], block["row"][copies]))[:most_pairs]
            for i in copies[order].tolist():
                first_record = block[firsts[np.searchsorted(firsts, i, "right") - 1]]
                pairs.append(
                    (
                        (int(block["row"][i]), int(block["token"][i])),
                        (int(first_record["row"]), int(first_record["token"])),
                    )
                )
            pairs = sorted(pairs)[:most_pairs]
        return Copies(count, pairs)
