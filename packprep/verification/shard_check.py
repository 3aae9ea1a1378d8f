"""The shared state of the checks of one shard."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from packprep.building.plan import Plan
from packprep.dataset.segments import Arrays, Segments
from packprep.verification.faults import MAX_LISTED, Faults


@dataclass(frozen=True)
class ShardCheck:
    """A shard to verify, and the collection of its faults.

    Attributes:
        plan: The dataset's plan.
        arrays: The shard's arrays, stored or as resampled for an epoch.
        segments: The shard's segments. Use the columns `bos`, `eos` and `repeated` only after
            `check_parts`, because they are computed from columns that must be valid.
        file: The shard's name, for messages.
        faults: Receives the faults.
        epoch: The epoch for which the noise of the arrays was drawn.
    """

    plan: Plan
    arrays: Arrays
    segments: Segments
    file: str
    faults: Faults
    epoch: int = 0

    def replace(self, **changes: Any) -> "ShardCheck":
        """Return a copy with changed attributes, such as other arrays or segments."""
        return replace(self, **changes)

    @property
    def seq_length(self) -> int:
        """Return the number of slots per row."""
        return self.arrays["tokens"].shape[1]

    @cached_property
    def first_slots(self) -> np.ndarray:
        """Return each segment's first slot as an index into the flattened rows, int64[m]."""
        return self.segments.flat_slots(self.seq_length)

    @cached_property
    def in_place(self) -> np.ndarray:
        """Return which segments use same-position prediction, bool[m]."""
        return self.plan.by_task.in_place[self.segments.task]

    @cached_property
    def is_twice(self) -> np.ndarray:
        """Return which segments store their tokens twice, as x_t and x_0, bool[m]."""
        return self.plan.by_task.copies[self.segments.task] > 1

    def flat(self, name: str) -> np.ndarray:
        """Return the array `name` flattened from [rows, seq_length] to [rows * seq_length]."""
        return self.arrays[name].reshape(-1)

    def add(
        self,
        promise: str,
        message: str,
        row: int | None = None,
        slot: int | None = None,
        value: Any = None,
    ) -> None:
        """Record a violation of an invariant, with the shard's file as its location."""
        self.faults.add(promise, self.file, message, row, slot, value)

    def add_segment(
        self,
        promise: str,
        g: int | np.integer,
        message: str,
        slot: int | None = None,
        value: Any = None,
    ) -> None:
        """Record a violation of an invariant in segment number `g` of the shard."""
        self.add(promise, f"segment {g}: {message}", int(self.segments.row[g]), slot, value)

    def add_slot(self, promise: str, flat_slot: int, message: str, value: Any = None) -> None:
        """Record a violation at a slot. `flat_slot` is an index into the flattened rows."""
        row, slot = divmod(int(flat_slot), self.seq_length)
        self.add(promise, message, row, slot, value)

    def add_differences(self, promise: str, name: str, expected: np.ndarray, message: str) -> None:
        """Record a violation at each slot where the flat array `name` has an unexpected value.

        At most MAX_LISTED violations are recorded.

        Args:
            promise: The invariant, such as "P7".
            name: Name of the array.
            expected: The expected values, [rows * seq_length].
            message: Format string. Its {} becomes the expected value.
        """
        values = self.flat(name)
        for i in np.flatnonzero(values != expected)[:MAX_LISTED]:
            self.add_slot(promise, i, message.format(expected[i]), values[i].item())
