"""What the checks of one shard share."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from packprep.building.plan import Plan
from packprep.dataset.segments import Segments
from packprep.verification.faults import MAX_LISTED, Faults


@dataclass(frozen=True)
class ShardCheck:
    """A shard that is verified, and where its faults go.

    Attributes:
        plan: The dataset's plan.
        arrays: The shard's arrays, stored or as an epoch has them.
        segments: Its segments; the length formula's columns are set once the headers are good.
        file: The shard's name, for messages.
        faults: Takes what is wrong.
        epoch: Whose random numbers the arrays have.
    """

    plan: Plan
    arrays: Mapping[str, np.ndarray]
    segments: Segments
    file: str
    faults: Faults
    epoch: int = 0

    def replace(self, **changes: Any) -> "ShardCheck":
        """Return this check with other arrays or segments."""
        return replace(self, **changes)

    @property
    def seq_length(self) -> int:
        """Return the slots of a row."""
        return self.arrays["tokens"].shape[1]

    @cached_property
    def first_slots(self) -> np.ndarray:
        """Return each segment's first slot in the flat rows, int64[m]."""
        return self.segments.flat_slots(self.seq_length)

    @cached_property
    def in_place(self) -> np.ndarray:
        """Return which segments predict tokens where they stand, bool[m]."""
        return self.plan.by_task.in_place[self.segments.task]

    @cached_property
    def is_twice(self) -> np.ndarray:
        """Return which segments hold their tokens twice, as x_t and x_0, bool[m]."""
        return self.plan.by_task.copies[self.segments.task] > 1

    def flat(self, name: str) -> np.ndarray:
        """Return an array of slots without its rows."""
        return self.arrays[name].reshape(-1)

    def add(
        self,
        promise: str,
        message: str,
        row: int | None = None,
        slot: int | None = None,
        value: Any = None,
    ) -> None:
        """Note a fault of the shard."""
        self.faults.add(promise, self.file, message, row, slot, value)

    def add_segment(
        self,
        promise: str,
        g: int | np.integer,
        message: str,
        slot: int | None = None,
        value: Any = None,
    ) -> None:
        """Note a fault of segment `g`."""
        self.add(promise, f"segment {g}: {message}", int(self.segments.row[g]), slot, value)

    def add_slot(self, promise: str, flat_slot: int, message: str, value: Any = None) -> None:
        """Note a fault at a slot of the flat rows."""
        row, slot = divmod(int(flat_slot), self.seq_length)
        self.add(promise, message, row, slot, value)

    def add_differences(self, promise: str, name: str, again: np.ndarray, message: str) -> None:
        """Note the slots at which the flat array `name` is not `again`. message: its {} becomes the
        value that it should have."""
        values = self.flat(name)
        for i in np.flatnonzero(values != again)[:MAX_LISTED]:
            self.add_slot(promise, i, message.format(again[i]), values[i].item())
