"""The engine `nanotoken` for WordPiece, about 17 times as fast as the reference."""

from collections.abc import Iterable, Sequence

import numpy as np

from packprep.cache import remembered
from packprep.tokenizer.engines.engine import EngineRefusal, cannot_load, installed_version
from packprep.tokenizer.engines.reference import ReferenceEngine, plain_of
from packprep.tokenizer.file import added_tokens, panics_as_errors, parse_tokenizer_json
from packprep.tokenizer.roles import Vocabulary

NAME = "nanotoken"
CACHED_WORDS = 1 << 17
"""Maximum number of words that the library caches, and of texts between two spaces.

The cache takes less than 32 MiB and is as fast as a cache without limit.
"""


class WordPieceEngine:
    """The engine `nanotoken`.

    The library runs on the calling thread, because its thread pool does not survive a fork. It does
    not report which characters of the text each token represents, so the reference computes these
    ranges.

    Raises:
        EngineRefusal: If the engine does not accept the tokenizer.
    """

    name = NAME

    def __init__(self, vocabulary: Vocabulary, special_text: str):
        if why := refusal(vocabulary):
            raise EngineRefusal(why)
        try:
            import nanotoken as library
        except ImportError as error:
            raise EngineRefusal(f"it cannot be imported ({error})") from error
        # The library searches texts for special tokens only if special_text is "special".
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
            if (engine_id := self._tokenizer.token_to_id(text)) != id:
                raise EngineRefusal(f"it gives {text!r} the id {engine_id} and the file {id}")

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts into ids, int32[total], and offsets, int64[n + 1]."""
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False, parallel=False)
        return encoded.ids.view(np.int32), encoded.offsets

    def encode_with_characters(
        self, texts: Sequence[str], chat: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Encode texts with the reference, as in `Engine.encode_with_characters`."""
        return self.reference.encode_with_characters(texts, chat)

    def tokens_of(self, ids: Iterable[int]) -> dict[int, str]:
        """Return the result of the reference's `tokens_of`."""
        return self.reference.tokens_of(ids)


@remembered(str | None, lambda vocabulary: (vocabulary.digest,))
def refusal(vocabulary: Vocabulary) -> str | None:
    """Return the reason why this tokenizer's model rules out the library, or None.

    The library itself refuses an unsupported normalizer or pre-tokenizer when it loads.
    """
    kind = parse_tokenizer_json(vocabulary.tokenizer_json, "tokenizer.json")["model"].get("type")
    return (
        None
        if kind == "WordPiece"
        else f"its model is {kind or 'of an unnamed type'}, not WordPiece"
    )
