"""Find the tokens of a tokenizer.json that begin inside a UTF-8 character.

With `text_safe`, fill-in-the-middle does not cut before such a token. This module needs only numpy.
"""

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np


def byte_characters() -> list[str]:
    """Return, for each byte, the character that stands for it in a byte-level vocabulary.

    The mapping is GPT-2's, `bytes_to_unicode` in encoder.py.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, shifted = [], 0x100
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(shifted))
            shifted += 1
    return characters


def continuing(parsed: Mapping[str, Any], vocab_size: int) -> np.ndarray:
    """Return 1 for each token that begins inside a character, otherwise 0, as uint8[vocab_size].

    Only byte-level vocabularies and byte fallback have such tokens. `parsed` is the content of a
    tokenizer.json.
    """
    model = parsed["model"]
    vocab = model["vocab"]
    pairs = (
        vocab.items()
        if isinstance(vocab, dict)
        else ((entry[0], i) for i, entry in enumerate(vocab))
    )
    # In UTF-8, a byte 10xxxxxx never starts a character.
    if "ByteLevel" in json.dumps([parsed.get("pre_tokenizer"), parsed.get("decoder")]):
        inside = {
            character for byte, character in enumerate(byte_characters()) if byte & 0xC0 == 0x80
        }
        token_ids = [i for text, i in pairs if text[:1] in inside]
    else:
        # With byte fallback, each byte 0x80 … 0xBF has its own token.
        inside = {f"<0x{byte:02X}>" for byte in range(0x80, 0xC0)}
        token_ids = [i for text, i in pairs if text in inside] if model.get("byte_fallback") else []
    continues = np.zeros(vocab_size, np.uint8)
    continues[token_ids] = 1
    return continues


def text_of(flags: np.ndarray) -> str:
    """Return flags as a manifest stores them: one bit per flag, in base64.

    The first flag is the least significant bit of the first byte.
    """
    return base64.b64encode(np.packbits(flags, bitorder="little").tobytes()).decode()


def flags_of(text: str, size: int) -> np.ndarray:
    """Return the flags that `text_of` encoded, uint8[size].

    Raises:
        ValueError: If the text is not base64 of `size` flags.
    """
    packed = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
    if len(packed) != -(-size // 8):
        raise ValueError(f"it has {len(packed)} bytes, but {size} ids need {-(-size // 8)}")
    return np.unpackbits(packed, count=size, bitorder="little")
