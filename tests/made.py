"""Small corpora, recipes, builds and segments, made on the spot. Everything is a function of its
arguments."""

import gzip
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import zstandard

from packprep.building import commit
from packprep.building import run as building
from packprep.building.run import Outcome
from packprep.building.run import build as run_build
from packprep.building.run import build_lengths as run_build_lengths
from packprep.documents.reading import Documents
from packprep.objectives.objective import Ids, Task
from packprep.objectives.tasks import complete, resolve
from packprep.randomness import bits64, integers, text_key
from packprep.recipe import Recipe, read_recipe
from packprep.sources.slices import PlannedSource
from tests.twin import reading
from tests.twin.records import Keys

ROOT = Path(__file__).parents[1]
_COMPRESS = {
    ".gz": lambda data: gzip.compress(data, mtime=0),
    ".zst": zstandard.ZstdCompressor().compress,
}
_WORDS = (
    "the",
    "corpus",
    "becomes",
    "rows",
    "once",
    "offline",
    "so",
    "that",
    "trainers",
    "ünïcödé",
    "数据",
    "🙂",
    "(read)",
)


# Corpora


def texts(count: int, seed: int = 0, mean_bytes: int = 300) -> list[str]:
    """`count` texts of lognormal lengths, some of them of 1 to 4 bytes."""
    return list(_texts(count, seed, mean_bytes))


@cache
def _texts(count: int, seed: int, mean_bytes: int) -> list[str]:
    chance = random.Random(f"{seed} {count}")
    made = []
    for _ in range(count):
        if chance.random() < 0.02:
            made.append("a b c"[: chance.randint(1, 4)])
            continue
        wanted = mean_bytes * chance.lognormvariate(-0.5, 1.0)
        words: list[str] = []
        size = 0
        while size < wanted:
            words.append(
                chance.choice(_WORDS)
                + (f"{chance.randint(0, 10**9)}" if chance.random() < 0.3 else "")
            )
            size += len(words[-1]) + 1
        made.append(" ".join(words) or "one")
    return made


def write_lines(path: Path, documents: Sequence[str], text_key: str = "text") -> Path:
    """A JSONL file, compressed if its name says so."""
    data = b"".join(
        json.dumps({text_key: text}, ensure_ascii=False).encode() + b"\n" for text in documents
    )
    return write_compressed(path, data)


def write_compressed(path: Path, data: bytes) -> Path:
    """Write data, compressed if the file's name says so."""
    return write(path, _COMPRESS.get(path.suffix, bytes)(data))


def write_parquet(path: Path, documents: Sequence[str], rows_per_group: int = 50) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": list(documents)}), path, row_group_size=rows_per_group)
    return path


def write_arrow(path: Path, documents: Sequence[str], rows_per_batch: int = 50) -> Path:
    import pyarrow as pa

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"text": list(documents)})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows_per_batch)
    return path


def write_texts(folder: Path, documents: Sequence[str], prefix: str = "d") -> None:
    """One text file a document."""
    for i, text in enumerate(documents):
        write(folder / f"{prefix}{i:04d}.txt", text.encode())


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def mixed_corpus(folder: Path, seed: int = 0, scale: int = 1) -> list[dict[str, Any]]:
    """Files of all kinds; gives the tables of their three sources."""
    write_lines(folder / "web" / "a.jsonl", texts(250 * scale, seed))
    write_lines(folder / "web" / "b.jsonl.zst", texts(200 * scale, seed + 1))
    write_lines(folder / "web" / "c.jsonl.gz", texts(120 * scale, seed + 2))
    write_parquet(folder / "books" / "d.parquet", texts(180 * scale, seed + 3, 700))
    write_texts(folder / "notes", ["", *texts(30 * scale, seed + 4), ""])
    return [
        {"name": "web", "paths": ["web/*"]},
        {"name": "books", "paths": ["books/*.parquet"], "repeat": 1.5},
        {"name": "notes", "paths": ["notes/*.txt"]},
    ]


def uses_of(source: PlannedSource) -> Counter:
    """(file name, position, use) of what a source delivers, by the twin: every document in each
    whole use, and in the last one those of each piece that its fraction takes."""
    resolved = {
        key: getattr(source, key) for key in ("name", "seed", "prefix", "repeat", "step_bytes")
    }
    asked = {
        "sample": source.source.sample,
        "format": source.source.format,
        "keys": Keys(source.source.text_key),
    }
    plain = {
        **resolved,
        **asked,
        "files": [(file.name, file.size, file.pieces) for file in source.files],
    }
    reader = reading.TextReader(False, lambda messages: ())

    def listed(file: int, part: int) -> list[tuple[int, int]]:
        return reading.sizes(plain, file, part, reader)

    found: Counter = Counter()
    for piece in reading.pieces(plain):
        for use in range(reading.uses(plain)):
            if reading.kept_of_use(plain, use) < 1:
                taken = reading.chosen_of_piece(plain, piece, use, listed)
            else:
                every = (
                    (file, position)
                    for file in piece.files
                    for position, _ in listed(file, piece.part)
                )
                taken = {place for place in every if reading.is_sampled(plain, *place)}
            found.update((plain["files"][file][0], position, use) for file, position in taken)
    return found


# Recipes and builds


def table(sources: Sequence[dict[str, Any]] | str, **changes: Any) -> dict[str, Any]:
    """A recipe's table: bytes, rows of 512, ul2r, shards of 50 kB. `sources` may be one path."""
    given = [{"paths": [sources]}] if isinstance(sources, str) else list(sources)
    made = {
        "seq_length": 512,
        "tokenizer": "bytes",
        "sources": given,
        "tasks": [{"preset": "ul2r"}],
        "output": {"shard_text_bytes": 50_000},
    }
    return {**made, **changes}


class Silent:
    """A progress that shows nothing and remembers: `said`, `begun` (text bytes, shards, missing),
    and sums."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.begun: list[tuple[int, int, int]] = []
        self.documents = self.text_bytes = self.tokens = self.rejects = self.ended = 0

    def begin(self, text_bytes: int, shards: int, missing: int) -> None:
        self.begun.append((text_bytes, shards, missing))

    def add(self, documents: int, text_bytes: int, tokens: int, rejects: int) -> None:
        self.documents += documents
        self.text_bytes += text_bytes
        self.tokens += tokens
        self.rejects += rejects

    def say(self, message: str) -> None:
        self.said.append(message)

    def done(self, item: object) -> None: ...

    def end(self) -> None:
        self.ended += 1


def build(
    recipe: dict[str, Any], base: Path, out: Path, workers: int = 0, **options: Any
) -> Outcome:
    """Build a recipe's table into `out`, with the options of `building.run.build`.

    Without `progress`, the build skips the forecast, which takes a third of a small build.
    """
    read, progress = read_recipe(recipe, base), options.pop("progress", None)
    if progress is not None:
        return run_build(read, out, progress, workers, **options)
    with _without_forecast():
        return run_build(read, out, Silent(), workers, **options)


_with_forecast, _forecast = ContextVar("with forecast", default=True), building.forecast


def _forecast_if_wanted(*arguments: Any) -> dict[str, Any]:
    return _forecast(*arguments) if _with_forecast.get() else {"warnings": []}


building.forecast = _forecast_if_wanted
building.LIST_AGAIN_S = 0  # No folder of the tests caches its listing.


@contextmanager
def _without_forecast() -> Iterator[None]:
    """Skip the forecast in builds of this thread."""
    token = _with_forecast.set(False)
    try:
        yield
    finally:
        _with_forecast.reset(token)


def build_lengths(
    recipe: dict[str, Any], base: Path, out: Path, workers: int = 0, **options: Any
) -> list[Outcome]:
    """Build a recipe's table with seq_lengths into `out`; options as of `building.run.build`."""
    read = read_recipe(recipe, base)
    with _without_forecast():
        return run_build_lengths(read, out, Silent(), workers=workers, **options)


def build_without_rows(folder: Path) -> Path:
    """A dataset whose documents are empty, as older versions published it."""
    write_lines(folder / "a.jsonl", ["", ""])
    checks = ("_refuse_unused_sources", "_refuse_without_rows")
    with mock.patch.multiple(commit, **dict.fromkeys(checks, lambda *arguments: None)):
        build(table("a.jsonl"), folder, folder / "out")
    return folder / "out"


def contents(folder: Path, under: str = "") -> dict[str, bytes]:
    """Relative name → bytes of all files of a folder, hidden ones too; `under`: only those whose
    names begin so."""
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return {name: (folder / name).read_bytes() for name in names if name.startswith(under)}


def temporaries(folder: Path) -> list[str]:
    return [name for name in contents(folder) if name.endswith(".tmp")]


BUILD = """
import json, sys
from pathlib import Path
from packprep.errors import PackprepError
from tests import made
if __name__ == "__main__":
    table, base, out, workers = json.loads(sys.argv[1]), *map(Path, sys.argv[2:4]), int(sys.argv[4])
    before = sys.argv[5] if len(sys.argv) > 5 else ""
    exec(before)
    try:
        (made.build_lengths if "seq_lengths" in table else made.build)(table, base, out, workers)
    except PackprepError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(error.exit_status)
"""


def start_build(
    folder: Path, recipe: dict[str, Any], out: Path, workers: int = 1, before: str = ""
) -> subprocess.Popen:
    """A build in a process group of its own; its corpus and recipe lie in `folder`. `before`: code
    that it runs first. An error is printed as "Class: message", and gives its exit status."""
    command = [
        sys.executable,
        "-c",
        BUILD,
        json.dumps(recipe),
        str(folder),
        str(out),
        str(workers),
        before,
    ]
    return subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def environment(**changes: str) -> dict[str, str]:
    """The environment in which another Python finds packprep and its tests."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", **changes}


def run_python(code: str, cwd: Path = ROOT, **changes: str) -> subprocess.CompletedProcess:
    """Run code in another Python, which finds packprep in `cwd`; `changes` of its environment. Not
    checked."""
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=cwd, env=environment(**changes), capture_output=True, text=True, timeout=120
    )


def run_copied(folder: Path, code: str) -> str:
    """What code prints in another Python that finds packprep, and what it keeps from run to run, in
    `folder`."""
    done = run_python(code, folder, PYTHONPATH=str(folder), NUMBA_CACHE_DIR=str(folder / "cache"))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# Segments without files

MODE_TOKENS = {"[NLU]": 260, "[NLG]": 261, "[S2S]": 262}
BOS, EOS, PAD, MASK = 257, 258, 256, 259
FIM = (263, 264, 265)
UTF8_INSIDE = (np.arange(65536) & 0xFFC0 == 0x80).astype(np.uint8)
"""1 where a token, a byte, is inside a character of UTF-8."""


def ids(sentinels: Sequence[int] | int = 3000) -> Ids:
    """Ids of a vocabulary whose ordinary tokens are the bytes; `sentinels`: how many, or which."""
    if isinstance(sentinels, int):
        sentinels = range(1000, 1000 + sentinels)
    special = (*range(PAD, 266), *sentinels)
    return Ids(65536, PAD, BOS, EOS, MASK, np.array(sentinels, np.int32), FIM, special, UTF8_INSIDE)


def mix(changes: dict[str, Any], vocabulary: Ids | None = None) -> tuple[Recipe, list[Task]]:
    """(recipe with its tasks completed, tasks with too_short last) of a recipe's table without
    files."""
    given = {"tokenizer": "bytes", "sources": [{"paths": ["x.jsonl"]}], **changes}
    recipe = complete(read_recipe(given, Path()))
    return recipe, resolve(recipe, vocabulary or ids(), MODE_TOKENS)


def in_place_task(vocabulary: Ids | None = None) -> Task:
    """A task that predicts in place; in a list of tasks it makes rows have labels, even where no
    segment draws it."""
    return mix({"tasks": [{"objective": "masked_diffusion"}]}, vocabulary)[1][0]


def documents(lengths: Sequence[int] | np.ndarray, seed: int = 0) -> Documents:
    """Token documents of these lengths, ordinary tokens 0 … 255, each at its own place and of its
    own use."""
    n = np.asarray(lengths, np.int64)
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(n)))
    key = text_key("made", seed)
    position = np.cumsum(1 + integers(key, 1, np.arange(len(n)), 1000)) * 7919
    repeat = integers(key, 2, np.arange(len(n)), 3)
    tokens = (
        (bits64(key, 3, np.arange(-(-int(offsets[-1]) // 8))))
        .view(np.uint8)[: int(offsets[-1])]
        .astype(np.uint16)
    )
    zeros = np.zeros(len(n), np.int64)
    file_key = np.array(
        [text_key(seed, "source0", f"{i % 5}.jsonl") for i in range(len(n))], np.uint64
    )
    return Documents(tokens, offsets, position, zeros, zeros, repeat, file_key)


ENDS = (True, False, "segment")
"""Values of documents.append_eos."""

# The plain-Python twins' words for the same things


def twin_task(task: Task) -> dict[str, Any]:
    """A task as tests/twin takes it."""
    parameters = {**task.parameters, "sentinels": task.ids.sentinels.tolist()}
    if task.objective.name == "fill_in_the_middle":
        parameters |= {
            "fim": task.ids.fim,
            "inside": set(np.flatnonzero(task.ids.continues).tolist()),
        }
    if task.parameters.get("eos_after_inputs"):
        parameters["input_eos"] = [task.ids.eos]
    mode = task.mode_token if task.mode_token >= 0 else None
    return {
        "objective": task.objective.name,
        "weight": task.weight,
        "mode": mode,
        "parameters": parameters,
    }


def twin_recipe(
    recipe: Recipe, tasks: Sequence[Task], allowed: set[int] | None = None
) -> dict[str, Any]:
    """A recipe as tests/twin/cutting.py takes it, without its key; `tasks` end with
    too_short."""
    documents = recipe.documents
    return {
        "seq_length": recipe.seq_length,
        "min_tokens": documents.min_tokens,
        "max_tokens": documents.max_tokens,
        "long": documents.long,
        "append_eos": documents.append_eos,
        "prepend_bos": documents.prepend_bos,
        "long_answers": documents.long_answers,
        "tasks": [twin_task(task) for task in tasks[:-1]],
        "max_segments": recipe.packing.max_segments_per_row,
        "pad": recipe.packing.pad_seq_to_mult,
        "sides": recipe.packing.sides,
        "allowed": allowed if allowed is not None else set(range(len(tasks) - 1)),
    }


def two_sided(folder: Path, encoder_length: int = 128, decoder_length: int = 32) -> Path:
    """A dataset of T5's spans in rows of an encoder's side and a decoder's; segments of several
    lengths, up to five in a row."""
    chance = random.Random(0)
    documents = ["".join(chance.choices("abcdefgh", k=(20, 33, 47)[i % 3])) for i in range(90)]
    write_lines(folder / "two.jsonl", documents)
    packing = {"encoder_length": encoder_length, "decoder_length": decoder_length}
    recipe = table(
        "two.jsonl", seq_length=sum(packing.values()), tasks=[{"preset": "t5"}], packing=packing
    )
    build(recipe, folder, folder / "two")
    return folder / "two"
