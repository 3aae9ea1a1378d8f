"""Show messages from all subpackages and processes.

Results are printed on stdout. Messages and a progress bar are printed on stderr.

cache, kernel, storage, … ─► say ─┬─ in the command: stderr, after clearing a progress bar
                                  └─ in a worker: `say` of the parent process

One setting of the command's process, `show`, determines which messages are shown. Names of files,
sources and tasks come from users. Output therefore shows every character visibly. Passwords and
signatures of URLs are replaced by ….
"""

import contextlib
import difflib
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO

Listener = Callable[[str, bool], None]
"""A function that receives a message, and whether a command may show this message only once."""


def visible(text: str) -> str:
    """Return a text with every unprintable character replaced.

    Characters of `PICTURES` become arrows, such as ↵ for a line feed. All others become an escape
    such as \\u{200b}.
    """
    return text if text.isprintable() else "".join(map(_visible, text))


PICTURES = {"\n": "↵", "\t": "⇥", "\r": "⇤"}
"""Control character → visible replacement.

The replacements are arrows, because most fonts lack the pictures of control characters (U+2400 …).
"""


def _visible(character: str) -> str:
    if character.isprintable() or character == "\u3000":
        return character
    return PICTURES.get(character, f"\\u{{{ord(character):x}}}")


def put_line(line: str = "") -> None:
    """Print a line on stdout."""
    print(visible(line))


# Neither host:port/a@b nor an ARN contains a password. A password may contain slashes.
PASSWORD = re.compile(r"(?!arn:)[^/:\[\]]*:(?!\d+(?:/|$)).*@", re.DOTALL)
_SIGNATURE = re.compile(
    r"([?&][\w.-]*(?:signature|sig|token|credential|secret|password"
    r"|access[-_]?key(?:[-_]?id)?|api[-_]?key)=)[^&]+",
    re.IGNORECASE,
)


def without_secrets(text: str) -> str:
    """Return a text with … for the passwords and signatures of its URLs."""
    return "".join(map(without_secret, re.split(r"([\s'\"]+)", text)))


def without_secret(url: str) -> str:
    """Return a URL with … for its password and signature."""
    scheme, separator, address = url.partition("://")
    return (
        scheme
        + separator
        + _SIGNATURE.sub(
            r"\1…", PASSWORD.sub("…@", address, 1) if PASSWORD.match(address) else address
        )
    )


def one_line(message: str) -> str:
    """Return a message with its hint on the same line, for a table, a comment or a list."""
    return message.replace("\nhint: ", "; hint: ")


def say(message: str, once: bool = False) -> None:
    """Show a message to the user.

    Args:
        message: The message.
        once: Whether to show the message only once per command, including the command's workers. If
            True, the message is not shown in workers of another program.
    """
    if once:
        starter = sys.modules.get("multiprocessing.process")  # None outside a process pool
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
    """Show a message about a finished stage, with its seconds, if the user asked for stages."""
    if _shown == STAGES:
        say(message)


def write(message: str, error: bool = False) -> None:
    """Write a message to stderr, without the secrets of URLs.

    Lines after the first are indented, so that they do not look like separate messages. With
    `error`, the message is written even if the user asked only for errors.
    """
    if _shown == ERRORS and not error:
        return
    shown = without_secrets(message) if "://" in message else message
    first_line, *other_lines = map(visible, shown.split("\n"))
    when = f"{time.monotonic() - _begun:.2f} s: " if _shown == STAGES and not error else ""
    text = "\n".join(
        [f"packprep: {when}{first_line}", *(f"  {line}".rstrip() for line in other_lines)]
    )
    if sys.stderr is None:  # It is closed, and print would write to stdout instead.
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:  # The reader is closed or its disk is full. The work continues.
        discard_output(sys.stderr)


def discard_output(stream: TextIO) -> None:
    """Redirect an output stream to /dev/null, after writing to it failed.

    Otherwise Python fails at exit, when it flushes the stream.
    """
    with contextlib.suppress(OSError, ValueError):  # The stream may have no file descriptor.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def say_error(message: str) -> None:
    """Write an error to stderr. It is shown at every level of output."""
    write(message, error=True)


ERRORS, USUAL, STAGES = "errors", "usual", "stages"
"""Levels of output. ERRORS shows only errors. USUAL shows all messages except those about stages.
STAGES also shows each finished stage, and puts the seconds since the start before each message
except errors."""
_shown = USUAL
_begun = time.monotonic()


def show(level: str) -> None:
    """Set the level of output of this process: ERRORS, USUAL or STAGES."""
    global _shown
    _shown = level


def are_shown() -> bool:
    """Return whether messages other than errors are shown."""
    return _shown != ERRORS


_said: set[str] = set()
_listeners: list[Listener] = []


@contextlib.contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Pass the messages of `say` in this process to `listener` while the block runs."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class Bar:
    """A progress bar on stderr: tokens, MB/s, documents, rejects and time left.

    Without a terminal, it prints only one line at the start. The total amount of text is an
    estimate if files are compressed or documents are rejected. The total therefore grows if more
    text is read. After the last item, the total becomes the amount that was read.
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

        tqdm.monitor_interval = 0  # The monitor's thread would prevent forking workers.
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
            # Some commands count no documents, so zero counts are not shown.
            shown_counts = [f"{n:,} {unit}" for unit, n in counts.items() if n]
            self._bar.set_postfix_str(", ".join(shown_counts), refresh=False)
            self._bar.total = max(self._bar.total, self._bar.n + text_bytes)
            self._bar.update(text_bytes)

    def done(self, item: object) -> None:
        say_stage(f"{item}: done")
        self._left -= 1
        if self._bar is not None and not self._left:
            # If all documents are rejected, no text is counted.
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


def listed(items: Iterable[str], limit: int = 5, separator: str = ", ") -> str:
    """Join the first `limit` items for a message, and say how many more there are."""
    texts = list(items)
    return separator.join(texts[:limit]) + (
        f" and {len(texts) - limit} more" if len(texts) > limit else ""
    )


NEAREST = 8
"""Maximum number of names that a message lists."""
MOST_COMPARED = 10_000
"""Maximum number of names that are searched for similar ones."""


def nearest(name: str, names: Sequence[str]) -> str:
    """Return text that lists the existing names, for a message about the unknown `name`.

    If there are more than NEAREST names, the text has only the names that are similar to `name`,
    and the number of the other names: "web, wiki, … and 12 more".
    """
    if len(names) <= NEAREST:
        return ", ".join(names)
    near = difflib.get_close_matches(name, names[:MOST_COMPARED], NEAREST, 0)
    more_count = len(names) - len(near)
    return ", ".join(near) + (f" and {more_count:,} more" if more_count else "")
