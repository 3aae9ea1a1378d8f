"""What an objective is, and what it is given. A segment's slots are always `[bos]? [mode]? body
[eos]?`.

bos, mode and eos, labels and loss of next-token kinds, prefixes and headers are written in one
place (`building/render.py`); an objective says how many slots its body takes (the length law),
writes the body, and restores the tokens from it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from packprep.dataset.attention import RULES
from packprep.dataset.epochs.noise import Noised, NoiseIds, ordinary_ids
from packprep.dataset.manifest import Parameter
from packprep.dataset.segments import Bodies
from packprep.forking import lazy

__all__ = ["Bodies", "BodySlots", "Ids", "Objective", "Parameter", "Task"]


@dataclass(frozen=True)
class Ids:
    """The token ids that objectives write, resolved once per build: roles (−1 where a tokenizer has
    none) and sentinels."""

    vocab_size: int
    pad: int
    bos: int
    eos: int
    mask: int
    sentinels: np.ndarray  # int32[k]
    fim: tuple[int, int, int] = (-1, -1, -1)  # prefix, middle, suffix
    special: tuple[int, ...] = ()  # ids that are no ordinary text
    continues: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8), repr=False)
    """uint8[vocab_size]: 1 where a token begins inside a character of UTF-8; empty: none does."""

    @lazy
    def for_noise(self) -> NoiseIds:
        """The ids that in-place noise writes."""
        return NoiseIds(self.mask, *ordinary_ids(self.vocab_size, np.array(self.special, np.int64)))


@dataclass(frozen=True)
class Task:
    """An objective with its parameters, its weight in the mix and its ids."""

    name: str
    objective: "Objective"
    weight: float
    parameters: Mapping[str, Any]
    mode_token: int  # −1: none
    ids: Ids
    # what the plan worked out once: thresholds, …
    resolved: Mapping[str, Any] = field(default_factory=dict)
    keeps_prefix: bool = (
        False  # whether prefixes are as long in every epoch: where rows have two sides
    )

    @property
    def mode(self) -> int:
        """How many slots the mode token takes: 0 or 1."""
        return int(self.mode_token >= 0)

    @property
    def in_place(self) -> bool:
        """Whether tokens are noised where they stand, and it is they that are predicted."""
        return self.objective.noise is not None

    @property
    def shift(self) -> bool:
        """Whether, in place, it is the next slot's token that is predicted."""
        return bool(self.parameters.get("shift", False))

    @property
    def label_alignment(self) -> str:
        """ "next_token", "same_slot" or "next_slot"."""
        return "next_token" if not self.in_place else "next_slot" if self.shift else "same_slot"

    def slots(self, bodies: Bodies, bos: np.ndarray, eos: np.ndarray) -> np.ndarray:
        """int64[m]: the exact number of slots of segments. bos, eos: int64[m], 0 or 1."""
        return self.objective.copies * (self.body_slots(bodies) + bos + eos + self.mode)

    def body_slots(self, bodies: Bodies) -> np.ndarray:
        """int64[m]: the slots of the bodies alone, once."""
        return (
            bodies.n
            if self.objective.body_slots is None
            else self.objective.body_slots(self, bodies)
        )

    def most_body_slots(self, n: int) -> int:
        """The most slots that a body of n tokens can take."""
        return (
            n if self.objective.most_body_slots is None else self.objective.most_body_slots(self, n)
        )

    def capacity(self, slots: int, bos: int, eos: int, sides: tuple[int, int] | None = None) -> int:
        """The largest number of content tokens that fits into `slots` slots whatever will be drawn;
        0 if none does.

        sides: the slots of the prefix and of what follows it, into which they have to fit, too.
        """
        room = slots // self.objective.copies - bos - eos - self.mode
        low, high = 0, max(room, 0)  # a body is never shorter than its tokens
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.most_body_slots(middle) <= room
            if fits and sides is not None and self.objective.most_sides is not None:
                prefix, behind = self.objective.most_sides(self, middle)
                fits = prefix + bos + self.mode <= sides[0] and behind + eos <= sides[1]
            low, high = (middle, high) if fits else (low, middle - 1)
        return min(low, self.objective.most_tokens(self)) if self.objective.most_tokens else low


class TaskTable(NamedTuple):
    """Properties of a plan's tasks, one array entry per task.

    `table.in_place[segment_task]` gives the property for each segment. All arrays have shape
    [tasks].
    """

    in_place: np.ndarray  # bool: tokens are noised and predicted where they stand
    shift: np.ndarray  # bool: in place, the next slot's token is predicted
    mode: np.ndarray  # int64: slots of the mode token, 0 or 1
    mode_token: np.ndarray  # int64: its id, or -1
    copies: np.ndarray  # int64: how often a segment holds its tokens, 2 where x_t and x_0 stand
    block_length: np.ndarray  # int64: slots of a block, 0 without blocks
    input_eos: np.ndarray  # int64: slots of an eos that ends the inputs, 0 or 1
    added: np.ndarray  # str: kind of the slots that a body has beyond its tokens

    @classmethod
    def of(cls, tasks: Sequence[Task]) -> "TaskTable":
        """Return the table of some tasks."""
        return cls(
            np.array([task.in_place for task in tasks], np.bool_),
            np.array([task.shift for task in tasks], np.bool_),
            np.array([task.mode for task in tasks], np.int64),
            np.array([task.mode_token for task in tasks], np.int64),
            np.array([task.objective.copies for task in tasks], np.int64),
            np.array([task.parameters.get("block_length", 0) for task in tasks], np.int64),
            np.array([int(task.parameters.get("eos_after_inputs", False)) for task in tasks]),
            np.array([task.objective.added for task in tasks]),
        )


class BodySlots(NamedTuple):
    """Segments of one task that are written or read, one array a column, [m] each."""

    begin: np.ndarray  # int64: index of the first token in the flat array of tokens
    bodies: Bodies
    at: np.ndarray  # int64: index of the body's first slot in the flat rows


@dataclass(frozen=True)
class Objective:
    """One way to turn a segment's tokens into slots.

    attention        "causal": every slot sees what lies before it; "prefix": the slots of the prefix (bos, mode and
                     `body_prefix`) see each other both ways too; "bidirectional": all do;
                     "block_diffusion": its own rule, of a segment that stands twice.
                     dataset/attention.py has the rules.
    parameters       the keys of `[[tasks]]` that it reads.
    constant         the body's slots are n plus a constant: segments may be cut anywhere (`concat`).
    supervised       whether documents with loss_spans or messages may draw it.

    Next-token kinds, whose prediction at a slot is of the next one, have
    body_slots       (task, bodies) → int64[m], the length law; None: n.
    most_body_slots  (task, n int) → int, the most that the law can give for n tokens; never falls when n grows.
    most_sides       (task, n int) → (int, int), the most slots of the body that belong to the prefix, and that do not, for n
                     tokens; neither falls when n grows. None: no prefix is trained from, so no row
                     has two sides.
    render           (task, columns, tokens, rows): writes the bodies. tokens: the flat tokens; rows: the flat rows.
    restore          (task, columns, rows, out): the inverse: reads the bodies from the flat rows and writes the tokens to
                     out[begin : begin + n] of each segment. Gives bool[m]: whether a body had the
                     form that its header says.
    body_prefix      (task, bodies) → int64[m]: the body's slots that belong to the prefix.
    token_slots      (task, bodies) → int64[m, 2]: pivot p and shift s: token i stands at body slot i, or i + s from p on;
                     for kinds that supervised documents may draw. None: no shift.

    In-place kinds, whose prediction at a slot is of that slot's original token, or the next one's
    where their tasks have the parameter shift, keep their tokens in place and have
    noise            a law of `dataset/epochs/noise.py`, which redraw uses too, with a compiled writer of `noising.py`.
    mean_weight      (task) → float: the expected loss weight of a trained slot; None: 1.
    resolve          (parameters, ids) → what the plan works out once and stores: thresholds, rates.

    most_tokens      (task) → int: the longest segment apart from the row's length.
    sentinels        (parameters, n int) → int: how many sentinels a segment of n tokens can take.
    added            what the slots are that the body has beyond its tokens, in the ledger: "sentinel" or "fim".
    roles            (parameters) → the roles that must be in the vocabulary.
    forecast         (task, n int) → figures that the plan prints of a segment of n tokens: name → (wanted, realised).
    check            (parameters, where): RecipeError for parameters that do not go together.
    """

    name: str
    attention: str
    parameters: tuple[Parameter, ...] = ()
    constant: bool = False
    supervised: bool = False
    body_slots: Callable[[Task, Bodies], np.ndarray] | None = None
    most_body_slots: Callable[[Task, int], int] | None = None
    render: Callable[[Task, BodySlots, np.ndarray, np.ndarray], None] | None = None
    restore: Callable[[Task, BodySlots, np.ndarray, np.ndarray], np.ndarray] | None = None
    most_sides: Callable[[Task, int], tuple[int, int]] | None = None
    body_prefix: Callable[[Task, Bodies], np.ndarray] | None = None
    token_slots: Callable[[Task, Bodies], np.ndarray] | None = None
    noise: Callable[..., Noised] | None = None
    mean_weight: Callable[[Task], float] | None = None
    resolve: Callable[[Mapping[str, Any], Ids], dict[str, Any]] | None = None
    most_tokens: Callable[[Task], int] | None = None
    sentinels: Callable[[Mapping[str, Any], int], int] | None = None
    added: str = "sentinel"
    roles: Callable[[Mapping[str, Any]], frozenset[str]] | None = None
    forecast: Callable[[Task, int], dict[str, tuple[float, float]]] | None = None
    check: Callable[[Mapping[str, Any], str], None] | None = None

    @property
    def copies(self) -> int:
        """How often bos, mode, body and eos are written: 2 for [x_t ; x_0]."""
        return RULES[self.attention].copies

    @property
    def later(self) -> dict[str, Any]:
        """The defaults of the parameters that joined later."""
        return {
            parameter.name: parameter.default for parameter in self.parameters if parameter.later
        }
