"""The loss of trained slots, next to a loop, and with NaN wherever nothing is trained."""

import numpy as np
import pytest

from tests.adapters.jax_made import batch, decoder, jax, jnp, packed, parameters

from packprep.adapters.jax import dense_mask, masked_loss  # isort: skip


def made_slots():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 7, 11)).astype(np.float32) * 4
    labels, mask = rng.integers(0, 11, (3, 7)), rng.integers(0, 2, (3, 7)).astype(bool)
    return logits, labels, mask, rng.random((3, 7)).astype(np.float32)


def test_it_is_the_sum_of_the_trained_slots_cross_entropies():
    logits, labels, mask, weights = made_slots()
    total = weighted = 0.0
    for b, t in zip(*np.nonzero(mask), strict=True):
        row = logits[b, t].astype(np.float64)
        loss = np.log(np.exp(row).sum()) - row[labels[b, t]]
        total, weighted = total + loss, weighted + loss * weights[b, t]
    got, trained = masked_loss(logits, labels, mask)
    assert got.dtype == np.float32 and np.isclose(got, total, rtol=1e-6) and trained == mask.sum()
    assert np.isclose(masked_loss(logits, labels, mask.astype(np.uint8), weights)[0], weighted, rtol=1e-6)
    assert masked_loss(logits.astype(jnp.bfloat16), labels, mask)[0].dtype == np.float32


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_fault_29_nan_where_nothing_is_trained_reaches_neither_the_loss_nor_its_gradient(value):
    logits, labels, mask, weights = made_slots()
    loss = jax.value_and_grad(lambda logits: masked_loss(logits, labels, mask, weights)[0])
    expected, expected_gradient = loss(logits)
    logits[~mask] = value
    got, gradient = loss(logits)
    assert got == expected and np.array_equal(gradient, expected_gradient)
    assert not np.asarray(gradient)[~mask].any()
    nothing, trained = masked_loss(np.full_like(logits, value), labels, np.zeros_like(mask))
    assert nothing == 0 and trained == 0


def test_fault_29_a_model_whose_outputs_at_padding_are_nan_has_a_finite_loss_and_gradients():
    row = packed(128, [("prefix", 40, 0), ("causal", 30, 0)])
    columns, weights = batch([row]), parameters(1, 1)
    real = columns["segment_ids"] != 0

    def loss(weights, padding):
        def attend(query, key, value):
            mask = dense_mask(columns["segment_ids"], columns["prefix_ends"])
            return jax.nn.dot_product_attention(query, key, value, mask=mask)

        logits = jnp.where(real[..., None], decoder(weights, columns, attend), padding)
        return masked_loss(logits, columns["labels"], columns["loss_mask"])[0]

    got, gradients = jax.value_and_grad(loss)(weights, np.nan)
    expected, expected_gradients = jax.value_and_grad(loss)(weights, 0.0)
    assert np.isfinite(got) and got == expected
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        assert np.isfinite(a).all() and np.array_equal(a, b)
