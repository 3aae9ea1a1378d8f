"""The tokens that segments were made of, restored by their objectives' inverses, and the slots at which they stand.

```
stored     ‹NLG› t ‹0› ias ‹1› ‹0› hod ‹1› ericAl ‹eos›
restored   t hod ias ericAl                            bos, mode, sentinels and eos are no tokens of the document
```
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from packprep.building.job import Job
from packprep.building.replay import Stored, restore, stored_segments
from packprep.dataset.shard import Shard
from packprep.errors import DatasetError
from packprep.objectives.objective import Bodies


class Originals(NamedTuple):
    """Restored tokens of some segments.

    ids: [tokens], one segment after the other. offsets: int64[k + 1]. fits: bool[k], whether what stands between the tokens
    is what the header says.
    """

    ids: np.ndarray
    offsets: np.ndarray
    fits: np.ndarray


def stored_of(job: Job, shard: Shard) -> Stored:
    """The segments of a shard as its arrays tell; DatasetError where one cannot be inverted.

    The shard's boundaries are sound. An inverse reads by the length law, so that must hold of every segment.
    """
    arrays = shard.arrays
    n = arrays["segment_tokens"].astype(np.int64)
    if len(n) and (n.min() < 1 or n.max() > shard.seq_length):
        raise _damaged(shard, int(np.argmax((n < 1) | (n > shard.seq_length))), "segment_tokens cannot be")
    if "trained_offsets" in arrays:
        offsets, ranges = arrays["trained_offsets"], arrays["trained_ranges"]
        if offsets[0] != 0 or (np.diff(offsets) < 0).any() or offsets[-1] != len(ranges):
            raise _damaged(shard, int(np.argmax(np.diff(offsets) < 0)), "trained_offsets does not ascend to the ranges")
    stored = stored_segments(job, arrays)
    holds = (stored.eos >= 0) & (stored.eos <= 1) & (stored.copy >= 0)
    for t, task in enumerate(job.tasks):
        own = np.flatnonzero((arrays["segment_task"] == t) & holds)
        if len(own):
            bodies = Bodies(*(column[own] for column in stored.bodies))
            holds[own] = task.slots(bodies, stored.bos[own], stored.eos[own]) == stored.slots[own]
    if not holds.all():
        raise _damaged(shard, int(np.argmin(holds)), "its slots are not those of its task's length law")
    return stored


def _damaged(shard: Shard, segment: int, what: str) -> DatasetError:
    return DatasetError(
        f"{shard.path}: segment {segment}: {what}, so it cannot be inverted; the file is damaged: "
        "`packprep verify` says where else"
    )


def originals(job: Job, arrays: Mapping[str, np.ndarray], stored: Stored, chosen: np.ndarray) -> Originals:
    """The tokens of the chosen segments of a shard, int64[k]; labels of in-place kinds."""
    return Originals(*restore(job, arrays, stored, chosen))


def slots_of_tokens(
    job: Job, arrays: Mapping[str, np.ndarray], stored: Stored, segment: int, ids: np.ndarray
) -> np.ndarray:
    """int64[n]: the slot of the row at which each original token of a segment stands; in block diffusion its slot in x_t.

    ids: [n], the segment's original tokens. −1 where that cannot be told: an objective from elsewhere may read values.
    The inverse itself says it. It is given a row whose slots hold their own numbers, counted from beyond the vocabulary; the
    role tokens that fill_in_the_middle looks for stay.
    """
    row, begin = int(stored.row[segment]), int(stored.begin[segment])
    task = job.tasks[int(arrays["segment_task"][segment])]
    values = arrays["labels" if task.in_place else "tokens"][row]
    numbers = np.arange(len(values), dtype=np.int32) + job.vocabulary.vocab_size
    roles = np.isin(values, task.ids.fim)
    numbers[roles] = values[roles]
    in_row_0 = stored._replace(row=np.zeros_like(stored.row))
    of_numbers = {**arrays, "tokens": numbers[None], "labels": numbers[None]}
    found = originals(job, of_numbers, in_row_0, np.array([segment])).ids
    slots = found.astype(np.int64) - job.vocabulary.vocab_size
    end = begin + int(stored.slots[segment])
    known = (slots >= begin) & (slots < end)
    known[known] = values[slots[known]] == ids[known]
    slots[~known] = -1
    unknown = np.flatnonzero(~known)
    for step, order in ((1, unknown), (-1, unknown[::-1])):  # a role token of the text stands beside its neighbours
        for i in order[(order >= step) & (order < len(slots) + min(step, 0))].tolist():
            beside = int(slots[i - step]) + step
            if slots[i] < 0 and slots[i - step] >= 0 and begin <= beside < end and values[beside] == ids[i]:
                slots[i] = beside
    return slots


def ranges_of(slots: np.ndarray) -> list[list[int]]:
    """Slots as half-open ranges, in the slots' order: [3 4 5 9] is [[3, 6], [9, 10]]; −1 in none."""
    slots = slots[slots >= 0]
    if not len(slots):
        return []
    bounds = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    return [[int(slots[a]), int(slots[b - 1]) + 1] for a, b in zip(bounds, bounds[1:], strict=False)]
