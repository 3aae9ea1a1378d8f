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
    work_range: Slice,
    text_key: str,
    keep: Keep | None,
    batch_bytes: int,
    decoders: Decoders,
    fields: Fields | None,
) -> Iterator[Batch]:
    """Yield the document of a text file, compressed or not; see `formats.read`.

    An empty file is a document with an empty text.
    """
    begin, end = work_range.range(1)
    zeros = np.zeros(1, np.int64)
    if begin == end or not kept(keep, work_range.file, zeros, lambda: zeros + work_range.size)[0]:
        return
    batch = BatchBuilder(work_range.file)
    data = _read_whole(work_range, limits.MAX_DOCUMENT_BYTES)
    if data is None:
        batch.reject(0, *too_large(None if work_range.compression else work_range.size))
    else:
        try:
            batch.add(0, data.removeprefix(BOM).decode(), len(data))
        except UnicodeDecodeError as error:
            batch.reject(0, *invalid_utf8(error, "file"))
    yield from batch.take()


def _read_whole(work_range: Slice, max_bytes: int) -> bytes | None:
    """Return the decompressed bytes of a file, or None if there are more than `max_bytes`."""
    if not work_range.compression:
        with open_source(work_range.path, work_range.size) as file:
            if work_range.size > max_bytes:
                return None
            data = bytearray()
            while chunk := file.read(max(work_range.size - len(data), 1)):
                data += chunk
            if len(data) != work_range.size:
                raise limits.changed_size(work_range.path, work_range.size, len(data))
            return bytes(data)
    blocks = []
    n_bytes = 0
    for block in decompressed(
        work_range.path, work_range.size, work_range.compression, _STEP_BYTES
    ):
        blocks.append(block.data)
        n_bytes += len(block.data)
        if n_bytes > max_bytes:
            return None
    return b"".join(blocks)
