"""P17 of a shard: built again from its sources, whole or some of its segments, it is the same."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from packprep.building.commit import encode_rejects
from packprep.building.job import Job
from packprep.building.replay import replay_segments, restore, stored_segments
from packprep.building.work import make_shard, read_shard
from packprep.corpus.readers import Decoders
from packprep.dataset.json_files import receipt_name, rejects_name, shard_name
from packprep.digests import digest_of
from packprep.errors import SourceError
from packprep.verification.coverage import Places, check_read
from packprep.verification.report import MAX_LISTED, Faults


def replay_shard(
    job: Job,
    number: int,
    arrays: Mapping[str, np.ndarray],
    receipt: Mapping[str, Any] | None,
    rejects: Places | None,
    decoders: Decoders,
    faults: Faults,
) -> tuple[int, dict[str, int] | None]:
    """P17 and P21 of a whole shard: made again, it is the same; inverted, it gives the documents' tokens.

    Gives (how many segments were made again, source → bytes of the text that was read); (0, None) where a source changed.
    """
    file, before = shard_name(number), faults.total
    made = make_shard(job, number, decoders)
    if receipt is not None:
        changed = _changed_sources(receipt, made.reading.text_digests)
        for message in changed:
            faults.add("P17", file, message)
        if changed:
            return 0, None
        if receipt["ledger"] != made.ledger:
            faults.add("P17", receipt_name(number), "the ledger is not that of the shard made again")
        rejected = encode_rejects(made)
        if (receipt["rejects"] or {}).get("digest") != (digest_of(rejected) if rejected else None):
            faults.add("P17", rejects_name(number), "the rejects are not those of the shard made again")
    if rejects is not None:
        check_read(job, number, arrays, rejects, made, faults)
    for name in made.arrays.keys() ^ arrays.keys():
        faults.add("P17", file, f"array {name!r} is {'not made again' if name in arrays else 'missing'}")
    for name in made.arrays.keys() & arrays.keys():
        stored, again = arrays[name], made.arrays[name]
        if stored.shape != again.shape:
            faults.add("P17", file, f"{name} has shape {list(stored.shape)}, made again {list(again.shape)}")
            continue
        wrong = np.argwhere(stored.view(f"u{stored.itemsize}") != again.view(f"u{again.itemsize}"))
        for place in wrong[:3]:
            at = tuple(int(i) for i in place)
            row, slot = (at[0], at[1]) if len(at) == 2 else (None, None)
            where = "" if len(at) == 2 else f"[{at[0]}]"
            faults.add("P17", file, f"{name}{where} made again is {again[at]}", row, slot, stored[at].item())
    if faults.total > before:
        return len(made.segments.n), made.reading.text_bytes
    own, documents = made.segments, made.reading.documents
    exact = stored_segments(job, arrays)._replace(bos=own.bos, eos=own.eos, copy=own.copy, bodies=own.bodies())
    restored, offsets, _ = restore(job, arrays, exact, np.arange(len(own.n)))
    first = documents.offsets[own.document] + own.start
    within = np.arange(int(offsets[-1])) - np.repeat(offsets[:-1], own.n)
    differs = np.flatnonzero(restored != documents.ids[np.repeat(first, own.n) + within])
    for g in np.unique(np.searchsorted(offsets, differs[:MAX_LISTED], "right") - 1):
        message = f"segment {g}: inverting it does not give the document's tokens"
        faults.add("P17", file, message, int(exact.row[g]))
    return len(own.n), made.reading.text_bytes


def replay_some(
    job: Job,
    number: int,
    arrays: Mapping[str, np.ndarray],
    chosen: np.ndarray,
    receipt: Mapping[str, Any] | None,
    decoders: Decoders,
    faults: Faults,
) -> int:
    """P17 of some segments."""
    file = shard_name(number)
    row = np.searchsorted(arrays["row_offsets"], chosen, "right") - 1
    try:
        differing = replay_segments(job, arrays, chosen)
    except SourceError:
        if not _note_changed_sources(job, number, receipt, decoders, faults):
            raise
        return 0
    if any(differing) and _note_changed_sources(job, number, receipt, decoders, faults):
        return 0
    for g, r, difference in zip(chosen, row, differing, strict=True):
        if difference:
            faults.add("P17", file, f"segment {g}: {difference}", int(r))
    return len(chosen)


def _note_changed_sources(
    job: Job, number: int, receipt: Mapping[str, Any] | None, decoders: Decoders, faults: Faults
) -> bool:
    """Whether a difference comes from the sources: read all of the shard's text again, and note each that changed."""
    if receipt is None:
        return False
    changed = _changed_sources(receipt, read_shard(job, number, decoders).text_digests)
    for message in changed:
        faults.add("P17", shard_name(number), message)
    return bool(changed)


def _changed_sources(receipt: Mapping[str, Any], digests: Mapping[str, str]) -> list[str]:
    return [
        f"source {name!r} changed since the build: the text of this shard has digest {digest}, "
        f"when it was built {receipt['text_digests'].get(name)}"
        for name, digest in digests.items()
        if receipt["text_digests"].get(name) != digest
    ]
