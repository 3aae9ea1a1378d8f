"""Where segments lie, from cu_seqlens, from the ids of slots, and back; and slots written by them.

    slot           0  1  2  3  4  5  6  7  8  9 10
    segment_ids    1  1  1  2  2  3  3  3  3  0  0
    cu_seqlens     0        3     5           9           `boundaries`
    runs           0  0  0  3  3  5  5  5  5  9  9        `runs`: begin of each slot's run; end likewise
    thd            seqlens 3 2 4, offsets 0 3 5 −1        `thd`, for kernels with a static number of segments

No mask is made. `packprep.dataset.attention` gives `thd` and `thd_pair` with the other layouts.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from packprep.errors import ArgumentError

_SLOTS_AT_ONCE = 1 << 14
_BEYOND = 1 << 62  # farther than any position


def boundaries(
    counts: np.ndarray, real: np.ndarray, physical: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, first slot in it, slots), int64[m] each, of the segments of some rows.

    counts: int64[rows]. real, physical: int64[m + rows], the rows' cu_seqlens and cu_seqlens_padded
    one after the other.

        counts 2 1      real 0 3 5 0 5      physical 0 4 8 0 8   →   row 0 0 1      first slot 0 4 0      slots 3 2 5
    """
    row = np.repeat(np.arange(len(counts)), counts)
    here = np.arange(len(row)) + row
    return row, physical[here], real[here + 1] - real[here]


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Return 0 and the running sums of n lengths, int64[n + 1]."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def ranks(counts: np.ndarray) -> np.ndarray:
    """int64[Σ counts]: 0 … counts[0] − 1, 0 … counts[1] − 1, …"""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def fill_slots(
    begin: np.ndarray, length: np.ndarray, values: np.ndarray, elsewhere, size: int
) -> np.ndarray:
    """[size]: values[i] at the `length[i]` slots from begin[i] on (ascending, apart), `elsewhere`
    at all others."""
    runs, parts = (
        np.empty(2 * len(values) + 1, np.int64),
        np.empty(2 * len(values) + 1, values.dtype),
    )
    runs[0:-1:2], runs[-1], runs[1::2] = begin, size, length
    runs[2::2] -= begin + length
    parts[0::2], parts[1::2] = elsewhere, values
    return np.repeat(parts, runs)


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def put_blocks(
    slots: np.ndarray, at, half, block_length, count, values: np.ndarray, ahead=0
) -> None:
    """Put each block's value on its slots of x_t; count: blocks of each segment, values: of all of
    them. ahead: 1, or an array by segment, where a slot has the value of the next one's block."""
    per_block = np.repeat(block_length, count)
    lengths = np.minimum(np.repeat(half, count) - ranks(count) * per_block, per_block)
    ends = np.cumsum(count)
    lengths[ends - count] -= ahead
    lengths[ends - 1] += ahead
    slots[np.repeat(at, half) + ranks(half)] = np.repeat(values, lengths)


def move_ahead(slots: np.ndarray, at: np.ndarray, length: np.ndarray, last: int) -> None:
    """Give each slot of the ranges, `length` slots from `at` on, what the next one has, and the
    ranges' ends `last`."""
    some = length > 0
    for begin, end in zip(at[some].tolist(), (at + length)[some].tolist(), strict=True):
        slots[begin : end - 1] = slots[begin + 1 : end]
        slots[end - 1] = last


def put_clean(slots: np.ndarray, tokens: np.ndarray, at: np.ndarray, half: np.ndarray) -> None:
    """Give both halves of block-diffusion segments, from `at` on, the tokens of the second: x_0."""
    for begin, n in zip(at.tolist(), half.tolist(), strict=True):
        clean = tokens[begin + n : begin + 2 * n]
        slots[begin : begin + n] = clean
        slots[begin + n : begin + 2 * n] = clean


def put_block_labels(
    labels: np.ndarray,
    tokens: np.ndarray,
    at: np.ndarray,
    half: np.ndarray,
    ahead: np.ndarray,
    pad: int,
) -> None:
    """Write the labels of block-diffusion segments: x_0 in both halves, or, where `ahead` (bool by
    segment), its next token, and pad at the end of each."""
    put_clean(labels, tokens, at, half)
    for begin in (at[ahead], (at + half)[ahead]):
        move_ahead(labels, begin, half[ahead], pad)


def segment_ids(row: np.ndarray, at: np.ndarray, slots: np.ndarray, size: int) -> np.ndarray:
    """uint16[size]: 1, 2, … over the segments of each row; padding 0. row ascends; at, slots: first
    flat slot and length."""
    first = np.searchsorted(row, row)  # the first segment of each one's row
    return fill_slots(at, slots, (np.arange(1, len(row) + 1) - first).astype(np.uint16), 0, size)


def next_token_loss_mask(
    at: np.ndarray, slots: np.ndarray, prefix: np.ndarray, size: int
) -> np.ndarray:
    """uint8[size]: 1 where the next slot is of the same segment and lies after its prefix."""
    lead = np.clip(prefix.astype(np.int64) - 1, 0, slots - 1)
    return fill_slots(at + lead, slots - 1 - lead, np.ones(len(at), np.uint8), 0, size)


def runs(ids: Any, slots: Any, library: Any, greatest: Callable[[Any], Any]) -> tuple[Any, Any]:
    """(begin, end), shaped as `ids`, [..., T]: the run of equal ids in which each slot lies,
    padding's too, in slots of its row.

    library: numpy, torch or jax.numpy, whose arrays these are and become. slots: 0 … T − 1, which
    broadcast with `ids`.
    greatest: the greatest value so far along the last axis, which each library names otherwise.

        ids 1 1 1 0 0 2 2   →   begin 0 0 0 3 3 5 5   end 3 3 3 5 5 7 7
    """

    def begins(ids):
        first = library.concatenate(
            (ids[..., :1] == ids[..., :1], ids[..., 1:] != ids[..., :-1]), -1
        )
        return greatest(library.where(first, slots, 0))

    return begins(ids), ids.shape[-1] - library.flip(begins(library.flip(ids, (-1,))), (-1,))


def meetings(
    query_ids: Any, key_ids: Any, where: Callable, searchsorted: Callable
) -> tuple[Any, Any]:
    """(begin, end), shaped as `query_ids`, [B, Q]: the keys of each query's segment, in slots of
    its row of `key_ids`, [B, K].

    Ids count 1, 2, … in both, without gaps. Padding meets the row's first segment, so that no query
    is without keys, and in a row of padding alone all. where, searchsorted: numpy's, torch's or
    jax.numpy's, the latter by row.

        query_ids 1 2 2 0, key_ids 1 1 1 2 0   →   begin 0 3 3 0   end 3 4 4 3
    """
    last = where(key_ids > 0, key_ids, 1 << 30)
    ids = where(query_ids > 0, query_ids, last[..., :1])
    return searchsorted(last, ids), searchsorted(last, ids + 1)


def thd(segment_ids, max_segments, fill=0) -> tuple[np.ndarray, np.ndarray]:
    """(seqlens int32[B, max_segments], offsets int32[B, max_segments + 1]) of segment_ids [B, T]
    ([T] gives [·] each).

    Unused offsets are −1, unused seqlens `fill`. Padding may stand before, between and after
    segments.

        1 1 1 0 0 2 2 0 3 3 3 0, max_segments 3  →  seqlens 3 2 3   offsets 0 5 8 −1

    Refuses, by row and slot, more than max_segments, a hole inside a segment, and ids that skip or
    go back.
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
        (np.arange(n_rows)[:, None] * (max_segments + 1) + rows).ravel(),
        minlength=n_rows * (max_segments + 1),
    ).reshape(n_rows, max_segments + 1)[:, 1:]
    seqlens = np.where(lengths > 0, lengths, fill).astype(np.int32)
    offsets = np.full((n_rows, max_segments + 1), -1, np.int32)
    at = np.nonzero(starts)
    offsets[at[0], rows[at] - 1] = at[1]
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
    """(q_seqlens, kv_seqlens, q_offsets, kv_offsets) of queries and keys that lie apart; no mask is
    made.

    Arrays are [T] or [B, T]; the lengths of q and kv may differ. A slot counts if it takes part in
    at least one allowed pair of its segment: position_q ≥ position_kv ("top_left"), the same with
    positions counted from the segment's end on either side ("bottom_right"), or any pair (None);
    and position_q − left ≤ position_kv ≤ position_q + right for window (left, right), where −1 is
    no limit. Positions ascend inside a segment.

    A side knows its segment's end only by its own last slot. Where slots are missing between
    (striped ranks of ring attention), "bottom_right" therefore wants as many slots of the segment
    on either side, and the same last one: then it equals TransformerEngine's rule, which counts
    positions from the number of slots that a side holds, position_q − n_q ≥ position_kv − n_kv.
    Else ArgumentError says the row and the segment. Queries and keys of one sequence want
    "top_left", which is right for any of their slots.

    Lengths stand at their segment's id and are filled with 0; offsets stand in order of occurrence,
    filled with −1. With a window the work is O(T log T).
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
        wrong = (ids < 0) | (ids > max_segments)
        if wrong.any():
            row, slot = (int(i[0]) for i in np.nonzero(wrong))
            raise ArgumentError(
                f"{name}: row {row}, slot {slot}: id {ids[row, slot]} is not in 0 … {max_segments}"
            )
    q = _Side(q_ids, q_positions, max_segments + 1, None)
    kv = _Side(kv_ids, kv_positions, max_segments + 1, None)
    if causal == "bottom_right":
        ends = _extreme(np.maximum, q), _extreme(np.maximum, kv)
        _check_stripes(q, kv, *ends)
        q, kv = q._replace(origins=ends[0]), kv._replace(origins=ends[1])
    left, right = (-1, -1) if window is None else window
    if causal:
        right = 0 if right < 0 else min(right, 0)
    if left < 0:
        q_counts, kv_counts = _reached(q, kv, right)
    else:
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
    """Queries or keys. Each (row, segment) is a group; group row · width is the row's padding."""

    ids: np.ndarray  # [B, T], as given
    positions: np.ndarray  # [B, T], as given
    width: int
    origins: np.ndarray | None  # int64[B · width]: what positions count from; None: 0

    @property
    def n_groups(self) -> int:
        return len(self.ids) * self.width

    def parts(self) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        """(slots, their groups, their positions), int64, some at a time: a long row is never there
        in int64."""
        ids, positions, length = self.ids.ravel(), self.positions.ravel(), self.ids.shape[1]
        for begin in range(0, ids.size, _SLOTS_AT_ONCE):
            part = slice(begin, min(begin + _SLOTS_AT_ONCE, ids.size))
            group = np.arange(part.start, part.stop) // length * self.width + ids[part]
            at = positions[part].astype(np.int64)
            yield part, group, at if self.origins is None else at - self.origins[group]


def _extreme(ufunc, side: _Side) -> np.ndarray:
    """int64[n_groups]: the least or greatest position of each group; beyond all positions where a
    group is empty."""
    result = np.full(side.n_groups, _BEYOND if ufunc is np.minimum else -_BEYOND, np.int64)
    for _, group, at in side.parts():
        ufunc.at(result, group, at)
    return result


def _check_stripes(q: _Side, kv: _Side, last_q: np.ndarray, last_kv: np.ndarray) -> None:
    """ArgumentError where slots are missing between a segment's, and its sides differ in number or
    in their last slot."""
    striped = np.zeros(q.n_groups, bool)
    counts = []
    for side, last in ((q, last_q), (kv, last_kv)):
        count = np.zeros(side.n_groups, np.int64)
        for _, group, _ in side.parts():
            np.add.at(count, group, 1)
        striped |= (count > 0) & (last - _extreme(np.minimum, side) >= count)
        counts.append(count)
    met = (counts[0] > 0) & (counts[1] > 0) & (np.arange(q.n_groups) % q.width > 0)  # 0: padding
    wrong = met & striped & ((counts[0] != counts[1]) | (last_q != last_kv))
    if wrong.any():
        i = int(np.argmax(wrong))
        raise ArgumentError(
            f"row {i // q.width}, segment {i % q.width}: causal 'bottom_right' on striped sides"
            " counts from the segment's end, so both hold its last slot and as many of its slots;"
            f" the queries hold {counts[0][i]} up to position {last_q[i]}, the keys {counts[1][i]}"
            f" up to {last_kv[i]}. Give whole segments, or, where queries and keys are of one"
            " sequence, causal 'top_left'"
        )


def _reached(q: _Side, kv: _Side, right: int) -> tuple[np.ndarray, np.ndarray]:
    """(bool of q, bool of kv), [B, T]: the slots with a partner in their segment, and no key more
    than `right` ahead of its query; −1 is no limit."""
    # The nearest allowed key of a query is its segment's first; the farthest query that a key
    # meets, the last.
    first_kv, last_q = _extreme(np.minimum, kv), _extreme(np.maximum, q)
    right = min(right, _BEYOND // 2) if right >= 0 else _BEYOND // 2
    q_counts, kv_counts = np.empty(q.ids.size, bool), np.empty(kv.ids.size, bool)
    for part, group, at in q.parts():
        q_counts[part] = first_kv[group] <= at + right
    for part, group, at in kv.parts():
        kv_counts[part] = last_q[group] >= at - right
    return q_counts.reshape(q.ids.shape), kv_counts.reshape(kv.ids.shape)


def _meets(side: _Side, other: _Side, back: int, ahead: int) -> np.ndarray:
    """bool [B, T], of `side`: has the other side a slot of the group from `back` positions before
    to `ahead` after?"""
    places = [
        at
        for s in (side, other)
        for _, _, part in s.parts()
        if part.size
        for at in (part.min(), part.max())
    ]
    low = int(min(places, default=0)) - back
    span = int(max(places, default=0)) + ahead - low + 1
    keys = np.empty(other.ids.size, np.int64)
    for part, group, at in other.parts():
        keys[part] = group * span + (at - low)
    keys.sort()
    found = np.empty(side.ids.size, bool)
    for part, group, at in side.parts():
        begin = np.searchsorted(keys, group * span + (at - back - low), side="left")
        found[part] = np.searchsorted(keys, group * span + (at + ahead - low), side="right") > begin
    return found.reshape(side.ids.shape)


def _counted(ids, counts, max_segments) -> tuple[np.ndarray, np.ndarray]:
    """(seqlens by id, offsets by occurrence) of the slots that count."""
    n_rows = len(ids)
    kept = np.where(counts & (ids != 0), ids, 0)
    width = max_segments + 1
    seqlens = np.bincount(
        (np.arange(n_rows)[:, None] * width + kept).ravel(), minlength=n_rows * width
    )
    starts = kept != 0
    starts[:, 1:] &= kept[:, 1:] != kept[:, :-1]
    row, slot = np.nonzero(starts)
    ordinal = np.cumsum(starts, axis=1)[row, slot] - 1
    if (ordinal >= width).any():
        i = int(np.argmax(ordinal >= width))
        raise ArgumentError(
            f"row {row[i]}, slot {slot[i]}: more pieces than max_segments = {max_segments}"
        )
    offsets = np.full((n_rows, width), -1, np.int32)
    offsets[row, ordinal] = slot
    return seqlens.reshape(n_rows, width)[:, 1:].astype(np.int32), offsets
