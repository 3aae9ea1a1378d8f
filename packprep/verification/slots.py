"""Check P6 to P10 in one loop over all slots, and P14 and P23 to P25 of segments.

Nearly all segments are valid, so a quick test runs first. It computes the bitwise OR of all
differences between actual and expected values, and the largest token. The loops of this test have
no branches, so the compiler vectorizes them. A segment that fails the test is checked again, slot
by slot, to locate its faults.
"""

import itertools
from typing import NamedTuple

import numpy as np

from packprep.building.ledger import added_slots
from packprep.dataset.boundaries import fill_slots, ranks
from packprep.dataset.segments import MediaSpans, Segments
from packprep.kernel import kernel, read_only
from packprep.objectives import OWN
from packprep.objectives.tasks import own_marks
from packprep.restoring import fitting
from packprep.verification.faults import MAX_LISTED
from packprep.verification.shard_check import ShardCheck

WEIGHTS = "loss_weights"
"""Name of the array of loss weights in an epoch, float32[rows, seq_length].

A stored shard does not have this array. A resampled shard has it instead of `block_noise` and
`block_loss_weight`.
"""

# Fault code of `_check_slots` → invariant and message.
_SLOT_FAULTS = {
    0: ("P6", "segment_ids does not agree with cu_seqlens"),
    1: ("P7", "the token of padding is not pad_id"),
    2: ("P7", "the label of padding is not pad_id"),
    3: ("P7", "padding is trained"),
    4: ("P8", "token is not an id below vocab_size"),
    5: ("P8", "label is not an id below vocab_size"),
    6: ("P9", "loss_mask does not match the segment's prefix"),
    7: ("P10", "label is not the token of the segment's next slot"),
    8: ("P10", "token differs from its label, but the slot is not trained"),
}
_CODES = len(_SLOT_FAULTS)
_NO_RULE = np.int64(-1 << 62)
"""Value for the expected label if tokens do not determine the label. It is not a token id."""


@kernel(inline=True)
def _or_of_differences(values, row, begin, end, should):
    """Return 0 if and only if all values[row, begin : end] equal `should` (≥ 0)."""
    slots, differences = values[row, begin:end], np.uint32(0)
    for i in range(slots.shape[0]):
        differences |= np.uint32(slots[i]) ^ np.uint32(should)
    return differences


@kernel(inline=True)
def _largest(values, row, begin, end):
    """Return the largest of values[row, begin : end]. Negative values count as at least 2³¹."""
    slots, largest = values[row, begin:end], np.uint32(0)
    for i in range(slots.shape[0]):
        largest = max(largest, np.uint32(slots[i]))
    return largest


@kernel(inline=True)
def _or_of_pairs(left, right, row, begin, end, shift):
    """Return 0 if and only if left[row, t] == right[row, t + shift] for begin ≤ t < end."""
    slots, shifted_slots = left[row, begin:end], right[row, begin + shift : end + shift]
    differences = np.uint32(0)
    for i in range(slots.shape[0]):
        differences |= np.uint32(slots[i]) ^ np.uint32(shifted_slots[i])
    return differences


class Slots(NamedTuple):
    """Arrays with one value per slot, [rows, seq_length]. A missing array has 0 rows.

    Attributes:
        tokens: Token ids.
        labels: Label ids.
        segment_ids: Number of the segment in its row, or 0 on padding.
        loss_mask: 1 if the slot is trained.
        trainable: uint8, 1 if the slot may be trained. If this array has no rows, all slots may be
            trained.
    """

    tokens: np.ndarray
    labels: np.ndarray
    segment_ids: np.ndarray
    loss_mask: np.ndarray
    trainable: np.ndarray


class Bounds(NamedTuple):
    """The position and type of all segments of a shard, in row order.

    Attributes:
        row_offsets: First segment of each row, int64[rows + 1].
        first_slot: First slot of each segment in its row, int64[m].
        slots: Number of slots of each segment, int64[m].
        prefix: Number of leading tokens that are not trained targets, int64[m].
        next_token: Whether the target of a slot is the token of the next slot, bool[m].
    """

    row_offsets: np.ndarray
    first_slot: np.ndarray
    slots: np.ndarray
    prefix: np.ndarray
    next_token: np.ndarray


class Found(NamedTuple):
    """The faults that were found.

    Attributes:
        where: Row, slot and value of each listed fault, int64[codes, listed, 3].
        counts: Number of faults per code, int64[codes].
    """

    where: np.ndarray
    counts: np.ndarray


@kernel(inline=True)
def _padding_is_good(rows, row, begin, end, pad):
    """Return whether the slots begin … end − 1 of a row are valid padding."""
    difference = _or_of_differences(rows.segment_ids, row, begin, end, 0)
    difference |= _or_of_differences(rows.loss_mask, row, begin, end, 0)
    difference |= _or_of_differences(rows.tokens, row, begin, end, pad)
    if rows.labels.shape[0] > 0:
        difference |= _or_of_differences(rows.labels, row, begin, end, pad)
    return difference == 0


@kernel(inline=True)
def _segment_is_good(rows, segments, row, g, pad, vocab_size):
    """Return whether all slots of segment g are valid. The shard must not have trained ranges."""
    begin, number = segments.first_slot[g], g - segments.row_offsets[row] + 1
    end = begin + segments.slots[g]
    if (
        _largest(rows.tokens, row, begin, end) >= vocab_size
        or _or_of_differences(rows.segment_ids, row, begin, end, number) != 0
    ):
        return False
    # A same-position slot may differ from its label only if it is trained (P10).
    if not segments.next_token[g]:
        inputs, originals = rows.tokens[row, begin:end], rows.labels[row, begin:end]
        trained, difference = rows.loss_mask[row, begin:end], np.uint32(0)
        for i in range(inputs.shape[0]):
            # The multiplication replaces a branch, so that the loop is vectorized.
            changed = np.uint32(inputs[i]) ^ np.uint32(originals[i])
            difference |= changed * np.uint32(trained[i] == 0)
        return difference == 0 and _largest(rows.labels, row, begin, end) < vocab_size
    # The last slot of the prefix is trained, but never the last slot of the segment (P9).
    first_trained = min(begin + max(segments.prefix[g] - 1, 0), end - 1)
    difference = _or_of_differences(rows.loss_mask, row, begin, first_trained, 0)
    difference |= _or_of_differences(rows.loss_mask, row, first_trained, end - 1, 1)
    difference |= np.uint32(rows.loss_mask[row, end - 1])
    # A label is the next token, and pad_id in the last slot (P10).
    if rows.labels.shape[0] > 0:
        difference |= _or_of_pairs(rows.labels, rows.tokens, row, begin, end - 1, 1)
        difference |= np.uint32(rows.labels[row, end - 1]) ^ np.uint32(pad)
    return difference == 0


@kernel(inline=True)
def _note(faults_found, code, row, slot, value):
    """Count a fault, and list it while the list has space."""
    count = faults_found.counts[code]
    if count < faults_found.where.shape[1]:
        faults_found.where[code, count, 0] = row
        faults_found.where[code, count, 1] = slot
        faults_found.where[code, count, 2] = value
    faults_found.counts[code] += 1


@kernel(inline=True)
def _note_padding_slot(rows, row, t, pad, faults_found):
    """Record the faults of one slot of padding."""
    if rows.segment_ids[row, t] != 0:
        _note(faults_found, 0, row, t, np.int64(rows.segment_ids[row, t]))
    if np.int64(rows.tokens[row, t]) != pad:
        _note(faults_found, 1, row, t, np.int64(rows.tokens[row, t]))
    if rows.labels.shape[0] > 0 and np.int64(rows.labels[row, t]) != pad:
        _note(faults_found, 2, row, t, np.int64(rows.labels[row, t]))
    if rows.loss_mask[row, t] != 0:
        _note(faults_found, 3, row, t, np.int64(rows.loss_mask[row, t]))


@kernel(inline=True)
def _note_label(rows, row, t, expected, vocab_size, faults_found):
    """Record the faults of one slot's label.

    `expected` is the token id that the label must have. If it is _NO_RULE, the label may differ
    from the slot's token only if the slot is trained.
    """
    token, label = np.int64(rows.tokens[row, t]), np.int64(rows.labels[row, t])
    if label < 0 or label >= vocab_size:
        _note(faults_found, 5, row, t, label)
    if expected != _NO_RULE:
        if label != expected:
            _note(faults_found, 7, row, t, label)
    elif token != label and rows.loss_mask[row, t] == 0:
        _note(faults_found, 8, row, t, token)


@kernel
def _check_slots(rows, segments, pad, vocab_size, faults_found):
    """Check all slots, and record faults in `faults_found`."""
    tokens, loss_mask, trainable = rows.tokens, rows.loss_mask, rows.trainable
    length, with_labels = tokens.shape[1], rows.labels.shape[0] > 0
    for r in range(tokens.shape[0]):
        t = np.int64(0)
        for g in range(segments.row_offsets[r], segments.row_offsets[r + 1] + 1):
            # Check the padding before the segment. After the last segment it extends to the end of
            # the row.
            is_end = g == segments.row_offsets[r + 1]
            begin = length if is_end else segments.first_slot[g]
            if _padding_is_good(rows, r, t, begin, pad):
                t = begin
            while t < begin:
                _note_padding_slot(rows, r, t, pad, faults_found)
                t += 1
            if is_end:
                break
            # Accept the segment at once if it is good. Otherwise check it slot by slot.
            number, end = g - segments.row_offsets[r] + 1, begin + segments.slots[g]
            first_trained = begin + max(segments.prefix[g] - 1, 0)
            next_token = segments.next_token[g]
            is_plain = trainable.shape[0] == 0 and (with_labels or next_token)
            if is_plain and _segment_is_good(rows, segments, r, g, pad, vocab_size):
                t = end
            while t < end:
                token = np.int64(tokens[r, t])
                if np.int64(rows.segment_ids[r, t]) != number:
                    _note(faults_found, 0, r, t, np.int64(rows.segment_ids[r, t]))
                if token < 0 or token >= vocab_size:
                    _note(faults_found, 4, r, t, token)
                if next_token:
                    # The next slot has the target, so its flag in `trainable` decides (P9).
                    trained = first_trained <= t < end - 1 and (
                        trainable.shape[0] == 0 or trainable[r, t + 1] != 0
                    )
                    if loss_mask[r, t] != (1 if trained else 0):
                        _note(faults_found, 6, r, t, np.int64(loss_mask[r, t]))
                if with_labels:
                    expected = _NO_RULE
                    if next_token:
                        expected = np.int64(tokens[r, t + 1]) if t < end - 1 else np.int64(pad)
                    _note_label(rows, r, t, expected, vocab_size, faults_found)
                t += 1


@kernel
def _mark(first_slot, bounds, ranges, trainable):
    """Set `trainable` to 1 inside the trained ranges of each segment."""
    for i in range(first_slot.shape[0]):
        for k in range(bounds[i], bounds[i + 1]):
            for t in range(first_slot[i] + ranges[k, 0], first_slot[i] + ranges[k, 1]):
                trainable[t] = 1


def trainable_slots(check: ShardCheck) -> np.ndarray:
    """Return 1 for the slots inside trained ranges, uint8[rows, seq_length].

    The result has no rows if the shard has no ranges.
    """
    shape, trained = check.arrays["tokens"].shape, check.segments.trained
    if trained is None:
        return np.zeros((0, shape[1]), np.uint8)
    trainable = np.zeros(shape[0] * shape[1], np.uint8)
    _mark(check.first_slots, trained.offsets, trained.ranges.astype(np.int64), trainable)
    return trainable.reshape(shape)


def seen_before(segments: Segments) -> np.ndarray:
    """Return the number of leading tokens in each segment that are not trained targets, int64[m].

    It is the segment's prefix, or the number of its slots if the segment has no tokens.
    """
    return np.where(segments.has_tokens, segments.prefix, segments.slots)


def check_slots(check: ShardCheck) -> None:
    """Check segment ids, padding, token ids, loss mask and labels of one shard (P6 to P10).

    The shard's `segment_*` arrays must be valid.
    """
    tokens, segments, roles = check.arrays["tokens"], check.segments, check.plan.vocabulary.roles
    labels = check.arrays.get("labels", np.zeros((0, tokens.shape[1]), tokens.dtype))
    shift = check.plan.by_task.shift[segments.task]
    # For shifted same-position tasks, a label is the original token of the next slot. `check_noise`
    # compares these labels, so they are replaced by the tokens here.
    if shift.any():
        is_shifted = fill_slots(check.first_slots, segments.slots, shift, False, tokens.size)
        labels = np.where(is_shifted.reshape(tokens.shape), tokens, labels)
    arrays = tokens, labels, check.arrays["segment_ids"], check.arrays["loss_mask"]
    rows = Slots(*map(read_only, (*arrays, trainable_slots(check))))
    columns = segments.first_slot, segments.slots, seen_before(segments), ~check.in_place
    bounds = Bounds(*map(read_only, (check.arrays["row_offsets"], *columns)))
    # A kernel cannot add messages, so it fills a table with the first faults of each code.
    faults_found = Found(np.zeros((_CODES, MAX_LISTED, 3), np.int64), np.zeros(_CODES, np.int64))
    _check_slots(rows, bounds, roles["pad"], check.plan.vocabulary.vocab_size, faults_found)
    for code, (promise, message) in _SLOT_FAULTS.items():
        for row, slot, value in faults_found.where[code, : faults_found.counts[code]].tolist():
            check.add(promise, message, row, slot, value)
        # A damaged shard may have a fault in each slot, so the other faults are only counted.
        if faults_found.counts[code] > MAX_LISTED:
            check.faults.count(promise, check.file, int(faults_found.counts[code]) - MAX_LISTED)


def check_removed(check: ShardCheck) -> None:
    """Check P23: exactly the segments of removed documents have no tokens.

    The slots of these segments must have pad as token and label, and no loss.
    """
    segments, pad = check.segments, check.plan.vocabulary.roles["pad"]
    listed = check.plan.removed.segments(segments)
    # Each segment has tokens, or its document is listed, but never both.
    for g in np.flatnonzero(segments.has_tokens == listed)[:MAX_LISTED]:
        message = "it has tokens of" if listed[g] else "it has no tokens, but is not of"
        message += " a removed document"
        check.add_segment("P23", g, message, int(segments.first_slot[g]), int(segments.tokens[g]))
    # In every epoch, the slots of removed documents are like padding.
    blanks = {"tokens": pad, "labels": pad, "loss_mask": 0, WEIGHTS: 0}
    for g in np.flatnonzero(listed).tolist():
        first_slot = int(segments.first_slot[g])
        within = slice(first_slot, first_slot + int(segments.slots[g]))
        for name in blanks.keys() & check.arrays.keys():
            values = check.arrays[name][segments.row[g], within]
            for t in np.flatnonzero(values != blanks[name])[:1]:
                message = f"{name} of a removed document"
                check.add_segment("P23", g, message, first_slot + int(t), values[t].item())


def check_sentinels(check: ShardCheck) -> None:
    """Check P14: sentinels and special tokens are where a segment's task writes them.

    A segment must not have further sentinels or special tokens of its task.
    """
    plan, segments = check.plan, check.segments
    fits = fitting(plan, check.arrays, segments, check.epoch)
    for g in np.flatnonzero(~fits):
        first_slot = int(segments.first_slot[g])
        check.add_segment("P14", g, "a sentinel is missing or out of order", first_slot)
    # A valid segment may still have more sentinels than its task writes, so they are counted.
    tokens, is_mark = check.flat("tokens"), {}
    added = added_slots(plan.tasks, segments)
    for t, task in enumerate(plan.tasks):
        marks = own_marks(plan.recipe, task)
        chosen = segments.of_task(t)
        chosen = chosen[fits[chosen]]
        if not len(marks) or not len(chosen) or task.objective.name not in OWN:
            continue
        begin = check.first_slots[chosen]
        bounds = np.stack((begin, begin + segments.slots[chosen]), axis=1).reshape(-1)
        if marks.tobytes() not in is_mark:
            # The extra entry lets `reduceat` take the number of slots as a bound.
            is_mark[marks.tobytes()] = np.append(np.isin(tokens, marks), False)
        # `bounds` alternates between starts and ends, so every second sum belongs to a segment.
        counts = np.add.reduceat(is_mark[marks.tobytes()], bounds, dtype=np.int64)[::2]
        expected = (added["sentinel"] + added["fim"])[chosen]
        for i in np.flatnonzero(counts != expected)[:MAX_LISTED]:
            message = (
                f"has {counts[i]} sentinels or special tokens, but its task writes {expected[i]}"
            )
            check.add_segment("P14", chosen[i], message, int(segments.first_slot[chosen[i]]))


def check_sides(check: ShardCheck) -> None:
    """Check P24: rows fit encoder_length and decoder_length.

    Each segment must have slots in the encoder sequence and in the decoder sequence.
    """
    segments, sides = check.segments, check.plan.recipe.packing.sides
    if sides is None:
        return
    rows = len(check.arrays["row_offsets"]) - 1
    parts = segments.prefix, segments.slots - segments.prefix
    for name, most_slots, side_slots in zip(("encoder", "decoder"), sides, parts, strict=True):
        for g in np.flatnonzero(side_slots < 1)[:MAX_LISTED]:
            row, message = int(segments.row[g]), f"segment {g} has no {name} slot"
            check.add("P24", message, row, value=int(side_slots[g]))
        used = np.zeros(rows, np.int64)
        np.add.at(used, segments.row, side_slots)
        for row in np.flatnonzero(used > most_slots)[:MAX_LISTED]:
            message = f"segments have more than the {most_slots} {name} slots"
            check.add("P24", message, int(row), value=int(used[row]))


def check_media(check: ShardCheck) -> None:
    """Check P25 of one shard: media spans are valid, and only they contain media's slot tokens."""
    kinds = np.array([slot for _, slot, _ in check.plan.vocabulary.media.values()])
    tokens = check.flat("tokens")
    inside = np.zeros(len(tokens), np.bool_)
    if check.segments.media is not None:
        slots = _slots_of_media(check, check.segments.media, kinds)
        if slots is None:
            return
        inside[slots] = True
    for i in np.flatnonzero(np.isin(tokens, kinds) & ~inside)[:MAX_LISTED]:
        check.add_slot("P25", i, "a slot token of media outside a media span", int(tokens[i]))


def _slots_of_media(check: ShardCheck, media: MediaSpans, kinds: np.ndarray) -> np.ndarray | None:
    """Check the media spans, and return their slots as indices into the flattened rows.

    Return None if a span is outside its segment, overlaps another span, or has an unknown kind.

    Args:
        check: The shard that is checked.
        media: The shard's media spans.
        kinds: The slot token of each kind of media, int64[kinds].
    """
    segments, segment = check.segments, media.segment
    spans = segments.select(segment)
    begin, counts = media.slot.astype(np.int64), media.tokens.astype(np.int64)
    after = spans.first_slot.copy()  # The end of the previous span in the segment.
    is_same = segment[1:] == segment[:-1]
    after[1:][is_same] = (begin + counts)[:-1][is_same]
    bad = (
        (counts < 1)
        | (begin < after)
        | (begin + counts > spans.first_slot + spans.slots)
        | (media.kind >= len(kinds))
    )
    for i in np.flatnonzero(bad)[:MAX_LISTED]:
        message = (
            f"a media span of {counts[i]} slots of kind {media.kind[i]} is outside its segment,"
            " or overlaps another span"
        )
        check.add_segment("P25", segment[i], message, int(begin[i]))
    if bad.any():
        return None
    # The slots must have the slot token of their kind, and must not be trained.
    flat = np.repeat(spans.row * check.seq_length + begin, counts) + ranks(counts)
    expected, in_place = np.repeat(kinds[media.kind], counts), check.in_place[segment]
    for name in ("tokens", "labels") if "labels" in check.arrays else ("tokens",):
        values = check.flat(name)[flat]
        is_checked = np.repeat(in_place | (name == "tokens"), counts)
        for i in np.flatnonzero(is_checked & (values != expected))[:MAX_LISTED]:
            message = f"{name}: not a slot token in a media span"
            check.add_slot("P25", flat[i], message, int(values[i]))
    trainable = trainable_slots(check).reshape(-1)
    for slot in flat[trainable[flat] != 0][:MAX_LISTED] if len(trainable) else flat[:1]:
        check.add_slot("P25", slot, "a slot of media is trainable")
    # A trainer gets references as text.
    references = media.ref.tobytes()
    for i, (low, high) in enumerate(itertools.pairwise(media.ref_offsets.tolist())):
        try:
            references[low:high].decode()
        except UnicodeDecodeError:
            check.add_segment("P25", segment[i], "a ref is not valid UTF-8", int(begin[i]))
    return flat
