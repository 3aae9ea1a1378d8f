"""Encode and open shards, and define the order, dtypes and shapes of their arrays.

A shard is a standard safetensors file:

    0        8              8 + n, a multiple of 4096
    ├────────┼──────────────┼─────────────────────────────────────────────────────────────┤
    n, u64   JSON, padded   tokens labels segment_ids loss_mask │ columns of 8, 4, 2, 1 byte
             with spaces

The header is canonical JSON. Arrays follow one another without gaps, in the order of `layout`, up
to the end of the file. Because seq_length is a multiple of 8, this order aligns every array to its
item size.

With io "mmap", the file is mapped into memory. With io "pread", arrays are read from the file. If
the connection to a file server is lost, a read raises an error, but access to a map ends the
process with SIGBUS.

    FileArray ── [row], part(…), read_row(…) ─► ShardBytes.read ─► preadv into the caller's array

preadv does not use or move the position of the open file, so threads and forked processes can share
a ShardBytes.
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
from packprep.errors import ArgumentError, DatasetError
from packprep.forking import lazy
from packprep.format import open_file
from packprep.format.json_files import FORMAT, VERSION, no_duplicates, shard_name

CAN_PREAD = hasattr(os, "preadv")  # Windows does not have it.


def check_io(io: str) -> None:
    """Check the `io` of an opened dataset.

    Raises:
        ArgumentError: If `io` is unknown, or if this system does not support it.
    """
    if io not in ("mmap", "pread"):
        raise ArgumentError(f"io is {io!r} and should be 'mmap' or 'pread'")
    if io == "pread" and not CAN_PREAD:
        raise ArgumentError(
            "io = 'pread' requires preadv, which this system does not have\nhint: use 'mmap'"
        )


class _Descriptor:
    """The descriptor of an open file. The file is closed when this object is deleted."""

    def __init__(self, path: Path):
        self._file = open_file(path)
        self.number = self._file.fileno()

    def __del__(self):
        file = self.__dict__.pop("_file", None)  # It is missing if the file could not be opened.
        if file is not None:
            file.close()


class ShardBytes:
    """A file of `size` bytes, which is opened by its first read and then stays open.

    If a read fails, the next read opens the file again.
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
            DatasetError: If the file cannot be opened, or its size is not `size`.
        """
        try:
            self._opened()
        except OSError as error:
            raise DatasetError(f"{self.path}: cannot be opened: {error}") from error

    def read(self, offset: int, target: np.ndarray, name: str, row: int) -> None:
        """Fill an array with bytes of the file.

        Args:
            offset: Position of the first byte to read, from the start of the file.
            target: The array to fill, C-contiguous.
            name: Name of the array, for error messages.
            row: Index of the row, for error messages.

        Raises:
            DatasetError: If the file cannot be read, or has become shorter since it was opened.
        """
        done_bytes, size = 0, target.nbytes
        if not size:
            return
        view = target.view(np.uint8).data
        try:
            # The local variable keeps the file open if another thread sets `_open` to None.
            descriptor = self._open or self._opened()
            # preadv may return fewer bytes than requested.
            while done_bytes < size:
                got = os.preadv(descriptor.number, [view[done_bytes:]], offset + done_bytes)
                if not got:
                    self._open = None
                    raise DatasetError(
                        f"{self.path}: row {row}: array {name!r}: the file ends {size - done_bytes}"
                        " bytes before the row does, because it was truncated after it was"
                        " opened\n"
                        "hint: restore the file, or build it again"
                    )
                done_bytes += got
        except OSError as error:
            self._open = None
            raise DatasetError(
                f"{self.path}: row {row}: array {name!r}: cannot be read: {error}\n"
                "hint: ask for the batch again once the file can be read; a failed batch does"
                " not count as delivered"
            ) from error


class FileArray:
    """An array in a file. Its entries are read into new read-only arrays.

    Attributes:
        file: The file.
        name: The name of the array.
        dtype: The dtype of the array.
        shape: The shape of the array.
        at: Position of the array's first byte, from the start of the file.
    """

    def __init__(
        self, file: ShardBytes, name: str, dtype: np.dtype, shape: tuple[int, ...], offset: int
    ):
        self.file, self.name, self.dtype, self.shape, self.at = file, name, dtype, shape, offset
        self._entry_bytes = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))

    def __getitem__(self, row: int) -> np.ndarray:
        """Return entry `row` of an array that has one entry per row.

        Raises:
            IndexError: If `row` is negative or beyond the last entry.
        """
        if not 0 <= row < self.shape[0]:
            raise IndexError(f"row {row} of array {self.name!r} of {self.shape[0]} rows")
        values = np.empty(self.shape[1:], self.dtype)
        self.read_row(row, values)
        values.flags.writeable = False
        return values

    def read_row(self, row: int, target: np.ndarray) -> None:
        """Read entry `row` into an array of any dtype.

        If the target is contiguous and has the array's dtype, the entry is read directly into it.
        Otherwise the entry is read into a temporary array and then copied.

        Args:
            row: Index of the entry.
            target: The array to fill.
        """
        if target.dtype == self.dtype and target.flags.c_contiguous:
            self.file.read(self.at + row * self._entry_bytes, target, self.name, row)
        else:
            target[...] = self[row]

    def part(self, row: int, begin: int, end: int) -> np.ndarray:
        """Return the entries begin … end − 1. Entries beyond the end of the array are left out.

        Args:
            row: Index of the row, for error messages.
            begin: Index of the first entry.
            end: Index after the last entry.

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

# The safetensors name of each dtype that an array of a shard may have. All are little-endian.
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
    filled: bool = False,
    records: int | None = None,
) -> Layout:
    """Return the arrays of a shard in file order.

    Args:
        rows: Number of rows.
        segments: Number of segments.
        seq_length: Number of slots of a row.
        token_dtype: The dtype of tokens and labels.
        labels: Whether labels are stored, see `packprep.dataset.manifest.stores_labels`.
        padded: Whether pad_seq_to_mult is above 1.
        blocks: Number of blocks, or None without block diffusion.
        trained: Number of trained ranges, or None if the shard has no supervised documents.
        weighted: Whether a trained range has a weight other than 1.
        compact: Whether to leave out segment_ids, which cu_seqlens determine. Without `labels`,
            `blocks` and `trained`, loss_mask is left out as well.
        media: A tuple (number of media spans, number of bytes of all references), or None without
            media.
        filled: Whether eos fill up the last block of a segment.
        records: Number of records that sources with group_by joined to documents, or None without
            such a source.

    Returns:
        A dict name → (dtype, shape).
    """
    token: np.dtype = np.dtype(token_dtype).newbyteorder("<")
    u8, u16 = DTYPES["U8"], DTYPES["U16"]
    i32, i64, f32 = DTYPES["I32"], DTYPES["I64"], DTYPES["F32"]
    # The arrays with one value per slot are first. seq_length is a multiple of 8, so they keep all
    # later arrays aligned.
    slots = (rows, seq_length)
    arrays: Layout = {"tokens": (token, slots)}
    if labels:
        arrays["labels"] = (token, slots)
    if not compact:
        arrays["segment_ids"] = (u16, slots)
    # The prefixes determine the mask of next-token tasks (P9). Any other mask must be stored.
    if not compact or labels or blocks is not None or trained is not None:
        arrays["loss_mask"] = (u8, slots)

    # The other arrays follow by item size, from 8 bytes to 1 byte.
    per_segment = {f"segment_{name}": (dtype, (segments,)) for name, dtype in HEADER.items()}

    def header_of(itemsize: int) -> Layout:
        return {name: entry for name, entry in per_segment.items() if entry[0].itemsize == itemsize}

    # These arrays have items of 8 bytes.
    arrays["row_offsets"] = (i64, (rows + 1,))
    arrays |= header_of(8)
    if blocks is not None:
        arrays["block_offsets"] = (i64, (segments + 1,))
    if trained is not None:
        arrays["trained_offsets"] = (i64, (segments + 1,))
    if media is not None:
        arrays["media_offsets"] = (i64, (segments + 1,))
        arrays["media_ref_offsets"] = (i64, (media[0] + 1,))
    if records is not None:
        arrays["record_offsets"] = (i64, (segments + 1,))
        arrays["record_position"] = (i64, (records,))
        arrays["record_start"] = (i64, (records,))

    # These arrays have items of 4 bytes. cu_seqlens starts again at 0 in every row, so it has one
    # more entry per row.
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
    if records is not None:
        arrays["record_tokens"] = (i32, (records,))

    # These arrays have items of 2 bytes, and media_ref has single bytes.
    arrays |= header_of(2)
    if filled:
        arrays["segment_fill"] = (u16, (segments,))
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
        filled=True,
        records=0,
    )
)


def _inferred_layout(
    where: str, shapes: Mapping[str, tuple[int, ...]], seq_length: int, token_dtype
) -> Layout:
    """Return the `layout` of a shard, given the shapes of its arrays.

    `shapes` maps array names to shapes. The names decide which arrays the layout has. The sizes are
    the first dimensions of a few arrays, such as tokens. All other dimensions are ignored. `where`
    names the file in messages.

    Raises:
        DatasetError: If an array is missing, or is not part of the layout.
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

    # A single array of a group shows that the shard should have the whole group.
    has_blocks = any(name.startswith("block_") for name in shapes)
    has_trained, has_media, has_records = (
        any(name.startswith(f"{array_group}_") for name in shapes)
        for array_group in ("trained", "media", "record")
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
        filled="segment_fill" in shapes,
        records=count("record_position") if has_records else None,
    )
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise DatasetError(f"{where}: array {missing[0]!r} is missing")
    # Only a loss_mask without segment_ids can be left over. A compact shard stores it only with
    # labels, blocks or trained ranges.
    unexpected_names = [name for name in shapes if name not in expected]
    if unexpected_names:
        raise DatasetError(
            f"{where}: array {unexpected_names[0]!r} is present, but 'segment_ids' is missing."
            " Both must be present or missing"
        )
    return expected


SLOT_ARRAYS = ("tokens", "labels", "segment_ids", "loss_mask")
"""The arrays of a shard that have one value per slot, [rows, seq_length]."""


def compacted(arrays: Arrays, labels: bool = True) -> dict[str, np.ndarray]:
    """Return the arrays that a compact shard stores.

    segment_ids is left out. loss_mask is left out too, unless the result has labels, blocks or
    trained ranges, because in these cases it cannot be derived.

    Args:
        arrays: The arrays of a full shard, name → array.
        labels: Whether to keep labels if `arrays` has them.

    Returns:
        A dict name → array.
    """
    left_out = {"segment_ids"} if labels else {"segment_ids", "labels"}
    if not (arrays.keys() - left_out) & {"labels", "block_offsets", "trained_offsets"}:
        left_out.add("loss_mask")
    return {name: array for name, array in arrays.items() if name not in left_out}


def _n_bytes(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)


def _header(arrays: Layout, metadata: Mapping[str, str] = METADATA) -> bytes:
    """Return the bytes of a file before its first array: header length, JSON and padding."""
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
    """Return the bytes of a shard as a list of buffers.

    The first buffer is the header. It is followed by a view of each array, in file order.

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
    # The names of the arrays decide the layout, and the layout decides dtypes and shapes.
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
    """Return the bytes of a safetensors file with the given arrays, as a list of buffers.

    Token stores use this function. Shards of datasets use `encode`.

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
    """Return the dtype, shape and position of each array in a shard of a token store.

    Args:
        head: The first bytes of the file, with at least the whole header.
        size: Size of the file in bytes.
        where: Name of the file, for error messages.
        metadata: The metadata that the header should have.
        names: The arrays that the file should have, in file order.

    Returns:
        A dict name → (dtype, shape, first byte). The first byte is counted from the start of the
        file.

    Raises:
        DatasetError: If the header or the size is not as `encoded` writes it.
    """
    length = int.from_bytes(head[:8], "little")
    try:
        header = json.loads(head[8 : 8 + length].decode("utf-8"), object_pairs_hook=no_duplicates)
        own_metadata = header.pop("__metadata__")
        layout = {
            name: (DTYPES[header[name]["dtype"]], tuple(header[name]["shape"])) for name in names
        }
        # Only the exact bytes that `encoded` writes are accepted, so a reader can trust every
        # field.
        is_valid = own_metadata == metadata and head[: 8 + length] == _header(layout, metadata)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DatasetError(
            f"{where}: its header is not valid for a shard of a token store: {error}"
        ) from None
    # Arrays follow one another without gaps, so the last end must be the size of the file.
    ends = np.cumsum([8 + length, *(_n_bytes(*array) for array in layout.values())]).tolist()
    if not is_valid or ends[-1] != size:
        raise DatasetError(
            f"{where}: its header or its size is not valid for a shard of a token store. It is"
            " damaged"
        )
    return {
        name: (*array, offset) for (name, array), offset in zip(layout.items(), ends, strict=False)
    }


@dataclass(frozen=True, eq=False)
class Shard:
    """An open shard whose header has been checked.

    Attributes:
        path: The file.
        rows: Number of rows.
        segments: Number of segments.
        seq_length: Number of slots of a row.
        layout: A dict name → (dtype, shape) in file order, as the function `layout` returns it.
        data_begin: Number of bytes before the first array.
        size: Size of the file in bytes.
        io: "mmap" if `row` and `part` return views of a map, "pread" if they read the file.
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
        """Return a dict: name of an array → position of its first byte in the file."""
        begins, begin = {}, self.data_begin
        for name, (dtype, shape) in self.layout.items():
            begins[name] = begin
            begin += _n_bytes(dtype, shape)
        return begins

    @lazy
    def read_arrays(self) -> dict[str, FileArray]:
        """Return the arrays by name, as `FileArray` objects, for io "pread".

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
        """Return the tokens of all rows. tokens[row] has the shape [seq_length].

        With io "mmap" the result is an array, with "pread" a `FileArray`. The result is cached
        because each access to a row needs it.
        """
        return self.arrays["tokens"] if self.io == "mmap" else self.read_arrays["tokens"]

    def row(self, name: str, row: int) -> np.ndarray:
        """Return one row of an array that has one value per slot.

        Args:
            name: The name of the array, one of SLOT_ARRAYS.
            row: Index of the row in the shard.

        Returns:
            A read-only array [seq_length].
        """
        return self.arrays[name][row] if self.io == "mmap" else self.read_arrays[name][row]

    def part(self, name: str, row: int, begin: int, end: int) -> np.ndarray:
        """Return the entries begin … end − 1 of an array.

        Args:
            name: The name of the array.
            row: Index of the row, for error messages.
            begin: Index of the first entry.
            end: Index after the last entry.

        Returns:
            A read-only array.
        """
        return (
            self.arrays[name][begin:end]
            if self.io == "mmap"
            else self.read_arrays[name].part(row, begin, end)
        )

    def segment_range(self, row: int) -> tuple[int, int]:
        """Return the shard's index of a row's first segment, and the index after its last segment.

        `row` must be in 0 … rows − 1.

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
    """Return (header, head, size) of a shard.

    They are the parsed header, the raw bytes before the first array, and the size of the file.
    """
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            length = int.from_bytes(head, "little")
            # A damaged length could be huge, so it is checked before the header is read.
            if len(head) < 8 or length < 2 or length > MAX_HEADER_BYTES or 8 + length > size:
                raise DatasetError(
                    f"{path}: its first 8 bytes give a header of {length} bytes, but at most"
                    f" {MAX_HEADER_BYTES} and the file's {size} are possible. It is truncated or"
                    " not a shard"
                )
            text = b""
            while len(text) < length and (chunk := file.read(length - len(text))):
                text += chunk
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
    """Return a dict name → shape from a shard's header.

    Raises:
        DatasetError: If an entry does not have exactly the keys dtype, shape and data_offsets, or
            shape or data_offsets is not a list of non-negative integers.
    """
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

    Memory is allocated only after the sizes in the header have been checked. The arrays are neither
    mapped nor read yet.

    Args:
        path: The file.
        seq_length: The manifest's seq_length.
        token_dtype: The manifest's token_dtype.
        rows: The manifest's number of rows, or None to accept any number.
        segments: The manifest's number of segments, or None to accept any number.
        compact: Whether the manifest's shards are compact, that is without segment_ids. None
            accepts shards with and without segment_ids.
        io: "mmap" or "pread", as in `Shard`.

    Returns:
        The open `Shard`.

    Raises:
        DatasetError: If the header is damaged or does not fit the arguments or the file's size.
            The message names the file, the array and the values.
    """
    path = Path(path)
    header, head, size = _read_header(path)
    data_begin = len(head)
    if header.pop("__metadata__", None) != METADATA:
        raise DatasetError(
            f"{path}: __metadata__ is not {METADATA}. The file is not a packprep shard, or has"
            " another version"
        )

    # The names and first dimensions in the header give the layout, which all entries must then
    # match.
    shapes = _shapes_of(path, header)
    if compact is not None and compact == ("segment_ids" in shapes):
        raise DatasetError(
            f"{path}: array 'segment_ids' is {'present' if compact else 'missing'}, but the"
            f" manifest's recipe has columns = {'compact or least' if compact else 'full'}"
        )
    expected = _inferred_layout(str(path), shapes, seq_length, token_dtype)

    # Each array must start where the array before it ends (P3).
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
    # All entries are right by now. So only order, spacing or padding can differ.
    if head != _header(expected):
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
    # A valid shard of another dataset passes all checks above, so the counts are compared too.
    for noun, count, manifest in (
        ("rows", shard.rows, rows),
        ("segments", shard.segments, segments),
    ):
        if manifest is not None and count != manifest:
            raise DatasetError(f"{path}: it has {count} {noun}, but the manifest has {manifest}")
    return shard


def shard_of(path: Path, manifest: Manifest, number: int, io: IO = "mmap") -> Shard:
    """Open a shard and check it against the manifest of its dataset.

    Args:
        path: The shard's file.
        manifest: The manifest of the dataset.
        number: Number of the shard, from 0.
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
    """Open a shard by its number in a dataset's folder, with io "mmap".

    Args:
        folder: The folder of the dataset.
        manifest: The manifest of the dataset.
        number: Number of the shard, from 0.

    Returns:
        The open `Shard`.

    Raises:
        DatasetError: If the shard is damaged or does not fit the manifest.
    """
    return shard_of(folder / shard_name(number), manifest, number)
