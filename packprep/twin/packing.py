"""Lengths → (row, offset), one document at a time."""

import bisect

FORMAT_LIMIT = 65535  # segments in a row: their ids are 16-bit and 0 is padding


def pack(lengths, capacity, algorithm, max_segments=0):
    """(rows, offsets), lists as long as lengths. algorithm: "best_fit" | "first_fit" | "next_fit"."""
    for position, length in enumerate(lengths):
        if not 1 <= length <= capacity:
            raise ValueError(f"length {length} at position {position} is not in 1 … {capacity}")
    return {"best_fit": best_fit, "first_fit": first_fit, "next_fit": next_fit}[algorithm](
        list(lengths), capacity, max_segments or FORMAT_LIMIT
    )


def best_fit(lengths, capacity, max_segments):
    """Longest first; into the fullest row that holds it; of equally full rows the one that reached that fill last."""
    rows, offsets = [0] * len(lengths), [0] * len(lengths)
    fills: list[int] = []  # those that some open row has, ascending
    open_rows: dict[int, list[int]] = {}  # fill → rows in the order in which they reached it
    count: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect.bisect_right(fills, capacity - lengths[i]) - 1
        if place < 0:
            row, fill = len(count), 0
            count.append(0)
        else:
            fill = fills[place]
            row = open_rows[fill].pop()
            if not open_rows[fill]:
                del open_rows[fill], fills[place]
        rows[i], offsets[i] = row, fill
        count[row] += 1
        if count[row] < max_segments:
            fill += lengths[i]
            if fill not in open_rows:
                bisect.insort(fills, fill)
                open_rows[fill] = []
            open_rows[fill].append(row)
    return rows, offsets


GROUP_ROWS = 256


def first_fit(lengths, capacity, max_segments):
    """In the given order; into the lowest row that holds it. Groups of rows are passed over by the most room in them."""
    rows, offsets, count = [], [], []
    fill: list[int] = []
    most_room: list[int] = []
    for length in lengths:
        group = next((g for g, room in enumerate(most_room) if room >= length), None)
        if group is None:
            row = len(fill)
            group = row // GROUP_ROWS
            fill.append(0)
            count.append(0)
            most_room += [0] * (group == len(most_room))
        else:
            row = group * GROUP_ROWS
            while count[row] == max_segments or fill[row] + length > capacity:
                row += 1
        rows.append(row)
        offsets.append(fill[row])
        fill[row] += length
        count[row] += 1
        own = range(group * GROUP_ROWS, min((group + 1) * GROUP_ROWS, len(fill)))
        most_room[group] = max((capacity - fill[r] for r in own if count[r] < max_segments), default=0)
    return rows, offsets


def next_fit(lengths, capacity, max_segments):
    """In the given order; into the last row or a new one."""
    rows, offsets = [], []
    row, fill, count = -1, capacity, 0
    for length in lengths:
        if fill + length > capacity or count == max_segments:
            row, fill, count = row + 1, 0, 0
        rows.append(row)
        offsets.append(fill)
        fill += length
        count += 1
    return rows, offsets
