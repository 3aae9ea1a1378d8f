"""A small decoder whose positions come from position_ids; how it attends is the caller's."""

import torch
from torch import nn

from tests.adapters.rows_made import VOCAB


class Decoder(nn.Module):
    """attend(layer, q, k, v), [B, heads, T, head_dim] each, gives the same shape."""

    def __init__(self, width=16, heads=2, layers=2, dtype=torch.float64, seed=0, vocab=VOCAB):
        super().__init__()
        torch.manual_seed(seed)
        self.heads = heads
        self.embed = nn.Embedding(vocab, width)
        self.mix = nn.ModuleList([nn.Linear(width, 3 * width) for _ in range(layers)])
        self.out = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.norm = nn.ModuleList([nn.LayerNorm(width) for _ in range(layers)])
        self.head = nn.Linear(width, vocab)
        self.to(dtype)

    def forward(self, tokens, position_ids, attend):
        x = self.embed(tokens)
        for i, (mix, out, norm) in enumerate(zip(self.mix, self.out, self.norm, strict=True)):
            q, k, v = mix(norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            y = attend(i, rotated(q, position_ids), rotated(k, position_ids), v)
            x = x + out(y.transpose(1, 2).flatten(2))
        return self.head(x)


def rotated(x, position_ids):
    """Rotary embedding of [B, heads, T, d] by position."""
    half = x.shape[-1] // 2
    angles = position_ids[:, None, :, None] * 100.0 ** (
        -torch.arange(half, device=x.device, dtype=x.dtype) / half
    )
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)
