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
    """The text with every character showing: ␊ for a line feed and so on, \\u{200b} for what has no picture."""
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(character: str) -> str:
    code = ord(character)
    if code < 0x20 or code == 0x7F:
        return "␡" if code == 0x7F else chr(0x2400 + code)
    return character if character.isprintable() or character == "\u3000" else f"\\u{{{code:x}}}"


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
