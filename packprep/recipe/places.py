"""Where in a recipe file a key stands, for messages. tomllib gives values without their places."""

import re
import tomllib
from collections.abc import Iterator
from typing import Any

KeyPath = tuple[str | int, ...]
"""A key by its path in the recipe, as ("tasks", 0, "weight"); a task may be given by its name."""

MAX_LINES = 500
"""Of one value. It is parsed anew for each of its lines."""


def key_of(where: str) -> KeyPath:
    """The key that a message writes as tasks[0].weight."""
    parts = re.findall(r'"[^"]*"|[^.\[\]"]+', where)
    return tuple(int(part) if part.isdigit() else part.strip('"') for part in parts)


def line_of(text: str, key: KeyPath) -> int | None:
    """The line, from 1, of a TOML text on which a key stands: its own, or else the header of its
    table.

    None where neither does, and where a value has more than MAX_LINES lines.
    """
    key = _by_number(tomllib.loads(text), key)
    best, deepest = None, 0
    for line, place in _statements(text):
        if deepest < min(len(place), len(key)) and key[: len(place)] == place[: len(key)]:
            best, deepest = line, min(len(place), len(key))
    return best


def _by_number(table: Any, key: KeyPath) -> KeyPath:
    """The key with a task's number for its name."""
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
    """(line, key) of each header and each assignment: the fewest lines that are TOML by
    themselves."""
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
        if not value:
            continue
        path: list[str | int] = []
        listed = False
        while isinstance(value, dict) and len(value) == 1:
            name, value = next(iter(value.items()))
            path.append(name)
            if value == [{}] and line.lstrip().startswith("[["):
                listed = True
                break
        if not line.lstrip().startswith("[") or begin != number:
            yield begin, header + tuple(path)
            continue
        header = tuple(path)
        if listed:
            counts[header] = counts.get(header, -1) + 1
            header = (*header, counts[header])
        yield begin, header
