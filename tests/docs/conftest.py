"""The fixtures of the pages: their world, and the services of other rooms' tests."""

import pytest

from tests.docs.world import World
from tests.slurm.conftest import cluster, place  # noqa: F401
from tests.storage.conftest import server  # noqa: F401


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("world"))
