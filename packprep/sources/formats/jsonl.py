"""Read line files: find the lines of a work range, and decode them to texts or reject reasons.

A line starts at byte 0 or after b"\\n". It belongs to the work range that contains its first byte.
Its end may be outside this work range. In a compressed file, a decompressed byte belongs to the
step that produced it; see `compressed`.

Almost every line takes a fast path: msgspec decodes one field of many lines and skips the rest.
The slow path decodes whole lines: those that the fast path refuses, and lines with loss_spans or a
layout (fields.py). It takes Python's own decoder for lines that msgspec refuses. Python's decoder
finds the exact reject reason. It also accepts valid lines that msgspec refuses, such as lines with
a lone surrogate outside the text. The last value of a repeated key counts.

msgspec does not check skipped data for valid UTF-8 and nesting depth, and these checks cost as much
as decoding. Therefore the other fields of a file are not skipped but decoded, if they are few and
short. The keys of these fields are learned from the first lines of a work range. A record needs no
checks if it has only learned keys with strings or numbers. This affects only the speed.
"""

import codecs
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn

import msgspec
import numpy as np

from packprep.errors import SourceError
from packprep.sources.formats import batch as limits
from packprep.sources.formats.batch import (
    BAD_FIELD,
    LOSS_SPANS,
    MEDIA,
    SURROGATE,
    Batch,
    BatchBuilder,
    Choice,
    Grouping,
    GroupValue,
    Keep,
    Slice,
    Supervision,
    by_fields,
    invalid_utf8,
    kept,
    large_text,
    open_source,
    too_large_line,
)
from packprep.sources.formats.compressed import AT_ONCE_BYTES, Block, Cursor, Decoders
from packprep.sources.formats.fields import Fields, field_at, group_value, refused
from packprep.sources.passes import FieldColumns

# The nesting limit of decoders depends on the version of Python and on the caller's stack depth. A
# separate, much lower limit gives each line the same result everywhere.
MAX_NESTING = 256
MIN_NESTED_BYTES = 2 * (MAX_NESTING + 1)
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_NO_BRACKET = bytes(sorted(set(range(256)) - set(b"[]{}")))
_DIGIT = re.compile(rb"[0-9]")
_MAX_DIGITS = 4000  # By default, Python refuses to parse integers of more than 4300 digits.

# Result of decoding: a text, a supervised document's fields, or a reject reason and its detail.
Outcome = str | Supervision | tuple[str, str]


@lru_cache(maxsize=64)
def line_decoder(text_key: str, fields: Fields | None = None) -> Callable[[bytes], Outcome]:
    """Return a function that decodes a line.

    The returned function takes the bytes of a line without its line end. It returns a text, a
    `Supervision`, or a (reject reason, detail) pair. It never raises an exception.

    Args:
        text_key: Key of the text.
        fields: The other fields to read, or None to read only the text. A line with one of these
            fields becomes a `Supervision`. With loss_spans or a layout, the line takes the slow
            path, because rendering its messages takes longer anyway.
    """
    names = fields.beside_text(text_key) if fields else []
    decoder = _decoder_of(text_key, tuple((name, msgspec.Raw) for name in names))
    fast, getters = (
        decoder.decode if decoder else _refuse,
        [attrgetter(f"field{i}") for i in range(len(names))],
    )
    # The fast path decodes media and weights. Lines with other fields take the slow path.
    alone = {
        name: get for name, get in zip(names, getters, strict=True) if name in (MEDIA, "weight")
    }
    of_layouts = [get for name, get in zip(names, getters, strict=True) if name not in alone]
    # With a fixed layout, every line has to be rendered.
    if fields and fields.format != "auto":
        fast = _refuse

    def decode(line: bytes) -> Outcome:
        try:
            record = fast(line)
            text: str = record.text
            # Skipped data can nest deeply only if the line is much longer than its text.
            nests = len(line) - len(text) >= MIN_NESTED_BYTES and nested_too_deep(line)
            if nests or any(get(record) for get in of_layouts) or large_text(text):
                return decode_slowly(line, text_key, fields)
            # msgspec does not check the UTF-8 of skipped data.
            if not line.isascii():
                line.decode()
            beside = {
                name: _values.decode(str(raw, "utf-8"))
                for name, get in alone.items()
                if (raw := get(record))
            }
            return fields.of_text(text, None, beside.get) if fields and beside else text
        except (ValueError, msgspec.MsgspecError, RecursionError):
            return decode_slowly(line, text_key, fields)

    return decode


@lru_cache(maxsize=64)
def _decoder_of(
    text_key: str, fields: tuple[tuple[str, Any], ...], is_strict: bool = False
) -> msgspec.json.Decoder[Any] | None:
    """Return a decoder of records with the attributes `text`, `field0`, `field1` and so on.

    Args:
        text_key: Key of `text`.
        fields: Key and type of each `field0`, `field1` and so on. A missing field is None.
        is_strict: Whether the decoder refuses records with other keys. Otherwise, it skips other
            keys.

    Returns:
        The decoder, or None if msgspec does not support one of the keys.
    """
    record_fields: list[Any] = [
        ("text", str),
        *((f"field{i}", kind, None) for i, (_, kind) in enumerate(fields)),
    ]
    keys = {"text": text_key} | {f"field{i}": name for i, (name, _) in enumerate(fields)}
    try:
        record = msgspec.defstruct(
            "Record", record_fields, rename=keys, gc=False, forbid_unknown_fields=is_strict
        )
    except ValueError:  # msgspec refuses keys that need JSON escapes.
        return None
    return msgspec.json.Decoder(record)


def _refuse(_: object) -> NoReturn:
    raise ValueError


def read_integer(digits: str) -> int:
    """Return the integer with these digits, or 2⁶⁴ or -2⁶⁴ if there are more than _MAX_DIGITS.

    Python refuses to parse very long integers. As a position, the replacement is as invalid as the
    integer, because both are outside every text.
    """
    return (
        int(digits) if len(digits) <= _MAX_DIGITS else -(1 << 64) if digits[0] == "-" else 1 << 64
    )


_values = json.JSONDecoder(parse_int=read_integer)
_objects = msgspec.json.Decoder()
_without_numbers = json.JSONDecoder(parse_int=len, parse_float=len)
"""A decoder that gives meaningless values for numbers."""


def decode_slowly(line: bytes, text_key: str, fields: Fields | None = None) -> Outcome:
    """Decode all of any line.

    Return a text, a `Supervision`, or a (reject reason, detail) pair with the exact reason.
    """
    record = parse_object(line, has_numbers=fields is not None)
    if isinstance(record, tuple):
        return record
    value, text = partial(_value, record, text_key), field_at(record, text_key)
    spans = layout = None
    if fields:
        spans = value(LOSS_SPANS)
        layout = fields.layout_of(value, text is not None or spans is not None)
        if layout and layout.advice:
            return "bad_messages", refused(layout)
        if layout and (text is None or fields.format != "auto"):
            return fields.of_layout(layout, None, spans, value)
    # The order of these checks is fixed, because the first reason is stored in the rejects.
    if text is None and text_key not in record:
        return "missing_text", without_keys(record, text_key)
    if not isinstance(text, str):
        return "not_a_string", f"the value of {ascii(text_key[:40])} is {kind_of(text)}"
    if not text.isascii() and (surrogate := SURROGATE.search(text)):
        return (
            "lone_surrogate",
            f"character {surrogate.start()} of the text is the lone surrogate"
            f" {ascii(surrogate[0])}",
        )
    if too_large := large_text(text):
        return too_large
    if fields and layout:
        return fields.of_layout(layout, text, spans, value)
    return text if fields is None else fields.of_text(text, spans, value)


def _value(record: dict[str, Any], text_key: str, key: str) -> Any:
    """Return a record's value at `key`, or None if `key` is the text's key."""
    return None if key == text_key else field_at(record, key)


def parse_object(line: bytes, has_numbers: bool) -> dict[str, Any] | tuple[str, str]:
    """Return the JSON object in a line, or the reject reason and detail of an invalid line.

    With `has_numbers` False, numbers in the object have meaningless values.
    """
    too_deep = nested_too_deep(line)
    # msgspec gives the same values in less time, except for integers that `read_integer` replaces.
    # The digits of such an integer include a byte at a multiple of _MAX_DIGITS.
    if not too_deep and not _DIGIT.search(line[::_MAX_DIGITS]):
        with contextlib.suppress(ValueError, msgspec.MsgspecError, RecursionError):
            record = _objects.decode(line)
            if isinstance(record, dict):
                return record
    try:
        source = line.decode()
    except UnicodeDecodeError as error:
        return invalid_utf8(error, "line")
    if too_deep:
        return "malformed_json", f"nested deeper than {MAX_NESTING} levels"
    try:
        # Numbers are only parsed if they are needed, because Python refuses very long numbers.
        record = (_values if has_numbers else _without_numbers).decode(source)
    except ValueError:
        return "malformed_json", f"not JSON; the line begins {ascii(source[:60])}"
    if not isinstance(record, dict):
        return "malformed_json", f"the line is {kind_of(record)}, not an object"
    return record


def without_keys(record: dict[str, Any], *wanted_keys: str) -> str:
    """Return the reject detail of a record that has none of the keys in `wanted_keys`."""
    keys = ", ".join(ascii(key[:40]) for key in list(record)[:8])
    names = " or ".join(ascii(key[:40]) for key in wanted_keys)
    return f"no key {names}; the line's keys are: {keys or 'none'}"


def kind_of(value: object) -> str:
    """Return a description of a JSON value's type, such as "a list"."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    kinds: dict[type, str] = {dict: "an object", list: "a list", str: "a string"}
    return kinds.get(type(value), "a number")


def nested_too_deep(line: bytes) -> bool:
    """Return whether brackets outside strings are nested deeper than MAX_NESTING.

    For most lines, two counts of brackets are sufficient.
    """
    if line.count(b"[") + line.count(b"{") <= MAX_NESTING:
        return False
    brackets = np.frombuffer(_STRING.sub(b"", line).translate(None, _NO_BRACKET), np.uint8)
    depth = 0
    # Blocks limit the memory for a line that consists of brackets.
    for begin in range(0, len(brackets), 1 << 16):
        block = brackets[begin : begin + (1 << 16)]
        opening = (block == ord("[")) | (block == ord("{"))
        depths = depth + np.cumsum(np.where(opening, 1, -1))
        if depths.max() > MAX_NESTING:
            return True
        depth = int(depths[-1])
    return False


_LEARNT_LINES = 32
_MAX_FIELDS = 32
# Maximum bytes of a line's values besides the text. Skipping longer values is faster than decoding
# them.
_MAX_OTHER_BYTES = 256
_CHECKED_BYTES = 16 << 10  # bytes of UTF-8 checked at once, so that the result stays in the cache
_Scalar = str | int | float | bool | None

_get_text = attrgetter("text")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def block_decoder(
    text_key: str, fields: Fields | None = None
) -> Callable[[bytes, np.ndarray, np.ndarray], list[str] | None]:
    """Return a function that decodes n lines at once.

    The returned function takes `data`, `starts` (int64[n]) and `sizes` (int64[n]). Line i is
    data[starts[i] : starts[i] + sizes[i]]. Between line i and line i + 1, `data` may only have
    blank lines.

    It returns the n texts, or None if the lines must be decoded one by one. For example, a line may
    have no text, be invalid, exceed the maximum size of a text, or contain one of the `fields`.
    """
    names = fields.beside_text(text_key) if fields else []
    skipping = _decoder_of(text_key, tuple((name, msgspec.Raw) for name in names))
    getters = [attrgetter(f"field{i}") for i in range(len(names))]
    if fields and fields.format != "auto":
        skipping = None
    whole: msgspec.json.Decoder[Any] | None = None
    has_learnt = False

    def decode(data: bytes, starts: np.ndarray, sizes: np.ndarray) -> list[str] | None:
        nonlocal whole, has_learnt
        if skipping is None or sizes.min() <= 0 or sizes.max() > limits.MAX_DOCUMENT_BYTES:
            return None
        # Each line must start with "{" and end with "}" (and "\r"). Then no record can extend over
        # a line end: "}" followed by "{" is only valid JSON within a string, and a string contains
        # no line end. The decoder accepts two records in one line. But if the numbers of records
        # and lines are equal, each line contains exactly one record.
        characters, lasts = np.frombuffer(data, np.uint8), starts + sizes - 1
        lasts -= characters[lasts] == ord("\r")
        if not ((characters[starts] == ord("{")).all() and (characters[lasts] == ord("}")).all()):
            return None
        block = memoryview(data)[starts[0] : starts[-1] + sizes[-1]]
        if not has_learnt:
            spans = zip(
                starts[:_LEARNT_LINES].tolist(), sizes[:_LEARNT_LINES].tolist(), strict=True
            )
            whole = _whole_decoder(
                text_key, names, [data[start : start + size] for start, size in spans]
            )
            has_learnt = True
        # The strict decoder parses every value, so a success needs no further checks.
        if whole is not None:
            try:
                records = whole.decode_lines(block)
                return list(map(_get_text, records)) if len(records) == len(starts) else None
            except (ValueError, msgspec.MsgspecError, RecursionError):
                pass
        # The skipping decoder does not check the data that it skips, so checks follow.
        try:
            records = skipping.decode_lines(block)
            if len(records) != len(starts) or any(any(map(get, records)) for get in getters):
                return None
            texts = list(map(_get_text, records))
            _check_utf8(bytes(block))
        except (ValueError, msgspec.MsgspecError, RecursionError):
            return None
        whole = None  # A field is unknown, or its value is neither a string nor a number.
        n_chars = np.fromiter(map(len, texts), np.int64, len(texts))
        for i in np.flatnonzero(sizes - n_chars >= MIN_NESTED_BYTES):
            if nested_too_deep(data[starts[i] : starts[i] + sizes[i]]):
                return None
        return texts

    return decode


def _whole_decoder(
    text_key: str, fields: Sequence[str], lines: Sequence[bytes]
) -> msgspec.json.Decoder[Any] | None:
    """Return a decoder that refuses records with keys that do not occur in `lines`.

    It also refuses a record with a value at a key in `fields`. Return None if `lines` have many,
    long or nested values besides the text, because it is faster to skip such values.
    """
    names: dict[str, None] = {}
    for line in lines:
        try:
            other_fields = _fields.decode(line)
        except (ValueError, msgspec.MsgspecError, RecursionError):
            continue
        other_fields.pop(text_key, None)
        if sum(map(len, map(bytes, other_fields.values()))) > _MAX_OTHER_BYTES:
            return None
        if any(bytes(value)[:1] in (b"[", b"{") for value in other_fields.values()):
            return None
        names.update(dict.fromkeys(other_fields))
        if len(names) > _MAX_FIELDS:
            return None
    # The type None accepts only null, so lines with one of these fields are refused.
    absent = [(name, None) for name in fields]
    return _decoder_of(
        text_key, (*absent, *((name, _Scalar) for name in names if name not in fields)), True
    )


def _check_utf8(block: bytes) -> None:
    """Check that a block is valid UTF-8.

    Raises:
        UnicodeDecodeError: If the block is invalid.
    """
    if block.isascii():
        return
    begin = 0
    while begin < len(block):
        end = begin + _CHECKED_BYTES
        data = block[begin:end]
        begin += (
            len(data)
            if data.isascii()
            else codecs.utf_8_decode(data, "strict", end >= len(block))[1]
        )


BOM = b"\xef\xbb\xbf"
_READ_BYTES = 1 << 20
_FINISH_BYTES = 16 << 10  # size of the first read past a work range, where most lines end soon
_IS_SPACE = np.array([bytes([byte]).isspace() for byte in range(256)])


class Lines(NamedTuple):
    """n lines without their line ends. Line i is `data[starts[i] : starts[i] + sizes[i]]`.

    A line that is too large has size -1, and its data is not kept.
    """

    data: bytes
    positions: np.ndarray  # int64[n], stream offsets of the lines, strictly increasing
    starts: np.ndarray  # int64[n], strictly increasing
    sizes: np.ndarray  # int64[n] in bytes, or -1 for a line that is too large

    def line(self, i: int) -> bytes | None:
        """Return line `i`, or None if it is too large."""
        start, size = int(self.starts[i]), int(self.sizes[i])
        return self.data[start : start + size] if size >= 0 else None

    def stored_sizes(self) -> np.ndarray:
        """Return the size of each line in bytes, int64[n].

        A line with more than MAX_DOCUMENT_BYTES gets the size MAX_DOCUMENT_BYTES + 1.
        """
        least = limits.MAX_DOCUMENT_BYTES + 1
        return np.where(self.sizes < 0, least, np.minimum(self.sizes, least))

    def at(self, index: np.ndarray | slice) -> "Lines":
        """Return the lines that `index`, a slice or bool[n], selects. They share `data`."""
        return Lines(self.data, self.positions[index], self.starts[index], self.sizes[index])


def read(
    work_range: Slice,
    text_key: str,
    keep: Keep | None,
    batch_bytes: int,
    decoders: Decoders,
    fields: Fields | None,
    line: Callable[[str, Fields | None], Callable[[bytes], Outcome]] = line_decoder,
    block: Callable[
        [str, Fields | None], Callable[[bytes, np.ndarray, np.ndarray], list[str] | None]
    ] = block_decoder,
) -> Iterator[Batch]:
    """Yield the documents of a work range of a line file, compressed or not; see `formats.read`.

    Args:
        work_range: The work range to read.
        text_key: Key of the text.
        keep: Selects the documents to decode, or None for all.
        batch_bytes: Approximate content size of a batch in bytes.
        decoders: State that this process keeps between work ranges.
        fields: The other fields to read, or None.
        line: Function that returns a decoder of one line. Another line format may replace
            `line_decoder` by a function with the same arguments and results.
        block: Function that returns a decoder of many lines. Another line format may replace
            `block_decoder` by a function with the same arguments and results.
    """
    decode_block, batch = block(text_key, fields), BatchBuilder(work_range.file)
    chosen = by_fields(keep)
    for lines in part_lines(work_range, keep, decoders):
        all_wanted = keep is None
        if not all_wanted:
            is_wanted = kept(
                keep,
                work_range.file,
                lines.positions,
                lines.stored_sizes,
                partial(fields_of, lines),
            )
            if not is_wanted.any():
                continue
            # Documents with bad fields are added one by one, so that each becomes a reject.
            all_wanted = bool(is_wanted.all()) and not (chosen and chosen.bad)
            lines = lines if all_wanted else lines.at(is_wanted)
        if work_range.grouping:
            batch.note(lines.positions, _group_values(work_range.grouping, work_range.path, lines))
        # Block decoding would also decode the unwanted lines between the wanted ones.
        texts = decode_block(lines.data, lines.starts, lines.sizes) if all_wanted else None
        if texts is not None:
            yield from batch.extend(lines.positions, texts, lines.sizes, batch_bytes)
        else:
            bad = chosen.bad if chosen else {}
            yield from _add_one_by_one(batch, lines, line(text_key, fields), bad, batch_bytes)
    yield from batch.take()


def fields_of(lines: Lines, names: Sequence[str]) -> list[FieldColumns]:
    """Return the values of some fields of the lines, as `read_line_fields` does."""
    # line_fields imports this module, and loads pyarrow, which most line files do not need.
    from packprep.sources.formats.line_fields import read_line_fields

    return read_line_fields(lines, names)


def _group_values(grouping: Grouping, path: str, lines: Lines) -> Iterator[GroupValue]:
    """Yield the values to group by of some lines. A line that is not an object has none.

    Raises:
        SourceError: If a value is a list or an object.
    """
    from packprep.sources.formats.line_fields import values_decoder

    keys = [key for key in (grouping.group_by, grouping.order_by) if key]
    decode = values_decoder(tuple(keys))
    for i, position in enumerate(lines.positions.tolist()):
        line = lines.line(i)
        values = (None if line is None else decode(line)) or [None] * len(keys)
        yield group_value(grouping, dict(zip(keys, values, strict=True)).get, path, position)


def _add_one_by_one(
    batch: BatchBuilder,
    lines: Lines,
    decode: Callable[[bytes], Outcome],
    bad: Mapping[int, str],
    batch_bytes: int,
) -> Iterator[Batch]:
    for i, position in enumerate(lines.positions.tolist()):
        line = lines.line(i)
        if line is None:
            batch.reject(position, *too_large_line())
        elif position in bad:
            batch.reject(position, BAD_FIELD, bad[position])
        elif isinstance(outcome := decode(line), tuple):
            batch.reject(position, *outcome)
        else:
            batch.add(position, outcome, len(line))
        if batch.bytes >= batch_bytes:
            yield from batch.take()


def part_lines(work_range: Slice, keep: Keep | None, decoders: Decoders) -> Iterator[Lines]:
    """Yield all lines of a work range, including lines that `keep` does not select.

    If `keep` is a `Choice`, it must count all lines of the split. Therefore it is first called with
    the lines that precede the work range in the split.
    """
    max_bytes = limits.MAX_LINE_BYTES
    if not work_range.compression:
        first_byte = work_range.piece * work_range.piece_bytes
        begin, end = work_range.range(min(work_range.piece_bytes, work_range.size - first_byte))
        if begin < end:
            if isinstance(keep, Choice) and begin:
                earlier_cursor = Cursor(
                    byte_blocks(work_range.path, work_range.size, first_byte, first_byte + begin)
                )
                _choose(keep, work_range.file, take_lines(earlier_cursor, 1, 2, max_bytes))
            cursor = Cursor(
                byte_blocks(work_range.path, work_range.size, first_byte + begin, first_byte + end)
            )
            yield from take_lines(cursor, 1, 2, max_bytes)
        return
    begin, end = work_range.range(-(-work_range.size // work_range.step_bytes))
    if begin < end:
        # A cursor of a Choice has counted lines, so only the same Choice may continue there.
        of_choice = int(keep.key) if isinstance(keep, Choice) else None
        cursor = decoders.take(
            work_range.path,
            work_range.size,
            work_range.compression,
            work_range.step_bytes,
            begin,
            of_choice,
        )
        if isinstance(keep, Choice):
            # Both share one array, so counting in the Choice also updates the cursor.
            keep.seen = cursor.seen = keep.seen if cursor.seen is None else cursor.seen
            _choose(keep, work_range.file, take_lines(cursor, cursor.next_label, begin, max_bytes))
        yield from take_lines(cursor, begin, end, max_bytes)
        # After the last work range of a split, nothing continues at the cursor.
        if work_range.hi < work_range.weight:
            decoders.give_back(cursor)


def line_bytes(work_range: Slice) -> int:
    """Return the number of bytes on disk of the lines that start in a work range.

    A compressed file is divided into steps of `step_bytes` compressed bytes. For such a file, the
    result is the number of compressed bytes in the work range's steps. In other files, a line
    longer than MAX_LINE_BYTES counts as MAX_LINE_BYTES.
    """
    if work_range.compression:
        begin, end = work_range.range(-(-work_range.size // work_range.step_bytes))
        return min(end * work_range.step_bytes, work_range.size) - begin * work_range.step_bytes
    max_bytes = limits.MAX_LINE_BYTES  # A longer line counts as this many bytes.
    sizes = (lines.sizes for lines in part_lines(work_range, None, Decoders()))
    return sum(
        int(np.where(line_sizes < 0, max_bytes, line_sizes + 1).sum()) for line_sizes in sizes
    )


def _choose(choice: Choice, file: int, earlier_lines: Iterator[Lines]) -> None:
    """Call `choice` with the lines in `earlier_lines`, all of which precede the work range.

    The result is ignored, because the Choice only has to count these lines.
    """
    for lines in earlier_lines:
        none = np.zeros(len(lines.positions), np.bool_)
        choice(file, lines.positions, lines.stored_sizes(), partial(fields_of, lines), none)


def byte_blocks(path: str, size: int, begin: int, end: int) -> Iterator[Block]:
    """Yield the bytes of a file in blocks, from the byte before `begin` to the end of the file.

    Blocks with label 1 are in the interval [begin, end). The byte before the interval has label 0,
    and the bytes after the interval have label 2.
    """
    with open_source(path, size) as file:
        # The byte before the range shows whether the range starts inside a line.
        position = max(begin - 1, 0)
        file.seek(position)
        step = _FINISH_BYTES
        while position < size:
            if position < begin:
                label, n_bytes = 0, 1
            elif position < end:
                label, n_bytes = 1, min(_READ_BYTES, end - position)
            else:
                label, n_bytes = 2, step
                step = min(2 * step, _READ_BYTES)
            data = file.read(n_bytes)
            if not data:
                raise SourceError(
                    f"{path}: the file became shorter while it was read, at byte {position} of"
                    f" {size}"
                )
            yield Block(label, position, data)
            position += len(data)


def take_lines(cursor: Cursor, begin: int, end: int, max_bytes: int) -> Iterator[Lines]:
    """Yield the lines that start in a block with begin ≤ label < end.

    Each `Lines` has at least one line. The result omits blank lines, and a byte order mark at the
    start of the stream. A line of more than `max_bytes` has size -1 and no data.

    After all lines were yielded, another call can continue with the same cursor. The `begin` of
    that call must be the `end` of this call.
    """
    pending: list[Block] = []  # the parts read so far of an unfinished wanted line
    cursor.next_label = end
    while block := cursor.next(begin, end):
        label, position, data = block
        # All wanted lines are complete, so the next call starts with this block.
        if label >= end and not pending:
            cursor.rest = block
            return
        if not data:
            continue
        # Blocks before the range only show whether the range starts a line.
        if label < begin:
            cursor.at_line_start = data.endswith(b"\n")
            continue
        start = 0
        # The block starts inside a line. Its rest is skipped, or belongs to the wanted line.
        if not cursor.at_line_start:
            start = data.find(b"\n") + 1
            cursor.at_line_start = start > 0
            if pending:
                pending.append(block._replace(data=data[: start - 1] if start else data))
                if start or _is_longer(pending, max_bytes):
                    yield from _one_line(pending, max_bytes)
                    pending = []
        # After the range, only the rest of the last wanted line is needed.
        if label >= end:
            cursor.rest = Block(label, position + start, data[start:]) if start else None
            if not pending:
                return
        elif cursor.at_line_start:
            last_end = data.rfind(b"\n") + 1  # This is 0 only if start is 0.
            if last_end > start:
                yield from _whole_lines(data, position, start, last_end, max_bytes)
            # The last line of the block is finished by the next blocks.
            if last_end < len(data):
                cursor.at_line_start = False
                pending = [Block(label, position + last_end, data[last_end:])]
                if _is_longer(pending, max_bytes):
                    yield from _one_line(pending, max_bytes)
                    pending = []
    if pending:
        yield from _one_line(pending, max_bytes)


def _is_longer(parts: list[Block], max_bytes: int) -> bool:
    """Return whether a line is longer than `max_bytes`. Its parts follow each other in the file."""
    return parts[-1].position + len(parts[-1].data) - parts[0].position > max_bytes


def _one_line(parts: list[Block], max_bytes: int) -> Iterator[Lines]:
    position = parts[0].position
    if _is_longer(parts, max_bytes):
        positions, start, size = (np.array([value], np.int64) for value in (position, 0, -1))
        yield Lines(b"", positions, start, size)
    else:
        data = b"".join([*(part.data for part in parts), b"\n"])
        yield from _whole_lines(data, position, 0, len(data), max_bytes)


def _whole_lines(
    data: bytes, position: int, begin: int, end: int, max_bytes: int
) -> Iterator[Lines]:
    """Yield the non-blank lines of data[begin:end]. The byte data[end - 1] must be a line end.

    Each `Lines` covers only about AT_ONCE_BYTES, to limit the memory for many short lines.
    """
    characters = np.frombuffer(data, np.uint8)
    while begin < end:
        # `some_end` is after a line end, so each part has whole lines only.
        some_end = data.find(b"\n", min(begin + AT_ONCE_BYTES, end - 1)) + 1
        ends = np.flatnonzero(characters[begin:some_end] == ord("\n")) + begin
        starts = np.concatenate([[begin], ends[:-1] + 1])
        sizes = ends - starts
        sizes[sizes > max_bytes] = -1
        positions = position + starts
        # Only the first line of a stream can have a byte order mark.
        if positions[0] == 0 and sizes[0] >= 0 and data.startswith(BOM, int(starts[0])):
            starts[0] += len(BOM)
            sizes[0] -= len(BOM)
        # Only a line that starts with white space can be blank.
        lines, blank = Lines(data, positions, starts, sizes), sizes == 0
        for i in np.flatnonzero(_IS_SPACE[characters[starts]] & (sizes > 0)):
            blank[i] = data[starts[i] : starts[i] + sizes[i]].isspace()
        if blank.any():
            lines = lines.at(~blank)
        if len(lines.positions):
            yield lines
        begin = some_end
