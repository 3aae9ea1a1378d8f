"""Declare the schema of plan.json: its keys, their types and ranges, and how values must agree.

`check_plan` applies the schema before anything is computed, opened or allocated from a plan.
"""

from bisect import bisect_left
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from packprep.documents.store import STORE, wrong_estimates
from packprep.errors import PlanError
from packprep.format.json_files import LAW_VERSION, Later, other_law, unknown_key
from packprep.sources.slices import IN_STORE, MOST_PIECES

MOST_SHARDS = 1 << 20
"""Maximum number of shards, because a status report checks each of them."""
MOST_USES = 1 << 16
"""Maximum number of passes over a source, because segment_repeat is 16-bit."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Positive = Annotated[int, msgspec.Meta(gt=0, lt=1 << 62)]
Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
IdOrNone = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
Text = Annotated[str, msgspec.Meta(pattern=r"^[^\x00]*\Z")]
RelativeName = Annotated[str, msgspec.Meta(pattern=r"^(?!/)(?!(?s:.*/)?\.\.(?:/|\Z))[^\x00]+\Z")]
"""A relative path that stays inside the folder that it is relative to."""


class _Part(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    """A part of a plan. `LATER` has the defaults of the keys that older plans lack."""


class EngineForm(_Part):
    """The name and version of the engine.

    `reference` is the version of the reference engine that the engine was compared with.
    """

    name: Text
    version: Text
    reference: Text | msgspec.UnsetType = msgspec.UNSET


class TokenizerForm(_Part):
    """The tokenizer file next to the plan."""

    file: Literal["tokenizer.json"]
    digest: Digest


class BesideForm(_Part):
    """A file next to the tokenizer, such as tokenizer_config.json.

    `roles` maps each special token that the file declares to its text: {"eos": "</s>"}. If the file
    declares null for a token, its text is None.
    """

    file: RelativeName
    digest: Digest
    roles: dict[str, Text | None]


class VocabularyForm(_Part):
    """The resolved ids of special tokens, and the vocabulary's size and added tokens."""

    vocab_size: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
    roles: dict[str, Id]
    sentinels: list[Id]
    mode_tokens: dict[str, Id]
    added_tokens: list[Any]
    special_ids: list[Id]
    media: dict[str, tuple[IdOrNone, Id, IdOrNone]] | None = None


class SourceForm(_Part):
    """A source and the estimates from its sample."""

    name: Text
    prefix: Text
    repeat: Annotated[float, msgspec.Meta(gt=0, le=MOST_USES)]
    ratios: dict[str, Id]
    step_bytes: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
    text_bytes: Count
    tokens: Count
    documents: Count
    relative_error: float | None
    tokens_per_byte: Annotated[float, msgspec.Meta(gt=0, lt=1 << 31)] | None = None
    estimates: list[dict[str, Any]] | None = None
    patterns: Annotated[list[RelativeName], msgspec.Meta(min_length=1)] | None = None
    store: Digest | None = None
    pass_shares: list[Annotated[float, msgspec.Meta(ge=0, le=1)]] | None = None


class FileForm(_Part):
    """An input file of the source with index `source`."""

    source: Count
    name: RelativeName
    size: Count
    pieces: Count
    piece_bytes: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 47)]] | None = None


class ReplacedForm(_Part):
    """An earlier version of this dataset, before documents were removed.

    `fingerprint` is the fingerprint of the earlier dataset. `digest`, `plan` and `removed` are the
    digests of its manifest, its plan and its removed.json. `removed` is None if the earlier
    dataset had no removed.json. `ledger` is the ledger of its manifest. `shards` maps a shard
    number to the shard's entry in this manifest, and lists only the shards that lost documents in
    the removal after this version.
    """

    fingerprint: Digest
    digest: Digest
    plan: Digest
    ledger: dict[str, Any]
    shards: dict[str, dict[str, Any]]
    removed: Digest | None = None


class RemovedForm(_Part):
    """The digest of removed.json, and the dataset's state before each removal, oldest first."""

    digest: Digest
    replaces: list[ReplacedForm]


class PlanForm(_Part):
    """A plan.

    This schema does not check the contents of `recipe` and `tasks`. The code that reads them does.
    """

    format: Literal["packprep"]
    version: Literal[1]
    law_version: Positive
    fingerprint: Digest
    recipe: dict[str, Any]
    engine: EngineForm
    made_with: dict[str, Text]
    tokenizer: TokenizerForm
    vocabulary: VocabularyForm
    chat_template: str | None
    token_dtype: Literal["uint16", "int32"]
    tasks: list[Any]
    shards: Annotated[int, msgspec.Meta(gt=0, le=MOST_SHARDS)]
    shard_text_bytes: Positive
    sources: list[SourceForm]
    files: list[FileForm]
    digest: Digest
    beside_tokenizer: list[BesideForm] | None = None
    kind: Literal["dataset", "store"] = "dataset"
    removed: RemovedForm | None = None
    has_chats: bool = False  # If True, automatic shards are smaller, as templates render slowly.


_PARTS: dict[str, type[_Part]] = {
    "": PlanForm,
    "vocabulary": VocabularyForm,
    "sources": SourceForm,
    "files": FileForm,
}


def _later(form: type[_Part]) -> dict[str, Any]:
    return {
        field.name: field.default
        for field in msgspec.structs.fields(form)
        if field.default is not msgspec.NODEFAULT
    }


LATER: Later = {part: _later(form) for part, form in _PARTS.items()}
"""{part of a plan: {key: default}}, for keys that later versions added.

With its default, a key does not change the meaning of older plans.
"""
_RESTORE = "hint: restore the file, or build into another folder"


def check_plan(plan: Mapping[str, Any], where: str) -> PlanForm:
    """Check the values of a plan, and return them as a `PlanForm`.

    `where` is the name of the plan's file, for messages.

    Raises:
        PlanError: If a key is unknown or missing, has an invalid value, or contradicts another key.
    """
    made_with, law = plan.get("made_with"), plan.get("law_version")
    if type(law) is int and 0 < law != LAW_VERSION:
        raise PlanError(f"{where} {other_law(law, made_with)}")
    try:
        form = msgspec.convert(plan, PlanForm)
    except msgspec.ValidationError as error:
        why = _wrong_key(plan, made_with) or f"{error}\n{_RESTORE}"
        raise PlanError(f"{where}: {why}") from None
    if why := _disagreement(form):
        raise PlanError(f"{where}: {why}\n{_RESTORE}")
    return form


def _wrong_key(plan: Mapping[str, Any], made_with: Any) -> str:
    """Return a message with a remedy if a plan has an unknown or missing key; otherwise ""."""
    # Name an unknown or missing key before a wrong value, because such a key shows another version.
    parts: list[tuple[str, Any]] = [("", plan)]
    for name in list(_PARTS)[1:]:
        values = plan.get(name)
        if isinstance(values, list):
            parts += [(f"{name}[{i}]: ", value) for i, value in enumerate(values)]
        else:
            parts.append((f"{name}: ", values))
    for place, value in parts:
        # The place "sources[3]: " belongs to the part "sources" of _PARTS.
        name = place.partition("[")[0].rstrip(": ")
        known_keys = {field.name for field in msgspec.structs.fields(_PARTS[name])}
        if isinstance(value, Mapping) and value.keys() - known_keys:
            return place + unknown_key(min(value.keys() - known_keys), made_with)
        if isinstance(value, Mapping) and (
            missing := known_keys - value.keys() - LATER[name].keys()
        ):
            return f"{place}key {min(missing)!r} is missing\n{_RESTORE}"
    return ""


def _disagreement(plan: PlanForm) -> str:
    """Return a message if values of a plan contradict each other; otherwise ""."""
    vocabulary, last_source = plan.vocabulary, 0
    ids = [
        *vocabulary.roles.values(),
        *vocabulary.sentinels,
        *vocabulary.mode_tokens.values(),
        *vocabulary.special_ids,
    ]
    ids += [id for of_kind in (vocabulary.media or {}).values() for id in of_kind]
    if "pad" not in vocabulary.roles:
        return "vocabulary: roles has no pad"
    if max(ids) >= vocabulary.vocab_size:
        return f"vocabulary: an id is not below vocab_size {vocabulary.vocab_size}"
    if plan.token_dtype == "uint16" and vocabulary.vocab_size > 1 << 16:
        return f"vocab_size {vocabulary.vocab_size} does not fit token_dtype uint16"
    # Readers find the files of a source by bisection, so files must be in the order of sources.
    for i, file in enumerate(plan.files):
        if file.piece_bytes is not None and len(file.piece_bytes) != file.pieces:
            return f"files[{i}]: piece_bytes does not match its {file.pieces} splits"
        if not last_source <= file.source < len(plan.sources):
            return f"files[{i}]: source {file.source} does not exist or is out of order"
        last_source = file.source
    for i, source in enumerate(plan.sources):
        if source.store is not None and not source.prefix.startswith(IN_STORE):
            return (
                f"sources[{i}]: store is a token store's digest, but prefix does not name a store"
            )
        # A store keeps estimates for later datasets. They must match the number and splits of its
        # files.
        begin, end = (bisect_left(plan.files, n, key=lambda file: file.source) for n in (i, i + 1))
        if plan.kind == STORE and (why := wrong_estimates(source.estimates, plan.files[begin:end])):
            return f"sources[{i}]: estimates: {why}"
    if sum(file.pieces for file in plan.files) > MOST_PIECES:
        return f"files: more than {MOST_PIECES} splits, the maximum of a corpus"
    return ""
