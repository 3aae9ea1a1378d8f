import json
import shutil

import pytest

from packprep.building.output import output_of
from packprep.building.publication import missing_shards, publish
from packprep.building.run import open_job
from packprep.dataset.json_files import MANIFEST_NAME, encode, receipt_name
from packprep.dataset.manifest import check_manifest
from packprep.digests import digest_of, digest_of_file
from packprep.errors import BuildError
from tests import made


@pytest.fixture
def out(built, tmp_path):
    shutil.copytree(built.out, tmp_path / "out")
    return tmp_path / "out"


def test_the_manifest_is_canonical_checked_and_names_digests_that_are_right(built):
    data = (built.out / MANIFEST_NAME).read_bytes()
    manifest = json.loads(data)
    assert encode(manifest) == data and check_manifest(manifest, MANIFEST_NAME) == manifest == built.outcome.manifest
    rest = {k: v for k, v in manifest.items() if k != "digest"}
    assert manifest["digest"] == digest_of(encode(rest))
    for key in ("plan", "tokenizer"):
        assert manifest[key]["digest"] == digest_of_file(built.out / manifest[key]["file"])
    for b, entry in enumerate(manifest["shards"]):
        assert entry["digest"] == digest_of_file(built.out / entry["file"])
        assert entry["receipt_digest"] == digest_of_file(built.out / receipt_name(b))
        assert entry["bytes"] == (built.out / entry["file"]).stat().st_size


def test_nothing_is_published_while_a_shard_is_missing(out):
    job = open_job(out)
    (out / MANIFEST_NAME).unlink()
    (out / receipt_name(2)).unlink()
    assert publish(output_of(out), job) is None and not (out / MANIFEST_NAME).exists()
    assert missing_shards(output_of(out), job.digest, range(job.shards)) == [2]


def test_whoever_publishes_writes_the_same_bytes_and_removes_temporaries(out):
    before = (out / MANIFEST_NAME).read_bytes()
    (out / MANIFEST_NAME).unlink()
    made.write(out / "shards" / "000" / ".000000.safetensors.h-1-aa.tmp", b"")
    publish(output_of(out), open_job(out))
    publish(output_of(out), open_job(out))
    assert (out / MANIFEST_NAME).read_bytes() == before and not made.temporaries(out)


def test_another_manifest_that_stands_there_stops_the_build(out):
    (out / MANIFEST_NAME).write_bytes(b"{}\n")
    with pytest.raises(BuildError, match="dataset.json stands there and differs from this build's: begin anew"):
        publish(output_of(out), open_job(out))


def test_a_ledger_that_does_not_balance_is_not_published(out):
    (out / MANIFEST_NAME).unlink()
    receipt = json.loads((out / receipt_name(1)).read_bytes())
    receipt["ledger"]["row_padding"] += 1
    (out / receipt_name(1)).write_bytes(encode(receipt))
    with pytest.raises(BuildError, match="the ledger does not balance"):
        publish(output_of(out), open_job(out))
    assert not (out / MANIFEST_NAME).exists()


def test_nothing_of_hosts_times_paths_or_processes_is_in_a_dataset(built):
    import os
    import socket

    for name, data in made.contents(built.out).items():
        if name != "plan.json":
            assert str(built.base).encode() not in data, name
        assert socket.gethostname().encode() not in data and f"-{os.getpid()}-".encode() not in data, name
