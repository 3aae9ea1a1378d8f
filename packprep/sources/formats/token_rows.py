"""Turn rows of token ids and their masks into a batch, for tables and JSON Lines."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from packprep.dataset.boundaries import offsets_of
from packprep.sources.formats.batch import MAX_DETAIL, Batch, IdLists, Reject
from packprep.sources.formats.fields import bad_weight, is_missing, weight_of
from packprep.sources.formats.token_masks import BAD_MASK, masked

COLUMNS = ("input_ids", "tokens")
"""The columns or keys of the ids, unless text_key names another. The first present one counts."""


class TokenRows(NamedTuple):
    """Rows of token ids as a reader finds them, before their masks are read.

    Attributes:
        lengths: int64[n], the tokens of each row.
        used: bool[n], the rows that have their tokens in `ids` and `masks`.
        ids: Integers, [tokens], of the used rows.
        masks: Name of MASKS → [tokens], as `masked` takes them.
        given: Name → bool[tokens], as `masked` takes it.
        weights: Row → weight, of rows with another weight than 1.
        refused: Row → reason and detail.
    """

    lengths: np.ndarray
    used: np.ndarray
    ids: np.ndarray
    masks: Mapping[str, np.ndarray]
    given: Mapping[str, np.ndarray]
    weights: Mapping[int, float]
    refused: Mapping[int, tuple[str, str]]


def batch_of_rows(file: int, positions: np.ndarray, rows: TokenRows) -> Batch:
    """Return the batch of some rows. Rows that are refused, or whose masks are, are its rejects.

    positions: int64[n], of all rows in their file.
    """
    lengths, used, ids = rows.lengths, rows.used, rows.ids
    refused = dict(rows.refused)
    numbers, offsets = np.flatnonzero(used), offsets_of(lengths[used])
    is_kept, token_weights = np.ones(len(ids), np.bool_), None
    if rows.masks:
        is_kept, token_weights, by_masks = masked(ids, offsets, rows.masks, rows.given)
        for i, problem in by_masks.items():
            refused.setdefault(int(numbers[i]), problem)
        for i, weight in rows.weights.items():
            k = int(np.searchsorted(numbers, i))
            highest = token_weights[slice(*offsets[k : k + 2].tolist())].max(initial=0)
            if used[i] and weight * float(highest) > float(np.finfo(np.float32).max):
                problem = BAD_MASK, "a token's weight times the document's is not finite in float32"
                refused.setdefault(i, problem)
    good = np.ones(len(lengths), np.bool_)
    good[list(refused)] = False
    is_kept = is_kept & np.repeat(good[used], lengths[used])
    if not is_kept.all():
        counts = np.bincount(np.repeat(np.arange(len(numbers)), lengths[used])[is_kept])
        kept_lengths = np.zeros(len(numbers), np.int64)
        kept_lengths[: len(counts)] = counts
        ids, offsets = ids[is_kept], offsets_of(kept_lengths[good[used]])
        token_weights = None if token_weights is None else token_weights[is_kept]
    rejects = [
        Reject(file, int(positions[i]), refused[i][0], refused[i][1][:MAX_DETAIL])
        for i in sorted(refused)
    ]
    count, number = int(good.sum()), np.cumsum(good) - 1
    is_all_trained = token_weights is None or bool((token_weights == 1).all())
    return Batch(
        [],
        np.full(count, file, np.int32),
        positions[good],
        rejects,
        {},
        IdLists(ids, offsets),
        {int(number[i]): weight for i, weight in rows.weights.items() if good[i]},
        None if is_all_trained else token_weights,
    )


def row_weights(
    values: Sequence[Any],
) -> tuple[dict[int, float], dict[int, tuple[str, str]]]:
    """Return the weights other than 1 by row, and the rows with an invalid weight."""
    weights: dict[int, float] = {}
    refused: dict[int, tuple[str, str]] = {}
    for i, value in enumerate(values):
        if is_missing(value) or (value == 1 and value is not True):
            continue
        weight = weight_of(value)
        if weight is None:
            refused[i] = bad_weight(value)
        else:
            weights[i] = weight
    return weights, refused


def not_as_long(name: str, entries: int, tokens: int) -> tuple[str, str]:
    """Return the reason and detail of a row whose mask has another length than its ids."""
    return BAD_MASK, f"{name} has {entries} entries for {tokens} tokens"
