"""Texts to flat ids by an engine, with the documents that cannot be tokenized turned away."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from packprep.corpus.engines.engine import Engine, any_of, check_special_text, offsets_of
from packprep.corpus.tokenizer_json import parse_tokenizer_json, texts_of_ids, unknown_id
from packprep.corpus.vocabulary import Vocabulary


class Tokens(NamedTuple):
    """Token documents, flat. Document i is ids[offsets[i] : offsets[i + 1]].

    ids: int32[total], offsets: int64[n + 1]; rejected: (index of the document, reason, detail), ascending, reason
    "special_text" or "lone_surrogate". A rejected document has no tokens.
    begins: int64[total]: the character of its document at which each token begins, where that was asked for.
    """

    ids: np.ndarray
    offsets: np.ndarray
    rejected: list[tuple[int, str, str]]
    begins: np.ndarray | None = None


def tokenize(
    engine: Engine,
    texts: Sequence[str],
    special_text: str,
    vocabulary: Vocabulary,
    begins: bool = False,
    chat: Sequence[Sequence[str]] | None = None,
) -> Tokens:
    """The ids of each text, content only: no bos, eos or mode token.

    special_text says what the text of a special token is, as "<pad>" in a document about tokenizers:
    "text" characters like others, "special" that token, "reject" a reason to reject the document.
    Under "text", a document is rejected where the model's own vocabulary gives such a token nevertheless, as a Unigram
    model does whose pieces hold "<pad>".
    begins: give the character at which each token begins, too.
    chat (goes with begins): the texts come from a chat template, whose special tokens are meant; for each text, the
    strings in it that are not the template's. Unless special_text is "special", a special token's text in one of those
    rejects the document, for in the whole text it would become the token.
    """
    assert begins or chat is None
    check_special_text(special_text)
    rejected: dict[int, tuple[str, str]] = {}
    plain = None
    if special_text != "special":
        plain = _plain_text(vocabulary.tokenizer_json, vocabulary.special_ids, vocabulary.vocab_size)
    for i, text in enumerate(texts):
        if not text.isascii() and (place := _lone_surrogate(text)) is not None:
            detail = f"U+{ord(text[place]):04X} at character {place} is half of a surrogate pair and no character"
            rejected[i] = ("lone_surrogate", detail)
        elif chat is not None and plain is not None:
            if match := next(filter(None, map(plain.pattern.search, chat[i])), None):
                rejected[i] = ("special_text", f"{match.group()} in a message")
        elif special_text == "reject" and plain is not None and (match := plain.pattern.search(text)):
            rejected[i] = ("special_text", f"{match.group()} at character {match.start()}")
    usable = ["" if i in rejected else text for i, text in enumerate(texts)]
    at: np.ndarray | None = None
    if begins:
        ids, offsets, at = engine.encode_with_begins(usable, chat is not None)
    else:
        ids, offsets = engine.encode(usable)
    if plain is not None:
        places = plain.places(ids, chat is not None)
        documents = np.searchsorted(offsets, places, side="right") - 1
        for i, place in zip(documents.tolist(), places.tolist(), strict=True):
            id = int(ids[place])
            detail = f"its text gives {plain.texts[id]} (id {id}) as token {place - int(offsets[i])}"
            rejected.setdefault(i, ("special_text", detail))
    if rejected:
        lengths = np.diff(offsets)
        kept = np.ones(len(texts), dtype=bool)
        kept[list(rejected)] = False
        of_kept = np.repeat(kept, lengths)
        ids, at = ids[of_kept], None if at is None else at[of_kept]
        offsets = offsets_of(np.where(kept, lengths, 0))
    return Tokens(ids, offsets, [(i, *rejected[i]) for i in sorted(rejected)], at)


def _lone_surrogate(text: str) -> int | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


@dataclass(frozen=True)
class _PlainText:
    """What plain text may not contain. forbidden: bool[vocab_size].

    forbidden_in_chat: those of them that no template can mean, as they are pieces of the model's and no added tokens.
    """

    forbidden: np.ndarray
    forbidden_in_chat: np.ndarray
    texts: Mapping[int, str]
    ordinary: tuple[int, int]  # the longest range of ids, half-open, none of which is forbidden

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Any special token's text."""
        return any_of(self.texts.values())

    def places(self, ids: np.ndarray, in_chat: bool) -> np.ndarray:
        """int64[k]: where forbidden ids are."""
        first, end = self.ordinary  # forbidden ids are at the top of most vocabularies: two passes instead of a look-up
        if not len(ids) or (ids.min() >= first and ids.max() < end):
            return np.zeros(0, np.int64)
        return np.flatnonzero((self.forbidden_in_chat if in_chat else self.forbidden)[ids])


@lru_cache(maxsize=4)
def _plain_text(tokenizer_json: bytes, special_ids: tuple[int, ...], vocab_size: int) -> _PlainText:
    texts = texts_of_ids(tokenizer_json, special_ids)
    forbidden = np.zeros(vocab_size, dtype=bool)
    forbidden[list(texts)] = True
    unknown = unknown_id(tokenizer_json)
    if unknown is not None:
        forbidden[unknown] = False  # [UNK] is special, but any text may give it
    in_chat = forbidden.copy()
    in_chat[[token["id"] for token in parse_tokenizer_json(tokenizer_json, "tokenizer.json")["added_tokens"]]] = False
    edges = np.concatenate(([-1], np.flatnonzero(forbidden), [len(forbidden)]))
    longest = int(np.argmax(np.diff(edges)))
    ordinary = (int(edges[longest]) + 1, int(edges[longest + 1]))
    return _PlainText(forbidden, in_chat, texts, ordinary)
