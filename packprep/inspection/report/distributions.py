"""Figures → charts, each with its words and its table."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from packprep.inspection.report.charts import Tick, chart
from packprep.inspection.report.figures import FILLS, LENGTHS, LEVEL_BINS, Figures
from packprep.inspection.report.theory import expected_spans

MOST_TASKS = 24
"""Tasks of one kind that have charts."""
SPAN_BINS = 34


class Chart(NamedTuple):
    """A chart with all that stands around it. head, rows: its numbers as a table."""

    title: str
    note: str
    svg: Markup
    theory: bool
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def charts_of(figures: Figures) -> list[tuple[str, str, list[Chart]]]:
    """[(heading, what it says, charts)], without those that have nothing to show."""
    lengths = [
        _lengths("Document length", "tokens of a document, each use once", figures.documents),
        _lengths("Segment length", "slots of a segment", figures.segment_slots),
        _lengths("Segments of a row", "how many a row holds", figures.row_segments),
        _fill(figures),
    ]
    groups = [
        ("Lengths", "Bins of lengths double every second bar.", [one for one in lengths if one is not None]),
        (
            "Spans and pivots",
            "The line is exact: a random composition of each segment's noise tokens into its spans, summed over the segments "
            "seen; a pivot is uniform.",
            [*_spans(figures), *_pivots(figures)],
        ),
        (
            "Noise",
            "Levels are uniform over the task's range. Below them, the share of the candidates that was corrupted at each "
            "level, over what the law says.",
            list(_noise(figures)),
        ),
    ]
    return [group for group in groups if group[2]]


def _lengths(title: str, note: str, counts: np.ndarray) -> Chart | None:
    filled = np.flatnonzero(counts)
    if not len(filled):
        return None
    low, high = int(filled[0]), int(filled[-1]) + 1
    while high - low < 8 and high < len(LENGTHS) - 1:
        low, high = max(low - 1, 0), high + 1
    shown = counts[low:high].tolist()
    names = [_range(int(LENGTHS[i]), int(LENGTHS[i + 1]) - 1) for i in range(low, high)]
    powers = [i for i in range(low, high) if int(LENGTHS[i]).bit_count() == 1]
    ticks = [(float(i - low), _short(int(LENGTHS[i]))) for i in powers[:: -(-len(powers) // 6)]]
    words = f"{title}: {sum(shown):,} in all, most often {names[int(np.argmax(shown))]}"
    svg = chart(shown, None, ticks, (max(shown), f"{max(shown):,}"), words)
    return Chart(title, note, svg, False, (title.lower(), "count"), list(zip(names, map(_count, shown), strict=True)))


def _fill(figures: Figures) -> Chart | None:
    counts = figures.fill.tolist()
    if not sum(counts):
        return None
    edges = [f"{100 * low:g}" for low in FILLS]
    names = [f"{low} … {high} %" for low, high in zip(edges[:-1], edges[1:], strict=True)] + ["100 %"]
    ticks = [(i + 0.5, text) for i, text in ((0, "< 50"), (2, "80"), (4, "95"), (6, "99"), (8, "100 %"))]
    full = counts[-1] / sum(counts)
    words = f"Row fill: {full:.1%} of {sum(counts):,} rows have no padding"
    svg = chart(counts, None, ticks, (max(counts), f"{max(counts):,}"), words)
    note = f"per cent of a row's slots in segments; {full:.1%} of the rows are full"
    return Chart("Row fill", note, svg, False, ("row fill", "rows"), list(zip(names, map(_count, counts), strict=True)))


def _name(figures: Figures, t: int) -> str:
    return figures.tasks[t]["name"]


def _spans(figures: Figures) -> Iterator[Chart]:
    for t, spans in sorted(figures.spans.items())[:MOST_TASKS]:
        task = figures.tasks[t]
        expected = expected_spans(task, len(figures.manifest["specials"]["sentinels"]), spans.segments)
        size = max(len(expected), len(spans.lengths))
        counted = np.concatenate((spans.lengths, np.zeros(size - len(spans.lengths), np.int64)))
        expected = np.concatenate((expected, np.zeros(size - len(expected))))
        total = int(counted.sum())
        shown = int(np.searchsorted(np.cumsum(expected), 0.997 * total)) + 1
        width = -(-shown // (SPAN_BINS - 1))
        bins = np.minimum(np.maximum(np.arange(size) - 1, 0) // width, -(-shown // width))
        here, there = np.bincount(bins, counted).tolist(), np.bincount(bins, expected).tolist()
        names = [_range(1 + i * width, (i + 1) * width) for i in range(len(here))]
        if len(here) > -(-shown // width):
            names[-1] = f"{1 + (len(here) - 1) * width:,} and more"
        k = np.arange(size)
        mean, theory = float(k @ counted) / total, float(k @ expected) / total
        note = f"mean {mean:.2f} tokens, by theory {theory:.2f}; {total:,} spans"
        ticks = [(i + 0.5, f"{1 + i * width}") for i in range(0, len(here) - 2, max(len(here) // 5, 1))]
        words = f"Span lengths of task {task['name']}: {note}"
        yield _over_theory(f"{task['name']}: span length", note, words, ("tokens", "spans"), names, here, there, ticks)


def _pivots(figures: Figures) -> Iterator[Chart]:
    for t, (counted, expected) in sorted(figures.pivots.items())[:MOST_TASKS]:
        if not counted.sum():
            continue
        names = [f"{i / LEVEL_BINS:.2f} … {(i + 1) / LEVEL_BINS:.2f}" for i in range(LEVEL_BINS)]
        here, there = counted.tolist(), expected.tolist()
        note = f"where the prefix ends, as a share of the tokens; {sum(here):,} segments"
        words = f"Pivots of task {_name(figures, t)}: {note}, in bins of {min(here):,} to {max(here):,}"
        title, ticks = f"{_name(figures, t)}: pivot", _unit_ticks(0, 1)
        yield _over_theory(title, note, words, ("pivot", "segments"), names, here, there, ticks)


def _noise(figures: Figures) -> Iterator[Chart]:
    for t, levels in sorted(figures.levels.items())[:MOST_TASKS]:
        task = figures.tasks[t]
        low, high = task["parameters"]["noise_range"]
        thing = "blocks" if task["attention"] == "block_diffusion" else "segments"
        edges = np.linspace(low, high, LEVEL_BINS + 1)
        names = [f"{a:.3g} … {b:.3g}" for a, b in zip(edges[:-1], edges[1:], strict=True)]
        units, candidates = levels.units, np.maximum(levels.candidates, 1)
        shares, law = (levels.corrupted / candidates).tolist(), (levels.expected / candidates).tolist()
        count = int(units.sum())
        if high > low:
            even, level_ticks = [count / LEVEL_BINS] * LEVEL_BINS, _unit_ticks(low, high)
            stratified = ", stratified in a row" if task["parameters"].get("stratified") else ""
            note = f"uniform over {low:g} … {high:g}{stratified}; {count:,} {thing}"
            words = f"Noise levels of task {task['name']}: {note}, in bins of {units.min():,} to {units.max():,}"
            title, here = f"{task['name']}: noise level", units.tolist()
            yield _over_theory(title, note, words, ("level", thing), names, here, even, level_ticks)
        else:
            names, shares, law = [f"{low:g}"], shares[:1], law[:1]
        total = max(int(levels.candidates.sum()), 1)
        mean, theory = levels.corrupted.sum() / total, levels.expected.sum() / total
        note = f"{mean:.2%} of {levels.candidates.sum():,} candidates corrupted, by the law {theory:.2%}"
        ticks = _unit_ticks(low, high) if high > low else [(0.5, f"level {low:g}")]
        words = f"Corrupted share by level of task {task['name']}: {note}"
        svg = chart(shares, law, ticks, (1.0, "100 %"), words)
        rows = [(name, f"{a:.2%}", f"{b:.2%}") for name, a, b in zip(names, shares, law, strict=True)]
        yield Chart(f"{task['name']}: corrupted, by level", note, svg, True, ("level", "corrupted", "by the law"), rows)


def _unit_ticks(low: float, high: float) -> list[Tick]:
    return [(LEVEL_BINS * i / 4, f"{low + (high - low) * i / 4:.3g}") for i in range(5)]


def _over_theory(
    title: str,
    note: str,
    words: str,
    of: tuple[str, str],
    names: Sequence[str],
    here: Sequence[float],
    there: Sequence[float],
    ticks: Sequence[Tick],
) -> Chart:
    """Counts and what theory says of them. of: what is counted by, and what is counted."""
    most = max(*here, *there)
    svg = chart(here, there, ticks, (most, f"{round(most):,}"), words)
    rows = [(name, f"{a:,.0f}", f"{b:,.1f}") for name, a, b in zip(names, here, there, strict=True)]
    return Chart(title, note, svg, True, (*of, "by theory"), rows)


def _range(low: int, high: int) -> str:
    return f"{low:,}" if low >= high else f"{low:,} … {high:,}"


def _short(value: int) -> str:
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return str(value)


def _count(value: float) -> str:
    return f"{value:,.0f}"
