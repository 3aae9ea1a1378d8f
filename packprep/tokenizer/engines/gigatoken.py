"""The engine `gigatoken` for SentencePiece BPE with byte_fallback.

The library is about 10 times as fast as the reference. It encodes one text at a time here, because
its batches use a thread pool, which hangs in a forked process.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from packprep.cache import remembered
from packprep.dataset.boundaries import offsets_of
from packprep.tokenizer.engines.byte_tokens import CharactersFromBytes
from packprep.tokenizer.engines.engine import EngineRefusal, cannot_load, installed_version
from packprep.tokenizer.engines.reference import ReferenceEngine, plain_of
from packprep.tokenizer.engines.shapes import not_sentencepiece_bpe
from packprep.tokenizer.file import panics_as_errors, parse_tokenizer_json
from packprep.tokenizer.roles import Vocabulary

NAME = "gigatoken"
MOST_IDS = 1 << 27
"""Number of encoded ids after which the library is loaded again, which takes up to 0.7 s.

The library caches every word, at 3 to 20 bytes per id. MOST_IDS limits its cache to 400 MB for
prose or 2.7 GB for random letters.
"""


class GigatokenEngine(CharactersFromBytes):
    """The engine `gigatoken`.

    The library does not report which characters of the text each token represents. These ranges
    are computed from the bytes of the tokens, or by the reference.

    Raises:
        EngineRefusal: If the engine does not accept the tokenizer.
    """

    name = NAME

    def __init__(self, vocabulary: Vocabulary, special_text: str):
        if why := refusal(vocabulary):
            raise EngineRefusal(why)
        try:
            from gigatoken import gigatoken_rs
        except ImportError as error:
            raise EngineRefusal(f"it cannot be imported ({error})") from error
        self.version, self.library = installed_version(NAME) or "", (str(gigatoken_rs.__file__),)
        self._vocabulary, self._special_text = vocabulary, special_text
        self._load, self._tokenizers, self._ids = gigatoken_rs.load_hf_json, dict[bool, Any](), 0
        try:
            with panics_as_errors():
                self._tokenizer(special_text == "special")
        except Exception as error:
            raise cannot_load(error) from error
        self.reference = ReferenceEngine(vocabulary, special_text)

    def _tokenizer(self, with_special: bool) -> Any:
        """Return the library's tokenizer, with the special tokens if `with_special`.

        After MOST_IDS encoded ids, load the tokenizer again, to empty the library's cache.
        """
        if self._ids > MOST_IDS:
            self._tokenizers, self._ids = {}, 0
        if with_special not in self._tokenizers:
            plain = plain_of(self._vocabulary, self._special_text, with_special)
            self._tokenizers[with_special] = self._load(plain)
        return self._tokenizers[with_special]

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts into ids, int32[total], and offsets, int64[n + 1]."""
        return self._encode(texts, self._special_text == "special")

    def _encode(self, texts: Sequence[str], with_special: bool) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts as in `encode`.

        Encode the text of a special token as that token if `with_special`.
        """
        tokenizer = self._tokenizer(with_special)
        encoded = [tokenizer.encode(text) for text in texts]
        self._ids += sum(map(len, encoded))
        ids = np.concatenate(encoded).view(np.int32) if encoded else np.zeros(0, np.int32)
        return ids, offsets_of(np.array([len(ids_of_text) for ids_of_text in encoded], np.int64))

    def can_tell_characters(self) -> bool:
        """Return whether characters can be computed from the bytes of tokens."""
        return self._byte_tokens is not None

    def own_characters(
        self, texts: Sequence[str], chat: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ids, offsets and characters in the form of `encode_with_characters`.

        The characters come from the bytes of the tokens if these equal the bytes of the text.
        Otherwise they come from the reference.
        """
        assert self._byte_tokens is not None
        encoded = self._encode(texts, chat or self._special_text == "special")
        return self._byte_tokens.encode_with_characters(texts, encoded, (), self.reference, chat)

    def tokens_of(self, ids: Iterable[int]) -> dict[int, str]:
        """Return the result of the reference's `tokens_of`."""
        return self.reference.tokens_of(ids)


@remembered(str | None, lambda vocabulary: (vocabulary.digest,))
def refusal(vocabulary: Vocabulary) -> str | None:
    """Return the reason why this tokenizer's components rule out the library, or None.

    None means that the library may be compared with the reference. The library also accepts
    byte-level BPE, but its ids then differ from the reference's for code points that are new in
    Unicode 17.
    """
    return not_sentencepiece_bpe(parse_tokenizer_json(vocabulary.tokenizer_json, "tokenizer.json"))
