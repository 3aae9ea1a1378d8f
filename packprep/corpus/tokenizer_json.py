"""A tokenizer.json: where it comes from, what it holds, and the same with tokens added.

Three sources: a file or folder, the Hugging Face Hub, and the built-in vocabulary of bytes.
"""

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packprep.errors import VocabularyError

HINT_FILES = ("tokenizer_config.json", "special_tokens_map.json")
HINT_KEYS = {
    "eos": ("eos_token", "sep_token"),
    "bos": ("bos_token", "cls_token"),
    "pad": ("pad_token",),
    "mask": ("mask_token",),
}

BYTES_VOCAB_SIZE = 528
BYTES_ROLES = {
    "pad": "<pad>",
    "bos": "<bos>",
    "eos": "<eos>",
    "mask": "<mask>",
    "fim_prefix": "<fim_prefix>",
    "fim_middle": "<fim_middle>",
    "fim_suffix": "<fim_suffix>",
}
BYTES_SPECIALS = (
    "<pad>", "<bos>", "<eos>", "<mask>",
    "[NLU]", "[NLG]", "[S2S]",
    "<fim_prefix>", "<fim_middle>", "<fim_suffix>",
    *(f"<extra_id_{k}>" for k in range(256)),
)  # fmt: skip


@dataclass(frozen=True)
class Token:
    """One entry of a tokenizer.json's `added_tokens`."""

    id: int
    text: str
    special: bool


@dataclass(frozen=True)
class TokenTable:
    """The tokens of a tokenizer, as `tokenizers` sees them."""

    ids: dict[str, int]  # text → id, model and added
    texts: dict[int, str]  # id → text
    added: dict[str, Token]  # text → entry of added_tokens
    n_ids: int  # greatest id + 1
    notes: tuple[str, ...]  # what the file asks for and packprep does not do


def load_tokenizer_json(name: str, base: Path) -> tuple[bytes, dict[str, str]]:
    """The bytes of the tokenizer.json that `name` means, and the role texts that the files beside it give.

    name: "bytes"; a file, or a folder with a tokenizer.json, relative to base; or a name on the Hugging Face Hub.
    The hints are role → token text, of eos, bos, pad, mask as far as tokenizer_config.json and special_tokens_map.json
    have them, and all roles for "bytes". Raises VocabularyError when there is nothing to read.
    """
    if name == "bytes":
        return bytes_tokenizer_json(), dict(BYTES_ROLES)
    path = base / Path(name).expanduser()
    if path.is_file():
        return _read(path), _hints(lambda file: _read_if_there(path.with_name(file)))
    if path.is_dir():
        file = path / "tokenizer.json"
        if not file.is_file():
            found = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
            raise VocabularyError(
                f"tokenizer = {name!r}: the folder {path} holds no tokenizer.json (it holds {found}). "
                "Write one with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        return _read(file), _hints(lambda beside: _read_if_there(path / beside))
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) or name.endswith(".json"):
        raise VocabularyError(
            f"tokenizer = {name!r}: {path} does not exist. Give a tokenizer.json, a folder with one, "
            'a name on the Hugging Face Hub, or "bytes"; a path is relative to the recipe'
        )
    return _from_hub(name, path)


def read_beside(name: str, base: Path, file: str) -> bytes | None:
    """The bytes of a file that lies beside the tokenizer.json of `load_tokenizer_json`; None if there is none."""
    if name == "bytes":
        return None
    path = base / Path(name).expanduser()
    if path.exists():
        return _read_if_there(path / file if path.is_dir() else path.with_name(file))
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return _read(Path(huggingface_hub.hf_hub_download(name, file)))
    except EntryNotFoundError:
        return None
    except VocabularyError:
        raise
    except Exception as error:  # see _from_hub
        first_line = (str(error).strip().splitlines() or ["no message"])[0]
        raise VocabularyError(
            f"tokenizer = {name!r}: the Hugging Face Hub gave no {file} ({type(error).__name__}: {first_line}). "
            "Check the network, or download the tokenizer's files once and give their folder"
        ) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise VocabularyError(f"the tokenizer file {path} cannot be read: {error.strerror}") from error


def _read_if_there(path: Path) -> bytes | None:
    return _read(path) if path.is_file() else None


def _from_hub(name: str, path: Path) -> tuple[bytes, dict[str, str]]:
    """What `load_tokenizer_json` gives, from the Hub or its cache. path: where a file was looked for before."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    def optional(file: str) -> bytes | None:
        try:
            return _read(Path(huggingface_hub.hf_hub_download(name, file)))
        except EntryNotFoundError:
            return None

    try:
        return _read(Path(huggingface_hub.hf_hub_download(name, "tokenizer.json"))), _hints(optional)
    except VocabularyError:
        raise
    except Exception as error:  # the Hub's client raises errors of the HTTP library below it, which changes
        first_line = (str(error).strip().splitlines() or ["no message"])[0]
        raise VocabularyError(
            f"tokenizer = {name!r}: no such file or folder ({path}), and the Hugging Face Hub gave no tokenizer.json "
            f"for that name ({type(error).__name__}: {first_line}). Check the name and the network, "
            "or download the file once and give its path"
        ) from error


def _hints(read: Callable[[str], bytes | None]) -> dict[str, str]:
    """Role → token text from the files that transformers writes beside a tokenizer.json; the first file wins."""
    hints: dict[str, str] = {}
    for file in HINT_FILES:
        data = read(file)
        if data is None:
            continue
        try:
            parsed = json.loads(data)
        except ValueError as error:
            raise VocabularyError(
                f"the {file} beside the tokenizer is not JSON ({error}); mend it or move it away"
            ) from error
        for role, keys in HINT_KEYS.items():
            for key in keys:
                value = parsed.get(key) if isinstance(parsed, dict) else None
                text = value.get("content") if isinstance(value, dict) else value
                if isinstance(text, str) and text:
                    hints.setdefault(role, text)
    return hints


def bytes_tokenizer_json() -> bytes:
    """The built-in vocabulary: ids 0–255 are the UTF-8 bytes, 256–521 special tokens; no id reaches 528.

    id 256   257   258   259    260   261   262   263          264          265          266 … 521
       <pad> <bos> <eos> <mask> [NLU] [NLG] [S2S] <fim_prefix> <fim_middle> <fim_suffix> <extra_id_0> … <extra_id_255>
    """
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return _dump(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [_entry(256 + k, text) for k, text in enumerate(BYTES_SPECIALS)],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {character: byte for byte, character in enumerate(byte_characters())},
                "merges": [],
            },
        }
    )


def byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2, `bytes_to_unicode` in encoder.py)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, shifted = [], 0x100
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(shifted))
            shifted += 1
    return characters


def parse_tokenizer_json(data: bytes, name: str) -> dict[str, Any]:
    """The parsed tokenizer.json, with the shape that packprep touches checked. name is for messages."""
    try:
        parsed = json.loads(data)
    except ValueError as error:
        raise VocabularyError(
            f"tokenizer = {name!r}: not JSON ({error}). A tokenizer.json of the `tokenizers` library is wanted"
        ) from error
    if not isinstance(parsed, dict) or not isinstance(parsed.get("model"), dict):
        raise VocabularyError(
            f"tokenizer = {name!r}: JSON, but no tokenizer.json of the `tokenizers` library: "
            'it has no "model". Give that file, not a vocabulary or a configuration'
        )
    added = parsed.get("added_tokens") or []
    sound = isinstance(added, list) and all(
        isinstance(entry, dict) and isinstance(entry.get("content"), str) and type(entry.get("id")) is int
        for entry in added
    )
    if not sound:
        raise VocabularyError(f"tokenizer = {name!r}: an entry of added_tokens has no integer id or no content")
    parsed["added_tokens"] = added
    return parsed


def read_tokens(data: bytes, name: str) -> TokenTable:
    """The tokens of a tokenizer.json. Raises VocabularyError when `tokenizers` would use other ids than the file says.

    `tokenizers` numbers added tokens itself, upward from the size of the vocabulary, and ignores their written ids:
    with a hole in the vocabulary it encodes <|endoftext|> as 100256 where the file, and the model, say 100257.
    """
    from tokenizers import Tokenizer

    parsed = parse_tokenizer_json(data, name)
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # what the library raises for a bad file is a bare Exception
        raise VocabularyError(f"tokenizer = {name!r}: `tokenizers` cannot load it ({error})") from error
    added = {
        entry["content"]: Token(entry["id"], entry["content"], bool(entry.get("special", False)))
        for entry in parsed["added_tokens"]
    }
    wrong = [
        f"{entry['content']} is {entry['id']} in the file and {tokenizer.token_to_id(entry['content'])} in `tokenizers`"
        for entry in parsed["added_tokens"]
        if tokenizer.token_to_id(entry["content"]) != entry["id"]
    ]
    if wrong:
        raise VocabularyError(
            f"tokenizer = {name!r}: the ids of {len(wrong)} added tokens are not those that `tokenizers` uses, so text "
            f"would be encoded with other ids than the model was trained on: {_some(wrong)}. The vocabulary has a "
            "hole, or added_tokens is not in the order of its ids: fill the hole with unused tokens, or sort the list"
        )
    model_ids = tokenizer.get_vocab(with_added_tokens=False)
    by_id = {id: text for text, id in model_ids.items()}
    shared = [
        f"{token.text} and {by_id[token.id]} are both {token.id}"
        for token in added.values()
        if by_id.get(token.id, token.text) != token.text
    ]
    if shared:
        raise VocabularyError(
            f"tokenizer = {name!r}: an added token has the id of another token: {_some(shared)}. "
            "Give the added token a free id"
        )
    ids = {**model_ids, **{token.text: token.id for token in added.values()}}
    listed = parsed["model"].get("vocab")
    return TokenTable(
        ids=ids,
        texts={id: text for text, id in ids.items()},
        added=added,
        # a Unigram's vocabulary is a list, in which a piece may stand twice
        n_ids=max(max(ids.values(), default=-1) + 1, len(listed) if isinstance(listed, list) else 0),
        notes=_unused_settings(parsed),
    )


def _unused_settings(parsed: dict[str, Any]) -> tuple[str, ...]:
    notes = [f"the tokenizer's own {key} is off" for key in ("truncation", "padding") if parsed.get(key)]
    if parsed["model"].get("dropout"):
        notes.append(f"the tokenizer's dropout of {parsed['model']['dropout']} is off: equal text gives equal tokens")
    return tuple(notes)


def extended_tokenizer_json(data: bytes, first_id: int, texts: Sequence[str], name: str) -> bytes:
    """The tokenizer.json with `texts` as special added tokens, ids from first_id upward; checked to load so.

    Keys and entries keep their order, so equal input gives equal bytes with any version of any library.
    """
    parsed = parse_tokenizer_json(data, name)
    parsed["added_tokens"] += [_entry(first_id + k, text) for k, text in enumerate(texts)]
    extended = _dump(parsed)
    read_tokens(extended, name)
    return extended


@functools.lru_cache(maxsize=2)
def plain_tokenizer_json(data: bytes, special_ids: frozenset[int]) -> bytes:
    """The tokenizer.json to encode text with: special_ids flagged special, nothing that adds, cuts, pads or draws."""
    parsed = parse_tokenizer_json(data, "tokenizer.json")
    for entry in parsed["added_tokens"]:
        entry["special"] = bool(entry.get("special")) or entry["id"] in special_ids
    parsed.update(truncation=None, padding=None, post_processor=None)
    if "dropout" in parsed["model"]:
        parsed["model"]["dropout"] = None
    return _dump(parsed)


def unknown_id(data: bytes) -> int | None:
    """The id that the model gives to what it does not know, as [UNK]; None where it has none."""
    model = parse_tokenizer_json(data, "tokenizer.json")["model"]
    if isinstance(model.get("unk_id"), int):
        return model["unk_id"]
    vocabulary = model.get("vocab")
    return vocabulary.get(model.get("unk_token")) if isinstance(vocabulary, dict) else None


def _entry(id: int, text: str) -> dict[str, Any]:
    return {
        "id": id,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


def _dump(parsed: dict[str, Any]) -> bytes:
    return (json.dumps(parsed, separators=(",", ":"), ensure_ascii=False) + "\n").encode()


def _some(items: Sequence[str]) -> str:
    return "; ".join(items[:5]) + (f"; and {len(items) - 5} more" if len(items) > 5 else "")


@functools.lru_cache(maxsize=4)
def continuing_tokens(data: bytes, vocab_size: int) -> np.ndarray:
    """uint8[vocab_size]: 1 where a token begins inside a character of UTF-8, so that a text must not be cut before it.

    Only byte-level vocabularies and byte fallback have such tokens. Empty where there is none.
    """
    parsed = json.loads(data)
    model = parsed["model"]
    vocab = model["vocab"]
    pairs = vocab.items() if isinstance(vocab, dict) else ((entry[0], i) for i, entry in enumerate(vocab))
    continues = np.zeros(vocab_size, np.uint8)
    if "ByteLevel" in json.dumps([parsed.get("pre_tokenizer"), parsed.get("decoder")]):
        inside = {character for byte, character in enumerate(byte_characters()) if byte & 0xC0 == 0x80}
        which = [i for text, i in pairs if text[:1] in inside]
    else:
        inside = {f"<0x{byte:02X}>" for byte in range(0x80, 0xC0)}
        which = [i for text, i in pairs if text in inside] if model.get("byte_fallback") else []
    continues[which] = 1
    return continues if which else np.zeros(0, np.uint8)
