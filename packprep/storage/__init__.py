"""Access folders of inputs and outputs, on a local disk or at a URL.

    building, verification, inspection, exporting ─► Folder ─┬─ LocalFolder: files and renames
    trainers at a URL, inputs at URLs ───────────────────────┴─ Remote: whole objects and ranges

File names are relative to the folder, such as `plan.json` or `shards/000/000000.safetensors`.
`LocalFolder` and `Remote` write each file atomically, so readers never see a part of it. Only a
shard's receipt says which files belong to the shard.

Credentials, regions and endpoints come only from the environment, never from a recipe or a URL. A
URL that contains a secret is refused. URLs are not percent-decoded.
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
    """A local or remote folder of files.

    `str(folder)` is the path or the URL. A folder can be pickled and survives a fork.
    """

    @property
    def location(self) -> Path | str:
        """Return the path of a local folder or the URL of a remote one."""

    def reach(self) -> None:
        """Check that the folder can be reached.

        Raises:
            StorageError: If the bucket does not exist or access to it is denied.
        """

    def path_of(self, name: str) -> str:
        """Return the full path or URL of a file, for messages."""

    def read(self, name: str) -> bytes:
        """Return all bytes of a file.

        Raises:
            FileNotFoundError: If the file does not exist.
            OSError: If a local file cannot be read.
            StorageError: If a remote file cannot be read.
        """

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, or None if it does not exist."""

    def exists(self, name: str) -> bool:
        """Return whether a file or folder of this name exists."""

    def others(self) -> Sequence[str]:
        """Return the names in this folder, except hidden names and names that a build writes.

        For a remote folder, the result is empty, because a bucket may contain millions of objects.
        """

    def write(self, name: str, buffers: Sequence) -> None:
        """Write a file. An existing file of this name is replaced.

        The data is durable when this method returns.

        Raises:
            BuildError: If a local file cannot be written.
            StorageError: If a remote file cannot be written.
        """

    def create(self, name: str, data: bytes) -> bool:
        """Write a file unless it exists, and return whether this call wrote it."""

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""

    def free_bytes(self) -> int | None:
        """Return the free space in bytes, or None if it is unknown, as for an object store."""

    def flush(self) -> None:
        """Flush the directory entries of this folder and its subfolders to disk.

        After this call, a crash of the machine cannot undo that files were added or removed. This
        includes the files of a process that was killed before it flushed the entries.
        """

    def remove_temporaries(self, of_process: int | None = None) -> None:
        """Remove the temporary files of unfinished writes.

        Args:
            of_process: Remove only the temporary files of the process with this ID on this host.
                With None, remove the temporary files of all processes.
        """

    def each(self, do: Callable[["Folder", int], T], shards: Sequence[int]) -> Iterator[T]:
        """Yield `do(folder, shard)` for each shard number in `shards`, in order.

        `folder` gives access to this folder. `do` may read files of the folder, but must not write
        or remove files.
        """


def folder_at(place: str | os.PathLike | Folder) -> Folder:
    """Return the folder at a path or URL.

    A `Folder` is returned unchanged.
    """
    if isinstance(place, str | os.PathLike):
        path = expanded(os.fspath(place))
        return Remote(path) if is_url(path) else LocalFolder(Path(path))
    return place


@dataclass(frozen=True)
class LocalCopy:
    """A local folder with files of the output `out`. Each file has the same name as in `out`.

    If the output is local, `folder` is the output folder itself. If the output is remote, `folder`
    is a temporary folder, and `fetch` copies files to it.
    """

    out: Folder
    folder: Path

    @property
    def is_copy(self) -> bool:
        """Return whether `folder` is a temporary folder for copies."""
        return self.folder != self.out.location

    def fetch(self, *names: str) -> None:
        """Copy the files with these names from a remote output to the local folder.

        Files that do not exist are skipped. For a local output, nothing is copied.
        """
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
            path.unlink(missing_ok=True)  # The file was removed after its size was read.
        except OSError as error:
            raise BuildError(
                f"{path}: {error.strerror}. {self.out.path_of(name)} is downloaded there, one"
                " shard at a time per worker\n"
                "hint: set TMPDIR to a folder with free space"
            ) from error

    @contextmanager
    def fetched(self, *names: str) -> Iterator[None]:
        """Call `fetch` for the files with these names, and remove the copies after the context."""
        try:
            self.fetch(*names)
            yield
        finally:
            for name in names if self.is_copy else ():
                (self.folder / name).unlink(missing_ok=True)

    def named(self, message: str) -> str:
        """Return a message with the local folder's path replaced by the output's location."""
        return message.replace(str(self.folder), str(self.out))


@contextmanager
def local_copy(out: Folder) -> Iterator[LocalCopy]:
    """Provide a `LocalCopy` of an output while the context is open.

    If a `PackprepError` is raised in the context, each path of a copy in its message is replaced by
    the path of the file in the output.
    """
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
    """Return a file's time in ns, wrapped around to the range of int64.

    Times after the year 2262 do not fit into an int64. Times are only compared for equality, so the
    wraparound does no harm.
    """
    return (time + (1 << 63)) % (1 << 64) - (1 << 63)


def refuse_nested(directory: Folder, out: Folder) -> None:
    """Check that the output `out` is not inside its input, the dataset `directory`.

    Raises:
        RecipeError: If `out` is `directory` or a folder below it.
    """
    inner_parts, outer_parts = _parts(out), _parts(directory)
    if inner_parts[: len(outer_parts)] == outer_parts:
        raise RecipeError(
            f"--out {out} is inside the dataset {directory}, which may contain no other files\n"
            "hint: choose another folder"
        )


def _parts(out: Folder) -> list[str]:
    place = str(out).removeprefix("file://")
    place = place if "://" in place else os.path.realpath(place)
    return place.rstrip("/").split("/")
