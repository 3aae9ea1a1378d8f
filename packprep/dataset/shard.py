"""Which arrays a shard has, their order, dtypes and shapes; shards are encoded and opened here
alone.

A shard is a standard safetensors file:

    0        8              8 + n, a multiple of 4096
    ├────────┼──────────────┼───────────────────────────────────────────────────────────────────────────┤
    n, u64   JSON, padded   tokens labels segment_ids loss_mask │ 8-byte │ 4-byte │ 2-byte columns │ 1-byte
             with spaces

The header is canonical JSON; arrays follow one another without holes, in the order of `layout`, to
the file's end. Because seq_length is a multiple of 8, that order aligns every array to its item
size.

With io "pread" a file's arrays are read, not mapped: a file server that is lost is an error there,
and under a map a SIGBUS.

    FileArray ── [row], part(…), read_row(…) ─► ShardBytes.read ─► preadv into the caller's array

preadv has no file position, so threads and forked processes may share a ShardBytes.
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
from packprep.dataset.segments import HEADER
from packprep.errors import DatasetError
from packprep.forking import lazy
from packprep.format import open_file
from packprep.format.json_files import FORMAT, VERSION, no_duplicates, shard_name

CAN_PREAD = hasattr(os, "preadv")  # not on Windows


class _Descriptor:
    """An open file's descriptor, closed when nobody reads from it any more."""

    def __init__(self, path: Path):
        self._file = open_file(path)
        self.number = self._file.fileno()

    def __del__(self):
        file = self.__dict__.pop("_file", None)  # None: it could not be opened
        if file is not None:
            file.close()


class ShardBytes:
    """A file of `size` bytes, held open from the first read on; opened anew by the read after one
    that failed."""

    def __init__(self, path: Path, size: int):
        self.path = path
        self.size = size
        self._open: _Descriptor | None = None

    def _opened(self) -> _Descriptor:
        descriptor = _Descriptor(self.path)
        size = os.fstat(descriptor.number).st_size
        if size != self.size:
            raise DatasetError(
                f"{self.path}: its size changed since it was opened ({self.size} bytes then, {size}"
                " now)"
            )
        self._open = descriptor
        return descriptor

    def open(self) -> None:
        """Open it now; DatasetError if that fails or its size is another."""
        try:
            self._opened()
        except OSError as error:
            raise DatasetError(f"{self.path}: cannot be opened: {error}") from error

    def read(self, at: int, target: np.ndarray, name: str, row: int) -> None:
        """Fill `target` (C-contiguous) with the bytes from `at` on, which are of array `name` and
        of `row`."""
        done, size = 0, target.nbytes
        if not size:
            return
        view = target.view(np.uint8).data
        try:
            descriptor = self._open or self._opened()  # held here: another thread may drop it
            while done < size:
                got = os.preadv(descriptor.number, [view[done:]], at + done)
                if not got:
                    self._open = None
                    raise DatasetError(
                        f"{self.path}: row {row}: array {name!r}: the file ends {size - done} bytes"
                        " before the row does; it was truncated since it was opened: put it back,"
                        " or build it again"
                    )
                done += got
        except OSError as error:
            self._open = None
            raise DatasetError(
                f"{self.path}: row {row}: array {name!r}: cannot be read: {error}; once the file"
                " can be read again, ask again: a batch that failed does not count as delivered"
            ) from error


class FileArray:
    """An array that lies in a file from byte `at` on; whatever is asked of it is read into fresh
    memory, read-only."""

    def __init__(
        self, file: ShardBytes, name: str, dtype: np.dtype, shape: tuple[int, ...], at: int
    ):
        self.file, self.name, self.dtype, self.shape, self.at = file, name, dtype, shape, at
        self._entry_bytes = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))

    def __getitem__(self, row: int) -> np.ndarray:
        """Row `row` of an array that has one entry for each row; IndexError where it has none."""
        if not 0 <= row < self.shape[0]:
            raise IndexError(f"row {row} of array {self.name!r} of {self.shape[0]} rows")
        values = np.empty(self.shape[1:], self.dtype)
        self.read_row(row, values)
        values.flags.writeable = False
        return values

    def read_row(self, row: int, target: np.ndarray) -> None:
        """Read a row of the array into `target`, of any dtype: without a copy where it is
        contiguous and of this dtype."""
        if target.dtype == self.dtype and target.flags.c_contiguous:
            self.file.read(self.at + row * self._entry_bytes, target, self.name, row)
        else:
            target[...] = self[row]

    def part(self, row: int, begin: int, end: int) -> np.ndarray:
        """Entries begin … end − 1, cut at the array's end; `row` is what they are read for."""
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

# safetensors' names of the dtypes that a shard may have; all little-endian.
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
    removed: bool = False,
) -> Layout:
    """The arrays of a shard in file order: name → (dtype, shape).

    labels: whether they are stored. padded: pad_seq_to_mult > 1. blocks: number of blocks, None
    without block_diffusion. trained: number of trained ranges, None where no source has any;
    weighted: one has another weight than
    1. compact: without segment_ids, and without loss_mask unless tasks predict in place or ranges
    are trained: cu_seqlens and segment_prefix determine them. Labels may be left out, too, where
    `stores_labels` of the manifest says so. media: places of media, and the bytes of their refs;
    None where no document has any. removed: it has segments of documents that were removed.
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
    if removed:
        arrays["segment_removed"] = (u8, (segments,))
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
        removed=True,
    )
)


def _inferred_layout(
    where: str, shapes: Mapping[str, tuple[int, ...]], seq_length: int, token_dtype
) -> Layout:
    """The layout that the names and shapes of a shard's arrays imply; raises DatasetError at names
    that do not fit."""
    unknown = [name for name in shapes if name not in NAMES]
    if unknown:
        raise DatasetError(
            f"{where}: unknown array {unknown[0]!r}; it is damaged, or a newer packprep made it"
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
        removed="segment_removed" in shapes,
    )
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise DatasetError(f"{where}: array {missing[0]!r} is missing")
    more = [name for name in shapes if name not in expected]
    if more:
        raise DatasetError(
            f"{where}: array {more[0]!r} stands where 'segment_ids' is missing, and both are left"
            " out or none"
        )
    return expected


SLOT_ARRAYS = ("tokens", "labels", "segment_ids", "loss_mask")
"""The arrays of a shard with one value for each slot."""


def compacted(arrays: Mapping[str, np.ndarray], labels: bool = True) -> dict[str, np.ndarray]:
    """Return the arrays of a shard without those that a compact one leaves out. labels: whether it
    keeps labels, if there are any."""
    left_out = {"segment_ids"} if labels else {"segment_ids", "labels"}
    if not (arrays.keys() - left_out) & {"labels", "block_offsets", "trained_offsets"}:
        left_out.add("loss_mask")
    return {name: array for name, array in arrays.items() if name not in left_out}


def _n_bytes(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)


def _header(arrays: Layout, metadata: Mapping[str, str] = METADATA) -> bytes:
    """The first bytes of a shard, up to its data."""
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


def encode(arrays: Mapping[str, np.ndarray]) -> list[bytes | memoryview]:
    """The bytes of a shard as a list of buffers: its header, then each array without a copy.

    arrays: name → array, in any order. Raises DatasetError if a name, dtype, shape or memory order
    is not `layout`'s.
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
                f"array {name!r} is not C-contiguous; give np.ascontiguousarray of it"
            )
    return [_header(expected), *(arrays[name].reshape(-1).view(np.uint8).data for name in expected)]


def encoded(
    arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> list[bytes | memoryview]:
    """The bytes of a safetensors file of these arrays, in their order, as buffers. Of a token
    store: a shard's are `encode`'s."""
    header = _header({name: (array.dtype, array.shape) for name, array in arrays.items()}, metadata)
    return [
        header,
        *(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays.values()),
    ]


Places = dict[str, tuple[np.dtype, tuple[int, ...], int]]
"""name → (dtype, shape, byte at which it begins)."""


def places_in(
    head: bytes, size: int, where: str, metadata: Mapping[str, str], names: Sequence[str]
) -> Places:
    """The places of the arrays `names`, in this order, in a file of `size` bytes as `encoded` gives
    them, by its first bytes. DatasetError, named `where`, for any other file."""
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
            f"{where}: its header is not that of a token store's shard: {error}"
        ) from None
    ends = np.cumsum([8 + length, *(_n_bytes(*array) for array in layout.values())]).tolist()
    if not good or ends[-1] != size:
        raise DatasetError(
            f"{where}: its header or its size is not that of a token store's shard: it is damaged"
        )
    return {name: (*array, at) for (name, array), at in zip(layout.items(), ends, strict=False)}


@dataclass(frozen=True, eq=False)
class Shard:
    """An open shard whose header is known to be good.

    layout: as `layout`. data_begin: bytes before the first array. size: bytes of the file. io:
    whether its rows and parts are views of a map, or read.
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
                        f"{self.path}: its size changed since it was opened ({self.size} bytes"
                        " then)"
                    )
                return mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)
        except OSError as error:
            raise DatasetError(f"{self.path}: cannot be mapped: {error}") from error

    @lazy
    def arrays(self) -> dict[str, np.ndarray]:
        """name → read-only array, all of them views of one map of the file that is made at first
        use."""
        return {
            name: np.ndarray(self.layout[name][1], self.layout[name][0], self._map, begin)
            for name, begin in self.begins.items()
        }

    @lazy
    def begins(self) -> dict[str, int]:
        """name → the byte of the file at which the array begins."""
        begins, begin = {}, self.data_begin
        for name, (dtype, shape) in self.layout.items():
            begins[name] = begin
            begin += _n_bytes(dtype, shape)
        return begins

    @lazy
    def read_arrays(self) -> dict[str, FileArray]:
        """name → the array as it is read with io "pread"; the file is opened at first use."""
        file = ShardBytes(self.path, self.size)
        file.open()
        return {
            name: FileArray(file, name, *self.layout[name], begin)
            for name, begin in self.begins.items()
        }

    @lazy
    def tokens(self) -> np.ndarray | FileArray:
        """What gives a row's tokens as tokens[row], at hand: every row that is read asks for it."""
        return self.arrays["tokens"] if self.io == "mmap" else self.read_arrays["tokens"]

    def row(self, name: str, row: int) -> np.ndarray:
        """[seq_length], read-only: the row of an array of slots."""
        return self.arrays[name][row] if self.io == "mmap" else self.read_arrays[name][row]

    def part(self, name: str, row: int, begin: int, end: int) -> np.ndarray:
        """Entries begin … end − 1 of an array, read-only; `row` is what they are read for, which an
        error names."""
        return (
            self.arrays[name][begin:end]
            if self.io == "mmap"
            else self.read_arrays[name].part(row, begin, end)
        )

    def segment_range(self, row: int) -> tuple[int, int]:
        """The half-open range of `row`'s segments (0 ≤ row < rows); DatasetError if it is not
        inside the columns."""
        begin, end = self.part("row_offsets", row, row, row + 2).tolist()
        if not 0 <= begin <= end <= self.segments:
            raise DatasetError(
                f"{self.path}: row {row}: row_offsets {begin}, {end} do not lie in 0 …"
                f" {self.segments} ascending; the file is damaged: `packprep verify` says where"
                " else"
            )
        return begin, end


def _read_header(path: Path) -> tuple[dict, bytes, int]:
    """(header, the bytes before the data, bytes of the file)."""
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            length = int.from_bytes(head, "little")
            if len(head) < 8 or length < 2 or length > MAX_HEADER_BYTES or 8 + length > size:
                raise DatasetError(
                    f"{path}: its first 8 bytes give a header of {length} bytes, where at most"
                    f" {MAX_HEADER_BYTES} and no more than the file's {size} are possible; it is"
                    " truncated or no shard"
                )
            text = b""
            while len(text) < length and (more := file.read(length - len(text))):
                text += more
    except FileNotFoundError as error:
        raise DatasetError(
            f"{path} does not exist: put it back, or run the build's command again, which makes"
            " what is missing"
        ) from error
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error}") from error
    if (8 + length) % DATA_ALIGNMENT:
        raise DatasetError(
            f"{path}: data begins at {8 + length}, which is no multiple of {DATA_ALIGNMENT}"
        )
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path}: its header is not the JSON of a shard: {error}") from error
    if not isinstance(header, dict):
        raise DatasetError(f"{path}: its header is a JSON {type(header).__name__}, not an object")
    return header, head + text, size


def _is_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


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
    """The shard at `path`, its header checked before anything is allocated from its numbers, its
    arrays not yet mapped.

    seq_length, token_dtype: the manifest's; rows, segments, compact: the manifest's too, where
    known. io: as in Shard. Raises DatasetError, naming file, array and values, at whatever does not
    agree.
    """
    path = Path(path)
    header, before, size = _read_header(path)
    data_begin = len(before)
    if header.pop("__metadata__", None) != METADATA:
        raise DatasetError(
            f"{path}: __metadata__ is not {METADATA}: no packprep shard, or of another version"
        )

    shapes: dict[str, tuple[int, ...]] = {}
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise DatasetError(
                f"{path}: array {name!r}: its entry should have dtype, shape and data_offsets alone"
            )
        offsets = entry["data_offsets"]
        if not _is_counts(entry["shape"]) or not _is_counts(offsets) or len(offsets) != 2:
            raise DatasetError(
                f"{path}: array {name!r}: shape or data_offsets are not lists of non-negative"
                " integers"
            )
        shapes[name] = tuple(entry["shape"])
    if compact is not None and compact == ("segment_ids" in shapes):
        raise DatasetError(
            f"{path}: array 'segment_ids' is {'there' if compact else 'missing'}, "
            f"and the manifest's recipe says columns = {'compact or least' if compact else 'full'}"
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
        raise DatasetError(
            f"{path}: its header says what it should in other bytes than canonical JSON: it was"
            " edited"
        )

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
            raise DatasetError(f"{path}: it has {here} {what}, the manifest says {manifest}")
    return shard


def shard_of(path: Path, manifest: Manifest, number: int, io: IO = "mmap") -> Shard:
    """Shard `number` of a dataset, which lies at `path`, opened as `open_shard` does."""
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
    """Shard `number` of the dataset in `folder`, mapped."""
    return shard_of(folder / shard_name(number), manifest, number)
