"""What one run of packprep keeps for the next, because it takes long to make: compiled kernels,
facts of tokenizers.

It is code that will run, or decides which ids a text has. So the folder is one that nobody else but
root can write or replace, a file of another user's is not read, and neither is one that is not as
it was written, as after a power cut, or that other code
made: it is made anew.
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


def keep(what: str, depends_on: bytes, code: str, data: bytes) -> bool:
    """Keep bytes for `kept`, in place of what was kept of the same; whether they could be written.

    what: a word for its name. depends_on: all that it depends on, but for the code that made it;
    code: that code's digest.
    """
    folder = cache_folders().own
    if folder is None:
        return False
    path = os.path.join(folder, f"{what}-{digest_of(depends_on)}")
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
            f"not everything is kept in {folder}: {error.strerror}; what is not is made anew by"
            " every command",
            once=True,
        )
        return False
    return True


def kept(what: str, depends_on: bytes, code: str) -> bytes | None:
    """What was kept; None where there is nothing, not what was written, what others can write, or
    what other code made."""
    for folder in cache_folders().to_read:
        try:
            with open_file(os.path.join(folder, f"{what}-{digest_of(depends_on)}")) as file:
                status = os.fstat(file.fileno())
                if status.st_uid not in _trusted() or status.st_mode & _OTHERS_WRITE:
                    continue
                found = file.readall()
        except OSError:
            continue
        data, digest = found[:-_DIGEST_BYTES], found[-_DIGEST_BYTES:]
        if digest_of_buffers([code.encode(), data]).encode() == digest:
            return data
    return None


def is_kept(what: str) -> bool:
    """Whether there is anything under this word, or a pattern of such, for whatever it may depend
    on."""
    return any(
        glob.glob(os.path.join(glob.escape(folder), f"{what}-*"))
        for folder in cache_folders().to_read
    )


class CacheFolders(NamedTuple):
    """Where what is kept lies: in all folders that are read, of which this process can write the
    last or none."""

    to_read: tuple[str, ...]
    own: str | None  # which it can write


@functools.cache
def cache_folders() -> CacheFolders:
    """The first of $NUMBA_CACHE_DIR, $XDG_CACHE_HOME, ~/.cache and the folder of temporaries that
    can be written, and by nobody else but root; before it those in which something is kept that
    cannot be written, as in an image.
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
        folder = os.path.realpath(os.path.join(candidate, "packprep"))
        try:
            if reason := _make_own(folder):
                say(
                    f"nothing is kept in {candidate} or read from there: {reason}, whose code would"
                    " run; set NUMBA_CACHE_DIR to a folder that only you can write",
                    once=True,
                )
                continue
        except OSError:
            continue
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError:
            read_only.append(folder)
            continue
        return CacheFolders((*read_only, folder), folder)
    if not read_only:
        say(
            f"kernels are compiled anew by every command, for none of {', '.join(tried)} can be"
            " written; set NUMBA_CACHE_DIR to a folder that you can write, and only you",
            once=True,
        )
    return CacheFolders(tuple(read_only), None)


@functools.cache
def code_digest(path: str) -> str:
    """The digest of a Python file and of the files of packprep that it names, they name, and so on:
    of all that it may run.

    A module is named wherever its dotted name stands, or its own name after `from … import`.
    OSError for what is no file.
    """
    files, waiting = {path}, [path]
    while waiting:
        more = _read(waiting.pop())[1] - files
        files |= more
        waiting += more
    return digest_of("".join(sorted(_read(file)[0] for file in files)).encode())


@functools.cache
def _read(path: str) -> tuple[str, frozenset[str]]:
    """(the digest of a Python file, the files of packprep that it names)."""
    data, root = read_file(path), os.path.dirname(__file__)
    modules: set[bytes] = set()
    for base, names in _NAMED.findall(data):
        modules.update([base, *(b"%s.%s" % (base, name) for name in re.findall(rb"\w+", names))])
    places = [root + os.fsdecode(module).replace(".", os.sep) for module in modules if module]
    files = (
        file for place in places for file in (place + ".py", os.path.join(place, "__init__.py"))
    )
    return digest_of(data), frozenset(filter(os.path.isfile, files))


def _trusted() -> set[int]:
    """Users who may have written what is read: this one, and who owns the root folder, and so
    Python, too: user 0, or another where a container maps users."""
    return {0, os.geteuid(), os.stat("/").st_uid}


def _make_own(folder: str) -> str:
    """Make a folder, and those above it, where absent; why others could write or replace it, ""
    where they cannot.

    folder: its real path. In a folder with the sticky bit nobody replaces what is another's.
    """
    for path in itertools.accumulate(Path(folder).parts, os.path.join):
        if not os.path.lexists(path):
            with contextlib.suppress(FileExistsError):  # another process made it meanwhile
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
    """A function that gives what it gave before, in another process too, where it would give the
    same again.

    kind: the type that it gives. depends_on: (its arguments) → all that it depends on; None: this
    is found out each time.
    """

    def with_memory(function: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> T:
            facts = depends_on(*arguments, **named)
            if facts is None:
                return function(*arguments, **named)
            what, key = (
                f"{function.__module__}.{function.__qualname__}",
                msgspec.msgpack.encode(facts),
            )
            code = code_digest(function.__code__.co_filename)
            data = kept(what, key, code)
            if data is not None:
                with contextlib.suppress(ValueError):  # of another type
                    return msgspec.msgpack.decode(data, type=kind)
            found = function(*arguments, **named)
            with contextlib.suppress(ValueError):  # half a character, which is no UTF-8
                keep(what, key, code, msgspec.msgpack.encode(found))
            return found

        return call

    return with_memory
