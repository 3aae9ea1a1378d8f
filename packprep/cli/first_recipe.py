"""Write a first recipe for data and a tokenizer, with the reason for each key.

Some errors of a plan name settings that avoid the error. These settings become keys of the recipe.

```
paths ─► sources ─► plan ─┬─ an error with settings ─► add these keys, and plan again
                          └─ lengths of a sample ─► seq_length ─► recipe.toml, recipe.schema.json
```
"""

import glob
import json
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from packprep.building.forecast import FULL, forecast
from packprep.building.planning import Inputs, look_up, make_plan, written_by_template
from packprep.conversations.chat_template import compile_template
from packprep.documents.calibration import Estimates
from packprep.errors import RecipeError, SourceError, VocabularyError
from packprep.messages import one_line, put_line
from packprep.objectives.tasks import complete, recipe_schema
from packprep.recipe import as_toml, presets, read_recipe, refuse_misnamed_recipes
from packprep.sources.formats import FORMATS, detect_format, formats_asked
from packprep.storage import expanded
from packprep.tokenizer.file import first_put_by_processor

SCHEMA_NAME = "recipe.schema.json"
_SEQ_LENGTHS = (512, 1024, 2048, 4096, 8192)
_WHOLE = 0.9
"""Fraction of documents that should fit in one row of the suggested seq_length. If none of
_SEQ_LENGTHS is large enough, 4096 is suggested."""
_MOST_NAMES = 100_000
_WARNING = "warning: "


@dataclass
class _SourceKeys:
    """The recipe keys of one source, and the reasons for their values."""

    keys: dict[str, Any]
    why: dict[str, str] = field(default_factory=dict)


def write_first_recipe(
    paths: Sequence[str],
    tokenizer: str,
    preset: str,
    text_key: str | None,
    out: Path,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Write a recipe for some data, after reading a sample, and a schema for editors.

    Args:
        paths: Files, patterns, folders or URLs. Each becomes a source. A folder becomes one source
            for each of its formats.
        tokenizer: A tokenizer.json, its folder, a Hub name, or "bytes".
        preset: Name of the preset of tasks.
        text_key: Field or column of the text, or None to detect it.
        out: Path of the recipe, which must not exist. The schema is written to the same folder.
        say: Function that prints a message.

    Returns:
        A dict. `recipe` and `schema` are the paths of both files. `sources` has the names of the
        sources. `seq_length` is the value in the recipe. `warnings` are about data and recipe.

    Raises:
        RecipeError: If `out` exists or its folder does not.
        PackprepError: If a plan fails with an error that no setting avoids.
    """
    _check_paths(paths, out)
    schema, base = out.with_name(SCHEMA_NAME), out.parent.resolve()
    place = Path(expanded(tokenizer))
    tokenizer = _below(place, base) if place.exists() else tokenizer
    table: dict[str, Any] = {"tokenizer": tokenizer, "tasks": [{"preset": preset}]}
    left_out: list[str] = []
    sources = [
        _SourceKeys({"name": name, "paths": source_paths})
        for name, source_paths in _sources(paths, base, left_out)
    ]
    # A plan of each single source shows the settings that it needs, and its document lengths.
    samples: list[Estimates] = []
    looked_up, specials = _find_settings(table, base, sources, text_key, samples, say)
    lengths, weights = (
        np.concatenate([getattr(sample, name) for sample in samples])
        for name in ("lengths", "length_weights")
    )
    table["seq_length"], why = _seq_length(lengths, weights)
    documents = _ends_of_documents(looked_up, samples)
    table["documents"] = {key: value for key, (value, _) in documents.items()}
    table |= {"sources": [source.keys for source in sources], "specials": _parsed(specials)}
    # Longer rows are used if they have less padding.
    suggested = table["seq_length"]
    planned = _forecast(table, base)
    for length in (n for n in _SEQ_LENGTHS if n > suggested):
        if _are_full(planned):
            break
        longer = _forecast({**table, "seq_length": length}, base)
        if _are_full(longer):
            planned, table["seq_length"] = longer, length
            why += f"; rows of {suggested} would have more padding"
    planned["warnings"] += left_out
    out.write_text(_text(table, why, sources, documents, specials, planned), "utf-8")
    if not schema.exists():
        schema.write_text(json.dumps(recipe_schema(formats_asked()), indent=2) + "\n", "utf-8")
    return {
        "recipe": str(out),
        "schema": str(schema),
        "sources": [source.keys["name"] for source in sources],
        "seq_length": table["seq_length"],
        "warnings": planned["warnings"],
    }


def _check_paths(paths: Sequence[str], out: Path) -> None:
    """Check that the recipe can be written, and that no path is a recipe."""
    if out.exists():
        raise RecipeError(
            f"{out} already exists and is not overwritten"
            "\nhint: give another --out, or move the file away"
        )
    if not out.parent.is_dir():
        raise RecipeError(f"{out}: no such folder: {out.parent}\nhint: create it")
    if recipe := next((path for path in paths if path.endswith(".toml")), None):
        raise RecipeError(
            f"{recipe} is a recipe, not data"
            "\nhint: build it with `packprep build`, or name files, patterns or folders of data"
        )
    refuse_misnamed_recipes(paths)


def _find_settings(
    table: dict[str, Any],
    base: Path,
    sources: Sequence[_SourceKeys],
    text_key: str | None,
    samples: list[Estimates],
    say: Callable[[str], None],
) -> tuple[list[Inputs], tuple[str, ...]]:
    """Set the keys that each source needs.

    Each source is planned. If planning fails with an error that names settings, these settings are
    added, and the source is planned again.

    Return the inputs of each source, and the lines of TOML for [specials] of the recipe.

    Args:
        table: The keys of all sources.
        base: Folder of the recipe.
        sources: The sources. They receive the settings.
        text_key: Field or column of the text, or None to detect it.
        samples: Receives the estimates of each source.
        say: Function that prints a message.
    """
    specials: tuple[str, ...] = ()
    looked_up: list[Inputs] = []
    lacks_key: list[SourceError] = []  # Errors of sources that do not have the given text_key.
    for source in sources:
        if text_key is not None:
            source.keys["text_key"] = text_key
        # An error may name settings that avoid it. Planning repeats until nothing is missing.
        while True:
            try:
                recipe = {**table, "sources": [source.keys], "specials": _parsed(specials)}
                inputs = look_up(complete(read_recipe(recipe, base)), {})
                make_plan(inputs, _without_warnings(say), samples)
                looked_up.append(inputs)
                break
            except SourceError as error:
                # A source without the given text_key may have its text at another key.
                if (
                    "text_key" in error.settings
                    and source.keys.get("text_key", "") == text_key
                    and len(sources) > 1
                ):
                    lacks_key.append(error)
                    del source.keys["text_key"]
                # If these settings are already set, another attempt would fail again.
                if not error.settings or error.settings.keys() <= source.keys.keys():
                    raise
                source.keys |= error.settings
                source.why |= dict.fromkeys(error.settings, _why(str(error)))
            except VocabularyError as error:
                if not error.settings or specials:
                    raise
                specials = error.settings
    # If no source has the text_key, it is probably misspelled.
    if len(lacks_key) == len(sources):
        raise lacks_key[0]
    return looked_up, specials


def _forecast(table: dict[str, Any], base: Path) -> dict[str, Any]:
    """Return the forecast of a recipe, including the warnings of its plan."""
    messages: list[str] = []
    samples: list[Estimates] = []
    inputs = look_up(complete(read_recipe(table, base)), {})
    planned = forecast(make_plan(inputs, messages.append, samples), inputs, samples)
    planned["warnings"] += [
        message.removeprefix(_WARNING) for message in messages if message.startswith(_WARNING)
    ]
    return planned


def _are_full(planned: dict[str, Any]) -> bool:
    """Return whether rows are full enough that a build does not warn."""
    filled = planned["utilisation"]["without_last_rows"]
    return filled is None or filled >= FULL


def _without_warnings(say: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that passes messages to `say`, except warnings.

    The recipe is not finished, so a warning may no longer apply to the finished recipe.
    """
    return lambda message: None if message.startswith(_WARNING) else say(message)


def _ends_of_documents(
    looked_up: Sequence[Inputs], samples: Sequence[Estimates]
) -> dict[str, tuple[bool, str]]:
    """Return the keys of [documents] that the recipe needs for bos and eos.

    The result is key → (value, reason), for example {"append_eos": (False, "the chat template
    writes </s> itself")}. A chat template may write bos and eos itself.

    Args:
        looked_up: The inputs of each source, with a plan for only this source.
        samples: The calibration sample of each source.

    Raises:
        RecipeError: If the template writes bos or eos itself, but documents without a template get
            this token only from a key of [documents].
    """
    vocabulary, template = looked_up[-1].vocabulary, looked_up[-1].chat_template
    chats = [sample.chat for sample in samples]
    compiled = compile_template(template) if template is not None and any(chats) else None
    bos, eos = (
        compiled and written_by_template(compiled, vocabulary, role) for role in ("bos", "eos")
    )
    # Some tokenizers put bos before every text.
    first_token = first_put_by_processor(vocabulary.tokenizer_json)
    puts_bos = first_token is not None and first_token == vocabulary.roles.get("bos")
    texts = [
        inputs.recipe.sources[0].name
        for inputs, is_chat in zip(looked_up, chats, strict=True)
        if not is_chat
        and any(FORMATS[format].holds != "tokens" for format, _ in inputs.files[0].kinds)
    ]
    # All sources share one value of the key, but texts and chats need different values.
    if texts and (eos or (bos and puts_bos)):
        chat = looked_up[chats.index(True)].recipe.sources[0].name
        written, key = (eos, "append_eos") if eos else (bos, "prepend_bos")
        raise RecipeError(
            f"sources {chat!r} and {texts[0]!r} cannot share documents.{key}: the chat template"
            f" writes {written}, but texts get it only from this key"
            "\nhint: run `packprep init` for each source, and mix the datasets while training"
        )
    keys: dict[str, tuple[bool, str]] = {}
    if puts_bos and (texts or not any(chats)):
        keys["prepend_bos"] = True, "as the tokenizer's post-processor does"
    if eos:
        keys["append_eos"] = False, f"the chat template writes {eos} itself"
    return keys


def _below(path: Path, base: Path) -> str:
    """Return `path` relative to the folder `base` if it is below `base`, otherwise absolute."""
    path = Path(os.path.abspath(path))
    return path.relative_to(base).as_posix() if path.is_relative_to(base) else str(path)


def _sources(
    paths: Sequence[str], base: Path, left_out: list[str]
) -> Iterator[tuple[str, list[str]]]:
    """Yield (name, patterns) of each source.

    Args:
        paths: Files, patterns, folders or URLs.
        base: Folder of the recipe.
        left_out: Receives messages about folders with unread files.
    """
    taken: set[str] = set()

    def named(path: str, suffix: str = "") -> str:
        words = re.sub(
            r"[^A-Za-z0-9_-]+", "-", os.path.basename(path.rstrip("/")).split(".")[0]
        ).strip("-")
        name = base_name = f"{words or 'source'}{suffix}"
        number = 2
        while name in taken:
            name, number = f"{base_name}-{number}", number + 1
        taken.add(name)
        return name

    for path in map(expanded, paths):
        if "://" in path:
            yield named(path), [path]
            continue
        place = Path(os.path.abspath(path))
        # A saved Hugging Face dataset is a folder, but a single input.
        if (
            not place.is_dir()
            or (place / "state.json").is_file()
            or (place / "dataset_dict.json").is_file()
        ):
            stem = place.parent if "*" in place.name else place
            yield named(stem.name), [_below(place, base)]
            continue
        endings_by_format, other_endings = _formats_below(place)
        if not endings_by_format:
            extensions = ", ".join(dict.fromkeys(s for f in FORMATS.values() for s in f.suffixes))
            raise RecipeError(
                f"{path}: no file in this folder has a known extension ({extensions}, .txt, .md;"
                " formats of lines also with .gz or .zst)"
                "\nhint: name the files with a pattern"
            )
        if other_endings:
            listed = ", ".join(
                f"{count:,} {ending}" for ending, count in other_endings.most_common(5)
            )
            pattern = f"{glob.escape(_below(place, base))}/**/*{other_endings.most_common(1)[0][0]}"
            left_out.append(
                f"{path}: files of unknown formats are left out: {listed}; to read them as text,"
                f" name {pattern}"
            )
        # Each format becomes a source, because formats may need different keys.
        for format, endings in endings_by_format.items():
            patterns = [
                f"{glob.escape(_below(place, base))}/**/*{ending}" for ending in sorted(endings)
            ]
            yield named(place.name, f"-{format}" if len(endings_by_format) > 1 else ""), patterns


def _formats_below(folder: Path) -> tuple[dict[str, set[str]], Counter[str]]:
    """Return which formats the files below a folder have, judging by the endings of their names.

    The first result is format → endings, for example {"jsonl": {".jsonl", ".jsonl.gz"}}. The second
    counts the files with unknown endings, for example {".pdf": 3}. The search stops after about
    _MOST_NAMES names.
    """
    endings_by_format: dict[str, set[str]] = {}
    other_endings: Counter[str] = Counter()
    seen = 0
    for _, _, names in os.walk(folder):
        for name in names:
            format, compression = detect_format(name)
            if (pair := FORMATS[format].pair) and not name.lower().endswith(pair[0]):
                continue  # The pattern of the pair's first file suffices.
            ending = "".join(Path(name).suffixes[-2 if compression else -1 :])
            if FORMATS[format].suffixes or re.fullmatch(r"\.(txt|md)(\.\w+)?", ending.lower()):
                endings_by_format.setdefault(format, set()).add(ending)
            elif ending and not name.startswith("."):
                other_endings[ending] += 1
        seen += len(names)
        if seen > _MOST_NAMES:
            break
    return dict(sorted(endings_by_format.items())), other_endings


def _parsed(lines: Sequence[str]) -> dict[str, Any]:
    return tomllib.loads("\n".join(lines))


def _why(message: str) -> str:
    """Return the recipe's comment on a setting that an error with this `message` suggested.

    If the message lists keys or columns, the comment is "one of" and this list. Otherwise it is "as
    found in the documents".
    """
    keys = re.search(r"(?:keys|columns) are:? (.*?)(?:\. |\n)", message)
    return f"one of {keys[1].replace(chr(39), '')}" if keys else "as found in the documents"


def _seq_length(lengths: np.ndarray, weights: np.ndarray) -> tuple[int, str]:
    """Return a suggested seq_length and the reason.

    Args:
        lengths: Numbers of tokens of the sampled documents.
        weights: Number of documents that each sampled document represents.
    """
    if not len(lengths):
        return 2048, "the sample has no document"
    order = np.argsort(lengths)
    below = np.cumsum(weights[order]) / weights.sum()

    def of_part(fraction: float) -> int:
        return int(lengths[order][min(int(np.searchsorted(below, fraction)), len(order) - 1)])

    chosen = next((n for n in _SEQ_LENGTHS if n >= of_part(_WHOLE) + 2), 4096)
    stays = float(weights[lengths + 2 <= chosen].sum() / weights.sum())
    return (
        chosen,
        (
            f"half of the documents have at most {of_part(0.5):,} tokens, 90 % at most"
            f" {of_part(0.9):,}; about {stays:.0%} fit in a row, the others are split"
        ),
    )


def _text(
    table: dict[str, Any],
    why: str,
    sources: Sequence[_SourceKeys],
    documents: dict[str, tuple[bool, str]],
    specials: Sequence[str],
    planned: dict[str, Any],
) -> str:
    """Return the text of the recipe file, with comments."""
    lines = [
        f"#:schema ./{SCHEMA_NAME}",
        (
            f"# About {planned['documents']:,} documents, {planned['text_bytes']:,} bytes of text,"
            f" {planned['tokens']:,} tokens:"
        ),
        (
            f"# {planned['output_bytes']:,} bytes in rows. See also `packprep plan`;"
            " docs/recipe.md lists all keys."
        ),
        "",
        f"tokenizer = {as_toml(table['tokenizer'])}"
        + (
            "  # built in; alternatives: your tokenizer.json, its folder, a Hub name"
            if table["tokenizer"] == "bytes"
            else ""
        ),
        f"seq_length = {table['seq_length']}  # {why}",
        "seed = 0  # random seed; another value changes all random choices",
        "",
        "[[tasks]]",
        f"preset = {as_toml(table['tasks'][0]['preset'])}  # one of {', '.join(presets())}",
    ]
    for source in sources:
        lines += ["", "[[sources]]"]
        for key, value in source.keys.items():
            reason = source.why.get(key)
            lines.append(f"{key} = {as_toml(value)}" + (f"  # {reason}" if reason else ""))
    if documents:
        lines += [
            "",
            "[documents]",
            *(f"{key} = {as_toml(v)}  # {reason}" for key, (v, reason) in documents.items()),
        ]
    if specials:
        lines += [
            "",
            "[specials]  # special tokens that the tokenizer's files do not name",
            *specials,
        ]
    lines += [f"\n# warning: {one_line(warning)}" for warning in planned["warnings"]]
    return "\n".join(lines) + "\n"


def print_first_recipe(result: dict[str, Any]) -> None:
    """Print which files were written, and the next step."""
    put_line(
        f"{result['recipe']}: {', '.join(result['sources'])}, in rows of {result['seq_length']}"
        " slots"
    )
    for warning in result["warnings"]:
        put_line(f"warning: {one_line(warning)}")
    put_line(
        f"next: check {result['recipe']}, then run packprep build {result['recipe']} --out DIR"
    )
