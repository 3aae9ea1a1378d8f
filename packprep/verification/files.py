"""P1 and P2: the files of a dataset, and what its JSON files say of each other."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packprep.building.commit import read_receipt
from packprep.building.ledger import add_ledgers, imbalances
from packprep.building.publication import MANIFEST
from packprep.dataset.manifest import encode, receipt_name, rejects_name, shard_name
from packprep.digests import digest_of, digest_of_file
from packprep.verification.report import Faults


def check_manifest(directory: Path, manifest: Mapping[str, Any], plan: Mapping[str, Any], faults: Faults) -> None:
    """P1 and P2 of dataset.json, plan.json and tokenizer.json."""
    own = digest_of(encode({key: value for key, value in manifest.items() if key != "digest"}))
    if own != manifest["digest"]:
        faults.add("P1", MANIFEST, f"its digest is {own}", value=manifest["digest"])
    for entry in ("plan", "tokenizer"):
        name, digest = manifest[entry]["file"], manifest[entry]["digest"]
        try:
            found = digest_of_file(directory / name)
        except OSError as error:
            faults.add("P1", name, f"cannot be read: {error.strerror}")
            continue
        if found != digest:
            faults.add("P1", name, f"its digest is {found}", value=digest)
    for key in ("law_version", "fingerprint", "recipe", "engine", "made_with", "tasks", "token_dtype", "tokenizer"):
        if manifest[key] != plan[key]:
            faults.add("P2", MANIFEST, f"{key} is not the plan's")
    if len(manifest["shards"]) != plan["shards"]:
        faults.add("P2", MANIFEST, f"it lists {len(manifest['shards'])} shards and the plan has {plan['shards']}")


def check_listing(directory: Path, manifest: Mapping[str, Any], faults: Faults) -> None:
    """P1: nothing lies in the directory that the dataset does not name."""
    named = {MANIFEST, manifest["plan"]["file"], manifest["tokenizer"]["file"]}
    for b in range(len(manifest["shards"])):
        named |= {shard_name(b), receipt_name(b), rejects_name(b)}
    for folder, folders, names in os.walk(directory):
        for name in sorted(names) + sorted(n for n in folders if os.path.islink(os.path.join(folder, n))):
            path = os.path.relpath(os.path.join(folder, name), directory)
            if os.path.islink(os.path.join(folder, name)):
                faults.add("P1", path, "is a symbolic link; a dataset has none")
            elif path not in named:
                faults.add(
                    "P1", path, "belongs to no dataset: remove it, or it is a leftover of a build that was killed"
                )


def check_shard_files(
    directory: Path, shard: int, entry: Mapping[str, Any], plan_digest: str, faults: Faults
) -> dict[str, Any] | None:
    """P1 and P2 of one shard, its receipt and its rejects; gives the receipt."""
    found = read_receipt(directory, shard)
    name = receipt_name(shard)
    if found is None:
        faults.add("P1", name, "is missing or no receipt")
        return None
    receipt, data = found
    if digest_of(data) != entry["receipt_digest"]:
        faults.add("P1", name, f"its digest is {digest_of(data)}", value=entry["receipt_digest"])
    if receipt["plan_digest"] != plan_digest:
        faults.add("P2", name, "it is of another plan", value=receipt["plan_digest"])
    for key in ("file", "rows", "segments", "tokens", "bytes", "digest"):
        if receipt[key] != entry[key]:
            faults.add("P2", name, f"{key} is not the manifest's {entry[key]!r}", value=receipt[key])
    _check_file(directory, shard_name(shard), entry, faults)
    rejects = receipt["rejects"]
    if rejects is not None:
        _check_file(directory, rejects_name(shard), rejects, faults)
    elif (directory / rejects_name(shard)).exists():
        faults.add("P1", rejects_name(shard), "the receipt names no rejects, and there is a file of them")
    for wrong in imbalances(receipt["ledger"]):
        faults.add("P16", name, wrong)
    return receipt


def _check_file(directory: Path, name: str, entry: Mapping[str, Any], faults: Faults) -> None:
    path = directory / name
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            faults.add("P1", name, f"it has {size} bytes", value=entry["bytes"])
            return
        digest = digest_of_file(path)
    except OSError as error:
        faults.add("P1", name, f"cannot be read: {error.strerror}")
        return
    if digest != entry["digest"]:
        faults.add("P1", name, f"its digest is {digest}", value=entry["digest"])


def check_sum(manifest: Mapping[str, Any], ledgers: list[Mapping[str, Any]], faults: Faults) -> None:
    """P16: the manifest's ledger is the sum of the receipts', and balances."""
    if add_ledgers(ledgers) != manifest["ledger"]:
        faults.add("P16", MANIFEST, "its ledger is not the sum of the receipts' ledgers")
    for wrong in imbalances(manifest["ledger"]):
        faults.add("P16", MANIFEST, wrong)
