"""A range contains every value that a row has, so that no row group is wrongly left out."""

import itertools
import math
import random
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from packprep.sources.expressions import Expression, Range
from packprep.sources.expressions.kinds import TEXT, TRUTH, kind_of
from packprep.sources.expressions.parser import ExpressionFault, fields_of, parse
from packprep.sources.expressions.ranges import range_of
from packprep.sources.expressions.rows import kind_of_type
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


COLUMNS = (
    *([-3, -2, -1, 0, 1, 2], [1, 2, 3, 4], [-4, -3], [-1, 0], [0, 1], [2], [0, 1, 2, None]),
    *([None], [False, True], [True], [False, None], ["b", "c"], ["b", "b", None]),
)
TIGHT = (
    *("-a", "abs(a)", "floor(a + 0.5)", "ceil(a - 0.5)", "a / 2", "a + b", "a - b", "a * b"),
    *("min(a, b)", "max(a, b)", "min(a, b, 1)", "clip(a, -1, b)", "clip(a, b, 9)"),
    *("coalesce(a, b)", "coalesce(a, b, 7)", "coalesce(a, 2) + 1", "a if b > 1 else 5"),
    *("a if b else 3", "3 if a else b", "1 if a == 'b' else 2 if b is null else 3"),
    *("a == b", "a != b", "a < b", "a <= b", "a > b", "a >= b", "a == 1", "a < 1", "a >= 2"),
    *("a == 'b'", "a != 'b'", "a < 'c'", "a in ('a', 'd')", "a in ('c', 'd')", "a in (1, 2)"),
    *("a and b", "a or b", "not a", "not a or b", "a == true", "a is null", "a is null or b"),
    *("a is null and b is not null", "coalesce(a, false)", "(a > 0) == (b > 0)"),
    *("0 < a and a <= 2 or b", "coalesce(a, 'c') > 'b'", "(a is null) is null"),
)


def test_the_range_of_an_expression_ends_where_its_values_end():
    compared = Counter()
    for text in TIGHT:
        tree = parse(text)
        names = sorted({field.name for field in fields_of(tree)})
        for chosen in itertools.product(COLUMNS, repeat=len(names)):
            columns = dict(zip(names, zip(*itertools.product(*chosen), strict=True), strict=True))
            arrays = {name: pa.array(values) for name, values in columns.items()}
            types = {name: kind_of_type(array.type) for name, array in arrays.items()}
            try:
                kind = kind_of(tree, types)
            except ExpressionFault:
                continue
            if kind == TEXT:
                continue
            is_truth = kind == TRUTH
            expression = Expression(KEY, text, kind, tree, tuple(names))
            found = range_of(tree, {name: exact_range(values) for name, values in columns.items()})
            values, valid = expression._values(arrays)
            values = [] if values is None else values[valid].tolist()
            assert found.value == bool(values), (text, columns)
            assert found.null == (not valid.all()) or found.null and not is_truth, (text, columns)
            if values:
                assert (found.low, found.high) == (min(values), max(values)), (text, columns)
            compared[text] += 1
    assert min(compared[text] for text in TIGHT) > 1, compared


def exact_range(values: tuple) -> Range:
    some = [v.encode() if isinstance(v, str) else v for v in values if v is not None]
    null = len(some) < len(values)
    return Range(min(some), max(some), null) if some else Range(value=False)


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
    ("clip(score, 0, 2) % 5", (0, 2)),
    ("clip(score, -2, 0) % 5", (-2, 0)),
    ("clip(score, -1, 7) % clip(other, -5, 3)", (-5, 5)),
    ("clip(score, -4, 2) / clip(other, 2, 4)", (-2, 1)),
    ("clip(score, -4, 2) / clip(other, -4, 0)", (-math.inf, math.inf)),
    ("clip(score, -4, 2) / clip(other, 0, 4)", (-math.inf, math.inf)),
    ("clip(score, -9007199254740991, 9007199254740991)", (1 - 2.0**53, 2.0**53 - 1)),
    ("clip(score, -9007199254740992, 1)", (-(2.0**53) - 8, 1)),
    ("clip(score, 1, 9007199254740992)", (1, 2.0**53 + 4)),
)


def test_bounds_follow_from_the_expression():
    for text, bounds in BOUNDS:
        assert Expression.parse_number(text, ("sources", 0, "repeat")).bounds() == bounds, text
