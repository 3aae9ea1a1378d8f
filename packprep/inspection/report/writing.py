"""The report of a dataset, from what can be read of it, and its file."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packprep.building.files import write_whole
from packprep.building.output import Nearby, Output, nearby, output_of
from packprep.dataset.json_files import MANIFEST_NAME, shard_name
from packprep.dataset.manifest import Manifest, first_rows, read_manifest
from packprep.dataset.shard import shard_in
from packprep.errors import ArgumentError, DatasetError, PackprepError, PlanError, VocabularyError
from packprep.inspection.columns import segments_of, spread
from packprep.inspection.lines import counted
from packprep.inspection.opened import opened
from packprep.inspection.report.choice import chosen_rows, rows_with_tasks
from packprep.inspection.report.figures import Figures
from packprep.inspection.report.page import MOST_LINES, page
from packprep.inspection.report.sample import sample_rows
from packprep.inspection.summary import describe_manifest

MOST_SHARDS = 32
"""Shards that a report verifies and looks at."""
SHARDS_WITH_ROWS = 8
"""Shards of these whose rows are shown."""
MOST_SLOTS = 1 << 25
"""Slots that are read for spans, noise and trained shares, but for a row of each shard."""


def check_place(html: str | os.PathLike) -> None:
    """ArgumentError unless a file can be written there; before work that would be in vain."""
    path = Path(html)
    if path.is_dir():
        raise ArgumentError(f"--html {html}: is a folder; give the name of a file in it, as in {path / 'report.html'}")
    if not path.parent.is_dir():
        raise ArgumentError(f"--html {html}: there is no folder {path.parent}; make it, or choose another place")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ArgumentError(f"--html {html}: the folder {path.parent} cannot be written; choose another place")


def shards_shown(directory: str | os.PathLike | Output) -> Sequence[int]:
    """The shards that a report of this dataset looks at, ascending: those to verify. DatasetError where there is no manifest."""
    with nearby(output_of(directory)) as near:
        near.bring(MANIFEST_NAME)
        return spread(len(read_manifest(near.folder)["shards"]), MOST_SHARDS)


def write_report(
    directory: str | os.PathLike | Output,
    html: str | os.PathLike,
    moved: Mapping[str, str],
    verification: Mapping[str, Any] | PackprepError,
    promises: Mapping[str, str],
    from_plan: bool = False,
) -> dict[str, Any]:
    """Write the report of a published dataset. The same dataset and verification give the same bytes.

    verification: what `verify_dataset` gave for `shards_shown`, without replay, or the error that kept it from looking;
    promises: promise → what it says. moved, from_plan: as in `describe_row`.
    Gives {html, bytes, directory, rows, shown_rows, shards, looked_at: shards, faults: count, None where it was not verified}.
    Raises DatasetError without a manifest, ArgumentError and BuildError where the file cannot be written.
    """
    check_place(html)
    with nearby(output_of(directory)) as near:
        near.bring(MANIFEST_NAME)
        manifest = read_manifest(near.folder)
        data, says = _page(near, manifest, moved, from_plan, verification, promises)
    path = Path(html)
    write_whole(path, [data], path.parent)
    return {"html": str(html), "bytes": len(data), "directory": str(near.out), **says}


def _page(
    near: Nearby,
    manifest: Manifest,
    moved: Mapping[str, str],
    from_plan: bool,
    verification: Mapping[str, Any] | PackprepError,
    promises: Mapping[str, str],
) -> tuple[bytes, dict[str, Any]]:
    shards = len(manifest["shards"])
    notes: list[str] = []
    totals = None
    try:
        totals = describe_manifest(str(near.out), manifest)
    except DatasetError as error:
        notes.append(f"The ledger cannot be shown: {error}")
    looked = list(spread(shards, MOST_SHARDS))
    sound = _sound(verification, looked)
    figures, rows = _figures(near, manifest, sound, notes)
    if len(sound) < len(looked):
        why = "is left out of the figures: it has faults, or was not verified."
        notes.append(f"{counted(len(looked) - len(sound), 'shard')} of the {len(looked)} looked at {why}")
    described, first = _rows(near, manifest, moved, from_plan, looked, sound, rows, notes)
    total = first_rows(manifest)[-1]
    data = {
        "rows": described,
        "first": first,
        "length": manifest["seq_length"],
        "total": total,
        "tasks": [task["name"] for task in manifest["tasks"]],
    }
    says = {"rows": total, "shown_rows": len(described), "shards": shards, "looked_at": len(sound)}
    faults = None if isinstance(verification, PackprepError) else verification["faults"]
    written = page(
        str(near.out),
        totals,
        manifest["recipe"],
        figures,
        _verdict(verification, promises, looked, shards),
        notes,
        data,
        _looked_at(figures, shards, total),
        _sample_says(described, total),
    )
    return written, {**says, "faults": faults}


def _sound(verification: Mapping[str, Any] | PackprepError, looked: Sequence[int]) -> list[int]:
    """The shards that were verified and have no fault."""
    if isinstance(verification, PackprepError) or verification["shards"] != len(looked):
        return []
    faulty = {fault["file"] for fault in verification["listed"]}
    return [b for b in looked if shard_name(b) not in faulty]


Rows = tuple[list[Mapping[int, Sequence[int]]], int]
"""(task → rows that have it, of each shard; the row with the most tasks, −1 for none)."""


def _figures(near: Nearby, manifest: Manifest, sound: Sequence[int], notes: list[str]) -> tuple[Figures, Rows]:
    by_task: list[Mapping[int, Sequence[int]]] = []
    figures, best, most, begins = Figures(manifest), -1, 0, first_rows(manifest)
    for b in sound:
        with near.brought(shard_name(b)):
            try:
                shard = shard_in(near.folder, manifest, b)
                figures.add(shard, MOST_SLOTS // len(sound))
                if shard.segments and b in _with_rows(sound):
                    found = segments_of(shard, manifest)
                    tasks, row, count = rows_with_tasks(found.row, found.task, begins[b])
                    by_task.append(tasks)
                    best, most = (row, count) if count > most else (best, most)
            except DatasetError as error:
                notes.append(f"A shard changed since it was verified: {near.named(str(error))}")
    return figures, (by_task, best)


def _with_rows(looked: Sequence[int]) -> list[int]:
    return [looked[i] for i in spread(len(looked), SHARDS_WITH_ROWS)]


def _rows(
    near: Nearby,
    manifest: Manifest,
    moved: Mapping[str, str],
    from_plan: bool,
    looked: Sequence[int],
    sound: Sequence[int],
    found: Rows,
    notes: list[str],
) -> tuple[list[dict[str, Any]], int]:
    """(the rows to show, which of them first)."""
    by_task, best = found
    first_rows = [0]
    for entry in manifest["shards"]:
        first_rows.append(first_rows[-1] + entry["rows"])
    shown = sorted({*_with_rows(sound), *_with_rows([b for b in looked if b not in sound])})
    chosen = chosen_rows(
        [range(first_rows[b], first_rows[b + 1]) for b in shown], by_task, best, manifest["seq_length"]
    )
    if not chosen:
        return [], 0
    try:
        with opened(near.out, moved, from_plan) as data:
            return sample_rows(data, chosen, frozenset(sound)), best if best >= 0 else chosen[0]
    except (DatasetError, PlanError, VocabularyError) as error:
        notes.append(f"No row can be shown: {error}")
        return [], 0


def _verdict(
    verification: Mapping[str, Any] | PackprepError, promises: Mapping[str, str], looked: Sequence[int], shards: int
) -> dict[str, Any]:
    verdict: dict[str, Any] = {"kind": "bad", "sign": "✗", "faults": [], "more": "", "promises": []}
    if isinstance(verification, PackprepError):
        return {
            **verdict,
            "title": "Not verified",
            "text": f"Nothing of this dataset could be verified: {verification}",
        }
    some = "All" if len(looked) == shards else f"{len(looked)} of {shards:,}"
    which = f"{some} shards" if shards > 1 else "Its one shard"
    counts = ", ".join(counted(verification[f"{what}s"], what) for what in ("row", "segment", "token"))
    did = (
        f"{which} recomputed ({counts}), and all files of the dataset's own. Of the sources at most the segments shown below "
        "were read again: packprep verify --replay does that for all."
    )
    if len(looked) < shards:
        did += " The other shards were not looked at: packprep verify looks at all."
    if not verification["faults"]:
        return {**verdict, "kind": "good", "sign": "✓", "title": "Every promise holds", "text": did}
    if not verification["shards"] and shards:
        did = "No shard was looked at: without a sound plan and tokenizer nothing can be recomputed."
    faults = [
        {
            "promise": fault["promise"],
            "says": promises[fault["promise"]],
            "file": fault["file"],
            "row": "" if fault["row"] is None else f"{fault['row']:,}",
            "slot": "" if fault["slot"] is None else f"{fault['slot']:,}",
            "message": fault["message"] + ("" if fault["value"] is None else f" (value {fault['value']})"),
        }
        for fault in verification["listed"][:MOST_LINES]
    ]
    left = verification["faults"] - len(faults)
    named = dict.fromkeys(fault["promise"] for fault in verification["listed"])
    return {
        **verdict,
        "title": counted(verification["faults"], "fault"),
        "text": did,
        "faults": faults,
        "more": f"… and {counted(left, 'more fault')}; packprep verify lists them." if left else "",
        "promises": [(promise, promises[promise]) for promise in sorted(named, key=lambda name: int(name[1:]))],
    }


def _looked_at(figures: Figures, shards: int, total: int) -> str:
    text = "Of all rows."
    if figures.shards < shards:
        text = f"Of {figures.rows:,} of {counted(total, 'row')}, in {figures.shards} of {shards:,} shards."
    if figures.slot_rows < figures.rows:
        text += f" Spans, pivots and noise are of the first rows of each, {figures.slot_rows:,} together."
    return text


def _sample_says(rows: Sequence[Mapping[str, Any]], total: int) -> str:
    if not rows:
        return "There is no row to show."
    if len(rows) == total:
        some = "All rows, as a model reads them."
    else:
        some = (
            f"{len(rows)} of {counted(total, 'row')}, as a model reads them: at even places, and some with each task."
        )
    return f"{some} Each segment, what is trained in it, and what it was before. The arrow keys page."
