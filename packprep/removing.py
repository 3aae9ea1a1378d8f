"""Copy a dataset or token store without some documents. All other tokens keep their positions.

    list of documents ─► removed.json ─┬─ shards with a listed document ─► new shard and receipt
    dataset ─► new plan ───────────────┴─ all other shards ──────────────► linked, or copied
                                                                           └─► dataset.json, last

The sources are not read, because their text may no longer exist. If the command is killed, run it
again to resume the copy.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from packprep.building.commit import commit_files, missing_shards, publish, read_receipt
from packprep.building.ledger import check
from packprep.building.plan import Plan, open_plan, refuse_others, stored_plan_and_digest
from packprep.building.plan_form import LATER
from packprep.building.processes import Do, Report, in_processes, one_by_one
from packprep.building.removal import encode_removed, note_removed, store_without, without
from packprep.building.replaced import with_removed
from packprep.building.run import Progress
from packprep.dataset.manifest import Manifest, read_manifest, replaced
from packprep.dataset.segments import Arrays, header_columns, records_of
from packprep.dataset.shard import SLOT_ARRAYS, shard_in
from packprep.documents.reading import Rejected
from packprep.documents.store import open_arrays
from packprep.errors import DatasetError, PlanError, RecipeError
from packprep.format import read_file
from packprep.format.digests import digest_of, digest_of_file
from packprep.format.json_files import (
    MANIFEST_NAME,
    PLAN_NAME,
    REMOVED_NAME,
    TOKENIZER_NAME,
    as_stored,
    decode,
    encode,
    receipt_name,
    rejects_name,
    shard_name,
)
from packprep.messages import counted, put_line
from packprep.restoring import sound_segments
from packprep.sources.slices import place_of
from packprep.storage import Folder, LocalCopy, LocalFolder, folder_at, local_copy, refuse_nested

Documents = dict[str, dict[str, list[int]]]
"""Source name → file name → positions of documents in the file."""
_KEYS = {"source", "file", "doc"}
_SHOWN = 3
_NOTHING = {
    "rejected": "rejected or removed before",
    "elsewhere": "not selected by sample, where or repeat, or not documents",
}


def remove_documents(
    directory: str | os.PathLike | Folder,
    documents: str | os.PathLike,
    out: str | os.PathLike | Folder,
    progress: Progress,
    workers: int = 0,
) -> dict[str, Any]:
    """Copy a dataset or token store without the listed documents, or resume such a copy.

    Args:
        directory: The dataset or token store, as a path or URL.
        documents: A file of JSON lines with "source", "file" and "doc" (a document's position).
            "source" is optional if the dataset has a single source. "file" is optional if the
            source has a single file, or if "doc" is "FILE:POSITION".
        out: The folder of the copy, as a path or URL.
        progress: Receives the progress.
        workers: Number of processes. 0 runs in this process.

    Returns:
        A dict with these keys:

        - directory, out: The two folders.
        - listed, removed: Numbers of listed documents and of removed documents.
        - segments, tokens: Numbers of removed segments and tokens.
        - shards, changed: Number of shards, and a list of the shards that lost documents.
        - rejected: Number of listed documents that were rejected or removed before.
        - elsewhere: Number of listed documents that had no content in the dataset for another
          reason.
        - examples: {"rejected": [some of these documents], "elsewhere": [some of these documents]}.
        - fingerprint: The fingerprint of the copy.

    Raises:
        RecipeError: If the list is invalid, or none of its documents has content in the dataset.
        DatasetError: If the dataset is damaged or unfinished.
        PlanError: If `out` has other files or another copy, or if plan.json is not the plan that
            the dataset names. Nothing is written in these cases.
        BuildError: If a file cannot be written.
        Stopped: After a signal.
    """
    old, new = folder_at(directory), folder_at(out)
    refuse_nested(old, new)
    with local_copy(old) as local:
        local.fetch(MANIFEST_NAME, PLAN_NAME, TOKENIZER_NAME, REMOVED_NAME)
        manifest = read_manifest(local.folder, stores=True)
        # The manifest's digest proves that this plan describes the dataset, before anything is
        # derived from it.
        plan_and_digest = stored_plan_and_digest(local.folder)
        if plan_and_digest is None or plan_and_digest[1] != manifest["plan"]["digest"]:
            raise PlanError(
                f"{old.path_of(PLAN_NAME)} is not the plan that the dataset names\n"
                "hint: restore the original file"
            )
        plan = open_plan(local.folder, found=plan_and_digest)
        listed = read_list(Path(documents), plan)
        # Documents that were removed earlier stay removed, so the new list has them too.
        data = encode_removed(_joined(plan.removed.documents, listed))
        # Find the shards that lose documents. Nothing is written before the list is known to be
        # valid.
        lost = _Lost(local, manifest, plan, listed)
        lost.search()
        if not lost.shards:
            raise RecipeError(
                f"--documents {documents}: there is nothing to remove, because none of its"
                f" documents has a segment in {old} ({why_nothing(lost.described())})"
            )
        # The new plan lists the old dataset, so that earlier receipts and loader states stay valid.
        lists = {
            "digest": digest_of(data),
            "replaces": [*replaced(plan_and_digest[0]), _replaced(manifest, plan, lost.shards)],
        }
        planned = encode(as_stored(with_removed(plan_and_digest[0], plan, lists), LATER))
        _begin(new, planned, data, plan)
        without_them = open_plan(new)
        without_them.max_bad_fraction = manifest.get("max_bad_fraction", plan.max_bad_fraction)
        # A changed shard needs a receipt of the new plan. An unchanged shard keeps its earlier
        # receipt.
        missing = missing_shards(new, [without_them.digest], lost.shards)
        untouched = missing_shards(
            new, without_them.digests, sorted(set(range(plan.shards)).difference(lost.shards))
        )
        entries = manifest["shards"]
        progress.begin(
            sum(entries[b]["bytes"] for b in (*missing, *untouched)),
            plan.shards,
            len(missing) + len(untouched),
        )
        # Copy or change the missing shards. After a stop, the same command makes the rest.
        try:
            items = [ShardToTake(b, True) for b in missing] + [
                ShardToTake(b, False) for b in untouched
            ]
            arguments = (local, manifest, new)
            for item, _ in in_processes(
                _setup, arguments, items, workers, progress.add, new.remove_temporaries
            ):
                progress.done(item)
            published = publish(new, without_them)
        finally:
            progress.end()
        assert published is not None
        return {
            "directory": str(old),
            "out": str(new),
            **lost.described(),
            "fingerprint": published["fingerprint"],
        }


def print_removal(result: Mapping[str, Any]) -> None:
    """Print how much was removed, and which listed documents had no content in the dataset."""
    put_line(
        f"{result['out']}: removed {counted(result['removed'], 'document')} with"
        f" {counted(result['tokens'], 'token')}; {len(result['changed']):,} of"
        f" {counted(result['shards'], 'shard')} changed"
    )
    if nothing := why_nothing(result):
        put_line(f"without content here: {nothing}")


def read_list(path: Path, plan: Plan) -> Documents:
    """Return the documents that a file of JSON lines names.

    Raises:
        RecipeError: If a line does not name a document of the plan. The message has the number of
            the line.
    """
    try:
        lines = read_file(path).splitlines()
    except OSError as error:
        raise RecipeError(f"--documents {path}: {error.strerror}") from None
    documents: Documents = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                source, file, position = _document(plan, line)
            except (ValueError, RecursionError, RecipeError) as error:
                raise RecipeError(f"{path}, line {number}: {error}. Nothing was removed") from None
            documents.setdefault(source, {}).setdefault(file, []).append(position)
    if not documents:
        raise RecipeError(
            f"{path}: the list is empty\n"
            'hint: write lines such as {"source":"web","file":"a.jsonl","doc":4096}'
        )
    return documents


def _document(plan: Plan, line: bytes) -> tuple[str, str, int]:
    record = json.loads(line)
    if not isinstance(record, dict) or "doc" not in record or record.keys() - _KEYS:
        raise RecipeError(
            "expected an object with source, file and doc, but found"
            f" {line.decode(errors='replace')[:100]!r}"
        )
    name, file, doc = record.get("source"), record.get("file"), record["doc"]
    by_name = {source.name: source for source in plan.sources}
    if name is None and len(by_name) == 1:
        (name,) = by_name
    if not isinstance(name, str) or name not in by_name:
        raise RecipeError(f"source is {name!r:.100}, but should be one of {', '.join(by_name)}")
    # Both forms of a position become FILE:POSITION, or only POSITION without a file.
    place = (
        doc
        if isinstance(doc, str) and file is None
        else f"{file}:{doc}"
        if file is not None
        else f"{doc}"
    )
    if isinstance(doc, bool) or not isinstance(doc, int | str) or not isinstance(file, str | None):
        raise RecipeError(
            f"doc is {doc!r:.100} and file is {file!r:.100}, but doc should be a position and file"
            " a file name"
        )
    source = by_name[name]
    i, position = place_of(source, place, "doc")
    if i is None and len(source.files) > 1:
        raise RecipeError(
            f"doc {place}: source {name!r} has {len(source.files):,} files, so the line must name"
            " one in file"
        )
    return name, source.files.names[i or 0], position


def _joined(
    lists: Mapping[str, Mapping[str, list[int]]], other_lists: Mapping[str, Mapping[str, list[int]]]
) -> Documents:
    joined: Documents = {}
    for documents in (lists, other_lists):
        for source, files in documents.items():
            for file, positions in files.items():
                joined.setdefault(source, {}).setdefault(file, []).extend(positions)
    return joined


def _replaced(manifest: Manifest, plan: Plan, changed: list[int]) -> dict[str, Any]:
    """Return the description of the old dataset for `removed.replaces` of the new plan.

    `changed` has the numbers of the shards that lose documents.
    """
    return {
        "fingerprint": manifest["fingerprint"],
        "digest": manifest["digest"],
        "plan": plan.digest,
        **({"removed": plan.removed_digest} if plan.removed_digest else {}),
        "ledger": manifest["ledger"],
        "shards": {f"{b}": manifest["shards"][b] for b in changed},
    }


def _begin(out: Folder, planned: bytes, removed: bytes, plan: Plan) -> None:
    """Write tokenizer.json and removed.json of the new dataset, and then its plan.json.

    Raises:
        PlanError: If the folder has another plan or other files.
    """
    standing = stored_plan_and_digest(out)
    if standing is not None:
        if standing[1] != digest_of(planned):
            raise PlanError(
                f"{out} was started with another list or another dataset\n"
                "hint: give the original list and DIR, or choose another --out"
            )
        return
    refuse_others(out)
    if out.exists(MANIFEST_NAME) or out.exists("receipts"):
        raise PlanError(
            f"{out} has files of a build, but no plan.json\n"
            "hint: restore plan.json, or choose another --out"
        )
    out.write(TOKENIZER_NAME, [plan.vocabulary.tokenizer_json])
    out.write(REMOVED_NAME, [removed])
    out.create(PLAN_NAME, planned)


class _Lost:
    """The segments and tokens that a dataset loses if the listed documents are removed.

    Documents that were removed earlier are not counted.
    """

    def __init__(self, local: LocalCopy, manifest: Manifest, plan: Plan, listed: Documents):
        self._local, self._manifest, self._plan = local, manifest, plan
        self.shards: list[int] = []  # numbers of shards that lose documents
        self._of_file: dict[
            int, tuple[str, str, np.ndarray]
        ] = {}  # index of a file in the plan → source name, file name and positions
        for source in plan.sources:
            for i, file in enumerate(source.files.names if source.name in listed else ()):
                if file in listed[source.name]:
                    positions = np.unique(listed[source.name][file])
                    self._of_file[source.first_file + i] = source.name, file, positions
        self._found = {
            file: np.zeros(len(entry[2]), np.bool_) for file, entry in self._of_file.items()
        }
        self._rejected = {
            file: np.zeros(len(entry[2]), np.bool_) for file, entry in self._of_file.items()
        }
        self._segments = self._tokens = 0

    def search(self) -> None:
        """Count the segments and tokens of the listed documents.

        Only the shards that may contain listed documents are read.
        """
        plan, candidates = self._plan, set[int]()
        for source in plan.sources:
            pieces = [
                source.pieces_at(file - source.first_file, positions)
                for file, (name, _, positions) in self._of_file.items()
                if name == source.name
            ]
            if pieces:
                candidates.update(
                    source.shards_of(np.unique(np.concatenate(pieces)), plan.shards).tolist()
                )
        for b in sorted(candidates):
            with self._local.fetched(shard_name(b), rejects_name(b)):
                self._look(b)

    def _look(self, b: int) -> None:
        folder, plan = self._local.folder, self._plan
        # For each document of a store, or segment of a dataset, find out whether it still has
        # content.
        if plan.is_store:
            arrays = open_arrays(read_file(folder / shard_name(b)), shard_name(b))
            file = np.repeat(arrays["part_file"].astype(np.int64), np.diff(arrays["part_offsets"]))
            position, n = arrays["position"], np.diff(arrays["document_offsets"])
            is_present = ~plan.removed.at(file, position)
            is_present[arrays["rejected"]] = False
        else:
            arrays = shard_in(folder, self._manifest, b).arrays
            header = header_columns(arrays)
            self._refuse_later_records(arrays)
            file, position, n = header["file"], header["doc"], header["tokens"]
            is_present = n > 0
        # Mark the listed positions that have content in this shard, and count their tokens.
        for number in np.intersect1d(file, list(self._of_file)).tolist():
            positions = self._of_file[number][2]
            of_file = np.flatnonzero((file == number) & is_present)
            hit = of_file[np.isin(position[of_file], positions)]
            self._found[number] |= np.isin(positions, position[hit])
            self._segments += 0 if plan.is_store else len(hit)
            self._tokens += int(n[hit].sum(dtype=np.int64))
            if len(hit) and self.shards[-1:] != [b]:
                self.shards.append(b)
        # A listed document without content may be in the rejects. Messages name both cases
        # separately.
        numbers = {entry[:2]: file for file, entry in self._of_file.items()}
        rejected = defaultdict[int, list[int]](list)
        for record in _records(folder / rejects_name(b)):
            if (number := numbers.get((record["source"], record["file"]))) is not None:
                rejected[number].append(record["position"])
        for number, rejected_positions in rejected.items():
            self._rejected[number] |= np.isin(self._of_file[number][2], rejected_positions)

    def _refuse_later_records(self, arrays: Arrays) -> None:
        """Check that each listed record of a shard is the first record of its document.

        Raises:
            RecipeError: If group_by joined a listed record to an earlier record of its file.
        """
        records = records_of(arrays)
        if records is None:
            return
        header, owner = header_columns(arrays), records.owner
        file, doc = header["file"][owner], header["doc"][owner]
        for number, (source, name, positions) in self._of_file.items():
            # A document has the position of its first record, so any other record is a later one.
            later = (file == number) & (doc != records.position)
            hit = np.flatnonzero(later & np.isin(records.position, positions))
            # Such a record may be listed if its document is listed too.
            listed = hit[~np.isin(doc[hit], positions)]
            if len(listed):
                position, document = int(records.position[listed[0]]), int(doc[listed[0]])
                raise RecipeError(
                    f"source {source!r}: the record {name}:{position} is a part of the document"
                    f" {name}:{document}, because the source has group_by. A document can only be"
                    " removed as a whole\n"
                    f"hint: list {document} to remove the document with all of its records"
                )

    def described(self) -> dict[str, Any]:
        """Return the counts and examples for the result of `remove_documents`."""
        # A listed document without content is in the rejects, or not in the dataset at all.
        none = {
            "rejected": {
                file: self._rejected[file] & ~is_removed for file, is_removed in self._found.items()
            },
            "elsewhere": {
                file: ~self._rejected[file] & ~is_removed
                for file, is_removed in self._found.items()
            },
        }
        examples = {key: list(islice(self._said(flags), _SHOWN)) for key, flags in none.items()}
        return {
            "listed": sum(map(len, self._found.values())),
            "removed": sum(int(is_removed.sum()) for is_removed in self._found.values()),
            "segments": self._segments,
            "tokens": self._tokens,
            "shards": self._plan.shards,
            "changed": self.shards,
            **{
                key: sum(int(of_file.sum()) for of_file in flags.values())
                for key, flags in none.items()
            },
            "examples": examples,
        }

    def _said(self, flags: Mapping[int, np.ndarray]) -> Iterator[str]:
        for file, is_missing in flags.items():
            source, name, positions = self._of_file[file]
            for position in positions[is_missing].tolist():
                yield f"{source} {name}:{position}"


def why_nothing(counts: Mapping[str, Any]) -> str:
    """Return a text that says how many listed documents had no content in a dataset, and why."""
    parts = [
        f"{counts[key]:,} {_NOTHING[key]}: {', '.join(counts['examples'][key])}"
        + (", …" if counts[key] > len(counts["examples"][key]) else "")
        for key in _NOTHING
        if counts[key]
    ]
    return "; ".join(parts)


def _records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a rejects file, or [] if the file does not exist."""
    try:
        return [decode(line, str(path)) for line in read_file(path).splitlines(keepends=True)]
    except FileNotFoundError:
        return []


class ShardToTake(NamedTuple):
    """A shard of the old dataset. `changes` is True if the shard loses documents."""

    number: int
    changes: bool

    def __str__(self) -> str:
        return f"shard {self.number}"


def _setup(local: LocalCopy, manifest: Manifest, new: Folder) -> Do:
    plan, old = open_plan(new), open_plan(local.folder)

    def take(item: ShardToTake, report: Report) -> None:
        b, entry = item.number, manifest["shards"][item.number]
        files = shard_name(b), rejects_name(b), receipt_name(b)  # The receipt must be last.
        if item.changes:
            with local.fetched(*files):
                _change(local.folder, manifest, b, old, plan, new)
        else:
            for name in files:
                _same(local.out, new, name)
        report(0, entry["bytes"], entry["tokens"], 0)

    return one_by_one(take)


def _same(old: Folder, new: Folder, name: str) -> None:
    """Link a file of the old dataset into the new dataset.

    If it cannot be linked, for example between file systems, copy it.
    """
    size = old.size(name)
    if size is None or new.size(name) == size:
        return
    if not (isinstance(old, LocalFolder) and isinstance(new, LocalFolder) and new.link(name, old)):
        new.write(name, [old.read(name)])


def _change(folder: Path, manifest: Manifest, b: int, old: Plan, plan: Plan, new: Folder) -> None:
    """Remove the listed documents from a shard, and write the new shard, rejects and receipt.

    Raises:
        DatasetError: If the shard or its receipt differs from the manifest.
    """
    name, entry = shard_name(b), manifest["shards"][b]
    # Compare the bytes with the manifest first. Otherwise a damaged shard would get a new, valid
    # digest.
    receipt_and_data = read_receipt(LocalFolder(folder), b)
    if (
        digest_of_file(folder / name) != entry["digest"]
        or not receipt_and_data
        or digest_of(receipt_and_data[1]) != entry["receipt_digest"]
    ):
        raise DatasetError(
            f"{folder / name}: this file or its receipt differs from the manifest\n"
            "hint: find the damaged files with `packprep verify`"
        )
    receipt = receipt_and_data[0]
    # Documents that an earlier removal erased are not counted again.
    if plan.is_store:
        arrays, ledger, uses = store_without(
            plan, open_arrays(read_file(folder / name), name), old.removed, receipt["ledger"]
        )
    else:
        shard = shard_in(folder, manifest, b)
        segments = sound_segments(plan, shard)
        listed = plan.removed.segments(segments) & segments.has_tokens
        slots = {name: shard.arrays[name] for name in SLOT_ARRAYS if name in shard.layout}
        slots, segments, ledger, uses = without(plan, slots, segments, listed, receipt["ledger"])
        arrays = slots | segments.header_arrays(plan.recipe.packing.pad_seq_to_mult)
    check(ledger, name)
    rejected = Rejected()
    note_removed(plan, rejected, uses)
    records = [*_records(folder / rejects_name(b)), *rejected.records()]
    records.sort(
        key=lambda record: (record["source"], record["file"], record["repeat"], record["position"])
    )
    rejects = b"".join(map(encode, records)), len(records)
    commit_files(new, plan, b, arrays, ledger, rejects, receipt["text_digests"])
