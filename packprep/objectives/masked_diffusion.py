"""masked_diffusion: the mask replaces tokens, and each slot predicts its original token.

    tokens       10  11  12  13  14  15     t = .5, mask 99
    slots        99  11  99  13  99  99
    labels       10  11  12  13  14  15
    loss_mask     1   0   1   0   1   1
    prefix 6: every slot sees all six slots

A segment's candidates are the slots that may be masked. They are masked with the same probability
p. LLaDA (Nie et al. 2025) and MDLM (Sahoo et al. 2024) draw t ~ U(0, 1) and use p = (1 − ε) t + ε
with loss weight 1 / p. BERT always uses p = .15. It masks 80 % of the chosen tokens, replaces 10 %
with ordinary tokens, and leaves 10 % unchanged. With `exact_count`, the number of masked candidates
is not random: it is k = max(⌊ratio · candidates⌋, 1), and p is k / candidates.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from packprep.dataset.epochs.noise import MASKED_DIFFUSION as SCHEDULE
from packprep.errors import RecipeError
from packprep.objectives.noising import mask
from packprep.objectives.objective import Objective, Task


def roles(parameters: Mapping[str, Any]) -> frozenset[str]:
    """Return {"mask"} if the task may replace tokens with the mask, otherwise an empty set."""
    return SCHEDULE.needs(parameters) & {"mask"}


def check(parameters: Mapping[str, Any], where: str) -> None:
    """Check that noise_range ends above 0, and that exact_count fits the other parameters.

    Args:
        parameters: The task's parameters.
        where: The task's name, for error messages.

    Raises:
        RecipeError: If noise_range ends at 0. It is also raised if exact_count is combined with
            `stratified`, or with a noise_range that starts at 0.
    """
    low, high = parameters["noise_range"]
    if high == 0:
        raise RecipeError(
            f"{where}.noise_range = [{low:g}, {high:g}]: nothing would be masked, so its end must"
            " be above 0\n"
            "hint: give an end above 0, as in [0, 1]"
        )
    if parameters["exact_count"] and low == 0:
        raise RecipeError(
            f"{where}.noise_range = [0, {high:g}]: exact_count requires ratios above 0\n"
            "hint: give a start above 0, as in [0.15, 0.99]"
        )
    if parameters["exact_count"] and parameters["stratified"]:
        raise RecipeError(
            f"{where}: exact_count and stratified cannot be combined\nhint: leave one of them out"
        )


def forecast(task: Task, n: int) -> dict[str, tuple[float, float]]:
    """Return the wanted and the realized mean share of masked tokens.

    The realized share is (1 − ε) · wanted + ε, with ε = 0 for an exact count.

    Args:
        task: The task.
        n: Tokens of a segment.

    Returns:
        {"noise": (wanted, realized)}.
    """
    low, high = task.parameters["noise_range"]
    epsilon = 0.0 if task.parameters["exact_count"] else task.parameters["epsilon"]
    mean = (low + high) / 2
    return {"noise": (mean, (1 - epsilon) * mean + epsilon)}


def mean_weight(task: Task) -> float:
    """Return the mean loss weight of a masked slot.

    It is 1 / mean p if `weighting` is "1/p", because a segment with probability p has a share p of
    its slots masked, each with weight 1 / p. Otherwise the mean weight is 1.
    """
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
