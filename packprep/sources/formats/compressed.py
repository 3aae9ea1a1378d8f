"""Decompress a file as a stream of blocks, each labelled with its input step.

Step s feeds exactly the bytes [s·step_bytes, (s+1)·step_bytes) of the file to the decompressor. All
output of the decompressor during this step belongs to step s. So the step of a decompressed byte
depends only on the file and step_bytes. Decompression always starts at the first byte of the file.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import zstandard
from zlib_ng import zlib_ng

from packprep.errors import SourceError
from packprep.sources.formats.batch import open_source, source_errors
from packprep.storage import is_url

_MAX_OUTPUT = 1 << 20  # bytes per block of gzip output
_READ_BYTES = 1 << 20
# Approximate bytes of lines that are decoded at once. Smaller blocks are merged, and larger blocks
# are divided.
AT_ONCE_BYTES = 1 << 20
# Compressed bytes per call of a decompressor. The output of a call is then at most about 16 MiB:
# gzip expands a byte to at most 1032 bytes, and zstd expands four bytes to at most 128 KiB.
_FED_AT_ONCE = 16 << 10
_ZSTD_AT_ONCE = 512
# Maximum window of zstd files, as `zstd --long=31` makes them. A smaller window takes less memory.
_MAX_WINDOW = 1 << 31

T = TypeVar("T")


class Block(NamedTuple):
    """Consecutive bytes of a stream.

    Blocks cover the stream without gaps or overlaps, and may be empty. The label of a block says
    which part of the stream the block belongs to, for example which step.
    """

    label: int  # the step, or another division of the stream
    position: int  # stream offset of the block's first byte
    data: bytes


class Decompressor(Protocol):
    at_end: bool  # whether the file may end here, since no member or frame is open

    def feed(self, data: bytes) -> Iterable[bytes]: ...


class Gzip:
    """A decompressor for consecutive gzip members, with optional zero padding after each member.

    zlib-ng produces the same output as zlib for each input byte. Faster libraries delay some
    output, which would move lines from one step to the next.
    """

    def __init__(self) -> None:
        self.at_end = True
        self._member: Any = None

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self.at_end:
                if self._member and not (data := data.lstrip(b"\0")):
                    return
                self._member = zlib_ng.decompressobj(wbits=31)
                self.at_end = False
            output = self._member.decompress(data, _MAX_OUTPUT)
            yield output
            # After a full output, more may be ready even if all input is consumed.
            while len(output) == _MAX_OUTPUT and not self._member.eof:
                output = self._member.decompress(self._member.unconsumed_tail, _MAX_OUTPUT)
                yield output
            self.at_end = self._member.eof
            data = self._member.unused_data


class Zstd:
    """A decompressor for consecutive zstd frames, including skippable frames."""

    def __init__(self) -> None:
        self.at_end = True
        self._frame: Any = None
        self._frames = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)

    def feed(self, data: bytes) -> Iterator[bytes]:
        frame = self._frame
        for begin in range(0, len(data), _ZSTD_AT_ONCE):
            fed = data[begin : begin + _ZSTD_AT_ONCE]
            while fed:
                if self.at_end:
                    frame = self._frame = self._frames.decompressobj()
                    self.at_end = False
                if output := frame.decompress(fed):  # Most calls return no data.
                    yield output
                if not frame.eof:
                    break
                self.at_end, fed = True, frame.unused_data


_DECOMPRESSORS: dict[str, Callable[[], Decompressor]] = {"gzip": Gzip, "zstd": Zstd}


def decompressed(
    path: str, size: int, compression: str, step_bytes: int, begins: array | None = None
) -> Iterator[Block]:
    """Yield the decompressed blocks of a file, labelled with their steps.

    Each step starts with an empty block.

    Args:
        path: Path or URL of the file.
        size: Planned size of the file in bytes.
        compression: "gzip" or "zstd".
        step_bytes: Compressed bytes per step.
        begins: Array that receives the stream position of each step's start, or None.

    Raises:
        SourceError: If the file is missing, changed, corrupt or truncated.
    """
    decompressor = _DECOMPRESSORS[compression]()
    position = 0
    with open_source(path, size) as file:
        for offset in range(0, size, step_bytes):
            step = offset // step_bytes
            if begins is not None:
                begins.append(position)
            yield Block(step, position, b"")
            # A read never crosses the end of a step, since output belongs to the step of its input.
            step_end = min(offset + step_bytes, size)
            while offset < step_end:
                data = file.read(min(_READ_BYTES, step_end - offset))
                if not data:
                    raise SourceError(
                        f"{path}: the file became shorter while it was read, at byte {offset} of"
                        f" {size}"
                    )
                for i in range(0, len(data), _FED_AT_ONCE):
                    fed = data[i : i + _FED_AT_ONCE]
                    fed_offset = offset + i
                    try:
                        for output in decompressor.feed(fed):
                            if output:
                                yield Block(step, position, output)
                                position += len(output)
                    except (zlib_ng.error, zstandard.ZstdError) as error:  # type: ignore[misc]
                        plain = (
                            "; if it is not compressed, give it a name without that ending"
                            if not fed_offset
                            else ""
                        )
                        raise SourceError(
                            f"{path}: corrupt {compression} data between bytes {fed_offset} and"
                            f" {fed_offset + len(fed)} of {size}: {error}\n"
                            f"hint: fetch the file again, or take it out of the recipe{plain}"
                        ) from error
                offset += len(data)
    if not decompressor.at_end:
        raise SourceError(
            f"{path}: the {compression} data is truncated: it ends at byte {size} inside a"
            " compressed stream\n"
            "hint: fetch the file again, or take it out of the recipe"
        )


def said_bytes(path: str, size: int, compression: str, about: float) -> int | None:
    """Return the decompressed size of a file in bytes, as its metadata states.

    The size comes from the header of the first zstd frame or the trailer of the last gzip member.

    Args:
        path: Path or URL of the file.
        size: Size of the file in bytes.
        compression: "gzip" or "zstd".
        about: Estimate of the decompressed size in bytes.

    Returns:
        The size, or None if the metadata does not state it. The result is also None if the size
        differs from the estimate by more than a factor of two. The file then probably has several
        members or frames.
    """
    with open_source(path, size) as file:
        if compression == "gzip":
            file.seek(max(size - 4, 0))
            stated_bytes = int.from_bytes(file.read(4), "little")
            # The trailer stores the size modulo 2³².
            stated_bytes += max(0, round((about - stated_bytes) / (1 << 32))) << 32
        else:
            try:
                stated_bytes = zstandard.frame_content_size(file.read(18))
            except zstandard.ZstdError:
                return None
    return stated_bytes if about / 2 <= stated_bytes <= about * 2 else None


@dataclass
class Cursor:
    """A reader's position in a stream of blocks.

    A cursor is kept between work ranges, so that the next work range continues there.
    """

    blocks: Iterator[Block]
    key: Hashable = None  # identity of the stream and of the file's version
    rest: Block | None = None  # a block that comes before those in `blocks`
    # Whether the next byte starts a line. If not, the rest of that line is skipped.
    at_line_start: bool = True
    next_label: int = 0  # Lines with earlier labels were consumed.
    seen: np.ndarray | None = None  # `Choice.seen` at this position, for a cursor of a Choice
    begins: array = field(default_factory=lambda: array("q"))  # stream position of each step

    def next(self, begin: int, end: int) -> Block | None:
        """Return the next block, or None at the end of the stream.

        If the block has begin ≤ label < end, the following blocks with label < end are appended to
        its data, up to about AT_ONCE_BYTES.
        """
        block, self.rest = self.rest or next(self.blocks, None), None
        if block is None or not begin <= block.label < end:
            return block
        parts, n_bytes = [block.data], len(block.data)
        while n_bytes < AT_ONCE_BYTES and (following := next(self.blocks, None)):
            if following.label >= end:
                self.rest = following
                break
            parts.append(following.data)
            n_bytes += len(following.data)
        return block._replace(data=b"".join(parts))


@dataclass
class Decoders:
    """Open files and indexes that a process keeps from one work range to the next.

    Adjacent work ranges then read a file only once. This affects only the speed. The number of open
    files is at most `capacity`. A file that has changed is read again from its start.
    """

    capacity: int = 8
    step_begins: array = field(default_factory=lambda: array("q"))
    """Start of each step that was read, as a position in the stream of the last taken cursor."""
    _cursors: OrderedDict[Hashable, Cursor] = field(default_factory=OrderedDict)
    _facts: OrderedDict[Hashable, object] = field(default_factory=OrderedDict)

    def take(
        self,
        path: str,
        size: int,
        compression: str,
        step_bytes: int,
        step: int,
        choice: int | None = None,
    ) -> Cursor:
        """Return a cursor in a file's decompressed stream, at step number `step` or earlier.

        No other caller gets this cursor until `give_back` is called with it.

        Args:
            path: Path or URL of the file.
            size: Planned size of the file in bytes.
            compression: "gzip" or "zstd".
            step_bytes: Compressed bytes per step.
            step: First step that the caller needs.
            choice: Key of a Choice, or None. A Choice must process all lines of the file, so only a
                cursor that was used with the same Choice is returned.
        """
        key = (*_identity(path), compression, step_bytes, choice)
        cursor = self._cursors.pop(key, None)
        # A stream cannot go back, so an earlier step needs a new cursor.
        if cursor is None or cursor.next_label > step:
            begins = array("q")
            cursor = Cursor(
                decompressed(path, size, compression, step_bytes, begins), key, begins=begins
            )
        self.step_begins = cursor.begins
        return cursor

    def give_back(self, cursor: Cursor) -> None:
        """Keep a cursor from `take` for the next work range of the same file.

        After an error, do not give the cursor back, so that the next work range gets a new cursor
        at the start of the file.
        """
        self._cursors[cursor.key] = cursor
        if len(self._cursors) > self.capacity:
            self._cursors.popitem(last=False)

    def fact(self, path: str, find: Callable[[], T]) -> T:
        """Return the result of `find()`, and keep it while the file at `path` is unchanged.

        `find` reads something from this file, for example the index of its record batches.
        """
        key = _identity(path)
        if key not in self._facts:
            self._facts[key] = find()
            if len(self._facts) > self.capacity:
                self._facts.popitem(last=False)
        return cast(T, self._facts[key])


def _identity(path: str) -> tuple[str | int, ...]:
    if is_url(path):
        return (path,)
    with source_errors(path):
        status = Path(path).stat()
    return path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
