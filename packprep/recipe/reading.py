"""A recipe from TOML: every key checked once, before work starts."""

import difflib
import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from packprep.errors import RecipeError
from packprep.recipe.kinds import Kind
from packprep.recipe.places import Key, key_of
from packprep.recipe.records import (
    MOST_DRAWS,
    MOST_SOURCES,
    MOST_TASKS,
    SECTIONS,
    Recipe,
    Source,
    Specials,
    TaskEntry,
    default_of,
    keys_of,
)


def unknown(what: str, name: str, known: Sequence[str]) -> str:
    """A message's part for a name that is not known, with the nearest known one."""
    near = difflib.get_close_matches(name, known, 1, 0.5)
    return f"unknown {what} {name!r}" + (
        f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"
    )


def misplaced(name: str) -> str:
    """A message's part for a key that stands under the wrong header: which it belongs under; "" for a name of no key."""
    if name in SECTIONS:
        brackets = f"[[{name}]]" if name in ("sources", "tasks") else f"[{name}]"
        return f"{name} is a table of its own: write {brackets} at the begin of a line, and its keys below it"
    homes = [section for section, record in SECTIONS.items() if name in keys_of(record)]
    if "" in homes:
        return (
            f"{name} is a key of the recipe itself: put it above the first [header], "
            "because TOML gives a key to the header above it"
        )
    return f"{name} is a key of [{homes[0]}]: put it under that header" if homes else ""


def read_value(kind: Kind, value: Any, where: str) -> Any:
    """`value` as its kind accepts it; RecipeError that names the place, the value and what was expected."""
    try:
        return kind.accept(value)
    except ValueError:
        shown = str(value).lower() if isinstance(value, bool) else f"{value!r:.500}"
        raise RecipeError(f"{where} = {shown}: expected {kind.name}{_meant(kind, value)}", key_of(where)) from None


def _meant(kind: Kind, value: Any) -> str:
    """A message's part for a value that is nearly one of a kind: 512.0, "512", "False", "bestfit"; "" for others."""
    written = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    if isinstance(value, str | float) and len(written) < 100:
        for text in (written, written.lower()):
            try:
                kind.accept(tomllib.loads(f"value = {text}")["value"])
            except ValueError:  # a TOMLDecodeError is one
                continue
            return f"; write {text}{', without quotes' if isinstance(value, str) else ''}"
    near = difflib.get_close_matches(written, kind.name.split(" | "), 1) if " | " in kind.name else []
    return f"; did you mean {near[0]!r}?" if near else ""


def read_section(record: type, table: Any, where: str, extra: str | None = None) -> dict[str, Any]:
    """The checked values of a table. `extra` names the key that collects the keys that the record does not declare."""
    if not isinstance(table, dict):
        brackets = f"; write [{where}], with one bracket" if isinstance(table, list) else ""
        raise RecipeError(f"[{where}]: expected a table of keys, found {table!r:.100}{brackets}", key_of(where))
    keys, values, others = keys_of(record), {}, {}
    for name, value in table.items():
        place = f"{where}.{name}" if where else name
        if name in keys and name != extra:
            values[name] = read_value(keys[name].metadata["kind"], value, place)
        elif extra:
            others[name] = value
        else:
            said = f"unknown key {name!r}: {misplaced(name)}" if misplaced(name) else unknown("key", name, list(keys))
            raise RecipeError(f"{said} (in {'[' + where + ']' if where else 'the recipe'})", key_of(place))
    for name, key in keys.items():
        if name not in values and default_of(key) is ...:
            place = f"{where}.{name}" if where else name
            raise RecipeError(f"{place} is missing: {key.metadata['meaning']}; add a line {name} = …", key_of(place))
    if extra:
        values[extra] = others
    return values


@cache
def presets() -> dict[str, list[dict[str, Any]]]:
    """name → list of task tables, from presets.toml beside this file."""
    return tomllib.loads((Path(__file__).with_name("presets.toml")).read_text("utf-8"))


def _read_tasks(tables: Any) -> tuple[TaskEntry, ...]:
    if not isinstance(tables, list):
        raise RecipeError(f"tasks: expected [[tasks]] tables, found {tables!r:.100}; {_TWO_BRACKETS}", ("tasks",))
    _refuse_too_many("tasks", len(tables))
    entries: list[TaskEntry] = []
    names: set[str] = set()
    weight_kind = keys_of(TaskEntry)["weight"].metadata["kind"]
    for i, table in enumerate(tables):
        where = f"tasks[{i}]"
        if not isinstance(table, dict):
            raise RecipeError(f"{where}: expected a table, found {table!r:.100}; {_TWO_BRACKETS}", ("tasks", i))
        preset = table.get("preset")
        if preset is None:
            _check_named(table, where, i)
            members, scale, prefix = [table], 1.0, ""
        else:
            others = [name for name in table if name not in ("preset", "weight")]
            if others:
                hint = misplaced(others[0]) if others[0] not in keys_of(TaskEntry) else ""
                raise RecipeError(
                    f"{where}: a preset takes only a weight, not {', '.join(others)}; "
                    + (hint or "write its tasks out to change them"),
                    ("tasks", i, others[0]),
                )
            if preset not in presets():
                raise RecipeError(f"{where}: {unknown('preset', str(preset), list(presets()))}", ("tasks", i, "preset"))
            members, prefix = presets()[preset], f"{preset}."
            weight = read_value(weight_kind, table.get("weight", 1.0), f"{where}.weight")
            scale = weight / math.fsum(m.get("weight", 1.0) for m in members)
        for member in members:
            values = read_section(TaskEntry, member, where, extra="parameters")
            name = values.get("name") or values["objective"]
            if name in names and prefix:
                name = prefix + name
            if name in names or name == "too_short":
                raise RecipeError(
                    f"{where}.name = {name!r}: taken already; give each task its own name", ("tasks", i, "name")
                )
            names.add(name)
            values["name"] = name
            values["weight"] = values.get("weight", 1.0) * scale
            entries.append(TaskEntry(**values))
    return tuple(entries)


_TWO_BRACKETS = "a list of tables is written with two brackets, [[tasks]] or [[sources]], once for each"


def _check_named(table: Mapping[str, Any], where: str, i: int) -> None:
    """RecipeError for a [[tasks]] that says neither preset nor objective."""
    if "objective" in table:
        return
    known = ["preset", *keys_of(TaskEntry)]
    others = [name for name in table if name not in known]
    said = f"; {unknown('key', others[0], known)}" if others else ""
    raise RecipeError(
        f'{where}.objective is missing, and there is no preset: give one, as in preset = "ul2r"{said}',
        ("tasks", i, *others[:1]),
    )


def read_recipe(table: Mapping[str, Any], base: Path) -> Recipe:
    """The recipe of a TOML table; RecipeError names the key, the value and what was expected."""
    table = dict(table)
    nested = {name: table.pop(name) for name in list(SECTIONS)[1:] if name in table}
    for name in table:
        if name not in keys_of(Recipe):
            known = [*keys_of(Recipe), *list(SECTIONS)[1:]]
            said = f"unknown key {name!r}: {misplaced(name)}" if misplaced(name) else unknown("key", name, known)
            raise RecipeError(f"{said} (in the recipe)", (name,))
    values = read_section(Recipe, table, "")
    for section in ("documents", "packing", "output"):
        values[section] = SECTIONS[section](**read_section(SECTIONS[section], nested.get(section, {}), section))
    values["specials"] = _read_specials(nested.get("specials", {}))
    values["sources"] = _read_sources(nested.get("sources", []))
    values["tasks"] = _read_tasks(nested.get("tasks", [{"preset": "causal"}]))
    if not values["tasks"]:
        raise RecipeError("tasks is empty: give at least one [[tasks]], or leave it out for causal", ("tasks",))
    recipe = Recipe(base=base, **values)
    check_together(recipe)
    return recipe


def _read_specials(table: Any) -> Specials:
    values = read_section(Specials, table, "specials", extra="mode_tokens")
    role = keys_of(Specials)["mode_tokens"].metadata["kind"]
    known = [name for name in keys_of(Specials) if name != "mode_tokens"]
    for name, value in values["mode_tokens"].items():
        if name.isidentifier():  # a mode token is written in brackets; a bare word is a slip
            said = f"unknown key {name!r}: {misplaced(name)}" if misplaced(name) else unknown("key", name, known)
            raise RecipeError(f"{said} (in [specials]; a mode token is quoted with its brackets)", ("specials", name))
        read_value(role, value, f'specials."{name}"')
    return Specials(**values)


def _read_sources(tables: Any) -> tuple[Source, ...]:
    if not isinstance(tables, list):
        raise RecipeError(f"sources: expected [[sources]] tables, found {tables!r:.100}; {_TWO_BRACKETS}", ("sources",))
    if not tables:
        raise RecipeError('the recipe has no [[sources]]: give at least one with paths = ["data/*.jsonl"]')
    _refuse_too_many("sources", len(tables))
    sources: list[Source] = []
    names: set[str] = set()
    for i, source in enumerate(tables):
        values = read_section(Source, source, f"sources[{i}]")
        values["name"] = values.get("name") or f"source{i}"
        if values["name"] in names:
            raise RecipeError(
                f"sources[{i}].name = {values['name']!r}: taken already; give each source its own name",
                ("sources", i, "name"),
            )
        names.add(values["name"])
        if any("://" in p for p in values["paths"]) and not all("://" in p for p in values["paths"]):
            raise RecipeError(
                f"sources[{i}].paths mixes URLs and local paths: make two sources of it", ("sources", i, "paths")
            )
        if "share" in values and "repeat" in values:
            raise RecipeError(
                f"sources[{i}] has both repeat and share: a source takes one of them, so take one out",
                ("sources", i, "repeat"),
            )
        sources.append(Source(**values))
    with_share = [s.share is not None for s in sources]
    if any(with_share) and not all(with_share):
        missing = ", ".join(s.name for s in sources if s.share is None)
        raise RecipeError(
            f"share is given for some sources and not for {missing}: give it in every source or in none",
            ("sources", with_share.index(False)),
        )
    return tuple(sources)


def _refuse_too_many(what: str, count: int) -> None:
    most, advice = _MOST[what]
    if count > most:
        raise RecipeError(f"{count} {what}: a dataset has at most {most}; {advice}", (what,))


_MOST = {"sources": (MOST_SOURCES, "give one source more paths"), "tasks": (MOST_TASKS, "leave some out")}


def check_together(recipe: Recipe) -> None:
    """RecipeError for what only the whole recipe can tell."""
    _refuse_too_many("sources", len(recipe.sources))
    _refuse_too_many("tasks", len(recipe.tasks))
    draws = len(recipe.tasks) * sum(max(1, len(source.tasks or ())) for source in recipe.sources)
    if draws > MOST_DRAWS:
        raise RecipeError(
            f"{len(recipe.sources)} sources that draw from {len(recipe.tasks)} tasks: a dataset has at most {MOST_DRAWS} "
            "pairs of them; give one source more paths, or leave tasks out",
            ("tasks",),
        )
    if recipe.seq_length % 8:
        low = recipe.seq_length // 8 * 8
        raise RecipeError(
            f"seq_length = {recipe.seq_length}: must be a multiple of 8, as {low} and {low + 8} are", ("seq_length",)
        )
    mult = recipe.packing.pad_seq_to_mult
    if recipe.seq_length % mult:
        raise RecipeError(
            f"packing.pad_seq_to_mult = {mult} does not divide seq_length = {recipe.seq_length}: "
            f"take one that does, or seq_length = {max(recipe.seq_length // math.lcm(mult, 8), 1) * math.lcm(mult, 8)}",
            ("packing", "pad_seq_to_mult"),
        )
    if mult > 1 and recipe.packing.algorithm == "concat":
        raise RecipeError(
            "packing.pad_seq_to_mult needs best_fit, first_fit or next_fit: concat leaves no room between segments",
            ("packing", "pad_seq_to_mult"),
        )
    if recipe.total_tokens and recipe.sources[0].share is None:
        raise RecipeError(
            "total_tokens goes with share: give each source a share, or leave total_tokens out", ("total_tokens",)
        )
    names = [task.name for task in recipe.tasks]
    for i, source in enumerate(recipe.sources):
        for name in source.tasks or ():
            if not tasks_named(name, names):
                raise RecipeError(f"sources[{i}].tasks: {unknown('task', name, names)}", ("sources", i, "tasks"))


def tasks_named(name: str, names: Sequence[str]) -> list[int]:
    """Indices of the tasks that a name stands for: that task, and the family NAME-…"""
    return [i for i, task in enumerate(names) if task == name or task.startswith(name + "-")]


def recipe_text(path: Path) -> str:
    """The text of a recipe file, without a byte order mark. RecipeError for what is no file, or no recipe by its size."""
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise RecipeError(f"{path} is no regular file but a pipe, a device or a socket: give a recipe file, or inputs")
    if (size := path.stat().st_size) > MOST_RECIPE_BYTES:
        raise RecipeError(
            f"{path} has {size} bytes, and a recipe at most {MOST_RECIPE_BYTES}: name many files by patterns, as in data/*.jsonl"
        )
    return path.read_text("utf-8").removeprefix("\ufeff")


def written_as(text: str) -> str:
    """ "JSON" or "YAML" for a recipe that is written in one of these, "" for any other text."""
    known = {*keys_of(Recipe), *SECTIONS}
    if text.lstrip().startswith("{"):
        try:
            table = json.loads(text)
        except (ValueError, RecursionError):
            return ""
        return "JSON" if len(known & table.keys()) >= _KEYS else ""
    keys = re.findall(r"^([A-Za-z_]+)[ \t]*:(?=[ \t\r\n]|\Z)", text, re.MULTILINE)
    return "YAML" if len(known & set(keys)) >= _KEYS else ""


def refuse_other_formats(path: Path) -> None:
    """RecipeError for a file of inputs that is a recipe in JSON or YAML."""
    if path.suffix.lower() not in (".json", ".yaml", ".yml"):
        return
    try:
        with path.open("rb") as file:
            found = written_as(file.read(_MOST_BYTES).decode().removeprefix("\ufeff"))
    except (OSError, ValueError):
        return  # no recipe, or nothing that can be read: who reads it as an input says so
    if found:
        raise RecipeError(f"{path}: {_OTHER_FORMAT[found]}")


MOST_RECIPE_BYTES = 64 << 20
_MOST_BYTES, _KEYS = 1 << 20, 2  # what is read of a file; keys of a recipe that make it one
_OTHER_FORMAT = {
    "JSON": 'is JSON, and a recipe is TOML: write seq_length = 512 for "seq_length": 512, a table as [[sources]] with its '
    "keys in lines below, and name the file .toml",
    "YAML": "is YAML, and a recipe is TOML: write seq_length = 512 for seq_length: 512, texts in quotes, a table as "
    "[[sources]] with its keys in lines below, and name the file .toml",
}


def load_recipe(path: Path) -> dict[str, Any]:
    """The TOML table of a recipe file; RecipeError if it cannot be read or parsed."""
    try:
        table = tomllib.loads(recipe_text(path))
        _refuse_wide_integers(table)
        return table
    except OSError as error:
        there = (
            sorted(p.name for p in Path(path).parent.glob("*.toml"))[:5] if isinstance(error, FileNotFoundError) else []
        )
        beside = f"; recipes beside it: {', '.join(there)}" if there else ""
        raise RecipeError(f"{path}: {error.strerror}; give a recipe file or inputs{beside}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 at byte {error.start}; a recipe is a TOML file in UTF-8") from None
    except ValueError as error:  # a TOMLDecodeError is one
        found = written_as(recipe_text(path))
        what = _OTHER_FORMAT[found] if found else f"not TOML: {error}{_line_in_question(path, str(error))}"
        raise RecipeError(f"{path}: {what}") from None
    except RecursionError:
        raise RecipeError(f"{path}: its values are nested too deeply for a recipe") from None


def _line_in_question(path: Path, message: str) -> str:
    """A message's part with the line that tomllib names, and what may be wrong with it."""
    match = re.search(r"at line (\d+)", message)
    if not match:
        return ""
    line = recipe_text(path).split("\n")[int(match[1]) - 1].strip()
    value = line.partition("=")[2].strip()
    hint = "a text needs quotes, numbers and lists do not; each key has one line"
    if value in ("True", "False"):
        hint = f"TOML writes {value.lower()}"
    elif re.fullmatch(r"[A-Za-z_./*~][^\"'\[\]{}]*", value):
        hint = f'a text needs quotes: "{value}"'
    elif "overwrite" in message or "twice" in message:
        hint = "it stands twice: take one out"
    return f": {line:.100} – {hint}" if line else f"; {hint}"


def _refuse_wide_integers(value: Any) -> None:
    """ValueError for an integer of more than 64 bits, which TOML does not have and Python's parser takes."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _refuse_wide_integers(item)
    elif type(value) is int and not -(1 << 63) <= value < 1 << 63:
        raise ValueError("an integer has more than 64 bits")


def split_assignment(assignment: str) -> tuple[str, str]:
    """Key and value of a `--set`, as they are written. RecipeError if it is no KEY=VALUE."""
    path, equals, text = assignment.partition("=")
    if not equals or not path.strip():
        raise RecipeError(
            f"--set {assignment}: expected KEY=VALUE without spaces around =, as in --set packing.algorithm=next_fit"
        )
    return path, text


def set_value(table: dict[str, Any], assignment: str) -> Key:
    """Apply one `--set a.b=c` to a recipe's table; the key that was set.

    The value is TOML, or else a text. Lists go by number or by name.
    """
    path, text = split_assignment(assignment)
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    place: Any = table
    key: list[str | int] = []
    *parents, last = path.strip().split(".")
    for name in parents:
        if isinstance(place, list):
            named = [item for item in place if isinstance(item, dict) and item.get("name") == name]
            index = int(name) if name.isdigit() else -1
            if not named and not 0 <= index < len(place):
                raise RecipeError(
                    f"--set {assignment}: there is no {name!r} among {len(place)} of {path.strip().split('.')[0]}; "
                    f"go by number, 0 … {len(place) - 1}, or by name"
                )
            index = place.index(named[0]) if named else index
            place = place[index]
            key.append(index)
        elif isinstance(place, dict):
            place = place.setdefault(name, {})
            key.append(name)
        else:
            raise RecipeError(f"--set {assignment}: {name!r} lies inside a value that is no table")
    if not isinstance(place, dict):
        raise RecipeError(f"--set {assignment}: {path.strip()!r} is no key; name one, as in sources.0.repeat=2")
    place[last] = value
    return (*key, last)
