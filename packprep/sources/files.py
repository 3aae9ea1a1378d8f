"""Find the files of a source and compute their splits.

Patterns of local paths or URLs resolve to a prefix and file names relative to the prefix. A file's
name, order and size do not depend on the prefix.

A split (`piece` in the code) is the smallest part of a source that can be read independently. Files
and splits are stored as columns, so a million files need only a few arrays and a list of names.
"""

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import combinations, repeat
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np

from packprep.errors import SourceError
from packprep.recipe import Source
from packprep.sources.formats import (
    FORMATS,
    PIECE_BYTES,
    Format,
    bytes_of_pieces,
    check_format,
    detect_format,
    format_of,
    position_of,
)
from packprep.sources.patterns import (
    WILDCARD,
    files_matched,
    hidden_match,
    matches,
    nearby,
    without_linked_copies,
)
from packprep.storage import Remote, expanded, in_int64, is_url

_AT_ONCE = 16  # concurrent inspections of remote files


class Seen(NamedTuple):
    """Metadata from the file system, for a file or for the files of a pair."""

    size: int  # in bytes, summed over the files of a pair
    modified: int = 0  # mtime in ns modulo 2⁶⁴, summed as well, or 0 if unknown
    identity: int = 0  # hash of device and inode, equal for all names of a file; 0 if unknown


class SourceFile(NamedTuple):
    """An input file as the plan lists it.

    Attributes:
        source: Index of its source.
        name: Path relative to the source's prefix.
        size: Size in bytes.
        pieces: Number of splits.
    """

    source: int
    name: str
    size: int
    pieces: int


class Files(Sequence[SourceFile]):
    """The files of one source, sorted bytewise by name.

    Attributes:
        source: Index of the source.
        names: File names relative to `root`.
        sizes: int64[F], size of each file in bytes.
        root: Folder or URL that contains the files.
        kinds: The distinct (format, compression) pairs, in order of their first file.
        kind: uint8[F], index into `kinds` for each file.
        piece_bytes: Maps a file's index to the approximate content size in bytes of each of its
            splits, for example {3: [4100, 3900]}. A file with unknown content sizes is not in it.
            For each split of such a file, the stored bytes are used instead.
        seen: int64[F, 3], the fields of `Seen` for each file. None for files at URLs and for files
            from a plan.
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
        """Create the files of a source.

        Args:
            source: Index of the source.
            names: File names relative to `root`, sorted bytewise.
            sizes: int64[F], size of each file in bytes.
            format: The recipe's format, which may be "auto".
            root: Folder or URL that contains the files.
            pieces: int64[F], number of splits per file. With None, the splits are counted at the
                first use of `self.pieces`. Counting opens every table and indexed dataset.
            text_key: Key or column of the text.
            piece_bytes: Maps a file's index to the content sizes of its splits, as in the attribute
                `piece_bytes`.
            seen: int64[F, 3], the fields of `Seen` for each file. None for files at URLs and for
                files from a plan.
        """
        self.piece_bytes: dict[int, Sequence[int]] = dict(piece_bytes or {})
        self._text_key, self.seen = text_key, seen
        self.source, self.names, self.sizes, self.root = source, names, sizes, root
        self.kinds, self.kind = _kinds(names, format)
        self._pieces = pieces

    @cached_property
    def formats(self) -> list[tuple[str, str]]:
        """Return (format, compression) of each file, for example ("jsonl", "zstd")."""
        return [self.kinds[kind] for kind in self.kind.tolist()]

    @cached_property
    def pieces(self) -> np.ndarray:
        """Return the number of splits of each file, int64[F].

        Raises:
            SourceError: If a file has to be opened and cannot be read.
        """
        if self._pieces is not None:
            return self._pieces
        counts = np.zeros(len(self), np.int64)
        for k, (format, compression) in enumerate(self.kinds):
            file_indices = np.flatnonzero(self.kind == k)
            # Only tables and indexed files have to be opened to count their splits.
            if FORMATS[format].position != "number":
                counts[file_indices] = FORMATS[format].counts(self.sizes[file_indices], compression)
                continue
            paths = [os.path.join(self.root, self.names[i]) for i in file_indices.tolist()]
            sizes, key = self.sizes[file_indices].tolist(), self._text_key
            # A result is the number of splits of a file, or the content size of each split.
            results = _each(self.root, bytes_of_pieces, paths, repeat(format), sizes, repeat(key))
            for i, result in zip(file_indices.tolist(), results, strict=True):
                counts[i] = result if isinstance(result, int) else len(result)
                # The file is open, so its sizes are noted too.
                if not isinstance(result, int):
                    self.note(i, result)
        return counts

    def as_planned(self) -> Iterator[dict[str, Any]]:
        """Yield the plan's record of each file."""
        for i, file in enumerate(self):
            yield {
                **file._asdict(),
                **({"piece_bytes": list(self.piece_bytes[i])} if i in self.piece_bytes else {}),
            }

    def note(self, i: int, content_sizes: Sequence[int]) -> None:
        """Record the approximate content size in bytes of each split of file `i`."""
        self.piece_bytes[i] = content_sizes
        self.__dict__.pop("_held", None)

    def forget(self, but: Mapping[int, Sequence[int]]) -> None:
        """Replace `piece_bytes` by a copy of `but`, which has the same form.

        All other recorded content sizes of splits are forgotten.
        """
        self.piece_bytes = dict(but)
        self.__dict__.pop("_held", None)

    def held(self, file: np.ndarray, piece_number: np.ndarray, stored: np.ndarray) -> np.ndarray:
        """Return the approximate content size of each of n splits in bytes, int64[n].

        Args:
            file: int64[n], index of each split's file.
            piece_number: int64[n], index of each split within its file.
            stored: int64[n], stored bytes of each split. The result has this size for a split
                if the split's file is not in `piece_bytes`.
        """
        if not self.piece_bytes:
            return stored
        begin, flat = self._held
        is_noted = begin[file] >= 0
        return np.where(is_noted, flat[np.where(is_noted, begin[file] + piece_number, 0)], stored)

    @cached_property
    def _held(self) -> tuple[np.ndarray, np.ndarray]:
        """Return `piece_bytes` as two arrays (begin, flat).

        Returns:
            `flat`, int64, has the concatenated values of `piece_bytes`. `begin`, int64[F], has the
            index in `flat` of each file's first split, or -1 for a file that is not in
            `piece_bytes`.
        """
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
    """Yield the result of `do` for each file below `root`, in order.

    Each of the `arguments` has one value per file, as in `map(do, *arguments)`. Files at a URL are
    processed concurrently, because each file needs several requests.
    """
    if not is_url(root):
        yield from map(do, *arguments)
        return
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        yield from threads.map(do, *arguments)


def _kinds(names: Sequence[str], format: str) -> tuple[list[tuple[str, str]], np.ndarray]:
    """Return (kinds, kind): the distinct formats of the named files, and the format of each file.

    Returns:
        `kinds` is the list of distinct (format, compression) pairs, in order of their first file.
        `kind`, uint8[F], has each file's index into this list.
    """
    kinds: dict[tuple[str, str], int] = {}
    of_ending: dict[tuple[str, ...], int] = {}
    compresses = {"": False}
    kind = np.empty(len(names), np.uint8)
    for i, name in enumerate(names):
        # The format follows from the last suffix. If the last suffix names a compression, the
        # suffix before it decides.
        parts = name[name.rfind("/") + 1 :].rsplit(".", 2)
        suffix = parts[-1] if len(parts) > 1 else ""
        if suffix not in compresses:
            compresses[suffix] = bool(detect_format(f"x.{suffix}")[1])
        ending = (parts[1], suffix) if compresses[suffix] and len(parts) > 2 else (suffix,)
        if ending not in of_ending:
            of_ending[ending] = kinds.setdefault(format_of(name, format), len(kinds))
        kind[i] = of_ending[ending]
    return list(kinds), kind


class FileColumns(NamedTuple):
    """Columns that describe n splits. Each column is int64[n]."""

    file: np.ndarray  # index of the split's first file, counted in the source
    files: np.ndarray  # number of the split's files, more than 1 only for small text files
    part: np.ndarray  # index of the split within its file
    bytes: np.ndarray  # stored bytes of the split


class Pieces:
    """The splits of a source.

    60 TB of line files have 14 million splits. Therefore the class does not store the splits but
    computes them from runs. A run is one file with all its splits, or a group of text files that
    share one split.
    """

    def __init__(self, files: Files):
        """Compute the runs of a source's files, in file order.

        Adjacent text files share a split of at most 4 MiB. A larger text file has its own split.
        """
        positions = np.array([position_of(*kind) for kind in files.kinds])[files.kind]
        is_text, is_lines = positions == "whole", positions == "byte"
        begins = files.pieces > 0  # Whether each file starts a run. A run has at least one split.
        group_bytes, previous_file = 0, -2
        for i in np.flatnonzero(is_text).tolist():
            size = int(files.sizes[i])
            # A text file continues the run before it if both are neighbours and fit into 4 MiB.
            if previous_file == i - 1 and group_bytes + size <= PIECE_BYTES:
                begins[i] = False
            else:
                group_bytes = 0
            group_bytes, previous_file = group_bytes + size, i
        first_files = np.flatnonzero(begins)
        file_counts = np.ones(len(first_files), np.int64)
        sizes = files.sizes[first_files]
        if is_text.any():
            run = np.cumsum(begins) - 1  # run of each text file
            text_runs = run[is_text]
            file_counts[np.unique(text_runs)] = 0
            np.add.at(file_counts, text_runs, 1)
            sizes = np.where(is_text[first_files], 0, sizes)
            np.add.at(sizes, text_runs, files.sizes[is_text])
        # These arrays have one entry per run: first file, number of files, stored bytes, number of
        # splits, and whether the splits have a fixed size of 4 MiB.
        self._first, self._files, self._sizes = first_files, file_counts, sizes
        self._counts, self._lines = files.pieces[first_files], is_lines[first_files]
        self._ends = np.cumsum(self._counts)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def at(self, pieces: np.ndarray) -> FileColumns:
        """Return the files and stored bytes of n splits, as columns.

        `pieces`, int64[n], has the index of each split in the source, from 0 to len(self) - 1.
        """
        run = np.searchsorted(self._ends, pieces, "right")
        count, size = self._counts[run], self._sizes[run]
        piece_in_run = pieces - (self._ends[run] - count)
        # Only line files have splits of a known size. Other files are divided evenly.
        even = (piece_in_run + 1) * size // count - piece_in_run * size // count
        stored = np.where(
            self._lines[run], np.minimum(PIECE_BYTES, size - piece_in_run * PIECE_BYTES), even
        )
        return FileColumns(self._first[run], self._files[run], piece_in_run, stored)

    def of_file(self, i: int) -> range:
        """Return the indices of the splits that contain a part of the source's file `i`."""
        run = int(np.searchsorted(self._first, i, "right")) - 1
        if run < 0 or i >= self._first[run] + self._files[run]:
            return range(0)
        end = int(self._ends[run])
        return range(end - int(self._counts[run]), end)


_SHOWN_TWICE = 3


def fixed_prefix(patterns: Sequence[str], base: str = os.sep) -> str:
    """Cut absolute patterns before their first wildcard, and return their deepest common folder.

    For "/data/a/x*.txt" and "/data/b/y.txt", the result is "/data". For a single pattern without
    wildcards, it is the folder of the file. Characters in `base`, the recipe's folder, never count
    as wildcards.
    """
    folders = []
    for pattern in patterns:
        parts = pattern.split(os.sep)
        literal = len(os.path.commonprefix([parts, base.split(os.sep)]))
        wild = (i for i, name in enumerate(parts) if i >= literal and WILDCARD.search(name))
        folders.append(os.sep.join(parts[: next(wild, len(parts) - 1)]) or os.sep)
    return os.path.commonpath(folders)


def find_files(source: Source, index: int, base: Path, prefix: str | None) -> tuple[str, Files]:
    """Find the files of a source.

    All paths are local, or all are URLs of one bucket. A pair of files, such as a .bin and an .idx,
    counts as one file. It has the name of the file with the ids and the summed size of the pair. A
    pattern may match one or both files of a pair. A folder that Hugging Face `datasets` saved is
    replaced by its files.

    Args:
        source: The source's settings in the recipe.
        index: Index of the source.
        base: The recipe's folder. Relative paths start there.
        prefix: Current folder or URL of the files if they were moved, otherwise None.

    Returns:
        (prefix, files). The prefix is the folder or URL that contains the files. The files are
        sorted bytewise by name.

    Raises:
        SourceError: If a pattern matches no file. Also if a path without wildcards is a pipe, a
            device, or a folder that `datasets` did not save. Also if a name is invalid UTF-8 or a
            file cannot be read.
        StorageError: If the store refuses a request.
    """
    root, patterns = below_one_folder(source, base)
    return find_below(source, index, root if prefix is None else absolute_prefix(prefix), patterns)


def find_below(source: Source, index: int, root: str, patterns: Sequence[str]) -> tuple[str, Files]:
    """Find the files of a source by patterns relative to the folder or URL `root`.

    Returns:
        (root, files), with the files sorted bytewise by name.

    Raises:
        SourceError: As in `find_files`.
        StorageError: As in `find_files`.
        RecipeError: If the source's format is unknown.
    """
    check_format(source.format, index)
    files = (
        _find_remote(source, root, patterns)
        if is_url(root)
        else _find_local(source, root, patterns)
    )
    # The files of a pair become one entry before links are resolved.
    in_pairs = [f for f in FORMATS.values() if f.pair and source.format in ("auto", f.name)]
    for format in in_pairs:
        files = _in_pairs(source, root, files, format)
    if not is_url(root):
        files = without_linked_copies(root, files)
    for name in files:
        try:
            name.encode("utf-8")
        except UnicodeEncodeError:
            raise SourceError(
                f"source {source.name!r}: the name {os.fsencode(name)!r} is not valid UTF-8\n"
                "hint: rename the file"
            ) from None
    names = sorted(files)  # Code points sort in the same order as their UTF-8 bytes.
    seen = np.array([files[name] for name in names], np.int64).reshape(-1, len(Seen._fields))
    of_files = None if is_url(root) else seen
    return root, Files(
        index,
        names,
        seen[:, 0].copy(),
        source.format,
        root,
        text_key=source.text_key,
        seen=of_files,
    )


def absolute_prefix(prefix: str) -> str:
    """Return a source's prefix as a plan stores it.

    The result is an absolute path, or a URL without a trailing slash.
    """
    prefix = expanded(prefix)
    return prefix.rstrip("/") if is_url(prefix) else os.path.abspath(prefix)


def named_twice(sources: Sequence[Source], file_lists: Sequence[Files]) -> str:
    """Return a message about files that are read twice, or an empty string.

    A file may be read under two names or in two sources. Two sources that read the same file cause
    no message if their hash splits (`sample`) select different documents.
    """
    # Equal numbers mean the same file.
    all_identities = np.concatenate(
        [
            (
                np.array([hash((files.root, name)) for name in files.names], np.int64)
                if files.seen is None
                else files.seen[:, 2]
            )
            for files in file_lists
        ]
    )
    # `numbers` has the same number for the same file. `counts` has how often each is listed.
    _, numbers, counts = np.unique(all_identities, return_inverse=True, return_counts=True)
    ends = np.cumsum([len(files) for files in file_lists])
    groups: dict[int, list[tuple[int, int]]] = {}  # file → (source, index of the file there)
    # Convert indices into `all_identities` to (source, index of the file in the source).
    for k in np.flatnonzero(counts[numbers] > 1).tolist():
        s = int(np.searchsorted(ends, k, "right"))
        groups.setdefault(int(numbers[k]), []).append((s, k - int(ends[s]) + len(file_lists[s])))
    shown: list[str] = []
    count = 0
    for places in groups.values():
        pair = next((p for p in combinations(places, 2) if _overlap(sources, file_lists, *p)), None)
        # `_is_one` reads the disk, so it is called only for files that the message shows.
        if pair is None or (
            len(shown) < _SHOWN_TWICE and not _is_one(*(_path(file_lists, place) for place in pair))
        ):
            continue
        count += 1
        if len(shown) < _SHOWN_TWICE:
            path = _path(file_lists, pair[0])
            names = " and ".join(
                f"{file_lists[s].names[i]!r} of source {sources[s].name!r}" for s, i in pair
            )
            shown.append(f"{path if is_url(path) else os.path.realpath(path)} (as {names})")
    and_more = f" and {count - len(shown)} more" if count > len(shown) else ""
    return (
        f"files are read more than once: {', '.join(shown)}{and_more}. Name each file once"
        if shown
        else ""
    )


def odd_files(sources: Sequence[Source], file_lists: Sequence[Files]) -> list[str]:
    """Return warnings about files that were probably not meant to be read.

    The warnings cover text files among tables or JSONL files, such as a README, and files next to
    their compressed copies.
    """
    messages = []
    for source, files in zip(sources, file_lists, strict=True):
        texts = [
            name
            for name, (format, _) in zip(files.names, files.formats, strict=True)
            if format == "text"
        ]
        if source.format == "auto" and 0 < len(texts) < len(files):
            messages.append(
                f"source {source.name}: {len(texts)} of its {len(files)} files"
                f" {'is' if len(texts) == 1 else 'are'} read as one text per file, for example"
                f" {texts[0]}. To read only the others, name them in paths"
            )
        if len(files.kinds) > 1:
            # A file whose name without its last ending also exists is probably a compressed copy.
            names, kinds = set(files.names), zip(files.names, files.formats, strict=True)
            if copies := [
                name for name, (_, by) in kinds if by and name.rpartition(".")[0] in names
            ]:
                and_more = f", and {len(copies) - 1} more pairs" if len(copies) > 1 else ""
                messages.append(
                    f"source {source.name}: {copies[0]} and {copies[0].rpartition('.')[0]} are"
                    f" both read{and_more}. Name only one of them if they contain the same text"
                )
    return messages


def _overlap(
    sources: Sequence[Source], file_lists: Sequence[Files], a: tuple[int, int], b: tuple[int, int]
) -> bool:
    """Return whether a document may be read twice from a file that is listed twice.

    `a` and `b` are the two listings of the file, each as (index of the source, index of the file in
    the source). No document is read twice if both listings have the same file name, and the hash
    splits (`sample`) of their sources do not overlap.
    """
    (low, high), (other_low, other_high) = sources[a[0]].sample, sources[b[0]].sample
    # `sample` selects documents by the file's name, so equal names have comparable ranges.
    named_alike = file_lists[a[0]].names[a[1]] == file_lists[b[0]].names[b[1]]
    return not named_alike or (low < other_high and other_low < high)


def _path(file_lists: Sequence[Files], place: tuple[int, int]) -> str:
    return os.path.join(file_lists[place[0]].root, file_lists[place[0]].names[place[1]])


def _is_one(a: str, b: str) -> bool:
    """Return whether two paths with equal `Seen.identity` really are the same file.

    On a file system without inode numbers, different files may have equal identities. Therefore
    two local paths count as the same file only if they resolve to the same path, or if the file at
    `a` has several hard links.
    """
    return os.path.realpath(a) == os.path.realpath(b) or is_url(a) or os.stat(a).st_nlink > 1


def match_below(
    source: Source, base: Path, files: Files, out: str, names: Sequence[str]
) -> str | None:
    """Return the first of `names` that the source would read as an input, or None.

    The files with these names will be written to `out`. A pattern of the source may match their
    paths below `out`, directly or through links to folders.

    Args:
        source: The source's settings in the recipe.
        base: The recipe's folder.
        files: The files of the source. Their folders may contain links to a folder above `out`.
        out: Folder or URL that will contain the files in `names`.
        names: File names relative to `out`.
    """
    patterns = [pattern.split(os.sep) for pattern in below_one_folder(source, base)[1]]
    root, out = (place.removeprefix("file://") for place in (files.root, out))
    if is_url(root) != is_url(out):
        return None
    for folder in _below(root, out, files.names):
        for name in names:
            if any(matches(pattern, [*folder, *name.split("/")]) for pattern in patterns):
                return name
    return None


def _below(root: str, out: str, names: Sequence[str]) -> list[list[str]]:
    """Return the relative paths that lead from the folder `root` to `out`, each as a list of parts.

    If `out` is below `root`, one of these paths is direct. `names` are names of files relative to
    `root`. If a folder in such a name is a link to `out` or to a folder above `out`, another path
    leads through this link. The result is empty if no path exists.
    """
    if is_url(root):
        parts, above = out.rstrip("/").split("/"), root.split("/")
        return [parts[len(above) :]] if parts[: len(above)] == above else []
    # A link may be a folder of the files, or any folder above them.
    folders = {""}
    for folder in {os.path.dirname(name) for name in names}:
        while folder not in folders:
            folders.add(folder)
            folder = os.path.dirname(folder)
    # Maps (device, inode) of each existing folder above `out` to the path from there to `out`.
    above_out: dict[tuple[int, int], list[str]] = {}
    parts = os.path.realpath(out).split(os.sep)
    for n in range(1, len(parts) + 1):
        with contextlib.suppress(OSError):
            status = os.stat(os.sep.join(parts[:n]) or os.sep)
            above_out[status.st_dev, status.st_ino] = parts[n:]
    ways = []
    # A path leads to `out` if a folder below `root` is the same as a folder above `out`.
    for folder in sorted(folders):
        with contextlib.suppress(OSError):
            status = os.stat(os.path.join(root, folder))
            way = above_out.get((status.st_dev, status.st_ino))
            if way is not None:
                ways.append([*(folder.split(os.sep) if folder else []), *way])
    return ways


def below_one_folder(source: Source, base: Path) -> tuple[str, list[str]]:
    """Return (root, patterns): a source's common folder, and its patterns relative to this folder.

    `root` is a path or URL that ends before the first wildcard.

    Raises:
        SourceError: If the URLs are in different buckets.
    """
    urls = [expanded(path) for path in source.paths if is_url(path)]
    if not urls:
        patterns = [os.path.abspath(os.path.join(base, expanded(path))) for path in source.paths]
        root = fixed_prefix(patterns, os.path.abspath(base))
        return root, [os.path.relpath(pattern, root) for pattern in patterns]
    buckets = sorted({"/".join(url.split("/")[:3]) for url in urls})
    if len(buckets) > 1:
        raise SourceError(
            f"source {source.name!r} has files in {', '.join(buckets)}\n"
            "hint: write a separate source for each"
        )
    # As absolute paths, URLs have the same common folder as local patterns.
    below = [
        "/" + "/".join(name for name in url.split("/")[3:] if name not in ("", ".")) for url in urls
    ]
    folder = fixed_prefix(below).rstrip("/")
    return buckets[0] + folder, [path[len(folder) + 1 :] for path in below]


def _find_remote(source: Source, root: str, patterns: Sequence[str]) -> dict[str, Seen]:
    """Match the patterns below the URL `root`, and return the files as name → metadata.

    Names are relative to `root`. Wildcards match as in Python's `glob`.

    Raises:
        SourceError: If a pattern matches no file or is the name of a folder, or if the name of a
            file contains "", "." or ".." as a part.
    """
    # One listing serves all patterns. Without wildcards, each file needs one request.
    remote = Remote(root)
    listed = dict(remote.list()) if any(map(WILDCARD.search, patterns)) else {}
    files: dict[str, Seen] = {}
    for pattern in patterns:
        size = listed[pattern] if pattern in listed else None if listed else remote.size(pattern)
        if size is not None:
            new_files = {pattern: Seen(size)}
        else:
            new_files = {
                name: Seen(listed[name])
                for name in listed
                if matches(pattern.split("/"), name.split("/"))
            }
        # Stores have no folders, but objects below this name show that a folder is meant.
        if not new_files and not WILDCARD.search(pattern) and (listed or remote.list(pattern)):
            raise SourceError(
                f"source {source.name!r}: {root}/{pattern} is a folder\n"
                f"hint: give its files, as in {root}/{pattern}/**/*.jsonl"
            )
        if not new_files:
            raise SourceError(
                f"source {source.name!r}: {root}/{pattern} matches no file\n"
                "hint: check the bucket, the folder and the pattern"
            )
        files |= new_files
    # In a local path, such a part would refer to another file.
    for name in files:
        if any(path_part in ("", ".", "..") for path_part in name.split("/")):
            raise SourceError(
                f"source {source.name!r}: {root}/{name} is not a valid file name\nhint: rename it"
            )
    return files


def _in_pairs(source: Source, root: str, files: dict[str, Seen], format: Format) -> dict[str, Seen]:
    """Return `files` with one entry for each pair of files of a format, such as a .bin and an .idx.

    This entry has the name of the file with the ids, and the summed size of the files that belong
    to the pair. If only some of them are in `files`, the others are looked up below `root`.

    Raises:
        SourceError: If one file of a pair does not exist.
    """
    entries = {}
    for name, file in files.items():
        if not name.lower().endswith(format.suffixes):
            entries[name] = file
            continue
        # If both files of a pair are listed, the entry of the ids file covers the other.
        first_name, *other_names = _files_of_pair(name, format)
        if first_name != name and first_name in files:
            continue
        of_pair = {}
        # The first two files are required. Others, such as .ds.loss, may be missing.
        for i, file_name in enumerate((first_name, *other_names)):
            path = f"{root}/{file_name}" if is_url(root) else os.path.join(root, file_name)
            beside = files.get(file_name) or (
                _remote_file(root, file_name) if is_url(root) else seen(path)
            )
            if beside is not None:
                of_pair[file_name] = beside
            elif i < _FILES_OF_A_PAIR:
                raise SourceError(
                    f"source {source.name!r}: {path} is missing, and {format.name} files are"
                    f" {format.only.splitlines()[0]}\n"
                    f"hint: put it next to {name!r}, or set the source's format if the file is not"
                    ' one of a pair, such as format = "token_stream" for a file of ids alone'
                )
        entries[first_name] = Seen(
            sum(pair_file.size for pair_file in of_pair.values()),
            in_int64(sum(pair_file.modified for pair_file in of_pair.values())),
            of_pair[first_name].identity,
        )
    return entries


_FILES_OF_A_PAIR = 2


def _files_of_pair(name: str, format: Format) -> list[str]:
    """Return the names of all files that belong to a pair, in the order of `pair` and `beside`.

    The endings have the case of the ending of `name`, which is one of these files.
    """
    assert format.pair is not None
    begin, end = format.pair
    known_endings = (begin, end, *(begin + suffix for suffix in (*format.beside, *format.notes)))
    ending = max((suffix for suffix in known_endings if name.lower().endswith(suffix)), key=len)
    stem, is_upper = name[: -len(ending)], name[-len(ending) :].isupper()
    endings = (begin, end, *(begin + suffix for suffix in format.beside))
    return [stem + (suffix.upper() if is_upper else suffix) for suffix in endings]


def _remote_file(root: str, name: str) -> Seen | None:
    size = Remote(root).size(name)
    return None if size is None else Seen(size)


def _find_local(source: Source, root: str, patterns: Sequence[str]) -> dict[str, Seen]:
    """Match the patterns below the folder `root`, and return the files as name → metadata.

    Names are relative to `root`. A folder that Hugging Face `datasets` saved is replaced by its
    files.

    Raises:
        SourceError: If a pattern matches no file, or if a path without wildcards is not a file.
    """
    files: dict[str, Seen] = {}
    for i, name in enumerate(patterns):
        pattern = os.path.join(root, name)
        given_path = source.paths[i] if source.paths else name
        # A path that exists is used as it is, even if it contains wildcard characters.
        if WILDCARD.search(name) and not os.path.exists(pattern):
            matched = False
            for matched_name in files_matched(root, name.split(os.sep)):
                # This is the only system call per file.
                file = seen(os.path.join(root, matched_name))
                if file is not None:
                    files[matched_name], matched = file, True
            if not matched:
                raise SourceError(
                    f"source {source.name!r}: {given_path} matches no file (looked for"
                    f" {pattern}){nearby(pattern)}{hidden_match(name, root)}\n"
                    "hint: if the files have moved, pass their new folder as --source"
                    f" {source.name}=FOLDER"
                )
        elif os.path.isfile(os.path.join(pattern, "state.json")):
            # This import loads pyarrow, which other sources do not need.
            from packprep.sources.formats.arrow import saved_files

            for file_name in saved_files(pattern):
                path = os.path.join(pattern, file_name)
                try:
                    status = os.stat(path)
                except OSError as error:
                    raise SourceError(f"source {source.name!r}: {path}: {error.strerror}") from None
                identity = hash((status.st_dev, status.st_ino))
                files[f"{name}/{file_name}"] = Seen(
                    status.st_size, in_int64(status.st_mtime_ns), identity
                )
        elif os.path.isfile(os.path.join(pattern, "dataset_dict.json")):
            raise SourceError(
                f"source {source.name!r}: {given_path} is a folder of several splits\n"
                f"hint: name one split, as in {given_path.rstrip('/')}/train"
            )
        elif os.path.isfile(os.path.join(pattern, "plan.json")):
            raise SourceError(
                f"source {source.name!r}: {given_path} is a packprep dataset or token store, and a"
                " dataset cannot be a source\n"
                'hint: for a token store, set format = "store" next to the path, in [[sources]]'
                " of a recipe"
            )
        elif os.path.isdir(pattern):
            raise SourceError(
                f"source {source.name!r}: {given_path} is a folder\n"
                f"hint: give its files, as in {given_path.rstrip('/')}/**/*.jsonl"
            )
        elif (file := seen(pattern)) is not None:
            files[name] = file
        elif not os.path.exists(pattern):
            raise SourceError(
                f"source {source.name!r}: {given_path}: no such file (looked for"
                f" {pattern}){nearby(pattern)}"
            )
        else:
            raise SourceError(
                f"source {source.name!r}: {given_path} is not a regular file but a pipe, a device"
                " or a socket, which cannot be read twice\n"
                "hint: write its data to a file"
            )
    return files


def seen(path: str, format: Format | None = None) -> Seen | None:
    """Return the metadata of a regular file, or None if `path` is not a regular file.

    If `format` is a format of pairs, the result has the summed sizes and times of the files that
    belong to the pair of `path`.
    """
    is_pair = format is not None and format.pair is not None
    names = _files_of_pair(path, format) if is_pair and format is not None else [path]
    statuses = []
    for i, file_path in enumerate(names):
        try:
            status = os.stat(file_path)
        except (OSError, ValueError):
            if i < _FILES_OF_A_PAIR:
                return None
            continue
        if not stat.S_ISREG(status.st_mode):
            return None
        statuses.append(status)
    identity = 0 if is_pair else hash((statuses[0].st_dev, statuses[0].st_ino))
    return Seen(
        sum(file_status.st_size for file_status in statuses),
        in_int64(sum(file_status.st_mtime_ns for file_status in statuses)),
        identity,
    )
