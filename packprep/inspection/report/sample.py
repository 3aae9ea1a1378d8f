"""Rows for the report: each described as `inspect --row` does, beside it what its segments were before, and small enough.

```
row_with ─► parts as pieces ─┬─► tokens: {t: texts, f: flags, i: ids}, the middle of a long part left out
restore, labels ─► originals ┘
```
Texts have every character showing, as in a terminal; a flag is a digit of base 32, the sum of TRAINED … CORRUPTED.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from packprep.building.job import Job
from packprep.building.progress import visible
from packprep.building.replay import Stored, restore, stored_segments
from packprep.corpus.planning import UNREAD
from packprep.corpus.readers import PIECE_BYTES
from packprep.dataset.json_files import shard_name
from packprep.dataset.loader import Row
from packprep.dataset.shard import shard_in
from packprep.errors import DatasetError
from packprep.inspection.decoding import BYTES, SPECIAL
from packprep.inspection.lines import clipped
from packprep.inspection.opened import Opened
from packprep.inspection.row import row_with

TRAINED, IN_PART, IS_SPECIAL, CORRUPTED, IS_BYTES = 1, 2, 4, 8, 16
DIGITS = "0123456789abcdefghijklmnopqrstuv"
ALL_BYTES, MOST_BYTES = 4_000_000, 160_000
"""JSON of all rows together, and of one."""
MOST_SEGMENTS, MOST_BOUNDS = 200, 2000
"""Segments of a row that are described, and that are drawn in the picture of its mask."""
MOST_READ_BYTES = 1 << 30
"""Bytes of source files that are read to build segments again."""
_SIZES = (
    (1 << 40, 200),
    (4096, 200),
    (1024, 200),
    (256, 200),
    (128, 200),
    (64, 100),
    (32, 100),
    (24, 60),
    (16, 60),
    (12, 40),
    (8, 25),
    (8, 8),
)
_TEXT, _NAME, _MESSAGE = 80, 200, 400  # characters that are kept


def sample_rows(data: Opened, rows: Sequence[int], sound: frozenset[int]) -> list[dict[str, Any]]:
    """The rows as plain values; {row, shard, unreadable: why} where one cannot be read.

    sound: shards in which verification found no fault: only their segments are inverted and built again.
    """
    described: list[dict[str, Any]] = []
    places = [data.place(row) for row in rows]
    read, left, unshown = 0, ALL_BYTES, len(rows)
    for shard in dict.fromkeys(shard for shard, _ in places):
        own = [row for row, (b, _) in zip(rows, places, strict=True) if b == shard]
        with data.near.brought(shard_name(shard)):
            try:
                shown, read = _of_shard(data, shard, own, shard in sound, (left, unshown), read)
            except DatasetError as error:
                shown = [_unreadable(data, row, error) for row in own]
            described += shown
            left -= sum(map(_size, shown))
            unshown -= len(own)
    return described


def _unreadable(data: Opened, row: int, error: Exception) -> dict[str, Any]:
    message = clipped(visible(data.near.named(str(error))), _MESSAGE)
    return {"row": row, "shard": shard_name(data.place(row)[0]), "unreadable": message, "tasks": []}


def _of_shard(
    data: Opened, number: int, rows: Sequence[int], sound: bool, room: tuple[int, int], read: int
) -> tuple[list[dict[str, Any]], int]:
    shard = shard_in(data.near.folder, data.dataset.manifest, number)
    ranges = {row: shard.segment_range(data.place(row)[1]) for row in rows}
    every = np.concatenate([np.arange(*own) for own in ranges.values()])
    job = data.job
    verdicts = dict.fromkeys(
        every.tolist(), "not rebuilt: verification found faults in this shard, or did not look at it"
    )
    stored: Stored | None = None
    if sound and isinstance(job, Job):
        chosen, read = _affordable(job, shard.arrays, every, read)
        verdicts = dict.fromkeys(
            every.tolist(),
            f"not rebuilt: its file takes more reading than {MOST_READ_BYTES >> 30} GiB in all; `packprep inspect --row` does it",
        )
        verdicts |= zip(chosen.tolist(), data.rebuilt(number, chosen), strict=True)
        stored = stored_segments(job, shard.arrays)
    elif sound:
        verdicts = dict.fromkeys(every.tolist(), f"not rebuilt: {job}")
    shown: list[dict[str, Any]] = []
    left, unshown = room
    for row, own in ranges.items():
        budget = min(MOST_BYTES, (left - sum(map(_size, shown))) // (unshown - len(shown)))
        try:
            view = data.dataset.row(row)
            plain = row_with(data, row, [verdicts[g] for g in range(*own)])
            shown.append(_fitted(data, plain, view, own[0], stored, shard.arrays, budget))
        except DatasetError as error:
            shown.append(_unreadable(data, row, error))
    return shown, read


def _affordable(job: Job, arrays: Mapping[str, np.ndarray], every: np.ndarray, read: int) -> tuple[np.ndarray, int]:
    """(the segments whose files may be read again, ascending; bytes that reading takes with these)."""
    sources, files = arrays["segment_source"][every].tolist(), arrays["segment_file"][every].tolist()
    chosen: list[int] = []
    known: dict[tuple[int, ...], bool] = {}
    for g, s, file in zip(every.tolist(), sources, files, strict=True):
        source = job.sources[s]
        format, compression = source.formats[file - source.first_file]
        size = 0 if source.prefix == UNREAD else int(source.files.sizes[file - source.first_file])
        place: tuple[int, ...] = (file, int(arrays["segment_repeat"][g]))
        if format == "jsonl" and not compression:
            size, place = min(size, PIECE_BYTES), (*place, int(arrays["segment_doc"][g]) // PIECE_BYTES)
        if place not in known:
            known[place] = read + size <= MOST_READ_BYTES
            read += size if known[place] else 0
        if known[place]:
            chosen.append(g)
    return np.array(chosen, np.int64), read


def _fitted(
    data: Opened, plain: Mapping[str, Any], view: Row, first: int, stored: Stored | None, arrays: Any, budget: int
) -> dict[str, Any]:
    """The row, of which as much is left out as it takes to have `budget` bytes of JSON."""
    tasks, columns = data.dataset.tasks, view.segments
    bounds = []
    for i in range(min(len(plain["segments"]), MOST_BOUNDS)):
        task = tasks[int(columns["task"][i])]
        begin, end, prefix = (int(columns[name][i]) for name in ("begin", "end", "prefix"))
        bounds.append(
            [begin, end, prefix, task["parameters"].get("block_length", 1)] if prefix < 0 else [begin, end, prefix]
        )
    whole = [
        _segment(data, segment, view, first + i, stored, arrays)
        for i, segment in enumerate(plain["segments"][:MOST_SEGMENTS])
    ]
    names = ("row", "shard", "row_in_shard", "slots", "padding", "trained")
    head = {name: plain[name] for name in names} | {
        "count": len(plain["segments"]),
        "tasks": list(dict.fromkeys(clipped(segment["task"], _NAME) for segment in plain["segments"])),
    }
    row: dict[str, Any] = {}
    for tokens, segments in _SIZES:
        row = {**head, "bounds": bounds[: 10 * segments], "segments": [_shortened(s, tokens) for s in whole[:segments]]}
        if _size(row) <= budget:
            break
    return row


def _size(row: Mapping[str, Any]) -> int:
    return len(json.dumps(row, separators=(",", ":")))


def _segment(
    data: Opened, segment: Mapping[str, Any], view: Row, g: int, stored: Stored | None, arrays: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    task = data.dataset.tasks[int(view.segments["task"][segment["number"] - 1])]
    begin, slots, in_place = segment["begin"], segment["slots"], task["label_alignment"] == "same_slot"
    changed = (view.tokens != view.labels)[begin : begin + slots] if in_place else np.zeros(slots, np.bool_)
    parts, at = [], 0
    for part in segment["parts"]:
        if part["name"] == "labels":
            continue  # they are the original
        parts.append(_tokens(part["name"], part["pieces"], changed[at:], begin + at))
        at += sum(len(piece["ids"]) for piece in part["pieces"])
    original, why = _original(data, segment, task, view, g, stored, arrays)
    kept = ("number", "document", "start", "tokens", "begin", "slots", "padding", "prefix", "trained", "noise")
    described = {name: segment[name] for name in (*kept, "loss_weight", "key", "repeat", "predicts")}
    for name in ("task", "objective", "source", "file"):
        described[name] = clipped(visible(segment[name]), _NAME)
    rebuilt = clipped(visible(data.near.named(segment["rebuilt"])), _MESSAGE)
    return {
        **described,
        "rebuilt": rebuilt,
        "rule": task["attention"],
        "parts": parts,
        "original": original,
        "why": why,
    }


def _original(
    data: Opened,
    segment: Mapping[str, Any],
    task: Mapping[str, Any],
    view: Row,
    g: int,
    stored: Stored | None,
    arrays: Any,
) -> tuple[dict[str, Any] | None, str]:
    """(the segment before its objective, its corrupted tokens flagged; or None and why there is nothing to show)."""
    begin, slots = segment["begin"], segment["slots"]
    if task["label_alignment"] == "same_slot":
        half = slots // 2 if task["attention"] == "block_diffusion" else slots
        ids, noised = view.labels[begin : begin + half], (view.tokens != view.labels)[begin : begin + half]
        noised = (
            noised | (view.loss_mask[begin : begin + half] != 0) if task["objective"] != "uniform_diffusion" else noised
        )
    elif task["objective"] in ("causal", "prefix_lm"):
        return None, "The row holds the text as it is."
    elif stored is None:
        return None, "Not inverted: that takes a plan that can be opened here and a shard without faults."
    else:
        assert isinstance(data.job, Job)
        ids, _, fits = restore(data.job, arrays, stored, np.array([g]))
        if not fits[0]:
            return None, "Not inverted: its sentinels are not where the header says."
        noised = np.zeros(len(ids), np.bool_)
        if task["objective"] == "span_corruption":
            before, prefix = int(stored.bos[g]) + int(task["mode_token"] is not None), segment["prefix"]
            inputs = view.tokens[begin + before : begin + prefix]
            noised = noise_of(
                inputs,
                len(ids),
                view.tokens[begin + prefix : begin + slots],
                data.dataset.manifest["specials"]["sentinels"],
            )
    texts = data.texts.pieces(ids.tolist())
    pieces = [{"text": p.text, "ids": p.ids, "kind": p.kind, "loss": [0] * len(p.ids)} for p in texts]
    return _tokens("original", pieces, noised, -1), ""


def noise_of(inputs: np.ndarray, n: int, targets: np.ndarray, sentinels: Iterable[int]) -> np.ndarray:
    """bool[n]: which tokens of a span-corrupted body were noise; none where sentinels and tokens do not add up.

    inputs, targets: the slots before and after the prefix's end, without bos and mode token; targets may have eos.
    """
    ids = np.fromiter(sentinels, np.int64)
    here, there = np.flatnonzero(np.isin(inputs, ids)), np.flatnonzero(np.isin(targets, ids))
    noised = np.zeros(n, np.bool_)
    if len(here) != len(there) or not len(here):
        return noised
    lengths = np.diff(np.append(there, len(here) + n - len(inputs) + len(there))) - 1
    if (lengths < 0).any() or len(inputs) - len(here) + lengths.sum() != n:
        return noised
    begins = here - np.arange(len(here)) + np.cumsum(lengths) - lengths
    for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True):
        noised[begin : begin + length] = True
    return noised


def _tokens(name: str, pieces: Sequence[Mapping[str, Any]], corrupted: np.ndarray, first: int) -> dict[str, Any]:
    """A part: texts, flags and ids of its pieces, one beside the other. first: slot of the first; −1: it is in no row."""
    texts, flags, ids, at = [], [], [], 0
    for piece in pieces:
        end = at + len(piece["ids"])
        trained = sum(map(bool, piece["loss"]))
        flag = TRAINED if trained == end - at else IN_PART if trained else 0
        flag |= IS_SPECIAL * (piece["kind"] == SPECIAL) | IS_BYTES * (piece["kind"] == BYTES)
        flag |= CORRUPTED * bool(corrupted[at:end].any())
        texts.append(clipped(visible(piece["text"]), _TEXT))
        flags.append(DIGITS[flag])
        ids.append(piece["ids"][0] if end - at == 1 else piece["ids"])
        at = end
    return {"name": name, "first": first, "count": at, "runs": [{"t": texts, "f": "".join(flags), "i": ids}]}


def _shortened(segment: Mapping[str, Any], most: int) -> dict[str, Any]:
    parts = [_cut(part, most) for part in segment["parts"]]
    return {**segment, "parts": parts, "original": segment["original"] and _cut(segment["original"], most)}


def _cut(part: Mapping[str, Any], most: int) -> dict[str, Any]:
    """The part, or its begin and end around a gap: {gap: tokens left out}."""
    (run,) = part["runs"]
    if len(run["f"]) <= most:
        return dict(part)
    head, tail = most - most // 4, most // 4
    middle = run["i"][head : len(run["i"]) - tail]
    gap = sum(1 if isinstance(ids, int) else len(ids) for ids in middle)
    ends = [{k: v[:head] for k, v in run.items()}, {k: v[len(v) - tail :] for k, v in run.items()}]
    return {**part, "runs": [ends[0], {"gap": gap}, ends[1]]}
