"""The header columns and slots of some shards → histograms, as they are and as they should be.

```
shard ─► columns of all its segments ─► lengths of documents and segments, fill of rows
      └► slots of its first rows ─────► trained slots, span lengths, pivots, noise by level
```
Only shards in which verification found no fault are read: what stands in them may be believed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from packprep.dataset import noise
from packprep.dataset.manifest import Manifest
from packprep.dataset.segments import next_token_loss_mask, spread
from packprep.dataset.shard import Shard
from packprep.inspection.columns import segments_of
from packprep.inspection.report.theory import corrupted_shares, counts_of, pivot_bins
from packprep.objectives.tasks import whole_task

CHUNK_SLOTS = 1 << 22
"""Slots that are looked at in one go."""
LEVEL_BINS = 20
LENGTHS = np.unique(np.rint(2.0 ** (np.arange(64) / 2)).astype(np.int64))
"""The least value of each bin of lengths: two bins an octave."""
FILLS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0)
"""The least fill of each bin of rows; the last bin is that of full rows."""


class Columns(NamedTuple):
    """Some rows of a shard: flat slots, and the segments in them, [m] each."""

    tokens: np.ndarray
    labels: np.ndarray  # the tokens where the shard has none
    loss: np.ndarray
    at: np.ndarray  # int64: first flat slot
    slots: np.ndarray  # int64
    task: np.ndarray
    n: np.ndarray  # int64: content tokens
    start: np.ndarray
    prefix: np.ndarray  # int64
    level: np.ndarray  # float32
    may: np.ndarray | None  # uint8, flat: slots inside trained ranges; None: the shard has no ranges
    whole: np.ndarray  # bool: all of the body may be trained
    block_level: np.ndarray | None  # float32[blocks]
    block_offsets: np.ndarray | None  # int64[m + 1]


@dataclass
class Levels:
    """In-place noise of one task: units are segments, or blocks. LEVEL_BINS equal parts of the task's range of levels."""

    units: np.ndarray = field(default_factory=lambda: np.zeros(LEVEL_BINS, np.int64))
    candidates: np.ndarray = field(default_factory=lambda: np.zeros(LEVEL_BINS, np.int64))
    corrupted: np.ndarray = field(default_factory=lambda: np.zeros(LEVEL_BINS, np.int64))
    expected: np.ndarray = field(default_factory=lambda: np.zeros(LEVEL_BINS))


@dataclass
class Spans:
    """Runs of noise of one span corruption task."""

    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # runs of k tokens
    segments: dict[int, int] = field(default_factory=dict)  # content tokens → segments


class Figures:
    """What was counted so far. tasks: int64[tasks] each. The rest are histograms over the bins above."""

    def __init__(self, manifest: Manifest):
        self.manifest = manifest
        self.tasks = [whole_task(task) for task in manifest["tasks"]]
        tasks = len(manifest["tasks"])
        self.shards = self.rows = self.segments = self.slot_rows = 0
        self.supervised = False  # whether any shard has trained ranges
        self.documents = np.zeros(len(LENGTHS), np.int64)
        self.segment_slots = np.zeros(len(LENGTHS), np.int64)
        self.row_segments = np.zeros(len(LENGTHS), np.int64)
        self.fill = np.zeros(len(FILLS), np.int64)
        self.task_slots, self.task_trained = np.zeros(tasks, np.int64), np.zeros(tasks, np.int64)
        self.levels: dict[int, Levels] = {}
        self.spans: dict[int, Spans] = {}
        self.pivots: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # counted int64, expected float64

    def add(self, shard: Shard, most_slots: int) -> None:
        """Count a shard; of its slots those of the first rows, `most_slots` at most but one row at least."""
        arrays, length = shard.arrays, shard.seq_length
        self.shards += 1
        self.rows += shard.rows
        self.segments += shard.segments
        self.supervised |= "trained_offsets" in arrays
        if not shard.segments:
            return
        found = segments_of(shard, self.manifest)
        self.segment_slots += binned(found.slots)
        self.row_segments += binned(np.diff(arrays["row_offsets"]))
        self.documents += binned(_document_tokens(arrays))
        filled = np.bincount(found.row, found.slots, shard.rows) / length
        self.fill += np.bincount(np.searchsorted(FILLS, filled, "right") - 1, minlength=len(FILLS))
        rows = min(shard.rows, max(most_slots // length, 1))
        step = max(CHUNK_SLOTS // length, 1)
        self.slot_rows += rows
        for first in range(0, rows, step):
            self._add_slots(_columns(shard, first, min(first + step, rows)))

    def _add_slots(self, c: Columns) -> None:
        if not len(c.at):
            return
        trained = _sums(c.loss, c.at, c.at + c.slots)
        tasks = len(self.task_slots)
        self.task_slots += np.bincount(c.task, c.slots, tasks).astype(np.int64)
        self.task_trained += np.bincount(c.task, trained, tasks).astype(np.int64)
        for t in np.unique(c.task).tolist():
            task, which = self.tasks[t], np.flatnonzero(c.task == t)
            if task["objective"] == "span_corruption":
                self._add_spans(t, task, c, which)
            elif task["objective"] == "prefix_lm":
                self._add_pivots(t, task, c, which[c.whole[which]])
            elif task["objective"] in noise.LAWS:
                self._add_noise(t, task, c, which)

    def _before(self, task: Mapping[str, Any], c: Columns, which: np.ndarray) -> np.ndarray:
        """int64: slots of bos and mode token."""
        bos = bool(self.manifest["recipe"]["documents"]["prepend_bos"])
        return ((c.start[which] == 0) & bos).astype(np.int64) + int(task["mode_token"] is not None)

    def _add_pivots(self, t: int, task: Mapping[str, Any], c: Columns, which: np.ndarray) -> None:
        which = which[c.n[which] >= 2]
        n, pivot = c.n[which], c.prefix[which] - self._before(task, c, which)
        counted, expected = self.pivots.setdefault(t, (np.zeros(LEVEL_BINS, np.int64), np.zeros(LEVEL_BINS)))
        counted += np.bincount(np.clip(pivot * LEVEL_BINS // n, 0, LEVEL_BINS - 1), minlength=LEVEL_BINS)
        expected += pivot_bins(n, LEVEL_BINS)

    def _add_spans(self, t: int, task: Mapping[str, Any], c: Columns, which: np.ndarray) -> None:
        """Runs lie between sentinels of the targets. A segment whose text has sentinels of its own is left out."""
        sentinels = self.manifest["specials"]["sentinels"]
        is_sentinel = np.zeros(self.manifest["vocab_size"], np.bool_)
        is_sentinel[np.array(sentinels, np.int64)] = True
        n, before, prefix = c.n[which], self._before(task, c, which), c.prefix[which]
        distinct, inverse = np.unique(n, return_inverse=True)
        n_noise = np.array([counts_of(task["parameters"], len(sentinels), m)[0] for m in distinct.tolist()])[inverse]
        runs = prefix - before - (n - n_noise)
        eos = c.slots[which] - before - n - 2 * runs
        begins, ends = c.at[which] + prefix, c.at[which] + c.slots[which] - eos
        places = np.flatnonzero(is_sentinel[c.tokens])
        low, high = np.searchsorted(places, begins), np.searchsorted(places, ends)
        good = (high - low == runs) & (runs > 0)
        low, high, ends = low[good], high[good], ends[good]
        many = high - low
        if not len(many):
            return
        own = np.repeat(low, many) + np.arange(int(many.sum())) - np.repeat(np.cumsum(many) - many, many)
        here = places[own]
        then = np.append(here[1:], 0)
        then[np.cumsum(many) - 1] = ends
        counted = np.bincount(then - here - 1)
        spans = self.spans.setdefault(t, Spans())
        if len(counted) > len(spans.lengths):
            spans.lengths = np.concatenate((spans.lengths, np.zeros(len(counted) - len(spans.lengths), np.int64)))
        spans.lengths[: len(counted)] += counted
        for m, count in zip(*(a.tolist() for a in np.unique(n[good], return_counts=True)), strict=True):
            spans.segments[m] = spans.segments.get(m, 0) + count

    def _add_noise(self, t: int, task: Mapping[str, Any], c: Columns, which: np.ndarray) -> None:
        """Candidates are what redraw takes: the body, and eos unless noise_eos is off; no prompt, no mask of the text's own."""
        parameters, blocks = task["parameters"], task["attention"] == "block_diffusion"
        before, half = self._before(task, c, which), c.slots[which] // (1 + blocks)
        count = half - before
        if not parameters.get("noise_eos", True) and (c.may is None or blocks):
            count = np.minimum(count, c.n[which])
        at = c.at[which]
        if blocks:
            assert c.block_level is not None and c.block_offsets is not None
            length = parameters["block_length"]
            many = np.diff(c.block_offsets)[which]
            first = np.cumsum(many) - many
            number = np.arange(int(many.sum())) - np.repeat(first, many)
            level = c.block_level[np.repeat(c.block_offsets[which], many) + number]
            low = np.maximum(number * length, np.repeat(before, many))
            high = np.minimum((number + 1) * length, np.repeat(before + count, many))
            begins = np.repeat(at, many) + low
            ends = begins + np.maximum(high - low, 0)
        else:
            level, begins, ends = c.level[which], at + before, at + before + count
        flips = task["objective"] == "uniform_diffusion"
        allowed = np.ones(len(c.tokens), np.uint8) if c.may is None or blocks else c.may.copy()
        if not flips:
            allowed &= c.labels != self.manifest["specials"].get("mask", -1)
        candidates = _sums(allowed, begins, ends)
        corrupted = _sums((c.tokens != c.labels).view(np.uint8) if flips else c.loss, begins, ends)
        expected = corrupted_shares(task, level, candidates) * candidates
        low_level, high_level = parameters["noise_range"]
        width = high_level - low_level
        place = (level.astype(np.float64) - low_level) / width * LEVEL_BINS if width > 0 else np.zeros(len(level))
        bin = np.clip(place.astype(np.int64), 0, LEVEL_BINS - 1)
        found = self.levels.setdefault(t, Levels())
        found.units += np.bincount(bin, minlength=LEVEL_BINS)
        found.candidates += np.bincount(bin, candidates, LEVEL_BINS).astype(np.int64)
        found.corrupted += np.bincount(bin, corrupted, LEVEL_BINS).astype(np.int64)
        found.expected += np.bincount(bin, expected, LEVEL_BINS)


def binned(values: np.ndarray) -> np.ndarray:
    """int64[len(LENGTHS)]: how many of the values, each at least 1, lie in each bin of lengths."""
    return np.bincount(np.searchsorted(LENGTHS, values[values > 0], "right") - 1, minlength=len(LENGTHS))


def _document_tokens(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """int64[documents]: the content tokens of each use of a document; all its segments are in one shard."""
    names = ("segment_repeat", "segment_doc", "segment_file")
    order = np.lexsort([arrays[name] for name in names])
    places = [arrays[name][order] for name in names]
    first = np.ones(len(order), np.bool_)
    first[1:] = np.any([place[1:] != place[:-1] for place in places], axis=0)
    return np.add.reduceat(arrays["segment_tokens"][order], np.flatnonzero(first), dtype=np.int64)


def _columns(shard: Shard, first: int, end: int) -> Columns:
    arrays, length = shard.arrays, shard.seq_length
    begin, last = int(arrays["row_offsets"][first]), int(arrays["row_offsets"][end])
    own = slice(begin, last)
    row = np.repeat(np.arange(first, end), np.diff(arrays["row_offsets"][first : end + 1]))
    here = np.arange(begin, last) + row
    real = arrays["cu_seqlens"].astype(np.int64)
    at = arrays.get("cu_seqlens_padded", real).astype(np.int64)[here] + (row - first) * length
    slots = real[here + 1] - real[here]
    prefix, n = (arrays[f"segment_{name}"][own].astype(np.int64) for name in ("prefix", "tokens"))
    size = (end - first) * length
    tokens = arrays["tokens"][first:end].reshape(-1)
    if "loss_mask" in arrays:
        loss = arrays["loss_mask"][first:end].reshape(-1)
    else:
        loss = next_token_loss_mask(at, slots, prefix, size)
    may, whole = None, np.ones(len(at), np.bool_)
    if "trained_offsets" in arrays:
        offsets, ranges = arrays["trained_offsets"][begin : last + 1], arrays["trained_ranges"].astype(np.int64)
        many = np.diff(offsets)
        ranges = ranges[offsets[0] : offsets[-1]]
        begins = np.repeat(at, many) + ranges[:, 0]
        may = spread(begins, ranges[:, 1] - ranges[:, 0], np.ones(len(ranges), np.uint8), 0, size)
        whole = _sums(may, at, at + slots) >= n
    blocks = arrays["block_offsets"][begin : last + 1] if "block_offsets" in arrays else None
    return Columns(
        tokens,
        arrays["labels"][first:end].reshape(-1) if "labels" in arrays else tokens,
        loss,
        at,
        slots,
        arrays["segment_task"][own],
        n,
        arrays["segment_start"][own],
        prefix,
        arrays["segment_noise"][own],
        may,
        whole,
        None if blocks is None else arrays["block_noise"][blocks[0] : blocks[-1]],
        None if blocks is None else blocks - blocks[0],
    )


def _sums(values: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """int64[m]: the sum of values[begin : end] of each pair; the pairs ascend and lie apart."""
    if not len(begins):
        return np.zeros(0, np.int64)
    bounds = np.stack((begins, ends), axis=1).reshape(-1)
    sums = np.add.reduceat(np.append(values, values.dtype.type(0)), bounds, dtype=np.int64)[::2]
    return np.where(ends > begins, sums, 0)
