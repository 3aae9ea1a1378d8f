"""torchtitan's main branch, which its releases do not have: its Grain pipeline reads rows, and its
model sees them packed.

Run from a checkout, which PACKPREP_TORCHTITAN names; the pins are what that imports.
"""

from pathlib import Path

from trainers import made

COMMIT = made.checkout("PACKPREP_TORCHTITAN")

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torchtitan.components.data import GrainDataLoader, SingleDatasetConfig
from torchtitan.models.llama3 import llama3_configs

from packprep.adapters import torchtitan as adapter
from packprep.dataset.loader import Dataset, open_dataset


def loader(dataset: Dataset, rank: int = 0, world: int = 1) -> GrainDataLoader:
    config = GrainDataLoader.Config(
        dataset=SingleDatasetConfig(source=adapter.source(dataset), processor=adapter.processor()),
        collator=adapter.collator(dataset),
    )
    return GrainDataLoader(
        config,
        dp_world_size=world,
        dp_rank=rank,
        tokenizer=None,
        max_context_length=dataset.seq_length,
        num_tokens_per_batch=made.BATCH * dataset.seq_length,
    )


def batches(
    given: GrainDataLoader, count: int
) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    found = []
    for batch in given:
        found.append(batch)
        if len(found) == count:
            break
    return found


def rows_read(dataset: Dataset, rank: int, world: int) -> list[int]:
    """The rows of 20 batches, of which ids, labels and positions are compared with what is
    stored."""
    numbers, rows = made.numbers_of(dataset), []
    for inputs, labels in batches(loader(dataset, rank, world), made.STEPS):
        columns = (inputs["input"], labels, inputs["positions"])
        for ids, targets, positions in zip(
            *(c.reshape(-1, dataset.seq_length).numpy() for c in columns), strict=True
        ):
            number = numbers[made.key_of(ids, dataset.pad_id)]
            row = dataset.row(number)
            trained, real = row.loss_mask > 0, row.segment_ids > 0
            assert np.array_equal(ids, row.tokens)
            assert (
                np.array_equal(targets[trained], row.labels[trained])
                and (targets[~trained] == -100).all()
            )
            assert np.array_equal(positions[real], row.position_ids[real])
            rows.append(number)
    return rows


def losses(dataset: Dataset, steps: int = 3) -> tuple[list[float], list[float], list[float]]:
    """The mean losses of torchtitan's Llama over batches of its loader: packed, of each document
    alone, and causal alone."""
    torch.manual_seed(0)
    model = llama3_configs["debugmodel"](attn_backend="flex").build().float()
    model.init_states()
    packed, alone, across = [], [], []

    def loss(tokens, positions, labels):
        logits = model(
            tokens,
            attention_masks=model.get_attention_masks(positions=positions),
            positions=positions,
        )
        return cross_entropy(logits, labels, reduction="sum", ignore_index=-100).item()

    numbers = made.numbers_of(dataset)
    for inputs, labels in batches(loader(dataset), steps):
        tokens, positions, trained = (
            inputs["input"],
            inputs["positions"],
            int((labels != -100).sum()),
        )
        packed.append(loss(tokens, positions, labels) / trained)
        across.append(loss(tokens, torch.arange(len(tokens)), labels) / trained)
        total = 0.0
        for ids in tokens.reshape(-1, dataset.seq_length).numpy():
            for document in made.documents(dataset, numbers[made.key_of(ids, dataset.pad_id)]):
                targets = torch.from_numpy(np.where(document.trained, document.labels, -100))
                total += loss(
                    torch.from_numpy(document.tokens), torch.arange(len(targets)), targets
                )
        alone.append(total / trained)
    return packed, alone, across


@torch.no_grad()
def check(folder: Path) -> str:
    dataset = open_dataset(made.causal(folder))
    shares = [rows_read(dataset, rank, 2) for rank in range(2)]
    assert (
        len(set(shares[0] + shares[1])) == len(shares[0] + shares[1]) == 2 * made.STEPS * made.BATCH
    )
    made.say(
        "rows read by two ranks", f"{len(shares[0])} each, equal to what is stored, none twice"
    )

    whole = batches(loader(dataset), made.STEPS)
    first = loader(dataset)
    batches(first, 13)
    again = loader(dataset)
    again.load_state_dict(first.state_dict())
    for (inputs, labels), (expected, targets) in zip(
        batches(again, made.STEPS - 13), whole[13:], strict=True
    ):
        assert torch.equal(inputs["input"], expected["input"]) and torch.equal(labels, targets)
    made.say("resumed after batch 13 by its own state", f"batches 14 to {made.STEPS} are the same")

    packed, alone, across = losses(dataset)
    apart = float(np.abs(np.subtract(packed, alone)).max())
    made.say(
        "losses of its model, packed and each document alone",
        f"{packed[0]:.6f}, {apart:.1e} apart at most",
    )
    made.say("without positions", f"{float(np.abs(np.subtract(across, alone)).max()):.1e} apart")
    assert apart <= made.TOLERANCE

    made.assert_refused("prefixes", lambda: adapter.source(made.prefixes(folder)))
    return made.READ


if __name__ == "__main__":
    made.main("torchtitan", check, commit=COMMIT)
