"""The recipe: what to build. Frozen records (`records`) of checked values (`kinds`), read from TOML (`reading`), stored and
fingerprinted in normal form (`normal`). Presets are in presets.toml beside this file."""

from packprep.recipe.kinds import Kind, parse_size
from packprep.recipe.normal import fingerprint, fingerprint_parts, from_normalised, normalised, without_places
from packprep.recipe.places import line_of
from packprep.recipe.reading import (
    load_recipe,
    misplaced,
    presets,
    read_recipe,
    recipe_text,
    refuse_other_formats,
    set_value,
    split_assignment,
    tasks_named,
    unknown,
)
from packprep.recipe.records import (
    SECTIONS,
    DocumentKeys,
    OutputKeys,
    Packing,
    Recipe,
    Source,
    Specials,
    TaskEntry,
    default_of,
    keys_of,
    later_keys,
)

__all__ = [
    "SECTIONS",
    "DocumentKeys",
    "Kind",
    "OutputKeys",
    "Packing",
    "Recipe",
    "Source",
    "Specials",
    "TaskEntry",
    "default_of",
    "fingerprint",
    "fingerprint_parts",
    "from_normalised",
    "keys_of",
    "later_keys",
    "line_of",
    "load_recipe",
    "misplaced",
    "normalised",
    "parse_size",
    "presets",
    "read_recipe",
    "recipe_text",
    "refuse_other_formats",
    "set_value",
    "split_assignment",
    "tasks_named",
    "unknown",
    "without_places",
]
