"""Which rows a report shows: some at even places, and for every task some that have it."""

from collections.abc import Mapping, Sequence

import numpy as np

MOST_ROWS, FEWEST_ROWS = 48, 8
MOST_SLOTS = 1 << 18
"""Slots that the rows of a report have together, but for FEWEST_ROWS."""
ROWS_OF_A_TASK = 4


def places(count: int, most: int) -> np.ndarray:
    """int64: all of 0 … count − 1, or `most` of them at even distances, from the middle of equal parts."""
    return np.arange(count) if count <= most else (2 * np.arange(most) + 1) * count // (2 * most)


def rows_with_tasks(row: np.ndarray, task: np.ndarray, first: int) -> tuple[dict[int, list[int]], int, int]:
    """(task → some rows that have it, at even places; the first row with the most tasks, its number of them).

    row, task: int64[segments] of a shard that has some; first: the number of its first row in the dataset.
    """
    by_task, pairs = {}, np.unique(np.stack((task, row), axis=1), axis=0)
    for t in np.unique(task).tolist():
        own = pairs[pairs[:, 0] == t, 1]
        by_task[t] = (own[places(len(own), ROWS_OF_A_TASK)] + first).tolist()
    counts = np.bincount(pairs[:, 1])
    return by_task, int(counts.argmax()) + first, int(counts.max())


def chosen_rows(
    rows: Sequence[range], by_task: Sequence[Mapping[int, Sequence[int]]], best: int, length: int
) -> list[int]:
    """The rows to show, ascending. rows: of each shard that is looked at; by_task: as `rows_with_tasks` gives, of each shard.

    best: a row that is shown in any case; −1: none. length: slots of a row. Each task gets a row first, however many there
    are; what is left is shared by even places and by tasks with few rows.
    """
    most = max(min(MOST_ROWS, MOST_SLOTS // length), FEWEST_ROWS)
    every = np.concatenate([np.array(own, np.int64) for own in rows]) if rows else np.zeros(0, np.int64)
    chosen = {best} if best >= 0 else set()
    found: dict[int, list[int]] = {}
    for own in by_task:
        for t, some in own.items():
            found.setdefault(t, []).extend(some)
    candidates = {t: [some[i] for i in places(len(some), ROWS_OF_A_TASK)] for t, some in sorted(found.items())}
    for some in candidates.values():
        if not chosen.intersection(some):
            chosen.add(some[0])
    chosen.update(every[places(len(every), max(most // 2, 1))].tolist()[: max(most - len(chosen), 0)])
    for turn in range(ROWS_OF_A_TASK):
        for some in candidates.values():
            if turn < len(some) and len(chosen) < most:
                chosen.add(some[turn])
    for row in every[places(len(every), most)].tolist():
        if len(chosen) < most:
            chosen.add(row)
    return sorted(chosen)
