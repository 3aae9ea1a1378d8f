"""Lengths and offsets of segments by their ids, for kernels with a static number of segments; no mask is made.

`packprep.dataset.attention` gives these two with the other layouts.
"""

import numpy as np

from packprep.errors import ArgumentError


def thd(segment_ids, max_segments, fill=0) -> tuple[np.ndarray, np.ndarray]:
    """(seqlens int32[B, max_segments], offsets int32[B, max_segments + 1]) of segment_ids [B, T] ([T] gives [·] each).

    Unused offsets are −1, unused seqlens `fill`. Padding may stand before, between and after segments.

        1 1 1 0 0 2 2 0 3 3 3 0, max_segments 3  →  seqlens 3 2 3   offsets 0 5 8 −1

    Refuses, by row and slot, more than max_segments, a hole inside a segment, and ids that skip or go back.
    """
    ids = np.asarray(segment_ids)
    rows = np.atleast_2d(ids).astype(np.int64)
    n_rows = len(rows)
    starts = rows != 0
    starts[:, 1:] &= rows[:, 1:] != rows[:, :-1]
    ordinal = np.cumsum(starts, axis=1)
    wrong = starts & ((rows != ordinal) | (rows > max_segments))
    if wrong.any():
        row, slot = (int(i[0]) for i in np.nonzero(wrong))
        segment, should = int(rows[row, slot]), int(ordinal[row, slot])
        if 0 < segment < should:
            why = f"segment {segment} begins again: it has a hole, or ids go back"
        elif segment != should:
            why = f"segment id {segment} follows {should - 1}: ids should count 1, 2, …"
        else:
            why = f"segment {segment} is more than max_segments = {max_segments}"
        raise ArgumentError(f"row {row}, slot {slot}: {why}")
    lengths = np.bincount(
        (np.arange(n_rows)[:, None] * (max_segments + 1) + rows).ravel(), minlength=n_rows * (max_segments + 1)
    ).reshape(n_rows, max_segments + 1)[:, 1:]
    seqlens = np.where(lengths > 0, lengths, fill).astype(np.int32)
    offsets = np.full((n_rows, max_segments + 1), -1, np.int32)
    at = np.nonzero(starts)
    offsets[at[0], rows[at] - 1] = at[1]
    return (seqlens[0], offsets[0]) if ids.ndim == 1 else (seqlens, offsets)


def thd_pair(
    segment_ids_q, segment_ids_kv, position_ids_q, position_ids_kv, max_segments, causal=None, window=None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(q_seqlens, kv_seqlens, q_offsets, kv_offsets) of queries and keys that lie apart; no mask is made.

    Arrays are [T] or [B, T]; the lengths of q and kv may differ. A slot counts if it takes part in at least one allowed
    pair of its segment: position_q ≥ position_kv ("top_left"), the same with positions counted from the segment's end
    on either side ("bottom_right"), or any pair (None); and position_q − left ≤ position_kv ≤ position_q + right for
    window (left, right), where −1 is no limit. Positions ascend inside a segment.

    Lengths stand at their segment's id and are filled with 0; offsets stand in order of occurrence, filled with −1.
    With a window the work is O(T log T).
    """
    if causal not in (None, "top_left", "bottom_right"):
        raise ArgumentError(f"causal is {causal!r} and should be None, 'top_left' or 'bottom_right'")
    one_row = np.ndim(segment_ids_q) == 1
    q_ids, kv_ids, q_at, kv_at = (
        np.atleast_2d(np.asarray(a)).astype(np.int64)
        for a in (segment_ids_q, segment_ids_kv, position_ids_q, position_ids_kv)
    )
    n_rows = len(q_ids)
    for name, ids in (("segment_ids_q", q_ids), ("segment_ids_kv", kv_ids)):
        wrong = (ids < 0) | (ids > max_segments)
        if wrong.any():
            row, slot = (int(i[0]) for i in np.nonzero(wrong))
            raise ArgumentError(f"{name}: row {row}, slot {slot}: id {ids[row, slot]} is not in 0 … {max_segments}")
    # One group for each (row, segment); group row · (max_segments + 1) is the row's padding.
    width = max_segments + 1
    base = np.arange(n_rows)[:, None] * width
    q_group, kv_group = base + q_ids, base + kv_ids
    n_groups = n_rows * width
    if causal == "bottom_right":
        q_at = q_at - _extreme(np.maximum, q_group, q_at, n_groups)[q_group]
        kv_at = kv_at - _extreme(np.maximum, kv_group, kv_at, n_groups)[kv_group]

    left, right = (-1, -1) if window is None else window
    if causal:
        right = 0 if right < 0 else min(right, 0)
    if left < 0:
        # The nearest allowed key of a query is its segment's first; the farthest query that a key meets, the last.
        first_kv = _extreme(np.minimum, kv_group, kv_at, n_groups)
        last_q = _extreme(np.maximum, q_group, q_at, n_groups)
        q_counts, kv_counts = _exists(q_group, kv_group, n_groups), _exists(kv_group, q_group, n_groups)
        if right >= 0:
            q_counts &= first_kv[q_group] <= q_at + right
            kv_counts &= kv_at <= last_q[kv_group] + right
    else:
        far = int(max(np.ptp(np.concatenate((q_at.ravel(), kv_at.ravel(), [0]))), 0)) + 1
        left = min(left, far)
        right = far if right < 0 else min(right, far)
        q_counts = _meets(q_group, q_at - left, q_at + right, kv_group, kv_at)
        kv_counts = _meets(kv_group, kv_at - right, kv_at + left, q_group, q_at)
    q_seqlens, q_offsets = _counted(q_ids, q_counts & (q_ids != 0), max_segments)
    kv_seqlens, kv_offsets = _counted(kv_ids, kv_counts & (kv_ids != 0), max_segments)
    if one_row:
        return q_seqlens[0], kv_seqlens[0], q_offsets[0], kv_offsets[0]
    return q_seqlens, kv_seqlens, q_offsets, kv_offsets


def _extreme(ufunc, group, values, n_groups) -> np.ndarray:
    """int64[n_groups]: the least or greatest value of each group; an end of int32's range where a group is empty."""
    empty = np.iinfo(np.int32).max if ufunc is np.minimum else np.iinfo(np.int32).min
    result = np.full(n_groups, empty, np.int64)
    ufunc.at(result, group, values)
    return result


def _exists(group, other_group, n_groups) -> np.ndarray:
    exists = np.zeros(n_groups, bool)
    exists[other_group] = True
    return exists[group]


def _meets(group, least, greatest, other_group, other_at) -> np.ndarray:
    """bool, shaped as group: does the group have a member of the other side at least … greatest."""
    low = int(min(least.min(initial=0), other_at.min(initial=0)))
    span = int(max(greatest.max(initial=0), other_at.max(initial=0))) - low + 1
    keys = np.sort((other_group * span + (other_at - low)).ravel(), kind="stable")
    begin = np.searchsorted(keys, group * span + (least - low), side="left")
    end = np.searchsorted(keys, group * span + (greatest - low), side="right")
    return end > begin


def _counted(ids, counts, max_segments) -> tuple[np.ndarray, np.ndarray]:
    """(seqlens by id, offsets by occurrence) of the slots that count."""
    n_rows = len(ids)
    kept = np.where(counts, ids, 0)
    width = max_segments + 1
    seqlens = np.bincount((np.arange(n_rows)[:, None] * width + kept).ravel(), minlength=n_rows * width)
    starts = kept != 0
    starts[:, 1:] &= kept[:, 1:] != kept[:, :-1]
    row, slot = np.nonzero(starts)
    ordinal = np.cumsum(starts, axis=1)[row, slot] - 1
    if (ordinal >= width).any():
        i = int(np.argmax(ordinal >= width))
        raise ArgumentError(f"row {row[i]}, slot {slot[i]}: more pieces than max_segments = {max_segments}")
    offsets = np.full((n_rows, width), -1, np.int32)
    offsets[row, ordinal] = slot
    return seqlens.reshape(n_rows, width)[:, 1:].astype(np.int32), offsets
