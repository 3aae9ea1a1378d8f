"""A range contains every value that a row has, so that no row group is wrongly left out."""

import math
import random

import numpy as np
import pyarrow as pa
import pytest

from packprep.sources.expressions import Expression, Range
from tests.sources.expressions import random_expressions as made

KEY = ("sources", 0, "where")


def range_of_column(column: pa.Array, rng: random.Random) -> Range:
    """The range of a column's values, sometimes with an unknown or too wide end."""
    is_float = pa.types.is_floating(column.type)
    values = [v for v in column.to_pylist() if v is not None and not (is_float and math.isnan(v))]
    null = len(values) < len(column)
    if not values:
        return Range(value=False)
    if isinstance(values[0], str):
        values = [value.encode() for value in values]
    low, high = min(values), max(values)
    if isinstance(low, bytes) and len(high) > 64:
        low, high = low[:64], high[:63] + bytes([high[63] + 1])
    ends = (None if rng.random() < 0.1 else end for end in (low, high))
    return Range(*ends, null=null or rng.random() < 0.1, single=column.type == pa.float32())


def check(rng: random.Random) -> None:
    table = made.random_table(rng, rng.choice((1, 2, 6)))
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    ranges = {name: range_of_column(column, rng) for name, column in columns.items()}
    try:
        condition = Expression.parse_condition(made.truth(rng, 3), KEY)
        number = Expression.parse_number(made.number(rng, 3), KEY)
    except made.REFUSED:
        return
    held = condition.condition(columns)
    assert condition.may_hold(ranges) or not held.any(), (condition.text, table.to_pylist())
    values = number.number(columns)
    assert number.may_hold(ranges) or not (values > 0).any(), (number.text, table.to_pylist())
    low, high = number.bounds()
    values = values[~np.isnan(values)]
    assert ((low <= values) & (values <= high)).all(), (number.text, table.to_pylist())
    anything = Expression.parse_condition(f"({number.text}) is null", KEY)
    assert anything.may_hold(ranges) or not anything.condition(columns).any(), anything.text


def test_no_random_expression_holds_where_its_range_says_that_it_cannot():
    rng = random.Random(49)
    for _ in range(300):
        check(rng)


@pytest.mark.campaign
def test_no_random_expression_of_many_holds_where_its_range_says_that_it_cannot():
    rng = random.Random(50)
    for _ in range(100_000):
        check(rng)


SCORES = Range(2, 4, null=False)


MAY_HOLD = (
    ("score >= 4", {"score": SCORES}, True),
    ("score > 4", {"score": SCORES}, False),
    ("score != 3", {"score": Range(3, 3)}, False),
    ("not score == 3", {"score": Range(3, 3)}, False),
    ("score is null", {"score": SCORES}, False),
    ("score is null", {"score": Range(2, 4)}, True),
    ("score > 4", {"score": Range(null=True, value=False)}, False),
    ("score > 4", {}, True),
    ("score > 4 or lang == 'de'", {"score": SCORES}, True),
    ("score > 4 and lang == 'de'", {"score": SCORES}, False),
    ("lang in ('de', 'fr')", {"lang": Range(b"en", b"es")}, False),
    ("coalesce(score, 9) > 4", {"score": SCORES}, False),
    ("coalesce(score, 9) > 4", {"score": Range(2, 4)}, True),
    ("f > 0.1", {"f": Range(0.0, float(np.float32(0.1)), single=True)}, False),
    ("clip(score - 2, 0, 4) > 2", {"score": SCORES}, False),
)


def test_a_row_group_is_left_out_where_no_row_can_pass():
    for text, ranges, may_hold in MAY_HOLD:
        assert Expression.parse_condition(text, KEY).may_hold(ranges) == may_hold, text


BOUNDS = (
    ("clip(score - 1, 0, 4)", (0, 4)),
    ("clip(score, 0, 4) / 2 + 1", (1, 3)),
    ("score", (-math.inf, math.inf)),
    ("max(score, 0)", (0, math.inf)),
    ("2 if lang == 'de' else 1", (1, 2)),
    ("score % 3", (-3, 3)),
    ("1 / clip(score, 0, 1)", (-math.inf, math.inf)),
    ("abs(clip(score, -3, 2))", (0, 3)),
)


def test_bounds_follow_from_the_expression():
    for text, bounds in BOUNDS:
        assert Expression.parse_number(text, ("sources", 0, "repeat")).bounds() == bounds, text
