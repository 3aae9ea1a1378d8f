"""Read packed tables: Parquet and Arrow files, and folders of Hugging Face `datasets`.

TRL, Axolotl, LLaMA-Factory, ms-swift, NeMo and Megatron-Bridge write such tables. `columns.py` says
what their columns mean.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from packprep.audit.readers.columns import (
    COLUMNS,
    IDS,
    PER_DOCUMENT,
    StoredRows,
    packed_data,
    stored_rows,
)
from packprep.audit.rows import Choices, PackedData
from packprep.dataset.boundaries import offsets_of
from packprep.errors import SourceError
from packprep.sources.formats import arrow, parquet
from packprep.sources.formats.table import list_lengths

STATE = "state.json"
"""File that `save_to_disk` of Hugging Face `datasets` writes next to the Arrow files of a split."""
PARQUET, ARROW = (".parquet", ".pq"), (".arrow",)


class TableFormat(NamedTuple):
    """A format of tables."""

    title: str
    schema_of: Callable[[str], pa.Schema]
    record_batches: Callable[[str, Sequence[str], int], Iterator[pa.RecordBatch]]


_PARQUET = TableFormat("Parquet", parquet.schema_of, parquet.record_batches)
_ARROW = TableFormat("Arrow", arrow.schema_of, arrow.record_batches)


def recognizes(path: Path) -> bool:
    """Return whether a path is a table, a folder of tables, or a folder of splits of tables."""
    if path.is_file():
        return path.suffix.lower() in (*PARQUET, *ARROW)
    return (path / STATE).exists() or bool(_files(path) or _splits(path))


def open_table(path: Path, choices: Choices) -> PackedData:
    """Open a table, or all tables of a folder in the order of their names.

    Raises:
        SourceError: If a file is damaged, or has no column of token ids. Also if a folder has
            several splits, or a column has values of the wrong type.
    """
    splits = [] if path.is_file() or _files(path) else _splits(path)
    if len(splits) > 1:
        names = ", ".join(split.name for split in splits)
        raise SourceError(
            f"{path}: it has several splits: {names}\nhint: audit {splits[0]}, then the others"
        )
    folder = splits[0] if splits else path
    files = [folder] if folder.is_file() else _files(folder)
    table = _PARQUET if files[0].suffix.lower() in PARQUET else _ARROW
    schema = table.schema_of(str(files[0]))
    kinds = _kinds(files[0], schema)
    ignored = sorted(name for name in set(schema.names) & set(COLUMNS) if name not in kinds)
    notes = tuple(
        f"The column {name} was not read, because its type is {schema.field(name).type}."
        for name in ignored
        if not pa.types.is_null(schema.field(name).type)
    )
    read = [name for name in schema.names if name not in ignored]

    def stored() -> Iterator[StoredRows]:
        for file in files:
            _check_schema(file, table.schema_of(str(file)), kinds)
            first_row = 0
            for batch in table.record_batches(str(file), list(kinds), choices.batch_tokens):
                yield _stored(file, first_row, dict(zip(kinds, batch.columns, strict=True)))
                first_row += batch.num_rows

    saved = folder.is_dir() and (folder / STATE).exists()
    title = "Hugging Face folder" if saved else table.title
    return packed_data(f"{title} with {', '.join(kinds)}", stored, read, notes)


def _files(folder: Path) -> list[Path]:
    """Return the files of a split, in order."""
    if (folder / STATE).exists():
        return [folder / name for name in arrow.saved_files(str(folder))]
    try:
        paths = sorted(path for path in folder.iterdir() if path.is_file())
    except OSError:
        return []
    for suffixes in (PARQUET, ARROW):
        if split_files := [path for path in paths if path.suffix.lower() in suffixes]:
            return split_files
    return []


def _splits(folder: Path) -> list[Path]:
    """Return the folders of splits that `save_to_disk` wrote into a folder."""
    try:
        return sorted(path for path in folder.iterdir() if (path / STATE).exists())
    except OSError:
        return []


def _kinds(file: Path, schema: pa.Schema) -> dict[str, pa.DataType]:
    """Return column → type of its values, for the columns to read. The token ids come first."""
    types_by_column: dict[str, pa.DataType] = {}
    for name in COLUMNS:
        if name not in schema.names or name in IDS and types_by_column:
            continue
        if len(schema.get_all_field_indices(name)) > 1:
            raise SourceError(f"{file}: several columns named {name!r}\nhint: write only one")
        kind = schema.field(name).type
        if not (
            pa.types.is_list(kind)
            or pa.types.is_large_list(kind)
            or pa.types.is_fixed_size_list(kind)
        ):
            continue
        is_integer = pa.types.is_integer(kind.value_type)
        # Masks may be bools or floats. Ids and lengths must be integers.
        is_flag = name not in (*IDS, *PER_DOCUMENT) and (
            pa.types.is_boolean(kind.value_type) or pa.types.is_floating(kind.value_type)
        )
        if is_integer or is_flag:
            types_by_column[name] = kind.value_type
    if not types_by_column or next(iter(types_by_column)) not in IDS:
        names = ", ".join(map(repr, schema.names[:50])) or "none"
        raise SourceError(
            f"{file}: no column 'input_ids' or 'tokens' with lists of integers; the columns are"
            f" {names}\nhint: give a dataset that is already tokenized"
        )
    return types_by_column


def _check_schema(file: Path, schema: pa.Schema, kinds: Mapping[str, pa.DataType]) -> None:
    """Check that a file has the columns of the first file of its folder.

    Raises:
        SourceError: If it has not.
    """
    file_columns = _kinds(file, schema)
    if list(file_columns) != list(kinds):
        raise SourceError(
            f"{file}: the columns are {', '.join(file_columns)}, but the first file has"
            f" {', '.join(kinds)}\nhint: audit the files with the same columns together"
        )


def _stored(file: Path, first_row: int, columns: Mapping[str, pa.Array]) -> StoredRows:
    values = {}
    for name, column in columns.items():
        _check_nulls(file, first_row, name, column)
        values[name] = column.flatten().to_numpy(zero_copy_only=False), list_lengths(column)
    return stored_rows(file, first_row, values, next(iter(columns)))


def _check_nulls(file: Path, first_row: int, name: str, column: pa.Array) -> None:
    """Check that neither a row of a column nor a value in a row is null.

    Raises:
        SourceError: If one is.
    """
    if column.null_count == 0:
        inner_values = column.flatten()
        if inner_values.null_count == 0:
            return
        value = int(np.argmax(inner_values.is_null().to_numpy(zero_copy_only=False)))
        row = int(np.searchsorted(offsets_of(list_lengths(column)), value, "right")) - 1
    else:
        row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
    raise SourceError(
        f"{file}: row {first_row + row}: {name} is null or contains a null\n"
        "hint: write the dataset again without nulls"
    )
