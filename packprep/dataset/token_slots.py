"""Where next-token objectives put a segment's tokens in an epoch, by its key: redraw moves them there, and their inverse is free.

    epoch 0      10 11 <a> 14 15 <b>  <a> 12 13 <b> 16       as stored
    tokens       10 11 12 13 14 15 16                         from their slots in epoch 0, never by looking for sentinels
    epoch 3      10 <a> 12 13 14 <b>  <a> 11 <b> 15 16       as many spans and tokens of noise, so as many slots

What is written for epoch 0 is what the kernels of `objectives/` draw; later epochs draw under purposes of their own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from packprep import randomness
from packprep.dataset.boundaries import ranks
from packprep.dataset.manifest import Parameter
from packprep.dataset.noise import words_of
from packprep.randomness import (
    NOISE_SPANS,
    PIVOT,
    REDRAWN_NOISE_SPANS,
    REDRAWN_PIVOT,
    REDRAWN_ROLL,
    REDRAWN_TEXT_SPANS,
    ROLL,
    TEXT_SPANS,
)


class Placed(NamedTuple):
    """What stands where in segments' bodies; slots are flat.

    token     int64[Σ n]: the slots of the segments' tokens, in document order
    sentinel  int64[k]: the slots of sentinels
    number    int64[k]: which sentinel stands there
    slots     int64[m]: how many slots each body takes
    prefix    int64[m]: how many of these are of the prefix
    """

    token: np.ndarray
    sentinel: np.ndarray
    number: np.ndarray
    slots: np.ndarray
    prefix: np.ndarray


@dataclass(frozen=True)
class TokenLaw:
    """Where one next-token objective puts tokens.

    name         the objective's.
    parameters   the keys of its tasks in `[[tasks]]`.
    place        (parameters, sentinels int, key uint64[m], n int64[m], first_slot int64[m], epoch) → Placed, of segments of n
                 tokens, 2 or more, whose bodies begin at `first_slot`. sentinels: how many there are.
    sentinels    (parameters) → the least number of sentinels that it can do with.
    """

    name: str
    parameters: tuple[Parameter, ...]
    place: Callable[[Mapping[str, Any], int, np.ndarray, np.ndarray, np.ndarray, int], Placed]
    sentinels: Callable[[Mapping[str, Any]], int]


# span_corruption


def span_counts(parameters: Mapping[str, Any], sentinels: int, n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n_noise, n_spans), int64[m] each, as `objectives.span_corruption.span_counts` of each n, 2 or more."""
    noise = np.clip(np.rint(n * parameters["noise_density"]).astype(np.int64), 1, n - 1)
    spans = np.rint(noise / parameters["mean_span_length"]).astype(np.int64)
    most = np.int64(sentinels - int(parameters["random_roll"]))
    return noise, np.maximum(np.minimum(np.minimum(spans, most), np.minimum(noise, n - noise)), 1)


def span_slots(
    parameters: Mapping[str, Any], sentinels: int, key: np.ndarray, n: np.ndarray, first_slot: np.ndarray, epoch: int
) -> Placed:
    """Where span_corruption puts tokens and sentinels, as `TokenLaw.place`."""
    n_noise, n_spans = span_counts(parameters, sentinels, n)
    purposes = (TEXT_SPANS, NOISE_SPANS) if epoch == 0 else (REDRAWN_TEXT_SPANS, REDRAWN_NOISE_SPANS)
    lengths = np.empty(2 * int(n_spans.sum()), np.int64)  # of runs, alternately text and noise
    for which, (total, purpose) in enumerate(zip((n - n_noise, n_noise), purposes, strict=True)):
        lengths[which::2] = _part_lengths(key, total, n_spans, purpose, epoch)
    count, first = 2 * n_spans, np.zeros(len(n), np.int64)
    if parameters["random_roll"]:
        lengths, count, first = _rolled(key, n, n_noise, n_spans, lengths, epoch)
    segment = np.repeat(np.arange(len(n)), count)
    is_noise = (ranks(count) + first[segment]) & 1
    begin = np.cumsum(count) - count  # each segment's first run
    noise_runs = np.add.reduceat(is_noise, begin)
    number = _before(is_noise, segment, begin)
    of_noise, of_text = _before(lengths * is_noise, segment, begin), _before(lengths * (1 - is_noise), segment, begin)
    targets = first_slot + n - n_noise + noise_runs
    in_inputs, in_targets = first_slot[segment] + of_text + number, targets[segment] + of_noise + number
    at = np.where(is_noise, in_targets + 1, in_inputs)
    token = np.repeat(at - (np.cumsum(lengths) - lengths), lengths)
    token += np.arange(len(token))
    noise = np.flatnonzero(is_noise)
    sentinel = np.concatenate((in_inputs[noise], in_targets[noise]))
    return Placed(token, sentinel, np.tile(number[noise], 2), n + 2 * noise_runs, n - n_noise + noise_runs)


def _before(values: np.ndarray, segment: np.ndarray, begin: np.ndarray) -> np.ndarray:
    """The sum of the values before each in its segment. begin: each segment's first."""
    total = np.cumsum(values) - values
    return total - total[begin][segment]


def _part_lengths(key: np.ndarray, total: np.ndarray, parts: np.ndarray, purpose: int, epoch: int) -> np.ndarray:
    """int64[Σ parts]: the lengths of the non-empty parts into which each total is cut, uniformly over all ways.

    Floyd's sampling of distinct cut points (Bentley and Floyd 1987): draw i takes a cut of 1 … j, j = total − parts + 1 + i,
    and j itself where that one is taken.
    """
    draws = parts - 1
    segment, i = np.repeat(np.arange(len(draws)), draws), ranks(draws)
    last = (total - parts + 1)[segment] + i
    bound = last.astype(np.uint64)
    product = words_of(key, draws, purpose, "<u4", epoch).astype(np.uint64) * bound
    low = product & np.uint64(0xFFFFFFFF)
    cut = (product >> np.uint64(32)).astype(np.int64)
    again = np.flatnonzero(low < bound)
    again = again[low[again] < (np.uint64(1 << 32) % bound[again])]
    if len(again):
        cut[again] = randomness.integers(key[segment[again]], purpose, i[again], last[again], epoch)
    size, begin = int(total.sum()), np.cumsum(total) - total
    cut, last = begin[segment] + 1 + cut, begin[segment] + last
    order, earliest = np.arange(len(cut)), np.empty(size + 1, np.int64)
    earliest[cut[::-1]] = order[::-1]
    taken = earliest[cut] != order  # by an earlier draw of the same cut
    new, moved = taken, np.zeros(size + 1, np.bool_)
    while new.any():  # or by an earlier one that gave way to it
        moved[last[new]] = True
        new = moved[cut] & ~taken
        taken = taken | new
    bounds = np.zeros(size + 1, np.bool_)
    bounds[begin] = bounds[size] = True
    bounds[np.where(taken, last, cut)] = True
    return np.diff(np.flatnonzero(bounds))


def _rolled(
    key: np.ndarray, n: np.ndarray, n_noise: np.ndarray, n_spans: np.ndarray, lengths: np.ndarray, epoch: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(run lengths, runs int64[m], 1 where the first run is noise int64[m]) after the rotation by an offset of 0 … n − 1.

    Of the n offsets the first n_noise − n_spans cut a span. Which kind it is stays that of epoch 0, so that the length does;
    in later epochs the offset is uniform within its kind.
    """
    offset = randomness.integers(key, ROLL, 0, n)
    inside = n_noise - n_spans
    cuts = offset < inside
    left = np.where(cuts, offset, offset - inside)
    if epoch:
        left = randomness.integers(key, REDRAWN_ROLL, 0, np.where(cuts, inside, n - inside), epoch)
    runs = 2 * n_spans
    segment, is_noise = np.repeat(np.arange(len(n)), runs), np.arange(len(lengths)) & 1
    offsets = np.where(cuts[segment], (lengths - 1) * is_noise, np.where(is_noise, 1, lengths))
    ends, begin = np.cumsum(offsets), np.cumsum(runs) - runs
    left = left + (ends - offsets)[begin]
    run = np.searchsorted(ends, left, "right")  # in which the rotation begins
    skip = left - (ends - offsets)[run] + cuts  # how much of it lies before
    count = runs + (skip > 0)
    segment, turn = np.repeat(np.arange(len(n)), count), ranks(count)
    rolled = lengths[begin[segment] + ((run - begin)[segment] + turn) % runs[segment]]
    rolled[turn == 0] -= skip
    rolled[turn == runs[segment]] = skip[skip > 0]
    return rolled, count, (run - begin) & 1


SPAN_CORRUPTION = TokenLaw(
    "span_corruption",
    (
        Parameter("noise_density", 0.15, "share of the tokens that is noise", 0.0, 1.0, low_open=True, high_open=True),
        Parameter("mean_span_length", 3.0, "mean tokens of a span", 1.0),
        Parameter("random_roll", False, "rotate the mask, so that a segment may begin with noise and end without"),
        Parameter(
            "too_many_spans",
            "split",
            "where a segment would need more spans than there are sentinels: shorter segments, or fewer, longer spans",
            choices=("split", "lower"),
        ),
    ),
    span_slots,
    lambda parameters: 1 + int(parameters["random_roll"]),
)


# prefix_lm


def pivot_slots(
    parameters: Mapping[str, Any], sentinels: int, key: np.ndarray, n: np.ndarray, first_slot: np.ndarray, epoch: int
) -> Placed:
    """Where prefix_lm puts tokens and the sentinel, as `TokenLaw.place`: the pivot, uniform over 1 … n − 1, may have a
    sentinel, which moves what follows by a slot."""
    pivot = 1 + randomness.integers(key, REDRAWN_PIVOT if epoch else PIVOT, 0, n - 1, epoch)
    shift = int(parameters["sentinel"])
    place = ranks(n)
    token = np.repeat(first_slot, n) + place
    if shift:
        token += place >= np.repeat(pivot, n)
    sentinel = first_slot + pivot if shift else np.zeros(0, np.int64)
    return Placed(token, sentinel, np.zeros(len(sentinel), np.int64), n + shift, pivot)


PREFIX_LM = TokenLaw(
    "prefix_lm",
    (Parameter("sentinel", False, "put the first sentinel between the prefix and its continuation"),),
    pivot_slots,
    lambda parameters: int(parameters["sentinel"]),
)

LAWS = {law.name: law for law in (SPAN_CORRUPTION, PREFIX_LM)}
