"""Segments → documents: read and cut again from their source and compared with what is stored, or whole from the arrays."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from packprep.building.plan import Plan
from packprep.building.render import render
from packprep.building.segments import SegmentTable, cut, table_of
from packprep.documents.reading import Documents, read_documents
from packprep.errors import DatasetError, SourceError
from packprep.randomness import segment_key
from packprep.restoring.segments import restore, stored_segments
from packprep.sources.formats import FORMATS, PIECE_BYTES, position_of
from packprep.sources.slices import PlannedSource


def documents_at(plan: Plan, source: PlannedSource, file: int, use: int, positions: np.ndarray) -> Documents:
    """The token documents at some positions of one file of the plan. SourceError if one is not there any more."""
    i = file - source.first_file
    wanted = np.unique(positions)
    pieces = np.array(source.pieces.of_file(i), np.int64)
    if position_of(*source.formats[i]) == "byte":
        pieces = pieces[np.isin(np.arange(len(pieces)), wanted // PIECE_BYTES)]
    elif (format := FORMATS[source.formats[i][0]]).indexed and source.store is None:
        pieces = pieces[format.module.pieces_at(source.path(i), int(source.files.sizes[i]), wanted)]
    found = read_documents(
        plan.recipe,
        plan.sources,
        ((source, part) for piece in pieces for part in source.slices_of(int(piece), use)),
        plan.engine if plan.has_text else None,
        plan.vocabulary,
        plan.token_dtype,
        template=plan.stored["chat_template"],
        only={file: wanted},
    )
    missing = np.setdiff1d(wanted, found.position)
    if len(missing):
        raise SourceError(
            f"source {source.name!r}: {source.files[i].name} has no usable document at {missing[0]} any more: "
            "the file changed since the build"
        )
    return found


def replay_segments(plan: Plan, arrays: Mapping[str, np.ndarray], chosen: np.ndarray, epoch: int = 0) -> list[str]:
    """For each chosen segment of a shard (int64[k]): "" if building it again from its source gives what is stored, and
    inverting what is stored gives the document's tokens; else what differs. epoch: whose chance `arrays` have.

    SourceError where a source file is missing, or has no such document any more.
    """
    chosen = np.asarray(chosen, np.int64)
    stored = stored_segments(plan, arrays)
    differing = [""] * len(chosen)
    names = ("source", "file", "repeat")
    files = np.stack([arrays[f"segment_{name}"][chosen].astype(np.int64) for name in names])
    for s, file, use in np.unique(files, axis=1).T:
        of_file = np.flatnonzero((files == np.array([[s], [file], [use]])).all(axis=0))
        documents = documents_at(plan, plan.sources[s], int(file), int(use), arrays["segment_doc"][chosen[of_file]])
        segments = _cut_again(plan, arrays, documents, chosen[of_file], stored)
        index_of = {
            (int(documents.position[d]), int(start)): i
            for i, (d, start) in enumerate(zip(segments.document, segments.start, strict=True))
        }
        for k in of_file:
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
    plan: Plan, arrays: Mapping[str, np.ndarray], documents: Documents, chosen: np.ndarray, stored: SegmentTable
) -> SegmentTable:
    """The documents' segments; under `concat`, where packing decides the cuts, the chosen ones as they are stored."""
    if plan.recipe.packing.algorithm != "concat":
        return cut(plan.recipe, plan.tasks, documents, plan.cut_limits)[0]
    by_position = {int(position): d for d, position in enumerate(documents.position)}
    document = np.array([by_position[int(p)] for p in arrays["segment_doc"][chosen]], np.int64)
    start = arrays["segment_start"][chosen]
    key = segment_key(documents.file_key[document], documents.position[document], documents.repeat[document], start)
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
    if difference := _difference_of_ranges(arrays, stored, g, made):
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
            return f"{name} at slot {begin + at} of row {row} is {found[at]} and should be {made[name][0][at]}"
    is_segment = np.arange(len(stored.n)) == g
    first_trained = one.first_trained[0] if one.first_trained[0] >= 0 else stored.first_trained
    exact = stored._replace(
        copy=np.where(is_segment, one.copy[0], stored.copy),
        first_trained=np.where(is_segment, first_trained, stored.first_trained),
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
    """What differs between the trained ranges of stored segment g and those made again, in words."""
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
            return f"the weights of its trained ranges are {found.tolist()} and should be {again.tolist()}"
    elif "trained_offsets" in made or stored.first_trained[g] >= 0:  # its source gives no document ranges
        return f"its trained ranges are {'missing' if 'trained_offsets' in made else 'none of its document'}"
    return ""


class RestoredDocuments(NamedTuple):
    """The documents of a shard in order of source, file, position and use, as token lists `[bos]? content [eos]?`."""

    tokens: np.ndarray  # of the dataset's dtype: one document after the other
    lengths: np.ndarray  # int64[d]: tokens of each, bos and eos among them
    source: np.ndarray  # int64[d], ascends


def restored_documents(plan: Plan, arrays: Mapping[str, np.ndarray], path: str) -> RestoredDocuments:
    """The documents of a shard's arrays. DatasetError, naming `path`, where they do not have their tasks' form.

    A document's segments lie in one shard, so a shard gives whole documents:

        rows of a shard      │ b₂ sentinel … │ a₁ … │ b₁ … │      segments in keyed order, corrupted
        inverted and sorted    a₁  b₁  b₂                          content tokens, by source, file, document, use and start
        documents              a₁ eos │ b₁ b₂ eos

    A segment that does not begin where the one before it ended begins a document of its own, so that no two tokens meet that
    did not stand together.
    """
    stored = stored_segments(plan, arrays)
    source, file, document, use, start = (
        arrays[f"segment_{name}"].astype(np.int64) for name in ("source", "file", "doc", "repeat", "start")
    )
    order = np.lexsort((start, use, document, file, source))
    content, offsets, fits = restore(plan, arrays, stored, order)
    eos = stored.eos[order]
    if not fits.all() or not np.isin(eos, (0, 1)).all():
        wrong = int(order[np.argmin(fits & np.isin(eos, (0, 1)))])
        raise DatasetError(f"{path}: segment {wrong} has not the form of its task; `packprep verify` says where else")
    bos, n = stored.bos[order], np.diff(offsets)
    begins = np.ones(len(order), np.bool_)
    continues = start[order][1:] == start[order][:-1] + n[:-1]
    for column in (source, file, document, use):
        continues &= column[order][1:] == column[order][:-1]
    begins[1:] = ~continues
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(order)) - 1 if len(order) else first
    starts, ends = bos[first], eos[last]
    lengths = offsets[last + 1] - offsets[first] + starts + ends if len(order) else np.zeros(0, np.int64)
    tokens = _with_specials(plan, content, lengths, starts, ends)
    return RestoredDocuments(tokens, lengths, source[order][first])


def _with_specials(
    plan: Plan, content: np.ndarray, lengths: np.ndarray, bos: np.ndarray, eos: np.ndarray
) -> np.ndarray:
    """The content of documents with bos before and eos behind each that has it. lengths: with them; bos, eos: 0 or 1."""
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
