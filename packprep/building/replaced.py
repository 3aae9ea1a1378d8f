"""Compute the plans that a dataset had before documents were removed, from its current plan."""

from collections.abc import Mapping
from typing import Any

from packprep.building.plan import Plan
from packprep.building.plan_form import LATER
from packprep.dataset.manifest import replaced
from packprep.format.digests import digest_of, own_digest
from packprep.format.json_files import as_stored, encode
from packprep.recipe import fingerprint


def plan_digest_of(stored: Mapping[str, Any], digest: str, shard: int) -> str:
    """Return the digest of the plan that a shard was made with.

    A shard that lost documents in the last removal was made with the current plan. Any other shard
    was made with an earlier plan. It is the plan after the last removal that changed the shard, or
    the first plan if no removal changed it.

    Args:
        stored: The current plan as stored.
        digest: The digest of the current plan.
        shard: Shard number.
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
    """Return a copy of a stored plan with another value for the key "removed".

    The fingerprint and the digest of the copy are computed again.

    Args:
        stored: The plan as stored.
        plan: The plan loaded from `stored`.
        removed: The new value: a dict with the digest of removed.json and the replaced datasets.
            None if no document is removed.
    """
    files = [[(file.name, file.size) for file in source.files] for source in plan.sources]
    kept_values = {key: value for key, value in stored.items() if key != "digest"}
    digest = None if removed is None else removed["digest"]
    new_fingerprint = fingerprint(
        plan.recipe, files, stored["tokenizer"]["digest"], stored["chat_template"], digest
    )
    new_plan = {**kept_values, "fingerprint": new_fingerprint, "removed": removed}
    return {**new_plan, "digest": own_digest(as_stored(new_plan, LATER))}


def plan_replaced(stored: Mapping[str, Any], plan: Plan, number: int) -> tuple[str, str]:
    """Return the fingerprint and the plan digest of an earlier dataset, computed from this plan.

    A removal changes only the key "removed", the fingerprint and the digest of a plan. The earlier
    plan can therefore be computed.

    Args:
        stored: The plan as stored.
        plan: The plan loaded from `stored`.
        number: Index of the dataset in `replaced(stored)`.
    """
    entries = replaced(stored)
    digest = entries[number].get("removed")
    removed_before = {"digest": digest, "replaces": entries[:number]} if digest else None
    earlier_plan = with_removed(stored, plan, removed_before)
    return earlier_plan["fingerprint"], digest_of(encode(as_stored(earlier_plan, LATER)))
