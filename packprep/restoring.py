"""Restore documents from stored shards: arrays → segments → tokens and slots → documents.

Building does not need this module.

```
stored     ‹NLG› t ‹0› ias ‹1› ‹0› hod ‹1› ericAl ‹eos›
restored   t hod ias ericAl
```
Special tokens such as bos, mode tokens, sentinels and eos are not part of the document.
"""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from packprep.building.plan import Plan, open_plan
from packprep.building.render import render_shard
from packprep.building.segments import Cuts, cut, segments_of_cuts
from packprep.building.work import documents_builder, text_reader
from packprep.dataset.boundaries import descents, offsets_of, owners, ranks, starts_of
from packprep.dataset.manifest import read_manifest
from packprep.dataset.segments import Arrays, Segments, TrainedRanges, header_columns, records_of
from packprep.dataset.shard import Shard, shard_in
from packprep.documents.reading import Documents, read_documents
from packprep.errors import DatasetError, SourceError
from packprep.objectives import causal
from packprep.objectives.objective import BodySlots, Task
from packprep.randomness import segment_key
from packprep.sources.formats import FORMATS, PIECE_BYTES, position_of
from packprep.sources.slices import PlannedSource
from packprep.storage import LocalFolder
from packprep.tokenizer.texts import ByteTable, TokenTexts, texts_of_dataset


def stored_segments(plan: Plan, arrays: Arrays) -> Segments:
    """Return the segments of a shard's arrays, with four computed columns.

    The columns are `bos`, `eos`, `repeated` and `first_trained`. `bos` is 1 for the first segment
    of a document if the recipe adds bos, otherwise 0.

    `eos` is the segment's number of slots minus the number that the length formula gives for a
    segment without eos. In block diffusion, a segment contains its tokens twice, so the difference
    is divided by 2, or `eos` is −1 if the difference is odd. If `eos` is neither 0 nor 1, the
    segment does not satisfy the length formula.

    A later chunk of a supervised document may begin with a copy of the system message. The
    difference then counts eos and the tokens of this copy. For such a chunk, `eos` is 1 if the
    recipe adds eos to every segment, or if it adds eos to documents and the chunk's last token is
    eos. The rest of the difference is `repeated`.

    `bos`, `eos` and `repeated` are 0 for segments without tokens.
    """
    segments = Segments.of_arrays(arrays)
    bos = (segments.start == 0) & segments.has_tokens & plan.recipe.documents.prepend_bos
    bos = bos.astype(np.int64)
    extra = np.zeros(len(segments), np.int64)
    # `extra` counts the slots beyond the length formula: eos and repeated tokens. A negative number
    # is a fault.
    for t, task in enumerate(plan.tasks):
        chosen = segments.of_task(t)
        if len(chosen):
            of_task = segments.select(chosen)
            no_eos = np.zeros(len(chosen), np.int64)
            over = of_task.slots - task.slots(of_task.bodies(), bos[chosen], no_eos)
            copies = task.objective.copies
            extra[chosen] = np.where(over % copies, -1, over // copies)
    eos, repeated = extra, np.zeros(len(segments), np.int64)
    # Only later chunks of supervised documents repeat tokens. Divide their extra slots into eos and
    # copy.
    if segments.trained is not None and len(segments):
        later = (segments.start > 0) & (extra > 0)
        documents = plan.recipe.documents
        ends = _ends_in_eos(plan, arrays, segments) & documents.eos_after_document
        eos = np.where(later, ends | documents.eos_after_segment, extra)
        repeated = np.where(later, extra - eos, 0)
    with_formula = segments.replace(bos=bos, eos=eos, repeated=repeated)
    return with_formula.replace(first_trained=_first_trained(plan, with_formula))


def _ends_in_eos(plan: Plan, arrays: Arrays, segments: Segments) -> np.ndarray:
    """Return whether each segment's last token is eos, bool[m]."""
    last_slot = segments.row, segments.first_slot + segments.slots - 1 - segments.fill
    last_tokens = arrays["tokens"][last_slot].astype(np.int64)
    # In segments with same-position prediction, tokens may be noised, so the label is read. Other
    # segments need the token, because their last label is pad. Block diffusion does not need the
    # label, because its last token is clean.
    if "labels" in arrays:
        by_task = plan.by_task
        noised = (by_task.in_place & (by_task.copies == 1))[segments.task]
        last_tokens = np.where(noised, arrays["labels"][last_slot], last_tokens)
    ends: np.ndarray = last_tokens == plan.vocabulary.roles.get("eos", -1)
    return ends


def _first_trained(plan: Plan, segments: Segments) -> np.ndarray:
    """Return where each segment's trained ranges start, as an index in its body, int64[m].

    The value is −1 if the whole body may be trained. This is the case without trained ranges, or if
    ranges without gaps cover the body. `prefix_lm` draws the pivot at random if the value is −1.
    Otherwise its pivot is at the start of the trained ranges.
    """
    first_trained = np.full(len(segments), -1, np.int64)
    if segments.trained is None:
        return first_trained
    # Take the outer bounds of each segment's ranges, in slots from the start of the segment.
    offsets, ranges = segments.trained.offsets, segments.trained.ranges.astype(np.int64)
    with_ranges = np.flatnonzero(np.diff(offsets) > 0)
    begin, end = ranges[offsets[with_ranges], 0], ranges[offsets[with_ranges + 1] - 1, 1]
    segment = segments.trained.segment
    # Ranges of different weights may touch. Only untrained slots between them are a gap.
    is_gap = (segment[1:] == segment[:-1]) & (ranges[1:, 0] > ranges[:-1, 1])
    gaps = np.bincount(segment[1:][is_gap], minlength=len(segments))[with_ranges]
    # Compare the bounds with the body. An eos after the body may be trained or not.
    supervised = segments.select(with_ranges)
    body = supervised.bos + plan.by_task.mode[supervised.task]
    half = supervised.slots // plan.by_task.copies[supervised.task]
    content_end = half - (supervised.eos > 0) - supervised.fill
    is_whole = (gaps == 0) & (begin <= body) & (end >= content_end)
    first_trained[with_ranges] = np.where(is_whole, -1, begin - body)
    return first_trained


class RestoredTokens(NamedTuple):
    """The content tokens of some segments, without the tokens that their objectives insert."""

    ids: np.ndarray  # token ids in the dataset's dtype, one segment after the other
    offsets: np.ndarray  # int64[k + 1]
    # bool[k]: True if the inserted tokens (sentinels, …) match the segment header
    fits: np.ndarray


def restore(
    plan: Plan,
    arrays: Arrays,
    segments: Segments,
    chosen: np.ndarray,
    epoch: int = 0,
) -> RestoredTokens:
    """Return the original tokens of the chosen segments, as they were before the objectives.

    With same-position prediction, the original tokens are the labels. With block diffusion, they
    are x_0. For other objectives, this function undoes the changes of the objective.

    Args:
        plan: The dataset's plan.
        arrays: A shard's arrays.
        segments: The shard's segments. Their lengths must satisfy the length formula.
        chosen: int64[k]: indices of segments.
        epoch: The epoch of the arrays.
    """
    return _restore(plan.tasks, arrays, segments, chosen, epoch)


def _restore(
    tasks: Sequence[Task],
    arrays: Arrays,
    segments: Segments,
    chosen: np.ndarray,
    epoch: int,
) -> RestoredTokens:
    of_chosen = segments.select(chosen)
    lengths = of_chosen.tokens + of_chosen.repeated
    begin = starts_of(lengths)
    out = np.empty(int(lengths.sum()), arrays["tokens"].dtype)
    fits = np.ones(len(chosen), np.bool_)
    for t, task in enumerate(tasks):
        indices = of_chosen.of_task(t)
        if not len(indices):
            continue
        of_task = of_chosen.select(indices)
        body = of_task.flat_slots(arrays["tokens"].shape[1]) + of_task.bos + task.mode
        # Labels of same-position tasks are the original tokens in order, as in causal slots.
        objective = causal.OBJECTIVE if task.in_place else task.objective
        # In block diffusion, the second copy is clean, but labels may be shifted by one slot.
        twice = task.objective.copies > 1
        rows = arrays["labels" if task.in_place and not twice else "tokens"].reshape(-1)
        if twice:
            body = body + of_task.slots // task.objective.copies
        assert objective.restore is not None
        columns = BodySlots(begin[indices], of_task.bodies(epoch), body)
        fits[indices] = objective.restore(task, columns, rows, out)
    # A copied system message starts its segment, but is not content of this chunk.
    if of_chosen.repeated.any():
        out = out[ranks(lengths) >= np.repeat(of_chosen.repeated, lengths)]
    return RestoredTokens(out, offsets_of(of_chosen.tokens), fits)


FITTING_TOKENS = 1 << 18
"""Number of tokens that are restored at once, so that they stay in the processor's cache."""


def fitting(plan: Plan, arrays: Arrays, segments: Segments, epoch: int = 0) -> np.ndarray:
    """Return whether each segment's inserted tokens match its header, bool[m].

    The result equals `fits` in the result of `restore`, but needs less memory.
    """
    fits = np.ones(len(segments), np.bool_)
    length = arrays["tokens"].shape[1]
    slots, scratch = arrays["tokens"].reshape(-1), np.empty(0, arrays["tokens"].dtype)
    for t, task in enumerate(plan.tasks):
        if task.in_place or task.objective is causal.OBJECTIVE:
            continue  # The task inserts no tokens.
        assert task.objective.restore is not None
        chosen = segments.of_task(t)
        of_task = segments.select(chosen)
        ends = np.cumsum(of_task.tokens + of_task.repeated)
        if not len(chosen):
            continue
        # Divide the segments into batches of about FITTING_TOKENS tokens, which share one buffer.
        marks = np.searchsorted(ends, np.arange(0, int(ends[-1]), FITTING_TOKENS))
        bounds = np.unique(np.append(marks, len(chosen))).tolist()
        for begin, end in itertools.pairwise(bounds):
            batch = of_task.select(slice(begin, end))
            bodies = batch.bodies(epoch)
            # Indices of tokens start at 0 in each batch, because the batches share a buffer.
            first_tokens = ends[begin:end] - bodies.n
            first_tokens -= first_tokens[0]
            size = int(first_tokens[-1] + bodies.n[-1])
            if len(scratch) < size:
                scratch = np.empty(size, scratch.dtype)
            body = batch.flat_slots(length) + batch.bos + task.mode
            columns = BodySlots(first_tokens, bodies, body)
            fits[chosen[begin:end]] = task.objective.restore(task, columns, slots, scratch)
    return fits


def sound_segments(plan: Plan, shard: Shard) -> Segments:
    """Return `stored_segments` of a shard, after checking that `restore` can read each segment.

    The boundaries of the segments must be valid. `restore` uses the length formula, so the formula
    must hold for every segment.

    Raises:
        DatasetError: If `restore` cannot read a segment.
    """
    arrays = shard.arrays
    # The columns are not trusted. Check those that index other arrays before any kernel runs.
    n = arrays["segment_tokens"].astype(np.int64)
    if len(n) and (n.min() < 0 or n.max() > shard.seq_length):
        damaged = int(np.argmax((n < 0) | (n > shard.seq_length)))
        raise _damaged(shard, damaged, "segment_tokens is out of range")
    if "trained_offsets" in arrays:
        offsets, ranges = arrays["trained_offsets"], arrays["trained_ranges"]
        if offsets[0] != 0 or offsets[-1] != len(ranges):
            raise DatasetError(
                f"{shard.path}: trained_offsets is {offsets[0]} … {offsets[-1]}, but should be 0 …"
                f" {len(ranges)}. {_FIND_DAMAGE}"
            )
        falls = descents(offsets)
        if falls.any():
            raise _damaged(shard, int(np.argmax(falls)), "trained_offsets descends")
    segments = stored_segments(plan, arrays)
    # With other counts, the slots cannot follow from the length formula. Compute the rest.
    holds = (segments.eos >= 0) & (segments.eos <= 1) & (segments.repeated >= 0)
    for t, task in enumerate(plan.tasks):
        chosen = segments.of_task(t)
        chosen = chosen[holds[chosen]]
        if len(chosen):
            of_task = segments.select(chosen)
            formula = task.slots(of_task.bodies(), of_task.bos, of_task.eos)
            holds[chosen] = formula == of_task.slots
    if not holds.all():
        damaged = int(np.argmin(holds))
        raise _damaged(shard, damaged, "its slots do not match its task's length formula")
    return segments


_FIND_DAMAGE = "The file is damaged\nhint: find all damage with `packprep verify`"


def _damaged(shard: Shard, segment: int, reason: str) -> DatasetError:
    return DatasetError(
        f"{shard.path}: segment {segment} cannot be inverted: {reason}. {_FIND_DAMAGE}"
    )


class _StoredIds(NamedTuple):
    """n original tokens and their segments. Slots are indices into the flattened rows.

    Attributes:
        rows: The flattened tokens (row 0) and labels (row 1), [2, slots].
        is_label: Whether the labels contain the original token, bool[n].
        begin: First slot of the token's segment, int64[n].
        end: Slot after the token's segment, int64[n].
        half: Distance from x_t to x_0, or 0 without x_0, int64[n].
        ids: The ids of the original tokens, [n].
    """

    rows: np.ndarray
    is_label: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    half: np.ndarray
    ids: np.ndarray

    def are_in(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return whether slots[i] is in the segment of tokens[i] and contains its id, bool[k].

        `tokens` has indices of original tokens.
        """
        is_label, half = self.is_label[tokens], self.half[tokens]
        is_inside = (slots >= self.begin[tokens]) & (slots < self.end[tokens])
        stored_ids = self.rows[is_label.astype(np.int64), np.where(is_inside, slots + half, 0)]
        return is_inside & (stored_ids == self.ids[tokens])


def slots_of_tokens(
    plan: Plan,
    arrays: Arrays,
    segments: Segments,
    chosen: np.ndarray,
    ids: np.ndarray,
    epoch: int = 0,
) -> np.ndarray:
    """Return the slot of each original token within its row, int64[n].

    For block diffusion, this is the slot in x_t. The result is -1 if the slot is unknown. This can
    happen with a custom objective, because its inverse may depend on token ids.

    To find the slots, each token id is replaced by vocab_size + slot, and the inverse of the
    objective is run on these numbers. Only special tokens that fill_in_the_middle searches for keep
    their ids. An example with vocab_size 1000, prefix "a b", suffix "c" and middle "d e":

        slot              0     1     2     3     4     5     6     7     8
        row             ‹PRE›   a     b   ‹SUF›   c   ‹MID›   d     e   ‹eos›
        numbers         ‹PRE› 1001  1002  ‹SUF› 1004  ‹MID› 1006  1007  1008
        inverse of the row      a     b     d     e     c
        inverse of numbers    1001  1002  1006  1007  1004    1001 - 1000 is slot 1
        slots of tokens         1     2     6     7     4

    Args:
        plan: The dataset's plan.
        arrays: A shard's arrays.
        segments: The shard's segments, as returned by `stored_segments`.
        chosen: int64[k]: indices of segments.
        ids: [n]: original tokens of the chosen segments, as returned by `restore`.
        epoch: The epoch of the arrays.
    """
    if not len(chosen):
        return np.zeros(0, np.int64)
    length, vocab_size = arrays["tokens"].shape[1], plan.vocabulary.vocab_size
    first_row, end_row = int(segments.row[chosen].min()), int(segments.row[chosen].max()) + 1
    tokens = arrays["tokens"][first_row:end_row]
    labels = arrays.get("labels", arrays["tokens"])[first_row:end_row]
    # Tasks must know whether the token that a number replaces starts inside a character.
    tasks = [_of_numbers(task, tokens) for task in plan.tasks]
    in_rows = segments.replace(row=segments.row - first_row)
    restored = _restore(tasks, _numbered(plan, tokens), in_rows, chosen, epoch).ids
    # A restored number gives a slot. Accept it if it is in the token's segment and contains the
    # token.
    of_chosen = in_rows.select(chosen)
    segment = owners(of_chosen.tokens)
    copies = plan.by_task.copies[of_chosen.task]
    begin, half = of_chosen.flat_slots(length), of_chosen.slots // copies * (copies > 1)
    is_label = plan.by_task.in_place[of_chosen.task] & (copies == 1)
    stored_ids = _StoredIds(
        np.stack((tokens.reshape(-1), labels.reshape(-1))),
        is_label[segment],
        begin[segment],
        (begin + of_chosen.slots)[segment],
        half[segment],
        ids,
    )
    slots = restored.astype(np.int64) - vocab_size - stored_ids.half
    slots[~stored_ids.are_in(slots, np.arange(len(slots)))] = -1
    _place_specials(slots, segment, stored_ids)
    return np.where(slots < 0, -1, slots % length)


def _place_specials(slots: np.ndarray, segment: np.ndarray, stored_ids: _StoredIds) -> None:
    """Replace unknown slots (−1) of tokens that are stored next to a token with a known slot.

    The token with the known slot must be the previous or the next original token of the segment.
    Slots of special tokens in the text are unknown, because `_numbered` keeps the ids of these
    tokens.
    """
    unknown = np.flatnonzero(slots < 0)
    # Look for a known neighbour before the token, then after it. Each direction can fill a whole
    # run.
    for step, order in ((1, unknown), (-1, unknown[::-1])):
        for i in order[(order >= step) & (order < len(slots) + min(step, 0))].tolist():
            if slots[i] < 0 and slots[i - step] >= 0 and segment[i] == segment[i - step]:
                neighbour = slots[i - step : i - step + 1] + step
                if stored_ids.are_in(neighbour, np.array([i]))[0]:
                    slots[i] = neighbour[0]


def _numbered(plan: Plan, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Return rows with the id vocab_size + slot in each slot.

    Special tokens of fill-in-the-middle keep their ids.
    """
    slot_numbers = np.arange(tokens.size, dtype=np.int32) + plan.vocabulary.vocab_size
    numbers = slot_numbers.reshape(tokens.shape)
    is_special = np.isin(tokens, np.unique([task.ids.fim for task in plan.tasks]))
    return {"tokens": np.where(is_special, tokens.astype(np.int32), numbers), "labels": numbers}


def _of_numbers(task: Task, tokens: np.ndarray) -> Task:
    """Return the task, with `continues` flags also for the ids that `_numbered` writes.

    A flag says whether a token starts inside a character. The id vocab_size + slot has the flag
    of the token in that slot.
    """
    continues = task.ids.continues
    if not len(continues):
        return task
    of_tokens = continues.take(tokens.reshape(-1), mode="clip")
    return replace(task, ids=replace(task.ids, continues=np.concatenate((continues, of_tokens))))


# Segments → documents


def documents_at(
    plan: Plan, source: PlannedSource, file: int, use: int, positions: np.ndarray
) -> Documents:
    """Return the token documents at some positions of one file of the plan.

    Args:
        plan: The plan.
        source: The source of the file.
        file: Index of the file in the plan.
        use: Number of the pass over the source.
        positions: Positions of the documents in the file.

    Raises:
        SourceError: If a document no longer exists.
    """
    i = file - source.first_file
    # Read only the splits that can have these positions.
    wanted_positions = np.unique(positions)
    pieces = np.array(source.pieces.of_file(i), np.int64)
    if position_of(*source.formats[i]) == "byte":
        pieces = pieces[np.isin(np.arange(len(pieces)), wanted_positions // PIECE_BYTES)]
    elif (format := FORMATS[source.formats[i][0]]).indexed and not source.in_store:
        pieces = pieces[
            format.module.pieces_at(source.path(i), int(source.files.sizes[i]), wanted_positions)
        ]
    documents = _documents_in(plan, source, {file: wanted_positions}, pieces, use)
    missing = np.setdiff1d(wanted_positions, documents.position)
    if len(missing) and source.grouping:
        # A document that continues a group is read with the group, maybe from an earlier split on.
        pieces = source.pieces_at(i, wanted_positions)
        documents = _documents_in(plan, source, {file: wanted_positions}, pieces, use)
        missing = np.setdiff1d(wanted_positions, documents.position)
    if len(missing):
        raise SourceError(
            f"source {source.name!r}: {source.files[i].name} no longer has a usable document at"
            f" {missing[0]}. The file changed since the build"
        )
    return documents


def _documents_in(
    plan: Plan,
    source: PlannedSource,
    only: Mapping[int, np.ndarray],
    pieces: np.ndarray,
    use: int,
) -> Documents:
    """Return the documents `only` in the splits `pieces` of a source, as in `read_documents`."""
    slices = (
        (source, work_range) for piece in pieces for work_range in source.slices_of(int(piece), use)
    )
    return read_documents(documents_builder(plan), text_reader(plan), slices, only=only)


def replay_segments(plan: Plan, arrays: Arrays, chosen: np.ndarray, epoch: int = 0) -> list[str]:
    """Rebuild segments from their sources, and describe how each differs from the stored segment.

    The description is "" if two conditions hold: the rebuilt segment equals the stored segment, and
    `restore` finds the document's tokens in the stored segment. Segments without tokens are not
    rebuilt and get "".

    Args:
        plan: The dataset's plan.
        arrays: A shard's arrays.
        chosen: int64[k]: indices of segments of the shard.
        epoch: The epoch of the arrays.

    Returns:
        The description for each chosen segment.

    Raises:
        SourceError: If a source file is missing, or a document no longer exists in it.
    """
    chosen = np.asarray(chosen, np.int64)
    stored = stored_segments(plan, arrays)
    differences = [""] * len(chosen)
    of_chosen = stored.select(chosen)
    # Read the documents of each file and pass together.
    files = np.stack((of_chosen.source, of_chosen.file, of_chosen.repeat))
    for s, file, repeat in np.unique(files, axis=1).T:
        of_file = np.flatnonzero((files == np.array([[s], [file], [repeat]])).all(axis=0))
        documents = documents_at(
            plan, plan.sources[s], int(file), int(repeat), of_chosen.doc[of_file]
        )
        built = _cut_again(plan, documents, of_chosen.select(of_file))
        index_of = {
            (int(doc), int(start)): i
            for i, (doc, start) in enumerate(zip(built.doc, built.start, strict=True))
        }
        # A segment is found by its document and first token, because its row and slots depend on
        # packing.
        for k in of_file[of_chosen.has_tokens[of_file]]:
            i = index_of.get((int(of_chosen.doc[k]), int(of_chosen.start[k])))
            if i is None:
                differences[k] = f"its document has no cut at token {int(of_chosen.start[k])}"
                continue
            together = np.array([i])
            if plan.recipe.documents.loss_weighting != "token":  # its document's segments
                together = np.flatnonzero(built.document == built.document[i])
            # Render each segment in its own row, so that nothing else influences it.
            rows = np.arange(len(together))
            apart = built.select(together).replace(row=rows, first_slot=0 * rows)
            own_index = int(np.searchsorted(together, i))
            rebuilt = _Rebuilt(
                plan, arrays, stored, int(chosen[k]), documents, apart, own_index, epoch
            )
            differences[k] = rebuilt.difference()
    return differences


def _cut_again(plan: Plan, documents: Documents, stored: Segments) -> Segments:
    """Cut the documents again, and return their segments.

    With `concat`, packing determines the cuts, so the stored cuts are used.
    """
    if plan.recipe.packing.algorithm != "concat":
        return cut(plan.recipe, plan.tasks, documents, plan.cut_limits)[0]
    # The header has the cuts. Only the keys are computed again, to be compared.
    by_position = {int(position): d for d, position in enumerate(documents.position)}
    document = np.array([by_position[int(position)] for position in stored.doc], np.int64)
    key = segment_key(
        documents.file_key[document],
        documents.position[document],
        documents.repeat[document],
        stored.start,
    )
    zeros = np.zeros(len(stored), np.int64)
    cuts = Cuts(
        document,
        stored.start,
        stored.tokens,
        stored.task,
        stored.bos,
        stored.eos,
        key,
        repeated=zeros,
        first_trained=zeros - 1,
        fill=zeros,
    )
    return segments_of_cuts(plan.tasks, documents, cuts)


class _Rebuilt(NamedTuple):
    """A stored segment, and the rebuilt segment to compare with it."""

    plan: Plan
    arrays: Arrays
    stored: Segments
    g: int  # index of the stored segment
    documents: Documents
    apart: Segments  # the segments that were cut again, each in a row of its own
    own: int  # index in `apart` of the segment to compare
    epoch: int

    def difference(self) -> str:
        """Return the first difference in words, or ""."""
        plan, arrays, stored, g, index = self.plan, self.arrays, self.stored, self.g, self.own
        task, length = plan.tasks[int(stored.task[g])], int(self.apart.slots[index])
        if int(stored.slots[g]) != length:
            return f"it has {int(stored.slots[g])} slots, but should have {length}"
        longest, weighting = int(self.apart.slots.max()), plan.recipe.documents.loss_weighting
        slots, built = render_shard(
            plan.tasks, self.documents, self.apart, longest, self.epoch, weighting
        )
        # A stratified level depends on the other segments of the stored row, so its noise is not
        # compared.
        is_stratified = task.parameters.get("stratified", False)
        compared = ["key", "tokens", "task", "prefix"]
        for name in compared if is_stratified else [*compared, "noise", "loss_weight"]:
            value, expected = getattr(stored, name)[g], getattr(built, name)[index]
            if value != expected:
                return f"segment_{name} is {value}, but should be {expected}"
        if difference := self._difference_of_ranges(built) or self._difference_of_media(built):
            return difference
        # Compare slot by slot. In a stratified task, only the labels do not depend on the rest of
        # the row.
        row, begin = int(stored.row[g]), int(stored.first_slot[g])
        for name in ("labels",) if is_stratified else ("tokens", "loss_mask", "labels"):
            if name not in slots or name not in arrays:
                continue
            values, expected = (
                arrays[name][row, begin : begin + length],
                slots[name][index, :length],
            )
            if len(differs := np.flatnonzero(values != expected)):
                i = int(differs[0])
                return (
                    f"{name} at slot {begin + i} of row {row} is {values[i]}, but should be"
                    f" {expected[i]}"
                )
        return self._difference_of_tokens()

    def _difference_of_tokens(self) -> str:
        """Return a message if `restore` finds other tokens than the document's, otherwise ""."""
        stored, apart, g, index = self.stored, self.apart, self.g, self.own
        # The header does not say exactly which tokens are copies. The rebuilt segment does.
        is_segment = np.arange(len(stored)) == g
        exact = stored.replace(
            repeated=np.where(is_segment, apart.repeated[index], stored.repeated),
            first_trained=np.where(is_segment, apart.first_trained[index], stored.first_trained),
        )
        restored, _, fits = restore(self.plan, self.arrays, exact, np.array([g]), self.epoch)
        if not fits[0]:
            return "its sentinels are not at the positions in the header"
        begin = int(self.documents.offsets[apart.document[index]] + apart.start[index])
        if not np.array_equal(
            restored, self.documents.ids[begin : begin + int(apart.tokens[index])]
        ):
            return "inverting the stored segment does not give the document's tokens"
        return ""

    def _difference_of_ranges(self, built: Segments) -> str:
        """Return a message if the trained ranges or their weights differ, otherwise ""."""
        stored, g = self.stored, self.g
        if built.trained is None or stored.trained is None:
            # A source without supervised documents gives no ranges.
            if built.trained is None and stored.first_trained[g] < 0:
                return ""
            are = "missing" if built.trained is not None else "not ranges of its document"
            return f"its trained ranges are {are}"
        of_segment = slice(*stored.trained.offsets[g : g + 2].tolist())
        of_built = slice(*built.trained.offsets[self.own : self.own + 2].tolist())
        ranges, expected = stored.trained.ranges[of_segment], built.trained.ranges[of_built]
        if not np.array_equal(ranges, expected):
            return f"its trained ranges are {ranges.tolist()}, but should be {expected.tolist()}"
        weights = _weights_of(stored.trained)[of_segment]
        expected = _weights_of(built.trained)[of_built]
        if not np.array_equal(weights, expected):
            return (
                f"the weights of its trained ranges are {weights.tolist()}, but should be"
                f" {expected.tolist()}"
            )
        return ""

    def _difference_of_media(self, built: Segments) -> str:
        """Return a message if the media spans differ, otherwise ""."""
        begin = int(self.stored.first_slot[self.g])
        spans, expected = (
            [] if media is None else media.of_segment(g, first_slot)
            for media, g, first_slot in (
                (self.stored.media, self.g, begin),
                (built.media, self.own, 0),
            )
        )
        difference = f"its media spans are {spans}, but should be {expected}"
        return "" if spans == expected else difference[:500]


def _weights_of(trained: TrainedRanges) -> np.ndarray:
    """Return the weight of each range, float32[k]."""
    if trained.weights is None:
        return np.ones(len(trained.ranges), np.float32)
    return trained.weights


class RestoredDocuments(NamedTuple):
    """The documents of a shard in order of source, file, position and pass.

    Each document is a token list `[bos]? content [eos]?`.
    """

    tokens: np.ndarray  # token ids in the dataset's dtype, one document after the other
    lengths: np.ndarray  # int64[d]: tokens of each document, including bos and eos
    source: np.ndarray  # int64[d], ascending
    bos: np.ndarray  # int64[d]: 1 if the document starts with bos, otherwise 0
    eos: np.ndarray  # int64[d]: 1 if the document ends with eos, otherwise 0
    segment: np.ndarray  # int64[d]: index of the document's first segment
    in_part: np.ndarray  # bool[d]: True if the source trains only a part of the document


def restored_documents(plan: Plan, arrays: Arrays, path: str) -> RestoredDocuments:
    """Return the documents of a shard's arrays.

    All segments of a document are in one shard, so a shard gives whole documents:

        rows of a shard      │ b₂ sentinel … │ a₁ … │ b₁ … │      segments in keyed order, corrupted
        restored and sorted    a₁  b₁  b₂                          content tokens
        documents              a₁ eos │ b₁ b₂ eos

    Segments are sorted by source, file, document, pass and start. If a segment does not start where
    the previous segment ends, it starts a separate document. Tokens that were not adjacent in the
    source are therefore never joined.

    Args:
        plan: The dataset's plan.
        arrays: A shard's arrays.
        path: The path of the shard, for messages.

    Raises:
        DatasetError: If a segment does not have the form of its task.
    """
    # Sort the segments, so that chunks of a document follow each other. Removed documents have no
    # tokens.
    segments = stored_segments(plan, arrays)
    order = np.lexsort(
        (segments.start, segments.repeat, segments.doc, segments.file, segments.source)
    )
    order = order[segments.has_tokens[order]]
    content, offsets, fits = restore(plan, arrays, segments, order)
    is_sound = fits & np.isin(segments.eos[order], (0, 1))
    if not is_sound.all():
        raise DatasetError(
            f"{path}: segment {int(order[np.argmin(is_sound)])} does not have the form of its"
            " task\n"
            "hint: find all damage with `packprep verify`"
        )
    ordered = segments.select(order)
    # A document starts with each segment that does not start where the previous segment ends.
    goes_on = ordered.start[1:] == ordered.start[:-1] + ordered.tokens[:-1]
    for column in (ordered.source, ordered.file, ordered.doc, ordered.repeat):
        goes_on &= column[1:] == column[:-1]
    begins = np.ones(len(order), np.bool_)
    begins[1:] = ~goes_on
    first_parts = np.flatnonzero(begins)
    last_parts = np.append(first_parts[1:], len(order)) - 1 if len(order) else first_parts
    bos, eos = ordered.bos[first_parts], ordered.eos[last_parts]
    lengths = offsets[last_parts + 1] - offsets[first_parts] + bos + eos
    tokens = _with_specials(plan, content, lengths, bos, eos)
    # `reduceat` does not accept empty arrays, so an empty shard keeps these empty flags.
    in_part = first_parts > 0
    if len(order):
        in_part = np.logical_or.reduceat(ordered.first_trained >= 0, first_parts)
    return RestoredDocuments(
        tokens, lengths, ordered.source[first_parts], bos, eos, order[first_parts], in_part
    )


class RestoredRecord(NamedTuple):
    """A record of a file, restored from the document that group_by joined it to."""

    source: str  # name of the source
    file: str  # name of the file
    position: int  # position of the record in the file
    document: int  # position of the document in the file
    repeat: int  # number of the pass
    tokens: np.ndarray  # the ids of the record's text
    text: str  # the text that these ids decode to


def restored_records(directory: str | os.PathLike) -> Iterator[RestoredRecord]:
    """Yield the records of a dataset whose sources have group_by, from its shards alone.

    The documents of a shard are in order of source, file, position and pass. The records of a
    document are in the order of `order_by`. A record that `documents.long` cut is left out.

    Args:
        directory: Folder of the dataset.

    Yields:
        Each record. The tokens between records are left out.

    Raises:
        DatasetError: If the dataset is damaged.
        PlanError: If plan.json is missing or invalid.

    Example:
        >>> for record in restored_records("out"):
        ...     print(record.file, record.position, record.text)
    """
    folder = Path(directory)
    plan, manifest = open_plan(LocalFolder(folder)), read_manifest(folder)
    decoded = RecordTexts(texts_of_dataset(folder, manifest), manifest["vocab_size"])
    for number in range(plan.shards):
        shard = shard_in(folder, manifest, number)
        arrays, documents = (
            shard.arrays,
            restored_documents(plan, shard.arrays, str(shard.path)),
        )
        begins, header = offsets_of(documents.lengths), header_columns(arrays)
        for d, g in enumerate(documents.segment.tolist()):
            source = plan.sources[int(header["source"][g])]
            file = source.files.names[int(header["file"][g]) - source.first_file]
            # Records count tokens without bos and eos.
            begin, end = begins[d] + documents.bos[d], begins[d + 1] - documents.eos[d]
            for position, ids, text in decoded.of(arrays, g, documents.tokens[begin:end]):
                doc, use = int(header["doc"][g]), int(header["repeat"][g])
                yield RestoredRecord(source.name, file, position, doc, use, ids, text)


class RecordTexts:
    """The texts of the records of a dataset's documents."""

    def __init__(self, texts: TokenTexts, vocab_size: int):
        self._texts, self._table = texts, ByteTable(texts, vocab_size)

    def of(
        self, arrays: Arrays, g: int, content: np.ndarray
    ) -> Iterator[tuple[int, np.ndarray, str]]:
        """Yield (position, ids, text) for each complete record of a document.

        Nothing is yielded if the document was not joined from records.

        Args:
            arrays: The arrays of a shard.
            g: Index of the document's first segment in the shard.
            content: The restored tokens of the document, without bos and eos.
        """
        records = records_of(arrays)
        if records is None:
            return
        for record in records.of(g).listed():
            begin, end = record["tokens"]
            if end <= len(content):
                ids = content[begin:end]
                text = self._table.decode(ids)[0].tobytes().decode(errors="replace")
                yield record["position"], ids, self._texts.without_added_space(text)


def _with_specials(
    plan: Plan, content: np.ndarray, lengths: np.ndarray, bos: np.ndarray, eos: np.ndarray
) -> np.ndarray:
    """Return the content of documents with their bos and eos tokens inserted.

    Args:
        plan: The dataset's plan.
        content: The content tokens of all documents.
        lengths: int64[d]: number of tokens of each document, including bos and eos.
        bos: int64[d]: 1 for documents that start with bos, otherwise 0.
        eos: int64[d]: 1 for documents that end with eos, otherwise 0.
    """
    if not bos.any() and not eos.any():
        return content
    ends = np.cumsum(lengths)
    tokens = np.empty(int(ends[-1]), content.dtype)
    is_content = np.ones(len(tokens), np.bool_)
    for role, indices in (("bos", (ends - lengths)[bos == 1]), ("eos", (ends - 1)[eos == 1])):
        if len(indices):
            tokens[indices] = plan.vocabulary.roles[role]
            is_content[indices] = False
    tokens[is_content] = content
    return tokens
