"""Check a token store's shard: its arrays, its ledger, and that a rebuild gives the same shard."""

from pathlib import Path

import numpy as np

from packprep.building.commit import Receipt
from packprep.building.plan import Plan
from packprep.building.work import make_store_shard
from packprep.dataset.boundaries import descents, owners
from packprep.dataset.segments import Arrays
from packprep.documents.kept_fields import wrong_fields
from packprep.documents.store import fields_of_parts, open_arrays
from packprep.errors import DatasetError, SourceError
from packprep.format import read_file
from packprep.format.json_files import receipt_name, shard_name
from packprep.sources.formats import Decoders
from packprep.verification.faults import Faults
from packprep.verification.replay import check_receipt


def check_store_shard(
    plan: Plan,
    directory: Path,
    number: int,
    receipt: Receipt | None,
    is_replayed: bool,
    decoders: Decoders,
    faults: Faults,
) -> int | None:
    """Check the arrays and the ledger of a token store's shard: P3, P4, P8, P16, P21 and P23.

    If `is_replayed` is true, also rebuild the shard from its sources, and compare it (P17).

    Args:
        plan: The store's plan.
        directory: Directory of the store.
        number: Number of the shard.
        receipt: The shard's receipt, or None if it is invalid.
        is_replayed: Whether to rebuild the shard from its sources and compare it.
        decoders: Decoders for the source files.
        faults: Receives the faults.

    Returns:
        The number of rebuilt documents, or None if a source changed.
    """
    file = shard_name(number)
    try:
        arrays = open_arrays(read_file(directory / file), file)
    except (DatasetError, OSError) as error:
        faults.add("P3", file, str(error))
        return 0
    if not _is_sound(plan, arrays, file, faults):
        return 0
    if receipt is not None:
        _check_counts(plan, arrays, receipt, number, faults)
    if not is_replayed:
        return 0
    try:
        rebuilt_shard = make_store_shard(plan, number, decoders)
    except SourceError as error:
        faults.add("P17", file, f"cannot be rebuilt: {error}")
        return 0
    digests_before = {} if receipt is None else receipt["text_digests"]
    # A changed source explains all other differences, so only the source is reported.
    changed = [
        name
        for name, digest in rebuilt_shard.documents.text_digests.items()
        if digests_before.get(name, digest) != digest
    ]
    for name in changed:
        faults.add(
            "P17",
            file,
            f"source {name!r} changed since the store was built: its text has another digest",
        )
    if changed:
        return None
    # An array that one side does not have is compared with an empty array.
    for name in {**arrays, **rebuilt_shard.arrays}:
        stored, rebuilt_array = (
            arrays_of_side.get(name, np.zeros(0, "u1")).view("u1")
            for arrays_of_side in (arrays, rebuilt_shard.arrays)
        )
        if not np.array_equal(stored, rebuilt_array):
            faults.add("P17", file, f"array {name!r} differs when rebuilt")
    if receipt is not None:
        check_receipt(number, receipt, rebuilt_shard, faults)
    return len(rebuilt_shard.arrays["position"])


def _is_sound(plan: Plan, arrays: Arrays, file: str, faults: Faults) -> bool:
    """Check P4, P8, P21 and P23, and return whether documents can be read from the arrays.

    The checks cover offsets, document numbers, token ids, order, and removed documents.
    """
    faults_before = faults.total
    _check_form(plan, arrays, file, faults)
    if faults.total == faults_before:
        _check_contents(plan, arrays, file, faults)
    return faults.total == faults_before


def _check_form(plan: Plan, arrays: Arrays, file: str, faults: Faults) -> None:
    """Check P4 and P8: the offsets, document numbers and token ids are in range."""
    documents, supervised = len(arrays["position"]), len(arrays["supervised"])
    # Name of an array of offsets → number of lists, and their total number of entries.
    sizes = {
        "document_offsets": (documents, len(arrays["tokens"])),
        "part_offsets": (len(arrays["part_file"]), documents),
        "span_offsets": (supervised, len(arrays["spans"])),
        "cut_offsets": (supervised, len(arrays["cuts"])),
        "reject_offsets": (len(arrays["rejected"]), len(arrays["reject_text"])),
    }
    if "place_offsets" in arrays:
        places = len(arrays["place_first"])
        sizes["place_offsets"] = supervised, places
        sizes["place_ref_offsets"] = places, len(arrays["place_refs"])
    # Later checks use the offsets as bounds, so their form is checked first.
    for name, (count, end) in sizes.items():
        offsets = arrays[name]
        does_ascend = len(offsets) == count + 1 and not descents(offsets).any()
        if not does_ascend or offsets[0] != 0 or offsets[-1] != end:
            faults.add("P4", file, f"{name} does not ascend from 0 to {end} in {count} steps")
    # These arrays are optional, and describe the supervised documents only.
    for name in ("limited", "document_weight"):
        if len(arrays.get(name, arrays["supervised"])) != supervised:
            faults.add("P4", file, f"{name} does not have one entry per supervised document")
    for name in ("supervised", "rejected"):
        numbers = arrays[name].astype(np.int64)
        if (np.diff(numbers) <= 0).any() or numbers.max(initial=-1) >= documents:
            faults.add("P4", file, f"{name} are not ascending document numbers")
    vocab_size = plan.vocabulary.vocab_size
    if int(arrays["tokens"].max(initial=0)) >= vocab_size:
        faults.add("P8", file, f"a token is not below vocab_size {vocab_size}")


def _check_contents(plan: Plan, arrays: Arrays, file: str, faults: Faults) -> None:
    """Check P21 and P23: documents are in file order, and removed documents have no contents.

    Also check P4 for the kept fields.

    The arrays must have passed `_check_form`.
    """
    # Only the documents of one part have an order, because parts may be from different files.
    part_of_document = owners(np.diff(arrays["part_offsets"]))
    is_same_part = part_of_document[1:] == part_of_document[:-1]
    position = arrays["position"]
    if (position[1:] <= position[:-1])[is_same_part].any():
        message = "the documents of a part are not in file order without duplicates"
        faults.add("P21", file, message)
    removed = _removed(plan, arrays)
    was_removed = removed.copy()
    was_removed[arrays["rejected"]] = False  # `remove` leaves rejected documents as they are.
    for promise, message in wrong_fields(arrays, was_removed, fields_of_parts(plan, arrays)):
        faults.add(promise, file, message)
    # Removed documents keep their length, so their tokens become padding.
    removed_tokens = arrays["tokens"][np.repeat(removed, np.diff(arrays["document_offsets"]))]
    if (removed_tokens != plan.vocabulary.roles["pad"]).any():
        faults.add("P23", file, "a removed document has tokens")
    if "place_offsets" in arrays:
        place_counts = np.diff(arrays["place_offsets"])
        removed_places = np.repeat(removed[arrays["supervised"]], place_counts)
        if np.diff(arrays["place_ref_offsets"])[removed_places].any():
            faults.add("P23", file, "a removed document has refs of media")


def _check_counts(
    plan: Plan,
    arrays: Arrays,
    receipt: Receipt,
    number: int,
    faults: Faults,
) -> None:
    """Check P16: the ledger counts the documents and tokens of the arrays."""
    tokens = _by_source(
        plan, arrays, np.where(_removed(plan, arrays), 0, np.diff(arrays["document_offsets"]))
    )
    if receipt["tokens"] != sum(tokens.values()):
        faults.add(
            "P16",
            receipt_name(number),
            f"the arrays have {sum(tokens.values())} tokens",
            value=receipt["tokens"],
        )
    read = _by_source(plan, arrays, np.ones(len(arrays["position"])))
    for name, has in tokens.items():
        counts = receipt["ledger"]["sources"][name]
        if (counts["tokens"]["used"], counts["documents"]["read"]) != (has, read[name]):
            message = (
                f"source {name}: the arrays have {has} tokens of {read[name]} documents, but the"
                " ledger differs"
            )
            faults.add("P16", receipt_name(number), message)


def _removed(plan: Plan, arrays: Arrays) -> np.ndarray:
    """Return which documents were removed, bool[documents]."""
    file = np.repeat(arrays["part_file"].astype(np.int64), np.diff(arrays["part_offsets"]))
    return plan.removed.at(file, arrays["position"])


def _by_source(plan: Plan, arrays: Arrays, counts: np.ndarray) -> dict[str, int]:
    """Return source name → sum of the counts of its documents. `counts` is [documents]."""
    first_files = np.array([source.first_file for source in plan.sources], np.int64)
    of_part = np.searchsorted(first_files, arrays["part_file"].astype(np.int64), "right") - 1
    sums = np.bincount(
        np.repeat(of_part, np.diff(arrays["part_offsets"])), counts, len(first_files)
    )
    return dict(
        zip((source.name for source in plan.sources), sums.astype(np.int64).tolist(), strict=True)
    )
