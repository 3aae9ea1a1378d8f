"""Determine how many passes use a document, from the fields of its record.

The number r of a document is a real number of at least 0. The condition `where` of its source gives
0 or 1, an expression in `repeat` gives a number, and r is their product. The document is in pass p
if p < ⌊r⌋, and if p = ⌊r⌋ and u < r − ⌊r⌋. u is a uniform random number of the document, keyed by
its source, file and position. So the passes of a document depend neither on splits and shards nor
on other documents.

    r = 2.3     pass 0    1    2          3
                used      yes  yes  if u < 0.3   no

A document in no pass is filtered. It is counted, but it is not a reject.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from packprep.errors import RecipeError
from packprep.randomness import PASSES, bits64, segment_key
from packprep.recipe import Source
from packprep.sources.expressions import Expression, Range

MOST_PASSES = 1000
"""Maximum number of passes that an expression may ask for, as for a number in `repeat`."""


class FieldColumns(NamedTuple):
    """Fields of some of n consecutive documents.

    JSON records may have values of several types in a field. Records with equal types are together
    in one `FieldColumns`.

    Attributes:
        rows: int64[k], numbers of the documents, 0 … n − 1.
        columns: Maps the name of a field to its values, a `pyarrow.Array` with k entries.
    """

    rows: np.ndarray
    columns: Mapping[str, Any]


ReadFields = Callable[[Sequence[str]], Sequence[FieldColumns]]
"""Function (names of fields) → fields of n documents, without those of unreadable records."""


@dataclass(frozen=True)
class Passes:
    """The expressions of a source that determine how many passes use a document.

    Attributes:
        where: The condition, or None.
        repeat: The number of passes, or None if the recipe's `repeat` is a number.
        most: Upper limit for the number of passes. 1.0 if `repeat` is None.
    """

    where: Expression | None
    repeat: Expression | None
    most: float

    @classmethod
    def of(cls, source: Source, index: int) -> "Passes | None":
        """Return the expressions of a recipe's source, or None if it has none.

        Args:
            source: The source.
            index: Index of the source, for messages.

        Raises:
            RecipeError: If an expression is invalid, or if `repeat` has no upper limit.
        """
        key_path = ("sources", index)
        if source.max_repeat is not None and not isinstance(source.repeat, str):
            raise RecipeError(
                f"sources[{index}].max_repeat limits a repeat that is an expression, but repeat is"
                f" {source.repeat:g}\n"
                "hint: leave max_repeat out",
                (*key_path, "max_repeat"),
            )
        if source.where is None and not isinstance(source.repeat, str):
            return None
        where = (
            None
            if source.where is None
            else Expression.parse_condition(source.where, (*key_path, "where"))
        )
        if not isinstance(source.repeat, str):
            return cls(where, None, 1.0)
        if _is_number(source.repeat):
            raise RecipeError(
                f"sources[{index}].repeat = {source.repeat!r} is a number in quotes\n"
                f"hint: write {source.repeat.strip()}, without quotes",
                (*key_path, "repeat"),
            )
        repeat = Expression.parse_number(source.repeat, (*key_path, "repeat"))
        return cls(where, repeat, _most(repeat, source.max_repeat))

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """Return the names of the fields that the expressions read."""
        return tuple(
            dict.fromkeys(name for expression in self._expressions for name in expression.fields)
        )

    @property
    def uses(self) -> int:
        """Return the number of passes that the expressions may ask for, at least 1."""
        return math.ceil(self.most)

    def shares(self, of_passes: np.ndarray) -> list[float] | None:
        """Return the text bytes of each pass relative to pass 0. None if `repeat` is a number.

        `of_passes` is float64[uses], the text bytes of each pass.
        """
        if self.repeat is None:
            return None
        shares: list[float] = np.minimum(of_passes / max(float(of_passes[0]), 1e-9), 1.0).tolist()
        return shares

    @property
    def _expressions(self) -> list[Expression]:
        return [expression for expression in (self.where, self.repeat) if expression is not None]

    @property
    def keys_keep(self) -> str:
        """Return the keys and their verb: "where keeps", or "where and repeat keep"."""
        keys = [str(one.key[-1]) for one in self._expressions]
        return f"{' and '.join(keys)} {'keep' if len(keys) > 1 else 'keeps'}"

    def __str__(self) -> str:
        return " and ".join(
            f"{expression.key[-1]} = {expression.text!r:.200}" for expression in self._expressions
        )

    def check(self, place: str, types: Mapping[str, Any], all_types: Mapping[str, Any]) -> None:
        """Check that the expressions accept the fields of a table, as `Expression.check`."""
        for expression in self._expressions:
            own_types = {name: types[name] for name in expression.fields if name in types}
            expression.check(place, own_types, all_types)

    def may_use(self, ranges: Mapping[str, Range]) -> bool:
        """Return whether a pass may use a document whose fields have these ranges."""
        return all(expression.may_hold(ranges) for expression in self._expressions)

    def numbers(self, count: int, read_fields: ReadFields) -> tuple[np.ndarray, dict[int, str]]:
        """Return the number r of each document, and the documents that cannot be judged.

        A document that is unreadable or cannot be judged has the number 1, because it is rejected
        once.

        Args:
            count: Number of documents.
            read_fields: Returns the fields of these documents.

        Returns:
            float64[count], and a dict from the number of a document that cannot be judged to the
            detail of its reject.
        """
        numbers, bad = np.ones(count), dict[int, str]()
        # Each group of documents has one type per field, so it is accepted or refused as a whole.
        for rows, columns in read_fields(self.fields):
            types = {name: column.type for name, column in columns.items()}
            if problem := self._problem(types):
                bad |= dict.fromkeys(rows.tolist(), problem)
                continue
            if self.where is not None:
                numbers[rows] = self.where.condition(columns)
            if self.repeat is not None:
                asked = np.nan_to_num(self.repeat.number(columns), nan=0.0, posinf=self.most)
                numbers[rows] *= np.clip(asked, 0.0, self.most)
        return numbers, bad

    def _problem(self, types: Mapping[str, Any]) -> str:
        """Return why the expressions do not accept fields of these Arrow types, or ""."""
        faults = ((expression.key[-1], expression.fault(types)) for expression in self._expressions)
        return next((f"{key}: {fault}" for key, fault in faults if fault), "")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text.strip()[0] in "+-.0123456789"  # A field may have the name inf or nan.


def _most(repeat: Expression, limit: float | None) -> float:
    """Return the upper limit for the number of passes.

    It is the bound that follows from the expression, or `limit`, if `limit` is lower.

    Raises:
        RecipeError: If there is no upper limit, if it is not above 0, or if it is too large.
    """
    where = f"sources[{repeat.key[1]}].repeat = {repeat.text!r:.500}"
    upper = min(repeat.bounds()[1], np.inf if limit is None else limit)
    if upper > MOST_PASSES:
        problem = "has no upper limit" if upper == np.inf else f"may be {upper:g}"
        raise RecipeError(
            f"{where} {problem}, but a document has at most {MOST_PASSES} passes\n"
            "hint: set max_repeat, or write clip(…, 0, 4)",
            repeat.key,
        )
    if upper <= 0:
        raise RecipeError(
            f"{where} is never above 0, so no document would be used\n"
            "hint: correct the expression, or leave the source out",
            repeat.key,
        )
    return float(upper)


class ByFields:
    """A selector of the documents that one pass takes by the fields of their records.

    Attributes:
        passes: The expressions.
        sample: Function (file, positions) → bool[n] that gives the documents to choose from. None
            means all documents.
        counts: Maps a number of passes to the number of documents with this many passes. It counts
            the documents that were selected from so far, in pass 0. Entry 0 counts the filtered
            documents.
        bad: Maps the position of each document that cannot be judged to the detail of its reject.
            It has the documents of the last call.
    """

    def __init__(
        self,
        passes: Passes,
        use: int,
        key_of: Callable[[int], np.uint64],
        sample: Callable[[int, np.ndarray], np.ndarray] | None = None,
    ):
        """Create a selector.

        Args:
            passes: The expressions.
            use: Number of the pass.
            key_of: Function (file) → random key of the file.
            sample: As the attribute.
        """
        self.passes, self.sample = passes, sample
        self.counts: Counter[int] = Counter()
        self.bad: dict[int, str] = {}
        self._use, self._key_of = use, key_of

    def __call__(
        self, file: int, positions: np.ndarray, read_fields: ReadFields, is_counted: np.ndarray
    ) -> np.ndarray:
        """Return which documents the pass takes, bool[n].

        Args:
            file: Index of the documents' file.
            positions: int64[n], positions of the documents.
            read_fields: Returns the fields of the documents.
            is_counted: bool[n], which of the documents to count.
        """
        n_passes = self.drawn(file, positions, self.numbers(positions, read_fields))
        if self.sample is not None:
            is_sampled = self.sample(file, positions)
            # Documents outside of `sample` are in no pass and are not counted.
            n_passes, is_counted = np.where(is_sampled, n_passes, 0), is_counted & is_sampled
        if self._use == 0:
            numbers, counts = np.unique(n_passes[is_counted], return_counts=True)
            self.counts.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))
        # If `repeat` is a number, each of its passes takes all documents that meet the condition.
        return n_passes > (0 if self.passes.repeat is None else self._use)

    def leave_out(self, file: int, positions: np.ndarray) -> None:
        """Count documents that no pass uses, without reading their fields.

        The arguments are as in a call. All documents are in the work range.
        """
        if self._use == 0:
            sampled = positions if self.sample is None else positions[self.sample(file, positions)]
            self.counts[0] += len(sampled)

    def drawn(self, file: int, positions: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return how many passes use each document, int64[n].

        `numbers` is the result of `numbers`. The other arguments are as in a call.
        """
        n_passes = np.floor(numbers)
        if self.passes.repeat is not None:
            key = segment_key(self._key_of(file), positions, 0, 0)
            # Scaling by 2⁵³ is exact in float64, so the comparison is exact too.
            u = (bits64(key, PASSES) >> np.uint64(11)).astype(np.float64)
            n_passes += u < (numbers - n_passes) * 2.0**53
        return n_passes.astype(np.int64)

    def numbers(self, positions: np.ndarray, read_fields: ReadFields) -> np.ndarray:
        """Return the number r of each document, float64[n], and set `bad`."""
        numbers, bad = self.passes.numbers(len(positions), read_fields)
        self.bad = {int(positions[i]): detail for i, detail in bad.items()}
        return numbers
