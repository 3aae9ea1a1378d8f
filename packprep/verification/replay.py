"""Check P17: rebuild a shard, or some of its segments, from the sources and compare."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from packprep.building.commit import encode_rejects
from packprep.building.plan import Plan
from packprep.building.work import make_shard, read_shard
from packprep.dataset.boundaries import ranks
from packprep.documents.reading import OF_TOKENS
from packprep.errors import SourceError
from packprep.format.digests import digest_of
from packprep.format.json_files import receipt_name, rejects_name, shard_name
from packprep.restoring import replay_segments, restore, stored_segments
from packprep.sources.formats import Decoders
from packprep.verification.arrays import BLOCKS, WEIGHTS
from packprep.verification.coverage import Locations, check_read
from packprep.verification.faults import MAX_LISTED, Faults


def replay_shard(
    plan: Plan,
    number: int,
    arrays: Mapping[str, np.ndarray],
    receipt: Mapping[str, Any] | None,
    rejects: Locations | None,
    decoders: Decoders,
    faults: Faults,
    epoch: int = 0,
) -> int | None:
    """Check P17 and P21 of a whole shard by rebuilding it.

    The rebuilt shard must be equal, and its inverted segments must give the documents' tokens.

    Args:
        plan: The dataset's plan.
        number: Number of the shard.
        arrays: The shard's arrays, stored or as resampled for `epoch`.
        receipt: The shard's receipt, or None if it is invalid.
        rejects: The documents in the shard's rejects, or None if they cannot be read.
        decoders: Decoders for the source files.
        faults: Receives the faults.
        epoch: The epoch whose random numbers the arrays contain.

    Returns:
        The number of rebuilt segments, or None if a source changed.
    """
    file, before = shard_name(number), faults.total
    made = make_shard(plan, number, decoders, epoch=epoch)
    if receipt is not None:
        changed = _changed_sources(plan, receipt, made.documents.text_digests)
        for message in changed:
            faults.add("P17", file, message)
        if changed:
            return None
        if receipt["ledger"] != made.ledger:
            faults.add("P17", receipt_name(number), "the ledger differs from the rebuilt shard")
        rejected = encode_rejects(made)
        if (receipt["rejects"] or {}).get("digest") != (digest_of(rejected) if rejected else None):
            faults.add("P17", rejects_name(number), "the rejects differ from the rebuilt shard")
    if rejects is not None:
        check_read(plan, number, arrays, rejects, made, faults)
    compared = {
        name: array for name, array in made.arrays.items() if not epoch or name not in BLOCKS
    }
    for name in compared.keys() ^ arrays.keys() - {WEIGHTS}:
        faults.add(
            "P17",
            file,
            f"array {name!r} is {'not in the rebuilt shard' if name in arrays else 'missing'}",
        )
    for name in compared.keys() & arrays.keys():
        stored, again = arrays[name], compared[name]
        if stored.shape != again.shape:
            faults.add(
                "P17",
                file,
                f"{name} has shape {list(stored.shape)}, but {list(again.shape)} when rebuilt",
            )
            continue
        wrong = np.argwhere(stored.view(f"u{stored.itemsize}") != again.view(f"u{again.itemsize}"))
        for index in wrong[:3]:
            at = tuple(int(i) for i in index)
            row, slot = (at[0], at[1]) if len(at) == 2 else (None, None)
            where = "" if len(at) == 2 else f"[{at[0]}]"
            faults.add(
                "P17",
                file,
                f"{name}{where} is {again[at]} when rebuilt",
                row,
                slot,
                stored[at].item(),
            )
    if faults.total > before:
        return len(made.segments)
    built, documents = made.segments, made.documents
    exact = stored_segments(plan, arrays).replace(
        bos=built.bos,
        eos=built.eos,
        repeated=built.repeated,
        first_trained=built.first_trained,
    )
    restored, offsets, _ = restore(plan, arrays, exact, np.arange(len(built)), epoch)
    first = documents.offsets[built.document] + built.start
    expected = documents.ids[np.repeat(first, built.tokens) + ranks(built.tokens)]
    differs = np.flatnonzero(restored != expected)
    for g in np.unique(np.searchsorted(offsets, differs[:MAX_LISTED], "right") - 1):
        message = f"segment {g}: inverting it does not give the document's tokens"
        faults.add("P17", file, message, int(exact.row[g]))
    return len(built)


def replay_some(
    plan: Plan,
    number: int,
    arrays: Mapping[str, np.ndarray],
    chosen: np.ndarray,
    receipt: Mapping[str, Any] | None,
    decoders: Decoders,
    faults: Faults,
    epoch: int = 0,
) -> int:
    """Check P17 of some segments by rebuilding them.

    Args:
        plan: The dataset's plan.
        number: Number of the shard.
        arrays: The shard's arrays, stored or as resampled for `epoch`.
        chosen: Indices of the segments.
        receipt: The shard's receipt, or None if it is invalid.
        decoders: Decoders for the source files.
        faults: Receives the faults.
        epoch: The epoch whose random numbers the arrays contain.

    Returns:
        The number of rebuilt segments, or 0 if a source changed.

    Raises:
        SourceError: If a source cannot be read for another reason than a change.
    """
    file = shard_name(number)
    row = np.searchsorted(arrays["row_offsets"], chosen, "right") - 1
    try:
        differing = replay_segments(plan, arrays, chosen, epoch)
    except SourceError:
        if not _note_changed_sources(plan, number, receipt, decoders, faults):
            raise
        return 0
    if any(differing) and _note_changed_sources(plan, number, receipt, decoders, faults):
        return 0
    for g, r, difference in zip(chosen, row, differing, strict=True):
        if difference:
            faults.add("P17", file, f"segment {g}: {difference}", int(r))
    return len(chosen)


def _note_changed_sources(
    plan: Plan, number: int, receipt: Mapping[str, Any] | None, decoders: Decoders, faults: Faults
) -> bool:
    """Read the shard's text, and note each source that changed. Return whether one did.

    A change explains a difference between the stored and the rebuilt segments.
    """
    if receipt is None:
        return False
    changed = _changed_sources(plan, receipt, read_shard(plan, number, decoders).text_digests)
    for message in changed:
        faults.add("P17", shard_name(number), message)
    return bool(changed)


def _changed_sources(
    plan: Plan, receipt: Mapping[str, Any], digests: Mapping[str, str]
) -> list[str]:
    """Return a message for each changed source of a shard.

    Token stores with removed documents are skipped, because the removal itself changes their
    digests. The comparison of segments checks their other documents.
    """
    lost = {source.name for source in plan.sources if source.in_store and source.store.plan.removed}
    return [
        f"source {name!r} changed since the build: the text of this shard has digest {digest},"
        f" but had {receipt['text_digests'].get(name)} at the build"
        for name, digest in digests.items()
        if name not in lost
        and receipt["text_digests"].get(name) != digest
        and _are_alike(receipt["text_digests"].get(name), digest)
    ]


def _are_alike(before: Any, now: str) -> bool:
    """Return whether both digests are of text, or both of a token store's tokens."""
    return str(before).startswith(OF_TOKENS) == now.startswith(OF_TOKENS)
