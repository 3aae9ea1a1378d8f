"""Texts to flat ids by an engine, with the documents that cannot be tokenized turned away."""

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
"""Why a text can be rejected that its reader took, but for half characters."""


class Tokens(NamedTuple):
    """Token documents, flat. Document i is ids[offsets[i] : offsets[i + 1]].

    ids: int32[total], offsets: int64[n + 1]; rejected: (index of the document, reason, detail),
    ascending, reason one of TEXT_REASONS or "lone_surrogate". A rejected document has no tokens.
    characters: int64[total, 2]: [begin, end) of what each token stands for in its document, where
    that was asked for.
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
    """The ids of each text, content only: no bos, eos or mode token.

    special_text says what the text of a special token is, as "<pad>" in a document about
    tokenizers: "text" characters like others, "special" that token, "reject" a reason to reject the
    document. Under "text", a document is rejected where the model's own vocabulary gives such a
    token nevertheless, as a Unigram model does whose pieces hold "<pad>". One on which the
    tokenizer fails is rejected, and the others get what they get without it; EngineFault where the
    engine fails and its reference does not.
    characters: give those that each token stands for, too.
    chat (goes with characters): the texts come from a chat template, whose special tokens are
    meant; for each text, the strings in it that are not the template's. Unless special_text is
    "special", a special token's text in one of those rejects the document, for in the whole text it
    would become the token.
    """
    assert characters or chat is None
    plain = None if special_text == "special" else _plain_text(vocabulary)
    rejected = {}
    if chat is not None or special_text == "reject":
        rejected = _turned_away(texts, chat, plain)
    try:
        ids, offsets, at = _encoded(engine, texts, rejected, characters, chat is not None)
    except Exception as error:
        # Half characters are looked for only now: to look is to encode all that is not ASCII twice.
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
    """(ids, offsets, characters) of the texts, those of rejected ones empty. Raises where one is
    not of whole characters, and whatever the tokenizer does."""
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
    """The texts on each of which the tokenizer fails, of those that are not rejected, where all
    together gave an error.

    EngineFault for one that the engine's reference takes; PlanError for one that the plan's own
    engine may take. What is wrong with the machine is raised again.
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
                    f"the reference engine fails on a text of {len(text)} characters that begins"
                    f" {text[:40]!a}, and goes in place of {engine.in_place_of}, which may take it:"
                    " install that version, or build into a new folder"
                )
            failing[i] = (TOKENIZER_ERROR, detail)
    return failing


def _turned_away(
    texts: Sequence[str], chat: Sequence[Sequence[str]] | None, plain: "_PlainText | None"
) -> _Rejected:
    """The texts with half a character, or with a special token's text where that may not be."""
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
    """The texts with half of a surrogate pair, which no engine takes: UTF-8 does not have it."""
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
    """What plain text may not contain. forbidden: bool[vocab_size].

    forbidden_in_chat: those of them that no template can mean, as they are pieces of the model's
    and no added tokens.
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
        # forbidden ids are at the top of most vocabularies: a pass or two instead of a look-up
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
        forbidden[unknown] = False  # [UNK] is special, but any text may give it
    in_chat = forbidden.copy()
    in_chat[[id for _, id in added_tokens(tokenizer_json)]] = False
    edges = np.concatenate(([-1], np.flatnonzero(forbidden), [len(forbidden)]))
    longest = int(np.argmax(np.diff(edges)))
    ordinary = (int(edges[longest]) + 1, int(edges[longest + 1]))
    return _PlainText(forbidden, in_chat, texts, ordinary)
