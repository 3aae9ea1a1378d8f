"""Compute layouts for attention kernels from the lengths and ids of segments.

Functions take O(T) time unless their docstrings say otherwise. This example row has T = 11 slots,
with segments of 3, 2 and 4 slots:

    slot           0  1  2  3  4  5  6  7  8  9 10
    segment_ids    1  1  1  2  2  3  3  3  3  0  0
    position_ids   0  1  2  0  1  0  1  2  3  0  0
    cu_seqlens     0        3     5           9

With pad_seq_to_mult, there is padding between segments. cu_seqlens then counts only the slots of
segments, and cu_seqlens_padded has the first slot of each segment in the row.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from packprep.dataset.boundaries import boundaries, fill_slots, starts_of, thd, thd_pair
from packprep.errors import ArgumentError

__all__ = [
    "RULES",
    "MicroSequence",
    "Rule",
    "block_mask",
    "block_varlen",
    "check_segments",
    "context_parallel",
    "cut_points",
    "dense_mask",
    "flatten",
    "label_counts",
    "micro_sequence",
    "micro_windows",
    "next_token_labels",
    "pad_cu_seqlens",
    "position_ids",
    "prefix_ends",
    "seq_idx",
    "thd",
    "thd_pair",
]


Keys = list[tuple[Any, Any]]
"""The keys that queries see, as ranges: one pair of arrays (begin, end), or several pairs. Both
arrays of a pair are shaped as the queries and give each query one range, which may be empty."""


class Rule(NamedTuple):
    """The attention pattern of a task: which keys of its segment a query sees.

    `RULES` has all patterns that a task may have.

    Attributes:
        ahead: Which later keys a query sees.

            - "never": none. segment_prefix is 0.
            - "prefix": the slots of the prefix see each other. The prefix is bos, the mode token
              and the leading slots that the objective defines. segment_prefix is the length of the
              prefix.
            - "segment": all later keys of the segment. segment_prefix is the length of the segment.
            - "blocks": the keys of block diffusion. segment_prefix is −1.
            - "own": any other set of keys, which may exclude earlier keys and include later keys.
              segment_prefix is −1.

        columns: The columns of a batch that `keys` reads. A batch has only one of block_lengths and
            block_starts.
        keys: (query, begin, end, columns, where) → Keys, in slots of the row. `query` has the slots
            of queries. `begin` and `end` have the bounds of each query's segment, from
            `boundaries.runs`. `where` is numpy.where, torch.where or jax.numpy.where, depending on
            the arrays.
        copies: How many copies of its tokens (bos, mode token, body and eos) a segment contains. It
            is 2 in block diffusion, for the noised half x_t and the clean half x_0. Otherwise it is
            1.
    """

    ahead: str
    columns: tuple[str, ...]
    keys: Callable[[Any, Any, Any, Mapping[str, Any], Callable], Keys]
    copies: int = 1

    @property
    def in_blocks(self) -> bool:
        """Whether this is the pattern of block diffusion.

        In a batch with prefix_ends, the slots of block-diffusion segments have prefix_ends −1 and
        block_lengths above 0. If blocks start at answers, the batch has block_starts instead of
        block_lengths, which is at least 0 there and −1 elsewhere.
        """
        return self.ahead == "blocks"


def _keys_so_far(query, begin, end, columns, where) -> Keys:
    return [(begin, query + 1)]


def _keys_of_prefix(query, begin, end, columns, where) -> Keys:
    """Return one range of keys for each query.

    The range starts at the segment's first slot. It ends with the query or with the prefix,
    whichever ends later.
    """
    ends = columns["prefix_ends"]
    return [(begin, where(ends > query, ends, query + 1))]


def _keys_of_blocks(query, begin, end, columns, where) -> Keys:
    """Return two ranges of keys for each query of block diffusion.

    A block-diffusion segment consists of the noised half x_t and the clean half x_0. A query in x_t
    sees its own block of x_t, and all earlier blocks of x_0. A query in x_0 sees its own block of
    x_0, and all earlier blocks of x_0. Without the column block_starts, blocks count from the start
    of the segment.
    """
    # Both halves have the same positions and blocks.
    middle, positions = (begin + end) // 2, columns["position_ids"]
    if "block_starts" in columns:
        block_begin = columns["block_starts"]
        # block_ends are slots of the row. Subtracting the slot of position 0 turns them into
        # positions.
        block_end = columns["block_ends"] - (query - positions)
    else:
        length = columns["block_lengths"]
        # Slots without blocks have length 0. The 1 only avoids a division by 0.
        length = where(length > 0, length, 1)
        block_begin, half = positions // length * length, middle - begin
        block_end = where(block_begin + length < half, block_begin + length, half)
    noised = query < middle  # The query is in x_t.
    # A query in x_0 sees x_0 up to the end of the query's block, so its second range is empty.
    return [
        (where(noised, begin + block_begin, middle), where(noised, begin, middle) + block_end),
        (where(noised, middle, 0), where(noised, middle + block_begin, 0)),
    ]


RULES = {
    "causal": Rule("never", (), _keys_so_far),
    "prefix": Rule("prefix", ("prefix_ends",), _keys_of_prefix),
    "bidirectional": Rule("segment", ("prefix_ends",), _keys_of_prefix),
    "block_diffusion": Rule(
        "blocks",
        ("prefix_ends", "position_ids", "block_lengths", "block_starts"),
        _keys_of_blocks,
        copies=2,
    ),
}
"""The value of a task's key `attention` → the pattern."""


def _spans(cu_seqlens, cu_seqlens_padded=None, length=None) -> tuple[np.ndarray, np.ndarray]:
    """Return the first slot of each segment and the slot after the segment, int64[n] each.

    Padding after a segment is not part of it.

    Raises:
        ArgumentError: If the boundaries are invalid or exceed `length`.
    """
    cu = np.asarray(cu_seqlens, np.int64)
    if cu.ndim != 1 or len(cu) == 0 or cu[0] != 0 or (np.diff(cu) < 0).any():
        raise ArgumentError(f"cu_seqlens should start at 0 and be ascending, but is {_some(cu)}")
    physical = cu
    if cu_seqlens_padded is not None:
        physical = np.asarray(cu_seqlens_padded, np.int64)
        if (
            physical.shape != cu.shape
            or physical[0] != 0
            or (np.diff(physical) < np.diff(cu)).any()
        ):
            raise ArgumentError(
                f"cu_seqlens_padded {_some(physical)} should start at 0 and give each segment of "
                f"cu_seqlens {_some(cu)} at least its length"
            )
    if length is not None and physical[-1] > length:
        raise ArgumentError(
            f"the segments end at position {physical[-1]}, beyond the length {length}"
        )
    _, begin, slots = boundaries(np.array([len(cu) - 1]), cu, physical)
    return begin, begin + slots


def _some(values) -> str:
    return np.array2string(np.asarray(values), threshold=12, separator=", ")


def _segment_of_slot(begin: np.ndarray, end: np.ndarray, length: int) -> np.ndarray:
    """Return the index of each slot's segment, int64[length], −1 on padding."""
    return fill_slots(begin, end - begin, np.arange(len(begin)), -1, length)


def _of_slots(per_segment: np.ndarray, segment: np.ndarray, padding) -> np.ndarray:
    """Return `per_segment`[`segment`], with the value `padding` where `segment` is −1.

    `segment` has the segment of each slot, as `_segment_of_slot` returns it.
    """
    return np.append(per_segment, padding)[segment]


def position_ids(cu_seqlens, length, cu_seqlens_padded=None) -> np.ndarray:
    """Return each slot's distance from the start of its segment.

    Args:
        cu_seqlens: Boundaries of the segments, int[n + 1].
        length: Number of slots of the row.
        cu_seqlens_padded: Boundaries including the padding of segments, int[n + 1], or None.

    Returns:
        int32[length], 0 on padding.

    Raises:
        ArgumentError: If the boundaries are invalid.
    """
    begin, end = _spans(cu_seqlens, cu_seqlens_padded, length)
    segment = _segment_of_slot(begin, end, length)
    slots = np.arange(length)
    return np.where(segment < 0, 0, slots - _of_slots(begin, segment, 0)).astype(np.int32)


def next_token_labels(
    tokens, segment_ids, loss_mask, distance=1, in_place=None, ignore_index=-100
) -> np.ndarray:
    """Return labels for the token `distance` slots later.

    The label of slot i is tokens[i + distance] if slot i + distance is in the same segment and
    loss_mask[i + distance − 1] is 1. All other labels are `ignore_index`.

    Args:
        tokens: Tokens, [T] or [B, T].
        segment_ids: Segment ids, shaped as `tokens`.
        loss_mask: The loss mask, shaped as `tokens`.
        distance: Distance to the predicted token, at least 1. Heads that predict the k-th next
            token use k.
        in_place: bool[T], True at the slots of segments of same-position tasks. The labels of
            these slots are `ignore_index`.
        ignore_index: The label of slots that are not trained.

    Returns:
        int64, shaped as `tokens`.

    Raises:
        ArgumentError: If `distance` is below 1.
    """
    tokens, segment_ids, loss_mask = (np.asarray(a) for a in (tokens, segment_ids, loss_mask))
    if distance < 1:
        raise ArgumentError(f"distance {distance} should be at least 1")
    labels = np.full(tokens.shape, ignore_index, np.int64)
    count = max(0, tokens.shape[-1] - distance)
    if count == 0:
        return labels
    own_ids, target_ids = segment_ids[..., :count], segment_ids[..., distance:]
    # The slot before a token decides whether the token is trained, so the mask is read there.
    has_target = (
        (own_ids == target_ids)
        & (own_ids != 0)
        & (loss_mask[..., distance - 1 : distance - 1 + count] != 0)
    )
    if in_place is not None:
        has_target &= ~np.asarray(in_place, bool)[..., :count]
    np.copyto(labels[..., :count], tokens[..., distance:], where=has_target, casting="unsafe")
    return labels


def pad_cu_seqlens(cu_seqlens, entries, length=None, tail="none") -> np.ndarray:
    """Pad cu_seqlens to a fixed number of entries by repeating its last value.

    CUDA graphs and XLA need arrays of a fixed shape.

    Args:
        cu_seqlens: Boundaries of the segments, int[n + 1].
        entries: Number of entries of the result.
        length: Number of slots of the row, required unless `tail` is "none".
        tail: The treatment of slots after the last segment. With "segment", they become one more
            segment. With "fold", they are added to the last segment. With "none", they stay outside
            all segments. Kernels do not write outputs for slots outside all segments. These outputs
            may be NaN, and NaN times a loss_mask of 0 is still NaN.

    Returns:
        int32[entries].

    Raises:
        ArgumentError: If an argument is invalid, or the segments do not fit into `entries`.
    """
    cu = np.asarray(cu_seqlens, np.int64)
    _spans(cu, None, length)
    if tail not in ("none", "segment", "fold"):
        raise ArgumentError(f"tail is {tail!r} and should be 'none', 'segment' or 'fold'")
    if tail != "none":
        if length is None:
            raise ArgumentError(f"tail {tail!r} requires length")
        if cu[-1] < length:
            # A row without segments has no last segment to extend, so "fold" adds one.
            cu = (
                np.append(cu, length)
                if tail == "segment" or len(cu) == 1
                else np.append(cu[:-1], length)
            )
    if len(cu) > entries:
        raise ArgumentError(f"{len(cu)} entries ({len(cu) - 1} segments) do not fit into {entries}")
    return np.append(cu, np.full(entries - len(cu), cu[-1])).astype(np.int32)


def check_segments(counts, max_segments, rows=None) -> None:
    """Check that no row has more segments than arrays of a fixed shape can hold.

    Args:
        counts: Number of segments of each row, int[B], including padding that becomes a segment.
        max_segments: Maximum number of segments of a row.
        rows: Indices of the rows in the dataset, int[B], for the message. None names the rows by
            their index in the batch.

    Raises:
        ArgumentError: If a row has more segments. The message has the number that the rows need.
    """
    counts = np.asarray(counts)
    excess = counts > max_segments
    if excess.any():
        i = int(np.argmax(excess))
        place = f"row {i} of the batch" if rows is None else f"row {rows[i]}"
        raise ArgumentError(
            f"{place} has {counts[i]} segments, counting its padding, which is more than"
            f" max_segments = {max_segments}\n"
            f"hint: give max_segments = {counts.max()} for this batch. For all rows, see the most"
            " segments per row in `packprep inspect`, which does not count padding"
        )


def _check_prefix(segment_prefix, begin, end) -> np.ndarray:
    prefix = np.asarray(segment_prefix, np.int64)
    if prefix.shape != begin.shape:
        raise ArgumentError(
            f"segment_prefix has {prefix.size} entries, but there are {begin.size} segments"
        )
    if (prefix == -1).any():
        raise ArgumentError(
            f"segment {int(np.argmax(prefix == -1))} has prefix -1, the attention pattern of"
            " block diffusion\n"
            "hint: use block_mask"
        )
    is_wrong = (prefix < 0) | (prefix > end - begin)
    if is_wrong.any():
        i = int(np.argmax(is_wrong))
        raise ArgumentError(
            f"segment {i} has prefix {prefix[i]}, but its length is {end[i] - begin[i]}"
        )
    return prefix


def prefix_ends(cu_seqlens, segment_prefix, length, cu_seqlens_padded=None) -> np.ndarray:
    """Return for each slot the end of its segment's prefix, as a slot of the row.

    Query q sees key k if both are in the same segment, and k ≤ q or k < prefix_ends[q]. For causal
    attention, the prefix has 0 slots. For bidirectional attention, the prefix has all slots of the
    segment.

    Args:
        cu_seqlens: Boundaries of the segments, int[n + 1].
        segment_prefix: Number of slots of each segment's prefix, int[n]. A prefix of −1, which
            marks another attention pattern, raises an error.
        length: Number of slots of the row.
        cu_seqlens_padded: Boundaries including the padding of segments, int[n + 1], or None.

    Returns:
        int32[length], 0 on padding.

    Raises:
        ArgumentError: If the boundaries or a prefix are invalid.
    """
    begin, end = _spans(cu_seqlens, cu_seqlens_padded, length)
    prefix = _check_prefix(segment_prefix, begin, end)
    return _of_slots(begin + prefix, _segment_of_slot(begin, end, length), 0).astype(np.int32)


def dense_mask(segment_ids, prefix_ends=None, window=None) -> np.ndarray:
    """Return the full attention mask of a row, for tests and small rows.

    Query q sees key k if both are in the same segment, and k ≤ q or k < prefix_ends[q]. Padding (id
    0) attends to padding, so that each query sees a key. The mask takes O(T²) memory.

    Args:
        segment_ids: Segment ids, [T].
        prefix_ends: The array from `prefix_ends`, [T], or None for causal attention.
        window: A `MicroSequence`. If given, the mask has only the window's queries and keys.

    Returns:
        bool[T, T], or bool[queries, keys] with `window`. True if query q sees key k.

    Raises:
        ArgumentError: If the window exceeds the row.
    """
    ids = np.asarray(segment_ids)
    keys = np.arange(len(ids))
    queries = keys
    if window is not None:
        end = window.first_document_begin + len(window.document_index_k)
        if end > len(ids):
            raise ArgumentError(
                f"the window ends at position {end}, beyond the {len(ids)} segment_ids"
            )
        queries = keys[end - len(window.document_index_q) : end]
        keys = keys[window.first_document_begin : end]
    allowed = keys <= queries[:, None]
    if prefix_ends is not None:
        allowed |= keys < np.asarray(prefix_ends)[queries, None]
    return allowed & (ids[queries, None] == ids[keys])


def in_blocks(columns: Mapping[str, Any]) -> Any:
    """Return which slots have block diffusion.

    Args:
        columns: Columns of a batch, with block_starts or block_lengths.

    Returns:
        A bool array, shaped as these columns.
    """
    if "block_starts" in columns:
        return columns["block_starts"] >= 0
    return columns["block_lengths"] > 0


def with_block_ends(
    columns: Mapping[str, Any],
    slots: Any,
    runs: Callable[[Any], tuple[Any, Any]],
    where: Callable,
) -> dict[str, Any]:
    """Return the columns of a batch with block_ends, if they have block_starts.

    Args:
        columns: Columns of a batch. block_starts needs position_ids.
        slots: 0 … T − 1 for every row.
        runs: A function that returns the bounds (begin, end) of the run of equal values that
            contains each slot.
        where: numpy.where, torch.where or jax.numpy.where.

    Returns:
        The columns. block_ends has for each slot the slot of the row after its block.
    """
    if "block_starts" not in columns:
        return dict(columns)
    starts = columns["block_starts"]
    first_slot = where(starts >= 0, slots - columns["position_ids"] + starts, -1)
    return {**columns, "block_ends": runs(first_slot)[1]}


def block_mask(segment_ids, position_ids, half, block_length, block_starts=None) -> np.ndarray:
    """Return the attention mask of block diffusion.

    Each segment consists of the noised half x_t and then the clean half x_0. A query sees its own
    block in its own half, and all earlier blocks of x_0 (Arriola et al., "Block Diffusion", 2025).
    The mask takes O(T²) memory.

    Args:
        segment_ids: Segment ids, [T].
        position_ids: Positions, [T]. They count 0 … L − 1 in each half of L slots.
        half: 0 for slots in x_t and 1 for slots in x_0, [T].
        block_length: Number of slots of a block. A slot is in block position // block_length.
        block_starts: The position at which each slot's block begins, [T], as in the column
            block_starts. If given, `block_length` is not used.

    Returns:
        bool[T, T]. Entry [q, k] is True if query q sees key k.
    """
    ids, half = np.asarray(segment_ids), np.asarray(half).astype(bool)
    if block_starts is None:
        block = np.asarray(position_ids) // block_length
    else:
        block = np.asarray(block_starts)
    q_block, k_block, q_half, k_half = block[:, None], block, half[:, None], half
    # Both halves see their own block, and earlier blocks of x_0. No query in x_0 sees x_t.
    allowed = (q_block == k_block) & (q_half == k_half)
    allowed |= ~q_half & k_half & (q_block > k_block)
    allowed |= q_half & k_half & (q_block >= k_block)
    return allowed & (ids[:, None] == ids)


def block_varlen(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Split a batch into sequences for kernels that count blocks from the start of a sequence.

    Flat slots are slots of the batch's rows, joined to one long row. Each half of a block-diffusion
    segment, x_t or x_0, is one sequence. Each other segment and each run of padding is a sequence
    with block length 0. In sequence i, the flat slot s is in block (s − block_origins[i]) //
    block_lengths[i]. If blocks start at answers, they have different lengths, and block_ids has the
    number of each slot's block instead.

    Args:
        batch: segment_ids, position_ids, and block_lengths or block_starts, [B, T] each.

    Returns:
        A dict with cu_seqlens int32[n + 1] and max_seqlen int. With block_lengths, also
        block_origins int32[n] (the first flat slot of each sequence) and block_lengths int32[n].
        With block_starts, also block_ids int32[B · T]: the number of the slot's block in its
        sequence, from 0, or −1 in a sequence without blocks.
    """
    name = "block_starts" if "block_starts" in batch else "block_lengths"
    ids, positions, blocks = (
        np.atleast_2d(np.asarray(batch[column])) for column in ("segment_ids", "position_ids", name)
    )
    has_block = in_blocks({name: blocks})
    # A half starts where its positions start. Other sequences start where the segment id changes.
    begins = (positions == 0) & has_block
    begins[:, :1] = True
    begins[:, 1:] |= ids[:, 1:] != ids[:, :-1]
    origins = np.flatnonzero(begins)
    cu_seqlens = np.append(origins, ids.size)
    sequences: dict[str, Any] = {
        "cu_seqlens": cu_seqlens.astype(np.int32),
        "max_seqlen": int(np.diff(cu_seqlens).max(initial=0)),
    }
    if name == "block_starts":
        # A block starts at the slot whose position is the block's start. So the running count
        # numbers all blocks.
        number = np.cumsum((blocks == positions) & has_block)
        # Subtracting the count at its first slot makes the numbers of a sequence start at 0.
        first_number = np.repeat(number[origins], np.diff(cu_seqlens))
        numbers = np.where(has_block.reshape(-1), number - first_number, -1)
        return sequences | {"block_ids": numbers.astype(np.int32)}
    return sequences | {
        "block_origins": origins.astype(np.int32),
        "block_lengths": blocks.reshape(-1)[origins].astype(np.int32),
    }


class MicroSequence(NamedTuple):
    """The layout of a window of a row: its queries, and the keys that these queries see.

    `micro_sequence` returns it.
    """

    cu_seqlens_q: np.ndarray  # int32: boundaries of the queries, from 0
    cu_seqlens_k: np.ndarray  # int32: boundaries of the keys, from 0
    max_seqlen_q: int
    max_seqlen_k: int
    first_document_begin: int  # the first key's slot in the row
    # int32[q] and int32[k]: number of the slot's segment in the window, from 1; 0 on padding
    document_index_q: np.ndarray
    document_index_k: np.ndarray
    position_ids: np.ndarray  # int32[q]: distance from the segment's first slot; 0 on padding


def micro_sequence(
    cu_seqlens, begin, end, segment_prefix=None, cu_seqlens_padded=None
) -> MicroSequence:
    """Return the layout of one window of a row: its queries, and the keys that they see.

    A long row can be processed window by window. In this example, the second segment begins before
    the window:

        segments 3 5 4, window [4, 8)  →  q 0 4   k 0 5   first 3   positions 1 2 3 4

    The queries are the slots [begin, end). The keys are the slots [first_document_begin, end),
    where first_document_begin is the first slot of the segment that contains the first query. The
    caller slices the keys from first_document_begin on, and cu_seqlens_k counts from there, so it
    starts at 0. If it started above 0, attention backends would compute wrong gradients.

    The layout is right only for bottom-right causal alignment. A backend with top-left alignment
    must not use it if first_document_begin < begin. A window must not end inside a two-way prefix,
    because its queries would need keys after the window. `cut_points` returns valid ends. Padding
    after a segment counts as part of the segment. Slots after the last segment count as one more
    segment.

    Args:
        cu_seqlens: Boundaries of the segments, int[n + 1].
        begin: Slot of the first query.
        end: Slot after the last query.
        segment_prefix: Number of slots of each segment's two-way prefix, int[n], or None for causal
            attention.
        cu_seqlens_padded: Boundaries including the padding of segments, int[n + 1], or None.

    Returns:
        A `MicroSequence`.

    Raises:
        ArgumentError: If the boundaries or the window are invalid, or the window ends inside a
            two-way prefix.
    """
    segment_begin, segment_end = _spans(cu_seqlens, cu_seqlens_padded)
    physical = np.asarray(cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded, np.int64)
    if not 0 <= begin < end:
        raise ArgumentError(f"the window [{begin}, {end}) should be 0 <= begin < end")
    if segment_prefix is not None:
        prefix_end = segment_begin + _check_prefix(segment_prefix, segment_begin, segment_end)
        cut = (segment_begin < end) & (end < prefix_end)
        if cut.any():
            i = int(np.argmax(cut))
            raise ArgumentError(
                f"the window ends at position {end}, inside the bidirectional prefix"
                f" [{segment_begin[i]}, {prefix_end[i]}) of segment {i}\n"
                "hint: end it at one of cut_points"
            )
    segment = _segment_of_slot(segment_begin, segment_end, max(end, int(physical[-1])))
    # The slots after the last segment are one more segment, so that every query sees a key.
    if end > physical[-1]:
        physical = np.append(physical, end)
    touched = (physical[:-1] < end) & (physical[1:] > begin) & (physical[1:] > physical[:-1])
    # The keys start with the first query's segment, even if this segment starts before the window.
    first_touched = int(np.argmax(touched))
    k_begin = int(physical[first_touched])
    # The last segment is cut at the end of the window. Only the first segment may have more keys
    # than queries.
    ends = np.minimum(physical[1:][touched], end)
    cu_q, cu_k = np.append(0, ends - begin), np.append(0, ends - k_begin)
    # Segments of the window are numbered from 1, and padding has the number 0.
    ordinal = np.cumsum(touched)
    keys = segment[k_begin:end]
    document_index_k = np.where(keys < 0, 0, ordinal[keys]).astype(np.int32)
    queries = segment[begin:end]
    # Positions count from the segment's first slot, even if this slot is before the window.
    positions = np.where(
        queries < 0, 0, np.arange(begin, end) - _of_slots(segment_begin, queries, 0)
    )
    return MicroSequence(
        cu_q.astype(np.int32),
        cu_k.astype(np.int32),
        int(np.diff(cu_q).max()),
        int(np.diff(cu_k).max()),
        k_begin,
        document_index_k[begin - k_begin :],
        document_index_k,
        positions.astype(np.int32),
    )


def cut_points(row, size) -> np.ndarray:
    """Split a row into windows of at most `size` slots, and return their ends.

    The windows cover the whole row. No window ends inside a two-way prefix, so `micro_sequence`
    accepts all of them.

    Args:
        row: A `Row` of a dataset.
        size: Maximum number of slots of a window.

    Returns:
        The ends e₀, e₁, … of the windows [0, e₀), [e₀, e₁), …, int64. The last end is the number of
        slots of the row.

    Raises:
        ArgumentError: If a two-way prefix has more than `size` slots.
    """
    length = len(row.tokens)
    if size < 1:
        raise ArgumentError(f"size {size} should be at least 1")
    begin, end = _spans(row.cu_seqlens, row.cu_seqlens_padded, length)
    prefix = _check_prefix(row.segments["prefix"], begin, end)
    ends, window_begin = [], 0
    while window_begin < length:
        cut = min(window_begin + size, length)
        # This is the last segment that begins before the cut.
        i = int(np.searchsorted(begin, cut, side="left")) - 1
        if i >= 0 and cut < begin[i] + prefix[i]:
            if begin[i] <= window_begin:
                raise ArgumentError(
                    f"segment {i} has a bidirectional prefix of {prefix[i]} positions, which does"
                    f" not fit into a window of {size}"
                )
            cut = int(begin[i])
        ends.append(cut)
        window_begin = cut
    return np.array(ends, np.int64)


def context_parallel(
    cu_seqlens, cp_size, rank, tp_size=1, cu_seqlens_padded=None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the slots and boundaries of one rank for load-balanced context parallelism.

    This example shows the boundaries after padding, and the slots that rank 0 gets:

        lengths 3 2 4, cp_size 2    padded 0 4 8 12
        rank 0                      slots 0 3 4 7 8 11    cu_seqlens 0 1 2 4

    Each segment is padded to a multiple of 2 · cp_size · tp_size slots. The padded segments form
    the padded row. Each padded segment is cut into 2 · cp_size equal chunks, and rank r has the
    chunks r and 2 · cp_size − 1 − r. If cp_size is 1, segments are padded to a multiple of tp_size
    and are not cut.

    Args:
        cu_seqlens: Boundaries of the segments, int[n + 1].
        cp_size: Number of context-parallel ranks.
        rank: Index of the rank.
        tp_size: Number of tensor-parallel ranks.
        cu_seqlens_padded: int[n + 1], boundaries of segments that already have padding to this
            multiple. No padding is added to these segments. None adds padding to the segments of
            cu_seqlens.

    Returns:
        Three arrays:

        - indices, int64: the slots of the padded row that the rank has.
        - cu_seqlens, int32[n + 1]: boundaries of the rank's slots, counted without padding.
        - cu_seqlens_padded, int32[n + 1]: boundaries of the segments in the padded row. The
            rank's part of each segment has 1 / cp_size of the segment's length.

    Raises:
        ArgumentError: If the arguments are invalid, or a segment's length in cu_seqlens_padded is
            not a multiple of the required number.
    """
    if cp_size < 1 or tp_size < 1 or not 0 <= rank < cp_size:
        raise ArgumentError(
            f"cp_size {cp_size}, tp_size {tp_size}, rank {rank}: should be ≥ 1, ≥ 1, 0 …"
            " cp_size − 1"
        )
    begin, end = _spans(cu_seqlens, cu_seqlens_padded)
    lengths = end - begin
    # Each segment is cut into 2 · cp_size chunks, and each chunk is divided over tp_size ranks.
    multiple = tp_size if cp_size == 1 else 2 * cp_size * tp_size
    if cu_seqlens_padded is None:
        padded = np.append(0, np.cumsum(-(-lengths // multiple) * multiple))
    else:
        padded = np.asarray(cu_seqlens_padded, np.int64)
        is_wrong = np.diff(padded) % multiple != 0
        if is_wrong.any():
            i = int(np.argmax(is_wrong))
            raise ArgumentError(
                f"segment {i} has {padded[i + 1] - padded[i]} positions, which is not a multiple"
                f" of {multiple}\n"
                f"hint: build with pad_seq_to_mult = {multiple}"
            )
    if cp_size == 1:
        return (
            np.arange(padded[-1]),
            np.append(0, np.cumsum(lengths)).astype(np.int32),
            padded.astype(np.int32),
        )
    # A rank gets an early and a late chunk of each segment, because late queries see more keys.
    chunk = np.diff(padded) // (2 * cp_size)
    chunk_of = np.array([rank, 2 * cp_size - 1 - rank])
    # These arrays have two entries per segment, one for each of its chunks on this rank.
    starts = (padded[:-1, None] + chunk[:, None] * chunk_of).ravel()
    sizes = np.repeat(chunk, 2)
    indices = np.repeat(starts - starts_of(sizes), sizes) + np.arange(sizes.sum())
    # A chunk may end in padding, or contain only padding. Its real slots are counted here.
    real = np.clip(lengths[:, None] - chunk[:, None] * chunk_of, 0, chunk[:, None]).sum(axis=1)
    return indices, np.append(0, np.cumsum(real)).astype(np.int32), padded.astype(np.int32)


def flatten(
    batch, tail="segment", max_segments=None
) -> tuple[dict[str, np.ndarray], np.ndarray, int]:
    """Join a batch of B rows into one flat row, the THD layout.

    In the result, segment_ids count through all rows. They are int32, with 0 on padding. If the
    batch has the column prefix_ends, its values become slots of the flat row, except −1, which
    stands for block diffusion. If the batch has the column seq_idx, its values become indices of
    sequences in cu_seqlens. Columns with one number per row, [B], are not changed.

    Args:
        batch: name → [B, T, …], with segment_ids.
        tail: With "segment", cu_seqlens has each segment and each run of padding as a sequence, so
            that cu_seqlens[-1] = B · T. With "drop", padding is left out of all columns.
        max_segments: Maximum number of sequences of a row. cu_seqlens then has
            B · max_segments + 1 entries, where unused entries repeat the end, and max_seqlen is T.
            CUDA graphs and compiled steps need such fixed shapes.

    Returns:
        The flat columns by name, cu_seqlens int32, and max_seqlen.

    Raises:
        ArgumentError: If `tail` is invalid, or if a row has more sequences than max_segments.
    """
    if tail not in ("segment", "drop"):
        raise ArgumentError(f"tail is {tail!r} and should be 'segment' or 'drop'")
    ids = np.asarray(batch["segment_ids"])
    n_rows, length = ids.shape
    # A sequence starts at slot 0 of each row, and where the id changes. So padding forms sequences
    # too.
    starts = np.ones(ids.shape, bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    is_kept = np.ones(ids.shape, bool) if tail == "segment" else ids != 0
    if max_segments is not None:
        check_segments((starts & is_kept).sum(axis=1), max_segments)
    flat_kept = is_kept.ravel()
    # The axes of rows and slots become one axis of kept slots. Columns with one number per row stay
    # the same.
    columns = {
        name: (
            np.asarray(values).reshape(n_rows * length, *np.shape(values)[2:])[flat_kept]
            if np.ndim(values) > 1
            else values
        )
        for name, values in batch.items()
    }
    # Segments count through all rows, and padding between them does not interrupt the count.
    real_starts = starts & (ids != 0)
    columns["segment_ids"] = np.where(ids != 0, np.cumsum(real_starts).reshape(ids.shape), 0)[
        is_kept
    ].astype(np.int32)
    # A run of padding is a sequence of cu_seqlens as well, unless padding is dropped.
    if "seq_idx" in batch:
        columns["seq_idx"] = (np.cumsum((starts & is_kept)[is_kept]) - 1).astype(np.int32)
    # `kept_before` has the number of kept slots before each slot.
    kept_before = np.append(0, np.cumsum(flat_kept))
    if "prefix_ends" in batch:
        # The end of a prefix becomes the number of kept slots before it in the flat row.
        row_ends = np.asarray(batch["prefix_ends"], np.int64)
        flat_ends = kept_before[np.arange(n_rows)[:, None] * length + row_ends]
        # The −1 of block diffusion is not a slot.
        flat_ends = np.where(row_ends < 0, -1, flat_ends)
        columns["prefix_ends"] = np.where(ids != 0, flat_ends, 0)[is_kept].astype(np.int32)
    # The last boundary is the number of kept slots, so the sequences cover the flat row.
    boundaries = np.append(kept_before[np.flatnonzero(starts & is_kept)], kept_before[-1])
    if max_segments is not None:
        return columns, pad_cu_seqlens(boundaries, n_rows * max_segments + 1), length
    return columns, boundaries.astype(np.int32), int(np.diff(boundaries).max(initial=0))


def label_counts(loss_mask, cu_seqlens, cu_seqlens_padded=None) -> np.ndarray:
    """Return for each slot the number of trained slots in its segment.

    Args:
        loss_mask: The loss mask, [T].
        cu_seqlens: Boundaries of the segments, int[n + 1].
        cu_seqlens_padded: Boundaries including the padding of segments, int[n + 1], or None.

    Returns:
        int32[T], 0 on padding.

    Raises:
        ArgumentError: If the boundaries are invalid.
    """
    trained = np.asarray(loss_mask) != 0
    begin, end = _spans(cu_seqlens, cu_seqlens_padded, len(trained))
    trained_before = np.append(0, np.cumsum(trained))
    return _of_slots(
        trained_before[end] - trained_before[begin], _segment_of_slot(begin, end, len(trained)), 0
    ).astype(np.int32)


def micro_windows(length, splits, cp_size=1, rank=0) -> np.ndarray:
    """Return the windows of slots that one rank processes, one window for each split.

    The slots are cut into `splits` equal parts. Each part is cut into cp_size equal windows, one
    for each rank.

        length 16, splits 2                        →  [0, 8), [8, 16)
        length 16, splits 2, cp_size 2, rank 1     →  [4, 8), [12, 16)

    Args:
        length: Number of slots, a multiple of splits · cp_size.
        splits: Number of parts.
        cp_size: Number of context-parallel ranks.
        rank: Index of the rank.

    Returns:
        Half-open windows, int64[splits, 2].

    Raises:
        ArgumentError: If the arguments are invalid.
    """
    if splits < 1 or cp_size < 1 or not 0 <= rank < cp_size:
        raise ArgumentError(
            f"splits {splits}, cp_size {cp_size}, rank {rank}: should be ≥ 1, ≥ 1, 0 … cp_size − 1"
        )
    if length % (splits * cp_size):
        raise ArgumentError(
            f"length {length} is not a multiple of splits · cp_size = {splits * cp_size}"
        )
    window_slots = length // (splits * cp_size)
    begin = (np.arange(splits) * cp_size + rank) * window_slots
    return np.stack((begin, begin + window_slots), axis=1)


def seq_idx(cu_seqlens, length, cu_seqlens_padded=None) -> np.ndarray:
    """Return for each slot the number of its segment, for state-space models.

    Segments are numbered 0, 1, … in row order. With n segments, all padding has the number n.

    Args:
        cu_seqlens: Boundaries of the segments, int[n + 1].
        length: Number of slots of the row.
        cu_seqlens_padded: Boundaries including the padding of segments, int[n + 1], or None.

    Returns:
        int32[length].

    Raises:
        ArgumentError: If the boundaries are invalid.
    """
    begin, end = _spans(cu_seqlens, cu_seqlens_padded, length)
    segment = _segment_of_slot(begin, end, length)
    return np.where(segment < 0, len(begin), segment).astype(np.int32)
