import json
import shutil
from collections import defaultdict

import numpy as np
import pytest

from packprep.building.plan import open_plan
from packprep.dataset.shard import open_shard
from packprep.errors import BuildError, DatasetError, RecipeError
from packprep.inspection.document import describe_document, first_document, print_document
from packprep.sources.formats import PIECE_BYTES
from tests import command_line, made
from tests.inspection import datasets_made
from tests.inspection.conftest import built


def asked(known, place):
    source, file, position = place
    described = describe_document(known.out, source, f"{file}:{position}", {}, True)
    (entry,) = described["files"]
    return described, entry


def rejects(known):
    """(place, use) → reason."""
    records = [
        json.loads(line)
        for path in (known.out / "rejects").rglob("*.jsonl")
        for line in path.open()
    ]
    return {((r["source"], r["file"], r["position"]), r["repeat"]): r["reason"] for r in records}


@pytest.mark.alike(4)
def test_every_document_is_found_and_its_tokens_tile_it(known):
    """Each place of a segment is given once, each use has its own, and what no segment holds is
    said."""
    held, turned_away, outcomes = defaultdict(list), rejects(known), defaultdict(int)
    for segment in datasets_made.segments(known):
        held[segment["place"], segment["use"]].append(segment)
    some = sorted(known.documents)[:: max(1, len(known.documents) // 40)]
    for place in some:
        described, entry = asked(known, place)
        text = known.documents[place]
        assert (
            entry["text"].encode()[:50] == text[: len(entry["text"].encode())][:50]
            and entry["not_read"] is None
        )
        assert (
            described["shards_searched"]
            <= described["shards"]
            == len(known.dataset.manifest["shards"])
        )
        for use in entry["uses"]:
            own = sorted(held[place, use["use"]], key=lambda segment: segment["tokens"])
            outcomes[use["outcome"]] += 1
            keys = ("tokens", "row", "segment", "slots")
            assert [[s[key] for key in keys] for s in use["segments"]] == [
                [s[key] for key in keys] for s in own
            ]
            for said, segment in zip(use["segments"], own, strict=True):
                begin, end = segment["slots"]
                assert said["task"] == segment["task"]["name"]
                assert (
                    said["trained"] == known.dataset.row(segment["row"]).loss_mask[begin:end].sum()
                )
            assert (use["outcome"] == "used") == bool(own)
            assert (use["outcome"] == "rejected") == ((place, use["use"]) in turned_away)
            if own:
                ranges = sorted(
                    [s["tokens"] for s in use["segments"]]
                    + [gap["tokens"] for gap in use["left_out"]]
                )
                assert ranges[0][0] == 0 and ranges[-1][1] == len(text) == entry["tokens"]
                assert all(a[1] == b[0] for a, b in zip(ranges, ranges[1:], strict=False))
            if use["outcome"] == "rejected":
                assert use["why"].startswith(f"{turned_away[place, use['use']]}: ")
    expected = {"used"}
    if any("sample" in source for source in known.recipe["sources"]):
        expected |= {"not sampled", "not repeated"}
    assert expected <= set(outcomes) <= {*expected, "rejected", "not repeated"}
    assert not outcomes["rejected"] or turned_away


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return datasets_made.known(tmp_path_factory.mktemp("files"), "files")


def test_a_position_alone_finds_it_in_every_file(files):
    described = describe_document(files.out, "web", "0", {}, True)
    with_one = [place[1] for place in sorted(files.documents) if place[2] == 0]
    kept = {
        segment["place"][1] for segment in datasets_made.segments(files) if segment["place"][2] == 0
    }
    assert kept and [entry["file"] for entry in described["files"]] == sorted(kept & set(with_one))
    assert all(entry["uses"][0]["outcome"] == "used" for entry in described["files"])


def test_no_document_at_a_position_gives_the_nearest(files):
    positions = sorted(at for _, file, at in files.documents if file == "a.jsonl")
    _, entry = asked(files, ("web", "a.jsonl", positions[7] + 1))
    assert {use["outcome"] for use in entry["uses"]} == {"absent"}
    assert (entry["before"], entry["after"]) == (positions[7], positions[8])


def test_without_the_sources_the_dataset_says_what_it_can(files, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(files.out.parent, copy)
    plan = (copy / "out" / "plan.json").read_text()
    shutil.rmtree(copy / "web")
    assert str(files.out.parent) in plan  # the sources of the plan are still there
    positions = sorted(
        {s["place"][2] for s in datasets_made.segments(files) if s["place"][1] == "a.jsonl"}
    )
    moved = {"web": str(copy / "web")}
    described = describe_document(copy / "out", "web", f"a.jsonl:{positions[3]}", moved)
    (entry,) = described["files"]
    assert entry["text"] is None and entry["tokens"] is None and "missing" in entry["not_read"]
    assert entry["uses"][0]["outcome"] == "used" and entry["uses"][0]["segments"]
    (entry,) = describe_document(copy / "out", "web", f"a.jsonl:{positions[3] + 1}", moved)["files"]
    assert entry["before"] == positions[3] and {use["outcome"] for use in entry["uses"]} <= {
        "absent",
        "not sampled",
        "not repeated",
    }


@pytest.mark.long
def test_without_the_sources_a_truncated_end_is_open(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 900}) + "\n")
    made.build(
        made.table("a.jsonl", documents={"long": "truncate"}, tasks=[{"preset": "causal"}]),
        tmp_path,
        tmp_path / "o",
    )
    (entry,) = describe_document(tmp_path / "o", None, "0", {}, True)["files"]
    (whole,) = entry["uses"][0]["left_out"]
    assert whole["tokens"] == [512, 900] and "truncate" in whole["why"]
    (tmp_path / "a.jsonl").unlink()
    (entry,) = describe_document(tmp_path / "o", None, "0", {}, True)["files"]
    assert [gap["tokens"] for gap in entry["uses"][0]["left_out"]] == [[512, None]]


@pytest.mark.long
def test_with_eos_after_each_segment_it_says_not_which_ends_the_document(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 900}) + "\n")
    made.build(made.table("a.jsonl", documents={"append_eos": "segment"}), tmp_path, tmp_path / "o")
    for is_there in (True, False):
        (entry,) = describe_document(tmp_path / "o", None, "0", {}, True)["files"]
        (use,) = entry["uses"]
        assert (entry["tokens"] is not None) == is_there and use["left_out"] == []
        assert [segment["ends_document"] for segment in use["segments"]] == [None] * len(
            use["segments"]
        )
        (tmp_path / "a.jsonl").unlink(missing_ok=True)


def test_only_the_shards_that_can_hold_it_are_searched(tmp_path):
    """A file of three pieces in many shards: a document is looked for where its piece went, and
    found."""
    texts = ["word " * 20_000 for _ in range(120)]
    made.write_lines(tmp_path / "a.jsonl", texts)
    assert (tmp_path / "a.jsonl").stat().st_size > 2 * PIECE_BYTES
    made.build(
        made.table(
            "a.jsonl",
            output={"shard_text_bytes": 1 << 20},
            seq_length=4096,
            tasks=[{"preset": "causal"}],
        ),
        tmp_path,
        tmp_path / "o",
    )
    line = len(json.dumps({"text": texts[0]})) + 1
    for i in (0, 41, 42, 119):
        described = describe_document(tmp_path / "o", None, f"a.jsonl:{i * line}", {}, True)
        assert described["files"][0]["uses"][0]["outcome"] == "used"
        assert 0 < described["shards_searched"] < described["shards"] / 2


@pytest.mark.long
def test_it_prints_what_json_has_gone_through(known, capsys):
    for place in sorted(known.documents)[:3]:
        described, entry = asked(known, place)
        assert json.loads(json.dumps(described)) == described
        print_document(json.loads(json.dumps(described)))
        out = capsys.readouterr().out
        assert (
            f"{place[0]} {place[1]} at {place[2]:,}" in out
            and "searched" in out
            and "\x1b" not in out
        )
        for use in entry["uses"]:
            assert f"pass {use['use']}: {use['outcome']}" in out


def test_what_is_asked_wrongly_is_refused(files):
    for source, place, message in (
        ("wep", "0", "no source of that name; it has web"),
        ("web", "a.json:0", "has no file 'a.json'.* Its files are a.jsonl"),
        ("web", "a.jsonl", "expected POSITION or FILE:POSITION"),
        ("web", "-1", "expected POSITION"),
        ("web", ":0", "expected POSITION"),
        ("web", "9" * 30, "expected POSITION"),
    ):
        with pytest.raises(RecipeError, match=message):
            describe_document(files.out, source, place, {}, True)


def test_a_damaged_shard_is_named(files, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(files.out, copy)
    place = next(s["place"] for s in datasets_made.segments(files) if s["place"][1] == "a.jsonl")
    for shard in sorted((copy / "shards").rglob("*.safetensors")):
        opened = open_shard(shard, 512, "uint16")
        data = bytearray(shard.read_bytes())
        begin, count = opened.begins["segment_tokens"], opened.segments
        data[begin : begin + 4 * count] = np.full(count, 70_000, "<i4").tobytes()
        shard.write_bytes(data)
    with pytest.raises(
        DatasetError, match=r"shards/000/.*segment_tokens is out of range.*\n.*packprep verify"
    ):
        describe_document(copy, "web", f"{place[1]}:{place[2]}", {}, True)


def test_as_it_is_typed(files):
    place = next(s["place"] for s in datasets_made.segments(files) if s["place"][1] == "c.jsonl.gz")
    said = command_line.packprep(
        "inspect", files.out, "--source", "web", "--doc", f"{place[1]}:{place[2]}"
    )
    assert said.status == 0 and "pass 0: used in" in said.out and "of " in said.out
    both = ["--source", f"web={files.out.parent / 'web'}", "--source", "web"]
    again = command_line.inside(
        "inspect", files.out, *both, "--doc", f"{place[1]}:{place[2]}", "--json"
    ).json
    assert again["files"][0]["uses"][0]["segments"] and again["source"] == "web"


def lines_of(folder, **table):
    built(folder, "out", tasks=[{"preset": "causal"}], **table)
    return first_document(open_plan(folder / "out"))


@pytest.fixture
def one(tmp_path):
    """A folder to which documents are written by calling the value."""
    (tmp_path / "corpus").mkdir()

    def write(*documents):
        text = "".join(json.dumps(document, ensure_ascii=False) + "\n" for document in documents)
        (tmp_path / "corpus" / "abc.jsonl").write_text(text, encoding="utf-8")
        return tmp_path

    return write


def test_document_1_is_shown_by_its_first_and_last_tokens(one):
    assert (
        lines_of(one({"text": "abcdefghijklmnopqrstuvwxyz"}))
        == "document 1: source0 abc.jsonl at 0: 26 tokens: a│b│c│d│e│f│g│h … t│u│v│w│x│y│z│‹eos›"
    )


@pytest.mark.long
def test_a_short_document_1_is_shown_whole_token_by_token(one):
    folder = one({"text": "é\n日"})
    assert (
        lines_of(folder, documents={"prepend_bos": True})
        == "document 1: source0 abc.jsonl at 0: 6 tokens:"
        " ‹bos›│\\xc3│\\xa9│↵│\\xe6│\\x97│\\xa5│‹eos›"
    )


def test_a_doubled_bos_shows(one):
    folder = one({"text": "<bos>one"})
    line = lines_of(folder, documents={"prepend_bos": True, "special_text": "special"})
    assert line.endswith("4 tokens: ‹bos›│‹bos›│o│n│e│‹eos›")


def test_of_a_supervised_document_1_it_is_said_how_much_is_trained(one):
    folder = one({"text": "Q: 2+2? A: 4", "loss_spans": [[8, 12]]})
    assert (
        lines_of(folder)
        == "document 1: source0 abc.jsonl at 0: 12 tokens, 4 trained: Q│:│ │2│+│2│?│ │A│:│"
        " │4│‹eos›"
    )


def test_messages_are_a_document_1(one):
    folder = one(
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
    )
    template = (
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}.{% endfor %}{% if"
        " add_generation_prompt %}a{% endif %}"
    )
    (folder / "chat.jinja").write_text(template)
    assert lines_of(folder, documents={"chat_template": "chat.jinja"}).startswith(
        "document 1: source0 abc.jsonl at 0: 9 tokens, 4 trained: u│h│i│.│a│y│e│s│.│"
    )


@pytest.mark.long
def test_document_1_is_the_first_with_tokens(one):
    folder = one({"words": "no"}, {"text": ""}, {"text": "yes"})
    line = lines_of(folder, documents={"max_bad_fraction": 1})
    assert line.startswith("document 1: source0 abc.jsonl at 29: 3 tokens: y│e│s")


@pytest.mark.long
def test_without_a_document_the_first_reject_shows(one):
    folder = one({"words": "no text"}, {"text": 5})
    with pytest.raises(BuildError, match="none can be used"):
        lines_of(folder, documents={"max_bad_fraction": 1})
    line = first_document(open_plan(folder / "out"))
    assert (
        "shard 0 has no usable document; the first is source0 abc.jsonl at 0:"
        " missing_text: " in line
    )


def test_no_document_at_all_is_said(one):
    folder = one({"text": ""})
    with pytest.raises(BuildError, match="none can be used"):
        lines_of(folder)
    assert (
        first_document(open_plan(folder / "out"))
        == "document 1: shard 0 has no document with tokens"
    )
