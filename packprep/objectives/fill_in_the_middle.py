"""fill_in_the_middle: two cuts make prefix, middle and suffix; the middle is moved to the end.

    tokens       10  11  12  13  14  15      cuts 2, 4; PRE 90, MID 91, SUF 92
    slots (psm)  90  10  11  92  14  15  91  12  13
    slots (spm)  90  92  14  15  91  10  11  12  13
    loss_mask     1   1   1   1   1   1   1   1   0
    prefix 0

Bavarian et al. 2022: applied to a share `rate` of the segments, a share `spm_rate` of those suffix
first; the others stay as they are. The cuts are two different ones of 0 … n, uniform. With
text_safe a cut that falls inside a character of byte-level text moves back to the character's
begin.
"""

import numpy as np

from packprep.dataset.epochs.token_slots import FILL_IN_THE_MIDDLE, rates
from packprep.kernel import integer, kernel, read_only, word
from packprep.objectives.objective import Bodies, BodySlots, Objective, Task
from packprep.randomness import CUT_POINTS, REDRAWN_CUT_POINTS


@kernel
def _applied(key, rate, out):
    """Whether each segment is rearranged: word 0 of CUT_POINTS < rate (in 2⁻³²)."""
    for i in range(key.shape[0]):
        out[i] = word(key[i], CUT_POINTS, 0, 0, 0) < rate


@kernel(inline=True)
def _back(tokens, begin, cut, n, continues):
    """The cut, moved back to the begin of a character."""
    if cut < n:
        while cut > 0 and continues.shape[0] > 0 and continues[tokens[begin + cut]]:
            cut -= 1
    return cut


@kernel(inline=True)
def _cuts(key, n, spm_rate, epoch):
    """Two different cuts, ascending, uniform over the pairs of 0 … n, and whether the suffix comes
    first."""
    purpose = CUT_POINTS if epoch == 0 else REDRAWN_CUT_POINTS
    a, b = integer(key, purpose, 4, n + 1, epoch), integer(key, purpose, 8, n, epoch)
    if b >= a:
        b += 1
    return min(a, b), max(a, b), word(key, purpose, 1, epoch, 0) < spm_rate


@kernel
def _render(tokens, begin, n, key, epoch, at, rate, spm_rate, continues, pre, mid, suf, rows):
    for i in range(n.shape[0]):
        s, t, k = begin[i], at[i], n[i]
        if word(key[i], CUT_POINTS, 0, 0, 0) >= rate:
            for j in range(k):
                rows[t + j] = tokens[s + j]
            continue
        a, b, suffix_first = _cuts(key[i], k, spm_rate, epoch)
        a, b = _back(tokens, s, a, k, continues), _back(tokens, s, b, k, continues)
        if suffix_first:
            a = np.int64(0)  # an empty prefix: the middle begins the text
        rows[t] = pre
        t += 1
        for j in range(a):
            rows[t] = tokens[s + j]
            t += 1
        rows[t] = suf
        t += 1
        for j in range(b, k):
            rows[t] = tokens[s + j]
            t += 1
        rows[t] = mid
        t += 1
        for j in range(a, b):
            rows[t] = tokens[s + j]
            t += 1


@kernel(inline=True)
def _token(rows, t, a, b, k, i):
    """Token i of a body of k that stands at t, the cuts at a and b."""
    if i < a:
        return rows[t + 1 + i]
    return rows[t + 3 + k - b + i] if i < b else rows[t + 2 + a + i - b]


@kernel
def _stays(rows, t, a, b, k, cut, drawn, continues):
    """Whether a cut that was drawn is moved back to `cut`, one of a and b."""
    if cut == drawn and (cut == 0 or cut == k or continues.shape[0] == 0):
        return True
    if cut != drawn and (drawn == k or continues.shape[0] == 0):
        return False
    for i in range(cut, drawn + 1):
        token = np.int64(_token(rows, t, a, b, k, i))
        inside = 0 <= token < continues.shape[0] and continues[token] != 0
        if i > 0 and inside != (i > cut):
            return False
    return True


@kernel
def _restore(rows, begin, n, key, epoch, at, rate, spm_rate, continues, pre, mid, suf, out, fits):
    """text_safe moves cuts back alone: the first places at or below the drawn ones where role
    tokens stand, and between which no character begins."""
    for i in range(n.shape[0]):
        s, t, k = begin[i], at[i], n[i]
        fits[i] = True
        if word(key[i], CUT_POINTS, 0, 0, 0) >= rate:
            for j in range(k):
                out[s + j] = rows[t + j]
            continue
        drawn_a, drawn_b, suffix_first = _cuts(key[i], k, spm_rate, epoch)
        found = False
        a = np.int64(0) if suffix_first else drawn_a
        while a >= 0 and not found and rows[t] == pre:
            b = drawn_b
            while b >= a and not found and rows[t + 1 + a] == suf:
                found = (
                    rows[t + 2 + a + k - b] == mid
                    and (suffix_first or _stays(rows, t, a, b, k, a, drawn_a, continues))
                    and _stays(rows, t, a, b, k, b, drawn_b, continues)
                )
                b -= not found
            a -= not found
        fits[i] = found
        if found:
            for j in range(k):
                out[s + j] = _token(rows, t, a, b, k, j)


def body_slots(task: Task, bodies: Bodies) -> np.ndarray:
    """n, and three role tokens where it is applied."""
    out = np.empty(bodies.n.shape, np.bool_)
    _applied(bodies.key, rates(task.parameters)[0], out)
    return bodies.n + 3 * out


def most_body_slots(task: Task, n: int) -> int:
    """n + 3, unless it is never applied."""
    return n + (3 if task.parameters["rate"] > 0 else 0)


def _continues(task: Task) -> np.ndarray:
    return read_only(task.ids.continues if task.parameters["text_safe"] else np.zeros(0, np.uint8))


def render(task: Task, columns: BodySlots, tokens: np.ndarray, rows: np.ndarray) -> None:
    """Writes the parts in their order, with the role tokens."""
    n, key, _, epoch = columns.bodies
    chance = *rates(task.parameters), _continues(task)
    _render(tokens, columns.begin, n, key, epoch, columns.at, *chance, *task.ids.fim, rows)


def restore(task: Task, columns: BodySlots, rows: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Puts the middle back; a body fits if the role tokens stand where they belong."""
    fits = np.empty(columns.begin.shape, np.bool_)
    n, key, _, epoch = columns.bodies
    chance = *rates(task.parameters), _continues(task)
    _restore(rows, columns.begin, n, key, epoch, columns.at, *chance, *task.ids.fim, out, fits)
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
