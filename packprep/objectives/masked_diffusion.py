"""masked_diffusion: tokens are replaced by the mask, each with the segment's probability, and
predicted where they stood.

    tokens       10  11  12  13  14  15     t = .5, mask 99
    slots        99  11  99  13  99  99
    labels       10  11  12  13  14  15
    loss_mask     1   0   1   0   1   1
    prefix 6: every slot sees every other

LLaDA (Nie et al. 2025) and MDLM (Sahoo et al. 2024): t ~ U(0, 1), p = (1 − ε) t + ε, loss weight 1
/ p. BERT's masking is one level, .15, with shares 80/10/10; an exact count masks k = max(⌊ratio ·
candidates⌋, 1) without replacement, and p is k / candidates.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from packprep.dataset.epochs.noise import MASKED_DIFFUSION as SCHEDULE
from packprep.errors import RecipeError
from packprep.objectives.noising import mask
from packprep.objectives.objective import Objective, Task


def roles(parameters: Mapping[str, Any]) -> frozenset[str]:
    """Return the mask, unless no slot becomes the mask."""
    return SCHEDULE.needs(parameters) & {"mask"}


def check(parameters: Mapping[str, Any], where: str) -> None:
    """Raise RecipeError for a range without masks, or options that exact_count excludes."""
    low, high = parameters["noise_range"]
    if high == 0:
        raise RecipeError(
            f"{where}.noise_range = [{low:g}, {high:g}]: nothing would be masked; its end must be"
            " above 0"
        )
    if parameters["exact_count"] and low == 0:
        raise RecipeError(
            f"{where}.noise_range = [0, {high:g}]: with exact_count a ratio must be above 0, as in"
            " [0.15, 0.99]"
        )
    if parameters["exact_count"] and parameters["stratified"]:
        raise RecipeError(
            f"{where}: exact_count and stratified do not go together; leave one of them out"
        )


def forecast(task: Task, n: int) -> dict[str, tuple[float, float]]:
    """Return the mean share of the tokens that is masked."""
    low, high = task.parameters["noise_range"]
    epsilon = 0.0 if task.parameters["exact_count"] else task.parameters["epsilon"]
    mean = (low + high) / 2
    return {"noise": (mean, (1 - epsilon) * mean + epsilon)}


def mean_weight(task: Task) -> float:
    """Return 1 / mean p: each masked slot weighs 1 / p, and a share p is masked."""
    return 1.0 / forecast(task, 0)["noise"][1] if task.parameters["weighting"] == "1/p" else 1.0


OBJECTIVE = Objective(
    name=SCHEDULE.name,
    attention=SCHEDULE.attention,
    constant=True,
    supervised=True,
    parameters=SCHEDULE.parameters,
    noise=partial(SCHEDULE.draw, write=mask),
    mean_weight=mean_weight,
    roles=roles,
    forecast=forecast,
    check=check,
)
