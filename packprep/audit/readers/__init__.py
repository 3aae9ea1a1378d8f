"""The registry of the formats that an audit reads."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from packprep.audit.readers import flat_ids, mds, megatron, own_rows, pickled_rows, tables
from packprep.audit.rows import Choices, PackedData
from packprep.errors import SourceError

__all__ = ["READERS", "Reader", "open_packed"]


class Reader(NamedTuple):
    """A format that an audit reads.

    Attributes:
        title: The format for messages: what it is, and which tool writes it.
        recognizes: Function that returns whether a path (a file or a folder) has this format. It
            looks at names and first bytes only, and raises no error.
        open: Function that opens the path. It raises SourceError for damaged data, with the file,
            the fault and a hint.
    """

    title: str
    recognizes: Callable[[Path], bool]
    open: Callable[[Path, Choices], PackedData]


READERS: dict[str, Reader] = {
    "packprep": Reader("datasets of packprep", own_rows.recognizes, own_rows.open_rows),
    "megatron": Reader(
        "Megatron's .bin and .idx files, by prefix or folder",
        megatron.recognizes,
        megatron.open_pairs,
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
    ),
    "npy": Reader(".npy files of ids", flat_ids.recognizes_npy, flat_ids.open_npy),
    "bin": Reader(
        ".bin files of ids, as nanoGPT and llm.c write them",
        flat_ids.recognizes_bin,
        flat_ids.open_bin,
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
            return reader.open(path, choices)
    if not path.exists():
        raise SourceError(f"{path}: no such file or directory\nhint: give a packed dataset")
    titles = "; ".join(reader.title for reader in READERS.values())
    raise SourceError(f"{path}: not a packed dataset of a known format\nhint: audit reads {titles}")
