"""Documents that a dataset or a token store has lost since it was made, and what is left of them:
their places.

    built     ‹NLG› t ‹0› ias ‹1› ‹0› hod ‹1› ericAl ‹eos›     loss 0 0 0 0 0 1 …     header: document, task, key, tokens, …
    removed   ‹pad› … of as many slots                         loss 0 …               the same, prefix 0, removed 1, no media

No slot of another segment moves, so rows, their order and all chance stay. A build that reads the
text applies this to what it rendered, `packprep remove` to what is stored, and both give the same
bytes.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from packprep.building.ledger import ENCODER, MEDIA, added_slots
from packprep.dataset.attention import RULES
from packprep.dataset.boundaries import offsets_of
from packprep.dataset.manifest import is_count
from packprep.dataset.segments import Segments
from packprep.errors import DatasetError, PlanError
from packprep.format.digests import digest_of
from packprep.format.json_files import REMOVED_NAME, decode, encode
from packprep.objectives.objective import Task
from packprep.sources.slices import PlannedSource

REMOVED = "removed"
"""The reason of a reject, and of tokens that are dropped."""
DETAIL = f"{REMOVED_NAME} lists it"

Listed = Mapping[str, Mapping[str, Iterable[int]]]
"""source → file → positions of documents."""


def encode_removed(documents: Listed) -> bytes:
    """removed.json: one form of a set of documents, however they were listed."""
    ordered = {
        source: {file: sorted(set(positions)) for file, positions in files.items()}
        for source, files in documents.items()
    }
    return encode({"format": "packprep removed", "version": 1, "documents": ordered})


class Removed:
    """The documents that removed.json lists.

    documents: source → file → positions, ascending. at: which of some documents are among them.
    """

    def __init__(
        self, sources: Sequence[PlannedSource], data: bytes = b"", digest: str | None = None
    ):
        """sources: the plan's. data: of removed.json, whose digest the plan has; None: there is
        none. PlanError where it is another file, or lists what the plan has not."""
        self.documents: dict[str, dict[str, list[int]]] = {}
        self._positions: dict[int, np.ndarray] = {}  # by file of the plan
        if digest is None:
            return
        if digest_of(data) != digest:
            raise PlanError(
                f"{REMOVED_NAME} has digest {digest_of(data)} and the plan names {digest}: put the"
                " right file back"
            )
        try:
            self.documents = decode(data, REMOVED_NAME)["documents"]
            by_name = {source.name: source for source in sources}
            for name, files in self.documents.items():
                source = by_name[name]
                numbers = {file: i for i, file in enumerate(source.files.names)}
                for file, positions in files.items():
                    if not all(map(is_count, positions)):
                        raise ValueError(f"{file!r}: a position is none")
                    self._positions[source.first_file + numbers[file]] = np.array(
                        positions, np.int64
                    )
        except (DatasetError, LookupError, TypeError, AttributeError, ValueError) as error:
            raise PlanError(
                f"{REMOVED_NAME} lists no documents of this plan ({error}): put the right file back"
            ) from None

    def __bool__(self) -> bool:
        return bool(self._positions)

    def at(self, files: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """bool[n]: which of the documents at these positions of these files of the plan are
        listed."""
        found = np.zeros(len(files), np.bool_)
        for file in (
            np.intersect1d(files, list(self._positions)).tolist() if self._positions else ()
        ):
            of_file = np.flatnonzero(files == file)
            found[of_file] = np.isin(positions[of_file], self._positions[file])
        return found

    def segments(self, segments: Segments) -> np.ndarray:
        """Return which segments of a shard are of listed documents, bool[m]."""
        return self.at(segments.file, segments.doc)


def blank(
    tasks: Sequence[Task],
    slots: Mapping[str, np.ndarray],
    segments: Segments,
    removed: np.ndarray,
) -> tuple[dict[str, np.ndarray], Segments]:
    """Return the arrays of slots and the segments of a shard without what the `removed` segments
    (bool[m]) hold: pad ids, no loss and no media are left in their places.

    Their prefix becomes 0 where it is their own and fills no side of a row.
    """
    blanks = {"tokens": tasks[0].ids.pad, "labels": tasks[0].ids.pad, "loss_mask": 0}
    blanked = {
        name: np.array(values) if name in blanks else values for name, values in slots.items()
    }
    for g in np.flatnonzero(removed).tolist():
        first_slot = int(segments.first_slot[g])
        within = slice(first_slot, first_slot + int(segments.slots[g]))
        for name in blanks.keys() & blanked.keys():
            blanked[name][int(segments.row[g]), within] = blanks[name]
    has_own_prefix = np.array(
        [
            RULES[task.objective.attention].ahead == "prefix" and not task.keeps_prefix
            for task in tasks
        ]
    )
    return blanked, segments.replace(
        prefix=np.where(removed & has_own_prefix[segments.task], 0, segments.prefix),
        removed=segments.removed | removed,
        media=None if segments.media is None else segments.media.without(removed),
    )


def without(
    plan: Any,
    slots: Mapping[str, np.ndarray],
    segments: Segments,
    removed: np.ndarray,
    ledger: dict[str, Any],
) -> tuple[dict[str, np.ndarray], Segments, dict[str, Any], np.ndarray]:
    """Return a shard without the `removed` segments, bool[m].

    Args:
        plan: A `building.plan.Plan`.
        slots: The shard's arrays of slots.
        segments: All of its segments, as they were rendered or as they are stored.
        removed: The segments of documents that are removed now.
        ledger: The shard's ledger before.

    Returns:
        Its arrays of slots, its segments, its ledger, and the passes over documents that it lost,
        int64[k, 4]: source, pass, file and position.
    """
    gone = segments.select(removed)
    passes = np.unique(np.stack((gone.source, gone.repeat, gone.file, gone.doc), axis=1), axis=0)
    ledger = copy.deepcopy(ledger)
    of_media, eos = segments.media_slots()[removed], _eos(plan, segments, removed)
    added_by_kind = added_slots(
        plan.tasks, gone.replace(eos=eos, repeated=gone.eos + gone.repeated - eos)
    )
    for s, source in enumerate(plan.sources):
        of_source = gone.source == s
        if not of_source.any():
            continue
        entry = ledger["sources"][source.name]
        tokens, n_slots = gone.tokens[of_source].sum(), gone.slots[of_source].sum()
        _lose(entry, int((passes[:, 0] == s).sum()), int(tokens), int(n_slots))
        added = entry["slots"]["added"]
        lost = {kind: int(counts[of_source].sum()) for kind, counts in added_by_kind.items()}
        # Which slots are eos and which repeat tokens is an estimate: keep both counts at 0 or more.
        both = lost["eos"] + lost["copy"]
        lost["eos"] = min(max(lost["eos"], both - added["copy"]), added["eos"])
        lost["copy"] = both - lost["eos"]
        for kind, count in lost.items():
            added[kind] -= count
        if places := int(of_media[of_source].sum()):
            entry["slots"][MEDIA] -= places
            if not entry["slots"][MEDIA]:
                del entry["slots"][MEDIA]
        entry["segments"] -= int(of_source.sum())
    for t, task in enumerate(plan.tasks):
        of_task, by_task = gone.task == t, ledger["tasks"][task.name]
        by_task["segments"] -= int(of_task.sum())
        by_task["tokens"] -= int(gone.tokens[of_task].sum())
        by_task["slots"] -= int(gone.slots[of_task].sum())
    if ENCODER in ledger:
        ledger[ENCODER] -= int(gone.prefix.sum())
    return *blank(plan.tasks, slots, segments, removed), ledger, passes


def _lose(entry: dict[str, Any], documents: int, tokens: int, slots: int) -> None:
    """Take documents and tokens that were removed, and the slots that stay in their place, out of
    what a source's ledger has."""
    entry["documents"]["used"] -= documents
    entry["tokens"]["used"] -= tokens
    entry["slots"]["used"] -= tokens
    entry["slots"]["padding"] += slots
    for reasons, count in (
        (entry["documents"]["rejected"], documents),
        (entry["tokens"]["dropped"], tokens),
    ):
        reasons[REMOVED] = reasons.get(REMOVED, 0) + count


def _eos(plan: Any, segments: Segments, removed: np.ndarray) -> np.ndarray:
    """Return whether each removed segment has an eos, int64, without its tokens, so that a build
    says the same.

    A later chunk of a supervised document has an eos, or one more repeated token: the document's
    last chunk has an eos. With eos after each segment, every chunk has one. Where each turn has a
    text of its own, every chunk counts as the last of its text, which is an estimate: most others
    hold nothing trained and are no segments.
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
    plan: Any, arrays: Mapping[str, np.ndarray], before: Removed, ledger: dict[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, Any], np.ndarray]:
    """A token store's shard without the documents that its plan lists, and those that `before`
    lists were lost before.

    As `without`; a document keeps its length and where its places of media lie, so that datasets
    cut, pack and draw as they did; its tokens become pad ids, its refs empty.
    """
    number = np.repeat(np.arange(len(arrays["part_file"])), np.diff(arrays["part_offsets"]))
    file, position = arrays["part_file"].astype(np.int64)[number], arrays["position"]
    which = plan.removed.at(file, position) & ~before.at(file, position)
    which[arrays["rejected"]] = False
    first = [source.first_file for source in plan.sources]
    source = np.searchsorted(first, file[which], "right") - 1
    lengths, tokens = np.diff(arrays["document_offsets"]), np.array(arrays["tokens"])
    tokens[np.repeat(which, lengths)] = plan.vocabulary.roles["pad"]
    ledger = copy.deepcopy(ledger)
    for s, planned in enumerate(plan.sources):
        count, n = int((source == s).sum()), int(lengths[which][source == s].sum())
        if not count:
            continue
        _lose(ledger["sources"][planned.name], count, n, n)
    return (
        {**arrays, "tokens": tokens, **_without_refs(arrays, which)},
        ledger,
        np.stack((source, 0 * source, file[which], position[which]), axis=1),
    )


def _without_refs(arrays: Mapping[str, np.ndarray], which: np.ndarray) -> dict[str, np.ndarray]:
    """The refs of a token store's shard, empty in the documents `which`, bool[D]."""
    if "place_offsets" not in arrays:
        return {}
    lengths = np.diff(arrays["place_ref_offsets"])
    kept = np.repeat(~which[arrays["supervised"]], np.diff(arrays["place_offsets"]))
    refs = arrays["place_refs"][np.repeat(kept, lengths)]
    return {"place_ref_offsets": offsets_of(np.where(kept, lengths, 0)), "place_refs": refs}
