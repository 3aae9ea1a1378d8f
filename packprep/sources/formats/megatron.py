"""Read Megatron's indexed datasets: pairs of a .bin file with token ids and an .idx file.

```
.idx   "MMIDIDX\\0\\0"  version u64 = 1  dtype u8  S u64  N u64
       lengths i32[S]  pointers i64[S]  document_indices i64[N]  [modes i8[S]]      little-endian
```

Sequence s consists of `lengths[s]` ids from byte `pointers[s]` of the .bin on. Document d consists
of the sequences from `document_indices[d]` to `document_indices[d + 1]`, so there are N − 1
documents. Megatron's own writer and reader are megatron/core/datasets/indexed_dataset.py.

A split is a run of consecutive documents. Only the index entries of that run are read, because the
index of a billion documents is too large to read completely.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, NamedTuple

import numpy as np

from packprep.dataset.boundaries import descents, offsets_of
from packprep.errors import SourceError
from packprep.sources.formats.batch import (
    PIECE_BYTES,
    Batch,
    Choice,
    Keep,
    Slice,
    kept,
    open_source,
    slices,
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

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = {6: "float64", 7: "float32"}
_SEQUENCES = 1 << 20  # Entries of this many sequences, or of one document, are loaded at once.


class Index(NamedTuple):
    """The header of an .idx file, checked against the sizes of both files."""

    dtype: np.dtype
    sequences: int
    documents: int
    has_modes: bool
    ids_bytes: int  # size of the .bin

    @property
    def pointers_at(self) -> int:
        """Return the byte offset of the pointers in the .idx."""
        return _HEADER.size + 4 * self.sequences

    @property
    def documents_at(self) -> int:
        """Return the byte offset of the document indices in the .idx."""
        return self.pointers_at + 8 * self.sequences

    @property
    def modes_at(self) -> int:
        """Return the byte offset of the modes in the .idx, if it has modes."""
        return self.documents_at + 8 * (self.documents + 1)


def index_path(path: str) -> str:
    """Return the path of the .idx file that belongs to a .bin file."""
    return path[:-4] + (".IDX" if path.endswith(".BIN") else ".idx")


def pieces(
    path: str, size: int, text_key: str, tokens: bool, piece_bytes: int = PIECE_BYTES
) -> int:
    """Return the number of splits of a pair of files. Only the header of the .idx is read.

    `size` is the summed size of the pair in bytes.
    """
    with _opened(path, size) as (index_file, ids_file):
        index = _read_index(path, index_file, ids_file)
    return Runs.of(index.documents, size, piece_bytes).pieces


def bytes_per_token(work_range: Slice, text_key: str) -> float:
    """Return the bytes of a pair of files, .bin and .idx, divided by the number of its tokens."""
    with _opened(work_range.path, work_range.size) as (index_file, ids_file):
        index = _read_index(work_range.path, index_file, ids_file)
    return work_range.size / max(1, index.ids_bytes // index.dtype.itemsize)


def pieces_at(path: str, size: int, positions: np.ndarray) -> np.ndarray:
    """For a pair of files, return the splits that contain the documents at `positions`.

    `positions`, int64[n], has the numbers of the documents in the index. The result, int64[k], has
    ascending indices of splits in the pair.
    """
    with _opened(path, size) as (index_file, ids_file):
        index = _read_index(path, index_file, ids_file)
    return Runs.of(index.documents, size, PIECE_BYTES).pieces_at(positions)


def numbers(work_range: Slice, decoders: Decoders) -> range:
    """Return the document numbers of the whole split that a work range belongs to.

    Document numbers count from the start of the index.
    """
    with _opened(work_range.path, work_range.size) as (index_file, ids_file):
        path = index_path(work_range.path)
        index = decoders.fact(path, lambda: _read_index(work_range.path, index_file, ids_file))
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
    with _opened(work_range.path, work_range.size) as (index_file, ids_file):
        path = index_path(work_range.path)
        index = decoders.fact(path, lambda: _read_index(work_range.path, index_file, ids_file))
        runs = Runs.of(index.documents, work_range.size, work_range.piece_bytes)
        numbers = runs.checked(work_range.piece, path)
        low, high = work_range.range(len(numbers))
        if low == high:
            return
        chosen_from, begin, end = numbers.start, numbers.start + low, numbers.start + high
        # The sequences of document begin + i are bounds[i] … bounds[i + 1] − 1.
        bounds = array_at(index_file, path, index.documents_at + 8 * begin, "<i8", end - begin + 1)
        falls = np.flatnonzero(descents(bounds))
        if len(falls) or bounds[0] < 0 or bounds[-1] > index.sequences:
            i = int(falls[0]) if len(falls) else 0
            raise _damaged(
                path,
                f"document {begin + i} has the sequences from {bounds[i]} to {bounds[i + 1]}",
            )
        # A Choice also counts the documents of the split before the work range.
        positions = np.arange(
            chosen_from if isinstance(keep, Choice) else begin, end, dtype=np.int64
        )
        # The last end − begin entries belong to the work range.
        is_wanted = kept(
            keep, work_range.file, positions, lambda: _sizes(path, index, index_file, positions)
        )[begin - end :]
        # Documents may have very many sequences, so entries are loaded in parts.
        for group_slice in slices(np.maximum(np.diff(bounds), 1), _SEQUENCES):
            if is_wanted[group_slice].any():
                own_bounds = bounds[group_slice.start : group_slice.stop + 1]
                group = _Group(
                    path,
                    index,
                    begin + group_slice.start,
                    own_bounds,
                    *_entries(path, index, index_file, own_bounds),
                )
                yield from group.batches(
                    work_range.file, ids_file, is_wanted[group_slice], batch_bytes
                )


def _entries(
    path: str, index: Index, file: BinaryIO, bounds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """For the sequences of n consecutive documents, return (lengths, pointers).

    For each sequence, `lengths`, int64, has the number of ids, and `pointers`, int64, has the byte
    offset of the first id in the .bin. `bounds`, int64[n + 1], has the index of each document's
    first sequence, then the index of the sequence after the last document.

    Raises:
        SourceError: If a sequence extends beyond the .bin, or has a mode other than 0.
    """
    s, count = int(bounds[0]), int(bounds[-1] - bounds[0])
    lengths = array_at(file, path, _HEADER.size + 4 * s, "<i4", count).astype(np.int64)
    pointers = array_at(file, path, index.pointers_at + 8 * s, "<i8", count)
    last_pointer = index.ids_bytes - lengths * index.dtype.itemsize  # largest valid pointer
    odd = np.flatnonzero((lengths < 0) | (pointers < 0) | (pointers > last_pointer))
    if len(odd):
        i = int(odd[0])
        raise _damaged(
            path,
            f"sequence {s + i} has {lengths[i]} ids from byte {pointers[i]} on, but the .bin has"
            f" only {index.ids_bytes} bytes",
        )
    if (
        index.has_modes
        and (modes := np.flatnonzero(array_at(file, path, index.modes_at + s, "i1", count))).size
    ):
        raise SourceError(
            f"{path}: sequence {s + int(modes[0])} has a mode other than 0, so the data are"
            " multimodal, and only text can be read\n"
            "hint: take the file out of the recipe"
        )
    return lengths, pointers


def _sizes(path: str, index: Index, file: BinaryIO, positions: np.ndarray) -> np.ndarray:
    """Return the number of tokens of n consecutive documents, int64[n].

    A damaged index entry does not raise an error here but is clipped to the valid range. The error
    is raised when the document is read.
    """
    first_number, count = int(positions[0]), len(positions)
    bounds = array_at(file, path, index.documents_at + 8 * first_number, "<i8", count + 1).clip(
        0, index.sequences
    )
    s, sequences = int(bounds[0]), max(int(bounds[-1] - bounds[0]), 0)
    lengths = array_at(file, path, _HEADER.size + 4 * s, "<i4", sequences).astype(np.int64)
    sequence_offsets = offsets_of(lengths)
    return np.diff(sequence_offsets[(bounds - s).clip(0, sequences)]).clip(0)


class _Group(NamedTuple):
    """Consecutive documents with the index entries of all their sequences."""

    path: str  # path of the .idx
    head: Index
    first: int  # number of the first document
    bounds: np.ndarray  # int64[n + 1], first sequence of each document, then the end
    lengths: np.ndarray  # int64[sequences]
    pointers: np.ndarray  # int64[sequences]

    def batches(
        self, file: int, ids_file: BinaryIO, is_wanted: np.ndarray, batch_bytes: int
    ) -> Iterator[Batch]:
        """Yield the documents where `is_wanted`, bool[n], is True, as in `id_batches`."""
        documents = np.flatnonzero(is_wanted)
        sizes = np.diff(offsets_of(self.lengths)[self.bounds - self.bounds[0]])[documents]
        yield from id_batches(
            file,
            self.first + documents,
            sizes,
            batch_bytes,
            lambda numbers: (self._ids(ids_file, documents[numbers]), None),
        )

    def _ids(self, ids_file: BinaryIO, documents: np.ndarray) -> np.ndarray:
        """Return the concatenated ids of some documents of the group.

        Args:
            ids_file: The .bin file.
            documents: int64[k], numbers of the documents in the group.
        """
        # For documents with 2 and 1 sequences, which begin at 0 and 5, `indices` is [0, 1, 5].
        counts = np.diff(self.bounds)[documents]  # number of sequences per document
        begins = self.bounds[documents] - self.bounds[0]
        indices = np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(
            int(counts.sum())
        )
        begin = self.pointers[indices]
        end = begin + self.lengths[indices] * self.head.dtype.itemsize
        return joined_runs(ids_file, self.path, self.head.dtype, begin, end)


def _read_index(path: str, index_file: BinaryIO, ids_file: BinaryIO) -> Index:
    """Read the header of an index, and check it against the sizes of both files.

    Raises:
        SourceError: If the header is invalid or does not match the files.
    """
    path = index_path(path)
    index_bytes, ids_bytes = index_file.seek(0, 2), ids_file.seek(0, 2)
    if index_bytes < _HEADER.size:
        raise _damaged(path, f"it has {index_bytes} bytes, but its header needs {_HEADER.size}")
    magic, version, code, sequences, count = _HEADER.unpack(
        array_at(index_file, path, 0, "u1", _HEADER.size).tobytes()
    )
    if magic != _MAGIC:
        raise SourceError(
            f"{path}: not a Megatron index: it starts with {magic!r}, not {_MAGIC!r}\n"
            "hint: take the file out of the recipe, or set format to the format of the file"
        )
    if version != 1:
        raise SourceError(
            f"{path}: Megatron index version {version} is unknown; only version 1 can be read\n"
            "hint: write the data again"
        )
    if code not in _DTYPES:
        description = (
            f"ids of {_FLOATS[code]}, which cannot be token ids"
            if code in _FLOATS
            else f"an unknown dtype code, {code}"
        )
        raise SourceError(
            f"{path}: the index names {description}\nhint: write the data with an integer dtype"
        )
    # A sequence takes 12 bytes for length and pointer, and 1 more for a mode.
    least = _HEADER.size + 12 * sequences + 8 * count
    if index_bytes not in (least, least + sequences):
        raise _damaged(
            path,
            f"it lists {sequences} sequences and {count} document indices, which need {least}"
            f" bytes (with modes {least + sequences}), but has {index_bytes}",
        )
    index = Index(
        np.dtype(_DTYPES[code]), sequences, max(count - 1, 0), index_bytes > least, ids_bytes
    )
    # The documents must cover all sequences.
    first_sequence, last_sequence = (
        int(array_at(index_file, path, index.documents_at + 8 * i, "<i8", 1)[0]) if count else 0
        for i in (0, count - 1)
    )
    if (first_sequence, last_sequence) != (0, sequences):
        raise _damaged(
            path,
            f"its documents go from sequence {first_sequence} to {last_sequence}, but there are"
            f" {sequences}: its writer did not end the last document",
        )
    # The last length and the last pointer give the end of the .bin.
    end = 0
    if sequences:
        length = int(array_at(index_file, path, index.pointers_at - 4, "<i4", 1)[0])
        end = (
            int(array_at(index_file, path, index.documents_at - 8, "<i8", 1)[0])
            + length * index.dtype.itemsize
        )
    if end != ids_bytes:
        raise _damaged(
            path,
            f"its last sequence ends at byte {end} of the .bin, which has {ids_bytes}: the files"
            " are not a pair",
        )
    return index


def _damaged(path: str, problem: str) -> SourceError:
    return damaged(path, problem, "both files")


@contextmanager
def _opened(path: str, size: int) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open the .idx and the .bin file of a pair, in this order.

    Raises:
        SourceError: If the summed size of the pair differs from the planned `size`.
    """
    sizes = [size_on_disk(index_path(path)), size_on_disk(path)]
    if sum(sizes) != size:
        raise SourceError(
            f"{path}: the file and its .idx have {sum(sizes)} bytes together, but had {size} when"
            " the plan was made\n"
            "hint: restore both files, or build into a new output folder"
        )
    with (
        open_source(index_path(path), sizes[0]) as index_file,
        open_source(path, sizes[1]) as ids_file,
    ):
        yield index_file, ids_file
