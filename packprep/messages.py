"""Messages to the user on stderr, from any room and any process: a line before what takes long, while work goes on.

cache, kernel, storage, … ─► say ─┬─ in the command: stderr, where a bar makes room for the line
                                  └─ in a worker: `say` of its parent
"""

import contextlib
import sys
from collections.abc import Callable, Iterator

Listener = Callable[[str, bool], None]
"""(message, whether it is said once in a command)."""


def visible(text: str) -> str:
    """The text with every character showing: ↵ for a line feed, as PICTURES says, \\u{200b} for what has no picture."""
    return text if text.isprintable() else "".join(map(_visible, text))


PICTURES = {"\n": "↵", "\t": "⇥", "\r": "⇤"}
"""Arrows, which fonts have: most lack the pictures of control characters from U+2400 on."""


def _visible(character: str) -> str:
    if character.isprintable() or character == "\u3000":
        return character
    return PICTURES.get(character, f"\\u{{{ord(character):x}}}")


def say(message: str, once: bool = False) -> None:
    """Tell the user. once: not again in this command, nor by another of its workers; nothing in a pool of somebody else's."""
    if once:
        import multiprocessing  # which commands that have nothing to say may do without

        if message in _said or not (_listeners or multiprocessing.parent_process() is None):
            return
        _said.add(message)
    if _listeners:
        _listeners[-1](message, once)
    else:
        write(message)


def write(message: str) -> None:
    """The message on stderr; its lines after the first are indented, so that none passes for another message."""
    first, *others = map(visible, message.split("\n"))
    text = "\n".join([f"packprep: {first}", *(f"  {line}".rstrip() for line in others)])
    print(text, file=sys.stderr, flush=True)


_said: set[str] = set()
_listeners: list[Listener] = []


@contextlib.contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """While this lasts, `say` in this process tells `listener`."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
