"""Masks beside token ids: which tokens are kept and trained, and which rows are refused."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packprep.dataset.loader import open_dataset
from packprep.sources.formats.token_masks import MASKS, masked
from tests import made
from tests.twin import reading
from tests.twin.check import verify_with_twin

EOS = 258  # <eos> of the bytes tokenizer


def of_one(ids, **masks):
    """(kept ids, weights, the problem) of one document."""
    offsets = np.array([0, len(ids)])
    found = masked(np.array(ids), offsets, {name: np.array(mask) for name, mask in masks.items()})
    kept = found.is_kept
    problem = found.refused.get(0, ("", ""))[1]
    return np.array(ids)[kept].tolist(), found.weights[kept].tolist(), problem


def test_labels_and_attention_are_read_as_trainers_write_them():
    ids, weights, problem = of_one(
        [70, 71, 72, 73, 9, 0, 0],
        attention_mask=[1, 1, 1, 1, 1, 0, 0],
        labels=[-100, -100, 72, 73, 9, -100, -100],
    )
    assert (ids, weights, problem) == ([70, 71, 72, 73, 9], [0, 0, 1, 1, 1], "")
    ids, weights, _ = of_one([0, 0, 5, 6], attention_mask=[0, 0, 1, 1])
    assert (ids, weights) == ([5, 6], [1, 1])


def test_weights_multiply_what_the_masks_say():
    assert of_one([5, 6, 7], loss_mask=[0, 1, 1], loss_weights=[3.0, 0.5, 0])[1] == [0, 0.5, 0]
    assert of_one([5, 6], completion_mask=[0, 1], assistant_masks=[0, 1])[1:] == ([0, 1], "")


@pytest.mark.parametrize(
    "masks, words",
    [
        ({"attention_mask": [1, 0, 1]}, "token 1: attention_mask is 0 between tokens"),
        ({"attention_mask": [1, 2, 1]}, "token 1: attention_mask is neither 0 nor 1"),
        ({"labels": [-100, 7, 8]}, "labels are those of the next token"),
        ({"labels": [-100, 9, 7]}, "token 1: its label is neither -100 nor the token"),
        ({"loss_mask": [0, 1, 3]}, "token 2: loss_mask is neither 0 nor 1"),
        (
            {"labels": [-100, 6, 7], "loss_mask": [1, 1, 1]},
            "token 0: labels and loss_mask contradict each other",
        ),
        ({"loss_weights": [1.0, -1.0, 1.0]}, "token 1: loss_weights is no finite number"),
        ({"loss_weights": [1.0, 1.0, np.nan]}, "token 2: loss_weights is no finite number"),
    ],
)
def test_masks_that_cannot_be_read_are_named(masks, words):
    assert words in of_one([5, 6, 7], **masks)[2]


entries = st.sampled_from([0, 1, 1, 1, 2, -100, True, 0.5, np.nan])


@given(st.lists(st.integers(1, 4), max_size=6), st.data())
def test_masks_mean_to_the_twin_what_they_mean_to_the_package(ids, data):
    names = data.draw(st.lists(st.sampled_from(MASKS), unique=True))
    masks = {}
    for name in names:
        one = st.sampled_from([-100, *ids, 5]) if name == "labels" else st.sampled_from([0, 1, 1])
        one = st.sampled_from([0, 1, 0.5, -1.0, np.inf]) if name == "loss_weights" else one
        size = {"min_size": len(ids), "max_size": len(ids)}
        masks[name] = data.draw(st.lists(one, **size))
    kept, weights, problem = of_one(ids, **masks)
    theirs = reading._unmasked(ids, masks)
    assert (theirs is None) == bool(problem)
    if theirs is not None:
        assert theirs == (kept, weights)


@pytest.mark.parametrize("form", ["parquet", "arrow", "jsonl"])
def test_rows_with_masks_are_trained_as_they_say(tmp_path, form):
    rows = [
        {
            "input_ids": [70, 71, 72, 73, EOS, 0, 0],
            "attention_mask": [1] * 5 + [0] * 2,
            "labels": [-100, -100, 72, 73, EOS, -100, -100],
        },
        {
            "input_ids": [80, 81, 82, 83],
            "attention_mask": [1] * 4,
            "labels": [80, 81, 82, 83],
        },
        {
            "input_ids": [90, 91, 92],
            "attention_mask": [1] * 3,
            "labels": [-100, 92, -100],
        },
        {
            "input_ids": [60, 61, 62],
            "attention_mask": [1] * 3,
            "labels": [-100] * 3,
        },
    ]
    table = pa.Table.from_pylist(rows)
    if form == "jsonl":
        made.write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)).encode())
    elif form == "parquet":
        pq.write_table(table, tmp_path / "a.parquet")
    else:
        with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
            file.write_table(table)
    recipe = made.table(
        [{"paths": [f"a.{form}"], "format": "tokens"}],
        seq_length=32,
        tasks=[{"preset": "causal"}],
        documents={"max_bad_fraction": 1.0},
    )
    made.build(recipe, tmp_path, tmp_path / "out")
    trained = {}
    dataset = open_dataset(tmp_path / "out")
    for row in map(dataset.row, range(len(dataset))):
        for begin, end in zip(row.segments["begin"], row.segments["end"], strict=True):
            ids, mask = row.tokens[begin:end].tolist(), row.loss_mask[begin:end].tolist()
            trained[ids[0]] = [t for t, on in zip(ids[1:], mask, strict=False) if on]
    assert trained == {70: [72, 73, EOS], 80: [81, 82, 83, EOS]}
    files = made.contents(tmp_path / "out")
    rejects = b"".join(data for name, data in files.items() if "reject" in name)
    assert rejects.count(b"bad_mask") == 1 and b"of the next token" in rejects
    assert rejects.count(b'"untrained"') == 1
    report = verify_with_twin(tmp_path / "out")
    assert report["faults"] == 0, report["listed"]
