"""Trained ranges in a segment: what its document says, cut to the segment."""

import json

import numpy as np
import pytest

import packprep
from packprep.errors import PackprepError
from packprep.verification import verify_dataset
from tests import golden, made
from tests.twin.check import verify_with_twin


@pytest.mark.parametrize("inputs, expected", [case[1:] for case in golden.cases("range_crop")])
def test_ranges_are_cut_to_their_segment_as_in_the_golden_file(tmp_path, inputs, expected):
    """A document with these loss_spans, its tokens one a character, cut so that a segment is
    [begin, end)."""
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
        assert [(start, ranges.tolist()) for start, ranges in segments] == [
            (begin, expected["ranges"])
        ]
        assert not dropped
    else:  # a segment without a trained token is left out, and counted
        assert begin not in [start for start, _ in segments]
        assert dropped == {"untrained_segment": end - begin}
    loss = np.concatenate([dataset.row(i).loss_mask for i in range(len(dataset))])
    # nothing predicts the first token
    assert loss.sum() == sum(b - max(a, 1) for a, b in inputs["ranges"])


def test_a_piece_whose_last_token_alone_is_not_trained_keeps_its_pivot(tmp_path):
    """The first of three pieces has 127 tokens, a sentinel and no eos; verify tells it from one
    that is trained whole."""
    line = {"text": "x" * 300, "loss_spans": [[0, 126], [130, 300]]}
    made.write(tmp_path / "a.jsonl", json.dumps(line).encode())
    tasks = [{"name": "s", "objective": "prefix_lm", "sentinel": True}]
    made.build(made.table("a.jsonl", seq_length=128, tasks=tasks), tmp_path, tmp_path / "out")
    arrays = packprep.open_dataset(tmp_path / "out").row(0)._shard.arrays
    first = np.flatnonzero(arrays["segment_start"] == 0)[0]
    assert arrays["segment_tokens"][first] == 127 and arrays["segment_prefix"][first] == 1
    report = verify_dataset(tmp_path / "out", -1, {}, (0, 1), 0, made.Silent())
    assert report["listed"] == []


WHOLE = [
    {"prompt": "Q: tell me all. A:", "completion": " a word and another" * 12},
    {"text": "all of it is trained " * 9, "loss_spans": [[0, 189]]},
    {"text": "with several weights " * 9, "loss_spans": [[0, 100, 2], [100, 189]]},
    {"text": "nothing is said of this text " * 9},
]


@pytest.mark.parametrize(
    "task", [{}, {"sentinel": True}, {"mode_token": "[S2S]", "eos_after_inputs": True}]
)
def test_no_pivot_is_drawn_for_a_supervised_segment_that_is_all_trained(tmp_path, task):
    """Its prefix holds the first content token, in each epoch; a plain segment beside it has a
    pivot of each epoch."""
    made.write(tmp_path / "a.jsonl", b"\n".join(json.dumps(line).encode() for line in WHOLE))
    table = made.table("a.jsonl", seq_length=64, tasks=[{"objective": "prefix_lm", **task}])
    made.build(table, tmp_path, tmp_path / "out")
    dataset = packprep.open_dataset(tmp_path / "out")
    added = ("mode_token" in task) + task.get("eos_after_inputs", False)
    prompt = len(WHOLE[0]["prompt"])
    moved = 0
    for row in map(dataset.row, range(len(dataset))):
        again = dataset.batch(
            [row.index], columns=["loss_mask", "prefix_ends", "tokens"], epochs=[5]
        )
        for k, (document, start) in enumerate(
            zip(row.segments["doc"], row.segments["start"], strict=True)
        ):
            begin, end = int(row.segments["begin"][k]), int(row.segments["end"][k])
            if document == sum(len(json.dumps(line)) + 1 for line in WHOLE[:3]):
                moved += not np.array_equal(
                    again["prefix_ends"][0, begin:end], row.prefix_ends[begin:end]
                )
                continue
            in_prefix = prompt if document == 0 and start == 0 else 1
            assert row.segments["prefix"][k] == in_prefix + added
            assert row.loss_mask[begin:end].sum() == end - begin - in_prefix - added
            for name, column in again.items():
                assert np.array_equal(column[0, begin:end], getattr(row, name)[begin:end])
    assert moved
    for epoch in (0, 5):
        report = verify_with_twin(tmp_path / "out", epoch=epoch)
        assert report["listed"] == [] and report["twin"] == report["segments"]


FIRST_ALONE = {"text": "abcdefgh", "loss_spans": [[0, 1]]}


@pytest.mark.parametrize(
    "task, bos, is_kept",
    [
        ({"objective": "causal"}, False, False),
        ({"objective": "causal"}, True, True),
        ({"objective": "causal", "mode_token": "[NLG]"}, False, True),
        ({"objective": "prefix_lm", "mode_token": "[S2S]", "sentinel": True}, True, False),
        ({"objective": "masked_diffusion"}, False, True),
    ],
)
def test_a_segment_whose_only_trained_token_nothing_predicts_is_dropped_and_counted(
    tmp_path, task, bos, is_kept
):
    """A document of it alone is a reject, `untrained`; of a longer one only that segment is left
    out."""
    # tokens of a long document's first piece
    first = 16 - bos - ("mode_token" in task) - ("sentinel" in task)
    lines = [
        FIRST_ALONE,
        {"text": "x" * first + "y" * 9, "loss_spans": [[3, 5], [first, first + 1]]},
    ]
    made.write(tmp_path / "a.jsonl", b"\n".join(json.dumps(line).encode() for line in lines))
    documents = {"prepend_bos": bos, "max_bad_fraction": 1.0}
    table = made.table("a.jsonl", seq_length=16, tasks=[task], documents=documents)
    outcome = made.build(table, tmp_path, tmp_path / "out")
    ledger = outcome.manifest["ledger"]["sources"]["source0"]
    in_place = task["objective"] == "masked_diffusion"
    has_mode = task == {"objective": "causal", "mode_token": "[NLG]"}
    assert ledger["documents"]["rejected"] == ({} if is_kept else {"untrained": 1})
    dropped = (0 if is_kept else 8) + (0 if in_place or has_mode else 9)
    assert ledger["tokens"]["dropped"] == ({"untrained_segment": dropped} if dropped else {})
    report = verify_with_twin(tmp_path / "out")
    assert report["listed"] == [] and report["twin"] == report["segments"] == 1 + is_kept + (
        in_place or has_mode
    )
    dataset = packprep.open_dataset(tmp_path / "out")
    for row in map(dataset.row, range(0 if in_place else len(dataset))):
        for begin, end in zip(row.segments["begin"], row.segments["end"], strict=True):
            assert row.loss_mask[begin:end].any()


def test_a_segment_whose_first_token_and_eos_alone_are_trained_stays(tmp_path):
    made.write(tmp_path / "a.jsonl", json.dumps({"text": "a", "loss_spans": [[0, 1]]}).encode())
    for append_eos, rows in ((True, 1), (False, 0)):
        table = made.table(
            "a.jsonl",
            seq_length=16,
            tasks=[{"preset": "causal"}],
            documents={"append_eos": append_eos},
        )
        if rows:
            made.build(table, tmp_path, tmp_path / "out")
            assert (
                packprep.open_dataset(tmp_path / "out").row(0).loss_mask.tolist() == [1] + [0] * 15
            )
        else:
            with pytest.raises(PackprepError, match="nothing predicts what is trained of it"):
                made.build(table, tmp_path, tmp_path / "none")


def test_a_plain_segment_has_the_same_loss_beside_supervised_documents(tmp_path):
    """Its mode token is predicted from bos, whatever else its shard holds."""
    plain = [{"text": f"plain {i} " * 9} for i in range(12)]
    losses = []
    for name, more in (("alone", []), ("beside", [{"text": "abcdefghij", "loss_spans": [[3, 7]]}])):
        base, out = tmp_path / name, tmp_path / f"{name}_out"
        base.mkdir()
        made.write(
            base / "a.jsonl", b"\n".join(json.dumps(line).encode() for line in [*plain, *more])
        )
        tasks = [
            {"name": "c", "objective": "causal", "mode_token": "[NLG]"},
            {"name": "p", "objective": "prefix_lm", "mode_token": "[S2S]"},
            {"name": "m", "objective": "masked_diffusion", "mode_token": "[NLU]"},
        ]
        made.build(
            made.table("a.jsonl", seq_length=256, tasks=tasks, documents={"prepend_bos": True}),
            base,
            out,
        )
        report = verify_with_twin(out)
        assert report["listed"] == [] and report["twin"] == report["segments"] >= len(plain) + len(
            more
        )
        dataset, found = packprep.open_dataset(out), {}
        for row in map(dataset.row, range(len(dataset))):
            for k, document in enumerate(row.segments["doc"].tolist()):
                begin, end = (int(row.segments[name][k]) for name in ("begin", "end"))
                found[document] = int(row.segments["task"][k]), row.loss_mask[begin:end].tolist()
        losses.append([found[document] for document in sorted(found)[: len(plain)]])
    assert losses[0] == losses[1] and 0 in {task for task, _ in losses[0]}


@pytest.mark.long
def test_many_spans_of_one_document_fall_into_many_segments(tmp_path):
    """Every third token is trained, in whatever order the spans stand."""
    n = 60_000
    line = {"text": "abc" * n, "loss_spans": [[3 * k + 1, 3 * k + 2] for k in reversed(range(n))]}
    made.write(tmp_path / "a.jsonl", json.dumps(line).encode())
    made.build(
        made.table(
            "a.jsonl", seq_length=256, tasks=[{"preset": "causal"}], documents={"append_eos": False}
        ),
        tmp_path,
        tmp_path / "out",
    )
    dataset = packprep.open_dataset(tmp_path / "out")
    batch = dataset.batch(range(len(dataset)), columns=["tokens", "loss_mask"])
    # one segment a row: the last row's rest is padding
    inside = batch["tokens"][:, 1:] != dataset.pad_id
    assert inside.sum() + len(dataset) == 3 * n
    assert np.array_equal(batch["loss_mask"][:, :-1], (batch["tokens"][:, 1:] == ord("b")) & inside)
