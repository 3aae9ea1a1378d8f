"""Rows in the pipeline of torchtitan's main branch, run from a checkout: PACKPREP_TORCHTITAN names
it."""

import os
import sys

import numpy as np
import pytest

torch = pytest.importorskip(
    "torch", reason="torch is not installed: pip install '.[trainers]'", exc_type=ImportError
)

from packprep.adapters import torchtitan as adapter
from packprep.dataset.loader import open_dataset
from packprep.errors import ArgumentError
from tests.dataset import synthetic

CHECKOUT = os.environ.get("PACKPREP_TORCHTITAN")
SEQ_LENGTH = 64


def make(path, tokens=40):
    """Rows of causal segments, with padding between and behind them."""
    from packprep.building.run import build
    from packprep.recipe import read_recipe
    from tests.made import Silent, table, texts, write_lines

    write_lines(path / "in.jsonl", texts(tokens))
    recipe = table(
        "in.jsonl",
        tasks=[{"preset": "causal"}],
        seq_length=SEQ_LENGTH,
        packing={"pad_seq_to_mult": 8},
    )
    build(read_recipe(recipe, path), path / "out", Silent())
    return open_dataset(path / "out")


def test_positions_begin_with_each_segment_and_run_on_through_padding(tmp_path):
    dataset = make(tmp_path)
    rows = adapter.source(tmp_path / "out")
    assert len(rows) == len(dataset) and rows.build(dataset_iteration_policy=None) is rows
    for i in range(len(rows)):
        row, own = rows[i], dataset.row(i)
        assert {values.dtype for values in row.values()} == {np.dtype(np.int64)}
        assert np.array_equal(row["input_ids"], own.tokens)
        trained = own.loss_mask > 0
        assert (
            np.array_equal(row["labels"][trained], own.labels[trained])
            and (row["labels"][~trained] == -100).all()
        )
        ids = own.segment_ids
        begins = np.flatnonzero(np.diff(ids, prepend=-1))  # of segments, and of runs of padding
        assert np.array_equal(np.flatnonzero(row["positions"] == 0), begins)
        assert (np.diff(row["positions"])[np.diff(ids) == 0] == 1).all()
        assert np.array_equal(row["positions"][ids > 0], own.position_ids[ids > 0])


def test_what_torchtitan_would_pass_over_is_refused_by_name(tmp_path):
    synthetic.make_dataset(tmp_path / "prefix", (4,))
    with pytest.raises(ArgumentError, match="task x attends bidirectionally"):
        adapter.source(tmp_path / "prefix")
    assert len(adapter.source(tmp_path / "prefix", prefix_bidirectional=False)) == 4
    mixture = open_dataset([make(tmp_path).directory, tmp_path / "out"], shares=[1, 2])
    with pytest.raises(ArgumentError, match="is a mixture.*\nhint: .*DatasetMixConfig"):
        adapter.source(mixture)


@pytest.fixture
def titan(monkeypatch):
    """torchtitan's data components, from the checkout."""
    if not CHECKOUT:
        pytest.skip("PACKPREP_TORCHTITAN names no checkout of torchtitan")
    monkeypatch.syspath_prepend(CHECKOUT)
    import torchtitan.components.data as data

    assert data.__file__.startswith(os.path.abspath(CHECKOUT)), sys.path
    return data


def loader_of(titan, dataset, rows=2, rank=0, world=1, **config):
    made = titan.SingleDatasetConfig(source=adapter.source(dataset), processor=adapter.processor())
    config = titan.GrainDataLoader.Config(
        dataset=made, collator=adapter.collator(dataset), **config
    )
    return titan.GrainDataLoader(
        config, dp_world_size=world, dp_rank=rank, tokenizer=None, max_context_length=SEQ_LENGTH,
        num_tokens_per_batch=rows * SEQ_LENGTH,
    )  # fmt: skip


def test_its_loader_gives_every_row_whole_once_an_epoch_and_goes_on(titan, tmp_path):
    dataset = make(tmp_path, tokens=120)
    steps, seen, rows = len(dataset) // 2 // 2, [], adapter.source(dataset)
    numbers = {rows[i]["input_ids"].tobytes(): i for i in range(len(rows))}
    for rank in range(2):
        loader = loader_of(titan, dataset, rank=rank, world=2)
        batches = [next(iter(loader)) for _ in range(steps)]
        for inputs, labels in batches:
            assert (
                inputs["input"].shape
                == inputs["positions"].shape
                == labels.shape
                == (2 * SEQ_LENGTH,)
            )
            given = {
                "input_ids": inputs["input"],
                "labels": labels,
                "positions": inputs["positions"],
            }
            for k in range(2):
                row = {name: values.reshape(2, -1)[k].numpy() for name, values in given.items()}
                seen.append(numbers[row["input_ids"].tobytes()])
                assert all(
                    np.array_equal(row[name], values) for name, values in rows[seen[-1]].items()
                )
        again = loader_of(titan, dataset, rank=rank, world=2)
        next(iter(again))
        state = again.state_dict()
        resumed = loader_of(titan, dataset, rank=rank, world=2)
        resumed.load_state_dict(state)
        assert torch.equal(next(iter(resumed))[0]["input"], batches[1][0]["input"])
    assert len(numbers) == len(dataset) and len(set(seen)) == len(seen) == 4 * steps
    with pytest.raises(ArgumentError, match="does not consist of whole rows of 64"):
        titan.GrainDataLoader(
            titan.GrainDataLoader.Config(
                dataset=titan.SingleDatasetConfig(
                    source=adapter.source(dataset), processor=adapter.processor()
                ),
                collator=adapter.collator(dataset),
            ),
            dp_world_size=1,
            dp_rank=0,
            tokenizer=None,
            max_context_length=SEQ_LENGTH,
            num_tokens_per_batch=100,
        )


def test_its_model_sees_each_segment_of_a_folded_batch_as_if_alone(titan, tmp_path):
    from torchtitan.models.llama3 import llama3_configs

    dataset = make(tmp_path)
    inputs, _ = next(iter(loader_of(titan, dataset, shuffle=False)))
    torch.manual_seed(0)
    model = llama3_configs["debugmodel"](attn_backend="flex").build().float()
    model.init_states() if hasattr(model, "init_states") else model.init_weights()
    tokens, positions = inputs["input"], inputs["positions"]
    with torch.no_grad():
        packed = model(
            tokens,
            attention_masks=model.get_attention_masks(positions=positions),
            positions=positions,
        )
        begins = [*torch.nonzero(positions == 0).flatten().tolist(), len(tokens)]
        compared = 0
        for begin, end in zip(begins, begins[1:], strict=False):
            alone, at = tokens[begin:end], positions[begin:end]
            logits = model(
                alone, attention_masks=model.get_attention_masks(positions=at), positions=at
            )
            assert (logits - packed[begin:end]).abs().max() < 1e-5
            compared += end - begin
    assert compared == len(tokens) == 2 * SEQ_LENGTH
