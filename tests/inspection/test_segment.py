import json
import re
import shutil

import pytest

from packprep.dataset.shard import open_shard
from packprep.errors import ArgumentError
from packprep.inspection.printed_segment import print_segment
from packprep.inspection.row import describe_row
from packprep.inspection.segment import describe_segment
from tests import command_line
from tests.inspection import datasets_made


def some_segments(known, most=40):
    """Segments of every task."""
    every = datasets_made.segments(known)
    first = {segment["task"]["name"]: segment for segment in reversed(every)}
    return [*first.values(), *every[:: max(1, len(every) // most)]]


def test_the_original_is_the_documents_text_and_its_slots_hold_it(known):
    seen = set()
    for segment in some_segments(known):
        described = describe_segment(known.out, segment["row"], segment["segment"], {}, True)
        own = described["segment"]
        ids = [id for piece in own["original"] for id in piece["ids"]]
        slots = [slot for piece in own["original"] for slot in piece["slots"]]
        assert bytes(ids) == segment["text"] and own["fits"] is True and own["not_restored"] is None
        row = known.dataset.row(segment["row"])
        stored = row.labels if own["predicts"] == "in place" else row.tokens
        assert stored[slots].tolist() == ids and len(set(slots)) == len(slots)
        assert segment["slots"][0] <= min(slots) and max(slots) < segment["slots"][1]
        assert own["rebuilt"] == "identical" and described["segments"] == row.n_segments
        seen.add(own["objective"])
    assert seen == {task["objective"] for s in datasets_made.segments(known) for task in [s["task"]]}


def test_a_segment_of_its_row_is_the_same_but_for_the_original(known):
    row = describe_row(known.out, 0, {}, True)
    for number, segment in enumerate(row["segments"], 1):
        own = describe_segment(known.out, 0, number, {}, True)["segment"]
        assert {key: own[key] for key in segment} == segment


def test_each_sentinel_stands_for_its_span(known):
    spans = 0
    for segment in [s for s in datasets_made.segments(known) if s["task"]["objective"] == "span_corruption"][:40]:
        own = describe_segment(known.out, segment["row"], segment["segment"], {}, True)["segment"]
        tokens = known.dataset.row(segment["row"]).tokens
        begin, end = segment["slots"]
        targets = begin + own["prefix"]
        sentinels = [slot for slot in range(targets, end) if tokens[slot] >= 266]
        assert sorted(span["target_slot"] for span in own["spans"]) == sentinels
        for span in own["spans"]:
            assert tokens[span["input_slot"]] == tokens[span["target_slot"]] >= 266
            assert span["sentinel"] == f"<extra_id_{tokens[span['target_slot']] - 266}>"
            assert begin <= span["input_slot"] < targets
            a, b = (at - segment["tokens"][0] for at in span["tokens"])
            held = tokens[span["target_slot"] + 1 : span["target_slot"] + 1 + b - a]
            assert bytes(held.tolist()) == segment["text"][a:b]
            spans += 1
    assert spans or known.recipe["packing" if "packing" in known.recipe else "tasks"] == {"algorithm": "concat"}


def test_it_is_printed_whole(known, capsys):
    """Nothing is left out, however long it is."""
    longest = max(datasets_made.segments(known), key=lambda s: s["slots"][1] - s["slots"][0])
    described = describe_segment(known.out, longest["row"], longest["segment"], {}, True)
    assert json.loads(json.dumps(described)) == described
    print_segment(json.loads(json.dumps(described)))
    out = capsys.readouterr().out
    assert not re.search(r"… [\d,]+ tokens …", out) and "rebuilt from source: identical" in out and "\x1b" not in out
    assert f"segment {longest['segment']} of {described['segments']}" in out


def test_what_the_original_is_shows_only_where_the_slots_do_not(known, capsys):
    for segment in some_segments(known, 10):
        described = describe_segment(known.out, segment["row"], segment["segment"], {}, True)
        print_segment(described)
        shown = "  original" in capsys.readouterr().out
        if segment["task"]["objective"] == "span_corruption":
            assert shown
        if segment["task"]["objective"] in ("causal", "masked_diffusion", "block_diffusion", "uniform_diffusion"):
            assert not shown


@pytest.mark.parametrize("number", [0, -1, 10_000])
def test_a_segment_that_there_is_not_is_refused(folder, number):
    with pytest.raises(ArgumentError, match=rf"segment {number}: row 0 of .* has \d+ segments; give 1 … \d+"):
        describe_segment(folder / "ul2r", 0, number, {}, True)


def test_without_a_plan_it_is_shown_and_not_restored(folder, tmp_path, capsys):
    shutil.copytree(folder / "ul2r", tmp_path / "copy")
    (tmp_path / "copy" / "plan.json").unlink()
    described = describe_segment(tmp_path / "copy", 0, 1, {}, True)
    assert described["segment"]["original"] is None and "no plan.json" in described["segment"]["not_restored"]
    print_segment(described)
    assert "original: not restored: " in capsys.readouterr().out


def test_a_sentinel_that_is_not_there_is_said(folder, tmp_path, capsys):
    shutil.copytree(folder / "ul2r", tmp_path / "copy")
    copy = tmp_path / "copy"
    row, number, slot = next(
        (r, segment["number"], described["segment"]["spans"][0]["target_slot"])
        for r in range(8)
        for segment in describe_row(copy, r, {}, True)["segments"]
        if segment["objective"] == "span_corruption"
        for described in [describe_segment(copy, r, segment["number"], {}, True)]
    )
    shards = json.loads((copy / "dataset.json").read_text())["shards"]
    shard = 0
    while row >= shards[shard]["rows"]:
        row, shard = row - shards[shard]["rows"], shard + 1
    whole = row + sum(entry["rows"] for entry in shards[:shard])
    path = copy / shards[shard]["file"]
    data = bytearray(path.read_bytes())
    at = open_shard(path, 256, "uint16").begins["tokens"] + 2 * (row * 256 + slot)
    data[at : at + 2] = b"a\0"
    path.write_bytes(data)
    described = describe_segment(copy, whole, number, {}, True)
    assert described["segment"]["fits"] is False and described["segment"]["rebuilt"].startswith("differs")
    print_segment(described)
    assert "its sentinels are not where its header says" in capsys.readouterr().out


def test_as_it_is_typed(folder):
    said = command_line.packprep("inspect", folder / "ul2r", "--row", 0, "--segment", 1)
    assert said.status == 0 and said.out.startswith("row 0 of ")
    assert (
        command_line.inside("inspect", folder / "ul2r", "--row", -1, "--segment", 1, "--json").json["segment"]["number"]
        == 1
    )
    assert "give --row R too" in command_line.refused("inspect", folder / "ul2r", "--segment", 1)
