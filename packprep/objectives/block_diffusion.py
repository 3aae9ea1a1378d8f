"""block_diffusion: the segment twice, noised and clean; each noised block sees itself and the clean blocks before it.

    tokens       10  11  12  13             block_length 2, mask 99
    slots        99  11  12  99 | 10  11  12  13
    block         0   0   1   1 |  0   0   1   1
    labels       10  11  12  13 | 10  11  12  13
    loss_mask     1   0   0   1 |  0   0   0   0
    prefix −1: attention follows block_mask

BD3-LM (Arriola et al. 2025): one level a block from a clipped range, loss weight 1 / level. Blocks count inside the segment,
bos and mode token included; the last may be short.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from packprep.dataset.noise import BLOCK_DIFFUSION as LAW
from packprep.errors import RecipeError
from packprep.objectives.noising import mask_blocks
from packprep.objectives.objective import Objective, Task


def check(parameters: Mapping[str, Any], where: str) -> None:
    """Weights are 1 / level."""
    low, high = parameters["noise_range"]
    if low < LAW.least:
        raise RecipeError(f"{where}.noise_range = [{low:g}, {high:g}]: weights are 1 / level; it must begin above 0")


def forecast(task: Task, n: int) -> dict[str, tuple[float, float]]:
    """The mean share of the tokens that is masked."""
    mean = sum(task.parameters["noise_range"]) / 2
    return {"noise": (mean, mean)}


def mean_weight(task: Task) -> float:
    """1 / mean level."""
    return 2.0 / sum(task.parameters["noise_range"])


def expected(task: Task, level: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """float64[m]: the level."""
    return level.astype(np.float64)


OBJECTIVE = Objective(
    name=LAW.name,
    attention=LAW.attention,
    parameters=LAW.parameters,
    noise=partial(LAW.draw, write=mask_blocks),
    mean_weight=mean_weight,
    roles=LAW.needs,
    forecast=forecast,
    check=check,
    expected=expected,
)
