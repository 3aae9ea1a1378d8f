"""Compute the slots of a next-token segment's tokens in an epoch.

Resampling reads tokens from their slots in epoch 0 and writes them to their slots in another epoch.
The slots follow from the segment's key, so resampling need not search the row for sentinels. In
this example of span_corruption, 3 of 7 tokens are noise, in 2 spans. So a body has 11 slots:

    slot        0    1    2    3    4    5  |  6    7    8    9   10
    epoch 0    10   11  <a>   14   15  <b>  | <a>  12   13  <b>   16
    epoch 3    10  <a>   12   13   14  <b>  | <a>  11  <b>   15   16

    document            10   11   12   13   14   15   16
    slots in epoch 0     0    1    7    8    3    4   10     rows[slots] is the document
    slots in epoch 3     0    7    2    3    4    9   10     rows[slots] = document

Reading rows[slots] with the slots of epoch 0 restores the document. Assigning the document to
rows[slots] with the slots of epoch 3 writes its tokens. Sentinels fill the other slots.

Epoch 0 uses the same random numbers as the kernels of `objectives/`. Later epochs use random
numbers of other purposes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from packprep import randomness
from packprep.dataset.boundaries import owners, ranks, starts_of
from packprep.dataset.epochs.candidates import words_of
from packprep.dataset.manifest import Parameter
from packprep.randomness import (
    CUT_POINTS,
    NOISE_SPANS,
    PIVOT,
    REDRAWN_CUT_POINTS,
    REDRAWN_NOISE_SPANS,
    REDRAWN_PIVOT,
    REDRAWN_ROLL,
    REDRAWN_TEXT_SPANS,
    ROLL,
    TEXT_SPANS,
)


class Placed(NamedTuple):
    """The slots and special tokens of segments' bodies. Slots are indices into the flat rows."""

    token: np.ndarray  # int64[Σ n]: slot of each token, in document order
    special: np.ndarray  # int64[k]: slots of sentinels and other special tokens
    id: np.ndarray  # int64[k]: the id in each slot of `special`, or −1 if the stored row is wrong
    slots: np.ndarray  # int64[m]: number of slots of each body
    prefix: np.ndarray | None  # int64[m]: slots of the prefix, or None if the task has no prefixes


class Stretches(NamedTuple):
    """The bodies of m segments of one task. Each array has the shape [m]."""

    key: np.ndarray  # uint64
    n: np.ndarray  # int64: number of tokens
    first_slot: np.ndarray  # int64: first slot of the body in the flat rows


class SpecialIds(NamedTuple):
    """The special ids that next-token objectives write, and flags of tokens inside characters.

    If a token begins inside a character, a text-safe cut may not be before this token.
    """

    sentinels: np.ndarray  # int64[k]
    fim: tuple[int, int, int]  # prefix, middle and suffix
    # uint8[vocabulary]: 1 if a token begins inside a character; empty if no token does
    continues: np.ndarray
    eos: int = -1  # −1 means that there is no eos


SPECIAL = "the special tokens that its key puts there"
"""The property that messages name if a segment is damaged."""


def misfit(room: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Return which bodies do not fit their slots.

    A body may leave at most one slot free, which is for eos.

    Args:
        room: Number of slots from each body's first slot to the end of its segment, int64[m].
        slots: Number of slots that each body needs, int64[m].

    Returns:
        bool[m], True if a body does not fit.
    """
    return (room < slots) | (room > slots + 1)


@dataclass(frozen=True)
class TokenLayout:
    """The layout of one next-token objective's tokens.

    Attributes:
        name: The objective's name.
        parameters: The keys of the objective's tasks in `[[tasks]]`.
        place: (parameters, ids, segments, epoch, known) → Placed. In epoch 0, `known` has the
            stored flat rows. In later epochs, it has the segments' tokens in document order, [Σ n].
        sentinels: (parameters) → the number of sentinels that the task needs.
        roles: (parameters) → the names of special tokens that the vocabulary must have.
        least: The smallest number of tokens in a segment.
        whole: (parameters) → whether the task never cuts inside a character. If so, `place` needs
            `SpecialIds.continues`.
        keeps_prefix: Whether a segment's prefix has the same length in every epoch.
    """

    name: str
    parameters: tuple[Parameter, ...]
    place: Callable[[Mapping[str, Any], SpecialIds, Stretches, int, np.ndarray], Placed]
    sentinels: Callable[[Mapping[str, Any]], int] = lambda parameters: 0
    roles: Callable[[Mapping[str, Any]], frozenset[str]] = lambda parameters: frozenset()
    least: int = 2
    whole: Callable[[Mapping[str, Any]], bool] = lambda parameters: False
    keeps_prefix: bool = False


EOS_AFTER_INPUTS = Parameter(
    "eos_after_inputs", False, "also end the inputs with eos, as T5 does", later=True
)


def roles_of_inputs(parameters: Mapping[str, Any]) -> frozenset[str]:
    """Return {"eos"} if the parameter eos_after_inputs is set, otherwise an empty set."""
    return frozenset(("eos",) if parameters[EOS_AFTER_INPUTS.name] else ())


# span_corruption


def span_counts(
    parameters: Mapping[str, Any], sentinels: int, n: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of noise tokens and the number of spans of each segment.

    For n ≥ 2 the numbers equal those from `objectives.span_corruption.span_counts`.

    Args:
        parameters: The parameters of the task.
        sentinels: Number of sentinels in the vocabulary.
        n: Number of tokens of each segment, int64[m].

    Returns:
        The numbers of noise tokens and of spans, int64[m] each.
    """
    noise = np.clip(np.rint(n * parameters["noise_density"]).astype(np.int64), 1, n - 1)
    spans = np.rint(noise / parameters["mean_span_length"]).astype(np.int64)
    most_spans = np.int64(sentinels - int(parameters["random_roll"]))
    limit = np.minimum(most_spans, np.minimum(noise, n - noise))
    return noise, np.maximum(np.minimum(spans, limit), 1)


class _Runs(NamedTuple):
    """The runs of segments in document order. Text runs and noise runs alternate."""

    length: np.ndarray  # int64[Σ per_segment]: number of tokens of each run
    per_segment: np.ndarray  # int64[m]: number of runs of each segment
    first_is_noise: np.ndarray  # int64[m]: 1 if the first run is noise


def span_slots(
    parameters: Mapping[str, Any],
    ids: SpecialIds,
    segments: Stretches,
    epoch: int,
    known_ids: np.ndarray,
) -> Placed:
    """Return the slots of tokens and sentinels in span_corruption segments.

    This is the `TokenLayout.place` of the objective.

    Args:
        parameters: The parameters of the task.
        ids: The special ids.
        segments: The bodies of the segments.
        epoch: The epoch.
        known_ids: Not used.

    Returns:
        The slots of the tokens and sentinels. The prefix of each body is the inputs: the text with
        a sentinel instead of each span, and then eos if eos_after_inputs is set.
    """
    key, n, first_slot = segments
    noise_tokens, spans = span_counts(parameters, len(ids.sentinels), n)
    runs = _draw_runs(key, n, noise_tokens, spans, epoch)
    if parameters["random_roll"]:
        runs = _rolled(key, n, noise_tokens, spans, runs.length, epoch)
    # For each run, count the earlier noise runs, noise tokens and text tokens of its segment.
    segment = owners(runs.per_segment)
    is_noise = (ranks(runs.per_segment) + runs.first_is_noise[segment]) & 1
    first_run = starts_of(runs.per_segment)
    noise_runs = np.add.reduceat(is_noise, first_run)
    number = _sum_before(is_noise, segment, first_run)
    noise_before = _sum_before(runs.length * is_noise, segment, first_run)
    text_before = _sum_before(runs.length * (1 - is_noise), segment, first_run)
    # Compute the first slot of each run. The sentinel of a noise run is both in the inputs and, in
    # the targets, before the run's tokens.
    eos_slots = int(parameters[EOS_AFTER_INPUTS.name])
    inputs = n - noise_tokens + noise_runs + eos_slots
    targets = first_slot + inputs
    input_slot = first_slot[segment] + text_before + number
    target_slot = targets[segment] + noise_before + number
    token = _consecutive(np.where(is_noise, target_slot + 1, input_slot), runs.length)
    noise = np.flatnonzero(is_noise)
    special = np.concatenate((input_slot[noise], target_slot[noise]))
    id = np.tile(ids.sentinels[number[noise]], 2)
    if eos_slots:
        special = np.concatenate((special, targets - 1))
        id = np.concatenate((id, np.full(len(n), ids.eos)))
    return Placed(token, special, id, inputs + noise_tokens + noise_runs, inputs)


def _consecutive(first_numbers: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Return `length` consecutive numbers from each first number on, joined, int64[Σ length]."""
    numbers = np.repeat(first_numbers - starts_of(length), length)
    numbers += np.arange(len(numbers))
    return numbers


def _sum_before(values: np.ndarray, segment: np.ndarray, first_run: np.ndarray) -> np.ndarray:
    """Return for each run the sum of `values` over all earlier runs of the same segment.

    `segment` has the segment of each run, and `first_run` has the first run of each segment.
    """
    total = starts_of(values)
    return total - total[first_run][segment]


def _draw_runs(
    key: np.ndarray, n: np.ndarray, noise_tokens: np.ndarray, spans: np.ndarray, epoch: int
) -> _Runs:
    """Draw the lengths of the runs: `spans` text runs and `spans` noise runs per segment."""
    text_purpose, noise_purpose = (
        (REDRAWN_TEXT_SPANS, REDRAWN_NOISE_SPANS) if epoch else (TEXT_SPANS, NOISE_SPANS)
    )
    length = np.empty(2 * int(spans.sum()), np.int64)
    length[::2] = _part_lengths(key, n - noise_tokens, spans, text_purpose, epoch)
    length[1::2] = _part_lengths(key, noise_tokens, spans, noise_purpose, epoch)
    return _Runs(length, 2 * spans, np.zeros(len(n), np.int64))


def _part_lengths(
    key: np.ndarray, total: np.ndarray, parts: np.ndarray, purpose: int, epoch: int
) -> np.ndarray:
    """Cut each total[i] into parts[i] parts of random length ≥ 1, and return the lengths.

    All ways to cut a total are equally likely. The cut points are distinct and drawn by Floyd's
    method (Bentley and Floyd 1987). Draw i takes a random cut point in 1 … j, where j = total −
    parts + 1 + i. If an earlier draw took the same cut point, draw i takes j instead.

    Returns:
        The lengths of the parts of all totals, joined, int64[Σ parts].
    """
    draws = parts - 1
    segment, i = owners(draws), ranks(draws)
    last_cut = (total - parts + 1)[segment] + i
    # Draw a number below each bound. Few numbers are rejected, and `integers` draws these again.
    bound = last_cut.astype(np.uint64)
    product = words_of(key, draws, purpose, "<u4", epoch).astype(np.uint64) * bound
    low = product & np.uint64(0xFFFFFFFF)
    cut = (product >> np.uint64(32)).astype(np.int64)
    rejected = np.flatnonzero(low < bound)
    rejected = rejected[low[rejected] < (np.uint64(1 << 32) % bound[rejected])]
    if len(rejected):
        cut[rejected] = randomness.integers(
            key[segment[rejected]], purpose, i[rejected], last_cut[rejected], epoch
        )
    # Use one numbering for the cut points of all segments. Find draws of a cut point that an
    # earlier draw has taken.
    size, begin = int(total.sum()), starts_of(total)
    cut, last_cut = begin[segment] + 1 + cut, begin[segment] + last_cut
    order, earliest = np.arange(len(cut)), np.empty(size + 1, np.int64)
    earliest[cut[::-1]] = order[::-1]
    is_taken = earliest[cut] != order
    # Such a draw takes its j (`last_cut`) instead. A later draw may have drawn the same number, so
    # that its cut point is now taken, too.
    newly_taken, is_moved_to = is_taken, np.zeros(size + 1, np.bool_)
    while newly_taken.any():
        is_moved_to[last_cut[newly_taken]] = True
        newly_taken = is_moved_to[cut] & ~is_taken
        is_taken = is_taken | newly_taken
    # The lengths are the distances between neighbouring cut points, including 0 and the total.
    is_bound = np.zeros(size + 1, np.bool_)
    is_bound[begin] = is_bound[size] = True
    is_bound[np.where(is_taken, last_cut, cut)] = True
    return np.diff(np.flatnonzero(is_bound))


def _rolled(
    key: np.ndarray,
    n: np.ndarray,
    noise_tokens: np.ndarray,
    spans: np.ndarray,
    lengths: np.ndarray,
    epoch: int,
) -> _Runs:
    """Rotate the runs of each segment by a random offset in 0 … n − 1, and return the new runs.

    Offsets below noise_tokens − spans cut a span in two, so that the segment needs one more
    sentinel. If epoch 0 cuts a span of a segment in two, all later epochs do. Otherwise, no epoch
    does. So the segment has the same number of slots in every epoch.
    """
    offset = randomness.integers(key, ROLL, 0, n)
    inside = noise_tokens - spans
    cuts_span = offset < inside
    remaining = np.where(cuts_span, offset, offset - inside)
    if epoch:
        kind_size = np.where(cuts_span, inside, n - inside)
        remaining = randomness.integers(key, REDRAWN_ROLL, 0, kind_size, epoch)
    # Find the run that is first after the rotation, and the number of its tokens to skip.
    runs = 2 * spans
    segment, is_noise = owners(runs), np.arange(len(lengths)) & 1
    offsets = np.where(cuts_span[segment], (lengths - 1) * is_noise, np.where(is_noise, 1, lengths))
    ends, first_run = np.cumsum(offsets), starts_of(runs)
    remaining = remaining + (ends - offsets)[first_run]
    run = np.searchsorted(ends, remaining, "right")
    skipped = remaining - (ends - offsets)[run] + cuts_span
    # Join the runs from this one on, then the runs before it, then the skipped tokens.
    count = runs + (skipped > 0)
    segment, turn = owners(count), ranks(count)
    number = run - first_run
    rolled = lengths[first_run[segment] + (number[segment] + turn) % runs[segment]]
    rolled[turn == 0] -= skipped
    rolled[turn == runs[segment]] = skipped[skipped > 0]
    return _Runs(rolled, count, number & 1)


SPAN_CORRUPTION = TokenLayout(
    "span_corruption",
    (
        Parameter(
            "noise_density",
            0.15,
            "fraction of the tokens that is noise",
            0.0,
            1.0,
            low_open=True,
            high_open=True,
        ),
        Parameter("mean_span_length", 3.0, "mean number of tokens per span", 1.0),
        Parameter(
            "random_roll",
            False,
            "rotate the mask, so that a segment may start with noise and end without",
        ),
        Parameter(
            "too_many_spans",
            "split",
            "if a segment needs more spans than there are sentinels: use shorter segments, or"
            " fewer, longer spans",
            choices=("split", "lower"),
        ),
        EOS_AFTER_INPUTS,
    ),
    span_slots,
    lambda parameters: 1 + int(parameters["random_roll"]),
    roles_of_inputs,
    keeps_prefix=True,
)


# prefix_lm


def pivot_slots(
    parameters: Mapping[str, Any],
    ids: SpecialIds,
    segments: Stretches,
    epoch: int,
    known_ids: np.ndarray,
) -> Placed:
    """Return the slots of tokens and special tokens in prefix_lm segments.

    This is the `TokenLayout.place` of the objective. The pivot, the number of tokens in the prefix,
    is uniform over 1 … n − 1. Depending on the parameters, eos ends the prefix, and a sentinel
    begins the continuation. Each of these two special tokens moves all later tokens by one slot.

    Args:
        parameters: The parameters of the task.
        ids: The special ids.
        segments: The bodies of the segments.
        epoch: The epoch.
        known_ids: Not used.

    Returns:
        The slots and prefixes.
    """
    key, n, first_slot = segments
    pivot = 1 + randomness.integers(key, REDRAWN_PIVOT if epoch else PIVOT, 0, n - 1, epoch)
    eos_slots = int(parameters[EOS_AFTER_INPUTS.name])
    sentinels = ids.sentinels[: int(parameters["sentinel"])]
    added_ids = np.array([*[ids.eos] * eos_slots, *sentinels], np.int64)
    added, place = len(added_ids), ranks(n)
    # Tokens from the pivot on are after the added special tokens.
    token = np.repeat(first_slot, n) + place + added * (place >= np.repeat(pivot, n))
    special = ((first_slot + pivot)[:, None] + np.arange(added)).reshape(-1)
    return Placed(token, special, np.tile(added_ids, len(n)), n + added, pivot + eos_slots)


PREFIX_LM = TokenLayout(
    "prefix_lm",
    (
        Parameter(
            "sentinel", False, "put the first sentinel between the prefix and its continuation"
        ),
        EOS_AFTER_INPUTS,
    ),
    pivot_slots,
    lambda parameters: int(parameters["sentinel"]),
    roles_of_inputs,
)


# fill_in_the_middle


def rates(parameters: Mapping[str, Any]) -> tuple[np.uint64, np.uint64]:
    """Return the parameters rate and spm_rate of fill_in_the_middle, in units of 2⁻³²."""
    rate, spm_rate = (np.uint64(int(parameters[name] * 2**32)) for name in ("rate", "spm_rate"))
    return rate, spm_rate


class _Middles(NamedTuple):
    """The bounds of the middles in m rearranged segments. Each array has the shape [m]."""

    begin: np.ndarray  # int64: first token of the middle
    end: np.ndarray  # int64: first token after the middle
    suffix_first: np.ndarray  # bool: True if the suffix comes first, with an empty prefix

    def special_slots(self, segments: Stretches) -> tuple[np.ndarray, np.ndarray]:
        """Return the slot of the suffix token and the slot of the middle token, int64[m] each.

        The suffix token is the special token before the suffix. The middle token is the special
        token before the middle.
        """
        suffix_slot = segments.first_slot + 1 + self.begin
        return suffix_slot, suffix_slot + 1 + segments.n - self.end


def cut_slots(
    parameters: Mapping[str, Any],
    ids: SpecialIds,
    segments: Stretches,
    epoch: int,
    known_ids: np.ndarray,
) -> Placed:
    """Return the slots of tokens and special tokens in fill_in_the_middle segments.

    This is the `TokenLayout.place` of the objective. The same segments are rearranged in every
    epoch. If the task is text-safe, epoch 0 finds the cuts by the suffix and middle tokens of the
    stored bodies. If these special tokens are not in valid slots of a body, the result has the id
    −1 for the body's suffix token.

    Args:
        parameters: The parameters of the task.
        ids: The special ids.
        segments: The bodies of the segments.
        epoch: The epoch.
        known_ids: The stored flat rows in epoch 0, the segments' tokens in later epochs.

    Returns:
        The slots, without prefixes.
    """
    rate, spm_rate = rates(parameters)
    # The stored epoch decides which segments are rearranged, so their length never changes.
    rearranged = np.flatnonzero(randomness.words(segments.key, CUT_POINTS, 0) < rate)
    bodies = Stretches(*(column[rearranged] for column in segments))
    middles = _draw_middles(bodies, spm_rate, epoch)
    fits = np.ones(len(rearranged), np.bool_)
    # A text-safe cut depends on the tokens. Later epochs know them, but epoch 0 must find the cuts
    # first.
    if parameters["text_safe"] and len(ids.continues):
        if epoch:
            first_token = starts_of(segments.n)[rearranged]
            begin, end = (
                _moved_back(known_ids, first_token, cut, bodies.n, ids.continues)
                for cut in middles[:2]
            )
            middles = middles._replace(begin=begin, end=end)
        else:
            middles, fits = _found_middles(ids, bodies, middles, known_ids)
    # The lengths of prefix, middle and suffix. A segment that is not rearranged has only a prefix.
    begin, end, _ = middles
    lengths = np.zeros((len(segments.n), 3), np.int64)
    lengths[:, 0] = segments.n
    lengths[rearranged] = np.stack((begin, end - begin, bodies.n - end), axis=1)
    suffix_slot, middle_slot = middles.special_slots(bodies)
    part_slot = np.repeat(segments.first_slot[:, None], 3, axis=1)
    part_slot[rearranged] = np.stack((bodies.first_slot, middle_slot, suffix_slot), axis=1) + 1
    token = _consecutive(part_slot.reshape(-1), lengths.reshape(-1))
    # One special token comes before each of the three parts.
    special = np.concatenate((bodies.first_slot, middle_slot, suffix_slot))
    id = np.repeat(np.array(ids.fim, np.int64), len(rearranged))
    id[2 * len(rearranged) :][~fits] = -1
    slots = segments.n.copy()
    slots[rearranged] += 3
    return Placed(token, special, id, slots, None)


def _draw_middles(bodies: Stretches, spm_rate: np.uint64, epoch: int) -> _Middles:
    """Draw two different cuts in 0 … n for each body, and whether the suffix comes first.

    All pairs of cuts are equally likely.
    """
    key, n, _ = bodies
    purpose = REDRAWN_CUT_POINTS if epoch else CUT_POINTS
    cut = randomness.integers(key, purpose, 4, n + 1, epoch)
    other_cut = randomness.integers(key, purpose, 8, n, epoch)
    other_cut += other_cut >= cut
    suffix_first = randomness.words(key, purpose, 1, epoch) < spm_rate
    begin = np.where(suffix_first, 0, np.minimum(cut, other_cut))
    return _Middles(begin, np.maximum(cut, other_cut), suffix_first)


def _moved_back(
    tokens: np.ndarray,
    first_token: np.ndarray,
    cut: np.ndarray,
    n: np.ndarray,
    continues: np.ndarray,
) -> np.ndarray:
    """Move each cut back to the start of a character, and return the new cuts, int64[m].

    Each segment has one cut in `cut`, int64[m]. Cut c is between the tokens c − 1 and c of its
    segment. `first_token` has the index of each segment's first token in `tokens`, int64[m].
    """
    cut = cut.copy()
    indices = np.flatnonzero((cut > 0) & (cut < n))
    while len(indices := indices[continues[tokens[first_token[indices] + cut[indices]]] != 0]):
        cut[indices] -= 1
        indices = indices[cut[indices] > 0]
    return cut


def _found_middles(
    ids: SpecialIds, bodies: Stretches, drawn: _Middles, rows: np.ndarray
) -> tuple[_Middles, np.ndarray]:
    """Return the middles of stored rows, and flags of the middles that were found, bool[m].

    When the rows were built, a drawn cut was moved back to the start of a character. So the stored
    cut is found by its special token. It fits if no character starts between the stored cut and the
    drawn cut. Most cuts were not moved, and they are checked all at once. The other cuts are
    searched segment by segment. If the text itself contains a special token, two cuts may fit. In
    this case, the cut that is nearer to the drawn cut is taken.
    """
    _, middle, suffix = ids.fim

    def fits_at(slot: np.ndarray, special_id: int, is_edge: np.ndarray) -> np.ndarray:
        """Return which slots have a special token before the start of a character, bool[m].

        The special token has the id `special_id`. Where `is_edge`, bool[m], is True, any token may
        follow the special token.
        """
        next_token = np.take(rows, slot + 1, mode="clip")
        is_start = np.take(ids.continues, next_token, mode="clip") == 0
        return (np.take(rows, slot, mode="clip") == special_id) & (is_edge | is_start)

    suffix_slot, middle_slot = drawn.special_slots(bodies)
    fits = fits_at(suffix_slot, suffix, drawn.end == bodies.n)
    fits &= fits_at(middle_slot, middle, drawn.begin == 0)
    begin, end = drawn.begin.copy(), drawn.end.copy()
    for i in np.flatnonzero(~fits).tolist():
        n, first_slot = int(bodies.n[i]), int(bodies.first_slot[i])
        if first_slot + n + 3 > len(rows):
            continue  # The segment would exceed the rows.
        body = rows[first_slot : first_slot + n + 3].tolist()
        cuts = _cuts_in(body, int(begin[i]), int(end[i]), bool(drawn.suffix_first[i]), ids)
        if cuts is not None:
            begin[i], end[i], fits[i] = *cuts, True
    return _Middles(begin, end, drawn.suffix_first), fits


def _cuts_in(
    body: list[int], drawn_begin: int, drawn_end: int, suffix_first: bool, ids: SpecialIds
) -> tuple[int, int] | None:
    """Return the two cuts (begin, end) of one stored body, or None if no cuts fit.

    Neither cut is after its drawn cut, `drawn_begin` or `drawn_end`. `body` has the body's stored
    tokens, with the three special tokens.
    """
    n = len(body) - 3
    _, middle, suffix = ids.fim
    for begin in range(drawn_begin, -1, -1):
        if body[1 + begin] != suffix:
            continue
        for end in range(drawn_end, begin - 1, -1):
            # Both cuts together determine the slot of the middle token.
            middle_slot = 2 + begin + n - end
            if body[middle_slot] != middle:
                continue
            prefix_tokens, suffix_tokens = body[1 : 1 + begin], body[2 + begin : middle_slot]
            tokens = prefix_tokens + body[middle_slot + 1 :] + suffix_tokens
            inside = np.take(ids.continues, tokens, mode="clip") != 0
            if (suffix_first or _stays(inside, begin, drawn_begin)) and _stays(
                inside, end, drawn_end
            ):
                return begin, end
    return None


def _stays(inside: np.ndarray, cut: int, drawn_cut: int) -> bool:
    """Return whether `_moved_back` moves `drawn_cut` to `cut`.

    `inside`, bool[n], is True for tokens of the segment that begin inside a character.
    """
    is_start = cut in (0, len(inside)) or not inside[cut]
    return is_start and (
        cut == drawn_cut
        or (drawn_cut < len(inside) and bool(inside[cut + 1 : drawn_cut + 1].all()))
    )


ROLES = ("fim_prefix", "fim_middle", "fim_suffix")
FILL_IN_THE_MIDDLE = TokenLayout(
    "fill_in_the_middle",
    (
        Parameter("rate", 0.5, "fraction of the segments that are rearranged", 0.0, 1.0),
        Parameter(
            "spm_rate", 0.5, "fraction of the rearranged segments with the suffix first", 0.0, 1.0
        ),
        Parameter("text_safe", True, "never cut inside a character of byte-level text"),
    ),
    cut_slots,
    roles=lambda parameters: frozenset(ROLES if parameters["rate"] > 0 else ()),
    least=1,
    whole=lambda parameters: parameters["rate"] > 0 and parameters["text_safe"],
)

LAYOUTS = {layout.name: layout for layout in (SPAN_CORRUPTION, PREFIX_LM, FILL_IN_THE_MIDDLE)}
