"""Block diffusion: the attention rule of BD3-LM, and [x_t ; x_0] as it is rendered."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packprep.dataset import attention, noise
from packprep.errors import RecipeError
from packprep.objectives.block_diffusion import OBJECTIVE, check, mean_weight
from tests import golden, made

DEFAULTS = {parameter.name: parameter.default for parameter in OBJECTIVE.parameters}


@pytest.mark.parametrize(("name", "given", "expected"), golden.cases("bd3_mask"))
def test_the_attention_rule_is_bd3_lms(name, given, expected):
    """BD3-LM's mask of 2n slots, x_t first: rows of the golden mask are queries."""
    n = given["n"]
    position, half = np.tile(np.arange(n), 2), np.repeat([0, 1], n)
    mask = attention.block_mask(np.ones(2 * n, int), position, half, given["block_size"])
    assert mask.astype(int).tolist() == expected["mask"]
    assert mask.sum() == expected["num_true"]


@given(st.integers(1, 70), st.integers(0, 2), st.integers(1, 40), st.integers(0, 2**64 - 1))
@settings(max_examples=60)
def test_each_block_has_one_level_and_the_clean_half_stays(candidates, before, block_length, key):
    half = before + candidates
    tokens = np.tile(np.arange(10, 10 + half, dtype=np.uint16), 2)
    loss_mask = np.zeros(2 * half, np.uint8)
    segments = noise.Candidates(
        np.array([key], np.uint64), np.array([before]), np.array([candidates]), np.zeros(1, np.int64)
    )
    target = noise.Target(segments, np.array([before]), np.array([half]), None, tokens, loss_mask)
    parameters = {**DEFAULTS, "block_length": block_length}
    noised = noise.block_diffusion(0, parameters, {}, made.ids().for_noise, target, 0)
    counts, level, weight = noised.blocks
    assert counts.tolist() == [-(-half // block_length)] == [len(level)] == [len(weight)]
    assert tokens[half:].tolist() == list(range(10, 10 + half)) and not loss_mask[half:].any()
    assert tokens[:before].tolist() == list(range(10, 10 + before)) and not loss_mask[:before].any()
    assert np.array_equal(tokens[:half] != tokens[half:], loss_mask[:half] != 0)
    assert set(tokens[:half][loss_mask[:half] != 0].tolist()) <= {259}
    assert noised.level.tolist() == [0.0] and noised.weight.tolist() == [1.0]


def test_a_level_of_one_masks_everything():
    tokens, loss_mask = np.full(20, 7, np.uint16), np.zeros(20, np.uint8)
    segments = noise.Candidates(np.array([5], np.uint64), np.array([1]), np.array([9]), np.zeros(1, np.int64))
    target = noise.Target(segments, np.array([1]), np.array([10]), None, tokens, loss_mask)
    parameters = {**DEFAULTS, "noise_range": (1.0, 1.0), "block_length": 4}
    noised = noise.block_diffusion(0, parameters, {}, made.ids().for_noise, target, 0)
    assert loss_mask.tolist() == [0] + [1] * 9 + [0] * 10
    assert noised.blocks[1].tolist() == noised.blocks[2].tolist() == [1.0] * 3


def test_a_range_from_0_has_no_weights():
    check(DEFAULTS, "task")
    with pytest.raises(RecipeError, match="1 / level"):
        check({**DEFAULTS, "noise_range": (0.0, 0.8)}, "task")
    check({**DEFAULTS, "noise_range": (2.0**-24, 0.8)}, "task")


def test_a_masked_slot_weighs_the_inverse_of_the_mean_level():
    task = made.mix({"tasks": [{"objective": "block_diffusion", "noise_range": [0.2, 0.6]}]})[1][0]
    assert mean_weight(task) == pytest.approx(2.5)
