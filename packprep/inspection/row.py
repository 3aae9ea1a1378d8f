"""One row, decoded: every segment's origin, its slots as text, and which predictions are trained."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from packprep.building.output import Nearby, Output
from packprep.dataset.json_files import shard_name
from packprep.dataset.loader import Dataset, Row
from packprep.dataset.shard import shard_in
from packprep.errors import ArgumentError, DatasetError
from packprep.inspection.columns import segments_of
from packprep.inspection.decoding import TokenTexts
from packprep.inspection.opened import Opened, opened

MOST_SHARDS = 256  # that are searched for a row with all tasks


def describe_row(
    directory: str | os.PathLike | Output, row: int, moved: Mapping[str, str], from_plan: bool = False
) -> dict[str, Any]:
    """One row as plain values: its segments, and each segment's parts as pieces {text, ids, loss, kind}.

    row: its number, or −1 for the first row that shows the most tasks; `lacks` then names the tasks that it has not.
    moved: source name → prefix where its files lie now; segments are built again from them and compared. from_plan: the same
    of the other sources, where the plan says that they lie.
    Raises ArgumentError for a row that there is not, DatasetError for a dataset that cannot be read, RecipeError for an
    unknown source.
    """
    with opened(directory, moved, from_plan) as data:
        described = row_of(data, row_number(data, row))
        shown = {segment["task"] for segment in described["segments"]}
        tasks = data.dataset.tasks if row < 0 else []
        return {**described, "lacks": [t["name"] for t in tasks if t["weight"] and t["name"] not in shown]}


def row_number(data: Opened, row: int) -> int:
    """The row that is asked for: itself, or for −1 the first that shows the most tasks. ArgumentError if there is none."""
    rows = len(data.dataset)
    if not rows:
        raise ArgumentError(f"{data.near.out} has no rows: none of its documents was used")
    if not -1 <= row < rows:
        raise ArgumentError(
            f"row {row}: {data.near.out} has {rows} rows; give 0 … {rows - 1}, or −1 for one that shows its tasks"
        )
    return row if row >= 0 else _row_of_most_tasks(data.near, data.dataset)


def row_of(data: Opened, number: int) -> dict[str, Any]:
    """Row `number`, which there is, of an open dataset, as plain values."""
    shard, in_shard = data.place(number)
    data.near.bring(shard_name(shard))
    stored = shard_in(data.near.folder, data.dataset.manifest, shard)
    return row_with(data, number, data.rebuilt(shard, np.arange(*stored.segment_range(in_shard))))


def row_with(data: Opened, number: int, rebuilt: Sequence[str]) -> dict[str, Any]:
    """The same of a row whose shard is near; rebuilt: of each of its segments, what building it again came to."""
    dataset = data.dataset
    view = dataset.row(number)
    segments = [segment_of(data, view, i, rebuilt[i]) for i in range(len(rebuilt))]
    slots = sum(segment["slots"] for segment in segments)
    return {
        **place_of(data, number),
        "seq_length": dataset.seq_length,
        "slots": slots,
        "padding": dataset.seq_length - slots,
        "trained": int(view.loss_mask.sum()),
        "segments": segments,
    }


def place_of(data: Opened, number: int) -> dict[str, Any]:
    """Where row `number` is."""
    shard, in_shard = data.place(number)
    return {
        "directory": str(data.near.out),
        "row": number,
        "rows": len(data.dataset),
        "shard": data.dataset.manifest["shards"][shard]["file"],
        "row_in_shard": in_shard,
    }


def _row_of_most_tasks(near: Nearby, dataset: Dataset) -> int:
    """The first row with a segment of every task that has one; else the first with the most tasks of those looked at."""
    ledger = dataset.manifest["ledger"].get("tasks", {})
    wanted = np.array([bool(t["weight"]) and ledger.get(t["name"], {}).get("segments", 1) > 0 for t in dataset.tasks])
    best, most, first_row = 0, -1, 0
    for number, entry in enumerate(dataset.manifest["shards"][:MOST_SHARDS]):
        if entry["rows"]:
            with near.brought(shard_name(number)):
                segments = segments_of(shard_in(near.folder, dataset.manifest, number), dataset.manifest)
            seen = np.zeros((entry["rows"], len(dataset.tasks)), np.bool_)
            seen[segments.row, segments.task] = True
            count = seen[:, wanted].sum(axis=1)
            if count.max() > most:
                best, most = first_row + int(count.argmax()), int(count.max())
            if most == wanted.sum():
                break
        first_row += entry["rows"]
    return best


def segment_of(data: Opened, row: Row, i: int, rebuilt: str) -> dict[str, Any]:
    """Segment i of a row as plain values: its header, and its parts as pieces {text, ids, loss, kind}."""
    dataset, texts = data.dataset, data.texts
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
        "file": data.file_name(columns["file"]),
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
