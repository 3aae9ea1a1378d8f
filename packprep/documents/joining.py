"""Join the tokens of records to documents, for sources with `group_by`.

records     a.py: 10 11 12    b.py: (empty)    c.py: 13 14           between: 99
document    10 11 12 99 99 13 14                                     start 0, 4, 5
"""

from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from packprep.dataset.boundaries import offsets_of
from packprep.dataset.segments import Records
from packprep.errors import RecipeError
from packprep.recipe import Source, as_toml
from packprep.tokenizer.encoding import Tokens
from packprep.tokenizer.file import tokens_in_file
from packprep.tokenizer.roles import Vocabulary

JOINED, GROUP_CUTS, UNGROUPED = "joined", "group_cuts", "ungrouped"
"""Counts of a source with group_by. A ledger has a count only if it is not 0.

- JOINED: records of used documents that are not the first record of their document.
- GROUP_CUTS: documents read that continue a group, which was longer than a document may be.
- UNGROUPED: documents read of a single record without a value to group by.
"""


GROUP_WORDS = {
    JOINED: "joined to other records",
    GROUP_CUTS: "after cuts of long groups",
    UNGROUPED: "without a value to group by",
}
"""What each count counts, in words after a number."""


class Joined(NamedTuple):
    """Documents that were joined from records."""

    positions: np.ndarray  # int64[n]: position of each document's first record in the file
    tokens: Tokens  # the tokens of the documents
    records: Records  # the records of the documents


def join_records(
    tokens: Tokens,
    positions: np.ndarray,
    number: np.ndarray,
    used: np.ndarray,
    between: tuple[int, ...],
) -> Joined:
    """Join the tokens of records to documents.

    A document whose records have no tokens has no tokens between them either.

    Args:
        tokens: The tokens of n records.
        positions: int64[n], positions of the records in their file.
        number: int64[n], the number of each record's document, ascending.
        used: bool[n], the records to join. A document without such a record is left out.
        between: The ids between two records.
    """
    lengths = np.diff(tokens.offsets)
    # Documents without a used record get no number, so the numbers have no gaps.
    _, number = np.unique(number[used], return_inverse=True)
    lengths_used, positions = lengths[used], positions[used]
    counts = np.bincount(number)
    has_tokens = np.bincount(number, lengths_used) > 0
    # A gap follows each record, except the last record of a document.
    gaps = np.where(has_tokens[number], len(between), 0)
    gaps[np.cumsum(counts) - 1] = 0
    # Record i and its gap have the positions bounds[i] … bounds[i + 1] − 1 in the joined ids.
    bounds = offsets_of(lengths_used + gaps)
    ids = np.empty(int(bounds[-1]), tokens.ids.dtype)
    is_between = np.zeros(len(ids), np.bool_)
    first_gap = (bounds[1:] - len(between))[gaps > 0]
    for k, token in enumerate(between):
        ids[first_gap + k], is_between[first_gap + k] = token, True
    # All other positions belong to records, in the same order as before.
    ids[~is_between] = tokens.ids[np.repeat(used, lengths)]
    offsets = offsets_of(counts)
    documents = bounds[offsets]
    starts = bounds[:-1] - np.repeat(documents[:-1], counts)
    # With `order_by`, the first record in the file may be anywhere in its document.
    firsts = np.minimum.reduceat(positions, offsets[:-1]) if len(counts) else positions
    return Joined(
        firsts, Tokens(ids, documents, []), Records(offsets, positions, starts, lengths_used)
    )


class Separators(NamedTuple):
    """The tokens between the records of a sampled document. It takes the place of a conversation.

    Attributes:
        slots: Number of the tokens between records.
    """

    slots: int
    places: tuple[()] = ()
    limited: bool = False
    chat: bool = False


def joined_texts(
    texts: Sequence[str], number: np.ndarray, between: int
) -> tuple[list[str], list[Separators]]:
    """Return the texts of sampled documents, and the tokens between their records.

    Args:
        texts: The texts of n records.
        number: int64[n], the number of each record's document, ascending.
        between: Number of tokens between two records.
    """
    bounds = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(texts)]
    pairs = list(pairwise(bounds)) if texts else []
    return (
        ["".join(texts[begin:end]) for begin, end in pairs],
        [Separators(between * (end - begin - 1)) for begin, end in pairs],
    )


@lru_cache(maxsize=64)
def ids_between(source: Source, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Return the ids of the tokens between the records of a source's documents.

    Raises:
        RecipeError: If the tokenizer does not have one of the tokens.
    """
    if not source.between:
        return ()
    table = tokens_in_file(vocabulary.tokenizer_json, "tokenizer.json")
    ids = []
    for token in source.between:
        id = table.ids.get(token) if isinstance(token, str) else token
        if id is None or id not in table.texts:
            raise RecipeError(
                f"source {source.name!r}: between = {as_toml(token)}: the tokenizer has no such"
                " token\n"
                "hint: give the text or the id of a token in the tokenizer's vocabulary"
            )
        ids.append(id)
    return tuple(ids)


def check_between(source: Source, vocabulary: Vocabulary, marks: Collection[int]) -> None:
    """Check that the tokens between records exist, and that no task gives them a meaning.

    Args:
        source: The source.
        vocabulary: The vocabulary of the tokenizer.
        marks: The ids that only tasks and media may write.

    Raises:
        RecipeError: If a token cannot be between records.
    """
    for token, id in zip(source.between, ids_between(source, vocabulary), strict=True):
        if id in marks:
            raise RecipeError(
                f"source {source.name!r}: between = {as_toml(token)}: a task or [specials] media"
                " gives this token another meaning\n"
                "hint: give another token"
            )
