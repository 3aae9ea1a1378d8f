"""Small datasets to be damaged, and the means: arrays to write on, and signatures that fit again
afterwards.

A shard is never changed in place of its file: `resigned` gives writable arrays, writes them as a
shard, and puts the new sizes and digests into receipt and manifest, so that only the promise that
was broken can give the damage away.
"""

import io
import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from packprep.building.run import build
from packprep.dataset.manifest import named_removal
from packprep.dataset.shard import encode as encode_shard
from packprep.dataset.shard import open_shard
from packprep.format.digests import digest_of, own_digest
from packprep.format.json_files import decode, encode, receipt_name, shard_name
from packprep.recipe import read_recipe
from packprep.verification import verify_dataset
from tests.made import Silent

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "wizards",
    "brew",
    "coffee",
]
SEQ_LENGTH = 256


def text(chance: random.Random, n_bytes: int) -> str:
    """Words, cut to so many bytes."""
    return " ".join(chance.choice(WORDS) for _ in range(n_bytes // 2 + 1))[:n_bytes]


def write_corpus(folder: Path) -> None:
    """Two sources: `web`, line files with documents of all lengths and some bad lines, and `books`,
    one compressed file."""
    chance = random.Random(folder.name)
    lengths = [1, 2, 3, 5, 30, 90, 200, 260, 700]
    (folder / "web").mkdir(parents=True)
    for name in ("a", "b"):
        lines = [json.dumps({"text": text(chance, chance.choice(lengths))}) for _ in range(80)]
        lines[7] = '{"text": "no end'
        lines[30] = '{"body": "the wrong key"}'
        lines[55] = '{"text": ""}'
        (folder / f"web/{name}.jsonl").write_text("\n".join(lines) + "\n")
    lines = [json.dumps({"text": text(chance, chance.choice(lengths))}) for _ in range(60)]
    (folder / "books.jsonl.zst").write_bytes(zstandard.compress(("\n".join(lines) + "\n").encode()))


def recipe_table(**changes: Any) -> dict[str, Any]:
    """A recipe's table: ul2r and causal tasks, bytes as tokens, a few shards."""
    table = {
        "tokenizer": "bytes",
        "seq_length": SEQ_LENGTH,
        "sources": [
            {"name": "web", "paths": ["web/*.jsonl"]},
            {"name": "books", "paths": ["books.jsonl.zst"]},
        ],
        "tasks": [{"preset": "ul2r"}, {"preset": "causal", "weight": 0.5}],
        "output": {"shard_text_bytes": 12_000},
    }
    return {**table, **changes}


def made(folder: Path, **changes: Any) -> Path:
    """A dataset of the corpus in `folder/in`, which is written if it is not there: its
    directory."""
    corpus = folder / "in"
    if not corpus.exists():
        write_corpus(corpus)
    out = folder / "out"
    outcome = build(read_recipe(recipe_table(**changes), corpus), out, Silent())
    assert outcome.manifest is not None and len(outcome.manifest["shards"]) >= 3
    return out


def copied(dataset: Path, folder: Path) -> Path:
    """A copy of a dataset that may be damaged."""
    return Path(shutil.copytree(dataset, folder / "copy"))


def report_of(directory: Path, replay: int | None = None, **moved: str | Path) -> dict[str, Any]:
    """What `verify` gives; `moved`: source = prefix."""
    return verify_dataset(
        directory, replay, {k: str(v) for k, v in moved.items()}, (0, 1), 0, Silent()
    )


def faults_of(
    directory: Path, replay: int | None = None, **moved: str | Path
) -> list[dict[str, Any]]:
    """The faults that `verify` lists."""
    report = report_of(directory, replay, **moved)
    assert bool(report["faults"]) == bool(report["listed"]) and report["faults"] >= len(
        report["listed"]
    )
    return report["listed"]


def promises_of(faults: list[dict[str, Any]]) -> set[str]:
    return {fault["promise"] for fault in faults}


def read_json(path: Path) -> Any:
    return decode(path.read_bytes(), path.name)


def manifest_of(directory: Path) -> dict[str, Any]:
    return read_json(directory / "dataset.json")


def sign(directory: Path) -> None:
    """Put the receipts' digests, and its own, into the manifest."""
    manifest = manifest_of(directory)
    for b, entry in enumerate(manifest["shards"]):
        entry["receipt_digest"] = digest_of((directory / receipt_name(b)).read_bytes())
    del manifest["digest"]
    (directory / "dataset.json").write_bytes(
        encode({**manifest, "digest": digest_of(encode(manifest))})
    )


def edit_manifest(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and sign it."""
    manifest = manifest_of(directory)
    change(manifest)
    (directory / "dataset.json").write_bytes(encode(manifest))
    sign(directory)


def edit_receipt(directory: Path, change: Callable[[dict[str, Any]], None], shard: int = 0) -> None:
    """Change a receipt and sign what names it."""
    path = directory / receipt_name(shard)
    receipt = read_json(path)
    change(receipt)
    path.write_bytes(encode(receipt))
    sign(directory)


def edit_plan(directory: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Change the plan, or put what `change` gives in its place, and sign all that names it."""
    path = directory / "plan.json"
    before = digest_of(path.read_bytes())
    plan = read_json(path)
    plan = change(plan) or plan
    path.write_bytes(encode({**plan, "digest": own_digest(plan)}))
    after = digest_of(path.read_bytes())
    for b in range(len(manifest_of(directory)["shards"])):
        if read_json(directory / receipt_name(b))["plan_digest"] == before:
            edit_receipt(directory, lambda receipt: receipt.update(plan_digest=after), b)
    same = {key: plan[key] for key in ("fingerprint", "recipe", "tasks")}
    if "removed" in plan:
        same["removed"] = named_removal(plan)
    edit_manifest(
        directory,
        lambda manifest: manifest.update(same, plan={"file": "plan.json", "digest": after}),
    )


def arrays_of(directory: Path, shard: int = 0) -> dict[str, np.ndarray]:
    """name → a copy of a shard's array, to write on."""
    manifest = manifest_of(directory)
    opened = open_shard(
        directory / shard_name(shard), manifest["seq_length"], manifest["token_dtype"]
    )
    return {name: np.array(array) for name, array in opened.arrays.items()}


def put_shard(directory: Path, data: bytes, shard: int = 0, **entries: Any) -> None:
    """Write a shard's bytes, and their size and digest (and `entries`) into receipt and
    manifest."""
    (directory / shard_name(shard)).write_bytes(data)
    entries = {"bytes": len(data), "digest": digest_of(data), **entries}
    edit_manifest(directory, lambda manifest: manifest["shards"][shard].update(entries))
    edit_receipt(directory, lambda receipt: receipt.update(entries), shard)


@contextmanager
def resigned(directory: Path, shard: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """A shard's arrays, to be damaged inside the block; then the shard is written and everything
    signed again."""
    arrays = arrays_of(directory, shard)
    yield arrays
    buffer = io.BytesIO()
    for part in encode_shard(arrays):
        buffer.write(part)
    counts = {"rows": len(arrays["row_offsets"]) - 1, "segments": len(arrays["segment_key"])}
    put_shard(directory, buffer.getvalue(), shard, **counts)


def places_of(arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, begin, end) int64[segments]: where each segment lies, by a walk over cu_seqlens (those
    without padding inside)."""
    row, begin, end = [], [], []
    offsets = arrays["row_offsets"]
    for r in range(len(offsets) - 1):
        cu = arrays["cu_seqlens"][offsets[r] + r : offsets[r + 1] + r + 1]
        physical = arrays.get("cu_seqlens_padded", arrays["cu_seqlens"])[
            offsets[r] + r : offsets[r + 1] + r + 1
        ]
        for i in range(len(cu) - 1):
            row.append(r)
            begin.append(int(physical[i]))
            end.append(int(physical[i] + cu[i + 1] - cu[i]))
    return np.array(row), np.array(begin), np.array(end)


def segments_of(directory: Path, arrays: dict[str, np.ndarray], *tasks: str) -> np.ndarray:
    """Indices of a shard's segments of the named tasks."""
    names = [task["name"] for task in manifest_of(directory)["tasks"]]
    return np.flatnonzero(np.isin(arrays["segment_task"], [names.index(task) for task in tasks]))
