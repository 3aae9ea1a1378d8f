"""Check that an engine gives the reference's ids, before its first use and during a build.

The engine and the reference must give the same ids for a text, or both must reject the text. A text
that makes the reference fail does not count as a difference.

The test texts are generated from a key and are not stored. They cover every Unicode category and
script, and text that is difficult for regular expressions. Their characters come from unicodedata.
The key seeds all random choices. Text number i does not depend on how many texts are requested.
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
from packprep.tokenizer.engines.shapes import SPACE
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
FOLDED = (  # Characters that case folding or normalization maps, decomposes or composes.
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
    "नमस्ते", "你好", "こんにちは", "カタカナ", "한국어", "ไทย",
    "x86", "iPhone15Pro", "snake_case", "camelCase", "__init__",
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
    0x33480  # Higher code points are private use or unassigned, except tags and variation selectors
)


@cache
def characters() -> tuple[str, ...]:
    """Return one character per combination of script, category and block of 512 code points.

    Unassigned code points are included. Surrogates are not included. The script of a letter, mark
    or number is the first word of its Unicode name. All other characters count as one script.
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
    """Return the test texts with the numbers begin … end − 1.

    Most texts have fewer than a hundred characters, some have a few thousand. On average, one text
    in 64 contains a lone surrogate.

    Args:
        key: Seeds the random generator of each text, together with the number of the text.
        begin: Number of the first text.
        end: Number after the last text.
        added: Texts of added tokens.
        pieces: Texts of the model's own tokens.
    """
    return [
        _nasty_text(Random(key << 32 | number), added or ("<pad>",), pieces or ("the",))
        for number in range(begin, end)
    ]


def _nasty_text(draw: Random, added: Sequence[str], pieces: Sequence[str]) -> str:
    """Return a text of up to 15 random fragments."""
    pick, below, parts = draw.choice, draw.randrange, list[str]()
    halved = below(64) == 0
    for _ in range(below(16)):
        character, kind = pick(characters()), below(15)
        if kind < 3:  # two characters, half of the time with nearby code points
            code = ord(character) + below(32)
            near = (
                chr(code) if code <= sys.maxunicode and not 0xD800 <= code < 0xE000 else character
            )
            parts.append(character + pick((near, pick(characters()))))
        elif kind < 5:  # a repetition, mostly short but sometimes long
            fragment = pick((pick(SPACES), pick(SYMBOLS), pick(WORDS), character, "a", "0", " "))
            parts.append(fragment * (1 + below(pick((4, 4, 20, 300)))))
        elif kind < 7:
            word = pick((pick(WORDS), pick(FOLDED), pick(WORDS) + pick(MARKS)))
            parts.append(
                pick(("", " ", " ", "\u00a0", pick(SYMBOLS)))
                + word
                + pick(("", "", pick(CONTRACTIONS)))
            )
        elif kind < 8:  # an added token: whole, cut, doubled or with neighbours
            text = pick(added)
            cut = 1 + below(len(text))
            beside = (f" {text}", f"{text} ", f"\n{text}\n", text.upper(), text + text)
            parts.append(pick((text, text[:cut], text[cut:], text[:cut] + text, *beside)))
        elif kind < 10:  # a token of the model: whole, cut or joined to another one
            text, other_text = pick(pieces), pick(pieces)
            cut = below(len(text) + 1)
            parts.append(
                pick((text, text[:cut], text[cut:], text + other_text, text[:cut] + other_text))
            )
        elif kind < 11:
            text = character + pick(FOLDED) + pick(MARKS) + pick(MARKS)
            parts.append(unicodedata.normalize(pick(("NFC", "NFD", "NFKC", "NFKD")), text))
        else:
            values = (DIGITS, EMOJI, SYMBOLS, SPACES)[kind - 11]
            parts.append(pick(values) + pick(values))
    if halved:
        parts.insert(len(parts) // 2, pick(("\ud800", "\udfff")))
    return "".join(parts)


RATE = 2000  # One document in RATE is compared during a build.
MAX_CHARACTERS = 256 << 10  # Only this many characters of a longer document are compared.
NASTY_TEXTS = 3000
_PIECES, _ADDED = 1000, 300  # maximum numbers of the model's and of added tokens in test texts
# Maximum length of an added token that gets a text, maximum overlap of two added tokens in
# characters, and maximum number of texts with two overlapping tokens.
_LONGEST, _OVERLAP, _OVERLAPPING = 1000, 32, 10_000
_AROUND_IDS, _AROUND_CHARACTERS = 8, 40


class EngineDifference(NamedTuple):
    """The results of an engine and its reference for one text, near their first difference."""

    text: str  # the text near the difference
    character: int  # index of the first character of `text` in its document
    token: int  # index of the first id of `ids` in the document's tokens
    ids: list[int] | str  # the engine's ids, or a description of its failure
    reference_ids: list[int] | str

    def __str__(self) -> str:
        return (
            f"the text {self.text!a}, from character {self.character} of its document, gives"
            f" {self.ids} from token {self.token} on, but the reference gives"
            f" {self.reference_ids}"
        )


def prove(engine: Engine, texts: Sequence[str], special_text: str, vocabulary: Vocabulary) -> None:
    """Compare an engine with its reference on texts.

    Raises:
        EngineRefusal: If a text gives different results or the engine fails.
    """
    if engine.reference is None:
        return
    slow = tokenize(engine.reference, texts, special_text, vocabulary)
    try:
        fast = tokenize(engine, texts, special_text, vocabulary)
    except EngineFault as error:
        raise EngineRefusal(
            f"it failed ({error}) at the text {error.text[:_AROUND_CHARACTERS]!a}"
        ) from error
    if _equal(fast, slow):
        return
    for i, text in enumerate(texts):
        if engine_difference := _difference(engine.reference, text, _only(fast, i), _only(slow, i)):
            raise EngineRefusal(f"it differs from the reference: {engine_difference}")
    assert any(map(_failed, slow.rejected)), "the same of each text, and not of all together"


def _proven_for(engine: Engine, special_text: str, vocabulary: Vocabulary) -> tuple | None:
    """Return the cache key of `prove_on_nasty_text`, or None if its result cannot be cached.

    The key contains the vocabulary, `special_text`, and the version and library files of the engine
    and of its reference. The result for an engine without library files cannot be cached.
    """
    if not engine.library or engine.reference is None:
        return None
    engine_keys = []
    # The size and the time of a file change when the library is replaced.
    for one_engine in (engine, engine.reference):
        files = [
            (path, status.st_size, status.st_mtime_ns)
            for path in one_engine.library
            for status in (os.stat(path),)
        ]
        engine_keys.append((one_engine.name, one_engine.version, *files))
    return NASTY_TEXTS, vocabulary.digest, vocabulary.special_ids, special_text, *engine_keys


@remembered(bool, _proven_for)
def prove_on_nasty_text(engine: Engine, special_text: str, vocabulary: Vocabulary) -> bool:
    """Run `prove` on the generated test texts, which depend only on the tokenizer.

    Returns:
        True. The function does not return None, so that its result can be cached.

    Raises:
        EngineRefusal: If the engine fails the proof, or the tokenizer's decoder fails.
    """
    if engine.reference is not None:
        say(f"comparing engine {engine.name} with the reference, once per tokenizer")
        try:
            with panics_as_errors():
                tokens = texts_of_tokens(engine.reference, vocabulary)
        except Exception as error:
            raise EngineRefusal(
                f"it cannot be checked, because the tokenizer's decoder fails ({error})"
            ) from error
        texts = texts_with_added(vocabulary) + nasty_texts(0, 0, NASTY_TEXTS, *tokens)
        prove(engine, texts, special_text, vocabulary)
    return True


def _characters_proven_for(
    engine: Engine, special_text: str, vocabulary: Vocabulary
) -> tuple | None:
    """Return the cache key of `characters_are_proven`, or None if its result cannot be cached.

    The key is the result of `_proven_for`, followed by the digest of the code in byte_tokens.py.
    """
    files = _proven_for(engine, special_text, vocabulary)
    return None if files is None else (*files, code_digest(byte_tokens.__file__))


@remembered(bool, _characters_proven_for)
def characters_are_proven(engine: Any, special_text: str, vocabulary: Vocabulary) -> bool:
    """Return whether an engine's ids and characters equal the reference's on all test texts.

    Return False also if the engine cannot compute characters from the bytes of its tokens, or if an
    error occurs. Each text is encoded twice, because the text of a special token is encoded as
    ordinary text the first time and as that token the second time.
    """
    if not engine.can_tell_characters():
        return False
    say(f"comparing the characters of engine {engine.name}'s tokens, once per tokenizer")
    try:
        with panics_as_errors():
            tokens = texts_of_tokens(engine.reference, vocabulary)
            texts = texts_with_added(vocabulary) + nasty_texts(1, 0, NASTY_TEXTS, *tokens)
            texts = [text for text in texts if _is_whole(text)]
            # SentencePiece tokens contain the character SPACE for a space, so test it in texts too.
            texts += [text.replace(" ", SPACE) for text in texts[::10]]
            for chat in (False, True):
                fast = engine.own_characters(texts, chat)
                slow = engine.reference.encode_with_characters(texts, chat)
                if not all(map(np.array_equal, fast, slow)):
                    return False
    except Exception:  # The engine or the reference fails on one of the texts.
        return False
    return True


def _is_whole(text: str) -> bool:
    """Return whether a text has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def texts_of_tokens(reference: Reference, vocabulary: Vocabulary) -> tuple[list[str], list[str]]:
    """Return the texts of added tokens, and the texts of the model's other tokens.

    Both lists are evenly spaced samples. The first has at most _ADDED texts, the second at most
    _PIECES.
    """
    table = tokens_in_file(vocabulary.tokenizer_json, "tokenizer.json")
    added = sorted(table.added)
    ids = sorted(set(table.texts) - {token.id for token in table.added.values()})
    return added[:: len(added) // _ADDED + 1], reference.texts_of(ids[:: len(ids) // _PIECES + 1])


def texts_with_added(vocabulary: Vocabulary) -> list[str]:
    """Return a text for each added token, and texts with two overlapping added tokens.

    A text of the first kind has the token next to letters, spaces and itself. In a text of the
    second kind, the end of one token is the start of another. For example, <|a|> and |>b give
    "<|a|>b". Each end of a token is combined with at most one special and one ordinary second
    token. In the example, an engine that does not search for the special token <|a|> finds the
    ordinary token |>b.
    """
    table = tokens_in_file(vocabulary.tokenizer_json, "tokenizer.json")
    added = [token for token in table.added.values() if len(token.text) <= _LONGEST]
    # Map each start of a token to the first token with it, for special and ordinary tokens
    # separately.
    begins: dict[tuple[str, bool], str] = {}
    for token in added:
        special = token.special or token.id in vocabulary.special_ids
        for size in range(1, min(_OVERLAP + 1, len(token.text))):
            begins.setdefault((token.text[:size], special), token.text)
    texts = [token.text for token in added]
    # Join a token to another whose start equals its end. Dropping the shared part lets both
    # overlap.
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
    """Return which documents a build compares with the reference, as indices into `positions`.

    A document is compared if u < 1 / RATE. The uniform random number u in [0, 1) depends on the
    file, the position and the pass. Its Philox key and counters are the same as in `segment_key`,
    with the purpose PROOF.

    Args:
        file_key: Key of the file.
        positions: Positions of the documents in the file.
        use: Number of the pass.

    Returns:
        int64[k], ascending.
    """
    position = np.asarray(positions).astype(np.uint64)
    word = philox(
        file_key, position & np.uint64(0xFFFFFFFF), position >> np.uint64(32), 0, use * 256 + PROOF
    )[0]
    return np.flatnonzero(word.astype(np.uint64) * np.uint64(RATE) < 1 << 32)


def difference(
    engine: Engine, text: str, tokens: Tokens, i: int, special_text: str, vocabulary: Vocabulary
) -> EngineDifference | None:
    """Compare the result of `engine` for one text with the result of the reference.

    The engine's result is document i of `tokens`. If `text` has more than MAX_CHARACTERS
    characters, the engine and the reference tokenize only its first MAX_CHARACTERS characters, and
    these two results are compared.

    Returns:
        The first difference, or None.
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
    """Compare an engine's ids and characters for a text with the reference's.

    The ids that `engine` gave the text during the build are document i of `tokens`. The engine
    encodes the text again here, because `tokens` may lack the characters. `chat` is as in
    `encode_with_characters`.

    Returns:
        The first difference, or None.
    """
    assert engine.reference is not None
    fast = engine.encode_with_characters([text], chat)
    slow = engine.reference.encode_with_characters([text], chat)
    for own_tokens in (_only(tokens, i), Tokens(*fast[:2], [])):
        if differs := _difference(engine.reference, text, own_tokens, Tokens(*slow[:2], [])):
            return differs
    return _other_characters(text, fast, slow)


def _other_characters(
    text: str, fast: Sequence[np.ndarray], slow: Sequence[np.ndarray]
) -> EngineDifference | None:
    """Return the first difference in the characters of a text's tokens, or None.

    `fast` and `slow` are the results of `encode_with_characters`, with the same ids.
    """
    if np.array_equal(fast[2], slow[2]):
        return None
    token = int(np.argmax((fast[2] != slow[2]).any(axis=1)))
    begin = max(0, int(slow[2][token, 0]) - _AROUND_CHARACTERS)
    around = _printable(text[begin : begin + 2 * _AROUND_CHARACTERS])
    shown = [
        f"the characters {encoded[2][token : token + _AROUND_IDS].tolist()}"
        for encoded in (fast, slow)
    ]
    return EngineDifference(around, begin, token, *shown)


def fault(engine: Engine, error: EngineFault) -> EngineDifference:
    """Return an `EngineDifference` that describes an engine's failure on a text."""
    assert engine.reference is not None
    text = error.text[: 2 * _AROUND_CHARACTERS]
    expected = engine.reference.encode([text])[0][: 2 * _AROUND_IDS].tolist()
    return EngineDifference(text, 0, 0, f"no ids but an error ({error})", expected)


def _only(tokens: Tokens, i: int) -> Tokens:
    """Return a `Tokens` with only document i, which gets index 0."""
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
    """Return the first difference between the results `fast` and `slow` for a text, or None.

    `slow` is the result of the reference. If the reference failed on the text, return None.
    """
    if _equal(fast, slow) or any(map(_failed, slow.rejected)):
        return None
    # Without ids on one side, there is no first different token to show.
    if fast.rejected != slow.rejected:
        outcomes = [
            (
                f"no ids but a rejection ({tokens.rejected[0][2]})"
                if tokens.rejected
                else tokens.ids[:_AROUND_IDS].tolist()
            )
            for tokens in (fast, slow)
        ]
        return EngineDifference(
            _printable(text[: 2 * _AROUND_CHARACTERS]), 0, 0, outcomes[0], outcomes[1]
        )
    # If one result is the start of the other, the difference is after the last common token.
    common_length = min(len(fast.ids), len(slow.ids))
    token = int(np.argmax(np.append(fast.ids[:common_length] != slow.ids[:common_length], True)))
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
    """Return the text with escapes such as \\ud800 for its lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()
