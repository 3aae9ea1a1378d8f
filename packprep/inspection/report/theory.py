"""What chance should give, in closed form, for segments whose lengths are known: drawn over what a dataset holds.

A span or a pivot is drawn from counts alone, so the expected histogram of all segments is the sum of each one's.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from packprep.dataset import noise
from packprep.objectives.span_corruption import span_counts


def part_shares(n: int, parts: int) -> np.ndarray:
    """float64[n + 1]: P(a part has k tokens) where n are cut into non-empty parts, uniformly over all ways.

    C(n − k − 1, parts − 2) / C(n − 1, parts − 1): the other parts divide what is left. One part is n. 1 ≤ parts ≤ n.
    """
    shares = np.zeros(n + 1)
    if parts == 1:
        shares[n] = 1.0
        return shares
    longest = n - parts + 1
    k = np.arange(1, longest)
    shares[1] = (parts - 1) / (n - 1)
    shares[2 : longest + 1] = shares[1] * np.cumprod((longest - k) / (n - k - 1))
    return shares


def expected_runs(n_tokens: int, n_noise: int, n_spans: int, roll: bool) -> np.ndarray:
    """float64[n_noise + 1]: how many runs of k tokens of noise a segment of span corruption has, on average.

    roll: the mask is rotated by one of n_tokens offsets. A span of l tokens is cut by l − 1 of them, into j and l − j with
    each j once: runs of k lose S · P(k) · (k − 1) / n, and win S · 2 / n for every longer span.
    """
    shares = part_shares(n_noise, n_spans)
    if not roll:
        return n_spans * shares
    longer = 1.0 - np.cumsum(shares)
    longer[0] = 0.0
    k = np.arange(n_noise + 1)
    return n_spans * (shares * (1.0 - np.maximum(k - 1, 0) / n_tokens) + 2.0 / n_tokens * np.maximum(longer, 0.0))


def expected_spans(task: Mapping[str, Any], n_sentinels: int, segments: Mapping[int, int]) -> np.ndarray:
    """float64[longest + 1]: the sum of `expected_runs` over a task's segments; segments: n tokens → how many."""
    parameters = task["parameters"]
    roll = bool(parameters["random_roll"])
    total = np.zeros(1)
    for n, count in sorted(segments.items()):
        n_noise, n_spans = counts_of(parameters, n_sentinels, n)
        runs = count * expected_runs(n, n_noise, n_spans, roll)
        if len(runs) > len(total):
            total = np.concatenate((total, np.zeros(len(runs) - len(total))))
        total[: len(runs)] += runs
    return total


def counts_of(parameters: Mapping[str, Any], n_sentinels: int, n: int) -> tuple[int, int]:
    """(n_noise, n_spans) of a segment of n tokens of a span corruption task."""
    return span_counts(
        n, parameters["noise_density"], parameters["mean_span_length"], n_sentinels - int(parameters["random_roll"])
    )


def pivot_bins(n: np.ndarray, bins: int) -> np.ndarray:
    """float64[bins]: how many pivots ~ U{1 … n − 1} lie in each of equal parts of [0, 1), as pivot / n, on average.

    n: int64[m], each at least 2.
    """
    total = np.zeros(bins)
    for b in range(bins):
        low, high = np.maximum(-(-n * b // bins), 1), np.minimum(-(-n * (b + 1) // bins), n)
        total[b] = (np.maximum(high - low, 0) / (n - 1)).sum()
    return total


def corrupted_shares(task: Mapping[str, Any], level: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """float64[m]: the share of its candidates that a segment, or block, of this level has corrupted, on average."""
    parameters, level = task["parameters"], level.astype(np.float64)
    if task["objective"] == "masked_diffusion":
        if parameters["exact_count"]:
            return np.minimum(np.maximum(np.floor(candidates * level), 1), candidates) / np.maximum(candidates, 1)
        return noise.mask_probability(level, parameters["epsilon"])
    if task["objective"] == "uniform_diffusion":
        low, high = parameters["noise_range"]
        place = (level - low) / (high - low) * noise.FLIP_STEPS if high > low else np.zeros(len(level))
        limits = np.array(task["resolved"]["flip_thresholds"], np.float64) / noise.ONE
        return limits[np.clip(np.rint(place - 0.5).astype(np.int64), 0, noise.FLIP_STEPS - 1)]
    return level
