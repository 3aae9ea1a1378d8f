"""The benchmarks measure what they say."""

import importlib.util
import json
from pathlib import Path

import pytest

from packprep.corpus.engines.fast import FastEngine
from tests.corpus import tokenizers_made


def _load(name):
    path = Path(__file__).resolve().parents[1] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


end_to_end, engine_exactness = _load("end_to_end"), _load("engine_exactness")


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


def test_exactness_tells_equal_refused_and_different_apart(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(engine_exactness, "CONTEXTS", ())  # code points are a matter of minutes
    files = {
        "gpt2": tokenizers_made.gpt2_like(),
        "bert": tokenizers_made.bert_like(),
        "hole": tokenizers_made.with_hole(),
    }
    paths = [str(tokenizers_made.write(tmp_path / name, made) / "tokenizer.json") for name, made in files.items()]
    assert engine_exactness.main([*paths, "--texts", "50"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[2][:20] for line in said] == [
        "no difference in 50 ",
        "refused, so that the",
        "no tokenizer that pa",
    ]
    monkeypatch.setattr(FastEngine, "encode", lambda engine, texts: engine.reference.encode([t + "a" for t in texts]))
    assert engine_exactness.main([paths[0], "--texts", "50"]) == 1
    assert "it differs from the reference: the text" in capsys.readouterr().out
