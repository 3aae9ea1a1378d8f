"""Whether an engine gives the reference's ids: before it is trusted, and all through the build.

What is compared is all that tokenization makes of a text, ids and rejection alike; but a text on which the reference fails
is no difference of the engine's.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from packprep.corpus.engines.engine import Engine, EngineFault, EngineRefusal, Reference
from packprep.corpus.nasty_text import nasty_texts
from packprep.corpus.remembered import remembered
from packprep.corpus.tokenization import TOKENIZER_ERROR, Tokens, tokenize
from packprep.corpus.tokenizer_json import panics_as_errors, read_tokens
from packprep.corpus.vocabulary import Vocabulary
from packprep.randomness import PROOF, philox

RATE = 2000  # one document of so many is compared during a build
MAX_CHARACTERS = 256 << 10  # of a longer document its begin is compared, so long
NASTY_TEXTS = 3000
_PIECES, _ADDED = 1000, 300  # how many tokens' own texts stand in nasty texts
_AROUND_IDS, _AROUND_CHARACTERS = 8, 40


class EngineDifference(NamedTuple):
    """What an engine and its reference make of one text, around the first place where that differs."""

    text: str  # around that place
    character: int  # where that begins in the whole text
    token: int  # where the ids begin in all of them
    ids: list[int] | str  # the engine's, or what else it made of the text
    reference_ids: list[int] | str

    def __str__(self) -> str:
        return (
            f"the text {self.text!a}, from character {self.character} of its document, gives {self.ids} from token "
            f"{self.token} on, and by the reference {self.reference_ids}"
        )


def prove(
    engine: Engine, texts: Sequence[str], special_text: str, vocabulary: Vocabulary, expected: Tokens | None = None
) -> None:
    """Compare an engine with its reference on texts. EngineRefusal at the first difference, or where it breaks down.

    expected: what the reference makes of the texts, where somebody has asked it before.
    """
    if engine.reference is None:
        return
    slow = expected or tokenize(engine.reference, texts, special_text, vocabulary)
    try:
        fast = tokenize(engine, texts, special_text, vocabulary)
    except EngineFault as error:
        raise EngineRefusal(f"it broke down ({error}) at the text {error.text[:_AROUND_CHARACTERS]!a}") from error
    if _equal(fast, slow):
        return
    for i, text in enumerate(texts):
        if found := _difference(engine.reference, text, _only(fast, i), _only(slow, i)):
            raise EngineRefusal(f"it differs from the reference: {found}")
    assert any(map(_failed, slow.rejected)), "the same of each text, and not of all together"


def prove_on_nasty_text(engine: Engine, special_text: str, vocabulary: Vocabulary) -> None:
    """`prove` on the same texts for every build with this tokenizer. EngineRefusal.

    That an engine passed is remembered for these very files of its library and the reference's: it would pass again.
    """
    reference = engine.reference
    if reference is None:
        return

    def find() -> bool:
        try:
            with panics_as_errors():
                tokens = texts_of_tokens(reference, vocabulary)
        except Exception as error:
            raise EngineRefusal(f"there is nothing to prove it on: the tokenizer's decoder fails ({error})") from error
        texts = nasty_texts(0, 0, NASTY_TEXTS, *tokens)
        prove(engine, texts, special_text, vocabulary)
        return True

    if not engine.library:
        find()
        return
    both = [(e.name, e.version, *map(_state_of, e.library)) for e in (engine, reference)]
    remembered("proven", (NASTY_TEXTS, vocabulary.digest, vocabulary.special_ids, special_text, *both), bool, find)


def _state_of(path: str) -> tuple[str, int, int]:
    """What changes when a file is replaced."""
    status = os.stat(path)
    return path, status.st_size, status.st_mtime_ns


def texts_of_tokens(reference: Reference, vocabulary: Vocabulary) -> tuple[list[str], list[str]]:
    """(texts of added tokens, texts of other tokens), some of each, evenly from all of them."""
    table = read_tokens(vocabulary.tokenizer_json, "tokenizer.json")
    added = sorted(table.added)
    ids = sorted(set(table.texts) - {token.id for token in table.added.values()})
    return added[:: len(added) // _ADDED + 1], reference.texts_of(ids[:: len(ids) // _PIECES + 1])


def compared(file_key: np.uint64, positions: np.ndarray, use: int) -> np.ndarray:
    """int64[k], ascending: which documents, at these positions of a file in one use of it, are compared during a build.

    Those with u(file, position, use) < 1 / RATE, with the key and the counters of `segment_key` under another purpose.
    """
    position = np.asarray(positions).astype(np.uint64)
    word = philox(file_key, position & np.uint64(0xFFFFFFFF), position >> np.uint64(32), 0, use * 256 + PROOF)[0]
    return np.flatnonzero(word.astype(np.uint64) * np.uint64(RATE) < 1 << 32)


def difference(
    engine: Engine, text: str, tokens: Tokens, i: int, special_text: str, vocabulary: Vocabulary
) -> EngineDifference | None:
    """How the reference's ids of a text differ from those that `engine` gave it as document i of `tokens`; None if not.

    Of a text of more than MAX_CHARACTERS, only its begin is compared, tokenized anew.
    """
    assert engine.reference is not None
    if len(text) > MAX_CHARACTERS:
        text = text[:MAX_CHARACTERS]
        tokens, i = tokenize(engine, [text], special_text, vocabulary), 0
    return _difference(
        engine.reference, text, _only(tokens, i), tokenize(engine.reference, [text], special_text, vocabulary)
    )


def fault(engine: Engine, error: EngineFault) -> EngineDifference:
    """The difference that an engine's breaking down makes."""
    assert engine.reference is not None
    text = error.text[: 2 * _AROUND_CHARACTERS]
    expected = engine.reference.encode([text])[0][: 2 * _AROUND_IDS].tolist()
    return EngineDifference(text, 0, 0, f"no ids but an error ({error})", expected)


def _only(tokens: Tokens, i: int) -> Tokens:
    """Document i alone."""
    ids = tokens.ids[tokens.offsets[i] : tokens.offsets[i + 1]]
    return Tokens(
        ids, np.array([0, len(ids)]), [(0, reason, detail) for k, reason, detail in tokens.rejected if k == i]
    )


def _equal(fast: Tokens, slow: Tokens) -> bool:
    same_ids = np.array_equal(fast.ids, slow.ids) and np.array_equal(fast.offsets, slow.offsets)
    return same_ids and fast.rejected == slow.rejected


def _failed(rejected: tuple[int, str, str]) -> bool:
    return rejected[1] == TOKENIZER_ERROR


def _difference(reference: Engine, text: str, fast: Tokens, slow: Tokens) -> EngineDifference | None:
    """fast and slow: of this one text."""
    if _equal(fast, slow) or any(map(_failed, slow.rejected)):
        return None
    if fast.rejected != slow.rejected:
        made = [
            f"no ids but a rejection ({tokens.rejected[0][2]})"
            if tokens.rejected
            else tokens.ids[:_AROUND_IDS].tolist()
            for tokens in (fast, slow)
        ]
        return EngineDifference(_printable(text[: 2 * _AROUND_CHARACTERS]), 0, 0, made[0], made[1])
    both = min(len(fast.ids), len(slow.ids))
    token = int(np.argmax(np.append(fast.ids[:both] != slow.ids[:both], True)))
    begins = reference.encode_with_begins([text], False)[2]
    character = int(begins[token]) if token < len(begins) else len(text)
    from_character, from_token = max(0, character - _AROUND_CHARACTERS), max(0, token - _AROUND_IDS)
    return EngineDifference(
        _printable(text[from_character : character + _AROUND_CHARACTERS]),
        from_character,
        from_token,
        fast.ids[from_token : token + _AROUND_IDS].tolist(),
        slow.ids[from_token : token + _AROUND_IDS].tolist(),
    )


def _printable(text: str) -> str:
    """The text without half characters, for a note is UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
