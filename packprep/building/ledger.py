"""The ledger: every token accounted for. The identities hold exactly, or the build fails.

Per source:  documents read = used + rejected (by reason)
             tokens read = used + truncated + dropped (by reason)
             slots = tokens used + added (bos, mode, sentinel, fim, eos, copy) + padding inside (pad_seq_to_mult)
In all:      rows · seq_length = Σ slots + row padding
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from packprep.corpus.reading import Reading
from packprep.dataset.json_files import newer_version
from packprep.dataset.manifest import is_count
from packprep.errors import BuildError, PlanError
from packprep.objectives.objective import Task

AFTER_TOKENIZATION = ("too_long", "untrained_segment")
"""Reasons of tokens that are among the shard's documents and in no segment."""
ADDED = ("bos", "mode", "sentinel", "fim", "eos", "copy")
ADDED_LATER: tuple[str, ...] = ()
"""Kinds that joined later: they are written only where there are any."""


def shard_ledger(
    reading: Reading,
    names: Sequence[str],
    tasks: Sequence[Task],
    arrays: Mapping[str, np.ndarray],
    bos: np.ndarray,
    eos: np.ndarray,
    copy: np.ndarray,
    slots: np.ndarray,
    physical: np.ndarray,
    truncated: np.ndarray,
    last_row_padding: int,
    seq_length: int,
) -> dict[str, Any]:
    """The ledger of one shard. bos, eos, copy, slots, physical: int64[m] by segment in the shard's order;
    truncated: int64[sources] tokens cut off by long = "truncate"; last_row_padding: of the row that was packed
    last, at its end and inside its segments."""
    documents = reading.documents
    source, task, n = arrays["segment_source"], arrays["segment_task"], arrays["segment_tokens"].astype(np.int64)
    mode = np.array([t.mode for t in tasks])[task]
    halves = np.array([t.objective.copies for t in tasks])[task]
    body_added = slots // halves - n - copy - bos - eos - mode
    kinds = np.array([t.objective.added for t in tasks])[task]
    lengths = np.diff(documents.offsets)
    sources = {}
    for s, name in enumerate(names):
        own, held = source == s, documents.source == s
        reasons = reading.rejected.counts(name)
        dropped = dict(reading.dropped_tokens[name])
        added = {kind: int(body_added[own & (kinds == kind)].sum()) for kind in ("sentinel", "fim")}
        added["copy"] = int(copy[own].sum() + (slots - slots // halves)[own].sum())
        added |= {"bos": int(bos[own].sum()), "mode": int(mode[own].sum()), "eos": int(eos[own].sum())}
        sources[name] = {
            "documents": {
                "read": reading.read[name],
                "used": reading.read[name] - sum(reasons.values()),
                "rejected": reasons,
            },
            "tokens": {
                "read": int(lengths[held].sum())
                + sum(reading.dropped_tokens[name].values())
                - sum(dropped.get(reason, 0) for reason in AFTER_TOKENIZATION),
                "used": int(n[own].sum()),
                "truncated": int(truncated[s]),
                "dropped": dropped,
            },
            "slots": {
                "total": int(physical[own].sum()),
                "used": int(n[own].sum()),
                "added": {kind: count for kind, count in added.items() if count or kind in ADDED},
                "padding": int((physical - slots)[own].sum()),
            },
            "segments": int(own.sum()),
        }
    by_task = {}
    for t, entry in enumerate(tasks):
        own = task == t
        by_task[entry.name] = {
            "segments": int(own.sum()),
            "tokens": int(n[own].sum()),
            "slots": int(slots[own].sum()),
        }
    rows = len(arrays["row_offsets"]) - 1
    return {
        "sources": sources,
        "tasks": by_task,
        "rows": rows,
        "row_slots": rows * seq_length,
        "row_padding": rows * seq_length - int(physical.sum()),
        "last_rows": min(rows, 1),
        "last_row_padding": last_row_padding,
    }


def add_ledgers(ledgers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The sum of ledgers, number by number."""
    total: dict[str, Any] = {}
    for ledger in ledgers:
        _add(total, ledger)
    return total


def _add(total: dict[str, Any], part: Mapping[str, Any]) -> None:
    for key, value in part.items():
        if isinstance(value, Mapping):
            _add(total.setdefault(key, {}), value)
        else:
            total[key] = total.get(key, 0) + value


def imbalances(ledger: Mapping[str, Any]) -> list[str]:
    """The identities that do not hold, in words; empty if the ledger balances."""
    wrong = []

    def equal(what: str, left: int, right: int) -> None:
        if left != right:
            wrong.append(f"{what}: {left} ≠ {right}")

    for name, source in ledger["sources"].items():
        documents, tokens, slots = source["documents"], source["tokens"], source["slots"]
        equal(
            f"{name}: documents read = used + rejected",
            documents["read"],
            documents["used"] + sum(documents["rejected"].values()),
        )
        spent = tokens["used"] + tokens["truncated"] + sum(tokens["dropped"].values())
        equal(f"{name}: tokens read = used + truncated + dropped", tokens["read"], spent)
        filled = slots["used"] + sum(slots["added"].values()) + slots["padding"]
        equal(f"{name}: slots = used + added + padding", slots["total"], filled)
        equal(f"{name}: tokens used = tokens in slots", tokens["used"], slots["used"])
    total = sum(source["slots"]["total"] for source in ledger["sources"].values())
    equal("rows · seq_length = Σ slots + row padding", ledger["row_slots"], total + ledger["row_padding"])
    return wrong


def is_ledger(value: Any, sources: Sequence[str], tasks: Sequence[str]) -> bool:
    """Whether a value read from a file has the form of a ledger of these sources and tasks. PlanError for a kind of count that
    a newer version wrote."""
    reasons = ("documents", "rejected"), ("tokens", "dropped")
    source = {
        "documents": {"read": 0, "used": 0, "rejected": {}},
        "tokens": {"read": 0, "used": 0, "truncated": 0, "dropped": {}},
        "slots": {"total": 0, "used": 0, "added": dict.fromkeys(ADDED, 0), "padding": 0},
        "segments": 0,
    }
    task = {"segments": 0, "tokens": 0, "slots": 0}
    counts = ("rows", "row_slots", "row_padding", "last_rows", "last_row_padding")
    form = {"sources": dict.fromkeys(sources, source), "tasks": dict.fromkeys(tasks, task), **dict.fromkeys(counts, 0)}

    def fits(part: Any, form: Any, place: tuple[str, ...]) -> bool:
        if not isinstance(form, dict):
            return is_count(part)
        if not isinstance(part, dict) or (place[-2:] not in reasons and not form.keys() <= part.keys()):
            return False
        later = ADDED_LATER if place[-1:] == ("added",) else ()
        unknown = set() if place[-2:] in reasons else part.keys() - form.keys() - set(later)
        if unknown and place not in (("sources",), ("tasks",)):
            raise PlanError(f"ledger: {newer_version('.'.join((*place, min(unknown))))}")
        if unknown:
            return False
        return all(fits(part[key], form.get(key, 0), (*place, key)) for key in part)

    return fits(value, form, ())


def check(ledger: Mapping[str, Any], where: str) -> None:
    """BuildError that names every identity that does not hold."""
    wrong = imbalances(ledger)
    if wrong:
        raise BuildError(
            f"{where}: the ledger does not balance ({'; '.join(wrong)}): this is a fault of packprep; report it"
        )
