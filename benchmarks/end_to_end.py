"""The main job, timed: text in, a published dataset out, with the time that each stage took.

python benchmarks/end_to_end.py                         Python's standard library, repeated to 128 MB of JSONL
python benchmarks/end_to_end.py --tokenizer bpe         with a byte-level BPE of 16 384 tokens, trained before the clock starts
python benchmarks/end_to_end.py --input 'data/*.jsonl.zst' --tokenizer tokenizer.json

Two builds of the same recipe: one in this process and one with --workers processes, each with its
profile, as `packprep build --profile` prints it. Kernels are compiled by a small build before.
"""

import argparse
import contextlib
import glob
import json
import os
import platform
import resource
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from packprep.building.planning import made_with
from packprep.building.processes import available_cpus
from packprep.building.run import build
from packprep.cli.printing import print_profile
from packprep.clock import describe_profile
from packprep.recipe import parse_size, read_recipe

BPE_TOKENS = 16384


class Quiet:
    """Progress that nobody watches."""

    def begin(self, text_bytes: int, shards: int, missing: int) -> None:
        pass

    def add(self, documents: int, text_bytes: int, tokens: int, rejects: int) -> None:
        pass

    def say(self, message: str) -> None:
        pass

    def done(self, item: object) -> None: ...
    def end(self) -> None:
        pass


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


def train_bpe(path: Path, texts: list[str], tokens: int = BPE_TOKENS) -> None:
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
    trainer = trainers.BpeTrainer(vocab_size=tokens, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.save(str(path))


def recipe_of(
    paths: list[str], tokenizer: str, tasks: str, seq_length: int, shard_text_bytes: str
) -> Any:
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
    outcome = build(recipe, out, Quiet(), workers)
    assert outcome.manifest is not None
    profile = describe_profile(outcome.profile)
    ledger = outcome.manifest["ledger"]
    tokens = sum(source["tokens"]["used"] for source in ledger["sources"].values())
    return {
        "tokens_used": tokens,
        "rows": ledger["rows"],
        "shards": outcome.plan.shards,
        "utilisation": 1 - ledger["row_padding"] / ledger["row_slots"],
        "output_bytes": sum(entry["bytes"] for entry in outcome.manifest["shards"]),
        "profile": profile,
    }


def machine() -> str:
    """CPU, cores that this process may use, system, Python."""
    model = platform.processor()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    return (
        f"{model}, {available_cpus()} CPUs, {platform.system()}, Python {platform.python_version()}"
    )


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
        one = timed_build(recipe, folder / "one", 1)
        many = (
            timed_build(recipe, folder / "many", arguments.workers)
            if arguments.workers > 1
            else None
        )
    given = (
        f"{arguments.size} of Python's standard library as JSONL"
        if not arguments.input
        else " ".join(paths)
    )
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
    print(
        ", ".join(
            f"{name} {version}" for name, version in result["made_with"].items() if name != "python"
        )
    )
    print(
        f"{result['input']}; {result['tasks']}, {result['tokenizer']}, seq_length"
        f" {result['seq_length']}"
    )
    print(
        f"{one['profile']['text_bytes']:,} bytes of text → {one['tokens_used']:,} tokens in"
        f" {one['rows']:,} rows ({one['utilisation']:.2%} used), {one['shards']} shards,"
        f" {one['output_bytes']:,} bytes"
    )
    print(f"peak memory of this process, its corpus and BPE included: {result['peak_mib']:.0f} MiB")
    for build_ in filter(None, (one, result["many"])):
        print()
        print_profile(build_["profile"])


def main(argv: list[str] | None = None) -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--input", nargs="+", help="files or patterns; default: Python's standard library, repeated"
    )
    parser.add_argument(
        "--size", default="128MB", help="bytes of text of the default input (default: 128MB)"
    )
    parser.add_argument(
        "--tokenizer", default="bytes", help='"bytes" (default), "bpe", or a tokenizer.json'
    )
    parser.add_argument("--tasks", default="ul2r", help="a preset (default: ul2r)")
    parser.add_argument(
        "--seq-length", type=int, default=2048, help="slots per row (default: 2048)"
    )
    parser.add_argument(
        "--shard-text-bytes", default="16MiB", help="input text per shard (default: 16MiB)"
    )
    parser.add_argument(
        "--workers", type=int, default=available_cpus(), help="processes of the second build"
    )
    parser.add_argument(
        "--folder", help="where the temporary corpus and datasets lie (default: the system's)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args(argv)
    result = run(arguments)
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        print_result(result)


if __name__ == "__main__":
    sys.exit(main())
