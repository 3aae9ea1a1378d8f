"""causal: every slot predicts the token of the next slot.

tokens      10  11  12  13
slots       10  11  12  13
loss_mask    1   1   1   0
prefix 0
"""

import numpy as np

from packprep.kernel import copy_ranges
from packprep.objectives.objective import BodySlots, Objective, Task


def render(task: Task, columns: BodySlots, tokens: np.ndarray, rows: np.ndarray) -> None:
    """Copy the tokens to the rows.

    Args:
        task: The task.
        columns: The segments.
        tokens: int[Σ n], the flat tokens.
        rows: The flat rows, changed in place.
    """
    copy_ranges(tokens, columns.begin, columns.bodies.n, rows, columns.at)


def restore(task: Task, columns: BodySlots, rows: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Copy the tokens back from the rows.

    Args:
        task: The task.
        columns: The segments.
        rows: The flat rows.
        out: The flat tokens, changed in place.

    Returns:
        bool[m], all True.
    """
    copy_ranges(rows, columns.at, columns.bodies.n, out, columns.begin)
    return np.ones(columns.begin.shape, np.bool_)


OBJECTIVE = Objective(
    name="causal",
    attention="causal",
    constant=True,
    supervised=True,
    render=render,
    restore=restore,
)
