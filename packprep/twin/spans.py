"""loss_spans → which characters are trained, with which weight."""

import math
import struct
from collections import Counter
from typing import Any, NamedTuple


class Span(NamedTuple):
    """One entry."""

    begin: int
    end: int
    weight: float


def ranges_of(
    spans: Any, characters: int, of_document: Any = None, weights: bool = True
) -> list[tuple[int, int, float]] | None:
    """The runs of the text's characters that lie in spans of one weight, (begin, end, weight) each, by which spans are open from
    each place on where one begins or ends. None where the entries are no spans, or two of unequal weight are open at once.

    of_document: the record's own weight, by which the others are multiplied; None: 1. weights: whether there are others than 1.
    """
    factor = in_float32(1 if of_document is None else of_document)
    if not isinstance(spans, list) or factor is None:
        return None
    entries = [_span(span, weights) for span in spans]
    opened: dict[int, Counter[float]] = {}
    for entry in entries:
        if entry is None or in_float32(entry.weight * factor) is None:
            return None
        if entry.begin < min(entry.end, characters):
            opened.setdefault(entry.begin, Counter())[entry.weight] += 1
            opened.setdefault(min(entry.end, characters), Counter())[entry.weight] -= 1
    found: list[tuple[int, int, float]] = []
    first, now = 0, Counter[float]()
    for bound in sorted(opened):
        weight = in_float32(factor * next((own for own, many in now.items() if many), 0.0))
        if weight and found and found[-1][1:] == (first, weight):
            found[-1] = (found[-1][0], bound, weight)
        elif weight:
            found.append((first, bound, weight))
        first = bound
        for own, many in opened[bound].items():
            now[own] += many
        if sum(many > 0 for many in now.values()) > 1:
            return None
    return found


def _span(span: Any, weights: bool) -> Span | None:
    """An entry that is [begin, end] or [begin, end, weight], whose weight is 1 where there are none; None for any other."""
    if not isinstance(span, list) or not 2 <= len(span) <= 3:
        return None
    *bounds, weight = span if len(span) == 3 else [*span, 1]
    kinds = [type(bound) for bound in bounds]
    as_in_a_column = weights and len(span) == 3 and kinds == [float, float] and all(bound % 1 == 0 for bound in bounds)
    if (kinds != [int, int] and not as_in_a_column) or not 0 <= bounds[0] <= bounds[1]:
        return None
    kept = in_float32(weight)
    return None if kept is None or (weight != 1 and not weights) else Span(int(bounds[0]), int(bounds[1]), kept)


def in_float32(weight: Any) -> float | None:
    """The nearest number of 32 bits; None for what is no finite number of at least 0."""
    if type(weight) not in (int, float) or not 0 <= weight < math.inf:
        return None
    try:
        return struct.unpack("f", struct.pack("f", weight))[0]
    except OverflowError:
        return None
