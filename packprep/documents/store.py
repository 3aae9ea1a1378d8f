"""Write and read token stores: the tokenized documents of a recipe's sources, in file order.

Datasets can be built from a token store instead of source files. A store has the same file names as
a dataset, and `kind = "store"` in plan.json and dataset.json. It contains each document of its
sources once. Reading a work range from the store gives the same documents as reading the source
file:

    work range of a split ─► shards that contain the split ─► documents that start in the work range

A split consists of numbered units. A unit is a byte of a line file, a step of a compressed file, or
a document of a table or index. A text file is one unit.

Shards are safetensors files with the arrays below. A shard has D documents. S of them are
supervised, and R are rejected. The shard was built from K work ranges, which are called parts.

    tokens              u16 or u32 [tokens]
    document_offsets    i64 [D + 1]    first token of each document in `tokens`
    position            i64 [D]        position of each document in its file
    part_offsets        i64 [K + 1]    first document of each part
    part_units          i64 [K]        number of units in the part's whole split
    reject_offsets      i64 [R + 1]    first byte of each "reason detail" in `reject_text`
    span_offsets        i64 [S + 1]    first row of each supervised document in `spans`
    cut_offsets         i64 [S + 1]    first entry of each supervised document in `cuts`
    spans, turns        i64 [k, 2]     as in `training.Trained`
    weights             f32 [k]        as in `training.Trained`
    cuts                i64 [c]        as in `training.Trained`
    ranks               u8 [c]         as in `training.Trained`
    system              i64 [S]        as in `training.Trained`
    eos_weight          f32 [S]        as in `training.Trained`
    unit                u32 [D]        unit of the split in which each document starts
    size                u32 [D]        size by which a `Choice` classifies each document
    text_bytes          u32 [D]        text bytes of each document
    part_file           u32 [K]        the part's file, as an index into the plan's files
    part_piece          u32 [K]        the part's split, as an index into the file's splits
    supervised          u32 [S]        document numbers, ascending
    rejected            u32 [R]        document numbers, ascending
    reject_text         u8             UTF-8

If any document has media, the shard also has the m media spans of its supervised documents:

    place_offsets       i64 [S + 1]    first media span of each supervised document
    place_ref_offsets   i64 [m + 1]    first byte of each reference in `place_refs`
    place_spans         i64 [m, 2]     as in `media.MediaPlaces`
    place_first, place_tokens, place_kind      i64 [m]     as in `media.MediaPlaces`
    place_refs          u8             UTF-8

If a source has `keep`, the shard also has the fields of its documents. A part has F · n entries:
the n documents of the first field, then those of the second field. `kept_fields.py` defines them.

    field_offsets       i64 [K + 1]    first entry of each part
    field_text_offsets  i64 [t + 1]    first byte of each text in `field_texts`
    field_values        i64 [e]        bits of each value; for a text, its number
    field_kinds         u8 [e]         type of each value
    field_texts         u8             UTF-8

A document with a weight counts as supervised, even if it is fully trained. The shard then also has:

    limited             u8 [S]         1 if the document limits which of its tokens are trained

If a document has a weight other than 1, the shard also has:

    document_weight     f32 [S]        the document's weight, which `weights` include as a factor
"""

import errno
import mmap
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, compress
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from packprep.clock import Clock
from packprep.conversations.media import NO_PLACES, MediaPlaces
from packprep.conversations.training import Trained
from packprep.dataset.loader import default_max_open
from packprep.dataset.manifest import Manifest, ShardEntry, replaced
from packprep.dataset.segments import Arrays
from packprep.dataset.shard import Places, encoded, places_in
from packprep.documents.calibration import Estimates
from packprep.documents.kept_fields import FieldNotes, KeptFields, kept_names, reader_of_part
from packprep.documents.reading import (
    ReadDocuments,
    Rejected,
    TextReader,
    fail_on_bad,
    refuse_beyond,
)
from packprep.errors import DatasetError, SourceError
from packprep.format import open_file
from packprep.format.digests import digest_of, digest_of_buffers
from packprep.format.json_files import MANIFEST_NAME
from packprep.sources.formats import (
    FORMATS,
    PIECE_BYTES,
    Choice,
    Decoders,
    Keep,
    Reject,
    Slice,
    by_fields,
    position_of,
)
from packprep.sources.formats.batch import BAD_FIELD, MAX_DETAIL, kept
from packprep.sources.passes import ReadFields
from packprep.sources.slices import PlannedSource
from packprep.storage import Folder, Remote
from packprep.tokenizer.encoding import TEXT_REASONS, Tokens
from packprep.tokenizer.file import texts_of_ids
from packprep.tokenizer.roles import Vocabulary

STORE = "store"
STEP_BYTES = 1 << 14
"""Compressed bytes per unit of a compressed file. Datasets use multiples of it as step sizes."""
METADATA = {"format": "packprep", "kind": STORE, "version": "1"}

_TYPES = {
    **dict.fromkeys(
        ("document_offsets", "position", "part_offsets", "part_units", "reject_offsets"), "<i8"
    ),
    **dict.fromkeys(("span_offsets", "cut_offsets", "spans", "turns", "cuts", "system"), "<i8"),
    **dict.fromkeys(("weights", "eos_weight"), "<f4"),
    **dict.fromkeys(
        (
            "unit",
            "size",
            "text_bytes",
            "part_file",
            "part_piece",
            "supervised",
            "rejected",
            "tokens",
        ),
        "<u4",
    ),
    **dict.fromkeys(("reject_text", "ranks"), "u1"),
}
_OF_PLACES = ("spans", "first", "tokens", "kind")
_MEDIA_TYPES = {
    "place_offsets": "<i8",
    "place_ref_offsets": "<i8",
    **dict.fromkeys((f"place_{name}" for name in _OF_PLACES), "<i8"),
    "place_refs": "u1",
}
_FIELD_TYPES = {
    **dict.fromkeys(("field_offsets", "field_text_offsets", "field_values"), "<i8"),
    **dict.fromkeys(("field_kinds", "field_texts"), "u1"),
}
_OPTIONAL_TYPES = (_MEDIA_TYPES, {"limited": "u1"}, {"document_weight": "<f4"}, _FIELD_TYPES)
"""Groups of optional arrays. A shard has a group if one of its documents needs the group."""
_ALL_TYPES = _TYPES | {name: kind for types in _OPTIONAL_TYPES for name, kind in types.items()}
DOCUMENT_BYTES = 28
"""Bytes that a document takes in a shard's arrays, without its tokens and trained spans."""
_PAIRS = ("spans", "turns", "place_spans")
_OF_TRAINED = (
    *("spans", "weights", "turns", "cuts", "ranks", "system", "eos_weight", "limited"),
    "document_weight",
)


class _Noted(Choice):
    """A `Choice` that keeps every document and records positions, sizes and fields.

    `fields` has the names of the fields.
    """

    def __init__(self, fields: Sequence[str]) -> None:
        super().__init__(np.uint64(0), 0)
        self.fields, self._notes = fields, FieldNotes(fields)
        self.positions: list[np.ndarray] = []
        self.sizes: list[np.ndarray] = []

    def __call__(
        self,
        file: int,
        positions: np.ndarray,
        sizes: np.ndarray,
        read_fields: ReadFields | None = None,
        is_own: np.ndarray | None = None,
    ) -> np.ndarray:
        self.positions.append(np.array(positions, np.int64))
        self.sizes.append(np.array(sizes, np.int64))
        if self.fields:
            assert read_fields is not None, "planning refuses fields for formats without fields"
            self._notes.add(len(positions), read_fields(self.fields))
        return np.ones(len(positions), np.bool_)

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, KeptFields | None]:
        """Return the recorded sizes, int64[n], and fields of the documents at `positions`.

        The fields are None if there are no documents or fields.
        """
        # Documents were noted in reading order, so sort their positions and search in them.
        known_positions, sizes = (
            np.concatenate([np.zeros(0, np.int64), *arrays])
            for arrays in (self.positions, self.sizes)
        )
        order = np.argsort(known_positions, kind="stable")
        places = order[np.searchsorted(known_positions[order], positions)]
        fields = self._notes.at(places) if self.fields and len(known_positions) else None
        return sizes[places], fields


class StoredDocuments(NamedTuple):
    """The contents of a store's shard before they are written."""

    arrays: dict[str, np.ndarray]  # the arrays that the module's docstring lists
    rejected: Rejected
    text_digests: dict[str, str]  # source → xxh3-128 of the text bytes that were read
    read: dict[str, int]  # source → number of documents
    tokens: dict[str, int]  # source → number of tokens


@dataclass
class _Columns:
    """The arrays of one shard. The values of each work range are added to them."""

    of: dict[str, list[np.ndarray]] = field(default_factory=dict)
    documents: int = 0
    texts: int = 0  # number of texts of kept fields

    def add(self, **columns: Any) -> None:
        for name, values in columns.items():
            self.of.setdefault(name, []).append(np.asarray(values))

    def array(self, name: str) -> np.ndarray:
        # The empty array sets dtype and shape if the shard has no such values.
        kind = np.dtype(_ALL_TYPES[name])
        empty = np.zeros((0, 2) if name in _PAIRS else 0, kind)
        values = np.concatenate(
            [empty, *(array.astype(kind, copy=False) for array in self.of.get(name, ()))]
        )
        # Offsets were collected as lengths, which can be appended part by part.
        return (
            np.concatenate((np.zeros(1, kind), np.cumsum(values)))
            if name.endswith("_offsets")
            else values
        )

    def arrays(self, token_dtype: np.dtype) -> dict[str, np.ndarray]:
        """Return the shard's arrays by name.

        An optional array is included if a document of the shard needs it, for example the media
        spans if a document has media. `tokens` has the dtype `token_dtype`.
        """
        # The order is the order of _OPTIONAL_TYPES.
        needed = (
            any(map(len, self.of.get("place_first", ()))),
            not np.all(self.array("limited")),
            bool(np.any(self.array("document_weight") != 1)),
            any(map(len, self.of.get("field_kinds", ()))),
        )
        arrays = {name: self.array(name) for name in _names(needed)}
        if token_dtype == np.uint16:
            arrays["tokens"] = arrays["tokens"].astype("<u2")
        return arrays


def stored(
    plan: Any,
    slices: Iterator[tuple[PlannedSource, Slice]],
    decoders: Decoders,
    progress: Callable[[int, int, int, int], None] | None,
    clock: Clock,
    most_bytes: int,
) -> StoredDocuments:
    """Read and tokenize the documents of one shard of a store, before it is written.

    Args:
        plan: A `building.plan.Plan`.
        slices: (source, work range) pairs of the shard.
        decoders: State that is kept between work ranges. It affects only the speed.
        progress: Called with the numbers of documents, text bytes, tokens and rejects of each
            batch, or None.
        clock: Receives the seconds of the stages "read" and "tokenize".
        most_bytes: Maximum number of text bytes.

    Raises:
        SourceError: If the shard has too many documents or text bytes, or if a document is bad and
            `bad_documents` is "fail".
    """
    columns, rejected, names = _Columns(), Rejected(), [source.name for source in plan.sources]
    digests = {name: xxhash.xxh3_128() for name in names}
    n_read, n_tokens = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    documents = text_bytes = 0
    settings, template = plan.recipe.documents, plan.stored["chat_template"]
    reader = TextReader(
        settings, plan.vocabulary, plan.engine, template, decoders=decoders, clock=clock
    )
    for source, work_range in slices:
        # A store keeps every document, because datasets choose documents when they read the store.
        noted = _Noted(kept_names(source.source))
        first_document, first_reject = columns.documents, len(rejected)
        reads: list[ReadDocuments] = []
        for read in reader.read(source, work_range, noted, digests[source.name]):
            reads.append(read)
            count, read_bytes = len(read.positions) + len(read.rejects), int(read.text_bytes.sum())
            # The limits are checked after each batch, so a file that expands too much stops early.
            documents, text_bytes = documents + count, text_bytes + read_bytes
            refuse_beyond(work_range.path, documents, text_bytes, most_bytes)
            if progress:
                reject_count = len(read.rejects) + len(read.tokens.rejected)
                progress(count, read_bytes, len(read.tokens.ids), reject_count)
        _add_part(columns, work_range, reads, noted, decoders)
        # A store reads each document in one pass, so the pass is 0.
        for i, reason, detail in _rejects_of(reads):
            rejected.add(source, 0, work_range.file, i, reason, detail)
        if settings.bad_documents == "fail":
            fail_on_bad(rejected.records(range(first_reject, len(rejected))), work_range.path)
        n_read[source.name] += columns.documents - first_document
        n_tokens[source.name] += sum(len(read.tokens.ids) for read in reads)
    text_digests = {name: digest.hexdigest() for name, digest in digests.items()}
    arrays = columns.arrays(plan.token_dtype)
    return StoredDocuments(arrays, rejected, text_digests, n_read, n_tokens)


def _add_part(
    columns: _Columns,
    work_range: Slice,
    reads: Sequence[ReadDocuments],
    noted: _Noted,
    decoders: Decoders,
) -> None:
    """Add the documents of a work range to `columns`, sorted by position.

    Rejected documents are also added, without tokens.

    Args:
        columns: The arrays of the shard.
        work_range: The work range.
        reads: The batches that were read from the work range.
        noted: The `_Noted` that was used to read the batches. It has the sizes of the documents.
        decoders: The state that was used to read the batches. It has the start of each step of a
            compressed file.
    """
    rejects = _rejects_of(reads)
    tokenized = np.concatenate([np.zeros(0, np.int64), *(read.positions for read in reads)])
    # Documents that were rejected before tokenization are added to the others.
    unread = np.setdiff1d([position for position, *_ in rejects], tokenized).astype(np.int64)
    position, no_tokens = np.concatenate((tokenized, unread)), np.zeros(len(unread), np.int64)
    # Rejects from before tokenization have no tokens and no text.
    lengths = np.concatenate([*(np.diff(read.tokens.offsets) for read in reads), no_tokens])
    text_bytes = np.concatenate([*(read.text_bytes for read in reads), no_tokens])
    order = np.argsort(position, kind="stable")
    # `number[k]` is the number in the shard of entry k, once the entries are sorted by position.
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order)) + columns.documents
    # Trained spans are keyed by numbers in their batch. Convert these to numbers in the shard.
    first_document = 0
    for read in reads:
        for i in sorted(read.trained):
            _add_trained(columns, number[first_document + i], read.trained[i])
        first_document += len(read.positions)
    position = position[order]
    # A dataset's work ranges are ranges of units, so each document needs its unit.
    unit, units = _units(work_range, position, decoders)
    texts = [f"{reason} {detail}".encode() for _, reason, detail in rejects]
    rejected = np.searchsorted(position, [place for place, *_ in rejects]) + columns.documents
    # A dataset with a fractional `repeat` chooses documents by these sizes.
    sizes, fields = noted.at(position)
    if fields is None:
        columns.add(field_offsets=[0])
    else:
        columns.add(**fields.columns(columns.texts))
        columns.texts += len(fields.texts)
    columns.add(
        rejected=rejected,
        reject_offsets=[len(text) for text in texts],
        reject_text=np.frombuffer(b"".join(texts), np.uint8),
        document_offsets=lengths[order],
        position=position,
        unit=unit,
        size=sizes,
        text_bytes=text_bytes[order],
        part_file=[work_range.file],
        part_piece=[work_range.piece],
        part_offsets=[len(order)],
        part_units=[units],
    )
    # Tokenized documents are read in order of position, so their ids are already sorted.
    columns.of.setdefault("tokens", []).extend(read.tokens.ids.view(np.uint32) for read in reads)
    columns.documents += len(order)


def _add_trained(columns: _Columns, number: int, trained: Trained) -> None:
    """Add the trained spans and media spans of one document to `columns`.

    `number` is the number of the document in the shard.
    """
    places = trained.places
    columns.add(
        supervised=[number],
        span_offsets=[len(trained.spans)],
        cut_offsets=[len(trained.cuts)],
        place_offsets=[len(places.first)],
        place_ref_offsets=np.diff(places.ref_offsets),
        place_refs=places.refs,
        **{name: np.atleast_1d(getattr(trained, name)) for name in _OF_TRAINED},
        **{f"place_{name}": getattr(places, name) for name in _OF_PLACES},
    )


def _rejects_of(reads: Sequence[ReadDocuments]) -> list[tuple[int, str, str]]:
    """Return (position, reason, detail) of a work range's rejects, sorted by position."""
    rejects = [
        (reject.position, reject.reason, reject.detail) for read in reads for reject in read.rejects
    ]
    rejects += [
        (int(read.positions[i]), reason, detail)
        for read in reads
        for i, reason, detail in read.tokens.rejected
    ]
    return sorted(rejects)


def _units(work_range: Slice, positions: np.ndarray, decoders: Decoders) -> tuple[np.ndarray, int]:
    """Return (units, count) for the n documents of a work range at `positions`.

    `units`, int64[n], has the number of each document's first unit in the split. `count` is the
    number of units in the whole split. The docstring of this module defines units.
    """
    position_kind = position_of(work_range.format, work_range.compression)
    if position_kind == "whole":
        return np.zeros(len(positions), np.int64), 1
    if position_kind == "byte":
        first_position = work_range.piece * PIECE_BYTES
        return positions - first_position, min(PIECE_BYTES, work_range.size - first_position)
    if position_kind == "stream":
        begins = np.array(decoders.step_begins, np.int64)
        return np.searchsorted(begins, positions, "right") - 1, -(-work_range.size // STEP_BYTES)
    numbers = FORMATS[work_range.format].module.numbers(work_range, decoders)
    return positions - numbers.start, len(numbers)


def fields_of_parts(plan: Any, arrays: Arrays) -> list[int]:
    """Return the number of fields that a store keeps of the documents of each part of a shard.

    `plan` is the store's `building.plan.Plan`.
    """
    first_files = [source.first_file for source in plan.sources]
    sources = np.searchsorted(first_files, arrays["part_file"].astype(np.int64), "right") - 1
    return [len(kept_names(plan.sources[s].source)) for s in sources.tolist()]


def _names(needed: Iterable[bool]) -> list[str]:
    """Return the names of a shard's arrays, in the order of the file.

    `needed` has one bool for each group of arrays in _OPTIONAL_TYPES. It says whether the shard has
    the arrays of this group.
    """
    return [*_TYPES, *chain(*compress(_OPTIONAL_TYPES, needed))]


def encode(arrays: Arrays) -> list[bytes | memoryview]:
    """Return the file of a store's shard as a list of buffers."""
    return encoded({name: arrays[name] for name in _ALL_TYPES if name in arrays}, METADATA)


def open_arrays(data: Any, where: str) -> dict[str, np.ndarray]:
    """Return the arrays of a store's shard by name, as views of `data`.

    Args:
        data: The bytes of the shard's file.
        where: Path or URL of the file, for messages.

    Raises:
        DatasetError: If the bytes are not a shard of a store.
    """
    layout = _layout(data[:_HEAD_BYTES], len(data), where)
    return {
        name: np.ndarray(shape, dtype, data, offset)
        for name, (dtype, shape, offset) in layout.items()
    }


_HEAD_BYTES = 16 << 10
"""Bytes that are read to get the header of a shard. Headers are shorter."""


def _layout(head: bytes, size: int, where: str) -> Places:
    names = _names(f'"{next(iter(types))}"'.encode() in head for types in _OPTIONAL_TYPES)
    layout = places_in(head, size, where, METADATA, names)
    for name, (dtype, shape, _) in layout.items():
        is_valid_dtype = dtype == _ALL_TYPES[name] or (name == "tokens" and dtype == np.uint16)
        if not is_valid_dtype or len(shape) != 1 + (name in _PAIRS):
            raise DatasetError(
                f"{where}: damaged, because array {name!r} has dtype {dtype} and shape {shape}"
            )
    return layout


def estimates_as_json(
    estimates: Estimates, piece_bytes: Mapping[int, Sequence[int]]
) -> dict[str, Any]:
    """Return a source's estimates as a value that can be written as JSON into a store's plan.

    `piece_bytes` is the `Files.piece_bytes` of the source after the sample.
    """
    columns = {
        name: getattr(estimates, name).tolist() for name in ("lengths", "length_weights", "sizes")
    }
    values = asdict(replace(estimates, tally=None))
    stored = {
        key: value
        for key, value in values.items()
        if key not in _UNSTORED and not key.endswith("_s_per_byte")
    }
    return {
        **stored,
        **columns,
        "piece_bytes": {str(i): list(split_bytes) for i, split_bytes in piece_bytes.items()},
    }


_UNSTORED = ("tally", "notes", "numbers", "pass_shares")
"""Estimates that a store does not have. It has each document once, so its numbers are 1."""


def estimates_from_json(value: Mapping[str, Any]) -> tuple[Estimates, dict[int, Sequence[int]]]:
    """Return (estimates, piece_bytes) from a result of `estimates_as_json`.

    The measured times and the counts of problems were not stored, so they have default values.
    """
    values = {key: entry for key, entry in value.items() if key != "piece_bytes"}
    for name, kind in (("lengths", np.int64), ("length_weights", np.float64), ("sizes", np.int64)):
        values[name] = np.array(values[name], kind)
    return Estimates(**values), {
        int(i): split_bytes for i, split_bytes in value["piece_bytes"].items()
    }


_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 47)]
_Number = Annotated[float, msgspec.Meta(ge=0, lt=1 << 62)]


class _Kept(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The schema of the JSON that `estimates_as_json` returns."""

    ratios: dict[str, _Count]
    tokens_per_byte: Annotated[float, msgspec.Meta(gt=0, lt=1 << 31)]
    document_bytes: _Number
    supervised: bool
    chat: bool
    sampling_error: _Number
    lengths: list[_Count]
    length_weights: list[_Number]
    sizes: list[_Count]
    piece_bytes: dict[Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,9}\Z")], list[_Count]]


def wrong_estimates(estimates: Any, files: Sequence[Any]) -> str:
    """Return a message about the first error in a source's stored estimates, or "" without one.

    Args:
        estimates: The value in the store's plan. It should be a list of two results of
            `estimates_as_json`, from a quick and from a precise sample.
        files: The source's files in the plan.
    """
    try:
        samples = msgspec.convert(estimates, list[_Kept])
    except msgspec.ValidationError as error:
        return str(error)
    if len(samples) != 2:
        return f"there are {len(samples)} samples instead of 2"
    for sample in samples:
        if not len(sample.lengths) == len(sample.length_weights) == len(sample.sizes):
            return "lengths, length_weights and sizes have different lengths"
        for i, split_bytes in sample.piece_bytes.items():
            if [file.pieces for file in files[int(i) : int(i) + 1]] != [len(split_bytes)]:
                return f"piece_bytes does not match the splits of file {i}"
    return ""


class _TokensAtUrl:
    """The array `tokens` of a shard at a URL.

    The array is not in memory. Indexing it with a slice fetches the tokens in the slice.
    """

    def __init__(self, folder: Remote, name: str, offset: int, dtype: np.dtype):
        self._folder, self._name, self._at, self._dtype = folder, name, offset, dtype

    def __getitem__(self, positions: slice) -> np.ndarray:
        size = self._dtype.itemsize
        if positions.stop <= positions.start:
            return np.zeros(0, self._dtype)
        data = self._folder.read(
            self._name, self._at + size * positions.start, self._at + size * positions.stop
        )
        return np.frombuffer(data, self._dtype)


class _OpenShard:
    """An open shard of a store.

    A local shard is memory-mapped. For a shard at a URL, all arrays except `tokens` are in memory.

    Attributes:
        arrays: The arrays by name.
        state: A value that identifies the version of the file. For a local file, it consists of
            device, inode, size and modification time. For a file at a URL, it is a digest of all
            bytes except the tokens.
        parts: Maps (part_file, part_piece) to the number of the part.
    """

    def __init__(self, folder: Folder, entry: ShardEntry, checked: Hashable):
        """Open a shard.

        Args:
            folder: The folder of the store.
            entry: The shard's entry in the store's manifest.
            checked: The `state` that the shard had when its digest was last checked, or None. If
                the state is still the same, the digest is not checked again.

        Raises:
            SourceError: If the shard cannot be read, or if its digest differs from the digest in
                `entry`.
        """
        where = folder.path_of(entry["file"])
        read = _fetched if isinstance(folder, Remote) else _mapped
        try:
            self.arrays, self.state = read(folder, entry, checked)
        except DatasetError as error:
            raise SourceError(
                f"{error}\n"
                "hint: restore the file, or remove it and run the original `packprep tokenize`"
                " again"
            ) from None
        except FileNotFoundError:
            raise SourceError(f"{where} is missing\nhint: restore the token store") from None
        except OSError as error:
            too_many = error.errno in (errno.EMFILE, errno.ENFILE)
            advice = "raise the limit of open files (ulimit -n)" if too_many else "make it readable"
            raise SourceError(
                f"{where}: cannot be read: {error.strerror or error}\n"
                f"hint: {advice}, and run the same command again"
            ) from None
        # A split may be divided among shards, but a shard has at most one part of a split.
        keys = zip(
            self.arrays["part_file"].tolist(), self.arrays["part_piece"].tolist(), strict=True
        )
        self.parts = {key: k for k, key in enumerate(keys)}
        self._path = None if isinstance(folder, Remote) else where

    def is_unchanged(self) -> bool:
        """Return whether the local file is the same as when it was opened.

        The result is False if the file was replaced, modified or removed. A shard at a URL counts
        as unchanged.
        """
        try:
            return self._path is None or _state_of(os.stat(self._path)) == self.state
        except OSError:
            return False


def _state_of(status: os.stat_result) -> Hashable:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _mapped(folder: Any, entry: ShardEntry, checked: Hashable) -> tuple[dict[str, Any], Hashable]:
    with open_file(folder.path / entry["file"]) as file:
        state = _state_of(status := os.fstat(file.fileno()))
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if status.st_size else b""
    where = folder.path_of(entry["file"])
    if state != checked:
        _check_digest(digest_of(data), entry, where)
    return open_arrays(data, where), state


def _fetched(folder: Any, entry: ShardEntry, checked: Hashable) -> tuple[dict[str, Any], Hashable]:
    name, where = entry["file"], folder.path_of(entry["file"])
    size = folder.size(name)
    if size is None:
        raise FileNotFoundError("this object does not exist")
    # The tokens are most of the file, so they stay at the URL. Only the other arrays are kept.
    layout = _layout(folder.read(name, 0, _HEAD_BYTES), size, where)
    tokens, (count,), begin = layout["tokens"]
    end = begin + tokens.itemsize * count
    data_before, data_after = folder.read(name, 0, begin), folder.read(name, end, size)
    # The state leaves out the tokens, which would take long to download again.
    state = digest_of_buffers((data_before, data_after))
    # A digest covers the whole file, so the tokens are read once in blocks and not kept.
    if state != checked:
        blocks = (
            folder.read(name, offset, min(offset + _BLOCK_BYTES, end))
            for offset in range(begin, end, _BLOCK_BYTES)
        )
        _check_digest(digest_of_buffers(chain((data_before,), blocks, (data_after,))), entry, where)
    arrays: dict[str, Any] = {"tokens": _TokensAtUrl(folder, name, begin, tokens)}
    # Arrays have their offsets in the file. Arrays after the tokens are in `data_after`.
    for key, (dtype, shape, offset) in layout.items():
        if key != "tokens":
            data, start = (data_before, 0) if offset < begin else (data_after, end)
            arrays[key] = np.ndarray(shape, dtype, data, offset - start)
    return arrays, state


_BLOCK_BYTES = 16 << 20


def _check_digest(actual_digest: str, entry: ShardEntry, where: str) -> None:
    if actual_digest != entry["digest"]:
        raise DatasetError(
            f"{where}: its digest is {actual_digest}, but {MANIFEST_NAME} has {entry['digest']}."
            " It was changed or damaged"
        )


def special_texts(vocabulary: Vocabulary) -> set[tuple[int, str]]:
    """Return a vocabulary's special tokens as (id, text) pairs."""
    return set(texts_of_ids(vocabulary.tokenizer_json, vocabulary.special_ids).items())


class TokenStore:
    """An open token store. It replaces the source files when work ranges are read."""

    def __init__(self, folder: Folder, plan: Any, manifest: Manifest):
        """Open a store.

        Args:
            folder: The folder of the store.
            plan: The store's `building.plan.Plan`.
            manifest: The store's manifest.
        """
        self.folder, self.plan = folder, plan
        self.digest = manifest["digest"]
        self.digests = (self.digest, *(entry["digest"] for entry in replaced(manifest)))
        """Digests of this store, and of its versions before documents were removed."""
        self._entries = manifest["shards"]
        self._sources = {source.name: source for source in plan.sources}
        # Maps the digest of a vocabulary to the result of `_special`.
        self._specials: dict[str, tuple[np.ndarray, list[str]]] = {}
        self._checked: dict[
            int, Hashable
        ] = {}  # Maps a shard to its state when its digest was found correct.

    def __str__(self) -> str:
        return str(self.folder)

    def kept_fields(self, name: str) -> Sequence[str]:
        """Return the fields that the store keeps of the source `name`."""
        return kept_names(self._sources[name].source)

    def check_fields(self, source: PlannedSource) -> None:
        """Check that the store keeps the fields that the expressions of a dataset's source read.

        Raises:
            SourceError: If a field is missing.
        """
        names = self.kept_fields(source.name)
        missing = (
            [name for name in source.passes.fields if name not in names] if source.passes else []
        )
        if missing:
            raise SourceError(
                f"source {source.name!r}: the token store {self} does not keep the field"
                f" {missing[0]!r}, but {source.passes} reads it\n"
                f"hint: pass the folder of the source's files as --source {source.name}=PREFIX"
            )

    def read(
        self, source: PlannedSource, work_range: Slice, keep: Keep | None, vocabulary: Vocabulary
    ) -> Iterator[ReadDocuments]:
        """Read a work range of a dataset's source from the store, and yield the documents.

        They are the same documents as in the source's file. The store must have a source with the
        same name as `source`.

        Args:
            source: The dataset's source.
            work_range: The work range.
            keep: Selects the documents, or None to keep all.
            vocabulary: The dataset's vocabulary.

        Raises:
            SourceError: If a document's text might give other tokens with `vocabulary` than with
                the store's vocabulary. Also if the store does not keep a field that an expression
                reads.
        """
        self.check_fields(source)
        # The store's plan numbers files and splits itself, but a file has the same index in its
        # source.
        store_source, i = self._sources[source.name], work_range.file - source.first_file
        piece = store_source.pieces.of_file(i)[work_range.piece]
        for shard in store_source.shards_of(np.array([piece]), self.plan.shards).tolist():
            opened_shard = self._shard(shard)
            k = opened_shard.parts.get((store_source.first_file + i, work_range.piece))
            if k is None:
                continue
            arrays = opened_shard.arrays
            begin, end = arrays["part_offsets"][k : k + 2].tolist()
            units, unit = int(arrays["part_units"][k]), arrays["unit"][begin:end]
            # A dataset may decompress in larger steps, so its units combine several units of the
            # store.
            if position_of(work_range.format, work_range.compression) == "stream":
                units = -(-work_range.size // work_range.step_bytes)
                unit = unit // (work_range.step_bytes // STEP_BYTES)
            # Documents are sorted by unit, so the work range is a range of documents.
            low, high = np.searchsorted(unit, work_range.range(units)).tolist()
            positions = arrays["position"][begin : begin + high]
            sizes = arrays["size"][begin : begin + high]
            # A Choice counts the documents of the split before the work range.
            seen = slice(0 if isinstance(keep, Choice) else low, high)
            read_fields = reader_of_part(arrays, k, self.kept_fields(source.name), seen)
            # If the work range has no documents here, all documents that were passed are before it.
            wanted_from = int(positions[low]) if low < high else np.iinfo(np.int64).max
            # Documents before the work range were passed only for counting, so cut them off.
            is_wanted = kept(
                keep,
                work_range.file,
                positions[seen],
                partial(sizes[seen].astype, np.int64),
                read_fields,
                wanted_from,
            )[low - seen.start :]
            if is_wanted.any():
                chosen = by_fields(keep)
                bad = chosen.bad if chosen is not None else {}
                # A rejected document is yielded as a reject, so that the dataset lists it too.
                read = _documents(arrays, begin + low, is_wanted, bad, work_range.file)
                self._refuse_special(read, vocabulary, work_range)
                yield read

    def parts_of(self, source: PlannedSource) -> Iterator[tuple[int, Arrays, int]]:
        """Yield (file, arrays, part) for each part of a dataset's source in the store's shards.

        `file` is the index of the file in the source. `arrays` are those of the shard, and `part`
        is the number of the part in it.
        """
        store_source = self._sources[source.name]
        first_file, count = store_source.first_file, len(store_source.files)
        for shard in store_source.shards_of(
            np.arange(len(store_source.pieces)), self.plan.shards
        ).tolist():
            opened_shard = self._shard(shard)
            for (file, _), k in opened_shard.parts.items():
                if first_file <= file < first_file + count:
                    yield file - first_file, opened_shard.arrays, k

    def _shard(self, number: int) -> _OpenShard:
        in_memory = isinstance(self.folder, Remote)
        known_shards, key = _open_shards[in_memory], (self, number)
        # A file that was replaced or changed is opened and compared with its digest again.
        if key not in known_shards or not known_shards[key].is_unchanged():
            most_open = MOST_IN_MEMORY if in_memory else default_max_open()
            while len(known_shards) >= most_open:
                known_shards.popitem(last=False)
            # A shard that was closed and opened again unchanged is not compared with its digest.
            known_shards[key] = opened = _OpenShard(
                self.folder, self._entries[number], self._checked.get(number)
            )
            self._checked[number] = opened.state
        known_shards.move_to_end(key)
        return known_shards[key]

    def _refuse_special(
        self, read: ReadDocuments, vocabulary: Vocabulary, work_range: Slice
    ) -> None:
        """Check that no document might have other tokens with `vocabulary` than in the store.

        Raises:
            SourceError: If a document contains a token that is special only in `vocabulary`. Also
                if a document was rejected because of a token that is special only in the store's
                vocabulary.
        """
        special_ids, texts = self._special(vocabulary)
        # The special ids are sorted, so the largest id of the batch rules out most batches.
        if (
            len(special_ids)
            and len(read.tokens.ids)
            and int(read.tokens.ids.max()) >= special_ids[0]
        ):
            places = np.flatnonzero(np.isin(read.tokens.ids, special_ids))
            if len(places):
                i = int(np.searchsorted(read.tokens.offsets, places[0], "right")) - 1
                raise self._depends(
                    int(read.positions[i]),
                    f"has token {int(read.tokens.ids[places[0]])}",
                    work_range,
                )
        for reject in read.rejects if texts else ():
            if reject.reason == TEXT_REASONS[0] and any(text in reject.detail for text in texts):
                raise self._depends(reject.position, f"was rejected: {reject.detail}", work_range)

    def _depends(self, position: int, reason: str, work_range: Slice) -> SourceError:
        return SourceError(
            f"{self.folder}: the document at {position} of {work_range.path} {reason}, which is"
            " special only in the store or only in the recipe. Its text may give other tokens\n"
            "hint: build a store with this recipe's special tokens and tasks, or build from text"
        )

    def _special(self, vocabulary: Vocabulary) -> tuple[np.ndarray, list[str]]:
        """Compare the special tokens of two vocabularies, and return (ids, texts).

        `ids`, int64[k], has the ascending ids of the tokens that are special in `vocabulary` but
        not in the store's vocabulary. `texts` has the texts of the tokens that are special in the
        store's vocabulary but not in `vocabulary`.
        """
        if vocabulary.digest not in self._specials:
            own_specials, store_specials = (
                special_texts(vocabulary),
                special_texts(self.plan.vocabulary),
            )
            ids = np.array(sorted(id for id, _ in own_specials - store_specials), np.int64)
            self._specials[vocabulary.digest] = (
                ids,
                [text for _, text in store_specials - own_specials],
            )
        return self._specials[vocabulary.digest]


MOST_IN_MEMORY = 32
"""Maximum number of shards at URLs that a process keeps in memory."""
_open_shards: dict[bool, OrderedDict[tuple[TokenStore, int], _OpenShard]] = {
    False: OrderedDict(),
    True: OrderedDict(),
}
"""The open shards of all stores in this process, with the most recently used last.

The value at True has the shards at URLs, which are in memory. The value at False has mapped shards.
"""


def _documents(
    arrays: Arrays, first_document: int, is_wanted: np.ndarray, bad: Mapping[int, str], file: int
) -> ReadDocuments:
    """Return some of n consecutive documents of a shard. All are from one file.

    Args:
        arrays: The arrays of the shard.
        first_document: Number of the first of the n documents in the shard.
        is_wanted: bool[n], is_wanted[i] says whether document first_document + i is returned.
        bad: `ByFields.bad`: position → detail of each document that an expression cannot judge.
        file: Index of the documents' file among the plan's files.
    """
    # From here on, numbers of documents and rejects count from `first_document`.
    end = first_document + len(is_wanted)
    offsets = arrays["document_offsets"][first_document : end + 1]
    begin, stop = np.searchsorted(arrays["rejected"], [first_document, end]).tolist()
    rejected = arrays["rejected"][begin:stop].astype(np.int64) - first_document
    positions = arrays["position"][first_document:end]
    ids = arrays["tokens"][int(offsets[0]) : int(offsets[-1])]
    lengths, text_bytes = (
        np.diff(offsets),
        arrays["text_bytes"][first_document:end].astype(np.int64),
    )
    # A file's reader judges the fields before it decodes the text, so `bad_field` replaces a stored
    # reason.
    is_bad = np.isin(positions, list(bad)) & is_wanted
    rejects = [
        Reject(file, position, BAD_FIELD, bad[position][:MAX_DETAIL])
        for position in positions[is_bad].tolist()
    ]
    for i, r in zip(rejected.tolist(), range(begin, stop), strict=True):
        if is_wanted[i] and not is_bad[i]:
            begin_byte, end_byte = arrays["reject_offsets"][r : r + 2].tolist()
            reason, _, detail = (
                arrays["reject_text"][begin_byte:end_byte].tobytes().decode().partition(" ")
            )
            rejects.append(Reject(file, int(positions[i]), reason, detail))
    used = is_wanted & ~is_bad
    if not used.all():
        ids, text_bytes = ids[np.repeat(used, lengths)], text_bytes[used]
    # Rejected documents have no tokens, so `ids` needs no change for them.
    used[rejected] = False
    # `number[d]` is the number of document d among the documents that are returned.
    number = np.cumsum(used) - 1
    low, high = np.searchsorted(arrays["supervised"], [first_document, end]).tolist()
    trained = {
        int(number[d]): _trained(arrays, s)
        for s, d in zip(
            range(low, high),
            (arrays["supervised"][low:high].astype(np.int64) - first_document).tolist(),
            strict=True,
        )
        if used[d]
    }
    used_offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths[used])))
    tokens = Tokens(ids, used_offsets, [])
    return ReadDocuments(positions[used], tokens, trained, sorted(rejects), text_bytes)


def _trained(arrays: Arrays, s: int) -> Trained:
    """Return the trained spans of a shard's supervised document.

    `s` is its number among the supervised documents. The arrays are copies, because views would
    keep the shard's file open as long as they exist.
    """
    spans, cuts = (
        slice(*arrays[name][s : s + 2].tolist()) for name in ("span_offsets", "cut_offsets")
    )
    columns: dict[str, Any] = {
        name: arrays[name][spans].copy() for name in ("spans", "weights", "turns")
    }
    columns |= {name: arrays[name][cuts].copy() for name in ("cuts", "ranks")}
    system, eos_weight = int(arrays["system"][s]), float(arrays["eos_weight"][s])
    return Trained(
        **columns,
        system=system,
        eos_weight=eos_weight,
        places=_places(arrays, s),
        limited=bool(arrays["limited"][s]) if "limited" in arrays else True,
        document_weight=(
            float(arrays["document_weight"][s]) if "document_weight" in arrays else 1.0
        ),
    )


def _places(arrays: Arrays, s: int) -> MediaPlaces:
    if "place_offsets" not in arrays:
        return NO_PLACES
    spans, first_token, tokens, kind = (arrays[f"place_{name}"] for name in _OF_PLACES)
    every = MediaPlaces(
        spans, first_token, tokens, kind, arrays["place_ref_offsets"], arrays["place_refs"]
    )
    return MediaPlaces(
        *(column.copy() for column in every.of(*arrays["place_offsets"][s : s + 2].tolist()))
    )
