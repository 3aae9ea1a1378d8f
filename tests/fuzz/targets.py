"""What is fuzzed: for each kind of file its seeds, and what is done with any bytes in its place.

Files of a dataset stand in datasets that are built for it; inputs go the way of a build, up to the
arrays of its shards.

A target ends well with any bytes: it raises nothing but what packprep raises on purpose.
"""

import contextlib
import gzip
import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import zstandard

from packprep import cache as remembered
from packprep.building import planning
from packprep.building.commit import done_receipt
from packprep.building.plan import Plan, open_plan
from packprep.building.plan_form import LATER, check_plan
from packprep.building.planning import look_up
from packprep.building.work import make_shard
from packprep.dataset.loader import open_dataset
from packprep.dataset.shard import DATA_ALIGNMENT
from packprep.errors import PackprepError
from packprep.format.digests import digest_of
from packprep.format.json_files import decode, encode, receipt_name, shard_name, with_defaults
from packprep.objectives.tasks import complete
from packprep.recipe import load_recipe, read_recipe
from packprep.storage import LocalFolder
from packprep.tokenizer import proof
from packprep.tokenizer.texts import TokenTexts
from packprep.verification.faults import Faults
from packprep.verification.on_disk import check_shard_files
from tests.fuzz.mutations import (
    bytes_changed,
    bytes_replaced,
    json_changed,
    lines_changed,
    template_changed,
    tokenizer_changed,
)
from tests.fuzz.seeds import (
    CONFIGS,
    CONVERSATIONS,
    TEMPLATES,
    TEXTS,
    arrow_files,
    datatrove_pairs,
    first_of_two,
    lines,
    megatron_pairs,
    parquet_files,
    token_streams,
    token_tables,
    tokenizer_files,
    with_length,
)
from tests.verification.damage import made, write_corpus

RECIPES = {
    "next_token": {
        "tasks": [{"preset": "ul2r"}, {"preset": "causal", "weight": 0.5}],
        "seq_length": 128,
    },
    "in_place": {
        "tasks": [{"preset": p} for p in ("mlm", "duo", "bd3", "fim", "causal")],
        "seq_length": 128,
    },
    "compact": {
        "output": {"columns": "compact", "shard_text_bytes": 6000},
        "packing": {"pad_seq_to_mult": 8},
    },
}
NASTY_TEXTS = 150
"""By which an engine is proven: as a build's, but fewer."""
MOST_SHARDS = 4
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
    """seeds: good files. run: does with any bytes what packprep does with such a file. change: a
    mutation of one."""

    seeds: list[bytes]
    run: Callable[[bytes], None]
    change: Callable[[bytes, random.Random], bytes]


def build_datasets(folder: Path) -> list[Path]:
    """The small datasets of RECIPES, below `folder`; those that are there already are taken as they
    are."""
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
    """Some rows and batches, stored and drawn anew."""
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
        with refusals():
            do()
    finally:
        path.write_bytes(good)


def header_changed(data: bytes, chance: random.Random) -> bytes:
    """A shard with a changed header, its padding and length mended three times in four."""
    end = 8 + int.from_bytes(data[:8], "little")
    if end > len(data) or chance.random() < 0.25:
        return bytes_changed(data, chance)
    text = json_changed(data[8:end].rstrip(b" "), chance).rstrip(b"\n")
    text = text.ljust(-(-(8 + len(text)) // DATA_ALIGNMENT) * DATA_ALIGNMENT - 8)
    length = (
        len(text) if chance.random() < 0.9 else chance.choice([0, 1 << 20, 1 << 40, (1 << 64) - 1])
    )
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


def pair_changed(data: bytes, chance: random.Random) -> bytes:
    """A pair of which one is changed, its index more often than its ids."""
    first, second = first_of_two(data)
    if chance.random() < 0.8:
        return with_length(bytes_replaced(first, chance)) + second
    return with_length(first) + bytes_changed(second, chance)


Make = Callable[[Path], Target]
"""A target that puts its files into a folder, which is its own."""


def _of_datasets(name: str, run: Callable[[list[Path], bytes], None], change: Callable) -> Make:
    """A target for a file in copies of `build_datasets`: whatever ended the process before may have
    left its own there."""

    def make(folder: Path) -> Target:
        built = build_datasets(folder.parent / "built")
        datasets = [
            Path(shutil.copytree(path, folder / path.parent.name, dirs_exist_ok=True))
            for path in built
        ]
        return Target(
            [(directory / name).read_bytes() for directory in datasets],
            lambda d: run(datasets, d),
            change,
        )

    return make


def _shard(datasets: list[Path], data: bytes) -> None:
    for directory in datasets:
        _with_file(directory, shard_name(0), data, lambda directory=directory: _read(directory))


def _manifest(datasets: list[Path], data: bytes) -> None:
    _with_file(datasets[1], "dataset.json", data, lambda: _read(datasets[1]))


def _plan(datasets: list[Path], data: bytes) -> None:
    for directory in datasets[:2]:
        _with_file(directory, "plan.json", data, lambda directory=directory: open_plan(directory))


def _receipt(datasets: list[Path], data: bytes) -> None:
    directory = datasets[0]
    plan = _opened(directory)
    entry = json.loads((directory / "dataset.json").read_bytes())["shards"][0]

    def read() -> None:
        done_receipt(LocalFolder(directory), 0, plan.digests)
        for digest in (entry["receipt_digest"], digest_of(data)):  # with its own it is looked into
            signed = {**entry, "receipt_digest": digest}
            check_shard_files(directory, 0, signed, plan.digest, plan, Faults())

    _with_file(directory, receipt_name(0), data, read)


_opened = lru_cache(open_plan)


def _recipe(folder: Path) -> Target:
    def run(data: bytes) -> None:
        path = folder / "recipe.toml"
        path.write_bytes(data)
        with refusals():
            complete(read_recipe(load_recipe(path), folder))

    return Target([RECIPE_SEED.encode()], run, bytes_changed)


@contextmanager
def refusals() -> Iterator[None]:
    """What packprep raises on purpose passes, if it says something."""
    try:
        yield
    except PackprepError as error:
        assert str(error)


_made_with = lru_cache(planning.made_with)


def _build(folder: Path, **changes: Any) -> Plan:
    """All that a build does but write: files and roles found, engines loaded and proven, a plan,
    the arrays of some shards."""
    table = {"seq_length": 128, "tokenizer": "bytes", "tasks": [{"preset": "causal"}], **changes}
    recipe = complete(read_recipe(table, folder))
    with (
        mock.patch.object(remembered, "keep", lambda *fact: None),
        mock.patch.object(proof, "NASTY_TEXTS", NASTY_TEXTS),
        mock.patch.object(planning, "made_with", _made_with),  # takes longer than all else
    ):
        inputs = look_up(recipe, {})
        planned = decode(encode(planning.make_plan(inputs)), "plan.json")
        check_plan(planned, "plan.json")
        plan = Plan(
            with_defaults(planned, LATER), inputs.vocabulary.tokenizer_json, inputs.prefixes
        )
        for shard in range(min(plan.shards, MOST_SHARDS)):
            make_shard(plan, shard)
    return plan


def _source(
    *names: str, seeds: Callable[[], list[bytes]], change: Callable, **settings: Any
) -> Make:
    """A target for a source of one file, or of a pair of which `first_of_two` tells the second."""

    def make(folder: Path) -> Target:
        def run(data: bytes) -> None:
            parts = (data,) if len(names) == 1 else reversed(first_of_two(data))
            for name, part in zip(names, parts, strict=True):
                (folder / name).write_bytes(part)
            source = {"paths": [names[0]], "repeat": 1.5, **settings}
            with refusals():
                _build(
                    folder,
                    sources=[source],
                    documents={"max_bad_fraction": 1.0, "chat_template": "chat.jinja"},
                )

        (folder / "chat.jinja").write_text(TEMPLATES[0])
        return Target(seeds(), run, change)

    return make


def _tokenizer(folder: Path) -> Target:
    lines = (
        json.dumps({"text": text, "loss_spans": [[0, 5]]} if i % 5 == 0 else {"text": text})
        for i, text in enumerate(TEXTS)
    )
    (folder / "in.jsonl").write_text("\n".join(lines))
    tasks = [{"preset": preset} for preset in ("t5", "mlm", "fim")]

    def run(data: bytes) -> None:
        (folder / "tokenizer.json").write_bytes(data)
        special_text, engine = (("text", "auto"), ("reject", "reference"), ("special", "auto"))[
            len(data) % 3
        ]
        with refusals():
            plan = _build(
                folder,
                tokenizer="tokenizer.json",
                engine=engine,
                tasks=tasks,
                sources=[{"paths": ["in.jsonl"]}],
                documents={"special_text": special_text, "max_bad_fraction": 1.0},
                specials={"missing": "add", "sentinels": "auto"},
            )
            texts = TokenTexts(plan.vocabulary.tokenizer_json, plan.vocabulary.special_ids)
            for id in range(0, plan.vocabulary.vocab_size, plan.vocabulary.vocab_size // 50 + 1):
                texts.meaning(id)

    return Target(tokenizer_files(), run, tokenizer_changed)


def _chat_template(folder: Path) -> Target:
    lines = (json.dumps({"messages": messages}) for messages in CONVERSATIONS)
    (folder / "in.jsonl").write_text("\n".join(lines))

    def run(data: bytes) -> None:
        (folder / "template.jinja").write_bytes(data)
        with refusals():
            _build(
                folder,
                sources=[{"paths": ["in.jsonl"]}],
                documents={
                    "chat_template": "template.jinja",
                    "max_bad_fraction": 1.0,
                    "special_text": "reject",
                },
            )

    return Target([template.encode() for template in TEMPLATES], run, template_changed)


def _tokenizer_config(folder: Path) -> Target:
    """The file beside a tokenizer: names of roles, and a chat template."""
    (folder / "tokenizer.json").write_bytes(tokenizer_files()[0])
    (folder / "in.jsonl").write_text(json.dumps({"messages": CONVERSATIONS[0]}))

    def run(data: bytes) -> None:
        (folder / "tokenizer_config.json").write_bytes(data)
        with refusals():
            _build(
                folder,
                tokenizer=".",
                sources=[{"paths": ["in.jsonl"]}],
                documents={"max_bad_fraction": 1.0},
            )

    return Target([json.dumps(config).encode() for config in CONFIGS], run, json_changed)


_FORMATS: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
    "gz": (lambda data: gzip.compress(data, mtime=0), gzip.decompress),
    "zst": (
        zstandard.compress,
        lambda data: zstandard.ZstdDecompressor().decompress(data, 1 << 20),
    ),
}


def _compressed(name: str) -> Make:
    """A source of compressed lines, changed inside and outside."""
    compress, decompress = _FORMATS[name]
    some_lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS[:9])

    def change(data: bytes, chance: random.Random) -> bytes:
        if chance.random() < 0.5:
            return bytes_changed(data, chance)
        with contextlib.suppress(Exception):  # of what was changed before
            data = compress(lines_changed(decompress(data), chance))
        return data + compress(b"\n{}") if chance.random() < 0.1 else data

    return _source(
        f"in.jsonl.{name}",
        seeds=lambda: [compress(lines()), compress(some_lines * 50)],
        change=change,
    )


TARGETS: dict[str, Make] = {
    "shard": _of_datasets(shard_name(0), _shard, array_changed),
    "manifest": _of_datasets("dataset.json", _manifest, json_changed),
    "plan": _of_datasets("plan.json", _plan, json_changed),
    "receipt": _of_datasets(receipt_name(0), _receipt, json_changed),
    "recipe": _recipe,
    "tokenizer": _tokenizer,
    "tokenizer_config": _tokenizer_config,
    "chat_template": _chat_template,
    "lines": _source("in.jsonl", seeds=lambda: [lines()], change=lines_changed),
    "gzip": _compressed("gz"),
    "zstd": _compressed("zst"),
    "text": _source(
        "in.txt", seeds=lambda: [text.encode() for text in TEXTS], change=bytes_changed
    ),
    "parquet": _source("in.parquet", seeds=parquet_files, change=bytes_replaced),
    "parquet_tokens": _source(
        "in.parquet", seeds=lambda: token_tables()[0], change=bytes_replaced, format="tokens"
    ),
    "arrow": _source("in.arrow", seeds=arrow_files, change=bytes_replaced),
    "arrow_tokens": _source(
        "in.arrow", seeds=lambda: token_tables()[1], change=bytes_replaced, format="tokens"
    ),
    "megatron": _source("in.bin", "in.idx", seeds=megatron_pairs, change=pair_changed),
    "datatrove": _source("in.ds", "in.ds.index", seeds=datatrove_pairs, change=pair_changed),
    "token_stream": _source("in.npy", seeds=token_streams, change=bytes_changed),
}
"""By name; each is made in a folder of its own."""
