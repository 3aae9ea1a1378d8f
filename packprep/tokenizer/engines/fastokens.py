"""The engine `fastokens` for byte-level BPE and SentencePiece BPE with byte_fallback.

The engine is about 50 times as fast as the reference for byte-level BPE, and 2 to 10 times for
SentencePiece BPE. It calls a function that the library declares private, to get ids in flat
buffers. Therefore pyproject.toml pins the version of the library.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from packprep.cache import remembered
from packprep.dataset.boundaries import offsets_of
from packprep.forking import lazy
from packprep.tokenizer.engines.byte_tokens import CharactersFromBytes
from packprep.tokenizer.engines.engine import (
    EngineRefusal,
    cannot_load,
    installed_version,
)
from packprep.tokenizer.engines.reference import ReferenceEngine, plain_of
from packprep.tokenizer.engines.shapes import (
    not_byte_level_bpe,
    not_of_own_characters,
    not_sentencepiece_bpe,
)
from packprep.tokenizer.file import (
    added_tokens,
    panics_as_errors,
    parse_tokenizer_json,
)
from packprep.tokenizer.roles import Vocabulary

# These letters outside ASCII fold to letters inside ASCII. The library's own matchers for
# well-known patterns read (?i:'s) as ASCII, but the reference also accepts "'ſ" for it.
_FOLDED = ("\u017f", "\u212a")
NAME = "fastokens"
_ONE_THREAD = ("RAYON_NUM_THREADS", "FASTOKENS_BPE_THREADS")


class FastEngine(CharactersFromBytes):
    """The engine `fastokens` with one thread, because packprep scales with processes.

    The library does not report the characters of its tokens. They are computed from the bytes of
    the tokens, or by the reference. If the tokenizer has patterns that ignore case, the library may
    give wrong ids for texts with "ſ" or the Kelvin sign. The reference encodes these texts.

    Raises:
        EngineRefusal: If the engine does not accept the tokenizer.
    """

    name = NAME

    def __init__(self, vocabulary: Vocabulary, special_text: str):
        if why := refusal(vocabulary):
            raise EngineRefusal(why)
        for variable in _ONE_THREAD:  # The library reads them at its first use.
            os.environ.setdefault(variable, "1")
        try:
            from fastokens import _native as library
        except ImportError as error:
            raise EngineRefusal(f"it cannot be imported ({error})") from error
        # With _split, the library does not search for special tokens and treats their text as
        # ordinary text.
        self._split, self._vocabulary = special_text != "special", vocabulary
        self._special_text = special_text
        plain = plain_of(vocabulary, special_text, with_special=not self._split)
        self.version, self.library = installed_version(NAME) or "", (str(library.__file__),)
        self._folded = b"(?i" in plain
        try:
            with panics_as_errors():
                self._tokenizer = library.Tokenizer.from_json_str(plain.decode())
        except Exception as error:
            raise cannot_load(error) from error
        self.reference = ReferenceEngine(vocabulary, special_text)
        for text, id in added_tokens(plain):
            if (engine_id := self._tokenizer.token_to_id(text)) != id:
                raise EngineRefusal(f"it gives {text!r} the id {engine_id} and the file {id}")

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts into ids, int32[total], and offsets, int64[n + 1]."""
        odd = _with_folded(texts) if self._folded else []
        if odd:
            return self._encode_apart(texts, odd)
        ids, ends = self._tokenizer.encode_batch_flat(list(texts), False, self._split)
        return np.frombuffer(ids, "<u4").view(np.int32), np.frombuffer(ends, "<u8").view(np.int64)

    def _encode_apart(
        self, texts: Sequence[str], odd: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts as in `encode`, but let the reference encode the texts at indices `odd`."""
        fast_texts = list(texts)
        # Empty texts keep the numbers of all other documents.
        for i in odd:
            fast_texts[i] = ""
        fast, fast_offsets = self.encode(fast_texts)
        slow, slow_offsets = self.reference.encode([texts[i] for i in odd])
        documents = [fast[a:b] for a, b in zip(fast_offsets, fast_offsets[1:], strict=False)]
        for i, a, b in zip(odd, slow_offsets, slow_offsets[1:], strict=False):
            documents[i] = slow[a:b]
        return np.concatenate(documents), offsets_of(
            np.array([len(ids) for ids in documents], np.int64)
        )

    @lazy
    def _for_chat(self) -> Any:
        """Return the tokenizer that encodes the text of a special token as that token.

        Return None if the library cannot load it, or gives an added token another id than the file.
        """
        if not self._split:
            return self._tokenizer
        from fastokens import _native as library

        plain = plain_of(self._vocabulary, self._special_text)
        try:
            with panics_as_errors():
                tokenizer = library.Tokenizer.from_json_str(plain.decode())
        except Exception:
            return None
        added = added_tokens(plain)
        return tokenizer if all(tokenizer.token_to_id(text) == id for text, id in added) else None

    def can_tell_characters(self) -> bool:
        """Return whether characters can be computed from the bytes of tokens."""
        return self._byte_tokens is not None and self._for_chat is not None

    def own_characters(
        self, texts: Sequence[str], chat: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ids, offsets and characters in the form of `encode_with_characters`.

        The characters come from the bytes of the tokens if these equal the bytes of the text.
        Otherwise they come from the reference.
        """
        assert self._byte_tokens is not None
        tokenizer, split = (self._for_chat, False) if chat else (self._tokenizer, self._split)
        flat_ids, ends = tokenizer.encode_batch_flat(list(texts), False, split)
        ids = np.frombuffer(flat_ids, "<u4").view(np.int32)
        offsets = np.frombuffer(ends, "<u8").view(np.int64)
        odd = _with_folded(texts) if self._folded else []
        return self._byte_tokens.encode_with_characters(
            texts, (ids, offsets), odd, self.reference, chat
        )

    def tokens_of(self, ids: Iterable[int]) -> dict[int, str]:
        """Return the result of the reference's `tokens_of`."""
        return self.reference.tokens_of(ids)


def _with_folded(texts: Sequence[str]) -> list[int]:
    """Return the indices of the texts that contain "ſ" or the Kelvin sign (_FOLDED)."""
    long_s, kelvin = _FOLDED
    return [
        i
        for i, text in enumerate(texts)
        if not text.isascii() and (long_s in text or kelvin in text)
    ]


def rate(vocabulary: Vocabulary) -> int:
    """Return the encoding speed in MB/s, as in `EngineKind`.

    The speed for SentencePiece BPE is the lowest of the measured tokenizers.
    """
    return 150 if b"ByteLevel" in vocabulary.tokenizer_json else 12


@remembered(str | None, lambda vocabulary: (vocabulary.digest,))
def refusal(vocabulary: Vocabulary) -> str | None:
    """Return the reason why this tokenizer's components rule out the library, or None.

    None means that the library may be compared with the reference. The library itself accepts more
    tokenizers, but may give wrong ids for texts with a character that is not a token by itself. If
    the tokenizer has neither ByteLevel nor byte_fallback, the library merges the characters before
    and after this character, as if they were adjacent. If the tokenizer has byte_fallback, and
    longer tokens contain this character, the library may produce these tokens, although no merges
    lead to them.
    """
    parsed = parse_tokenizer_json(vocabulary.tokenizer_json, "tokenizer.json")
    if parsed["model"].get("byte_fallback"):
        return not_sentencepiece_bpe(parsed, metaspace=False) or not_of_own_characters(parsed)
    return not_byte_level_bpe(parsed)
