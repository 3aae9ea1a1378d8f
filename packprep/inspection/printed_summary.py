"""A summary as text: totals, the mixes as tables, lengths as histograms."""

from collections.abc import Mapping
from typing import Any

from packprep.inspection.lines import counted, size_of
from packprep.inspection.terminal import HEAD, Page, page

FAR = 0.01
"""A source's share this far from what was asked for is worth a warning."""


def print_summary(summary: Mapping[str, Any]) -> None:
    """The summary as text: in a terminal in colour and as wide as that, else plain and 100 columns wide."""
    with page() as drawn:
        _draw(drawn, summary)


def _draw(page: Page, s: Mapping[str, Any]) -> None:
    if not s["published"]:
        done = f"{s['done']:,} of {counted(s['shards'], 'shard')} done, {s['missing']:,} missing"
        page.put(f"{s['directory']}: not published yet; {done}")
        page.put(s["next"])
        return
    rows = counted(s["rows"], "row")
    where = f"{s['directory']}: {rows} of {s['seq_length']:,} slots in {counted(s['shards'], 'shard')}"
    page.wrap(f"{where}, {size_of(s['bytes'])}", HEAD)
    page.put()
    page.facts(_totals(s))
    page.put()
    trained = ("trained",) if "trained" in s else ()
    page.table(
        ("task", "objective", "drawn", "segments", "tokens", "share", "slots", *trained),
        [
            (
                task["name"],
                task["objective"],
                percent(task["drawn"]),
                f"{task['segments']:,}",
                f"{task['tokens']:,}",
                percent(task["token_share"]),
                f"{task['slots']:,}",
                *((percent(s["trained"][task["name"]]["share"]),) if "trained" in s else ()),
            )
            for task in s["tasks"]
            if task["drawn"] or task["segments"]
        ],
        text_columns=2,
    )
    page.put()
    wanted = ("wanted",) if any(source["wanted_share"] for source in s["sources"]) else ()
    page.table(
        ("source", "repeat", "documents", "segments", "tokens", "share", *wanted),
        [
            (
                source["name"],
                f"{source['repeat']:g}",
                f"{source['documents']:,}",
                f"{source['segments']:,}",
                f"{source['tokens']:,}",
                percent(source["token_share"]),
                *((percent(source["wanted_share"]),) if wanted else ()),
            )
            for source in s["sources"]
        ],
        text_columns=1,
    )
    for source in s["sources"]:
        got, asked = source["token_share"] or 0.0, source["wanted_share"]
        if asked is not None and abs(got - asked) > FAR:
            page.wrap(
                f"warning: source {source['name']} has {percent(got)} of the tokens and the recipe asks for {percent(asked)}: "
                "look at what was rejected, dropped and truncated, or whether few long documents make up a source"
            )
    if "segment_slots" in s:
        _draw_lengths(page, s)


def _totals(s: Mapping[str, Any]) -> list[tuple[str, str]]:
    documents, tokens, slots, fill = s["documents"], s["tokens"], s["slots"], s["utilisation"]
    rejected, dropped = documents["rejected"], tokens["dropped"]
    engine = s["engine"]
    engine_name = f"{engine.get('name')} {engine.get('version')}" if isinstance(engine, Mapping) else engine
    left_out = _listed(", dropped: ", dropped) + (f", {tokens['truncated']:,} truncated" if tokens["truncated"] else "")
    inside = f", {slots['padding_inside']:,} padding inside segments" if slots["padding_inside"] else ""
    without = fill["without_last_rows"]
    last = "" if without is None else f"; {percent(without)} without each shard's last row"
    return [
        ("documents", f"{documents['read']:,} read, {documents['used']:,} used{_listed(', rejected: ', rejected)}"),
        ("tokens", f"{tokens['used']:,} used{left_out}, in {counted(s['segments'], 'segment')}"),
        ("slots", f"{slots['total']:,}: {slots['used']:,} tokens{_listed(', added: ', slots['added'])}{inside}"),
        ("utilisation", f"{percent(fill['all_rows'])} of {s['row_slots']:,} slots in rows{last}"),
        ("ids", f"{s['token_dtype']}, below {s['vocab_size']:,}, by engine {engine_name}"),
        ("fingerprint", s["fingerprint"]),
    ]


def _draw_lengths(page: Page, s: Mapping[str, Any]) -> None:
    read = s["looked_at"]["shards"]
    of = "" if read == s["shards"] else f" (these and trained slots: of {counted(read, 'shard')})"
    page.put()
    page.put(f"slots of a segment{of}", HEAD)
    page.bars(s["segment_slots"])
    per_row = s["row_segments"]
    if per_row["histogram"]:
        page.put()
        page.put(f"segments of a row: {per_row['mean']:.1f} on average, at most {per_row['most']:,}", HEAD)
        page.bars(per_row["histogram"])


def _listed(before: str, counts: Mapping[str, int]) -> str:
    """The counts after `before`, the greatest first, as in ", rejected: empty 2, invalid_utf8 1"; nothing for none."""
    some = sorted(((n, name) for name, n in counts.items() if n), key=lambda c: (-c[0], c[1]))
    return before + ", ".join(f"{name} {n:,}" for n, name in some) if some else ""


def percent(share: float | None) -> str:
    """A share as in "12.50%"; "–" where there is nothing to have a share of."""
    return "–" if share is None else f"{share:.2%}"
