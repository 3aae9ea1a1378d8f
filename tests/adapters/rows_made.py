"""Rows written down by hand: which segments, of which rule, with which gaps; and each segment's
document alone."""

from typing import NamedTuple

import numpy as np

VOCAB = 61


class Segment(NamedTuple):
    """rule: causal, prefix, both_ways or blocks. size: the prefix, or the block length. gap:
    padding slots behind it. starts: where the block of each slot of a half begins; none: blocks
    count from the first slot."""

    rule: str
    length: int
    size: int = 0
    gap: int = 0
    starts: tuple[int, ...] = ()


def answers(chance, half, size):
    """The starts of blocks of up to `size` slots, with context between answers."""
    starts = []
    while len(starts) < half:
        if chance.random() < 0.5:
            starts.append(len(starts))
            continue
        first, n = len(starts), chance.randint(1, min(2 * size, half - len(starts)))
        starts += [first + t // size * size for t in range(n)]
    return tuple(starts)


def starts_of(segment):
    """Where the block of each slot of a half begins."""
    half = segment.length // 2
    return segment.starts or tuple(t // segment.size * segment.size for t in range(half))


def document(segment, rng):
    """(tokens, labels, loss_mask, position_ids) of a segment, [length] each."""
    n = segment.length
    tokens, labels, mask = rng.integers(1, VOCAB, n), rng.integers(1, VOCAB, n), np.zeros(n, bool)
    positions = np.arange(n)
    if segment.rule in ("causal", "prefix"):
        labels[:-1], labels[-1] = tokens[1:], 0
        mask[max(segment.size - 1, 0) : -1] = True
    elif segment.rule == "both_ways":
        mask = rng.random(n) < 0.5
    else:
        positions %= n // 2
        mask[: n // 2] = rng.random(n // 2) < 0.5
    return tokens, labels, mask, positions


def seen(segment):
    """bool[n, n], [q, k]: what the rule allows inside one document, pair by pair."""
    n = segment.length
    allowed = np.zeros((n, n), bool)
    for q in range(n):
        for k in range(n):
            if segment.rule == "blocks":
                half = n // 2
                (q_half, q_at), (k_half, k_at) = divmod(q, half), divmod(k, half)
                q_block, k_block = starts_of(segment)[q_at], starts_of(segment)[k_at]
                if q_half == 0:
                    allowed[q, k] = q_block == k_block if k_half == 0 else k_block < q_block
                else:
                    allowed[q, k] = k_half == 1 and k_block <= q_block
            else:
                size = {"causal": 0, "prefix": segment.size, "both_ways": n}[segment.rule]
                allowed[q, k] = k <= q or k < size
    return allowed


def batch(rows, length, seed=0):
    """A batch of numpy arrays as adapters.torch names them, with prefix_ends −1 and block_lengths
    where rows have blocks, and block_starts where segments say where their blocks begin."""
    rng = np.random.default_rng(seed)
    names = ("tokens", "labels", "position_ids", "segment_ids", "prefix_ends", "block_lengths")
    made = {name: np.zeros((len(rows), length), np.int64) for name in names}
    made["loss_mask"] = np.zeros((len(rows), length), bool)
    for r, segments in enumerate(rows):
        at = 0
        for i, segment in enumerate(segments):
            end = at + segment.length
            assert end <= length
            tokens, labels, mask, positions = document(segment, rng)
            values = {
                "tokens": tokens,
                "labels": labels,
                "loss_mask": mask,
                "position_ids": positions,
            }
            prefix = {
                "causal": 0,
                "prefix": segment.size,
                "both_ways": segment.length,
                "blocks": 0,
            }[segment.rule]
            values["segment_ids"] = i + 1
            values["prefix_ends"] = -1 if segment.rule == "blocks" else at + prefix
            values["block_lengths"] = segment.size if segment.rule == "blocks" else 0
            for name, value in values.items():
                made[name][r, at:end] = value
            at = end + segment.gap
    if any(segment.starts for segments in rows for segment in segments):
        made["block_starts"] = np.full((len(rows), length), -1, np.int64)
        for r, at, segment in places(rows):
            if segment.rule == "blocks":
                made["block_starts"][r, at : at + segment.length] = starts_of(segment) * 2
    if not made["block_lengths"].any():
        del made["block_lengths"]
    return made


def places(rows):
    """(row, begin, segment) of every segment."""
    found = []
    for r, segments in enumerate(rows):
        at = 0
        for segment in segments:
            found.append((r, at, segment))
            at += segment.length + segment.gap
    return found


def whole_mask(rows, length):
    """bool[B, T, T] of the real slots, from each document's own mask; padding sees nothing here."""
    mask = np.zeros((len(rows), length, length), bool)
    for r, begin, segment in places(rows):
        end = begin + segment.length
        mask[r, begin:end, begin:end] = seen(segment)
    return mask


CAUSAL = [
    [Segment("causal", 9), Segment("causal", 1), Segment("causal", 14)],
    [Segment("causal", 20)],
    [],
]
PREFIX = [
    [Segment("prefix", 9, 4), Segment("causal", 5), Segment("prefix", 11, 10)],
    [Segment("prefix", 7, 1)],
]
BOTH_WAYS = [[Segment("both_ways", 9), Segment("both_ways", 15)], [Segment("both_ways", 2)]]
BLOCKS = [[Segment("blocks", 12, 3), Segment("blocks", 10, 4)], [Segment("blocks", 2, 8)]]
MIXED = [
    [Segment("blocks", 10, 2), Segment("prefix", 7, 3, gap=1), Segment("causal", 5)],
    [Segment("both_ways", 6, gap=2), Segment("causal", 4), Segment("blocks", 14, 3)],
]
GAPS = [
    [Segment("causal", 3, gap=1), Segment("causal", 2, gap=2), Segment("causal", 4, gap=0)],
    [Segment("causal", 8)],
]
ALL = {
    "causal": CAUSAL,
    "prefix": PREFIX,
    "both_ways": BOTH_WAYS,
    "blocks": BLOCKS,
    "mixed": MIXED,
    "gaps": GAPS,
}
LENGTH = 28
