"""block_diffusion: candidates of the first copy are noised by their block's level; the second is
clean.

`parameters` of a segment: noise_range, block_length, canvas, noise, half_life, complementary,
shift, weighting, noise_eos, block_origin, eos_fill.
"""

from tests.twin.chance import (
    NOISE_LEVEL,
    NOISE_LOW,
    exponential,
    power_of_half,
    quantised,
    threshold,
    uniform40,
    uniforms,
    words,
)
from tests.twin.objectives.masked_diffusion import replaced

COPIES = 2
SUPERVISED = True


def law(n, facts):
    return n


def labels(slots, task, pad):
    """What the slots of both copies predict: themselves, or the next of their copy."""
    if not task["parameters"]["shift"]:
        return list(slots)
    half = len(slots) // 2
    return [*slots[1:half], pad, *slots[half + 1 :], pad]


def noise(task, ids, segments, trainable, tokens, loss_mask, epoch):
    parameters, (mask_id, ordinary) = task["parameters"], ids
    low, high = (1.0, 1.0) if parameters["noise"] == "all" else parameters["noise_range"]
    length, uniform = parameters["block_length"], parameters["canvas"] == "uniform"
    inverse = parameters["complementary"] and epoch % 2 == 1
    epoch -= inverse
    result = []
    for key, at, count, _, skipped, half in segments:
        flags = None if trainable is None else trainable[at - skipped : at - skipped + half]
        block_of_slot = numbers(half, skipped, flags, parameters)
        levels = [
            quantised(low + (high - low) * uniforms(key, NOISE_LEVEL, block, epoch))
            for block in range(max((b for b in block_of_slot if b is not None), default=-1) + 1)
        ]
        block_of = block_of_slot[skipped : skipped + count]
        if parameters["noise"] == "position":
            chosen = soonest(key, block_of, levels, parameters["half_life"] * length, epoch)
        else:
            chosen = [
                block_of[i] is not None
                and uniform40(key, i, epoch) < threshold(levels[block_of[i]])
                for i in range(count)
            ]
        for i in range(count):
            if flags is not None and not flags[skipped + i]:
                continue
            hit = chosen[i] != inverse and (uniform or tokens[at + i] != mask_id)
            if hit:
                tokens[at + i] = replaced(
                    key, i, None, (0.0, 1.0, 0.0) if uniform else (1.0,), mask_id, ordinary, epoch
                )
            # in the segment, of the slot that predicts it
            place = skipped + i - int(parameters["shift"])
            if place >= 0 and (hit or uniform):
                loss_mask[at - skipped + place] = 1
        levels = [1.0 - level if inverse else level for level in levels]
        weighted = parameters["weighting"] == "1/p"
        of_blocks = [(level, 1.0 / level if weighted else 1.0) for level in levels]
        result.append((1.0, 1.0, []) if parameters["noise"] == "all" else (0.0, 1.0, of_blocks))
    return result


def numbers(half, before, flags, parameters):
    """The block of each slot of a half; None of a slot that is in none.

    flags: of each slot, whether it may be trained; None where no document of the shard says so.
    before: the slots of bos and mode token.
    """
    length = parameters["block_length"]
    if flags is None or parameters["block_origin"] != "answer":
        return [t // length for t in range(half)]
    found, block, t = [None] * half, 0, 0
    while t < half:
        if not flags[t]:
            t += 1
            continue
        first = t
        while t < half and flags[t]:
            t += 1
        if first <= before:
            first = 0
        for slot in range(first, t):
            found[slot] = block + (slot - first) // length
        block = found[t - 1] + 1
    return found


def soonest(key, block_of, levels, half_life, epoch):
    """Whether each candidate is among the round(level · n) of its block's n that arrive first;
    later ones are faster."""
    chosen = [False] * len(block_of)
    for block in sorted(set(block_of) - {None}):
        level, mine = levels[block], [i for i, b in enumerate(block_of) if b == block]
        slower, scale, times = power_of_half((1.0 - level) / half_life), 1.0, []
        for i in mine:
            times.append((exponential(words(key, NOISE_LOW, i, epoch)) * scale, i))
            scale *= slower
        for _, i in sorted(times)[: round(level * len(mine))]:
            chosen[i] = True
    return chosen
