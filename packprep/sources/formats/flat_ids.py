"""Read flat arrays of token ids, for the formats that store all documents in one array.

```
megatron      .bin   ids    .idx       sequences and documents
datatrove     .ds    ids    .ds.index  document ends            .ds.loss   trained ids
token_stream  file   ids, with eos after each document
```

In formats with an index, documents are numbered, and a split is a run of consecutive documents.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from packprep.dataset.boundaries import offsets_of
from packprep.errors import SourceError
from packprep.sources.formats.batch import (
    TOKEN_TEXT_BYTES,
    Batch,
    IdLists,
    Reject,
    are_too_long,
    slices,
    source_errors,
    too_many_tokens,
)
from packprep.storage import is_url, locate


class Runs(NamedTuple):
    """The division of a file's numbered documents into splits."""

    documents: int
    pieces: int  # number of splits

    @classmethod
    def of(cls, documents: int, size: int, piece_bytes: int) -> "Runs":
        """Return one split per `piece_bytes` of `size`, but at most one split per document."""
        return cls(documents, min(documents, -(-size // piece_bytes)))

    def numbers(self, piece: int) -> range:
        """Return the numbers of the documents in a split."""
        begin, end = (p * self.documents // self.pieces for p in (piece, piece + 1))
        return range(begin, end)

    def pieces_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the splits that contain the documents with these numbers, int64[k], ascending."""
        ends = np.array([self.numbers(piece).stop for piece in range(self.pieces)], np.int64)
        piece_numbers = np.unique(np.searchsorted(ends, positions, "right"))
        return piece_numbers[piece_numbers < self.pieces]

    def checked(self, piece: int, path: str) -> range:
        """Return `numbers(piece)` for a split of the plan.

        Raises:
            SourceError: If the index at `path` has fewer documents than when the plan was made.
        """
        if piece >= self.pieces:
            raise SourceError(
                f"{path}: it lists {self.documents} documents, fewer than when the plan was"
                " made\n"
                "hint: restore the original file, or build into a new output folder"
            )
        return self.numbers(piece)


def id_batches(
    file: int,
    positions: np.ndarray,
    sizes: np.ndarray,
    batch_bytes: int,
    read: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray | None]],
) -> Iterator[Batch]:
    """Yield documents of ids in batches of about `batch_bytes`.

    Each token counts as TOKEN_TEXT_BYTES. A document of more than MAX_DOCUMENT_TOKENS becomes a
    reject and is not read.

    Args:
        file: Index of the documents' file.
        positions: int64[n], positions of the documents.
        sizes: int64[n], number of tokens of each document.
        batch_bytes: Content size of a batch in bytes.
        read: Function that takes numbers of documents, int64[k] below n, and returns their
            concatenated ids and weights. The weights are float32, or None if all are 1.
    """
    for batch_slice in slices(np.maximum(sizes * TOKEN_TEXT_BYTES, 1), batch_bytes):
        documents = np.arange(batch_slice.start, batch_slice.stop)
        is_large = are_too_long(sizes[documents])
        rejects = [
            Reject(file, int(positions[i]), *too_many_tokens(int(sizes[i])))
            for i in documents[is_large].tolist()
        ]
        documents = documents[~is_large]
        ids, weights = read(documents)
        tokens = IdLists(ids, offsets_of(sizes[documents]))
        files = np.full(len(documents), file, np.int32)
        yield Batch([], files, positions[documents], rejects, {}, tokens, token_weights=weights)


def damaged(path: str, problem: str, files: str = "the file") -> SourceError:
    """Return the error for a damaged file. `files` names what has to be fetched again."""
    return SourceError(
        f"{path}: damaged: {problem}\nhint: fetch {files} again, or take it out of the recipe"
    )


def array_at(file: Any, path: str, offset: int, dtype: str | np.dtype, count: int) -> np.ndarray:
    """Return `count` numbers of an open file from byte `offset` on, as an array of `dtype`.

    Raises:
        SourceError: If the file ends too early.
    """
    data = bytearray(count * np.dtype(dtype).itemsize)
    read_into(file, path, offset, memoryview(data))
    return np.frombuffer(data, dtype)


def joined_runs(
    file: Any, path: str, dtype: np.dtype, begins: np.ndarray, ends: np.ndarray
) -> np.ndarray:
    """Return the numbers of several runs of an open file as one array. Adjacent runs are read once.

    Args:
        file: The file.
        path: Its path, for error messages.
        dtype: The dtype of the numbers.
        begins: int64[k], the first byte of each run.
        ends: int64[k], the byte after each run.

    Raises:
        SourceError: If the file ends too early.
    """
    joined = np.empty(int((ends - begins).sum()) // dtype.itemsize, dtype)
    # A run that starts where the previous run ends is read together with it.
    is_start = np.append(True, begins[1:] != ends[:-1])[: len(begins)]
    starts = np.flatnonzero(is_start)
    stops = np.append(starts[1:], len(begins))[: len(starts)] - 1
    target, filled_bytes = joined.view(np.uint8).data, 0
    for a, b in zip(begins[starts].tolist(), ends[stops].tolist(), strict=True):
        read_into(file, path, a, target[filled_bytes : filled_bytes + b - a])
        filled_bytes += b - a
    return joined


def read_into(file: Any, path: str, offset: int, target: memoryview) -> None:
    """Fill `target` with the bytes of an open file from byte `offset` on.

    Raises:
        SourceError: If the file ends too early.
    """
    file.seek(offset)
    filled_bytes = 0
    while filled_bytes < len(target):
        count = file.readinto(target[filled_bytes:])
        if not count:
            raise damaged(path, f"it ends {len(target) - filled_bytes} bytes too early")
        filled_bytes += count


def size_on_disk(path: str) -> int:
    """Return the size of the file at a path or URL in bytes.

    Raises:
        SourceError: If the file is missing or cannot be read.
    """
    with source_errors(path):
        if not is_url(path):
            return Path(path).stat().st_size
        remote, name = locate(path)
        size = remote.size(name)
        if size is None:
            raise FileNotFoundError(path)
        return size
