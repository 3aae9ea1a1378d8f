"""How long a user sees nothing: every command in an empty environment, off a terminal.

python benchmarks/silence.py                                  with the built-in vocabulary of bytes
python benchmarks/silence.py --tokenizer tokenizer.json       with a real one, whose proof is made anew each time
python benchmarks/silence.py --runs 5 --megabytes 20

Before each run all that packprep keeps is removed: compiled kernels, proofs of tokenizers. Of each
command it prints the seconds to its first line, the longest silence between its begin, lines and
end, with the line before it, and all; medians of --runs. What is built is --megabytes of Python's
standard library, ul2r: so little that what is measured is the wait for the work, during which
nothing is said off a terminal.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from end_to_end import machine, standard_library, write_corpus

TARGET_FIRST_S, TARGET_SILENCE_S = 1.0, 3.0


class Heard(NamedTuple):
    """What was heard of a run, in seconds, and the line before its longest silence."""

    first: float
    silence: float
    after: str
    whole: float


def listen(command: list[str], environment: dict[str, str]) -> Heard:
    """Run a command and note when each of its lines comes. SystemExit, with what it said, where it
    fails."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    lines = [(0.0, "its begin")]
    for line in iter(process.stdout.readline, b""):  # a line is read when it is written
        lines.append((time.perf_counter() - begin, line.decode("utf-8", "replace").rstrip()))
    status, whole = process.wait(), time.perf_counter() - begin
    if status:
        raise SystemExit("\n".join([" ".join(command), *(line for _, line in lines[1:])]))
    times = [seconds for seconds, _ in lines] + [whole]
    silence, last = max(
        (after - before, i) for i, (before, after) in enumerate(zip(times, times[1:], strict=False))
    )
    return Heard(times[1], silence, lines[last][1], whole)


def commands(folder: Path, recipe: Path) -> dict[str, list[str]]:
    """name → arguments. DATASET stands, OUT is removed before each run."""
    dataset, out = str(folder / "dataset"), str(folder / "out")
    return {
        "build": ["build", str(recipe), "--out", out],
        "build, 1 worker": ["build", str(recipe), "--out", out, "--workers", "1"],
        "plan": ["plan", str(recipe)],
        "status": ["status", dataset],
        "verify": ["verify", dataset],
        "verify --replay all": ["verify", dataset, "--replay", "all"],
        "verify --epoch 1": ["verify", dataset, "--epoch", "1"],
        "inspect": ["inspect", dataset],
        "inspect --row": ["inspect", dataset, "--row", "0"],
        "inspect --doc": ["inspect", dataset, "--doc", "0"],
        "inspect --html": ["inspect", dataset, "--html", f"{out}.html"],
        "export --to megatron": ["export", dataset, "--to", "megatron", "--out", out],
        "export --to parquet": [
            "export",
            dataset,
            "--to",
            "parquet",
            "--columns",
            "full",
            "--out",
            out,
        ],
        "slurm": ["slurm", str(recipe), "--out", out, "--array", "4"],
        "warm": ["warm"],
        "warm RECIPE.toml": ["warm", str(recipe)],
        "schema": ["schema"],
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", default="bytes", help="a tokenizer.json (default: bytes)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=20)
    parser.add_argument("--only", nargs="+", help="commands whose names begin so")
    options = parser.parse_args(arguments)
    packprep = [sys.executable, "-m", "packprep"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cache = folder / "cache"
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "HF_HUB_OFFLINE": "1"}
        write_corpus(folder / "corpus.jsonl", standard_library(), options.megabytes * 10**6)
        tokenizer = (
            options.tokenizer
            if options.tokenizer == "bytes"
            else os.path.abspath(options.tokenizer)
        )
        recipe = folder / "recipe.toml"
        recipe.write_text(
            f'seq_length = 2048\ntokenizer = "{tokenizer}"\nspecials = {{missing = "add"}}\n'
            'sources = [{paths = ["corpus.jsonl"]}]\ntasks = [{preset = "ul2r"}]\n'
        )
        listen([*packprep, "build", str(recipe), "--out", str(folder / "dataset")], environment)
        print(
            f"{machine()}; {options.megabytes} MB of text, tokenizer {Path(tokenizer).name};"
            f" seconds, medians of {options.runs}"
        )
        print(
            f"{'command':<22} {'first line':>10} {'silence':>8} {'all':>6}  the longest silence is"
            " after"
        )
        late = 0
        for called, command in commands(folder, recipe).items():
            if options.only and not called.startswith(tuple(options.only)):
                continue
            heard = []
            for _ in range(options.runs):
                for made in (cache, folder / "out", folder / "out.slurm"):
                    shutil.rmtree(made, ignore_errors=True)
                cache.mkdir(0o700)
                heard.append(listen([*packprep, *command], environment))
            first, silence, whole = (
                statistics.median(values)
                for values in zip(*((h.first, h.silence, h.whole) for h in heard), strict=True)
            )
            late += first > TARGET_FIRST_S or silence > TARGET_SILENCE_S
            after = min(heard, key=lambda h: abs(h.silence - silence)).after
            print(
                f"{called:<22} {first:>10.2f} {silence:>8.2f} {whole:>6.1f}  {after[:90]}",
                flush=True,
            )
    print(
        f"{late} commands above {TARGET_FIRST_S:g} s to the first line or {TARGET_SILENCE_S:g} s of"
        " silence"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
