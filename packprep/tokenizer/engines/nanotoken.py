"""The fast engine for WordPiece: `nanotoken`, at some 17 times the reference's speed."""

from collections.abc import Iterable, Sequence

import numpy as np

from packprep.cache import remembered
from packprep.tokenizer.engines.engine import EngineRefusal, cannot_load, installed_version
from packprep.tokenizer.engines.reference import ReferenceEngine, plain_of
from packprep.tokenizer.file import added_tokens, panics_as_errors, parse_tokenizer_json
from packprep.tokenizer.roles import Vocabulary

NAME = "nanotoken"
CACHED_WORDS = 1 << 17
"""How many words, and as many pieces between spaces, the library remembers: below 32 MiB, and no
slower than without a bound."""


class WordPieceEngine:
    """`nanotoken`, on the calling thread: its pool would not outlive a fork.

    The reference is asked where tokens begin, which the library does not tell.
    Raises EngineRefusal for a tokenizer that it does not take.
    """

    name = NAME
    rate = 80

    def __init__(self, vocabulary: Vocabulary, special_text: str):
        if why := refusal(vocabulary):
            raise EngineRefusal(why)
        try:
            import nanotoken as library
        except ImportError as error:
            raise EngineRefusal(f"it cannot be imported ({error})") from error
        # Only where a special token's text is that token has it to be looked for.
        plain = plain_of(vocabulary, special_text, with_special=special_text == "special")
        self.version, self.library = (
            installed_version(NAME) or "",
            (str(library.nanotoken_rs.__file__),),
        )
        library.set_cache_entries(CACHED_WORDS)
        try:
            with panics_as_errors():
                self._tokenizer = library.Tokenizer.from_json(plain)
        except Exception as error:
            raise cannot_load(error) from error
        self.reference = ReferenceEngine(vocabulary, special_text)
        for text, id in added_tokens(plain):
            if (here := self._tokenizer.token_to_id(text)) != id:
                raise EngineRefusal(f"it gives {text!r} the id {here} and the file {id}")

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """ids: int32[total], offsets: int64[n + 1]."""
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False, parallel=False)
        return encoded.ids.view(np.int32), encoded.offsets

    def encode_with_characters(
        self, texts: Sequence[str], chat: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The reference's."""
        return self.reference.encode_with_characters(texts, chat)

    def tokens_of(self, ids: Iterable[int]) -> dict[int, str]:
        """The reference's."""
        return self.reference.tokens_of(ids)


@remembered(str | None, lambda vocabulary: (vocabulary.digest,))
def refusal(vocabulary: Vocabulary) -> str | None:
    """Why the library does not take this tokenizer, by its model; its normalizer and pre-tokenizer
    are refused in loading."""
    kind = parse_tokenizer_json(vocabulary.tokenizer_json, "tokenizer.json")["model"].get("type")
    return (
        None
        if kind == "WordPiece"
        else f"its model is {kind or 'of an unnamed type'}, not WordPiece"
    )
