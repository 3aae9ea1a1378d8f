"""P3 to P5, P11 to P15, P18 to P20 and P23 to P25 of a shard's arrays, recomputed from its header;
`slots` walks the slots.

The arrays are those that are stored, or as an epoch has them: from the loader's own redraw, for the
same checks.
"""

import itertools
from collections.abc import Callable, Mapping

import numpy as np

from packprep.building.plan import Plan
from packprep.building.removal import removed_segments
from packprep.building.render import draw_noise, target_of
from packprep.building.segments import SegmentTable, expected_prefix
from packprep.dataset.attention import RULES
from packprep.dataset.boundaries import (
    fill_slots,
    next_token_loss_mask,
    put_block_labels,
    put_blocks,
    put_clean,
    read_only,
    segment_ids,
)
from packprep.dataset.loader import Dataset
from packprep.dataset.manifest import stores_labels
from packprep.dataset.noise import levels_by_block
from packprep.dataset.rows import RowSegments, fill, own_dtype
from packprep.dataset.shard import Shard
from packprep.documents.reading import keeps_all, kept_by_plan
from packprep.objectives.objective import Task
from packprep.objectives.tasks import SHORTEST, in_place_rules, thresholds
from packprep.randomness import TASK, bits64, segment_key, text_key
from packprep.restoring import FITTING_TOKENS, restore, segment_slots, stored_segments
from packprep.verification.faults import MAX_LISTED, Faults
from packprep.verification.slots import (
    WEIGHTS,
    check_media,
    check_removed,
    check_sentinels,
    check_sides,
    check_slots,
    seen_before,
    trainable_slots,
)


def check_structure(
    arrays: Mapping[str, np.ndarray], file: str, seq_length: int, mult: int, faults: Faults
) -> bool:
    """P4 and P5: whether rows and segments can be walked at all."""
    offsets, cu = arrays["row_offsets"], arrays["cu_seqlens"]
    rows, segments = len(offsets) - 1, len(arrays["segment_key"])
    before = faults.total
    if offsets[0] != 0:
        faults.add("P4", file, "row_offsets does not start at 0", 0, value=int(offsets[0]))
    if offsets[-1] != segments:
        faults.add(
            "P4",
            file,
            f"row_offsets does not end at the number of segments, {segments}",
            rows,
            value=int(offsets[-1]),
        )
    counts = np.diff(offsets)
    for r in np.flatnonzero((counts < 0) | (counts > 65535))[:MAX_LISTED]:
        faults.add(
            "P4",
            file,
            "row_offsets falls, or gives a row more than 65535 segments",
            int(r),
            value=int(counts[r]),
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
            faults.add(
                "P5", file, f"{name} does not start at 0", int(r), value=int(values[first[r]])
            )
        inside = np.ones(len(values), np.bool_)
        inside[first] = False
        step = np.diff(values.astype(np.int64), prepend=0)
        row = np.repeat(np.arange(rows), counts + 1)
        for i in np.flatnonzero(inside & (step <= 0))[:MAX_LISTED]:
            faults.add(
                "P5", file, f"{name} does not strictly increase", int(row[i]), value=int(values[i])
            )
        for r in np.flatnonzero(values[last] > seq_length)[:MAX_LISTED]:
            faults.add(
                "P5", file, f"{name} ends beyond the row", int(r), value=int(values[last[r]])
            )
    if "cu_seqlens_padded" in arrays:
        padded = arrays["cu_seqlens_padded"].astype(np.int64)
        room = (
            np.diff(padded, prepend=0) - -(-np.diff(cu.astype(np.int64), prepend=0) // mult) * mult
        )
        row = np.repeat(np.arange(rows), counts + 1)
        inside = np.ones(len(padded), np.bool_)
        inside[first] = False
        for i in np.flatnonzero(inside & (room != 0))[:MAX_LISTED]:
            message = f"cu_seqlens_padded is not cu_seqlens' lengths rounded up to {mult}"
            faults.add("P5", file, message, int(row[i]), value=int(padded[i]))
    return faults.total == before


def check_layout(plan: Plan, arrays: Mapping[str, np.ndarray], file: str, faults: Faults) -> bool:
    """P3: the arrays that depend on the recipe are there exactly when it asks for them."""
    before = faults.total
    objectives = [task.objective for task in plan.tasks]
    in_place, columns = in_place_rules(plan.tasks), plan.recipe.output.columns
    full = columns == "full"
    wanted = {
        "labels": stores_labels(columns, in_place),
        "segment_ids": full,
        "loss_mask": full or bool(in_place) or "trained_offsets" in arrays,
        "cu_seqlens_padded": plan.recipe.packing.pad_seq_to_mult > 1,
        "block_offsets": any(RULES[objective.attention].in_blocks for objective in objectives),
        "segment_removed": bool(plan.removed.segments(arrays).any()),
    }
    for name, has in wanted.items():
        if has != (name in arrays):
            faults.add(
                "P3",
                file,
                f"array {name!r} is {'missing' if has else 'there'}, and by the recipe it should"
                f" {'' if has else 'not '}be there",
            )
    return faults.total == before


def check_arrays(
    plan: Plan, arrays: Mapping[str, np.ndarray], file: str, faults: Faults, epoch: int = 0
) -> bool:
    """P4 … P15, P18 … P20 and P23 … P25 of one shard. Whether its segments can be inverted and
    counted. epoch: whose chance the arrays have, as `arrays_in_epoch` gives them."""
    recipe = plan.recipe
    if not check_structure(arrays, file, recipe.seq_length, recipe.packing.pad_seq_to_mult, faults):
        return False
    row, begin, slots = segment_slots(arrays)
    headers_good = _check_headers(plan, arrays, file, row, faults)
    arrays = _with_derived(plan, arrays, row, begin, slots)
    check_removed(plan, arrays, row, begin, slots, file, faults)
    if not headers_good or not check_parts(plan, arrays, file, faults):
        return False
    stored = stored_segments(plan, arrays)
    next_token = ~plan.by_task.in_place[arrays["segment_task"]]
    check_slots(plan, arrays, stored, next_token, file, faults)
    if not _check_law(plan, arrays, stored, file, faults, epoch):
        return False
    check_sides(recipe.packing.sides, arrays, row, slots, file, faults)
    blocks = check_noise(plan, arrays, stored, file, faults, epoch)
    if WEIGHTS in arrays:
        _check_weights(plan, arrays, stored, blocks, file, faults)
    _check_repeated(plan, arrays, stored, file, faults)
    if plan.vocabulary.media:
        check_media(plan, arrays, stored, file, faults)
    _check_coverage(plan, arrays, stored, file, faults)
    return True


def _with_derived(
    plan: Plan,
    arrays: Mapping[str, np.ndarray],
    row: np.ndarray,
    begin: np.ndarray,
    slots: np.ndarray,
) -> Mapping[str, np.ndarray]:
    """The arrays, and those that a compact shard leaves out as the loader derives them."""
    shape = arrays["tokens"].shape
    at, size = row * shape[1] + begin, shape[0] * shape[1]
    derived = {}
    if "segment_ids" not in arrays:
        derived["segment_ids"] = segment_ids(row, at, slots, size).reshape(shape)
    if "loss_mask" not in arrays:
        derived["loss_mask"] = next_token_loss_mask(
            at, slots, seen_before(arrays, slots), size
        ).reshape(shape)
    if "labels" not in arrays and in_place_rules(plan.tasks):
        tokens = arrays["tokens"].reshape(-1)
        labels = np.full(size, plan.vocabulary.roles["pad"], tokens.dtype)
        put_slots = fill_slots(at, slots - 1, np.ones(len(at), np.bool_), False, size)[:-1]
        np.copyto(labels[:-1], tokens[1:], where=put_slots)
        derived["labels"] = _with_block_labels(plan, arrays, labels, at, slots).reshape(shape)
    return {**arrays, **derived}


def _with_block_labels(
    plan: Plan,
    arrays: Mapping[str, np.ndarray],
    labels: np.ndarray,
    at: np.ndarray,
    slots: np.ndarray,
) -> np.ndarray:
    """Flat labels, in which those of block diffusion's segments are written as x_0 has them."""
    twice = _of_tasks(plan, arrays, lambda task: task.objective.copies > 1)
    shift = _of_tasks(plan, arrays, lambda task: task.shift)[twice]
    tokens, pad = arrays["tokens"].reshape(-1), plan.vocabulary.roles["pad"]
    put_block_labels(labels, tokens, at[twice], slots[twice] // 2, shift, pad)
    return labels


def _of_tasks(
    plan: Plan, arrays: Mapping[str, np.ndarray], what: Callable[[Task], bool]
) -> np.ndarray:
    """bool[segments]: what holds of each one's task."""
    known = np.array([what(task) for task in plan.tasks])
    task = arrays["segment_task"]
    return (task < len(known)) & known[np.minimum(task, len(known) - 1)]


def _check_headers(
    plan: Plan, arrays: Mapping[str, np.ndarray], file: str, row: np.ndarray, faults: Faults
) -> bool:
    """P11, and the ranges of P13: whether the header can be used as indices."""
    before = faults.total

    def bad(promise: str, wrong: np.ndarray, name: str, message: str) -> None:
        for g in np.flatnonzero(wrong):
            faults.add(
                promise,
                file,
                f"segment {g}: {name} {message}",
                int(row[g]),
                value=_plain(arrays[name][g]),
            )

    n_files = sum(len(source.files) for source in plan.sources)
    bad(
        "P11",
        arrays["segment_task"] >= len(plan.tasks),
        "segment_task",
        f"is none of the {len(plan.tasks)} tasks",
    )
    bad(
        "P11",
        arrays["segment_source"] >= len(plan.sources),
        "segment_source",
        f"is none of the {len(plan.sources)} sources",
    )
    bad(
        "P11",
        arrays["segment_file"] >= n_files,
        "segment_file",
        f"is none of the plan's {n_files} files",
    )
    bad("P11", arrays["segment_tokens"] < 1, "segment_tokens", "is not positive")
    bad("P11", arrays["segment_start"] < 0, "segment_start", "is negative")
    bad("P11", arrays["segment_doc"] < 0, "segment_doc", "is negative")
    weight, noise = arrays["segment_loss_weight"], arrays["segment_noise"]
    bad(
        "P13",
        ~(np.isfinite(weight) & (weight >= 0)) | np.signbit(weight),
        "segment_loss_weight",
        "is no weight",
    )
    bad(
        "P13",
        ~((noise >= 0) & (noise <= 1)) | np.signbit(noise),
        "segment_noise",
        "is no noise level",
    )
    if faults.total > before:
        return False
    plain = ~plan.by_task.in_place[arrays["segment_task"]]
    bad("P13", plain & (weight != 1), "segment_loss_weight", "should be 1")
    bad("P13", plain & (noise != 0), "segment_noise", "should be 0")
    owner = np.repeat(np.arange(len(plan.sources)), [len(source.files) for source in plan.sources])
    bad(
        "P11",
        owner[arrays["segment_file"]] != arrays["segment_source"],
        "segment_file",
        "belongs to another source",
    )
    uses = np.array([source.uses for source in plan.sources])
    bad(
        "P11",
        arrays["segment_repeat"] >= uses[arrays["segment_source"]],
        "segment_repeat",
        "is no use that the plan has",
    )
    bad(
        "P11",
        ~_kept(plan, arrays),
        "segment_doc",
        "is no document that its source's sample and repeat keep in this use",
    )
    should = segment_key(
        _file_keys(plan, arrays["segment_file"]),
        arrays["segment_doc"],
        arrays["segment_repeat"],
        arrays["segment_start"],
    )
    bad(
        "P11",
        should != arrays["segment_key"],
        "segment_key",
        "is not the key of its document, use and start",
    )
    task, too_short, short = (
        arrays["segment_task"],
        len(plan.tasks) - 1,
        arrays["segment_tokens"] < SHORTEST,
    )
    wrong = task != np.where(short, too_short, _drawn(plan, arrays, thresholds(plan.recipe)))
    if "trained_offsets" in arrays:  # supervised documents draw among fewer tasks
        wrong &= task != np.where(
            short, too_short, _drawn(plan, arrays, thresholds(plan.recipe, supervised=True))
        )
    # where a row ends, too few tokens for the task drawn may be left
    if plan.recipe.packing.algorithm == "concat":
        wrong &= task != too_short
    bad("P11", wrong, "segment_task", "is not the task that its key draws")
    return faults.total == before


def _file_keys(plan: Plan, files: np.ndarray) -> np.ndarray:
    """uint64[n]: the keys of files of the plan, int[n]."""
    which, place = np.unique(files, return_inverse=True)
    first = np.array([source.first_file for source in plan.sources])
    keys = np.zeros(len(which), np.uint64)
    for k, file in enumerate(which.tolist()):
        source = plan.sources[int(np.searchsorted(first, file, "right")) - 1]
        keys[k] = text_key(source.seed, source.name, source.files.names[file - source.first_file])
    return keys[place]


def _kept(plan: Plan, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """bool[segments]: whether the segment's document is one of those that its source takes in the
    segment's use, as far as the plan tells."""
    kept = np.ones(len(arrays["segment_key"]), np.bool_)
    for s, source in enumerate(plan.sources):
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


def _drawn(plan: Plan, arrays: Mapping[str, np.ndarray], limits: np.ndarray) -> np.ndarray:
    """int64[segments]: the task that each segment's key draws from its source's."""
    u = (bits64(arrays["segment_key"], TASK) >> np.uint64(11)).astype(np.int64)
    drawn = np.zeros(len(u), np.int64)
    for s in range(len(plan.sources)):
        of_source = arrays["segment_source"] == s
        drawn[of_source] = np.searchsorted(limits[s], u[of_source], "right")
    return drawn


def _check_law(
    plan: Plan,
    arrays: Mapping[str, np.ndarray],
    stored: SegmentTable,
    file: str,
    faults: Faults,
    epoch: int,
) -> bool:
    """P12, P13, P14."""
    before = faults.total
    documents, roles = plan.recipe.documents, plan.vocabulary.roles
    row, begin, slots, bos, eos, copy = (
        stored.row,
        stored.first_slot,
        stored.slots,
        stored.bos,
        stored.eos,
        stored.copy,
    )
    wrong = (
        (eos < int(documents.eos_after_segment))
        | (eos > int(documents.eos_after_document))
        | (copy < 0)
    )
    for g in np.flatnonzero(wrong):
        message = (
            f"segment {g}: it takes {slots[g]} slots, {eos[g]} more than its task's law without eos"
        )
        faults.add("P12", file, message, int(row[g]), int(begin[g]), int(slots[g]))
    if wrong.any():
        return False
    in_place = plan.by_task.in_place[arrays["segment_task"]]
    clean = np.where(_of_tasks(plan, arrays, lambda task: task.objective.copies > 1), slots // 2, 0)
    in_place &= clean == 0  # the others have their tokens in x_0
    at = row * plan.recipe.seq_length + begin
    mode = plan.by_task.mode_token[arrays["segment_task"]]
    prefix, removed = np.zeros(len(row), np.int64), removed_segments(arrays)
    for t, task in enumerate(plan.tasks):
        of_task = np.flatnonzero(arrays["segment_task"] == t)
        if len(of_task):
            prefix[of_task] = expected_prefix(
                task, stored.of(of_task).bodies(epoch), bos[of_task], slots[of_task]
            )
            if RULES[task.objective.attention].ahead == "prefix":
                prefix[of_task[removed[of_task] & (not task.keeps_prefix)]] = 0
    for name, has, place, should in (
        ("bos", bos == 1, at, roles.get("bos", -1)),
        ("mode token", mode >= 0, at + bos, mode),
        ("eos", eos == 1, at + slots - 1, roles.get("eos", -1)),
    ):
        which = np.flatnonzero(has & ~removed)
        found = _original(arrays, in_place[which], place[which] + clean[which] * (name != "eos"))
        for i in np.flatnonzero(found != np.broadcast_to(should, has.shape)[which]):
            g = which[i]
            slot = int(place[g] - row[g] * plan.recipe.seq_length)
            faults.add(
                "P12",
                file,
                f"segment {g}: no {name} where it belongs",
                int(row[g]),
                slot,
                int(found[i]),
            )
    for g in np.flatnonzero(prefix != arrays["segment_prefix"]):
        message = f"segment {g}: segment_prefix should be {prefix[g]}"
        faults.add(
            "P13", file, message, int(row[g]), int(begin[g]), int(arrays["segment_prefix"][g])
        )
    check_sentinels(plan, arrays, stored, file, faults, epoch)
    return faults.total == before


def _original(
    arrays: Mapping[str, np.ndarray], in_place: np.ndarray, place: np.ndarray
) -> np.ndarray:
    """int64[k]: the original tokens at flat slots: labels in in-place segments, tokens in the
    others."""
    tokens = arrays["tokens"].reshape(-1)[place].astype(np.int64)
    if not in_place.any():
        return tokens
    return np.where(in_place, arrays["labels"].reshape(-1)[place].astype(np.int64), tokens)


def _check_repeated(
    plan: Plan, arrays: Mapping[str, np.ndarray], stored: SegmentTable, file: str, faults: Faults
) -> None:
    """P19: what a later piece repeats of its document's begin is not trained."""
    if "trained_offsets" not in arrays:
        return
    offsets = arrays["trained_offsets"]
    mode = plan.by_task.mode[arrays["segment_task"]]
    first = np.append(arrays["trained_ranges"][:, 0], 0)[offsets[:-1]]
    wrong = (
        (stored.copy > 0)
        & (np.diff(offsets) > 0)
        & ~removed_segments(arrays)
        & (first < stored.bos + mode + stored.copy)
    )
    for g in np.flatnonzero(wrong)[:MAX_LISTED]:
        message = (
            f"segment {g}: a trained range begins among the {stored.copy[g]} tokens that it repeats"
        )
        faults.add(
            "P19", file, message, int(stored.row[g]), int(stored.first_slot[g]) + int(first[g])
        )


def _check_coverage(
    plan: Plan, arrays: Mapping[str, np.ndarray], stored: SegmentTable, file: str, faults: Faults
) -> None:
    """P15: a document's segments are in one shard and tile it. P12: only its last one has eos."""
    start, n = arrays["segment_start"], arrays["segment_tokens"]
    columns = [arrays[f"segment_{name}"] for name in ("file", "repeat", "doc")]
    order = np.lexsort((start, columns[2], columns[1], columns[0]))
    goes_on = np.ones(len(order), np.bool_)  # whether the next one is of the same document
    goes_on[-1:] = False
    for column in columns:
        goes_on[:-1] &= column[order][1:] == column[order][:-1]
    ends = start[order] + n[order]
    should = np.concatenate(
        (np.zeros(min(1, len(order)), np.int64), np.where(goes_on, ends, 0)[:-1])
    )
    wrong = start[order] != should
    if "trained_offsets" in arrays:  # segments without a trained token are left out
        wrong &= (start[order] < should) | ~_may_be_limited(plan, arrays, order, goes_on)
    # what is between them fills rows of other lengths
    if plan.recipe.documents.long == "decompose":
        wrong &= start[order] < should
    wrong = np.flatnonzero(wrong)
    row, documents = stored.row, plan.recipe.documents
    for i in wrong:
        g = order[i]
        message = (
            f"segment {g}: it begins with token {start[g]} of its document and should with"
            f" {should[i]}"
        )
        faults.add("P15", file, message, int(row[g]), value=int(start[g]))
    if (
        len(wrong)
        or documents.eos_after_segment
        or not documents.eos_after_document
        or "trained_offsets" in arrays
    ):
        return
    begin, slots, eos = stored.first_slot, stored.slots, stored.eos[order]
    lacking = (eos == 0) & ~goes_on & (documents.long not in ("truncate", "decompose"))
    for which, words in (
        (goes_on & (eos == 1), "has an eos, and its document goes on"),
        (lacking, "ends its document, and has no eos"),
    ):
        for g in order[which]:
            slot = int(begin[g] + slots[g] - 1)
            faults.add(
                "P12",
                file,
                f"segment {g}: it {words}",
                int(row[g]),
                slot,
                int(arrays["tokens"][row[g], slot]),
            )


def _may_be_limited(
    plan: Plan, arrays: Mapping[str, np.ndarray], order: np.ndarray, goes_on: np.ndarray
) -> np.ndarray:
    """bool[segments], in `order`: whether all the document's segments have the tasks that one draws
    whose loss is limited to ranges. Its pieces may each be trained from end to end, and look like
    any other's."""
    drawn = _drawn(plan, arrays, thresholds(plan.recipe, supervised=True))
    fits = (arrays["segment_task"] == drawn) | (arrays["segment_tokens"] < SHORTEST)
    document = np.cumsum(np.concatenate((np.zeros(min(1, len(order)), np.int64), ~goes_on[:-1])))
    others = np.bincount(document, ~fits[order], len(order))
    return others[document] == 0


def _plain(value: np.generic) -> float | int | str:
    item = value.item()
    return item if not isinstance(item, float) or np.isfinite(item) else str(item)


def check_parts(plan: Plan, arrays: Mapping[str, np.ndarray], file: str, faults: Faults) -> bool:
    """P19, P20 and P25, as far as the arrays can be walked: offsets, ranges and counts."""
    before = faults.total
    row, _, slots = segment_slots(arrays)
    if "media_offsets" in arrays and not (plan.vocabulary.media and len(arrays["media_slot"])):
        faults.add(
            "P3", file, "there are arrays of media, and no place of it, or no kind in the recipe"
        )
        return False
    for name, values, promise in (
        ("trained_offsets", "trained_ranges", "P19"),
        ("block_offsets", "block_noise", "P20"),
        ("media_offsets", "media_slot", "P25"),
        ("media_ref_offsets", "media_ref", "P25"),
    ):
        if name not in arrays:
            continue
        bounds = arrays[name]
        if bounds[0] != 0 or bounds[-1] != len(arrays[values]) or (np.diff(bounds) < 0).any():
            message = f"{name} does not ascend from 0 to the number of {values}"
            faults.add(promise, file, message, value=int(bounds[-1]))
            return False
    if "trained_offsets" in arrays:
        bounds, ranges = arrays["trained_offsets"], arrays["trained_ranges"].astype(np.int64)
        segment = np.repeat(np.arange(len(row)), np.diff(bounds))
        begins_after = np.ones(len(ranges), np.int64) * -1
        same = segment[1:] == segment[:-1]
        begins_after[1:][same] = ranges[:-1, 1][same]
        weights = arrays.get("trained_weights")
        if weights is not None:
            begins_after[1:][same & (weights[1:] != weights[:-1])] -= 1  # they may touch
            for i in np.flatnonzero(~(np.isfinite(weights) & (weights > 0))):
                message = (
                    f"segment {segment[i]}: trained range {ranges[i].tolist()} has no finite weight"
                    " above 0"
                )
                faults.add("P19", file, message, int(row[segment[i]]), value=str(weights[i]))
            if (weights == 1).all():
                faults.add(
                    "P19", file, "every weight in trained_weights is 1, and then it is left out"
                )
        bad = (
            (ranges[:, 0] <= begins_after)
            | (ranges[:, 1] <= ranges[:, 0])
            | (ranges[:, 1] > slots[segment])
        )
        for i in np.flatnonzero(bad):
            g = segment[i]
            message = (
                f"segment {g}: trained range {ranges[i].tolist()} is empty, out of order or outside"
                f" its {slots[g]} slots"
            )
            faults.add("P19", file, message, int(row[g]))
    if "block_offsets" in arrays:
        length = plan.by_task.block_length[arrays["segment_task"]]
        by_block = [
            RULES[t.objective.attention].in_blocks and levels_by_block(t.parameters)
            for t in plan.tasks
        ]
        blocked = np.array(by_block)[arrays["segment_task"]]
        should = np.where(blocked, -(-(slots // 2) // np.maximum(length, 1)), 0)
        found = np.diff(arrays["block_offsets"])
        for g in np.flatnonzero(found != should):
            faults.add(
                "P20",
                file,
                f"segment {g}: it has {found[g]} blocks and needs {should[g]}",
                int(row[g]),
            )
        noise, weight = arrays["block_noise"], arrays["block_loss_weight"]
        for i in np.flatnonzero(~((noise > 0) & (noise <= 1) & np.isfinite(weight))):
            faults.add(
                "P20", file, f"block {i}: its level or weight is out of range", value=str(noise[i])
            )
    return faults.total == before


Blocks = list[tuple[np.ndarray, Task, tuple[np.ndarray, np.ndarray, np.ndarray]]]
"""(segments, their task, (how many blocks each has, levels, weights)) of tasks."""


def check_noise(
    plan: Plan,
    arrays: Mapping[str, np.ndarray],
    stored: SegmentTable,
    file: str,
    faults: Faults,
    epoch: int,
) -> Blocks:
    """P18: noise drawn anew from labels and keys is that of the arrays; so it lies on candidates
    alone. Gives the blocks."""
    blocks: Blocks = []
    in_place = plan.by_task.in_place[arrays["segment_task"]]
    if not in_place.any():
        return blocks
    length = arrays["tokens"].shape[1]
    trainable = trainable_slots(arrays, stored).reshape(-1) if "trained_offsets" in arrays else None
    twice = _of_tasks(plan, arrays, lambda task: task.objective.copies > 1)
    at = stored.row * length + stored.first_slot
    tokens = arrays["labels"].reshape(-1).copy()
    put_clean(tokens, arrays["tokens"].reshape(-1), at[twice], stored.slots[twice] // 2)
    labels = _with_block_labels(plan, arrays, arrays["labels"].reshape(-1).copy(), at, stored.slots)
    for i in np.flatnonzero(labels != arrays["labels"].reshape(-1))[:MAX_LISTED]:
        message = f"label should be {labels[i]}, as x_0 has it"
        faults.add(
            "P10",
            file,
            message,
            int(i // length),
            int(i % length),
            int(arrays["labels"].reshape(-1)[i]),
        )
    loss_mask = np.zeros(len(tokens), np.uint8)
    for t, task in enumerate(plan.tasks):
        of_task = np.flatnonzero(arrays["segment_task"] == t)
        if not task.in_place or not len(of_task):
            continue
        table = stored.of(of_task)
        target = target_of(
            task, table, table.row * length + table.first_slot, tokens, loss_mask, trainable
        )
        noised = draw_noise(t, task, target, epoch)
        for name, again in (
            ("segment_noise", noised.level),
            ("segment_loss_weight", noised.weight),
        ):
            stored_values = arrays[name][of_task]
            for i in np.flatnonzero(stored_values != again)[:MAX_LISTED]:
                message = f"segment {of_task[i]}: {name} should be {again[i]}"
                faults.add(
                    "P18", file, message, int(stored.row[of_task[i]]), value=float(stored_values[i])
                )
        if noised.blocks is None:
            continue
        blocks.append((of_task, task, noised.blocks))
        if not epoch:
            which = np.concatenate(
                [np.arange(*arrays["block_offsets"][g : g + 2]) for g in of_task]
            )
            for name, again in (
                ("block_noise", noised.blocks[1]),
                ("block_loss_weight", noised.blocks[2]),
            ):
                for i in np.flatnonzero(arrays[name][which] != again)[:MAX_LISTED]:
                    faults.add(
                        "P18",
                        file,
                        f"block {which[i]}: {name} should be {again[i]}",
                        value=float(arrays[name][which[i]]),
                    )
    removed = stored.of(np.flatnonzero(removed_segments(arrays) & in_place))
    away = fill_slots(
        removed.row * length + removed.first_slot,
        removed.slots,
        np.ones(len(removed.n), np.bool_),
        False,
        len(tokens),
    )
    tokens[away], loss_mask[away] = plan.vocabulary.roles["pad"], 0
    # Segments do not overlap: all tasks' noise is drawn into one copy, and compared at once.
    mine = fill_slots(at, stored.slots, in_place, False, len(tokens))
    for name, again in (("tokens", tokens), ("loss_mask", loss_mask)):
        values = arrays[name].reshape(-1)
        for i in np.flatnonzero((values != again) & mine)[:MAX_LISTED]:
            message = f"{name} drawn anew is {again[i]}"
            faults.add("P18", file, message, int(i // length), int(i % length), int(values[i]))
    return blocks


def _check_weights(
    plan: Plan,
    arrays: Mapping[str, np.ndarray],
    stored: SegmentTable,
    blocks: Blocks,
    file: str,
    faults: Faults,
) -> None:
    """P13 and P18 of an epoch's loss_weights: loss_mask times the weight of segment or block, times
    that of the trained range in which what the slot predicts lies."""
    length, size = arrays["tokens"].shape[1], arrays["tokens"].size
    at = stored.row * length + stored.first_slot
    in_place = plan.by_task.in_place[arrays["segment_task"]]
    should = fill_slots(at, stored.slots, arrays["segment_loss_weight"], 0, size)
    for which, task, (count, _, weights) in blocks:
        length_of = np.full(len(which), task.parameters["block_length"])
        put_blocks(
            should, at[which], stored.slots[which] // 2, length_of, count, weights, int(task.shift)
        )
    if "trained_weights" in arrays:
        segment = np.repeat(np.arange(len(at)), np.diff(arrays["trained_offsets"]))
        ranges = arrays["trained_ranges"].astype(np.int64) - (1 - in_place[segment])[:, None]
        begins = np.maximum(ranges[:, 0], 0)
        should *= fill_slots(
            at[segment] + begins, ranges[:, 1] - begins, arrays["trained_weights"], 1, size
        )
    should *= arrays["loss_mask"].reshape(-1)
    found = arrays[WEIGHTS].reshape(-1)
    for i in np.flatnonzero(found != should)[:MAX_LISTED]:
        g = int(np.searchsorted(at, i, "right")) - 1
        promise = "P18" if g >= 0 and in_place[g] else "P13"
        message = f"segment {g}: {WEIGHTS} should be {should[i]}"
        faults.add(promise, file, message, int(i // length), int(i % length), float(found[i]))


def check_same_tokens(
    plan: Plan,
    stored: Mapping[str, np.ndarray],
    arrays: Mapping[str, np.ndarray],
    file: str,
    faults: Faults,
    epoch: int,
) -> None:
    """P17 of a shard's arrays in an epoch: inverting them gives the tokens that inverting the
    stored ones gives."""
    table = stored_segments(plan, arrays)
    ends = np.cumsum(table.n)
    bounds = np.searchsorted(ends, np.arange(0, int(ends[-1]) if len(ends) else 0, FITTING_TOKENS))
    for begin, end in itertools.pairwise(np.unique([*bounds, len(ends)]).tolist()):
        chosen = np.arange(begin, end)
        found, offsets, _ = restore(plan, arrays, table, chosen, epoch)
        differs = np.flatnonzero(found != restore(plan, stored, table, chosen).ids)
        for g in begin + np.unique(np.searchsorted(offsets, differs, "right") - 1)[:MAX_LISTED]:
            message = f"segment {g}: inverting it does not give the tokens of its stored slots"
            faults.add("P17", file, message, int(table.row[g]), int(table.first_slot[g]))


# The arrays of an epoch

SLOTS_AT_ONCE = 1 << 20
"""Slots of rows that are drawn anew at a time: redraw takes some hundred bytes for each."""
HEADER = ("prefix", "noise", "loss_weight")
"""The columns of the header that follow the epoch."""
BLOCKS = ("block_noise", "block_loss_weight")


def arrays_in_epoch(dataset: Dataset, shard: Shard, epoch: int) -> Mapping[str, np.ndarray]:
    """The arrays of a shard of `dataset` as redraw gives its rows in `epoch`, but for those of
    BLOCKS, which are as stored; also loss_mask where it is not stored, and loss_weights.

    DatasetError where what is stored cannot be drawn anew.
    """
    names = ["tokens", *(["labels"] if "labels" in shard.layout else []), "loss_mask", WEIGHTS]
    shape = (shard.rows, shard.seq_length)
    columns = {name: np.empty(shape, own_dtype(name, dataset.token_dtype)) for name in names}
    header: dict[str, list[np.ndarray]] = {
        name: [shard.arrays[f"segment_{name}"][:0]] for name in HEADER
    }
    at_once = max(1, SLOTS_AT_ONCE // shard.seq_length)
    for first in range(0, shard.rows, at_once):
        places = [(shard, row) for row in range(first, min(first + at_once, shard.rows))]
        segments = RowSegments(dataset.facts, places)
        rows = {name: values[first : first + len(places)] for name, values in columns.items()}
        for name, values in rows.items():
            fill(segments, name, values)
        dataset.redraw(segments, rows, [epoch] * len(places))
        for name, parts in header.items():
            parts.append(segments.column(name))
    for name, parts in header.items():
        stored = shard.arrays[f"segment_{name}"]
        columns[f"segment_{name}"] = np.concatenate(parts, dtype=stored.dtype, casting="same_kind")
    return {**shard.arrays, **{name: read_only(values) for name, values in columns.items()}}
