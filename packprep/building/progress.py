"""What a user sees on stderr while work goes on: messages, and a bar on a terminal."""

import sys
from typing import Any


def say(message: str) -> None:
    """A message on stderr."""
    print(f"packprep: {message}", file=sys.stderr, flush=True)


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
