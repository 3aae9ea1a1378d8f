"""A packed row gives what its documents give alone: logits and gradients, by every way to
attend."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[trainers]'")

import numpy as np
from torch.nn.functional import scaled_dot_product_attention

from packprep import open_dataset
from packprep.adapters import default_columns, torch_attention
from packprep.adapters.torch import DTYPES, loader, tensors
from packprep.adapters.torch_loss import automodel_loss_inputs, masked_loss
from packprep.dataset import attention
from packprep.dataset.epochs.noise import quantised
from packprep.randomness import NOISE_LEVEL, uniforms
from tests import made
from tests.adapters import chats_made, rows_made
from tests.adapters.decoder import Decoder
from tests.adapters.rows_made import LENGTH, Segment
from tests.dataset.synthetic import make_dataset
from tests.twin.objectives import block_diffusion as twin
from tests.verification.test_epochs import BLOCKS

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
NAN = float("nan")
LONG = [
    [Segment("causal", 3000), Segment("causal", 17), Segment("causal", 4000)],
    [Segment("causal", 4100)],
]
LONG_PREFIX = [
    [Segment("prefix", 4100, 2000), Segment("both_ways", 33), Segment("blocks", 4000, 32)]
]


def alone(model, batch, rows):
    """(logits [B, T, vocab] with NaN on padding, loss): each document by itself under its own
    rule."""
    logits = torch.full(
        (*batch["tokens"].shape, rows_made.VOCAB), NAN, dtype=next(model.parameters()).dtype
    )
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
        total = total + torch.nn.functional.cross_entropy(
            own[on], batch["labels"][r, at][on], reduction="sum"
        )
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
        return (
            same
            | (~q_half & k_half & (k_block < q_block))
            | (q_half & k_half & (k_block < q_block))
        )
    return (k <= q) | (k < {"causal": 0, "prefix": segment.size, "both_ways": n}[segment.rule])


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


def assert_equal(model, batch, rows, attend, grad=True, form=lambda values: values):
    """Logits of real slots and, with `grad`, the gradients of the loss equal the documents' own;
    `form`: the layout."""
    expected, loss = alone(model, batch, rows)
    shape = expected.shape
    with torch.set_grad_enabled(grad):
        packed = model(form(batch["tokens"]), form(batch["position_ids"]), attend).view(shape)
    real = batch["segment_ids"] > 0
    torch.testing.assert_close(packed[real], expected[real], atol=1e-5, rtol=1e-5)
    if grad:
        # Padding's outputs are whatever a kernel left there: nothing of them may reach loss or
        # gradient.
        poisoned = torch.where(real[..., None], packed, NAN)
        for mine, theirs in zip(
            gradients(model, masked_loss(poisoned, batch)), gradients(model, loss), strict=True
        ):
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
    """A plain kernel that takes flash attention's keywords, and leaves what no sequence covers
    unwritten."""
    keywords = torch_attention.flash_varlen(batch)
    begins = keywords["cu_seqlens_q"].tolist()
    assert max(np.diff(begins)) == keywords["max_seqlen_q"]

    def attend(_, q, k, v):
        # [heads, slots, head_dim]
        q, k, v = (x.transpose(1, 2).flatten(0, 1).transpose(0, 1) for x in (q, k, v))
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
    assert_equal(
        Decoder(), batch, rows, by_varlen(batch), form=lambda values: values.reshape(1, -1)
    )


@pytest.mark.long
def test_this_test_can_fail():
    batch = tensors(rows_made.batch(rows_made.PREFIX, LENGTH))
    mask = torch_attention.sdpa_mask(batch, prefix_bidirectional=False)
    with pytest.raises(AssertionError, match="not close"):
        assert_equal(
            Decoder(),
            batch,
            rows_made.PREFIX,
            lambda _, q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask),
        )


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """A dataset with every law of block diffusion, causal segments between, and its rows in two
    epochs."""
    base = tmp_path_factory.mktemp("blocks")
    made.write_lines(base / "a.jsonl", made.texts(40, mean_bytes=60))
    tasks = [*BLOCKS, {"preset": "causal"}]
    made.build(
        made.table("a.jsonl", tasks=tasks, seq_length=256, documents={"prepend_bos": True}),
        base,
        base / "out",
    )
    return open_dataset(base / "out")


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Conversations with every noise schedule, both origins, and blocks that eos fills up or not.

    One conversation is cut inside an answer, some before a user's message, and some end with one.
    """
    made_chats = chats_made.build(tmp_path_factory.mktemp("chats"))
    dataset = made_chats.dataset
    rows = [dataset.row(r) for r in range(len(dataset))]
    assert made_chats.cut_answers and max(row.n_segments for row in rows) > 2
    assert {int(task) for row in rows for task in row.segments["task"]} >= set(
        range(len(chats_made.TASKS))
    )
    return made_chats


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("way", [by_sdpa, by_flex, None])
def test_every_law_of_blocks_gives_the_loss_of_each_document_as_its_trainer_takes_it(
    blocks, way, epoch
):
    """Alone: [x_t | x_0] under block_mask; a noised token is predicted at its own slot, or, with
    shift, by logits[i] against x_0[i + 1], and weighs 1 / level of its own block."""
    bos = blocks.manifest["specials"]["bos"]

    def before(row, k, clean):
        return int(row.segments["start"][k] == 0 and clean[0] == bos)

    assert_blocks_equal(blocks, range(8), way, epoch, before, lambda *_: None)


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("way", [by_sdpa, by_flex, None])
def test_packed_conversations_have_the_loss_of_each_conversation_alone(chats, way, epoch):
    """As above. Blocks start at answers or at segments, and only trained slots are targets."""
    assert_blocks_equal(
        chats.dataset, range(len(chats.dataset)), way, epoch, lambda *_: 0, chats.flags_of
    )


def assert_blocks_equal(ds, rows, way, epoch, before_of, flags_of):
    """Logits, loss and gradients of packed rows equal those of the rows' segments alone.

    before_of: (row, segment, x_0) → its slots before the first candidate. flags_of: (row, segment,
    x_0) → whether each slot is trained, or None if all candidates are.
    """
    grad = way is not by_flex
    batch = tensors(
        ds.batch(rows, columns=default_columns(ds), dtype=DTYPES, epochs=[epoch] * len(rows))
    )
    model = Decoder(vocab=ds.vocab_size, heads=1, layers=1)
    total, trained, logits_alone = 0.0, 0, []
    for r in rows:
        row, stored = ds.row(r), ds.row(r, epoch).tokens.astype(np.int64)
        for k in range(row.n_segments):
            begin, end = (int(row.segments[name][k]) for name in ("begin", "end"))
            tokens, task = torch.from_numpy(stored[begin:end]), ds.tasks[row.segments["task"][k]]
            if task["attention"] != "block_diffusion":
                logits = model(tokens[None], torch.arange(end - begin)[None], lambda _, q, k, v: (
                    scaled_dot_product_attention(q, k, v, is_causal=True)
                ))[0]  # fmt: skip
                logits_alone.append((r, begin, logits.detach()))
                total = total + torch.nn.functional.cross_entropy(
                    logits[:-1], tokens[1:], reduction="sum"
                )
                trained += end - begin - 1
                continue
            n, law = (end - begin) // 2, task["parameters"]
            clean = stored[begin + n : end]
            before, flags = before_of(row, k, clean), flags_of(row, k, clean)
            block = twin.numbers(n, before, flags, {"block_origin": "answer", **law})
            # A slot outside all blocks is a block of its own.
            starts = np.array([t if b is None else block.index(b) for t, b in enumerate(block)])
            positions, half = np.tile(np.arange(n), 2), np.repeat([0, 1], n)
            own = torch.from_numpy(
                attention.block_mask(np.ones(2 * n, int), positions, half, 1, np.tile(starts, 2))
            )
            logits = model(
                tokens[None],
                torch.from_numpy(positions)[None],
                lambda _, q, k, v, own=own: scaled_dot_product_attention(q, k, v, attn_mask=own),
            )[0]
            logits_alone.append((r, begin, logits.detach()))
            noised = tokens[:n] != tokens[n:]
            if flags is not None:
                assert not noised[~torch.tensor(flags)].any()
            if law.get("canvas") == "uniform":
                noised[:] = True if flags is None else torch.tensor(flags)
                noised[:before] = False
            elif law.get("noise") == "all" and flags is not None:
                assert noised.tolist() == flags
            shift = int(law.get("shift", False))
            target = noised.nonzero()[:, 0]
            target = target[target >= shift]
            numbers = [block[t] for t in target.tolist()]
            levels = level_of(row, k, epoch, law, 1 + max(b for b in block if b is not None))
            level = levels[numbers]
            weight = (
                torch.from_numpy(1 / level)
                if law.get("weighting") != "none"
                else torch.ones(len(target))
            )
            losses = torch.nn.functional.cross_entropy(
                logits[target - shift], tokens[n:][target], reduction="none"
            )
            total, trained = total + (losses * weight).sum(), trained + len(target)
    attend = by_sdpa(batch) if way is None else way(batch)
    if way is None:  # dense, from the rule alone
        dense = torch.from_numpy(np.stack([dense_mask_of(ds, r) for r in rows]))[:, None]
        attend = lambda _, q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=dense)  # noqa: E731
    with torch.set_grad_enabled(grad):
        logits = model(batch["tokens"], batch["position_ids"], attend)
        packed = masked_loss(logits, batch)
    for r, begin, alone in logits_alone:
        ours = logits[rows.index(r), begin : begin + len(alone)].detach()
        torch.testing.assert_close(ours, alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(packed, total / trained, atol=1e-5, rtol=1e-5, check_dtype=False)
    assert int(batch["loss_mask"].sum()) == trained
    if grad:
        for mine, theirs in zip(
            gradients(model, packed), gradients(model, total / trained), strict=True
        ):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def level_of(row, k, epoch, law, n_blocks):
    """float64[n_blocks]: the stored levels, or what the complement has of them; 1 where all is
    noised."""
    if law.get("noise") == "all":
        return np.full(n_blocks, float(row.segments["noise"][k]))
    first = row._shard.segment_range(row._row)[0] + k
    of = slice(*row._shard.arrays["block_offsets"][first : first + 2])
    level = row._shard.arrays["block_noise"][of].astype(np.float64)
    assert len(level) == n_blocks
    if not epoch:
        return level
    if law.get("complementary"):
        return 1 - level
    low, high = law["noise_range"]  # drawn anew
    key, n = row.segments["key"][k], np.arange(len(level))
    return quantised(low + (high - low) * uniforms(key, NOISE_LEVEL, n, epoch))


def dense_mask_of(ds, r):
    """bool[T, T] of a row, from the sequences of block_varlen."""
    blocks = "block_starts" if "block_starts" in default_columns(ds) else "block_lengths"
    batch = ds.batch([r], columns=["segment_ids", "position_ids", blocks])
    found = attention.block_varlen(batch)
    assert found["max_seqlen"] == np.diff(found["cu_seqlens"]).max()
    ids, slots = batch["segment_ids"][0], np.arange(ds.seq_length)
    sequence = np.searchsorted(found["cu_seqlens"], slots, "right") - 1
    origin = found["cu_seqlens"][sequence]
    if "block_ids" in found:
        block, in_blocks = found["block_ids"], found["block_ids"] >= 0
    else:
        length = found["block_lengths"][sequence]
        block, in_blocks = (slots - origin) // np.maximum(length, 1), length > 0
        assert np.array_equal(found["block_origins"][sequence], origin)
    clean = in_blocks & (sequence > 0) & (ids[origin - 1] == ids)
    mask = (ids[:, None] == ids) & (slots <= slots[:, None])
    own = attention.block_mask(ids, block, clean, 1)
    return np.where(in_blocks[:, None], own, mask)


@pytest.mark.long
def test_a_batch_in_automodel_s_words_has_the_same_loss(blocks):
    """As MDLMCrossEntropyLoss reads them: Σ nll · noise_mask · loss_mask / p_mask, over
    num_diffusion_tokens."""
    batch = tensors(blocks.batch(range(4), columns=default_columns(blocks), dtype=DTYPES))
    logits = torch.randn(*batch["tokens"].shape, blocks.vocab_size)
    given = automodel_loss_inputs(batch)
    nll = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), given["target_ids"], reduction="none"
    )
    theirs = (nll * (given["noise_mask"] & given["loss_mask"]) / given["p_mask"]).sum() / given[
        "num_diffusion_tokens"
    ]
    torch.testing.assert_close(masked_loss(logits, batch), theirs)


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
    assert_equal(
        Decoder(dtype=torch.float32, heads=1, layers=1), batch, LONG_PREFIX, way(batch), grad
    )


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
        mask = torch.from_numpy(
            attention.dense_mask(batch["segment_ids"][0].numpy(), window=window)
        )

        def attend(layer, q, k, v, window=window, mask=mask, end=end):
            if layer in cache:
                k, v = torch.cat((cache[layer][0], k), 2), torch.cat((cache[layer][1], v), 2)
            cache[layer] = k, v
            keys = slice(window.first_document_begin, end)
            # Bottom-right causal inside documents is what the boundaries of the window say.
            parts = []
            for i in range(len(window.cu_seqlens_q) - 1):
                (q0, q1), (k0, k1) = window.cu_seqlens_q[i : i + 2], window.cu_seqlens_k[i : i + 2]
                own = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(
                    int((k1 - k0) - (q1 - q0))
                )
                assert torch.equal(mask[q0:q1, k0:k1], own)
                parts.append(
                    scaled_dot_product_attention(
                        q[:, :, q0:q1],
                        k[:, :, keys][:, :, k0:k1],
                        v[:, :, keys][:, :, k0:k1],
                        attn_mask=own,
                    )
                )
            return torch.cat(parts, 2)

        positions = torch.from_numpy(window.position_ids.astype(np.int64))[None]
        logits.append(model(batch["tokens"][:, begin:end], positions, attend))
    packed = torch.cat(logits, 1)
    expected, loss = alone(model, batch, rows)
    real = batch["segment_ids"] > 0
    torch.testing.assert_close(packed[real], expected[real], atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(
        gradients(model, masked_loss(packed, batch)), gradients(model, loss), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


# State-space layers, whose state ends where seq_idx changes


class Scan(torch.nn.Module):
    """Mamba's causal convolution and selective scan, slot by slot; both begin anew where seq_idx
    changes."""

    def __init__(self, width=8, states=4, taps=4):
        super().__init__()
        torch.manual_seed(1)
        self.embed = torch.nn.Embedding(528, width)
        self.taps = torch.nn.Parameter(torch.randn(taps, width))
        # time step, input and output matrix of each slot
        self.chosen = torch.nn.Linear(width, width + 2 * states)
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
