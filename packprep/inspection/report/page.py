"""Totals, figures, sample and faults → one HTML file that asks for nothing.

Names come from recipes, files and documents, and may be anything: what the template puts out has every character showing
and is escaped, and what the script reads is JSON without a character that means something in HTML.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from packprep.inspection.lines import counted, visible
from packprep.inspection.report.charts import meter, stack
from packprep.inspection.report.distributions import charts_of
from packprep.inspection.report.figures import Figures

MOST_LINES = 200
"""Lines of a table: faults, tasks, sources."""
_NAME = 200  # characters of a name
_MESSAGE = 600


def page(
    directory: str,
    totals: Mapping[str, Any] | None,
    recipe: Mapping[str, Any],
    figures: Figures | None,
    verdict: Mapping[str, Any],
    notes: Sequence[str],
    rows: Mapping[str, Any],
    looked_at: str,
    sample_says: str,
) -> bytes:
    """The page. totals: as `describe_manifest` gives; rows: what the script reads; the rest are sentences and their parts."""
    style, script = (_text(f"page.{kind}") for kind in ("css", "js"))
    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=_shown, trim_blocks=True)
    return (
        environment.from_string(_text("page.html"))
        .render(
            name=directory.rstrip("/").rpartition("/")[2] or directory,
            style=Markup(style),
            style_hash=_hash(style),
            script=Markup(script),
            script_hash=_hash(script),
            verdict=verdict,
            notes=notes,
            totals=totals and _totals(totals),
            sums=totals and _sums(totals),
            usage=totals and _usage(totals),
            mix=totals and _mix(totals, recipe, figures),
            groups=charts_of(figures) if figures is not None and figures.segments else [],
            looked_at=looked_at,
            sample_says=sample_says,
            foot=f"Written by packprep inspect {directory} --html. This page is one file and loads nothing.",
            data=Markup(as_data(rows)),
        )
        .encode()
    )


def as_data(value: Any) -> str:
    """JSON of ASCII alone, without <, > and &, so that it may stand inside of a script element."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _text(name: str) -> str:
    return (files(__package__) / name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _shown(value: Any) -> Any:
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return visible(clipped(value, _MESSAGE))


def clipped(text: str, most: int = _NAME) -> str:
    """The text, or its begin and end where it has more than `most` characters."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[len(text) - most // 2 :]}"


def size_of(n_bytes: int) -> str:
    """Bytes in the greatest binary unit below them: 129 MiB."""
    size, unit = float(n_bytes), 0
    while size >= 1024 and unit < 5:
        size, unit = size / 1024, unit + 1
    return f"{n_bytes} bytes" if not unit else f"{size:.3g} {('', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[unit]}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.2%}"


def _totals(s: Mapping[str, Any]) -> dict[str, Any]:
    engine = s["engine"]
    name = f"{engine['name']} {engine['version']}" if isinstance(engine, Mapping) else engine
    documents, fill = s["documents"], s["utilisation"]
    rejected = sum(documents["rejected"].values())
    without = fill["without_last_rows"]
    mean = s["segments"] / s["rows"] if s["rows"] else 0.0
    return {
        "lead": f"{counted(s['rows'], 'row')} of {s['seq_length']:,} slots in {counted(s['shards'], 'shard')}, {size_of(s['bytes'])}",
        "cards": [
            ("rows", f"{s['rows']:,}", f"of {s['seq_length']:,} slots"),
            ("segments", f"{s['segments']:,}", f"{mean:.2f} a row"),
            ("tokens", f"{s['tokens']['used']:,}", "of documents"),
            ("documents", f"{documents['used']:,}", f"{rejected:,} rejected"),
            ("utilisation", _percent(fill["all_rows"]), "" if without is None else f"{without:.2%} without last rows"),
            ("size", size_of(s["bytes"]), f"in {counted(s['shards'], 'shard')}"),
        ],
        "facts": [
            ("fingerprint", s["fingerprint"]),
            ("engine", name),
            ("ids", f"{s['token_dtype']}, below {s['vocab_size']:,}"),
            ("folder", clipped(s["directory"])),
        ],
    }


def _sums(s: Mapping[str, Any]) -> list[dict[str, Any]]:
    documents, tokens, slots = s["documents"], s["tokens"], s["slots"]
    lines = [
        ("Documents", ("read", documents["read"]), [("used", documents["used"]), *_named("rejected: ", documents["rejected"])]),
        (
            "Tokens",
            ("read", tokens["read"]),
            [("used", tokens["used"]), ("truncated", tokens["truncated"]), *_named("dropped: ", tokens["dropped"])],
        ),
        (
            "Slots",
            (f"in {counted(s['rows'], 'row')} of {s['seq_length']:,}", s["row_slots"]),
            [
                ("tokens", slots["used"]),
                *_named("", slots["added"]),
                ("padding inside", slots["padding_inside"]),
                ("padding of rows", slots["row_padding"]),
            ],
        ),
    ]
    sums = []
    for title, (label, whole), parts in lines:
        off = whole - sum(value for _, value in parts)
        shown = [(clipped(name), f"{value:,}") for i, (name, value) in enumerate(parts) if value or not i]
        says = "✓ balances" if not off else f"✗ does not balance: off by {off:,}"
        whole_said = (label, f"{whole:,}")
        sums.append({"title": title, "whole": whole_said, "parts": shown, "balances": not off, "says": says})
    return sums


def _named(before: str, counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return [(before + name, n) for name, n in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]


def _usage(s: Mapping[str, Any]) -> dict[str, Any]:
    slots, whole = s["slots"], s["row_slots"] or 1
    padding = slots["padding_inside"] + slots["row_padding"]
    parts = [("tokens", slots["used"]), *_named("", slots["added"])]
    shown = [(f"u{min(i, 8)}", name, n) for i, (name, n) in enumerate(parts) if n] + [("u9", "padding", padding)]
    words = "Slots: " + ", ".join(f"{name} {n / whole:.2%}" for _, name, n in shown)
    keys = [(kind, name, f"{n / whole:.2%}") for kind, name, n in shown]
    return {"svg": stack([(kind, n / whole) for kind, _, n in shown], words), "keys": keys}


def _cell(count: int, share: float | None, wanted: float | None = None) -> dict[str, Any]:
    return {"count": f"{count:,}", "share": _percent(share), "meter": meter(share, wanted)}


def _mix(s: Mapping[str, Any], recipe: Mapping[str, Any], figures: Figures | None) -> dict[str, Any]:
    segments = s["segments"] or 1
    rows: list[list[Any]] = []
    for t, task in enumerate(s["tasks"]):
        if not (task["drawn"] or task["segments"]):
            continue
        drawn = task["drawn"] if task["name"] != "too_short" else None
        cells = [
            clipped(task["name"]),
            task["objective"],
            _percent(drawn),
            _cell(task["segments"], task["segments"] / segments, drawn),
            _cell(task["tokens"], task["token_share"]),
        ]
        if figures is not None and figures.segments:
            slots, trained = int(figures.task_slots[t]), int(figures.task_trained[t])
            cells.append(_cell(trained, trained / slots if slots else None))
        rows.append(cells)
    head = [("task", ""), ("objective", ""), ("wanted", "n"), ("segments", "n"), ("tokens", "n")]
    head += [("slots trained", "n")] if figures is not None and figures.segments else []
    asked = {source["name"]: source for source in recipe.get("sources", ())}
    shares = [source.get("share") for source in asked.values()]
    whole = sum(share for share in shares if share) if all(shares) and shares else 0
    sources = [
        [
            clipped(source["name"]),
            f"{source['repeat']:g}×",
            _percent(asked[source["name"]]["share"] / whole) if whole else "–",
            f"{source['documents']:,}",
            _cell(source["segments"], source["segments"] / segments),
            _cell(source["tokens"], source["token_share"], asked[source["name"]]["share"] / whole if whole else None),
        ]
        for source in s["sources"]
    ]
    source_head = [("source", ""), ("repeat", "n"), ("wanted", "n"), ("documents", "n"), ("segments", "n"), ("tokens", "n")]
    tables = []
    for title, named, lines in (("Tasks", head, rows), ("Sources", source_head, sources)):
        left = len(lines) - MOST_LINES
        title = f"{title}, the first {MOST_LINES} of {len(lines):,}" if left > 0 else title
        tables.append({"title": title, "head": named, "rows": lines[:MOST_LINES]})
    about = (
        "A mark on a bar is what the recipe asks for: a task's weight is the share of segments that draw it, a source's share "
        "that of the tokens."
    )
    if any(source.get("tasks") for source in asked.values()) or (figures is not None and figures.supervised):
        about += " Sources that draw only some tasks, and documents with trained ranges, move the drawn shares off their marks."
    if figures is not None and figures.segments:
        about += " Slots trained are counted in the rows looked at."
    return {"about": about, "tables": tables}
