"""Compute the characters of byte-level BPE tokens from their bytes.

    text     n  a  ï     v  e        bytes 6e 61 c3 af 76 65
    tokens   na    Ã  ¯     ve       bytes 6e 61 │ c3 │ af │ 76 65
    begins   0     2  2     3        a token that starts inside a character begins at that character
    ends     2     3  3     5        and one that ends inside a character ends behind it

The bytes of the tokens are compared with the bytes of the text. If they differ, because of a
normalizer or a token that strips spaces, the characters cannot be computed this way.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from packprep.dataset.boundaries import offsets_of, ranks
from packprep.format.tokenizer_json import byte_characters


class ByteTokens:
    """The bytes of all tokens of a vocabulary."""

    def __init__(self, tokens: Mapping[int, str], added: Mapping[int, str]):
        """Create the table.

        Args:
            tokens: id → token as written in the model's vocabulary.
            added: id → text of the added tokens.
        """
        byte_of = {character: byte for byte, character in enumerate(byte_characters())}
        texts: dict[int, bytes] = {}
        for id, token in tokens.items():
            if all(character in byte_of for character in token):
                texts[id] = bytes(byte_of[character] for character in token)
        texts |= {id: text.encode() for id, text in added.items()}
        size = max([*tokens, *added], default=-1) + 1
        lengths = np.zeros(size + 1, np.int64)  # Ids beyond the vocabulary have length 0.
        lengths[list(texts)] = [len(text) for text in texts.values()]
        self._lengths, self._offsets = lengths, offsets_of(lengths)
        self._bytes = np.frombuffer(b"".join(texts[id] for id in sorted(texts)), np.uint8)

    def characters(
        self, texts: Sequence[str], ids: np.ndarray, offsets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the characters of texts' tokens.

        Args:
            texts: n texts without lone surrogates.
            ids: int32[total], the ids of all texts.
            offsets: int64[n + 1], the start of each text in `ids`.

        Returns:
            The characters [begin, end) of each token in its text, int64[total, 2]. Also the texts
            with bytes that differ from their tokens' bytes, int64[k]. The characters of these texts
            are not set.
        """
        ids = np.minimum(ids.astype(np.int64), len(self._lengths) - 1)
        encoded = [text.encode() for text in texts]
        sizes = np.array([len(data) for data in encoded], np.int64)
        lengths = self._lengths[ids]
        sums = offsets_of(lengths)
        is_told = sums[offsets[1:]] - sums[offsets[:-1]] == sizes
        is_told &= np.add.reduceat(np.append(lengths == 0, False), offsets)[:-1] == 0
        is_told |= np.diff(offsets) + sizes == 0
        told = np.repeat(is_told, np.diff(offsets))
        of_told, told_lengths = ids[told], lengths[told]
        text_bytes = np.frombuffer(
            b"".join(data for data, is_one in zip(encoded, is_told, strict=True) if is_one),
            np.uint8,
        )
        places = np.repeat(self._offsets[of_told], told_lengths) + ranks(told_lengths)
        differs = np.flatnonzero(self._bytes[places] != text_bytes)
        begin = offsets_of(told_lengths)
        starts_character = (text_bytes & 0xC0) != 0x80
        before = offsets_of(starts_character)  # characters that start before each byte
        document = np.repeat(np.flatnonzero(is_told), np.diff(offsets)[is_told])
        first_character = np.zeros(len(texts), np.int64)
        first_byte = offsets_of(sizes[is_told])[:-1]
        first_character[is_told] = before[first_byte]
        characters = np.zeros((len(ids), 2), np.int64)
        inside = ~starts_character[begin[:-1]] if len(of_told) else np.zeros(0, np.bool_)
        characters[told, 0] = before[begin[:-1]] - inside - first_character[document]
        characters[told, 1] = before[begin[1:]] - first_character[document]
        if len(differs):
            owner = np.searchsorted(first_byte, differs, "right") - 1
            is_told[np.flatnonzero(is_told)[np.unique(owner)]] = False
        return characters, np.flatnonzero(~is_told)
