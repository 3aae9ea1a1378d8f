import dataclasses
import importlib
import pkgutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

import packprep.objectives
from packprep.errors import RecipeError
from packprep.objectives import REGISTRY, find, register
from packprep.objectives.objective import Objective, Parameter
from packprep.recipe import presets


def test_every_objective_file_is_in_the_registry_under_its_own_name():
    others = {"objective", "tasks", "noising"}
    names = {module.name for module in pkgutil.iter_modules(packprep.objectives.__path__)} - others
    assert names == set(REGISTRY)
    for name in names:
        module = importlib.import_module(f"packprep.objectives.{name}")
        assert module.OBJECTIVE is REGISTRY[name] is find(name) and module.OBJECTIVE.name == name


def test_every_objective_s_docstring_shows_a_worked_example():
    for name in REGISTRY:
        lines = importlib.import_module(f"packprep.objectives.{name}").__doc__.splitlines()
        starts = {line.split()[0] for line in lines if line.strip()}
        assert starts >= {"tokens", "slots", "loss_mask", "prefix"}, name


def test_every_preset_names_objectives_and_parameters_that_exist():
    for preset, tables in presets().items():
        for table in tables:
            objective = REGISTRY[table["objective"]]
            known = {"name", "objective", "weight", "mode_token"} | {
                p.name for p in objective.parameters
            }
            assert set(table) <= known, preset


def test_every_parameter_accepts_its_default_and_says_what_it_means():
    for objective in REGISTRY.values():
        for parameter in objective.parameters:
            assert parameter.accept(parameter.default, "here") == parameter.default
            assert parameter.meaning and type(parameter.default) in (bool, int, float, str, tuple)


def test_an_unknown_objective_is_none():
    assert find("no_such_objective") is None


@pytest.fixture
def registry():
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


def other(name: str) -> Objective:
    return dataclasses.replace(REGISTRY["causal"], name=name)


def test_an_objective_from_outside_is_registered_once(registry):
    mine = other("mine")
    register(mine)
    register(mine)
    assert find("mine") is mine
    with pytest.raises(RecipeError, match="'mine' is already registered"):
        register(other("mine"))


def test_an_installed_entry_point_is_found(registry, monkeypatch):
    mine = other("installed")

    class EntryPoint:
        def load(self):
            return mine

    asked = []

    def entry_points(**wanted):
        asked.append(wanted)
        return [EntryPoint()] if wanted["name"] == "installed" else []

    monkeypatch.setattr(packprep.objectives, "entry_points", entry_points)
    assert find("installed") is mine
    assert find("nothing") is None
    assert all(wanted["group"] == "packprep.objectives" for wanted in asked)


def test_a_parameter_keeps_to_its_type_and_range():
    density = Parameter("d", 0.5, "", 0.0, 1.0, low_open=True, high_open=True)
    assert density.range_text() == "(0, 1)" and density.accept(0.25, "t") == 0.25
    for value in (0, 0.0, 1, 1.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(RecipeError, match=r"t\.d = .*: must be in \(0, 1\)"):
            density.accept(value, "t")
    for value in ("0.5", True, None, [0.5]):
        with pytest.raises(RecipeError, match=r"t\.d = .*: expected a number \(\(0, 1\)\)"):
            density.accept(value, "t")
    mean = Parameter("m", 3.0, "", 1.0)
    assert mean.range_text() == "[1, ∞)"
    accepted = mean.accept(3, "t")
    assert accepted == 3.0 and type(accepted) is float
    with pytest.raises(RecipeError, match=r"must be in \[1, ∞\)"):
        mean.accept(float("inf"), "t")
    choice = Parameter("c", "a", "", choices=("a", "b"))
    assert choice.accept("b", "t") == "b"
    with pytest.raises(RecipeError, match=r"t\.c = 'z': must be in a \| b"):
        choice.accept("z", "t")
    flag = Parameter("f", False, "")
    assert flag.accept(True, "t") is True
    with pytest.raises(RecipeError, match=r"t\.f = 1: expected true or false \(true \| false\)"):
        flag.accept(1, "t")
    assert Parameter("n", 5, "").range_text() == ""


BOUNDS = st.none() | st.integers(-3, 3)


@given(BOUNDS, BOUNDS, st.booleans(), st.booleans(), st.sampled_from([0.5, 1, (0.25, 0.75)]))
def test_the_range_of_a_parameter_says_which_bounds_it_accepts(low, high, low_open, high_open, own):
    parameter = Parameter("p", own, "", low, high, low_open, high_open)
    said = parameter.range_text()
    if low is None and high is None:
        assert said == ""
        return
    left, right = said.removeprefix("two numbers low ≤ high in ").split(", ")
    assert left[1:] == ("−∞" if low is None else str(low))
    assert right[:-1] == ("∞" if high is None else str(high))
    for value in range(-4, 5):
        inside = (low is None or value > low or (value == low and left[0] == "[")) and (
            high is None or value < high or (value == high and right[-1] == "]")
        )
        given_value = (value, value) if isinstance(own, tuple) else value
        try:
            accepted = parameter.accept(given_value, "t")
        except RecipeError:
            assert not inside
        else:
            assert inside and accepted == given_value and type(accepted) is type(own)


@pytest.mark.long
def test_a_parameter_of_several_numbers_takes_a_range_in_order_or_shares_that_sum_to_1():
    span = Parameter("r", (0.25, 0.75), "", 0.0, 1.0)
    assert span.accept([0.5, 0.5], "t") == (0.5, 0.5) and span.accept([0, 1], "t") == (0.0, 1.0)
    shares = Parameter("s", (0.5, 0.25, 0.25), "", 0.0, 1.0, shares=True)
    assert shares.accept([0.7, 0.2, 0.1], "t") == (0.7, 0.2, 0.1)
    refused = {
        span: ([0.5, 0.4], [0.5], [0.1, 0.2, 0.3], 0.5, ["0", "1"], [True, True], [0.5, 1.5]),
        shares: ([0.7, 0.2, 0.2], [0.5, 0.25], [1.5, -0.25, -0.25], [0.5, 0.5, 0.0, 0.0]),
    }
    for parameter, values in refused.items():
        for value in values:
            with pytest.raises(RecipeError, match=r"must be (two|3) numbers"):
                parameter.accept(value, "t")
