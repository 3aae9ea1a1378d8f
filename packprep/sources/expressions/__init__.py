"""Expressions over the fields of a record, such as `score >= 3 and lang in ('de', 'fr')`.

A condition selects documents, and a number says how often a document is used. `parser.py` defines
the forms, and `rows.py` the meaning of null. The result for a record depends only on this record.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from packprep.errors import RecipeError, SourceError
from packprep.sources.expressions.kinds import NULL, NUMBER, TEXT, TRUTH, expect, kind_of
from packprep.sources.expressions.parser import ExpressionFault, Node, fields_of, parse
from packprep.sources.expressions.ranges import Range, range_of

__all__ = ["Expression", "Range", "condition", "number"]


@dataclass(frozen=True)
class Expression:
    """A condition, or a number, over the fields of a record.

    Attributes:
        key: Path of the recipe's key, for messages.
        text: The text of the expression.
        wanted: Kind of the result, TRUTH or NUMBER.
        tree: The tree of the text.
        fields: The fields in order of their first use. As in `text_key`, "a.b" is field b in a.
    """

    key: tuple[str | int, ...]
    text: str
    wanted: str
    tree: Node
    fields: tuple[str, ...]

    def check(self, place: str, types: Mapping[str, Any], there: Mapping[str, Any]) -> None:
        """Check that a table has the fields, with kinds that the expression accepts.

        Args:
            place: Path or URL of the file, for messages.
            types: Arrow type of each field of the expression that the table has.
            there: Arrow type of every field of the table, to list them in a message.

        Raises:
            SourceError: If a field is missing, or if an operator does not accept its type.
        """
        shown = ", ".join(f"{ascii(name)[1:-1]}: {kind}" for name, kind in list(there.items())[:50])
        hint = f"the fields are {shown or 'none'}\nhint: correct {_dotted(self.key)} of the recipe"
        if missing := [name for name in self.fields if name not in types]:
            raise SourceError(f"{place}: {self} reads {missing[0]!r}, which is not there; {hint}")
        kinds = {name: _rows().kind_of_type(kind) for name, kind in types.items()}
        try:
            expect(self.tree, kind_of(self.tree, kinds), self.wanted)
            none = {name: _rows().pa.array([], kind) for name, kind in types.items()}
            self._values(none, 0)
        except ExpressionFault as fault:
            raise SourceError(f"{place}: {self}: {fault.message}; {hint}") from None

    def condition(self, columns: Mapping[str, Any]) -> np.ndarray:
        """Return which rows of a table meet a condition, bool[n]. Null is False.

        Args:
            columns: Arrow array of each field. `check` accepted their types.
        """
        values, valid = self._values(columns, _length(columns))
        return np.zeros_like(valid) if values is None else values & valid

    def number(self, columns: Mapping[str, Any]) -> np.ndarray:
        """Return the number for each row of a table, float64[n]. Null is NaN.

        Args:
            columns: Arrow array of each field. `check` accepted their types.
        """
        values, valid = self._values(columns, _length(columns))
        return np.where(valid, 0.0 if values is None else values, math.nan).astype(np.float64)

    def of_values(self, columns: Mapping[str, Sequence[Any]]) -> tuple[np.ndarray, dict[int, str]]:
        """Return the result for n JSON records, and the records that cannot be judged.

        Each record is judged by the kinds of its own values, as a table with this one row.

        Args:
            columns: The n decoded values of each field, with None for null or a missing field.

        Returns:
            The result as in `condition` or `number`, with False or NaN for a record that cannot be
            judged, and a dict from the number of such a record to the detail of its reject.
        """
        kinds = {name: list(map(_json_kind, columns[name])) for name in self.fields}
        groups: dict[tuple[str, ...], list[int]] = {}
        for i, kinds_of_record in enumerate(zip(*kinds.values(), strict=True)):
            groups.setdefault(kinds_of_record, []).append(i)
        n_rows = _length(columns)
        compute = self.condition if self.wanted == TRUTH else self.number
        result = np.zeros(n_rows, bool) if self.wanted == TRUTH else np.full(n_rows, math.nan)
        bad: dict[int, str] = {}
        for kinds_of_group, rows in groups.items():
            of_group = dict(zip(self.fields, kinds_of_group, strict=True))
            try:
                accepted = {name: _ACCEPTED.get(kind, kind) for name, kind in of_group.items()}
                expect(self.tree, kind_of(self.tree, accepted), self.wanted)
            except ExpressionFault as fault:
                bad |= dict.fromkeys(rows, fault.message)
                continue
            arrays = {
                name: _rows().json_column(kind, [columns[name][i] for i in rows])
                for name, kind in of_group.items()
            }
            result[rows] = compute(arrays)
        return result, bad

    def bounds(self) -> tuple[float, float]:
        """Return the smallest and the largest number that any record can have.

        An end that does not follow from the expression is infinite.

        Example:
            `number("clip(score, 0, 4) / 2", ("repeat",)).bounds()` is (0.0, 2.0).
        """
        low, high = self._range({})[:2]
        return (
            -math.inf if low is None else float(low),
            math.inf if high is None else float(high),
        )

    def may_hold(self, ranges: Mapping[str, Range]) -> bool:
        """Return whether a condition may be true for a record whose fields have these ranges.

        Args:
            ranges: Range of each field. A field that is not in it can have any value.
        """
        found = self._range(ranges)
        return found.value and found.high is not False

    def _range(self, ranges: Mapping[str, Range]) -> Range:
        return range_of(self.tree, ranges)

    def _values(self, columns: Mapping[str, Any], n_rows: int) -> tuple[Any, np.ndarray]:
        arrays = {name: _rows().whole(columns[name]) for name in self.fields}
        values, valid = _rows().values_of(self.tree, arrays)[:2]
        return (
            None if values is None else np.broadcast_to(values, n_rows),
            np.broadcast_to(valid, n_rows),
        )

    def __str__(self) -> str:
        return f"{_dotted(self.key)} = {self.text!r:.500}"


def condition(text: str, key: tuple[str | int, ...]) -> Expression:
    """Return the condition that a recipe's key gives.

    Args:
        text: The expression.
        key: Path of the key, such as ("sources", 0, "where").

    Raises:
        RecipeError: If the text is not a condition. The message names the key and the place.
    """
    return _parsed(text, key, TRUTH)


def number(text: str, key: tuple[str | int, ...]) -> Expression:
    """Return the number that a recipe's key gives; see `condition`."""
    return _parsed(text, key, NUMBER)


def _parsed(text: str, key: tuple[str | int, ...], wanted: str) -> Expression:
    try:
        tree = parse(text)
        expect(tree, kind_of(tree, {}), wanted)
        fields = tuple(dict.fromkeys(field.name for field in fields_of(tree)))
        if not fields:
            raise ExpressionFault("no field of the record is in the expression", 0)
    except ExpressionFault as fault:
        place = "" if fault.at is None else f"character {fault.at + 1}: "
        hint = f"\nhint: {fault.advice}" if fault.advice else ""
        message = f"{_dotted(key)} = {text!r:.500}: {place}{fault.message}{hint}"
        raise RecipeError(message, key) from None
    return Expression(
        key, text, wanted, tree, tuple(dict.fromkeys(f.name for f in fields_of(tree)))
    )


def _rows() -> Any:
    """Return `rows.py`, which imports pyarrow. Most recipes need neither."""
    return import_module("packprep.sources.expressions.rows")


def _length(columns: Mapping[str, Any]) -> int:
    return len(next(iter(columns.values()), ()))


def _dotted(key: tuple[str | int, ...]) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in key)
    return "".join(parts).removeprefix(".")


_INTEGER, _LARGE, _FLOAT = "an integer", "a large integer", "a float"
_ACCEPTED = {_INTEGER: NUMBER, _LARGE: NUMBER, _FLOAT: NUMBER}
"""Kinds of JSON numbers. Each has its own Arrow type, and operators accept all."""
_KINDS: Mapping[type, str] = {
    type(None): NULL,
    bool: TRUTH,
    str: TEXT,
    float: _FLOAT,
    list: "a list",
    dict: "an object",
}


def _json_kind(value: Any) -> str:
    if type(value) is not int:
        return _KINDS[type(value)]
    if -(1 << 63) <= value < 1 << 63:
        return _INTEGER
    return _LARGE if 0 <= value < 1 << 64 else _FLOAT
