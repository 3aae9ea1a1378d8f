"""Build several row lengths of one recipe together, so that each document is read once.

All row lengths divide the same list of splits into shards. Shards of different row lengths
therefore have documents in common:

    corpus               |-----------------------------|
    shards of seq_512    |-- 0 --|-- 1 --|-- 2 --|- 3 -|
    shards of seq_8192   |------ 0 ------|------ 1 ----|
    items of work        |------ 0 ------|------ 1 ----|     three shards each

A worker makes the shards of an item together: `read_shards` reads a work range once, and adds its
documents to each shard that has this work range.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

from packprep.building.plan import Plan
from packprep.building.segments import uncut_tokens
from packprep.building.work import documents_builder, file_unchanged, most_bytes, text_reader
from packprep.clock import Clock
from packprep.dataset.mixture import mixture_file
from packprep.documents.reading import Documents, read_into, with_keeps
from packprep.errors import PlanError
from packprep.format.json_files import MIXTURE_NAME, PLAN_NAME
from packprep.messages import listed
from packprep.recipe import Recipe
from packprep.sources.formats import Decoders
from packprep.sources.slices import common_slices
from packprep.storage import Folder


def folders_of_lengths(recipe: Recipe, out: Folder) -> list[tuple[Recipe, str]]:
    """Return the recipe and the folder of each dataset that `build_lengths` makes below `out`.

    Raises:
        PlanError: If `out` is a dataset, or has other files and no dataset of this recipe.
    """
    folders = {f"seq_{one_recipe.seq_length}": one_recipe for one_recipe in recipe.by_length()}
    if out.exists(PLAN_NAME):
        raise PlanError(
            f"{out} is a dataset, but seq_lengths make several\nhint: give --out another folder"
        )
    is_begun = any(out.exists(f"{name}/{PLAN_NAME}") for name in folders)
    if not is_begun and (other_names := [name for name in out.others() if name not in folders]):
        raise PlanError(
            f"{out} has files that are not from this build: {listed(other_names)}\n"
            "hint: give --out a new or empty folder"
        )
    return [(one_recipe, f"{out}/{name}") for name, one_recipe in folders.items()]


def lengths_mixture(manifests: Sequence[Mapping[str, Any]]) -> bytes:
    """Return mixture.json for a build of several seq_lengths, from its datasets' manifests."""
    names = [f"seq_{manifest['seq_length']}" for manifest in manifests]
    shares = [[0, [manifest["ledger"]["row_slots"] for manifest in manifests]]]
    return mixture_file(Path(MIXTURE_NAME).absolute(), names, shares=shares)


class ShardToMake(NamedTuple):
    """A shard to make. `name` is the folder of its dataset if a build makes several, or ""."""

    number: int
    output: int = 0  # index of the output
    name: str = ""

    def __str__(self) -> str:
        return f"{self.name}{' ' * bool(self.name)}shard {self.number}"


class ShardsToMake(NamedTuple):
    """Shards that one worker makes together, because they have documents in common."""

    shards: tuple[ShardToMake, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.shards))


SHARDS_OF_A_PART = 8
"""A worker makes about this many shards of the longest row length together, if it has so many.

This applies only if row lengths have different numbers of shards.
"""


def shared_work(
    plans: Sequence[Plan], missing: Sequence[Sequence[int]], workers: int, array_count: int
) -> list[ShardsToMake]:
    """Divide the missing shards of several row lengths into items of work.

    The shards of an item have documents in common, which the worker reads once. If the row lengths
    have the same number of shards, an item has one shard of each. Otherwise, an item has the shards
    that start in a part of the corpus. Its last shards may continue in the next part, which is then
    read twice. The parts are large enough to make this rare.

    Args:
        plans: The plan of each row length.
        missing: The missing shards of each plan, ascending.
        workers: Number of worker processes.
        array_count: Number of array tasks.
    """
    counts = [plan.shards for plan in plans]
    fewest, in_step = min(counts), math.gcd(*counts)
    processes = max(1, workers) * array_count
    # Each process makes the same number of parts.
    parts = min(fewest, processes * max(1, fewest // (SHARDS_OF_A_PART * processes)))
    # Shards of all lengths start together at each multiple of 1 / in_step.
    if in_step >= parts:
        parts = in_step
    # Plans of different versions may read differently. Each of their shards is then an item.
    are_alike = read_alike(plans)
    items: dict[tuple[int, int], list[ShardToMake]] = {}
    for output, (plan, numbers) in enumerate(zip(plans, missing, strict=True)):
        name = f"seq_{plan.recipe.seq_length}" if len(plans) > 1 else ""
        for number in numbers:
            part_number = number * parts // plan.shards
            key = (0, part_number) if are_alike else (output, number)
            items.setdefault(key, []).append(ShardToMake(number, output, name))

    def end_of(shard: ShardToMake) -> Fraction:
        return Fraction(shard.number + 1, counts[shard.output])

    return [ShardsToMake(tuple(sorted(shards, key=end_of))) for _, shards in sorted(items.items())]


def read_shards(
    shards: Sequence[tuple[Plan, int]],
    decoders: Decoders,
    progress: Callable[[int, int, int, int], None],
    clock: Clock,
) -> Iterator[Documents]:
    """Yield the documents of several shards. Documents that shards have in common are read once.

    The result for each shard is the same as that of `read_shard`.

    Args:
        shards: (plan, shard number) pairs, in ascending order of their ends in the corpus. The
            plans are from one recipe, and `read_alike` is True for them.
        decoders: As in `make_shard`.
        progress: As in `make_shard`.
        clock: As in `make_shard`.
    """
    first_plan, _ = shards[0]
    # A document may skip the search for message boundaries only if no row length cuts it.
    uncut = min(uncut_tokens(plan.recipe, plan.cut_limits) for plan, _ in shards)
    reader = replace(text_reader(first_plan, decoders, clock), uncut_tokens=uncut)
    builders = {i: documents_builder(plan, most_bytes(plan)) for i, (plan, _) in enumerate(shards)}
    seen = first_plan.seen or [None] * len(first_plan.sources)
    # Per source: the work ranges that are not read yet, and how many of them each shard needs.
    waiting: list[tuple[Iterator[tuple[Any, list[int]]], Counter[int]]] = []
    for s, source in enumerate(first_plan.sources):
        common = list(common_slices([(plan.sources[s], b, plan.shards) for plan, b in shards]))
        needed = [readers for _, readers in common]
        parts = with_keeps(zip(repeat(source), (work_range for work_range, _ in common)))
        waiting.append((zip(parts, needed, strict=True), Counter(chain(*needed))))
    # Read the work ranges that shard i still needs. They may also fill builders of later shards.
    for i in range(len(shards)):
        for parts_of_source, unread in waiting:
            while unread[i]:
                (source, work_range, keep), readers = next(parts_of_source)
                with file_unchanged(source, work_range, seen[source.index]):
                    read_into(
                        [builders[r] for r in readers], reader, source, work_range, keep, progress
                    )
                unread.subtract(readers)
        yield builders.pop(i).documents()


def read_alike(plans: Sequence[Plan]) -> bool:
    """Return whether the plans read the same documents in the same order.

    The plans are from one recipe with several row lengths. They differ only if another version of
    packprep wrote one of them.
    """
    first_plan, *other_plans = plans
    return all(
        source.reads_like(other_source)
        for plan in other_plans
        for source, other_source in zip(first_plan.sources, plan.sources, strict=True)
    )
