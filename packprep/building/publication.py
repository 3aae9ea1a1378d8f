"""Receipts → the manifest. Whoever finds all receipts publishes; until then there is no dataset."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from packprep.building.commit import done_receipt
from packprep.building.job import Job
from packprep.building.ledger import add_ledgers, check, is_ledger
from packprep.building.output import Output
from packprep.building.revocation import remove_note
from packprep.corpus.first_look import advice_on, begin_of
from packprep.corpus.reading import is_bad
from packprep.dataset.json_files import (
    FIRST_SEEN_NAME,
    FORMAT,
    MANIFEST_NAME,
    VERSION,
    as_stored,
    encode,
    receipt_name,
    rejects_name,
    shard_name,
)
from packprep.dataset.manifest import LATER
from packprep.digests import digest_of, own_digest
from packprep.errors import BuildError, DatasetError, PackprepError

MIN_BAD, GOOD_FOR_BAD = 100, 10
"""Bad documents that are let pass whatever their part is, and how many times as many have to be used for that."""


def missing_shards(out: Output, plan_digest: str, shards: Sequence[int]) -> list[int]:
    """Those of `shards` that are not done."""
    found = out.each(partial(done_receipt, plan_digest=plan_digest), shards)
    return [b for b, receipt in zip(shards, found, strict=True) if receipt is None]


def publish(out: Output, job: Job) -> dict[str, Any] | None:
    """Write dataset.json if all shards are done; gives the manifest, or None while a shard is missing.

    BuildError if a source's documents are all left out, too many are bad, there are no rows, or another manifest stands there.
    """
    entries, ledgers = [], []
    sources, tasks = [s.name for s in job.sources], [t.name for t in job.tasks]
    for b, found in enumerate(out.each(partial(done_receipt, plan_digest=job.digest), range(job.shards))):
        if found is None:
            return None
        receipt, data = found
        if not is_ledger(receipt["ledger"], sources, tasks):
            raise BuildError(
                f"{out.place(receipt_name(b))}: it has no ledger of this build: remove it, and run the command again"
            )
        entry = {key: receipt[key] for key in ("rows", "segments", "tokens", "bytes", "digest")}
        entries.append({"file": shard_name(b), **entry, "receipt_digest": digest_of(data)})
        ledgers.append(receipt["ledger"])
    total = add_ledgers(ledgers)
    check(total, str(out))
    _refuse_unused_sources(out, job, total)
    _refuse_too_many_bad(out, job, total)
    _refuse_without_rows(out, total)
    manifest = make_manifest(job, entries, total)
    data = encode(as_stored(manifest, LATER))
    out.remove_temporaries()
    out.flush()  # those who wrote the shards may have been killed before they had
    if not out.write_first(MANIFEST_NAME, data) and out.read(MANIFEST_NAME) != data:
        raise BuildError(
            f"{out.place(MANIFEST_NAME)} stands there and differs from this build's: begin anew in another folder"
        )
    remove_note(out)
    if out.exists(FIRST_SEEN_NAME):  # else nothing is asked of a folder that can only be read
        out.remove(FIRST_SEEN_NAME)
        out.flush()
    return manifest


def make_manifest(job: Job, entries: Sequence[Mapping[str, Any]], total: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest as values, with its digest."""
    plan, recipe = job.plan, job.recipe
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "law_version": job.law,
        "seq_length": recipe.seq_length,
        "token_dtype": plan["token_dtype"],
        "vocab_size": job.vocabulary.vocab_size,
        "pad_id": job.vocabulary.roles["pad"],
        "specials": {**job.vocabulary.specials(), "special_ids": list(job.vocabulary.special_ids)},
        "added_tokens": list(job.vocabulary.added_tokens),
        "tokenizer": plan["tokenizer"],
        "plan": {"file": "plan.json", "digest": job.digest},
        "tasks": plan["tasks"],
        "sources": [
            {"name": source.name, "repeat": source.repeat, "sample": list(source.source.sample)}
            for source in job.sources
        ],
        "recipe": plan["recipe"],
        "fingerprint": plan["fingerprint"],
        "engine": plan["engine"],
        "made_with": plan["made_with"],
        "shards": list(entries),
        "ledger": total,
    }
    return {**manifest, "digest": own_digest(as_stored(manifest, LATER))}


def _refuse_without_rows(out: Output, total: Mapping[str, Any]) -> None:
    if total["rows"]:
        return
    read = sum(source["documents"]["read"] for source in total["sources"].values())
    why = (
        "none has a token that is trained" if read else "sample and repeat keep none of so few, or the files hold none"
    )
    raise BuildError(
        f"{out}: the dataset would have no rows: {read} documents were read; {why}. Mend the recipe or the inputs, and "
        "build into another folder"
    )


def _refuse_unused_sources(out: Output, job: Job, total: Mapping[str, Any]) -> None:
    """BuildError for a source of which documents were read and none is used."""
    for source in job.sources:
        documents = total["sources"][source.name]["documents"]
        if not documents["read"] or documents["used"]:
            continue
        reasons = documents["rejected"]
        most = max(sorted(reasons), key=reasons.__getitem__)
        record = _first_reject(out, job, source.name, most)
        path, begin = "", b""
        if record is not None:
            i = source.files.names.index(record["file"])
            path = source.path(i)
            with contextlib.suppress(PackprepError):
                begin, _ = begin_of(path, int(source.files.sizes[i]), source.formats[i][1])
        advice = advice_on(most, path or "FILE", begin)
        seen = f"; {path}: document at {record['position']}: {record['detail']}" if record else ""
        raise BuildError(
            f"source {source.name!r}: {documents['read']} documents were read and none can be used ({_listed(reasons)})"
            f"{seen}. {advice[0].upper()}{advice[1:]}; or take the source out of the recipe. Then build into another folder"
        )


def _first_reject(out: Output, job: Job, source: str, reason: str) -> dict[str, Any] | None:
    """The first reject of a source with this reason; None where the file cannot be read."""
    for b in range(job.shards):
        with contextlib.suppress(OSError, ValueError, DatasetError):
            for line in out.read(rejects_name(b)).splitlines() if out.exists(rejects_name(b)) else ():
                record = json.loads(line)
                if (record["source"], record["reason"]) == (source, reason):
                    return record
    return None


def _listed(reasons: Mapping[str, int]) -> str:
    """As in "malformed_json 12, empty 1"."""
    return ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items(), key=lambda r: (-r[1], r[0])))


def bad_documents(total: Mapping[str, Any]) -> tuple[int, int, dict[str, int]]:
    """(documents read, those used, reason → how many are bad) of a ledger."""
    documents = [source["documents"] for source in total["sources"].values()]
    read, used = (sum(source[key] for source in documents) for key in ("read", "used"))
    reasons: dict[str, int] = {}
    for source in documents:
        for reason, count in source["rejected"].items():
            if is_bad(reason):
                reasons[reason] = reasons.get(reason, 0) + count
    return read, used, reasons


def too_many_bad(bad: int, read: int, used: int, fraction: float, law: int) -> bool:
    """Whether so many documents are bad that nothing is published. Under law 1 few passed whatever was used beside them."""
    few = bad <= MIN_BAD and (law == 1 or used >= GOOD_FOR_BAD * bad)
    return bad > fraction * read and not few


def _refuse_too_many_bad(out: Output, job: Job, total: Mapping[str, Any]) -> None:
    read, used, reasons = bad_documents(total)
    bad, fraction = sum(reasons.values()), job.recipe.documents.max_bad_fraction
    if too_many_bad(bad, read, used, fraction, job.law):
        limit = f"documents.max_bad_fraction = {fraction:g} of them"
        few = f", and {MIN_BAD} are let pass only where {GOOD_FOR_BAD} times as many are used" if bad <= MIN_BAD else ""
        raise BuildError(
            f"{bad} of {read} documents are bad ({_listed(reasons)}), more than {limit}{few}; "
            f"see {out.place('rejects')} for each one's place; mend the inputs, or, if that many may be left out, set a higher "
            "documents.max_bad_fraction. The limit is part of the recipe: build into another folder"
        )
