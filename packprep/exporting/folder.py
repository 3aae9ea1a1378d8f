"""The folder of an export: what may stand in it, the note of an export that has begun, the receipt of one that is whole.

    empty ─► export-begun.json ─► files, each whole or not at all ─► export.json, and the note goes

Both name the dataset and the form, so that a folder is only ever filled by one export; the same command goes on.
"""

import os
from collections.abc import Mapping
from typing import Any

from packprep.building.output import LocalOutput, Output, RemoteOutput
from packprep.dataset.json_files import decode, encode
from packprep.errors import DatasetError, RecipeError

RECEIPT = "export.json"
BEGUN = "export-begun.json"
FORMAT, VERSION = "packprep export", 1


def refuse_nested(directory: Output, out: Output) -> None:
    """RecipeError if an export would lie among the files of the dataset that it is made of."""
    inner, outer = _parts(out), _parts(directory)
    if inner[: len(outer)] == outer:
        raise RecipeError(
            f"--out {out} lies in the dataset {directory}, which has no other files: choose another folder"
        )


def _parts(out: Output) -> list[str]:
    place = str(out) if isinstance(out, RemoteOutput) else os.path.realpath(str(out))
    return place.rstrip("/").split("/")


def standing_export(out: Output, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """The receipt of the export that stands whole in `out`; None where it is to be made, and `out` notes that it has begun.

    identity: what the folder is to hold. RecipeError if it holds something else.
    """
    for name in (RECEIPT, BEGUN):
        found = _read(out, name)
        if found is None:
            continue
        for key, value in identity.items():
            if found.get(key) != value:
                raise RecipeError(
                    f"--out {out} holds another export: {key} is {found.get(key)!r} in {name} and {value!r} here; choose "
                    "another folder, or remove that one"
                )
        if name == RECEIPT and all(out.size(file["file"]) == file["bytes"] for file in found["files"]):
            _tidy_up(out)  # who wrote the receipt may have been killed right after
            return found
        if name == BEGUN:
            return None
    if _read(out, RECEIPT) is None and (others := _names(out)):
        raise RecipeError(
            f"--out {out} is not empty and holds no export (there is {others[0]!r}): choose another folder"
        )
    out.write_first(BEGUN, encode(identity))
    return None


def finish(out: Output, receipt: Mapping[str, Any]) -> None:
    """Write the receipt, the last file of an export."""
    out.write_whole(RECEIPT, [encode(receipt)])
    _tidy_up(out)


def _tidy_up(out: Output) -> None:
    out.remove(BEGUN)
    out.remove_temporaries()


def _read(out: Output, name: str) -> dict[str, Any] | None:
    try:
        value = decode(out.read(name), out.place(name))
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise RecipeError(f"--out {out} is no folder: choose another place") from None
    except OSError as error:
        raise RecipeError(f"{out.place(name)}: {error.strerror}; choose another folder") from None
    if not isinstance(value, dict) or (name == RECEIPT and not _are_files(value.get("files"))):
        raise DatasetError(f"{out.place(name)}: not the note of an export; choose another folder, or remove that one")
    return value


def _are_files(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(file, dict) and isinstance(file.get("file"), str) and "bytes" in file for file in value
    )


def _names(out: Output) -> list[str]:
    """What lies in the folder, but for temporaries of writes that were killed."""
    if isinstance(out, LocalOutput):
        try:
            names = sorted(os.listdir(out.path))
        except FileNotFoundError:
            return []
        return [name for name in names if not (name.startswith(".") and name.endswith(".tmp"))]
    assert isinstance(out, RemoteOutput)
    return [name for name, _ in out.remote.list()]
