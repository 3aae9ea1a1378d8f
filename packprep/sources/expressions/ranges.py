"""Compute what an expression's value can be, from what its fields can be.

Each value has a `Range`. Nothing is known of a field without statistics. A range always contains
all values that `rows.py` can compute, but may contain further ones.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from packprep.sources.expressions.parser import ARITHMETIC, COMPARISONS, Field, Literal, Node

_EXACT = 1 << 53  # Every smaller integer is a float64.


class Range(NamedTuple):
    """The values that a field, or a part of an expression, can have.

    Attributes:
        low: A value that no value is below: a number, the UTF-8 bytes of a text, or a truth value.
            None if no such value is known.
        high: A value that no value is above, or None.
        null: Whether the value can be null.
        value: Whether the value can be another value than null.
        single: Whether the values are float32. A literal is rounded before it is compared with
            them.
        written: Whether this is a literal.
    """

    low: Any = None
    high: Any = None
    null: bool = True
    value: bool = True
    single: bool = False
    written: bool = False


ANY = Range()


def range_of(node: Node, fields: Mapping[str, Range]) -> Range:
    """Return the range of a node's value.

    Args:
        node: The tree. Its kinds were checked.
        fields: Range of each field. A field that is not in it can be anything.
    """
    if isinstance(node, Literal):
        value = node.value.encode() if isinstance(node.value, str) else node.value
        return Range(value, value, null=False, written=True)
    if isinstance(node, Field):
        return fields.get(node.name, ANY)
    ranges = [range_of(argument, fields) for argument in node.arguments]
    if node.function in ("and", "or"):
        return _joined(node.function, ranges)
    if node.function in COMPARISONS:
        return _compared(node.function, *ranges)
    if node.function in ARITHMETIC:
        return _calculated(node.function, *ranges)
    return _FUNCTIONS[node.function](ranges)


def _truth(can_be_false: bool, can_be_true: bool, null: bool) -> Range:
    value = can_be_false or can_be_true
    return Range(not can_be_false, can_be_true, null, value) if value else Range(value=False)


def _outcomes(truth: Range) -> tuple[bool, bool]:
    """Return whether a truth value can be false, and whether it can be true."""
    return truth.value and truth.low is not True, truth.value and truth.high is not False


def _joined(word: str, ranges: Sequence[Range]) -> Range:
    """Return the range of "and" or "or" in SQL's three-valued logic."""
    outcomes = [_outcomes(truth) for truth in ranges]
    null = any(truth.null for truth in ranges)
    if word == "and":
        is_true = all(can_be_true for _, can_be_true in outcomes)
        # A null can only remain if no argument is surely false.
        null = null and all(
            can_be_true or truth.null
            for truth, (_, can_be_true) in zip(ranges, outcomes, strict=True)
        )
        return _truth(any(can_be_false for can_be_false, _ in outcomes), is_true, null)
    is_false = all(can_be_false for can_be_false, _ in outcomes)
    null = null and all(
        can_be_false or truth.null
        for truth, (can_be_false, _) in zip(ranges, outcomes, strict=True)
    )
    return _truth(is_false, any(can_be_true for _, can_be_true in outcomes), null)


def _not(ranges: Sequence[Range]) -> Range:
    can_be_false, can_be_true = _outcomes(ranges[0])
    return _truth(can_be_true, can_be_false, ranges[0].null)


def _is_null(ranges: Sequence[Range]) -> Range:
    return _truth(ranges[0].value, ranges[0].null, False)


def _compared(operator: str, left: Range, right: Range) -> Range:
    null = left.null or right.null
    if not (left.value and right.value):
        return _truth(False, False, null)
    left, right = _comparable(left, right)
    if operator in ("==", "!="):
        # Values may be equal if the ranges overlap, and differ unless both are the same value.
        is_equal = not (_is_below(left, right) or _is_below(right, left))
        ends = left.low, left.high, right.low, right.high
        differs = None in ends or len(set(ends)) > 1
        return (
            _truth(differs, is_equal, null) if operator == "==" else _truth(is_equal, differs, null)
        )
    if operator in (">", ">="):
        left, right = right, left
    if operator in ("<", ">"):
        return _truth(not _is_below(left, right), not _is_at_most(right, left), null)
    return _truth(not _is_at_most(left, right), not _is_below(right, left), null)


def _is_below(left: Range, right: Range) -> bool:
    """Return whether each value of `left` is less than each value of `right`."""
    return left.high is not None and right.low is not None and left.high < right.low


def _is_at_most(left: Range, right: Range) -> bool:
    return left.high is not None and right.low is not None and left.high <= right.low


def _comparable(left: Range, right: Range) -> tuple[Range, Range]:
    """Return two ranges with their ends rounded as the values are before a comparison."""
    sides = left, right
    if any(isinstance(end, bytes | bool) for side in sides for end in (side.low, side.high)):
        return left, right
    if any(side.single for side in sides) and all(side.single or side.written for side in sides):
        return _rounded(left, np.float32), _rounded(right, np.float32)
    is_integer = all(
        isinstance(end, int) for side in sides for end in (side.low, side.high) if end is not None
    )
    return sides if is_integer else (_rounded(left, float), _rounded(right, float))


def _rounded(side: Range, number: Any) -> Range:
    with np.errstate(over="ignore"):
        low, high = (None if end is None else float(number(end)) for end in (side.low, side.high))
    return side._replace(low=low, high=high)


def _in(ranges: Sequence[Range]) -> Range:
    return _joined("or", [_compared("==", ranges[0], entry) for entry in ranges[1:]])


def _numbers(ranges: Sequence[Range]) -> list[tuple[float, float]]:
    """Return the ends of ranges of numbers as float64, moved outwards where they are inexact."""
    return [
        _outwards(
            -math.inf if side.low is None else side.low,
            math.inf if side.high is None else side.high,
        )
        for side in ranges
    ]


def _outwards(low: float, high: float) -> tuple[float, float]:
    """Return ends that contain all results, whether they are computed as int64 or float64."""
    if math.isnan(low) or math.isnan(high):
        return -math.inf, math.inf
    ends = float(low), float(high)
    if abs(ends[0]) >= _EXACT:
        ends = math.nextafter(ends[0], -math.inf), ends[1]
    if abs(ends[1]) >= _EXACT:
        ends = ends[0], math.nextafter(ends[1], math.inf)
    return ends


def _computed(ends: tuple[float, float], ranges: Sequence[Range]) -> Range:
    """Return the range of a number. The result of values can be null as well."""
    value = all(side.value for side in ranges)
    return Range(*_outwards(*ends)) if value else Range(value=False)


def _calculated(operator: str, left: Range, right: Range) -> Range:
    (a, b), (c, d) = _numbers((left, right))
    if operator == "+":
        ends = a + c, b + d
    elif operator == "-":
        ends = a - d, b - c
    elif operator == "%":
        # The remainder has the sign of `a`, and is not larger than either side.
        bound = min(max(abs(a), abs(b)), max(abs(c), abs(d)))
        ends = (0.0 if a >= 0 else -bound), (0.0 if b <= 0 else bound)
    elif operator == "/" and c <= 0 <= d:
        ends = -math.inf, math.inf
    else:
        # The extremes of a product or quotient are at the ends of both ranges.
        corners = [x * y if operator == "*" else x / y for x in (a, b) for y in (c, d)]
        is_known = not any(map(math.isnan, corners))
        ends = (min(corners), max(corners)) if is_known else (-math.inf, math.inf)
    return _computed(ends, (left, right))


def _negative(ranges: Sequence[Range]) -> Range:
    ((low, high),) = _numbers(ranges)
    return _computed((-high, -low), ranges)


def _abs(ranges: Sequence[Range]) -> Range:
    ((low, high),) = _numbers(ranges)
    least = 0.0 if low <= 0 <= high else min(abs(low), abs(high))
    return _computed((least, max(abs(low), abs(high))), ranges)


def _floor(ranges: Sequence[Range]) -> Range:
    ((low, high),) = _numbers(ranges)
    return _computed((float(np.floor(low)), float(np.floor(high))), ranges)


def _ceil(ranges: Sequence[Range]) -> Range:
    ((low, high),) = _numbers(ranges)
    return _computed((float(np.ceil(low)), float(np.ceil(high))), ranges)


def _min(ranges: Sequence[Range]) -> Range:
    lows, highs = zip(*_numbers(ranges), strict=True)
    return _computed((min(lows), min(highs)), ranges)


def _max(ranges: Sequence[Range]) -> Range:
    lows, highs = zip(*_numbers(ranges), strict=True)
    return _computed((max(lows), max(highs)), ranges)


def _clip(ranges: Sequence[Range]) -> Range:
    return _min([_max(ranges[:2]), ranges[2]])


def _if(ranges: Sequence[Range]) -> Range:
    can_be_false, can_be_true = _outcomes(ranges[0])
    chosen = [ranges[1]] if can_be_true else []
    return _either([*chosen, ranges[2]] if can_be_false or ranges[0].null else chosen)


def _coalesce(ranges: Sequence[Range]) -> Range:
    used = []
    for side in ranges:
        used.append(side)
        if not side.null:
            break
    result = _either(used)
    return result._replace(null=all(side.null for side in used))


def _either(ranges: Sequence[Range]) -> Range:
    """Return a range that contains all values of some ranges."""
    sides = [side for side in ranges if side.value]
    null = any(side.null for side in ranges)
    if not sides:
        return Range(null=null, value=False)
    lows, highs = [side.low for side in sides], [side.high for side in sides]
    # Numbers of several types become float64, so their ends move outwards.
    is_number = not any(isinstance(end, bytes | bool) for end in (*lows, *highs))
    if is_number and len(sides) > 1:
        ends = _numbers(sides)
        return Range(*_outwards(min(x for x, _ in ends), max(x for _, x in ends)), null)
    low = None if None in lows else min(lows)
    return Range(low, None if None in highs else max(highs), null)


_FUNCTIONS = {
    "not": _not,
    "is null": _is_null,
    "in": _in,
    "if": _if,
    "negative": _negative,
    "abs": _abs,
    "floor": _floor,
    "ceil": _ceil,
    "min": _min,
    "max": _max,
    "clip": _clip,
    "coalesce": _coalesce,
}
