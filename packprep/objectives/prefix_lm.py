"""prefix_lm: a pivot, uniform over 1 … n − 1, cuts the tokens into a prefix, seen both ways, and a continuation, trained.

tokens       10  11  12  13            pivot 2, sentinel = true, sentinel 100
slots        10  11 100  12  13        the sentinel is the first target
loss_mask     0   1   1   1   0
prefix 2
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from packprep.kernel import integer, kernel
from packprep.objectives.objective import Columns, Objective, Parameter, Slots, Task
from packprep.randomness import PIVOT


def body_slots(task: Task, n: np.ndarray, key: np.ndarray) -> np.ndarray:
    """n, and one slot for the sentinel if there is one."""
    return n + int(task.parameters["sentinel"])


def most_body_slots(task: Task, n: int) -> int:
    """The same: nothing of the length is drawn."""
    return n + int(task.parameters["sentinel"])


@kernel(inline=True)
def _pivot(key, n):
    """1 … n − 1; n ≥ 2."""
    return 1 + integer(key, PIVOT, 0, n - 1, 0)


@kernel
def _pivots(n, key, out):
    for i in range(n.shape[0]):
        out[i] = _pivot(key[i], n[i])


@kernel
def _render(tokens, begin, n, key, body, sentinel, out):
    for i in range(n.shape[0]):
        pivot = _pivot(key[i], n[i])
        s, t = begin[i], body[i]
        for j in range(pivot):
            out[t + j] = tokens[s + j]
        if sentinel >= 0:
            out[t + pivot] = sentinel
            t += 1
        for j in range(pivot, n[i]):
            out[t + j] = tokens[s + j]


@kernel
def _restore(rows, begin, n, key, body, sentinel, out, fits):
    for i in range(n.shape[0]):
        pivot = _pivot(key[i], n[i])
        s, t = begin[i], body[i]
        for j in range(pivot):
            out[s + j] = rows[t + j]
        fits[i] = True
        if sentinel >= 0:
            fits[i] = rows[t + pivot] == sentinel
            t += 1
        for j in range(pivot, n[i]):
            out[s + j] = rows[t + j]


def body_prefix(task: Task, n: np.ndarray, key: np.ndarray) -> np.ndarray:
    """int64[m]: the pivots."""
    out = np.empty(n.shape, np.int64)
    _pivots(n, key, out)
    return out


def _sentinel(task: Task) -> int:
    return int(task.ids.sentinels[0]) if task.parameters["sentinel"] else -1


def render(task: Task, columns: Columns, tokens: np.ndarray, slots: Slots) -> None:
    """Copies the tokens, with the sentinel at the pivot."""
    _render(tokens, columns.begin, columns.n, columns.key, columns.body, _sentinel(task), slots.tokens)


def restore(task: Task, columns: Columns, rows: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Copies the body back without the sentinel; a body fits if the sentinel stands at the pivot."""
    fits = np.empty(columns.n.shape, np.bool_)
    _restore(rows, columns.begin, columns.n, columns.key, columns.body, _sentinel(task), out, fits)
    return fits


def sentinels(parameters: Mapping[str, Any], n: int) -> int:
    """One where a sentinel closes the prefix."""
    return int(parameters["sentinel"])


OBJECTIVE = Objective(
    name="prefix_lm",
    attention="prefix",
    label_alignment="next_token",
    constant=True,
    parameters=(Parameter("sentinel", False, "put the first sentinel between the prefix and its continuation"),),
    body_slots=body_slots,
    most_body_slots=most_body_slots,
    body_prefix=body_prefix,
    render=render,
    restore=restore,
    sentinels=sentinels,
)
