"""Implement the requests to each kind of file system, without retries.

The scheme of a URL selects the library.

```
s3:// gs://         pyarrow.fs; obstore to write an object only if it does not exist
file://             the standard library
memory:// hf:// …   fsspec, with the package of its protocol (adlfs, sshfs, …)
```

A library is imported when a URL first needs it.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from configparser import Error, RawConfigParser
from datetime import timedelta
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any, Protocol, TypeAlias
from urllib.parse import urlsplit

from packprep.errors import StorageError
from packprep.forking import unforked
from packprep.storage.local import TEMPORARIES, create_file, write_temporary

Buffer: TypeAlias = bytes | bytearray | memoryview  # contiguous
PutIfNone: TypeAlias = Callable[[str, bytes], bool]

_KEYS = ("access_key_id", "secret_access_key", "session_token")
_ELSEWHERE = ("sso_", "role_arn", "credential_", "web_identity_")
_DETAILS = "\n\nDebug source"
_process: int | None = None  # ID of the process that runs obstore's threads


class OpenFile(Protocol):
    """An open file in a store."""

    def size(self) -> int: ...
    def read_at(self, count: int, begin: int) -> bytes: ...


class Store(Protocol):
    """The requests that each kind of file system supports, without retries.

    For a missing file, `open` and `remove` raise FileNotFoundError, and `size` returns None.

    - `list` returns (name relative to `path`, size in bytes) of each file.
    - `put` writes the whole file or nothing.
    - `create` writes the file unless it exists, and returns whether it wrote the file.
    """

    def list(self, path: str) -> Sequence[tuple[str, int]]: ...
    def open(self, path: str) -> OpenFile: ...
    def size(self, path: str) -> int | None: ...
    def put(self, path: str, buffers: Sequence[Buffer]) -> None: ...
    def create(self, path: str, data: bytes) -> bool: ...
    def remove(self, path: str) -> None: ...


def connect(scheme: str, folder: str) -> Store:
    """Return the store for the URL `scheme://folder`."""
    if scheme == "s3":
        return _s3(folder.split("/")[0])
    if scheme == "gs":
        with unforked():
            from pyarrow.fs import GcsFileSystem
        return _Arrow(
            GcsFileSystem(retry_time_limit=timedelta(seconds=5)),
            lambda: _put_if_none("GCSStore", folder),
        )
    if scheme == "file":
        return _Local()
    return _Fsspec(scheme)


def _s3(bucket: str) -> "_Arrow":
    with unforked():
        from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem, resolve_s3_region
    options: dict[str, Any] = {}
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise StorageError(
                f"AWS_ENDPOINT_URL is {endpoint!r}\nhint: use the form https://host:port"
            )
        options |= {
            "endpoint_override": parts.netloc + parts.path.rstrip("/"),
            "scheme": parts.scheme,
        }
    # Without a region or an endpoint, ask AWS for the region of the bucket.
    elif not region:
        region = resolve_s3_region(bucket)
    if region:
        options["region"] = region

    def put_if_none() -> PutIfNone | None:
        # obstore does not get its settings from pyarrow, so it gets the same keys, region and
        # endpoint.
        keys = _keys_of_profile()
        if keys is None:
            return None
        options = {"region": region, "endpoint": endpoint.rstrip("/") if endpoint else None, **keys}
        return _put_if_none(
            "S3Store", bucket, **{name: value for name, value in options.items() if value}
        )

    files = S3FileSystem(
        connect_timeout=10,
        request_timeout=60,
        retry_strategy=AwsStandardS3RetryStrategy(max_attempts=2),
        allow_delayed_open=True,  # A small file then needs only one request.
        **options,
    )
    return _Arrow(files, put_if_none)


def _keys_of_profile() -> dict[str, str] | None:
    """Return the access keys of the selected AWS profile, under the names that obstore expects.

    obstore does not read the AWS configuration files, so this function reads them.

    Returns:
        The keys of the profile, for example {"access_key_id": "…", "secret_access_key": "…"}. The
        dict is empty if the environment contains keys. It is also empty if the default profile is
        selected and the files do not say how this profile gets its keys. In both cases, obstore
        finds the keys itself. None means that the profile gets its keys in another way, such as
        single sign-on, another role or a program.

    Raises:
        StorageError: If a configuration file cannot be parsed.
    """
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return {}
    profile = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or "default"
    settings: dict[str, str] = {}
    # Keys in the credentials file take precedence over keys in the configuration file.
    for variable, name in (
        ("AWS_CONFIG_FILE", "config"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials"),
    ):
        parser = RawConfigParser()
        path = os.environ.get(variable) or os.path.expanduser(f"~/.aws/{name}")
        try:
            parser.read(path, "utf-8")
        except (Error, UnicodeDecodeError) as error:
            raise StorageError(f"{path} cannot be read: {error}") from error
        for section in (f"profile {profile}", profile):
            settings |= dict(parser[section]) if parser.has_section(section) else {}
    keys = {key: settings[f"aws_{key}"] for key in _KEYS if f"aws_{key}" in settings}
    # A profile without keys has another source of keys, which obstore does not know.
    is_elsewhere = profile != "default" or any(key.startswith(_ELSEWHERE) for key in settings)
    return keys or (None if is_elsewhere else {})


def _put_if_none(kind: str, bucket: str, **options: str) -> "PutIfNone | None":
    """Return a function that writes an object only if it does not exist.

    The returned function takes a path and the data, and returns whether it wrote the object. The
    store checks and writes in one atomic step.

    Returns:
        The function, or None if obstore does not support the credentials. The result is also None
        in a forked process whose parent already called `_put_if_none`. obstore's threads exist only
        in the parent, so the forked process would wait for them forever.
    """
    global _process
    if _process not in (None, os.getpid()):
        return None
    import obstore.store

    _process = os.getpid()
    try:
        store = getattr(obstore.store, kind)(
            bucket.split("/")[0],
            client_options={
                "allow_http": True,
                "connect_timeout": timedelta(seconds=10),
                "timeout": timedelta(seconds=60),
            },
            retry_config={"max_retries": 0},  # The caller retries.
            **options,
        )
    except obstore.exceptions.BaseError:
        return None  # obstore does not support this kind of credentials.

    def put(path: str, data: bytes) -> bool:
        try:
            obstore.put(store, path.partition("/")[2], data, mode="create")
        except obstore.exceptions.AlreadyExistsError:
            return False
        except obstore.exceptions.BaseError as error:
            raise OSError(f"{type(error).__name__}: {str(error).split(_DETAILS)[0]}") from error
        return True

    return put


class _Arrow:
    """A pyarrow file system with conditional writes by obstore.

    pyarrow does not support conditional writes.
    """

    def __init__(self, files: Any, put_if_none: "Callable[[], PutIfNone | None]"):
        self._files = files
        self._put_if_none = cache(put_if_none)

    def list(self, path: str) -> list[tuple[str, int]]:
        from pyarrow.fs import FileSelector, FileType

        listing = self._files.get_file_info(
            FileSelector(path, recursive=True, allow_not_found=True)
        )
        bucket = path.split("/")[0]
        if not listing and self._files.get_file_info(bucket).type == FileType.NotFound:
            raise StorageError(
                f"bucket {bucket} does not exist\n"
                "hint: create it, or correct the URL and the endpoint"
            )
        return [
            (info.path[len(path) + 1 :], info.size)
            for info in listing
            if info.type == FileType.File
        ]

    def open(self, path: str) -> OpenFile:
        return self._files.open_input_file(path)

    def size(self, path: str) -> int | None:
        from pyarrow.fs import FileType

        info = self._files.get_file_info(path)
        return info.size if info.type == FileType.File else None

    def put(self, path: str, buffers: Sequence[Buffer]) -> None:
        # By default, pyarrow compresses files whose names end in .gz.
        stream = self._files.open_output_stream(path, compression=None)
        try:
            for buffer in buffers:
                stream.write(buffer)
            stream.close()
        except BaseException:
            # A deallocated stream publishes the data it has, and pyarrow cannot abort a stream.
            # The extra reference keeps it alive, so the upload stays unfinished and invisible.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(stream))
            raise

    def create(self, path: str, data: bytes) -> bool:
        if self.size(path) is not None:  # Some stores ignore the condition of a write.
            return False
        put_if_none = self._put_if_none()
        if put_if_none is not None:
            return put_if_none(path, data)
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
    """The local file system."""

    def list(self, path: str) -> list[tuple[str, int]]:
        return [
            (file.relative_to(path).as_posix(), file.stat().st_size)
            for file in Path(path).rglob("*")
            if file.is_file() and not file.match(TEMPORARIES)
        ]

    def open(self, path: str) -> OpenFile:
        return _LocalReader(path)

    def size(self, path: str) -> int | None:
        return os.path.getsize(path) if os.path.isfile(path) else None

    def put(self, path: str, buffers: Sequence[Buffer]) -> None:
        temporary = write_temporary(Path(path), buffers)
        try:
            os.rename(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def create(self, path: str, data: bytes) -> bool:
        return create_file(Path(path), data)

    def remove(self, path: str) -> None:
        os.unlink(path)


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
    """An fsspec file system."""

    def __init__(self, scheme: str):
        try:
            with unforked():
                import fsspec

                self._files = fsspec.filesystem(scheme)
        # ImportError means a missing library, ValueError an unknown scheme.
        except (ImportError, ValueError) as error:
            raise StorageError(f"{scheme}:// cannot be read: {error}") from error
        self._scheme = scheme

    def _path(self, path: str) -> str:
        return self._files._strip_protocol(f"{self._scheme}://{path}")

    def list(self, path: str) -> list[tuple[str, int]]:
        self._files.invalidate_cache()
        start = self._path(path).rstrip("/") + "/"
        try:
            listing = self._files.find(self._path(path), detail=True)
        except FileNotFoundError:
            return []
        return [
            (name[len(start) :], info["size"])
            for name, info in listing.items()
            if name.startswith(start)
        ]

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
