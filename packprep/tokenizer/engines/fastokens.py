"""The fast engine: `fastokens`, byte-level BPE at some 50 times the reference's speed.

Flat buffers of ids come from a function that the library calls private, so pyproject.toml pins its version.
"""

import importlib.metadata
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from packprep.cache import remembered
from packprep.format.tokenizer_json import byte_characters
from packprep.tokenizer.engines.engine import EngineRefusal, offsets_of
from packprep.tokenizer.engines.reference import MOST_GROWTH, ReferenceEngine, most_of_one, plain_of
from packprep.tokenizer.file import (
    added_tokens,
    panics_as_errors,
    parse_tokenizer_json,
    steps_of,
)
from packprep.tokenizer.roles import Vocabulary

# The letters outside of ASCII that fold to letters inside. The library's own matchers of well-known patterns read
# (?i:'s) as ASCII; the reference takes "'ſ" for it too.
_FOLDED = ("\u017f", "\u212a")
NAME = "fastokens"
_ONE_THREAD = ("RAYON_NUM_THREADS", "FASTOKENS_BPE_THREADS")


def installed_version() -> str | None:
    """The version that is installed; None if none is."""
    try:
        return importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        return None


class FastEngine:
    """`fastokens`, one thread: processes scale, its threads hardly do.

    The reference is asked where tokens begin, which the library does not tell, and for the ids of texts that have one of
    _FOLDED, where the tokenizer has patterns without regard to case.
    Raises EngineRefusal for a tokenizer that it does not take.
    """

    name = NAME

    def __init__(self, vocabulary: Vocabulary, special_text: str):
        if why := refusal(vocabulary):
            raise EngineRefusal(why)
        for variable in _ONE_THREAD:  # read when the library is first used
            os.environ.setdefault(variable, "1")
        try:
            from fastokens import _native as library
        except ImportError as error:
            raise EngineRefusal(f"it cannot be imported ({error})") from error
        self._split = special_text != "special"  # then a special token's text is text, and none has to be looked for
        plain = plain_of(vocabulary, special_text, with_special=not self._split)
        self.version, self.library = installed_version() or "", (str(library.__file__),)
        self._folded = b"(?i" in plain
        try:
            with panics_as_errors():
                self._tokenizer = library.Tokenizer.from_json_str(plain.decode())
        except Exception as error:
            raise EngineRefusal(f"it cannot load it ({error})") from error
        self.reference = ReferenceEngine(vocabulary, special_text)
        for text, id in added_tokens(plain):
            if (here := self._tokenizer.token_to_id(text)) != id:
                raise EngineRefusal(f"it gives {text!r} the id {here} and the file {id}")

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """ids: int32[total], offsets: int64[n + 1]."""
        odd = _with_folded(texts) if self._folded else []
        if odd:
            return self._encode_apart(texts, odd)
        ids, ends = self._tokenizer.encode_batch_flat(list(texts), False, self._split)
        return np.frombuffer(ids, "<u4").view(np.int32), np.frombuffer(ends, "<u8").view(np.int64)

    def _encode_apart(self, texts: Sequence[str], odd: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """`encode`, but by the reference those texts whose numbers are in `odd`."""
        rest = list(texts)
        for i in odd:
            rest[i] = ""
        fast, fast_offsets = self.encode(rest)
        slow, slow_offsets = self.reference.encode([texts[i] for i in odd])
        documents = [fast[a:b] for a, b in zip(fast_offsets, fast_offsets[1:], strict=False)]
        for i, a, b in zip(odd, slow_offsets, slow_offsets[1:], strict=False):
            documents[i] = slow[a:b]
        return np.concatenate(documents), offsets_of(np.array([len(ids) for ids in documents], np.int64))

    def encode_with_characters(self, texts: Sequence[str], chat: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The reference's."""
        return self.reference.encode_with_characters(texts, chat)

    def tokens_of(self, ids: Iterable[int]) -> dict[int, str]:
        """The reference's."""
        return self.reference.tokens_of(ids)


def _with_folded(texts: Sequence[str]) -> list[int]:
    """The numbers of the texts that have one of _FOLDED."""
    one, other = _FOLDED
    return [i for i, text in enumerate(texts) if not text.isascii() and (one in text or other in text)]


@remembered(str | None, lambda vocabulary: (vocabulary.digest,))
def refusal(vocabulary: Vocabulary) -> str | None:
    """Why the library is not trusted with this tokenizer, by what it consists of; None: it may be proven.

    Byte-level BPE after splits by pattern, with no normalizer or NFC: GPT-2, GPT-4, Llama 3, Qwen, DeepSeek, and most
    since. The library takes more: with byte_fallback it takes the text "<0x0A>" for a byte, and without ByteLevel it
    merges across characters that the vocabulary does not have.
    """
    parsed = parse_tokenizer_json(vocabulary.tokenizer_json, "tokenizer.json")
    model = parsed["model"]
    if model.get("type") != "BPE":
        return f"its model is {model.get('type') or 'of an unnamed type'}, not BPE"
    for key in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            return f"its model has {key} = {model[key]!r}"
    for step in _types(parsed.get("normalizer"), "normalizers"):
        if step != "NFC":
            return f"its normalizer is {step}, not NFC"
    *splits, last = _types(parsed.get("pre_tokenizer"), "pretokenizers") or ["None"]
    if last != "ByteLevel" or not {*splits} <= {"Split", "Digits"}:
        return f"its pre-tokenizer is {' → '.join([*splits, last])}, not ByteLevel after Split or Digits"
    grown = math.prod(map(most_of_one, steps_of(parsed.get("decoder"), "decoders")))
    if grown > MOST_GROWTH:  # texts to prove it on are made of what tokens are decoded to
        return f"its decoder may make {grown} characters of one"
    missing = [character for character in byte_characters() if character not in model.get("vocab", {})]
    return f"its vocabulary lacks {len(missing)} of the 256 bytes" if missing else None


def _types(part: Any, key: str) -> list[str]:
    """The types of a normalizer's or pre-tokenizer's steps."""
    return [str(step.get("type")) if isinstance(step, dict) else str(step) for step in steps_of(part, key)]
