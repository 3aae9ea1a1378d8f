"""Mistakes that people make on the command line, each made in a small project, with the words that
its message must hold.

`tests/test_mistakes.py` makes each of them.
"""

import gzip
import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packprep.format.json_files import encode
from tests import made
from tests.command_line import Said, inside
from tests.tokenizer import tokenizers_made

RECIPE = """\
seq_length = 512
tokenizer = "bytes"

[[sources]]
paths = ["data/*.jsonl"]

[[tasks]]
preset = "ul2r"
"""
BUILD = "build recipe.toml --out out"
CAUSAL = {'preset = "ul2r"': 'objective = "causal"'}


@dataclass(frozen=True)
class Mistake:
    """One mistake, made in the folder of a project, and what a tired reader of its message must
    find there.

    change    what of RECIPE is written otherwise; more is written behind it
    before    what else is done to the project first
    typed     the command; environment: what is set for it
    what, where, do   words of the message: what is wrong, where, what to do about it
    mended    what is done then, beside writing RECIPE as it should be; and the command that has to succeed, typed in the
              same folder. None: there is nothing to run
    most_lines of the message; keeps: whether nothing is written
    """

    name: str
    what: str
    where: str
    do: str
    change: Mapping[str, str] = field(default_factory=dict)
    more: str = ""
    before: Callable[[Path], Any] = lambda project: None
    typed: str = BUILD
    environment: Mapping[str, str] = field(default_factory=dict)
    mended: Callable[[Path], Any] = lambda project: None
    then: str | None = BUILD
    status: int = 2
    most_lines: int = 6
    keeps: bool = True


def project(folder: Path) -> Path:
    """A corpus of two files and a recipe; other files of other kinds beside them."""
    made.write_lines(folder / "data/a.jsonl", made.texts(12))
    made.write_lines(folder / "data/b.jsonl", made.texts(12, 1))
    (folder / "recipe.toml").write_text(RECIPE)
    return folder


def make(mistake: Mistake, folder: Path) -> Said:
    """Make a mistake in a project, typed in its folder."""
    text = RECIPE
    for old, new in mistake.change.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "recipe.toml").write_text(text + mistake.more)
    mistake.before(folder)
    return typed(folder, mistake.typed, mistake.environment)


def typed(folder: Path, command: str, environment: Mapping[str, str] | None = None) -> Said:
    """A command, typed in a folder."""
    here = os.getcwd()
    os.chdir(folder)
    try:
        return inside(*shlex.split(command), **(environment or {}))
    finally:
        os.chdir(here)


# What is done to a project


def writes(name: str, text: str | bytes) -> Callable[[Path], Any]:
    return lambda project: made.write(
        project / name, text.encode() if isinstance(text, str) else text
    )


def lines(*documents: dict[str, Any]) -> str:
    return "".join(json.dumps(document) + "\n" for document in documents)


def builds(recipe: str = RECIPE) -> Callable[[Path], Any]:
    """Build `out` as it should be, whatever the recipe says at this moment."""

    def build(project: Path) -> None:
        wrong = (project / "recipe.toml").read_text()
        (project / "recipe.toml").write_text(recipe)
        assert typed(project, BUILD).status == 0
        (project / "recipe.toml").write_text(wrong)

    return build


def begins(project: Path) -> None:
    """A build that did not end: its plan is there, its shard and its manifest are not."""
    builds()(project)
    (project / "out/dataset.json").unlink()
    shutil.rmtree(project / "out/receipts")


def builds_other(project: Path) -> None:
    """Build another dataset, `other`, of texts that the recipe may or may not name."""
    assert typed(project, "build data/a.jsonl --tokenizer bytes --out other").status == 0


def edits(path: Path, **changes: Any) -> None:
    """Edit a file of a dataset as a newer version could have written it; without changes, as an
    editor saves it."""
    value = json.loads(path.read_bytes())
    path.write_bytes(
        encode({**value, **changes}) if changes else json.dumps(value, indent=2).encode()
    )


def moves(project: Path) -> None:
    builds()(project)
    (project / "data").rename(project / "moved")


def both(*actions: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def act(project: Path) -> None:
        for action in actions:
            action(project)

    return act


LLAMA = json.dumps(tokenizers_made.llama3_like(100))
LLAMA_RECIPE = {'"bytes"': '"llama.json"'}


def pastes(words: str) -> Callable[[Path], Any]:
    """Paste the lines that the message lists, behind the recipe that is wrong."""

    def paste(project: Path) -> None:
        text = RECIPE.replace('"bytes"', '"llama.json"')
        if words == "mask":
            text = text.replace("ul2r", "mlm")
        (project / "recipe.toml").write_text(text)
        lines = typed(project, BUILD).err.split("\n\n")
        block = next(part for part in lines if part.startswith("  [specials]"))
        (project / "recipe.toml").write_text(f"{text}\n{block}\n")

    return paste


MESSAGES = lines(
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "good day"}]}
)
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{%"
    " endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
BAD = lines(*({"text": text} for text in made.texts(5))) + "no JSON\n" * 150
CHAT = '[documents]\nchat_template = "chat.jinja"\n'
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
GZIP = gzip.compress(lines(*({"text": text} for text in made.texts(40))).encode(), mtime=0)
