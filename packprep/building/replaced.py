"""The plans of datasets that lost documents since: of each that another replaces, as they follow
from what stands there."""

from collections.abc import Mapping
from typing import Any

from packprep.building.plan import Plan
from packprep.building.plan_form import LATER
from packprep.dataset.manifest import replaced
from packprep.format.digests import digest_of, own_digest
from packprep.format.json_files import as_stored, encode
from packprep.recipe import fingerprint


def plan_digest_of(stored: Mapping[str, Any], digest: str, shard: int) -> str:
    """Return the digest of the plan by which a shard was made: this one's, or that of the dataset
    since which it lost nothing.

    digest: of the plan `stored`.
    """
    later = digest
    for entry in reversed(replaced(stored)):
        if f"{shard}" in entry["shards"]:
            break
        later = entry["plan"]
    return later


def with_removed(
    stored: Mapping[str, Any], plan: Plan, removed: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return a stored plan whose dataset has lost other documents and is otherwise the same.

    plan: made of `stored`. removed: the digest of removed.json and what is replaced; None where no
    document was removed.
    """
    files = [[(file.name, file.size) for file in source.files] for source in plan.sources]
    kept = {key: value for key, value in stored.items() if key != "digest"}
    digest = None if removed is None else removed["digest"]
    own = fingerprint(
        plan.recipe, files, stored["tokenizer"]["digest"], stored["chat_template"], digest
    )
    made = {**kept, "fingerprint": own, "removed": removed}
    return {**made, "digest": own_digest(as_stored(made, LATER))}


def plan_replaced(stored: Mapping[str, Any], plan: Plan, number: int) -> tuple[str, str]:
    """Return the fingerprint and the plan's digest of a dataset that this one replaces, as they
    follow from its own plan.

    Documents that were removed change nothing else in a plan. number: its place in `replaced`.
    """
    entries = replaced(stored)
    digest = entries[number].get("removed")
    before = {"digest": digest, "replaces": entries[:number]} if digest else None
    again = with_removed(stored, plan, before)
    return again["fingerprint"], digest_of(encode(as_stored(again, LATER)))
