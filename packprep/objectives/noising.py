"""Compiled writers of same-position noise.

The writers `mask`, `flip` and `noise_blocks` give the same results as the NumPy writers with these
names in `dataset/epochs/noise.py`, and have the same signatures. Render, verify and replay use the
writers of this file. Resampling in a trainer uses the NumPy writers, or the writers of this file if
`accelerate` selects compiled kernels. The schedules in `dataset/epochs/noise.py` call either writer
and compute the loss weights.

The candidates of a segment are neighbouring slots, numbered from 0. An allowed candidate is a
candidate that may be noised. A hit is a candidate that is noised.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from packprep.dataset.blocks import Blocks, candidate_ranges
from packprep.dataset.epochs.noise import ONE, BlockSchedule, NoiseIds, Target, thresholds
from packprep.kernel import below, flags_as_bits, kernel, philox_blocks, trailing_zeros, word
from packprep.randomness import LN_2, NOISE, NOISE_LEVEL, NOISE_LOW, REPLACEMENT, ROOTS_OF_HALF

_1, _32 = np.uint64(1), np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(ONE)
_TICK = 2.0**-24
# Bit patterns of a float64: all bits of the fraction, and the exponent of numbers in [½, 1).
_MANTISSA, _HALF = ((1 << 52) - 1, 1022 << 52)


class _Replacement(NamedTuple):
    """Settings for noised slots: each gets the mask, gets an ordinary token, or stays unchanged."""

    mask_below: Any  # uint64: a word below this value writes the mask
    ordinary_below: Any  # uint64: any other word below it writes an ordinary token
    has_mask: bool
    mask_id: Any  # in the dtype of the rows; 0 without a mask
    ordinary: np.ndarray  # int32[v]: the ordinary ids


class _Buffers(NamedTuple):
    """Arrays that a kernel allocates once per call and uses for each segment in turn."""

    words: np.ndarray  # uint32: random words
    top: np.ndarray  # uint8[longest + 64]: high byte of each candidate's threshold
    hit: np.ndarray  # uint8[longest + 64]: 1 where a candidate is noised
    allowed: np.ndarray  # uint8[longest]: 1 where a candidate may be noised
    order: np.ndarray  # int64[longest]: candidates, sorted by their random word
    time: np.ndarray  # float64[longest]: arrival time of each candidate


@kernel(inline=True)
def _largest(values):
    """Return the largest of non-negative numbers, or 0 for an empty array."""
    largest = np.int64(0)
    for i in range(values.shape[0]):
        largest = max(largest, values[i])
    return largest


@kernel(inline=True)
def _buffers(longest, blocks):
    """Return buffers for segments of up to `longest` candidates and `blocks` blocks."""
    return _Buffers(
        np.empty(max(((longest + 15) >> 4) * 32, blocks) + 64, np.uint32),
        np.empty(longest + 64, np.uint8),
        np.empty(longest + 64, np.uint8),
        np.empty(longest, np.uint8),
        np.empty(longest, np.int64),
        np.empty(longest, np.float64),
    )


@kernel(inline=True)
def _bits(flags, begin, count):
    """Return flags[begin : min(begin + 64, count)] as the bits of a uint64.

    `flags` is uint8 and has at least count + 64 entries.
    """
    bits = flags_as_bits(flags, begin)
    return bits & ((_1 << np.uint64(count - begin)) - _1) if count - begin < 64 else bits


@kernel(inline=True)
def _hit_below(key, lengths, threshold, epoch, buffers):
    """Set hit[j] = 1 iff candidate j's 40-bit random number is below the threshold of its range.

    Range r has the next `lengths[r]` candidates and the threshold `threshold[r]`.
    """
    high, top, hit = buffers.words.view(np.uint8), buffers.top, buffers.hit
    count = np.int64(0)
    for i in range(lengths.shape[0]):
        count += lengths[i]
    philox_blocks(key, NOISE, epoch, (count + 15) >> 4, buffers.words)
    # Write the high byte of each candidate's threshold to `top`.
    begin = np.int64(0)
    for i in range(lengths.shape[0]):
        end, limit = begin + lengths[i], threshold[i]
        if limit >= _ONE:  # The high part of the limit would not fit into a byte.
            top[begin:end] = 1
            high[begin:end] = 0
        else:
            top[begin:end] = np.uint8(limit >> _32)
        begin = end
    # Where both bytes are equal, the low word decides and writes bytes that differ.
    for j in range(count):
        hit[j] = high[j] == top[j]
    number = np.int64(0)
    range_end = lengths[0]
    for begin_of_64 in range(0, count, 64):
        equal_bits = _bits(hit, begin_of_64, count)
        while equal_bits:
            place = begin_of_64 + np.int64(trailing_zeros(equal_bits))
            equal_bits &= equal_bits - _1
            while place >= range_end:
                number += 1
                range_end += lengths[number]
            low_limit = threshold[number] & _LOW
            if np.uint64(word(key, NOISE_LOW, place, epoch, 0)) < low_limit:
                high[place], top[place] = 0, 1
    for j in range(count):
        hit[j] = high[j] < top[j]


@kernel
def _hit_exact_count(key, count, ratio, epoch, buffers):
    """Set hit[j] = 1 for the k allowed candidates with the smallest random words.

    With n allowed candidates, k is max(⌊n · ratio⌋, 1). Return k / n, or 1 if n is 0.
    """
    words, hit, allowed, order = buffers.words, buffers.hit, buffers.allowed, buffers.order
    philox_blocks(key, NOISE_LOW, epoch, (count + 3) >> 2, words)
    # Count the allowed words by their high byte.
    words_of_byte = np.zeros(256, np.int64)
    candidates = np.int64(0)
    for j in range(count):
        words_of_byte[words[j] >> np.uint32(24)] += allowed[j]
        candidates += allowed[j]
    if candidates == 0:
        hit[:count] = 0
        return 1.0
    # Find the byte that holds the last hit, and how many hits it holds.
    remaining = max(np.int64(np.float64(candidates) * ratio), np.int64(1))
    share = np.float64(remaining) / np.float64(candidates)
    byte = np.int64(0)
    while remaining > words_of_byte[byte]:
        remaining -= words_of_byte[byte]
        byte += 1
    # Sort the few words of that byte by insertion.
    sorted_words = np.int64(0)
    for j in range(count):
        if np.int64(words[j] >> np.uint32(24)) == byte and allowed[j]:
            place = sorted_words
            while place > 0 and words[order[place - 1]] > words[j]:
                order[place] = order[place - 1]
                place -= 1
            order[place] = j
            sorted_words += 1
    least_word = np.uint32(byte << 24)
    for j in range(count):
        hit[j] = (words[j] < least_word) & allowed[j]
    for i in range(remaining):
        hit[order[i]] = 1
    return share


@kernel(inline=True)
def _mark_trainable(begin, count, trainable, allowed):
    """Set allowed[j] = 1 if candidate j may be trained, otherwise 0.

    If `trainable` is empty, all candidates may be trained.
    """
    first_slot = np.uint64(begin)
    if trainable.shape[0] == 0:
        allowed[:count] = 1
        return
    for j in range(np.uint64(count)):
        allowed[j] = trainable[first_slot + j] != 0


@kernel(inline=True)
def _exclude_mask(begin, count, tokens, mask_id, flags):
    """Set flags[j] = 0 if the original token of candidate j is the mask.

    Such a candidate would have the mask as its label, and nothing can be learnt from it.
    """
    first_slot = np.uint64(begin)
    for j in range(np.uint64(count)):
        flags[j] &= tokens[first_slot + j] != mask_id


@kernel(inline=True)
def _put(begin, count, hit, value, tokens, loss_mask):
    """Write `value` to the token and 1 to the loss mask of each candidate with a hit."""
    first_slot = np.uint64(begin)
    for j in range(np.uint64(count)):
        loss_mask[first_slot + j] |= hit[j]
    for j in range(np.uint64(count)):
        tokens[first_slot + j] = value if hit[j] else tokens[first_slot + j]


@kernel(inline=True)
def _replace(key, begin, count, replacement, epoch, buffers, tokens):
    """Replace the token of each hit by the mask or by an ordinary token, or keep the token.

    For candidate j, random word 2j of the purpose REPLACEMENT decides which of the three happens.
    Random word 2j + 1 selects the ordinary token.
    """
    words, ordinary = buffers.words, replacement.ordinary
    philox_blocks(key, REPLACEMENT, epoch, (count + 1) >> 1, words)
    # Visit only the hits. The words of a candidate depend on its index, not on other hits.
    for begin_of_64 in range(0, count, 64):
        hit_bits = _bits(buffers.hit, begin_of_64, count)
        while hit_bits:
            j = begin_of_64 + np.int64(trailing_zeros(hit_bits))
            hit_bits &= hit_bits - _1
            # A word above both limits keeps the token, which is trained all the same.
            kind_word = np.uint64(words[2 * j])
            if kind_word < replacement.mask_below:
                tokens[begin + j] = replacement.mask_id
            elif kind_word < replacement.ordinary_below:
                first_word = np.uint64(words[2 * j + 1])
                tokens[begin + j] = ordinary[
                    below(first_word, key, REPLACEMENT, 2 * j + 1, ordinary.shape[0], epoch)
                ]


@kernel
def _mask(target, ratio, threshold, replacement, epoch, share):
    """Write the noise of the function `mask`.

    With `exact_count`, `ratio` has a ratio for each segment. `share` then receives, for each
    segment, the share of its allowed candidates that are noised, or 1 if no candidate is allowed.
    Without `exact_count`, both arrays are empty, and `threshold` decides which candidates are
    noised.
    """
    segments, tokens, loss_mask = target.segments, target.tokens, target.loss_mask
    buffers = _buffers(_largest(segments.count), 0)
    hit, allowed = buffers.hit, buffers.allowed
    for i in range(segments.key.shape[0]):
        key, begin, n = segments.key[i], segments.at[i], segments.count[i]
        # Select the candidates that may be noised.
        _mark_trainable(begin, n, target.trainable, allowed)
        if replacement.has_mask:
            _exclude_mask(begin, n, tokens, replacement.mask_id, allowed)
        # Select the candidates that are noised.
        if ratio.shape[0] > 0:
            share[i] = _hit_exact_count(key, n, ratio[i], epoch, buffers)
        else:
            _hit_below(key, segments.count[i : i + 1], threshold[i : i + 1], epoch, buffers)
            for j in range(n):
                hit[j] &= allowed[j]
        # Replace them.
        if replacement.mask_below > _LOW:
            _put(begin, n, hit, replacement.mask_id, tokens, loss_mask)
        else:
            for j in range(n):
                loss_mask[begin + j] |= hit[j]
            _replace(key, begin, n, replacement, epoch, buffers, tokens)


def mask(
    target: Target,
    probability: np.ndarray,
    ratio: np.ndarray | None,
    shares: tuple[float, float, float],
    ids: NoiseIds,
    epoch: int = 0,
) -> np.ndarray | None:
    """Write the same noise as `noise.mask`, with a compiled kernel.

    Args:
        target: As in `noise.mask`.
        probability: As in `noise.mask`.
        ratio: As in `noise.mask`.
        shares: As in `noise.mask`.
        ids: As in `noise.mask`.
        epoch: As in `noise.mask`.

    Returns:
        As from `noise.mask`.
    """
    _check(target)
    share = np.empty(0 if ratio is None else len(ratio))
    _mask(
        _with_flags(target),
        np.empty(0) if ratio is None else ratio,
        thresholds(probability),
        _replacement(shares, ids, target.tokens.dtype),
        epoch,
        share,
    )
    return None if ratio is None else share


@kernel
def _flip(target, threshold, loss_on_all, ids, epoch):
    """Write the noise of the function `flip`."""
    segments, tokens, loss_mask = target.segments, target.tokens, target.loss_mask
    ordinary, rank = ids.ordinary, ids.rank
    buffers = _buffers(_largest(segments.count), 0)
    words, hit, allowed = buffers.words, buffers.hit, buffers.allowed
    for i in range(segments.key.shape[0]):
        key, begin, n = segments.key[i], segments.at[i], segments.count[i]
        # Select the candidates that flip, and the candidates that are trained.
        _hit_below(key, segments.count[i : i + 1], threshold[i : i + 1], epoch, buffers)
        _mark_trainable(begin, n, target.trainable, allowed)
        for j in range(n):
            hit[j] &= allowed[j]
        trained = allowed if loss_on_all else hit
        for j in range(np.uint64(n)):
            loss_mask[np.uint64(begin) + j] |= trained[j]
        # Replace each hit by another token, drawn from the ordinary tokens except its own.
        philox_blocks(key, REPLACEMENT, epoch, (n + 3) >> 2, words)
        for begin_of_64 in range(0, n, 64):
            hit_bits = _bits(hit, begin_of_64, n)
            while hit_bits:
                place = begin_of_64 + np.int64(trailing_zeros(hit_bits))
                hit_bits &= hit_bits - _1
                token = np.int64(tokens[begin + place])
                # A token without a rank is not ordinary, so all ordinary tokens differ from it.
                old_rank = np.int64(rank[token]) if token < rank.shape[0] else np.int64(-1)
                other_count = ordinary.shape[0] - np.int64(old_rank >= 0)
                number = below(np.uint64(words[place]), key, REPLACEMENT, place, other_count, epoch)
                number += np.int64((old_rank >= 0) & (number >= old_rank))
                tokens[begin + place] = ordinary[number]


def flip(
    target: Target, threshold: np.ndarray, loss_on_all: bool, ids: NoiseIds, epoch: int = 0
) -> None:
    """Write the same noise as `noise.flip`, with a compiled kernel.

    Args:
        target: As in `noise.flip`.
        threshold: As in `noise.flip`.
        loss_on_all: As in `noise.flip`.
        ids: As in `noise.flip`.
        epoch: As in `noise.flip`.
    """
    _check(target)
    _flip(_with_flags(target), threshold, loss_on_all, ids, epoch)


@kernel
def _exponentials(words, count, time):
    """Write the result of `randomness.exponentials` for words[:count] to `time`.

    The loop has no branch, so the compiler can vectorize it.
    """
    for j in range(count):
        # 2 w + 1 is exact in float64. Its bits give the exponent, and a mantissa in [½, 1).
        bits = np.float64(2.0 * np.float64(words[j]) + 1.0).view(np.int64)
        exponent, mantissa = (
            (bits >> 52) - 1022,
            np.int64((bits & _MANTISSA) | _HALF).view(np.float64),
        )
        z = (mantissa - 1.0) / (mantissa + 1.0)
        square = z * z
        # One step per line: the compiler runs each for several words at once.
        series = 1.0 / 21.0 * square + 1.0 / 19.0
        series = series * square + 1.0 / 17.0
        series = series * square + 1.0 / 15.0
        series = series * square + 1.0 / 13.0
        series = series * square + 1.0 / 11.0
        series = series * square + 1.0 / 9.0
        series = series * square + 1.0 / 7.0
        series = series * square + 1.0 / 5.0
        series = series * square + 1.0 / 3.0
        series = series * square + 1.0
        time[j] = np.float64(33 - exponent) * LN_2 - 2.0 * z * series


@kernel(inline=True)
def _up_to(values, limit):
    """Return how many values are at most `limit`."""
    values_below = np.int64(0)
    for j in range(values.shape[0]):
        values_below += np.int64(values[j] <= limit)
    return values_below


@kernel
def _mark_least(values, k, hit):
    """Set hit[j] = 1 iff values[j] is one of the k smallest; ties are broken by index.

    All values are above −1. Bisection finds the k-th smallest value, because counting how many
    values are at most a limit is fast.
    """
    low, high, limit = -1.0, np.inf, 1.0
    marks = _up_to(values, limit)
    while marks != k:
        if marks < k:
            low = limit
        else:
            high = limit
        limit = 0.5 * (low + high) if high < np.inf else 2.0 * low
        if not low < limit < high:  # `low` and `high` are adjacent, and values are tied at `high`.
            limit = high
            marks = _up_to(values, limit)
            break
        marks = _up_to(values, limit)
    for j in range(values.shape[0]):
        hit[j] = values[j] <= limit
    # Clear the last of the tied values.
    j = values.shape[0]
    while marks > k:
        j -= 1
        if values[j] == limit:
            hit[j] = 0
            marks -= 1


@kernel(inline=True)
def _power_of_half(x):
    """Return `randomness.power_of_half` of one number."""
    whole_part = np.floor(x)
    bits, result = np.int64((x - whole_part) * 2.0**32), 1.0
    for i in range(32):  # A factor of 1 changes nothing and needs no branch.
        result *= ROOTS_OF_HALF[i] if bits >> (31 - i) & 1 else 1.0
    return math.ldexp(result, -int(whole_part))


@kernel
def _hit_soonest(key, lengths, level, schedule, epoch, buffers):
    """Set hit[j] = 1 iff candidate j is one of the first candidates of its range to arrive.

    Range r has the next n = `lengths[r]` candidates. The first round(`level[r]` · n) of them to
    arrive are hits. Candidate i arrives at an exponential random time, divided by a power of two
    that grows with i. Of two candidates with the same time, the candidate with the lower index
    arrives first.
    """
    time, hit = buffers.time, buffers.hit
    # Draw an arrival time for each candidate of the segment.
    count = np.int64(0)
    for r in range(lengths.shape[0]):
        count += lengths[r]
    philox_blocks(key, NOISE_LOW, epoch, (count + 3) >> 2, buffers.words)
    _exponentials(buffers.words, count, time)
    begin = np.int64(0)
    for r in range(lengths.shape[0]):
        # The number of hits of a range is exact. Only their positions are random.
        end, k = begin + lengths[r], np.int64(np.rint(level[r] * lengths[r]))
        hit[begin:end] = 0
        if k > 0:
            # Each time is scaled by a smaller factor than the time before it, so later candidates
            # tend to arrive first.
            rate = (1.0 - level[r]) / (schedule.half_life * schedule.block_length)
            slower, scale = _power_of_half(rate), 1.0
            for j in range(begin, end):
                time[j] *= scale
                scale *= slower
            _mark_least(time[begin:end], k, hit[begin:end])
        begin = end


@kernel(inline=True)
def _draw_levels(key, schedule, epoch, words, level, range_level, threshold):
    """Draw the level of each block of a segment.

    `level` receives the levels of the blocks. `range_level` and `threshold` receive the levels and
    the thresholds of all ranges: block b is range 2 b + 1. The other ranges, between blocks, get 0.
    """
    low, high, blocks = schedule.low, schedule.high, level.shape[0]
    # Ranges between blocks keep level 0, so none of their candidates is noised.
    range_level[: 2 * blocks + 1] = 0.0
    threshold[: 2 * blocks + 1] = 0
    if low < high:
        philox_blocks(key, NOISE_LEVEL, epoch, (blocks + 3) >> 2, words)
    for b in range(blocks):
        u = np.float64(words[b] >> np.uint32(8)) * _TICK if low < high else 0.0
        # Levels are multiples of 2⁻²⁴, so that float32 stores them exactly.
        drawn = np.floor((low + (high - low) * u) / _TICK) * _TICK
        level[b] = range_level[2 * b + 1] = drawn
        # Thresholds have 40 bits, as the random numbers of `_hit_below`.
        threshold[2 * b + 1] = np.uint64(np.floor(drawn * ONE))


@kernel
def _noise_blocks(target, blocks, lengths, schedule, replacement, epoch, level):
    """Write the noise of the function `noise_blocks`, and each block's level to `level`.

    `blocks` has the number of blocks of each segment, and `lengths` the `candidate_ranges`.
    """
    segments, tokens, loss_mask = target.segments, target.tokens, target.loss_mask
    most_blocks = _largest(blocks)
    buffers = _buffers(_largest(segments.count), most_blocks)
    range_level, threshold = np.empty(2 * most_blocks + 1), np.empty(2 * most_blocks + 1, np.uint64)
    hit, allowed = buffers.hit, buffers.allowed
    first_block, first_range = np.int64(0), np.int64(0)
    for i in range(segments.key.shape[0]):
        key, begin, n = segments.key[i], segments.at[i], segments.count[i]
        # Ranges alternate between gaps and blocks: 2 blocks have 5 ranges.
        ranges = 2 * blocks[i] + 1
        own_lengths = lengths[first_range : first_range + ranges]
        block_levels = level[first_block : first_block + blocks[i]]
        first_block, first_range = first_block + blocks[i], first_range + ranges
        _draw_levels(key, schedule, epoch, buffers.words, block_levels, range_level, threshold)
        # Select the candidates that are noised.
        _mark_trainable(begin, n, target.trainable, allowed)
        if schedule.half_life > 0:
            _hit_soonest(key, own_lengths, range_level, schedule, epoch, buffers)
        else:
            _hit_below(key, own_lengths, threshold, epoch, buffers)
        # With `inverse`, the other candidates are noised, so that two epochs complement each other.
        for j in range(n):
            hit[j] = (hit[j] ^ np.uint8(schedule.inverse)) & allowed[j]
        # Replace them and set the loss mask.
        if schedule.uniform:
            for j in range(np.uint64(n)):
                loss_mask[np.uint64(begin) + j] |= allowed[j]
            _replace(key, begin, n, replacement, epoch, buffers, tokens)
        else:
            _exclude_mask(begin, n, tokens, replacement.mask_id, hit)
            _put(begin, n, hit, replacement.mask_id, tokens, loss_mask)


def noise_blocks(
    target: Target, blocks: Blocks, schedule: BlockSchedule, ids: NoiseIds, epoch: int = 0
) -> np.ndarray:
    """Write the same noise as `noise.noise_blocks`, with a compiled kernel.

    Args:
        target: As in `noise.noise_blocks`.
        blocks: As in `noise.noise_blocks`.
        schedule: As in `noise.noise_blocks`.
        ids: As in `noise.noise_blocks`.
        epoch: As in `noise.noise_blocks`.

    Returns:
        The level of each block, float32[blocks].
    """
    _check(target)
    assert (target.before + target.segments.count <= target.length).all()
    lengths = candidate_ranges(blocks, target.before, target.segments.count)
    level = np.empty(len(blocks.begin), np.float32)  # exact for multiples of 2⁻²⁴ up to 1
    # Recipes may have integers here, which would compile another variant.
    floats: Any = {name: float(getattr(schedule, name)) for name in ("low", "high", "half_life")}
    shares = (0.0, 1.0, 0.0) if schedule.uniform else (1.0, 0.0, 0.0)
    replacement = _replacement(shares, ids, target.tokens.dtype)
    _noise_blocks(
        _with_flags(target),
        blocks.count,
        lengths,
        schedule._replace(**floats),
        replacement,
        epoch,
        level,
    )
    return np.float32(1.0) - level if schedule.inverse else level


def _replacement(
    shares: tuple[float, float, float], ids: NoiseIds, dtype: np.dtype
) -> _Replacement:
    """Return the `_Replacement` for shares of (mask, ordinary token, unchanged token)."""
    mask_share, ordinary_share, _ = shares
    return _Replacement(
        np.uint64(int(mask_share * 2**32)),
        np.uint64(int((mask_share + ordinary_share) * 2**32)),
        ids.mask >= 0,
        dtype.type(max(ids.mask, 0)),
        ids.ordinary,
    )


def _with_flags(target: Target) -> Target:
    """Return the target. If its `trainable` is None, replace `trainable` by an empty array.

    Because `trainable` always has the same type, each kernel is compiled only once.
    """
    return target if target.trainable is not None else target._replace(trainable=_NO_FLAGS)


_NO_FLAGS = np.empty(0, np.uint8)


def _check(target: Target) -> None:
    """Check that segments are inside the rows, because kernels do not check array bounds."""
    first_slots, count = target.segments.at, target.segments.count
    assert ((first_slots >= 0) & (count >= 0) & (first_slots + count <= len(target.tokens))).all()
