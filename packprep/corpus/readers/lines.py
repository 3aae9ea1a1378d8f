"""Line files: which lines belong to a part, and their texts.

A line begins at byte 0 or after b"\\n". It belongs to the part in which its first byte lies, and is read to its end,
wherever that lies. In a compressed file a byte lies in the step that it came out of; see `streams`.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from packprep.corpus.conversations import Marked, MarkReader
from packprep.corpus.readers import documents
from packprep.corpus.readers.choice import Choice
from packprep.corpus.readers.documents import Batch, BatchBuilder, Keep, Part, kept, open_source, slices, too_large
from packprep.corpus.readers.json_blocks import block_decoder
from packprep.corpus.readers.json_lines import Outcome, line_decoder
from packprep.corpus.readers.streams import Block, Cursor, Decoders
from packprep.errors import SourceError

BOM = b"\xef\xbb\xbf"
_READ_BYTES = 1 << 20
_FINISH_BYTES = 16 << 10  # first read beyond a part's end: most lines end soon
_AT_ONCE_BYTES = 1 << 20  # of lines that are decoded at once; decompressed blocks are smaller, or much larger
_IS_SPACE = np.array([bytes([byte]).isspace() for byte in range(256)])


class Lines(NamedTuple):
    """Lines without their ends: line i is `data[starts[i] : starts[i] + sizes[i]]`, or too large and not held."""

    data: bytes
    positions: np.ndarray  # int64[n] of the lines in the stream; strictly increasing
    starts: np.ndarray  # int64[n]; strictly increasing
    sizes: np.ndarray  # int64[n] in bytes; −1: too large

    def line(self, i: int) -> bytes | None:
        """Line i; None: too large."""
        start, size = int(self.starts[i]), int(self.sizes[i])
        return self.data[start : start + size] if size >= 0 else None

    def stored_sizes(self) -> np.ndarray:
        """int64[n]: sizes; of what is too large, one that is."""
        return np.where(self.sizes < 0, documents.MAX_DOCUMENT_BYTES + 1, self.sizes)

    def at(self, which: np.ndarray | slice) -> "Lines":
        """The lines at a slice, or where a mask is true; `data` stays."""
        return Lines(self.data, self.positions[which], self.starts[which], self.sizes[which])


def read_lines(
    part: Part, text_key: str, keep: Keep | None, batch_bytes: int, decoders: Decoders, marks: MarkReader | None = None
) -> Iterator[Batch]:
    """The documents of a part of a line file, compressed or not; see `readers.read`."""
    decode_line, decode_block = line_decoder(text_key, marks), block_decoder(text_key, marks)
    batch = BatchBuilder(part.file)
    for found in _part_lines(part, keep, decoders):
        wanted = kept(keep, part.file, found.positions, found.stored_sizes)
        all_wanted = bool(wanted.all())
        found = found if all_wanted else found.at(wanted)
        for some in slices(found.sizes, _AT_ONCE_BYTES):
            lines = found.at(some)
            # What lies between the lines that are wanted would be decoded, too.
            texts = decode_block(lines.data, lines.starts, lines.sizes) if all_wanted else None
            if texts is not None:
                yield from batch.extend(lines.positions, texts, lines.sizes, batch_bytes)
            else:
                yield from _add_one_by_one(batch, lines, decode_line, batch_bytes)
    yield from batch.take()


def _add_one_by_one(
    batch: BatchBuilder, lines: Lines, decode: Callable[[bytes], Outcome], batch_bytes: int
) -> Iterator[Batch]:
    for i, position in enumerate(lines.positions.tolist()):
        line = lines.line(i)
        if line is None:
            batch.reject(position, *too_large())
        elif isinstance(outcome := decode(line), str):
            batch.add(position, outcome, len(line))
        elif isinstance(outcome, Marked):
            batch.add(position, outcome.text, len(line), outcome)
        else:
            batch.reject(position, *outcome)
        if batch.bytes >= batch_bytes:
            yield from batch.take()


def _part_lines(part: Part, keep: Keep | None, decoders: Decoders) -> Iterator[Lines]:
    """The lines of a part. A Choice is asked for those of its piece that lie before it."""
    most = documents.MAX_DOCUMENT_BYTES
    if not part.compression:
        first = part.piece * part.piece_bytes
        begin, end = part.range(min(part.piece_bytes, part.size - first))
        if begin < end:
            if isinstance(keep, Choice) and begin:
                before = Cursor(byte_blocks(part.path, part.size, first, first + begin))
                _choose(keep, part.file, take_lines(before, 1, 2, most))
            cursor = Cursor(byte_blocks(part.path, part.size, first + begin, first + end))
            yield from take_lines(cursor, 1, 2, most)
        return
    begin, end = part.range(-(-part.size // part.step_bytes))
    if begin < end:
        of_choice = int(keep.key) if isinstance(keep, Choice) else None
        cursor = decoders.take(part.path, part.size, part.compression, part.step_bytes, begin, of_choice)
        if isinstance(keep, Choice):
            keep.seen = cursor.seen = keep.seen if cursor.seen is None else cursor.seen
            _choose(keep, part.file, take_lines(cursor, cursor.next_label, begin, most))
        yield from take_lines(cursor, begin, end, most)
        if part.hi < part.weight:
            decoders.give_back(cursor)


def _choose(choice: Choice, file: int, some: Iterator[Lines]) -> None:
    """Let a choice see lines that are not read."""
    for lines in some:
        choice(file, lines.positions, lines.stored_sizes())


def byte_blocks(path: str, size: int, begin: int, end: int) -> Iterator[Block]:
    """Blocks of a file around the bytes [begin, end): label 0 is the one byte before them, 1 they, 2 what follows."""
    with open_source(path, size) as file:
        position = max(begin - 1, 0)
        file.seek(position)
        step = _FINISH_BYTES
        while position < size:
            if position < begin:
                label, n_bytes = 0, 1
            elif position < end:
                label, n_bytes = 1, min(_READ_BYTES, end - position)
            else:
                label, n_bytes = 2, step
                step = min(2 * step, _READ_BYTES)
            data = file.read(n_bytes)
            if not data:
                raise SourceError(f"{path}: the file became shorter while it was read, at byte {position} of {size}.")
            yield Block(label, position, data)
            position += len(data)


def take_lines(cursor: Cursor, begin: int, end: int, max_bytes: int) -> Iterator[Lines]:
    """The lines whose first byte lies in a block with begin ≤ label < end; no Lines are empty.

    Blank lines are left out, and the byte order mark of the stream's first line. A line of more than `max_bytes`
    is not held. Then the cursor stands where a call with this `end` as its `begin` goes on.
    """
    pending: list[bytes] = []  # the beginning of a line that is wanted, but has not ended
    pending_bytes = pending_at = 0
    cursor.next_label = end
    while block := cursor.next():
        label, position, data = block
        if label >= end and not pending:
            cursor.rest = block
            return
        if not data:
            continue
        if label < begin:
            cursor.at_line_start = data.endswith(b"\n")
            continue
        if label < end:
            data = _with_following(cursor, data, end)
        start = 0
        if not cursor.at_line_start:
            start = data.find(b"\n") + 1
            cursor.at_line_start = start > 0
            if pending:
                pending.append(data[: start - 1] if start else data)
                pending_bytes += len(pending[-1])
                if start or pending_bytes > max_bytes:
                    yield from _one_line(pending, pending_bytes, pending_at, max_bytes)
                    pending = []
        if label >= end:
            cursor.rest = Block(label, position + start, data[start:]) if start else None
            if not pending:
                return
        elif cursor.at_line_start:
            last = data.rfind(b"\n") + 1  # 0 only if start is 0
            if last > start:
                yield from _whole_lines(data, position, start, last, max_bytes)
            if last < len(data):
                cursor.at_line_start = False
                pending, pending_bytes, pending_at = [data[last:]], len(data) - last, position + last
                if pending_bytes > max_bytes:
                    yield from _one_line(pending, pending_bytes, pending_at, max_bytes)
                    pending = []
    if pending:
        yield from _one_line(pending, pending_bytes, pending_at, max_bytes)


def _with_following(cursor: Cursor, data: bytes, end: int) -> bytes:
    """The bytes of a block and of those after it: about _AT_ONCE_BYTES of labels below `end`."""
    blocks, n_bytes = [data], len(data)
    while n_bytes < _AT_ONCE_BYTES and (block := cursor.next()):
        if block.label >= end:
            cursor.rest = block
            break
        blocks.append(block.data)
        n_bytes += len(block.data)
    return b"".join(blocks)


def _one_line(parts: list[bytes], n_bytes: int, position: int, max_bytes: int) -> Iterator[Lines]:
    is_held = n_bytes <= max_bytes
    at, start, size = (np.array([value], np.int64) for value in (position, 0, n_bytes if is_held else -1))
    return _without_blank(Lines(b"".join(parts) if is_held else b"", at, start, size))


def _whole_lines(data: bytes, position: int, begin: int, end: int, max_bytes: int) -> Iterator[Lines]:
    """The lines of data[begin:end], which ends with a line's end; some at a time, since each may be a line's end."""
    while begin < end:
        some_end = data.find(b"\n", min(begin + _AT_ONCE_BYTES, end - 1)) + 1
        ends = np.flatnonzero(np.frombuffer(data, np.uint8)[begin:some_end] == ord("\n")) + begin
        starts = np.concatenate([[begin], ends[:-1] + 1])
        sizes = ends - starts
        sizes[sizes > max_bytes] = -1
        yield from _without_blank(Lines(data, position + starts, starts, sizes))
        begin = some_end


def _without_blank(lines: Lines) -> Iterator[Lines]:
    data, positions, starts, sizes = lines
    if positions[0] == 0 and sizes[0] >= 0 and data.startswith(BOM, int(starts[0])):
        starts[0] += len(BOM)
        sizes[0] -= len(BOM)
    blank = sizes == 0
    bytes_there = np.frombuffer(data or b"\0", np.uint8)
    first = bytes_there[np.minimum(starts, len(bytes_there) - 1)]
    for i in np.flatnonzero(_IS_SPACE[first] & (sizes > 0)):
        blank[i] = data[starts[i] : starts[i] + sizes[i]].isspace()
    if blank.any():
        lines = lines.at(~blank)
    if len(lines.positions):
        yield lines
