"""What a user sees: lines on stdout, messages on stderr while work goes on, and a bar on a terminal.

Names of files, sources and tasks are whatever somebody made them: what is shown shows every character, and no secret.
"""

import sys
from typing import Any


def visible(text: str) -> str:
    """The text with every character showing: ␊ for a line feed and so on, \\u{200b} for what has no picture."""
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(character: str) -> str:
    code = ord(character)
    if code < 0x20 or code == 0x7F:
        return "␡" if code == 0x7F else chr(0x2400 + code)
    return character if character.isprintable() or character == "\u3000" else f"\\u{{{code:x}}}"


def put_line(line: str = "") -> None:
    """A line on stdout."""
    print(visible(line))


def say(message: str) -> None:
    """A message on stderr; its lines after the first are indented, so that none passes for another message."""
    if "://" in message:
        from packprep.storage import without_secrets

        message = without_secrets(message)
    first, *others = map(visible, message.split("\n"))
    text = "\n".join([f"packprep: {first}", *(f"  {line}".rstrip() for line in others)])
    print(text, file=sys.stderr, flush=True)


class Bar:
    """Progress on stderr: tokens, MB/s, documents, rejects, time left; nothing off a terminal but messages."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._documents = self._tokens = self._rejects = 0

    def begin(self, text_bytes: int, shards: int, missing: int) -> None:
        if not sys.stderr.isatty():
            return
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # its thread would keep workers from being forked
        self._bar = tqdm(total=text_bytes, unit="B", unit_scale=True, file=sys.stderr, dynamic_ncols=True)

    def add(self, documents: int, text_bytes: int, tokens: int, rejects: int) -> None:
        self._documents, self._tokens = self._documents + documents, self._tokens + tokens
        self._rejects += rejects
        if self._bar is not None:
            counts = {"tokens": self._tokens, "documents": self._documents, "rejects": self._rejects}
            known = [f"{n:,} {what}" for what, n in counts.items() if n]  # who counts no documents reports none
            self._bar.set_postfix_str(", ".join(known), refresh=False)
            self._bar.update(text_bytes)

    def say(self, message: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        say(message)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
