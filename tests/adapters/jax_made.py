"""JAX on the CPU for the tests, packed rows, and a decoder small enough to compare to the last
digits."""

import os

import numpy as np
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'packprep[jax]'")
jnp = jax.numpy

KINDS = ("causal", "prefix", "bidirectional", "block_diffusion")
VOCABULARY = 31


def packed(length, segments, seed=0, gap=0):
    """One row's columns, [length] each. segments: (kind, slots, block length of block diffusion) in
    order, `gap` slots of padding behind each of them."""
    rng = np.random.default_rng(seed)
    row = {
        name: np.zeros(length, np.int32)
        for name in (
            "tokens",
            "labels",
            "segment_ids",
            "position_ids",
            "prefix_ends",
            "block_lengths",
            "loss_mask",
        )
    }
    at = 0
    for i, (kind, n, block_length) in enumerate(segments):
        slots = slice(at, at + n)
        row["tokens"][slots] = rng.integers(1, VOCABULARY, n)
        row["labels"][slots] = rng.integers(1, VOCABULARY, n)
        row["loss_mask"][slots] = rng.random(n) < 0.7
        row["segment_ids"][slots] = i + 1
        row["position_ids"][slots] = np.arange(n)
        if kind == "block_diffusion":
            row["position_ids"][slots] = np.tile(np.arange(n // 2), 2)
            row["block_lengths"][slots] = block_length
            row["prefix_ends"][slots] = -1
        else:
            row["prefix_ends"][slots] = (
                at + {"causal": 0, "prefix": n // 3 + 1, "bidirectional": n}[kind]
            )
        at += n + gap
    assert at <= length
    return row


def alone(row, segment):
    """The slots of one segment as a row of its own, without padding."""
    slots = np.flatnonzero(row["segment_ids"] == segment)
    taken = {name: values[slots] for name, values in row.items()}
    taken["segment_ids"] = np.ones_like(taken["segment_ids"])
    taken["prefix_ends"] = np.where(taken["prefix_ends"] < 0, -1, taken["prefix_ends"] - slots[0])
    return taken


def batch(rows):
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def parameters(layers=2, heads=2, width=16, seed=0):
    rng = np.random.default_rng(seed)

    def matrix(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)

    blocks = [
        {
            "query": matrix(width, heads, width // heads),
            "key": matrix(width, heads, width // heads),
            "value": matrix(width, heads, width // heads),
            "output": matrix(width, width),
            "up": matrix(width, 2 * width),
            "down": matrix(2 * width, width),
        }
        for _ in range(layers)
    ]
    return {
        "embedding": matrix(VOCABULARY, width) * 4,
        "blocks": blocks,
        "logits": matrix(width, VOCABULARY),
    }


def normalized(x):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def rotated(x, position_ids):
    half = x.shape[-1] // 2
    angles = position_ids[..., None, None] * 100.0 ** (-jnp.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate(
        (a * jnp.cos(angles) - b * jnp.sin(angles), a * jnp.sin(angles) + b * jnp.cos(angles)), -1
    )


def decoder(weights, columns, attend):
    """Logits [B, T, VOCABULARY]; attend(query, key, value) with [B, T, heads, head_dim] each."""
    x = weights["embedding"][columns["tokens"]]
    for block in weights["blocks"]:
        h = normalized(x)
        query, key, value = (
            jnp.einsum("btd,dhk->bthk", h, block[name]) for name in ("query", "key", "value")
        )
        query, key = rotated(query, columns["position_ids"]), rotated(key, columns["position_ids"])
        x = x + attend(query, key, value).reshape(x.shape) @ block["output"]
        x = x + jax.nn.gelu(normalized(x) @ block["up"]) @ block["down"]
    return normalized(x) @ weights["logits"]
