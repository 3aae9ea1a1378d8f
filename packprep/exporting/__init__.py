"""Export a dataset in the formats of other tools.

Each export is an entry of EXPORTS and a file `packprep/exporting/NAME.py`.

```
check: refuse ─► write: files ─► located: full paths ─► said: text for the user
```
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from packprep.errors import RecipeError


@dataclass(frozen=True)
class Export:
    """A format that datasets are exported to.

    Its module is imported on demand and has these functions:

    - `check(exporting)` raises RecipeError for a dataset that cannot be exported, and prints a
      warning for information that the export loses.
    - `write(exporting)` writes the files and returns entries for the receipt. One of them is
      `files`: [{file, bytes, digest}].
    - `located(receipt, out)` returns the receipt with full paths, for exports whose printed
      commands contain paths. It is optional.
    - `said(receipt)` returns lines that describe the result and the trainer's options.

    Attributes:
        files: The kind of files, in a few words for `--help`.
        option: The option that selects a form, or "" if there is only one form.
        choices: The values of the option and their descriptions. The first value is the default.
        weighted: The choices that store loss_weights. ("",) if the export has no choices and stores
            loss_weights.
    """

    files: str
    option: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)
    weighted: tuple[str, ...] = ()


EXPORTS = {
    "megatron": Export(
        ".bin and .idx", "what", {"documents": "documents as they were", "rows": "packed rows"}
    ),
    "parquet": Export(
        "Parquet",
        "columns",
        {"nemo": "NeMo's packed sequences", "trl": "TRL's", "full": "the loader's columns"},
        ("full",),
    ),
    "hf": Export(
        "a Hugging Face dataset",
        "trainer",
        {"trl": "TRL", "llamafactory": "LLaMA-Factory", "axolotl": "Axolotl", "swift": "ms-swift"},
    ),
    "jsonl": Export(
        "JSON lines", "what", {"documents": "documents as they were", "rows": "packed rows"}
    ),
    "mds": Export("a StreamingDataset", weighted=("",)),
    "array_record": Export(
        "ArrayRecord",
        "what",
        {"documents": "documents as they were", "rows": "packed rows"},
        ("rows",),
    ),
}


def export_module(name: str) -> Any:
    """Import and return the module of an export. See `Export` for its functions."""
    return import_module(f"{__name__}.{name}")


def exports_with(option: str) -> str:
    """Return a text that lists the exports with an option, as in "--to megatron or --to jsonl".

    Return "no export" if no export has the option.
    """
    return (
        " or ".join(f"--to {name}" for name, export in EXPORTS.items() if export.option == option)
        or "no export"
    )


def chosen_form(name: str, options: Mapping[str, str | None]) -> dict[str, str]:
    """Return the selected form, such as {"to": "hf", "trainer": "trl"}, or {"to": "mds"}.

    Args:
        name: Name of the export.
        options: The value of each option, or None if the user did not give the option.

    Returns:
        {"to": name}. If the export has an option, the result also has the option's name with its
        value. The default is the first of the choices.

    Raises:
        RecipeError: If the export, the option or the value is unknown.
    """
    if name not in EXPORTS:
        raise RecipeError(f"--to {name}: expected {' or '.join(EXPORTS)}")
    option, choices = EXPORTS[name].option, list(EXPORTS[name].choices)
    for key, value in options.items():
        if value is not None and key != option:
            instead = " or ".join(f"--{option} {choice}" for choice in choices) or "no such option"
            raise RecipeError(
                f"--{key} is an option of {exports_with(key)}, not of --to {name}\n"
                f"hint: give {instead}"
            )
    value = options.get(option)
    if value is not None and value not in choices:
        raise RecipeError(f"--{option} {value}: expected {' or '.join(choices)}")
    return {"to": name, **({option: value or choices[0]} if option else {})}
