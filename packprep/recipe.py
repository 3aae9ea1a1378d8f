"""The recipe: what to build, as frozen records read from TOML and checked once.

The records below are the one home of every key: its type, default, range and meaning. The docs' table of keys is made
from them. What an objective reads (`[[tasks]]`) is declared by the objective and checked in `objectives/tasks.py`.
"""

import difflib
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from packprep.dataset.manifest import LAW_VERSION, encode
from packprep.digests import digest_of
from packprep.errors import RecipeError

# How a value is checked. Each gives the value in its declared type, or raises ValueError with what was expected.


@dataclass(frozen=True)
class Kind:
    """A kind of value: how it is named in messages and the docs, and the function that accepts one."""

    name: str
    accept: Callable[[Any], Any]


def _only(expected: type | tuple[type, ...]) -> Callable[[Any], Any]:
    def accept(value):
        if type(value) not in (expected if isinstance(expected, tuple) else (expected,)):
            raise ValueError
        return value

    return accept


def _whole(low: int, high: int = 2**63 - 1) -> Kind:
    def accept(value):
        if type(value) is not int or not low <= value <= high:
            raise ValueError
        return value

    top = f" … {high}" if high < 2**63 - 1 else " or more"
    return Kind(f"a whole number, {low}{top}", accept)


def _number(name: str, low: float, high: float, low_open: bool = False) -> Kind:
    def accept(value):
        if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
            raise ValueError
        if low_open and value == low:
            raise ValueError
        return float(value)

    return Kind(name, accept)


def _choice(*choices: str) -> Kind:
    def accept(value):
        if value not in choices:
            raise ValueError
        return value

    return Kind(" | ".join(choices), accept)


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(value: int | str) -> int:
    """Bytes of a size such as 1048576, "1MiB" or "64 MB"; ValueError if it is none."""
    if type(value) is int and value > 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value) if type(value) is str else None
    if not match or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise ValueError
    return max(1, round(float(match[1]) * _UNITS[match[2].upper()]))


def _accept_strings(value):
    if type(value) is str:
        value = [value]
    if type(value) not in (list, tuple) or not value or any(type(item) is not str or not item for item in value):
        raise ValueError
    return tuple(value)


def _accept_interval(value):
    if type(value) not in (list, tuple) or len(value) != 2:
        raise ValueError
    low, high = (_number("", 0, 1).accept(v) for v in value)
    if not low < high:
        raise ValueError
    return (low, high)


def _accept_role(value):
    if not ((type(value) is str and value) or (type(value) is int and value >= 0)):
        raise ValueError
    return value


def _accept_sentinels(value):
    if type(value) is str and (value == "auto" or "{}" in value):
        return value
    if type(value) is dict and set(value) == {"first", "count"}:
        first, count = value["first"], value["count"]
        if type(first) is int and type(count) is int and first >= 0 and count >= 1:
            return {"first": first, "count": count}
    if type(value) in (list, tuple) and value:
        return tuple(_accept_role(item) for item in value)
    raise ValueError


def _auto_size(value):
    return "auto" if value == "auto" else parse_size(value)


BOOLEAN = Kind("true or false", _only(bool))
TEXT = Kind("a text", _only(str))
STRINGS = Kind("a text or a list of texts", _accept_strings)
ROLE = Kind("a token's text or its id", _accept_role)

_REQUIRED: Any = object()


def _key(default: Any, kind: Kind, meaning: str) -> Any:
    return field(default=default, metadata={"kind": kind, "meaning": meaning})


@dataclass(frozen=True)
class Source:
    """One `[[sources]]`: files whose documents share a format and a use."""

    name: str = _key("", TEXT, "default source0, source1, … by position")
    paths: tuple[str, ...] = _key(_REQUIRED, STRINGS, "files or patterns, relative to the recipe; ** crosses folders")
    format: str = _key(
        "auto", _choice("auto", "jsonl", "parquet", "arrow", "text", "megatron", "tokens"), "auto: by the file's suffix"
    )
    text_key: str = _key("text", TEXT, "the field or column that holds the text")
    repeat: float = _key(
        1.0,
        _number("a number, above 0, at most 1000", 0, 1000, low_open=True),
        "uses of each document; each use has its own order and chance; 2.5: all twice, half of them a third time",
    )
    share: float | None = _key(
        None,
        _number("a number above 0, at most 1", 0, 1, low_open=True),
        "instead of repeat, then in every source: share of the document tokens",
    )
    sample: tuple[float, float] = _key(
        (0.0, 1.0),
        Kind("two numbers [low, high], 0 ≤ low < high ≤ 1", _accept_interval),
        "keep the documents whose u(file, position) lies in [low, high): held-out sets without overlap",
    )
    tasks: tuple[str, ...] | None = _key(
        None, STRINGS, "which tasks its segments draw from, by name; NAME also stands for all NAME-…; all by default"
    )


@dataclass(frozen=True)
class Documents:
    """`[documents]`: what becomes of a document on its way to segments."""

    append_eos: bool = _key(True, BOOLEAN, "eos after the last token of a document")
    prepend_bos: bool = _key(False, BOOLEAN, "bos before the first token of a document")
    long: str = _key(
        "split", _choice("split", "truncate", "drop"), "documents beyond a row or max_tokens; what is cut is counted"
    )
    max_tokens: int = _key(0, _whole(0), "the most content tokens of a segment; 0: no limit beyond the row")
    min_tokens: int = _key(1, _whole(1), "shorter documents are dropped, and counted")
    special_text: str = _key(
        "text", _choice("text", "special", "reject"), 'what "<pad>" in a document\'s text is: text, the special token, a reject'
    )
    loss_spans: str = _key("use", _choice("use", "ignore"), "whether a document's loss_spans and messages limit its loss")
    bad_documents: str = _key("reject", _choice("reject", "fail"), "reject: counted and logged; fail: the build stops")
    max_bad_fraction: float = _key(
        0.001,
        _number("a number, 0 … 1", 0, 1),
        "at publication: fail if the bad documents are more than max(100, this · documents read)",
    )


@dataclass(frozen=True)
class Packing:
    """`[packing]`: segments → rows."""

    algorithm: str = _key(
        "best_fit",
        _choice("best_fit", "first_fit", "next_fit", "concat"),
        "next_fit keeps document order; concat cuts at row ends, only for tasks whose law is n + constant",
    )
    max_segments_per_row: int = _key(0, _whole(0, 65535), "0: 65 535, the format's limit")
    pad_seq_to_mult: int = _key(
        1, _whole(1), "each segment's physical length is a multiple of this; it divides seq_length"
    )


@dataclass(frozen=True)
class Specials:
    """`[specials]`: which token plays which role."""

    missing: str = _key(
        "error",
        _choice("error", "add"),
        "error: list unused reserved tokens and the lines to paste; add: extend the vocabulary",
    )
    eos: str | int | None = _key(None, ROLE, "end of a document")
    bos: str | int | None = _key(None, ROLE, "begin of a document")
    pad: str | int | None = _key(None, ROLE, "padding; a tokenizer without one pads with eos")
    mask: str | int | None = _key(None, ROLE, "the mask of masked and block diffusion")
    fim_prefix: str | int | None = _key(None, ROLE, "fill-in-the-middle: before the prefix")
    fim_middle: str | int | None = _key(None, ROLE, "fill-in-the-middle: before the middle")
    fim_suffix: str | int | None = _key(None, ROLE, "fill-in-the-middle: before the suffix")
    sentinels: Any = _key(
        None,
        Kind('a pattern with {}, a list of tokens or ids, {first = ID, count = N}, or "auto"', _accept_sentinels),
        'the sentinels of span corruption, "<extra_id_{}>" by default; "auto" with missing = "add": as many as needed',
    )
    mode_tokens: Mapping[str, str | int] = _key(
        None, ROLE, 'quoted, a mode token as a task writes it = the token that plays it: "[NLU]" = "<|reserved_1|>"'
    )
    vocab_size: int = _key(0, _whole(0, 2**31 - 1), "ceiling that no id may reach: the embedding's rows; 0: the tokenizer's")


@dataclass(frozen=True)
class TaskEntry:
    """One task of `[[tasks]]`, presets expanded. `parameters` are the objective's own keys."""

    name: str = _key("", TEXT, "default: the objective's name")
    objective: str = _key(_REQUIRED, TEXT, "which objective")
    weight: float = _key(
        1.0, _number("a number above 0", 0, 1e9, low_open=True), "relative probability that a segment gets this task"
    )
    mode_token: str | None = _key(None, TEXT, "a token in front of the body that tells the task; none by default")
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Output:
    """`[output]`: how the shards are written."""

    shard_text_bytes: int | str = _key(
        "auto",
        Kind('a size such as "64MiB", or "auto"', _auto_size),
        "input text per shard; auto: 64MiB, more for long rows (≥ 2000 rows) and to stay under 50 000 shards, at most 512MiB",
    )
    token_dtype: str = _key("auto", _choice("auto", "uint16", "int32"), "auto: uint16 where every id fits")
    columns: str = _key("full", _choice("full", "compact"), "compact: without what the header determines")


@dataclass(frozen=True)
class Recipe:
    """The whole recipe; `base` is the folder that relative paths start from."""

    seq_length: int = _key(4096, _whole(8, 1 << 24), "slots per row; a multiple of 8")
    seed: int = _key(0, _whole(0, 2**63 - 1), "the seed of all chance")
    tokenizer: str = _key(_REQUIRED, TEXT, 'a file, a directory with tokenizer.json, a Hub name, or "bytes"')
    engine: str = _key("auto", TEXT, "auto | reference | an engine's name; never changes bytes")
    total_tokens: int = _key(0, _whole(0), "with share: the document tokens to use; 0: as many as use no source twice")
    sources: tuple[Source, ...] = ()
    documents: Documents = field(default_factory=Documents)
    packing: Packing = field(default_factory=Packing)
    specials: Specials = field(default_factory=Specials)
    tasks: tuple[TaskEntry, ...] = ()
    output: Output = field(default_factory=Output)
    base: Path = Path()

    @property
    def min_tail(self) -> int:
        """The fewest content tokens of a segment that is not a whole document."""
        return max(3, self.documents.min_tokens)


SECTIONS: dict[str, type] = {
    "": Recipe,
    "sources": Source,
    "documents": Documents,
    "packing": Packing,
    "specials": Specials,
    "tasks": TaskEntry,
    "output": Output,
}


def keys_of(record: type) -> dict[str, Any]:
    """name → dataclass field of the keys that a section takes."""
    return {f.name: f for f in fields(record) if "kind" in f.metadata}


def default_of(key: Any) -> Any:
    """The default of a key; `...` if the recipe has to give it."""
    return ... if key.default is _REQUIRED or key.default is MISSING else key.default


def unknown(what: str, name: str, known: Sequence[str]) -> str:
    """A message's part for a name that is not known, with the nearest known one."""
    near = difflib.get_close_matches(name, known, 1, 0.5)
    return f"unknown {what} {name!r}" + (f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}")


def _read_value(key: Any, value: Any, where: str) -> Any:
    try:
        return key.metadata["kind"].accept(value)
    except ValueError:
        raise RecipeError(f"{where} = {value!r}: expected {key.metadata['kind'].name}") from None


def _read_section(record: type, table: Any, where: str, extra: str | None = None) -> dict[str, Any]:
    """The checked values of a table. `extra` names the key that collects the keys that the record does not declare."""
    if not isinstance(table, dict):
        raise RecipeError(f"[{where}]: expected a table of keys, found {table!r}")
    keys, values, others = keys_of(record), {}, {}
    for name, value in table.items():
        place = f"{where}.{name}" if where else name
        if name in keys and name != extra:
            values[name] = _read_value(keys[name], value, place)
        elif extra:
            others[name] = value
        else:
            raise RecipeError(f"{unknown('key', name, list(keys))} (in {'[' + where + ']' if where else 'the recipe'})")
    for name, key in keys.items():
        if name not in values and default_of(key) is ...:
            raise RecipeError(f"{where}.{name} is missing: {key.metadata['meaning']}" if where else f"{name} is missing: {key.metadata['meaning']}")
    if extra:
        values[extra] = others
    return values


@cache
def presets() -> dict[str, list[dict[str, Any]]]:
    """name → list of task tables, from presets.toml beside this file."""
    return tomllib.loads((Path(__file__).with_name("presets.toml")).read_text("utf-8"))


def _read_tasks(tables: Any) -> tuple[TaskEntry, ...]:
    if not isinstance(tables, list):
        raise RecipeError(f"tasks: expected [[tasks]] tables, found {tables!r}")
    entries: list[TaskEntry] = []
    names: set[str] = set()
    weight_key = keys_of(TaskEntry)["weight"]
    for i, table in enumerate(tables):
        where = f"tasks[{i}]"
        if not isinstance(table, dict):
            raise RecipeError(f"{where}: expected a table, found {table!r}")
        preset = table.get("preset")
        if preset is None:
            members, scale, prefix = [table], 1.0, ""
        else:
            others = [name for name in table if name not in ("preset", "weight")]
            if others:
                raise RecipeError(f"{where}: a preset takes only a weight, not {', '.join(others)}; write its tasks out to change them")
            if preset not in presets():
                raise RecipeError(f"{where}: {unknown('preset', str(preset), list(presets()))}")
            members, prefix = presets()[preset], f"{preset}."
            weight = _read_value(weight_key, table.get("weight", 1.0), f"{where}.weight")
            scale = weight / math.fsum(m.get("weight", 1.0) for m in members)
        for member in members:
            values = _read_section(TaskEntry, member, where, extra="parameters")
            name = values.get("name") or values["objective"]
            if name in names and prefix:
                name = prefix + name
            if name in names or name == "too_short":
                raise RecipeError(f"{where}.name = {name!r}: taken already; give each task its own name")
            names.add(name)
            values["name"] = name
            values["weight"] = values.get("weight", 1.0) * scale
            entries.append(TaskEntry(**values))
    return tuple(entries)


def read_recipe(table: Mapping[str, Any], base: Path) -> Recipe:
    """The recipe of a TOML table; RecipeError names the key, the value and what was expected."""
    table = dict(table)
    nested = {name: table.pop(name) for name in list(SECTIONS)[1:] if name in table}
    for name in table:
        if name not in keys_of(Recipe):
            known = [*keys_of(Recipe), *list(SECTIONS)[1:]]
            hint = ""
            for section, record in list(SECTIONS.items())[1:]:
                if name in keys_of(record):
                    hint = f" ({name} is a key of [{section}]: put it under that header)"
            raise RecipeError(f"{unknown('key', name, known)} (in the recipe){hint}")
    values = _read_section(Recipe, table, "")
    if values.get("seq_length", 8) % 8:
        raise RecipeError(f"seq_length = {values['seq_length']}: must be a multiple of 8")
    for section in ("documents", "packing", "output"):
        values[section] = SECTIONS[section](**_read_section(SECTIONS[section], nested.get(section, {}), section))
    values["specials"] = _read_specials(nested.get("specials", {}))
    values["sources"] = _read_sources(nested.get("sources", []))
    values["tasks"] = _read_tasks(nested.get("tasks", [{"preset": "causal"}]))
    if not values["tasks"]:
        raise RecipeError("tasks is empty: give at least one [[tasks]], or leave it out for causal")
    recipe = Recipe(base=base, **values)
    _check_together(recipe)
    return recipe


def _read_specials(table: Any) -> Specials:
    values = _read_section(Specials, table, "specials", extra="mode_tokens")
    role = keys_of(Specials)["mode_tokens"]
    known = [name for name in keys_of(Specials) if name != "mode_tokens"]
    for name, value in values["mode_tokens"].items():
        if name.isidentifier():  # a mode token is written in brackets; a bare word is a slip
            raise RecipeError(f"{unknown('key', name, known)} (in [specials]; a mode token is quoted with its brackets)")
        _read_value(role, value, f'specials."{name}"')
    return Specials(**values)


def _read_sources(tables: Any) -> tuple[Source, ...]:
    if not isinstance(tables, list):
        raise RecipeError(f"sources: expected [[sources]] tables, found {tables!r}")
    if not tables:
        raise RecipeError("the recipe has no [[sources]]: give at least one with paths = [\"data/*.jsonl\"]")
    sources: list[Source] = []
    for i, source in enumerate(tables):
        values = _read_section(Source, source, f"sources[{i}]")
        values["name"] = values.get("name") or f"source{i}"
        if values["name"] in (s.name for s in sources):
            raise RecipeError(f"sources[{i}].name = {values['name']!r}: taken already; give each source its own name")
        if any("://" in p for p in values["paths"]) and not all("://" in p for p in values["paths"]):
            raise RecipeError(f"sources[{i}].paths mixes URLs and local paths: make two sources of it")
        if "share" in values and "repeat" in values:
            raise RecipeError(f"sources[{i}] has both repeat and share: a source takes one of them")
        if values.get("format") in ("megatron", "tokens"):
            raise RecipeError(
                f"sources[{i}].format = {values['format']!r}: token sources cannot be read yet; give text (jsonl, parquet, arrow, text)"
            )
        sources.append(Source(**values))
    with_share = [s.share is not None for s in sources]
    if any(with_share) and not all(with_share):
        missing = ", ".join(s.name for s in sources if s.share is None)
        raise RecipeError(f"share is given for some sources and not for {missing}: give it in every source or in none")
    return tuple(sources)


def _check_together(recipe: Recipe) -> None:
    """What only the whole recipe can tell."""
    mult = recipe.packing.pad_seq_to_mult
    if recipe.seq_length % mult:
        raise RecipeError(f"packing.pad_seq_to_mult = {mult} does not divide seq_length = {recipe.seq_length}")
    if mult > 1 and recipe.packing.algorithm == "concat":
        raise RecipeError("packing.pad_seq_to_mult needs best_fit, first_fit or next_fit: concat leaves no room between segments")
    if recipe.total_tokens and recipe.sources[0].share is None:
        raise RecipeError("total_tokens goes with share: give each source a share, or leave total_tokens out")
    if recipe.output.columns == "compact":
        raise RecipeError('output.columns = "compact" cannot be written yet: use "full"')
    names = [task.name for task in recipe.tasks]
    for i, source in enumerate(recipe.sources):
        for name in source.tasks or ():
            if not tasks_named(name, names):
                raise RecipeError(f"sources[{i}].tasks: {unknown('task', name, names)}")


def tasks_named(name: str, names: Sequence[str]) -> list[int]:
    """Indices of the tasks that a name stands for: that task, and the family NAME-…"""
    return [i for i, task in enumerate(names) if task == name or task.startswith(name + "-")]


def load_recipe(path: Path) -> dict[str, Any]:
    """The TOML table of a recipe file; RecipeError if it cannot be read or parsed."""
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}; give a recipe file or inputs") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 at byte {error.start}; a recipe is a TOML file in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path}: not TOML: {error}") from None


def set_value(table: dict[str, Any], assignment: str) -> None:
    """Apply one `--set a.b=c` to a recipe's table. The value is TOML, or else a text. Lists go by number or by name."""
    path, equals, text = assignment.partition("=")
    if not equals or not path.strip():
        raise RecipeError(f"--set {assignment}: expected KEY=VALUE, as in --set packing.algorithm=next_fit")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    place: Any = table
    *parents, last = path.strip().split(".")
    for name in parents:
        if isinstance(place, list):
            named = [item for item in place if isinstance(item, dict) and item.get("name") == name]
            index = int(name) if name.isdigit() else -1
            if not named and not 0 <= index < len(place):
                raise RecipeError(f"--set {assignment}: there is no {name!r} among {len(place)}; go by number or by name")
            place = named[0] if named else place[index]
        elif isinstance(place, dict):
            place = place.setdefault(name, {})
        else:
            raise RecipeError(f"--set {assignment}: {name!r} lies inside a value that is no table")
    if not isinstance(place, dict):
        raise RecipeError(f"--set {assignment}: {path.strip()!r} is no key; name one, as in sources.0.repeat=2")
    place[last] = value


def normalised(recipe: Recipe) -> dict[str, Any]:
    """The recipe as a dataset stores it: defaults filled in, values in their types, presets expanded, and nothing of where
    its files lie (no paths, only the tokenizer's last path component) or of the engine."""
    table = asdict(recipe)
    for name in ("base", "engine"):
        del table[name]
    table["tokenizer"] = os.path.basename(os.path.normpath(recipe.tokenizer))
    table["sources"] = [{k: v for k, v in source.items() if k != "paths"} for source in table["sources"]]
    return table


def fingerprint_parts(recipe: Recipe, files: Sequence[Sequence[tuple[str, int]]], tokenizer_digest: str) -> dict[str, Any]:
    """What determines the shards: the law, the recipe, each source's (relative name, size) and the tokenizer's digest."""
    return {
        "law_version": LAW_VERSION,
        "recipe": {k: v for k, v in normalised(recipe).items() if k != "tokenizer"},
        "files": [[[name, size] for name, size in source] for source in files],
        "tokenizer": tokenizer_digest,
    }


def fingerprint(parts: Mapping[str, Any]) -> str:
    """The xxh3-128 of the canonical JSON of `fingerprint_parts`."""
    return digest_of(encode(parts))


def with_tasks(recipe: Recipe, tasks: Sequence[TaskEntry]) -> Recipe:
    """The recipe with other task entries (their parameters completed)."""
    return replace(recipe, tasks=tuple(tasks))


def from_normalised(table: Mapping[str, Any], engine: str) -> Recipe:
    """The recipe that a plan holds: `normalised` undone, but for the paths, which the plan's list of files replaces."""
    values = {name: table[name] for name in keys_of(Recipe) if name != "engine"}
    sources = []
    for source in table["sources"]:
        tasks = source["tasks"]
        lists = {"sample": tuple(source["sample"]), "tasks": None if tasks is None else tuple(tasks), "paths": ()}
        sources.append(Source(**{**source, **lists}))
    return Recipe(
        engine=engine,
        sources=tuple(sources),
        documents=Documents(**table["documents"]),
        packing=Packing(**table["packing"]),
        specials=Specials(**table["specials"]),
        tasks=tuple(TaskEntry(**task) for task in table["tasks"]),
        output=Output(**table["output"]),
        **values,
    )
