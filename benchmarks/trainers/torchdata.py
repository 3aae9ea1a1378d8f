"""torchdata's StatefulDataLoader: batches of `iterable`, and `Rows` by `BatchSampler`, with two workers and its own state."""

from pathlib import Path

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from packprep.adapters.torch import BatchSampler, Rows, iterable
from packprep.adapters.torch_attention import sdpa_mask
from packprep.adapters.torch_loss import masked_loss
from trainers import made


def batches_of(path: Path, form: str) -> StatefulDataLoader:
    """The two ways to read a dataset, whose order is the same."""
    if form == "iterable":
        return StatefulDataLoader(iterable(path, made.BATCH, seed=1), batch_size=None, num_workers=2)
    rows = Rows(path)
    return StatefulDataLoader(rows, batch_sampler=BatchSampler(rows, made.BATCH, seed=1), num_workers=2)


def train(folder: Path, name: str, form: str) -> tuple[list[float], list[list[int]]]:
    """(losses, rows of each step) of the steps that are left of 20; model, optimizer and loader are saved every 5."""
    path, saved = folder.parent / name, folder / "saved.pt"
    batches, dataset = batches_of(path, form), Rows(path).dataset
    numbers = made.numbers_of(dataset)
    model = made.llama(dataset.vocab_size)
    adam, done, losses, steps = made.optimizer(model), 0, [], []
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])
        batches.load_state_dict(state["batches"])
        done = state["done"]
    for step, batch in enumerate(batches, done + 1):
        steps.append([numbers[made.key_of(row, dataset.pad_id)] for row in batch["tokens"]])
        given = {"position_ids": batch["position_ids"], "attention_mask": sdpa_mask(batch), "use_cache": False}
        loss = masked_loss(model(input_ids=batch["tokens"], **given).logits, batch)
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
        if step % 5 == 0:
            folder.mkdir(exist_ok=True)
            states = {"model": model, "adam": adam, "batches": batches}
            torch.save({"done": step} | {of: stateful.state_dict() for of, stateful in states.items()}, saved)
        made.say_loss(step, losses[-1])
        if step == made.STEPS:
            return losses, steps


def check(folder: Path) -> str:
    for make, form in ((made.causal, "iterable"), (made.causal, "rows"), (made.prefixes, "iterable")):
        path = folder / make.__name__
        dataset = Rows(path if path.exists() else make(folder)).dataset
        losses, steps = train(folder / f"{path.name}-{form}", path.name, form)
        made.assert_equal(
            f"{path.name}, {form}", losses, made.reference(dataset, steps, made.llama(dataset.vocab_size))
        )
    for form in ("iterable", "rows"):
        made.killed_and_resumed(folder / f"{form}-undisturbed", folder / f"{form}-disturbed", "causal", form)
    return made.TRAINED


if __name__ == "__main__":
    made.main("torchdata", check, train)
