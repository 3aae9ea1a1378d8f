"""Let a process fork while its threads read a dataset.

A fork copies only the thread that forks. If another thread holds a lock at that moment, the lock
stays locked in the child, and the child waits for it forever. Readers therefore use no locks. Code
that needs a lock, such as an import, runs inside `unforked`.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TYPE_CHECKING = False  # Importing typing takes longer than this module.
if TYPE_CHECKING:
    from functools import cached_property as lazy
    from typing import Any
else:

    class lazy:
        """An attribute that is computed at its first access, without a lock.

        `functools.cached_property` has a lock on Python 3.11. Threads that access the attribute at
        the same time may compute its value several times, but all get the same object.
        """

        def __init__(self, function):
            self._function, self.__doc__ = function, function.__doc__

        def __set_name__(self, owner, name):
            self._name = name

        def __get__(self, instance, owner=None):
            if instance is None:
                return self
            return vars(instance).setdefault(self._name, self._function(instance))


_no_fork = threading.RLock()


def hold_at_forks(lock: "Any") -> None:
    """Make each fork wait until `lock` is free, so that it is also free in the child."""
    if hasattr(os, "register_at_fork"):  # Windows does not have this function.
        os.register_at_fork(
            before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
        )


hold_at_forks(_no_fork)


@contextmanager
def unforked() -> Iterator[None]:
    """Prevent all threads from forking this process while the block runs."""
    with _no_fork:
        yield
