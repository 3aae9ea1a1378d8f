import dataclasses
import json
import os
import shutil
import threading
from functools import partial

import pytest

from packprep.building import commit
from packprep.building.commit import (
    commit_shard,
    done_receipt,
    limit_in_words,
    listed_reasons,
    missing_shards,
    publish,
    read_receipt,
    too_many_bad,
)
from packprep.building.plan import open_plan
from packprep.building.work import make_shard
from packprep.dataset.manifest import check_manifest
from packprep.documents.reading import Rejected
from packprep.errors import BuildError, PlanError
from packprep.format.digests import digest_of, digest_of_file
from packprep.format.json_files import (
    FIRST_SEEN_NAME,
    MANIFEST_NAME,
    encode,
    receipt_name,
    rejects_name,
    shard_name,
)
from packprep.storage import LocalFolder, folder_at
from tests import made


@pytest.fixture
def out(built, tmp_path):
    """An output folder with a plan and no shards."""
    for name in ("plan.json", "tokenizer.json"):
        made.write(tmp_path / "out" / name, (built.out / name).read_bytes())
    return tmp_path / "out"


def commit_one(out, shard=0):
    plan = open_plan(out)
    return plan, commit_shard(folder_at(out), plan, shard, make_shard(plan, shard))


def test_a_commit_writes_shard_rejects_and_receipt(built, out):
    shard = int(os.path.basename(next(iter(made.contents(built.out, "rejects"))))[:6])
    plan, receipt = commit_one(out, shard)
    for name in (shard_name(shard), rejects_name(shard), receipt_name(shard)):
        assert (out / name).read_bytes() == (built.out / name).read_bytes()
    assert receipt["rejects"]["documents"] >= 1 and not made.temporaries(out)
    assert done_receipt(folder_at(out), shard, plan.digests)[0] == receipt
    assert done_receipt(folder_at(out), shard, ["0" * 32]) is None


def test_fault_23_every_file_appears_by_one_step_after_it_is_on_disk_and_the_receipt_last(
    built, out, monkeypatch
):
    shard = int(os.path.basename(next(iter(made.contents(built.out, "rejects"))))[:6])
    plan = open_plan(out)
    seen = []
    fsync = os.fsync

    def watched(step, temporary, path):
        seen.append(path.relative_to(out).as_posix())
        assert os.path.basename(temporary).startswith(f".{path.name}.") and not path.exists()
        step(temporary, path)

    for step in (os.rename, os.link):  # the latter for what is written only if there is none
        monkeypatch.setattr(os, step.__name__, partial(watched, step))
    monkeypatch.setattr(os, "fsync", lambda descriptor: (seen.append("fsync"), fsync(descriptor)))
    commit_shard(folder_at(out), plan, shard, make_shard(plan, shard))
    names = [shard_name(shard), rejects_name(shard), receipt_name(shard)]
    assert [name for name in seen if name != "fsync"] == names
    for name in names:
        # the file; then its folder
        assert seen[seen.index(name) - 1] == "fsync" == seen[seen.index(name) + 1]


def test_a_second_commit_of_the_same_shard_changes_nothing(out):
    plan, receipt = commit_one(out)
    before = {name: os.stat(out / name).st_mtime_ns for name in made.contents(out)}
    assert commit_shard(folder_at(out), plan, 0, make_shard(plan, 0)) == receipt
    assert before == {name: os.stat(out / name).st_mtime_ns for name in made.contents(out)}


def test_of_two_builds_that_commit_other_bytes_in_one_moment_one_stops_and_its_shard_is_not_done(
    out,
):
    plan = open_plan(out)
    shards = [make_shard(plan, 0), make_shard(plan, 0)]
    shards[1].arrays["tokens"][0, 0] ^= 1
    barrier, one_at_a_time, said = threading.Barrier(2, timeout=60), threading.Lock(), []

    class Together(LocalFolder):
        """Both find no receipt, and both have written their shard, one after the other, before the
        receipts are written."""

        def write(self, name, buffers):
            with one_at_a_time:  # else one may tidy up the other's temporary, which stops it before
                super().write(name, buffers)

        def create(self, name, data):
            barrier.wait()
            return super().create(name, data)

    def run(shard):
        try:
            said.append(commit_shard(Together(out), plan, 0, shard)["digest"])
        except BuildError as error:
            said.append(error)

    threads = [threading.Thread(target=run, args=(shard,)) for shard in shards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (lost,) = (one for one in said if isinstance(one, BuildError))
    (won,) = (one for one in said if isinstance(one, str))
    assert "made again with digest" in str(lost) and f"the finished shard has {won}" in str(lost)
    assert json.loads((out / receipt_name(0)).read_bytes())["digest"] == won
    if (
        out / shard_name(0)
    ).exists():  # else the loser's lay there, and who made the other makes it again
        assert digest_of_file(out / shard_name(0)) == won
    commit_shard(
        folder_at(out),
        plan,
        0,
        next(s for s in shards if commit.digest_of_buffers(shard_bytes(s)) == won),
    )
    assert digest_of_file(out / shard_name(0)) == won


def shard_bytes(made_shard):
    return commit.shard_format.encode(made_shard.arrays)


def test_a_receipt_that_is_of_no_plan_is_written_anew(out):
    _, receipt = commit_one(out)
    good = (out / receipt_name(0)).read_bytes()
    (out / receipt_name(0)).write_bytes(b"{}\n")
    assert commit_one(out)[1] == receipt and (out / receipt_name(0)).read_bytes() == good


def test_a_second_commit_with_other_bytes_stops_with_both_digests(out):
    plan, receipt = commit_one(out)
    before = made.contents(out)
    other = make_shard(plan, 0)
    other.arrays["tokens"][0, 0] ^= 1
    with pytest.raises(
        BuildError, match=f"made again with digest [0-9a-f]+, but .* {receipt['digest']}"
    ):
        commit_shard(folder_at(out), plan, 0, other)
    assert made.contents(out) == before


def test_fault_23_only_a_receipt_of_this_plan_with_files_of_its_sizes_is_done(out):
    plan, receipt = commit_one(out)
    path = out / receipt_name(0)
    good = path.read_bytes()

    def done():
        return done_receipt(folder_at(out), 0, plan.digests) is not None

    assert done()
    for bad in (
        b"",
        good[:-5],
        b"[]\n",
        encode({**receipt, "plan_digest": "0" * 32}),
        encode({**receipt, "shard": 1}),
        encode({**receipt, "version": 2}),
        good.replace(b",", b", "),
    ):
        path.write_bytes(bad)
        assert not done()
    path.write_bytes(good)
    os.truncate(out / shard_name(0), receipt["bytes"] - 1)
    assert not done()
    (out / shard_name(0)).unlink()
    assert not done() and read_receipt(folder_at(out), 0) is not None


def test_a_receipt_of_a_newer_version_is_refused_and_its_shard_not_made_again(out, monkeypatch):
    plan, receipt = commit_one(out)
    path = out / receipt_name(0)
    rejects = {**(receipt["rejects"] or dict.fromkeys(commit.REJECTS_KEYS, 0)), "more": 1}
    for newer in ({**receipt, "more": 1}, {**receipt, "rejects": rejects}):
        path.write_bytes(encode(newer))
        with pytest.raises(
            PlanError,
            match=r"000000.json: key 'more' is unknown to packprep .*, because a newer version",
        ):
            done_receipt(folder_at(out), 0, plan.digests)
    monkeypatch.setitem(commit.LATER, "", {"more": 0})
    path.write_bytes(encode({**receipt, "more": 1}))
    assert done_receipt(folder_at(out), 0, plan.digests)[0]["more"] == 1
    path.write_bytes(encode(receipt))
    assert done_receipt(folder_at(out), 0, plan.digests)[0]["more"] == 0


def test_rejects_of_another_size_are_not_done(built, out):
    shard = int(os.path.basename(next(iter(made.contents(built.out, "rejects"))))[:6])
    plan, _ = commit_one(out, shard)
    (out / rejects_name(shard)).write_bytes(b"{}\n")
    assert done_receipt(folder_at(out), shard, plan.digests) is None
    commit_shard(folder_at(out), plan, shard, make_shard(plan, shard))
    assert done_receipt(folder_at(out), shard, plan.digests) is not None


def test_stale_rejects_are_removed_where_there_are_none(out):
    made.write(out / rejects_name(0), b"{}\n")
    plan = open_plan(out)
    shard = make_shard(plan, 0)
    shard.documents.rejected = Rejected()
    commit_shard(
        folder_at(out),
        plan,
        0,
        dataclasses.replace(shard) if dataclasses.is_dataclass(shard) else shard,
    )
    assert not (out / rejects_name(0)).exists()


@pytest.fixture
def whole(built, tmp_path):
    shutil.copytree(built.out, tmp_path / "out")
    return tmp_path / "out"


def test_the_manifest_is_canonical_checked_and_names_digests_that_are_right(built):
    data = (built.out / MANIFEST_NAME).read_bytes()
    manifest = json.loads(data)
    assert (
        encode(manifest) == data
        and check_manifest(manifest, MANIFEST_NAME) == manifest == built.outcome.manifest
    )
    rest = {k: v for k, v in manifest.items() if k != "digest"}
    assert manifest["digest"] == digest_of(encode(rest))
    for key in ("plan", "tokenizer"):
        assert manifest[key]["digest"] == digest_of_file(built.out / manifest[key]["file"])
    for b, entry in enumerate(manifest["shards"]):
        assert entry["digest"] == digest_of_file(built.out / entry["file"])
        assert entry["receipt_digest"] == digest_of_file(built.out / receipt_name(b))
        assert entry["bytes"] == (built.out / entry["file"]).stat().st_size


def test_nothing_is_published_while_a_shard_is_missing(whole):
    plan = open_plan(whole)
    (whole / MANIFEST_NAME).unlink()
    (whole / receipt_name(2)).unlink()
    assert publish(folder_at(whole), plan) is None and not (whole / MANIFEST_NAME).exists()
    assert missing_shards(folder_at(whole), plan.digest, range(plan.shards)) == [2]


def test_whoever_publishes_writes_the_same_bytes_and_removes_temporaries(whole):
    before = (whole / MANIFEST_NAME).read_bytes()
    (whole / MANIFEST_NAME).unlink()
    made.write(whole / "shards" / "000" / ".000000.safetensors.h-1-aa.tmp", b"")
    publish(folder_at(whole), open_plan(whole))
    publish(folder_at(whole), open_plan(whole))
    assert (whole / MANIFEST_NAME).read_bytes() == before and not made.temporaries(whole)


def test_what_others_wrote_is_safe_before_it_is_published_and_what_is_removed_after(whole):
    """Whoever wrote the shards may have been killed before he flushed: so the one that publishes
    does."""
    calls = []

    class Seen(LocalFolder):
        def create(self, name, data):
            calls.append(name)
            return super().create(name, data)

        def remove(self, name):
            calls.append(f"no {name}")
            super().remove(name)

        def flush(self):
            calls.append("flush")
            super().flush()

    (whole / MANIFEST_NAME).unlink()
    made.write(whole / FIRST_SEEN_NAME, b"")
    publish(Seen(whole), open_plan(whole))
    assert calls == ["flush", MANIFEST_NAME, f"no {FIRST_SEEN_NAME}", "flush"]


def test_another_manifest_that_stands_there_stops_the_build(whole):
    (whole / MANIFEST_NAME).write_bytes(b"{}\n")
    with pytest.raises(
        BuildError, match="dataset.json exists and differs from this build's manifest\nhint: build"
    ):
        publish(folder_at(whole), open_plan(whole))


def test_a_ledger_that_does_not_balance_is_not_published(whole):
    (whole / MANIFEST_NAME).unlink()
    receipt = json.loads((whole / receipt_name(1)).read_bytes())
    receipt["ledger"]["row_padding"] += 1
    (whole / receipt_name(1)).write_bytes(encode(receipt))
    with pytest.raises(BuildError, match="the ledger does not balance"):
        publish(folder_at(whole), open_plan(whole))
    assert not (whole / MANIFEST_NAME).exists()


REJECTED = {  # lines, of which the first look sees none; changes of the recipe → what is said
    "empty": (['{"text": ""}'] * 3, {}, r"empty 3\)\. .*a.jsonl: document at 0: no text.*text_key"),
    "below_min_tokens": (
        ['{"text": "abc"}'] * 3,
        {"min_tokens": 4},
        "below_min_tokens 3.*lower documents.min_tokens",
    ),
    "too_long": (
        ['{"text": "abcdefgh"}'] * 3,
        {"long": "drop", "max_tokens": 5},
        'too_long 3.*documents.long = "split"',
    ),
    "not_a_string": (
        ['{"text": null}', '{"text": [3]}', "x"],
        {},
        "not_a_string 2, malformed_json 1.*value of 'text' is null",
    ),
    "malformed_json": (
        ["bla", "", "{}"],
        {"max_bad_fraction": 1.0},
        "malformed_json 1, missing_text 1.*begins 'bla'",
    ),
}


@pytest.mark.parametrize("reason", REJECTED)
def test_a_source_of_which_nothing_is_used_is_an_error_with_its_cause(tmp_path, reason):
    lines, documents, words = REJECTED[reason]
    made.write(tmp_path / "a.jsonl", "\n".join(lines).encode())
    made.write_lines(tmp_path / "b.jsonl", ["good"] * 200)
    sources = [{"name": "bad", "paths": ["a.jsonl"]}, {"paths": ["b.jsonl"]}]
    recipe = made.table(sources, tasks=[{"preset": "causal"}], documents=documents)
    with pytest.raises(
        BuildError,
        match=(
            rf"(?s)source 'bad': \d documents were read, but none can be used \({words}.*another folder"
        ),
    ):
        made.build(recipe, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out" / MANIFEST_NAME).exists()


def test_encodings_that_the_first_look_missed_are_told_by_the_sample(tmp_path):
    utf16 = '{"text": "é"}\n'.encode("utf-16")
    for i in range(9):
        made.write(tmp_path / f"{i}.jsonl", b'{"text": ""}\n' if i == 0 else utf16)
    with pytest.raises(
        BuildError,
        match=r"[1-8].jsonl: document at 0.*from UTF-16 .it starts with FF FE.*iconv -f UTF-16",
    ):
        made.build(made.table("*.jsonl"), tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    "bad, used, allowed", [(1, 10, True), (1, 9, False), (100, 1000, True), (101, 1010, False)]
)
def test_a_hundred_bad_documents_are_let_pass_among_ten_times_as_many(tmp_path, bad, used, allowed):
    made.write(tmp_path / "a.jsonl", b'{"text": "abc"}\n' * used + b"x\n" * bad)
    if allowed:
        assert made.build(made.table("a.jsonl"), tmp_path, tmp_path / "out").manifest is not None
        return
    few = r" \(up to 100 are accepted if 10 times as many are used\)" if bad == 1 else ""
    with pytest.raises(
        BuildError,
        match=(
            rf"{bad} of {bad + used} documents are bad.*= 0.001 allows{few}\. .*Nothing was built"
        ),
    ):
        made.build(made.table("a.jsonl"), tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    "bad, read, used, fraction, refused",
    [
        (100, 1100, 1000, 0.0, False),
        (100, 1099, 999, 0.0, True),
        (101, 1_000_101, 1_000_000, 0.0, True),
        (100, 100, 0, 0.0, True),
        (101, 202, 101, 0.5, False),  # as many as the fraction is not more
        (102, 203, 101, 0.5, True),
        (201, 2011, 1810, 0.05, True),  # a hundred are not let pass beside the fraction
        (0, 0, 0, 0.0, False),
    ],
)
def test_the_limit_of_bad_documents_is_exact(bad, read, used, fraction, refused):
    assert too_many_bad(bad, read, used, fraction) == refused


@pytest.mark.long
def test_the_limit_in_words_names_the_second_limit_where_it_can_help():
    for bad in (1, 99, 100, 101, 1000):
        can_help = not too_many_bad(bad, read=bad, used=10**9, fraction=0.0)
        assert ("times as many are used" in limit_in_words(bad, 0.0)) == can_help


def test_a_dataset_without_rows_is_not_published(tmp_path):
    made.write(tmp_path / "a.jsonl", b'{"text": "abc"}\n')
    sample = [{"paths": ["a.jsonl"], "sample": [0.5, 0.5000001]}]
    with pytest.raises(
        BuildError,
        match="would have no rows. 0 documents were read: sample, where and repeat select none",
    ):
        made.build(made.table(sample), tmp_path, tmp_path / "out")
    assert not (tmp_path / "out" / MANIFEST_NAME).exists()


def test_nothing_of_hosts_times_paths_or_processes_is_in_a_dataset(built):
    import os
    import socket

    for name, data in made.contents(built.out).items():
        if name != "plan.json":
            assert str(built.base).encode() not in data, name
        assert (
            socket.gethostname().encode() not in data and f"-{os.getpid()}-".encode() not in data
        ), name


@pytest.mark.long
def test_reasons_are_listed_by_their_counts_and_equal_ones_by_name():
    assert listed_reasons({"b": 1, "too_large": 5, "a": 1}) == "too_large 5, a 1, b 1"
