"""Digests: the xxh3-128 hex of bytes. They find damage and differences; they are no defence against
forgery."""

from collections.abc import Iterable, Mapping
from mmap import mmap
from pathlib import Path
from typing import Any

import xxhash

from packprep.format import open_file
from packprep.format.json_files import encode


def digest_of(data: bytes | bytearray | mmap) -> str:
    """32 hex digits: the xxh3-128 of `data`."""
    return xxhash.xxh3_128_hexdigest(data)


def own_digest(value: Mapping[str, Any]) -> str:
    """The digest that a JSON file carries of itself: of its encoding without the key "digest"."""
    return digest_of(encode({key: item for key, item in value.items() if key != "digest"}))


def digest_of_buffers(buffers: Iterable) -> str:
    """The digest of the concatenation of `buffers` (bytes or contiguous memoryviews), without
    joining them."""
    state = xxhash.xxh3_128()
    for buffer in buffers:
        state.update(buffer)
    return state.hexdigest()


def digest_of_file(path: Path) -> str:
    """The digest of a regular file's bytes, read in blocks of 4 MiB; OSError if it is none."""
    state = xxhash.xxh3_128()
    with open_file(path) as file:
        buffer = memoryview(bytearray(4 << 20))
        while count := file.readinto(buffer):
            state.update(buffer[:count])
    return state.hexdigest()
