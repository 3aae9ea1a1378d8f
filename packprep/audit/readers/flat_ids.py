"""Read files that are one array of token ids: nanoGPT's .bin, llm.c's .bin, and NumPy's .npy.

A one-dimensional array is a stream of documents, which end with eos. A two-dimensional .npy has one
row per line.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from packprep.audit.rows import Choices, PackedData, PackedRows
from packprep.errors import SourceError
from packprep.sources.formats.batch import IdStream, Slice, open_source
from packprep.sources.formats.flat_ids import array_at
from packprep.sources.formats.token_stream import IdArray, array_of, numpy_header

_NUMPY = b"\x93NUMPY"
_BEGIN = 1024
_LARGEST_U2 = 1 << 16


def files_at(path: Path, suffix: str) -> list[Path]:
    """Return the files with a suffix: the path itself, or those in the folder, sorted by name."""
    if path.is_dir():
        return sorted(p for p in path.iterdir() if p.suffix.lower() == suffix and p.is_file())
    return [path] if path.suffix.lower() == suffix and path.is_file() else []


def _begin_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_BEGIN)


def recognizes_bin(path: Path) -> bool:
    """Return whether a path has .bin files that are no Megatron pairs."""
    files = files_at(path, ".bin")
    return bool(files) and not any(file.with_suffix(".idx").exists() for file in files)


def recognizes_npy(path: Path) -> bool:
    """Return whether a path has .npy files."""
    return bool(files_at(path, ".npy"))


def open_bin(path: Path, choices: Choices) -> PackedData:
    """Open .bin files as streams of ids.

    Raises:
        SourceError: If a file is damaged.
    """
    files = files_at(path, ".bin")
    for file in files:
        _array_in(file, choices)
    notes = [
        f"{meta} was not read, because a pickled file can run code. Give ids with --eos-id or"
        " --tokenizer"
        for meta in {file.with_name("meta.pkl") for file in files}
        if meta.exists()
    ]
    return PackedData(
        "ids in .bin files, as nanoGPT and llm.c write them",
        lambda: _stream_batches(files, choices),
        columns={},
        has_rows=False,
        notes=tuple(sorted(notes)),
    )


def open_npy(path: Path, choices: Choices) -> PackedData:
    """Open .npy files as streams of ids, or as rows if they have two dimensions.

    Raises:
        SourceError: If a file is damaged or has no ids, or if the files have different dimensions.
    """
    files = files_at(path, ".npy")
    shapes = {file: _shape_of(file) for file in files}
    if not any(shapes.values()):
        for file in files:
            _array_in(file, choices)
        return PackedData(
            "ids in .npy files", lambda: _stream_batches(files, choices), {}, has_rows=False
        )
    # Either all files are streams, or all have rows of one length.
    lengths = {shape[1] if shape else None: file for file, shape in shapes.items()}
    if len(lengths) > 1:
        (first_length, first_file), (second_length, second_file), *_ = lengths.items()
        raise SourceError(
            f"{path}: {first_file} has rows of {first_length} ids, but {second_file} has"
            f" {second_length or 'no rows'}\n"
            "hint: audit files of one length at a time"
        )
    return PackedData(
        "rows of ids in .npy files",
        lambda: _row_batches(files, choices),
        {},
        row_length=next(iter(lengths)),
    )


def _shape_of(file: Path) -> tuple[int, int] | None:
    """Return the shape of a two-dimensional array; None for a stream.

    Raises:
        SourceError: If the array has no ids.
    """
    begin = _begin_of(file)
    if not begin.startswith(_NUMPY):
        return None
    shape, dtype, _ = numpy_header(str(file), begin)
    if dtype.kind not in "ui" or len(shape) not in (1, 2):
        raise SourceError(
            f"{file}: an array of {dtype.name} with the shape {shape}, not of ids\n"
            "hint: save integers with one or two dimensions"
        )
    return (shape[0], shape[1]) if len(shape) == 2 else None


def _array_in(file: Path, choices: Choices) -> IdArray:
    """Return the location of the ids in a file.

    Raises:
        SourceError: If the file is damaged, or if its ids have another dtype.
    """
    size = file.stat().st_size
    stream = IdStream(choices.dtype or "auto", _LARGEST_U2, None)
    whole_file = Slice(str(file), 0, size, "token_stream", "", 0, 0, 1, 1, 1, stream=stream)
    try:
        with open_source(str(file), size) as opened:
            return array_of(whole_file, opened)
    except SourceError as error:
        message, _, advice = str(error).partition("\n")
        if "token_dtype" in advice:
            advice = "hint: give --token-dtype with the dtype of the ids, such as uint32"
        raise SourceError(f"{message}\n{advice}") from None


def _stream_batches(files: list[Path], choices: Choices) -> Iterator[PackedRows]:
    for file in files:
        array = _array_in(file, choices)
        with open_source(str(file), file.stat().st_size) as opened:
            for first_token in range(0, array.ids, choices.batch_tokens):
                count = min(choices.batch_tokens, array.ids - first_token)
                file_offset = array.begin + first_token * array.dtype.itemsize
                ids = array_at(opened, str(file), file_offset, array.dtype, count)
                yield PackedRows(ids, np.array([0, count], np.int64), continued=first_token > 0)


def _row_batches(files: list[Path], choices: Choices) -> Iterator[PackedRows]:
    for file in files:
        (rows, length), dtype, begin = numpy_header(str(file), _begin_of(file))
        at_once = max(choices.batch_tokens // max(length, 1), 1)
        with open_source(str(file), file.stat().st_size) as opened:
            for first_row in range(0, rows, at_once):
                count = min(at_once, rows - first_row)
                file_offset = begin + first_row * length * dtype.itemsize
                ids = array_at(opened, str(file), file_offset, dtype, count * length)
                yield PackedRows(ids, np.arange(count + 1, dtype=np.int64) * length)
