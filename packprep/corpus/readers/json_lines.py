"""One JSON line → its text, or the reason why it has none.

Almost every line takes the fast path: msgspec decodes the one field and skips the rest. Only lines that it refuses are
looked at again by Python's own decoder, which finds the reason, or takes what msgspec is too strict about
(a lone surrogate in another field; a repeated key whose last value counts), and lines with loss_spans or messages.
"""

import json
import re
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NoReturn

import msgspec
import numpy as np

from packprep.corpus.conversations import LOSS_SPANS, MESSAGES, SURROGATE, Marked, MarkReader
from packprep.corpus.readers.documents import invalid_utf8

# How deep decoders can go depends on the version of Python and on the depth of the caller: a limit of our own, far
# below theirs, keeps one line's fate the same everywhere.
MAX_NESTING = 256
MIN_NESTED_BYTES = 2 * (MAX_NESTING + 1)
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_NO_BRACKET = bytes(sorted(set(range(256)) - set(b"[]{}")))
_MAX_DIGITS = 4000  # Python refuses to read integers of more than 4300, unless it is told otherwise

Outcome = str | Marked | tuple[str, str]  # a text, a text and what is trained of it, or a reason and its detail


def line_decoder(text_key: str, marks: MarkReader | None = None) -> Callable[[bytes], Outcome]:
    """A function from one line, without its end, to its text or to (reason, detail); with `marks`, to a Marked, too.

    It never raises, but for what `marks` raises when it cannot read any document's messages.
    """
    if marks is not None:
        return _marked_decoder(text_key, marks)
    decoder = fast_decoder(text_key)
    fast = decoder.decode if decoder else _refuse

    def decode(line: bytes) -> Outcome:
        try:
            text = fast(line).text
            if len(line) - len(text) >= MIN_NESTED_BYTES and nested_too_deep(line):
                return decode_slowly(line, text_key)
            # msgspec does not look at the UTF-8 of what it skips.
            if not line.isascii():
                line.decode()
            return text
        except (ValueError, msgspec.MsgspecError, RecursionError):
            return decode_slowly(line, text_key)

    return decode


def _marked_decoder(text_key: str, marks: MarkReader) -> Callable[[bytes], Outcome]:
    """As `line_decoder`. A line with one of the fields goes the exact way: its messages take longer to render anyway."""
    names = [name for name in (LOSS_SPANS, MESSAGES) if name != text_key]
    decoder = fast_decoder(text_key, names)
    fast = decoder.decode if decoder else _refuse
    first, last = attrgetter(names[0]), attrgetter(names[-1])

    def decode(line: bytes) -> Outcome:
        try:
            record = fast(line)
            text = record.text
            nests = len(line) - len(text) >= MIN_NESTED_BYTES and nested_too_deep(line)
            if nests or first(record) or last(record):
                return decode_slowly(line, text_key, marks)
            if not line.isascii():
                line.decode()
            return text
        except (ValueError, msgspec.MsgspecError, RecursionError):
            return decode_slowly(line, text_key, marks)

    return decode


def fast_decoder(text_key: str, others: Sequence[str] = ()) -> msgspec.json.Decoder[Any] | None:
    """A decoder of records with `text` and, undecoded, `others`, which are empty where they are not there.

    None: msgspec cannot look for such a key.
    """
    fields: list[Any] = [("text", str), *((name, msgspec.Raw, msgspec.Raw()) for name in others)]
    try:
        record = msgspec.defstruct("Record", fields, rename={"text": text_key}, gc=False)
    except ValueError:  # msgspec refuses keys that JSON has to escape
        return None
    return msgspec.json.Decoder(record)


def _refuse(_: object) -> NoReturn:
    raise ValueError


def _integer(digits: str) -> int:
    """One that is too long to be read is as far beyond any text: ±2⁶⁴."""
    return int(digits) if len(digits) <= _MAX_DIGITS else -(1 << 64) if digits[0] == "-" else 1 << 64


def decode_slowly(line: bytes, text_key: str, marks: MarkReader | None = None) -> Outcome:
    """As `line_decoder`, for any line, and exact about the reason."""
    try:
        source = line.decode()
    except UnicodeDecodeError as error:
        return invalid_utf8(error, "line")
    if nested_too_deep(line):
        return "malformed_json", f"nested deeper than {MAX_NESTING} levels"
    try:
        # Numbers are not read where none is needed: Python refuses very long ones.
        read_int, read_float = (len, len) if marks is None else (_integer, float)
        record = json.loads(source, parse_constant=_refuse, parse_int=read_int, parse_float=read_float)
    except ValueError:
        return "malformed_json", f"not JSON; the line begins {ascii(source[:60])}"
    if not isinstance(record, dict):
        return "malformed_json", f"the line is {_kind(record)}, not an object"
    spans = messages = None
    if marks is not None:
        spans, messages = (None if name == text_key else record.get(name) for name in (LOSS_SPANS, MESSAGES))
        if messages is not None and record.get(text_key) is None:
            return marks.marked(None, spans, messages)
    if text_key not in record:
        keys = ", ".join(ascii(key[:40]) for key in list(record)[:8])
        return "missing_text", f"no key {ascii(text_key[:40])}; the line's keys are: {keys or 'none'}"
    text = record[text_key]
    if not isinstance(text, str):
        return "not_a_string", f"the value of {ascii(text_key[:40])} is {_kind(text)}"
    if found := SURROGATE.search(text):
        return "lone_surrogate", f"character {found.start()} of the text is the lone surrogate {ascii(found[0])}"
    if marks is not None and (spans is not None or messages is not None):
        return marks.marked(text, spans, messages)
    return text


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    kinds: dict[type, str] = {dict: "an object", list: "a list", str: "a string"}
    return kinds.get(type(value), "a number")


def nested_too_deep(line: bytes) -> bool:
    """Whether brackets outside of strings nest deeper than MAX_NESTING. Most lines are done after two counts."""
    if line.count(b"[") + line.count(b"{") <= MAX_NESTING:
        return False
    brackets = np.frombuffer(_STRING.sub(b"", line).translate(None, _NO_BRACKET), np.uint8)
    depth = 0
    for begin in range(0, len(brackets), 1 << 16):  # in blocks, so that a line of brackets needs no memory
        block = brackets[begin : begin + (1 << 16)]
        opening = (block == ord("[")) | (block == ord("{"))
        depths = depth + np.cumsum(np.where(opening, 1, -1))
        if depths.max() > MAX_NESTING:
            return True
        depth = int(depths[-1])
    return False
