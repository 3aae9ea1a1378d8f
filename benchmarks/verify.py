"""`packprep verify` without replay, on one core, beside the digest of the same bytes in the same
process.

    python benchmarks/verify.py DATASET [--repeats 5] [--json]

Every byte is read once before, so that both come from the page cache; then digest and verification
take turns, and of each the median of the repeats is printed, in MB of the dataset's files a second
of this process' CPU time and of the clock.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from packprep.format.digests import digest_of_file
from packprep.verification import verify_dataset


class Silent:
    """A progress that nobody looks at."""

    def begin(self, text_bytes: int, shards: int, missing: int) -> None:
        """Nothing."""

    def add(self, documents: int, text_bytes: int, tokens: int, rejects: int) -> None:
        """Nothing."""

    def say(self, message: str) -> None:
        """Nothing."""

    def done(self, item: object) -> None: ...
    def end(self) -> None:
        """Nothing."""


def seconds(work: Callable[[], Any]) -> tuple[float, float]:
    """(CPU seconds, seconds by the clock) of one call."""
    cpu, clock = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - clock


def measured(directory: Path, repeats: int) -> dict[str, Any]:
    """{bytes, tokens, and for digest and verify: CPU and clock seconds of every repeat}; both run
    once before."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())

    def digest() -> None:
        for path in files:
            digest_of_file(path)

    def verify() -> dict[str, Any]:
        return verify_dataset(directory, None, {}, (0, 1), 0, Silent())

    digest()
    report = verify()  # compiles the kernels
    if report["faults"]:
        raise SystemExit(f"{directory}: {report['faults']} faults: {report['listed'][0]}")
    taken: dict[str, list[tuple[float, float]]] = {"digest": [], "verify": []}
    for _ in range(repeats):
        taken["digest"].append(seconds(digest))
        taken["verify"].append(seconds(verify))
    return {
        "bytes": sum(path.stat().st_size for path in files),
        "tokens": report["tokens"],
        **taken,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--json", action="store_true", help="bytes, tokens and the seconds of every repeat"
    )
    given = parser.parse_args(arguments)
    found = measured(given.dataset, given.repeats)
    if given.json:
        print(json.dumps(found))
        return
    print(
        f"{found['bytes'] / 1e6:.0f} MB of files, {found['tokens'] / 1e6:.1f} million tokens, one"
        " core, page cache"
    )
    medians = {}
    for name in ("digest", "verify"):
        cpu, clock = (statistics.median(one[k] for one in found[name]) for k in (0, 1))
        medians[name] = cpu
        speeds = sorted(found["bytes"] / 1e6 / one[0] for one in found[name])
        print(
            f"{name:8}{found['bytes'] / 1e6 / cpu:8.0f} MB/s of CPU time ({speeds[0]:.0f} …"
            f" {speeds[-1]:.0f}), {found['bytes'] / 1e6 / clock:.0f} MB/s by the clock"
        )
    print(
        f"verify takes {medians['verify'] / medians['digest']:.1f} times as long as the digest"
        " (xxh3-128) alone"
    )


if __name__ == "__main__":
    main()
