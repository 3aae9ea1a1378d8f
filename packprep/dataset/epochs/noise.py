"""Draw noise for same-position tasks: the noised slots, their levels, and their new tokens.

Rendering and resampling both use this module. Rendering replaces the writers `mask`, `flip` and
`noise_blocks` by compiled ones with the same result (`objectives/noising.py`).

    candidates  the slots of a segment that may be noised: its body, and eos if noise_eos is set
    level       t = low + (high − low) · u, rounded down to a multiple of 2⁻²⁴: exact in float32
    noised      a candidate is noised if its 40-bit random number < ⌊p · 2⁴⁰⌋, where
                p = (1 − ε) t + ε
    exactly k   with exact_count, the k candidates with the smallest random words of the purpose
                NOISE_LOW are noised, and p = k / candidates

The candidates of a segment have the indices i = 0, 1, …, from the first slot of the body on. Each
candidate has a random number of 40 bits that follows from the segment's key. Its high byte is byte
i % 16 of Philox block i // 16 of the purpose NOISE. Its low 32 bits are random word i of the
purpose NOISE_LOW, which is computed only if the high byte does not decide. So a slot costs about
1/16 of a Philox block, and probabilities are exact to 2⁻⁴⁰.

If noise writes the mask token, a mask token in the text is never noised, because a model cannot
learn from such a slot.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from packprep import randomness
from packprep.dataset.blocks import (
    Blocks,
    answers_of_flags,
    block_ranges,
    blocks_of,
    candidate_ranges,
    range_offsets,
)
from packprep.dataset.boundaries import move_ahead, owners, ranks, starts_of
from packprep.dataset.epochs.candidates import (
    Candidates,
    Window,
    below,
    chunks,
    put,
    within,
    words_of,
)
from packprep.dataset.manifest import Parameter
from packprep.randomness import NOISE_LEVEL, NOISE_LOW, REPLACEMENT, STRATUM

ONE = 1 << 40
"""The threshold for probability 1, in units of 2⁻⁴⁰."""


# Levels, and the writers of noise


class Noised(NamedTuple):
    """The levels and weights of noised segments."""

    level: np.ndarray  # float32[m]
    weight: np.ndarray  # float32[m]
    blocks: "NoisedBlocks | None" = None  # if each block has its own level


class NoisedBlocks(NamedTuple):
    """The blocks of noised segments, with their levels and weights."""

    blocks: Blocks
    level: np.ndarray  # float32[k]
    weight: np.ndarray  # float32[k]


def quantised(values: np.ndarray) -> np.ndarray:
    """Return the values rounded down to multiples of 2⁻²⁴, float64."""
    return np.floor(np.asarray(values) * 2.0**24) * 2.0**-24


def mask_probability(level: np.ndarray, epsilon: float) -> np.ndarray:
    """Return the probability p = (1 − ε) t + ε that a token is masked (Nie et al. 2025, LLaDA).

    Args:
        level: Levels t.
        epsilon: The smallest probability, ε.

    Returns:
        float64, shaped as `level`.
    """
    return (1.0 - epsilon) * level + epsilon


def thresholds(probability: np.ndarray) -> np.ndarray:
    """Return the thresholds ⌊p · 2⁴⁰⌋ for probabilities p, uint64."""
    return np.floor(np.asarray(probability, np.float64) * ONE).astype(np.uint64)


def levels(
    segments: Candidates, low: float, high: float, stratified: bool, task: int, epoch: int
) -> np.ndarray:
    """Draw the level of each segment, before quantisation.

    The level is low + (high − low) · u with a random number u in [0, 1). Without stratification, u
    follows from the segment's key. Stratified levels are spread evenly over the m segments of a
    row: segment j has u = (v + π(j) / m) mod 1. The random number v and the permutation π are the
    same for all m segments. They follow from the index of the task and the key of the first of
    these segments.

    Args:
        segments: The segments of one task.
        low: The smallest level.
        high: The largest level.
        stratified: Whether levels are stratified.
        task: Index of the task.
        epoch: The epoch.

    Returns:
        float64[m].
    """
    if not stratified:
        u = randomness.uniforms(segments.key, NOISE_LEVEL, 0, epoch)
    else:
        u = _strata(segments, task, epoch)
    return low + (high - low) * u


def _strata(segments: Candidates, task: int, epoch: int) -> np.ndarray:
    """Return the stratified numbers u of `levels`, in [0, 1), float64[m]."""
    _, first_in_row, row_sizes = np.unique(segments.row, return_index=True, return_counts=True)
    shift = randomness.uniforms(segments.key[first_in_row], STRATUM, 4 * task, epoch)
    order_key = randomness.bits64(segments.key[first_in_row], STRATUM, task + (1 << 16), epoch)
    number = np.arange(len(segments.row)) - np.repeat(first_in_row, row_sizes)
    m = np.repeat(row_sizes, row_sizes)
    place = randomness.permute(number, m, np.repeat(order_key, row_sizes))
    return (np.repeat(shift, row_sizes) + quantised(place / m)) % 1.0


def mask(
    target: "Target",
    probability: np.ndarray,
    ratio: np.ndarray | None,
    shares: tuple[float, float, float],
    ids: "NoiseIds",
    epoch: int = 0,
) -> np.ndarray | None:
    """Write the noise and the loss_mask of masked-diffusion segments.

    Args:
        target: The segments, and the rows to write.
        probability: float64[m], the probability that a candidate of the segment is noised.
        ratio: float64[m] or None. If given, exactly max(⌊candidates · ratio⌋, 1) candidates of each
            segment are noised, and `probability` is not used.
        shares: Three probabilities: that a noised candidate becomes the mask token, that it becomes
            a random ordinary token, and that it stays the same.
        ids: The ids of the mask token and of ordinary tokens.
        epoch: The epoch.

    Returns:
        If `ratio` is given, the number of noised candidates of each segment, divided by the number
        of its candidates, float64[m]. It is 1 for a segment without candidates. Without `ratio`,
        None.
    """
    limit, tokens = thresholds(probability), target.tokens
    noised_share = None if ratio is None else np.ones(len(limit))
    for segment_slice, segments, window in chunks(target.segments):
        allowed = None if target.trainable is None else window.candidates(target.trainable) != 0
        # A mask token of the text is not noised, because it has no original token to predict.
        if window.holds(tokens, ids.mask):
            unmasked = window.candidates(tokens) != ids.mask
            allowed = unmasked if allowed is None else allowed & unmasked
        if ratio is not None and noised_share is not None:
            noised, noised_share[segment_slice] = _fewest(
                segments, ratio[segment_slice], allowed, epoch
            )
        else:
            noised = below(
                segments.key, segments.count, limit[segment_slice], segments.count, epoch
            )
            if allowed is not None:
                noised &= allowed
        noised_slots = window.laid_out(noised)
        target.loss_mask[window.here] |= noised_slots.view(np.uint8)
        if shares[0] >= 1.0:
            put(tokens[window.here], noised_slots, ids.mask)
        else:
            _replace(segments, window, noised, shares, ids, tokens, epoch)
    return noised_share


def _fewest(
    segments: Candidates, ratio: np.ndarray, allowed: np.ndarray | None, epoch: int
) -> tuple[np.ndarray, np.ndarray]:
    """Choose in each segment the candidates with the smallest random words of NOISE_LOW.

    If n candidates of a segment are allowed, max(⌊n · ratio⌋, 1) of them are chosen. If words are
    equal, earlier candidates are chosen first. `allowed`, bool[Σ count], is True for allowed
    candidates; None allows all.

    Returns:
        Two arrays:

        - bool[Σ count]: whether each candidate is chosen.
        - float64[m]: the number of chosen candidates, divided by the number of allowed candidates
          of the segment. It is 1 for a segment without allowed candidates.
    """
    words = words_of(segments.key, segments.count, NOISE_LOW, "<u4", epoch)
    noised, share = np.zeros(len(words), np.bool_), np.ones(len(ratio))
    begin = 0
    for i, (count, wished) in enumerate(zip(segments.count.tolist(), ratio.tolist(), strict=True)):
        own_candidates: slice | np.ndarray = slice(begin, begin + count)
        if allowed is not None:
            own_candidates = begin + np.flatnonzero(allowed[own_candidates])
        begin += count
        word = words[own_candidates]
        if not len(word):
            continue
        wanted_count = max(int(len(word) * wished), 1)
        share[i] = wanted_count / len(word)
        # Several words may equal the limit. The last of them are left out to get the exact number.
        limit = np.partition(word, wanted_count - 1)[wanted_count - 1]
        chosen = word <= limit
        surplus = int(np.count_nonzero(chosen)) - wanted_count
        if surplus:
            chosen[np.flatnonzero(word == limit)[-surplus:]] = False
        noised[own_candidates] = chosen
    return noised, share


def _replace(
    segments: Candidates,
    window: Window,
    noised: np.ndarray,
    shares: tuple[float, float, float],
    ids: "NoiseIds",
    tokens: np.ndarray,
    epoch: int,
) -> None:
    """Replace noised candidates by the mask token or a random ordinary token, or keep them.

    `noised`, bool[Σ count], is True for noised candidates. `shares` has the probabilities of the
    three cases: mask token, ordinary token, unchanged.
    """
    slot = window.here.start + np.flatnonzero(window.laid_out(noised))
    segment, place = within(segments.count, np.flatnonzero(noised))
    key = segments.key[segment]
    # One word per candidate chooses the case, and a second word chooses the ordinary token.
    kind_word = randomness.words(key, REPLACEMENT, 2 * place, epoch).astype(np.uint64)
    as_mask = kind_word < np.uint64(int(shares[0] * 2**32))
    as_ordinary = ~as_mask & (kind_word < np.uint64(int((shares[0] + shares[1]) * 2**32)))
    if as_mask.any():  # If no candidate becomes the mask, ids.mask may be −1, which is not an id.
        tokens[slot[as_mask]] = ids.mask
    if as_ordinary.any():
        number = randomness.integers(
            key[as_ordinary], REPLACEMENT, 2 * place[as_ordinary] + 1, len(ids.ordinary), epoch
        )
        tokens[slot[as_ordinary]] = ids.ordinary[number]


def flip(
    target: "Target", threshold: np.ndarray, loss_on_all: bool, ids: "NoiseIds", epoch: int = 0
) -> None:
    """Write the noise and the loss_mask of uniform-diffusion segments.

    Each segment has a flip probability. A candidate that flips becomes an ordinary token. All
    ordinary tokens except the candidate's own token are equally likely.

    Args:
        target: The segments, and the rows to write.
        threshold: uint64[m], ⌊P · 2⁴⁰⌋ for the flip probability P of each segment.
        loss_on_all: Whether all candidates are trained. Otherwise only flipped ones are.
        ids: The ids of ordinary tokens.
        epoch: The epoch.
    """
    ordinary, rank, tokens = ids.ordinary, ids.rank, target.tokens
    for segment_slice, segments, window in chunks(target.segments, 4):  # A word takes 4 bytes.
        flipped = below(
            segments.key, segments.count, threshold[segment_slice], segments.count, epoch
        )
        allowed = (
            np.ones(len(flipped), np.bool_)
            if target.trainable is None
            else window.candidates(target.trainable) != 0
        )
        flipped &= allowed
        flipped_slots = window.laid_out(flipped)
        trained_slots = window.laid_out(allowed) if loss_on_all else flipped_slots
        target.loss_mask[window.here] |= trained_slots.view(np.uint8)
        slot = window.here.start + np.flatnonzero(flipped_slots)
        # Ordinary tokens have one alternative less than special ones, because their own token is
        # excluded.
        old_rank = rank[tokens[slot]]
        n_alternatives = len(ordinary) - (old_rank >= 0)
        number = _others(segments, np.flatnonzero(flipped), n_alternatives, epoch)
        # Numbers from the old token's rank on are moved up by one, which skips the old token.
        tokens[slot] = ordinary[number + ((old_rank >= 0) & (number >= old_rank))]


def _others(
    segments: Candidates, candidate_indices: np.ndarray, bound: np.ndarray, epoch: int
) -> np.ndarray:
    """Draw for each candidate in `candidate_indices` a random integer below its `bound`, int64[k].

    `candidate_indices` has indices among the candidates of all segments. `randomness.integers`
    would return the same integers for the purpose REPLACEMENT and each candidate's index in its
    segment. This function is faster, because it computes all random words of a segment at once, and
    four random words come from one Philox block. Only rejected draws call `randomness.integers`.
    """
    words = words_of(segments.key, segments.count, REPLACEMENT, "<u4", epoch)[candidate_indices]
    bound = bound.astype(np.uint64)
    # The high half of word · bound is below `bound`. A small low half rejects the draw, so that all
    # numbers are equally likely.
    product = words * bound
    chosen = (product >> np.uint64(32)).astype(np.int64)
    rejected = np.flatnonzero((product & np.uint64(0xFFFFFFFF)) < np.uint64(1 << 32) % bound)
    if len(rejected):
        segment, place = within(segments.count, candidate_indices[rejected])
        chosen[rejected] = randomness.integers(
            segments.key[segment], REPLACEMENT, place, bound[rejected], epoch
        )
    return chosen


def quantised_level(
    key: np.ndarray, low: float, high: float, steps: int, epoch: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draw one of `steps` levels for each segment.

    The range [low, high] is divided into `steps` equal parts. The levels are the midpoints of these
    parts.

    Args:
        key: The segments' keys, uint64[m].
        low: The lower end of the range.
        high: The upper end of the range.
        steps: Number of levels.
        epoch: The epoch.

    Returns:
        The index of each segment's level, int64[m], and the level itself, float64[m].
    """
    step = randomness.integers(key, NOISE_LEVEL, 0, steps, epoch)
    return step, low + (high - low) * (step + 0.5) / steps


class BlockSchedule(NamedTuple):
    """The noise schedule of block diffusion in an epoch.

    Attributes:
        block_length: Number of slots of a block.
        low: The smallest level t of a block. Levels are uniform in [low, high].
        high: The largest level of a block.
        half_life: If 0, each candidate of a block is noised with probability t. Otherwise round(t ·
            n) of the block's n candidates are drawn without replacement. Candidate i of the block
            has the weight 2^((1 − t) · i / (half_life · block_length)), so later candidates are
            more likely.
        inverse: Whether the drawn candidates stay as they are, and all other candidates are noised.
        uniform: If True, noised candidates become random ordinary tokens, and all candidates are
            trained. If False, noised candidates become the mask token, and only noised candidates
            are trained.
    """

    block_length: int
    low: float
    high: float
    half_life: float
    inverse: bool
    uniform: bool


def level_range(parameters: Mapping[str, Any]) -> tuple[float, float]:
    """Return the smallest and the largest level of a task. With noise = "all", both are 1."""
    return (1.0, 1.0) if parameters.get("noise") == "all" else parameters["noise_range"]


def block_schedule(parameters: Mapping[str, Any], epoch: int) -> tuple[BlockSchedule, int]:
    """Return a task's schedule in an epoch, and the epoch of its random numbers.

    If the parameter `complementary` is set, epoch 2k + 1 noises exactly the candidates that epoch
    2k did not noise. So both epochs use the random numbers of epoch 2k.

    Args:
        parameters: The parameters of the task.
        epoch: The epoch.

    Returns:
        The `BlockSchedule`, and the epoch of the random numbers.
    """
    pair = epoch % 2 if parameters["complementary"] else 0
    half_life = parameters["half_life"] if parameters["noise"] == "position" else 0.0
    low, high = level_range(parameters)
    schedule = BlockSchedule(
        parameters["block_length"],
        low,
        high,
        half_life,
        pair == 1,
        parameters["canvas"] == "uniform",
    )
    return schedule, epoch - pair


def levels_by_block(parameters: Mapping[str, Any]) -> bool:
    """Return whether each block of a task has its own level and weight.

    With noise = "all", all candidates are noised, and each segment has level 1 and weight 1.
    """
    return parameters.get("noise") != "all"


def noise_blocks(
    target: "Target", blocks: Blocks, schedule: BlockSchedule, ids: "NoiseIds", epoch: int = 0
) -> np.ndarray:
    """Write the noise and the loss_mask of block-diffusion segments, with one level per block.

    Args:
        target: The segments, and the rows to write.
        blocks: The blocks of the segments. Candidates outside of them are not noised.
        schedule: The noise schedule of the blocks.
        ids: The ids of the mask token and of ordinary tokens.
        epoch: The epoch of the random numbers.

    Returns:
        The level of each block, float64[blocks]. With `schedule.inverse`, the level is 1 minus the
        drawn level.
    """
    u = randomness.uniforms(
        np.repeat(target.segments.key, blocks.count), NOISE_LEVEL, ranks(blocks.count), epoch
    )
    level = quantised(schedule.low + (schedule.high - schedule.low) * u)
    # Candidates between blocks have level 0, so they are never noised.
    lengths = candidate_ranges(blocks, target.before, target.segments.count)
    range_level = np.zeros(len(lengths))
    range_level[block_ranges(blocks)] = level
    limit, offsets = thresholds(range_level), range_offsets(blocks)
    # Words and ids take 4 bytes.
    width = 4 if schedule.uniform or schedule.half_life else 1
    for segment_slice, segments, window in chunks(target.segments, width):
        own_ranges = slice(int(offsets[:-1][segment_slice][0]), int(offsets[1:][segment_slice][-1]))
        if schedule.half_life:
            noised = _soonest(
                segments, lengths[own_ranges], range_level[own_ranges], schedule, epoch
            )
        else:
            noised = below(
                segments.key, segments.count, limit[own_ranges], lengths[own_ranges], epoch
            )
        # The odd epoch of a complementary pair noises the candidates that the even epoch left.
        if schedule.inverse:
            noised = ~noised
        # Slots between answers are not trainable. So `inverse` does not noise them, although their
        # level is 0.
        allowed = (
            np.ones(len(noised), np.bool_)
            if target.trainable is None
            else window.candidates(target.trainable) != 0
        )
        noised &= allowed
        # A random token does not show that it is noise, so all candidates are trained.
        if schedule.uniform:
            trained_slots = window.laid_out(allowed)
            _replace(segments, window, noised, (0.0, 1.0, 0.0), ids, target.tokens, epoch)
        else:
            if window.holds(target.tokens, ids.mask):
                noised &= window.candidates(target.tokens) != ids.mask
            trained_slots = window.laid_out(noised)
            put(target.tokens[window.here], trained_slots, ids.mask)
        target.loss_mask[window.here] |= trained_slots.view(np.uint8)
    return 1.0 - level if schedule.inverse else level


def _soonest(
    segments: Candidates,
    lengths: np.ndarray,
    level: np.ndarray,
    schedule: BlockSchedule,
    epoch: int,
) -> np.ndarray:
    """Draw round(level · n) of the n candidates of each range, and return flags, bool[Σ count].

    A range is a block, or the candidates between two blocks, which have level 0. The draw uses the
    weights that `BlockSchedule.half_life` describes. Each candidate gets an exponential random
    time, divided by its weight. The candidates with the smallest times are a weighted draw without
    replacement (Efraimidis and Spirakis 2006). If times are equal, earlier candidates are drawn
    first. `lengths` has the number of candidates of each range, and `level` its level.
    """
    time = randomness.exponentials(words_of(segments.key, segments.count, NOISE_LOW, "<u4", epoch))
    # Candidate i has its time multiplied i times by `slower`. The compiled kernel multiplies in the
    # same order, so both give the same floats.
    slower = randomness.power_of_half((1.0 - level) / (schedule.half_life * schedule.block_length))
    begin, scale = starts_of(lengths), np.ones(len(time))
    block_lengths = np.where(level > 0, lengths, 0)
    for place in range(1, int(block_lengths.max(initial=0))):
        longer = block_lengths > place
        indices = begin[longer] + place
        scale[indices] = scale[indices - 1] * slower[longer]
    # In this order, each range has its candidates sorted by time.
    order = np.lexsort((time * scale, owners(lengths)))
    soonest = np.empty(len(time), np.bool_)
    soonest[order] = ranks(lengths) < np.repeat(np.rint(level * lengths).astype(np.int64), lengths)
    return soonest


# The noise schedules of the objectives. Each function noises the segments of one task and returns
# their levels and weights. `Target` describes either a shard to render or a batch to resample.
# `write` is one of the writers above, or a compiled one with the same result.

FLIP_STEPS = 4096
"""Number of levels of uniform diffusion. The plan stores a threshold for each level."""


class NoiseIds(NamedTuple):
    """The ids that noise writes: `mask`, and the ordinary ids (int32[v], ascending)."""

    mask: int
    ordinary: np.ndarray
    rank: np.ndarray  # int32[vocab_size]: the index of an id in `ordinary`, or −1

    @property
    def drawable(self) -> int:
        """The number of ordinary ids."""
        return len(self.ordinary)


class Target(NamedTuple):
    """The segments of one task, and the flat arrays that noise changes."""

    segments: Candidates
    before: np.ndarray  # int64[m]: slots before the first candidate (bos, mode token)
    length: np.ndarray  # int64[m]: slots of the segment; in block diffusion, only slots of x_t
    trainable: np.ndarray | None  # uint8, flat: 1 at slots that may be noised; None allows all
    tokens: np.ndarray  # flat; at first the original tokens, then the noised ones
    loss_mask: np.ndarray  # uint8, flat; at first 0 in these segments


def ordinary_ids(vocab_size: int, special_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids that are not special.

    Args:
        vocab_size: Size of the vocabulary.
        special_ids: The special ids.

    Returns:
        The ordinary ids, int32[v], and for each id its index among them, int32[vocab_size]. The
        index is −1 for special ids.
    """
    is_ordinary = np.ones(vocab_size, np.bool_)
    is_ordinary[np.asarray(special_ids, np.int64)] = False
    ordinary = np.flatnonzero(is_ordinary).astype(np.int32)
    rank = np.full(vocab_size, -1, np.int32)
    rank[ordinary] = np.arange(len(ordinary), dtype=np.int32)
    return ordinary, rank


def masked_diffusion(
    task: int,
    parameters: Mapping[str, Any],
    resolved: Mapping[str, Any],
    ids: NoiseIds,
    target: Target,
    epoch: int,
    write: Callable[..., Any] = mask,
) -> Noised:
    """Add noise to masked-diffusion segments, with one level per segment.

    With the weighting "1/p", the loss weight of a segment is 1 / p, where p is the probability that
    a candidate is noised. With exact_count, k candidates are noised, and p is k / candidates. This
    quotient differs from the level, because k is rounded. With exact_count, a segment without
    candidates has the weight 1.

    Args:
        task: Index of the task.
        parameters: The parameters of the task.
        resolved: Values that the plan stores for the task. They are not used.
        ids: The ids that noise writes.
        target: The segments, and the rows to write.
        epoch: The epoch.
        write: `mask`, or a compiled writer with the same result.

    Returns:
        The levels and weights of the segments.
    """
    low, high = parameters["noise_range"]
    ratio = levels(target.segments, low, high, parameters["stratified"], task, epoch)
    level, exact = quantised(ratio), parameters["exact_count"]
    probability = level if exact else mask_probability(level, parameters["epsilon"])
    share = write(
        target, probability, ratio if exact else None, tuple(parameters["replace"]), ids, epoch
    )
    if share is not None:
        probability = share
    weighted = parameters["weighting"] == "1/p"
    weight = 1.0 / np.maximum(probability, 2.0**-24) if weighted else np.ones(len(level))
    return Noised(level.astype(np.float32), weight.astype(np.float32))


def uniform_diffusion(
    task: int,
    parameters: Mapping[str, Any],
    resolved: Mapping[str, Any],
    ids: NoiseIds,
    target: Target,
    epoch: int,
    write: Callable[..., Any] = flip,
) -> Noised:
    """Add noise to uniform-diffusion segments, with one of FLIP_STEPS levels per segment.

    Args:
        task: Index of the task. It is not used.
        parameters: The parameters of the task.
        resolved: Values that the plan stores for the task. `flip_thresholds` is used.
        ids: The ids that noise writes.
        target: The segments, and the rows to write.
        epoch: The epoch.
        write: `flip`, or a compiled writer with the same result.

    Returns:
        The levels and weights of the segments.
    """
    low, high = parameters["noise_range"]
    step, level = quantised_level(target.segments.key, low, high, FLIP_STEPS, epoch)
    threshold = np.array(resolved["flip_thresholds"], np.uint64)[step]
    write(target, threshold, parameters["loss_on"] == "all", ids, epoch)
    weight = np.ones(len(level))
    if parameters["weighting"] == "view_scale":
        weight = view_scale(level, ids.drawable)
    return Noised(level.astype(np.float32), weight.astype(np.float32))


def view_scale(level: np.ndarray, drawable: int) -> np.ndarray:
    """Return the loss weights n / (V (1 − n) + n) for levels n: 0 for n = 0, 1 for n = 1.

    Args:
        level: Levels n.
        drawable: Number of ids that a flip can draw, V.

    Returns:
        float64, shaped as `level`.
    """
    return level / (drawable * (1.0 - level) + level)


def block_diffusion(
    task: int,
    parameters: Mapping[str, Any],
    resolved: Mapping[str, Any],
    ids: NoiseIds,
    target: Target,
    epoch: int,
    write: Callable[..., Any] = noise_blocks,
) -> Noised:
    """Add noise to block-diffusion segments, with one level per block.

    In a shard with supervised documents, only trained slots are noised. `blocks_of` describes the
    blocks. With noise = "all", all candidates are noised, and each segment has the level 1 instead
    of one level per block. With the parameter shift, the loss_mask of the noised half x_t is moved
    one slot earlier.

    Args:
        task: Index of the task. It is not used.
        parameters: The parameters of the task.
        resolved: Values that the plan stores for the task. They are not used.
        ids: The ids that noise writes.
        target: The segments, and the rows to write.
        epoch: The epoch.
        write: `noise_blocks`, or a compiled writer with the same result.

    Returns:
        The levels and weights of the segments and of their blocks.
    """
    schedule, drawn_epoch = block_schedule(parameters, epoch)
    m, first_slot = len(target.length), target.segments.at - target.before
    answers = None
    if target.trainable is not None:
        answers = answers_of_flags(target.trainable, first_slot, target.length)
    blocks = blocks_of(parameters, target.length, target.before, answers)
    level = write(target, blocks, schedule, ids, drawn_epoch)
    if parameters["shift"]:
        move_ahead(target.loss_mask, first_slot, target.length, 0)
    if not levels_by_block(parameters):
        return Noised(np.ones(m, np.float32), np.ones(m, np.float32))
    level = level.astype(np.float32, copy=False)
    if parameters["weighting"] == "1/p":
        # A level of 0 would give an infinite weight.
        weight = np.maximum(level, np.float32(2.0**-24))
        np.divide(1, weight, out=weight)
    else:
        weight = np.ones(len(level), np.float32)
    by_block = NoisedBlocks(blocks, level, weight)
    return Noised(np.zeros(m, np.float32), np.ones(m, np.float32), by_block)


# The registered schedules


@dataclass(frozen=True)
class NoiseSchedule:
    """The noise schedule of one same-position objective.

    Attributes:
        name: The objective's name.
        attention: The attention pattern of the objective's segments.
        parameters: The keys of the objective's tasks in `[[tasks]]`. Some are used only for cutting
            and planning.
        draw: (task index, parameters, resolved, ids, target, epoch, write) → Noised. `write` is
            `mask`, `flip` or `noise_blocks`, or a compiled writer with the same result.
        needs: (parameters) → the ids that the tokenizer must have: "mask" for the mask token,
            "ordinary" for at least two ordinary ids.
        least: The smallest value that the lower bound of noise_range may have.
        flips: Whether noised candidates become other ordinary tokens, with the probabilities that
            the task's flip_thresholds give.
    """

    name: str
    attention: str
    parameters: tuple[Parameter, ...]
    draw: Callable[..., Noised]
    needs: Callable[[Mapping[str, Any]], frozenset[str]]
    least: float = 0.0
    flips: bool = False

    def any_token(self, parameters: Mapping[str, Any]) -> bool:
        """Return whether noised candidates become ordinary tokens instead of the mask token.

        If True, a mask token in the text is a candidate like any other token. If False, a mask
        token in the text is never noised, and exactly the noised slots are trained.
        """
        return self.flips or parameters.get("canvas") == "uniform"

    def unusable(self, resolved: Mapping[str, Any]) -> str:
        """Return why a task's flip_thresholds are invalid, or "" if they are valid or not needed.

        `resolved` has the values that the plan stores for the task.
        """
        if not self.flips:
            return ""
        limits: Any = resolved.get("flip_thresholds")
        is_valid = isinstance(limits, list) and len(limits) == FLIP_STEPS
        if is_valid and all(type(limit) is int and 0 <= limit <= ONE for limit in limits):
            return ""
        return f"flip_thresholds are not {FLIP_STEPS} thresholds up to {ONE}"


def _ids_of_shares(parameters: Mapping[str, Any]) -> frozenset[str]:
    """Return which kinds of ids the parameter `replace` needs: "mask", "ordinary" or both."""
    mask_share, ordinary_share, _ = parameters["replace"]
    return frozenset({"mask"} if mask_share > 0 else ()) | frozenset(
        {"ordinary"} if ordinary_share > 0 else ()
    )


MASKED_DIFFUSION = NoiseSchedule(
    name="masked_diffusion",
    attention="bidirectional",
    parameters=(
        Parameter(
            "noise_range",
            (0.0, 1.0),
            "range of a segment's noise level t, drawn uniformly",
            0.0,
            1.0,
        ),
        Parameter("epsilon", 1e-3, "p = (1 − ε) t + ε", 0.0, 1.0, high_open=True),
        Parameter("exact_count", False, "mask k = max(⌊t · candidates⌋, 1), p = k / candidates"),
        Parameter(
            "replace",
            (1.0, 0.0, 0.0),
            "fractions of the chosen tokens: masked, replaced by a random token, unchanged",
            0.0,
            1.0,
            shares=True,
        ),
        Parameter(
            "stratified", False, "spread the levels of a row's segments evenly over the range"
        ),
        Parameter(
            "random_length", 0.0, "probability that a segment is cut to a uniform length", 0.0, 1.0
        ),
        Parameter(
            "weighting", "1/p", "the segment's loss weight: 1/p, or 1", choices=("1/p", "none")
        ),
        Parameter("noise_eos", True, "allow masking eos, so that a model learns to end"),
    ),
    draw=masked_diffusion,
    needs=_ids_of_shares,
)
UNIFORM_DIFFUSION = NoiseSchedule(
    name="uniform_diffusion",
    attention="bidirectional",
    parameters=(
        Parameter(
            "schedule",
            "vp",
            "meaning of a level: Gaussian noise, or the flip rate",
            choices=("vp", "linear", "flip"),
        ),
        Parameter(
            "noise_range", (0.03, 0.15), "range of a segment's level, drawn uniformly", 0.0, 1.0
        ),
        Parameter(
            "loss_on",
            "all",
            "train all candidates, or only the corrupted ones",
            choices=("all", "corrupted"),
        ),
        Parameter(
            "weighting",
            "none",
            "the segment's loss weight: 1, or n / (V (1 − n) + n)",
            choices=("none", "view_scale"),
        ),
        Parameter("noise_eos", True, "allow eos to flip, so that a model learns to end"),
    ),
    draw=uniform_diffusion,
    needs=lambda parameters: frozenset({"ordinary"}),
    flips=True,
)
BLOCK_DIFFUSION = NoiseSchedule(
    name="block_diffusion",
    attention="block_diffusion",
    parameters=(
        Parameter("block_length", 32, "positions per block", 1),
        Parameter("noise_range", (0.3, 0.8), "range of a block's level, drawn uniformly", 0.0, 1.0),
        Parameter("noise_eos", True, "allow noising eos, so that a model learns to end"),
        Parameter(
            "canvas",
            "mask",
            "replacement of noised tokens: the mask, or any ordinary token (which trains all"
            " candidates)",
            choices=("mask", "uniform"),
            later=True,
        ),
        Parameter(
            "noise",
            "level",
            "tokens to noise: each with its block's level; all; or a number per block, with"
            " later positions more likely",
            choices=("level", "all", "position"),
            later=True,
        ),
        Parameter(
            "half_life",
            0.25,
            "for position: the fraction of a block over which weights double",
            0.01,
            later=True,
        ),
        Parameter(
            "complementary",
            False,
            "redrawn epoch 2k + 1 noises exactly the tokens that epoch 2k left",
            later=True,
        ),
        Parameter("shift", False, "store labels and loss at the position before", later=True),
        Parameter(
            "weighting",
            "1/p",
            "a block's loss weight: 1/level, or 1",
            choices=("1/p", "none"),
            later=True,
        ),
        Parameter(
            "block_origin",
            "none",
            "where the blocks of supervised documents start: at each answer, or at the segment;"
            " none: such documents do not draw this task",
            choices=("none", "answer", "segment"),
            later=True,
        ),
        Parameter(
            "eos_fill",
            "none",
            "fill up the last block of a supervised document with trained eos",
            choices=("none", "block"),
            later=True,
        ),
    ),
    draw=block_diffusion,
    needs=lambda parameters: frozenset(
        {"ordinary" if parameters["canvas"] == "uniform" else "mask"}
    ),
    least=2.0**-24,
)
SCHEDULES = {
    schedule.name: schedule for schedule in (MASKED_DIFFUSION, UNIFORM_DIFFUSION, BLOCK_DIFFUSION)
}
"""Objective → its noise schedule."""
