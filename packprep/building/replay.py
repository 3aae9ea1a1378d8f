"""Replay: build segments again from their source text and compare them with what is stored, and invert what is stored."""

from collections.abc import Mapping, Sequence

import numpy as np

from packprep.building.plan import Job
from packprep.building.render import Table, render_rows
from packprep.corpus.planning import Extent, PlannedSource
from packprep.corpus.readers import PIECE_BYTES, read
from packprep.corpus.tokenization import tokenize
from packprep.errors import SourceError
from packprep.objectives.objective import Columns
from packprep.randomness import segment_key, text_key


def segment_slots(arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, begin, slots) int64[segments] of a shard: each segment's row, its first physical slot there, its real length."""
    offsets = arrays["row_offsets"]
    rows = len(offsets) - 1
    row = np.repeat(np.arange(rows), np.diff(offsets))
    real = arrays["cu_seqlens"].astype(np.int64)
    physical = arrays.get("cu_seqlens_padded", arrays["cu_seqlens"]).astype(np.int64)
    at = np.arange(len(row)) + row
    return row, physical[at], real[at + 1] - real[at]


def ends_of(job: Job, arrays: Mapping[str, np.ndarray], slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(bos, eos) int64[segments] as the stored lengths imply them: bos begins a document; eos is what is left of the law."""
    bos = ((arrays["segment_start"] == 0) & job.recipe.documents.prepend_bos).astype(np.int64)
    eos = np.zeros(len(bos), np.int64)
    for t, task in enumerate(job.tasks):
        own = arrays["segment_task"] == t
        if own.any():
            n, key = arrays["segment_tokens"][own].astype(np.int64), arrays["segment_key"][own]
            eos[own] = slots[own] - task.slots(n, bos[own], np.zeros(int(own.sum()), np.int64), key)
    return bos, eos


def restore(
    job: Job, arrays: Mapping[str, np.ndarray], chosen: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Invert stored segments: (content tokens of the chosen segments one after the other, offsets int64[k + 1], fits bool[k]).

    chosen: int64[k], indices of segments of a shard whose lengths obey the law. fits: whether what stands between the
    tokens (sentinels, …) is what the header says.
    """
    row, begin, slots = segment_slots(arrays)
    bos, _ = ends_of(job, arrays, slots)
    n = arrays["segment_tokens"][chosen].astype(np.int64)
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(n)))
    flat = arrays["tokens"].reshape(-1)
    out = np.empty(int(offsets[-1]), flat.dtype)
    fits = np.zeros(len(chosen), np.bool_)
    for t, task in enumerate(job.tasks):
        own = np.flatnonzero(arrays["segment_task"][chosen] == t)
        if len(own):
            which = chosen[own]
            body = row[which] * arrays["tokens"].shape[1] + begin[which] + bos[which] + task.mode
            columns = Columns(offsets[own], n[own], arrays["segment_key"][which], body)
            fits[own] = task.objective.restore(task, columns, flat, out)
    return out, offsets, fits


def documents_at(job: Job, source: PlannedSource, file: int, positions: Sequence[int]) -> dict[int, np.ndarray]:
    """position → token ids of documents of one file of the plan. SourceError if one is not there any more."""
    i = file - source.first_file
    wanted = np.array(sorted(set(positions)), np.int64)
    format, compression = source.formats[i]
    pieces = np.flatnonzero((source.pieces.file <= i) & (i < source.pieces.file + source.pieces.files))
    if format == "jsonl" and not compression:
        pieces = pieces[np.isin(source.pieces.part[pieces], wanted // PIECE_BYTES)]
    found: dict[int, np.ndarray] = {}
    for piece in pieces:
        for part in source.parts(Extent(int(piece), 0, 0, 1, 1)):
            if part.file != file:
                continue
            for batch in read(part, source.source.text_key, lambda _, at: np.isin(at, wanted)):
                tokens = tokenize(job.engine, batch.texts, job.recipe.documents.special_text, job.vocabulary)
                for k, position in enumerate(batch.positions):
                    found[int(position)] = tokens.ids[tokens.offsets[k] : tokens.offsets[k + 1]]
        if len(found) == len(wanted):
            break
    for position in wanted:
        if int(position) not in found:
            raise SourceError(
                f"source {source.name!r}: {source.files[i].name} has no usable document at {position} any more: "
                "the file changed since the build"
            )
    return found


def replay_segments(job: Job, arrays: Mapping[str, np.ndarray], chosen: np.ndarray) -> list[str]:
    """For each chosen segment of a shard (int64[k]): "" if building it again from its source gives what is stored, and
    inverting what is stored gives the document's tokens; else what differs.

    SourceError where a source file is missing, or has no such document any more.
    """
    chosen = np.asarray(chosen, np.int64)
    row, begin, slots = segment_slots(arrays)
    bos, eos = ends_of(job, arrays, slots)
    restored, offsets, fits = restore(job, arrays, chosen)
    differing = [""] * len(chosen)
    places = np.stack((arrays["segment_source"][chosen], arrays["segment_file"][chosen])).astype(np.int64)
    for s, file in np.unique(places, axis=1).T:
        source = job.sources[s]
        own = np.flatnonzero((places[0] == s) & (places[1] == file))
        documents = documents_at(job, source, int(file), [int(p) for p in arrays["segment_doc"][chosen[own]]])
        name = source.files[int(file) - source.first_file].name
        file_key = text_key(source.seed, source.name, name)
        for k in own:
            g = int(chosen[k])
            document = documents[int(arrays["segment_doc"][g])]
            start, n = int(arrays["segment_start"][g]), int(arrays["segment_tokens"][g])
            differing[k] = _difference(
                job, arrays, g, document, file_key, int(row[g]), int(begin[g]), int(slots[g]), int(bos[g]), int(eos[g])
            )
            if not differing[k] and not fits[k]:
                differing[k] = "its sentinels are not where the header says"
            if not differing[k] and not np.array_equal(
                restored[offsets[k] : offsets[k + 1]], document[start : start + n]
            ):
                differing[k] = "what is stored does not give back the document's tokens"
    return differing


def _difference(
    job: Job, arrays: Mapping[str, np.ndarray], g: int, document: np.ndarray, file_key: np.uint64,
    row: int, begin: int, slots: int, bos: int, eos: int,
) -> str:  # fmt: skip
    start, n, t = (int(arrays[f"segment_{name}"][g]) for name in ("start", "tokens", "task"))
    key = segment_key(file_key, int(arrays["segment_doc"][g]), int(arrays["segment_repeat"][g]), start)
    if int(key) != int(arrays["segment_key"][g]):
        return f"segment_key is {int(arrays['segment_key'][g])} and should be {int(key)}"
    if start + n > len(document):
        return f"it claims tokens {start} … {start + n - 1} of a document of {len(document)}"
    last = start + n == len(document)
    if eos not in (0, 1) or (eos and not last):
        return f"it takes {slots} slots, {eos} more than its tokens, mode, sentinels and bos need"
    if last and not eos and job.recipe.documents.append_eos and job.recipe.documents.long != "truncate":
        return "it ends its document and has no eos"

    def column(value: int, dtype: type = np.int64) -> np.ndarray:
        return np.array([value], dtype)

    table = Table(
        column(start), column(n), column(t), column(bos), column(eos), np.array([key], np.uint64), column(slots),
        column(0), column(1),
    )  # fmt: skip
    labels = "labels" in arrays
    made, prefix = render_rows(job.tasks, table, document, 1, slots, arrays["tokens"].dtype, labels)
    if int(prefix[0]) != int(arrays["segment_prefix"][g]):
        return f"segment_prefix is {int(arrays['segment_prefix'][g])} and should be {int(prefix[0])}"
    for name in ("tokens", "loss_mask", *(("labels",) if labels else ())):
        stored = arrays[name][row, begin : begin + slots]
        wrong = np.flatnonzero(stored != made[name][0])
        if len(wrong):
            at = int(wrong[0])
            return f"{name} at slot {begin + at} of row {row} is {stored[at]} and should be {made[name][0][at]}"
    return ""
