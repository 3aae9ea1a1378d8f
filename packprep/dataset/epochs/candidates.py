"""Find the candidates for same-position noise, and draw random numbers for them.

Candidates are the slots that same-position noise may change.

segment       [bos]? [mode]?  c c c c c c  [eos]?     c: candidates, one range per segment
window        all slots from the first to the last candidate of a group of segments
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from packprep import randomness
from packprep.dataset.boundaries import ranks
from packprep.randomness import NOISE, NOISE_LOW

CHUNK_SLOTS = 1 << 18
"""Number of candidates to noise at once, so that their arrays fit into the processor's cache."""


class Candidates(NamedTuple):
    """The slots that may be noised in m segments, in row order. Each array has the shape [m]."""

    key: np.ndarray  # uint64
    at: np.ndarray  # int64: first candidate's slot in the flat rows, ascending
    count: np.ndarray  # type: ignore[assignment]  # int64: number of candidates, trained or not
    row: np.ndarray  # int64: the segment's row


def runs(kept_lengths: np.ndarray, dropped_lengths: np.ndarray) -> np.ndarray:
    """Return flags in alternating runs of True and False, starting with True.

    Args:
        kept_lengths: Lengths of runs of True, int[k].
        dropped_lengths: Lengths of runs of False, int[k].

    Returns:
        bool[Σ kept_lengths + Σ dropped_lengths].
    """
    return np.repeat(
        np.tile(np.array([True, False]), len(kept_lengths)),
        np.stack((kept_lengths, dropped_lengths), axis=1).reshape(-1),
    )


def words_of(
    key: np.ndarray, count: np.ndarray, purpose: int, dtype: str, epoch: int
) -> np.ndarray:
    """Return the first count[i] random numbers of each key[i], one key after the other.

    Args:
        key: The keys, uint64[m].
        count: Number of random numbers for each key, int64[m].
        purpose: The purpose of the numbers, from `packprep.randomness`.
        dtype: "u1" for bytes or "<u4" for 32-bit words.
        epoch: The epoch.

    Returns:
        dtype[Σ count].
    """
    per_block = 16 // np.dtype(dtype).itemsize
    # A Philox block has four words of 32 bits, and each key starts a new block.
    blocks = -(-count // per_block)
    words = randomness.philox(np.repeat(key, blocks), ranks(blocks), 0, purpose, epoch)
    data = np.stack(words, axis=1).astype("<u4", copy=False).view(dtype).reshape(-1)
    unused = blocks * per_block - count
    return data[runs(count, unused)] if unused.any() else data


def below(
    key: np.ndarray, count: np.ndarray, threshold: np.ndarray, length: np.ndarray, epoch: int
) -> np.ndarray:
    """Return which candidates draw a 40-bit random number below their threshold.

    Args:
        key: The segments' keys, uint64[m].
        count: Number of candidates of each segment, int64[m].
        threshold: The thresholds of k ranges of candidates, uint64[k].
        length: Number of candidates in each range, int64[k], with Σ length = Σ count.
        epoch: The epoch.

    Returns:
        bool[Σ count].
    """
    # The high byte decides, unless it equals the high byte of the threshold. Then the low 32 bits
    # decide.
    high = words_of(key, count, NOISE, "u1", epoch)
    top = np.repeat((threshold >> np.uint64(32)).astype(np.uint16), length)
    below = high < top
    undecided = np.flatnonzero(high == top)
    if len(undecided):
        segment, place = within(count, undecided)
        run, _ = within(length, undecided)
        low = randomness.words(key[segment], NOISE_LOW, place, epoch)
        below[undecided] = low < (threshold[run] & np.uint64(0xFFFFFFFF))
    return below


def within(count: np.ndarray, candidate_indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Convert indices among all candidates to (segment, index in the segment).

    Args:
        count: Number of candidates of each segment, int64[m].
        candidate_indices: Indices among the candidates of all segments, int64[k].

    Returns:
        The segment of each candidate, and the candidate's index in its segment, int64[k] each.
    """
    ends = np.cumsum(count)
    segment = np.searchsorted(ends, candidate_indices, "right")
    return segment, candidate_indices - (ends - count)[segment]


class Window(NamedTuple):
    """All flat slots from the first to the last candidate of a group of segments."""

    here: slice
    inside: np.ndarray | None  # bool: whether each slot is a candidate; None if all slots are

    def laid_out(self, values: np.ndarray) -> np.ndarray:
        """Convert flags of the window's candidates to flags of all its slots, bool.

        Slots that are not candidates get False.
        """
        if self.inside is None:
            return values
        wide = np.zeros(len(self.inside), np.bool_)
        wide[self.inside] = values
        return wide

    def candidates(self, slots: np.ndarray) -> np.ndarray:
        """Return the values that a flat column has at the window's candidates."""
        return slots[self.here] if self.inside is None else slots[self.here][self.inside]

    def holds(self, slots: np.ndarray, value: int) -> bool:
        """Return whether a flat column has a given token inside the window.

        Args:
            slots: The flat column of tokens.
            value: The token, or a negative number if the vocabulary lacks the token.

        Returns:
            Whether the token occurs. False for a negative number.
        """
        return value >= 0 and bool((slots[self.here] == value).any())


def window_of(segments: Candidates) -> Window:
    """Return the window of one or more segments."""
    begin, end = int(segments.at[0]), int(segments.at[-1] + segments.count[-1])
    gap = np.append(segments.at[1:], end) - (segments.at + segments.count)
    return Window(slice(begin, end), runs(segments.count, gap) if gap.any() else None)


def chunks(segments: Candidates, width: int = 1) -> Iterator[tuple[slice, Candidates, Window]]:
    """Split segments into chunks of about CHUNK_SLOTS / width candidates.

    A segment is never split.

    Args:
        segments: The segments.
        width: Number of bytes per candidate.

    Yields:
        The indices of a chunk's segments as a slice, their `Candidates`, and their `Window`.
    """
    ends = np.cumsum(segments.count)
    if not len(ends):
        return
    size = max(CHUNK_SLOTS // width, 1)
    # A chunk ends with the segment that contains the next multiple of `size`.
    marks = np.searchsorted(ends, np.arange(size, int(ends[-1]) + size, size), "left") + 1
    bounds = np.unique(np.concatenate(([0], np.minimum(marks, len(ends)), [len(ends)])))
    for begin, end in pairwise(bounds.tolist()):
        segment_slice = slice(begin, end)
        columns = Candidates(*(column[segment_slice] for column in segments))
        yield segment_slice, columns, window_of(columns)


def put(slots: np.ndarray, where: np.ndarray, value: int) -> None:
    """Set slots[where] = value with bit operations, because branches would be mispredicted often.

    Args:
        slots: The integer array to change.
        where: bool, shaped as `slots`.
        value: The new value.
    """
    bits = np.negative(where.astype(slots.dtype))  # −1, with all bits set, where `where` is True.
    bits &= slots ^ slots.dtype.type(value)
    slots ^= bits
