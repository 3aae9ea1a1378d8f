"""Faults that verification finds: the violated invariant, and its location."""

from typing import Any

from packprep.messages import one_line

MAX_LISTED = 20
"""Maximum number of faults listed per invariant and file. Further faults are only counted."""


class Faults:
    """A collection of faults.

    The faults are dicts of plain types, so they can be sent to other processes and written as JSON.
    """

    def __init__(self) -> None:
        self.listed: list[dict[str, Any]] = []
        self.counts: dict[str, int] = {}

    def add(
        self,
        promise: str,
        file: str,
        message: str,
        row: int | None = None,
        slot: int | None = None,
        value: Any = None,
    ) -> None:
        """Record one violation of an invariant.

        Args:
            promise: The invariant, such as "P7".
            file: Name of the file.
            message: Description of the violation.
            row: Row of the fault, or None.
            slot: Slot in the row, or None.
            value: The wrong value, of a plain type.
        """
        self.count(promise, file, 1)
        if self.counts[f"{promise} {file}"] <= MAX_LISTED:
            fault = {
                "promise": promise,
                "file": file,
                "row": row,
                "slot": slot,
                "value": value,
                "message": message,
            }
            self.listed.append(fault)

    def count(self, promise: str, file: str, number: int) -> None:
        """Count violations of an invariant without listing them."""
        key = f"{promise} {file}"
        self.counts[key] = self.counts.get(key, 0) + number

    def join(self, other_faults: "Faults") -> None:
        """Add all faults of `other_faults`."""
        self.listed += other_faults.listed
        for key, count in other_faults.counts.items():
            self.counts[key] = self.counts.get(key, 0) + count

    @property
    def total(self) -> int:
        """Return the number of all faults, including the ones that are not listed."""
        return sum(self.counts.values())


def line_of(fault: dict[str, Any]) -> str:
    """Return one fault as a line of text."""
    location = fault["file"]
    for name in ("row", "slot"):
        if fault[name] is not None:
            location += f", {name} {fault[name]}"
    value = "" if fault["value"] is None else f" (value {fault['value']})"
    return f"{fault['promise']} {location}: {one_line(fault['message'])}{value}"
