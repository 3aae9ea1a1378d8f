"""Encode and open shards, and define the order, dtypes and shapes of their arrays.

A shard is a standard safetensors file:

    0        8              8 + n, a multiple of 4096
    ├────────┼──────────────┼─────────────────────────────────────────────────────────────┤
    n, u64   JSON, padded   tokens labels segment_ids loss_mask │ columns of 8, 4, 2, 1 byte
             with spaces

The header is canonical JSON. Arrays follow one another without gaps, in the order of `layout`, up
to the end of the file. Because seq_length is a multiple of 8, that order aligns every array to its
item size.

With io "pread", a file's arrays are read instead of mapped. If a file server is lost, reading
raises an error, while a map ends the process by SIGBUS.

    FileArray ── [row], part(…), read_row(…) ─► ShardBytes.read ─► preadv into the caller's array

preadv does not use the file's position, so threads and forked processes can share a ShardBytes.
"""

import json
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from packprep.dataset.manifest import Manifest, stored_columns
from packprep.dataset.segments import HEADER, Arrays
from packprep.errors import DatasetError
from packprep.forking import lazy
from packprep.format import open_file
from packprep.format.json_files import FORMAT, VERSION, no_duplicates, shard_name

CAN_PREAD = hasattr(os, "preadv")  # Windows does not have it.


class _Descriptor:
    """The descriptor of an open file, which is closed when its last reader is deleted."""

    def __init__(self, path: Path):
        self._file = open_file(path)
        self.number = self._file.fileno()

    def __del__(self):
        file = self.__dict__.pop("_file", None)  # It is missing if the file could not be opened.
        if file is not None:
            file.close()


class ShardBytes:
    """A file of `size` bytes, which stays open from its first read on.

    After a read that failed, the next one opens it again.
    """

    def __init__(self, path: Path, size: int):
        self.path = path
        self.size = size
        self._open: _Descriptor | None = None

    def _opened(self) -> _Descriptor:
        descriptor = _Descriptor(self.path)
        size = os.fstat(descriptor.number).st_size
        if size != self.size:
            raise DatasetError(
                f"{self.path}: its size changed after it was opened ({self.size} bytes then,"
                f" {size} now)"
            )
        self._open = descriptor
        return descriptor

    def open(self) -> None:
        """Open the file.

        Raises:
            DatasetError: If it cannot be opened, or its size has changed.
        """
        try:
            self._opened()
        except OSError as error:
            raise DatasetError(f"{self.path}: cannot be opened: {error}") from error

    def read(self, at: int, target: np.ndarray, name: str, row: int) -> None:
        """Fill an array with bytes of the file.

        Args:
            at: The first byte to read.
            target: The array to fill, C-contiguous.
            name: The array of the shard that messages name.
            row: The row that messages name.

        Raises:
            DatasetError: If the file cannot be read or has become shorter.
        """
        done, size = 0, target.nbytes
        if not size:
            return
        view = target.view(np.uint8).data
        try:
            # This keeps the descriptor open, since another thread may drop it.
            descriptor = self._open or self._opened()
            while done < size:
                got = os.preadv(descriptor.number, [view[done:]], at + done)
                if not got:
                    self._open = None
                    raise DatasetError(
                        f"{self.path}: row {row}: array {name!r}: the file ends {size - done}"
                        " bytes before the row does, because it was truncated after it was"
                        " opened\n"
                        "hint: restore the file, or build it again"
                    )
                done += got
        except OSError as error:
            self._open = None
            raise DatasetError(
                f"{self.path}: row {row}: array {name!r}: cannot be read: {error}\n"
                "hint: ask for the batch again once the file can be read; a failed batch does"
                " not count as delivered"
            ) from error


class FileArray:
    """An array in a file, whose parts are read into new read-only arrays.

    Attributes:
        file: The file.
        name: The name of the array.
        dtype: Its dtype.
        shape: Its shape.
        at: Its first byte in the file.
    """

    def __init__(
        self, file: ShardBytes, name: str, dtype: np.dtype, shape: tuple[int, ...], at: int
    ):
        self.file, self.name, self.dtype, self.shape, self.at = file, name, dtype, shape, at
        self._entry_bytes = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))

    def __getitem__(self, row: int) -> np.ndarray:
        """Return entry `row` of an array that has one entry per row.

        Raises:
            IndexError: If there is no such entry.
        """
        if not 0 <= row < self.shape[0]:
            raise IndexError(f"row {row} of array {self.name!r} of {self.shape[0]} rows")
        values = np.empty(self.shape[1:], self.dtype)
        self.read_row(row, values)
        values.flags.writeable = False
        return values

    def read_row(self, row: int, target: np.ndarray) -> None:
        """Read entry `row` into an array of any dtype.

        Nothing is copied if the target is contiguous and has the array's dtype.

        Args:
            row: Index of the entry.
            target: The array to fill.
        """
        if target.dtype == self.dtype and target.flags.c_contiguous:
            self.file.read(self.at + row * self._entry_bytes, target, self.name, row)
        else:
            target[...] = self[row]

    def part(self, row: int, begin: int, end: int) -> np.ndarray:
        """Return the entries begin … end − 1, or fewer at the end of the array.

        Args:
            row: The row that messages name.
            begin: The first entry.
            end: The first entry after them.

        Returns:
            A read-only array.
        """
        end = min(end, self.shape[0])
        values = np.empty((max(0, end - begin), *self.shape[1:]), self.dtype)
        self.file.read(self.at + begin * self._entry_bytes, values, self.name, row)
        values.flags.writeable = False
        return values


METADATA = {
    "format": FORMAT,
    "version": str(VERSION),
    "loss_alignment": "predicting_slot",
    "segment_id_base": "1",
}
DATA_ALIGNMENT = 4096
MAX_HEADER_BYTES = 1 << 20

# The safetensors names of the dtypes that a shard may have, all of them little-endian.
DTYPES: dict[str, np.dtype] = {
    "U8": np.dtype("u1"),
    "U16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Layout = dict[str, tuple[np.dtype, tuple[int, ...]]]
IO = Literal["mmap", "pread"]


def layout(
    rows: int,
    segments: int,
    seq_length: int,
    token_dtype,
    *,
    labels: bool = False,
    padded: bool = False,
    blocks: int | None = None,
    trained: int | None = None,
    weighted: bool = False,
    compact: bool = False,
    media: tuple[int, int] | None = None,
) -> Layout:
    """Return the arrays of a shard in file order.

    Args:
        rows: Number of rows.
        segments: Number of segments.
        seq_length: Slots of a row.
        token_dtype: The dtype of tokens and labels.
        labels: Whether labels are stored. The manifest's `stores_labels` decides.
        padded: Whether pad_seq_to_mult is above 1.
        blocks: Number of blocks, or None without block diffusion.
        trained: Number of trained ranges, or None if no source has any.
        weighted: Whether a trained range has a weight other than 1.
        compact: Whether to leave out segment_ids, and loss_mask unless tasks predict at the same
            position or ranges are trained. cu_seqlens and segment_prefix determine both.
        media: Number of media spans and bytes of their references, or None without media.

    Returns:
        A dict name → (dtype, shape).
    """
    token: np.dtype = np.dtype(token_dtype).newbyteorder("<")
    u8, u16 = DTYPES["U8"], DTYPES["U16"]
    i32, i64, f32 = DTYPES["I32"], DTYPES["I64"], DTYPES["F32"]
    slots = (rows, seq_length)
    arrays: Layout = {"tokens": (token, slots)}
    if labels:
        arrays["labels"] = (token, slots)
    if not compact:
        arrays["segment_ids"] = (u16, slots)
    if not compact or labels or blocks is not None or trained is not None:
        arrays["loss_mask"] = (u8, slots)

    per_segment = {f"segment_{name}": (dtype, (segments,)) for name, dtype in HEADER.items()}

    def header_of(itemsize: int) -> Layout:
        return {name: entry for name, entry in per_segment.items() if entry[0].itemsize == itemsize}

    arrays["row_offsets"] = (i64, (rows + 1,))
    arrays |= header_of(8)
    if blocks is not None:
        arrays["block_offsets"] = (i64, (segments + 1,))
    if trained is not None:
        arrays["trained_offsets"] = (i64, (segments + 1,))
    if media is not None:
        arrays["media_offsets"] = (i64, (segments + 1,))
        arrays["media_ref_offsets"] = (i64, (media[0] + 1,))

    arrays["cu_seqlens"] = (i32, (segments + rows,))
    if padded:
        arrays["cu_seqlens_padded"] = (i32, (segments + rows,))
    arrays |= header_of(4)
    if blocks is not None:
        arrays["block_noise"] = (f32, (blocks,))
        arrays["block_loss_weight"] = (f32, (blocks,))
    if trained is not None:
        arrays["trained_ranges"] = (i32, (trained, 2))
        if weighted:
            arrays["trained_weights"] = (f32, (trained,))
    if media is not None:
        arrays["media_slot"] = (i32, media[:1])
        arrays["media_tokens"] = (i32, media[:1])

    arrays |= header_of(2)
    if media is not None:
        arrays["media_kind"] = (u16, media[:1])
        arrays["media_ref"] = (u8, media[1:])
    return arrays


NAMES = frozenset(
    layout(
        0,
        0,
        8,
        "u2",
        labels=True,
        padded=True,
        blocks=0,
        trained=0,
        weighted=True,
        media=(0, 0),
    )
)


def _inferred_layout(
    where: str, shapes: Mapping[str, tuple[int, ...]], seq_length: int, token_dtype
) -> Layout:
    """Return the layout that the names and shapes of a shard's arrays imply.

    Raises:
        DatasetError: If the names do not fit a layout.
    """
    unknown = [name for name in shapes if name not in NAMES]
    if unknown:
        raise DatasetError(
            f"{where}: unknown array {unknown[0]!r}. The file is damaged, or a newer packprep"
            " wrote it"
        )

    def count(name: str) -> int:
        shape = shapes.get(name)
        if not shape:
            raise DatasetError(
                f"{where}: array {name!r} is missing or has no dimension (shape {shape})"
            )
        return shape[0]

    has_blocks = any(name.startswith("block_") for name in shapes)
    has_trained, has_media = (
        any(name.startswith(f"{part}_") for name in shapes) for part in ("trained", "media")
    )
    expected = layout(
        count("tokens"),
        count("segment_key"),
        seq_length,
        token_dtype,
        labels="labels" in shapes,
        padded="cu_seqlens_padded" in shapes,
        blocks=count("block_noise") if has_blocks else None,
        trained=count("trained_ranges") if has_trained else None,
        weighted="trained_weights" in shapes,
        compact="segment_ids" not in shapes,
        media=(count("media_slot"), count("media_ref")) if has_media else None,
    )
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise DatasetError(f"{where}: array {missing[0]!r} is missing")
    more = [name for name in shapes if name not in expected]
    if more:
        raise DatasetError(
            f"{where}: array {more[0]!r} is present, but 'segment_ids' is missing. Both must be"
            " present or missing"
        )
    return expected


SLOT_ARRAYS = ("tokens", "labels", "segment_ids", "loss_mask")
"""The arrays of a shard with one value for each slot."""


def compacted(arrays: Arrays, labels: bool = True) -> dict[str, np.ndarray]:
    """Return the arrays that a compact shard keeps.

    Args:
        arrays: name → array.
        labels: Whether to keep labels, if there are any.

    Returns:
        The remaining arrays.
    """
    left_out = {"segment_ids"} if labels else {"segment_ids", "labels"}
    if not (arrays.keys() - left_out) & {"labels", "block_offsets", "trained_offsets"}:
        left_out.add("loss_mask")
    return {name: array for name, array in arrays.items() if name not in left_out}


def _n_bytes(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)


def _header(arrays: Layout, metadata: Mapping[str, str] = METADATA) -> bytes:
    """Return the first bytes of a shard, up to its data."""
    entries: dict[str, object] = {"__metadata__": metadata}
    begin = 0
    for name, (dtype, shape) in arrays.items():
        end = begin + _n_bytes(dtype, shape)
        entries[name] = {
            "dtype": _DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    data_begin = -(-(8 + len(text)) // DATA_ALIGNMENT) * DATA_ALIGNMENT
    text = text.ljust(data_begin - 8, b" ")
    return len(text).to_bytes(8, "little") + text


def encode(arrays: Arrays) -> list[bytes | memoryview]:
    """Return the bytes of a shard as buffers: its header, then each array without a copy.

    Args:
        arrays: name → array, in any order.

    Raises:
        DatasetError: If a name, dtype, shape or memory order does not fit `layout`.
    """
    tokens = arrays.get("tokens")
    if tokens is None or tokens.ndim != 2:
        raise DatasetError("a shard needs tokens [rows, seq_length]")
    if tokens.dtype not in (DTYPES["U16"], DTYPES["I32"]):
        raise DatasetError(f"array 'tokens': dtype {tokens.dtype} should be uint16 or int32")
    if tokens.shape[1] == 0 or tokens.shape[1] % 8:
        raise DatasetError(
            f"array 'tokens': seq_length {tokens.shape[1]} should be a multiple of 8"
        )
    shapes = {name: array.shape for name, array in arrays.items()}
    expected = _inferred_layout("encode", shapes, tokens.shape[1], tokens.dtype)
    for name, (dtype, shape) in expected.items():
        array = arrays[name]
        if array.dtype != dtype or array.shape != shape:
            raise DatasetError(
                f"array {name!r}: {array.dtype}{list(array.shape)} should be {dtype}{list(shape)}"
                f" for {tokens.shape[0]} rows and {arrays['segment_key'].shape[0]} segments"
            )
        if not array.flags.c_contiguous:
            raise DatasetError(
                f"array {name!r} is not C-contiguous\nhint: pass np.ascontiguousarray of it"
            )
    return [_header(expected), *(arrays[name].reshape(-1).view(np.uint8).data for name in expected)]


def encoded(arrays: Arrays, metadata: Mapping[str, str]) -> list[bytes | memoryview]:
    """Return the bytes of a safetensors file as buffers.

    Token stores are written this way. `encode` writes shards.

    Args:
        arrays: name → array, in file order.
        metadata: The metadata of the header.

    Returns:
        The header, then the bytes of each array.
    """
    header = _header({name: (array.dtype, array.shape) for name, array in arrays.items()}, metadata)
    return [
        header,
        *(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays.values()),
    ]


Places = dict[str, tuple[np.dtype, tuple[int, ...], int]]
"""name → (dtype, shape, first byte)."""


def places_in(
    head: bytes, size: int, where: str, metadata: Mapping[str, str], names: Sequence[str]
) -> Places:
    """Return where the arrays of a token store's shard are in its file.

    Args:
        head: The first bytes of the file, with the whole header.
        size: Bytes of the file.
        where: The name of the file for messages.
        metadata: The metadata that the header should have.
        names: The arrays that the file should have, in file order.

    Returns:
        A dict name → (dtype, shape, first byte).

    Raises:
        DatasetError: If the file is not one that `encoded` writes.
    """
    length = int.from_bytes(head[:8], "little")
    try:
        header = json.loads(head[8 : 8 + length].decode("utf-8"), object_pairs_hook=no_duplicates)
        own = header.pop("__metadata__")
        layout = {
            name: (DTYPES[header[name]["dtype"]], tuple(header[name]["shape"])) for name in names
        }
        good = own == metadata and head[: 8 + length] == _header(layout, metadata)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DatasetError(
            f"{where}: its header is not valid for a shard of a token store: {error}"
        ) from None
    ends = np.cumsum([8 + length, *(_n_bytes(*array) for array in layout.values())]).tolist()
    if not good or ends[-1] != size:
        raise DatasetError(
            f"{where}: its header or its size is not valid for a shard of a token store. It is"
            " damaged"
        )
    return {name: (*array, at) for (name, array), at in zip(layout.items(), ends, strict=False)}


@dataclass(frozen=True, eq=False)
class Shard:
    """An open shard whose header has been checked.

    Attributes:
        path: The file.
        rows: Number of rows.
        segments: Number of segments.
        seq_length: Slots of a row.
        layout: The arrays, as the function `layout` returns them.
        data_begin: Bytes before the first array.
        size: Bytes of the file.
        io: "mmap" if rows and parts are views of a map, "pread" if they are read.
    """

    path: Path
    rows: int
    segments: int
    seq_length: int
    layout: Layout = field(repr=False)
    data_begin: int = field(repr=False)
    size: int = field(repr=False)
    io: IO = "mmap"

    @lazy
    def _map(self) -> mmap.mmap:
        try:
            with open_file(self.path) as file:
                if os.fstat(file.fileno()).st_size != self.size:
                    raise DatasetError(
                        f"{self.path}: its size changed after it was opened ({self.size} bytes"
                        " then)"
                    )
                return mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)
        except OSError as error:
            raise DatasetError(f"{self.path}: cannot be mapped: {error}") from error

    @lazy
    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays by name, as read-only views of one map of the file.

        The file is mapped at first use.
        """
        return {
            name: np.ndarray(self.layout[name][1], self.layout[name][0], self._map, begin)
            for name, begin in self.begins.items()
        }

    @lazy
    def begins(self) -> dict[str, int]:
        """Return the first byte of each array in the file, by name."""
        begins, begin = {}, self.data_begin
        for name, (dtype, shape) in self.layout.items():
            begins[name] = begin
            begin += _n_bytes(dtype, shape)
        return begins

    @lazy
    def read_arrays(self) -> dict[str, FileArray]:
        """Return the arrays by name, for io "pread".

        The file is opened at first use.
        """
        file = ShardBytes(self.path, self.size)
        file.open()
        return {
            name: FileArray(file, name, *self.layout[name], begin)
            for name, begin in self.begins.items()
        }

    @lazy
    def tokens(self) -> np.ndarray | FileArray:
        """Return an object that provides the tokens of a row as tokens[row].

        It is cached because every row that is read needs it.
        """
        return self.arrays["tokens"] if self.io == "mmap" else self.read_arrays["tokens"]

    def row(self, name: str, row: int) -> np.ndarray:
        """Return a row of an array of slots.

        Args:
            name: The name of the array.
            row: Index of the row in the shard.

        Returns:
            A read-only array [seq_length].
        """
        return self.arrays[name][row] if self.io == "mmap" else self.read_arrays[name][row]

    def part(self, name: str, row: int, begin: int, end: int) -> np.ndarray:
        """Return the entries begin … end − 1 of an array.

        Args:
            name: The name of the array.
            row: The row that messages name.
            begin: The first entry.
            end: The first entry after them.

        Returns:
            A read-only array.
        """
        return (
            self.arrays[name][begin:end]
            if self.io == "mmap"
            else self.read_arrays[name].part(row, begin, end)
        )

    def segment_range(self, row: int) -> tuple[int, int]:
        """Return the half-open range of a row's segments, for 0 ≤ row < rows.

        Raises:
            DatasetError: If the range is not inside the shard's segments.
        """
        begin, end = self.part("row_offsets", row, row, row + 2).tolist()
        if not 0 <= begin <= end <= self.segments:
            raise DatasetError(
                f"{self.path}: row {row}: row_offsets {begin}, {end} are not ascending in 0 …"
                f" {self.segments}, so the file is damaged\n"
                "hint: run `packprep verify` to find all faults"
            )
        return begin, end


def _read_header(path: Path) -> tuple[dict, bytes, int]:
    """Return the parsed header of a shard, the bytes before its data, and the size of the file."""
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            length = int.from_bytes(head, "little")
            if len(head) < 8 or length < 2 or length > MAX_HEADER_BYTES or 8 + length > size:
                raise DatasetError(
                    f"{path}: its first 8 bytes give a header of {length} bytes, but at most"
                    f" {MAX_HEADER_BYTES} and the file's {size} are possible. It is truncated or"
                    " not a shard"
                )
            text = b""
            while len(text) < length and (more := file.read(length - len(text))):
                text += more
    except FileNotFoundError as error:
        raise DatasetError(
            f"{path} does not exist\n"
            "hint: restore it, or run the build's command again, which rebuilds missing shards"
        ) from error
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error}") from error
    if (8 + length) % DATA_ALIGNMENT:
        raise DatasetError(
            f"{path}: data starts at {8 + length}, which is not a multiple of {DATA_ALIGNMENT}"
        )
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path}: its header is not valid JSON of a shard: {error}") from error
    if not isinstance(header, dict):
        raise DatasetError(f"{path}: its header is a JSON {type(header).__name__}, not an object")
    return header, head + text, size


def _is_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _shapes_of(path: Path, header: dict) -> dict[str, tuple[int, ...]]:
    """Return the shape of each array by name, and check that each entry has only plain numbers."""
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise DatasetError(
                f"{path}: array {name!r}: its entry should only have dtype, shape and data_offsets"
            )
        offsets = entry["data_offsets"]
        if not _is_counts(entry["shape"]) or not _is_counts(offsets) or len(offsets) != 2:
            raise DatasetError(
                f"{path}: array {name!r}: shape or data_offsets are not lists of non-negative"
                " integers"
            )
    return {name: tuple(entry["shape"]) for name, entry in header.items()}


def open_shard(
    path: str | os.PathLike,
    seq_length: int,
    token_dtype,
    *,
    rows: int | None = None,
    segments: int | None = None,
    compact: bool | None = None,
    io: IO = "mmap",
) -> Shard:
    """Open a shard and check its header.

    Nothing is allocated by numbers of the header before they are checked. The arrays are not mapped
    yet.

    Args:
        path: The file.
        seq_length: The manifest's seq_length.
        token_dtype: The manifest's token_dtype.
        rows: The manifest's number of rows, or None to accept any.
        segments: The manifest's number of segments, or None to accept any.
        compact: Whether the manifest says that shards are compact, or None to accept both.
        io: "mmap" or "pread", as in `Shard`.

    Returns:
        The open `Shard`.

    Raises:
        DatasetError: If anything does not agree. The message names file, array and values.
    """
    path = Path(path)
    header, before, size = _read_header(path)
    data_begin = len(before)
    if header.pop("__metadata__", None) != METADATA:
        raise DatasetError(
            f"{path}: __metadata__ is not {METADATA}. The file is not a packprep shard, or has"
            " another version"
        )

    shapes = _shapes_of(path, header)
    if compact is not None and compact == ("segment_ids" in shapes):
        raise DatasetError(
            f"{path}: array 'segment_ids' is {'present' if compact else 'missing'}, but the"
            f" manifest's recipe has columns = {'compact or least' if compact else 'full'}"
        )
    expected = _inferred_layout(str(path), shapes, seq_length, token_dtype)

    begin = 0
    for name, (dtype, shape) in expected.items():
        entry, end = header[name], begin + _n_bytes(dtype, shape)
        should = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        if end > size - data_begin:
            raise DatasetError(
                f"{path}: array {name!r}: {dtype}{list(shape)} would end at byte"
                f" {data_begin + end}, beyond the file's {size}"
            )
        for key, value in should.items():
            if entry[key] != value:
                raise DatasetError(
                    f"{path}: array {name!r}: {key} is {entry[key]!r} and should be {value!r}"
                )
        begin = end
    if data_begin + begin != size:
        raise DatasetError(
            f"{path}: the arrays end at byte {data_begin + begin}, the file at {size}"
        )
    if before != _header(expected):
        raise DatasetError(f"{path}: its header is not in canonical JSON, so it was edited")

    shard = Shard(
        path,
        shapes["tokens"][0],
        shapes["segment_key"][0],
        seq_length,
        expected,
        data_begin,
        size,
        io,
    )
    for what, here, manifest in (
        ("rows", shard.rows, rows),
        ("segments", shard.segments, segments),
    ):
        if manifest is not None and here != manifest:
            raise DatasetError(f"{path}: it has {here} {what}, but the manifest has {manifest}")
    return shard


def shard_of(path: Path, manifest: Manifest, number: int, io: IO = "mmap") -> Shard:
    """Open a shard of a dataset.

    Args:
        path: The shard's file.
        manifest: The manifest of the dataset.
        number: Number of the shard.
        io: "mmap" or "pread", as in `Shard`.

    Returns:
        The open `Shard`.

    Raises:
        DatasetError: If the shard is damaged or does not fit the manifest.
    """
    entry = manifest["shards"][number]
    return open_shard(
        path,
        manifest["seq_length"],
        manifest["token_dtype"],
        rows=entry["rows"],
        segments=entry["segments"],
        compact=stored_columns(manifest) != "full",
        io=io,
    )


def shard_in(folder: Path, manifest: Manifest, number: int) -> Shard:
    """Open a shard of a dataset in a folder, with io "mmap".

    Args:
        folder: The folder of the dataset.
        manifest: The manifest of the dataset.
        number: Number of the shard.

    Returns:
        The open `Shard`.

    Raises:
        DatasetError: If the shard is damaged or does not fit the manifest.
    """
    return shard_of(folder / shard_name(number), manifest, number)
