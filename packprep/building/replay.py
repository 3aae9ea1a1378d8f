"""Replay: build segments again from their source text and compare them with what is stored, and invert what is stored."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from packprep.building.job import Job
from packprep.building.render import Layout, render
from packprep.building.segments import SegmentTable, cut, slots_of
from packprep.corpus.planning import Extent, PlannedSource
from packprep.corpus.readers import PIECE_BYTES
from packprep.corpus.readers.megatron import runs_of
from packprep.corpus.reading import Documents, read_documents
from packprep.errors import SourceError
from packprep.objectives.objective import Bodies, BodySlots
from packprep.randomness import segment_key, text_key


class Stored(NamedTuple):
    """Where a shard's segments lie and what their lengths imply, one array a column, [segments] each."""

    row: np.ndarray  # int64
    begin: np.ndarray  # int64: first physical slot in the row
    slots: np.ndarray  # int64: real length
    bos: np.ndarray  # int64
    eos: np.ndarray  # int64: what is left of the length law; neither 0 nor 1 where the law does not hold
    copy: np.ndarray  # int64: body tokens before the content, in shards with trained ranges
    bodies: Bodies


def segment_slots(arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, first physical slot in it, real length), int64[segments] each, of a shard whose cu_seqlens is sound."""
    offsets = arrays["row_offsets"]
    row = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    real = arrays["cu_seqlens"].astype(np.int64)
    physical = arrays.get("cu_seqlens_padded", arrays["cu_seqlens"]).astype(np.int64)
    at = np.arange(len(row)) + row
    return row, physical[at], real[at + 1] - real[at]


def stored_segments(job: Job, arrays: Mapping[str, np.ndarray]) -> Stored:
    """The segments of a shard as its arrays tell: bos begins a document, eos is what the length law leaves over.

    A later piece of a supervised document may repeat a system message; there eos is told by its token.
    """
    row, begin, slots = segment_slots(arrays)
    bos = ((arrays["segment_start"] == 0) & job.recipe.documents.prepend_bos).astype(np.int64)
    n, key = arrays["segment_tokens"].astype(np.int64), arrays["segment_key"]
    everywhere = np.full(len(row), -1, np.int64)  # no length depends on where training begins
    extra = np.zeros(len(row), np.int64)
    for t, task in enumerate(job.tasks):
        own = np.flatnonzero(arrays["segment_task"] == t)
        if len(own):
            law = task.slots(Bodies(n[own], key[own], everywhere[own]), bos[own], np.zeros(len(own), np.int64))
            over = slots[own] - law
            extra[own] = np.where(over % task.objective.copies, -1, over // task.objective.copies)
    eos, copy = extra.copy(), np.zeros(len(row), np.int64)
    if "trained_offsets" in arrays and len(row):
        later = (arrays["segment_start"] > 0) & (extra > 0)
        last = arrays["tokens" if "labels" not in arrays else "labels"][row, begin + slots - 1].astype(np.int64)
        if "labels" in arrays:  # next-token labels end with pad: look at the token itself
            plain = np.array([not task.in_place for task in job.tasks])[arrays["segment_task"]]
            last = np.where(plain, arrays["tokens"][row, begin + slots - 1].astype(np.int64), last)
        ends = (last == job.vocabulary.roles.get("eos", -1)) & job.recipe.documents.append_eos
        eos = np.where(later, ends.astype(np.int64), extra)
        copy = np.where(later, extra - eos, 0)
    return Stored(
        row, begin, slots, bos, eos, copy, Bodies(n + copy, key, _first_trained(job, arrays, slots, bos, eos))
    )


def _first_trained(
    job: Job, arrays: Mapping[str, np.ndarray], slots: np.ndarray, bos: np.ndarray, eos: np.ndarray
) -> np.ndarray:
    """int64[segments]: the first body slot of the trained ranges; −1 where all of the body may be trained."""
    first = np.full(len(slots), -1, np.int64)
    if "trained_offsets" not in arrays:
        return first
    offsets, ranges = arrays["trained_offsets"], arrays["trained_ranges"].astype(np.int64)
    mode = np.array([task.mode for task in job.tasks])[arrays["segment_task"]]
    copies = np.array([task.objective.copies for task in job.tasks])[arrays["segment_task"]]
    some = np.flatnonzero(np.diff(offsets) > 0)
    begin, end = ranges[offsets[some], 0], ranges[offsets[some], 1]
    body, half = (bos + mode)[some], (slots // copies)[some]
    whole = (np.diff(offsets)[some] == 1) & (begin <= body) & (end >= half - (eos[some] > 0))
    first[some] = np.where(whole, -1, begin - body)
    return first


def restore(
    job: Job, arrays: Mapping[str, np.ndarray], stored: Stored, chosen: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Invert stored segments: (content tokens of the chosen segments one after the other, offsets int64[k + 1], fits bool[k]).

    chosen: int64[k], indices of segments of a shard whose lengths obey the law. fits: whether what stands between the
    tokens (sentinels, …) is what the header says.
    """
    n, copy = arrays["segment_tokens"][chosen].astype(np.int64), stored.copy[chosen]
    ends = np.cumsum(n + copy)
    begins = ends - n - copy
    out = np.empty(int(ends[-1]) if len(ends) else 0, arrays["tokens"].dtype)
    fits = np.ones(len(chosen), np.bool_)
    length = arrays["tokens"].shape[1]
    for t, task in enumerate(job.tasks):
        own = np.flatnonzero(arrays["segment_task"][chosen] == t)
        if not len(own):
            continue
        which = chosen[own]
        body = stored.row[which] * length + stored.begin[which] + stored.bos[which] + task.mode
        columns = BodySlots(begins[own], Bodies(*(column[which] for column in stored.bodies)), body)
        # labels of in-place kinds are the tokens in their places, as causal's slots are
        objective = job.tasks[-1].objective if task.in_place else task.objective
        rows = arrays["labels" if task.in_place else "tokens"].reshape(-1)
        assert objective.restore is not None
        fits[own] = objective.restore(task, columns, rows, out)
    if copy.any():
        kept = np.ones(len(out), np.bool_)
        for i in np.flatnonzero(copy):
            kept[begins[i] : begins[i] + copy[i]] = False
        out = out[kept]
    return out, np.concatenate((np.zeros(1, np.int64), np.cumsum(n))), fits


FITTING_TOKENS = 1 << 18
"""Tokens that are inverted at a time: they stay in the processor's cache."""


def fitting(job: Job, arrays: Mapping[str, np.ndarray], stored: Stored) -> np.ndarray:
    """bool[segments]: `fits` of `restore`, whose tokens are not kept."""
    fits = np.ones(len(stored.row), np.bool_)
    length = arrays["tokens"].shape[1]
    slots, scratch = arrays["tokens"].reshape(-1), np.empty(0, arrays["tokens"].dtype)
    for t, task in enumerate(job.tasks):
        if task.in_place or task.objective is job.tasks[-1].objective:
            continue  # nothing stands between the tokens
        own = np.flatnonzero(arrays["segment_task"] == t)
        ends = np.cumsum(stored.bodies.n[own])
        if not len(own):
            continue
        bounds = np.unique(np.append(np.searchsorted(ends, np.arange(0, int(ends[-1]), FITTING_TOKENS)), len(own)))
        for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            which = own[begin:end]
            bodies = Bodies(*(column[which] for column in stored.bodies))
            first = ends[begin:end] - bodies.n
            first -= first[0]
            size = int(first[-1] + bodies.n[-1])
            if len(scratch) < size:
                scratch = np.empty(size, scratch.dtype)
            body = stored.row[which] * length + stored.begin[which] + stored.bos[which] + task.mode
            assert task.objective.restore is not None
            fits[which] = task.objective.restore(task, BodySlots(first, bodies, body), slots, scratch)
    return fits


def documents_at(job: Job, source: PlannedSource, file: int, use: int, positions: np.ndarray) -> Documents:
    """The token documents at some positions of one file of the plan. SourceError if one is not there any more."""
    i = file - source.first_file
    wanted = np.unique(positions)
    format, compression = source.formats[i]
    pieces = np.array(source.pieces.of_file(i), np.int64)
    if format == "jsonl" and not compression:
        pieces = pieces[np.isin(np.arange(len(pieces)), wanted // PIECE_BYTES)]
    if format == "megatron":
        pieces = pieces[runs_of(source.path(i), int(source.files.sizes[i]), wanted)]
    reading = read_documents(
        job.recipe,
        job.sources,
        ((source, Extent(int(piece), use, 0, 1, 1)) for piece in pieces),
        job.engine,
        job.vocabulary,
        job.token_dtype,
        marks=job.marks,
        only={file: wanted},
    )
    found = reading.documents
    missing = np.setdiff1d(wanted, found.position)
    if len(missing):
        raise SourceError(
            f"source {source.name!r}: {source.files[i].name} has no usable document at {missing[0]} any more: "
            "the file changed since the build"
        )
    return found


def replay_segments(job: Job, arrays: Mapping[str, np.ndarray], chosen: np.ndarray) -> list[str]:
    """For each chosen segment of a shard (int64[k]): "" if building it again from its source gives what is stored, and
    inverting what is stored gives the document's tokens; else what differs.

    SourceError where a source file is missing, or has no such document any more.
    """
    chosen = np.asarray(chosen, np.int64)
    stored = stored_segments(job, arrays)
    differing = [""] * len(chosen)
    names = ("source", "file", "repeat")
    places = np.stack([arrays[f"segment_{name}"][chosen].astype(np.int64) for name in names])
    for s, file, use in np.unique(places, axis=1).T:
        own = np.flatnonzero((places == np.array([[s], [file], [use]])).all(axis=0))
        documents = documents_at(job, job.sources[s], int(file), int(use), arrays["segment_doc"][chosen[own]])
        segments = _cut_again(job, arrays, documents, chosen[own], stored)
        where = {
            (int(documents.position[d]), int(start)): i
            for i, (d, start) in enumerate(zip(segments.document, segments.start, strict=True))
        }
        for k in own:
            g = int(chosen[k])
            i = where.get((int(arrays["segment_doc"][g]), int(arrays["segment_start"][g])))
            if i is None:
                differing[k] = f"its document is not cut at token {int(arrays['segment_start'][g])}"
                continue
            one = SegmentTable(*(column[i : i + 1] for column in segments))
            differing[k] = _difference(job, arrays, stored, g, documents, one)
    return differing


def _cut_again(
    job: Job, arrays: Mapping[str, np.ndarray], documents: Documents, chosen: np.ndarray, stored: Stored
) -> SegmentTable:
    """The documents' segments; under `concat`, where packing decides the cuts, the chosen ones as they are stored."""
    if job.recipe.packing.algorithm != "concat":
        return cut(job.recipe, job.tasks, documents).segments
    by_position = {int(position): d for d, position in enumerate(documents.position)}
    document = np.array([by_position[int(p)] for p in arrays["segment_doc"][chosen]], np.int64)
    start = arrays["segment_start"][chosen]
    key = segment_key(documents.file_key[document], documents.position[document], documents.repeat[document], start)
    n, task = (arrays[f"segment_{name}"][chosen].astype(np.int64) for name in ("tokens", "task"))
    none = np.zeros(len(chosen), np.int64)
    return SegmentTable(document, start, n, task, stored.bos[chosen], stored.eos[chosen], key, none, none - 1)


def _difference(
    job: Job, arrays: Mapping[str, np.ndarray], stored: Stored, g: int, documents: Documents, one: SegmentTable
) -> str:
    """What differs between stored segment g and the same one made again, in words."""
    stratified = job.tasks[int(arrays["segment_task"][g])].parameters.get("stratified", False)
    slots = slots_of(job.tasks, one)
    length = int(slots[0])
    if int(stored.slots[g]) != length:
        return f"it takes {int(stored.slots[g])} slots and should take {length}"
    layout = Layout(np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64), 1)
    made = render(job.tasks, documents, one, slots, layout, length, 1)
    for name in ("key", "tokens", "task", "prefix", "noise", "loss_weight"):
        here, again = arrays[f"segment_{name}"][g], made[f"segment_{name}"][0]
        if here != again and not (stratified and name in ("noise", "loss_weight")):
            return f"segment_{name} is {here} and should be {again}"
    if difference := _difference_of_ranges(arrays, stored, g, made):
        return difference
    row, begin = int(stored.row[g]), int(stored.begin[g])
    changing = ("labels",) if stratified else ("tokens", "loss_mask", "labels")
    for name in changing:
        if name not in made or name not in arrays:
            continue
        here = arrays[name][row, begin : begin + length]
        wrong = np.flatnonzero(here != made[name][0])
        if len(wrong):
            at = int(wrong[0])
            return f"{name} at slot {begin + at} of row {row} is {here[at]} and should be {made[name][0][at]}"
    exact = stored._replace(
        copy=np.where(np.arange(len(stored.copy)) == g, one.copy[0], stored.copy),
        bodies=_with_body(stored.bodies, g, one),
    )
    restored, _, fits = restore(job, arrays, exact, np.array([g]))
    if not fits[0]:
        return "its sentinels are not where the header says"
    first = int(documents.offsets[one.document[0]] + one.start[0])
    if not np.array_equal(restored, documents.ids[first : first + int(one.n[0])]):
        return "what is stored does not give back the document's tokens"
    return ""


def _difference_of_ranges(
    arrays: Mapping[str, np.ndarray], stored: Stored, g: int, made: Mapping[str, np.ndarray]
) -> str:
    """What differs between the trained ranges of stored segment g and those made again, in words."""
    if "trained_offsets" in made and "trained_offsets" in arrays:
        first, last = arrays["trained_offsets"][g : g + 2]
        here, again = arrays["trained_ranges"][first:last], made["trained_ranges"]
        if not np.array_equal(here, again):
            return f"its trained ranges are {here.tolist()} and should be {again.tolist()}"
    elif "trained_offsets" in made or stored.bodies.first_trained[g] >= 0:  # its source gives no document ranges
        return f"its trained ranges are {'missing' if 'trained_offsets' in made else 'none of its document'}"
    return ""


def _with_body(bodies: Bodies, g: int, one: SegmentTable) -> Bodies:
    exact = Bodies(*(column.copy() for column in bodies))
    for column, value in zip(exact, one.bodies(), strict=True):
        column[g] = value[0]
    return exact


def file_keys(job: Job, files: np.ndarray) -> np.ndarray:
    """uint64[n]: the keys of files of the plan, int[n]."""
    which, place = np.unique(files, return_inverse=True)
    first = np.array([source.first_file for source in job.sources])
    keys = np.zeros(len(which), np.uint64)
    for k, file in enumerate(which.tolist()):
        source = job.sources[int(np.searchsorted(first, file, "right")) - 1]
        keys[k] = text_key(source.seed, source.name, source.files.names[file - source.first_file])
    return keys[place]
