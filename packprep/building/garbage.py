"""Python's search for garbage, put off where it would find none."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """While this lasts, no garbage is searched for among the many objects that libraries and vocabularies bring.

    Then they count as old, so that the first search afterwards is not through all of them either.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()
        if was_on:
            gc.enable()
