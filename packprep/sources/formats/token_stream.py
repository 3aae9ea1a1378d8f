"""Read files that are one array of token ids, with eos after each document.

```
raw      ids                                     Dolma and OLMo-core (.npy), nanoGPT (.bin)
llm.c    header i32[256], ids                    magic, version and number of ids first
NumPy    "\\x93NUMPY", header, ids               a one-dimensional array that `numpy.save` wrote
```

A document consists of the ids after the previous eos, and ends with its own eos or with the file.
So eos has the role that a line feed has in JSON Lines. The position of a document is the byte
offset of its first id. If eos comes before each document instead, as in the data of llm.c, the
first document is empty.

A raw file does not name its dtype. The writers choose it as follows, and `token_dtype` of the
source overrides it:

- Dolma and OLMo-core: the smallest unsigned type that holds all ids of the vocabulary
  (dolma/tokenizer/tokenizer.py, olmo_core/data/numpy_dataset.py). packprep expects it in raw files
  with the ending .npy.
- nanoGPT: uint16 (data/openwebtext/prepare.py). packprep expects it in all other raw files.

The header of llm.c is defined in dev/data/data_common.py.
"""

import io
import struct
import tokenize
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from packprep.dataset.boundaries import offsets_of
from packprep.errors import SourceError
from packprep.sources.formats import batch as limits
from packprep.sources.formats.batch import (
    Batch,
    Choice,
    IdLists,
    Keep,
    Reject,
    Slice,
    kept,
    open_source,
    slices,
)
from packprep.sources.formats.compressed import Decoders
from packprep.sources.formats.fields import Fields
from packprep.sources.formats.flat_ids import array_at, damaged

_HEADER_BYTES = 1024
_LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""Maps (magic, version) of llm.c's header to the dtype of the ids."""
_LLM_C_EVAL = 20240522
_NUMPY = b"\x93NUMPY"
_FOREIGN = {
    b"MMIDIDX\0": "Megatron's index",
    b"PK\x03\x04": "a ZIP file, such as .npz",
    b"\x1f\x8b": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x80\x04\x95": "a pickled object",
}
"""Maps the first bytes of files that are no array of ids to what they are."""
_IDS_AT_ONCE = 1 << 20
_LEAST_IDS = 1 << 14
"""Number of ids that are read at once, at most and at least."""


class IdArray(NamedTuple):
    """The location of the ids in a file."""

    dtype: np.dtype
    begin: int  # byte offset of the first id
    ids: int  # number of ids

    def first_id(self, byte: int) -> int:
        """Return the index of the first id that begins at a byte offset or after it."""
        return min(max(0, -(-(byte - self.begin) // self.dtype.itemsize)), self.ids)


def bytes_per_token(work_range: Slice, text_key: str) -> float:
    """Return the bytes of an id. Each document's eos is among its ids."""
    with open_source(work_range.path, work_range.size) as file:
        return float(array_of(work_range, file).dtype.itemsize)


def read(
    work_range: Slice,
    text_key: str,
    keep: Keep | None,
    batch_bytes: int,
    decoders: Decoders,
    fields: Fields | None,
) -> Iterator[Batch]:
    """Yield the documents of a work range; see `formats.read`."""
    first_byte = work_range.piece * work_range.piece_bytes
    low, high = work_range.range(min(work_range.piece_bytes, work_range.size - first_byte))
    if low == high:
        return
    with open_source(work_range.path, work_range.size) as file:
        array = array_of(work_range, file)
        own_begin = array.first_id(first_byte + low)
        begin = array.first_id(first_byte) if isinstance(keep, Choice) else own_begin
        documents = _Documents(work_range, file, array, array.first_id(first_byte + high))
        for group in documents.starting_from(begin):
            positions = array.begin + group.begins * array.dtype.itemsize
            # Documents before the work range are only for the Choice.
            is_wanted = kept(keep, work_range.file, positions, group.sizes.copy) & (
                group.begins >= own_begin
            )
            for batch_slice in slices(group.sizes * limits.TOKEN_TEXT_BYTES, batch_bytes):
                chosen = np.arange(batch_slice.start, batch_slice.stop)[is_wanted[batch_slice]]
                if len(chosen):
                    yield group.batch(work_range.file, positions, chosen)


class _Found(NamedTuple):
    """Consecutive documents of a file.

    A document with more than MAX_DOCUMENT_TOKENS ids has no ids here. Its size is
    MAX_DOCUMENT_TOKENS + 1, whatever its real size.
    """

    ids: np.ndarray
    begins: np.ndarray  # int64[n], index of each document's first id in the file
    sizes: np.ndarray  # int64[n], number of ids, including eos
    firsts: np.ndarray  # int64[n], index of each document's first id in `ids`

    def batch(self, file: int, positions: np.ndarray, documents: np.ndarray) -> Batch:
        """Return a batch of some documents, which `documents` names by number."""
        is_large = limits.are_too_long(self.sizes[documents])
        reason = "too_large", f"more than {limits.MAX_DOCUMENT_TOKENS} tokens"
        rejects = [
            Reject(file, position, *reason) for position in positions[documents[is_large]].tolist()
        ]
        numbers = documents[~is_large]
        offsets = offsets_of(self.sizes[numbers])
        firsts, ends = self.firsts[numbers], self.firsts[numbers] + self.sizes[numbers]
        # Neighbouring documents are one range of `ids`, so few ranges are copied.
        starts = np.flatnonzero(np.append(True, firsts[1:] != ends[:-1])[: len(numbers)])
        stops = np.append(starts[1:], len(numbers))[: len(starts)] - 1
        spans = zip(firsts[starts].tolist(), ends[stops].tolist(), strict=True)
        ids = np.concatenate([self.ids[:0], *(self.ids[a:b] for a, b in spans)])
        files = np.full(len(numbers), file, np.int32)
        return Batch([], files, positions[numbers], rejects, {}, IdLists(ids, offsets))


class _Documents(NamedTuple):
    """The documents of a file that begin before the id number `stop`."""

    part: Slice
    file: BinaryIO
    array: IdArray
    stop: int

    def starting_from(self, first_id: int) -> Iterator[_Found]:
        """Yield the documents that begin at the id number `first_id` or after it, in order."""
        eos = _eos(self.part)
        begin = self._first_begin(first_id, eos)
        rest_ids, size, next_id = self._ids(begin, begin), 0, begin
        while begin < self.stop:
            # `begin` is the start of an unfinished document, which has `size` ids before `next_id`.
            # Its ids are in `rest_ids`, unless it is too long.
            count = min(max(self.stop - next_id, _LEAST_IDS), _IDS_AT_ONCE)
            new = self._ids(next_id, min(next_id + count, self.array.ids))
            ends = np.flatnonzero(new == eos) + 1 + next_id
            next_id += len(new)
            if next_id == self.array.ids and (not len(ends) or ends[-1] < next_id):
                ends = np.append(ends, next_id)  # The last document of the file has no eos.
            if begin + limits.MAX_DOCUMENT_TOKENS < next_id and not len(ends):
                # The document is too long to keep, so only its size counts.
                rest_ids, size = rest_ids[:0], next_id - begin
                if next_id < self.stop:
                    continue
                ends = np.array([next_id])  # Its end is in another work range.
            if not len(ends):
                rest_ids, size = np.concatenate((rest_ids, new)), next_id - begin
                continue
            begins = np.append(begin, ends[:-1])
            # Documents that begin at `stop` or later belong to other work ranges.
            number = int(np.searchsorted(begins, self.stop))
            begins, ends = begins[:number], ends[:number]
            sizes = np.minimum(ends - begins, limits.MAX_DOCUMENT_TOKENS + 1)
            # A document that is too long has lost its first ids, so its start is clipped to 0.
            ids = np.concatenate((rest_ids, new)) if len(rest_ids) == size else new
            yield _Found(ids, begins, sizes, np.maximum(begins - (next_id - len(ids)), 0))
            begin = int(ends[-1])
            rest_ids, size = new[begin - (next_id - len(new)) :], next_id - begin

    def _first_begin(self, first_id: int, eos: int) -> int:
        """Return the number of the first id at `first_id` or after it that begins a document."""
        if not first_id:
            return 0
        for begin in range(first_id - 1, self.stop - 1, _IDS_AT_ONCE):
            ends = np.flatnonzero(self._ids(begin, min(begin + _IDS_AT_ONCE, self.stop - 1)) == eos)
            if len(ends):
                return begin + int(ends[0]) + 1
        return self.stop

    def _ids(self, begin: int, end: int) -> np.ndarray:
        """Return the ids from number `begin` to `end`."""
        dtype = self.array.dtype
        byte = self.array.begin + begin * dtype.itemsize
        return array_at(self.file, self.part.path, byte, dtype, end - begin)


def _eos(work_range: Slice) -> int:
    assert work_range.stream is not None
    if work_range.stream.eos is None:
        raise SourceError(
            f"{work_range.path}: the documents of the file end with eos, but the tokenizer has no"
            " known eos\n"
            "hint: set [specials] eos to the token or id after each document"
        )
    return work_range.stream.eos


def array_of(work_range: Slice, file: Any) -> IdArray:
    """Return the location of the ids in the open file of a work range.

    Raises:
        SourceError: If the file is damaged, or is not an array of ids.
    """
    begin = _begin_of(work_range, file)
    if begin.startswith(_NUMPY):
        return _of_numpy(work_range, begin)
    for magic, file_kind in _FOREIGN.items():
        if begin.startswith(magic):
            raise SourceError(
                f"{work_range.path}: not an array of token ids, but {file_kind}\n"
                "hint: take the file out of the recipe, or set format to the format of the file"
            )
    if len(begin) == _HEADER_BYTES:
        magic_and_version = struct.unpack("<ii", begin[:8])
        if magic_and_version[0] == _LLM_C_EVAL:
            raise SourceError(
                f"{work_range.path}: llm.c's file of an evaluation with answers to choose from,"
                " not a text\n"
                "hint: take the file out of the recipe"
            )
        if magic_and_version in _LLM_C:
            count = struct.unpack("<i", begin[8:12])[0]
            return _checked(
                work_range, IdArray(np.dtype(_LLM_C[magic_and_version]), _HEADER_BYTES, count)
            )
    return _raw(work_range, begin)


def _begin_of(work_range: Slice, file: Any) -> bytes:
    return array_at(file, work_range.path, 0, "u1", min(work_range.size, _HEADER_BYTES)).tobytes()


def _of_numpy(work_range: Slice, begin: bytes) -> IdArray:
    """Return the location of the ids in a file with NumPy's header."""
    shape, dtype, offset = numpy_header(work_range.path, begin)
    if len(shape) != 1 or dtype.kind not in "ui":
        raise SourceError(
            f"{work_range.path}: a NumPy array of shape {shape} and dtype {dtype.str}, but token"
            " ids are a one-dimensional array of integers\n"
            "hint: write the documents one after the other, each with eos, or as lists in Parquet"
        )
    return _checked(work_range, IdArray(dtype, offset, shape[0]))


def numpy_header(path: str, begin: bytes) -> tuple[tuple[int, ...], np.dtype, int]:
    """Return the shape, the dtype and the header's size of a file that `numpy.save` wrote.

    `begin` has the first bytes of the file at `path`.

    Raises:
        SourceError: If the header is damaged, or the array is not stored row by row.
    """
    header = io.BytesIO(begin)
    try:
        version = np.lib.format.read_magic(header)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, by_column, dtype = read_header(header)
    # NumPy parses the header as Python, and passes on the errors of this parser.
    except (ValueError, KeyError, TypeError, SyntaxError, tokenize.TokenError) as error:
        raise damaged(path, f"its NumPy header is not readable: {error}") from None
    if by_column and len(shape) > 1:
        raise SourceError(
            f"{path}: a NumPy array that is stored column by column\n"
            "hint: save numpy.ascontiguousarray(array)"
        )
    return shape, dtype, header.tell()


def _raw(work_range: Slice, begin: bytes) -> IdArray:
    """Return the location of the ids in a file without a header.

    Raises:
        SourceError: If the dtype that follows from the vocabulary does not fit the file.
    """
    assert work_range.stream is not None
    stream, is_npy = work_range.stream, work_range.path.lower().endswith(".npy")
    dtype = np.dtype(stream.dtype) if stream.dtype != "auto" else np.dtype("u2")
    if stream.dtype == "auto" and is_npy:
        dtype = np.min_scalar_type(stream.vocab_size - 1)
    dtype = dtype.newbyteorder("<")
    advice = (
        'hint: set token_dtype of the source to the dtype of the ids, such as "uint16" or "uint32"'
    )
    # The file does not name its dtype, so the dtype is checked against vocabulary and values.
    if stream.dtype == "auto" and stream.vocab_size - 1 > np.iinfo(dtype).max:
        raise SourceError(
            f"{work_range.path}: a file without a header, whose ids would be read as {dtype.name},"
            f" but the vocabulary has {stream.vocab_size} ids\n{advice}"
        )
    if work_range.size % dtype.itemsize:
        raise damaged(
            work_range.path,
            f"it has {work_range.size} bytes, but an id of the dtype {dtype.name} takes"
            f" {dtype.itemsize}",
        )
    if stream.dtype == "auto" and _is_wider(begin, dtype):
        raise SourceError(
            f"{work_range.path}: read as {dtype.name}, every second id is less than 16, so the ids"
            f" are probably wider\n{advice}"
        )
    return IdArray(dtype, 0, work_range.size // dtype.itemsize)


def _is_wider(begin: bytes, dtype: np.dtype) -> bool:
    """Return whether the ids at the start of a raw file take twice the bytes of `dtype`.

    The upper half of each id is then 0, or small for a vocabulary of more than 65,536 ids. The
    lower halves are not.
    """
    ids = np.frombuffer(begin[: len(begin) // (2 * dtype.itemsize) * 2 * dtype.itemsize], dtype)
    lower, upper = int(ids[::2].max(initial=0)), int(ids[1::2].max(initial=0))
    if upper == 0:
        return len(ids) >= 16 and lower > 0
    return len(ids) >= 64 and upper < 16 and lower >= 256


def _checked(work_range: Slice, array: IdArray) -> IdArray:
    """Return `array`, which comes from a header.

    Raises:
        SourceError: If the size of the file does not fit the header.
    """
    size = array.begin + array.ids * array.dtype.itemsize
    if array.ids < 0 or size != work_range.size:
        raise damaged(
            work_range.path,
            f"its header says {array.ids} ids of the dtype {array.dtype.name}, which need {size}"
            f" bytes, but it has {work_range.size}",
        )
    return array
