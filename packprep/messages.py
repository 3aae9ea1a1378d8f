"""Messages to the user on stderr, from any room and any process: a line before what takes long, while work goes on.

cache, kernel, storage, … ─► say ─┬─ in the command: stderr, where a bar makes room for the line
                                  └─ in a worker: `say` of its parent

How much of it is shown is one setting of the command's process: `show`.
"""

import contextlib
import sys
import time
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


def say_stage(message: str) -> None:
    """Tell the user who asked for stages: of what is done, with its seconds."""
    if _shown == STAGES:
        say(message)


def write(message: str, error: bool = False) -> None:
    """The message on stderr; its lines after the first are indented, so that none passes for another message.

    error: it is shown to who asked for errors alone, too.
    """
    if _shown == ERRORS and not error:
        return
    first, *others = map(visible, message.split("\n"))
    when = f"{time.monotonic() - _begun:.2f} s: " if _shown == STAGES and not error else ""
    text = "\n".join([f"packprep: {when}{first}", *(f"  {line}".rstrip() for line in others)])
    print(text, file=sys.stderr, flush=True)


ERRORS, USUAL, STAGES = "errors", "usual", "stages"
"""What a user may ask to see: errors alone; what takes long; that and each stage, with the seconds since the begin."""
_shown = USUAL
_begun = time.monotonic()


def show(what: str) -> None:
    """Have this process show ERRORS, the USUAL or STAGES from now on."""
    global _shown
    _shown = what


def are_shown() -> bool:
    """Whether messages that are no errors are shown."""
    return _shown != ERRORS


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
