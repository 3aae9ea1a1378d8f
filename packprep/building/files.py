"""Files of a local output folder that appear whole or not at all.

A temporary is `.NAME.HOST-PID-RANDOM.tmp` beside its file: written, flushed to disk, renamed; then the folder is flushed.
"""

import contextlib
import errno
import fcntl
import glob
import os
import re
import secrets
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from packprep.digests import digest_of_buffers, digest_of_file, new_digest
from packprep.errors import BuildError

TEMPORARIES = ".*.tmp"
ATTEMPTS = 100
"""How often a file is written whose temporary others remove: each has to publish in that very moment."""
PIECE_BYTES = 4 << 20
"""From what size on a buffer is written directly, and how much of others before the system is told to store it."""
BLOCK_BYTES = 4096
"""What memory and file are cut into for a disk that takes bytes directly; no common disk has larger blocks."""
_HINTS = {
    errno.ENOSPC: "the disk is full: make room",
    errno.EDQUOT: "the quota is used up: make room",
    errno.EFBIG: "the file would be larger than this process may write (ulimit -f): raise the limit",
    errno.EROFS: "the folder cannot be written: choose another --out",
    errno.EACCES: "the folder cannot be written: choose another --out, or its permissions",
    errno.EIO: "the disk reports an error: see to it",
}


def write_error(path: str | Path, error: OSError) -> BuildError:
    """The BuildError of a failed write: what, where, what to do."""
    hint = _HINTS.get(error.errno or 0, "see to it")
    return BuildError(
        f"{path}: {error.strerror or error}; {hint}, and run the same command again: what is committed stays"
    )


def _owner(process: int) -> str:
    """The part of a temporary's name that says whose it is."""
    host = re.sub(r"[^A-Za-z0-9]", "-", socket.gethostname()) or "host"
    return f".{host}-{process}-"


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}{_owner(os.getpid())}{secrets.token_hex(4)}.tmp")


def _write_temporary(path: Path, buffers: Iterable) -> Path:
    temporary = _temporary(path)
    try:
        _make_folder(path.parent)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            _write(descriptor, buffers)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise write_error(path, error) from error
    return temporary


def _write(descriptor: int, buffers: Iterable) -> None:
    """Write all bytes of the buffers to the end of a file: directly as far as that can be, the rest through the page cache.

    There, after every PIECE_BYTES, the system begins to store what is new and lets go of what is stored. So a disk works
    beside the copying, and a large file takes the memory of some pieces: fresh memory costs more than what is written to it,
    most of all where a virtual machine has to ask for it, and under a job's limit all of it counts.
    """
    kept = 0
    for buffer in buffers:
        view = memoryview(buffer)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        view = view[_write_directly(descriptor, view) :]
        while len(view):
            written = os.write(descriptor, view[:PIECE_BYTES])
            view, kept = view[written:], kept + written
            if kept >= PIECE_BYTES:
                kept = 0
                _leave_to_disk(descriptor)


def _write_directly(descriptor: int, view: memoryview) -> int:
    """Write as much of a large buffer as the disk takes out of it, without a copy in the page cache; how many bytes.

    The processor is free meanwhile, where a copy takes it 50 ms for each 100 MB. It needs a file system that can
    (O_DIRECT), and whole blocks: of memory, as mmap gives it, and of the file.
    """
    size = len(view) // BLOCK_BYTES * BLOCK_BYTES
    if size < PIECE_BYTES or not hasattr(os, "O_DIRECT") or os.fstat(descriptor).st_size % BLOCK_BYTES:
        return 0
    import numpy as np  # here, as a build's first steps do without

    if np.frombuffer(view, np.uint8).ctypes.data % BLOCK_BYTES:
        return 0
    flags, written = fcntl.fcntl(descriptor, fcntl.F_GETFL), 0
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        while written < size:
            written += os.write(descriptor, view[written:size])
    except OSError as error:
        if error.errno != errno.EINVAL:  # which says that it cannot
            raise
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return written


def _leave_to_disk(descriptor: int) -> None:
    """Have the system begin to store what is new of a file, and keep no copy in memory of what it has stored."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # it is advice
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing, each with its entry in the one above on disk."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    with contextlib.suppress(PermissionError):  # what may be written and not listed cannot be flushed
        _flush_folder(folder.parent)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folders_last(path: Path, top: Path) -> None:
    """Flush the folders from a file's own up to `top`, so that their entries survive a power cut too."""
    folder = path.parent
    while True:
        _flush_folder(folder)
        if folder == top or folder == folder.parent:
            return
        folder = folder.parent


def flush_output(out: Path) -> None:
    """Flush all folders of an output: what any process renamed into them or removed is so after a power cut too."""
    try:
        for kind in ("shards", "receipts", "rejects"):
            for folder in (*(out / kind).glob("*/"), out / kind):
                if folder.is_dir():
                    _flush_folder(folder)
        _flush_folder(out)
    except OSError as error:
        raise write_error(out, error) from error


def write_whole(path: Path, buffers: Sequence, top: Path) -> None:
    """Write a file, replacing one that stands; the file and the folders up to `top` are on disk when this returns.

    BuildError if it cannot be written, or if somebody else removed the temporary and left another file than this.
    """
    temporary = _write_temporary(path, buffers)
    try:
        os.rename(temporary, path)
        _make_folders_last(path, top)
    except FileNotFoundError:
        # another committer of the same file was faster and tidied up
        ours = digest_of_buffers(buffers)
        if not path.exists() or digest_of_file(path) != ours:
            raise BuildError(
                f"{path}: its temporary {temporary.name} was removed while this process wrote it; run the same command again"
            ) from None
        _make_folders_last(path, top)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise write_error(path, error) from error
    remove_temporaries(path.parent, path.name)


class Growing:
    """A file that is written piece by piece and appears whole: `append` what comes next, then `commit`; or `discard`.

    It holds no descriptor between two pieces, so that there may be many. BuildError where it cannot be written.
    """

    def __init__(self, path: Path):
        self.path, self.bytes = path, 0
        self._temporary: Path | None = None
        self._digest = new_digest()

    def append(self, buffer: Any) -> None:
        """The next bytes: of anything contiguous."""
        try:
            if self._temporary is None:
                _make_folder(self.path.parent)
                self._temporary = _temporary(self.path)
                flags = os.O_CREAT | os.O_EXCL
            else:
                flags = os.O_APPEND
            descriptor = os.open(self._temporary, os.O_WRONLY | os.O_CLOEXEC | flags, 0o644)
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
        """Make it appear, in place of one that stands; it and its folder's entry are on disk then. {file, bytes, digest}."""
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
        """Leave nothing behind of a file that was not committed."""
        if self._temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)


def write_first(path: Path, data: bytes) -> bool:
    """Write a file unless there is one already, whole or not at all; whether it was this process that wrote it.

    The file is on disk when this returns, also one that another process wrote.
    """
    first = not path.exists() and _write_if_missing(path, data)
    try:
        _flush_folder(path.parent)
    except OSError as error:
        raise write_error(path, error) from error
    return first


def _write_if_missing(path: Path, data: bytes) -> bool:
    attempts = 0
    while True:
        temporary = _write_temporary(path, [data])
        try:
            return _give_name(temporary, path)
        except FileNotFoundError as error:  # another process that publishes too tidied it up, and has not written yet
            attempts += 1
            if attempts == ATTEMPTS:
                raise write_error(path, error) from error
        except OSError as error:
            raise write_error(path, error) from error
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _give_name(temporary: Path, path: Path) -> bool:
    """Give a temporary's file its name, unless that is taken; whether it got it."""
    try:
        os.link(temporary, path)
        return True
    except OSError as error:
        if path.exists():  # taken; or whoever took it has also removed the temporary
            return False
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
    os.rename(temporary, path)  # a file system without hard links
    return True


def remove_temporaries(folder: Path, name: str | None = None, of_process: int | None = None) -> None:
    """Remove the temporaries in a folder: all, or those of one file, or those of one process of this host."""
    pattern = f".{glob.escape(name)}.*.tmp" if name else TEMPORARIES
    for temporary in folder.glob(pattern):
        if of_process is None or _owner(of_process) in temporary.name:
            with contextlib.suppress(OSError):
                temporary.unlink()


def remove_all_temporaries(out: Path, of_process: int | None = None) -> None:
    """Remove the temporaries of a whole output: its top folder and those of shards, receipts and rejects."""
    remove_temporaries(out, of_process=of_process)
    for kind in ("shards", "receipts", "rejects"):
        for folder in (out / kind).glob("*/"):
            remove_temporaries(folder, of_process=of_process)
