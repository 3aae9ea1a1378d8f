"""Read folders of MosaicML's StreamingDataset, in its format MDS.

```
index.json        the shards: files, columns and their encodings
shard.NNNNN.mds   u32 samples   u32[samples + 1] first bytes   JSON of the columns   samples
sample            u32 bytes of each column without a fixed size   the bytes of each column
ndarray:int32     u8 (dimensions · 4 + log2 of the bytes of a dimension)   dimensions   values
```

All numbers are little-endian. `tokens` of llm-foundry is an array or, in older versions, bytes of
int64. The format follows `streaming.base.format.mds` (mosaicml-streaming 0.13). That package is not
used: it requires torch, transformers and the clients of four clouds, and older versions of numpy.
"""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import zstandard

from packprep.audit.readers.columns import (
    COLUMNS,
    IDS,
    StoredRows,
    joined_values,
    packed_data,
    stored_rows,
)
from packprep.audit.rows import Choices, PackedData
from packprep.errors import SourceError

INDEX = "index.json"
_BYTES_DTYPE = "int64"
_DTYPES = {
    8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 34: "<f4", 64: "<u8", 65: "<i8",
    66: "<f8",
}  # fmt: skip
_MAX_SAMPLE_BYTES = 1 << 30
_READ_BYTES = 1 << 24


class Encoding(NamedTuple):
    """How the values of a column are stored.

    Attributes:
        size: Bytes of a value, or None if each sample has a size.
        kind: "ndarray" or "bytes".
        dtype: dtype of the values, or None if each value has a code of its dtype.
        has_shape: Whether each value has its shape.
    """

    size: int | None
    kind: str
    dtype: np.dtype | None
    has_shape: bool


def recognizes(path: Path) -> bool:
    """Return whether a path is a folder with the index.json of MDS."""
    try:
        with (path / INDEX).open("rb") as file:
            return b'"shards"' in file.read(1 << 16)
    except OSError:
        return False


def open_folder(path: Path, choices: Choices) -> PackedData:
    """Open a folder of MDS shards.

    Raises:
        SourceError: If the index or a shard is damaged, or has no column of token ids.
    """
    shards = _shards(path)
    # The columns of the first shard apply to all shards. `stored` checks this.
    names, stored_as, sizes = shards[0].columns
    dtype = np.dtype(choices.dtype or _BYTES_DTYPE).newbyteorder("<")
    encodings = {
        name: encoding
        for name, text, size in zip(names, stored_as, sizes, strict=True)
        if name in COLUMNS and (encoding := _encoding(text, size, dtype))
    }
    ids = next((name for name in IDS if name in encodings), None)
    if ids is None:
        columns_in_words = ", ".join(
            f"{name} ({text})" for name, text in zip(names, stored_as, strict=True)
        )
        raise SourceError(
            f"{path}: no column 'tokens' or 'input_ids' with arrays or bytes; the columns are"
            f" {columns_in_words}\nhint: give a dataset that is already tokenized"
        )
    ignored = [name for name in names if name in COLUMNS and name not in encodings]
    notes = tuple(f"The column {name} was not read, because it has no array." for name in ignored)
    # Bytes have no dtype, so the report names the dtype that was assumed.
    if encodings[ids].kind == "bytes":
        notes += (f"{ids} are bytes, read as {dtype.name}: --token-dtype sets another dtype.",)
    reader = _Reader(path, names, sizes, encodings, ids, choices.batch_tokens)

    def stored() -> Iterator[StoredRows]:
        for shard in shards:
            if shard.columns != shards[0].columns:
                raise SourceError(
                    f"{path / INDEX}: shards have different columns\n"
                    "hint: audit the shards with the same columns together"
                )
            yield from _rows(reader, shard)

    # If the size of a value is fixed, all rows have the same length.
    fixed = encodings[ids]
    length = None
    if fixed.size is not None and fixed.dtype is not None:
        length = fixed.size // fixed.dtype.itemsize
    read = [name for name in names if name not in ignored]
    return packed_data(f"MDS with {', '.join(encodings)}", stored, read, notes, length)


class Shard(NamedTuple):
    """A shard of index.json.

    Attributes:
        files: Name of the file without compression, and of the compressed one, as far as listed.
        samples: Number of rows.
        compression: Name of the compression, or None.
        columns: Names of the columns, their encodings, and their sizes or None.
    """

    files: list[str]
    samples: int
    compression: str | None
    columns: tuple[list[str], list[str], list[int | None]]


def _shards(folder: Path) -> list[Shard]:
    """Return the shards of a folder.

    Raises:
        SourceError: If the index is damaged or lists no shards.
    """
    path = folder / INDEX
    try:
        shards = []
        for entry in json.loads(path.read_bytes())["shards"]:
            data = [entry[key] for key in ("raw_data", "zip_data") if entry.get(key)]
            names, encodings, sizes = (
                list(entry[f"column_{key}"]) for key in ("names", "encodings", "sizes")
            )
            if not len(names) == len(encodings) == len(sizes):
                raise ValueError("a column lacks its encoding or size")
            columns = (
                list(map(str, names)),
                list(map(str, encodings)),
                [None if size is None else int(size) for size in sizes],
            )
            files = [str(file_entry["basename"]) for file_entry in data]
            shards.append(Shard(files, int(entry["samples"]), entry.get("compression"), columns))
        if not shards:
            raise ValueError("it lists no shards")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SourceError(
            f"{path}: not an index of MDS shards: {error}\nhint: fetch the folder again"
        ) from error
    return shards


class _Reader(NamedTuple):
    folder: Path
    names: list[str]
    sizes: list[int | None]
    encodings: dict[str, Encoding]
    ids: str
    batch_tokens: int


def _encoding(text: str, size: int | None, dtype: np.dtype) -> Encoding | None:
    """Return an encoding such as "ndarray:int32:2048", or None if it does not hold numbers.

    `dtype` is the dtype of bytes.
    """
    kind, *args = text.split(":")
    if kind == "bytes":
        return Encoding(size, kind, dtype, False)
    names = [np.dtype(code).name for code in _DTYPES.values()]
    if kind != "ndarray" or args and args[0] not in names:
        return None
    array_dtype = np.dtype(args[0]).newbyteorder("<") if args else None
    return Encoding(size, kind, array_dtype, len(args) < 2)


def _rows(reader: _Reader, shard: Shard) -> Iterator[StoredRows]:
    """Yield the rows of a shard."""
    path = _path_of(reader.folder, shard)
    with _opened(path, shard.compression) as file:
        (count,) = np.frombuffer(_read(file, path, 4), "<u4").tolist()
        offsets = np.frombuffer(_read(file, path, 4 * (count + 1)), "<u4").astype(np.int64)
        head = 4 * (count + 2)
        if count != shard.samples or offsets[0] < head or (np.diff(offsets) < 0).any():
            raise SourceError(
                f"{path}: its head does not fit index.json\nhint: fetch the file again"
            )
        # The JSON of the columns is skipped, because index.json has it too.
        _read(file, path, int(offsets[0]) - head)
        first_row, tokens = 0, 0
        values_by_column: dict[str, list[np.ndarray]] = {name: [] for name in reader.encodings}
        for row, n_bytes in enumerate(np.diff(offsets).tolist()):
            sample = _sample(reader, path, row, _read(file, path, n_bytes))
            for name, value in sample.items():
                values_by_column[name].append(value)
            tokens += len(sample[reader.ids])
            if tokens >= reader.batch_tokens:
                yield _stored(reader, path, first_row, values_by_column)
                first_row, tokens = row + 1, 0
                values_by_column = {name: [] for name in reader.encodings}
        if values_by_column[reader.ids]:
            yield _stored(reader, path, first_row, values_by_column)


def _path_of(folder: Path, shard: Shard) -> Path:
    """Return the file of a shard: the raw file if it exists, otherwise the compressed one."""
    for name in shard.files:
        if "/" in name or name in ("", ".", ".."):
            raise SourceError(
                f"{folder / INDEX}: {name!r} is not the name of a file\n"
                "hint: fetch the folder again"
            )
        if (folder / name).is_file():
            return folder / name
    listed = folder / (shard.files[-1] if shard.files else INDEX)
    raise SourceError(
        f"{listed}: the file is missing, but index.json lists it\nhint: restore the file"
    )


@contextmanager
def _opened(path: Path, compression: str | None) -> Iterator[BinaryIO]:
    """Open a shard, and decompress it as a stream if it is compressed."""
    with path.open("rb") as raw:
        if path.suffix == ".mds":
            yield io.BufferedReader(raw, _READ_BYTES)
        elif path.suffix == ".zstd":
            with zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as file:
                yield io.BufferedReader(file, _READ_BYTES)
        else:
            raise SourceError(
                f"{path}: a shard compressed with {compression}\n"
                "hint: write it with compression='zstd' or without compression"
            )


def _read(file: BinaryIO, path: Path, n_bytes: int) -> bytes:
    """Return the next `n_bytes` of a shard.

    Raises:
        SourceError: If the file ends too early, or a sample is too large.
    """
    if n_bytes > _MAX_SAMPLE_BYTES:
        raise SourceError(f"{path}: a sample has {n_bytes} bytes\nhint: fetch the file again")
    try:
        data = file.read(n_bytes)
    except zstandard.ZstdError as error:
        raise SourceError(f"{path}: damaged: {error}\nhint: fetch the file again") from error
    if len(data) != n_bytes:
        raise SourceError(f"{path}: damaged: it ends too early\nhint: fetch the file again")
    return data


def _sample(reader: _Reader, path: Path, row: int, data: bytes) -> dict[str, np.ndarray]:
    """Return the values of the columns to read in a sample."""
    variable_sizes = [size for size in reader.sizes if size is None]
    try:
        # A sample starts with the sizes of its columns that have no fixed size.
        sizes_in_sample = iter(np.frombuffer(data, "<u4", len(variable_sizes)).tolist())
        offset, values = 4 * len(variable_sizes), {}
        for name, size in zip(reader.names, reader.sizes, strict=True):
            n_bytes = next(sizes_in_sample) if size is None else size
            if name in reader.encodings:
                values[name] = _value(reader.encodings[name], data[offset : offset + n_bytes])
            offset += n_bytes
        if offset != len(data):
            raise ValueError(f"{len(data)} bytes instead of {offset}")
    except (ValueError, KeyError, IndexError, StopIteration) as error:
        raise SourceError(
            f"{path}: row {row}: damaged: {error}\nhint: fetch the file again"
        ) from error
    return values


def _value(encoding: Encoding, data: bytes) -> np.ndarray:
    dtype, offset = encoding.dtype, 0
    if dtype is None:
        dtype, offset = np.dtype(_DTYPES[data[0]]), 1
    if encoding.has_shape:
        dimensions, power = data[offset] >> 2, data[offset] & 3
        if dimensions != 1:
            raise ValueError(f"an array with {dimensions} dimensions")
        # The length of a single dimension follows from the number of bytes.
        offset += 1 + (1 << power)
    return np.frombuffer(data, dtype, offset=offset)


def _stored(
    reader: _Reader, path: Path, first_row: int, values_by_column: dict[str, list[np.ndarray]]
) -> StoredRows:
    columns = {name: joined_values(of_rows) for name, of_rows in values_by_column.items()}
    return stored_rows(path, first_row, columns, reader.ids)
