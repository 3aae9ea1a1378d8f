"""MaxText's pre-training on packed rows, by examples/maxtext_input.py: causal, and its block
diffusion, which asks for rows that are not packed by itself.

What is right is its own model on each document alone, in a plain loop with optax's Adam.

MaxText's own command also trains on an export to ArrayRecord. What is right there is that its Grain
pipeline, which packs, gives the ids of the documents one after the other.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from trainers import made

import jax  # isort: skip
import jax.numpy as jnp
import maxtext
import numpy as np
import optax
from flax import nnx
from maxtext.common import metric_logger
from maxtext.input_pipeline import input_pipeline_interface
from maxtext.trainers.pre_train import train as pre_train
from maxtext.utils import maxtext_utils, model_creation_utils

from packprep.adapters.jax import loader
from packprep.dataset.loader import open_dataset

EXAMPLE = Path(__file__).parents[2] / "examples" / "maxtext_input.py"
RECORDS = "records"
BASE = Path(maxtext.__file__).parent / "configs" / "base.yml"
COMMON = {
    "run_name": "run",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "steps": made.STEPS,
    "per_device_batch_size": made.BATCH,
    "base_emb_dim": 64,
    "base_mlp_dim": 128,
    "base_num_decoder_layers": 2,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 16,
    "attention": "dot_product",
    "dtype": "float32",
    "weight_dtype": "float32",
    "matmul_precision": "highest",
    "learning_rate": made.LEARNING_RATE,
    "learning_rate_final_fraction": 1.0,
    "warmup_steps_fraction": 0.0,
    "adam_b2": 0.999,
    "adam_weight_decay": 0.0,
    "gradient_clipping_threshold": 0.0,
    "checkpoint_period": 4,
    "async_checkpointing": False,
    "enable_data_shuffling": True,
}


def arguments(folder: Path, kind: str) -> list[str]:
    """MaxText's, of a run in `folder` on folder/kind."""
    packed = folder / kind
    dataset = open_dataset(folder / "causal" if kind == RECORDS else packed)
    given: dict[str, Any] = {
        **COMMON,
        "base_output_directory": folder / f"{kind}-out",
        "vocab_size": dataset.vocab_size,
    }
    if kind == RECORDS:
        given |= {
            "dataset_type": "grain",
            "grain_file_type": "arrayrecord",
            "grain_train_files": packed / "*.array_record",
            "train_data_columns": "[tokens]",
            "tokenize_train_data": False,
            "grain_packing_type": "concat_then_split",
            "grain_worker_count": 0,
            "tokenizer_type": "huggingface",
            "tokenizer_path": folder / "tokenizer",
            "add_bos": False,
            "add_eos": False,
            "enable_data_shuffling": False,
            "max_target_length": dataset.seq_length,
        }
    elif kind == "causal":
        given |= {
            "dataset_type": "grain",
            "grain_train_files": packed,
            "max_target_length": dataset.seq_length,
        }
    else:
        given |= {
            "dataset_type": "hf",
            "hf_path": packed,
            "packing": False,
            "max_target_length": dataset.seq_length // 2,
            "training_objective": "block_diffusion",
            "attention_type": "block_diffusion",
            "causal_block_size": dataset.tasks[0]["parameters"]["block_length"],
            "block_diffusion_mask_id": dataset.manifest["specials"]["mask"],
        }
    return ["maxtext_input.py", str(BASE), *(f"{name}={value}" for name, value in given.items())]


def example() -> Any:
    spec = importlib.util.spec_from_file_location("maxtext_input", EXAMPLE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def train(folder: Path, kind: str) -> None:
    """MaxText's own main, which goes on from its checkpoint; what its log is given is said in
    full."""
    write = metric_logger.MetricLogger.write_metrics

    def said(self: Any, metrics: Any, step: int, metric_type: str = "train") -> None:
        made.say_loss(step + 1, float(metrics["scalar"]["learning/loss"]))
        write(self, metrics, step, metric_type)

    metric_logger.MetricLogger.write_metrics = said
    (pre_train if kind == RECORDS else example()).main(arguments(folder, kind))


def reference(folder: Path, kind: str) -> list[float]:
    """The losses of a plain loop over the same rows, of which each document is by itself in a
    row."""
    # it also chooses the generator of random weights
    config, _ = pre_train.initialize(arguments(folder, kind))
    mesh = maxtext_utils.get_mesh_from_config(config)
    create, _ = model_creation_utils.create_nnx_abstract_model(config, mesh)
    with jax.set_mesh(mesh), nnx.logical_axis_rules(config.logical_axis_rules):
        graph, weights, others = nnx.split(create(), nnx.Param, ...)

        def loss(weights: Any, batch: dict[str, jax.Array], trained: int) -> jax.Array:
            model = nnx.merge(graph, weights, others)
            logits = model(
                decoder_input_tokens=batch["tokens"],
                decoder_positions=batch["positions"],
                decoder_segment_ids=batch["segments"],
                enable_dropout=False,
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
            return (losses * batch["trained"]).sum() / trained

        step = jax.jit(jax.value_and_grad(loss))
        adam = optax.adam(made.LEARNING_RATE)
        state, losses = adam.init(weights), []
        for documents in steps(folder / kind):
            trained = sum(int(document["trained"].sum()) for document in documents)
            total, gradient = 0.0, None
            for document in documents:
                value, its = step(
                    weights, {name: column[None] for name, column in document.items()}, trained
                )
                total += float(value)
                gradient = its if gradient is None else jax.tree.map(jnp.add, gradient, its)
            updates, state = adam.update(gradient, state, weights)
            weights = optax.apply_updates(weights, updates)
            losses.append(total)
    return losses


def steps(packed: Path) -> list[list[dict[str, np.ndarray]]]:
    """Of each step the documents of its rows, each at the begin of a row of its own, from what is
    stored."""
    dataset = open_dataset(packed)
    blocks = dataset.tasks[0]["objective"] == "block_diffusion"
    order = dataset.batches(made.BATCH, seed=0, columns=["tokens"])
    found = []
    numbers = made.numbers_of(dataset)
    for _ in range(made.STEPS):
        rows = [numbers[made.key_of(tokens, dataset.pad_id)] for tokens in next(order)["tokens"]]
        found.append(
            [
                row_of(document, dataset.seq_length, blocks)
                for row in rows
                for document in made.documents(dataset, row)
            ]
        )
    return found


def row_of(document: made.Document, length: int, blocks: bool) -> dict[str, np.ndarray]:
    n = len(document.tokens)
    if blocks:  # MaxText trains x_t alone
        n, length = n // 2, length // 2
    row = {"tokens": document.tokens, "labels": document.labels, "trained": document.trained}
    row = {
        name: np.zeros(length, np.int32) | np.pad(column[:n], (0, length - n)).astype(np.int32)
        for name, column in row.items()
    }
    slots = np.arange(length, dtype=np.int32)
    return {
        **row,
        "positions": np.where(slots < n, slots, 0),
        "segments": (slots < n).astype(np.int32),
    }


def check_records(folder: Path) -> None:
    """MaxText's own command trains on documents, and its pipeline leaves no token out."""
    made.exported(made.causal(folder), "array_record", folder / RECORDS)
    losses = made.losses_of(folder, RECORDS)
    assert sorted(losses) == [*range(1, made.STEPS + 1)] and losses[made.STEPS] < losses[1]
    config, _ = pre_train.initialize(arguments(folder, RECORDS))
    mesh = maxtext_utils.get_mesh_from_config(config)
    batches, _ = input_pipeline_interface.create_data_iterator(config, mesh)
    exported = made.exported(folder / "causal", "megatron", folder / "pairs")
    [ids] = [np.fromfile(path, "<u2") for path in exported.glob("*.bin")]
    at = 0
    for _ in range(made.STEPS):
        batch = next(batches)
        for inputs, segments in zip(
            np.asarray(batch["inputs"]), np.asarray(batch["inputs_segmentation"]), strict=True
        ):
            own = inputs[segments != 0]
            assert np.array_equal(own, ids[at : at + len(own)])
            at += len(own)
    made.say("records: ids of documents, in order", f"{at:,}")


def check(folder: Path) -> str:
    check_records(folder / RECORDS)
    for kind, make in (("causal", made.causal), ("blocks", made.blocks)):
        whole, killed = folder / "whole", folder / "killed"
        packed = make(whole)
        killed.mkdir(exist_ok=True)
        (killed / kind).symlink_to(packed)
        dataset = open_dataset(packed)
        batches = loader(packed, batch_size=made.BATCH, names="maxtext", loss_weights="ignore")
        segments = np.asarray(next(batches)["inputs_segmentation"])
        made.say(
            f"{kind}: rows, segments",
            f"{len(dataset)},"
            f" {sum(len(row.segments) for row in map(dataset.row, range(len(dataset))))}",
        )
        assert segments.max() > 1
        losses = made.killed_and_resumed(whole, killed, kind)
        made.assert_equal(
            f"{kind}: packed rows in MaxText, each document alone", losses, reference(whole, kind)
        )
    return made.TRAINED


if __name__ == "__main__":
    made.main("maxtext", check, train)
