"""Datasets of conversations, and their chunks as trainers get them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packprep import open_dataset
from packprep.building.run import build
from packprep.recipe import KEYS, read_recipe

SEQ_LENGTH = 1 << 15
DATE = "2026-01-01"
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
SOUND = {"text": "so that a build has a row whatever is rejected", "loss_spans": [[0, 40]]}


@dataclass
class Chunk:
    """A segment of a document.

    start: number of its first own token in the document; repeated: tokens before that one, which
    repeat the start of the document. ids: [repeated + n]; trained: bool[repeated + n].
    """

    start: int
    repeated: int
    ids: np.ndarray
    trained: np.ndarray


def chunks_built(
    folder: Path,
    tokenizer: Any,
    records: Sequence[dict[str, Any]],
    seq_length: int = SEQ_LENGTH,
    **settings: Any,
) -> tuple[dict[int, list[Chunk]], dict[int, str]]:
    """Build a dataset and return each record's chunks in order, and why records were rejected.

    `settings` are keys of the recipe's table `documents`.
    """
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer.backend_tokenizer.to_str(), "utf-8")
    named = {
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
        "chat_template": tokenizer.chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(named), "utf-8")
    lines = [
        json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in (*records, SOUND)
    ]
    (folder / "chats.jsonl").write_bytes(b"".join(lines))
    begins = np.cumsum([0, *map(len, lines)]).tolist()
    number = {begin: i for i, begin in enumerate(begins)}
    documents = {
        "append_eos": False,
        "max_bad_fraction": 1.0,
        "template_date": DATE,
        **settings,
    }
    recipe = {
        "seq_length": seq_length,
        "tokenizer": ".",
        "engine": "reference",
        "sources": [{"paths": ["chats.jsonl"]}],
        "tasks": [{"preset": "causal"}],
        "documents": {key: value for key, value in documents.items() if key in KEYS["documents"]},
    }
    build(read_recipe(recipe, folder), folder / "packed", Silent())
    found: dict[int, list[Chunk]] = {}
    dataset = open_dataset(folder / "packed")
    for row in map(dataset.row, range(len(dataset))):
        segments = row.segments
        for begin, end, doc, start, tokens in zip(
            *(segments[key].tolist() for key in ("begin", "end", "doc", "start", "tokens")),
            strict=True,
        ):
            trained = np.append(False, row.loss_mask[begin : end - 1] != 0)
            ids = np.array(row.tokens[begin:end], np.int64)
            found.setdefault(number[doc], []).append(
                Chunk(start, end - begin - tokens, ids, trained)
            )
    for chunks in found.values():
        chunks.sort(key=lambda chunk: chunk.start)
    rejects = {}
    for file in (folder / "packed" / "rejects").rglob("*.jsonl"):
        for line in file.read_text("utf-8").splitlines():
            reject = json.loads(line)
            if "reason" in reject:
                rejects[number[reject["position"]]] = f"{reject['reason']}: {reject['detail']}"
    return found, rejects


class Silent:
    """A build's progress that shows nothing."""

    def begin(self, text_bytes: int, shards: int, missing: int) -> None: ...
    def add(self, documents: int, text_bytes: int, tokens: int, rejects: int) -> None: ...
    def say(self, message: str) -> None: ...
    def done(self, item: object) -> None: ...
    def end(self) -> None: ...
