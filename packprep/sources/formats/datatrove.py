"""Read datatrove's tokenized files: a .ds file with token ids, and its .ds.index file.

```
a.ds         ids u16 or u32, all documents concatenated
a.ds.index   ends u64[D]: document d consists of the ids from ends[d - 1], or 0, to ends[d]
a.ds.loss    u8[ids], 1 for a trained id and 0 for an untrained one; only if it was asked for
a.ds.metadata  text: TOKENIZER|BYTES_OF_AN_ID, then the number of ids; only for messages
```

All numbers are little-endian. The writer is `TokenizedFile` in
datatrove/pipeline/tokens/tokenizer.py, which DocumentTokenizer and its merger use. nanotron reads
these files. The last end and the size of the .ds file give the number of bytes of an id.

A split is a run of consecutive documents. Only the index entries of that run are read.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import BinaryIO, NamedTuple

import numpy as np

from packprep.errors import SourceError
from packprep.sources.formats.batch import (
    PIECE_BYTES,
    Batch,
    Choice,
    Keep,
    Slice,
    kept,
    open_source,
)
from packprep.sources.formats.compressed import Decoders
from packprep.sources.formats.fields import Fields
from packprep.sources.formats.flat_ids import (
    Runs,
    array_at,
    damaged,
    id_batches,
    joined_runs,
    size_on_disk,
)

INDEX, LOSS, METADATA = ".index", ".loss", ".metadata"
"""Endings of the files next to a .ds file, after the name of the .ds file."""
_DTYPES: dict[int, np.dtype] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_ENDS_AT_ONCE = 1 << 20


class _Index(NamedTuple):
    """The index of a .ds file, checked against the sizes of the files."""

    dtype: np.dtype
    documents: int
    ids: int


class _Files(NamedTuple):
    """The open files of one .ds file."""

    path: str
    ids_file: BinaryIO
    index_file: BinaryIO
    loss_file: BinaryIO | None


def pieces(
    path: str, size: int, text_key: str, tokens: bool, piece_bytes: int = PIECE_BYTES
) -> int:
    """Return the number of splits of a .ds file. Only the last entry of its index is read.

    `size` is the summed size of the .ds file and the files next to it, in bytes.
    """
    with _opened(path, size) as files:
        return Runs.of(_read_index(files).documents, size, piece_bytes).pieces


def bytes_per_token(work_range: Slice, text_key: str) -> float:
    """Return the bytes of a .ds file and the files next to it, divided by the number of its ids."""
    with _opened(work_range.path, work_range.size) as files:
        return work_range.size / max(1, _read_index(files).ids)


def pieces_at(path: str, size: int, positions: np.ndarray) -> np.ndarray:
    """For a .ds file, return the splits that contain the documents at `positions`, int64[k]."""
    with _opened(path, size) as files:
        return Runs.of(_read_index(files).documents, size, PIECE_BYTES).pieces_at(positions)


def numbers(work_range: Slice, decoders: Decoders) -> range:
    """Return the document numbers of the whole split that a work range belongs to."""
    with _opened(work_range.path, work_range.size) as files:
        index = decoders.fact(work_range.path + INDEX, lambda: _read_index(files))
    return Runs.of(index.documents, work_range.size, work_range.piece_bytes).numbers(
        work_range.piece
    )


def read(
    work_range: Slice,
    text_key: str,
    keep: Keep | None,
    batch_bytes: int,
    decoders: Decoders,
    fields: Fields | None,
) -> Iterator[Batch]:
    """Yield the documents of a work range; see `formats.read`."""
    with _opened(work_range.path, work_range.size) as files:
        index = decoders.fact(work_range.path + INDEX, lambda: _read_index(files))
        runs = Runs.of(index.documents, work_range.size, work_range.piece_bytes)
        numbers = runs.checked(work_range.piece, work_range.path + INDEX)
        low, high = work_range.range(len(numbers))
        first_number = numbers.start if isinstance(keep, Choice) else numbers.start + low
        for begin in range(first_number, numbers.start + high, _ENDS_AT_ONCE):
            end = min(begin + _ENDS_AT_ONCE, numbers.start + high)
            bounds = _bounds(files, index, begin, end)
            sizes = np.diff(bounds)
            positions = np.arange(begin, end, dtype=np.int64)
            # Documents before the work range are passed only for a Choice.
            is_wanted = kept(keep, work_range.file, positions, sizes.copy)
            documents = np.flatnonzero(is_wanted & (positions >= numbers.start + low))
            content = _Content(
                files, index.dtype, bounds[:-1][documents], sizes[documents], fields is not None
            )
            yield from id_batches(
                work_range.file, positions[documents], sizes[documents], batch_bytes, content.read
            )


class _Content(NamedTuple):
    """The ids of n documents in an open .ds file, and whether each id is trained."""

    files: _Files
    dtype: np.dtype
    begins: np.ndarray  # int64[n], index of each document's first id in the .ds file
    sizes: np.ndarray  # int64[n]
    has_masks: bool

    def read(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the concatenated ids and weights of some documents, as `id_batches` needs them."""
        begins = self.begins[documents]
        ends, width = begins + self.sizes[documents], self.dtype.itemsize
        ids = joined_runs(
            self.files.ids_file, self.files.path, self.dtype, begins * width, ends * width
        )
        if self.files.loss_file is None or not self.has_masks:
            return ids, None
        path = self.files.path + LOSS
        # The .loss file has one byte per id, so indices of ids are byte positions.
        flags = joined_runs(self.files.loss_file, path, np.dtype("u1"), begins, ends)
        if len(flags) and int(flags.max()) > 1:
            raise damaged(path, f"it has the value {int(flags.max())}, which is neither 0 nor 1")
        return ids, None if flags.all() else flags.astype(np.float32)


def _bounds(files: _Files, index: _Index, begin: int, end: int) -> np.ndarray:
    """Return the bounds of the documents from number `begin` to `end`, int64[end - begin + 1].

    Raises:
        SourceError: If the ends of the documents do not ascend, or are beyond the .ds file.
    """
    path = files.path + INDEX
    # A document starts where the previous document ends, so one more end is read.
    first_end = max(begin - 1, 0)
    ends = array_at(files.index_file, path, 8 * first_end, "<u8", end - first_end).astype(np.int64)
    bounds = ends if begin else np.append(0, ends)
    is_wrong = (np.diff(bounds) < 0) | (bounds[1:] > index.ids) | (bounds[:-1] < 0)
    if is_wrong.any():
        i = int(np.flatnonzero(is_wrong)[0])
        problem = f"document {begin + i} has the ids from {bounds[i]} to {bounds[i + 1]}"
        raise _damaged(path, f"{problem}, and there are {index.ids}")
    return bounds


def _read_index(files: _Files) -> _Index:
    """Read the last entry of an index, and check it against the sizes of the files.

    Raises:
        SourceError: If the index does not match the .ds file or the .ds.loss file.
    """
    path = files.path + INDEX
    index_bytes, ids_bytes = files.index_file.seek(0, 2), files.ids_file.seek(0, 2)
    if index_bytes % 8:
        raise _damaged(path, f"it has {index_bytes} bytes, but each document end takes 8")
    ids = 0
    if index_bytes:
        ids = int(array_at(files.index_file, path, index_bytes - 8, "<u8", 1)[0])
    dtypes = [dtype for n, dtype in _DTYPES.items() if ids * n == ids_bytes]
    if not dtypes:
        raise _damaged(
            path,
            f"its last document ends at id {ids}, but the .ds has {ids_bytes} bytes, and an id"
            " takes 2 or 4",
        )
    if files.loss_file is not None and (actual_bytes := files.loss_file.seek(0, 2)) != ids:
        raise _damaged(files.path + LOSS, f"it has {actual_bytes} bytes, but the .ds has {ids} ids")
    return _Index(dtypes[0], index_bytes // 8, ids)


def tokenizer_in_notes(path: str) -> str:
    """Return the tokenizer that a .ds.metadata file names, or "" without such a file."""
    metadata = _metadata(path)
    return metadata[1] if metadata else ""


def mistake_of_notes(path: str) -> str:
    """Return a message if a .ds.metadata file contradicts the .ds file at `path`, otherwise ""."""
    metadata, size = _metadata(path), size_on_disk(path)
    if metadata is None or int(metadata[2]) * int(metadata[3]) == size:
        return ""
    return (
        f"its {METADATA} says {metadata[3]} ids of {metadata[2]} bytes, but it has {size} bytes\n"
        "hint: fetch the .ds file and the files next to it again"
    )


def _metadata(path: str) -> re.Match | None:
    """Return (tokenizer, bytes of an id, number of ids) as groups of a match.

    Return None if there is no readable file of metadata. The writer omits it on request.
    """
    try:
        size = size_on_disk(path + METADATA)
    except SourceError:
        return None
    with open_source(path + METADATA, size) as file:
        text = file.read(1 << 12).decode("utf-8", "replace")
    return re.match(r"(.*)\|(\d{1,3})\n(\d{1,18})(\n|$)", text)


def _damaged(path: str, problem: str) -> SourceError:
    return damaged(path, problem, "the .ds file and the files next to it")


@contextmanager
def _opened(path: str, size: int) -> Iterator[_Files]:
    """Open a .ds file and the files next to it.

    The planned `size` says whether the plan has a .ds.loss file.

    Raises:
        SourceError: If the summed size of the files differs from `size`.
    """
    sizes = [size_on_disk(path), size_on_disk(path + INDEX)]
    if has_loss := sum(sizes) != size:
        with suppress(SourceError):  # Without this file, the sizes below differ.
            sizes.append(size_on_disk(path + LOSS))
    if sum(sizes) != size:
        raise SourceError(
            f"{path}: the file and the files next to it have {sum(sizes)} bytes together, but had"
            f" {size} when the plan was made\n"
            "hint: restore the files, or build into a new output folder"
        )
    with ExitStack() as opened:
        ids, index = (
            opened.enter_context(open_source(path + ending, n))
            for ending, n in zip(("", INDEX), sizes[:2], strict=True)
        )
        loss = opened.enter_context(open_source(path + LOSS, sizes[2])) if has_loss else None
        yield _Files(path, ids, index, loss)
