"""Read text files. The whole file is one document at position 0."""

from collections.abc import Iterator

import numpy as np

from packprep.sources.formats import batch as limits
from packprep.sources.formats.batch import (
    Batch,
    BatchBuilder,
    Keep,
    Slice,
    invalid_utf8,
    kept,
    open_source,
    too_large,
)
from packprep.sources.formats.compressed import Decoders, decompressed
from packprep.sources.formats.fields import Fields
from packprep.sources.formats.jsonl import BOM

_STEP_BYTES = 1 << 20  # The value does not matter, because a text file is read completely.


def read(
    part: Slice,
    text_key: str,
    keep: Keep | None,
    batch_bytes: int,
    decoders: Decoders,
    fields: Fields | None,
) -> Iterator[Batch]:
    """Yield the document of a text file, compressed or not; see `formats.read`.

    An empty file is a document with an empty text.
    """
    begin, end = part.range(1)
    at = np.zeros(1, np.int64)
    if begin == end or not kept(keep, part.file, at, lambda: at + part.size)[0]:
        return
    batch = BatchBuilder(part.file)
    data = _read_whole(part, limits.MAX_DOCUMENT_BYTES)
    if data is None:
        batch.reject(0, *too_large(None if part.compression else part.size))
    else:
        try:
            batch.add(0, data.removeprefix(BOM).decode(), len(data))
        except UnicodeDecodeError as error:
            batch.reject(0, *invalid_utf8(error, "file"))
    yield from batch.take()


def _read_whole(part: Slice, max_bytes: int) -> bytes | None:
    """Return the decompressed bytes of a file, or None if there are more than `max_bytes`."""
    if not part.compression:
        with open_source(part.path, part.size) as file:
            if part.size > max_bytes:
                return None
            data = bytearray()
            while chunk := file.read(max(part.size - len(data), 1)):
                data += chunk
            if len(data) != part.size:
                raise limits.changed_size(part.path, part.size, len(data))
            return bytes(data)
    blocks = []
    n_bytes = 0
    for block in decompressed(part.path, part.size, part.compression, _STEP_BYTES):
        blocks.append(block.data)
        n_bytes += len(block.data)
        if n_bytes > max_bytes:
            return None
    return b"".join(blocks)
