"""From runs to a table: rates, ratios, promises; as text, as JSON, and inside
docs/benchmarks.md."""

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from measuring import Line
from peers.contender import Work

# group → (title, unit of its rates, the line that the others are compared with)
GROUPS = {
    "builds": ("Text to training rows", "tokens", "packprep ul2r"),
    "packers": ("Packing", "documents", "packprep best_fit"),
    "collators": ("Corruption", "tokens", "packprep t5"),
    "loaders": ("Loading", "rows", "packprep, tokens"),
}


class Promise(NamedTuple):
    """A ratio of two rates of builds that is to hold. A side is a line's name, or "kind:K": the
    fastest of that kind."""

    what: str
    rate: str
    of: str
    least: float


PROMISES = (
    Promise(
        "ul2r to the fastest that only tokenizes with `tokenizers`",
        "packprep ul2r",
        "kind:tokenizers",
        25.0,
    ),
    Promise(
        "ul2r to Megatron-style with gigatoken", "packprep ul2r", "Megatron-style, gigatoken", 3.0
    ),
    Promise("ul2r to the bare loop", "packprep ul2r", "bare loop", 0.75),
    Promise(
        "reference engine to the fastest that only tokenizes with `tokenizers`",
        "packprep ul2r, reference",
        "kind:tokenizers",
        1.2,
    ),
    Promise(".jsonl.zst to JSONL", "packprep ul2r, .jsonl.zst", "packprep ul2r", 0.85),
    Promise("Parquet to JSONL", "packprep ul2r, Parquet", "packprep ul2r", 0.85),
)


def rate(line: Line) -> float | None:
    """Units of work a second, by the median; None if it was not measured or has no such number."""
    if line.status != "measured" or not line.seconds:
        return None
    done = getattr(line.work, GROUPS[line.group][1])
    return None if done is None else done / line.median_s()


def ratio(line: Line, lines: Iterable[Line]) -> float | None:
    """How many times the rate of this line the line has that its group is compared with."""
    own = rate(line)
    first = (line.group, GROUPS[line.group][2])  # which may not be among the lines asked for
    base = next((rate(other) for other in lines if (other.group, other.name) == first), None)
    return None if not own or base is None else base / own


def side(name: str, lines: Iterable[Line]) -> tuple[str, float] | None:
    """(line's name, rate) of one side of a promise."""
    kind = name.removeprefix("kind:") if name.startswith("kind:") else None
    builds = [line for line in lines if line.group == "builds"]
    own = [
        (line.name, rate(line))
        for line in builds
        if (line.name == name if kind is None else line.kind == kind)
    ]
    measured = [(name, value) for name, value in own if value is not None]
    return max(measured, key=lambda entry: entry[1], default=None)


def judged(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Each promise with the ratio that was measured, None where a side was not."""
    found = []
    for promise in PROMISES:
        above, below = side(promise.rate, lines), side(promise.of, lines)
        measured = above[1] / below[1] if above and below else None
        against = below[0] if below else ""
        found.append(
            {"what": promise.what, "against": against, "least": promise.least, "measured": measured}
        )
    return found


def disagreements(lines: Iterable[Line]) -> list[str]:
    """Lines of one input that did not find the same documents or tokens: then their rates do not
    compare."""
    said = []
    first: dict[tuple[str, int], Line] = {}
    for line in lines:
        if line.status == "measured" and line.group == "builds" and line.kind != "start-up":
            other = first.setdefault((line.group, line.input_bytes), line)
            for what in ("documents", "tokens"):
                own, theirs = getattr(line.work, what), getattr(other.work, what)
                if own != theirs:
                    said.append(f"{line.name} has {own:,} {what}, {other.name} {theirs:,}")
    return said


def as_json(lines: Sequence[Line], facts: dict[str, Any]) -> dict[str, Any]:
    """Everything, for a file."""
    measured = []
    for line in lines:
        entry = {**asdict(line), "rate": rate(line), "ratio": ratio(line, lines)}
        entry["median_s"] = line.median_s() if line.seconds else None
        measured.append(entry)
    return {
        **facts,
        "lines": measured,
        "promises": judged(lines),
        "disagreements": disagreements(lines),
    }


def from_json(result: dict[str, Any]) -> list[Line]:
    """The lines of a file."""
    lines = []
    for entry in result["lines"]:
        fields = {name: value for name, value in entry.items() if name in Line.__dataclass_fields__}
        lines.append(Line(**{**fields, "work": Work(**fields["work"])}))
    return lines


def number(value: float | None, digits: int = 0) -> str:
    """With thousands apart; a dash for None."""
    return "–" if value is None else f"{value:,.{digits}f}"


def times(value: float | None) -> str:
    """A ratio to three places."""
    return "–" if value is None else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def cells(lines: Sequence[Line], group: str) -> list[list[str]]:
    """Head and rows of a group's table; columns that no line fills are left out."""
    own = [line for line in lines if line.group == group]
    unit = GROUPS[group][1]
    extras = list(dict.fromkeys(name for line in own for name in line.extras))
    head = [
        "contender",
        "what it does",
        "input MB",
        "documents",
        "tokens",
        "rows",
        "used %",
        "output MB",
    ]
    head += [
        "runs",
        "s (median)",
        "s (least–most)",
        "start s",
        *extras,
        f"{unit}/s",
        "packprep's ×",
    ]
    table = []
    for line in own:
        if line.status != "measured":
            row = [line.name, line.what, line.status, *[""] * (len(head) - 3)]
        else:
            work = line.work
            row = [line.name, line.what, number(line.input_bytes / 1e6, 1)]
            row += [number(value) for value in (work.documents, work.tokens, work.rows)]
            row += [number(None if work.utilisation is None else 100 * work.utilisation, 2)]
            row += [
                number(None if work.output_bytes is None else work.output_bytes / 1e6, 1),
                str(len(line.seconds)),
            ]
            row += [number(line.median_s(), 3), f"{min(line.seconds):.3f}–{max(line.seconds):.3f}"]
            row += [number(statistics.median(line.startup_s) if line.startup_s else None, 2)]
            row += [
                number(statistics.median(line.extras[name]), 1) if name in line.extras else "–"
                for name in extras
            ]
            row += [number(rate(line)), times(ratio(line, lines))]
        table.append(row)
    kept = [i for i in range(len(head)) if i < 3 or any(row[i] not in ("–", "") for row in table)]
    return [[row[i] for i in kept] for row in [head, *table]]


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Columns lined up; numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    said = []
    for row in rows:
        placed = [
            cell.ljust(w) if i < 2 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        said.append("  ".join(placed).rstrip())
    return "\n".join(said)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """The same for a page."""
    head, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    rule = ["---" if i < 2 else "---:" for i in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *body])


def promise_cells(result: dict[str, Any]) -> list[list[str]]:
    """Head and rows of the promises."""
    rows = [["ratio of rates", "fastest there", "at least", "measured", ""]]
    for entry in result["promises"]:
        measured = entry["measured"]
        verdict = (
            "not measured"
            if measured is None
            else "holds"
            if measured >= entry["least"]
            else "does not hold"
        )
        rows.append(
            [entry["what"], entry["against"], times(entry["least"]), times(measured), verdict]
        )
    return rows


def failures(lines: Iterable[Line]) -> list[str]:
    """What did not run, and why."""
    return [
        f"{line.group}: {line.name}: {line.status}; {line.why}"
        for line in lines
        if line.status != "measured"
    ]


def as_text(result: dict[str, Any]) -> str:
    """All tables for a terminal."""
    lines = from_json(result)
    said = [result["machine"], versions_of(result), settings_of(result)]
    for group, (title, _, _) in GROUPS.items():
        if any(line.group == group for line in lines):
            said += ["", title, text_table(cells(lines, group))]
    if any(line.group == "builds" for line in lines):
        said += ["", "Promises", text_table(promise_cells(result))]
    return "\n".join([*said, "", *failures(lines), *result["disagreements"]]).rstrip()


def versions_of(result: dict[str, Any]) -> str:
    """Every package that took part."""
    found = {
        name: version for line in result["lines"] for name, version in line["versions"].items()
    }
    return ", ".join(
        f"{name} {version}" for name, version in sorted({**found, **result["made_with"]}.items())
    )


def settings_of(result: dict[str, Any]) -> str:
    """What was asked for."""
    said = result["settings"]
    return (
        f"{said['size'] / 1e6:.1f} MB of JSON lines, {said['slow_size'] / 1e6:.1f} MB for slow"
        f" contenders; seq_length {said['seq_length']}; {said['workers']} workers; medians of"
        f" {said['repeats']}, of {said['slow_repeats']} for slow contenders; inputs in the page"
        " cache; contenders in turn"
    )


_PART = re.compile(
    r"(?P<begin><!-- measured: (?P<name>\w+) -->\n).*?(?P<end><!-- /measured -->)", re.S
)


def rendered(page: str, result: dict[str, Any]) -> str:
    """A page with its measured parts made from a result. A group that the result lacks stays as it
    is."""
    lines = from_json(result)

    def part(match: re.Match[str]) -> str:
        name = match["name"]
        if name == "run":
            made = (
                f"{result['machine']}.\n\n{settings_of(result)}.\n\nVersions:"
                f" {versions_of(result)}."
            )
            made += "".join(f"\n\nTokens differ: {said}." for said in result["disagreements"])
        elif name == "promises":
            made = markdown_table(promise_cells(result))
        elif any(line.group == name for line in lines):
            made = markdown_table(cells(lines, name))
        else:
            return match[0]
        return f"{match['begin']}\n{made}\n\n{match['end']}"

    return _PART.sub(part, page)


def render(page: Path, result: dict[str, Any]) -> None:
    """Write a page's measured parts; the prose around them stays."""
    page.write_text(rendered(page.read_text("utf-8"), result), "utf-8")
