"""Check a token store's shard: its arrays, its ledger, and that a rebuild gives the same shard."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from packprep.building.commit import encode_rejects
from packprep.building.plan import Plan
from packprep.building.work import make_store_shard
from packprep.documents.store import open_arrays
from packprep.errors import DatasetError, SourceError
from packprep.format import read_file
from packprep.format.digests import digest_of
from packprep.format.json_files import receipt_name, rejects_name, shard_name
from packprep.sources.formats import Decoders
from packprep.verification.faults import Faults


def check_store_shard(
    plan: Plan,
    directory: Path,
    number: int,
    receipt: Mapping[str, Any] | None,
    whole: bool,
    decoders: Decoders,
    faults: Faults,
) -> int | None:
    """Check P3, P4, P8, P16, P21 and P23 of a token store's shard, and P17 with `whole`.

    Args:
        plan: The store's plan.
        directory: Directory of the store.
        number: Number of the shard.
        receipt: The shard's receipt, or None if it is invalid.
        whole: Whether to rebuild the shard from its sources and compare it.
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
    if not whole:
        return 0
    try:
        made = make_store_shard(plan, number, decoders)
    except SourceError as error:
        faults.add("P17", file, f"cannot be rebuilt: {error}")
        return 0
    before = {} if receipt is None else receipt["text_digests"]
    changed = [
        name
        for name, digest in made.documents.text_digests.items()
        if before.get(name, digest) != digest
    ]
    for name in changed:
        faults.add(
            "P17",
            file,
            f"source {name!r} changed since the store was built: its text has another digest",
        )
    if changed:
        return None
    for name in {**arrays, **made.arrays}:
        stored, again = (of.get(name, np.zeros(0, "u1")).view("u1") for of in (arrays, made.arrays))
        if not np.array_equal(stored, again):
            faults.add("P17", file, f"array {name!r} differs when rebuilt")
    if receipt is not None:
        if receipt["ledger"] != made.ledger:
            faults.add("P17", receipt_name(number), "the ledger differs from the rebuilt shard")
        rejected = encode_rejects(made)
        if (receipt["rejects"] or {}).get("digest") != (digest_of(rejected) if rejected else None):
            faults.add("P17", rejects_name(number), "the rejects differ from the rebuilt shard")
    return len(made.arrays["position"])


def _is_sound(plan: Plan, arrays: Mapping[str, np.ndarray], file: str, faults: Faults) -> bool:
    """Check P4, P8, P21 and P23, and return whether documents can be read from the arrays.

    The checks cover offsets, document numbers, token ids, order, and removed documents.
    """
    before, documents = faults.total, len(arrays["position"])
    ends = {
        "document_offsets": (documents, len(arrays["tokens"])),
        "part_offsets": (len(arrays["part_file"]), documents),
        "span_offsets": (len(arrays["supervised"]), len(arrays["spans"])),
        "cut_offsets": (len(arrays["supervised"]), len(arrays["cuts"])),
        "reject_offsets": (len(arrays["rejected"]), len(arrays["reject_text"])),
    }
    if "place_offsets" in arrays:
        ends["place_offsets"] = (len(arrays["supervised"]), len(arrays["place_first"]))
        ends["place_ref_offsets"] = (len(arrays["place_first"]), len(arrays["place_refs"]))
    for name, (count, end) in ends.items():
        offsets = arrays[name]
        if (
            len(offsets) != count + 1
            or offsets[0] != 0
            or offsets[-1] != end
            or (np.diff(offsets) < 0).any()
        ):
            faults.add("P4", file, f"{name} does not ascend from 0 to {end} in {count} steps")
    for name in ("limited", "document_weight"):
        if len(arrays.get(name, arrays["supervised"])) != len(arrays["supervised"]):
            faults.add("P4", file, f"{name} does not have one entry per supervised document")
    for name in ("supervised", "rejected"):
        if len(arrays[name]) and (
            int(arrays[name].max()) >= documents
            or (np.diff(arrays[name].astype(np.int64)) <= 0).any()
        ):
            faults.add("P4", file, f"{name} are not ascending document numbers")
    if len(arrays["tokens"]) and int(arrays["tokens"].max()) >= plan.vocabulary.vocab_size:
        faults.add("P8", file, f"a token is not below vocab_size {plan.vocabulary.vocab_size}")
    if faults.total == before:
        part = np.repeat(np.arange(len(arrays["part_file"])), np.diff(arrays["part_offsets"]))
        same = part[1:] == part[:-1]
        if (np.diff(arrays["position"])[same] <= 0).any():
            faults.add(
                "P21",
                file,
                "the documents of a part are not in file order without duplicates",
            )
        removed = np.repeat(_removed(plan, arrays), np.diff(arrays["document_offsets"]))
        if (arrays["tokens"][removed] != plan.vocabulary.roles["pad"]).any():
            faults.add("P23", file, "a removed document has tokens")
        if "place_offsets" in arrays:
            of_removed = np.repeat(
                _removed(plan, arrays)[arrays["supervised"]], np.diff(arrays["place_offsets"])
            )
            if np.diff(arrays["place_ref_offsets"])[of_removed].any():
                faults.add("P23", file, "a removed document has refs of media")
    return faults.total == before


def _check_counts(
    plan: Plan,
    arrays: Mapping[str, np.ndarray],
    receipt: Mapping[str, Any],
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
        said = receipt["ledger"]["sources"][name]
        if (said["tokens"]["used"], said["documents"]["read"]) != (has, read[name]):
            message = (
                f"source {name}: the arrays have {has} tokens of {read[name]} documents, but the"
                " ledger differs"
            )
            faults.add("P16", receipt_name(number), message)


def _removed(plan: Plan, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return which documents were removed, bool[D]."""
    file = np.repeat(arrays["part_file"].astype(np.int64), np.diff(arrays["part_offsets"]))
    return plan.removed.at(file, arrays["position"])


def _by_source(plan: Plan, arrays: Mapping[str, np.ndarray], counts: np.ndarray) -> dict[str, int]:
    """Return source → sum of a count, [D], over the source's documents."""
    first = np.array([source.first_file for source in plan.sources], np.int64)
    of_part = np.searchsorted(first, arrays["part_file"].astype(np.int64), "right") - 1
    sums = np.bincount(np.repeat(of_part, np.diff(arrays["part_offsets"])), counts, len(first))
    return dict(
        zip((source.name for source in plan.sources), sums.astype(np.int64).tolist(), strict=True)
    )
