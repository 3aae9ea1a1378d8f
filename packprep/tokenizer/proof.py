"""Whether an engine gives the reference's ids: before it is trusted, and all through the build.

What is compared is all that tokenization makes of a text, ids and rejection alike; but a text on
which the reference fails is no difference of the engine's.

The texts of the proof are made from a key: every category and script, and what regular expressions
trip over. Nothing is
stored: characters come from unicodedata, choices from the key. Text number i does not depend on how
many others are asked for.
"""

import os
import sys
import unicodedata
from collections.abc import Sequence
from functools import cache
from itertools import islice
from random import Random
from typing import Any, NamedTuple

import numpy as np

from packprep.cache import code_digest, remembered
from packprep.messages import say
from packprep.randomness import PROOF, philox
from packprep.tokenizer.encoding import TOKENIZER_ERROR, Tokens, tokenize
from packprep.tokenizer.engines import byte_tokens
from packprep.tokenizer.engines.engine import Engine, EngineFault, EngineRefusal, Reference
from packprep.tokenizer.file import panics_as_errors, tokens_in_file
from packprep.tokenizer.roles import Vocabulary

SPACES = (
    " ",
    " ",
    " ",
    "\t",
    "\n",
    "\n",
    "\r\n",
    "\r",
    "\v",
    "\f",
    "\x1c",
    "\x1d",
    "\x1e",
    "\x1f",
    "\x85",
    "\xa0",
    "\u1680",
    "\u180e",
    "\u2000",
    "\u2003",
    "\u200b",
    "\u200c",
    "\u200d",
    "\u2028",
    "\u2029",
    "\u202f",
    "\u205f",
    "\u2060",
    "\u3000",
    "\ufeff",
    "\0",
)
CONTRACTIONS = (
    "'s",
    "'t",
    "'re",
    "'ve",
    "'m",
    "'ll",
    "'d",
    "'S",
    "'LL",
    "'rE",
    "'Ve",
    "'ſ",
    "’s",
    "'",
    "''s",
    "'D1",
)
FOLDED = (  # what folds to other letters, and what normalization takes apart or puts together
    "\u017f",
    "\u212a",
    "\u0130",
    "\u0131",
    "\xdf",
    "\u1e9e",
    "\u03c2",
    "\u03a3",
    "\u0149",
    "\u01f0",
    "\u0390",
    "\ufb01",
    "\ufb00",
    "\u212b",
    "\u2126",
    "\u01c4",
    "\u01c5",
    "\xaa",
    "\u2177",
    "\u2460",
    "\xb2",
    "\xbd",
    "\u338f",
    "\uac00",
    "\u1100\u1161",
    "\uac01",
    "\u1100\u1161\u11a8",
    "\u304c",
    "\u304b\u3099",
    "\ufdfa",
    "\u0344",
    "\u0958",
)
EMOJI = (
    "😀",
    "👩‍👩‍👧‍👦",
    "👍🏽",
    "🇩🇪",
    "🇩",
    "❤️",
    "❤",
    "1️⃣",
    "#⃣",
    "🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "🧑🏿‍🚀",
    "☺︎",
    "\u200d",
    "\ufe0f",
    "🫠",
    "🪿",
)
MARKS = (
    "\u0301",
    "\u0308",
    "\u0327",
    "\u0323",
    "\u20dd",
    "\u0489",
    "\u0903",
    "\u094d",
    "\u0e48",
    "\u3099",
    "\u1ab0",
)
WORDS = (
    "the", "Hello", "WORLD", "don", "naïve", "straße", "ÉCOLE", "привет", "Ελλάδα", "שלום", "مرحبا",
    "नमस्ते", "你好", "こんにちは", "カタカナ", "한국어", "ไทย", "x86", "iPhone15Pro", "snake_case", "camelCase",
    "__init__",
)  # fmt: skip
DIGITS = (
    "0",
    "1",
    "9",
    "12345",
    "1000000",
    "3.14159",
    "1,000",
    "٣",
    "४",
    "７",
    "𝟘",
    "²",
    "Ⅻ",
    "½",
    "一",
)
SYMBOLS = (
    "=", "-", "/", "*", "#", ".", "_", "!", "?", "…", "—", "«", "»", "€", "+", "<", "|", "\\", "\"",
    "`", "~", "(", "[{", "::", "->", "//", "\\n", "&nbsp;", "%20", "\ufffd", "\uffff", "\U0010ffff",
    "\ue000",
)  # fmt: skip
_LAST_LISTED = (
    0x33480  # above are private use and what is unassigned, but for tags and variation selectors
)


@cache
def characters() -> tuple[str, ...]:
    """One code point at least of every category of every script, in each 512 neighbours; unassigned
    ones too, no surrogates.

    The script of a letter, mark or number is taken from the first word of its name.
    """
    chosen: dict[tuple[int, str, str], str] = {}
    for code in (*range(_LAST_LISTED), *range(0xE0000, 0xE0200), 0xF0000, 0x10FFFD, sys.maxunicode):
        character = chr(code)
        category = unicodedata.category(character)
        if category != "Cs":
            script = (
                unicodedata.name(character, "").partition(" ")[0] if category[0] in "LMN" else ""
            )
            chosen.setdefault((code >> 9, script, category), character)
    return tuple(chosen.values())


def nasty_texts(
    key: int, begin: int, end: int, added: Sequence[str] = (), pieces: Sequence[str] = ()
) -> list[str]:
    """Texts number begin … end − 1 under a key; most have less than a hundred characters, some a
    few thousand.

    added: texts of added tokens. pieces: texts of tokens of the model. One text in 64 has half of a
    surrogate pair.
    """
    return [
        _nasty_text(Random(key << 32 | number), added or ("<pad>",), pieces or ("the",))
        for number in range(begin, end)
    ]


def _nasty_text(draw: Random, added: Sequence[str], pieces: Sequence[str]) -> str:
    """Up to 15 fragments."""
    of, below, parts = draw.choice, draw.randrange, list[str]()
    halved = below(64) == 0
    for _ in range(below(16)):
        character, kind = of(characters()), below(15)
        if kind < 3:  # characters of any script, or of one mostly
            code = ord(character) + below(32)
            near = (
                chr(code) if code <= sys.maxunicode and not 0xD800 <= code < 0xE000 else character
            )
            parts.append(character + of((near, of(characters()))))
        elif kind < 5:  # one thing many times: short mostly, long at times
            what = of((of(SPACES), of(SYMBOLS), of(WORDS), character, "a", "0", " "))
            parts.append(what * (1 + below(of((4, 4, 20, 300)))))
        elif kind < 7:
            word = of((of(WORDS), of(FOLDED), of(WORDS) + of(MARKS)))
            parts.append(
                of(("", " ", " ", "\u00a0", of(SYMBOLS))) + word + of(("", "", of(CONTRACTIONS)))
            )
        elif kind < 8:  # an added token, alone, cut, doubled, or with something beside it
            text = of(added)
            cut = 1 + below(len(text))
            beside = (f" {text}", f"{text} ", f"\n{text}\n", text.upper(), text + text)
            parts.append(of((text, text[:cut], text[cut:], text[:cut] + text, *beside)))
        elif kind < 10:  # a token of the model, alone, cut, or joined to another one
            text, other = of(pieces), of(pieces)
            cut = below(len(text) + 1)
            parts.append(of((text, text[:cut], text[cut:], text + other, text[:cut] + other)))
        elif kind < 11:
            text = character + of(FOLDED) + of(MARKS) + of(MARKS)
            parts.append(unicodedata.normalize(of(("NFC", "NFD", "NFKC", "NFKD")), text))
        else:
            values = (DIGITS, EMOJI, SYMBOLS, SPACES)[kind - 11]
            parts.append(of(values) + of(values))
    if halved:
        parts.insert(len(parts) // 2, of(("\ud800", "\udfff")))
    return "".join(parts)


RATE = 2000  # one document of so many is compared during a build
MAX_CHARACTERS = 256 << 10  # of a longer document its begin is compared, so long
NASTY_TEXTS = 3000
_PIECES, _ADDED = 1000, 300  # how many tokens' own texts stand in nasty texts
# At most: characters of an added token that gets a text, those that two of them share, texts with
# two such tokens.
_LONGEST, _OVERLAP, _OVERLAPPING = 1000, 32, 10_000
_AROUND_IDS, _AROUND_CHARACTERS = 8, 40


class EngineDifference(NamedTuple):
    """What an engine and its reference make of one text, around the first place where that
    differs."""

    text: str  # around that place
    character: int  # where that begins in the whole text
    token: int  # where the ids begin in all of them
    ids: list[int] | str  # the engine's, or what else it made of the text
    reference_ids: list[int] | str

    def __str__(self) -> str:
        return (
            f"the text {self.text!a}, from character {self.character} of its document, gives"
            f" {self.ids} from token {self.token} on, and by the reference {self.reference_ids}"
        )


def prove(engine: Engine, texts: Sequence[str], special_text: str, vocabulary: Vocabulary) -> None:
    """Compare an engine with its reference on texts. EngineRefusal at the first difference, or
    where it breaks down."""
    if engine.reference is None:
        return
    slow = tokenize(engine.reference, texts, special_text, vocabulary)
    try:
        fast = tokenize(engine, texts, special_text, vocabulary)
    except EngineFault as error:
        raise EngineRefusal(
            f"it broke down ({error}) at the text {error.text[:_AROUND_CHARACTERS]!a}"
        ) from error
    if _equal(fast, slow):
        return
    for i, text in enumerate(texts):
        if found := _difference(engine.reference, text, _only(fast, i), _only(slow, i)):
            raise EngineRefusal(f"it differs from the reference: {found}")
    assert any(map(_failed, slow.rejected)), "the same of each text, and not of all together"


def _proven_for(engine: Engine, special_text: str, vocabulary: Vocabulary) -> tuple | None:
    """What says that an engine would pass again: these very files of its library and the
    reference's. None where none can."""
    if not engine.library or engine.reference is None:
        return None
    both = []
    # with what changes when a file of its library is replaced
    for own in (engine, engine.reference):
        files = [
            (path, status.st_size, status.st_mtime_ns)
            for path in own.library
            for status in (os.stat(path),)
        ]
        both.append((own.name, own.version, *files))
    return NASTY_TEXTS, vocabulary.digest, vocabulary.special_ids, special_text, *both


@remembered(bool, _proven_for)
def prove_on_nasty_text(engine: Engine, special_text: str, vocabulary: Vocabulary) -> bool:
    """`prove` on the same texts for every build with this tokenizer. True: it passed;
    EngineRefusal."""
    if engine.reference is not None:
        say(f"comparing engine {engine.name} with the reference, once for a tokenizer")
        try:
            with panics_as_errors():
                tokens = texts_of_tokens(engine.reference, vocabulary)
        except Exception as error:
            raise EngineRefusal(
                f"there is nothing to prove it on: the tokenizer's decoder fails ({error})"
            ) from error
        texts = texts_with_added(vocabulary) + nasty_texts(0, 0, NASTY_TEXTS, *tokens)
        prove(engine, texts, special_text, vocabulary)
    return True


def _characters_proven_for(
    engine: Engine, special_text: str, vocabulary: Vocabulary
) -> tuple | None:
    """What says that characters would be told right again: the same files, and the same code."""
    files = _proven_for(engine, special_text, vocabulary)
    return None if files is None else (*files, code_digest(byte_tokens.__file__))


@remembered(bool, _characters_proven_for)
def characters_are_proven(engine: Any, special_text: str, vocabulary: Vocabulary) -> bool:
    """Return whether an engine that tells characters by its tokens' bytes gives the reference's ids
    and characters, with and without special tokens in the texts."""
    if not engine.can_tell_characters():
        return False
    say(f"comparing the characters of engine {engine.name}'s tokens, once for a tokenizer")
    try:
        with panics_as_errors():
            tokens = texts_of_tokens(engine.reference, vocabulary)
            texts = texts_with_added(vocabulary) + nasty_texts(1, 0, NASTY_TEXTS, *tokens)
            texts = [text for text in texts if _is_whole(text)]
            for chat in (False, True):
                fast = engine.own_characters(texts, chat)
                slow = engine.reference.encode_with_characters(texts, chat)
                if not all(map(np.array_equal, fast, slow)):
                    return False
    except Exception:  # either fails on one of the texts
        return False
    return True


def _is_whole(text: str) -> bool:
    """Return whether a text has no half characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def texts_of_tokens(reference: Reference, vocabulary: Vocabulary) -> tuple[list[str], list[str]]:
    """(texts of added tokens, texts of other tokens), some of each, evenly from all of them."""
    table = tokens_in_file(vocabulary.tokenizer_json, "tokenizer.json")
    added = sorted(table.added)
    ids = sorted(set(table.texts) - {token.id for token in table.added.values()})
    return added[:: len(added) // _ADDED + 1], reference.texts_of(ids[:: len(ids) // _PIECES + 1])


def texts_with_added(vocabulary: Vocabulary) -> list[str]:
    """A text with each added token beside letters, spaces and itself, and texts in which two of
    them overlap.

    Where the end of one is the begin of others, one that is special and one that is not are taken
    of these: an engine that does not look for special tokens finds what stands across the end of
    one.
    """
    table = tokens_in_file(vocabulary.tokenizer_json, "tokenizer.json")
    added = [token for token in table.added.values() if len(token.text) <= _LONGEST]
    begins: dict[tuple[str, bool], str] = {}
    for token in added:
        special = token.special or token.id in vocabulary.special_ids
        for size in range(1, min(_OVERLAP + 1, len(token.text))):
            begins.setdefault((token.text[:size], special), token.text)
    texts = [token.text for token in added]
    across = (
        text + begins[key][size:]
        for text in texts
        for size in range(1, min(_OVERLAP + 1, len(text)))
        for key in ((text[-size:], False), (text[-size:], True))
        if key in begins
    )
    alone = [f"{text} {text}a{text}é{text}{text}  {text}\n{text}" for text in texts]
    return alone + list(dict.fromkeys(islice(across, _OVERLAPPING)))


def compared(file_key: np.uint64, positions: np.ndarray, use: int) -> np.ndarray:
    """int64[k], ascending: which documents, at these positions of a file in one use of it, are
    compared during a build.

    Those with u(file, position, use) < 1 / RATE, with the key and the counters of `segment_key`
    under another purpose.
    """
    position = np.asarray(positions).astype(np.uint64)
    word = philox(
        file_key, position & np.uint64(0xFFFFFFFF), position >> np.uint64(32), 0, use * 256 + PROOF
    )[0]
    return np.flatnonzero(word.astype(np.uint64) * np.uint64(RATE) < 1 << 32)


def difference(
    engine: Engine, text: str, tokens: Tokens, i: int, special_text: str, vocabulary: Vocabulary
) -> EngineDifference | None:
    """How the reference's ids of a text differ from those that `engine` gave it as document i of
    `tokens`; None if not.

    Of a text of more than MAX_CHARACTERS, only its begin is compared, tokenized anew.
    """
    assert engine.reference is not None
    if len(text) > MAX_CHARACTERS:
        text = text[:MAX_CHARACTERS]
        tokens, i = tokenize(engine, [text], special_text, vocabulary), 0
    return _difference(
        engine.reference,
        text,
        _only(tokens, i),
        tokenize(engine.reference, [text], special_text, vocabulary),
    )


def chat_difference(
    engine: Engine, text: str, tokens: Tokens, i: int, chat: bool
) -> EngineDifference | None:
    """Return how the reference's ids of a text differ from those of document i of `tokens`, which
    were encoded with characters; None if they do not. chat: as in `encode_with_characters`."""
    assert engine.reference is not None
    ids, offsets, _ = engine.reference.encode_with_characters([text], chat)
    return _difference(engine.reference, text, _only(tokens, i), Tokens(ids, offsets, []))


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
        ids,
        np.array([0, len(ids)]),
        [(0, reason, detail) for k, reason, detail in tokens.rejected if k == i],
    )


def _equal(fast: Tokens, slow: Tokens) -> bool:
    same_ids = np.array_equal(fast.ids, slow.ids) and np.array_equal(fast.offsets, slow.offsets)
    return same_ids and fast.rejected == slow.rejected


def _failed(rejected: tuple[int, str, str]) -> bool:
    return rejected[1] == TOKENIZER_ERROR


def _difference(
    reference: Engine, text: str, fast: Tokens, slow: Tokens
) -> EngineDifference | None:
    """fast and slow: of this one text."""
    if _equal(fast, slow) or any(map(_failed, slow.rejected)):
        return None
    if fast.rejected != slow.rejected:
        made = [
            (
                f"no ids but a rejection ({tokens.rejected[0][2]})"
                if tokens.rejected
                else tokens.ids[:_AROUND_IDS].tolist()
            )
            for tokens in (fast, slow)
        ]
        return EngineDifference(_printable(text[: 2 * _AROUND_CHARACTERS]), 0, 0, made[0], made[1])
    both = min(len(fast.ids), len(slow.ids))
    token = int(np.argmax(np.append(fast.ids[:both] != slow.ids[:both], True)))
    begins = reference.encode_with_characters([text], False)[2][:, 0]
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
