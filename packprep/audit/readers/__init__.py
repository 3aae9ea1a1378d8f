"""The registry of the formats that an audit reads."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from packprep.audit.readers import flat_ids, mds, megatron, own_rows, pickled_rows, tables
from packprep.audit.rows import Choices, PackedData
from packprep.errors import SourceError

__all__ = ["READERS", "Reader", "open_packed"]

_MOST_NAMES = 10


class Reader(NamedTuple):
    """A format that an audit reads.

    Attributes:
        title: The format for messages: what it is, and which tool writes it.
        recognizes: Function that returns whether a path (a file or a folder) has this format. It
            looks at names and first bytes only, and raises no error.
        open: Function that opens the path. It raises SourceError for damaged data, with the file,
            the fault and a hint.
        suffixes: Groups of suffixes. In a folder, the files of the first group that exists are
            read. Empty if other files list the files to read.
    """

    title: str
    recognizes: Callable[[Path], bool]
    open: Callable[[Path, Choices], PackedData]
    suffixes: tuple[tuple[str, ...], ...] = ()


READERS: dict[str, Reader] = {
    "packprep": Reader("datasets of packprep", own_rows.recognizes, own_rows.open_rows),
    "megatron": Reader(
        "Megatron's .bin and .idx files, by prefix or folder",
        megatron.recognizes,
        megatron.open_pairs,
        ((".bin", ".idx"),),
    ),
    "mds": Reader("MDS folders of StreamingDataset", mds.recognizes, mds.open_folder),
    "rows": Reader(
        "packed .npy files of NeMo and Megatron-Bridge",
        pickled_rows.recognizes,
        pickled_rows.open_rows,
    ),
    "table": Reader(
        "Parquet, Arrow and Hugging Face folders with input_ids or tokens, of TRL, Axolotl,"
        " LLaMA-Factory, ms-swift, NeMo and Megatron-Bridge",
        tables.recognizes,
        tables.open_table,
        (tables.PARQUET, tables.ARROW),
    ),
    "npy": Reader(".npy files of ids", flat_ids.recognizes_npy, flat_ids.open_npy, ((".npy",),)),
    "bin": Reader(
        ".bin files of ids, as nanoGPT and llm.c write them",
        flat_ids.recognizes_bin,
        flat_ids.open_bin,
        ((".bin",),),
    ),
}
"""Name → reader. The first reader that recognizes a path opens it."""


def open_packed(path: Path, choices: Choices) -> PackedData:
    """Open a packed dataset with the first reader that recognizes it.

    Raises:
        SourceError: If the path does not exist, or if no reader recognizes it.
    """
    for reader in READERS.values():
        if reader.recognizes(path):
            data = reader.open(path, choices)
            return data._replace(notes=(*_files_in_words(path, reader), *data.notes))
    if not path.exists():
        raise SourceError(f"{path}: no such file or directory\nhint: give a packed dataset")
    # The data may be in a folder inside of the given one, which the hint then names.
    for folder in sorted(p for p in path.iterdir() if p.is_dir()) if path.is_dir() else ():
        if any(reader.recognizes(folder) for reader in READERS.values()):
            raise SourceError(f"{path}: it has no data of a known format\nhint: give {folder}")
    titles = "; ".join(reader.title for reader in READERS.values())
    raise SourceError(f"{path}: not a packed dataset of a known format\nhint: audit reads {titles}")


def _files_in_words(path: Path, reader: Reader) -> Iterator[str]:
    """Yield sentences about the files of a folder that are read, and about those that are not."""
    if not path.is_dir() or not reader.suffixes or (path / tables.STATE).exists():
        return
    known_suffixes = {suffix for r in READERS.values() for group in r.suffixes for suffix in group}
    files = sorted(p for p in path.iterdir() if p.suffix.lower() in known_suffixes and p.is_file())
    groups = ([p for p in files if p.suffix.lower() in group] for group in reader.suffixes)
    read = next((group for group in groups if group), [])
    if reader is READERS["megatron"]:
        pairs = megatron.pairs_at(path)
        read = [p for p in read if p.with_suffix(".bin") in pairs]
    unread = [p for p in files if p not in read]
    read = [p for p in read if p.suffix != ".idx"]
    if len(read) > 1:
        yield f"Files that were read as one dataset: {_names(read)}."
    if unread:
        yield f"Files that were not read: {_names(unread)}."


def _names(files: Sequence[Path]) -> str:
    """Return the names of the first files, and the number of the others."""
    more_files = len(files) - _MOST_NAMES
    names = ", ".join(file.name for file in files[:_MOST_NAMES])
    return names + (f" and {more_files:,} more" if more_files > 0 else "")
