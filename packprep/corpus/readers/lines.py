"""Line files: which lines belong to a part, and their texts.

A line begins at byte 0 or after b"\\n". It belongs to the part in which its first byte lies, and is read to its end,
wherever that lies. In a compressed file a byte lies in the step that it came out of; see `streams`.
"""

from collections.abc import Iterator

import numpy as np

from packprep.corpus.conversations import Marked, MarkReader
from packprep.corpus.readers import documents
from packprep.corpus.readers.documents import Batch, BatchBuilder, Keep, Part, kept, open_source, too_large
from packprep.corpus.readers.json_lines import line_decoder
from packprep.corpus.readers.streams import Block, Cursor, Decoders
from packprep.errors import SourceError

BOM = b"\xef\xbb\xbf"
_READ_BYTES = 1 << 20
_FINISH_BYTES = 16 << 10  # first read beyond a part's end: most lines end soon

Line = bytes | None  # without its end; None: too large


def read_lines(
    part: Part, text_key: str, keep: Keep | None, batch_bytes: int, decoders: Decoders, marks: MarkReader | None = None
) -> Iterator[Batch]:
    """The documents of a part of a line file, compressed or not; see `readers.read`."""
    decode = line_decoder(text_key, marks)
    batch = BatchBuilder(part.file)
    for positions, lines in _part_lines(part, decoders):
        wanted = kept(keep, part.file, np.array(positions, np.int64)).tolist()
        for position, line, is_wanted in zip(positions, lines, wanted, strict=True):
            if not is_wanted:
                continue
            if line is None:
                batch.reject(position, *too_large())
                continue
            outcome = decode(line)
            if isinstance(outcome, str):
                batch.add(position, outcome, len(line))
            elif isinstance(outcome, Marked):
                batch.add(position, outcome.text, len(line), outcome)
            else:
                batch.reject(position, *outcome)
            if batch.bytes >= batch_bytes:
                yield from batch.take()
    yield from batch.take()


def _part_lines(part: Part, decoders: Decoders) -> Iterator[tuple[list[int], list[Line]]]:
    if not part.compression:
        first = part.piece * part.piece_bytes
        begin, end = part.range(min(part.piece_bytes, part.size - first))
        if begin < end:
            cursor = Cursor(byte_blocks(part.path, part.size, first + begin, first + end))
            yield from take_lines(cursor, 1, 2, documents.MAX_DOCUMENT_BYTES)
        return
    begin, end = part.range(-(-part.size // part.step_bytes))
    if begin < end:
        cursor = decoders.take(part.path, part.size, part.compression, part.step_bytes, begin)
        yield from take_lines(cursor, begin, end, documents.MAX_DOCUMENT_BYTES)
        if part.hi < part.weight:
            decoders.give_back(cursor)


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


def take_lines(cursor: Cursor, begin: int, end: int, max_bytes: int) -> Iterator[tuple[list[int], list[Line]]]:
    """The lines whose first byte lies in a block with begin ≤ label < end, as positions and lines.

    Blank lines are left out, and the byte order mark of the stream's first line. A line of more than `max_bytes`
    is None and is not held. Then the cursor stands where a call with this `end` as its `begin` goes on.
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
        positions: list[int] = []
        lines: list[Line] = []
        start = 0
        if not cursor.at_line_start:
            start = data.find(b"\n") + 1
            cursor.at_line_start = start > 0
            if pending:
                pending.append(data[: start - 1] if start else data)
                pending_bytes += len(pending[-1])
                if start or pending_bytes > max_bytes:
                    positions.append(pending_at)
                    lines.append(b"".join(pending) if pending_bytes <= max_bytes else None)
                    pending = []
        if label >= end:
            cursor.rest = Block(label, position + start, data[start:]) if start else None
        elif cursor.at_line_start:
            *whole, last = data[start:].split(b"\n")
            at = position + start
            for line in whole:
                positions.append(at)
                lines.append(line if len(line) <= max_bytes else None)
                at += len(line) + 1
            if last:
                cursor.at_line_start = False
                if len(last) <= max_bytes:
                    pending, pending_bytes, pending_at = [last], len(last), at
                else:
                    positions.append(at)
                    lines.append(None)
        yield from _without_blank(positions, lines)
        if label >= end and not pending:
            return
    if pending:
        yield from _without_blank([pending_at], [b"".join(pending)])


def _without_blank(positions: list[int], lines: list[Line]) -> Iterator[tuple[list[int], list[Line]]]:
    if positions and positions[0] == 0 and lines[0] is not None:
        lines[0] = lines[0].removeprefix(BOM)
    if any(line is not None and (not line or line.isspace()) for line in lines):
        chosen = [i for i, line in enumerate(lines) if line is None or (line and not line.isspace())]
        positions, lines = [positions[i] for i in chosen], [lines[i] for i in chosen]
    if positions:
        yield positions, lines
