"""Which row comes when: shuffling and splitting over ranks as index arithmetic, in O(1) memory.

    global sample   g = rows + s·B·W + r·B + j     step s, rank r of W, place j of B
    epoch           e = g div n
    row             permutation(seed, e)(g mod n)

`rows` are the rows delivered over all ranks before the state was loaded: nothing else is remembered, so a state goes on
at any world size and batch size, and no row is dropped or repeated within an epoch.

Balanced, sample g of this order is another of its window, [k·Q, (k + 1)·Q) and of one epoch, whose rows are sorted by cost:

    cost     ▁▁▁▂▂▂▂▂▃▃▄▄▅▅▆▆▆▇▇▇████     a window, sorted, in groups of like cost, the rows of a step
    groups   └─ 0 ─┘└─ 1 ─┘└─ 2 ─┘…       in an order by key(seed, k)
    dealt    ▁▂▁▂▁▂ …                     inside of a group even for every number of ranks that divides it

Which dataset each sample of a mixture is of: a keyed pattern for each cycle, so that counts have a closed form.

    counts        c_d of each dataset in a cycle of C = Σ c_d samples
    cycle, place  k, p = divmod(g, C)                                        of global sample g
    shuffled      dataset d  where  Σ c_i (i < d)  ≤  permute(p, C, key(seed, k))  <  Σ c_i (i ≤ d)
    in order      each cycle the same: the i-th of dataset d at (2 i + 1) / (2 c_d) of it, ties to the first dataset
    its number    s = k · c_d + the places before p of cycle k that are d's

Among the first g samples, k · c_d and what the places before p hold are of dataset d.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from packprep import randomness
from packprep.errors import ArgumentError

LONGEST_CYCLE = 1000
_PLACES_AT_ONCE = 1 << 16


def permutation(seed: int, epoch: int | np.ndarray, n_rows: int, index: np.ndarray) -> np.ndarray:
    """int64: the rows at the places `index` (0 … n_rows − 1) of an epoch, or of one for each, shaped as `index`.

    seed: 0 … 2⁶⁴ − 1. epoch: chance repeats after 2³² of them.
    """
    key = randomness.bits64(np.uint64(seed), randomness.SHUFFLE, 0, epoch & 0xFFFFFFFF)
    return randomness.permute(index, n_rows, key)


def rows_of_samples(samples: np.ndarray, n_rows: int, seed: int, shuffle: bool) -> np.ndarray:
    """int64, shaped as `samples`: the rows of global samples g ≥ 0; n_rows > 0."""
    epochs, places = np.divmod(np.asarray(samples, np.int64), n_rows)
    if not shuffle:
        return places
    one = epochs.size and epochs.min() == epochs.max()  # then one key does for all
    return permutation(seed, int(epochs.flat[0]) if one else epochs, n_rows, places)


def samples_of_step(rows: int, step: int, batch_size: int, rank: int, world_size: int) -> range:
    """The global samples of one rank's step, as if there were no end."""
    begin = rows + step * batch_size * world_size + rank * batch_size
    return range(begin, begin + batch_size)


def n_steps(rows: int, end: int, batch_size: int, world_size: int) -> int:
    """ceil((end − rows) / (B·W)): the steps that every rank makes until sample `end`, E·n; the last may be short."""
    return max(0, -(-(end - rows) // (batch_size * world_size)))


# Balanced steps


class Balance(NamedTuple):
    """How steps are made even: rows cost attention · Σn² + linear · Σn over their segments of n slots.

    group: rows of a step over all ranks. window: rows that are sorted together, a multiple of group.
    """

    attention: float
    linear: float
    group: int
    window: int


def window_of(sample: int, window: int, epoch_rows: int | None) -> tuple[int, int]:
    """The samples [begin, end) among which sample `sample` of the balanced order lies: of one epoch, if there are such."""
    begin = sample // window * window
    end = begin + window
    if epoch_rows is not None:
        epoch_begin = sample // epoch_rows * epoch_rows
        begin, end = max(begin, epoch_begin), min(end, epoch_begin + epoch_rows)
    return begin, end


def balanced(costs: np.ndarray, begin: int, balance: Balance, seed: int) -> np.ndarray:
    """int64: the places of a window's rows, in the order in which they come. costs: float64, of the rows from sample `begin` on.

    A group stands at a multiple of `group`, so where an epoch cuts the first or the last one, these get rows of middling cost.
    """
    n, group = len(costs), balance.group
    places = np.argsort(costs, kind="stable")
    head = min(n, -begin % group)
    tail = (n - head) % group
    cut = (n - head - tail) // 2
    parts = places[cut : cut + head + tail]
    whole = np.concatenate((places[:cut], places[cut + head + tail :])).reshape(-1, group)
    if len(whole):
        number = begin // balance.window
        key = randomness.bits64(np.uint64(seed), randomness.BALANCED_GROUPS, number & 0xFFFFFFFF, number >> 32)
        whole = np.take_along_axis(whole, dealt(costs[whole]), axis=1)
        whole = whole[randomness.permute(np.arange(len(whole)), len(whole), key)]
    return np.concatenate((parts[:head], whole.ravel(), parts[head:]))


def dealt(costs: np.ndarray) -> np.ndarray:
    """int64[groups, rows]: the order of each group's rows, float64[groups, rows], in which neighbours make up for each other.

    The dearest half is paired with the cheapest, dear with cheap; then pairs are paired by their sums, and so on. So every
    stretch of 2, 4, 8, … rows that begins at a multiple of its length costs nearly the same, which a rank of that batch size
    reads. What remains odd is dealt in threes, fives, …
    """
    places, sums = np.broadcast_to(np.arange(costs.shape[1]), costs.shape)[..., None], costs
    while (n := sums.shape[1]) > 1:
        several = next(factor for factor in range(2, n + 1) if n % factor == 0)
        shape = (len(costs), n // several)
        merged, together = np.zeros(shape), np.empty((*shape, 0), np.int64)
        by_cost = np.argsort(-sums, axis=1, kind="stable")
        for some in np.split(by_cost, several, axis=1):  # the dearest first, each to what is cheapest so far
            to = np.argsort(merged, axis=1, kind="stable")
            added = np.empty_like(some)
            np.put_along_axis(added, to, some, axis=1)
            merged = merged + np.take_along_axis(sums, added, axis=1)
            together = np.concatenate((together, np.take_along_axis(places, added[..., None], axis=1)), axis=2)
        places, sums = together, merged
    return places[:, 0]


# Several datasets


def counts_of(shares: Sequence[float]) -> np.ndarray:
    """int64[D]: samples of each dataset in a cycle, for shares that are normalised to sum to 1.

    The cycle is the shortest in which every share is a whole number, 3:1 → 3 and 1. Where none of up to 1000 samples
    is, it has 1000, and what rounding down leaves goes to the largest remainders, ties to the first.
    """
    given = list(shares)
    for i, share in enumerate(given):
        number = isinstance(share, int | float | np.integer | np.floating) and not isinstance(share, bool)
        if not number or not math.isfinite(share) or share <= 0:
            raise ArgumentError(f"shares[{i}] is {share!r} and should be a number above 0")
    exact = np.array(given, np.float64) / max(given)  # first: a sum of large numbers may be infinite
    exact /= exact.sum()
    lengths = np.arange(1, LONGEST_CYCLE + 1)[:, None]
    whole = (np.abs(exact * lengths - np.rint(exact * lengths)) <= 1e-9 * lengths).all(axis=1)
    if whole.any():
        counts = np.rint(exact * (1 + int(whole.argmax()))).astype(np.int64)
    else:
        counts = np.floor(exact * LONGEST_CYCLE).astype(np.int64)
        by_remainder = np.argsort(counts - exact * LONGEST_CYCLE, kind="stable")
        counts[by_remainder[: LONGEST_CYCLE - int(counts.sum())]] += 1
    for i, count in enumerate(counts.tolist()):
        if count == 0:
            raise ArgumentError(
                f"shares[{i}] is {given[i]!r}, which is no sample in {LONGEST_CYCLE}: leave the dataset out, or give it more"
            )
    return counts


def seed_of(seed: int, dataset: int) -> int:
    """The seed of the order of one dataset's rows: the first has the mixture's own, the others one derived from it."""
    return int(randomness.bits64(np.uint64(seed), randomness.MIXTURE_SEED, dataset)) if dataset else seed


def pattern(cycles: np.ndarray, counts: np.ndarray, seed: int, shuffle: bool) -> np.ndarray:
    """int64[K, C]: the dataset of each place of the cycles, int64[K]."""
    length, dataset = int(counts.sum()), np.repeat(np.arange(len(counts)), counts)
    if not shuffle:
        number = np.arange(length) - np.repeat(np.cumsum(counts) - counts, counts)
        spread = dataset[np.argsort((2 * number + 1) / counts[dataset], kind="stable")]
        return np.broadcast_to(spread, (len(cycles), length))
    low, high = cycles & 0xFFFFFFFF, cycles >> 32
    keys = randomness.bits64(np.uint64(seed), randomness.MIXTURE_CYCLE, low, high)
    places = np.broadcast_to(np.arange(length), (len(cycles), length))
    return dataset[randomness.permute(places, length, keys[:, None])]


def of_samples(samples: np.ndarray, counts: np.ndarray, seed: int, shuffle: bool) -> tuple[np.ndarray, np.ndarray]:
    """(dataset, number of the sample among that dataset's), int64, shaped as `samples`: global samples g ≥ 0."""
    length = int(counts.sum())
    cycles, places = np.divmod(np.asarray(samples, np.int64).ravel(), length)
    by_cycle = np.argsort(cycles, kind="stable")
    datasets, numbers = np.empty_like(cycles), np.empty_like(cycles)
    in_cycle = np.arange(length) - np.repeat(np.cumsum(counts) - counts, counts)  # of the places sorted by dataset
    first = np.flatnonzero(np.diff(cycles[by_cycle], prepend=-1))  # the first sample of each cycle
    at_once = max(1, _PLACES_AT_ONCE // length)
    for begin in range(0, len(first), at_once):
        end = first[begin + at_once] if begin + at_once < len(first) else len(cycles)
        some, own = by_cycle[first[begin] : end], cycles[by_cycle[first[begin : begin + at_once]]]
        which = pattern(own, counts, seed, shuffle)
        number = np.empty_like(which)
        np.put_along_axis(number, np.argsort(which, axis=1, kind="stable"), in_cycle[None], axis=1)
        at = np.searchsorted(own, cycles[some]), places[some]
        datasets[some] = which[at]
        numbers[some] = cycles[some] * counts[which[at]] + number[at]
    shape = np.shape(samples)
    return datasets.reshape(shape), numbers.reshape(shape)


def among_first(samples: int, counts: np.ndarray, seed: int, shuffle: bool) -> np.ndarray:
    """int64[D]: how many of the first `samples` of a mixture are of each dataset."""
    cycle, place = divmod(samples, int(counts.sum()))
    begun = pattern(np.array([cycle]), counts, seed, shuffle)[0, :place]
    return cycle * counts + np.bincount(begun, minlength=len(counts))
