"""The loss of packed conversations is that of the same conversations one by one, masked by Transformers."""

import json

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[trainers]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[trainers]'")

from tokenizers import Tokenizer

from packprep import open_dataset
from packprep.adapters.huggingface import model_inputs
from packprep.adapters.torch import loader
from tests import made
from tests.documents import chats_made
from tests.tokenizer import tokenizers_made

ROLES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
SPECIAL = ("<|assistant|>", "<|user|>", "<|system|>", "<|end|>", *ROLES.values())
RECORDS = [
    {
        "messages": chats_made.turns(
            *made.texts(2 * (1 + i % 4), i, 60), system=made.texts(1, 40 + i, 40)[0] if i % 3 else None
        )
    }
    for i in range(14)
]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A dataset of RECORDS, several in each row."""
    folder = tmp_path_factory.mktemp("chats")
    tokenizers_made.write(
        folder, tokenizers_made.byte_level(*SPECIAL), tokenizer_config={**ROLES, "chat_template": chats_made.GENERATION}
    )
    made.write(folder / "chats.jsonl", b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS))
    recipe = {
        "seq_length": 2048,
        "tokenizer": ".",
        "sources": [{"paths": ["chats.jsonl"]}],
        "tasks": [{"preset": "causal"}],
        "documents": {"append_eos": False},
    }
    made.build(recipe, folder, folder / "packed")
    return folder


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=352, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0
    )
    return transformers.LlamaForCausalLM(config).double().eval()


def one_by_one(model, folder):
    """(loss, trained tokens): the mean over all trained tokens of conversations that Transformers renders and masks."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(folder / "tokenizer.json")),
        chat_template=chats_made.GENERATION,
        **ROLES,
    )
    total, trained = 0.0, 0
    for record in RECORDS:
        encoded = tokenizer.apply_chat_template(record["messages"], return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = torch.tensor([encoded["input_ids"]]), torch.tensor([encoded["assistant_masks"]])
        own = int(mask.sum())
        total += model(input_ids=ids, labels=torch.where(mask > 0, ids, -100)).loss.item() * own
        trained += own
    return total / trained, trained


@pytest.mark.parametrize("labels", ["shift_labels", "shifted_by_model"])
def test_the_loss_of_packed_conversations_is_that_of_each_alone(packed, model, labels):
    dataset = open_dataset(packed / "packed")
    batch = next(loader(packed / "packed", len(dataset)))
    assert 1 < len(dataset) < sum(dataset.row(i).n_segments for i in range(len(dataset))) == len(RECORDS)
    with torch.no_grad():
        loss = model(**model_inputs(batch, dataset, labels=labels)).loss.item()
        expected, trained = one_by_one(model, packed)
    assert int(batch["loss_mask"].sum()) == trained
    assert loss == pytest.approx(expected, rel=1e-6)


def test_a_mask_of_other_tokens_gives_another_loss(packed, model):
    dataset = open_dataset(packed / "packed")
    batch = next(loader(packed / "packed", len(dataset)))
    batch["loss_mask"] = (batch["segment_ids"] > 0).to(batch["loss_mask"].dtype)
    with torch.no_grad():
        loss = model(**model_inputs(batch, dataset)).loss.item()
        expected, _ = one_by_one(model, packed)
    assert abs(loss - expected) > 1e-4
