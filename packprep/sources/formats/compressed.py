"""A compressed file as a stream of decompressed blocks, each labelled with the input step that it
came out of.

Step s feeds the decompressor exactly the bytes [s·step_bytes, (s+1)·step_bytes) of the file; all
that comes out while they are fed belongs to step s. So which step a decompressed byte belongs to
depends on the file and step_bytes alone, not on where a reader began: decoding always begins at the
file's start.
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

_MAX_OUTPUT = 1 << 20  # bytes of one block of gzip
_READ_BYTES = 1 << 20
# of lines that are decoded at once; decompressed blocks are smaller, or much larger
AT_ONCE_BYTES = 1 << 20
_FED_AT_ONCE = 16 << 10
_ZSTD_AT_ONCE = 512
# What comes out of one call grows to 16 MiB at the very most: gzip packs 1032 bytes into one, zstd
# 128 KiB into four.
# files made with `zstd --long=31` exist; memory is taken only as a file asks for it
_MAX_WINDOW = 1 << 31

T = TypeVar("T")


class Block(NamedTuple):
    """Consecutive bytes of a stream. Blocks tile the stream; no block lies in two labels; a block
    may be empty."""

    label: int  # the step, or whatever divides the stream
    position: int  # of the block's first byte in the stream
    data: bytes


class Decompressor(Protocol):
    at_end: bool  # no member or frame is open: the file may end here

    def feed(self, data: bytes) -> Iterable[bytes]: ...


class Gzip:
    """Any number of gzip members, one after the other; zero bytes between and after them are
    padding.

    zlib-ng gives what zlib does at every byte that it is fed; faster libraries hold some back,
    which would move lines from one step to the next.
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
            # A full output may hide more that is ready, even when all input is taken.
            while len(output) == _MAX_OUTPUT and not self._member.eof:
                output = self._member.decompress(self._member.unconsumed_tail, _MAX_OUTPUT)
                yield output
            self.at_end = self._member.eof
            data = self._member.unused_data


class Zstd:
    """Any number of zstd frames, skippable ones included, one after the other."""

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
                if output := frame.decompress(fed):  # most of the very many calls give nothing
                    yield output
                if not frame.eof:
                    break
                self.at_end, fed = True, frame.unused_data


_DECOMPRESSORS: dict[str, Callable[[], Decompressor]] = {"gzip": Gzip, "zstd": Zstd}


def decompressed(
    path: str, size: int, compression: str, step_bytes: int, begins: array | None = None
) -> Iterator[Block]:
    """The decompressed blocks of a file, labelled with their steps; each step begins with an empty
    block. begins: gets the position in the stream at which each step begins.

    Raises SourceError for a file that is missing, changed, corrupt or truncated.
    """
    decompressor = _DECOMPRESSORS[compression]()
    position = 0
    with open_source(path, size) as file:
        for offset in range(0, size, step_bytes):
            step = offset // step_bytes
            if begins is not None:
                begins.append(position)
            yield Block(step, position, b"")
            step_end = min(offset + step_bytes, size)
            while offset < step_end:
                data = file.read(min(_READ_BYTES, step_end - offset))
                if not data:
                    raise SourceError(
                        f"{path}: the file became shorter while it was read, at byte {offset} of"
                        f" {size}."
                    )
                for i in range(0, len(data), _FED_AT_ONCE):
                    fed = data[i : i + _FED_AT_ONCE]
                    at = offset + i
                    try:
                        for output in decompressor.feed(fed):
                            if output:
                                yield Block(step, position, output)
                                position += len(output)
                    except (zlib_ng.error, zstandard.ZstdError) as error:  # type: ignore[misc]
                        plain = (
                            " If it is not compressed, give it a name without that ending."
                            if not at
                            else ""
                        )
                        raise SourceError(
                            f"{path}: corrupt {compression} data between bytes {at} and"
                            f" {at + len(fed)} of {size}: {error}. Fetch the file again, or take it"
                            f" out of the recipe.{plain}"
                        ) from error
                offset += len(data)
    if not decompressor.at_end:
        raise SourceError(
            f"{path}: the {compression} data is truncated: it ends at byte {size} inside a"
            " compressed stream. Fetch the file again, or take it out of the recipe."
        )


def said_bytes(path: str, size: int, compression: str, about: float) -> int | None:
    """The decompressed bytes of a file, as its first zstd frame's header or its last gzip member's
    trailer says; None where it does not, or not within a factor of two of what it is about: then
    there are more members or frames.
    """
    with open_source(path, size) as file:
        if compression == "gzip":
            file.seek(max(size - 4, 0))
            said = int.from_bytes(file.read(4), "little")
            said += max(0, round((about - said) / (1 << 32))) << 32  # it is cut to 32 bits
        else:
            try:
                said = zstandard.frame_content_size(file.read(18))
            except zstandard.ZstdError:
                return None
    return said if about / 2 <= said <= about * 2 else None


@dataclass
class Cursor:
    """A place in a stream of blocks, between two parts."""

    blocks: Iterator[Block]
    key: Hashable = None  # which stream: the file as it was when it was opened
    rest: Block | None = None  # comes before `blocks`
    at_line_start: bool = (
        True  # whether the next byte begins a line; if not, that line is nobody's any more
    )
    next_label: int = 0  # lines of earlier labels are gone
    seen: np.ndarray | None = None  # what a Choice saw of them, which alone takes this cursor
    begins: array = field(default_factory=lambda: array("q"))  # of the steps so far

    def next(self, begin: int, end: int) -> Block | None:
        """The next block; one with begin ≤ label < end together with those after it, to about
        AT_ONCE_BYTES. None at the end."""
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
    """What a process remembers about files between slices, so that neighbouring slices of a file
    cost one pass.

    Only speed depends on it. It holds at most `capacity` open files; a file that was changed is
    begun anew.
    """

    capacity: int = 8
    step_begins: array = field(default_factory=lambda: array("q"))
    """Of the stream that was taken last: the position at which each of its steps begins, as far as
    it was read."""
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
        """A cursor that has not passed `step`. Whoever takes it owns it until it is given back.
        choice: the key of a Choice, which is to see all lines from the first."""
        key = (*_identity(path), compression, step_bytes, choice)
        cursor = self._cursors.pop(key, None)
        if cursor is None or cursor.next_label > step:
            begins = array("q")
            cursor = Cursor(
                decompressed(path, size, compression, step_bytes, begins), key, begins=begins
            )
        self.step_begins = cursor.begins
        return cursor

    def give_back(self, cursor: Cursor) -> None:
        """Remembers where a reader stopped. Not to be called after an error: the next reader then
        begins anew."""
        self._cursors[cursor.key] = cursor
        if len(self._cursors) > self.capacity:
            self._cursors.popitem(last=False)

    def fact(self, path: str, find: Callable[[], T]) -> T:
        """What `find` says about a file, found once."""
        key = _identity(path)
        if key not in self._facts:
            self._facts[key] = find()
            if len(self._facts) > self.capacity:
                self._facts.popitem(last=False)
        return cast(T, self._facts[key])


def _identity(path: str) -> tuple[str, int, int, int, int]:
    if is_url(path):
        return path, 0, 0, 0, 0
    with source_errors(path):
        status = Path(path).stat()
    return path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
