"""Pack segments into rows by length. Then shuffle the rows, and the segments inside each row.

    best_fit    the longest segment first, each into the fullest row that it fits into
    first_fit   in the given order, each into the first row that it fits into
    next_fit    in the given order, each into the current row or a new one

best_fit leaves the least padding, and next_fit the most. After next_fit, nothing is shuffled.

If rows have two sequences (inputs and targets), `pack_sides` fills one row after another.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from packprep.building.segments import FORMAT_MAX_SEGMENTS, inputs_of
from packprep.dataset.segments import Segments
from packprep.errors import RecipeError
from packprep.kernel import bits64_of_keys, kernel, leading_zeros
from packprep.objectives.objective import Task
from packprep.randomness import ROW_ORDER, SEGMENT_ORDER
from packprep.recipe import Recipe

FIRST, _, ROWS, _, BELOW = range(5)
"""Columns of an array of runs of rows.

The five columns are: first row, step ±1, number of rows, segments per row, number of the run below
in the stack. `assign` explains runs.
"""


@kernel(inline=True)
def _highest(bits, limit):
    """Return the highest member ≤ `limit` of a bit set (uint64[…]), or 0."""
    # Clear the bits above `limit` in its block of 64 bits.
    block = limit >> 6
    word = bits[block] & (~np.uint64(0) >> np.uint64(63 - (limit & 63)))
    while word == np.uint64(0):
        if block == 0:
            return np.int64(0)
        block -= 1
        word = bits[block]
    return np.int64(block << 6) + np.int64(63) - np.int64(leading_zeros(word))


@kernel(inline=True)
def _push(runs, top, filled, run, fill):
    """Put the run of rows with index `run` on top of the stack for `fill`, as `assign` explains.

    The bit `fill` of `filled` is set, because the stack is not empty.
    """
    runs[run, BELOW] = top[fill]
    top[fill] = run
    filled[fill >> 6] |= np.uint64(1) << np.uint64(fill & 63)


@kernel(inline=True)
def _pop(runs, top, filled, fill):
    """Remove the top run of rows from the stack for `fill`.

    If the stack is then empty, the bit `fill` of `filled` is cleared.
    """
    top[fill] = runs[top[fill], BELOW]
    if top[fill] < 0:
        filled[fill >> 6] &= ~(np.uint64(1) << np.uint64(fill & 63))


@kernel
def assign(counts, capacity, max_segments):
    """Assign all segments to rows by best fit, and return the placements, int64[k, 5].

    All segments of one length are placed in bulk, the longest length first. A placement puts
    segments of one length into consecutive rows, the same number into each row. Its columns are
    first row, step ±1, rows, segments per row, and the fill before the first segment. The fill of a
    row is the number of its used slots.

    A run is a sequence of rows with consecutive numbers, equal fill and equally many segments. It
    has a first row, a step ±1 and a number of rows. The runs of each fill form a stack.

    Segments of length L go to the fullest rows that they fit into, one run at a time. Each row
    takes as many of these segments as fit, so the row's new fill is above capacity − L. Each fill
    is therefore emptied only once per length. A run moves to its new fill in O(1). The order of its
    rows is reversed, because the row that was placed last is on top of the stack.

    Args:
        counts: int64[capacity + 1]: number of segments of each length.
        capacity: Slots per row.
        max_segments: Maximum segments per row; 0 for no limit.
    """
    placements, placed = np.empty((1024, 5), np.int64), np.int64(0)
    runs, used = np.empty_like(placements), np.int64(0)
    unused = np.int64(-1)  # first emptied run, for reuse; BELOW is the next one
    top = np.full(capacity + 1, -1, np.int64)  # run on top of each fill's stack
    filled = np.zeros((capacity >> 6) + 1, np.uint64)  # bit set of the fills that have rows
    # A row of `capacity` segments is full.
    n_rows, limit = np.int64(0), max_segments or capacity
    for length in range(capacity, 0, -1):
        remaining, fill = counts[length], capacity - length
        while remaining > 0:
            # Take the top run of the fullest rows that fit, otherwise as many new rows as needed.
            fill = _highest(filled, fill)
            run, row, step, rows, in_row = np.int64(-1), n_rows, 1, remaining, 0
            if fill > 0:
                run = top[fill]
                row, step, rows, in_row, _ = runs[run]
            per_row = min((capacity - fill) // length, limit - in_row)
            # Fill rows with `per_row` segments, then one row with the remaining segments.
            while min(remaining, rows) > 0:
                documents = min(per_row, remaining)
                moved = min(rows, remaining // documents)
                placements = _with_row(placements, placed)
                _write_row(placements, placed, (row, step, moved, documents, fill))
                placed += 1
                remaining, rows = remaining - moved * documents, rows - moved
                row += moved * step
                # Rows that cannot take another segment are not pushed.
                new_fill, new_in_row = fill + documents * length, in_row + documents
                if new_fill >= capacity or new_in_row >= limit:
                    continue
                if unused >= 0:
                    new, unused = unused, runs[unused, BELOW]
                else:
                    runs, new, used = _with_row(runs, used), used, used + 1
                # The row that was placed last is on top.
                _write_row(runs, new, (row - step, -step, moved, new_in_row, np.int64(-1)))
                _push(runs, top, filled, new, new_fill)
            if run < 0:
                n_rows = row
                continue
            runs[run, FIRST], runs[run, ROWS] = row, rows
            if rows == 0:
                # This run is still on top, because no run was pushed to the fill being emptied.
                _pop(runs, top, filled, fill)
                runs[run, BELOW], unused = unused, run
    return placements[:placed]


@kernel(inline=True)
def _write_row(array, i, values):
    """Write five values to row i of the array, int64[n, 5]."""
    for column in range(5):
        array[i, column] = values[column]


@kernel(inline=True)
def _with_row(array, row):
    """Return the array, int64[n, k], or a copy with twice as many rows if n ≤ `row`.

    A loop copies the values, because a slice assignment takes seconds to compile.
    """
    if row < array.shape[0]:
        return array
    # Doubling keeps the total cost of all copies proportional to the final size.
    grown = np.empty((2 * array.shape[0], array.shape[1]), np.int64)
    for i in range(array.shape[0]):
        for j in range(array.shape[1]):
            grown[i, j] = array[i, j]
    return grown


@kernel
def _fill_rows(placements, counts, lengths, places, row, offset):
    """Write the row and the offset of every segment. The offset is the segment's first slot.

    A placement of `assign` consists of many places, each with a row and an offset. The first
    segment of a length takes the first place for this length, and so on. All places are first
    written to `places` in the order of placements, then read from there for each segment. This
    avoids scattered writes to `row` and `offset`.

    Args:
        placements: int64[k, 5], from `assign`.
        counts: Number of segments of each length.
        lengths: int64[n]: length of each segment.
        places: uint64[n], overwritten: one place per segment, with the row in the high 32 bits and
            the offset in the low 32 bits. The places for the longest segments are first.
        row: int64[n]: receives the rows.
        offset: int64[n]: receives the offsets.
    """
    # The places of one length are consecutive, with the longest length first.
    place = np.int64(0)
    next_place = np.empty(counts.shape[0], np.int64)  # index of the next place of each length
    for n in range(counts.shape[0] - 1, -1, -1):
        next_place[n] = place
        place += counts[n]
    # Placements are in the same order. `length` therefore follows from the number of places
    # written.
    place, end, length = np.int64(0), np.int64(0), np.int64(counts.shape[0])
    for p in range(placements.shape[0]):
        while place == end:
            length -= 1
            end += counts[length]
        r, step, rows, per_row, fill = placements[p]
        for _ in range(rows):
            # The offset is in the low bits, so adding `length` moves only the offset.
            row_and_offset = np.uint64(r << 32 | fill)
            for _ in range(per_row):
                places[place] = row_and_offset
                row_and_offset += np.uint64(length)
                place += 1
            r += step
    # Segments of equal length read consecutive places, in the given order.
    for i in range(lengths.shape[0]):
        place = next_place[lengths[i]]
        next_place[lengths[i]] = place + 1
        row[i] = np.int64(places[place] >> np.uint64(32))
        offset[i] = np.int64(places[place] & np.uint64(0xFFFFFFFF))


@kernel
def _first_fit(lengths, capacity, max_segments, row, offset):
    """Pack by first fit. Write each segment's row to `row`, and its first slot to `offset`.

    A tournament tree finds the first row with enough free slots in O(log rows).
    """
    # Leaf `leaves + r` has the free slots of row r, or 0 for r ≥ n. A parent has the maximum of its
    # children.
    n = lengths.shape[0]
    leaves = np.int64(1)
    while leaves < n:
        leaves *= 2
    room = np.zeros(2 * leaves, np.int64)
    segments = np.zeros(n, np.int64)
    room[leaves : leaves + n] = capacity
    for parent in range(leaves - 1, 0, -1):
        room[parent] = max(room[2 * parent], room[2 * parent + 1])
    fill = np.zeros(n, np.int64)
    for i in range(n):
        # Descend to the leftmost leaf that fits. It exists, because i segments use at most i of the
        # n rows.
        node = np.int64(1)
        while node < leaves:
            node = 2 * node if room[2 * node] >= lengths[i] else 2 * node + 1
        r = node - leaves
        row[i], offset[i] = r, fill[r]
        fill[r] += lengths[i]
        segments[r] += 1
        # No length fits into −1 free slots, so this closes a row that has its maximum number of
        # segments.
        room[node] = -1 if max_segments > 0 and segments[r] >= max_segments else capacity - fill[r]
        node //= 2
        while node > 0:
            room[node] = max(room[2 * node], room[2 * node + 1])
            node //= 2


@kernel
def _next_fit(lengths, capacity, max_segments, row, offset):
    r, fill, segments_in_row = np.int64(0), np.int64(0), np.int64(0)
    for i in range(lengths.shape[0]):
        if fill + lengths[i] > capacity or (max_segments > 0 and segments_in_row >= max_segments):
            r, fill, segments_in_row = r + 1, np.int64(0), np.int64(0)
        row[i], offset[i] = r, fill
        fill += lengths[i]
        segments_in_row += 1


class _Remaining(NamedTuple):
    """The segments that are not in a row yet, in lists for each of the two sequences.

    A segment's part of a sequence is the number of slots that it takes there. For each sequence and
    each number n, a list has the segments with a part of n slots. The list is sorted by the
    segments' parts of the other sequence. Placed segments are dropped from a list only when they
    reach its head.
    """

    parts: np.ndarray  # int64[2, n]: slots of each segment in each sequence
    # int64[2, n]: for each sequence, the segments sorted by this part, then by their other part
    listed: np.ndarray
    head: np.ndarray  # int64[2, …]: index in `listed` of each list's first remaining segment
    end: np.ndarray  # int64[2, …]: index in `listed` after each list


@kernel(inline=True)
def _smallest_other_parts(remaining, room):
    """Return a tournament tree for each sequence, int64[2, 2 · leaves].

    Each parent has the minimum of its children. Leaf v of a sequence's tree is for the remaining
    segments with v slots in this sequence. The leaf has the fewest slots that any of these segments
    takes in the other sequence. If there are no such segments, the leaf has the value `leaves`,
    which is more than the slots of a row.
    """
    # `leaves` exceeds every part, so it can mark an empty list.
    leaves = np.int64(1)
    while leaves <= max(room[0], room[1]):
        leaves *= 2
    least = np.full((2, 2 * leaves), leaves, np.int64)
    # Each list is sorted by the other part, so its first segment has the smallest.
    for side in range(2):
        for v in range(room[side] + 1):
            head = remaining.head[side, v]
            if head < remaining.end[side, v]:
                least[side, leaves + v] = remaining.parts[1 - side, remaining.listed[side, head]]
        for node in range(leaves - 1, 0, -1):
            least[side, node] = min(least[side, 2 * node], least[side, 2 * node + 1])
    return least


@kernel(inline=True)
def _update(least, side, node):
    """Recompute all ancestors of `node` in a tournament tree from their children."""
    while node > 1:
        node >>= 1
        least[side, node] = min(least[side, 2 * node], least[side, 2 * node + 1])


@kernel(inline=True)
def _largest_fitting(least, side, part_slots, other_slots):
    """Return the size of the largest segment that fits, or -1 if none fits.

    The size of a segment is the number of its slots in sequence `side`.

    Args:
        least: int64[2, 2 · leaves]: the trees of `_smallest_other_parts` for the remaining
            segments.
        side: 0 for inputs, 1 for targets.
        part_slots: Maximum slots of a segment in this sequence.
        other_slots: Maximum slots of a segment in the other sequence.
    """
    leaves = least.shape[1] // 2
    node = leaves + part_slots
    # Climb until a subtree to the left has a segment that fits, then enter it.
    if least[side, node] > other_slots:
        while node > 1 and (node & 1 == 0 or least[side, node - 1] > other_slots):
            node >>= 1
        if node <= 1:
            return np.int64(-1)
        node -= 1
    while node < leaves:
        node = 2 * node + 1 if least[side, 2 * node + 1] <= other_slots else 2 * node
    return node - leaves


@kernel
def _pack_sides(order, remaining, room, spare, max_segments, row):
    """Fill rows of two sequences, one after another, as described in `pack_sides`.

    The search for the largest fitting segment uses the trees of `_smallest_other_parts` and takes
    O(log room).

    Args:
        order: int64[n]: the segments. A row starts with the first remaining segment in this order.
        remaining: The segments as `_Remaining`. `head` is overwritten.
        room: int64[2]: slots of each sequence in a row.
        spare: int64[2]: slots of each sequence that are expected to stay empty.
        max_segments: Maximum segments per row.
        row: int64[n]: receives the row of each segment.

    Returns:
        The number of rows.
    """
    parts, listed, head, end = remaining.parts, remaining.listed, remaining.head, remaining.end
    n, least = order.shape[0], _smallest_other_parts(remaining, room)
    leaves = least.shape[1] // 2
    placed = np.zeros(n, np.bool_)
    free = np.zeros(2, np.int64)
    rows, in_row, turn = np.int64(0), np.int64(0), np.int64(0)
    for _ in range(n):
        # Fill the sequence that has the larger unfilled fraction.
        segment = np.int64(-1)
        if rows > 0 and in_row < max_segments:
            side = 0 if (free[0] - spare[0]) * room[1] > (free[1] - spare[1]) * room[0] else 1
            part_slots = _largest_fitting(least, side, free[side], free[1 - side])
            if part_slots >= 0:
                segment = listed[side, head[side, part_slots]]
        # Start a row with the largest remaining segment if none fits.
        if segment < 0:
            while placed[order[turn]]:
                turn += 1
            segment = order[turn]
            free[0], free[1] = room[0], room[1]
            rows, in_row = rows + 1, np.int64(0)
        row[segment], placed[segment] = rows - 1, True
        in_row += 1
        # Take the segment out of both lists. The trees only contain the heads of lists.
        for side in range(2):
            v = parts[side, segment]
            free[side] -= v
            # Inside a list, the placed segment stays until it reaches the head. The tree does not
            # change.
            if listed[side, head[side, v]] != segment:
                continue
            while head[side, v] < end[side, v] and placed[listed[side, head[side, v]]]:
                head[side, v] += 1
            least[side, leaves + v] = leaves
            if head[side, v] < end[side, v]:
                least[side, leaves + v] = parts[1 - side, listed[side, head[side, v]]]
            _update(least, side, leaves + v)
    return rows


def pack_sides(
    inputs: np.ndarray, targets: np.ndarray, sides: tuple[int, int], max_segments: int
) -> np.ndarray:
    """Return the row of each segment, int64[n], for rows of two sequences, inputs and targets.

    A row starts with the largest remaining segment. The size of a segment is the larger of the
    fractions that it takes of the two sequences. Further segments are added while any fits. Each
    time, the sequence with the larger unfilled fraction decides: the next segment is the one with
    the most slots in this sequence. Ties go to the segment with the fewest slots in the other
    sequence, then to the given order.

    If all segments together need more of one sequence than of the other, the other sequence cannot
    be filled. The slots of the other sequence that are expected to stay empty do not count as
    unfilled.

    Args:
        inputs: int64[n]: slots of inputs, each 1 … sides[0].
        targets: int64[n]: slots of targets, each 1 … sides[1].
        sides: Slots of inputs and of targets per row.
        max_segments: Maximum segments per row.
    """
    row, room = np.empty(len(inputs), np.int64), np.array(sides, np.int64)
    if not len(row):
        return row
    parts = np.stack((inputs, targets))
    order = np.argsort(-np.maximum(inputs * room[1], targets * room[0]), kind="stable")
    listed = np.stack((np.lexsort((targets, inputs)), np.lexsort((inputs, targets))))
    counts = np.stack([np.bincount(slots, minlength=int(room.max()) + 1) for slots in parts])
    end = np.cumsum(counts, axis=1)
    # With 8 slots in each sequence, 80 input slots and 40 target slots, 4 target slots per row stay
    # empty.
    needed, spare = parts.sum(axis=1).tolist(), np.zeros(2, np.int64)
    tighter = 0 if needed[0] * sides[1] >= needed[1] * sides[0] else 1
    looser = 1 - tighter
    spare[looser] = sides[looser] - needed[looser] * sides[tighter] // needed[tighter]
    remaining = _Remaining(parts, listed, end - counts, end)
    _pack_sides(order, remaining, room, spare, max_segments, row)
    return row


def rows_of(segments: Segments, recipe: Recipe, tasks: Sequence[Task]) -> np.ndarray:
    """Pack segments by the recipe's algorithm, and return the row of each segment, int64[m]."""
    packing = recipe.packing
    most_segments = packing.max_segments_per_row or FORMAT_MAX_SEGMENTS
    if packing.algorithm == "concat":
        return segments.row
    if packing.sides is not None:
        inputs = inputs_of(tasks, segments)
        return pack_sides(inputs, segments.slots - inputs, packing.sides, most_segments)
    physical = segments.slots + -segments.slots % packing.pad_seq_to_mult
    return pack(physical, recipe.seq_length, packing.algorithm, most_segments)[0]


def pack(
    lengths: np.ndarray, capacity: int, algorithm: str, max_segments: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Pack segments by length. Return two arrays int64[n]: each segment's row and its first slot.

    Rows are numbered in the order of their creation. best_fit takes segments of equal length in the
    given order. Among equally full rows, it fills the row that reached this fill last.

    Args:
        lengths: int[n]: slots of each segment, each 1 … capacity.
        capacity: Slots per row.
        algorithm: "best_fit", "first_fit" or "next_fit".
        max_segments: Maximum segments per row; 0 for no limit.

    Raises:
        RecipeError: If the algorithm is unknown, or a length is not in 1 … capacity.
    """
    lengths = np.ascontiguousarray(lengths, np.int64)
    # Kernels do not check array bounds, so an invalid length must not reach them.
    if len(lengths) and (lengths.min() < 1 or lengths.max() > capacity):
        worst = int(np.argmax((lengths < 1) | (lengths > capacity)))
        raise RecipeError(
            f"segment {worst} has length {lengths[worst]}, but a row fits lengths 1 … {capacity}"
        )
    row, offset = np.empty(lengths.shape, np.int64), np.empty(lengths.shape, np.int64)
    if algorithm == "best_fit":
        # The number of segments of each length determines the rows. The segments are assigned
        # afterwards.
        counts = np.bincount(lengths, minlength=capacity + 1)
        placements = assign(counts, capacity, max_segments)
        _fill_rows(placements, counts, lengths, np.empty(lengths.shape, np.uint64), row, offset)
    elif algorithm == "first_fit":
        _first_fit(lengths, capacity, max_segments, row, offset)
    elif algorithm == "next_fit":
        _next_fit(lengths, capacity, max_segments, row, offset)
    else:
        raise RecipeError(
            f"algorithm {algorithm!r} does not pack by length\n"
            "hint: use best_fit, first_fit or next_fit"
        )
    return row, offset


def place(segments: Segments, recipe: Recipe, tasks: Sequence[Task]) -> tuple[Segments, int]:
    """Pack segments, and return (segments, free slots in the row that was packed last).

    The returned segments are in row order. Their columns `row` and `first_slot` are set.
    """
    packing, row = recipe.packing, rows_of(segments, recipe, tasks)
    physical = segments.slots + -segments.slots % packing.pad_seq_to_mult
    free = recipe.seq_length - int(segments.slots[row == row.max()].sum()) if len(row) else 0
    keep_order = packing.algorithm == "next_fit"
    order, row, first_slot = placement(segments.key, physical, row, keep_order)
    return segments.select(order).replace(row=row, first_slot=first_slot), free


def placement(
    key: np.ndarray, physical: np.ndarray, row: np.ndarray, keep_order: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Put rows, and the segments inside each row, in a random order drawn from the segments' keys.

    Args:
        key: uint64[m]: key of each segment.
        physical: int64[m]: slots of each segment, with the padding at its end.
        row: int64[m]: row of each segment as packed.
        keep_order: True to keep the order of rows, and of the segments inside rows, as packed
            (next_fit).

    Returns:
        Three arrays int64[m] in row order: (1) the index of each segment, (2) its row, ascending,
        (3) its first slot in the row.
    """
    m, rows = len(row), int(row.max()) + 1 if len(row) else 0
    if keep_order:
        order = np.argsort(row, kind="stable")
    else:
        draws = np.empty(m, np.uint64)
        bits64_of_keys(key, SEGMENT_ORDER, draws)
        order = np.lexsort((draws, row))  # The sort is stable, so equal draws keep their order.
    # Row r as packed has the segments order[begin[r] : begin[r + 1]].
    begin = np.searchsorted(row[order], np.arange(rows + 1))
    shuffled = np.arange(rows)
    # A row is ordered by the key of its first segment, so no shared generator is needed.
    if not keep_order:
        row_draws = np.empty(rows, np.uint64)
        bits64_of_keys(key[order[begin[:-1]]], ROW_ORDER, row_draws)
        shuffled = np.argsort(row_draws, kind="stable")
    # Row k of the result is row shuffled[k] as packed. Its first segment has index final_begin[k].
    counts = np.diff(begin)[shuffled]
    final_begin = np.cumsum(counts) - counts
    final_row = np.repeat(np.arange(rows), counts)
    final = order[np.arange(m) + np.repeat(begin[shuffled] - final_begin, counts)]
    # `slots_before` counts the slots before each segment, over all rows. Subtracting the row's
    # first value gives the first slot.
    slots_before = np.cumsum(physical[final]) - physical[final]
    return final, final_row, slots_before - slots_before[final_begin][final_row]
