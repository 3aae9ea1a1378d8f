"""Turn the columns that trainers store into packed rows.

```
             input_ids   11 12 13  2  21 22  2  0      all tokens of a row
                labels -100 12 13  2 -100 22  2 -100   of the token itself
        attention_mask    1  1  1  1   2  2  2  0      or 1 at every token; 0 at padding
          position_ids    0  1  2  3   0  1  2  0
           seq_lengths    4  3                         TRL: tokens of each document
          seq_start_id    0  4                         NeMo, Megatron-Bridge: starts of documents
             loss_mask    1  1  1  0   1  1  0  0      beside seq_start_id: of the next token
completion_mask, assistant_masks, loss_scale           trained tokens if not 0
```

Boundaries come from the first of these columns that has them: segment_ids, seq_lengths,
seq_start_id, an attention_mask that changes inside rows, and position_ids that restart inside rows.
The last two can be without boundaries, and packers may place the longest documents first. Rows are
therefore read until one has a boundary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from packprep.audit.rows import IGNORED, NEXT, SAME, PackedData, PackedRows
from packprep.dataset.boundaries import offsets_of
from packprep.errors import SourceError

IDS = ("input_ids", "tokens")
"""Columns of token ids. The first one that exists is read."""
LABELS, POSITIONS, ATTENTION, SEGMENTS = "labels", "position_ids", "attention_mask", "segment_ids"
FLAGS = ("loss_mask", "completion_mask", "assistant_masks", "loss_scale", "loss_weights")
"""Columns that are 0 at untrained tokens. A token is trained if none of them is 0."""
PER_TOKEN = (LABELS, POSITIONS, ATTENTION, SEGMENTS, *FLAGS)
LENGTHS, STARTS = "seq_lengths", "seq_start_id"
PER_DOCUMENT = (LENGTHS, STARTS)
COLUMNS = (*IDS, *PER_TOKEN, *PER_DOCUMENT)
"""All columns that are read."""
ROW_LENGTHS = ("length", "lengths")
"""Columns with a row's number of tokens, which Axolotl and ms-swift need to pack rows later."""
IMPLIED = (*ROW_LENGTHS, "packing_params", "num_truncated_tokens", "overflow_to_sample_mapping")
"""Columns that are not read, because they say nothing that the other columns do not say."""
MEDIA = ("images", "videos", "audios")
"""Columns that LLaMA-Factory always writes."""

_COLLATED = {
    LENGTHS: "Labels of a document's first token were not checked, because TRL ignores them.",
    STARTS: "Masks of a document's last token were not checked, because NeMo and Megatron-Bridge"
    " drop them.",
}


class StoredRows(NamedTuple):
    """Consecutive rows with the columns of the file.

    Attributes:
        path: The file.
        first: Number of the first row in the file.
        offsets: int64[rows + 1], index of each row's first token, and the number of tokens.
        values: Name in IDS or PER_TOKEN → values of all rows, [tokens].
        lists: Name in PER_DOCUMENT → (values of all rows, int64[rows + 1] offsets of each row).
    """

    path: Path
    first: int
    offsets: np.ndarray
    values: Mapping[str, np.ndarray]
    lists: Mapping[str, tuple[np.ndarray, np.ndarray]]

    def row_of(self, token: int) -> int:
        """Return the number in the file of the row that contains a token."""
        return self.first + int(np.searchsorted(self.offsets, token, "right")) - 1


def stored_rows(
    path: Path, first_row: int, columns: Mapping[str, tuple[np.ndarray, np.ndarray]], ids: str
) -> StoredRows:
    """Return consecutive rows of a file.

    Args:
        path: The file.
        first_row: Number of the first row in the file.
        columns: Name in COLUMNS → (values of all rows, int64[rows] number of values of each row).
        ids: Name of the column of token ids.

    Raises:
        SourceError: If a column has another number of entries than a row has tokens.
    """
    lengths = columns[ids][1]
    values, lists = {}, {}
    for name, (joined, own_lengths) in columns.items():
        if name in PER_DOCUMENT:
            lists[name] = joined, offsets_of(own_lengths)
            continue
        if (own_lengths != lengths).any():
            row = int(np.argmax(own_lengths != lengths))
            raise SourceError(
                f"{path}: row {first_row + row}: {name} has {own_lengths[row]} entries for"
                f" {lengths[row]} tokens\nhint: write the dataset again"
            )
        values[name] = joined
    return StoredRows(path, first_row, offsets_of(lengths), values, lists)


def joined_values(of_rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of all rows, and int64[rows], the number of values of each row."""
    return np.concatenate(of_rows), np.array([len(values) for values in of_rows], np.int64)


class Form(NamedTuple):
    """How the columns of a dataset are read.

    Attributes:
        ids: Column of the tokens.
        boundaries: Column of the boundaries of documents; "" if each row is a document, None if
            boundaries are unknown.
        numbered: Whether attention_mask has the number of each token's document.
        trailing_zeros: Number of positions 0 at the end of a row that mark padding, or 0 if
            positions do not mark padding.
        trained: Names in FLAGS that exist.
    """

    ids: str
    boundaries: str | None
    numbered: bool
    trailing_zeros: int
    trained: tuple[str, ...]


def packed_data(
    title: str,
    stored: Callable[[], Iterator[StoredRows]],
    names: Sequence[str],
    notes: tuple[str, ...] = (),
    row_length: int | None = None,
) -> PackedData:
    """Return the packed data of rows with the columns in `names`.

    Args:
        title: Name of the format for people.
        stored: Function that yields the rows. Every call starts again.
        names: All columns of the file.
        notes: Sentences for the report.
        row_length: Number of tokens of a full row, if the format stores it.

    Raises:
        SourceError: If the first rows are damaged.
    """
    form = _form(stored(), names)
    media = [name for name in MEDIA if name in names]
    unread = sorted(set(names) - {*COLUMNS, *IMPLIED, *MEDIA})
    if unread:
        notes += (f"Columns that were not read: {', '.join(unread)}.",)
    if form.trailing_zeros and media:
        notes += ("Positions 0 at the end of a row are padding, as LLaMA-Factory writes them.",)
    if form.boundaries in _COLLATED and (LABELS in names) == (form.boundaries == LENGTHS):
        notes += (_COLLATED[form.boundaries],)
    return PackedData(
        title,
        lambda: map(partial(_packed, form), stored()),
        _origins(form, names),
        form.boundaries != "",
        _labels_at(form, names),
        row_length,
        notes=notes,
    )


def _labels_at(form: Form, names: Sequence[str]) -> str | None:
    """Return the alignment of labels and masks, or None if the columns do not define it.

    Labels next to `input_ids` are for Transformers, which shifts them. Labels next to `tokens` may
    be shifted already.
    """
    if LABELS in names:
        return SAME if form.ids == "input_ids" else None
    return (NEXT if STARTS in names else SAME) if form.trained else None


def _form(stored: Iterator[StoredRows], names: Sequence[str]) -> Form:
    ids = next(name for name in IDS if name in names)
    trained = tuple(name for name in FLAGS if name in names)
    is_llamafactory = any(name in names for name in MEDIA)
    boundaries = next((name for name in (SEGMENTS, *PER_DOCUMENT) if name in names), None)
    # These columns always have all boundaries, so no row must be read.
    if boundaries is not None:
        return Form(ids, boundaries, False, 0, trained)
    # Masks and positions may show no boundary in the first rows, so more rows are read.
    numbered = changes = restarts = False
    lengths = np.empty(0, np.int64)
    for rows in stored:
        mask, positions = (rows.values.get(name) for name in (ATTENTION, POSITIONS))
        if len(lengths) < 2:  # The rows of a batch are enough, except if each batch has one row.
            lengths = np.append(lengths, np.diff(rows.offsets))
        if mask is not None:
            numbered |= bool(mask.max(initial=0) > 1)
            if mask.min(initial=1) < 1:
                # More runs of attended tokens than rows mean that padding separates documents.
                changes |= len(_starts_by_mask(rows.offsets, mask)) > _filled(rows, mask)
        if positions is not None:
            # Each row starts at position 0, so only the other positions show a restart.
            inner_positions = np.delete(positions, rows.offsets[:-1][np.diff(rows.offsets) > 0])
            restarts |= bool((inner_positions == 0).any())
        # Reading stops when further rows cannot change the form.
        is_open = mask is not None or (positions is not None and not restarts)
        if numbered or (not is_open and len(lengths) > 1):
            break
    # LLaMA-Factory pads positions with zeros. Elsewhere, one 0 at the end may be a short document.
    trailing_zeros = (1 if is_llamafactory else 2) if restarts and not numbered else 0
    if numbered or changes:
        boundaries = ATTENTION
    elif restarts:
        boundaries = POSITIONS
    # Without boundaries, a row is a document or a part of a stream. Equal lengths show parts.
    elif any(name in names for name in ROW_LENGTHS) or not _are_parts(lengths):
        boundaries = ""
    return Form(ids, boundaries, numbered, trailing_zeros, trained)


def _filled(rows: StoredRows, mask: np.ndarray) -> int:
    """Return the number of rows with an attended token."""
    return len(np.unique(np.searchsorted(rows.offsets, np.flatnonzero(mask), "right")))


def _are_parts(lengths: np.ndarray) -> bool:
    """Return whether rows with these lengths, int64[rows], are parts of a stream of documents.

    Most parts are full. The last part is shorter, and TRL's packing "wrapped" also writes a shorter
    part after every 1,000 documents.
    """
    full = lengths == lengths.max(initial=0)
    return bool(2 * full.sum() > len(full) or full[:-1].all())


def _origins(form: Form, names: Sequence[str]) -> dict[str, str]:
    """Return column of `PackedRows` → where it comes from."""
    starts = {
        "": "each row is a document",
        ATTENTION: "attention_mask that changes",
        POSITIONS: "position_ids that restart",
    }
    origins = {}
    if form.boundaries is not None:
        origins["document_starts"] = starts.get(form.boundaries, form.boundaries)
    if LABELS in names:
        origins["labels"] = LABELS
    if form.trained:
        origins["trained"] = ", ".join(form.trained)
    if POSITIONS in names:
        origins["positions"] = POSITIONS
    padding = [name for name in (ATTENTION, SEGMENTS, LENGTHS) if name in names]
    if form.trailing_zeros:
        padding.append("position_ids that end with zeros")
    if padding:
        origins["attended"] = ", ".join(padding)
    if SEGMENTS in names or form.numbered:
        origins["segments"] = SEGMENTS if SEGMENTS in names else ATTENTION
    return origins


def _packed(form: Form, rows: StoredRows) -> PackedRows:
    values, offsets = rows.values, rows.offsets
    positions, mask = values.get(POSITIONS), values.get(ATTENTION)
    # Several columns may mark padding. A token is attended if none of them marks it.
    segments = values.get(SEGMENTS, mask if form.numbered else None)
    attended = None if mask is None else mask > 0
    starts = None
    if segments is not None:
        attended = segments > 0 if attended is None else attended & (segments > 0)
    if LENGTHS in rows.lists:
        starts, is_inside = _starts_by_lengths(rows)
        attended = is_inside if attended is None else attended & is_inside
    if STARTS in rows.lists:
        starts = _starts_by_starts(rows)
    if form.trailing_zeros and positions is not None:
        is_inside = ~_trailing_zeros(positions, offsets, form.trailing_zeros)
        attended = is_inside if attended is None else attended & is_inside
    if form.boundaries in (SEGMENTS, ATTENTION):
        numbers = attended if segments is None else segments
        assert numbers is not None  # One of these columns has the boundaries.
        starts = _starts_by_mask(offsets, numbers)
    elif form.boundaries == POSITIONS:
        assert positions is not None
        is_inside = np.ones(len(positions), np.bool_) if attended is None else attended
        # Content after padding starts a document, even if its position is not 0.
        is_start = np.equal(positions, 0)
        is_start[_starts_by_mask(offsets, is_inside)] = True
        starts = np.flatnonzero(is_start & is_inside)
    elif form.boundaries == "":
        starts = offsets[:-1][np.diff(offsets) > 0]
    trained = None
    for name in form.trained:
        trained = values[name] != 0 if trained is None else trained & (values[name] != 0)
    labels = values.get(LABELS)
    # TRL ignores the label of a document's first token.
    if form.boundaries == LENGTHS and labels is not None and form.ids == "input_ids":
        labels = labels.copy()
        labels[starts] = IGNORED
    # NeMo and Megatron-Bridge drop the mask of a document's last token.
    if starts is not None and form.boundaries == STARTS and labels is None and trained is not None:
        trained[np.append(starts, len(trained))[1:] - 1] = False
    return PackedRows(
        values[form.ids], offsets, starts, labels, trained, positions, attended, segments
    )


def _starts_by_mask(offsets: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return the tokens that start a run of equal numbers above 0 in a row, int64[k].

    For example, offsets [0, 6] and numbers [1, 1, 0, 2, 2, 0] give [0, 3].
    """
    is_start = np.ones(len(numbers), np.bool_)
    is_start[1:] = numbers[1:] != numbers[:-1]
    is_start[offsets[:-1][offsets[:-1] < len(numbers)]] = True
    return np.flatnonzero(is_start & (numbers > 0))


def _starts_by_lengths(rows: StoredRows) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts of documents, int64[k], and which tokens belong to one, bool[tokens].

    Tokens after a row's last document are padding.
    """
    lengths, by_row = rows.lists[LENGTHS]
    ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    in_row = ends[by_row[1:]] - ends[by_row[:-1]]
    is_wrong = in_row > np.diff(rows.offsets)
    if is_wrong.any() or lengths.min(initial=0) < 0:
        row = int(np.argmax(is_wrong))
        raise SourceError(
            f"{rows.path}: row {rows.first + row}: seq_lengths add up to {in_row[row]}, but the row"
            f" has {rows.offsets[row + 1] - rows.offsets[row]} tokens\n"
            "hint: pack the dataset again"
        )
    # The running sum of lengths leaves out padding, so each row's starts move to its first token.
    shift = np.repeat(rows.offsets[:-1] - ends[by_row[:-1]], np.diff(by_row))
    starts = ends[:-1] + shift
    is_inside = np.ones(int(rows.offsets[-1]), np.bool_)
    for row in np.flatnonzero(in_row < np.diff(rows.offsets)).tolist():
        is_inside[int(rows.offsets[row] + in_row[row]) : int(rows.offsets[row + 1])] = False
    return starts[lengths > 0], is_inside


def _starts_by_starts(rows: StoredRows) -> np.ndarray:
    """Return the starts of documents, int64[k], from starts relative to their rows."""
    relative, by_row = rows.lists[STARTS]
    owners = np.repeat(np.arange(len(rows.offsets) - 1), np.diff(by_row))
    starts = relative + rows.offsets[owners]
    is_wrong = (relative < 0) | (starts >= rows.offsets[owners + 1])
    is_wrong[1:] |= (owners[1:] == owners[:-1]) & (relative[1:] <= relative[:-1])
    firsts = by_row[:-1][np.diff(by_row) > 0]
    is_wrong[firsts] |= relative[firsts] != 0
    if is_wrong.any():
        i = int(np.argmax(is_wrong))
        raise SourceError(
            f"{rows.path}: row {rows.first + owners[i]}: seq_start_id {relative[i]} is not a start"
            " of a document in ascending order from 0\n"
            "hint: pack the dataset again"
        )
    return starts


def _trailing_zeros(positions: np.ndarray, offsets: np.ndarray, least: int) -> np.ndarray:
    """Return which tokens are in the run of positions 0 at the end of a row, bool[tokens].

    A run with fewer than `least` zeros is not padding.
    """
    is_padding = np.zeros(len(positions), np.bool_)
    # Index −1 is the result of the search if no position before a row's end differs from 0.
    nonzero_indices = np.append(np.flatnonzero(positions), -1)
    last_nonzero = nonzero_indices[np.searchsorted(nonzero_indices[:-1], offsets[1:]) - 1]
    begins = np.maximum(last_nonzero + 1, offsets[:-1])
    for begin, end in zip(begins.tolist(), offsets[1:].tolist(), strict=True):
        if end - begin >= least:
            is_padding[begin:end] = True
    return is_padding
