"""The loss of packed conversations is that of the same conversations one by one, masked by
Transformers."""

import json

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[trainers]'")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install '.[trainers]'"
)

from tokenizers import Tokenizer

from packprep import open_dataset
from packprep.adapters.huggingface import model_inputs
from packprep.adapters.torch import loader
from tests import made
from tests.tokenizer import tokenizers_made

ROLES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
# Tools, calls and reasoning, and what an assistant generates said by blocks
TEMPLATE = """\
{%- if tools %}{{- '<|system|>' + tools | tojson + '<|end|>' }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|assistant|>' }}
        {%- generation %}
            {%- if m.reasoning_content %}{{- '<think>' + m.reasoning_content + '</think>' }}{% endif %}
            {{- m.content or '' }}
            {%- for call in m.tool_calls or [] %}{{- '[call]' + call.function | tojson }}{% endfor %}
            {{- '<|end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|' + m.role + '|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}
"""
SPECIAL = ("<|assistant|>", "<|user|>", "<|system|>", "<|tool|>", "<|end|>", *ROLES.values())
TOOLS = [
    {
        "type": "function",
        "function": {"name": "sum", "parameters": {"type": "object", "properties": {}}},
    }
]


def records():
    """Conversations of one to four turns, some of them with a system message, tools, two calls at
    once, or reasoning."""
    made_records = []
    for i in range(14):
        texts = iter(made.texts(30, i, 60))
        messages = [{"role": "system", "content": next(texts)}] if i % 3 else []
        for turn in range(1 + i % 4):
            messages.append({"role": "user", "content": next(texts)})
            if i % 2:
                calls = [
                    {"type": "function", "function": {"name": "sum", "arguments": {"n": n}}}
                    for n in range(1 + turn % 2)
                ]
                messages.append({"role": "assistant", "content": None, "tool_calls": calls})
                messages += [{"role": "tool", "content": next(texts)} for _ in calls]
            thought = {"reasoning_content": next(texts)} if i % 5 == 2 else {}
            messages.append({"role": "assistant", "content": next(texts), **thought})
        made_records.append({"messages": messages, **({"tools": TOOLS} if i % 2 else {})})
    return made_records


RECORDS = records()


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A dataset of RECORDS, several in each row."""
    folder = tmp_path_factory.mktemp("chats")
    tokenizers_made.write(
        folder,
        tokenizers_made.byte_level(*SPECIAL),
        tokenizer_config={**ROLES, "chat_template": TEMPLATE},
    )
    made.write(
        folder / "chats.jsonl", b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS)
    )
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
        vocab_size=352,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).double().eval()


def masked_by_transformers(folder):
    """(Transformers' tokenizer, each conversation as it renders, tokenizes and masks it: ids and
    labels)."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(folder / "tokenizer.json")),
        chat_template=TEMPLATE,
        **ROLES,
    )
    found = []
    for record in RECORDS:
        encoded = tokenizer.apply_chat_template(
            record["messages"],
            tools=record.get("tools"),
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids, mask = encoded["input_ids"], encoded["assistant_masks"]
        found.append(
            {
                "input_ids": ids,
                "labels": [i if own else -100 for i, own in zip(ids, mask, strict=True)],
            }
        )
    return tokenizer, found


@pytest.fixture(scope="module")
def one_by_one(model, packed):
    """(loss, trained tokens): the mean over all trained tokens of conversations that Transformers
    renders and masks."""
    total, trained = 0.0, 0
    for example in masked_by_transformers(packed)[1]:
        ids, labels = (torch.tensor([example[key]]) for key in ("input_ids", "labels"))
        own = int((labels != -100).sum())
        with torch.no_grad():
            total += model(input_ids=ids, labels=labels).loss.item() * own
        trained += own
    return total / trained, trained


@pytest.mark.parametrize("labels", ["shift_labels", "shifted_by_model"])
def test_the_loss_of_packed_conversations_is_that_of_each_alone(packed, model, one_by_one, labels):
    dataset = open_dataset(packed / "packed")
    batch = next(loader(packed / "packed", len(dataset)))
    assert (
        1
        < len(dataset)
        < sum(dataset.row(i).n_segments for i in range(len(dataset)))
        == len(RECORDS)
    )
    with torch.no_grad():
        loss = model(**model_inputs(batch, dataset, model, labels=labels)).loss.item()
    expected, trained = one_by_one
    assert int(batch["loss_mask"].sum()) == trained
    assert loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("collator", ["padded", "flattened"])
def test_the_loss_is_that_of_the_batches_that_transformers_collates(packed, model, collator):
    dataset = open_dataset(packed / "packed")
    tokenizer, examples = masked_by_transformers(packed)
    collate = {
        "padded": transformers.DataCollatorForSeq2Seq(tokenizer),
        "flattened": (
            transformers.DataCollatorWithFlattening()
        ),  # several conversations as one row, told by position_ids
    }[collator]
    with torch.no_grad():
        loss = model(
            **model_inputs(next(loader(packed / "packed", len(dataset))), dataset, model)
        ).loss.item()
        expected = model(**collate(examples), use_cache=False).loss.item()
    assert loss == pytest.approx(expected, rel=1e-6)


def test_a_mask_of_other_tokens_gives_another_loss(packed, model, one_by_one):
    dataset = open_dataset(packed / "packed")
    batch = next(loader(packed / "packed", len(dataset)))
    batch["loss_mask"] = (batch["segment_ids"] > 0).to(batch["loss_mask"].dtype)
    with torch.no_grad():
        loss = model(**model_inputs(batch, dataset, model)).loss.item()
    assert abs(loss - one_by_one[0]) > 1e-4
