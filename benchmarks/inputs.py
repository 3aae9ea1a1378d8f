"""What the contenders read, made from the corpus once and kept: cuts of it, their formats, their
tokens."""

import json
import os
from pathlib import Path

import corpus
from peers.contender import Config

SOURCES = ("jsonl", "zst", "gz", "parquet")
"""Keys of a configuration: the same documents in each format."""


def cut_lines(lines: Path, size: int, target: Path) -> None:
    """The first lines of a file, until they come to `size` bytes."""
    written = 0
    with lines.open("rb") as source, target.open("wb") as file:
        for line in source:
            file.write(line)
            written += len(line)
            if written >= size:
                break


def split_lines(lines: Path, count: int, folder: Path) -> None:
    """The file in `count` parts of about the same size, for tools that take a file a process."""
    folder.mkdir()
    size, written = lines.stat().st_size, 0
    with lines.open("rb") as source:
        for i in range(count):
            with (folder / f"part{i}.jsonl").open("wb") as target:
                while written < size * (i + 1) // count:
                    line = source.readline()
                    target.write(line)
                    written += len(line)


def prepare(corpus_folder: Path, size: int, workers: int, seq_length: int, folder: Path) -> Config:
    """The configuration of contenders for the first `size` bytes of the corpus; makes in `folder`
    what is missing."""
    lines = folder / f"{size}.jsonl"
    if not lines.exists():
        cut_lines(corpus_folder / "corpus.jsonl", size, lines)
    config: Config = {
        "jsonl": str(lines),
        "workers": workers,
        "seq_length": seq_length,
        "work": str(folder),
    }
    for suffix, write in corpus.FORMATS.items():
        path = folder / f"{size}{suffix}"
        if not path.exists():
            write(lines, path)
        config[suffix.rpartition(".")[2]] = str(path)
    parts = folder / f"{size}-{workers}"
    if not parts.exists():
        split_lines(lines, workers, parts)
    config["parts"] = str(parts)
    one = folder / "one.jsonl"
    if not one.exists():
        one.write_text(json.dumps({"id": "0", "text": "One short document. " * 8}) + "\n")
    config["one"] = str(one)
    tokenizer = corpus_folder / "tokenizer.json"
    config["tokenizer"] = str(tokenizer)
    parsed = json.loads(tokenizer.read_bytes())
    added = {token["content"]: token["id"] for token in parsed["added_tokens"]}
    config["eos"] = next(text for text in (corpus.EOS, "<eos>", "</s>") if text in added)
    config["eos_id"] = added[config["eos"]]
    config["vocab_size"] = 1 + max(*parsed["model"]["vocab"].values(), *added.values())
    config["tokens"], config["offsets"] = (
        str(folder / f"{size}-tokens.npy"),
        str(folder / f"{size}-offsets.npy"),
    )
    config["rows"] = str(folder / f"{size}-rows.npy")
    return config


def prepare_tokens(config: Config) -> None:
    """Token ids of the input (int32[tokens], documents' bounds int64[documents + 1], int32[rows,
    seq_length] without the rest), for the contenders that begin there."""
    import numpy as np
    from tokenizers import Tokenizer

    if os.path.exists(config["rows"]):
        return
    tokenizer = Tokenizer.from_file(config["tokenizer"])
    ids, lengths = [], []
    with open(config["jsonl"], encoding="utf-8") as file:
        while lines := file.readlines(1 << 22):
            for encoded in tokenizer.encode_batch_fast(
                [json.loads(line)["text"] for line in lines]
            ):
                ids.append(np.array(encoded.ids, np.int32))
                lengths.append(len(encoded.ids))
    tokens = np.concatenate(ids)
    np.save(config["tokens"], tokens)
    np.save(config["offsets"], np.cumsum([0, *lengths], dtype=np.int64))
    width = config["seq_length"]
    np.save(config["rows"], tokens[: len(tokens) // width * width].reshape(-1, width))
