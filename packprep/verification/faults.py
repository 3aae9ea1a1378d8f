"""Faults: which promise does not hold, and where."""

from typing import Any

MAX_LISTED = 20
"""Faults of one promise in one file that are listed; the rest is counted."""


class Faults:
    """Collects faults. Values are plain, so that a list of faults crosses processes and becomes
    JSON."""

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
        """Note one fault: the file, and row, slot and value where there is one."""
        key = f"{promise} {file}"
        self.counts[key] = self.counts.get(key, 0) + 1
        if self.counts[key] <= MAX_LISTED:
            fault = {
                "promise": promise,
                "file": file,
                "row": row,
                "slot": slot,
                "value": value,
                "message": message,
            }
            self.listed.append(fault)

    def join(self, other: "Faults") -> None:
        """Take over what another collected."""
        self.listed += other.listed
        for key, count in other.counts.items():
            self.counts[key] = self.counts.get(key, 0) + count

    @property
    def total(self) -> int:
        """How many faults there are, listed or not."""
        return sum(self.counts.values())


def line_of(fault: dict[str, Any]) -> str:
    """One fault as a line."""
    location = fault["file"]
    for name in ("row", "slot"):
        if fault[name] is not None:
            location += f", {name} {fault[name]}"
    value = "" if fault["value"] is None else f" (value {fault['value']})"
    return f"{fault['promise']} {location}: {fault['message']}{value}"
