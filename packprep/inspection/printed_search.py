"""What was found, as text: a line for each place, and the match marked in what stands around it."""

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from packprep.building.progress import visible
from packprep.inspection.lines import counted
from packprep.inspection.terminal import DIM, HEAD, Page, page

MARKED = "bold black on yellow"
OPEN, CLOSE = "»", "«"


def print_matches(described: Mapping[str, Any]) -> None:
    """The matches as text: in a terminal in colour and as wide as that, else plain, the match between » and «."""
    with page() as drawn:
        _draw(drawn, described)


def _draw(page: Page, described: Mapping[str, Any]) -> None:
    text, found = visible(described["text"]), described["found"]
    for match in described["matches"]:
        use = f" · use {match['repeat']}" if match["repeat"] else ""
        origin = f"{match['source']} {visible(match['file'])} at {match['document']:,}"
        page.wrap(
            Text()
            .append(f"row {match['row']:,} segment {match['segment']:,}", HEAD)
            .append(f" · {match['task']} · {origin}{use}"),
            indent=2,
        )
        slots = ", ".join(
            f"{begin:,} … {end - 1:,}" if end > begin + 1 else f"{begin:,}" for begin, end in match["slots"]
        )
        page.wrap(
            f"  tokens {match['tokens'][0]:,} … {match['tokens'][1] - 1:,} of the document · slots {slots}", DIM, 2
        )
        page.put(_snippet(page, match))
    if described["matches"]:
        page.put()
    left_out = found - len(described["matches"])
    if left_out:
        page.put(f"… and {left_out:,} more; --limit shows more than {len(described['matches']):,}")
    where = f"{counted(described['segments'], 'segment')}, {counted(described['tokens'], 'token')}"
    times = "not found" if not found else (
        f"found {found:,} {'time' if found == 1 else 'times'}, in {counted(described['matching_segments'], 'segment')} "
        f"of {counted(described['matching_rows'], 'row')}"
    )  # fmt: skip
    page.wrap(f"{text!r} {times}; searched: {where} in {counted(described['shards'], 'shard')}", indent=2)


def _snippet(page: Page, match: Mapping[str, Any]) -> Text:
    """As much around the match as a line holds, both sides alike."""
    marked = visible(match["match"])
    room = max((page.width - 2 - len(marked) - 2) // 2, 12)
    before, after = visible(match["before"])[-room:], visible(match["after"])[:room]
    if page.in_colour:
        return Text("  ").append(before).append(marked, MARKED).append(after)
    return Text(f"  {before}{OPEN}{marked}{CLOSE}{after}")
