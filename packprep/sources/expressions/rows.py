"""Compute the value of an expression for rows of Arrow columns.

Numbers and truth values are NumPy arrays, texts and times are Arrow arrays. Null follows SQL: an
operator with a null gives null, except `false and null`, `true or null`, "is null" and coalesce.
NaN is null, as in pandas and in a document's weight. A result that is not a number, such as x / 0
or an integer beyond int64, is null too.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packprep.sources.expressions.kinds import NULL, NUMBER, TEXT, TIME, TRUTH
from packprep.sources.expressions.parser import (
    ARITHMETIC,
    COMPARISONS,
    Call,
    ExpressionFault,
    Field,
    Literal,
    Node,
)

_RISKY = 2.0**62
_INT64 = np.iinfo(np.int64)


class Values(NamedTuple):
    """The value of a part of an expression for n rows, or the value of a literal.

    Attributes:
        values: Numbers as int64, uint64, float32 or float64, truth values as bool, and texts as
            large_binary or a dictionary of it. A literal has shape (), or is an Arrow scalar. A
            null row has any value. None if every row is null.
        valid: Whether the value is not null, bool[n] or bool[()].
        written: Whether this is a literal of the expression.
    """

    values: Any
    valid: np.ndarray
    written: bool = False


def kind_of_type(kind: pa.DataType) -> str:
    """Return the kind of an Arrow type's values, as in `kinds.py`."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if isinstance(kind, pa.BaseExtensionType):
        return f"a value of the type {kind.extension_name}"
    tests: tuple[tuple[str, tuple[Callable[[pa.DataType], bool], ...]], ...] = (
        (NUMBER, (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)),
        (TEXT, _TEXT_TYPES),
        (TRUTH, (pa.types.is_boolean,)),
        (TIME, (pa.types.is_timestamp, pa.types.is_date)),
        (NULL, (pa.types.is_null,)),
        ("a list", (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)),
        ("an object", (pa.types.is_struct,)),
    )
    for name, of_name in tests:
        if any(test(kind) for test in of_name):
            return name
    return f"a value of the type {kind}"


_TEXT_TYPES = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
)


def whole(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column as one array."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def check_times(node: Node, types: Mapping[str, pa.DataType]) -> None:
    """Check that each text that is compared with a time is a time, and that times fit together.

    Raises:
        ExpressionFault: If a comparison is impossible.
    """
    if any(kind_of_type(kind) == TIME for kind in types.values()):
        # Some comparisons of Arrow accept no rows of types of which they refuse a row.
        values_of(node, {name: pa.nulls(1, kind) for name, kind in types.items()})


def values_of(node: Node, columns: Mapping[str, pa.Array]) -> Values:
    """Return the value of a node for each row.

    Args:
        node: The tree. Its kinds were checked.
        columns: Values of each field.

    Raises:
        ExpressionFault: If a text is compared with a time, but is not a time.
    """
    if isinstance(node, Literal):
        value = node.value.encode() if isinstance(node.value, str) else node.value
        return Values(_scalar(value), np.array(True), written=True)
    if isinstance(node, Field):
        return of_column(columns[node.name])
    if node.function == "is null":
        # `is null` also accepts lists and objects, which have no values here.
        operand = node.arguments[0]
        if isinstance(operand, Field) and kind_of_type(columns[operand.name].type) not in READ:
            valid = _valid(columns[operand.name])
        else:
            valid = values_of(operand, columns).valid
        return Values(~valid, np.ones_like(valid))
    arguments = [values_of(argument, columns) for argument in node.arguments]
    if node.function in ("and", "or"):
        return reduce(_and if node.function == "and" else _or, arguments)
    if node.function in COMPARISONS:
        return _compared(node, *arguments)
    if node.function == "in":
        return _in(node, arguments)
    if node.function in ARITHMETIC:
        return _calculated(node.function, *arguments)
    return _FUNCTIONS[node.function](arguments)


READ = (NUMBER, TEXT, TRUTH, TIME, NULL)
"""The kinds of which `of_column` returns the values."""


def _scalar(value: int | float | bool | bytes) -> Any:
    if isinstance(value, bytes):
        return pa.scalar(value, pa.large_binary())
    if isinstance(value, bool):
        return np.array(value)
    if isinstance(value, int) and value > _INT64.max:
        return np.array(value, np.uint64)
    return np.array(value, np.int64 if isinstance(value, int) else np.float64)


def of_column(column: pa.Array) -> Values:
    """Return the values of a column as an expression reads them. Its kind must be in READ."""
    kind = kind_of_type(column.type)
    valid = _valid(column)
    if kind == NULL:
        return Values(None, valid)
    if kind == TEXT:
        return _text_column(column, valid)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
        valid = _valid(column)
    if kind == TIME:
        return Values(column, valid)
    if kind == TRUTH:
        return Values(column.fill_null(False).to_numpy(zero_copy_only=False), valid)
    return _number_column(column, valid)


def _valid(column: pa.Array) -> np.ndarray:
    """Return which values of a column are not null, bool[n].

    Without nulls, pyarrow's `to_numpy` is not called. It would import pandas, which takes long.
    """
    if not column.null_count:
        return np.ones(len(column), np.bool_)
    valid: np.ndarray = column.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _text_column(column: pa.Array, valid: np.ndarray) -> Values:
    if not pa.types.is_dictionary(column.type):
        return Values(_binary(column), valid)
    dictionary = _binary(column.dictionary)
    if dictionary.null_count:  # A dictionary may contain null as well.
        return _text_column(column.cast(column.type.value_type), _valid_of_dictionary(column))
    indices = column.indices.cast(pa.int64())
    return Values(pa.DictionaryArray.from_arrays(indices, dictionary), valid)


def _valid_of_dictionary(column: pa.DictionaryArray) -> np.ndarray:
    decoded = pc.take(column.dictionary.is_valid(), column.indices)
    valid: np.ndarray = decoded.fill_null(False).to_numpy(zero_copy_only=False)
    return valid


def _binary(column: pa.Array) -> pa.Array:
    """Return texts as their UTF-8 bytes, whose order is the order of the characters."""
    if pa.types.is_string_view(column.type):
        column = column.cast(pa.large_string())
    return column.cast(pa.large_binary())


def _number_column(column: pa.Array, valid: np.ndarray) -> Values:
    if pa.types.is_decimal(column.type):  # Through a text, each is rounded to the nearest float64.
        column = column.cast(pa.string()).cast(pa.float64())
    if column.null_count:
        values = column.fill_null(0).to_numpy()
    else:
        values = np.from_dlpack(column)
    if values.dtype.kind == "f":
        valid = valid & ~np.isnan(values)
        return Values(values if values.dtype == np.float32 else values.astype(np.float64), valid)
    return Values(values if values.dtype == np.uint64 else values.astype(np.int64), valid)


def _and(left: Values, right: Values) -> Values:
    a, b = _truths(left), _truths(right)
    surely_false = left.valid & ~a | right.valid & ~b
    return Values(a & b, left.valid & right.valid | surely_false)


def _or(left: Values, right: Values) -> Values:
    surely_true = left.valid & _truths(left) | right.valid & _truths(right)
    return Values(surely_true, left.valid & right.valid | surely_true)


def _truths(side: Values) -> np.ndarray:
    """Return truth values as bool, also of a field without any value."""
    values: np.ndarray = np.zeros_like(side.valid) if side.values is None else side.values
    return values


def _not(arguments: Sequence[Values]) -> Values:
    return Values(~_truths(arguments[0]), arguments[0].valid)


def _compared(node: Call, left: Values, right: Values) -> Values:
    sign = "==" if node.function == "in" else node.function
    valid = left.valid & right.valid
    if left.values is None or right.values is None:
        return Values(np.zeros_like(valid), np.zeros_like(valid))
    # Numbers and truth values are NumPy arrays.
    if not _is_arrow(left):
        return Values(_OPERATORS[sign](*_comparable(left, right)), valid)
    kernel = _KERNELS[sign]
    a, b = left.values, right.values
    # Each text of the dictionary is compared once, and indices repeat the result.
    if isinstance(a, pa.DictionaryArray) and isinstance(b, pa.Scalar):
        of_dictionary = _plain(kernel(a.dictionary, b))
        indices = a.indices.fill_null(0).to_numpy()
        outcomes = of_dictionary[indices] if len(of_dictionary) else np.zeros_like(valid)
        return Values(outcomes, valid)
    a, b = _decoded(a), _decoded(b)
    try:
        # Different types are a time and a text, or two kinds of times.
        if a.type != b.type:
            a, b = _as_time(a, b.type), _as_time(b, a.type)
        return Values(_plain(kernel(a, b)), valid)
    except pa.ArrowException:
        shown = next((side.as_py() for side in (a, b) if isinstance(side, pa.Scalar)), None)
        times = " and ".join(str(side.type) for side in (a, b) if not isinstance(side, pa.Scalar))
        example = "'2026-01-31' or '2026-01-31 12:00:00'"
        problem = f"{shown.decode()!r} is not a {times}, such as {example}" if shown else ""
        raise ExpressionFault(problem or f"cannot compare {times}", node.at) from None


def _is_arrow(side: Values) -> bool:
    """Return whether these are texts or times."""
    return isinstance(side.values, pa.Array | pa.Scalar)


def _plain(truth: Any) -> np.ndarray:
    """Return the result of an Arrow comparison as bool[n] or bool[()], with False for null."""
    if isinstance(truth, pa.Scalar):
        return np.array(bool(truth.as_py()))
    values: np.ndarray = truth.fill_null(False).to_numpy(zero_copy_only=False)
    return values


def _decoded(side: Any) -> Any:
    return side.dictionary_decode() if isinstance(side, pa.DictionaryArray) else side


def _as_time(side: Any, kind: pa.DataType) -> Any:
    """Return a text literal as a time of the Arrow type `kind`, and another value unchanged.

    A text without an offset is in UTC if the type has a time zone.
    """
    if not isinstance(side, pa.Scalar) or not pa.types.is_large_binary(side.type):
        return side
    text = pa.scalar(side.as_py().decode())
    if not pa.types.is_timestamp(kind) or kind.tz is None:
        return text.cast(kind)
    try:
        return text.cast(kind)
    except pa.ArrowInvalid:
        return text.cast(pa.timestamp(kind.unit)).cast(kind)


def _comparable(left: Values, right: Values) -> tuple[np.ndarray, np.ndarray]:
    """Return two numbers or truth values as arrays that NumPy compares exactly.

    A float is compared with another number as float64. A literal is first rounded to the float32 of
    a column, so that `score == 0.1` finds 0.1. NumPy compares int64 with uint64 exactly.
    """
    a, b = left.values, right.values
    if "f" not in (a.dtype.kind, b.dtype.kind):
        return a, b
    singles = [side.values.dtype == np.float32 for side in (left, right)]
    is_single = any(singles) and all(
        single or side.written for single, side in zip(singles, (left, right), strict=True)
    )
    number = np.float32 if is_single else np.float64
    with np.errstate(over="ignore"):
        return a.astype(number), b.astype(number)


def _in(node: Call, arguments: Sequence[Values]) -> Values:
    value, entries = arguments[0], arguments[1:]
    # Numbers follow the rules of ==. For texts, one set has all entries.
    if value.values is None or not _is_arrow(value):
        return reduce(_or, [_compared(node, value, entry) for entry in entries])
    texts = pa.array([entry.values.as_py() for entry in entries], pa.large_binary())
    if isinstance(value.values, pa.DictionaryArray):
        of_dictionary = _plain(pc.is_in(value.values.dictionary, texts))
        indices = value.values.indices.fill_null(0).to_numpy()
        is_in = of_dictionary[indices] if len(of_dictionary) else np.zeros_like(value.valid)
        return Values(is_in, value.valid)
    return Values(_plain(pc.is_in(value.values, texts)), value.valid)


def _calculated(sign: str, left: Values, right: Values) -> Values:
    valid = left.valid & right.valid
    if left.values is None or right.values is None:
        return Values(None, np.zeros_like(valid))
    a, b = left.values, right.values
    if sign in ("/", "%"):
        valid = valid & (b != 0)
    if sign == "/" or "f" in (a.dtype.kind, b.dtype.kind):
        with np.errstate(all="ignore"):
            values = _OPERATORS[sign](a.astype(np.float64), b.astype(np.float64))
        return Values(values, valid & ~np.isnan(values))
    if sign == "%":
        return _remainder(a, b, valid)
    return _integers(sign, a, b, valid)


def _integers(sign: str, a: np.ndarray, b: np.ndarray, valid: np.ndarray) -> Values:
    """Return the exact sum, difference or product of integers. Beyond int64 it is null.

    Arithmetic modulo 2**64 is exact if the result is in int64. The float64 result shows where this
    is sure, and Python's integers compute the other rows.
    """
    apply = _OPERATORS[sign]
    with np.errstate(all="ignore"):
        values = np.array(apply(a.astype(np.int64), b.astype(np.int64)))
        risky = np.abs(apply(a.astype(np.float64), b.astype(np.float64))) >= _RISKY
    # Literals have no rows, so every array gets the shape of the rows.
    values, valid, risky, a, b = np.broadcast_arrays(values, valid, risky, a, b)
    values, valid = values.copy(), valid.copy()
    for row in zip(*np.nonzero(np.atleast_1d(risky & valid)), strict=True):
        index = row if values.ndim else ()
        exact = apply(int(a[index]), int(b[index]))
        if _INT64.min <= exact <= _INT64.max:
            values[index] = exact
        else:
            valid[index] = False
    return Values(values, valid)


def _remainder(a: np.ndarray, b: np.ndarray, valid: np.ndarray) -> Values:
    """Return the remainder of integers, with the sign of `a`. The sign of `b` has no effect."""
    divisor = np.where(b == 0, 1, b)
    if np.uint64 not in (a.dtype, b.dtype):
        divisor = np.where(divisor == -1, 1, divisor)  # int64's minimum % -1 overflows.
        return Values(np.fmod(a, divisor), valid)
    sizes = [
        x if x.dtype == np.uint64 else np.abs(x).astype(np.uint64) for x in (a, np.array(divisor))
    ]
    values = np.fmod(*sizes)
    if a.dtype == np.uint64:
        return Values(values, valid)
    return Values(np.where(a < 0, -values.astype(np.int64), values.astype(np.int64)), valid)


def _alike(arguments: Sequence[Values]) -> list[Values]:
    """Return numbers with one dtype, which contains all their values. Others are unchanged.

    int64 and uint64 together become float64, and may be rounded.
    """
    arrays = [side for side in arguments if side.values is not None and not _is_arrow(side)]
    kinds = {side.values.dtype for side in arrays}
    if len(kinds) < 2:
        return list(arguments)
    if np.dtype(np.uint64) in kinds and all(
        side.values.dtype == np.uint64
        or (side.written and side.values.dtype == np.int64 and side.values >= 0)
        for side in arrays
    ):
        number: Any = np.uint64
    else:
        number = np.float64
    return [
        side._replace(values=side.values.astype(number)) if side.values is not None else side
        for side in arguments
    ]


def _negative(arguments: Sequence[Values]) -> Values:
    return _calculated("-", Values(np.array(0), np.array(True)), arguments[0])


def _abs(arguments: Sequence[Values]) -> Values:
    values, valid = arguments[0][:2]
    if values is None or values.dtype == np.uint64:
        return arguments[0]
    if values.dtype == np.int64:
        return Values(np.abs(values), valid & (values != _INT64.min))
    return Values(np.abs(values), valid)


def _rounded(arguments: Sequence[Values], to_whole: Callable[[np.ndarray], np.ndarray]) -> Values:
    values, valid = arguments[0][:2]
    is_whole = values is None or values.dtype.kind != "f"
    return arguments[0] if is_whole else Values(to_whole(values), valid)


def _least(arguments: Sequence[Values]) -> Values:
    return _extreme(arguments, np.minimum)


def _most(arguments: Sequence[Values]) -> Values:
    return _extreme(arguments, np.maximum)


def _extreme(arguments: Sequence[Values], choose: Callable[..., np.ndarray]) -> Values:
    valid = reduce(np.logical_and, [side.valid for side in arguments])
    if any(side.values is None for side in arguments):
        return Values(None, np.zeros_like(valid))
    return Values(reduce(choose, [side.values for side in _alike(arguments)]), valid)


def _clip(arguments: Sequence[Values]) -> Values:
    value, low, high = _alike(arguments)
    return _least([_most([value, low]), high])


def _if(arguments: Sequence[Values]) -> Values:
    return _chosen(arguments[0].valid & _truths(arguments[0]), *_alike(arguments[1:]))


def _coalesce(arguments: Sequence[Values]) -> Values:
    result, *alternatives = _alike(arguments)
    for alternative in alternatives:
        result = _chosen(result.valid, result, alternative)
    return result


def _chosen(is_first: np.ndarray, first: Values, second: Values) -> Values:
    """Return the rows of `first` where `is_first` is True, otherwise the rows of `second`."""
    valid = np.where(is_first, first.valid, second.valid)
    if first.values is None or second.values is None:
        values = second.values if first.values is None else first.values
    elif not _is_arrow(first):
        values = np.where(is_first, first.values, second.values)
    elif not is_first.ndim:
        values = first.values if is_first else second.values
    else:
        values = pc.if_else(pa.array(is_first), _decoded(first.values), _decoded(second.values))
    return Values(values, valid)


_OPERATORS: Mapping[str, Callable[..., Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "%": np.fmod,
}
_KERNELS = {
    "==": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_FUNCTIONS: Mapping[str, Callable[[Sequence[Values]], Values]] = {
    "not": _not,
    "if": _if,
    "negative": _negative,
    "abs": _abs,
    "floor": partial(_rounded, to_whole=np.floor),
    "ceil": partial(_rounded, to_whole=np.ceil),
    "min": _least,
    "max": _most,
    "clip": _clip,
    "coalesce": _coalesce,
}
