"""prefix_lm: a pivot, uniform over 1 … n − 1, cuts the tokens into a prefix, seen both ways, and a continuation, trained.

tokens       10  11  12  13            pivot 2, sentinel = true, sentinel 100
slots        10  11 100  12  13        the sentinel is the first target
loss_mask     0   1   1   1   0
prefix 2
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from packprep.dataset.token_slots import PREFIX_LM
from packprep.kernel import copy_items, integer, kernel
from packprep.objectives.objective import Bodies, BodySlots, Objective, Task
from packprep.randomness import PIVOT, REDRAWN_PIVOT


def body_slots(task: Task, bodies: Bodies) -> np.ndarray:
    """n, and one slot for the sentinel if there is one."""
    return bodies.n + int(task.parameters["sentinel"])


def most_body_slots(task: Task, n: int) -> int:
    """The most slots that a body of n tokens takes: as many as any, for nothing of the length is drawn."""
    return n + int(task.parameters["sentinel"])


@kernel
def _pivots(n, key, first_trained, epoch, out):
    purpose = PIVOT if epoch == 0 else REDRAWN_PIVOT
    for i in range(n.shape[0]):
        if first_trained[i] >= 0:
            out[i] = max(first_trained[i], 1)
        else:
            out[i] = 1 + integer(key[i], purpose, 0, n[i] - 1, epoch)


@kernel
def _render(tokens, begin, n, pivot, at, sentinel, rows):
    for i in range(n.shape[0]):
        s, t = begin[i], at[i]
        copy_items(rows, t, tokens, s, pivot[i])
        if sentinel >= 0:
            rows[t + pivot[i]] = sentinel
            t += 1
        copy_items(rows, t + pivot[i], tokens, s + pivot[i], n[i] - pivot[i])


@kernel
def _restore(rows, begin, n, pivot, at, sentinel, out, fits):
    for i in range(n.shape[0]):
        s, t = begin[i], at[i]
        for j in range(pivot[i]):
            out[s + j] = rows[t + j]
        fits[i] = True
        if sentinel >= 0:
            fits[i] = rows[t + pivot[i]] == sentinel
            t += 1
        for j in range(pivot[i], n[i]):
            out[s + j] = rows[t + j]


def body_prefix(task: Task, bodies: Bodies) -> np.ndarray:
    """int64[m]: the pivots; in a supervised document the first trained token."""
    out = np.empty(bodies.n.shape, np.int64)
    _pivots(*bodies, out)
    return out


def token_slots(task: Task, bodies: Bodies) -> np.ndarray:
    """int64[m, 2]: from the pivot on, tokens stand behind the sentinel."""
    shift = np.full(bodies.n.shape, int(task.parameters["sentinel"]), np.int64)
    return np.stack((body_prefix(task, bodies), shift), axis=1)


def _sentinel(task: Task) -> int:
    return int(task.ids.sentinels[0]) if task.parameters["sentinel"] else -1


def render(task: Task, columns: BodySlots, tokens: np.ndarray, rows: np.ndarray) -> None:
    """Copies the tokens, with the sentinel at the pivot."""
    pivot = body_prefix(task, columns.bodies)
    _render(tokens, columns.begin, columns.bodies.n, pivot, columns.at, _sentinel(task), rows)


def restore(task: Task, columns: BodySlots, rows: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Copies the body back without the sentinel; a body fits if the sentinel stands at the pivot."""
    fits = np.empty(columns.begin.shape, np.bool_)
    pivot = body_prefix(task, columns.bodies)
    _restore(rows, columns.begin, columns.bodies.n, pivot, columns.at, _sentinel(task), out, fits)
    return fits


def sentinels(parameters: Mapping[str, Any], n: int) -> int:
    """One where a sentinel closes the prefix."""
    return int(parameters["sentinel"])


def expected(task: Task, n: np.ndarray, count: np.ndarray) -> np.ndarray:
    """float64[longest + 1]: a continuation has 1 … n − 1 tokens, each as likely; n: 2 at least."""
    steps = np.zeros(int(n.max(initial=1)) + 1)
    steps[1] = (count / (n - 1)).sum()
    np.add.at(steps, n, -count / (n - 1))
    return np.cumsum(steps)


OBJECTIVE = Objective(
    name="prefix_lm",
    attention="prefix",
    constant=True,
    supervised=True,
    parameters=PREFIX_LM.parameters,
    body_slots=body_slots,
    most_body_slots=most_body_slots,
    body_prefix=body_prefix,
    token_slots=token_slots,
    render=render,
    restore=restore,
    sentinels=sentinels,
    expected=expected,
)
