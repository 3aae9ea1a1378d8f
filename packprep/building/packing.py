"""Pack segments into rows by length, then order the rows and the segments inside each row by key.

best_fit    best-fit decreasing: the longest first, each into the fullest row that holds it. Least
padding. first_fit   in the given order, each into the first row that holds it. next_fit    in the
given order, never back to an earlier row. Keeps the order; most padding.

If rows have two sequences, inputs and targets, each row is filled in turn with the segments that
fit both best (`pack_sides`).
"""

from collections.abc import Sequence

import numpy as np

from packprep.building.segments import FORMAT_MAX_SEGMENTS, inputs_of
from packprep.dataset.segments import Segments
from packprep.errors import RecipeError
from packprep.kernel import bits64_of_keys, kernel, leading_zeros
from packprep.objectives.objective import Task
from packprep.randomness import ROW_ORDER, SEGMENT_ORDER
from packprep.recipe import Recipe


@kernel(inline=True)
def _highest(bits, most):
    """Return the highest member ≤ `most` of a bit set (uint64[…]); 0 without such a member."""
    block = most >> 6
    word = bits[block] & (~np.uint64(0) >> np.uint64(63 - (most & 63)))
    while word == np.uint64(0):
        if block == 0:
            return np.int64(0)
        block -= 1
        word = bits[block]
    return np.int64(block << 6) + np.int64(63) - np.int64(leading_zeros(word))


@kernel
def assign(counts, capacity, max_segments):
    """Return best-fit placements, int64[k, 5], for the number of documents of each length.

    All documents of one length are placed in bulk. A placement puts the next documents, the longest
    first, into consecutive rows. Its columns are first row, step ±1, rows, documents per row, and
    fill before the first document. One turn may add two placements of the same length: the full
    rows, and one row with the remaining documents.

    Rows of equal fill form a stack of runs of consecutive row numbers. A run has a first row, a
    step ±1, a number of rows and the segments per row. A row that is chosen for length L stays the
    fullest, so it takes as many documents as fit. Its new fill is then above capacity − L. So each
    fill that holds L is emptied only once, fullest first, one run at a time. A run moves to its new
    fill in O(1). Its order is reversed, because the row that was on top is then lowest.

    Args:
        counts: int64[capacity + 1]: number of documents of each length.
        capacity: Slots per row.
        max_segments: Maximum segments per row; 0 for no limit.
    """
    placements, placed = np.empty((1024, 5), np.int64), np.int64(0)
    size = np.int64(1024)
    first, step, rows, segments, below = (
        np.empty(size, np.int64),
        np.empty(size, np.int64),
        np.empty(size, np.int64),
        np.empty(size, np.int64),
        np.empty(size, np.int64),
    )
    free, used = np.int64(-1), np.int64(0)
    top = np.full(capacity + 1, -1, np.int64)  # run on top of each fill's stack
    filled = np.zeros((capacity >> 6) + 1, np.uint64)  # bit set of the fills that have rows
    n_rows = np.int64(0)
    for length in range(capacity, 0, -1):
        left = counts[length]
        fill = capacity - length
        while left > 0:
            fill = _highest(filled, fill)
            # Take the run on top, or new rows.
            if fill > 0:
                run = top[fill]
                n, many = rows[run], segments[run]
                row_at, direction = first[run], step[run]
            else:
                run, many, direction, row_at = np.int64(-1), np.int64(0), np.int64(1), n_rows
                n = left  # There are as many new rows as needed.
            each = (capacity - fill) // length
            if max_segments > 0:
                each = min(each, max_segments - many)
            full = min(n, left // each)
            left -= full * each
            # Place the full rows of `each` documents, then one row with the remaining documents.
            for part in range(2):
                if part == 0:
                    moved, docs = full, each
                elif left > 0 and full < n:
                    moved, docs = np.int64(1), left
                    left = np.int64(0)
                else:
                    continue
                if moved == 0:
                    continue
                if placed == placements.shape[0]:
                    placements = _grow_rows(placements)
                of_rows = placements[placed]
                of_rows[0], of_rows[1], of_rows[2], of_rows[3], of_rows[4] = (
                    row_at,
                    direction,
                    moved,
                    docs,
                    fill,
                )
                placed += 1
                row_at += moved * direction
                n -= moved
                if run < 0:
                    n_rows += moved
                else:
                    rows[run], first[run] = n, row_at
                if max_segments > 0 and many + docs >= max_segments:
                    continue  # The rows have the maximum number of segments.
                new_fill = fill + docs * length
                if new_fill >= capacity:
                    continue
                if free >= 0:
                    new = free
                    free = below[new]
                else:
                    if used == size:
                        size *= 2
                        first, step, rows, segments, below = (
                            _grow(first),
                            _grow(step),
                            _grow(rows),
                            _grow(segments),
                            _grow(below),
                        )
                    new = used
                    used += 1
                # The row that was placed last is on top.
                first[new] = row_at - direction
                step[new] = -direction
                rows[new] = moved
                segments[new] = many + docs
                below[new] = top[new_fill]
                top[new_fill] = new
                filled[new_fill >> 6] |= np.uint64(1) << np.uint64(new_fill & 63)
            if run >= 0 and rows[run] == 0:
                # No rows are pushed above this run, because its fill is the one being emptied.
                top[fill] = below[run]
                if top[fill] < 0:
                    filled[fill >> 6] &= ~(np.uint64(1) << np.uint64(fill & 63))
                below[run] = free
                free = run
    return placements[:placed]


@kernel(inline=True)
def _grow(array):
    """Return a copy of the int64 array with twice the capacity.

    A loop copies the values, because a slice assignment takes seconds to compile.
    """
    grown = np.empty(2 * array.shape[0], np.int64)
    for i in range(array.shape[0]):
        grown[i] = array[i]
    return grown


@kernel(inline=True)
def _grow_rows(array):
    """Return a copy of the array, int64[n, k], with twice the rows."""
    grown = np.empty((2 * array.shape[0], array.shape[1]), np.int64)
    for i in range(array.shape[0]):
        for j in range(array.shape[1]):
            grown[i, j] = array[i, j]
    return grown


@kernel
def _fill_rows(placements, counts, lengths, places, row, offset):
    """Write the row and offset of every document.

    Documents of one length take the places of that length in the given order. Placements are
    written to `places` and read back as one stream per length. This avoids scattered writes to
    `row` and `offset`.

    Args:
        placements: int64[k, 5], from `assign`.
        counts: Number of documents of each length.
        lengths: int64[n]: length of each document.
        places: uint64[n], overwritten: row and offset as high and low half, longest documents
            first.
        row: int64[n]: receives the rows.
        offset: int64[n]: receives the offsets.
    """
    at = np.int64(0)
    begin = np.empty(counts.shape[0], np.int64)  # index of the next place of each length
    for length in range(counts.shape[0] - 1, -1, -1):
        begin[length] = at
        at += counts[length]
    at, now, end = np.int64(0), np.int64(counts.shape[0]), np.int64(0)
    for p in range(placements.shape[0]):
        while at == end:
            now -= 1
            end += counts[now]
        r, step, rows, each, fill = placements[p]
        for _ in range(rows):
            place = np.uint64(r << 32 | fill)
            for _ in range(each):
                places[at] = place
                place += np.uint64(now)
                at += 1
            r += step
    for i in range(lengths.shape[0]):
        mine = begin[lengths[i]]
        begin[lengths[i]] = mine + 1
        row[i] = np.int64(places[mine] >> np.uint64(32))
        offset[i] = np.int64(places[mine] & np.uint64(0xFFFFFFFF))


@kernel
def _first_fit(lengths, capacity, max_segments, row, offset):
    """Pack by first fit, with a tournament tree over the rows' free slots.

    The first row that holds a document is found in O(log rows).
    """
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
        node = np.int64(1)
        while node < leaves:
            node = 2 * node if room[2 * node] >= lengths[i] else 2 * node + 1
        r = node - leaves
        row[i], offset[i] = r, fill[r]
        fill[r] += lengths[i]
        segments[r] += 1
        room[node] = -1 if max_segments > 0 and segments[r] >= max_segments else capacity - fill[r]
        node //= 2
        while node > 0:
            room[node] = max(room[2 * node], room[2 * node + 1])
            node //= 2


@kernel
def _next_fit(lengths, capacity, max_segments, row, offset):
    r, fill, many = np.int64(0), np.int64(0), np.int64(0)
    for i in range(lengths.shape[0]):
        if fill + lengths[i] > capacity or (max_segments > 0 and many >= max_segments):
            r, fill, many = r + 1, np.int64(0), np.int64(0)
        row[i], offset[i] = r, fill
        fill += lengths[i]
        many += 1


@kernel
def _pack_sides(order, parts, room, spare, listed, head, end, max_segments, row):
    """Fill rows of two sequences, one after another, as described in `pack_sides`.

    For each sequence, a tournament tree over part sizes v has the smallest part of the other
    sequence among the remaining segments. The largest v that fits is therefore found in O(log
    room).

    Args:
        order: int64[n]: the segments in the order that they start rows.
        parts: int64[2, n]: slots of each segment in each sequence.
        room: int64[2]: slots of each sequence in a row.
        spare: int64[2]: slots of each sequence that are expected to stay empty.
        listed: int64[2, n]: for each sequence, the segments sorted by their part of it, then by the
            other part.
        head: int64[2, …]: for each sequence and part size, index in `listed` of the first remaining
            segment. Overwritten.
        end: int64[2, …]: index after the last such segment. Segments that the other sequence's list
            supplied stay between `head` and `end`.
        max_segments: Maximum segments per row.
        row: int64[n]: receives the row of each segment.

    Returns:
        The number of rows.
    """
    n, leaves = order.shape[0], np.int64(1)
    while leaves <= max(room[0], room[1]):
        leaves *= 2
    none = leaves  # This is more than any number of free slots.
    least = np.full((2, 2 * leaves), none, np.int64)
    for side in range(2):
        for v in range(room[side] + 1):
            if head[side, v] < end[side, v]:
                least[side, leaves + v] = parts[1 - side, listed[side, head[side, v]]]
        for node in range(leaves - 1, 0, -1):
            least[side, node] = min(least[side, 2 * node], least[side, 2 * node + 1])
    placed = np.zeros(n, np.bool_)
    free = np.zeros(2, np.int64)
    rows, count, turn = np.int64(0), np.int64(0), np.int64(0)
    for _ in range(n):
        found = np.int64(-1)
        if rows > 0 and count < max_segments:
            side = 0 if (free[0] - spare[0]) * room[1] > (free[1] - spare[1]) * room[0] else 1
            other, node = free[1 - side], leaves + free[side]
            # Climb until a subtree to the left has a segment that fits, then enter it.
            if least[side, node] > other:
                while node > 1 and (node & 1 == 0 or least[side, node - 1] > other):
                    node >>= 1
                node -= node > 1
            if node > 1:
                while node < leaves:
                    node = 2 * node + 1 if least[side, 2 * node + 1] <= other else 2 * node
                found = listed[side, head[side, node - leaves]]
        if found < 0:
            while placed[order[turn]]:
                turn += 1
            found = order[turn]
            free[0], free[1] = room[0], room[1]
            rows, count = rows + 1, np.int64(0)
        row[found], placed[found] = rows - 1, True
        count += 1
        for side in range(2):
            v = parts[side, found]
            free[side] -= v
            if listed[side, head[side, v]] != found:
                continue
            while head[side, v] < end[side, v] and placed[listed[side, head[side, v]]]:
                head[side, v] += 1
            node = leaves + v
            least[side, node] = (
                parts[1 - side, listed[side, head[side, v]]]
                if head[side, v] < end[side, v]
                else none
            )
            while node > 1:
                node >>= 1
                least[side, node] = min(least[side, 2 * node], least[side, 2 * node + 1])
    return rows


def pack_sides(
    inputs: np.ndarray, targets: np.ndarray, sides: tuple[int, int], max_segments: int
) -> np.ndarray:
    """Return the row of each segment, int64[n], for rows of two sequences, inputs and targets.

    A row starts with the largest remaining segment, measured by the larger fraction of a sequence
    that it takes. While a segment fits, the row then takes the one with the largest part of the
    sequence that has the larger unfilled fraction. Ties take the smallest part of the other
    sequence. Equal segments are taken in the given order.

    The sequence that all segments together need more of is filled completely. The other one is
    filled in proportion to their need, and its spare slots are expected to stay empty.

    Args:
        inputs: int64[n]: slots of inputs, each 1 … sides[0].
        targets: int64[n]: slots of targets, each 1 … sides[1].
        sides: Slots of inputs and of targets per row.
        max_segments: Maximum segments per row.
    """
    row, parts, room = (
        np.empty(len(inputs), np.int64),
        np.stack((inputs, targets)),
        np.array(sides, np.int64),
    )
    if not len(row):
        return row
    order = np.argsort(-np.maximum(inputs * room[1], targets * room[0]), kind="stable")
    listed = np.stack((np.lexsort((targets, inputs)), np.lexsort((inputs, targets))))
    counts = np.stack([np.bincount(part, minlength=int(room.max()) + 1) for part in parts])
    end, needed, spare = (
        np.cumsum(counts, axis=1),
        parts.sum(axis=1).tolist(),
        np.zeros(2, np.int64),
    )
    tighter = 0 if needed[0] * sides[1] >= needed[1] * sides[0] else 1
    spare[1 - tighter] = (
        sides[1 - tighter] - needed[1 - tighter] * sides[tighter] // needed[tighter]
    )
    _pack_sides(order, parts, room, spare, listed, end - counts, end, max_segments, row)
    return row


def rows_of(segments: Segments, recipe: Recipe, tasks: Sequence[Task]) -> np.ndarray:
    """Return the row of each segment as packed, int64[m]."""
    packing = recipe.packing
    most = packing.max_segments_per_row or FORMAT_MAX_SEGMENTS
    if packing.algorithm == "concat":
        return segments.row
    if packing.sides is not None:
        inputs = inputs_of(tasks, segments)
        return pack_sides(inputs, segments.slots - inputs, packing.sides, most)
    physical = segments.slots + -segments.slots % packing.pad_seq_to_mult
    return pack(physical, recipe.seq_length, packing.algorithm, most)[0]


def pack(
    lengths: np.ndarray, capacity: int, algorithm: str, max_segments: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return the row and offset, int64[n] each, of segments in rows of `capacity` slots.

    Rows are numbered in the order of their creation. best_fit takes equal lengths in the given
    order. Among equally full rows, it takes the one that reached that fill last.

    Args:
        lengths: int[n]: slots of each segment, each 1 … capacity.
        capacity: Slots per row.
        algorithm: "best_fit", "first_fit" or "next_fit".
        max_segments: Maximum segments per row; 0 for no limit.

    Raises:
        RecipeError: If the algorithm is unknown or no row holds a length.
    """
    lengths = np.ascontiguousarray(lengths, np.int64)
    if len(lengths) and (lengths.min() < 1 or lengths.max() > capacity):
        worst = int(np.argmax((lengths < 1) | (lengths > capacity)))
        raise RecipeError(
            f"segment {worst} has length {lengths[worst]}, but a row fits lengths 1 … {capacity}"
        )
    row, offset = np.empty(lengths.shape, np.int64), np.empty(lengths.shape, np.int64)
    if algorithm == "best_fit":
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
    """Return the segments in row order, and the slots that the row packed last leaves free.

    The segments have their rows and first slots.
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
    """Put rows, and the segments inside each row, in keyed order.

    Args:
        key: uint64[m]: key of each segment.
        physical: int64[m]: slots with the padding inside.
        row: int64[m]: row as packed.
        keep_order: Leave both orders as packed (next_fit).

    Returns:
        Three arrays int64[m] in row order: the index of each segment, its row, ascending, and its
        first slot in the row.
    """
    m, rows = len(row), int(row.max()) + 1 if len(row) else 0
    if keep_order:
        order = np.argsort(row, kind="stable")
    else:
        draws = np.empty(m, np.uint64)
        bits64_of_keys(key, SEGMENT_ORDER, draws)
        order = np.lexsort((draws, row))  # The sort is stable, so equal draws keep their order.
    begin = np.searchsorted(row[order], np.arange(rows + 1))
    shuffled = np.arange(rows)
    if not keep_order:
        row_draws = np.empty(rows, np.uint64)
        bits64_of_keys(key[order[begin[:-1]]], ROW_ORDER, row_draws)
        shuffled = np.argsort(row_draws, kind="stable")
    counts = np.diff(begin)[shuffled]
    final_begin = np.cumsum(counts) - counts
    final_row = np.repeat(np.arange(rows), counts)
    final = order[np.arange(m) + np.repeat(begin[shuffled] - final_begin, counts)]
    before = np.cumsum(physical[final]) - physical[final]
    return final, final_row, before - before[final_begin][final_row]
