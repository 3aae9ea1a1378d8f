"""Folders of inputs and outputs, local or at a URL.

    building, verification, inspection, exporting ─► Folder ─┬─ LocalFolder: temporaries, flushes and renames
    trainers at a URL, inputs at URLs ───────────────────────┴─ Remote: whole objects, listed, read in ranges, retried

Names are those of the format (`plan.json`, `shards/000/000000.safetensors`). A file or object appears whole or not at all in
both; which of them make a shard, its receipt alone says.

Credentials, regions and endpoints come from the environment alone, never from a recipe or a URL: one that holds a secret is
refused. A URL is taken as it is written: nothing in it is percent-decoded.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from packprep.storage.local import LocalFolder
from packprep.storage.remote import Remote, expanded, is_url, locate, without_secrets

__all__ = ["Folder", "LocalFolder", "Remote", "expanded", "folder_at", "is_url", "locate", "without_secrets"]

T = TypeVar("T")


class Folder(Protocol):
    """A folder of files. Its text is its path or URL; it may be pickled and forked."""

    @property
    def location(self) -> Path | str:
        """The path of a local folder; the URL of another."""

    def reach(self) -> None:
        """Nothing, or StorageError where no such folder can be: there is no such bucket, or it may not be looked at."""

    def path_of(self, name: str) -> str:
        """A file's whole path or URL, for messages."""

    def read(self, name: str) -> bytes:
        """All bytes of a file; FileNotFoundError if there is none, another OSError or StorageError if it cannot be read."""

    def size(self, name: str) -> int | None:
        """Its bytes; None if there is none."""

    def exists(self, name: str) -> bool:
        """Whether there is such a file or folder."""

    def others(self) -> Sequence[str]:
        """Names in the folder, as far as it can be listed at once, that no build writes."""

    def write(self, name: str, buffers: Sequence) -> None:
        """Write a file, replacing one that stands; it is safe when this returns. BuildError or StorageError if it cannot be."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a file unless there is one already; whether it was this call that wrote it."""

    def remove(self, name: str) -> None:
        """Remove a file, if there is one."""

    def flush(self) -> None:
        """Make safe what any process has written or removed, also one that was killed right after."""

    def remove_temporaries(self, of_process: int | None = None) -> None:
        """Remove what unfinished writes left behind: of all, or of one process of this host."""

    def each(self, do: Callable[["Folder", int], T], shards: Sequence[int]) -> Iterator[T]:
        """`do(folder, shard)` of many shards, in order; do reads what stands here, and nothing else."""


def folder_at(place: str | os.PathLike | Folder) -> Folder:
    """The Folder that a path or a URL names; one that is given is given back."""
    if isinstance(place, str | os.PathLike):
        path = expanded(os.fspath(place))
        return Remote(path) if is_url(path) else LocalFolder(Path(path))
    return place
