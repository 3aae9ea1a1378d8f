"""Uniform diffusion: Duo's flip rates as integrals, its schedules, and the plan's thresholds."""

import math

import numpy as np
import pytest

from packprep.dataset.epochs import noise
from packprep.errors import RecipeError
from packprep.objectives.objective import Ids, Task
from packprep.objectives.uniform_diffusion import (
    OBJECTIVE,
    check,
    flip_probability,
    flip_rate,
    mean_weight,
    mu_of,
    resolve,
)
from tests import golden

DEFAULTS = {parameter.name: parameter.default for parameter in OBJECTIVE.parameters}


def ids(vocab_size, special=()):
    return Ids(vocab_size, 0, -1, -1, -1, np.zeros(0, np.int32), special=tuple(special))


def one(value):
    return np.array([value], np.float64)


@pytest.mark.parametrize(("name", "given", "expected"), golden.cases("duo_linear_flip"))
def test_the_linear_schedule_flips_as_duo(name, given, expected):
    n, vocab = given["noise_weight"], given["vocab_size"]
    mu = mu_of("linear", one(n))
    assert mu[0] == pytest.approx(expected["mu"], rel=1e-14)
    for found in (flip_probability(mu, vocab), flip_rate("linear", one(n), vocab)):
        # far out, where nothing flips in 2⁴⁰ draws, µ is cut
        assert found[0] == pytest.approx(expected["p_flip"], rel=1e-9, abs=1e-40)
        keep = 1 - found[0]
        assert (keep - 1 / vocab) * vocab / (vocab - 1) == pytest.approx(
            expected["alpha_usdm"], rel=1e-8
        )
    assert noise.view_scale(one(n), vocab)[0] == pytest.approx(expected["view_scale"], rel=1e-12)
    assert found[0] / (vocab - 1) == pytest.approx(
        expected["p_specific_wrong"], rel=1e-9, abs=1e-40
    )


@pytest.mark.parametrize(("name", "given", "expected"), golden.cases("duo_vp_flip"))
def test_the_vp_schedule_flips_as_duo(name, given, expected):
    mu = mu_of("vp", one(given["t"]))
    assert mu[0] == pytest.approx(expected["mu"], rel=1e-12)
    assert flip_rate("vp", one(given["t"]), given["vocab_size"])[0] == pytest.approx(
        expected["p_flip"], rel=1e-9
    )
    assert noise.view_scale(one(given["t"]), given["vocab_size"])[0] == pytest.approx(
        expected["view_scale"], rel=1e-12
    )


@pytest.mark.parametrize(("name", "given", "expected"), golden.cases("duo_noise_for_target_flip"))
def test_levels_that_give_a_flip_rate_are_duos(name, given, expected):
    vocab, wanted = given["vocab_size"], given["target_flip"]
    for schedule, level in (("linear", expected["linear_noise_weight"]), ("vp", expected["vp_t"])):
        assert mu_of(schedule, one(level))[0] == pytest.approx(expected["mu"], rel=1e-9)
        assert flip_rate(schedule, one(level), vocab)[0] == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(("name", "given", "expected"), golden.cases("view_scale"))
def test_view_scale_is_duos(name, given, expected):
    found = noise.view_scale(one(given["noise_weight"]), given["vocab_size"])[0]
    assert found == pytest.approx(expected["view_scale"], rel=1e-12)


def test_two_tokens_have_a_closed_form():
    for mu in (0.0, 0.3, 2.0, 7.5):
        assert flip_probability(one(mu), 2)[0] == pytest.approx(math.erfc(mu / 2) / 2, rel=1e-10)


@pytest.mark.parametrize("vocab", [2, 1000, 50368, 262144])
def test_all_noise_keeps_a_token_by_chance_alone(vocab):
    assert flip_probability(one(0.0), vocab)[0] == pytest.approx(1 - 1 / vocab, rel=1e-12)
    assert flip_rate("linear", one(1.0), vocab)[0] == pytest.approx(1 - 1 / vocab, rel=1e-12)
    assert flip_rate("vp", one(1.0), vocab)[0] == pytest.approx(1 - 1 / vocab, rel=1e-12)
    assert flip_rate("linear", one(0.0), vocab)[0] < 2.0**-100


def test_the_figures_of_the_docs():
    rate = flip_rate("linear", np.array([0.25, 0.15, 0.1585]), 50368)
    assert rate == pytest.approx([0.883, 0.084, 0.15], abs=6e-4)


@pytest.mark.parametrize("schedule", ["linear", "vp"])
@pytest.mark.parametrize("low_high", [(0.03, 0.15), (0.0, 1.0), (0.1, 0.1001)])
@pytest.mark.parametrize("vocab", [4, 50368])
def test_interpolated_rates_are_the_integrals(schedule, low_high, vocab):
    low, high = low_high
    level = low + (high - low) * (np.arange(noise.FLIP_STEPS) + 0.5) / noise.FLIP_STEPS
    rate = flip_rate(schedule, level, vocab)
    some = np.arange(0, noise.FLIP_STEPS, 97)
    exact = flip_probability(np.minimum(mu_of(schedule, level[some]), 20.0), vocab)
    assert np.abs(rate[some] - exact).max() < 1e-12
    assert (np.diff(rate) >= -1e-12).all() and rate.min() > -1e-12 and rate.max() <= 1


@pytest.mark.parametrize("schedule", ["vp", "linear", "flip"])
def test_the_plan_stores_what_the_law_needs(schedule):
    made = resolve({**DEFAULTS, "schedule": schedule}, ids(50368))
    limits = np.array(made["flip_thresholds"], np.uint64)
    assert len(limits) == noise.FLIP_STEPS and limits.max() <= noise.ONE
    assert (limits[1:] >= limits[:-1]).all()
    assert made["flip_rate"] == pytest.approx(float(limits.mean()) / noise.ONE, abs=1e-9)
    assert made["alpha"][0] > made["alpha"][1]
    if schedule == "flip":
        assert made["flip_rate"] == pytest.approx(0.09)
        assert made["alpha"] == pytest.approx(
            [(1 - p - 1 / 50368) * 50368 / 50367 for p in (0.03, 0.15)]
        )


def test_one_level_is_one_threshold():
    made = resolve({**DEFAULTS, "schedule": "linear", "noise_range": (0.25, 0.25)}, ids(50368))
    assert len(set(made["flip_thresholds"])) == 1
    assert made["flip_rate"] == pytest.approx(0.883, abs=1e-3)


def test_v_is_the_number_of_ids_that_can_be_drawn():
    """Half of the vocabulary is special: the rate, its thresholds, alpha and the weights are those
    of the other half."""
    own, v = ids(64, range(32)), 32
    parameters = {
        **DEFAULTS,
        "schedule": "linear",
        "noise_range": (0.3, 0.3),
        "weighting": "view_scale",
    }
    made = resolve(parameters, own)
    rate = float(flip_probability(mu_of("linear", one(0.3)), v)[0])
    assert made["flip_rate"] == pytest.approx(rate, rel=1e-12)
    assert set(made["flip_thresholds"]) == {math.floor(rate * noise.ONE)}
    assert made["alpha"] == pytest.approx([(1 - rate - 1 / v) * v / (v - 1)] * 2)
    task = Task("duo", OBJECTIVE, 1.0, parameters, -1, own, made)
    assert mean_weight(task) == pytest.approx(0.3 / (v * 0.7 + 0.3))


def test_fewer_than_two_ids_to_draw_are_refused():
    resolve(DEFAULTS, ids(4, range(2)))
    with pytest.raises(RecipeError, match="fewer than two\nhint: use a tokenizer"):
        resolve(DEFAULTS, ids(4, range(3)))


def test_a_range_that_flips_nothing_is_refused():
    check(DEFAULTS, "task")
    with pytest.raises(RecipeError, match="nothing would be replaced.*\nhint: give an end above 0"):
        check({**DEFAULTS, "noise_range": (0.0, 0.0)}, "task")
