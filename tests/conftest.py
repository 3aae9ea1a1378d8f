"""Fixtures of the whole suite, and hypothesis made repeatable."""

import gc
import importlib.metadata
import os
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import settings

import packprep
from packprep.building.run import Outcome
from tests import made

# Each core runs a process of tests, also of this one's children. More threads of torch would only
# wait for one another, and burn the other processes' time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Each build asks for the versions of 15 packages, whose metadata take a seventh of a small build.
importlib.metadata.version = cache(importlib.metadata.version)
# Hundreds of builds would wait for the disk for half a minute. `tests/crash` does wait, because it
# tests what a power cut leaves. Tests of the order of calls replace this function.
fsync = os.fsync
os.fsync = lambda descriptor: None
# The bytecode of packages and tests is written once, whatever the environment says. Otherwise each
# process compiles it again, which is a third of a small command.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
settings.register_profile("packprep", derandomize=True, deadline=None)
settings.load_profile("packprep")


class Built(NamedTuple):
    """A small dataset: its corpus' folder, its recipe's table, its output and what the build came
    to. Read only."""

    base: Path
    table: dict
    out: Path
    outcome: Outcome


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Built:
    """ul2r over three sources of all formats, one of them used 1.5 times; several shards, some
    rejects."""
    base = tmp_path_factory.mktemp("built")
    sources = made.mixed_corpus(base)
    table = made.table(sources, documents={"prepend_bos": True})
    outcome = made.build(table, base, base / "out")
    assert outcome.manifest is not None
    return Built(base, table, base / "out", outcome)


@pytest.fixture
def copied(tmp_path) -> Path:
    """The folder of a copy of the package, to be changed; `made.run_copied` runs it."""
    source = Path(packprep.__file__).parent
    shutil.copytree(source, tmp_path / "packprep", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items) -> None:
    """Sort the cases of parametrized tests into the tiers.

    The first case shows the behaviour, and the others are `long`. Tests marked `every_case` keep
    all, because each case is a guarantee of its own. The cases of a test marked `alike(n)` show one
    guarantee: `n` of them stay, evenly spread and the first among them, and the others are
    `campaign`. Cases that are `campaign` by their own marker stay so, and are not counted.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not item.get_closest_marker("campaign"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        alike = cases[0].get_closest_marker("alike")
        kept = alike.args[0] if alike else len(cases)
        stay = {i * len(cases) // kept for i in range(kept)}
        for i, item in enumerate(cases):
            if i not in stay:
                item.add_marker("campaign")
            elif i and not item.get_closest_marker("every_case"):
                item.add_marker("long")


def pytest_collection_finish() -> None:
    """Exempt what is imported from garbage collection.

    The libraries of trainers are a million objects. Every full collection would visit them, and
    each forked child would copy their pages.
    """
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter) -> None:
    """What tests counted with `record_property("kill points", n)`, summed over all processes of the
    run."""
    counts: dict[str, int] = {}
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties if report.when == "call" else ():
            counts[name] = counts.get(name, 0) + value
    for name, count in sorted(counts.items()):
        terminalreporter.write_line(f"{name} tried: {count}")
