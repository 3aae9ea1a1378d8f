"""Signals that ask a process to stop: noted until it may stop, and heard while a library does not come back."""

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from packprep.building.progress import say
from packprep.errors import Stopped

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
STOPPED = "by a signal; what is committed stays, and the same command goes on"
STAY_S = 2.0
_ENDING = {signal.SIGTERM, signal.SIGUSR1}  # SIGINT comes from who sits before it, and can be given again


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """While this lasts, SIGTERM, SIGINT and SIGUSR1 are noted instead of obeyed; gives the function that tells."""
    asked: list[int] = []
    try:
        before = {s: signal.signal(s, lambda number, _: asked.append(number)) for s in STOP_SIGNALS}
    except ValueError:  # not in the main thread: the caller handles signals
        before = {}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ended_by_signals(clean: Callable[[int], None]) -> Iterator[None]:
    """While this lasts, SIGTERM and SIGUSR1 end the process with status 75 if it does not stop by itself within STAY_S.

    A handler in Python waits for the end of a call of a library, which may be the tokenization of a whole book or the
    compilation of a kernel. A thread beside it is told of a signal by the pipe that Python writes to at once. All the
    reading and computing stays in this thread: a second one would have an allocator's memory of its own, and pay for
    fresh pages.
    """
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    try:
        before = signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    except ValueError:  # not in the main thread: the caller handles signals
        os.close(told)
        os.close(tell)
        yield
        return
    thread = threading.Thread(target=_end_when_told, args=(told, clean), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(tell)
        thread.join()
        os.close(told)
        gone = time.monotonic() + 1  # its end in the system follows, and only then may this process be forked
        while os.path.exists(f"/proc/self/task/{thread.native_id}") and time.monotonic() < gone:
            time.sleep(0.0001)


def _end_when_told(told: int, clean: Callable[[int], None]) -> None:
    """Returns when the other end of the pipe is closed."""
    while not _ENDING.intersection(numbers := os.read(told, 64)):
        if not numbers:
            return
    deadline = time.monotonic() + STAY_S
    while (left := deadline - time.monotonic()) > 0:
        if select.select([told], [], [], left)[0] and not os.read(told, 64):
            return
    clean(os.getpid())
    say(f"stopped: {STOPPED}")
    os._exit(Stopped.exit_status)
