"""Find the documents and the padding in packed rows, and compute the figures of each document.

```
ids          1 11 12  2   1 21  2  0  0         bos 1, eos 2, pad 0
begin, end   0        4   4        7            the documents, without padding
row content  0                     7            first and last token that is not padding
figures      4 tokens 1 bos …   3 tokens …      one line of FIGURES per document
hash         of 11 12           of 21           without the first bos and the last eos
```

Documents come from the column that stores them. Without such a column they end with eos, if eos is
known. Otherwise a row is taken as one document, and documents are not checked.
"""

from typing import NamedTuple

import numpy as np

from packprep.audit.rows import PackedRows
from packprep.kernel import kernel, read_only

HEAD = 16
"""Number of tokens at the start of a document that identify a cut document."""

FIGURES = ("tokens", "bos", "inner_eos", "unknown", "padding", "ends_in_eos")
TOKENS, BOS, INNER_EOS, UNKNOWN, PADDING, ENDS_IN_EOS = range(len(FIGURES))
"""Columns of a document's figures: numbers of tokens, and whether the last token is eos."""


class SpecialIds(NamedTuple):
    """Ids of special tokens and the size of the vocabulary, each −1 if it is unknown."""

    eos: int = -1
    bos: int = -1
    pad: int = -1
    unk: int = -1
    vocab_size: int = -1

    @property
    def own_pad(self) -> int:
        """Return the id of pad if it is no other special token, otherwise −1."""
        return -1 if self.pad in (self.eos, self.bos, self.unk) else self.pad


class FoundDocuments(NamedTuple):
    """The documents and the padding of a batch of rows.

    Attributes:
        begin: int64[d], first token of each document.
        end: int64[d], the token after each document.
        row: int64[d], index of each document's row in the batch.
        row_begin: int64[rows], first token of each row that is not padding before the content.
        row_end: int64[rows], the token after the content of each row.
    """

    begin: np.ndarray
    end: np.ndarray
    row: np.ndarray
    row_begin: np.ndarray
    row_end: np.ndarray

    def __len__(self) -> int:
        return len(self.begin)


def find_documents(
    rows: PackedRows, special: SpecialIds, by_eos: bool, is_stream: bool = False
) -> FoundDocuments:
    """Return the documents of a batch.

    Args:
        rows: The batch.
        special: The ids of special tokens.
        by_eos: Whether documents end with eos, because no column stores them.
        is_stream: Whether the rows are batches of a stream. Padding is then only searched after the
            last document, because the borders of batches have no meaning.
    """
    # A mask shows padding reliably. Without a mask, only the pad id can show it.
    attended = rows.attended
    if attended is None and rows.segments is not None:
        attended = rows.segments != 0
    row_begins, row_ends = rows.row_offsets[:-1], rows.row_offsets[1:]
    if attended is not None:
        begin, end = content_by_mask(attended, rows.row_offsets)
        is_padding = ~attended
    else:
        begin, is_padding = row_begins, None
        end = row_ends
        # A stream has no rows to pad, so a pad that is also eos is taken for eos there.
        pad = special.own_pad if is_stream else special.pad
        if pad >= 0:
            is_bos = pad == special.bos
            content = content_by_pad(
                read_only(rows.ids), rows.row_offsets, pad, special.eos, is_bos
            )
            begin, end = (row_begins if is_stream else content[0]), content[1]
    # A column with boundaries decides. Without such a column, eos decides.
    if rows.segments is not None:
        starts = _starts_of_segments(rows.segments, rows.row_offsets)
    elif rows.document_starts is not None:
        starts = rows.document_starts
    elif by_eos:
        starts = starts_by_eos(read_only(rows.ids), begin, end, special.eos)
    else:
        starts = begin[begin < end]
    # A document ends before the next start, or at the end of its row's content.
    row = np.searchsorted(rows.row_offsets, starts, "right") - 1
    stops = np.append(starts[1:], len(rows.ids))[: len(starts)]
    stops = np.minimum(stops, end[row])
    starts = np.maximum(starts, begin[row])
    # A mask may also mark padding between two documents.
    if is_padding is not None and len(starts):
        stops = ends_of_content(is_padding, starts, stops)
    # A start in padding has no tokens, so it is not a document.
    is_filled = starts < stops
    return FoundDocuments(starts[is_filled], stops[is_filled], row[is_filled], begin, end)


def _starts_of_segments(segments: np.ndarray, row_offsets: np.ndarray) -> np.ndarray:
    """Return where the segment of a token differs from the token before, except at padding."""
    is_start = np.empty(len(segments), np.bool_)
    is_start[:1] = True
    np.not_equal(segments[1:], segments[:-1], out=is_start[1:])
    is_start[row_offsets[:-1][np.diff(row_offsets) > 0]] = True
    return np.flatnonzero(is_start & (segments != 0))


@kernel
def ends_of_content(is_padding, starts, stops):
    """Return the ends of documents without the padding after their last token, int64[d]."""
    ends = np.empty_like(stops)
    for d in range(stops.shape[0]):
        end = stops[d]
        while end > starts[d] and is_padding[end - 1]:
            end -= 1
        ends[d] = end
    return ends


@kernel
def content_by_mask(attended, row_offsets):
    """Return the first attended token of each row and the token after the last, int64[rows]."""
    n = row_offsets.shape[0] - 1
    begin, end = np.empty(n, np.int64), np.empty(n, np.int64)
    for r in range(n):
        a, b = row_offsets[r], row_offsets[r + 1]
        while b > a and not attended[b - 1]:
            b -= 1
        while a < b and not attended[a]:
            a += 1
        begin[r], end[r] = a, b
    return begin, end


@kernel
def content_by_pad(ids, row_offsets, pad, eos, is_bos):
    """Return the first token of each row's content and the token after it, int64[rows] each.

    If pad is eos, the first eos of the run at the end of the row belongs to the last document. A
    single eos at the start may belong to a document that a row cuts, so two or more are padding.
    If pad is also bos (`is_bos`), the last of them starts the content.
    """
    n = row_offsets.shape[0] - 1
    begin, end = np.empty(n, np.int64), np.empty(n, np.int64)
    for r in range(n):
        a, b = row_offsets[r], row_offsets[r + 1]
        # Runs of pad at both ends are removed first.
        while b > a and ids[b - 1] == pad:
            b -= 1
        content = a
        while content < b and ids[content] == pad:
            content += 1
        # A pad that is also bos or eos then gets back the tokens that belong to documents.
        if is_bos and content > a:
            content -= 1
        if pad == eos and content < a + 2:
            content = a
        if pad == eos and a < b < row_offsets[r + 1]:
            b += 1
        begin[r], end[r] = content, b
    return begin, end


@kernel
def starts_by_eos(ids, begin, end, eos):
    """Return the first tokens of documents that end with eos or with their row, int64[d]."""
    # The first loop counts the documents, and the second one writes their starts.
    count = 0
    for r in range(begin.shape[0]):
        is_start = True
        for i in range(begin[r], end[r]):
            count += is_start
            is_start = ids[i] == eos
    starts = np.empty(count, np.int64)
    count = 0
    for r in range(begin.shape[0]):
        is_start = True
        for i in range(begin[r], end[r]):
            if is_start:
                starts[count] = i
                count += 1
            is_start = ids[i] == eos
    return starts


@kernel(inline=True)
def mixed(x):
    """Return a uint64 whose bits all depend on all bits of `x`."""
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return x ^ (x >> np.uint64(32))


@kernel
def document_figures(ids, begin, end, special, figures, hashes, heads):
    """Compute the figures and the hashes of documents.

    The hash is an own one of two 64-bit lanes, because the same document may be stored as uint16
    in one file and as int64 in another one.

    Args:
        ids: integer[n], the tokens.
        begin: int64[d], first token of each document.
        end: int64[d], the token after each document.
        special: int64[4]: eos, bos, unk, and a pad that is none of them, each −1 if unknown.
        figures: int64[d, 6], filled with FIGURES.
        hashes: uint64[d, 2], filled with the hash of the document without its first token if this
            is bos, and without its last token if this is eos.
        heads: uint64[d], filled with the hash of the first HEAD of these tokens, or 0 if it has
            fewer.
    """
    eos, bos, unk, pad = special[0], special[1], special[2], special[3]
    multiplier, second_multiplier = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
    short_shift, long_shift = np.uint64(31), np.uint64(33)
    for d in range(begin.shape[0]):
        a, b = begin[d], end[d]
        # One bos at the start and one eos at the end are not content, so they do not change the
        # hash.
        content_begin, content_end = a, b
        if content_begin < content_end and ids[content_begin] == bos:
            content_begin += 1
        ends_in_eos = content_end > content_begin and ids[content_end - 1] == eos
        if ends_in_eos:
            content_end -= 1
        # If bos is eos, a single such token is the start and the end of its document.
        elif content_begin == content_end and bos == eos:
            ends_in_eos = True
        # The lanes differ in multiplier and rotation, so two documents rarely collide in both.
        bos_count, eos_count, unk_count, pad_count = content_begin - a, 0, 0, 0
        x, y = np.uint64(0x243F6A8885A308D3), np.uint64(0x13198A2E03707344)
        heads[d] = 0
        for i in range(content_begin, content_end):
            t = np.int64(ids[i])
            bos_count += t == bos
            eos_count += t == eos
            unk_count += t == unk
            pad_count += t == pad
            x = (x ^ np.uint64(t)) * multiplier
            x = (x << short_shift) | (x >> long_shift)
            y = (y ^ np.uint64(t)) * second_multiplier
            y = (y << long_shift) | (y >> short_shift)
            # 0 means that a document is shorter than HEAD, so no head may be 0.
            if i - content_begin == HEAD - 1:
                heads[d] = x | np.uint64(1)
        # Inner tokens count as eos then. Only a second one at the start counts as bos.
        if bos == eos:
            bos_count = (content_begin - a) + (
                content_begin < content_end and ids[content_begin] == bos
            )
        # Hashes are divided among files by their top byte, which must depend on all tokens.
        length = np.uint64(content_end - content_begin)
        hashes[d, 0] = mixed(x ^ length)
        hashes[d, 1] = mixed(y ^ length)
        figures[d, 0] = b - a
        figures[d, 1] = bos_count
        figures[d, 2] = eos_count
        figures[d, 3] = unk_count
        figures[d, 4] = pad_count
        figures[d, 5] = ends_in_eos


@kernel
def row_hashes(row, hashes, figures, rows):
    """Return the hashes of rows, uint64[rows, 2], from the hashes of their documents in order."""
    out = np.zeros((rows, 2), np.uint64)
    multiplier, second_multiplier = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
    for d in range(row.shape[0]):
        r = row[d]
        # The hash of a document leaves out bos and eos, so its number of tokens is mixed in.
        x = (out[r, 0] ^ hashes[d, 0] ^ np.uint64(figures[d, 0])) * multiplier
        y = (out[r, 1] ^ hashes[d, 1]) * second_multiplier
        out[r, 0] = x ^ (x >> np.uint64(31))
        out[r, 1] = y ^ (y >> np.uint64(33))
    return out


LOSS_FIGURES = ("trained", "wrong_labels", "crossing", "trained_padding")
TRAINED, WRONG, CROSSING, TO_PADDING = range(len(LOSS_FIGURES))


class LossColumns(NamedTuple):
    """The columns of a batch that describe its loss.

    Attributes:
        labels: int64[n], or int64[0] if no labels are stored.
        loss: bool[n], which positions have loss.
        is_next: Whether a label belongs to the next token.
        eos: The id of eos, or −1.
        pad: The id of a pad that is not eos, or −1.
    """

    labels: np.ndarray
    loss: np.ndarray
    is_next: bool
    eos: int
    pad: int


@kernel
def loss_figures(ids, columns, documents):
    """Count the positions with loss of each document, and the wrong labels among them.

    Args:
        ids: integer[n], the tokens.
        columns: The LossColumns.
        documents: The FoundDocuments.

    Returns:
        int64[d, 4] with LOSS_FIGURES.
    """
    labels, loss, pad = columns.labels, columns.loss, columns.pad
    has_labels = labels.shape[0] > 0
    out = np.zeros((documents.begin.shape[0], 4), np.int64)
    for d in range(documents.begin.shape[0]):
        a, b = documents.begin[d], documents.end[d]
        r = documents.row[d]
        is_first = a == documents.row_begin[r]
        trained, wrong_labels = 0, 0
        # Inside the document, a label is the next token. The last position predicts a token outside
        # of it.
        if columns.is_next:
            for i in range(a, b - 1):
                if loss[i]:
                    trained += 1
                    if has_labels:
                        wrong_labels += labels[i] != ids[i + 1]
            if loss[b - 1]:
                trained += 1
                is_inside = b < documents.row_end[r]
                if not has_labels:
                    out[d, 2] = is_inside
                elif pad >= 0 and labels[b - 1] == pad:
                    out[d, 3] = 1
                elif is_inside and labels[b - 1] == ids[b]:
                    # A label of eos ends the document itself, if the document has no eos.
                    out[d, 2] = labels[b - 1] != columns.eos or ids[b - 1] == columns.eos
        else:
            # The label of a token is the token itself. Nothing predicts the first token of a row.
            for i in range(a, b):
                if loss[i]:
                    trained += i > a or not is_first
                    if has_labels:
                        wrong_labels += labels[i] != ids[i]
            out[d, 2] = loss[a] and not is_first
        out[d, 0] = trained
        out[d, 1] = wrong_labels
    return out


@kernel
def position_figures(positions, begin, end):
    """Check the position ids of documents.

    Returns:
        int64[d, 2]: whether the first position is not 0, and the number of positions that are not
        the one before plus 1.
    """
    out = np.zeros((begin.shape[0], 2), np.int64)
    for d in range(begin.shape[0]):
        out[d, 0] = positions[begin[d]] != 0
        for i in range(begin[d] + 1, end[d]):
            out[d, 1] += positions[i] != positions[i - 1] + 1
    return out


@kernel
def loss_outside(loss, row_offsets, begin, end):
    """Return the number of positions of each row that have loss outside of documents, int64[rows].

    Documents are in ascending order.
    """
    n = row_offsets.shape[0] - 1
    out = np.zeros(n, np.int64)
    d = 0
    for r in range(n):
        i = row_offsets[r]
        while i < row_offsets[r + 1]:
            if d < begin.shape[0] and i == begin[d]:
                i = end[d]
                d += 1
            else:
                out[r] += loss[i]
                i += 1
    return out
