"""fill_in_the_middle: two cuts make prefix, middle and suffix; the middle is moved to the end.

    tokens       10  11  12  13  14  15      cuts 2, 4; PRE 90, MID 91, SUF 92
    slots (psm)  90  10  11  92  14  15  91  12  13
    slots (spm)  90  92  14  15  91  10  11  12  13
    loss_mask     1   1   1   1   1   1   1   1   0
    prefix 0

Bavarian et al. 2022: applied to a share `rate` of the segments, a share `spm_rate` of those suffix first; the others stay as
they are. The cuts are two different ones of 0 … n, uniform. With text_safe a cut that falls inside a character of byte-level
text moves back to the character's begin.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from packprep.kernel import integer, kernel, word
from packprep.objectives.objective import Bodies, BodySlots, Objective, Parameter, Task
from packprep.randomness import CUT_POINTS

ROLES = ("fim_prefix", "fim_middle", "fim_suffix")


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
def _cuts(key, n):
    """Two different cuts, ascending, uniform over the pairs of 0 … n."""
    a, b = integer(key, CUT_POINTS, 4, n + 1, 0), integer(key, CUT_POINTS, 8, n, 0)
    if b >= a:
        b += 1
    return min(a, b), max(a, b)


@kernel
def _render(tokens, begin, n, key, at, rate, spm_rate, continues, pre, mid, suf, rows):
    for i in range(n.shape[0]):
        s, t, k = begin[i], at[i], n[i]
        if word(key[i], CUT_POINTS, 0, 0, 0) >= rate:
            for j in range(k):
                rows[t + j] = tokens[s + j]
            continue
        a, b = _cuts(key[i], k)
        a, b = _back(tokens, s, a, k, continues), _back(tokens, s, b, k, continues)
        if word(key[i], CUT_POINTS, 1, 0, 0) < spm_rate:
            a = np.int64(0)  # suffix first: an empty prefix, and the middle begins the text
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


@kernel
def _restore(rows, begin, n, key, at, rate, spm_rate, pre, mid, suf, out, fits):
    """The drawn cuts tell where the role tokens stand, and text_safe moves cuts back alone: the suffix token is the last one
    up to its place, the middle token the first one from its place on."""
    for i in range(n.shape[0]):
        s, t, k = begin[i], at[i], n[i]
        fits[i] = True
        if word(key[i], CUT_POINTS, 0, 0, 0) >= rate:
            for j in range(k):
                out[s + j] = rows[t + j]
            continue
        a, b = _cuts(key[i], k)
        end = t + k + 3
        fits[i] = rows[t] == pre
        at_suf = t + 1 + (a if word(key[i], CUT_POINTS, 1, 0, 0) >= spm_rate else 0)
        while at_suf > t and rows[at_suf] != suf:
            at_suf -= 1
        at_mid = at_suf + 1 + k - b
        while at_mid < end and rows[at_mid] != mid:
            at_mid += 1
        if at_suf == t or at_mid == end:
            fits[i] = False
            continue
        for j in range(t + 1, at_suf):
            out[s] = rows[j]
            s += 1
        for j in range(at_mid + 1, end):
            out[s] = rows[j]
            s += 1
        for j in range(at_suf + 1, at_mid):
            out[s] = rows[j]
            s += 1


def _rates(task: Task) -> tuple[np.uint64, np.uint64]:
    """rate and spm_rate in 2⁻³²."""
    return np.uint64(int(task.parameters["rate"] * 2**32)), np.uint64(int(task.parameters["spm_rate"] * 2**32))


def body_slots(task: Task, bodies: Bodies) -> np.ndarray:
    """n, and three role tokens where it is applied."""
    out = np.empty(bodies.n.shape, np.bool_)
    _applied(bodies.key, _rates(task)[0], out)
    return bodies.n + 3 * out


def most_body_slots(task: Task, n: int) -> int:
    """n + 3, unless it is never applied."""
    return n + (3 if task.parameters["rate"] > 0 else 0)


def render(task: Task, columns: BodySlots, tokens: np.ndarray, rows: np.ndarray) -> None:
    """Writes the parts in their order, with the role tokens."""
    continues = task.ids.continues if task.parameters["text_safe"] else np.zeros(0, np.uint8)
    n, key, _, _ = columns.bodies
    _render(tokens, columns.begin, n, key, columns.at, *_rates(task), continues, *task.ids.fim, rows)


def restore(task: Task, columns: BodySlots, rows: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Puts the middle back; a body fits if the role tokens stand where they belong."""
    fits = np.empty(columns.begin.shape, np.bool_)
    n, key, _, _ = columns.bodies
    _restore(rows, columns.begin, n, key, columns.at, *_rates(task), *task.ids.fim, out, fits)
    return fits


def roles(parameters: Mapping[str, Any]) -> frozenset[str]:
    """The three role tokens."""
    return frozenset(ROLES if parameters["rate"] > 0 else ())


OBJECTIVE = Objective(
    name="fill_in_the_middle",
    attention="causal",
    parameters=(
        Parameter("rate", 0.5, "share of the segments that are rearranged", 0.0, 1.0),
        Parameter("spm_rate", 0.5, "share of those that put the suffix first", 0.0, 1.0),
        Parameter("text_safe", True, "never cut inside a character of byte-level text"),
    ),
    body_slots=body_slots,
    most_body_slots=most_body_slots,
    render=render,
    restore=restore,
    added="fim",
    roles=roles,
)
