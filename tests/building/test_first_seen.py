"""Source files that change between two commands of one build, or under it."""

import gzip
import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

import packprep
from packprep.building.plan import open_plan
from packprep.building.planning import look_up
from packprep.building.run import DoneShard, changed_files, done_shards_of, note_of, refuse
from packprep.building.work import make_shard
from packprep.errors import SourceError
from packprep.format.json_files import FIRST_SEEN_NAME, MANIFEST_NAME
from packprep.recipe import Source, read_recipe
from packprep.sources.files import find_files
from packprep.storage import folder_at
from tests import made
from tests.tokens_made import write_megatron

RECIPE = made.table(
    [
        {"name": "lines", "paths": ["*.jsonl*"], "repeat": 1.5},
        {"name": "rows", "paths": ["*.parquet"]},
        {"name": "ids", "paths": ["*.bin"]},
    ],
    tasks=[{"preset": "causal"}],
    output={"shard_text_bytes": 20_000},
)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A corpus, three quarters of its build in `out`, all of it in `whole`."""
    base = tmp_path_factory.mktemp("begun")
    made.write_lines(base / "a.jsonl", made.texts(200))
    lines = made.write_lines(base / "b.jsonl", made.texts(100, 1))
    made.write(base / "b.jsonl.gz", gzip.compress(lines.read_bytes(), 0, mtime=0))
    lines.unlink()
    made.write_parquet(base / "c.parquet", made.texts(100, 2))
    write_megatron(base / "d.bin", [list(range(40, 90))] * 100)
    for i in range(3):
        made.build(RECIPE, base, base / "out", array=(i, 4))
    made.build(RECIPE, base, base / "whole")
    assert (base / "out" / FIRST_SEEN_NAME).exists() and not (
        base / "whole" / FIRST_SEEN_NAME
    ).exists()
    return base


@pytest.fixture
def own(begun, tmp_path):
    """The same, to be changed; with the times of its files."""
    return shutil.copytree(begun, tmp_path / "own")


def go_on(base, **options):
    progress = made.Silent()
    outcome = made.build(RECIPE, base, base / "out", progress=progress, **options)
    return outcome, [message for message in progress.said if "Comparing" in message]


def touch(path, seconds=10):
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + seconds * 10**9))


def rewrite(path, old: bytes, new: bytes, count=-1):
    """Other bytes at the same size, and another time."""
    data = path.read_bytes()
    assert old in data and len(old) == len(new)
    time = path.stat().st_mtime_ns
    path.write_bytes(data.replace(old, new, count))
    os.utime(path, ns=(time, time + 10**9))


def recompress(path, old: bytes, new: bytes):
    """The same of a gzip file: other bytes are stored in as many, uncompressed ones in both."""
    data = gzip.decompress(path.read_bytes())
    time = path.stat().st_mtime_ns
    path.write_bytes(gzip.compress(data.replace(old, new), 0, mtime=0))
    os.utime(path, ns=(time, time + 10**9))


@pytest.mark.long
def test_files_that_stand_as_they_did_are_not_read_again(own, begun):
    outcome, said = go_on(own)
    assert outcome.manifest is not None and said == []
    assert made.contents(own / "out") == made.contents(begun / "whole")


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("names", [["a.jsonl"], ["b.jsonl.gz", "c.parquet", "d.idx"]])
def test_another_time_alone_is_no_refusal(own, begun, names, workers):
    for name in names:
        touch(own / name)
    _, (said,) = go_on(own, workers=workers, array=(0, 4))
    assert (
        f"{len(names)} source file" in said
        and "since the build started" in said
        and "finished shards" in said
    )
    _, said = go_on(own)  # the new times are noted
    assert said == [] and made.contents(own / "out") == made.contents(begun / "whole")


@pytest.mark.parametrize(
    "name, change",
    [
        ("a.jsonl", lambda path: rewrite(path, b"the", b"thE")),
        ("b.jsonl.gz", lambda path: recompress(path, b"the", b"thE")),
        ("c.parquet", lambda path: rewrite(path, b"corpus", b"corpse")),
        ("d.bin", lambda path: rewrite(path, b"\x32\x00", b"\x33\x00")),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_other_text_at_the_same_size_is_an_error_that_names_the_file(own, name, change, workers):
    size = (own / name).stat().st_size
    change(own / name)
    assert (own / name).stat().st_size == size
    before = made.contents(own / "out")
    for _ in range(2):
        with pytest.raises(SourceError, match=f"{own / name}: "):
            go_on(own, workers=workers)
    assert made.contents(own / "out") == before


def test_an_error_names_three_changed_files_and_counts_the_others():
    parts = [SimpleNamespace(file=7 + i, path=f"p{i}") for i in (0, 1, 1, 2, 3, 4)]
    source = SimpleNamespace(first_file=7, slices=lambda number, shards: parts)
    plan = SimpleNamespace(sources=[None, source], shards=9)
    for changed, words in (
        ([1, 2, 4], "p1 or p2 or p4"),
        ([0, 1, 2, 4], "p0 or p1 or p2 or 1 more"),
    ):
        with pytest.raises(SourceError, match=f"^{words}: its bytes changed since shard 4 read it"):
            refuse(plan, DoneShard(4, {}), 1, np.array(changed))


def test_what_no_done_shard_read_is_not_compared(own):
    inputs = look_up(read_recipe(RECIPE, own), {})
    plan, out = open_plan(own / "out", inputs.prefixes), folder_at(own / "out")
    nothing, first = np.zeros(0, np.int64), np.zeros(1, np.int64)
    assert [item.number for item in done_shards_of(out, plan, [nothing] * 3)] == []
    every = done_shards_of(out, plan, [first, first, first])
    assert 2 <= len(every) < plan.shards
    for item in every:
        receipt = json.loads((own / f"out/receipts/000/{item.number:06d}.json").read_bytes())
        assert item.digests == {
            s: receipt["text_digests"][plan.sources[s].name] for s in item.digests
        }
    assert [len(files) for files in changed_files(out, inputs.files)] == [0, 0, 0]
    (own / "out" / FIRST_SEEN_NAME).unlink()
    assert [len(files) for files in changed_files(out, inputs.files)] == [2, 1, 1]


@pytest.mark.parametrize(
    "data", [b"", b"[]\n", b'{"modified":[1,[],["x"]]}\n', b'{"modified":[[1e400]]}\n']
)
def test_a_damaged_note_is_as_none(own, begun, data):
    (own / "out" / FIRST_SEEN_NAME).write_bytes(data)
    _, (said,) = go_on(own)
    assert said.startswith("4 source files") and made.contents(own / "out") == made.contents(
        begun / "whole"
    )


def test_a_file_that_changes_under_the_build_stops_it(own):
    inputs = look_up(read_recipe(RECIPE, own), {})
    plan = open_plan(own / "out", inputs.prefixes)
    plan.seen = [files.seen for files in inputs.files]
    b = int(plan.sources[2].shards_of(np.arange(len(plan.sources[2].pieces)), plan.shards)[0])
    make_shard(plan, b)
    touch(own / "d.idx")
    with pytest.raises(
        SourceError,
        match=f"{own / 'd.bin'}: this file was written to while the build reads it\n.*same command",
    ):
        make_shard(plan, b)
    plan.seen = None
    make_shard(plan, b)


def test_a_file_that_changes_while_a_piece_of_it_is_read_stops_the_build(own):
    inputs = look_up(read_recipe(RECIPE, own), {})
    plan = open_plan(own / "out", inputs.prefixes)
    plan.seen = [files.seen for files in inputs.files]
    b = int(plan.sources[0].shards_of(np.arange(len(plan.sources[0].pieces)), plan.shards)[0])
    with pytest.raises(SourceError, match="this file was written to while the build reads it"):
        make_shard(
            plan,
            b,
            progress=lambda *counts: [touch(own / name) for name in ("a.jsonl", "b.jsonl.gz")],
        )


@pytest.mark.parametrize("year", [1901, 1969, 1970, 2262, 2263, 2400])
def test_a_file_may_be_dated_in_any_year(tmp_path, year):
    made.write_lines(tmp_path / "a.jsonl", made.texts(20))
    write_megatron(tmp_path / "d.bin", [list(range(40, 90))] * 10)
    seconds = int(
        (np.datetime64(f"{year}-06-01") - np.datetime64("1970-01-01")) / np.timedelta64(1, "s")
    )
    for path in tmp_path.iterdir():
        os.utime(path, ns=(seconds * 10**9, seconds * 10**9))
    table = {**RECIPE, "sources": [{"paths": ["a.jsonl"]}, {"name": "ids", "paths": ["*.bin"]}]}
    for i in range(2):
        made.build(table, tmp_path, tmp_path / "out", array=(i, 2))
    of_sources = packprep.open_dataset(tmp_path / "out").manifest["ledger"]["sources"].values()
    assert sum(one["documents"]["used"] for one in of_sources) == 30


def test_files_at_urls_have_no_times(own):
    _, files = find_files(Source(name="s", paths=(f"file://{own}/*.jsonl",)), 0, own, None)
    assert note_of([files]) == b'{"modified":[null]}\n'


def test_the_note_is_no_part_of_a_dataset(own):
    from packprep.verification import verify_dataset

    go_on(own)
    made.write(own / "out" / FIRST_SEEN_NAME, b"{}")  # as where publication was killed
    assert verify_dataset(own / "out", None, {}, (0, 1), 0, made.Silent())["listed"] == []
    go_on(own)
    assert not (own / "out" / FIRST_SEEN_NAME).exists() and (own / "out" / MANIFEST_NAME).exists()
    assert folder_at(own / "out").others() == []
