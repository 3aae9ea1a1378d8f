"""A short run of every fuzz target: seeds changed at random here, and, where atheris is installed,
the runner with it."""

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import run, targets
from tests.made import ROOT, environment, run_python
from tests.verification.hostile import in_child

pytestmark = pytest.mark.long

EXECUTIONS, OF_BUILDS = 75, 20
MOST_BYTES = 1 << 30


def ends_well(name: str, folder: Path) -> None:
    """Run a target's seeds and changes of them in a child of bounded memory; AssertionError with
    the input that it ends at."""
    (folder / name).mkdir()
    target = targets.TARGETS[name](folder / name)

    def fuzz():
        chance = random.Random(name)
        for data in target.seeds:
            target.run(data)
        for i in range(EXECUTIONS if name in run.NAMES[:5] else OF_BUILDS):
            data = target.change(chance.choice(target.seeds), chance)
            try:
                target.run(data)
            except BaseException as error:
                raise AssertionError(f"execution {i}: {data[:2000]!r}") from error

    in_child(fuzz, more=MOST_BYTES)


def test_there_is_a_target_for_each_name_of_the_runner():
    assert tuple(targets.TARGETS) == run.NAMES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the datasets of some targets are built once."""
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("name", run.NAMES)
def test_a_target_ends_well_with_any_bytes(folder, name):
    if not name.startswith("tokenizer"):
        ends_well(name, folder)
        return
    # The libraries' threads, which other tests may have begun, do not survive a fork.
    code = (
        f"from tests.fuzz import test_fuzz; test_fuzz.ends_well({name!r},"
        f" test_fuzz.Path({str(folder)!r}))"
    )
    done = run_python(code, RUST_BACKTRACE="0")
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_the_runner_counts_and_says_what_it_found(tmp_path):
    with_atheris = importlib.util.find_spec("atheris") is not None
    names = ["recipe", "megatron"]
    command = [
        sys.executable,
        "tests/fuzz/run.py",
        "--seconds",
        "8",
        "--slice",
        "2",
        "--folder",
        str(tmp_path),
    ]
    command += [word for name in names for word in ("--target", name)]
    said = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600
    )
    assert said.returncode == 0, said.stdout + said.stderr
    lines = said.stdout.splitlines()
    assert lines[0] == (
        "with atheris" if with_atheris else "seeds changed at random, without atheris"
    )
    assert [line.split()[0] for line in lines[1:]] == names
    for line in lines[1:]:
        words = line.split()
        assert int(words[1]) > 0 and words[3:7:2] == ["0", "0"], line


FRAGILE = """
import os, sys, time
from tests.fuzz import run, targets
run.HANG_S, run.MOST_MB, held = 4, 450, []
def fragile(data):
    if b"\\n" in data:
        {ends}
targets.TARGETS["recipe"] = lambda folder: targets.Target([b"a"], fragile, lambda data, chance: b"a\\n")
sys.exit(run.main())
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "ends, kept",
    [
        ("raise BaseException", "found-crash-7-0"),
        ("os.abort()", "found-signal-7"),
        ("time.sleep(30)", "found-timeout-7"),
        ("held.append(b'x' * (1 << 29))", "found-oom-7-0"),
    ],
)
def test_the_runner_keeps_what_it_found(tmp_path, monkeypatch, ends, kept):
    """A target that cannot bear a line end is found, however that ends, and its input kept."""
    script = tmp_path / "fragile.py"
    script.write_text(FRAGILE.format(ends=ends))
    monkeypatch.setattr(run, "__file__", str(script))
    found = run.fuzz("recipe", tmp_path, 1, 7, plain=True)
    assert (
        not found.is_good
        and (found.hangs == 1) == ("timeout" in kept)
        and (found.crashes > 0) == (not found.hangs)
    )
    assert (tmp_path / "recipe" / kept).read_bytes() == b"a\n"


def test_slices_go_from_target_to_target():
    assert run.slices(["a", "b"], 100, 25) == [
        ("a", 25, 0),
        ("b", 25, 0),
        ("a", 25, 1),
        ("b", 25, 1),
    ]
    assert run.slices(["a", "b"], 5, 60) == [("a", 2, 0), ("b", 2, 0)]


@pytest.mark.campaign
def test_an_hour_of_fuzzing_finds_nothing(tmp_path):
    """`PACKPREP_FUZZ_SECONDS` sets another time."""
    seconds = os.environ.get("PACKPREP_FUZZ_SECONDS", "3600")
    command = [sys.executable, "tests/fuzz/run.py", "--seconds", seconds, "--folder", str(tmp_path)]
    assert subprocess.run(command, cwd=ROOT, env=environment()).returncode == 0
