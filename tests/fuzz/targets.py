"""What is fuzzed: for each kind of file its seeds, from datasets that are built for it, and what is done with any bytes.

A target ends well with any bytes: it raises nothing but what packprep raises on purpose.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from packprep.building.commit import done_receipt
from packprep.building.output import LocalOutput
from packprep.building.run import open_job
from packprep.dataset.json_files import receipt_name, shard_name
from packprep.dataset.loader import open_dataset
from packprep.dataset.shard import DATA_ALIGNMENT
from packprep.digests import digest_of
from packprep.errors import PackprepError
from packprep.objectives.tasks import complete
from packprep.recipe import load_recipe, read_recipe
from packprep.verification.files import check_shard_files
from packprep.verification.report import Faults
from tests.fuzz.mutations import bytes_changed, json_changed
from tests.verification.damage import made, write_corpus

RECIPES = {
    "next_token": {"tasks": [{"preset": "ul2r"}, {"preset": "causal", "weight": 0.5}], "seq_length": 128},
    "in_place": {"tasks": [{"preset": p} for p in ("mlm", "duo", "bd3", "fim", "causal")], "seq_length": 128},
    "compact": {"output": {"columns": "compact", "shard_text_bytes": 6000}, "packing": {"pad_seq_to_mult": 8}},
}
COLUMNS = ("tokens", "labels", "segment_ids", "position_ids", "loss_mask", "loss_weights")

RECIPE_SEED = """
seq_length = 4096
seed = 7
tokenizer = "bytes"
engine = "auto"
[[sources]]
name = "web"
paths = ["web/*.jsonl", "more/**/*.parquet"]
repeat = 2.5
sample = [0.0, 0.9]
tasks = ["r", "x"]
[[sources]]
paths = "books.txt"
format = "text"
[documents]
append_eos = true
long = "truncate"
min_tokens = 4
max_bad_fraction = 0.01
[packing]
algorithm = "best_fit"
pad_seq_to_mult = 8
[specials]
missing = "add"
eos = "<|eos|>"
sentinels = {first = 10, count = 100}
"[NLU]" = "<|reserved_1|>"
[[tasks]]
preset = "ul2r"
weight = 0.5
[[tasks]]
objective = "masked_diffusion"
noise_range = [0.1, 0.9]
exact_count = true
replace = [0.8, 0.1, 0.1]
[output]
shard_text_bytes = "64MiB"
columns = "compact"
"""


@dataclass
class Target:
    """seeds: good files. run: does with any bytes what packprep does with such a file. change: a mutation of one."""

    seeds: list[bytes]
    run: Callable[[bytes], None]
    change: Callable[[bytes, random.Random], bytes]


def build_datasets(folder: Path) -> list[Path]:
    """The small datasets of RECIPES, below `folder`; those that are there already are taken as they are."""
    built = []
    for name, changes in RECIPES.items():
        out = folder / name / "out"
        if not (out / "dataset.json").exists():
            if not (folder / name / "in").exists():
                write_corpus(folder / name / "in")
            made(folder / name, **{"output": {"shard_text_bytes": 6000}, **changes})
        built.append(out)
    return built


def _read(directory: Path) -> None:
    """Some rows and batches, stored and noised anew."""
    dataset = open_dataset(directory)
    rows = [i for i in (0, 1, len(dataset) - 1) if 0 <= i < len(dataset)]
    calls: list[Callable[[], object]] = [
        lambda: dataset.task_params,
        lambda: dataset.batch(rows, columns=COLUMNS),
        lambda: dataset.batch(rows, columns=COLUMNS, epochs=[1] * len(rows)),
        lambda: [dataset.row(i).segments for i in rows],
    ]
    refusals = 0
    for call in calls:
        try:
            call()
        except PackprepError:
            refusals += 1
    if refusals == len(calls):
        raise PackprepError("all of it is refused")


def _with_file(directory: Path, name: str, data: bytes, do: Callable[[], object]) -> None:
    """Do something while a file of the dataset has other bytes."""
    path = directory / name
    good = path.read_bytes()
    path.write_bytes(data)
    try:
        do()
    except PackprepError as error:
        assert str(error)
    finally:
        path.write_bytes(good)


def header_changed(data: bytes, chance: random.Random) -> bytes:
    """A shard with a changed header, its padding and length mended three times in four."""
    end = 8 + int.from_bytes(data[:8], "little")
    if end > len(data) or chance.random() < 0.25:
        return bytes_changed(data, chance)
    text = json_changed(data[8:end].rstrip(b" "), chance).rstrip(b"\n")
    text = text.ljust(-(-(8 + len(text)) // DATA_ALIGNMENT) * DATA_ALIGNMENT - 8)
    length = len(text) if chance.random() < 0.9 else chance.choice([0, 1 << 20, 1 << 40, (1 << 64) - 1])
    return length.to_bytes(8, "little") + text + data[end:]


def array_changed(data: bytes, chance: random.Random) -> bytes:
    """A shard with other numbers in its arrays, or a changed header."""
    if chance.random() < 0.5:
        return header_changed(data, chance)
    changed = np.frombuffer(data, np.uint8).copy()
    begin = min(DATA_ALIGNMENT, len(changed))
    for _ in range(chance.choice([1, 4, 64])):
        if begin == len(changed):
            break
        at = chance.randrange(begin, len(changed))
        changed[at : at + chance.choice([1, 4, 8])] = chance.choice([0, 1, 0x7F, 0x80, 0xFF])
    return changed.tobytes()


def targets(folder: Path) -> dict[str, Target]:
    """name → target; the datasets that they are made of are built in `folder`."""
    datasets = build_datasets(folder)
    jobs = [open_job(directory) for directory in datasets]

    def files(name: str) -> list[bytes]:
        return [(directory / name).read_bytes() for directory in datasets]

    def shard(data: bytes) -> None:
        for directory in datasets:
            _with_file(directory, shard_name(0), data, lambda directory=directory: _read(directory))

    def manifest(data: bytes) -> None:
        _with_file(datasets[1], "dataset.json", data, lambda: _read(datasets[1]))

    def plan(data: bytes) -> None:
        for directory in datasets[:2]:
            _with_file(directory, "plan.json", data, lambda directory=directory: open_job(directory))

    def receipt(data: bytes) -> None:
        job, directory = jobs[0], datasets[0]
        entry = json.loads((directory / "dataset.json").read_bytes())["shards"][0]

        def read() -> None:
            done_receipt(LocalOutput(directory), 0, job.digest)
            for digest in (entry["receipt_digest"], digest_of(data)):  # with its own it is looked into
                signed = {**entry, "receipt_digest": digest}
                check_shard_files(directory, 0, signed, job.digest, job, Faults())

        _with_file(directory, receipt_name(0), data, read)

    def recipe(data: bytes) -> None:
        path = folder / "recipe.toml"
        path.write_bytes(data)
        try:
            complete(read_recipe(load_recipe(path), folder))
        except PackprepError as error:
            assert str(error)

    return {
        "shard": Target(files(shard_name(0)), shard, array_changed),
        "manifest": Target(files("dataset.json"), manifest, json_changed),
        "plan": Target(files("plan.json"), plan, json_changed),
        "receipt": Target(files(receipt_name(0)), receipt, json_changed),
        "recipe": Target([RECIPE_SEED.encode()], recipe, bytes_changed),
    }
