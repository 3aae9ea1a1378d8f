"""Builds of a Parquet source with a condition that keeps a tenth, measured against the whole.

python benchmarks/filter.py CORPUS                      files of 1 GB from what benchmarks/corpus.py made
python benchmarks/filter.py CORPUS --size 100MB --runs 1

The documents of the corpus are repeated with changes. One file has random scores. The other has
ascending scores, so that statistics exclude row groups.
Every run builds from the start, in turn; medians of seconds and CPU seconds are printed.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packprep.recipe import parse_size

ROW_GROUP = 4096
SCHEMA = pa.schema({"text": pa.string(), "score": pa.float64(), "lang": pa.string()})
RECIPES = {
    "whole": ("random", ""),
    "a tenth, random": ("random", 'where = "score >= 0.9"'),
    "a tenth, sorted": ("sorted", 'where = "score >= 0.9"'),
}


def documents(corpus: Path, size: int) -> Iterator[dict]:
    """Documents of about `size` text bytes. Each repetition begins at another character."""
    rng, total = random.Random(49), 0
    for repetition in itertools.count():
        with (corpus / "corpus.jsonl").open("rb") as lines:
            for line in lines:
                text = json.loads(line)["text"]
                text = f"{repetition} {text[repetition * 7 :]}"
                yield {"text": text, "score": rng.random(), "lang": rng.choice(("de", "en"))}
                total += len(text.encode())
                if total >= size:
                    return


def make_inputs(corpus: Path, size: int, folder: Path) -> None:
    """Write the same documents with random scores, and with ascending ones."""
    with pq.ParquetWriter(folder / "random.parquet", SCHEMA) as writer:
        some = documents(corpus, size)
        while rows := list(itertools.islice(some, ROW_GROUP)):
            writer.write_table(pa.Table.from_pylist(rows, SCHEMA))
    with (
        pq.ParquetFile(folder / "random.parquet") as file,
        pq.ParquetWriter(folder / "part", SCHEMA) as writer,
    ):
        scores, begin = np.sort(file.read(["score"])["score"].to_numpy()), 0
        for group in range(file.num_row_groups):
            table = file.read_row_group(group)
            own = pa.array(scores[begin : begin + len(table)])
            writer.write_table(table.set_column(1, "score", own))
            begin += len(table)
    (folder / "part").rename(folder / "sorted.parquet")


def run(folder: Path, name: str, workers: int) -> tuple[float, float, dict]:
    """Build a recipe. Return (seconds, CPU seconds of all processes, the result)."""
    order, where = RECIPES[name]
    (folder / "recipe.toml").write_text(
        'seq_length = 4096\ntokenizer = "tokenizer.json"\n[[sources]]\nname = "scored"\n'
        f'paths = ["{order}.parquet"]\n{where}\n[[tasks]]\npreset = "causal"\n'
        '[specials]\nmissing = "add"\n'
    )
    out = folder / "out"
    command = [sys.executable, "-m", "packprep", "build", str(folder / "recipe.toml")]
    command += ["--out", str(out), "--workers", str(workers), "--json", "-q"]
    begin = time.perf_counter()
    with (folder / "result").open("wb") as result:
        process = subprocess.Popen(command, stdout=result)
        _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)}: exit status {process.returncode}")
    source = json.loads((out / "dataset.json").read_text())["ledger"]["sources"]["scored"]
    shutil.rmtree(out)
    return seconds, used.ru_utime + used.ru_stime, source


def main() -> None:
    """Build in turn, print medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path, help="what benchmarks/corpus.py made")
    parser.add_argument("--size", type=parse_size, default=parse_size("2.2GB"), help="text (2.2GB)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--inputs", type=Path, help="keep the inputs here, and use them again")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="packprep-filter-") as name:
        folder = arguments.inputs or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "sorted.parquet").exists():
            shutil.copy(arguments.corpus / "tokenizer.json", folder)
            make_inputs(arguments.corpus, arguments.size, folder)
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in RECIPES}
        ledgers = {}
        for _, recipe in itertools.product(range(arguments.runs), RECIPES):
            seconds, cpu, ledgers[recipe] = run(folder, recipe, arguments.workers)
            runs[recipe].append((seconds, cpu))
        print(f"{'build':<18}{'documents':>10}{'filtered':>10}{'s':>8}{'CPU s':>8}{'times':>8}")
        medians = {
            name: [statistics.median(column) for column in zip(*of_runs, strict=True)]
            for name, of_runs in runs.items()
        }
        for recipe, (seconds, cpu) in medians.items():
            counts = ledgers[recipe]["documents"]
            times = medians["whole"][1] / cpu
            print(
                f"{recipe:<18}{counts['used']:>10}{counts.get('filtered', 0):>10}"
                f"{seconds:>8.1f}{cpu:>8.1f}{times:>8.1f}"
            )


if __name__ == "__main__":
    main()
