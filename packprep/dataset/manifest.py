"""The manifest, a dataset's table of contents: what it holds, checked, and its list of shards, an entry at a time."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast, overload

import numpy as np

from packprep.dataset.json_files import (
    FORMAT,
    LAW_VERSION,
    MANIFEST_NAME,
    PLAN_NAME,
    TOKENIZER_NAME,
    VERSION,
    Later,
    decode,
    other_law,
    shard_name,
    unknown_key,
    with_defaults,
)
from packprep.dataset.opening import read_file
from packprep.errors import DatasetError

ATTENTION_RULES = ("causal", "prefix", "bidirectional", "block_diffusion")
LABEL_ALIGNMENTS = ("next_token", "same_slot")


class StoredTask(TypedDict):
    """One entry of the task table: what all of a task's segments share."""

    name: str
    objective: str
    weight: float
    attention: str  # one of ATTENTION_RULES
    label_alignment: str  # one of LABEL_ALIGNMENTS
    mode_token: int | None
    parameters: dict[str, Any]
    resolved: NotRequired[dict[str, Any]]  # what the plan worked out once


class ShardEntry(TypedDict):
    """One shard in the manifest."""

    file: str
    rows: int
    segments: int
    tokens: int
    bytes: int
    digest: str
    receipt_digest: str


class Manifest(TypedDict):
    """dataset.json, checked: a plain dict with these keys and no others."""

    format: str
    version: int
    law_version: int
    seq_length: int
    token_dtype: str
    vocab_size: int
    pad_id: int
    specials: dict[str, Any]
    added_tokens: list[dict[str, Any]]
    tokenizer: dict[str, str]
    plan: dict[str, str]
    tasks: list[StoredTask]
    sources: list[dict[str, Any]]
    recipe: dict[str, Any]
    fingerprint: str
    engine: Any
    made_with: Any
    shards: Sequence[ShardEntry]
    ledger: dict[str, Any]
    digest: str


def is_count(value: Any) -> bool:
    """Whether it is an integer that counts something: 0 … 2⁶² − 1."""
    return type(value) is int and 0 <= value < 1 << 62


def is_id(value: Any) -> bool:
    """Whether it is an integer that may be a token's id: 0 … 2³¹ − 1."""
    return type(value) is int and 0 <= value < 1 << 31


def is_digest(value: Any) -> bool:
    """Whether it is 32 hex digits."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None


def _is_id_or_ids(value: Any) -> bool:
    return is_id(value) or (isinstance(value, list) and all(map(is_id, value)))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1 << 63


def _are_parameters(value: Any) -> bool:
    """Whether it is an object whose integers arrays can hold: what else an objective needs is for its law to say."""
    return isinstance(value, dict) and all(type(v) is not int or _is_number(v) for v in value.values())


def _is_recipe(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key, {}), dict) for key in ("documents", "output"))


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: type(value) is type(values[0]) and value in values  # 1.0 and True are no 1


def _instance_of(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types) and not (isinstance(value, bool) and bool not in types)


# key → (what it must be, the test)
_KEYS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "format": (repr(FORMAT), _one_of(FORMAT)),
    "version": (str(VERSION), _one_of(VERSION)),
    "law_version": ("a positive integer", lambda v: is_count(v) and v > 0),
    "seq_length": ("a multiple of 8 below 2³¹", lambda v: is_count(v) and 0 < v < 1 << 31 and v % 8 == 0),
    "token_dtype": ("uint16 or int32", _one_of("uint16", "int32")),
    "vocab_size": ("a positive integer below 2³¹", lambda v: is_count(v) and 0 < v < 1 << 31),
    "pad_id": ("an id", is_id),
    "specials": ("role → id or ids", lambda v: isinstance(v, dict) and all(map(_is_id_or_ids, v.values()))),
    "added_tokens": ("a list of objects", lambda v: isinstance(v, list)),
    "tokenizer": ("an object", _instance_of(dict)),
    "plan": ("an object", _instance_of(dict)),
    "tasks": ("a list with at least one task", lambda v: isinstance(v, list) and len(v) > 0),
    "sources": ("a list with at least one source", lambda v: isinstance(v, list) and len(v) > 0),
    "recipe": ("an object, as are its documents and output", _is_recipe),
    "fingerprint": ("32 hex digits", is_digest),
    "engine": ("a string or an object", _instance_of(str, dict)),
    "made_with": ("a string or an object", _instance_of(str, dict)),
    "shards": ("a list", _instance_of(list)),
    "ledger": ("an object", _instance_of(dict)),
    "digest": ("32 hex digits", is_digest),
}
_FILE_KEYS = {"file": ("a file name", _instance_of(str)), "digest": ("32 hex digits", is_digest)}
_SHARD_KEYS = {
    "file": ("a file name", _instance_of(str)),
    **{key: ("a non-negative integer below 2⁶²", is_count) for key in ("rows", "segments", "tokens", "bytes")},
    "digest": ("32 hex digits", is_digest),
    "receipt_digest": ("32 hex digits", is_digest),
}
_ADDED_KEYS = {
    "id": ("an id", is_id),
    "text": ("a string", _instance_of(str)),
    "role": ("a string or null", _instance_of(str, type(None))),
}
_SOURCE_KEYS = {"name": ("a string", _instance_of(str))}
_SOURCE_MORE = ("repeat", "sample")
_TASK_KEYS = {
    "name": ("a string", _instance_of(str)),
    "objective": ("a string", _instance_of(str)),
    "weight": ("a number", _is_number),
    "attention": (f"one of {', '.join(ATTENTION_RULES)}", _one_of(*ATTENTION_RULES)),
    "label_alignment": (f"one of {', '.join(LABEL_ALIGNMENTS)}", _one_of(*LABEL_ALIGNMENTS)),
    "mode_token": ("an id or null", lambda v: v is None or is_id(v)),
    "parameters": ("an object of values of at most 64 bits", _are_parameters),
}
_TASK_MORE = ("resolved",)
LATER: Later = {"": {}, "tasks": {}, "sources": {}}
"""Those of the keys above that joined later."""


def _check(
    where: str,
    value: Any,
    keys: dict[str, tuple[str, Callable[[Any], bool]]],
    made_with: Any,
    more: Sequence[str] = (),
    later: Mapping[str, Any] = {},
) -> None:
    """Refuse a value that is no object with `keys`, each good by its test; `later` and `more` may be absent."""
    if not isinstance(value, dict):
        raise DatasetError(f"{where}: is not an object")
    missing = sorted(set(keys) - set(value) - set(later))
    if missing:
        raise DatasetError(f"{where}: key {missing[0]!r} is missing")
    unknown = sorted(set(value) - set(keys) - set(more))
    if unknown:
        raise DatasetError(f"{where}: {unknown_key(unknown[0], made_with)}")
    for key, (what, good) in keys.items():
        if key in value and not good(value[key]):
            raise DatasetError(f"{where}: {key} is {value[key]!r:.200} and should be {what}")


def is_compact(manifest: Mapping[str, Any]) -> bool:
    """Whether its shards leave out what their headers determine."""
    return manifest["recipe"].get("output", {}).get("columns") == "compact"


def check_manifest(value: Any, name: str) -> Manifest:
    """`value`, with keys that joined later, if it is a manifest that this packprep can read, else DatasetError naming file,
    key and value."""
    made_with = value.get("made_with") if isinstance(value, dict) else None
    if isinstance(value, dict):
        for key in ("format", "version"):  # first: another version may well have other keys
            if key in value:
                _check(name, {key: value[key]}, {key: _KEYS[key]}, made_with)
        law = value.get("law_version")
        if type(law) is int and law > LAW_VERSION:
            raise DatasetError(f"{name} has {other_law(law, made_with)}")
    _check(name, value, _KEYS, made_with, later=LATER[""])
    if value["pad_id"] >= value["vocab_size"]:
        raise DatasetError(f"{name}: pad_id {value['pad_id']} is not below vocab_size {value['vocab_size']}")
    if value["token_dtype"] == "uint16" and value["vocab_size"] > 1 << 16:
        raise DatasetError(f"{name}: vocab_size {value['vocab_size']} does not fit token_dtype uint16")
    for key, file in (("plan", PLAN_NAME), ("tokenizer", TOKENIZER_NAME)):
        _check(f"{name}: {key}", value[key], _FILE_KEYS, made_with)
        if value[key]["file"] != file:
            raise DatasetError(f"{name}: {key}: file is {value[key]['file']!r} and should be {file!r}")
    for key, keys, more in (
        ("added_tokens", _ADDED_KEYS, ()),
        ("tasks", _TASK_KEYS, _TASK_MORE),
        ("sources", _SOURCE_KEYS, _SOURCE_MORE),
        ("shards", _SHARD_KEYS, ()),
    ):
        for i, entry in enumerate(value[key]):
            _check(f"{name}: {key}[{i}]", entry, keys, made_with, more, LATER.get(key, {}))
    for i, entry in enumerate(value["shards"]):
        if entry["file"] != shard_name(i):  # so nothing outside the directory can be named
            raise DatasetError(f"{name}: shards[{i}]: file is {entry['file']!r} and should be {shard_name(i)!r}")
    for key in ("rows", "segments", "tokens", "bytes"):
        if sum(entry[key] for entry in value["shards"]) >= 1 << 62:
            raise DatasetError(f"{name}: shards: the {key} sum to more than can be counted")
    return cast(Manifest, with_defaults(value, LATER))


class Shards(Sequence[ShardEntry]):
    """The list of shards of a manifest, which was checked as a whole; an entry is parsed when it is asked for."""

    def __init__(self, text: bytes, rows: list[int]):
        """text: its canonical JSON, of one entry or more. rows: of each shard."""
        self._text, self.rows = text, rows

    @cached_property
    def _begins(self) -> np.ndarray:
        """int64: where each entry begins, and where one more would: entries hold no objects, and their strings no brackets."""
        begins = np.flatnonzero(np.frombuffer(self._text, np.uint8) == ord("{"))
        return np.append(begins, len(self._text))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[ShardEntry]:
        return iter(json.loads(self._text))

    @overload
    def __getitem__(self, number: int) -> ShardEntry: ...
    @overload
    def __getitem__(self, number: slice) -> list[ShardEntry]: ...
    def __getitem__(self, number):
        if isinstance(number, slice):
            return [self[i] for i in range(len(self))[number]]
        begin, end = self._begins[range(len(self))[number] :][:2].tolist()
        return json.loads(self._text[begin : end - 1])


def first_rows(manifest: Manifest) -> list[int]:
    """The rows before each shard, and at last all of them."""
    shards = manifest["shards"]
    return [0, *accumulate(shards.rows if isinstance(shards, Shards) else (entry["rows"] for entry in shards))]


def read_manifest(directory: str | os.PathLike) -> Manifest:
    """The manifest of the dataset in `directory`, checked; its digests are `packprep verify`'s to recompute."""
    return plain(open_manifest(directory))


def plain(manifest: Manifest) -> Manifest:
    """The manifest as JSON gives it, with a list of shards."""
    shards = manifest["shards"]
    return manifest if isinstance(shards, list) else {**manifest, "shards": list(shards)}


def open_manifest(directory: str | os.PathLike) -> Manifest:
    """As `read_manifest`, but its shards may be `Shards`: of thousands, few are asked for at once."""
    path = Path(directory) / MANIFEST_NAME
    try:
        data = read_file(path)
    except FileNotFoundError as error:
        if (Path(directory) / PLAN_NAME).exists():
            raise DatasetError(
                f"{path} does not exist: the build of {directory} is not finished. Run its command again; "
                f"`packprep status {directory}` says what is missing"
            ) from error
        there = "" if Path(directory).exists() else ", there is no such folder"
        raise DatasetError(
            f"{path} does not exist: {directory} is no dataset, or its build is not finished{there} "
            f"(`packprep status {directory}` says what is missing): give the folder that `packprep build --out` wrote"
        ) from error
    except NotADirectoryError as error:
        raise DatasetError(
            f"{directory} is a file, and a dataset is a folder: name the one with dataset.json"
        ) from error
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error}") from error
    listed = _listed_shards(data)
    if listed is None:
        return check_manifest(decode(data, str(path)), str(path))
    shards, rest = listed
    manifest = check_manifest(decode(rest, str(path)), str(path))
    manifest["shards"] = shards
    return manifest


_COUNT, _DIGEST = b"(?:0|[1-9][0-9]{0,11})", b'"[0-9a-f]{32}"'
_ENTRY = (
    rb'"bytes":%b,"digest":%b,"file":"shards/([0-9]{3})/\%%d[0-9]{3}\.safetensors","receipt_digest":%b,"rows":%b,"segments":%b,'
    rb'"tokens":%b'
) % (_COUNT, _DIGEST, _DIGEST, _COUNT, _COUNT, _COUNT)
_ENTRIES = re.compile(rb"\[\{%b(?:\},\{%b)*+\}\]" % (_ENTRY % 1, _ENTRY % 2))
_ROWS = re.compile(rb'"rows":([0-9]+)')
_TENS = 10 ** np.arange(5, -1, -1)
_LIST = b',"shards":'


def _listed_shards(data: bytes) -> tuple[Shards, bytes] | None:
    """(the shards, the manifest with an empty list in their place) where every entry is canonical and good.

    The list is nearly all of a large manifest, and one expression checks it several times as fast as it can be parsed,
    encoded again and looked at entry by entry. None: anything else, which `decode` and `check_manifest` are to judge and
    to name.
    """
    begin = data.find(_LIST) + len(_LIST)
    end = data.find(b"]", begin) + 1
    if begin < len(_LIST) or not end or data.find(_LIST[1:], begin) >= 0:
        return None  # so the one key "shards" that is left is the manifest's own, or `check_manifest` misses it
    text = data[begin:end]
    if not _ENTRIES.fullmatch(text):
        return None
    rows, characters = list(map(int, _ROWS.findall(text))), np.frombuffer(text, np.uint8)
    slashes = np.flatnonzero(characters == ord("/"))[1::2]  # two in every name: six digits follow the second
    numbers = (characters[slashes[:, None] + np.arange(1, 7)] - ord("0")) @ _TENS
    if not np.array_equal(numbers, np.arange(len(rows))):
        return None
    return Shards(text, rows), data[:begin] + b"[]" + data[end:]
