"""Trained ranges in a segment: what its document says, cut to the segment."""

import json

import numpy as np
import pytest

import packprep
from packprep.verification import verify_dataset
from tests import golden, made


@pytest.mark.parametrize("inputs, expected", [case[1:] for case in golden.cases("range_crop")])
def test_ranges_are_cut_to_their_segment_as_in_the_golden_file(tmp_path, inputs, expected):
    """A document with these loss_spans, its tokens one a character, cut so that a segment is [begin, end)."""
    begin, end = inputs["begin"], inputs["end"]
    line = {"text": "abcdefghij"[:end], "loss_spans": inputs["ranges"]}
    made.write(tmp_path / "a.jsonl", json.dumps(line).encode())
    recipe = made.table(
        "a.jsonl",
        seq_length=16,
        tasks=[{"preset": "causal"}],
        documents={"append_eos": False, "max_tokens": begin or end},
        packing={"algorithm": "next_fit"},
    )
    outcome = made.build(recipe, tmp_path, tmp_path / "out")
    dataset = packprep.open_dataset(tmp_path / "out")
    segments = [
        (int(start), row._shard.arrays["trained_ranges"])
        for row in map(dataset.row, range(len(dataset)))
        for start in row.segments["start"]
    ]
    dropped = outcome.manifest["ledger"]["sources"]["source0"]["tokens"]["dropped"]
    if expected["ranges"]:
        assert [(start, ranges.tolist()) for start, ranges in segments] == [(begin, expected["ranges"])]
        assert not dropped
    else:  # a segment without a trained token is left out, and counted
        assert begin not in [start for start, _ in segments]
        assert dropped == {"untrained_segment": end - begin}
    loss = np.concatenate([dataset.row(i).loss_mask for i in range(len(dataset))])
    assert loss.sum() == sum(b - max(a, 1) for a, b in inputs["ranges"])  # nothing predicts the first token


def test_a_piece_whose_last_token_alone_is_not_trained_keeps_its_pivot(tmp_path):
    """The first of three pieces has 127 tokens, a sentinel and no eos; verify tells it from one that is trained whole."""
    line = {"text": "x" * 300, "loss_spans": [[0, 126], [130, 300]]}
    made.write(tmp_path / "a.jsonl", json.dumps(line).encode())
    tasks = [{"name": "s", "objective": "prefix_lm", "sentinel": True}]
    made.build(made.table("a.jsonl", seq_length=128, tasks=tasks), tmp_path, tmp_path / "out")
    arrays = packprep.open_dataset(tmp_path / "out").row(0)._shard.arrays
    first = np.flatnonzero(arrays["segment_start"] == 0)[0]
    assert arrays["segment_tokens"][first] == 127 and arrays["segment_prefix"][first] == 1
    report = verify_dataset(tmp_path / "out", -1, {}, (0, 1), 1, made.Silent())
    assert report["listed"] == []
