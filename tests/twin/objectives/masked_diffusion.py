"""masked_diffusion: candidates give way to the mask, each with the segment's probability or exactly
so many of them.

`parameters` of a segment: noise_range, stratified, exact_count, epsilon, replace, weighting.
"""

from fractions import Fraction
from math import floor

from tests.twin.chance import (
    NOISE_LEVEL,
    NOISE_LOW,
    REPLACEMENT,
    STRATUM,
    bits64,
    integers,
    permute,
    quantised,
    threshold,
    uniform40,
    uniforms,
    words,
)

SUPERVISED = True


def law(n, facts):
    return n


def noise(task, ids, segments, trainable, tokens, loss_mask, epoch):
    parameters, (mask_id, ordinary) = task["parameters"], ids
    low, high = parameters["noise_range"]
    if parameters["stratified"]:
        shares = shares_of_row(segments, task["number"], epoch)
    else:
        shares = [uniforms(key, NOISE_LEVEL, 0, epoch) for key, *_ in segments]
    result: list[tuple] = []
    for (key, at, count, *_), share in zip(segments, shares, strict=True):
        ratio = low + (high - low) * share
        level = quantised(ratio)
        candidates = [
            i
            for i in range(count)
            if (trainable is None or trainable[at + i]) and tokens[at + i] != mask_id
        ]
        if parameters["exact_count"]:
            ascending = sorted(candidates, key=lambda i: (words(key, NOISE_LOW, i, epoch), i))
            chosen = sorted(ascending[: max(int(len(candidates) * ratio), 1)])
            probability = len(chosen) / len(candidates) if candidates else 1.0
        else:
            probability = (1.0 - parameters["epsilon"]) * level + parameters["epsilon"]
            limit = threshold(probability)
            chosen = [i for i in candidates if uniform40(key, i, epoch) < limit]
        for i in chosen:
            loss_mask[at + i] = 1
            tokens[at + i] = replaced(
                key, i, tokens[at + i], parameters["replace"], mask_id, ordinary, epoch
            )
        weight = 1.0 / max(probability, 2.0**-24) if parameters["weighting"] == "1/p" else 1.0
        result.append((level, weight, []))
    return result


def shares_of_row(segments, task, epoch):
    """Stratified uniforms: (u + π(j) / m) mod 1 for the j-th of the m segments of a row."""
    shares: list[float] = []
    for _, _, _, row, *_ in segments:
        mine = [s for s in segments if s[3] == row]
        first = mine[0][0]
        j = len([s for s in segments[: len(shares)] if s[3] == row])
        shift = uniforms(first, STRATUM, 4 * task, epoch)
        place = permute(j, len(mine), bits64(first, STRATUM, task + 65536, epoch))
        share = Fraction(shift) + Fraction(quantised(place / len(mine)))
        shares.append(float(share if share < 1 else share - 1))
    return shares


def replaced(key, i, token, shares, mask_id, ordinary, epoch):
    """The mask, any ordinary token, or the token itself, by number 2i; which ordinary token by
    number 2i + 1."""
    if shares[0] >= 1:
        return mask_id
    draw = words(key, REPLACEMENT, 2 * i, epoch)
    if draw < floor(shares[0] * 2**32):
        return mask_id
    if draw < floor((shares[0] + shares[1]) * 2**32):
        return ordinary[integers(key, REPLACEMENT, 2 * i + 1, len(ordinary), epoch)]
    return token
