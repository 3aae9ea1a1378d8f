"""Find, read, check and extend a tokenizer.json, and build the one for the byte vocabulary.

A recipe's `tokenizer` is the path of a tokenizer.json or of its folder, a name on the Hugging Face
Hub, or "bytes" for the built-in byte vocabulary.
"""

import contextlib
import functools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from packprep.cache import remembered
from packprep.errors import VocabularyError
from packprep.format import LFS_POINTER
from packprep.format.digests import digest_of
from packprep.format.tokenizer_json import byte_characters, continuing
from packprep.messages import say
from packprep.storage import expanded

MOST_BYTES = 1 << 29
HINT_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_ADDING_FILES = ("tokenizer_config.json", "added_tokens.json")
HINT_KEYS = {
    "eos": ("eos_token", "sep_token"),
    "bos": ("bos_token", "cls_token"),
    "pad": ("pad_token",),
    "mask": ("mask_token",),
}


_CONVERSION = (
    "pip install transformers sentencepiece protobuf. Name the model as its class expects,"
    " tokenizer.model, or spiece.model for T5 and ALBERT. Set its class in"
    ' {0}/tokenizer_config.json, as {{"tokenizer_class": "LlamaTokenizer"}}. Then run'
    " AutoTokenizer.from_pretrained({0!r}).save_pretrained(FOLDER) in Python. With another class"
    " or name, the ids are wrong. Transformers' ids may differ from sentencepiece's, so compare"
    " them on your text"
)

_TEKKEN = (
    "tekken.json is Mistral's own format\n"
    "hint: convert it to a tokenizer.json with transformers 5.23 or later:"
    " AutoTokenizer.from_pretrained({0!r}).save_pretrained(FOLDER) in Python, and give FOLDER"
)

Beside = Sequence[Mapping[str, Any]]
"""One entry per file of HINT_FILES that is next to a tokenizer.json: {"file", "digest", "roles"}.

"file" is the file's name and "digest" the digest of its content. "roles" maps eos, bos, pad and
mask to the text of the token that the file declares. The text is None if the file declares null.
"""


def load_tokenizer_json(name: str, base: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """Return the bytes of a tokenizer.json, and the declarations of the files next to it.

    Args:
        name: "bytes", a file or a folder with a tokenizer.json relative to `base`, or a name on the
            Hugging Face Hub.
        base: The folder that a relative path starts from.

    Returns:
        The bytes, and a `Beside` list with one entry per file of HINT_FILES that exists. An entry
        names the tokens for eos, bos, pad and mask that the file declares.

    Raises:
        VocabularyError: If no usable tokenizer.json is found, or if it lacks added tokens that the
            files next to it declare.
    """
    if name == "bytes":
        return bytes_tokenizer_json(), []
    # A file or folder takes precedence over a name on the Hub.
    path = base / expanded(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    beside_it = functools.partial(read_beside, name, base)
    if file.is_file():
        if file.suffix == ".model":
            raise VocabularyError(
                f"tokenizer = {name!r}: a sentencepiece model, but packprep reads a"
                " tokenizer.json\n"
                "hint: use the tokenizer.json that was published with the model, or convert the"
                f" model: {_CONVERSION.format(str(path.parent))}"
            )
        if file.name == "tekken.json":
            raise VocabularyError(f"tokenizer = {name!r}: {_TEKKEN.format(str(path.parent))}")
        say(f"reading tokenizer {file}", once=True)
        data = _read(file)
        _refuse_unlisted(data, name, str(path if path.is_dir() else path.parent), beside_it)
        return data, _beside(beside_it)
    if path.is_dir():
        if (path / "tekken.json").is_file():
            raise VocabularyError(
                f"tokenizer = {name!r}: the folder {path} has no tokenizer.json, and"
                f" {_TEKKEN.format(str(path))}"
            )
        file_names = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
        raise VocabularyError(
            f"tokenizer = {name!r}: the folder {path} has no tokenizer.json (it has {file_names})\n"
            "hint: use the one that was published with the model, or convert the model:"
            f" {_CONVERSION.format(str(path))}"
        )
    if path.exists():
        raise VocabularyError(
            f"tokenizer = {name!r}: {path} is not a regular file but a pipe, a device or a"
            " socket\n"
            "hint: give a tokenizer.json, or a folder with one"
        )
    # Ask the Hub only for names of its form, so that a wrong path gives a clear error.
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) or name.endswith(".json"):
        raise VocabularyError(
            f"tokenizer = {name!r}: {path} does not exist\n"
            "hint: give a tokenizer.json, a folder with one, a name on the Hugging Face Hub, or"
            ' "bytes"; a path is relative to the recipe'
        )
    return _from_hub(name, path)


def read_beside(name: str, base: Path, file: str) -> bytes | None:
    """Return the bytes of the file `file` next to a tokenizer.json, or None if it does not exist.

    `name` and `base` identify the tokenizer.json, as in `load_tokenizer_json`.

    Raises:
        VocabularyError: If the file cannot be read or fetched.
    """
    if name == "bytes":
        return None
    path = base / expanded(name)
    if path.exists() or path.is_symlink():
        beside = (path if path.is_dir() else path.parent) / file
        return _read(beside) if beside.is_file() else None
    return _fetched(name, file)


def _fetched(name: str, file: str) -> bytes | None:
    """Return the bytes of a file on the Hugging Face Hub, or None if it does not exist.

    `name` is the name of the repository. A file in the Hub's local cache is not fetched again. If
    the Hub cannot be reached, and the cache does not know whether the file exists, print a warning
    and return None.

    Raises:
        VocabularyError: If the file cannot be fetched or read.
    """
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return _read(Path(huggingface_hub.hf_hub_download(name, file)))
    except LocalEntryNotFoundError:
        cached = huggingface_hub.try_to_load_from_cache(name, file)
        if cached is not huggingface_hub._CACHED_NO_EXIST:
            say(
                f"warning: tokenizer {name!r}: the Hugging Face Hub cannot be reached, and its"
                f" cache does not have {file}. If this file exists, its settings are not used."
                " Download the tokenizer's files once, and give their folder",
                once=True,
            )
        return None
    except EntryNotFoundError:
        return None
    except VocabularyError:
        raise
    except Exception as error:  # `_from_hub` explains why this is a broad `except`.
        raise VocabularyError(
            f"tokenizer = {name!r}: the Hugging Face Hub gave no {file} ({_reason(error)})\n"
            "hint: check the network, or download the tokenizer's files once and give their"
            " folder"
        ) from error


def _reason(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"


def _read(path: Path) -> bytes:
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise VocabularyError(
                f"the tokenizer file {path} has {size} bytes, but at most {MOST_BYTES} are"
                " allowed\n"
                "hint: give a tokenizer.json"
            )
        return path.read_bytes()
    except OSError as error:
        raise VocabularyError(
            f"the tokenizer file {path} cannot be read: {error.strerror}"
        ) from error


def _from_hub(name: str, path: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """Return the result of `load_tokenizer_json` for a name on the Hugging Face Hub.

    If there is no tokenizer.json, the error message names `path`, where no local file or folder
    was found.
    """
    say(f"fetching tokenizer {name} from the Hugging Face Hub, unless it is cached", once=True)
    import huggingface_hub

    try:
        data = _read(Path(huggingface_hub.hf_hub_download(name, "tokenizer.json")))
    except VocabularyError:
        raise
    except (
        Exception
    ) as error:  # The Hub's client raises the errors of its HTTP library, which vary.
        raise VocabularyError(
            f"tokenizer = {name!r}: no such file or folder ({path}), and the Hugging Face Hub"
            f" gave no tokenizer.json for that name ({_reason(error)})\n"
            "hint: check the name and the network, or download the file once and give its path"
        ) from error
    beside_it = functools.partial(_fetched, name)
    _refuse_unlisted(data, name, name, beside_it)
    return data, _beside(beside_it)


def hints_in(name: str, data: bytes) -> Mapping[str, Any]:
    """Parse a file that Transformers writes next to a tokenizer.json, and return its JSON object.

    `name` is the file's name and `data` its content. A file with other JSON, such as a list, gives
    an empty mapping.

    Raises:
        VocabularyError: If the file is not JSON.
    """
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise VocabularyError(
            f"the {name} next to the tokenizer is not JSON ({error})\n"
            "hint: correct it or move it away"
        ) from None
    return parsed if isinstance(parsed, dict) else {}


def _refuse_unlisted(
    data: bytes, name: str, place: str, read: Callable[[str], bytes | None]
) -> None:
    """Check that tokenizer.json lists all tokens that Transformers adds on load.

    Args:
        data: The bytes of the tokenizer.json.
        name: The tokenizer's name, for messages.
        place: The folder or Hub name of the tokenizer. The hint of the error passes it to
            Transformers.
        read: Takes the name of a file next to the tokenizer.json. Returns its bytes, or None if the
            file does not exist.

    Raises:
        VocabularyError: If the files next to tokenizer.json declare added tokens that it lacks.
    """
    files = {
        file: hints_in(file, content)
        for file in _ADDING_FILES
        if (content := read(file)) is not None
    }
    # Collect all tokens that Transformers would add: added_tokens.json counts only without
    # added_tokens_decoder.
    config = files.get("tokenizer_config.json", {})
    decoder, named = config.get("added_tokens_decoder"), config.get("extra_special_tokens")
    entries: list[Any] = (
        list(decoder.values())
        if isinstance(decoder, dict)
        else [*files.get("added_tokens.json", {})]
    )
    named = list(named.values()) if isinstance(named, dict) else named
    for declared in (config.get("additional_special_tokens"), named):
        entries += declared if isinstance(declared, list) else ()
    texts = [entry.get("content") if isinstance(entry, dict) else entry for entry in entries]
    listed = {entry["content"] for entry in parse_tokenizer_json(data, name)["added_tokens"]}
    unlisted = [
        text for text in dict.fromkeys(texts) if isinstance(text, str) and text not in listed
    ]
    if unlisted:
        raise VocabularyError(
            f"tokenizer = {name!r}: tokenizer.json lacks {len(unlisted)} added tokens that the"
            f" files next to it declare ({_some([repr(text) for text in unlisted])})."
            " Transformers adds them when loading, so their text would get other ids here\n"
            f"hint: run AutoTokenizer.from_pretrained({place!r}).save_pretrained(FOLDER) in"
            " Python, and give FOLDER"
        )


def _beside(read: Callable[[str], bytes | None]) -> list[dict[str, Any]]:
    """Return the `Beside` entries of the files next to a tokenizer.json.

    `read` takes the name of such a file and returns its bytes, or None if the file does not exist.
    """
    entries: list[dict[str, Any]] = []
    for file in HINT_FILES:
        data = read(file)
        if data is None:
            continue
        values = hints_in(file, data)
        roles: dict[str, str | None] = {}
        for role, keys in HINT_KEYS.items():
            # If several keys declare a role, the first text counts. null counts only without a
            # text.
            declared = [values[key] for key in keys if key in values]
            texts = [
                value.get("content") if isinstance(value, dict) else value for value in declared
            ]
            if named := [text for text in texts if isinstance(text, str) and text]:
                roles[role] = named[0]
            elif None in declared:
                roles[role] = None
        entries.append({"file": file, "digest": digest_of(data), "roles": roles})
    return entries


BYTES_VOCAB_SIZE = 528
MOST_WORD_CHARACTERS = 1000
"""Maximum `max_input_chars_per_word` that a WordPiece model may have.

The time that `tokenizers` needs for a word grows with the cube of its length. A word of 1000
characters takes half a second.
"""
MOST_HOLES = 1 << 20
"""Maximum number of ids below vocab_size without a token.

A table with an entry per id has at most this many more entries than the tokenizer has tokens.
"""
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
    """An entry of the `added_tokens` of a tokenizer.json."""

    id: int
    text: str
    special: bool


@dataclass(frozen=True)
class TokenTable:
    """The tokens of a tokenizer.json, by text and by id."""

    ids: dict[str, int]  # text → id of the model's own tokens and of added tokens
    texts: dict[int, str]  # id → text of the same tokens
    added: dict[str, Token]  # text → entry of added_tokens
    n_ids: int  # greatest id + 1
    notes: tuple[str, ...]  # settings in the file that have no effect in packprep


def bytes_tokenizer_json() -> bytes:
    """Return the tokenizer.json of the built-in byte vocabulary.

    Ids 0–255 are the UTF-8 bytes and ids 256–521 are special tokens. Ids 522–527 have no token.

    id 256   257   258   259    260   261   262   263          264          265          266 … 521
       <pad> <bos> <eos> <mask> [NLU] [NLG] [S2S] <fim_prefix> <fim_middle> <fim_suffix>
       <extra_id_0> … <extra_id_255>
    """
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    return _dump(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": _entries(256, BYTES_SPECIALS),
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


def parse_tokenizer_json(data: bytes, name: str) -> Mapping[str, Any]:
    """Return the parsed tokenizer.json after checking the parts that packprep uses.

    Do not modify the result, because it is cached. `name` is the name of the tokenizer in messages.

    Raises:
        VocabularyError: If `data` is not a usable tokenizer.json.
    """
    try:
        return _parse(data)
    except _Unusable as error:
        raise VocabularyError(f"tokenizer = {name!r}: {error}") from error


class Outline(msgspec.Struct):
    """The added tokens, decoder, normalizer and pre-tokenizer of a tokenizer.json."""

    added_tokens: list[dict[str, Any]] | None = None
    decoder: dict[str, Any] | None = None
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None


def outline_of(data: bytes) -> Outline:
    """Parse the `Outline` of a tokenizer.json.

    The vocabulary is skipped, so a file of several megabytes is parsed quickly.

    Raises:
        VocabularyError: If `data` is not a tokenizer.json.
    """
    try:
        return msgspec.json.decode(data, type=Outline)
    except ValueError:  # This call uses `json`, which names the location of an error.
        parsed = parse_tokenizer_json(data, "tokenizer.json")
        return Outline(**{name: parsed.get(name) for name in Outline.__struct_fields__})


class _Unusable(Exception):
    """An error for a tokenizer.json that cannot be used.

    The message is the reason, without the tokenizer's name.
    """


@functools.lru_cache(maxsize=2)  # Parsing several megabytes of JSON takes a tenth of a second.
def _parse(data: bytes) -> Mapping[str, Any]:
    try:
        try:
            parsed = msgspec.json.decode(data)
        except ValueError:  # `json` names the location of an error.
            parsed = json.loads(data)
            json.dumps(parsed, ensure_ascii=False).encode()  # fails for lone surrogates
    except (ValueError, RecursionError) as error:
        if data.startswith(LFS_POINTER):
            raise _Unusable(
                "a Git LFS pointer, which only refers to the file\n"
                "hint: fetch the file with git lfs pull"
            ) from error
        raise _Unusable(
            f"not JSON ({error})\n"
            "hint: give a tokenizer.json of the `tokenizers` library, or its folder"
        ) from error
    if not isinstance(parsed, dict) or not isinstance(parsed.get("model"), dict):
        raise _Unusable(
            "JSON, but not a tokenizer.json of the `tokenizers` library, since it has no"
            ' "model"\n'
            "hint: give that file, not a vocabulary or a configuration"
        )
    added = parsed.get("added_tokens") or []
    sound = isinstance(added, list) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("content"), str)
        and type(entry.get("id")) is int
        for entry in added
    )
    if not sound:
        raise _Unusable("an entry of added_tokens has no integer id or no content")
    parsed["added_tokens"] = added
    return parsed


def steps_of(step: Any, key: str) -> Iterator[Any]:
    """Yield the steps of a normalizer, pre-tokenizer or decoder, with sequences flattened.

    `key` is the key under which a Sequence lists its steps, such as "normalizers". Yield nothing if
    `step` is None.
    """
    if isinstance(step, dict) and step.get("type") == "Sequence":
        for inner_step in step.get(key) or ():
            yield from steps_of(inner_step, key)
    elif step is not None:
        yield step


@functools.lru_cache(maxsize=2)
def read_tokens(data: bytes, name: str) -> TokenTable:
    """Return the tokens of a tokenizer.json after checking their ids with `tokenizers`.

    `tokenizers` numbers added tokens itself, upward from the size of the vocabulary, and ignores
    the ids in the file. If the vocabulary skips an id, `tokenizers` may encode <|endoftext|> as
    100256 although the file and the model use 100257.

    Raises:
        VocabularyError: If `tokenizers` cannot load the file or would use other ids.
    """
    from tokenizers import Tokenizer

    parsed = parse_tokenizer_json(data, name)
    longest = parsed["model"].get("max_input_chars_per_word")
    if isinstance(longest, int) and longest > MOST_WORD_CHARACTERS:
        raise VocabularyError(
            f"tokenizer = {name!r}: max_input_chars_per_word is {longest}, but at most"
            f" {MOST_WORD_CHARACTERS} is supported, because `tokenizers` would need minutes for"
            " one long word. Models are trained with 100\n"
            "hint: give the file that the model was trained with"
        )
    try:
        with panics_as_errors():
            tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # The library raises a bare Exception for a bad file.
        raise VocabularyError(
            f"tokenizer = {name!r}: `tokenizers` cannot load it ({error})"
        ) from error
    wrong_tokens = [
        f"{entry['content']} is {entry['id']} in the file and"
        f" {tokenizer.token_to_id(entry['content'])} in `tokenizers`"
        for entry in parsed["added_tokens"]
        if tokenizer.token_to_id(entry["content"]) != entry["id"]
    ]
    if wrong_tokens:
        raise VocabularyError(
            f"tokenizer = {name!r}: the ids of {len(wrong_tokens)} added tokens differ from the"
            " ids that `tokenizers` uses, so text would get other ids than the model was trained"
            f" on: {_some(wrong_tokens)}. The vocabulary has a hole, or added_tokens is not in the"
            " order of its ids\n"
            "hint: fill the hole with unused tokens, or sort the list"
        )
    # An added token may have the id of a token of the model only if both have the same text.
    table = _table(parsed, tokenizer.get_vocab(with_added_tokens=False))
    by_id = {id: text for text, id in table.ids.items() if text not in table.added}
    shared = [
        f"{token.text} and {by_id[token.id]} are both {token.id}"
        for token in table.added.values()
        if by_id.get(token.id, token.text) != token.text
    ]
    if shared:
        raise VocabularyError(
            f"tokenizer = {name!r}: an added token has the id of another token: {_some(shared)}\n"
            "hint: give the added token a free id"
        )
    return table


def first_put_by_processor(data: bytes) -> int | None:
    """Return the first id that a post-processor adds to an empty text, or None if it adds none.

    `data` is the tokenizer.json with the post-processor. The id is usually the first id of every
    text, such as bos.
    """
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_buffer(data).encode("").ids
    return ids[0] if ids else None


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Convert a panic of a Rust library into a RuntimeError.

    A panic is not an `Exception`, so `except Exception` would not catch it.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__module__ == "pyo3_runtime":
            raise RuntimeError(str(error)) from error
        raise


def library_version() -> str:
    """Return the version of `tokenizers`."""
    import tokenizers

    return tokenizers.__version__


def tokens_in_file(data: bytes, name: str) -> TokenTable:
    """Return the tokens of a tokenizer.json, without loading `tokenizers` if possible.

    The tokens come directly from the file, without the checks in `read_tokens`. Some models, such
    as Unigram, have a vocabulary that is not a table of token → id. For such a model, return the
    result of `read_tokens`.

    Raises:
        VocabularyError: If the file is not usable.
    """
    parsed = parse_tokenizer_json(data, name)
    vocabulary = parsed["model"].get("vocab")
    if isinstance(vocabulary, dict):
        if not all(type(id) is int and 0 <= id < 1 << 32 for id in vocabulary.values()):
            raise VocabularyError(
                f"tokenizer = {name!r}: an entry of its vocab has an invalid id\n"
                "hint: fetch the file again"
            )
        return _table(parsed, vocabulary)
    return read_tokens(data, name)  # This is a Unigram model, or a model without a vocabulary.


def _table(parsed: Mapping[str, Any], model_ids: Mapping[str, int]) -> TokenTable:
    added = {
        entry["content"]: Token(entry["id"], entry["content"], bool(entry.get("special", False)))
        for entry in parsed["added_tokens"]
    }
    # An added token overrides a token of the model with the same text.
    ids = {**model_ids, **{token.text: token.id for token in added.values()}}
    listed = parsed["model"].get("vocab")
    notes = [
        f"the tokenizer's own {key} is off" for key in ("truncation", "padding") if parsed.get(key)
    ]
    if parsed["model"].get("dropout"):
        notes.append(
            f"the tokenizer's dropout of {parsed['model']['dropout']} is off: equal text gives"
            " equal tokens"
        )
    return TokenTable(
        ids=ids,
        texts={id: text for text, id in ids.items()},
        added=added,
        # The vocabulary of a Unigram model is a list and may repeat an entry.
        n_ids=max(
            max(ids.values(), default=-1) + 1, len(listed) if isinstance(listed, list) else 0
        ),
        notes=tuple(notes),
    )


def extended_tokenizer_json(data: bytes, first_id: int, texts: Sequence[str], name: str) -> bytes:
    """Return the tokenizer.json with `texts` appended as special added tokens.

    Their ids count upward from `first_id`. Keys and entries keep their order, so equal input gives
    equal bytes with any version of any library.
    """
    parsed = parse_tokenizer_json(data, name)
    return _dump({**parsed, "added_tokens": [*parsed["added_tokens"], *_entries(first_id, texts)]})


def without_last_tokens(data: bytes, count: int, name: str) -> bytes:
    """Return the tokenizer.json without its last `count` added tokens.

    This undoes `extended_tokenizer_json`.
    """
    if not count:
        return data
    parsed = parse_tokenizer_json(data, name)
    return _dump({**parsed, "added_tokens": parsed["added_tokens"][:-count]})


@functools.lru_cache(maxsize=2)
@remembered(
    bytes,
    lambda data, special_ids, with_special=True: (
        digest_of(data),
        sorted(special_ids),
        with_special,
    ),
)
def plain_tokenizer_json(
    data: bytes, special_ids: frozenset[int], with_special: bool = True
) -> bytes:
    """Return the tokenizer.json that engines load to encode text.

    Truncation, padding, the post-processor and dropout are removed, because they add, drop or
    randomize tokens.

    Args:
        data: The bytes of the tokenizer.json.
        special_ids: The ids of added tokens to mark as special.
        with_special: Whether to keep special tokens among the added tokens. Engines search every
            text for all added tokens.
    """
    parsed = parse_tokenizer_json(data, "tokenizer.json")
    added = [
        {**entry, "special": bool(entry.get("special")) or entry["id"] in special_ids}
        for entry in parsed["added_tokens"]
    ]
    if not with_special:
        added = [entry for entry in added if not entry["special"]]
    model = (
        {**parsed["model"], "dropout": None} if "dropout" in parsed["model"] else parsed["model"]
    )
    vocabulary, merges = model.get("vocab"), model.get("merges")
    if isinstance(vocabulary, dict):  # Libraries load a sorted vocabulary faster.
        model = {**model, "vocab": dict(sorted(vocabulary.items()))}
    if isinstance(merges, list) and all(
        isinstance(pair, list)
        and len(pair) == 2
        and all(isinstance(p, str) and " " not in p for p in pair)
        for pair in merges
    ):
        # The older form of a merge, "a b" instead of ["a", "b"], loads faster.
        model = {**model, "merges": list(map(" ".join, merges))}
    nothing = {"truncation": None, "padding": None, "post_processor": None}
    return msgspec.json.encode({**parsed, **nothing, "added_tokens": added, "model": model})


@remembered(list[tuple[str, int]], lambda data: (digest_of(data),))
def added_tokens(data: bytes) -> list[tuple[str, int]]:
    """Return the (text, id) pair of each added token, in the order of the file."""
    return [
        (entry["content"], entry["id"])
        for entry in parse_tokenizer_json(data, "tokenizer.json")["added_tokens"]
    ]


@remembered(dict[int, str], lambda data, ids: (digest_of(data), sorted(set(ids))))
def texts_of_ids(data: bytes, ids: Collection[int]) -> dict[int, str]:
    """Return id → text for the given ids, except ids without a token.

    The texts are read from the file, without loading `tokenizers`. When the vocabulary is resolved,
    `read_tokens` checks that the ids in the file are the ids that `tokenizers` uses.
    """
    wanted_ids, parsed = set(ids), parse_tokenizer_json(data, "tokenizer.json")
    vocabulary = parsed["model"].get("vocab") or {}
    listed = (
        vocabulary.items()
        if isinstance(vocabulary, dict)
        else ((e[0], i) for i, e in enumerate(vocabulary))
    )
    texts = {id: text for text, id in listed if id in wanted_ids}
    return texts | {
        entry["id"]: entry["content"]
        for entry in parsed["added_tokens"]
        if entry["id"] in wanted_ids
    }


@remembered(int | None, lambda data: (digest_of(data),))
def unknown_id(data: bytes) -> int | None:
    """Return the id of the model's unknown token, such as [UNK], or None."""
    model = parse_tokenizer_json(data, "tokenizer.json")["model"]
    if isinstance(model.get("unk_id"), int):
        return model["unk_id"]
    vocabulary = model.get("vocab")
    return vocabulary.get(model.get("unk_token")) if isinstance(vocabulary, dict) else None


def _entries(first_id: int, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return special entries of added_tokens for `texts`, with ids from `first_id` upward."""
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return [{"id": first_id + k, "content": text, **flags} for k, text in enumerate(texts)]


def _dump(parsed: Mapping[str, Any]) -> bytes:
    return (json.dumps(parsed, separators=(",", ":"), ensure_ascii=False) + "\n").encode()


def _some(items: Sequence[str]) -> str:
    return "; ".join(items[:5]) + (f"; and {len(items) - 5} more" if len(items) > 5 else "")


@functools.lru_cache(maxsize=4)
@remembered(bytes, lambda data, vocab_size: (digest_of(data), vocab_size))
def continuing_tokens(data: bytes, vocab_size: int) -> bytes:
    """Return one byte per id: 1 if the token starts inside a UTF-8 character, otherwise 0.

    A text must not be cut before such a token. Only byte-level vocabularies and byte fallback have
    such tokens. The result has `vocab_size` bytes, or is empty for a vocabulary without such
    tokens.

    Raises:
        VocabularyError: If the file has no usable vocabulary, an id is not below `vocab_size`, or
            too many ids below `vocab_size` have no token.
    """
    try:
        parsed = _parse(data)
        model = parsed["model"]
        vocab = model["vocab"]
        # A Unigram vocabulary is a list, and the index of an entry is its id.
        pairs = list(
            vocab.items()
            if isinstance(vocab, dict)
            else ((entry[0], i) for i, entry in enumerate(vocab))
        )
        if not all(
            type(i) is int and 0 <= i < vocab_size and isinstance(text, str) for text, i in pairs
        ):
            raise VocabularyError(
                f"a token of the tokenizer has no id below its declared vocab_size {vocab_size}"
            )
    except (_Unusable, LookupError, TypeError) as error:
        raise VocabularyError(f"the tokenizer.json has no vocabulary: {error!r}") from error
    # Limit the size before a table with an entry per id exists.
    tokens = len(pairs) + len(parsed["added_tokens"])
    if vocab_size > max(tokens, BYTES_VOCAB_SIZE) + MOST_HOLES:
        raise VocabularyError(
            f"the tokenizer.json has {tokens} tokens, but vocab_size is {vocab_size}, and at most"
            f" {MOST_HOLES} ids may be without a token\n"
            "hint: restore the right file"
        )
    continues = continuing(parsed, vocab_size)
    return continues.tobytes() if continues.any() else b""
