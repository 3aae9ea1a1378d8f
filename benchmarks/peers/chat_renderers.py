"""Whether packprep and the package `renderers` give the same ids and loss masks of conversations.

python -m peers.chat_renderers FOLDER                       (in the folder benchmarks)
python -m peers.chat_renderers FOLDER/qwen3.jinja --count 500 --seed 7 --show 5

`renderers` (https://pypi.org/project/renderers) writes each model family's conversations in Python,
without the chat template. FOLDER has the families' templates, with the names in FAMILIES. The
conversations and the tokenizers are those of `chats.py`. Columns:

left out      a special token is quoted, a message is not taken, or the renderer has no such variable
ids           equal ids, and every trained token is trained by both
space         equal ids; only packprep trains white space between a header or an end and the rest.
              `renderers` counts it as the frame of a turn
prompt        equal ids; only `renderers` trains the start of a turn that the generation prompt has
next role     equal ids; only one of both trains the header of the next message, as the end of a turn
pieces        other ids of the same text: `renderers` tokenizes headers and contents apart.
              packprep has the ids of Transformers' `apply_chat_template`
text          another text: packprep has the text and the ids of Transformers
ours          other ids: packprep has other ids than Transformers
mask          equal ids, other trained tokens than above

A conversation may count under `space`, `prompt` and `next role` at once. Exit status 1 for
differences in the last two columns.
"""

import contextlib
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chats
import numpy as np
from chat_datasets import chunks_built
from conversations import conversations, strings
from renderers import configs, create_renderer
from renderers.base import build_training_sample
from tokenizers import AddedToken


@dataclass(frozen=True)
class Family:
    """A renderer, and the tokens that its tokenizer needs next to those of the template."""

    config: type[configs.BaseRendererConfig]
    settings: dict[str, Any] = field(default_factory=dict)
    model: str = ""  # the tokenizer's name, which some renderers read
    bos: str = chats.BOS
    eos: str = chats.EOS
    tokens: tuple[str, ...] = ()
    # whether the template ends the last turn, with the header of a next message
    ends_last_turn: bool = False


THINK = ("<think>", "</think>")
CALLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN = ("<|endoftext|>", *THINK, *CALLS)
ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
GLM = ("[gMASK]", "<sop>", "<|endoftext|>", "<|system|>", "<|observation|>", *ARGUMENTS)
GEMMA = tuple(
    token
    for name in ("turn", "channel", "tool", "tool_call", "tool_response", "image")
    for token in (f"<|{name}>", f"<{name}|>")
)
DATE = "01 Jan 2026"  # `chats.DATE`, as Llama's template writes it
DEEPSEEK = {"bos": "<｜begin▁of▁sentence｜>", "eos": "<｜end▁of▁sentence｜>"}
LLAMA = {
    "bos": "<|begin_of_text|>",
    "eos": "<|eot_id|>",
    "tokens": ("<|end_of_text|>", "<|eom_id|>"),
}
FAMILIES = {
    "qwen3": Family(configs.Qwen3RendererConfig, tokens=QWEN),
    "qwen3_vl": Family(configs.Qwen3VLRendererConfig, tokens=(*QWEN, *VISION)),
    "qwen3_5_think": Family(configs.Qwen35RendererConfig, tokens=(*QWEN, *VISION)),
    "qwen3_5_nothink": Family(configs.Qwen35RendererConfig, tokens=(*QWEN, *VISION)),
    "qwen3_6": Family(configs.Qwen36RendererConfig, tokens=(*QWEN, *VISION)),
    "glm4moe": Family(configs.GLM45RendererConfig, tokens=(*GLM, *THINK, *CALLS)),
    "glm4moe_training": Family(
        configs.GLM45RendererConfig, tokens=(*GLM, *THINK, *CALLS), ends_last_turn=True
    ),
    "llama3_1": Family(configs.Llama3RendererConfig, **LLAMA),
    "llama3_2": Family(configs.Llama3RendererConfig, {"date_string": DATE}, **LLAMA),
    "deepseekv3": Family(configs.DeepSeekV3RendererConfig, tokens=THINK, **DEEPSEEK),
    "nemotron_3_nano": Family(configs.Nemotron3RendererConfig, model="nano", tokens=QWEN),
    "nemotron_3_super": Family(configs.Nemotron3RendererConfig, model="super", tokens=QWEN),
    "nemotron_3_ultra": Family(configs.Nemotron3UltraRendererConfig, model="ultra", tokens=QWEN),
    "diffusion_gemma": Family(
        configs.Gemma4RendererConfig,
        bos="<bos>",
        eos="<eos>",
        tokens=(*GEMMA, "<|think|>", "<|image|>"),
    ),
}
"""The name of a template → its family. The renderer of gpt-oss has its own vocabulary, so that no
other tokenizer gives its ids."""


def tokenizer_of(source: str, family: Family, texts: Sequence[str]) -> Any:
    """Return the tokenizer of `chats.py` with the family's tokens.

    Tokens of thoughts and calls are ordinary, as in Qwen's: texts may have them.
    """
    tokenizer = chats.tokenizer_of(source, texts)
    tokenizer.add_special_tokens({"bos_token": family.bos, "eos_token": family.eos})
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in family.tokens])
    tokenizer.name_or_path = family.model
    return tokenizer


def first_difference(tokenizer: Any, own: Sequence[int], other: Sequence[int]) -> str:
    """Return where packprep's ids leave the renderer's, with both texts."""
    shared = next(
        (i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b),
        min(len(own), len(other)),
    )
    before, ours, theirs = (
        tokenizer.decode(ids)
        for ids in (own[max(0, shared - 8) : shared], own[shared:][:12], other[shared:][:12])
    )
    return f"after {before!r}: packprep {ours!r}, renderers {theirs!r}"


def as_transformers_gives(record: dict[str, Any], **defaults: Any) -> list[dict[str, Any]]:
    """Return a record's messages as Transformers gives them to a template.

    Fields that are null are left out, and a `thinking` is also the `reasoning_content`.
    """
    messages = []
    for message in record["messages"]:
        given = {key: value for key, value in message.items() if value is not None}
        if "thinking" in given:
            given["reasoning_content"] = given["thinking"]
        messages.append(defaults | given)
    return messages


def sample_of(tokenizer: Any, family: Family, record: dict[str, Any], ids: Sequence[int]) -> Any:
    """Return the renderer's training sample.

    A message without content gets an empty content, unless packprep's ids are those without it:
    some renderers write None, and some need it.
    """
    variables = record.get("chat_template_kwargs", {})
    renderer = create_renderer(tokenizer, family.config(**family.settings, **variables))
    tools = record.get("tools")
    filled = build_training_sample(renderer, as_transformers_gives(record, content=""), tools=tools)
    if list(filled.token_ids) == list(ids):
        return filled
    with contextlib.suppress(KeyError, TypeError, AttributeError):
        given = build_training_sample(renderer, as_transformers_gives(record), tools=tools)
        if list(given.token_ids) == list(ids):
            return given
    return filled


def judge_template(name: str, source: str, records: Sequence[dict[str, Any]]) -> chats.Found:
    """Compare the conversations of one template."""
    found, family = chats.Found(), FAMILIES[name]
    texts = [*map("\n".join, map(strings, records)), source]
    tokenizer = tokenizer_of(source, family, texts)
    special = [token for token in tokenizer.all_special_tokens if token]
    quoted = re.compile("|".join(map(re.escape, [*special, *chats.special_tokens(source)])))
    create_renderer(tokenizer, family.config(**family.settings))
    with tempfile.TemporaryDirectory() as folder:
        chunks, _ = chunks_built(Path(folder) / "chats", tokenizer, records)
    for i, record in enumerate(records):
        found.counts["conversations"] += 1
        if i not in chunks or any(map(quoted.search, strings(record))):
            found.counts["left out"] += 1
            continue
        (document,) = chunks[i]
        has_end = family.ends_last_turn and record["messages"][-1]["role"] == "assistant"
        ends = len(document.ids) - has_end
        ids, trained = document.ids[:ends], document.trained[:ends]
        try:
            sample = sample_of(tokenizer, family, record, ids.tolist())
        except Exception as error:
            found.counts["left out"] += 1
            found.reasons[f"renderers: {type(error).__name__}: {error}".split("\n")[0]] += 1
            continue
        compare(found, i, record, tokenizer, ids, trained, sample)
    return found


def compare(
    found: chats.Found,
    number: int,
    record: dict[str, Any],
    tokenizer: Any,
    ids: np.ndarray,
    trained: np.ndarray,
    sample: Any,
) -> None:
    """Compare packprep's ids and trained tokens of a conversation with the renderer's sample."""
    own, other = ids.tolist(), list(sample.token_ids)
    if own != other:
        if not np.array_equal(chats.judge(tokenizer, record).ids[: len(ids)], ids):
            kind = "ours"
        else:
            kind = "pieces" if tokenizer.decode(own) == tokenizer.decode(other) else "text"
        found.counts[kind] += 1
        sentence = first_difference(tokenizer, own, other)
        found.differences.append(f"{kind} of conversation {number}: {sentence}")
        return
    mask = np.array(sample.loss_mask, np.bool_)
    mask[:1] = False
    kinds = set()
    prompt = chats.prompt_of(tokenizer, record)
    difference = trained.astype(np.int8) - mask
    edges = np.flatnonzero(np.diff(difference, prepend=0, append=0))
    for begin, end in zip(edges, edges[1:], strict=False):
        if not difference[begin]:
            continue
        before, run = (tokenizer.decode(part) for part in (ids[:begin], ids[begin:end]))
        kind = kind_of_run(before, run, bool(trained[begin]), prompt)
        if kind == "mask":
            behind, who = (
                tokenizer.decode(ids[end:][:8]),
                "packprep" if trained[begin] else "renderers",
            )
            found.differences.append(
                f"mask of conversation {number}: only {who} trains {run!r}, between"
                f" {before[-60:]!r} and {behind!r}"
            )
        kinds.add(kind)
    found.counts.update(kinds or {"ids"})


def kind_of_run(before: str, run: str, is_ours: bool, prompt: str) -> str:
    """Return the column of a run of tokens that only one of both trains.

    before: the text before the run. is_ours: packprep trains it. prompt: the generation prompt.
    """
    if re.fullmatch(r"<\|(?:user|observation|system)\|>", run):
        return "next role"
    if is_ours:
        return "space" if run.isspace() else "mask"
    written = (before[-len(prompt) :] + run).rstrip()
    shared = (prompt[:k].rstrip() for k in range(len(prompt), len(run.rstrip()), -1))
    return "prompt" if run.strip() and any(map(written.endswith, shared)) else "mask"


COLUMNS = (
    *("conversations", "left out", "ids", "space", "prompt", "next role", "pieces", "text"),
    *("ours", "mask"),
)


def main(arguments: list[str] | None = None) -> int:
    parser = chats.template_parser(__doc__, count=200)
    options = parser.parse_args(arguments)
    files = [file for file in chats.template_files(options.templates) if file.stem in FAMILIES]
    records = list(conversations(options.count, options.seed))
    width = max(len(file.stem) for file in files)
    chats.print_head(width, COLUMNS)
    failed = False
    for file in files:
        found = judge_template(file.stem, file.read_text("utf-8"), records)
        failed |= bool(found.counts["ours"] or found.counts["mask"])
        chats.print_found(f"{file.stem:{width}}", COLUMNS, found, options.show)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
