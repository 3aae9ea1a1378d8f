"""One shard at a time, for whatever runs functions on many machines: a process pool, Dask, Ray,
Spark, a queue of one's own.

`begin` once; `build_shard` for each number in any process of any machine, in any order, as often as
it pleases; `finish` once. A shard is a pure function of the plan and its number: no process needs
to know of another, and one that is killed leaves temporaries at most. All three go on with what
`packprep build` began, and it with what they did.
"""

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from packprep.building.array_tasks import ranges, tasks_of
from packprep.building.commit import bad_fault, done_receipt, missing_shards, publish
from packprep.building.ledger import add_ledgers, is_ledger
from packprep.building.plan import (
    Plan,
    moved_prefixes,
    open_plan,
    plan_digests,
    stored_plan_and_digest,
)
from packprep.building.planning import look_up
from packprep.building.processes import Do
from packprep.building.run import ShardToMake, compare_sources, planned, shard_maker
from packprep.building.slurm import build_jobs, first_command, redo_command
from packprep.errors import ArgumentError, BuildError, PlanError
from packprep.format.digests import digest_of
from packprep.format.json_files import MANIFEST_NAME, PLAN_NAME
from packprep.messages import say as say_on_stderr
from packprep.recipe import Recipe
from packprep.sources.files import absolute_prefix
from packprep.storage import Folder, folder_at


def begin(
    recipe: Recipe,
    out: str | os.PathLike,
    moved: Mapping[str, str] | None = None,
    say: Callable[[str], None] = say_on_stderr,
) -> Plan:
    """Write the plan of a build into `out`, or read the one that stands there; `plan.shards` is the
    number of shards.

    moved: source name → prefix where its files lie now. say: is told what a user should know.
    Raises what is wrong with recipe and inputs; PlanError if the plan that stands there is another
    recipe's.
    """
    inputs, output = look_up(recipe, moved or {}), folder_at(out)
    plan = planned(inputs, output, say)
    compare_sources(output, plan, inputs, say)
    return plan


def build_shard(
    out: str | os.PathLike, number: int, moved: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Make shard `number` of the plan in `out`, 0 … shards − 1, and commit it; gives its receipt.
    Nothing if it is done.

    The process keeps plan, engine and memory for the next call, so few long-lived processes are
    better than many short ones. It may run twice, at the same time too: the second commit compares
    and changes nothing. One thread of a process at a time.
    moved: source name → prefix where its files lie on this machine.
    Raises ArgumentError for another number, PlanError without a plan, SourceError for an input that
    cannot be read, BuildError where a fast engine differs from the reference.
    """
    output = folder_at(out)
    try:
        plan_digest = digest_of(output.read(PLAN_NAME))
    except FileNotFoundError:
        plan_digest = ""
    plan, make = _maker(
        absolute_prefix(str(output)), plan_digest, tuple(sorted((moved or {}).items()))
    )
    if not 0 <= number < plan.shards:
        raise ArgumentError(f"shard {number}: {out} has the shards 0 … {plan.shards - 1}")
    found = done_receipt(output, number, plan.digests)
    if found is None:
        list(make([ShardToMake(number)], lambda *counts: None))
        found = done_receipt(output, number, plan.digests)
    if found is None:
        raise BuildError(
            f"{out}: shard {number} was committed and is not there: see who removes files, and make"
            " it again"
        )
    return found[0]


def finish(out: str | os.PathLike, max_bad_fraction: float | None = None) -> dict[str, Any]:
    """Publish the dataset; gives its manifest.

    BuildError while a shard is missing, or where too many documents are bad.

    max_bad_fraction: another limit than the one with which the build began.
    """
    output = folder_at(out)
    plan = open_plan(output)
    if max_bad_fraction is not None:
        plan.max_bad_fraction = max_bad_fraction
    manifest = publish(output, plan)
    if manifest is None:
        missing = missing_shards(output, plan.digests, range(plan.shards))
        listed = ", ".join(map(str, missing[:10])) + (", …" if len(missing) > 10 else "")
        raise BuildError(
            f"{out}: {len(missing)} of {plan.shards} shards are missing ({listed}): make them first"
        )
    return manifest


def status_of(
    out: str | os.PathLike | Folder, array_count: int | None = None, is_one_of_several: bool = False
) -> dict[str, Any]:
    """{shards, done, missing, published, array, redo, jobs}; shards is None where there is no plan
    yet: the jobs wait, or other seq_lengths of its build are made first.

    missing: the shards that are not done. array: the array indices that would make what is missing,
    of `array_count`.
    jobs: [{script, job}] that `packprep slurm --submit` submitted, until the dataset is published.
    refused: why a complete build is not published, where too many documents are bad.
    redo: the shell command that submits what is missing and the publication, if `packprep slurm`
    wrote scripts for this output.
    """
    out = folder_at(out)
    found = stored_plan_and_digest(out)
    jobs = build_jobs(str(out))
    if found is None and (jobs or is_one_of_several):
        return {
            "out": str(out),
            "shards": None,
            "done": 0,
            "missing": [],
            "published": False,
            "jobs": jobs,
        }
    if found is None:
        command = first_command(str(out))
        first = (
            f"unless its jobs wait (squeue says so), {command}"
            if command
            else f"`packprep build … --out {out}`"
        )
        raise PlanError(f"{out}: no plan.json: nothing was begun here; {first} begins a build")
    plan, digest = found
    missing = missing_shards(out, plan_digests(plan, digest), range(plan["shards"]))
    result: dict[str, Any] = {
        "out": str(out),
        "shards": plan["shards"],
        "done": plan["shards"] - len(missing),
        "missing": missing,
        "published": not missing and out.exists(MANIFEST_NAME),
    }
    if not missing and not result["published"] and (fault := _refused(out, plan, digest)):
        result["refused"] = fault
    if array_count is not None:
        result["array"] = ranges(tasks_of(missing, array_count, plan["shards"]))
    if not result["published"] and jobs:
        result["jobs"] = jobs
    if not result["published"] and (redo := redo_command(str(out), missing, plan["shards"])):
        result["redo"] = redo
    return result


def _refused(out: Folder, plan: Mapping[str, Any], digest: str) -> str:
    """Return what publication says of bad documents, by the plan's limit; "" for nothing."""
    names = [[entry["name"] for entry in plan[key]] for key in ("sources", "tasks")]
    found = [
        done_receipt(out, shard, plan_digests(plan, digest)) for shard in range(plan["shards"])
    ]
    ledgers = [
        receipt["ledger"]
        for receipt, _ in filter(None, found)
        if is_ledger(receipt["ledger"], *names)
    ]
    limit = plan["recipe"]["documents"]["max_bad_fraction"]
    return bad_fault(add_ledgers(ledgers), limit) if ledgers else ""


@functools.lru_cache(maxsize=1)
def _maker(place: str, plan_digest: str, moved: tuple[tuple[str, str], ...]) -> tuple[Plan, Do]:
    """(the plan, what makes its shards). plan_digest: another plan may stand there since."""
    out = folder_at(place)
    plan = open_plan(out)
    prefixes = moved_prefixes(plan.stored, dict(moved))
    return plan, shard_maker(out, prefixes)
