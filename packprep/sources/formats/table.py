"""Rows of Arrow columns → documents: of texts, or of lists of token ids; what Parquet and Arrow files have in common."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packprep.errors import SourceError
from packprep.sources.formats import batch as limits
from packprep.sources.formats.batch import (
    LOSS_SPANS,
    MAX_DETAIL,
    MESSAGES,
    TOKEN_TEXT_BYTES,
    Batch,
    BatchBuilder,
    IdLists,
    Keep,
    Reject,
    Supervision,
    are_too_long,
    invalid_utf8,
    kept,
    slices,
    too_large,
    too_many_tokens,
)

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
        """These columns with other values, in the order of `there`."""
        given = iter(values)
        return RecordColumns(*(None if value is None else next(given) for value in self))


def find_columns(path: str, schema: pa.Schema, text_key: str, supervised: bool) -> RecordColumns:
    """The indices of the columns that are read. SourceError unless each is there at most once, and the text or messages is.

    Without `supervised` the text is all.
    """
    if not supervised:
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
        yield from _add_rows(batch, rows.cast(pa.large_binary()), others, positions, batch_bytes)


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


def _add_rows(
    batch: BatchBuilder,
    rows: pa.LargeBinaryArray,
    fields: Sequence[Any],
    positions: np.ndarray,
    batch_bytes: int,
) -> Iterator[Batch]:
    """Adds rows of texts; fields: their loss_spans and messages, as far as there are such columns."""
    if rows.null_count or not len(rows) or any(column is not None for column in fields):
        yield from _add_one_by_one(batch, rows, fields, positions, batch_bytes)
        return
    sizes = pc.binary_length(rows).to_numpy()
    for some in slices(sizes, batch_bytes):
        texts = _texts(rows[some], sizes[some])
        if texts is not None:
            yield from batch.extend(positions[some], texts, sizes[some], batch_bytes)
        else:
            yield from _add_one_by_one(batch, rows[some], fields, positions[some], batch_bytes)


def _texts(rows: pa.LargeBinaryArray, sizes: np.ndarray) -> list[str] | None:
    """The texts of rows without nulls; None: one of them is no text, or too large."""
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
    fields: Sequence[Any],
    positions: np.ndarray,
    batch_bytes: int,
) -> Iterator[Batch]:
    sizes = pc.binary_length(rows).to_pylist()
    for i, (position, size) in enumerate(zip(positions.tolist(), sizes, strict=True)):
        if size is not None and size > limits.MAX_DOCUMENT_BYTES:
            batch.reject(position, *too_large(size))
        else:
            try:
                text = None if size is None else rows[i].as_buffer().to_pybytes().decode()
                spans, messages = (None if c is None or not c[i].is_valid else c[i].as_py() for c in fields)
            except UnicodeDecodeError as error:
                batch.reject(position, *invalid_utf8(error, "messages" if size is None else "text"))
            else:
                if messages is not None or (text is not None and spans is not None):
                    n_bytes = fields[1].slice(i, 1).nbytes if size is None else size
                    record = {} if messages is None else {MESSAGES: messages}
                    batch.add(position, Supervision(text, spans, record, MESSAGES if record else ""), n_bytes)
                elif text is None:
                    batch.reject(position, "not_a_string", "the value is null")
                else:
                    batch.add(position, text, size)
        if batch.bytes >= batch_bytes:
            yield from batch.take()


SLICE_LISTS = 1 << 16  # rows that are looked at together
COLUMNS = ("input_ids", "tokens")  # where text_key says nothing of its own


def find_token_column(path: str, schema: pa.Schema, text_key: str) -> int:
    """The index of the column of lists of ids: `text_key`, or while that is "text" the first of COLUMNS that is there.

    SourceError unless it exists once and holds lists of integers. A column of nothing but nulls is accepted: each of its
    rows is a reject.
    """
    names = ", ".join(map(repr, schema.names[:50])) or "none"
    wanted = COLUMNS if text_key == "text" else (text_key,)
    name = next((name for name in wanted if name in schema.names), None)
    if name is None:
        raise SourceError(
            f"{path}: no column named {' or '.join(map(repr, wanted))}; the columns are: {names}. Set text_key to the one "
            "that holds the lists of token ids."
        )
    found = schema.get_all_field_indices(name)
    if len(found) > 1:
        raise SourceError(f"{path}: {len(found)} columns named {name!r}. Write the file with one.")
    kind = schema.field(found[0]).type
    if not _is_tokens(kind):
        raise SourceError(
            f"{path}: the column {name!r} holds {kind}, not lists of integers. Set text_key to the one that holds the lists "
            'of token ids; for text, set format to "auto".'
        )
    return found[0]


def _is_tokens(kind: pa.DataType) -> bool:
    if pa.types.is_null(kind):
        return True
    lists = any(getattr(pa.types, f"is_{name}")(kind) for name in ("list", "large_list", "fixed_size_list"))
    return lists and (pa.types.is_integer(kind.value_type) or pa.types.is_null(kind.value_type))


def read_lists(
    file: int, column: pa.Array, first: int, keep: Keep | None, batch_bytes: int, wanted_from: int = 0
) -> Iterator[Batch]:
    """The rows of a column of lists, in batches of about `batch_bytes`, a token counted as TOKEN_TEXT_BYTES.

    first: position of the column's first row in the file; those before `wanted_from` are there for `keep` to see
    """
    for begin in range(0, len(column), SLICE_LISTS):
        rows = column.slice(begin, SLICE_LISTS)
        positions = np.arange(first + begin, first + begin + len(rows), dtype=np.int64)
        wanted = kept(keep, file, positions, partial(list_lengths, rows)) & (positions >= wanted_from)
        if not wanted.all():
            rows, positions = rows.filter(pa.array(wanted)), positions[wanted]
        lengths = list_lengths(rows)
        for some in slices(np.maximum(lengths * TOKEN_TEXT_BYTES, 1), batch_bytes):
            yield _batch(file, rows[some], positions[some], lengths[some])


def list_lengths(rows: pa.Array) -> np.ndarray:
    """int64[n]: the elements of each list; 0 for null."""
    if pa.types.is_null(rows.type):
        return np.zeros(len(rows), np.int64)
    lengths: np.ndarray = pc.list_value_length(rows).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths


def _batch(file: int, rows: pa.Array, positions: np.ndarray, lengths: np.ndarray) -> Batch:
    """One batch of rows, those that are no tokens or too many among its rejects."""
    refused: dict[int, tuple[str, str]] = {}
    if rows.null_count:
        missing = np.flatnonzero(rows.is_null().to_numpy(zero_copy_only=False))
        refused = dict.fromkeys(missing.tolist(), ("not_tokens", "the value is null"))
    for i in np.flatnonzero(are_too_long(lengths)).tolist():
        refused[i] = too_many_tokens(int(lengths[i]))
    if refused:
        used = np.ones(len(rows), np.bool_)
        used[list(refused)] = False
        of_used = _ids(rows.filter(pa.array(used)), np.flatnonzero(used), lengths[used])
    else:
        of_used = _ids(rows, np.arange(len(rows)), lengths)
    ids, bad = of_used
    if bad:
        refused |= bad
        inside = np.ones(len(rows), np.bool_)
        inside[list(bad)] = False
        sizes = np.where(are_too_long(lengths), 0, lengths)
        ids = ids[np.repeat(inside, sizes)]
    good = np.ones(len(rows), np.bool_)
    good[list(refused)] = False
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths[good])))
    rejects = [Reject(file, int(positions[i]), refused[i][0], refused[i][1][:MAX_DETAIL]) for i in sorted(refused)]
    count = int(good.sum())
    return Batch([], np.full(count, file, np.int32), positions[good], rejects, {}, IdLists(ids, offsets))


def _ids(rows: pa.Array, numbers: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, dict[int, tuple[str, str]]]:
    """(the ids of lists one after the other, the number of each list that holds a null → reason and detail)."""
    if not len(rows) or pa.types.is_null(rows.type):
        return np.zeros(0, np.int64), {}
    ids = rows.flatten()
    bad: dict[int, tuple[str, str]] = {}
    if ids.null_count:
        offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
        places = np.flatnonzero(ids.is_null().to_numpy(zero_copy_only=False))
        owner = np.searchsorted(offsets, places, "right") - 1
        _, at = np.unique(owner, return_index=True)
        for place, i in zip(places[at].tolist(), owner[at].tolist(), strict=True):
            bad[int(numbers[i])] = ("not_tokens", f"token {place - int(offsets[i])} is null")
        ids = (ids.cast(pa.int64()) if pa.types.is_null(ids.type) else ids).fill_null(0)
    elif pa.types.is_null(ids.type):
        return np.zeros(0, np.int64), {}
    return ids.to_numpy(zero_copy_only=False), bad
