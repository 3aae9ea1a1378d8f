"""Find the blocks of block-diffusion segments: of the whole segment, or of each answer.

A block is a range of slots that is noised with one level. Slots count from the first slot of a half
(x_t or x_0), and both halves have the same blocks. With block_length 2, the blocks are:

    slot                       0    1    2    3    4    5    6    7    8    9    10
    segment                   bos  ask  ask  ans  ans  ans  ans  ans  ask  ans  eos
    trained ranges                          [3 ................... 8)     [9 .... 11)
    block_origin "segment"     0    0    1    1    2    2    3    3    4    4    5
    block_origin "answer"      ·    ·    ·    0    0    1    1    2    ·    3    3

An answer is a run of trained slots. A slot outside all answers (·) is context: it is not noised,
and for attention it is a block of one slot.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from packprep.dataset.boundaries import owners, ranks, starts_of
from packprep.dataset.segments import TrainedRanges


class Blocks(NamedTuple):
    """The blocks of m segments, segment after segment. Bounds count from the segment's first slot.

    Attributes:
        count: Number of blocks of each segment, int64[m].
        begin: First slot of each block, int64[k].
        end: Slot after each block, int64[k].
    """

    count: np.ndarray  # type: ignore[assignment]
    begin: np.ndarray
    end: np.ndarray

    @property
    def segment(self) -> np.ndarray:
        """The index of each block's segment, int64[k]."""
        return owners(self.count)

    def select(self, indices: np.ndarray) -> "Blocks":
        """Return the blocks of the segments `indices`, int64[k]."""
        count = self.count[indices]
        block_indices = np.repeat(starts_of(self.count)[indices], count) + ranks(count)
        return Blocks(count, self.begin[block_indices], self.end[block_indices])


def joined_blocks(n_segments: int, parts: Sequence[tuple[np.ndarray, Blocks]]) -> Blocks:
    """Return the blocks of several tasks in segment order.

    Args:
        n_segments: Number of all segments. Segments in no part have no blocks.
        parts: For each task, the indices of its segments, and their blocks.
    """
    count = np.zeros(n_segments, np.int64)
    for segment, blocks in parts:
        count[segment] = blocks.count
    begin, end = np.empty((2, int(count.sum())), np.int64)
    for segment, blocks in parts:
        block_indices = np.repeat(starts_of(count)[segment], blocks.count) + ranks(blocks.count)
        begin[block_indices], end[block_indices] = blocks.begin, blocks.end
    return Blocks(count, begin, end)


class Answers(NamedTuple):
    """The runs of trained slots in m segments, in slot order.

    Attributes:
        segment: The segment of each run, int64[r].
        begin: First slot of each run, counted from the segment's first slot, int64[r].
        end: Slot after each run, int64[r].
    """

    segment: np.ndarray
    begin: np.ndarray
    end: np.ndarray

    def of_segments(self, chosen: np.ndarray) -> "Answers":
        """Return the answers of the chosen segments, with new segment numbers.

        Args:
            chosen: Indices of segments, int64[k], ascending. In the result, segment chosen[i] has
                the number i.
        """
        # `number` maps an old segment number to the new one, or to −1 if the segment was not
        # chosen.
        number = np.full(int(self.segment.max(initial=-1)) + 1, -1)
        known_segments = chosen[chosen < len(number)]
        number[known_segments] = np.arange(len(chosen))[chosen < len(number)]
        is_chosen = number[self.segment] >= 0
        return Answers(number[self.segment][is_chosen], self.begin[is_chosen], self.end[is_chosen])


def answers_of_flags(flags: np.ndarray, first_slot: np.ndarray, slots: np.ndarray) -> Answers:
    """Return the runs of nonzero flags inside some ranges of slots.

    Args:
        flags: One flag for each flat slot.
        first_slot: The first flat slot of each range, int64[m].
        slots: Number of slots of each range, int64[m].

    Returns:
        The runs. Their segment is the index of their range.
    """
    segment, slot = owners(slots), ranks(slots)
    is_trained = flags[np.repeat(first_slot, slots) + slot] != 0
    # A run ends at the end of its range, even if the next range starts with a flag.
    trained_before, trained_after = np.zeros((2, len(slot)), np.bool_)
    trained_before[1:] = is_trained[:-1] & (slot[1:] > 0)
    trained_after[:-1] = is_trained[1:] & (slot[1:] > 0)
    first_indices, last_indices = (
        np.flatnonzero(is_trained & ~trained_before),
        np.flatnonzero(is_trained & ~trained_after),
    )
    return Answers(segment[first_indices], slot[first_indices], slot[last_indices] + 1)


def answers_of_ranges(segment: np.ndarray, ranges: np.ndarray) -> Answers:
    """Join trained ranges without a gap between them.

    Args:
        segment: The segment of each range, int64[k], ascending.
        ranges: Start and end of each range, int[k, 2], ascending inside a segment.

    Returns:
        The runs of trained slots.
    """
    bounds = ranges.astype(np.int64)
    joins = (segment[1:] == segment[:-1]) & (bounds[1:, 0] == bounds[:-1, 1])
    first_ranges = np.flatnonzero(~np.append(False, joins)[: len(segment)])
    last_ranges = np.flatnonzero(~np.append(joins, False)[: len(segment)])
    return Answers(segment[first_ranges], bounds[first_ranges, 0], bounds[last_ranges, 1])


def blocks_of(
    parameters: Mapping[str, Any],
    half: np.ndarray,
    slots_before: np.ndarray,
    answers: Answers | None,
) -> Blocks:
    """Return the blocks of one task's segments.

    bos and mode token belong to the first block of an answer that directly follows them, so a
    document without a prompt has the same blocks as an unsupervised one.

    Args:
        parameters: The task's parameters.
        half: Number of slots of x_t in each segment, int64[m].
        slots_before: Number of slots before each segment's body (bos and mode token), int64[m].
        answers: The runs of trained slots, or None if the shard has no supervised documents.

    Returns:
        The blocks.
    """
    length = parameters["block_length"]
    if answers is None or not starts_at_answers(parameters):
        segment = np.arange(len(half))
        begin, end = np.zeros(len(half), np.int64), half.astype(np.int64)
    else:
        segment, begin = answers.segment, answers.begin
        end = np.minimum(answers.end, half[segment])
        begin = np.where(begin <= slots_before[segment], 0, begin)
    n_blocks = np.maximum(-(-(end - begin) // length), 0)
    count = np.bincount(segment, n_blocks, len(half)).astype(np.int64)
    first_slots = np.repeat(begin, n_blocks) + ranks(n_blocks) * length
    return Blocks(count, first_slots, np.minimum(first_slots + length, np.repeat(end, n_blocks)))


def candidate_ranges(
    blocks: Blocks, slots_before: np.ndarray, candidates: np.ndarray
) -> np.ndarray:
    """Divide the candidates of each segment at the borders of its blocks.

    Args:
        blocks: The blocks of m segments, k in total.
        slots_before: Number of slots before each segment's first candidate, int64[m].
        candidates: Number of candidates of each segment, int64[m].

    Returns:
        int64[2 k + m], numbers of candidates. For each segment, they are the candidates before its
        first block, in its first block, between its first and its second block, and so on, and last
        the candidates after its last block.

    Example:
        A segment with 10 candidates and blocks of 3 slots at candidates 2 and 5 gives 2 3 0 3 2.
    """
    segment = blocks.segment
    begin, end = (
        np.clip(bound - slots_before[segment], 0, candidates[segment]) for bound in blocks[1:]
    )
    lengths = np.zeros(2 * len(segment) + len(candidates), np.int64)
    of_block = block_ranges(blocks)
    lengths[of_block] = end - begin
    # The range before a block starts where the block before it ends. The first block of a segment
    # has none before it.
    previous_end = np.append(0, end)[:-1]
    previous_end[starts_of(blocks.count)[blocks.count > 0]] = 0
    lengths[of_block - 1] = begin - previous_end
    # The last range of a segment starts after its last block, or at 0 if it has no blocks.
    last_end = np.zeros(len(candidates), np.int64)
    last_end[blocks.count > 0] = end[(np.cumsum(blocks.count) - 1)[blocks.count > 0]]
    lengths[range_offsets(blocks)[1:] - 1] = candidates - last_end
    return lengths


def block_ranges(blocks: Blocks) -> np.ndarray:
    """Return the index of each block in the result of `candidate_ranges`, int64[k]."""
    return 2 * np.arange(len(blocks.begin)) + blocks.segment + 1


def range_offsets(blocks: Blocks) -> np.ndarray:
    """Return the bounds of each segment in the result of `candidate_ranges`, int64[m + 1]."""
    return np.append(0, np.cumsum(2 * blocks.count + 1))


def put_by_block(
    slots: np.ndarray,
    first_slots: np.ndarray,
    blocks: Blocks,
    values: np.ndarray,
    ahead: np.ndarray | int,
) -> None:
    """Write one value per block to the block's slots in x_t.

    Args:
        slots: The flat array to write.
        first_slots: The first slot of each segment, int64[m].
        blocks: The blocks of the segments.
        values: The value of each block, [k].
        ahead: With 0, a slot gets the value of its own block. With 1, it gets the value of the
            block that contains the next slot. An array [m] of 0 and 1 has one choice per segment.
    """
    segment = blocks.segment
    shift = np.broadcast_to(ahead, first_slots.shape)[segment]
    begin = np.maximum(blocks.begin - shift, 0)
    lengths = blocks.end - shift - begin
    slots[np.repeat(first_slots[segment] + begin, lengths) + ranks(lengths)] = np.repeat(
        values, lengths
    )


def block_starts(blocks: Blocks, half: np.ndarray) -> np.ndarray:
    """Return for each slot of a half the position at which its block begins.

    A slot outside all blocks is a block of one slot.

    Args:
        blocks: The blocks of m segments.
        half: Number of slots of a half of each segment, int64[m].

    Returns:
        int32[Σ half].
    """
    starts = ranks(half).astype(np.int32)
    sizes = blocks.end - blocks.begin
    where = np.repeat(starts_of(half)[blocks.segment] + blocks.begin, sizes) + ranks(sizes)
    starts[where] = np.repeat(blocks.begin, sizes)
    return starts


def n_answers(
    parameters: Mapping[str, Any], n_segments: int, trained: TrainedRanges | None
) -> np.ndarray:
    """Return the number of answers at which blocks start in each segment, int64[m].

    Args:
        parameters: The parameters of the segments' task.
        n_segments: Number of segments, m.
        trained: The trained ranges of the segments.
    """
    if trained is None or not starts_at_answers(parameters):
        return np.zeros(n_segments, np.int64)
    return np.bincount(
        answers_of_ranges(trained.segment, trained.ranges).segment, minlength=n_segments
    )


def starts_at_answers(parameters: Mapping[str, Any]) -> bool:
    """Return whether the blocks of supervised documents start at each answer.

    `parameters` are those of a block-diffusion task.
    """
    return bool(parameters.get("block_origin", "none") == "answer")
