"""The recipe as a dataset stores it, and its fingerprint."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from packprep.dataset.json_files import LAW_VERSION, as_stored, encode, unknown_key
from packprep.digests import digest_of
from packprep.errors import RecipeError
from packprep.recipe.reading import check_together, read_section, read_value
from packprep.recipe.records import (
    SECTIONS,
    DocumentKeys,
    OutputKeys,
    Packing,
    Recipe,
    Source,
    Specials,
    TaskEntry,
    keys_of,
    later_keys,
)

_SECTION_OF = {record: section for section, record in SECTIONS.items()}


def normalised(recipe: Recipe) -> dict[str, Any]:
    """The recipe as a dataset stores it: defaults filled in but for those of keys that joined later, values in their types,
    presets expanded, and nothing of where its files lie (no paths, only the tokenizer's last path component) or of the
    engine."""
    table = asdict(recipe)
    for name in ("base", "engine"):
        del table[name]
    table["documents"]["chat_template"] = os.path.basename(recipe.documents.chat_template)
    table["tokenizer"] = os.path.basename(os.path.normpath(recipe.tokenizer))
    table["sources"] = [{k: v for k, v in source.items() if k != "paths"} for source in table["sources"]]
    for task in table["tasks"]:
        task["parameters"] = as_stored(task["parameters"], {"": task.pop("later")})
    return as_stored(table, later_keys())


def without_places(table: Mapping[str, Any]) -> dict[str, Any]:
    """A normalised recipe without the names of the files whose contents the fingerprint holds instead."""
    documents = {k: v for k, v in table["documents"].items() if k != "chat_template"}
    return {**{k: v for k, v in table.items() if k != "tokenizer"}, "documents": documents}


def fingerprint_parts(
    recipe: Recipe,
    files: Sequence[Sequence[tuple[str, int]]],
    tokenizer_digest: str,
    chat_template: str | None,
    law: int = LAW_VERSION,
) -> dict[str, Any]:
    """What determines the shards: the law, the recipe, each source's (relative name, size), the tokenizer's digest, and
    the chat template where there is one."""
    parts = {
        "law_version": law,
        "recipe": without_places(normalised(recipe)),
        "files": [[[name, size] for name, size in source] for source in files],
        "tokenizer": tokenizer_digest,
    }
    return parts if chat_template is None else {**parts, "chat_template": chat_template}


def fingerprint(parts: Mapping[str, Any]) -> str:
    """The xxh3-128 of the canonical JSON of `fingerprint_parts`."""
    return digest_of(encode(parts))


def from_normalised(table: Any, engine: str, made_with: Any = None) -> Recipe:
    """The recipe that a plan holds: `normalised` undone, but for the paths, which the plan's list of files replaces.

    made_with: the plan's. RecipeError for anything that `normalised` would not have given.
    """
    if not isinstance(table, dict):
        raise RecipeError(f"the recipe is {table!r:.100} and should be an object")
    sections = {name: table.get(name) for name in ("documents", "packing", "specials", "output", "sources", "tasks")}
    values = _stored(Recipe, {k: v for k, v in table.items() if k not in sections} | {"engine": engine}, "", made_with)
    sources = tuple(
        Source(**{**_stored(Source, {**entry, "paths": ["-"]}, f"sources[{i}]", made_with), "paths": ()})
        for i, entry in enumerate(_entries(sections["sources"], "sources"))
    )
    tasks = []
    for i, entry in enumerate(_entries(sections["tasks"], "tasks")):
        parameters = entry.get("parameters")
        if not isinstance(parameters, dict):
            raise RecipeError(f"tasks[{i}].parameters = {parameters!r:.100}: expected an object")
        rest = {name: value for name, value in entry.items() if name != "parameters"}
        tasks.append(TaskEntry(**_stored(TaskEntry, rest, f"tasks[{i}]", made_with), parameters=parameters))
    recipe = Recipe(
        sources=sources,
        documents=DocumentKeys(**_stored(DocumentKeys, sections["documents"], "documents", made_with)),
        packing=Packing(**_stored(Packing, sections["packing"], "packing", made_with)),
        specials=Specials(**_stored(Specials, sections["specials"], "specials", made_with)),
        tasks=tuple(tasks),
        output=OutputKeys(**_stored(OutputKeys, sections["output"], "output", made_with)),
        **values,
    )
    check_together(recipe)
    return recipe


def _entries(value: Any, where: str) -> Sequence[dict[str, Any]]:
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(entry, dict) for entry in value):
        raise RecipeError(f"{where} = {value!r:.100}: expected a list of objects, at least one")
    return value


def _stored(record: type, table: Any, where: str, made_with: Any) -> dict[str, Any]:
    """The checked values of a stored section, which has every key that did not join later; those that stand at a default of
    None keep it."""
    if not isinstance(table, dict):
        raise RecipeError(f"[{where}]: expected an object, found {table!r:.100}")
    keys = keys_of(record)
    strange = sorted(set(table) - set(keys))
    if strange:
        raise RecipeError(f"{where}: {unknown_key(strange[0], made_with)}".removeprefix(": "))
    table = {**later_keys()[_SECTION_OF[record]], **table}
    missing = sorted(set(keys) - set(table))
    if missing:
        raise RecipeError(f"{where}.{missing[0]} is missing".lstrip("."))
    at_none: dict[str, Any] = {name: None for name, key in keys.items() if table[name] is None and key.default is None}
    given = {name: value for name, value in table.items() if name not in at_none}
    if "mode_tokens" in given:  # an object of roles, which the kind tells of one
        tokens = given.pop("mode_tokens")
        if not isinstance(tokens, dict):
            raise RecipeError(f"{where}.mode_tokens = {tokens!r:.100}: expected an object")
        kind = keys["mode_tokens"].metadata["kind"]
        at_none["mode_tokens"] = {name: read_value(kind, role, f"{where}.{name}") for name, role in tokens.items()}
    return {**read_section(record, given, where), **at_none}
