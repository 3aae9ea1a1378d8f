"""Datasets of a few documents in many scripts, built once."""

import json
from pathlib import Path

import pytest

from packprep.building.run import Outcome, build
from packprep.recipe import read_recipe
from tests.inspection import datasets_made

DOCUMENTS = [
    "The cat sat on the mat, and the dog did not mind. " * 4,
    "Zażółć gęślą jaźń — naïve café, Ünïcödé.",
    "日本語の文章です。漢字とかな。" * 3,
    "emoji 👍🏽 and 👨‍👩‍👧 and flags 🇩🇪🇯🇵 and hearts ❤️",
    "नमस्ते दुनिया; कैसे हैं आप",
    "combining: e\u0301 o\u0308 and zero\u200bwidth",
    "tabs\tand\r\nlines\x00and\x7fmore\nof them\n\n",
    "‹extra_id_0› <extra_id_0> is only text here, \ufffd too",
    "x",
    "",
    "한국어 문장입니다. ไทย ก็ดี",
    "The quick brown fox jumps over the lazy dog. " * 9,
]


class Silent:
    """Progress that nobody sees."""

    def begin(self, text_bytes, shards, missing): ...
    def add(self, documents, text_bytes, tokens, rejects): ...
    def say(self, message): ...
    def done(self, item: object) -> None: ...
    def end(self): ...


def built(folder: Path, name: str, **table) -> Outcome:
    """The outcome of building folder/corpus/*.jsonl into folder/name."""
    recipe = {
        "tokenizer": "bytes",
        "seq_length": 256,
        "tasks": [{"preset": "ul2r"}],
        "sources": [{"paths": ["corpus/*.jsonl"]}],
    }
    return build(read_recipe({**recipe, **table}, folder), folder / name, Silent())


def write_corpus(folder: Path) -> None:
    corpus = folder / "corpus"
    corpus.mkdir()
    for name, documents in (("a.jsonl", DOCUMENTS), ("b.jsonl", DOCUMENTS[::-1] * 4)):
        lines = [json.dumps({"text": text}, ensure_ascii=False) for text in documents]
        (corpus / name).write_text(
            "".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n"
        )
    with open(corpus / "b.jsonl", "a", encoding="utf-8") as file:
        file.write('{"words": "no text here"}\n')


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """corpus/ and what was built from it: ul2r/ in several shards; causal/, whose segments are
    padded to 8 slots."""
    folder = tmp_path_factory.mktemp("inspection")
    write_corpus(folder)
    built(folder, "ul2r", output={"shard_text_bytes": "2KiB"})
    sources = [{"name": name, "paths": [f"corpus/{name}.jsonl"]} for name in ("a", "b")]
    padded = {"pad_seq_to_mult": 8}
    built(
        folder,
        "causal",
        tasks=[{"preset": "causal"}],
        sources=sources,
        packing=padded,
        documents={"prepend_bos": True},
    )
    return folder


@pytest.fixture(scope="session", params=["ul2r", "causal"])
def dataset(request, folder):
    return folder / request.param


@pytest.fixture(scope="session", params=datasets_made.CONFIGURATIONS)
def known(request, tmp_path_factory):
    """A dataset of which every document is known, in each of its configurations."""
    return datasets_made.known(tmp_path_factory.mktemp(request.param), request.param)
