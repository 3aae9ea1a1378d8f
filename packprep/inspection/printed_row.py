"""One row as text for a terminal: its segments with a mark under every token."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.text import Text

from packprep.building.progress import visible
from packprep.inspection.decoding import BYTES, SPECIAL
from packprep.inspection.lines import IN_PART, LED_ON, NOT_TRAINED, TRAINED, Unit, counted, shortened, units_of, wrapped
from packprep.inspection.opened import NOT_READ
from packprep.inspection.terminal import DIM, HEAD, Page, page

MOST_SEGMENTS = 24  # of a row that are printed, beside the first of each task
STYLES = {SPECIAL: "bold cyan", BYTES: "yellow", "gap": "dim"}


def print_row(row: Mapping[str, Any]) -> None:
    """The row as text: in a terminal as wide as that and with colour, else plain, 100 columns wide."""
    with page() as drawn:
        _draw(drawn, row)


def _draw(page: Page, row: Mapping[str, Any]) -> None:
    page.wrap(f"row {row['row']:,} of {row['rows']:,} · {row['shard']} row {row['row_in_shard']:,}", HEAD)
    page.wrap(
        f"{row['seq_length']:,} slots: {row['slots']:,} in {counted(len(row['segments']), 'segment')}, "
        f"{row['padding']:,} padding · {row['trained']:,} trained"
    )
    if row["lacks"]:
        page.put(f"no row with a segment of every task was found; this one lacks {', '.join(row['lacks'])}")
    printed = _printed(row["segments"])
    gutter = gutter_of([part["name"] for segment in printed for part in segment["parts"]])
    marks: set[str] = set()
    for segment in printed:
        page.put()
        put_header(page, segment)
        for part in segment["parts"]:
            lines = shortened(list(wrapped(units_of(part["pieces"]), page.width - gutter)))
            marks |= put_lines(page, part["name"], lines, gutter)
        if segment["padding"]:
            page.put(f"  then {counted(segment['padding'], 'slot')} of padding")
    page.put()
    left_out = len(row["segments"]) - len(printed)
    if left_out:
        page.put(f"… and {counted(left_out, 'more segment')}; --json gives all")
    if row["padding"]:
        page.put(f"padding: {counted(row['padding'], 'slot')}")
    put_not_read(page, printed)
    page.put(legend(marks, {segment["predicts"] for segment in printed}), DIM)


def gutter_of(names: Sequence[str]) -> int:
    """The cells left of parts' texts, in which their names stand."""
    return max(map(len, names), default=0) + 4


def put_lines(page: Page, name: str, lines: Sequence[Sequence[Unit]], gutter: int) -> set[str]:
    """A part: its lines with the marks under each; gives the marks that were printed."""
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


def _printed(segments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first segments, and of the others the first of each task that they have not."""
    printed, seen = segments[:MOST_SEGMENTS], {segment["task"] for segment in segments[:MOST_SEGMENTS]}
    for segment in segments[MOST_SEGMENTS:]:
        if segment["task"] not in seen:
            printed.append(segment)
            seen.add(segment["task"])
    return printed


def put_header(page: Page, segment: Mapping[str, Any]) -> None:
    """What a segment is and where it comes from, in three lines or as many as they need."""
    objective = f" ({segment['objective']})" if segment["objective"] != segment["task"] else ""
    origin = f"{segment['source']} {visible(segment['file'])} at {segment['document']:,}"
    page.wrap(f"{segment['number']}  {segment['task']}{objective} · {origin}", HEAD)
    facts = [
        f"tokens {segment['start']:,} … {segment['start'] + segment['tokens'] - 1:,} of the document",
        f"{segment['slots']:,} slots from {segment['begin']:,}",
        f"prefix {segment['prefix']:,}",
        f"{segment['trained']:,} trained",
    ]
    if segment["noise"]:
        facts.append(f"noise {segment['noise']:.3g}, loss weight {segment['loss_weight']:.3g}")
    page.wrap(f"  {' · '.join(facts)}", indent=2)
    use = f" · use {segment['repeat']}" if segment["repeat"] else ""
    rebuilt = segment["rebuilt"]
    words = f" · {rebuilt}" if rebuilt.startswith("not rebuilt") else f" · rebuilt from source: {rebuilt}"
    page.wrap(f"  key {segment['key']}{use}{'' if rebuilt == NOT_READ else words}", indent=2)


def put_not_read(page: Page, segments: Sequence[Mapping[str, Any]]) -> None:
    """A line that says so where segments were not compared with their sources."""
    if any(segment["rebuilt"] == NOT_READ for segment in segments):
        page.wrap("sources are not read: --source NAME=PREFIX says where one lies, --from-plan believes the plan", DIM)


def legend(marks: set[str], predicts: set[str]) -> str:
    """What the marks that were printed mean."""
    what = " or ".join({"next": "the next token", "in place": "its label"}[p] for p in sorted(predicts))
    words = {
        TRAINED: f"{TRAINED} trained: the prediction of {what} made here is in the loss",
        NOT_TRAINED: f"{NOT_TRAINED} not trained",
        IN_PART: f"{IN_PART} a character of several tokens, some trained",
        LED_ON: f"{LED_ON} the same token",
    }
    return " · ".join(text for mark, text in words.items() if mark in marks)
