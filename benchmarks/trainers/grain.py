"""Grain: packprep's batches with their own state, and a dataset as a source of Grain's own order, in a loop of torch."""

from pathlib import Path

import grain
import torch
from etils import epath
from grain.python import PyGrainCheckpointHandler

from packprep import open_dataset
from packprep.adapters import default_columns
from packprep.adapters.jax.grain_source import grain_batches
from packprep.adapters.torch import DTYPES, tensors
from packprep.adapters.torch_attention import sdpa_mask
from packprep.adapters.torch_loss import masked_loss
from trainers import made


def batches_of(path: Path, form: str) -> grain.DatasetIterator:
    """Grain's iterator over batches; form: "batches" in packprep's order, or "source" in Grain's."""
    if form == "batches":
        return iter(grain_batches(path, made.BATCH, seed=1, dtype=DTYPES))
    dataset = open_dataset(path)
    rows = grain.MapDataset.source(dataset.with_columns(default_columns(dataset), DTYPES))
    return iter(rows.shuffle(seed=1).repeat().batch(made.BATCH).to_iter_dataset())


def train(folder: Path, name: str, form: str) -> tuple[list[float], list[list[int]]]:
    """(losses, rows of each step) of the steps that are left of 20; model and optimizer are saved every 5, and Grain's state."""
    path, saved, handler = folder.parent / name, folder / "saved.pt", PyGrainCheckpointHandler()
    batches, dataset = batches_of(path, form), open_dataset(path)
    numbers = made.numbers_of(dataset)
    model = made.llama(dataset.vocab_size)
    adam, done, losses, steps = made.optimizer(model), 0, [], []
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])
        done = state["done"]
        batches = handler.restore(epath.Path(folder / f"grain{done}"), batches)
    for step in range(done + 1, made.STEPS + 1):
        batch = tensors(next(batches))
        steps.append([numbers[made.key_of(row, dataset.pad_id)] for row in batch["tokens"]])
        given = {"position_ids": batch["position_ids"], "attention_mask": sdpa_mask(batch), "use_cache": False}
        loss = masked_loss(model(input_ids=batch["tokens"], **given).logits, batch)
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
        if step % 5 == 0:
            (folder / f"grain{step}").mkdir(parents=True)
            handler.save(epath.Path(folder / f"grain{step}"), batches)
            torch.save({"done": step, "model": model.state_dict(), "adam": adam.state_dict()}, saved)
        made.say_loss(step, losses[-1])
    return losses, steps


def check(folder: Path) -> str:
    for make in (made.causal, made.prefixes):
        dataset = open_dataset(make(folder))
        for form in ("batches", "source"):
            losses, steps = train(folder / f"{make.__name__}-{form}", make.__name__, form)
            expected = made.reference(dataset, steps, made.llama(dataset.vocab_size))
            made.assert_equal(f"{make.__name__}, {form}", losses, expected)
    for form in ("batches", "source"):
        made.killed_and_resumed(folder / f"{form}-undisturbed", folder / f"{form}-disturbed", "causal", form)
    return made.TRAINED


if __name__ == "__main__":
    made.main("grain", check, train)
