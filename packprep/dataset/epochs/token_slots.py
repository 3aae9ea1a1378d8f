"""Where next-token objectives put a segment's tokens in an epoch, by its key: redraw moves them
there, and their inverse is free.

    epoch 0      10 11 <a> 14 15 <b>  <a> 12 13 <b> 16       as stored
    tokens       10 11 12 13 14 15 16                         from their slots in epoch 0, never by looking for sentinels
    epoch 3      10 <a> 12 13 14 <b>  <a> 11 <b> 15 16       as many spans and tokens of noise, so as many slots

What is written for epoch 0 is what the kernels of `objectives/` draw; later epochs draw under
purposes of their own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from packprep import randomness
from packprep.dataset.boundaries import ranks
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
    """What stands where in segments' bodies; slots are flat.

    token     int64[Σ n]: the slots of the segments' tokens, in document order
    special   int64[k]: the slots of sentinels and role tokens
    id        int64[k]: which id stands there; −1: none that is known
    slots     int64[m]: how many slots each body takes
    prefix    int64[m]: how many of these are of the prefix; None: none ever is
    """

    token: np.ndarray
    special: np.ndarray
    id: np.ndarray
    slots: np.ndarray
    prefix: np.ndarray | None


class Stretches(NamedTuple):
    """Segments of one task, one array a column, [m] each."""

    key: np.ndarray  # uint64
    n: np.ndarray  # int64: tokens
    first_slot: np.ndarray  # int64: of the body, in the flat rows


class SpecialIds(NamedTuple):
    """The ids that next-token objectives write, and which tokens they cut before."""

    sentinels: np.ndarray  # int64[k]
    fim: tuple[int, int, int]  # prefix, middle and suffix
    # uint8[vocabulary]: 1 where a token begins inside a character; empty: none does
    continues: np.ndarray
    eos: int = -1  # none


SPECIAL = "the special tokens that its key puts there"
"""What a damaged segment has not."""


def misfit(room: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """bool[m]: whether bodies of so many slots leave other than no slot or that of eos."""
    return (room < slots) | (room > slots + 1)


@dataclass(frozen=True)
class TokenLayout:
    """Where one next-token objective puts tokens.

    name         the objective's.
    parameters   the keys of its tasks in `[[tasks]]`.
    place        (parameters, ids SpecialIds, segments Stretches, epoch, known) → Placed. known: of epoch 0 the flat rows as
                 they are stored; of others the segments' tokens, [Σ n], in document order.
    sentinels    (parameters) → the least number of sentinels that it can do with.
    roles        (parameters) → the roles that must be in the vocabulary.
    least        the fewest tokens of a segment.
    whole        (parameters) → whether it keeps characters whole, for which SpecialIds.continues is needed.
    keeps_prefix   whether the prefix of a segment is as long in every epoch.
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
    "eos_after_inputs", False, "end the inputs, too, with eos, as T5 does", later=True
)


def roles_of_inputs(parameters: Mapping[str, Any]) -> frozenset[str]:
    """The roles that stand in the inputs: eos, where a parameter ends them with it."""
    return frozenset(("eos",) if parameters[EOS_AFTER_INPUTS.name] else ())


# span_corruption


def span_counts(
    parameters: Mapping[str, Any], sentinels: int, n: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(n_noise, n_spans), int64[m] each, as `objectives.span_corruption.span_counts` of each n, 2
    or more."""
    noise = np.clip(np.rint(n * parameters["noise_density"]).astype(np.int64), 1, n - 1)
    spans = np.rint(noise / parameters["mean_span_length"]).astype(np.int64)
    most = np.int64(sentinels - int(parameters["random_roll"]))
    return noise, np.maximum(np.minimum(np.minimum(spans, most), np.minimum(noise, n - noise)), 1)


def span_slots(
    parameters: Mapping[str, Any],
    ids: SpecialIds,
    segments: Stretches,
    epoch: int,
    known: np.ndarray,
) -> Placed:
    """Where span_corruption puts tokens and sentinels, as `TokenLayout.place`."""
    key, n, first_slot = segments
    n_noise, n_spans = span_counts(parameters, len(ids.sentinels), n)
    purposes = (
        (TEXT_SPANS, NOISE_SPANS) if epoch == 0 else (REDRAWN_TEXT_SPANS, REDRAWN_NOISE_SPANS)
    )
    lengths = np.empty(2 * int(n_spans.sum()), np.int64)  # of runs, alternately text and noise
    for which, (total, purpose) in enumerate(zip((n - n_noise, n_noise), purposes, strict=True)):
        lengths[which::2] = _part_lengths(key, total, n_spans, purpose, epoch)
    count, first = 2 * n_spans, np.zeros(len(n), np.int64)
    if parameters["random_roll"]:
        lengths, count, first = _rolled(key, n, n_noise, n_spans, lengths, epoch)
    segment = np.repeat(np.arange(len(n)), count)
    is_noise = (ranks(count) + first[segment]) & 1
    begin = np.cumsum(count) - count  # each segment's first run
    noise_runs = np.add.reduceat(is_noise, begin)
    number = _before(is_noise, segment, begin)
    of_noise, of_text = (
        _before(lengths * is_noise, segment, begin),
        _before(lengths * (1 - is_noise), segment, begin),
    )
    inputs = n - n_noise + noise_runs + int(parameters[EOS_AFTER_INPUTS.name])
    targets = first_slot + inputs
    in_inputs, in_targets = (
        first_slot[segment] + of_text + number,
        targets[segment] + of_noise + number,
    )
    at = np.where(is_noise, in_targets + 1, in_inputs)
    token = np.repeat(at - (np.cumsum(lengths) - lengths), lengths)
    token += np.arange(len(token))
    noise = np.flatnonzero(is_noise)
    special = np.concatenate((in_inputs[noise], in_targets[noise]))
    id = np.tile(ids.sentinels[number[noise]], 2)
    if parameters[EOS_AFTER_INPUTS.name]:
        special, id = (
            np.concatenate((special, targets - 1)),
            np.concatenate((id, np.full(len(n), ids.eos))),
        )
    return Placed(token, special, id, inputs + n_noise + noise_runs, inputs)


def _before(values: np.ndarray, segment: np.ndarray, begin: np.ndarray) -> np.ndarray:
    """The sum of the values before each in its segment. begin: each segment's first."""
    total = np.cumsum(values) - values
    return total - total[begin][segment]


def _part_lengths(
    key: np.ndarray, total: np.ndarray, parts: np.ndarray, purpose: int, epoch: int
) -> np.ndarray:
    """int64[Σ parts]: the lengths of the non-empty parts into which each total is cut, uniformly
    over all ways.

    Floyd's sampling of distinct cut points (Bentley and Floyd 1987): draw i takes a cut of 1 … j, j
    = total − parts + 1 + i, and j itself where that one is taken.
    """
    draws = parts - 1
    segment, i = np.repeat(np.arange(len(draws)), draws), ranks(draws)
    last = (total - parts + 1)[segment] + i
    bound = last.astype(np.uint64)
    product = words_of(key, draws, purpose, "<u4", epoch).astype(np.uint64) * bound
    low = product & np.uint64(0xFFFFFFFF)
    cut = (product >> np.uint64(32)).astype(np.int64)
    again = np.flatnonzero(low < bound)
    again = again[low[again] < (np.uint64(1 << 32) % bound[again])]
    if len(again):
        cut[again] = randomness.integers(key[segment[again]], purpose, i[again], last[again], epoch)
    size, begin = int(total.sum()), np.cumsum(total) - total
    cut, last = begin[segment] + 1 + cut, begin[segment] + last
    order, earliest = np.arange(len(cut)), np.empty(size + 1, np.int64)
    earliest[cut[::-1]] = order[::-1]
    taken = earliest[cut] != order  # by an earlier draw of the same cut
    new, moved = taken, np.zeros(size + 1, np.bool_)
    while new.any():  # or by an earlier one that gave way to it
        moved[last[new]] = True
        new = moved[cut] & ~taken
        taken = taken | new
    bounds = np.zeros(size + 1, np.bool_)
    bounds[begin] = bounds[size] = True
    bounds[np.where(taken, last, cut)] = True
    return np.diff(np.flatnonzero(bounds))


def _rolled(
    key: np.ndarray,
    n: np.ndarray,
    n_noise: np.ndarray,
    n_spans: np.ndarray,
    lengths: np.ndarray,
    epoch: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(run lengths, runs int64[m], 1 where the first run is noise int64[m]) after the rotation by
    an offset of 0 … n − 1.

    Of the n offsets the first n_noise − n_spans cut a span. Which kind it is stays that of epoch 0,
    so that the length does; in later epochs the offset is uniform within its kind.
    """
    offset = randomness.integers(key, ROLL, 0, n)
    inside = n_noise - n_spans
    cuts = offset < inside
    left = np.where(cuts, offset, offset - inside)
    if epoch:
        left = randomness.integers(key, REDRAWN_ROLL, 0, np.where(cuts, inside, n - inside), epoch)
    runs = 2 * n_spans
    segment, is_noise = np.repeat(np.arange(len(n)), runs), np.arange(len(lengths)) & 1
    offsets = np.where(cuts[segment], (lengths - 1) * is_noise, np.where(is_noise, 1, lengths))
    ends, begin = np.cumsum(offsets), np.cumsum(runs) - runs
    left = left + (ends - offsets)[begin]
    run = np.searchsorted(ends, left, "right")  # in which the rotation begins
    skip = left - (ends - offsets)[run] + cuts  # how much of it lies before
    count = runs + (skip > 0)
    segment, turn = np.repeat(np.arange(len(n)), count), ranks(count)
    rolled = lengths[begin[segment] + ((run - begin)[segment] + turn) % runs[segment]]
    rolled[turn == 0] -= skip
    rolled[turn == runs[segment]] = skip[skip > 0]
    return rolled, count, (run - begin) & 1


SPAN_CORRUPTION = TokenLayout(
    "span_corruption",
    (
        Parameter(
            "noise_density",
            0.15,
            "share of the tokens that is noise",
            0.0,
            1.0,
            low_open=True,
            high_open=True,
        ),
        Parameter("mean_span_length", 3.0, "mean tokens of a span", 1.0),
        Parameter(
            "random_roll",
            False,
            "rotate the mask, so that a segment may begin with noise and end without",
        ),
        Parameter(
            "too_many_spans",
            "split",
            "where a segment would need more spans than there are sentinels: shorter segments, or"
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
    known: np.ndarray,
) -> Placed:
    """Where prefix_lm puts tokens and the sentinel, as `TokenLayout.place`: at the pivot, uniform over
    1 … n − 1, eos may end the prefix and a sentinel begin the continuation; each moves what follows
    by a slot."""
    key, n, first_slot = segments
    pivot = 1 + randomness.integers(key, REDRAWN_PIVOT if epoch else PIVOT, 0, n - 1, epoch)
    ended = int(parameters[EOS_AFTER_INPUTS.name])
    added = np.array([*[ids.eos] * ended, *ids.sentinels[: int(parameters["sentinel"])]], np.int64)
    place = ranks(n)
    token = np.repeat(first_slot, n) + place + len(added) * (place >= np.repeat(pivot, n))
    special = (first_slot + pivot)[:, None] + np.arange(len(added))
    return Placed(token, special.reshape(-1), np.tile(added, len(n)), n + len(added), pivot + ended)


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
    """rate and spm_rate in 2⁻³²."""
    return np.uint64(int(parameters["rate"] * 2**32)), np.uint64(
        int(parameters["spm_rate"] * 2**32)
    )


def cut_slots(
    parameters: Mapping[str, Any],
    ids: SpecialIds,
    segments: Stretches,
    epoch: int,
    known: np.ndarray,
) -> Placed:
    """Where fill_in_the_middle puts tokens and role tokens, as `TokenLayout.place`. Which segments are
    rearranged stays; a segment whose roles are not where its cuts can be has −1 for its suffix
    token."""
    rate, spm_rate = rates(parameters)
    moved = np.flatnonzero(randomness.words(segments.key, CUT_POINTS, 0) < rate)
    own = Stretches(*(column[moved] for column in segments))
    purpose = REDRAWN_CUT_POINTS if epoch else CUT_POINTS
    one = randomness.integers(own.key, purpose, 4, own.n + 1, epoch)
    other = randomness.integers(own.key, purpose, 8, own.n, epoch)
    other += other >= one
    begin, end = np.minimum(one, other), np.maximum(one, other)  # of the middle
    suffix_first = randomness.words(own.key, purpose, 1, epoch) < spm_rate
    fits = np.ones(len(moved), np.bool_)
    whole = parameters["text_safe"] and len(ids.continues) > 0
    if whole and epoch:
        first = (np.cumsum(segments.n) - segments.n)[moved]
        begin, end = (_moved_back(known, first, cut, own.n, ids.continues) for cut in (begin, end))
    begin = np.where(suffix_first, 0, begin)
    if whole and not epoch:
        begin, end, fits = _found_cuts(ids, own, begin, end, suffix_first, known)
    lengths = np.zeros((len(segments.n), 3), np.int64)  # of prefix, middle and suffix
    lengths[:, 0] = segments.n
    lengths[moved] = np.stack((begin, end - begin, own.n - end), axis=1)
    at = np.repeat(segments.first_slot[:, None], 3, axis=1)
    at_suffix = own.first_slot + 1 + begin
    at_middle = at_suffix + 1 + own.n - end
    at[moved] = np.stack((own.first_slot, at_middle, at_suffix), axis=1) + 1
    part = lengths.reshape(-1)
    token = np.repeat(at.reshape(-1) - (np.cumsum(part) - part), part)
    token += np.arange(len(token))
    special = np.concatenate((own.first_slot, at_middle, at_suffix))
    id = np.repeat(np.array(ids.fim, np.int64), len(moved))
    id[2 * len(moved) :][~fits] = -1
    slots = segments.n.copy()
    slots[moved] += 3
    return Placed(token, special, id, slots, None)


def _moved_back(
    tokens: np.ndarray, first: np.ndarray, cut: np.ndarray, n: np.ndarray, continues: np.ndarray
) -> np.ndarray:
    """The cuts, moved back to the begins of characters. first: where each segment's tokens begin in
    `tokens`."""
    cut = cut.copy()
    left = np.flatnonzero((cut > 0) & (cut < n))
    while len(left := left[continues[tokens[first[left] + cut[left]]] != 0]):
        cut[left] -= 1
        left = left[cut[left] > 0]
    return cut


def _found_cuts(
    ids: SpecialIds,
    segments: Stretches,
    begin: np.ndarray,
    end: np.ndarray,
    suffix_first: np.ndarray,
    rows: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(begin, end, whether they were found) of the middles as rows hold them, the cuts moved back
    from where they were drawn: roles stand there, and of the characters that lie between where a
    cut was drawn and where it is, none begins.

    Nearly all cuts stay, and are looked at together; the others one by one. Where a text has a role
    token of its own right behind a cut that was moved, two places may fit: the nearer one is taken.
    """
    _, middle, suffix = ids.fim
    at_suffix = segments.first_slot + 1 + begin
    at_middle = at_suffix + 1 + segments.n - end
    here, behind = (np.take(rows, at, mode="clip") for at in (at_suffix, at_suffix + 1))
    fits = (here == suffix) & (
        (end == segments.n) | (np.take(ids.continues, behind, mode="clip") == 0)
    )
    here, behind = (np.take(rows, at, mode="clip") for at in (at_middle, at_middle + 1))
    fits &= (here == middle) & ((begin == 0) | (np.take(ids.continues, behind, mode="clip") == 0))
    begin, end = begin.copy(), end.copy()
    for i in np.flatnonzero(~fits).tolist():
        n, first = int(segments.n[i]), int(segments.first_slot[i])
        if first + n + 3 > len(rows):
            continue  # fewer slots than the segment takes
        body = rows[first : first + n + 3].tolist()
        found = _cuts_in(body, int(begin[i]), int(end[i]), bool(suffix_first[i]), ids)
        if found is not None:
            begin[i], end[i], fits[i] = *found, True
    return begin, end, fits


def _cuts_in(
    body: list[int], begin: int, end: int, suffix_first: bool, ids: SpecialIds
) -> tuple[int, int] | None:
    """The cuts of one body, at or below those that were drawn; None where there are none."""
    n = len(body) - 3
    _, middle, suffix = ids.fim
    for a in range(begin, -1, -1):
        if body[1 + a] != suffix:
            continue
        for b in range(end, a - 1, -1):
            if body[2 + a + n - b] != middle:
                continue
            tokens = body[1 : 1 + a] + body[3 + a + n - b :] + body[2 + a : 2 + a + n - b]
            inside = np.take(ids.continues, tokens, mode="clip") != 0
            if (suffix_first or _stays(inside, a, begin)) and _stays(inside, b, end):
                return a, b
    return None


def _stays(inside: np.ndarray, cut: int, drawn: int) -> bool:
    """Whether a drawn cut is moved back to `cut`. inside: bool[n], the tokens that begin inside a
    character."""
    begins = cut in (0, len(inside)) or not inside[cut]
    return begins and (
        cut == drawn or (drawn < len(inside) and bool(inside[cut + 1 : drawn + 1].all()))
    )


ROLES = ("fim_prefix", "fim_middle", "fim_suffix")
FILL_IN_THE_MIDDLE = TokenLayout(
    "fill_in_the_middle",
    (
        Parameter("rate", 0.5, "share of the segments that are rearranged", 0.0, 1.0),
        Parameter("spm_rate", 0.5, "share of those that put the suffix first", 0.0, 1.0),
        Parameter("text_safe", True, "never cut inside a character of byte-level text"),
    ),
    cut_slots,
    roles=lambda parameters: frozenset(ROLES if parameters["rate"] > 0 else ()),
    least=1,
    whole=lambda parameters: parameters["rate"] > 0 and parameters["text_safe"],
)

LAYOUTS = {layout.name: layout for layout in (SPAN_CORRUPTION, PREFIX_LM, FILL_IN_THE_MIDDLE)}
