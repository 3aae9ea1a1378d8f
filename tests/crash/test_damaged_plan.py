"""plan.json carries its own digest: whatever byte of it changes, at whatever moment of a build, is
found."""

import json
import shutil

import numpy as np
import pytest

from packprep.building.plan import stored_plan
from packprep.errors import PlanError
from packprep.format.digests import digest_of, own_digest
from packprep.format.json_files import MANIFEST_NAME, encode
from tests import command_line, made
from tests.crash import disturbed


@pytest.fixture
def begun(plain, folder):
    """A build that stopped when a shard was done."""
    out = folder / "out"
    disturbed.run(plain.command(out), out, 100)
    assert disturbed.check_truth(plain, out) == 1
    return out


def test_the_digest_is_that_of_the_plan_without_it(plain):
    plan = json.loads(plain.expected["plan.json"])
    rest = {key: value for key, value in plan.items() if key != "digest"}
    assert plan["digest"] == own_digest(plan) == digest_of(encode(rest))
    assert json.loads(plain.expected[MANIFEST_NAME])["plan"]["digest"] == digest_of(
        plain.expected["plan.json"]
    )


@pytest.mark.long
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.campaign)])
def test_a_change_of_any_byte_is_refused(plain, begun, every):
    data = plain.expected["plan.json"]
    chance = np.random.default_rng(0)
    for at in range(0, len(data), every):
        for bit in (1 << int(chance.integers(8)), 1):  # the second turns digits into digits
            (begun / "plan.json").write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
            with pytest.raises(PlanError, match="restore the file|build into another folder"):
                stored_plan(begun)
    for cut in (0, 1, len(data) // 2, len(data) - 1):
        (begun / "plan.json").write_bytes(data[:cut])
        with pytest.raises(PlanError, match="build into another folder"):
            stored_plan(begun)


def digits(data):
    """The places of some digits and letters, of which another makes a plan that can be read as
    well."""
    places = [at for at, byte in enumerate(data) if chr(byte).isdigit()]
    return places[:: len(places) // 12]


def test_build_status_and_verify_refuse_a_digit_that_was_changed_before_publication_and_after(
    plain, begun, folder
):
    data = plain.expected["plan.json"]
    done = shutil.copytree(plain.base / "out", folder / "done")
    for at in digits(data):
        changed = data[:at] + (b"1" if data[at : at + 1] != b"1" else b"2") + data[at + 1 :]
        for out in (begun, done):
            (out / "plan.json").write_bytes(changed)
        before = made.contents(begun)
        for command in (
            plain.command(begun),
            ["status", begun],
            plain.command(done),
            ["status", done],
        ):
            message = command_line.refused(*command)
            assert "plan.json: " in message and (
                "restore the file" in message or "into another folder" in message
            )
        assert made.contents(begun) == before
        said = command_line.inside("verify", done, "--json")
        assert said.status == 1 and said.json["listed"][0]["file"] == "plan.json", said


def test_a_plan_written_by_hand_in_another_form_is_refused(plain, begun):
    plan = json.loads(plain.expected["plan.json"])
    (begun / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(
        PlanError,
        match="not in canonical form from byte .* edited or damaged .*\nhint: restore the file",
    ):
        stored_plan(begun)
    (begun / "plan.json").write_bytes(encode({**plan, "shards": plan["shards"] + 1}))
    with pytest.raises(
        PlanError,
        match="changed or damaged, because it has the digest '[0-9a-f]{32}', but its contents have [0-9a-f]{32}",
    ):
        stored_plan(begun)
