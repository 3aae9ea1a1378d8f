"""Define the input and output of every format, and the selection of documents.

A format takes a work range of a file and yields batches of documents in columns.

`Choice` selects a fraction f of a split's documents. The selection is even across lengths, and each
document has the same probability.

    size        0     1    2…3   4…7   8…15  …      bytes, tokens or messages of a document
    class       0     1     2     3     4    …      bits of the size
    taken       iff ⌊(j + 1) · f + u⌋ > ⌊j · f + u⌋, for the j-th document of its class in the split

u is a uniform random number, keyed by split, pass and class. So each document is taken with
probability f, independently of its length. The selected documents also contain the fraction f of
the split's bytes, except for about one document per class. With an independent random decision per
document, a few long documents would dominate. A work range that starts inside a split makes the
same selection as the whole split, because a Choice counts the documents before the work range.
"""

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from packprep.errors import SourceError
from packprep.randomness import REPEAT, words
from packprep.sources.passes import ByFields, ReadFields
from packprep.storage import is_url, locate

_CLASSES = 64
_32 = np.uint64(32)


class Choice:
    """A selector of the documents that one pass takes from one split.

    A Choice counts the documents that it was called with. Therefore it must be called with all
    documents of the split, in order.

    Args:
        key: Random key of the split in this pass.
        fraction: Fraction of the documents to take, in units of 2⁻³², below 2³².
        sample: Function (file, positions) → bool[n] or `ByFields` that gives the documents to
            choose from. None means all documents.
    """

    def __init__(
        self,
        key: np.uint64,
        fraction: int,
        sample: "Callable[[int, np.ndarray], np.ndarray] | ByFields | None" = None,
    ):
        self.key, self.fraction, self.sample = key, np.uint64(fraction), sample
        self.seen = np.zeros(_CLASSES, np.int64)
        """int64[classes], the number of documents so far in each size class.

        A reader that continues inside a split restores these counts.
        """
        self.fields: Sequence[str] = fields_read(sample)
        self._shift = words(key, REPEAT, np.arange(_CLASSES)).astype(np.uint64)

    def __call__(
        self,
        file: int,
        positions: np.ndarray,
        sizes: np.ndarray,
        read_fields: ReadFields | None = None,
        is_own: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return which of the next documents are taken, bool[n].

        Args:
            file: Index of the documents' file.
            positions: int64[n], positions of the documents.
            sizes: int64[n], sizes of the documents, at least 0.
            read_fields: As in `kept`.
            is_own: bool[n], which documents are in the work range, or None if all are. A `ByFields`
                counts only these.
        """
        taken = np.zeros(len(positions), np.bool_)
        is_own = np.ones(len(positions), np.bool_) if is_own is None else is_own
        among = np.flatnonzero(_selected(self.sample, file, positions, read_fields, is_own))
        # The exponent is the number of bits: 0 for size 0, 1 for 1, 2 for 2 and 3.
        of_class = np.frexp(sizes[among].astype(np.float64))[1]
        order = np.argsort(of_class, kind="stable")
        sorted_class, count = of_class[order], np.bincount(of_class, minlength=_CLASSES)
        # `number` is j, the number of the document in its class since the start of the split.
        number = (
            np.arange(len(order))
            - (np.cumsum(count) - count)[sorted_class]
            + self.seen[sorted_class]
        )
        self.seen += count
        # In units of 2⁻³², a document is taken if its step crosses a whole number.
        total_before = number.astype(np.uint64) * self.fraction + self._shift[sorted_class]
        taken[among[order]] = (total_before + self.fraction) >> _32 > total_before >> _32
        return taken


def _selected(
    keep: "Callable[[int, np.ndarray], np.ndarray] | ByFields | None",
    file: int,
    positions: np.ndarray,
    read_fields: ReadFields | None,
    is_own: np.ndarray,
) -> np.ndarray:
    """Return which documents a selector that is not a `Choice` selects, bool[n]."""
    if keep is None:
        return np.ones(len(positions), np.bool_)
    if isinstance(keep, ByFields):
        assert read_fields is not None, "planning refuses expressions for formats without fields"
        return keep(file, positions, read_fields, is_own)
    return np.asarray(keep(file, positions), np.bool_)


PIECE_BYTES = 4 << 20  # bytes per split of an uncompressed line file
MAX_DOCUMENT_BYTES = 8 << 20
"""Maximum UTF-8 size of a document's text. A longer text is rejected. To encode a text of prose,
the reference engine needs memory of about 50 times the text's size. If each byte of the text is a
token, it needs 200 times the size.
"""
MAX_LINE_BYTES = 4 * MAX_DOCUMENT_BYTES
"""Maximum size of a JSON line. Escapes take up to three times the bytes of a non-ASCII text.
A longer line is rejected and never fully loaded into memory.
"""
MAX_DOCUMENT_TOKENS = 8 << 20  # maximum tokens of a document in a token source
TOKEN_TEXT_BYTES = 4
"""Text bytes that a token of a token source counts as. An English token has about this size with
a vocabulary of 50,000 or more, so text shards and token shards have similar sizes. No
document depends on this value.
"""
MAX_DETAIL = 200  # maximum characters of a reject's detail
# A document counts as at least this many bytes of a batch. Even a short text has several objects.
_LEAST_BYTES = 64

SURROGATE = re.compile("[\ud800-\udfff]")
LOSS_SPANS, MESSAGES, MEDIA = "loss_spans", "messages", "media"
"""Names of fields for the trained spans, the messages, and the media of a document."""

BAD_FIELD = "bad_field"
"""Reason to reject a record if an expression does not accept the type of a field's value."""
# Reasons to reject a document. A reject's reason, position and detail are in the dataset's bytes,
# so they must not depend on the version of Python or of a library.
BAD_REASONS = (
    "malformed_json",
    "missing_text",
    "not_a_string",
    "invalid_utf8",
    "lone_surrogate",
    "too_large",
    "not_tokens",
    "id_out_of_range",
    "bad_loss_spans",
    "bad_weight",
    "bad_messages",
    "template_error",
    "template_not_incremental",
    "part_not_found",
    "bad_media",
    "bad_mask",
    BAD_FIELD,
)

Keep = Callable[[int, np.ndarray], np.ndarray] | ByFields | Choice
"""Function (file, positions int64[n]) → bool[n] that selects the documents to decode. A `ByFields`
also takes the fields of the records. A `Choice` also takes the sizes of the documents, and is
called with all documents from the start of a split.
"""


def fields_read(keep: Keep | None) -> Sequence[str]:
    """Return the names of the fields that a selector reads."""
    if isinstance(keep, Choice):
        return keep.fields
    return keep.passes.fields if isinstance(keep, ByFields) else ()


def by_fields(keep: Keep | None) -> ByFields | None:
    """Return the `ByFields` that a selector consists of or contains, or None."""
    keep = keep.sample if isinstance(keep, Choice) else keep
    return keep if isinstance(keep, ByFields) else None


class Reject(NamedTuple):
    """A document that cannot be used."""

    file: int  # index into the plan's files
    position: int  # position of the document in the file
    reason: str  # one of BAD_REASONS
    detail: str  # at most MAX_DETAIL characters, ASCII


class IdLists(NamedTuple):
    """Token documents as a source stores them. Document i is ids[offsets[i] : offsets[i + 1]].

    Attributes:
        ids: [total], unchecked ids in the source's integer dtype.
        offsets: int64[n + 1], starting at 0.
    """

    ids: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True)
class Supervision:
    """A document with training fields, such as loss_spans, messages, a weight or media.

    The fields are not checked yet.

    Attributes:
        text: The text, or None. A document with a layout may have no text.
        loss_spans: The value of loss_spans, of any type, or None.
        record: Maps names of fields to the fields' values, of any type except None. The fields are
            `weight`, `media` and the fields of the layout. A recipe may rename the keys of records,
            but the names here are always the layout's names.
        layout: Name of the layout in `conversations/layouts.py`, or an empty string.
        kinds: Names of the media kinds that a document may contain. With an empty tuple, media is
            ignored.
    """

    text: str | None
    loss_spans: Any
    record: Mapping[str, Any] = field(default_factory=dict)
    layout: str = ""
    kinds: tuple[str, ...] = ()


class GroupValue(NamedTuple):
    """The values of a record that decide which document it joins, and where.

    Attributes:
        group: The type and the value of the field `group_by`, or None if it is null or missing.
        order: The sort key of the field `order_by`. It is the same for all records without
            `order_by`.
    """

    group: tuple[str, Any] | None
    order: tuple[int, Any]


class Groups(NamedTuple):
    """Which records of a batch form a document.

    Attributes:
        number: int64[n], the number of each record's document in the batch, from 0, ascending.
        cuts: Number of documents that continue a group, which was longer than a document may be.
        alone: Number of documents of a record without a value to group by.
    """

    number: np.ndarray
    cuts: int
    alone: int


class Batch(NamedTuple):
    """Documents in file order, and the rejected documents among them.

    With `groups`, the entries are records. Each document is complete, and has its records in the
    order of `order_by`.

    Attributes:
        texts: n texts.
        files: int32[n], index of each document's file.
        positions: int64[n], strictly increasing within one file.
        rejects: The rejected documents.
        supervision: Maps a document's number in the batch to its `Supervision`. Only documents with
            loss_spans, a layout, a weight or media are in it. It is empty if these fields were not
            requested. A document without a text has "" in `texts`.
        tokens: The n documents of a token source. `texts` and `supervision` are then empty. None
            for a text source.
        weights: Maps a document's number in a token batch to its weight, if the weight is not 1.
        token_weights: float32[tokens], the weight of each token, which is 0 if the token is not
            trained. None for a text source. Also None if all tokens have weight 1.
        values: n values to group by, if a format read the work range of a source with group_by.
        groups: The documents that the n records form, or None if each record is a document.
    """

    texts: list[str]
    files: np.ndarray
    positions: np.ndarray
    rejects: list[Reject]
    supervision: dict[int, Supervision]
    tokens: IdLists | None = None
    weights: Mapping[int, float] = MappingProxyType({})
    token_weights: np.ndarray | None = None
    values: Sequence[GroupValue] | None = None
    groups: Groups | None = None


class IdStream(NamedTuple):
    """The facts that a token stream needs to be read, and that its files do not contain."""

    dtype: str  # `token_dtype` of the source, which may be "auto"
    vocab_size: int
    eos: int | None  # id after each document; None if the tokenizer has no known eos


class Grouping(NamedTuple):
    """The settings that join the records of a source to documents.

    Attributes:
        group_by: Key of the value that the records of a document have in common.
        order_by: Key of the value that sorts the records of a document, or "" for file order.
        between: Number of tokens between two records.
        is_alone: Whether a work range is read without its neighbours. A group that crosses an end
            of the work range is then incomplete.
    """

    group_by: str
    order_by: str
    between: int
    is_alone: bool = False


class Slice(NamedTuple):
    """A work range: the part of one split of one file that a shard reads in one pass.

    It covers the interval [lo·units // weight, hi·units // weight) of the split's units. Units are
    bytes (line file or token stream), rows (Parquet row group or Arrow record batch), documents
    (Megatron or datatrove) or steps of `step_bytes` (compressed line file). A text file is one
    unit. Adjacent work ranges neither overlap nor leave a gap.
    """

    path: str
    file: int  # index into the plan's files
    size: int  # bytes of the file and the files that belong to it, when it was planned
    format: str  # a name of FORMATS
    compression: str  # "" | gzip | zstd
    piece: int  # index of the split within the file
    lo: int
    hi: int
    weight: int
    step_bytes: int  # only used for a compressed line file
    piece_bytes: int = PIECE_BYTES  # not used for a table or a compressed line file
    use: int = 0  # number of the pass
    stream: IdStream | None = None  # only used for a token stream
    grouping: Grouping | None = None  # only used for a source with group_by

    def range(self, units: int) -> tuple[int, int]:
        """Return the half-open interval of units that the work range covers.

        `units` is the number of units in the whole split.
        """
        assert 0 <= self.lo <= self.hi <= self.weight and self.weight > 0, self
        return self.lo * units // self.weight, self.hi * units // self.weight


@dataclass
class BatchBuilder:
    """A builder that collects documents of one file into batches."""

    file: int
    bytes: int = 0
    texts: list[str] = field(default_factory=list)
    positions: array = field(default_factory=lambda: array("q"))
    rejects: list[Reject] = field(default_factory=list)
    supervision: dict[int, Supervision] = field(default_factory=dict)
    values: dict[int, GroupValue] | None = None  # by position; None without group_by

    def note(self, positions: np.ndarray, values: Iterable[GroupValue]) -> None:
        """Note the values to group by of the records at `positions`, which are added later."""
        self.values = self.values or {}
        self.values.update(zip(positions.tolist(), values, strict=True))

    def add(self, position: int, document: str | Supervision, n_bytes: int) -> None:
        if isinstance(document, Supervision):
            self.supervision[len(self.texts)] = document
            document = document.text or ""
        self.texts.append(document)
        self.positions.append(position)
        self.bytes += max(n_bytes, _LEAST_BYTES)

    def extend(
        self, positions: np.ndarray, texts: list[str], n_bytes: np.ndarray, batch_bytes: int
    ) -> Iterator[Batch]:
        """Add texts, and yield the batch each time it contains `batch_bytes`.

        Args:
            positions: int64[n], positions of the texts.
            texts: n texts.
            n_bytes: int64[n], sizes of the texts in bytes.
            batch_bytes: Content size in bytes at which a batch is complete.
        """
        ends = np.cumsum(np.maximum(n_bytes, _LEAST_BYTES))
        begin = 0
        while begin < len(texts):
            bytes_before = int(ends[begin - 1]) if begin else 0
            # The batch may already have documents, which reduce the space for others.
            end = int(np.searchsorted(ends, bytes_before + batch_bytes - self.bytes)) + 1
            end = min(max(end, begin + 1), len(texts))
            self.texts += texts[begin:end]
            self.positions.frombytes(positions[begin:end].tobytes())
            self.bytes += int(ends[end - 1]) - bytes_before
            begin = end
            if self.bytes >= batch_bytes:
                yield from self.take()

    def reject(self, position: int, reason: str, detail: str) -> None:
        self.rejects.append(Reject(self.file, position, reason, detail[:MAX_DETAIL]))
        self.bytes += MAX_DETAIL

    def take(self) -> Iterator[Batch]:
        """Yield the collected documents as a batch, and start an empty batch.

        Nothing is yielded if no document was added or rejected.
        """
        if self.texts or self.rejects:
            files = np.full(len(self.texts), self.file, np.int32)
            values = None
            if self.values is not None:
                values = [self.values.pop(position) for position in self.positions]
                for reject in self.rejects:
                    self.values.pop(reject.position, None)
            batch = Batch(
                self.texts,
                files,
                np.array(self.positions, np.int64),
                self.rejects,
                self.supervision,
                values=values,
            )
            self.texts, self.positions, self.rejects, self.supervision, self.bytes = (
                [],
                array("q"),
                [],
                {},
                0,
            )
            yield batch


def slices(sizes: np.ndarray, n_bytes: int) -> Iterator[slice]:
    """Yield slices of consecutive documents, each with at most `n_bytes`.

    `sizes`, int64[n], has the size of each document in bytes. A document of more than `n_bytes`
    gets its own slice.
    """
    ends = np.cumsum(sizes)
    begin = 0
    while begin < len(ends):
        limit = n_bytes + (ends[begin - 1] if begin else 0)
        end = max(begin + 1, int(np.searchsorted(ends, limit, "right")))
        yield slice(begin, end)
        begin = end


def kept(
    keep: Keep | None,
    file: int,
    positions: np.ndarray,
    sizes: Callable[[], np.ndarray],
    read_fields: ReadFields | None = None,
    wanted_from: int = 0,
) -> np.ndarray:
    """Return which documents `keep` selects, bool[n].

    Args:
        keep: The selector, or None for all documents.
        file: Index of the documents' file.
        positions: int64[n], positions of the documents.
        sizes: Function that returns the sizes of the documents, int64[n]. It is called only if
            `keep` is a Choice.
        read_fields: Function that returns fields of the documents. It is called only if `keep` is a
            ByFields or contains one. None if the format has no fields.
        wanted_from: Position of the first document of the work range. The documents before it are
            not selected, and are passed to `keep` only because a Choice counts them.
    """
    is_own = positions >= wanted_from
    if not len(positions):
        return is_own
    if isinstance(keep, Choice):
        return keep(file, positions, sizes(), read_fields, is_own) & is_own
    return _selected(keep, file, positions, read_fields, is_own) & is_own


def too_large(n_bytes: int | None = None) -> tuple[str, str]:
    """Return the reject reason and detail of a document larger than MAX_DOCUMENT_BYTES.

    `n_bytes` is the document's size, or None if it is unknown.
    """
    size = "more than" if n_bytes is None else f"{n_bytes} bytes; at most"
    return "too_large", f"{size} {MAX_DOCUMENT_BYTES} bytes"


def too_large_line() -> tuple[str, str]:
    """Return the reject reason and detail of a line longer than MAX_LINE_BYTES."""
    return "too_large", f"a line of more than {MAX_LINE_BYTES} bytes"


def large_text(text: str) -> tuple[str, str] | None:
    """Return the reject reason and detail of a text over MAX_DOCUMENT_BYTES, otherwise None."""
    if 4 * len(text) <= MAX_DOCUMENT_BYTES or (size := len(text.encode())) <= MAX_DOCUMENT_BYTES:
        return None
    return too_large(size)


def are_too_long(lengths: np.ndarray) -> np.ndarray:
    """Return which token documents exceed MAX_DOCUMENT_TOKENS, bool[n].

    `lengths` is int64[n] in tokens.
    """
    return lengths > MAX_DOCUMENT_TOKENS


def too_many_tokens(n_tokens: int) -> tuple[str, str]:
    """Return the reject reason and detail of a token document longer than MAX_DOCUMENT_TOKENS."""
    return "too_large", f"{n_tokens} tokens; at most {MAX_DOCUMENT_TOKENS}"


def invalid_utf8(error: UnicodeDecodeError, container: str) -> tuple[str, str]:
    """Return the reject reason and detail of invalid UTF-8.

    `container` names the container of the bytes, for example "line".
    """
    return (
        "invalid_utf8",
        f"byte {error.start} of the {container}, 0x{error.object[error.start]:02x}, is not"
        " valid UTF-8",
    )


@contextmanager
def open_source(path: str, size: int) -> Iterator[BinaryIO]:
    """Open an input file or URL for reading.

    Raises:
        SourceError: If the size differs from the planned `size`, or as in `source_errors`.
    """
    with source_errors(path):
        if is_url(path):
            remote, name = locate(path)
            actual_size = remote.size(name)
            if actual_size is None:
                raise FileNotFoundError(path)
            if actual_size != size:
                raise changed_size(path, size, actual_size)
            with remote.open(name, size) as file:
                yield file
        else:
            with Path(path).open("rb") as file:
                if (actual_size := file.seek(0, 2)) != size:
                    raise changed_size(path, size, actual_size)
                file.seek(0)
                yield file


def changed_size(path: str, size: int, actual_size: int) -> SourceError:
    """Return the error for a file that no longer has the planned `size`."""
    return SourceError(
        f"{path}: the file has {actual_size} bytes, but had {size} when the plan was made\n"
        "hint: restore the original file, or build into a new output folder"
    )


@contextmanager
def source_errors(path: str) -> Iterator[None]:
    """Convert file errors of the operating system to errors with the file's name and a remedy.

    Raises:
        SourceError: If the code in the context raises OSError.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise SourceError(
            f"{path}: the file is missing\n"
            "hint: restore it, or pass the location of its source as --source NAME=PREFIX"
        ) from error
    except PermissionError as error:
        raise SourceError(
            f"{path}: no permission to read the file\n"
            "hint: allow it (chmod, chown), then run the command again"
        ) from error
    except OSError as error:
        raise SourceError(
            f"{path}: cannot be read: {error}\n"
            "hint: check the disk or the file server, then run the same command again"
        ) from error
