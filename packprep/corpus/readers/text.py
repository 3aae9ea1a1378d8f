"""Text files: the whole file is one document, at position 0."""

from collections.abc import Iterator

import numpy as np

from packprep.corpus.readers import documents
from packprep.corpus.readers.documents import (
    Batch,
    BatchBuilder,
    Keep,
    Part,
    invalid_utf8,
    kept,
    open_source,
    too_large,
)
from packprep.corpus.readers.lines import BOM
from packprep.corpus.readers.streams import decompressed

_STEP_BYTES = 1 << 20  # how a compressed text file is cut does not matter: all of it is read


def read_text(part: Part, keep: Keep | None) -> Iterator[Batch]:
    """The document of a text file, compressed or not; see `readers.read`. An empty file is the text ""."""
    begin, end = part.range(1)
    at = np.zeros(1, np.int64)
    if begin == end or not kept(keep, part.file, at, lambda: at + part.size)[0]:
        return
    batch = BatchBuilder(part.file)
    data = _read_whole(part, documents.MAX_DOCUMENT_BYTES)
    if data is None:
        batch.reject(0, *too_large(None if part.compression else part.size))
    else:
        try:
            batch.add(0, data.removeprefix(BOM).decode(), len(data))
        except UnicodeDecodeError as error:
            batch.reject(0, *invalid_utf8(error, "file"))
    yield from batch.take()


def _read_whole(part: Part, max_bytes: int) -> bytes | None:
    """The file's bytes, decompressed, or None if they are more than `max_bytes`."""
    if not part.compression:
        with open_source(part.path, part.size) as file:
            if part.size > max_bytes:
                return None
            data = bytearray()
            while chunk := file.read(max(part.size - len(data), 1)):
                data += chunk
            documents.check_size(part.path, part.size, len(data))
            return bytes(data)
    blocks = []
    n_bytes = 0
    for block in decompressed(part.path, part.size, part.compression, _STEP_BYTES):
        blocks.append(block.data)
        n_bytes += len(block.data)
        if n_bytes > max_bytes:
            return None
    return b"".join(blocks)
