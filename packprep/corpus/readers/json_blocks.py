"""Many JSON lines at once → their texts, where nothing is wrong with any of them.

It gives what `json_lines` gives for each line by itself, or nothing: then the lines are to be looked at one by one.

Checking what a decoder skips (is it UTF-8? how deep does it nest?) costs as much as decoding. Where a file's other fields
are few and short, they are decoded, too: a record whose keys are all known, with a string or a number at each, has nothing
that was skipped. Which fields a part has is learnt from its first lines; only speed depends on it.
"""

import codecs
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from packprep.corpus.conversations import LOSS_SPANS, MESSAGES, MarkReader
from packprep.corpus.readers.json_lines import MIN_NESTED_BYTES, fast_decoder, nested_too_deep

_LEARNT_LINES = 32
_MAX_FIELDS = 32
_MAX_OTHER_BYTES = 256  # of a line's other values; longer ones are skipped faster than they are decoded
_CHECKED_BYTES = 16 << 10  # of UTF-8 at once: what comes of it stays in the cache
_Scalar = str | int | float | bool | None

_get_text = attrgetter("text")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def block_decoder(
    text_key: str, marks: MarkReader | None = None
) -> Callable[[bytes, np.ndarray, np.ndarray], list[str] | None]:
    """A function from n lines to their n texts, or to None: look at them one by one.

    It takes data, starts: int64[n], sizes: int64[n]: line i is data[starts[i] : starts[i] + sizes[i]], and nothing but
    blank lines lies between two lines. None is given if any line has no text, or loss_spans or messages that `marks`
    would look at, or a size of −1.
    """
    marked = [name for name in (LOSS_SPANS, MESSAGES) if marks is not None and name != text_key]
    skipping = fast_decoder(text_key, marked)
    getters = [attrgetter(name) for name in marked]
    whole: msgspec.json.Decoder[Any] | None = None
    has_learnt = False

    def decode(data: bytes, starts: np.ndarray, sizes: np.ndarray) -> list[str] | None:
        nonlocal whole, has_learnt
        if skipping is None or sizes.min() <= 0 or not _end_and_begin_as_objects(data, starts, sizes):
            return None
        block = memoryview(data)[starts[0] : starts[-1] + sizes[-1]]
        if not has_learnt:
            some = zip(starts[:_LEARNT_LINES].tolist(), sizes[:_LEARNT_LINES].tolist(), strict=True)
            whole = _whole_decoder(text_key, marked, [data[start : start + size] for start, size in some])
            has_learnt = True
        if whole is not None:
            try:
                records = whole.decode_lines(block)
                return list(map(_get_text, records)) if len(records) == len(starts) else None
            except (ValueError, msgspec.MsgspecError, RecursionError):
                pass
        try:
            records = skipping.decode_lines(block)
            if len(records) != len(starts) or any(any(map(get, records)) for get in getters):
                return None
            texts = list(map(_get_text, records))
            _check_utf8(bytes(block))
        except (ValueError, msgspec.MsgspecError, RecursionError):
            return None
        whole = None  # another field, or one that is no string or number
        n_chars = np.fromiter(map(len, texts), np.int64, len(texts))
        for i in np.flatnonzero(sizes - n_chars >= MIN_NESTED_BYTES):
            if nested_too_deep(data[starts[i] : starts[i] + sizes[i]]):
                return None
        return texts

    return decode


def _end_and_begin_as_objects(data: bytes, starts: np.ndarray, sizes: np.ndarray) -> bool:
    """Whether each line begins with "{" and ends with "}" (and "\\r").

    Then no record can reach over a line's end: "}" with a "{" behind it is JSON in a string alone, and a string has no
    line's end in it. So as many records as lines are one record a line, although a decoder of many records does not
    mind two in one line.
    """
    read = np.frombuffer(data, np.uint8)
    last = starts + sizes - 1
    last -= read[last] == ord("\r")
    return bool((read[starts] == ord("{")).all() and (read[last] == ord("}")).all())


def _whole_decoder(text_key: str, marked: Sequence[str], lines: Sequence[bytes]) -> msgspec.json.Decoder[Any] | None:
    """A decoder of records that skips nothing, and refuses what it would have to skip; None: it would not be faster."""
    names: dict[str, None] = {}
    for line in lines:
        try:
            others = _fields.decode(line)
        except (ValueError, msgspec.MsgspecError, RecursionError):
            continue
        others.pop(text_key, None)
        if sum(map(len, map(bytes, others.values()))) > _MAX_OTHER_BYTES:
            return None
        if any(bytes(value)[:1] in (b"[", b"{") for value in others.values()):
            return None
        names.update(dict.fromkeys(others))
        if len(names) > _MAX_FIELDS:
            return None
    return _decoder_of(text_key, tuple(marked), tuple(name for name in names if name not in marked))


@lru_cache(maxsize=64)
def _decoder_of(text_key: str, marked: Sequence[str], others: Sequence[str]) -> msgspec.json.Decoder[Any] | None:
    kinds: list[tuple[str, Any]] = [*((name, None) for name in marked), *((name, _Scalar) for name in others)]
    fields: list[Any] = [("text", str), *((f"field{i}", kind, None) for i, (_, kind) in enumerate(kinds))]
    keys = {"text": text_key} | {f"field{i}": name for i, (name, _) in enumerate(kinds)}
    try:
        record = msgspec.defstruct("Record", fields, rename=keys, gc=False, forbid_unknown_fields=True)
    except ValueError:  # msgspec refuses keys that JSON has to escape
        return None
    return msgspec.json.Decoder(record)


def _check_utf8(block: bytes) -> None:
    """Raises UnicodeDecodeError unless the block is UTF-8."""
    if block.isascii():
        return
    begin = 0
    while begin < len(block):
        end = begin + _CHECKED_BYTES
        some = block[begin:end]
        begin += len(some) if some.isascii() else codecs.utf_8_decode(some, "strict", end >= len(block))[1]
