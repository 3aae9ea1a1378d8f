"""P6 to P10: every slot of a shard, walked once; P14 and P23 to P25, what rows and slots of some
segments hold.

Nearly all segments are good, so a segment is first summed up: the differences of its slots from
what they should be are joined by OR, and its largest token is taken, in loops without a branch,
which the compiler turns into vector code. Only a segment whose sum is not good is walked again slot
by slot, for the places.
"""

import itertools
from collections.abc import Mapping

import numpy as np

from packprep.building.ledger import added_slots
from packprep.building.plan import Plan
from packprep.building.removal import removed_segments
from packprep.building.segments import SegmentTable
from packprep.dataset.boundaries import fill_slots, ranks
from packprep.kernel import kernel, read_only
from packprep.objectives import OWN
from packprep.objectives.tasks import own_marks
from packprep.restoring import fitting
from packprep.verification.faults import MAX_LISTED, Faults

WEIGHTS = "loss_weights"
"""What an epoch gives beside the arrays of a shard, [rows, seq_length], and in the place of
BLOCKS."""

# Codes of `_check_slots`, with the promise and the words of each.
_SLOT_FAULTS = {
    0: ("P6", "segment_ids does not agree with cu_seqlens"),
    1: ("P7", "padding has another token than pad_id"),
    2: ("P7", "padding has another label than pad_id"),
    3: ("P7", "padding is trained"),
    4: ("P8", "token is no id below vocab_size"),
    5: ("P8", "label is no id below vocab_size"),
    6: ("P9", "loss_mask is not what the segment's prefix says"),
    7: ("P10", "label is not the next slot's token of the segment"),
    8: ("P10", "token is not its label, and the slot is not trained"),
}
_CODES = len(_SLOT_FAULTS)


@kernel(inline=True)
def _or_of_differences(values, row, begin, end, should):
    """0 iff all of values[row, begin : end] are `should` (≥ 0)."""
    slots, found = values[row, begin:end], np.uint32(0)
    for i in range(slots.shape[0]):
        found |= np.uint32(slots[i]) ^ np.uint32(should)
    return found


@kernel(inline=True)
def _largest(values, row, begin, end):
    """The largest of values[row, begin : end], of which a negative one is beyond 2³¹."""
    slots, found = values[row, begin:end], np.uint32(0)
    for i in range(slots.shape[0]):
        found = max(found, np.uint32(slots[i]))
    return found


@kernel(inline=True)
def _or_of_pairs(left, right, row, begin, end, shift):
    """0 iff left[row, t] is right[row, t + shift] for all t in begin … end − 1."""
    one, other, found = left[row, begin:end], right[row, begin + shift : end + shift], np.uint32(0)
    for i in range(one.shape[0]):
        found |= np.uint32(one[i]) ^ np.uint32(other[i])
    return found


@kernel(inline=True)
def _padding_is_good(tokens, labels, segment_ids, loss_mask, row, begin, end, pad):
    found = _or_of_differences(segment_ids, row, begin, end, 0) | _or_of_differences(
        loss_mask, row, begin, end, 0
    )
    found |= _or_of_differences(tokens, row, begin, end, pad)
    if labels.shape[0] > 0:
        found |= _or_of_differences(labels, row, begin, end, pad)
    return found == 0


@kernel(inline=True)
def _segment_is_good(
    tokens,
    labels,
    segment_ids,
    loss_mask,
    row,
    begin,
    end,
    number,
    first,
    next_token,
    pad,
    vocab_size,
):
    """Whether the slots of a segment, of which all that can be may be trained, are good; first: the
    first trained slot."""
    if (
        _largest(tokens, row, begin, end) >= vocab_size
        or _or_of_differences(segment_ids, row, begin, end, number) != 0
    ):
        return False
    if not next_token:
        inputs, originals, trained = (
            tokens[row, begin:end],
            labels[row, begin:end],
            loss_mask[row, begin:end],
        )
        found = np.uint32(0)
        for i in range(inputs.shape[0]):
            found |= (np.uint32(inputs[i]) ^ np.uint32(originals[i])) * np.uint32(trained[i] == 0)
        return found == 0 and _largest(labels, row, begin, end) < vocab_size
    first = min(first, end - 1)
    found = _or_of_differences(loss_mask, row, begin, first, 0) | _or_of_differences(
        loss_mask, row, first, end - 1, 1
    )
    found |= np.uint32(loss_mask[row, end - 1])
    if labels.shape[0] > 0:
        found |= _or_of_pairs(labels, tokens, row, begin, end - 1, 1) | (
            np.uint32(labels[row, end - 1]) ^ np.uint32(pad)
        )
    return found == 0


@kernel
def _check_slots(
    tokens,
    labels,
    segment_ids,
    loss_mask,
    trainable,
    row_begin,
    begin,
    slots,
    prefix,
    next_token,
    pad,
    vocab_size,
    listed,
    where,
    counts,
):
    """Walk the slots. where: int64[codes, listed, 3] takes (row, slot, value); counts:
    int64[codes].

    trainable: uint8[rows, seq_length], slots that may be trained; without rows: all. begin, slots,
    prefix: int64 by segment;
    row_begin: int64[rows + 1] first segment of each row.
    """
    length = tokens.shape[1]
    with_labels = labels.shape[0] > 0

    def note(code, row, slot, value):
        if counts[code] < listed:
            (
                where[code, counts[code], 0],
                where[code, counts[code], 1],
                where[code, counts[code], 2],
            ) = (
                row,
                slot,
                value,
            )
        counts[code] += 1

    for r in range(tokens.shape[0]):
        t = np.int64(0)
        for g in range(row_begin[r], row_begin[r + 1] + 1):
            last = g == row_begin[r + 1]
            begins = length if last else begin[g]
            if _padding_is_good(tokens, labels, segment_ids, loss_mask, r, t, begins, pad):
                t = begins
            while t < begins:  # padding
                if segment_ids[r, t] != 0:
                    note(0, r, t, np.int64(segment_ids[r, t]))
                if np.int64(tokens[r, t]) != pad:
                    note(1, r, t, np.int64(tokens[r, t]))
                if with_labels and np.int64(labels[r, t]) != pad:
                    note(2, r, t, np.int64(labels[r, t]))
                if loss_mask[r, t] != 0:
                    note(3, r, t, np.int64(loss_mask[r, t]))
                t += 1
            if last:
                break
            number, end = g - row_begin[r] + 1, begins + slots[g]
            trained_from = begins + max(prefix[g] - 1, 0)
            plain = trainable.shape[0] == 0 and (with_labels or next_token[g])
            if plain and _segment_is_good(
                tokens,
                labels,
                segment_ids,
                loss_mask,
                r,
                begins,
                end,
                number,
                trained_from,
                next_token[g],
                pad,
                vocab_size,
            ):
                t = end
            while t < end:
                token = np.int64(tokens[r, t])
                if np.int64(segment_ids[r, t]) != number:
                    note(0, r, t, np.int64(segment_ids[r, t]))
                if token < 0 or token >= vocab_size:
                    note(4, r, t, token)
                if next_token[g]:
                    trained = (
                        t >= trained_from
                        and t < end - 1
                        and (trainable.shape[0] == 0 or trainable[r, t + 1] != 0)
                    )
                    if loss_mask[r, t] != (1 if trained else 0):
                        note(6, r, t, np.int64(loss_mask[r, t]))
                if with_labels:
                    label = np.int64(labels[r, t])
                    if label < 0 or label >= vocab_size:
                        note(5, r, t, label)
                    if next_token[g]:
                        if label != (np.int64(tokens[r, t + 1]) if t < end - 1 else pad):
                            note(7, r, t, label)
                    elif token != label and loss_mask[r, t] == 0:
                        note(8, r, t, token)
                t += 1


@kernel
def _mark(at, bounds, ranges, trainable):
    for i in range(at.shape[0]):
        for k in range(bounds[i], bounds[i + 1]):
            for t in range(at[i] + ranges[k, 0], at[i] + ranges[k, 1]):
                trainable[t] = 1


def trainable_slots(arrays: Mapping[str, np.ndarray], stored: SegmentTable) -> np.ndarray:
    """uint8[rows, seq_length]: the slots inside trained ranges; without rows where the shard has
    none."""
    shape = arrays["tokens"].shape
    if "trained_offsets" not in arrays:
        return np.zeros((0, shape[1]), np.uint8)
    trainable = np.zeros(shape[0] * shape[1], np.uint8)
    _mark(
        stored.row * shape[1] + stored.first_slot,
        arrays["trained_offsets"],
        arrays["trained_ranges"].astype(np.int64),
        trainable,
    )
    return trainable.reshape(shape)


def seen_before(arrays: Mapping[str, np.ndarray], slots: np.ndarray) -> np.ndarray:
    """int64[m]: the leading slots of each segment that train nothing but with their last one: its
    prefix, or, of a removed one, all. slots: of each."""
    return np.where(removed_segments(arrays), slots, arrays["segment_prefix"].astype(np.int64))


def check_slots(
    plan: Plan,
    arrays: Mapping[str, np.ndarray],
    stored: SegmentTable,
    next_token: np.ndarray,
    file: str,
    faults: Faults,
) -> None:
    """P6 to P10 of one shard whose header is good. next_token: bool[segments]."""
    tokens = arrays["tokens"]
    labels = arrays.get("labels", np.zeros((0, tokens.shape[1]), tokens.dtype))
    shift = plan.by_task.shift[arrays["segment_task"]]
    if shift.any():  # what is noised where they stand lies a slot on: check_noise looks at them
        at = stored.row * tokens.shape[1] + stored.first_slot
        labels = np.where(
            fill_slots(at, stored.slots, shift, False, tokens.size).reshape(tokens.shape),
            tokens,
            labels,
        )
    where, counts = np.zeros((_CODES, MAX_LISTED, 3), np.int64), np.zeros(_CODES, np.int64)
    of_slots = (
        tokens,
        labels,
        arrays["segment_ids"],
        arrays["loss_mask"],
        trainable_slots(arrays, stored),
    )
    of_segments = (
        arrays["row_offsets"],
        stored.first_slot,
        stored.slots,
        seen_before(arrays, stored.slots),
    )
    _check_slots(
        *map(read_only, (*of_slots, *of_segments, next_token)),
        plan.vocabulary.roles["pad"],
        plan.vocabulary.vocab_size,
        MAX_LISTED,
        where,
        counts,
    )
    for code, (promise, words) in _SLOT_FAULTS.items():
        for i in range(int(counts[code])):
            r, t, value = (int(v) for v in where[code, min(i, MAX_LISTED - 1)])
            faults.add(promise, file, words, r, t, value)


def check_removed(
    plan: Plan,
    arrays: Mapping[str, np.ndarray],
    row: np.ndarray,
    begin: np.ndarray,
    slots: np.ndarray,
    file: str,
    faults: Faults,
) -> None:
    """P23: the segments of removed documents say so, no other does, and their slots hold
    nothing."""
    listed, found = (
        plan.removed.segments(arrays),
        arrays.get("segment_removed", np.zeros(len(row), np.uint8)),
    )
    for g in np.flatnonzero(found != listed)[:MAX_LISTED]:
        what = "of a document that was removed" if listed[g] else "of no document that was removed"
        message = f"segment {g}: it is {what}, and its segment_removed says otherwise"
        faults.add("P23", file, message, int(row[g]), int(begin[g]), int(found[g]))
    pad = plan.vocabulary.roles["pad"]
    for g in np.flatnonzero(listed).tolist():
        part = slice(int(begin[g]), int(begin[g] + slots[g]))
        for name, should in (("tokens", pad), ("labels", pad), ("loss_mask", 0), (WEIGHTS, 0)):
            values = arrays[name][row[g], part] if name in arrays else np.zeros(0)
            for t in np.flatnonzero(values != should)[:1]:
                message = f"segment {g}: {name} of a document that was removed"
                faults.add("P23", file, message, int(row[g]), part.start + int(t), values[t].item())


def check_sentinels(
    plan: Plan,
    arrays: Mapping[str, np.ndarray],
    stored: SegmentTable,
    file: str,
    faults: Faults,
    epoch: int,
) -> None:
    """P14: sentinels and role tokens stand where a segment's task writes them, and the segment has
    no others."""
    fits, row, begin = fitting(plan, arrays, stored, epoch), stored.row, stored.first_slot
    for g in np.flatnonzero(~fits):
        faults.add(
            "P14",
            file,
            f"segment {g}: a sentinel is missing or out of order",
            int(row[g]),
            int(begin[g]),
        )
    which = fits & ~removed_segments(arrays)
    tokens, length = arrays["tokens"].reshape(-1), plan.recipe.seq_length
    written, is_mark = added_slots(plan.tasks, stored), {}
    for t, task in enumerate(plan.tasks):
        marks = own_marks(plan.recipe, task)
        of_task = np.flatnonzero((arrays["segment_task"] == t) & which)
        if not len(marks) or not len(of_task) or task.objective.name not in OWN:
            continue
        begins = row[of_task] * length + begin[of_task]
        bounds = np.stack((begins, begins + stored.slots[of_task]), axis=1).reshape(-1)
        if marks.tobytes() not in is_mark:
            is_mark[marks.tobytes()] = np.append(np.isin(tokens, marks), False)
        found = np.add.reduceat(is_mark[marks.tobytes()], bounds, dtype=np.int64)[::2]
        should = (written["sentinel"] + written["fim"])[of_task]
        for i in np.flatnonzero(found != should)[:MAX_LISTED]:
            g = of_task[i]
            message = (
                f"segment {g}: it holds {found[i]} sentinels or role tokens, and its task writes"
                f" {should[i]}"
            )
            faults.add("P14", file, message, int(row[g]), int(begin[g]))


def check_sides(
    sides: tuple[int, int] | None,
    arrays: Mapping[str, np.ndarray],
    row: np.ndarray,
    slots: np.ndarray,
    file: str,
    faults: Faults,
) -> None:
    """P24: the two sums of each row, and that no segment lacks a side."""
    if sides is None:
        return
    prefix, rows = arrays["segment_prefix"].astype(np.int64), len(arrays["row_offsets"]) - 1
    for name, most, part in (("encoder", sides[0], prefix), ("decoder", sides[1], slots - prefix)):
        for g in np.flatnonzero(part < 1)[:MAX_LISTED]:
            faults.add(
                "P24",
                file,
                f"segment {g} has no slot of the {name}",
                int(row[g]),
                value=int(part[g]),
            )
        used = np.zeros(rows, np.int64)
        np.add.at(used, row, part)
        for r in np.flatnonzero(used > most)[:MAX_LISTED]:
            faults.add(
                "P24",
                file,
                f"its segments take more than the {most} slots of the {name}",
                int(r),
                value=int(used[r]),
            )


def check_media(
    plan: Plan, arrays: Mapping[str, np.ndarray], stored: SegmentTable, file: str, faults: Faults
) -> None:
    """P25, of one shard whose header is good."""
    length, kinds = (
        plan.recipe.seq_length,
        np.array([slot for _, slot, _ in plan.vocabulary.media.values()]),
    )
    tokens = arrays["tokens"].reshape(-1)
    inside = np.zeros(len(tokens), np.bool_)
    if "media_offsets" in arrays:
        segment = np.repeat(np.arange(len(stored.row)), np.diff(arrays["media_offsets"]))
        row, first = stored.row[segment], stored.first_slot[segment]
        begin = arrays["media_slot"].astype(np.int64)
        many, kind = arrays["media_tokens"].astype(np.int64), arrays["media_kind"]
        after = first.copy()  # where the place before it in its segment ends
        same = segment[1:] == segment[:-1]
        after[1:][same] = (begin + many)[:-1][same]
        bad = (
            (many < 1)
            | (begin < after)
            | (begin + many > first + stored.slots[segment])
            | (kind >= len(kinds))
        )
        for i in np.flatnonzero(bad)[:MAX_LISTED]:
            message = (
                f"segment {segment[i]}: a place of {many[i]} slots of kind {kind[i]} lies outside"
                " of it, or in another"
            )
            faults.add("P25", file, message, int(row[i]), int(begin[i]))
        if bad.any():
            return
        at = np.repeat(row * length + begin, many) + ranks(many)
        inside[at] = True
        in_place = plan.by_task.in_place[arrays["segment_task"]]
        for name in ("tokens", *(["labels"] if "labels" in arrays else [])):
            values, own = (
                arrays[name].reshape(-1)[at],
                np.repeat(in_place[segment] | (name == "tokens"), many),
            )
            for i in np.flatnonzero(own & (values != np.repeat(kinds[kind], many)))[:MAX_LISTED]:
                message = f"{name}: no slot token in a place of media"
                faults.add(
                    "P25", file, message, int(at[i] // length), int(at[i] % length), int(values[i])
                )
        trainable = trainable_slots(arrays, stored).reshape(-1)
        for i in at[trainable[at] != 0][:MAX_LISTED] if len(trainable) else at[:1]:
            faults.add(
                "P25", file, "a slot of media may be trained", int(i // length), int(i % length)
            )
        data, bounds = arrays["media_ref"].tobytes(), arrays["media_ref_offsets"].tolist()
        for i, (low, high) in enumerate(itertools.pairwise(bounds)):
            try:
                data[low:high].decode()
            except UnicodeDecodeError:
                faults.add(
                    "P25",
                    file,
                    f"segment {segment[i]}: a ref is not UTF-8",
                    int(row[i]),
                    int(begin[i]),
                )
    for i in np.flatnonzero(np.isin(tokens, kinds) & ~inside)[:MAX_LISTED]:
        message = "a slot token of media, at no place"
        faults.add("P25", file, message, int(i // length), int(i % length), int(tokens[i]))
