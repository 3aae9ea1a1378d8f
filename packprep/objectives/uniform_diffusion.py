"""uniform_diffusion: each token flips to another ordinary token with a probability.

    tokens       10  11  12  13  14  15
    slots        10  57  12  13  31  15
    labels       10  11  12  13  14  15
    loss_mask     1   1   1   1   1   1     loss_on = "all"; with "corrupted": 0 1 0 0 1 0
    prefix 6: every slot sees all six slots

The noise level of a segment determines P, the probability that a token changes. Duo (Sahoo et al.
2025) adds Gaussian noise to one-hot vectors and takes the argmax. With probability P, the argmax is
another token, and all other tokens are equally probable. packprep draws once per token, with the
same distribution: P = ∫ φ(x − µ) (1 − Φ(x)^(V−1)) dx, for V tokens and the µ of the level.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from packprep.dataset.epochs import noise
from packprep.dataset.epochs.noise import UNIFORM_DIFFUSION as SCHEDULE
from packprep.errors import RecipeError
from packprep.objectives.noising import flip
from packprep.objectives.objective import Ids, Objective, Task

_STEPS_PER_UNIT = 256
_REACH = 12.0
_FAR = 20.0  # Nothing flips above this µ, since P < 1e-40 for any vocabulary.
_NODES = 96


def flip_probability(mu: np.ndarray, drawable: int) -> np.ndarray:
    """Return the probability P that the argmax of a noised one-hot vector is another token.

    It is P = ∫ φ(x − µ) (1 − Φ(x)^(V−1)) dx, with V ids that can be drawn. V = 2 gives Φ(−µ/√2). P
    is computed by the trapezoidal rule, with an error far below 1e-12.

    Args:
        mu: µ, an array of any shape.
        drawable: V, the number of ids that can be drawn.

    Returns:
        float64, shaped as mu.
    """
    mu = np.asarray(mu, np.float64)
    # The integrand vanishes at both ends, so the trapezoidal rule converges very fast.
    z = np.arange(-_REACH * _STEPS_PER_UNIT, _REACH * _STEPS_PER_UNIT + 1) / _STEPS_PER_UNIT
    density = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) / _STEPS_PER_UNIT
    flat = np.empty(mu.size)
    for i, m in enumerate(mu.ravel()):
        # log Φ and expm1 keep their precision where Φ is close to 1.
        flat[i] = density @ -np.expm1((drawable - 1) * _log_cdf(z + m))
    return np.clip(flat, 0.0, 1.0).reshape(mu.shape)


def _erfc(x: np.ndarray) -> np.ndarray:
    """Return the complementary error function."""
    return np.fromiter(map(math.erfc, x), np.float64, len(x))


def _log_cdf(x: np.ndarray) -> np.ndarray:
    """Return log Φ(x)."""
    upper = 0.5 * _erfc(x / math.sqrt(2.0))
    with np.errstate(divide="ignore"):
        return np.log1p(-np.minimum(upper, 1.0))


def mu_of(schedule: str, level: np.ndarray) -> np.ndarray:
    """Return the µ of each level. At level 0, µ is infinite.

    Args:
        schedule: "linear" for µ = (1 − t) / t, or "vp" for µ = (1 − t) / √(1 − (1 − t)²).
        level: t, an array of any shape.

    Returns:
        float64, shaped as level.
    """
    level = np.asarray(level, np.float64)
    with np.errstate(divide="ignore"):
        if schedule == "linear":
            return (1 - level) / level
        return (1 - level) / np.sqrt(1 - (1 - level) ** 2)


def flip_rate(schedule: str, level: np.ndarray, drawable: int) -> np.ndarray:
    """Return the probability that a token flips at each level, within 1e-12.

    P is analytic in µ, so its interpolation at Chebyshev nodes converges geometrically.

    Args:
        schedule: A schedule of `mu_of`, or "flip" if the level itself is the probability.
        level: float64[k].
        drawable: The number of ids that can be drawn.

    Returns:
        float64[k].
    """
    if schedule == "flip":
        return np.asarray(level, np.float64)
    mu = np.minimum(mu_of(schedule, level), _FAR)
    if mu.size <= _NODES:
        return flip_probability(mu, drawable)
    # This import takes 4 ms, and other tasks do not need it.
    from numpy.polynomial.chebyshev import chebinterpolate, chebval

    middle, half = (mu.max() + mu.min()) / 2, (mu.max() - mu.min()) / 2

    def at(x: np.ndarray) -> Any:
        return flip_probability(middle + half * x, drawable)

    series = chebinterpolate(at, _NODES - 1)
    return np.clip(chebval((mu - middle) / half, series), 0.0, 1.0)


def resolve(parameters: Mapping[str, Any], ids: Ids) -> dict[str, Any]:
    """Return the values that the plan stores.

    Args:
        parameters: The task's parameters.
        ids: The ids that objectives write.

    Returns:
        A dict with three keys. "flip_thresholds" has ⌊P · 2⁴⁰⌋ for FLIP_STEPS evenly spaced levels
        in noise_range. "flip_rate" is the mean of P over these levels. "alpha" has
        (P_keep − 1/V) V / (V − 1) at both ends of noise_range, with P_keep = 1 − P.

    Raises:
        RecipeError: If the vocabulary has fewer than two ordinary tokens.
    """
    if len(ids.for_noise.ordinary) < 2:
        raise RecipeError(
            "uniform_diffusion replaces tokens with other ordinary tokens, but the vocabulary"
            " has fewer than two\n"
            "hint: use a tokenizer with more tokens"
        )
    low, high = parameters["noise_range"]
    v, steps = ids.for_noise.drawable, noise.FLIP_STEPS
    # Each step has the rate at its middle. With a single level, one computation serves all steps.
    level = low + (high - low) * (np.arange(steps) + 0.5) / steps
    if low == high:
        rate = np.full(steps, flip_rate(parameters["schedule"], level[:1], v)[0])
    else:
        rate = flip_rate(parameters["schedule"], level, v)
    ends = flip_rate(parameters["schedule"], np.array([low, high]), v)
    return {
        "flip_thresholds": [int(t) for t in noise.thresholds(np.clip(rate, 0.0, 1.0))],
        "flip_rate": float(np.mean(rate)),
        "alpha": [float((1 - p - 1 / v) * v / (v - 1)) for p in ends],
    }


def check(parameters: Mapping[str, Any], where: str) -> None:
    """Check that tokens can flip at the levels of noise_range.

    Args:
        parameters: The task's parameters.
        where: The task's name, for error messages.

    Raises:
        RecipeError: If noise_range ends at 0.
    """
    low, high = parameters["noise_range"]
    if high == 0:
        raise RecipeError(
            f"{where}.noise_range = [{low:g}, {high:g}]: nothing would be replaced, so its end"
            " must be above 0\n"
            "hint: give an end above 0, as in [0, 1]"
        )


def forecast(task: Task, n: int) -> dict[str, tuple[float, float]]:
    """Return the wanted and the realized flip rate, as means over the levels. Both are equal.

    Args:
        task: The task.
        n: Tokens of a segment.

    Returns:
        {"flip_rate": (wanted, realized)}.
    """
    rate = task.resolved.get("flip_rate") or resolve(task.parameters, task.ids)["flip_rate"]
    return {"flip_rate": (rate, rate)}


def mean_weight(task: Task) -> float:
    """Return the mean loss weight over the levels of noise_range, or 1 without weighting."""
    if task.parameters["weighting"] == "none":
        return 1.0
    low, high = task.parameters["noise_range"]
    level = low + (high - low) * (np.arange(noise.FLIP_STEPS) + 0.5) / noise.FLIP_STEPS
    return float(noise.view_scale(level, task.ids.for_noise.drawable).mean())


OBJECTIVE = Objective(
    name=SCHEDULE.name,
    attention=SCHEDULE.attention,
    constant=True,
    parameters=SCHEDULE.parameters,
    noise=partial(SCHEDULE.draw, write=flip),
    mean_weight=mean_weight,
    resolve=resolve,
    forecast=forecast,
    check=check,
)
