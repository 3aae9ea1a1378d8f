"""Define `Segments`, the columns of a shard's segments, from cutting to verification.

    step       change to the segments
    cut        add the origin of the tokens, task, bos, eos and length     in document order
    place      add row and first_slot                                      in row order
    render     add prefix, noise, loss_weight, trained ranges, media, blocks and records
    shard      `header_arrays` writes the columns, `of_arrays` reads them
    verify     recompute bos, eos, repeated and first_trained by the length formula (`restoring`)

A column has one entry per segment. A segment may have any number of trained ranges, media spans,
blocks and records. Their arrays contain them segment after segment, and `offsets` has the bounds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from packprep.dataset.boundaries import boundaries, offsets_of, owners

Arrays = Mapping[str, np.ndarray]
"""The arrays of a shard by name."""
HEADER: dict[str, np.dtype] = {
    "doc": np.dtype("<i8"),
    "start": np.dtype("<i8"),
    "key": np.dtype("<u8"),
    "tokens": np.dtype("<i4"),
    "prefix": np.dtype("<i4"),
    "noise": np.dtype("<f4"),
    "loss_weight": np.dtype("<f4"),
    "file": np.dtype("<u4"),
    "task": np.dtype("<u2"),
    "source": np.dtype("<u2"),
    "repeat": np.dtype("<u2"),
}
"""The columns that a shard stores as arrays segment_NAME, with their dtypes, in file order."""
_DTYPES: dict[str, np.dtype] = dict.fromkeys(HEADER, np.dtype("i8")) | {
    "key": np.dtype("u8"),
    "noise": np.dtype("f4"),
    "loss_weight": np.dtype("f4"),
}


class Bodies(NamedTuple):
    """The columns of m segments that an objective needs to draw the segments' bodies.

    Each array has the shape [m].
    """

    n: np.ndarray  # int64: number of body tokens: content and a repeated system message
    key: np.ndarray  # uint64
    # int64: index of the first trained body token if the document is supervised, otherwise -1
    first_trained: np.ndarray
    fill: np.ndarray  # int64: number of eos that fill up the last block
    epoch: int = 0  # The epoch of the random numbers. Stored rows have epoch 0.


class TrainedRanges(NamedTuple):
    """The ranges of trained slots in the segments of a shard.

    Only shards with supervised documents have them.
    """

    offsets: np.ndarray  # int64[m + 1]: the ranges of segment i are offsets[i] … offsets[i + 1] − 1
    ranges: np.ndarray  # int32[k, 2]: start and end, relative to the segment's first slot
    weights: np.ndarray | None = None  # float32[k]; all are 1 if None

    @property
    def segment(self) -> np.ndarray:
        """The index of each range's segment, int64[k]."""
        return owners(np.diff(self.offsets))

    def select(self, chosen: np.ndarray) -> "TrainedRanges":
        """Return the ranges of the chosen segments. The result has only these segments.

        `chosen` is bool[m]. The segments of the result are numbered from 0.
        """
        counts = np.diff(self.offsets)
        kept = np.repeat(chosen, counts)
        weights = None if self.weights is None else self.weights[kept]
        return TrainedRanges(offsets_of(counts[chosen]), self.ranges[kept], weights)

    def weighted_slots(self) -> np.ndarray:
        """Return how many slots of each segment have a loss weight other than 1, int64[m]."""
        counts = np.zeros(len(self.offsets) - 1, np.int64)
        if self.weights is not None:
            lengths = np.diff(self.ranges.astype(np.int64), axis=1)[:, 0]
            np.add.at(counts, self.segment, np.where(self.weights != 1, lengths, 0))
        return counts


class MediaSpans(NamedTuple):
    """The spans of slots that represent images, audio or video."""

    offsets: np.ndarray  # int64[m + 1]: the spans of segment i are offsets[i] … offsets[i + 1] − 1
    ref_offsets: np.ndarray  # int64[k + 1]: bounds of the spans' references in `ref`
    slot: np.ndarray  # int32[k]: first slot of the span in its row
    tokens: np.ndarray  # int32[k]: number of slots of the span
    kind: np.ndarray  # uint16[k]: kind of media
    ref: np.ndarray  # uint8[r]: the references of all spans, UTF-8, joined

    @property
    def segment(self) -> np.ndarray:
        """The index of each span's segment, int64[k]."""
        return owners(np.diff(self.offsets))

    def slots_by_segment(self) -> np.ndarray:
        """Return how many slots of each segment represent media, int64[m]."""
        counts = np.zeros(len(self.offsets) - 1, np.int64)
        np.add.at(counts, self.segment, self.tokens)
        return counts

    def of_segment(self, g: int, begin: int = 0) -> list[tuple[int, int, int, str]]:
        """Return the media spans of a segment.

        Args:
            g: Index of the segment.
            begin: A slot of the row. First slots in the result are counted from this slot.

        Returns:
            A tuple (first slot, number of slots, kind, reference) for each span. The kind is a
            number.
        """
        spans = []
        for i in range(*self.offsets[g : g + 2].tolist()):
            ref = self.ref[slice(*self.ref_offsets[i : i + 2].tolist())].tobytes()
            numbers = int(self.slot[i]) - begin, int(self.tokens[i]), int(self.kind[i])
            spans.append((*numbers, ref.decode(errors="replace")))
        return spans

    def within(self, chosen: np.ndarray) -> "MediaSpans | None":
        """Return only the spans in chosen segments, or None if chosen segments have no spans.

        `chosen` is bool[m]. The result still has m segments. Segments that are not chosen have no
        spans in the result.
        """
        counts, lengths = np.diff(self.offsets), np.diff(self.ref_offsets)
        is_kept = np.repeat(chosen, counts)
        if not is_kept.any():
            return None
        return MediaSpans(
            offsets_of(np.where(chosen, counts, 0)),
            offsets_of(lengths[is_kept]),
            self.slot[is_kept],
            self.tokens[is_kept],
            self.kind[is_kept],
            self.ref[np.repeat(is_kept, lengths)],
        )


class Records(NamedTuple):
    """The records that sources with group_by joined to documents.

    In a shard, the first segment of a document has all records of the document.
    """

    # int64[m + 1]: the records of segment or document i are offsets[i] … offsets[i + 1] − 1
    offsets: np.ndarray
    position: np.ndarray  # int64[k]: position of the record in its file
    start: np.ndarray  # int64[k]: index of the record's first token in the document
    tokens: np.ndarray  # int32[k]: number of tokens of the record, which may be 0

    @property
    def owner(self) -> np.ndarray:
        """The index of each record's segment or document, int64[k]."""
        return owners(np.diff(self.offsets))

    def of(self, i: int) -> "Records":
        """Return the records of segment or document i. Their offsets are 0 and their number."""
        low, high = self.offsets[i : i + 2].tolist()
        return Records(np.array([0, high - low]), *(column[low:high] for column in self[1:]))

    def listed(self) -> list[dict[str, Any]]:
        """Return {"position": position in the file, "tokens": [first, end)} for each record."""
        ends = self.start + self.tokens
        columns = (column.tolist() for column in (self.position, self.start, ends))
        return [
            {"position": position, "tokens": [first_token, end]}
            for position, first_token, end in zip(*columns, strict=True)
        ]

    def within(self, chosen: np.ndarray) -> "Records":
        """Return only the records of chosen segments or documents.

        `chosen` is bool[m]. The result still has m segments or documents. Those that are not chosen
        have no records in the result.
        """
        counts = np.where(chosen, np.diff(self.offsets), 0)
        is_kept = np.repeat(chosen, np.diff(self.offsets))
        return Records(offsets_of(counts), *(column[is_kept] for column in self[1:]))


class NoiseBlocks(NamedTuple):
    """The blocks of block-diffusion segments, each with its own noise level."""

    offsets: np.ndarray  # int64[m + 1]: the blocks of segment i are offsets[i] … offsets[i + 1] − 1
    noise: np.ndarray  # float32[k]: noise level
    loss_weight: np.ndarray  # float32[k]


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments of a shard.

    All columns have shape [m]. They are int64 unless a comment says otherwise.
    """

    # The origin of the tokens.
    document: np.ndarray  # index into the documents of the shard; -1 if read from a shard's file
    source: np.ndarray  # index of the source
    file: np.ndarray  # index of the file in the plan
    doc: np.ndarray  # the document's position in its file
    repeat: np.ndarray  # number of the pass through the document
    start: np.ndarray  # index of the first content token in the document
    tokens: np.ndarray  # number of content tokens; 0 if the document was removed
    key: np.ndarray  # uint64
    # Values that cutting decides.
    task: np.ndarray  # index of the task
    bos: np.ndarray  # 0 or 1
    eos: np.ndarray  # 0 or 1
    repeated: np.ndarray  # number of tokens of a system message, repeated before the content
    # Index of the first trained body token if the document is supervised, otherwise -1.
    first_trained: np.ndarray
    fill: np.ndarray  # number of eos, after `eos`, that fill up the last block of block diffusion
    # Positions in the rows.
    slots: np.ndarray  # number of slots by the length formula, without padding
    row: np.ndarray
    first_slot: np.ndarray  # first slot in the row
    # Values that rendering adds.
    prefix: np.ndarray  # number of prefix slots, which see each other; -1 in block diffusion
    noise: np.ndarray  # float32: noise level
    loss_weight: np.ndarray  # float32
    trained: TrainedRanges | None = None
    media: MediaSpans | None = None
    blocks: NoiseBlocks | None = None
    records: Records | None = None

    @classmethod
    def create(cls, count: int, **columns: np.ndarray) -> "Segments":
        """Create segments from some of their columns.

        Args:
            count: Number of segments.
            **columns: Columns by name. All other columns get default values, mostly 0.

        Returns:
            The `Segments`.
        """
        zeros = np.zeros(count, np.int64)
        defaults: dict[str, Any] = dict.fromkeys(_COLUMNS, zeros)
        defaults |= {
            "document": zeros - 1,
            "first_trained": zeros - 1,
            "key": zeros.astype(np.uint64),
            "noise": np.zeros(count, np.float32),
            "loss_weight": np.ones(count, np.float32),
        }
        return cls(**defaults | columns)

    @classmethod
    def of_arrays(cls, arrays: Arrays) -> "Segments":
        """Create segments from the arrays of a shard, in row order.

        The array cu_seqlens must be valid. The columns `bos`, `eos`, `repeated` and `first_trained`
        are not stored and get default values. `restoring.stored_segments` computes them by the
        length formula.
        """
        columns: dict[str, Any] = header_columns(arrays)
        columns["row"], columns["first_slot"], columns["slots"] = segment_slots(arrays)
        if "segment_fill" in arrays:
            columns["fill"] = arrays["segment_fill"].astype(np.int64)
        if "trained_offsets" in arrays:
            columns["trained"] = TrainedRanges(
                arrays["trained_offsets"], arrays["trained_ranges"], arrays.get("trained_weights")
            )
        of_shard = (("media", MediaSpans), ("blocks", NoiseBlocks), ("records", Records))
        for name, record in of_shard:
            prefix = name.removesuffix("s")
            if f"{prefix}_{record._fields[-1]}" in arrays:  # Resampled arrays have no blocks.
                columns[name] = record(*(arrays[f"{prefix}_{field}"] for field in record._fields))
        return cls.create(len(columns["key"]), **columns)

    def __len__(self) -> int:
        return len(self.task)

    def replace(self, **changes: Any) -> "Segments":
        """Return these segments with some columns replaced."""
        return replace(self, **changes)

    def select(self, selection: np.ndarray | slice) -> "Segments":
        """Return the segments `selection`, given by indices or flags.

        Trained ranges, media, blocks and records are left out.
        """
        return Segments(**{name: getattr(self, name)[selection] for name in _COLUMNS})

    @property
    def has_tokens(self) -> np.ndarray:
        """Whether each segment has content tokens, bool[m].

        A segment of a removed document has no content. Its slots remain as padding.
        """
        return self.tokens != 0

    def of_task(self, task: int) -> np.ndarray:
        """Return the indices of the segments of task number `task` that have tokens, int64[k]."""
        return np.flatnonzero((self.task == task) & self.has_tokens)

    def bodies(self, epoch: int = 0) -> Bodies:
        """Return the columns that an objective needs to draw the bodies in an epoch."""
        return Bodies(self.tokens + self.repeated, self.key, self.first_trained, self.fill, epoch)

    def flat_slots(self, seq_length: int) -> np.ndarray:
        """Return each segment's first slot in the flat rows, int64[m]."""
        return self.row * seq_length + self.first_slot

    def weighted_slots(self) -> np.ndarray:
        """Return how many slots of each segment have a loss weight other than 1, int64[m]."""
        return (
            np.zeros(len(self), np.int64) if self.trained is None else self.trained.weighted_slots()
        )

    def media_slots(self) -> np.ndarray:
        """Return how many slots of each segment represent media, int64[m]."""
        return (
            np.zeros(len(self), np.int64) if self.media is None else self.media.slots_by_segment()
        )

    def last_chunks(self) -> np.ndarray:
        """Return which segments contain the last chunk of their document, bool[m].

        If the documents of a source are used in several passes, each pass has its own last chunk.
        """
        # The sort puts the chunks of each document and pass in the order of the document.
        columns = self.start, self.repeat, self.doc, self.file
        order = np.lexsort(columns)
        is_last = np.ones(len(order), np.bool_)
        is_last[order[:-1]] = ~np.logical_and.reduce(
            [column[order][1:] == column[order][:-1] for column in columns[1:]]
        )
        return is_last

    def header_arrays(self, pad_seq_to_mult: int) -> dict[str, np.ndarray]:
        """Return the arrays that describe these segments in a shard, name → array.

        The segments must be in row order. `pad_seq_to_mult` is the recipe's value. In a row,
        segments begin at multiples of this number.
        """
        rows = int(self.row[-1]) + 1 if len(self) else 0
        row_offsets = np.searchsorted(self.row, np.arange(rows + 1)).astype(np.int64)
        arrays = {
            f"segment_{name}": getattr(self, name).astype(dtype, copy=False)
            for name, dtype in HEADER.items()
        }
        arrays["row_offsets"] = row_offsets
        arrays["cu_seqlens"] = _cumulative(self.slots, self.row, row_offsets)
        if pad_seq_to_mult > 1:
            padded = self.slots + -self.slots % pad_seq_to_mult
            arrays["cu_seqlens_padded"] = _cumulative(padded, self.row, row_offsets)
        if self.fill.any():
            arrays["segment_fill"] = self.fill.astype("<u2")
        of_shard = (("media", self.media), ("block", self.blocks), ("record", self.records))
        for prefix, record in of_shard:
            if record is not None:
                arrays |= {f"{prefix}_{name}": column for name, column in record._asdict().items()}
        if self.trained is not None:
            arrays["trained_offsets"], arrays["trained_ranges"] = self.trained[:2]
            if self.trained.weights is not None:
                arrays["trained_weights"] = self.trained.weights
        return arrays


_COLUMNS = [
    field.name
    for field in fields(Segments)
    if field.name not in ("trained", "media", "blocks", "records")
]


def header_columns(arrays: Arrays) -> dict[str, np.ndarray]:
    """Return the columns that a shard stores as segment_NAME, name → [m].

    The function reads no other arrays, so it works even if other arrays are damaged.
    """
    return {
        name: arrays[f"segment_{name}"].astype(dtype, copy=False) for name, dtype in _DTYPES.items()
    }


def records_of(arrays: Arrays) -> Records | None:
    """Return the records of a shard's segments, or None if no source has group_by."""
    if "record_offsets" not in arrays:
        return None
    return Records(*(arrays[f"record_{name}"] for name in Records._fields))


def records_of_document(arrays: Arrays, file: int, doc: int, repeat: int) -> Records | None:
    """Return the records of a document of a shard, or None if it was not joined from records.

    Args:
        arrays: The arrays of the shard.
        file: Index of the document's file in the plan.
        doc: Position of the document in its file.
        repeat: Number of the pass.
    """
    records = records_of(arrays)
    if records is None:
        return None
    is_own = (arrays["segment_doc"] == doc) & (arrays["segment_file"] == file)
    is_own &= (arrays["segment_repeat"] == repeat) & (np.diff(records.offsets) > 0)
    return records.of(int(np.argmax(is_own))) if is_own.any() else None


def segment_slots(arrays: Arrays) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the row and the slots of each segment of a shard.

    The arrays cu_seqlens and row_offsets must be valid.

    Returns:
        For each segment its row, its first slot in the row, and its number of slots without
        padding, int64[m] each.
    """
    real = arrays["cu_seqlens"].astype(np.int64)
    physical = arrays.get("cu_seqlens_padded", arrays["cu_seqlens"]).astype(np.int64)
    return boundaries(np.diff(arrays["row_offsets"]), real, physical)


def _cumulative(lengths: np.ndarray, row: np.ndarray, row_offsets: np.ndarray) -> np.ndarray:
    """Return the cu_seqlens of all rows, joined, int32[m + rows].

    The cu_seqlens of a row with segments of 3 and 2 slots are 0 3 5.
    """
    sums = offsets_of(lengths)
    # The first entry of each row stays 0. So segment i of row r ends at entry i + r + 1.
    cu_seqlens = np.zeros(len(lengths) + len(row_offsets) - 1, np.int32)
    cu_seqlens[np.arange(len(lengths)) + row + 1] = sums[1:] - sums[row_offsets[row]]
    return cu_seqlens
