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
        rejected: A tuple (index of the document, reason, detail) for each rejected document, sorted
            by index. The reason is one of TEXT_REASONS or "lone_surrogate". A rejected document has
            no tokens.
        characters: int64[total, 2]. Row k is a range (begin, end): token k represents the
            characters begin … end − 1 of its document. None if `tokenize` was called without
            `characters`.
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
        characters: Whether to fill `Tokens.characters`.
        chat: None for texts that are not chats. For chats, which require `characters`, it lists for
            each text the strings that come from messages and not from the chat template. Because
            the template writes real special tokens, the engine encodes the text of a special token
            as that token wherever it occurs. A document is therefore rejected if one of the listed
            strings contains the text of a special token, unless `special_text` is "special".

    Returns:
        The tokens and the rejected documents.

    Raises:
        EngineFault: If the engine fails on a text that its reference accepts.
    """
    assert characters or chat is None
    plain = None if special_text == "special" else _plain_text(vocabulary)
    rejected = {}
    if chat is not None or special_text == "reject":
        rejected = _turned_away(texts, chat, plain)
    try:
        ids, offsets, ranges = _encoded(engine, texts, rejected, characters, chat is not None)
    except Exception as error:
        # The search for lone surrogates is deferred until here, because it encodes all non-ASCII
        # text a second time.
        rejected = _with_half_characters(texts) | rejected
        rejected |= _failing(engine, texts, rejected, characters, chat is not None, error)
        ids, offsets, ranges = _encoded(engine, texts, rejected, characters, chat is not None)
    # A model may give a special token for plain text, for example a Unigram model with <pad> in its
    # vocabulary.
    if plain is not None:
        places = plain.places(ids, chat is not None)
        documents = np.searchsorted(offsets, places, side="right") - 1
        for i, place in zip(documents.tolist(), places.tolist(), strict=True):
            id = int(ids[place])
            detail = (
                f"its text gives {plain.texts[id]} (id {id}) as token {place - int(offsets[i])}"
            )
            rejected.setdefault(i, ("special_text", detail))
    # A rejected document keeps its number and has no tokens.
    if rejected:
        lengths = np.diff(offsets)
        is_kept = np.ones(len(texts), dtype=bool)
        is_kept[list(rejected)] = False
        of_kept = np.repeat(is_kept, lengths)
        ids, ranges = ids[of_kept], None if ranges is None else ranges[of_kept]
        offsets = offsets_of(np.where(is_kept, lengths, 0))
    return Tokens(ids, offsets, [(i, *rejected[i]) for i in sorted(rejected)], ranges)


_Rejected = dict[int, tuple[str, str]]  # index of a document → reason, detail


def _encoded(
    engine: Engine, texts: Sequence[str], rejected: Collection[int], characters: bool, is_chat: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return (ids, offsets, characters) of the texts, with no ids for rejected texts.

    The third value is None if `characters` is false. Errors of the engine are raised unchanged,
    for example for a text with lone surrogates.
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
    """Encode each text separately, and return the texts that the engine fails on.

    This function is called after the engine failed with `error` on all texts together. Texts in
    `rejected` are skipped. The result maps the index of the document to (reason, detail).

    Raises:
        EngineFault: If the engine fails on a text that its reference accepts.
        PlanError: If the engine fails on a text, but is only a replacement for the plan's engine.
            The plan's engine may accept this text.
        MemoryError: If memory ran out, which is not the text's fault.
        OSError: If the system failed, which is not the text's fault.
    """

    def failure(one_engine: Engine, text: str) -> Exception | None:
        try:
            _encoded(one_engine, [text], (), characters, is_chat)
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
            # Rejecting a text that the reference accepts would make the bytes depend on the engine.
            if engine.reference is not None and failure(engine.reference, text) is None:
                raise EngineFault(text, str(why)) from why
            detail = (
                str(why) if isinstance(why, NormalizerLimit) else "the tokenizer fails on its text"
            )
            # A replacement must not reject a text that the plan's engine may accept.
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
    """Return the texts to reject: index of the document → (reason, detail).

    These texts contain a lone surrogate, or the text of a special token. For chats, only the
    strings from messages are searched for special tokens. Without `plain`, all special tokens are
    allowed.
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
    """Return the texts with lone surrogates: index of the document → (reason, detail).

    Engines cannot encode them, because UTF-8 has no lone surrogates.
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
        ordinary: The longest range (first, end) of ids without a forbidden id. `end` is not part of
            the range.
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
        """Return the indices of the forbidden ids in `ids`, int64[k]."""
        # Most vocabularies have the forbidden ids at one end. It is faster to compare the minimum
        # and maximum of `ids` with `ordinary` than to look up each id.
        first_id, end = self.ordinary
        if not len(ids) or ((not first_id or ids.min() >= first_id) and ids.max() < end):
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
    # In chats, the template writes added tokens, so only other special tokens are forbidden.
    in_chat = forbidden.copy()
    in_chat[[id for _, id in added_tokens(tokenizer_json)]] = False
    edges = np.concatenate(([-1], np.flatnonzero(forbidden), [len(forbidden)]))
    longest = int(np.argmax(np.diff(edges)))
    ordinary = (int(edges[longest]) + 1, int(edges[longest + 1]))
    return _PlainText(forbidden, in_chat, texts, ordinary)
