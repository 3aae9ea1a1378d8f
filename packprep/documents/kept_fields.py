"""Keep fields of documents in a token store, so that expressions can select documents later.

A value is kept as an expression reads it: its type, and 64 bits. A text's bits are its number in
the store's list of texts. A list or an object keeps only its type, because expressions read nothing
else of it.

    field              type     bits
    3                  int64    3
    0.5                float64  0x3fe0000000000000
    "de"               text     number of "de" in `field_texts`
    null, NaN          null     0
    ["a", "b"]         list     0
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from packprep.dataset.boundaries import descents, offsets_of
from packprep.dataset.segments import Arrays
from packprep.recipe import Source
from packprep.sources.passes import FieldColumns, ReadFields

TYPES = (
    *("null", "bool", "int64", "uint64", "float32", "float64", "text", "list", "object"),
    *("date", "s", "ms", "us", "ns", "s utc", "ms utc", "us utc", "ns utc"),
)
"""The types of kept values. `field_kinds` has their indices. The last eight are times."""
NULL, BOOL, TEXT, OBJECT, DATE = (
    TYPES.index(t) for t in ("null", "bool", "text", "object", "date")
)
UNREADABLE = len(TYPES)
"""The kind of each field of a record that could not be read."""


def kept_names(source: Source) -> tuple[str, ...]:
    """Return the names of the fields that a token store keeps of a source."""
    return tuple(dict.fromkeys(source.keep or ()))


class KeptFields(NamedTuple):
    """F fields of n documents.

    Attributes:
        kinds: uint8[F, n], indices into TYPES, or UNREADABLE.
        bits: int64[F, n], as the docstring of this module describes.
        texts: The texts that occur, sorted.
    """

    kinds: np.ndarray
    bits: np.ndarray
    texts: list[bytes]

    def columns(self, first_text: int) -> dict[str, Any]:
        """Return the values to add to the arrays of a shard that has `first_text` texts so far."""
        is_text = self.kinds == TEXT
        return {
            "field_kinds": self.kinds.reshape(-1),
            "field_values": np.where(is_text, self.bits + first_text, self.bits).reshape(-1),
            "field_offsets": [self.kinds.size],
            "field_text_offsets": list(map(len, self.texts)),
            "field_texts": np.frombuffer(b"".join(self.texts), np.uint8),
        }


class FieldNotes:
    """A collector of the fields of consecutive documents."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._kinds: list[np.ndarray] = []
        self._bits: list[np.ndarray] = []
        self._texts: dict[bytes, int] = {}

    def add(self, count: int, records: Sequence[FieldColumns]) -> None:
        """Add `count` documents with these records."""
        kinds = np.full((len(self.names), count), UNREADABLE, np.uint8)
        bits = np.zeros((len(self.names), count), np.int64)
        for rows, columns in records:
            for f, name in enumerate(self.names):
                kinds[f, rows], bits[f, rows] = self._encoded(columns[name])
        self._kinds.append(kinds)
        self._bits.append(bits)

    def _encoded(self, column: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return (kinds, bits) of a `pyarrow.Array`."""
        import pyarrow as pa

        from packprep.sources.expressions import rows

        kind = rows.kind_of_type(column.type)
        if kind not in rows.READ:
            valid = column.is_valid().to_numpy(zero_copy_only=False)
            code = TYPES.index("list") if kind == "a list" else OBJECT
            return np.where(valid, code, NULL), np.zeros(len(column), np.int64)
        values, valid = rows.of_column(column)[:2]
        if values is None:
            return np.full(len(column), NULL), np.zeros(len(column), np.int64)
        if isinstance(values, np.ndarray):
            # Numbers keep their bits. A float32 is widened, which loses nothing.
            code = TYPES.index(values.dtype.name)
            wide = values.astype(np.float64) if values.dtype.kind == "f" else values
            bits = wide.astype(np.int64) if wide.dtype == np.bool_ else wide.view(np.int64)
        elif kind == rows.TEXT:
            # A text keeps its number among all texts of these notes.
            code, texts = TEXT, values.cast(pa.large_binary()).to_pylist()
            numbers = (self._texts.setdefault(t or b"", len(self._texts)) for t in texts)
            bits = np.fromiter(numbers, np.int64, len(texts))
        else:
            code, bits = _times(values)
        # Null rows have zero bits, so that equal records are stored as equal bytes.
        return np.where(valid, code, NULL), np.where(valid, bits, 0)

    def at(self, places: np.ndarray) -> KeptFields:
        """Return the fields of some documents. `places` has their numbers in order of `add`."""
        kinds, bits = (
            np.concatenate(batches, axis=1)[:, places] for batches in (self._kinds, self._bits)
        )
        # The order of the texts must not depend on the batches in which they were read.
        is_text, known_texts = kinds == TEXT, list(self._texts)
        used = np.unique(bits[is_text])
        texts = sorted(known_texts[i] for i in used.tolist())
        number = {text: i for i, text in enumerate(texts)}
        sorted_number = np.zeros(len(known_texts), np.int64)
        sorted_number[used] = [number[known_texts[i]] for i in used.tolist()]
        bits[is_text] = sorted_number[bits[is_text]]
        return KeptFields(kinds, bits, texts)


def _times(values: Any) -> tuple[int, np.ndarray]:
    """Return the code and the bits of a `pyarrow.Array` of times."""
    import pyarrow as pa

    if pa.types.is_date(values.type):
        days = values.cast(pa.date32(), safe=False).cast(pa.int32())
        return DATE, days.fill_null(0).to_numpy().astype(np.int64)
    code = TYPES.index(values.type.unit + (" utc" if values.type.tz else ""))
    return code, values.cast(pa.int64()).fill_null(0).to_numpy()


def kept_of_part(arrays: Arrays, k: int, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return (kinds uint8[F, n], bits int64[F, n]) of part `k` of a shard, as in `KeptFields`.

    A text's number counts from the start of the shard. `names` has the F fields of the part.
    """
    begin, end = arrays["field_offsets"][k : k + 2].tolist()
    kinds, bits = (arrays[name][begin:end] for name in ("field_kinds", "field_values"))
    shape = len(names), (end - begin) // max(len(names), 1)
    return kinds.reshape(shape), bits.reshape(shape)


def reader_of_part(arrays: Arrays, k: int, names: Sequence[str], documents: slice) -> ReadFields:
    """Return a function that returns fields of some documents of part `k` of a shard.

    Args:
        arrays: The arrays of the shard.
        k: Number of the part.
        names: The fields that the part has.
        documents: The documents, counted from the start of the part.
    """

    def read(wanted_names: Sequence[str]) -> list[FieldColumns]:
        kinds, bits = kept_of_part(arrays, k, names)
        field_indices = [names.index(name) for name in wanted_names]
        some_kinds, some_bits = kinds[field_indices, documents], bits[field_indices, documents]
        # A column has one type, so documents whose fields have the same types are read together.
        types, groups = np.unique(some_kinds, axis=1, return_inverse=True)
        records = []
        for g, codes in enumerate(types.T.tolist()):
            if UNREADABLE in codes:
                continue
            rows = np.flatnonzero(groups.reshape(-1) == g)
            columns = {
                name: _decoded(code, some_bits[f, rows], arrays)
                for f, (name, code) in enumerate(zip(wanted_names, codes, strict=True))
            }
            records.append(FieldColumns(rows, columns))
        return records

    return read


def _decoded(code: int, bits: np.ndarray, arrays: Arrays) -> Any:
    """Return values of one type as a `pyarrow.Array`."""
    import pyarrow as pa

    name = TYPES[code]
    if code == NULL:
        return pa.nulls(len(bits))
    if code == BOOL:
        return pa.array(bits != 0)
    if code == TEXT:
        # Each distinct text is decoded once, and a dictionary repeats it.
        numbers, indices = np.unique(bits, return_inverse=True)
        offsets, data = arrays["field_text_offsets"], arrays["field_texts"]
        texts = [data[offsets[i] : offsets[i + 1]].tobytes() for i in numbers.tolist()]
        dictionary = pa.array(texts, pa.large_binary())
        return pa.DictionaryArray.from_arrays(indices.reshape(-1).astype(np.int32), dictionary)
    if name in ("list", "object"):
        kind = pa.list_(pa.null()) if name == "list" else pa.struct([])
        return pa.array([[] if name == "list" else {}] * len(bits), kind)
    if code == DATE:
        return pa.array(bits.astype(np.int32)).cast(pa.date32())
    if code > DATE:
        unit, _, zone = name.partition(" ")
        return pa.array(bits).cast(pa.timestamp(unit, "UTC" if zone else None))
    if name.startswith("float"):
        return pa.array(bits.view(np.float64).astype(name))
    return pa.array(bits.view(name))


def without_fields(arrays: Arrays, is_erased: np.ndarray, counts: Sequence[int]) -> dict[str, Any]:
    """Return the field arrays of a shard, with the fields of some documents erased.

    Erased fields are null. A text that no other document has becomes empty. The result is {} if the
    shard keeps no fields.

    Args:
        arrays: The arrays of the shard.
        is_erased: bool[D], the documents to erase.
        counts: Number of fields of each part.
    """
    if "field_kinds" not in arrays:
        return {}
    kinds, bits = np.array(arrays["field_kinds"]), np.array(arrays["field_values"])
    erased = _entries(arrays, is_erased, counts)
    kinds[erased], bits[erased] = NULL, 0
    lengths = np.diff(arrays["field_text_offsets"])
    is_used = texts_used(kinds, bits, len(lengths))
    texts = arrays["field_texts"][np.repeat(is_used, lengths)]
    return {
        "field_kinds": kinds,
        "field_values": bits,
        "field_text_offsets": offsets_of(np.where(is_used, lengths, 0)),
        "field_texts": texts,
    }


def texts_used(kinds: np.ndarray, bits: np.ndarray, count: int) -> np.ndarray:
    """Return which of `count` texts of a shard a document has, bool[count]."""
    is_used = np.zeros(count, np.bool_)
    is_used[bits[kinds == TEXT]] = True
    return is_used


def _entries(arrays: Arrays, is_erased: np.ndarray, counts: Iterable[int]) -> np.ndarray:
    """Return which entries of `field_kinds` belong to some documents, bool[entries].

    The arguments are as in `without_fields`.
    """
    bounds = arrays["part_offsets"].tolist()
    parts = [
        np.tile(is_erased[a:b], count)
        for a, b, count in zip(bounds, bounds[1:], counts, strict=False)
    ]
    return np.concatenate([np.zeros(0, np.bool_), *parts])


def wrong_fields(
    arrays: Mapping[str, np.ndarray], removed: np.ndarray, counts: Sequence[int]
) -> list[tuple[str, str]]:
    """Return (promise, message) for each fault of a shard's kept fields.

    Args:
        arrays: The arrays of the shard, whose parts and documents are sound.
        removed: bool[D], the documents that were removed.
        counts: Number of fields of each part.
    """
    expected = np.diff(arrays["part_offsets"]) * np.array(counts, np.int64)
    if "field_kinds" not in arrays:
        return [("P4", "the fields of the documents are missing")] if expected.any() else []
    kinds, bits = arrays["field_kinds"], arrays["field_values"]
    offsets, texts = arrays["field_offsets"], arrays["field_text_offsets"]
    if not np.array_equal(offsets, offsets_of(expected)) or not (
        len(kinds) == len(bits) == expected.sum()
    ):
        return [("P4", "the documents of a part do not have all fields")]
    is_sound = len(texts) and texts[0] == 0 and texts[-1] == len(arrays["field_texts"])
    if not is_sound or descents(texts).any():
        return [("P4", "field_text_offsets does not ascend to the end of field_texts")]
    numbers = bits[kinds == TEXT]
    if (kinds > UNREADABLE).any() or ((numbers < 0) | (numbers >= len(texts) - 1)).any():
        return [("P4", "a field has an unknown type or text")]
    faults = []
    if (kinds[_entries(arrays, removed, counts)] != NULL).any():
        faults.append(("P23", "a removed document has fields"))
    if np.diff(texts)[~texts_used(kinds, bits, len(texts) - 1)].any():
        faults.append(("P23", "a text belongs to no document"))
    return faults
