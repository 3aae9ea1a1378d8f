"""Texts of which a tokenizer's normalizer would make gigabytes, found out without making them."""

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from packprep.corpus.tokenizer_json import steps_of

MOST_CHARACTERS, MOST_GROWTH = 1 << 20, 16
"""A normalizer may make either so many characters of a text, or so many times those that it has."""


class NormalizerLimit(Exception):
    """A normalizer makes more of a text than it may."""

    def __init__(self) -> None:
        super().__init__(f"the tokenizer's normalizer makes more than {MOST_CHARACTERS} characters of its text")


def most_of_one(step: Any) -> int:
    """The most characters that a step of a normalizer or decoder makes of one, as far as its author wrote them."""
    kind = step.get("type") if isinstance(step, dict) else None
    if kind == "Prepend":
        return 1 + len(step["prepend"])
    if kind != "Replace":
        return 1
    replaced, content = len(step["pattern"].get("String", "")), len(step["content"])
    return max(1, -(-content // replaced)) if replaced else 1 + content


class NormalForms:
    """How long texts become by a tokenizer.json's normalizer."""

    def __init__(self, normalizer: Mapping[str, Any] | None):
        steps = [*steps_of(normalizer, "normalizers")]
        self._most = math.prod(map(most_of_one, steps))
        self._steps = [_step(step) for step in steps] if self._most > MOST_GROWTH else []

    def characters(self, text: str) -> int:
        """What a text counts for where memory is counted: its own characters, or more where it may become many.

        Raises NormalizerLimit.
        """
        if not self._steps:
            return len(text)
        if len(text) * self._most <= MOST_CHARACTERS:
            return len(text) * self._most
        form, longest, most = text, len(text), max(MOST_CHARACTERS, MOST_GROWTH * len(text))
        for step in self._steps:
            if (length := step.length(form)) > most:
                raise NormalizerLimit
            form, longest = step.normalizer.normalize_str(form), max(longest, length)
        return longest


class _Step(NamedTuple):
    table: Mapping[str, Any]
    normalizer: Any
    without: Any  # the same with nothing for what it puts in the place of a pattern; None for other steps
    with_one: Any  # with one character for it

    def length(self, form: str) -> int:
        """How long it makes a text, without making it; of a library's own steps the text's own length."""
        if self.table["type"] == "Prepend":  # to each part between added tokens
            return len(form) * (1 + len(self.table["prepend"]))
        if self.without is None:
            return len(form)
        left = len(self.without.normalize_str(form))
        return left + (len(self.with_one.normalize_str(form)) - left) * len(self.table["content"])


def _step(table: Mapping[str, Any]) -> _Step:
    def normalizer(**changes: str) -> Any:
        import tokenizers

        model = {"type": "BPE", "vocab": {}, "merges": []}
        return tokenizers.Tokenizer.from_str(
            json.dumps({"normalizer": {**table, **changes}, "model": model})
        ).normalizer

    if table["type"] != "Replace":
        return _Step(table, normalizer(), None, None)
    return _Step(table, normalizer(), normalizer(content=""), normalizer(content="."))
