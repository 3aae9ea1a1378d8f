"""What takes a second to find out about a tokenizer, kept from one run to the next beside the compiled kernels.

What cannot be kept or read is found out again.
"""

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from packprep.cache import keep, kept

T = TypeVar("T")


def remembered(what: str, depends_on: tuple, kind: Any, find: Callable[[], T]) -> T:
    """`find()`, or what it gave before. what: a word for its name; kind: the type that it gives."""
    try:
        return recall(what, depends_on, kind)
    except LookupError:
        pass
    found = find()
    remember(what, depends_on, found)
    return found


def recall(what: str, depends_on: tuple, kind: Any) -> Any:
    """What is remembered; LookupError where nothing is."""
    data = kept(what, msgspec.msgpack.encode(depends_on))
    if data is not None:
        with contextlib.suppress(ValueError):  # of another type
            return msgspec.msgpack.decode(data, type=kind)
    raise LookupError(what)


def remember(what: str, depends_on: tuple, value: Any) -> None:
    """Keep a value for `recall`, in place of what was kept."""
    with contextlib.suppress(ValueError):  # half a character, which is no UTF-8
        keep(what, msgspec.msgpack.encode(depends_on), msgspec.msgpack.encode(value))
