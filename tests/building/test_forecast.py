import re

import pytest

from packprep.building.forecast import forecast, print_forecast
from packprep.building.inputs import look_up
from packprep.building.plan import make_plan
from packprep.recipe import read_recipe
from tests import made


def forecast_of(folder, sources="a.jsonl", **changes):
    inputs = look_up(read_recipe(made.table(sources, **changes), folder), {})
    return forecast(make_plan(inputs), inputs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forecast")
    made.write_lines(folder / "a.jsonl", made.texts(600))
    return folder


def test_a_forecast_is_near_what_the_build_makes(folder, tmp_path):
    found = forecast_of(folder)
    manifest = made.build(made.table("a.jsonl"), folder, tmp_path / "out").manifest
    ledger = manifest["ledger"]
    assert found["shards"] == len(manifest["shards"])
    assert abs(found["tokens"] / ledger["sources"]["source0"]["tokens"]["used"] - 1) < 0.02
    assert abs(found["documents"] / 600 - 1) < 0.02
    assert abs(found["rows"] / ledger["rows"] - 1) < 0.1
    size = sum(entry["bytes"] for entry in manifest["shards"])
    assert abs(found["output_bytes"] / size - 1) < 0.3
    assert found["fingerprint"] == manifest["fingerprint"] and found["worker_bytes"] > 100 << 20


def test_realised_span_lengths_are_told_and_warned_of_beyond_a_tenth(folder):
    found = forecast_of(folder, seq_length=4096)
    by_name = {task["name"]: task for task in found["tasks"]}
    figure = by_name["r"]["figures"]["mean_span_length"]
    assert figure["wanted"] == 3 and abs(figure["realised"] - 3) < 0.05
    few = {"sentinels": {"first": 266, "count": 20}}
    tasks = [{"objective": "span_corruption", "too_many_spans": "lower"}]
    found = forecast_of(folder, seq_length=4096, specials=few, tasks=tasks)
    assert found["tasks"][0]["figures"]["mean_span_length"]["realised"] > 25
    assert any("mean_span_length will be " in text and "not 3" in text for text in found["warnings"])


def test_segments_that_end_for_want_of_sentinels_are_warned_of(folder):
    tasks = [{"objective": "span_corruption", "noise_density": 0.5}]
    found = forecast_of(folder, seq_length=4096, specials={"sentinels": {"first": 266, "count": 20}}, tasks=tasks)
    assert any("20 sentinels end its segments at 1" in text for text in found["warnings"]), found["warnings"]
    assert forecast_of(folder, seq_length=4096, tasks=[{"preset": "t5"}])["warnings"] == []


def test_a_source_used_more_than_four_times_is_warned_of(folder):
    found = forecast_of(folder, [{"name": "a", "paths": ["a.jsonl"], "repeat": 4.5}], tasks=[{"preset": "causal"}])
    assert found["warnings"] == ["source a: each document is used 4.5 times"]


def test_a_forecast_is_printed_as_text(folder, capsys):
    print_forecast(forecast_of(folder, [{"name": "web", "paths": ["a.jsonl"], "repeat": 5}]))
    text = capsys.readouterr().out
    assert re.match(r"\d\d shards of about 0\.0477 MiB of text, 1 file\n", text)
    for said in ("web", "x-dense", "span_corruption", "warning: source web", "rows of 512"):
        assert said in text
    assert forecast_of(folder)["sources"][0]["share"] == 1.0
    print_forecast(forecast_of(folder, output={}))
    assert capsys.readouterr().out.startswith("1 shard of about 64 MiB of text, 1 file\n")
