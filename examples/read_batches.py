"""A trainer's side: read batches on every rank, stop, and go on exactly there, on another number of
ranks.

python examples/read_batches.py packed
"""

import json
import sys

import numpy as np

import packprep

WORLD_SIZE, BATCH_SIZE = 2, 4


def main(directory: str) -> None:
    dataset = packprep.open_dataset(directory)
    print(f"{len(dataset)} rows of {dataset.seq_length} slots, ids below {dataset.vocab_size}")

    # What one rank does. Every rank has the same arguments but for `rank`.
    batches = dataset.batches(BATCH_SIZE, seed=1, rank=0, world_size=WORLD_SIZE)
    for _ in range(3):
        batch = next(batches)
        trained = int(batch["loss_mask"].sum())
        # losses = cross_entropy(model(batch["tokens"]), batch["labels"]); the divisor is of all
        # ranks loss = (losses * batch["loss_mask"]).sum() / max(trained, 1)
        print(
            f"tokens {batch['tokens'].dtype}{list(batch['tokens'].shape)}, {trained} slots trained"
        )

    # The state is a few numbers; one rank's serves all, at any world size and batch size.
    state = json.loads(json.dumps(batches.state_dict()))
    again = dataset.batches(2 * WORLD_SIZE * BATCH_SIZE, seed=1)
    again.load_state_dict(state)
    seen = next(again)["tokens"]

    going_on = [
        dataset.batches(BATCH_SIZE, seed=1, rank=rank, world_size=WORLD_SIZE)
        for rank in range(WORLD_SIZE)
    ]
    for iterator in going_on:
        iterator.load_state_dict(state)
    steps = [next(iterator)["tokens"] for _ in range(2) for iterator in going_on]
    assert np.array_equal(seen, np.concatenate(steps))
    print(
        f"one rank of {2 * WORLD_SIZE * BATCH_SIZE} goes on with the same rows as {WORLD_SIZE}"
        f" ranks of {BATCH_SIZE}"
    )

    # Attention: boundaries for a kernel of variable lengths, and how far each slot's prefix
    # reaches.
    row = dataset.row(0)
    print(
        f"row 0: {row.n_segments} segments, longest {row.max_seqlen}, cu_seqlens"
        f" {row.cu_seqlens.tolist()[:6]} …"
    )
    assert row.prefix_ends.shape == (dataset.seq_length,)


if __name__ == "__main__":
    main(*sys.argv[1:])
