"""span_corruption: spans of noise are replaced by sentinels; the targets give each sentinel and its
span.

    tokens       10  11  12  13  14  15  16  17  18  19
    noise         0   0   1   1   0   0   0   1   1   1
    slots        10  11 100  14  15  16 101 | 100  12  13 101  17  18  19
    loss_mask     0   0   0   0   0   0   1     1   1   1   1   1   1   0
    prefix 7: what stands before the bar

Raffel et al. 2020 (T5) and Tay et al. 2022 (UL2), with the counts in float64, spans clamped to the
tokens that are not noise, and no sentinel used twice. With random_roll the mask is rotated; a
rotation may cut one span in two.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from packprep.dataset.epochs.token_slots import SPAN_CORRUPTION, roles_of_inputs
from packprep.errors import RecipeError
from packprep.kernel import (
    below,
    bits_set,
    copy_run,
    flags_as_bits,
    integer,
    kernel,
    philox_blocks,
    trailing_zeros,
)
from packprep.objectives.objective import Bodies, BodySlots, Objective, Task
from packprep.randomness import (
    NOISE_SPANS,
    REDRAWN_NOISE_SPANS,
    REDRAWN_ROLL,
    REDRAWN_TEXT_SPANS,
    ROLL,
    TEXT_SPANS,
)

_NO_LIMIT = 1 << 40
_1 = np.uint64(1)


@kernel(inline=True)
def _span_counts(n_tokens, noise_density, mean_span_length, max_spans):
    n = max(np.int64(n_tokens), np.int64(2))
    n_noise = min(max(np.int64(np.rint(np.float64(n) * noise_density)), np.int64(1)), n - 1)
    n_spans = np.int64(np.rint(np.float64(n_noise) / mean_span_length))
    n_spans = max(min(n_spans, n_noise, n - n_noise, np.int64(max_spans)), np.int64(1))
    return n_noise, n_spans


def span_counts(
    n_tokens: int, noise_density: float, mean_span_length: float, max_spans: int | None = None
) -> tuple[int, int]:
    """(n_noise, n_spans) of a segment of n tokens, n = max(n_tokens, 2):

    n_noise = clip(round(n · noise_density), 1, n − 1)
    n_spans = clip(round(n_noise / mean_span_length), 1, min(n_noise, n − n_noise, max_spans))

    in float64, rounding half to even. The one home of these numbers: plan, render and verify all
    call it.
    """
    limit = _NO_LIMIT if max_spans is None else max_spans
    n_noise, n_spans = _span_counts.function(
        int(n_tokens), float(noise_density), float(mean_span_length), int(limit)
    )
    return int(n_noise), int(n_spans)


def max_tokens_for(
    slots: int, noise_density: float, mean_span_length: float, max_spans: int | None = None
) -> int:
    """The largest n whose segment fits into `slots` slots with a mode token and no bos, eos or
    roll; 0 if none does."""
    low, high = 0, max(int(slots) - 1, 0)
    while low < high:
        middle = (low + high + 1) // 2
        fits = (
            1 + middle + 2 * span_counts(middle, noise_density, mean_span_length, max_spans)[1]
            <= slots
        )
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


# The length law


@kernel(inline=True)
def _split_by_roll(n, n_noise, n_spans, key):
    """Whether the rotation cuts a span: of the n offsets, n_noise − n_spans do, whatever the
    composition."""
    return integer(key, ROLL, 0, n, 0) < n_noise - n_spans


@kernel
def _noise_and_runs(n, key, density, mean, max_spans, roll, noise, runs):
    for i in range(n.shape[0]):
        noise[i], runs[i] = _span_counts(n[i], density, mean, max_spans)
        if roll and _split_by_roll(n[i], noise[i], runs[i], key[i]):
            runs[i] += 1


def _law(task: Task) -> tuple[float, float, int, bool]:
    """(density, mean length, most spans, roll); under a roll one sentinel is kept for the span that
    it may cut."""
    p, sentinels = task.parameters, len(task.ids.sentinels)
    return (
        p["noise_density"],
        p["mean_span_length"],
        sentinels - int(p["random_roll"]),
        p["random_roll"],
    )


def _ended(task: Task) -> int:
    """1 where eos ends the inputs, else 0."""
    return int(task.parameters["eos_after_inputs"])


def _eos(task: Task) -> int:
    return task.ids.eos if _ended(task) else -1


def body_slots(task: Task, bodies: Bodies) -> np.ndarray:
    """n + 2 · runs: a run's tokens and its sentinel move to the targets, and a sentinel stays; eos
    may end the inputs."""
    noise, runs = np.empty((2, *bodies.n.shape), np.int64)
    _noise_and_runs(bodies.n, bodies.key, *_law(task), noise, runs)
    return bodies.n + 2 * runs + _ended(task)


def most_body_slots(task: Task, n: int) -> int:
    """n + 2 · (n_spans + 1 under a roll), and eos of the inputs."""
    return sum(most_sides(task, n))


def most_sides(task: Task, n: int) -> tuple[int, int]:
    """n − n_noise + runs and perhaps eos, n_noise + runs; runs = n_spans + 1 under a roll."""
    density, mean, max_spans, roll = _law(task)
    noise, spans = span_counts(n, density, mean, max_spans)
    runs, n = spans + int(roll), max(n, 2)
    return n - noise + runs + _ended(task), noise + runs


def most_tokens(task: Task) -> int:
    """With too_many_spans = "split", the longest segment whose spans have a sentinel each;
    otherwise no limit."""
    density, mean, max_spans, _ = _law(task)
    if task.parameters["too_many_spans"] == "lower":
        return _NO_LIMIT
    low, high = 2, 4
    while span_counts(high, density, mean)[1] <= max_spans:
        low, high = high, high * 2
        if high > _NO_LIMIT:  # so dense that the spans never grow beyond the list
            return _NO_LIMIT
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (middle, high) if span_counts(middle, density, mean)[1] <= max_spans else (low, middle)
        )
    return low


# Render


@kernel(inline=True)
def _compose(n, k, key, purpose, epoch, words, chosen, cuts, lengths, at):
    """Cut n into k non-empty parts, uniformly over the C(n − 1, k − 1) ways; part i goes to
    lengths[at + 2i].

    Floyd's sampling of k − 1 distinct cut points of 1 … n − 1 (Bentley and Floyd 1987) into
    `chosen` (uint8, zero before and after). The flags are bytes, since a processor waits for every
    bit that is set in the word of the one before. words and cuts are overwritten; how long all are
    says `_buffers`.
    """
    if k == 1:
        lengths[at] = n
        return
    philox_blocks(key, purpose, epoch, (k + 2) >> 2, words)
    for i in range(k - 1):
        j = np.uint64(n - k + 1 + i)
        cut = np.uint64(1 + below(np.uint64(words[i]), key, purpose, i, j, epoch))
        cut ^= (cut ^ j) & -np.uint64(chosen[cut])  # j if taken
        chosen[cut] = 1
    count = np.int64(1)
    for begin in range(0, n, 64):
        bits = flags_as_bits(chosen, begin)
        end = count + np.int64(bits_set(bits))
        # eight at a time: how many there are cannot be guessed. What is too much is overwritten
        while count < end:
            for _ in range(8):
                cuts[count] = begin + np.int64(trailing_zeros(bits))
                bits &= bits - _1
                count += 1
        count = end
    chosen[:n] = 0
    cuts[0], cuts[k] = 0, n
    for i in range(k):
        lengths[at + 2 * i] = cuts[i + 1] - cuts[i]


@kernel(inline=True)
def _buffers(longest):
    """(words, chosen, cuts, base, runs) for segments of up to `longest` tokens."""
    return (
        np.empty(longest + 40, np.uint32),
        np.zeros(longest + 64, np.uint8),
        np.empty(longest + 16, np.int64),
        np.empty(longest + 4, np.int64),
        np.empty(longest + 4, np.int64),
    )


@kernel(inline=True)
def _draw_runs(n, n_noise, n_spans, key, epoch, roll, buffers):
    """The segment's runs in document order: their lengths in `runs`, alternately text and noise.

    Gives (number of runs of both kinds, 1 if the first is noise else 0, number of noise runs).
    """
    words, chosen, cuts, base, runs = buffers
    drawn = base if roll else runs
    text, noise = TEXT_SPANS, NOISE_SPANS
    if epoch != 0:
        text, noise = REDRAWN_TEXT_SPANS, REDRAWN_NOISE_SPANS
    _compose(n - n_noise, n_spans, key, text, epoch, words, chosen, cuts, drawn, 0)
    _compose(n_noise, n_spans, key, noise, epoch, words, chosen, cuts, drawn, 1)
    count = 2 * n_spans
    if not roll:
        return count, np.int64(0), n_spans
    # The rotation begins at the r-th offset strictly inside a noise run, or else at the (r −
    # inside)-th of the others.
    r = integer(key, ROLL, 0, n, 0)
    inside = n_noise - n_spans
    cut = r < inside
    left = r if cut else r - inside
    if epoch != 0:  # of the same kind, so that the length stays
        left = integer(key, REDRAWN_ROLL, 0, inside if cut else n - inside, epoch)
    # the run in which it begins, and how much of it lies before
    first, skip = (np.int64(0), np.int64(0))
    while True:
        if first & 1:
            offsets = base[first] - 1 if cut else np.int64(1)
        else:
            offsets = np.int64(0) if cut else base[first]
        if left < offsets:
            skip = left + 1 if cut else left
            break
        left -= offsets
        first += 1
    runs[0] = base[first] - skip
    at = np.int64(1)
    for i in range(first + 1, count):
        runs[at] = base[i]
        at += 1
    for i in range(first):
        runs[at] = base[i]
        at += 1
    if skip > 0:
        runs[at] = skip
        at += 1
    return at, first & 1, n_spans + np.int64(cut)


@kernel(inline=True)
def _write_runs(tokens, begin, runs, n_runs, first_is_noise, sentinels, out, inputs, targets, end):
    """Write the runs: text to `inputs`; for noise a sentinel there, and the sentinel and the tokens
    to `targets`.

    The inputs come first as a whole, since copies of short runs may write beyond their end, up to
    `end`.
    """
    s, t, k = begin, inputs, 0
    if first_is_noise:
        out[t] = sentinels[0]
        s += runs[0]
        t += 1
        k = 1
    for i in range(first_is_noise, n_runs, 2):
        copy_run(out, t, tokens, s, runs[i], end)
        t += runs[i]
        if i + 1 < n_runs:
            out[t] = sentinels[k]
            t += 1
            k += 1
            s += runs[i] + runs[i + 1]
    s, t = begin, targets
    if not first_is_noise:
        s += runs[0]
    for i in range(1 - first_is_noise, n_runs, 2):
        out[t] = sentinels[i >> 1]
        copy_run(out, t + 1, tokens, s, runs[i], end)
        t += 1 + runs[i]
        if i + 1 < n_runs:
            s += runs[i] + runs[i + 1]


@kernel
def _render(
    tokens, begin, n, key, epoch, body, density, mean, max_spans, roll, sentinels, eos, longest, out
):
    buffers = _buffers(longest)
    runs = buffers[4]
    for i in range(n.shape[0]):
        n_noise, n_spans = _span_counts(n[i], density, mean, max_spans)
        n_runs, first, spans = _draw_runs(n[i], n_noise, n_spans, key[i], epoch, roll, buffers)
        ended = np.int64(eos >= 0)
        targets, end = body[i] + n[i] - n_noise + spans + ended, body[i] + n[i] + 2 * spans + ended
        _write_runs(tokens, begin[i], runs, n_runs, first, sentinels, out, body[i], targets, end)
        if ended:  # after the runs, which may be copied beyond their ends
            out[targets - 1] = eos


@kernel
def _restore(
    rows,
    begin,
    n,
    key,
    epoch,
    body,
    density,
    mean,
    max_spans,
    roll,
    sentinels,
    eos,
    longest,
    out,
    fits,
):
    buffers = _buffers(longest)
    runs = buffers[4]
    for i in range(n.shape[0]):
        n_noise, n_spans = _span_counts(n[i], density, mean, max_spans)
        n_runs, first, spans = _draw_runs(n[i], n_noise, n_spans, key[i], epoch, roll, buffers)
        ended = np.int64(eos >= 0)
        inputs, targets, s, k = body[i], body[i] + n[i] - n_noise + spans + ended, begin[i], 0
        noise, fit = first == 1, ended == 0 or rows[targets - 1] == eos
        for r in range(n_runs):
            if noise:
                fit = fit and rows[inputs] == sentinels[k] and rows[targets] == sentinels[k]
                inputs += 1
                targets += 1
                k += 1
                for j in range(runs[r]):
                    out[s + j] = rows[targets + j]
                targets += runs[r]
            else:
                for j in range(runs[r]):
                    out[s + j] = rows[inputs + j]
                inputs += runs[r]
            s += runs[r]
            noise = not noise
        fits[i] = fit


def body_prefix(task: Task, bodies: Bodies) -> np.ndarray:
    """int64[m]: the inputs: the tokens that are not noise, a sentinel a run, and perhaps eos."""
    noise, runs = np.empty((2, *bodies.n.shape), np.int64)
    _noise_and_runs(bodies.n, bodies.key, *_law(task), noise, runs)
    return bodies.n - noise + runs + _ended(task)


def render(task: Task, columns: BodySlots, tokens: np.ndarray, rows: np.ndarray) -> None:
    """Draws each segment's spans and writes inputs and targets."""
    n, key, _, epoch = columns.bodies
    longest = int(n.max(initial=0))
    ids = task.ids.sentinels, _eos(task)
    _render(tokens, columns.begin, n, key, epoch, columns.at, *_law(task), *ids, longest, rows)


def restore(task: Task, columns: BodySlots, rows: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Puts the spans back; a body fits if the right sentinels stand where the spans were and before
    their tokens."""
    fits = np.empty(columns.begin.shape, np.bool_)
    n, key, _, epoch = columns.bodies
    longest = int(n.max(initial=0))
    ids = task.ids.sentinels, _eos(task)
    _restore(rows, columns.begin, n, key, epoch, columns.at, *_law(task), *ids, longest, out, fits)
    return fits


@kernel
def _write_masked(tokens, runs, first_is_noise, sentinels, out, inputs, targets):
    _write_runs(
        tokens,
        0,
        runs,
        runs.shape[0],
        first_is_noise,
        sentinels,
        out,
        inputs,
        targets,
        out.shape[0],
    )


def render_with_mask(
    tokens: np.ndarray, mask: np.ndarray, sentinels: np.ndarray, mode_token: int | None = None
) -> tuple[np.ndarray, int]:
    """The slots of a given mask: (slots int64[L + 2 · runs (+ 1)], prefix).

    tokens: int[L]; mask: bool[L], True for noise; sentinels: int[k], the i-th for the i-th run of
    noise. RecipeError if the mask has no noise, more runs than sentinels, or another length than
    the tokens.
    """
    tokens, noise = np.asarray(tokens, np.int64), np.asarray(mask).astype(np.bool_)
    sentinels = np.asarray(sentinels, np.int64)
    if tokens.shape != noise.shape or tokens.ndim != 1:
        raise RecipeError(
            f"mask of shape {noise.shape} for tokens of shape {tokens.shape}: give one flag for"
            " each token"
        )
    if not noise.any():
        raise RecipeError("the mask has no noise: at least one token has to be a target")
    bounds = np.flatnonzero(np.diff(noise)) + 1
    runs = np.diff(np.concatenate(([0], bounds, [len(noise)])))
    n_noise_runs = int(np.count_nonzero(noise[np.concatenate(([0], bounds))]))
    if n_noise_runs > len(sentinels):
        raise RecipeError(
            f"the mask has {n_noise_runs} runs of noise and there are {len(sentinels)} sentinels:"
            " give more"
        )
    mode = int(mode_token is not None)
    out = np.empty(mode + len(tokens) + 2 * n_noise_runs, np.int64)
    if mode_token is not None:
        out[0] = mode_token
    prefix = mode + int(np.count_nonzero(~noise)) + n_noise_runs
    _write_masked(tokens, runs, int(noise[0]), sentinels, out, mode, prefix)
    return out, prefix


def sentinels(parameters: Mapping[str, Any], n: int) -> int:
    """One a span, and one more under a roll."""
    spans = span_counts(n, parameters["noise_density"], parameters["mean_span_length"])[1]
    return spans + int(parameters["random_roll"])


def forecast(task: Task, n: int) -> dict[str, tuple[float, float]]:
    """The mean span length that a segment of n tokens really gets: spans are clamped, and whole
    numbers."""
    density, mean, max_spans, _ = _law(task)
    n_noise, n_spans = span_counts(n, density, mean, max_spans)
    return {"mean_span_length": (mean, n_noise / n_spans)}


OBJECTIVE = Objective(
    name="span_corruption",
    attention="prefix",
    parameters=SPAN_CORRUPTION.parameters,
    body_slots=body_slots,
    most_body_slots=most_body_slots,
    most_sides=most_sides,
    most_tokens=most_tokens,
    body_prefix=body_prefix,
    render=render,
    restore=restore,
    sentinels=sentinels,
    roles=roles_of_inputs,
    forecast=forecast,
)
