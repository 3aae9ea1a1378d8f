"""Convert rows of Arrow columns to documents, for both Parquet and Arrow files.

A document is a text or a list of token ids.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packprep.dataset.boundaries import offsets_of
from packprep.errors import SourceError
from packprep.format import LFS_POINTER, open_file
from packprep.recipe import as_toml
from packprep.sources.formats import batch as limits
from packprep.sources.formats.batch import (
    LOSS_SPANS,
    MEDIA,
    TOKEN_TEXT_BYTES,
    Batch,
    BatchBuilder,
    Grouping,
    Keep,
    Slice,
    Supervision,
    are_too_long,
    by_fields,
    fields_read,
    invalid_utf8,
    kept,
    slices,
    too_large,
    too_many_tokens,
)
from packprep.sources.formats.fields import (
    LAYOUTS,
    OF_PLACE,
    REFUSED_FIELDS,
    UNREAD_MEDIA,
    Fields,
    Layout,
    group_value,
    instead_of_text,
    is_message,
    of_table,
    refused,
)
from packprep.sources.formats.jsonl import nested_too_deep, read_integer
from packprep.sources.formats.token_masks import BAD_MASK, MASKS
from packprep.sources.formats.token_rows import (
    COLUMNS,
    TokenRows,
    batch_of_rows,
    not_as_long,
    row_weights,
)
from packprep.sources.passes import FieldColumns, ReadFields

SLICE_ROWS = 1 << 14  # rows processed at once
REPEATED_BYTES = 128 << 20  # maximum text bytes processed at once, after a dictionary is expanded
_MOST_TEXT_KEYS = 100
# Maximum size of a block that is decoded whole: a page, or a buffer of a compressed record batch.
MAX_BLOCK_BYTES = 256 << 20


class Column(NamedTuple):
    """The location of a key in a file's schema.

    Attributes:
        number: Index of the column.
        inside: Names of the struct fields that lead from the column to the key, for example ("b",)
            for the key `a.b` of a struct column a.
    """

    number: int
    inside: tuple[str, ...] = ()

    def name(self, schema: pa.Schema) -> str:
        """Return the dotted name of the key in a Parquet file."""
        return ".".join((schema.names[self.number], *self.inside))

    def of(self, values: pa.Array) -> pa.Array:
        """Return the values of this key, given `values`, the values of its whole column."""
        for name in self.inside:
            values = pc.struct_field(values, [name])
        return values

    def type_in(self, schema: pa.Schema) -> pa.DataType:
        """Return the type of this key's values in a schema."""
        kind = schema.field(self.number).type
        for name in self.inside:
            kind = kind.field(name).type
        return kind


SizesOf = Callable[[Sequence[str]], Sequence[int]]
"""Function that takes keys, and returns the approximate bytes of each key's values in a split."""


def find_columns(
    path: str, schema: pa.Schema, text_key: str, fields: Fields | None, sizes_of: SizesOf
) -> dict[str, Column]:
    """Return key → column for the keys to read from a file, including the text's key if it exists.

    Args:
        path: Path or URL of the file, for error messages.
        schema: The file's schema.
        text_key: Key of the text.
        fields: The other fields to read. None reads only the text.
        sizes_of: Function that returns the sizes of the values at some keys. If the text's column
            is missing, the error message suggests the key with the largest texts.

    Raises:
        SourceError: If a column occurs more than once, or if the file has neither texts nor a
            readable layout. Also if the file has media and the recipe has no media kinds.
    """
    if fields is None:
        return {text_key: _text_column(path, schema, text_key, sizes_of)}
    spans = _column(path, schema, LOSS_SPANS, text_key)
    _column(path, schema, fields.messages_key, text_key)  # Refuse several columns of this name.
    columns_by_key = {LOSS_SPANS: spans} if spans else {}
    text = fields.format == "auto" and _place(schema, text_key)

    def fits(layout: Layout) -> bool:
        return all(_column(path, schema, fields.key_of(field), text_key) for field in layout.needs)

    # A file has a layout if it has all columns that the layout needs.
    layouts = [
        layout for layout in LAYOUTS if fields.format in ("auto", layout.name) and fits(layout)
    ]
    if text:
        columns_by_key[text_key] = _text_column(path, schema, text_key, sizes_of)
    elif not any(not layout.advice for layout in layouts):
        raise _no_layout(path, schema, text_key, fields, layouts, sizes_of)
    names = [name for layout in layouts for name in (*layout.needs, *layout.may_have)]
    # A refused field must be read too, so that records with it are rejected.
    if any(not layout.advice and (not text or layout.name == "messages") for layout in layouts):
        names += REFUSED_FIELDS
    if not fields.kinds and text_key != MEDIA and _has_places(schema):
        raise SourceError(f"{path}: {UNREAD_MEDIA}")
    media = [MEDIA] if fields.kinds and _column(path, schema, MEDIA, text_key) else []
    for key in map(fields.key_of, [*names, *media, "weight"]):
        if column := _column(path, schema, key, text_key):
            columns_by_key[key] = column
    return columns_by_key


GROUP_BY, ORDER_BY = "\0group_by", "\0order_by"
"""The keys of the columns that `find_group_columns` returns. No column of a file has these names.
"""


def find_group_columns(
    path: str, schema: pa.Schema, grouping: Grouping | None
) -> dict[str, Column]:
    """Return GROUP_BY and ORDER_BY → column, for the settings that `grouping` has.

    Raises:
        SourceError: If a column is missing or occurs more than once, or if it contains lists or
            objects.
    """
    columns_by_key: dict[str, Column] = {}
    asked = ((GROUP_BY, "group_by"), (ORDER_BY, "order_by")) if grouping else ()
    for own_key, name in asked:
        if not (key := getattr(grouping, name)):
            continue
        place, count = _place(schema, key), len(schema.get_all_field_indices(key))
        if place is None:
            names = ", ".join(map(repr, schema.names[:50])) or "none"
            raise SourceError(
                f"{path}: {count or 'no'} columns named {key!r}; the columns are {names}\n"
                f"hint: set {name} to a column that occurs once"
            )
        kind = place.type_in(schema)
        if pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType):
            raise SourceError(
                f"{path}: the column {key!r} holds {kind}, but {name} takes texts, numbers, true"
                " and false\n"
                f"hint: set {name} to another column"
            )
        columns_by_key[own_key] = place
    return columns_by_key


def note_groups(
    batch: BatchBuilder, work_range: Slice, columns: dict[str, pa.Array], numbers: np.ndarray
) -> dict[str, pa.Array]:
    """Note the values to group by of some rows, and return `columns` without these values.

    Args:
        batch: Builder that the rows are added to later.
        work_range: The work range of the rows.
        columns: Maps each key to its values.
        numbers: int64[rows], the number of each row in the file.
    """
    grouping, group_columns = (
        work_range.grouping,
        [columns[key] for key in (GROUP_BY, ORDER_BY) if key in columns],
    )
    # Values are noted by row number, because rows are filtered and added later.
    if grouping is not None:
        keys = [key for key in (grouping.group_by, grouping.order_by) if key]
        rows = zip(*(_scalars(column).to_pylist() for column in group_columns), strict=True)
        values = (
            group_value(grouping, dict(zip(keys, row, strict=True)).get, work_range.path, number)
            for number, row in zip(numbers.tolist(), rows, strict=True)
        )
        batch.note(numbers, values)
    return {key: values for key, values in columns.items() if key not in (GROUP_BY, ORDER_BY)}


def _scalars(column: pa.Array) -> pa.Array:
    """Return a column without dictionary, with its texts as bytes and its times as integers.

    Texts are never decoded. Python has no times of nanoseconds, and no years beyond 9999.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        return column.cast(pa.int32() if kind.bit_width == 32 else pa.int64())
    is_text = _is_text(kind) and not pa.types.is_null(kind)
    return column.cast(pa.large_binary()) if is_text else column


def _has_places(schema: pa.Schema) -> bool:
    """Return whether a schema has a `media` column with lists of media entries."""
    index = schema.get_field_index(MEDIA)
    kind = schema.field(index).type if index >= 0 else pa.null()
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return (
        is_list
        and pa.types.is_struct(kind.value_type)
        and {entry_field.name for entry_field in kind.value_type} >= OF_PLACE
    )


def _no_layout(
    path: str,
    schema: pa.Schema,
    text_key: str,
    fields: Fields,
    layouts: list[Layout],
    sizes_of: SizesOf,
) -> SourceError:
    """Return the error for a file with neither texts nor a readable layout.

    `layouts` contains the layouts of the file, if it has any. packprep refuses all of them.
    """
    names = ", ".join(map(repr, schema.names[:50])) or "none"
    if layouts:
        return SourceError(f"{path}: its rows are {refused(layouts[0])}. Its columns are {names}")
    if fields.format != "auto":
        layout = next(layout for layout in LAYOUTS if layout.name == fields.format)
        wanted_columns = " and ".join(repr(fields.key_of(field)) for field in layout.needs)
        return SourceError(
            f"{path}: messages_format = {fields.format!r} requires columns named {wanted_columns},"
            f" but the columns are {names}\n"
            "hint: set messages_key to the column that holds the messages, or messages_format to"
            " the layout of the file"
        )
    if key := _messages_in(schema):
        return SourceError(
            f"{path}: no column named {text_key!r}, but a column of messages\n"
            f"hint: set messages_key = {as_toml(key)}",
            {"messages_key": key},
        )
    return _text_missing(path, schema, text_key, "no column", sizes_of)


def _messages_in(schema: pa.Schema) -> str:
    """Return the key of a column with messages, or an empty string.

    The key is `a.b` for field b of a struct column a.
    """
    for field in schema:
        kind = field.type
        if pa.types.is_struct(kind) and (inner_key := _messages_in(pa.schema(list(kind)))):
            return f"{field.name}.{inner_key}"
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if (
            is_list
            and pa.types.is_struct(kind.value_type)
            and is_message([entry_field.name for entry_field in kind.value_type])
        ):
            return str(field.name)
    return ""


def _column(path: str, schema: pa.Schema, key: str, text_key: str) -> Column | None:
    """Return the location of a key in a schema. The key is for a field other than the text.

    Return None if the schema does not contain the key, or if the key is `text_key`.

    Raises:
        SourceError: If several columns have this name.
    """
    if key == text_key:
        return None
    if (count := len(schema.get_all_field_indices(key))) > 1:
        raise SourceError(
            f"{path}: {count} columns named {key!r}\n"
            'hint: write the file with one of them, or set documents.loss_spans = "ignore"'
        )
    return _place(schema, key)


def _place(schema: pa.Schema, key: str) -> Column | None:
    """Return the location of a key in a schema, or None if the schema does not contain it.

    The key `a.b` also refers to field b of a struct column a.
    """
    index = schema.get_field_index(key)
    if index >= 0 or "." not in key:
        return Column(index) if index >= 0 else None
    outer_key, inner_key = key.split(".", 1)
    index = schema.get_field_index(outer_key)
    if index < 0 or not pa.types.is_struct(schema.field(index).type):
        return None
    inner_column = _place(pa.schema(list(schema.field(index).type)), inner_key)
    return inner_column and Column(
        index, (schema.field(index).type.field(inner_column.number).name, *inner_column.inside)
    )


def _text_column(path: str, schema: pa.Schema, text_key: str, sizes_of: SizesOf) -> Column:
    """Return the location of the texts in a schema.

    A column that contains only nulls is accepted, and each of its rows becomes a reject.

    Raises:
        SourceError: If the column is missing or occurs more than once, or if it contains neither
            strings nor bytes.
    """
    place, count = _place(schema, text_key), len(schema.get_all_field_indices(text_key))
    if place is None:
        raise _text_missing(
            path, schema, text_key, f"{count} columns" if count else "no column", sizes_of
        )
    kind = place.type_in(schema)
    if not _is_text(kind.value_type if pa.types.is_dictionary(kind) else kind):
        raise SourceError(
            f"{path}: the column {text_key!r} holds {kind}, not strings\n"
            "hint: set text_key to the column that holds the text"
        )
    return place


def _text_missing(
    path: str, schema: pa.Schema, text_key: str, problem: str, sizes_of: SizesOf
) -> SourceError:
    """Return the error for a file with no column, or with several columns, named `text_key`.

    The message suggests the key with the most bytes of text, or other settings.
    """
    names = ", ".join(map(repr, schema.names[:50])) or "none"
    # The advice depends on the columns, which may have a layout, texts or token ids.
    layout = next((layout for layout in LAYOUTS if set(layout.needs) <= set(schema.names)), None)
    keys = [
        (key, kind)
        for key, kind in _leaves(schema)
        if _is_text(kind) and not pa.types.is_null(kind)
    ]
    # Columns of bytes may contain anything, so columns of strings are preferred.
    texts = [key for key, kind in keys if not _is_binary(kind)] or [key for key, _ in keys]
    texts = texts[:_MOST_TEXT_KEYS]
    settings = {}
    advice = "set text_key (--text-key) to the column that holds the text"
    if layout is not None:
        advice = f"for {instead_of_text(layout)}"
    elif texts:
        # Sizes need a read of the file, so a single candidate is not measured.
        sizes = sizes_of(texts) if len(texts) > 1 else [1]
        settings = {"text_key": texts[int(np.argmax(sizes))]}
        if len(texts) > 1 and texts != schema.names:
            advice += f" (one of {', '.join(map(repr, texts[:20]))})"
        advice += f", as in text_key = {as_toml(settings['text_key'])}"
    elif any(field.name in COLUMNS and _is_tokens(field.type) for field in schema):
        settings = {"format": "tokens"}
        advice = (
            'set format = "tokens" for its lists of token ids, and give the tokenizer that made'
            " them"
        )
    return SourceError(
        f"{path}: {problem} named {text_key!r}; the columns are {names}\nhint: {advice}", settings
    )


def _leaves(schema: pa.Schema) -> Iterator[tuple[str, pa.DataType]]:
    """Yield (key, type of the values) for each key that a column or a struct field can have.

    The key of field b of a struct column a is `a.b`. A struct column itself is not yielded. Names
    that occur more than once are skipped.
    """
    for name in schema.names:
        if len(schema.get_all_field_indices(name)) > 1:
            continue
        kind = schema.field(name).type
        if pa.types.is_struct(kind) and "." not in name:
            yield from (
                (f"{name}.{inner_key}", inner_type)
                for inner_key, inner_type in _leaves(pa.schema(list(kind)))
            )
        else:
            yield name, kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_binary(kind: pa.DataType) -> bool:
    return any(
        getattr(pa.types, f"is_{name}")(kind) for name in ("binary", "large_binary", "binary_view")
    )


def _is_text(kind: pa.DataType) -> bool:
    kinds = "string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null"
    return any(getattr(pa.types, f"is_{name}")(kind) for name in kinds)


def check_block(path: str, block_name: str, n_bytes: int, advice: str) -> None:
    """Check that a decoded block does not exceed MAX_BLOCK_BYTES.

    Args:
        path: Path or URL of the file.
        block_name: Name of the block, for example "a page".
        n_bytes: Size of the decoded block in bytes.
        advice: Remedy for the error message.

    Raises:
        SourceError: If the block is too large.
    """
    if n_bytes > MAX_BLOCK_BYTES:
        raise SourceError(
            f"{path}: {block_name} has {n_bytes} bytes after decompression, but at most"
            f" {MAX_BLOCK_BYTES} can be decoded at once\n"
            f"hint: {advice}, or take the file out of the recipe"
        )


@contextmanager
def arrow_errors(path: str, file_kind: str) -> Iterator[None]:
    """Convert pyarrow's errors to a `SourceError` while the context is open.

    The message names the file at `path` and a remedy. Errors of the operating system are not
    converted.

    Raises:
        SourceError: If pyarrow reports damaged data.
    """
    try:
        yield
    except UnicodeDecodeError as error:  # The name of a column is invalid.
        raise SourceError(
            f"{path}: not a readable {file_kind}, because a name in it is not UTF-8: {error}\n"
            "hint: fetch the file again, or take it out of the recipe"
        ) from error
    except (pa.ArrowException, OSError) as error:
        # pyarrow also reports damaged data as an OSError, but without an error number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        mend = (
            "write it without encryption"
            if "decrypt" in str(error).lower()
            else "fetch the file again"
        )
        if _is_pointer(path):
            error, mend = (
                OSError("it is a Git LFS pointer, which only refers to the file"),
                "fetch the file with git lfs pull",
            )
        raise SourceError(
            f"{path}: not a readable {file_kind}: {error}\n"
            f"hint: {mend}, or take it out of the recipe"
        ) from error


def _is_pointer(path: str) -> bool:
    with suppress(OSError), open_file(path) as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER
    return False


class RowSelection(NamedTuple):
    """The selection of some of n rows that were read from a table.

    Attributes:
        numbers: int64[n], row number in the file of each row, ascending.
        keep: Selects the documents to decode, or None for all.
        wanted_from: Row number in the file of the first row to take. The rows before it are only
            passed to `keep`.
        chosen_by: Maps the fields that `keep` reads to their n values.
    """

    numbers: np.ndarray
    keep: Keep | None
    wanted_from: int
    chosen_by: Mapping[str, pa.Array]

    def of_rows(
        self, file: int, begin: int, count: int, sizes: Callable[[], np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the row numbers of rows begin … begin + count − 1, and which of them to take.

        Args:
            file: Index of the file.
            begin: The first of the rows, counted from the first row that was read.
            count: Number of rows.
            sizes: Function that returns the sizes of these rows, as in `kept`.

        Returns:
            int64[count] and bool[count].
        """
        numbers, fields = self.numbers[begin : begin + count], rows_of(self.chosen_by, begin, count)
        return numbers, kept(self.keep, file, numbers, sizes, fields, self.wanted_from)


def read_rows(
    batch: BatchBuilder,
    columns: Mapping[str, pa.Array],
    text_key: str,
    fields: Fields | None,
    selection: RowSelection,
    batch_bytes: int,
) -> Iterator[Batch]:
    """Add rows of columns to a batch, and yield the batch each time it contains `batch_bytes`.

    Args:
        batch: Builder that receives the documents.
        columns: Maps each key to its values, all with the same number of rows.
        text_key: Key of the text.
        fields: The other fields to read, or None.
        selection: Selects the rows to add.
        batch_bytes: Content size in bytes at which a batch is complete.
    """
    n_rows = len(next(iter(columns.values())))
    text = columns.get(text_key)
    at_once = _rows_at_once(text)
    for begin in range(0, n_rows, at_once):
        # In a file without a text column, every text is null.
        rows = (pa.nulls(n_rows, pa.string()) if text is None else text).slice(begin, at_once)
        # If each row has a text, only fields that apply to texts are needed.
        needed = [
            key
            for key in columns
            if key != text_key and (_has_nulls(rows) or not fields or fields.says(key))
        ]
        other_columns = {key: columns[key].slice(begin, at_once) for key in needed}
        # A Choice counts every row, so sizes refer to the rows before the filter.
        counted = [other_columns[key] for key in fields.counted(other_columns)] if fields else []
        sizes = partial(_sizes, rows, counted)
        positions, is_wanted = selection.of_rows(batch.file, begin, len(rows), sizes)
        rows, *values = map(without_views, (rows, *other_columns.values()))
        # Filter before a dictionary is expanded, because the expanded texts may be large.
        if not is_wanted.all():
            mask = mask_of(is_wanted)
            positions, rows, values = (
                positions[is_wanted],
                rows.filter(mask),
                [column.filter(mask) for column in values],
            )
        if pa.types.is_dictionary(rows.type):
            rows = rows.dictionary_decode()
        if pa.types.is_null(rows.type):
            rows = rows.cast(pa.string())
        beside = dict(zip(other_columns, values, strict=True))
        yield from _add_rows(
            batch, rows.cast(pa.large_binary()), beside, fields, positions, batch_bytes
        )


def find_field_columns(path: str, schema: pa.Schema, keep: Keep | None) -> dict[str, Column]:
    """Return name → column for the fields of records that a selector reads.

    The result is {} if `keep` selects without fields.

    Raises:
        SourceError: If the file does not have a field, or if an expression does not accept its
            type.
    """
    places = {name: _place(schema, name) for name in fields_read(keep)}
    columns_by_name = {name: column for name, column in places.items() if column is not None}
    if (chosen := by_fields(keep)) is not None:
        types = {name: column.type_in(schema) for name, column in columns_by_name.items()}
        chosen.passes.check(path, types, dict(_leaves(schema)))
    elif len(columns_by_name) < len(places):
        missing = next(name for name in places if name not in columns_by_name)
        field_list = ", ".join(f"{name!r} ({kind})" for name, kind in islice(_leaves(schema), 50))
        raise SourceError(
            f"{path}: there is no field {missing!r} to keep; the fields are"
            f" {field_list or 'none'}\n"
            "hint: correct keep, or make the file a source of its own"
        )
    return columns_by_name


def rows_of(columns: Mapping[str, pa.Array], begin: int, count: int) -> ReadFields:
    """Return a function that returns the fields of `count` rows, as the argument of `kept`."""

    def read(names: Sequence[str]) -> list[FieldColumns]:
        values = {name: columns[name].slice(begin, count) for name in names}
        return [FieldColumns(np.arange(len(next(iter(values.values())))), values)]

    return read


def _has_nulls(rows: pa.Array) -> bool:
    return bool(rows.null_count) or (
        pa.types.is_dictionary(rows.type) and bool(rows.dictionary.null_count)
    )


def without_views(column: pa.Array) -> pa.Array:
    """Return a column of string views or binary views as binary, and any other column unchanged.

    pyarrow cannot filter views.
    """
    return (
        column.cast(pa.large_binary())
        if column.type in (pa.string_view(), pa.binary_view())
        else column
    )


def mask_of(chosen: np.ndarray) -> pa.BooleanArray:
    """Return bool[n] as an Arrow array. `pa.array` would import pandas, which takes long."""
    bits = pa.py_buffer(np.packbits(chosen, bitorder="little"))
    return pa.BooleanArray.from_buffers(pa.bool_(), len(chosen), [None, bits])


def _sizes(rows: pa.Array, counted: Sequence[pa.Array]) -> np.ndarray:
    """Return the size of each row, int64[n].

    The size is the number of bytes of the row's text in `rows`. If the text is null, it is the sum
    over the columns in `counted`: a text counts with its bytes, and a list with its items.
    """
    other_sizes = pa.array(
        sum((_lengths(column) for column in counted), np.zeros(len(rows), np.int64))
    )
    if pa.types.is_null(rows.type):
        return other_sizes.to_numpy(zero_copy_only=False)
    sizes = pc.if_else(rows.is_null(), other_sizes, pa.array(_lengths(rows)))
    return sizes.to_numpy(zero_copy_only=False).astype(np.int64)


def _lengths(column: pa.Array) -> np.ndarray:
    """Return the number of bytes of each text, or the number of items of each list, int64[n].

    The result is 0 for null and for values of other types.
    """
    if pa.types.is_dictionary(column.type):
        of_values = pa.array(_lengths(column.dictionary))
        lengths = of_values.take(column.indices)
    elif _is_list(column.type):
        lengths = pc.list_value_length(column)
    elif _is_text(column.type) and not pa.types.is_null(column.type):
        lengths = pc.binary_length(column.cast(pa.large_binary()))
    else:
        return np.zeros(len(column), np.int64)
    return lengths.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)


def _is_list(kind: pa.DataType) -> bool:
    return any(
        getattr(pa.types, f"is_{name}")(kind) for name in ("list", "large_list", "fixed_size_list")
    )


def _rows_at_once(text: pa.Array | None) -> int:
    """Return the number of rows to process at once.

    `text` is the column of texts, or None. If it has a dictionary, the texts of these rows fit in
    REPEATED_BYTES, even if each row has the dictionary's longest text.
    """
    if text is None or not pa.types.is_dictionary(text.type) or not len(text.dictionary):
        return SLICE_ROWS
    longest = pc.max(pc.binary_length(text.dictionary.cast(pa.large_binary()))).as_py() or 1
    return max(1, min(SLICE_ROWS, REPEATED_BYTES // longest))


def _add_rows(
    batch: BatchBuilder,
    rows: pa.LargeBinaryArray,
    beside: Mapping[str, pa.Array],
    fields: Fields | None,
    positions: np.ndarray,
    batch_bytes: int,
) -> Iterator[Batch]:
    """Add rows to a batch, and yield the batch each time it contains `batch_bytes`.

    `rows` contains the text of each row, or null. `beside` maps the other keys to their values.
    """
    if rows.null_count or not len(rows) or beside:
        yield from _add_one_by_one(batch, rows, beside, fields, positions, batch_bytes)
        return
    sizes = np.from_dlpack(pc.binary_length(rows))  # `to_numpy` would import pandas.
    for batch_slice in slices(sizes, batch_bytes):
        texts = _texts(rows[batch_slice], sizes[batch_slice])
        if texts is not None:
            yield from batch.extend(positions[batch_slice], texts, sizes[batch_slice], batch_bytes)
        else:
            yield from _add_one_by_one(
                batch, rows[batch_slice], {}, fields, positions[batch_slice], batch_bytes
            )


def _texts(rows: pa.LargeBinaryArray, sizes: np.ndarray) -> list[str] | None:
    """Return the texts of rows, or None if one of them is invalid UTF-8 or too large.

    `rows` has no nulls. `sizes`, int64[n], has the bytes of each text.
    """
    if sizes.max() > limits.MAX_DOCUMENT_BYTES:
        return None
    try:
        texts: list[str] = rows.view(pa.large_string()).to_pylist()
    except UnicodeDecodeError:
        return None
    return texts


def _add_one_by_one(
    batch: BatchBuilder,
    rows: pa.LargeBinaryArray,
    beside: Mapping[str, pa.Array],
    fields: Fields | None,
    positions: np.ndarray,
    batch_bytes: int,
) -> Iterator[Batch]:
    sizes = pc.binary_length(rows).to_pylist()
    for i, (position, size) in enumerate(zip(positions.tolist(), sizes, strict=True)):
        if size is not None and size > limits.MAX_DOCUMENT_BYTES:
            batch.reject(position, *too_large(size))
        else:
            outcome = _document(rows, beside, fields, i)
            if isinstance(outcome, tuple):
                batch.reject(position, *outcome)
            else:
                # A row without a text has the size of its other columns.
                of_layout = (
                    size is None or isinstance(outcome, Supervision) and outcome.text is None
                )
                n_bytes = sum(c.slice(i, 1).nbytes for c in beside.values()) if of_layout else size
                batch.add(position, outcome, n_bytes)
        if batch.bytes >= batch_bytes:
            yield from batch.take()


def _document(
    rows: pa.LargeBinaryArray, beside: Mapping[str, pa.Array], fields: Fields | None, i: int
) -> str | Supervision | tuple[str, str]:
    """Return row `i` as a text, a `Supervision`, or a (reject reason, detail) pair.

    `rows` contains the text of each row, or null. `beside` maps the other keys to their values.
    """
    # `field_name` names the column in the detail of a reject.
    field_name = "text"
    try:
        # Texts are decoded row by row, so invalid UTF-8 rejects one row and not the file.
        text = rows[i].as_buffer().to_pybytes().decode() if rows[i].is_valid else None
        record = {}
        for key, column in beside.items():
            field_name = "text" if text is not None else ascii(key[:40])[1:-1]
            if column[i].is_valid:
                value = column[i].as_py()
                if _has_json(column.type):
                    value = _parsed(value, column.type)
                record[key] = value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError as error:
        return invalid_utf8(error, field_name)
    except ValueError:
        return "malformed_json", f"{field_name} holds a value of type arrow.json that is not JSON"
    if fields is None:
        return ("not_a_string", "the value is null") if text is None else text
    # From here on, the record equals the JSON line with the same data.
    record = of_table(record)
    if any(_has_json(column.type) for column in beside.values()):
        record = _plain(record)
    spans, value_at = record.get(LOSS_SPANS), record.get
    layout = fields.layout_of(value_at, text is not None or spans is not None)
    if layout and layout.advice:
        return "bad_messages", refused(layout)
    if layout:
        return fields.of_layout(layout, text, spans, value_at)
    if text is None:
        return "not_a_string", "the value is null"
    return fields.of_text(text, spans, value_at)


def _is_json(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is the extension type for JSON texts.

    Hugging Face `datasets` uses this type for fields with values of mixed types.
    """
    return isinstance(kind, pa.BaseExtensionType) and kind.extension_name == "arrow.json"


@lru_cache(maxsize=64)
def _has_json(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is, or contains at any depth, the extension type for JSON."""
    inner_types = [kind.field(i).type for i in range(kind.num_fields)]
    return _is_json(kind) or any(map(_has_json, inner_types))


class _JsonValue(NamedTuple):
    """A value that a table stores as JSON.

    A null inside this value is kept. Elsewhere in a table, a null means that the key is missing.
    """

    value: Any


def _plain(value: Any) -> Any:
    """Return a value with each `_JsonValue` replaced by its content."""
    if isinstance(value, _JsonValue):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list) else value


def _parsed(value: Any, kind: pa.DataType) -> Any:
    """Return `value` with each text that is stored as JSON replaced by a `_JsonValue`.

    `kind` is the Arrow type of `value`, and says which texts are stored as JSON.

    Raises:
        ValueError: If a text is invalid JSON or nested too deeply.
    """
    if value is None or not _has_json(kind):
        return value
    if _is_json(kind):
        if nested_too_deep(value.encode("utf-8", "surrogatepass")):
            raise ValueError("nested too deep")
        return _JsonValue(json.loads(value, parse_int=read_integer))
    if pa.types.is_struct(kind):
        return {name: _parsed(entry, kind.field(name).type) for name, entry in value.items()}
    if _is_list(kind):
        return [_parsed(entry, kind.value_type) for entry in value]
    return value


SLICE_LISTS = 1 << 16  # rows processed at once


def find_token_column(path: str, schema: pa.Schema, text_key: str) -> int:
    """Return the index of the column with lists of token ids.

    If `text_key` is "text", this is the first column in COLUMNS that the file has. Otherwise it is
    the column `text_key`. A column that contains only nulls is accepted, and each of its rows
    becomes a reject.

    Raises:
        SourceError: If the column is missing, occurs more than once, or does not contain lists of
            integers.
    """
    names = ", ".join(map(repr, schema.names[:50])) or "none"
    wanted_names = COLUMNS if text_key == "text" else (text_key,)
    name = next((name for name in wanted_names if name in schema.names), None)
    if name is None:
        raise SourceError(
            f"{path}: no column named {' or '.join(map(repr, wanted_names))}; the columns are"
            f" {names}\n"
            "hint: set text_key to the column that holds the lists of token ids"
        )
    indices = schema.get_all_field_indices(name)
    if len(indices) > 1:
        raise SourceError(
            f"{path}: {len(indices)} columns named {name!r}\nhint: write the file with one of them"
        )
    kind = schema.field(indices[0]).type
    if not _is_tokens(kind):
        raise SourceError(
            f"{path}: the column {name!r} holds {kind}, not lists of integers\n"
            "hint: set text_key to the column that holds the lists of token ids; for text, set"
            ' format to "auto"'
        )
    return indices[0]


def find_token_columns(
    path: str, schema: pa.Schema, text_key: str, fields: Fields | None
) -> dict[str, Column]:
    """Return key → column for the keys to read from a table of tokens.

    The result contains the column of the lists of ids at the key `text_key`. Unless `fields` is
    None, it also contains the columns of weights and masks. A column with the name of a mask is
    ignored if it does not contain lists.

    Raises:
        SourceError: As in `find_token_column`, or if a weight or mask column occurs more than once.
    """
    columns = {text_key: Column(find_token_column(path, schema, text_key))}
    for key in ("weight", *MASKS) if fields else ():
        column = _column(path, schema, key, text_key)
        if column and (key == "weight" or _is_list(schema.field(column.number).type)):
            columns[key] = column
    return columns


def _is_tokens(kind: pa.DataType) -> bool:
    if pa.types.is_null(kind):
        return True
    lists = any(
        getattr(pa.types, f"is_{name}")(kind) for name in ("list", "large_list", "fixed_size_list")
    )
    return lists and (pa.types.is_integer(kind.value_type) or pa.types.is_null(kind.value_type))


def read_lists(
    file: int,
    columns: Mapping[str, pa.Array],
    text_key: str,
    selection: RowSelection,
    batch_bytes: int,
) -> Iterator[Batch]:
    """Yield the documents in rows with lists of token ids, in batches of about `batch_bytes`.

    Each token counts as TOKEN_TEXT_BYTES.

    Args:
        file: Index of the file.
        columns: Maps the keys that `find_token_columns` returns to their values.
        text_key: Key of the lists of ids.
        selection: Selects the rows to read.
        batch_bytes: Approximate content size of a batch in bytes.
    """
    column, other_keys = columns[text_key], [key for key in columns if key != text_key]
    for begin in range(0, len(column), SLICE_LISTS):
        rows = column.slice(begin, SLICE_LISTS)
        beside = {key: columns[key].slice(begin, SLICE_LISTS) for key in other_keys}
        sizes = partial(list_lengths, rows)
        positions, is_wanted = selection.of_rows(file, begin, len(rows), sizes)
        if not is_wanted.all():
            rows, positions = rows.filter(pa.array(is_wanted)), positions[is_wanted]
            beside = {key: values.filter(pa.array(is_wanted)) for key, values in beside.items()}
        lengths = list_lengths(rows)
        # An empty list counts as one byte, which limits the documents of a batch.
        for batch_slice in slices(np.maximum(lengths * TOKEN_TEXT_BYTES, 1), batch_bytes):
            beside_slice = {key: values[batch_slice] for key, values in beside.items()}
            batch = _batch(
                file, rows[batch_slice], positions[batch_slice], lengths[batch_slice], beside_slice
            )
            yield batch


def list_lengths(rows: pa.Array) -> np.ndarray:
    """Return the number of elements of each list, int64[n], with 0 for null."""
    if pa.types.is_null(rows.type):
        return np.zeros(len(rows), np.int64)
    lengths: np.ndarray = (
        pc.list_value_length(rows).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    )
    return lengths


def _batch(
    file: int,
    rows: pa.Array,
    positions: np.ndarray,
    lengths: np.ndarray,
    beside: Mapping[str, pa.Array],
) -> Batch:
    """Return one batch with the documents of n rows.

    A row becomes a reject if it is null, contains a null, or has too many ids. A row with an
    invalid weight or mask is also a reject.

    Args:
        file: Index of the file.
        rows: The lists of ids.
        positions: int64[n], position of each row in the file.
        lengths: int64[n], number of ids in each row.
        beside: Maps "weight" and names of masks to the values of the n rows. A key that the file
            does not have is missing.
    """
    of_rows = beside.get("weight")
    weights, refused = row_weights([] if of_rows is None else of_rows.to_pylist())
    if rows.null_count:
        missing = np.flatnonzero(rows.is_null().to_numpy(zero_copy_only=False))
        refused |= dict.fromkeys(missing.tolist(), ("not_tokens", "the value is null"))
    for i in np.flatnonzero(are_too_long(lengths)).tolist():
        refused[i] = too_many_tokens(int(lengths[i]))
    # Entry i of a mask belongs to id i, so lengths must be equal.
    masks = {key: values for key, values in beside.items() if key != "weight"}
    for key, values in masks.items():
        of_mask = list_lengths(values)
        for i in np.flatnonzero(of_mask != lengths).tolist():
            refused.setdefault(i, not_as_long(key, of_mask[i], lengths[i]))
    # Rows with wrong lengths are left out, so ids and masks stay aligned.
    used = np.ones(len(rows), np.bool_)
    used[list(refused)] = False
    ids, bad = _flat(rows, used, lengths)
    refused |= bad
    flat_masks = {}
    for key, values in masks.items():
        flat_masks[key], bad = _flat(values, used, lengths)
        for i, (_, detail) in bad.items():
            refused.setdefault(i, (BAD_MASK, f"{key}: {detail}"))
    # The flat arrays still contain rows with a null entry.
    rows_of_ids = TokenRows(lengths, used, ids, flat_masks, {}, weights, refused)
    return batch_of_rows(file, positions, rows_of_ids)


def _flat(
    rows: pa.Array, used: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, dict[int, tuple[str, str]]]:
    """Return (ids, bad) as `_ids` does, for the rows where `used` is True.

    `used` is bool[n], and `lengths` is int64[n], the number of ids in each row.
    """
    if used.all():
        return _ids(rows, np.arange(len(rows)), lengths)
    return _ids(rows.filter(pa.array(used)), np.flatnonzero(used), lengths[used])


def _ids(
    rows: pa.Array, numbers: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, dict[int, tuple[str, str]]]:
    """Return (ids, bad): the concatenated ids of n lists, and the lists that contain a null.

    `bad` maps the row number of each such list to (reject reason, detail), for example {3:
    ("not_tokens", "token 0 is null")}. In `ids`, a null is 0.

    Args:
        rows: The lists of ids, or the values of a mask.
        numbers: int64[n], row number of each list.
        lengths: int64[n], number of ids in each list.
    """
    if not len(rows) or pa.types.is_null(rows.type):
        return np.zeros(0, np.int64), {}
    ids = rows.flatten()
    if pa.types.is_boolean(ids.type):
        ids = ids.cast(pa.int8())
    bad: dict[int, tuple[str, str]] = {}
    if ids.null_count:
        offsets = offsets_of(lengths)
        places = np.flatnonzero(ids.is_null().to_numpy(zero_copy_only=False))
        owner = np.searchsorted(offsets, places, "right") - 1
        # The index that `np.unique` returns is the first null of each list.
        _, firsts = np.unique(owner, return_index=True)
        for place, i in zip(places[firsts].tolist(), owner[firsts].tolist(), strict=True):
            bad[int(numbers[i])] = ("not_tokens", f"token {place - int(offsets[i])} is null")
        ids = (ids.cast(pa.int64()) if pa.types.is_null(ids.type) else ids).fill_null(0)
    elif pa.types.is_null(ids.type):
        return np.zeros(0, np.int64), {}
    return ids.to_numpy(zero_copy_only=False), bad
