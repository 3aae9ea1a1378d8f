"""Estimates of what expressions use of a token store, which knows the length of each document."""

import numpy as np
import pytest

from packprep.building.forecast import forecast
from packprep.building.planning import look_up, make_plan
from packprep.documents import store_estimates
from packprep.documents.store_estimates import _Lengths
from packprep.errors import RecipeError
from packprep.recipe import read_recipe
from tests import made
from tests.sources.test_passes import FILES, records, sources, write


def planned(folder, own):
    """The sources of a plan, and the warnings of its forecast."""
    loose = {"max_bad_fraction": 1.0}
    table = made.table(own, tasks=[{"preset": "causal"}], documents=loose, output={})
    inputs = look_up(read_recipe(table, folder), {})
    samples = []
    plan = make_plan(inputs, samples=samples)
    return plan["sources"], forecast(plan, inputs, samples)["warnings"]


def test_lengths_of_a_large_store_are_a_regular_choice(monkeypatch):
    monkeypatch.setattr(store_estimates, "MOST_LENGTHS", 4)
    lengths = _Lengths()
    for begin, end in ((0, 4), (4, 5), (5, 12), (12, 13)):
        lengths.add(np.arange(begin, end)[:, None] * np.array([1.0, 10.0, 0.5]))
        step = {4: 1, 5: 2, 12: 4, 13: 4}[end]
        assert lengths.step == step
        tokens, sizes, numbers = lengths.columns
        assert tokens.tolist() == list(range(0, end, step))
        assert (
            sizes.tolist() == [10 * n for n in tokens] and tokens.dtype == sizes.dtype == np.int64
        )
        assert numbers.tolist() == [n / 2 for n in tokens]


def test_a_store_tells_exactly_what_expressions_use(tmp_path):
    rows = records(120, 1)
    write(tmp_path, rows)
    with (tmp_path / FILES[0]).open("ab") as file:
        file.write(b'\n{"text": 7, "score": 5}\n{"text": "w", "score": "high"}\n{\n')
    own = [{**one, "keep": ["score", "quality"]} for one in sources()[::2]]
    own[0]["keep"].append("none")
    table = made.table(own, documents={"max_bad_fraction": 1.0})
    made.build(table, tmp_path, tmp_path / "store", is_store=True)
    stored = [{"name": one["name"], "paths": ["store"], "format": "store"} for one in own]
    for keys, number in (
        ({"where": "score >= 3"}, lambda row: (row["score"] or 0) >= 3),
        ({"repeat": "clip(quality, 0, 2.5)"}, lambda row: min(row["quality"], 2.5)),
        (
            {"where": "score < 2", "repeat": "clip(quality, 1, 2)"},
            lambda row: (row["score"] in (0, 1)) * min(max(row["quality"], 1), 2),
        ),
    ):
        of_rows = [(number(row), len(row["text"].encode())) for row in rows]
        found, warnings = planned(tmp_path, [{**one, **keys} for one in stored])
        assert warnings == []
        for source in found:
            assert source["tokens"] == pytest.approx(sum(n * size for n, size in of_rows), rel=2e-3)
            assert source["documents"] == pytest.approx(sum(n for n, _ in of_rows), abs=1)
            passes = source.get("pass_shares", [1.0])
            of_passes = [
                sum(min(max(n - p, 0), 1) * size for n, size in of_rows) for p in range(len(passes))
            ]
            assert passes == pytest.approx([n / of_passes[0] for n in of_passes], rel=2e-3)
    with pytest.raises(
        RecipeError, match="where keeps none of 1.. sampled documents: no record has the"
    ):
        planned(tmp_path, [{**stored[0], "where": "none > 1"}])
