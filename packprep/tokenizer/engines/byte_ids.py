"""The engine for the built-in byte vocabulary, without a library."""

import re
from collections.abc import Iterable, Sequence

import numpy as np

from packprep.dataset.boundaries import offsets_of
from packprep.format.tokenizer_json import byte_characters
from packprep.tokenizer.engines.engine import any_of
from packprep.tokenizer.file import BYTES_SPECIALS
from packprep.tokenizer.roles import Vocabulary


class BytesEngine:
    """An engine with UTF-8 bytes as ids.

    It is exact by construction, so it is not compared with a reference.
    """

    name = "bytes"
    version = "1"
    library = ()
    reference = None

    def __init__(self, vocabulary: Vocabulary, special_text: str):
        self._any_special = any_of(BYTES_SPECIALS)
        self._special = self._any_special if special_text == "special" else None
        self._ids = {
            text: np.array([256 + k], dtype=np.int32) for k, text in enumerate(BYTES_SPECIALS)
        }

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts into ids, int32[total], and offsets, int64[n + 1]."""
        if self._special is not None and any(map(self._special.search, texts)):
            documents = [self._with_specials(text, self._special) for text in texts]
            lengths = np.array([len(ids) for ids in documents], dtype=np.int64)
            return np.concatenate(documents), offsets_of(lengths)
        encoded = [text.encode() for text in texts]
        lengths = np.array([len(data) for data in encoded], dtype=np.int64)
        return _byte_ids(b"".join(encoded)), offsets_of(lengths)

    def encode_with_characters(
        self, texts: Sequence[str], chat: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Encode texts into ids, offsets and characters, as in `Engine.encode_with_characters`."""
        special = self._any_special if chat else self._special
        ids, characters = [np.zeros(0, np.int32)], [np.zeros((0, 2), np.int64)]
        lengths = []
        for text in texts:
            size = begin = 0
            # The text between special tokens is encoded byte by byte.
            for match in special.finditer(text) if special else ():
                size += _append_bytes(ids, characters, text, begin, match.start())
                size += 1
                ids.append(self._ids[match.group()])
                characters.append(np.array([match.span()], np.int64))
                begin = match.end()
            lengths.append(size + _append_bytes(ids, characters, text, begin, len(text)))
        return (
            np.concatenate(ids),
            offsets_of(np.array(lengths, np.int64)),
            np.concatenate(characters),
        )

    def tokens_of(self, ids: Iterable[int]) -> dict[int, str]:
        """Return a dict from id to token, as the tokenizer.json spells it.

        Ids without a token are left out.
        """
        tokens = [*byte_characters(), *BYTES_SPECIALS]
        return {id: tokens[id] for id in ids if 0 <= id < len(tokens)}

    def _with_specials(self, text: str, special: re.Pattern[str]) -> np.ndarray:
        parts, begin = [], 0
        for match in special.finditer(text):
            parts += [_byte_ids(text[begin : match.start()].encode()), self._ids[match.group()]]
            begin = match.end()
        return np.concatenate([*parts, _byte_ids(text[begin:].encode())])


def _byte_ids(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=np.uint8).astype(np.int32)


def _append_bytes(
    ids: list[np.ndarray], characters: list[np.ndarray], text: str, begin: int, end: int
) -> int:
    """Append the bytes of text[begin:end] to `ids`, and return their number.

    For each byte, the range [i, i + 1) of its character is appended to `characters`.
    """
    data = _byte_ids(text[begin:end].encode())
    ids.append(data)
    # All bytes of a character except its first are 10xxxxxx.
    indices = begin - 1 + np.cumsum((data & 0xC0) != 0x80)
    characters.append(np.stack((indices, indices + 1), 1))
    return len(data)
