"""Render totals, figures, rows and faults as one HTML file that loads nothing.

Names come from recipes, files and documents, and may contain anything. The template makes all
characters visible and escapes them. The script reads JSON without characters that are special in
HTML.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from packprep.building.ledger import FILTERED
from packprep.documents.joining import JOINED
from packprep.inspection.card import versions
from packprep.inspection.report.figures import Figures, charts_of, meter, stack
from packprep.inspection.summary import repeat_in_words
from packprep.inspection.text import clipped, sides_in_words, size_of
from packprep.messages import counted, one_line, visible

MOST_LINES = 200
"""Maximum number of lines in a table of faults, tasks or sources."""
_NAME = 200  # Maximum number of characters of a name.
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
    anew_says: str,
    data_origin: Mapping[str, Any] | None,
    newest: Mapping[str, str],
) -> bytes:
    """Return the page as HTML in UTF-8.

    Args:
        directory: Directory or URL of the dataset.
        totals: The result of `describe_manifest`, or None.
        recipe: The normalised recipe.
        figures: Counts for the charts, or None.
        verdict: The result of verification, with its title, text and faults.
        notes: Sentences about missing content.
        rows: The rows to show, as JSON-compatible values for the script of the page.
        looked_at: Sentence that says which rows the charts cover.
        sample_says: Sentence that says which rows are shown.
        anew_says: Sentence about the resampled row, or "".
        data_origin: The result of `origin`, or None.
        newest: Source → day of the source's newest file, or the reason why it is unknown.
    """
    style, script = (_text(f"page.{kind}") for kind in ("css", "js"))
    groups = charts_of(figures) if figures is not None and figures.segments else []
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=_shown, trim_blocks=True
    )
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
            groups=groups,
            looked_at=looked_at,
            sample_says=sample_says,
            anew_says=anew_says,
            origin=data_origin and _origin(data_origin, newest),
            foot=(
                f"Written by packprep inspect {directory} --html. This page is a single file and"
                " loads nothing."
            ),
            data=Markup(as_data(rows)),
        )
        .encode()
    )


def as_data(value: Any) -> str:
    """Return JSON in ASCII without <, > and &, so that a script element may contain it."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _text(name: str) -> str:
    return (files(__package__) / name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _shown(value: Any) -> Any:
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return visible(clipped(one_line(value), _MESSAGE))


def _percent(share: float | None) -> str:
    if share is None:
        return "–"
    return "< 0.01%" if 0 < share < 0.00005 else f"{share:.2%}"


def _totals(s: Mapping[str, Any]) -> dict[str, Any]:
    engine = s["engine"]
    name = (
        f"{engine.get('name')} {engine.get('version')}" if isinstance(engine, Mapping) else engine
    )
    documents, fill = s["documents"], s["utilisation"]
    rejected = sum(documents["rejected"].values())
    filtered = f", {documents[FILTERED]:,} filtered" if documents[FILTERED] else ""
    without = fill["without_last_rows"]
    mean, shards = s["segments"] / s["rows"] if s["rows"] else 0.0, counted(s["shards"], "shard")
    return {
        "lead": (
            f"{counted(s['rows'], 'row')} of {s['seq_length']:,} slots in {shards},"
            f" {size_of(s['bytes'])}"
        ),
        "cards": [
            ("rows", f"{s['rows']:,}", f"of {s['seq_length']:,} slots"),
            ("segments", f"{s['segments']:,}", f"{mean:.2f} per row"),
            ("tokens", f"{s['tokens']['used']:,}", "of documents"),
            ("documents", f"{documents['used']:,}", f"{rejected:,} rejected{filtered}"),
            (
                "utilisation",
                _percent(fill["all_rows"]),
                ("" if without is None else f"{without:.2%} without last rows")
                + sides_in_words(fill),
            ),
            ("size", size_of(s["bytes"]), f"in {shards}"),
        ],
        "facts": [
            ("fingerprint", s["fingerprint"]),
            ("engine", name),
            ("ids", f"{s['token_dtype']}, below {s['vocab_size']:,}"),
            ("folder", clipped(s["directory"], _NAME)),
        ],
    }


def _origin(data_origin: Mapping[str, Any], newest: Mapping[str, str]) -> dict[str, Any]:
    tokenizer, sources = data_origin["tokenizer"], data_origin["sources"][:MOST_LINES]
    return {
        "facts": [
            ("tokenizer", f"{clipped(tokenizer['name'], _NAME)}, digest {tokenizer['digest']}"),
            ("engine", data_origin["engine"]),
            ("seed", str(data_origin["seed"])),
            ("made with", versions(data_origin)),
            ("format version", str(data_origin["law_version"])),
        ],
        "head": ("source", "files", "size", "newest file"),
        "sources": [
            (
                (
                    clipped(s["name"], _NAME),
                    f"{s['files']:,}",
                    size_of(s["bytes"]),
                    newest[s["name"]],
                )
                if s["files"] is not None
                else (clipped(s["name"], _NAME), "unknown", "unknown", newest[s["name"]])
            )
            for s in sources
        ],
        "recipe": data_origin["recipe"].splitlines(),
    }


def _sums(s: Mapping[str, Any]) -> list[dict[str, Any]]:
    documents, tokens, slots = s["documents"], s["tokens"], s["slots"]
    lines = [
        (
            "Documents",
            ("read", documents["read"]),
            [
                *((key, documents[key]) for key in ("used", JOINED) if key in documents),
                *_named("rejected: ", documents["rejected"]),
            ],
        ),
        (
            "Tokens",
            ("read", tokens["read"]),
            [
                ("used", tokens["used"]),
                ("truncated", tokens["truncated"]),
                *_named("dropped: ", tokens["dropped"]),
            ],
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
    for title, (label, total), parts in lines:
        off = total - sum(value for _, value in parts)
        shown = [
            (clipped(name, _NAME), f"{value:,}")
            for i, (name, value) in enumerate(parts)
            if value or not i
        ]
        says = "✓ balances" if not off else f"✗ does not balance: off by {off:,}"
        total_cell = (label, f"{total:,}")
        sums.append(
            {"title": title, "whole": total_cell, "parts": shown, "balances": not off, "says": says}
        )
    return sums


def _named(prefix: str, counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return [
        (prefix + name, n)
        for name, n in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]


def _usage(s: Mapping[str, Any]) -> dict[str, Any]:
    slots, total_slots = s["slots"], s["row_slots"] or 1
    padding = slots["padding_inside"] + slots["row_padding"]
    parts = [("tokens", slots["used"]), *_named("", slots["added"])]
    shown = [(f"u{min(i, 8)}", name, n) for i, (name, n) in enumerate(parts) if n] + [
        ("u9", "padding", padding)
    ]
    words = "Slots: " + ", ".join(f"{name} {n / total_slots:.2%}" for _, name, n in shown)
    keys = [(kind, name, _percent(n / total_slots)) for kind, name, n in shown]
    return {"svg": stack([(kind, n / total_slots) for kind, _, n in shown], words), "keys": keys}


Counted = tuple[int, float | None, float | None]
"""A count, its share of the total, and the wanted share."""


def _cells(lines: Sequence[Counted], whole: bool = False) -> list[dict[str, Any]]:
    """Return the cells of a column, each with count, share and a bar for the share.

    The bar of the column's largest share has the full width. If `whole`, only the bar of a share of
    1 has the full width.
    """
    scale = (
        1.0
        if whole
        else max((share or 0.0 for _, *shares in lines for share in shares), default=0.0) or 1.0
    )
    return [
        {
            "count": f"{count:,}",
            "share": _percent(share),
            "meter": meter(
                (share or 0.0) / scale, None if wanted_share is None else wanted_share / scale
            ),
        }
        for count, share, wanted_share in lines
    ]


def _mix(
    s: Mapping[str, Any], recipe: Mapping[str, Any], figures: Figures | None
) -> dict[str, Any]:
    asked = {source["name"]: source for source in recipe.get("sources", ())}
    about = "A mark on a bar is the share that the recipe asks for. Each column has its own scale."
    if any(source.get("tasks") for source in asked.values()) or (
        figures is not None and figures.supervised
    ):
        about += (
            " Drawn shares differ from their marks if sources use only some tasks, or if"
            " documents have trained ranges."
        )
    if figures is not None and figures.segments:
        about += " Trained slots come from the rows examined, as a share of the task's slots."
    return {"about": about, "tables": [_task_table(s, figures), _source_table(s)]}


def _task_table(s: Mapping[str, Any], figures: Figures | None) -> dict[str, Any]:
    shown = [(t, task) for t, task in enumerate(s["tasks"]) if task["drawn"] or task["segments"]]
    wanted_shares = [task["drawn"] or None for _, task in shown]
    segment_total = s["segments"] or 1
    columns: list[list[Any]] = [
        [clipped(task["name"], _NAME) for _, task in shown],
        [task["objective"] for _, task in shown],
        [_percent(share) for share in wanted_shares],
        _cells(
            [
                (task["segments"], task["segments"] / segment_total, w)
                for (_, task), w in zip(shown, wanted_shares, strict=True)
            ]
        ),
        _cells([(task["tokens"], task["token_share"], None) for _, task in shown]),
    ]
    head = [("task", ""), ("objective", ""), ("wanted", "n"), ("segments", "n"), ("tokens", "n")]
    if figures is not None and figures.segments:
        pairs = [(int(figures.task_trained[t]), int(figures.task_slots[t])) for t, _ in shown]
        columns.append(
            _cells(
                [(trained, trained / slots if slots else None, None) for trained, slots in pairs],
                whole=True,
            )
        )
        head.append(("trained slots", "n"))
    return _table("Tasks", head, columns)


def _source_table(s: Mapping[str, Any]) -> dict[str, Any]:
    sources, segment_total = s["sources"], s["segments"] or 1
    wanted_shares = [source["wanted_share"] for source in sources]
    columns: list[list[Any]] = [
        [clipped(source["name"], _NAME) for source in sources],
        [f"{repeat_in_words(source)}×" for source in sources],
        [_percent(share) for share in wanted_shares],
        [f"{source['documents']:,}" for source in sources],
        _cells(
            [(source["segments"], source["segments"] / segment_total, None) for source in sources]
        ),
        _cells(
            [
                (source["tokens"], source["token_share"], w)
                for source, w in zip(sources, wanted_shares, strict=True)
            ]
        ),
    ]
    head = [
        ("source", ""),
        ("repeat", "n"),
        ("wanted", "n"),
        ("documents", "n"),
        ("segments", "n"),
        ("tokens", "n"),
    ]
    return _table("Sources", head, columns)


def _table(
    title: str, head: Sequence[tuple[str, str]], columns: Sequence[Sequence[Any]]
) -> dict[str, Any]:
    """Return a table with at most MOST_LINES lines. `head` has (text, CSS class) per column."""
    lines = len(columns[0])
    title = f"{title}, the first {MOST_LINES} of {lines:,}" if lines > MOST_LINES else title
    return {"title": title, "head": head, "rows": list(zip(*columns, strict=True))[:MOST_LINES]}
