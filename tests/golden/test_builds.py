"""No change of the code changes a byte of the builds that are frozen."""

import json

import pytest

from tests.golden import builds

FROZEN = json.loads(builds.FROZEN.read_text())


def test_every_build_is_frozen():
    assert FROZEN.keys() == builds.BUILDS.keys()
    assert FROZEN["t5_reference"]["files"] == FROZEN["t5_fast"]["files"]


@pytest.mark.every_case
@pytest.mark.parametrize("name", sorted(builds.BUILDS))
def test_a_build_gives_its_frozen_bytes(name, tmp_path):
    assert builds.frozen(builds.make(name, tmp_path)) == FROZEN[name]
