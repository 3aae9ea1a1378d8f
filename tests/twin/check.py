"""Compare a dataset with the independent implementation, array by array.

`verify_with_twin` adds these differences to the report of `packprep verify --replay all`. This
module is the only one here that uses packprep: it opens the dataset, and renders chat templates.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from packprep.building.plan import Plan, at_text, moved_prefixes, open_plan, stored_plan
from packprep.conversations.chat_template import compile_template
from packprep.conversations.layouts import Dialogue, Mark
from packprep.conversations.supervision import rendered_turns
from packprep.conversations.turns import Turns
from packprep.dataset.epochs.resampling import EPOCHS
from packprep.dataset.loader import open_dataset
from packprep.dataset.manifest import read_manifest
from packprep.dataset.shard import open_shard
from packprep.errors import RecipeError
from packprep.format.json_files import shard_name
from packprep.objectives.tasks import whole_recipe, whole_task
from packprep.recipe import Recipe
from packprep.verification import verify_dataset
from packprep.verification.arrays import BLOCKS, WEIGHTS, arrays_in_epoch
from tests import made
from tests.twin.comparison import compare_plan, compare_segments, compare_shard
from tests.twin.records import Talk
from tests.twin.shard import Twin, check
from tests.twin.turns import Template

REPLAY_ALL = -1


def plan_for_twin(plan: Plan) -> dict[str, Any]:
    """Return the stored plan with the keys and parameters that were added later.

    The twin knows these as it knows the others.
    """
    return {
        **plan.stored,
        "recipe": whole_recipe(plan.stored["recipe"]),
        "tasks": [whole_task(task) for task in plan.stored["tasks"]],
        "files": [file for source in plan.sources for file in source.files.as_planned()],
        "removed_documents": plan.removed.documents,
    }


def dialogue_of(talk: Talk) -> Dialogue:
    """Return a conversation as packprep has it, without its media."""
    parts = tuple(tuple(Mark(*mark) for mark in marks) for marks in talk.parts)
    return Dialogue(*talk[:5], parts=parts)


def twin_of(plan: Plan) -> Twin:
    """Return the twin of a plan.

    It takes the text that a chat template writes for messages from packprep, whose limits hold.
    """
    settings, stored = plan.recipe.documents, plan_for_twin(plan)

    def find(talk: Talk) -> Turns | None:
        turns = rendered_turns(dialogue_of(talk), stored["chat_template"], settings)
        if not isinstance(turns, Turns):
            return None
        compile_template(stored["chat_template"], settings.template_date).begin()
        return turns

    def render(
        messages: Any, tools: Any, variables: Any, prompt: bool, around: tuple[str, str]
    ) -> str:
        template = compile_template(stored["chat_template"], settings.template_date)
        return template.render(messages, prompt, around, tools, variables, go_on=True)

    template = Template(stored["chat_template"] or "", render, find, stored["recipe"]["documents"])
    prefixes = [source.prefix for source in plan.sources]
    return Twin(stored, plan.vocabulary.tokenizer_json, prefixes, template)


def compare_dataset(
    folder: Path,
    moved: Mapping[str, str] | None = None,
    epoch: int = 0,
    segments: int | None = None,
) -> dict[str, Any]:
    """Compute a dataset with the twin, and return what differs.

    Args:
        folder: The dataset.
        moved: Source name → folder in which its files lie now.
        epoch: Above 0, compare the rows as resampling gives them in this epoch.
        segments: Number of segments to compare, chosen at random; None compares all shards whole.

    Returns:
        {twin: number of segments that were computed, twin_taken: number of places in conversations
        for which packprep's answer was taken, listed: [fault], as `verify` lists them}.
    """
    manifest, stored = read_manifest(folder), stored_plan(folder)
    assert stored is not None
    sources = zip(stored["sources"], moved_prefixes(stored, moved or {}), strict=True)
    prefixes = [
        prefix if source["name"] in (moved or {}) else at_text(source["name"], prefix)
        for source, prefix in sources
    ]
    plan = open_plan(folder, prefixes)
    if in_stores := [source.name for source in plan.sources if source.in_store]:
        raise RecipeError(
            f"the twin reads the text, and of {', '.join(in_stores)} there is only the token store"
        )
    whole = plan_for_twin(plan)
    check(whole)
    listed = [_fault("plan.json", message) for message in compare_plan(whole)]
    twin, computed = twin_of(plan), 0
    for shard, chosen in _chosen(manifest["shards"], segments):
        arrays = _arrays_of(folder, plan, manifest["shards"][shard], shard, epoch)
        if chosen is None:
            differences, count = compare_shard(twin, shard, arrays, _ignore_progress, epoch)
        else:
            differences, count = compare_segments(
                twin, shard, arrays, chosen, _ignore_progress, epoch
            )
        computed += count
        listed += [_fault(shard_name(shard), *difference) for difference in differences]
    return {"twin": computed, "twin_taken": twin.turns_taken, "listed": listed}


def verify_with_twin(
    directory: Path,
    replay: int | None = REPLAY_ALL,
    moved: Mapping[str, str] | None = None,
    epoch: int = 0,
    recipe: Recipe | None = None,
) -> dict[str, Any]:
    """Return the report of `verify_dataset`, with what the twin found if the rebuild ran.

    The twin is left out where the rebuild finds changed sources or damaged files, because it would
    only repeat that for every segment.
    """
    silent = made.Silent()
    report = verify_dataset(
        directory, replay, moved or {}, (0, 1), 0, silent, recipe=recipe, epoch=epoch
    )
    is_rebuilt = report["replayed"] or not report["segments"]
    if replay is None or not is_rebuilt:
        return {**report, "twin": 0, "twin_taken": 0}
    found = compare_dataset(
        Path(directory), moved, epoch, None if replay == REPLAY_ALL else report["replayed"]
    )
    listed = [*report["listed"], *found.pop("listed")]
    return {**report, **found, "listed": listed, "faults": max(report["faults"], len(listed))}


def _chosen(
    entries: Sequence[Mapping[str, Any]], segments: int | None
) -> Iterator[tuple[int, list[int] | None]]:
    """Yield (shard, its segments to compare, or None for all)."""
    if segments is None:
        yield from ((shard, None) for shard in range(len(entries)))
        return
    numbered = [(b, g) for b, entry in enumerate(entries) for g in range(entry["segments"])]
    picked = sorted(random.Random(0).sample(numbered, min(segments, len(numbered))))
    for shard in sorted({b for b, _ in picked}):
        yield shard, [g for b, g in picked if b == shard]


def _arrays_of(
    folder: Path, plan: Plan, entry: Mapping[str, Any], number: int, epoch: int
) -> Mapping[str, np.ndarray]:
    """Return a shard's arrays, as resampling gives them in an epoch above 0."""
    shard = open_shard(
        folder / shard_name(number),
        plan.recipe.seq_length,
        plan.token_dtype,
        rows=entry["rows"],
        segments=entry["segments"],
        compact=plan.recipe.output.columns != "full",
    )
    if not epoch:
        return shard.arrays
    resampled = arrays_in_epoch(open_dataset(folder), shard, epoch % EPOCHS)
    return {name: resampled[name] for name in (*shard.layout, WEIGHTS) if name not in BLOCKS}


def _fault(
    file: str, message: str, row: int | None = None, slot: int | None = None, value: Any = None
) -> dict[str, Any]:
    return {
        "promise": "P17",
        "file": file,
        "row": row,
        "slot": slot,
        "value": value,
        "message": f"twin: {message}",
    }


def _ignore_progress(done: int, of: int) -> None:
    """Take the twin's report of progress."""
