"""Compute the characters of BPE tokens from their bytes.

    text     n  a  ï     v  e        bytes 6e 61 c3 af 76 65
    tokens   na    Ã  ¯     ve       bytes 6e 61 │ c3 │ af │ 76 65
    begins   0     2  2     3        a token that starts inside a character begins at that character
    ends     2     3  3     5        a token that ends inside a character ends after that character

Tokens of SentencePiece BPE have ▁ for a space, and `<0xC3>` for a byte. A space that the tokenizer
adds has no byte in the text. It counts as part of the character after it:

    text     é     🙂
    tokens   ▁  é  <0xF0> <0x9F> <0x99> <0x82>
    begins   0  0  1      1      1      1
    ends     1  1  2      2      2      2

An added token with `lstrip` or `rstrip` also stands for the spaces that it strips.

The bytes of the tokens are compared with the bytes of the text. If they differ, for example because
of a normalizer, the characters cannot be computed this way.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from packprep.dataset.boundaries import offsets_of
from packprep.forking import lazy
from packprep.format.tokenizer_json import byte_characters
from packprep.tokenizer.engines.engine import Engine, any_of
from packprep.tokenizer.engines.reference import ReferenceEngine
from packprep.tokenizer.engines.shapes import SPACE
from packprep.tokenizer.file import added_tokens, parse_tokenizer_json, steps_of
from packprep.tokenizer.roles import Vocabulary

Encoded = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Ids, offsets and characters as in `Engine.encode_with_characters`."""

NOWHERE, AT_TEXT_START, AT_SECTION_STARTS = "nowhere", "at text start", "at section starts"
"""The three possible answers to where a tokenizer adds a space.

A section is a part of the text without added tokens. AT_TEXT_START adds no space before another
space or before an added token.
"""
_BYTE = re.compile("<0x[0-9A-F]{2}>")
# The characters that the library's `lstrip` and `rstrip` strip. `str.isspace` has four more.
_SPACES = frozenset(
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)


def byte_tokens_of(tokenizer_json: bytes, tokens: Mapping[int, str]) -> "ByteTokens | None":
    """Return a table with the bytes of a tokenizer's tokens.

    Return None if the tokenizer adds spaces in a way that `ByteTokens` does not support.

    Args:
        tokenizer_json: The tokenizer.json of a byte-level BPE or a SentencePiece BPE. That is,
            `not_byte_level_bpe` or `not_sentencepiece_bpe` returns None for it.
        tokens: id → token as written in the model's vocabulary.
    """
    parsed = parse_tokenizer_json(tokenizer_json, "tokenizer.json")
    added = {id: text for text, id in added_tokens(tokenizer_json)}
    if not parsed["model"].get("byte_fallback"):
        byte_of = {character: byte for byte, character in enumerate(byte_characters())}
        texts = {
            id: bytes(byte_of[character] for character in token)
            for id, token in tokens.items()
            if all(character in byte_of for character in token)
        }
        texts |= {id: text.encode() for id, text in added.items()}
        _drop_overlapping(texts, parsed)
        return ByteTokens(texts, added, stripping=_stripping(parsed))
    added_space = _added_space(parsed)
    if added_space is None:
        return None
    texts = {
        id: (
            bytes.fromhex(token[3:5])
            if _BYTE.fullmatch(token)
            else token.replace(SPACE, " ").encode()
        )
        for id, token in tokens.items()
    }
    for id, text in added.items():
        if SPACE not in text:
            texts[id] = text.encode()
        # This added token has ▁ in its text, as in Gemma, and the model may also make it from
        # spaces. Then it may start with an added space, which a real added token never does. The
        # id does not tell these two cases apart, so a text with this token goes to the reference.
        elif added_space != NOWHERE:
            texts.pop(id, None)
    _drop_overlapping(texts, parsed)
    return ByteTokens(texts, added, added_space, _stripping(parsed))


def _drop_overlapping(texts: dict[int, bytes], parsed: Mapping[str, Any]) -> None:
    """Remove from `texts` the added tokens that start or end with a space.

    Do this only if some added token strips spaces. A space next to such a token could be stripped,
    or it could belong to the neighbouring token. The reference encodes the texts that contain a
    removed token.
    """
    added = parsed["added_tokens"]
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        for token in added:
            if token["content"].strip("".join(_SPACES)) != token["content"]:
                texts.pop(token["id"], None)


class _Stripping(NamedTuple):
    """The added tokens of a tokenizer. At least one of these tokens strips spaces.

    Attributes:
        pattern: A pattern that matches the text of any added token.
        ids: text → id of the tokens that strip spaces.
        left: The texts of the tokens that strip the spaces before them (`lstrip`).
        right: The texts of the tokens that strip the spaces after them (`rstrip`).
    """

    pattern: re.Pattern[str]
    ids: Mapping[str, int]
    left: Collection[str]
    right: Collection[str]

    def ranges(self, text: str) -> list[tuple[int, int, int, int]]:
        """Return (begin, token begin, token end, end) for each occurrence of a token in `ids`.

        All four numbers are indices into `text`. The token strips the spaces from begin to token
        begin and from token end to end. For example, a <mask> that strips the space before it
        gives (1, 2, 8, 8) in "a <mask> b".
        """
        ranges, last_end = [], 0
        for match in self.pattern.finditer(text):
            begin, end = match.span()
            if match.group() in self.left:
                # Spaces that belong to the token before this one do not count again.
                while begin > last_end and text[begin - 1] in _SPACES:
                    begin -= 1
            if match.group() in self.right:
                while end < len(text) and text[end] in _SPACES:
                    end += 1
            if match.group() in self.ids:
                ranges.append((begin, *match.span(), end))
            last_end = end
        return ranges


def _stripping(parsed: Mapping[str, Any]) -> _Stripping | None:
    """Return a tokenizer's added tokens as `_Stripping`, or None if none of them strips spaces.

    Return None also if the tokenizer searches the normalized text for some added token
    ("normalized": true). In normalized text, a space that remains may look like a stripped space.
    """
    added = parsed["added_tokens"]
    if any(token.get("normalized") for token in added):
        return None
    left, right = (
        {token["content"] for token in added if token.get(key)} for key in ("lstrip", "rstrip")
    )
    ids = {token["content"]: token["id"] for token in added if token["content"] in left | right}
    pattern = any_of(token["content"] for token in added)
    return _Stripping(pattern, ids, left, right) if ids else None


def _added_space(parsed: Mapping[str, Any]) -> str | None:
    """Return where a SentencePiece BPE tokenizer adds a space.

    The result is NOWHERE, AT_TEXT_START or AT_SECTION_STARTS. It is None if the tokenizer adds
    spaces at other positions, which is not supported.
    """
    normalizers = steps_of(parsed.get("normalizer"), "normalizers")
    if any(step.get("type") == "Prepend" for step in normalizers):
        return AT_SECTION_STARTS
    for step in steps_of(parsed.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") == "Metaspace":
            scheme = step.get("prepend_scheme") if step.get("replacement") == SPACE else None
            return {"never": NOWHERE, "first": AT_TEXT_START}.get(str(scheme))
    return NOWHERE


class CharactersFromBytes:
    """A base class for engines with a library that does not report the characters of tokens.

    A subclass sets `_vocabulary`, `_special_text` and `reference`, and defines the methods
    `own_characters` and `can_tell_characters`.
    """

    _vocabulary: Vocabulary
    _special_text: str
    reference: ReferenceEngine

    def encode_with_characters(
        self, texts: Sequence[str], chat: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Encode texts into ids, offsets and characters, as in `Engine.encode_with_characters`."""
        if not self._tells_characters:
            return self.reference.encode_with_characters(texts, chat)
        return self.own_characters(texts, chat)

    @lazy
    def _tells_characters(self) -> bool:
        """Return whether `own_characters` and the reference agree on the generated test texts."""
        from packprep.tokenizer.proof import characters_are_proven

        return characters_are_proven(self, self._special_text, self._vocabulary)

    @lazy
    def _byte_tokens(self) -> "ByteTokens | None":
        """Return the result of `byte_tokens_of` for the vocabulary."""
        return byte_tokens_of(self._vocabulary.tokenizer_json, self.reference.vocabulary())

    def own_characters(self, texts: Sequence[str], chat: bool) -> Encoded:
        """Return ids, offsets and characters, computed from the bytes of tokens."""
        raise NotImplementedError


class ByteTokens:
    """A table with the bytes of all tokens of a vocabulary."""

    def __init__(
        self,
        texts: Mapping[int, bytes],
        added: Collection[int],
        added_space: str = NOWHERE,
        stripping: _Stripping | None = None,
    ):
        """Create the table.

        Args:
            texts: id → bytes of the token. A token that is missing here gets bytes that no text
                contains, so that the reference encodes the texts with this token.
            added: The ids of added tokens.
            added_space: NOWHERE, AT_TEXT_START or AT_SECTION_STARTS.
            stripping: The result of `_stripping`.
        """
        size = max([*texts, *added], default=-1) + 1
        # The last entry is for ids beyond the vocabulary. No text in UTF-8 has a byte 0xFF.
        self._texts = np.full(size + 1, b"\xff\xff", np.object_)
        # For each token: how many characters start in it, and whether it starts inside a character.
        self._starts = np.zeros(size + 1, np.int64)
        self._is_inside = np.zeros(size + 1, np.bool_)
        if ids := [id for id, text in texts.items() if text]:
            self._texts[ids] = [texts[id] for id in ids]
            data = np.frombuffer(b"".join(texts[id] for id in ids), np.uint8)
            first_byte = offsets_of(np.array([len(texts[id]) for id in ids], np.int64))[:-1]
            # In UTF-8, all bytes of a character except its first are 10xxxxxx.
            starts_character = (data & 0xC0) != 0x80
            self._starts[ids] = np.add.reduceat(starts_character, first_byte, dtype=np.int64)
            self._is_inside[ids] = ~starts_character[first_byte]
        self._is_added = np.zeros(size + 1, np.bool_)
        self._is_added[list(added)] = True
        self._added_space, self._stripping = added_space, stripping
        self._strips = np.zeros(size + 1, np.bool_)
        if stripping:
            self._strips[[*stripping.ids.values()]] = True

    def encode_with_characters(
        self,
        texts: Sequence[str],
        encoded: tuple[np.ndarray, np.ndarray],
        by_reference: Sequence[int],
        reference: Engine,
        chat: bool,
    ) -> Encoded:
        """Return the ids, offsets and characters of texts that an engine has already encoded.

        If the bytes of a text differ from the bytes of its tokens, the reference encodes the text
        again.

        Args:
            texts: n texts without lone surrogates.
            encoded: The engine's ids and offsets of all texts.
            by_reference: Indices of texts that the reference must encode even if the bytes agree.
            reference: The reference.
            chat: As in `Engine.encode_with_characters`.
        """
        characters, untold = self.characters(texts, *encoded)
        slow_texts = np.union1d(untold, np.array(by_reference, np.int64))
        if not len(slow_texts):
            return *encoded, characters
        slow = reference.encode_with_characters([texts[i] for i in slow_texts], chat)
        return _merged((*encoded, characters), slow, slow_texts)

    def characters(
        self, texts: Sequence[str], ids: np.ndarray, offsets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Compute the characters of the texts' tokens from the bytes of these tokens.

        Args:
            texts: n texts without lone surrogates.
            ids: int32[total], the ids of all texts.
            offsets: int64[n + 1], the start of each text in `ids`.

        Returns:
            Two arrays. Row k of the first, int64[total, 2], is a range (begin, end): token k
            represents the characters begin … end − 1 of its text. The second, int64[m], has the
            indices of the texts with bytes that differ from the bytes of their tokens. The ranges
            of these texts are wrong.
        """
        ids = np.minimum(ids.astype(np.int64), len(self._texts) - 1)
        after_space = self._after_added_space(texts, ids, offsets)
        data = self._texts[ids].tolist()
        # An added space is in the token's bytes, but not in the text.
        for token in np.flatnonzero(after_space).tolist():
            data[token] = data[token][1:]
        # Count the characters before each token, from the start of its text.
        starts = self._starts[ids] - after_space
        starts_before = offsets_of(starts)
        begins = starts_before[:-1] - np.repeat(starts_before[offsets[:-1]], np.diff(offsets))
        ends = begins + starts
        begins -= self._is_inside[ids]
        # A token that is only an added space counts as the character after it.
        characters = np.stack((begins, np.maximum(ends, begins + 1)), 1)
        # The ranges are right only if the tokens have exactly the bytes of the text.
        bounds, untold = offsets.tolist(), []
        for i, text in enumerate(texts):
            token_slice = slice(bounds[i], bounds[i + 1])
            tokens = b"".join(data[token_slice])
            if tokens != text.encode() and not (
                self._stripping
                and self._move_stripped(
                    text, tokens, self._strips[ids[token_slice]], characters[token_slice]
                )
            ):
                untold.append(i)
        return characters, np.array(untold, np.int64)

    def _move_stripped(
        self, text: str, tokens: bytes, strips: np.ndarray, characters: np.ndarray
    ) -> bool:
        """Add the stripped spaces of a text to the characters of its tokens.

        Return whether this is possible. If the text without the stripped spaces differs from the
        bytes of its tokens, return False and leave `characters` unchanged.

        Args:
            text: The text.
            tokens: The bytes of its tokens.
            strips: bool[n], whether a token strips spaces.
            characters: int64[n, 2], the characters of each token in the text without stripped
                spaces. The array is overwritten with the characters in `text`.
        """
        assert self._stripping is not None
        # Leave the stripped spaces out of the text. kept[k] is the index of its k-th remaining
        # character.
        ranges = self._stripping.ranges(text)
        bounds = [0, *chain.from_iterable(ranges), len(text)]
        parts = [*zip(bounds[::2], bounds[1::2], strict=True)]
        kept_indices = np.concatenate([np.arange(begin, end) for begin, end in parts])
        if (
            "".join(text[begin:end] for begin, end in parts).encode() != tokens
            or strips.sum() != len(ranges)
            or characters[:, 1].max(initial=0) > len(kept_indices)
        ):
            return False
        # Convert the ranges to indices of the whole text. A stripping token also gets its spaces.
        characters[:, 0] = kept_indices[characters[:, 0]]
        characters[:, 1] = kept_indices[characters[:, 1] - 1] + 1
        characters[strips] = [(begin, end) for begin, _, _, end in ranges] or np.zeros((0, 2))
        return True

    def _after_added_space(
        self, texts: Sequence[str], ids: np.ndarray, offsets: np.ndarray
    ) -> np.ndarray:
        """Return whether each token starts with a space that the tokenizer added, bool[total].

        A True may be wrong, because an added token may also match the space next to it. A False is
        always right. For a text with the same bytes as its tokens, every value is right.
        """
        is_first = np.zeros(len(ids) + 1, np.bool_)
        if self._added_space == AT_TEXT_START:
            alone = np.array([text[:1] not in ("", " ") for text in texts], np.bool_)
            is_first[offsets[:-1][alone]] = True
        elif self._added_space == AT_SECTION_STARTS:
            is_first[offsets[:-1]] = True
            is_first[1:] |= self._is_added[ids]
        return is_first[:-1] & ~self._is_added[ids]


def _merged(fast: Encoded, slow: Encoded, slow_texts: np.ndarray) -> Encoded:
    """Return `fast`, but with the results in `slow` for the texts with the indices `slow_texts`.

    `fast` has the results of all texts. `slow` has only the results of the texts in `slow_texts`,
    in the same order.
    """
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    numbers = {int(i): k for k, i in enumerate(slow_texts)}
    for i in range(len(fast[1]) - 1):
        ids, offsets, characters = slow if i in numbers else fast
        k = numbers.get(i, i)
        token_slice = slice(int(offsets[k]), int(offsets[k + 1]))
        parts.append((ids[token_slice], characters[token_slice]))
    lengths = np.array([len(ids) for ids, _ in parts], np.int64)
    ids, characters = (np.concatenate(column) for column in zip(*parts, strict=True))
    return ids, offsets_of(lengths), characters
