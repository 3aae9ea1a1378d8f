"""span_corruption: sentinels replace spans of noise; the targets hold each sentinel and its span.

    tokens       10  11  12  13  14  15  16  17  18  19
    noise         0   0   1   1   0   0   0   1   1   1
    slots        10  11 100  14  15  16 101 | 100  12  13 101  17  18  19
    loss_mask     0   0   0   0   0   0   1     1   1   1   1   1   1   0
    prefix 7: the slots before the bar

This is the scheme of Raffel et al. 2020 (T5) and Tay et al. 2022 (UL2). Counts are computed in
float64. There are at most as many spans as text tokens, and no sentinel is used twice. random_roll
rotates the noise mask. The rotation may cut one span in two.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

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
    read_only,
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


class _Spans(NamedTuple):
    """A task's parameters for drawing spans, and the ids that the task writes."""

    density: float
    mean_length: float
    most_spans: int  # number of sentinels, minus 1 with random_roll (it may cut a span)
    roll: bool
    sentinels: np.ndarray  # int32[k]
    eos: int  # id of the eos that ends the inputs, or −1 without one


class _Stream(NamedTuple):
    """A stream of random words."""

    key: Any  # uint64
    purpose: Any  # int64
    epoch: Any  # int64


class _Buffers(NamedTuple):
    """Arrays that a kernel allocates once per call and uses for each segment in turn."""

    words: np.ndarray  # uint32: random words
    chosen: np.ndarray  # uint8: 1 at a chosen cut point, and all zero between two uses
    cuts: np.ndarray  # int64: cut points in ascending order
    unrolled: np.ndarray  # int64: lengths of runs before the rotation
    lengths: np.ndarray  # int64: lengths of runs in document order, alternately text and noise


class _Runs(NamedTuple):
    """The runs of one segment, alternately text and noise. All numbers are int64."""

    count: Any  # number of text runs and noise runs
    first_is_noise: Any  # 0 or 1
    noise_runs: Any
    noise_tokens: Any


class _Sides(NamedTuple):
    """The positions of a body's inputs and targets in the flat rows. All numbers are int64."""

    inputs: Any  # first slot of the inputs
    targets: Any  # first slot of the targets
    end: Any  # first slot after the body


@kernel(inline=True)
def _span_counts(n_tokens, noise_density, mean_span_length, max_spans):
    """Return the result of `span_counts`."""
    # Float64 and rounding half to even give the same numbers on every machine.
    n = max(np.int64(n_tokens), np.int64(2))
    n_noise = min(max(np.int64(np.rint(np.float64(n) * noise_density)), np.int64(1)), n - 1)
    n_spans = np.int64(np.rint(np.float64(n_noise) / mean_span_length))
    n_spans = max(min(n_spans, n_noise, n - n_noise, np.int64(max_spans)), np.int64(1))
    return n_noise, n_spans


def span_counts(
    n_tokens: int, noise_density: float, mean_span_length: float, max_spans: int | None = None
) -> tuple[int, int]:
    """Return the numbers of noise tokens and spans of a segment, computed in float64.

    With n = max(n_tokens, 2), and rounding half to even:

        n_noise = clip(round(n · noise_density), 1, n − 1)
        n_spans = clip(round(n_noise / mean_span_length), 1, min(n_noise, n − n_noise, max_spans))

    Plan, render and verify all call this function.

    Args:
        n_tokens: Tokens of the segment.
        noise_density: Share of the tokens that is noise.
        mean_span_length: Mean length of a span in tokens.
        max_spans: Maximum number of spans, or None for no limit.

    Returns:
        (n_noise, n_spans).
    """
    limit = _NO_LIMIT if max_spans is None else max_spans
    n_noise, n_spans = _span_counts.function(
        int(n_tokens), float(noise_density), float(mean_span_length), int(limit)
    )
    return int(n_noise), int(n_spans)


# Length formula


@kernel(inline=True)
def _split_by_roll(n, n_noise, n_spans, key):
    """Return whether random_roll cuts a span of the segment in two.

    The rotation offset is uniform over n values. Exactly n_noise − n_spans of the offsets cut a
    span, whatever the lengths of the spans.
    """
    return integer(key, ROLL, 0, n, 0) < n_noise - n_spans


@kernel
def _noise_and_runs(bodies, spans, noise, runs):
    """Write the number of noise tokens of each body to `noise`, and of noise runs to `runs`."""
    n = bodies.n
    for i in range(n.shape[0]):
        noise[i], runs[i] = _span_counts(n[i], spans.density, spans.mean_length, spans.most_spans)
        if spans.roll and _split_by_roll(n[i], noise[i], runs[i], bodies.key[i]):
            runs[i] += 1


def _spans_of(task: Task) -> _Spans:
    """Return the `_Spans` of a task."""
    parameters, sentinels = task.parameters, task.ids.sentinels
    roll = parameters["random_roll"]
    return _Spans(
        parameters["noise_density"],
        parameters["mean_span_length"],
        len(sentinels) - int(roll),
        roll,
        sentinels,
        task.ids.eos if _ended(task) else -1,
    )


def _ended(task: Task) -> int:
    """Return 1 if eos ends the inputs, otherwise 0."""
    return int(task.parameters["eos_after_inputs"])


def body_slots(task: Task, bodies: Bodies) -> np.ndarray:
    """Return the number of slots of each body: n + 2 · runs, and 1 more if eos ends the inputs.

    `runs` is the number of noise runs. Each has a sentinel in the inputs and one in the targets.

    Args:
        task: The task.
        bodies: The bodies of m segments.

    Returns:
        int64[m].
    """
    noise, runs = np.empty((2, *bodies.n.shape), np.int64)
    _noise_and_runs(bodies, _spans_of(task), noise, runs)
    return bodies.n + 2 * runs + _ended(task)


def most_body_slots(task: Task, n: int) -> int:
    """Return the most slots of a body of n tokens: n + 2 · runs, and 1 more if eos ends the inputs.

    `runs` is the number of spans, plus 1 if random_roll is on, because it may cut a span in two.

    Args:
        task: The task.
        n: Tokens of a body.

    Returns:
        The number of slots.
    """
    return sum(most_sides(task, n))


def most_sides(task: Task, n: int) -> tuple[int, int]:
    """Return the most slots of a body's inputs and of its targets.

    The inputs have n − n_noise + runs slots, and 1 more if eos ends them. The targets have n_noise
    + runs slots. `runs` is the number of spans, plus 1 if random_roll is on, because it may cut a
    span in two.

    Args:
        task: The task.
        n: Tokens of the body.

    Returns:
        (slots of the inputs, slots of the targets).
    """
    spans = _spans_of(task)
    noise, span_count = span_counts(n, *spans[:3])
    runs, n = span_count + int(spans.roll), max(n, 2)
    return n - noise + runs + _ended(task), noise + runs


def most_tokens(task: Task) -> int:
    """Return the most tokens that a segment can have with at most one span per sentinel.

    Return _NO_LIMIT if there is no limit, for example because too_many_spans is "lower".
    """
    density, mean, max_spans = _spans_of(task)[:3]
    if task.parameters["too_many_spans"] == "lower":
        return _NO_LIMIT
    # Double the tokens until their spans exceed the sentinels, then bisect.
    low, high = 2, 4
    while span_counts(high, density, mean)[1] <= max_spans:
        low, high = high, high * 2
        if high > _NO_LIMIT:  # The spans never outnumber the sentinels at this density.
            return _NO_LIMIT
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (middle, high) if span_counts(middle, density, mean)[1] <= max_spans else (low, middle)
        )
    return low


# Render


@kernel(inline=True)
def _compose(total, parts, stream, buffers, lengths, first_index):
    """Cut `total` into `parts` positive lengths.

    All C(total − 1, parts − 1) ways to cut are equally likely. Length i is written to
    lengths[first_index + 2i]. Floyd's sampling (Bentley and Floyd 1987) draws distinct cut points
    from 1 … total − 1. Each chosen cut point is flagged in a separate byte. If the flags were bits
    of one word, each step would wait for the previous step.
    """
    if parts == 1:
        lengths[first_index] = total
        return
    words, chosen, cuts = buffers.words, buffers.chosen, buffers.cuts
    # Draw parts − 1 distinct cut points and flag them.
    philox_blocks(stream.key, stream.purpose, stream.epoch, (parts + 2) >> 2, words)
    for i in range(parts - 1):
        last_point = np.uint64(total - parts + 1 + i)
        first_word = np.uint64(words[i])
        cut = np.uint64(
            1 + below(first_word, stream.key, stream.purpose, i, last_point, stream.epoch)
        )
        # If this point is already chosen, `last_point` takes its place.
        cut ^= (cut ^ last_point) & -np.uint64(chosen[cut])
        chosen[cut] = 1
    # List the flagged cut points. The loop always writes eight, because the CPU cannot predict
    # their number. The next eight overwrite the surplus.
    count = np.int64(1)
    for begin in range(0, total, 64):
        bits = flags_as_bits(chosen, begin)
        end = count + np.int64(bits_set(bits))
        while count < end:
            for _ in range(8):
                cuts[count] = begin + np.int64(trailing_zeros(bits))
                bits &= bits - _1
                count += 1
        count = end
    chosen[:total] = 0
    # The distances between cuts are the lengths.
    cuts[0], cuts[parts] = 0, total
    for i in range(parts):
        lengths[first_index + 2 * i] = cuts[i + 1] - cuts[i]


@kernel(inline=True)
def _buffers(n):
    """Return buffers that are long enough for each body, with n[i] tokens in body i."""
    longest = np.int64(0)
    for i in range(n.shape[0]):
        longest = max(longest, n[i])
    return _Buffers(
        np.empty(longest + 40, np.uint32),
        np.zeros(longest + 64, np.uint8),
        np.empty(longest + 16, np.int64),
        np.empty(longest + 4, np.int64),
        np.empty(longest + 4, np.int64),
    )


@kernel(inline=True)
def _draw_runs(n, key, epoch, spans, buffers):
    """Draw a segment's runs, write their lengths to `buffers.lengths`, and return `_Runs`."""
    noise, count = _span_counts(n, spans.density, spans.mean_length, spans.most_spans)
    # A rotation reads and writes whole lists of runs, so it needs two buffers.
    lengths = buffers.unrolled if spans.roll else buffers.lengths
    text_purpose, noise_purpose = TEXT_SPANS, NOISE_SPANS
    if epoch != 0:
        text_purpose, noise_purpose = REDRAWN_TEXT_SPANS, REDRAWN_NOISE_SPANS
    _compose(n - noise, count, _Stream(key, text_purpose, epoch), buffers, lengths, 0)
    _compose(noise, count, _Stream(key, noise_purpose, epoch), buffers, lengths, 1)
    if spans.roll:
        return _roll(n, _Runs(2 * count, np.int64(0), count, noise), key, epoch, buffers)
    return _Runs(2 * count, np.int64(0), count, noise)


@kernel(inline=True)
def _roll(n, runs, key, epoch, buffers):
    """Rotate the runs of `buffers.unrolled`, write them to `buffers.lengths`, and return `_Runs`.

    The rotation may start at each of n positions, which form two lists. The first has the `inside`
    positions strictly inside a noise run, where the rotation cuts this run. The second has the
    other positions, where no noise run is cut. A drawn offset below `inside` is an index into the
    first list. For any other offset, offset − inside is an index into the second list.
    """
    unrolled, lengths = buffers.unrolled, buffers.lengths
    offset = integer(key, ROLL, 0, n, 0)
    inside = runs.noise_tokens - runs.noise_runs
    cuts_span = offset < inside
    remaining = offset if cuts_span else offset - inside
    if epoch != 0:  # The new position is from the same list, so that the segment keeps its length.
        kind_size = inside if cuts_span else n - inside
        remaining = integer(key, REDRAWN_ROLL, 0, kind_size, epoch)
    # Find the run where the rotation starts, and the number of its tokens before the start.
    first_run, skipped = (np.int64(0), np.int64(0))
    while True:
        if first_run & 1:
            offsets = unrolled[first_run] - 1 if cuts_span else np.int64(1)
        else:
            offsets = np.int64(0) if cuts_span else unrolled[first_run]
        if remaining < offsets:
            skipped = remaining + 1 if cuts_span else remaining
            break
        remaining -= offsets
        first_run += 1
    # Copy the runs from `first_run` on, then the runs before it, then the skipped tokens.
    lengths[0] = unrolled[first_run] - skipped
    count = np.int64(1)
    for i in range(first_run + 1, runs.count):
        lengths[count] = unrolled[i]
        count += 1
    for i in range(first_run):
        lengths[count] = unrolled[i]
        count += 1
    if skipped > 0:
        lengths[count] = skipped
        count += 1
    noise_runs = runs.noise_runs + np.int64(cuts_span)
    return _Runs(count, first_run & 1, noise_runs, runs.noise_tokens)


@kernel(inline=True)
def _sides(first_slot, n, runs, eos):
    """Return the positions of the inputs and targets of a body that begins at `first_slot`."""
    targets = first_slot + n - runs.noise_tokens + runs.noise_runs + np.int64(eos >= 0)
    return _Sides(first_slot, targets, targets + runs.noise_tokens + runs.noise_runs)


@kernel(inline=True)
def _write_runs(tokens, begin, lengths, runs, sentinels, out, sides):
    """Write the inputs of one body to `out`, then its targets.

    The inputs are the text runs, with a sentinel in place of each noise run. The targets are the
    noise runs, with a sentinel before each of them. Copying a short run may also write to slots
    after the run. Later copies overwrite these slots, so the order matters.
    """
    first_is_noise, end = runs.first_is_noise, sides.end
    # Inputs.
    source, slot, number = begin, sides.inputs, 0
    if first_is_noise:
        out[slot] = sentinels[0]
        source += lengths[0]
        slot += 1
        number = 1
    for i in range(first_is_noise, runs.count, 2):
        copy_run(out, slot, tokens, source, lengths[i], end)
        slot += lengths[i]
        if i + 1 < runs.count:
            out[slot] = sentinels[number]
            slot += 1
            number += 1
            source += lengths[i] + lengths[i + 1]
    # Targets.
    source, slot = begin, sides.targets
    if not first_is_noise:
        source += lengths[0]
    for i in range(1 - first_is_noise, runs.count, 2):
        out[slot] = sentinels[i >> 1]
        copy_run(out, slot + 1, tokens, source, lengths[i], end)
        slot += 1 + lengths[i]
        if i + 1 < runs.count:
            source += lengths[i] + lengths[i + 1]


@kernel
def _render(tokens, columns, spans, rows):
    """Write the bodies of segments to the flat rows."""
    bodies = columns.bodies
    buffers = _buffers(bodies.n)
    for i in range(bodies.n.shape[0]):
        runs = _draw_runs(bodies.n[i], bodies.key[i], bodies.epoch, spans, buffers)
        sides = _sides(columns.at[i], bodies.n[i], runs, spans.eos)
        _write_runs(tokens, columns.begin[i], buffers.lengths, runs, spans.sentinels, rows, sides)
        if spans.eos >= 0:  # Write eos last, because copies of runs may write beyond their ends.
            rows[sides.targets - 1] = spans.eos


@kernel
def _restore(rows, columns, spans, out, fits):
    """Read each body's tokens from the flat rows, and check its sentinels and its eos."""
    bodies, sentinels = columns.bodies, spans.sentinels
    buffers = _buffers(bodies.n)
    for i in range(bodies.n.shape[0]):
        # No array stores the runs. The key draws the same runs as in `_render`.
        runs = _draw_runs(bodies.n[i], bodies.key[i], bodies.epoch, spans, buffers)
        sides = _sides(columns.at[i], bodies.n[i], runs, spans.eos)
        inputs, targets, _ = sides
        token, number = columns.begin[i], 0
        is_noise, fit = runs.first_is_noise == 1, spans.eos < 0 or rows[targets - 1] == spans.eos
        # Runs are in document order. Text runs are read from the inputs and noise runs from the
        # targets.
        for r in range(runs.count):
            length = buffers.lengths[r]
            if is_noise:
                # The k-th noise run must have sentinel k in the inputs and in the targets (P14).
                fit = fit and rows[inputs] == sentinels[number]
                fit = fit and rows[targets] == sentinels[number]
                inputs += 1
                targets += 1
                number += 1
                for j in range(length):
                    out[token + j] = rows[targets + j]
                targets += length
            else:
                for j in range(length):
                    out[token + j] = rows[inputs + j]
                inputs += length
            token += length
            is_noise = not is_noise
        fits[i] = fit


def body_prefix(task: Task, bodies: Bodies) -> np.ndarray:
    """Return the number of slots of each body's inputs.

    The inputs are the text tokens, one sentinel per noise run, and eos if it ends the inputs.

    Args:
        task: The task.
        bodies: The bodies of m segments.

    Returns:
        int64[m].
    """
    noise, runs = np.empty((2, *bodies.n.shape), np.int64)
    _noise_and_runs(bodies, _spans_of(task), noise, runs)
    return bodies.n - noise + runs + _ended(task)


def render(task: Task, columns: BodySlots, tokens: np.ndarray, rows: np.ndarray) -> None:
    """Draw each segment's spans and write its inputs and targets.

    Args:
        task: The task.
        columns: The segments.
        tokens: int[Σ n], the flat tokens.
        rows: The flat rows, changed in place.
    """
    _render(tokens, columns, _spans_of(task), rows)


def restore(task: Task, columns: BodySlots, rows: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Read the tokens of segments from their inputs and targets, in the original order.

    Args:
        task: The task.
        columns: The segments.
        rows: The flat rows.
        out: The flat tokens, changed in place.

    Returns:
        bool[m], whether each body has its sentinels at the right slots of the inputs and targets,
        and its eos at the end of the inputs if the task writes an eos.
    """
    fits = np.empty(columns.begin.shape, np.bool_)
    _restore(read_only(rows), columns, _spans_of(task), out, fits)
    return fits


@kernel
def _write_masked(tokens, lengths, runs, sentinels, out, sides):
    """Call `_write_runs` from Python, for a segment that begins at index 0 of `tokens`."""
    _write_runs(tokens, 0, lengths, runs, sentinels, out, sides)


def render_with_mask(
    tokens: np.ndarray, mask: np.ndarray, sentinels: np.ndarray, mode_token: int | None = None
) -> tuple[np.ndarray, int]:
    """Return the slots of a segment, with the noise mask as an argument instead of a random draw.

    Args:
        tokens: int[L].
        mask: bool[L], True for noise.
        sentinels: int[k]. Sentinel i is used for run i of noise.
        mode_token: An id to write before the body, or None.

    Returns:
        The slots, int64[L + 2 · runs (+ 1 for the mode token)], and the length of the prefix.

    Raises:
        RecipeError: If the mask has no noise, more runs than sentinels, or another length than the
            tokens.
    """
    tokens, noise = np.asarray(tokens, np.int64), np.asarray(mask).astype(np.bool_)
    sentinels = np.asarray(sentinels, np.int64)
    if tokens.shape != noise.shape or tokens.ndim != 1:
        raise RecipeError(
            f"the mask has shape {noise.shape}, but the tokens have shape {tokens.shape}\n"
            "hint: pass one flag for each token"
        )
    if not noise.any():
        raise RecipeError(
            "the mask has no noise\nhint: set at least one flag, since a token has to be a target"
        )
    # The mask 0 0 1 0 has the bounds 0, 2, 3 and 4, so its runs have 2, 1 and 1 tokens.
    bounds = np.concatenate(([0], np.flatnonzero(np.diff(noise)) + 1, [len(noise)]))
    lengths, noise_tokens = np.diff(bounds), np.count_nonzero(noise)
    noise_runs = np.count_nonzero(noise[bounds[:-1]])
    if noise_runs > len(sentinels):
        raise RecipeError(
            f"the mask has {noise_runs} runs of noise, but there are only {len(sentinels)}"
            " sentinels\n"
            "hint: pass more sentinels"
        )
    # The prefix is the mode token and the inputs, so it ends where the targets start.
    mode = int(mode_token is not None)
    out = np.empty(mode + len(tokens) + 2 * noise_runs, np.int64)
    if mode_token is not None:
        out[0] = mode_token
    runs = _Runs(len(lengths), int(noise[0]), noise_runs, noise_tokens)
    sides = _Sides(mode, mode + len(tokens) - noise_tokens + noise_runs, len(out))
    _write_masked(tokens, lengths, runs, sentinels, out, sides)
    return out, sides.targets


def sentinels(parameters: Mapping[str, Any], n: int) -> int:
    """Return how many sentinels a segment of n tokens can use.

    It is the number of spans, plus 1 if random_roll is on, because it may cut a span in two.

    Args:
        parameters: The task's parameters.
        n: Tokens of a segment.

    Returns:
        The number of sentinels.
    """
    spans = span_counts(n, parameters["noise_density"], parameters["mean_span_length"])[1]
    return spans + int(parameters["random_roll"])


def forecast(task: Task, n: int) -> dict[str, tuple[float, float]]:
    """Return the wanted and the realized mean span length of a segment of n tokens.

    They differ because the numbers of noise tokens and spans are rounded and limited.

    Args:
        task: The task.
        n: Tokens of the segment.

    Returns:
        {"mean_span_length": (wanted, realized)}.
    """
    spans = _spans_of(task)
    noise_tokens, span_count = span_counts(n, *spans[:3])
    return {"mean_span_length": (spans.mean_length, noise_tokens / span_count)}


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
