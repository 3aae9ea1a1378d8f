"""Masks and splash attention in JAX, next to packprep's own dense masks."""

import random
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep.dataset import attention
from packprep.errors import ArgumentError
from tests.adapters import rows_made
from tests.adapters.jax_made import KINDS, alone, batch, decoder, jax, jnp, packed, parameters
from tests.adapters.rows_made import Segment

from packprep.adapters.jax import block_masks, dense_mask, splash_attention  # isort: skip


@st.composite
def rows(draw, length, kinds=KINDS):
    """A row of random segments and gaps, filled up to a random place."""
    segments, gap, at = [], draw(st.integers(0, 2)), 0
    while draw(st.integers(0, 9)):
        kind = draw(st.sampled_from(kinds))
        n = draw(st.integers(1, max(2, length // 2)))
        n = 2 * n if kind == "block_diffusion" else n
        if at + n + gap > length:
            break
        segments.append((kind, n, draw(st.integers(1, 7))))
        at += n + gap
    return packed(length, segments, gap=gap)


def own_mask(row):
    """bool[T, T] by packprep's two numpy masks."""
    ids, positions, blocks = row["segment_ids"], row["position_ids"], row["block_lengths"]
    mask = attention.dense_mask(ids, np.maximum(row["prefix_ends"], 0))
    for segment in np.unique(ids[blocks > 0]):
        slots = np.flatnonzero(ids == segment)
        half = np.repeat([0, 1], len(slots) // 2)
        mask[np.ix_(slots, slots)] = attention.block_mask(
            ids[slots], positions[slots], half, blocks[slots[0]]
        )
    return mask


@pytest.mark.long
@given(rows(24), rows(24))
def test_dense_mask_is_the_numpy_one_for_every_kind_of_segment(first, second):
    pair = [first, second]
    columns = batch(pair)
    mask = dense_mask(
        columns["segment_ids"],
        columns["prefix_ends"],
        columns["position_ids"],
        columns["block_lengths"],
    )
    assert mask.shape == (2, 1, 24, 24) and mask.dtype == bool
    for got, row in zip(np.asarray(mask)[:, 0], pair, strict=True):
        assert np.array_equal(got, own_mask(row))
        assert got.any(axis=1).all()
    causal = np.asarray(dense_mask(columns["segment_ids"]))[:, 0]
    assert np.array_equal(causal, [attention.dense_mask(ids) for ids in columns["segment_ids"]])


def test_dense_mask_of_answers_in_blocks_is_that_of_pairs_of_slots():
    for seed in range(3):
        chance = random.Random(seed)
        segments = [Segment("causal", 4), Segment("prefix", 5, 2)][: seed % 3]
        for n in (12, 6):
            starts = rows_made.answers(chance, n // 2, 3)
            segments.append(Segment("blocks", n, 3, chance.randint(0, 1), starts))
        row = rows_made.batch([segments], 30)
        names = "segment_ids", "prefix_ends", "position_ids", "block_starts"
        columns = {name: row[name].astype(np.int32) for name in names}
        mask, real = np.asarray(dense_mask(**columns))[0, 0], row["segment_ids"][0] > 0
        assert np.array_equal(mask[real], rows_made.whole_mask([segments], 30)[0][real])


def test_half_of_what_blocks_need_is_refused():
    ids = np.ones((1, 8), np.int32)
    for columns in ({"position_ids": ids}, {"block_lengths": ids}, {"block_starts": ids}):
        with pytest.raises(ArgumentError, match="either block_lengths or block_starts"):
            dense_mask(ids, None, **columns)


@settings(max_examples=50)
@given(rows(48, KINDS[:3]), st.sampled_from([4, 16]))
def test_block_masks_leave_out_no_pair_and_call_full_only_what_is_full(row, block):
    ids, ends = row["segment_ids"], row["prefix_ends"]
    got = np.asarray(jax.jit(block_masks, static_argnums=2)(ids, ends, block))
    runs = np.cumsum(np.append(True, ids[1:] != ids[:-1]))  # padding sees its own run
    by_rule = np.arange(48) < np.maximum(np.arange(1, 49), ends)[:, None]
    every = by_rule.reshape(48 // block, block, -1, block).all(axis=(1, 3))
    some = (
        (by_rule & (runs[:, None] == runs)).reshape(48 // block, block, -1, block).any(axis=(1, 3))
    )
    assert (got[some] != 0).all()
    assert np.array_equal(got == 2, every & (got != 0))


@pytest.mark.long
def test_block_masks_of_segments_that_end_with_blocks_hold_nothing_else():
    # the prefix is of 3 slots
    segments = [("causal", 8, 0), ("bidirectional", 8, 0), ("prefix", 8, 0)]
    row = packed(32, segments)
    assert np.asarray(block_masks(row["segment_ids"], row["prefix_ends"], 4)).tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [2, 1, 0, 0, 0, 0, 0, 0],
        [0, 0, 2, 2, 0, 0, 0, 0],
        [0, 0, 2, 2, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 2, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 2, 1],
    ]


@partial(jax.jit, static_argnums=0)
@partial(jax.value_and_grad, argnums=(1, 2, 3), has_aux=True)
def weighted_sum(path, query, key, value, ids, ends, weights):
    output = path(query, key, value, ids, ends)
    return (output * weights).sum(), output


def attended(row, path):
    """(outputs, gradients of a weighted sum of those at real slots, real slots), of the row and of
    a short one."""
    rng = np.random.default_rng(1)
    columns = batch([row, packed(len(row["tokens"]), [("causal", 100, 0)])])
    ids, ends = columns["segment_ids"], columns["prefix_ends"]
    query, key, value = (
        jnp.asarray(rng.normal(size=(*ids.shape, n, 8)), jnp.float32) for n in (4, 2, 2)
    )
    weights = rng.normal(size=query.shape) * (ids != 0)[..., None, None]
    (_, output), gradients = weighted_sum(path, query, key, value, ids, ends, weights)
    return output, gradients, ids != 0


def by_dense_mask(query, key, value, ids, ends):
    return jax.nn.dot_product_attention(query, key, value, mask=dense_mask(ids, ends))


splash_of_128, splash_of_256 = splash_attention, partial(splash_attention, block=256)


@pytest.mark.long
@pytest.mark.alike(2)
@pytest.mark.parametrize("path, gap", [(splash_of_128, 0), (splash_of_128, 3), (splash_of_256, 3)])
def test_splash_attention_is_dot_product_attention(path, gap):
    segments = [
        ("prefix", 90, 0),
        ("bidirectional", 200, 0),
        ("causal", 61, 0),
        ("prefix", 140, 0),
        ("causal", 1, 0),
    ]
    row = packed(512, segments, gap=gap)
    expected, expected_gradients, real = attended(row, by_dense_mask)
    got, gradients, _ = attended(row, path)
    assert np.isfinite(got).all()
    assert np.abs(np.asarray(got - expected)[real]).max() < 1e-5
    for a, b in zip(gradients, expected_gradients, strict=True):
        assert np.abs(np.asarray(a - b)).max() < 1e-5


@pytest.mark.long
def test_splash_attention_is_causal_without_prefix_ends_and_nan_where_it_cannot():
    row = packed(128, [("causal", 60, 0), ("causal", 50, 0)])
    ids = row["segment_ids"][None]
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.normal(size=(1, 128, 1, 8)), jnp.float32)
    got = splash_attention(query, query, query, ids, scale=1.0)
    expected = jax.nn.dot_product_attention(query, query, query, mask=dense_mask(ids), scale=1.0)
    assert np.abs(np.asarray(got - expected)[ids != 0]).max() < 1e-5
    ends = np.where(ids == 2, -1, 0)
    got = np.asarray(splash_attention(query, query, query, ids, ends))
    assert np.isnan(got[ids == 2]).all() and np.isfinite(got[ids == 1]).all()


def by_dense_cross(query, key, value, ids, key_ids):
    return jax.nn.dot_product_attention(
        query, key, value, mask=dense_mask(ids, key_segment_ids=key_ids)
    )


def by_splash_cross(query, key, value, ids, key_ids):
    return splash_attention(query, key, value, ids, key_segment_ids=key_ids)


@pytest.mark.long
def test_cross_attention_is_by_segment():
    """Segments whose inputs and targets lie in other blocks, one row full of inputs, one of padding
    alone."""
    rng = np.random.default_rng(0)
    lengths = [([150, 30, 90], [20, 200, 10]), ([200, 184], [1, 2]), ([], [])]
    key_ids, ids = (
        np.stack(
            [
                np.pad(np.repeat(np.arange(1, len(row[i]) + 1), row[i]), (0, n - sum(row[i])))
                for row in lengths
            ]
        )
        for i, n in ((0, 384), (1, 256))
    )
    expected = (ids[:, :, None] == key_ids[:, None]) & (ids[:, :, None] > 0)
    mask = np.asarray(dense_mask(ids, key_segment_ids=key_ids))[:, 0]
    assert (mask == expected)[ids > 0].all() and mask.any(-1).all(), "no query is without keys"
    blocks = block_masks(ids[0], key_segment_ids=key_ids[0])
    assert (
        blocks.shape == (2, 3)
        and not (
            (np.asarray(blocks) == 0)[:, None, :, None] & expected[0].reshape(2, 128, 3, 128)
        ).any()
    )

    query, key, value = (
        jnp.asarray(rng.normal(size=(3, n, 2, 8)), jnp.float32) for n in (256, 384, 384)
    )
    weights = rng.normal(size=query.shape) * (ids != 0)[..., None, None]
    (_, wanted), wanted_gradients = weighted_sum(
        by_dense_cross, query, key, value, ids, key_ids, weights
    )
    (_, got), gradients = weighted_sum(by_splash_cross, query, key, value, ids, key_ids, weights)
    assert np.isfinite(got).all()
    assert np.abs(np.asarray(got - wanted)[ids != 0]).max() < 1e-5
    for a, b in zip(gradients, wanted_gradients, strict=True):
        assert np.abs(np.asarray(a - b)).max() < 1e-5


def test_cross_attention_has_no_prefixes():
    ids = jnp.ones((1, 128), jnp.int32)
    query = jnp.zeros((1, 128, 1, 8))
    with pytest.raises(ArgumentError, match="leave them out of cross attention"):
        dense_mask(ids, ids, key_segment_ids=ids)
    with pytest.raises(ArgumentError, match="leave them out of cross attention"):
        splash_attention(query, query, query, ids, ids, key_segment_ids=ids)


@pytest.mark.parametrize("length, block", [(200, 128), (256, 64), (256, 0), (384, 256)])
def test_splash_attention_refuses_lengths_and_blocks_that_it_cannot(length, block):
    query = jnp.zeros((1, length, 1, 8))
    with pytest.raises(ArgumentError, match=f"block is {block} and a row has {length}"):
        splash_attention(query, query, query, jnp.ones((1, length), jnp.int32), block=block)


def test_splash_attention_with_its_gradient_compiles_to_tpu_kernels():
    """As far as that can be seen without one: to the kernels' code."""
    query, ids = (
        jax.ShapeDtypeStruct((2, 512, 2, 128), jnp.float32),
        jax.ShapeDtypeStruct((2, 512), jnp.int32),
    )

    def total(query, key, value, ids, ends):
        return splash_attention(query, key, value, ids, ends, interpret=False).sum()

    traced = jax.jit(jax.grad(total, argnums=(0, 1, 2))).trace(query, query, query, ids, ids)
    assert traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == 3


# Packed equals unpacked


@partial(jax.jit, static_argnums=0)
@partial(jax.value_and_grad, argnums=1, has_aux=True)
def loss_and_logits(attend, weights, columns):
    """The sum of the trained slots' losses, by jax.nn alone."""
    logits = decoder(weights, columns, partial(attend, columns))
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), columns["labels"][..., None], -1)[
        ..., 0
    ]
    return (losses * columns["loss_mask"]).sum(), logits


def by_dense(columns, query, key, value):
    names = ("segment_ids", "prefix_ends", "position_ids", "block_lengths")
    return jax.nn.dot_product_attention(
        query, key, value, mask=dense_mask(*(columns[name] for name in names))
    )


def by_splash(columns, query, key, value):
    return splash_attention(query, key, value, columns["segment_ids"], columns["prefix_ends"])


def by_own_mask(columns, query, key, value):
    return jax.nn.dot_product_attention(query, key, value, mask=columns["mask"][:, None])


def assert_packed_equals_unpacked(row, attend, layers, heads):
    weights = parameters(layers, heads)
    (_, packed_logits), packed_gradients = loss_and_logits(attend, weights, batch([row]))
    total = jax.tree.map(jnp.zeros_like, weights)
    for segment in range(1, row["segment_ids"].max() + 1):
        document = alone(row, segment)
        document["mask"] = own_mask(document)  # it knows of no other document
        (_, logits), gradients = loss_and_logits(by_own_mask, weights, batch([document]))
        got = packed_logits[0][row["segment_ids"] == segment]
        assert np.abs(np.asarray(got - logits[0])).max() < 1e-5, f"segment {segment}"
        total = jax.tree.map(jnp.add, total, gradients)
    trained = row["loss_mask"].sum()  # gradients of the mean loss
    for got, expected in zip(
        jax.tree.leaves(packed_gradients), jax.tree.leaves(total), strict=True
    ):
        assert np.abs(np.asarray(got - expected)).max() / trained < 1e-5
        assert np.abs(np.asarray(expected)).max() / trained > 1e-4  # there is something to compare


@pytest.mark.long
@pytest.mark.parametrize("gap, layers", [(0, 1), (5, 2)])
def test_a_packed_row_equals_its_documents_alone_under_dot_product_attention(gap, layers):
    segments = [(kind, 20, 4) for kind in ("prefix", "block_diffusion", "bidirectional", "causal")]
    assert_packed_equals_unpacked(packed(128, segments, gap=gap), by_dense, layers, 2)


@pytest.mark.long
@pytest.mark.alike(1)
@pytest.mark.parametrize("gap, layers", [(0, 1), (5, 2)])
def test_a_packed_row_equals_its_documents_alone_under_splash_attention(gap, layers):
    segments = [(kind, 150, 0) for kind in ("prefix", "bidirectional", "causal")]
    assert_packed_equals_unpacked(packed(512, segments, gap=gap), by_splash, layers, 2)


@pytest.mark.campaign
def test_a_packed_row_of_8192_slots_equals_its_documents_alone_under_splash_attention():
    segments = [(kind, 1333, 0) for kind in 2 * ["prefix", "causal", "bidirectional"]]
    assert_packed_equals_unpacked(packed(8192, segments), by_splash, 1, 1)
