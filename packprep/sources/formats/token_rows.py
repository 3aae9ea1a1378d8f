"""Turn rows of token ids and their masks into a batch, for tables and JSON Lines."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from packprep.dataset.boundaries import offsets_of
from packprep.sources.formats.batch import MAX_DETAIL, Batch, IdLists, Reject
from packprep.sources.formats.fields import bad_weight, is_missing, weight_of
from packprep.sources.formats.token_masks import BAD_MASK, masked

COLUMNS = ("input_ids", "tokens")
"""The columns or keys of token ids if text_key is "text". The first one that exists is read."""


class TokenRows(NamedTuple):
    """n rows with token ids and masks, before the masks are evaluated.

    Attributes:
        lengths: int64[n], number of tokens of each row.
        used: bool[n], whether the row's tokens are in `ids` and `masks`.
        ids: Integers, [tokens], the concatenated ids of the used rows.
        masks: Maps a name in MASKS to the mask's values for the tokens in `ids`, [tokens].
        given: Has an entry for each mask that exists only in some rows. The entry maps the mask's
            name to a bool[tokens] that is True for the tokens of these rows. A mask that is not in
            `given` is a mask of all used rows.
        weights: Maps a row's number to its weight, if the weight is not 1.
        refused: Maps the number of each row that must be rejected to (reason, detail).
    """

    lengths: np.ndarray
    used: np.ndarray
    ids: np.ndarray
    masks: Mapping[str, np.ndarray]
    given: Mapping[str, np.ndarray]
    weights: Mapping[int, float]
    refused: Mapping[int, tuple[str, str]]


def batch_of_rows(file: int, positions: np.ndarray, rows: TokenRows) -> Batch:
    """Return a batch with the documents of some rows.

    Rows in `rows.refused` and rows with invalid masks become rejects.

    Args:
        file: Index of the file.
        positions: int64[n], position of each row in the file.
        rows: The rows.
    """
    lengths, used, ids = rows.lengths, rows.used, rows.ids
    refused = dict(rows.refused)
    # `numbers[d]` is the row of document d in `ids`.
    numbers, offsets = np.flatnonzero(used), offsets_of(lengths[used])
    is_kept, token_weights = np.ones(len(ids), np.bool_), None
    if rows.masks:
        is_kept, token_weights, by_masks = masked(ids, offsets, rows.masks, rows.given)
        for i, problem in by_masks.items():
            refused.setdefault(int(numbers[i]), problem)
        # A build multiplies the weights of a token and its document, so check the product.
        for i, weight in rows.weights.items():
            if not used[i]:
                continue  # The row has no document, so `numbers` does not contain it.
            k = int(np.searchsorted(numbers, i))
            highest = token_weights[slice(*offsets[k : k + 2].tolist())].max(initial=0)
            if weight * float(highest) > float(np.finfo(np.float32).max):
                problem = BAD_MASK, "a token's weight times the document's is not finite in float32"
                refused.setdefault(i, problem)
    # From here on, refused rows lose their tokens, as padding does.
    is_good = np.ones(len(lengths), np.bool_)
    is_good[list(refused)] = False
    is_kept = is_kept & np.repeat(is_good[used], lengths[used])
    if not is_kept.all():
        counts = np.bincount(np.repeat(np.arange(len(numbers)), lengths[used])[is_kept])
        # `counts` ends at the last document with a kept token. Later documents have none.
        kept_lengths = np.zeros(len(numbers), np.int64)
        kept_lengths[: len(counts)] = counts
        ids, offsets = ids[is_kept], offsets_of(kept_lengths[is_good[used]])
        token_weights = None if token_weights is None else token_weights[is_kept]
    rejects = [
        Reject(file, int(positions[i]), refused[i][0], refused[i][1][:MAX_DETAIL])
        for i in sorted(refused)
    ]
    # `number[i]` is the number of row i among the documents of the batch.
    count, number = int(is_good.sum()), np.cumsum(is_good) - 1
    is_all_trained = token_weights is None or bool((token_weights == 1).all())
    return Batch(
        [],
        np.full(count, file, np.int32),
        positions[is_good],
        rejects,
        {},
        IdLists(ids, offsets),
        {int(number[i]): weight for i, weight in rows.weights.items() if is_good[i]},
        None if is_all_trained else token_weights,
    )


def row_weights(
    values: Sequence[Any],
) -> tuple[dict[int, float], dict[int, tuple[str, str]]]:
    """Return (weights, refused) for the weight fields of rows.

    `values` has the weight of each row, which may be None or NaN for a row without a weight.
    `weights` maps a row's number to its weight, if the weight is not 1. `refused` maps the number
    of a row with an invalid weight to (reject reason, detail).
    """
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
    """Return the reject reason and detail of a row with a mask of the wrong length.

    Args:
        name: Name of the mask.
        entries: Number of entries of the mask.
        tokens: Number of token ids of the row.
    """
    return BAD_MASK, f"{name} has {entries} entries for {tokens} tokens"
