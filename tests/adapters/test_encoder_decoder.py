"""An encoder's and a decoder's arrays in torch and JAX: the loaders, the masks, and models that see
packed examples alone."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[trainers]'")

from packprep import open_dataset
from packprep.adapters import torch_attention
from packprep.adapters.torch import Rows, loader
from packprep.dataset.attention import thd_pair
from packprep.dataset.encoder_decoder import NAMES, READ, split
from packprep.errors import ArgumentError, DatasetError
from tests import made
from tests.dataset import synthetic

PARTS = {
    "encoder": ("encoder", "encoder"),
    "decoder": ("decoder", "decoder"),
    "cross": ("decoder", "encoder"),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return made.two_sided(tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def arrays(directory):
    """Four rows, of which one has two examples and much padding, and one padding alone."""
    batch, most = (
        split(open_dataset(directory).batch(range(4), columns=READ)),
        np.array([99, 99, 2, 0])[:, None],
    )
    kept = {side: batch[f"{side}_segment_ids"] <= most for side in ("encoder", "decoder")}
    return {name: values * kept[name[:7]] for name, values in batch.items()}


def seen(arrays, part):
    """bool[B, Q, K] of the real queries, pair by pair: the same segment, and under the decoder's
    rule no later slot."""
    queries, keys = (arrays[f"{side}_segment_ids"] for side in PARTS[part])
    allowed = (queries[:, :, None] == keys[:, None]) & (queries[:, :, None] > 0)
    return np.tril(allowed) if part == "decoder" else allowed


def real(arrays, part):
    return arrays[f"{PARTS[part][0]}_segment_ids"] > 0


@pytest.mark.parametrize("part", PARTS)
def test_masks_part_the_examples(arrays, part):
    expected, is_real = seen(arrays, part), real(arrays, part)
    mask = torch_attention.sdpa_mask(arrays, part=part)
    assert (mask[:, 0].numpy() == expected)[is_real].all() and mask.any(-1).all(), (
        "no query is without keys"
    )
    b, q, k = torch.meshgrid(*(torch.arange(n) for n in expected.shape), indexing="ij")
    assert torch.equal(torch_attention.flex_mask_mod(arrays, part=part)(b, 0, q, k), mask[:, 0])
    from torch.nn.attention.flex_attention import create_block_mask

    blocks = torch_attention.flex_block_mask(arrays, 16, part=part)
    reference = create_block_mask(
        blocks.mask_mod, len(expected), 1, *expected.shape[1:], device="cpu", BLOCK_SIZE=16
    )
    assert blocks.shape == reference.shape and torch.equal(blocks.to_dense(), reference.to_dense())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("part", PARTS)
def test_flex_attention_is_that_of_the_mask(arrays, part):
    from torch.nn.attention.flex_attention import flex_attention

    chance = torch.Generator().manual_seed(0)
    n_queries, n_keys = seen(arrays, part).shape[1:]
    query, key, value = (
        torch.randn(4, 2, n, 16, generator=chance) for n in (n_queries, n_keys, n_keys)
    )
    got = flex_attention(
        query, key, value, block_mask=torch_attention.flex_block_mask(arrays, 16, part=part)
    )
    mask = torch_attention.sdpa_mask(arrays, part=part)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_part_that_there_is_not_is_refused(arrays):
    with pytest.raises(
        ArgumentError, match="part is 'both' and should be one of 'encoder', 'decoder', 'cross'"
    ):
        torch_attention.sdpa_mask(arrays, part="both")


@pytest.mark.parametrize("part", PARTS)
def test_transformer_engine_is_told_the_lengths_of_both_sides(arrays, part):
    queries, keys = PARTS[part]
    columns = [
        arrays[f"{side}_{name}"]
        for name in ("segment_ids", "positions")
        for side in (queries, keys)
    ]
    q_lengths, k_lengths, q_offsets, k_offsets = thd_pair(
        *columns, max_segments=8, causal="top_left" if part == "decoder" else None
    )
    mask = np.zeros(seen(arrays, part).shape, bool)
    for r in range(len(mask)):
        for n_q, n_k, q, k in zip(
            q_lengths[r], k_lengths[r], q_offsets[r], k_offsets[r], strict=False
        ):
            mask[r, q : q + n_q, k : k + n_k] = (
                np.tri(n_q, n_k, dtype=bool) if part == "decoder" else True
            )
    assert (mask == seen(arrays, part)).all()


def test_the_torch_loader_gives_what_split_gives(directory):
    ds = open_dataset(directory)
    options = {"epochs": 2, "redraw": True, "seed": 3}
    for workers in (0, 1):
        batches = loader(directory, 8, names="seqio", num_workers=workers, **options)
        for given, batch in zip(ds.batches(8, columns=READ, **options), batches, strict=True):
            expected = split(given)
            assert tuple(batch) == (*NAMES, "n_trained", "loss_weight_sum")
            for name, values in expected.items():
                assert (batch[name].numpy() == values).all()
            assert (
                batch["n_trained"]
                == batch["loss_weight_sum"]
                == expected["decoder_loss_weights"].sum()
            )
    assert batch["decoder_target_tokens"].dtype == batch["encoder_positions"].dtype == torch.int64
    plain = next(loader(directory, 8))
    assert plain["encoder_length"] == 128 and "encoder_length" not in Rows(directory)[0]
    assert next(loader(directory, 8, layout="thd"))["encoder_length"] == 128


def test_the_torch_loader_refuses_what_does_not_go_with_it(directory, tmp_path):
    synthetic.make_dataset(tmp_path, (4,))
    with pytest.raises(DatasetError, match="there is no encoder_length"):
        loader(tmp_path, 2, names="seqio")
    with pytest.raises(ArgumentError, match="names is 't5x' and should be 'packprep' or 'seqio'"):
        loader(directory, 2, names="t5x")
    for options in ({"layout": "thd"}, {"columns": ["tokens"]}, {"ignore_index": -100}):
        with pytest.raises(ArgumentError, match="leave layout, columns and ignore_index out"):
            loader(directory, 2, names="seqio", **options)


# Models of Transformers


def t5(transformers):
    config = transformers.T5Config(
        vocab_size=400,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        tie_word_embeddings=False,
    )
    config._attn_implementation = "sdpa"
    return transformers.T5ForConditionalGeneration(config)


def t5gemma(transformers):
    module = {
        "vocab_size": 400,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "attn_implementation": "eager",  # its soft cap of scores is in no other
    }
    config = transformers.T5GemmaConfig(
        encoder=module, decoder=module, vocab_size=400, dropout_rate=0.0, attention_dropout=0.0
    )
    config._attn_implementation = "eager"
    return transformers.T5GemmaForConditionalGeneration(config)


def logits_of(model, batch):
    """As docs/guides/t5.md does it: the encoder by itself, since the model has one mask for it and
    for cross attention."""
    masks = {part: torch_attention.sdpa_mask(batch, part=part) for part in PARTS}
    if model.config._attn_implementation == "eager":
        masks = {
            part: torch.where(mask, 0.0, torch.finfo(torch.float32).min)
            for part, mask in masks.items()
        }
    positions = [{}, {}]
    if model.config.model_type == "t5gemma":
        masks |= {part: {"full_attention": m, "sliding_attention": m} for part, m in masks.items()}
        positions = [
            {"position_ids": batch["encoder_positions"]},
            {"decoder_position_ids": batch["decoder_positions"]},
        ]
    encoder = model.get_encoder()
    encoded = encoder(
        batch["encoder_input_tokens"], attention_mask=masks["encoder"], **positions[0]
    )
    return model(
        encoder_outputs=encoded,
        attention_mask=masks["cross"],
        decoder_input_ids=batch["decoder_input_tokens"],
        decoder_attention_mask=masks["decoder"],
        use_cache=False,
        **positions[1],
    ).logits


def loss_of(model, batch):
    logits = logits_of(model, batch)
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["decoder_target_tokens"].flatten(), reduction="none"
    )
    return logits, (losses * batch["decoder_loss_weights"].flatten()).sum() / batch["n_trained"]


@pytest.mark.parametrize("make", [t5, t5gemma])
def test_a_model_sees_of_packed_examples_what_it_sees_of_each_alone(directory, make):
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install '.[trainers]'"
    )
    batch = next(loader(directory, 2, names="seqio"))
    torch.manual_seed(0)
    model = make(transformers).train()
    logits, packed = loss_of(model, batch)
    packed.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    alone, n = 0.0, 0
    for r in range(2):
        for i in range(1, int(batch["encoder_segment_ids"][r].max()) + 1):
            own = {
                name: batch[name][r : r + 1, batch[f"{name[:7]}_segment_ids"][r] == i]
                for name in NAMES
            }
            # With masks of its own making: what a model does with one example.
            own_logits = model(
                input_ids=own["encoder_input_tokens"],
                attention_mask=torch.ones_like(own["encoder_input_tokens"]),
                decoder_input_ids=own["decoder_input_tokens"],
                decoder_attention_mask=torch.ones_like(own["decoder_input_tokens"]),
            ).logits[0]
            place = batch["decoder_segment_ids"][r] == i
            torch.testing.assert_close(logits[r, place], own_logits, atol=1e-5, rtol=1e-5)
            alone = alone + torch.nn.functional.cross_entropy(
                own_logits, own["decoder_target_tokens"][0], reduction="sum"
            )
            n += 1
    alone = alone / batch["n_trained"]
    alone.backward()
    assert n > 4 and len(gradients) > 20
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
    for name, parameter in model.named_parameters():
        if name in gradients:
            torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=1e-5)
