"""block_diffusion: the segment twice, noised and clean, with attention by blocks.

A noised block attends to its own slots and to the clean blocks before it.

    tokens       10  11  12  13             block_length 2, mask 99
    slots        99  11  12  99 | 10  11  12  13
    block         0   0   1   1 |  0   0   1   1
    labels       10  11  12  13 | 10  11  12  13
    loss_mask     1   0   0   1 |  0   0   0   0
    prefix −1: attention follows block_mask

BD3-LM (Arriola et al. 2025) draws one level per block from a clipped range, with loss weight 1 /
level. Blocks are counted from the segment's first slot, which may be bos or the mode token. The
last block may be shorter. `BlockSchedule` of `dataset/epochs/noise.py` also has the schedules of
other models. Each line gives parameters, the model that they reproduce, and the code of this model:

    noise "position"        Nemotron-Labs-Diffusion, by NeMo Automodel 0.7.0's corrupt_blockwise
    noise "all", shift      I-DLM (Yu et al. 2026), by its corrupt_all_masked and IDLMLoss
    canvas "uniform"        DiffusionGemma, by its corrupt_uniform_random and
                            BlockDiffusionCrossEntropyLoss
    complementary, shift    Fast-dLLM v2 (Wu et al. 2025), by the forward of its published model
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from packprep.dataset.epochs.noise import BLOCK_DIFFUSION as SCHEDULE
from packprep.dataset.epochs.noise import level_range
from packprep.errors import RecipeError
from packprep.objectives.noising import noise_blocks
from packprep.objectives.objective import Ids, Objective, Task

_DEFAULTS = {parameter.name: parameter.default for parameter in SCHEDULE.parameters}


def check(parameters: Mapping[str, Any], where: str) -> None:
    """Check that the parameters can be combined.

    Args:
        parameters: The task's parameters.
        where: The task's name, for error messages.

    Raises:
        RecipeError: If parameters exclude each other, or if noise_range is invalid.
    """
    low, high = parameters["noise_range"]
    canvas, kind = parameters["canvas"], parameters["noise"]
    # Check the keys that determine the noise.
    if low < SCHEDULE.least:
        raise RecipeError(
            f"{where}.noise_range = [{low:g}, {high:g}]: it must start above 0, because weights"
            " are 1/level\n"
            "hint: give a start above 0, as in [0.001, 1]"
        )
    if kind == "all" and parameters["noise_range"] != _DEFAULTS["noise_range"]:
        raise RecipeError(
            f'{where}.noise = "all" noises every token, so noise_range has no effect\n'
            "hint: leave noise_range out"
        )
    if kind != "position" and parameters["half_life"] != _DEFAULTS["half_life"]:
        raise RecipeError(
            f'{where}.half_life requires noise = "position", but noise is "{kind}"\n'
            "hint: leave half_life out"
        )
    if canvas == "uniform" and kind != "level":
        raise RecipeError(
            f'{where}: canvas = "uniform" does not support noise = "{kind}"\nhint: leave noise out'
        )
    if canvas == "uniform" and parameters["weighting"] != "none":
        raise RecipeError(
            f'{where}: canvas = "uniform" trains all tokens alike, so weights of 1/level would be'
            " wrong for unchanged tokens\n"
            'hint: set weighting = "none"'
        )
    if parameters["complementary"] and (canvas, kind) != ("mask", "level"):
        setting = f'noise = "{kind}"' if canvas == "mask" else f'canvas = "{canvas}"'
        raise RecipeError(
            f"{where}: complementary requires masks drawn by noise level, which {setting} does not"
            " give\n"
            f"hint: leave complementary or {setting} out"
        )
    # Check the keys about the blocks of supervised documents.
    if parameters["eos_fill"] == "block" and parameters["block_origin"] == "none":
        raise RecipeError(
            f'{where}: eos_fill = "block" fills up blocks of supervised documents, which do not'
            " draw this task without block_origin\n"
            'hint: set block_origin = "answer" or "segment", or leave eos_fill out'
        )
    if parameters["block_origin"] == "answer" and not parameters["noise_eos"]:
        raise RecipeError(
            f'{where}: block_origin = "answer" noises all trained tokens, but noise_eos is false\n'
            "hint: leave noise_eos out"
        )
    if parameters["eos_fill"] == "block" and not parameters["noise_eos"]:
        raise RecipeError(
            f'{where}: eos_fill = "block" trains eos, but noise_eos is false\n'
            "hint: leave one of them out"
        )
    if parameters["eos_fill"] == "block" and parameters["block_length"] == 1:
        raise RecipeError(
            f'{where}: eos_fill = "block" has no effect, because blocks of 1 position are always'
            " full\n"
            "hint: leave eos_fill out"
        )
    if parameters["eos_fill"] == "block" and parameters["block_length"] > 1 << 16:
        raise RecipeError(
            f'{where}: eos_fill = "block" supports blocks of up to {1 << 16:,} positions, but'
            f" block_length is {parameters['block_length']:,}\n"
            "hint: reduce block_length"
        )
    if parameters["complementary"] and low == 1:
        raise RecipeError(
            f"{where}.noise_range = [1, 1]: the complement of its mask would be empty\n"
            "hint: use a range that starts below 1"
        )


def roles(parameters: Mapping[str, Any]) -> frozenset[str]:
    """Return {"mask"} if the task may replace tokens with the mask, otherwise an empty set."""
    return SCHEDULE.needs(parameters) & {"mask"}


def resolve(parameters: Mapping[str, Any], ids: Ids) -> dict[str, Any]:
    """Check that ordinary ids can be drawn, and return an empty dict, because nothing is stored.

    Args:
        parameters: The task's parameters.
        ids: The ids that objectives write.

    Returns:
        An empty dict.

    Raises:
        RecipeError: If canvas is "uniform" and the vocabulary has fewer than two ordinary tokens.
    """
    if parameters["canvas"] == "uniform" and len(ids.for_noise.ordinary) < 2:
        raise RecipeError(
            'canvas = "uniform" draws ordinary tokens, but the vocabulary has fewer than two\n'
            "hint: leave canvas out"
        )
    return {}


def forecast(task: Task, n: int) -> dict[str, tuple[float, float]]:
    """Return the wanted and the realized mean share of noised tokens. Both shares are equal.

    Args:
        task: The task.
        n: Tokens of a segment.

    Returns:
        {"noise": (wanted, realized)}.
    """
    mean = sum(level_range(task.parameters)) / 2
    return {"noise": (mean, mean)}


def mean_weight(task: Task) -> float:
    """Return the mean loss weight of a trained slot.

    It is 1 / mean level if `weighting` is "1/p", otherwise 1.
    """
    return 2.0 / sum(level_range(task.parameters)) if task.parameters["weighting"] == "1/p" else 1.0


OBJECTIVE = Objective(
    name=SCHEDULE.name,
    attention=SCHEDULE.attention,
    parameters=SCHEDULE.parameters,
    supervised=lambda parameters: parameters.get("block_origin", "none") != "none",
    noise=partial(SCHEDULE.draw, write=noise_blocks),
    mean_weight=mean_weight,
    resolve=resolve,
    roles=roles,
    forecast=forecast,
    check=check,
)
