"""Lengths → (row, offset), one document at a time, looking at every row."""

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
    rows, offsets = [None] * len(lengths), [None] * len(lengths)
    fill, count, reached = [], [], []
    for time, i in enumerate(sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))):
        able = [r for r in range(len(fill)) if fill[r] + lengths[i] <= capacity and count[r] < max_segments]
        if able:
            row = max(able, key=lambda r: (fill[r], reached[r]))
        else:
            row = len(fill)
            fill.append(0)
            count.append(0)
            reached.append(None)
        rows[i], offsets[i] = row, fill[row]
        fill[row] += lengths[i]
        count[row] += 1
        reached[row] = time
    return rows, offsets


def first_fit(lengths, capacity, max_segments):
    """In the given order; into the lowest row that holds it."""
    rows, offsets, fill, count = [], [], [], []
    for length in lengths:
        row = 0
        while row < len(fill) and (fill[row] + length > capacity or count[row] == max_segments):
            row += 1
        if row == len(fill):
            fill.append(0)
            count.append(0)
        rows.append(row)
        offsets.append(fill[row])
        fill[row] += length
        count[row] += 1
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
