"""A packed row gives what its documents give alone: logits and gradients, by every way to attend."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[trainers]'")

import numpy as np
from torch.nn.functional import scaled_dot_product_attention

from packprep import open_dataset
from packprep.adapters import torch_attention
from packprep.adapters.torch import loader, tensors
from packprep.adapters.torch_loss import masked_loss
from packprep.dataset import attention
from tests.adapters import rows_made
from tests.adapters.decoder import Decoder
from tests.adapters.rows_made import LENGTH, Segment
from tests.dataset.synthetic import make_dataset

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
NAN = float("nan")
LONG = [[Segment("causal", 3000), Segment("causal", 17), Segment("causal", 4000)], [Segment("causal", 4100)]]
LONG_PREFIX = [[Segment("prefix", 4100, 2000), Segment("both_ways", 33), Segment("blocks", 4000, 32)]]


def alone(model, batch, rows):
    """(logits [B, T, vocab] with NaN on padding, loss): each document by itself under its own rule."""
    logits = torch.full((*batch["tokens"].shape, rows_made.VOCAB), NAN, dtype=next(model.parameters()).dtype)
    total, trained = 0.0, 0
    for r, begin, segment in rows_made.places(rows):
        at = slice(begin, begin + segment.length)
        own_mask = {"attn_mask": torch.from_numpy(document_mask(segment))}
        if segment.rule == "causal":
            own_mask = {"is_causal": True}

        def attend(_, q, k, v, own_mask=own_mask):
            return scaled_dot_product_attention(q, k, v, **own_mask)

        own = model(batch["tokens"][None, r, at], batch["position_ids"][None, r, at], attend)[0]
        logits[r, at] = own.detach()
        on = batch["loss_mask"][r, at]
        total = total + torch.nn.functional.cross_entropy(own[on], batch["labels"][r, at][on], reduction="sum")
        trained += int(on.sum())
    return logits, total / max(1, trained)


def document_mask(segment):
    """rows_made.seen, or the same by whole rows where it would be long."""
    n = segment.length
    if n <= 100:
        return rows_made.seen(segment)
    q, k = np.arange(n)[:, None], np.arange(n)
    if segment.rule == "blocks":
        half, (q_half, k_half) = n // 2, (q >= n // 2, k >= n // 2)
        q_block, k_block = q % half // segment.size, k % half // segment.size
        same = (q_half == k_half) & (q_block == k_block)
        return same | (~q_half & k_half & (k_block < q_block)) | (q_half & k_half & (k_block < q_block))
    return (k <= q) | (k < {"causal": 0, "prefix": segment.size, "both_ways": n}[segment.rule])


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


def assert_equal(model, batch, rows, attend, grad=True, form=lambda values: values):
    """Logits of real slots and, with `grad`, the gradients of the loss equal the documents' own; `form`: the layout."""
    expected, loss = alone(model, batch, rows)
    shape = expected.shape
    with torch.set_grad_enabled(grad):
        packed = model(form(batch["tokens"]), form(batch["position_ids"]), attend).view(shape)
    real = batch["segment_ids"] > 0
    torch.testing.assert_close(packed[real], expected[real], atol=1e-5, rtol=1e-5)
    if grad:
        # Padding's outputs are whatever a kernel left there: nothing of them may reach loss or gradient.
        poisoned = torch.where(real[..., None], packed, NAN)
        for mine, theirs in zip(gradients(model, masked_loss(poisoned, batch)), gradients(model, loss), strict=True):
            assert torch.isfinite(mine).all()
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def by_sdpa(batch):
    mask = torch_attention.sdpa_mask(batch)
    return lambda _, q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask)


def by_flex(batch):
    from torch.nn.attention.flex_attention import flex_attention

    blocks = torch_attention.flex_block_mask(batch)
    return lambda _, q, k, v: flex_attention(q, k, v, block_mask=blocks)


def by_varlen(batch):
    """A plain kernel that takes flash attention's keywords, and leaves what no sequence covers unwritten."""
    keywords = torch_attention.flash_varlen(batch)
    begins = keywords["cu_seqlens_q"].tolist()
    assert max(np.diff(begins)) == keywords["max_seqlen_q"]

    def attend(_, q, k, v):
        q, k, v = (x.transpose(1, 2).flatten(0, 1).transpose(0, 1) for x in (q, k, v))  # [heads, slots, head_dim]
        out = [torch.full_like(q[:, : begins[0]], NAN)]
        for begin, end in zip(begins[:-1], begins[1:], strict=True):
            own = (x[None, :, begin:end] for x in (q, k, v))
            out.append(scaled_dot_product_attention(*own, is_causal=keywords["causal"])[0])
        out.append(torch.full_like(q[:, begins[-1] :], NAN))
        return torch.cat(out, 1)[None]

    return attend


@pytest.mark.parametrize("name", rows_made.ALL)
def test_by_sdpa(name):
    rows = rows_made.ALL[name]
    batch = tensors(rows_made.batch(rows, LENGTH))
    assert_equal(Decoder(), batch, rows, by_sdpa(batch))


@pytest.mark.parametrize("name", rows_made.ALL)
def test_by_flex_attention_forward(name):
    rows = rows_made.ALL[name]
    batch = tensors(rows_made.batch(rows, LENGTH))
    assert_equal(Decoder(), batch, rows, by_flex(batch), grad=False)


@pytest.mark.parametrize("name", ["causal", "both_ways", "gaps"])
def test_by_varlen_keywords(name):
    rows = rows_made.ALL[name]
    batch = tensors(rows_made.batch(rows, LENGTH))
    assert_equal(Decoder(), batch, rows, by_varlen(batch), form=lambda values: values.reshape(1, -1))


def test_this_test_can_fail():
    batch = tensors(rows_made.batch(rows_made.PREFIX, LENGTH))
    mask = torch_attention.sdpa_mask(batch, prefix_bidirectional=False)
    with pytest.raises(AssertionError, match="not close"):
        assert_equal(
            Decoder(), batch, rows_made.PREFIX, lambda _, q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask)
        )


# Rows of 8192 and more slots, in float32


@pytest.mark.long
def test_long_rows_by_varlen_keywords():
    batch = tensors(rows_made.batch(LONG, 8192))
    model = Decoder(dtype=torch.float32, heads=1, layers=1)
    assert_equal(model, batch, LONG, by_varlen(batch), form=lambda values: values.reshape(1, -1))


@pytest.mark.long
@pytest.mark.parametrize("way, grad", [(by_sdpa, True), (by_flex, False)])
def test_long_rows_of_every_rule(way, grad):
    batch = tensors(rows_made.batch(LONG_PREFIX, 8192))
    assert_equal(Decoder(dtype=torch.float32, heads=1, layers=1), batch, LONG_PREFIX, way(batch), grad)


# Micro-sequences: a row in windows, with the keys and values of those before


@pytest.mark.parametrize("size", [1, 5, 8, 28])
def test_a_causal_row_in_micro_sequences_with_a_cache_of_keys_and_values(size):
    rows = [rows_made.CAUSAL[0]]
    batch = tensors(rows_made.batch(rows, LENGTH))
    cu_seqlens = np.append(0, np.cumsum([segment.length for segment in rows[0]]))
    model, logits, cache = Decoder(), [], {}
    for begin in range(0, LENGTH, size):
        end = min(begin + size, LENGTH)
        window = attention.micro_sequence(cu_seqlens, begin, end)
        mask = torch.from_numpy(attention.dense_mask(batch["segment_ids"][0].numpy(), window=window))

        def attend(layer, q, k, v, window=window, mask=mask, end=end):
            if layer in cache:
                k, v = torch.cat((cache[layer][0], k), 2), torch.cat((cache[layer][1], v), 2)
            cache[layer] = k, v
            keys = slice(window.first_document_begin, end)
            # Bottom-right causal inside documents is what the boundaries of the window say.
            parts = []
            for i in range(len(window.cu_seqlens_q) - 1):
                (q0, q1), (k0, k1) = window.cu_seqlens_q[i : i + 2], window.cu_seqlens_k[i : i + 2]
                own = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(int((k1 - k0) - (q1 - q0)))
                assert torch.equal(mask[q0:q1, k0:k1], own)
                parts.append(
                    scaled_dot_product_attention(
                        q[:, :, q0:q1], k[:, :, keys][:, :, k0:k1], v[:, :, keys][:, :, k0:k1], attn_mask=own
                    )
                )
            return torch.cat(parts, 2)

        positions = torch.from_numpy(window.position_ids.astype(np.int64))[None]
        logits.append(model(batch["tokens"][:, begin:end], positions, attend))
    packed = torch.cat(logits, 1)
    expected, loss = alone(model, batch, rows)
    real = batch["segment_ids"] > 0
    torch.testing.assert_close(packed[real], expected[real], atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(gradients(model, masked_loss(packed, batch)), gradients(model, loss), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


# State-space layers, whose state ends where seq_idx changes


class Scan(torch.nn.Module):
    """Mamba's causal convolution and selective scan, slot by slot; both begin anew where seq_idx changes."""

    def __init__(self, width=8, states=4, taps=4):
        super().__init__()
        torch.manual_seed(1)
        self.embed = torch.nn.Embedding(528, width)
        self.taps = torch.nn.Parameter(torch.randn(taps, width))
        self.chosen = torch.nn.Linear(width, width + 2 * states)  # time step, input and output matrix of each slot
        self.decay = torch.nn.Parameter(torch.randn(width, states))
        self.states = states
        self.double()

    def forward(self, tokens, seq_idx):
        x, back = self.embed(tokens), torch.arange(tokens.shape[1])
        mixed = torch.zeros_like(x)
        for tap, weight in enumerate(self.taps):
            there = (back - tap).clamp(min=0)
            same = (seq_idx[:, there] == seq_idx) & (back >= tap)
            mixed = mixed + weight * x[:, there] * same[..., None]
        step, into, out = self.chosen(mixed).split([x.shape[-1], self.states, self.states], -1)
        step = torch.nn.functional.softplus(step)
        state, outputs = x.new_zeros(len(x), x.shape[-1], self.states), []
        for t in range(tokens.shape[1]):
            goes_on = seq_idx[:, t] == seq_idx[:, max(t - 1, 0)]
            kept = torch.exp(-step[:, t, :, None] * self.decay.exp()) * goes_on[:, None, None]
            state = kept * state + step[:, t, :, None] * into[:, t, None] * mixed[:, t, :, None]
            outputs.append((state * out[:, t, None]).sum(-1))
        return torch.stack(outputs, 1)


@pytest.mark.parametrize("layout, pad_to", [("bshd", 1), ("bshd", 8), ("thd", 8)])
def test_a_selective_scan_by_seq_idx(tmp_path, layout, pad_to):
    make_dataset(tmp_path, (4,), pad_to=pad_to)
    dataset = open_dataset(tmp_path).with_loss_on(task="causal")
    columns = ["tokens", "segment_ids", "seq_idx"]
    batch = next(loader(dataset, 4, layout=layout, columns=columns))
    model, compared = Scan(), 0
    with torch.no_grad():
        packed = model(batch["tokens"], batch["seq_idx"])
        leaking = model(batch["tokens"], torch.zeros_like(batch["seq_idx"]))
        for row, ids in enumerate(batch["segment_ids"]):
            for segment in ids[ids > 0].unique():
                own = ids == segment
                tokens = batch["tokens"][row, own][None]
                expected = model(tokens, torch.zeros_like(tokens))[0]
                torch.testing.assert_close(packed[row, own], expected, atol=1e-5, rtol=1e-5)
                compared += not torch.allclose(leaking[row, own], expected, atol=1e-5, rtol=1e-5)
    assert compared > 4  # without seq_idx, segments behind another one are others
