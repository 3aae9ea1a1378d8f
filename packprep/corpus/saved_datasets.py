"""Folders that Hugging Face `datasets` writes with `save_to_disk`: Arrow streams, and a state.json that lists them."""

import json
from pathlib import Path
from typing import Any

from packprep.errors import SourceError

_MOST_BYTES = 64 << 20  # of a state.json


def saved_files(folder: str) -> list[str]:
    """The names of a dataset's Arrow files, ascending.

    SourceError where state.json is damaged, or says that the dataset is another selection of its files' rows.
    """
    path = Path(folder) / "state.json"
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        state = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(
            f"{path}: cannot be read: {error}. Save the dataset anew, or name its .arrow files."
        ) from error
    if not isinstance(state, dict) or not isinstance(state.get("_data_files"), list):
        raise SourceError(f"{path}: it lists no _data_files. Save the dataset anew, or name its .arrow files.")
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise SourceError(
            f"{path}: the dataset has an indices mapping (_indices_files): it is another selection of the rows of its files. "
            "Save it again after flatten_indices(), with save_to_disk."
        )
    return sorted(_name_of(path, entry) for entry in state["_data_files"])


def _name_of(path: Path, entry: Any) -> str:
    name = entry.get("filename") if isinstance(entry, dict) else None
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise SourceError(f"{path}: {name!r} is no name of a file in its folder. Save the dataset anew.")
    if not (path.parent / name).is_file():
        raise SourceError(f"{path.parent / name}: the file is missing, and state.json lists it. Put it back.")
    return name
