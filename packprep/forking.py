"""What lets a process fork while its threads read a dataset.

A fork copies only the thread that forks. A lock that another thread holds at that moment stays
locked in the child, which waits for it for ever. So readers use no locks. What cannot do without
one, as an import, runs inside of `unforked`.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TYPE_CHECKING = False  # typing's, which takes longer to import than this
if TYPE_CHECKING:
    from functools import cached_property as lazy
    from typing import Any
else:

    class lazy:
        """An attribute that is computed at its first use, without a lock.

        `functools.cached_property` has one on Python 3.11. Threads that ask at the same time may
        compute the value several times; all get the same one.
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
    """Make each fork wait for this lock, so that it is free in the child."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(
            before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
        )


hold_at_forks(_no_fork)


@contextmanager
def unforked() -> Iterator[None]:
    """Let no thread fork this process while the block runs."""
    with _no_fork:
        yield
