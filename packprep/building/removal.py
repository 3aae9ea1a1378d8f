"""Remove documents from a built dataset or token store, and put padding in their place.

    built     ‹NLG› t ‹0› ias ‹1› ‹0› hod ‹1› ericAl ‹eos›     loss 0 0 0 0 0 1 …     12 tokens
    removed   ‹pad› … of as many slots                         loss 0 …               0 tokens

For each removed segment, the header keeps the document, task and key. The noise and the media spans
are deleted. A random prefix length becomes 0, unless the task keeps it in every epoch. No slot of
another segment moves, so rows, their order and all random numbers stay the same. A build that reads
the text applies the removal to its rendered arrays; `packprep remove` applies it to the stored
arrays. Both give the same bytes.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from packprep.building.ledger import ADDED_LATER, MEDIA, segment_counts, without_counts
from packprep.dataset.attention import RULES
from packprep.dataset.boundaries import offsets_of, owners
from packprep.dataset.manifest import ANSWERS, is_count
from packprep.dataset.segments import Arrays, Segments
from packprep.documents.joining import JOINED
from packprep.documents.kept_fields import without_fields
from packprep.documents.reading import Rejected
from packprep.documents.store import fields_of_parts
from packprep.errors import DatasetError, PlanError
from packprep.format.digests import digest_of
from packprep.format.json_files import REMOVED_NAME, decode, encode
from packprep.objectives.objective import Task
from packprep.sources.slices import PlannedSource

REMOVED = "removed"
"""The reason that the ledger gives for removed documents and their tokens."""

Listed = Mapping[str, Mapping[str, Iterable[int]]]
"""{source name: {file name: positions of documents}}."""


def encode_removed(documents: Listed) -> bytes:
    """Return removed.json in canonical form.

    In `documents`, the positions of a file may be in any order and may repeat.
    """
    ordered = {
        source: {file: sorted(set(positions)) for file, positions in files.items()}
        for source, files in documents.items()
    }
    return encode({"format": "packprep removed", "version": 1, "documents": ordered})


class Removed:
    """The documents that removed.json lists.

    `documents` is {source name: {file name: positions}}, with ascending positions.
    """

    def __init__(
        self, sources: Sequence[PlannedSource], data: bytes = b"", digest: str | None = None
    ):
        """Read the documents that removed.json lists.

        Args:
            sources: The plan's sources.
            data: The contents of removed.json.
            digest: The digest of removed.json in the plan, or None if the plan has none.

        Raises:
            PlanError: If `data` has another digest, or lists documents that the plan does not have.
        """
        self.documents: dict[str, dict[str, list[int]]] = {}
        self._positions: dict[int, np.ndarray] = {}  # positions by file of the plan
        if digest is None:
            return
        if digest_of(data) != digest:
            raise PlanError(
                f"{REMOVED_NAME} has digest {digest_of(data)}, but the plan names {digest}\n"
                "hint: restore the original file"
            )
        try:
            # The file is not trusted. One unknown source, file or position refuses the whole file.
            self.documents = decode(data, REMOVED_NAME)["documents"]
            by_name = {source.name: source for source in sources}
            for name, files in self.documents.items():
                source = by_name[name]
                numbers = {file: i for i, file in enumerate(source.files.names)}
                for file, positions in files.items():
                    if not all(map(is_count, positions)):
                        raise ValueError(f"{file!r}: a position is invalid")
                    self._positions[source.first_file + numbers[file]] = np.array(
                        positions, np.int64
                    )
        except (DatasetError, LookupError, TypeError, AttributeError, ValueError) as error:
            raise PlanError(
                f"{REMOVED_NAME} does not list documents of this plan ({error})\n"
                "hint: restore the original file"
            ) from None

    def __bool__(self) -> bool:
        return bool(self._positions)

    def at(self, files: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """For each document, return whether removed.json lists it, bool[n].

        Args:
            files: int64[n]: the number of each document's file in the plan.
            positions: int64[n]: the position of each document in its file.
        """
        is_removed = np.zeros(len(files), np.bool_)
        for file in (
            np.intersect1d(files, list(self._positions)).tolist() if self._positions else ()
        ):
            of_file = np.flatnonzero(files == file)
            is_removed[of_file] = np.isin(positions[of_file], self._positions[file])
        return is_removed

    def segments(self, segments: Segments) -> np.ndarray:
        """For each segment, return whether removed.json lists its document, bool[m]."""
        return self.at(segments.file, segments.doc)


def blank(
    tasks: Sequence[Task],
    slots: Arrays,
    segments: Segments,
    removed: np.ndarray,
) -> tuple[dict[str, np.ndarray], Segments]:
    """Return copies of a shard's slot arrays and segments, with the `removed` segments erased.

    All slots of an erased segment become pad ids without loss. The segment has no tokens, noise or
    media spans. If its prefix length was drawn at random, the length becomes 0, unless the task
    keeps prefix lengths in every epoch (`keeps_prefix`).

    Args:
        tasks: The plan's tasks.
        slots: The shard's arrays of slots.
        segments: The shard's segments.
        removed: bool[m]: the segments to erase.
    """
    blanks = {"tokens": tasks[0].ids.pad, "labels": tasks[0].ids.pad, "loss_mask": 0}
    blanked = {
        name: np.array(values) if name in blanks else values for name, values in slots.items()
    }
    # Erase slots where they are. No segment moves, so rows and all random numbers stay.
    for g in np.flatnonzero(removed).tolist():
        first_slot = int(segments.first_slot[g])
        within = slice(first_slot, first_slot + int(segments.slots[g]))
        for name in blanks.keys() & blanked.keys():
            blanked[name][int(segments.row[g]), within] = blanks[name]
    # Rows with two sequences keep each prefix, because the prefix divides the segment between them.
    has_own_prefix = np.array(
        [
            RULES[task.objective.attention].ahead == "prefix" and not task.keeps_prefix
            for task in tasks
        ]
    )
    # Task and key stay, because noise levels of the row's other segments depend on them (P23).
    return blanked, segments.replace(
        prefix=np.where(removed & has_own_prefix[segments.task], 0, segments.prefix),
        tokens=np.where(removed, 0, segments.tokens),
        repeated=np.where(removed, 0, segments.repeated),
        noise=np.where(removed, np.float32(0), segments.noise),
        loss_weight=np.where(removed, np.float32(1), segments.loss_weight),
        media=None if segments.media is None else segments.media.within(~removed),
        records=None if segments.records is None else segments.records.within(~removed),
    )


def without(
    plan: Any,
    slots: Arrays,
    segments: Segments,
    removed: np.ndarray,
    ledger: dict[str, Any],
) -> tuple[dict[str, np.ndarray], Segments, dict[str, Any], np.ndarray]:
    """Erase the `removed` segments of a shard, and return the shard with a changed ledger.

    In the ledger, the documents and tokens of these segments move from "used" to "removed". With
    group_by, all records of these documents become "removed".

    Args:
        plan: A `building.plan.Plan`.
        slots: The shard's arrays of slots.
        segments: All segments of the shard, rendered or stored.
        removed: bool[m]: the segments to erase.
        ledger: The shard's ledger before the removal.

    Returns:
        Four values: the shard's arrays of slots, its segments, its ledger, and the removed
        documents or records, int64[k, 4]. Each row of this array has the source, pass, file and
        position of a document or record.
    """
    # A document may have several segments, but counts once per pass.
    gone = segments.select(removed)
    passes = np.unique(np.stack((gone.source, gone.repeat, gone.file, gone.doc), axis=1), axis=0)
    records = _with_records(passes, segments, removed)
    # The ledger counted these segments while they had tokens. Subtract their added slots and
    # answers.
    media_slots, eos = segments.media_slots()[removed], _eos(plan, segments, removed)
    trained = None if segments.trained is None else segments.trained.select(removed)
    counted = gone.replace(eos=eos, repeated=gone.eos + gone.repeated - eos, trained=trained)
    names = [source.name for source in plan.sources]
    ledger = without_counts(ledger, segment_counts(names, plan.tasks, counted, plan.recipe))
    for s, name in enumerate(names):
        of_source = gone.source == s
        if not of_source.any():
            continue
        entry = ledger["sources"][name]
        # All slots of the removed segments become padding of their source, so its total stays.
        tokens, n_slots = gone.tokens[of_source].sum(), gone.slots[of_source].sum()
        documents, n_records = (int((rows[:, 0] == s).sum()) for rows in (passes, records))
        _lose(entry, documents, int(tokens), int(n_slots), n_records - documents)
        # The split between eos and repeated tokens is an estimate. Neither count may be negative.
        added = entry["slots"]["added"]
        for kind, other_kind in (("eos", "copy"), ("copy", "eos")):
            added[other_kind] += min(added[kind], 0)
            added[kind] = max(added[kind], 0)
        if count := int(media_slots[of_source].sum()):
            entry["slots"][MEDIA] -= count
            if not entry["slots"][MEDIA]:
                del entry["slots"][MEDIA]
    _drop_zeros(ledger)
    return *blank(plan.tasks, slots, segments, removed), ledger, records


def _with_records(passes: np.ndarray, segments: Segments, removed: np.ndarray) -> np.ndarray:
    """Return the removed documents together with their records, int64[k, 4].

    `passes`, int64[d, 4], has the removed documents, as in the result of `without`. `removed` is
    bool[m].
    """
    if segments.records is None:
        return passes
    owner = segments.records.owner
    is_removed = removed[owner]
    gone = segments.select(owner[is_removed])
    columns = gone.source, gone.repeat, gone.file, segments.records.position[is_removed]
    return np.unique(np.concatenate((passes, np.stack(columns, axis=1))), axis=0)


def note_removed(plan: Any, rejected: Rejected, passes: np.ndarray) -> None:
    """Add removed documents to the rejects `rejected`, with the reason "removed".

    Each row of `passes`, int64[k, 4], has the source, pass, file and position of a document.
    """
    for s, use, file, position in passes.tolist():
        rejected.add(plan.sources[s], use, file, position, REMOVED, f"{REMOVED_NAME} lists it")


def _lose(entry: dict[str, Any], documents: int, tokens: int, slots: int, joined: int = 0) -> None:
    """In a source's ledger, move counts of documents and tokens from "used" to "removed".

    `entry` is the source's part of the ledger. `documents` and `tokens` are the numbers to move.
    `slots` is the number of slots to add to the padding. `joined` is the number of further records
    of these documents.
    """
    entry["documents"]["used"] -= documents
    if joined:
        entry["documents"][JOINED] -= joined
    entry["tokens"]["used"] -= tokens
    entry["slots"]["used"] -= tokens
    entry["slots"]["padding"] += slots
    for reasons, count in (
        (entry["documents"]["rejected"], documents + joined),
        (entry["tokens"]["dropped"], tokens),
    ):
        reasons[REMOVED] = reasons.get(REMOVED, 0) + count


def _drop_zeros(ledger: dict[str, Any]) -> None:
    """Delete the counts `eos_fill`, `answers` and `joined` where they are 0.

    A ledger has these counts only if they are not 0.
    """
    later = [(entry["slots"]["added"], ADDED_LATER) for entry in ledger["sources"].values()]
    later += [(entry["documents"], (JOINED,)) for entry in ledger["sources"].values()]
    later += [(entry, (ANSWERS,)) for entry in ledger["tasks"].values()]
    for counts, kinds in later:
        for kind in kinds:
            if counts.get(kind) == 0:
                del counts[kind]


def _eos(plan: Any, segments: Segments, removed: np.ndarray) -> np.ndarray:
    """Return 1 for each removed segment with an eos, otherwise 0, as int64[removed segments].

    The tokens are not read, because an earlier step may have erased them, and all ways of removing
    a document must give the same result. Without the tokens, it is unknown whether a later chunk of
    a supervised document has an eos or one more repeated token. Therefore the document's last chunk
    counts as having an eos. With eos after each segment, every chunk has an eos.

    With trained_turns = "each", every chunk is assumed to end the text of its turn. This is an
    estimate. Most chunks that do not end a text train nothing, and are therefore not segments.
    """
    gone = segments.select(removed)
    extra = gone.eos + gone.repeated
    if segments.trained is None:
        return extra
    documents = plan.recipe.documents
    ends_text = gone.last_chunks() | (documents.trained_turns == "each")
    ends = (ends_text & documents.eos_after_document) | documents.eos_after_segment
    return np.where(gone.start > 0, np.minimum(extra, ends), extra)


def store_without(
    plan: Any, arrays: Arrays, removed_before: Removed, ledger: dict[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, Any], np.ndarray]:
    """In a shard of a token store, erase the documents that removed.json lists.

    The tokens of a removed document become pad ids, its media references become empty, and its kept
    fields become null. Its length and the positions of its media stay the same. Datasets that are
    built from the store therefore cut, pack and draw tasks as before.

    Args:
        plan: A `building.plan.Plan`.
        arrays: The shard's arrays.
        removed_before: Documents that were erased earlier. They are not counted again.
        ledger: The shard's ledger before the removal.

    Returns:
        Three values: the arrays, the ledger, and the documents that this call erased, int64[k, 4].
        Each row has the source, the pass (always 0), the file and the position of a document.
    """
    # A document belongs to a part, and the part names the file of the document.
    number = owners(np.diff(arrays["part_offsets"]))
    file, position = arrays["part_file"].astype(np.int64)[number], arrays["position"]
    # Documents that an earlier removal erased are already counted.
    is_removed = plan.removed.at(file, position) & ~removed_before.at(file, position)
    is_removed[arrays["rejected"]] = False
    first_files = [source.first_file for source in plan.sources]
    source = np.searchsorted(first_files, file[is_removed], "right") - 1
    # Replace tokens without moving any, so that cuts, rows and keys of other documents stay.
    lengths, tokens = np.diff(arrays["document_offsets"]), np.array(arrays["tokens"])
    tokens[np.repeat(is_removed, lengths)] = plan.vocabulary.roles["pad"]
    ledger = copy.deepcopy(ledger)
    for s, planned in enumerate(plan.sources):
        count, n = int((source == s).sum()), int(lengths[is_removed][source == s].sum())
        if not count:
            continue
        _lose(ledger["sources"][planned.name], count, n, n)
    return (
        {
            **arrays,
            "tokens": tokens,
            **_without_refs(arrays, is_removed),
            **without_fields(arrays, is_removed, fields_of_parts(plan, arrays)),
        },
        ledger,
        np.stack((source, 0 * source, file[is_removed], position[is_removed]), axis=1),
    )


def _without_refs(arrays: Arrays, is_removed: np.ndarray) -> dict[str, np.ndarray]:
    """Return the media references of a store's shard, except those of some documents.

    `is_removed`, bool[D], selects these documents. The result is {"place_ref_offsets": …,
    "place_refs": …}, or {} if the shard has no media.
    """
    if "place_offsets" not in arrays:
        return {}
    lengths = np.diff(arrays["place_ref_offsets"])
    is_kept = np.repeat(~is_removed[arrays["supervised"]], np.diff(arrays["place_offsets"]))
    refs = arrays["place_refs"][np.repeat(is_kept, lengths)]
    return {"place_ref_offsets": offsets_of(np.where(is_kept, lengths, 0)), "place_refs": refs}
