"""Which row comes when: shuffling and splitting over ranks as index arithmetic, in O(1) memory.

    global sample   g = rows + s·B·W + r·B + j     step s, rank r of W, place j of B
    epoch           e = g div n
    row             permutation(seed, e)(g mod n)

`rows` are the rows delivered over all ranks before the state was loaded: nothing else is
remembered, so a state goes on at any world size and batch size, and no row is dropped or repeated
within an epoch.

Balanced, sample g of this order is another of its window, [k·Q, (k + 1)·Q) and of one epoch, whose
rows are sorted by cost:

    cost     ▁▁▁▂▂▂▂▂▃▃▄▄▅▅▆▆▆▇▇▇████     a window, sorted, in groups of like cost, the rows of a step
    groups   └─ 0 ─┘└─ 1 ─┘└─ 2 ─┘…       in an order by key(seed, k)
    dealt    ▁▂▁▂▁▂ …                     inside of a group even for every number of ranks that divides it

Which dataset each sample of a mixture is of: a keyed pattern for each cycle, so that counts have a
closed form.

    counts        c_d of each dataset in a cycle of C = Σ c_d samples
    cycle, place  k, p = divmod(g, C)                                        of global sample g
    shuffled      dataset d  where  Σ c_i (i < d)  ≤  permute(p, C, key(seed, k))  <  Σ c_i (i ≤ d)
    in order      each cycle the same: the i-th of dataset d at (2 i + 1) / (2 c_d) of it, ties to the first dataset
    its number    s = k · c_d + the places before p of cycle k that are d's

Among the first g samples, k · c_d and what the places before p hold are of dataset d.

Where shares change, each prefix has what their integrals say: see Schedule.
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
from packprep.errors import ArgumentError
from packprep.forking import lazy

LONGEST_CYCLE = 1000
_PLACES_AT_ONCE = 1 << 16
_GROUPS = 64  # of a window, where none is given
SCHEDULED_AT_ONCE = 1 << 13
_BLOCK = 256  # samples of a schedule that are looked up together
_END = 1 << 62  # of all samples


def integer(name: str, value: Any, least: int, below: int) -> int:
    """`value` as an int in least … below − 1."""
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
    """A bool; ArgumentError for a text, of which "false" would be true, and for whatever else is
    none."""
    if isinstance(value, bool | np.bool_) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise ArgumentError(f"{name} is {value!r} and should be True or False")


def permutation(seed: int, epoch: int | np.ndarray, n_rows: int, index: np.ndarray) -> np.ndarray:
    """int64: the rows at the places `index` (0 … n_rows − 1) of an epoch, or of one for each,
    shaped as `index`.

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
    """ceil((end − rows) / (B·W)): the steps that every rank makes until sample `end`, E·n; the last
    may be short."""
    return max(0, -(-(end - rows) // (batch_size * world_size)))


# Balanced steps


class Balance(NamedTuple):
    """How steps are made even: rows cost attention · Σn² + linear · Σn over their segments of n
    slots.

    group: rows of a step over all ranks. window: rows that are sorted together, a multiple of
    group. end: the sample before which a window ends, whatever its size, as a dataset of a mixture
    is exhausted there; None: there is no such sample.
    """

    attention: float
    linear: float
    group: int
    window: int
    end: int | None = None


def window_of(
    sample: int, window: int, epoch_rows: int | None, last: int | None = None
) -> tuple[int, int]:
    """Return the samples [begin, end) among which sample `sample` of the balanced order lies.

    Its window is cut where an epoch of `epoch_rows` rows begins or ends, and before sample `last`;
    None: it is not.
    """
    begin = sample // window * window
    end = begin + window
    if last is not None and begin < last < end:
        begin, end = (begin, last) if sample < last else (last, end)
    if epoch_rows is not None:
        epoch_begin = sample // epoch_rows * epoch_rows
        begin, end = max(begin, epoch_begin), min(end, epoch_begin + epoch_rows)
    return begin, end


def ending_at(balance: Balance, sample: int) -> Balance:
    """Return how steps are made even where no sample from `sample` on may come before it."""
    return balance._replace(end=sample if sample % balance.window else None)


def balanced(costs: np.ndarray, begin: int, balance: Balance, seed: int) -> np.ndarray:
    """int64: the places of a window's rows, in the order in which they come. costs: float64, of the
    rows from sample `begin` on.

    A group stands at a multiple of `group`, so where an epoch cuts the first or the last one, these
    get rows of middling cost.
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
        key = randomness.bits64(
            np.uint64(seed), randomness.BALANCED_GROUPS, number & 0xFFFFFFFF, number >> 32
        )
        whole = np.take_along_axis(whole, dealt(costs[whole]), axis=1)
        whole = whole[randomness.permute(np.arange(len(whole)), len(whole), key)]
    return np.concatenate((parts[:head], whole.ravel(), parts[head:]))


def dealt(costs: np.ndarray) -> np.ndarray:
    """int64[groups, rows]: the order of each group's rows, float64[groups, rows], in which
    neighbours make up for each other.

    The dearest half is paired with the cheapest, dear with cheap; then pairs are paired by their
    sums, and so on. So every stretch of 2, 4, 8, … rows that begins at a multiple of its length
    costs nearly the same, which a rank of that batch size reads. What remains odd is dealt in
    threes, fives, …
    """
    places, sums = np.broadcast_to(np.arange(costs.shape[1]), costs.shape)[..., None], costs
    while (n := sums.shape[1]) > 1:
        several = next(factor for factor in range(2, n + 1) if n % factor == 0)
        shape = (len(costs), n // several)
        merged, together = np.zeros(shape), np.empty((*shape, 0), np.int64)
        by_cost = np.argsort(-sums, axis=1, kind="stable")
        # the dearest first, each to what is cheapest so far
        for some in np.split(by_cost, several, axis=1):
            to = np.argsort(merged, axis=1, kind="stable")
            added = np.empty_like(some)
            np.put_along_axis(added, to, some, axis=1)
            merged = merged + np.take_along_axis(sums, added, axis=1)
            together = np.concatenate(
                (together, np.take_along_axis(places, added[..., None], axis=1)), axis=2
            )
        places, sums = together, merged
    return places[:, 0]


def balance_of(balance: Any, window: Any, shuffle: bool) -> Balance | None:
    """A Balance of what `batches` takes; ArgumentError where it cannot be used."""
    if balance is None:
        if window is not None:
            raise ArgumentError(
                f'window = {window!r} is of balanced steps: give balance=("attention", group) too'
            )
        return None
    if not isinstance(balance, tuple | list) or len(balance) != 2:
        raise ArgumentError(
            f'balance is {balance!r} and should be ("attention", group): group is the rows of a'
            " step over all ranks"
        )
    cost, group = balance
    weights = (1, 0) if isinstance(cost, str) and cost == "attention" else cost
    two = isinstance(weights, tuple | list) and len(weights) == 2
    if not two or not all(map(_is_number, weights)) or not any(weights):
        raise ArgumentError(
            f'the cost of balance is {cost!r} and should be "attention", or (a, b) for a · Σn² + b'
            " · Σn over a row's segments of n slots: numbers of at least 0, and one of them above"
        )
    rows = integer("the group of balance", group, 1, 1 << 31)
    size = _GROUPS * rows if window is None else integer("window", window, 1, 1 << 40)
    if size % rows:
        raise ArgumentError(
            f"window is {size} and should be a multiple of the group, {rows}: whole groups are cut"
            " of it"
        )
    if not shuffle:
        raise ArgumentError(
            "balance draws the order of rows anew, and shuffle=False asks for the stored one: leave"
            " one out"
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
    """int64[D]: samples of each dataset in a cycle, for shares that are normalised to sum to 1.

    The cycle is the shortest in which every share is a whole number, 3:1 → 3 and 1. Where none of
    up to 1000 samples is, it has 1000, and what rounding down leaves goes to the largest
    remainders, ties to the first.
    """
    given = list(shares)
    for i, share in enumerate(given):
        if not _is_number(share) or share == 0:
            raise ArgumentError(
                f"shares[{i}] is {share!r:.100} and should be a number above 0, of at most 1.8e308"
            )
    # first: a sum of large numbers may be infinite
    exact = np.array(given, np.float64) / max(given)
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
                f"shares[{i}] is {given[i]!r}, which is no sample in {LONGEST_CYCLE}: leave the"
                " dataset out, or give it more"
            )
    return counts


def dealing_of(shares: Any, datasets: Sequence[Any], interpolate: Any) -> "np.ndarray | Schedule":
    """What of_samples takes, of shares as open_dataset takes them; ArgumentError where they cannot
    be used."""
    if shares is not None and not isinstance(shares, tuple | list | np.ndarray):
        raise ArgumentError(
            f"shares is {shares!r} and should be a list: a number for each dataset, or points"
            " (sample, [number, …])"
        )
    given = [] if shares is None else list(shares)
    if any(isinstance(share, tuple | list) for share in given) and datasets:
        return schedule_of(given, len(datasets), "step" if interpolate is None else interpolate)
    if len(given) != len(datasets) or not datasets:
        raise ArgumentError(
            f"a list of {len(datasets)} directories needs shares = […], one for each and at least"
            f" one; there are {len(given)}"
        )
    if interpolate is not None:
        raise ArgumentError(
            f"interpolate = {interpolate!r} is for shares at some samples, [(sample, [number,"
            " …]), …]"
        )
    return counts_of(given)


def seed_of(seed: int, dataset: int) -> int:
    """The seed of the order of one dataset's rows: the first has the mixture's own, the others one
    derived from it."""
    return (
        int(randomness.bits64(np.uint64(seed), randomness.MIXTURE_SEED, dataset))
        if dataset
        else seed
    )


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


def of_samples(
    samples: np.ndarray, counts: "np.ndarray | Schedule", seed: int, shuffle: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(dataset, number of the sample among that dataset's), int64, shaped as `samples`: global
    samples g ≥ 0."""
    if isinstance(counts, Schedule):
        return _scheduled(samples, counts)
    length = int(counts.sum())
    cycles, places = np.divmod(np.asarray(samples, np.int64).ravel(), length)
    by_cycle = np.argsort(cycles, kind="stable")
    datasets, numbers = np.empty_like(cycles), np.empty_like(cycles)
    # of the places sorted by dataset
    in_cycle = np.arange(length) - np.repeat(np.cumsum(counts) - counts, counts)
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


def among_first(
    samples: int, counts: "np.ndarray | Schedule", seed: int, shuffle: bool
) -> np.ndarray:
    """int64[D]: how many of the first `samples` of a mixture are of each dataset."""
    if isinstance(counts, Schedule):
        return np.array(counts.counts(samples), np.int64)
    cycle, place = divmod(samples, int(counts.sum()))
    begun = pattern(np.array([cycle]), counts, seed, shuffle)[0, :place]
    return cycle * counts + np.bincount(begun, minlength=len(counts))


def first_beyond(
    dataset: int, most: int, counts: "np.ndarray | Schedule", seed: int, shuffle: bool
) -> int | None:
    """The first global sample that is more than the `most`-th of a dataset; None: there is none
    among 2⁶²."""
    low, high = most, _END
    if among_first(high, counts, seed, shuffle)[dataset] <= most:
        return None
    # of the first `low` samples at most `most` are the dataset's, of the first `high` more
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (low, middle)
            if among_first(middle, counts, seed, shuffle)[dataset] > most
            else (middle, high)
        )
    return low


# Shares that change


@dataclass(frozen=True, eq=False)
class Schedule:
    """Shares of D datasets at some samples of a mixture, exact: weights[m][d] / sum(weights[m]) at
    sample points[m].

    points: ascending from 0. linear: between two points shares change evenly, else at once; behind
    the last they stay.

    I_d(n), the integral of dataset d's share over the first n samples, is a rational number, and Σ
    I_d(n) = n. Datasets are split in two halves, these again, and so on. Of the first q samples of
    a group, its first half gets

        ⌊A(q) + ½⌋    A(q) = I_half(τ), where τ is the time at which I_group(τ) = q

    A grows by 0 … 1 from one q to the next, as a half's share is a part of its group's. So each
    sample goes to one half, and what each dataset has of the first n follows from n alone.

    A half is off by at most ½ more than its group: |q − I_group(n)| ≤ e gives |I_half(τ) −
    I_half(n)| ≤ |I_group(τ) − I_group(n)| ≤ e, and rounding adds ½. The whole is exact, so a count
    is within half of the tree's height of its integral: ½ for two datasets, 1 up to four, 1½ up to
    eight, 2 up to sixteen. To deal out any shares to any number within 1 is possible (Tijdeman,
    "The chairman assignment problem", 1980), but there a sample depends on all before it.
    """

    points: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]
    linear: bool

    def parts(self) -> list[Any]:
        """What a fingerprint is made of."""
        return [self.points, self.weights, "linear" if self.linear else "step"]

    def shares(self, sample: int) -> np.ndarray:
        """float64[D]: the shares at a sample."""
        m = bisect_right(self.points, sample) - 1
        curves, x = self._curves[1][m], sample - self.points[m]
        up_to = [
            float(Fraction(slope + 2 * square * x, self._curves[0])) for _, slope, square in curves
        ]
        return np.diff(up_to)

    @lazy
    def _curves(self) -> tuple[int, list[list[tuple[int, int, int]]]]:
        """(common, [[(a, b, c)] of the first 0 … D datasets] of each point): x samples after it
        their integrals are, together, (a + b·x + c·x²) / common."""
        shares = [
            [Fraction(w, sum(weights)) for w in accumulate(weights, initial=0)]
            for weights in self.weights
        ]
        integrals, found = [Fraction(0)] * len(shares[0]), []
        for m, now in enumerate(shares):
            length, curve = 0, [Fraction(0)] * len(now)
            if m + 1 < len(shares):
                length = self.points[m + 1] - self.points[m]
                curve = [
                    (b - a) / (2 * length) * self.linear
                    for a, b in zip(now, shares[m + 1], strict=True)
                ]
            found.append(list(zip(integrals, now, curve, strict=True)))
            integrals = [a + (b + c * length) * length for a, b, c in found[-1]]
        common = math.lcm(
            *(part.denominator for curves in found for curve in curves for part in curve)
        )
        return common, [
            [(int(a * common), int(b * common), int(c * common)) for a, b, c in curves]
            for curves in found
        ]

    def integral(self, begin: int, end: int, samples: int) -> int:
        """That of datasets begin … end − 1 over the first `samples`, times the common
        denominator."""
        m = bisect_right(self.points, samples) - 1
        x, (a, b, c), (d, e, f) = (
            samples - self.points[m],
            self._curves[1][m][begin],
            self._curves[1][m][end],
        )
        return d - a + (e - b + (f - c) * x) * x

    def half(self, begin: int, end: int, q: int, near: int) -> tuple[int, int]:
        """(how many of the first q samples of datasets begin … end − 1 are of their first half,
        ⌊τ⌋). near: a guess at τ."""
        middle, common = (begin + end) // 2, self._curves[0]
        if end - begin == len(self.weights[0]):  # all samples: τ is q
            return (2 * self.integral(begin, middle, q) + common) // (2 * common), q
        wanted = q * common
        low, high, far = near, near, 1
        while low > 0 and self.integral(begin, end, low) > wanted:
            low, high, far = max(0, low - far), low, 2 * far
        while high < _END and self.integral(begin, end, high) <= wanted:
            low, high, far = high, min(_END, high + far), 2 * far
        while high - low > 1:
            middle_time = (low + high) // 2
            below = self.integral(begin, end, middle_time) <= wanted
            low, high = (middle_time, high) if below else (low, middle_time)
        group, half = self.integral(begin, end, low), self.integral(begin, middle, low)
        rises = (
            self.integral(begin, end, low + 1) - group,
            self.integral(begin, middle, low + 1) - half,
        )
        # behind the end of all its samples a group may be asked for one more
        rise, of_half = rises if rises[0] else (2, 1)
        return (2 * (half * rise + (wanted - group) * of_half) + common * rise) // (
            2 * common * rise
        ), low

    def counts(self, samples: int) -> list[int]:
        """How many of the first `samples` are of each dataset."""
        found, left = [0] * len(self.weights[0]), [(0, len(self.weights[0]), samples)]
        while left:
            begin, end, q = left.pop()
            if end - begin == 1:
                found[begin] = q
            else:
                first, _ = self.half(begin, end, q, samples)
                left += [(begin, (begin + end) // 2, first), ((begin + end) // 2, end, q - first)]
        return found


def schedule_of(shares: Sequence[Any], n_datasets: int, interpolate: str) -> Schedule:
    """Shares at points of a mixture, [(sample, [number, …]), …], as decimals that mean what is
    written; ArgumentError if they are none."""
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
        sample, given = point
        least = points[-1] + 1 if points else 0
        if (
            isinstance(sample, bool)
            or not isinstance(sample, int | np.integer)
            or not least <= sample < _END
        ):
            after = (
                f"an integer above {least - 1}, the point before"
                if points
                else "0, where a mixture begins"
            )
            raise ArgumentError(f"shares[{m}] is at sample {sample!r} and should be at {after}")
        if not points and sample != 0:
            raise ArgumentError(
                f"shares[0] is at sample {sample} and should be at 0, where a mixture begins"
            )
        if len(given) != n_datasets:
            raise ArgumentError(
                f"shares[{m}] has {len(given)} numbers, and there are {n_datasets} datasets: give"
                " one for each"
            )
        exact = []
        for d, share in enumerate(given):
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
                f"shares[{m}] has no number above 0: some dataset has to give the samples from"
                f" {sample} on"
            )
        common = math.lcm(*(share.denominator for share in exact))
        whole = [int(share * common) for share in exact]
        points.append(int(sample))
        weights.append(tuple(share // math.gcd(*whole) for share in whole))
    for d in range(n_datasets):
        if not any(at[d] for at in weights):
            raise ArgumentError(
                f"dataset {d} has a share of 0 at every point: leave it out, or give it some"
            )
    return Schedule(tuple(points), tuple(weights), interpolate == "linear")


@lru_cache(maxsize=256)
def _block(schedule: Schedule, block: int) -> tuple[np.ndarray, np.ndarray]:
    """(dataset, number of it), int64[256] each, of samples 256 · block and on."""
    given = schedule.counts(block * _BLOCK)
    datasets, numbers = np.empty(_BLOCK, np.int64), np.empty(_BLOCK, np.int64)
    before: dict[tuple[int, int], int] = {}
    near: dict[tuple[int, int], int] = {}
    for place in range(_BLOCK):
        begin, end, q = 0, len(given), block * _BLOCK + place + 1
        while end - begin > 1:
            group, middle = (begin, end), (begin + end) // 2
            if group not in before:
                before[group], near[group] = sum(given[begin:middle]), block * _BLOCK
            first, near[group] = schedule.half(begin, end, q, near[group])
            begin, end, q = (
                (begin, middle, first) if first > before[group] else (middle, end, q - first)
            )
            before[group] = first
        datasets[place], numbers[place] = begin, given[begin]
        given[begin] += 1
    return datasets, numbers


def _scheduled(samples: np.ndarray, schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    flat = np.asarray(samples, np.int64).ravel()
    blocks, places = np.divmod(flat, _BLOCK)
    datasets, numbers = np.empty_like(flat), np.empty_like(flat)
    for block in np.unique(blocks).tolist():
        here, found = blocks == block, _block(schedule, block)
        datasets[here], numbers[here] = found[0][places[here]], found[1][places[here]]
    return datasets.reshape(np.shape(samples)), numbers.reshape(np.shape(samples))
