"""Which shards of a build are done, and what would make the others."""

import os
from typing import Any

from packprep.building.output import Output, output_of
from packprep.building.publication import MANIFEST, missing_shards
from packprep.building.revocation import NOTE, is_revoked, read_note
from packprep.building.run import read_plan, share_of
from packprep.dataset.manifest import encode
from packprep.digests import digest_of
from packprep.errors import PlanError


def status_of(out: str | os.PathLike | Output, array_count: int | None = None) -> dict[str, Any]:
    """{shards, done, missing, published, revoked, array}.

    missing: the shards that are not done. revoked: whether the plan's engine was caught in a difference. array: the array
    indices that would make what is missing.
    """
    out = output_of(out)
    plan = read_plan(out)
    if plan is None:
        raise PlanError(f"{out}: no plan.json: nothing was begun here; `packprep build … --out {out}` begins a build")
    missing = missing_shards(out, digest_of(encode(plan)), range(plan["shards"]))
    result: dict[str, Any] = {
        "out": str(out),
        "shards": plan["shards"],
        "done": plan["shards"] - len(missing),
        "missing": missing,
        "published": not missing and out.exists(MANIFEST),
        "revoked": is_revoked(plan, read_note(out)),
    }
    if array_count is not None:
        lacking = set(missing)
        tasks = (i for i in range(array_count) if not lacking.isdisjoint(share_of(i, array_count, plan["shards"])))
        result["array"] = ranges(list(tasks))
    return result


def ranges(numbers: list[int]) -> str:
    """Ascending numbers as Slurm writes them: 0-3,7."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def print_status(result: dict[str, Any]) -> None:
    """The status in a few lines."""
    print(f"{result['out']}: {result['done']} of {result['shards']} shards done")
    if result["missing"]:
        print(f"missing: {ranges(result['missing'])}")
    if result.get("array"):
        print(f"--array={result['array']}")
    if result["revoked"]:
        print(
            f"stopped: its engine gave other ids than the reference; see {output_of(result['out']).place(NOTE)}; "
            "run the build's command again, and it begins anew with the reference engine"
        )
    if not result["missing"] and not result["published"]:
        print("complete, but without a manifest: run the build's command once more anywhere to publish it")
    elif result["published"]:
        print("published")
