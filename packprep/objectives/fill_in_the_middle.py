"""fill_in_the_middle: two cuts make prefix, middle and suffix; the middle is moved to the end.

    tokens       10  11  12  13  14  15      cuts 2, 4; PRE 90, MID 91, SUF 92
    slots (psm)  90  10  11  92  14  15  91  12  13
    slots (spm)  90  92  14  15  91  10  11  12  13
    loss_mask     1   1   1   1   1   1   1   1   0
    prefix 0

Bavarian et al. 2022 rearrange a share `rate` of the segments and leave the others unchanged. A
share `spm_rate` of the rearranged segments starts with the suffix (spm). The two cuts differ and
are uniform over 0 … n. With text_safe, a cut inside a character of byte-level text moves back to
the start of the character.
"""

from typing import Any, NamedTuple

import numpy as np

from packprep.dataset.epochs.token_slots import FILL_IN_THE_MIDDLE, rates
from packprep.kernel import copy_items, integer, kernel, read_only, word
from packprep.objectives.objective import Bodies, BodySlots, Objective, Task
from packprep.randomness import CUT_POINTS, REDRAWN_CUT_POINTS


class _Cutting(NamedTuple):
    """A task's parameters for cutting segments, and the ids that the task writes."""

    rate: np.uint64  # share of the segments that are rearranged, in units of 2⁻³²
    spm_rate: np.uint64  # share of those that start with the suffix, in units of 2⁻³²
    continues: np.ndarray  # uint8[vocab_size]: 1 for a token that begins inside a character
    prefix_id: int
    middle_id: int
    suffix_id: int


class _Body(NamedTuple):
    """A rearranged body in the flat rows. All numbers are int64."""

    first_slot: Any
    n: Any  # number of tokens
    begin: Any  # first token of the middle
    end: Any  # first token after the middle


@kernel(inline=True)
def _is_rearranged(key, rate):
    """Return whether a segment is rearranged: its random word 0 of CUT_POINTS is below `rate`."""
    return word(key, CUT_POINTS, 0, 0, 0) < rate


@kernel
def _mark_rearranged(key, rate, rearranged):
    """Write to `rearranged` whether each segment is rearranged."""
    for i in range(key.shape[0]):
        rearranged[i] = _is_rearranged(key[i], rate)


@kernel(inline=True)
def _moved_back(tokens, begin, cut, n, continues):
    """Return `cut`. If it is inside a character, return the start of this character instead."""
    if cut < n:
        while cut > 0 and continues.shape[0] > 0 and continues[tokens[begin + cut]]:
            cut -= 1
    return cut


@kernel(inline=True)
def _cuts(key, n, spm_rate, epoch):
    """Return two different cuts in ascending order, and whether the suffix comes first.

    The pair is uniform over all pairs of different numbers from 0 to n.
    """
    purpose = CUT_POINTS if epoch == 0 else REDRAWN_CUT_POINTS
    cut, other_cut = integer(key, purpose, 4, n + 1, epoch), integer(key, purpose, 8, n, epoch)
    # Draw one of the n other numbers and skip the first cut, so that no pair is drawn again.
    if other_cut >= cut:
        other_cut += 1
    suffix_first = word(key, purpose, 1, epoch, 0) < spm_rate
    return min(cut, other_cut), max(cut, other_cut), suffix_first


@kernel
def _render(tokens, columns, cutting, rows):
    """Write the bodies of segments to the flat rows."""
    bodies, continues = columns.bodies, cutting.continues
    for i in range(bodies.n.shape[0]):
        first_token, slot, n = columns.begin[i], columns.at[i], bodies.n[i]
        if not _is_rearranged(bodies.key[i], cutting.rate):
            copy_items(rows, slot, tokens, first_token, n)
            continue
        begin, end, suffix_first = _cuts(bodies.key[i], n, cutting.spm_rate, bodies.epoch)
        begin = _moved_back(tokens, first_token, begin, n, continues)
        end = _moved_back(tokens, first_token, end, n, continues)
        if suffix_first:
            begin = np.int64(0)  # The prefix is empty, so the middle begins the text.
        # Prefix, suffix and middle, each after its special token.
        rows[slot] = cutting.prefix_id
        copy_items(rows, slot + 1, tokens, first_token, begin)
        slot += 1 + begin
        rows[slot] = cutting.suffix_id
        copy_items(rows, slot + 1, tokens, first_token + end, n - end)
        slot += 1 + n - end
        rows[slot] = cutting.middle_id
        copy_items(rows, slot + 1, tokens, first_token + begin, end - begin)


@kernel(inline=True)
def _token(rows, body, i):
    """Return token i of the original order, read from the rearranged body."""
    slot, n, begin, end = body
    if i < begin:
        return rows[slot + 1 + i]
    return rows[slot + 3 + n - end + i] if i < end else rows[slot + 2 + begin + i - end]


@kernel
def _stays(rows, body, cut, drawn_cut, continues):
    """Return whether text_safe would move the drawn cut `drawn_cut` back to `cut`.

    Return True also if both are equal and `drawn_cut` need not move. `cut` is the start or the end
    of the middle in `body`.
    """
    if cut == drawn_cut and (cut == 0 or cut == body.n or continues.shape[0] == 0):
        return True
    if cut != drawn_cut and (drawn_cut == body.n or continues.shape[0] == 0):
        return False
    # The token at `cut` must start a character, and each later token up to `drawn_cut` must
    # continue it.
    for i in range(cut, drawn_cut + 1):
        token = np.int64(_token(rows, body, i))
        is_inside = 0 <= token < continues.shape[0] and continues[token] != 0
        if i > 0 and is_inside != (i > cut):
            return False
    return True


@kernel
def _restore(rows, columns, cutting, out, fits):
    """Read the tokens of bodies from the flat rows.

    The cuts of a body are not stored. Because text_safe only moves cuts back, they are searched
    backwards from the drawn cuts. A pair of cuts is right if the slots at these cuts have the
    special tokens, and text_safe would move the drawn cuts to this pair. The first such pair is
    used.
    """
    bodies, continues = columns.bodies, cutting.continues
    for i in range(bodies.n.shape[0]):
        first_token, slot, n = columns.begin[i], columns.at[i], bodies.n[i]
        fits[i] = True
        if not _is_rearranged(bodies.key[i], cutting.rate):
            for j in range(n):
                out[first_token + j] = rows[slot + j]
            continue
        # Search backwards from the drawn cuts.
        drawn_begin, drawn_end, suffix_first = _cuts(
            bodies.key[i], n, cutting.spm_rate, bodies.epoch
        )
        is_found = False
        begin, end = np.int64(0) if suffix_first else drawn_begin, drawn_end
        while begin >= 0 and not is_found and rows[slot] == cutting.prefix_id:
            end = drawn_end
            while end >= begin and not is_found and rows[slot + 1 + begin] == cutting.suffix_id:
                body = _Body(slot, n, begin, end)
                is_found = (
                    rows[slot + 2 + begin + n - end] == cutting.middle_id
                    and (suffix_first or _stays(rows, body, begin, drawn_begin, continues))
                    and _stays(rows, body, end, drawn_end, continues)
                )
                end -= not is_found
            begin -= not is_found
        # Put the tokens back in order.
        fits[i] = is_found
        if is_found:
            for j in range(n):
                out[first_token + j] = _token(rows, _Body(slot, n, begin, end), j)


def body_slots(task: Task, bodies: Bodies) -> np.ndarray:
    """Return the number of slots of each body: n, or n + 3 if the body is rearranged.

    Args:
        task: The task.
        bodies: The bodies of m segments.

    Returns:
        int64[m].
    """
    rearranged = np.empty(bodies.n.shape, np.bool_)
    _mark_rearranged(bodies.key, rates(task.parameters)[0], rearranged)
    return bodies.n + 3 * rearranged


def most_body_slots(task: Task, n: int) -> int:
    """Return the most slots of a body: n + 3, or n if the parameter `rate` is 0.

    Args:
        task: The task.
        n: Tokens of a body.

    Returns:
        The number of slots.
    """
    return n + (3 if task.parameters["rate"] > 0 else 0)


def _cutting_of(task: Task) -> _Cutting:
    """Return the `_Cutting` of a task."""
    continues = task.ids.continues if task.parameters["text_safe"] else np.zeros(0, np.uint8)
    return _Cutting(*rates(task.parameters), read_only(continues), *task.ids.fim)


def render(task: Task, columns: BodySlots, tokens: np.ndarray, rows: np.ndarray) -> None:
    """Write the bodies of segments to the rows.

    The body of a rearranged segment has its parts in the new order, each after its special token.
    The body of any other segment is a copy of its tokens.

    Args:
        task: The task.
        columns: The segments.
        tokens: int[Σ n], the flat tokens.
        rows: The flat rows, changed in place.
    """
    _render(tokens, columns, _cutting_of(task), rows)


def restore(task: Task, columns: BodySlots, rows: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Read the tokens of segments from their bodies, in the original order.

    Args:
        task: The task.
        columns: The segments.
        rows: The flat rows.
        out: The flat tokens, changed in place.

    Returns:
        bool[m], whether a body has its special tokens at the right slots.
    """
    fits = np.empty(columns.begin.shape, np.bool_)
    _restore(read_only(rows), columns, _cutting_of(task), out, fits)
    return fits


OBJECTIVE = Objective(
    name="fill_in_the_middle",
    attention="causal",
    parameters=FILL_IN_THE_MIDDLE.parameters,
    body_slots=body_slots,
    most_body_slots=most_body_slots,
    render=render,
    restore=restore,
    added="fim",
    roles=FILL_IN_THE_MIDDLE.roles,
)
