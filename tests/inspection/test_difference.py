import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from packprep import open_dataset
from packprep.dataset.shard import NAMES, encode, layout, open_shard
from packprep.errors import ArgumentError, DatasetError
from packprep.format.json_files import encode as encode_json
from packprep.inspection.difference import _row_of, describe_difference, print_difference
from tests import command_line
from tests.inspection.conftest import built, write_corpus


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Datasets of the same corpus: one twice from two places, one with another seed, length and
    task."""
    folder = tmp_path_factory.mktemp("two")
    write_corpus(folder)
    (folder / "moved").mkdir()
    shutil.copytree(folder / "corpus", folder / "moved" / "corpus")
    small = {"shard_text_bytes": "2KiB"}
    built(folder, "one", output=small)
    built(folder / "moved", "again", output=small)
    built(folder, "seed", output=small, seed=1)
    built(folder, "long", output=small, seq_length=512)
    built(
        folder,
        "causal",
        output=small,
        tasks=[{"preset": "causal"}],
        sources=[{"name": "a", "paths": ["corpus/a.jsonl"]}],
    )
    return folder


def test_what_was_built_elsewhere_is_equal(two, capsys):
    d = describe_difference(two / "one", two / "moved" / "again")
    assert d["equal"] is True and d["recipe"] == [] and d["rows"] == []
    assert {difference["key"] for difference in d["plan"]} == {"sources[source0].prefix"}
    shards = len(open_dataset(two / "one").manifest["shards"])
    assert d["shards"] == {"equal": shards, "differing": 0, "only_here": 0, "only_there": 0}
    print_difference(json.loads(json.dumps(d)))
    assert (
        "equal: a trainer reads the same data; the datasets were made differently"
        in capsys.readouterr().out
    )


def first_row_that_differs(one, two, shard):
    """By rows alone: of the arrays of a row, or of its segments' headers."""
    a, b = (sum(e["rows"] for e in ds.manifest["shards"][:shard]) for ds in (one, two))
    for r in range(min(ds.manifest["shards"][shard]["rows"] for ds in (one, two))):
        here, there = one.row(a + r), two.row(b + r)
        columns = here.segments.keys() | there.segments.keys()
        if not np.array_equal(here.tokens, there.tokens) or any(
            not np.array_equal(here.segments[name], there.segments[name]) for name in columns
        ):
            return r
    return None


def test_the_first_row_that_differs_is_it(two, capsys):
    d = describe_difference(two / "one", two / "seed")
    assert not d["equal"] and d["recipe"] == [{"key": "seed", "here": 0, "there": 1}]
    assert "fingerprint" in {difference["key"] for difference in d["manifest"]}
    one, other = open_dataset(two / "one"), open_dataset(two / "seed")
    assert d["rows"] and len(d["rows"]) == min(3, d["shards"]["differing"])
    for each in d["rows"]:
        shard = int(each["shard"][-18:-12])
        assert each["row"] == first_row_that_differs(one, other, shard)
        if each["array"] == "tokens":
            before, after = each["here_text"].split("│", 1)
            assert before is not None and after is not None
    assert json.loads(json.dumps(d)) == d
    print_difference(d)
    out = capsys.readouterr().out
    assert "they differ" in out and "first difference in row " in out and "\x1b" not in out


@pytest.mark.parametrize(
    "array", ["tokens", "segment_noise", "segment_doc", "cu_seqlens", "segment_task"]
)
def test_one_changed_value_is_found_where_it_is(two, tmp_path, array):
    copy = tmp_path / "copy"
    shutil.copytree(two / "one", copy)
    path = copy / "shards" / "000" / "000001.safetensors"
    shard = open_shard(path, 256, "uint16")
    arrays = {name: values.copy() for name, values in shard.arrays.items()}
    row = shard.rows - 1
    segment = int(arrays["row_offsets"][row])
    at = {"tokens": (row, 200), "cu_seqlens": segment + row + 1}.get(array, segment)
    before = arrays[array][at].item()
    arrays[array][at] = before + 1 if array != "segment_task" else 1 - min(before, 1)
    path.write_bytes(b"".join(bytes(part) for part in encode(arrays)))
    manifest = json.loads((copy / "dataset.json").read_text())
    manifest["shards"][1]["digest"] = "0" * 32
    (copy / "dataset.json").write_bytes(encode_json(manifest))
    (each,) = describe_difference(two / "one", copy)["rows"]
    assert (each["array"], each["row"], each["shard"]) == (
        array,
        row,
        "shards/000/000001.safetensors",
    )
    assert each["here"] == pytest.approx(before) and each["there"] != each["here"]
    assert (each["slot"], each["segment"]) == ((200, None) if array == "tokens" else (None, 1))


def test_each_array_tells_the_row_and_the_segment_of_a_value():
    """The segments of two rows have different numbers of blocks, ranges, media spans and records.
    `parts` has the row, the segment and these numbers."""
    parts = [(0, 0, (2, 0, 1, 3)), (0, 1, (0, 2, 3, 0)), (1, 0, (1, 1, 0, 2)), (1, 1, (3, 2, 2, 1))]
    refs = [2, 0, 3, 1, 4, 2]  # the bytes of each media span's reference
    owners = {
        kind: [i for i, (_, _, counts) in enumerate(parts) for _ in range(counts[k])]
        for k, kind in enumerate(("block", "trained", "media", "record"))
    }
    spans = [i for i, count in enumerate(refs) for _ in range(count)]
    arrays = {
        name: np.zeros(shape, dtype)
        for name, (dtype, shape) in layout(
            2, 4, 8, "u2", labels=True, padded=True, filled=True, weighted=True,
            blocks=len(owners["block"]), trained=len(owners["trained"]),
            media=(len(refs), len(spans)), records=len(owners["record"]),
        ).items()
    }  # fmt: skip
    assert arrays.keys() == NAMES
    arrays["row_offsets"][:] = [0, 2, 4]
    arrays["media_ref_offsets"][:] = np.append(0, np.cumsum(refs))
    for kind, owner in owners.items():
        arrays[f"{kind}_offsets"][:] = np.append(0, np.cumsum(np.bincount(owner, minlength=4)))
    shard = SimpleNamespace(arrays=arrays, rows=2, seq_length=8)

    def expected(name, at):
        kind = name.split("_")[0]
        if arrays[name].shape == (2, 8):
            return at, 3
        if name == "row_offsets":
            return max(at - 1, 0), 0
        if kind == "cu":
            return [(0, 0), (0, 0), (0, 1), (1, 0), (1, 0), (1, 1)][at]
        if name in ("media_ref", "media_ref_offsets"):
            span = spans[at] if name == "media_ref" else max(at - 1, 0)
            return parts[owners["media"][span]][:2]
        if name.endswith("_offsets"):
            return parts[max(at - 1, 0)][:2]
        return parts[at if kind == "segment" else owners[kind][at]][:2]

    for name, values in arrays.items():
        for at in range(len(values)):
            assert _row_of(shard, name, at, 3) == (*expected(name, at), at), (name, at)


def test_mixes_and_files_are_compared_by_name(two, capsys):
    d = describe_difference(two / "one", two / "causal")
    assert {each["name"] for each in d["sources"]} == {"source0", "a"}
    assert next(each for each in d["sources"] if each["name"] == "a")["here"] is None
    assert [files["source"] for files in d["files"]] == ["source0", "a"]
    assert d["files"][0]["only_here"] == {"count": 2, "names": ["a.jsonl", "b.jsonl"]}
    assert d["files"][1]["only_there"] == {"count": 1, "names": ["a.jsonl"]}
    totals = {each["name"]: (each["here"], each["there"]) for each in d["totals"]}
    one, other = (open_dataset(two / name) for name in ("one", "causal"))
    assert totals["rows"] == (len(one), len(other))
    assert totals["segments"] == tuple(
        sum(ds.row(r).n_segments for r in range(len(ds))) for ds in (one, other)
    )
    print_difference(d)
    assert "files of source0 only here: 2 (a.jsonl, b.jsonl)" in capsys.readouterr().out


def test_rows_of_other_lengths_are_not_compared(two, capsys):
    d = describe_difference(two / "one", two / "long")
    assert d["rows"] == [] and "rows of 256 and of 512 slots" in d["rows_not_compared"]
    print_difference(d)
    assert "rows of 256 and of 512 slots" in capsys.readouterr().out


def test_what_is_no_other_dataset_is_refused(two, tmp_path):
    (tmp_path / "link").symlink_to(two / "one")
    for other in (two / "one", two / "causal" / ".." / "one", tmp_path / "link"):
        with pytest.raises(ArgumentError, match="this is the same dataset"):
            describe_difference(two / "one", other)
    with pytest.raises(DatasetError, match="is not a dataset"):
        describe_difference(two / "one", tmp_path)


def test_as_it_is_typed(two):
    said = command_line.packprep("inspect", two / "one", "--diff", two / "seed")
    assert said.status == 0 and "they differ" in said.out
    assert (
        command_line.inside("inspect", two / "one", "--diff", two / "seed", "--json").json["equal"]
        is False
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--row", 0, "--grep", "x"], "--row and --grep: inspect shows one view at a time"),
        (["--doc", "0", "--diff", "x"], "--doc and --diff: "),
        (["--limit", 3], "hint: give --grep too, or omit --limit"),
        (["--row", 0, "--limit", 3], "hint: omit --limit or --row"),
        (["--grep", "x", "--segment", 1], "hint: omit --segment or --grep"),
        (["--epoch", 1], "--epoch needs --row\n"),
        (["--segment", 1], "give --row R too, because segments are numbered 1, 2, … in each row"),
        (["--source", "web"], "--source NAME needs --doc"),
        (["--source", "web=/x"], "--source NAME=PREFIX needs --row or --doc"),
        (["--diff", "x", "--source", "web=/x"], "omit --source NAME=PREFIX or --diff"),
        (
            ["--doc", "0", "--source", "web", "--source", "code"],
            "--source code: a document has one source, and web is already given",
        ),
        (["--doc", "0", "--source", ""], "--source: expected NAME, or NAME=PREFIX"),
    ],
)
def test_options_that_do_not_go_together_are_refused(two, options, message):
    assert message in command_line.refused("inspect", two / "one", *options)
