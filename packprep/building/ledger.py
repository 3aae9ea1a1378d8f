"""Account for every token in a ledger. A build fails unless these identities hold exactly.

    per source   documents read = used + rejected (by reason) + joined (group_by)
                 documents read = Σ k · documents in k passes (if `repeat` is an expression)
                 tokens read = used + truncated + dropped (by reason)
                 slots = tokens used + added + padding inside segments (pad_seq_to_mult)
    in total     rows · seq_length = Σ slots + row padding

Added slots are counted by kind: bos, mode, sentinel, fim, eos and copy.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from packprep.building.segments import LeftOut
from packprep.conversations.training import history_tokens
from packprep.dataset.attention import RULES
from packprep.dataset.blocks import n_answers
from packprep.dataset.manifest import ANSWERS, is_count
from packprep.dataset.segments import Segments
from packprep.documents.joining import GROUP_CUTS, JOINED, UNGROUPED
from packprep.documents.reading import Documents
from packprep.documents.store import StoredDocuments
from packprep.errors import BuildError, PlanError
from packprep.format.json_files import newer_version
from packprep.objectives.objective import Task, TaskTable
from packprep.recipe import Recipe, Source

Ledger = Mapping[str, Any]
"""For a shard or a dataset: the counts of documents, tokens and slots, by source and by task."""
AFTER_TOKENIZATION = ("too_long", "untrained_segment", "other_length", "place_too_long")
"""Dropped tokens with these reasons are in `Documents`. Tokens with other reasons are not."""
ADDED = ("bos", "mode", "sentinel", "fim", "eos", "copy")
ADDED_LATER = ("eos_fill",)
"""Kinds of added slots that later versions introduced. A count is written only if it is not 0."""
APART = "answers_apart"
"""The key that counts answer tokens that are untrained because the question is in another chunk.

These tokens also count as used or dropped. The key is written only if the count is not 0.
"""
HISTORY = "history"
"""The key that counts repeated tokens: a document with several texts can repeat an earlier text.

The key is written only if the count is not 0.
"""
ENCODER = "encoder_slots"
"""The key that counts slots of prefixes. It exists if rows have two sequences."""
FILTERED = "filtered"
"""The key that counts documents of a source that `where` or `repeat` uses in no pass.

These documents are neither read nor rejected. The key is written only if the count is not 0.
"""
PASSES = "passes"
"""The key that maps a number of passes, as text, to the number of documents with this many passes.

It is written only if `repeat` is an expression. Documents count where pass 0 reads them, even if
they are rejected. Filtered documents are not included.
"""
WEIGHTED, MEDIA = "weighted", "media"
"""The keys that count slots of a source. A key is written only if its count is not 0.

WEIGHTED counts slots in trained ranges with a weight other than 1. MEDIA counts slots of media
spans.
"""


def shard_ledger(
    documents: Documents,
    names: Sequence[str],
    tasks: Sequence[Task],
    segments: Segments,
    lost: LeftOut,
    last_row_padding: int,
    recipe: Recipe,
) -> dict[str, Any]:
    """Return the ledger of one shard.

    Args:
        documents: The shard's documents. Their `dropped_tokens` include the tokens of segments that
            `cut` left out.
        names: The names of the sources.
        tasks: The plan's tasks.
        segments: The segments as rendered.
        lost: The tokens that `cut` left out.
        last_row_padding: Padding of the row that was packed last, both at the end of the row and
            inside its segments.
        recipe: The recipe.
    """
    padded = segments.slots + -segments.slots % recipe.packing.pad_seq_to_mult
    # Two counts per document: (1) tokens that `long = "truncate"` cut off, (2) tokens of repeated
    # history.
    lengths = np.diff(documents.offsets)
    truncated = history = np.zeros(len(lengths), np.int64)
    # With "truncate", tokens are truncated if no segment has them and no other count includes them.
    if recipe.documents.long == "truncate":
        in_segments = np.bincount(segments.document, segments.tokens, len(lengths))
        left_over = lengths - in_segments.astype(np.int64) - lost.untrained - lost.elsewhere
        truncated = np.where(lost.unfit > 0, 0, left_over)
    if documents.training is not None:
        history = history_tokens(documents.training)
    of_documents = {APART: lost.apart, HISTORY: history}
    of_segments = {WEIGHTED: segments.weighted_slots(), MEDIA: segments.media_slots()}
    sources = {}
    for s, name in enumerate(names):
        in_source, was_read = segments.source == s, documents.source == s
        dropped = dict(documents.dropped_tokens[name])
        # Documents that reading dropped are not in `documents`, so their tokens are added to those
        # read.
        before_tokenization = dropped.keys() - set(AFTER_TOKENIZATION)
        used = int(segments.tokens[in_source].sum())
        total = int(padded[in_source].sum())
        sources[name] = {
            "documents": {
                **_document_counts(documents, name, _joined(segments, in_source)),
                **_of_passes(documents.passes.get(name, {}), recipe.sources[s]),
            },
            "tokens": {
                "read": int(lengths[was_read].sum())
                + sum(dropped[reason] for reason in before_tokenization),
                "used": used,
                "truncated": int(truncated[was_read].sum()),
                "dropped": dropped,
                **_sums(of_documents, was_read),
            },
            "slots": {
                "total": total,
                "used": used,
                "padding": total - int(segments.slots[in_source].sum()),
                **_sums(of_segments, in_source),
            },
        }
    # Padding inside segments belongs to a source. Padding at the end of rows belongs to none.
    rows = int(segments.row[-1]) + 1 if len(segments) else 0
    of_rows = {
        "sources": sources,
        "rows": rows,
        "row_slots": rows * recipe.seq_length,
        "row_padding": rows * recipe.seq_length - int(padded.sum()),
        "last_rows": min(rows, 1),
        "last_row_padding": last_row_padding,
    }
    return add_ledgers((of_rows, segment_counts(names, tasks, segments, recipe)))


def _of_passes(counts: Mapping[int, int], source: Source) -> dict[str, Any]:
    """Return the keys FILTERED and PASSES of a source. Keys without a count are left out.

    `counts` maps a number of passes to a number of documents, as `Documents.passes`.
    """
    filtered: dict[str, Any] = {FILTERED: counts[0]} if counts.get(0) else {}
    of_used = {str(number): counts[number] for number in sorted(counts) if number}
    return filtered | ({PASSES: of_used} if of_used and isinstance(source.repeat, str) else {})


def _document_counts(documents: Documents, name: str, joined: int) -> dict[str, Any]:
    """Return a source's counts of documents. `joined` is the number of JOINED records."""
    read, reasons = documents.read[name], documents.rejected.counts(name)
    grouped = {JOINED: joined, **documents.grouped.get(name, {})}
    return {
        "read": read,
        "used": read - sum(reasons.values()) - joined,
        "rejected": reasons,
        **{kind: count for kind, count in grouped.items() if count},
    }


def _joined(segments: Segments, chosen: np.ndarray) -> int:
    """Return how many records of the chosen segments follow another record of their document."""
    if segments.records is None:
        return 0
    counts = np.diff(segments.records.offsets)[chosen]
    return int(counts.sum() - (counts > 0).sum())


def _sums(counts: Mapping[str, np.ndarray], chosen: np.ndarray) -> dict[str, int]:
    """Return {kind: sum}. Kinds with the sum 0 are left out.

    `counts` maps each kind to an array. Only the entries that `chosen` selects are summed.
    """
    sums = {kind: int(values[chosen].sum()) for kind, values in counts.items()}
    return {kind: total for kind, total in sums.items() if total}


def segment_counts(
    names: Sequence[str], tasks: Sequence[Task], segments: Segments, recipe: Recipe
) -> dict[str, Any]:
    """Return the part of a ledger that counts segments and their added slots.

    The arguments are as in `shard_ledger`.
    """
    counts: dict[str, Any] = {"sources": {}, "tasks": {}}
    added_by_kind = added_slots(tasks, segments)
    for s, name in enumerate(names):
        of_source = segments.source == s
        # The kinds of ADDED are always present. Later kinds are present only if they are not 0.
        added = dict.fromkeys(ADDED, 0) | _sums(added_by_kind, of_source)
        counts["sources"][name] = {"slots": {"added": added}, "segments": int(of_source.sum())}
    for t, task in enumerate(tasks):
        counts["tasks"][task.name] = sums_of(segments, segments.task == t, task)
    if recipe.packing.sides is not None:
        counts[ENCODER] = int(segments.prefix.sum())
    return counts


def sums_of(segments: Segments, chosen: np.ndarray, task: Task | None = None) -> dict[str, int]:
    """Return the number of chosen segments, and the sums of their tokens and slots, as a dict.

    Args:
        segments: The segments.
        chosen: bool[m]: the segments to count.
        task: The task of the chosen segments. If its blocks start at answers, these answers are
            counted too. The count is left out if it is 0.
    """
    tokens, slots = segments.tokens[chosen], segments.slots[chosen]
    sums = {"segments": len(tokens), "tokens": int(tokens.sum()), "slots": int(slots.sum())}
    if task is not None and RULES[task.objective.attention].in_blocks:
        answers = n_answers(task.parameters, len(segments), segments.trained)[
            chosen & segments.has_tokens
        ]
        sums |= {ANSWERS: int(answers.sum())} if answers.any() else {}
    return sums


def added_slots(tasks: Sequence[Task], segments: Segments) -> dict[str, np.ndarray]:
    """Return {kind of `ADDED`: number of added slots in each segment, int64[m]}.

    Each content token takes one slot of a segment. All other slots are added. The kind "copy"
    counts repeated system messages and second copies of segments.
    """
    task, by_task = segments.task, TaskTable.of(tasks)
    mode = by_task.mode[task]
    # Count one copy of each segment. The slots of a body that are not tokens come from the
    # objective.
    once = segments.slots // by_task.copies[task]
    ends = segments.eos + by_task.input_eos[task]
    body = once - segments.bos - ends - mode - segments.fill
    between = body - segments.tokens - segments.repeated
    kinds = by_task.added[task]
    return {
        "bos": segments.bos,
        "mode": mode,
        **{kind: np.where(kinds == kind, between, 0) for kind in ("sentinel", "fim")},
        "eos": ends,
        "eos_fill": segments.fill,
        "copy": segments.repeated + segments.slots - once,
    }


def of_sides(
    inputs: float, content: float, rows: float, sides: tuple[int, int] | None
) -> dict[str, float]:
    """Return the filled fractions of rows' two sequences: {"encoder": 0.97, "decoder": 0.91}.

    Return {} if rows have only one sequence, or if `rows` is 0.

    Args:
        inputs: Slots of the segments' prefixes.
        content: All slots of the segments.
        rows: Number of rows.
        sides: Slots of the encoder and decoder sequence per row, or None.
    """
    if sides is None or not rows:
        return {}
    return {
        "encoder": inputs / (rows * sides[0]),
        "decoder": (content - inputs) / (rows * sides[1]),
    }


def store_ledger(documents: StoredDocuments, tasks: Sequence[Task]) -> dict[str, Any]:
    """Return the ledger of a token store's shard.

    A store has neither rows nor segments. The ledger counts each token as one slot.
    """
    sources = {}
    for name, tokens in documents.tokens.items():
        reasons, read = documents.rejected.counts(name), documents.read[name]
        sources[name] = {
            "documents": {"read": read, "used": read - sum(reasons.values()), "rejected": reasons},
            "tokens": {"read": tokens, "used": tokens, "truncated": 0, "dropped": {}},
            "slots": {
                "total": tokens,
                "used": tokens,
                "added": dict.fromkeys(ADDED, 0),
                "padding": 0,
            },
            "segments": 0,
        }
    return {
        "sources": sources,
        "tasks": {task.name: {"segments": 0, "tokens": 0, "slots": 0} for task in tasks},
        "rows": 0,
        "row_slots": sum(documents.tokens.values()),
        "row_padding": 0,
        "last_rows": 0,
        "last_row_padding": 0,
    }


def add_ledgers(ledgers: Iterable[Ledger]) -> dict[str, Any]:
    """Return the sum of ledgers, number by number."""
    total: dict[str, Any] = {}
    for ledger in ledgers:
        _add(total, ledger)
    return total


def without_counts(ledger: Ledger, subtracted: Ledger) -> dict[str, Any]:
    """Return a copy of `ledger`, minus the counts of the ledger `subtracted`."""
    total = add_ledgers((ledger,))
    _add(total, subtracted, -1)
    return total


def _add(total: dict[str, Any], counts: Ledger, sign: int = 1) -> None:
    for key, value in counts.items():
        if isinstance(value, Mapping):
            _add(total.setdefault(key, {}), value, sign)
        else:
            total[key] = total.get(key, 0) + sign * value


def imbalances(ledger: Ledger, is_total: bool = False) -> list[str]:
    """Return a text for each identity of the ledger that does not hold; [] if the ledger balances.

    For example "rows · seq_length = Σ slots + row padding: 512 ≠ 504". `is_total` says whether this
    is the sum of the ledgers of all shards. One shard does not have all passes of its documents.
    """
    pairs = []
    for name, source in ledger["sources"].items():
        documents, tokens, slots = source["documents"], source["tokens"], source["slots"]
        of_documents = (
            documents["used"] + sum(documents["rejected"].values()) + documents.get(JOINED, 0)
        )
        spent = tokens["used"] + tokens["truncated"] + sum(tokens["dropped"].values())
        filled = slots["used"] + sum(slots["added"].values()) + slots["padding"]
        pairs += [
            (f"{name}: documents read = used + rejected + joined", documents["read"], of_documents),
            (f"{name}: tokens read = used + truncated + dropped", tokens["read"], spent),
            (f"{name}: slots = used + added + padding", slots["total"], filled),
            (f"{name}: tokens used = tokens in slots", tokens["used"], slots["used"]),
        ]
        # A shard reads only some passes of a document, so this equation holds only for the sum.
        if is_total and PASSES in documents:
            in_passes = sum(int(k) * count for k, count in documents[PASSES].items())
            pairs.append((f"{name}: documents read = Σ passes", documents["read"], in_passes))
    # Rows also have padding after their last segment, which belongs to no source.
    total = sum(source["slots"]["total"] for source in ledger["sources"].values())
    pairs.append(
        (
            "rows · seq_length = Σ slots + row padding",
            ledger["row_slots"],
            total + ledger["row_padding"],
        )
    )
    return [f"{identity}: {left} ≠ {right}" for identity, left, right in pairs if left != right]


def is_ledger(value: Any, sources: Sequence[str], tasks: Sequence[str]) -> bool:
    """Return whether a value from a file is a ledger for exactly these sources and tasks.

    Only the form is checked: the ledger must have the right keys, and each value must be a count.

    Raises:
        PlanError: If a newer version wrote a count that this version does not know.
    """
    reasons = ("documents", "rejected"), ("tokens", "dropped"), ("documents", PASSES)
    # The form has the keys that each ledger must have. Later versions added the other keys.
    source = {
        "documents": {"read": 0, "used": 0, "rejected": {}},
        "tokens": {"read": 0, "used": 0, "truncated": 0, "dropped": {}},
        "slots": {"total": 0, "used": 0, "added": dict.fromkeys(ADDED, 0), "padding": 0},
        "segments": 0,
    }
    task = {"segments": 0, "tokens": 0, "slots": 0}
    counts = ("rows", "row_slots", "row_padding", "last_rows", "last_row_padding")
    form = {
        "sources": dict.fromkeys(sources, source),
        "tasks": dict.fromkeys(tasks, task),
        **dict.fromkeys(counts, 0),
    }

    def fits(value: Any, form: Any, path: tuple[str, ...]) -> bool:
        if not isinstance(form, dict):
            return is_count(value)
        if not isinstance(value, dict) or (
            path[-2:] not in reasons and not form.keys() <= value.keys()
        ):
            return False
        # Which later keys are allowed depends on the part of the ledger.
        later = {
            "tasks": (ANSWERS,),
            "": (ENCODER,),
            "added": ADDED_LATER,
            "slots": (WEIGHTED, MEDIA),
            "tokens": (APART, HISTORY),
            "documents": (FILTERED, PASSES, JOINED, GROUP_CUTS, UNGROUPED),
        }.get(path[0] if path[:1] == ("tasks",) else path[-1] if path else "", ())
        # An unknown count comes from a newer version. An unknown source or task is another build's.
        unknown = set() if path[-2:] in reasons else value.keys() - form.keys() - set(later)
        if unknown and path not in (("sources",), ("tasks",)):
            raise PlanError(f"ledger: {newer_version('.'.join((*path, min(unknown))))}")
        if unknown:
            return False
        # Reasons, passes and later counts are not in the form. Of these, only passes are a dict.
        forms = {PASSES: {}, **form}
        return all(fits(value[key], forms.get(key, 0), (*path, key)) for key in value)

    return fits(value, form, ())


def check(ledger: Ledger, where: str, is_total: bool = False) -> None:
    """Raise a BuildError if a ledger does not balance. The message lists the `imbalances`."""
    problems = imbalances(ledger, is_total)
    if problems:
        raise BuildError(
            f"{where}: the ledger does not balance ({'; '.join(problems)})\n"
            "hint: report this bug in packprep"
        )
