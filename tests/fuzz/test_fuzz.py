"""A short run of every fuzz target: seeds changed at random here, and, where atheris is installed, the runner with it."""

import importlib.util
import random
import subprocess
import sys

import pytest

from tests.fuzz import run
from tests.fuzz.targets import targets
from tests.made import ROOT, environment
from tests.verification.hostile import in_child

EXECUTIONS = 150


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    return targets(tmp_path_factory.mktemp("fuzz"))


def test_there_is_a_target_for_each_name_of_the_runner(every):
    assert tuple(every) == run.NAMES


@pytest.mark.parametrize("name", run.NAMES)
def test_a_target_ends_well_with_any_bytes(every, name):
    target = every[name]

    def fuzz():
        chance = random.Random(name)
        for data in target.seeds:
            target.run(data)
        for i in range(EXECUTIONS):
            data = target.change(chance.choice(target.seeds), chance)
            try:
                target.run(data)
            except Exception as error:
                raise AssertionError(f"execution {i}: {data[:2000]!r}") from error

    in_child(fuzz)


def test_the_runner_counts_and_says_what_it_found(tmp_path):
    with_atheris = importlib.util.find_spec("atheris") is not None
    command = [sys.executable, "tests/fuzz/run.py", "--seconds", "5", "--folder", str(tmp_path)]
    said = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)
    assert said.returncode == 0, said.stdout + said.stderr
    lines = said.stdout.splitlines()
    assert lines[0] == ("with atheris" if with_atheris else "seeds changed at random, without atheris")
    assert [line.split()[0] for line in lines[1:]] == list(run.NAMES)
    for line in lines[1:]:
        words = line.split()
        assert int(words[1]) > 0 and words[3:7:2] == ["0", "0"], line


def test_the_runner_keeps_what_it_found(tmp_path, monkeypatch, every):
    """A target that cannot bear a line end: the crash is counted and its input kept."""
    import tests.fuzz.targets as module

    def fragile(data):
        assert b"\n" not in data

    monkeypatch.setattr(module, "targets", lambda folder: {"recipe": module.Target([b"a\n"], fragile, lambda d, c: d)})
    assert run.at_random("recipe", tmp_path, 1, 0) == 1
    assert (tmp_path / "recipe-crash-0").read_bytes() == b"a\n"
