"""Check the arrays of a shard against the invariants P3 to P15, P18 to P20 and P23 to P25.

`PROMISES` in `packprep.verification` states each invariant. The checks compute the expected values
from the shard's header, which is its `segment_*` arrays. The module `slots` checks the arrays that
have one value per slot. The same checks apply to stored arrays and to arrays that the loader
resampled for an epoch.
"""

import itertools

import numpy as np

from packprep.building.plan import Plan
from packprep.building.render import draw_noise, target_of
from packprep.building.segments import expected_prefix
from packprep.dataset.attention import RULES
from packprep.dataset.blocks import (
    Blocks,
    answers_of_ranges,
    blocks_of,
    joined_blocks,
    put_by_block,
)
from packprep.dataset.boundaries import (
    descents,
    fill_slots,
    next_token_loss_mask,
    put_block_labels,
    put_clean,
    ranks,
    read_only,
    segment_ids,
)
from packprep.dataset.epochs.noise import NoisedBlocks, levels_by_block
from packprep.dataset.loader import Dataset
from packprep.dataset.manifest import stores_labels
from packprep.dataset.rows import RowSegments, fill, own_dtype
from packprep.dataset.segments import Arrays, Records, Segments
from packprep.dataset.shard import Shard
from packprep.documents.reading import keeps_all, kept_by_plan
from packprep.objectives.objective import Task
from packprep.objectives.tasks import SHORTEST, in_place_rules, thresholds
from packprep.randomness import TASK, bits64, segment_key, text_key
from packprep.restoring import FITTING_TOKENS, restore, stored_segments
from packprep.verification.coverage import grouped_sources, sources_of_files
from packprep.verification.faults import MAX_LISTED, Faults
from packprep.verification.shard_check import ShardCheck
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


def check_structure(arrays: Arrays, file: str, seq_length: int, mult: int, faults: Faults) -> bool:
    """Check P4 and P5 of `row_offsets` and `cu_seqlens`, and return whether both hold.

    Args:
        arrays: The shard's arrays.
        file: Name of the shard, for messages.
        seq_length: Slots per row.
        mult: `cu_seqlens_padded` rounds each segment's length up to a multiple of this number.
        faults: Receives the faults.
    """
    offsets, segments = arrays["row_offsets"], len(arrays["segment_key"])
    rows, counts = len(offsets) - 1, np.diff(offsets)
    faults_before = faults.total

    def add(promise: str, message: str, row: int | np.integer, value: np.integer) -> None:
        faults.add(promise, file, message, int(row), value=int(value))

    # Without valid row offsets, the boundaries of segments cannot be assigned to rows.
    if offsets[0] != 0:
        add("P4", "row_offsets does not start at 0", 0, offsets[0])
    if offsets[-1] != segments:
        message = f"row_offsets does not end at the number of segments, {segments}"
        add("P4", message, rows, offsets[-1])
    for r in np.flatnonzero((counts < 0) | (counts > 65535))[:MAX_LISTED]:
        add("P4", "row_offsets decreases, or gives a row more than 65535 segments", r, counts[r])
    if faults.total > faults_before:
        return False
    # A row with n segments has n + 1 boundaries.
    row = np.repeat(np.arange(rows), counts + 1)
    is_first, is_last = np.zeros((2, len(row)), np.bool_)
    is_first[offsets[:-1] + np.arange(rows)] = True
    is_last[offsets[1:] + np.arange(rows)] = True
    rounded_up = -(-np.diff(arrays["cu_seqlens"].astype(np.int64), prepend=0) // mult) * mult
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        if name not in arrays:
            continue
        values = arrays[name].astype(np.int64)
        steps = np.diff(values, prepend=0)
        wrong_bounds = {
            "does not start at 0": is_first & (values != 0),
            "does not strictly increase": ~is_first & (steps <= 0),
            "ends after the row": is_last & (values > seq_length),
        }
        if name == "cu_seqlens_padded":
            message = f"does not have the lengths of cu_seqlens, rounded up to {mult}"
            wrong_bounds[message] = ~is_first & (steps != rounded_up)
        for message, is_wrong in wrong_bounds.items():
            for i in np.flatnonzero(is_wrong)[:MAX_LISTED]:
                add("P5", f"{name} {message}", row[i], values[i])
    return faults.total == faults_before


def check_layout(plan: Plan, arrays: Arrays, file: str, faults: Faults) -> bool:
    """Check P3: an array that depends on the recipe exists if and only if the recipe requires it.

    Return whether no fault was found.
    """
    total_before = faults.total
    objectives = [task.objective for task in plan.tasks]
    in_place, columns = in_place_rules(plan.tasks), plan.recipe.output.columns
    full = columns == "full"
    required_arrays = {
        "labels": stores_labels(columns, in_place),
        "segment_ids": full,
        "loss_mask": full or bool(in_place) or "trained_offsets" in arrays,
        "cu_seqlens_padded": plan.recipe.packing.pad_seq_to_mult > 1,
        "record_offsets": bool(grouped_sources(plan).any()),
        "block_offsets": any(RULES[objective.attention].in_blocks for objective in objectives),
    }
    for name, has in required_arrays.items():
        if has != (name in arrays):
            faults.add(
                "P3",
                file,
                f"array {name!r} is {'missing' if has else 'present'}, but the recipe"
                f" {'requires it' if has else 'does not use it'}",
            )
    return faults.total == total_before


def check_arrays(plan: Plan, arrays: Arrays, file: str, faults: Faults, epoch: int = 0) -> bool:
    """Check all invariants of a shard's arrays: P4 to P15, P18 to P20 and P23 to P25.

    Args:
        plan: The dataset's plan.
        arrays: The shard's arrays, stored or from `arrays_in_epoch`.
        file: Name of the shard, for messages.
        faults: Receives the faults.
        epoch: The epoch for which the noise of the arrays was drawn.

    Returns:
        False if a fault makes it impossible to count the segments, or to restore their original
        tokens. Otherwise True, even if other faults were found.
    """
    recipe = plan.recipe
    if not check_structure(arrays, file, recipe.seq_length, recipe.packing.pad_seq_to_mult, faults):
        return False
    header = ShardCheck(plan, arrays, Segments.of_arrays(arrays), file, faults, epoch)
    # All later checks use task, source and file as indices.
    if not _check_tasks(header):
        return False
    check = header.replace(arrays=_with_derived(header))
    is_good = _check_headers(check)
    check_removed(check)
    if not is_good or not check_parts(check):
        return False
    # The parts are valid now, so bos, eos and repeated tokens can be computed.
    check = check.replace(segments=stored_segments(plan, check.arrays))
    check_slots(check)
    if not _check_form(check):
        return False
    check_sides(check)
    blocks = check_noise(check)
    if WEIGHTS in arrays:
        _check_weights(check, blocks)
    _check_repeated(check)
    if plan.vocabulary.media:
        check_media(check)
    _check_coverage(check)
    return True


def _with_derived(check: ShardCheck) -> Arrays:
    """Return the shard's arrays, together with the arrays that a compact shard omits.

    A compact shard may omit `segment_ids`, `loss_mask` and `labels`. They are derived in the same
    way as in the loader. `labels` is derived only if a task predicts at the same position.
    """
    arrays, segments, first_slots = check.arrays, check.segments, check.first_slots
    shape, size, derived = arrays["tokens"].shape, arrays["tokens"].size, {}
    if "segment_ids" not in arrays:
        derived["segment_ids"] = segment_ids(segments.row, first_slots, segments.slots, size)
    if "loss_mask" not in arrays:
        derived["loss_mask"] = next_token_loss_mask(
            first_slots, segments.slots, seen_before(segments), size
        )
    if "labels" not in arrays and in_place_rules(check.plan.tasks):
        tokens = check.flat("tokens")
        labels = np.full(size, check.plan.vocabulary.roles["pad"], tokens.dtype)
        has_next = np.ones(len(segments), np.bool_)
        # The last slot of a segment has no next token, so it keeps pad_id.
        put_slots = fill_slots(first_slots, segments.slots - 1, has_next, False, size)[:-1]
        np.copyto(labels[:-1], tokens[1:], where=put_slots)
        derived["labels"] = _with_block_labels(check, labels)
    return {**arrays, **{name: values.reshape(shape) for name, values in derived.items()}}


def _with_block_labels(check: ShardCheck, labels: np.ndarray) -> np.ndarray:
    """Set the labels of block-diffusion segments from their clean tokens x_0, and return `labels`.

    `labels` is flat, int[rows * seq_length], and is changed in place.
    """
    twice = check.segments.select(check.is_twice)
    shift, pad = check.plan.by_task.shift[twice.task], check.plan.vocabulary.roles["pad"]
    first_slots = check.first_slots[check.is_twice]
    put_block_labels(labels, check.flat("tokens"), first_slots, twice.slots // 2, shift, pad)
    return labels


def _check_tasks(check: ShardCheck) -> bool:
    """Check P11: each segment's task, source and file are valid indices. Return whether all are."""
    total_before, plan = check.faults.total, check.plan
    n_files = sum(len(source.files) for source in plan.sources)
    for name, count, noun in (
        ("task", len(plan.tasks), "tasks"),
        ("source", len(plan.sources), "sources"),
        ("file", n_files, "files"),
    ):
        values = getattr(check.segments, name)
        for g in np.flatnonzero(values >= count):
            message = f"segment_{name} is not one of the plan's {count} {noun}"
            check.add_segment("P11", g, message, value=int(values[g]))
    return check.faults.total == total_before


def _check_headers(check: ShardCheck) -> bool:
    """Check each segment's origin, key and task (P11), and its noise level and loss weight (P13).

    Return whether no fault was found.
    """
    total_before, plan, segments = check.faults.total, check.plan, check.segments

    def bad(promise: str, is_wrong: np.ndarray, name: str, message: str) -> None:
        for g in np.flatnonzero(is_wrong):
            value = _plain(getattr(segments, name)[g])
            check.add_segment(promise, g, f"segment_{name} {message}", value=value)

    # Check the range of each number.
    bad("P11", segments.tokens < 0, "tokens", "is negative")
    bad("P11", segments.start < 0, "start", "is negative")
    bad("P11", segments.doc < 0, "doc", "is negative")
    weight, level = segments.loss_weight, segments.noise
    is_weight = np.isfinite(weight) & (weight >= 0) & ~np.signbit(weight)
    bad("P13", ~is_weight, "loss_weight", "is not a valid weight")
    is_level = (level >= 0) & (level <= 1) & ~np.signbit(level)
    bad("P13", ~is_level, "noise", "is not a valid noise level")
    if check.faults.total > total_before:
        return False
    is_clean = ~(check.in_place & segments.has_tokens)
    bad("P13", is_clean & (weight != 1), "loss_weight", "should be 1")
    bad("P13", is_clean & (level != 0), "noise", "should be 0")
    # Check that the plan has the documents.
    bad(
        "P11",
        sources_of_files(plan)[segments.file] != segments.source,
        "file",
        "belongs to another source",
    )
    passes = np.array([source.uses for source in plan.sources])[segments.source]
    bad("P11", segments.repeat >= passes, "repeat", "is not a pass of the plan")
    message = "is a document that its source's sample and repeat exclude in this pass"
    bad("P11", ~_kept(check), "doc", message)
    key = segment_key(
        _file_keys(plan, segments.file), segments.doc, segments.repeat, segments.start
    )
    message = "is not the key of its document, pass and start"
    bad("P11", key != segments.key, "key", message)
    bad("P11", ~_may_have_task(check), "task", "is not the task that its key selects")
    return check.faults.total == total_before


def _may_have_task(check: ShardCheck) -> np.ndarray:
    """Return which segments have a task that the build could have given to them, bool[m].

    The build gives a segment the task that the segment's key draws, or `too_short` if the segment
    has few tokens.
    """
    plan, segments = check.plan, check.segments
    is_too_short = segments.task == plan.too_short
    fits = segments.task == _drawn(check, thresholds(plan.recipe))
    if segments.trained is not None:  # Supervised documents draw among fewer tasks.
        fits |= segments.task == _drawn(check, thresholds(plan.recipe, supervised=True))
    # A segment may have had few tokens before they were removed. With `concat`, the last segment of
    # a row may be too short for the drawn task.
    may_be_short = ~segments.has_tokens | (plan.recipe.packing.algorithm == "concat")
    is_short = segments.has_tokens & (segments.tokens < SHORTEST)
    return np.where(is_short, is_too_short, fits | (is_too_short & may_be_short))


def _file_keys(plan: Plan, files: np.ndarray) -> np.ndarray:
    """Return the key of each file, uint64[n]. `files` has the indices of the files in the plan.

    `segment_key` derives the keys of a file's segments from the key of the file.
    """
    numbers, inverse = np.unique(files, return_inverse=True)
    first_files = np.array([source.first_file for source in plan.sources])
    keys = np.zeros(len(numbers), np.uint64)
    for k, file in enumerate(numbers.tolist()):
        source = plan.sources[int(np.searchsorted(first_files, file, "right")) - 1]
        keys[k] = text_key(source.seed, source.name, source.files.names[file - source.first_file])
    return keys[inverse]


def _kept(check: ShardCheck) -> np.ndarray:
    """Return whether the plan allows each segment's document in the segment's pass, bool[m].

    The plan determines which documents `sample` excludes. For text files, it also determines which
    documents a fractional `repeat` excludes.
    """
    segments = check.segments
    is_kept = np.ones(len(segments), np.bool_)
    for s, source in enumerate(check.plan.sources):
        of_source = np.flatnonzero(segments.source == s)
        for repeat in np.unique(segments.repeat[of_source]).tolist():
            if repeat >= source.uses or keeps_all(source, repeat):
                continue
            of_pass = of_source[segments.repeat[of_source] == repeat]
            for file in np.unique(segments.file[of_pass]).tolist():
                of_file = of_pass[segments.file[of_pass] == file]
                if source.first_file <= file < source.first_file + len(source.files):
                    is_kept[of_file] = kept_by_plan(source, repeat, file, segments.doc[of_file])
    return is_kept


def _drawn(check: ShardCheck, limits: np.ndarray) -> np.ndarray:
    """Return the task that each segment's key draws among its source's tasks, int64[m].

    `limits` is a result of `thresholds`, int64[sources, tasks].
    """
    u = (bits64(check.segments.key, TASK) >> np.uint64(11)).astype(np.int64)
    drawn = np.zeros(len(u), np.int64)
    for s in range(len(check.plan.sources)):
        of_source = check.segments.source == s
        drawn[of_source] = np.searchsorted(limits[s], u[of_source], "right")
    return drawn


def _check_form(check: ShardCheck) -> bool:
    """Check P12, P13 and P14: lengths, bos, mode token, eos, prefixes and sentinels.

    Return whether no fault was found.
    """
    total_before, segments = check.faults.total, check.segments
    documents, roles = check.plan.recipe.documents, check.plan.vocabulary.roles
    slots, bos, eos = segments.slots, segments.bos, segments.eos
    # `eos` is the number of slots that the length formula does not explain. A wrong length makes it
    # impossible.
    least_eos, most_eos = int(documents.eos_after_segment), int(documents.eos_after_document)
    is_wrong = (eos < least_eos) | (eos > most_eos) | (segments.repeated < 0)
    is_wrong &= segments.has_tokens
    for g in np.flatnonzero(is_wrong):
        message = f"has {slots[g]} slots, {eos[g]} more than its task's length formula without eos"
        check.add_segment("P12", g, message, int(segments.first_slot[g]), int(slots[g]))
    is_wrong = (segments.fill > 0) & (eos != most_eos) & segments.has_tokens
    for g in np.flatnonzero(is_wrong):
        message = (
            f"its last block is filled up, but it has {eos[g]} eos before, instead of {most_eos}"
        )
        check.add_segment("P12", g, message, value=int(segments.fill[g]))
    if check.faults.total > total_before:
        return False
    # Check bos, mode token and eos in the original tokens. A segment that stores x_t and x_0 has
    # them in x_0, its second half.
    clean = np.where(check.is_twice, slots // 2, 0)
    mode = np.where(segments.has_tokens, check.plan.by_task.mode_token[segments.task], -1)
    for name, has, slot, token in (
        ("bos", bos == 1, check.first_slots + clean, roles.get("bos", -1)),
        ("mode token", mode >= 0, check.first_slots + bos + clean, mode),
        ("eos", eos == 1, check.first_slots + slots - 1 - segments.fill, roles.get("eos", -1)),
    ):
        indices = np.flatnonzero(has)
        is_label = (check.in_place & ~check.is_twice)[indices]
        stored = _original(check, is_label, slot[indices])
        for i in np.flatnonzero(stored != np.broadcast_to(token, has.shape)[indices]):
            g = indices[i]
            in_row = int(slot[g] - (clean[g] if name != "eos" else 0)) % check.seq_length
            check.add_segment("P12", g, f"no {name} in its slot", in_row, int(stored[i]))
    _check_fill_tokens(check)
    prefix = _prefixes(check)
    for g in np.flatnonzero(prefix != segments.prefix):
        message = f"segment_prefix should be {prefix[g]}"
        check.add_segment("P13", g, message, int(segments.first_slot[g]), int(segments.prefix[g]))
    check_sentinels(check)
    return check.faults.total == total_before


def _check_fill_tokens(check: ShardCheck) -> None:
    """Check P12: the slots that fill up the last block of a segment have eos in x_0."""
    segments, filled = check.segments, np.flatnonzero(check.segments.fill)
    filled = filled[segments.has_tokens[filled]]
    fill, end = segments.fill[filled], (check.first_slots + segments.slots)[filled]
    slots = np.repeat(end - fill, fill) + ranks(fill)
    tokens = check.flat("tokens")[slots]
    for i in np.flatnonzero(tokens != check.plan.vocabulary.roles.get("eos", -1))[:MAX_LISTED]:
        message = "should be eos, because it fills up a block"
        check.add_slot("P12", slots[i], message, int(tokens[i]))


def _prefixes(check: ShardCheck) -> np.ndarray:
    """Return the number of prefix slots that each segment should have, int64[m].

    For a segment without tokens, the prefix is 0 if its task computes prefixes from the tokens. But
    if rows have an encoder and a decoder sequence, a segment without tokens keeps its stored
    prefix, because P24 checks it.
    """
    segments = check.segments
    prefix = np.zeros(len(segments), np.int64)
    for t, task in enumerate(check.plan.tasks):
        needs_tokens = RULES[task.objective.attention].ahead == "prefix"
        chosen = segments.of_task(t) if needs_tokens else np.flatnonzero(segments.task == t)
        if not len(chosen):
            continue
        of_task = segments.select(chosen)
        bodies = of_task.bodies(check.epoch)
        prefix[chosen] = expected_prefix(task, bodies, of_task.bos, of_task.slots)
    if check.plan.recipe.packing.sides is None:
        return prefix
    return np.where(segments.has_tokens, prefix, segments.prefix)


def _original(check: ShardCheck, is_label: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Return the original tokens of k slots, int64[k].

    `slots` has the indices of the slots in the flattened rows. `is_label`, bool[k], is True for
    slots whose original token is in `labels`. For other slots, it is in `tokens`.
    """
    tokens = check.flat("tokens")[slots].astype(np.int64)
    if not is_label.any():
        return tokens
    return np.where(is_label, check.flat("labels")[slots].astype(np.int64), tokens)


def _check_repeated(check: ShardCheck) -> None:
    """Check P19: if a chunk repeats tokens of its document, the repeated tokens are not trained."""
    segments = check.segments
    if segments.trained is None:
        return
    offsets = segments.trained.offsets
    body = segments.bos + check.plan.by_task.mode[segments.task]
    # Ranges ascend, so only the first one can start in repeated tokens.
    first_trained = np.append(segments.trained.ranges[:, 0], 0)[offsets[:-1]]
    is_wrong = (
        (segments.repeated > 0)
        & (np.diff(offsets) > 0)
        & (first_trained < body + segments.repeated)
    )
    for g in np.flatnonzero(is_wrong)[:MAX_LISTED]:
        message = f"a trained range starts in the {segments.repeated[g]} repeated tokens"
        check.add_segment("P19", g, message, int(segments.first_slot[g]) + int(first_trained[g]))


def _check_coverage(check: ShardCheck) -> None:
    """Check P15: the segments that have tokens cover each document without gap or overlap.

    If the recipe adds eos only after documents, also check P12: only a document's last segment has
    an eos.
    """
    segments, documents = check.segments, check.plan.recipe.documents
    order = np.lexsort((segments.start, segments.doc, segments.repeat, segments.file))
    order = order[segments.has_tokens[order]]
    ordered = segments.select(order)
    goes_on = np.ones(len(order), np.bool_)  # True if the next segment is of the same document.
    goes_on[-1:] = False
    for column in (ordered.file, ordered.repeat, ordered.doc):
        goes_on[:-1] &= column[1:] == column[:-1]
    # A segment starts where the previous one ended, and the first one at token 0.
    expected_start = np.zeros(len(order), np.int64)
    expected_start[1:] = np.where(goes_on, ordered.start + ordered.tokens, 0)[:-1]
    is_wrong = ordered.start != expected_start
    if segments.trained is not None:  # The build omits untrained segments.
        is_wrong &= (ordered.start < expected_start) | ~_may_be_limited(check, ordered, goes_on)
    # With "decompose", datasets of other row lengths contain the tokens between the segments.
    if documents.long == "decompose":
        is_wrong &= ordered.start < expected_start
    for i in np.flatnonzero(is_wrong):
        message = (
            f"starts with token {ordered.start[i]} of its document, but should start with"
            f" {expected_start[i]}"
        )
        check.add_segment("P15", order[i], message, value=int(ordered.start[i]))
    may_lack_eos = documents.eos_after_segment or not documents.eos_after_document
    if is_wrong.any() or may_lack_eos or segments.trained is not None:
        return
    # A truncated document ends without eos, and another dataset may have the end of a decomposed
    # one.
    ends_whole = documents.long not in ("truncate", "decompose")
    for is_faulty, message in (
        (goes_on & (ordered.eos == 1), "has an eos, but its document continues"),
        (~goes_on & (ordered.eos == 0) & ends_whole, "ends its document, but has no eos"),
    ):
        for g in order[is_faulty]:
            slot = int(segments.first_slot[g] + segments.slots[g] - 1)
            token = int(check.arrays["tokens"][segments.row[g], slot])
            check.add_segment("P12", g, message, slot, token)


def _may_be_limited(check: ShardCheck, ordered: Segments, goes_on: np.ndarray) -> np.ndarray:
    """Return which segments may belong to documents with trained ranges, bool[m].

    For documents with trained ranges, tasks are drawn from a smaller set. The result is True if
    each segment of the document either has the task that its key draws from this set, or is very
    short. The stored ranges cannot give the answer, because a completely trained chunk looks like a
    chunk of a document without trained ranges.

    Args:
        check: The shard that is checked.
        ordered: The segments, sorted by document.
        goes_on: bool[m], True for a segment that is followed by a segment of the same document.
    """
    in_order = check.replace(segments=ordered)
    drawn = _drawn(in_order, thresholds(check.plan.recipe, supervised=True))
    fits = (ordered.task == drawn) | (ordered.tokens < SHORTEST)
    # One segment with another task shows that its whole document is unsupervised.
    document = np.zeros(len(ordered), np.int64)
    document[1:] = np.cumsum(~goes_on[:-1])
    misfit_counts = np.bincount(document, ~fits, len(ordered))
    return misfit_counts[document] == 0


def _plain(value: np.generic) -> float | int | str:
    item = value.item()
    return item if not isinstance(item, float) or np.isfinite(item) else str(item)


def check_parts(check: ShardCheck) -> bool:
    """Check the structure of trained ranges (P19), blocks (P20) and media spans (P25, P3).

    Return whether no fault was found.
    """
    total_before, segments, arrays = check.faults.total, check.segments, check.arrays
    if segments.media is not None and not (
        check.plan.vocabulary.media and len(segments.media.slot)
    ):
        check.add(
            "P3", "there are media arrays, but no media span, or no kind of media in the recipe"
        )
        return False
    # Wrong offsets would assign ranges, blocks and spans to other segments.
    for name, values, promise in (
        ("trained_offsets", "trained_ranges", "P19"),
        ("block_offsets", "block_noise", "P20"),
        ("media_offsets", "media_slot", "P25"),
        ("media_ref_offsets", "media_ref", "P25"),
        ("record_offsets", "record_position", "P21"),
    ):
        if name not in arrays:
            continue
        bounds = arrays[name]
        if bounds[0] != 0 or bounds[-1] != len(arrays[values]) or descents(bounds).any():
            message = f"{name} does not ascend from 0 to the number of {values}"
            check.add(promise, message, value=int(bounds[-1]))
            return False
    _check_trained(check)
    _check_blocks(check)
    _check_records(check)
    if check.faults.total == total_before:
        _check_fill(check)
    return check.faults.total == total_before


def _check_trained(check: ShardCheck) -> None:
    """Check P19: trained ranges are inside their segment, in order, and do not overlap.

    If a segment stores its tokens twice, its ranges are inside the first copy.
    Ranges may touch only if their weights differ. Weights must be finite and above 0. If all
    weights of the shard are 1, `trained_weights` must be omitted.
    """
    trained, segments = check.segments.trained, check.segments
    if trained is None:
        return
    slots = segments.slots // check.plan.by_task.copies[segments.task]
    ranges, segment, weights = trained.ranges.astype(np.int64), trained.segment, trained.weights
    # A range starts at least one slot after the previous range of its segment.
    begins_after = np.full(len(ranges), -1, np.int64)
    is_same = segment[1:] == segment[:-1]
    begins_after[1:][is_same] = ranges[:-1, 1][is_same]
    if weights is not None:
        # Ranges of unequal weights may touch.
        begins_after[1:][is_same & (weights[1:] != weights[:-1])] -= 1
        for i in np.flatnonzero(~(np.isfinite(weights) & (weights > 0))):
            message = f"trained range {ranges[i].tolist()} has no finite weight above 0"
            check.add_segment("P19", segment[i], message, value=str(weights[i]))
        if (weights == 1).all():
            check.add("P19", "every weight in trained_weights is 1, so the array must be omitted")
    bad = (
        (ranges[:, 0] <= begins_after)
        | (ranges[:, 1] <= ranges[:, 0])
        | (ranges[:, 1] > slots[segment])
    )
    for i in np.flatnonzero(bad):
        message = (
            f"trained range {ranges[i].tolist()} is empty, out of order or outside its"
            f" {slots[segment[i]]} slots"
        )
        check.add_segment("P19", segment[i], message)


def _check_records(check: ShardCheck) -> None:
    """Check P21: the first segment of each document has the document's records.

    Segments of removed documents and of sources without group_by have no records.
    """
    records, segments, total_before = check.segments.records, check.segments, check.faults.total
    if records is None:
        return
    is_grouped = grouped_sources(check.plan)
    # The segments of a document follow one another in this order.
    order = np.lexsort((segments.start, segments.doc, segments.repeat, segments.file))
    columns = [column[order] for column in (segments.file, segments.repeat, segments.doc)]
    is_first, is_last = np.ones((2, len(order)), np.bool_)
    is_first[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    is_last[:-1] = is_first[1:]
    counts, is_wanted = np.diff(records.offsets), np.zeros(len(segments), np.bool_)
    is_wanted[order[is_first]] = True
    is_wanted &= is_grouped[segments.source] & segments.has_tokens
    for g in np.flatnonzero((counts > 0) != is_wanted)[:MAX_LISTED]:
        problem = "no records, but is the first segment of" if is_wanted[g] else "records of"
        check.add_segment("P21", g, f"has {problem} a document", value=int(counts[g]))
    # The records must reach the end of the document's last segment.
    ends = np.zeros(len(segments), np.int64)
    ends[order[is_first]] = (segments.start + segments.tokens)[order[is_last]]
    if check.faults.total == total_before and counts.any():
        _check_bounds_of_records(check, records, ends)


def _check_bounds_of_records(check: ShardCheck, records: Records, ends: np.ndarray) -> None:
    """Check P21: the records of each document follow one another, up to the document's end.

    Only the tokens of the source's `between` are between two records. The document has the position
    of its first record in the file.

    Args:
        check: The shard.
        records: The records of the shard, at least one.
        ends: int64[m], for the first segment of a document, the end of its last segment.
    """
    segments, plan, begins = check.segments, check.plan, np.flatnonzero(np.diff(records.offsets))
    n_between = np.array([len(source.source.between) for source in plan.sources])
    owner, tokens = records.owner, records.tokens.astype(np.int64)
    is_first = np.ones(len(owner), np.bool_)
    is_first[1:] = owner[1:] != owner[:-1]
    # The next record starts after the tokens of this record and of `between`.
    after = np.roll(records.start + tokens, 1) + n_between[segments.source[owner]]
    # Records may be in another order than in the file, and `segment_doc` is the first position in
    # the file.
    position = np.minimum.reduceat(records.position, records.offsets[begins])
    end = (records.start + tokens)[records.offsets[begins + 1] - 1]
    may_be_longer = plan.recipe.documents.long in ("truncate", "decompose")
    is_wrong = end < ends[begins] if may_be_longer else end != ends[begins]
    wrong_start = records.start != np.where(is_first, 0, after)
    for message, wrong_segments in (
        ("has a record of a negative length", owner[tokens < 0]),
        ("has a record that does not follow the record before it", owner[wrong_start]),
        ("has other records than its document", begins[is_wrong]),
        ("is not at the first of its records", begins[position != segments.doc[begins]]),
    ):
        for g in np.unique(wrong_segments)[:MAX_LISTED]:
            check.add_segment("P21", g, message)


def blocks_of_segments(plan: Plan, segments: Segments) -> Blocks:
    """Return the blocks that the stored segments of block-diffusion tasks should have.

    Segments of tasks with noise = "all" have no stored blocks, because the whole segment has noise
    level 1.
    """
    answers, parts = None, []
    if segments.trained is not None:
        answers = answers_of_ranges(segments.trained.segment, segments.trained.ranges)
    slots_before = _before_body(plan, segments)
    for t, task in enumerate(plan.tasks):
        chosen = np.flatnonzero(segments.task == t)
        if RULES[task.objective.attention].in_blocks and levels_by_block(task.parameters):
            of_task = None if answers is None else answers.of_segments(chosen)
            half = segments.slots[chosen] // 2
            parts.append((chosen, blocks_of(task.parameters, half, slots_before[chosen], of_task)))
    return joined_blocks(len(segments), parts)


def _before_body(plan: Plan, segments: Segments) -> np.ndarray:
    """Return the slots of bos and mode token of each segment, int64[m].

    Segments of removed documents keep these slots, as padding.
    """
    bos = (segments.start == 0) & plan.recipe.documents.prepend_bos
    return bos + plan.by_task.mode[segments.task]


def _check_blocks(check: ShardCheck) -> None:
    """Check P20: each block-diffusion segment has the number of blocks that its slots need.

    The noise level and the loss weight of each block must be in range.
    """
    segments, blocks = check.segments, check.segments.blocks
    if blocks is None:
        return
    needed, counts = blocks_of_segments(check.plan, segments).count, np.diff(blocks.offsets)
    for g in np.flatnonzero(counts != needed):
        check.add_segment("P20", g, f"has {counts[g]} blocks, but needs {needed[g]}")
    is_good = (blocks.noise > 0) & (blocks.noise <= 1) & np.isfinite(blocks.loss_weight)
    for i in np.flatnonzero(~is_good):
        message = f"block {i}: its level or weight is out of range"
        check.add("P20", message, value=str(blocks.noise[i]))


def _check_fill(check: ShardCheck) -> None:
    """Check P20: eos fill up the last block of a segment only if its task has `eos_fill`.

    The eos are trained, there are fewer of them than slots of a block, and they end a whole block.
    `segment_fill` must be omitted if nothing is filled up. The trained ranges must be valid.
    """
    segments, tasks = check.segments, check.plan.tasks
    filled = np.flatnonzero(segments.fill > 0)
    if "segment_fill" in check.arrays and not len(filled):
        check.add("P20", "every number in segment_fill is 0, so the array must be omitted")
    if not len(filled):
        return
    fill, task, half = segments.fill[filled], segments.task[filled], segments.slots[filled] // 2
    of_tasks = [t.parameters if t.parameters.get("eos_fill") == "block" else {} for t in tasks]
    length = np.array([parameters.get("block_length", 0) for parameters in of_tasks])[task]
    counts_from_segment = np.array(
        [parameters.get("block_origin") == "segment" for parameters in of_tasks]
    )[task]
    # Find the run of trained slots that ends each segment.
    begin, end = np.zeros((2, len(segments)), np.int64)
    if segments.trained is not None:
        answers = answers_of_ranges(segments.trained.segment, segments.trained.ranges)
        begin[answers.segment], end[answers.segment] = answers.begin, answers.end
    begin, end = begin[filled], end[filled]
    slots_before = _before_body(check.plan, segments)[filled]
    # Blocks count from the answer, or from the segment if only bos and mode token precede the
    # answer (P20).
    origin = np.where(counts_from_segment | (begin <= slots_before), 0, begin)
    # With blocks per answer, the filled block must also have a slot of the answer.
    answer_slots = np.where(counts_from_segment, 0, 1)
    for message, is_wrong in (
        ("but its task has no eos_fill", length == 0),
        ("which is not less than its block_length", (length > 0) & (fill >= length)),
        ("but these slots are not trained", (end != half) | (half - fill - begin < answer_slots)),
        ("but its last block is not whole", (half - origin) % np.maximum(length, 1) != 0),
    ):
        for i in np.flatnonzero(is_wrong)[:MAX_LISTED]:
            value = int(fill[i])
            check.add_segment("P20", filled[i], f"segment_fill is {value}, {message}", value=value)


NoisedTasks = list[tuple[np.ndarray, Task, NoisedBlocks]]
"""One entry (segments, task, blocks) per task with blocks. `segments` has the indices of the
task's segments."""


def check_noise(check: ShardCheck) -> NoisedTasks:
    """Check P18: the stored noise equals the noise recomputed from labels and keys.

    Equality also proves that only candidate slots are corrupted. For block diffusion, also check
    P10: the labels agree with the clean tokens x_0. Return the recomputed blocks.
    """
    blocks: NoisedTasks = []
    if not check.in_place.any():
        return blocks
    segments, in_place, size = check.segments, check.in_place, check.arrays["tokens"].size
    # Noise is drawn from the clean tokens. For block diffusion, the labels must agree with x_0.
    twice = segments.select(check.is_twice)
    tokens = check.flat("labels").copy()
    put_clean(tokens, check.flat("tokens"), check.first_slots[check.is_twice], twice.slots // 2)
    labels = _with_block_labels(check, check.flat("labels").copy())
    check.add_differences("P10", "labels", labels, "label should be {}, as in x_0")
    # Segments do not overlap, so the noise of all tasks is drawn into one copy and compared once.
    loss_mask = np.zeros(size, np.uint8)
    trainable = None if segments.trained is None else trainable_slots(check).reshape(-1)
    for t, task in enumerate(check.plan.tasks):
        chosen = np.flatnonzero(segments.task == t)
        if not task.in_place or not len(chosen):
            continue
        first_slots, of_task = check.first_slots[chosen], segments.select(chosen)
        target = target_of(task, of_task, first_slots, tokens, loss_mask, trainable)
        # Removed segments keep the slots of bos and mode token, so their candidates start after
        # these.
        slots_before = _before_body(check.plan, of_task)
        candidates = target.segments._replace(at=first_slots + slots_before)
        target = target._replace(segments=candidates, before=slots_before)
        noised = draw_noise(t, task, target, check.epoch)
        for name, recomputed in (("noise", noised.level), ("loss_weight", noised.weight)):
            values = getattr(segments, name)[chosen]
            differs = (values != recomputed) & segments.has_tokens[chosen]
            for i in np.flatnonzero(differs)[:MAX_LISTED]:
                message = f"segment_{name} should be {recomputed[i]}"
                check.add_segment("P18", chosen[i], message, value=float(values[i]))
        if noised.blocks is not None:
            blocks.append((chosen, task, noised.blocks))
            if not check.epoch:
                _compare_blocks(check, chosen, noised.blocks)
    # Next-token segments are not noised, so they are compared with themselves.
    is_noised = fill_slots(check.first_slots, segments.slots, in_place, False, size)
    for name, recomputed in (("tokens", tokens), ("loss_mask", loss_mask)):
        drawn = np.where(is_noised, recomputed, check.flat(name))
        check.add_differences("P18", name, drawn, f"recomputed {name} is {{}}")
    return blocks


def _compare_blocks(check: ShardCheck, chosen: np.ndarray, noised: NoisedBlocks) -> None:
    """Check P18: the blocks of the chosen segments have the recomputed levels and weights."""
    stored = check.segments.blocks
    assert stored is not None
    bounds = zip(stored.offsets[chosen].tolist(), stored.offsets[chosen + 1].tolist(), strict=True)
    block_indices = np.concatenate([np.arange(begin, end) for begin, end in bounds])
    for name, recomputed in (("noise", noised.level), ("loss_weight", noised.weight)):
        values = getattr(stored, name)[block_indices]
        for i in np.flatnonzero(values != recomputed)[:MAX_LISTED]:
            message = f"block {block_indices[i]}: block_{name} should be {recomputed[i]}"
            check.add("P18", message, value=float(values[i]))


def _check_weights(check: ShardCheck, blocks: NoisedTasks) -> None:
    """Check the array `loss_weights` of a resampled shard (P13, P18).

    The expected weight is the product of `loss_mask`, the weight of the segment or block, and the
    weight of the trained range that contains the slot's target.
    """
    segments, first_slots, size = check.segments, check.first_slots, check.arrays["tokens"].size
    expected = fill_slots(first_slots, segments.slots, segments.loss_weight, 0, size)
    for chosen, task, noised in blocks:
        put_by_block(expected, first_slots[chosen], noised.blocks, noised.weight, int(task.shift))
    trained = segments.trained
    if trained is not None and trained.weights is not None:
        # A range weighs the slots that predict its tokens. Some of these are one slot earlier.
        segment = trained.segment
        is_ahead = ~check.in_place | check.plan.by_task.shift[segments.task]
        ranges = trained.ranges.astype(np.int64) - is_ahead[segment].astype(np.int64)[:, None]
        begins = np.maximum(ranges[:, 0], 0)
        expected *= fill_slots(
            first_slots[segment] + begins, ranges[:, 1] - begins, trained.weights, 1, size
        )
    expected *= check.flat("loss_mask")
    values = check.flat(WEIGHTS)
    for i in np.flatnonzero(values != expected)[:MAX_LISTED]:
        g = int(np.searchsorted(first_slots, i, "right")) - 1
        promise = "P18" if g >= 0 and check.in_place[g] else "P13"
        message = f"segment {g}: {WEIGHTS} should be {expected[i]}"
        check.add_slot(promise, i, message, float(values[i]))


def check_same_tokens(
    plan: Plan,
    stored: Arrays,
    arrays: Arrays,
    file: str,
    faults: Faults,
    epoch: int,
) -> None:
    """Check P17: the resampled and the stored arrays of a shard have the same original tokens.

    Args:
        plan: The dataset's plan.
        stored: The stored arrays.
        arrays: The arrays of the epoch, from `arrays_in_epoch`.
        file: Name of the shard, for messages.
        faults: Receives the faults.
        epoch: The epoch for which the noise of `arrays` was drawn.
    """
    segments = stored_segments(plan, arrays)
    check = ShardCheck(plan, arrays, segments, file, faults, epoch)
    # Memory allows only some segments to be restored at a time.
    ends = np.cumsum(segments.tokens)
    bounds = np.searchsorted(ends, np.arange(0, int(ends[-1]) if len(ends) else 0, FITTING_TOKENS))
    for begin, end in itertools.pairwise(np.unique([*bounds, len(ends)]).tolist()):
        chosen = np.arange(begin, end)
        restored, offsets, _ = restore(plan, arrays, segments, chosen, epoch)
        differs = np.flatnonzero(restored != restore(plan, stored, segments, chosen).ids)
        for g in begin + np.unique(np.searchsorted(offsets, differs, "right") - 1)[:MAX_LISTED]:
            message = "inverting it does not give the tokens of the stored row"
            check.add_segment("P17", g, message, int(segments.first_slot[g]))


SLOTS_AT_ONCE = 1 << 20
"""Number of slots that are resampled at a time. Resampling needs some hundred bytes per slot."""
HEADER = ("prefix", "noise", "loss_weight")
"""Names of the `segment_*` arrays that resampling changes, without the prefix `segment_`."""
BLOCKS = ("block_noise", "block_loss_weight")


def arrays_in_epoch(dataset: Dataset, shard: Shard, epoch: int) -> Arrays:
    """Resample all rows of a shard for `epoch`, and return the arrays of the shard.

    The arrays named in BLOCKS are returned as stored. The result always has `loss_mask` and
    `loss_weights`, even if the shard does not store them.

    Raises:
        DatasetError: If the stored rows cannot be resampled.
    """
    names = ["tokens", *(["labels"] if "labels" in shard.layout else []), "loss_mask", WEIGHTS]
    shape = (shard.rows, shard.seq_length)
    columns = {name: np.empty(shape, own_dtype(name, dataset.token_dtype)) for name in names}
    header: dict[str, list[np.ndarray]] = {
        name: [shard.arrays[f"segment_{name}"][:0]] for name in HEADER
    }
    at_once = max(1, SLOTS_AT_ONCE // shard.seq_length)
    for first_row in range(0, shard.rows, at_once):
        places = [(shard, row) for row in range(first_row, min(first_row + at_once, shard.rows))]
        segments = RowSegments(dataset.facts, places)
        rows = {
            name: values[first_row : first_row + len(places)] for name, values in columns.items()
        }
        for name, values in rows.items():
            fill(segments, name, values)
        dataset.redraw(segments, rows, [epoch] * len(places))
        for name, parts in header.items():
            parts.append(segments.column(name))
    for name, parts in header.items():
        stored = shard.arrays[f"segment_{name}"]
        columns[f"segment_{name}"] = np.concatenate(parts, dtype=stored.dtype, casting="same_kind")
    return {**shard.arrays, **{name: read_only(values) for name, values in columns.items()}}
