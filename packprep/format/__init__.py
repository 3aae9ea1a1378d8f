"""Name the files of a dataset, open them safely, and encode, decode and digest their contents.

The loader is built on this subpackage. This module and json_files need only the standard library,
tokenizer_json needs numpy, and digests needs xxhash.

Only regular files are opened, and opening never blocks. Opening a FIFO would wait for a writer,
reading a terminal would wait for its user, and reading /dev/zero would never end.
"""

import errno
import os
import stat
from io import FileIO

_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""The start of the text that replaces a large file in a clone without Git LFS."""
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def _refuse_irregular(path: str | os.PathLike, opened: int | None = None) -> None:
    """Check that a file is a regular file.

    Args:
        path: The path of the file.
        opened: The file descriptor to check instead of the path, if the file is already open.

    Raises:
        OSError: If the file is not a regular file.
    """
    try:
        mode = os.stat(path if opened is None else opened).st_mode
    # No file can have this name.
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), os.fspath(path)) from error
    if stat.S_ISREG(mode):
        return
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    raise OSError(number, f"it is {kind} and should be a regular file", os.fspath(path))


def open_file(path: str | os.PathLike) -> FileIO:
    """Open a regular file for reading without a buffer.

    Symbolic links are followed, because download caches consist of links.

    Raises:
        OSError: If the file cannot be opened or is not a regular file.
    """
    # Check the path before opening, because opening a device may have an effect.
    _refuse_irregular(path)
    file = FileIO(path, "rb", opener=lambda path, flags: os.open(path, flags | _FLAGS))
    try:
        _refuse_irregular(path, file.fileno())
    except OSError:
        file.close()
        raise
    return file


def read_file(path: str | os.PathLike) -> bytes:
    """Read all bytes of a regular file.

    Raises:
        OSError: If the file cannot be read or is not a regular file.
    """
    with open_file(path) as file:
        return file.readall()
