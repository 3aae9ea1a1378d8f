"""Read and check the manifest (dataset.json), which describes a dataset and lists its shards."""

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from packprep.dataset.attention import RULES
from packprep.errors import DatasetError, RecipeError
from packprep.format import read_file
from packprep.format.json_files import (
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

LABEL_ALIGNMENTS = ("next_token", "same_slot", "next_slot")
"""The token that a slot predicts: the next token of the text, the original token of this slot, or
the original token of the next slot. The last two are for tasks that noise tokens."""


class StoredTask(TypedDict):
    """One entry of the task table: the values that all segments of a task share."""

    name: str
    objective: str
    weight: float
    attention: str  # One of RULES.
    label_alignment: str  # One of LABEL_ALIGNMENTS.
    mode_token: int | None
    parameters: dict[str, Any]
    resolved: NotRequired[dict[str, Any]]  # Values that the plan has computed.


@dataclass(frozen=True)
class Parameter:
    """One key of `[[tasks]]` that an objective reads.

    Attributes:
        name: The key.
        default: The default value, which also gives the type.
        meaning: A one-line description for the docs and the JSON schema.
        low: The smallest value that a number may have; None without a limit.
        high: The largest value that a number may have; None without a limit.
        low_open: Whether `low` itself is excluded.
        high_open: Whether `high` itself is excluded.
        choices: The values that a string may have.
        shares: The meaning of a tuple. If True, its numbers are shares, which must sum to 1. If
            False, its two numbers are the bounds of a range.
        later: Whether the key was added after the first version of the format. The key is then
            stored only if its value differs from the default.

    Example:
        Parameter("noise_density", 0.15, "share of the tokens that is noise", 0.0, 1.0)
    """

    name: str
    default: Any
    meaning: str
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    high_open: bool = False
    choices: tuple[str, ...] = ()
    shares: bool = False
    later: bool = False

    def range_text(self) -> str:
        """Return the allowed values as a text for messages and the docs, such as "[0, 1)"."""
        if self.choices:
            return " | ".join(self.choices)
        if self.shares:
            return f"{len(self.default)} numbers, 0 … 1, that sum to 1"
        if isinstance(self.default, bool):
            return "true | false"
        if self.low is None and self.high is None:
            return ""
        name = "two numbers low ≤ high in " if isinstance(self.default, tuple) else ""
        left_bracket = "(" if self.low_open or self.low is None else "["
        right_bracket = ")" if self.high_open or self.high is None else "]"
        low = "−∞" if self.low is None else f"{self.low:g}"
        high = "∞" if self.high is None else f"{self.high:g}"
        return f"{name}{left_bracket}{low}, {high}{right_bracket}"

    def accept(self, value: Any, where: str) -> Any:
        """Check a value and convert it to the parameter's type.

        Args:
            value: The value in a recipe or a manifest.
            where: Name of the object that contains the key, for error messages.

        Returns:
            The value. An integer becomes a float if the type is float, and a list of numbers
            becomes a tuple.

        Raises:
            RecipeError: If the value has another type or is not allowed.
        """
        kind = type(self.default)
        if kind is tuple:
            return self._accept_numbers(value, where)
        if kind is float and type(value) is int and abs(value) < 2**63:
            value = float(value)
        if type(value) is not kind:
            raise RecipeError(
                f"{where}.{self.name} = {value!r}: expected {_kind_names[kind]}"
                f" ({self.range_text()})"
            )
        if not (
            value in self.choices
            if self.choices
            else kind not in (int, float) or self._holds(value)
        ):
            raise RecipeError(f"{where}.{self.name} = {value!r}: must be in {self.range_text()}")
        return value

    def _holds(self, value: float) -> bool:
        above = self.low is None or value > self.low or (value == self.low and not self.low_open)
        below = (
            self.high is None or value < self.high or (value == self.high and not self.high_open)
        )
        # This excludes NaN and numbers that arrays cannot hold.
        return above and below and abs(value) < 2**63

    def _accept_numbers(self, value: Any, where: str) -> tuple[float, ...]:
        is_valid = isinstance(value, (list, tuple)) and len(value) == len(self.default)
        is_valid = is_valid and all(type(v) in (int, float) and self._holds(v) for v in value)
        if is_valid and self.shares:
            is_valid = abs(sum(value) - 1.0) < 1e-9
        elif is_valid:
            is_valid = value[0] <= value[1]
        if not is_valid:
            raise RecipeError(f"{where}.{self.name} = {value!r}: must be {self.range_text()}")
        return tuple(float(v) for v in value)


_kind_names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


class ShardEntry(TypedDict):
    """The entry of one shard in the manifest."""

    file: str
    rows: int
    segments: int
    tokens: int
    bytes: int
    digest: str
    receipt_digest: str


class Manifest(TypedDict):
    """The checked content of dataset.json: a plain dict with only these keys."""

    format: str
    version: int
    law_version: int
    seq_length: int
    token_dtype: str
    vocab_size: int
    pad_id: int
    specials: dict[str, Any]
    # Flags of the tokens that begin inside a character, present if a task needs them.
    continues: NotRequired[str]
    added_tokens: list[dict[str, Any]]
    tokenizer: dict[str, str]
    plan: dict[str, str]
    tasks: list[StoredTask]
    sources: list[dict[str, Any]]
    recipe: dict[str, Any]
    fingerprint: str
    # The limit that applied when the dataset was completed, present if it is not the plan's limit.
    max_bad_fraction: NotRequired[float]
    kind: NotRequired[str]  # "store" in the manifest of a token store, otherwise absent.
    # Present after a removal of documents: the digest of removed.json, and the earlier
    # versions of the dataset, the oldest first.
    removed: NotRequired[dict[str, Any]]
    engine: Any
    made_with: Any
    shards: Sequence[ShardEntry]
    ledger: dict[str, Any]
    digest: str


def is_count(value: Any) -> bool:
    """Return whether a value is an integer in 0 … 2⁶² − 1, the range of counts."""
    return type(value) is int and 0 <= value < 1 << 62


def is_id(value: Any) -> bool:
    """Return whether a value is an integer in 0 … 2³¹ − 1, the range of token ids."""
    return type(value) is int and 0 <= value < 1 << 31


def is_digest(value: Any) -> bool:
    """Return whether a value is a string of 32 lower-case hex digits."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None


def _is_id_or_ids(value: Any) -> bool:
    return is_id(value) or (isinstance(value, list) and all(map(is_id, value)))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1 << 63


def _are_parameters(value: Any) -> bool:
    """Return whether a value is an object whose integers fit into 64 bits.

    The names and ranges of the parameters are not checked here, but by the objectives.
    """
    return isinstance(value, dict) and all(
        type(v) is not int or _is_number(v) for v in value.values()
    )


def _is_recipe(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(key, {}), dict) for key in ("documents", "output")
    )


_REPLACED = ("fingerprint", "digest", "plan", "removed")
"""The keys that a manifest has for each earlier version of its dataset. "removed" is present only
if that version was made by a removal of documents."""


def _is_removal(value: Any) -> bool:
    """Return whether a value is valid for the manifest's key "removed"."""
    if not isinstance(value, dict) or value.keys() != {"digest", "replaces"}:
        return False
    entries, keys = value["replaces"], {*_REPLACED} - {"removed"}
    return (
        is_digest(value["digest"])
        and isinstance(entries, list)
        and all(
            isinstance(entry, dict)
            and keys <= entry.keys() <= {*_REPLACED}
            and all(map(is_digest, entry.values()))
            for entry in entries
        )
    )


def _one_of(*values: Any) -> Callable[[Any], bool]:
    # The test of the type rejects 1.0 and True where 1 is allowed.
    return lambda value: type(value) is type(values[0]) and value in values


def _instance_of(*types: type) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, types) and not (isinstance(value, bool) and bool not in types)
    )


# Key → (description of valid values for messages, test of a value).
_KEYS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "format": (repr(FORMAT), _one_of(FORMAT)),
    "version": (str(VERSION), _one_of(VERSION)),
    "law_version": ("a positive integer", lambda v: is_count(v) and v > 0),
    "seq_length": (
        "a multiple of 8 below 2³¹",
        lambda v: is_count(v) and 0 < v < 1 << 31 and v % 8 == 0,
    ),
    "token_dtype": ("uint16 or int32", _one_of("uint16", "int32")),
    "vocab_size": ("a positive integer below 2³¹", lambda v: is_count(v) and 0 < v < 1 << 31),
    "pad_id": ("an id", is_id),
    "specials": (
        "role → id or ids",
        lambda v: isinstance(v, dict) and all(map(_is_id_or_ids, v.values())),
    ),
    "continues": ("a text", _instance_of(str)),
    "added_tokens": ("a list of objects", lambda v: isinstance(v, list)),
    "tokenizer": ("an object", _instance_of(dict)),
    "plan": ("an object", _instance_of(dict)),
    "tasks": ("a list with at least one task", lambda v: isinstance(v, list) and len(v) > 0),
    "sources": ("a list with at least one source", lambda v: isinstance(v, list) and len(v) > 0),
    "recipe": ("an object, as are its documents and output", _is_recipe),
    "fingerprint": ("32 hex digits", is_digest),
    "kind": ("store, or absent", _one_of("store")),
    "removed": ("a digest and what is replaced, or absent", _is_removal),
    "max_bad_fraction": (
        "a number from 0 to 1, or absent",
        lambda v: _is_number(v) and 0 <= v <= 1,
    ),
    "engine": ("a string or an object", _instance_of(str, dict)),
    "made_with": ("a string or an object", _instance_of(str, dict)),
    "shards": ("a list", _instance_of(list)),
    "ledger": ("an object", _instance_of(dict)),
    "digest": ("32 hex digits", is_digest),
}
_FILE_KEYS = {"file": ("a file name", _instance_of(str)), "digest": ("32 hex digits", is_digest)}
_SHARD_COUNTS = ("rows", "segments", "tokens", "bytes")
_SHARD_KEYS = {
    "file": ("a file name", _instance_of(str)),
    **{key: ("a non-negative integer below 2⁶²", is_count) for key in _SHARD_COUNTS},
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
    "attention": (f"one of {', '.join(RULES)}", _one_of(*RULES)),
    "label_alignment": (f"one of {', '.join(LABEL_ALIGNMENTS)}", _one_of(*LABEL_ALIGNMENTS)),
    "mode_token": ("an id or null", lambda v: v is None or is_id(v)),
    "parameters": ("an object of values of at most 64 bits", _are_parameters),
}
_TASK_MORE = ("resolved",)
LATER: Later = {"": {}, "tasks": {}, "sources": {}}
"""Keys that were added to the format later, with their defaults: table → key → default."""
_OPTIONAL = {"continues", "kind", "removed", "max_bad_fraction"}
"""Keys that may be missing and have no default, see `Manifest`."""


def _check(
    where: str,
    value: Any,
    keys: dict[str, tuple[str, Callable[[Any], bool]]],
    made_with: Any,
    more_keys: Sequence[str] = (),
    later: Collection[str] = (),
) -> None:
    """Check that a value is an object with valid keys and values.

    Args:
        where: The location of the value, for error messages.
        value: The value to check.
        keys: The keys that the object should have, and the test of each key's value.
        made_with: The value of the manifest's key `made_with`, for error messages.
        more_keys: Other keys that the object may have. Their values are not checked.
        later: The keys in `keys` that may be missing. All other keys in `keys` are required.

    Raises:
        DatasetError: If the value is invalid. The message names location and key.
    """
    if not isinstance(value, dict):
        raise DatasetError(f"{where}: is not an object")
    missing = sorted(set(keys) - set(value) - set(later))
    if missing:
        raise DatasetError(f"{where}: key {missing[0]!r} is missing")
    unknown = sorted(set(value) - set(keys) - set(more_keys))
    if unknown:
        raise DatasetError(f"{where}: {unknown_key(unknown[0], made_with)}")
    for key, (requirement, is_valid) in keys.items():
        if key in value and not is_valid(value[key]):
            raise DatasetError(f"{where}: {key} is {value[key]!r:.200} and should be {requirement}")


def replaced(stored: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one entry for each earlier version of a dataset, the oldest version first.

    Each removal of documents makes a new version. `stored` is a manifest or a stored plan. In a
    manifest, an entry has the keys `fingerprint`, `digest` and `plan`. If a removal made the
    earlier version too, its entry also has the key `removed`, with the digest of that version's
    removed.json. In a plan, entries have more keys, see `plan_form.ReplacedForm`.
    """
    entries: list[dict[str, Any]] = (stored.get("removed") or {"replaces": []})["replaces"]
    return entries


def named_removal(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of the manifest's key "removed", for a stored plan that has this key."""
    entries = [{key: entry[key] for key in _REPLACED if key in entry} for entry in replaced(plan)]
    return {"digest": plan["removed"]["digest"], "replaces": entries}


def removed_digest(stored: Mapping[str, Any]) -> str | None:
    """Return the digest of removed.json in a plan or manifest, or None without a removal."""
    removal: dict[str, Any] = stored.get("removed") or {}
    return removal.get("digest")


def stored_columns(manifest: Mapping[str, Any]) -> str:
    """Return the recipe's choice of stored columns: "full", "compact" or "least"."""
    columns = manifest["recipe"].get("output", {}).get("columns")
    return columns if columns in ("compact", "least") else "full"


def stores_labels(columns: str, in_place: Iterable[str]) -> bool:
    """Return whether the shards of a dataset store labels.

    Labels are stored if a task is a same-position task. If `columns` is "least", a
    block-diffusion task does not need stored labels, because they follow from the clean half of
    each segment.

    Args:
        columns: "full", "compact" or "least".
        in_place: The attention patterns of the same-position tasks.

    Returns:
        Whether any task needs stored labels.
    """
    return any(columns != "least" or not RULES[rule].in_blocks for rule in in_place)


def is_in_place(task: Mapping[str, Any]) -> bool:
    """Return whether a stored task noises tokens and predicts the original tokens.

    An original token is predicted at its noised slot. With label_alignment "next_slot", it is
    predicted at the slot before the noised slot instead.
    """
    return task["label_alignment"] != "next_token"


def check_manifest(value: Any, name: str) -> Manifest:
    """Check that a value is a manifest that this packprep can read.

    Args:
        value: The parsed JSON.
        name: Name of the file, for error messages.

    Returns:
        The manifest. Missing keys that were added to the format later have their defaults.

    Raises:
        DatasetError: If the value is not a manifest that this packprep can read. The message names
            file, key and value.
    """
    made_with = value.get("made_with") if isinstance(value, dict) else None
    if isinstance(value, dict):
        # Check these first, since another version may have other keys.
        for key in ("format", "version"):
            if key in value:
                _check(name, {key: value[key]}, {key: _KEYS[key]}, made_with)
        law = value.get("law_version")
        if type(law) is int and 0 < law != LAW_VERSION:
            raise DatasetError(f"{name} {other_law(law, made_with)}")
    _check(name, value, _KEYS, made_with, later=_OPTIONAL | LATER[""].keys())
    if value["pad_id"] >= value["vocab_size"]:
        raise DatasetError(
            f"{name}: pad_id {value['pad_id']} is not below vocab_size {value['vocab_size']}"
        )
    if value["token_dtype"] == "uint16" and value["vocab_size"] > 1 << 16:
        raise DatasetError(
            f"{name}: vocab_size {value['vocab_size']} does not fit token_dtype uint16"
        )
    for key, file in (("plan", PLAN_NAME), ("tokenizer", TOKENIZER_NAME)):
        _check(f"{name}: {key}", value[key], _FILE_KEYS, made_with)
        if value[key]["file"] != file:
            raise DatasetError(
                f"{name}: {key}: file is {value[key]['file']!r} and should be {file!r}"
            )
    # If this fast check fails, the slower checks below find and report the fault.
    sound = _are_shards(value["shards"])
    for key, keys, more_keys in (
        ("added_tokens", _ADDED_KEYS, ()),
        ("tasks", _TASK_KEYS, _TASK_MORE),
        ("sources", _SOURCE_KEYS, _SOURCE_MORE),
        ("shards", _SHARD_KEYS, ()),
    ):
        for i, entry in enumerate(() if key == "shards" and sound else value[key]):
            _check(f"{name}: {key}[{i}]", entry, keys, made_with, more_keys, LATER.get(key, {}))
    for i, entry in enumerate(() if sound else value["shards"]):
        # This check also excludes names of files outside the directory.
        if entry["file"] != shard_name(i):
            raise DatasetError(
                f"{name}: shards[{i}]: file is {entry['file']!r} and should be {shard_name(i)!r}"
            )
    for key in () if sound else _SHARD_COUNTS:
        if sum(entry[key] for entry in value["shards"]) >= 1 << 62:
            raise DatasetError(f"{name}: shards: the {key} sum to more than can be counted")
    return cast(Manifest, with_defaults(value, LATER))


def _are_shards(entries: Sequence[Any]) -> bool:
    """Return whether all values and keys in the entries of shards are valid.

    The check is fast, because it tests each key for all entries at once. It also returns False if
    the keys of an entry are not sorted, although such entries are valid.
    """
    keys = tuple(sorted(_SHARD_KEYS))
    if set(map(type, entries)) != {dict} or set(map(tuple, entries)) != {keys}:
        return False
    columns = dict(zip(keys, zip(*map(dict.values, entries), strict=True), strict=True))
    counts = [columns[key] for key in _SHARD_COUNTS]
    digests = columns["digest"] + columns["receipt_digest"]
    return (
        all(
            set(map(type, values)) == {int} and min(values) >= 0 and sum(values) < 1 << 62
            for values in counts
        )
        and set(map(type, digests)) == {str}
        and set(map(len, digests)) == {32}
        and re.fullmatch("[0-9a-f]*", "".join(digests)) is not None
        and columns["file"] == tuple(map(shard_name, range(len(entries))))
    )


def has_weighted_spans(manifest: Mapping[str, Any]) -> bool:
    """Return whether, by the ledger, the dataset has slots with a loss weight other than 1.

    Such weights are set for trained ranges of documents. Opening a dataset does not check the
    ledger.
    """
    sources = _members(manifest["ledger"], "sources").values()
    return any(_counted(source, "slots", "weighted") for source in sources)


ANSWERS = "answers"
"""The key of a ledger's task that counts the answers at which blocks of block diffusion start."""


def block_columns(manifest: Mapping[str, Any]) -> list[str]:
    """Return the columns that attention by blocks needs besides prefix_ends and position_ids.

    They are ["block_lengths"] if a task uses block diffusion, but ["block_starts"] if, by the
    ledger, its blocks start at the answers of supervised documents. Opening a dataset does not
    check the ledger.
    """
    counted = _members(manifest["ledger"], "tasks")
    if any(_counted(counted, name, ANSWERS) for name in counted):
        return ["block_starts"]
    if any(RULES[task["attention"]].in_blocks for task in manifest["tasks"]):
        return ["block_lengths"]
    return []


def encoder_length(manifest: Mapping[str, Any]) -> int:
    """Return the recipe's packing.encoder_length, or 0 if it is not set.

    encoder_length limits the number of prefix slots of all segments of a row. An encoder reads
    these slots.
    """
    return _counted(manifest["recipe"], "packing", "encoder_length")


def drawn_tasks(manifest: Manifest) -> list[StoredTask]:
    """Return the tasks of a dataset, except tasks that have 0 segments in the ledger."""
    counted = _members(manifest["ledger"], "tasks")
    return [task for task in manifest["tasks"] if counted.get(task["name"], {}).get("segments", 1)]


def outline(manifest: Manifest, name: str) -> str:
    """Return a text that shows a dataset as a tree: sources and tasks with their shares of tokens.

    The shares come from the ledger, which opening a dataset does not check. Sources that are not in
    the ledger are left out, and missing counts are shown as 0.

    Args:
        manifest: The manifest.
        name: The name of the dataset to show.

    Returns:
        A text of several lines.
    """
    padding, slots = (_counted(manifest["ledger"], key) for key in ("row_padding", "row_slots"))
    filled = f", {1 - padding / slots:.2%} filled" if slots else ""
    rows = sum(entry["rows"] for entry in manifest["shards"])
    head = (
        f"{_shown(name)}: {_several(rows, 'row')} of {manifest['seq_length']:,} slots in"
        f" {_several(len(manifest['shards']), 'shard')}{filled}; {manifest['token_dtype']} ids"
        f" below {manifest['vocab_size']:,}"
    )
    of_sources = [
        (
            name,
            _counted(counts_of_entry, "tokens", "used"),
            _several(_counted(counts_of_entry, "documents", "used"), "document"),
        )
        for name, counts_of_entry in _members(manifest["ledger"], "sources").items()
    ]
    counts = _members(manifest["ledger"], "tasks")
    of_tasks = [
        (
            name,
            _counted(counts_of_entry, "tokens"),
            f"{_several(_counted(counts_of_entry, 'segments'), 'segment')}, {task['objective']}",
        )
        for task in manifest["tasks"]
        for name, counts_of_entry in [(task["name"], counts.get(task["name"]))]
    ]
    return "\n".join(
        [head, *_branch("├── sources", "│   ", of_sources), *_branch("└── tasks", "    ", of_tasks)]
    )


def _branch(title: str, indent: str, entries: Sequence[tuple[str, int, str]]) -> list[str]:
    """Return the lines of one branch of `outline`: its title, and a line for each entry.

    An entry is a tuple (name, number of tokens, remark). `indent` begins each line of an entry.
    """
    names = [_shown(name) for name, _, _ in entries]
    width, total = max(map(len, names), default=0), sum(tokens for _, tokens, _ in entries) or 1
    twigs = [*("├── " for _ in names[1:]), "└── "]
    return [
        title,
        *(
            f"{indent}{twig}{name:<{width}}  {tokens / total:7.2%}  {tokens:,} tokens, {text}"
            for twig, name, (_, tokens, text) in zip(twigs, names, entries, strict=False)
        ),
    ]


def _several(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _shown(name: str) -> str:
    return name if name.isprintable() else repr(name)


def _members(value: Any, key: str) -> Mapping[str, Any]:
    entry = value.get(key) if isinstance(value, dict) else None
    return entry if isinstance(entry, dict) else {}


def _counted(value: Any, *keys: str) -> int:
    for key in keys[:-1]:
        value = _members(value, key)
    count = value.get(keys[-1]) if isinstance(value, dict) else None
    return count if isinstance(count, int) else 0


def first_rows(manifest: Manifest) -> list[int]:
    """Return the index of each shard's first row, and at the end the number of all rows.

    Shards of 10, 10 and 4 rows give [0, 10, 20, 24].
    """
    return [0, *accumulate(entry["rows"] for entry in manifest["shards"])]


def read_manifest(directory: str | os.PathLike, stores: bool = False) -> Manifest:
    """Read and check the manifest of a dataset.

    The digests in the manifest are not compared with the files. `packprep verify` does that.

    Args:
        directory: The folder of the dataset.
        stores: Whether token stores are accepted. Otherwise the manifest of a token store raises an
            error.

    Returns:
        The manifest.

    Raises:
        DatasetError: If the manifest is missing or invalid, or belongs to a token store and
            `stores` is False.
    """
    path = Path(directory) / MANIFEST_NAME
    try:
        data = read_file(path)
    except FileNotFoundError as error:
        if (Path(directory) / PLAN_NAME).exists():
            raise DatasetError(
                f"{path} does not exist, because the build of {directory} is not finished\n"
                f"hint: run its command again; `packprep status {directory}` lists what is"
                " missing"
            ) from error
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(directory)):
            raise DatasetError(
                f"{directory} is a URL, but only folders can be opened here\n"
                "hint: use open_remote of packprep.adapters.remote"
            ) from error
        if several := sorted(
            str(manifest_path.parent)
            for manifest_path in Path(directory).glob(f"*/{MANIFEST_NAME}")
        ):
            ellipsis = ", …" if len(several) > 5 else ""
            raise DatasetError(
                f"{directory} is not a dataset, but contains several\n"
                f"hint: name one of them, {', '.join(several[:5])}{ellipsis}"
            ) from error
        absence = "" if Path(directory).exists() else ", and there is no such folder"
        raise DatasetError(
            f"{path} does not exist: {directory} is not a dataset, or its build is not"
            f" finished{absence}\n"
            "hint: give the folder that `packprep build --out` wrote; `packprep status"
            f" {directory}` lists what is missing"
        ) from error
    except NotADirectoryError as error:
        raise DatasetError(
            f"{directory} is a file, but a dataset is a folder\n"
            "hint: give the folder with dataset.json"
        ) from error
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error}") from error
    try:
        value = decode(data, str(path))
    except DatasetError as error:
        raise DatasetError(
            f"{error}\nhint: put the file back as it was, or build into another folder"
        ) from error
    manifest = check_manifest(value, str(path))
    if "kind" in manifest and not stores:
        raise DatasetError(
            f"{directory} is a token store, which has no rows\n"
            f'hint: build a dataset from it, with paths = ["{directory}"] and format = "store" in'
            " [[sources]]"
        )
    return manifest
