"""What an objective is, and what it is given. A segment's slots are always `[bos]? [mode]? body [eos]?`.

bos, mode and eos, labels and loss of next-token kinds, prefixes and headers are written in one place (`building/render.py`);
an objective says how many slots its body takes (the length law), writes the body, and restores the tokens from it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from packprep.errors import RecipeError


@dataclass(frozen=True)
class Parameter:
    """One key of `[[tasks]]` that an objective reads: its name, default (which gives the type), range and meaning."""

    name: str
    default: Any
    meaning: str
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    high_open: bool = False
    choices: tuple[str, ...] = ()

    def range_text(self) -> str:
        """The feasible values in words, for messages and the docs."""
        if self.choices:
            return " | ".join(self.choices)
        if isinstance(self.default, bool):
            return "true | false"
        if self.low is None and self.high is None:
            return ""
        left = "(" if self.low_open or self.low is None else "["
        right = ")" if self.high_open or self.high is None else "]"
        low = "−∞" if self.low is None else f"{self.low:g}"
        high = "∞" if self.high is None else f"{self.high:g}"
        return f"{left}{low}, {high}{right}"

    def accept(self, value: Any, where: str) -> Any:
        """`value` in the parameter's type; RecipeError with the feasible range if it cannot be used."""
        kind = type(self.default)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise RecipeError(f"{where}.{self.name} = {value!r}: expected {_kind_names[kind]} ({self.range_text()})")
        inside = not self.choices or value in self.choices
        if kind in (int, float) and inside:
            inside = (
                (self.low is None or value > self.low or (value == self.low and not self.low_open))
                and (self.high is None or value < self.high or (value == self.high and not self.high_open))
                and np.isfinite(value)
            )
        if not inside:
            raise RecipeError(f"{where}.{self.name} = {value!r}: must be in {self.range_text()}")
        return value


_kind_names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


@dataclass(frozen=True)
class Ids:
    """The token ids that objectives write, resolved once per build: roles (−1 where a tokenizer has none) and sentinels."""

    vocab_size: int
    pad: int
    bos: int
    eos: int
    mask: int
    sentinels: np.ndarray  # int32[k]


@dataclass(frozen=True)
class Task:
    """An objective with its parameters, its weight in the mix and its ids."""

    name: str
    objective: "Objective"
    weight: float
    parameters: Mapping[str, Any]
    mode_token: int  # −1: none
    ids: Ids

    @property
    def mode(self) -> int:
        """How many slots the mode token takes: 0 or 1."""
        return int(self.mode_token >= 0)

    def slots(self, n: np.ndarray, bos: np.ndarray, eos: np.ndarray, key: np.ndarray) -> np.ndarray:
        """int64[m]: the exact number of slots of segments with n content tokens (int64[m]). bos, eos: 0 or 1."""
        return self.objective.body_slots(self, n, key) + bos + eos + self.mode

    def capacity(self, slots: int, bos: int, eos: int) -> int:
        """The largest number of content tokens that fits into `slots` slots whatever will be drawn; 0 if none does."""
        room = slots - bos - eos - self.mode
        low, high = 0, max(room, 0)  # a body is never shorter than its tokens
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.objective.most_body_slots(self, middle) <= room else (low, middle - 1)
        return min(low, self.objective.most_tokens(self)) if self.objective.most_tokens else low


class Columns(NamedTuple):
    """Segments of one task, one array a column, [m] each."""

    begin: np.ndarray  # int64: index of the first content token in the flat array of tokens
    n: np.ndarray  # int64: content tokens
    key: np.ndarray  # uint64
    body: np.ndarray  # int64: index of the body's first slot in the flat rows


class Slots(NamedTuple):
    """The flat rows that render writes, [rows · seq_length] each."""

    tokens: np.ndarray  # uint16 or int32


@dataclass(frozen=True)
class Objective:
    """One way to turn a segment's tokens into slots.

    attention        "causal": every slot sees what lies before it; "prefix": the slots of the prefix see each other both
                     ways too. A prefix is bos + mode + `body_prefix`.
    label_alignment  "next_token": the prediction at a slot is of the next one.
    constant         the body's slots are n plus a constant: segments may be cut anywhere (`concat`).
    parameters       the keys of `[[tasks]]` that it reads.
    body_slots       (task, n int64[m], key uint64[m]) → int64[m], the length law.
    most_body_slots  (task, n int) → int, the most that the law can give for n tokens; never falls when n grows.
    render           (task, columns, tokens, slots): writes the bodies. tokens: the flat content tokens.
    restore          (task, columns, rows, out): the inverse; reads the bodies from flat rows and writes the content tokens to
                     out[begin : begin + n] of each segment. Gives bool[m]: whether a body had the form that its header says.
    body_prefix      (task, n, key) → int64[m]: the body's slots that belong to the prefix.
    most_tokens      (task) → int: the longest segment apart from the row's length.
    sentinels        (parameters, n int) → int: how many sentinels a segment of n tokens can take.
    roles            (parameters) → the roles that must be in the vocabulary.
    forecast         (task, n int) → figures that the plan prints of a segment of n tokens: name → (wanted, realised).
    check            (parameters, where): RecipeError for parameters that do not go together.
    """

    name: str
    attention: str
    label_alignment: str
    constant: bool
    parameters: tuple[Parameter, ...]
    body_slots: Callable[[Task, np.ndarray, np.ndarray], np.ndarray]
    most_body_slots: Callable[[Task, int], int]
    render: Callable[[Task, Columns, np.ndarray, Slots], None]
    restore: Callable[[Task, Columns, np.ndarray, np.ndarray], np.ndarray]
    body_prefix: Callable[[Task, np.ndarray, np.ndarray], np.ndarray] | None = None
    most_tokens: Callable[[Task], int] | None = None
    sentinels: Callable[[Mapping[str, Any], int], int] | None = None
    roles: Callable[[Mapping[str, Any]], frozenset[str]] | None = None
    forecast: Callable[[Task, int], dict[str, tuple[float, float]]] | None = None
    check: Callable[[Mapping[str, Any], str], None] | None = None
