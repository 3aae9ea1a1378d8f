"""What the docs take from the code is current; `python docs/make.py` rewrites it."""

import re
from xml.etree import ElementTree

import pytest
from typer.main import get_command

from packprep.cli.application import app
from packprep.dataset.shard import NAMES
from packprep.objectives import REGISTRY
from packprep.recipe import presets
from packprep.verification import PROMISES
from tests.docs.modules import DOCS, module

make, drawings = module("make"), module("drawings")

PAGES = {path.relative_to(DOCS).as_posix(): path.read_text("utf-8") for path in make.pages()}


@pytest.mark.parametrize("page", PAGES)
def test_made_parts_are_current(page):
    # How help is laid out belongs to typer, whose versions differ; the next test holds its words.
    assert [name for name in make.stale_parts(DOCS / page) if not name.startswith("cli")] == [], (
        "run python docs/make.py"
    )


@pytest.mark.parametrize("command", get_command(app).commands)
def test_the_docs_say_every_option_in_the_words_of_the_help(command):
    (part,) = [
        part["text"]
        for part in make.find_parts(PAGES["cli.md"])
        if part["name"] == f"cli {command}"
    ]
    said = " ".join(part.split())
    known = get_command(app).commands[command]
    assert " ".join(known.help.split()) in said
    for option in known.params:
        assert " ".join((option.help or "").split()) in said
    options = {name for option in known.params for name in option.opts if name.startswith("--")}
    names = re.findall(r"^  (?:-\w, )?(--[a-z-]+)(?:, (--[a-z-]+))?", part, re.M)
    assert {name for pair in names for name in pair if name} == options | {"--help"}, (
        "run python docs/make.py"
    )


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_a_drawing_is_current_and_somewhere_to_be_seen(name):
    text = drawings.DRAWINGS[name]()
    assert (DOCS / "drawings" / f"{name}.svg").read_text("utf-8") == text, "run python docs/make.py"
    assert ElementTree.fromstring(text).find("{http://www.w3.org/2000/svg}title") is not None
    assert any(f"(drawings/{name}.svg)" in page for page in PAGES.values())


def test_every_part_has_a_place():
    named = {match["name"] for text in PAGES.values() for match in make.find_parts(text)}
    assert named == set(make.PARTS)


@pytest.mark.long
def test_a_part_that_is_out_of_date_is_found_and_rewritten(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- made: p1 -->\nsomething else\n<!-- /made -->\nafter\n")
    assert make.stale_parts(page) == ["p1"]
    page.write_text(make.made(page.read_text()))
    assert make.stale_parts(page) == []
    assert page.read_text().startswith("before\n<!-- made: p1 -->\n> **P1** the dataset")
    assert page.read_text().endswith("<!-- /made -->\nafter\n")


def test_the_format_says_every_promise_and_every_array():
    for number in PROMISES:
        assert f"\n### {number}\n" in PAGES["format.md"]
    for name in NAMES:
        assert f"`{name}`" in PAGES["format.md"]


def test_the_docs_say_every_objective_and_every_preset():
    for name in REGISTRY:
        assert (
            f"\n## {name}\n" in PAGES["objectives.md"]
            and f'objective = "{name}"' in PAGES["recipe.md"]
        )
    for name in presets():
        assert f"`{name}`" in PAGES["objectives.md"]


def test_the_docs_say_every_command():
    from packprep.cli.application import app

    for command in app.registered_commands:
        assert f"\n## {command.callback.__name__}\n" in PAGES["cli.md"]


def test_the_format_says_every_reason_of_a_reject():
    from packprep.building.work import TOO_LONG
    from packprep.documents.reading import DROP_REASONS, is_bad
    from packprep.sources.formats import BAD_REASONS
    from packprep.tokenizer.encoding import TEXT_REASONS

    for reason in (*BAD_REASONS, *TEXT_REASONS, *DROP_REASONS, TOO_LONG):
        (line,) = [
            line for line in PAGES["format.md"].splitlines() if line.startswith(f"| `{reason}`")
        ]
        assert line.endswith("| yes |" if is_bad(reason) else "| no |")
