"""Conversations for block diffusion, packed by packprep, and the code of NeMo Automodel.

`block_collator.py`, `block_attention.py` and `block_padding.py` use this module. Automodel's files
are loaded by path, so that no other package of Automodel is needed.
"""

import ast
import importlib
import json
import random
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chats
import numpy as np
from chat_datasets import Silent
from conversations import Strings

from packprep import open_dataset
from packprep.building.run import build
from packprep.dataset.loader import Dataset
from packprep.recipe import read_recipe

MASK = "<mask>"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ message.content }}<|im_end|>{% endif %}"
    "{% if AFTER %}{{ '\n' }}{% endif %}{% endfor %}"
)
ENDS = {
    "answer": CHATML.replace("AFTER", "not loop.last"),
    "newline": CHATML.replace("AFTER", "true"),
}
"""What ends a text → a template: the last answer, or an untrained newline after it."""


@dataclass(frozen=True)
class Kind:
    """The shape of conversations."""

    turns: tuple[int, ...]
    has_system: bool
    most_words: int

    @property
    def name(self) -> str:
        turns = "one turn" if self.turns == (1,) else "several turns"
        system = "system" if self.has_system else "no system"
        return f"{turns}, {system}, {'short' if self.most_words < 50 else 'long'}"


KINDS = [
    Kind(turns, has_system, most_words)
    for turns in ((1,), (2, 3, 4, 5))
    for has_system in (False, True)
    for most_words in (6, 150)
]


def conversations_of(kind: Kind, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield `count` records of one kind. Each depends on the seed and its number."""
    for i in range(count):
        random_words = random.Random(f"{seed} {kind.name} {i}")
        text = Strings(random_words, special=False)
        messages = [{"role": "system", "content": text("s", 40)}] if kind.has_system else []
        for _ in range(random_words.choice(kind.turns)):
            messages.append({"role": "user", "content": text("u", 30)})
            messages.append({"role": "assistant", "content": text("a", kind.most_words)})
        yield {"messages": messages}


def tokenizer_of(template: str, records: Sequence[dict[str, Any]]) -> Any:
    """Return a small Transformers tokenizer with a mask token, trained on the records."""
    texts = (message["content"] for record in records for message in record["messages"])
    tokenizer = chats.tokenizer_of(template, texts)
    tokenizer.add_special_tokens({"mask_token": MASK})
    return tokenizer


def samples_of(tokenizer: Any, records: Sequence[dict[str, Any]]) -> list[dict[str, list[int]]]:
    """Return what Automodel's collator takes: ids and masks as Transformers gives them."""
    samples = []
    for record in records:
        encoded = tokenizer.apply_chat_template(
            record["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        ids = list(encoded["input_ids"])
        samples.append(
            {
                "input_ids": ids,
                "loss_mask": [int(flag) for flag in encoded["assistant_masks"]],
                "attention_mask": [1] * len(ids),
            }
        )
    return samples


def runs_of(flags: Sequence[int] | np.ndarray) -> list[tuple[int, int]]:
    """Return the runs (begin, end) of nonzero flags."""
    bounds = np.flatnonzero(np.diff(np.concatenate(([0], np.asarray(flags) != 0, [0]))))
    return [(begin, end) for begin, end in bounds.reshape(-1, 2).tolist()]


@dataclass
class Packed:
    """A dataset of one block-diffusion task, and the segments of each conversation.

    places: record → (row, first slot, end) of each of its segments. rejects: record → reason.
    """

    dataset: Dataset
    places: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    rejects: dict[int, str] = field(default_factory=dict)
    _columns: dict[tuple[int, int, str], np.ndarray] = field(default_factory=dict)

    def halves(self, record: int, column: str, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return a column of x_t and of x_0 of a conversation that is in one segment."""
        ((r, begin, end),) = self.places[record]
        key = (r, epoch, column)
        if key not in self._columns:  # A row is resampled once for all of its conversations.
            self._columns[key] = np.array(getattr(self.dataset.row(r, epoch), column))
        values = self._columns[key][begin:end]
        return values[: len(values) // 2], values[len(values) // 2 :]


def packed(
    folder: Path,
    tokenizer: Any,
    records: Sequence[dict[str, Any]],
    task: dict[str, Any],
    seq_length: int,
    **documents: Any,
) -> Packed:
    """Build a dataset of the records with one task, and find the records in it.

    `documents` are keys of the recipe's table of this name.
    """
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer.backend_tokenizer.to_str(), "utf-8")
    names = ("bos_token", "eos_token", "pad_token", "mask_token", "chat_template")
    named = {name: getattr(tokenizer, name) for name in names}
    (folder / "tokenizer_config.json").write_text(json.dumps(named), "utf-8")
    lines = [json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records]
    (folder / "chats.jsonl").write_bytes(b"".join(lines))
    positions = np.cumsum([0, *map(len, lines)]).tolist()
    number = {position: i for i, position in enumerate(positions)}
    recipe = {
        "seq_length": seq_length,
        "tokenizer": ".",
        "sources": [{"paths": ["chats.jsonl"]}],
        "tasks": [{"objective": "block_diffusion", **task}],
        "documents": {"append_eos": False, "max_bad_fraction": 1.0, **documents},
    }
    build(read_recipe(recipe, folder), folder / "packed", Silent())
    found = Packed(open_dataset(folder / "packed"))
    for r in range(len(found.dataset)):
        segments = found.dataset.row(r).segments
        names_of_segment = (segments[key].tolist() for key in ("doc", "begin", "end"))
        for doc, begin, end in zip(*names_of_segment, strict=True):
            found.places.setdefault(number[doc], []).append((r, begin, end))
    for file in (folder / "packed" / "rejects").rglob("*.jsonl"):
        for line in file.read_text("utf-8").splitlines():
            reject = json.loads(line)
            if "reason" in reject:
                found.rejects[number[reject["position"]]] = (
                    f"{reject['reason']}: {reject['detail']}"
                )
    return found


def automodel(folder: Path, module: str) -> Any:
    """Return a module of Automodel, without running the `__init__` of its packages."""
    parts = f"nemo_automodel.components.{module}".split(".")
    for n in range(1, len(parts)):
        name = ".".join(parts[:n])
        if name not in sys.modules:
            package = types.ModuleType(name)
            package.__path__ = [str(folder.joinpath(*parts[:n]))]
            sys.modules[name] = package
    return importlib.import_module(".".join(parts))


def function_of(file: Path, name: str, names: dict[str, Any]) -> Any:
    """Return one function of a Python file, compiled with the global `names` only."""
    tree = ast.parse(file.read_text("utf-8"))
    definitions = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    exec(compile(ast.Module(definitions, []), str(file), "exec"), names)
    return names[name]
