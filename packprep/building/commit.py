"""Commit shards, record them in receipts, and publish the dataset.

A shard is done if (1) its receipt parses, (2) the receipt has the plan's digest, and (3) the shard
and rejects files have the sizes in the receipt. The receipt is written last. If a shard is
committed a second time, only the digests are compared. The process that finds all receipts
publishes the manifest. Without a manifest, the folder is not a dataset.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from packprep.building.ledger import FILTERED, Ledger, add_ledgers, check, is_ledger
from packprep.building.plan import Plan
from packprep.building.removal import REMOVED
from packprep.building.work import OTHER_LENGTH, Made, StoreShard
from packprep.dataset import shard as shard_format
from packprep.dataset.epochs.token_slots import LAYOUTS
from packprep.dataset.manifest import LATER as LATER_IN_MANIFEST
from packprep.dataset.manifest import named_removal
from packprep.dataset.segments import Arrays
from packprep.documents import store
from packprep.documents.reading import is_bad
from packprep.documents.store import STORE
from packprep.errors import BuildError, DatasetError, PackprepError, PlanError
from packprep.format.digests import digest_of, digest_of_buffers, own_digest
from packprep.format.json_files import (
    FIRST_SEEN_NAME,
    FORMAT,
    LAW_VERSION,
    MANIFEST_NAME,
    VERSION,
    Later,
    as_stored,
    decode,
    encode,
    newer_version,
    receipt_name,
    rejects_name,
    shard_name,
    with_defaults,
)
from packprep.format.tokenizer_json import text_of
from packprep.sources.first_look import IN_MESSAGES, advice_on, begin_of
from packprep.storage import Folder
from packprep.storage.local import write_error

Receipt = Mapping[str, Any]
"""The contents of a shard's receipt."""
_RECEIPT_KEYS = {
    "format",
    "version",
    "plan_digest",
    "shard",
    "file",
    "rows",
    "segments",
    "tokens",
    "bytes",
    "digest",
    "rejects",
    "text_digests",
    "ledger",
}
LATER: Later = {"": {}, "rejects": {}}
"""{part of a receipt: {key: default}}, for keys that later versions added."""

MIN_BAD, GOOD_FOR_BAD = 100, 10
"""Up to MIN_BAD bad documents are accepted regardless of their fraction, if at least GOOD_FOR_BAD
times as many documents are used."""
REJECTS_KEYS = {"file", "bytes", "digest", "documents"}


def read_receipt(out: Folder, shard: int) -> tuple[dict[str, Any], bytes] | None:
    """Return a shard's receipt and its raw bytes, or None if the receipt is missing or malformed.

    Raises:
        PlanError: If a newer version wrote the receipt.
        BuildError: If the file cannot be read.
    """
    name = receipt_name(shard)
    try:
        data = out.read(name)
        receipt = decode(data, out.path_of(name))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except DatasetError:
        return None
    except OSError as error:
        raise BuildError(
            f"{out.path_of(name)}: {error.strerror}\n"
            "hint: make it readable, and run the same command again"
        ) from None
    # A file that is not a receipt counts as missing, so that the shard is made again.
    if not isinstance(receipt, dict) or not receipt.keys() >= _RECEIPT_KEYS:
        return None
    if receipt["format"] != FORMAT or receipt["version"] != VERSION or receipt["shard"] != shard:
        return None
    rejects = receipt["rejects"] if isinstance(receipt["rejects"], dict) else {}
    # A complete receipt with further keys is from a newer version. Making its shard again would not
    # help.
    for record, known_keys, later in (
        (receipt, _RECEIPT_KEYS, LATER[""]),
        (rejects, REJECTS_KEYS, LATER["rejects"]),
    ):
        if known_keys <= record.keys() and (unknown := record.keys() - known_keys - later.keys()):
            raise PlanError(f"{out.path_of(name)}: {newer_version(min(unknown))}")
    return with_defaults(receipt, LATER), data


def _can_be_gone_on_with(receipt: dict[str, Any]) -> bool:
    """Return whether the values that publication reads from a receipt have valid types.

    A damaged receipt may still be canonical JSON, so parsing it is not enough.
    """
    rejects = receipt["rejects"]
    return (
        all(
            type(receipt[key]) is int and receipt[key] >= 0
            for key in ("rows", "segments", "tokens", "bytes")
        )
        and (rejects is None or (isinstance(rejects, dict) and rejects.keys() >= REJECTS_KEYS))
        and isinstance(receipt["ledger"], dict)
    )


def done_receipt(
    out: Folder, shard: int, digests: Sequence[str]
) -> tuple[dict[str, Any], bytes] | None:
    """Return a shard's receipt and its raw bytes, or None if the shard is not done.

    `digests` are the results of `plan_digests`. A receipt with another plan digest does not count.
    """
    receipt_and_data = read_receipt(out, shard)
    if receipt_and_data is None or receipt_and_data[0]["plan_digest"] not in digests:
        return None
    receipt = receipt_and_data[0]
    rejects = receipt["rejects"]
    if not _can_be_gone_on_with(receipt):
        return None
    # Sizes find files that a power cut shortened. `verify` compares digests.
    sizes = [(shard_name(shard), receipt["bytes"])] + (
        [(rejects_name(shard), rejects["bytes"])] if rejects else []
    )
    for name, size in sizes:
        if out.size(name) != size:
            return None
    return receipt_and_data


def encode_rejects(shard_data: Made | StoreShard) -> bytes:
    """Return the bytes of a shard's rejects file: one JSON record per line; b"" without rejects."""
    return b"".join(map(encode, shard_data.documents.rejected.records()))


def commit_shard(
    out: Folder, plan: Plan, shard: int, shard_data: Made | StoreShard
) -> dict[str, Any]:
    """Commit the files of a new shard, and return its receipt."""
    documents = shard_data.documents
    rejects = encode_rejects(shard_data), len(documents.rejected)
    return commit_files(
        out, plan, shard, shard_data.arrays, shard_data.ledger, rejects, documents.text_digests
    )


def commit_files(
    out: Folder,
    plan: Plan,
    shard: int,
    arrays: Arrays,
    ledger: Ledger,
    rejects: tuple[bytes, int],
    text_digests: Mapping[str, str],
) -> dict[str, Any]:
    """Write the files of a shard, and return the shard's receipt.

    The order is: the arrays, the rejects, the receipt. If the shard already has the same receipt,
    nothing is written.

    Args:
        out: The output folder.
        plan: The plan.
        shard: Shard number.
        arrays: The shard's arrays.
        ledger: The shard's ledger.
        rejects: (bytes of the rejects file, number of its records).
        text_digests: Source name → digest of the text that the shard has from this source.

    Raises:
        BuildError: If the shard is done with another receipt, or cannot be written.
    """
    try:
        # The receipt is complete before any file is written, so it can be compared with a finished
        # shard's.
        buffers = (store if plan.is_store else shard_format).encode(arrays)
        rows = segments = 0
        if not plan.is_store:
            rows, segments = len(arrays["row_offsets"]) - 1, len(arrays["segment_key"])
        data, count = rejects
        receipt = {
            "format": FORMAT,
            "version": VERSION,
            "plan_digest": plan.digest,
            "shard": shard,
            "file": shard_name(shard),
            "rows": rows,
            "segments": segments,
            "tokens": sum(source["tokens"]["used"] for source in ledger["sources"].values()),
            "bytes": sum(memoryview(buffer).nbytes for buffer in buffers),
            "digest": digest_of_buffers(buffers),
            "rejects": None,
            "text_digests": text_digests,
            "ledger": ledger,
        }
        if data:
            receipt["rejects"] = {
                "file": rejects_name(shard),
                "bytes": len(data),
                "digest": digest_of(data),
                "documents": count,
            }
        # A finished shard with the same receipt stays as it is.
        if _stands(out, plan, receipt):
            return receipt
        # The receipt commits the shard, so the files that it names are written first.
        out.write(shard_name(shard), buffers)
        if data:
            out.write(rejects_name(shard), [data])
        else:
            out.remove(rejects_name(shard))
        _commit_receipt(out, plan, receipt)
        return receipt
    except PackprepError:
        raise
    except OSError as error:
        raise write_error(out.path_of(shard_name(shard)), error) from error


class _Differs(BuildError):
    """An error for a shard that is already done with another receipt."""


def _commit_receipt(out: Folder, plan: Plan, receipt: dict[str, Any]) -> None:
    """Write the receipt of a shard. The other files of the shard were just uploaded.

    If another build has committed the same receipt in the meantime, nothing is written.

    Raises:
        BuildError: If another build has committed a different receipt. Before the error, the shard
            file is removed if it has the bytes of this build. The shard is then missing, and the
            other build can make it again.
    """
    name, data = receipt_name(receipt["shard"]), encode(as_stored(receipt, LATER))
    try:
        if (
            not _stands(out, plan, receipt)
            and not out.create(name, data)
            and not _stands(out, plan, receipt)
        ):
            out.write(name, [data])  # The existing receipt does not belong to this plan.
    except _Differs:
        with contextlib.suppress(OSError, PackprepError):
            if digest_of(out.read(receipt["file"])) == receipt["digest"]:
                out.remove(receipt["file"])
        raise


def _stands(out: Folder, plan: Plan, receipt: dict[str, Any]) -> bool:
    """Return True if the shard already has this receipt, or False if the shard is not done.

    Raises:
        BuildError: If the shard is done with another receipt.
    """
    shard = receipt["shard"]
    standing = done_receipt(out, shard, [plan.digest])
    if standing is not None and standing[0] != receipt:
        raise _Differs(
            f"{shard_name(shard)}: made again with digest {receipt['digest']}, but the finished"
            f" shard has {standing[0]['digest']}. The input files changed during the build, or two"
            " builds differ\n"
            "hint: build into another folder and compare"
        )
    return standing is not None


def missing_shards(out: Folder, digests: Sequence[str], shards: Sequence[int]) -> list[int]:
    """Return the shards that are not done.

    Args:
        out: The output folder.
        digests: The results of `plan_digests`. A receipt with another plan digest does not count.
        shards: The shard numbers to check.
    """
    receipts = out.each(partial(done_receipt, digests=digests), shards)
    return [b for b, receipt in zip(shards, receipts, strict=True) if receipt is None]


def publish(out: Folder, plan: Plan) -> dict[str, Any] | None:
    """Write dataset.json if all shards are done.

    Returns:
        The manifest, or None while a shard is missing.

    Raises:
        BuildError: If every document of a source is rejected, too many documents are bad, no rows
            were made, a receipt is damaged, or the output has a different manifest.
    """
    # Collect the receipts, which have all that the manifest lists. One missing shard ends the
    # publication.
    entries, ledgers = [], []
    sources, tasks = [s.name for s in plan.sources], [t.name for t in plan.tasks]
    for b, receipt_and_data in enumerate(
        out.each(partial(done_receipt, digests=plan.digests), range(plan.shards))
    ):
        if receipt_and_data is None:
            return None
        receipt, data = receipt_and_data
        if not is_ledger(receipt["ledger"], sources, tasks):
            raise BuildError(
                f"{out.path_of(receipt_name(b))}: this receipt has no ledger of this build\n"
                "hint: remove it, and run the command again"
            )
        entry = {key: receipt[key] for key in ("rows", "segments", "tokens", "bytes", "digest")}
        entries.append({"file": shard_name(b), **entry, "receipt_digest": digest_of(data)})
        ledgers.append(receipt["ledger"])
    total = add_ledgers(ledgers)
    check(total, str(out), is_total=True)
    # A published dataset keeps its limit, so that publishing again gives the same bytes.
    plan.max_bad_fraction = _limit_of_published(out, plan)
    _refuse_unused_sources(out, plan, total)
    _refuse_too_many_bad(out, plan, total)
    _refuse_without_rows(out, plan, total)
    manifest = make_manifest(plan, entries, total)
    data = encode(as_stored(manifest, LATER_IN_MANIFEST))
    out.remove_temporaries()
    out.flush()  # A process may have been killed before it flushed its shard.
    if not out.create(MANIFEST_NAME, data) and out.read(MANIFEST_NAME) != data:
        raise BuildError(
            f"{out.path_of(MANIFEST_NAME)} exists and differs from this build's manifest\n"
            "hint: build into another folder"
        )
    if out.exists(FIRST_SEEN_NAME):  # A read-only folder must not be written to without need.
        out.remove(FIRST_SEEN_NAME)
        out.flush()
    return manifest


def _limit_of_published(out: Folder, plan: Plan) -> float:
    """Return the max_bad_fraction of the published dataset in `out`.

    If nothing is published yet, return the plan's max_bad_fraction.
    """
    with contextlib.suppress(OSError, DatasetError):
        published = decode(out.read(MANIFEST_NAME), MANIFEST_NAME)
        limit = published.get("max_bad_fraction") if isinstance(published, dict) else None
        return limit if isinstance(limit, float) else plan.recipe.documents.max_bad_fraction
    return plan.max_bad_fraction


def make_manifest(
    plan: Plan, entries: Sequence[Mapping[str, Any]], total: Ledger
) -> dict[str, Any]:
    """Return the contents of dataset.json as a dict, including the key "digest".

    Args:
        plan: The plan.
        entries: The value of the key "shards": one dict per shard.
        total: The sum of the ledgers of all shards.
    """
    stored, recipe = plan.stored, plan.recipe
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "law_version": LAW_VERSION,
        "seq_length": recipe.seq_length,
        "token_dtype": stored["token_dtype"],
        "vocab_size": plan.vocabulary.vocab_size,
        "pad_id": plan.vocabulary.roles["pad"],
        "specials": {
            **plan.vocabulary.specials(),
            "special_ids": list(plan.vocabulary.special_ids),
        },
        **_continues(plan),
        "added_tokens": list(plan.vocabulary.added_tokens),
        "tokenizer": stored["tokenizer"],
        "plan": {"file": "plan.json", "digest": plan.digest},
        "tasks": stored["tasks"],
        "sources": [
            {"name": source.name, "repeat": source.repeat, "sample": list(source.source.sample)}
            for source in plan.sources
        ],
        "recipe": stored["recipe"],
        "fingerprint": stored["fingerprint"],
        # Keys of later versions are written only where they apply.
        **({"kind": STORE} if plan.is_store else {}),
        **({"removed": named_removal(stored)} if plan.removed_digest else {}),
        **(
            {"max_bad_fraction": limit}
            if (limit := plan.max_bad_fraction) != recipe.documents.max_bad_fraction
            else {}
        ),
        "engine": stored["engine"],
        "made_with": stored["made_with"],
        "shards": list(entries),
        "ledger": total,
    }
    return {**manifest, "digest": own_digest(as_stored(manifest, LATER_IN_MANIFEST))}


def _continues(plan: Plan) -> dict[str, str]:
    """Return {"continues": flags} for the manifest, or {} if no task needs the flags.

    There is one flag per token id. It marks a token that begins inside a UTF-8 character. `text_of`
    encodes the flags as text. Some tasks need the flags for resampling.
    """
    for task in plan.tasks:
        law = LAYOUTS.get(task.objective.name)
        if law and law.whole(task.parameters):
            flags = task.ids.continues
            return {
                "continues": text_of(
                    flags if len(flags) else np.zeros(task.ids.vocab_size, np.uint8)
                )
            }
    return {}


def _refuse_without_rows(out: Folder, plan: Plan, total: Ledger) -> None:
    if total["row_slots"]:
        return
    if any(OTHER_LENGTH in source["documents"]["rejected"] for source in total["sources"].values()):
        other_lengths = [
            length for length in plan.recipe.lengths if length != plan.recipe.seq_length
        ]
        instead = (
            "leave this length out of seq_lengths"
            if len(other_lengths) > 1
            else f"set seq_length = {other_lengths[0]} instead of seq_lengths"
        )
        raise BuildError(
            f"{out}: no document goes into rows of {plan.recipe.seq_length}\n"
            f"hint: {instead}, and build into another folder"
        )
    read = sum(source["documents"]["read"] for source in total["sources"].values())
    why = (
        "none has a trained token"
        if read
        else "sample, where and repeat select none, or the files contain none"
    )
    raise BuildError(
        f"{out}: the dataset would have no rows. {read} documents were read: {why}\n"
        "hint: fix the recipe or the inputs, and build into another folder"
    )


def _refuse_unused_sources(out: Folder, plan: Plan, total: Ledger) -> None:
    """Raise BuildError if a source has documents, but all of them are rejected or filtered."""
    for source in plan.sources:
        documents = total["sources"][source.name]["documents"]
        reasons = documents["rejected"]
        if not documents["read"] and (filtered := documents.get(FILTERED)):
            raise BuildError(
                f"{out}: {source.passes} leaves out all {filtered:,} documents of source"
                f" {source.name!r}\n"
                "hint: correct the expression, and build into another folder"
            )
        if not documents["read"] or documents["used"] or {OTHER_LENGTH, REMOVED} & reasons.keys():
            continue
        # Show a document with the most frequent reason, because it explains most of the rejects.
        main_reason = max(sorted(reasons), key=reasons.__getitem__)
        record = _first_reject(out, plan, source.name, main_reason)
        path, begin = "", b""
        if record is not None:
            i = source.files.names.index(record["file"])
            path = source.path(i)
            with contextlib.suppress(PackprepError):
                begin, _ = begin_of(path, int(source.files.sizes[i]), source.formats[i][1])
        # Special tokens in messages need other advice than those in plain text.
        quoted = (
            main_reason == "special_text"
            and record is not None
            and record["detail"].endswith(" in a message")
        )
        advice = advice_on(IN_MESSAGES if quoted else main_reason, path or "FILE", begin)
        seen = f". {path}: document at {record['position']}: {record['detail']}" if record else ""
        if quoted:
            seen = (
                '. Without documents.special_text = "special", no message may contain the text of a'
                f" special token{seen}"
            )
        raise BuildError(
            f"source {source.name!r}: {documents['read']} documents were read, but none can be used"
            f" ({listed_reasons(reasons)}){seen}\n"
            f"hint: {advice}; or remove the source from the recipe."
            " Then build into another folder"
        )


def _first_reject(out: Folder, plan: Plan, source: str, reason: str) -> dict[str, Any] | None:
    """Return the first recorded reject of a source with this reason, or None."""
    for b in range(plan.shards):
        with contextlib.suppress(OSError, ValueError, DatasetError):
            for line in (
                out.read(rejects_name(b)).splitlines() if out.exists(rejects_name(b)) else ()
            ):
                record = json.loads(line)
                if (record["source"], record["reason"]) == (source, reason):
                    return record
    return None


def listed_reasons(reasons: Mapping[str, int]) -> str:
    """Return the reasons with their counts, most frequent first: "malformed_json 12, empty 1"."""
    return ", ".join(
        f"{reason} {count}"
        for reason, count in sorted(reasons.items(), key=lambda r: (-r[1], r[0]))
    )


def bad_documents(total: Ledger) -> tuple[int, int, dict[str, int]]:
    """Return (documents read, documents used, {reason: number of bad documents}).

    For example (1000, 987, {"malformed_json": 13}). The counts are sums over the ledger's sources.
    A document that was used and later removed counts as used.
    """
    documents = [source["documents"] for source in total["sources"].values()]
    read, used = (sum(source[key] for source in documents) for key in ("read", "used"))
    used += sum(source["rejected"].get(REMOVED, 0) for source in documents)
    reasons: dict[str, int] = {}
    for source in documents:
        for reason, count in source["rejected"].items():
            if is_bad(reason):
                reasons[reason] = reasons.get(reason, 0) + count
    return read, used, reasons


def too_many_bad(bad: int, read: int, used: int, fraction: float) -> bool:
    """Return whether the number of bad documents prevents publication.

    Up to `fraction` · `read` bad documents are accepted. A larger number is accepted if both
    conditions hold: `bad` is at most `MIN_BAD`, and `used` is at least `GOOD_FOR_BAD` · `bad`.

    Args:
        bad: Number of bad documents.
        read: Number of documents read.
        used: Number of documents used.
        fraction: The maximum fraction of documents read that may be bad.
    """
    few = bad <= MIN_BAD and used >= GOOD_FOR_BAD * bad
    return bad > fraction * read and not few


def limit_in_words(bad: int, fraction: float) -> str:
    """Return the limit of bad documents in words: "documents.max_bad_fraction = 0.01 allows".

    Messages write it after "more than". If `bad` is at most `MIN_BAD`, the second limit of
    `too_many_bad` follows in parentheses.
    """
    few = (
        f" (up to {MIN_BAD} are accepted if {GOOD_FOR_BAD} times as many are used)"
        if bad <= MIN_BAD
        else ""
    )
    return f"documents.max_bad_fraction = {fraction:g} allows{few}"


def bad_fault(total: Ledger, fraction: float) -> str:
    """Return a message if a ledger counts too many bad documents, otherwise ""."""
    read, used, reasons = bad_documents(total)
    bad = sum(reasons.values())
    if not too_many_bad(bad, read, used, fraction):
        return ""
    return (
        f"{bad} of {read} documents are bad ({listed_reasons(reasons)}), more than"
        f" {limit_in_words(bad, fraction)}"
    )


def _refuse_too_many_bad(out: Folder, plan: Plan, total: Ledger) -> None:
    if fault := bad_fault(total, plan.max_bad_fraction):
        raise BuildError(
            f"{fault}\n"
            f"hint: {out.path_of('rejects')} lists them. To leave them out, run the same command"
            " with the same --out and a higher documents.max_bad_fraction: finished shards are"
            " kept. Otherwise fix the inputs, and build into another folder"
        )
