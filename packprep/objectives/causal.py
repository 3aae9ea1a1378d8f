"""causal: every slot predicts the next one.

tokens      10  11  12  13
slots       10  11  12  13
loss_mask    1   1   1   0
prefix 0
"""

import numpy as np

from packprep.kernel import kernel
from packprep.objectives.objective import Columns, Objective, Slots, Task


def body_slots(task: Task, n: np.ndarray, key: np.ndarray) -> np.ndarray:
    """n."""
    return n


def most_body_slots(task: Task, n: int) -> int:
    """n."""
    return n


@kernel
def _copy(source, source_begin, n, target, target_begin):
    """Copy n[i] items from source[source_begin[i]:] to target[target_begin[i]:]."""
    for i in range(n.shape[0]):
        s, t = source_begin[i], target_begin[i]
        for j in range(n[i]):
            target[t + j] = source[s + j]


def render(task: Task, columns: Columns, tokens: np.ndarray, slots: Slots) -> None:
    """Copies the tokens."""
    _copy(tokens, columns.begin, columns.n, slots.tokens, columns.body)


def restore(task: Task, columns: Columns, rows: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Copies the body back."""
    _copy(rows, columns.body, columns.n, out, columns.begin)
    return np.ones(columns.n.shape, np.bool_)


OBJECTIVE = Objective(
    name="causal",
    attention="causal",
    label_alignment="next_token",
    constant=True,
    parameters=(),
    body_slots=body_slots,
    most_body_slots=most_body_slots,
    render=render,
    restore=restore,
)
