"""Compute the slots of segments from cu_seqlens or segment ids, and write values to these slots.

    slot           0  1  2  3  4  5  6  7  8  9 10
    segment_ids    1  1  1  2  2  3  3  3  3  0  0
    cu_seqlens     0        3     5           9           `boundaries`
    runs           0  0  0  3  3  5  5  5  5  9  9        `runs`: start of each slot's run of ids
    thd            seqlens 3 2 4, offsets 0 3 5 −1        `thd`, for a fixed number of segments

No function builds an attention mask. `packprep.dataset.attention` exports `thd` and `thd_pair`
with the other layouts.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from packprep.errors import ArgumentError

_SLOTS_AT_ONCE = 1 << 14
_BEYOND = 1 << 62  # Larger than any position.


def boundaries(
    counts: np.ndarray, real: np.ndarray, physical: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for each segment its row, its first slot and its length.

    In this example, row 0 has two segments and row 1 has one segment:

        counts 2 1      real 0 3 5 0 5      physical 0 4 8 0 8
        row 0 0 1       first slot 0 4 0    slots 3 2 5

    Args:
        counts: Number of segments of each row, int64[rows].
        real: cu_seqlens of all rows, joined, int64[m + rows].
        physical: cu_seqlens_padded of all rows, joined, int64[m + rows].

    Returns:
        For each of the m segments its row, its first slot in the row, and its number of slots
        without padding, int64[m] each.
    """
    row = owners(counts)
    # cu_seqlens has one more entry per row than the row has segments. So segment i of row r starts
    # at entry i + r.
    entries = np.arange(len(row)) + row
    return row, physical[entries], real[entries + 1] - real[entries]


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Return 0 and the running sums of n lengths, int64[n + 1]: [2, 3] → 0 2 5."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def starts_of(lengths: np.ndarray) -> np.ndarray:
    """Return for each of n lengths the sum of all earlier lengths, int64[n]: [2, 3] → 0 2."""
    return np.cumsum(lengths) - lengths


def descents(bounds: np.ndarray) -> np.ndarray:
    """Return which of the n ranges between n + 1 bounds end before they begin, bool[n].

    Bounds of a damaged file may be any integers. The differences of such bounds can overflow, so
    this function compares them.
    """
    return bounds[1:] < bounds[:-1]


def owners(counts: np.ndarray) -> np.ndarray:
    """Repeat each index i counts[i] times: [2, 3] → 0 0 1 1 1, int64[Σ counts]."""
    return np.repeat(np.arange(len(counts)), counts)


def ranks(counts: np.ndarray) -> np.ndarray:
    """Return 0 … counts[i] − 1 for each i, joined: [2, 3] → 0 1 0 1 2, int64[Σ counts]."""
    return np.arange(int(counts.sum())) - np.repeat(starts_of(counts), counts)


def fill_slots(
    begin: np.ndarray, length: np.ndarray, values: np.ndarray, elsewhere, size: int
) -> np.ndarray:
    """Return an array in which all slots of a range have the range's value.

    Args:
        begin: The first slot of each range, int[m], in ascending order. Ranges do not overlap.
        length: Number of slots of each range, int[m].
        values: The value of each range, [m].
        elsewhere: The value of all slots outside the ranges.
        size: Number of slots of the result.

    Returns:
        An array [size] with the dtype of `values`.
    """
    # Gaps and ranges alternate. The ranges [2, 4) and [5, 6) of 8 slots give the runs 2 2 1 1 2.
    runs = np.empty(2 * len(values) + 1, np.int64)
    parts = np.empty(2 * len(values) + 1, values.dtype)
    runs[0:-1:2], runs[-1], runs[1::2] = begin, size, length
    runs[2::2] -= begin + length
    parts[0::2], parts[1::2] = elsewhere, values
    return np.repeat(parts, runs)


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def move_ahead(
    slots: np.ndarray, first_slots: np.ndarray, length: np.ndarray, last_value: int
) -> None:
    """Shift the values in each range by one slot, so that each slot gets the next slot's value.

    Args:
        slots: The flat array to change.
        first_slots: The first slot of each range.
        length: Number of slots of each range.
        last_value: The new value of the last slot of each range.
    """
    has_slots = length > 0
    for begin, end in zip(
        first_slots[has_slots].tolist(), (first_slots + length)[has_slots].tolist(), strict=True
    ):
        slots[begin : end - 1] = slots[begin + 1 : end]
        slots[end - 1] = last_value


def put_clean(
    slots: np.ndarray, tokens: np.ndarray, first_slots: np.ndarray, half: np.ndarray
) -> None:
    """Copy the clean half x_0 of block-diffusion segments into both halves of the same segments.

    A segment consists of the noised half x_t and the clean half x_0.

    Args:
        slots: The flat array to write.
        tokens: The flat array of tokens to copy from. It may be the same array as `slots`.
        first_slots: The first slot of each segment.
        half: Number of slots of one half of each segment.
    """
    for begin, n in zip(first_slots.tolist(), half.tolist(), strict=True):
        clean = tokens[begin + n : begin + 2 * n]
        slots[begin : begin + n] = clean
        slots[begin + n : begin + 2 * n] = clean


def put_block_labels(
    labels: np.ndarray,
    tokens: np.ndarray,
    first_slots: np.ndarray,
    half: np.ndarray,
    ahead: np.ndarray,
    pad: int,
) -> None:
    """Write the labels of block-diffusion segments: the tokens of the clean half, in both halves.

    Args:
        labels: The flat array to write.
        tokens: The flat array of tokens.
        first_slots: The first slot of each segment, int[m].
        half: Number of slots of one half of each segment, int[m].
        ahead: bool[m]. Where True, each slot gets the next token instead of its own token, and the
            last slot of each half gets `pad`.
        pad: The id of padding.
    """
    put_clean(labels, tokens, first_slots, half)
    for begin in (first_slots[ahead], (first_slots + half)[ahead]):
        move_ahead(labels, begin, half[ahead], pad)


def segment_ids(
    row: np.ndarray, first_slots: np.ndarray, slots: np.ndarray, size: int
) -> np.ndarray:
    """Return the segment id of each slot: 1, 2, … in each row.

    Args:
        row: The row of each segment, int64[m], in ascending order.
        first_slots: The first flat slot of each segment, int64[m].
        slots: Number of slots of each segment, int64[m].
        size: Number of flat slots.

    Returns:
        uint16[size], 0 on padding.
    """
    first_of_row = np.searchsorted(row, row)  # The first segment of each segment's row.
    return fill_slots(
        first_slots, slots, (np.arange(1, len(row) + 1) - first_of_row).astype(np.uint16), 0, size
    )


def next_token_loss_mask(
    first_slots: np.ndarray, slots: np.ndarray, prefix: np.ndarray, size: int
) -> np.ndarray:
    """Return the loss_mask of next-token segments.

    A slot has 1 if the next slot is in the same segment, and is not a prefix slot of this segment.

    Args:
        first_slots: The first flat slot of each segment, int64[m].
        slots: Number of slots of each segment, int64[m].
        prefix: Number of slots of each segment's prefix, int64[m].
        size: Number of flat slots.

    Returns:
        uint8[size].
    """
    # The last slot of the prefix is trained, because it predicts the first token after the prefix
    # (P9).
    lead = np.clip(prefix.astype(np.int64) - 1, 0, slots - 1)
    return fill_slots(
        first_slots + lead, slots - 1 - lead, np.ones(len(first_slots), np.uint8), 0, size
    )


def runs(ids: Any, slots: Any, library: Any, greatest: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Return for each slot the bounds of the run of equal ids that contains it.

    Consecutive padding (id 0) is also a run.

        ids 1 1 1 0 0 2 2   →   begin 0 0 0 3 3 5 5   end 3 3 3 5 5 7 7

    Args:
        ids: Segment ids, [..., T].
        slots: 0 … T − 1, in a shape that broadcasts with `ids`.
        library: The library of the arrays: numpy, torch or jax.numpy.
        greatest: The library's function for the running maximum along the last axis.

    Returns:
        The first slot of the run, and the first slot after the run, as slots of the row. Both
        arrays are shaped as `ids`.
    """

    def begins(ids):
        # The first slot is compared with itself, which gives True in the bool dtype of every
        # library.
        is_start = library.concatenate(
            (ids[..., :1] == ids[..., :1], ids[..., 1:] != ids[..., :-1]), -1
        )
        return greatest(library.where(is_start, slots, 0))

    # In flipped rows, a run starts at its last slot. So the same function gives the ends.
    return begins(ids), ids.shape[-1] - library.flip(begins(library.flip(ids, (-1,))), (-1,))


def meetings(
    query_ids: Any, key_ids: Any, where: Callable, searchsorted: Callable
) -> tuple[Any, Any]:
    """Return the range of keys that belong to each query's segment.

        query_ids 1 2 2 0, key_ids 1 1 1 2 0   →   begin 0 3 3 0   end 3 4 4 3

    In each row, ids count 1, 2, … without gaps. A query on padding gets the keys of the row's first
    segment, so that each query has keys. In a row that has only padding, queries get all keys.

    Args:
        query_ids: Segment ids of queries, [B, Q].
        key_ids: Segment ids of keys, [B, K].
        where: The function `where` of numpy, torch or jax.numpy.
        searchsorted: The function `searchsorted` of the same library, applied to each row.

    Returns:
        The first key of the range, and the first key after the range, as slots of the row in
        `key_ids`, [B, Q] each.
    """
    # Padding is at the end of a row here. Its id is above all others, so that the ids ascend.
    ascending_ids = where(key_ids > 0, key_ids, 1 << 30)
    ids = where(query_ids > 0, query_ids, ascending_ids[..., :1])
    return searchsorted(ascending_ids, ids), searchsorted(ascending_ids, ids + 1)


def thd(segment_ids, max_segments, fill=0) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths and offsets of segments, for kernels with a fixed number of segments.

        1 1 1 0 0 2 2 0 3 3 3 0, max_segments 3  →  seqlens 3 2 3   offsets 0 5 8 −1

    Padding may be before, between and after segments.

    Args:
        segment_ids: Segment ids, [B, T] or [T].
        max_segments: Maximum number of segments in a row.
        fill: The value of seqlens for segments that a row does not have.

    Returns:
        seqlens int32[B, max_segments], and offsets int32[B, max_segments + 1]. In a row of k
        segments, offsets are −1 from entry k on. For ids of shape [T], both arrays have no axis B.

    Raises:
        ArgumentError: If a row has more than max_segments segments, a segment has a gap, or ids do
            not count 1, 2, …. The message names row and slot.
    """
    ids = np.asarray(segment_ids)
    rows = np.atleast_2d(ids).astype(np.int64)
    n_rows = len(rows)
    starts = rows != 0
    starts[:, 1:] &= rows[:, 1:] != rows[:, :-1]
    # The n-th start of a row must have the id n. A segment with a gap starts twice, so it is found
    # too.
    ordinal = np.cumsum(starts, axis=1)
    is_wrong = starts & ((rows != ordinal) | (rows > max_segments))
    if is_wrong.any():
        row, slot = (int(i[0]) for i in np.nonzero(is_wrong))
        segment, should = int(rows[row, slot]), int(ordinal[row, slot])
        if 0 < segment < should:
            why = f"segment {segment} starts again: it has a gap, or ids are not ascending"
        elif segment != should:
            why = f"segment id {segment} follows {should - 1}, but ids should count 1, 2, …"
        else:
            why = f"segment {segment} exceeds max_segments = {max_segments}"
        raise ArgumentError(f"row {row}, position {slot}: {why}")
    # Each pair of a row and an id has its own counter. The counters of padding are then dropped.
    lengths = np.bincount(
        (np.arange(n_rows)[:, None] * (max_segments + 1) + rows).ravel(),
        minlength=n_rows * (max_segments + 1),
    ).reshape(n_rows, max_segments + 1)[:, 1:]
    seqlens = np.where(lengths > 0, lengths, fill).astype(np.int32)
    # Offsets are slots of the row, so they include the padding before a segment.
    offsets = np.full((n_rows, max_segments + 1), -1, np.int32)
    start_indices = np.nonzero(starts)
    offsets[start_indices[0], rows[start_indices] - 1] = start_indices[1]
    return (seqlens[0], offsets[0]) if ids.ndim == 1 else (seqlens, offsets)


def thd_pair(
    segment_ids_q,
    segment_ids_kv,
    position_ids_q,
    position_ids_kv,
    max_segments,
    causal=None,
    window=None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the lengths and offsets of segments whose queries and keys are in separate arrays.

    A pair of a query and a key is allowed if both are in the same segment, and `causal` and
    `window` allow their positions. The lengths count only slots that are in at least one allowed
    pair. No mask is built. Positions must ascend inside a segment.

    With "bottom_right", positions are counted back from the last slot of the segment, separately
    for queries and keys. In striped ring attention, queries and keys each contain only some slots
    of a segment. Both must then contain the same number of slots of the segment, and have the same
    last position. The result equals the result of TransformerEngine, which
    allows position_q − n_q ≥ position_kv − n_kv for n_q queries and n_kv keys. If queries and keys
    are from one sequence, use "top_left", which is right for any subset of the slots.

    With a window, the function takes O(T log T) time.

    Args:
        segment_ids_q: Segment ids of the queries, [T] or [B, T].
        segment_ids_kv: Segment ids of the keys. T may differ from the queries'.
        position_ids_q: Positions of the queries, shaped as segment_ids_q.
        position_ids_kv: Positions of the keys, shaped as segment_ids_kv.
        max_segments: Maximum number of segments in a row.
        causal: "top_left" allows pairs with position_q ≥ position_kv. "bottom_right" allows the
            same pairs with positions counted from the segment's end. None allows all pairs.
        window: (left, right) allows pairs with position_q − left ≤ position_kv ≤ position_q +
            right. A limit of −1 means no limit. None sets no limits.

    Returns:
        q_seqlens, kv_seqlens, q_offsets and kv_offsets, int32. Lengths are in the order of segment
        ids, and 0 for a missing segment. Offsets are in the order of slots. Entries after the last
        offset are −1.

    Raises:
        ArgumentError: If an argument is invalid. With "bottom_right", also if the positions of a
            segment have gaps, and its queries and keys differ in number or in their last position.
            The message names row and segment.
    """
    if causal not in (None, "top_left", "bottom_right"):
        raise ArgumentError(
            f"causal is {causal!r} and should be None, 'top_left' or 'bottom_right'"
        )
    one_row = np.ndim(segment_ids_q) == 1
    q_ids, kv_ids, q_positions, kv_positions = (
        np.atleast_2d(np.asarray(a))
        for a in (segment_ids_q, segment_ids_kv, position_ids_q, position_ids_kv)
    )
    for name, ids in (("segment_ids_q", q_ids), ("segment_ids_kv", kv_ids)):
        is_wrong = (ids < 0) | (ids > max_segments)
        if is_wrong.any():
            row, slot = (int(i[0]) for i in np.nonzero(is_wrong))
            raise ArgumentError(
                f"{name}: row {row}, position {slot}: id {ids[row, slot]} is not in 0 …"
                f" {max_segments}"
            )
    # Positions are compared as given, which suits "top_left" and no causal limit.
    q = _Side(q_ids, q_positions, max_segments + 1, None)
    kv = _Side(kv_ids, kv_positions, max_segments + 1, None)
    # Now position 0 moves to the last slot of each segment, separately for queries and keys.
    if causal == "bottom_right":
        ends = _extreme(np.maximum, q), _extreme(np.maximum, kv)
        _check_stripes(q, kv, *ends)
        q, kv = q._replace(origins=ends[0]), kv._replace(origins=ends[1])
    # Causal attention allows no key after its query, even if the window does.
    left, right = (-1, -1) if window is None else window
    if causal:
        right = 0
    # If the past is unlimited, the first key and the last query of a segment decide about all
    # pairs.
    if left < 0:
        q_counts, kv_counts = _reached(q, kv, right)
    else:
        # No two positions are `far` or more apart. So limits above `far` are cut to it, and sums
        # stay small.
        far = int(max(q_positions.max(initial=0), kv_positions.max(initial=0))) + 1
        far -= int(min(q_positions.min(initial=0), kv_positions.min(initial=0)))
        left, right = min(left, far), far if right < 0 else min(right, far)
        q_counts, kv_counts = _meets(q, kv, left, right), _meets(kv, q, right, left)
    q_seqlens, q_offsets = _counted(q_ids, q_counts, max_segments)
    kv_seqlens, kv_offsets = _counted(kv_ids, kv_counts, max_segments)
    if one_row:
        return q_seqlens[0], kv_seqlens[0], q_offsets[0], kv_offsets[0]
    return q_seqlens, kv_seqlens, q_offsets, kv_offsets


class _Side(NamedTuple):
    """One side of `thd_pair`: either its queries or its keys.

    `width` is max_segments + 1. The slots of segment s in row r form group number r · width + s.
    Segment 0 is the row's padding.
    """

    ids: np.ndarray  # [B, T], as given.
    positions: np.ndarray  # [B, T], as given.
    width: int
    origins: np.ndarray | None  # int64[B · width]: position 0 of each group; None: all are 0.

    @property
    def n_groups(self) -> int:
        return len(self.ids) * self.width

    def parts(self) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        """Split the flat slots into parts, and yield a tuple for each part.

        The tuple has the part as a slice, the group of each slot, and the position of each slot.
        Groups and positions are int64. Splitting avoids an int64 copy of long rows.
        """
        ids, positions, length = self.ids.ravel(), self.positions.ravel(), self.ids.shape[1]
        for begin in range(0, ids.size, _SLOTS_AT_ONCE):
            flat_slice = slice(begin, min(begin + _SLOTS_AT_ONCE, ids.size))
            group = (
                np.arange(flat_slice.start, flat_slice.stop) // length * self.width
                + ids[flat_slice]
            )
            position = positions[flat_slice].astype(np.int64)
            yield (
                flat_slice,
                group,
                position if self.origins is None else position - self.origins[group],
            )


def _extreme(ufunc, side: _Side) -> np.ndarray:
    """Return the smallest or largest position of each group, int64[n_groups].

    A group without slots gets 2⁶² as its smallest position and −2⁶² as its largest.
    """
    result = np.full(side.n_groups, _BEYOND if ufunc is np.minimum else -_BEYOND, np.int64)
    for _, group, positions in side.parts():
        ufunc.at(result, group, positions)
    return result


def _check_stripes(q: _Side, kv: _Side, last_q: np.ndarray, last_kv: np.ndarray) -> None:
    """Check that queries and keys agree in each segment whose positions have gaps.

    They must have the same number of slots of the segment, and the same last position. `last_q` and
    `last_kv` have the last position of each group.

    Raises:
        ArgumentError: If the queries and keys of such a segment do not agree.
    """
    striped = np.zeros(q.n_groups, bool)
    counts = []
    for side, last_position in ((q, last_q), (kv, last_kv)):
        count = np.zeros(side.n_groups, np.int64)
        for _, group, _ in side.parts():
            np.add.at(count, group, 1)
        # Positions have gaps if they span more numbers than the group has slots.
        striped |= (count > 0) & (last_position - _extreme(np.minimum, side) >= count)
        counts.append(count)
    met = (counts[0] > 0) & (counts[1] > 0) & (np.arange(q.n_groups) % q.width > 0)  # 0 is padding.
    is_wrong = met & striped & ((counts[0] != counts[1]) | (last_q != last_kv))
    if is_wrong.any():
        i = int(np.argmax(is_wrong))
        raise ArgumentError(
            f"row {i // q.width}, segment {i % q.width}: causal 'bottom_right' on striped"
            " sequences counts from the segment's end, so both must contain its last position"
            f" and equally many positions. The queries contain {counts[0][i]} up to position"
            f" {last_q[i]}, the keys {counts[1][i]} up to {last_kv[i]}\n"
            "hint: give whole segments, or causal 'top_left' if queries and keys are from one"
            " sequence"
        )


def _reached(q: _Side, kv: _Side, right: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which queries and which keys are in an allowed pair, bool[B, T] each.

    A key may be at most `right` positions after its query; −1 means no limit.
    """
    # If a query has any allowed key, the first key of its segment is allowed. If a key has any
    # allowed query, the last query of its segment is allowed.
    first_kv, last_q = _extreme(np.minimum, kv), _extreme(np.maximum, q)
    right = min(right, _BEYOND // 2) if right >= 0 else _BEYOND // 2
    q_counts, kv_counts = np.empty(q.ids.size, bool), np.empty(kv.ids.size, bool)
    for flat_slice, group, positions in q.parts():
        q_counts[flat_slice] = first_kv[group] <= positions + right
    for flat_slice, group, positions in kv.parts():
        kv_counts[flat_slice] = last_q[group] >= positions - right
    return q_counts.reshape(q.ids.shape), kv_counts.reshape(kv.ids.shape)


def _meets(side: _Side, other_side: _Side, back: int, ahead: int) -> np.ndarray:
    """Return which slots of `side` have a nearby slot of `other_side` in their group, bool[B, T].

    Nearby means from `back` positions before the slot to `ahead` positions after it.
    """
    places = [
        place
        for s in (side, other_side)
        for _, _, positions in s.parts()
        if positions.size
        for place in (positions.min(), positions.max())
    ]
    # A sort key joins a group and a position. The margins keep the search of a slot inside its
    # group.
    low = int(min(places, default=0)) - back
    span = int(max(places, default=0)) + ahead - low + 1
    keys = np.empty(other_side.ids.size, np.int64)
    for flat_slice, group, positions in other_side.parts():
        keys[flat_slice] = group * span + (positions - low)
    keys.sort()
    meets_other = np.empty(side.ids.size, bool)
    for flat_slice, group, positions in side.parts():
        begin = np.searchsorted(keys, group * span + (positions - back - low), side="left")
        meets_other[flat_slice] = (
            np.searchsorted(keys, group * span + (positions + ahead - low), side="right") > begin
        )
    return meets_other.reshape(side.ids.shape)


def _counted(ids, counts, max_segments) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths and offsets that `thd_pair` returns for the queries or for the keys.

    `ids`, [B, T], has the segment ids. `counts`, bool[B, T], is True at the slots to count.
    """
    n_rows = len(ids)
    # Slots without an allowed pair are treated as padding.
    counted_ids = np.where(counts & (ids != 0), ids, 0)
    width = max_segments + 1
    seqlens = np.bincount(
        (np.arange(n_rows)[:, None] * width + counted_ids).ravel(), minlength=n_rows * width
    )
    # Each run of counted slots gets an offset, so a segment with gaps gets several.
    starts = counted_ids != 0
    starts[:, 1:] &= counted_ids[:, 1:] != counted_ids[:, :-1]
    row, slot = np.nonzero(starts)
    ordinal = np.cumsum(starts, axis=1)[row, slot] - 1
    if (ordinal >= width).any():
        i = int(np.argmax(ordinal >= width))
        raise ArgumentError(
            f"row {row[i]}, position {slot[i]}: more segments than max_segments = {max_segments}"
        )
    offsets = np.full((n_rows, width), -1, np.int32)
    offsets[row, ordinal] = slot
    return seqlens.reshape(n_rows, width)[:, 1:].astype(np.int32), offsets
