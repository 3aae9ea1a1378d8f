"""Evaluate masks next to lists of token ids: padding, trained tokens and their weights.

input_ids        70  71  72  73  eos pad pad
attention_mask    1   1   1   1   1   0   0     padding: 0, only at the ends; it is removed
labels         -100 -100 72  73  eos -100 -100  untrained: -100; trained: the token itself
loss_mask         0   0   1   1   1   0   0     trained: 1; completion_mask and assistant_masks
                                                have the same form
loss_weights      1   1   1  .5  .5   1   1     weights of the trained tokens
"""

from collections.abc import Callable, Mapping
from itertools import combinations
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from packprep.dataset.boundaries import offsets_of

BAD_MASK = "bad_mask"
"""Reject reason of a document with masks that are invalid or contradict each other."""
ATTENTION, LABELS, WEIGHTS = "attention_mask", "labels", "loss_weights"
FLAGS = ("loss_mask", "completion_mask", "assistant_masks")
MASKS = (ATTENTION, LABELS, *FLAGS, WEIGHTS)
"""The columns or keys that may accompany a document's token ids."""
UNTRAINED = -100
"""The label of an untrained token, which PyTorch's cross entropy ignores."""


class MaskedTokens(NamedTuple):
    """The evaluated masks of documents: the tokens without padding, and each token's weight."""

    is_kept: np.ndarray  # bool[tokens], False for padding
    weights: np.ndarray  # float32[tokens], 0 for an untrained token
    refused: dict[int, tuple[str, str]]  # document → reason and detail


def masked(
    ids: np.ndarray,
    offsets: np.ndarray,
    masks: Mapping[str, np.ndarray],
    given_masks: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> MaskedTokens:
    """Evaluate the masks of D documents, and find documents with invalid masks.

    Args:
        ids: Integers, [tokens], the concatenated ids of all documents.
        offsets: int64[D + 1], start of each document in `ids`.
        masks: Maps a name in MASKS to the mask's values, [tokens], as integers, bools or floats.
            For a document that does not have the mask, the values are 1, or for LABELS the ids of
            the document's tokens.
        given_masks: Has an entry for each mask that exists only in some documents. The entry maps
            the mask's name to a bool[tokens] that is True for the tokens of these documents. A mask
            that is not in `given_masks` is a mask of all documents.

    Returns:
        The tokens to keep, their weights, and the documents with invalid masks.
    """
    documents = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    refused: dict[int, tuple[str, str]] = {}

    def refuse(is_wrong: np.ndarray, detail: str) -> None:
        tokens = np.flatnonzero(is_wrong)
        for i, first_index in zip(*np.unique(documents[tokens], return_index=True), strict=True):
            number = int(tokens[first_index] - offsets[i])
            refused.setdefault(int(i), (BAD_MASK, f"token {number}: {detail}"))

    # Padding is only removed at the ends, because a gap would join distant tokens.
    is_kept = np.ones(len(ids), np.bool_)
    if ATTENTION in masks:
        values = masks[ATTENTION]
        refuse((values != 0) & (values != 1), f"{ATTENTION} is neither 0 nor 1")
        is_kept = values == 1
        refuse(~is_kept & _inside(is_kept, documents, offsets), f"{ATTENTION} is 0 between tokens")
    # Each mask says which tokens it trains, and all masks of a document must agree.
    trained = _trained_by_masks(ids, documents, masks, is_kept, refuse)
    for mask, other_mask in combinations(trained, 2):
        # A document without a mask has default values, which contradict no other mask.
        differs = is_kept & (trained[mask] != trained[other_mask])
        differs = differs & given_masks.get(mask, True) & given_masks.get(other_mask, True)
        refuse(differs, f"{mask} and {other_mask} contradict each other")
    weights = np.ones(len(ids), np.float32)
    if WEIGHTS in masks:
        values = masks[WEIGHTS].astype(np.float64)
        is_weight = (values >= 0) & (values <= np.finfo(np.float32).max)
        refuse(is_kept & ~is_weight, f"{WEIGHTS} is no finite number of at least 0")
        weights = np.where(is_weight, values, 0).astype(np.float32)
    # A token is trained only if every mask trains it.
    for is_trained in trained.values():
        weights = np.where(is_trained, weights, np.float32(0))
    return MaskedTokens(is_kept, weights, refused)


def _trained_by_masks(
    ids: np.ndarray,
    documents: np.ndarray,
    masks: Mapping[str, np.ndarray],
    is_kept: np.ndarray,
    refuse: Callable[[np.ndarray, str], None],
) -> dict[str, np.ndarray]:
    """Return mask name → bool[tokens], True for the tokens that this mask trains.

    Only LABELS and the names in FLAGS are evaluated.

    Args:
        ids: The ids of all documents, [tokens].
        documents: int64[tokens], number of each token's document.
        masks: The masks, as in `masked`.
        is_kept: bool[tokens], False for padding.
        refuse: Function that takes bool[tokens] and a detail, and rejects each document that has a
            True token.
    """
    trained: dict[str, np.ndarray] = {}
    if LABELS in masks:
        labels = masks[LABELS]
        trained[LABELS] = labels != UNTRAINED
        # Labels of other tokens are refused. A shift by one token gets its own message.
        is_other = is_kept & trained[LABELS] & (labels != ids)
        if is_other.any():
            shifted = _are_shifted(ids, labels, is_kept & trained[LABELS], documents)
            refuse(
                is_other & shifted[documents],
                "labels are those of the next token; they have to be of the token itself, as"
                " Transformers takes them",
            )
            refuse(is_other, f"its label is neither {UNTRAINED} nor the token")
    for name in FLAGS:
        if name in masks:
            values = masks[name]
            refuse(is_kept & (values != 0) & (values != 1), f"{name} is neither 0 nor 1")
            trained[name] = values == 1
    return trained


def _inside(is_kept: np.ndarray, documents: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return which tokens have a kept token before and after them in their document, bool[tokens].

    Args:
        is_kept: bool[tokens], whether each token is kept.
        documents: int64[tokens], number of each token's document.
        offsets: int64[D + 1], index of each document's first token.
    """
    count = offsets_of(is_kept)
    kept_before = count[:-1] - count[offsets[documents]]
    kept_after = count[offsets[documents + 1]] - count[1:]
    return (kept_before > 0) & (kept_after > 0)


def _are_shifted(
    ids: np.ndarray, labels: np.ndarray, is_trained: np.ndarray, documents: np.ndarray
) -> np.ndarray:
    """Return which documents have shifted labels, bool[D].

    In these documents, the label of each trained token is the id of the next token. The last token
    of a document is ignored, because it has no next token.
    """
    is_next = np.zeros(len(ids), np.bool_)
    is_next[:-1] = (labels[:-1] == ids[1:]) & (documents[:-1] == documents[1:])
    is_last = np.ones(len(ids), np.bool_)
    is_last[:-1] = documents[:-1] != documents[1:]
    unshifted_counts = np.bincount(documents, is_trained & ~is_next & ~is_last)
    return unshifted_counts == 0
