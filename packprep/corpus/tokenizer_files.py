"""Where a tokenizer.json comes from: a file or folder, the Hugging Face Hub, or the built-in vocabulary of bytes."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packprep.corpus.tokenizer_json import BYTES_ROLES, bytes_tokenizer_json
from packprep.digests import digest_of
from packprep.errors import VocabularyError
from packprep.storage import expanded

MOST_BYTES = 1 << 29
HINT_FILES = ("tokenizer_config.json", "special_tokens_map.json")
HINT_KEYS = {
    "eos": ("eos_token", "sep_token"),
    "bos": ("bos_token", "cls_token"),
    "pad": ("pad_token",),
    "mask": ("mask_token",),
}


Beside = Sequence[Mapping[str, Any]]
"""What was taken of each of HINT_FILES that lies beside a tokenizer: {"file", "digest", "roles": role → token text}."""


def load_tokenizer_json(name: str, base: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """The bytes of the tokenizer.json that `name` means, and what the files beside it say, as `Beside`.

    name: "bytes"; a file, or a folder with a tokenizer.json, relative to base; or a name on the Hugging Face Hub.
    The roles are of eos, bos, pad, mask, as far as the files have them. Raises VocabularyError when there is nothing to
    read.
    """
    if name == "bytes":
        return bytes_tokenizer_json(), []
    path = base / expanded(name)
    if path.is_file():
        if path.suffix == ".model":
            raise VocabularyError(
                f"tokenizer = {name!r}: a sentencepiece model, and packprep reads a tokenizer.json. "
                f"Write one with transformers: AutoTokenizer.from_pretrained({str(path.parent)!r}).save_pretrained(FOLDER)"
            )
        return _read(path), _beside(lambda file: _read_if_there(path.with_name(file)))
    if path.is_dir():
        file = path / "tokenizer.json"
        if not file.is_file():
            found = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
            raise VocabularyError(
                f"tokenizer = {name!r}: the folder {path} holds no tokenizer.json (it holds {found}). "
                "Write one with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        return _read(file), _beside(lambda beside: _read_if_there(path / beside))
    if path.exists():
        raise VocabularyError(
            f"tokenizer = {name!r}: {path} is no regular file but a pipe, a device or a socket: give a tokenizer.json, or a "
            "folder with one"
        )
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
    path = base / expanded(name)
    if path.exists() or path.is_symlink():
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
        if (size := path.stat().st_size) > MOST_BYTES:
            raise VocabularyError(
                f"the tokenizer file {path} has {size} bytes, and one has at most {MOST_BYTES}: give a tokenizer.json"
            )
        return path.read_bytes()
    except OSError as error:
        raise VocabularyError(f"the tokenizer file {path} cannot be read: {error.strerror}") from error


def _read_if_there(path: Path) -> bytes | None:
    return _read(path) if path.is_file() else None


def hints_of(data: bytes, beside: Beside) -> dict[str, str]:
    """Role → token text by the files beside a tokenizer.json, of which the first wins; all roles for that of "bytes"."""
    if not beside and data == bytes_tokenizer_json():
        return dict(BYTES_ROLES)
    return {role: text for file in reversed(beside) for role, text in file["roles"].items()}


def _from_hub(name: str, path: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """What `load_tokenizer_json` gives, from the Hub or its cache. path: where a file was looked for before."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    def optional(file: str) -> bytes | None:
        try:
            return _read(Path(huggingface_hub.hf_hub_download(name, file)))
        except EntryNotFoundError:
            return None

    try:
        return _read(Path(huggingface_hub.hf_hub_download(name, "tokenizer.json"))), _beside(optional)
    except VocabularyError:
        raise
    except Exception as error:  # the Hub's client raises errors of the HTTP library below it, which changes
        first_line = (str(error).strip().splitlines() or ["no message"])[0]
        raise VocabularyError(
            f"tokenizer = {name!r}: no such file or folder ({path}), and the Hugging Face Hub gave no tokenizer.json "
            f"for that name ({type(error).__name__}: {first_line}). Check the name and the network, "
            "or download the file once and give its path"
        ) from error


def _beside(read: Callable[[str], bytes | None]) -> list[dict[str, Any]]:
    """What the files that transformers writes beside a tokenizer.json say."""
    found: list[dict[str, Any]] = []
    for file in HINT_FILES:
        data = read(file)
        if data is None:
            continue
        try:
            parsed = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise VocabularyError(
                f"the {file} beside the tokenizer is not JSON ({error}); mend it or move it away"
            ) from error
        roles: dict[str, str] = {}
        for role, keys in HINT_KEYS.items():
            for key in keys:
                value = parsed.get(key) if isinstance(parsed, dict) else None
                text = value.get("content") if isinstance(value, dict) else value
                if isinstance(text, str) and text:
                    roles.setdefault(role, text)
        found.append({"file": file, "digest": digest_of(data), "roles": roles})
    return found
