"""prefix_lm: a pivot, uniform over 1 … n − 1, cuts the tokens into a prefix and a continuation.

Attention is bidirectional in the prefix, and the loss is on the continuation.

tokens       10  11  12  13            pivot 2, sentinel = true, sentinel 100
slots        10  11 100  12  13        the sentinel is the first target
loss_mask     0   1   1   1   0
prefix 2                               3 with eos_after_inputs, which adds eos before the sentinel
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from packprep.dataset.epochs.token_slots import PREFIX_LM, roles_of_inputs
from packprep.kernel import copy_items, integer, kernel, read_only
from packprep.objectives.objective import Bodies, BodySlots, Objective, Task
from packprep.randomness import PIVOT, REDRAWN_PIVOT


def body_slots(task: Task, bodies: Bodies) -> np.ndarray:
    """Return the number of slots of each body of n tokens.

    It is n, plus 1 if the task writes an eos at the pivot, plus 1 if it writes a sentinel there.

    Args:
        task: The task.
        bodies: The bodies of m segments.

    Returns:
        int64[m].
    """
    return bodies.n + _added(task)


def most_body_slots(task: Task, n: int) -> int:
    """Return the number of slots of a body of n tokens, which does not depend on the pivot.

    Args:
        task: The task.
        n: Tokens of a body.

    Returns:
        The number of slots.
    """
    return n + _added(task)


def most_sides(task: Task, n: int) -> tuple[int, int]:
    """Return the most slots that a body can have in the prefix, and after the prefix.

    Each part has at most n − 1 tokens. The eos adds a slot to the prefix, and the sentinel adds a
    slot to the continuation.

    Args:
        task: The task.
        n: Tokens of the body.

    Returns:
        (slots in the prefix, slots after it).
    """
    most_tokens = max(n - 1, 1)
    return (
        most_tokens + int(task.parameters["eos_after_inputs"]),
        most_tokens + int(task.parameters["sentinel"]),
    )


def _added(task: Task) -> int:
    """Return how many special tokens are inserted at the pivot."""
    return int(task.parameters["sentinel"]) + int(task.parameters["eos_after_inputs"])


@kernel
def _draw_pivots(bodies, pivot):
    """Write the pivot of each body to `pivot`."""
    n, purpose = bodies.n, PIVOT if bodies.epoch == 0 else REDRAWN_PIVOT
    for i in range(n.shape[0]):
        # A supervised document has its pivot where training starts. Token 0 is always in the
        # prefix.
        if bodies.first_trained[i] >= 0:
            pivot[i] = max(bodies.first_trained[i], 1)
        else:
            # Prefix and continuation get at least one token each.
            pivot[i] = 1 + integer(bodies.key[i], purpose, 0, n[i] - 1, bodies.epoch)


@kernel
def _render(tokens, columns, pivot, added_ids, rows):
    """Write each segment's body to the flat rows, with `added_ids` inserted at its pivot."""
    for i in range(pivot.shape[0]):
        first_token, slot = columns.begin[i], columns.at[i]
        copy_items(rows, slot, tokens, first_token, pivot[i])
        slot += pivot[i]
        for k in range(added_ids.shape[0]):
            rows[slot] = added_ids[k]
            slot += 1
        copy_items(rows, slot, tokens, first_token + pivot[i], columns.bodies.n[i] - pivot[i])


@kernel
def _restore(rows, columns, pivot, added_ids, out, fits):
    """Read each body's tokens from the flat rows, and check that `added_ids` are at its pivot."""
    for i in range(pivot.shape[0]):
        first_token, slot = columns.begin[i], columns.at[i]
        for j in range(pivot[i]):
            out[first_token + j] = rows[slot + j]
        fits[i] = True
        for k in range(added_ids.shape[0]):
            fits[i] = fits[i] and rows[slot + pivot[i]] == added_ids[k]
            slot += 1
        for j in range(pivot[i], columns.bodies.n[i]):
            out[first_token + j] = rows[slot + j]


def _pivots_of(task: Task, bodies: Bodies) -> np.ndarray:
    """Return the number of tokens before each pivot, int64[m].

    The pivot of a supervised document is its first trained token, or token 1 if token 0 is trained.
    """
    pivot = np.empty(bodies.n.shape, np.int64)
    _draw_pivots(bodies._replace(epoch=0 if task.keeps_prefix else bodies.epoch), pivot)
    return pivot


def body_prefix(task: Task, bodies: Bodies) -> np.ndarray:
    """Return the number of slots of each body that are in the prefix.

    It is the number of tokens before the pivot, plus 1 if the task writes an eos after them.

    Args:
        task: The task.
        bodies: The bodies of m segments.

    Returns:
        int64[m].
    """
    return _pivots_of(task, bodies) + int(task.parameters["eos_after_inputs"])


def token_slots(task: Task, bodies: Bodies) -> np.ndarray:
    """Return each body's pivot, and the number of slots inserted before the pivot's token.

    Args:
        task: The task.
        bodies: The bodies of m segments.

    Returns:
        int64[m, 2].
    """
    return np.stack(
        (_pivots_of(task, bodies), np.full(bodies.n.shape, _added(task), np.int64)), axis=1
    )


def _ids_at_pivot(task: Task) -> np.ndarray:
    """Return the ids that the task writes at the pivot: eos, the sentinel, both or none, int32."""
    eos = [task.ids.eos] if task.parameters["eos_after_inputs"] else []
    return np.array([*eos, *task.ids.sentinels[: int(task.parameters["sentinel"])]], np.int32)


def render(task: Task, columns: BodySlots, tokens: np.ndarray, rows: np.ndarray) -> None:
    """Copy the tokens, and insert eos and the sentinel at the pivot if the task writes them.

    Args:
        task: The task.
        columns: The segments.
        tokens: int[Σ n], the flat tokens.
        rows: The flat rows, changed in place.
    """
    pivot = _pivots_of(task, columns.bodies)
    _render(tokens, columns, pivot, _ids_at_pivot(task), rows)


def restore(task: Task, columns: BodySlots, rows: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Copy the tokens back from the rows, without the special tokens at the pivot.

    Args:
        task: The task.
        columns: The segments.
        rows: The flat rows.
        out: The flat tokens, changed in place.

    Returns:
        bool[m], whether a body has its special tokens at the pivot.
    """
    fits = np.empty(columns.begin.shape, np.bool_)
    pivot = _pivots_of(task, columns.bodies)
    _restore(read_only(rows), columns, pivot, _ids_at_pivot(task), out, fits)
    return fits


def sentinels(parameters: Mapping[str, Any], n: int) -> int:
    """Return 1 if the task writes a sentinel at the pivot, otherwise 0.

    Args:
        parameters: The task's parameters.
        n: Tokens of a segment.

    Returns:
        The number of sentinels.
    """
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
