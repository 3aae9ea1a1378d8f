"""A small decoder trained in JAX from a packed dataset, on whatever devices JAX finds.

    packprep build examples/quickstart.toml --out packed --set 'tasks=[{preset="ul2r"},
    {preset="llada"}]' python examples/train_jax.py packed --steps 200 --checkpoint small.npz

Kill it and start it again: it goes on from the checkpoint with the losses that it would have had.
"""

import argparse
import json
import os
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import packprep
from packprep.adapters.jax import dense_mask, loader, masked_loss, splash_attention


def parameters(vocab_size: int, width: int, layers: int, heads: int, seed: int) -> dict:
    """Weights of a decoder, from N(0, 1/inputs)."""
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)

    def block() -> dict:
        return {
            **{name: matrix(width, heads, width // heads) for name in ("query", "key", "value")},
            "output": matrix(width, width),
            "up": matrix(width, 4 * width),
            "down": matrix(4 * width, width),
        }

    return {
        "embedding": matrix(vocab_size, width) * np.float32(vocab_size**0.5),
        "blocks": [block() for _ in range(layers)],
        "logits": matrix(width, vocab_size),
    }


def normalized(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def rotated(x: jax.Array, position_ids: jax.Array) -> jax.Array:
    """Rotary positions, which begin anew in every segment."""
    half = x.shape[-1] // 2
    angles = position_ids[..., None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate(
        (a * jnp.cos(angles) - b * jnp.sin(angles), a * jnp.sin(angles) + b * jnp.cos(angles)), -1
    )


def decoder(weights: dict, batch: dict, attention: str) -> jax.Array:
    """Logits [B, T, vocabulary]. Segments see themselves alone, by causal, prefix and two-way
    attention as their tasks want it: prefix_ends says so."""
    ids, ends = batch["segment_ids"], batch["prefix_ends"]
    if attention == "splash":
        attend = partial(splash_attention, segment_ids=ids, prefix_ends=ends)
    else:
        attend = partial(jax.nn.dot_product_attention, mask=dense_mask(ids, ends))
    x = weights["embedding"][batch["tokens"]]
    for block in weights["blocks"]:
        h = normalized(x)
        query, key, value = (
            jnp.einsum("btd,dhk->bthk", h, block[name]) for name in ("query", "key", "value")
        )
        query, key = rotated(query, batch["position_ids"]), rotated(key, batch["position_ids"])
        x = x + attend(query, key, value).reshape(x.shape) @ block["output"]
        x = x + jax.nn.gelu(normalized(x) @ block["up"]) @ block["down"]
    return normalized(x) @ weights["logits"]


@partial(jax.jit, static_argnames=("attention", "learning_rate"), donate_argnums=0)
def train_step(
    state: dict, batch: dict, attention: str, learning_rate: float
) -> tuple[dict, jax.Array]:
    """One step of Adam; the loss is the weighted mean over trained slots, of all devices' rows
    together."""

    def loss(weights: dict) -> jax.Array:
        logits = decoder(weights, batch, attention)
        slot_weights = batch.get("loss_weights", batch["loss_mask"])  # 0 where nothing is trained
        total, _ = masked_loss(logits, batch["labels"], batch["loss_mask"], slot_weights)
        return total / jnp.maximum(slot_weights.sum(), 1)

    value, gradients = jax.value_and_grad(loss)(state["weights"])
    step = state["step"] + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["first"], gradients)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["second"], gradients)

    def updated(w: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        return w - learning_rate * (m / (1 - 0.9**step)) / (jnp.sqrt(v / (1 - 0.99**step)) + 1e-8)

    weights = jax.tree.map(updated, state["weights"], first, second)
    return {"step": step, "weights": weights, "first": first, "second": second}, value


def save(path: Path, state: dict, loader_state: dict) -> None:
    """Training and loader state in one file, which appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    with open(temporary, "wb") as file:
        np.savez(file, *leaves, loader=np.array(json.dumps(loader_state)))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def load(path: Path, state: dict) -> tuple[dict, dict]:
    """What `save` wrote, in the structure of `state`."""
    with np.load(path) as file:
        treedef = jax.tree.structure(state)
        leaves = [file[f"arr_{i}"] for i in range(treedef.num_leaves)]
        return jax.tree.unflatten(treedef, leaves), json.loads(str(file["loader"]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8, help="rows, over all devices together")
    parser.add_argument(
        "--checkpoint", type=Path, help="written every --save-every steps, and gone on from"
    )
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument(
        "--attention", choices=("dense", "splash"), default="dense", help="splash: made for TPUs"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()

    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows_over_devices, on_every_device = (
        NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ())
    )
    dataset = packprep.open_dataset(given.dataset)
    batches = loader(dataset, rows_over_devices, batch_size=given.batch_size, seed=given.seed)

    weights = parameters(dataset.vocab_size, given.width, given.layers, given.heads, given.seed)
    zeros = jax.tree.map(np.zeros_like, weights)
    state = {"step": np.int32(0), "weights": weights, "first": zeros, "second": zeros}
    if given.checkpoint and given.checkpoint.exists():
        state, loader_state = load(given.checkpoint, state)
        batches.load_state_dict(loader_state)
    first_step = int(state["step"])
    state = jax.device_put(state, on_every_device)

    print(
        f"{len(dataset)} rows of {dataset.seq_length} slots, on {jax.devices()[0].device_kind}",
        flush=True,
    )
    for step in range(first_step + 1, given.steps + 1):
        state, loss = train_step(state, next(batches), given.attention, given.learning_rate)
        print(f"step {step} loss {float(loss):.9g}", flush=True)
        if given.checkpoint and (step % given.save_every == 0 or step == given.steps):
            save(given.checkpoint, state, batches.state_dict())


if __name__ == "__main__":
    main()
