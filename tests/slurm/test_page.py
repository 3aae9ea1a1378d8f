"""The commands of docs/slurm.md run, in order, on a real Slurm; its Python runs too."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from tests import made
from tests.slurm.cluster import quiet_environment

PAGE = (made.ROOT / "docs" / "slurm.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.S | re.M)


@pytest.fixture(scope="module")
def folder(place, small):
    """A folder with the recipe and inputs that the page speaks of, and packprep as a command."""
    folder = place / "page"
    (folder / "bin").mkdir(parents=True)
    for path in (small.recipe, *small.recipe.parent.glob("*.jsonl*")):
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "bin" / "packprep").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m packprep "$@"\n')
    (folder / "bin" / "packprep").chmod(0o755)
    return folder


def test_the_commands_of_the_page_build_and_verify(cluster, small, folder):
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    assert len(commands) == 5
    environment = quiet_environment(made.environment()) | cluster.environment
    environment["PATH"] = f"{folder / 'bin'}:{environment['PATH']}"
    for command in commands:
        done = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == (" status " in command and not (folder / "packed/dataset.json").exists()), done
        jobs = re.findall(r"\.sh: job (\d+),|Submitted batch job (\d+)", done.stdout)
        assert bool(jobs) == ("--submit" in command or command.startswith("sbatch")), done
        if jobs:
            cluster.wait(*("".join(job) for job in jobs))
            assert {state for job in jobs for state in cluster.states("".join(job))} == {"COMPLETED"}, command
    for name, data in made.contents(folder / "packed", "shards").items():
        assert data == small.expected[name]
    assert "every promise holds" in (folder / "packed.slurm" / "finish.log").read_text()
    assert "built again from their sources" in (folder / "packed.slurm" / "verify-3.log").read_text()


def test_the_python_of_the_page_builds(folder, small):
    (code,) = blocks("python")
    (folder / "pool.py").write_text(code)
    environment = made.environment()
    done = subprocess.run([sys.executable, "pool.py"], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = {name: data for name, data in small.expected.items() if name.startswith("shards" + os.sep)}
    assert made.contents(folder / "packed_by_a_pool", "shards") == expected
