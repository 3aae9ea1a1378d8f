"""Describe and print one decoded row, or one complete segment.

A row shows the origin of each segment, its slots as text, and which predictions are trained.
"""

import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from rich.text import Text

from packprep.dataset.epochs.resampling import EPOCHS
from packprep.dataset.loader import Dataset, Row, segments_of
from packprep.dataset.shard import Shard, shard_in
from packprep.errors import ArgumentError, DatasetError, PackprepError
from packprep.format.json_files import shard_name
from packprep.inspection.opened import NO_TOKENS, NOT_READ, OpenedDataset, opened
from packprep.inspection.terminal import DIM, HEAD, Page, page
from packprep.inspection.text import (
    IN_PART,
    LED_ON,
    NOT_TRAINED,
    TRAINED,
    Unit,
    clipped,
    shortened,
    special,
    units_of,
    wrapped,
)
from packprep.messages import counted, one_line, visible
from packprep.objectives import find
from packprep.restoring import restore, slots_of_tokens, sound_segments
from packprep.storage import Folder, LocalCopy
from packprep.tokenizer.texts import BYTES, SPECIAL, TokenTexts

MOST_SHARDS = 256  # Maximum number of shards searched for a row with all tasks.


def describe_row(
    directory: str | os.PathLike | Folder,
    row: int,
    moved: Mapping[str, str],
    from_plan: bool = False,
    epoch: int = 0,
) -> dict[str, Any]:
    """Return one row as JSON-compatible values.

    Args:
        directory: Directory or URL of the dataset.
        row: Number of the row. -1 selects the first row with the largest number of tasks, among the
            first MOST_SHARDS shards.
        moved: Source name → folder or URL of the source's files. Segments of these sources are
            rebuilt and compared.
        from_plan: Whether to also rebuild the segments of the other sources, from the locations in
            the plan.
        epoch: The epoch for which the row is resampled. Rebuilding always uses the stored row.

    Returns:
        A dict with the row's location and numbers of slots, and with `segments`. A segment has the
        values of its `segment_*` arrays, and `parts`: [{name, pieces: [{text, ids, loss, kind}]}].
        If `row` is -1, `lacks` has the names of the tasks that have no segment in the row.

    Raises:
        ArgumentError: If the row does not exist or cannot be resampled.
        DatasetError: If the dataset cannot be read.
        RecipeError: If `moved` has an unknown source.
    """
    with opened(directory, moved, from_plan) as data:
        described = row_of(data, row_number(data, row), epoch)
        shown = {segment["task"] for segment in described["segments"]}
        tasks = data.dataset.tasks if row < 0 else []
        return {
            **described,
            "lacks": [t["name"] for t in tasks if t["weight"] and t["name"] not in shown],
        }


def row_number(data: OpenedDataset, row: int) -> int:
    """Return `row`. If it is -1, return the result of `_row_of_most_tasks`.

    Raises:
        ArgumentError: If the row does not exist.
    """
    rows = len(data.dataset)
    if not rows:
        raise ArgumentError(f"{data.local.out} has no rows, because it has no usable document")
    if not -1 <= row < rows:
        raise ArgumentError(
            f"row {row}: {data.local.out} has {rows} rows"
            f"\nhint: give 0 … {rows - 1}, or −1 for a row with many tasks"
        )
    return row if row >= 0 else _row_of_most_tasks(data.local, data.dataset)


def row_of(data: OpenedDataset, number: int, epoch: int = 0) -> dict[str, Any]:
    """Return row `number` of an open dataset, as `describe_row` does. The row must exist."""
    shard, in_shard = data.location(number)
    data.local.fetch(shard_name(shard))
    stored = shard_in(data.local.folder, data.dataset.manifest, shard)
    return row_with(
        data, number, data.rebuilt(shard, np.arange(*stored.segment_range(in_shard))), epoch
    )


def row_with(
    data: OpenedDataset, number: int, rebuilt: Sequence[str], epoch: int = 0
) -> dict[str, Any]:
    """Return a row as JSON-compatible values. Its shard must have a local copy.

    Args:
        data: The open dataset.
        number: Number of the row.
        rebuilt: The result of `OpenedDataset.rebuilt` for the segments of the row.
        epoch: The epoch for which the row is resampled.
    """
    dataset = data.dataset
    view = dataset.row(number, epoch)
    segments = [segment_of(data, view, i, rebuilt[i]) for i in range(len(rebuilt))]
    slots = sum(segment["slots"] for segment in segments)
    return {
        **location_of(data, number),
        "epoch": epoch,
        "seq_length": dataset.seq_length,
        "slots": slots,
        "padding": dataset.seq_length - slots,
        "trained": int(view.loss_mask.sum()),
        **_sides(dataset, segments),
        "segments": segments,
    }


def _sides(dataset: Dataset, segments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return {"encoder": [used slots, length], "decoder": …}, or {} if rows have one sequence."""
    if not dataset.encoder_length:
        return {}
    lengths = dataset.encoder_length, dataset.seq_length - dataset.encoder_length
    inputs = sum(segment["prefix"] for segment in segments)
    used = inputs, sum(segment["slots"] for segment in segments) - inputs
    return {side: [used[i], lengths[i]] for i, side in enumerate(("encoder", "decoder"))}


def location_of(data: OpenedDataset, number: int) -> dict[str, Any]:
    """Return the location of row `number`: {directory, row, rows, shard, row_in_shard}."""
    shard, in_shard = data.location(number)
    return {
        "directory": str(data.local.out),
        "row": number,
        "rows": len(data.dataset),
        "shard": data.dataset.manifest["shards"][shard]["file"],
        "row_in_shard": in_shard,
    }


def _row_of_most_tasks(local: LocalCopy, dataset: Dataset) -> int:
    """Return the number of the first row with the largest number of tasks.

    Tasks without weight or without segments are not counted. Only the first MOST_SHARDS shards are
    searched.
    """
    ledger = dataset.manifest["ledger"].get("tasks", {})
    is_wanted = np.array(
        [
            bool(t["weight"]) and ledger.get(t["name"], {}).get("segments", 1) > 0
            for t in dataset.tasks
        ]
    )
    best, most_tasks, first_row = 0, -1, 0
    for number, entry in enumerate(dataset.manifest["shards"][:MOST_SHARDS]):
        if entry["rows"]:
            with local.fetched(shard_name(number)):
                segments = segments_of(
                    shard_in(local.folder, dataset.manifest, number), dataset.manifest
                )
                seen = np.zeros((entry["rows"], len(dataset.tasks)), np.bool_)
                seen[segments.row, segments.task] = True
            count = seen[:, is_wanted].sum(axis=1)
            if count.max() > most_tasks:
                best, most_tasks = first_row + int(count.argmax()), int(count.max())
            # No later row can have more tasks.
            if most_tasks == is_wanted.sum():
                break
        first_row += entry["rows"]
    return best


def segment_of(data: OpenedDataset, row: Row, i: int, rebuilt: str) -> dict[str, Any]:
    """Return segment i of a row as JSON-compatible values.

    The result has the values of the segment's `segment_*` arrays, and `parts`, a list of {name,
    pieces: [{text, ids, loss, kind}]}.

    Args:
        data: The open dataset.
        row: The row.
        i: Index of the segment in the row.
        rebuilt: The result of `OpenedDataset.rebuilt` for the segment.

    Raises:
        DatasetError: If the segment's task or source is not in the manifest.
    """
    dataset, texts = data.dataset, data.texts
    columns = {name: values[i].item() for name, values in row.segments.items()}
    # A damaged index must not show the name of another task or source.
    for name, entries in (("task", dataset.tasks), ("source", dataset.manifest["sources"])):
        if columns[name] >= len(entries):
            raise DatasetError(
                f"{dataset.directory}: row {row.index}: segment_{name} {columns[name]} is out of"
                f" range: the manifest has {len(entries)} {name}s"
            )
    # The media of a row have slots of the row, so each segment selects its own below.
    of_row = row.media
    media = [
        {"slot": slot, "slots": slots, "kind": kind, "ref": ref}
        for slot, slots, kind, ref in zip(
            of_row.slot.tolist(), of_row.tokens.tolist(), of_row.kinds, of_row.refs, strict=True
        )
    ]
    task, begin, end = dataset.tasks[columns["task"]], columns["begin"], columns["end"]
    # Padding may follow each segment. After the last one, it is the padding of the row.
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
        "weights": [
            [first_slot, end_slot, weight]
            for segment, first_slot, end_slot, weight in row.weighted_ranges
            if segment == i
        ],
        "media": [place for place in media if begin <= place["slot"] < end],
        "key": f"{columns['key']:016x}",
        "repeat": columns["repeat"],
        "rebuilt": rebuilt,
        "predicts": (
            "in place" if task["label_alignment"] == "same_slot" else "next"
        ),  # With `next_slot`, a slot predicts the next token.
        "parts": [
            {
                "name": name,
                "pieces": _pieces(texts, values[low:high], row.loss_mask[low:high], media, low),
            }
            for name, values, low, high in _parts(row, task, begin, end, columns["prefix"])
            if low < high
        ],
    }


Part = tuple[str, np.ndarray, int, int]


def _parts(row: Row, task: Mapping[str, Any], begin: int, end: int, prefix: int) -> list[Part]:
    """Return the parts of a segment that are shown, as [(name, values, first slot, end slot)].

    Same-position tasks have the parts "inputs" and "labels", for example. `values` are the tokens
    or the labels of the complete row. The part is values[first slot : end slot].
    """
    if task["attention"] == "prefix":
        # Only objectives that keep the order of tokens support supervised documents.
        objective = find(task["objective"])
        in_order = objective is None or objective.supervised
        first_name, second_name = ("prefix", "continuation") if in_order else ("inputs", "targets")
        cut = min(begin + max(prefix, 0), end)
        return [(first_name, row.tokens, begin, cut), (second_name, row.tokens, cut, end)]
    if task["attention"] == "block_diffusion":
        half = begin + (end - begin) // 2
        return [("x_t", row.tokens, begin, half), ("x_0", row.tokens, half, end)]
    if task["label_alignment"] == "same_slot":
        return [("inputs", row.tokens, begin, end), ("labels", row.labels, begin, end)]
    return [("text", row.tokens, begin, end)]


def _pieces(
    texts: TokenTexts,
    ids: np.ndarray,
    loss: np.ndarray,
    media: Sequence[Mapping[str, Any]],
    first_slot: int,
) -> list[dict[str, Any]]:
    """Return the tokens `ids` as pieces {text, ids, loss, kind}. ids[0] is in slot `first_slot`.

    A media span becomes one piece, and the text of this piece shows the span's ref.
    """
    pieces: list[dict[str, Any]] = []
    token_offset = 0
    # Text is decoded between the media spans, so no piece has tokens of both.
    inside = [place for place in media if first_slot <= place["slot"] < first_slot + len(ids)]
    for place in (*inside, None):
        upto = place["slot"] - first_slot if place else len(ids)
        for piece in texts.pieces(ids[token_offset:upto].tolist()):
            end = token_offset + len(piece.ids)
            pieces.append(
                {
                    "text": piece.text,
                    "ids": piece.ids,
                    "loss": loss[token_offset:end].tolist(),
                    "kind": piece.kind,
                }
            )
            token_offset = end
        if place:
            end = token_offset + place["slots"]
            text = (
                f"{place['kind']} of {counted(place['slots'], 'slot')}:"
                f" {clipped(place['ref'], MOST_OF_REF)}"
            )
            pieces.append(
                {
                    "text": text,
                    "ids": ids[token_offset:end].tolist(),
                    "loss": loss[token_offset:end].tolist(),
                    "kind": SPECIAL,
                }
            )
            token_offset = end
    return pieces


MOST_OF_REF = 60  # Maximum number of characters of a ref that are shown.
MOST_SEGMENTS = 24  # Maximum number of segments printed, in addition to the first of each task.
MOST_WEIGHTS = 8  # Maximum number of weights printed per segment.
STYLES = {SPECIAL: "bold cyan", BYTES: "yellow", "gap": "dim"}


def print_row(row: Mapping[str, Any]) -> None:
    """Print the row as text.

    In a terminal, the output has colours and the terminal's width. Otherwise it is plain and 100
    columns wide.
    """
    with page() as drawn:
        _draw(drawn, row)


def _draw(page: Page, row: Mapping[str, Any]) -> None:
    page.wrap(f"row {row['row']:,} of {row['rows']:,} · {_stored_at(row)}", HEAD)
    sides = "".join(
        f" · {name} {row[name][0]:,} of {row[name][1]:,}"
        for name in ("encoder", "decoder")
        if name in row
    )
    page.wrap(
        f"{row['seq_length']:,} slots: {row['slots']:,} in"
        f" {counted(len(row['segments']), 'segment')}, {row['padding']:,} padding ·"
        f" {row['trained']:,} trained{sides}"
    )
    if row["lacks"]:
        page.put(
            "no row with a segment of every task was found; this row has no segment of"
            f" {', '.join(row['lacks'])}"
        )
    printed = _printed(row["segments"])
    gutter = gutter_of(
        [segment_part["name"] for segment in printed for segment_part in segment["parts"]]
    )
    marks: set[str] = set()
    is_cut = False
    for segment in printed:
        page.put()
        put_header(page, segment)
        for segment_part in segment["parts"]:
            lines = list(wrapped(units_of(segment_part["pieces"]), page.width - gutter))
            # In next-token tasks, the lines near a change of the loss mask stay, since they show
            # prompts and answers.
            shown = shortened(lines, by_turn=segment["predicts"] == "next")
            is_cut |= len(shown) < len(lines)
            marks |= put_lines(page, segment_part["name"], shown, gutter)
        if segment["padding"]:
            page.put(f"  then {counted(segment['padding'], 'slot')} of padding")
    page.put()
    # The end of the page names omitted segments and explains the marks in use.
    left_out = len(row["segments"]) - len(printed)
    if left_out:
        page.put(f"… and {counted(left_out, 'more segment')}; --json lists all")
    if is_cut:
        page.put("--segment K shows a complete segment", DIM)
    if row["padding"]:
        page.put(f"padding: {counted(row['padding'], 'slot')}")
    put_not_read(page, printed)
    page.put(legend(marks, {segment["predicts"] for segment in printed}), DIM)


def gutter_of(names: Sequence[str]) -> int:
    """Return the width in cells of the column that shows the names of parts."""
    return max(map(len, names), default=0) + 4


def put_lines(page: Page, name: str, lines: Sequence[Sequence[Unit]], gutter: int) -> set[str]:
    """Print a part's lines with the marks under each, and return the marks that were printed."""
    marks: set[str] = set()
    for line in lines:
        text = Text().append(f"  {name:<{gutter - 2}}", DIM)
        for style, units in groupby(line, _style):
            text.append("".join(unit.shown for unit in units), style)
        page.put(text)
        if marked := "".join(unit.marks for unit in line).rstrip():
            page.put(" " * gutter + marked, DIM)
            marks.update(marked)
        name = ""
    return marks


def _style(unit: Unit) -> str:
    return STYLES.get(unit.kind, "green" if unit.mark in (TRAINED, IN_PART, LED_ON) else "")


def _stored_at(described: Mapping[str, Any]) -> str:
    """Return the location of the row as text. If the row was resampled, the epoch is added."""
    epoch = f" · epoch {described['epoch']:,}" if described["epoch"] else ""
    return f"{described['shard']} row {described['row_in_shard']:,}{epoch}"


def _printed(segments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the segments to print.

    They are the first MOST_SEGMENTS segments, and the first segment of each task that does not
    occur among them.
    """
    printed = segments[:MOST_SEGMENTS]
    seen = {segment["task"] for segment in segments[:MOST_SEGMENTS]}
    for segment in segments[MOST_SEGMENTS:]:
        if segment["task"] not in seen:
            printed.append(segment)
            seen.add(segment["task"])
    return printed


def put_header(page: Page, segment: Mapping[str, Any]) -> None:
    """Print a segment's metadata and origin, in three lines or more."""
    # Most tasks have the name of their objective, and most segments have no noise and no weights.
    objective = f" ({segment['objective']})" if segment["objective"] != segment["task"] else ""
    origin = f"{segment['source']} {visible(segment['file'])} at {segment['document']:,}"
    page.wrap(f"{segment['number']}  {segment['task']}{objective} · {origin}", HEAD)
    facts = [
        (
            f"tokens {segment['start']:,} … {segment['start'] + segment['tokens'] - 1:,} of the"
            " document"
        ),
        f"{segment['slots']:,} slots from {segment['begin']:,}",
        f"prefix {segment['prefix']:,}",
        f"{segment['trained']:,} trained",
    ]
    if segment["noise"]:
        facts.append(f"noise {segment['noise']:.3g}, loss weight {segment['loss_weight']:.3g}")
    page.wrap(f"  {' · '.join(facts)}", indent=2)
    if segment["weights"]:
        shown = [
            f"{weight:.4g} in slots {begin:,} … {end - 1:,}"
            for begin, end, weight in segment["weights"][:MOST_WEIGHTS]
        ]
        more_weights = len(segment["weights"]) - len(shown)
        page.wrap(
            f"  weights {', '.join(shown)}"
            f"{(f', and {more_weights:,} more' if more_weights else '')}; otherwise 1",
            indent=2,
        )
    # Pass 0 is the usual pass. Sources that were not read are mentioned once, below the segments.
    use = f" · pass {segment['repeat']}" if segment["repeat"] else ""
    rebuilt = segment["rebuilt"]
    words = (
        f" · {rebuilt}"
        if rebuilt.startswith("not rebuilt")
        else f" · rebuilt from source: {rebuilt}"
    )
    page.wrap(
        f"  key {segment['key']}{use}{'' if rebuilt == NOT_READ else one_line(words)}", indent=2
    )


def put_not_read(page: Page, segments: Sequence[Mapping[str, Any]]) -> None:
    """Print a note if segments were not compared with their sources."""
    if any(segment["rebuilt"] == NOT_READ for segment in segments):
        page.wrap(
            "sources were not read; give --source NAME=PREFIX for their location, or --from-plan"
            " to trust the plan",
            DIM,
        )


def legend(marks: set[str], predicts: set[str]) -> str:
    """Return one line that explains the printed marks."""
    predicted = " or ".join(
        {"next": "the next token", "in place": "its label"}[p] for p in sorted(predicts)
    )
    words = {
        TRAINED: f"{TRAINED} trained: this slot's prediction of {predicted} is in the loss",
        NOT_TRAINED: f"{NOT_TRAINED} not trained",
        IN_PART: f"{IN_PART} a character of several tokens, some trained",
        LED_ON: f"{LED_ON} the same token",
    }
    return " · ".join(text for mark, text in words.items() if mark in marks)


def describe_segment(
    directory: str | os.PathLike | Folder,
    row: int,
    number: int,
    moved: Mapping[str, str],
    from_plan: bool = False,
    epoch: int = 0,
) -> dict[str, Any]:
    """Return one segment of a row as JSON-compatible values.

    Args:
        directory: Directory or URL of the dataset.
        row: As in `describe_row`.
        number: Number of the segment. It counts from 1, as segment_ids do.
        moved: As in `describe_row`.
        from_plan: As in `describe_row`.
        epoch: As in `describe_row`.

    Returns:
        A dict with the row's location, `epoch`, `segments` (the number of segments in the row) and
        `segment`. The segment has the same keys as in `describe_row`, and these keys:

        - original: the document's tokens as pieces {text, ids, slots, kind}, or None
        - not_restored: the reason if original is None, for example that the plan cannot be opened
        - fits: whether the segment's special tokens agree with its `segment_*` arrays, or None if
          this was not checked
        - spans: the spans of span corruption, [{sentinel, tokens: [begin, end) of the document,
          input_slot, target_slot, text}]

    Raises:
        ArgumentError: If the row or the segment does not exist.
        DatasetError: If the shard is damaged.
    """
    with opened(directory, moved, from_plan) as data:
        row = row_number(data, row)
        in_shard = data.location(row)
        with data.shard(in_shard[0]) as shard:
            view = data.dataset.row(row, epoch)
            if not 1 <= number <= view.n_segments:
                raise ArgumentError(
                    f"segment {number}: row {row} of {data.local.out} has {view.n_segments}"
                    " segments"
                    f"\nhint: give 1 … {view.n_segments}, the numbers in `packprep inspect --row"
                    f" {row}`"
                )
            chosen = shard.segment_range(in_shard[1])[0] + number - 1
            described = segment_of(
                data, view, number - 1, data.rebuilt(in_shard[0], np.array([chosen]))[0]
            )
            restored = _restored(data, shard, view, epoch % EPOCHS, chosen, described)
            segment = {**described, **restored}
            return {
                **location_of(data, row),
                "epoch": epoch,
                "segments": view.n_segments,
                "segment": segment,
            }


def _restored(
    data: OpenedDataset,
    shard: Shard,
    view: Row,
    epoch: int,
    chosen: int,
    described: Mapping[str, Any],
) -> dict[str, Any]:
    plan, only = data.plan, np.array([chosen])
    if isinstance(plan, PackprepError):
        return {"original": None, "not_restored": str(plan), "fits": None, "spans": []}
    if not described["tokens"]:
        return {"original": None, "not_restored": NO_TOKENS, "fits": None, "spans": []}
    stored = sound_segments(plan, shard)
    # The arrays contain only this row, as resampled for the epoch.
    stored = stored.replace(row=stored.row - stored.row[chosen])
    arrays = dict(shard.arrays)
    arrays.update(
        {name: getattr(view, name)[None] for name in ("tokens", "labels") if name in arrays}
    )
    restored = restore(plan, arrays, stored, only, epoch)
    slots = slots_of_tokens(plan, arrays, stored, only, restored.ids, epoch)
    # If special tokens of the segment are missing, the slots of its tokens are unknown.
    if not restored.fits[0] and (slots < 0).any():
        return {
            "original": None,
            "not_restored": "its special tokens are missing",
            "fits": False,
            "spans": [],
        }
    pieces, token_offset = [], 0
    for piece in data.texts.pieces(restored.ids.tolist()):
        end = token_offset + len(piece.ids)
        pieces.append(
            {
                "text": piece.text,
                "ids": piece.ids,
                "slots": slots[token_offset:end].tolist(),
                "kind": piece.kind,
            }
        )
        token_offset = end
    inputs_end = described["begin"] + described["prefix"]
    body = described["begin"] + int(stored.bos[chosen]) + plan.tasks[int(stored.task[chosen])].mode
    spans = _spans(data, view.tokens, restored.ids, slots, inputs_end, body, described["start"])
    return {
        "original": pieces,
        "not_restored": None,
        "fits": bool(restored.fits[0]),
        "spans": spans,
    }


def _spans(
    data: OpenedDataset,
    row: np.ndarray,
    ids: np.ndarray,
    slots: np.ndarray,
    inputs_end: int,
    body: int,
    start: int,
) -> list[dict[str, Any]]:
    """Return `spans` of `describe_segment`: spans that are replaced by sentinels in the prefix.

    Each sentinel has two slots. In the prefix, it replaces its span. After the prefix, it precedes
    the tokens of its span.

    Args:
        data: The open dataset.
        row: Tokens of the row, [seq_length].
        ids: Original tokens of the segment.
        slots: Slot of each original token.
        inputs_end: First slot after the prefix.
        body: First slot after bos and mode token.
        start: Index of the segment's first token in the document.
    """
    noise = slots >= inputs_end
    # Runs of tokens alternate between the prefix and the slots after it.
    bounds = [0, *(np.flatnonzero(np.diff(noise)) + 1).tolist(), len(noise)]
    spans = []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        if noise[begin]:
            input_slot = int(slots[begin - 1]) + 1 if begin else body
            target_slot = int(slots[begin]) - 1
            if not input_slot < inputs_end <= target_slot or row[input_slot] != row[target_slot]:
                continue  # No sentinel replaces these tokens. They only follow the prefix.
            (sentinel,) = data.texts.pieces([int(row[target_slot])])
            text = "".join(piece.text for piece in data.texts.pieces(ids[begin:end].tolist()))
            spans.append(
                {
                    "sentinel": sentinel.text,
                    "tokens": [start + begin, start + end],
                    "input_slot": input_slot,
                    "target_slot": target_slot,
                    "text": text,
                }
            )
    return spans


ORIGINAL = "original"


def print_segment(described: Mapping[str, Any]) -> None:
    """Print the segment as text.

    In a terminal, the output has colours and the terminal's width. Otherwise it is plain and 100
    columns wide.
    """
    with page() as drawn:
        _draw_segment(drawn, described)


def _draw_segment(page: Page, described: Mapping[str, Any]) -> None:
    segment = described["segment"]
    where = (
        f"row {described['row']:,} of {described['rows']:,} · segment {segment['number']} of"
        f" {described['segments']:,}"
    )
    page.wrap(f"{where} · {_stored_at(described)}", HEAD)
    page.put()
    put_header(page, segment)
    page.put()
    parts = list(segment["parts"])
    gutter = gutter_of([*(segment_part["name"] for segment_part in parts), ORIGINAL])
    marks: set[str] = set()
    for segment_part in parts:
        lines = list(wrapped(units_of(segment_part["pieces"]), page.width - gutter))
        marks |= put_lines(page, segment_part["name"], lines, gutter)
    if segment["original"] is None:
        page.wrap(f"  original: not restored: {one_line(segment['not_restored'])}", indent=2)
    elif _differs(segment):
        # The original text has no marks, because its tokens are not in one run of slots.
        pieces = [{**piece, "loss": [0] * len(piece["ids"])} for piece in segment["original"]]
        units = [unit._replace(mark=" ") for unit in units_of(pieces)]
        put_lines(page, ORIGINAL, list(wrapped(units, page.width - gutter)), gutter)
    if segment["fits"] is False:
        page.put(
            "  its sentinels do not match its header; run `packprep verify` to find all damage",
            "bold red",
        )
    # The parts show a span far from the sentinel that replaces it, so a table joins both.
    if segment["spans"]:
        page.put()
        spans = [
            (
                special(span["sentinel"]),
                visible(span["text"]),
                f"{span['tokens'][0]:,} … {span['tokens'][1] - 1:,}",
                f"{span['input_slot']:,}",
                f"{span['target_slot']:,}",
            )
            for span in segment["spans"]
        ]
        page.table(
            ("sentinel", "replaces", "tokens", "input slot", "target slot"), spans, text_columns=2
        )
    if segment["padding"]:
        page.put(f"then {segment['padding']:,} slots of padding")
    page.put()
    put_not_read(page, [segment])
    page.put(legend(marks, {segment["predicts"]}), DIM)


def _differs(segment: Mapping[str, Any]) -> bool:
    """Return whether to print the original tokens on lines of their own.

    If the original tokens are not in consecutive slots, no printed part of the segment shows them
    as one text. The result is then True. For same-position tasks, the result is always False,
    because their labels are the original tokens.
    """
    if segment["predicts"] == "in place":
        return False
    slots = [slot for piece in segment["original"] for slot in piece["slots"]]
    return slots != list(range(slots[0], slots[0] + len(slots)))
