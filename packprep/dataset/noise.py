"""The law of in-place noise: which slots are noised, at what level, and what they become. Render and redraw both call it.

A segment's candidates are neighbouring slots (its tokens, perhaps its eos), less those that may not be trained. Candidate
number i of a segment, counted from its body's first slot, draws a 40-bit uniform: its high byte is byte i % 16 of block
i // 16 of NOISE under the segment's key, its low word number i of NOISE_LOW, looked at only where the byte decides nothing.
So chance costs 1/16 of a Philox block a slot, and is exact to 2⁻⁴⁰. An exact count takes the least words of NOISE_LOW.

    levels      t = low + (high − low) · u, cut to a multiple of 2⁻²⁴: exact in float32
    noised      iff the 40-bit uniform < ⌊p · 2⁴⁰⌋, p = (1 − ε) t + ε
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from packprep import randomness
from packprep.randomness import NOISE, NOISE_LEVEL, NOISE_LOW, REPLACEMENT, STRATUM

ONE = 1 << 40
"""The threshold of probability 1."""
CHUNK_SLOTS = 1 << 18
"""Candidates that are noised at once: their columns stay in the processor's cache."""


class Segments(NamedTuple):
    """Segments to noise, one array a column, [m] each, in row order."""

    key: np.ndarray  # uint64
    at: np.ndarray  # int64: first candidate's slot in the flat rows, ascending
    count: np.ndarray  # type: ignore[assignment]  # int64: candidates, trained or not
    row: np.ndarray  # int64: which row it lies in


class Noised(NamedTuple):
    """What `noise` gives besides what it writes."""

    level: np.ndarray  # float32[m]
    weight: np.ndarray  # float32[m]
    blocks: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None  # int64[m] counts; float32[blocks] levels, weights


def quantised(values: np.ndarray) -> np.ndarray:
    """float64, cut to multiples of 2⁻²⁴."""
    return np.floor(np.asarray(values) * 2.0**24) * 2.0**-24


def mask_probability(level: np.ndarray, epsilon: float) -> np.ndarray:
    """p = (1 − ε) t + ε (Nie et al. 2025, LLaDA)."""
    return (1.0 - epsilon) * level + epsilon


def thresholds(probability: np.ndarray) -> np.ndarray:
    """uint64: ⌊p · 2⁴⁰⌋."""
    return np.floor(np.asarray(probability, np.float64) * ONE).astype(np.uint64)


def levels(segments: Segments, low: float, high: float, stratified: bool, task: int, epoch: int) -> np.ndarray:
    """float64[m]: each segment's level, not yet quantised, from its key; or, stratified, spread evenly over the segments
    of its row.

    stratified: the level of the j-th of the m segments of a row is (u + π(j) / m) mod 1, u and π keyed by the task and
    the row's first segment of it.
    """
    if not stratified:
        u = randomness.uniforms(segments.key, NOISE_LEVEL, 0, epoch)
    else:
        u = _strata(segments, task, epoch)
    return low + (high - low) * u


def _strata(segments: Segments, task: int, epoch: int) -> np.ndarray:
    _, first, many = np.unique(segments.row, return_index=True, return_counts=True)
    shift = randomness.uniforms(segments.key[first], STRATUM, 4 * task, epoch)
    order_key = randomness.bits64(segments.key[first], STRATUM, task + (1 << 16), epoch)
    number, m = np.arange(len(segments.row)) - np.repeat(first, many), np.repeat(many, many)
    place = randomness.permute(number, m, np.repeat(order_key, many))
    return (np.repeat(shift, many) + quantised(place / m)) % 1.0


def _runs(kept: np.ndarray, dropped: np.ndarray) -> np.ndarray:
    """bool[Σ (kept + dropped)]: kept[0] times True, dropped[0] times False, kept[1] times True, …"""
    return np.repeat(np.tile(np.array([True, False]), len(kept)), np.stack((kept, dropped), axis=1).reshape(-1))


def _lanes(key: np.ndarray, count: np.ndarray, purpose: int, dtype: str, epoch: int) -> np.ndarray:
    """dtype[Σ count]: count[i] numbers of each key, consecutive bytes ("u1") or words ("<u4") of its blocks."""
    lanes = 16 // np.dtype(dtype).itemsize
    blocks = -(-count // lanes)
    total = int(blocks.sum())
    first = np.repeat(np.cumsum(blocks) - blocks, blocks)
    words = randomness.philox(np.repeat(key, blocks), np.arange(total) - first, 0, purpose, epoch)
    data = np.stack(words, axis=1).astype("<u4", copy=False).view(dtype).reshape(-1)
    unused = blocks * lanes - count
    return data[_runs(count, unused)] if unused.any() else data


def _below(key: np.ndarray, count: np.ndarray, threshold: np.ndarray, length: np.ndarray, epoch: int) -> np.ndarray:
    """bool[Σ count]: whether each candidate's 40-bit uniform lies below its threshold.

    threshold: uint64[k], that of the next length[k] candidates each; Σ length = Σ count.
    """
    high = _lanes(key, count, NOISE, "u1", epoch)
    top = np.repeat((threshold >> np.uint64(32)).astype(np.uint16), length)
    below = high < top
    undecided = np.flatnonzero(high == top)
    if len(undecided):
        segment, place = _within(count, undecided)
        run, _ = _within(length, undecided)
        low = randomness.words(key[segment], NOISE_LOW, place, epoch)
        below[undecided] = low < (threshold[run] & np.uint64(0xFFFFFFFF))
    return below


def _within(count: np.ndarray, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(segment, place in it), int64 each, of the candidates number `which` of all segments'."""
    ends = np.cumsum(count)
    segment = np.searchsorted(ends, which, "right")
    return segment, which - (ends - count)[segment]


def _in_chunks(segments: Segments, width: int = 1) -> list[slice]:
    """Slices of whole segments of about CHUNK_SLOTS / width candidates each."""
    ends = np.cumsum(segments.count)
    if not len(ends):
        return []
    size = max(CHUNK_SLOTS // width, 1)
    marks = np.searchsorted(ends, np.arange(size, int(ends[-1]) + size, size), "left") + 1
    bounds = np.unique(np.concatenate(([0], np.minimum(marks, len(ends)), [len(ends)])))
    return [slice(int(a), int(b)) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


class _Stretch(NamedTuple):
    """The slots from the first candidate of some segments to their last, and which of them are candidates."""

    here: slice
    inside: np.ndarray | None  # bool; None: all

    def laid_out(self, values: np.ndarray) -> np.ndarray:
        """bool, one a slot: `values`, one a candidate, and False between."""
        if self.inside is None:
            return values
        wide = np.zeros(len(self.inside), np.bool_)
        wide[self.inside] = values
        return wide

    def candidates(self, slots: np.ndarray) -> np.ndarray:
        """Of a flat column the candidates' values."""
        return slots[self.here] if self.inside is None else slots[self.here][self.inside]


def _stretch(segments: Segments) -> _Stretch:
    begin, end = int(segments.at[0]), int(segments.at[-1] + segments.count[-1])
    gap = np.append(segments.at[1:], end) - (segments.at + segments.count)
    return _Stretch(slice(begin, end), _runs(segments.count, gap) if gap.any() else None)


def _put(slots: np.ndarray, where: np.ndarray, value: int) -> None:
    """slots[where] = value, without a branch: the processor would guess random ones wrong half the time."""
    bits = np.negative(where.astype(slots.dtype))  # 0, or −1: all bits
    bits &= slots ^ slots.dtype.type(value)
    slots ^= bits


def mask(
    segments: Segments,
    ratio: np.ndarray | None,
    probability: np.ndarray,
    shares: tuple[float, float, float],
    mask_id: int,
    ordinary: np.ndarray,
    may: np.ndarray | None,
    tokens: np.ndarray,
    loss_mask: np.ndarray,
    epoch: int = 0,
) -> None:
    """Noise masked-diffusion segments in place: each candidate with its segment's probability.

    ratio: float64[m]; where given, an exact count instead: max(⌊candidates · ratio⌋, 1) of them without replacement.
    probability: float64[m]. shares: of noised slots that become the mask, a uniform ordinary token, or stay. ordinary:
    int32, the ids of the ordinary vocabulary. may: uint8, flat: slots that may be noised; None: all.
    tokens (holding the original tokens) and loss_mask (0), flat, are written.
    """
    limit = thresholds(probability)
    for part in _in_chunks(segments):
        own = Segments(*(column[part] for column in segments))
        stretch = _stretch(own)
        allowed = None if may is None else stretch.candidates(may) != 0
        if ratio is not None:
            noised = _fewest(own, ratio[part], allowed, epoch)
        else:
            noised = _below(own.key, own.count, limit[part], own.count, epoch)
            if allowed is not None:
                noised &= allowed
        wide = stretch.laid_out(noised)
        loss_mask[stretch.here] |= wide.view(np.uint8)
        if shares[0] >= 1.0:
            _put(tokens[stretch.here], wide, mask_id)
        else:
            hit = stretch.here.start + np.flatnonzero(wide)
            _replace(own, np.flatnonzero(noised), hit, shares, mask_id, ordinary, tokens, epoch)


def _fewest(segments: Segments, ratio: np.ndarray, allowed: np.ndarray | None, epoch: int) -> np.ndarray:
    """bool[Σ count]: in each segment the max(⌊candidates · ratio⌋, 1) candidates of least 32-bit word, ties by place."""
    words = _lanes(segments.key, segments.count, NOISE_LOW, "<u4", epoch)
    noised = np.zeros(len(words), np.bool_)
    begin = 0
    for count, share in zip(segments.count.tolist(), ratio.tolist(), strict=True):
        own: slice | np.ndarray = slice(begin, begin + count)
        if allowed is not None:
            own = begin + np.flatnonzero(allowed[own])
        begin += count
        word = words[own]
        if not len(word):
            continue
        wanted = max(int(len(word) * share), 1)
        limit = np.partition(word, wanted - 1)[wanted - 1]
        chosen = word <= limit
        surplus = int(np.count_nonzero(chosen)) - wanted
        if surplus:
            chosen[np.flatnonzero(word == limit)[-surplus:]] = False
        noised[own] = chosen
    return noised


def _replace(
    segments: Segments,
    which: np.ndarray,
    hit: np.ndarray,
    shares: tuple[float, float, float],
    mask_id: int,
    ordinary: np.ndarray,
    tokens: np.ndarray,
    epoch: int,
) -> None:
    segment, place = _within(segments.count, which)
    key = segments.key[segment]
    draw = randomness.words(key, REPLACEMENT, 2 * place, epoch).astype(np.uint64)
    as_mask = draw < np.uint64(int(shares[0] * 2**32))
    as_random = ~as_mask & (draw < np.uint64(int((shares[0] + shares[1]) * 2**32)))
    if as_mask.any():  # else there may be no mask: −1 is no token
        tokens[hit[as_mask]] = mask_id
    if as_random.any():
        chosen = randomness.integers(key[as_random], REPLACEMENT, 2 * place[as_random] + 1, len(ordinary), epoch)
        tokens[hit[as_random]] = ordinary[chosen]


def flip(
    segments: Segments,
    threshold: np.ndarray,
    loss_on_all: bool,
    ordinary: np.ndarray,
    rank: np.ndarray,
    may: np.ndarray | None,
    tokens: np.ndarray,
    loss_mask: np.ndarray,
    epoch: int = 0,
) -> None:
    """Noise uniform-diffusion segments in place: a candidate flips with its segment's probability, to another token,
    uniform over the ordinary vocabulary.

    threshold: uint64[m], ⌊P · 2⁴⁰⌋. ordinary: int32[v], ascending; rank: int32[vocabulary], the place of an id in
    `ordinary`, −1 for special ids. The rest as in `mask`.
    """
    for part in _in_chunks(segments, 4):  # words and ids are wider than bytes
        own = Segments(*(column[part] for column in segments))
        stretch = _stretch(own)
        flipped = _below(own.key, own.count, threshold[part], own.count, epoch)
        allowed = np.ones(len(flipped), np.bool_) if may is None else stretch.candidates(may) != 0
        flipped &= allowed
        wide = stretch.laid_out(flipped)
        trained = stretch.laid_out(allowed) if loss_on_all else wide
        loss_mask[stretch.here] |= trained.view(np.uint8)
        hit = stretch.here.start + np.flatnonzero(wide)
        now = rank[tokens[hit]]
        number = _others(own, np.flatnonzero(flipped), len(ordinary) - (now >= 0), epoch)
        tokens[hit] = ordinary[number + ((now >= 0) & (number >= now))]


def _others(segments: Segments, which: np.ndarray, bound: np.ndarray, epoch: int) -> np.ndarray:
    """int64: randomness.integers(key, REPLACEMENT, place, bound) of the candidates number `which`.

    First draws are taken from all of a segment's words at once, which are a quarter of a Philox block each.
    """
    words = _lanes(segments.key, segments.count, REPLACEMENT, "<u4", epoch)[which]
    bound = bound.astype(np.uint64)
    product = words * bound
    chosen = (product >> np.uint64(32)).astype(np.int64)
    again = np.flatnonzero((product & np.uint64(0xFFFFFFFF)) < np.uint64(1 << 32) % bound)
    if len(again):
        segment, place = _within(segments.count, which[again])
        chosen[again] = randomness.integers(segments.key[segment], REPLACEMENT, place, bound[again], epoch)
    return chosen


def quantised_level(key: np.ndarray, low: float, high: float, steps: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """(step int64[m], level float64[m]): one of `steps` levels, the middles of equal parts of [low, high]."""
    step = randomness.integers(key, NOISE_LEVEL, 0, steps, epoch)
    return step, low + (high - low) * (step + 0.5) / steps


def mask_blocks(
    segments: Segments,
    before: np.ndarray,
    length: np.ndarray,
    block_length: int,
    low: float,
    high: float,
    mask_id: int,
    tokens: np.ndarray,
    loss_mask: np.ndarray,
    epoch: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Noise block-diffusion segments in place: one level a block, each candidate masked with that probability.

    before: int64[m], slots of the segment's half before its first candidate; length: int64[m], all slots of the half.
    Gives (blocks int64[m], level float32[blocks], weight float32[blocks] = 1 / level).
    """
    blocks = -(-length // block_length)
    first = np.cumsum(blocks) - blocks
    number = np.arange(int(blocks.sum())) - np.repeat(first, blocks)
    u = randomness.uniforms(np.repeat(segments.key, blocks), NOISE_LEVEL, number, epoch)
    level = quantised(low + (high - low) * u)
    limit = thresholds(level)
    candidates_begin = np.maximum(number * block_length, np.repeat(before, blocks))
    candidates_end = np.minimum((number + 1) * block_length, np.repeat(before + segments.count, blocks))
    candidates = np.maximum(candidates_end - candidates_begin, 0)
    for part in _in_chunks(segments):
        own = Segments(*(column[part] for column in segments))
        stretch = _stretch(own)
        of_part = slice(int(first[part][0]), int(first[part][-1] + blocks[part][-1]))
        noised = _below(own.key, own.count, limit[of_part], candidates[of_part], epoch)
        wide = stretch.laid_out(noised)
        loss_mask[stretch.here] |= wide.view(np.uint8)
        _put(tokens[stretch.here], wide, mask_id)
    return blocks, level.astype(np.float32), (1.0 / level).astype(np.float32)


# The laws by objective. Each writes the noise of one task's segments and gives their levels and weights; `Target` is what
# both a shard that is rendered and a batch that is drawn anew look like.

FLIP_STEPS = 4096
"""Levels of uniform diffusion: each has its own stored threshold."""


class Ids(NamedTuple):
    """What noise writes: the mask, and the ordinary vocabulary (int32[v], ascending)."""

    mask: int
    ordinary: np.ndarray
    rank: np.ndarray  # int32[vocab_size]: an id's place in `ordinary`; −1: not ordinary


class Target(NamedTuple):
    """Where noise goes: the segments of one task, and the flat rows."""

    segments: Segments
    before: np.ndarray  # int64[m]: slots before the first candidate (bos, mode token)
    length: np.ndarray  # int64[m]: slots of the segment, of x_t alone in block diffusion
    may: np.ndarray | None  # uint8, flat: slots that may be noised; None: every candidate
    tokens: np.ndarray  # flat; holds the original tokens
    loss_mask: np.ndarray  # uint8, flat; holds 0


def ordinary_ids(vocab_size: int, special_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(ordinary int32[v], rank int32[vocab_size]) of a vocabulary: every id that is not special."""
    is_ordinary = np.ones(vocab_size, np.bool_)
    is_ordinary[np.asarray(special_ids, np.int64)] = False
    ordinary = np.flatnonzero(is_ordinary).astype(np.int32)
    rank = np.full(vocab_size, -1, np.int32)
    rank[ordinary] = np.arange(len(ordinary), dtype=np.int32)
    return ordinary, rank


def masked_diffusion(
    task: int, parameters: Mapping[str, Any], resolved: Mapping[str, Any], ids: Ids, target: Target, epoch: int
) -> Noised:
    """`mask` with a level a segment."""
    low, high = parameters["noise_range"]
    ratio = levels(target.segments, low, high, parameters["stratified"], task, epoch)
    level, exact = quantised(ratio), parameters["exact_count"]
    probability = level if exact else mask_probability(level, parameters["epsilon"])
    mask(
        target.segments, ratio if exact else None, probability, tuple(parameters["replace"]), ids.mask, ids.ordinary,
        target.may, target.tokens, target.loss_mask, epoch,
    )  # fmt: skip
    weighted = parameters["weighting"] == "1/p"
    weight = 1.0 / np.maximum(probability, 2.0**-24) if weighted else np.ones(len(level))
    return Noised(level.astype(np.float32), weight.astype(np.float32))


def uniform_diffusion(
    task: int, parameters: Mapping[str, Any], resolved: Mapping[str, Any], ids: Ids, target: Target, epoch: int
) -> Noised:
    """`flip` with one of FLIP_STEPS levels a segment, by the plan's thresholds."""
    low, high = parameters["noise_range"]
    step, level = quantised_level(target.segments.key, low, high, FLIP_STEPS, epoch)
    threshold = np.array(resolved["flip_thresholds"], np.uint64)[step]
    flip(
        target.segments, threshold, parameters["loss_on"] == "all", ids.ordinary, ids.rank,
        target.may, target.tokens, target.loss_mask, epoch,
    )  # fmt: skip
    weight = np.ones(len(level))
    if parameters["weighting"] == "view_scale":
        weight = view_scale(level, len(ids.rank))
    return Noised(level.astype(np.float32), weight.astype(np.float32))


def view_scale(level: np.ndarray, vocab_size: int) -> np.ndarray:
    """n / (V (1 − n) + n): 0 at n = 0, 1 at n = 1."""
    return level / (vocab_size * (1.0 - level) + level)


def block_diffusion(
    task: int, parameters: Mapping[str, Any], resolved: Mapping[str, Any], ids: Ids, target: Target, epoch: int
) -> Noised:
    """`mask_blocks` with a level a block."""
    low, high = parameters["noise_range"]
    blocks = mask_blocks(
        target.segments, target.before, target.length, parameters["block_length"], low, high, ids.mask,
        target.tokens, target.loss_mask, epoch,
    )  # fmt: skip
    m = len(target.length)
    return Noised(np.zeros(m, np.float32), np.ones(m, np.float32), blocks)


LAWS = {
    "masked_diffusion": masked_diffusion,
    "uniform_diffusion": uniform_diffusion,
    "block_diffusion": block_diffusion,
}
