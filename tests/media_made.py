"""Documents with places of media, a tokenizer with their tokens, and recipes that take them."""

import json
import random
from pathlib import Path
from typing import Any

from tests import made
from tests.tokenizer import tokenizers_made

SPECIALS = {
    "missing": "add",
    "media": {"image": ["<|begin|>", "<|image|>", "<|end|>"], "film": ["", "<|film|>", ""]},
}
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}{%"
    " for p in m.content %}{% if p.type == 'image' %}<|begin|><|image|><|end|>{% elif p.type =="
    " 'film' %}<|film|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}{% if"
    " add_generation_prompt %}<|assistant|>{% endif %}"
)
REFS = ("cat.jpg", "a\nb\0c", "ünï 🙂", "", "s3://bucket/x.png")


def texts(count: int, seed: int = 0, most: int = 90, mean_bytes: int = 120) -> list[dict[str, Any]]:
    """Records of a text, most of them with media, some with loss_spans or a weight."""
    chance = random.Random(f"media {count} {seed}")
    records = []
    for i, text in enumerate(made.texts(count, seed, mean_bytes)):
        places = sorted(chance.randint(0, len(text)) for _ in range(chance.choice([0, 1, 1, 2, 4])))
        record: dict[str, Any] = {"text": text, "media": [entry(chance, at, most) for at in places]}
        if i % 5 == 1:
            begin = chance.randint(0, len(text))
            record["loss_spans"] = [[begin, len(text), *chance.choice(([], [0.5]))]]
        if i % 11 == 2:
            record["weight"] = 2
        records.append(record)
    return records


def entry(chance: random.Random, at: int, most: int) -> dict[str, Any]:
    tokens = chance.choice([1, 2, chance.randint(1, most)])
    return {
        "at": at,
        "tokens": tokens,
        "ref": chance.choice(REFS),
        "kind": chance.choice(["image", "film"]),
    }


def chats(count: int, seed: int = 0, most: int = 60) -> list[dict[str, Any]]:
    """Conversations whose users, and some system messages, show media."""
    chance = random.Random(f"chats {count} {seed}")
    records = []
    for i in range(count):
        roles = ["system"] * (i % 2) + ["user", "assistant"] * chance.randint(1, 4)
        said = made.texts(len(roles), 50 + i, 40)
        messages = []
        for role, text in zip(roles, said, strict=True):
            parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
            for _ in range(0 if role == "assistant" else chance.choice([0, 0, 1, 2])):
                own = entry(chance, 0, most)
                part = {"type": own["kind"], "ref": own["ref"], "tokens": own["tokens"]}
                parts.insert(chance.randint(0, len(parts)), part)
            messages.append({"role": role, "content": parts if len(parts) > 1 or i % 3 else text})
        records.append({"messages": messages})
    return records


def write(folder: Path, name: str, records: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(
        "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8"
    )
    return folder / name


def corpus(folder: Path, seed: int = 0) -> None:
    """a.jsonl of texts, b.jsonl of chats, t.jinja, and a tokenizer in bpe."""
    write(folder, "a.jsonl", texts(60, seed))
    write(folder, "b.jsonl", chats(25, seed))
    (folder / "t.jinja").write_text(TEMPLATE)
    tokenizers_made.write(
        folder / "bpe",
        tokenizers_made.byte_level(
            "<pad>", "<bos>", "<eos>", "<mask>", "[S2S]", "<extra_id_0>", *tokens()
        ),
        tokenizer_config={
            "eos_token": "<eos>",
            "bos_token": "<bos>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
    )


def tokens() -> list[str]:
    """The tokens of SPECIALS."""
    return ["<|begin|>", "<|image|>", "<|end|>", "<|film|>"]


def table(**changes: Any) -> dict[str, Any]:
    """A recipe's table of the corpus: rows of 128, all objectives that take media and one that does
    not."""
    tasks = [
        {"objective": "causal"},
        {"objective": "prefix_lm", "sentinel": True, "mode_token": "[S2S]"},
        {"objective": "masked_diffusion"},
        {"objective": "span_corruption"},
    ]
    takers = ["causal", "prefix_lm", "masked_diffusion"]
    sources = [
        {"name": "texts", "paths": ["a.jsonl"]},
        {"name": "chats", "paths": ["b.jsonl"], "tasks": takers},
    ]
    # Random places are longer than rows on purpose: rejects of theirs are not few.
    documents = {"prepend_bos": True, "chat_template": "t.jinja", "max_bad_fraction": 1.0}
    given = {"seq_length": 128, "documents": documents, "specials": SPECIALS, "tasks": tasks}
    changes = {**given, **changes}
    return made.table(changes.pop("sources", sources), **changes)
