"""Ray Train's TorchTrainer, whose two workers read by `loader` and of which one is killed, and rows
by Ray Data."""

import os
import signal
import tempfile
from pathlib import Path

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_TRAIN_V2_ENABLED="1", RAY_AUTH_MODE="disabled")

import numpy as np
import ray.data
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

from packprep import open_dataset
from packprep.adapters.torch import loader
from packprep.adapters.torch_attention import sdpa_mask
from packprep.adapters.torch_loss import masked_loss
from trainers import made

WORKERS, KILL_AT = 2, 13


def work(config: dict) -> None:
    """A worker: its part of each batch. One of them kills itself after a step, once; Ray begins
    again from its checkpoint."""
    torch.set_num_threads(1)
    at, lines = ray.train.get_context(), Path(config["folder"], "losses.txt")
    first = at.get_world_rank() == 0
    batches = loader(
        config["dataset"], made.BATCH // WORKERS, at.get_world_rank(), at.get_world_size(), seed=1
    )
    model = prepare_model(made.llama(batches.dataset.vocab_size))
    parts, done = {"model": model, "adam": made.optimizer(model), "batches": batches}, 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"))
        done = state["done"]
        for name, part in parts.items():
            part.load_state_dict(state[name])
    for step in range(done + 1, made.STEPS + 1):
        batch = next(batches)
        given = {
            "position_ids": batch["position_ids"],
            "attention_mask": sdpa_mask(batch),
            "use_cache": False,
        }
        trained = torch.tensor(batch["n_trained"])
        # what the loss is divided by; DDP takes the mean of gradients, and means the sum
        torch.distributed.all_reduce(trained)
        loss = (
            masked_loss(model(input_ids=batch["tokens"], **given).logits, batch, trained) * WORKERS
        )
        parts["adam"].zero_grad()
        loss.backward()
        parts["adam"].step()
        whole = loss.detach() / WORKERS
        torch.distributed.all_reduce(whole)
        if first:
            with lines.open("a") as file:
                file.write(f"{step} {whole.item()!r}\n")
        with tempfile.TemporaryDirectory() as folder:
            saved = None
            if step % 5 == 0 and first:
                torch.save(
                    {"done": step} | {name: part.state_dict() for name, part in parts.items()},
                    f"{folder}/state.pt",
                )
                saved = Checkpoint.from_directory(folder)
            if step % 5 == 0:
                ray.train.report({"loss": whole.item()}, checkpoint=saved)
        if first and step == KILL_AT and not done:
            os.kill(os.getpid(), signal.SIGKILL)


def check(folder: Path) -> str:
    path = made.causal(folder)
    dataset = open_dataset(path)
    ray.init(
        num_cpus=WORKERS + 1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
    )
    TorchTrainer(
        work,
        train_loop_config={"dataset": str(path), "folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(
            name="run", storage_path=str(folder), failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
    said = [line.split() for line in (folder / "losses.txt").read_text().splitlines()]
    steps = [int(step) for step, _ in said]
    again = steps[KILL_AT]
    assert 1 < again <= 11 and steps == [
        *range(1, KILL_AT + 1),
        *range(again, made.STEPS + 1),
    ], steps
    numbers, batches = made.numbers_of(dataset), dataset.batches(made.BATCH, seed=1)
    rows = [
        [numbers[made.key_of(row, dataset.pad_id)] for row in next(batches)["tokens"]]
        for _ in range(made.STEPS)
    ]
    expected = made.reference(dataset, rows, made.llama(dataset.vocab_size))
    what = f"two workers, one killed after step {KILL_AT}, from {again} on again"
    made.assert_equal(
        what, [float(loss) for _, loss in said], [expected[step - 1] for step in steps]
    )
    by_ray_data(dataset)
    ray.shutdown()
    return made.TRAINED


def by_ray_data(dataset) -> None:
    """Row numbers of Ray Data, of which each becomes its row."""
    rows = ray.data.range(len(dataset)).map_batches(
        lambda batch: dataset.batch(batch["id"]), batch_size=64
    )
    read = [batch for batch in rows.iter_batches(batch_size=64, batch_format="numpy")]
    whole = dataset.batch(range(len(dataset)))
    for name, values in whole.items():
        found = np.concatenate([batch[name] for batch in read])
        assert np.array_equal(
            found[np.lexsort(found.T[::-1])], values[np.lexsort(values.T[::-1])]
        ), name
    made.say("rows by Ray Data", f"{len(dataset)}, columns {', '.join(whole)}")


if __name__ == "__main__":
    made.main("ray", check)
