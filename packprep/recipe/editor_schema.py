"""Generate a JSON schema of recipes from the declaration in schema.py. Editors use the schema."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from packprep.recipe.schema import KEYS, SECTIONS, Role


def json_schema(
    presets: Sequence[str], objectives: Mapping[str, Mapping[str, Any]], formats: Sequence[str]
) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of recipes. Editors check recipes with it.

    The schema accepts every valid recipe. It rejects only errors in a single key: its name, type or
    range.

    Args:
        presets: The names of the presets.
        objectives: {objective: {parameter: schema of the parameter}}. Tasks with other objectives
            may have any keys.
        formats: The names of the source formats.
    """
    shared: dict[str, Any] = {}
    tables = {section: _table_schema(section, shared) for section in SECTIONS}
    root, task = tables.pop(""), tables["tasks"]
    tables["sources"]["properties"]["format"]["enum"] = list(formats)
    for section in ("sources", "tasks"):
        tables[section] = {"type": "array", "minItems": 1, "items": tables[section]}
    mode_token = {
        **msgspec.json.schema(Role),
        "description": KEYS["specials"]["mode_tokens"].meaning,
    }
    # This pattern matches every text except a bare word, because mode tokens have brackets.
    tables["specials"]["patternProperties"] = {"^$|^[^A-Za-z_]|[^A-Za-z0-9_]": mode_token}

    # A task has either a preset or an objective, and each form allows other keys.
    keys, required = task.pop("properties"), task.pop("required")
    del task["additionalProperties"]
    # An editor offers the values of the first alternative.
    keys["objective"]["anyOf"] = [{"enum": list(objectives)}, {"type": "string"}]
    preset = {
        "title": "a text",
        "description": "a list of tasks by its name",
        "enum": list(presets),
    }
    task["if"] = {"required": ["preset"]}
    task["then"] = {
        "properties": {"preset": preset, "weight": keys["weight"]},
        "additionalProperties": False,
    }
    task["else"] = {
        "properties": keys,
        "required": required,
        "allOf": [
            {
                "if": {"properties": {"objective": {"const": name}}, "required": ["objective"]},
                "then": {
                    "properties": {**dict.fromkeys(keys, True), **parameters},
                    "additionalProperties": False,
                },
            }
            for name, parameters in objectives.items()
        ],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **root,
        "title": "A recipe of packprep",
        "properties": {**root["properties"], **tables},
        "required": [*root["required"], "sources"],
        "$defs": shared,
    }


def _table_schema(section: str, shared: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a section's table.

    `shared` receives the definitions that the schema refers to.
    """
    keys = {name: key for name, key in KEYS[section].items() if name != "mode_tokens"}
    properties = {}
    for name, key in keys.items():
        about, schema = (
            {"title": key.kind, "description": key.meaning},
            msgspec.json.schema(key.given),
        )
        shared.update(schema.pop("$defs", {}))
        # A file cannot contain lone surrogates, and not every editor can express them in a pattern.
        if "pattern" in schema:
            schema["pattern"] = schema["pattern"].replace(r"\ud800-\udfff", "")
        # Merging `about` twice puts its keys first and lets them override the keys of msgspec.
        properties[name] = about | schema | about
        if key.default not in (..., None, ""):
            properties[name]["default"] = key.default
    return {
        "title": f"[{section}]",
        "type": "object",
        "properties": properties,
        "required": [name for name, key in keys.items() if key.default is ...],
        "additionalProperties": False,
    }
