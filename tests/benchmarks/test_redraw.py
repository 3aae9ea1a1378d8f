"""The benchmark of redraw: it measures what it names, and its two runs part where they should."""

import json

import pytest
import redraw

pytestmark = pytest.mark.long


@pytest.mark.long
def test_redraw_is_measured_beside_the_stored_rows(capsys):
    few = [
        "--size",
        "100KB",
        "--seq-length",
        "256",
        "--batch-size",
        "4",
        "--calls",
        "1",
        "--repeats",
        "1",
    ]
    redraw.main(["speed", *few, "--preset", "t5", "bd3", "--json"])
    lines = json.loads(capsys.readouterr().out)
    assert [line["preset"] for line in lines] == ["t5", "bd3"]
    assert all([*line["slots_per_s"]] == ["stored", "numpy", "numba"] for line in lines)
    assert all(
        value > 0
        for line in lines
        for key in ("slots_per_s", "bytes_beside_per_slot")
        for value in line[key].values()
    )
    redraw.main(["speed", *few, "--preset", "fim", "--accelerate", "numpy"])
    assert "bytes a slot" in capsys.readouterr().out


@pytest.mark.long
def test_runs_with_redraw_and_without_are_one_until_the_first_epoch_is_over(capsys):
    pytest.importorskip("torch", reason="torch is not installed: pip install '.[trainers]'")
    small = [
        "--size",
        "300KB",
        "--vocabulary",
        "400",
        "--held-out-rows",
        "8",
        "--width",
        "16",
        "--layers",
        "1",
    ]
    ways = ["--ways", "stored", "redraw", "repeat"]
    redraw.main(
        ["train", *small, *ways, "--epochs", "2", "--seeds", "3", "--share", "0.5", "--json"]
    )
    first, second, first_anew, second_anew, *repeated = json.loads(capsys.readouterr().out)
    assert first["held_out"] == pytest.approx(first_anew["held_out"], rel=1e-3)
    assert second["trained"] != pytest.approx(second_anew["trained"], rel=1e-6)
    assert set(first["held_out"]) >= {"all", "r", "s"} and second["held_out"]["all"] < 7
    assert [line["epoch"] for line in repeated] == [1, 2]
