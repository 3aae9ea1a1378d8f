"""Read and write the JSON files of a dataset, and define their names and versions.

Canonical JSON is the result of `json.dumps(…, sort_keys=True, separators=(",", ":"),
ensure_ascii=False)` in UTF-8, and one newline. Manifests, plans and receipts are decoded here, so
that a changed byte in any of them is refused in the same way.

A key that a later version added is written only if its value differs from its default. If such a
key is missing, its default applies. Existing files therefore stay valid.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from packprep.errors import DatasetError
from packprep.forking import unforked

FORMAT = "packprep"
VERSION = 1  # The version of the format on disk.
# The version of all rules that determine the bytes of a dataset. It rises whenever bytes change.
LAW_VERSION = 3

MANIFEST_NAME = "dataset.json"
MIXTURE_NAME = "mixture.json"
PLAN_NAME = "plan.json"
TOKENIZER_NAME = "tokenizer.json"
REMOVED_NAME = "removed.json"  # The removed documents, if there are any.
# A file of an unpublished build. It does not belong to the dataset.
FIRST_SEEN_NAME = "first-seen.json"


def shard_name(shard: int) -> str:
    """Return the relative path of a shard, such as shards/000/000012.safetensors for shard 12.

    The folder is the shard number div 1000.
    """
    return f"shards/{shard // 1000:03d}/{shard:06d}.safetensors"


def receipt_name(shard: int) -> str:
    """Return the relative path of a shard's receipt, such as receipts/000/000012.json."""
    return f"receipts/{shard // 1000:03d}/{shard:06d}.json"


def rejects_name(shard: int) -> str:
    """Return the relative path of a shard's rejects, such as rejects/000/000012.jsonl."""
    return f"rejects/{shard // 1000:03d}/{shard:06d}.jsonl"


Later: TypeAlias = Mapping[str, Mapping[str, Any]]
"""{part of a file: {key: default}}, for keys that later versions added to the file.

The part "" is the outer object. The part NAME is the object at key NAME, or each object of the list
at key NAME.
"""


def with_defaults(value: Mapping[str, Any], later: Later) -> dict[str, Any]:
    """Return the values of a file. Missing keys that `later` lists get their defaults."""
    return _each(value, later, lambda entry, defaults: {**defaults, **entry})


def as_stored(value: Mapping[str, Any], later: Later) -> dict[str, Any]:
    """Return the values of a file as they are written.

    Keys that `later` lists are left out if their values are the defaults.
    """
    return _each(
        value,
        later,
        lambda entry, defaults: {
            k: v for k, v in entry.items() if k not in defaults or v != defaults[k]
        },
    )


def _each(
    value: Mapping[str, Any],
    later: Later,
    change: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]],
) -> dict[str, Any]:
    changed = change(value, later.get("", {}))
    for name, defaults in later.items():
        section = changed.get(name) if defaults else None
        if isinstance(section, list | tuple):
            changed[name] = [
                change(entry, defaults) if isinstance(entry, dict) else entry for entry in section
            ]
        elif isinstance(section, dict):
            changed[name] = change(section, defaults)
    return changed


def unknown_key(key: str, made_with: Any) -> str:
    """Return a message, with a hint, that this version of packprep does not know a key of a file.

    The caller puts the name of the file before the message. `made_with` has the versions of the
    packages that wrote the file.
    """
    own_version, maker_version = _version(), _maker(made_with)
    if maker_version in (own_version, None):
        return (
            f"unknown key {key!r}\n"
            "hint: put the file back as it was, or use the packprep that wrote it"
        )
    return (
        f"key {key!r} is unknown to packprep {own_version}; packprep {maker_version} wrote it\n"
        "hint: use that version or a newer one"
    )


def other_law(law: int, made_with: Any) -> str:
    """Return a message, with a hint, that a file has another law_version.

    The caller puts the name of the file before the message. `made_with` has the versions of the
    packages that wrote the file.
    """
    if law < LAW_VERSION:
        return (
            f"was built by a pre-release version of packprep (law_version {law})\n"
            "hint: build it again"
        )
    maker_version = _maker(made_with)
    maker = f"packprep {maker_version}" if maker_version else "another packprep"
    return (
        f"has law_version {law} and this packprep makes {LAW_VERSION}\nhint: use {maker}, which"
        " made it"
    )


def newer_version(key: str) -> str:
    """Return a message, with a hint, that a newer version of packprep wrote a key of a file.

    The caller puts the name of the file before the message. The file does not say which version
    wrote it.
    """
    return (
        f"key {key!r} is unknown to packprep {_version()}, because a newer version wrote it\n"
        "hint: use the newer version"
    )


def _version() -> str:
    with unforked():
        # The import is here because it takes long.
        from importlib.metadata import PackageNotFoundError, version

    try:
        return version("packprep")
    except PackageNotFoundError:
        return "of this folder"


def _maker(made_with: Any) -> str | None:
    version = made_with.get("packprep") if isinstance(made_with, dict) else None
    return version if isinstance(version, str) else None


def encode(value: Any) -> bytes:
    """Return the canonical JSON of a value and a newline.

    Raises:
        DatasetError: If the value has NaN, Infinity, or text that is not valid UTF-8.
    """
    try:
        text = json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
        return text.encode("utf-8") + b"\n"
    # This includes UnicodeEncodeError.
    except ValueError as error:
        raise DatasetError(f"not representable as canonical JSON: {error}") from error


def json_value(value: Any) -> Any:
    """Return a value as it is after it was written as JSON and read again: tuples become lists.

    Raises:
        DatasetError: If `encode` cannot write the value.
    """
    return json.loads(encode(value))


def decode(data: bytes, name: str, canonical: bool = True) -> Any:
    """Parse the JSON of a file.

    Args:
        data: The bytes of the file.
        name: The name of the file, for messages.
        canonical: True to refuse bytes that differ from the output of `encode` for the value.

    Returns:
        The value.

    Raises:
        DatasetError: If the bytes have invalid UTF-8, duplicate keys, NaN or Infinity, or are not
            canonical.
    """
    try:
        # Canonical bytes have no duplicate keys, so only other bytes are searched for them.
        text = data.decode("utf-8")
        value = json.loads(text, parse_constant=_no_constant)
        # Encoding also finds invalid values in escapes: 1e999 is an infinity, "\ud800" is not valid
        # text.
        encoded = encode(value)
        if encoded != data:
            value = json.loads(text, object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError, DatasetError) as error:
        raise DatasetError(f"{name}: invalid JSON for a dataset: {error}") from error
    if canonical and encoded != data:
        first_difference = next(
            (i for i, (a, b) in enumerate(zip(encoded, data, strict=False)) if a != b),
            min(len(encoded), len(data)),
        )
        raise DatasetError(
            f"{name}: not in canonical form from byte {first_difference} on. It was edited or"
            " damaged after it was written"
        )
    return value


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict of (key, value) pairs, and refuse duplicate keys.

    `decode` passes this function to json as `object_pairs_hook`.

    Raises:
        ValueError: If a key occurs twice.
    """
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} occurs twice")
        result[key] = value
    return result


def _no_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not allowed")
