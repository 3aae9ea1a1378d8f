"""Train a small block-diffusion language model on conversations, and sample answers from it.

    python examples/train_block_diffusion.py

The script makes 2,000 conversations, packs them, and trains for 200 steps on a CPU. This takes
about a minute. It prints:

1. the summaries of three datasets, for training, for the held-out loss, and of held-out questions.
   packprep writes each conversation twice into a row: x_t, in which answers are noised, and the
   clean x_0. Only answers are trained, in blocks of 8 slots. Blocks start at each answer, and
   the last block of a conversation is filled up with eos.
2. the loss on held-out answers before and after the training.
3. held-out questions, their sampled answers, and the share of right answers.

To use your own conversations, give a file of JSON lines with "messages", and a folder with
tokenizer.json and a tokenizer_config.json that has a chat template and a mask token:

    python examples/train_block_diffusion.py --data chats.jsonl --tokenizer FOLDER --seq-length 1024

The template should end each answer with eos inside its {% generation %} block. The model stays
small, so replace `Decoder` by your model: it needs position_ids and an attention mask.
"""

import argparse
import itertools
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from packprep import open_dataset
from packprep.adapters.torch import loader
from packprep.adapters.torch_attention import sdpa_mask
from packprep.adapters.torch_loss import masked_loss

RECIPE = """\
seq_length = {seq_length}
tokenizer = "{tokenizer}"

[[sources]]
name = "chat"
paths = ["{data}"]
sample = {sample}           # a hash of its position decides in which dataset a conversation is

[documents]
append_eos = false          # the template already ends each answer with eos

[[tasks]]
{task}
"""
BLOCK_DIFFUSION = """\
objective = "block_diffusion"
block_length = {block_length}
block_origin = "answer"     # blocks start at each answer, as in sampling
noise_range = [0.1, 1.0]    # up to 1, because sampling starts from a block of masks only
eos_fill = "block"          # the model learns to fill the block after the end of an answer
"""
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
)


def write_conversations(path: Path, count: int = 2000) -> None:
    """Write different orders of fruit and their confirmations, some with a second question."""
    names = ("anna", "ben", "carla", "david", "emma", "felix", "greta", "henry", "iris", "jack")
    cities = ("", "cairo", "delhi", "lima", "london", "madrid", "oslo", "paris", "rome", "tokyo")
    fruits = {"apples": (1, "monday"), "pears": (2, "tuesday"), "plums": (3, "friday")}
    orders = itertools.product(names, cities, range(2, 8), ("", "red", "green", "yellow"), fruits)
    with open(path, "w", encoding="utf-8") as file:
        for i, order in enumerate(random.Random(0).sample(list(orders), count)):
            name, city, number, colour, fruit = order
            price, day = fruits[fruit]
            goods = f"{number} {colour} {fruit}"
            turns = [
                f"{name} orders {goods} {city and 'to ' + city}",
                f"dear {name} , thank you for your order . {goods} cost {number * price} coins"
                f" {city and ', and we send them to ' + city} .",
            ]
            if i % 3 == 0:
                turns += ["when do they come ?", f"your {colour} {fruit} come on {day} ."]
            messages = [
                {"role": role, "content": " ".join(turn.split())}
                for role, turn in zip(itertools.cycle(("user", "assistant")), turns, strict=False)
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def write_tokenizer(folder: Path, data: Path) -> None:
    """Write a tokenizer with one token per word, and its chat template."""
    specials = [f"<|{role}|>" for role in ("pad", "bos", "eos", "mask", "unk", "user", "assistant")]
    words = re.findall(r"[^\s\"]+", data.read_text())
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys([*specials, *words]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(specials)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{role}_token": f"<|{role}|>" for role in ("pad", "bos", "eos", "mask", "unk")}
    config = {**names, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def build(out: Path, **keys) -> Path:
    """Write a recipe and build its dataset."""
    recipe = out.with_suffix(".toml")
    recipe.write_text(RECIPE.format(**keys))
    command = [sys.executable, "-m", "packprep", "build", str(recipe), "--out", str(out)]
    subprocess.run(command, check=True)
    return out


class Layer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x, angles, mask):
        q, k, v = (
            self.mix(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )
        mixed = scaled_dot_product_attention(
            rotated(q, angles), rotated(k, angles), v, attn_mask=mask
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys by their positions."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)


class Decoder(nn.Module):
    def __init__(self, vocab_size: int, width: int = 128, n_layers: int = 2, heads: int = 4):
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocab_size, width), nn.RMSNorm(width)
        self.layers = nn.ModuleList([Layer(width, heads) for _ in range(n_layers)])
        # The head has the weights of the embedding: a small model then soon learns to copy words.
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.1)
        half = width // heads // 2
        self.register_buffer("speed", 1000.0 ** (-torch.arange(half) / half))

    def forward(self, tokens, position_ids, mask, wanted):
        """Return the logits of the slots where `wanted` is true, in order.

        position_ids count from 0 in both halves. A slot of x_t and its original in x_0 therefore
        have the same position.
        """
        angles = position_ids[:, None, :, None] * self.speed
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, angles, mask)
        return self.head(self.norm(x[wanted]))


def loss_of(model: Decoder, batch: dict) -> torch.Tensor:
    """Return the sum of the weighted cross entropies at the noised slots.

    The label of a noised slot is its own token: nothing is shifted. A slot in a block of level t is
    noised with probability t and then has the weight 1 / t. Every slot of an answer thus counts
    equally on average.
    """
    mask = sdpa_mask(batch)
    logits = model(batch["tokens"], batch["position_ids"], mask, batch["loss_mask"])
    # The sum of the weights estimates the number of answer slots. Dividing by it gives the mean loss
    # per slot, whichever levels were drawn. The number of noised slots would change with the levels.
    return masked_loss(logits, batch, denominator=batch["loss_weight_sum"])


@torch.no_grad()
def held_out_loss(model: Decoder, directory: Path) -> float:
    """Return the loss over all rows of a dataset, with the noise that is stored in it."""
    batches = list(loader(directory, batch_size=16, shuffle=False, epochs=1))
    weights = [batch["loss_weight_sum"] for batch in batches]
    losses = [loss_of(model, batch).item() * w for batch, w in zip(batches, weights, strict=True)]
    return sum(losses) / sum(weights)


def questions(directory: Path) -> list[tuple[list[int], list[int]]]:
    """Return each conversation up to its first answer, and this answer.

    The dataset has the task `causal`, in which loss_mask marks exactly the answers: labels[t] is
    the token after slot t.
    """
    pairs = []
    for batch in open_dataset(directory).batches(1, shuffle=False, epochs=1):
        ids = batch["segment_ids"][0]
        for segment in range(1, ids.max() + 1):
            tokens, labels, trained = (
                batch[name][0][ids == segment] for name in ("tokens", "labels", "loss_mask")
            )
            begin = int(trained.argmax())
            end = begin + int((trained[begin:] == 0).argmax())
            pairs.append((tokens[: begin + 1].tolist(), labels[begin:end].tolist()))
    return pairs


@torch.no_grad()
def sample(
    model: Decoder, prompt: list[int], specials: dict, block_length: int, steps: int, limit: int
) -> list[int]:
    """Return an answer, made block by block. It ends with the first eos, or at `limit` slots.

    A block starts as masks, directly after the prompt or the block before it, as in training. Each
    step predicts all masked slots, and keeps the predictions that are most confident.
    """
    tokens, starts = list(prompt), list(range(len(prompt)))
    while len(tokens) + block_length <= limit:
        begin = len(tokens)
        tokens += [specials["mask"]] * block_length
        starts += [begin] * block_length
        # As in training, a slot attends to its own block and to all blocks before it, and each slot
        # of the prompt is a block. Only the last block is noised, so no copy of a block is needed.
        start_of_block = torch.tensor(starts)
        mask = start_of_block[None, :] <= start_of_block[:, None]
        position_ids = torch.arange(len(tokens))[None]
        for step in range(steps):
            logits = model(torch.tensor([tokens]), position_ids, mask, position_ids >= begin)
            logits[:, specials["mask"]] = -torch.inf
            confidence, best = logits.softmax(-1).max(-1)
            masked = [i for i in range(block_length) if tokens[begin + i] == specials["mask"]]
            masked.sort(key=lambda i: -confidence[i])
            for i in masked[: -(-len(masked) // (steps - step))]:
                tokens[begin + i] = int(best[i])
        if specials["eos"] in tokens[begin:]:
            return tokens[len(prompt) : tokens.index(specials["eos"], begin) + 1]
    return tokens[len(prompt) :]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="JSON lines with messages; needs --tokenizer")
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer with chat template")
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--block-length", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--denoising-steps", type=int, default=4, help="steps per sampled block")
    given = parser.parse_args(arguments)
    if (given.data is None) != (given.tokenizer is None):
        parser.error("--data and --tokenizer need each other")
    torch.manual_seed(0)

    with tempfile.TemporaryDirectory() as name:
        folder, data, tokenizer = Path(name), given.data, given.tokenizer
        if data is None:
            data, tokenizer = folder / "chats.jsonl", folder / "tokenizer"
            write_conversations(data)
            write_tokenizer(tokenizer, data)
        keys = {"data": data.resolve(), "tokenizer": tokenizer.resolve()}
        keys["seq_length"] = given.seq_length
        task = BLOCK_DIFFUSION.format(block_length=given.block_length)
        train = build(folder / "train", sample=[0.0, 0.9], task=task, **keys)
        held_out = build(folder / "held_out", sample=[0.9, 1.0], task=task, **keys)
        causal = 'objective = "causal"'
        answers = build(folder / "answers", sample=[0.9, 1.0], task=causal, **keys)

        # With redraw=True, each epoch has new noise.
        batches = loader(train, given.batch_size, seed=0, redraw=True)
        model = Decoder(batches.dataset.vocab_size)
        optimizer = torch.optim.AdamW(model.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, given.steps)
        before, begin = held_out_loss(model, held_out), time.perf_counter()
        for step in range(1, given.steps + 1):
            loss = loss_of(model, next(batches))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % 20 == 0:
                print(f"step {step:>5}  loss {loss.item():.3f}", flush=True)
        print(f"trained for {time.perf_counter() - begin:.0f} s")
        print(f"held-out loss {before:.3f} before, {held_out_loss(model, held_out):.3f} after")

        words = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        specials, asked = batches.dataset.manifest["specials"], questions(answers)[:50]
        shape = given.block_length, given.denoising_steps, given.seq_length
        n_right = 0
        for i, (prompt, reference) in enumerate(asked):
            answer = sample(model, prompt, specials, *shape)
            n_right += answer == reference
            if i < 3:
                for label, ids in zip(
                    ("question", "sampled", "reference"), (prompt, answer, reference), strict=True
                ):
                    print(f"{label:<10} {words.decode(ids, skip_special_tokens=False)}")
        print(f"{n_right} of {len(asked)} sampled answers are right")


if __name__ == "__main__":
    main()
