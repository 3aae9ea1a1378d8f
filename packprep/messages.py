"""What a user sees, from any room and any process: results on stdout; messages on stderr while work
goes on, and a bar there.

cache, kernel, storage, … ─► say ─┬─ in the command: stderr, where a bar makes room for the line
                                  └─ in a worker: `say` of its parent

How much of it is shown is one setting of the command's process: `show`. Names of files, sources and
tasks are whatever somebody made them: what is shown shows every character, and no secret.
"""

import contextlib
import difflib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

Listener = Callable[[str, bool], None]
"""(message, whether it is said once in a command)."""


def visible(text: str) -> str:
    """The text with every character showing: ↵ for a line feed, as PICTURES says, \\u{200b} for
    what has no picture."""
    return text if text.isprintable() else "".join(map(_visible, text))


PICTURES = {"\n": "↵", "\t": "⇥", "\r": "⇤"}
"""Arrows, which fonts have: most lack the pictures of control characters from U+2400 on."""


def _visible(character: str) -> str:
    if character.isprintable() or character == "\u3000":
        return character
    return PICTURES.get(character, f"\\u{{{ord(character):x}}}")


def put_line(line: str = "") -> None:
    """A line on stdout."""
    print(visible(line))


PASSWORD = re.compile(r"(?!arn:)[^/:\[\]]*:(?!\d+(?:/|$)).*@", re.DOTALL)
_SIGNATURE = re.compile(
    r"([?&][\w.-]*(?:signature|sig|token|credential|secret|password|access[-_]?key(?:[-_]?id)?|api[-_]?key)=)[^&]+",
    re.IGNORECASE,
)


def without_secrets(text: str) -> str:
    """A text with … for the passwords and signatures of the URLs in it."""
    return "".join(map(without_secret, re.split(r"([\s'\"]+)", text)))


def without_secret(url: str) -> str:
    """A URL with … for its password and its signature."""
    scheme, there, rest = url.partition("://")
    return (
        scheme
        + there
        + _SIGNATURE.sub(r"\1…", PASSWORD.sub("…@", rest, 1) if PASSWORD.match(rest) else rest)
    )


def say(message: str, once: bool = False) -> None:
    """Tell the user. once: not again in this command, nor by another of its workers; nothing in a
    pool of somebody else's."""
    if once:
        starter = sys.modules.get("multiprocessing.process")  # None: this is no process of a pool
        if message in _said or (
            starter and not _listeners and starter.parent_process() is not None
        ):
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
    """The message on stderr, without the secrets of URLs. Its lines after the first are indented,
    so that none passes for another message.

    error: it is shown to who asked for errors alone, too.
    """
    if _shown == ERRORS and not error:
        return
    shown = without_secrets(message) if "://" in message else message
    first, *others = map(visible, shown.split("\n"))
    when = f"{time.monotonic() - _begun:.2f} s: " if _shown == STAGES and not error else ""
    text = "\n".join([f"packprep: {when}{first}", *(f"  {line}".rstrip() for line in others)])
    if sys.stderr is None:  # it is closed, and print would take stdout instead
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:  # Nobody reads it any more, or its disk is full: the work goes on.
        discard_output(sys.stderr)


def discard_output(stream: TextIO) -> None:
    """Send what is still to be written to a stream, which cannot be written, to /dev/null.
    Otherwise Python fails as it ends."""
    with contextlib.suppress(OSError, ValueError):  # a stream of no file
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def say_error(message: str) -> None:
    """An error, which is always shown."""
    write(message, error=True)


ERRORS, USUAL, STAGES = "errors", "usual", "stages"
"""What a user may ask to see: errors alone; what takes long; that and each stage, with the seconds
since the begin."""
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


class Bar:
    """Progress on stderr: tokens, MB/s, documents, rejects, time left; off a terminal one line at
    the begin.

    How much text there is to do is an estimate where files are compressed or documents rejected. So
    the whole grows with what is done beyond it, and is what was done once the last item is.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._listening = contextlib.ExitStack()
        self._documents = self._tokens = self._rejects = self._left = 0

    def begin(self, text_bytes: int, shards: int, missing: int) -> None:
        if not missing:
            return
        if sys.stderr is None or not sys.stderr.isatty():
            say(f"shards to do: {missing:,} of {shards:,}, {text_bytes / 1e6:,.1f} MB")
            return
        if not are_shown():
            return
        self._left = missing
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # its thread would keep workers from being forked
        self._bar = tqdm(
            total=text_bytes, unit="B", unit_scale=True, file=sys.stderr, dynamic_ncols=True
        )
        self._listening.enter_context(heard_by(self._make_room))

    def add(self, documents: int, text_bytes: int, tokens: int, rejects: int) -> None:
        self._documents, self._tokens = self._documents + documents, self._tokens + tokens
        self._rejects += rejects
        if self._bar is not None:
            counts = {
                "tokens": self._tokens,
                "documents": self._documents,
                "rejects": self._rejects,
            }
            # who counts no documents reports none
            known = [f"{n:,} {what}" for what, n in counts.items() if n]
            self._bar.set_postfix_str(", ".join(known), refresh=False)
            self._bar.total = max(self._bar.total, self._bar.n + text_bytes)
            self._bar.update(text_bytes)

    def done(self, item: object) -> None:
        say_stage(f"{item}: done")
        self._left -= 1
        if self._bar is not None and not self._left:
            # of rejects alone no text is counted
            self._bar.total = self._bar.n = self._bar.n or self._bar.total
            self._bar.refresh()

    def say(self, message: str) -> None:
        say(message)

    def _make_room(self, message: str, once: bool) -> None:
        self._bar.clear()
        write(message)

    def end(self) -> None:
        if self._bar is not None:
            self._listening.close()
            self._bar.close()
            self._bar = None


def counted(n: int, thing: str) -> str:
    """Return a number with its noun, as "1 row" or "2 rows"."""
    return f"{n:,} {thing}{'' if n == 1 else 's'}"


NEAREST = 8
"""Names that a message lists."""
MOST_COMPARED = 10_000
"""Names among which similar ones are looked for."""


def nearest(name: str, names: Sequence[str]) -> str:
    """Return existing names for a message: a few, or those most like `name` and how many more."""
    if len(names) <= NEAREST:
        return ", ".join(names)
    near = difflib.get_close_matches(name, names[:MOST_COMPARED], NEAREST, 0)
    more = len(names) - len(near)
    return ", ".join(near) + (f" and {more:,} more" if more else "")
