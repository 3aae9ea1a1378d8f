"""Find the line of a key in a recipe file, for messages. tomllib does not report positions."""

import re
import tomllib
from collections.abc import Iterator
from typing import Any

KeyPath = tuple[str | int, ...]
"""The path of a key in the recipe: ("tasks", 0, "weight"), or ("tasks", "causal", "weight")."""

MAX_LINES = 500
"""Maximum number of lines of a value, because a value is parsed again after each of its lines."""


def key_of(where: str) -> KeyPath:
    """Return the path of a key from its form in messages.

    For example, "tasks[0].weight" gives ("tasks", 0, "weight").
    """
    parts = re.findall(r'"[^"]*"|[^.\[\]"]+', where)
    return tuple(int(word) if word.isdigit() else word.strip('"') for word in parts)


def line_of(text: str, key: KeyPath) -> int | None:
    """Return the line number of a key in a TOML text, starting at 1.

    If the text does not set the key, return the line of the header of the key's table. Return None
    if the header is missing too, or follows a value of more than MAX_LINES lines.
    """
    key = _by_number(tomllib.loads(text), key)
    best, deepest = None, 0
    # The longest common part of the keys shows the closest statement. The first of equals counts.
    for line, place in _statements(text):
        if deepest < min(len(place), len(key)) and key[: len(place)] == place[: len(key)]:
            best, deepest = line, min(len(place), len(key))
    return best


def _by_number(table: Any, key: KeyPath) -> KeyPath:
    """Replace a task's name in a key by the task's index in `[[tasks]]`, and return the key.

    For example, ("tasks", "fim", "weight") becomes ("tasks", 0, "weight").
    """
    if (
        len(key) < 2
        or key[0] != "tasks"
        or isinstance(key[1], int)
        or not isinstance(table.get("tasks"), list)
    ):
        return key
    for i, task in enumerate(table["tasks"]):
        names = (
            [task.get(name) for name in ("name", "objective", "preset")]
            if isinstance(task, dict)
            else []
        )
        if key[1] in names:
            return ("tasks", i, *key[2:])
    return key


def _statements(text: str) -> Iterator[tuple[int, KeyPath]]:
    """Yield (number of the first line, key) for each header and each assignment.

    A header or an assignment can have several lines. It ends with the first line that makes it
    valid TOML.
    """
    counts: dict[KeyPath, int] = {}
    header: KeyPath = ()
    lines: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        lines.append(line)
        if len(lines) > MAX_LINES:
            return
        try:
            value: Any = tomllib.loads("\n".join(lines))
        except ValueError:
            continue
        begin, lines = number - len(lines) + 1, []
        # Blank lines and comments set no key.
        if not value:
            continue
        # Follow the nested tables to the key that the statement names.
        path: list[str | int] = []
        listed = False
        while isinstance(value, dict) and len(value) == 1:
            name, value = next(iter(value.items()))
            path.append(name)
            if value == [{}] and line.lstrip().startswith("[["):
                listed = True
                break
        # An assignment belongs to the table of the header before it.
        if not line.lstrip().startswith("[") or begin != number:
            yield begin, header + tuple(path)
            continue
        header = tuple(path)
        # The n-th [[header]] of a list starts its entry n.
        if listed:
            counts[header] = counts.get(header, -1) + 1
            header = (*header, counts[header])
        yield begin, header
