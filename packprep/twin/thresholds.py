"""The flip thresholds of uniform diffusion, which the plan stores, by another rule of integration."""

import math
from collections.abc import Mapping
from typing import Any

REACH, INTERVALS = 12.0, 6000
FAR = 20.0  # beyond this µ nothing flips
TOLERANCE = 1e-10
"""Of a probability."""


def flip_probability(mu: float, drawable: int) -> float:
    """P = ∫ φ(x − µ) (1 − Φ(x)^(V − 1)) dx by Simpson's rule; V are the ids that can be drawn."""
    step = 2 * REACH / INTERVALS
    total = 0.0
    for i in range(INTERVALS + 1):
        z = -REACH + i * step
        above = 0.5 * math.erfc((z + mu) / math.sqrt(2))
        some_other = 1.0 if above >= 1 else -math.expm1((drawable - 1) * math.log1p(-above))
        weight = 1 if i in (0, INTERVALS) else 4 if i % 2 else 2
        total += weight * math.exp(-z * z / 2) * some_other
    return total * step / 3 / math.sqrt(2 * math.pi)


def flip_rate(schedule: str, level: float, drawable: int) -> float:
    """The probability that a token flips at a level of a schedule."""
    if schedule == "flip":
        return level
    kept = 1 - level
    mu = kept / level if schedule == "linear" else kept / math.sqrt(1 - kept * kept)
    return flip_probability(min(mu, FAR), drawable)


def differences(plan: Mapping[str, Any]) -> list[str]:
    """What is wrong with a plan's flip thresholds, looked at in a few places of each task's."""
    found = []
    drawable = plan["vocabulary"]["vocab_size"] - len(set(plan["vocabulary"]["special_ids"]))
    for task in plan["tasks"]:
        if task["objective"] != "uniform_diffusion":
            continue
        stored, (low, high) = task["resolved"]["flip_thresholds"], task["parameters"]["noise_range"]
        for k in sorted({0, len(stored) // 3, len(stored) // 2, len(stored) - 1}):
            level = low + (high - low) * (k + 0.5) / len(stored)
            rate = flip_rate(task["parameters"]["schedule"], level, drawable)
            if abs(stored[k] / 2**40 - rate) > TOLERANCE:
                found.append(
                    f"task {task['name']!r}: flip threshold {k} is {stored[k]}, the twin's {int(rate * 2**40)}"
                )
    return found
