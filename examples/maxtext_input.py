"""Packed rows as MaxText's input: causal, or its block diffusion, which then trains on packed rows.

    packprep build examples/quickstart.toml --out packed --set 'tasks=[{preset="causal"}]'
    python examples/maxtext_input.py base.yml dataset_type=grain grain_train_files=packed
    max_target_length=4096 …

All arguments are MaxText's. Its block diffusion asks for dataset_type=hf, hf_path=packed and
packing=false, which speaks of its own packing; causal_block_size is the task's block_length, and
seq_length of a dataset whose segments see both ways. MaxText saves where the input stands with
dataset_type=grain; with hf it starts again behind its newest checkpoint's steps.
"""

import json

from absl import app
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from maxtext.input_pipeline import input_pipeline_interface
from maxtext.trainers.pre_train import train

from packprep.adapters.jax import loader


class Rows:
    """A loader's batches, with its state as the bytes that MaxText's checkpoints hold."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.batches)

    def get_state(self) -> bytes:
        return json.dumps(self.batches.state_dict()).encode()

    def set_state(self, state: bytes) -> None:
        self.batches.load_state_dict(json.loads(state))


def make_train_iterator(config, global_mesh: Mesh, process_indices: list[int]) -> Rows:
    """The batches of `config`, global over the mesh; what MaxText's own functions of this name take
    and give."""
    diffusion = config.training_objective == "block_diffusion"
    directory = config.hf_path if config.dataset_type == "hf" else config.grain_train_files
    batches = loader(
        directory,
        NamedSharding(
            global_mesh, PartitionSpec(global_mesh.axis_names)
        ),  # rows are cut over all devices
        batch_size=config.global_batch_size_to_load,
        seed=config.data_shuffle_seed,
        shuffle=config.enable_data_shuffling,
        epochs=config.num_epoch,
        names="maxtext",
        loss_weights=(
            "ignore" if diffusion else "refuse"
        ),  # its block diffusion weighs all that is masked alike
    )
    dataset = batches.dataset
    in_place = "targets_loss_mask" in batches.names
    tasks = [task for task in dataset.tasks if task["label_alignment"] == "same_slot"]
    blocks = {task["parameters"].get("block_length", dataset.seq_length) for task in tasks}
    for name, given, right in (
        (
            "training_objective",
            config.training_objective,
            ["block_diffusion"] if in_place else ["causal_lm"],
        ),
        ("max_target_length", config.max_target_length, [batches.seq_length]),
        (
            "causal_block_size",
            config.causal_block_size,
            blocks if diffusion else [config.causal_block_size],
        ),
        ("vocab_size", config.vocab_size, range(dataset.vocab_size, 1 << 31)),
    ):
        if given not in right:
            raise ValueError(f"{name}={given} does not go with {directory}: it should be {right}")
    if config.dataset_type == "hf":
        saved = [
            int(step.name)
            for step in epath.Path(config.checkpoint_dir).glob("*")
            if step.name.isdigit()
        ]
        batches.load_state_dict(
            {**batches.state_dict(), "rows": (max(saved, default=-1) + 1) * batches.batch_size}
        )
    return Rows(batches)


def main(argv: list[str]) -> None:
    input_pipeline_interface.make_grain_train_iterator = make_train_iterator
    input_pipeline_interface.make_hf_train_iterator = make_train_iterator
    train.main(argv)


if __name__ == "__main__":
    app.run(main)
