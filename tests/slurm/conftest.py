"""A private Slurm for these tests, one for each worker of pytest, at ports that are free; and the
corpus that they build."""

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import made
from tests.slurm.cluster import Cluster, Unavailable, install


class Small(NamedTuple):
    """A recipe over a small corpus, and what the build, or a token store of it, by one process
    gives. Read only."""

    recipe: Path
    table: dict[str, Any]
    expected: dict[str, bytes]
    tokens: dict[str, bytes]
    shards: int


@pytest.fixture(scope="session")
def place() -> Iterator[Path]:
    """A folder that munge's user may enter, as pytest's own may not be."""
    folder = Path(tempfile.mkdtemp(prefix="packprep-slurm-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def cluster(place: Path) -> Iterator[Cluster]:
    """Four emulated nodes; skips, with the reason, where there can be none."""
    cluster = Cluster(place / "slurm")
    try:
        try:
            install()
            cluster.start()
        except Unavailable as reason:
            pytest.skip(str(reason))
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def small(place: Path) -> Small:
    """Some twenty shards; the kernels that its tasks need are compiled once here, and not by each
    array task."""
    folder = place / "corpus"
    made.write_lines(folder / "a.jsonl", made.texts(400, 1))
    made.write_lines(folder / "b.jsonl.zst", made.texts(400, 2))
    recipe = made.write(
        folder / "recipe.toml",
        b'seq_length = 512\ntokenizer = "bytes"\n[[sources]]\npaths ='
        b' ["*.jsonl*"]\n[[tasks]]\npreset = "ul2r"\n[output]\nshard_text_bytes = 10_000\n',
    )
    table = {
        "seq_length": 512,
        "tokenizer": "bytes",
        "sources": [{"paths": ["*.jsonl*"]}],
        "tasks": [{"preset": "ul2r"}],
        "output": {"shard_text_bytes": 10_000},
    }
    outcome = made.build(table, folder, folder / "out")
    made.build(table, folder, folder / "store", is_store=True)
    assert outcome.manifest is not None
    return Small(
        recipe,
        table,
        made.contents(folder / "out"),
        made.contents(folder / "store"),
        outcome.plan.shards,
    )


@pytest.fixture
def out(place: Path, request: pytest.FixtureRequest) -> Path:
    """An output folder of the test's own."""
    folder = place / re.sub(r"\W", "-", request.node.name)[-60:]
    folder.mkdir()
    return folder / "out"
