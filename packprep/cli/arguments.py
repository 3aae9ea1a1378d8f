"""Declare each command-line option once, and parse the values."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from packprep.messages import say

RECIPE_PANEL, WORK_PANEL, PRINTING_PANEL = "Recipe", "Work", "Printing"
"""Headings of option groups in the help. They come after the options without a heading."""

_presets_file = Path(__file__).parents[1] / "recipe" / "presets.toml"
PRESETS = list(
    dict.fromkeys(re.findall(r"^\[\[(\w+)\]\]$", _presets_file.read_text("utf-8"), re.M))
)
"""Names of the presets. The file is searched as text, because importing the recipe reader would
delay the help and the completion of words."""

Inputs = Annotated[
    list[str],
    typer.Argument(
        metavar="RECIPE.toml | INPUT...", help="A recipe, or files and patterns of the data."
    ),
]
Out = Annotated[
    str,
    typer.Option(
        "--out",
        metavar="DIR",
        help="The output folder or its URL, as in s3://…",
        show_default=False,
    ),
]
Directory = Annotated[
    str, typer.Argument(metavar="DIR", help="Folder or URL of a dataset or of an unfinished build.")
]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel=PRINTING_PANEL)
]


def _of_recipe(*names: str, help: str, **named: Any) -> Any:
    return typer.Option(
        *names, help=help, show_default=False, rich_help_panel=RECIPE_PANEL, **named
    )


Tokenizer = Annotated[
    str | None, _of_recipe(help='A tokenizer.json, its folder, a Hub name, or "bytes".')
]
SeqLength = Annotated[int | None, _of_recipe(metavar="N", help="Slots per row.")]
Tasks = Annotated[
    str | None,
    _of_recipe(metavar="PRESET", help=f"{', '.join(PRESETS)}.", autocompletion=lambda: PRESETS),
]
TextKey = Annotated[
    str | None, _of_recipe(metavar="K", help="The field or column that holds the text.")
]
Seed = Annotated[int | None, _of_recipe(metavar="N", help="Random seed.")]
Set = Annotated[
    list[str] | None,
    _of_recipe(
        "--set", metavar="KEY=VALUE", help="Set a recipe key. VALUE is TOML, or otherwise a text."
    ),
]
Moved = Annotated[
    list[str] | None,
    _of_recipe(
        "--source",
        metavar="NAME=PREFIX",
        help="Current location of a source's files, if they moved.",
    ),
]
Replay = Annotated[
    str | None,
    typer.Option(
        metavar="N|all",
        help="Rebuild N segments (per array task), or all shards, and compare them.",
        show_default=False,
    ),
]


def _of_work(metavar: str, least: int, help: str) -> Any:
    return typer.Option(
        metavar=metavar, min=least, help=help, show_default=False, rich_help_panel=WORK_PANEL
    )


Workers = Annotated[
    int | None, _of_work("N", 1, "Number of processes. Default: the available CPUs.")
]
ArrayIndex = Annotated[int | None, _of_work("I", 0, "Index of this array task, from 0 to N−1.")]
ArrayCount = Annotated[int | None, _of_work("N", 1, "Number of array tasks.")]


def recipe_of(
    inputs: list[str],
    tokenizer: str | None,
    seq_length: int | None,
    tasks: str | None,
    text_key: str | None,
    seed: int | None,
    assignments: list[str] | None,
) -> Any:
    """Make a recipe from the arguments of a command, complete it with `complete`, and return it.

    Args:
        inputs: One recipe file, or files and patterns of the data.
        tokenizer: Value of --tokenizer, or None.
        seq_length: Slots per row, or None.
        tasks: Name of a preset, or None.
        text_key: Text field of all sources, or None.
        seed: Random seed, or None.
        assignments: KEY=VALUE pairs of --set, or None.

    Raises:
        RecipeError: If the recipe is invalid. The message names the file and line, or the option.
    """
    from packprep.errors import RecipeError
    from packprep.recipe import (
        load_recipe,
        read_recipe,
        refuse_misnamed_recipes,
        set_value,
        split_assignment,
    )
    from packprep.storage import expanded

    for assignment in assignments or ():
        # This must fail before `--set seed = 3` is parsed as two inputs.
        split_assignment(assignment)
    inputs = [expanded(name) for name in inputs]
    recipes = _recipes_in(inputs)
    if not recipes:
        refuse_misnamed_recipes(inputs)
    if recipes:
        table, base = load_recipe(Path(recipes[0])), Path(recipes[0]).resolve().parent
    else:
        table, base = {"sources": [{"paths": list(inputs)}]}, Path.cwd()
        if tokenizer is None and not any(a.startswith("tokenizer=") for a in assignments or ()):
            say('tokenizer: "bytes", the built-in byte vocabulary; select another with --tokenizer')
            table["tokenizer"] = "bytes"
    # `typed` maps a key to the option that set it, for error messages.
    typed: dict[tuple[str | int, ...], str] = {}
    for key, value in (("seq_length", seq_length), ("seed", seed)):
        if value is not None:
            table[key] = value
            typed[(key,)] = f"--{key.replace('_', '-')} {value}"
    if tokenizer is not None:
        # A path in an option is relative to the current folder, and not to the recipe.
        place = Path(expanded(tokenizer))
        table["tokenizer"] = str(place.resolve()) if place.exists() else tokenizer
    _refuse_set_twice(
        {"seq_length": seq_length, "seed": seed, "tokenizer": tokenizer}, assignments or ()
    )
    if tasks is not None:
        if "," in tasks:
            raise RecipeError(
                f"--tasks {tasks}: expected one preset"
                "\nhint: for several tasks, write a recipe with [[tasks]]"
            )
        table["tasks"] = [{"preset": tasks}]
        typed["tasks",] = f"--tasks {tasks}"
    sources = table.get("sources")
    if text_key is not None and isinstance(sources, list):
        table["sources"] = [
            {**source, "text_key": text_key} if isinstance(source, dict) else source
            for source in sources
        ]
    # Assignments come last, so they override the recipe.
    for assignment in assignments or ():
        typed[set_value(table, assignment)] = f"--set {assignment}"
    try:
        recipe = read_recipe(table, base)
        _refuse_secrets(recipe)
        from packprep.objectives.tasks import complete
        from packprep.sources.formats import check_format
        from packprep.sources.passes import Passes

        # Formats and expressions are checked now, before any file is read.
        for i, source in enumerate(recipe.sources):
            check_format(source.format, i)
            Passes.of(source, i)
        return complete(recipe)
    except RecipeError as error:
        raise RecipeError(f"{_place(error.key, typed, recipes)}{error}", error.key) from None


def _recipes_in(inputs: list[str]) -> list[str]:
    """Return [recipe] if the input is a recipe, or [] if all inputs are data.

    Raises:
        RecipeError: If `inputs` is empty, or has a recipe and other inputs.
    """
    from packprep.errors import RecipeError

    recipes = [name for name in inputs if name.endswith(".toml")]
    if not inputs:
        raise RecipeError(
            "no recipe and no inputs\nhint: give a RECIPE.toml, or files and patterns"
        )
    if len(recipes) > 1:
        raise RecipeError(f"{', '.join(recipes)} are {len(recipes)} recipes\nhint: give one recipe")
    if recipes and len(inputs) > 1:
        data = ", ".join([name for name in inputs if name not in recipes][:3])
        raise RecipeError(
            f"{recipes[0]} is a recipe, so other inputs are not allowed: {data}"
            "\nhint: list the inputs as paths in the recipe's [[sources]]"
        )
    return recipes


def _refuse_set_twice(options: dict[str, Any], assignments: Iterable[str]) -> None:
    """Check that no key is given both by its option and by --set, such as --seed and --set seed=1.

    Raises:
        RecipeError: If a key is given twice.
    """
    from packprep.errors import RecipeError
    from packprep.recipe import split_assignment

    for assignment in assignments:
        key = split_assignment(assignment)[0].strip()
        if options.get(key) is not None:
            option = f"--{key.replace('_', '-')} {options[key]}"
            raise RecipeError(
                f"{option} and --set {assignment} both set {key}\nhint: give one of them"
            )


def _refuse_secrets(recipe: Any) -> None:
    """Check that no location in the recipe contains a secret, before the recipe is stored.

    Raises:
        RecipeError: If a location contains a secret.
    """
    from packprep.errors import RecipeError, StorageError
    from packprep.storage import expanded

    places: list[tuple[tuple[str | int, ...], str]] = [
        (("tokenizer",), recipe.tokenizer),
        (("documents", "chat_template"), recipe.documents.chat_template),
    ]
    places += [
        (("sources", i, "paths"), path)
        for i, source in enumerate(recipe.sources)
        for path in source.paths
    ]
    for key, place in places:
        try:
            expanded(place)
        except StorageError as error:
            raise RecipeError(str(error), key) from None


def _place(
    key: tuple[str | int, ...], typed: dict[tuple[str | int, ...], str], recipes: list[str]
) -> str:
    """Return where a key was given, as the start of an error message.

    For example, return "--set seed=x: " if an option gave the key, or "recipe.toml, line 3: ".
    Return "" if the key comes from neither an option nor a recipe.
    """
    from packprep.recipe import line_of, recipe_text

    option = next(
        (
            words
            for k, words in reversed(typed.items())
            if key[: len(k)] == k or k[: len(key)] == key != ()
        ),
        "",
    )
    if option or not recipes:
        return f"{option}: " if option else ""
    line = line_of(recipe_text(Path(recipes[0])), key) if key else None
    return f"{recipes[0]}, line {line}: " if line else f"{recipes[0]}: "


def moved_of(pairs: list[str] | None) -> dict[str, str]:
    """Return source → prefix from the values of --source."""
    from packprep.errors import RecipeError
    from packprep.storage import expanded

    moved = {}
    for pair in pairs or ():
        name, equals, prefix = pair.partition("=")
        if not equals or not name or not prefix:
            raise RecipeError(
                f"--source {pair}: expected NAME=PREFIX, as in --source web=/data/web"
            )
        expanded(prefix)  # This raises an error if the prefix contains a secret.
        moved[name] = prefix
    return moved


def replay_of(text: str | None) -> int | None:
    """Return the value of --replay: a number of segments, -1 for all shards, or None."""
    from packprep.errors import RecipeError

    if text is None or text == "all":
        return None if text is None else -1
    if not text.isdecimal() or int(text) < 1:
        raise RecipeError(f"--replay {text}: expected a number of segments, or all")
    return int(text)
