"""Recompute every invariant of a dataset, and report which ones fail and where.

Shards are checked one by one, in one or several processes.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from packprep.building.array_tasks import share_of
from packprep.building.commit import Receipt
from packprep.building.ledger import ENCODER, MEDIA, WEIGHTED, Ledger, add_ledgers, sums_of
from packprep.building.plan import (
    Plan,
    at_text,
    lacks_fields,
    moved_prefixes,
    open_plan,
    stored_plan,
)
from packprep.building.processes import Do, Report, in_processes, one_by_one
from packprep.building.run import Progress
from packprep.dataset.epochs.resampling import EPOCHS
from packprep.dataset.loader import Dataset, open_dataset
from packprep.dataset.manifest import Manifest, ShardEntry, read_manifest
from packprep.dataset.order import integer
from packprep.dataset.segments import Arrays, Segments
from packprep.dataset.shard import open_shard
from packprep.documents.store import STORE
from packprep.errors import DatasetError, PlanError, RecipeError, SourceError
from packprep.format.json_files import (
    MANIFEST_NAME,
    PLAN_NAME,
    REMOVED_NAME,
    TOKENIZER_NAME,
    receipt_name,
    rejects_name,
    shard_name,
)
from packprep.kernel import warm_kernels
from packprep.messages import listed, put_line
from packprep.randomness import REPLAY, bits64, permute, text_key
from packprep.recipe import Recipe
from packprep.sources.formats import Decoders
from packprep.sources.slices import IN_STORE
from packprep.storage import Folder, LocalCopy, Remote, folder_at, local_copy
from packprep.tokenizer.engines import engine_in_words
from packprep.verification.arrays import (
    BLOCKS,
    WEIGHTS,
    arrays_in_epoch,
    check_arrays,
    check_layout,
    check_same_tokens,
)
from packprep.verification.coverage import (
    Runs,
    check_apart,
    check_documents,
    check_passes,
    documents_of_passes,
    read_rejects,
)
from packprep.verification.faults import Faults, line_of
from packprep.verification.on_disk import (
    check_estimates,
    check_foundations,
    check_inputs,
    check_listing,
    check_manifest,
    check_manifest_digest,
    check_objects,
    check_plan_follows,
    check_recipe,
    check_reject_limit,
    check_replaced,
    check_shard_files,
    check_sum,
    sound_ledgers,
)
from packprep.verification.replay import ShardToReplay, replay_shard, replay_some
from packprep.verification.stores import check_store_shard

PROMISES = {
    "P1": ("the dataset has every file that it names, with its size and digest, and no other file"),
    "P2": "plan, manifest and receipts agree with each other",
    "P3": (
        "a shard is a standard safetensors file with exactly the arrays, dtypes and shapes of"
        " its layout"
    ),
    "P4": "row_offsets starts at 0, never decreases, and ends at the number of segments",
    "P5": "in every row, cu_seqlens starts at 0, strictly increases, and ends within the row",
    "P6": (
        "segment_ids are 1, 2, … in row order in exactly the slots of cu_seqlens, and 0 in padding"
    ),
    "P7": "padding has pad_id as token and label, and no loss",
    "P8": "every token and label is an id below vocab_size",
    "P9": (
        "a next-token segment is trained in the slots whose target follows its prefix and is"
        " trainable, but never in its last slot"
    ),
    "P10": (
        "labels are the token of the next slot in the same segment, or pad_id. For same-position"
        " tasks, they are the original token of the same or the next slot"
    ),
    "P11": (
        "a segment's header names a known source and file. The segment's key is computed from its"
        " document, pass and start, and determines its task"
    ),
    "P12": (
        "a segment has exactly the number of slots of its task's length formula. Its bos, mode"
        " token and eos are in the correct slots"
    ),
    "P13": (
        "a segment has the prefix of its task, and its noise and loss weight are finite and in"
        " range"
    ),
    "P14": "sentinels replace the spans in the inputs and precede their tokens in the targets, each"
    " once and in order",
    "P15": (
        "the segments of a document follow each other without gap or overlap, starting with its"
        " first token"
    ),
    "P16": "the ledger balances, and its counts match the arrays",
    "P17": (
        "rebuilding a segment from its source gives the stored bytes, and inverting it gives the"
        " document"
    ),
    "P18": (
        "the noise of a same-position segment follows from its key: corrupted slots, loss, level"
        " and weight"
    ),
    "P19": (
        "trained ranges are inside their segment, ascend, and have weights above 0. Slots"
        " outside them and repeated slots are not trained"
    ),
    "P20": (
        "block_diffusion has the number of blocks that its slots need, with levels and weights"
        " in range. Eos that fill up a block are trained, and this block is whole"
    ),
    "P21": (
        "every document is in the segments of one shard, or in its rejects with a reason, once"
        " for each pass of the plan"
    ),
    "P22": (
        "the plan follows from its recipe and tokenizer, from the files that its patterns find,"
        " and from its estimates"
    ),
    "P23": (
        "documents in removed.json have no tokens and no trained slots, and only their segments"
        " have no tokens"
    ),
    "P24": (
        "if rows have an encoder and a decoder sequence, prefixes fit in encoder_length and the"
        " other slots in decoder_length"
    ),
    "P25": (
        "media spans are complete in their segment, in order, and each has a ref. Their slots"
        " have only slot tokens, which are not trained"
    ),
}
"""Name of each invariant → its statement. `docs/format.md` explains the invariants."""

ALL = -1
LENGTHS = "lengths"
"""Value of `kind` in a report that compares the datasets of a build with several row lengths."""
MOST_PLACES = 20  # Maximum number of source locations in a message.


class ShardToVerify(NamedTuple):
    """A shard to verify.

    Attributes:
        number: Number of the shard.
        entry: The shard's entry in the manifest.
        replay: Indices of the segments to rebuild, or None to rebuild none. Ignored if `whole` is
            set.
        whole: Whether to rebuild the complete shard and compare all of it.
    """

    number: int
    entry: ShardEntry
    replay: np.ndarray | None
    whole: bool

    def __str__(self) -> str:
        return f"verification of shard {self.number}"


class Result(NamedTuple):
    """The result of verifying one shard.

    Attributes:
        faults: The faults that were found.
        ledger: The ledger of the shard's receipt, or None if the receipt is invalid.
        replayed: Number of rebuilt segments, or of rebuilt documents of a token store. None if a
            whole shard was to be rebuilt, but a source changed.
        runs: The result of `check_documents`, or None if damage prevents this check. Also None for
            a token store.
        passes: The result of `documents_of_passes`. It is empty if `runs` is None.
    """

    faults: Faults
    ledger: dict[str, Any] | None
    replayed: int | None
    runs: Runs | None
    passes: Mapping[tuple[str, int], int]


class DatasetCheck(NamedTuple):
    """A dataset to verify, and the collection of its faults."""

    local: LocalCopy
    manifest: Manifest
    plan: Plan
    faults: Faults


def verify_dataset(
    directory: str | os.PathLike | Folder,
    replay: int | None,
    moved: Mapping[str, str],
    array: tuple[int, int],
    workers: int,
    progress: Progress,
    only: Sequence[int] | None = None,
    replay_seed: int = 0,
    recipe: Recipe | None = None,
    epoch: int = 0,
) -> dict[str, Any]:
    """Check every invariant of a dataset. An array task checks only its share of the shards.

    Array task 0 also checks the files of the whole dataset, such as dataset.json. No shard is
    checked if plan.json, tokenizer.json or removed.json is damaged.

    Args:
        directory: Directory or URL of the dataset or token store.
        replay: Number of segments that this array task rebuilds from their sources. `ALL` (-1)
            rebuilds whole shards, and None rebuilds nothing.
        moved: Source name → current location of the source.
        array: Index and count of this array task.
        workers: Number of processes. 0 runs in this process.
        progress: Shows the progress.
        only: Numbers of the shards to check, ascending. Shards of other array tasks are ignored.
            None checks all shards of this task. For a shard that is not checked, only the receipt
            is read, because the ledgers of all shards are added up.
        replay_seed: Random seed for choosing the segments to rebuild, if `replay` is their number.
        recipe: A recipe from `complete`, which is compared with the plan, or None.
        epoch: Above 0, check the rows as the loader resamples them in this epoch.

    Returns:
        A dict with the keys `directory`, `kind`, `epoch`, `shards`, `rows`, `segments`, `tokens`,
        `replayed`, `faults` and `listed`. `faults` is the number of faults. `listed` has
        descriptions of at most `MAX_LISTED` faults per invariant and file. The dict also has
        `replay_seed` if `replay` is a number of segments.

    Raises:
        ArgumentError: If `epoch` is out of range, or a task cannot be resampled.
        DatasetError: If the directory is not a dataset, or the manifest does not have the values
            that resampling needs.
        PlanError: If plan.json is missing.
        RecipeError: If `moved` has an unknown source. Also for a token store, if `replay` is a
            number of segments or `epoch` is not 0.
    """
    with local_copy(folder_at(directory)) as local:
        folder, is_first_task = local.folder, array[0] == 0
        manifest = _manifest_to_verify(local, replay, epoch)
        faults = Faults()
        if is_first_task:
            _check_files(local, manifest, faults)
        # Nothing can be recomputed from a damaged plan.
        if not check_foundations(folder, manifest, faults):
            return _report(local, manifest, epoch, [], [], faults)
        stored = stored_plan(folder)
        assert stored is not None
        prefixes = moved_prefixes(stored, moved)
        if replay is not None:
            prefixes = _prefixes_to_read(stored, prefixes, moved, progress)
        plan = open_plan(folder, prefixes)
        plan.max_bad_fraction = manifest.get("max_bad_fraction", plan.max_bad_fraction)
        if replay is not None:
            _say_other_engine(plan, progress)
        shards = min(len(manifest["shards"]), plan.shards)
        share: Sequence[int] = share_of(*array, shards)
        if only is not None:
            share = [b for b in only if b in share]
        check = DatasetCheck(local, manifest, plan, faults)
        # The first array task also checks the plan and the sum of all shards' ledgers.
        ledgers: list[Ledger] = []
        if is_first_task:
            _check_plan(check, stored, recipe, moved)
            files = check_inputs(plan, faults) if replay == ALL else []
            other_shards = sorted(set(range(shards)).difference(share))
            ledgers += sound_ledgers(local.out, manifest, plan, other_shards)
        items = _items(manifest, share, replay, replay_seed)
        results = _verify_shards(check, items, prefixes, epoch % EPOCHS, workers, progress)
        _check_together(check, results, ledgers if is_first_task else None)
        counts = [result.replayed for result in results.values()]
        if is_first_task and replay == ALL and None not in counts:
            check_estimates(plan, files, faults)  # Otherwise P17 reports the changed sources.
        report = _report(local, manifest, epoch, share, counts, faults)
        return report if replay in (None, ALL) else {**report, "replay_seed": replay_seed}


def _manifest_to_verify(local: LocalCopy, replay: int | None, epoch: int) -> Manifest:
    """Fetch the files of the whole dataset, check the options, and return the manifest.

    Raises:
        ArgumentError: If `epoch` is out of range, or a task cannot be resampled.
        DatasetError: If the directory is not a dataset, or the manifest does not have the values
            that resampling needs.
        PlanError: If plan.json is missing.
        RecipeError: For a token store, if `replay` is a number of segments or `epoch` is not 0.
    """
    folder = local.folder
    local.fetch(MANIFEST_NAME, PLAN_NAME, TOKENIZER_NAME, REMOVED_NAME)
    manifest = read_manifest(folder, stores=True)
    if not (folder / manifest["plan"]["file"]).exists():
        raise PlanError(
            f"{folder}: plan.json is missing, so nothing can be recomputed\nhint: restore the file"
        )
    if "kind" in manifest and (epoch or replay not in (None, ALL)):
        raise RecipeError(
            f"{local.out} is a token store, which supports only --replay all, without --epoch"
        )
    integer("epoch", epoch, 0, 1 << 63)
    if epoch:
        open_dataset(folder).check_redraw()
    return manifest


def _check_files(local: LocalCopy, manifest: Manifest, faults: Faults) -> None:
    """Check P1: the digest of the manifest, and the names of all files or objects."""
    check_manifest_digest(manifest, faults)
    if isinstance(local.out, Remote):
        check_objects(local.out, manifest, faults)
    else:
        check_listing(local.folder, manifest, faults)


def _prefixes_to_read(
    stored: Mapping[str, Any],
    prefixes: Sequence[str],
    moved: Mapping[str, str],
    progress: Progress,
) -> list[str]:
    """Return the location from which a rebuild reads each source, and print these locations.

    Raises:
        SourceError: If `moved` names files, but only a token store has the fields of the build.
    """
    names, prefixes_found = [source["name"] for source in stored["sources"]], list[str]()
    for i, (name, prefix) in enumerate(zip(names, prefixes, strict=True)):
        only_store = lacks_fields(stored, i)
        if only_store and not prefix.startswith(IN_STORE):
            raise SourceError(
                f"--source {name}={prefix}: source {name!r} was built from a token store without"
                " the fields of removed documents, so its files give other documents\n"
                f"hint: give the store as --source {name}={IN_STORE}FOLDER"
            )
        prefixes_found.append(prefix if only_store or name in moved else at_text(name, prefix))
    prefixes = prefixes_found
    locations = [f"{name} at {prefix}" for name, prefix in zip(names, prefixes, strict=True)]
    progress.say(f"reading the sources {listed(locations, MOST_PLACES)}")
    return prefixes


def _say_other_engine(plan: Plan, progress: Progress) -> None:
    """Print which tokenizer engine is used, if the plan names another engine."""
    engine = plan.text_engine
    if engine is not None and engine.name != plan.stored["engine"]["name"]:
        progress.say(engine_in_words(engine, "auto", plan.vocabulary))


def _check_plan(
    check: DatasetCheck, stored: dict[str, Any], recipe: Recipe | None, moved: Mapping[str, str]
) -> None:
    """Check that the manifest agrees with the plan (P2), and that the plan is correct (P22).

    If `recipe` is given, compare it with the plan.
    """
    plan, manifest, faults = check.plan, check.manifest, check.faults
    check_manifest(check.local.folder, plan, manifest, faults)
    check_replaced(stored, plan, manifest, faults)
    check_plan_follows(plan, faults)
    if recipe is not None:
        check_recipe(plan, recipe, moved, faults)


def _verify_shards(
    check: DatasetCheck,
    items: Sequence[ShardToVerify],
    prefixes: Sequence[str],
    epoch: int,
    workers: int,
    progress: Progress,
) -> dict[int, Result]:
    """Verify shards in `workers` processes, and return shard number → result."""
    results, entries = {}, check.manifest["shards"]
    progress.begin(sum(item.entry["bytes"] for item in items), len(entries), len(items))
    try:
        arguments = check.local, prefixes, check.manifest["plan"]["digest"], epoch
        if min(workers, len(items)) > 1:
            warm_kernels()  # Compile once, before workers are forked.
        for item, result in in_processes(_setup, arguments, items, workers, progress.add):
            progress.done(item)
            results[item.number] = result
    finally:
        progress.end()
    return results


def _check_together(
    check: DatasetCheck, results: Mapping[int, Result], ledgers: list[Ledger] | None
) -> None:
    """Collect the faults of all shards, and check P16, P21 and P22 of all shards together.

    Args:
        check: The dataset.
        results: Shard number → result.
        ledgers: The ledgers of the shards that are not in `results`, or None to skip P16 and P22.
    """
    plan, faults = check.plan, check.faults
    for result in results.values():
        faults.join(result.faults)
    if ledgers is not None:
        ledgers += [result.ledger for result in results.values() if result.ledger is not None]
        # A receipt that is missing or invalid is reported elsewhere, and would make every sum
        # wrong.
        if len(ledgers) == len(check.manifest["shards"]):
            total = add_ledgers(ledgers)
            check_sum(check.manifest, total, faults)
            check_reject_limit(plan, total, faults)
            # The counts of passes need all shards, so one of several array tasks cannot check them.
            if len(results) == plan.shards and all(result.runs for result in results.values()):
                counts = sum((Counter(result.passes) for result in results.values()), Counter())
                check_passes(plan, total, counts, faults)
    runs = [(b, runs) for b in sorted(results) if (runs := results[b].runs) is not None]
    check_apart(plan, runs, len(runs) == plan.shards, faults)


def _report(
    local: LocalCopy,
    manifest: Manifest,
    epoch: int,
    share: Sequence[int],
    replayed: Sequence[int | None],
    faults: Faults,
) -> dict[str, Any]:
    assert {fault["promise"] for fault in faults.listed} <= PROMISES.keys()
    entries = [manifest["shards"][b] for b in share]
    # A dataset at a URL was checked in a local copy, so messages get the URL back.
    for fault in faults.listed if local.is_copy else ():
        fault["message"] = local.named(fault["message"])
    faults.listed.sort(
        key=lambda f: (f["file"], int(f["promise"][1:]), f["row"] or 0, f["slot"] or 0)
    )
    return {
        "directory": str(local.out),
        "kind": manifest.get("kind", "dataset"),
        "epoch": epoch,
        "shards": len(share),
        "rows": sum(entry["rows"] for entry in entries),
        "segments": sum(entry["segments"] for entry in entries),
        "tokens": sum(entry["tokens"] for entry in entries),
        "replayed": sum(count or 0 for count in replayed),
        "faults": faults.total,
        "listed": faults.listed,
    }


def _items(
    manifest: Manifest, share: Sequence[int], replay: int | None, seed: int
) -> list[ShardToVerify]:
    entries = manifest["shards"]
    chosen: dict[int, np.ndarray] = {}
    if replay is not None and replay != ALL:
        counts = np.array([entries[b]["segments"] for b in share], np.int64)
        total = int(counts.sum())
        if total:
            # The choice depends on the fingerprint, the seed and the shards of this array task, but
            # not on the number of workers.
            key = bits64(text_key(manifest["fingerprint"], seed), REPLAY)
            picked = np.sort(permute(np.arange(min(replay, total)), total, key))
            ends = np.cumsum(counts)
            shard_of = np.searchsorted(ends, picked, "right")
            # Segments are numbered through these shards. Each shard gets its own numbers, from 0.
            for i in np.unique(shard_of):
                chosen[share[i]] = picked[shard_of == i] - (ends[i] - counts[i])
    return [ShardToVerify(b, entries[b], chosen.get(b), replay == ALL) for b in share]


def _setup(local: LocalCopy, prefixes: list[str], plan_digest: str, epoch: int) -> Do:
    directory = local.folder
    plan, decoders = open_plan(directory, prefixes), Decoders()
    dataset = open_dataset(directory) if epoch else None

    def check_item(item: ShardToVerify, report: Report) -> Result:
        files = shard_name(item.number), receipt_name(item.number), rejects_name(item.number)
        with local.fetched(*files):
            return check_files(item, report)

    def check_files(item: ShardToVerify, report: Report) -> Result:
        faults = Faults()
        # The receipt has the expected counts and digests of the shard, so it is checked first.
        is_there, receipt = check_shard_files(
            directory, item.number, item.entry, plan_digest, plan, faults
        )
        replayed: int | None = 0
        runs, passes = None, Counter[tuple[str, int]]()
        if plan.is_store:
            if is_there:
                replayed = check_store_shard(
                    plan, directory, item.number, receipt, item.whole, decoders, faults
                )
            report(0, item.entry["bytes"], item.entry["tokens"], 0)
            ledger = None if receipt is None else receipt["ledger"]
            return Result(faults, ledger, replayed, None, passes)
        arrays = _arrays_of(directory, dataset, plan, item, epoch, faults) if is_there else None
        if arrays is not None:
            rejects = None
            # The ledger and the rejects of an invalid receipt cannot be compared.
            if receipt is not None:
                _check_counts(plan, arrays, receipt, item.number, faults)
                rejects = read_rejects(directory, item.number, plan, receipt, faults)
            if receipt is not None and rejects is not None:
                runs = check_documents(plan, item.number, arrays, rejects, receipt, faults)
                passes = documents_of_passes(plan, arrays, rejects)
            # An unreadable source must not stop the checks of other shards.
            try:
                shard = ShardToReplay(plan, item.number, arrays, receipt, decoders, faults, epoch)
                if item.whole:
                    replayed = replay_shard(shard, rejects)
                elif item.replay is not None:
                    replayed = replay_some(shard, item.replay)
            except SourceError as error:
                faults.add("P17", shard_name(item.number), f"cannot be rebuilt: {error}")
        report(0, item.entry["bytes"], item.entry["tokens"], 0)
        ledger = None if receipt is None else receipt["ledger"]
        return Result(faults, ledger, replayed, runs, passes)

    return one_by_one(check_item)


def _arrays_of(
    directory: Path,
    dataset: Dataset | None,
    plan: Plan,
    item: ShardToVerify,
    epoch: int,
    faults: Faults,
) -> Arrays | None:
    """Check the arrays of one shard in an epoch, and return them.

    All invariants of arrays are checked: P3 to P15, P18 to P20 and P23 to P25. Return None if a
    fault makes it impossible to count the segments, or to restore their original tokens.

    Args:
        directory: Directory of the dataset.
        dataset: The dataset that resamples rows, or None in epoch 0.
        plan: The dataset's plan.
        item: The shard to verify.
        epoch: The epoch for which rows are resampled.
        faults: Receives the faults.
    """
    file = shard_name(item.number)
    try:
        shard = open_shard(
            directory / file,
            plan.recipe.seq_length,
            plan.token_dtype,
            rows=item.entry["rows"],
            segments=item.entry["segments"],
            compact=plan.recipe.output.columns != "full",
        )
        arrays: Arrays = shard.arrays
    except DatasetError as error:
        faults.add("P3", file, str(error))
        return None
    if not check_layout(plan, arrays, file, faults):
        return None
    if dataset is None:
        return arrays if check_arrays(plan, arrays, file, faults) else None
    # Resampling reads the stored rows, so damage may already show here.
    try:
        arrays_again = arrays_in_epoch(dataset, shard, epoch)
    except DatasetError as error:
        stored_faults = Faults()
        check_arrays(plan, arrays, file, stored_faults)  # A fault here explains the error.
        if not stored_faults.total:
            stored_faults.add("P12", file, f"cannot be resampled: {error}")
        faults.join(stored_faults)
        return None
    if not check_arrays(plan, arrays_again, file, faults, epoch):
        return None
    check_same_tokens(plan, arrays, arrays_again, file, faults, epoch)
    # A rebuild gives weights per slot, and not per block, for an epoch above 0.
    return {name: arrays_again[name] for name in (*shard.layout, WEIGHTS) if name not in BLOCKS}


def _check_counts(
    plan: Plan,
    arrays: Arrays,
    receipt: Receipt,
    shard: int,
    faults: Faults,
) -> None:
    """Check P16: the ledger counts the segments, tokens and slots of the arrays."""
    segments = Segments.of_arrays(arrays)
    # Segments of removed documents are not counted, as in the ledger.
    counts = _counted(plan, segments)
    name, ledger = receipt_name(shard), receipt["ledger"]
    tokens = sum(counted["tokens"] for counted in counts["tasks"].values())
    if receipt["tokens"] != tokens:
        faults.add("P16", name, f"the arrays have {tokens} tokens", value=receipt["tokens"])
    for task, counted in counts["tasks"].items():
        if ledger["tasks"].get(task) != counted:
            faults.add(
                "P16",
                name,
                f"task {task}: the ledger has {ledger['tasks'].get(task)}, the arrays have"
                f" {counted}",
            )
    for source, counted in counts["sources"].items():
        ledger_counts = ledger["sources"].get(source)
        if ledger_counts is None:
            faults.add("P16", name, f"source {source} is missing in the ledger")
            continue
        # The ledger also counts the padding of pad_seq_to_mult, which segments do not contain.
        slots = ledger_counts["slots"]["total"] - ledger_counts["slots"]["padding"]
        within = [ledger_counts["slots"].get(kind, 0) for kind in (WEIGHTED, MEDIA)]
        if [ledger_counts["segments"], ledger_counts["slots"]["used"], slots, *within] != [
            counted[key] for key in ("segments", "tokens", "slots", WEIGHTED, MEDIA)
        ]:
            faults.add(
                "P16",
                name,
                f"source {source}: the ledger's counts differ from the counts of the arrays,"
                f" {counted}",
            )
    if ledger["rows"] != len(arrays["row_offsets"]) - 1:
        faults.add(
            "P16",
            name,
            "the ledger has another number of rows than the shard",
            value=ledger["rows"],
        )
    prefix = segments.prefix[segments.has_tokens]
    inputs = None if plan.recipe.packing.sides is None else int(prefix.sum())
    if ledger.get(ENCODER) != inputs:
        faults.add("P16", name, f"the arrays have {inputs} {ENCODER}", value=ledger.get(ENCODER))


def _counted(plan: Plan, segments: Segments) -> dict[str, dict[str, dict[str, int]]]:
    """Count the segments that have tokens, by source and by task.

    Return {"sources": {name: counts}, "tasks": {name: counts}}. The counts are {"segments": …,
    "tokens": …, "slots": …}, with the keys of the ledger. The counts of a source also have the
    number of slots with a weight other than 1, and the number of media slots.
    """
    within = {WEIGHTED: segments.weighted_slots(), MEDIA: segments.media_slots()}
    counts: dict[str, dict[str, dict[str, int]]] = {"sources": {}, "tasks": {}}
    for kind, names, number in (
        ("sources", [source.name for source in plan.sources], segments.source),
        ("tasks", [task.name for task in plan.tasks], segments.task),
    ):
        for i, name in enumerate(names):
            task = plan.tasks[i] if kind == "tasks" else None
            counts[kind][name] = sums_of(segments, (number == i) & segments.has_tokens, task)
            if kind == "sources":
                of_kinds = {
                    slot_kind: int(slots[number == i].sum()) for slot_kind, slots in within.items()
                }
                counts[kind][name] |= of_kinds
    return counts


def print_report(report: dict[str, Any]) -> None:
    """Print one line per listed fault, and a line with the verdict."""

    def some(count: int, noun: str) -> str:
        return f"{count:,} {noun}{'' if count == 1 else 's'}"

    for fault in report["listed"]:
        put_line(line_of(fault))
    if report["faults"] > len(report["listed"]):
        put_line(f"… and {report['faults'] - len(report['listed'])} more")
    faults = some(report["faults"], "fault")
    verdict = faults if report["faults"] else "every invariant holds"
    if report["kind"] == LENGTHS:
        summary = (
            f"{some(report['datasets'], 'dataset')}, {some(report['documents'], 'document')}"
            " compared"
        )
        put_line(f"{report['directory']}: across its row lengths {verdict} ({summary})")
        return
    counts_in_words = ", ".join(
        some(report[f"{noun}s"], noun) for noun in ("shard", "row", "segment", "token")
    )
    counts_in_words = counts_in_words if report["shards"] else "no shard was checked"
    unit = "document" if report["kind"] == STORE else "segment"
    replay_in_words = (
        f"; {some(report['replayed'], unit)} rebuilt from their sources"
        if report["replayed"]
        else ""
    )
    if "replay_seed" in report:
        replay_in_words += f", selected by --replay-seed {report['replay_seed']}"
    if report["epoch"]:
        verdict += f" in epoch {report['epoch']:,}"
    put_line(f"{report['directory']}: {verdict} ({counts_in_words}{replay_in_words})")
