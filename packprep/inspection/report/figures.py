"""Count lengths, spans and noise of shards, and draw them as charts with tables.

```
shard ─► columns of all its segments ─► lengths of documents and segments, fill of rows
      └► slots of its first rows ─────► trained slots, span lengths, noise by level
```
Only shards in which verification found no fault are read. Charts are inline SVG bars. Each chart
has one text for screen readers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from packprep.building.plan import Plan
from packprep.dataset.blocks import Blocks
from packprep.dataset.boundaries import fill_slots, put_clean, ranks
from packprep.dataset.epochs.noise import SCHEDULES, level_range, levels_by_block
from packprep.dataset.loader import segments_of
from packprep.dataset.manifest import Manifest
from packprep.dataset.segments import Segments
from packprep.dataset.shard import Shard
from packprep.objectives.objective import Task
from packprep.restoring import restore, slots_of_tokens, stored_segments

_SLOTS_AT_ONCE = 1 << 22
"""Number of slots that are processed at a time."""
LEVEL_BINS = 20
LENGTHS = np.unique(np.rint(2.0 ** (np.arange(64) / 2)).astype(np.int64))
"""Lower bound of each bin of lengths, with two bins per octave."""
FILLS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0)
"""Lower bound of each bin of row fill. The last bin has the full rows."""
TOP, BOTTOM, BELOW = 24, 144, 164
"""Vertical positions in a chart, in pixels from the top: the highest bar, the axis, and the text
below. The chart has the width of the page, so horizontal positions are percentages. The page sets
the colours by class."""
DWARFS = 8
"""The scale is logarithmic if the highest bar is more than DWARFS times as high as the second."""

Tick = tuple[float, str]
"""(position, text) of a label below a chart. Position 1.5 is the middle of the second bin."""


class Columns(NamedTuple):
    """The slots of some rows of a shard as flat arrays, and the m segments in these rows.

    Attributes:
        tokens: Tokens of the slots.
        labels: Labels of the slots, or the tokens if the shard has no labels.
        loss: Loss mask of the slots.
        at: Index of the first slot of each segment in the flat arrays, int64[m].
        slots: Number of slots of each segment, int64[m].
        task: Task of each segment, [m].
        n: Number of content tokens of each segment, int64[m].
        start: Index in the document of each segment's first token, [m].
        prefix: Number of prefix slots of each segment, int64[m].
        level: Noise level of each segment, float32[m].
        trainable: 1 for slots inside trained ranges, uint8, or None if the shard has no trained
            ranges.
        block_level: Noise level of each stored block, float32[k].
        block_offsets: First stored block of each segment, int64[m + 1].
        blocks: The blocks of all segments, also of those that store no levels.
    """

    tokens: np.ndarray
    labels: np.ndarray
    loss: np.ndarray
    at: np.ndarray
    slots: np.ndarray
    task: np.ndarray
    n: np.ndarray
    start: np.ndarray
    prefix: np.ndarray
    level: np.ndarray
    trainable: np.ndarray | None
    block_level: np.ndarray | None
    block_offsets: np.ndarray | None
    blocks: Blocks


@dataclass
class Levels:
    """Counts for the same-position noise of one task, by noise level, int64[LEVEL_BINS] each.

    The bins are equal parts of the task's range of noise levels.

    Attributes:
        units: Number of segments, or of blocks if each block has its own level.
        candidates: Number of candidate slots.
        corrupted: Number of corrupted slots.
    """

    units: np.ndarray = field(default_factory=lambda: np.zeros(LEVEL_BINS, np.int64))
    candidates: np.ndarray = field(default_factory=lambda: np.zeros(LEVEL_BINS, np.int64))
    corrupted: np.ndarray = field(default_factory=lambda: np.zeros(LEVEL_BINS, np.int64))


class Figures:
    """Counts over the added shards: arrays with one value per task, and histograms."""

    def __init__(self, manifest: Manifest, plan: Plan):
        self.manifest, self.plan, self.tasks = manifest, plan, plan.tasks
        tasks = len(self.tasks)
        self.shards = self.rows = self.segments = self.slot_rows = 0
        self.supervised = False  # Whether any shard has trained ranges.
        self.documents = np.zeros(len(LENGTHS), np.int64)
        self.segment_slots = np.zeros(len(LENGTHS), np.int64)
        self.row_segments = np.zeros(len(LENGTHS), np.int64)
        self.fill = np.zeros(len(FILLS), np.int64)
        self.task_slots, self.task_trained = np.zeros(tasks, np.int64), np.zeros(tasks, np.int64)
        self.levels: dict[int, Levels] = {}
        # Task → array with the number of spans of k tokens at index k. See `_add_spans`.
        self.spans: dict[int, np.ndarray] = {}

    def add(self, shard: Shard, most_slots: int) -> None:
        """Count the segments of a shard, and the slots of its first rows.

        At most `most_slots` slots are counted, or one row if a row has more slots.
        """
        arrays, length = shard.arrays, shard.seq_length
        self.shards += 1
        self.rows += shard.rows
        self.segments += shard.segments
        self.supervised |= "trained_offsets" in arrays
        if not shard.segments:
            return
        segments = segments_of(shard, self.manifest)
        self.segment_slots += binned(segments.slots)
        self.row_segments += binned(np.diff(arrays["row_offsets"]))
        self.documents += binned(_document_tokens(arrays))
        filled = np.bincount(segments.row, segments.slots, shard.rows) / length
        self.fill += np.bincount(np.searchsorted(FILLS, filled, "right") - 1, minlength=len(FILLS))
        # Slots take the most time, so only the first rows are counted slot by slot.
        rows = min(shard.rows, max(most_slots // length, 1))
        step = max(_SLOTS_AT_ONCE // length, 1)
        self.slot_rows += rows
        stored = stored_segments(self.plan, arrays)
        for first_row in range(0, rows, step):
            self._add_slots(shard, stored, range(first_row, min(first_row + step, rows)))

    def _add_slots(self, shard: Shard, stored: Segments, rows: range) -> None:
        c = _columns(shard, self.manifest, rows)
        if not len(c.at):
            return
        trained = _sums(c.loss, c.at, c.at + c.slots)
        tasks = len(self.task_slots)
        self.task_slots += np.bincount(c.task, c.slots, tasks).astype(np.int64)
        self.task_trained += np.bincount(c.task, trained, tasks).astype(np.int64)
        for t in np.unique(c.task).tolist():
            task, indices = self.tasks[t], np.flatnonzero((c.task == t) & (c.n > 0))
            if task.in_place:
                self._add_noise(t, task, c, indices)
                continue
            indices = indices[c.prefix[indices] > 0]  # Other tasks have no spans.
            # From here on, segments are numbered in the shard, as in `stored`.
            indices += int(shard.arrays["row_offsets"][rows.start])
            if len(indices := indices[stored.first_trained[indices] < 0]):
                self._add_spans(shard, stored, t, indices)

    def _before(self, task: Task, c: Columns, indices: np.ndarray) -> np.ndarray:
        """Return the number of slots for bos and mode token in each chosen segment, int64[k]."""
        bos = bool(self.manifest["recipe"]["documents"]["prepend_bos"])
        return ((c.start[indices] == 0) & bos).astype(np.int64) + task.mode

    def _add_spans(self, shard: Shard, stored: Segments, t: int, chosen: np.ndarray) -> None:
        """Count the spans of the chosen segments by length.

        A span is a run of neighbouring document tokens that are stored after the prefix. Segments
        whose original tokens cannot be restored are skipped.
        """
        arrays = shard.arrays
        restored = restore(self.plan, arrays, stored, chosen)
        n = np.diff(restored.offsets)
        slots = slots_of_tokens(self.plan, arrays, stored, chosen, restored.ids)
        # A segment with a token in an unknown slot is left out completely.
        is_known = restored.fits & (np.add.reduceat(slots < 0, restored.offsets[:-1]) == 0)
        inputs_end = stored.first_slot[chosen] + stored.prefix[chosen]
        noise = np.append(slots >= np.repeat(inputs_end, n), False) & np.append(
            np.repeat(is_known, n), False
        )
        # A span starts after a token of the prefix, and at the start of a segment.
        begins = noise.copy()
        begins[1:] &= ~noise[:-1]
        begins[restored.offsets[:-1]] = noise[restored.offsets[:-1]]
        runs = np.bincount(np.cumsum(begins)[noise] - 1)
        self.spans[t] = _added(self.spans.get(t, np.zeros(0, np.int64)), np.bincount(runs))

    def _add_noise(self, t: int, task: Task, c: Columns, indices: np.ndarray) -> None:
        """Count the candidate and the corrupted slots of one task's segments, by noise level.

        Candidates are the slots that resampling may change: the body, and eos unless noise_eos is
        off. Prompts, and mask tokens that are part of the text, are not candidates.
        """
        parameters, copies = task.parameters, task.objective.copies
        any_token, has_blocks = SCHEDULES[task.objective.name].any_token(parameters), copies > 1
        slots_before, half = self._before(task, c, indices), c.slots[indices] // copies
        # Without trained ranges, only eos follows the tokens of a segment.
        count = half - slots_before
        if not parameters.get("noise_eos", True) and c.trainable is None:
            count = np.minimum(count, c.n[indices])
        # In block diffusion, the second half of a segment has the original tokens.
        begins = c.at[indices] + slots_before
        level, ends, originals = c.level[indices], begins + count, c.labels
        if has_blocks:
            originals = c.tokens.copy()
            put_clean(originals, c.tokens, c.at[indices], half)
        if has_blocks and levels_by_block(parameters):
            bodies = slots_before, slots_before + count
            level, begins, ends = _levels_of_blocks(c, indices, bodies)
        # Only these slots could be noised when the noise was drawn.
        allowed = np.ones(len(c.tokens), np.uint8)
        if c.trainable is not None:
            allowed = c.trainable.copy()
        if not any_token:
            allowed &= originals != self.manifest["specials"].get("mask", -1)
        # If noise writes only masks, exactly the noised slots are trained. Otherwise the tokens are
        # compared.
        is_corrupted = c.loss
        if any_token or has_blocks:
            is_corrupted = (c.tokens != originals).view(np.uint8)
        # A task with a single level has all of its noise in the first bin.
        low_level, high_level = level_range(parameters)
        width = high_level - low_level
        position = np.zeros(len(level))
        if width > 0:
            position = (level.astype(np.float64) - low_level) / width * LEVEL_BINS
        bin = np.clip(position.astype(np.int64), 0, LEVEL_BINS - 1)
        levels = self.levels.setdefault(t, Levels())
        levels.units += np.bincount(bin, minlength=LEVEL_BINS)
        for counts, flags in ((levels.candidates, allowed), (levels.corrupted, is_corrupted)):
            sums = _sums(flags, begins, ends)
            counts += np.bincount(bin, sums, LEVEL_BINS).astype(np.int64)


def _levels_of_blocks(
    c: Columns, indices: np.ndarray, bodies: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the noise level, first candidate and end of each block of some segments.

    Args:
        c: The columns of the rows.
        indices: The segments, int64[k].
        bodies: First slot of each segment's body, and the slot after its last candidate. Both count
            from the start of the segment.
    """
    assert c.block_level is not None and c.block_offsets is not None
    blocks = c.blocks.select(indices)
    body_begin, body_end = (column[blocks.segment] for column in bodies)
    # A block may start before the body and end after it, but its candidates are in the body.
    low, high = np.maximum(blocks.begin, body_begin), np.minimum(blocks.end, body_end)
    begins = c.at[indices][blocks.segment] + low
    first_block = np.repeat(c.block_offsets[indices], blocks.count)
    level = c.block_level[first_block + ranks(blocks.count)]
    return level, begins, begins + np.maximum(high - low, 0)


def _added(counts: np.ndarray, other_counts: np.ndarray) -> np.ndarray:
    """Return the sum of two counts, which may have different lengths."""
    size = max(len(counts), len(other_counts))
    return np.pad(counts, (0, size - len(counts))) + np.pad(
        other_counts, (0, size - len(other_counts))
    )


def binned(values: np.ndarray) -> np.ndarray:
    """Return the number of values in each bin of LENGTHS, int64[len(LENGTHS)].

    Values below 1 are ignored.
    """
    return np.bincount(
        np.searchsorted(LENGTHS, values[values > 0], "right") - 1, minlength=len(LENGTHS)
    )


def _document_tokens(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the number of content tokens of each document, in each pass, int64[k].

    All segments of a document are in one shard.
    """
    names = ("segment_repeat", "segment_doc", "segment_file")
    order = np.lexsort([arrays[name] for name in names])
    columns = [arrays[name][order] for name in names]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return np.add.reduceat(
        arrays["segment_tokens"][order], np.flatnonzero(is_first), dtype=np.int64
    )


def _columns(shard: Shard, manifest: Manifest, rows: range) -> Columns:
    arrays, first_row, end_row = shard.arrays, rows.start, rows.stop
    first_segment, end_segment = (
        int(arrays["row_offsets"][first_row]),
        int(arrays["row_offsets"][end_row]),
    )
    chosen = slice(first_segment, end_segment)
    segments = segments_of(shard, manifest, rows)
    first_slots, slots, size = segments.at, segments.slots, segments.size
    prefix, n = (
        arrays[f"segment_{name}"][chosen].astype(np.int64) for name in ("prefix", "tokens")
    )
    tokens = arrays["tokens"][first_row:end_row].reshape(-1)
    # A compact shard omits the mask if the prefixes determine it (P9).
    if "loss_mask" in arrays:
        loss = arrays["loss_mask"][first_row:end_row].reshape(-1)
    else:
        loss = segments.next_token_loss_mask()
    trainable = None
    if "trained_offsets" in arrays:
        offsets, ranges = (
            arrays["trained_offsets"][first_segment : end_segment + 1],
            arrays["trained_ranges"].astype(np.int64),
        )
        # Offsets count through the shard, and ranges from the start of their segment.
        range_counts = np.diff(offsets)
        ranges = ranges[offsets[0] : offsets[-1]]
        begins = np.repeat(first_slots, range_counts) + ranges[:, 0]
        trainable = fill_slots(
            begins, ranges[:, 1] - ranges[:, 0], np.ones(len(ranges), np.uint8), 0, size
        )
    # The blocks of these rows are numbered from 0 in the result.
    blocks = (
        arrays["block_offsets"][first_segment : end_segment + 1]
        if "block_offsets" in arrays
        else None
    )
    return Columns(
        tokens,
        arrays["labels"][first_row:end_row].reshape(-1) if "labels" in arrays else tokens,
        loss,
        first_slots,
        slots,
        arrays["segment_task"][chosen],
        n,
        arrays["segment_start"][chosen],
        prefix,
        arrays["segment_noise"][chosen],
        trainable,
        None if blocks is None else arrays["block_noise"][blocks[0] : blocks[-1]],
        None if blocks is None else blocks - blocks[0],
        segments.blocks,
    )


def _sums(values: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the sum of values[begins[i] : ends[i]] for each i, int64[m].

    The ranges must be ascending and must not overlap.
    """
    if not len(begins):
        return np.zeros(0, np.int64)
    bounds = np.stack((begins, ends), axis=1).reshape(-1)
    sums = np.add.reduceat(np.append(values, values.dtype.type(0)), bounds, dtype=np.int64)[::2]
    return np.where(ends > begins, sums, 0)


MOST_TASKS = 24
"""Maximum number of tasks with charts of spans, and of tasks with charts of noise."""
SPAN_BINS = 34


class Chart(NamedTuple):
    """A chart with its title, note and table.

    Attributes:
        title: The title.
        note: A text below the title.
        svg: The drawing.
        head: Column names of the table.
        rows: Rows of the table, which has the numbers of the chart.
    """

    title: str
    note: str
    svg: Markup
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def charts_of(figures: Figures) -> list[tuple[str, str, list[Chart]]]:
    """Return [(heading, description, charts)], without empty groups."""
    lengths = [
        _lengths("Document length", "tokens per document and pass", figures.documents),
        _lengths("Segment length", "slots per segment", figures.segment_slots),
        _lengths("Segments per row", "segments in a row", figures.row_segments),
        _fill(figures),
    ]
    groups = [
        (
            "Lengths",
            "The width of length bins doubles every second bar.",
            [length_chart for length_chart in lengths if length_chart is not None],
        ),
        (
            "Spans",
            ("Adjacent tokens of a document that follow the prefix and are predicted."),
            list(_spans(figures)),
        ),
        (
            "Noise",
            (
                "Levels are uniform over the task's range. The second chart of a task shows the"
                " share of candidates that were corrupted at each level."
            ),
            list(_noise(figures)),
        ),
    ]
    return [group for group in groups if group[2]]


def _lengths(title: str, note: str, counts: np.ndarray) -> Chart | None:
    filled = np.flatnonzero(counts)
    if not len(filled):
        return None
    low, high = int(filled[0]), int(filled[-1]) + 1
    # With fewer than eight bins, the bars would be too wide.
    while high - low < 8 and high < len(LENGTHS) - 1:
        low, high = max(low - 1, 0), high + 1
    shown = counts[low:high].tolist()
    names = [_range(int(LENGTHS[i]), int(LENGTHS[i + 1]) - 1) for i in range(low, high)]
    powers = [i for i in range(low, high) if int(LENGTHS[i]).bit_count() == 1]
    ticks = [(float(i - low), _short(int(LENGTHS[i]))) for i in powers[:: -(-len(powers) // 6)]]
    words = f"{title}: {sum(shown):,} in total, most often {names[int(np.argmax(shown))]}"
    rows = [(name, *_counted(count, sum(shown))) for name, count in zip(names, shown, strict=True)]
    return _counts(title, note, words, (title.lower(), "count", "share"), rows, shown, ticks)


def _fill(figures: Figures) -> Chart | None:
    counts = figures.fill.tolist()
    if not sum(counts):
        return None
    edges = [f"{100 * low:g}" for low in FILLS]
    names = [f"{low} … {high} %" for low, high in zip(edges[:-1], edges[1:], strict=True)] + [
        "100 %"
    ]
    ticks = [
        (i + 0.5, text) for i, text in ((0, "< 50"), (2, "80"), (4, "95"), (6, "99"), (8, "100 %"))
    ]
    full = counts[-1] / sum(counts)
    words = f"Row fill: {full:.1%} of {sum(counts):,} rows have no padding"
    note = f"percent of a row's slots in segments; {full:.1%} rows are full"
    rows = [
        (name, *_counted(count, sum(counts))) for name, count in zip(names, counts, strict=True)
    ]
    return _counts("Row fill", note, words, ("row fill", "rows", "share"), rows, counts, ticks)


def _spans(figures: Figures) -> Iterator[Chart]:
    for t, counted in sorted(figures.spans.items())[:MOST_TASKS]:
        task, size, total = figures.tasks[t], len(counted), int(counted.sum())
        if not total:
            continue
        # Rare long spans would make the other bars thin, so the last bin has all of them.
        shown = int(np.searchsorted(np.cumsum(counted), 0.997 * total)) + 1
        width = -(-shown // (SPAN_BINS - 1))
        # Lengths count from 1, so bin i has the lengths 1 + i · width … (i + 1) · width.
        bins = np.minimum(np.maximum(np.arange(size) - 1, 0) // width, -(-shown // width))
        counts = np.bincount(bins, counted).tolist()
        names = [_range(1 + i * width, (i + 1) * width) for i in range(len(counts))]
        if len(counts) > -(-shown // width):
            names[-1] = f"{1 + (len(counts) - 1) * width:,} and more"
        mean = float(np.arange(size) @ counted) / total
        note = f"mean {mean:.2f} tokens; {total:,} spans"
        ticks = [
            (i + 0.5, f"{1 + i * width}")
            for i in range(0, len(counts) - 2, max(len(counts) // 5, 1))
        ]
        words = f"Span lengths of task {task.name}: {note}"
        rows = [(name, *_counted(count, total)) for name, count in zip(names, counts, strict=True)]
        head = ("tokens", "spans", "share")
        yield _counts(f"{task.name}: span length", note, words, head, rows, counts, ticks)


def _noise(figures: Figures) -> Iterator[Chart]:
    for t, levels in sorted(figures.levels.items())[:MOST_TASKS]:
        task = figures.tasks[t]
        low, high = level_range(task.parameters)
        thing = "blocks" if task.objective.copies > 1 else "segments"
        edges = np.linspace(low, high, LEVEL_BINS + 1)
        names = [f"{a:.3g} … {b:.3g}" for a, b in zip(edges[:-1], edges[1:], strict=True)]
        # A bin without candidates must not divide by 0.
        units, candidates = levels.units, np.maximum(levels.candidates, 1)
        shares = (levels.corrupted / candidates).tolist()
        count = int(units.sum())
        # A task with a single level has no distribution of levels.
        if high > low:
            stratified = ", stratified per row" if task.parameters.get("stratified") else ""
            note = f"uniform over {low:g} … {high:g}{stratified}; {count:,} {thing}"
            words = (
                f"Noise levels of task {task.name}: {note}, in bins of {units.min():,} to"
                f" {units.max():,}"
            )
            title, counts = f"{task.name}: noise level", units.tolist()
            rows = [
                (name, *_counted(unit, count)) for name, unit in zip(names, counts, strict=True)
            ]
            head: tuple[str, ...] = ("level", thing, "share")
            yield _counts(title, note, words, head, rows, counts, _unit_ticks(low, high))
        else:
            names, shares = [f"{low:g}"], shares[:1]
        # The second chart shows whether noise follows its level.
        total = max(int(levels.candidates.sum()), 1)
        mean = levels.corrupted.sum() / total
        note = f"{mean:.2%} of {levels.candidates.sum():,} candidates corrupted"
        ticks = _unit_ticks(low, high) if high > low else [(0.5, f"level {low:g}")]
        words = f"Corrupted share by level of task {task.name}: {note}"
        share_head = ("level", "corrupted")
        share_rows = [(name, f"{share:.2%}") for name, share in zip(names, shares, strict=True)]
        svg = chart(shares, ticks, [(1.0, "100 %")], words, _said(share_head, share_rows))
        yield Chart(f"{task.name}: corrupted, by level", note, svg, share_head, share_rows)


def _unit_ticks(low: float, high: float) -> list[Tick]:
    return [(LEVEL_BINS * i / 4, f"{low + (high - low) * i / 4:.3g}") for i in range(5)]


def _counts(
    title: str,
    note: str,
    words: str,
    head: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    counts: Sequence[float],
    ticks: Sequence[Tick],
) -> Chart:
    """Return a chart of counts.

    The scale is logarithmic if one count is much larger than the rest.
    """
    peak = max(counts)
    second_largest, largest = sorted([0, *counts])[-2:]
    log = 0 < second_largest * DWARFS < largest
    # Draw a line for each power of ten, or for every second one if there are many.
    powers = (
        [10**k for k in range(0, len(str(round(peak))), 1 if peak < 1000 else 2)] if log else []
    )
    lines = [(float(p), f"{p:,}") for p in powers if p * 2 < peak] + [(peak, f"{round(peak):,}")]
    svg = chart(counts, ticks, lines, words, _said(head, rows), log)
    return Chart(title, f"{note}; logarithmic scale" if log else note, svg, head, rows)


def _said(head: Sequence[str], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return each row of a table as one line, as in "64 … 90: count 12, share 3.1%"."""
    return [
        f"{row[0]}: "
        + ", ".join(f"{name} {cell}" for name, cell in zip(head[1:], row[1:], strict=True))
        for row in rows
    ]


def _counted(count: float, total: float) -> tuple[str, str]:
    return f"{count:,.0f}", f"{count / total:.2%}"


def _range(low: int, high: int) -> str:
    return f"{low:,}" if low >= high else f"{low:,} … {high:,}"


def _short(value: int) -> str:
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return str(value)


def chart(
    values: Sequence[float],
    ticks: Sequence[Tick],
    lines: Sequence[tuple[float, str]],
    words: str,
    says: Sequence[str],
    log: bool = False,
) -> Markup:
    """Draw the values as bars, one per bin.

    Args:
        values: The values.
        ticks: (position, text) of labels below the bars.
        lines: (value, text) of horizontal lines. The last line should be above all bars.
        words: Description of the chart for screen readers.
        says: Text of each bin, shown when the pointer is on it.
        log: Whether the scale is logarithmic. A bar of value ½ then has height 0.
    """
    # Horizontal positions are percentages, because the chart has the width of the page.
    ceiling = max([lines[-1][0], *values], default=0.0) or 1.0
    step = 100 / max(len(values), 1)
    gap = min(0.6, step * 0.15)

    def y(value: float) -> float:
        # The factor 2 gives the value 1 a visible bar on a logarithmic scale.
        share = (
            math.log(max(2 * value, 1)) / math.log(max(2 * ceiling, 2)) if log else value / ceiling
        )
        return BOTTOM - share * (BOTTOM - TOP)

    grid = Markup('<line class="grid" x2="100%" y1="{0:.1f}" y2="{0:.1f}"/>')
    parts = [grid.format(y(value)) for value, _ in lines]
    for i, (value, text) in enumerate(zip(values, says, strict=True)):
        bar, height = Markup(""), BOTTOM - y(value)
        across = Markup('x="{:.2f}%" width="{:.2f}%"').format(i * step + gap / 2, step - gap)
        if value > 0:
            # A value above 0 is always visible.
            height = max(height, 1.0)
            bar = Markup('<rect class="bar" {} y="{:.1f}" height="{:.1f}"/>').format(
                across, BOTTOM - height, height
            )
        # The ground fills the height of the chart, so the pointer need not be on a low bar.
        ground = Markup('<rect class="ground" {} y="{}" height="{}"/>').format(
            across, TOP, BOTTOM - TOP
        )
        parts.append(Markup('<g class="bin" data-says="{}">{}{}</g>').format(text, ground, bar))
    parts.append(Markup('<line class="axis" x2="100%" y1="{0}" y2="{0}"/>').format(BOTTOM))
    # Put the texts of the lines on the side where the bars are lower.
    side = Markup('x="100%" text-anchor="end"') if log and values[0] > values[-1] else ""
    value_text = Markup('<text class="value" {} y="{:.1f}">{}</text>')
    parts += [value_text.format(side, y(value) - 5, text) for value, text in lines]
    for position, text in ticks:
        x = position * step
        # Labels near an edge stay inside the chart.
        anchor = "start" if x < 9 else "end" if x > 91 else "middle"
        place = 0.0 if x < 3 else 100.0 if x > 97 else x
        parts.append(
            Markup('<text x="{:.1f}%" y="{}" text-anchor="{}">{}</text>').format(
                place, BELOW, anchor, text
            )
        )
    head = Markup('<svg class="chart" role="img" aria-label="{}">').format(words)
    return head + Markup("").join(parts) + Markup("</svg>")


def meter(share: float | None, wanted_share: float | None = None) -> Markup:
    """Draw a share between 0 and 1 as a bar, with a mark at the wanted share.

    The drawing has no text, because the page prints the numbers.
    """
    parts = [Markup('<rect class="track" width="100" height="8"/>')]
    if share:
        parts.append(
            Markup('<rect class="bar" width="{:.2f}" height="8"/>').format(100 * min(share, 1))
        )
    if wanted_share is not None:
        x = min(max(100 * wanted_share, 0.75), 99.25)
        parts.append(Markup('<path class="wanted" d="M{:.2f} -2V10"/>').format(x))
    head = Markup(
        '<svg class="meter" viewBox="0 -2 100 12" preserveAspectRatio="none" aria-hidden="true">'
    )
    return head + Markup("").join(parts) + Markup("</svg>")


def stack(parts: Sequence[tuple[str, float]], words: str) -> Markup:
    """Draw one bar from several parts (CSS class, share between 0 and 1), from left to right."""
    drawn, x = [], 0.0
    for kind, share in parts:
        drawn.append(
            Markup('<rect class="{}" x="{:.3f}" width="{:.3f}" height="20"/>').format(
                kind, x, 1000 * share
            )
        )
        x += 1000 * share
    head = Markup(
        '<svg class="stack" viewBox="0 0 1000 20" preserveAspectRatio="none" role="img"'
        ' aria-label="{}">'
    )
    return head.format(words) + Markup("").join(drawn) + Markup("</svg>")
