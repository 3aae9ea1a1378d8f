"""Measure the time of a build by stage, and describe it for a profile."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass
class Clock:
    """A clock that sums seconds by stage.

    The time of a nested stage counts only for the nested stage.

    Attributes:
        seconds: Seconds by stage, in the order in which the stages first ran.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    _began: float = field(default_factory=time.perf_counter)
    # Seconds of finished stages inside each open stage, which count only for the inner stages.
    _inner: list[float] = field(default_factory=lambda: [0.0])

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the `with` block to the stage `name`."""
        self.seconds.setdefault(name, 0.0)
        begin = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            elapsed_s = time.perf_counter() - begin
            self.seconds[name] += elapsed_s - self._inner.pop()
            self._inner[-1] += elapsed_s

    def steps(self, name: str, iterable: Iterable[T]) -> Iterator[T]:
        """Yield the items of `iterable`. Add the time to get each item to the stage `name`."""
        iterator = iter(iterable)
        while True:
            with self.stage(name):
                item = next(iterator, iterator)
            if item is iterator:
                return
            yield item  # type: ignore[misc]

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add the seconds by stage of another clock to this clock."""
        for name, spent in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def elapsed(self) -> float:
        """Return the seconds since the clock was made."""
        return time.perf_counter() - self._began

    def take(self) -> dict[str, float]:
        """Return the seconds by stage since the last call of `take`, and reset them."""
        seconds, self.seconds = self.seconds, {}
        return seconds


WAITING = "waiting"
"""Name for the time in which no stage runs: processes start, or workers have no work."""


@dataclass(frozen=True)
class Profile:
    """The profile of one call of `build`.

    Attributes:
        wall_s: Elapsed wall-clock seconds.
        workers: Number of worker processes.
        seconds: Seconds by stage, summed over all processes.
        documents: Documents that were read.
        text_bytes: Bytes of text that were read.
        tokens: Tokens that were read.
    """

    wall_s: float
    workers: int
    seconds: Mapping[str, float]
    documents: int
    text_bytes: int
    tokens: int


def describe_profile(profile: Profile) -> dict[str, Any]:
    """Return a profile as JSON-compatible values, with rates.

    The rates of the whole build are per wall-clock second. The rates of a stage are per second that
    workers spent in this stage.
    """
    total_s = profile.wall_s * profile.workers
    seconds = {**profile.seconds, WAITING: max(0.0, total_s - sum(profile.seconds.values()))}
    return {
        "workers": profile.workers,
        "wall_s": profile.wall_s,
        "documents": profile.documents,
        "text_bytes": profile.text_bytes,
        "tokens": profile.tokens,
        "text_bytes_per_s": _rate(profile.text_bytes, profile.wall_s),
        "tokens_per_s": _rate(profile.tokens, profile.wall_s),
        "stages": [
            {
                "stage": name,
                "seconds": spent,
                "share": spent / total_s if total_s else 0.0,
                "text_bytes_per_s": _rate(profile.text_bytes, spent),
                "tokens_per_s": _rate(profile.tokens, spent),
            }
            for name, spent in seconds.items()
        ],
    }


def _rate(count: int, seconds: float) -> float | None:
    """Return a rate per second, or None if the count or the time is 0."""
    return count / seconds if count and seconds > 0 else None
