"""The kinds of file systems: what each does in one try.

```
s3:// gs://         pyarrow.fs, which is a dependency anyway
file://             the standard library
memory:// hf:// …   fsspec, with what its protocol needs besides (adlfs, sshfs, …: the user's to install)
```
Libraries are imported when a URL needs them.
"""

import ctypes
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from io import FileIO
from pathlib import Path
from typing import Any, Protocol, TypeAlias
from urllib.parse import urlsplit

from packprep.errors import StorageError

Buffer: TypeAlias = bytes | bytearray | memoryview  # contiguous

_PART = ".packprep-part"  # how a local file's name ends while it is written


class OpenFile(Protocol):
    """An open file of a store."""

    def size(self) -> int: ...
    def read_at(self, count: int, begin: int) -> bytes: ...


class Store(Protocol):
    """What a kind of file system does in one try. A file that is not there is a FileNotFoundError.

    list: (name below `path`, bytes);  put: the whole file or nothing;  create: whether it was not there and is written.
    """

    def list(self, path: str) -> Sequence[tuple[str, int]]: ...
    def open(self, path: str) -> OpenFile: ...
    def size(self, path: str) -> int | None: ...
    def put(self, path: str, buffers: Sequence[Buffer]) -> None: ...
    def create(self, path: str, data: bytes) -> bool: ...
    def remove(self, path: str) -> None: ...


def connect(scheme: str, folder: str) -> Store:
    """The store of a URL "scheme://folder"."""
    if scheme == "s3":
        return _s3(folder.split("/")[0])
    if scheme == "gs":
        from pyarrow.fs import GcsFileSystem

        return _Arrow(GcsFileSystem(retry_time_limit=timedelta(seconds=5)))
    if scheme == "file":
        return _Local()
    return _Fsspec(scheme)


def _s3(bucket: str) -> "_Arrow":
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem, resolve_s3_region

    options: dict[str, Any] = {}
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise StorageError(f"AWS_ENDPOINT_URL is {endpoint!r} and should be like https://host:port")
        options |= {"endpoint_override": parts.netloc + parts.path.rstrip("/"), "scheme": parts.scheme}
    elif not region:
        region = resolve_s3_region(bucket)
    if region:
        options["region"] = region
    return _Arrow(
        S3FileSystem(
            connect_timeout=10,
            request_timeout=60,
            retry_strategy=AwsStandardS3RetryStrategy(max_attempts=2),
            allow_delayed_open=True,  # one request for a small file
            **options,
        )
    )


class _Arrow:
    """A file system of pyarrow."""

    def __init__(self, files: Any):
        self._files = files

    def list(self, path: str) -> list[tuple[str, int]]:
        from pyarrow.fs import FileSelector, FileType

        found = self._files.get_file_info(FileSelector(path, recursive=True, allow_not_found=True))
        bucket = path.split("/")[0]
        if not found and self._files.get_file_info(bucket).type == FileType.NotFound:
            raise StorageError(f"there is no bucket {bucket}: create it, or correct the URL and the endpoint")
        return [(info.path[len(path) + 1 :], info.size) for info in found if info.type == FileType.File]

    def open(self, path: str) -> OpenFile:
        return self._files.open_input_file(path)

    def size(self, path: str) -> int | None:
        from pyarrow.fs import FileType

        info = self._files.get_file_info(path)
        return info.size if info.type == FileType.File else None

    def put(self, path: str, buffers: Sequence[Buffer]) -> None:
        stream = self._files.open_output_stream(path, compression=None)  # by default names ending in .gz are compressed
        try:
            for buffer in buffers:
                stream.write(buffer)
            stream.close()
        except BaseException:
            # A stream that is dropped publishes what it has. It has no way to be aborted, so that it must never be
            # dropped: what was sent stays an unfinished upload, which nobody sees.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(stream))
            raise

    def create(self, path: str, data: bytes) -> bool:
        if self.size(path) is not None:
            return False
        self.put(path, [data])
        return True

    def remove(self, path: str) -> None:
        self._files.delete_file(path)


class _LocalReader:
    def __init__(self, path: str):
        self._file = FileIO(path)

    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def read_at(self, count: int, begin: int) -> bytes:
        return os.pread(self._file.fileno(), count, begin)


class _Local:
    """This machine's own files."""

    def list(self, path: str) -> list[tuple[str, int]]:
        return [
            (file.relative_to(path).as_posix(), file.stat().st_size)
            for file in Path(path).rglob("*")
            if file.is_file() and not file.name.endswith(_PART)
        ]

    def open(self, path: str) -> OpenFile:
        return _LocalReader(path)

    def size(self, path: str) -> int | None:
        return os.path.getsize(path) if os.path.isfile(path) else None

    def put(self, path: str, buffers: Sequence[Buffer]) -> None:
        with _written(path, buffers) as part:
            os.replace(part, path)

    def create(self, path: str, data: bytes) -> bool:
        with _written(path, [data]) as part:
            try:
                os.link(part, path)
            except FileExistsError:
                return False
        return True

    def remove(self, path: str) -> None:
        os.unlink(path)


@contextmanager
def _written(path: str, buffers: Sequence[Buffer]) -> Iterator[str]:
    """A whole file beside `path`, under another name until it is given one."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    descriptor, part = tempfile.mkstemp(_PART, ".", os.path.dirname(path))
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o666 & ~_umask())
            for buffer in buffers:
                file.write(buffer)
            file.flush()
            os.fsync(descriptor)
        yield part
    finally:
        if os.path.exists(part):
            os.unlink(part)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


class _FsspecReader:
    def __init__(self, files: Any, path: str):
        self._files, self._path = files, path
        self._info = files.info(path)
        if self._info["type"] != "file":
            raise FileNotFoundError(path)

    def size(self) -> int:
        return self._info["size"]

    def read_at(self, count: int, begin: int) -> bytes:
        return self._files.cat_file(self._path, start=begin, end=begin + count)


class _Fsspec:
    """A file system of fsspec."""

    def __init__(self, scheme: str):
        import fsspec

        try:
            self._files = fsspec.filesystem(scheme)
        except (ImportError, ValueError) as error:  # a library that is not installed; a scheme that nobody knows
            raise StorageError(f"{scheme}:// cannot be read: {error}") from error
        self._scheme = scheme

    def _path(self, path: str) -> str:
        return self._files._strip_protocol(f"{self._scheme}://{path}")

    def list(self, path: str) -> list[tuple[str, int]]:
        self._files.invalidate_cache()
        start = self._path(path).rstrip("/") + "/"
        try:
            found = self._files.find(self._path(path), detail=True)
        except FileNotFoundError:
            return []
        return [(name[len(start) :], info["size"]) for name, info in found.items() if name.startswith(start)]

    def open(self, path: str) -> OpenFile:
        self._files.invalidate_cache()
        return _FsspecReader(self._files, self._path(path))

    def size(self, path: str) -> int | None:
        try:
            return self.open(path).size()
        except FileNotFoundError:
            return None

    def put(self, path: str, buffers: Sequence[Buffer]) -> None:
        self._files.pipe_file(self._path(path), b"".join(buffers))

    def create(self, path: str, data: bytes) -> bool:
        try:
            self._files.pipe_file(self._path(path), data, mode="create")
        except FileExistsError:
            return False
        return True

    def remove(self, path: str) -> None:
        self._files.rm_file(self._path(path))
