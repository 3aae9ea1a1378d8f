"""Read JSON Lines with a list of token ids, and optional masks, in each line.

{"input_ids": [70, 71, 72], "labels": [-100, 71, 72]}

msgspec finds the lists of a line and leaves their numbers as text. NumPy parses the numbers of many
lines at once. Lines that msgspec refuses are decoded again by Python's own decoder. It finds the
exact reject reason, or accepts a valid line that msgspec refuses.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np

from packprep.sources.formats import batch as limits
from packprep.sources.formats.batch import (
    BAD_FIELD,
    Batch,
    Keep,
    Slice,
    by_fields,
    kept,
    slices,
    too_large_line,
    too_many_tokens,
)
from packprep.sources.formats.compressed import Decoders
from packprep.sources.formats.fields import Fields
from packprep.sources.formats.jsonl import (
    MIN_NESTED_BYTES,
    Lines,
    fields_of,
    kind_of,
    nested_too_deep,
    parse_object,
    part_lines,
    without_keys,
)
from packprep.sources.formats.token_masks import BAD_MASK, LABELS, MASKS, WEIGHTS
from packprep.sources.formats.token_rows import (
    COLUMNS,
    TokenRows,
    batch_of_rows,
    not_as_long,
    row_weights,
)

_WEIGHT = "weight"
_INTEGERS = b"0123456789-, \t\r"
_NUMBERS = _INTEGERS + b".eE+"
"""Characters that a list of integers (_INTEGERS) or of any numbers (_NUMBERS) may consist of."""
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1
"""NumPy parses an integer that does not fit into int64 as one of these values."""


class _Keys(NamedTuple):
    """The keys to read from a record.

    `ids` lists possible keys of the token ids. The first of these keys that a record has is read.
    """

    ids: tuple[str, ...]
    masks: tuple[str, ...]
    has_weight: bool


class _Row(NamedTuple):
    """A record's lists of numbers, each as the JSON text between the list's brackets.

    For {"input_ids": [70, 71]}, `ids` is b"70, 71".
    """

    length: int  # number of token ids, and of entries in each mask
    ids: bytes
    masks: dict[str, bytes]
    weight: Any


_Found = _Row | tuple[str, str]
"""A row, or the reject reason and detail of an invalid line."""


def read(
    work_range: Slice,
    text_key: str,
    keep: Keep | None,
    batch_bytes: int,
    decoders: Decoders,
    fields: Fields | None,
) -> Iterator[Batch]:
    """Yield the documents of a work range of token lines, compressed or not; see `formats.read`."""
    keys, chosen = _keys_of(text_key, fields), by_fields(keep)
    for lines in part_lines(work_range, keep, decoders):
        is_wanted = kept(
            keep, work_range.file, lines.positions, lines.stored_sizes, partial(fields_of, lines)
        )
        lines_wanted = lines if is_wanted.all() else lines.at(is_wanted)
        for batch_slice in slices(lines_wanted.stored_sizes(), batch_bytes):
            bad = chosen.bad if chosen else {}
            yield _batch(work_range.file, lines_wanted.at(batch_slice), keys, bad)


def _keys_of(text_key: str, fields: Fields | None) -> _Keys:
    """Return the keys to read from records.

    If `fields` is None, the result has no keys of masks and weights, so these are ignored.
    """
    ids = COLUMNS if text_key == "text" else (text_key,)
    beside = [name for name in (_WEIGHT, *MASKS) if fields and name not in ids]
    return _Keys(ids, tuple(name for name in beside if name != _WEIGHT), _WEIGHT in beside)


def _batch(file: int, lines: Lines, keys: _Keys, bad: Mapping[int, str]) -> Batch:
    """Return a batch with the documents in `lines`. Invalid lines are among its rejects.

    `bad` is `ByFields.bad`, or {}.
    """
    rows = _token_rows(lines, _line_decoder(keys), bad)
    if len(rows.ids) and (rows.ids.min() == _LEAST or rows.ids.max() == _MOST):
        rows = _token_rows(lines, partial(_decode_exactly, keys=keys), bad)
    return batch_of_rows(file, lines.positions, rows)


def _token_rows(
    lines: Lines, decode: Callable[[bytes], _Found], unjudged: Mapping[int, str]
) -> TokenRows:
    """Decode `lines` with `decode`, and return their token ids and masks as a `TokenRows`.

    `unjudged` is `ByFields.bad`, or {}.
    """
    line_texts = (lines.line(i) for i in range(len(lines.positions)))
    rows_or_rejects = [too_large_line() if line is None else decode(line) for line in line_texts]
    refused = {i: row for i, row in enumerate(rows_or_rejects) if not isinstance(row, _Row)}
    # Fields are judged before ids are parsed, so `bad_field` replaces other reasons.
    for i, position in enumerate(lines.positions.tolist() if unjudged else ()):
        if position in unjudged:
            rows_or_rejects[i] = refused[i] = BAD_FIELD, unjudged[position]
    weights, bad = row_weights(
        [row.weight if isinstance(row, _Row) else None for row in rows_or_rejects]
    )
    refused |= bad
    used = np.ones(len(rows_or_rejects), np.bool_)
    used[list(refused)] = False
    # Accepted texts consist of numbers only, so NumPy parses many lists at once.
    rows = [
        row for i, row in enumerate(rows_or_rejects) if isinstance(row, _Row) and i not in refused
    ]
    lengths = np.zeros(len(rows_or_rejects), np.int64)
    lengths[used] = [row.length for row in rows]
    ids = _numbers((row.ids for row in rows), np.int64)
    masks, given_masks = {}, {}
    for name in MASKS:
        has_mask = np.array([name in row.masks for row in rows], np.bool_)
        if not has_mask.any():
            continue
        texts = (row.masks[name] for row in rows if name in row.masks)
        masks[name] = _numbers(texts, np.float64 if name == WEIGHTS else np.int64)
        # Rows without the mask get values that train every token.
        if not has_mask.all():
            given_masks[name] = np.repeat(has_mask, lengths[used])
            of_all = (ids if name == LABELS else np.ones(len(ids))).astype(masks[name].dtype)
            of_all[given_masks[name]] = masks[name]
            masks[name] = of_all
    return TokenRows(lengths, used, ids, masks, given_masks, weights, refused)


def _numbers(texts: Iterable[bytes], kind: type) -> np.ndarray:
    """Return all numbers in texts of comma-separated numbers, as one array.

    The dtype of the array is `kind`, or float64 if a number has a fraction or an exponent.
    """
    text = b",".join(filter(None, texts))
    if not text:
        return np.zeros(0, kind)
    return np.fromstring(text, np.float64 if text.translate(None, _INTEGERS) else kind, sep=",")


@lru_cache(maxsize=64)
def _line_decoder(keys: _Keys) -> Callable[[bytes], _Found]:
    """Return a function that decodes a line.

    The returned function takes the bytes of a line without its line end. It returns a `_Row`, or a
    (reject reason, detail) pair. It never raises an exception.
    """
    names = (*keys.ids, *keys.masks)
    record_fields = [(f"field{i}", msgspec.Raw, None) for i in range(len(names))]
    rename = {f"field{i}": name for i, name in enumerate(names)}
    try:
        record = msgspec.defstruct(
            "Record",
            [*record_fields, *([(_WEIGHT, Any, None)] if keys.has_weight else [])],
            rename=rename,
            gc=False,
        )
    except ValueError:  # msgspec refuses keys that need JSON escapes.
        return partial(_decode_exactly, keys=keys)
    parse = msgspec.json.Decoder(record).decode
    getters = [(name, attrgetter(f"field{i}")) for i, name in enumerate(names)]

    def decode(line: bytes) -> _Found:
        try:
            parsed = parse(line)
            # msgspec checks neither the UTF-8 nor the nesting depth of skipped data.
            if not line.isascii():
                line.decode()
            if len(line) >= MIN_NESTED_BYTES and nested_too_deep(line):
                raise ValueError
            # Lists stay JSON text here, and `_numbers` parses them.
            values = {name: bytes(raw) for name, get in getters if (raw := get(parsed)) is not None}
            return _row_of(values, keys, getattr(parsed, _WEIGHT, None))
        except (ValueError, msgspec.MsgspecError, RecursionError):
            return _decode_exactly(line, keys)

    return decode


def _row_of(values: dict[str, bytes], keys: _Keys, weight: Any) -> _Row:
    """Return the row of a record. `values` maps the record's keys to their values' JSON text.

    Raises:
        ValueError: If a value is not a list of numbers, if a mask differs in length from the ids,
            or if there are too many ids.
    """
    ids = _inner(next((values[name] for name in keys.ids if name in values), b""), _INTEGERS)
    length = _count(ids)
    masks = {name: _mask(values[name]) for name in keys.masks if name in values}
    if length > limits.MAX_DOCUMENT_TOKENS or any(_count(m) != length for m in masks.values()):
        raise ValueError
    return _Row(length, ids, masks, weight)


def _inner(value: bytes, characters: bytes) -> bytes:
    """Return the text between the brackets of a JSON list.

    Raises:
        ValueError: If `value` is not a list, or if the text contains a character that is not in
            `characters`.
    """
    list_text = value[1:-1]
    if value[:1] != b"[" or list_text.translate(None, characters):
        raise ValueError
    return b"" if list_text.isspace() else list_text


def _mask(value: bytes) -> bytes:
    """Return the text between the brackets of a JSON list, with 1 for true and 0 for false.

    Raises:
        ValueError: If `value` is not a list of numbers and bools.
    """
    if b"e" in value:
        value = value.replace(b"true", b"1").replace(b"false", b"0")
    return _inner(value, _NUMBERS)


def _count(list_text: bytes) -> int:
    """Return the number of entries of a list. `list_text` is the text between its brackets."""
    return list_text.count(b",") + 1 if list_text else 0


def _decode_exactly(line: bytes, keys: _Keys) -> _Found:
    """Decode any line with Python's decoder.

    Return its row, or a (reject reason, detail) pair with the exact reason.
    """
    record = parse_object(line, has_numbers=True)
    if isinstance(record, tuple):
        return record
    name = next((name for name in keys.ids if name in record), None)
    if name is None:
        return "not_tokens", without_keys(record, *keys.ids)
    ids = record[name]
    if not isinstance(ids, list):
        detail = f"the value of {ascii(name[:40])} is {kind_of(ids)}, not a list of token ids"
        return "not_tokens", "the value is null" if ids is None else detail
    if len(ids) > limits.MAX_DOCUMENT_TOKENS:
        return too_many_tokens(len(ids))
    weight = record.get(_WEIGHT) if keys.has_weight else None
    _, bad_weights = row_weights([weight])
    masks = {
        name: [] if record[name] is None else record[name] for name in keys.masks if name in record
    }
    # The order of these checks is fixed, because the first reason is stored in the rejects.
    problem = bad_weights.get(0) or _bad_length(masks, len(ids)) or _bad_ids(ids)
    if problem := problem or _bad_entries(masks):
        return problem
    return _Row(len(ids), _text(ids), {name: _text(mask) for name, mask in masks.items()}, weight)


def _text(values: Sequence[Any]) -> bytes:
    """Return numbers and bools as comma-separated text, with 1 for True and 0 for False."""
    return ",".join(repr(+value) for value in values).encode()


def _bad_length(masks: dict[str, Any], length: int) -> tuple[str, str] | None:
    """Return (reject reason, detail) for the first mask that is not a list of `length` entries.

    Return None if all masks are lists of `length` entries.
    """
    for name, mask in masks.items():
        if not isinstance(mask, list):
            return BAD_MASK, f"{name} is {kind_of(mask)}, not a list"
        if len(mask) != length:
            return not_as_long(name, len(mask), length)
    return None


def _bad_ids(ids: list[Any]) -> tuple[str, str] | None:
    """Return (reject reason, detail) for the first id that is not an integer or is too large.

    Return None if all ids are integers between _LEAST and _MOST, both excluded.
    """
    if detail := _bad_entry(ids, {int}, "an integer"):
        return "not_tokens", detail
    i = next((i for i, id in enumerate(ids) if not _LEAST < id < _MOST), None)
    return None if i is None else ("id_out_of_range", f"token {i} has more than 63 bits")


def _bad_entries(masks: dict[str, list[Any]]) -> tuple[str, str] | None:
    """Return (reject reason, detail) for the first entry of a mask that is not a number or bool.

    Return None if all entries are numbers or bools.
    """
    for name, mask in masks.items():
        if detail := _bad_entry(mask, {int, float, bool}, "a number"):
            return BAD_MASK, f"{name}: {detail}"
    return None


def _bad_entry(values: list[Any], kinds: set[type], requirement: str) -> str:
    """Return a message about the first entry with a type that is not in `kinds`.

    Return "" if all types are in `kinds`. `requirement` describes these types, for example "an
    integer".
    """
    if set(map(type, values)) <= kinds:
        return ""
    i = next(i for i, value in enumerate(values) if type(value) not in kinds)
    if values[i] is None:
        return f"token {i} is null"
    value = repr(values[i]) if isinstance(values[i], float) else kind_of(values[i])
    return f"token {i} is {value}, not {requirement}"
