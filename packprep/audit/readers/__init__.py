"""The registry of the formats that an audit reads."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

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


READERS: dict[str, Reader] = {}
"""Name → reader. The first reader that recognizes a path opens it."""


def open_packed(path: Path, choices: Choices) -> PackedData:
    """Open a packed dataset with the first reader that recognizes it.

    Raises:
        SourceError: If the path does not exist, or if no reader recognizes it.
    """
    if not path.exists():
        raise SourceError(f"{path}: no such file or directory\nhint: give a packed dataset")
    for reader in READERS.values():
        if reader.recognizes(path):
            return reader.open(path, choices)
    titles = "; ".join(reader.title for reader in READERS.values())
    raise SourceError(f"{path}: not a packed dataset of a known format\nhint: audit reads {titles}")
