"""The benchmark measures what it says."""

import importlib.util
import json
from pathlib import Path

import pytest

_PATH = Path(__file__).resolve().parents[1] / "benchmarks" / "end_to_end.py"
_SPEC = importlib.util.spec_from_file_location("end_to_end", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
end_to_end = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(end_to_end)


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


def test_torch_workers_measures_all_that_it_names(tmp_path, capsys):
    pytest.importorskip("torch", reason="torch is not installed: pip install '.[trainers]'")
    import runpy

    from tests.dataset import synthetic

    synthetic.make_dataset(tmp_path, (9,))
    main = runpy.run_path(str(_PATH.with_name("torch_workers.py")))["main"]
    figures = main([str(tmp_path), "--batch-size", "4", "--batches", "2", "--repeats", "1"])
    assert len(figures) == 7 and all(value > 0 for value in figures.values())
    assert capsys.readouterr().out.count("rows/s") == 7
