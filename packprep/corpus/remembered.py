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

from packprep.digests import digest_of
from packprep.kernel import cache_folder

T = TypeVar("T")


def remembered(what: str, depends_on: tuple, kind: Any, find: Callable[[], T]) -> T:
    """`find()`, or what it gave before. what: a word for its name; kind: the type that it gives."""
    folder = cache_folder()
    if folder is None:
        return find()
    path = Path(folder) / f"{what}-{digest_of(msgspec.msgpack.encode(depends_on))}"
    try:
        kept = path.read_bytes()
        data, digest = kept[:-32], kept[-32:]
        if digest_of(data).encode() == digest:
            return msgspec.msgpack.decode(data, type=kind)
    except (OSError, ValueError):
        pass
    found = find()
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with contextlib.suppress(OSError, ValueError):  # ValueError: half a character, which is no UTF-8
        data = msgspec.msgpack.encode(found)
        temporary.write_bytes(data + digest_of(data).encode())
        os.replace(temporary, path)
    return found
