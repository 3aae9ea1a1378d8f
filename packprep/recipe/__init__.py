"""The recipe, which describes a dataset to build.

`schema` declares the keys of a recipe. `from_toml` reads a recipe from TOML, and computes its
stored form and its fingerprint. The presets are in presets.toml in this folder.
"""

from packprep.recipe.editor_schema import json_schema
from packprep.recipe.from_toml import (
    as_toml,
    fingerprint,
    from_normalised,
    load_recipe,
    misplaced,
    normalised,
    normalised_toml,
    presets,
    read_recipe,
    recipe_text,
    refuse_misnamed_recipes,
    set_value,
    split_assignment,
    tasks_named,
    unknown,
    without_places,
)
from packprep.recipe.places import line_of
from packprep.recipe.schema import (
    KEYS,
    LATER,
    DocumentKeys,
    OutputKeys,
    Packing,
    Recipe,
    Source,
    Specials,
    TaskEntry,
    parse_size,
)

__all__ = [
    "KEYS",
    "LATER",
    "DocumentKeys",
    "OutputKeys",
    "Packing",
    "Recipe",
    "Source",
    "Specials",
    "TaskEntry",
    "as_toml",
    "fingerprint",
    "from_normalised",
    "json_schema",
    "line_of",
    "load_recipe",
    "misplaced",
    "normalised",
    "normalised_toml",
    "parse_size",
    "presets",
    "read_recipe",
    "recipe_text",
    "refuse_misnamed_recipes",
    "set_value",
    "split_assignment",
    "tasks_named",
    "unknown",
    "without_places",
]
