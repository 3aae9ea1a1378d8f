"""Read datasets at a URL through a cache folder that the processes of a node share.

Each shard is fetched when it is first read.

    open_remote("s3://bucket/packed", cache="/local/ssd") ─► Dataset with shards in the cache

A cached shard is named by its digest. After the download, its bytes are checked against the digest.
So datasets may share a cache, and every file in it is complete.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from packprep.dataset.loader import Dataset, Shares, default_max_open
from packprep.dataset.manifest import Manifest, ShardEntry, read_manifest
from packprep.dataset.mixture import Mixture, split_bound
from packprep.dataset.order import dealing_of, integer
from packprep.dataset.shard import IO, check_io
from packprep.errors import ArgumentError, DatasetError
from packprep.format.digests import digest_of, digest_of_buffers
from packprep.format.json_files import MANIFEST_NAME
from packprep.storage import Remote

try:
    import fcntl
except ImportError:  # Windows has no fcntl.
    fcntl = None  # type: ignore[assignment]

_READ_BYTES = 8 << 20


@contextmanager
def _locked(path: Path, shared: bool = False) -> Iterator[None]:
    """Hold a file lock against other processes, and against other threads of this process.

    The operating system releases the lock if the process ends.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _locks.add(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        # A copy of the descriptor in a forked process would keep the lock.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        _locks.discard(descriptor)
        os.close(descriptor)


_locks: set[int] = set()  # descriptors of the locks that this process holds or waits for


def _close_copies() -> None:
    """In a forked process, close its copies of the parent's lock files.

    An open copy would keep the parent's lock, and this process would wait for itself.
    """
    while _locks:
        os.close(_locks.pop())


if fcntl is not None:
    os.register_at_fork(after_in_child=_close_copies)


@dataclass(frozen=True)
class ShardCache:
    """A local folder of shards, shared by any number of processes of one machine.

    ```
    shards/DIGEST       a complete shard with a correct digest
    arriving/DIGEST     a shard that is being fetched, or a part of a shard from a killed fetch
    manifests/DIGEST    a dataset.json, read again from the URL whenever a dataset is opened
    locks/00 … ff       lock held while fetching a shard; the name is the digest's first byte
    removing            lock, shared while opening a shard, exclusive while removing shards
    ```
    The least recently opened shards are removed first. A mapped shard stays readable after its
    removal. Its disk space is free when the last process unmaps it.

    Attributes:
        remote: The dataset's URL.
        folder: The cache folder.
        max_bytes: Approximate maximum size of the cached shards in bytes, or None for no limit.
    """

    remote: Remote
    folder: Path
    max_bytes: int | None

    def prepare(self) -> None:
        """Create the subfolders of the cache."""
        for name in ("shards", "arriving", "locks", "manifests"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def manifest(self) -> Manifest:
        """Read the dataset's current manifest from the URL.

        Raises:
            DatasetError: If the manifest is missing or invalid.
        """
        try:
            data = self.remote.read(MANIFEST_NAME)
        except FileNotFoundError as error:
            raise DatasetError(
                f"{self.remote.url}: there is no {MANIFEST_NAME}. The URL is not a dataset, or"
                " its build is not finished"
            ) from error
        folder = self.folder / "manifests" / digest_of(data)
        folder.mkdir(exist_ok=True)
        # A rename shows other processes only complete files.
        temporary_path = folder / f"{MANIFEST_NAME}.{os.getpid()}"
        temporary_path.write_bytes(data)
        os.replace(temporary_path, folder / MANIFEST_NAME)
        return read_manifest(folder)

    @contextmanager
    def held(self, entry: ShardEntry) -> Iterator[Path]:
        """Fetch a shard if it is not cached, and yield its path.

        The shard is not removed before the context ends.

        Raises:
            DatasetError: If the shard is missing or differs from the manifest.
            StorageError: If the shard cannot be fetched.
        """
        path = self.folder / "shards" / entry["digest"]
        removing = self.folder / "removing"
        # Another process may remove the shard between its arrival and the shared lock. It is then
        # fetched again.
        while True:
            with _locked(removing, shared=True):
                if path.exists():
                    os.utime(path)
                    yield path
                    return
            # One process fetches the shard, and the others wait for it.
            with _locked(self.folder / "locks" / entry["digest"][:2]):
                if not path.exists():
                    arrived = self._fetched(entry)
                    # Under this lock, no process opens a shard, so shards can be removed.
                    with _locked(removing):
                        self._make_room(entry["bytes"])
                        os.replace(arrived, path)

    def _fetched(self, entry: ShardEntry) -> Path:
        path = self.folder / "arriving" / entry["digest"]
        where = f"{self.remote.url}/{entry['file']}"
        size = self.remote.size(entry["file"])
        if size is None:
            raise DatasetError(
                f"{where}: the manifest names this shard, but it does not exist\n"
                "hint: publish the dataset again"
            )
        # A wrong size is found before the download, and damage is found by the digest after it.
        if size != entry["bytes"]:
            raise DatasetError(
                f"{where} has {size} bytes, but {entry['bytes']} in the manifest\n"
                "hint: publish the dataset again"
            )
        with self.remote.open(entry["file"], size) as source, path.open("wb") as target:

            def blocks() -> Iterator[bytes]:
                while data := source.read(_READ_BYTES):
                    target.write(data)
                    yield data

            digest = digest_of_buffers(blocks())
        if digest != entry["digest"]:
            path.unlink()
            raise DatasetError(
                f"{where} has the digest {digest}, but {entry['digest']} in the manifest. It is"
                " damaged, or from another dataset\n"
                "hint: publish the dataset again"
            )
        return path

    def _make_room(self, size: int) -> None:
        """Remove the least recently opened shards until `size` bytes fit or no shard is left."""
        if self.max_bytes is None:
            return
        files = []
        for file in os.scandir(self.folder / "shards"):
            status = file.stat()
            files.append((status.st_mtime_ns, file.path, status.st_size))
        total = sum(bytes for _, _, bytes in files) + size
        for _, path, bytes in sorted(files):
            if total <= self.max_bytes:
                return
            os.unlink(path)
            total -= bytes


@overload
def open_remote(
    url: str,
    *,
    cache: str | os.PathLike,
    max_bytes: int | None = None,
    shares: None = None,
    io: IO = "mmap",
    max_open: int | None = None,
) -> Dataset: ...
@overload
def open_remote(
    url: Sequence[str],
    *,
    cache: str | os.PathLike,
    max_bytes: int | None = None,
    shares: Shares,
    interpolate: str | None = None,
    max_epochs: Sequence[int | None] | None = None,
    io: IO = "mmap",
    max_open: int | None = None,
) -> Mixture: ...
def open_remote(
    url,
    *,
    cache,
    max_bytes=None,
    shares=None,
    interpolate=None,
    max_epochs=None,
    io="mmap",
    max_open=None,
):
    """Open a dataset at a URL, or a mixture of datasets at several URLs.

    Rows, batches, state and workers are the same as for `open_dataset`. Each shard is fetched into
    the cache when it is first read.

    Args:
        url: Location of dataset.json, for example "s3://bucket/packed", or a list of URLs for a
            mixture.
        cache: Folder on a local disk. The processes of a machine and several datasets may share it.
        max_bytes: Maximum size of the cached shards in bytes, or None for no limit. The cache
            should hold all shards that are read at the same time. Otherwise shards are fetched
            repeatedly.
        shares: As in `open_dataset`. Only for a list of URLs.
        interpolate: As in `open_dataset`. Only for a list of URLs.
        max_epochs: As in `open_dataset`. Only for a list of URLs.
        io: As in `open_dataset`.
        max_open: As in `open_dataset`. The default keeps no more shards open than the cache holds.

    Returns:
        A `Dataset`, or a `Mixture` for a list of URLs.

    Raises:
        DatasetError: If a dataset is missing or cannot be used.
        StorageError: If the store cannot be read.
        ArgumentError: If an argument is invalid, or if the system has no file locks.

    Example:
        ds = open_remote("s3://bucket/packed", cache="/local/ssd", max_bytes=200 << 30)
    """
    if fcntl is None:
        raise ArgumentError(
            "a cache needs file locks, which this system does not have\n"
            "hint: copy the dataset instead"
        )
    if max_bytes is not None and (type(max_bytes) is not int or max_bytes < 1):
        raise ArgumentError(
            f"max_bytes is {max_bytes!r} and should be a positive number of bytes, or None"
        )
    check_io(io)
    urls = [url] if isinstance(url, str) else list(url)
    mixing = not (shares is None and interpolate is None and max_epochs is None)
    if not urls or mixing == isinstance(url, str):
        raise ArgumentError(
            "a list of URLs requires shares, one for each and at least one, and a single URL has"
            " none\n"
            "hint: give shares = […] only for a list"
        )
    counts = dealing_of(shares, urls, interpolate) if mixing else None
    caches = [ShardCache(Remote(one), Path(cache).absolute(), max_bytes) for one in urls]
    for one in caches:
        one.prepare()
    manifests = [one.manifest() for one in caches]
    if max_open is None:
        largest = max(
            (entry["bytes"] for manifest in manifests for entry in manifest["shards"]), default=1
        )
        limit = default_max_open()
        if max_bytes is not None:
            # A removed shard occupies the disk as long as it is open, so no more shards stay open
            # than fit.
            limit = max(1, min(limit, max_bytes // max(1, largest)))
    else:
        limit = integer("max_open", max_open, 1, 1 << 31)
    bounds = split_bound(limit, [len(manifest["shards"]) for manifest in manifests])
    datasets = [
        Dataset(one.remote.url, manifest, bound, io, one.held, one.remote.read)
        for one, manifest, bound in zip(caches, manifests, bounds, strict=True)
    ]
    return datasets[0] if counts is None else Mixture(datasets, counts, max_epochs)
