"""What DataLoader's worker processes cost: rows a second that packprep.adapters.torch delivers with
0, 1 and 2 of them.

packprep build "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')/*.py" --out
packed python benchmarks/torch_workers.py packed

Medians of --repeats runs, each after some batches that are not counted, with the files in the page
cache. `copy` is numpy.copyto of as many bytes as the tokens of a batch are in int64: what no loader
that gives tensors can beat.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from packprep import open_dataset
from packprep.adapters.torch import loader

COLUMNS: dict[str, tuple[str, ...] | None] = {"tokens": ("tokens",), "all": None}


def copies(shape: tuple[int, int]) -> Iterator[None]:
    """Each step copies a batch's tokens."""
    source, target = np.zeros(shape, np.int64), np.empty(shape, np.int64)
    while True:
        np.copyto(target, source)
        yield


def rate(make: Callable[[], Iterator[Any]], batches: int, batch_size: int, repeats: int) -> float:
    """Rows a second: the median of the repeats."""
    rates = []
    for _ in range(repeats):
        steps = make()
        for _ in range(8):
            next(steps)
        begin = time.perf_counter()
        for _ in range(batches):
            next(steps)
        rates.append(batches * batch_size / (time.perf_counter() - begin))
    return statistics.median(rates)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Parse, run, print; what was measured → rows a second."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args(argv)
    dataset = open_dataset(given.directory)
    shape = (given.batch_size, dataset.seq_length)
    figures = {"copy": rate(lambda: copies(shape), given.batches, given.batch_size, given.repeats)}
    for name, columns in COLUMNS.items():
        for workers in (0, 1, 2):
            figures[f"{name}, {workers} workers"] = rate(
                lambda: loader(dataset, given.batch_size, columns=columns, num_workers=workers),  # noqa: B023
                given.batches,
                given.batch_size,
                given.repeats,
            )
    print(f"{len(dataset)} rows of {dataset.seq_length} slots, batches of {given.batch_size}")
    for name, value in figures.items():
        print(f"{name:<20} {value:>12,.0f} rows/s")
    return figures


if __name__ == "__main__":
    main(sys.argv[1:])
