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
    report = verify_dataset(tmp_path / "out", -1, {}, (0, 1), 0, made.Silent())
    assert report["listed"] == []


def test_a_plain_segment_has_the_same_loss_beside_supervised_documents(tmp_path):
    """Its mode token is predicted from bos, whatever else its shard holds."""
    plain = [{"text": f"plain {i} " * 9} for i in range(12)]
    losses = []
    for name, more in (("alone", []), ("beside", [{"text": "abcdefghij", "loss_spans": [[3, 7]]}])):
        base, out = tmp_path / name, tmp_path / f"{name}_out"
        base.mkdir()
        made.write(base / "a.jsonl", b"\n".join(json.dumps(line).encode() for line in [*plain, *more]))
        tasks = [
            {"name": "c", "objective": "causal", "mode_token": "[NLG]"},
            {"name": "p", "objective": "prefix_lm", "mode_token": "[S2S]"},
            {"name": "m", "objective": "masked_diffusion", "mode_token": "[NLU]"},
        ]
        made.build(made.table("a.jsonl", seq_length=256, tasks=tasks, documents={"prepend_bos": True}), base, out)
        report = verify_dataset(out, -1, {}, (0, 1), 0, made.Silent(), twin=True)
        assert report["listed"] == [] and report["twin"] == report["segments"] >= len(plain) + len(more)
        dataset, found = packprep.open_dataset(out), {}
        for row in map(dataset.row, range(len(dataset))):
            for k, document in enumerate(row.segments["doc"].tolist()):
                begin, end = (int(row.segments[name][k]) for name in ("begin", "end"))
                found[document] = int(row.segments["task"][k]), row.loss_mask[begin:end].tolist()
        losses.append([found[document] for document in sorted(found)[: len(plain)]])
    assert losses[0] == losses[1] and 0 in {task for task, _ in losses[0]}


def test_many_spans_of_one_document_fall_into_many_segments(tmp_path):
    """Every third token is trained, in whatever order the spans stand."""
    n = 60_000
    line = {"text": "abc" * n, "loss_spans": [[3 * k + 1, 3 * k + 2] for k in reversed(range(n))]}
    made.write(tmp_path / "a.jsonl", json.dumps(line).encode())
    made.build(
        made.table("a.jsonl", seq_length=256, tasks=[{"preset": "causal"}], documents={"append_eos": False}),
        tmp_path, tmp_path / "out",
    )  # fmt: skip
    dataset = packprep.open_dataset(tmp_path / "out")
    batch = dataset.batch(range(len(dataset)), columns=["tokens", "loss_mask"])
    inside = batch["tokens"][:, 1:] != dataset.pad_id  # one segment a row: the last row's rest is padding
    assert inside.sum() + len(dataset) == 3 * n
    assert np.array_equal(batch["loss_mask"][:, :-1], (batch["tokens"][:, 1:] == ord("b")) & inside)
