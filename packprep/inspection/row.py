"""One row, decoded: every segment's origin, its slots as text, and which predictions are trained."""

import os
import shutil
import sys
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from packprep.building.output import Nearby, Output, nearby, output_of
from packprep.building.replay import replay_segments
from packprep.building.run import open_job, read_plan
from packprep.corpus.finding import absolute_prefix
from packprep.dataset.loader import Dataset, Row, open_dataset
from packprep.dataset.manifest import MANIFEST_NAME, PLAN_NAME, TOKENIZER_NAME, shard_name
from packprep.dataset.opening import read_file
from packprep.digests import digest_of
from packprep.errors import ArgumentError, DatasetError, PackprepError, RecipeError, SourceError
from packprep.inspection.columns import segments_of, shard_of
from packprep.inspection.decoding import BYTES, SPECIAL, TokenTexts
from packprep.inspection.lines import (
    IN_PART,
    LED_ON,
    NOT_TRAINED,
    TRAINED,
    Unit,
    counted,
    shortened,
    units_of,
    visible,
    wrapped,
)

MOST_SHARDS = 256  # that are searched for a row with all tasks
MOST_SEGMENTS = 24  # of a row that are printed, beside the first of each task
WIDTH = 100
STYLES = {SPECIAL: "bold cyan", BYTES: "yellow", "gap": "dim"}
IDENTICAL = "identical"


def describe_row(directory: str | os.PathLike | Output, row: int, moved: Mapping[str, str]) -> dict[str, Any]:
    """One row as plain values: its segments, and each segment's parts as pieces {text, ids, loss, kind}.

    row: its number, or −1 for the first row that shows the most tasks; `lacks` then names the tasks that it has not.
    moved: source name → prefix where its files lie now; segments are built again from them and compared.
    Raises ArgumentError for a row that there is not, DatasetError for a dataset that cannot be read, RecipeError for an
    unknown source.
    """
    with nearby(output_of(directory)) as near:
        near.bring(MANIFEST_NAME, PLAN_NAME, TOKENIZER_NAME)
        return _describe_row(near, row, moved)


def _describe_row(near: Nearby, row: int, moved: Mapping[str, str]) -> dict[str, Any]:
    directory = near.folder
    dataset = open_dataset(directory)
    manifest = dataset.manifest
    if not len(dataset):
        raise ArgumentError(f"{directory} has no rows: none of its documents was used")
    if not -1 <= row < len(dataset):
        raise ArgumentError(
            f"row {row}: {directory} has {len(dataset)} rows; give 0 … {len(dataset) - 1}, or −1 for one that shows its tasks"
        )
    names = [source["name"] for source in manifest["sources"]]
    for name in moved:
        if name not in names:
            raise RecipeError(f"--source {name}=…: the dataset has no source of that name; it has {', '.join(names)}")
    chosen = row if row >= 0 else _row_of_most_tasks(near, dataset)
    texts = _token_texts(directory, dataset)
    first_rows = np.concatenate(([0], np.cumsum([entry["rows"] for entry in manifest["shards"]])))
    shard = int(np.searchsorted(first_rows, chosen, side="right")) - 1
    in_shard = chosen - int(first_rows[shard])
    near.bring(shard_name(shard))
    view = dataset.row(chosen)
    rebuilt = _rebuilt(directory, dataset, shard, in_shard, moved)
    files = _file_names(directory)
    segments = [_describe_segment(dataset, view, i, texts, files, rebuilt[i]) for i in range(view.n_segments)]
    slots = sum(segment["slots"] for segment in segments)
    shown = {segment["task"] for segment in segments}
    return {
        "directory": str(near.out),
        "row": chosen,
        "rows": len(dataset),
        "shard": manifest["shards"][shard]["file"],
        "row_in_shard": in_shard,
        "seq_length": dataset.seq_length,
        "slots": slots,
        "padding": dataset.seq_length - slots,
        "trained": int(view.loss_mask.sum()),
        "segments": segments,
        "lacks": [task["name"] for task in dataset.tasks if row < 0 and task["weight"] and task["name"] not in shown],
    }


def _row_of_most_tasks(near: Nearby, dataset: Dataset) -> int:
    """The first row with a segment of every task that has one; else the first with the most tasks of those looked at."""
    ledger = dataset.manifest["ledger"].get("tasks", {})
    wanted = np.array([bool(t["weight"]) and ledger.get(t["name"], {}).get("segments", 1) > 0 for t in dataset.tasks])
    best, most, first_row = 0, -1, 0
    for number, entry in enumerate(dataset.manifest["shards"][:MOST_SHARDS]):
        if entry["rows"]:
            with near.brought(shard_name(number)):
                segments = segments_of(shard_of(near.folder, dataset.manifest, number), dataset.manifest)
            seen = np.zeros((entry["rows"], len(dataset.tasks)), np.bool_)
            seen[segments.row, segments.task] = True
            count = seen[:, wanted].sum(axis=1)
            if count.max() > most:
                best, most = first_row + int(count.argmax()), int(count.max())
            if most == wanted.sum():
                break
        first_row += entry["rows"]
    return best


def _token_texts(directory: Path, dataset: Dataset) -> TokenTexts:
    path = directory / dataset.manifest["tokenizer"]["file"]
    try:
        data = read_file(path)
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror}; rows cannot be decoded without it: put it back") from None
    here, digest = digest_of(data), dataset.manifest["tokenizer"]["digest"]
    if here != digest:
        raise DatasetError(f"{path}: its digest is {here} and the manifest's {digest}: put the right file back")
    roles = dataset.manifest["specials"].values()
    return TokenTexts(data, [id for ids in roles for id in (ids if isinstance(ids, list) else [ids])])


def _file_names(directory: Path) -> list[str]:
    plan = read_plan(directory)
    return [file["name"] for file in plan["files"]] if plan else []


def _rebuilt(directory: Path, dataset: Dataset, number: int, row: int, moved: Mapping[str, str]) -> list[str]:
    """For each segment of a row of a shard: "identical", "differs: …" or "not rebuilt: …"."""
    shard = shard_of(directory, dataset.manifest, number)
    chosen = np.arange(*shard.segment_range(row))
    try:
        job = open_job(directory)
        if moved:
            prefixes = [absolute_prefix(moved.get(source.name, source.prefix)) for source in job.sources]
            job = open_job(directory, prefixes)
    except PackprepError as error:
        return [f"not rebuilt: {error}"] * len(chosen)

    def replay(which: np.ndarray) -> list[str]:
        return [f"differs: {what}" if what else IDENTICAL for what in replay_segments(job, shard.arrays, which)]

    try:
        return replay(chosen)
    except PackprepError as error:
        if not isinstance(error, SourceError):
            return [f"not rebuilt: {error}"] * len(chosen)
    lines = []
    for i in range(len(chosen)):  # one missing file says nothing of the segments of others
        try:
            lines += replay(chosen[i : i + 1])
        except SourceError as error:
            lines.append(f"not rebuilt: {error}")
    return lines


def _describe_segment(
    dataset: Dataset, row: Row, i: int, texts: TokenTexts, files: list[str], rebuilt: str
) -> dict[str, Any]:
    columns = {name: values[i].item() for name, values in row.segments.items()}
    for name, entries in (("task", dataset.tasks), ("source", dataset.manifest["sources"])):
        if columns[name] >= len(entries):
            raise DatasetError(
                f"{dataset.directory}: row {row.index}: segment_{name} {columns[name]} is beyond the manifest's {len(entries)}"
            )
    task, begin, end = dataset.tasks[columns["task"]], columns["begin"], columns["end"]
    next_begin = int(row.segments["begin"][i + 1]) if i + 1 < row.n_segments else end
    return {
        "number": i + 1,
        "task": task["name"],
        "objective": task["objective"],
        "source": dataset.manifest["sources"][columns["source"]]["name"],
        "file": files[columns["file"]] if columns["file"] < len(files) else f"file {columns['file']}",
        "document": columns["doc"],
        "start": columns["start"],
        "tokens": columns["tokens"],
        "begin": begin,
        "slots": end - begin,
        "padding": next_begin - end,
        "prefix": columns["prefix"],
        "trained": int(row.loss_mask[begin:end].sum()),
        "noise": columns["noise"],
        "loss_weight": columns["loss_weight"],
        "key": f"{columns['key']:016x}",
        "repeat": columns["repeat"],
        "rebuilt": rebuilt,
        "predicts": "in place" if task["label_alignment"] == "same_slot" else "next",
        "parts": [
            {"name": name, "pieces": _pieces(texts, values[low:high], row.loss_mask[low:high])}
            for name, values, low, high in _parts(row, task, begin, end, columns["prefix"])
            if low < high
        ],
    }


Part = tuple[str, np.ndarray, int, int]


def _parts(row: Row, task: Mapping[str, Any], begin: int, end: int, prefix: int) -> list[Part]:
    """What of a segment is shown apart: (name, tokens [T], first slot, end)."""
    if task["attention"] == "prefix":
        first, second = ("inputs", "targets") if task["objective"] == "span_corruption" else ("prefix", "continuation")
        cut = min(begin + max(prefix, 0), end)
        return [(first, row.tokens, begin, cut), (second, row.tokens, cut, end)]
    if task["attention"] == "block_diffusion":
        half = begin + (end - begin) // 2
        return [("x_t", row.tokens, begin, half), ("x_0", row.tokens, half, end)]
    if task["label_alignment"] == "same_slot":
        return [("inputs", row.tokens, begin, end), ("labels", row.labels, begin, end)]
    return [("text", row.tokens, begin, end)]


def _pieces(texts: TokenTexts, ids: np.ndarray, loss: np.ndarray) -> list[dict[str, Any]]:
    pieces, at = [], 0
    for piece in texts.pieces(ids.tolist()):
        end = at + len(piece.ids)
        pieces.append({"text": piece.text, "ids": piece.ids, "loss": loss[at:end].tolist(), "kind": piece.kind})
        at = end
    return pieces


def print_row(row: Mapping[str, Any]) -> None:
    """The row as text: in a terminal as wide as that and with colour, else plain, 100 columns wide."""
    console = Console(highlight=False)
    width = min(max(shutil.get_terminal_size((WIDTH, 24)).columns, 40), 160) if console.is_terminal else WIDTH
    with console.capture() as drawn:  # written at once, so that a reader that has gone is met where any other would be
        _draw(console, row, width)
    sys.stdout.write(drawn.get())


def _draw(console: Console, row: Mapping[str, Any], width: int) -> None:
    def put(line: Text | str, style: str = "") -> None:
        console.print(line if isinstance(line, Text) else Text(line, style), soft_wrap=True)

    put(f"row {row['row']:,} of {row['rows']:,} · {row['shard']} row {row['row_in_shard']:,}", "bold")
    put(
        f"{row['seq_length']:,} slots: {row['slots']:,} in {counted(len(row['segments']), 'segment')}, "
        f"{row['padding']:,} padding · {row['trained']:,} trained"
    )
    if row["lacks"]:
        put(f"no row with a segment of every task was found; this one lacks {', '.join(row['lacks'])}")
    printed = _printed(row["segments"])
    names = [len(part["name"]) for segment in printed for part in segment["parts"]]
    gutter = max(names, default=0) + 4
    marks: set[str] = set()
    for segment in printed:
        put("")
        _put_header(put, segment)
        for part in segment["parts"]:
            name = part["name"]
            for line in shortened(list(wrapped(units_of(part["pieces"]), width - gutter))):
                text = Text().append(f"  {name:<{gutter - 2}}", "dim")
                for style, units in groupby(line, _style):
                    text.append("".join(unit.shown for unit in units), style)
                put(text)
                if marked := "".join(unit.marks for unit in line).rstrip():
                    put(" " * gutter + marked, "dim")
                    marks.update(marked)
                name = ""
        if segment["padding"]:
            put(f"  then {counted(segment['padding'], 'slot')} of padding")
    put("")
    left_out = len(row["segments"]) - len(printed)
    if left_out:
        put(f"… and {counted(left_out, 'more segment')}; --json gives all")
    if row["padding"]:
        put(f"padding: {counted(row['padding'], 'slot')}")
    put(_legend(marks, {segment["predicts"] for segment in printed}), "dim")


def _style(unit: Unit) -> str:
    return STYLES.get(unit.kind, "green" if unit.mark in (TRAINED, IN_PART, LED_ON) else "")


def _printed(segments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first segments, and of the others the first of each task that they have not."""
    printed, seen = segments[:MOST_SEGMENTS], {segment["task"] for segment in segments[:MOST_SEGMENTS]}
    for segment in segments[MOST_SEGMENTS:]:
        if segment["task"] not in seen:
            printed.append(segment)
            seen.add(segment["task"])
    return printed


def _put_header(put, segment: Mapping[str, Any]) -> None:
    objective = f" ({segment['objective']})" if segment["objective"] != segment["task"] else ""
    origin = f"{segment['source']} {visible(segment['file'])} at {segment['document']:,}"
    put(f"{segment['number']}  {segment['task']}{objective} · {origin}", "bold")
    facts = [
        f"tokens {segment['start']:,} … {segment['start'] + segment['tokens'] - 1:,} of the document",
        f"{segment['slots']:,} slots from {segment['begin']:,}",
        f"prefix {segment['prefix']:,}",
        f"{segment['trained']:,} trained",
    ]
    if segment["noise"]:
        facts.append(f"noise {segment['noise']:.3g}, loss weight {segment['loss_weight']:.3g}")
    put(f"  {' · '.join(facts)}")
    use = f" · use {segment['repeat']}" if segment["repeat"] else ""
    rebuilt = segment["rebuilt"]
    words = rebuilt if rebuilt.startswith("not rebuilt") else f"rebuilt from source: {rebuilt}"
    put(f"  key {segment['key']}{use} · {words}")


def _legend(marks: set[str], predicts: set[str]) -> str:
    what = " or ".join({"next": "the next token", "in place": "its label"}[p] for p in sorted(predicts))
    words = {
        TRAINED: f"{TRAINED} trained: the prediction of {what} made here is in the loss",
        NOT_TRAINED: f"{NOT_TRAINED} not trained",
        IN_PART: f"{IN_PART} a character of several tokens, some trained",
        LED_ON: f"{LED_ON} the same token",
    }
    return " · ".join(text for mark, text in words.items() if mark in marks)
