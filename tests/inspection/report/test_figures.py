"""Figures of a mixed dataset against its rows, counted one by one."""

import re

import numpy as np
import pytest

from packprep import open_dataset
from packprep.building.plan import open_plan
from packprep.dataset.manifest import read_manifest
from packprep.dataset.shard import shard_of
from packprep.format.json_files import shard_name
from packprep.inspection.report import figures as module
from packprep.inspection.report.figures import (
    BOTTOM,
    FILLS,
    LENGTHS,
    TOP,
    Figures,
    _counts,
    charts_of,
)

EOS, SENTINEL = 258, 266


@pytest.fixture(scope="module", params=[1 << 22, 2000])
def counted(request, mixed):
    manifest = read_manifest(mixed)
    figures = Figures(manifest, open_plan(mixed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SLOTS_AT_ONCE", request.param)
        for b in range(len(manifest["shards"])):
            figures.add(shard_of(mixed / shard_name(b), manifest, b), 1 << 30)
    return figures, open_dataset(mixed)


def segments(dataset):
    for i in range(len(dataset)):
        row = dataset.row(i)
        for k in range(row.n_segments):
            columns = {name: values[k].item() for name, values in row.segments.items()}
            yield row, dataset.tasks[columns["task"]], columns


def in_bins(values):
    bins = np.zeros(len(LENGTHS), np.int64)
    for value in values:
        bins[max(i for i, low in enumerate(LENGTHS) if low <= value)] += 1
    return bins.tolist()


def test_lengths(counted):
    figures, dataset = counted
    every = list(segments(dataset))
    documents = {}
    for _, _, c in every:
        place = (c["source"], c["file"], c["doc"], c["repeat"])
        documents[place] = documents.get(place, 0) + c["tokens"]
    assert figures.documents.tolist() == in_bins(documents.values())
    assert figures.segment_slots.tolist() == in_bins([c["end"] - c["begin"] for _, _, c in every])
    rows = [dataset.row(i) for i in range(len(dataset))]
    assert figures.row_segments.tolist() == in_bins([row.n_segments for row in rows])
    fills = [
        max(i for i, low in enumerate(FILLS) if low <= row.n_tokens / dataset.seq_length)
        for row in rows
    ]
    assert figures.fill.tolist() == np.bincount(fills, minlength=len(FILLS)).tolist()
    assert (figures.rows, figures.slot_rows, figures.segments) == (
        len(dataset),
        len(dataset),
        len(every),
    )


def test_trained_slots(counted):
    figures, dataset = counted
    slots, trained = np.zeros(len(dataset.tasks), np.int64), np.zeros(len(dataset.tasks), np.int64)
    for row, _, c in segments(dataset):
        slots[c["task"]] += c["end"] - c["begin"]
        trained[c["task"]] += int(row.loss_mask[c["begin"] : c["end"]].sum())
    assert (
        figures.task_slots.tolist() == slots.tolist()
        and figures.task_trained.tolist() == trained.tolist()
    )


def test_spans_are_the_runs_between_sentinels_or_what_follows_the_pivot(counted):
    figures, dataset = counted
    lengths = {}
    for row, task, c in segments(dataset):
        if task["objective"] == "prefix_lm":
            g = int(row._shard.arrays["row_offsets"][row._row]) + int(
                np.flatnonzero(row.segments["begin"] == c["begin"])[0]
            )
            ranges = row._shard.arrays["trained_ranges"][
                slice(*row._shard.arrays["trained_offsets"][g : g + 2])
            ]
            mode = task["mode_token"] is not None
            is_whole = ranges[0][0] <= mode and sum(int(b - a) for a, b in ranges) >= c["tokens"]
            if is_whole:  # else the document decided where the prefix ends
                pivot = c["prefix"] - mode
                lengths.setdefault(c["task"], []).append(c["tokens"] - pivot)
        if task["objective"] == "span_corruption":
            targets = row.tokens[c["begin"] + c["prefix"] : c["end"]].tolist()
            targets = targets[:-1] if targets[-1] == EOS else targets
            text = "".join("|" if token >= SENTINEL else "." for token in targets)
            lengths.setdefault(c["task"], []).extend(len(run) for run in text.split("|")[1:])
    assert lengths.keys() == figures.spans.keys() and lengths
    for t, found in lengths.items():
        assert figures.spans[t].tolist() == np.bincount(found).tolist()


def test_noise_is_counted_over_its_candidates(counted):
    figures, dataset = counted
    candidates, corrupted, units = {}, {}, {}
    for row, task, c in segments(dataset):
        if task["label_alignment"] != "same_slot":
            continue
        t, flips = c["task"], task["objective"] == "uniform_diffusion"
        begin, end = c["begin"], c["end"]
        blocks = task["attention"] == "block_diffusion"
        half = (end - begin) // 2 if blocks else end - begin
        low = task["mode_token"] is not None
        high = half - (not task["parameters"]["noise_eos"] and row.labels[begin + half - 1] == EOS)
        may = np.zeros(half, bool)
        may[low:high] = True
        g = int(row._shard.arrays["row_offsets"][row._row]) + int(
            np.flatnonzero(row.segments["begin"] == begin)[0]
        )
        ranges = row._shard.arrays["trained_ranges"][
            slice(*row._shard.arrays["trained_offsets"][g : g + 2])
        ]
        if not blocks:
            inside = np.zeros(half, bool)
            for a, b in ranges:
                inside[a:b] = True
            may &= inside
        changed = row.tokens[begin : begin + half] != row.labels[begin : begin + half]
        noised = changed if flips else row.loss_mask[begin : begin + half] == 1
        assert not (noised & ~may).any()
        candidates[t], corrupted[t] = (
            candidates.get(t, 0) + int(may.sum()),
            corrupted.get(t, 0) + int(noised.sum()),
        )
        length = task["parameters"].get("block_length", half)
        units[t] = units.get(t, 0) + -(-half // length)
    assert figures.levels.keys() == candidates.keys() and len(candidates) >= 6
    for t, levels in figures.levels.items():
        assert levels.candidates.sum() == candidates[t] and levels.corrupted.sum() == corrupted[t]
        assert levels.units.sum() == units[t]


def test_every_chart_says_its_numbers_in_words_and_as_a_table(counted):
    groups = charts_of(counted[0])
    assert [heading for heading, _, _ in groups] == ["Lengths", "Spans", "Noise"]
    for _, _, charts in groups:
        for chart in charts:
            assert 'role="img" aria-label="' in chart.svg and chart.rows
            assert all(len(row) == len(chart.head) for row in chart.rows)
            assert (
                chart.svg.count('class="bin"') == len(chart.rows)
                and f'data-says="{chart.rows[0][0]}: ' in chart.svg
            )


@pytest.mark.parametrize(
    ("shown", "log"), [([900, 200, 0, 50], False), ([900, 100, 0, 50], True), ([900, 0], False)]
)
def test_a_bar_that_dwarfs_the_rest_stands_on_a_logarithmic_scale(shown, log):
    names = [(str(n), str(n)) for n in shown]
    drawn = _counts("t", "n", "w", ("a", "b"), names, shown, [])
    heights = [float(h) for h in re.findall(r'class="bar" [^/]* height="([\d.]+)"', drawn.svg)]
    assert drawn.note == ("n; logarithmic scale" if log else "n") and max(heights) == pytest.approx(
        BOTTOM - TOP
    )
    assert len(heights) == sum(map(bool, shown)) and (min(heights) > 60) == (
        log or len(heights) == 1
    )


def test_of_a_large_shard_the_first_rows_are_read(mixed):
    manifest = read_manifest(mixed)
    figures = Figures(manifest, open_plan(mixed))
    figures.add(shard_of(mixed / shard_name(0), manifest, 0), 5 * manifest["seq_length"])
    assert figures.slot_rows == 5 < figures.rows
    figures = Figures(manifest, open_plan(mixed))
    figures.add(shard_of(mixed / shard_name(0), manifest, 0), 1)
    assert figures.slot_rows == 1
