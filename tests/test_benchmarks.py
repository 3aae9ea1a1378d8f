"""The benchmarks measure what they say."""

import importlib.util
import json
from pathlib import Path

import pytest


def loaded(name):
    path = Path(__file__).resolve().parents[1] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


end_to_end, readers = loaded("end_to_end"), loaded("readers")


def test_stages_add_up_to_the_whole_and_all_of_them_ran(tmp_path, capsys):
    end_to_end.main(["--size", "200KB", "--workers", "1", "--folder", str(tmp_path), "--json"])
    result = json.loads(capsys.readouterr().out)
    one = result["one"]
    assert set(one["stages_s"]) == {*end_to_end.STAGES, "rest"}
    assert sum(one["stages_s"].values()) == pytest.approx(one["seconds"])
    assert all(seconds > 0 for seconds in one["stages_s"].values())
    assert one["text_bytes"] >= 200_000 and one["tokens"] == one["text_bytes"]
    assert one["tokens_per_s"] == pytest.approx(one["tokens"] / one["seconds"])
    assert result["many"] is None and not list(tmp_path.iterdir())


def test_the_product_is_as_before(tmp_path):
    from packprep.building import work

    before = work.render
    with end_to_end.Stages().on():
        assert work.render is not before
    assert work.render is before


def test_a_stage_inside_another_counts_for_itself_alone(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 10.0])  # outer begins, inner begins, inner ends, outer ends
    monkeypatch.setattr(end_to_end.time, "perf_counter", lambda: next(clock))
    stages = end_to_end.Stages()
    with stages.measure("write"), stages.measure("render"):
        pass
    assert stages.seconds["render"] == 2.0 and stages.seconds["write"] == 8.0


def test_a_generator_is_measured_step_by_step(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(end_to_end.time, "perf_counter", lambda: now[0])

    def slow():
        for i in range(3):
            now[0] += 1.0
            yield i

    stages = end_to_end.Stages()
    for _ in stages.wrapped("read", slow)():
        now[0] += 100.0
    assert stages.seconds["read"] == 3.0


def test_readers_and_bare_loops_give_the_same_texts(tmp_path):
    source = readers._library(tmp_path / "library.jsonl", 3_000_000)
    files = readers._files(tmp_path, source)
    expected = [json.loads(line)["text"] for line in source.read_bytes().splitlines()]
    for name, path in files.items():
        for texts_of in (readers._read, readers._BARE[name]):
            assert [text for texts in texts_of(path) for text in texts] == expected, name


def test_the_readers_benchmark_has_a_rate_for_every_format(capsys):
    readers.main(["--size", "100KB", "--rounds", "1", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["text_bytes"] >= 100_000 and set(result["formats"]) == set(readers._BARE)
    assert all(rate > 0 for rates in result["formats"].values() for rate in rates.values())
