import json
import shutil

import pytest

from packprep.building.output import LocalOutput, output_of
from packprep.building.publication import missing_shards, publish, too_many_bad
from packprep.building.run import open_job
from packprep.dataset.json_files import FIRST_SEEN_NAME, MANIFEST_NAME, encode, receipt_name
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


def test_what_others_wrote_is_safe_before_it_is_published_and_what_is_removed_after(out):
    """Whoever wrote the shards may have been killed before he flushed: so the one that publishes does."""
    calls = []

    class Seen(LocalOutput):
        def write_first(self, name, data):
            calls.append(name)
            return super().write_first(name, data)

        def remove(self, name):
            calls.append(f"no {name}")
            super().remove(name)

        def flush(self):
            calls.append("flush")
            super().flush()

    (out / MANIFEST_NAME).unlink()
    made.write(out / FIRST_SEEN_NAME, b"")
    publish(Seen(out), open_job(out))
    assert calls == ["flush", MANIFEST_NAME, f"no {FIRST_SEEN_NAME}", "flush"]


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


REJECTED = {  # lines, of which the first look sees none; changes of the recipe → what is said
    "empty": (['{"text": ""}'] * 3, {}, r"empty 3\); .*a.jsonl: document at 0: no text.*text_key"),
    "below_min_tokens": (['{"text": "abc"}'] * 3, {"min_tokens": 4}, "below_min_tokens 3.*Lower documents.min_tokens"),
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
    "malformed_json": (["bla", "", "{}"], {"max_bad_fraction": 1.0}, "malformed_json 1, missing_text 1.*begins 'bla'"),
}


@pytest.mark.parametrize("reason", REJECTED)
def test_a_source_of_which_nothing_is_used_is_an_error_with_its_cause(tmp_path, reason):
    lines, documents, words = REJECTED[reason]
    made.write(tmp_path / "a.jsonl", "\n".join(lines).encode())
    made.write_lines(tmp_path / "b.jsonl", ["good"] * 200)
    sources = [{"name": "bad", "paths": ["a.jsonl"]}, {"paths": ["b.jsonl"]}]
    recipe = made.table(sources, tasks=[{"preset": "causal"}], documents=documents)
    with pytest.raises(
        BuildError, match=rf"source 'bad': \d documents were read and none can be used \({words}.*another folder"
    ):
        made.build(recipe, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out" / MANIFEST_NAME).exists()


def test_encodings_that_the_first_look_missed_are_told_at_publication(tmp_path):
    utf16 = '{"text": "é"}\n'.encode("utf-16")
    for i in range(9):
        made.write(tmp_path / f"{i}.jsonl", b'{"text": ""}\n' if i == 0 else utf16)
    with pytest.raises(BuildError, match=r"[1-8].jsonl: document at 0.*It begins with FF FE: UTF-16.*iconv -f UTF-16"):
        made.build(made.table("*.jsonl"), tmp_path, tmp_path / "out")


@pytest.mark.parametrize("bad, used, allowed", [(1, 10, True), (1, 9, False), (100, 1000, True), (101, 1010, False)])
def test_a_hundred_bad_documents_are_let_pass_among_ten_times_as_many(tmp_path, bad, used, allowed):
    made.write(tmp_path / "a.jsonl", b'{"text": "abc"}\n' * used + b"x\n" * bad)
    if allowed:
        assert made.build(made.table("a.jsonl"), tmp_path, tmp_path / "out").manifest is not None
        return
    few = ", and 100 are let pass only where 10 times as many are used" if bad == 1 else ""
    with pytest.raises(
        BuildError, match=rf"{bad} of {bad + used} documents are bad.*= 0.001 of them{few}; .*another folder"
    ):
        made.build(made.table("a.jsonl"), tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    "bad, read, used, fraction, law, refused",
    [
        (100, 1100, 1000, 0.0, 2, False),
        (100, 1099, 999, 0.0, 2, True),
        (101, 1_000_101, 1_000_000, 0.0, 2, True),
        (100, 100, 0, 0.0, 1, False),
        (101, 101, 0, 0.0, 1, True),
        (101, 202, 101, 0.5, 2, False),  # as many as the fraction is not more
        (102, 203, 101, 0.5, 2, True),
        (201, 2011, 1810, 0.05, 2, True),  # a hundred are not let pass beside the fraction
        (0, 0, 0, 0.0, 2, False),
    ],
)
def test_the_limit_of_bad_documents_is_exact(bad, read, used, fraction, law, refused):
    assert too_many_bad(bad, read, used, fraction, law) == refused


def test_a_dataset_without_rows_is_not_published(tmp_path):
    made.write(tmp_path / "a.jsonl", b'{"text": "abc"}\n')
    sample = [{"paths": ["a.jsonl"], "sample": [0.5, 0.5000001]}]
    with pytest.raises(BuildError, match="would have no rows: 0 documents were read; sample and repeat keep none"):
        made.build(made.table(sample), tmp_path, tmp_path / "out")
    assert not (tmp_path / "out" / MANIFEST_NAME).exists()


def test_nothing_of_hosts_times_paths_or_processes_is_in_a_dataset(built):
    import os
    import socket

    for name, data in made.contents(built.out).items():
        if name != "plan.json":
            assert str(built.base).encode() not in data, name
        assert socket.gethostname().encode() not in data and f"-{os.getpid()}-".encode() not in data, name
