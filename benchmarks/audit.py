"""`packprep audit` of ids that are made for the measurement: a .bin, a .npy and a Megatron pair.

    python benchmarks/audit.py [--gigabytes 1] [--repeats 3] [--folder DIR] [--json]

The ids are uint16, with eos after about 600 tokens. Each file is audited once before, so that it comes
from the page cache and the kernels are compiled. Then the median of the repeats is printed: CPU seconds
of this process, seconds of the clock, and the largest memory so far.
"""

import argparse
import json
import resource
import statistics
import struct
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from packprep.audit.report import Request, describe_audit

EOS = 50256
_BLOCK = 10_000_000


def write(folder: Path, tokens: int) -> dict[str, Path]:
    """The same ids in each format: name → path."""
    random = np.random.default_rng(0)
    ids, npy, pair = folder / "train.bin", folder / "train.npy", folder / "megatron.bin"
    ends = []
    with ids.open("wb") as file, npy.open("wb") as numpy_file:
        head = {"descr": "<u2", "fortran_order": False, "shape": (tokens,)}
        np.lib.format.write_array_header_1_0(numpy_file, head)
        for first in range(0, tokens, _BLOCK):
            block = random.integers(0, EOS, min(_BLOCK, tokens - first), np.uint16)
            block[random.integers(0, len(block), len(block) // 600)] = EOS
            block[-1] = EOS
            ends.append(np.flatnonzero(block == EOS) + first + 1)
            file.write(block.tobytes())
            numpy_file.write(block.tobytes())
    pair.hardlink_to(ids)
    bounds = np.append(0, np.concatenate(ends))
    with pair.with_suffix(".idx").open("wb") as file:
        count = len(bounds) - 1
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, count, count + 1))
        file.write(np.diff(bounds).astype("<i4").tobytes())
        file.write((bounds[:-1] * 2).astype("<i8").tobytes())
        file.write(np.arange(count + 1, dtype="<i8").tobytes())
    folder_of_bin = folder / "bin"
    folder_of_bin.mkdir()
    ids.rename(folder_of_bin / "train.bin")
    return {"bin": folder_of_bin, "npy": npy, "megatron": pair}


def measured(path: Path, repeats: int) -> dict[str, Any]:
    """CPU and clock seconds of each repeat, and the largest memory of the process so far."""
    ids = {"eos": EOS, "vocab_size": EOS + 1}
    described = describe_audit(Request(path, special_ids=ids))
    cpu, clock = [], []
    for _ in range(repeats):
        cpu_begun, begun = time.process_time(), time.perf_counter()
        describe_audit(Request(path, special_ids=ids))
        cpu.append(time.process_time() - cpu_begun)
        clock.append(time.perf_counter() - begun)
    return {
        "tokens": described["tokens"],
        "documents": described["documents"],
        "cpu_s": cpu,
        "clock_s": clock,
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the files are made and removed")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        files = write(Path(folder), int(given.gigabytes * 5e8))
        found = {name: measured(path, given.repeats) for name, path in files.items()}
    if given.json:
        print(json.dumps(found))
        return 0
    for name, one in found.items():
        print(
            f"{name:<9} {one['tokens']:>13,} tokens, {one['documents']:>9,} documents:"
            f" {statistics.median(one['cpu_s']):.2f} s of CPU,"
            f" {statistics.median(one['clock_s']):.2f} s of the clock, {one['megabytes']:.0f} MB"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
