"""The files of a source: patterns, local or URLs, → a prefix and the files' names relative to it.

A file's name, its order among the others and its size are the same wherever the files lie.
"""

import fnmatch
import glob
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from packprep.corpus.files import Files
from packprep.errors import SourceError
from packprep.recipe import Source
from packprep.storage import Remote, is_url


def _has_wildcard(part: str) -> bool:
    return any(c in part for c in "*?[")


def fixed_prefix(patterns: Sequence[str], base: str = os.sep) -> str:
    """The longest folder common to all absolute patterns up to their first wildcard; for a file, its folder.

    Nothing in `base`, the recipe's folder, is a wildcard.
    """
    folders = []
    for pattern in patterns:
        parts = pattern.split(os.sep)
        literal = len(os.path.commonprefix([parts, base.split(os.sep)]))
        wild = (i for i, part in enumerate(parts) if i >= literal and _has_wildcard(part))
        folders.append(os.sep.join(parts[: next(wild, len(parts) - 1)]) or os.sep)
    return os.path.commonpath(folders)


def find_files(source: Source, index: int, base: Path, prefix: str | None) -> tuple[str, Files]:
    """(prefix, files sorted bytewise by name) of a source. `prefix` says where the files lie now, if they were moved.

    A source's paths are local, or URLs of one bucket. SourceError for a pattern that matches nothing, a folder, a pipe or
    device, a name that is not valid UTF-8, or a file that cannot be read; StorageError for a store that refuses.
    """
    root, patterns = _below_one_folder(source, base)
    if prefix is not None:
        root = absolute_prefix(prefix)
    sizes = _find_remote(source, root, patterns) if is_url(root) else _find_local(source, root, patterns)
    for name in sizes:
        try:
            name.encode("utf-8")
        except UnicodeEncodeError:
            raise SourceError(
                f"source {source.name!r}: the name {os.fsencode(name)!r} is not valid UTF-8; rename the file"
            ) from None
    names = sorted(sizes)  # code points sort as their UTF-8 does
    return root, Files(index, names, np.array([sizes[name] for name in names], np.int64), source.format, root)


def absolute_prefix(prefix: str) -> str:
    """The folder where a source's files lie, as a plan names it: an absolute path, or a URL without a slash at its end."""
    return prefix.rstrip("/") if is_url(prefix) else os.path.abspath(prefix)


def _below_one_folder(source: Source, base: Path) -> tuple[str, list[str]]:
    """(the folder of a source's patterns up to their first wildcard, the patterns relative to it)."""
    urls = [path for path in source.paths if is_url(path)]
    if not urls:
        patterns = [os.path.abspath(os.path.join(base, os.path.expanduser(path))) for path in source.paths]
        root = fixed_prefix(patterns, os.path.abspath(base))
        return root, [os.path.relpath(pattern, root) for pattern in patterns]
    buckets = sorted({"/".join(url.split("/")[:3]) for url in urls})
    if len(buckets) > 1:
        raise SourceError(f"source {source.name!r} has files in {', '.join(buckets)}; make a source for each")
    below = ["/" + "/".join(part for part in url.split("/")[3:] if part not in ("", ".")) for url in urls]
    folder = fixed_prefix(below).rstrip("/")
    return buckets[0] + folder, [path[len(folder) + 1 :] for path in below]


def _find_remote(source: Source, root: str, patterns: Sequence[str]) -> dict[str, int]:
    """name → bytes of the files below a URL that match the patterns, as glob would match them."""
    remote = Remote(root)
    listed = dict(remote.list()) if any(map(_has_wildcard, patterns)) else {}
    found: dict[str, int] = {}
    for pattern in patterns:
        size = listed[pattern] if pattern in listed else None if listed else remote.size(pattern)
        if size is not None:
            own = {pattern: size}
        else:
            own = {name: listed[name] for name in listed if matches(pattern.split("/"), name.split("/"))}
        if not own and not _has_wildcard(pattern) and (listed or remote.list(pattern)):
            raise SourceError(
                f"source {source.name!r}: {root}/{pattern} is a folder; say which files, as in {root}/{pattern}/**/*.jsonl"
            )
        if not own:
            raise SourceError(
                f"source {source.name!r}: {root}/{pattern} matches no file; check the bucket, the folder and the pattern"
            )
        found |= own
    for name in found:
        if any(part in ("", ".", "..") for part in name.split("/")):
            raise SourceError(f"source {source.name!r}: {root}/{name} cannot be the name of a file; rename it")
    return found


def matches(pattern: Sequence[str], name: Sequence[str]) -> bool:
    """Whether glob, with `**`, would find a file by a pattern, both as parts: * and ** pass over what begins with a dot."""
    if not pattern or not name:
        return not pattern and not name
    if pattern[0] == "**" and len(pattern) == 1:
        return not any(part.startswith(".") for part in name)
    if pattern[0] == "**":
        deeper = not name[0].startswith(".") and matches(pattern, name[1:])
        return deeper or matches(pattern[1:], name)
    hidden = name[0].startswith(".") and not pattern[0].startswith(".")
    return not hidden and fnmatch.fnmatchcase(name[0], pattern[0]) and matches(pattern[1:], name[1:])


def _find_local(source: Source, root: str, patterns: Sequence[str]) -> dict[str, int]:
    """name → bytes of the files below a folder that match the patterns."""
    sizes: dict[str, int] = {}
    for name, given in zip(patterns, source.paths, strict=True):
        pattern = os.path.join(root, name)
        if _has_wildcard(name) and not os.path.exists(pattern):
            matched = False
            for found in glob.iglob(name, root_dir=root, recursive=True):
                size = _size(os.path.join(root, found))  # the one call for each file that the file system sees
                if size is not None:
                    sizes[found], matched = size, True
            if not matched:
                raise SourceError(
                    f"source {source.name!r}: {given} matches no file (looked for {pattern}); mend the pattern, or say "
                    f"where the files lie now: --source {source.name}=FOLDER"
                )
        elif os.path.isdir(pattern):
            raise SourceError(
                f"source {source.name!r}: {given} is a folder; say which files, as in {given.rstrip('/')}/**/*.jsonl"
            )
        elif not os.path.exists(pattern):
            raise SourceError(f"source {source.name!r}: {given}: no such file (looked for {pattern})")
        elif not os.path.isfile(pattern):
            raise SourceError(
                f"source {source.name!r}: {given} is no regular file but a pipe, a device or a socket, which cannot be "
                "read twice; write what it gives to a file"
            )
        else:
            try:
                sizes[name] = os.path.getsize(pattern)
            except OSError as error:
                raise SourceError(f"source {source.name!r}: {pattern}: {error.strerror}") from None
    return sizes


def _size(path: str) -> int | None:
    """The bytes of a regular file; None if it is none, or cannot be asked for."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None
