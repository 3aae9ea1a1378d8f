"""What one run of packprep keeps for the next, because it takes long to make: compiled kernels, facts of tokenizers.

It is code that will run, or decides which ids a text has. So the folder is one that nobody else can write or replace, a file
of another user's is not read, and neither is one that is not as it was written, as after a power cut: it is made anew.
The folder is named by the digest of all of packprep's sources: any change starts a new one.
"""

import contextlib
import functools
import itertools
import os
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from packprep.dataset.opening import open_file, read_file
from packprep.digests import digest_of, digest_of_buffers

KEPT_FOLDERS, KEPT_DAYS = 8, 30
"""Of the folders of compiled kernels: how many stay however old they are, and how long the others stay after their last use."""
_DIGEST_BYTES = 32
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def keep(what: str, depends_on: bytes, data: bytes) -> None:
    """Keep bytes for `kept`, in place of what was kept of the same; nothing where they cannot be written.

    what: a word for its name. depends_on: all that it depends on, but for packprep's sources.
    """
    folder = cache_folder()
    if folder is None:
        return
    path = os.path.join(folder, _name(what, depends_on))
    temporary = os.path.join(folder, f".{os.path.basename(path)}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with contextlib.suppress(OSError):
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data + digest_of(data).encode())
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def kept(what: str, depends_on: bytes) -> bytes | None:
    """What was kept; None where there is nothing, or not what was written, or what others can write."""
    folder = cache_folder()
    if folder is None:
        return None
    try:
        with open_file(os.path.join(folder, _name(what, depends_on))) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & _OTHERS_WRITE:
                return None
            found = file.readall()
    except OSError:
        return None
    data, digest = found[:-_DIGEST_BYTES], found[-_DIGEST_BYTES:]
    return data if digest_of(data).encode() == digest else None


def _name(what: str, depends_on: bytes) -> str:
    return f"{what}-{digest_of(depends_on)}"


@functools.cache
def cache_folder() -> str | None:
    """The folder for what is kept: the first of $NUMBA_CACHE_DIR, $XDG_CACHE_HOME, ~/.cache and the folder of
    temporaries that can be written, and by nobody else; None if none can."""
    candidates = [
        os.environ.get("NUMBA_CACHE_DIR"),
        os.environ.get("XDG_CACHE_HOME"),
        os.path.join(os.path.expanduser("~"), ".cache"),
        os.path.join(tempfile.gettempdir(), f"packprep-{os.geteuid()}"),
    ]
    try:
        name = os.path.join("packprep", "kernels-" + _sources_digest()[:16])
    except OSError:  # a package that is no folder
        return None
    for candidate in dict.fromkeys(candidates):
        if not candidate or not os.path.isabs(candidate):
            continue
        try:
            folder = os.path.realpath(os.path.join(candidate, name))
            is_new = not os.path.isdir(folder)
            if reason := _make_own(folder):
                _say(
                    f"nothing is kept in {candidate} or read from there: {reason}, whose code would run; set NUMBA_CACHE_DIR "
                    "to a folder that only you can write"
                )
                continue
            os.utime(folder)  # when it was used last
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError:
            continue
        if is_new:
            _remove_old_folders(os.path.dirname(folder))
        return folder
    _say("kernels are compiled anew by every command; set NUMBA_CACHE_DIR to a folder that you can write, and only you")
    return None


def _sources(folder: str) -> Iterator[str]:
    """The paths of the Python files in a folder, at any depth."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _sources(entry.path)
            elif entry.name.endswith(".py"):
                yield entry.path


def _sources_digest() -> str:
    root = os.path.dirname(__file__)
    names = sorted(os.path.relpath(path, root) for path in _sources(root))
    return digest_of_buffers(part for name in names for part in (name.encode(), read_file(os.path.join(root, name))))


def _make_own(folder: str) -> str:
    """Make a folder, and those above it, where absent; why others could write or replace it, "" where they cannot.

    folder: its real path. Who owns the root folder owns Python, too: user 0, or another where a container maps users. In a
    folder with the sticky bit nobody replaces what is another's.
    """
    trusted = {0, os.geteuid(), os.stat("/").st_uid}
    for path in itertools.accumulate(Path(folder).parts, os.path.join):
        if not os.path.lexists(path):
            with contextlib.suppress(FileExistsError):  # another process made it meanwhile
                os.mkdir(path, 0o700)
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(path)
        if status.st_uid not in trusted:
            return f"{path} belongs to user {status.st_uid}"
        if status.st_mode & _OTHERS_WRITE and (path == folder or not status.st_mode & stat.S_ISVTX):
            return f"{path} can be written by others"
    return ""


def _remove_old_folders(parent: str) -> None:
    """Remove the folders of other sources that nobody used for long, but for the last KEPT_FOLDERS: each holds megabytes.

    One that is used again while it is removed is put back; what cannot be removed stays. A name with a dot is what was left
    by a process that was killed here.
    """
    used: list[tuple[float, str]] = []
    left: list[str] = []
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(".kernels-"):
                left.append(entry.path)
            elif entry.name.startswith("kernels-") and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    used.append((entry.stat(follow_symlinks=False).st_mtime, entry.path))
    oldest = time.time() - KEPT_DAYS * 86400
    for folder in left + [path for _, path in sorted(used, reverse=True)[KEPT_FOLDERS:]]:
        aside = os.path.join(parent, f".{os.path.basename(folder).lstrip('.')}-{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            if os.stat(folder).st_mtime >= oldest:
                continue
            os.rename(folder, aside)
            if os.stat(aside).st_mtime >= oldest:
                os.rename(aside, folder)
            else:
                shutil.rmtree(aside, ignore_errors=True)


def _say(message: str) -> None:
    """One line on stderr, of a command and not of each of its workers."""
    import multiprocessing  # which commands that have nothing to say may do without

    if multiprocessing.parent_process() is None:
        print(f"packprep: {message}", file=sys.stderr, flush=True)
