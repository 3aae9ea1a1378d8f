"""P1 and P2: the files of a dataset, and what its JSON files say of each other."""

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packprep.building.commit import REJECTS_KEYS, read_receipt
from packprep.building.job import Job
from packprep.building.ledger import imbalances, is_ledger
from packprep.building.output import LocalOutput, Output, RemoteOutput
from packprep.building.publication import make_manifest
from packprep.corpus.readers import count_pieces
from packprep.dataset.json_files import (
    FIRST_SEEN_NAME,
    MANIFEST_NAME,
    PLAN_NAME,
    as_stored,
    decode,
    receipt_name,
    rejects_name,
    shard_name,
)
from packprep.dataset.manifest import LATER
from packprep.dataset.opening import read_file
from packprep.digests import digest_of, digest_of_file, own_digest
from packprep.errors import DatasetError, PlanError
from packprep.recipe import fingerprint, fingerprint_parts
from packprep.verification.report import Faults


def check_manifest_digest(manifest: Mapping[str, Any], faults: Faults) -> None:
    """P1 of dataset.json."""
    own = own_digest(as_stored(manifest, LATER))
    if own != manifest["digest"]:
        faults.add("P1", MANIFEST_NAME, f"its digest is {own}", value=manifest["digest"])


def check_foundations(directory: Path, manifest: Mapping[str, Any], faults: Faults) -> bool:
    """P1 of plan.json and tokenizer.json, and whether they are sound: all else is recomputed from them."""
    before = faults.total
    for key in ("plan", "tokenizer"):
        name, digest = manifest[key]["file"], manifest[key]["digest"]
        try:
            found = digest_of_file(directory / name)
        except OSError as error:
            faults.add("P1", name, f"cannot be read: {error.strerror}")
            continue
        if found != digest:
            faults.add("P1", name, f"its digest is {found}; no shard can be checked without it", value=digest)
    return faults.total == before


def check_manifest(job: Job, manifest: Mapping[str, Any], faults: Faults) -> None:
    """P2 of dataset.json and plan.json: the one says what the other says, which is what was fingerprinted."""
    expected = make_manifest(job, manifest["shards"], manifest["ledger"])
    for key, value in manifest.items():
        if key not in ("plan", "digest") and value != expected[key]:
            faults.add("P2", MANIFEST_NAME, f"{key} is not the plan's")
    files = [[(file.name, file.size) for file in source.files] for source in job.sources]
    parts = fingerprint_parts(job.recipe, files, job.plan["tokenizer"]["digest"], job.plan["chat_template"], job.law)
    if fingerprint(parts) != job.plan["fingerprint"]:
        faults.add("P2", PLAN_NAME, "its fingerprint is not that of its recipe, files and tokenizer")
    for source in job.sources:
        for file, (format, compression) in zip(source.files, source.formats, strict=True):
            if format in ("jsonl", "text") and file.pieces != count_pieces("", format, compression, file.size):
                faults.add("P2", PLAN_NAME, f"{file.name} has not so many pieces", value=file.pieces)
    if len(manifest["shards"]) != job.shards:
        faults.add("P2", MANIFEST_NAME, f"it lists {len(manifest['shards'])} shards and the plan has {job.shards}")


def _named(manifest: Mapping[str, Any]) -> set[str]:
    """The files that a dataset may have."""
    named = {MANIFEST_NAME, manifest["plan"]["file"], manifest["tokenizer"]["file"]}
    named.add(FIRST_SEEN_NAME)  # where publication was ended before it removed that
    for b in range(len(manifest["shards"])):
        named |= {shard_name(b), receipt_name(b), rejects_name(b)}
    return named


def check_objects(out: RemoteOutput, manifest: Mapping[str, Any], faults: Faults) -> None:
    """P1 on object storage: there is no object below the URL that the dataset does not name."""
    named = _named(manifest)
    for name, _ in out.remote.list():
        if name not in named:
            faults.add("P1", _readable(name), "belongs to no dataset: remove it")


def check_listing(directory: Path, manifest: Mapping[str, Any], faults: Faults) -> None:
    """P1: nothing lies in the directory that the dataset does not name."""
    named = _named(manifest)

    def unreadable(error: OSError) -> None:
        faults.add("P1", _readable(os.path.relpath(error.filename, directory)), f"cannot be listed: {error.strerror}")

    for folder, folders, names in os.walk(directory, onerror=unreadable):
        if not folders and not names:
            path = os.path.relpath(folder, directory)
            faults.add("P1", _readable(path), "is an empty folder: remove it")
        for name in sorted(names) + sorted(n for n in folders if os.path.islink(os.path.join(folder, n))):
            path = os.path.relpath(os.path.join(folder, name), directory)
            if os.path.islink(os.path.join(folder, name)):
                faults.add("P1", _readable(path), "is a symbolic link; a dataset has none")
            elif path not in named:
                faults.add(
                    "P1",
                    _readable(path),
                    "belongs to no dataset: remove it, or it is a leftover of a build that was killed",
                )


def _readable(path: str) -> str:
    """The path as text that can be printed, whatever bytes its name has."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def check_shard_files(
    directory: Path, shard: int, entry: Mapping[str, Any], plan_digest: str, job: Job, faults: Faults
) -> tuple[bool, dict[str, Any] | None]:
    """P1, P2 and the ledger's P16 of one shard, its receipt and its rejects.

    Gives (whether the shard's file is there, the receipt if it is sound).
    """
    there = _check_file(directory, shard_name(shard), entry, faults)
    name = receipt_name(shard)
    try:
        found = read_receipt(LocalOutput(directory), shard)
    except PlanError as error:
        faults.add("P1", name, str(error))
        return there, None
    if found is None:
        faults.add("P1", name, "is missing or no receipt")
        return there, None
    receipt, data = found
    if digest_of(data) != entry["receipt_digest"]:
        faults.add("P1", name, f"its digest is {digest_of(data)}", value=entry["receipt_digest"])
        return there, None
    if receipt["plan_digest"] != plan_digest:
        faults.add("P2", name, "it is of another plan", value=receipt["plan_digest"])
    for key in ("file", "rows", "segments", "tokens", "bytes", "digest"):
        if receipt[key] != entry[key]:
            faults.add("P2", name, f"{key} is not the manifest's {entry[key]!r}", value=receipt[key])
    try:
        sound = is_ledger(receipt["ledger"], [s.name for s in job.sources], [t.name for t in job.tasks])
    except PlanError as error:
        faults.add("P16", name, str(error))
        return there, None
    if not sound:
        faults.add("P16", name, "its ledger has not the keys and counts of a ledger")
        return there, None
    if not _is_sound(receipt, job):
        faults.add("P2", name, "its rejects or text_digests have not the keys and values of a receipt")
        return there, None
    for wrong in imbalances(receipt["ledger"]):
        faults.add("P16", name, wrong)
    _check_rejects(directory, shard, receipt, faults)
    return there, receipt


def _is_sound(receipt: Mapping[str, Any], job: Job) -> bool:
    """Whether the nested parts of a receipt, but for its ledger, can be read."""
    rejects, texts = receipt["rejects"], receipt["text_digests"]
    return (
        (rejects is None or (isinstance(rejects, dict) and rejects.keys() >= REJECTS_KEYS))
        and isinstance(texts, dict)
        and texts.keys() == {source.name for source in job.sources}
    )


def _check_rejects(directory: Path, shard: int, receipt: Mapping[str, Any], faults: Faults) -> None:
    """P1 of a rejects file, and P16: it has the documents that the ledger counts as rejected."""
    name, rejects = rejects_name(shard), receipt["rejects"]
    path = directory / name
    counted = {
        (source, reason): count
        for source, entry in receipt["ledger"]["sources"].items()
        for reason, count in entry["documents"]["rejected"].items()
    }
    listed: dict[tuple[str, str], int] = {}
    if rejects is None:
        if path.exists():
            faults.add("P1", name, "the receipt names no rejects, and there is a file of them")
            return
    else:
        if not _check_file(directory, name, rejects, faults):
            return
        try:
            for line in read_file(path).splitlines(keepends=True):
                record = decode(line, name)
                place = (record["source"], record["reason"])
                listed[place] = listed.get(place, 0) + 1
        except (DatasetError, LookupError, TypeError):
            faults.add("P2", name, "is no list of rejects")
            return
        if rejects["documents"] != sum(listed.values()):
            faults.add("P2", name, f"it lists {sum(listed.values())} documents", value=rejects["documents"])
    if listed != counted:
        faults.add("P16", receipt_name(shard), "the ledger's rejects are not those that the rejects file lists")


def _check_file(directory: Path, name: str, entry: Mapping[str, Any], faults: Faults) -> bool:
    """P1 of one file: its size and digest. Whether it can be read."""
    path = directory / name
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            faults.add("P1", name, f"it has {size} bytes", value=entry["bytes"])
            return path.is_file()
        digest = digest_of_file(path)
    except OSError as error:
        faults.add("P1", name, f"cannot be read: {error.strerror}")
        return False
    if digest != entry["digest"]:
        faults.add("P1", name, f"its digest is {digest}", value=entry["digest"])
    return True


def sound_ledgers(out: Output, manifest: Mapping[str, Any], job: Job, shards: Iterable[int]) -> list[dict[str, Any]]:
    """The ledgers of these shards' receipts, of those that are sound; the others are somebody's to report."""
    sources, tasks = [s.name for s in job.sources], [t.name for t in job.tasks]
    ledgers: list[dict[str, Any]] = []
    for b in shards:
        with contextlib.suppress(PlanError):
            found = read_receipt(out, b)
            if found and digest_of(found[1]) == manifest["shards"][b]["receipt_digest"]:
                ledgers += [found[0]["ledger"]] if is_ledger(found[0]["ledger"], sources, tasks) else []
    return ledgers


def check_sum(manifest: Mapping[str, Any], total: Mapping[str, Any], faults: Faults) -> None:
    """P16: the manifest's ledger is the sum of the receipts', each of which balances."""
    if total != manifest["ledger"]:
        faults.add("P16", MANIFEST_NAME, "its ledger is not the sum of the receipts' ledgers")
