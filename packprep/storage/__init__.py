"""Folders of inputs and outputs, local or at a URL.

    building, verification, inspection, exporting ─► Folder ─┬─ LocalFolder: temporaries, flushes and renames
    trainers at a URL, inputs at URLs ───────────────────────┴─ Remote: whole objects, listed, read in ranges, retried

Names are those of the format (`plan.json`, `shards/000/000000.safetensors`). A file or object
appears whole or not at all in both; which of them make a shard, its receipt alone says.

Credentials, regions and endpoints come from the environment alone, never from a recipe or a URL:
one that holds a secret is refused. A URL is taken as it is written: nothing in it is
percent-decoded.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from packprep.errors import BuildError, PackprepError, RecipeError
from packprep.storage.local import LocalFolder
from packprep.storage.remote import Remote, expanded, is_url, locate

__all__ = [
    "Folder",
    "LocalCopy",
    "LocalFolder",
    "Remote",
    "expanded",
    "folder_at",
    "in_int64",
    "is_url",
    "local_copy",
    "locate",
]

T = TypeVar("T")

_BLOCK_BYTES = 16 << 20


class Folder(Protocol):
    """A folder of files. Its text is its path or URL; it may be pickled and forked."""

    @property
    def location(self) -> Path | str:
        """The path of a local folder; the URL of another."""

    def reach(self) -> None:
        """Nothing, or StorageError where no such folder can be: there is no such bucket, or it may
        not be looked at."""

    def path_of(self, name: str) -> str:
        """A file's whole path or URL, for messages."""

    def read(self, name: str) -> bytes:
        """All bytes of a file; FileNotFoundError if there is none, another OSError or StorageError
        if it cannot be read."""

    def size(self, name: str) -> int | None:
        """Its bytes; None if there is none."""

    def exists(self, name: str) -> bool:
        """Whether there is such a file or folder."""

    def others(self) -> Sequence[str]:
        """Names in the folder, as far as it can be listed at once, that no build writes."""

    def write(self, name: str, buffers: Sequence) -> None:
        """Write a file, replacing one that stands; it is safe when this returns. BuildError or
        StorageError if it cannot be."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a file unless there is one already; whether it was this call that wrote it."""

    def remove(self, name: str) -> None:
        """Remove a file, if there is one."""

    def free_bytes(self) -> int | None:
        """The bytes for which there is room; None where nobody tells, as of a store."""

    def flush(self) -> None:
        """Make safe what any process has written or removed, also one that was killed right
        after."""

    def remove_temporaries(self, of_process: int | None = None) -> None:
        """Remove what unfinished writes left behind: of all, or of one process of this host."""

    def each(self, do: Callable[["Folder", int], T], shards: Sequence[int]) -> Iterator[T]:
        """`do(folder, shard)` of many shards, in order; do reads what stands here, and nothing
        else."""


def folder_at(place: str | os.PathLike | Folder) -> Folder:
    """The Folder that a path or a URL names; one that is given is given back."""
    if isinstance(place, str | os.PathLike):
        path = expanded(os.fspath(place))
        return Remote(path) if is_url(path) else LocalFolder(Path(path))
    return place


@dataclass(frozen=True)
class LocalCopy:
    """A folder of this machine in which an output's files lie at their names: the output's own, or
    one of copies."""

    out: Folder
    folder: Path

    @property
    def is_copy(self) -> bool:
        """Whether files lie here only once they were fetched."""
        return self.folder != self.out.location

    def fetch(self, *names: str) -> None:
        """Have these files on this machine, as far as there are such."""
        for name in names if self.is_copy else ():
            size = self.out.size(name)
            if size is not None:
                self._copy(name, size)

    def _copy(self, name: str, size: int) -> None:
        assert isinstance(self.out, Remote)
        path = self.folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                for begin in range(0, size, _BLOCK_BYTES):
                    file.write(self.out.read(name, begin, min(begin + _BLOCK_BYTES, size)))
        except FileNotFoundError:
            path.unlink(missing_ok=True)  # removed since
        except OSError as error:
            raise BuildError(
                f"{path}: {error.strerror}; {self.out.path_of(name)} is fetched there, a shard at a"
                " time for each worker: set TMPDIR to a folder with room"
            ) from error

    @contextmanager
    def fetched(self, *names: str) -> Iterator[None]:
        """Have these files on this machine while this lasts."""
        try:
            self.fetch(*names)
            yield
        finally:
            for name in names if self.is_copy else ():
                (self.folder / name).unlink(missing_ok=True)

    def named(self, message: str) -> str:
        """A message about files here, as one about the output."""
        return message.replace(str(self.folder), str(self.out))


@contextmanager
def local_copy(out: Folder) -> Iterator[LocalCopy]:
    """The files of an output on this machine while this lasts. PackprepErrors that leave here name
    the output's files."""
    if isinstance(out, LocalFolder):
        yield LocalCopy(out, out.path)
        return
    out.reach()
    with tempfile.TemporaryDirectory(prefix="packprep-") as name:
        copy = LocalCopy(out, Path(name))
        try:
            yield copy
        except PackprepError as error:
            error.args = (copy.named(str(error)),)
            raise


def in_int64(time: int) -> int:
    """Return a file's time in ns modulo 2⁶⁴, since int64 ends in the year 2262. Times are only
    compared with one another."""
    return (time + (1 << 63)) % (1 << 64) - (1 << 63)


def refuse_nested(directory: Folder, out: Folder) -> None:
    """Raise RecipeError if an output would lie among the files of the dataset it is made of."""
    inner, outer = _parts(out), _parts(directory)
    if inner[: len(outer)] == outer:
        raise RecipeError(
            f"--out {out} lies in the dataset {directory}, which has no other files: choose another"
            " folder"
        )


def _parts(out: Folder) -> list[str]:
    place = str(out).removeprefix("file://")
    place = place if "://" in place else os.path.realpath(place)
    return place.rstrip("/").split("/")
