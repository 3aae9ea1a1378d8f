"""TOKEN DOCUMENT → SEGMENT. One file an objective; this is their registry.

An objective is one file with an `Objective` record, one line in the registry below, and a section
in docs/objectives.md. Objectives from outside the package are added by `register` or by an entry
point of the group `packprep.objectives`.
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
"""The names of those that are packprep's own."""


def register(objective: Objective) -> None:
    """Add an objective under its name; RecipeError if the name is taken by another."""
    if REGISTRY.setdefault(objective.name, objective) is not objective:
        raise RecipeError(
            f"objective {objective.name!r} is registered already: choose another name"
        )


def find(name: str) -> Objective | None:
    """The objective of that name, from the registry or an installed entry point; None if there is
    none."""
    if name not in REGISTRY:
        for entry_point in entry_points(group="packprep.objectives", name=name):
            register(entry_point.load())
    return REGISTRY.get(name)
