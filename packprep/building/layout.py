"""Rows as packed → where each segment of the final table lies: rows, and the segments inside a row, in keyed order."""

from typing import NamedTuple

import numpy as np

from packprep.kernel import bits64_of_keys, kernel
from packprep.randomness import ROW_ORDER, SEGMENT_ORDER


class Layout(NamedTuple):
    """Where each segment of the final table lies."""

    order: np.ndarray  # int64[m]: the final table's i-th segment is segment order[i] of the cut
    row: np.ndarray  # int64[m], ascending
    begin: np.ndarray  # int64[m]: first slot in the row
    rows: int


def arrange(key: np.ndarray, physical: np.ndarray, row: np.ndarray, keep_order: bool) -> Layout:
    """Put rows, and the segments inside a row, in keyed order. `keep_order` (next_fit) leaves both as packed.

    key: uint64[m]; physical: int64[m], slots with the padding inside; row: int64[m], as packed.
    """
    m, rows = len(row), int(row.max()) + 1 if len(row) else 0
    first, order = np.zeros(rows + 1, np.int64), np.empty(m, np.int64)
    _by_row(row, first, order)
    shuffled = np.arange(rows)
    if not keep_order:
        draws = np.empty(m, np.uint64)
        bits64_of_keys(key, SEGMENT_ORDER, draws)
        most = int(np.diff(first).max(initial=0))
        _by_draw(draws, first, order, np.empty(most, np.int64), np.empty(most + 1, np.int64))
        row_draws = np.empty(rows, np.uint64)
        bits64_of_keys(key[order[first[:-1]]], ROW_ORDER, row_draws)
        shuffled = np.argsort(row_draws, kind="stable")
    final = Layout(np.empty(m, np.int64), np.empty(m, np.int64), np.empty(m, np.int64), rows)
    _lay_out(shuffled, first, order, physical, final.order, final.row, final.begin)
    return final


@kernel
def _by_row(row, first, order):
    """A stable counting sort: the segments of row r are order[first[r] : first[r + 1]]."""
    for i in range(row.shape[0]):
        first[row[i]] += 1
    total = np.int64(0)
    for r in range(first.shape[0]):
        first[r], total = total, total + first[r]
    for i in range(row.shape[0]):
        order[first[row[i]]] = i
        first[row[i]] += 1
    for r in range(first.shape[0] - 1, 0, -1):
        first[r] = first[r - 1]
    first[:1] = 0


@kernel
def _by_draw(draws, first, order, spread, begins):
    """Sort the segments of each row by their draws, ties in the given order.

    Long rows are spread over as many buckets as they have segments first: draws are uniform, so that insertion is left
    with next to nothing. spread: int64[longest row]; begins: int64[longest row + 1].
    """
    for r in range(first.shape[0] - 1):
        own = order[first[r] : first[r + 1]]
        n = own.shape[0]
        if n > 24:
            for b in range(n + 1):
                begins[b] = 0
            for i in range(n):
                begins[_bucket(draws[own[i]], n) + 1] += 1
            for b in range(n):
                begins[b + 1] += begins[b]
            for i in range(n):
                b = _bucket(draws[own[i]], n)
                spread[begins[b]] = own[i]
                begins[b] += 1
            for i in range(n):
                own[i] = spread[i]
        for i in range(1, n):
            segment, j = own[i], i
            while j > 0 and draws[own[j - 1]] > draws[segment]:
                own[j] = own[j - 1]
                j -= 1
            own[j] = segment


@kernel(inline=True)
def _bucket(draw, buckets):
    return np.int64((draw >> np.uint64(32)) * np.uint64(buckets) >> np.uint64(32))


@kernel
def _lay_out(shuffled, first, order, physical, out_order, out_row, out_begin):
    at = np.int64(0)
    for r in range(shuffled.shape[0]):
        begin = np.int64(0)
        for i in range(first[shuffled[r]], first[shuffled[r] + 1]):
            out_order[at], out_row[at], out_begin[at] = order[i], r, begin
            begin += physical[order[i]]
            at += 1
