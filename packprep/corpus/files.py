"""The files of a source and their pieces, as columns: a million files are a few arrays and a list of names."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import repeat
from typing import Any, NamedTuple, overload

import numpy as np

from packprep.corpus.readers import PIECE_BYTES, bytes_of_pieces, count_pieces, detect_format, format_of
from packprep.storage import is_url

_AT_ONCE = 16  # remote files that are looked at together


class Seen(NamedTuple):
    """What the file system says of a file, or of a pair of them."""

    size: int  # bytes, of both
    modified: int = 0  # mtime in ns, of both summed; 0: nobody says
    identity: int = 0  # of device and inode: two names of one file have the same


class SourceFile(NamedTuple):
    """One input file, as the plan lists it: its source's index, name relative to the source's prefix, bytes, pieces."""

    source: int
    name: str
    size: int
    pieces: int


class Files(Sequence[SourceFile]):
    """The files of one source, sorted bytewise by name.

    names: relative to `root`; sizes: int64[F] in bytes; format: the recipe's, "auto" too. pieces: int64[F], how many each
    has; None: they are counted when they are first asked for, which opens every file of a table and every index.
    piece_bytes: file → about how much each of its pieces holds, of files that say so or were looked at; the pieces of the
    others hold equal parts of what is stored.
    """

    def __init__(
        self,
        source: int,
        names: Sequence[str],
        sizes: np.ndarray,
        format: str,
        root: str,
        pieces: np.ndarray | None = None,
        text_key: str = "text",
        piece_bytes: Mapping[int, Sequence[int]] | None = None,
        seen: np.ndarray | None = None,
    ):
        """seen: int64[F, 3], what was found of each file, as `Seen`; None: nothing, as of files at URLs and a plan's."""
        self.piece_bytes: dict[int, Sequence[int]] = dict(piece_bytes or {})
        self._text_key, self.seen = text_key, seen
        self.source, self.names, self.sizes, self.root = source, names, sizes, root
        self.kinds, self.kind = _kinds(names, format)
        self._pieces = pieces

    @cached_property
    def formats(self) -> list[tuple[str, str]]:
        """(format, compression) of each file."""
        return [self.kinds[kind] for kind in self.kind.tolist()]

    @cached_property
    def pieces(self) -> np.ndarray:
        """int64[F]: how many pieces each file has. SourceError for a file that has to be opened, and cannot be read."""
        if self._pieces is not None:
            return self._pieces
        counts = np.zeros(len(self), np.int64)
        for k, (format, compression) in enumerate(self.kinds):
            own = np.flatnonzero(self.kind == k)
            if format == "text":
                counts[own] = 1
                continue
            if format == "jsonl":
                counts[own] = np.minimum(self.sizes[own], 1) if compression else -(-self.sizes[own] // PIECE_BYTES)
                continue
            paths = [os.path.join(self.root, self.names[i]) for i in own.tolist()]
            sizes = self.sizes[own].tolist()
            of_runs = format == "megatron"
            found: Iterator[Any] = (
                _each(self.root, count_pieces, paths, repeat(format), repeat(compression), sizes)
                if of_runs
                else _each(self.root, bytes_of_pieces, paths, repeat(format), sizes, repeat(self._text_key))
            )
            for i, held in zip(own.tolist(), found, strict=True):
                counts[i] = held if of_runs else len(held)
                if not of_runs:
                    self.note(i, held)
        return counts

    def as_planned(self) -> Iterator[dict[str, Any]]:
        """The files as a plan lists them."""
        for i, file in enumerate(self):
            yield {**file._asdict(), **({"piece_bytes": list(self.piece_bytes[i])} if i in self.piece_bytes else {})}

    def note(self, i: int, held: Sequence[int]) -> None:
        """Note about how much each piece of file i holds."""
        self.piece_bytes[i] = held
        self.__dict__.pop("_held", None)

    def held(self, file: np.ndarray, part: np.ndarray, stored: np.ndarray) -> np.ndarray:
        """int64[n]: about how much some pieces hold: file, part, stored bytes of each, int64[n]."""
        if not self.piece_bytes:
            return stored
        begin, flat = self._held
        known = begin[file] >= 0
        return np.where(known, flat[np.where(known, begin[file] + part, 0)], stored)

    @cached_property
    def _held(self) -> tuple[np.ndarray, np.ndarray]:
        """(int64[F]: where each file's pieces begin in the second, −1: nowhere; int64: `piece_bytes` one after the other)."""
        begin, files = np.full(len(self), -1, np.int64), sorted(self.piece_bytes)
        counts = np.array([len(self.piece_bytes[i]) for i in files], np.int64)
        begin[files] = np.cumsum(counts) - counts
        return begin, np.array([n for i in files for n in self.piece_bytes[i]] or [0], np.int64)

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, i: int) -> SourceFile: ...
    @overload
    def __getitem__(self, i: slice) -> list[SourceFile]: ...
    def __getitem__(self, i: int | slice) -> SourceFile | list[SourceFile]:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        return SourceFile(self.source, self.names[i], int(self.sizes[i]), int(self.pieces[i]))

    def __iter__(self) -> Iterator[SourceFile]:
        columns = zip(self.names, self.sizes.tolist(), self.pieces.tolist(), strict=True)
        return (SourceFile(self.source, *values) for values in columns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Files) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def _each(root: str, do: Callable[..., Any], *arguments: Iterable[Any]) -> Iterator[Any]:
    """What `do` says of each of some files; of remote ones, each some answers of the store away, many at a time."""
    if not is_url(root):
        yield from map(do, *arguments)
        return
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        yield from threads.map(do, *arguments)


def _kinds(names: Sequence[str], format: str) -> tuple[list[tuple[str, str]], np.ndarray]:
    """(the (format, compression) that there are, in order of their first file, uint8[F]: which of them each file has)."""
    kinds: dict[tuple[str, str], int] = {}
    of_ending: dict[tuple[str, ...], int] = {}
    compresses = {"": False}
    kind = np.empty(len(names), np.uint8)
    for i, name in enumerate(names):
        # A name says its format by its last ending, or its last two where the last one is a compression's.
        parts = name[name.rfind("/") + 1 :].rsplit(".", 2)
        last = parts[-1] if len(parts) > 1 else ""
        if last not in compresses:
            compresses[last] = bool(detect_format(f"x.{last}")[1])
        ending = (parts[1], last) if compresses[last] and len(parts) > 2 else (last,)
        if ending not in of_ending:
            of_ending[ending] = kinds.setdefault(format_of(name, format), len(kinds))
        kind[i] = of_ending[ending]
    return list(kinds), kind


class FileColumns(NamedTuple):
    """Some pieces, one array a column, int64[n]."""

    file: np.ndarray  # the first file's place in the source
    files: np.ndarray  # how many files: 1, or more for small text files
    part: np.ndarray  # which piece of the file
    bytes: np.ndarray  # stored bytes


class Pieces:
    """The pieces of a source as arithmetic over its files: 60 TB of lines have 14 million pieces.

    A run is a file with its pieces, or the text files that share one piece.
    """

    def __init__(self, first: np.ndarray, files: np.ndarray, sizes: np.ndarray, counts: np.ndarray, lines: np.ndarray):
        """Runs with pieces, each int64[R]: first file, files, stored bytes, pieces; bool[R]: pieces of 4 MiB."""
        self._first, self._files, self._sizes, self._counts, self._lines = first, files, sizes, counts, lines
        self._ends = np.cumsum(counts)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def at(self, pieces: np.ndarray) -> FileColumns:
        """What is known of pieces: int64[n] in 0 … len − 1."""
        run = np.searchsorted(self._ends, pieces, "right")
        count, size = self._counts[run], self._sizes[run]
        part = pieces - (self._ends[run] - count)
        even = (part + 1) * size // count - part * size // count
        stored = np.where(self._lines[run], np.minimum(PIECE_BYTES, size - part * PIECE_BYTES), even)
        return FileColumns(self._first[run], self._files[run], part, stored)

    def of_file(self, i: int) -> range:
        """The pieces that hold something of file i of the source."""
        run = int(np.searchsorted(self._first, i, "right")) - 1
        if run < 0 or i >= self._first[run] + self._files[run]:
            return range(0)
        end = int(self._ends[run])
        return range(end - int(self._counts[run]), end)


def pieces_of(files: Files) -> Pieces:
    """The pieces of a source's files, in the files' order. Neighbouring text files share a piece of about 4 MiB."""
    is_text = np.array([format == "text" for format, _ in files.kinds])[files.kind]
    is_lines = np.array([kind == ("jsonl", "") for kind in files.kinds])[files.kind]
    begins = files.pieces > 0  # whether a file begins a run; it has pieces
    group_bytes, before = 0, -2
    for i in np.flatnonzero(is_text).tolist():
        size = int(files.sizes[i])
        if before == i - 1 and group_bytes + size <= PIECE_BYTES:
            begins[i] = False
        else:
            group_bytes = 0
        group_bytes, before = group_bytes + size, i
    first = np.flatnonzero(begins)
    many = np.ones(len(first), np.int64)
    sizes = files.sizes[first]
    if is_text.any():
        run = np.cumsum(begins) - 1  # of every text file
        own = run[is_text]
        many[np.unique(own)] = 0
        np.add.at(many, own, 1)
        sizes = np.where(is_text[first], 0, sizes)
        np.add.at(sizes, own, files.sizes[is_text])
    return Pieces(first, many, sizes, files.pieces[first], is_lines[first])
