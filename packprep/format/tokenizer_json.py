"""Which tokens of a tokenizer.json begin inside a character of UTF-8: a text is not cut before
them. numpy alone is needed."""

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np


def byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2, `bytes_to_unicode`
    in encoder.py)."""
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
    """uint8[vocab_size]: 1 where a token begins inside a character; only byte-level vocabularies
    and byte fallback have such tokens. parsed: the tokenizer.json."""
    model = parsed["model"]
    vocab = model["vocab"]
    pairs = (
        vocab.items()
        if isinstance(vocab, dict)
        else ((entry[0], i) for i, entry in enumerate(vocab))
    )
    if "ByteLevel" in json.dumps([parsed.get("pre_tokenizer"), parsed.get("decoder")]):
        inside = {
            character for byte, character in enumerate(byte_characters()) if byte & 0xC0 == 0x80
        }
        which = [i for text, i in pairs if text[:1] in inside]
    else:
        inside = {f"<0x{byte:02X}>" for byte in range(0x80, 0xC0)}
        which = [i for text, i in pairs if text in inside] if model.get("byte_fallback") else []
    continues = np.zeros(vocab_size, np.uint8)
    continues[which] = 1
    return continues


def text_of(flags: np.ndarray) -> str:
    """Flags as a manifest holds them: a bit each, least bit first, in base64."""
    return base64.b64encode(np.packbits(flags, bitorder="little").tobytes()).decode()


def flags_of(text: str, size: int) -> np.ndarray:
    """uint8[size]: the inverse of `text_of`; ValueError where the text is not that of so many
    flags."""
    packed = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
    if len(packed) != -(-size // 8):
        raise ValueError(f"it has {len(packed)} bytes, and {size} ids take {-(-size // 8)}")
    return np.unpackbits(packed, count=size, bitorder="little")
