"""Leave ranges of samples out of an iteration, and keep the order of all others.

order       0 1 2 3 4 5 6 7 8 9     samples of the order, as if nothing were left out
skips           └───┘               the range [2, 5)
delivered   0 1       2 3 4 5 6     numbers of the delivered samples
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from packprep.dataset.order import SAMPLES_END, integer
from packprep.errors import ArgumentError, StateError
from packprep.forking import lazy


@dataclass(frozen=True)
class Skips:
    """The ranges of samples that an iteration leaves out.

    Attributes:
        ranges: Pairs (first sample, sample after the last). They are ascending, and do not touch.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    @lazy
    def _table(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the delivered samples before each range, and the skipped samples up to its end.

        The second array has one more entry at its start, 0. Both are int64.
        """
        bounds = np.array(self.ranges, np.int64).reshape(-1, 2)
        skipped = np.concatenate((np.zeros(1, np.int64), np.cumsum(bounds[:, 1] - bounds[:, 0])))
        return bounds[:, 0] - skipped[:-1], skipped

    def of_delivered(self, delivered: np.ndarray) -> np.ndarray:
        """Convert numbers of delivered samples to samples of the order.

        Args:
            delivered: Numbers of delivered samples, int64 of any shape.

        Returns:
            Samples of the order, int64, shaped as `delivered`.
        """
        if not self.ranges:
            return delivered
        begins, skipped = self._table
        return delivered + skipped[np.searchsorted(begins, delivered, "right")]

    def n_delivered(self, sample: int) -> int:
        """Return how many of the first `sample` samples of the order are delivered."""
        return sample - sum(max(0, min(end, sample) - begin) for begin, end in self.ranges)

    def position(self, rows: int) -> int:
        """Return the sample of the order after the last of `rows` delivered samples."""
        return int(self.of_delivered(np.array(rows - 1))) + 1 if rows else 0

    def joined(self, other_skips: "Skips", rows: int) -> "Skips":
        """Return these ranges together with the ranges of an iteration that goes on from here.

        Args:
            other_skips: The other ranges. They must lie after the delivered samples, or within
                these ranges.
            rows: Number of samples that were delivered with these ranges.

        Raises:
            StateError: If one of the other ranges contains a delivered sample.
        """
        position = self.position(rows)
        for begin, end in other_skips.ranges:
            is_known = any(
                known_begin <= begin and end <= known_end for known_begin, known_end in self.ranges
            )
            if begin < position and not is_known:
                raise StateError(
                    f"skip leaves out the samples {begin} … {end - 1}, but the state has already"
                    f" delivered some of them: it stands before sample {position}\n"
                    "hint: leave skip out, because the state contains its own skip; or load an"
                    " earlier state"
                )
        return Skips(_merged((*self.ranges, *other_skips.ranges)))

    def stored(self) -> list[list[int]]:
        """Return the ranges as the state of an iteration stores them."""
        return [list(pair) for pair in self.ranges]


def skips_of_steps(steps: Any, step_samples: int) -> Skips:
    """Convert the argument `skip` of `Dataset.batches` to ranges of samples.

    Args:
        steps: Pairs (first step, last step), or None.
        step_samples: Number of samples in a step over all ranks.

    Returns:
        The `Skips`.

    Raises:
        ArgumentError: If a pair is invalid.
    """
    if steps is None:
        return Skips()
    # An iterator would be empty when an adapter reads the argument a second time.
    if isinstance(steps, str) or not isinstance(steps, Sequence):
        raise ArgumentError(f"skip is {steps!r} and should be a list of (first step, last step)")
    ranges = []
    for i, pair in enumerate(steps):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise ArgumentError(f"skip[{i}] is {pair!r} and should be (first step, last step)")
        most_steps = SAMPLES_END // step_samples
        first_step = integer(f"the first step of skip[{i}]", pair[0], 0, most_steps)
        last_step = integer(f"the last step of skip[{i}]", pair[1], first_step, most_steps)
        ranges.append((first_step * step_samples, (last_step + 1) * step_samples))
    return Skips(_merged(ranges))


def skips_of_state(state: Any) -> Skips:
    """Return the ranges of samples that a saved state of an iteration leaves out.

    Raises:
        StateError: If the key `skip` is invalid.
    """
    stored = state.get("skip", []) if isinstance(state, Mapping) else []
    least_begin = 0
    for pair in stored if isinstance(stored, list) else [None]:
        if (
            not isinstance(pair, list)
            or [type(bound) for bound in pair] != [int, int]
            or not least_begin <= pair[0] < pair[1] < SAMPLES_END
        ):
            raise StateError(
                f"the state's skip is {stored!r:.200} and should be a list of ascending"
                " [first sample, sample after the last]"
            )
        least_begin = pair[1] + 1
    return Skips(tuple((begin, end) for begin, end in stored))


def _merged(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the ranges in ascending order, with ranges that touch or overlap joined."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return tuple(merged)
