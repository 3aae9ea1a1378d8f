"""Train a small decoder on a packed dataset, on the GPU if there is one; stop it anywhere and start
it again.

    packprep build examples/quickstart.toml --out packed
    python examples/train_torch.py packed --checkpoint model.pt

Any mix of tasks works, `--tasks llada` in the first command too: which slots see each other, which
are trained and with what weight all come with the batch. A run that was killed goes on from its
checkpoint with the rows, and so the losses, that it would have had.

Datasets of several seq_lengths are trained together by their mixture.json, each step on rows of one
length:

    python examples/train_torch.py mixture.json --batch-tokens 8192
"""

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from packprep import open_dataset
from packprep.adapters.torch import loader
from packprep.adapters.torch_attention import flex_block_mask, sdpa_mask
from packprep.adapters.torch_loss import masked_loss


class Layer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.mix, self.out = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x, angles, attend):
        q, k, v = (
            self.mix(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )
        x = x + self.out(
            attend(rotated(q, angles), rotated(k, angles), v).transpose(1, 2).flatten(2)
        )
        return x + self.mlp(self.norms[1](x))


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary positions. They begin again in every segment, as position_ids do."""
    a, b = x.chunk(2, -1)
    return torch.cat(
        (a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1
    ).type_as(x)


class Decoder(nn.Module):
    def __init__(self, vocab_size: int, width: int, n_layers: int, heads: int):
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocab_size, width), nn.RMSNorm(width)
        self.layers = nn.ModuleList([Layer(width, heads) for _ in range(n_layers)])
        self.head = nn.Linear(width, vocab_size, bias=False)
        half = width // heads // 2
        self.register_buffer("speed", 10_000.0 ** (-torch.arange(half) / half))

    def forward(self, batch, attend):
        """Logits of the trained slots alone, in order: the head does no work on the others."""
        angles = batch["position_ids"][:, None, :, None] * self.speed
        x = self.embed(batch["tokens"])
        for layer in self.layers:
            x = layer(x, angles, attend)
        return self.head(self.norm(x[batch["loss_mask"]]))


def attention_of(batch, compiled_flex):
    """How this batch attends: a dense mask, or on a GPU FlexAttention, which skips the blocks that
    nothing sees."""
    if compiled_flex is None:
        mask = sdpa_mask(batch)
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask)
    blocks = flex_block_mask(batch)
    return lambda q, k, v: compiled_flex(q, k, v, block_mask=blocks)


def save(path: Path, checkpoint: dict) -> None:
    """The file appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", help="of a dataset, or a mixture.json")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument(
        "--batch-tokens",
        type=int,
        help="slots of a step in place of its rows, for rows of several lengths",
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="written every --save-every steps, and gone on from"
    )
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--device", default="auto", help="auto: the GPU if there is one")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    given = parser.parse_args(arguments)
    device = (
        given.device if given.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    )
    on_gpu = device.startswith("cuda")

    torch.manual_seed(0)
    dataset, batch_size = open_dataset(given.directory), given.batch_size
    if given.batch_tokens:
        lengths = dataset.seq_lengths or (dataset.seq_length,)
        batch_size = {length: max(1, given.batch_tokens // length) for length in lengths}
    batches = loader(dataset, batch_size, seed=0, pin_memory=on_gpu)
    model = Decoder(dataset.vocab_size, given.width, given.layers, given.heads).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.learning_rate)
    compiled_flex = None
    if on_gpu:
        from torch.nn.attention.flex_attention import flex_attention

        compiled_flex = torch.compile(flex_attention)
    step = 0
    if given.checkpoint and given.checkpoint.exists():
        checkpoint = torch.load(given.checkpoint, map_location=device)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        batches.load_state_dict(checkpoint["batches"])
        step = checkpoint["step"]
        print(f"going on after step {step}", flush=True)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters on {device}", flush=True)

    begin, loading = time.perf_counter(), 0.0
    first = step
    while step < given.steps:
        before = time.perf_counter()
        batch = next(batches)
        loading += time.perf_counter() - before
        # With several ranks, the sums of all ranks: all_reduce a tensor of them.
        denominator = batch["loss_weight_sum"]
        batch = {
            name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }
        with torch.autocast(device, torch.bfloat16, enabled=on_gpu):
            logits = model(batch, attention_of(batch, compiled_flex))
        loss = masked_loss(logits, batch, denominator)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        print(f"step {step:>5}  loss {loss.item():.6f}  trained {batch['n_trained']}", flush=True)
        if given.checkpoint and (step % given.save_every == 0 or step == given.steps):
            save(
                given.checkpoint,
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "batches": batches.state_dict(),
                    "step": step,
                },
            )
    if step > first:
        whole = time.perf_counter() - begin
        print(
            f"{1000 * whole / (step - first):.1f} ms a step, {100 * loading / whole:.2f} % of it"
            " for its batch"
        )


if __name__ == "__main__":
    main()
