"""The JSON files of a dataset: their one encoding, what they are called, and the versions that they
carry.

Canonical JSON is what `json.dumps(…, sort_keys=True, separators=(",", ":"), ensure_ascii=False)`
gives, in UTF-8, and one newline. Manifests, plans and receipts are decoded here, so that a changed
byte in any of them is refused in one way.

A key that joins later is written only where it differs from its default, and is that default where
it is absent: so files that were written before it stay as they are.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from packprep.errors import DatasetError
from packprep.forking import unforked

FORMAT = "packprep"
VERSION = 1  # of the format on disk
LAW_VERSION = 3  # of what determines the bytes; raised whenever they change

MANIFEST_NAME = "dataset.json"
MIXTURE_NAME = "mixture.json"
PLAN_NAME = "plan.json"
TOKENIZER_NAME = "tokenizer.json"
REMOVED_NAME = "removed.json"  # which documents were removed, where any were
FIRST_SEEN_NAME = "first-seen.json"  # of a build that is not published; no part of a dataset


def shard_name(shard: int) -> str:
    """shards/NNN/NNNNNN.safetensors, NNN = shard div 1000."""
    return f"shards/{shard // 1000:03d}/{shard:06d}.safetensors"


def receipt_name(shard: int) -> str:
    """receipts/NNN/NNNNNN.json."""
    return f"receipts/{shard // 1000:03d}/{shard:06d}.json"


def rejects_name(shard: int) -> str:
    """rejects/NNN/NNNNNN.jsonl."""
    return f"rejects/{shard // 1000:03d}/{shard:06d}.jsonl"


Later: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The defaults of a file's keys that joined later: its own under "", under NAME those of its part
of that name, or of each entry of that list."""


def with_defaults(value: Mapping[str, Any], later: Later) -> dict[str, Any]:
    """The values of a file, with the keys that joined later at their defaults where they are
    absent."""
    return _each(value, later, lambda part, defaults: {**defaults, **part})


def as_stored(value: Mapping[str, Any], later: Later) -> dict[str, Any]:
    """The values of a file as they are written: without the keys that joined later and stand at
    their defaults."""
    return _each(
        value,
        later,
        lambda part, defaults: {
            k: v for k, v in part.items() if k not in defaults or v != defaults[k]
        },
    )


def _each(
    value: Mapping[str, Any],
    later: Later,
    change: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]],
) -> dict[str, Any]:
    made = change(value, later.get("", {}))
    for name, defaults in later.items():
        part = made.get(name) if defaults else None
        if isinstance(part, list | tuple):
            made[name] = [
                change(entry, defaults) if isinstance(entry, dict) else entry for entry in part
            ]
        elif isinstance(part, dict):
            made[name] = change(part, defaults)
    return made


def unknown_key(key: str, made_with: Any) -> str:
    """A message's part for a key that this version does not know. made_with: the file's versions of
    what wrote it."""
    here, there = _version(), _maker(made_with)
    if there in (here, None):
        return (
            f"unknown key {key!r}: put the file back as it was, or use the packprep that wrote it"
        )
    return (
        f"key {key!r} is unknown to packprep {here}; packprep {there} wrote it: use that version or"
        " a newer one"
    )


def other_law(law: int, made_with: Any) -> str:
    """Return the end of a message about a file of another law_version."""
    if law < LAW_VERSION:
        return f"was built by a pre-release version of packprep (law_version {law}): build it again"
    there = _maker(made_with)
    which = f"packprep {there}" if there else "another packprep"
    return (
        f"has law_version {law} and this packprep makes {LAW_VERSION}: use {which}, which made it"
    )


def newer_version(key: str) -> str:
    """A message's part for a key of a file that does not say who wrote it."""
    return (
        f"key {key!r} is unknown to packprep {_version()}: a newer version wrote it; go on with"
        " that one"
    )


def _version() -> str:
    with unforked():
        from importlib.metadata import PackageNotFoundError, version  # here, as it takes long

    try:
        return version("packprep")
    except PackageNotFoundError:
        return "of this folder"


def _maker(made_with: Any) -> str | None:
    version = made_with.get("packprep") if isinstance(made_with, dict) else None
    return version if isinstance(version, str) else None


def encode(value: Any) -> bytes:
    """The canonical JSON of `value` and a newline; DatasetError at NaN, Infinity or text that is
    not valid UTF-8."""
    try:
        text = json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
        return text.encode("utf-8") + b"\n"
    except ValueError as error:  # a UnicodeEncodeError is one
        raise DatasetError(f"this cannot be written as canonical JSON: {error}") from error


def json_value(value: Any) -> Any:
    """What JSON gives back of a value: lists for tuples. DatasetError as in `encode`."""
    return json.loads(encode(value))


def decode(data: bytes, name: str, canonical: bool = True) -> Any:
    """The value of JSON bytes that were read from the file `name`.

    Raises DatasetError at invalid UTF-8, duplicate keys, NaN and Infinity, and, with `canonical`,
    at any bytes that `encode` would not have written.
    """
    try:
        # In canonical bytes nothing stands twice, so only other bytes are searched for it.
        text = data.decode("utf-8")
        value = json.loads(text, parse_constant=_no_constant)
        # Also finds what JSON hides in escapes: 1e999 is an infinity, "\ud800" no valid text.
        encoded = encode(value)
        if encoded != data:
            value = json.loads(text, object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError, DatasetError) as error:
        raise DatasetError(f"{name}: not the JSON of a dataset: {error}") from error
    if canonical and encoded != data:
        at = next(
            (i for i, (a, b) in enumerate(zip(encoded, data, strict=False)) if a != b),
            min(len(encoded), len(data)),
        )
        raise DatasetError(
            f"{name}: not in canonical form from byte {at} on; it was edited or damaged after it"
            " was made"
        )
    return value


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """json's object_pairs_hook that refuses a key that stands twice (ValueError)."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} stands twice")
        result[key] = value
    return result


def _no_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not allowed")
