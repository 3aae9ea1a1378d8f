"""Describe the rows of a report, with each segment's original text, in a limited size.

A row has the same content as in `inspect --row`.

```
row_with ─► parts as pieces ─┬─► tokens: {t: texts, f: flags, i: ids}, without a long middle
restore, labels ─► originals ┘
```
As in `inspect --row`, invisible characters of a text are replaced by visible characters. The flags
of a piece are one base-32 digit: the sum of the constants TRAINED … IS_BYTES that apply to the
piece.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from packprep.building.plan import Plan
from packprep.dataset.attention import RULES
from packprep.dataset.epochs.noise import SCHEDULES
from packprep.dataset.loader import Row
from packprep.dataset.manifest import is_in_place
from packprep.dataset.segments import Segments
from packprep.dataset.shard import shard_in
from packprep.errors import ArgumentError, DatasetError
from packprep.format.json_files import shard_name
from packprep.inspection.opened import NO_TOKENS, OpenedDataset
from packprep.inspection.row import row_with
from packprep.inspection.text import clipped
from packprep.messages import visible
from packprep.restoring import restore, slots_of_tokens, stored_segments
from packprep.sources.formats import PIECE_BYTES, position_of
from packprep.sources.slices import UNREAD
from packprep.tokenizer.texts import BYTES, SPECIAL

TRAINED, IN_PART, IS_SPECIAL, CORRUPTED, IS_BYTES = 1, 2, 4, 8, 16
DIGITS = "0123456789abcdefghijklmnopqrstuv"
ALL_BYTES, MOST_BYTES = 4_000_000, 160_000
"""Maximum bytes of JSON for all rows, and for one row."""
MOST_SEGMENTS, MOST_BOUNDS = 200, 2000
"""Maximum number of segments that are described per row, and maximum number that are drawn in the
picture of the attention mask."""
MOST_READ_BYTES = 1 << 30
"""Maximum bytes of source files that are read to rebuild segments."""
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
_TEXT, _NAME, _MESSAGE = 80, 200, 400  # Maximum numbers of characters that are kept.


def sample_rows(
    data: OpenedDataset, rows: Sequence[int], sound: frozenset[int]
) -> list[dict[str, Any]]:
    """Return rows as JSON-compatible values.

    An unreadable row is {row, shard, unreadable: reason, tasks: []}.

    Args:
        data: The open dataset.
        rows: Numbers of the rows.
        sound: Numbers of the shards without a fault. Only in these shards, original tokens are
            restored and segments are rebuilt from the source files.
    """
    described: list[dict[str, Any]] = []
    locations = [data.location(row) for row in rows]
    read, bytes_left, unshown = 0, ALL_BYTES, len(rows)
    for shard in dict.fromkeys(shard for shard, _ in locations):
        of_shard = [row for row, (b, _) in zip(rows, locations, strict=True) if b == shard]
        with data.local.fetched(shard_name(shard)):
            try:
                shown, read = _of_shard(
                    data, shard, of_shard, shard in sound, (bytes_left, unshown), read
                )
            except DatasetError as error:
                shown = [_unreadable(data, row, error) for row in of_shard]
            described += shown
            bytes_left -= sum(map(_size, shown))
            unshown -= len(of_shard)
    return described


def row_anew(data: OpenedDataset, shown: Mapping[str, Any], epoch: int) -> dict[str, Any] | None:
    """Return a row, resampled for `epoch`. `shown` is the row's description by `sample_rows`.

    Returns:
        {row, epoch, segments: [{number, parts}]}, or None if the row does not change, or has a task
        that cannot be resampled.

    Raises:
        DatasetError: If the stored row cannot be resampled.
    """
    number = shown["row"]
    with data.local.fetched(shard_name(data.location(number)[0])):
        stored = data.dataset.row(number)
        try:
            view = data.dataset.row(number, epoch)
        except ArgumentError:
            return None
        if np.array_equal(view.tokens, stored.tokens) and np.array_equal(
            view.loss_mask, stored.loss_mask
        ):
            return None
        plain = row_with(data, number, [""] * view.n_segments, epoch)
        fitted = _fitted(data, plain, view, 0, None, {}, _size(shown))
    segments = [
        {"number": segment["number"], "parts": segment["parts"]} for segment in fitted["segments"]
    ]
    return {"row": number, "epoch": epoch, "segments": segments}


def _unreadable(data: OpenedDataset, row: int, error: Exception) -> dict[str, Any]:
    message = clipped(visible(data.local.named(str(error))), _MESSAGE)
    return {
        "row": row,
        "shard": shard_name(data.location(row)[0]),
        "unreadable": message,
        "tasks": [],
    }


def _of_shard(
    data: OpenedDataset,
    number: int,
    rows: Sequence[int],
    sound: bool,
    room: tuple[int, int],
    read: int,
) -> tuple[list[dict[str, Any]], int]:
    shard = shard_in(data.local.folder, data.dataset.manifest, number)
    ranges = {row: shard.segment_range(data.location(row)[1]) for row in rows}
    every = np.concatenate([np.arange(*bounds) for bounds in ranges.values()])
    plan = data.plan
    # Each segment starts with the reason why it is not rebuilt, which a rebuild then replaces.
    verdicts = dict.fromkeys(
        every.tolist(),
        "not rebuilt: verification found faults in this shard, or did not check it",
    )
    stored: Segments | None = None
    # Inverting needs a valid shard, and rebuilding reads source files up to a limit.
    if sound and isinstance(plan, Plan):
        chosen, read = _affordable(plan, shard.arrays, every, read)
        verdicts = dict.fromkeys(
            every.tolist(),
            f"not rebuilt: rebuilding would read more than {MOST_READ_BYTES >> 30} GiB in total;"
            " use `packprep inspect --row` instead",
        )
        verdicts |= zip(chosen.tolist(), data.rebuilt(number, chosen), strict=True)
        stored = stored_segments(plan, shard.arrays)
    elif sound:
        verdicts = dict.fromkeys(every.tolist(), f"not rebuilt: {plan}")
    shown: list[dict[str, Any]] = []
    bytes_left, unshown = room
    for row, bounds in ranges.items():
        # The bytes that are left are divided evenly among the rows that are left.
        budget = min(MOST_BYTES, (bytes_left - sum(map(_size, shown))) // (unshown - len(shown)))
        try:
            view = data.dataset.row(row)
            plain = row_with(data, row, [verdicts[g] for g in range(*bounds)])
            shown.append(_fitted(data, plain, view, bounds[0], stored, shard.arrays, budget))
        except DatasetError as error:
            shown.append(_unreadable(data, row, error))
    return shown, read


def _affordable(
    plan: Plan, arrays: Mapping[str, np.ndarray], every: np.ndarray, read: int
) -> tuple[np.ndarray, int]:
    """Return the segments that can be rebuilt without reading more than MOST_READ_BYTES.

    The second result is `read`, plus the bytes that are read to rebuild these segments.

    Args:
        plan: The dataset's plan.
        arrays: The shard's arrays.
        every: Ascending indices of the candidate segments in the shard.
        read: Number of bytes that earlier shards read.
    """
    sources, files = (
        arrays["segment_source"][every].tolist(),
        arrays["segment_file"][every].tolist(),
    )
    chosen: list[int] = []
    is_affordable: dict[tuple[int, ...], bool] = {}
    for g, s, file in zip(every.tolist(), sources, files, strict=True):
        source = plan.sources[s]
        size = 0 if source.prefix == UNREAD else int(source.files.sizes[file - source.first_file])
        read_for: tuple[int, ...] = (file, int(arrays["segment_repeat"][g]))
        # A rebuild reads one split of a line file, or a whole file of another kind.
        if position_of(*source.formats[file - source.first_file]) == "byte":
            size, read_for = (
                min(size, PIECE_BYTES),
                (*read_for, int(arrays["segment_doc"][g]) // PIECE_BYTES),
            )
        # Segments from the same part of a file share one reading.
        if read_for not in is_affordable:
            is_affordable[read_for] = read + size <= MOST_READ_BYTES
            read += size if is_affordable[read_for] else 0
        if is_affordable[read_for]:
            chosen.append(g)
    return np.array(chosen, np.int64), read


def _fitted(
    data: OpenedDataset,
    plain: Mapping[str, Any],
    view: Row,
    first_segment: int,
    stored: Segments | None,
    arrays: Any,
    budget: int,
) -> dict[str, Any]:
    """Return the row, shortened until its JSON has at most `budget` bytes.

    If the JSON of the shortest form is still larger, that form is returned.
    """
    tasks, columns = data.dataset.tasks, view.segments
    # The picture of the attention mask needs the bounds of more segments than the text shows.
    bounds = []
    for i in range(min(len(plain["segments"]), MOST_BOUNDS)):
        task = tasks[int(columns["task"][i])]
        begin, end, prefix = (int(columns[name][i]) for name in ("begin", "end", "prefix"))
        blocks = [_blocks(task, view, begin, end)] if prefix < 0 else []
        bounds.append([begin, end, prefix, *blocks])
    described_segments = [
        _segment(data, segment, view, first_segment + i, stored, arrays)
        for i, segment in enumerate(plain["segments"][:MOST_SEGMENTS])
    ]
    names = ("row", "shard", "row_in_shard", "slots", "padding", "trained")
    head = {name: plain[name] for name in names} | {
        "count": len(plain["segments"]),
        "tasks": list(
            dict.fromkeys(clipped(segment["task"], _NAME) for segment in plain["segments"])
        ),
    }
    row: dict[str, Any] = {}
    # The sizes descend, so the first form that fits is the longest.
    for tokens, segments in _SIZES:
        row = {
            **head,
            "bounds": bounds[: 10 * segments],
            "segments": [_shortened(s, tokens) for s in described_segments[:segments]],
        }
        if _size(row) <= budget:
            break
    return row


def _size(row: Mapping[str, Any]) -> int:
    return len(json.dumps(row, separators=(",", ":")))


def _segment(
    data: OpenedDataset,
    segment: Mapping[str, Any],
    view: Row,
    g: int,
    stored: Segments | None,
    arrays: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    task = data.dataset.tasks[int(view.segments["task"][segment["number"] - 1])]
    begin, slots, in_place = segment["begin"], segment["slots"], is_in_place(task)
    # Only same-position tasks change tokens in their slots.
    changed = np.zeros(slots, np.bool_)
    if in_place:
        labels = _labels(task, view, begin, slots)
        changed[: len(labels)] = view.tokens[begin : begin + len(labels)] != labels
    parts, token_offset = [], 0
    for segment_part in segment["parts"]:
        if segment_part["name"] == "labels":
            continue  # The labels are the original.
        parts.append(
            _tokens(
                segment_part["name"],
                segment_part["pieces"],
                changed[token_offset:],
                begin + token_offset,
            )
        )
        token_offset += sum(len(piece["ids"]) for piece in segment_part["pieces"])
    original, why = _original(data, segment, task, view, g, stored, arrays)
    names = (
        "number",
        "document",
        "start",
        "tokens",
        "begin",
        "slots",
        "padding",
        "prefix",
        "trained",
        "noise",
    )
    described = {
        name: segment[name] for name in (*names, "loss_weight", "key", "repeat", "predicts")
    }
    for name in ("task", "objective", "source", "file"):
        described[name] = clipped(visible(segment[name]), _NAME)
    rebuilt = clipped(visible(data.local.named(segment["rebuilt"])), _MESSAGE)
    return {
        **described,
        "rebuilt": rebuilt,
        "rule": task["attention"],
        "parts": parts,
        "original": original,
        "why": why,
    }


def _blocks(task: Mapping[str, Any], view: Row, begin: int, end: int) -> int | list[int]:
    """Return the length of a segment's blocks, or where they start if their lengths differ."""
    if not RULES[task["attention"]].in_blocks:
        return 1
    length, half = int(task["parameters"].get("block_length", 1)), (end - begin) // 2
    starts = np.unique(view.block_starts[begin : begin + half]).tolist()
    return length if starts == list(range(0, half, length)) else starts


def _labels(task: Mapping[str, Any], view: Row, begin: int, slots: int) -> np.ndarray:
    """Return the original tokens of a same-position segment.

    For a segment that stores its tokens twice, they are the tokens of the clean copy.
    """
    if RULES[task["attention"]].in_blocks:
        return view.tokens[begin + slots // 2 : begin + slots]
    return view.labels[begin : begin + slots]


def _original(
    data: OpenedDataset,
    segment: Mapping[str, Any],
    task: Mapping[str, Any],
    view: Row,
    g: int,
    stored: Segments | None,
    arrays: Any,
) -> tuple[dict[str, Any] | None, str]:
    """Return (part with the segment's original tokens, ""), or (None, reason) if they are unknown.

    The flags mark the tokens that the objective corrupted.
    """
    begin, number = segment["begin"], segment["number"] - 1
    if not segment["tokens"]:
        return None, f"{NO_TOKENS.capitalize()}."
    if is_in_place(task):
        ids = _labels(task, view, begin, segment["slots"])
        first_copy = slice(begin, begin + len(ids))
        noised = view.tokens[first_copy] != ids
        law = SCHEDULES[task["objective"]]
        # A corrupted slot may keep its token, but it is trained.
        if not law.any_token(task["parameters"]) and not RULES[task["attention"]].in_blocks:
            noised |= view.loss_mask[first_copy] != 0
    elif (
        isinstance(data.plan, Plan)
        and data.plan.tasks[int(view.segments["task"][number])].objective.supervised
    ):
        return None, "The row has the text unchanged."
    elif stored is None:
        return (
            None,
            "Not inverted: this needs a usable plan and a shard without faults.",
        )
    else:
        assert isinstance(data.plan, Plan)
        ids, _, fits = restore(data.plan, arrays, stored, np.array([g]))
        if not fits[0]:
            return None, "Not inverted: its sentinels do not match the header."
        slots = slots_of_tokens(data.plan, arrays, stored, np.array([g]), ids)
        # The objective moved the corrupted tokens to slots after the prefix.
        noised = (slots >= begin + segment["prefix"]) & (segment["prefix"] > 0)
    texts = data.texts.pieces(ids.tolist())
    pieces = [
        {"text": p.text, "ids": p.ids, "kind": p.kind, "loss": [0] * len(p.ids)} for p in texts
    ]
    return _tokens("original", pieces, noised, -1), ""


def _tokens(
    name: str, pieces: Sequence[Mapping[str, Any]], corrupted: np.ndarray, first_slot: int
) -> dict[str, Any]:
    """Return a part: texts, flags and ids of its pieces, in parallel lists.

    Args:
        name: Name of the part.
        pieces: Its pieces.
        corrupted: Whether each token was corrupted.
        first_slot: Slot of the first token, or -1 if the row does not contain the part.
    """
    texts, flags, ids, token_offset = [], [], [], 0
    for piece in pieces:
        end = token_offset + len(piece["ids"])
        trained = sum(map(bool, piece["loss"]))
        flag = TRAINED if trained == end - token_offset else IN_PART if trained else 0
        flag |= IS_SPECIAL * (piece["kind"] == SPECIAL) | IS_BYTES * (piece["kind"] == BYTES)
        flag |= CORRUPTED * bool(corrupted[token_offset:end].any())
        texts.append(clipped(visible(piece["text"]), _TEXT))
        flags.append(DIGITS[flag])
        ids.append(piece["ids"][0] if end - token_offset == 1 else piece["ids"])
        token_offset = end
    return {
        "name": name,
        "first": first_slot,
        "count": token_offset,
        "runs": [{"t": texts, "f": "".join(flags), "i": ids}],
    }


def _shortened(segment: Mapping[str, Any], most_pieces: int) -> dict[str, Any]:
    parts = [_cut(segment_part, most_pieces) for segment_part in segment["parts"]]
    return {
        **segment,
        "parts": parts,
        "original": segment["original"] and _cut(segment["original"], most_pieces),
    }


def _cut(segment_part: Mapping[str, Any], most_pieces: int) -> dict[str, Any]:
    """Return a part of a segment, shortened to `most_pieces` pieces.

    If the part has more pieces, {"gap": number of omitted tokens} replaces the pieces in its
    middle.
    """
    (run,) = segment_part["runs"]
    if len(run["f"]) <= most_pieces:
        return dict(segment_part)
    head, tail = most_pieces - most_pieces // 4, most_pieces // 4
    middle = run["i"][head : len(run["i"]) - tail]
    gap = sum(1 if isinstance(ids, int) else len(ids) for ids in middle)
    ends = [{k: v[:head] for k, v in run.items()}, {k: v[len(v) - tail :] for k, v in run.items()}]
    return {**segment_part, "runs": [ends[0], {"gap": gap}, ends[1]]}
