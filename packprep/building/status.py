"""Which shards of a build are done, and what would make the others."""

import os
from typing import Any

from packprep.building.array import ranges, tasks_of
from packprep.building.output import Output, output_of
from packprep.building.progress import put_line
from packprep.building.publication import missing_shards
from packprep.building.revocation import NOTE, is_revoked, read_note
from packprep.building.run import plan_and_digest
from packprep.building.slurm import redo_command
from packprep.dataset.json_files import MANIFEST_NAME
from packprep.errors import PlanError


def status_of(out: str | os.PathLike | Output, array_count: int | None = None) -> dict[str, Any]:
    """{shards, done, missing, published, revoked, array, redo}.

    missing: the shards that are not done. revoked: whether the plan's engine was caught in a difference. array: the array
    indices that would make what is missing, of `array_count`. redo: the shell command that submits what is missing and the
    publication, if `packprep slurm` wrote scripts for this output.
    """
    out = output_of(out)
    found = plan_and_digest(out)
    if found is None:
        raise PlanError(f"{out}: no plan.json: nothing was begun here; `packprep build … --out {out}` begins a build")
    plan, digest = found
    missing = missing_shards(out, digest, range(plan["shards"]))
    result: dict[str, Any] = {
        "out": str(out),
        "shards": plan["shards"],
        "done": plan["shards"] - len(missing),
        "missing": missing,
        "published": not missing and out.exists(MANIFEST_NAME),
        "revoked": is_revoked(plan, read_note(out)),
    }
    if array_count is not None:
        result["array"] = ranges(tasks_of(missing, array_count, plan["shards"]))
    if not result["published"] and (redo := redo_command(str(out), missing, plan["shards"])):
        result["redo"] = redo
    return result


def print_status(result: dict[str, Any]) -> None:
    """The status in a few lines."""
    put_line(f"{result['out']}: {result['done']} of {result['shards']} shards done")
    if result["missing"]:
        put_line(f"missing: {ranges(result['missing'])}")
    if result.get("array"):
        put_line(f"--array={result['array']}")
    if result["revoked"]:
        put_line(
            f"stopped: its engine gave other ids than the reference; see {output_of(result['out']).place(NOTE)}; "
            "run the build's command again, and it begins anew with the reference engine"
        )
    if not result["missing"] and not result["published"]:
        put_line("complete, but without a manifest: run the build's command once more anywhere to publish it")
    elif result["published"]:
        put_line("published")
    if "redo" in result:
        put_line(f"if no job is at work on it: {result['redo']}")
