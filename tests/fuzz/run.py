"""Fuzz what reads files that somebody else may have written: `python tests/fuzz/run.py --seconds 600`.

Every target of `targets.py` gets its part of the seconds, in a process of its own, and a line is printed for each:
executions, crashes (any error that packprep did not raise on purpose), hangs (more than HANG_S for one input) and peak
memory. The exit status is 1 if there was any. With atheris the code is instrumented, and inputs that reach new parts of
it are kept and changed further; without it, or with --plain, seeds are changed at random by `mutations.py` alone.
"""

import argparse
import contextlib
import importlib.util
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("shard", "manifest", "plan", "receipt", "recipe")
HANG_S = 20
MOST_MB = 2048
"""Memory of a process at which it is ended, and the input that needed it kept."""

INSTRUMENTED = (
    "packprep.dataset", "packprep.recipe", "packprep.building.commit", "packprep.building.ledger",
    "packprep.building.plan", "packprep.building.plan_form", "packprep.building.run", "packprep.verification.files",
)  # fmt: skip
EXECUTIONS, FOUND = "executions: ", "found: "


def functions_of(modules: tuple[str, ...]) -> list[types.FunctionType]:
    """The functions and methods of modules that are imported, and of those below them; kernels are none of these."""
    found = []
    for name, module in list(sys.modules.items()):
        if not any(name == wanted or name.startswith(wanted + ".") for wanted in modules):
            continue
        own = [value for value in vars(module).values() if getattr(value, "__module__", None) == name]
        own += [value for held in own if isinstance(held, type) for value in vars(held).values()]
        found += [value for value in own if isinstance(value, types.FunctionType)]
    return [function for function in found if not function.__code__.co_filename.startswith("<")]


def with_atheris(name: str, folder: Path, seconds: int, seed: int) -> None:
    """Fuzz one target in this process, which libFuzzer ends."""
    import atheris

    from tests.fuzz.targets import targets

    for function in functions_of(INSTRUMENTED):
        atheris.instrument_func(function)
    target = targets(folder)[name]
    corpus = folder / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    for i, data in enumerate(target.seeds):
        (corpus / f"seed-{i}").write_bytes(data)

    def change(data: bytes, most: int, seed: int) -> bytes:
        if seed % 4 == 0:
            return atheris.Mutate(data, most)
        return target.change(bytes(data), random.Random(seed))[:most]

    longest = 2 * max(map(len, target.seeds)) + 10_000
    options = [
        f"-max_total_time={seconds}", f"-max_len={longest}", f"-timeout={HANG_S}", f"-rss_limit_mb={MOST_MB}",
        f"-seed={seed}", f"-artifact_prefix={folder / name}-", "-print_final_stats=1", "-len_control=0", "-verbosity=1",
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *options, str(corpus)], target.run, custom_mutator=change)
    atheris.Fuzz()


def at_random(name: str, folder: Path, seconds: int, seed: int) -> int:
    """Fuzz one target in this process without atheris; 1 if something was found."""
    from tests.fuzz.targets import targets

    target, chance, executions, found = targets(folder)[name], random.Random(seed), 0, 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        data = target.change(chance.choice(target.seeds), chance)
        begin = time.monotonic()
        try:
            target.run(data)
            bad = "hang" if time.monotonic() - begin > HANG_S else ""
        except Exception:
            traceback.print_exc()
            bad = "crash"
        if bad:
            found += 1
            (folder / f"{name}-{bad}-{executions}").write_bytes(data)
        executions += 1
    print(f"{EXECUTIONS}{executions}\n{FOUND}{found}", flush=True)
    return int(found > 0)


def fuzz(name: str, folder: Path, seconds: int, seed: int, plain: bool) -> tuple[int, int, int, float]:
    """(executions, crashes, hangs, peak MB) of one target, fuzzed in a process of its own; prints what it found."""
    command = [sys.executable, __file__, "--target", name, "--folder", str(folder), "--seed", str(seed)]
    command += ["--seconds", str(seconds), *(["--plain"] if plain else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with open(folder / f"{name}.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    text = (folder / f"{name}.log").read_text("utf-8", "replace")
    counts = re.findall(rf"(?:{EXECUTIONS}|number_of_executed_units: )(\d+)", text)
    kept = [path.name for path in (folder / name).glob(f"{name}-*")]
    hangs = sum("hang" in kind or "timeout" in kind for kind in kept)
    crashes = len(kept) - hangs
    if process.returncode and not kept:
        crashes += 1
    if crashes or hangs:
        print(text[-6000:], f"kept: {', '.join(str(folder / name / kind) for kind in kept)}", sep="\n")
    return int(counts[-1]) if counts else 0, crashes, hangs, used.ru_maxrss / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=600, help="for all targets together")
    parser.add_argument("--target", choices=NAMES, help="this one alone, in this process")
    parser.add_argument("--folder", type=Path, help="where datasets are built and findings are kept")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="without atheris, though it is installed")
    given = parser.parse_args()
    plain = given.plain or importlib.util.find_spec("atheris") is None
    if given.target:
        own = given.folder / given.target  # a target puts files into its datasets
        own.mkdir(parents=True, exist_ok=True)
        if plain:
            return at_random(given.target, own, given.seconds, given.seed)
        with_atheris(given.target, own, given.seconds, given.seed)
        return 0
    with contextlib.ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        print("seeds changed at random, without atheris" if plain else "with atheris", flush=True)
        worst = 0
        for name in NAMES:
            begin = time.monotonic()
            executions, crashes, hangs, peak = fuzz(name, folder, given.seconds // len(NAMES), given.seed, plain)
            worst = max(worst, crashes + hangs + (executions == 0))
            took = time.monotonic() - begin
            print(
                f"{name:9}{executions:>9} executions  {crashes} crashes  {hangs} hangs  {peak:5.0f} MB peak  {took:4.0f} s",
                flush=True,
            )
    return int(worst > 0)


if __name__ == "__main__":
    sys.exit(main())
