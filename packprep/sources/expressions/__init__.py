"""Expressions over the fields of a record, such as `score >= 3 and lang in ('de', 'fr')`.

A condition selects documents, and a number says how often a document is used. `parser.py` defines
the forms, and `rows.py` the meaning of null. The result for a record depends only on this record.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from packprep.errors import RecipeError, SourceError
from packprep.sources.expressions.kinds import NUMBER, TRUTH, expect, kind_of
from packprep.sources.expressions.parser import ExpressionFault, Node, fields_of, parse
from packprep.sources.expressions.ranges import Range, range_of

__all__ = ["Expression", "Range"]


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

    @classmethod
    def parse_condition(cls, text: str, key: tuple[str | int, ...]) -> "Expression":
        """Return the condition that a recipe's key gives.

        Args:
            text: The expression.
            key: Path of the key, such as ("sources", 0, "where").

        Raises:
            RecipeError: If the text is not a condition, or reads no field. The message names the
                key and the place in the text.
        """
        return cls._parsed(text, key, TRUTH)

    @classmethod
    def parse_number(cls, text: str, key: tuple[str | int, ...]) -> "Expression":
        """Return the number that a recipe's key gives; see `parse_condition`."""
        return cls._parsed(text, key, NUMBER)

    @classmethod
    def _parsed(cls, text: str, key: tuple[str | int, ...], wanted_kind: str) -> "Expression":
        try:
            tree = parse(text)
            expect(tree, kind_of(tree, {}), wanted_kind)
            fields = tuple(dict.fromkeys(field.name for field in fields_of(tree)))
            if not fields:
                raise ExpressionFault("no field of the record is in the expression", 0)
        except ExpressionFault as fault:
            place = "" if fault.at is None else f"character {fault.at + 1}: "
            hint = f"\nhint: {fault.advice}" if fault.advice else ""
            message = f"{_dotted(key)} = {text!r:.500}: {place}{fault.message}{hint}"
            raise RecipeError(message, key) from None
        return cls(key, text, wanted_kind, tree, fields)

    def fault(self, types: Mapping[str, Any]) -> str:
        """Return why values of these types cannot be used, in ASCII, or "".

        Args:
            types: Arrow type of each field. A JSON record has null for a missing field, and a list
                type or an object type for a value that only "is null" accepts.
        """
        try:
            kinds = {name: _rows().kind_of_type(types[name]) for name in self.fields}
            expect(self.tree, kind_of(self.tree, kinds), self.wanted)
            _rows().check_times(self.tree, types)
        except ExpressionFault as fault:
            return fault.message
        return ""

    def check(self, place: str, types: Mapping[str, Any], all_types: Mapping[str, Any]) -> None:
        """Check that a table has the fields, with types that the expression accepts.

        Args:
            place: Path or URL of the file, for messages.
            types: Arrow type of each field of the expression that the table has.
            all_types: Arrow type of every field of the table, to list them in a message.

        Raises:
            SourceError: If a field is missing, or if its type is wrong.
        """
        missing = [name for name in self.fields if name not in types]
        problem = f"there is no field {missing[0]!r}" if missing else self.fault(types)
        if problem:
            fields = [f"{name!r} ({kind})" for name, kind in list(all_types.items())[:50]]
            raise SourceError(
                f"{place}: {_dotted(self.key)} = {self.text!r:.500}: {problem}; the fields are"
                f" {', '.join(fields) or 'none'}\n"
                "hint: correct the expression, or make the file a source of its own"
            )

    def condition(self, columns: Mapping[str, Any]) -> np.ndarray:
        """Return which rows meet a condition, bool[n]. Null is False.

        Args:
            columns: Arrow array of each field, of a type for which `fault` returns "".
        """
        values, valid = self._values(columns)
        return np.zeros_like(valid) if values is None else values & valid

    def number(self, columns: Mapping[str, Any]) -> np.ndarray:
        """Return the number for each row, float64[n]. Null is NaN.

        Args:
            columns: Arrow array of each field, of a type for which `fault` returns "".
        """
        values, valid = self._values(columns)
        return np.where(valid, math.nan if values is None else values, math.nan).astype(np.float64)

    def bounds(self) -> tuple[float, float]:
        """Return the smallest and the largest number that any record can have.

        An end that does not follow from the expression is infinite.

        Example:
            The bounds of `clip(score, 0, 4) / 2` are (0.0, 2.0).
        """
        low, high = range_of(self.tree, {})[:2]
        return (
            -math.inf if low is None else float(low),
            math.inf if high is None else float(high),
        )

    def may_hold(self, ranges: Mapping[str, Range]) -> bool:
        """Return whether a record may meet a condition, or have a number above 0.

        Args:
            ranges: Range of each field of the record. Without a range, it can have any value.
        """
        value_range = range_of(self.tree, ranges)
        return value_range.value and (value_range.high is None or value_range.high > 0)

    def _values(self, columns: Mapping[str, Any]) -> tuple[Any, np.ndarray]:
        arrays = {name: _rows().whole(columns[name]) for name in self.fields}
        try:
            if problem := self.fault({name: array.type for name, array in arrays.items()}):
                raise ExpressionFault(problem)
            values, valid = _rows().values_of(self.tree, arrays)[:2]
        except ExpressionFault as fault:
            raise SourceError(
                f"{_dotted(self.key)} = {self.text!r:.500}: {fault.message}"
            ) from None
        n_rows = len(arrays[self.fields[0]])
        return (
            None if values is None else np.broadcast_to(values, n_rows),
            np.broadcast_to(valid, n_rows),
        )


def _rows() -> Any:
    """Return `rows.py`, which imports pyarrow. Most recipes do not need it."""
    return import_module("packprep.sources.expressions.rows")


def _dotted(key: tuple[str | int, ...]) -> str:
    parts = (f"[{key_part}]" if isinstance(key_part, int) else f".{key_part}" for key_part in key)
    return "".join(parts).removeprefix(".")
