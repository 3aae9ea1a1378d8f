"""Shards against the plain twin, which shares no code with what built them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from packprep.building.job import Job
from packprep.objectives.tasks import whole_recipe, whole_task
from packprep.twin.comparison import compare_segments, compare_shard
from packprep.twin.shard import Twin
from packprep.verification.report import Faults


def plan_for_twin(job: Job) -> dict[str, Any]:
    """The plan of a job with all keys and parameters that joined later, which the twin knows as it knows the others."""
    return {
        **job.plan,
        "recipe": whole_recipe(job.plan["recipe"]),
        "tasks": [whole_task(task) for task in job.plan["tasks"]],
        "files": [file for source in job.sources for file in source.files.as_planned()],
    }


def twin_of(job: Job) -> Twin:
    """The twin of a job. What a chat template writes for messages it takes from the job."""

    def conversation(messages: Any) -> Any:
        assert job.marks is not None
        return job.marks.marked(None, None, messages)

    prefixes = [source.prefix for source in job.sources]
    return Twin(plan_for_twin(job), job.vocabulary.tokenizer_json, prefixes, conversation)


def check_twin(
    twin: Twin,
    shard: int,
    arrays: Mapping[str, np.ndarray],
    chosen: Sequence[int] | None,
    file: str,
    faults: Faults,
    report: Callable[[int, int], None],
) -> int:
    """P17 by the twin: of some segments, or (None) of the whole shard. Gives how many segments it recomputed."""
    if chosen is None:
        found, count = compare_shard(twin, shard, arrays, report)
    else:
        found, count = compare_segments(twin, shard, arrays, chosen, report)
    for difference in found:
        faults.add("P17", file, f"twin: {difference.message}", difference.row, difference.slot, difference.stored)
    return count
