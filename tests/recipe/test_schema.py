"""The JSON schema of the recipe takes what is read, and refuses keys, types and ranges that are
not."""

import json
import tomllib
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from packprep.errors import RecipeError
from packprep.objectives import REGISTRY
from packprep.objectives.tasks import complete, recipe_schema
from packprep.recipe import KEYS, presets, read_recipe
from packprep.sources.formats import formats_asked
from tests import made
from tests.command_line import packprep
from tests.docs.blocks import read_page
from tests.docs.modules import DOCS
from tests.docs.running import over_a_minimal_recipe
from tests.golden.builds import BUILDS
from tests.random_recipes import recipe_of
from tests.recipe.values_made import LEAST, VALUES, in_section

SCHEMA = recipe_schema(formats_asked())
VALIDATOR = Draft202012Validator(SCHEMA)


def faults(table):
    """The places in a recipe at which the schema finds a fault."""
    return [error.json_path for error in VALIDATOR.iter_errors(table)]


def is_read(table):
    try:
        complete(read_recipe(table, Path("/base")))
    except RecipeError:
        return False
    return True


def written():
    """Place → recipe: those of the examples, the pages and the golden builds and datasets."""
    found = {path.name: path.read_text("utf-8") for path in (made.ROOT / "examples").glob("*.toml")}
    found |= {f"golden {name}": text for name, text in BUILDS.items()}
    for path in (made.ROOT / "tests" / "golden").glob("law*/*/recipe.toml"):
        found[f"{path.parent.parent.name} {path.parent.name}"] = path.read_text("utf-8")
    tables = {place: tomllib.loads(text) for place, text in found.items()}
    for page in map(read_page, [made.ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]):
        for block in page.blocks:
            if block.language == "toml" and block.name != "pyproject.toml":
                table = tomllib.loads(block.text)
                tables[page.at(block)] = table if block.name else over_a_minimal_recipe(table)
    return tables


WRITTEN = written()


def test_it_is_a_schema_and_docs_hold_it_as_the_command_prints_it():
    Draft202012Validator.check_schema(SCHEMA)
    assert packprep("schema").out == (DOCS / "recipe.schema.json").read_text("utf-8"), (
        "run python docs/make.py"
    )


@pytest.mark.parametrize("place", WRITTEN)
def test_every_recipe_that_stands_anywhere_is_taken(place):
    assert faults(WRITTEN[place]) == []


@pytest.mark.parametrize("section, key", VALUES)
def test_every_value_of_a_key_that_is_read_is_taken(section, key):
    for value in VALUES[section, key][0]:
        given = value[0] if isinstance(value, tuple) else value
        assert faults(in_section(section, key, given)) == [], given


def test_random_recipes_that_are_read_are_taken():
    tables = [table for table in map(recipe_of, range(300)) if is_read(table)]
    assert len(tables) > 100 and all(faults(table) == [] for table in tables)


def test_all_presets_and_tasks_of_an_objective_from_elsewhere_are_taken():
    assert faults({**LEAST, "tasks": [{"preset": name, "weight": 0.5} for name in presets()]}) == []
    assert faults({**LEAST, "tasks": [{"objective": "of_a_package", "depth": [1, {"x": 2}]}]}) == []
    for name, objective in REGISTRY.items():
        defaults = json.loads(json.dumps({p.name: p.default for p in objective.parameters}))
        assert faults({**LEAST, "tasks": [{"objective": name, **defaults}]}) == []


# What no type says: which values go together, and of texts and numbers what only reading tells.
UNSAID = {
    ("", "seq_lengths"): ([8192, 4096], [4096, 4096]),
    ("sources", "sample"): ([0.5, 0.5], [0.9, 0.1]),
    ("output", "shard_text_bytes"): ("0",),
    ("packing", "pad_seq_to_mult"): (3,),
    ("packing", "encoder_length"): (64,),
    ("packing", "decoder_length"): (64,),
    ("documents", "template_date"): ("2026-02-30",),
    ("documents", "chat_template_kwargs"): (
        {"messages": []},
        {"tools": 1},
        {"a b": 1},
        {"a": None},
    ),
}


@pytest.mark.parametrize("section, key", VALUES)
def test_values_of_a_wrong_type_or_range_are_refused(section, key):
    refused = 0
    for value in VALUES[section, key][1]:
        if (
            isinstance(value, float)
            and value.is_integer()
            or value in UNSAID.get((section, key), ())
        ):
            continue  # 8.0 is an integer to JSON
        if isinstance(value, list) and len(value) > 1000:
            continue  # over which jsonschema thinks for half a minute
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except ValueError:  # JSON has neither NaN nor half characters
            continue
        [place] = set(faults(in_section(section, key, value)))
        assert place.startswith(f"$.{section or key}"), value
        refused += 1
    assert refused


@pytest.mark.parametrize(
    "change, place",
    [
        ({"seq_lenght": 512}, "$"),
        ({"documents": {"apend_eos": True}}, "$.documents"),
        ({"sources": [{"path": "x"}]}, "$.sources[0]"),
        ({"sources": []}, "$.sources"),
        ({"specials": {"NLU": 7}}, "$.specials"),
        ({"specials": {"[NLU]": -1}}, "$.specials['[NLU]']"),
        ({"specials": {"sentinels": {"first": 1, "count": 2, "x": 3}}}, "$.specials.sentinels"),
        ({"tasks": [{"name": "x"}]}, "$.tasks[0]"),
        ({"tasks": [{"preset": "ul2q"}]}, "$.tasks[0].preset"),
        ({"tasks": [{"preset": "ul2r", "name": "x"}]}, "$.tasks[0]"),
        ({"tasks": [{"objective": "causal", "sentinel": True}]}, "$.tasks[0]"),
        (
            {"tasks": [{"objective": "span_corruption", "noise_density": 1}]},
            "$.tasks[0].noise_density",
        ),
        (
            {"tasks": [{"objective": "span_corruption", "noise_density": "0.15"}]},
            "$.tasks[0].noise_density",
        ),
        ({"tasks": [{"objective": "span_corruption", "random_roll": 1}]}, "$.tasks[0].random_roll"),
        (
            {"tasks": [{"objective": "masked_diffusion", "noise_range": [0.1]}]},
            "$.tasks[0].noise_range",
        ),
        ({"tasks": [{"objective": "masked_diffusion", "weighting": "p"}]}, "$.tasks[0].weighting"),
        (
            {"tasks": [{"objective": "block_diffusion", "block_length": 0}]},
            "$.tasks[0].block_length",
        ),
    ],
    ids=str,
)
def test_a_wrong_key_type_or_value_is_refused_where_it_stands(change, place):
    assert place in faults({**LEAST, **change})
    assert not is_read({**LEAST, **change})


def test_every_key_has_its_meaning_kind_and_default():
    for section, keys in KEYS.items():
        table = SCHEMA["properties"][section] if section else SCHEMA
        table = table.get("items", table)
        properties = table.get("else", table)["properties"]
        for name, key in keys.items():
            if name == "mode_tokens":
                [made_of] = table["patternProperties"].values()
            else:
                made_of = properties[name]
                default = (
                    json.loads(json.dumps(key.default)) if key.default not in (..., "") else None
                )
                assert json.loads(json.dumps(made_of.get("default"))) == default
            assert (made_of["title"], made_of["description"]) == (key.kind, key.meaning)
