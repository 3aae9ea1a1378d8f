"""What all files of a dataset share: names, versions and canonical JSON, digests, and here the one
way in which they are opened.

It lies below the loader: here and in json_files the standard library is enough, in a trainer too;
digests needs xxhash.

Regular files alone are opened, without ever waiting: a FIFO in a file's place would wait for its
writer for ever, a terminal for its typist, and /dev/zero never ends.
"""

import errno
import os
import stat
from io import FileIO

_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""The begin of a few lines that stand for a file in a clone without Git LFS."""
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def _refuse_irregular(path: str | os.PathLike, opened: int | None = None) -> None:
    """OSError unless the path, or what was opened by it, is a regular file."""
    try:
        mode = os.stat(path if opened is None else opened).st_mode
    except ValueError as error:  # a name that no file can have
        raise OSError(errno.EINVAL, str(error), os.fspath(path)) from error
    if stat.S_ISREG(mode):
        return
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    raise OSError(number, f"it is {kind} and should be a regular file", os.fspath(path))


def open_file(path: str | os.PathLike) -> FileIO:
    """A regular file, to be read without a buffer; OSError if it is none.

    Symbolic links are followed: caches are made of them.
    """
    _refuse_irregular(path)  # before it is opened: opening a device may do something
    file = FileIO(path, "rb", opener=lambda path, flags: os.open(path, flags | _FLAGS))
    try:
        _refuse_irregular(path, file.fileno())
    except OSError:
        file.close()
        raise
    return file


def read_file(path: str | os.PathLike) -> bytes:
    """All bytes of a regular file; OSError as in `open_file`."""
    with open_file(path) as file:
        return file.readall()
