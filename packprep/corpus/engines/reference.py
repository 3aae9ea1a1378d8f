"""The reference engine: the `tokenizers` library, any tokenizer.json."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from packprep.corpus.engines.engine import offsets_of
from packprep.corpus.engines.normal_forms import NormalForms
from packprep.corpus.tokenizer_json import outline_of, plain_tokenizer_json
from packprep.corpus.vocabulary import Vocabulary

BATCH_CHARACTERS = 1 << 20


class ReferenceEngine:
    """`tokenizers`, without its post-processor, truncation, padding and dropout."""

    name = "reference"
    reference = None

    def __init__(self, vocabulary: Vocabulary, special_text: str):
        import tokenizers

        as_special = special_text == "special"
        plain = plain_of(vocabulary, special_text)
        self.version = tokenizers.__version__
        self.library = (tokenizers.tokenizers.__file__,)
        self._tokenizer = tokenizers.Tokenizer.from_buffer(plain)
        self._tokenizer.encode_special_tokens = not as_special
        self._plain, self._chat = plain, self._tokenizer if as_special else None
        self._forms = NormalForms(outline_of(vocabulary.tokenizer_json).normalizer)

    def texts_of(self, ids: Sequence[int]) -> list[str]:
        """The text of each token by itself, as far as it is text. Raises whatever the decoder does, panics included."""
        return self._tokenizer.decode_batch([[id] for id in ids], skip_special_tokens=False)

    def tokens_of(self, ids: Iterable[int]) -> dict[int, str]:
        """id → token as the tokenizer.json writes it, of those ids that are tokens."""
        return {id: token for id in ids if (token := self._tokenizer.id_to_token(id)) is not None}

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """ids: int32[total], offsets: int64[n + 1]."""
        parts, lengths = [], []
        for batch in _batches(texts, self._forms):
            lists = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)]
            counts = [len(ids) for ids in lists]
            parts.append(np.fromiter(chain.from_iterable(lists), dtype=np.int32, count=sum(counts)))
            lengths += counts
        ids = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
        return ids, offsets_of(np.array(lengths, dtype=np.int64))

    def encode_with_begins(self, texts: Sequence[str], chat: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """ids: int32[total], offsets: int64[n + 1], begins: int64[total]."""
        ids: list[int] = []
        begins: list[int] = []
        lengths: list[int] = []
        tokenizer = self._for_chat() if chat else self._tokenizer
        for batch in _batches(texts, self._forms):
            # not encode_batch_fast, which leaves the offsets out; Python's are counted in characters
            for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
                ids += encoding.ids
                begins += [begin for begin, _ in encoding.offsets]
                lengths.append(len(encoding))
        return np.array(ids, np.int32), offsets_of(np.array(lengths, dtype=np.int64)), np.array(begins, np.int64)

    def _for_chat(self) -> Any:
        """The tokenizer that takes the text of a special token for that token."""
        if self._chat is None:
            import tokenizers

            self._chat = tokenizers.Tokenizer.from_buffer(self._plain)
            self._chat.encode_special_tokens = False
        return self._chat


def special_ids_of(vocabulary: Vocabulary, special_text: str) -> frozenset[int]:
    """What is special in the tokenizer.json that engines load: what plays a role, unless such text is meant as the token."""
    return frozenset() if special_text == "special" else frozenset(vocabulary.special_ids)


def plain_of(vocabulary: Vocabulary, special_text: str, with_special: bool = True) -> bytes:
    """The tokenizer.json that engines load. with_special: whether it has its special tokens."""
    return plain_tokenizer_json(vocabulary.tokenizer_json, special_ids_of(vocabulary, special_text), with_special)


def _batches(texts: Sequence[str], forms: NormalForms) -> Iterator[Sequence[str]]:
    """Neighbouring texts of about BATCH_CHARACTERS: the library's encodings take many times the room of their ids.

    Raises NormalizerLimit.
    """
    begin = characters = 0
    for end, text in enumerate(texts, start=1):
        characters += forms.characters(text)
        if characters >= BATCH_CHARACTERS or end == len(texts):
            yield texts[begin:end]
            begin, characters = end, 0
