"""What a build writes into and all others read from: a local folder, or a folder on object storage.

    build, status, publication ─► Output ─┬─ LocalOutput: files.py's temporaries, flushes and renames
    verification, inspection ─► Nearby ───┘─ RemoteOutput: storage.py's whole objects

Names are those of the format (`plan.json`, `shards/000/000000.safetensors`). A file or object appears whole or not at all in
both; which of them make a shard, its receipt alone says.
"""

import errno
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from packprep.building import files
from packprep.dataset.json_files import FIRST_SEEN_NAME, MANIFEST_NAME, PLAN_NAME, TOKENIZER_NAME
from packprep.dataset.opening import read_file
from packprep.errors import BuildError, PackprepError
from packprep.storage import Remote, expanded, is_url

AT_ONCE = 16
"""Requests that are under way at the same time where many objects are read."""
_CHUNK = 256
_NAMES = {MANIFEST_NAME, PLAN_NAME, TOKENIZER_NAME, FIRST_SEEN_NAME, "receipts", "rejects", "shards", "lost+found"}
_BLOCK_BYTES = 16 << 20

T = TypeVar("T")


class Output(Protocol):
    """An output folder. Its text is the folder's path or URL; it may be pickled and forked."""

    @property
    def location(self) -> Path | str:
        """The path of a local folder; the URL of another."""

    def reach(self) -> None:
        """Nothing, or StorageError where no such folder can be: there is no such bucket, or it may not be looked at."""

    def place(self, name: str) -> str:
        """A file's whole path or URL, for messages."""

    def read(self, name: str) -> bytes:
        """All bytes of a file; FileNotFoundError if there is none, another OSError or StorageError if it cannot be read."""

    def size(self, name: str) -> int | None:
        """Its bytes; None if there is none."""

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""

    def others(self) -> list[str]:
        """Names in the folder, as far as it can be listed at once, that no build writes."""

    def has_folder(self, name: str) -> bool:
        """Whether there is such a folder."""

    def write_whole(self, name: str, buffers: Sequence) -> None:
        """Write a file, replacing one that stands; it is safe when this returns. BuildError or StorageError if it cannot be."""

    def write_first(self, name: str, data: bytes) -> bool:
        """Write a file unless there is one already; whether it was this process that wrote it."""

    def remove(self, name: str) -> None:
        """Remove a file, if there is one."""

    def flush(self) -> None:
        """Make safe what any process has written or removed, also one that was killed right after."""

    def remove_temporaries(self, of_process: int | None = None) -> None:
        """Remove what unfinished writes left behind: of all, or of one process of this host."""

    def each(self, do: Callable[["Output", int], T], shards: Sequence[int]) -> Iterator[T]:
        """`do(output, shard)` of many shards, in order; do reads what stands here, and nothing else."""


def output_of(out: "str | os.PathLike | Output") -> Output:
    """The Output that a path or a URL names; one that is given is given back."""
    if isinstance(out, str | os.PathLike):
        place = expanded(os.fspath(out))
        return RemoteOutput(Remote(place)) if is_url(place) else LocalOutput(Path(place))
    return out


@dataclass(frozen=True)
class LocalOutput:
    """A folder of a file system."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def location(self) -> Path:
        return self.path

    def reach(self) -> None:
        return  # what cannot be read or made says so itself

    def place(self, name: str) -> str:
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

    def others(self) -> list[str]:
        try:
            names = sorted(os.listdir(self.path))
        except OSError:
            return []  # there is none, or it cannot be read: what is written there says so
        return [name for name in names if name not in _NAMES and not name.startswith(".")]

    def has_folder(self, name: str) -> bool:
        return (self.path / name).exists()

    def write_whole(self, name: str, buffers: Sequence) -> None:
        files.write_whole(self.path / name, buffers, self.path)

    def write_first(self, name: str, data: bytes) -> bool:
        return files.write_first(self.path / name, data)

    def remove(self, name: str) -> None:
        try:
            (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise files.write_error(self.path / name, error) from error

    def flush(self) -> None:
        files.flush_output(self.path)

    def remove_temporaries(self, of_process: int | None = None) -> None:
        files.remove_all_temporaries(self.path, of_process)

    def each(self, do: Callable[[Output, int], T], shards: Sequence[int]) -> Iterator[T]:
        return (do(self, shard) for shard in shards)


class RemoteOutput:
    """A folder on object storage. An object is written whole or not at all by the store itself, and is safe then."""

    def __init__(self, remote: Remote):
        self.remote = remote

    def __str__(self) -> str:
        return self.remote.url

    @property
    def location(self) -> str:
        return self.remote.url

    def reach(self) -> None:
        self.remote.list(MANIFEST_NAME)  # a folder of that name is empty, so that little is listed

    def place(self, name: str) -> str:
        return f"{self.remote.url}/{name}"

    def read(self, name: str) -> bytes:
        return self.remote.read(name)

    def size(self, name: str) -> int | None:
        return self.remote.size(name)

    def exists(self, name: str) -> bool:
        return self.size(name) is not None

    def others(self) -> list[str]:
        return []  # a bucket may hold millions of objects below it

    def has_folder(self, name: str) -> bool:
        return bool(self.remote.list(name))

    def write_whole(self, name: str, buffers: Sequence) -> None:
        self.remote.write(name, buffers)

    def write_first(self, name: str, data: bytes) -> bool:
        return self.remote.write_new(name, data)

    def remove(self, name: str) -> None:
        if self.exists(name):  # who removes an object that is not there may leave the marker of a folder
            self.remote.remove(name)

    def flush(self) -> None:
        return  # an object that was written is safe

    def remove_temporaries(self, of_process: int | None = None) -> None:
        return  # there are none: what was not uploaded to its end is no object

    def each(self, do: Callable[[Output, int], T], shards: Sequence[int]) -> Iterator[T]:
        """Several requests at once, and none for what a listing does not have."""
        listed = _Listed(self.remote)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for begin in range(0, len(shards), _CHUNK):
                yield from pool.map(partial(do, listed), shards[begin : begin + _CHUNK])


class _Listed(RemoteOutput):
    """The same as it was when it was first asked: one listing for each folder, which holds a thousand shards."""

    def __init__(self, remote: Remote):
        super().__init__(remote)
        self._folders: dict[str, dict[str, int]] = {}
        self._lock = threading.Lock()

    def size(self, name: str) -> int | None:
        folder = name.rpartition("/")[0]
        with self._lock:
            if folder not in self._folders:
                self._folders[folder] = dict(self.remote.list(folder))
        return self._folders[folder].get(name)

    def read(self, name: str) -> bytes:
        if self.size(name) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.place(name))
        return super().read(name)


@dataclass(frozen=True)
class Nearby:
    """A folder of this machine in which an output's files lie at their names: the output's own, or one of copies."""

    out: Output
    folder: Path

    @property
    def holds_copies(self) -> bool:
        """Whether files lie here only once they were brought."""
        return self.folder != self.out.location

    def bring(self, *names: str) -> None:
        """Have these files here, as far as there are such."""
        for name in names if self.holds_copies else ():
            size = self.out.size(name)
            if size is not None:
                self._copy(name, size)

    def _copy(self, name: str, size: int) -> None:
        assert isinstance(self.out, RemoteOutput)
        path = self.folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                for begin in range(0, size, _BLOCK_BYTES):
                    file.write(self.out.remote.read(name, begin, min(begin + _BLOCK_BYTES, size)))
        except FileNotFoundError:
            path.unlink(missing_ok=True)  # removed since
        except OSError as error:
            raise BuildError(
                f"{path}: {error.strerror}; {self.out.place(name)} is fetched there, a shard at a time for each worker: "
                "set TMPDIR to a folder with room"
            ) from error

    @contextmanager
    def brought(self, *names: str) -> Iterator[None]:
        """Have these files here while this lasts."""
        try:
            self.bring(*names)
            yield
        finally:
            for name in names if self.holds_copies else ():
                (self.folder / name).unlink(missing_ok=True)

    def named(self, message: str) -> str:
        """A message about files here, as one about the output."""
        return message.replace(str(self.folder), str(self.out))


@contextmanager
def nearby(out: Output) -> Iterator[Nearby]:
    """The files of an output on this machine while this lasts. PackprepErrors that leave here name the output's files."""
    if isinstance(out, LocalOutput):
        yield Nearby(out, out.path)
        return
    out.reach()
    with tempfile.TemporaryDirectory(prefix="packprep-") as name:
        here = Nearby(out, Path(name))
        try:
            yield here
        except PackprepError as error:
            error.args = (here.named(str(error)),)
            raise
