"""What every format takes and gives: a slice of a file in, batches of documents as columns out; and
which documents are taken.

Which documents of a piece a fraction of its documents is: evenly by length, each with the same
probability.

    size        0     1    2…3   4…7   8…15  …      stored bytes (line, text) or tokens; of messages, how many
    class       0     1     2     3     4    …      bits of the size
    taken       iff ⌊(j + 1) · f + u⌋ > ⌊j · f + u⌋, for the j-th document of its class in the piece

u is uniform, keyed by piece, use and class. So each document is taken with probability f, whatever
its length; and what is taken of a piece has f of its bytes but for about a document of each class,
where tossing a coin for each lets few long documents decide. A part that begins inside a piece is
chosen from as the whole is: what lies before it is counted.
"""

import re
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from packprep.errors import SourceError
from packprep.randomness import REPEAT, words
from packprep.storage import is_url, locate

_CLASSES = 64
_32 = np.uint64(32)


class Choice:
    """The documents of one piece that one use takes. It is asked for all of them in order, and
    remembers how many it saw.

    key: of the piece in that use. fraction: in 2⁻³², below 2³². sample: (file, positions) →
    bool[n]: the documents among which is chosen, or None for all.
    """

    def __init__(self, key: np.uint64, fraction: int, sample=None):
        self.key, self.fraction, self.sample = key, np.uint64(fraction), sample
        self.seen = np.zeros(_CLASSES, np.int64)
        """int64[classes]: documents so far. Who goes on with a piece hands it on."""
        self._shift = words(key, REPEAT, np.arange(_CLASSES)).astype(np.uint64)

    def __call__(self, file: int, positions: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """bool[n]: which of the next documents are taken. positions, sizes: int64[n], sizes ≥ 0."""
        taken = np.zeros(len(positions), np.bool_)
        among = (
            np.arange(len(positions))
            if self.sample is None
            else np.flatnonzero(self.sample(file, positions))
        )
        of_class = np.frexp(sizes[among].astype(np.float64))[1]
        order = np.argsort(of_class, kind="stable")
        sorted_class, count = of_class[order], np.bincount(of_class, minlength=_CLASSES)
        number = (
            np.arange(len(order))
            - (np.cumsum(count) - count)[sorted_class]
            + self.seen[sorted_class]
        )
        self.seen += count
        before = number.astype(np.uint64) * self.fraction + self._shift[sorted_class]
        taken[among[order]] = (before + self.fraction) >> _32 > before >> _32
        return taken


PIECE_BYTES = 4 << 20  # a piece of an uncompressed line file
MAX_DOCUMENT_BYTES = 8 << 20
"""Of a document's text in UTF-8: a longer one is rejected. The reference engine's encoding of one
takes some 50 times its bytes of prose, and 200 times where each byte is a token."""
MAX_LINE_BYTES = 4 * MAX_DOCUMENT_BYTES
"""Of a line of JSON, whose escapes take up to three times the bytes of a text that is not ASCII: a
longer line is rejected, and never held in memory whole."""
MAX_DOCUMENT_TOKENS = 8 << 20  # of a document of a source of tokens
TOKEN_TEXT_BYTES = 4
"""What a token of a source of tokens counts as text: about what a token of English makes with a
vocabulary of 50,000 or more, so that shards of text and shards of tokens have like sizes. No
document depends on it."""
MAX_DETAIL = 200  # characters of a reject's detail
_LEAST_BYTES = (
    64  # what a document counts in a batch at least: it is some objects, however short its text
)

SURROGATE = re.compile("[\ud800-\udfff]")
LOSS_SPANS, MESSAGES, MEDIA = "loss_spans", "messages", "media"
"""The fields by which a document says what of it is trained, and where places of media stand."""

# Why a document can be rejected. A reason, a position and a detail are part of a dataset's bytes:
# nothing in them may depend on the version of Python or of a library.
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
    "bad_media",
    "bad_mask",
)

Keep = Callable[[int, np.ndarray], np.ndarray] | Choice
"""(file, positions int64[n]) → bool[n]: which documents to decode; or a Choice, which is asked for
all of a piece from its begin, with their sizes."""


class Reject(NamedTuple):
    """A document that cannot be used."""

    file: int
    position: int
    reason: str  # one of BAD_REASONS
    detail: str  # at most MAX_DETAIL characters, ASCII


class IdLists(NamedTuple):
    """Token documents as a source gives them. Document i is ids[offsets[i] : offsets[i + 1]].

    ids: of the source's integer dtype, [total], unchecked; offsets: int64[n + 1], from 0
    """

    ids: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True)
class Supervision:
    """What a document says of its training, as its file has it, unchecked: loss_spans of its text,
    or the fields of a layout.

    text        None: it has none; beside a layout it is not wanted
    loss_spans  of any type; None: it has none
    record      field → value, of any type, of a layout: under the layout's own names, whatever a recipe calls them; without null
    layout      which one, of those in `conversations/layouts.py`; "": none
    kinds       of media that a document may have; (): media is not looked at
    """

    text: str | None
    loss_spans: Any
    record: Mapping[str, Any] = field(default_factory=dict)
    layout: str = ""
    kinds: tuple[str, ...] = ()


class Batch(NamedTuple):
    """Documents in file order, and the rejected ones among them.

    texts: n texts;  files: int32[n];  positions: int64[n], strictly increasing within one file
    supervision: document's number in the batch → its fields, of those that have loss_spans,
    messages or media and where somebody asked; one without a text of its own has the text "" here
    tokens: n documents of a source of tokens, whose batches have no texts and no supervision; None:
    a source of text
    weights: document's number in a batch of tokens → its weight, of those that have one other than
    1
    token_weights: float32[tokens] of a batch of tokens whose documents say what of them is trained:
    0 where a token is not; None: all is
    """

    texts: list[str]
    files: np.ndarray
    positions: np.ndarray
    rejects: list[Reject]
    supervision: dict[int, Supervision]
    tokens: IdLists | None = None
    weights: Mapping[int, float] = MappingProxyType({})
    token_weights: np.ndarray | None = None


class Slice(NamedTuple):
    """What a shard takes from one piece of one file in one use: [lo·units // weight, hi·units //
    weight) of its units.

    Units are bytes (line file), rows (Parquet row group, Arrow record batch), documents
    (Megatron's), input steps of `step_bytes` (compressed line file), or 1 (text file). Neighbouring
    slices neither overlap nor leave a gap.
    """

    path: str
    file: int  # index into the plan's files
    size: int  # bytes of the file, or of the pair of files, when it was planned
    format: str  # jsonl | parquet | arrow | text | megatron | parquet_tokens | arrow_tokens
    compression: str  # "" | gzip | zstd
    piece: int  # of the file
    lo: int
    hi: int
    weight: int
    step_bytes: int  # of a compressed line file; else unused
    piece_bytes: int = PIECE_BYTES  # of an uncompressed line file; else unused
    use: int = 0

    def range(self, units: int) -> tuple[int, int]:
        """The slice's half-open range of the piece's `units`."""
        assert 0 <= self.lo <= self.hi <= self.weight and self.weight > 0, self
        return self.lo * units // self.weight, self.hi * units // self.weight


@dataclass
class BatchBuilder:
    """Documents of one file on their way into one batch."""

    file: int
    bytes: int = 0
    texts: list[str] = field(default_factory=list)
    positions: array = field(default_factory=lambda: array("q"))
    rejects: list[Reject] = field(default_factory=list)
    supervision: dict[int, Supervision] = field(default_factory=dict)

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
        """Adds texts; gives the batch as often as it holds `batch_bytes`.

        positions, n_bytes: int64[n]
        """
        ends = np.cumsum(np.maximum(n_bytes, _LEAST_BYTES))
        begin = 0
        while begin < len(texts):
            before = int(ends[begin - 1]) if begin else 0
            end = int(np.searchsorted(ends, before + batch_bytes - self.bytes)) + 1
            end = min(max(end, begin + 1), len(texts))
            self.texts += texts[begin:end]
            self.positions.frombytes(positions[begin:end].tobytes())
            self.bytes += int(ends[end - 1]) - before
            begin = end
            if self.bytes >= batch_bytes:
                yield from self.take()

    def reject(self, position: int, reason: str, detail: str) -> None:
        self.rejects.append(Reject(self.file, position, reason, detail[:MAX_DETAIL]))
        self.bytes += MAX_DETAIL

    def take(self) -> Iterator[Batch]:
        """The batch, unless it is empty; the next one begins."""
        if self.texts or self.rejects:
            files = np.full(len(self.texts), self.file, np.int32)
            batch = Batch(
                self.texts,
                files,
                np.array(self.positions, np.int64),
                self.rejects,
                self.supervision,
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
    """Documents of `sizes: int64[n]` bytes, some at a time: about `n_bytes`, or one."""
    ends = np.cumsum(sizes)
    begin = 0
    while begin < len(ends):
        limit = n_bytes + (ends[begin - 1] if begin else 0)
        end = max(begin + 1, int(np.searchsorted(ends, limit, "right")))
        yield slice(begin, end)
        begin = end


def kept(
    keep: Keep | None, file: int, positions: np.ndarray, sizes: Callable[[], np.ndarray]
) -> np.ndarray:
    """bool[n]: which of the documents at `positions: int64[n]` are wanted. sizes: gives int64[n]
    where they are asked for."""
    if keep is None or not len(positions):
        return np.ones(len(positions), bool)
    if isinstance(keep, Choice):
        return keep(file, positions, sizes())
    return np.asarray(keep(file, positions), bool)


def too_large(n_bytes: int | None = None) -> tuple[str, str]:
    """Reason and detail of a document beyond MAX_DOCUMENT_BYTES."""
    size = "more than" if n_bytes is None else f"{n_bytes} bytes; at most"
    return "too_large", f"{size} {MAX_DOCUMENT_BYTES} bytes"


def large_text(text: str) -> tuple[str, str] | None:
    """Return the reason and detail of a text beyond MAX_DOCUMENT_BYTES; None for any other."""
    if 4 * len(text) <= MAX_DOCUMENT_BYTES or (size := len(text.encode())) <= MAX_DOCUMENT_BYTES:
        return None
    return too_large(size)


def are_too_long(lengths: np.ndarray) -> np.ndarray:
    """bool[n]: which token documents have more tokens than MAX_DOCUMENT_TOKENS. lengths:
    int64[n]"""
    return lengths > MAX_DOCUMENT_TOKENS


def too_many_tokens(n_tokens: int) -> tuple[str, str]:
    """Reason and detail of a token document beyond MAX_DOCUMENT_TOKENS."""
    return "too_large", f"{n_tokens} tokens; at most {MAX_DOCUMENT_TOKENS}"


def invalid_utf8(error: UnicodeDecodeError, whole: str) -> tuple[str, str]:
    """Reason and detail of bytes that are not UTF-8, found in the `whole`, e.g. "line"."""
    return (
        "invalid_utf8",
        f"byte {error.start} of the {whole}, 0x{error.object[error.start]:02x}, is not valid UTF-8",
    )


@contextmanager
def open_source(path: str, size: int) -> Iterator[BinaryIO]:
    """An input file or URL, open for reading, after a check that it still has the planned `size`;
    see `source_errors`."""
    with source_errors(path):
        if is_url(path):
            remote, name = locate(path)
            found = remote.size(name)
            if found is None:
                raise FileNotFoundError(path)
            if found != size:
                raise changed_size(path, size, found)
            with remote.open(name, size) as file:
                yield file
        else:
            with Path(path).open("rb") as file:
                if (found := file.seek(0, 2)) != size:
                    raise changed_size(path, size, found)
                file.seek(0)
                yield file


def changed_size(path: str, size: int, found: int) -> SourceError:
    """The error of a file that no longer has the planned `size`."""
    return SourceError(
        f"{path}: the file has {found} bytes, but had {size} when the plan was made. Put the file"
        " back as it was, or build into a new output folder."
    )


@contextmanager
def source_errors(path: str) -> Iterator[None]:
    """Turns what the operating system says about a file into a SourceError that names the file and
    what to do."""
    try:
        yield
    except FileNotFoundError as error:
        raise SourceError(
            f"{path}: the file is missing. Put it back, or say with --source NAME=PREFIX where its"
            " source lies."
        ) from error
    except PermissionError as error:
        raise SourceError(
            f"{path}: no permission to read the file. Allow it (chmod, chown), then go on."
        ) from error
    except OSError as error:
        raise SourceError(
            f"{path}: cannot be read: {error}. Check the disk or the file server, then start the"
            " same command again."
        ) from error
