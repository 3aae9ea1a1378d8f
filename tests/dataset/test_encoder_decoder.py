"""Rows as an encoder's and a decoder's: by a plain loop, and as seqio makes them of the same
examples."""

import json
import os
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packprep import open_dataset
from packprep.building.segments import cut, inputs_of
from packprep.dataset.boundaries import meetings
from packprep.dataset.encoder_decoder import NAMES, READ, split
from packprep.errors import DatasetError
from tests import made
from tests.dataset import synthetic

HERE = Path(__file__).parent
SEQIO = "SEQIO_PYTHON"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return made.two_sided(tmp_path_factory.mktemp("two"))


def row_of(examples, length, gap=0):
    """Columns [length] of a row of these (inputs, targets), `gap` slots of padding behind each."""
    row = {name: np.zeros(length, np.int32) for name in READ}
    at = 0
    for i, (inputs, targets) in enumerate(examples):
        middle, end = at + len(inputs), at + len(inputs) + len(targets)
        row["tokens"][at:end] = [*inputs, *targets]
        row["segment_ids"][at:end], row["prefix_ends"][at:end] = i + 1, middle
        row["loss_mask"][middle - 1 : end - 1] = 1
        at = end + gap
    return row


def batch_of(rows, encoder_length):
    return {
        **{name: np.stack([row[name] for row in rows]) for name in rows[0]},
        "encoder_length": encoder_length,
    }


def sides_by_loop(examples, weights, encoder_length, decoder_length):
    """The eight arrays of one row, example by example."""
    lists = {name: [] for name in NAMES}
    for i, (inputs, targets) in enumerate(examples):
        lists["encoder_input_tokens"] += inputs
        lists["decoder_target_tokens"] += targets
        lists["decoder_input_tokens"] += [0, *targets[:-1]]
        lists["decoder_loss_weights"] += weights[i]
        for side, tokens in (("encoder", inputs), ("decoder", targets)):
            lists[f"{side}_segment_ids"] += [i + 1] * len(tokens)
            lists[f"{side}_positions"] += range(len(tokens))
    lengths = {"encoder": encoder_length, "decoder": decoder_length}
    return {
        name: values + [0] * (lengths[name[:7]] - len(values)) for name, values in lists.items()
    }


tokens = st.lists(st.integers(1, 99), min_size=1, max_size=6)


@given(
    st.lists(st.lists(st.tuples(tokens, tokens), max_size=3), min_size=1, max_size=3),
    st.integers(0, 2),
    st.data(),
)
def test_each_side_is_its_examples_one_behind_another(rows, gap, data):
    batch = batch_of([row_of(examples, 42, gap) for examples in rows], 20)
    batch["loss_weights"] = np.zeros(batch["tokens"].shape, np.float32)
    expected = []
    for r, examples in enumerate(rows):
        weights, at = [], 0
        for inputs, targets in examples:
            weights.append([data.draw(st.sampled_from([0.0, 0.5, 3.0])) for _ in targets])
            before = at + len(inputs) - 1
            batch["loss_weights"][r, before : before + len(targets)] = weights[-1]
            at += len(inputs) + len(targets) + gap
        expected.append(sides_by_loop(examples, weights, 20, 22))
    got = split(batch)
    assert tuple(got) == NAMES
    for name, values in got.items():
        assert values.dtype == (np.float32 if name == "decoder_loss_weights" else np.int32)
        assert values.tolist() == [row[name] for row in expected], name
    # Each target sees the inputs of its example, and padding those of the row's first example.
    queries, keys = got["decoder_segment_ids"], got["encoder_segment_ids"]
    begin, end = meetings(queries, keys, np.where, searched_by_row)
    for r, i in np.ndindex(queries.shape):
        seen = np.flatnonzero(keys[r] == (queries[r, i] or keys[r, 0]))
        assert (begin[r, i], end[r, i]) == (seen[0], seen[-1] + 1)


def searched_by_row(keys, queries):
    return np.stack([np.searchsorted(*pair) for pair in zip(keys, queries, strict=True)])


def test_what_no_encoder_takes_is_refused_by_row_and_segment():
    good = batch_of([row_of([([1, 2], [3])], 8), row_of([([1, 2], [3]), ([4], [5, 6])], 8)], 4)
    split(good)
    for changes, words in (
        ({"encoder_length": None}, "there is no encoder_length"),
        ({"media": None}, "positions refer to whole rows, .*\nhint: leave media out"),
        ({"encoder_length": 2}, "row 1 of the batch has 3 positions for the encoder, which fits 2"),
        ({"encoder_length": 6}, "row 1 of the batch has 3 positions for the decoder, which fits 2"),
        (
            {"prefix_ends": good["segment_ids"] * 0},
            r"row 0 of the batch, segment 1: its prefix ends at position 0 of \[0, 3\)",
        ),
        (
            {"prefix_ends": np.where(good["segment_ids"] == 2, 6, good["prefix_ends"])},
            "row 1 of the batch, segment 2",
        ),
        (
            {"prefix_ends": np.where(good["segment_ids"] == 2, -1, good["prefix_ends"])},
            "row 1 of the batch, segment 2",
        ),
    ):
        with pytest.raises(DatasetError, match=words):
            split({**good, **changes})
    with pytest.raises(DatasetError, match="has no prefix_ends"):
        split({name: values for name, values in good.items() if name != "prefix_ends"})


def test_a_dataset_and_a_mixture_of_such_say_where_the_encoder_ends(directory, tmp_path):
    ds = open_dataset(directory)
    batch = ds.batch([0, 1], columns=READ)
    assert (
        batch["encoder_length"] == ds.encoder_length == 128 and type(batch["encoder_length"]) is int
    )
    assert ds.batch([1, 0], out=batch) == batch, "a batch may be written into again"
    assert "encoder_length" not in ds[0] and list(ds.__getitems__([0, 1])[1]) == list(ds[0])
    mixed = open_dataset([directory, directory], shares=[1, 2])
    assert split(next(mixed.batches(4, columns=READ)))["decoder_positions"].shape == (4, 32)
    synthetic.make_dataset(tmp_path, (4,))
    assert "encoder_length" not in open_dataset(tmp_path).batch([0])


def test_later_epochs_are_split_too_and_their_text_is_the_same(directory):
    ds = open_dataset(directory)
    rows = range(len(ds))
    epochs = [split(ds.batch(rows, columns=READ, epochs=[epoch] * len(ds))) for epoch in (0, 1)]
    differ = {name for name in NAMES if (epochs[0][name] != epochs[1][name]).any()}
    assert differ == {"encoder_input_tokens", "decoder_target_tokens", "decoder_input_tokens"}
    kept = [
        np.sort(np.hstack([e["encoder_input_tokens"], e["decoder_target_tokens"]]), axis=1)
        for e in epochs
    ]
    assert (kept[0] == kept[1]).all()


# seqio.json holds what seqio's own path made of examples, and T5's of documents; seqio_arrays.py,
# run where both are, made it.


def test_arrays_are_those_that_seqio_makes_of_the_same_examples():
    recorded = json.loads((HERE / "seqio.json").read_text())
    encoder_length, decoder_length = recorded["lengths"]
    rows = [row_of(row["examples"], encoder_length + decoder_length) for row in recorded["rows"]]
    got = split(batch_of(rows, encoder_length))
    for r, row in enumerate(recorded["rows"]):
        assert {name: values[r].tolist() for name, values in got.items()} == row["arrays"]


def spans_of(documents):
    """{(inputs, targets): how often} of span corruption with T5's lengths. Both end with eos, as
    T5's."""
    packing = {"encoder_length": 512, "decoder_length": 120}
    task = {"objective": "span_corruption", "eos_after_inputs": True}
    recipe, tasks = made.mix(
        {"tasks": [task], "packing": packing, "documents": {"append_eos": "segment"}}
    )
    table, _ = cut(recipe, tasks, made.documents(documents))
    inputs = inputs_of(tasks, table)
    return Counter(zip(inputs.tolist(), (table.slots - inputs).tolist(), strict=True))


def counted(spans):
    return Counter({(inputs, targets): many for inputs, targets, many in spans})


def test_inputs_and_targets_are_as_long_as_those_of_t5_s_own_span_corruption():
    recorded = json.loads((HERE / "seqio.json").read_text())
    assert spans_of(recorded["documents"]) == counted(recorded["spans"])


@pytest.mark.campaign
@pytest.mark.skipif(
    SEQIO not in os.environ, reason=f"{SEQIO} names a Python with benchmarks/requirements-t5.txt"
)
def test_seqio_takes_the_arrays_and_gives_what_it_makes_by_itself(directory, tmp_path):
    ds = open_dataset(directory)
    given = {
        name: values.tolist()
        for name, values in split(ds.batch(range(len(ds)), columns=READ)).items()
    }
    rows = []
    for row in map(ds.row, range(len(ds))):
        ends = zip(
            row.segments["begin"], row.segments["prefix"], np.diff(row.cu_seqlens), strict=True
        )
        parts = [
            (row.tokens[b : b + p].tolist(), row.tokens[b + p : b + n].tolist()) for b, p, n in ends
        ]
        rows.append({"examples": parts, "arrays": {}})
    documents = list(range(3, 1100, 6))
    asked = {"lengths": [128, 32], "given": given, "rows": rows, "documents": documents}
    (tmp_path / "rows.json").write_text(json.dumps(asked))
    command = [os.environ[SEQIO], str(HERE / "seqio_arrays.py"), str(tmp_path / "rows.json")]
    subprocess.run(command, check=True)
    made_by_seqio = json.loads((tmp_path / "rows.json").read_text())
    for name in NAMES:
        own = [row["arrays"][name] for row in made_by_seqio["rows"]]
        assert made_by_seqio["prepacked"][name] == own == given[name], name
    assert spans_of(documents) == counted(made_by_seqio["spans"])
