"""Flip thresholds, by another rule of integration than the plan's."""

import math

import pytest

from packprep.building.plan import ids_of
from packprep.objectives import uniform_diffusion
from packprep.recipe import Specials
from packprep.tokenizer.roles import Needs, resolve_vocabulary
from tests.twin.comparison import compare_plan
from tests.twin.objectives.uniform_diffusion import flip_probability


@pytest.mark.long
@pytest.mark.parametrize("mu", [0.0, 0.3, 1.0, 4.0])
def test_of_two_tokens_the_formula_is_known(mu):
    """P = Φ(−µ / √2)."""
    assert flip_probability(mu, 2) == pytest.approx(0.5 * math.erfc(mu / 2), abs=1e-12)


@pytest.mark.long
def test_without_a_signal_every_token_is_as_likely():
    assert flip_probability(0.0, 50368) == pytest.approx(1 - 1 / 50368, abs=1e-9)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    vocabulary = resolve_vocabulary(
        "bytes", tmp_path_factory.mktemp("none"), Specials(), Needs(frozenset({"pad"}), (), 0)
    )
    tasks = []
    for schedule, noise_range in (
        ("vp", (0.03, 0.15)),
        ("linear", (0.1, 0.9)),
        ("flip", (0.0, 1.0)),
    ):
        parameters = {"schedule": schedule, "noise_range": noise_range}
        resolved = uniform_diffusion.resolve(parameters, ids_of(vocabulary))
        tasks.append(
            {
                "name": schedule,
                "objective": "uniform_diffusion",
                "parameters": parameters,
                "resolved": resolved,
            }
        )
    return {
        "tasks": tasks,
        "vocabulary": {
            "vocab_size": vocabulary.vocab_size,
            "special_ids": list(vocabulary.special_ids),
        },
    }


def test_the_plan_s_are_the_twin_s(plan):
    assert len(plan["vocabulary"]["special_ids"]) > 528 / 2  # V is not the vocabulary's size by far
    assert compare_plan(plan) == []


@pytest.mark.parametrize("task", [0, 1, 2])
def test_a_threshold_that_is_off_is_named(plan, task):
    own = plan["tasks"][task]
    wrong = [round(t * (1 + 1e-6)) for t in own["resolved"]["flip_thresholds"]]
    changed = {**own, "resolved": {"flip_thresholds": wrong}}
    found = compare_plan({**plan, "tasks": [changed]})
    assert found and all(own["name"] in message for message in found)
