"""The model of packed rows that every reader yields: flat columns, in batches.

```
                 row 0                      row 1
ids              11 12 13  2  21 22  2  0   31 32  2  0        flat, as stored
row_offsets       0                          8          12
document_starts   0           4             8
attended          1  1  1  1   1  1  1  0    1  1  1  0        None where the format stores no mask
positions         0  1  2  3   0  1  2  0    0  1  2  0        None where the format stores none
```
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

IGNORED = -100
"""The label of a position without loss, in datasets of Hugging Face and everything based on it."""

SAME, NEXT = "same", "next"
"""Alignments of `labels` and `trained`: an entry belongs to the token at its own position (the
model shifts, as in Transformers), or to the next token (already shifted, as in Megatron)."""

BATCH_TOKENS = 1 << 20
"""Approximate number of tokens of a batch. A reader splits files into batches of this size."""


class PackedRows(NamedTuple):
    """Consecutive rows of a packed dataset.

    A column is None if the format does not store it. A reader derives a column only if the format
    defines how, such as document starts from lengths or from positions that restart. It never
    searches for eos or pad ids: the checks do, once the ids are known. All arrays have the
    dtype of the file, where this is an integer or a bool.

    Attributes:
        ids: integer[n], the tokens of all rows, including stored padding.
        row_offsets: int64[rows + 1], index of each row's first token in `ids`, then n. In formats
            without rows, a row is a document, or the next part of a stream of documents.
        document_starts: int64[k], ascending indices of the tokens that start a document. The first
            token of each row that is not padding is among them. Padding after the last document
            may start a further document: the checks remove it, if `attended` marks it or the pad
            id is known. Not needed if `segments` is given.
        labels: integer[n], IGNORED where no loss is computed.
        trained: bool[n], the loss mask.
        positions: integer[n], position ids.
        attended: bool[n], False at padding.
        segments: integer[n], number of the document in its row, or 0 at padding.
        continued: Whether the first row continues the last row of the batch before. Only for rows
            that are longer than a batch, such as a stream.
    """

    ids: np.ndarray
    row_offsets: np.ndarray
    document_starts: np.ndarray | None = None
    labels: np.ndarray | None = None
    trained: np.ndarray | None = None
    positions: np.ndarray | None = None
    attended: np.ndarray | None = None
    segments: np.ndarray | None = None
    continued: bool = False


class PackedData(NamedTuple):
    """A packed dataset that a reader opened.

    Attributes:
        format: Name of the format for people, such as "Megatron .bin and .idx".
        batches: Function that returns the rows in stored order. Every call starts again.
        columns: Column of `PackedRows` → where it comes from, such as "seq_lengths". All batches
            have exactly these columns. If document starts come from positions, this text starts
            with the text of positions: "position_ids that restart" and "position_ids".
        has_rows: Whether the format stores rows. If False, each row is a document or a part of a
            stream, and the trainer cuts rows later.
        labels_at: SAME or NEXT, if the format defines it; None to detect it from the labels.
            A format with `trained` and without `labels` must define it.
        row_length: Number of tokens of a full row, if the format stores it.
        special_ids: Name among eos, bos, pad, unk and vocab_size → (id, its place, such as
            "metadata.json"), where the data's own notes contain it.
        impossible: Kind of `kinds.KINDS` → why the format does not allow this check, such as a
            format whose documents never have eos.
        tokenizer: The tokenizer that is stored with the data, as --tokenizer would name it.
        chat_template: The text of the chat template that is stored with the data.
        notes: Sentences for the report, such as ignored columns or files that were not read.
    """

    format: str
    batches: Callable[[], Iterator[PackedRows]]
    columns: Mapping[str, str]
    has_rows: bool = True
    labels_at: str | None = None
    row_length: int | None = None
    special_ids: Mapping[str, tuple[int, str]] = {}
    impossible: Mapping[str, str] = {}
    tokenizer: str | None = None
    chat_template: str | None = None
    notes: tuple[str, ...] = ()


class Choices(NamedTuple):
    """What the user says about the data.

    Attributes:
        dtype: dtype of the ids of files without a header, such as "uint16"; None for the usual
            dtype of the format.
        batch_tokens: Approximate number of tokens of a batch.
    """

    dtype: str | None = None
    batch_tokens: int = BATCH_TOKENS
