"""The fenced blocks of a page, and what its comments say of them.

    <!-- needs: corpus, torch -->       first on the page: what its blocks find and use; the words of world.py
    <!-- not run: REASON -->            before a fence that cannot run here
    <!-- exit status: 1 -->             before a fence of sh that is to end so
    <!-- sample output -->              before a fence of text that is not what the block above it prints

What becomes of a block is told by its language (running.py). A fence in any other form is an error:
none escapes.
"""

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

LANGUAGES = ("sh", "bash", "toml", "python", "json", "yaml", "text", "console")
_FENCE = re.compile(r"( *)```([a-z]+)")
_COMMENT = re.compile(r"<!--(.*?)-->", re.S)
_NAME = re.compile(r"# ([\w.-]+\.(?:py|toml|jinja|sh))(?:\s|$)")


class BlockError(Exception):
    """A block that is not what its page says: where, what, and all that it printed."""


class Block(NamedTuple):
    """A fence: its language, its text without the fence's indentation, the line of its first line,
    and what is said of it."""

    language: str
    text: str
    line: int
    not_run: str | None
    exit_status: int
    sample: bool
    below: bool
    """Whether nothing stands between it and the block above it: a fence of text is then what that
    block prints."""

    @property
    def name(self) -> str | None:
        """The file that a block of Python or TOML is, by its first line."""
        match = _NAME.match(self.text)
        return (
            match[1]
            if match
            and match[1].endswith({"python": ".py", "toml": ".toml"}.get(self.language, "\0"))
            else None
        )


class Page(NamedTuple):
    """A page: its path, the words of its `needs`, its blocks in order."""

    path: Path
    needs: tuple[str, ...]
    blocks: tuple[Block, ...]

    def at(self, block: Block) -> str:
        return f"{self.path.name}:{block.line}"


def read_page(path: Path) -> Page:
    """BlockError for a fence that is not of a known language, is never closed, or has no plain
    form."""
    lines = path.read_text("utf-8").splitlines()
    blocks: list[Block] = []
    said: list[str] = []
    below = False
    i = 0
    while i < len(lines):
        line = lines[i]
        if line.lstrip().startswith(("```", "~~~")):
            fence = _FENCE.fullmatch(line)
            if not fence or fence[2] not in LANGUAGES:
                raise BlockError(
                    f"{path.name}:{i + 1}: {line.strip()!r} begins no block: ``` and one of"
                    f" {', '.join(LANGUAGES)}"
                )
            closing = f"{fence[1]}```"
            end = next((j for j in range(i + 1, len(lines)) if lines[j] == closing), None)
            if end is None:
                raise BlockError(f"{path.name}:{i + 1}: no line {closing!r} closes this block")
            text = textwrap.dedent("".join(f"{inner}\n" for inner in lines[i + 1 : end]))
            blocks.append(Block(fence[2], text, i + 2, *_notes(said), below))
            said, below, i = [], True, end + 1
        elif line.lstrip().startswith("<!--"):
            end = next((j for j in range(i, len(lines)) if "-->" in lines[j]), i)
            said += [
                " ".join(comment.split())
                for comment in _COMMENT.findall("\n".join(lines[i : end + 1]))
            ]
            i = end + 1
        else:
            if line.strip():
                said, below = [], False
            i += 1
    return Page(path, _needs(lines), tuple(blocks))


def _notes(comments: list[str]) -> tuple[str | None, int, bool]:
    """(not run, exit status, sample) of the comments before a fence."""
    noted = {
        key.strip(): value.strip()
        for key, _, value in (comment.partition(":") for comment in comments)
    }
    return noted.get("not run"), int(noted.get("exit status", "0")), "sample output" in noted


def _needs(lines: list[str]) -> tuple[str, ...]:
    match = re.match(r"<!-- needs: (.*?) -->", lines[0]) if lines else None
    return tuple(word.strip() for word in match[1].split(",")) if match else ()
