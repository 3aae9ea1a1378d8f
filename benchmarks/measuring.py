"""Running contenders in turn, and what each run took."""

import contextlib
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inputs import SOURCES
from peers.contender import RESULT, Config, Contender, Work

HERE = Path(__file__).resolve().parent
# as with worker processes; each tool sets its own processes
THREADS = {"TOKENIZERS_PARALLELISM": "false"}


@dataclass
class Line:
    """A contender's line: the settings and all its runs."""

    group: str
    name: str
    what: str
    kind: str
    input_bytes: int
    status: str = "measured"  # measured | not installed | failed
    why: str = ""
    seconds: list[float] = field(default_factory=list)
    startup_s: list[float] = field(default_factory=list)
    work: Work = field(default_factory=Work)
    extras: dict[str, list[float]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def median_s(self) -> float:
        """Seconds of a run."""
        return statistics.median(self.seconds)


@dataclass
class Process:
    """A process that ended."""

    seconds: float
    status: int
    output: str
    began: float  # time.time()


def run_process(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> Process:
    """Run a command to its end; output goes through a file, so that nobody has to read it
    meanwhile."""
    with (folder / "output").open("w+b") as output:
        began, begin = time.time(), time.perf_counter()
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=HERE
        )
        status = process.wait()
        seconds = time.perf_counter() - begin
        output.seek(0)
        text = output.read().decode("utf-8", "replace")
    return Process(seconds, status, text, began)


def result_of(output: str) -> dict[str, Any] | None:
    """The last line that is a result."""
    for line in reversed(output.splitlines()):
        if line.startswith(RESULT):
            return json.loads(line.removeprefix(RESULT))
    return None


def available(
    group: str, pythons: Sequence[str], environment: Mapping[str, str]
) -> dict[str, tuple[str, dict[str, str]]]:
    """Contender → (the first interpreter that has its packages, their versions)."""
    found: dict[str, tuple[str, dict[str, str]]] = {}
    for python in pythons:
        command = [python, "-m", f"peers.{group}", "--available"]
        ended = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
        names = result_of(ended.stdout)
        if names is None:
            raise SystemExit(f"{python} does not run benchmarks/peers/{group}.py:\n{ended.stderr}")
        for name, versions in names.items():
            found.setdefault(name, (python, versions))
    return found


def environment() -> dict[str, str]:
    """This process's, with packprep's checkout on the path, whose modules are kept compiled as
    those of an installed one."""
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**own, **THREADS, "PYTHONPATH": os.pathsep.join(paths)}


def read_once(paths: Sequence[str]) -> None:
    """Bring files into the page cache."""
    for path in paths:
        with open(path, "rb") as file:
            while file.read(1 << 22):
                pass


def measure(line: Line, contender: Contender, config: Config, python: str, parent: Path) -> None:
    """One run more of a line; its output is removed."""
    os.sync()  # what earlier runs wrote is not written during this one
    read_once([config[key] for key in SOURCES if key in config])
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=parent))
    try:
        out = folder / "out"
        out.mkdir()
        config = {**config, "out": str(out), "python": python}
        (folder / "config.json").write_text(json.dumps(config))
        if contender.command is not None:
            command = contender.command(config)
        else:
            command = [
                python,
                "-m",
                f"peers.{line.group}",
                contender.name,
                str(folder / "config.json"),
            ]
        ended = run_process(command, environment(), folder)
        if ended.status != 0:
            raise RuntimeError(f"exit status {ended.status}: …{ended.output[-2000:]}")
        if contender.read is not None:
            line.work = contender.read(config)
        else:
            result = result_of(ended.output)
            if result is None:
                raise RuntimeError(f"it printed no result: …{ended.output[-2000:]}")
            line.work = Work(**result)
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        line.status, line.why = "failed", f"{type(error).__name__}: {error}"
        return
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    line.seconds.append(ended.seconds if line.work.seconds is None else line.work.seconds)
    if line.work.began_at is not None:
        line.startup_s.append(line.work.began_at - ended.began)
    for name, value in line.work.extra.items():
        line.extras.setdefault(name, []).append(value)


def in_turn(
    lines: Sequence[tuple[Line, Contender, Config, str]],
    repeats: Callable[[Contender], int],
    folder: Path,
    say: Callable[[str], None],
) -> None:
    """Run all lines once, then all once more, …: what slows the machine for a while slows all of
    them.

    Each time in another order, the same in every run of the table: a machine remembers what ran
    before, as gigabytes of memory that a host has taken back, and no line is to have the same one
    before it each time.
    """
    for turn in range(max((repeats(contender) for _, contender, _, _ in lines), default=0)):
        for line, contender, config, python in (
            random.Random(turn).sample(lines, len(lines)) if turn else lines
        ):
            if line.status == "measured" and turn < repeats(contender):
                measure(line, contender, config, python, folder)
                said = (
                    f"{line.seconds[-1]:.2f} s"
                    if line.status == "measured"
                    else f"{line.status}: {line.why}"
                )
                say(f"{turn + 1}  {line.group}: {line.name}: {said}")


def machine() -> str:
    """CPU, cores that this process may use, memory, system."""
    model = platform.processor()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{model}, {cores} cores, {memory:.0f} GiB, {platform.system()}, Python"
        f" {platform.python_version()}"
    )
