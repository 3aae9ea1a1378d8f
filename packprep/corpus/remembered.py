"""What takes a second to find out about a tokenizer, kept from one run to the next beside the compiled kernels.

The folder is named by the digest of packprep's sources, and each name here by a digest of all that the answer depends on.
What cannot be kept or read is found out again.
"""

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from packprep.cache import cache_folder
from packprep.digests import digest_of

T = TypeVar("T")


def remembered(what: str, depends_on: tuple, kind: Any, find: Callable[[], T]) -> T:
    """`find()`, or what it gave before. what: a word for its name; kind: the type that it gives."""
    try:
        return recall(what, depends_on, kind)
    except LookupError:
        pass
    found = find()
    remember(what, depends_on, found)
    return found


def recall(what: str, depends_on: tuple, kind: Any) -> Any:
    """What is remembered; LookupError where nothing is."""
    path = _path(what, depends_on)
    try:
        kept = path.read_bytes() if path else b""
        data, digest = kept[:-32], kept[-32:]
        if digest_of(data).encode() == digest:
            return msgspec.msgpack.decode(data, type=kind)
    except (OSError, ValueError):
        pass
    raise LookupError(what)


def remember(what: str, depends_on: tuple, value: Any) -> None:
    """Keep a value for `recall`, in place of what was kept."""
    path = _path(what, depends_on)
    if path is None:
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with contextlib.suppress(OSError, ValueError):  # ValueError: half a character, which is no UTF-8
        data = msgspec.msgpack.encode(value)
        temporary.write_bytes(data + digest_of(data).encode())
        os.replace(temporary, path)


def _path(what: str, depends_on: tuple) -> Path | None:
    folder = cache_folder()
    return Path(folder) / f"{what}-{digest_of(msgspec.msgpack.encode(depends_on))}" if folder else None
