"""Rows of a report: what stands in them is what the dataset holds, whatever the text, and it has
bounded size."""

import json

import numpy as np
import pytest

from packprep import open_dataset
from packprep.inspection.opened import opened
from packprep.inspection.report import sample
from packprep.inspection.report.sample import CORRUPTED, IS_SPECIAL, TRAINED, row_anew, sample_rows
from packprep.messages import visible
from tests import made


def tokens_of(part):
    """[(id, flag)] of a part that is whole."""
    (run,) = part["runs"]
    return [
        (i, int(f, 32))
        for ids, f in zip(run["i"], run["f"], strict=True)
        for i in np.atleast_1d(ids).tolist()
    ]


@pytest.fixture(scope="module")
def rows(mixed):
    with opened(mixed, {}, True) as data:
        every = list(range(0, len(data.dataset), 3))
        return open_dataset(mixed), sample_rows(
            data, every, frozenset(range(len(data.dataset.manifest["shards"])))
        )


def test_the_slots_of_a_row_are_its_parts(rows):
    dataset, shown = rows
    for row in shown:
        view = dataset.row(row["row"])
        for segment, bounds in zip(row["segments"], row["bounds"], strict=True):
            begin, end = segment["begin"], segment["begin"] + segment["slots"]
            assert bounds[:3] == [begin, end, segment["prefix"]]
            found = [pair for part in segment["parts"] for pair in tokens_of(part)]
            assert [id for id, _ in found] == view.tokens[begin:end].tolist()
            assert [part["first"] for part in segment["parts"]][0] == begin
            whole = [
                (f & 3 == TRAINED, t)
                for (_, f), t in zip(found, view.loss_mask[begin:end].tolist(), strict=True)
            ]
            assert all(not t or f or "bytes" for f, t in whole)
            assert segment["trained"] == int(view.loss_mask[begin:end].sum())
            assert segment["rebuilt"] == "identical"


def test_originals_are_the_documents_text(rows):
    dataset, shown = rows
    objectives = set()
    for row in shown:
        for segment in row["segments"]:
            if segment["original"] is None:
                assert segment["objective"] in ("causal", "prefix_lm") and segment["why"]
                continue
            objectives.add(segment["objective"])
            original = tokens_of(segment["original"])
            ids = [id for id, flag in original if not flag & IS_SPECIAL]
            if segment["source"] == "web":
                assert len([id for id in ids if id < 256]) == segment["tokens"]
            # others may share a character
            flagged = sum(bool(flag & CORRUPTED) for id, flag in original if id < 128)
            if segment["objective"] == "span_corruption":
                targets = tokens_of(segment["parts"][-1])
                assert flagged == sum(id < 128 for id, _ in targets)
    assert objectives == {
        "span_corruption",
        "fill_in_the_middle",
        "masked_diffusion",
        "uniform_diffusion",
        "block_diffusion",
    }


def test_a_row_of_another_epoch_is_what_redraw_gives(mixed, tmp_path):
    with opened(mixed, {}) as data:
        (shown,) = sample_rows(data, [1], frozenset())
        view, anew = data.dataset.row(1, epoch=2), row_anew(data, shown, 2)
    assert anew["row"] == 1 and anew["epoch"] == 2 and len(anew["segments"]) == view.n_segments
    for i, segment in enumerate(anew["segments"]):
        found = [id for part in segment["parts"] for id, _ in tokens_of(part)]
        assert (
            found == view.tokens[view.segment_ids == i + 1].tolist() and segment["number"] == i + 1
        )
    made.write_lines(tmp_path / "a.jsonl", made.texts(4))
    made.build(made.table("a.jsonl", tasks=[{"preset": "causal"}]), tmp_path, tmp_path / "out")
    with opened(tmp_path / "out", {}) as data:
        assert row_anew(data, sample_rows(data, [0], frozenset())[0], 1) is None


def test_an_unsound_shard_is_neither_inverted_nor_built_again(mixed):
    with opened(mixed, {}, True) as data:
        (row,) = sample_rows(data, [1], frozenset())
    assert all(segment["rebuilt"].startswith("not rebuilt") for segment in row["segments"])
    in_place = {"masked_diffusion", "uniform_diffusion", "block_diffusion"}
    assert all(
        segment["original"] is None or segment["objective"] in in_place
        for segment in row["segments"]
    )


def test_reading_again_has_a_bound(mixed, monkeypatch):
    monkeypatch.setattr(sample, "MOST_READ_BYTES", 0)
    with opened(mixed, {}, True) as data:
        (row,) = sample_rows(data, [1], frozenset(range(4)))
    assert all("would read more than" in segment["rebuilt"] for segment in row["segments"])


@pytest.mark.parametrize("budget", [2000, 6000, 20000])
def test_a_long_row_loses_its_middles_first(mixed, monkeypatch, budget):
    monkeypatch.setattr(sample, "MOST_BYTES", budget)
    with opened(mixed, {}, True) as data:
        (row,) = sample_rows(data, [51], frozenset(range(4)))
    assert len(json.dumps(row, separators=(",", ":"))) <= budget or len(row["segments"]) <= 8
    for segment in row["segments"]:
        for part in segment["parts"]:
            held = sum(
                run.get("gap", 0) or sum(len(np.atleast_1d(ids)) for ids in run["i"])
                for run in part["runs"]
            )
            assert held == part["count"]


def test_texts_have_every_character_showing(hostile):
    with opened(hostile, {}, True) as data:
        shown = sample_rows(data, list(range(len(data.dataset))), frozenset([0]))
    text = json.dumps(shown, ensure_ascii=False)
    assert visible(text) == text and "\\u{202e}" in text and "\\u{200b}" in text
