"""Compute the order of rows: shuffle and split over ranks by index arithmetic, in O(1) memory.

    global sample   g = rows + s·B·W + r·B + j     step s, rank r of W, position j in a batch of B
    epoch           e = g div n
    row             permutation(seed, e)(g mod n)

`rows` is the number of rows that all ranks delivered before the state was loaded. A state has no
other position, so it can be loaded with any world size and batch size. No row is dropped or
repeated within an epoch.

Balanced steps reorder the samples inside each window [k·Q, (k + 1)·Q) of an epoch. The rows of a
window are sorted by cost and cut into groups. A group has the rows of one step over all ranks:

    cost     ▁▁▁▂▂▂▂▂▃▃▄▄▅▅▆▆▆▇▇▇████     the rows of a window, sorted by cost
    groups   └─ 0 ─┘└─ 1 ─┘└─ 2 ─┘…       shuffled by key(seed, k)
    dealt    ▁▂▁▂▁▂ …                     ordered so that all ranks of a step get similar costs

A mixture splits its samples into cycles. Dataset d provides c_d samples of each cycle, at positions
that follow from a key. So a sample's dataset, and its number among the dataset's samples, can be
computed without the earlier cycles:

    cycle length        C = Σ c_d
    cycle and position  k, p = divmod(g, C)           of global sample g
    with shuffle        g belongs to the dataset d with
                        Σ c_i (i < d)  ≤  permute(p, C, key(seed, k))  <  Σ c_i (i ≤ d)
    without shuffle     all cycles are equal: the samples i of all datasets d are sorted by
                        (2 i + 1) / (2 c_d), and ties go to the first dataset
    number within d     s = k · c_d + (positions before p in cycle k that belong to d)

Shares that change are described by `Schedule`. The number of samples from a dataset, among the
first n samples, is then close to the integral of the dataset's share.
"""

import math
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from packprep import randomness
from packprep.dataset.boundaries import owners, ranks
from packprep.errors import ArgumentError
from packprep.forking import lazy

LONGEST_CYCLE = 1000
_PLACES_AT_ONCE = 1 << 16
_GROUPS = 64  # Default number of groups in a window.
SCHEDULED_AT_ONCE = 1 << 13
_BLOCK = 256  # Number of samples of a schedule that are computed together.
SAMPLES_END = 1 << 62  # Every sample number is below this limit.


def integer(name: str, value: Any, least: int, below: int) -> int:
    """Return an argument as an int after checking its type and range.

    Args:
        name: Name of the argument, for error messages.
        value: The argument. Bools are refused.
        least: The smallest allowed value.
        below: The upper limit, which is not allowed itself.

    Returns:
        The value as an int.

    Raises:
        ArgumentError: If the value is not an integer in least … below − 1.
    """
    try:
        number = int(value.__index__())
    except AttributeError:
        number = None
    if number is None or isinstance(value, bool | np.bool_) or not least <= number < below:
        raise ArgumentError(
            f"{name} is {value!r} and should be an integer in {least} … {below - 1}"
        )
    return number


def true_or_false(name: str, value: Any) -> bool:
    """Return an argument as a bool.

    Args:
        name: Name of the argument, for error messages.
        value: A bool, 0 or 1.

    Returns:
        The value as a bool.

    Raises:
        ArgumentError: If the value is of another kind, such as the string "false".
    """
    if isinstance(value, bool | np.bool_) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise ArgumentError(f"{name} is {value!r} and should be True or False")


def permutation(
    seed: int, epoch: int | np.ndarray, n_rows: int, index: np.ndarray, inverse: bool = False
) -> np.ndarray:
    """Return the rows at the given positions of a shuffled epoch.

    Args:
        seed: Random seed, 0 … 2⁶⁴ − 1.
        epoch: One epoch, or an array with an epoch for each position. Randomness repeats after 2³²
            epochs.
        n_rows: Number of rows.
        index: Positions in the epoch, 0 … n_rows − 1.
        inverse: Whether `index` has row indices, and positions are returned.

    Returns:
        Row indices, int64, shaped as `index`.
    """
    key = randomness.bits64(np.uint64(seed), randomness.SHUFFLE, 0, epoch & 0xFFFFFFFF)
    return randomness.permute(index, n_rows, key, inverse)


def rows_of_samples(samples: np.ndarray, n_rows: int, seed: int, shuffle: bool) -> np.ndarray:
    """Return the rows of global samples.

    Args:
        samples: Global samples g ≥ 0, integers of any shape.
        n_rows: Number of rows, at least 1.
        seed: Random seed.
        shuffle: Whether rows are shuffled in every epoch.

    Returns:
        Row indices, int64, shaped as `samples`.
    """
    epochs, places = np.divmod(np.asarray(samples, np.int64), n_rows)
    if not shuffle:
        return places
    # One key is enough for a single epoch.
    is_one_epoch = epochs.size and epochs.min() == epochs.max()
    return permutation(seed, int(epochs.flat[0]) if is_one_epoch else epochs, n_rows, places)


def samples_of_row(row: int, epochs: int, n_rows: int, seed: int, shuffle: bool) -> np.ndarray:
    """Return the global samples that read a row, the inverse of `rows_of_samples`.

    Args:
        row: Row index.
        epochs: Number of epochs to search, from epoch 0.
        n_rows: Number of rows.
        seed: Random seed.
        shuffle: Whether rows are shuffled in every epoch.

    Returns:
        One global sample per epoch, ascending, int64[epochs].
    """
    numbers = np.arange(epochs, dtype=np.int64)
    places = np.full(epochs, row)
    if shuffle:
        places = permutation(seed, numbers, n_rows, places, inverse=True)
    return numbers * n_rows + places


def samples_of_step(rows: int, step: int, batch_size: int, rank: int, world_size: int) -> range:
    """Return the global samples that one rank reads in a step.

    The function does not know the last sample of the iteration, so the range may exceed it.

    Args:
        rows: Samples that all ranks delivered before step 0.
        step: Number of the step.
        batch_size: Samples per rank and step.
        rank: Index of the rank.
        world_size: Number of ranks.

    Returns:
        The range of samples.
    """
    begin = rows + step * batch_size * world_size + rank * batch_size
    return range(begin, begin + batch_size)


def n_steps(rows: int, end: int, batch_size: int, world_size: int) -> int:
    """Return the number of steps that each rank makes until sample `end`.

    The number is ceil((end − rows) / (batch_size · world_size)). The last step may have fewer
    samples.

    Args:
        rows: Samples that all ranks delivered before step 0.
        end: The first sample that is not delivered. E epochs of n rows end at E·n.
        batch_size: Samples per rank and step.
        world_size: Number of ranks.

    Returns:
        The number of steps, at least 0.
    """
    return max(0, -(-(end - rows) // (batch_size * world_size)))


# Balanced steps


class Balance(NamedTuple):
    """The settings of balanced steps.

    A row costs attention · Σn² + linear · Σn over its segments of n slots.

    Attributes:
        attention: Weight of Σn².
        linear: Weight of Σn.
        group: Number of rows of a step over all ranks.
        window: Number of rows that are sorted together, a multiple of `group`.
        end: The first sample that a mixture cannot deliver, or None. A window is cut in two before
            this sample.
    """

    attention: float
    linear: float
    group: int
    window: int
    end: int | None = None


def window_of(
    sample: int, window: int, epoch_rows: int | None, cut: int | None = None
) -> tuple[int, int]:
    """Return the window that contains a sample.

    A window is a range of samples that are balanced together. Windows are cut at the bounds of
    epochs, and before sample `cut`.

    Args:
        sample: A sample of the balanced order.
        window: Number of samples of a window that is not cut.
        epoch_rows: Number of rows of an epoch, or None without epochs.
        cut: The sample before which a window is cut, or None.

    Returns:
        The window's first sample, and the first sample after the window.
    """
    begin = sample // window * window
    end = begin + window
    if cut is not None and begin < cut < end:
        begin, end = (begin, cut) if sample < cut else (cut, end)
    if epoch_rows is not None:
        epoch_begin = sample // epoch_rows * epoch_rows
        begin, end = max(begin, epoch_begin), min(end, epoch_begin + epoch_rows)
    return begin, end


def ending_at(balance: Balance, sample: int) -> Balance:
    """Return settings of balanced steps that cut windows before a given sample.

    Balancing then moves no row across this sample.

    Args:
        balance: The settings.
        sample: The sample before which a window is cut.

    Returns:
        The settings with `end` set to the sample, or with no `end` if a window starts at this
        sample anyway.
    """
    return balance._replace(end=sample if sample % balance.window else None)


def balanced(costs: np.ndarray, begin: int, balance: Balance, seed: int) -> np.ndarray:
    """Return the balanced order of a window's rows.

    Groups begin at samples that are multiples of `balance.group`. If the window contains only a
    part of its first or last group, that part gets rows of medium cost.

    Args:
        costs: Costs of the window's rows, float64[n].
        begin: The first sample of the window.
        balance: The settings.
        seed: Random seed.

    Returns:
        For each position of the balanced order, the index of its row in `costs`, int64[n].
    """
    n, group = len(costs), balance.group
    places = np.argsort(costs, kind="stable")
    # Epochs and mixtures may cut a window inside a group, so its first or last group may be
    # incomplete.
    head = min(n, -begin % group)
    tail = (n - head) % group
    # The incomplete groups get rows from the middle of the sorted order.
    cut = (n - head - tail) // 2
    parts = places[cut : cut + head + tail]
    # All other rows stay sorted, so the rows of a group have similar costs.
    whole_groups = np.concatenate((places[:cut], places[cut + head + tail :])).reshape(-1, group)
    if len(whole_groups):
        number = begin // balance.window
        key = randomness.bits64(
            np.uint64(seed), randomness.BALANCED_GROUPS, number & 0xFFFFFFFF, number >> 32
        )
        whole_groups = np.take_along_axis(whole_groups, dealt(costs[whole_groups]), axis=1)
        # So far the groups ascend in cost. The shuffle spreads expensive steps over the window.
        whole_groups = whole_groups[
            randomness.permute(np.arange(len(whole_groups)), len(whole_groups), key)
        ]
    return np.concatenate((parts[:head], whole_groups.ravel(), parts[head:]))


def dealt(costs: np.ndarray) -> np.ndarray:
    """Order the rows of each group so that all ranks of a step have similar costs.

    Each expensive row is paired with a cheap row. Then pairs of high total cost are paired with
    pairs of low total cost, and so on. If the group's size has the prime factor 3, one step of this
    algorithm combines three sets of rows instead of two. Prime factors 5, 7, … are handled in the
    same way. As a result, runs of 2, 4, 8, … rows that begin at a multiple of their length have
    similar costs. A rank with a batch size of 8 reads a run of 8 rows.

    Args:
        costs: Costs of the rows, float64[groups, rows].

    Returns:
        The order of each group's rows as indices into the group, int64[groups, rows].
    """
    # Each row starts as a separate set. Each round merges `several` sets into one, until one set is
    # left.
    places, sums = np.broadcast_to(np.arange(costs.shape[1]), costs.shape)[..., None], costs
    while (n := sums.shape[1]) > 1:
        several = next(factor for factor in range(2, n + 1) if n % factor == 0)
        shape = (len(costs), n // several)
        merged, together = np.zeros(shape), np.empty((*shape, 0), np.int64)
        by_cost = np.argsort(-sums, axis=1, kind="stable")
        # Add the most expensive entries first, each to the cheapest sum so far.
        for entries in np.split(by_cost, several, axis=1):
            to = np.argsort(merged, axis=1, kind="stable")
            added = np.empty_like(entries)
            np.put_along_axis(added, to, entries, axis=1)
            merged = merged + np.take_along_axis(sums, added, axis=1)
            together = np.concatenate(
                (together, np.take_along_axis(places, added[..., None], axis=1)), axis=2
            )
        places, sums = together, merged
    return places[:, 0]


def balance_of(balance: Any, window: Any, shuffle: bool) -> Balance | None:
    """Return the settings of balanced steps for the arguments of `batches`.

    Args:
        balance: The argument `balance` of `batches`.
        window: The argument `window` of `batches`.
        shuffle: Whether rows are shuffled, which balanced steps require.

    Returns:
        A `Balance`, or None if `balance` is None.

    Raises:
        ArgumentError: If the arguments are invalid.
    """
    if balance is None:
        if window is not None:
            raise ArgumentError(
                f"window = {window!r} requires balanced steps\n"
                'hint: also give balance=("attention", group)'
            )
        return None
    if not isinstance(balance, tuple | list) or len(balance) != 2:
        raise ArgumentError(
            f'balance is {balance!r} and should be ("attention", group), where group is the'
            " number of rows per step over all ranks"
        )
    cost, group = balance
    weights = (1, 0) if isinstance(cost, str) and cost == "attention" else cost
    two = isinstance(weights, tuple | list) and len(weights) == 2
    if not two or not all(map(_is_number, weights)) or not any(weights):
        raise ArgumentError(
            f'the cost of balance is {cost!r} and should be "attention", or (a, b) for a · Σn² +'
            " b · Σn over the segments of a row, with n positions each. Both numbers are at"
            " least 0, and one is above 0"
        )
    rows = integer("the group of balance", group, 1, 1 << 31)
    size = _GROUPS * rows if window is None else integer("window", window, 1, 1 << 40)
    if size % rows:
        raise ArgumentError(
            f"window is {size} and should be a multiple of the group, {rows}, because it is cut"
            " into whole groups"
        )
    if not shuffle:
        raise ArgumentError(
            "balance changes the order of rows, but shuffle=False asks for the stored order\n"
            "hint: leave one out"
        )
    return Balance(float(weights[0]), float(weights[1]), rows, size)


def _is_number(value: Any) -> bool:
    """Return whether a value is a number of at least 0 that a float64 can hold."""
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(
        value, bool
    )
    return number and 0 <= value <= sys.float_info.max


# Several datasets


def counts_of(shares: Sequence[float]) -> np.ndarray:
    """Return how many samples of a cycle each dataset provides, int64[D].

    The cycle has the smallest length that gives every dataset a whole number of samples. Shares of
    0.75 and 0.25 give a cycle of 4 samples with the counts 3 and 1. If this length would exceed
    1000, the length is 1000, and counts are rounded down. The missing samples go to the datasets
    with the largest remainders. If remainders are equal, the first dataset gets the sample.

    Raises:
        ArgumentError: If a share is invalid or gives less than 1 sample in 1000.
    """
    weights = list(shares)
    for i, share in enumerate(weights):
        if not _is_number(share) or share == 0:
            raise ArgumentError(
                f"shares[{i}] is {share!r:.100} and should be a number above 0, of at most 1.8e308"
            )
    # Divide first, since a sum of large numbers may be infinite.
    exact = np.array(weights, np.float64) / max(weights)
    exact /= exact.sum()
    # Shares are floats, so counts may miss whole numbers by the rounding error.
    lengths = np.arange(1, LONGEST_CYCLE + 1)[:, None]
    is_exact = (np.abs(exact * lengths - np.rint(exact * lengths)) <= 1e-9 * lengths).all(axis=1)
    if is_exact.any():
        counts = np.rint(exact * (1 + int(is_exact.argmax()))).astype(np.int64)
    else:
        counts = np.floor(exact * LONGEST_CYCLE).astype(np.int64)
        by_remainder = np.argsort(counts - exact * LONGEST_CYCLE, kind="stable")
        counts[by_remainder[: LONGEST_CYCLE - int(counts.sum())]] += 1
    for i, count in enumerate(counts.tolist()):
        if count == 0:
            raise ArgumentError(
                f"shares[{i}] is {weights[i]!r}, which is less than one sample in {LONGEST_CYCLE}\n"
                "hint: leave the dataset out, or raise its share"
            )
    return counts


def dealing_of(shares: Any, datasets: Sequence[Any], interpolate: Any) -> "np.ndarray | Schedule":
    """Convert the shares that `open_dataset` takes to counts or a schedule.

    Args:
        shares: The argument `shares` of `open_dataset`.
        datasets: The datasets, at least one.
        interpolate: The argument `interpolate` of `open_dataset`.

    Returns:
        Samples of each dataset in a cycle, int64[D], or a `Schedule` for shares that change.

    Raises:
        ArgumentError: If the arguments are invalid.
    """
    if shares is not None and not isinstance(shares, tuple | list | np.ndarray):
        raise ArgumentError(
            f"shares is {shares!r} and should be a list: a number for each dataset, or points"
            " (sample, [number, …])"
        )
    given_shares = [] if shares is None else list(shares)
    if any(isinstance(share, tuple | list) for share in given_shares) and datasets:
        return schedule_of(
            given_shares, len(datasets), "step" if interpolate is None else interpolate
        )
    if len(given_shares) != len(datasets) or not datasets:
        raise ArgumentError(
            f"a list of {len(datasets)} directories requires shares, one for each and at least"
            f" one, but there are {len(given_shares)}\n"
            "hint: give shares = […]"
        )
    if interpolate is not None:
        raise ArgumentError(
            f"interpolate = {interpolate!r} requires shares by sample, [(sample, [number, …]), …]"
        )
    return counts_of(given_shares)


def seed_of(seed: int, dataset: int) -> int:
    """Return the seed that orders one dataset's rows in a mixture.

    Args:
        seed: Random seed of the mixture.
        dataset: Index of the dataset.

    Returns:
        For dataset 0 the mixture's seed, and for every other dataset a seed derived from it.
    """
    return (
        int(randomness.bits64(np.uint64(seed), randomness.MIXTURE_SEED, dataset))
        if dataset
        else seed
    )


def pattern(cycles: np.ndarray, counts: np.ndarray, seed: int, shuffle: bool) -> np.ndarray:
    """Return the dataset at each position of the given cycles.

    Args:
        cycles: Numbers of the cycles, int64[K].
        counts: Samples of each dataset in a cycle, int64[D]. C is their sum.
        seed: Random seed of the mixture.
        shuffle: Whether positions are shuffled. Otherwise datasets are spread evenly.

    Returns:
        Indices of datasets, int64[K, C].
    """
    length, dataset = int(counts.sum()), owners(counts)
    if not shuffle:
        # Sample i of a dataset belongs at the fraction (2 i + 1) / (2 c) of the cycle. Sorting by
        # it spreads all datasets.
        spread = dataset[np.argsort((2 * ranks(counts) + 1) / counts[dataset], kind="stable")]
        return np.broadcast_to(spread, (len(cycles), length))
    low, high = cycles & 0xFFFFFFFF, cycles >> 32
    keys = randomness.bits64(np.uint64(seed), randomness.MIXTURE_CYCLE, low, high)
    places = np.broadcast_to(np.arange(length), (len(cycles), length))
    return dataset[randomness.permute(places, length, keys[:, None])]


def of_samples(
    samples: np.ndarray, counts: "np.ndarray | Schedule", seed: int, shuffle: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the dataset of each sample, and the sample's number within this dataset.

    Args:
        samples: Global samples g ≥ 0, integers of any shape.
        counts: Samples of each dataset in a cycle, int64[D], or a `Schedule`.
        seed: Random seed of the mixture.
        shuffle: Whether the positions of a cycle are shuffled.

    Returns:
        Indices of datasets, and numbers from 0 within each dataset, int64, shaped as `samples`.
    """
    if isinstance(counts, Schedule):
        return _scheduled(samples, counts)
    length = int(counts.sum())
    cycles, places = np.divmod(np.asarray(samples, np.int64).ravel(), length)
    by_cycle = np.argsort(cycles, kind="stable")
    datasets, numbers = np.empty_like(cycles), np.empty_like(cycles)
    # The number of each sample of a cycle within its dataset, for samples sorted by dataset.
    in_cycle = ranks(counts)
    # The index in `by_cycle` of the first sample of each cycle.
    begins = np.flatnonzero(np.diff(cycles[by_cycle], prepend=-1))
    # Only the cycles that contain samples are computed, and only some at a time.
    at_once = max(1, _PLACES_AT_ONCE // length)
    for begin in range(0, len(begins), at_once):
        end = begins[begin + at_once] if begin + at_once < len(begins) else len(cycles)
        indices, own_cycles = (
            by_cycle[begins[begin] : end],
            cycles[by_cycle[begins[begin : begin + at_once]]],
        )
        dataset_numbers = pattern(own_cycles, counts, seed, shuffle)
        # Within a cycle, a stable sort lists the positions of each dataset in ascending order.
        number = np.empty_like(dataset_numbers)
        np.put_along_axis(
            number, np.argsort(dataset_numbers, axis=1, kind="stable"), in_cycle[None], axis=1
        )
        index = np.searchsorted(own_cycles, cycles[indices]), places[indices]
        datasets[indices] = dataset_numbers[index]
        numbers[indices] = cycles[indices] * counts[dataset_numbers[index]] + number[index]
    shape = np.shape(samples)
    return datasets.reshape(shape), numbers.reshape(shape)


def among_first(
    samples: int, counts: "np.ndarray | Schedule", seed: int, shuffle: bool
) -> np.ndarray:
    """Count the samples of each dataset among the first `samples` samples of a mixture.

    Args:
        samples: Number of global samples to count.
        counts: Samples of each dataset in a cycle, int64[D], or a `Schedule`.
        seed: Random seed of the mixture.
        shuffle: Whether the positions of a cycle are shuffled.

    Returns:
        The number of samples of each dataset, int64[D].
    """
    if isinstance(counts, Schedule):
        return np.array(counts.counts(samples), np.int64)
    cycle, place = divmod(samples, int(counts.sum()))
    begun = pattern(np.array([cycle]), counts, seed, shuffle)[0, :place]
    return cycle * counts + np.bincount(begun, minlength=len(counts))


def first_beyond(
    dataset: int, limit: int, counts: "np.ndarray | Schedule", seed: int, shuffle: bool
) -> int | None:
    """Return the first global sample that a dataset cannot provide, because of its limit.

    Args:
        dataset: Index of the dataset.
        limit: Number of samples that the dataset can provide.
        counts: Samples of each dataset in a cycle, int64[D], or a `Schedule`.
        seed: Random seed of the mixture.
        shuffle: Whether the positions of a cycle are shuffled.

    Returns:
        The global sample. None if the dataset provides at most `limit` of the first 2⁶² samples.
    """
    low, high = limit, SAMPLES_END
    if among_first(high, counts, seed, shuffle)[dataset] <= limit:
        return None
    # At most `limit` of the first `low` samples are from the dataset, but more of the first `high`.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (low, middle)
            if among_first(middle, counts, seed, shuffle)[dataset] > limit
            else (middle, high)
        )
    return low


# Shares that change


@dataclass(frozen=True, eq=False)
class Schedule:
    """The shares of D datasets at some samples of a mixture, as exact fractions.

    Attributes:
        points: Sample numbers in ascending order. The first is 0.
        weights: The share of dataset d at sample points[m] is weights[m][d] / sum(weights[m]).
        linear: Whether shares change linearly between two points. Otherwise each point's shares
            apply until the next point. After the last point, shares stay the same.

    Let I_d(n) be the integral of dataset d's share over the first n samples. It is a rational
    number, and Σ I_d(n) = n. A binary tree assigns samples to datasets: all D datasets are a group,
    each group is split into two halves, and each half is a group again. The first half of a group
    gets ⌊A(q) + ½⌋ of the group's first q samples:

        A(q) = I_half(τ), where τ is the time at which I_group(τ) = q

    From q to q + 1, A(q) grows by at most 1, because a half's share is a part of its group's share.
    So each sample goes to exactly one half, and the counts after n samples depend only on n.

    A half's count deviates from its integral by at most ½ more than its group's count. If |q −
    I_group(n)| ≤ e, then |I_half(τ) − I_half(n)| ≤ |I_group(τ) − I_group(n)| ≤ e, and rounding adds
    ½. The count of all datasets together is exact. So the largest deviation is half of the tree's
    height: ½ for two datasets, 1 for up to four, 1½ for up to eight, and 2 for up to sixteen. Other
    methods reach a deviation of at most 1 for any number of datasets (Tijdeman, "The chairman
    assignment problem", 1980). But their choice for a sample depends on all samples before it.
    """

    points: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]
    linear: bool

    def parts(self) -> list[Any]:
        """Return [points, weights, "linear" or "step"], which a mixture's fingerprint includes."""
        return [self.points, self.weights, "linear" if self.linear else "step"]

    def shares(self, sample: int) -> np.ndarray:
        """Return the shares at a sample, float64[D]."""
        m = bisect_right(self.points, sample) - 1
        curves, x = self._curves[1][m], sample - self.points[m]
        up_to = [
            float(Fraction(slope + 2 * square * x, self._curves[0])) for _, slope, square in curves
        ]
        return np.diff(up_to)

    @lazy
    def _curves(self) -> tuple[int, list[list[tuple[int, int, int]]]]:
        """Return the integrals of the shares as polynomials with a common denominator.

        The result is (common, [[(a, b, c), …], …]). The outer list has one list per point, and each
        inner list has D + 1 entries. Entry d describes the sum of the integrals of datasets 0 … d −
        1. At x samples after the point, this sum is (a + b·x + c·x²) / common.
        """
        # Sums over the first datasets let `integral` subtract two curves for any group of datasets.
        shares = [
            [Fraction(w, sum(weights)) for w in accumulate(weights, initial=0)]
            for weights in self.weights
        ]
        integrals, curves_of_spans = [Fraction(0)] * len(shares[0]), []
        # Linear shares have quadratic integrals. Each part continues at the value that the part
        # before reached.
        for m, shares_now in enumerate(shares):
            length, curve = 0, [Fraction(0)] * len(shares_now)
            if m + 1 < len(shares):
                length = self.points[m + 1] - self.points[m]
                curve = [
                    (b - a) / (2 * length) * self.linear
                    for a, b in zip(shares_now, shares[m + 1], strict=True)
                ]
            curves_of_spans.append(list(zip(integrals, shares_now, curve, strict=True)))
            integrals = [a + (b + c * length) * length for a, b, c in curves_of_spans[-1]]
        # One denominator for all curves makes the arithmetic of `integral` exact and fast.
        common = math.lcm(
            *(
                coefficient.denominator
                for curves in curves_of_spans
                for curve in curves
                for coefficient in curve
            )
        )
        return common, [
            [(int(a * common), int(b * common), int(c * common)) for a, b, c in curves]
            for curves in curves_of_spans
        ]

    def integral(self, begin: int, end: int, samples: int) -> int:
        """Return the integral of the shares of datasets begin … end − 1 over the first samples.

        Args:
            begin: Index of the first dataset.
            end: Index after the last dataset.
            samples: Number of samples, from sample 0.

        Returns:
            The integral times the common denominator of `_curves`, an exact integer.
        """
        m = bisect_right(self.points, samples) - 1
        x, (a, b, c), (d, e, f) = (
            samples - self.points[m],
            self._curves[1][m][begin],
            self._curves[1][m][end],
        )
        return d - a + (e - b + (f - c) * x) * x

    def half(self, begin: int, end: int, q: int, near: int) -> tuple[int, int]:
        """Return how many of the first q samples of a group go to its first half.

        `Schedule` describes groups, halves and τ.

        Args:
            begin: Index of the group's first dataset.
            end: Index after the group's last dataset.
            q: Number of samples of the group.
            near: A sample number near τ. The search for τ starts there.

        Returns:
            The number of samples of the first half, and ⌊τ⌋.
        """
        middle, common = (begin + end) // 2, self._curves[0]
        if end - begin == len(self.weights[0]):  # For all datasets τ is q.
            return (2 * self.integral(begin, middle, q) + common) // (2 * common), q
        wanted_total = q * common
        # The search for τ widens an interval around `near` until it contains τ, and then bisects
        # it.
        low, high, far = near, near, 1
        while low > 0 and self.integral(begin, end, low) > wanted_total:
            low, high, far = max(0, low - far), low, 2 * far
        while high < SAMPLES_END and self.integral(begin, end, high) <= wanted_total:
            low, high, far = high, min(SAMPLES_END, high + far), 2 * far
        while high - low > 1:
            middle_time = (low + high) // 2
            below = self.integral(begin, end, middle_time) <= wanted_total
            low, high = (middle_time, high) if below else (low, middle_time)
        # τ is between `low` and `low` + 1. Both integrals are treated as linear in between.
        group, half = self.integral(begin, end, low), self.integral(begin, middle, low)
        rises = (
            self.integral(begin, end, low + 1) - group,
            self.integral(begin, middle, low + 1) - half,
        )
        # If the group's share is 0 from `low` on, its next sample never comes, so any rise works.
        rise, of_half = rises if rises[0] else (2, 1)
        # This is ⌊A(q) + ½⌋, computed with integers only.
        return (2 * (half * rise + (wanted_total - group) * of_half) + common * rise) // (
            2 * common * rise
        ), low

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples come from each dataset."""
        dataset_counts, pending = [0] * len(self.weights[0]), [(0, len(self.weights[0]), samples)]
        while pending:
            begin, end, q = pending.pop()
            if end - begin == 1:
                dataset_counts[begin] = q
            else:
                first_half, _ = self.half(begin, end, q, samples)
                pending += [
                    (begin, (begin + end) // 2, first_half),
                    ((begin + end) // 2, end, q - first_half),
                ]
        return dataset_counts


def schedule_of(shares: Sequence[Any], n_datasets: int, interpolate: str) -> Schedule:
    """Return the schedule for shares that are given at some samples of a mixture.

    A float is read as the decimal number that Python prints for it.

    Args:
        shares: The points [(sample, [number, …]), …], with one number per dataset.
        n_datasets: Number of datasets.
        interpolate: "step" or "linear".

    Returns:
        The `Schedule`.

    Raises:
        ArgumentError: If a point is invalid, or a dataset has a share of 0 at every point.
    """
    if interpolate not in ("step", "linear"):
        raise ArgumentError(f"interpolate is {interpolate!r} and should be 'step' or 'linear'")
    points: list[int] = []
    weights = []
    for m, point in enumerate(shares):
        if (
            not isinstance(point, tuple | list)
            or len(point) != 2
            or not isinstance(point[1], tuple | list | np.ndarray)
        ):
            raise ArgumentError(
                f"shares[{m}] is {point!r} and should be (sample, [a number for each dataset])"
            )
        sample, given_shares = point
        least = points[-1] + 1 if points else 0
        if (
            isinstance(sample, bool)
            or not isinstance(sample, int | np.integer)
            or not least <= sample < SAMPLES_END
        ):
            after = (
                f"an integer above {least - 1}, the point before"
                if points
                else "0, the start of the mixture"
            )
            raise ArgumentError(f"shares[{m}] is at sample {sample!r} and should be at {after}")
        if not points and sample != 0:
            raise ArgumentError(
                f"shares[0] is at sample {sample} and should be at 0, the start of the mixture"
            )
        if len(given_shares) != n_datasets:
            raise ArgumentError(
                f"shares[{m}] has {len(given_shares)} numbers, but there are"
                f" {n_datasets} datasets\n"
                "hint: give one number for each"
            )
        # The shortest decimal of a float is taken as exact, so 0.1 is a tenth.
        exact = []
        for d, share in enumerate(given_shares):
            if not _is_number(share):
                raise ArgumentError(
                    f"shares[{m}][1][{d}] is {share!r:.100} and should be a number of at least 0,"
                    " and at most 1.8e308"
                )
            exact.append(
                Fraction(int(share))
                if isinstance(share, int | np.integer)
                else Fraction(repr(float(share)))
            )
        if not any(exact):
            raise ArgumentError(
                f"shares[{m}] has no number above 0, but the samples from {sample} on need a"
                " dataset"
            )
        # The shares become the smallest integers of the same ratio. So equal ratios give equal
        # fingerprints.
        common = math.lcm(*(share.denominator for share in exact))
        integer_shares = [int(share * common) for share in exact]
        points.append(int(sample))
        weights.append(tuple(share // math.gcd(*integer_shares) for share in integer_shares))
    # A share of 0 pauses a dataset. A dataset that never provides samples is probably a mistake.
    for d in range(n_datasets):
        if not any(weights_at_point[d] for weights_at_point in weights):
            raise ArgumentError(
                f"dataset {d} has a share of 0 at every point\n"
                "hint: leave it out, or raise its share"
            )
    return Schedule(tuple(points), tuple(weights), interpolate == "linear")


@lru_cache(maxsize=256)
def _block(schedule: Schedule, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the result of `of_samples` for the samples 256 · block … 256 · block + 255."""
    # Only the counts at the start of the block are searched. From here on, each sample is assigned
    # by the tree.
    counts = schedule.counts(block * _BLOCK)
    datasets, numbers = np.empty(_BLOCK, np.int64), np.empty(_BLOCK, np.int64)
    counts_before: dict[tuple[int, int], int] = {}
    near: dict[tuple[int, int], int] = {}
    for place in range(_BLOCK):
        begin, end, q = 0, len(counts), block * _BLOCK + place + 1
        # A sample belongs to the half whose count rises with it, down to a single dataset.
        while end - begin > 1:
            group, middle = (begin, end), (begin + end) // 2
            if group not in counts_before:
                counts_before[group], near[group] = sum(counts[begin:middle]), block * _BLOCK
            # τ never decreases, so the search starts at the previous τ of the group.
            first_half, near[group] = schedule.half(begin, end, q, near[group])
            begin, end, q = (
                (begin, middle, first_half)
                if first_half > counts_before[group]
                else (middle, end, q - first_half)
            )
            counts_before[group] = first_half
        datasets[place], numbers[place] = begin, counts[begin]
        counts[begin] += 1
    return datasets, numbers


def _scheduled(samples: np.ndarray, schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    flat = np.asarray(samples, np.int64).ravel()
    blocks, places = np.divmod(flat, _BLOCK)
    datasets, numbers = np.empty_like(flat), np.empty_like(flat)
    for block in np.unique(blocks).tolist():
        in_block, values_of_block = blocks == block, _block(schedule, block)
        datasets[in_block], numbers[in_block] = (
            values_of_block[0][places[in_block]],
            values_of_block[1][places[in_block]],
        )
    return datasets.reshape(np.shape(samples)), numbers.reshape(np.shape(samples))
