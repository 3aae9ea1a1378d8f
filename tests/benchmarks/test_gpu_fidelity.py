"""The judge of kernels, on a CPU by a dense mask; what it hands the kernels of a GPU is read here
by plain loops."""

import sys
from types import ModuleType

import pytest

torch = pytest.importorskip(
    "torch", reason="torch is not installed: pip install '.[trainers]'", exc_type=ImportError
)

from benchmarks import gpu_fidelity
from packprep.adapters.torch import tensors
from tests.adapters import rows_made
from tests.adapters.rows_made import Segment

pytestmark = pytest.mark.long

SMALL = [
    "--device",
    "cpu",
    "--seq-length",
    "128",
    "--rows",
    "3",
    "--width",
    "64",
    "--layers",
    "1",
    "--steps",
    "1",
]
ROWS = [
    [Segment("causal", 9, gap=3), Segment("causal", 4)],
    [Segment("causal", 7, gap=1), Segment("causal", 12, gap=2)],
]


def test_rows_equal_documents_alone_and_a_mask_that_lets_others_in_is_seen(monkeypatch, capsys):
    assert gpu_fidelity.main(SMALL) == 0
    out = capsys.readouterr().out
    assert (
        "SDPA, dense mask: logits" in out
        and "tokens/s" in out
        and "flash_attn varlen: not measured" in out
    )

    def causal(batch, device):
        return lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True
        )

    monkeypatch.setitem(
        gpu_fidelity.WAYS, "SDPA, dense mask", gpu_fidelity.Way(causal, "torch", ("cpu",))
    )
    assert gpu_fidelity.main(SMALL) == 1


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (
        gpu_fidelity.main([]) == 0 and capsys.readouterr().out == "not measured: no CUDA device\n"
    )


def by_loops(q, k, v, real, physical):
    """[slots, heads · head_dim]: causal attention of each sequence, whose place is physical, and
    its length real."""
    out = torch.full((len(q), q[0].numel()), float("nan"))
    for i in range(len(real) - 1):
        at = slice(int(physical[i]), int(physical[i]) + int(real[i + 1] - real[i]))
        own = [x[at].transpose(0, 1)[None] for x in (q, k, v)]
        made = torch.nn.functional.scaled_dot_product_attention(*own, is_causal=True)
        out[at] = made[0].transpose(0, 1).flatten(1)
    return out


@pytest.fixture
def kernels(monkeypatch):
    """Modules with the kernels' names and arguments."""

    class DotProductAttention:
        def __init__(self, heads, head_dim, qkv_format, attn_mask_type):
            assert (qkv_format, attn_mask_type) == ("thd", "padding_causal")

        def __call__(self, q, k, v, *, cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q, **_):
            assert max_seqlen_q == int((cu_seqlens_q[1:] - cu_seqlens_q[:-1]).max())
            return by_loops(q, k, v, cu_seqlens_q, cu_seqlens_q_padded)

    def flash_attn_varlen_func(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal
    ):
        assert causal and torch.equal(cu_seqlens_q, cu_seqlens_k)
        return by_loops(q, k, v, cu_seqlens_q, cu_seqlens_q).unflatten(-1, q.shape[1:])

    for name, members in (
        ("transformer_engine", {}),
        ("transformer_engine.pytorch", {"DotProductAttention": DotProductAttention}),
        ("flash_attn", {"flash_attn_varlen_func": flash_attn_varlen_func}),
    ):
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("attend_of", [gpu_fidelity.flash_attn, gpu_fidelity.transformer_engine])
def test_kernels_are_told_where_segments_lie(kernels, attend_of):
    batch = tensors(rows_made.batch(ROWS, rows_made.LENGTH))
    q, k, v = torch.randn(3, 2, 2, rows_made.LENGTH, 8).unbind()
    real = (batch["segment_ids"] > 0)[:, None, :, None]
    expected = gpu_fidelity.dense(batch, "cpu")(q, k, v)
    mine = attend_of(batch, "cpu")(q, k, v)
    assert torch.allclose(torch.where(real, mine, 0), torch.where(real, expected, 0), atol=1e-6)
