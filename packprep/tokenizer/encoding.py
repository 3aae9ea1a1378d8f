"""Encode texts into flat ids with an engine, and reject the documents that cannot be tokenized."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from packprep.dataset.boundaries import offsets_of
from packprep.errors import PlanError
from packprep.tokenizer.engines.engine import Engine, EngineFault, any_of
from packprep.tokenizer.engines.reference import NormalizerLimit, ReferenceEngine
from packprep.tokenizer.file import added_tokens, panics_as_errors, texts_of_ids, unknown_id
from packprep.tokenizer.roles import Vocabulary

TOKENIZER_ERROR = "tokenizer_error"
TEXT_REASONS = ("special_text", TOKENIZER_ERROR)
"""The reasons for rejecting a text that was read successfully, except lone surrogates."""


class Tokens(NamedTuple):
    """Tokenized documents in flat arrays. Document i is ids[offsets[i] : offsets[i + 1]].

    Attributes:
        ids: int32[total].
        offsets: int64[n + 1].
        rejected: (index of the document, reason, detail), ascending. The reason is one of
            TEXT_REASONS or "lone_surrogate". A rejected document has no tokens.
        characters: int64[total, 2], the range [begin, end) of each token in characters of its
            document. None if characters were not requested.
    """

    ids: np.ndarray
    offsets: np.ndarray
    rejected: list[tuple[int, str, str]]
    characters: np.ndarray | None = None


def tokenize(
    engine: Engine,
    texts: Sequence[str],
    special_text: str,
    vocabulary: Vocabulary,
    characters: bool = False,
    chat: Sequence[Sequence[str]] | None = None,
) -> Tokens:
    """Encode the content of each text, without bos, eos or mode token.

    A document is rejected if the tokenizer fails on it. The other documents are not affected.

    Args:
        engine: The engine.
        texts: The texts.
        special_text: How to treat the text of a special token, such as "<pad>" in a document about
            tokenizers. "text" treats it as ordinary characters, "special" as that token, and
            "reject" rejects the document. With "text", a document is also rejected if the model's
            own vocabulary produces such a token. A Unigram model with "<pad>" in its vocabulary
            does this.
        vocabulary: The vocabulary.
        characters: Whether to return the characters of each token.
        chat: Requires `characters`. The texts come from a chat template, which writes real special
            tokens. For each text, `chat` lists the strings that come from messages and not from the
            template. A document is rejected if one of these strings contains the text of a special
            token, because the engine would encode it as that token. With `special_text` "special",
            this is allowed.

    Returns:
        The tokens and the rejected documents.

    Raises:
        EngineFault: If the engine fails on a text and its reference does not.
    """
    assert characters or chat is None
    plain = None if special_text == "special" else _plain_text(vocabulary)
    rejected = {}
    if chat is not None or special_text == "reject":
        rejected = _turned_away(texts, chat, plain)
    try:
        ids, offsets, at = _encoded(engine, texts, rejected, characters, chat is not None)
    except Exception as error:
        # The search for lone surrogates is deferred until here, because it encodes all non-ASCII
        # text a second time.
        rejected = _with_half_characters(texts) | rejected
        rejected |= _failing(engine, texts, rejected, characters, chat is not None, error)
        ids, offsets, at = _encoded(engine, texts, rejected, characters, chat is not None)
    if plain is not None:
        places = plain.places(ids, chat is not None)
        documents = np.searchsorted(offsets, places, side="right") - 1
        for i, place in zip(documents.tolist(), places.tolist(), strict=True):
            id = int(ids[place])
            detail = (
                f"its text gives {plain.texts[id]} (id {id}) as token {place - int(offsets[i])}"
            )
            rejected.setdefault(i, ("special_text", detail))
    if rejected:
        lengths = np.diff(offsets)
        kept = np.ones(len(texts), dtype=bool)
        kept[list(rejected)] = False
        of_kept = np.repeat(kept, lengths)
        ids, at = ids[of_kept], None if at is None else at[of_kept]
        offsets = offsets_of(np.where(kept, lengths, 0))
    return Tokens(ids, offsets, [(i, *rejected[i]) for i in sorted(rejected)], at)


_Rejected = dict[int, tuple[str, str]]  # index of a document → reason, detail


def _encoded(
    engine: Engine, texts: Sequence[str], rejected: Collection[int], characters: bool, is_chat: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return (ids, offsets, characters) of the texts, as if rejected texts were empty.

    Raise the tokenizer's own errors, also for a text with lone surrogates.
    """
    usable = ["" if i in rejected else text for i, text in enumerate(texts)] if rejected else texts
    with panics_as_errors():
        if characters:
            return engine.encode_with_characters(usable, is_chat)
        ids, offsets = engine.encode(usable)
        return ids, offsets, None


def _failing(
    engine: Engine,
    texts: Sequence[str],
    rejected: Collection[int],
    characters: bool,
    is_chat: bool,
    error: Exception,
) -> _Rejected:
    """Return the texts that the tokenizer fails on: index of the document → (reason, detail).

    The tokenizer failed with `error` on all texts together. Texts that are already rejected are
    skipped.

    Raises:
        EngineFault: If the engine's reference accepts a text that the engine fails on.
        PlanError: If the plan's own engine, which is not available, may accept such a text.
        MemoryError: If memory ran out, which is not the text's fault.
        OSError: If the system failed, which is not the text's fault.
    """

    def failure(of: Engine, text: str) -> Exception | None:
        try:
            _encoded(of, [text], (), characters, is_chat)
        except (MemoryError, OSError):
            raise
        except Exception as error:
            return error
        return None

    if isinstance(error, MemoryError | OSError):
        raise error
    failing = {}
    for i, text in enumerate(texts):
        if i not in rejected and (why := failure(engine, text)):
            if engine.reference is not None and failure(engine.reference, text) is None:
                raise EngineFault(text, str(why)) from why
            detail = (
                str(why) if isinstance(why, NormalizerLimit) else "the tokenizer fails on its text"
            )
            if (
                isinstance(engine, ReferenceEngine)
                and engine.in_place_of
                and not isinstance(why, NormalizerLimit)
            ):
                raise PlanError(
                    f"the reference engine fails on a text of {len(text)} characters that starts"
                    f" with {text[:40]!a}. It replaces {engine.in_place_of}, which may support"
                    " it\n"
                    "hint: install that version, or build into a new folder"
                )
            failing[i] = (TOKENIZER_ERROR, detail)
    return failing


def _turned_away(
    texts: Sequence[str], chat: Sequence[Sequence[str]] | None, plain: "_PlainText | None"
) -> _Rejected:
    """Reject texts with lone surrogates, and texts with a special token's text that is not allowed.

    For chats, only the strings from messages are searched for special tokens. If `plain` is None,
    all special tokens are allowed.

    Returns:
        Index of the document → (reason, detail).
    """
    rejected = _with_half_characters(texts)
    if plain is None:
        return rejected
    for i, text in enumerate(texts):
        if i in rejected:
            continue
        if chat is not None:
            if match := next(filter(None, map(plain.pattern.search, chat[i])), None):
                rejected[i] = ("special_text", f"{match.group()} in a message")
        elif match := plain.pattern.search(text):
            rejected[i] = ("special_text", f"{match.group()} at character {match.start()}")
    return rejected


def _with_half_characters(texts: Sequence[str]) -> _Rejected:
    """Reject texts with lone surrogates, which engines cannot encode because UTF-8 lacks them.

    Returns:
        Index of the document → (reason, detail).
    """
    rejected = {}
    for i, text in enumerate(texts):
        try:
            text.isascii() or text.encode()
        except UnicodeEncodeError as error:
            place = error.start
            detail = (
                f"U+{ord(text[place]):04X} at character {place} is half of a surrogate pair and no"
                " character"
            )
            rejected[i] = ("lone_surrogate", detail)
    return rejected


@dataclass(frozen=True)
class _PlainText:
    """The special tokens that plain text must not contain.

    Attributes:
        forbidden: bool[vocab_size], whether an id is forbidden.
        forbidden_in_chat: bool[vocab_size], whether an id is forbidden in chats. Added tokens are
            allowed there, because a chat template writes them.
        texts: id → text of the special tokens.
        ordinary: The longest half-open range of ids without a forbidden id.
    """

    forbidden: np.ndarray
    forbidden_in_chat: np.ndarray
    texts: Mapping[int, str]
    ordinary: tuple[int, int]

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """The pattern that matches the text of any special token."""
        return any_of(self.texts.values())

    def places(self, ids: np.ndarray, in_chat: bool) -> np.ndarray:
        """Return the indices into `ids` of forbidden ids, int64[k]."""
        # Most vocabularies have the forbidden ids at the top. Then the minimum and maximum of the
        # ids replace a lookup of each id.
        first, end = self.ordinary
        if not len(ids) or ((not first or ids.min() >= first) and ids.max() < end):
            return np.zeros(0, np.int64)
        return np.flatnonzero((self.forbidden_in_chat if in_chat else self.forbidden)[ids])


@lru_cache(maxsize=4)
def _plain_text(vocabulary: Vocabulary) -> _PlainText:
    tokenizer_json, special_ids = vocabulary.tokenizer_json, vocabulary.special_ids
    texts = texts_of_ids(tokenizer_json, special_ids)
    forbidden = np.zeros(vocabulary.vocab_size, dtype=bool)
    forbidden[list(texts)] = True
    unknown = unknown_id(tokenizer_json)
    if unknown is not None:
        forbidden[unknown] = False  # [UNK] is special, but any text may produce it.
    in_chat = forbidden.copy()
    in_chat[[id for _, id in added_tokens(tokenizer_json)]] = False
    edges = np.concatenate(([-1], np.flatnonzero(forbidden), [len(forbidden)]))
    longest = int(np.argmax(np.diff(edges)))
    ordinary = (int(edges[longest]) + 1, int(edges[longest + 1]))
    return _PlainText(forbidden, in_chat, texts, ordinary)
