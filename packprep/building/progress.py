"""What a user sees: lines on stdout, messages on stderr while work goes on, and a bar on a terminal.

Names of files, sources and tasks are whatever somebody made them: what is shown shows every character, and no secret.
"""

import contextlib
import sys
from typing import Any

from packprep import messages
from packprep.messages import visible


def put_line(line: str = "") -> None:
    """A line on stdout."""
    print(visible(line))


def say(message: str) -> None:
    """A message on stderr, without the secrets of URLs."""
    messages.say(_without_secrets(message))


def say_error(message: str) -> None:
    """An error on stderr, which is always shown, without the secrets of URLs."""
    messages.write(_without_secrets(message), error=True)


def _without_secrets(message: str) -> str:
    if "://" not in message:
        return message
    from packprep.storage import without_secrets

    return without_secrets(message)


class Bar:
    """Progress on stderr: tokens, MB/s, documents, rejects, time left; off a terminal one line at the begin.

    How much text there is to do is an estimate where files are compressed or documents rejected. So the whole grows with what is
    done beyond it, and is what was done once the last item is.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._listening = contextlib.ExitStack()
        self._documents = self._tokens = self._rejects = self._left = 0

    def begin(self, text_bytes: int, shards: int, missing: int) -> None:
        if not missing:
            return
        if not sys.stderr.isatty():
            say(f"shards to do: {missing:,} of {shards:,}, {text_bytes / 1e6:,.1f} MB")
            return
        if not messages.are_shown():
            return
        self._left = missing
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # its thread would keep workers from being forked
        self._bar = tqdm(total=text_bytes, unit="B", unit_scale=True, file=sys.stderr, dynamic_ncols=True)
        self._listening.enter_context(messages.heard_by(self._make_room))

    def add(self, documents: int, text_bytes: int, tokens: int, rejects: int) -> None:
        self._documents, self._tokens = self._documents + documents, self._tokens + tokens
        self._rejects += rejects
        if self._bar is not None:
            counts = {"tokens": self._tokens, "documents": self._documents, "rejects": self._rejects}
            known = [f"{n:,} {what}" for what, n in counts.items() if n]  # who counts no documents reports none
            self._bar.set_postfix_str(", ".join(known), refresh=False)
            self._bar.total = max(self._bar.total, self._bar.n + text_bytes)
            self._bar.update(text_bytes)

    def done(self, item: object) -> None:
        messages.say_stage(f"{item}: done")
        self._left -= 1
        if self._bar is not None and not self._left:
            self._bar.total = self._bar.n = self._bar.n or self._bar.total  # of rejects alone no text is counted
            self._bar.refresh()

    def say(self, message: str) -> None:
        say(message)

    def _make_room(self, message: str, once: bool) -> None:
        self._bar.clear()
        messages.write(message)

    def end(self) -> None:
        if self._bar is not None:
            self._listening.close()
            self._bar.close()
            self._bar = None
