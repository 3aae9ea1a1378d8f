"""Match file patterns of local paths and URLs, and explain patterns that match nothing."""

import contextlib
import difflib
import fnmatch
import glob
import heapq
import os
import re
import stat
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")

WILDCARD = re.compile(r"[*?[]")
_LOOKED_AT, _SHOWN = 10_000, 6  # numbers of a folder's entries to read and to list in a message


def matches(pattern: Sequence[str], name: Sequence[str]) -> bool:
    """Return whether a pattern matches a name as in Python's recursive `glob`.

    Both are lists of path parts, such as ["a", "**", "*.txt"] for "a/**/*.txt". The wildcards * and
    ** do not match names that start with a dot.
    """
    if not pattern or not name:
        return not pattern and not name
    if pattern[0] == "**" and len(pattern) == 1:
        return not any(name_part.startswith(".") for name_part in name)
    if pattern[0] == "**":
        deeper = not name[0].startswith(".") and matches(pattern, name[1:])
        return deeper or matches(pattern[1:], name)
    hidden = name[0].startswith(".") and not pattern[0].startswith(".")
    return (
        not hidden and fnmatch.fnmatchcase(name[0], pattern[0]) and matches(pattern[1:], name[1:])
    )


def _folder_identity(path: str) -> tuple[int, ...] | None:
    """Return the device and inode of a folder, or None if `path` is not a folder.

    All paths to a folder give the same result. On a file system without inode numbers, the result
    is a hash of the path.
    """
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    if not stat.S_ISDIR(status.st_mode):
        return None
    return (status.st_dev, status.st_ino) if status.st_ino else (hash(path),)


def files_matched(root: str, parts: Sequence[str], hidden: bool = False) -> Iterator[str]:
    """Match a pattern below the folder `root` as in Python's `glob`, and yield the names.

    A folder may be reachable by several paths, or contain a link to itself. It is searched once:
    by a path without links if there is one, otherwise by the first path in sorted order. A heap
    produces the paths in this order, because a longer path compares greater than its own prefix.

    Args:
        root: Folder to search.
        parts: Path parts of the pattern. "**" matches any number of folders.
        hidden: Whether wildcards also match names that start with a dot.
    """
    # Each entry is (whether the path contains a link, path below root, index of the part).
    heap = [(False, "", 0)]
    entered = set()
    while heap:
        linked, folder, n = heapq.heappop(heap)
        # A folder is entered once per part of the pattern, so links cannot form a loop.
        identity = _folder_identity(os.path.join(root, folder))
        if identity is None or (identity, n) in entered:
            continue
        entered.add((identity, n))
        pattern_part, is_last = parts[n], n == len(parts) - 1
        if not WILDCARD.search(pattern_part):
            path = os.path.join(folder, pattern_part)
            if is_last:
                yield path
            else:
                heapq.heappush(
                    heap, (linked or os.path.islink(os.path.join(root, path)), path, n + 1)
                )
            continue
        deeper = pattern_part == "**"
        # `**` also matches no folder, so the rest of the pattern starts here as well.
        if deeper and not is_last:
            heapq.heappush(heap, (linked, folder, n + 1))
        with contextlib.suppress(OSError), os.scandir(os.path.join(root, folder)) as entries:
            for entry in entries:
                if entry.name.startswith(".") and not (hidden or pattern_part.startswith(".")):
                    continue
                if not deeper and not fnmatch.fnmatchcase(entry.name, pattern_part):
                    continue
                path = os.path.join(folder, entry.name)
                if is_last:
                    yield path
                if (deeper or not is_last) and entry.is_dir():
                    heapq.heappush(
                        heap, (linked or entry.is_symlink(), path, n if deeper else n + 1)
                    )


def without_linked_copies(root: str, files: dict[str, T]) -> dict[str, T]:
    """Return `files` with only one path for each file, although folders may have several paths.

    A folder has several paths if links lead to it. For each file, a path without links is kept if
    there is one, otherwise the first path in sorted order. Names in `files` are relative to `root`.
    """
    folders = {os.path.dirname(name) for name in files}
    identities = {folder: _folder_identity(os.path.join(root, folder)) for folder in folders}
    # Two folders with the same identity are two paths to one folder.
    if len(set(identities.values())) == len(folders):
        return files

    def preference(name: str) -> tuple[bool, str]:
        parts = os.path.dirname(name).split(os.sep)
        return (
            any(os.path.islink(os.path.join(root, *parts[:n])) for n in range(1, len(parts) + 1)),
            name,
        )

    kept_names: dict[Any, str] = {}
    # The preferred path comes first, and `setdefault` keeps it.
    for name in sorted(files, key=preference):
        kept_names.setdefault((identities[os.path.dirname(name)], os.path.basename(name)), name)
    return {name: files[name] for name in kept_names.values()}


def nearby(pattern: str) -> str:
    """Return the end of an error message about an absolute pattern that matches nothing.

    It lists entries of the pattern's deepest existing folder, and may suggest a similar name.
    """
    folder, *below = _deepest_folder(pattern)
    try:
        with os.scandir(folder) as entries:
            names = sorted(
                entry.name + os.sep * entry.is_dir() for entry in islice(entries, _LOOKED_AT)
            )
    except OSError as error:
        return f"; the folder {folder} cannot be read: {error.strerror}"
    # If several parts are missing, the first missing part is a folder.
    absent = f"; there is no folder {os.path.join(folder, below[0])}" if len(below) > 1 else ""
    near = difflib.get_close_matches(
        below[0] if below else "", [name.rstrip(os.sep) for name in names], 1, 0.6
    )
    rest_in_words = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    braces = "; {a,b} is not a pattern: give both names separately" if "{" in pattern else ""
    # A name may contain [ although the pattern reads [ as a character class.
    parts = pattern.split(os.sep)
    literal = [
        n
        for n, path_part in enumerate(parts)
        if "[" in path_part and os.path.exists(os.sep.join(parts[: n + 1]))
    ]
    if literal:
        escaped = os.sep.join(
            glob.escape(path_part) if n in literal else path_part
            for n, path_part in enumerate(parts)
        )
        braces += (
            "; [ starts a character class in a pattern: in a name, write [[] instead, as in"
            f" {escaped}"
        )
    return (
        f"{absent}; {folder} contains {', '.join(names[:_SHOWN]) or 'nothing'}{rest_in_words}"
        + (f"; did you mean {near[0]}?" if near and not WILDCARD.search(below[0]) else "")
        + braces
    )


def hidden_match(name: str, root: str) -> str:
    """Return the end of an error message about a pattern that misses hidden files, or "".

    The pattern `name` is relative to the folder `root`. A wildcard does not match a file or folder
    name that starts with a dot. If the pattern misses a file only for this reason, the message
    names the file and a pattern that matches it.
    """
    hidden = files_matched(root, name.split(os.sep), hidden=True)
    hidden_file = next((path for path in hidden if os.path.isfile(os.path.join(root, path))), None)
    if hidden_file is None:
        return ""
    parts = hidden_file.split(os.sep)
    n = next(i for i, path_part in enumerate(parts) if path_part.startswith("."))
    below = [] if n == len(parts) - 1 else ["**", os.path.basename(name)]
    named = os.path.join(root, *parts[: n + 1], *below)
    return (
        f"; * and ** ignore names that start with a dot, as {hidden_file} does: write that name"
        f" out, as in {named}"
    )


def _deepest_folder(pattern: str) -> list[str]:
    """Return a list: the deepest existing folder of an absolute pattern, then the remaining parts.

    If /data exists and /data/a does not, "/data/a/*.txt" gives ["/data", "a", "*.txt"].
    """
    parts = pattern.split(os.sep)
    n = next(n for n in range(len(parts), 0, -1) if os.path.isdir(os.sep.join(parts[:n]) or os.sep))
    return [os.sep.join(parts[:n]) or os.sep, *parts[n:]]
