"""Check P17: rebuild a shard, or some of its segments, from the sources and compare."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from packprep.building.commit import Receipt, encode_rejects
from packprep.building.plan import Plan
from packprep.building.work import Made, StoreShard, make_shard, read_shard
from packprep.dataset.boundaries import ranks
from packprep.dataset.segments import Arrays
from packprep.documents.reading import OF_TOKENS
from packprep.errors import SourceError
from packprep.format.digests import digest_of
from packprep.format.json_files import receipt_name, rejects_name, shard_name
from packprep.restoring import replay_segments, restore, stored_segments
from packprep.sources.formats import Decoders
from packprep.verification.arrays import BLOCKS, WEIGHTS
from packprep.verification.coverage import Locations, check_read
from packprep.verification.faults import MAX_LISTED, Faults


class ShardToReplay(NamedTuple):
    """A shard to rebuild, and the collection of its faults.

    Attributes:
        plan: The dataset's plan.
        number: Number of the shard.
        arrays: The shard's arrays, stored or as resampled for `epoch`.
        receipt: The shard's receipt, or None if it is invalid.
        decoders: Decoders for the source files.
        faults: Receives the faults.
        epoch: The epoch for which the noise of the arrays was drawn.
    """

    plan: Plan
    number: int
    arrays: Arrays
    receipt: Receipt | None
    decoders: Decoders
    faults: Faults
    epoch: int

    def add(self, message: str, row: int | None = None, *location: Any) -> None:
        """Record a violation of P17, with the shard's file as its location."""
        self.faults.add("P17", shard_name(self.number), message, row, *location)


def replay_shard(shard: ShardToReplay, rejects: Locations | None) -> int | None:
    """Rebuild a whole shard, and compare it (P17) and its documents (P21) with the stored shard.

    The rebuilt shard must equal the stored shard. The original tokens that `restore` finds in the
    stored segments must be the tokens of the documents.

    Args:
        shard: The shard.
        rejects: The documents in the shard's rejects, or None if they cannot be read.

    Returns:
        The number of rebuilt segments, or None if a source changed.
    """
    plan, number, faults = shard.plan, shard.number, shard.faults
    faults_before = faults.total
    rebuilt_shard = make_shard(plan, number, shard.decoders, epoch=shard.epoch)
    if _note_changed_sources(shard, rebuilt_shard.documents.text_digests):
        return None
    if shard.receipt is not None:
        check_receipt(number, shard.receipt, rebuilt_shard, faults)
    if rejects is not None:
        check_read(plan, number, shard.arrays, rejects, rebuilt_shard, faults)
    _compare_arrays(shard, rebuilt_shard.arrays)
    if faults.total == faults_before:  # `restore` needs valid arrays.
        _check_inverse(shard, rebuilt_shard)
    return len(rebuilt_shard.segments)


def check_receipt(
    number: int, receipt: Receipt, rebuilt_shard: Made | StoreShard, faults: Faults
) -> None:
    """Check P17: the rebuilt shard has the ledger and the rejects of the stored receipt."""
    if receipt["ledger"] != rebuilt_shard.ledger:
        faults.add("P17", receipt_name(number), "the ledger differs from the rebuilt shard")
    rejects = encode_rejects(rebuilt_shard)
    if (receipt["rejects"] or {}).get("digest") != (digest_of(rejects) if rejects else None):
        faults.add("P17", rejects_name(number), "the rejects differ from the rebuilt shard")


def _compare_arrays(shard: ShardToReplay, rebuilt_arrays: Arrays) -> None:
    """Check P17: the rebuilt arrays have the names, shapes and bytes of the stored arrays."""
    stored_arrays = shard.arrays
    rebuilt_arrays = {
        name: array
        for name, array in rebuilt_arrays.items()
        if not shard.epoch or name not in BLOCKS
    }
    for name in rebuilt_arrays.keys() ^ stored_arrays.keys() - {WEIGHTS}:
        problem = "not in the rebuilt shard" if name in stored_arrays else "missing"
        shard.add(f"array {name!r} is {problem}")
    for name in rebuilt_arrays.keys() & stored_arrays.keys():
        stored, rebuilt = stored_arrays[name], rebuilt_arrays[name]
        if stored.shape != rebuilt.shape:
            shapes = f"{list(stored.shape)}, but {list(rebuilt.shape)} when rebuilt"
            shard.add(f"{name} has shape {shapes}")
            continue
        # The bits are compared, because NaN differs from itself.
        bits, rebuilt_bits = (values.view(f"u{values.itemsize}") for values in (stored, rebuilt))
        for index in map(tuple, np.argwhere(bits != rebuilt_bits)[:3].tolist()):
            row, slot = index if len(index) == 2 else (None, None)
            entry = name if len(index) == 2 else f"{name}[{index[0]}]"
            message = f"{entry} is {rebuilt[index]} when rebuilt"
            shard.add(message, row, slot, stored[index].item())


def _check_inverse(shard: ShardToReplay, rebuilt_shard: Made) -> None:
    """Check P17: `restore` finds the tokens of the rebuilt documents in the stored segments."""
    segments, documents = rebuilt_shard.segments, rebuilt_shard.documents
    # The rebuilt shard knows these columns exactly. A stored shard only lets them be computed.
    exact = stored_segments(shard.plan, shard.arrays).replace(
        bos=segments.bos,
        eos=segments.eos,
        repeated=segments.repeated,
        first_trained=segments.first_trained,
        fill=segments.fill,
    )
    every_segment = np.arange(len(segments))
    restored = restore(shard.plan, shard.arrays, exact, every_segment, shard.epoch)
    first_token = documents.offsets[segments.document] + segments.start
    expected = documents.ids[np.repeat(first_token, segments.tokens) + ranks(segments.tokens)]
    differing = np.flatnonzero(restored.ids != expected)[:MAX_LISTED]
    for g in np.unique(np.searchsorted(restored.offsets, differing, "right") - 1):
        message = f"segment {g}: inverting it does not give the document's tokens"
        shard.add(message, int(exact.row[g]))


def replay_some(shard: ShardToReplay, chosen: np.ndarray) -> int:
    """Rebuild some segments of a shard, and compare them with the stored segments (P17).

    Args:
        shard: The shard.
        chosen: Indices of the segments.

    Returns:
        The number of rebuilt segments, or 0 if a source changed.

    Raises:
        SourceError: If a source cannot be read, although its text did not change.
    """
    try:
        differences = replay_segments(shard.plan, shard.arrays, chosen, shard.epoch)
    except SourceError:
        if not _is_explained(shard):
            raise
        return 0
    if any(differences) and _is_explained(shard):
        return 0
    rows = np.searchsorted(shard.arrays["row_offsets"], chosen, "right") - 1
    for g, row, difference in zip(chosen, rows, differences, strict=True):
        if difference:
            shard.add(f"segment {g}: {difference}", int(row))
    return len(chosen)


def _is_explained(shard: ShardToReplay) -> bool:
    """Read the shard's text again, and record a fault for each source that changed.

    Return whether a source changed, because this explains why rebuilt segments differ.
    """
    if shard.receipt is None:
        return False
    documents = read_shard(shard.plan, shard.number, shard.decoders)
    return _note_changed_sources(shard, documents.text_digests)


def _note_changed_sources(shard: ShardToReplay, digests: Mapping[str, str]) -> bool:
    """Record a fault for each source whose digest differs from the receipt.

    Return whether a source has another digest. Token stores with removed documents are skipped,
    because removing changes their digests. The remaining documents of such a store are checked by
    comparing segments.
    """
    if shard.receipt is None:
        return False
    sources = shard.plan.sources
    lost = {source.name for source in sources if source.in_store and source.store.plan.removed}
    is_changed = False
    for name, digest in digests.items():
        digest_before = shard.receipt["text_digests"].get(name)
        if name not in lost and digest_before != digest and _are_alike(digest_before, digest):
            is_changed = True
            shard.add(
                f"source {name!r} changed since the build: the text of this shard has digest"
                f" {digest}, but had {digest_before} at the build"
            )
    return is_changed


def _are_alike(digest_before: Any, digest_now: str) -> bool:
    """Return whether both digests are of text, or both are of tokens in a token store."""
    return str(digest_before).startswith(OF_TOKENS) == digest_now.startswith(OF_TOKENS)
