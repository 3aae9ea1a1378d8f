"""A contender: one way to do a piece of work, and what it says of the work it did.

A contender runs in a process of its own, with the interpreter of an environment that has its
packages:

    python -m peers.GROUP NAME CONFIG.json     (in the folder benchmarks)

and prints its `Work` as the last line. A contender that is a command line is started as such, so
that it costs what it costs a user.
"""

import importlib.metadata
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

RESULT = "RESULT "
Config = dict[str, Any]


@dataclass
class Work:
    """What was done. None: it has no such number."""

    documents: int | None = None
    tokens: int | None = (
        None  # of text: what a tokenizer gave, without the special tokens put around it
    )
    rows: int | None = None
    utilisation: float | None = None  # real slots of all slots in rows
    output_bytes: int | None = None
    seconds: float | None = None  # of the work alone; None: the whole process counts
    began_at: float | None = None  # time.time() at which imports were done
    # other measurements: name with unit → value
    extra: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Contender:
    """One line of the table."""

    name: str
    what: str  # in one phrase: what it does, and what it leaves out
    packages: tuple[str, ...]  # the distributions that it needs, the compared one first
    modules: tuple[str, ...]  # what has to be importable
    run: Callable[[Config], Work] | None = None
    command: Callable[[Config], list[str]] | None = None  # instead of run: a command line …
    read: Callable[[Config], Work] | None = (
        None  # … and how its output is read, outside of the time
    )
    slow: bool = False  # runs on a smaller input, fewer times
    kind: str = ""  # what the promises of the table are stated over: "tokenizers", …


def running(config: Config, name: str) -> str:
    """The file or folder `name` that a contender writes; it is removed after the run."""
    return os.path.join(config["out"], name)


def bytes_below(path: str) -> int:
    """Bytes of all files in a folder."""
    return sum(
        os.path.getsize(os.path.join(folder, name))
        for folder, _, names in os.walk(path)
        for name in names
    )


def count_lines(path: str) -> int:
    """Lines of a file."""
    count = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            count += chunk.count(b"\n")
    return count


def has(modules: Iterable[str]) -> bool:
    """Whether this interpreter finds all of these modules, without importing more than their
    parents."""
    try:
        return all(importlib.util.find_spec(module) is not None for module in modules)
    except ImportError:
        return False


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Package → version, of those that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def second_of_two(run: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds of the second run, its result): the first one compiles, imports, and fills
    caches."""
    run()
    begin = time.perf_counter()
    result = run()
    return time.perf_counter() - begin, result


def main(contenders: Iterable[Contender], argv: list[str]) -> None:
    """Run the contender argv[0] with the configuration in the file argv[1]; or say which ones can
    run here."""
    if argv == ["--available"]:
        print(
            RESULT
            + json.dumps(
                {one.name: versions(one.packages) for one in contenders if has(one.modules)}
            ),
            flush=True,
        )
        return
    (one,) = [one for one in contenders if one.name == argv[0]]
    assert one.run is not None
    with open(argv[1], encoding="utf-8") as file:
        work = one.run(json.load(file))
    sys.stdout.flush()
    print("\n" + RESULT + json.dumps(asdict(work)), flush=True)
