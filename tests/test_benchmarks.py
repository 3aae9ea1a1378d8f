"""The benchmarks measure what they say."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from packprep.objectives.span_corruption import render_with_mask, span_counts


def script(name: str) -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


end_to_end, packing, objectives = script("end_to_end"), script("packing"), script("objectives")


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


def test_packing_is_measured_for_each_capacity_and_algorithm(capsys):
    few = ["--documents", "3000", "--capacity", "512", "1000", "--algorithm", "best_fit", "next_fit", "--repeats", "1"]
    packing.main([*few, "--json"])
    lines = json.loads(capsys.readouterr().out)
    assert [(line["algorithm"], line["capacity"]) for line in lines] == [
        (algorithm, capacity) for algorithm in ("best_fit", "next_fit") for capacity in (512, 1000)
    ]
    assert all(line["grouped_per_s"] > 0 and 0.5 < line["utilisation"] <= 1 for line in lines)
    assert [line["assignment_per_s"] is not None for line in lines] == [True, True, False, False]
    packing.main(few)
    assert "best_fit" in capsys.readouterr().out


def test_objectives_are_measured_beside_what_others_do(capsys):
    few = ["--tokens", "20000", "--length", "500", "--seq-length", "1024", "--repeats", "1"]
    objectives.main([*few, "--json"])
    tables = json.loads(capsys.readouterr().out)
    counts = [len(objectives.SPANS), len(objectives.NOISE), len(objectives.PRESETS)]
    assert [len(lines) for lines in tables.values()] == counts
    for name, lines in tables.items():
        assert all(line["tokens_per_s"] > 0 and line["copy_per_s"] > 0 for line in lines)
        assert all((line["other_per_s"] is None) == (name == "render") for line in lines)
    objectives.main(few)
    assert "of copy bound" in capsys.readouterr().out


@pytest.mark.parametrize("density, mean", [(0.15, 3.0), (0.5, 3.0), (0.15, 64.0)])
def test_the_collator_corrupts_spans_as_packprep_does(density, mean):
    tokens, chance = np.arange(500), np.random.default_rng(3)
    mask = objectives.spans_mask(500, density, mean, np.random.default_rng(3))
    n_noise, n_spans = span_counts(500, density, mean)
    assert mask.sum() == n_noise and np.count_nonzero(np.diff(mask.astype(int)) == 1) == n_spans
    inputs, targets = objectives.collate(tokens, density, mean, 1000, chance)
    slots, prefix = render_with_mask(tokens, mask, np.arange(1000, 1500))
    assert inputs.tolist() == slots[:prefix].tolist()
    # its targets mark the text between the spans; ours the spans
    assert targets[targets < 1000].tolist() == [t for t in slots[prefix:].tolist() if t < 1000]
    assert np.count_nonzero(targets >= 1000) == n_spans
