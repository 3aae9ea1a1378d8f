"""Packed conversations with block diffusion, and which of their tokens are trained."""

import json
from typing import NamedTuple

import numpy as np

from packprep import open_dataset
from packprep.dataset.loader import Dataset
from tests import made
from tests.dataset.test_noise import BLOCK_LAWS
from tests.tokenizer import tokenizers_made

SPECIAL = ("<eos>", "<mask>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
NAMES = {"eos_token": "<eos>", "mask_token": "<mask>", "pad_token": "<pad>"}
EOS, _, _, _, _, ASSISTANT, END = range(320, 320 + len(SPECIAL))
TEMPLATE = """\
{%- for m in messages %}
    {{- '<|' + m.role + '|>' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}{{- m.content + '<|end|>' }}{% endgeneration %}
    {%- else %}
        {{- m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
"""
SEQ_LENGTH = 512
LAWS = BLOCK_LAWS | {"unweighted": {"weighting": "none"}}
TASKS = [
    {
        "objective": "block_diffusion",
        "name": f"{origin}_{name}_{shift}",
        "block_length": 5,
        "block_origin": origin,
        "eos_fill": ("none", "block")[(number + shift) % 2],
        "shift": bool(shift),
        **law,
    }
    for origin in ("answer", "segment")
    for shift in (0, 1)
    for number, (name, law) in enumerate(LAWS.items())
]


def records():
    """Conversations of one to five turns. Some are longer than a row, and some end with a user."""
    texts = iter(made.texts(2000, 5, 30))
    for i in range(120):
        messages = [{"role": "system", "content": next(texts)[:10]}] if i % 3 == 0 else []
        for _ in range(1 + i % 5):
            messages.append({"role": "user", "content": next(texts)[:15]})
            answer = " ".join(next(texts) for _ in range(8)) if i % 11 == 0 else next(texts)[:25]
            messages.append({"role": "assistant", "content": answer})
        if i % 7 == 3:
            messages.append({"role": "user", "content": next(texts)[:15]})
        yield {"messages": messages}


class Chats(NamedTuple):
    """A dataset of conversations, and their uncut texts.

    A document's number is its byte position in the file.
    """

    dataset: Dataset
    ids: dict[int, np.ndarray]  # document → its ids, uncut
    cut_answers: list[int]  # documents with a cut inside an answer

    def flags_of(self, row, k, clean):
        """Return whether each slot of a half is trained: an answer, its end, and eos after it."""
        doc, start, tokens = (int(row.segments[key][k]) for key in ("doc", "start", "tokens"))
        ids = self.ids[doc]
        repeated = len(clean) - tokens - int((clean[::-1] != EOS).argmax())
        whole = answers_of(ids)
        flags = np.append(np.zeros(repeated, bool), whole[start : start + tokens])
        assert np.array_equal(clean[repeated:][:tokens], ids[start : start + tokens])
        assert np.array_equal(clean[:repeated], ids[:repeated])
        n_eos = len(clean) - len(flags)
        if n_eos:  # Only the end of a text has eos. Those that fill up a block are trained.
            assert start + tokens == len(ids)
            flags = np.concatenate((flags, [whole[-1]], np.ones(n_eos - 1, bool)))
        return flags.tolist()


def answers_of(ids):
    """Return whether each token is in an answer, or is its end."""
    flags, is_inside = np.zeros(len(ids), bool), False
    for i, token in enumerate(ids.tolist()):
        flags[i] = is_inside
        is_inside = (is_inside and token != END) or token == ASSISTANT
    return flags


def build(folder):
    """Build the packed conversations, and the same texts uncut."""
    tokenizers_made.write(
        folder,
        tokenizers_made.byte_level(*SPECIAL),
        tokenizer_config={**NAMES, "chat_template": TEMPLATE},
    )
    lines = b"".join(json.dumps(record).encode() + b"\n" for record in records())
    made.write(folder / "chats.jsonl", lines)
    recipe = made.table("chats.jsonl", tokenizer=".", seq_length=SEQ_LENGTH, tasks=TASKS)
    made.build(recipe, folder, folder / "packed")
    plain = {**recipe, "seq_length": 8192, "tasks": [{"preset": "causal"}]}
    plain["documents"] = {"append_eos": False}
    made.build(plain, folder, folder / "whole")
    whole = open_dataset(folder / "whole")
    ids: dict[int, np.ndarray] = {}
    for row in map(whole.row, range(len(whole))):
        names = (row.segments[key].tolist() for key in ("doc", "begin", "end"))
        for doc, begin, end in zip(*names, strict=True):
            ids[doc] = np.array(row.tokens[begin:end], np.int64)
    dataset = open_dataset(folder / "packed")
    cut = [
        doc
        for row in map(dataset.row, range(len(dataset)))
        for doc, start in zip(
            row.segments["doc"].tolist(), row.segments["start"].tolist(), strict=True
        )
        if start
        and answers_of(ids[doc])[start - 1 : start + 1].all()
        and ids[doc][start - 1] != END
    ]
    return Chats(dataset, ids, cut)
