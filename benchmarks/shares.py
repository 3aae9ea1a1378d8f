"""Shares, measured: what sources with shares deliver, over many seeds, against what was asked.

python benchmarks/shares.py                              100 seeds of every format, 24 MB of text
python benchmarks/shares.py --seeds 20 --formats jsonl,parquet --megabytes 100 --total 2.5

Documents of 100 B to 300 kB, log-uniform, of three sources that differ in their mix of prose,
numbers and code, tokenized by a BPE that is trained on some of them. Every shard's documents are
read as a build reads them; nothing is rendered.

dataset    datasets within .3 points of every share, and the part that two of a source's longest documents are of all
shard      shards of 8 MiB of text and more within 1.5 points, and the same
total      datasets within .5 % of total_tokens, and the same
s.e.       shares of datasets that lie within two printed standard errors of what the plan said
worst      the largest distance of a dataset's share, in points, and the part that two longest documents are
"""

import argparse
import gzip
import itertools
import json
import os
import random
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from packprep.building.forecast import forecast
from packprep.building.plan import Plan
from packprep.building.planning import look_up, make_plan
from packprep.building.work import read_shard
from packprep.recipe import read_recipe
from packprep.sources.formats import Decoders

SHARES = {"web": 0.6, "code": 0.25, "books": 0.15}
FORMATS = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow", "txt", "tokens", "megatron")
SHARD_BYTES = 8 << 20
_WORDS = (
    "the",
    "of",
    "and",
    "a",
    "to",
    "in",
    "is",
    "that",
    "it",
    "was",
    "for",
    "on",
    "are",
    "with",
    "as",
    "his",
    "they",
    "be",
)


def documents(name: str, n_bytes: int) -> list[str]:
    """Documents of a source, together of about so many bytes. Where they lie tells something of
    them: neighbours are alike."""
    chance, made, size = random.Random(name), [], 0
    numbers = {"web": 0.05, "code": 0.4, "books": 0.01}[name]
    pool = {
        share: _text(random.Random(f"{name} {share}"), share, 2_000_000)
        for share in (numbers / 2, numbers, numbers * 2)
    }
    while size < n_bytes:
        length = int(100 * 3000 ** chance.random())
        like = pool[list(pool)[len(made) // 50 % 3]]
        begin = chance.randrange(len(like) - length)
        made.append(like[begin : begin + length])
        size += length
    return made


def _text(chance: random.Random, numbers: float, size: int) -> str:
    words = [w + s for w in _WORDS for s in ("", "s", "ing", "ed", "'s")]
    parts, n = [], 0
    while n < size:
        part = (
            hex(chance.getrandbits(64)) + "();\n"
            if chance.random() < numbers
            else chance.choice(words)
        )
        parts.append(part)
        n += len(part) + 1
    return " ".join(parts)


def write(folder: Path, format: str, texts: list[str], encode) -> str:
    """Three files of unequal size; the pattern of their names."""
    folder.mkdir(parents=True)
    bounds = [0, len(texts) // 6, len(texts) // 2, len(texts)]
    for k, (begin, end) in enumerate(itertools.pairwise(bounds)):
        some = texts[begin:end]
        lines = "".join(
            json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(some)
        ).encode()
        if format == "jsonl":
            (folder / f"{k}.jsonl").write_bytes(lines)
        elif format == "jsonl.gz":
            (folder / f"{k}.jsonl.gz").write_bytes(gzip.compress(lines, 1, mtime=0))
        elif format == "jsonl.zst":
            (folder / f"{k}.jsonl.zst").write_bytes(zstandard.ZstdCompressor(1).compress(lines))
        elif format == "parquet":
            pq.write_table(
                pa.table({"text": some}),
                folder / f"{k}.parquet",
                row_group_size=max(1, len(some) // (k + 2)),
            )
        elif format == "arrow":
            table = pa.table({"text": some})
            with (
                pa.OSFile(str(folder / f"{k}.arrow"), "wb") as sink,
                pa.ipc.new_file(sink, table.schema) as writer,
            ):
                writer.write_table(table, max_chunksize=100)
        elif format == "txt":
            for i, text in enumerate(some):
                (folder / f"{k}{i:06d}.txt").write_text(text)
        elif format == "tokens":
            column = pa.array([encode(text) for text in some], pa.list_(pa.int32()))
            pq.write_table(
                pa.table({"input_ids": column}),
                folder / f"{k}.parquet",
                row_group_size=max(1, len(some) // 3),
            )
        else:
            _write_pair(folder / f"{k}", [np.array(encode(text), "<u2") for text in some])
    return {"megatron": "*.bin", "tokens": "*.parquet"}.get(format, f"*.{format}")


def _write_pair(path: Path, lists: list[np.ndarray]) -> None:
    lengths = np.array([len(ids) for ids in lists], "<i4")
    pointers = np.concatenate(([0], np.cumsum(lengths.astype(np.int64) * 2)[:-1])).astype("<i8")
    path.with_suffix(".bin").write_bytes(b"".join(ids.tobytes() for ids in lists))
    head = b"MMIDIDX\0\0" + np.array([1], "<u8").tobytes() + b"\x08"
    counts = np.array([len(lists), len(lists) + 1], "<u8").tobytes()
    ends = np.arange(len(lists) + 1, dtype="<i8").tobytes()
    path.with_suffix(".idx").write_bytes(
        head + counts + lengths.tobytes() + pointers.tobytes() + ends
    )


def trained(texts: list[str], path: Path):
    """A byte-level BPE of 2000 tokens, written to `path`."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<eos>", "<pad>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([text[:5000] for text in texts[:300]], trainer)
    tokenizer.save(str(path))
    return tokenizer


def of_seed(folder: Path, pattern: str, format: str, seed: int, total: int) -> dict:
    """What one dataset delivers: tokens by [shard, source], what was planned, uses of documents by
    [source, class]."""
    sources = [
        {"name": name, "paths": [f"{name}/{pattern}"], "share": share}
        for name, share in SHARES.items()
    ]
    if format in ("tokens", "megatron"):
        sources = [{**source, "format": format} for source in sources]
    table = {
        "seed": seed, "seq_length": 2048, "tokenizer": "tokenizer.json", "sources": sources,
        "specials": {"eos": "<eos>", "pad": "<pad>"}, "output": {"shard_text_bytes": SHARD_BYTES},
        "tasks": [{"objective": "causal"}], **({"total_tokens": total} if total else {}),
    }  # fmt: skip
    inputs = look_up(read_recipe(table, folder), {})
    samples: list = []
    stored = make_plan(inputs, samples=samples)
    plan, decoders = Plan(stored, inputs.vocabulary.tokenizer_json), Decoders()
    tokens = np.zeros((plan.shards, len(SHARES)), np.int64)
    longest, uses = np.zeros(len(SHARES), np.int64), []
    for shard in range(plan.shards):
        found = read_shard(plan, shard, decoders).documents
        lengths = np.diff(found.offsets)
        tokens[shard] = np.bincount(found.source, lengths, len(SHARES))
        longest = np.maximum(
            longest, [lengths[found.source == s].max(initial=0) for s in range(len(SHARES))]
        )
        uses.append(np.stack((found.source, found.repeat, np.frexp(lengths)[1])))
    planned = forecast(stored, inputs, samples)["sources"]
    return {
        "tokens": tokens, "longest": longest, "uses": np.concatenate(uses, axis=1),
        "repeat": [source["repeat"] for source in stored["sources"]],
        "share": np.array([source["share"] for source in planned]),
        "error": np.array([source["share_error"] for source in planned]),
    }  # fmt: skip


def measured(folder: Path, format: str, pattern: str, seeds: int, total: int) -> dict:
    """One line of the table."""
    wanted, datasets, shards, totals, errors, worst, two = (
        np.array(list(SHARES.values())),
        [],
        [],
        [],
        [],
        0.0,
        0.0,
    )
    for seed in range(seeds):
        made = of_seed(folder, pattern, format, seed, total)
        tokens, longest = made["tokens"], 2 * made["longest"].max()
        whole = tokens.sum(0)
        off = abs(whole / whole.sum() - wanted)
        datasets.append((off <= 0.003 + longest / whole.sum()).all())
        worst, two = max(worst, 100 * off.max()), max(two, 100 * longest / whole.sum())
        errors += (abs(whole / whole.sum() - made["share"]) <= 2 * made["error"] + 1e-12).tolist()
        for shard in tokens if len(tokens) > 1 else ():
            shards.append(
                (abs(shard / shard.sum() - wanted) <= 0.015 + longest / shard.sum()).all()
            )
        if total:
            totals.append(abs(whole.sum() / total - 1) <= 0.005 + longest / total)
    shown = {"format": format, "seeds": seeds, "shards": len(tokens), "repeats": made["repeat"]}
    parts = {"dataset": datasets, "shard": shards, "total": totals, "s.e.": errors}
    return {
        **shown,
        **{name: float(np.mean(part)) if part else None for name, part in parts.items()},
        "worst": worst,
        "two longest": two,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--megabytes", type=float, default=24, help="of text, in all")
    parser.add_argument(
        "--total", type=float, default=0, help="total_tokens, in uses of all text; 0: not asked for"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        texts = {source: documents(source, int(args.megabytes * 1e6 * part)) for source, part in
                 zip(SHARES, (0.5, 0.2, 0.3), strict=True)}  # fmt: skip
        tokenizer = trained(
            [text for some in texts.values() for text in random.Random(0).sample(some, 100)],
            base / "tokenizer.json",
        )
        total = int(args.total * args.megabytes * 1e6 / 3)
        for format in args.formats.split(","):
            folder = base / format
            folder.mkdir()
            os.symlink(base / "tokenizer.json", folder / "tokenizer.json")
            for source, some in texts.items():
                pattern = write(
                    folder / source, format, some, lambda text: tokenizer.encode(text).ids
                )
            print(json.dumps(measured(folder, format, pattern, args.seeds, total)), flush=True)


if __name__ == "__main__":
    main()
