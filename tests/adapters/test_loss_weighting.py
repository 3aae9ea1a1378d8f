"""With `loss_weighting = "document"`, the gradient of a packed step is that of the mean of the
documents' own mean losses, however documents are cut and rows are spread over ranks."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[trainers]'")

import packprep
from packprep.adapters.torch import loader
from packprep.adapters.torch_loss import masked_loss
from tests import made
from tests.adapters.decoder import Decoder
from tests.building.test_loss_weighting import build_chats, chat_lines

VOCABULARY = 600


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """The same rows twice: with the weights of tokens, and with those of documents."""
    folder = tmp_path_factory.mktemp("weighting")
    lines = [{"messages": line["messages"]} for line in chat_lines(11, 6)]
    for weighting in ("token", "document"):
        table = build_chats(folder, lines, weighting)
        made.build(table, folder, folder / weighting)
    return {name: packprep.open_dataset(folder / name) for name in ("token", "document")}


def segments_alone(dataset):
    """Return (tokens, labels, coefficients) of the segments, [S, T] each, one in each row.

    The sum of the losses times the coefficients is the mean of the documents' mean losses.
    """
    length, documents = dataset.seq_length, {}
    tokens, labels, own = [], [], []
    for row in map(dataset.row, range(len(dataset))):
        columns = row.segments
        for begin, end, doc in zip(
            *(columns[name].tolist() for name in ("begin", "end", "doc")), strict=True
        ):
            padding = np.zeros(length - (end - begin), np.int64)
            documents.setdefault(doc, []).append(len(own))
            tokens.append(np.concatenate((row.tokens[begin:end].astype(np.int64), padding)))
            labels.append(np.append(tokens[-1][1:], 0))
            own.append(np.concatenate((row.loss_weights[begin:end].astype(np.float64), padding)))
    assert max(map(len, documents.values())) > 2
    coefficients = np.array(own)
    for numbers in documents.values():
        coefficients[numbers] /= coefficients[numbers].sum() * len(documents)
    return np.array(tokens), np.array(labels), coefficients


def attend_within(segment_ids):
    """Return causal attention inside segments."""
    same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    mask = same & torch.ones(same.shape[-2:], dtype=torch.bool).tril()

    def attend(layer, q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return attend


@pytest.mark.parametrize("world_size", [2, 1])
def test_the_gradient_in_torch_is_that_of_the_documents_means(datasets, world_size):
    model = Decoder(vocab=VOCABULARY)
    tokens, labels, coefficients = map(torch.tensor, segments_alone(datasets["token"]))
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    logits = model(tokens, positions, attend_within(torch.ones_like(tokens)))
    losses = torch.nn.functional.cross_entropy(logits.mT, labels, reduction="none")
    wanted = torch.autograd.grad((losses * coefficients).sum(), list(model.parameters()))
    dataset = datasets["document"]
    rows = -(-len(dataset) // world_size)
    ranks = [
        next(iter(loader(dataset, batch_size=rows, rank=rank, world_size=world_size, epochs=1)))
        for rank in range(world_size)
    ]
    whole = sum(batch["loss_weight_sum"] for batch in ranks)
    every_row = map(dataset.row, range(len(dataset)))
    documents = {int(doc) for row in every_row for doc in row.segments["doc"]}
    assert whole == pytest.approx(len(documents), rel=1e-6)
    packed = [torch.zeros_like(own) for own in wanted]
    for batch in ranks:
        attend = attend_within(batch["segment_ids"])
        logits = model(batch["tokens"], batch["position_ids"], attend)
        loss = masked_loss(logits, batch, denominator=whole)
        for sums, own in zip(
            packed, torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            sums += own
    for own, given in zip(wanted, packed, strict=True):
        assert torch.allclose(given, own, rtol=1e-6, atol=1e-6 * float(own.abs().max()))


@pytest.mark.long
@pytest.mark.parametrize("shards", [2, 1])
def test_the_gradient_in_jax_is_that_of_the_documents_means(datasets, shards):
    jax = pytest.importorskip("jax", reason="JAX is not installed: pip install '.[trainers]'")
    from packprep.adapters.jax import loader as jax_loader

    jnp = jax.numpy
    chance = np.random.default_rng(1)
    with jax.enable_x64(True):
        weights = {
            "embedding": jnp.asarray(chance.normal(size=(VOCABULARY, 16))),
            "value": jnp.asarray(chance.normal(size=(16, 16))),
            "head": jnp.asarray(chance.normal(size=(16, VOCABULARY))),
        }

        def losses(weights, tokens, labels, segment_ids):
            x = weights["embedding"][tokens]
            sees = (segment_ids[:, :, None] == segment_ids[:, None, :]) & jnp.tri(
                tokens.shape[1], dtype=bool
            )
            scores = jnp.where(sees, jnp.einsum("btd,bsd->bts", x, x) / 4, -jnp.inf)
            x = x + jax.nn.softmax(scores) @ (x @ weights["value"])
            logits = jnp.tanh(x) @ weights["head"]
            chosen = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
            return jax.nn.logsumexp(logits, -1) - chosen

        alone = segments_alone(datasets["token"])

        def mean_of_documents(weights):
            tokens, labels, coefficients = map(jnp.asarray, alone)
            return (losses(weights, tokens, labels, jnp.ones_like(tokens)) * coefficients).sum()

        wanted = jax.jit(jax.grad(mean_of_documents))(weights)
        dataset = datasets["document"]
        batch = next(iter(jax_loader(dataset, batch_size=len(dataset), epochs=1)))
        columns = ("tokens", "labels", "segment_ids", "loss_weights")
        parts = [jnp.array_split(batch[name], shards) for name in columns]
        whole = batch["loss_weights"].astype(jnp.float64).sum()

        def packed(weights, tokens, labels, segment_ids, own):
            return (losses(weights, tokens, labels, segment_ids) * own).sum() / whole

        gradients = [jax.jit(jax.grad(packed))(weights, *part) for part in zip(*parts, strict=True)]
        for name, own in wanted.items():
            given = sum(gradient[name] for gradient in gradients)
            assert jnp.allclose(given, own, rtol=1e-6, atol=1e-6 * float(jnp.abs(own).max())), name
