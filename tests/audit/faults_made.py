"""Packed columns without a fault, and one fault of each kind planted into a copy of them.

Nothing here uses packprep: another project's writer stores the columns, and `audit` has to name the
kind that was planted.
"""

import copy
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

IGNORED = -100
EOS, BOS, PAD, UNK, FIRST, VOCAB_SIZE = 1, 2, 0, 3, 10, 300
ROW_LENGTH = 128


class Document(NamedTuple):
    """A document in a row: its ids with bos and eos, and which ids are trained."""

    ids: list[int]
    trained: list[bool]


class Packed(NamedTuple):
    """Rows of documents, and the columns of all rows by position. `labels` are the token's own."""

    rows: list[list[Document]]
    ids: np.ndarray  # int64[rows, ROW_LENGTH]
    labels: np.ndarray  # int64[rows, ROW_LENGTH]
    positions: np.ndarray  # int64[rows, ROW_LENGTH]
    segments: np.ndarray  # int64[rows, ROW_LENGTH], 0 at padding

    @property
    def next_labels(self) -> np.ndarray:
        """The same labels, already shifted: the label of a position is the next token."""
        shifted = np.full_like(self.labels, IGNORED)
        shifted[:, :-1] = self.labels[:, 1:]
        return shifted


def packed(rows: int = 60, seed: int = 0) -> list[list[Document]]:
    """Rows of three different documents, with 0 to 5 positions of padding."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(rows):
        first, second = random.integers(30, 48, 2).tolist()
        lengths = first, second, ROW_LENGTH - first - second - int(random.integers(0, 6))
        bodies = [random.integers(FIRST, VOCAB_SIZE, n - 2).tolist() for n in lengths]
        made.append([_document([BOS, *body, EOS]) for body in bodies])
    return made


def _document(ids: list[int]) -> Document:
    """A document whose first quarter is a prompt without loss."""
    return Document(ids, [i >= len(ids) // 4 for i in range(len(ids))])


def columns(rows: list[list[Document]]) -> Packed:
    """The columns of rows, padded to ROW_LENGTH."""
    shape = len(rows), ROW_LENGTH
    made = Packed(
        rows,
        np.full(shape, PAD, np.int64),
        np.full(shape, IGNORED, np.int64),
        np.zeros(shape, np.int64),
        np.zeros(shape, np.int64),
    )
    for r, row in enumerate(rows):
        at = 0
        for k, one in enumerate(row):
            n = len(one.ids)
            made.ids[r, at : at + n] = one.ids
            made.labels[r, at : at + n] = np.where(one.trained, one.ids, IGNORED)
            made.positions[r, at : at + n] = np.arange(n)
            made.segments[r, at : at + n] = k + 1
            at += n
    return made


def clean() -> Packed:
    """Columns without a fault."""
    return columns(packed())


def _of_rows(change: Callable[[list[list[Document]]], None]) -> Callable[[], Packed]:
    def planted() -> Packed:
        rows = copy.deepcopy(packed())
        change(rows)
        return columns(rows)

    return planted


def _of_columns(change: Callable[[Packed], None]) -> Callable[[], Packed]:
    def planted() -> Packed:
        made = clean()
        change(made)
        return made

    return planted


def _replaced(row: list[Document], k: int, ids: list[int]) -> None:
    row[k] = _document(ids)


def _padding(rows: list[list[Document]]) -> None:
    for row in rows[::2]:
        del row[-1]


def _same_documents(rows: list[list[Document]]) -> None:
    for r in range(1, 9):
        rows[r][2] = rows[0][2] if len(rows[0][2].ids) <= len(rows[r][2].ids) else rows[r][2]


def _empty(rows: list[list[Document]]) -> None:
    for row in rows[:10]:
        _replaced(row, 1, [BOS, *row[1].ids[3:]])
        row.insert(1, Document([BOS, EOS], [False, True]))


def _ids_of(place: int, id: int) -> Callable[[list[list[Document]]], None]:
    def change(rows: list[list[Document]]) -> None:
        ids = list(rows[3][1].ids)
        ids[place] = id
        _replaced(rows[3], 1, ids)

    return change


def _wrong(made: Packed) -> None:
    at = np.flatnonzero(made.labels[4] != IGNORED)[3]
    made.labels[4, at] = made.ids[4, at] + 1


def _crossing(made: Packed) -> None:
    at = np.flatnonzero(made.segments[5] == 2)[0]
    made.labels[5, at] = made.ids[5, at]


def _trained_padding(made: Packed) -> None:
    r, at = (places[0] for places in np.nonzero(made.segments == 0))
    made.labels[r, at] = PAD


def _untrained_document(made: Packed) -> None:
    made.labels[6, made.segments[6] == 2] = IGNORED


def _untrained_row(made: Packed) -> None:
    made.labels[7] = IGNORED


def _running(made: Packed) -> None:
    made.positions[8] = np.arange(ROW_LENGTH)


def _jump(made: Packed) -> None:
    at = np.flatnonzero(made.segments[9] == 2)
    made.positions[9, at[len(at) // 2 :]] += 5


FAULTS: dict[str, Callable[[], Packed]] = {
    "padding": _of_rows(_padding),
    "duplicate_documents": _of_rows(_same_documents),
    "duplicate_rows": _of_rows(lambda rows: rows.extend(rows[:3])),
    "empty_documents": _of_rows(_empty),
    "no_eos": _of_rows(_ids_of(-1, FIRST)),
    "inner_eos": _of_rows(_ids_of(9, EOS)),
    "two_bos": _of_rows(_ids_of(1, BOS)),
    "beyond_vocabulary": _of_rows(_ids_of(12, VOCAB_SIZE)),
    "unknown_tokens": _of_rows(_ids_of(12, UNK)),
    "wrong_labels": _of_columns(_wrong),
    "crossing_labels": _of_columns(_crossing),
    "trained_padding": _of_columns(_trained_padding),
    "untrained_documents": _of_columns(_untrained_document),
    "untrained_rows": _of_columns(_untrained_row),
    "unreset_positions": _of_columns(_running),
    "broken_positions": _of_columns(_jump),
}
"""Kind of `audit` → a function that returns columns with such a fault."""

IMPLIED = {
    "duplicate_rows": {"duplicate_documents"},
    "untrained_rows": {"untrained_documents"},
}
"""Kinds that a planted fault entails."""
