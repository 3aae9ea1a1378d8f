"""Access a remote folder by its URL.

Every request is retried if its failure may be temporary.
"""

import errno
import io
import os
import random
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, BinaryIO, TypeVar, cast

from packprep.errors import StorageError
from packprep.format.json_files import MANIFEST_NAME
from packprep.messages import PASSWORD, say, without_secret
from packprep.storage.stores import Buffer, OpenFile, Store, connect

T = TypeVar("T")

_TRIES = 7  # The pauses between the tries add up to about half a minute.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 16.0  # seconds
_READ_AT_ONCE = 16 << 20  # Bytes. A lost connection loses at most this amount.
# Bytes per block of an open file. Sequential reads fetch several blocks in one request.
_BLOCK_BYTES = 2 << 20
_BLOCKS = 6  # blocks in memory per open file
_AT_ONCE = 16  # concurrent requests for many objects
_CHUNK = 256

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+:)/(?!/)")
# Errors are also recognized by their texts, because libraries report refusals differently.
_REFUSED = re.compile(
    "ACCESS_?DENIED|INVALID_?ACCESS_?KEY|SIGNATURE_?DOES_?NOT_?MATCH|INCOMPLETE_?SIGNATURE"
    "|EXPIRED_?TOKEN|INVALID_?TOKEN|TOKEN_?ID|UNRECOGNIZED_?CLIENT|AUTHENTICAT|AUTHORIZ"
    "|PERMISSION_?DENIED|CREDENTIAL|TOO_?SKEWED|FORBIDDEN",
    re.IGNORECASE,
)
_NO_BUCKET = re.compile("NO_?SUCH_?BUCKET|BUCKET_?NOT_?FOUND|Bucket '.*' not found", re.IGNORECASE)
_STATUS = re.compile(r"(?:HTTP|non-2xx) status(?: code)?:? (\d{3})", re.IGNORECASE)
# Parts of the names of exceptions for network failures.
_NETWORK = re.compile("Timeout|Connect|Network|Protocol|Incomplete|Read|Write|Client")
# A retry may help after these HTTP statuses below 500. 409 means a concurrent write to the object.
_PASSING = {408, 409, 425, 429}
_PASSING_NUMBERS = {
    errno.EINTR,
    errno.EIO,
    errno.EAGAIN,
    errno.ETIMEDOUT,
    errno.ECONNRESET,
    errno.ECONNREFUSED,
    errno.ECONNABORTED,
    errno.EPIPE,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.ESTALE,
}
_VARIABLES = {
    "s3": (
        "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY (or AWS_PROFILE), AWS_REGION and AWS_ENDPOINT_URL"
    ),
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "hf": "HF_TOKEN",
}


def is_url(path: str) -> bool:
    """Return whether a path is a URL (`scheme://…`) and not a local path."""
    return _URL.match(path) is not None


def expanded(path: str) -> str:
    """Return a path or `file://` URL with a leading `~` or `~USER` replaced by the home folder.

    Any other URL is returned unchanged. Every location that a user gives passes through this
    function before it is stored or shown.

    Raises:
        StorageError: If a URL contains a secret. Also if a path looks like a URL with one slash,
            such as "s3:/bucket".
    """
    if "://" in path:
        _refuse_secrets(path)
    elif (typo := _ONE_SLASH.match(path)) and not os.path.lexists(typo[1]):
        raise StorageError(
            f"{path} has one slash, but a URL has two\n"
            f"hint: write {typo[1]}//{path[typo.end() :]}; or ./{path}, if a folder has that name"
        )
    return (
        f"file://{os.path.expanduser(path[7:])}"
        if path.startswith("file://~")
        else os.path.expanduser(path)
    )


def _refuse_secrets(path: str) -> None:
    """Check that a URL contains no secret, such as a password or a signature.

    Raises:
        StorageError: If the URL contains a secret. The message does not repeat the secret.
    """
    scheme, _, address = path.partition("://")
    shown = without_secret(path)
    if shown == path:
        return
    secret = "a password" if PASSWORD.match(address) else "a signature or token"
    variables = _VARIABLES.get(
        scheme, "the variables or the profile that its store's library reads"
    )
    raise StorageError(
        f"{shown} contains {secret}, which plan.json and logs would show to all users of the"
        " dataset\n"
        "hint: leave it out of the URL, as in s3://bucket/folder, and set credentials in the"
        f" environment: {variables} (docs/guides/storage.md)"
    )


class _ShortRead(OSError):
    """A read that returned fewer bytes than requested, although the file contains them."""


class Remote:
    """A folder at a URL, such as `s3://bucket/dir`. In a bucket, it is the objects below a prefix.

    Each process connects when it first uses the folder. Therefore a Remote can be pickled, and it
    can be used after a fork.

    Requests are retried if the cause may be temporary: a lost connection, a timeout, a short read,
    or status 429 or 5xx. Other failures raise StorageError immediately: missing permission, a
    missing bucket or a missing library.

    The store itself writes each object atomically and durably. Therefore there is nothing to flush,
    and no temporary files exist.
    """

    def __init__(self, url: str):
        if not is_url(url):
            raise StorageError(f"{url} is not a valid URL\nhint: write it as s3://bucket/folder")
        _refuse_secrets(url)
        self.scheme, address = url.split("://", 1)
        self._folder = address.rstrip("/")
        self.url = f"{self.scheme}://{self._folder}"
        self._connected: tuple[int, Store] | None = None

    def __reduce__(self) -> tuple[type["Remote"], tuple[str]]:
        return Remote, (self.url,)

    def __repr__(self) -> str:
        return f"Remote({self.url!r})"

    def __str__(self) -> str:
        return self.url

    @property
    def location(self) -> str:
        return self.url

    def reach(self) -> None:
        self.list(MANIFEST_NAME)  # No folder has this name, so the listing is short.

    def path_of(self, name: str) -> str:
        return f"{self.url}/{name}"

    def list(self, below: str = "") -> list[tuple[str, int]]:
        """List all files below the subfolder `below` at any depth.

        Returns:
            A list of (name relative to this folder, size in bytes), sorted bytewise by name. The
            list may be empty.

        Raises:
            StorageError: If the bucket does not exist.
        """
        listing = self._tried("listing", below, lambda store: store.list(self._path(below)))
        start = below.strip("/") + "/" if below.strip("/") else ""
        return sorted(
            ((start + name, size) for name, size in listing), key=lambda item: os.fsencode(item[0])
        )

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, or None if it does not exist."""
        return self._tried("looking for", name, lambda store: store.size(self._path(name)))

    def exists(self, name: str) -> bool:
        return self.size(name) is not None or bool(self.list(name))

    def others(self) -> Sequence[str]:
        return []  # A bucket may contain millions of objects below this folder.

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return bytes [begin, end) of a file.

        Args:
            name: File name relative to this folder.
            begin: First byte to read.
            end: Byte after the last byte to read. With None, or with a value beyond the end of the
                file, the file is read to its end.

        Raises:
            FileNotFoundError: If the file does not exist.
        """
        opened = _Opened(self, name)
        length = opened.length()
        end = length if end is None else min(end, length)
        return b"".join(
            opened.read(offset, min(end - offset, _READ_AT_ONCE))
            for offset in range(begin, end, _READ_AT_ONCE)
        )

    def open(self, name: str, size: int) -> BinaryIO:
        """Open a file for reading and seeking. `size` is its expected size in bytes.

        The file is read in ranges of a few megabytes. Sequential reads fetch the next range in
        advance. If the request for a range fails, only this request is retried.

        Raises:
            FileNotFoundError: If the file does not exist.
            StorageError: If the size of the file is not `size`.
        """
        opened = _Opened(self, name)
        if opened.length() != size:
            raise StorageError(
                f"{self._url(name)} has {opened.length()} bytes, but should have {size}"
            )
        # Libraries only need the methods of a binary file, so a BufferedReader suffices.
        return cast(BinaryIO, io.BufferedReader(_Ranges(opened, size), 128 << 10))

    def write(self, name: str, buffers: Sequence[Buffer]) -> None:
        """Write a file. An existing file of this name is replaced.

        Readers see the old file or the new file, but never a part of the new file.
        """
        data = list(buffers)
        self._tried("writing", name, lambda store: store.put(self._path(name), data))

    def create(self, name: str, data: bytes) -> bool:
        """Write a file unless it exists, and return whether this call wrote it.

        The check and the write are one atomic step if the store supports conditional writes. Only
        one of two concurrent writers then gets True.

        Some stores ignore the condition of such a write, and some connections cannot send it (see
        `stores.py`). The check is then a separate request before the write. Two concurrent writers
        may both get True, and the bytes of the later writer remain.
        """
        tries = 0

        def created(store: Store) -> bool:
            nonlocal tries
            tries += 1
            # An earlier try may have written the file although its response was lost.
            return store.create(self._path(name), data) or (tries > 1 and self.read(name) == data)

        return self._tried("writing", name, created)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""

        def removed(store: Store) -> None:
            with suppress(FileNotFoundError):
                store.remove(self._path(name))

        # Removing a missing object may leave a folder marker in some stores.
        if self.size(name) is not None:
            self._tried("removing", name, removed)

    def free_bytes(self) -> int | None:
        return None

    def flush(self) -> None:
        return

    def remove_temporaries(self, of_process: int | None = None) -> None:
        return

    def each(self, do: Callable[["Remote", int], T], shards: Sequence[int]) -> Iterator[T]:
        """Yield `do(folder, shard)` for each shard number in `shards`, in order.

        Several calls of `do` run concurrently. Each subfolder is listed once. No request is sent
        for a file that is missing in the listing of its subfolder.
        """
        listed = _Listed(self)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for begin in range(0, len(shards), _CHUNK):
                yield from pool.map(partial(do, listed), shards[begin : begin + _CHUNK])

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name.strip('/')}".rstrip("/") if name else self._folder

    def _url(self, name: str) -> str:
        return f"{self.scheme}://{self._path(name)}"

    def _store(self) -> Store:
        if self._connected is None or self._connected[0] != os.getpid():
            self._connected = os.getpid(), connect(self.scheme, self._folder)
        return self._connected[1]

    def _tried(self, doing: str, name: str, action: Callable[[Store], T]) -> T:
        """Call `action` with the store, and return the result.

        If `action` raises an error that may be temporary, `action` is called again after a pause.

        Args:
            doing: Name of the action for messages, such as "reading".
            name: Name of the file, for messages.
            action: Function that takes the store.

        Raises:
            FileNotFoundError: If `action` raises it.
            StorageError: If `action` raises a permanent error, or any error in the last try.
        """
        for tried in range(1, _TRIES + 1):
            try:
                return action(self._store())
            except (FileNotFoundError, StorageError):
                raise
            # Libraries raise many types. An error becomes a StorageError if a retry is useless.
            except Exception as error:
                if tried == _TRIES or not _may_pass(error):
                    raise StorageError(self._message(doing, name, error, tried)) from error
                if tried > 1:  # After a single failure, the wait is too short to report.
                    say(
                        f"{self.url}: {doing} failed {tried} times ({type(error).__name__}): trying"
                        " again",
                        once=True,
                    )
                pause = min(_FIRST_PAUSE * 2 ** (tried - 1), _LONGEST_PAUSE)
                time.sleep(pause * random.uniform(0.5, 1))
        raise AssertionError("unreachable")

    def _message(self, doing: str, name: str, error: Exception, tried: int) -> str:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        variables = _VARIABLES.get(self.scheme, "its credentials")
        if _NO_BUCKET.search(reason):
            advice = "\nhint: create the bucket, or correct the URL and the endpoint"
        elif _is_refused(error):
            advice = (
                ". The store refused the credentials\n"
                f"hint: check the permissions and {variables} in the environment"
            )
        elif tried > 1:
            advice = (
                f" (after {tried} tries)\n"
                "hint: check the network and the store, then run the same command again"
            )
        else:
            advice = f"\nhint: check the URL and these settings of the environment: {variables}"
        return f"{self._url(name)}: {doing} failed: {reason.rstrip('.')}{advice}"


class _Listed(Remote):
    """A Remote that lists each subfolder once, and takes the sizes of files from the listing.

    A subfolder contains a thousand shards, so one listing replaces many requests.
    """

    def __init__(self, remote: Remote):
        super().__init__(remote.url)
        self._remote = remote
        self._folders: dict[str, dict[str, int]] = {}
        self._lock = threading.Lock()

    def size(self, name: str) -> int | None:
        folder = name.rpartition("/")[0]
        with self._lock:
            if folder not in self._folders:
                self._folders[folder] = dict(self._remote.list(folder))
        return self._folders[folder].get(name)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        if self.size(name) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path_of(name))
        return self._remote.read(name, begin, end)


@lru_cache(maxsize=256)
def _root(url: str) -> Remote:
    return Remote(url)


def locate(url: str) -> tuple[Remote, str]:
    """Return (remote, name) for the URL of a file.

    `remote` is the file's bucket, and `name` is its name in the bucket. In a process, all files of
    a bucket get the same `Remote`.
    """
    scheme, address = url.split("://", 1)
    bucket, _, name = address.partition("/")
    return _root(f"{scheme}://{bucket}"), name


def forget_connections() -> None:
    """Make later calls of `locate` create new connections.

    This is needed after environment variables with credentials have changed.
    """
    _root.cache_clear()


class _Opened:
    """A remote file that is read in ranges. After an error, it is opened again."""

    def __init__(self, remote: Remote, name: str):
        self._remote, self._name = remote, name
        self._reader: tuple[int, OpenFile] | None = None

    def _tried(self, action: Callable[[OpenFile], T]) -> T:
        def on(store: Store) -> T:
            if self._reader is None or self._reader[0] != os.getpid():
                self._reader = os.getpid(), store.open(self._remote._path(self._name))
            try:
                return action(self._reader[1])
            except BaseException:
                self._reader = None
                raise

        return self._remote._tried("reading", self._name, on)

    def length(self) -> int:
        return self._tried(lambda reader: reader.size())

    def read(self, begin: int, count: int) -> bytes:
        def whole(reader: OpenFile) -> bytes:
            data = reader.read_at(count, begin)
            if len(data) != count:
                raise _ShortRead(f"received {len(data)} of {count} bytes from byte {begin} on")
            return data

        return self._tried(whole)


class _Ranges(io.RawIOBase):
    """A seekable remote file that is read in blocks.

    The most recently used blocks stay in memory. Sequential reads fetch the next blocks in advance.
    """

    def __init__(self, opened: _Opened, size: int):
        self._opened, self._size, self._at = opened, size, 0
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._next = -1  # the block after the last fetched one

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if self._at < 0:
            raise ValueError(f"negative seek position {self._at}")
        return self._at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        count = max(0, min(len(target), self._size - self._at))
        done_bytes = 0
        while done_bytes < count:
            number, offset = divmod(self._at + done_bytes, _BLOCK_BYTES)
            # A long read would only displace blocks in memory, so it goes directly to the buffer.
            if count - done_bytes >= 2 * _BLOCK_BYTES and number not in self._blocks:
                data = self._opened.read(
                    self._at + done_bytes, min(count - done_bytes, _READ_AT_ONCE)
                )
                self._next = (self._at + done_bytes + len(data)) // _BLOCK_BYTES
            else:
                data = self._block(number)[offset : offset + count - done_bytes]
            target[done_bytes : done_bytes + len(data)] = data
            done_bytes += len(data)
        self._at += count
        return count

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            # A read of the block after the last fetched one is sequential, so fetch more blocks.
            ahead = 3 if number == self._next else 1
            begin = number * _BLOCK_BYTES
            data = self._opened.read(begin, min(ahead * _BLOCK_BYTES, self._size - begin))
            for i in range(0, len(data), _BLOCK_BYTES):
                self._blocks[number + i // _BLOCK_BYTES] = data[i : i + _BLOCK_BYTES]
            while len(self._blocks) > _BLOCKS:
                self._blocks.popitem(last=False)
            self._next = number + ahead
        self._blocks.move_to_end(number)
        return self._blocks[number]


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status in a library's error, or None if the error has no status."""
    response = getattr(error, "response", None)
    for status in (
        getattr(response, "status_code", None),
        getattr(error, "status", None),
        getattr(error, "code", None),
    ):
        if isinstance(status, int) and 300 <= status < 600:
            return status
    written = _STATUS.search(str(error))
    return int(written[1]) if written else None


def _is_refused(error: BaseException) -> bool:
    names = " ".join(kind.__name__ for kind in type(error).__mro__)
    refused = isinstance(error, PermissionError) or _REFUSED.search(f"{names} {error}")
    return bool(refused) or _status_of(error) in (401, 403)


def _may_pass(error: BaseException) -> bool:
    """Return whether an error of a request may be temporary, so that a retry can succeed."""
    if _is_refused(error) or _NO_BUCKET.search(str(error)):
        return False
    status = _status_of(error)
    if status is not None:
        return status >= 500 or status in _PASSING
    if isinstance(error, OSError):
        return error.errno is None or error.errno in _PASSING_NUMBERS
    return any(_NETWORK.search(kind.__name__) for kind in type(error).__mro__)
