"""Packing, timed: lengths in, (row, offset) of every document out.

python benchmarks/packing.py                            10 million documents of lognormal lengths, rows of 2048, 4096 and 32768
python benchmarks/packing.py --documents 100000

assignment: from lengths to how many documents of each length go to which rows; grouped: every
document has its row and offset (`pack`, as a build calls it). The bound copies as many bytes as
`pack` reads and gives. Medians of --repeats. Seconds are the processor's, on one core: what else
runs does not count.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from packprep.building.packing import assign, pack
from packprep.building.segments import FORMAT_MAX_SEGMENTS


def median_s(work: Callable[[], object], repeats: int) -> float:
    """Median processor seconds of a call, after one that is not counted: it compiles."""
    work()
    seconds = []
    for _ in range(repeats):
        begin = time.process_time()
        work()
        seconds.append(time.process_time() - begin)
    return statistics.median(seconds)


def lognormal_lengths(count: int, most: int, mean: float = 600.0, sigma: float = 1.0) -> np.ndarray:
    """int64[count], 1 … most."""
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(drawn.astype(np.int64), 1, most)


def measured(documents: int, capacity: int, algorithm: str, repeats: int) -> dict:
    """One line of the table."""
    lengths = lognormal_lengths(documents, capacity)
    row, offset = pack(lengths, capacity, algorithm, FORMAT_MAX_SEGMENTS)
    rows = int(row.max()) + 1
    in_all, target = np.stack((lengths, row, offset)), np.empty((3, documents), np.int64)
    grouped_s = median_s(lambda: pack(lengths, capacity, algorithm, FORMAT_MAX_SEGMENTS), repeats)
    found = {
        "capacity": capacity,
        "algorithm": algorithm,
        "documents": documents,
        "rows": rows,
        "utilisation": float(lengths.sum() / (rows * capacity)),
        "grouped_per_s": documents / grouped_s,
        "copy_per_s": documents / median_s(lambda: np.copyto(target, in_all), repeats),
        "assignment_per_s": None,
    }
    if algorithm == "best_fit":
        assignment_s = median_s(
            lambda: assign(
                np.bincount(lengths, minlength=capacity + 1), capacity, FORMAT_MAX_SEGMENTS
            ),
            repeats,
        )
        found["assignment_per_s"] = documents / assignment_s
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--capacity", type=int, nargs="+", default=[2048, 4096, 32768])
    parser.add_argument(
        "--algorithm",
        nargs="+",
        default=["best_fit"],
        choices=["best_fit", "first_fit", "next_fit"],
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    lines = [
        measured(given.documents, c, a, given.repeats)
        for a in given.algorithm
        for c in given.capacity
    ]
    if given.json:
        print(json.dumps(lines))
        return
    print(f"{given.documents:,} documents; millions of documents per second")
    print("algorithm  capacity  assignment   grouped  copy bound        rows  utilisation")
    for line in lines:
        assignment = f"{line['assignment_per_s'] / 1e6:.1f}" if line["assignment_per_s"] else "–"
        print(
            f"{line['algorithm']:9}  {line['capacity']:8}  {assignment:>10} "
            f" {line['grouped_per_s'] / 1e6:8.1f}  {line['copy_per_s'] / 1e6:10.1f} "
            f" {line['rows']:10,}  {line['utilisation']:11.3%}"
        )


if __name__ == "__main__":
    main()
