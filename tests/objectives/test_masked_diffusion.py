"""Masked diffusion: golden cases of LLaDA, MDLM and dLLM, and what the parameters say."""

import numpy as np
import pytest

from packprep.dataset.epochs import noise
from packprep.errors import RecipeError
from packprep.objectives.masked_diffusion import OBJECTIVE, check, forecast, mean_weight, roles
from tests import golden, made

DEFAULTS = {parameter.name: parameter.default for parameter in OBJECTIVE.parameters}


def one_segment(tokens, at=0, count=None):
    count = len(tokens) - at if count is None else count
    return noise.Candidates(
        np.array([12], np.uint64), np.array([at]), np.array([count]), np.array([0])
    )


def drawn(monkeypatch, level, uniforms):
    """The law with these draws: a segment's level, and each candidate's uniform."""
    monkeypatch.setattr(noise.randomness, "uniforms", lambda key, *_: np.full(len(key), level))

    def below(key, count, threshold, length, epoch):
        return np.floor(np.array(uniforms) * noise.ONE) < np.repeat(threshold, length)

    monkeypatch.setattr(noise, "below", below)


@pytest.mark.parametrize(("name", "given", "expected"), golden.cases("llada_p_mask"))
def test_probability_and_weight_are_lladas(name, given, expected):
    p = noise.mask_probability(np.array([given["t"]]), given["eps"])
    assert p[0] == pytest.approx(expected["p_mask"], rel=1e-12)
    target = noise.Target(
        one_segment([0]),
        np.zeros(1, np.int64),
        np.ones(1, np.int64),
        None,
        np.zeros(1, np.int32),
        np.zeros(1, np.uint8),
    )
    parameters = {**DEFAULTS, "noise_range": (given["t"], given["t"]), "epsilon": given["eps"]}
    noised = noise.masked_diffusion(0, parameters, {}, made.ids().for_noise, target, 0)
    assert noised.weight.tolist() == [np.float32(expected["weight"])]
    assert noised.level.tolist() == [given["t"]]


@pytest.mark.parametrize(("name", "given", "expected"), golden.cases("llada_forward"))
def test_the_forward_process_is_lladas(monkeypatch, name, given, expected):
    prompt, ids = given["prompt_length"], given["ids"]
    drawn(monkeypatch, given["t"], given["uniforms"][prompt:])
    tokens, loss_mask = np.array(ids, np.int32), np.zeros(len(ids), np.uint8)
    target = noise.Target(
        one_segment(ids, prompt), np.array([prompt]), np.array([len(ids)]), None, tokens, loss_mask
    )
    ordinary = noise.NoiseIds(
        given["mask_id"], *noise.ordinary_ids(130_000, np.array([given["mask_id"]]))
    )
    noised = noise.masked_diffusion(
        0, {**DEFAULTS, "epsilon": given["eps"]}, {}, ordinary, target, 0
    )
    assert tokens.tolist() == expected["noisy"]
    assert loss_mask.tolist() == expected["masked"]
    labels = np.where(loss_mask, ids, -100)
    assert labels.tolist() == expected["labels"]
    # levels are cut to 24 bits
    assert 1 / noised.weight[0] == pytest.approx(expected["p_mask"], abs=2.0**-23)
    # LLaDA divides by p and by the answer's length; the second is the trainer's
    weights = loss_mask * noised.weight / expected["answer_length"]
    assert weights.tolist() == pytest.approx(expected["token_weight_sft"], rel=2.0**-22)


@pytest.mark.parametrize(("name", "given", "expected"), golden.cases("dllm_exact_count"))
def test_an_exact_count_is_dllms(name, given, expected):
    n, ratio = given["num_candidates"], given["ratio"]
    tokens, loss_mask = np.full(n, 5, np.uint16), np.zeros(n, np.uint8)
    target = noise.Target(
        one_segment(tokens), np.zeros(1, np.int64), np.array([n]), None, tokens, loss_mask
    )
    parameters = {**DEFAULTS, "exact_count": True, "noise_range": (ratio, ratio)}
    noised = noise.masked_diffusion(0, parameters, {}, made.ids().for_noise, target, 0)
    assert loss_mask.sum() == (tokens == 259).sum() == expected["n_mask"]
    assert noised.weight.tolist() == [np.float32(n / expected["n_mask"])]


@pytest.mark.parametrize(("name", "given", "expected"), golden.cases("mdlm_antithetic_t"))
def test_stratified_levels_are_as_evenly_spread_as_mdlms(name, given, expected):
    """MDLM shifts each sample's uniform into its own n-th of [0, 1); here one shift is shared by
    the row."""
    n = given["n"]
    assert np.diff(expected["t"]).tolist() == pytest.approx(
        [(1 - given["sampling_eps"]) / n] * (n - 1)
    )
    segments = noise.Candidates(
        np.arange(n, dtype=np.uint64), np.arange(n), np.ones(n, np.int64), np.zeros(n, np.int64)
    )
    level = np.sort(noise.levels(segments, given["sampling_eps"], 1.0, True, 0, 0))
    assert np.diff(level).tolist() == pytest.approx([(1 - given["sampling_eps"]) / n] * (n - 1))


@pytest.mark.parametrize(
    "changes",
    [
        {"noise_range": (0.0, 0.0)},
        {"exact_count": True, "noise_range": (0.0, 0.5)},
        {"exact_count": True, "noise_range": (0.1, 0.5), "stratified": True},
    ],
)
def test_parameters_that_do_not_go_together_are_refused(changes):
    for allowed in (
        {"noise_range": (0.0, 0.1)},
        {"stratified": True},
        {"exact_count": True, "noise_range": (0.1, 0.1)},
    ):
        check({**DEFAULTS, **allowed}, "task")
    with pytest.raises(RecipeError, match="task"):
        check({**DEFAULTS, **changes}, "task")


def test_the_forecast_is_the_share_that_is_masked():
    _, tasks = made.mix({"seq_length": 4096, "tasks": [{"objective": "masked_diffusion"}]})
    wanted, realised = forecast(tasks[0], 1000)["noise"]
    assert wanted == 0.5 and realised == pytest.approx(0.5005)
    m, n = 2000, 500
    keys = np.arange(m, dtype=np.uint64)
    loss_mask = np.zeros(m * n, np.uint8)
    target = noise.Target(
        noise.Candidates(keys, np.arange(m) * n, np.full(m, n), np.arange(m)),
        np.zeros(m, np.int64), np.full(m, n), None, np.full(m * n, 5, np.uint16), loss_mask,
    )  # fmt: skip
    noise.masked_diffusion(0, tasks[0].parameters, {}, made.ids().for_noise, target, 0)
    assert abs(loss_mask.mean() - realised) < 5 * (1 / 12 / m) ** 0.5


def test_a_masked_slot_weighs_the_inverse_of_the_share_that_is_masked():
    table = {
        "tasks": [{"objective": "masked_diffusion", "noise_range": [0.2, 0.6], "epsilon": 0.0}]
    }
    assert mean_weight(made.mix(table)[1][0]) == pytest.approx(2.5)
    table["tasks"][0]["weighting"] = "none"
    assert mean_weight(made.mix(table)[1][0]) == 1.0


def test_a_mask_is_asked_for_where_something_becomes_it():
    assert roles({"replace": [0.0, 0.9, 0.1]}) == frozenset() and roles(
        {"replace": [0.1, 0.9, 0.0]}
    ) == {"mask"}
