"""Check P1, P2 and P21 across the datasets of a build with several row lengths.

`verify_dataset` checks each dataset first. This module checks mixture.json, and compares the
datasets' plans, text digests and documents. Shard b reads the same parts of the sources in every
dataset, so an array task compares only the shards that it also verifies.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from packprep.building.array_tasks import share_of
from packprep.building.commit import read_receipt
from packprep.building.lengths import lengths_mixture
from packprep.building.plan import Plan, lengths_in, open_plan, stored_plan
from packprep.building.planning import changed_keys
from packprep.building.processes import Do, Report, in_processes, one_by_one
from packprep.building.removal import REMOVED
from packprep.building.work import OTHER_LENGTH
from packprep.dataset.manifest import Manifest, read_manifest
from packprep.dataset.mixture import mixture_of
from packprep.dataset.segments import Arrays, header_columns, records_of
from packprep.dataset.shard import shard_in
from packprep.errors import DatasetError
from packprep.format.json_files import (
    MANIFEST_NAME,
    MIXTURE_NAME,
    PLAN_NAME,
    REMOVED_NAME,
    TOKENIZER_NAME,
    encode,
    receipt_name,
    rejects_name,
    shard_name,
)
from packprep.storage import Folder, LocalCopy, LocalFolder, folder_at, local_copy
from packprep.verification import LENGTHS
from packprep.verification.coverage import Locations, in_words, read_rejects
from packprep.verification.faults import MAX_LISTED, Faults

_OF_ONE_PLAN = ("digest", "engine", "fingerprint", "law_version", "made_with", "removed")
"""Keys of plan.json whose values may differ between the datasets of one build."""


class _Opened(NamedTuple):
    """An opened dataset of the build. `name` is the name of its folder."""

    name: str
    local: LocalCopy
    manifest: Manifest
    plan: Plan


class _ShardToCompare(NamedTuple):
    """The number of a shard to compare across all datasets."""

    number: int

    def __str__(self) -> str:
        return f"comparison of shard {self.number} across row lengths"


def verify_lengths(
    place: str | Folder, reports: Sequence[dict[str, Any]], array: tuple[int, int], workers: int
) -> dict[str, Any] | None:
    """Check the invariants across the datasets of a folder with several row lengths.

    Args:
        place: The folder, or its URL.
        reports: The result of `verify_dataset` for each dataset in the folder.
        array: Index and count of this array task. Task 0 checks mixture.json and the plans.
        workers: Number of processes. 0 runs in this process.

    Returns:
        A report with the same form as the result of `verify_dataset`, and two more keys: `datasets`
        (their number) and `documents` (number of compared documents). Documents are compared only
        if `reports` has no fault and the plans agree. None if the folder does not have several row
        lengths.
    """
    out, faults = folder_at(place), Faults()
    if not lengths_in(out):
        return None
    documents = 0
    with ExitStack() as stack:
        # Documents are compared only between valid datasets, so each difference is new.
        sound = not any(report["faults"] for report in reports)
        opened = [_open(stack, report["directory"]) for report in reports] if sound else []
        # Every array task needs the result, but only task 0 reports it, so that faults are counted
        # once.
        _check_plans(opened, unlike := Faults())
        if array[0] == 0:
            _check_mixture(out, [report["directory"] for report in reports], faults)
            faults.join(unlike)
        if opened and not unlike.total:
            items = [_ShardToCompare(b) for b in share_of(*array, opened[0].plan.shards)]
            for _, (shard_faults, count) in in_processes(
                _setup, (opened,), items, min(workers, len(items)), _unreported
            ):
                faults.join(shard_faults)
                documents += count
    faults.listed.sort(key=lambda fault: (fault["file"], int(fault["promise"][1:])))
    sums = {
        key: sum(report[key] for report in reports)
        for key in ("shards", "rows", "segments", "tokens")
    }
    return {
        "directory": str(out),
        "kind": LENGTHS,
        "datasets": len(reports),
        **sums,
        "documents": documents,
        "faults": faults.total,
        "listed": faults.listed,
    }


def _unreported(*_: int) -> None:
    """Ignore the progress, because `verify_dataset` has already reported it for these shards."""


def _open(stack: ExitStack, directory: str) -> _Opened:
    local = stack.enter_context(local_copy(folder_at(directory)))
    local.fetch(MANIFEST_NAME, PLAN_NAME, TOKENIZER_NAME, REMOVED_NAME)
    name = directory.rstrip("/").rpartition("/")[2]
    return _Opened(name, local, read_manifest(local.folder), open_plan(local.folder))


def _check_mixture(out: Folder, directories: Sequence[str], faults: Faults) -> None:
    """Check P1 and P2 of mixture.json.

    mixture.json must list the datasets of the build. In `shares`, the number for
    each dataset must be the dataset's number of slots. mixture.json may be missing only if
    documents were removed.
    """
    manifests = []
    for directory in directories:
        with local_copy(folder_at(directory)) as local:
            local.fetch(MANIFEST_NAME)
            manifests.append(read_manifest(local.folder))
    if not out.exists(MIXTURE_NAME):
        # After `remove`, mixture.json may be missing, because `remove` does not write it.
        if not any("removed" in manifest for manifest in manifests):
            faults.add(
                "P1",
                MIXTURE_NAME,
                "is missing; run the build's command again to write it",
            )
        return
    try:
        stored = mixture_of(out.read(MIXTURE_NAME), out.path_of(MIXTURE_NAME))
    except (OSError, DatasetError) as error:
        faults.add("P1", MIXTURE_NAME, f"cannot be read: {error}")
        return
    # The build derives this file from the manifests, so the same derivation gives the expected
    # content.
    expected = mixture_of(lengths_mixture(manifests), MIXTURE_NAME)
    for key in sorted(stored.keys() | expected.keys()):
        if encode(stored.get(key)) != encode(expected.get(key)):
            message = (
                f"{key} is {stored.get(key)!r:.200}, but should be {expected.get(key)!r:.200}"
                " according to the datasets"
            )
            faults.add(
                "P2",
                MIXTURE_NAME,
                f"{message}; remove the file and run the build's command again",
            )


def _check_plans(opened: Sequence[_Opened], faults: Faults) -> None:
    """Check P2: except for the row length, the plans of all datasets agree.

    The plans must have the same recipe, tokenizer and source files.
    """
    shared = [_alike(stored_plan(dataset.local.folder) or {}) for dataset in opened]
    for dataset, own_plan in zip(opened[1:], shared[1:], strict=True):
        for message in changed_keys(
            own_plan, shared[0], f"{{}} is {{}} here, but {{}} in {opened[0].name}"
        ):
            faults.add("P2", f"{dataset.name}/{PLAN_NAME}", message)
    for dataset in opened:
        if dataset.name != f"seq_{dataset.plan.recipe.seq_length}":
            faults.add(
                "P2",
                f"{dataset.name}/{PLAN_NAME}",
                "has another row length",
                value=dataset.plan.recipe.seq_length,
            )


def _alike(stored: dict[str, Any]) -> dict[str, Any]:
    """Return the keys and values of plan.json that all datasets of a build share."""
    shared = {key: value for key, value in stored.items() if key not in _OF_ONE_PLAN}
    del shared["recipe"]["seq_length"]
    # This key may change when a build is resumed.
    shared["recipe"].get("documents", {}).pop("max_bad_fraction", None)
    for source in shared["sources"]:
        del source["prefix"]
    for task in shared["tasks"]:
        task.pop("resolved", None)
    return shared


def _setup(opened: Sequence[_Opened]) -> Do:
    def compare(item: _ShardToCompare, report: Report) -> tuple[Faults, int]:
        b, faults = item.number, Faults()
        with ExitStack() as stack:
            for dataset in opened:
                stack.enter_context(
                    dataset.local.fetched(shard_name(b), rejects_name(b), receipt_name(b))
                )
            return faults, _compare_shard(opened, b, faults)

    return one_by_one(compare)


def _compare_shard(opened: Sequence[_Opened], b: int, faults: Faults) -> int:
    """Check that shard b has the same text in every dataset (P2), and divides it correctly (P21).

    With `documents.long = "decompose"`, the chunks of a document may be in several datasets. The
    chunks must follow one another without gap or overlap. The datasets without a chunk reject the
    document as `other_length`.

    Without "decompose", all datasets except one reject the document as `other_length`. This one
    dataset uses the document, or rejects it for another reason.

    With every setting, all datasets may also reject a document for reasons except `other_length`.

    Returns:
        The number of documents, counting each pass.
    """
    shards = [_read_shard(dataset, b, faults) for dataset in opened]
    receipts = [shard.receipt for shard in shards]
    for dataset, receipt in zip(opened[1:], receipts[1:], strict=True):
        if receipt["text_digests"] != receipts[0]["text_digests"]:
            message = (
                f"text_digests differ from {opened[0].name}: the sources changed between the builds"
            )
            faults.add("P2", f"{dataset.name}/{receipt_name(b)}", message)
    # For each document, count the datasets that list it, use it, and reject it as `other_length`.
    by_kind = zip(*((shard.known, shard.used, shard.left) for shard in shards), strict=True)
    columns = [np.concatenate(of_kind, axis=1) for of_kind in by_kind]
    documents, number = np.unique(np.concatenate(columns, axis=1), axis=1, return_inverse=True)
    kind = np.repeat(np.arange(3), [of_kind.shape[1] for of_kind in columns])
    counts = np.zeros((3, documents.shape[1]), np.int64)
    np.add.at(counts, (kind, number.reshape(-1)), 1)
    n_known, n_used, n_left = counts
    plan, n = opened[0].plan, len(opened)
    is_decomposed = plan.recipe.documents.long == "decompose"
    if is_decomposed:
        is_divided = (n_used > 0) & (n_used + n_left == n)
    else:
        is_divided = (n_used <= 1) & (n_left == n - 1)
    # All datasets must list a document. Either they divide it, or all reject it for another reason.
    is_wrong = (n_known != n) | ~(is_divided | (n_used + n_left == 0))
    for i in np.flatnonzero(is_wrong)[:MAX_LISTED]:
        faults.add(
            "P21",
            _named(shard_name(b)),
            f"{in_words(plan, Locations(*documents), i)} is in segments of {n_used[i]} of {n}"
            f" datasets, and {n_left[i]} datasets leave it to other row lengths",
        )
    if is_decomposed:
        segments = np.concatenate([shard.segments for shard in shards], axis=1)
        _check_pieces(opened, b, segments, receipts, faults)
    return documents.shape[1]


class _ShardDocuments(NamedTuple):
    """The documents of a shard in one dataset. int64[3, k] has the rows file, pass and position.

    Attributes:
        receipt: The shard's receipt.
        segments: File, pass, position, start and tokens of each segment, int64[5, segments].
        known: All documents that have segments or are rejected, int64[3, k].
        used: The documents that have segments, int64[3, k].
        left: The documents that are rejected as `other_length`, int64[3, k].
    """

    receipt: dict[str, Any]
    segments: np.ndarray
    known: np.ndarray
    used: np.ndarray
    left: np.ndarray


def _read_shard(dataset: _Opened, b: int, faults: Faults) -> _ShardDocuments:
    """Read the documents of shard b of a dataset."""
    folder = dataset.local.folder
    receipt_and_data = read_receipt(LocalFolder(folder), b)
    assert receipt_and_data is not None
    receipt = receipt_and_data[0]
    arrays = shard_in(folder, dataset.manifest, b).arrays
    header = header_columns(arrays)
    segments = np.stack([header[name] for name in ("file", "repeat", "doc", "start", "tokens")])
    rejected, left_documents = (
        read_rejects(folder, b, dataset.plan, receipt, faults, reason)
        for reason in (None, OTHER_LENGTH)
    )
    assert rejected is not None and left_documents is not None
    # With group_by, every record counts as a document here, because rejects list records.
    used = np.unique(np.concatenate([segments[:3], *_of_records(arrays, header)], axis=1), axis=1)
    known_documents = np.unique(np.concatenate([used, np.stack(rejected)], axis=1), axis=1)
    return _ShardDocuments(receipt, segments, known_documents, used, np.stack(left_documents))


def _of_records(arrays: Arrays, header: Mapping[str, np.ndarray]) -> Iterator[np.ndarray]:
    """Yield file, pass and position of the records of a shard's documents, int64[3, k].

    Nothing is yielded if no source has group_by.
    """
    if (records := records_of(arrays)) is not None:
        owner = records.owner
        yield np.stack((header["file"][owner], header["repeat"][owner], records.position))


def _check_pieces(
    opened: Sequence[_Opened],
    b: int,
    columns: np.ndarray,
    receipts: Sequence[dict[str, Any]],
    faults: Faults,
) -> None:
    """Check P21 of decomposed documents: their chunks have no gap and no overlap.

    The ledger of each dataset must also count, as `other_length`, the tokens that the other
    datasets use or have removed.

    Args:
        opened: The datasets.
        b: Number of the shard.
        columns: The segments of all datasets, int64[5, segments]. The rows are file, pass,
            position, start and tokens.
        receipts: The receipt of the shard in each dataset.
        faults: Receives the faults.
    """
    # After the sort, the chunks of a document from all datasets follow one another.
    columns = columns[:, np.lexsort(columns[3::-1])]
    same = np.zeros(columns.shape[1], np.bool_)
    same[1:] = (columns[:3, 1:] == columns[:3, :-1]).all(axis=0)
    # A chunk without tokens does not show its end, so the start of the next chunk is taken.
    ends = np.where(columns[4] > 0, columns[3] + columns[4], np.roll(columns[3], -1))
    expected = np.where(same, np.roll(ends, 1), 0)
    for i in np.flatnonzero(columns[3] != expected)[:MAX_LISTED]:
        message = (
            f"{in_words(opened[0].plan, Locations(*columns[:3]), i)}: a chunk starts at token"
            f" {columns[3, i]},"
        )
        faults.add(
            "P21", _named(shard_name(b)), f"{message} but the previous chunk ends at {expected[i]}"
        )
    # Each ledger must leave exactly the tokens that the other datasets have.
    for source in opened[0].plan.sources:
        tokens = [receipt["ledger"]["sources"][source.name]["tokens"] for receipt in receipts]
        own_tokens = [counts["used"] + counts["dropped"].get(REMOVED, 0) for counts in tokens]
        for dataset, counts, used in zip(opened, tokens, own_tokens, strict=True):
            left_tokens = counts["dropped"].get(OTHER_LENGTH, 0)
            if left_tokens != sum(own_tokens) - used:
                message = (
                    f"source {source.name}: {left_tokens} tokens are left to other row lengths, but"
                    f" these have {sum(own_tokens) - used}"
                )
                faults.add("P21", f"{dataset.name}/{receipt_name(b)}", message)


def _named(name: str) -> str:
    """Return a glob pattern that matches the file `name` in each dataset."""
    return f"seq_*/{name}"
