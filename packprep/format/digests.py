"""Compute digests. A digest is the xxh3-128 hash of bytes, in hex.

Digests detect damage and differences, but do not protect against forgery.
"""

from collections.abc import Iterable, Mapping
from mmap import mmap
from pathlib import Path
from typing import Any

import xxhash

from packprep.format import open_file
from packprep.format.json_files import encode


def digest_of(data: bytes | bytearray | mmap) -> str:
    """Return the xxh3-128 of `data` as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def own_digest(value: Mapping[str, Any]) -> str:
    """Compute the value that the key "digest" of a JSON file must have.

    It is the digest of the file's canonical JSON without the key "digest".
    """
    return digest_of(encode({key: item for key, item in value.items() if key != "digest"}))


def digest_of_buffers(buffers: Iterable) -> str:
    """Return the digest of the concatenated buffers, without copying them.

    The buffers are bytes or contiguous memoryviews.
    """
    state = xxhash.xxh3_128()
    for buffer in buffers:
        state.update(buffer)
    return state.hexdigest()


def digest_of_file(path: Path) -> str:
    """Return the digest of a regular file. The file is read in blocks of 4 MiB.

    Raises:
        OSError: If the file cannot be read or is not a regular file.
    """
    state = xxhash.xxh3_128()
    with open_file(path) as file:
        buffer = memoryview(bytearray(4 << 20))
        while count := file.readinto(buffer):
            state.update(buffer[:count])
    return state.hexdigest()
