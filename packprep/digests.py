"""Digests: the xxh3-128 hex of bytes. They find damage and differences; they are no defence against forgery."""

from collections.abc import Iterable
from pathlib import Path

import xxhash


def digest_of(data: bytes | bytearray) -> str:
    """32 hex digits: the xxh3-128 of `data`."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_of_buffers(buffers: Iterable) -> str:
    """The digest of the concatenation of `buffers` (bytes or contiguous memoryviews), without joining them."""
    state = xxhash.xxh3_128()
    for buffer in buffers:
        state.update(buffer)
    return state.hexdigest()


def digest_of_file(path: Path) -> str:
    """The digest of a file's bytes, read in blocks of 4 MiB."""
    state = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        buffer = memoryview(bytearray(4 << 20))
        while count := file.readinto(buffer):
            state.update(buffer[:count])
    return state.hexdigest()
