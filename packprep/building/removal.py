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

from packprep.building.ledger import ENCODER, MEDIA, added_slots, media_slots
from packprep.building.segments import SegmentTable
from packprep.dataset.attention import RULES
from packprep.dataset.manifest import is_count
from packprep.errors import DatasetError, PlanError
from packprep.format.digests import digest_of
from packprep.format.json_files import REMOVED_NAME, decode, encode
from packprep.objectives.objective import Task
from packprep.sources.slices import PlannedSource
from packprep.tokenizer.engines.engine import offsets_of

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

    def segments(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """bool[m]: the segments of a dataset's shard whose documents are listed."""
        return self.at(arrays["segment_file"], arrays["segment_doc"])


def removed_segments(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """bool[m]: the segments of a shard that say that their documents were removed."""
    found = arrays.get("segment_removed")
    return np.zeros(len(arrays["segment_key"]), np.bool_) if found is None else found != 0


def blanked(
    tasks: Sequence[Task], arrays: Mapping[str, np.ndarray], table: SegmentTable, which: np.ndarray
) -> dict[str, np.ndarray]:
    """The arrays of a shard without the segments `which`, bool[m]: pad ids, no loss, no places of
    media, and no prefix where that is their own and fills no side of a row.

    table: all segments, in row order.
    """
    names = ("tokens", "labels", "loss_mask", "segment_prefix", "segment_removed")
    made = {**arrays, "segment_removed": removed_segments(arrays).view(np.uint8)}
    made |= {name: np.array(made[name]) for name in names if name in made}
    for g in np.flatnonzero(which).tolist():
        row, slots = (
            int(table.row[g]),
            slice(int(table.first_slot[g]), int(table.first_slot[g] + table.slots[g])),
        )
        for name, value in zip(names[:3], (tasks[0].ids.pad, tasks[0].ids.pad, 0), strict=True):
            if name in made:
                made[name][row, slots] = value
    own_prefix = np.array(
        [
            RULES[task.objective.attention].ahead == "prefix" and not task.keeps_prefix
            for task in tasks
        ]
    )
    made["segment_prefix"][which & own_prefix[arrays["segment_task"]]] = 0
    made["segment_removed"][which] = 1
    return _without_media(made, which) if "media_offsets" in made else made


def _without_media(arrays: dict[str, np.ndarray], which: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays without the places of media of the segments `which`; without those of media where
    none is left."""
    many, lengths = np.diff(arrays["media_offsets"]), np.diff(arrays["media_ref_offsets"])
    kept = np.repeat(~which, many)
    made = {
        "media_offsets": offsets_of(np.where(which, 0, many)),
        "media_ref_offsets": offsets_of(lengths[kept]),
        **{f"media_{name}": arrays[f"media_{name}"][kept] for name in ("slot", "tokens", "kind")},
        "media_ref": arrays["media_ref"][np.repeat(kept, lengths)],
    }
    return {
        **{name: array for name, array in arrays.items() if name not in made},
        **(made if kept.any() else {}),
    }


def without(
    plan: Any,
    arrays: Mapping[str, np.ndarray],
    table: SegmentTable,
    which: np.ndarray,
    ledger: dict[str, Any],
) -> tuple[dict[str, np.ndarray], dict[str, Any], np.ndarray]:
    """A shard without the segments `which`, bool[m]: (its arrays, its ledger, the uses of documents
    that it lost).

    plan: a `building.plan.Plan`. table: of all segments as they were made, or as they are stored.
    The uses are int64[k, 4]: source, use, file and position of each.
    """
    columns = [
        arrays[f"segment_{name}"][which].astype(np.int64)
        for name in ("source", "repeat", "file", "doc")
    ]
    uses = np.unique(np.stack(columns, axis=1), axis=0)
    ledger = copy.deepcopy(ledger)
    gone, task, eos = table.of(which), table.task[which], _eos(plan, arrays, table, which)
    of_media = media_slots(arrays)[which]
    added_by_kind = added_slots(plan.tasks, gone._replace(eos=eos, copy=gone.eos + gone.copy - eos))
    for s, source in enumerate(plan.sources):
        own = columns[0] == s
        if not own.any():
            continue
        entry = ledger["sources"][source.name]
        _lose(
            entry, int((uses[:, 0] == s).sum()), int(gone.n[own].sum()), int(gone.slots[own].sum())
        )
        added, lost = (
            entry["slots"]["added"],
            {kind: int(k[own].sum()) for kind, k in added_by_kind.items()},
        )
        # of what cannot be told apart without its tokens
        too_many = max(0, lost["eos"] - added["eos"])
        for kind, k in (
            lost | {"eos": lost["eos"] - too_many, "copy": lost["copy"] + too_many}
        ).items():
            added[kind] -= k
        if places := int(of_media[own].sum()):
            entry["slots"][MEDIA] -= places
            if not entry["slots"][MEDIA]:
                del entry["slots"][MEDIA]
        entry["segments"] -= int(own.sum())
    for t, of_task in enumerate(plan.tasks):
        own, by_task = task == t, ledger["tasks"][of_task.name]
        for key, lost in (
            ("segments", own.sum()),
            ("tokens", gone.n[own].sum()),
            ("slots", gone.slots[own].sum()),
        ):
            by_task[key] -= int(lost)
    if ENCODER in ledger:
        ledger[ENCODER] -= int(arrays["segment_prefix"][which].sum(dtype=np.int64))
    return blanked(plan.tasks, arrays, table, which), ledger, uses


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


def _eos(
    plan: Any, arrays: Mapping[str, np.ndarray], table: SegmentTable, which: np.ndarray
) -> np.ndarray:
    """int64: of each segment `which` whether it has an eos, told without its tokens, so that a
    build says the same.

    A later piece of a supervised document has an eos, or one token more that is repeated: the
    document's last one has an eos. With eos after each segment, every piece has one.
    """
    extra = (table.eos + table.copy)[which]
    if "trained_offsets" not in arrays:
        return extra
    documents = plan.recipe.documents
    ends = (last_pieces(arrays, which) & documents.eos_after_document) | documents.eos_after_segment
    return np.where(arrays["segment_start"][which] > 0, np.minimum(extra, ends), extra)


def last_pieces(arrays: Mapping[str, np.ndarray], which: np.ndarray) -> np.ndarray:
    """bool: of the segments `which` of a shard those behind which none of them is of the same use
    of their document."""
    columns = [arrays[f"segment_{name}"][which] for name in ("start", "repeat", "doc", "file")]
    order = np.lexsort(columns)
    last = np.ones(len(order), np.bool_)
    if len(order):
        last[order[:-1]] = ~np.logical_and.reduce(
            [c[order][1:] == c[order][:-1] for c in columns[1:]]
        )
    return last


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
