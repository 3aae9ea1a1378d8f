"""Write local files atomically and durably.

To write the file NAME, a temporary file `.NAME.HOST-PID-RANDOM.tmp` is written in the same folder,
flushed to disk and renamed to NAME. Then the folder is flushed to disk.
"""

import contextlib
import errno
import glob
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import xxhash

from packprep.errors import BuildError
from packprep.format import read_file
from packprep.format.digests import digest_of_buffers, digest_of_file
from packprep.format.json_files import (
    FIRST_SEEN_NAME,
    MANIFEST_NAME,
    PLAN_NAME,
    REMOVED_NAME,
    TOKENIZER_NAME,
)

T = TypeVar("T")

TEMPORARIES = ".*.tmp"
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
ATTEMPTS = 100
"""Maximum number of attempts to create a file while other processes remove its temporary files.

Another process only removes such a temporary file when it publishes the same file itself.
"""
PIECE_BYTES = 4 << 20
"""Bytes written to a file before the system is asked to store them on disk."""
_KINDS = ("shards", "receipts", "rejects")
_NAMES = {
    MANIFEST_NAME,
    PLAN_NAME,
    TOKENIZER_NAME,
    REMOVED_NAME,
    FIRST_SEEN_NAME,
    *_KINDS,
    "lost+found",
}
_HINTS = {
    errno.ENOSPC: "the disk is full\nhint: free some space",
    errno.EDQUOT: "the quota is used up\nhint: free some space",
    errno.EFBIG: (
        "the file would be larger than this process may write (ulimit -f)\nhint: raise the limit"
    ),
    errno.EROFS: "the folder cannot be written\nhint: choose another --out",
    errno.EACCES: (
        "the folder cannot be written\nhint: choose another --out, or change its permissions"
    ),
    errno.EIO: "the disk reports an error\nhint: check the disk",
}


def write_error(path: str | Path, error: OSError) -> BuildError:
    """Return a BuildError for a failed write, with the path, the cause and the remedy."""
    hint = _HINTS.get(error.errno or 0, "the write failed\nhint: fix the cause")
    return BuildError(
        f"{path}: {error.strerror or error}; {hint}; then run the same command again to resume"
    )


@contextlib.contextmanager
def _reported(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise write_error(path, error) from error


def _owner(process: int) -> str:
    """Return `.HOST-PID-` for this host and a process ID, as in names of temporary files."""
    host = re.sub(r"[^A-Za-z0-9]", "-", socket.gethostname()) or "host"
    return f".{host}-{process}-"


def write_temporary(path: Path, buffers: Iterable) -> Path:
    """Write buffers to a temporary file for `path`, flush it to disk and return its path.

    If the write fails, the temporary file is removed.
    """
    temporary = path.with_name(f".{path.name}{_owner(os.getpid())}{secrets.token_hex(4)}.tmp")
    _make_folder(path.parent)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            _write(descriptor, buffers)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return temporary


def _write(descriptor: int, buffers: Iterable) -> None:
    """Write all bytes of the buffers to the end of a file.

    After every PIECE_BYTES, the system is asked to write the file's new pages to disk, and to drop
    written pages from its cache. The disk then works in parallel with the copying, and a large
    file occupies little memory. This matters because cached pages count toward a job's memory
    limit. Allocating new pages also costs more time than writing them to disk, especially on
    virtual machines.
    """
    unsynced_bytes = 0
    for buffer in buffers:
        view = memoryview(buffer)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        while len(view):
            written = os.write(descriptor, view[:PIECE_BYTES])
            view, unsynced_bytes = view[written:], unsynced_bytes + written
            if unsynced_bytes >= PIECE_BYTES:
                unsynced_bytes = 0
                _leave_to_disk(descriptor)


def _leave_to_disk(descriptor: int) -> None:
    """Ask the system to write a file's new pages to disk, and to drop written pages from cache."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # The call is only advice to the system.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, and flush the entry of each new folder to disk."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    # A folder with write permission but without read permission cannot be flushed.
    with contextlib.suppress(PermissionError):
        _flush_folder(folder.parent)


def _flush_folder(folder: Path, top: Path | None = None) -> None:
    """Flush a folder to disk, so that its entries survive a power failure.

    If `top` is given, the folder's parents up to `top` are also flushed.
    """
    while True:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if top is None or folder in (top, folder.parent):
            return
        folder = folder.parent


class Growing:
    """A file that is written in chunks and appears under its name only when it is complete.

    Call `append` for each chunk, then `commit` or `discard`. No file descriptor stays open between
    chunks, so a process may write thousands of these files at once.

    Raises:
        BuildError: From `append` and `commit`, if the file cannot be written.
    """

    def __init__(self, path: Path):
        self.path, self.bytes = path, 0
        self._temporary: Path | None = None
        self._digest = xxhash.xxh3_128()

    def append(self, buffer: Any) -> None:
        """Append the bytes of a contiguous buffer, such as an array, to the temporary file."""
        try:
            if self._temporary is None:
                self._temporary = write_temporary(self.path, [])
            descriptor = os.open(self._temporary, os.O_WRONLY | os.O_CLOEXEC | os.O_APPEND)
            try:
                _write(descriptor, [buffer])
            finally:
                os.close(descriptor)
        except OSError as error:
            self.discard()
            raise write_error(self.path, error) from error
        self._digest.update(buffer)
        self.bytes += memoryview(buffer).nbytes

    def commit(self) -> dict[str, Any]:
        """Rename the temporary file to `path`. An existing file is replaced.

        The file and its folder entry are on disk when this method returns.

        Returns:
            The file's record: `file` (name), `bytes` and `digest` (xxh3-128, hexadecimal).
        """
        # A file without chunks must exist too, with no bytes.
        self.append(b"")
        assert self._temporary is not None
        try:
            descriptor = os.open(self._temporary, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(self._temporary, self.path)
            _flush_folder(self.path.parent)
        except OSError as error:
            self.discard()
            raise write_error(self.path, error) from error
        self._temporary = None
        return {"file": self.path.name, "bytes": self.bytes, "digest": self._digest.hexdigest()}

    def discard(self) -> None:
        """Remove the temporary file, unless `commit` was called."""
        if self._temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)


def create_file(path: Path, data: bytes) -> bool:
    """Write a file atomically unless it exists, and return whether this call wrote it.

    When this function returns True, the bytes are on disk, but the folder is not flushed yet.

    Raises:
        OSError: If the file cannot be written.
    """
    for _ in range(ATTEMPTS):
        temporary = write_temporary(path, [data])
        try:
            os.link(temporary, path)
            return True
        except OSError as error:
            # Another process created the file, and perhaps also removed `temporary`.
            if path.exists():
                return False
            if error.errno in _NO_LINKS:
                with contextlib.suppress(FileNotFoundError):
                    os.rename(temporary, path)
                    return True
            # ENOENT means that another process published the file and removed `temporary`.
            elif error.errno != errno.ENOENT:
                raise
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def remove_temporaries(
    folder: Path, name: str | None = None, of_process: int | None = None
) -> None:
    """Remove temporary files of unfinished writes from a folder.

    Args:
        folder: Folder to search. Its subfolders are not searched.
        name: Remove only temporary files for the file with this name. With None, remove the
            temporary files for all files.
        of_process: Remove only temporary files of the process with this ID on this host. With None,
            remove the temporary files of all processes.
    """
    pattern = f".{glob.escape(name)}.*.tmp" if name else TEMPORARIES
    for temporary in folder.glob(pattern):
        if of_process is None or _owner(of_process) in temporary.name:
            with contextlib.suppress(OSError):
                temporary.unlink()


@dataclass(frozen=True)
class LocalFolder:
    """A folder on a local file system.

    Raises:
        BuildError: If a file cannot be written. Also if another process removed the temporary file
            before it was renamed, and the file with the final name does not have the same bytes.
    """

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def location(self) -> Path:
        return self.path

    def reach(self) -> None:
        return  # Each read or write reports its errors with the file's name.

    def path_of(self, name: str) -> str:
        return str(self.path / name)

    def read(self, name: str) -> bytes:
        return read_file(self.path / name)

    def size(self, name: str) -> int | None:
        try:
            return os.path.getsize(self.path / name)
        except OSError:
            return None

    def exists(self, name: str) -> bool:
        return (self.path / name).exists()

    def others(self) -> Sequence[str]:
        try:
            names = sorted(os.listdir(self.path))
        except OSError:
            return []  # The folder is missing or unreadable. A write reports this.
        return [name for name in names if name not in _NAMES and not name.startswith(".")]

    def write(self, name: str, buffers: Sequence) -> None:
        path = self.path / name
        with _reported(path):
            temporary = write_temporary(path, buffers)
            try:
                os.rename(temporary, path)
            except FileNotFoundError:
                # Another process published the same file first and removed `temporary`.
                if not path.exists() or digest_of_file(path) != digest_of_buffers(buffers):
                    raise BuildError(
                        f"{path}: its temporary file {temporary.name} was removed while this"
                        " process wrote it\n"
                        "hint: run the same command again"
                    ) from None
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            _flush_folder(path.parent, self.path)
        # A process that was killed may have left temporary files for this file.
        remove_temporaries(path.parent, path.name)

    def create(self, name: str, data: bytes) -> bool:
        path = self.path / name
        with _reported(path):
            is_created = not path.exists() and create_file(path, data)
            # Flush also if another process wrote the file.
            _flush_folder(path.parent, self.path)
        return is_created

    def link(self, name: str, folder: "LocalFolder") -> bool:
        """Create a file `name` in this folder as a hard link to the file `name` in `folder`.

        Returns:
            True if the link was created. False if this folder already has a file of this name, or
            if the system refuses the link, for example across file systems.
        """
        path = self.path / name
        with _reported(path):
            _make_folder(path.parent)
            try:
                os.link(os.path.realpath(folder.path / name), path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno in (*_NO_LINKS, errno.EXDEV, errno.EACCES):
                    return False
                raise
        return True

    def remove(self, name: str) -> None:
        with _reported(self.path / name):
            (self.path / name).unlink(missing_ok=True)

    def free_bytes(self) -> int | None:
        absolute_path = Path(os.path.abspath(self.path))
        # A write reports a folder that cannot be read.
        with contextlib.suppress(OSError):
            return shutil.disk_usage(
                next(
                    folder for folder in (absolute_path, *absolute_path.parents) if folder.exists()
                )
            ).free
        return None

    def flush(self) -> None:
        with _reported(self.path):
            for folder in (*self._folders(), *map(self.path.joinpath, _KINDS), self.path):
                if folder.is_dir():
                    _flush_folder(folder)

    def remove_temporaries(self, of_process: int | None = None) -> None:
        for folder in (self.path, *self._folders()):
            remove_temporaries(folder, of_process=of_process)

    def each(self, do: Callable[[Self, int], T], shards: Sequence[int]) -> Iterator[T]:
        return (do(self, shard) for shard in shards)

    def _folders(self) -> Iterator[Path]:
        """Yield the subfolders of `shards`, `receipts` and `rejects`, such as `shards/000`."""
        return (folder for kind in _KINDS for folder in (self.path / kind).glob("*/"))
