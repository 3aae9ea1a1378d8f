"""Fuzz what reads files that somebody else may have written: `python tests/fuzz/run.py --seconds
600`.

Target after target of `targets.py` gets a slice of the seconds, in a process of its own, until they
are over. Then a line is printed for each: executions, crashes (any error that packprep did not
raise on purpose, an end by a signal, memory beyond MOST_MB), hangs (more than HANG_S for one input)
and peak memory. The exit status is 1 if there was any. With atheris the code is instrumented, and
inputs that reach new parts of it are kept and changed further; without it, or with --plain, seeds
are changed at random by `mutations.py` alone.
"""

import argparse
import contextlib
import importlib.util
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from dataclasses import dataclass
from pathlib import Path

BEGUN = time.monotonic()
ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    "shard",
    "manifest",
    "plan",
    "receipt",
    "recipe",
    "tokenizer",
    "tokenizer_config",
    "chat_template",
    "lines",
    "gzip",
    "zstd",
    "text",
    "parquet",
    "parquet_tokens",
    "arrow",
    "arrow_tokens",
    "megatron",
    "datatrove",
    "token_stream",
)
SLICE_S = 60
HANG_S = 20
MOST_MB = 2048
"""Memory of a process at which it is ended, and the input that needed it kept."""

INSTRUMENTED = (
    "packprep.dataset", "packprep.recipe", "packprep.building.commit", "packprep.building.planning",
    "packprep.building.ledger", "packprep.building.plan", "packprep.building.run",
    "packprep.sources", "packprep.tokenizer", "packprep.documents", "packprep.verification.on_disk",
)  # fmt: skip
EXECUTIONS, FOUND = "executions: ", "found"
"""What a line of counts, and the name of a kept input, begin with."""


@dataclass
class Counts:
    """What came of a target."""

    executions: int = 0
    crashes: int = 0
    hangs: int = 0
    peak_mb: float = 0.0
    seconds: float = 0.0

    def add(self, other: "Counts") -> None:
        """And what came of it in another slice."""
        self.executions += other.executions
        self.crashes += other.crashes
        self.hangs += other.hangs
        self.peak_mb = max(self.peak_mb, other.peak_mb)
        self.seconds += other.seconds

    @property
    def is_good(self) -> bool:
        return self.executions > 0 and not self.crashes and not self.hangs


def functions_of(modules: tuple[str, ...]) -> list[types.FunctionType]:
    """The functions and methods of modules that are imported, and of those below them; kernels are
    none of these."""
    found = []
    for name, module in list(sys.modules.items()):
        if not any(name == wanted or name.startswith(wanted + ".") for wanted in modules):
            continue
        own = [
            value for value in vars(module).values() if getattr(value, "__module__", None) == name
        ]
        own += [value for held in own if isinstance(held, type) for value in vars(held).values()]
        found += [value for value in own if isinstance(value, types.FunctionType)]
    return [function for function in found if not function.__code__.co_filename.startswith("<")]


def with_atheris(name: str, folder: Path, seconds: int, seed: int) -> None:
    """Fuzz one target in this process, which libFuzzer ends so long after its begin."""
    import atheris

    from tests.fuzz.targets import TARGETS

    target = TARGETS[name](folder)
    target.run(target.seeds[0])  # what is compiled once is no hang
    for function in functions_of(INSTRUMENTED):
        atheris.instrument_func(function)
    left = max(1, round(BEGUN + seconds - time.monotonic()))
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for i, data in enumerate(target.seeds):
        (corpus / f"seed-{i}").write_bytes(data)

    def change(data: bytes, most: int, seed: int) -> bytes:
        if seed % 4 == 0:
            return atheris.Mutate(data, most)
        return target.change(bytes(data), random.Random(seed))[:most]

    longest = 2 * max(map(len, target.seeds)) + 10_000
    options = [
        f"-max_total_time={left}",
        f"-max_len={longest}",
        f"-timeout={HANG_S}",
        f"-rss_limit_mb={MOST_MB}",
        f"-seed={seed}",
        f"-artifact_prefix={folder / FOUND}-",
        "-print_final_stats=1",
        "-len_control=0",
        "-verbosity=1",
        f"-report_slow_units={HANG_S}",
    ]
    atheris.Setup([sys.argv[0], *options, str(corpus)], target.run, custom_mutator=change)
    atheris.Fuzz()


def at_random(name: str, folder: Path, seconds: int, seed: int) -> int:
    """Fuzz one target in this process without atheris; 1 if something was found. A hang ends it by
    SIGALRM.

    The input that runs lies in the folder as found-running: it is what ended the process, if that
    did not end by itself.
    """
    from tests.fuzz.targets import TARGETS

    target, chance, executions, found = TARGETS[name](folder), random.Random(seed), 0, 0
    target.run(target.seeds[0])  # what is compiled once is no hang
    running, end = folder / f"{FOUND}-running", max(BEGUN + seconds, time.monotonic() + 1)
    while time.monotonic() < end:
        data = target.change(chance.choice(target.seeds), chance)
        running.write_bytes(data)
        signal.alarm(HANG_S)
        bad = ""
        try:
            target.run(data)
        except BaseException:  # a panic of a library is no Exception
            traceback.print_exc()
            bad = "crash"
        signal.alarm(0)
        if not bad and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > MOST_MB << 10:
            bad = "oom"
        if bad:
            found += 1
            running.rename(folder / f"{FOUND}-{bad}-{seed}-{executions}")
        executions += 1
        if executions % 100 == 0 or bad:
            print(f"{EXECUTIONS}{executions}", flush=True)
        if bad == "oom":
            break
    running.unlink(missing_ok=True)
    print(f"{EXECUTIONS}{executions}", flush=True)
    return int(found > 0)


def fuzz(name: str, folder: Path, seconds: int, seed: int, plain: bool) -> Counts:
    """One slice of one target, fuzzed in a process of its own; prints what it found."""
    command = [
        sys.executable,
        __file__,
        "--here",
        "--target",
        name,
        "--folder",
        str(folder),
        "--seed",
        str(seed),
    ]
    command += ["--seconds", str(seconds), *(["--plain"] if plain else [])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    own, begin = folder / name, time.monotonic()
    own.mkdir(parents=True, exist_ok=True)
    before = set(own.glob(f"{FOUND}-*"))
    with open(own / "log", "wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    text = (own / "log").read_text("utf-8", "replace")
    counts = re.findall(rf"(?:{EXECUTIONS}|number_of_executed_units: |(?m:^)#)(\d+)", text)
    running = own / f"{FOUND}-running"
    if running.exists():
        running.rename(
            own
            / f"{FOUND}-{'timeout' if process.returncode == -signal.SIGALRM else 'signal'}-{seed}"
        )
    kept = sorted(path.name for path in set(own.glob(f"{FOUND}-*")) - before)
    hangs = sum("timeout" in kind for kind in kept)
    crashes = len(kept) - hangs
    if process.returncode and not kept:
        crashes += 1
    if crashes or hangs:
        print(
            text[-6000:],
            f"{name} kept: {', '.join(str(own / kind) for kind in kept)}",
            sep="\n",
            flush=True,
        )
    executions = int(counts[-1]) if counts else 0
    return Counts(executions, crashes, hangs, used.ru_maxrss / 1024, time.monotonic() - begin)


def slices(names: list[str], seconds: int, slice_s: int) -> list[tuple[str, int, int]]:
    """(target, seconds, number of the round), target after target, of about slice_s each, all
    equal."""
    rounds = max(1, round(seconds / len(names) / slice_s))
    return [
        (name, max(1, seconds // len(names) // rounds), i) for i in range(rounds) for name in names
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=600, help="for all targets together")
    parser.add_argument(
        "--slice",
        type=int,
        default=SLICE_S,
        help="seconds of one target before the next one's turn",
    )
    parser.add_argument(
        "--target", choices=NAMES, action="append", help="this one; may be given several times"
    )
    parser.add_argument(
        "--folder", type=Path, help="where datasets are built and findings are kept"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--plain", action="store_true", help="without atheris, though it is installed"
    )
    # the process of one target
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    plain = given.plain or importlib.util.find_spec("atheris") is None
    if given.here:
        (name,) = given.target
        own = given.folder / name  # a target puts files into its folder
        if plain:
            return at_random(name, own, given.seconds, given.seed)
        with_atheris(name, own, given.seconds, given.seed)
        return 0
    names = given.target or list(NAMES)
    with contextlib.ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        print("seeds changed at random, without atheris" if plain else "with atheris", flush=True)
        totals = {name: Counts() for name in names}
        for name, seconds, i in slices(names, given.seconds, given.slice):
            totals[name].add(fuzz(name, folder, seconds, given.seed + i, plain))
    for name, total in totals.items():
        print(
            f"{name:16}{total.executions:>9} executions  {total.crashes} crashes  {total.hangs}"
            f" hangs  {total.peak_mb:5.0f} MB peak  {total.seconds:4.0f} s",
            flush=True,
        )
    return int(not all(total.is_good for total in totals.values()))


if __name__ == "__main__":
    sys.exit(main())
