import dataclasses
import os

import pytest

from packprep.building import commit
from packprep.building.commit import commit_shard, done_receipt, read_receipt
from packprep.building.output import output_of
from packprep.building.run import open_job
from packprep.building.work import make_shard
from packprep.corpus.reading import Rejected
from packprep.dataset.json_files import encode, receipt_name, rejects_name, shard_name
from packprep.errors import BuildError, PlanError
from tests import made


@pytest.fixture
def out(built, tmp_path):
    """An output folder with a plan and no shards."""
    for name in ("plan.json", "tokenizer.json"):
        made.write(tmp_path / "out" / name, (built.out / name).read_bytes())
    return tmp_path / "out"


def commit_one(out, shard=0):
    job = open_job(out)
    return job, commit_shard(output_of(out), job, shard, make_shard(job, shard))


def test_a_commit_writes_shard_rejects_and_receipt(built, out):
    shard = int(os.path.basename(next(iter(made.contents(built.out, "rejects"))))[:6])
    job, receipt = commit_one(out, shard)
    for name in (shard_name(shard), rejects_name(shard), receipt_name(shard)):
        assert (out / name).read_bytes() == (built.out / name).read_bytes()
    assert receipt["rejects"]["documents"] >= 1 and not made.temporaries(out)
    assert done_receipt(output_of(out), shard, job.digest)[0] == receipt
    assert done_receipt(output_of(out), shard, "0" * 32) is None


def test_fault_23_every_file_appears_by_a_rename_after_it_is_on_disk_and_the_receipt_last(built, out, monkeypatch):
    shard = int(os.path.basename(next(iter(made.contents(built.out, "rejects"))))[:6])
    job = open_job(out)
    seen = []
    rename, fsync = os.rename, os.fsync

    def watched(temporary, path):
        seen.append(path.relative_to(out).as_posix())
        assert os.path.basename(temporary).startswith(f".{path.name}.") and not path.exists()
        rename(temporary, path)

    monkeypatch.setattr(os, "rename", watched)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (seen.append("fsync"), fsync(descriptor)))
    commit_shard(output_of(out), job, shard, make_shard(job, shard))
    names = [shard_name(shard), rejects_name(shard), receipt_name(shard)]
    assert [name for name in seen if name != "fsync"] == names
    for name in names:
        assert seen[seen.index(name) - 1] == "fsync" == seen[seen.index(name) + 1]  # the file; then its folder


def test_a_second_commit_of_the_same_shard_changes_nothing(out):
    job, receipt = commit_one(out)
    before = {name: os.stat(out / name).st_mtime_ns for name in made.contents(out)}
    assert commit_shard(output_of(out), job, 0, make_shard(job, 0)) == receipt
    assert before == {name: os.stat(out / name).st_mtime_ns for name in made.contents(out)}


def test_a_second_commit_with_other_bytes_stops_with_both_digests(out):
    job, receipt = commit_one(out)
    before = made.contents(out)
    other = make_shard(job, 0)
    other.arrays["tokens"][0, 0] ^= 1
    with pytest.raises(BuildError, match=f"made again with digest [0-9a-f]+ and it stands with {receipt['digest']}"):
        commit_shard(output_of(out), job, 0, other)
    assert made.contents(out) == before


def test_fault_23_only_a_receipt_of_this_plan_with_files_of_its_sizes_is_done(out):
    job, receipt = commit_one(out)
    path = out / receipt_name(0)
    good = path.read_bytes()

    def done():
        return done_receipt(output_of(out), 0, job.digest) is not None

    assert done()
    for bad in (b"", good[:-5], b"[]\n", encode({**receipt, "plan_digest": "0" * 32}), encode({**receipt, "shard": 1}),
                encode({**receipt, "version": 2}), good.replace(b",", b", ")):  # fmt: skip
        path.write_bytes(bad)
        assert not done()
    path.write_bytes(good)
    os.truncate(out / shard_name(0), receipt["bytes"] - 1)
    assert not done()
    (out / shard_name(0)).unlink()
    assert not done() and read_receipt(output_of(out), 0) is not None


def test_a_receipt_of_a_newer_version_is_refused_and_its_shard_not_made_again(out, monkeypatch):
    job, receipt = commit_one(out)
    path = out / receipt_name(0)
    rejects = {**(receipt["rejects"] or dict.fromkeys(commit.REJECTS_KEYS, 0)), "more": 1}
    for newer in ({**receipt, "more": 1}, {**receipt, "rejects": rejects}):
        path.write_bytes(encode(newer))
        with pytest.raises(
            PlanError, match=r"000000.json: key 'more' is unknown to packprep .*: a newer version wrote it"
        ):
            done_receipt(output_of(out), 0, job.digest)
    monkeypatch.setitem(commit.LATER, "", {"more": 0})
    path.write_bytes(encode({**receipt, "more": 1}))
    assert done_receipt(output_of(out), 0, job.digest)[0]["more"] == 1
    path.write_bytes(encode(receipt))
    assert done_receipt(output_of(out), 0, job.digest)[0]["more"] == 0


def test_rejects_of_another_size_are_not_done(built, out):
    shard = int(os.path.basename(next(iter(made.contents(built.out, "rejects"))))[:6])
    job, _ = commit_one(out, shard)
    (out / rejects_name(shard)).write_bytes(b"{}\n")
    assert done_receipt(output_of(out), shard, job.digest) is None
    commit_shard(output_of(out), job, shard, make_shard(job, shard))
    assert done_receipt(output_of(out), shard, job.digest) is not None


def test_stale_rejects_are_removed_where_there_are_none(out):
    made.write(out / rejects_name(0), b"{}\n")
    job = open_job(out)
    shard = make_shard(job, 0)
    shard.reading.rejected = Rejected()
    commit_shard(output_of(out), job, 0, dataclasses.replace(shard) if dataclasses.is_dataclass(shard) else shard)
    assert not (out / rejects_name(0)).exists()
