"""Sample documents of a source before a plan is made, to estimate the source's totals.

Positions are drawn uniformly over all bytes, from a random key. The document at each position is
sampled, so its probability is proportional to its bytes. A sampled document has a weight: the
number of documents that it represents. The weight is the distance between two positions divided by
the document's bytes. So a few long documents do not bias the estimate. Only a window of a long
document is tokenized.

    uncompressed lines  windows across all files, with some positions per window; the whole line at
                        each position is read
    other formats       evenly spaced positions in whole splits, or in the starts of a few splits
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from packprep.clock import Clock
from packprep.dataset.boundaries import offsets_of
from packprep.documents.joining import joined_texts
from packprep.documents.reading import take_tokens
from packprep.documents.sampled_passes import FEW_KEPT, SampledPasses
from packprep.documents.tally import Tally
from packprep.randomness import CALIBRATION, permute, uniforms
from packprep.recipe import DocumentKeys
from packprep.sources.formats import (
    FORMATS,
    TOKEN_TEXT_BYTES,
    Batch,
    Slice,
    bytes_per_token,
    position_of,
    read,
)
from packprep.sources.formats.batch import (
    BAD_FIELD,
    MAX_LINE_BYTES,
    Reject,
    Supervision,
    open_source,
)
from packprep.sources.formats.compressed import decompressed, said_bytes
from packprep.sources.formats.fields import Fields
from packprep.sources.formats.jsonl import BOM, Outcome, line_bytes
from packprep.sources.slices import PlannedSource
from packprep.tokenizer.roles import Vocabulary

WINDOWS, WINDOW_BYTES, PLACES = 128, 32 << 10, 4
"""For line files: number of windows per round, bytes per window, positions per window."""
REMOTE_WINDOWS, REMOTE_WINDOW_BYTES, REMOTE_PLACES = 16, 128 << 10, 32
"""The same three numbers for files at URLs, where the latency of requests dominates."""
ROUNDS, ENOUGH = 16, 0.0015
"""Precise mode stops after ROUNDS rounds of windows, or earlier at the relative error ENOUGH.

The error is the standard error of the token count.
"""
WHOLE_BYTES, PRECISE_WHOLE_BYTES = 1 << 20, 8 << 20
"""Up to this many bytes, a sample uses every document that it reads, not only those at positions.

PRECISE_WHOLE_BYTES applies in precise mode, and WHOLE_BYTES otherwise.
"""
PIECES, PIECE_TEXT_BYTES = 6, 256 << 10
"""For files other than uncompressed lines: number of splits, and stored bytes read per split."""
READ_BYTES = 128 << 20
"""Stored bytes after which precise mode stops reading. Reading them takes a few seconds."""
SPACING = 2048
"""Target number of positions in the text that is read. Precise mode has four times as many."""
HELD_BYTES, HELD_DOCUMENTS = 64 << 20, 1 << 20
"""Approximate maximum of text bytes and documents that one sample keeps in memory.

A sample omits further documents, because 256 KiB of compressed data may expand to gigabytes.
"""


class Looked(NamedTuple):
    """The estimates for a source's files of one format, from a sample of k documents."""

    held: float  # content bytes of all splits of the files, as the plan records them
    text_bytes: float  # estimated text bytes of all documents in the files
    error: float  # standard error of the estimated number of tokens in all documents
    sizes: np.ndarray  # int64 or float64[k]: text bytes of each sampled document
    tokens: np.ndarray  # float64[k]: tokens of each sampled document
    weights: np.ndarray  # float64[k]: number of documents that each sampled document represents
    supervised: bool = False  # whether a sampled document limits which of its tokens are trained
    chat: bool = False  # whether a sampled document has messages
    read_s: float = 0.0  # estimated seconds on one core to read and render all documents
    numbers: np.ndarray | None = None
    """float64[k], the number of passes of each sampled document, above 0. None if the source has no
    expressions. `text_bytes` and `weights` count a document once."""

    @property
    def uses(self) -> np.ndarray:
        """Return how many documents in all passes each sampled document represents, float64[k]."""
        return self.weights if self.numbers is None else self.weights * self.numbers

    @property
    def all_tokens(self) -> float:
        return float((self.uses * self.tokens).sum())

    def bytes_of_passes(self, count: int) -> np.ndarray:
        """Return the estimated text bytes that each of `count` passes uses, float64[count]."""
        if self.numbers is None:
            return np.full(count, self.text_bytes)
        stored = self.weights * self.sizes
        parts = np.clip(self.numbers - np.arange(count)[:, None], 0.0, 1.0)
        return self.text_bytes * (parts * stored).sum(axis=1) / max(float(stored.sum()), 1.0)


class Place(NamedTuple):
    """A sampled document and the sampled position in it."""

    text: str
    conversation: Any  # a Conversation, or None for an unsupervised document
    at: float  # fraction of the document before the position, or -1 to use the whole document


Count = Callable[[Sequence[Place]], np.ndarray]
Supervise = Callable[[Batch], tuple[Batch, dict[int, Any]]]
"""A function that renders the supervised documents of a reader's batch as texts.

It returns the batch of texts, and a dict from a supervised document's number to its conversation.
"""
Look = tuple[list[str], list[Any], list[float]]
"""(texts, conversations, numbers of passes) of some documents.

An unsupervised document has None as conversation.
"""


class Sampling(NamedTuple):
    """A source's files of one format, and the settings for sampling them."""

    source: PlannedSource
    pieces: np.ndarray  # indices of the files' splits in the source
    key: np.uint64  # random key of the sample
    supervise: Supervise | None  # renders supervised documents; None reads only plain texts
    count_tokens: Count  # counts the tokens of sampled documents
    precise: bool  # whether to sample until the error of the token count is small
    clock: Clock  # receives the seconds of the stage "read"
    tally: Tally  # receives the counts of bad documents
    passes: SampledPasses | None = None  # selects documents by the source's expressions

    @property
    def read_seconds(self) -> float:
        """Return the seconds of the stage "read" so far."""
        return self.clock.seconds.get("read", 0.0)


def first_looks(
    source: PlannedSource,
    pieces: np.ndarray,
    kind: tuple[str, str],
    key: np.uint64,
    supervise: Supervise | None,
) -> Iterator[Look]:
    """Yield a quick sample of a source's files of one format. Expressions do not matter.

    Uncompressed line files are read completely if they have at most WHOLE_BYTES together.
    Otherwise, windows of them are read. For other formats, the start of each sampled split is read.
    Each result is yielded as soon as it is read.

    Args:
        source: The planned source.
        pieces: Indices of the splits to sample from.
        kind: (format, compression) of the files.
        key: Random key of the sample.
        supervise: Renders supervised documents. None reads only plain texts.
    """
    # Groups and other formats cannot start at any byte, so the starts of sampled splits are read.
    if position_of(*kind) != "byte" or source.grouping:
        for piece in _chosen(source, pieces, key, False):
            alone = Sampling(source, pieces, key, supervise, _no_count, False, Clock(), Tally())
            yield from _begin(source, piece, alone).texts
        return
    starts, files = _starts_of(source, pieces)
    if int(starts[-1]) <= WHOLE_BYTES:
        for piece in pieces.tolist():
            yield from _read(source, supervise, source.slices_of(piece))
        return
    decode, last_line = _decoder(source, supervise, kind[0]), None
    for lines in _windows(source, starts, files, key, 0):
        # A long line may span several windows, but is decoded once.
        new = {
            line.begin: line for line, _ in lines if last_line is None or line[:2] != last_line[:2]
        }
        last_line = lines[-1][0]
        documents = [_document(decode, line.data, supervise) for line in new.values()]
        yield _look_of(documents, [1.0] * len(documents))


def _no_count(places: Sequence[Place]) -> np.ndarray:
    return np.zeros(len(places))


def _chosen(source: PlannedSource, pieces: np.ndarray, key: np.uint64, is_whole: bool) -> list[int]:
    """Return the indices of the splits to sample: the first ones in a random order.

    The order depends on `key`. With `is_whole`, the splits have about READ_BYTES in total. Without
    `is_whole`, at most PIECES splits are returned.
    """
    if not len(pieces):
        return []
    count = len(pieces) if is_whole else min(PIECES, len(pieces))
    # The order is the same for every count, so a larger sample contains a smaller sample.
    chosen = pieces[permute(np.arange(count), len(pieces), key)].astype(np.int64)
    if is_whole:
        ends = np.cumsum(source.pieces.at(chosen).bytes)
        # The last split reaches the limit or exceeds it, so at least one split is read.
        chosen = chosen[: int(np.searchsorted(ends, READ_BYTES)) + 1]
    numbers: list[int] = chosen.tolist()
    return numbers


# The first part of this file samples uncompressed lines at positions across all files.


class _Line(NamedTuple):
    """A line in bytes [begin, end) of a file. `data` is the line without its line feed.

    For a line longer than MAX_LINE_BYTES, `data` is only the part around the sampled position.
    """

    path: str
    begin: int
    end: int
    data: bytes


class _ReadLine(NamedTuple):
    """A line that the reader has decoded."""

    stored: float  # bytes of the line with its line feed
    text: str  # "" if the line is not a usable document
    conversation: Any  # a Conversation, or None for an unsupervised line
    is_document: bool  # whether the line is a usable document
    bad: int  # 1 if the line is a bad document, otherwise 0
    seconds: float  # time to decode the line
    number: float = 1.0  # number of passes that use the document


class _LineReader:
    """A reader that decodes the lines at sampled positions, and counts them in `sampling.tally`.

    If consecutive positions are in the same line, the line is decoded and counted once.
    """

    def __init__(self, sampling: Sampling, format: str):
        self._sampling = sampling
        self._decode = _decoder(sampling.source, sampling.supervise, format)
        self._last: tuple[_Line, _ReadLine] | None = None
        self.read_bytes = 0

    def read_window(self, lines: Iterable[_Line]) -> list[_ReadLine]:
        """Decode the lines at the sampled positions of a window, and add the window to the tally.

        The result has one `_ReadLine` for each line in `lines`.
        """
        window = [self._read(line) for line in lines]
        # A line's probability is proportional to its bytes, so its weight is 1 / bytes.
        self._sampling.tally.add_unit(
            len(window),
            sum(line.bad for line in window),
            sum((line.is_document or line.bad) / line.stored for line in window),
            sum(line.bad / line.stored for line in window),
        )
        return window

    def _read(self, line: _Line) -> _ReadLine:
        # Positions in the same line refer to the same object, see `_lines_at`.
        if self._last is None or line is not self._last[0]:
            sampling, rejects = self._sampling, list[Reject]()
            seconds_before = sampling.read_seconds
            with sampling.clock.stage("read"):
                (document,), (number,) = _documents(
                    self._decode, [line.data], sampling, rejects, [line.begin]
                )
            self.read_bytes += len(line.data)
            text, conversation = document or ("", None)
            is_document, seconds = document is not None, sampling.read_seconds - seconds_before
            bad = sampling.tally.count(int(is_document or bool(rejects)), rejects, line.path)
            stored = len(line.data) + 1.0
            read_line = _ReadLine(stored, text, conversation, is_document, bad, seconds, number)
            self._last = line, read_line
        return self._last[1]


def look_at_lines(sampling: Sampling, format: str) -> Looked:
    """Estimate the totals of uncompressed line files.

    The files are read completely if they have at most WHOLE_BYTES together, or READ_BYTES in
    precise mode. Otherwise, the lines at some positions are sampled, in windows across all files.
    The quick mode samples one round of windows. Precise mode samples rounds until the error of the
    estimated number of tokens is small.

    Args:
        sampling: The files to sample.
        format: The format of the files.
    """
    source = sampling.source
    starts, files = _starts_of(source, sampling.pieces)
    stored_bytes = int(starts[-1])
    # Small files are read whole, so their text bytes are exact.
    if stored_bytes <= (READ_BYTES if sampling.precise else WHOLE_BYTES):
        return look_at_pieces(sampling, compressed=False, whole=True)
    sampling.tally.is_whole = False
    reader = _LineReader(sampling, format)
    # Tokens, text bytes and seconds per stored byte, by window.
    rates: list[np.ndarray] = []
    # Text bytes, tokens, bytes of the line, number of passes.
    documents: list[tuple[int, float, float, float]] = []
    limited_and_chat = np.zeros(2, np.bool_)
    for round_ in range(ROUNDS if sampling.precise else 1):
        for lines in _windows(source, starts, files, sampling.key, round_):
            window = reader.read_window(line for line, _ in lines)
            places = [
                Place(line.text, line.conversation, fraction)
                for line, (_, fraction) in zip(window, lines, strict=True)
            ]
            limited_and_chat |= _limited_and_chat(line.conversation for line in window)
            tokens = sampling.count_tokens(places)
            # Windows are the independent samples, so each contributes one mean rate.
            rates.append(_rates_of(window, tokens))
            documents += [
                (_size(line.text, line.conversation), float(n), line.stored, line.number)
                for line, n in zip(window, tokens, strict=True)
                if line.is_document
            ]
            # Long lines may exceed the limit within a round. An error needs two windows.
            if reader.read_bytes > READ_BYTES and len(rates) > 1:
                break
        token_rates, text_rates, read_rates = np.array(rates).T
        error = float(np.std(token_rates, ddof=1)) / math.sqrt(len(rates))
        # A source whose expressions keep few documents needs more rounds for its estimates.
        has_few = sampling.passes is not None and sampling.passes.kept < FEW_KEPT
        is_enough = error <= ENOUGH * float(np.mean(token_rates)) and not has_few
        if is_enough or reader.read_bytes > READ_BYTES:
            break
    columns = np.array(documents, np.float64).reshape(-1, 4).T
    document_sizes, document_tokens, stored, numbers = columns
    is_limited, is_chat = limited_and_chat.tolist()
    return Looked(
        held=stored_bytes,
        text_bytes=stored_bytes * float(np.mean(text_rates)),
        error=stored_bytes * error,
        sizes=document_sizes,
        tokens=document_tokens,
        weights=stored_bytes / (len(rates) * len(window)) / stored,
        supervised=is_limited,
        chat=is_chat,
        read_s=stored_bytes * float(np.mean(read_rates)),
        numbers=None if sampling.passes is None else numbers,
    )


def _rates_of(window: Sequence[_ReadLine], tokens: np.ndarray) -> np.ndarray:
    """Return the mean tokens, text bytes and seconds per stored byte of a window, float64[3].

    Tokens count once per pass.
    """
    sizes = [_size(line.text, line.conversation) for line in window]
    seconds = [line.seconds for line in window]
    stored = np.array([line.stored for line in window])
    used = tokens * np.array([line.number for line in window])
    rates: np.ndarray = (np.array([used, sizes, seconds]) / stored).mean(axis=1)
    return rates


def _documents(
    decode: Callable[[bytes], Outcome],
    lines: Sequence[bytes],
    sampling: Sampling,
    rejects: list[Reject],
    positions: Sequence[int],
) -> tuple[list[tuple[str, Any] | None], list[float]]:
    """Return the document and the number of passes of each line.

    The document is the result of `_document`, or None if no pass uses the line. The other arguments
    are as in `_document`.
    """
    # Expressions are evaluated before texts are decoded, as in a build.
    passes, supervise = sampling.passes, sampling.supervise
    numbers, bad = np.ones(len(lines)), dict[int, str]()
    if passes is not None:
        # Blank and too large lines are not documents, and have no fields.
        judged = [i for i, line in enumerate(lines) if _is_readable(line)]
        numbers[judged] = passes.of_lines([lines[i] for i in judged], judged)
        bad = dict(passes.bad)
    documents: list[tuple[str, Any] | None] = [None] * len(lines)
    for i, (line, position) in enumerate(zip(lines, positions, strict=True)):
        if i in bad:
            rejects.append(Reject(0, position, BAD_FIELD, bad[i]))
        elif numbers[i]:
            documents[i] = _document(decode, line, supervise, rejects, position)
    return documents, numbers.tolist()


def _is_readable(line: bytes) -> bool:
    return bool(line) and len(line) <= MAX_LINE_BYTES and not line.isspace()


def _document(
    decode: Callable[[bytes], Outcome],
    line: bytes,
    supervise: Supervise | None,
    rejects: list[Reject] | None = None,
    position: int = -1,
) -> tuple[str, Any] | None:
    """Return (text, conversation) of a line, or None if the line is blank, rejected or too large.

    A line that is not supervised has None as `conversation`. If the line is rejected and `rejects`
    is a list, a `Reject` with `position` is appended to `rejects`.
    """
    outcome = decode(line) if _is_readable(line) else None
    # `supervise` renders batches, so the record becomes a batch of one document.
    if isinstance(outcome, Supervision) and supervise is not None:
        alone = Batch(
            [outcome.text or ""], np.zeros(1, np.int32), np.zeros(1, np.int64), [], {0: outcome}
        )
        batch, conversations = supervise(alone)
        if batch.texts:
            return batch.texts[0], conversations.get(0)
        outcome = batch.rejects[0].reason, batch.rejects[0].detail
    if rejects is not None and isinstance(outcome, tuple):
        rejects.append(Reject(0, position, *outcome))
    return (outcome, None) if isinstance(outcome, str) else None


def _limited_and_chat(conversations: Iterable[Any]) -> np.ndarray:
    """Return two bools as an array, bool[2].

    The first is True if at least one conversation limits which of its tokens are trained. The
    second is True if at least one is a chat. `conversations` has None for each unsupervised
    document.
    """
    supervised = [conversation for conversation in conversations if conversation is not None]
    return np.array(
        [
            any(conversation.limited for conversation in supervised),
            any(conversation.chat for conversation in supervised),
        ]
    )


def _look_of(documents: Sequence[tuple[str, Any] | None], numbers: Sequence[float]) -> Look:
    """Return the documents that are not None as a `Look`. `numbers` has the passes of each."""
    used = [(*d, number) for d, number in zip(documents, numbers, strict=True) if d is not None]
    return (
        [text for text, *_ in used],
        [conversation for _, conversation, _ in used],
        [number for *_, number in used],
    )


def _starts_of(source: PlannedSource, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (starts, files) for the line files that the splits in `pieces` belong to.

    With F such files, `files`, int64[F], has the index of each file in the source. `starts`,
    int64[F + 1], has the offset of each file's first byte if the F files are concatenated, then the
    summed size.
    """
    files = np.unique(source.pieces.at(pieces).file) if len(pieces) else np.zeros(0, np.int64)
    return offsets_of(source.files.sizes[files]), files


def _windows(
    source: PlannedSource, starts: np.ndarray, files: np.ndarray, key: np.uint64, round_: int
) -> Iterator[list[tuple[_Line, float]]]:
    """For each window of a round, yield a list of the lines at the window's sampled positions.

    The lists are results of `_lines_at`. Windows are spaced evenly, and each window is shifted by a
    random offset that depends on `key` and `round_`.

    Args:
        source: The planned source.
        starts: int64[F + 1], from `_starts_of`.
        files: int64[F], from `_starts_of`.
        key: Random key of the sample.
        round_: Number of the round.
    """
    # The plan says whether the files were at a URL. Therefore the sample stays the same if they are
    # moved.
    remote = source.planned_at_url
    windows, n_bytes, places = (
        (REMOTE_WINDOWS, REMOTE_WINDOW_BYTES, REMOTE_PLACES)
        if remote
        else (WINDOWS, WINDOW_BYTES, PLACES)
    )
    # Window k starts at a random byte of the k-th of equal intervals, so windows spread evenly.
    shifts = uniforms(key, CALIBRATION, round_ * windows + np.arange(windows))
    window_begins = ((np.arange(windows) + shifts) * (int(starts[-1]) / windows)).astype(np.int64)

    def lines_of(place: int, last_line: _Line | None = None) -> list[tuple[_Line, float]]:
        number = int(np.searchsorted(starts, place, "right")) - 1
        i, file_position = int(files[number]), place - int(starts[number])
        size = int(source.files.sizes[i])
        # Positions continue at the start of the file, so each byte has the same probability.
        positions = [(file_position + k * n_bytes // places) % size for k in range(places)]
        return _lines_at(
            os.path.join(source.prefix, source.files.names[i]), size, positions, last_line
        )

    # Requests run at the same time. `map` yields the windows in order.
    if remote:
        with ThreadPoolExecutor(REMOTE_WINDOWS) as threads:
            yield from threads.map(lines_of, window_begins.tolist())
        return
    # A line that spans several windows is passed on, so it is read once.
    last_line = None
    for place in window_begins.tolist():
        lines = lines_of(place, last_line)
        last_line = lines[-1][0]
        yield lines


_BACK = 16 << 10  # First number of bytes read before a position. Most lines start within them.


def _lines_at(
    path: str, size: int, places: Sequence[int], line: _Line | None
) -> list[tuple[_Line, float]]:
    """Return (line, fraction) for each byte position in `places`.

    `line` is the line at the position. `fraction` is the fraction of the line that precedes the
    position.

    Args:
        path: Path or URL of the file.
        size: Size of the file in bytes.
        places: Byte positions in the file.
        line: A line that was read before, or None. It is not read again if the first positions are
            in it.
    """
    lines: list[tuple[_Line, float]] = []
    with open_source(path, size) as file:
        for place in places:
            if line is None or line.path != path or not line.begin <= place < line.end:
                line = _line_at(file, path, size, place)
            lines.append((line, min((place - line.begin) / max(len(line.data), 1), 1.0)))
    return lines


def _line_at(file: BinaryIO, path: str, size: int, place: int) -> _Line:
    back = _BACK
    # Look for the start of the line in growing steps. A line beyond the limit is not a document
    # anyway.
    while True:
        begin = max(place - back, 0)
        file.seek(begin)
        data = file.read(place - begin + WINDOW_BYTES)
        line_start = data.rfind(b"\n", 0, place - begin) + 1
        if line_start or not begin or back > MAX_LINE_BYTES:
            break
        back *= 4
    # Most lines end in the data that was read. Only a longer line needs a second read.
    end = data.find(b"\n", place - begin)
    if end < 0 and begin + len(data) < size:
        data += file.readline(MAX_LINE_BYTES)
        end = data.find(b"\n", place - begin)
    end = end if end >= 0 else len(data)
    line = data[line_start:end]
    # A byte order mark is not text, but the line's positions include it.
    return _Line(
        path,
        begin + line_start,
        begin + end + 1,
        line.removeprefix(BOM) if begin + line_start == 0 else line,
    )


# The second part of this file samples all other texts. It reads whole splits or only their starts.


class _Piece(NamedTuple):
    """A split, or the start of a split, to sample documents from."""

    held: float  # bytes of the split or of its start
    whole: bool  # whether the whole split is read
    texts: Iterator[Look]  # the documents


def _places(
    texts: Sequence[str], conversations: Sequence[Any], chosen: np.ndarray, fractions: np.ndarray
) -> list[Place]:
    """Return a `Place` for each document that was sampled.

    Args:
        texts: The texts of all documents.
        conversations: The conversation of each document, or None.
        chosen: int64[n], numbers of the sampled documents.
        fractions: float64[n], the fraction of each sampled document that precedes the sampled
            position, or -1 to use the whole document.
    """
    pairs = zip(chosen, fractions, strict=True)
    return [Place(texts[i], conversations[i], fraction) for i, fraction in pairs]


def _at_places(
    looks: Sequence[_Piece], distance: float, count: Count, clock: Clock
) -> tuple[Looked, list[int]]:
    """Sample the documents of splits at positions that are `distance` text bytes apart.

    With a distance of 0, all documents are sampled.

    Returns:
        (looked, text_bytes). `looked` has estimates for the text that was read, not for all files.
        Its `error` is a fraction of the tokens of this text. `text_bytes` has the number of text
        bytes that were read from each split.
    """
    # Each tuple has the sizes, the tokens, the weights and the numbers of passes.
    columns: list[tuple[np.ndarray, ...]] = [(np.zeros(0),) * 4]
    # The longest document represents all documents if the text is too short to have a position.
    longest: tuple[Place, float] | None = None
    limited_and_chat = np.zeros(2, np.bool_)
    # Positions run through the texts of all splits as if these were one text.
    text_bytes, all_bytes, next_position = [0] * len(looks), 0, distance / 2
    for k, look in enumerate(looks):
        for texts, conversations, numbers in clock.steps("read", look.texts):
            limited_and_chat |= _limited_and_chat(conversations)
            sizes = np.fromiter(map(_size, texts, conversations), np.int64)
            if longest is None and sizes.any():
                i = int(sizes.argmax())
                longest = Place(texts[i], conversations[i], -1.0), numbers[i]
            chosen, fractions, weights = _at_distance(sizes, all_bytes, next_position, distance)
            next_position += len(chosen) * distance
            text_bytes[k] += int(sizes.sum())
            all_bytes = sum(text_bytes)
            if len(chosen):
                places = _places(texts, conversations, chosen, fractions)
                of_chosen = np.array(numbers)[chosen]
                columns.append((sizes[chosen], count(places), weights, of_chosen))
    # Without any position, the longest document represents the whole text.
    if longest is not None and len(columns) == 1:
        place, number = longest
        size = np.array([_size(place.text, place.conversation)], np.int64)
        columns.append((size, count([place]), all_bytes / size, np.array([number])))
    sizes, tokens, weights, passes = map(np.concatenate, zip(*columns, strict=True))
    error = 0.0
    if distance and all_bytes:
        rates = passes * tokens / np.maximum(sizes, 1)
        error = _error_of_rates(rates, weights * sizes, distance, all_bytes)
    looked = Looked(0.0, all_bytes, error, sizes, tokens, weights, *limited_and_chat.tolist())
    return looked._replace(numbers=passes), text_bytes


def _at_distance(
    sizes: np.ndarray, bytes_before: int, first_position: float, distance: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (numbers, fractions, weights) of the sampled ones among consecutive documents.

    With a distance of 0, each document is used completely and represents only itself.

    Args:
        sizes: int64[n], text bytes of each document.
        bytes_before: Text bytes before these documents.
        first_position: The first sampled position.
        distance: Text bytes between two sampled positions.
    """
    if not distance:
        return np.arange(len(sizes)), np.full(len(sizes), -1.0), np.ones(len(sizes))
    # Sizes 100 and 300 with positions 50 and 250 give documents 0 and 1, at fractions 0.5 and 0.5.
    ends = bytes_before + np.cumsum(sizes)
    positions = np.arange(first_position, bytes_before + int(sizes.sum()), distance)
    chosen = np.searchsorted(ends, positions, "right")
    fractions = 1 - (ends[chosen] - positions) / sizes[chosen]
    return chosen, fractions, distance / sizes[chosen]


def _error_of_rates(
    rates: np.ndarray, weights: np.ndarray, distance: float, all_bytes: int
) -> float:
    """Return the relative standard error of the weighted mean of `rates`.

    Args:
        rates: float64[k], tokens per text byte of each sampled document.
        weights: float64[k], weight of each rate in the mean.
        distance: Bytes between two sampled positions.
        all_bytes: Bytes of the text that the positions cover.
    """
    # The text has all_bytes / distance positions, and each is an independent sample.
    mean = float(np.average(rates, weights=weights))
    variance = float(np.average((rates - mean) ** 2, weights=weights)) * distance / all_bytes
    return math.sqrt(variance) / mean if mean else 0.0


def _fields(source: PlannedSource, supervise: Supervise | None) -> Fields | None:
    """Return the fields to read in addition to the text.

    If `supervise` is None, only the text is read, and the result is None.
    """
    return Fields.of(source.source, source.kinds) if supervise is not None else None


def _decoder(
    source: PlannedSource, supervise: Supervise | None, format: str
) -> Callable[[bytes], Outcome]:
    """For the source's files of one format, return a function that decodes one line."""
    return FORMATS[format].module.line_decoder(source.source.text_key, _fields(source, supervise))


def _size(text: str, conversation: Any) -> int:
    """Return the bytes of a document. A media position counts as TOKEN_TEXT_BYTES."""
    slots = conversation.slots if conversation is not None else 0
    return len(text.encode()) + TOKEN_TEXT_BYTES * slots


def _read(
    source: PlannedSource,
    supervise: Supervise | None,
    parts: Iterable[Slice],
    tally: Tally | None = None,
    passes: SampledPasses | None = None,
) -> Iterator[Look]:
    documents = bad = 0
    for work_range in parts:
        if work_range.grouping:  # The documents before and after it would bias the estimates.
            work_range = work_range._replace(grouping=work_range.grouping._replace(is_alone=True))
        # Positions of different files may be equal, so numbers from the previous work range are
        # forgotten.
        if passes is not None:
            passes.known.clear()
        for batch in read(
            work_range, source.source.text_key, passes, fields=_fields(source, supervise)
        ):
            if batch.groups is None:
                batch, conversations = supervise(batch) if supervise else (batch, {})
            if tally is not None:
                count = len(batch.texts) + len(batch.rejects)
                documents += count
                bad += tally.count(count, batch.rejects, work_range.path)
                tally.grouped += (
                    0 if batch.groups is None else len(batch.texts) - batch.groups.alone
                )
            # A group has no conversations. The separators between its records count like media.
            if batch.groups is not None:
                texts, separators = joined_texts(
                    batch.texts, batch.groups.number, len(source.source.between)
                )
                yield texts, separators, [1.0] * len(texts)
                continue
            numbers = [1.0] * len(batch.texts)
            if passes is not None:
                numbers = [passes.known[position] for position in batch.positions.tolist()]
            yield (
                batch.texts,
                [conversations.get(i) for i in range(len(batch.texts))],
                numbers,
            )
    # A split is one unit, because its documents resemble each other.
    if tally is not None:
        tally.add_unit(documents, bad, documents, bad)


def look_at_pieces(sampling: Sampling, compressed: bool, whole: bool) -> Looked:
    """Estimate the totals of a source's files of one format from some of their splits.

    With `whole`, these splits are read completely. Otherwise, only their starts are read. If
    `sampling.precise` is True, more positions are sampled in the text that is read. The
    decompressed sizes of compressed line files are then also recorded in `source.files`.

    Args:
        sampling: The files to sample.
        compressed: Whether the files are compressed line files.
        whole: Whether to read splits completely, about READ_BYTES in total.
    """
    source, supervise, pieces = sampling.source, sampling.supervise, sampling.pieces
    precise, clock, tally = sampling.precise, sampling.clock, sampling.tally
    chosen = _chosen(source, pieces, sampling.key, whole)
    seconds_before = sampling.read_seconds
    # Whole splits are read lazily. Starts are read now, because they define the expected text.
    if whole:
        looks = [
            _Piece(
                held_by(source, [piece]),
                True,
                _read(source, supervise, source.slices_of(piece), tally, sampling.passes),
            )
            for piece in chosen
        ]
    else:
        with clock.stage("read"):
            looks = [_begin(source, piece, sampling) for piece in chosen]
    # Text is assumed to be four times as large as its compressed form.
    expected = sum(look.held for look in looks) * (4 if compressed else 1)
    is_small = expected <= (PRECISE_WHOLE_BYTES if precise else WHOLE_BYTES)
    is_few = sampling.passes is not None and sampling.passes.few
    # A small text is used completely. A text is also used completely if expressions keep few
    # documents.
    distance = 0.0 if is_small or is_few else expected / (4 * SPACING if precise else SPACING)
    looked, text_bytes = _at_places(looks, distance, sampling.count_tokens, clock)
    # The text that was read represents the text of all splits.
    is_noted = compressed and precise and len(pieces) > 0
    stored = [look.held for look in looks]
    if is_noted:
        stored = _note(source, pieces, sampling.key, text_bytes)
    stored_bytes, all_bytes, error = held_by(source, pieces), looked.text_bytes, looked.error
    if len(looks) < len(pieces) or not all(look.whole for look in looks):
        tally.is_whole = False
        # With recorded sizes, `stored_bytes` is already the text bytes of all splits.
        all_bytes = (
            stored_bytes if is_noted else stored_bytes * sum(text_bytes) / max(sum(stored), 1.0)
        )
        # Two independent errors: which splits were read, and which documents were sampled.
        error = math.hypot(_error_of_ratio(text_bytes, stored), error)
    scale = all_bytes / looked.text_bytes if looked.text_bytes else 1.0
    looked = looked._replace(
        held=stored_bytes,
        text_bytes=all_bytes,
        weights=looked.weights * scale,
        read_s=(sampling.read_seconds - seconds_before) * scale,
        numbers=None if sampling.passes is None else looked.numbers,
    )
    # Until here, the error is a fraction of the tokens.
    return looked._replace(error=error * looked.all_tokens)


def held_by(source: PlannedSource, pieces: Sequence[int] | np.ndarray) -> float:
    """Return the summed bytes of the splits with the indices in `pieces`.

    A split counts with its content size if `source.files` has this size, otherwise with its stored
    bytes.
    """
    splits = source.pieces.at(np.asarray(pieces, np.int64))
    return float(source.files.held(splits.file, splits.part, splits.bytes).sum())


def _note(
    source: PlannedSource, pieces: np.ndarray, key: np.uint64, text_bytes: Sequence[int]
) -> list[float]:
    """Record the text bytes of each compressed line file in `source.files`.

    For a file that was read, the measured size is recorded. For any other file, an estimate from
    its header, trailer or bytes on disk is recorded.

    Args:
        source: The planned source.
        pieces: Indices of the splits, one per file.
        key: Random key of the sample.
        text_bytes: Text bytes of each file that was read. These files are the first in the random
            order of `key`.

    Returns:
        For each file that was read, the estimate that would be recorded if this file had not been
        read. A comparison with the measured sizes shows the error. The list is empty if all files
        were read.
    """
    # `_chosen` has the same order, so the files that were read come first.
    ordered = pieces[permute(np.arange(len(pieces)), len(pieces), key)].astype(np.int64)
    in_order: list[int] = source.pieces.at(ordered).file.tolist()
    expansion = sum(text_bytes) / max(
        1, sum(int(source.files.sizes[i]) for i in in_order[: len(text_bytes)])
    )
    estimates = []
    # An estimate from metadata is needed only if some file was not read.
    for i in in_order if len(in_order) > len(text_bytes) else ():
        path, size = os.path.join(source.prefix, source.files.names[i]), int(source.files.sizes[i])
        estimates.append(
            said_bytes(path, size, source.formats[i][1], size * expansion) or size * expansion
        )
    # The files that were read show the factor that corrects these estimates.
    of_text = sum(text_bytes) / max(1.0, sum(estimates[: len(text_bytes)])) if estimates else 1.0
    for k, i in enumerate(in_order):
        source.files.note(
            i, [text_bytes[k] if k < len(text_bytes) else round(estimates[k] * of_text)]
        )
    return [of_text * n_bytes for n_bytes in estimates[: len(text_bytes)]]


_ALL = 1 << 20
"""A fraction of a split is an integer in units of 1 / _ALL."""


def _parts_of_begin(stored: int) -> int:
    """Return the size of a split's first PIECE_TEXT_BYTES as a fraction of the split.

    The fraction is an integer in units of 1 / _ALL. `stored` is the stored bytes of the split.
    """
    if stored <= PIECE_TEXT_BYTES:
        return _ALL
    return max(1, -(-PIECE_TEXT_BYTES * _ALL // stored))


def _begin(source: PlannedSource, piece: int, sampling: Sampling) -> _Piece:
    """Return the documents in about the first PIECE_TEXT_BYTES stored bytes of a split.

    A smaller split is read completely.
    """
    supervise, tally = sampling.supervise, sampling.tally
    split = source.pieces.at(np.array([piece]))
    stored, i = max(1, int(split.bytes[0])), int(split.file[0])
    format, compression = source.formats[i]
    is_stream, begin = position_of(format, compression) == "stream", _parts_of_begin(stored)
    if is_stream and source.grouping:  # at least one step, to join its records
        begin = max(begin, -(-_ALL // -(-stored // source.step_bytes)))
    elif is_stream:
        path = os.path.join(source.prefix, source.files.names[i])
        lines, looked = _begin_of_stream(path, int(source.files.sizes[i]), compression)
        decode = _decoder(source, supervise, format)
        texts, share = _texts_of(decode, lines, path, sampling)
        return _Piece(looked * share, looked >= stored and share == 1.0, iter([texts]))
    # For other formats, the start is a work range from 0 to begin / _ALL of the split.
    parts = list(source.slices_of(piece, 0, 0, begin, _ALL))
    held = held_by(source, [piece]) * begin / _ALL
    if position_of(format, compression) == "whole":  # These splits are whole files.
        held = float(sum(work_range.size for work_range in parts))
    # A start may expand to gigabytes, so only its first documents are used.
    first_texts, share = _some(_read(source, supervise, parts, tally, sampling.passes))
    return _Piece(held * share, begin == _ALL and share == 1.0, iter([first_texts]))


def _some(looks: Iterator[Look]) -> tuple[Look, float]:
    """Read all batches of documents in `looks`, and return (documents, fraction).

    To limit the memory, `documents` has only the first documents, up to about HELD_BYTES of text or
    HELD_DOCUMENTS documents. `fraction` is the text bytes of `documents`, divided by the text bytes
    of all batches.
    """
    texts: list[str] = []
    conversations: list[Any] = []
    numbers: list[float] = []
    used_bytes = n_bytes = 0
    for more_texts, more_conversations, more_numbers in looks:
        n_bytes += sum(len(text.encode()) for text in more_texts)
        if used_bytes < HELD_BYTES and len(texts) < HELD_DOCUMENTS:
            texts += more_texts
            conversations += more_conversations
            numbers += more_numbers
            used_bytes = n_bytes
    return (texts, conversations, numbers), used_bytes / n_bytes if n_bytes else 1.0


def _texts_of(
    decode: Callable[[bytes], Outcome],
    lines: bytes,
    path: str,
    sampling: Sampling,
) -> tuple[Look, float]:
    """Decode at most the first HELD_DOCUMENTS of `lines`, and return (documents, fraction).

    `fraction` is the number of decoded bytes divided by the number of bytes in `lines`. The
    documents and rejects are counted in `sampling.tally`.
    """
    # Splitting at most HELD_DOCUMENTS times leaves the other lines in `other_lines`.
    *first_lines, other_lines = lines.removeprefix(BOM).split(b"\n", HELD_DOCUMENTS)
    share = 1 - len(other_lines) / len(lines) if len(first_lines) == HELD_DOCUMENTS else 1.0
    rejects: list[Reject] = []
    used_lines = first_lines if share < 1 else [*first_lines, other_lines]
    # The lines were cut out of a stream, so their positions are not known.
    unknown = [-1] * len(used_lines)
    look = _look_of(*_documents(decode, used_lines, sampling, rejects, unknown))
    documents = len(look[0]) + len(rejects)
    bad = sampling.tally.count(documents, rejects, path)
    sampling.tally.add_unit(documents, bad, documents, bad)
    return look, share


def _begin_of_stream(path: str, size: int, compression: str) -> tuple[bytes, float]:
    """Return (lines, stored): decompressed lines from the start of a file, and their size on disk.

    `stored` is the approximate number of compressed bytes that these lines take in the file.
    """
    blocks: list[bytes] = []
    n_bytes, fed, ends = 0, 0, False
    # A step starts with an empty block, which marks a safe place to stop.
    for block in decompressed(path, size, compression, _STEP_BYTES):
        if block.data:
            blocks.append(block.data)
            n_bytes, fed = n_bytes + len(block.data), min((block.label + 1) * _STEP_BYTES, size)
            ends |= b"\n" in block.data
        elif n_bytes >= MAX_LINE_BYTES or (ends and block.label * _STEP_BYTES >= PIECE_TEXT_BYTES):
            break
    else:
        return b"".join(blocks), size  # the whole file
    data = b"".join(blocks)
    # The last line may be incomplete. The bytes on disk shrink in proportion.
    lines = data[: data.rfind(b"\n") + 1]
    return lines, len(lines) * fed / max(n_bytes, 1)


_STEP_BYTES = 4 << 10  # Granularity of the mapping from stored bytes to decompressed blocks.


def _error_of_ratio(values: Sequence[float], looked_at: Sequence[float]) -> float:
    """Return the relative standard error of the ratio sum(values) / sum(looked_at).

    Each pair of `values` and `looked_at` belongs to one sampled split. The result is 0 for fewer
    than two splits.
    """
    if len(values) < 2 or not sum(values):
        return 0.0
    values_, stored = np.array(values, np.float64), np.array(looked_at, np.float64)
    # Residuals from the common ratio give the error, as usual for a ratio estimator.
    residuals = values_ - values_.sum() / stored.sum() * stored
    return float(np.sqrt((residuals**2).sum() / (len(values) * (len(values) - 1))) / values_.mean())


# The third part of this file samples token sources, which need no tokenizer to count tokens.


class _TokenPiece(NamedTuple):
    """Counts of documents that were read from a token source: from a whole split or its start."""

    held: float  # bytes that these documents take in the split
    ids: int  # number of token ids that were read
    lengths: list[np.ndarray]  # int64[n] per batch: content tokens of each document
    numbers: list[float]  # number of passes of each document
    documents: int
    is_whole: bool  # whether the whole split was read
    is_supervised: bool  # whether the weights differ between the tokens of a document
    in_lines: bool  # whether the split is part of a line file or a token stream


def look_at_tokens(sampling: Sampling, settings: DocumentKeys, vocabulary: Vocabulary) -> Looked:
    """Estimate the totals of a token source's files of one format.

    Precise mode reads some splits completely, about READ_BYTES in total. The quick mode reads the
    starts of at most PIECES splits. The size of a start in bytes is computed from the ids that were
    read, so that a few long documents do not bias the estimate.

    Args:
        sampling: The files to sample.
        settings: `[documents]` in the recipe.
        vocabulary: The vocabulary of the tokenizer.
    """
    source, pieces, precise = sampling.source, sampling.pieces, sampling.precise
    seconds_before, room = sampling.read_seconds, HELD_DOCUMENTS
    looks: list[_TokenPiece] = []
    for piece in _chosen(source, pieces, sampling.key, precise):
        # All splits together share the limit of documents in memory.
        looks.append(_read_tokens(sampling, settings, vocabulary, piece, room))
        room -= looks[-1].documents
    looked_at = [look.held for look in looks]
    # If each line, or document of a stream, is longer than a start, only whole splits contain one.
    if not precise and not any(looked_at) and looks and looks[-1].in_lines:
        return look_at_tokens(sampling._replace(precise=True), settings, vocabulary)
    is_all_read = len(looks) == len(pieces) and all(look.is_whole for look in looks)
    sampling.tally.is_whole &= is_all_read
    # The ids that were read represent the ids of all splits.
    stored_bytes, read_bytes = (
        held_by(source, pieces),
        [float(TOKEN_TEXT_BYTES * look.ids) for look in looks],
    )
    text_bytes = stored_bytes * sum(read_bytes) / sum(looked_at) if sum(looked_at) else 0.0
    scale = text_bytes / sum(read_bytes) if sum(read_bytes) else 1.0
    lengths = np.concatenate([np.zeros(0, np.int64), *(n for look in looks for n in look.lengths)])
    looked = Looked(
        held=stored_bytes,
        text_bytes=text_bytes,
        error=0.0,
        sizes=TOKEN_TEXT_BYTES * lengths,
        tokens=lengths.astype(float),
        weights=np.full(len(lengths), scale),
        supervised=any(look.is_supervised for look in looks),
        read_s=(sampling.read_seconds - seconds_before) * scale,
        numbers=(
            None
            if sampling.passes is None
            else np.array([r for look in looks for r in look.numbers])
        ),
    )
    error = 0.0 if is_all_read else looked.all_tokens * _error_of_ratio(read_bytes, looked_at)
    return looked._replace(error=error)


def _read_tokens(
    sampling: Sampling, settings: DocumentKeys, vocabulary: Vocabulary, piece: int, room: int
) -> _TokenPiece:
    """Read the start of a token source's split, or the whole split in precise mode.

    Args:
        sampling: The files to sample.
        settings: `[documents]` in the recipe.
        vocabulary: The vocabulary of the tokenizer.
        piece: Index of the split in the source.
        room: Maximum number of documents. If it is reached, further batches are ignored.
    """
    source, tally, passes = sampling.source, sampling.tally, sampling.passes
    # Positions of different splits may be equal, so forget the known numbers.
    if passes is not None:
        passes.known.clear()
    split = source.pieces.at(np.array([piece]))
    stored = max(1, int(split.bytes[0]))
    parts = _ALL if sampling.precise else _parts_of_begin(stored)
    position = position_of(*source.formats[int(split.file[0])])
    if position == "stream":  # at least one step of a compressed file
        parts = max(parts, -(-_ALL // -(-stored // source.step_bytes)))
    (work_range,) = source.slices_of(piece, 0, 0, parts, _ALL)
    ids = used = looked_at = bad = 0
    lengths, numbers, is_supervised = list[np.ndarray](), list[float](), False
    fields = Fields.of(source.source) if settings.loss_spans == "use" else None
    batches = read(work_range, source.source.text_key, passes, fields=fields)
    for batch in sampling.clock.steps("read", batches):
        if batch.tokens is None or used >= room:
            continue
        positions = batch.positions.tolist()
        numbers += [1.0 if passes is None else passes.known[position] for position in positions]
        # Stored ids determine the bytes of the start, and content tokens the length of a document.
        ids, used = ids + len(batch.tokens.ids), used + len(positions)
        taken = take_tokens(batch.tokens, settings, vocabulary)
        lengths.append(np.diff(taken.offsets))
        is_supervised |= _has_different_weights(batch)
        rejects = [Reject(0, positions[i], reason, detail) for i, reason, detail in taken.rejected]
        count = len(positions) + len(batch.rejects)
        looked_at += count
        bad += tally.count(count, [*batch.rejects, *rejects], work_range.path)
    tally.add_unit(looked_at, bad, looked_at, bad)
    is_whole = used < room and parts == _ALL
    stored_bytes = held_by(source, [piece])
    in_lines = position in ("byte", "stream")
    if not is_whole and passes is not None and not in_lines:
        stored_bytes *= parts / _ALL  # The ids of filtered documents are not known.
    elif not is_whole:
        stored_bytes = _held_by_tokens(source, piece, work_range, ids)
    return _TokenPiece(stored_bytes, ids, lengths, numbers, used, is_whole, is_supervised, in_lines)


def _has_different_weights(batch: Batch) -> bool:
    """Return whether the weights of some document's tokens differ.

    Such a document limits which of its tokens are trained.
    """
    if batch.tokens is None or batch.token_weights is None:
        return False
    lengths = np.diff(batch.tokens.offsets)
    document = np.repeat(np.arange(len(lengths)), lengths)
    is_change = np.diff(batch.token_weights) != 0
    return bool((is_change & (np.diff(document) == 0)).any())


def _held_by_tokens(source: PlannedSource, piece: int, work_range: Slice, tokens: int) -> float:
    """Return how many bytes the documents at the start of a split take.

    Args:
        source: The planned source.
        piece: Index of the split in the source.
        work_range: The start of the split, as a work range.
        tokens: Number of token ids that were read.
    """
    if FORMATS[work_range.format].json:
        return float(line_bytes(work_range))
    per_token = bytes_per_token(work_range, source.source.text_key)
    return tokens * per_token if per_token else held_by(source, [piece])
