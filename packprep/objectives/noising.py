"""The compiled writers of in-place noise: equal to the numpy ones of `dataset/epochs/noise.py`, and with
their signatures.

Which runs where (levels, probabilities and weights are computed by `dataset/epochs/noise.py` in both
cases):

    writer         render, verify, replay     redraw in a trainer
    mask           here                       dataset/epochs/noise.py
    flip           here                       dataset/epochs/noise.py
    noise_blocks   here                       dataset/epochs/noise.py
"""

import math

import numpy as np

from packprep.dataset.epochs.candidates import Candidates
from packprep.dataset.epochs.noise import ONE, BlockSchedule, NoiseIds, thresholds
from packprep.kernel import below, flags_as_bits, kernel, philox_blocks, trailing_zeros, word
from packprep.randomness import LN_2, NOISE, NOISE_LEVEL, NOISE_LOW, REPLACEMENT, ROOTS_OF_HALF

_1, _32 = np.uint64(1), np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(ONE)
_UNBLOCKED = 1 << 40  # a block that holds every segment
_TICK = 2.0**-24
# of a float64's bits: its fraction, and the exponent of ½ … 1
_MANTISSA, _HALF = ((1 << 52) - 1, 1022 << 52)


@kernel(inline=True)
def _bits(flags, begin, count):
    """uint64: flags[begin : min(begin + 64, count)] (uint8) as bits; flags: uint8[≥ count + 64]."""
    bits = flags_as_bits(flags, begin)
    return bits & ((_1 << np.uint64(count - begin)) - _1) if count - begin < 64 else bits


@kernel
def _below(key, count, before, block_length, limit, epoch, words, top, hit):
    """hit[j] (uint8) = 1 iff candidate j's 40-bit uniform lies below limit[(before + j) //
    block_length], j < count.

    words: uint32[≥ count / 4 + 32]; top, hit: uint8[count + 64]. The high byte decides; where it is
    equal to the threshold's, the low word does.
    """
    philox_blocks(key, NOISE, epoch, (count + 15) >> 4, words)
    high = words.view(np.uint8)
    begin = np.int64(0)
    while begin < count:
        block = (before + begin) // block_length
        end = np.int64(min((block + 1) * block_length - before, count))
        bound = limit[block]
        if bound >= _ONE:  # its top would be no byte
            top[begin:end] = 1
            high[begin:end] = 0
        else:
            top[begin:end] = np.uint8(bound >> _32)
        begin = end
    for j in range(count):
        hit[j] = high[j] == top[j]
    for part in range(0, count, 64):
        equal = _bits(hit, part, count)
        while equal:
            own = part + np.int64(trailing_zeros(equal))
            equal &= equal - _1
            if (
                np.uint64(word(key, NOISE_LOW, own, epoch, 0))
                < limit[(before + own) // block_length] & _LOW
            ):
                high[own], top[own] = 0, 1
    for j in range(count):
        hit[j] = high[j] < top[j]


@kernel
def _least(key, count, allowed, ratio, epoch, words, found, hit):
    """hit[j] (uint8) = 1 iff candidate j is one of the max(⌊candidates · ratio⌋, 1) allowed ones of
    least word.

    Gives the share of the allowed ones that is hit, 1 where there are none.

    The words' high bytes are counted; within the byte in which the last one lies, the few words are
    sorted.
    words: uint32[≥ count + 32]; found: int64[count].
    """
    philox_blocks(key, NOISE_LOW, epoch, (count + 3) >> 2, words)
    many = np.zeros(256, np.int64)
    candidates = np.int64(0)
    for j in range(count):
        many[words[j] >> np.uint32(24)] += allowed[j]
        candidates += allowed[j]
    if candidates == 0:
        hit[:count] = 0
        return 1.0
    wanted = max(np.int64(np.float64(candidates) * ratio), np.int64(1))
    share = np.float64(wanted) / np.float64(candidates)
    byte = np.int64(0)
    while wanted > many[byte]:
        wanted -= many[byte]
        byte += 1
    k = np.int64(0)
    for j in range(count):
        if np.int64(words[j] >> np.uint32(24)) == byte and allowed[j]:
            at = k
            while at > 0 and words[found[at - 1]] > words[j]:
                found[at] = found[at - 1]
                at -= 1
            found[at] = j
            k += 1
    least = np.uint32(byte << 24)
    for j in range(count):
        hit[j] = (words[j] < least) & allowed[j]
    for i in range(wanted):
        hit[found[i]] = 1
    return share


@kernel
def _allowed(at, count, trainable, has_mask, mask_id, tokens, out):
    """out[j] (uint8) = 1 iff candidate j may be noised: it may be trained, and is no mask."""
    begin = np.uint64(at)
    if has_mask:
        for j in range(np.uint64(count)):
            out[j] = tokens[begin + j] != mask_id
    else:
        out[:count] = 1
    if trainable.shape[0] > 0:
        for j in range(np.uint64(count)):
            out[j] &= trainable[begin + j] != 0


@kernel
def _put(at, count, hit, value, tokens, loss_mask):
    """Set `value` and loss where `hit` is 1."""
    begin = np.uint64(at)
    for j in range(np.uint64(count)):
        loss_mask[begin + j] |= hit[j]
    for j in range(np.uint64(count)):
        tokens[begin + j] = value if hit[j] else tokens[begin + j]


@kernel
def _replace(
    key, at, count, hit, mask_below, random_below, mask_id, ordinary, epoch, words, tokens
):
    """What each hit becomes: the mask, an ordinary token, or itself, by words 2j and 2j + 1 of
    REPLACEMENT."""
    philox_blocks(key, REPLACEMENT, epoch, (count + 1) >> 1, words)
    for begin in range(0, count, 64):
        hits = _bits(hit, begin, count)
        while hits:
            j = begin + np.int64(trailing_zeros(hits))
            hits &= hits - _1
            draw = np.uint64(words[2 * j])
            if draw < mask_below:
                tokens[at + j] = mask_id
            elif draw < random_below:
                of_two = np.uint64(words[2 * j + 1])
                tokens[at + j] = ordinary[
                    below(of_two, key, REPLACEMENT, 2 * j + 1, ordinary.shape[0], epoch)
                ]


@kernel
def _mask(
    segments_key,
    at,
    count,
    ratio,
    limit,
    mask_below,
    random_below,
    has_mask,
    mask_id,
    ordinary,
    trainable,
    tokens,
    loss_mask,
    epoch,
    longest,
    share,
):
    words = np.empty(((longest + 15) >> 4) * 32 + 64, np.uint32)
    top, hit, allowed = (
        np.empty(longest + 64, np.uint8),
        np.empty(longest + 64, np.uint8),
        np.empty(longest, np.uint8),
    )
    found = np.empty(longest if ratio.shape[0] > 0 else 0, np.int64)
    for i in range(count.shape[0]):
        key, begin, n = segments_key[i], at[i], count[i]
        _allowed(begin, n, trainable, has_mask, mask_id, tokens, allowed)
        if ratio.shape[0] > 0:
            share[i] = _least(key, n, allowed, ratio[i], epoch, words, found, hit)
        else:
            _below(key, n, 0, _UNBLOCKED, limit[i : i + 1], epoch, words, top, hit)
            for j in range(n):
                hit[j] &= allowed[j]
        if mask_below > _LOW:
            _put(begin, n, hit, mask_id, tokens, loss_mask)
        else:
            for j in range(n):
                loss_mask[begin + j] |= hit[j]
            _replace(
                key,
                begin,
                n,
                hit,
                mask_below,
                random_below,
                mask_id,
                ordinary,
                epoch,
                words,
                tokens,
            )


def mask(
    segments: Candidates,
    ratio: np.ndarray | None,
    probability: np.ndarray,
    shares: tuple[float, float, float],
    mask_id: int,
    ordinary: np.ndarray,
    trainable: np.ndarray | None,
    tokens: np.ndarray,
    loss_mask: np.ndarray,
    epoch: int = 0,
) -> np.ndarray | None:
    """`noise.mask`."""
    _check(segments, tokens)
    share = np.empty(0 if ratio is None else len(ratio))
    _mask(
        *segments[:3],
        np.empty(0) if ratio is None else ratio,
        thresholds(probability),
        np.uint64(int(shares[0] * 2**32)),
        np.uint64(int((shares[0] + shares[1]) * 2**32)),
        mask_id >= 0,
        tokens.dtype.type(max(mask_id, 0)),
        ordinary,
        _flags(trainable),
        tokens,
        loss_mask,
        epoch,
        int(segments.count.max(initial=0)),
        share,
    )
    return None if ratio is None else share


@kernel
def _flip(
    segments_key,
    at,
    count,
    limit,
    loss_on_all,
    no_mask,
    ordinary,
    rank,
    trainable,
    tokens,
    loss_mask,
    epoch,
    longest,
):
    words = np.empty(longest + 64, np.uint32)
    top, hit, allowed = (
        np.empty(longest + 64, np.uint8),
        np.empty(longest + 64, np.uint8),
        np.empty(longest, np.uint8),
    )
    for i in range(count.shape[0]):
        key, begin, n = segments_key[i], at[i], count[i]
        _below(key, n, 0, _UNBLOCKED, limit[i : i + 1], epoch, words, top, hit)
        _allowed(begin, n, trainable, False, no_mask, tokens, allowed)
        for j in range(n):
            hit[j] &= allowed[j]
        trained = allowed if loss_on_all else hit
        for j in range(np.uint64(n)):
            loss_mask[np.uint64(begin) + j] |= trained[j]
        philox_blocks(key, REPLACEMENT, epoch, (n + 3) >> 2, words)
        for part in range(0, n, 64):
            hits = _bits(hit, part, n)
            while hits:
                own = part + np.int64(trailing_zeros(hits))
                hits &= hits - _1
                token = np.int64(tokens[begin + own])
                now = np.int64(rank[token]) if token < rank.shape[0] else np.int64(-1)
                others = ordinary.shape[0] - np.int64(now >= 0)
                number = below(np.uint64(words[own]), key, REPLACEMENT, own, others, epoch)
                tokens[begin + own] = ordinary[number + np.int64((now >= 0) & (number >= now))]


def flip(
    segments: Candidates,
    threshold: np.ndarray,
    loss_on_all: bool,
    ordinary: np.ndarray,
    rank: np.ndarray,
    trainable: np.ndarray | None,
    tokens: np.ndarray,
    loss_mask: np.ndarray,
    epoch: int = 0,
) -> None:
    """`noise.flip`."""
    _check(segments, tokens)
    _flip(
        *segments[:3],
        threshold,
        loss_on_all,
        tokens.dtype.type(0),
        ordinary,
        rank,
        _flags(trainable),
        tokens,
        loss_mask,
        epoch,
        int(segments.count.max(initial=0)),
    )


@kernel
def _exponentials(words, count, time):
    """`randomness.exponentials` of words[: count] into time, without a branch."""
    for j in range(count):
        bits = np.float64(2.0 * np.float64(words[j]) + 1.0).view(np.int64)
        exponent, mantissa = (
            (bits >> 52) - 1022,
            np.int64((bits & _MANTISSA) | _HALF).view(np.float64),
        )
        z = (mantissa - 1.0) / (mantissa + 1.0)
        square = z * z
        # in a line each, which the compiler runs for several words at once
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
    """How many values are at most `limit`."""
    many = np.int64(0)
    for j in range(values.shape[0]):
        many += np.int64(values[j] <= limit)
    return many


@kernel
def _mark_least(values, k, hit):
    """hit[j] (uint8) = 1 iff values[j], above −1, is one of the k least, ties by place: by halving,
    since counting is fast."""
    low, high, limit = -1.0, np.inf, 1.0
    many = _up_to(values, limit)
    while many != k:
        if many < k:
            low = limit
        else:
            high = limit
        limit = 0.5 * (low + high) if high < np.inf else 2.0 * low
        if not low < limit < high:  # neighbours, of which high is tied
            limit = high
            many = _up_to(values, limit)
            break
        many = _up_to(values, limit)
    for j in range(values.shape[0]):
        hit[j] = values[j] <= limit
    j = values.shape[0]
    while many > k:  # the last of those that are tied
        j -= 1
        if values[j] == limit:
            hit[j] = 0
            many -= 1


@kernel(inline=True)
def _power_of_half(x):
    """`randomness.power_of_half` of one number."""
    whole = np.floor(x)
    bits, result = np.int64((x - whole) * 2.0**32), 1.0
    for i in range(32):  # without a branch: × 1 changes nothing
        result *= ROOTS_OF_HALF[i] if bits >> (31 - i) & 1 else 1.0
    return math.ldexp(result, -int(whole))


@kernel
def _soonest(key, count, before, block_length, level, half_life, epoch, words, time, hit):
    """hit[j] (uint8) = 1 iff candidate j is one of the round(level · n) of its block's n that
    arrive first, ties by place.

    words: uint32[≥ count + 32]; time: float64[≥ count].
    """
    philox_blocks(key, NOISE_LOW, epoch, (count + 3) >> 2, words)
    _exponentials(words, count, time)
    begin = np.int64(0)
    while begin < count:
        block = (before + begin) // block_length
        end = np.int64(min((block + 1) * block_length - before, count))
        slower, scale = _power_of_half((1.0 - level[block]) / (half_life * block_length)), 1.0
        for j in range(begin, end):
            time[j] *= scale
            scale *= slower
        k = np.int64(np.rint(level[block] * (end - begin)))
        _mark_least(time[begin:end], k, hit[begin:end])
        begin = end


@kernel
def _noise_blocks(
    segments_key,
    at,
    count,
    before,
    blocks,
    block_length,
    low,
    high,
    half_life,
    inverse,
    uniform,
    mask_id,
    ordinary,
    tokens,
    loss_mask,
    epoch,
    longest,
    level,
):
    most = np.int64(0)
    for i in range(blocks.shape[0]):
        most = max(most, blocks[i])
    words = np.empty(max(((longest + 15) >> 4) * 32, most) + 64, np.uint32)
    limit = np.empty(most, np.uint64)
    top, hit, allowed = (
        np.empty(longest + 64, np.uint8),
        np.empty(longest + 64, np.uint8),
        np.empty(longest, np.uint8),
    )
    time, nowhere = np.empty(longest if half_life > 0 else 0, np.float64), np.empty(0, np.uint8)
    first = np.int64(0)
    for i in range(count.shape[0]):
        key, begin, n = segments_key[i], at[i], count[i]
        of_blocks = level[first : first + blocks[i]]
        if low < high:
            philox_blocks(key, NOISE_LEVEL, epoch, (blocks[i] + 3) >> 2, words)
        else:  # whatever the words are
            of_blocks[:] = np.floor(low / _TICK) * _TICK
            limit[:1] = np.uint64(np.floor(np.floor(low / _TICK) * _TICK * ONE))
        for b in range(blocks[i] if low < high else 0):
            u = np.float64(words[b] >> np.uint32(8)) * _TICK
            of_blocks[b] = np.floor((low + (high - low) * u) / _TICK) * _TICK
            limit[b] = np.uint64(np.floor(of_blocks[b] * ONE))
        first += blocks[i]
        if half_life > 0:
            _soonest(key, n, before[i], block_length, of_blocks, half_life, epoch, words, time, hit)
        elif low < high:
            _below(key, n, before[i], block_length, limit, epoch, words, top, hit)
        else:
            _below(key, n, 0, _UNBLOCKED, limit, epoch, words, top, hit)
        if inverse:
            for j in range(n):
                hit[j] ^= 1
        if uniform:
            loss_mask[begin : begin + n] = 1
            _replace(
                key, begin, n, hit, np.uint64(0), _ONE, mask_id, ordinary, epoch, words, tokens
            )
        else:
            _allowed(begin, n, nowhere, True, mask_id, tokens, allowed)
            for j in range(n):
                hit[j] &= allowed[j]
            _put(begin, n, hit, mask_id, tokens, loss_mask)


def noise_blocks(
    segments: Candidates,
    before: np.ndarray,
    length: np.ndarray,
    law: BlockSchedule,
    ids: NoiseIds,
    tokens: np.ndarray,
    loss_mask: np.ndarray,
    epoch: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """`noise.noise_blocks`."""
    _check(segments, tokens)
    assert (before + segments.count <= length).all()
    blocks = -(-length // law.block_length)
    level = np.empty(int(blocks.sum()), np.float32)  # which holds multiples of 2⁻²⁴ up to 1 exactly
    _noise_blocks(
        *segments[:3],
        before,
        blocks,
        law.block_length,
        float(law.low),
        float(law.high),
        float(law.half_life),
        law.inverse,
        law.uniform,
        tokens.dtype.type(max(ids.mask, 0)),
        ids.ordinary,
        tokens,
        loss_mask,
        epoch,
        int(segments.count.max(initial=0)),
        level,
    )
    return blocks, np.float32(1.0) - level if law.inverse else level


def _check(segments: Candidates, tokens: np.ndarray) -> None:
    """Kernels do not look where they write."""
    assert (
        (segments.at >= 0) & (segments.count >= 0) & (segments.at + segments.count <= len(tokens))
    ).all()


def _flags(trainable: np.ndarray | None) -> np.ndarray:
    return np.empty(0, np.uint8) if trainable is None else trainable
