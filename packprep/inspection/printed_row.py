"""One row as text for a terminal: its segments with a mark under every token."""

import shutil
import sys
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from packprep.inspection.decoding import BYTES, SPECIAL
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

MOST_SEGMENTS = 24  # of a row that are printed, beside the first of each task
WIDTH = 100
STYLES = {SPECIAL: "bold cyan", BYTES: "yellow", "gap": "dim"}


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
