"""prefix_lm: a pivot, uniform over 1 … n − 1, cuts the tokens into a prefix, seen both ways, and a
continuation, trained.

tokens       10  11  12  13            pivot 2, sentinel = true, sentinel 100
slots        10  11 100  12  13        the sentinel is the first target
loss_mask     0   1   1   1   0
prefix 2                               with eos_after_inputs 3: eos stands before the sentinel
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from packprep.dataset.epochs.token_slots import PREFIX_LM, roles_of_inputs
from packprep.kernel import copy_items, integer, kernel
from packprep.objectives.objective import Bodies, BodySlots, Objective, Task
from packprep.randomness import PIVOT, REDRAWN_PIVOT


def body_slots(task: Task, bodies: Bodies) -> np.ndarray:
    """n, and a slot each for eos of the prefix and for the sentinel, if there are these."""
    return bodies.n + _added(task)


def most_body_slots(task: Task, n: int) -> int:
    """The most slots that a body of n tokens takes: as many as any, for nothing of the length is
    drawn."""
    return n + _added(task)


def most_sides(task: Task, n: int) -> tuple[int, int]:
    """n − 1 tokens on either side, with perhaps eos and perhaps the sentinel."""
    return max(n - 1, 1) + int(task.parameters["eos_after_inputs"]), max(n - 1, 1) + int(
        task.parameters["sentinel"]
    )


def _added(task: Task) -> int:
    return int(task.parameters["sentinel"]) + int(task.parameters["eos_after_inputs"])


@kernel
def _pivots(n, key, first_trained, epoch, out):
    purpose = PIVOT if epoch == 0 else REDRAWN_PIVOT
    for i in range(n.shape[0]):
        if first_trained[i] >= 0:
            out[i] = max(first_trained[i], 1)
        else:
            out[i] = 1 + integer(key[i], purpose, 0, n[i] - 1, epoch)


@kernel
def _render(tokens, begin, n, pivot, at, added, rows):
    for i in range(n.shape[0]):
        s, t = begin[i], at[i]
        copy_items(rows, t, tokens, s, pivot[i])
        for k in range(added.shape[0]):
            rows[t + pivot[i]] = added[k]
            t += 1
        copy_items(rows, t + pivot[i], tokens, s + pivot[i], n[i] - pivot[i])


@kernel
def _restore(rows, begin, n, pivot, at, added, out, fits):
    for i in range(n.shape[0]):
        s, t = begin[i], at[i]
        for j in range(pivot[i]):
            out[s + j] = rows[t + j]
        fits[i] = True
        for k in range(added.shape[0]):
            fits[i] = fits[i] and rows[t + pivot[i]] == added[k]
            t += 1
        for j in range(pivot[i], n[i]):
            out[s + j] = rows[t + j]


def _pivots_of(task: Task, bodies: Bodies) -> np.ndarray:
    """int64[m]: how many tokens lie before the pivot; in a supervised document those before the
    first trained one."""
    out = np.empty(bodies.n.shape, np.int64)
    _pivots(*bodies._replace(epoch=0 if task.keeps_prefix else bodies.epoch), out)
    return out


def body_prefix(task: Task, bodies: Bodies) -> np.ndarray:
    """int64[m]: the tokens before the pivot, and eos if it ends them."""
    return _pivots_of(task, bodies) + int(task.parameters["eos_after_inputs"])


def token_slots(task: Task, bodies: Bodies) -> np.ndarray:
    """int64[m, 2]: from the pivot on, tokens stand behind eos and the sentinel."""
    return np.stack(
        (_pivots_of(task, bodies), np.full(bodies.n.shape, _added(task), np.int64)), axis=1
    )


def _ids_at_pivot(task: Task) -> np.ndarray:
    """int32[0 … 2]: eos, the sentinel."""
    eos = [task.ids.eos] if task.parameters["eos_after_inputs"] else []
    return np.array([*eos, *task.ids.sentinels[: int(task.parameters["sentinel"])]], np.int32)


def render(task: Task, columns: BodySlots, tokens: np.ndarray, rows: np.ndarray) -> None:
    """Copies the tokens, with eos and the sentinel at the pivot."""
    pivot = _pivots_of(task, columns.bodies)
    _render(tokens, columns.begin, columns.bodies.n, pivot, columns.at, _ids_at_pivot(task), rows)


def restore(task: Task, columns: BodySlots, rows: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Copies the body back without what was added; a body fits if eos and the sentinel stand at the
    pivot."""
    fits = np.empty(columns.begin.shape, np.bool_)
    pivot = _pivots_of(task, columns.bodies)
    _restore(
        rows, columns.begin, columns.bodies.n, pivot, columns.at, _ids_at_pivot(task), out, fits
    )
    return fits


def sentinels(parameters: Mapping[str, Any], n: int) -> int:
    """One where a sentinel closes the prefix."""
    return int(parameters["sentinel"])


OBJECTIVE = Objective(
    name="prefix_lm",
    attention="prefix",
    constant=True,
    supervised=True,
    parameters=PREFIX_LM.parameters,
    body_slots=body_slots,
    most_body_slots=most_body_slots,
    most_sides=most_sides,
    body_prefix=body_prefix,
    token_slots=token_slots,
    render=render,
    restore=restore,
    sentinels=sentinels,
    roles=roles_of_inputs,
)
