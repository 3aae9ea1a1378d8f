"""Build one shard at a time, for any system that runs functions on many machines.

Examples are a process pool, Dask, Ray, Spark or a custom queue. Call `begin` once. Call
`build_shard` for each shard number, in any process on any machine, in any order and as often as
needed. Call `finish` once. A shard is a pure function of the plan and its number, so processes need
not know of each other. A killed process leaves only temporary files. These functions can resume a
build of `packprep build`, and `packprep build` can resume a build of these functions.
"""

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from packprep.building.array_tasks import ranges, tasks_of
from packprep.building.commit import bad_fault, done_receipt, missing_shards, publish
from packprep.building.ledger import add_ledgers, is_ledger
from packprep.building.lengths import ShardsToMake, ShardToMake
from packprep.building.plan import (
    Plan,
    moved_prefixes,
    open_plan,
    plan_digests,
    stored_plan_and_digest,
)
from packprep.building.planning import look_up
from packprep.building.processes import Do
from packprep.building.run import compare_sources, planned, shard_maker
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
    """Write the plan of a build into `out`, or read the existing plan.

    Args:
        recipe: The recipe.
        out: The output folder, as a path or URL.
        moved: Source name → the folder or URL of the source's files, for sources whose files were
            moved.
        say: Receives messages for the user.

    Returns:
        The plan. `plan.shards` is the number of shards.

    Raises:
        RecipeError: If the recipe or its inputs are invalid.
        PlanError: If the existing plan belongs to another recipe.
    """
    inputs, output = look_up(recipe, moved or {}), folder_at(out)
    plan = planned(inputs, output, say)
    compare_sources(output, plan, inputs, say)
    return plan


def build_shard(
    out: str | os.PathLike, number: int, moved: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Make shard `number` of the plan in `out`, commit it, and return its receipt.

    If the shard is already done, nothing is made. A shard may be built twice, even at the same
    time: the second commit compares digests and changes nothing.

    The plan and the tokenizer engine stay loaded for the next call in the same process. A few
    long-lived processes are therefore faster than many short-lived processes. In each process, only
    one thread at a time may call this function.

    Args:
        out: The output folder, as a path or URL.
        number: Shard number, 0 … shards − 1.
        moved: Source name → the folder or URL of the source's files on this machine, for sources
            whose files are not where the plan says.

    Raises:
        ArgumentError: If `number` is not in 0 … shards − 1.
        PlanError: If `out` has no plan.
        SourceError: If an input cannot be read.
        BuildError: If a fast engine gives other tokens than the reference.
    """
    output = folder_at(out)
    try:
        plan_digest = digest_of(output.read(PLAN_NAME))
    except FileNotFoundError:
        plan_digest = ""
    # The plan stays loaded for the next call, unless plan.json changes.
    plan, make = _maker(
        absolute_prefix(str(output)), plan_digest, tuple(sorted((moved or {}).items()))
    )
    if not 0 <= number < plan.shards:
        raise ArgumentError(f"shard {number} does not exist: {out} has 0 … {plan.shards - 1}")
    receipt_and_data = done_receipt(output, number, plan.digests)
    if receipt_and_data is None:
        list(make([ShardsToMake((ShardToMake(number),))], lambda *counts: None))
        receipt_and_data = done_receipt(output, number, plan.digests)
    if receipt_and_data is None:
        raise BuildError(
            f"{out}: shard {number} was committed, but is now missing\n"
            "hint: find the process that removes files, and make the shard again"
        )
    return receipt_and_data[0]


def finish(out: str | os.PathLike, max_bad_fraction: float | None = None) -> dict[str, Any]:
    """Publish the dataset.

    Args:
        out: The output folder, as a path or URL.
        max_bad_fraction: A new value of documents.max_bad_fraction. None keeps the plan's value.

    Returns:
        The manifest.

    Raises:
        BuildError: If a shard is missing, or too many documents are bad.
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
            f"{out}: {len(missing)} of {plan.shards} shards are missing ({listed})\n"
            "hint: make them first"
        )
    return manifest


def status_of(
    out: str | os.PathLike | Folder, array_count: int | None = None, is_one_of_several: bool = False
) -> dict[str, Any]:
    """Return the progress of a build.

    Args:
        out: The output folder, as a path or URL.
        array_count: Number of array tasks.
        is_one_of_several: True if `out` is the folder of one dataset in a build with several
            seq_lengths.

    Returns:
        A dict with these keys:

        - shards: Number of shards. None before the plan is written.
        - done: The number of finished shards.
        - missing: The list of the shard numbers that are not finished.
        - published: True if the dataset is published.
        - array: The indices of the array tasks that make the missing shards, such as "0-3,7". Only
            with `array_count`.
        - jobs: One dict {script, job} per job that `packprep slurm --submit` submitted.
        - refused: A message if all shards are done, but the dataset cannot be published because too
            many documents are bad.
        - redo: The shell command that submits the missing work, if `packprep slurm` wrote scripts.

    Raises:
        PlanError: If `out` has neither a plan nor a job that will write it.
    """
    out = folder_at(out)
    plan_and_digest = stored_plan_and_digest(out)
    jobs = build_jobs(str(out))
    # A waiting job, or the build of another row length, may still write the plan.
    if plan_and_digest is None and (jobs or is_one_of_several):
        return {
            "out": str(out),
            "shards": None,
            "done": 0,
            "missing": [],
            "published": False,
            "jobs": jobs,
        }
    if plan_and_digest is None:
        command = first_command(str(out))
        advice = (
            f"unless its jobs are waiting (see squeue), start it with {command}"
            if command
            else f"start one with `packprep build … --out {out}`"
        )
        raise PlanError(f"{out}: no plan.json, so no build was started here\nhint: {advice}")
    plan, digest = plan_and_digest
    missing = missing_shards(out, plan_digests(plan, digest), range(plan["shards"]))
    result: dict[str, Any] = {
        "out": str(out),
        "shards": plan["shards"],
        "done": plan["shards"] - len(missing),
        "missing": missing,
        "published": not missing and out.exists(MANIFEST_NAME),
    }
    # Only a finished build can be refused, and this check reads all receipts.
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
    """Return a message if more documents are bad than the plan allows; otherwise "".

    `plan` and `digest` are the results of `stored_plan_and_digest`.
    """
    names = [[entry["name"] for entry in plan[key]] for key in ("sources", "tasks")]
    receipts = [
        done_receipt(out, shard, plan_digests(plan, digest)) for shard in range(plan["shards"])
    ]
    ledgers = [
        receipt["ledger"]
        for receipt, _ in filter(None, receipts)
        if is_ledger(receipt["ledger"], *names)
    ]
    limit = plan["recipe"]["documents"]["max_bad_fraction"]
    return bad_fault(add_ledgers(ledgers), limit) if ledgers else ""


@functools.lru_cache(maxsize=1)
def _maker(place: str, plan_digest: str, moved: tuple[tuple[str, str], ...]) -> tuple[Plan, Do]:
    """Return the plan in a folder, and the function that makes the plan's shards.

    `plan_digest` is only used in the cache key, so that a new plan in the same folder is not
    mistaken for the cached plan.
    """
    out = folder_at(place)
    plan = open_plan(out)
    prefixes = moved_prefixes(plan.stored, dict(moved))
    return plan, shard_maker([out], prefixes)
