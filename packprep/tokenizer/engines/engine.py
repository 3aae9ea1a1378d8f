"""What an engine is, and how one fails."""

import importlib.metadata
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np


class Engine(Protocol):
    """Turns texts without lone surrogates into ids, without adding, cutting or padding anything.

    One is loaded for a vocabulary and a special_text: what the text of a special token is, "text",
    "special" or "reject".
    """

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def library(self) -> Sequence[str]:
        """The files of the library that its ids come from; none where nobody can tell."""
        ...

    @property
    def rate(self) -> int:
        """About how many MB/s of text one core makes ids of, as found with real tokenizers and text
        (docs/benchmarks.md)."""
        ...

    @property
    def reference(self) -> "Reference | None":
        """What gives the same ids, slowly, and is believed; None where this engine itself is
        believed."""
        ...

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """ids: int32[total], offsets: int64[n + 1]. Raises whatever its library does, panics
        included."""
        ...

    def encode_with_characters(
        self, texts: Sequence[str], chat: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """ids: int32[total], offsets: int64[n + 1], characters: int64[total, 2], [begin, end) of
        what each token stands for.

        chat: the text of a special token is that token, whatever special_text says. Otherwise the
        ids are `encode`'s.
        """
        ...

    def tokens_of(self, ids: Iterable[int]) -> dict[int, str]:
        """id → token as the tokenizer.json writes it, of those ids that are tokens."""
        ...


class Reference(Engine, Protocol):
    """An engine that is believed, and that knows the texts of tokens."""

    def texts_of(self, ids: Sequence[int]) -> list[str]:
        """The text of each token by itself, as far as it is text."""
        ...


class EngineRefusal(Exception):
    """An engine does not take a tokenizer; the message says why."""


def cannot_load(error: Exception) -> EngineRefusal:
    """The refusal of a library that fails on a tokenizer, with the first line of what it says: some
    add where in their code."""
    return EngineRefusal(
        f"it cannot load it ({(str(error).strip().splitlines() or ['no message'])[0]})"
    )


class EngineFault(Exception):
    """An engine broke down at a text that its reference takes."""

    def __init__(self, text: str, detail: str):
        super().__init__(detail)
        self.text = text


def installed_version(package: str) -> str | None:
    """The version of a package that is installed; None if none is."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds the longest of the texts at the first place where one begins; of no
    text, nothing."""
    longest_first = sorted(filter(None, texts), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
