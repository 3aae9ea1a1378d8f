"""The main job, timed: text in, a published dataset out, with the time that each stage took.

python benchmarks/end_to_end.py                         Python's standard library, repeated to 128 MB of JSONL
python benchmarks/end_to_end.py --tokenizer bpe         with a byte-level BPE of 16 384 tokens, trained before the clock starts
python benchmarks/end_to_end.py --input 'data/*.jsonl.zst' --tokenizer tokenizer.json

Two builds of the same recipe: one in this process, whose stages are timed, and one with --workers processes, timed as a
whole. The product knows nothing of it: the functions that stages are made of are wrapped here. Kernels are compiled by a
small build before.
"""

import argparse
import contextlib
import functools
import glob
import importlib
import json
import os
import platform
import resource
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from packprep.building.plan import made_with
from packprep.building.run import build
from packprep.cli import available_cpus
from packprep.recipe import parse_size, read_recipe

# stage → the names under which its functions are called. A generator's time is that of its steps.
STAGES = {
    "plan": ("packprep.building.run.look_up", "packprep.building.run.make_plan"),
    "read": ("packprep.corpus.reading.read",),
    "tokenize": ("packprep.corpus.training.tokenize",),
    "cut": ("packprep.building.work.cut", "packprep.building.work.slots_of"),
    "pack": ("packprep.building.work.pack",),
    "render": ("packprep.building.work.arrange", "packprep.building.work.render"),
    "write": ("packprep.building.run.commit_shard", "packprep.building.run.publish"),
}
BPE_TOKENS = 16384


class Quiet:
    """Progress that nobody watches; it adds up the text read."""

    def __init__(self) -> None:
        self.text_bytes = 0

    def begin(self, text_bytes: int, shards: int, missing: int) -> None:
        pass

    def add(self, documents: int, text_bytes: int, tokens: int, rejects: int) -> None:
        self.text_bytes += text_bytes

    def say(self, message: str) -> None:
        pass

    def end(self) -> None:
        pass


class Stages:
    """Seconds by stage; a stage that runs inside another one counts for itself alone."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._inner = [0.0]

    @contextlib.contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        begin = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            whole = time.perf_counter() - begin
            self.seconds[stage] += whole - self._inner.pop()
            self._inner[-1] += whole

    def wrapped(self, stage: str, function: Any) -> Any:
        """The function, measured; a generator that it gives is measured step by step."""

        @functools.wraps(function)
        def measured(*arguments: Any, **named: Any) -> Any:
            with self.measure(stage):
                result = function(*arguments, **named)
            return self._steps(stage, result) if hasattr(result, "__next__") else result

        return measured

    def _steps(self, stage: str, steps: Iterator[Any]) -> Iterator[Any]:
        while True:
            with self.measure(stage):
                step = next(steps, steps)
            if step is steps:
                return
            yield step

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """While this lasts, the stages' functions are measured."""
        before = []
        for stage, names in STAGES.items():
            for name in names:
                module, _, attribute = name.rpartition(".")
                place = importlib.import_module(module)
                before.append((place, attribute, getattr(place, attribute)))
                setattr(place, attribute, self.wrapped(stage, getattr(place, attribute)))
        try:
            yield
        finally:
            for place, attribute, function in before:
                setattr(place, attribute, function)


def standard_library() -> list[str]:
    """The texts of Python's own modules, in the order of their names."""
    root = sysconfig.get_path("stdlib")
    names = sorted(glob.glob(f"{root}/*.py") + glob.glob(f"{root}/*/*.py"))
    texts = []
    for name in names:
        with contextlib.suppress(UnicodeDecodeError):
            texts.append(Path(name).read_text("utf-8"))
    return [text for text in texts if text]


def write_corpus(path: Path, texts: list[str], size: int) -> None:
    """Lines {"text": …}, the texts over and over, until the text comes to `size` bytes."""
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            for text in texts:
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                written += len(text.encode())
                if written >= size:
                    break


def train_bpe(path: Path, texts: list[str]) -> None:
    """A byte-level BPE without special tokens, trained on at most 8 MB."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sample, size = [], 0
    for text in texts:
        sample.append(text)
        size += len(text)
        if size > 8_000_000:
            break
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=BPE_TOKENS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.save(str(path))


def recipe_of(paths: list[str], tokenizer: str, tasks: str, seq_length: int, shard_text_bytes: str) -> Any:
    """The recipe; roles that the tokenizer lacks are added to it."""
    table = {
        "tokenizer": tokenizer,
        "seq_length": seq_length,
        "sources": [{"paths": paths}],
        "tasks": [{"preset": tasks}],
        "output": {"shard_text_bytes": shard_text_bytes},
        "specials": {} if tokenizer == "bytes" else {"missing": "add", "sentinels": "auto"},
    }
    return read_recipe(table, Path.cwd())


def timed_build(recipe: Any, out: Path, workers: int) -> dict[str, Any]:
    """Seconds, text bytes and ledger of one build."""
    progress = Quiet()
    begin = time.perf_counter()
    outcome = build(recipe, out, progress, workers)
    seconds = time.perf_counter() - begin
    assert outcome.manifest is not None
    ledger = outcome.manifest["ledger"]
    tokens = sum(source["tokens"]["used"] for source in ledger["sources"].values())
    return {
        "workers": workers,
        "seconds": seconds,
        "text_bytes": progress.text_bytes,
        "tokens": tokens,
        "rows": ledger["rows"],
        "shards": outcome.job.shards,
        "utilisation": 1 - ledger["row_padding"] / ledger["row_slots"],
        "output_bytes": sum(entry["bytes"] for entry in outcome.manifest["shards"]),
        "tokens_per_s": tokens / seconds,
        "mb_per_s": progress.text_bytes / seconds / 1e6,
    }


def machine() -> str:
    """CPU, cores that this process may use, system, Python."""
    model = platform.processor()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return f"{model}, {available_cpus()} CPUs, {platform.system()}, Python {platform.python_version()}"


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Both builds."""
    with tempfile.TemporaryDirectory(prefix="packprep-benchmark-", dir=arguments.folder) as name:
        folder = Path(name)
        texts = standard_library()
        tokenizer = arguments.tokenizer
        if tokenizer == "bpe":
            train_bpe(folder / "tokenizer.json", texts)
            tokenizer = str(folder / "tokenizer.json")
        paths = arguments.input
        if not paths:
            write_corpus(folder / "corpus.jsonl", texts, parse_size(arguments.size))
            paths = [str(folder / "corpus.jsonl")]
        settings = (tokenizer, arguments.tasks, arguments.seq_length, arguments.shard_text_bytes)
        write_corpus(folder / "warm.jsonl", texts, 1 << 20)
        timed_build(recipe_of([str(folder / "warm.jsonl")], *settings), folder / "warm", 1)
        recipe = recipe_of(paths, *settings)
        stages = Stages()
        with stages.on():
            one = timed_build(recipe, folder / "one", 1)
        one["stages_s"] = {**stages.seconds, "rest": one["seconds"] - sum(stages.seconds.values())}
        many = timed_build(recipe, folder / "many", arguments.workers) if arguments.workers > 1 else None
    given = f"{arguments.size} of Python's standard library as JSONL" if not arguments.input else " ".join(paths)
    return {
        "machine": machine(),
        "made_with": made_with(),
        "input": given,
        "tokenizer": arguments.tokenizer,
        "tasks": arguments.tasks,
        "seq_length": arguments.seq_length,
        "one": one,
        "many": many,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def print_result(result: dict[str, Any]) -> None:
    """The figures as text."""
    one = result["one"]
    print(result["machine"])
    print(", ".join(f"{name} {version}" for name, version in result["made_with"].items() if name != "python"))
    print(f"{result['input']}; {result['tasks']}, {result['tokenizer']}, seq_length {result['seq_length']}")
    print(
        f"{one['text_bytes']:,} bytes of text → {one['tokens']:,} tokens in {one['rows']:,} rows "
        f"({one['utilisation']:.2%} used), {one['shards']} shards, {one['output_bytes']:,} bytes"
    )
    for build_ in filter(None, (one, result["many"])):
        print(
            f"{build_['workers']} worker{'s' if build_['workers'] > 1 else ' '}  {build_['seconds']:7.2f} s"
            f"  {build_['tokens_per_s']:>13,.0f} tokens/s  {build_['mb_per_s']:7.1f} MB/s of text"
        )
    print(f"peak memory of this process, its corpus and BPE included: {result['peak_mib']:.0f} MiB")
    print("stages of 1 worker:")
    for stage, seconds in one["stages_s"].items():
        print(f"  {stage:<9} {seconds:7.2f} s  {seconds / one['seconds']:>6.1%}")


def main(argv: list[str] | None = None) -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", help="files or patterns; default: Python's standard library, repeated")
    parser.add_argument("--size", default="128MB", help="bytes of text of the default input (default: 128MB)")
    parser.add_argument("--tokenizer", default="bytes", help='"bytes" (default), "bpe", or a tokenizer.json')
    parser.add_argument("--tasks", default="ul2r", help="a preset (default: ul2r)")
    parser.add_argument("--seq-length", type=int, default=2048, help="slots per row (default: 2048)")
    parser.add_argument("--shard-text-bytes", default="16MiB", help="input text per shard (default: 16MiB)")
    parser.add_argument("--workers", type=int, default=available_cpus(), help="processes of the second build")
    parser.add_argument("--folder", help="where the temporary corpus and datasets lie (default: the system's)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args(argv)
    result = run(arguments)
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        print_result(result)


if __name__ == "__main__":
    sys.exit(main())
