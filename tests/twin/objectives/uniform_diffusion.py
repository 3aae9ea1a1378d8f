"""uniform_diffusion: candidates flip to other ordinary tokens; the plan's flip thresholds, by
another rule of integration.

`parameters` of a segment: noise_range, schedule, loss_on, weighting. What the plan works out:
flip_thresholds.
"""

import math
from bisect import bisect_left

from tests.twin.chance import NOISE_LEVEL, REPLACEMENT, integers, uniform40

REACH, INTERVALS = 12.0, 6000
FAR = 20.0  # beyond this µ nothing flips
TOLERANCE = 1e-10
"""Of a probability."""


def law(n, facts):
    return n


def noise(task, ids, segments, trainable, tokens, loss_mask, epoch):
    parameters, (_, ordinary) = task["parameters"], ids
    thresholds = task["resolved"]["flip_thresholds"]  # one a step of the level
    low, high = parameters["noise_range"]
    steps = len(thresholds)
    result: list[tuple] = []
    for key, at, count, *_ in segments:
        step = integers(key, NOISE_LEVEL, 0, steps, epoch)
        level = low + (high - low) * (step + 0.5) / steps
        for i in range(count):
            slot = at + i
            if trainable is not None and not trainable[slot]:
                continue
            flips = uniform40(key, i, epoch) < thresholds[step]
            loss_mask[slot] = int(flips or parameters["loss_on"] == "all")
            if flips:
                tokens[slot] = other(key, i, tokens[slot], ordinary, epoch)
        view_scale = parameters["weighting"] == "view_scale"
        result.append(
            (level, level / (len(ordinary) * (1 - level) + level) if view_scale else 1.0, [])
        )
    return result


def other(key, i, token, ordinary, epoch):
    """Candidate i's new token: number i, uniform over the ordinary ids (ascending) without the
    token itself."""
    place = bisect_left(ordinary, token)
    if place == len(ordinary) or ordinary[place] != token:
        return ordinary[integers(key, REPLACEMENT, i, len(ordinary), epoch)]
    number = integers(key, REPLACEMENT, i, len(ordinary) - 1, epoch)
    return ordinary[number + 1 if number >= place else number]


def flip_probability(mu, drawable):
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


def flip_rate(schedule, level, drawable):
    """The probability that a token flips at a level of a schedule."""
    if schedule == "flip":
        return level
    signal = 1 - level
    mu = signal / level if schedule == "linear" else signal / math.sqrt(1 - signal * signal)
    return flip_probability(min(mu, FAR), drawable)


def differences(task, drawable):
    """What is wrong with a task's flip thresholds, looked at in a few places."""
    found = []
    stored, (low, high) = task["resolved"]["flip_thresholds"], task["parameters"]["noise_range"]
    for k in sorted({0, len(stored) // 3, len(stored) // 2, len(stored) - 1}):
        level = low + (high - low) * (k + 0.5) / len(stored)
        rate = flip_rate(task["parameters"]["schedule"], level, drawable)
        if abs(stored[k] / 2**40 - rate) > TOLERANCE:
            found.append(
                f"task {task['name']!r}: flip threshold {k} is {stored[k]}, the twin's"
                f" {int(rate * 2**40)}"
            )
    return found
