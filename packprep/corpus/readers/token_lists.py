"""Rows of a column of id lists → token documents; what Parquet and Arrow files of tokens have in common."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packprep.corpus.readers.documents import (
    MAX_DETAIL,
    TOKEN_TEXT_BYTES,
    Batch,
    IdLists,
    Keep,
    Reject,
    are_too_long,
    kept,
    slices,
    too_many_tokens,
)
from packprep.errors import SourceError

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
    return Batch([], np.full(count, file, np.int32), positions[good], rejects, [], IdLists(ids, offsets))


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
