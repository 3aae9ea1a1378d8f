"""The files of a source: patterns, local or URLs, → a prefix and the files' names relative to it.

A file's name, its order among the others and its size are the same wherever the files lie.
"""

import contextlib
import difflib
import fnmatch
import glob
import os
import stat
from collections.abc import Sequence
from itertools import combinations, islice
from pathlib import Path

import numpy as np

from packprep.corpus.files import Files, Seen
from packprep.corpus.saved_datasets import saved_files
from packprep.errors import SourceError
from packprep.recipe import Source
from packprep.storage import Remote, expanded, is_url

_LOOKED_AT, _SHOWN = 10_000, 6  # names of a folder, where a pattern matches nothing
_SHOWN_TWICE = 3


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

    A source's paths are local, or URLs of one bucket. A pair of Megatron's files, of which a pattern may find one or both,
    is one file: the .bin, with the bytes of both. A folder of a Hugging Face dataset on disk is its files. SourceError for
    a pattern that matches nothing, another folder, a pipe or device, a name that is not valid UTF-8, or a file that cannot
    be read; StorageError for a store that refuses.
    """
    root, patterns = below_one_folder(source, base)
    return find_below(source, index, root if prefix is None else absolute_prefix(prefix), patterns)


def find_below(source: Source, index: int, root: str, patterns: Sequence[str]) -> tuple[str, Files]:
    """As `find_files`, by patterns relative to the folder or URL `root`."""
    found = _find_remote(source, root, patterns) if is_url(root) else _find_local(source, root, patterns)
    if source.format in ("auto", "megatron"):
        found = _in_pairs(source, root, found)
    for name in found:
        try:
            name.encode("utf-8")
        except UnicodeEncodeError:
            raise SourceError(
                f"source {source.name!r}: the name {os.fsencode(name)!r} is not valid UTF-8; rename the file"
            ) from None
    names = sorted(found)  # code points sort as their UTF-8 does
    seen = np.array([found[name] for name in names], np.int64).reshape(-1, len(Seen._fields))
    of_files = None if is_url(root) else seen
    return root, Files(index, names, seen[:, 0].copy(), source.format, root, text_key=source.text_key, seen=of_files)


def absolute_prefix(prefix: str) -> str:
    """The folder where a source's files lie, as a plan names it: an absolute path, or a URL without a slash at its end."""
    prefix = expanded(prefix)
    return prefix.rstrip("/") if is_url(prefix) else os.path.abspath(prefix)


def named_twice(sources: Sequence[Source], found: Sequence[Files]) -> str:
    """A message about files that stand twice, by two names or in two sources; "" if none does.

    Two sources may share a file where their `sample` keeps other documents of it.
    """
    known = np.concatenate([_identities(files) for files in found])
    _, which, counts = np.unique(known, return_inverse=True, return_counts=True)
    ends = np.cumsum([len(files) for files in found])
    groups: dict[int, list[tuple[int, int]]] = {}  # file → its places: source, number in it
    for k in np.flatnonzero(counts[which] > 1).tolist():
        s = int(np.searchsorted(ends, k, "right"))
        groups.setdefault(int(which[k]), []).append((s, k - int(ends[s]) + len(found[s])))
    shown: list[str] = []
    count = 0
    for places in groups.values():
        pair = next((p for p in combinations(places, 2) if _overlap(sources, found, *p)), None)
        if pair is None or (len(shown) < _SHOWN_TWICE and not _is_one(*(_path(found, place) for place in pair))):
            continue
        count += 1
        if len(shown) < _SHOWN_TWICE:
            path = _path(found, pair[0])
            names = " and ".join(f"{found[s].names[i]!r} of source {sources[s].name!r}" for s, i in pair)
            shown.append(f"{path if is_url(path) else os.path.realpath(path)} (as {names})")
    more = f" and {count - len(shown)} more" if count > len(shown) else ""
    return f"read more than once: {', '.join(shown)}{more}; name each file once" if shown else ""


def _identities(files: Files) -> np.ndarray:
    """int64[F]: the same number for the same file."""
    if files.seen is not None:
        return files.seen[:, 2]
    return np.array([hash((files.root, name)) for name in files.names], np.int64)


def _overlap(sources: Sequence[Source], found: Sequence[Files], a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether two places of a file may give one document twice."""
    (low, high), (other_low, other_high) = sources[a[0]].sample, sources[b[0]].sample
    named_alike = found[a[0]].names[a[1]] == found[b[0]].names[b[1]]  # by which `sample` goes
    return not named_alike or (low < other_high and other_low < high)


def _path(found: Sequence[Files], place: tuple[int, int]) -> str:
    return os.path.join(found[place[0]].root, found[place[0]].names[place[1]])


def _is_one(a: str, b: str) -> bool:
    """Whether two names are of one file, also where a file system gives files no numbers of their own."""
    return os.path.realpath(a) == os.path.realpath(b) or is_url(a) or os.stat(a).st_nlink > 1


def match_below(source: Source, base: Path, files: Files, out: str, names: Sequence[str]) -> str | None:
    """The first of `names`, of files below the folder or URL `out`, that a pattern of the source matches; None for none.

    files: what was found of the source, through whose folders links are followed.
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
    """The ways, as parts, from the folder `root` to the folder `out`, directly or through folders of the files `names`."""
    if is_url(root):
        parts, above = out.rstrip("/").split("/"), root.split("/")
        return [parts[len(above) :]] if parts[: len(above)] == above else []
    folders = {""}
    for folder in {os.path.dirname(name) for name in names}:
        while folder not in folders:
            folders.add(folder)
            folder = os.path.dirname(folder)
    above_out: dict[int, list[str]] = {}  # folder that is there → the way from it
    parts = os.path.realpath(out).split(os.sep)
    for n in range(1, len(parts) + 1):
        with contextlib.suppress(OSError):
            above_out[_seen(os.stat(os.sep.join(parts[:n]) or os.sep)).identity] = parts[n:]
    ways = []
    for folder in sorted(folders):
        with contextlib.suppress(OSError):
            way = above_out.get(_seen(os.stat(os.path.join(root, folder))).identity)
            if way is not None:
                ways.append([*(folder.split(os.sep) if folder else []), *way])
    return ways


def below_one_folder(source: Source, base: Path) -> tuple[str, list[str]]:
    """(the folder of a source's patterns up to their first wildcard, the patterns relative to it)."""
    urls = [expanded(path) for path in source.paths if is_url(path)]
    if not urls:
        patterns = [os.path.abspath(os.path.join(base, expanded(path))) for path in source.paths]
        root = fixed_prefix(patterns, os.path.abspath(base))
        return root, [os.path.relpath(pattern, root) for pattern in patterns]
    buckets = sorted({"/".join(url.split("/")[:3]) for url in urls})
    if len(buckets) > 1:
        raise SourceError(f"source {source.name!r} has files in {', '.join(buckets)}; make a source for each")
    below = ["/" + "/".join(part for part in url.split("/")[3:] if part not in ("", ".")) for url in urls]
    folder = fixed_prefix(below).rstrip("/")
    return buckets[0] + folder, [path[len(folder) + 1 :] for path in below]


def _find_remote(source: Source, root: str, patterns: Sequence[str]) -> dict[str, Seen]:
    """name → what is found of the files below a URL that match the patterns, as glob would match them."""
    remote = Remote(root)
    listed = dict(remote.list()) if any(map(_has_wildcard, patterns)) else {}
    found: dict[str, Seen] = {}
    for pattern in patterns:
        size = listed[pattern] if pattern in listed else None if listed else remote.size(pattern)
        if size is not None:
            own = {pattern: Seen(size)}
        else:
            own = {name: Seen(listed[name]) for name in listed if matches(pattern.split("/"), name.split("/"))}
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


def _in_pairs(source: Source, root: str, files: dict[str, Seen]) -> dict[str, Seen]:
    """The files, where Megatron's pairs are their .bin with the bytes of both. SourceError for one without the other."""
    found = {}
    for name, file in files.items():
        ending = name[-4:]
        other = name[:-4] + _OTHER_OF_PAIR.get(ending, "")
        if ending not in _OTHER_OF_PAIR:
            found[name] = file
        elif ending.lower() == ".bin" or other not in files:
            path = f"{root}/{other}" if is_url(root) else os.path.join(root, other)
            beside = files.get(other) or (_remote_file(root, other) if is_url(root) else seen(path))
            if beside is None:
                raise SourceError(
                    f"source {source.name!r}: {path} is missing. Megatron's data are pairs of an .idx and a .bin file: put it "
                    f"beside {name!r}, or set the source's format if that is none of a pair"
                )
            both = Seen(file.size + beside.size, file.modified + beside.modified, file.identity)
            found[name if ending.lower() == ".bin" else other] = both
    return found


_OTHER_OF_PAIR = {".bin": ".idx", ".idx": ".bin", ".BIN": ".IDX", ".IDX": ".BIN"}


def _remote_file(root: str, name: str) -> Seen | None:
    size = Remote(root).size(name)
    return None if size is None else Seen(size)


def _find_local(source: Source, root: str, patterns: Sequence[str]) -> dict[str, Seen]:
    """name → what is found of the files below a folder that match the patterns."""
    files: dict[str, Seen] = {}
    for i, name in enumerate(patterns):
        pattern = os.path.join(root, name)
        given = source.paths[i] if source.paths else name
        if _has_wildcard(name) and not os.path.exists(pattern):
            matched = False
            for found in glob.iglob(name, root_dir=root, recursive=True):
                file = seen(os.path.join(root, found))  # the one call for each file that the file system sees
                if file is not None:
                    files[found], matched = file, True
            if not matched:
                raise SourceError(
                    f"source {source.name!r}: {given} matches no file (looked for {pattern}){nearby(pattern)}; if its "
                    f"files have moved, --source {source.name}=FOLDER says where they lie now"
                )
        elif os.path.isfile(os.path.join(pattern, "state.json")):
            for part in saved_files(pattern):
                files[f"{name}/{part}"] = _seen_or_error(source, os.path.join(pattern, part))
        elif os.path.isfile(os.path.join(pattern, "dataset_dict.json")):
            raise SourceError(
                f"source {source.name!r}: {given} is a folder of several splits; name one of them, as in "
                f"{given.rstrip('/')}/train"
            )
        elif os.path.isdir(pattern):
            raise SourceError(
                f"source {source.name!r}: {given} is a folder; say which files, as in {given.rstrip('/')}/**/*.jsonl"
            )
        elif not os.path.exists(pattern):
            raise SourceError(f"source {source.name!r}: {given}: no such file (looked for {pattern}){nearby(pattern)}")
        elif not os.path.isfile(pattern):
            raise SourceError(
                f"source {source.name!r}: {given} is no regular file but a pipe, a device or a socket, which cannot be "
                "read twice; write what it gives to a file"
            )
        else:
            files[name] = _seen_or_error(source, pattern)
    return files


def _seen_or_error(source: Source, path: str) -> Seen:
    try:
        return _seen(os.stat(path))
    except OSError as error:
        raise SourceError(f"source {source.name!r}: {path}: {error.strerror}") from None


def seen(path: str) -> Seen | None:
    """What the file system says of a regular file; None if it is none, or cannot be asked for."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return _seen(status) if stat.S_ISREG(status.st_mode) else None


def seen_again(path: str, format: str) -> Seen | None:
    """The same of a planned file of this format, with the other of its pair; None if it, or that, is not there."""
    files = [seen(path), *([seen(path[:-4] + _OTHER_OF_PAIR[path[-4:]])] if format == "megatron" else [])]
    if None in files:
        return None
    sizes, times = zip(*[file[:2] for file in files if file is not None], strict=True)
    return Seen(sum(sizes), sum(times))


def _seen(status: os.stat_result) -> Seen:
    return Seen(status.st_size, status.st_mtime_ns, hash((status.st_dev, status.st_ino)))


def nearby(pattern: str) -> str:
    """A message's part for a pattern that matches nothing: what lies in the deepest of its folders that there is."""
    folder, *below = _deepest_folder(pattern)
    try:
        with os.scandir(folder) as entries:
            there = sorted(entry.name + os.sep * entry.is_dir() for entry in islice(entries, _LOOKED_AT))
    except OSError as error:
        return f"; the folder {folder} cannot be looked into: {error.strerror}"
    absent = f"; there is no folder {os.path.join(folder, below[0])}" if len(below) > 1 else ""
    near = difflib.get_close_matches(below[0] if below else "", [name.rstrip(os.sep) for name in there], 1, 0.6)
    more = f" and {len(there) - _SHOWN} more" if len(there) > _SHOWN else ""
    braces = "; {a,b} is no pattern: give each by itself" if "{" in pattern else ""
    return (
        f"{absent}; {folder} holds {', '.join(there[:_SHOWN]) or 'nothing'}{more}"
        + (f"; did you mean {near[0]}?" if near and not _has_wildcard(below[0]) else "")
        + braces
    )


def _deepest_folder(pattern: str) -> list[str]:
    """The longest begin of an absolute path that is a folder, and the parts behind it."""
    parts = pattern.split(os.sep)
    n = next(n for n in range(len(parts), 0, -1) if os.path.isdir(os.sep.join(parts[:n]) or os.sep))
    return [os.sep.join(parts[:n]) or os.sep, *parts[n:]]
