"""The laws of in-place noise, one candidate at a time, in plain Python numbers.

A segment is (key, first slot of its candidates, number of candidates, row). `may`, `tokens` and `loss_mask` are flat
lists; tokens and loss_mask are written.
"""

from bisect import bisect_left
from fractions import Fraction
from math import floor

from packprep.twin.chance import bits64, integers, permute, philox, uniforms, words

NOISE_LEVEL, NOISE, REPLACEMENT, STRATUM, NOISE_LOW = 16, 17, 18, 19, 21


def uniform40(key, i, epoch):
    """Candidate i's 40 bits: byte i % 16 of block i // 16, words little-endian, and below it the low word number i."""
    block = philox(key, [i // 16, 0, NOISE, epoch])
    high = b"".join(word.to_bytes(4, "little") for word in block)[i % 16]
    return high * 2**32 + words(key, NOISE_LOW, i, epoch)


def threshold(probability):
    return floor(Fraction(probability) * 2**40)


def quantised(level):
    """Cut to a multiple of 2⁻²⁴."""
    return floor(Fraction(level) * 2**24) / 2**24


def shares_of_row(segments, task, epoch):
    """Stratified uniforms: (u + π(j) / m) mod 1 for the j-th of the m segments of a row."""
    shares: list[float] = []
    for _, _, _, row in segments:
        mine = [s for s in segments if s[3] == row]
        first = mine[0][0]
        j = len([s for s in segments[: len(shares)] if s[3] == row])
        shift = uniforms(first, STRATUM, 4 * task, epoch)
        place = permute(j, len(mine), bits64(first, STRATUM, task + 65536, epoch))
        share = Fraction(shift) + Fraction(quantised(place / len(mine)))
        shares.append(float(share if share < 1 else share - 1))
    return shares


def masked_diffusion(task, parameters, mask_id, ordinary, segments, may, tokens, loss_mask, epoch):
    """(level, weight) of each segment."""
    low, high = parameters["noise_range"]
    if parameters["stratified"]:
        shares = shares_of_row(segments, task, epoch)
    else:
        shares = [uniforms(key, NOISE_LEVEL, 0, epoch) for key, _, _, _ in segments]
    result = []
    for (key, at, count, _), share in zip(segments, shares, strict=True):
        ratio = low + (high - low) * share
        level = quantised(ratio)
        candidates = [i for i in range(count) if (may is None or may[at + i]) and tokens[at + i] != mask_id]
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
            tokens[at + i] = replaced(key, i, tokens[at + i], parameters["replace"], mask_id, ordinary, epoch)
        weight = 1.0 / max(probability, 2.0**-24) if parameters["weighting"] == "1/p" else 1.0
        result.append((level, weight))
    return result


def replaced(key, i, token, shares, mask_id, ordinary, epoch):
    """The mask, any ordinary token, or the token itself, by number 2i; which ordinary token by number 2i + 1."""
    if shares[0] >= 1:
        return mask_id
    draw = words(key, REPLACEMENT, 2 * i, epoch)
    if draw < floor(shares[0] * 2**32):
        return mask_id
    if draw < floor((shares[0] + shares[1]) * 2**32):
        return ordinary[integers(key, REPLACEMENT, 2 * i + 1, len(ordinary), epoch)]
    return token


def uniform_diffusion(parameters, thresholds, ordinary, segments, may, tokens, loss_mask, epoch):
    """(level, weight) of each segment; thresholds: one a step of the level."""
    low, high = parameters["noise_range"]
    steps = len(thresholds)
    result = []
    for key, at, count, _ in segments:
        step = integers(key, NOISE_LEVEL, 0, steps, epoch)
        level = low + (high - low) * (step + 0.5) / steps
        for i in range(count):
            slot = at + i
            if may is not None and not may[slot]:
                continue
            flips = uniform40(key, i, epoch) < thresholds[step]
            loss_mask[slot] = int(flips or parameters["loss_on"] == "all")
            if flips:
                tokens[slot] = other(key, i, tokens[slot], ordinary, epoch)
        view_scale = parameters["weighting"] == "view_scale"
        result.append((level, level / (len(ordinary) * (1 - level) + level) if view_scale else 1.0))
    return result


def other(key, i, token, ordinary, epoch):
    """Candidate i's new token: number i, uniform over the ordinary ids (ascending) without the token itself."""
    place = bisect_left(ordinary, token)
    if place == len(ordinary) or ordinary[place] != token:
        return ordinary[integers(key, REPLACEMENT, i, len(ordinary), epoch)]
    number = integers(key, REPLACEMENT, i, len(ordinary) - 1, epoch)
    return ordinary[number + 1 if number >= place else number]


def block_diffusion(parameters, mask_id, segments, before, length, tokens, loss_mask, epoch):
    """[(level, weight) of each block] of each segment. before, length: slots of a half before its candidates, and all."""
    low, high = parameters["noise_range"]
    result = []
    for (key, at, count, _), skipped, whole in zip(segments, before, length, strict=True):
        blocks = []
        for block in range(-(-whole // parameters["block_length"])):
            level = quantised(low + (high - low) * uniforms(key, NOISE_LEVEL, block, epoch))
            blocks.append((level, 1.0 / level))
        for i in range(count):
            level = blocks[(skipped + i) // parameters["block_length"]][0]
            if tokens[at + i] != mask_id and uniform40(key, i, epoch) < threshold(level):
                tokens[at + i] = mask_id
                loss_mask[at + i] = 1
        result.append(blocks)
    return result
