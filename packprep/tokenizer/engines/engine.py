"""The interface of an engine, and its errors."""

import importlib.metadata
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np


class Engine(Protocol):
    """An engine that encodes texts without lone surrogates into ids.

    The engine does not add, cut or pad anything. It is loaded for a vocabulary and a
    `special_text`, which says how to treat the text of a special token: "text", "special" or
    "reject".
    """

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def library(self) -> Sequence[str]:
        """The paths of the library files that compute the ids. Empty if no library does."""
        ...

    @property
    def reference(self) -> "Reference | None":
        """A slow, trusted engine that gives the same ids, or None if this engine is trusted."""
        ...

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts into ids, int32[total], and offsets, int64[n + 1].

        Raise the errors of the library, including panics.
        """
        ...

    def encode_with_characters(
        self, texts: Sequence[str], chat: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Encode texts into ids, offsets and characters.

        The ids are int32[total] and the offsets int64[n + 1]. The characters are int64[total, 2].
        Row k is a range (begin, end): token k represents the characters begin … end − 1 of its
        text.

        Args:
            texts: n texts without lone surrogates.
            chat: Whether to encode the text of a special token as that token, whatever
                `special_text` is. Otherwise the ids equal those from `encode`.
        """
        ...

    def tokens_of(self, ids: Iterable[int]) -> dict[int, str]:
        """Return a dict from id to token, as the tokenizer.json spells it.

        Ids without a token are left out.
        """
        ...


class Reference(Engine, Protocol):
    """A trusted engine that can also decode tokens."""

    def texts_of(self, ids: Sequence[int]) -> list[str]:
        """Return the decoded text of each token, with U+FFFD for invalid UTF-8."""
        ...


class EngineRefusal(Exception):
    """An error for a tokenizer that an engine does not accept, with the reason as its message."""


def cannot_load(error: Exception) -> EngineRefusal:
    """Return the error for a library that fails with `error` when it loads a tokenizer.

    The result quotes only the first line of the library's message, because some libraries add code
    locations in further lines.
    """
    return EngineRefusal(
        f"it cannot load it ({(str(error).strip().splitlines() or ['no message'])[0]})"
    )


class EngineFault(Exception):
    """An error for a text that an engine fails on and its reference accepts."""

    def __init__(self, text: str, detail: str):
        super().__init__(detail)
        self.text = text


def installed_version(package: str) -> str | None:
    """Return the installed version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds the longest of the texts at the first possible position.

    Without texts, the pattern never matches.
    """
    longest_first = sorted(filter(None, texts), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
