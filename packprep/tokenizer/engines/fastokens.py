"""`fastokens`: byte-level BPE at some 50 times the reference's speed, SentencePiece's with
byte_fallback at 2 to 10 times.

Flat buffers of ids come from a function that the library calls private, so pyproject.toml pins its
version.
"""

import os
from collections.abc import Iterable, Sequence

import numpy as np

from packprep.cache import remembered
from packprep.dataset.boundaries import offsets_of
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

# The letters outside of ASCII that fold to letters inside. The library's own matchers of well-known
# patterns read (?i:'s) as ASCII; the reference takes "'ſ" for it too.
_FOLDED = ("\u017f", "\u212a")
NAME = "fastokens"
_ONE_THREAD = ("RAYON_NUM_THREADS", "FASTOKENS_BPE_THREADS")


class FastEngine:
    """`fastokens`, one thread: processes scale, its threads hardly do.

    The reference is asked where tokens begin, which the library does not tell, and for the ids of
    texts that have one of _FOLDED, where the tokenizer has patterns without regard to case. Raises
    EngineRefusal for a tokenizer that it does not take.
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
        # then a special token's text is text, and none has to be looked for
        self._split = special_text != "special"
        plain = plain_of(vocabulary, special_text, with_special=not self._split)
        self.version, self.library = installed_version(NAME) or "", (str(library.__file__),)
        self._folded = b"(?i" in plain
        self.rate = 150 if b"ByteLevel" in plain else 20
        try:
            with panics_as_errors():
                self._tokenizer = library.Tokenizer.from_json_str(plain.decode())
        except Exception as error:
            raise cannot_load(error) from error
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

    def _encode_apart(
        self, texts: Sequence[str], odd: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """`encode`, but by the reference those texts whose numbers are in `odd`."""
        rest = list(texts)
        for i in odd:
            rest[i] = ""
        fast, fast_offsets = self.encode(rest)
        slow, slow_offsets = self.reference.encode([texts[i] for i in odd])
        documents = [fast[a:b] for a, b in zip(fast_offsets, fast_offsets[1:], strict=False)]
        for i, a, b in zip(odd, slow_offsets, slow_offsets[1:], strict=False):
            documents[i] = slow[a:b]
        return np.concatenate(documents), offsets_of(
            np.array([len(ids) for ids in documents], np.int64)
        )

    def encode_with_characters(
        self, texts: Sequence[str], chat: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The reference's."""
        return self.reference.encode_with_characters(texts, chat)

    def tokens_of(self, ids: Iterable[int]) -> dict[int, str]:
        """The reference's."""
        return self.reference.tokens_of(ids)


def _with_folded(texts: Sequence[str]) -> list[int]:
    """The numbers of the texts that have one of _FOLDED."""
    one, other = _FOLDED
    return [
        i for i, text in enumerate(texts) if not text.isascii() and (one in text or other in text)
    ]


@remembered(str | None, lambda vocabulary: (vocabulary.digest,))
def refusal(vocabulary: Vocabulary) -> str | None:
    """Why the library is not trusted with this tokenizer, by what it consists of; None: it may be
    proven.

    The library takes more: without ByteLevel or byte_fallback it merges across characters that the
    vocabulary does not have, and with byte_fallback it gives tokens with such a character, which no
    merge makes.
    """
    parsed = parse_tokenizer_json(vocabulary.tokenizer_json, "tokenizer.json")
    if parsed["model"].get("byte_fallback"):
        return not_sentencepiece_bpe(parsed, metaspace=False) or not_of_own_characters(parsed)
    return not_byte_level_bpe(parsed)
