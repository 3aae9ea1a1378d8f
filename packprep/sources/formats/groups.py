"""Join neighbouring records of a file with the same value of `group_by` to documents.

```
records of a file   a a a │ b b │ x a a │ - │ c c c …     x is a reject, - has no value
documents             1   │  2  │   3   │ 4 │   5
work ranges         |── reads 1, 2 and 3 ──|─ reads 4, 5 … ──|
```

A document belongs to the work range in which it begins, which reads it to its end. The next work
range skips these records. Therefore the documents do not depend on where work ranges begin and end.
A reject never ends a group. It belongs to the work range of the record before it, or to its own
work range if the file has no such record.

If a group has more text than a document may have, it becomes several documents, in file order. Each
document is then sorted by `order_by`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from packprep.errors import SourceError
from packprep.sources.formats import batch as limits
from packprep.sources.formats.batch import (
    TOKEN_TEXT_BYTES,
    Batch,
    Choice,
    Groups,
    GroupValue,
    Keep,
    Reject,
    Slice,
    kept,
)

NEAR_BYTES = 1 << 16
NEAR_ROWS = 64
"""Size of the first work range that is read before or after another one, in bytes or in rows."""
_GROWTH = 8  # Each further work range is this many times as large as the one before it.


class FileReader(NamedTuple):
    """The functions that read the records of a file.

    Attributes:
        read: Function (work range, batch_bytes) that yields the records of a work range.
        position: Meaning of a record's position, from `position_of`.
        rows: Function that returns the number of rows of each split. It is only called for a table.
    """

    read: Callable[[Slice, int], Iterator[Batch]]
    position: str
    rows: Callable[[], list[int]]


class _Record(NamedTuple):
    """A record of a file that can be used."""

    position: int
    text: str
    value: GroupValue
    n_bytes: int  # bytes that the record adds to a document


_Read = _Record | Reject


@dataclass
class _Document:
    """The records of a document, in file order.

    `continues` says whether the document continues a group that was too long.
    """

    records: list[_Record]
    continues: bool = False

    @property
    def n_bytes(self) -> int:
        """The bytes of the document's text, with the tokens between its records."""
        return sum(record.n_bytes for record in self.records)


@dataclass
class _Joiner:
    """A joiner that receives records and rejects in file order, and collects documents.

    Attributes:
        last: The value of the last record.
        skips: Whether the current group began before the records that the joiner receives.
        is_early: Whether groups that begin now begin before the work range.
        of_early: Whether the current group began before the work range.
        open: The document that receives the next record, or None.
        done: The complete documents and the rejects, with their `of_early`.
        n_bytes: The approximate bytes of `open` and `done`.
    """

    last: tuple[str, object] | None = None
    skips: bool = False
    is_early: bool = False
    of_early: bool = False
    open: _Document | None = None
    done: list[tuple[_Document | Reject, bool]] = field(default_factory=list)
    n_bytes: int = 0
    _open_bytes: int = 0

    def begins_group(self, read: _Read) -> bool:
        """Return whether a record or reject begins a group."""
        if isinstance(read, Reject):
            return False
        return self.last is None or read.value.group != self.last

    def enter(self) -> None:
        """Note that the next records are in the work range, and not before it."""
        self.is_early = False
        self.of_early &= self.open is not None

    def add(self, read: _Read) -> None:
        """Add the next record or reject of the file."""
        if self.begins_group(read):
            self.close()
            self.open, self.skips, self.of_early = _Document([]), False, self.is_early
        if isinstance(read, Reject):
            # A reject belongs to the group around it, so it is skipped with this group.
            if not self.skips:
                self.done.append((read, self.of_early))
                self.n_bytes += limits.MAX_DETAIL
            return
        self.last = read.value.group
        if self.open is None:
            return
        # The group is longer than a document may be, so it continues in another document.
        if self.open.records and self._open_bytes + read.n_bytes > limits.MAX_DOCUMENT_BYTES:
            self.close()
            self.open = _Document([], continues=True)
        self.open.records.append(read)
        self._open_bytes += read.n_bytes
        self.n_bytes += read.n_bytes

    def close(self) -> None:
        """End the current document."""
        if self.open is not None:
            self.done.append((self.open, self.of_early))
        self.open, self._open_bytes = None, 0

    def taken(self) -> list[tuple[_Document | Reject, bool]]:
        """Return the complete documents and the rejects, and forget them."""
        items, self.done, self.n_bytes = self.done, [], self._open_bytes
        return items


def read_groups(
    reader: FileReader, work_range: Slice, keep: Keep | None, batch_bytes: int
) -> Iterator[Batch]:
    """Yield the documents that begin in a work range, as complete groups of records.

    Args:
        reader: The reader of the file.
        work_range: The work range.
        keep: Selects the documents by the position of their first record, or None for all. A
            `Choice` also counts the documents of the split before the work range.
        batch_bytes: Approximate content size of a batch in bytes.

    Yields:
        Non-empty batches with `groups`.

    Raises:
        SourceError: As in `formats.read`. Also if a record has messages, loss_spans, media or a
            weight.
    """
    assert work_range.grouping is not None
    is_alone = work_range.grouping.is_alone
    early = (
        work_range._replace(lo=0, hi=work_range.lo)
        if isinstance(keep, Choice) and work_range.lo
        else None
    )
    # The record before shows whether the first group began before the work range.
    last_record = None if is_alone else _last_before(reader, early or work_range)
    joiner = _Joiner(
        skips=last_record is not None, is_early=early is not None, of_early=early is not None
    )
    joiner.last = last_record and last_record.value.group
    for one_range in (early, work_range):
        if one_range is work_range:
            joiner.enter()
        for read in _records(reader, one_range, batch_bytes) if one_range else ():
            joiner.add(read)
            if joiner.n_bytes >= batch_bytes:
                yield from _batches(joiner.taken(), work_range, keep)
    # The last group may continue after the work range.
    if joiner.open is not None and not joiner.of_early and not is_alone:
        for read in _records_after(reader, work_range):
            if joiner.begins_group(read):
                break
            joiner.add(read)
            if joiner.n_bytes >= batch_bytes:
                yield from _batches(joiner.taken(), work_range, keep)
    joiner.close()
    yield from _batches(joiner.taken(), work_range, keep)


def _batches(
    items: list[tuple[_Document | Reject, bool]], work_range: Slice, keep: Keep | None
) -> Iterator[Batch]:
    """Yield a batch of the documents and rejects that `keep` selects, unless there are none.

    Each is given with a flag. If it is True, `keep` only counts the document or reject.
    """
    assert work_range.grouping is not None
    # `keep` selects a document by the position of its first record in the file.
    positions = [
        item.position if isinstance(item, Reject) else item.records[0].position for item, _ in items
    ]

    def sizes() -> np.ndarray:
        byte_counts = (0 if isinstance(item, Reject) else item.n_bytes for item, _ in items)
        return np.fromiter(byte_counts, np.int64, len(items))

    is_wanted = kept(keep, work_range.file, np.array(positions, np.int64), sizes).tolist()
    chosen = [
        item
        for (item, of_early), is_used in zip(items, is_wanted, strict=True)
        if is_used and not of_early
    ]
    documents = [item for item in chosen if isinstance(item, _Document)]
    if not chosen:
        return
    # Long groups are cut in file order, so records are sorted only after the cuts.
    records: list[_Record] = []
    for document in documents:
        records += sorted(document.records, key=lambda record: record.value.order)
    number = np.repeat(np.arange(len(documents)), [len(document.records) for document in documents])
    alone = sum(document.records[0].value.group is None for document in documents)
    yield Batch(
        [record.text for record in records],
        np.full(len(records), work_range.file, np.int32),
        np.array([record.position for record in records], np.int64),
        [item for item in chosen if isinstance(item, Reject)],
        {},
        groups=Groups(number, sum(document.continues for document in documents), alone),
    )


def _records(reader: FileReader, work_range: Slice, batch_bytes: int) -> Iterator[_Read]:
    """Yield the records and rejects of a work range, in file order."""
    assert work_range.grouping is not None
    between = TOKEN_TEXT_BYTES * work_range.grouping.between
    for batch in reader.read(work_range, batch_bytes):
        if batch.supervision:
            position = int(batch.positions[min(batch.supervision)])
            raise SourceError(
                f"{work_range.path}: the record at {position} has messages, loss_spans, media or a"
                " weight, which group_by cannot join\n"
                'hint: set documents.loss_spans = "ignore" to read only the texts, or leave'
                " group_by out"
            )
        assert batch.values is not None or not batch.texts
        # A batch has its rejects separately. Merge both by position.
        rejects = iter(batch.rejects)
        reject = next(rejects, None)
        for position, text, value in zip(
            batch.positions.tolist(), batch.texts, batch.values or (), strict=True
        ):
            while reject is not None and reject.position < position:
                yield reject
                reject = next(rejects, None)
            yield _Record(position, text, value, max(1, len(text.encode()) + between))
        if reject is not None:
            yield reject
        yield from rejects


def _last_before(reader: FileReader, work_range: Slice) -> _Record | None:
    """Return the last record before a work range in its file, or None if there is none."""
    for earlier_range in _parts_before(reader, work_range):
        last_record = None
        for read in _records(reader, earlier_range, NEAR_BYTES):
            last_record = read if isinstance(read, _Record) else last_record
        if last_record is not None:
            return last_record
    return None


def _records_after(reader: FileReader, work_range: Slice) -> Iterator[_Read]:
    """Yield the records and rejects of the file after a work range."""
    for later_range in _parts_after(reader, work_range):
        yield from _records(reader, later_range, NEAR_BYTES)


def _parts_before(reader: FileReader, work_range: Slice) -> Iterator[Slice]:
    """Yield work ranges that together cover the file before `work_range`, the nearest first."""
    splits = range(work_range.piece, -1, -1) if reader.position == "number" else (0,)
    for split in splits:
        units, (begin, _), width = _units(reader, work_range, split)
        end = begin if split == work_range.piece or reader.position != "number" else units
        while end > 0:
            begin = max(0, end - width)
            yield _part_of_file(work_range, split, begin, end, units)
            end, width = begin, width * _GROWTH


def _parts_after(reader: FileReader, work_range: Slice) -> Iterator[Slice]:
    """Yield work ranges that together cover the file after `work_range`, in file order."""
    is_table = reader.position == "number"
    for split in range(work_range.piece, len(reader.rows())) if is_table else (0,):
        units, (_, end), width = _units(reader, work_range, split)
        begin = end if split == work_range.piece or not is_table else 0
        while begin < units:
            end = min(units, begin + width)
            yield _part_of_file(work_range, split, begin, end, units)
            begin, width = end, width * _GROWTH


def _units(reader: FileReader, work_range: Slice, split: int) -> tuple[int, tuple[int, int], int]:
    """Return the units of a work range's file, and where the work range is.

    Units are the bytes or steps of a line file, or the rows of a split of a table.

    Returns:
        (number of units, interval of `work_range`, units to read first).
    """
    if reader.position == "number":
        units = reader.rows()[split]
        return units, work_range.range(units) if split == work_range.piece else (0, 0), NEAR_ROWS
    if reader.position == "stream":
        units = -(-work_range.size // work_range.step_bytes)
        return units, work_range.range(units), 1
    first_byte = work_range.piece * work_range.piece_bytes
    begin, end = work_range.range(min(work_range.piece_bytes, work_range.size - first_byte))
    return work_range.size, (first_byte + begin, first_byte + end), NEAR_BYTES


def _part_of_file(work_range: Slice, split: int, begin: int, end: int, units: int) -> Slice:
    """Return the work range of the units begin … end − 1 of the file of `work_range`.

    `split` and `units` are as in `_units`.
    """
    # A line file is read as one split of all its bytes. The splits of a table have no bytes.
    return work_range._replace(
        piece=split, lo=begin, hi=end, weight=units, piece_bytes=work_range.size
    )
