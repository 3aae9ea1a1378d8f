"""One segment as text: nothing left out, and the original under what was made of it."""

from collections.abc import Mapping
from typing import Any

from packprep.building.progress import visible
from packprep.inspection.lines import special, units_of, wrapped
from packprep.inspection.printed_row import gutter_of, legend, put_header, put_lines, put_not_read
from packprep.inspection.terminal import DIM, HEAD, Page, page

ORIGINAL = "original"


def print_segment(described: Mapping[str, Any]) -> None:
    """The segment as text: in a terminal as wide as that and with colour, else plain, 100 columns wide."""
    with page() as drawn:
        _draw(drawn, described)


def _draw(page: Page, described: Mapping[str, Any]) -> None:
    segment = described["segment"]
    where = (
        f"row {described['row']:,} of {described['rows']:,} · segment {segment['number']} of {described['segments']:,}"
    )
    page.wrap(f"{where} · {described['shard']} row {described['row_in_shard']:,}", HEAD)
    page.put()
    put_header(page, segment)
    page.put()
    parts = list(segment["parts"])
    gutter = gutter_of([*(part["name"] for part in parts), ORIGINAL])
    marks: set[str] = set()
    for part in parts:
        lines = list(wrapped(units_of(part["pieces"]), page.width - gutter))
        marks |= put_lines(page, part["name"], lines, gutter)
    if segment["original"] is None:
        page.wrap(f"  original: not restored: {segment['not_restored']}", indent=2)
    elif _differs(segment):
        pieces = [{**piece, "loss": [0] * len(piece["ids"])} for piece in segment["original"]]
        units = [unit._replace(mark=" ") for unit in units_of(pieces)]
        put_lines(page, ORIGINAL, list(wrapped(units, page.width - gutter)), gutter)
    if segment["fits"] is False:
        page.put("  its sentinels are not where its header says: `packprep verify` says what else is wrong", "bold red")
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
        page.table(("sentinel", "stands for", "tokens", "input slot", "target slot"), spans, text_columns=2)
    if segment["padding"]:
        page.put(f"then {segment['padding']:,} slots of padding")
    page.put()
    put_not_read(page, [segment])
    page.put(legend(marks, {segment["predicts"]}), DIM)


def _differs(segment: Mapping[str, Any]) -> bool:
    """Whether the original is more than a part of what is shown anyway: text as it is, or labels."""
    if segment["predicts"] == "in place":
        return False
    slots = [slot for piece in segment["original"] for slot in piece["slots"]]
    return slots != list(range(slots[0], slots[0] + len(slots)))
