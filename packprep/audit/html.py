"""Write an audit as one HTML file that loads nothing."""

import base64
import hashlib
import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from packprep.audit.report import (
    FINDING,
    STATE_WORDS,
    UNCHECKED,
    facts_of,
    place_in_words,
    share_in_words,
    unchecked_by_reason,
    verdict_of,
)
from packprep.inspection.report import check_file
from packprep.messages import visible
from packprep.storage import LocalFolder


def write_audit(described: Mapping[str, Any], html: str | os.PathLike) -> None:
    """Write the result of `describe_audit` as HTML.

    Raises:
        ArgumentError: If the file cannot be written, or is an existing file that is not HTML.
        BuildError: If writing fails.
    """
    check_file(html)
    path = Path(html)
    LocalFolder(path.parent).write(path.name, [_page(described)])


def _page(described: Mapping[str, Any]) -> bytes:
    style = (files("packprep.inspection.report") / "page.css").read_text("utf-8")
    style_hash = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    checks = described["checks"]
    checked = [check for check in checks if check["state"] != UNCHECKED]
    is_bad = described["failed"] or any(check["state"] == FINDING for check in checked)
    *meanings, total = verdict_of(described)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=_shown, trim_blocks=True
    )
    return (
        environment.from_string((files(__package__) / "page.html").read_text("utf-8"))
        .render(
            name=Path(described["path"]).name or described["path"],
            style=Markup(style),
            style_hash=f"sha256-{style_hash}",
            kind="bad" if is_bad else "good" if checked else "",
            sign="✗" if is_bad else "✓" if checked else "?",
            title=total,
            meanings=meanings,
            facts=facts_of(described),
            rows=[
                (
                    check["title"],
                    check["kind"],
                    STATE_WORDS[check["state"]],
                    f"{check['count']:,}",
                    f"{check['of']:,} {check['unit']}",
                    share_in_words(check["share"]),
                    "; ".join(place_in_words(place) for place in check["places"]),
                )
                for check in checked
            ],
            unchecked=[(", ".join(kinds), why) for why, kinds in unchecked_by_reason(checks)],
            lengths=[
                (title, _bars(described["lengths"][name]["histogram"]))
                for name, title in (
                    ("documents", "Tokens per document"),
                    ("documents_per_row", "Documents per row"),
                    ("rows", "Tokens per row"),
                )
                if described["lengths"].get(name)
            ],
            notes=described["notes"],
            foot=f"Written by packprep audit {described['path']} --html. It loads nothing.",
        )
        .encode()
    )


def _bars(histogram: list[list[int]]) -> list[tuple[str, str, int]]:
    """Return (range, count, width in percent) of each bin."""
    greatest_count = max(count for _, count in histogram)
    return [
        (
            f"{bin_start:,}" if bin_start < 2 else f"{bin_start:,} … {2 * bin_start - 1:,}",
            f"{count:,}",
            round(100 * count / greatest_count),
        )
        for bin_start, count in histogram
    ]


def _shown(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
