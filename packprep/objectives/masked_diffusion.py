"""masked_diffusion: tokens are replaced by the mask, each with the segment's probability, and predicted where they stood.

    tokens       10  11  12  13  14  15     t = .5, mask 99
    slots        99  11  99  13  99  99
    labels       10  11  12  13  14  15
    loss_mask     1   0   1   0   1   1
    prefix 6: every slot sees every other

LLaDA (Nie et al. 2025) and MDLM (Sahoo et al. 2024): t ~ U(0, 1), p = (1 − ε) t + ε, loss weight 1 / p. BERT's masking
is one level, .15, with shares 80/10/10; an exact count masks k = max(⌊ratio · candidates⌋, 1) without replacement, and
p is k / candidates.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from packprep.dataset import noise
from packprep.errors import RecipeError
from packprep.objectives.noising import mask
from packprep.objectives.objective import Objective, Parameter, Task


def roles(parameters: Mapping[str, Any]) -> frozenset[str]:
    """The mask, unless nothing becomes it."""
    return frozenset({"mask"} if parameters["replace"][0] > 0 else ())


def check(parameters: Mapping[str, Any], where: str) -> None:
    """An exact count is of a ratio, and needs one above 0 to weigh by."""
    low, high = parameters["noise_range"]
    if high == 0:
        raise RecipeError(
            f"{where}.noise_range = [{low:g}, {high:g}]: nothing would be masked; its end must be above 0"
        )
    if parameters["exact_count"] and low == 0:
        raise RecipeError(
            f"{where}.noise_range = [0, {high:g}]: with exact_count a ratio must be above 0, as in [0.15, 0.99]"
        )
    if parameters["exact_count"] and parameters["stratified"]:
        raise RecipeError(f"{where}: exact_count and stratified do not go together; leave one of them out")


def forecast(task: Task, n: int) -> dict[str, tuple[float, float]]:
    """The mean share of the tokens that is masked."""
    low, high = task.parameters["noise_range"]
    epsilon = 0.0 if task.parameters["exact_count"] else task.parameters["epsilon"]
    mean = (low + high) / 2
    return {"noise": (mean, (1 - epsilon) * mean + epsilon)}


def mean_weight(task: Task) -> float:
    """1 / mean p: each masked slot weighs 1 / p, and a share p is masked."""
    return 1.0 / forecast(task, 0)["noise"][1] if task.parameters["weighting"] == "1/p" else 1.0


OBJECTIVE = Objective(
    name="masked_diffusion",
    attention="bidirectional",
    constant=True,
    supervised=True,
    parameters=(
        Parameter("noise_range", (0.0, 1.0), "the level t of a segment is uniform over this", 0.0, 1.0),
        Parameter("epsilon", 1e-3, "p = (1 − ε) t + ε", 0.0, 1.0, high_open=True),
        Parameter("exact_count", False, "mask k = max(⌊t · candidates⌋, 1), p = k / candidates"),
        Parameter(
            "replace", (1.0, 0.0, 0.0), "shares of the chosen: mask, a random token, as it is", 0.0, 1.0, shares=True
        ),
        Parameter("stratified", False, "spread the levels of a row's segments evenly over the range"),
        Parameter("random_length", 0.0, "probability that a segment is cut to a uniform length", 0.0, 1.0),
        Parameter("weighting", "1/p", "the segment's loss weight: 1/p, or 1", choices=("1/p", "none")),
        Parameter("noise_eos", True, "eos may be masked: a model has to learn to end"),
    ),
    noise=partial(noise.masked_diffusion, write=mask),
    mean_weight=mean_weight,
    roles=roles,
    forecast=forecast,
    check=check,
)
