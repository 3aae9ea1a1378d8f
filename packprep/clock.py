"""Where the time of a build goes: seconds by stage, and what a person who asks for a profile is
told of them."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass
class Clock:
    """Adds up seconds by stage; a stage that runs inside of another counts for itself alone.

    seconds: stage → seconds, in the order in which the stages first ran.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    _began: float = field(default_factory=time.perf_counter)
    # seconds of finished stages inside of each open one
    _inner: list[float] = field(default_factory=lambda: [0.0])

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """While this lasts, time is the stage's."""
        self.seconds.setdefault(name, 0.0)
        begin = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            whole = time.perf_counter() - begin
            self.seconds[name] += whole - self._inner.pop()
            self._inner[-1] += whole

    def steps(self, name: str, iterable: Iterable[T]) -> Iterator[T]:
        """The items of an iterable; the time that it takes to get each is the stage's."""
        iterator = iter(iterable)
        while True:
            with self.stage(name):
                item = next(iterator, iterator)
            if item is iterator:
                return
            yield item  # type: ignore[misc]

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add what another clock took."""
        for name, spent in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def elapsed(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._began

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        seconds, self.seconds = self.seconds, {}
        return seconds


WAITING = "waiting"
"""What no stage accounts for: processes that start, and workers that have nothing to do."""


@dataclass(frozen=True)
class Profile:
    """One call of `build`. seconds: stage → seconds, of all processes together; wall_s: as a clock
    on the wall has it."""

    wall_s: float
    workers: int
    seconds: Mapping[str, float]
    documents: int
    text_bytes: int
    tokens: int


def describe_profile(profile: Profile) -> dict[str, Any]:
    """The profile as plain values: rates over the wall's time, and each stage's share and rate of
    one worker alone."""
    whole = profile.wall_s * profile.workers
    seconds = {**profile.seconds, WAITING: max(0.0, whole - sum(profile.seconds.values()))}
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
                "share": spent / whole if whole else 0.0,
                "text_bytes_per_s": _rate(profile.text_bytes, spent),
                "tokens_per_s": _rate(profile.tokens, spent),
            }
            for name, spent in seconds.items()
        ],
    }


def _rate(count: int, seconds: float) -> float | None:
    """None where there is nothing to have a rate of, or no time that was measured."""
    return count / seconds if count and seconds > 0 else None
