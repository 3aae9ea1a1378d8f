"""Where the time of a build goes: seconds by stage."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Clock:
    """Adds up seconds by stage; a stage that runs inside of another counts for itself alone.

    seconds: stage → seconds, in the order in which the stages first ran.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()
        self._inner = [0.0]  # seconds of finished stages inside of each open one

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
        """The same items; the time that it takes to get each is the stage's."""
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
