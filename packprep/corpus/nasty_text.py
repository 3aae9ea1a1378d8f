"""Text on which tokenizers differ, made from a key: every category and script, and what regular expressions trip over.

Nothing is stored: characters come from unicodedata, choices from the key. Text number i does not depend on how many others
are asked for.
"""

import sys
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from packprep.randomness import NASTY_TEXT, words

SPACES = (
    " ", " ", " ", "\t", "\n", "\n", "\r\n", "\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x1f", "\x85", "\xa0",
    "\u1680", "\u180e", "\u2000", "\u2003", "\u200b", "\u200c", "\u200d", "\u2028", "\u2029", "\u202f", "\u205f",
    "\u2060", "\u3000", "\ufeff", "\0",
)  # fmt: skip
CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'LL", "'rE", "'Ve", "'ſ", "’s", "'", "''s", "'D1")
FOLDED = (  # what folds to other letters, and what normalization takes apart or puts together
    "\u017f", "\u212a", "\u0130", "\u0131", "\xdf", "\u1e9e", "\u03c2", "\u03a3", "\u0149", "\u01f0", "\u0390",
    "\ufb01", "\ufb00", "\u212b", "\u2126", "\u01c4", "\u01c5", "\xaa", "\u2177", "\u2460", "\xb2", "\xbd", "\u338f",
    "\uac00", "\u1100\u1161", "\uac01", "\u1100\u1161\u11a8", "\u304c", "\u304b\u3099", "\ufdfa", "\u0344", "\u0958",
)  # fmt: skip
EMOJI = (
    "😀", "👩‍👩‍👧‍👦", "👍🏽", "🇩🇪", "🇩", "❤️", "❤", "1️⃣", "#⃣", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "🧑🏿‍🚀", "☺︎", "\u200d", "\ufe0f", "🫠", "🪿",
)  # fmt: skip
MARKS = ("\u0301", "\u0308", "\u0327", "\u0323", "\u20dd", "\u0489", "\u0903", "\u094d", "\u0e48", "\u3099", "\u1ab0")
WORDS = (
    "the", "Hello", "WORLD", "don", "naïve", "straße", "ÉCOLE", "привет", "Ελλάδα", "שלום", "مرحبا",
    "नमस्ते", "你好", "こんにちは", "カタカナ", "한국어", "ไทย", "x86", "iPhone15Pro", "snake_case", "camelCase",
    "__init__",
)  # fmt: skip
DIGITS = ("0", "1", "9", "12345", "1000000", "3.14159", "1,000", "٣", "४", "７", "𝟘", "²", "Ⅻ", "½", "一")
SYMBOLS = (
    "=", "-", "/", "*", "#", ".", "_", "!", "?", "…", "—", "«", "»", "€", "+", "<", "|", "\\", "\"",
    "`", "~", "(", "[{", "::", "->", "//", "\\n", "&nbsp;", "%20", "\ufffd", "\uffff", "\U0010ffff",
    "\ue000",
)  # fmt: skip
_LAST_LISTED = 0x33480  # above are private use and what is unassigned, but for tags and variation selectors
_DRAWS = 96  # words of one text; a text that would need more ends there


@cache
def characters() -> tuple[str, ...]:
    """One code point at least of every category of every script, in each 512 neighbours; unassigned ones too, no surrogates.

    The script of a letter, mark or number is taken from the first word of its name.
    """
    chosen: dict[tuple[int, str, str], str] = {}
    for code in (*range(_LAST_LISTED), *range(0xE0000, 0xE0200), 0xF0000, 0x10FFFD, sys.maxunicode):
        character = chr(code)
        category = unicodedata.category(character)
        if category != "Cs":
            script = unicodedata.name(character, "").partition(" ")[0] if category[0] in "LMN" else ""
            chosen.setdefault((code >> 9, script, category), character)
    return tuple(chosen.values())


class _Draws:
    """The choices of one text. `spent` once all its words are used."""

    def __init__(self, drawn: list[int]):
        self._drawn, self._next = drawn, 0

    @property
    def spent(self) -> bool:
        return self._next >= len(self._drawn)

    def below(self, bound: int) -> int:
        """An integer in 0 … bound − 1; 0 when spent."""
        if self.spent:
            return 0
        self._next += 1
        return self._drawn[self._next - 1] * bound >> 32

    def of(self, values: Sequence[str]) -> str:
        """One of the values; "" where there is none."""
        return values[self.below(len(values))] if values else ""


def _random_characters(draws: _Draws, own: Sequence[str], pieces: Sequence[str]) -> str:
    near = draws.of(characters())
    if draws.below(2):
        return near + draws.of(characters())
    code = ord(near) + draws.below(32)  # a neighbour, of the same script mostly
    return near + (chr(code) if code <= sys.maxunicode and not 0xD800 <= code < 0xE000 else near)


def _run(draws: _Draws, own: Sequence[str], pieces: Sequence[str]) -> str:
    """One thing many times: short mostly, long at times."""
    what = draws.of((draws.of(SPACES), draws.of(SYMBOLS), draws.of(WORDS), draws.of(characters()), "a", "0", " "))
    longest = (4, 4, 20, 300)[draws.below(4)]
    return what * (1 + draws.below(longest))


def _spaces(draws: _Draws, own: Sequence[str], pieces: Sequence[str]) -> str:
    return "".join(draws.of(SPACES) for _ in range(1 + draws.below(4)))


def _word(draws: _Draws, own: Sequence[str], pieces: Sequence[str]) -> str:
    word = draws.of((draws.of(WORDS), draws.of(FOLDED), draws.of(WORDS) + draws.of(MARKS)))
    return draws.of(("", " ", " ", "\u00a0", draws.of(SYMBOLS))) + word + draws.of(("", "", draws.of(CONTRACTIONS)))


def _own(draws: _Draws, own: Sequence[str], pieces: Sequence[str]) -> str:
    """The text of an added token, alone, cut, doubled, or with something beside it."""
    text = draws.of(own) or "<pad>"
    cut = 1 + draws.below(len(text))
    return draws.of(
        (
            text,
            text + text,
            f" {text}",
            f"{text} ",
            f"\n{text}\n",
            text[:cut],
            text[cut:],
            text.upper(),
            text[:cut] + text,
        )
    )


def _piece(draws: _Draws, own: Sequence[str], pieces: Sequence[str]) -> str:
    """A token of the model, alone, cut, or joined to another one."""
    text = draws.of(pieces) or "the"
    cut = draws.below(len(text) + 1)
    return draws.of((text, text[:cut], text[cut:], text + draws.of(pieces), text[:cut] + draws.of(pieces)))


def _normalized(draws: _Draws, own: Sequence[str], pieces: Sequence[str]) -> str:
    text = draws.of(characters()) + draws.of(FOLDED) + draws.of(MARKS) + draws.of(MARKS)
    return [unicodedata.normalize(form, text) for form in ("NFC", "NFD", "NFKC", "NFKD")][draws.below(4)]


_FRAGMENTS: tuple[Callable[[_Draws, Sequence[str], Sequence[str]], str], ...] = (
    _random_characters, _random_characters, _random_characters, _run, _spaces, _word, _word, _own, _piece, _piece,
    _normalized,
    lambda draws, own, pieces: draws.of(DIGITS) + draws.of(DIGITS),
    lambda draws, own, pieces: draws.of(EMOJI) + draws.of(EMOJI),
    lambda draws, own, pieces: draws.of(SYMBOLS) + draws.of(SYMBOLS),
    lambda draws, own, pieces: draws.of(CONTRACTIONS),
)  # fmt: skip


def nasty_texts(key: int, begin: int, end: int, own: Sequence[str] = (), pieces: Sequence[str] = ()) -> list[str]:
    """Texts number begin … end − 1 under a key; most have less than a hundred characters, some a few thousand.

    own: texts of added tokens. pieces: texts of tokens of the model. One text in 64 has half of a surrogate pair.
    """
    index = np.arange(begin * _DRAWS, end * _DRAWS, dtype=np.int64)
    drawn = words(np.uint64(key), NASTY_TEXT, index).reshape(-1, _DRAWS).tolist()
    return [_text(_Draws(row), own, pieces) for row in drawn]


def _text(draws: _Draws, own: Sequence[str], pieces: Sequence[str]) -> str:
    parts = []
    surrogate = draws.below(64) == 0
    for _ in range(draws.below(16)):
        parts.append(_FRAGMENTS[draws.below(len(_FRAGMENTS))](draws, own, pieces))
        if draws.spent:
            break
    if surrogate:
        parts.insert(len(parts) // 2, "\ud800" if draws.below(2) else "\udfff")
    return "".join(parts)
