"""Fixtures of the whole suite, and hypothesis made repeatable."""

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import settings

import packprep
from packprep.building.run import Outcome
from tests import made

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
    """Of a test marked `long(beyond=N)` the first N cases are not long."""
    seen: dict[str, int] = {}
    for item in items:
        mark = item.get_closest_marker("long")
        if mark and "beyond" in mark.kwargs:
            case = item.nodeid.partition("[")[0]
            seen[case] = seen.get(case, 0) + 1
            if seen[case] <= mark.kwargs["beyond"]:
                item.own_markers = [own for own in item.own_markers if own.name != "long"]


def pytest_terminal_summary(terminalreporter) -> None:
    """What tests counted with `record_property("kill points", n)`, summed over all processes of the
    run."""
    counts: dict[str, int] = {}
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties if report.when == "call" else ():
            counts[name] = counts.get(name, 0) + value
    for name, count in sorted(counts.items()):
        terminalreporter.write_line(f"{name} tried: {count}")
