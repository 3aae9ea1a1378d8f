"""Write a report of a dataset as one self-contained HTML file.

This module selects the rows to show, collects the content of the page, and writes the file.

```
manifest ─► totals, ledger, mix ───────────────┐
shards  ─┬► figures ─► charts ─────────────────┼─► page ─► FILE, written completely or not at all
         └► rows that are chosen ─► sample ────┤
faults, from the verification that the caller made
```
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from packprep.building.plan import Plan, stored_plan
from packprep.dataset.loader import segments_of
from packprep.dataset.manifest import Manifest, first_rows, read_manifest
from packprep.dataset.shard import shard_in
from packprep.errors import ArgumentError, DatasetError, PackprepError, PlanError, VocabularyError
from packprep.format.json_files import MANIFEST_NAME, PLAN_NAME, shard_name
from packprep.inspection.card import files_by_source, origin
from packprep.inspection.opened import OpenedDataset, opened
from packprep.inspection.report.figures import Figures
from packprep.inspection.report.page import MOST_LINES, page
from packprep.inspection.report.sample import row_anew, sample_rows
from packprep.inspection.summary import describe_manifest, evenly
from packprep.messages import counted
from packprep.sources.slices import UNREAD
from packprep.storage import Folder, LocalCopy, LocalFolder, folder_at, is_url, local_copy

MOST_SHARDS = 32
"""Maximum number of shards that a report verifies and reads."""
SHARDS_WITH_ROWS = 8
"""Rows are shown from at most this many shards without faults, and from at most this many other
shards."""
MOST_SLOTS = 1 << 25
"""Maximum number of slots read for spans, noise and trained shares. At least one row per shard is
read."""

MOST_FILES = 100_000
"""If a source has more files, their modification days are not read."""
EPOCH = 1
"""The epoch for which one row is resampled. The report shows it next to the stored row."""


def check_file(html: str | os.PathLike) -> None:
    """Check that the report can be written to `html`, before any expensive work.

    Raises:
        ArgumentError: If the path cannot be written, or is an existing file that is not HTML.
    """
    path = Path(html)
    if path.is_dir():
        raise ArgumentError(
            f"--html {html}: is a folder"
            f"\nhint: give a file name in it, such as {path / 'report.html'}"
        )
    if not path.parent.is_dir():
        raise ArgumentError(
            f"--html {html}: no such folder: {path.parent}\nhint: create it, or choose another path"
        )
    if path.exists() and not path.is_file():
        raise ArgumentError(f"--html {html}: is not a regular file\nhint: choose another path")
    if path.exists() and not _is_html(path):
        raise ArgumentError(
            f"--html {html}: already exists and is not HTML, so it is not overwritten"
            "\nhint: choose another path"
        )
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ArgumentError(
            f"--html {html}: the folder {path.parent} is not writable\nhint: choose another path"
        )


def _is_html(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(256).lstrip().lower().startswith((b"<!doctype html", b"<html"))


def shards_shown(directory: str | os.PathLike | Folder) -> Sequence[int]:
    """Return the shards that a report of this dataset reads and verifies, ascending.

    Raises:
        DatasetError: If the manifest is missing.
    """
    with local_copy(folder_at(directory)) as local:
        local.fetch(MANIFEST_NAME)
        return evenly(len(read_manifest(local.folder)["shards"]), MOST_SHARDS)


def write_report(
    directory: str | os.PathLike | Folder,
    html: str | os.PathLike,
    moved: Mapping[str, str],
    verification: Mapping[str, Any] | PackprepError,
    promises: Mapping[str, str],
    from_plan: bool = False,
) -> dict[str, Any]:
    """Write the report of a published dataset.

    The same dataset, source files and verification give the same bytes.

    Args:
        directory: Directory or URL of the dataset.
        html: Path of the file.
        moved: As in `describe_row`.
        verification: The result of `verify_dataset` for `shards_shown`, without replay, or the
            error that stopped it.
        promises: Invariant → its description.
        from_plan: As in `describe_row`.

    Returns:
        {html, bytes, directory, rows, shown_rows, shards, looked_at, faults}. `looked_at` is the
        number of shards that the figures cover. `faults` is the number of faults, or None if the
        dataset was not verified.

    Raises:
        DatasetError: If the manifest is missing.
        ArgumentError: If `check_file` does not accept `html`.
        BuildError: If writing the file fails.
    """
    check_file(html)
    with local_copy(folder_at(directory)) as local:
        local.fetch(MANIFEST_NAME, PLAN_NAME)
        manifest = read_manifest(local.folder)
        data, says = _page(local, manifest, moved, from_plan, verification, promises)
    path = Path(html)
    LocalFolder(path.parent).write(path.name, [data])
    return {"html": str(html), "bytes": len(data), "directory": str(local.out), **says}


def _page(
    local: LocalCopy,
    manifest: Manifest,
    moved: Mapping[str, str],
    from_plan: bool,
    verification: Mapping[str, Any] | PackprepError,
    promises: Mapping[str, str],
) -> tuple[bytes, dict[str, Any]]:
    shards = len(manifest["shards"])
    notes: list[str] = []
    totals = None
    # A damaged part of the dataset becomes a note, and the rest of the report is still written.
    try:
        totals = describe_manifest(str(local.out), manifest)
    except DatasetError as error:
        notes.append(f"The ledger cannot be shown: {error}")
    # Figures come only from shards that were verified without a fault.
    looked = list(evenly(shards, MOST_SHARDS))
    sound = _sound(verification, looked)
    with _opened(local, moved, from_plan) as data:
        figures, rows = _figures(
            local, manifest, data.plan if isinstance(data, OpenedDataset) else data, sound, notes
        )
        if len(sound) < len(looked):
            why = "left out of the figures, because of faults or because they were not verified."
            notes.append(
                f"{counted(len(looked) - len(sound), 'shard')} of the {len(looked)} examined: {why}"
            )
        described, first_shown_row = _rows(manifest, data, looked, sound, rows, notes)
        resampled_row = _anew(data, described, first_shown_row, sound, notes)
        data_origin, newest = _made(local, manifest, data, notes)
    total = first_rows(manifest)[-1]
    # The page has these rows as data, and its script draws them.
    shown = {
        "rows": described,
        "first": first_shown_row,
        "anew": resampled_row,
        "length": manifest["seq_length"],
        "total": total,
        "tasks": [task["name"] for task in manifest["tasks"]],
    }
    says = {"rows": total, "shown_rows": len(described), "shards": shards, "looked_at": len(sound)}
    faults = None if isinstance(verification, PackprepError) else verification["faults"]
    written = page(
        str(local.out),
        totals,
        manifest["recipe"],
        figures,
        _verdict(verification, promises, looked, shards),
        notes,
        shown,
        _looked_at(figures, shards, total),
        _sample_says(described, total),
        (
            ""
            if resampled_row is None
            else (
                f"Row {first_shown_row:,} as stored, and as a loader with redraw resamples"
                f" it in epoch {EPOCH}."
            )
        ),
        data_origin,
        newest,
    )
    return written, {**says, "faults": faults}


@contextmanager
def _opened(
    local: LocalCopy, moved: Mapping[str, str], from_plan: bool
) -> Iterator[OpenedDataset | PackprepError]:
    """Yield the dataset, or the error that prevents showing its rows."""
    with ExitStack() as stack:
        data: OpenedDataset | PackprepError
        try:
            data = stack.enter_context(opened(local.out, moved, from_plan))
        except (DatasetError, PlanError, VocabularyError) as error:
            data = error
        yield data


def _made(
    local: LocalCopy, manifest: Manifest, data: OpenedDataset | PackprepError, notes: list[str]
) -> tuple[dict[str, Any] | None, dict[str, str]]:
    """Return (origin, newest).

    `origin` is the result of the function `origin`, or None if it fails. `newest` is source → day
    of the source's newest file. If the day is unknown, the value is the reason.
    """
    plan: Mapping[str, Any] | None = None
    try:
        plan = stored_plan(local.folder)
    except PlanError as error:
        notes.append(f"The source files cannot be shown: {error}")
    prefixes = data.prefixes if isinstance(data, OpenedDataset) else None
    newest = {source["name"]: "unknown: not read" for source in manifest["sources"]}
    if plan and prefixes:
        for prefix, (source, files) in zip(prefixes, files_by_source(plan), strict=True):
            if prefix != UNREAD:
                newest[source["name"]] = _newest(prefix, [file["name"] for file in files])
    try:
        return origin(manifest, plan), newest
    except DatasetError as error:
        notes.append(f"The origin cannot be shown: {error}")
        return None, newest


def _newest(prefix: str, names: Sequence[str]) -> str:
    if is_url(prefix) or len(names) > MOST_FILES:
        return f"unknown: {'at a URL' if is_url(prefix) else 'too many'}"
    try:
        newest = max(os.stat(os.path.join(prefix, name)).st_mtime for name in names)
        return datetime.fromtimestamp(newest, UTC).date().isoformat()
    except (OverflowError, ValueError):
        return "unknown: after the year 9999"
    except OSError as error:
        return f"unknown: {error.strerror}"


def _sound(verification: Mapping[str, Any] | PackprepError, looked: Sequence[int]) -> list[int]:
    """Return the shards that were verified and have no fault."""
    if isinstance(verification, PackprepError) or verification["shards"] != len(looked):
        return []
    faulty = {fault["file"] for fault in verification["listed"]}
    return [b for b in looked if shard_name(b) not in faulty]


Rows = tuple[list[Mapping[int, Sequence[int]]], int]
"""(by_task, best). `by_task` has a dict per shard: task → rows that have this task. `best` is the
row with the most tasks, or -1 if there is no row."""


def _figures(
    local: LocalCopy,
    manifest: Manifest,
    plan: Plan | PackprepError,
    sound: Sequence[int],
    notes: list[str],
) -> tuple[Figures | None, Rows]:
    """Read the shards without faults, and return their figures and their rows by task.

    The figures are None if the plan cannot be used. The rows are described at `Rows`.
    """
    by_task: list[Mapping[int, Sequence[int]]] = []
    figures = None if isinstance(plan, PackprepError) else Figures(manifest, plan)
    best, most_tasks, begins = -1, 0, first_rows(manifest)
    for b in sound:
        with local.fetched(shard_name(b)):
            try:
                shard = shard_in(local.folder, manifest, b)
                if figures is not None:
                    figures.add(shard, MOST_SLOTS // len(sound))
                if shard.segments and b in _with_rows(sound):
                    segments = segments_of(shard, manifest)
                    tasks, row, count = rows_with_tasks(segments.row, segments.task, begins[b])
                    by_task.append(tasks)
                    best, most_tasks = (row, count) if count > most_tasks else (best, most_tasks)
            except DatasetError as error:
                notes.append(f"A shard changed since it was verified: {local.named(str(error))}")
    return figures, (by_task, best)


def _with_rows(looked: Sequence[int]) -> list[int]:
    return [looked[i] for i in evenly(len(looked), SHARDS_WITH_ROWS)]


def _rows(
    manifest: Manifest,
    data: OpenedDataset | PackprepError,
    looked: Sequence[int],
    sound: Sequence[int],
    rows_of_tasks: Rows,
    notes: list[str],
) -> tuple[list[dict[str, Any]], int]:
    """Return descriptions of the rows to show, and the number of the row to show first."""
    by_task, best = rows_of_tasks
    begins = first_rows(manifest)
    shown = sorted({*_with_rows(sound), *_with_rows([b for b in looked if b not in sound])})
    chosen = chosen_rows(
        [range(begins[b], begins[b + 1]) for b in shown], by_task, best, manifest["seq_length"]
    )
    if not chosen:
        return [], 0
    try:
        if isinstance(data, PackprepError):
            raise data
        return sample_rows(data, chosen, frozenset(sound)), best if best >= 0 else chosen[0]
    except (DatasetError, PlanError, VocabularyError) as error:
        notes.append(f"No row can be shown: {error}")
        return [], 0


def _anew(
    data: OpenedDataset | PackprepError,
    rows: Sequence[dict[str, Any]],
    first_row: int,
    sound: Sequence[int],
    notes: list[str],
) -> dict[str, Any] | None:
    """Return the row with number `first_row`, resampled for EPOCH.

    Return None if its shard has a fault, or if resampling does not change the row.
    """
    for shown in rows:
        if (
            shown["row"] == first_row
            and isinstance(data, OpenedDataset)
            and data.location(first_row)[0] in sound
        ):
            try:
                return None if "unreadable" in shown else row_anew(data, shown, EPOCH)
            except DatasetError as error:
                notes.append(f"No row can be resampled: {data.local.named(str(error))}")
    return None


def _verdict(
    verification: Mapping[str, Any] | PackprepError,
    promises: Mapping[str, str],
    looked: Sequence[int],
    shards: int,
) -> dict[str, Any]:
    verdict: dict[str, Any] = {"kind": "bad", "sign": "✗", "faults": [], "more": "", "promises": []}
    if isinstance(verification, PackprepError):
        return {
            **verdict,
            "title": "Not verified",
            "text": f"This dataset could not be verified: {verification}",
        }
    # The text must not claim more than was checked.
    checked_part = "All" if len(looked) == shards else f"{len(looked)} of {shards:,}"
    shards_in_words = f"{checked_part} shards" if shards > 1 else "Its one shard"
    counts = ", ".join(
        counted(verification[f"{noun}s"], noun) for noun in ("row", "segment", "token")
    )
    did = (
        f"{shards_in_words} recomputed ({counts}), and all of the dataset's own files. From the"
        " sources, only the segments shown below were rebuilt. packprep verify --replay rebuilds"
        " all."
    )
    if len(looked) < shards:
        did += " The other shards were not checked. packprep verify checks all."
    if not verification["faults"]:
        return {
            **verdict,
            "kind": "good",
            "sign": "✓",
            "title": "Every invariant holds",
            "text": did,
        }
    # Without a sound plan, verification checks no shard and says only that.
    if not verification["shards"] and shards:
        did = (
            "No shard was checked, because nothing can be recomputed without an intact plan and"
            " tokenizer."
        )
    faults = [
        {
            "promise": fault["promise"],
            "says": promises[fault["promise"]],
            "file": fault["file"],
            "row": "" if fault["row"] is None else f"{fault['row']:,}",
            "slot": "" if fault["slot"] is None else f"{fault['slot']:,}",
            "message": (
                fault["message"] + ("" if fault["value"] is None else f" (value {fault['value']})")
            ),
        }
        for fault in verification["listed"][:MOST_LINES]
    ]
    more_faults = verification["faults"] - len(faults)
    named = dict.fromkeys(fault["promise"] for fault in verification["listed"])
    return {
        **verdict,
        "title": counted(verification["faults"], "fault"),
        "text": did,
        "faults": faults,
        "more": f"… and {counted(more_faults, 'more fault')}; packprep verify lists them."
        if more_faults
        else "",
        "promises": [
            (promise, promises[promise])
            for promise in sorted(named, key=lambda name: int(name[1:]))
        ],
    }


def _looked_at(figures: Figures | None, shards: int, total: int) -> str:
    looked, rows, slot_rows = (
        (0, 0, 0) if figures is None else (figures.shards, figures.rows, figures.slot_rows)
    )
    text = "From all rows."
    if looked < shards:
        text = f"From {rows:,} of {counted(total, 'row')}, in {looked} of {shards:,} shards."
    if slot_rows < rows:
        text += f" Spans and noise come from the first rows of each shard, {slot_rows:,} in total."
    return text


def _sample_says(rows: Sequence[Mapping[str, Any]], total: int) -> str:
    if not rows:
        return "There is no row to show."
    if len(rows) == total:
        summary = "All rows, as a model reads them."
    else:
        summary = (
            f"{len(rows)} of {counted(total, 'row')}, as a model reads them. They are evenly"
            " spaced, with some for each task."
        )
    return (
        f"{summary} Each segment has its trained tokens and its original text. The arrow keys turn"
        " the pages."
    )


MOST_ROWS, FEWEST_ROWS = 48, 8
MOST_SHOWN_SLOTS = 1 << 18
"""Maximum number of slots in all rows of a report, unless FEWEST_ROWS rows have more."""
ROWS_OF_A_TASK = 4


def rows_with_tasks(
    row: np.ndarray, task: np.ndarray, first_row: int
) -> tuple[dict[int, list[int]], int, int]:
    """Return some evenly spaced rows of each task, and the row with segments of the most tasks.

    Args:
        row: Row of each segment in its shard, int64[segments], not empty.
        task: Task of each segment, int64[segments].
        first_row: Number of the shard's first row in the dataset.

    Returns:
        (by_task, best, most). `by_task` is task → numbers of rows with a segment of the task.
        `best` is the number of the row with the most tasks, and `most` is how many it has.
    """
    by_task, pairs = {}, np.unique(np.stack((task, row), axis=1), axis=0)
    for t in np.unique(task).tolist():
        rows = pairs[pairs[:, 0] == t, 1]
        by_task[t] = (rows[evenly(len(rows), ROWS_OF_A_TASK)] + first_row).tolist()
    counts = np.bincount(pairs[:, 1])
    return by_task, int(counts.argmax()) + first_row, int(counts.max())


def chosen_rows(
    rows: Sequence[range], by_task: Sequence[Mapping[int, Sequence[int]]], best: int, length: int
) -> list[int]:
    """Return the rows to show, ascending.

    There is a row for each task, even if this gives more than the usual number of rows. Up to this
    number, further rows are added: evenly spaced rows, and further rows of each task.

    Args:
        rows: The rows of each shard that is shown.
        by_task: Task → rows that have this task, for each shard, from `rows_with_tasks`.
        best: A row that is always shown, or -1 for none.
        length: Slots per row.
    """
    most_rows = max(min(MOST_ROWS, MOST_SHOWN_SLOTS // length), FEWEST_ROWS)
    every = (
        np.concatenate([np.array(of_shard, np.int64) for of_shard in rows])
        if rows
        else np.zeros(0, np.int64)
    )
    chosen = {best} if best >= 0 else set()
    rows_of_tasks: dict[int, list[int]] = {}
    for of_shard in by_task:
        for t, with_task in of_shard.items():
            rows_of_tasks.setdefault(t, []).extend(with_task)
    candidates = {
        t: [with_task[i] for i in evenly(len(with_task), ROWS_OF_A_TASK)]
        for t, with_task in sorted(rows_of_tasks.items())
    }
    # Each task gets a row, even if this exceeds the usual number.
    for with_task in candidates.values():
        if not chosen.intersection(with_task):
            chosen.add(with_task[0])
    # Half of the rows are evenly spaced, whatever their tasks are.
    chosen.update(
        every[evenly(len(every), max(most_rows // 2, 1))].tolist()[
            : max(most_rows - len(chosen), 0)
        ]
    )
    # The tasks then take turns, so that a frequent task does not take all rows.
    for turn in range(ROWS_OF_A_TASK):
        for with_task in candidates.values():
            if turn < len(with_task) and len(chosen) < most_rows:
                chosen.add(with_task[turn])
    for row in every[evenly(len(every), most_rows)].tolist():
        if len(chosen) < most_rows:
            chosen.add(row)
    return sorted(chosen)
