"""Cache values that take long to compute, such as compiled kernels and tokenizer facts.

The cache contains code that packprep runs, and facts that determine the token ids of texts.
Therefore only this user and root may write or replace the cache folder, and a file of another user
is never read. A file is rebuilt if it is damaged, for example by a power cut. It is also rebuilt if
another version of the code wrote it.
"""

import contextlib
import functools
import glob
import itertools
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from packprep.format import open_file, read_file
from packprep.format.digests import digest_of, digest_of_buffers
from packprep.messages import say

_DIGEST_BYTES = 32
_NAMED = re.compile(rb"packprep((?:\.\w+)*)(?: import (\([^)]*\)|[^\n]*))?")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def keep(kind: str, depends_on: bytes, code: str, data: bytes) -> bool:
    """Store bytes in the cache, where `kept` finds them. Return whether they could be written.

    Args:
        kind: A word for the file name.
        depends_on: Everything that the bytes depend on, except code.
        code: The digest of the code that computed the bytes.
        data: The bytes to store.
    """
    folder = cache_folders().own
    if folder is None:
        return False
    # Write under another name and rename, so that readers see the whole file or none.
    path = os.path.join(folder, f"{kind}-{digest_of(depends_on)}")
    temporary = os.path.join(
        folder, f".{os.path.basename(path)}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    )
    try:
        try:
            with open(
                os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
            ) as file:
                file.write(data + digest_of_buffers([code.encode(), data]).encode())
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
    except OSError as error:
        say(
            f"not everything can be cached in {folder}: {error.strerror}. Every command computes"
            " the rest again",
            once=True,
        )
        return False
    return True


def kept(kind: str, depends_on: bytes, code: str) -> bytes | None:
    """Return the bytes that `keep` stored, or None if they are missing or not trusted.

    Bytes are not trusted if they are damaged, if other users can write the file, or if another
    version of the code made them. The arguments are as in `keep`.
    """
    for folder in cache_folders().to_read:
        try:
            with open_file(os.path.join(folder, f"{kind}-{digest_of(depends_on)}")) as file:
                # Check the open file and not its path, because the path could be replaced before
                # the read.
                status = os.fstat(file.fileno())
                if status.st_uid not in _trusted() or status.st_mode & _OTHERS_WRITE:
                    continue
                stored_data = file.readall()
        except OSError:
            continue
        data, digest = stored_data[:-_DIGEST_BYTES], stored_data[-_DIGEST_BYTES:]
        if digest_of_buffers([code.encode(), data]).encode() == digest:
            return data
    return None


def is_kept(kind: str) -> bool:
    """Return whether `keep` stored bytes under the word `kind`, which may be a glob pattern."""
    return any(
        glob.glob(os.path.join(glob.escape(folder), f"{kind}-*"))
        for folder in cache_folders().to_read
    )


class CacheFolders(NamedTuple):
    """The folders of the cache. All of them are read, but only `own` is written."""

    to_read: tuple[str, ...]
    own: str | None  # the last of `to_read` if it is writable, otherwise None


@functools.cache
def cache_folders() -> CacheFolders:
    """Return the folders of the cache.

    The candidates are $NUMBA_CACHE_DIR, $XDG_CACHE_HOME, ~/.cache and the folder of temporary
    files. The writable folder is the first candidate that only this user and root can write.
    Read-only candidates before it are read too, such as a cache in a container image.
    """
    candidates = [
        os.environ.get("NUMBA_CACHE_DIR"),
        os.environ.get("XDG_CACHE_HOME"),
        os.path.join(os.path.expanduser("~"), ".cache"),
        os.path.join(tempfile.gettempdir(), f"packprep-{os.geteuid()}"),
    ]
    tried, read_only = [], []
    for candidate in dict.fromkeys(candidates):
        if not candidate or not os.path.isabs(candidate):
            continue
        tried.append(candidate)
        # Resolve links first, so that the check covers the folder that is really used.
        folder = os.path.realpath(os.path.join(candidate, "packprep"))
        try:
            if reason := _make_own(folder):
                say(
                    f"the cache in {candidate} is not used, because its code would run: {reason}\n"
                    "hint: set NUMBA_CACHE_DIR to a folder that only you can write",
                    once=True,
                )
                continue
        except OSError:
            continue
        # Only writing shows whether a folder is writable, for example on a read-only file system.
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError:
            read_only.append(folder)
            continue
        return CacheFolders((*read_only, folder), folder)
    if not read_only:
        say(
            f"every command compiles its kernels again: none of {', '.join(tried)} can be"
            " written\n"
            "hint: set NUMBA_CACHE_DIR to a folder that only you can write",
            once=True,
        )
    return CacheFolders(tuple(read_only), None)


@functools.cache
def code_digest(path: str) -> str:
    """Return one digest of a Python file and all packprep files that it mentions, recursively.

    The digest covers all code that the Python file may run. A file mentions a module by the
    module's dotted name or, after `from … import`, by the last part of this name.

    Raises:
        OSError: If the file cannot be read.
    """
    files, waiting = {path}, [path]
    while waiting:
        new_files = _read(waiting.pop())[1] - files
        files |= new_files
        waiting += new_files
    return digest_of("".join(sorted(_read(file)[0] for file in files)).encode())


@functools.cache
def _read(path: str) -> tuple[str, frozenset[str]]:
    """Return a Python file's digest, and the paths of the packprep files that the file mentions."""
    data, root = read_file(path), os.path.dirname(__file__)
    modules: set[bytes] = set()
    for base, names in _NAMED.findall(data):
        modules.update([base, *(b"%s.%s" % (base, name) for name in re.findall(rb"\w+", names))])
    # An imported name may be a module or an attribute. Only modules have files.
    places = [root + os.fsdecode(module).replace(".", os.sep) for module in modules if module]
    files = (
        file for place in places for file in (place + ".py", os.path.join(place, "__init__.py"))
    )
    return digest_of(data), frozenset(filter(os.path.isfile, files))


def _trusted() -> set[int]:
    """Return the ids of the users that are trusted to write cached files.

    They are this user, user 0, and the owner of the root folder. The owner of the root folder
    controls Python too. It is user 0, or another id if a container maps users.
    """
    return {0, os.geteuid(), os.stat("/").st_uid}


def _make_own(folder: str) -> str:
    """Make a folder and its parents, and check that other users cannot write or replace the folder.

    Return "" if the check succeeds, otherwise a reason such as "/cache can be written by others".
    `folder` is a real path. Parents that everyone can write are accepted if they have the sticky
    bit, because users then cannot replace the files of other users.
    """
    for path in itertools.accumulate(Path(folder).parts, os.path.join):
        if not os.path.lexists(path):
            with contextlib.suppress(FileExistsError):  # Another process has just made it.
                os.mkdir(path, 0o700)
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(path)
        if status.st_uid not in _trusted():
            return f"{path} belongs to user {status.st_uid}"
        if status.st_mode & _OTHERS_WRITE and (path == folder or not status.st_mode & stat.S_ISVTX):
            return f"{path} can be written by others"
    return ""


T = TypeVar("T")


def remembered(
    kind: Any, depends_on: Callable[..., tuple | None]
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return a decorator that caches a function's results across processes.

    Args:
        kind: The type of the results.
        depends_on: Called with the function's arguments. It returns everything that the result
            depends on, or None if the result must not be cached.
    """

    def with_memory(function: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> T:
            facts = depends_on(*arguments, **named)
            if facts is None:
                return function(*arguments, **named)
            name, key = (
                f"{function.__module__}.{function.__qualname__}",
                msgspec.msgpack.encode(facts),
            )
            code = code_digest(function.__code__.co_filename)
            data = kept(name, key, code)
            if data is not None:
                with contextlib.suppress(ValueError):  # The data has another type.
                    return msgspec.msgpack.decode(data, type=kind)
            result = function(*arguments, **named)
            with contextlib.suppress(ValueError):  # A partial character is not valid UTF-8.
                keep(name, key, code, msgspec.msgpack.encode(result))
            return result

        return call

    return with_memory
