"""The promises of a shard's arrays, recomputed from its header; `slots` walks the slots."""

from collections.abc import Mapping

import numpy as np

from packprep.building.job import Job
from packprep.building.render import expected_prefix
from packprep.building.replay import Stored, file_keys, fitting, segment_slots, stored_segments
from packprep.corpus.reading import keeps_all, kept_by_plan
from packprep.dataset.segments import next_token_loss_mask, segment_ids
from packprep.objectives.objective import Bodies
from packprep.objectives.tasks import SHORTEST, thresholds
from packprep.randomness import TASK, bits64, segment_key
from packprep.verification.noise import check_noise, check_parts
from packprep.verification.report import MAX_LISTED, Faults
from packprep.verification.slots import check_slots


def check_structure(arrays: Mapping[str, np.ndarray], file: str, seq_length: int, mult: int, faults: Faults) -> bool:
    """P4 and P5: whether rows and segments can be walked at all."""
    offsets, cu = arrays["row_offsets"], arrays["cu_seqlens"]
    rows, segments = len(offsets) - 1, len(arrays["segment_key"])
    before = faults.total
    if offsets[0] != 0:
        faults.add("P4", file, "row_offsets does not start at 0", 0, value=int(offsets[0]))
    if offsets[-1] != segments:
        faults.add(
            "P4", file, f"row_offsets does not end at the number of segments, {segments}", rows, value=int(offsets[-1])
        )
    counts = np.diff(offsets)
    for r in np.flatnonzero((counts < 0) | (counts > 65535))[:MAX_LISTED]:
        faults.add(
            "P4", file, "row_offsets falls, or gives a row more than 65535 segments", int(r), value=int(counts[r])
        )
    if faults.total > before:
        return False
    first = offsets[:-1] + np.arange(rows)
    last = offsets[1:] + np.arange(rows)
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        values = arrays.get(name)
        if values is None:
            continue
        for r in np.flatnonzero(values[first] != 0)[:MAX_LISTED]:
            faults.add("P5", file, f"{name} does not start at 0", int(r), value=int(values[first[r]]))
        inside = np.ones(len(values), np.bool_)
        inside[first] = False
        step = np.diff(values.astype(np.int64), prepend=0)
        row = np.repeat(np.arange(rows), counts + 1)
        for i in np.flatnonzero(inside & (step <= 0))[:MAX_LISTED]:
            faults.add("P5", file, f"{name} does not strictly increase", int(row[i]), value=int(values[i]))
        for r in np.flatnonzero(values[last] > seq_length)[:MAX_LISTED]:
            faults.add("P5", file, f"{name} ends beyond the row", int(r), value=int(values[last[r]]))
    if "cu_seqlens_padded" in arrays:
        padded = arrays["cu_seqlens_padded"].astype(np.int64)
        room = np.diff(padded, prepend=0) - -(-np.diff(cu.astype(np.int64), prepend=0) // mult) * mult
        row = np.repeat(np.arange(rows), counts + 1)
        inside = np.ones(len(padded), np.bool_)
        inside[first] = False
        for i in np.flatnonzero(inside & (room != 0))[:MAX_LISTED]:
            message = f"cu_seqlens_padded is not cu_seqlens' lengths rounded up to {mult}"
            faults.add("P5", file, message, int(row[i]), value=int(padded[i]))
    return faults.total == before


def check_layout(job: Job, arrays: Mapping[str, np.ndarray], file: str, faults: Faults) -> bool:
    """P3: the arrays that depend on the recipe are there exactly when it asks for them."""
    before = faults.total
    objectives = [task.objective for task in job.tasks]
    in_place = any(objective.label_alignment == "same_slot" for objective in objectives)
    full = job.recipe.output.columns == "full"
    wanted = {
        "labels": in_place,
        "segment_ids": full,
        "loss_mask": full or in_place or "trained_offsets" in arrays,
        "cu_seqlens_padded": job.recipe.packing.pad_seq_to_mult > 1,
        "block_offsets": any(objective.name == "block_diffusion" for objective in objectives),
    }
    for name, has in wanted.items():
        if has != (name in arrays):
            faults.add(
                "P3",
                file,
                f"array {name!r} is {'missing' if has else 'there'}, and by the recipe it should {'' if has else 'not '}be there",
            )
    return faults.total == before


def check_arrays(job: Job, arrays: Mapping[str, np.ndarray], file: str, faults: Faults) -> bool:
    """P4 … P15 of one shard. Whether its segments can be inverted and counted."""
    recipe = job.recipe
    if not check_structure(arrays, file, recipe.seq_length, recipe.packing.pad_seq_to_mult, faults):
        return False
    row, begin, slots = segment_slots(arrays)
    headers_good = _check_headers(job, arrays, file, row, faults)
    arrays = _with_derived(arrays, row, begin, slots)
    if not headers_good or not check_parts(job, arrays, file, faults):
        return False
    stored = stored_segments(job, arrays)
    next_token = np.array([not task.in_place for task in job.tasks])[arrays["segment_task"]]
    check_slots(job, arrays, stored, next_token, file, faults)
    if not _check_law(job, arrays, stored, file, faults):
        return False
    check_noise(job, arrays, stored, file, faults)
    _check_coverage(job, arrays, stored, file, faults)
    return True


def _with_derived(
    arrays: Mapping[str, np.ndarray], row: np.ndarray, begin: np.ndarray, slots: np.ndarray
) -> Mapping[str, np.ndarray]:
    """The arrays, and those that a compact shard leaves out as the loader derives them."""
    shape = arrays["tokens"].shape
    at, size = row * shape[1] + begin, shape[0] * shape[1]
    derived = {}
    if "segment_ids" not in arrays:
        derived["segment_ids"] = segment_ids(row, at, slots, size).reshape(shape)
    if "loss_mask" not in arrays:
        derived["loss_mask"] = next_token_loss_mask(at, slots, arrays["segment_prefix"], size).reshape(shape)
    return {**arrays, **derived}


def _check_headers(job: Job, arrays: Mapping[str, np.ndarray], file: str, row: np.ndarray, faults: Faults) -> bool:
    """P11, and the ranges of P13: whether the header can be used as indices."""
    before = faults.total

    def bad(promise: str, wrong: np.ndarray, name: str, message: str) -> None:
        for g in np.flatnonzero(wrong):
            faults.add(promise, file, f"segment {g}: {name} {message}", int(row[g]), value=_plain(arrays[name][g]))

    n_files = sum(len(source.files) for source in job.sources)
    bad("P11", arrays["segment_task"] >= len(job.tasks), "segment_task", f"is none of the {len(job.tasks)} tasks")
    bad(
        "P11",
        arrays["segment_source"] >= len(job.sources),
        "segment_source",
        f"is none of the {len(job.sources)} sources",
    )
    bad("P11", arrays["segment_file"] >= n_files, "segment_file", f"is none of the plan's {n_files} files")
    bad("P11", arrays["segment_tokens"] < 1, "segment_tokens", "is not positive")
    bad("P11", arrays["segment_start"] < 0, "segment_start", "is negative")
    bad("P11", arrays["segment_doc"] < 0, "segment_doc", "is negative")
    weight, noise = arrays["segment_loss_weight"], arrays["segment_noise"]
    bad("P13", ~(np.isfinite(weight) & (weight >= 0)) | np.signbit(weight), "segment_loss_weight", "is no weight")
    bad("P13", ~((noise >= 0) & (noise <= 1)) | np.signbit(noise), "segment_noise", "is no noise level")
    if faults.total > before:
        return False
    plain = np.array([not task.in_place for task in job.tasks])[arrays["segment_task"]]
    bad("P13", plain & (weight != 1), "segment_loss_weight", "should be 1")
    bad("P13", plain & (noise != 0), "segment_noise", "should be 0")
    owner = np.repeat(np.arange(len(job.sources)), [len(source.files) for source in job.sources])
    bad("P11", owner[arrays["segment_file"]] != arrays["segment_source"], "segment_file", "belongs to another source")
    uses = np.array([source.uses for source in job.sources])
    bad(
        "P11",
        arrays["segment_repeat"] >= uses[arrays["segment_source"]],
        "segment_repeat",
        "is no use that the plan has",
    )
    bad(
        "P11", ~_kept(job, arrays), "segment_doc", "is no document that its source's sample and repeat keep in this use"
    )
    should = segment_key(
        file_keys(job, arrays["segment_file"]), arrays["segment_doc"], arrays["segment_repeat"], arrays["segment_start"]
    )
    bad("P11", should != arrays["segment_key"], "segment_key", "is not the key of its document, use and start")
    task, too_short, short = arrays["segment_task"], len(job.tasks) - 1, arrays["segment_tokens"] < SHORTEST
    wrong = task != np.where(short, too_short, _drawn(job, arrays, thresholds(job.recipe)))
    if "trained_offsets" in arrays:  # supervised documents draw among fewer tasks
        wrong &= task != np.where(short, too_short, _drawn(job, arrays, thresholds(job.recipe, supervised=True)))
    if job.recipe.packing.algorithm == "concat":  # where a row ends, too few tokens for the task drawn may be left
        wrong &= task != too_short
    bad("P11", wrong, "segment_task", "is not the task that its key draws")
    return faults.total == before


def _kept(job: Job, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """bool[segments]: whether the segment's document is one of those that its source takes in the segment's use, as far as
    the plan tells."""
    kept = np.ones(len(arrays["segment_key"]), np.bool_)
    for s, source in enumerate(job.sources):
        own = np.flatnonzero(arrays["segment_source"] == s)
        for use in np.unique(arrays["segment_repeat"][own]).tolist():
            if use >= source.uses or keeps_all(source, use):
                continue
            of_use = own[arrays["segment_repeat"][own] == use]
            for file in np.unique(arrays["segment_file"][of_use]).tolist():
                which = of_use[arrays["segment_file"][of_use] == file]
                if source.first_file <= file < source.first_file + len(source.files):
                    kept[which] = kept_by_plan(source, use, file, arrays["segment_doc"][which])
    return kept


def _drawn(job: Job, arrays: Mapping[str, np.ndarray], limits: np.ndarray) -> np.ndarray:
    """int64[segments]: the task that each segment's key draws from its source's."""
    u = (bits64(arrays["segment_key"], TASK) >> np.uint64(11)).astype(np.int64)
    drawn = np.zeros(len(u), np.int64)
    for s in range(len(job.sources)):
        own = arrays["segment_source"] == s
        drawn[own] = np.searchsorted(limits[s], u[own], "right")
    return drawn


def _check_law(job: Job, arrays: Mapping[str, np.ndarray], stored: Stored, file: str, faults: Faults) -> bool:
    """P12, P13, P14."""
    before = faults.total
    documents, roles = job.recipe.documents, job.vocabulary.roles
    row, begin, slots, bos, eos, copy, bodies = stored
    wrong = (eos < 0) | (eos > int(documents.append_eos)) | (copy < 0)
    for g in np.flatnonzero(wrong):
        message = f"segment {g}: it takes {slots[g]} slots, {eos[g]} more than its task's law without eos"
        faults.add("P12", file, message, int(row[g]), int(begin[g]), int(slots[g]))
    if wrong.any():
        return False
    in_place = np.array([task.in_place for task in job.tasks])[arrays["segment_task"]]
    at = row * job.recipe.seq_length + begin
    mode = np.array([task.mode_token for task in job.tasks])[arrays["segment_task"]]
    prefix = np.zeros(len(row), np.int64)
    for t, task in enumerate(job.tasks):
        own = np.flatnonzero(arrays["segment_task"] == t)
        if len(own):
            own_bodies = Bodies(*(column[own] for column in bodies))
            prefix[own] = expected_prefix(task, own_bodies, bos[own], slots[own])
    for name, has, place, should in (
        ("bos", bos == 1, at, roles.get("bos", -1)),
        ("mode token", mode >= 0, at + bos, mode),
        ("eos", eos == 1, at + slots - 1, roles.get("eos", -1)),
    ):
        which = np.flatnonzero(has)
        found = _original(arrays, in_place[which], place[which])
        for i in np.flatnonzero(found != np.broadcast_to(should, has.shape)[which]):
            g = which[i]
            slot = int(place[g] - row[g] * job.recipe.seq_length)
            faults.add("P12", file, f"segment {g}: no {name} where it belongs", int(row[g]), slot, int(found[i]))
    for g in np.flatnonzero(prefix != arrays["segment_prefix"]):
        message = f"segment {g}: segment_prefix should be {prefix[g]}"
        faults.add("P13", file, message, int(row[g]), int(begin[g]), int(arrays["segment_prefix"][g]))
    for g in np.flatnonzero(~fitting(job, arrays, stored)):
        faults.add("P14", file, f"segment {g}: a sentinel is missing or out of order", int(row[g]), int(begin[g]))
    return faults.total == before


def _original(arrays: Mapping[str, np.ndarray], in_place: np.ndarray, place: np.ndarray) -> np.ndarray:
    """int64[k]: the original tokens at flat slots: labels in in-place segments, tokens in the others."""
    tokens = arrays["tokens"].reshape(-1)[place].astype(np.int64)
    if not in_place.any():
        return tokens
    return np.where(in_place, arrays["labels"].reshape(-1)[place].astype(np.int64), tokens)


def _check_coverage(job: Job, arrays: Mapping[str, np.ndarray], stored: Stored, file: str, faults: Faults) -> None:
    """P15: all segments of a document are in one shard, and tile it. P12: its last one, and no other, has its eos."""
    start, n = arrays["segment_start"], arrays["segment_tokens"]
    columns = [arrays[f"segment_{name}"] for name in ("file", "repeat", "doc")]
    order = np.lexsort((start, columns[2], columns[1], columns[0]))
    goes_on = np.ones(len(order), np.bool_)  # whether the next one is of the same document
    goes_on[-1:] = False
    for column in columns:
        goes_on[:-1] &= column[order][1:] == column[order][:-1]
    ends = start[order] + n[order]
    should = np.concatenate((np.zeros(min(1, len(order)), np.int64), np.where(goes_on, ends, 0)[:-1]))
    wrong = start[order] != should
    if "trained_offsets" in arrays:  # segments without a trained token are left out
        wrong &= (start[order] < should) | ~_may_be_limited(job, arrays, order, goes_on)
    wrong = np.flatnonzero(wrong)
    row = stored.row
    for i in wrong:
        g = order[i]
        message = f"segment {g}: it begins with token {start[g]} of its document and should with {should[i]}"
        faults.add("P15", file, message, int(row[g]), value=int(start[g]))
    if len(wrong) or not job.recipe.documents.append_eos or "trained_offsets" in arrays:
        return
    begin, slots, eos = stored.begin, stored.slots, stored.eos[order]
    lacking = (eos == 0) & ~goes_on & (job.recipe.documents.long != "truncate")
    for which, words in (
        (goes_on & (eos == 1), "has an eos, and its document goes on"),
        (lacking, "ends its document, and has no eos"),
    ):
        for g in order[which]:
            slot = int(begin[g] + slots[g] - 1)
            faults.add("P12", file, f"segment {g}: it {words}", int(row[g]), slot, int(arrays["tokens"][row[g], slot]))


def _may_be_limited(job: Job, arrays: Mapping[str, np.ndarray], order: np.ndarray, goes_on: np.ndarray) -> np.ndarray:
    """bool[segments], in `order`: whether all the document's segments have the tasks that one draws whose loss is limited to
    ranges. Its pieces may each be trained from end to end, and look like any other's."""
    drawn = _drawn(job, arrays, thresholds(job.recipe, supervised=True))
    fits = (arrays["segment_task"] == drawn) | (arrays["segment_tokens"] < SHORTEST)
    document = np.cumsum(np.concatenate((np.zeros(min(1, len(order)), np.int64), ~goes_on[:-1])))
    others = np.bincount(document, ~fits[order], len(order))
    return others[document] == 0


def count_arrays(job: Job, arrays: Mapping[str, np.ndarray]) -> dict[str, dict[str, dict[str, int]]]:
    """What the arrays hold by source and by task: segments, tokens, slots; to compare with the ledger."""
    _, _, slots = segment_slots(arrays)
    counts: dict[str, dict[str, dict[str, int]]] = {"sources": {}, "tasks": {}}
    for kind, names in (("sources", [s.name for s in job.sources]), ("tasks", [t.name for t in job.tasks])):
        which = arrays["segment_source" if kind == "sources" else "segment_task"]
        for i, name in enumerate(names):
            own = which == i
            counts[kind][name] = {
                "segments": int(own.sum()),
                "tokens": int(arrays["segment_tokens"][own].sum(dtype=np.int64)),
                "slots": int(slots[own].sum()),
            }
    return counts


def _plain(value: np.generic) -> float | int | str:
    item = value.item()
    return item if not isinstance(item, float) or np.isfinite(item) else str(item)
