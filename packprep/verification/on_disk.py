"""Check P1, P2 and P22: the files of a dataset, its JSON files, and how its plan was derived.

The plan is derived again from its recipe, tokenizer.json and estimates, by the code that wrote it.
With `--replay all`, the source files are listed and split again, and the estimates are recomputed
from the same calibration sample. If the user gives a recipe, it is compared with the plan's recipe.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packprep.building.commit import REJECTS_KEYS, Receipt, bad_fault, make_manifest, read_receipt
from packprep.building.ledger import Ledger, imbalances, is_ledger
from packprep.building.plan import Plan, ids_of, open_store
from packprep.building.planning import (
    UNSAMPLED,
    changed_keys,
    estimates_in,
    follows,
    repeats,
    sampled,
    stored_estimates,
)
from packprep.building.removal import encode_removed
from packprep.building.replaced import plan_digest_of, plan_replaced
from packprep.building.stores import files_in, in_stores, of_store, patterns_of, template_of
from packprep.conversations.chat_template import find_template
from packprep.dataset.manifest import LATER, Manifest, named_removal, replaced
from packprep.documents.calibration import Estimates, highest_ratio
from packprep.errors import DatasetError, PackprepError, PlanError
from packprep.format import read_file
from packprep.format.digests import digest_of, digest_of_file, own_digest
from packprep.format.json_files import (
    FIRST_SEEN_NAME,
    MANIFEST_NAME,
    PLAN_NAME,
    REMOVED_NAME,
    as_stored,
    decode,
    json_value,
    receipt_name,
    rejects_name,
    shard_name,
)
from packprep.objectives.tasks import needs_of, resolve, whole_recipe
from packprep.recipe import Recipe, fingerprint, normalised, without_places
from packprep.sources.files import Files, find_below
from packprep.sources.formats import FORMATS, count_pieces, position_of
from packprep.sources.slices import IN_STORE, PlannedSource, format_name, other_store
from packprep.storage import Folder, LocalFolder, Remote
from packprep.tokenizer.roles import Needs, Vocabulary, resolve_again, resolve_vocabulary
from packprep.verification.faults import Faults


def check_manifest_digest(manifest: Manifest, faults: Faults) -> None:
    """Check P1 of dataset.json: its key `digest` is the digest of its content."""
    digest = own_digest(as_stored(manifest, LATER))
    if digest != manifest["digest"]:
        message = f"its digest is {digest} and should be {manifest['digest']}"
        faults.add("P1", MANIFEST_NAME, message)


def check_foundations(directory: Path, manifest: Manifest, faults: Faults) -> bool:
    """Check P1 of plan.json, tokenizer.json and removed.json, and return whether they are intact.

    The other checks compute their expected values from these files.
    """
    total_before = faults.total
    named = [(manifest[key]["file"], manifest[key]["digest"]) for key in ("plan", "tokenizer")]
    if "removed" in manifest:
        named.append((REMOVED_NAME, manifest["removed"]["digest"]))
    for name, digest in named:
        try:
            actual_digest = digest_of_file(directory / name)
        except OSError as error:
            faults.add("P1", name, f"cannot be read: {error.strerror}")
            continue
        if actual_digest != digest:
            faults.add(
                "P1",
                name,
                f"its digest is {actual_digest}, so no shard can be checked",
                value=digest,
            )
    return faults.total == total_before


def check_manifest(directory: Path, plan: Plan, manifest: Manifest, faults: Faults) -> None:
    """Check P2 of dataset.json, plan.json and removed.json.

    The manifest must agree with the plan, and the plan with its fingerprint. The documents in
    removed.json must be sorted and unique.
    """
    expected = make_manifest(plan, manifest["shards"], manifest["ledger"])
    for key, value in manifest.items():
        if key not in ("plan", "digest") and value != expected.get(key):
            faults.add("P2", MANIFEST_NAME, f"{key} differs from the plan")
    # A loader derives a missing `continues` from tokenizer.json, because older datasets omit the
    # key.
    for key in sorted(expected.keys() - manifest.keys() - {"continues"}):
        faults.add("P2", MANIFEST_NAME, f"{key} is missing, but the plan has it")
    files = [[(file.name, file.size) for file in source.files] for source in plan.sources]
    tokenizer, template = plan.stored["tokenizer"]["digest"], plan.stored["chat_template"]
    # The fingerprint covers everything that determines the rows.
    own_fingerprint = fingerprint(plan.recipe, files, tokenizer, template, plan.removed_digest)
    if own_fingerprint != plan.stored["fingerprint"]:
        faults.add(
            "P2",
            PLAN_NAME,
            "the fingerprint does not match the recipe, files, tokenizer and removed documents",
        )
    if plan.removed_digest and encode_removed(plan.removed.documents) != read_file(
        directory / REMOVED_NAME
    ):
        faults.add(
            "P2",
            REMOVED_NAME,
            "the documents must be sorted, without duplicates",
        )
    for source in plan.sources:
        for file, (format, compression) in zip(source.files, source.formats, strict=True):
            # Except in tables, the size of a file determines its number of splits.
            has_fixed_pieces = FORMATS[format].position != "number"
            if has_fixed_pieces and file.pieces != count_pieces("", format, compression, file.size):
                faults.add(
                    "P2", PLAN_NAME, f"{file.name} has another number of splits", value=file.pieces
                )
    if len(manifest["shards"]) != plan.shards:
        faults.add(
            "P2",
            MANIFEST_NAME,
            f"lists {len(manifest['shards'])} shards, but the plan has {plan.shards}",
        )


def check_replaced(
    stored: Mapping[str, Any], plan: Plan, manifest: Manifest, faults: Faults
) -> None:
    """Check P2 of `removed.replaces` in plan.json.

    Whenever `remove` removes documents, it adds an entry to this list. The entry must describe the
    dataset as it was before this removal.

    Args:
        stored: The content of plan.json.
        plan: The plan opened from it.
        manifest: The manifest of this dataset.
        faults: Receives the faults.
    """
    entries, shards = replaced(stored), dict(enumerate(manifest["shards"]))
    for i in reversed(range(len(entries))):
        # This undoes one removal after the other, from the last to the first.
        shards |= {int(b): entry for b, entry in entries[i]["shards"].items() if b.isdecimal()}
        own_fingerprint, plan_digest = plan_replaced(stored, plan, i)
        # The stored digests must belong to the manifest as it was before this removal.
        manifest_before = {
            **{key: value for key, value in manifest.items() if key != "removed"},
            "fingerprint": own_fingerprint,
            "plan": {**manifest["plan"], "digest": plan_digest},
            "shards": [shards[b] for b in sorted(shards)],
            "ledger": entries[i]["ledger"],
        }
        if digest := entries[i].get("removed"):
            manifest_before["removed"] = named_removal(
                {"removed": {"digest": digest, "replaces": entries[:i]}}
            )
        expected = {
            "fingerprint": own_fingerprint,
            "plan": plan_digest,
            "digest": own_digest(as_stored(manifest_before, LATER)),
        }
        for key, value in expected.items():
            if entries[i][key] != value:
                message = (
                    f"removed.replaces[{i}].{key} should be {value}, the value before the"
                    " documents were removed"
                )
                faults.add("P2", PLAN_NAME, message, value=entries[i][key])


def _named(manifest: Manifest) -> set[str]:
    """Return the names of all files that a dataset may have."""
    named = {MANIFEST_NAME, manifest["plan"]["file"], manifest["tokenizer"]["file"]}
    if "removed" in manifest:
        named.add(REMOVED_NAME)
    named.add(FIRST_SEEN_NAME)  # A publication that was interrupted may leave this file.
    for b in range(len(manifest["shards"])):
        named |= {shard_name(b), receipt_name(b), rejects_name(b)}
    return named


def check_objects(out: Remote, manifest: Manifest, faults: Faults) -> None:
    """Check P1 on object storage: every object below the URL is a file of the dataset."""
    named = _named(manifest)
    for name, _ in out.list():
        if name not in named:
            faults.add("P1", _readable(name), "does not belong to a dataset; remove it")


def check_listing(directory: Path, manifest: Manifest, faults: Faults) -> None:
    """Check P1: the directory contains only the dataset's files, no links and no empty folders."""
    named = _named(manifest)

    def unreadable(error: OSError) -> None:
        faults.add(
            "P1",
            _readable(os.path.relpath(error.filename, directory)),
            f"cannot be listed: {error.strerror}",
        )

    for folder, folders, names in os.walk(directory, onerror=unreadable):
        if not folders and not names:
            path = os.path.relpath(folder, directory)
            faults.add("P1", _readable(path), "is an empty folder; remove it")
        for name in sorted(names) + sorted(
            n for n in folders if os.path.islink(os.path.join(folder, n))
        ):
            path = os.path.relpath(os.path.join(folder, name), directory)
            if os.path.islink(os.path.join(folder, name)):
                faults.add("P1", _readable(path), "is a symbolic link, which a dataset never has")
            elif path not in named:
                faults.add(
                    "P1",
                    _readable(path),
                    "does not belong to a dataset; remove it. It may be left from a build that"
                    " was killed",
                )


def _readable(path: str) -> str:
    """Return a path as text, with bytes that are not valid UTF-8 escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def check_shard_files(
    directory: Path,
    shard: int,
    entry: Mapping[str, Any],
    plan_digest: str,
    plan: Plan,
    faults: Faults,
) -> tuple[bool, dict[str, Any] | None]:
    """Check file, receipt and rejects of one shard: P1, P2, and P16 of the ledger.

    Args:
        directory: Directory of the dataset.
        shard: Number of the shard.
        entry: The shard's entry in the manifest.
        plan_digest: Digest of plan.json.
        plan: The dataset's plan.
        faults: Receives the faults.

    Returns:
        Whether the shard's file can be read, and the shard's receipt (None if it is invalid).
    """
    is_there = _check_file(directory, shard_name(shard), entry, faults)
    name = receipt_name(shard)
    try:
        receipt_and_data = read_receipt(LocalFolder(directory), shard)
    except PlanError as error:
        faults.add("P1", name, str(error))
        return is_there, None
    if receipt_and_data is None:
        faults.add("P1", name, "is missing or not a receipt")
        return is_there, None
    receipt, data = receipt_and_data
    # A changed receipt would cause many other faults, so only its digest is reported.
    if digest_of(data) != entry["receipt_digest"]:
        faults.add(
            "P1",
            name,
            f"its digest is {digest_of(data)}",
            value=entry["receipt_digest"],
        )
        return is_there, None
    # A removal keeps the receipts of all shards that it does not change.
    if receipt["plan_digest"] != plan_digest_of(plan.stored, plan_digest, shard):
        faults.add("P2", name, "belongs to another plan", value=receipt["plan_digest"])
    for key in ("file", "rows", "segments", "tokens", "bytes", "digest"):
        if receipt[key] != entry[key]:
            faults.add(
                "P2",
                name,
                f"{key} should be {entry[key]!r}, as in the manifest",
                value=receipt[key],
            )
    # The checks of counts use the names in the ledger, so all of them must be there.
    try:
        sound = is_ledger(
            receipt["ledger"], [s.name for s in plan.sources], [t.name for t in plan.tasks]
        )
    except PlanError as error:
        faults.add("P16", name, str(error))
        return is_there, None
    if not sound:
        faults.add("P16", name, "the ledger does not have the keys and counts of a ledger")
        return is_there, None
    if not _is_sound(receipt, plan):
        faults.add(
            "P2", name, "rejects or text_digests do not have the keys and values of a receipt"
        )
        return is_there, None
    for imbalance in imbalances(receipt["ledger"]):
        faults.add("P16", name, imbalance)
    _check_rejects(directory, shard, receipt, faults)
    return is_there, receipt


def _is_sound(receipt: Receipt, plan: Plan) -> bool:
    """Return whether `rejects` and `text_digests` of a receipt have the required keys."""
    rejects, texts = receipt["rejects"], receipt["text_digests"]
    return (
        (rejects is None or (isinstance(rejects, dict) and rejects.keys() >= REJECTS_KEYS))
        and isinstance(texts, dict)
        and texts.keys() == {source.name for source in plan.sources}
    )


def _check_rejects(directory: Path, shard: int, receipt: Receipt, faults: Faults) -> None:
    """Check P1 and P2 of a rejects file, and P16: the ledger counts the rejects in the file."""
    name, rejects = rejects_name(shard), receipt["rejects"]
    path = directory / name
    # The ledger counts rejects by source and reason, so the lines of the file are counted in the
    # same way.
    counted = {
        (source, reason): count
        for source, entry in receipt["ledger"]["sources"].items()
        for reason, count in entry["documents"]["rejected"].items()
    }
    listed: dict[tuple[str, str], int] = {}
    if rejects is None:
        if path.exists():
            faults.add("P1", name, "the receipt names no rejects, but this file exists")
            return
    else:
        if not _check_file(directory, name, rejects, faults):
            return
        try:
            for line in read_file(path).splitlines(keepends=True):
                record = decode(line, name)
                place = (record["source"], record["reason"])
                listed[place] = listed.get(place, 0) + 1
        except (DatasetError, LookupError, TypeError):
            faults.add("P2", name, "is not a list of rejects")
            return
        if rejects["documents"] != sum(listed.values()):
            faults.add(
                "P2", name, f"lists {sum(listed.values())} documents", value=rejects["documents"]
            )
    if listed != counted:
        faults.add(
            "P16",
            receipt_name(shard),
            "the rejects in the ledger differ from the rejects file",
        )


def _check_file(directory: Path, name: str, entry: Mapping[str, Any], faults: Faults) -> bool:
    """Check P1 of one file: its size and digest. Return whether it can be read."""
    path = directory / name
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            faults.add("P1", name, f"the file has {size} bytes and should have {entry['bytes']}")
            return path.is_file()
        digest = digest_of_file(path)
    except OSError as error:
        faults.add("P1", name, f"cannot be read: {error.strerror}")
        return False
    if digest != entry["digest"]:
        faults.add("P1", name, f"its digest is {digest} and should be {entry['digest']}")
    return True


def sound_ledgers(
    out: Folder, manifest: Manifest, plan: Plan, shards: Iterable[int]
) -> list[dict[str, Any]]:
    """Return the ledgers of `shards`, skipping invalid receipts, which other checks report."""
    sources, tasks = [s.name for s in plan.sources], [t.name for t in plan.tasks]
    ledgers: list[dict[str, Any]] = []
    for b in shards:
        with contextlib.suppress(PlanError):
            pair = read_receipt(out, b)
            if pair and digest_of(pair[1]) == manifest["shards"][b]["receipt_digest"]:
                ledgers += (
                    [pair[0]["ledger"]] if is_ledger(pair[0]["ledger"], sources, tasks) else []
                )
    return ledgers


def check_sum(manifest: Manifest, total: Ledger, faults: Faults) -> None:
    """Check P16: the manifest's ledger is the sum of the receipts' ledgers, and balances."""
    if total != manifest["ledger"]:
        faults.add("P16", MANIFEST_NAME, "the ledger is not the sum of the receipts' ledgers")
    for imbalance in imbalances(total, is_total=True):
        faults.add("P16", MANIFEST_NAME, imbalance)


TOLERANCE = 4e-9
"""Tolerance for comparing thresholds and rates.

Math libraries differ in the last digits, and `law_version` 1 interpolated with an error of 2e-9.
"""


def check_plan_follows(plan: Plan, faults: Faults) -> None:
    """Check P22: plan.json follows from its recipe, tokenizer.json, file list and estimates.

    The sources are not read.
    """
    try:
        expected = _worked_out_again(plan)
    except PackprepError as error:
        faults.add(
            "P22", PLAN_NAME, f"its recipe, tokenizer and files do not give a valid plan: {error}"
        )
        return
    stored = json_value({key: plan.stored[key] for key in expected})
    stored["sources"] = [
        {key: source[key] for key in expected_entry}
        for source, expected_entry in zip(stored["sources"], expected["sources"], strict=True)
    ]
    # The last digits of resolved numbers depend on the math library, so near values count as equal.
    for task, expected_entry in zip(stored["tasks"], expected["tasks"], strict=True):
        if _is_near(task["resolved"], expected_entry["resolved"]):
            expected_entry["resolved"] = task["resolved"]
    for message in changed_keys(expected, stored, "{} is {} when recomputed, but {} in the plan"):
        faults.add("P22", PLAN_NAME, message)


def _worked_out_again(plan: Plan) -> dict[str, Any]:
    """Derive the computed keys of plan.json again with `follows`, and return them.

    Raises:
        PackprepError: If recipe, tokenizer, files and estimates do not give a valid plan.
    """
    stored, recipe = plan.stored, plan.recipe
    lacking = [
        key
        for source in stored["sources"]
        for key in ("tokens_per_byte", "patterns")
        if source[key] is None
    ]
    if lacking or stored["beside_tokenizer"] is None:
        raise PlanError(f"key {(lacking or ['beside_tokenizer'])[0]!r} is missing")
    vocabulary = _vocabulary(plan)
    tasks = resolve(recipe, ids_of(vocabulary), vocabulary.mode_tokens)
    tokens_per_byte = [source["tokens_per_byte"] for source in stored["sources"]]
    for source in plan.sources:
        _check_ratios(source)
    once = [int(source.weights().sum()) for source in plan.sources]
    for source, repeat in zip(plan.sources, repeats(recipe, once, tokens_per_byte), strict=True):
        # This check comes first, because a wrong number of passes could make huge arrays below.
        if source.repeat != repeat:
            raise PlanError(
                f"source {source.name!r} should have repeat {repeat}, but has {source.repeat} in"
                " the plan"
            )
    return json_value(
        follows(
            recipe,
            vocabulary,
            tasks,
            plan.sources,
            tokens_per_byte,
            plan.is_store,
            stored.get("has_chats", False),
        )
    )


def _vocabulary(plan: Plan) -> Vocabulary:
    """Make the vocabulary again from the stored tokenizer.json, and return it.

    The tokens that packprep added to tokenizer.json are removed first. Making the vocabulary adds
    the tokens that the recipe requires.

    Raises:
        PlanError: If the new tokenizer.json differs from the stored one.
    """
    recipe, stored = plan.recipe, plan.vocabulary
    resolved = resolve_again(
        stored.tokenizer_json,
        len(stored.added_tokens),
        plan.stored["beside_tokenizer"] or [],
        recipe.tokenizer,
        recipe.specials,
        Needs(*needs_of(recipe)),
    )
    if resolved.digest != stored.digest:
        raise PlanError("tokenizer.json differs from the tokenizer with its added_tokens")
    return resolved


def _check_ratios(source: PlannedSource) -> None:
    """Check the ratios of a source. A ratio estimates the text bytes in 1024 bytes of a file.

    Raises:
        PlanError: If a ratio is out of range, or no file of the source has the ratio's format.
    """
    formats = {format_name(*kind) for kind in source.files.kinds}
    greatest_ratio = highest_ratio(source)
    greatest_bytes = max(
        (max(piece_bytes, default=0) for piece_bytes in source.files.piece_bytes.values()),
        default=0,
    )
    for name, ratio in source.ratios.items():
        if (
            name not in formats
            or not 1 <= ratio <= greatest_ratio
            or greatest_bytes * ratio >= 1 << 62
        ):
            raise PlanError(
                f"source {source.name!r} has the ratio {ratio} for {name}, which is not possible"
            )


def _is_near(stored: Any, expected: Any) -> bool:
    """Return whether two JSON values are equal, except for the last digits of numbers.

    Math libraries differ in these digits.
    """
    if isinstance(stored, dict) and isinstance(expected, dict):
        return stored.keys() == expected.keys() and all(
            _is_near(stored[key], expected[key]) for key in stored
        )
    if isinstance(stored, list) and isinstance(expected, list):
        return len(stored) == len(expected) and all(map(_is_near, stored, expected))
    if type(stored) is int and type(expected) is int:
        return abs(stored - expected) <= 1 + TOLERANCE * abs(expected)
    if type(stored) is float and type(expected) is float:
        return abs(stored - expected) <= TOLERANCE
    return bool(stored == expected)


def check_reject_limit(plan: Plan, total: Ledger, faults: Faults) -> None:
    """Check P22: the dataset's share of bad documents is at most `max_bad_fraction`."""
    if fault := bad_fault(total, plan.max_bad_fraction):
        faults.add("P22", MANIFEST_NAME, fault)


def check_inputs(plan: Plan, faults: Faults) -> list[Files | None]:
    """Check P22 against the sources: the plan's patterns find the plan's files and splits.

    Returns:
        The current files of each source, or None for a source if names or sizes differ from the
        plan.
    """
    found_files: list[Files | None] = []
    for source, planned in zip(plan.sources, plan.stored["sources"], strict=True):
        found_files.append(None)
        try:
            if source.in_store:
                found_files[-1] = files_in(source.store, source.name, source.index)
                continue
            _, current_files = find_below(
                source.source, source.index, source.prefix, planned["patterns"]
            )
            found_sizes, planned_sizes = (
                dict(zip(files.names, files.sizes.tolist(), strict=True))
                for files in (current_files, source.files)
            )
            for name in sorted(found_sizes.keys() ^ planned_sizes.keys()):
                template = (
                    "its patterns find {!r}, which is not in the plan"
                    if name in found_sizes
                    else "its patterns do not find {!r}"
                )
                faults.add("P22", PLAN_NAME, f"source {source.name}: {template.format(name)}")
            own_files = _check_pieces(
                source,
                [name for name, size in planned_sizes.items() if found_sizes.get(name) == size],
                faults,
            )
            found_files[-1] = own_files if found_sizes == planned_sizes else None
        except PackprepError as error:
            faults.add("P22", PLAN_NAME, f"source {source.name}: {error}")
    return found_files


def _check_pieces(source: PlannedSource, names: Sequence[str], faults: Faults) -> Files:
    """Check that files have as many splits as in the plan, and return the files as they are now.

    For tables, also check that each split has as many text bytes as in the plan. `names` must
    contain only files that have the same size as in the plan.
    """
    index_of_file = {name: i for i, name in enumerate(source.files.names)}
    sizes = source.files.sizes[[index_of_file[name] for name in names]]
    own_files = Files(
        source.index,
        names,
        sizes,
        source.source.format,
        source.prefix,
        text_key=source.source.text_key,
    )
    for k, (name, pieces) in enumerate(zip(names, own_files.pieces.tolist(), strict=True)):
        i = index_of_file[name]
        message = f"source {source.name}: {name!r} has {pieces} splits"
        if pieces != source.files.pieces[i]:
            faults.add("P22", PLAN_NAME, message, value=int(source.files.pieces[i]))
        elif position_of(*own_files.formats[k]) == "number" and list(
            own_files.piece_bytes.get(k, ())
        ) != list(source.files.piece_bytes.get(i, ())):
            faults.add("P22", PLAN_NAME, f"{message}, but their contents differ from the plan")
    return own_files


def check_estimates(plan: Plan, files: Sequence[Files | None], faults: Faults) -> None:
    """Check P22 against the sources: the plan's estimates follow from its calibration sample.

    The same calibration sample is read again. The estimates are not compared with the complete
    sources.

    Args:
        plan: The dataset's plan.
        files: The result of `check_inputs`.
        faults: Receives the faults.
    """
    for source, planned, own_files in zip(plan.sources, plan.stored["sources"], files, strict=True):
        if own_files is None:  # P17 or P22 already reports the files that differ from the plan.
            continue
        messages: list[list[str]] = []
        words = "{} is {} in the calibration sample, but {} in the plan"
        try:
            for estimates in _sampled_again(plan, source, planned, own_files):
                piece_bytes = {i: list(of_file) for i, of_file in source.files.piece_bytes.items()}
                stored = {
                    key: piece_bytes if key == "piece_bytes" else planned[key] for key in estimates
                }
                messages.append(changed_keys(estimates, stored, words, f"sources[{source.index}]"))
                if not messages[-1]:
                    break
        except PackprepError as error:
            messages.append([f"source {source.name}: {error}"])
        for message in messages[0] if messages and messages[-1] else ():
            faults.add("P22", PLAN_NAME, message)


def _sampled_again(
    plan: Plan, source: PlannedSource, planned: Mapping[str, Any], files: Files
) -> Iterator[dict[str, Any]]:
    """Yield the estimates that the plan may store for a source, and the sizes of its splits.

    Most sources have one result. A source has up to three results if it was planned from a token
    store, but is now read as text. The plan may store any of the three. The first comes from the
    token store, if it can be opened. The second comes from the text, sampled in the way that is
    used for local files. The third comes from the text, sampled in the way that is used for a URL,
    which reads fewer but longer parts of the files.

    A source with expressions has no result from the text if it was planned from a store, and no
    result from a store if it was planned from the text.
    """
    resolved = {**UNSAMPLED, "repeat": source.repeat, "prefix": planned["prefix"]}
    new_source = PlannedSource(
        source.source,
        source.index,
        source.prefix,
        files,
        source.first_file,
        resolved,
        source.seed,
        plan.is_store,
        kinds=source.kinds,
        stream=source.stream,
    )

    def found(estimates: Estimates, known_estimates: list[dict[str, Any]]) -> dict[str, Any]:
        piece_bytes = {i: list(of_file) for i, of_file in new_source.files.piece_bytes.items()}
        return {
            **stored_estimates(estimates, new_source, planned["text_bytes"], known_estimates),
            "piece_bytes": piece_bytes,
        }

    in_store = planned["prefix"].startswith(IN_STORE)
    # With expressions, a store counts documents that a sample of the text only estimates.
    is_other = source.passes is not None and source.in_store != in_store
    if source.in_store:
        if not is_other:
            yield found(estimates_in(source.store, new_source), [])
        return
    if in_store:
        with contextlib.suppress(PackprepError):
            yield found(
                estimates_in(open_store(planned["prefix"].removeprefix(IN_STORE)), new_source), []
            )
    if is_other:
        return
    for at_url in (False, True) if in_store else (new_source.planned_at_url,):
        new_source.planned_at_url = at_url
        settings, template = plan.recipe.documents, plan.stored["chat_template"]
        yield found(
            *sampled(new_source, plan.engine, plan.vocabulary, settings, template, plan.is_store)
        )


def check_recipe(plan: Plan, recipe: Recipe, moved: Mapping[str, str], faults: Faults) -> None:
    """Check P22 against a recipe given by the user.

    The recipe must equal the recipe in the plan. It must give the same file patterns, token stores,
    tokenizer and chat template.

    Args:
        plan: The dataset's plan.
        recipe: The recipe to compare with.
        moved: Source name → current location of the source.
        faults: Receives the faults.

    Raises:
        PackprepError: If a token store or the tokenizer cannot be read.
    """
    # The stored recipe has one row length, and the recipe of a store has no passes.
    if plan.is_store:
        recipe = of_store(recipe)
    else:
        recipe = next(
            (r for r in recipe.by_length() if r.seq_length == plan.recipe.seq_length), recipe
        )
    moved_stores = {name: place for name, place in moved.items() if place.startswith(IN_STORE)}
    recipe, stores = in_stores(recipe, moved_stores, plan.is_store)
    words = "{} is {} in the given recipe, but {} in the stored one"
    # Both recipes get all defaults, so that only differences in meaning remain.
    recipe_now, stored = (
        json_value(without_places(whole_recipe(r)))
        for r in (normalised(recipe), plan.stored["recipe"])
    )
    # A resumed build may change this limit. The manifest has the current value.
    stored["documents"]["max_bad_fraction"] = plan.max_bad_fraction
    messages = changed_keys(recipe_now, stored, words)
    for source in recipe.sources:
        planned = next((s for s in plan.stored["sources"] if s["name"] == source.name), None)
        if planned is None:
            continue
        patterns = patterns_of(source, recipe.base, stores)
        if planned["patterns"] not in (None, patterns):
            messages.append(
                f"the patterns of source {source.name} are {patterns} in the given recipe, but"
                f" {planned['patterns']} in the plan"
            )
        if source.name in stores and planned["store"] not in (None, *stores[source.name].digests):
            messages.append(other_store(source.name, stores[source.name], planned["store"]))
    # A path may lead to another tokenizer now, so the content is compared.
    vocabulary = resolve_vocabulary(
        recipe.tokenizer, recipe.base, recipe.specials, Needs(*needs_of(recipe))
    )
    if vocabulary.digest != plan.vocabulary.digest:
        messages.append(
            f"the tokenizer of the given recipe has another digest, {vocabulary.digest}"
        )
    if plan.stored["beside_tokenizer"] not in (None, json_value(vocabulary.beside)):
        messages.append("the given recipe has other files next to its tokenizer")
    # A chat template comes from the recipe, from the tokenizer's folder, or from a token store.
    template, documents = None, recipe.documents
    if documents.loss_spans == "use":
        template = find_template(
            documents.chat_template, recipe.base, recipe.tokenizer, documents.template_date
        )
    template = template_of(template, stores)
    if template != plan.stored["chat_template"]:
        messages.append("the given recipe has another chat template")
    for message in messages:
        faults.add("P22", PLAN_NAME, message)
