"""Read and check recipes in TOML, convert them to their stored form, and compute fingerprints.

Every key is checked once, before work starts.
"""

import difflib
import json
import math
import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from packprep.errors import RecipeError
from packprep.format.digests import digest_of
from packprep.format.json_files import LAW_VERSION, as_stored, encode, unknown_key
from packprep.recipe.places import KeyPath, key_of
from packprep.recipe.schema import (
    KEYS,
    LATER,
    MOST,
    MOST_DRAWS,
    SECTIONS,
    Key,
    Recipe,
    Source,
    TaskEntry,
)


def unknown(kind: str, name: str, known_names: Sequence[str]) -> str:
    """Return the start of a message: "unknown key 'sed'; did you mean 'seed'?".

    Without a similar name in `known_names`, the message lists all known names. `kind` is the kind
    of name, such as "key".
    """
    near = difflib.get_close_matches(name, known_names, 1, 0.5)
    return f"unknown {kind} {name!r}" + (
        f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known_names))}"
    )


def misplaced(name: str) -> str:
    """Return the part of a message that says where the key `name` belongs.

    For example, "repeat is a key of [sources]: put it under that header". Return "" if no key or
    section has this name.
    """
    if name in SECTIONS:
        brackets = f"[[{name}]]" if name in ("sources", "tasks") else f"[{name}]"
        return f"{name} is a table: write {brackets} at the start of a line, and its keys below it"
    homes = [section for section, keys in KEYS.items() if name in keys]
    if "" in homes:
        return (
            f"{name} is a key of the recipe itself: put it above the first [header], because TOML"
            " gives a key to the header above it"
        )
    return f"{name} is a key of [{homes[0]}]: put it under that header" if homes else ""


def read_value(key: Key, value: Any, where: str) -> Any:
    """Check a value of a recipe, and return it in the form that the recipe's record stores.

    `where` is the location of the key in messages.

    Raises:
        RecipeError: If the key does not accept the value. The message has the location, the value
            and the accepted values.
    """
    try:
        return key.accept(value)
    except ValueError:
        shown = str(value).lower() if isinstance(value, bool) else f"{value!r:.500}"
        raise RecipeError(
            f"{where} = {shown}: expected {key.kind}{_meant(key, value)}", key_of(where)
        ) from None


def _meant(key: Key, value: Any) -> str:
    """Return a hint that suggests a similar valid value, or "" if there is none.

    Examples are 512 for 512.0 or "512", false for "False", and best_fit for "bestfit".
    """
    written = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    if isinstance(value, str | float) and len(written) < 100:
        for text in (written, written.lower()):
            try:
                key.accept(tomllib.loads(f"value = {text}")["value"])
            except ValueError:  # A TOMLDecodeError is a ValueError.
                continue
            return f"\nhint: write {text}{', without quotes' if isinstance(value, str) else ''}"
    near = difflib.get_close_matches(written, key.kind.split(" | "), 1) if " | " in key.kind else []
    return f"\nhint: did you mean {near[0]!r}?" if near else ""


_OTHERS = {"specials": "mode_tokens", "tasks": "parameters"}
"""{section: field}: the field of the section's record that stores undeclared keys."""


def read_section(section: str, table: Any, where: str) -> dict[str, Any]:
    """Return the checked values of a section's table.

    Args:
        section: The name of the section.
        table: The table.
        where: The table's location in messages.

    Raises:
        RecipeError: If a key is unknown, missing or has an invalid value.
    """
    if not isinstance(table, dict):
        brackets = f"\nhint: write [{where}], with one bracket" if isinstance(table, list) else ""
        raise RecipeError(
            f"[{where}]: expected a table of keys, found {table!r:.100}{brackets}", key_of(where)
        )
    # A mode token is itself a key of [specials], so the field mode_tokens is not a key of a recipe.
    keys = {name: key for name, key in KEYS[section].items() if name != "mode_tokens"}
    values, other_values = {}, {}
    for name, value in table.items():
        if name in keys:
            values[name] = read_value(keys[name], value, f"{where}.{name}" if where else name)
        # Which other keys a task may have depends on its objective. `complete` checks them later.
        elif section == "tasks":
            other_values[name] = value
        # A mode token has brackets, so a bare word is an unknown key.
        elif section == "specials" and not name.isidentifier():
            other_values[name] = read_value(
                KEYS[section]["mode_tokens"], value, f'specials."{name}"'
            )
        else:
            known_keys = [*keys, *([] if where else [name for name in SECTIONS if name])]
            message = (
                f"unknown key {name!r}: {misplaced(name)}"
                if misplaced(name)
                else unknown("key", name, known_keys)
            )
            quoted = (
                "; write a mode token in quotes, with its brackets" if section == "specials" else ""
            )
            raise RecipeError(
                f"{message} (in {f'[{where}]' if where else 'the recipe'}{quoted})",
                (*key_of(where), name),
            )
    # Report an unknown key first, because a misspelled key often explains a missing one.
    for name, key in keys.items():
        if name not in values and key.default is ...:
            place = f"{where}.{name}" if where else name
            raise RecipeError(
                f"{place} is missing: {key.meaning}\nhint: add a line {name} = …", key_of(place)
            )
    return {**values, _OTHERS[section]: other_values} if section in _OTHERS else values


@cache
def presets() -> dict[str, list[dict[str, Any]]]:
    """Return {name of a preset: list of its task tables} from presets.toml."""
    return tomllib.loads((Path(__file__).with_name("presets.toml")).read_text("utf-8"))


def _read_tasks(tables: Sequence[Any]) -> tuple[TaskEntry, ...]:
    entries: list[TaskEntry] = []
    names: set[str] = set()
    for i, table in enumerate(tables):
        where = f"tasks[{i}]"
        if not isinstance(table, dict):
            raise RecipeError(
                f"{where}: expected a table, found {table!r:.100}\nhint: {_TWO_BRACKETS}",
                ("tasks", i),
            )
        preset = table.get("preset")
        if preset is None:
            _check_named(table, where, i)
            members, scale, prefix = [table], 1.0, ""
        else:
            other_keys = [name for name in table if name not in ("preset", "weight")]
            if other_keys:
                hint = misplaced(other_keys[0]) if other_keys[0] not in KEYS["tasks"] else ""
                raise RecipeError(
                    f"{where}: a preset takes only a weight, not {', '.join(other_keys)}\nhint: "
                    + (hint or "write out its tasks to change them"),
                    ("tasks", i, other_keys[0]),
                )
            if not isinstance(preset, str) or preset not in presets():
                raise RecipeError(
                    f"{where}: {unknown('preset', str(preset), list(presets()))}",
                    ("tasks", i, "preset"),
                )
            # The weight of a preset is divided among its tasks in their own proportions.
            members, prefix = presets()[preset], f"{preset}."
            weight = read_value(
                KEYS["tasks"]["weight"], table.get("weight", 1.0), f"{where}.weight"
            )
            scale = weight / math.fsum(m.get("weight", 1.0) for m in members)
        for member in members:
            values = read_section("tasks", member, where)
            # A task of a preset gets the preset's name as a prefix only if its own name is taken.
            name = values.get("name") or values["objective"]
            if name in names and prefix:
                name = prefix + name
            if name in names or name == "too_short":
                raise RecipeError(
                    f"{where}.name = {name!r} is already taken\nhint: give each task its own name",
                    ("tasks", i, "name"),
                )
            names.add(name)
            values["name"] = name
            values["weight"] = values.get("weight", 1.0) * scale
            entries.append(TaskEntry(**values))
    return tuple(entries)


_TWO_BRACKETS = "write a list of tables with two brackets, [[tasks]] or [[sources]], once per table"


def _check_named(table: Mapping[str, Any], where: str, i: int) -> None:
    """Check that entry number `i` of `[[tasks]]` has a preset or an objective.

    Raises:
        RecipeError: If the entry has neither.
    """
    if "objective" in table:
        return
    known_keys = ["preset", *KEYS["tasks"]]
    other_keys = [name for name in table if name not in known_keys]
    message = f"; {unknown('key', other_keys[0], known_keys)}" if other_keys else ""
    raise RecipeError(
        f"{where} has neither an objective nor a preset{message}\n"
        'hint: give one, as in preset = "ul2r"',
        ("tasks", i, *other_keys[:1]),
    )


def read_recipe(table: Mapping[str, Any], base: Path) -> Recipe:
    """Return the recipe that a TOML table describes. Relative paths start at the folder `base`.

    Raises:
        RecipeError: If a key or a value is invalid. The message names the key and the value.
    """
    top_level = {name: value for name, value in table.items() if name not in SECTIONS or not name}
    values = read_section("", top_level, "")
    for section in ("documents", "packing", "output", "specials"):
        values[section] = SECTIONS[section](
            **read_section(section, table.get(section, {}), section)
        )
    lists = {
        "sources": table.get("sources", []),
        "tasks": table.get("tasks", [{"preset": "causal"}]),
    }
    for name, tables in lists.items():
        if not isinstance(tables, list):
            raise RecipeError(
                f"{name}: expected [[{name}]] tables, found {tables!r:.100}\nhint: {_TWO_BRACKETS}",
                (name,),
            )
        if len(tables) > MOST[name]:
            raise RecipeError(_TOO_MANY[name].format(len(tables)), (name,))
    values["sources"] = _read_sources(lists["sources"])
    values["tasks"] = _read_tasks(lists["tasks"])
    if not values["tasks"]:
        raise RecipeError(
            "tasks is empty\nhint: give at least one [[tasks]], or leave it out for causal",
            ("tasks",),
        )
    if (sides := values["packing"].sides) is not None and "seq_lengths" not in values:
        values.setdefault("seq_length", sum(sides))
        # A shorter document could not be split into an input and a target.
        if "min_tokens" not in table.get("documents", {}):
            values["documents"] = replace(values["documents"], min_tokens=3)
    if values.get("seq_lengths"):
        values.setdefault("seq_length", 0)
    recipe = Recipe(base=base, **values)
    # Each row length must satisfy the rules, because each gives a dataset.
    for recipe_of_length in recipe.by_length():
        check_together(recipe_of_length)
    return recipe


def _read_sources(tables: Sequence[Any]) -> tuple[Source, ...]:
    if not tables:
        raise RecipeError(
            'the recipe has no [[sources]]\nhint: give at least one with paths = ["data/*.jsonl"]'
        )
    sources: list[Source] = []
    names: set[str] = set()
    for i, source in enumerate(tables):
        values = read_section("sources", source, f"sources[{i}]")
        values["name"] = values.get("name") or f"source{i}"
        if values["name"] in names:
            raise RecipeError(
                f"sources[{i}].name = {values['name']!r} is already taken\n"
                "hint: give each source its own name",
                ("sources", i, "name"),
            )
        names.add(values["name"])
        # All files of a source are below one prefix, which is a folder or a URL.
        if any("://" in p for p in values["paths"]) and not all(
            "://" in p for p in values["paths"]
        ):
            raise RecipeError(
                f"sources[{i}].paths mixes URLs and local paths\nhint: make two sources of it",
                ("sources", i, "paths"),
            )
        if "share" in values and "repeat" in values:
            raise RecipeError(
                f"sources[{i}] has both repeat and share, but a source can only have one of"
                " them\n"
                "hint: take one out",
                ("sources", i, "repeat"),
            )
        sources.append(Source(**values))
    # A share is relative to the other sources, so either all sources have one or none has.
    with_share = [s.share is not None for s in sources]
    if any(with_share) and not all(with_share):
        missing = ", ".join(s.name for s in sources if s.share is None)
        raise RecipeError(
            f"share is given for some sources, but not for {missing}\n"
            "hint: give it in every source or in none",
            ("sources", with_share.index(False)),
        )
    return tuple(sources)


_TOO_MANY = {
    "sources": (
        f"{{}} sources: a dataset has at most {MOST['sources']}\n"
        "hint: give more paths to fewer sources"
    ),
    "tasks": f"{{}} tasks: a dataset has at most {MOST['tasks']}\nhint: leave some out",
}


def check_together(recipe: Recipe) -> None:
    """Check the rules that involve several keys.

    Raises:
        RecipeError: If keys do not fit together.
    """
    # Limit the sizes first, because later steps make tables of sources and tasks.
    for name, count in (("sources", len(recipe.sources)), ("tasks", len(recipe.tasks))):
        if count > MOST[name]:
            raise RecipeError(_TOO_MANY[name].format(count), (name,))
    draws = len(recipe.tasks) * sum(max(1, len(source.tasks or ())) for source in recipe.sources)
    if draws > MOST_DRAWS:
        raise RecipeError(
            f"{len(recipe.sources)} sources that draw from {len(recipe.tasks)} tasks: a dataset"
            f" has at most {MOST_DRAWS} pairs of them\n"
            "hint: give more paths to fewer sources, or leave tasks out",
            ("tasks",),
        )
    _check_sides(recipe)
    # Check the row length, and the keys that depend on it.
    if recipe.seq_length % 8:
        low = recipe.seq_length // 8 * 8
        raise RecipeError(
            f"seq_length = {recipe.seq_length} is not a multiple of 8\n"
            f"hint: use {low} or {low + 8}",
            ("seq_length",),
        )
    if recipe.seq_length not in recipe.lengths:
        raise RecipeError(
            f"seq_length = {recipe.seq_length} is not one of seq_lengths ="
            f" {list(recipe.lengths)}\n"
            "hint: give one of them, or leave seq_length out for all",
            ("seq_length",),
        )
    if recipe.seq_lengths and recipe.packing.algorithm == "concat":
        raise RecipeError(
            'packing.algorithm = "concat" does not support seq_lengths, because it cuts at row'
            " ends\n"
            'hint: use "best_fit"',
            ("packing", "algorithm"),
        )
    if recipe.documents.long == "decompose" and not recipe.seq_lengths:
        raise RecipeError(
            'documents.long = "decompose" requires rows of several lengths\n'
            "hint: give seq_lengths, as in seq_lengths = [2048, 8192]",
            ("documents", "long"),
        )
    if recipe.documents.trained_turns == "each":
        _check_each_turn(recipe)
    mult = recipe.packing.pad_seq_to_mult
    if recipe.seq_length % mult:
        raise RecipeError(
            f"packing.pad_seq_to_mult = {mult} does not divide seq_length = {recipe.seq_length}\n"
            "hint: use a divisor, or seq_length ="
            f" {max(recipe.seq_length // math.lcm(mult, 8), 1) * math.lcm(mult, 8)}",
            ("packing", "pad_seq_to_mult"),
        )
    # Check that nothing needs gaps or whole segments, if concat cuts at row ends.
    if mult > 1 and recipe.packing.algorithm == "concat":
        raise RecipeError(
            "packing.pad_seq_to_mult does not support concat, which leaves no gaps between"
            " segments\n"
            "hint: use best_fit, first_fit or next_fit",
            ("packing", "pad_seq_to_mult"),
        )
    if recipe.specials.media and recipe.packing.algorithm == "concat":
        raise RecipeError(
            "specials.media: concat would cut through media, because it cuts at row ends\n"
            'hint: use packing.algorithm = "best_fit"',
            ("packing", "algorithm"),
        )
    if recipe.specials.media and recipe.documents.loss_spans == "ignore":
        raise RecipeError(
            'specials.media requires documents.loss_spans = "use", but it is "ignore". Media are'
            " not trained, which loss spans express\n"
            "hint: leave loss_spans out",
            ("documents", "loss_spans"),
        )
    # Check the shares, groups and task names of the sources.
    if recipe.total_tokens and recipe.sources[0].share is None:
        raise RecipeError(
            "total_tokens requires share\n"
            "hint: give each source a share, or leave total_tokens out",
            ("total_tokens",),
        )
    names = [task.name for task in recipe.tasks]
    for i, source in enumerate(recipe.sources):
        _check_group(source, i)
        for name in source.tasks or ():
            if not tasks_named(name, names):
                raise RecipeError(
                    f"sources[{i}].tasks: {unknown('task', name, names)}", ("sources", i, "tasks")
                )


_GROUPED_FORMATS = ("auto", "jsonl", "parquet", "arrow")


def _check_group(source: Source, i: int) -> None:
    """Check the keys of source number `i` that do not work with or without group_by.

    Raises:
        RecipeError: If one of these keys is set.
    """
    for key in ("order_by", "between"):
        if getattr(source, key) and not source.group_by:
            raise RecipeError(
                f"sources[{i}].{key} requires group_by\n"
                'hint: name the field that documents have in common, as in group_by = "repo"',
                ("sources", i, key),
            )
    if source.group_by and source.format not in _GROUPED_FORMATS:
        raise RecipeError(
            f'sources[{i}].group_by does not support format = "{source.format}", because it joins'
            " texts by a field of their records\n"
            "hint: give JSON Lines, Parquet or Arrow files of texts, or leave group_by out",
            ("sources", i, "group_by"),
        )
    for key in ("where", "repeat"):
        if source.group_by and isinstance(getattr(source, key), str):
            raise RecipeError(
                f"sources[{i}].group_by joins records, but {key} selects single records\n"
                "hint: write the selected records to files of their own, or leave one of them out",
                ("sources", i, "group_by"),
            )
    if source.group_by and source.messages_format != "auto":
        raise RecipeError(
            f"sources[{i}].group_by does not join conversations, but messages_format ="
            f' "{source.messages_format}"\n'
            "hint: leave one of them out",
            ("sources", i, "group_by"),
        )


def _check_each_turn(recipe: Recipe) -> None:
    """Check the keys that do not work with trained_turns = "each".

    Raises:
        RecipeError: If one of these keys is set.
    """
    if recipe.documents.prepend_bos:
        raise RecipeError(
            'documents.prepend_bos = true is not supported with trained_turns = "each"\n'
            "hint: let the chat template write bos, and set prepend_bos = false",
            ("documents", "prepend_bos"),
        )
    if recipe.seq_lengths:
        raise RecipeError(
            'seq_lengths is not supported with documents.trained_turns = "each"\n'
            "hint: give one seq_length",
            ("seq_lengths",),
        )
    if recipe.specials.media:
        raise RecipeError(
            'specials.media is not supported with documents.trained_turns = "each", because'
            " every text of a document would repeat its media\n"
            'hint: set trained_turns = "all", or leave specials.media out',
            ("documents", "trained_turns"),
        )


def _check_sides(recipe: Recipe) -> None:
    """Check the keys that have a restriction if rows have an encoder and a decoder sequence.

    Raises:
        RecipeError: If only one of encoder_length and decoder_length is set, or if another key does
            not allow such rows.
    """
    packing = recipe.packing
    for name, partner in (
        ("encoder_length", "decoder_length"),
        ("decoder_length", "encoder_length"),
    ):
        if getattr(packing, name) and not getattr(packing, partner):
            raise RecipeError(
                f"packing.{name} is set, but packing.{partner} is not\nhint: set both",
                ("packing", name),
            )
    # Each entry has the value of a key, the value that such rows need, and the reason.
    requirements: dict[KeyPath, tuple[Any, Any, str]] = {
        ("seq_lengths",): (
            recipe.seq_lengths,
            None,
            "rows of several lengths have only one sequence",
        ),
        ("seq_length",): (recipe.seq_length, sum(packing.sides or ()), "it is their sum"),
        ("packing", "algorithm"): (
            packing.algorithm,
            "best_fit",
            "encoder and decoder rows are packed by best_fit",
        ),
        ("packing", "pad_seq_to_mult"): (
            packing.pad_seq_to_mult,
            1,
            "segments of encoder and decoder rows are not padded",
        ),
        ("documents", "min_tokens"): (
            recipe.documents.min_tokens,
            recipe.min_tail,
            "fewer than 3 tokens have only one sequence",
        ),
    }
    for key, (setting, needed, why) in requirements.items():
        if packing.sides is not None and setting != needed:
            conflict = (
                f"{'.'.join(map(str, key))} = {as_toml(setting)} cannot be combined with"
                " packing.encoder_length and decoder_length"
            )
            raise RecipeError(f"{conflict}: {why}\nhint: leave {key[-1]} out", key)


def tasks_named(name: str, names: Sequence[str]) -> list[int]:
    """Return the indices of the tasks whose name is `name` or starts with `name` and "-".

    `names` are the names of all tasks.
    """
    return [i for i, task in enumerate(names) if task == name or task.startswith(name + "-")]


def normalised(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe in the form that a dataset stores.

    Presets are expanded, and values have their final types. Keys that the recipe does not set have
    their defaults, but keys that later versions added are left out if they have their defaults. The
    paths of sources, the folder of the recipe and the engine are left out. For the tokenizer and
    the chat template, only the last component of the path is kept.
    """
    table = asdict(recipe)
    for name in ("base", "engine"):
        del table[name]
    table["documents"]["chat_template"] = os.path.basename(recipe.documents.chat_template)
    table["tokenizer"] = os.path.basename(os.path.normpath(recipe.tokenizer))
    table["sources"] = [
        {k: v for k, v in source.items() if k != "paths"} for source in table["sources"]
    ]
    for task in table["tasks"]:
        task["parameters"] = as_stored(task["parameters"], {"": task.pop("later")})
    return as_stored(table, LATER)


def without_places(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a normalised recipe without the names of the tokenizer and the chat template.

    The fingerprint covers the contents of these files instead.
    """
    documents = {k: v for k, v in table["documents"].items() if k != "chat_template"}
    return {**{k: v for k, v in table.items() if k != "tokenizer"}, "documents": documents}


def fingerprint(
    recipe: Recipe,
    files: Sequence[Sequence[tuple[str, int]]],
    tokenizer_digest: str,
    chat_template: str | None,
    removed: str | None = None,
) -> str:
    """Return the xxh3-128 of the canonical JSON of everything that determines the shards.

    Args:
        recipe: The recipe.
        files: For each source, the relative name and the size of each file.
        tokenizer_digest: The digest of the tokenizer.
        chat_template: The chat template, or None.
        removed: The digest of removed.json, or None.
    """
    parts = {
        "law_version": LAW_VERSION,
        "recipe": without_places(normalised(recipe)),
        "files": [[[name, size] for name, size in source] for source in files],
        "tokenizer": tokenizer_digest,
    }
    optional_parts = {"chat_template": chat_template, "removed": removed}
    return digest_of(
        encode(parts | {key: value for key, value in optional_parts.items() if value is not None})
    )


def from_normalised(table: Any, engine: str, made_with: Any = None) -> Recipe:
    """Return the recipe that a plan stores in the form of `normalised`.

    The sources have no paths, because the plan's list of files replaces them.

    Args:
        table: The stored recipe.
        engine: The recipe's `engine`.
        made_with: The plan's `made_with`, for messages about unknown keys.

    Raises:
        RecipeError: If `normalised` cannot have returned `table`.
    """
    if not isinstance(table, dict):
        raise RecipeError(f"the recipe is {table!r:.100}, but should be an object")
    top_level = {name: value for name, value in table.items() if name not in SECTIONS or not name}
    # A stored recipe has no engine, because the engine does not change the bytes.
    values = _stored("", {**top_level, "engine": engine}, "", made_with)
    for section, record in list(SECTIONS.items())[1:]:
        content = table.get(section)
        if section not in ("sources", "tasks"):
            values[section] = record(**_stored(section, content, section, made_with))
            continue
        if (
            not isinstance(content, (list, tuple))
            or not content
            or not all(isinstance(entry, dict) for entry in content)
        ):
            raise RecipeError(
                f"{section} = {content!r:.100}: expected a list of objects, at least one"
            )
        values[section] = tuple(
            record(**_stored(section, entry, f"{section}[{i}]", made_with))
            for i, entry in enumerate(content)
        )
    recipe = Recipe(**values)
    check_together(recipe)
    return recipe


def _stored(section: str, table: Any, where: str, made_with: Any) -> dict[str, Any]:
    """Return the checked values of a stored section.

    The section must have every key except `paths` and the keys that later versions added. A value
    may be None if None is the key's default.
    """
    if not isinstance(table, dict):
        raise RecipeError(f"[{where}]: expected an object, found {table!r:.100}")
    # Keys that an older version did not write get their defaults. All other keys must be present.
    keys, values = {**KEYS[section]}, {**LATER[section], **table}
    if section == "sources":
        del keys["paths"]
    fixed: dict[str, Any] = {"paths": ()} if section == "sources" else {}
    if section == "tasks":
        fixed["parameters"] = values.pop("parameters", None)
        if not isinstance(fixed["parameters"], dict):
            raise RecipeError(
                f"{where}.parameters = {fixed['parameters']!r:.100}: expected an object"
            )
    for wrong_key in sorted(values.keys() - keys):
        raise RecipeError(f"{where}: {unknown_key(wrong_key, made_with)}".removeprefix(": "))
    for wrong_key in sorted(keys.keys() - values):
        raise RecipeError(f"{where}.{wrong_key} is missing".lstrip("."))
    for name, value in values.items():
        place = f"{where}.{name}" if where else name
        if value is None and keys[name].default is None:
            fixed[name] = None
        elif name != "mode_tokens":
            fixed[name] = read_value(keys[name], value, place)
        elif isinstance(value, dict):
            fixed[name] = {
                token: read_value(keys[name], role, f"{where}.{token}")
                for token, role in value.items()
            }
        else:
            raise RecipeError(f"{place} = {value!r:.100}: expected an object")
    return fixed


def recipe_text(path: Path) -> str:
    """Return the text of a recipe file, without a byte order mark.

    Raises:
        RecipeError: If the path is not a regular file or the file is too large for a recipe.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise RecipeError(
            f"{path} is not a regular file but a pipe, a device or a socket\n"
            "hint: give a recipe file, or inputs"
        )
    if (size := path.stat().st_size) > MOST_RECIPE_BYTES:
        raise RecipeError(
            f"{path} has {size} bytes, but a recipe has at most {MOST_RECIPE_BYTES}\n"
            "hint: name many files with patterns, as in data/*.jsonl"
        )
    return path.read_text("utf-8").removeprefix("\ufeff")


def written_as(text: str) -> str:
    """Return "JSON", "TOML" or "YAML" if a text is a recipe in this format, otherwise ""."""
    for name, parse in (("JSON", json.loads), ("TOML", tomllib.loads)):
        try:
            table = parse(text)
        except (ValueError, RecursionError):
            continue
        return name if isinstance(table, dict) and _has_recipe_keys(table, text) else ""
    lines = [_YAML_LINE.match(line) for line in re.findall(r"^[^\s#].*", text, re.MULTILINE)]
    keys = [line[1] for line in lines if line and line[1]]
    return "YAML" if all(lines) and _has_recipe_keys(keys, text) else ""


_YAML_LINE = re.compile(r"[\"']?([A-Za-z_]+)[\"']?[ \t]*:(?=\s|\Z)|[-\]}%]|\.\.\.")
"""The beginning of a line without indentation, in a YAML file with keys."""


def _has_recipe_keys(keys: Collection[str], text: str) -> bool:
    """Return whether a file with these keys at its top level is a recipe.

    Other files have keys such as `tasks` and `documents` too.
    """
    known_keys = {*KEYS[""], *SECTIONS}.intersection(keys)
    has_paths = re.search(r"\bpaths[\"']?[ \t]*[:=]", text) is not None
    return bool({"sources", "tokenizer"} & known_keys) and (
        len(known_keys) > 1 or ("sources" in known_keys and has_paths)
    )


def refuse_misnamed_recipes(names: Sequence[str]) -> None:
    """Check that no input on the command line is a recipe in another format or of another name.

    If there are several inputs, only files whose names suggest another format are read. Patterns
    and folders are always data.

    Raises:
        RecipeError: If an input is a recipe.
    """
    for path in map(Path, names):
        if len(names) > 1 and path.suffix.lower() not in (".json", ".yaml", ".yml"):
            continue
        if not path.is_file():
            continue  # Opening a pipe would consume data.
        try:
            with path.open("rb") as file:
                format = written_as(file.read(_MOST_BYTES).decode().removeprefix("\ufeff"))
        except (OSError, ValueError):
            continue  # The file is unreadable or not a text. The reader of the inputs reports that.
        if format == "TOML":
            raise RecipeError(
                f"{path} is a recipe, but its name does not end with .toml\n"
                f"hint: rename it to {path.name.partition('.')[0]}.toml"
            )
        if format:
            raise RecipeError(f"{path}: {_OTHER_FORMAT[format]}")


MOST_RECIPE_BYTES = 64 << 20
_MOST_BYTES = 1 << 20  # bytes read of an input
_OTHER_FORMAT = {
    "JSON": (
        "is JSON, but a recipe is TOML\n"
        'hint: write seq_length = 512 for "seq_length": 512, and a table as [[sources]] with its'
        " keys in lines below; name the file .toml"
    ),
    "YAML": (
        "is YAML, but a recipe is TOML\n"
        "hint: write seq_length = 512 for seq_length: 512, texts in quotes, and a table as"
        " [[sources]] with its keys in lines below; name the file .toml"
    ),
}


def load_recipe(path: Path) -> dict[str, Any]:
    """Return the TOML table of a recipe file.

    Raises:
        RecipeError: If the file cannot be read or parsed.
    """
    try:
        table = tomllib.loads(recipe_text(path))
        _refuse_wide_integers(table)
        return table
    except OSError as error:
        # A mistyped name is a common mistake, so list the recipes in the folder.
        recipe_names = (
            sorted(p.name for p in Path(path).parent.glob("*.toml"))[:5]
            if isinstance(error, FileNotFoundError)
            else []
        )
        beside = f"; recipes in its folder: {', '.join(recipe_names)}" if recipe_names else ""
        raise RecipeError(
            f"{path}: {error.strerror}{beside}\nhint: give a recipe file or inputs"
        ) from None
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{path}: not UTF-8 at byte {error.start}\n"
            "hint: save the recipe as a TOML file in UTF-8"
        ) from None
    except ValueError as error:  # A TOMLDecodeError is a ValueError.
        format = written_as(recipe_text(path))
        message = (
            _OTHER_FORMAT[format]
            if format in _OTHER_FORMAT
            else f"not TOML: {error}{_line_in_question(path, str(error))}"
        )
        raise RecipeError(f"{path}: {message}") from None
    except RecursionError:
        raise RecipeError(f"{path}: its values are nested too deeply for a recipe") from None


def _line_in_question(path: Path, message: str) -> str:
    """Return the end of an error message: the faulty line of the recipe, and a hint to fix it.

    tomllib's `message` has the line's number. Return "" if it has none.
    """
    match = re.search(r"at line (\d+)", message)
    if not match:
        return ""
    line = recipe_text(path).split("\n")[int(match[1]) - 1].strip()
    value = line.partition("=")[2].strip()
    hint = "put texts in quotes, but not numbers and lists, and each key on one line"
    if value in ("True", "False"):
        hint = f"write {value.lower()} in TOML"
    elif re.fullmatch(r"[A-Za-z_./*~][^\"'\[\]{}]*", value):
        hint = f'put the text in quotes: "{value}"'
    elif "overwrite" in message or "twice" in message:
        hint = "the key occurs twice: take one out"
    return f": {line:.100}\nhint: {hint}" if line else f"\nhint: {hint}"


def _refuse_wide_integers(value: Any) -> None:
    """Check that no integer has more than 64 bits. TOML excludes these, but tomllib accepts them.

    Raises:
        ValueError: If there is such an integer.
    """
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _refuse_wide_integers(item)
    elif type(value) is int and not -(1 << 63) <= value < 1 << 63:
        raise ValueError("an integer has more than 64 bits")


def as_toml(value: Any) -> str:
    """Return a value as one line of TOML, with unprintable characters escaped.

    Numbers and texts are written as JSON, because TOML accepts the same notation.
    """
    if isinstance(value, Mapping):
        pairs = (
            f"{as_toml(name)} = {as_toml(item)}" for name, item in value.items() if item is not None
        )
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_toml, value))}]"
    text = json.dumps(value, ensure_ascii=False)
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)
    )


def normalised_toml(table: Mapping[str, Any], paths: Mapping[str, Sequence[str]]) -> str:
    """Return a normalised recipe as TOML. Reading the TOML gives the same recipe.

    Values equal to their defaults are left out, except seq_length, seed and the parameters of
    objectives.

    Args:
        table: The normalised recipe.
        paths: {source name: paths of the source}.
    """
    # Collect the sections as a recipe file has them, each with its head and its values.
    sections: list[tuple[str, str, Mapping[str, Any]]] = [
        ("", "", {k: table[k] for k in KEYS[""] if k in table})
    ]
    for source in table["sources"]:
        sections.append(
            (
                "sources",
                "[[sources]]",
                {"name": source["name"], "paths": paths[source["name"]], **source},
            )
        )
    for name in ("documents", "packing", "output"):
        sections.append((name, f"[{name}]", table[name]))
    specials = table["specials"]
    sections.append(
        (
            "specials",
            "[specials]",
            {**specials, **(specials["mode_tokens"] or {}), "mode_tokens": None},
        )
    )
    for task in table["tasks"]:
        task_keys = {name: value for name, value in task.items() if name != "parameters"}
        sections.append(("tasks", "[[tasks]]", {**task_keys, **task["parameters"]}))
    texts = []
    for section, head, values in sections:
        # Values that equal their defaults are left out, but the row length and the seed are always
        # shown.
        default = {
            name: key.default
            for name, key in KEYS[section].items()
            if name not in ("seq_length", "seed")
        }
        # Declared keys come first, in the order of the schema. Mode tokens and parameters follow.
        lines = [
            f"{name if name.isidentifier() and name.isascii() else as_toml(name)} ="
            f" {as_toml(value)}"
            for name in dict.fromkeys(
                [*(name for name in KEYS[section] if name in values), *values]
            )
            for value in [values[name]]
            if value is not None
            and (tuple(value) if isinstance(value, list) else value) != default.get(name)
        ]
        if lines:
            texts.append("\n".join([*([head] if head else []), *lines]) + "\n")
    return "\n".join(texts)


def split_assignment(assignment: str) -> tuple[str, str]:
    """Split the text of a `--set KEY=VALUE` into the key and the value, both as text.

    Raises:
        RecipeError: If the text is not KEY=VALUE.
    """
    path, equals, text = assignment.partition("=")
    if not equals or not path.strip():
        raise RecipeError(
            f"--set {assignment}: expected KEY=VALUE without spaces around =, as in --set"
            " packing.algorithm=next_fit"
        )
    return path, text


def set_value(table: dict[str, Any], assignment: str) -> KeyPath:
    """Apply one `--set a.b=c` to a recipe's table, and return the path of the key that was set.

    The value is parsed as TOML. If that fails, the text itself is the value. In the key, an entry
    of a list is named by its index or its name: sources.0.repeat or sources.wiki.repeat.

    Raises:
        RecipeError: If the assignment is malformed or its key cannot be set.
    """
    path, text = split_assignment(assignment)
    # A text needs no quotes, so that a shell command can omit them.
    try:
        value = tomllib.loads(f"value = {text}")["value"]
        _refuse_wide_integers(value)
    except tomllib.TOMLDecodeError:
        value = text.strip()
    except ValueError:
        raise RecipeError(
            f"--set {assignment:.500}: an integer has more than 64 bits\n"
            "hint: give a number below 2**63"
        ) from None
    except RecursionError:
        raise RecipeError(
            f"--set {assignment:.500}: its value is nested too deeply for a recipe"
        ) from None
    place: Any = table
    key: list[str | int] = []
    # Follow the key to its table. An entry of a list is searched by name before its index.
    *parents, last_key = path.strip().split(".")
    for name in parents:
        if isinstance(place, list):
            named = [item for item in place if isinstance(item, dict) and item.get("name") == name]
            index = int(name) if name.isdigit() else -1
            if not named and not 0 <= index < len(place):
                raise RecipeError(
                    f"--set {assignment}: there is no {name!r} among the {len(place)} entries of"
                    f" {path.strip().split('.')[0]}\n"
                    f"hint: give a number, 0 … {len(place) - 1}, or a name"
                )
            index = place.index(named[0]) if named else index
            place = place[index]
            key.append(index)
        elif isinstance(place, dict):
            place = place.setdefault(name, {})
            key.append(name)
        else:
            raise RecipeError(f"--set {assignment}: {name!r} is inside a value that is not a table")
    if not isinstance(place, dict):
        raise RecipeError(
            f"--set {assignment}: {path.strip()!r} is not a key\n"
            "hint: name a key, as in sources.0.repeat=2"
        )
    place[last_key] = value
    return (*key, last_key)
