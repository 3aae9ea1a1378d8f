"""The registry of objectives, which turn a document's tokens into segments.

A built-in objective is a file with an `Objective` record, a line in the registry below, and a
section in docs/objectives.md. `register`, or an entry point of the group `packprep.objectives`,
adds an objective from outside the package.
"""

from importlib.metadata import entry_points

from packprep.errors import RecipeError
from packprep.objectives import (
    block_diffusion,
    causal,
    fill_in_the_middle,
    masked_diffusion,
    prefix_lm,
    span_corruption,
    uniform_diffusion,
)
from packprep.objectives.objective import Objective

REGISTRY: dict[str, Objective] = {
    objective.name: objective
    for objective in (
        causal.OBJECTIVE,
        prefix_lm.OBJECTIVE,
        span_corruption.OBJECTIVE,
        fill_in_the_middle.OBJECTIVE,
        masked_diffusion.OBJECTIVE,
        uniform_diffusion.OBJECTIVE,
        block_diffusion.OBJECTIVE,
    )
}

OWN = frozenset(REGISTRY)
"""The names of the built-in objectives."""


def register(objective: Objective) -> None:
    """Add an objective to the registry, for the recipes of this process.

    Args:
        objective: The objective. Recipes refer to it by its attribute `name`.

    Raises:
        RecipeError: If another objective has the same name.

    Example:
        packprep.objectives.register(Objective(name="reversed", attention="causal", …))
    """
    if REGISTRY.setdefault(objective.name, objective) is not objective:
        raise RecipeError(
            f"objective {objective.name!r} is already registered\nhint: choose another name"
        )


def find(name: str) -> Objective | None:
    """Return the objective that recipes call `name`, from the registry or an entry point.

    Args:
        name: The name in recipes.

    Returns:
        The objective, or None if the name is unknown.
    """
    if name not in REGISTRY:
        for entry_point in entry_points(group="packprep.objectives", name=name):
            register(entry_point.load())
    return REGISTRY.get(name)
