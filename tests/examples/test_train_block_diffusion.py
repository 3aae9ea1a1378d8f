"""examples/train_block_diffusion.py learns to answer held-out questions of its own conversations."""

import json
import re
import runpy
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[trainers]'")

import torch

from packprep.adapters.torch import loader
from packprep.adapters.torch_attention import sdpa_mask
from tests import made

pytestmark = pytest.mark.long

SCRIPT = made.ROOT / "examples" / "train_block_diffusion.py"


def run(*options: str) -> str:
    """Return the stdout of the example."""
    # Sums of floats depend on the number of threads.
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        env=made.environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_held_out_loss_falls_and_sampled_answers_are_right():
    output = run("--steps", "200")
    before, after = map(float, re.search(r"loss ([\d.]+) before, ([\d.]+) after", output).groups())
    assert after < 0.1 * before
    sampled = re.findall(r"^sampled +(.*)$", output, re.M)
    assert len(sampled) == 3 and all(answer.endswith("<|eos|>") for answer in sampled)
    n_right, n_asked = map(int, re.search(r"^(\d+) of (\d+) sampled", output, re.M).groups())
    assert n_asked == 50 and n_right >= 40


def test_own_conversations_can_be_given(tmp_path):
    example = runpy.run_path(str(SCRIPT))
    example["write_conversations"](tmp_path / "chats.jsonl", 200)
    example["write_tokenizer"](tmp_path / "tokenizer", tmp_path / "chats.jsonl")
    data = ["--data", str(tmp_path / "chats.jsonl"), "--tokenizer", str(tmp_path / "tokenizer")]
    output = run(*data, "--steps", "4", "--block-length", "4")
    assert re.search(r"^\d+ of \d+ sampled answers are right$", output, re.M)


def test_a_sampled_block_gets_the_logits_of_training(tmp_path):
    """The noised block and the clean text before it give the same logits in a row and in sampling."""
    example = runpy.run_path(str(SCRIPT))
    example["write_conversations"](tmp_path / "chats.jsonl", 30)
    example["write_tokenizer"](tmp_path / "tokenizer", tmp_path / "chats.jsonl")
    task = example["BLOCK_DIFFUSION"].format(block_length=8) + 'noise = "level"\n'
    keys = {"data": tmp_path / "chats.jsonl", "tokenizer": tmp_path / "tokenizer"}
    packed = example["build"](tmp_path / "p", sample=[0.0, 1.0], task=task, seq_length=256, **keys)
    torch.manual_seed(0)
    batch = next(loader(packed, 1, shuffle=False))
    dataset = loader(packed, 1).dataset
    model = example["Decoder"](dataset.vocab_size).eval()
    everywhere = torch.ones_like(batch["loss_mask"])
    with torch.no_grad():
        logits = model(batch["tokens"], batch["position_ids"], sdpa_mask(batch), everywhere)
    (slots,) = torch.nonzero(batch["segment_ids"][0] == 1, as_tuple=True)
    x_t, x_0 = slots.chunk(2)
    starts = batch["block_starts"][0, x_t].long()
    n_blocks = 0
    for begin in starts.unique().tolist():
        (block,) = torch.nonzero(starts == begin, as_tuple=True)
        if not batch["loss_mask"][0, x_t[block]].any():
            continue
        n_blocks += 1
        tokens = torch.cat((batch["tokens"][0, x_0[:begin]], batch["tokens"][0, x_t[block]]))
        start = starts[: len(tokens)]
        mask = start[None, :] <= start[:, None]
        position_ids = torch.arange(len(tokens))[None]
        with torch.no_grad():
            expected = model(tokens[None], position_ids, mask, position_ids >= begin)
        torch.testing.assert_close(logits[x_t[block]], expected, atol=1e-4, rtol=1e-4)
    assert n_blocks >= 2


def test_questions_end_where_the_answers_begin(tmp_path):
    example = runpy.run_path(str(SCRIPT))
    example["write_conversations"](tmp_path / "chats.jsonl", 30)
    example["write_tokenizer"](tmp_path / "tokenizer", tmp_path / "chats.jsonl")
    keys = {"data": tmp_path / "chats.jsonl", "tokenizer": tmp_path / "tokenizer"}
    packed = example["build"](
        tmp_path / "p", sample=[0.0, 1.0], task='objective = "causal"', seq_length=256, **keys
    )
    words = example["Tokenizer"].from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    got = {
        (words.decode(prompt, skip_special_tokens=False), words.decode(answer))
        for prompt, answer in example["questions"](packed)
    }
    lines = (tmp_path / "chats.jsonl").read_text().splitlines()
    messages = [json.loads(line)["messages"] for line in lines]
    assert got == {
        (f"<|bos|> <|user|> {ask['content']} <|assistant|>", answer["content"])
        for ask, answer, *_ in messages
    }
