"""Check a tokenizer.json's components, to decide which fast engines may be tried on it.

Each `not_…` function returns None if the tokenizer has the shape in the function's name. Otherwise
it returns the reason, in words that can follow "because".
"""

import math
from collections.abc import Mapping
from typing import Any

from packprep.format.tokenizer_json import byte_characters
from packprep.tokenizer.engines.reference import MOST_GROWTH, most_of_one
from packprep.tokenizer.file import steps_of

SPACE = "▁"
_TO_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_AFTER_SPACES = {
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}


def not_byte_level_bpe(parsed: Mapping[str, Any]) -> str | None:
    """Return the reason why a tokenizer is not byte-level BPE, or None if it is.

    Byte-level BPE here has NFC or no normalizer, splits the text with patterns, and merges bytes.
    GPT-2, GPT-4, Llama 3, Qwen, DeepSeek and most later tokenizers have this shape.
    """
    model = parsed["model"]
    if why := _not_bpe(parsed, ("unk_token", "byte_fallback")):
        return why
    for step in _types(parsed.get("normalizer"), "normalizers"):
        if step != "NFC":
            return f"its normalizer is {step}, not NFC"
    *splits, last_type = _types(parsed.get("pre_tokenizer"), "pretokenizers") or ["None"]
    if last_type != "ByteLevel" or not {*splits} <= {"Split", "Digits"}:
        return (
            f"its pre-tokenizer is {' → '.join([*splits, last_type])}, not ByteLevel after Split or"
            " Digits"
        )
    missing = [
        character for character in byte_characters() if character not in model.get("vocab", {})
    ]
    return f"its vocabulary lacks {len(missing)} of the 256 bytes" if missing else None


def not_sentencepiece_bpe(parsed: Mapping[str, Any], metaspace: bool = True) -> str | None:
    """Return the reason why a tokenizer is not SentencePiece BPE, or None if it is.

    SentencePiece BPE has byte_fallback and replaces spaces by ▁. Llama 2, Gemma, Mistral up to
    v0.3, Phi-3 and Yi have this shape. `metaspace` says whether the pre-tokenizer Metaspace may
    replace the spaces. Metaspace's option `split` is not checked here. If an engine
    handles it in another way, the comparison with the reference finds the difference.
    """
    model = parsed["model"]
    if not model.get("byte_fallback") and model.get("type") == "BPE":
        return "its model has no byte_fallback"
    if why := _not_bpe(parsed, ("ignore_merges",)):
        return why
    for step in steps_of(parsed.get("normalizer"), "normalizers"):
        if step != _TO_SPACES and step != {"type": "Prepend", "prepend": SPACE}:
            return f"its normalizer is {_type(step)}, and not the one that makes {SPACE} of spaces"
    splits = [*steps_of(parsed.get("pre_tokenizer"), "pretokenizers")]
    if len(splits) > 1 or any(
        step != _AFTER_SPACES and _type(step) != "Metaspace" for step in splits
    ):
        return (
            f"its pre-tokenizer is {' → '.join(map(_type, splits))}, not Metaspace or a split after"
            " spaces"
        )
    vocabulary = model.get("vocab", {})
    # Characters that are in the vocabulary are never split into bytes.
    single_bytes = {byte for byte in range(128) if chr(byte) in vocabulary}
    missing = [
        byte
        for byte in range(256)
        if byte not in single_bytes and f"<0x{byte:02X}>" not in vocabulary
    ]
    if missing:
        return f"its vocabulary lacks {len(missing)} of the 256 bytes"
    split = all(step == _AFTER_SPACES for step in splits)
    return (
        None if metaspace or split else "its pre-tokenizer is Metaspace, not a split after spaces"
    )


def not_of_own_characters(parsed: Mapping[str, Any]) -> str | None:
    """Return the reason why a tokenizer does not have each character of its tokens as a token.

    Return None if it has all of them. Added tokens that are not special are ignored.
    """
    vocabulary = parsed["model"].get("vocab", {})
    tokens = vocabulary.keys() - {
        entry["content"] for entry in parsed["added_tokens"] if not entry.get("special")
    }
    lacking = set("".join(tokens)) - vocabulary.keys()
    odd = (
        min((token for token in tokens if not lacking.isdisjoint(token)), default=None)
        if lacking
        else None
    )
    return f"its vocabulary has {odd!a}, but not all of its characters" if odd else None


def _not_bpe(parsed: Mapping[str, Any], without: tuple[str, ...]) -> str | None:
    model = parsed["model"]
    if model.get("type") != "BPE":
        return f"its model is {model.get('type') or 'of an unnamed type'}, not BPE"
    for key in (*without, "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            return f"its model has {key} = {model[key]!r}"
    grown = math.prod(map(most_of_one, steps_of(parsed.get("decoder"), "decoders")))
    # Decoded tokens are test texts for the comparison with the reference, so their size is limited.
    if grown > MOST_GROWTH:
        return f"its decoder may make {grown} characters of one"
    return None


def _types(step: Any, key: str) -> list[str]:
    """Return the types of a normalizer's or pre-tokenizer's steps."""
    return [*map(_type, steps_of(step, key))]


def _type(step: Any) -> str:
    return str(step.get("type")) if isinstance(step, dict) else str(step)
