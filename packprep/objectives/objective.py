"""The interface of objectives. A segment's slots are always `[bos]? [mode]? body [eos]?`.

An objective gives the number of slots of its body (the length formula), writes the body, and
restores the tokens from it. `building/render.py` writes bos, mode token, eos, prefixes, headers,
and the labels and loss of next-token objectives.
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
    """The token ids that objectives write.

    bos, eos, mask and the ids in `fim` are −1 if the tokenizer has no such token.

    Attributes:
        vocab_size: Number of ids.
        pad: Id of the padding. It always exists.
        bos: Id that begins a document.
        eos: Id that ends a segment.
        mask: Id of the mask.
        sentinels: int32[k], ids that replace spans.
        fim: Ids of the tokens that fill_in_the_middle writes before the prefix, the middle and the
            suffix.
        special: Ids that are not ordinary text.
        continues: uint8[vocab_size], 1 for a token that begins inside a UTF-8 character. It is
            empty if the vocabulary has no such token.
    """

    vocab_size: int
    pad: int
    bos: int
    eos: int
    mask: int
    sentinels: np.ndarray
    fim: tuple[int, int, int] = (-1, -1, -1)
    special: tuple[int, ...] = ()
    continues: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8), repr=False)

    @lazy
    def for_noise(self) -> NoiseIds:
        """Return the ids that same-position noise writes."""
        return NoiseIds(self.mask, *ordinary_ids(self.vocab_size, np.array(self.special, np.int64)))


@dataclass(frozen=True)
class Task:
    """One task of a recipe: an objective with its parameters, weight and ids.

    Attributes:
        name: The task's name in the recipe.
        objective: The task's objective.
        weight: The task's share of the segments, relative to the other tasks.
        parameters: All parameters of the objective, with defaults filled in.
        mode_token: Id of the mode token in the task's segments, or −1 without a mode token.
        ids: The ids that objectives write.
        resolved: Values that the plan computed once and stores, such as thresholds.
        keeps_prefix: Whether a segment's prefix has the same length in every epoch. Rows with an
            encoder and a decoder sequence need this.
    """

    name: str
    objective: "Objective"
    weight: float
    parameters: Mapping[str, Any]
    mode_token: int
    ids: Ids
    resolved: Mapping[str, Any] = field(default_factory=dict)
    keeps_prefix: bool = False

    @property
    def mode(self) -> int:
        """The number of slots of the mode token, 0 or 1."""
        return int(self.mode_token >= 0)

    @property
    def in_place(self) -> bool:
        """True for a same-position task: it noises tokens and predicts the original tokens."""
        return self.objective.noise is not None

    @property
    def shift(self) -> bool:
        """True if the label of a slot in a same-position task is the token of the next slot."""
        return bool(self.parameters.get("shift", False))

    @property
    def label_alignment(self) -> str:
        """The alignment of labels with slots: "next_token", "same_slot" or "next_slot"."""
        if not self.in_place:
            return "next_token"
        return "next_slot" if self.shift else "same_slot"

    def slots(self, bodies: Bodies, bos: np.ndarray, eos: np.ndarray) -> np.ndarray:
        """Return the exact number of slots of each segment.

        Args:
            bodies: The bodies of m segments.
            bos: int64[m], 1 for segments with a bos, otherwise 0.
            eos: int64[m], 1 for segments with an eos, otherwise 0.

        Returns:
            int64[m].
        """
        once = self.body_slots(bodies) + bos + eos + self.mode + bodies.fill
        return self.objective.copies * once

    def body_slots(self, bodies: Bodies) -> np.ndarray:
        """Return the number of slots of one copy of each body, int64[m]."""
        return (
            bodies.n
            if self.objective.body_slots is None
            else self.objective.body_slots(self, bodies)
        )

    def most_body_slots(self, n: int) -> int:
        """Return the most slots that a body of n tokens can take."""
        return (
            n if self.objective.most_body_slots is None else self.objective.most_body_slots(self, n)
        )

    def capacity(self, slots: int, bos: int, eos: int, sides: tuple[int, int] | None = None) -> int:
        """Return the most content tokens that always fit into a segment.

        The number does not depend on random draws: it is right for the longest possible body.

        Args:
            slots: Slots of the segment.
            bos: Slots of the segment's bos, 0 or 1.
            eos: Slots of the segment's eos, 0 or 1.
            sides: None, or the slots of the encoder and of the decoder sequence. The segment must
                fit into both sequences, and into `slots`.

        Returns:
            The number of tokens, 0 if no token fits.
        """
        body_slots = slots // self.objective.copies - bos - eos - self.mode
        low, high = 0, max(body_slots, 0)  # A body is never shorter than its tokens.
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.most_body_slots(middle) <= body_slots
            # In two sequences, bos and the mode token are in the encoder, and eos is in the
            # decoder.
            if fits and sides is not None and self.objective.most_sides is not None:
                prefix, continuation = self.objective.most_sides(self, middle)
                fits = prefix + bos + self.mode <= sides[0] and continuation + eos <= sides[1]
            low, high = (middle, high) if fits else (low, middle - 1)
        return min(low, self.objective.most_tokens(self)) if self.objective.most_tokens else low


class TaskTable(NamedTuple):
    """Arrays with the properties of a plan's tasks. Each array has shape [tasks].

    If `segment_task` has the task index of each segment, `table.in_place[segment_task]` has the
    property `in_place` of each segment.
    """

    in_place: np.ndarray  # bool: tokens are noised and predicted at the same position
    shift: np.ndarray  # bool: a same-position task predicts the token of the next slot
    mode: np.ndarray  # int64: slots of the mode token, 0 or 1
    mode_token: np.ndarray  # int64: id of the mode token, or -1
    copies: np.ndarray  # int64: copies of a segment's tokens, 2 for [x_t ; x_0]
    block_length: np.ndarray  # int64: slots of a block, 0 without blocks
    input_eos: np.ndarray  # int64: slots of an eos that ends the inputs, 0 or 1
    added: np.ndarray  # str: kind of the slots that a body has beyond its tokens

    @classmethod
    def of(cls, tasks: Sequence[Task]) -> "TaskTable":
        """Return the table of tasks, with one entry per task in each array."""
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
    """The bodies of m segments of one task, and the positions of their tokens and slots.

    `begin` has the index of each body's first token in the flat tokens. `at` has the index of its
    first slot in the flat rows. Both arrays are int64[m].
    """

    begin: np.ndarray  # int64: index of the first token in the flat array of tokens
    bodies: Bodies
    at: np.ndarray  # int64: index of the body's first slot in the flat rows


@dataclass(frozen=True)
class Objective:
    """One way to turn a segment's tokens into slots.

    Next-token objectives have `render` and `restore`, and predict the next token at each slot.
    Same-position objectives have `noise`. Their tokens keep their positions, and the label of a
    slot is its original token. In tasks with the parameter `shift`, the label is the original token
    of the next slot.

    Attributes:
        name: The name in recipes.
        attention: The attention pattern of the objective's segments. "causal"; "prefix", which is
            bidirectional in bos, mode token and the first `body_prefix` slots of the body;
            "bidirectional"; or "block_diffusion", for segments with two copies of their tokens.
        parameters: The keys of `[[tasks]]` that the objective reads.
        constant: Whether the number of a body's slots is its number of tokens plus a constant.
            Packing with "concat", which cuts documents at row ends, requires this.
        supervised: Whether documents with loss_spans or messages may use the objective. A function
            (parameters) → bool if this depends on the task's parameters.
        body_slots: (task, bodies) → int64[m], the number of slots of each body (the length
            formula). None: the number of tokens.
        most_body_slots: (task, n) → the most slots that a body of n tokens can have. The result
            must not decrease with n. None: n.
        render: (task, columns, tokens, rows) writes the bodies from the flat tokens to the flat
            rows.
        restore: (task, columns, rows, out) reads the bodies from the flat rows and writes each
            segment's tokens to out[begin : begin + n]. It returns bool[m], whether each body has
            the slots that `render` would write for its tokens.
        most_sides: (task, n) → (the most slots in the prefix, the most slots after the prefix) of a
            body of n tokens. Both numbers must not decrease with n. None: the objective does not
            support rows with an encoder and a decoder sequence.
        body_prefix: (task, bodies) → int64[m], the number of slots of each body that are in the
            prefix. None: 0.
        token_slots: (task, bodies) → int64[m, 2], the pivot and the shift of each body. Token i of
            the body is at slot i if i < pivot, otherwise at slot i + shift. Needed with
            `supervised` if the body has more slots than tokens. None: no shift.
        noise: Draws the noise and writes it to the rows. It is a schedule's `draw` in
            `dataset/epochs/noise.py`, with a compiled writer.
        mean_weight: (task) → the expected loss weight of a trained slot. None: 1.
        resolve: (parameters, ids) → values that the plan stores, such as thresholds.
        most_tokens: (task) → the most tokens that a segment can have, however long the rows are.
            None: no limit.
        sentinels: (parameters, n) → how many sentinels a segment of n tokens can use.
        added: "sentinel" or "fim". Under this name, the ledger counts the slots that a body has
            beyond its tokens.
        roles: (parameters) → the special tokens that the vocabulary must have.
        forecast: (task, n) → figures that the plan prints for segments of n tokens: name → (wanted,
            realised).
        check: (parameters, where) raises RecipeError for parameters that exclude each other.

    Example:
        An objective that copies tokens:

            def render(task, columns, tokens, rows):
                for begin, n, at in zip(columns.begin, columns.bodies.n, columns.at):
                    rows[at : at + n] = tokens[begin : begin + n]

            def restore(task, columns, rows, out):
                for begin, n, at in zip(columns.begin, columns.bodies.n, columns.at):
                    out[begin : begin + n] = rows[at : at + n]
                return np.ones(len(columns.begin), np.bool_)

            OBJECTIVE = Objective(
                name="copy", attention="causal", constant=True, render=render, restore=restore
            )
            packprep.objectives.register(OBJECTIVE)
    """

    name: str
    attention: str
    parameters: tuple[Parameter, ...] = ()
    constant: bool = False
    supervised: bool | Callable[[Mapping[str, Any]], bool] = False
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
        """The number of copies of a segment's tokens in a row.

        It is 2 for the attention pattern "block_diffusion", otherwise 1.
        """
        return RULES[self.attention].copies

    def is_supervised(self, parameters: Mapping[str, Any]) -> bool:
        """Return whether documents with loss_spans or messages may draw a task of this objective.

        `parameters` are those of the task.
        """
        return self.supervised(parameters) if callable(self.supervised) else self.supervised

    @property
    def later(self) -> dict[str, Any]:
        """Name → default, for the parameters that datasets of older versions do not store."""
        return {
            parameter.name: parameter.default for parameter in self.parameters if parameter.later
        }
