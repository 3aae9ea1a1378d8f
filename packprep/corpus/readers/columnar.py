"""Rows of an Arrow column → documents; what Parquet and Arrow files have in common."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packprep.corpus.conversations import LOSS_SPANS, MESSAGES, Marked, MarkReader
from packprep.corpus.readers import documents
from packprep.corpus.readers.documents import Batch, BatchBuilder, Keep, invalid_utf8, kept, slices, too_large
from packprep.errors import SourceError

SLICE_ROWS = 1 << 14  # rows that are looked at together
REPEATED_BYTES = 128 << 20  # what they may hold where one dictionary gives all of them
MAX_BLOCK_BYTES = 256 << 20  # what has to be decoded at once: a page, or a compressed record batch's largest buffer


class RecordColumns(NamedTuple):
    """A value for each of a file's columns that are read; None: the file has none, or nobody asked for it."""

    text: Any
    loss_spans: Any = None
    messages: Any = None

    def there(self) -> list[Any]:
        """The values that are there."""
        return [value for value in self if value is not None]

    def of(self, values: Sequence[Any]) -> "RecordColumns":
        """The same columns with other values, in the order of `there`."""
        given = iter(values)
        return RecordColumns(*(None if value is None else next(given) for value in self))


def find_columns(path: str, schema: pa.Schema, text_key: str, marks: MarkReader | None) -> RecordColumns:
    """The indices of the columns that are read. SourceError unless each is there at most once, and the text or messages is.

    Without marks the text is all.
    """
    if marks is None:
        return RecordColumns(check_text_column(path, schema, text_key))
    found = []
    for name in (LOSS_SPANS, MESSAGES):
        indices = schema.get_all_field_indices(name) if name != text_key else []
        if len(indices) > 1:
            raise SourceError(
                f"{path}: {len(indices)} columns named {name!r}. Write the file with one, or set documents.loss_spans = "
                '"ignore".'
            )
        found.append(indices[0] if indices else None)
    if found[1] is not None and text_key not in schema.names:
        return RecordColumns(None, *found)
    return RecordColumns(check_text_column(path, schema, text_key), *found)


def check_text_column(path: str, schema: pa.Schema, text_key: str) -> int:
    """The index of the column `text_key`; SourceError unless it exists once and holds strings or bytes.

    A column of nothing but nulls is accepted: each of its rows is a reject.
    """
    found = schema.get_all_field_indices(text_key)
    if len(found) != 1:
        problem = "no column" if not found else f"{len(found)} columns"
        names = ", ".join(map(repr, schema.names[:50])) or "none"
        raise SourceError(
            f"{path}: {problem} named {text_key!r}; the columns are: {names}. "
            f"Set text_key to the one that holds the text."
        )
    kind = schema.field(found[0]).type
    if not _is_text(kind.value_type if pa.types.is_dictionary(kind) else kind):
        raise SourceError(
            f"{path}: the column {text_key!r} holds {kind}, not strings. Set text_key to the one that holds the text."
        )
    return found[0]


def _is_text(kind: pa.DataType) -> bool:
    kinds = "string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null"
    return any(getattr(pa.types, f"is_{name}")(kind) for name in kinds)


def check_block(path: str, what: str, n_bytes: int, advice: str) -> None:
    """Raises SourceError for a block that takes more than MAX_BLOCK_BYTES once it is decoded. what: e.g. "a page"."""
    if n_bytes > MAX_BLOCK_BYTES:
        raise SourceError(
            f"{path}: {what} of it holds {n_bytes} bytes once decompressed, and at most {MAX_BLOCK_BYTES} are decoded at once. "
            f"{advice}, or take the file out of the recipe."
        )


@contextmanager
def arrow_errors(path: str, what: str) -> Iterator[None]:
    """Turns what pyarrow says about damaged data into a SourceError; errors of the operating system pass."""
    try:
        yield
    except UnicodeDecodeError as error:  # a column's name
        raise SourceError(
            f"{path}: not a readable {what}: a name in it is not UTF-8: {error}. Fetch the file again, or take it out of the "
            "recipe."
        ) from error
    except (pa.ArrowException, OSError) as error:
        # pyarrow reports damaged data as an OSError, too, but without a number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        mend = "It is encrypted: write it anew without" if "decrypt" in str(error).lower() else "Fetch the file again"
        raise SourceError(f"{path}: not a readable {what}: {error}. {mend}, or take it out of the recipe.") from error


def read_rows(
    batch: BatchBuilder,
    columns: RecordColumns,
    first: int,
    keep: Keep | None,
    batch_bytes: int,
    marks: MarkReader | None = None,
    wanted_from: int = 0,
) -> Iterator[Batch]:
    """Adds the rows of columns of arrays to a batch; gives the batch whenever it holds `batch_bytes`.

    first: position of the columns' first row in the file; those before `wanted_from` are there for `keep` to see
    """
    n_rows = len(columns.there()[0])
    at_once = _rows_at_once(columns.text)
    for begin in range(0, n_rows, at_once):
        _, *others = columns.of([column.slice(begin, at_once) for column in columns.there()])
        rows = pa.nulls(n_rows, pa.string()) if columns.text is None else columns.text
        rows = rows.slice(begin, at_once)
        positions = np.arange(first + begin, first + begin + len(rows), dtype=np.int64)
        wanted = kept(keep, batch.file, positions, partial(_sizes, rows, others[-1])) & (positions >= wanted_from)
        if rows.type in (pa.string_view(), pa.binary_view()):
            rows = rows.cast(pa.large_binary())  # pyarrow filters no views
        if not wanted.all():
            mask = pa.array(wanted)
            positions, rows = positions[wanted], rows.filter(mask)
            others = [column if column is None else column.filter(mask) for column in others]
        if pa.types.is_dictionary(rows.type):
            rows = rows.dictionary_decode()
        if pa.types.is_null(rows.type):
            rows = rows.cast(pa.string())
        marked = _Marks(marks, *others) if marks and any(column is not None for column in others) else None
        yield from _add_rows(batch, rows.cast(pa.large_binary()), positions, batch_bytes, marked)


def _sizes(rows: pa.Array, messages: pa.Array | None) -> np.ndarray:
    """int64[n]: the bytes of each text; where it is null, how many messages there are."""
    if pa.types.is_dictionary(rows.type):
        sizes = pc.binary_length(rows.dictionary.cast(pa.large_binary())).take(rows.indices)
    elif pa.types.is_null(rows.type):
        sizes = pa.nulls(len(rows), pa.int64())
    else:
        sizes = pc.binary_length(rows.cast(pa.large_binary()))
    if messages is not None and _is_list(messages.type):
        sizes = pc.coalesce(sizes.cast(pa.int64()), pc.list_value_length(messages).cast(pa.int64()))
    return sizes.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)


def _is_list(kind: pa.DataType) -> bool:
    return any(getattr(pa.types, f"is_{name}")(kind) for name in ("list", "large_list", "fixed_size_list"))


def _rows_at_once(text: pa.Array | None) -> int:
    """As many rows as hold REPEATED_BYTES, if each were the longest text of a column's dictionary."""
    if text is None or not pa.types.is_dictionary(text.type) or not len(text.dictionary):
        return SLICE_ROWS
    longest = pc.max(pc.binary_length(text.dictionary.cast(pa.large_binary()))).as_py() or 1
    return max(1, min(SLICE_ROWS, REPEATED_BYTES // longest))


class _Marks(NamedTuple):
    """What the rows of a slice say of their training."""

    reader: MarkReader
    loss_spans: pa.Array | None
    messages: pa.Array | None

    def at(self, i: int, text: str | None) -> Marked | tuple[str, str] | None:
        """Of row i, whose text is `text`; None: nothing. Raises UnicodeDecodeError for messages that are not UTF-8."""
        spans, messages = (
            None if column is None or not column[i].is_valid else column[i].as_py() for column in self[1:]
        )
        if (spans is None or text is None) and messages is None:
            return None
        return self.reader.marked(text, spans, messages)


def _add_marked(
    batch: BatchBuilder, position: int, n_bytes: int, text: str | None, mark: Marked | tuple[str, str] | None
) -> None:
    if isinstance(mark, Marked):
        batch.add(position, mark.text, n_bytes or len(mark.text), mark)
    elif mark is not None:
        batch.reject(position, *mark)
    elif text is None:
        batch.reject(position, "not_a_string", "the value is null")
    else:
        batch.add(position, text, n_bytes)


def _add_rows(
    batch: BatchBuilder, rows: pa.LargeBinaryArray, positions: np.ndarray, batch_bytes: int, marks: _Marks | None
) -> Iterator[Batch]:
    if marks or rows.null_count or not len(rows):
        yield from _add_one_by_one(batch, rows, positions, batch_bytes, marks)
        return
    sizes = pc.binary_length(rows).to_numpy()
    for some in slices(sizes, batch_bytes):
        texts = _texts(rows[some], sizes[some])
        if texts is not None:
            yield from batch.extend(positions[some], texts, sizes[some], batch_bytes)
        else:
            yield from _add_one_by_one(batch, rows[some], positions[some], batch_bytes, marks)


def _texts(rows: pa.LargeBinaryArray, sizes: np.ndarray) -> list[str] | None:
    """The texts of rows without nulls; None: one of them is no text, or too large."""
    if sizes.max() > documents.MAX_DOCUMENT_BYTES:
        return None
    try:
        texts: list[str] = rows.view(pa.large_string()).to_pylist()
    except UnicodeDecodeError:
        return None
    return texts


def _add_one_by_one(
    batch: BatchBuilder, rows: pa.LargeBinaryArray, positions: np.ndarray, batch_bytes: int, marks: _Marks | None
) -> Iterator[Batch]:
    sizes = pc.binary_length(rows).to_pylist()
    for i, (position, size) in enumerate(zip(positions.tolist(), sizes, strict=True)):
        if size is None and marks:
            try:
                _add_marked(batch, position, 0, None, marks.at(i, None))
            except UnicodeDecodeError as error:
                batch.reject(position, *invalid_utf8(error, "messages"))
        elif size is None:
            batch.reject(position, "not_a_string", "the value is null")
        elif size > documents.MAX_DOCUMENT_BYTES:
            batch.reject(position, *too_large(size))
        else:
            try:
                text = rows[i].as_buffer().to_pybytes().decode()
                if marks:
                    _add_marked(batch, position, size, text, marks.at(i, text))
                else:
                    batch.add(position, text, size)
            except UnicodeDecodeError as error:
                batch.reject(position, *invalid_utf8(error, "text"))
        if batch.bytes >= batch_bytes:
            yield from batch.take()
