"""Whether kernels on a GPU give packed rows what each document has alone, and what packing gains
there.

python benchmarks/gpu_fidelity.py                     on a GPU; without one it says so, and ends with status 0
python benchmarks/gpu_fidelity.py --device cpu        the same by a dense mask: the logic, not a figure

A dataset of Python's own sources is built, and a small decoder of random weights runs over its
rows, in bfloat16 on a GPU. Its logits and gradients are compared with those of each document alone
in float32. Tokens a second are those of a step forward and back over packed rows, and over the same
documents a row each, padded to the longest. Exit status 1 where a way is further from the documents
alone than the kernels' own rounding.
"""

import argparse
import json
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from packprep.adapters import torch_attention
from packprep.adapters.torch import loader
from packprep.adapters.torch_loss import masked_loss
from packprep.dataset.attention import thd
from tests.adapters.decoder import Decoder

Batch = Mapping[str, torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
HEAD_DIM, PAD_TO = 64, 16
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of the largest value


# ── ways to attend: a batch on the CPU and a device → attend(q, k, v), [B, heads, T, head_dim] each ───────────────────────


def dense(batch: Batch, device: str) -> Attend:
    """SDPA with a dense mask."""
    mask = torch_attention.sdpa_mask(batch).to(device)
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _flat(attend: Callable[..., torch.Tensor], keywords: Mapping[str, Any], device: str) -> Attend:
    """A varlen kernel, which takes rows one after the other."""
    there = {
        name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in keywords.items()
    }

    def rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        return (
            attend(*flat, **there)
            .reshape(q.shape[0], q.shape[2], *q.shape[1:2], -1)
            .transpose(1, 2)
        )

    return rows


def torch_varlen(batch: Batch, device: str) -> Attend:
    """torch.nn.attention.varlen."""
    from torch.nn.attention.varlen import varlen_attn

    return _flat(varlen_attn, torch_attention.torch_varlen(batch), device)


def flash_attn(batch: Batch, device: str) -> Attend:
    """flash_attn's varlen function."""
    from flash_attn import flash_attn_varlen_func

    return _flat(flash_attn_varlen_func, torch_attention.flash_varlen(batch), device)


def flex(batch: Batch, device: str) -> Attend:
    """FlexAttention, compiled, with the block mask."""
    from torch.nn.attention.flex_attention import flex_attention

    blocks = torch_attention.flex_block_mask(
        {name: values.to(device) for name, values in batch.items()}
    )
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=blocks)


def transformer_engine(batch: Batch, device: str) -> Attend:
    """TransformerEngine's THD layout with padding between segments: lengths are real, places
    physical."""
    from transformer_engine.pytorch import DotProductAttention

    ids = batch["segment_ids"].numpy()
    seqlens, offsets = thd(ids, int(ids.max()))
    length = ids.shape[1]
    real, physical = [0], [0]
    for r in range(len(ids)):
        own = offsets[r][offsets[r] >= 0][: int(ids[r].max())]
        for n, end in zip(seqlens[r], [*own[1:], length], strict=False):
            real.append(real[-1] + int(n))
            physical.append(r * length + int(end))
    cu_seqlens, cu_padded = (torch.tensor(x, dtype=torch.int32) for x in (real, physical))
    longest = int(seqlens.max())
    kernels: dict[int, Any] = {}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **keywords: Any) -> torch.Tensor:
        kernel = kernels.setdefault(
            q.shape[1],
            DotProductAttention(
                q.shape[1], q.shape[2], qkv_format="thd", attn_mask_type="padding_causal"
            ),
        )
        return kernel(q, k, v, max_seqlen_q=longest, max_seqlen_kv=longest, **keywords)

    keywords = {f"cu_seqlens_{name}": cu_seqlens for name in ("q", "kv")}
    return _flat(
        attend,
        {**keywords, **{f"cu_seqlens_{name}_padded": cu_padded for name in ("q", "kv")}},
        device,
    )


class Way(NamedTuple):
    attend: Callable[[Batch, str], Attend]
    module: str  # that it needs
    devices: tuple[str, ...] = ("cuda",)


WAYS = {
    "SDPA, dense mask": Way(dense, "torch", ("cuda", "cpu")),
    "torch.nn.attention.varlen": Way(torch_varlen, "torch"),
    "flash_attn varlen": Way(flash_attn, "flash_attn"),
    "FlexAttention, compiled": Way(flex, "torch"),
    "TransformerEngine THD": Way(transformer_engine, "transformer_engine"),
}


# ── what they are compared with ──────────────────────────────────────────────────────────────────────────────────────────


class Outcome(NamedTuple):
    logits: torch.Tensor  # float32[real slots, vocab_size]
    gradients: torch.Tensor  # float32[parameters]


def spans(batch: Batch) -> list[tuple[int, slice]]:
    """(row, slots) of each segment."""
    found = []
    for r, ids in enumerate(batch["segment_ids"]):
        for number in range(1, int(ids.max()) + 1):
            at = torch.nonzero(ids == number).flatten()
            found.append((r, slice(int(at[0]), int(at[-1]) + 1)))
    return found


def packed(model: Decoder, batch: Batch, attend: Attend, device: str) -> Outcome:
    """Logits and gradients of a step over rows as they are."""
    there = {name: values.to(device) for name, values in batch.items()}
    real = there["segment_ids"] > 0
    # behind a kernel that leaves padding unwritten, 0 · NaN is NaN
    logits = model(
        there["tokens"],
        there["position_ids"],
        lambda _, q, k, v: torch.where(real[:, None, :, None], attend(q, k, v), 0),
    )
    gradients = torch.autograd.grad(masked_loss(logits, there), list(model.parameters()))
    return Outcome(
        logits[real].detach().float(), torch.cat([g.flatten().float() for g in gradients])
    )


def alone(model: Decoder, batch: Batch, device: str) -> Outcome:
    """The same of each document by itself, in float32."""
    exact = Decoder(**sizes(model), dtype=torch.float32).to(device)
    exact.load_state_dict({name: values.float() for name, values in model.state_dict().items()})
    logits, total, trained = [], torch.zeros((), device=device), 0
    for row, at in spans(batch):
        own = {name: values[row, at][None].to(device) for name, values in batch.items()}
        given = exact(
            own["tokens"],
            own["position_ids"],
            lambda _, q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
        )
        n = int((own["loss_mask"] > 0).sum())
        if n:
            total = total + masked_loss(given, own) * n
        trained += n
        logits.append(given[0].detach())
    gradients = torch.autograd.grad(total / trained, list(exact.parameters()))
    return Outcome(torch.cat(logits), torch.cat([g.flatten() for g in gradients]))


def sizes(model: Decoder) -> dict[str, int]:
    return {
        "width": model.embed.embedding_dim,
        "heads": model.heads,
        "layers": len(model.mix),
        "vocab": model.embed.num_embeddings,
    }


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, in units of the largest value."""
    assert torch.isfinite(one).all()
    return float((one - other).abs().max() / other.abs().max())


def padded(batch: Batch) -> dict[str, torch.Tensor]:
    """The documents of a batch, a row each, padded to the longest: what is not packed."""
    found = spans(batch)
    longest = max(at.stop - at.start for _, at in found)
    made = {
        name: torch.zeros(len(found), longest, dtype=batch[name].dtype)
        for name in ("tokens", "position_ids")
    }
    made |= {
        name: torch.zeros(len(found), longest, dtype=batch[name].dtype)
        for name in ("labels", "loss_mask")
    }
    made["segment_ids"] = torch.zeros(len(found), longest, dtype=batch["segment_ids"].dtype)
    for i, (row, at) in enumerate(found):
        for name, values in made.items():
            values[i, : at.stop - at.start] = 1 if name == "segment_ids" else batch[name][row, at]
    return made


def tokens_a_second(model: Decoder, batch: Batch, attend: Attend, device: str, steps: int) -> float:
    """Real tokens of steps forward and back, after one that warms up."""

    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    packed(model, batch, attend, device)
    synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        packed(model, batch, attend, device)
    synchronize()
    return steps * int((batch["segment_ids"] > 0).sum()) / (time.perf_counter() - begin)


def build(folder: Path, seq_length: int, documents: int) -> Path:
    """Rows of the standard library's definitions, some to a row, with padding between them."""
    texts: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        texts += [
            text
            for text in re.split(r"\n\n+", path.read_text("utf-8"))
            if 20 < len(text) < seq_length // 3
        ]
        if len(texts) > documents:
            break
    (folder / "in.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts[:documents])
    )
    options = [
        "--tasks",
        "causal",
        "--seq-length",
        seq_length,
        "--set",
        f"packing.pad_seq_to_mult={PAD_TO}",
    ]
    command = [
        sys.executable,
        "-m",
        "packprep",
        "build",
        folder / "in.jsonl",
        *options,
        "--out",
        folder / "packed",
    ]
    subprocess.run(list(map(str, command)), check=True, capture_output=True, cwd=ROOT)
    return folder / "packed"


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args(given)
    device = options.device
    if device == "cuda" and not torch.cuda.is_available():
        print("not measured: no CUDA device")
        return 0
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    name = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else platform.processor() or platform.machine()
    )
    with tempfile.TemporaryDirectory() as folder:
        packs = build(
            Path(folder), options.seq_length, documents=options.rows * options.seq_length // 20
        )
        batches = loader(packs, options.rows)
        batch, vocab = next(batches), batches.dataset.vocab_size
    batch = {
        name: values
        for name, values in batch.items()
        if torch.is_tensor(values) and values.ndim == 2
    }
    heads = options.width // HEAD_DIM
    model = Decoder(options.width, heads, options.layers, dtype, vocab=vocab).to(device)
    expected = alone(model, batch, device)
    unpacked = padded(batch)
    slots, real = batch["tokens"].numel(), int((batch["segment_ids"] > 0).sum())
    print(f"{name}, torch {torch.__version__}, {str(dtype).removeprefix('torch.')}")
    print(
        f"{len(spans(batch))} documents: packed {real / slots:.1%} of {slots:,} slots filled,"
        f" padded {real / unpacked['tokens'].numel():.1%} of {unpacked['tokens'].numel():,}"
    )
    plain = tokens_a_second(
        model,
        unpacked,
        lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
        device,
        options.steps,
    )
    print(f"padded rows, causal SDPA: {plain:,.0f} tokens/s")
    wrong = 0
    for way, (attend_of, module, devices) in WAYS.items():
        if device not in devices or find_spec(module) is None:
            print(
                f"{way}: not measured: "
                + ("it needs a GPU" if device not in devices else f"{module} is not installed")
            )
            continue
        attend = attend_of(batch, device)
        its = packed(model, batch, attend, device)
        logits, gradients = (
            apart(its.logits, expected.logits),
            apart(its.gradients, expected.gradients),
        )
        rate = tokens_a_second(model, batch, attend, device, options.steps)
        print(
            f"{way}: logits {logits:.1e}, gradients {gradients:.1e} from each document alone;"
            f" {rate:,.0f} tokens/s, {rate / plain:.2f} × padded"
        )
        wrong += max(logits, gradients) > TOLERANCE[dtype]
    print(
        "TransformerEngine, context parallelism: not measured: it needs a process for each of"
        " several GPUs"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
