"""What needs a GPU: the kernels themselves with the adapter's keywords. Nothing else depends on
it."""

import time

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[trainers]'")

from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_fidelity import WAYS
from packprep.adapters import torch_attention
from packprep.adapters.torch import loader, tensors
from tests.adapters import rows_made
from tests.adapters.rows_made import Segment
from tests.dataset import synthetic

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False"
)

HEADS, HEAD_DIM, LENGTH = 2, 64, 512
ROWS = {
    "causal": [
        [Segment("causal", 200), Segment("causal", 1), Segment("causal", 211)],
        [Segment("causal", 512)],
        [],
    ],
    "prefix": [[Segment("prefix", 300, 150), Segment("causal", 77)], [Segment("prefix", 500, 3)]],
    "both_ways": [[Segment("both_ways", 200), Segment("both_ways", 312)]],
    "mixed": [[Segment("blocks", 256, 32), Segment("prefix", 100, 30)], [Segment("both_ways", 80)]],
}


def inputs(n_rows):
    """q, k, v and the gradient of the output, bfloat16[B, heads, T, head_dim]."""
    torch.manual_seed(0)
    made = [
        torch.randn(n_rows, HEADS, LENGTH, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for _ in range(4)
    ]
    return [x.requires_grad_() for x in made[:3]], made[3]


def outcomes(attend, n_rows, real):
    """Output and gradients in float32, of the real slots."""
    (q, k, v), gradient = inputs(n_rows)
    out = attend(q, k, v)
    gradient = gradient * real[:, None, :, None]
    return [
        x.float() * real[:, None, :, None]
        for x in (out, *torch.autograd.grad(out, (q, k, v), gradient))
    ]


def reference(batch, n_rows):
    """SDPA in float32 with the dense mask, which the tests without a GPU hold against the documents
    alone."""
    mask = torch_attention.sdpa_mask(batch)

    def attend(q, k, v):
        return scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=mask).to(
            q.dtype
        )

    return outcomes(attend, n_rows, batch["segment_ids"] > 0)


def assert_close(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b, atol=3e-2, rtol=3e-2)


def on_gpu(rows):
    batch = tensors(rows_made.batch(rows, LENGTH))
    return batch, {name: value.cuda() for name, value in batch.items()}


@pytest.mark.parametrize(
    "way, names",
    [
        ("torch.nn.attention.varlen", ["causal", "both_ways"]),
        ("flash_attn varlen", ["causal", "both_ways"]),
        ("FlexAttention, compiled", ["causal", "prefix", "both_ways", "mixed"]),
        ("TransformerEngine THD", ["causal"]),
    ],
)
def test_kernels_with_the_adapter_s_arguments_see_what_the_dense_mask_says(way, names):
    pytest.importorskip(WAYS[way].module, reason=f"{WAYS[way].module} is not installed")
    for name in names:
        on_cpu, batch = on_gpu(ROWS[name])
        n_rows = len(ROWS[name])
        mine = outcomes(WAYS[way].attend(on_cpu, "cuda"), n_rows, batch["segment_ids"] > 0)
        assert_close(mine, reference(batch, n_rows))


def test_batches_in_pinned_memory_reach_the_gpu(tmp_path):
    synthetic.make_dataset(tmp_path, (9,))
    pinned, plain = loader(tmp_path, 4, pin_memory=True), loader(tmp_path, 4)
    for _ in range(20):
        batch, expected = next(pinned), next(plain)
        assert batch["tokens"].is_pinned()
        copied = {
            name: batch[name].to("cuda", non_blocking=True)
            for name in ("tokens", "labels", "loss_mask")
        }
        assert all(torch.equal(value.cpu(), expected[name]) for name, value in copied.items())


def test_the_loader_s_share_of_a_step_is_reported(tmp_path, record_property, capsys):
    """A step of a model of some size; the share is printed, and no test depends on its value."""
    synthetic.make_dataset(tmp_path, (64,), seq_length=2048)
    model = torch.nn.TransformerEncoderLayer(
        1024, 16, 4096, batch_first=True, device="cuda", dtype=torch.bfloat16
    )
    embed = torch.nn.Embedding(528, 1024, device="cuda", dtype=torch.bfloat16)
    batches = loader(tmp_path, 8, pin_memory=True)
    loading, begin = 0.0, 0.0
    for step in range(25):
        if step == 5:
            torch.cuda.synchronize()
            begin, loading = time.perf_counter(), 0.0
        before = time.perf_counter()
        batch = next(batches)
        loading += time.perf_counter() - before
        tokens = batch["tokens"].to("cuda", non_blocking=True)
        for _ in range(4):
            model(embed(tokens)).float().mean().backward()
    torch.cuda.synchronize()
    share = loading / (time.perf_counter() - begin)
    record_property("loader_share", share)
    with capsys.disabled():
        print(f"\nloader's share of a step on {torch.cuda.get_device_name()}: {100 * share:.2f} %")
