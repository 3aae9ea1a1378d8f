"""The promises of in-place segments, of trained ranges and of blocks."""

from collections.abc import Mapping

import numpy as np

from packprep.building.job import Job
from packprep.building.render import Table, draw_noise, target_of
from packprep.building.replay import Stored, segment_slots
from packprep.dataset.segments import spread
from packprep.kernel import kernel
from packprep.objectives.objective import Bodies
from packprep.verification.report import MAX_LISTED, Faults


def check_parts(job: Job, arrays: Mapping[str, np.ndarray], file: str, faults: Faults) -> bool:
    """P19 and P20, as far as the arrays can be walked: offsets, ranges and counts."""
    before = faults.total
    row, _, slots = segment_slots(arrays)
    for name, values, promise in (("trained", "trained_ranges", "P19"), ("block", "block_noise", "P20")):
        if f"{name}_offsets" not in arrays:
            continue
        bounds = arrays[f"{name}_offsets"]
        if bounds[0] != 0 or bounds[-1] != len(arrays[values]) or (np.diff(bounds) < 0).any():
            message = f"{name}_offsets does not ascend from 0 to the number of {values}"
            faults.add(promise, file, message, value=int(bounds[-1]))
            return False
    if "trained_offsets" in arrays:
        bounds, ranges = arrays["trained_offsets"], arrays["trained_ranges"].astype(np.int64)
        segment = np.repeat(np.arange(len(row)), np.diff(bounds))
        begins_after = np.ones(len(ranges), np.int64) * -1
        same = segment[1:] == segment[:-1]
        begins_after[1:][same] = ranges[:-1, 1][same]
        bad = (ranges[:, 0] <= begins_after) | (ranges[:, 1] <= ranges[:, 0]) | (ranges[:, 1] > slots[segment])
        for i in np.flatnonzero(bad):
            g = segment[i]
            message = f"segment {g}: trained range {ranges[i].tolist()} is empty, out of order or outside its {slots[g]} slots"
            faults.add("P19", file, message, int(row[g]))
    if "block_offsets" in arrays:
        length = np.array([task.parameters.get("block_length", 0) for task in job.tasks])[arrays["segment_task"]]
        blocked = np.array([task.objective.attention == "block_diffusion" for task in job.tasks])[
            arrays["segment_task"]
        ]
        should = np.where(blocked, -(-(slots // 2) // np.maximum(length, 1)), 0)
        found = np.diff(arrays["block_offsets"])
        for g in np.flatnonzero(found != should):
            faults.add("P20", file, f"segment {g}: it has {found[g]} blocks and needs {should[g]}", int(row[g]))
        noise, weight = arrays["block_noise"], arrays["block_loss_weight"]
        for i in np.flatnonzero(~((noise > 0) & (noise <= 1) & np.isfinite(weight))):
            faults.add("P20", file, f"block {i}: its level or weight is out of range", value=str(noise[i]))
    return faults.total == before


@kernel
def _mark(at, bounds, ranges, may):
    for i in range(at.shape[0]):
        for k in range(bounds[i], bounds[i + 1]):
            for t in range(at[i] + ranges[k, 0], at[i] + ranges[k, 1]):
                may[t] = 1


def trainable(arrays: Mapping[str, np.ndarray], stored: Stored) -> np.ndarray:
    """uint8[rows, seq_length]: the slots inside trained ranges; without rows where the shard has none."""
    shape = arrays["tokens"].shape
    if "trained_offsets" not in arrays:
        return np.zeros((0, shape[1]), np.uint8)
    may = np.zeros(shape[0] * shape[1], np.uint8)
    _mark(
        stored.row * shape[1] + stored.begin, arrays["trained_offsets"], arrays["trained_ranges"].astype(np.int64), may
    )
    return may.reshape(shape)


def check_noise(job: Job, arrays: Mapping[str, np.ndarray], stored: Stored, file: str, faults: Faults) -> None:
    """P18: noise drawn anew from labels and keys is the stored noise; so it lies on candidates alone."""
    if "labels" not in arrays:
        return
    length = arrays["tokens"].shape[1]
    may = trainable(arrays, stored).reshape(-1) if "trained_offsets" in arrays else None
    in_place = np.array([task.in_place for task in job.tasks])[arrays["segment_task"]]
    if not in_place.any():
        return
    tokens = arrays["labels"].reshape(-1).copy()
    loss_mask = np.zeros(len(tokens), np.uint8)
    for t, task in enumerate(job.tasks):
        own = np.flatnonzero(arrays["segment_task"] == t)
        if not task.in_place or not len(own):
            continue
        zeros = np.zeros(len(own), np.int64)
        table = Table(
            begin=zeros,
            bodies=Bodies(*(column[own] for column in stored.bodies)),
            task=zeros + t,
            bos=stored.bos[own],
            eos=stored.eos[own],
            slots=stored.slots[own],
            at=stored.row[own] * length + stored.begin[own],
            row=stored.row[own],
            number=zeros,
            start=zeros,
            copy=stored.copy[own],
            document=zeros,
        )
        noised = draw_noise(t, task, target_of(task, table, tokens, loss_mask, may))
        for name, again in (("segment_noise", noised.level), ("segment_loss_weight", noised.weight)):
            stored_values = arrays[name][own]
            for i in np.flatnonzero(stored_values != again)[:MAX_LISTED]:
                message = f"segment {own[i]}: {name} should be {again[i]}"
                faults.add("P18", file, message, int(stored.row[own[i]]), value=float(stored_values[i]))
        if noised.blocks is not None:
            which = np.concatenate([np.arange(*arrays["block_offsets"][g : g + 2]) for g in own])
            for name, again in (("block_noise", noised.blocks[1]), ("block_loss_weight", noised.blocks[2])):
                for i in np.flatnonzero(arrays[name][which] != again)[:MAX_LISTED]:
                    faults.add(
                        "P18",
                        file,
                        f"block {which[i]}: {name} should be {again[i]}",
                        value=float(arrays[name][which[i]]),
                    )
    # Segments do not overlap: all tasks' noise is drawn into one copy, and compared at once.
    at = stored.row * length + stored.begin
    mine = spread(at, stored.slots, in_place, False, len(tokens))
    for name, again in (("tokens", tokens), ("loss_mask", loss_mask)):
        values = arrays[name].reshape(-1)
        for i in np.flatnonzero((values != again) & mine)[:MAX_LISTED]:
            message = f"{name} drawn anew is {again[i]}"
            faults.add("P18", file, message, int(i // length), int(i % length), int(values[i]))
