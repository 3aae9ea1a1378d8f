"""The reading direction, which nothing that builds needs: arrays of a shard → segments → tokens and
slots → documents.

```
stored     ‹NLG› t ‹0› ias ‹1› ‹0› hod ‹1› ericAl ‹eos›
restored   t hod ias ericAl                            bos, mode, sentinels and eos are no tokens of the document
```
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from packprep.building.plan import Plan
from packprep.building.removal import last_pieces, removed_segments
from packprep.building.render import render
from packprep.building.segments import SegmentTable, cut, table_of
from packprep.dataset.boundaries import boundaries
from packprep.dataset.shard import Shard
from packprep.documents.reading import Documents, read_documents
from packprep.errors import DatasetError, SourceError
from packprep.objectives.objective import Bodies, BodySlots, Task
from packprep.randomness import segment_key
from packprep.sources.formats import FORMATS, PIECE_BYTES, position_of
from packprep.sources.slices import PlannedSource


def segment_slots(arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, first physical slot in it, slots without padding), int64[segments] each, of a shard
    whose cu_seqlens is sound."""
    real = arrays["cu_seqlens"].astype(np.int64)
    physical = arrays.get("cu_seqlens_padded", arrays["cu_seqlens"]).astype(np.int64)
    return boundaries(np.diff(arrays["row_offsets"]), real, physical)


def stored_segments(plan: Plan, arrays: Mapping[str, np.ndarray]) -> SegmentTable:
    """The segments of a shard as its arrays say, in row order, without documents: bos begins a
    document, eos is what the length law leaves over, neither 0 nor 1 where the law does not hold.

    A later piece of a supervised document may repeat a system message; there the last token says
    whether there is an eos, of a removed one whether it is the last. With eos after each segment,
    there always is one.
    """
    row, begin, slots = segment_slots(arrays)
    bos = ((arrays["segment_start"] == 0) & plan.recipe.documents.prepend_bos).astype(np.int64)
    n, key = arrays["segment_tokens"].astype(np.int64), arrays["segment_key"]
    everywhere = np.full(len(row), -1, np.int64)  # no length depends on where training begins
    extra = np.zeros(len(row), np.int64)
    for t, task in enumerate(plan.tasks):
        of_task = np.flatnonzero(arrays["segment_task"] == t)
        if len(of_task):
            law = task.slots(
                Bodies(n[of_task], key[of_task], everywhere[of_task]),
                bos[of_task],
                np.zeros(len(of_task), np.int64),
            )
            over = slots[of_task] - law
            extra[of_task] = np.where(
                over % task.objective.copies, -1, over // task.objective.copies
            )
    eos, copy = extra.copy(), np.zeros(len(row), np.int64)
    if "trained_offsets" in arrays and len(row):
        later = (arrays["segment_start"] > 0) & (extra > 0)
        last, removed = (
            arrays["tokens"][row, begin + slots - 1].astype(np.int64),
            removed_segments(arrays),
        )
        # those of the next slot end with pad, and x_0 is clean: there the token itself says it
        if "labels" in arrays:
            noised = [task.in_place and task.objective.copies == 1 for task in plan.tasks]
            last = np.where(
                np.array(noised)[arrays["segment_task"]],
                arrays["labels"][row, begin + slots - 1],
                last,
            )
        ends = last == plan.vocabulary.roles.get("eos", -1)
        ends[removed] = last_pieces(arrays, removed)
        documents = plan.recipe.documents
        ends = (ends & documents.eos_after_document) | documents.eos_after_segment
        eos = np.where(later, ends, extra)
        copy = np.where(later, extra - eos, 0)
    return SegmentTable(
        document=everywhere,
        start=arrays["segment_start"],
        n=n,
        task=arrays["segment_task"].astype(np.int64),
        bos=bos,
        eos=eos,
        key=key,
        copy=copy,
        first_trained=_first_trained(plan, arrays, slots, bos, eos),
        slots=slots,
        row=row,
        first_slot=begin,
    )


def _first_trained(
    plan: Plan,
    arrays: Mapping[str, np.ndarray],
    slots: np.ndarray,
    bos: np.ndarray,
    eos: np.ndarray,
) -> np.ndarray:
    """int64[segments]: the first body slot of the trained ranges; −1 where all of the body may be
    trained, be it by ranges that touch, of unequal weight. Ranges of a supervised segment with a
    prefix never hold all of it: no pivot is drawn for it.
    """
    first = np.full(len(slots), -1, np.int64)
    if "trained_offsets" not in arrays:
        return first
    offsets, ranges = arrays["trained_offsets"], arrays["trained_ranges"].astype(np.int64)
    mode = plan.by_task.mode[arrays["segment_task"]]
    copies = plan.by_task.copies[arrays["segment_task"]]
    with_ranges = np.flatnonzero(np.diff(offsets) > 0)
    begin, end = ranges[offsets[with_ranges], 0], ranges[offsets[with_ranges + 1] - 1, 1]
    segment = np.repeat(np.arange(len(slots)), np.diff(offsets))
    apart = (segment[1:] == segment[:-1]) & (ranges[1:, 0] > ranges[:-1, 1])
    gaps = np.bincount(segment[1:][apart], minlength=len(slots))
    body, half = (bos + mode)[with_ranges], (slots // copies)[with_ranges]
    whole = (gaps[with_ranges] == 0) & (begin <= body) & (end >= half - (eos[with_ranges] > 0))
    first[with_ranges] = np.where(whole, -1, begin - body)
    return first


class RestoredTokens(NamedTuple):
    """The content tokens of some segments, without what their objectives put in between."""

    ids: np.ndarray  # of the dataset's dtype: one segment after the other
    offsets: np.ndarray  # int64[k + 1]
    # bool[k]: whether what stands between the tokens (sentinels, …) is what the header says
    fits: np.ndarray


def restore(
    plan: Plan,
    arrays: Mapping[str, np.ndarray],
    stored: SegmentTable,
    chosen: np.ndarray,
    epoch: int = 0,
) -> RestoredTokens:
    """The tokens that the chosen segments were made of, by their objectives' inverses; labels of
    in-place kinds, x_0 of block diffusion. Of removed segments pad ids, as many.

    chosen: int64[k], indices of segments of a shard whose lengths obey the law. epoch: that of the
    arrays.
    """
    return _restore(plan.tasks, arrays, stored, chosen, epoch)


def _restore(
    tasks: Sequence[Task],
    arrays: Mapping[str, np.ndarray],
    stored: SegmentTable,
    chosen: np.ndarray,
    epoch: int,
) -> RestoredTokens:
    n, copy = arrays["segment_tokens"][chosen].astype(np.int64), stored.copy[chosen]
    ends = np.cumsum(n + copy)
    begins = ends - n - copy
    out = np.empty(int(ends[-1]) if len(ends) else 0, arrays["tokens"].dtype)
    fits = np.ones(len(chosen), np.bool_)
    length = arrays["tokens"].shape[1]
    removed = removed_segments(arrays)[chosen]
    if removed.any():
        out[np.repeat(removed, n + copy)] = tasks[0].ids.pad
    for t, task in enumerate(tasks):
        of_task = np.flatnonzero((arrays["segment_task"][chosen] == t) & ~removed)
        if not len(of_task):
            continue
        which = chosen[of_task]
        body = stored.row[which] * length + stored.first_slot[which] + stored.bos[which] + task.mode
        columns = BodySlots(begins[of_task], stored.of(which).bodies(epoch), body)
        # labels of in-place kinds are the tokens in their places, as causal's slots are
        objective = tasks[-1].objective if task.in_place else task.objective
        twice = task.objective.copies > 1  # the second is clean, and labels may be of the next slot
        rows = arrays["labels" if task.in_place and not twice else "tokens"].reshape(-1)
        if twice:
            columns = columns._replace(at=body + stored.slots[which] // task.objective.copies)
        assert objective.restore is not None
        fits[of_task] = objective.restore(task, columns, rows, out)
    if copy.any():
        is_content = np.ones(len(out), np.bool_)
        for i in np.flatnonzero(copy):
            is_content[begins[i] : begins[i] + copy[i]] = False
        out = out[is_content]
    return RestoredTokens(out, np.concatenate((np.zeros(1, np.int64), np.cumsum(n))), fits)


FITTING_TOKENS = 1 << 18
"""Tokens that are inverted at a time: they stay in the processor's cache."""


def fitting(
    plan: Plan, arrays: Mapping[str, np.ndarray], stored: SegmentTable, epoch: int = 0
) -> np.ndarray:
    """bool[segments]: whether what stands between a segment's tokens is what its header says:
    `fits` of `restore`, in less memory."""
    fits = np.ones(len(stored.row), np.bool_)
    length = arrays["tokens"].shape[1]
    slots, scratch = arrays["tokens"].reshape(-1), np.empty(0, arrays["tokens"].dtype)
    for t, task in enumerate(plan.tasks):
        if task.in_place or task.objective is plan.tasks[-1].objective:
            continue  # nothing stands between the tokens
        of_task = np.flatnonzero((arrays["segment_task"] == t) & ~removed_segments(arrays))
        ends = np.cumsum(stored.n[of_task] + stored.copy[of_task])
        if not len(of_task):
            continue
        bounds = np.unique(
            np.append(
                np.searchsorted(ends, np.arange(0, int(ends[-1]), FITTING_TOKENS)), len(of_task)
            )
        )
        for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            which = of_task[begin:end]
            bodies = stored.of(which).bodies(epoch)
            first = ends[begin:end] - bodies.n
            first -= first[0]
            size = int(first[-1] + bodies.n[-1])
            if len(scratch) < size:
                scratch = np.empty(size, scratch.dtype)
            body = (
                stored.row[which] * length
                + stored.first_slot[which]
                + stored.bos[which]
                + task.mode
            )
            assert task.objective.restore is not None
            fits[which] = task.objective.restore(
                task, BodySlots(first, bodies, body), slots, scratch
            )
    return fits


def sound_segments(plan: Plan, shard: Shard) -> SegmentTable:
    """The segments of a shard whose boundaries are sound, as `stored_segments` gives them;
    DatasetError where one cannot be
    inverted: an inverse reads by the length law, so that must hold of every segment."""
    arrays = shard.arrays
    n = arrays["segment_tokens"].astype(np.int64)
    if len(n) and (n.min() < 1 or n.max() > shard.seq_length):
        raise _damaged(
            shard, int(np.argmax((n < 1) | (n > shard.seq_length))), "segment_tokens cannot be"
        )
    if "trained_offsets" in arrays:
        offsets, ranges = arrays["trained_offsets"], arrays["trained_ranges"]
        if offsets[0] != 0 or (np.diff(offsets) < 0).any() or offsets[-1] != len(ranges):
            raise _damaged(
                shard,
                int(np.argmax(np.diff(offsets) < 0)),
                "trained_offsets does not ascend to the ranges",
            )
    stored = stored_segments(plan, arrays)
    holds = (stored.eos >= 0) & (stored.eos <= 1) & (stored.copy >= 0)
    for t, task in enumerate(plan.tasks):
        of_task = np.flatnonzero((arrays["segment_task"] == t) & holds)
        if len(of_task):
            table = stored.of(of_task)
            holds[of_task] = task.slots(table.bodies(), table.bos, table.eos) == table.slots
    if not holds.all():
        raise _damaged(
            shard, int(np.argmin(holds)), "its slots are not those of its task's length law"
        )
    return stored


def _damaged(shard: Shard, segment: int, what: str) -> DatasetError:
    return DatasetError(
        f"{shard.path}: segment {segment}: {what}, so it cannot be inverted; the file is damaged: "
        "`packprep verify` says where else"
    )


def slots_of_tokens(
    plan: Plan,
    arrays: Mapping[str, np.ndarray],
    stored: SegmentTable,
    chosen: np.ndarray,
    ids: np.ndarray,
    epoch: int = 0,
) -> np.ndarray:
    """int64[n]: the slot of its row at which each original token stands; in block diffusion its
    slot in x_t.

    chosen: int64[k], segments; ids: [n], their tokens as `restore` gives them; epoch: that of the
    arrays. −1 where the slot is not known: an objective from elsewhere may read values. The inverse
    itself says it: it is given rows whose slots hold their own numbers, counted from beyond the
    vocabulary, in which the role tokens stay that fill_in_the_middle looks for; of a number it is
    told whether its token begins inside a character.
    """
    if not len(chosen):
        return np.zeros(0, np.int64)
    length, vocab_size = arrays["tokens"].shape[1], plan.vocabulary.vocab_size
    first_row, end_row = int(stored.row[chosen].min()), int(stored.row[chosen].max()) + 1
    labels, tokens = (
        arrays[name][first_row:end_row]
        for name in ("labels" if "labels" in arrays else "tokens", "tokens")
    )
    numbers = (np.arange(tokens.size, dtype=np.int32) + vocab_size).reshape(tokens.shape)
    roles = np.isin(tokens, np.unique([task.ids.fim for task in plan.tasks]))
    among_roles = np.where(roles, tokens.astype(np.int32), numbers)
    tasks = [_of_numbers(task, tokens) for task in plan.tasks]
    shifted = stored._replace(row=stored.row - first_row)
    found = _restore(
        tasks, {**arrays, "tokens": among_roles, "labels": numbers}, shifted, chosen, epoch
    ).ids
    segment = np.repeat(chosen, arrays["segment_tokens"][chosen])  # the segment of each token
    begin = shifted.row[segment] * length + stored.first_slot[segment]
    copies = plan.by_task.copies[arrays["segment_task"][segment]]
    half = np.where(copies > 1, stored.slots[segment] // copies, 0)
    end = begin + stored.slots[segment]
    in_place = plan.by_task.in_place[arrays["segment_task"][segment]]

    flat = found.astype(np.int64) - vocab_size - half

    def holds(at: np.ndarray, which: np.ndarray) -> np.ndarray:
        """bool: whether slots `at` are of the segment and have the ids of tokens `which`."""
        inside = (at >= begin[which]) & (at < end[which])
        at = np.where(inside, at, 0)
        at_clean = np.where(inside, at + half[which], 0)
        values = np.where(
            in_place[which] & (copies[which] == 1),
            labels.reshape(-1)[at],
            tokens.reshape(-1)[at_clean],
        )
        return inside & (values == ids[which])

    flat[~holds(flat, np.arange(len(flat)))] = -1
    unknown = np.flatnonzero(flat < 0)
    # a role token of the text stands beside its neighbours
    for step, order in ((1, unknown), (-1, unknown[::-1])):
        for i in order[(order >= step) & (order < len(flat) + min(step, 0))].tolist():
            if flat[i] < 0 and flat[i - step] >= 0 and segment[i] == segment[i - step]:
                beside = flat[i - step : i - step + 1] + step
                if holds(beside, np.array([i]))[0]:
                    flat[i] = beside[0]
    return np.where(flat < 0, -1, flat - shifted.row[segment] * length)


def _of_numbers(task: Task, tokens: np.ndarray) -> Task:
    """The task, to which the ids from vocab_size on stand for these tokens."""
    continues = task.ids.continues
    if not len(continues):
        return task
    of_tokens = continues.take(tokens.reshape(-1), mode="clip")
    return replace(task, ids=replace(task.ids, continues=np.concatenate((continues, of_tokens))))


# Segments → documents


def documents_at(
    plan: Plan, source: PlannedSource, file: int, use: int, positions: np.ndarray
) -> Documents:
    """The token documents at some positions of one file of the plan. SourceError if one is not
    there any more."""
    i = file - source.first_file
    wanted = np.unique(positions)
    pieces = np.array(source.pieces.of_file(i), np.int64)
    if position_of(*source.formats[i]) == "byte":
        pieces = pieces[np.isin(np.arange(len(pieces)), wanted // PIECE_BYTES)]
    elif (format := FORMATS[source.formats[i][0]]).indexed and not source.in_store:
        pieces = pieces[format.module.pieces_at(source.path(i), int(source.files.sizes[i]), wanted)]
    found = read_documents(
        plan.recipe,
        plan.sources,
        ((source, part) for piece in pieces for part in source.slices_of(int(piece), use)),
        plan.text_engine,
        plan.vocabulary,
        plan.token_dtype,
        template=plan.stored["chat_template"],
        only={file: wanted},
        marks=plan.marks,
    )
    missing = np.setdiff1d(wanted, found.position)
    if len(missing):
        raise SourceError(
            f"source {source.name!r}: {source.files[i].name} has no usable document at {missing[0]}"
            " any more: the file changed since the build"
        )
    return found


def replay_segments(
    plan: Plan, arrays: Mapping[str, np.ndarray], chosen: np.ndarray, epoch: int = 0
) -> list[str]:
    """For each chosen segment of a shard (int64[k]): "" if building it again from its source gives
    what is stored, and inverting what is stored gives the document's tokens; else what differs. Of
    a removed segment there is nothing to build.
    epoch: whose chance `arrays` have.

    SourceError where a source file is missing, or has no such document any more.
    """
    chosen = np.asarray(chosen, np.int64)
    stored = stored_segments(plan, arrays)
    differing, removed = [""] * len(chosen), removed_segments(arrays)[chosen]
    names = ("source", "file", "repeat")
    files = np.stack([arrays[f"segment_{name}"][chosen].astype(np.int64) for name in names])
    for s, file, use in np.unique(files, axis=1).T:
        of_file = np.flatnonzero((files == np.array([[s], [file], [use]])).all(axis=0))
        documents = documents_at(
            plan, plan.sources[s], int(file), int(use), arrays["segment_doc"][chosen[of_file]]
        )
        segments = _cut_again(plan, arrays, documents, chosen[of_file], stored)
        index_of = {
            (int(documents.position[d]), int(start)): i
            for i, (d, start) in enumerate(zip(segments.document, segments.start, strict=True))
        }
        for k in of_file[~removed[of_file]]:
            g = int(chosen[k])
            i = index_of.get((int(arrays["segment_doc"][g]), int(arrays["segment_start"][g])))
            if i is None:
                differing[k] = f"its document is not cut at token {int(arrays['segment_start'][g])}"
                continue
            alone = np.zeros(1, np.int64)
            one = segments.of(np.array([i]))._replace(row=alone, first_slot=alone)
            differing[k] = _difference(plan, arrays, stored, g, documents, one, epoch)
    return differing


def _cut_again(
    plan: Plan,
    arrays: Mapping[str, np.ndarray],
    documents: Documents,
    chosen: np.ndarray,
    stored: SegmentTable,
) -> SegmentTable:
    """The documents' segments; under `concat`, where packing decides the cuts, the chosen ones as
    they are stored."""
    if plan.recipe.packing.algorithm != "concat":
        return cut(plan.recipe, plan.tasks, documents, plan.cut_limits)[0]
    by_position = {int(position): d for d, position in enumerate(documents.position)}
    document = np.array([by_position[int(p)] for p in arrays["segment_doc"][chosen]], np.int64)
    start = arrays["segment_start"][chosen]
    key = segment_key(
        documents.file_key[document],
        documents.position[document],
        documents.repeat[document],
        start,
    )
    n, task = (arrays[f"segment_{name}"][chosen].astype(np.int64) for name in ("tokens", "task"))
    none = np.zeros(len(chosen), np.int64)
    columns = document, start, n, task, stored.bos[chosen], stored.eos[chosen], key, none, none - 1
    return table_of(plan.tasks, columns)


def _difference(
    plan: Plan,
    arrays: Mapping[str, np.ndarray],
    stored: SegmentTable,
    g: int,
    documents: Documents,
    one: SegmentTable,
    epoch: int,
) -> str:
    """What differs between stored segment g and the same one made again, in words."""
    stratified = plan.tasks[int(arrays["segment_task"][g])].parameters.get("stratified", False)
    length = int(one.slots[0])
    if int(stored.slots[g]) != length:
        return f"it takes {int(stored.slots[g])} slots and should take {length}"
    made = render(plan.tasks, documents, one, length, 1, epoch)
    for name in ("key", "tokens", "task", "prefix", "noise", "loss_weight"):
        found, again = arrays[f"segment_{name}"][g], made[f"segment_{name}"][0]
        if found != again and not (stratified and name in ("noise", "loss_weight")):
            return f"segment_{name} is {found} and should be {again}"
    if difference := _difference_of_ranges(arrays, stored, g, made) or _difference_of_media(
        arrays, stored, g, made
    ):
        return difference
    row, begin = int(stored.row[g]), int(stored.first_slot[g])
    changing = ("labels",) if stratified else ("tokens", "loss_mask", "labels")
    for name in changing:
        if name not in made or name not in arrays:
            continue
        found = arrays[name][row, begin : begin + length]
        wrong = np.flatnonzero(found != made[name][0])
        if len(wrong):
            at = int(wrong[0])
            return (
                f"{name} at slot {begin + at} of row {row} is {found[at]} and should be"
                f" {made[name][0][at]}"
            )
    is_segment = np.arange(len(stored.n)) == g
    exact = stored._replace(
        copy=np.where(is_segment, one.copy[0], stored.copy),
        first_trained=np.where(is_segment, one.first_trained[0], stored.first_trained),
    )
    restored, _, fits = restore(plan, arrays, exact, np.array([g]), epoch)
    if not fits[0]:
        return "its sentinels are not where the header says"
    first = int(documents.offsets[one.document[0]] + one.start[0])
    if not np.array_equal(restored, documents.ids[first : first + int(one.n[0])]):
        return "what is stored does not give back the document's tokens"
    return ""


def _difference_of_ranges(
    arrays: Mapping[str, np.ndarray], stored: SegmentTable, g: int, made: Mapping[str, np.ndarray]
) -> str:
    """What differs between the trained ranges of stored segment g and those made again, in
    words."""
    if "trained_offsets" in made and "trained_offsets" in arrays:
        first, last = arrays["trained_offsets"][g : g + 2]
        found, again = arrays["trained_ranges"][first:last], made["trained_ranges"]
        if not np.array_equal(found, again):
            return f"its trained ranges are {found.tolist()} and should be {again.tolist()}"
        found, again = (
            own.get("trained_weights", np.ones(len(own["trained_ranges"]), np.float32))[part]
            for own, part in ((arrays, slice(first, last)), (made, slice(None)))
        )
        if not np.array_equal(found, again):
            return (
                f"the weights of its trained ranges are {found.tolist()} and should be"
                f" {again.tolist()}"
            )
    # its source gives no document ranges
    elif "trained_offsets" in made or stored.first_trained[g] >= 0:
        return (
            "its trained ranges are"
            f" {'missing' if 'trained_offsets' in made else 'none of its document'}"
        )
    return ""


def _difference_of_media(
    arrays: Mapping[str, np.ndarray], stored: SegmentTable, g: int, made: Mapping[str, np.ndarray]
) -> str:
    """What differs between the places of media of stored segment g and those made again, in
    words."""
    found, again = (
        _places_of(own, i, at)
        for own, i, at in ((arrays, g, int(stored.first_slot[g])), (made, 0, 0))
    )
    return "" if found == again else f"its places of media are {found} and should be {again}"[:500]


def _places_of(
    arrays: Mapping[str, np.ndarray], segment: int, begin: int
) -> list[tuple[int, int, int, str]]:
    """(slot from `begin` on, slots, kind, ref) of the places of media of a segment."""
    if "media_offsets" not in arrays:
        return []
    found = []
    for i in range(*arrays["media_offsets"][segment : segment + 2].tolist()):
        ref = arrays["media_ref"][slice(*arrays["media_ref_offsets"][i : i + 2].tolist())].tobytes()
        slot, tokens, kind = (
            int(arrays[f"media_{name}"][i]) for name in ("slot", "tokens", "kind")
        )
        found.append((slot - begin, tokens, kind, ref.decode(errors="replace")))
    return found


class RestoredDocuments(NamedTuple):
    """The documents of a shard in order of source, file, position and use, as token lists `[bos]?
    content [eos]?`."""

    tokens: np.ndarray  # of the dataset's dtype: one document after the other
    lengths: np.ndarray  # int64[d]: tokens of each, bos and eos among them
    source: np.ndarray  # int64[d], ascends
    bos: np.ndarray  # int64[d], 0 or 1: whether it begins with bos
    eos: np.ndarray  # int64[d], 0 or 1: whether it ends with eos
    segment: np.ndarray  # int64[d]: the segment of the arrays in which it begins
    in_part: np.ndarray  # bool[d]: whether its source says that only a part of it is trained


def restored_documents(
    plan: Plan, arrays: Mapping[str, np.ndarray], path: str
) -> RestoredDocuments:
    """The documents of a shard's arrays. DatasetError, naming `path`, where they do not have their
    tasks' form.

    A document's segments lie in one shard, so a shard gives whole documents:

        rows of a shard      │ b₂ sentinel … │ a₁ … │ b₁ … │      segments in keyed order, corrupted
        inverted and sorted    a₁  b₁  b₂                          content tokens, by source, file, document, use and start
        documents              a₁ eos │ b₁ b₂ eos

    A segment that does not begin where the one before it ended begins a document of its own, so
    that no two tokens meet that did not stand together.
    """
    stored = stored_segments(plan, arrays)
    source, file, document, use, start = (
        arrays[f"segment_{name}"].astype(np.int64)
        for name in ("source", "file", "doc", "repeat", "start")
    )
    order = np.lexsort((start, use, document, file, source))
    order = order[~removed_segments(arrays)[order]]
    content, offsets, fits = restore(plan, arrays, stored, order)
    eos = stored.eos[order]
    if not fits.all() or not np.isin(eos, (0, 1)).all():
        wrong = int(order[np.argmin(fits & np.isin(eos, (0, 1)))])
        raise DatasetError(
            f"{path}: segment {wrong} has not the form of its task; `packprep verify` says where"
            " else"
        )
    bos, n = stored.bos[order], np.diff(offsets)
    begins = np.ones(len(order), np.bool_)
    continues = start[order][1:] == start[order][:-1] + n[:-1]
    for column in (source, file, document, use):
        continues &= column[order][1:] == column[order][:-1]
    begins[1:] = ~continues
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(order)) - 1 if len(order) else first
    starts, ends = bos[first], eos[last]
    lengths = (
        offsets[last + 1] - offsets[first] + starts + ends if len(order) else np.zeros(0, np.int64)
    )
    tokens = _with_specials(plan, content, lengths, starts, ends)
    limited = (
        np.logical_or.reduceat(stored.first_trained[order] >= 0, first) if len(order) else first > 0
    )
    return RestoredDocuments(
        tokens, lengths, source[order][first], starts, ends, order[first], limited
    )


def _with_specials(
    plan: Plan, content: np.ndarray, lengths: np.ndarray, bos: np.ndarray, eos: np.ndarray
) -> np.ndarray:
    """The content of documents with bos before and eos behind each that has it. lengths: with them;
    bos, eos: 0 or 1."""
    if not bos.any() and not eos.any():
        return content
    ends = np.cumsum(lengths)
    tokens = np.empty(int(ends[-1]), content.dtype)
    is_content = np.ones(len(tokens), np.bool_)
    for role, at in (("bos", (ends - lengths)[bos == 1]), ("eos", (ends - 1)[eos == 1])):
        if len(at):
            tokens[at] = plan.vocabulary.roles[role]
            is_content[at] = False
    tokens[is_content] = content
    return tokens
