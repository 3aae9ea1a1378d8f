"""Receipts → the manifest. Whoever finds all receipts publishes; until then there is no dataset."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from packprep.building.commit import done_receipt
from packprep.building.job import Job
from packprep.building.ledger import add_ledgers, check, is_ledger
from packprep.building.output import Output
from packprep.building.revocation import remove_note
from packprep.corpus.reading import is_bad
from packprep.dataset.json_files import FORMAT, MANIFEST_NAME, VERSION, as_stored, encode, receipt_name, shard_name
from packprep.dataset.manifest import LATER
from packprep.digests import digest_of, own_digest
from packprep.errors import BuildError

MIN_BAD = 100


def missing_shards(out: Output, plan_digest: str, shards: Sequence[int]) -> list[int]:
    """Those of `shards` that are not done."""
    found = out.each(partial(done_receipt, plan_digest=plan_digest), shards)
    return [b for b, receipt in zip(shards, found, strict=True) if receipt is None]


def publish(out: Output, job: Job) -> dict[str, Any] | None:
    """Write dataset.json if all shards are done; gives the manifest, or None while a shard is missing.

    BuildError if too many documents are bad, or if another manifest stands there already.
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
    _refuse_too_many_bad(out, job, total)
    manifest = make_manifest(job, entries, total)
    data = encode(as_stored(manifest, LATER))
    out.remove_temporaries()
    out.flush()  # those who wrote the shards may have been killed before they had
    if not out.write_first(MANIFEST_NAME, data) and out.read(MANIFEST_NAME) != data:
        raise BuildError(
            f"{out.place(MANIFEST_NAME)} stands there and differs from this build's: begin anew in another folder"
        )
    remove_note(out)
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


def _refuse_too_many_bad(out: Output, job: Job, total: Mapping[str, Any]) -> None:
    read = sum(source["documents"]["read"] for source in total["sources"].values())
    reasons: dict[str, int] = {}
    for source in total["sources"].values():
        for reason, count in source["documents"]["rejected"].items():
            if is_bad(reason):
                reasons[reason] = reasons.get(reason, 0) + count
    bad, fraction = sum(reasons.values()), job.recipe.documents.max_bad_fraction
    if bad > max(MIN_BAD, fraction * read):
        listed = ", ".join(
            f"{reason} {count}" for reason, count in sorted(reasons.items(), key=lambda r: (-r[1], r[0]))
        )
        raise BuildError(
            f"{bad} of {read} documents are bad ({listed}), more than max({MIN_BAD}, documents.max_bad_fraction = {fraction:g}); "
            f"see {out.place('rejects')} for each one's place; mend the inputs and build into another folder, or, if that many "
            "may be left out, begin anew with a higher documents.max_bad_fraction"
        )
