"""Packed rows under MaxText's own block-diffusion mask, run from a checkout: PACKPREP_MAXTEXT names
it, or an unpacked wheel.

It needs Python 3.12 and what MaxText imports: benchmarks/trainers/maxtext.txt.
"""

import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from packprep import open_dataset
from tests import made
from tests.adapters.jax_made import jax, jnp

from packprep.adapters.jax import loader  # isort: skip

CHECKOUT = os.environ.get("PACKPREP_MAXTEXT")
LENGTH, BLOCK = 128, 4


@pytest.fixture
def attention_op(monkeypatch):
    """The module of MaxText's masks, from the checkout."""
    if not CHECKOUT:
        pytest.skip("PACKPREP_MAXTEXT names no checkout of MaxText")
    source = Path(CHECKOUT, "src") if Path(CHECKOUT, "src").is_dir() else Path(CHECKOUT)
    monkeypatch.syspath_prepend(str(source))
    import maxtext.layers.attention_op as module

    assert Path(module.__file__).is_relative_to(source.resolve()), sys.path
    return module


def mask(module, segment_ids, block, position_ids=None):
    """bool[T, T] of one row. position_ids: blocks are counted by them, as under load-balanced
    context parallelism."""
    config = SimpleNamespace(
        causal_block_size=block,
        context_sharding="context",
        context_parallel_load_balance=position_ids is not None,
        context_parallel_strategy="all_gather",
        logical_axis_rules=(),
        shard_mode="auto",
    )
    length = len(segment_ids)
    op = module.AttentionOp(
        config=config,
        mesh=SimpleNamespace(shape={"context": 2}),
        attention_kernel="dot_product",
        num_query_heads=1,
        num_kv_heads=1,
        max_target_length=length,
        attention_type=module.AttentionType.BLOCK_DIFFUSION,
    )
    op._maybe_shard_with_pspec = lambda values, spec: values  # there is no mesh of devices here
    op._logical_to_mesh_axes = lambda names: None
    if position_ids is not None and hasattr(op, "_load_balanced_context_parallel"):
        op._load_balanced_context_parallel = lambda: True
    rows = jnp.zeros((1, length, 1, 8))
    positions = None if position_ids is None else jnp.asarray(position_ids)[None]
    ids = jnp.asarray(segment_ids)[None]
    seen = op.generate_attention_mask(rows, rows, ids, "train", segment_positions=positions)
    return np.asarray(seen == 0)[0, 0, 0]


def dataset_of(folder, task, mult):
    made.write_lines(folder / "a.jsonl", made.texts(60, mean_bytes=40))
    options = {"documents": {"min_tokens": 3}, "packing": {"pad_seq_to_mult": mult}}
    made.build(
        made.table("a.jsonl", tasks=[task], seq_length=LENGTH, **options), folder, folder / "out"
    )
    return open_dataset(folder / "out")


def misled(module, ids, block, position_ids=None):
    """How many pairs of slots the packed mask has otherwise than the mask of each document alone;
    and of how many documents."""
    packed = mask(module, ids, block, position_ids)
    right = np.zeros_like(packed)
    # padding sees padding, whatever it is
    right[np.ix_(ids == 0, ids == 0)] = packed[np.ix_(ids == 0, ids == 0)]
    for number in range(1, ids.max() + 1):
        at = np.flatnonzero(ids == number)
        right[np.ix_(at, at)] = mask(module, np.ones(len(at), np.int32), block)
    return int((packed != right).sum()), int(ids.max())


def test_its_mask_of_packed_rows_is_that_of_each_document_alone(attention_op, tmp_path):
    task = {"name": "bd3", "objective": "block_diffusion", "block_length": BLOCK}
    dataset = dataset_of(tmp_path, task, 2 * BLOCK)
    [batch] = loader(
        dataset, batch_size=len(dataset), epochs=1, names="maxtext", loss_weights="ignore"
    )
    most = 0
    for ids, positions in zip(batch["inputs_segmentation"], batch["inputs_position"], strict=True):
        ids, positions = np.asarray(ids), np.asarray(positions)
        wrong, documents = misled(attention_op, ids, BLOCK)
        assert wrong == 0
        assert misled(attention_op, ids, BLOCK, positions)[0] == 0
        most = max(most, documents)
    assert most > 2


def test_rows_whose_segments_begin_anywhere_are_right_where_it_counts_by_their_positions_alone(
    attention_op, tmp_path
):
    row = dataset_of(tmp_path, {"preset": "dllm"}, 1).row(0)
    wrong, documents = misled(attention_op, row.segment_ids, BLOCK)
    # why packing is refused there, and the loader refuses what is not aligned
    assert documents > 1 and wrong > 0
    assert misled(attention_op, row.segment_ids, BLOCK, row.position_ids)[0] == 0


def test_one_block_as_long_as_the_row_is_two_way_attention_inside_each_segment(
    attention_op, tmp_path
):
    dataset = dataset_of(tmp_path, {"preset": "dllm"}, 1)
    batch = next(loader(dataset, batch_size=4, names="maxtext"))
    for ids in np.asarray(batch["inputs_segmentation"]):
        assert np.array_equal(mask(attention_op, ids, LENGTH), ids[:, None] == ids)


def test_the_example_refuses_a_configuration_that_does_not_go_with_the_dataset(
    attention_op, tmp_path
):
    make = runpy.run_path(str(made.ROOT / "examples" / "maxtext_input.py"))["make_train_iterator"]
    task = {"name": "bd3", "objective": "block_diffusion", "block_length": BLOCK}
    dataset = dataset_of(tmp_path, task, 2 * BLOCK)
    given = {
        "training_objective": "block_diffusion",
        "dataset_type": "hf",
        "hf_path": str(tmp_path / "out"),
        "checkpoint_dir": str(tmp_path / "checkpoints"),
        "global_batch_size_to_load": 2,
        "data_shuffle_seed": 0,
        "enable_data_shuffling": True,
        "num_epoch": 1,
        "max_target_length": LENGTH // 2,
        "causal_block_size": BLOCK,
        "vocab_size": dataset.vocab_size,
    }
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    rows = make(SimpleNamespace(**given), mesh, [0])
    first, second = next(rows), next(rows)
    assert not np.array_equal(first["inputs"], second["inputs"])
    (tmp_path / "checkpoints" / "0").mkdir(parents=True)  # MaxText saves step 0 after it is done
    again = make(SimpleNamespace(**given), mesh, [0])
    assert np.array_equal(next(again)["inputs"], second["inputs"])
    for name, value in (
        ("causal_block_size", 8),
        ("max_target_length", LENGTH),
        ("vocab_size", 100),
    ):
        with pytest.raises(ValueError, match=f"{name}={value} does not go with"):
            make(SimpleNamespace(**{**given, name: value}), mesh, [0])
