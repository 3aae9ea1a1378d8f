"""The reference engine: the `tokenizers` library, which accepts any tokenizer.json.

If a normalizer would expand a text to gigabytes, the engine detects this without expanding it.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from packprep.dataset.boundaries import offsets_of
from packprep.tokenizer.file import outline_of, plain_tokenizer_json, steps_of
from packprep.tokenizer.roles import Vocabulary

MOST_CHARACTERS, MOST_GROWTH = 1 << 20, 16
"""A normalizer may expand a text to max(MOST_CHARACTERS, MOST_GROWTH · len(text)) characters."""


class NormalizerLimit(Exception):
    """An error for a text that the tokenizer's normalizer would make longer than allowed."""

    def __init__(self) -> None:
        super().__init__(
            f"the tokenizer's normalizer makes more than {MOST_CHARACTERS} characters of its text"
        )


def most_of_one(step: Any) -> int:
    """Return the most characters that a normalizer or decoder step can make from one character.

    Only the steps "Prepend" and "Replace", which insert a text from the file, can make more than
    one character from one character.
    """
    kind = step.get("type") if isinstance(step, dict) else None
    if kind == "Prepend":
        return 1 + len(step["prepend"])
    if kind != "Replace":
        return 1
    replaced, content = len(step["pattern"].get("String", "")), len(step["content"])
    return max(1, -(-content // replaced)) if replaced else 1 + content


class NormalForms:
    """An estimator of the lengths that texts reach in the normalizer of a tokenizer.json."""

    def __init__(self, normalizer: Mapping[str, Any] | None):
        steps = [*steps_of(normalizer, "normalizers")]
        self._most = math.prod(map(most_of_one, steps))
        self._steps = [_step(step) for step in steps] if self._most > MOST_GROWTH else []

    def characters(self, text: str) -> int:
        """Return the number of characters to count for a text when a batch is filled.

        This is the length of the text, unless the normalizer may make texts more than MOST_GROWTH
        times as long. Then it is the greatest length that the text may have in the normalizer.

        Raises:
            NormalizerLimit: If the normalizer expands the text beyond the limit.
        """
        if not self._steps:
            return len(text)
        if len(text) * self._most <= MOST_CHARACTERS:
            return len(text) * self._most
        form, longest, limit = text, len(text), max(MOST_CHARACTERS, MOST_GROWTH * len(text))
        for step in self._steps:
            if (length := step.length(form)) > limit:
                raise NormalizerLimit
            form, longest = step.normalizer.normalize_str(form), max(longest, length)
        return longest


class _Step(NamedTuple):
    table: Mapping[str, Any]
    normalizer: Any
    # `normalizer`, but it replaces the pattern with "". None for steps that do not replace.
    without: Any
    with_one: Any  # like `without`, but it replaces the pattern with one character

    def length(self, form: str) -> int:
        """Return the length that the text `form` has after this step, without making that text.

        For "Prepend", return an upper bound. For steps other than "Prepend" and "Replace", return
        the length of `form`.
        """
        if self.table["type"] == "Prepend":  # Each part between added tokens gets the prefix.
            return len(form) * (1 + len(self.table["prepend"]))
        if self.without is None:
            return len(form)
        base = len(self.without.normalize_str(form))
        return base + (len(self.with_one.normalize_str(form)) - base) * len(self.table["content"])


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


BATCH_CHARACTERS = 1 << 20


class ReferenceEngine:
    """The `tokenizers` library without post-processor, truncation, padding and dropout.

    `in_place_of` is text for messages. It names the plan's engine that this engine replaces, and
    the reason. It is empty if this engine replaces no other engine. If this engine is a replacement
    and fails on a text, the build stops, because the plan's engine may accept the text. Only a text
    beyond the normalizer's limit is rejected without stopping the build.
    """

    name = "reference"
    reference = None

    def __init__(self, vocabulary: Vocabulary, special_text: str, in_place_of: str = ""):
        import tokenizers

        as_special = special_text == "special"
        plain = plain_of(vocabulary, special_text)
        self.version, self.in_place_of = tokenizers.__version__, in_place_of
        self.library = (tokenizers.tokenizers.__file__,)
        self._tokenizer = tokenizers.Tokenizer.from_buffer(plain)
        self._tokenizer.encode_special_tokens = not as_special
        self._plain, self._chat = plain, self._tokenizer if as_special else None
        self._forms = NormalForms(outline_of(vocabulary.tokenizer_json).normalizer)

    def texts_of(self, ids: Sequence[int]) -> list[str]:
        """Return the decoded text of each token, with U+FFFD for invalid UTF-8.

        Raise the errors of the decoder, including panics.
        """
        return self._tokenizer.decode_batch([[id] for id in ids], skip_special_tokens=False)

    def tokens_of(self, ids: Iterable[int]) -> dict[int, str]:
        """Return a dict from id to token, as the tokenizer.json spells it.

        Ids without a token are left out.
        """
        return {id: token for id in ids if (token := self._tokenizer.id_to_token(id)) is not None}

    def vocabulary(self) -> dict[int, str]:
        """Return id → token as written in the tokenizer.json, for the model's own tokens."""
        tokens = self._tokenizer.get_vocab(with_added_tokens=False)
        return {id: token for token, id in tokens.items()}

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts into ids, int32[total], and offsets, int64[n + 1]."""
        parts, lengths = [], []
        for batch in _batches(texts, self._forms):
            lists = [
                encoding.ids
                for encoding in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            ]
            counts = [len(ids) for ids in lists]
            parts.append(np.fromiter(chain.from_iterable(lists), dtype=np.int32, count=sum(counts)))
            lengths += counts
        ids = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
        return ids, offsets_of(np.array(lengths, dtype=np.int64))

    def encode_with_characters(
        self, texts: Sequence[str], chat: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Encode texts into ids, offsets and characters, as in `Engine.encode_with_characters`."""
        ids: list[int] = []
        characters: list[tuple[int, int]] = []
        lengths: list[int] = []
        tokenizer = self._for_chat() if chat else self._tokenizer
        for batch in _batches(texts, self._forms):
            # `encode_batch_fast` does not compute offsets. The Python binding counts them in
            # characters.
            for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
                ids += encoding.ids
                characters += encoding.offsets
                lengths.append(len(encoding))
        offsets = offsets_of(np.array(lengths, dtype=np.int64))
        return np.array(ids, np.int32), offsets, np.array(characters, np.int64).reshape(-1, 2)

    def _for_chat(self) -> Any:
        """Return the tokenizer that encodes the text of a special token as that token."""
        if self._chat is None:
            import tokenizers

            self._chat = tokenizers.Tokenizer.from_buffer(self._plain)
            self._chat.encode_special_tokens = False
        return self._chat


def plain_of(vocabulary: Vocabulary, special_text: str, with_special: bool = True) -> bytes:
    """Return the tokenizer.json that engines load, as `plain_tokenizer_json` makes it.

    Unless `special_text` is "special", all `vocabulary.special_ids` are marked as special in it.
    `with_special` says whether `added_tokens` keeps the tokens that are special.
    """
    special_ids = frozenset() if special_text == "special" else frozenset(vocabulary.special_ids)
    return plain_tokenizer_json(vocabulary.tokenizer_json, special_ids, with_special)


def _batches(texts: Sequence[str], forms: NormalForms) -> Iterator[Sequence[str]]:
    """Yield batches of consecutive texts with about BATCH_CHARACTERS characters in each batch.

    Batches limit the memory, because the library's encodings take many times the memory of their
    ids.

    Raises:
        NormalizerLimit: If the normalizer expands a text beyond the limit.
    """
    begin = characters = 0
    for end, text in enumerate(texts, start=1):
        characters += forms.characters(text)
        if characters >= BATCH_CHARACTERS or end == len(texts):
            yield texts[begin:end]
            begin, characters = end, 0
