"""Sample the documents of a source at random positions before a plan is made.

The positions are drawn from a key. Each sampled document has a weight: the number of documents that
it represents.

A document is sampled with a probability proportional to its bytes. It is the document at a position
that is drawn uniformly over all bytes. Its weight is the distance between two positions divided by
its bytes. So a few long documents do not bias the estimate, and a window is enough for a long
document.

    lines       windows across all files, some positions in each, the whole line around a position
    others      whole splits with evenly spaced positions; a quick sample reads a few starts
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from packprep.clock import Clock
from packprep.documents.reading import take_tokens
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
from packprep.sources.formats.batch import MAX_LINE_BYTES, Reject, Supervision, open_source
from packprep.sources.formats.compressed import decompressed, said_bytes
from packprep.sources.formats.fields import Fields
from packprep.sources.formats.jsonl import BOM, Outcome, line_bytes
from packprep.sources.slices import PlannedSource
from packprep.tokenizer.roles import Vocabulary

WINDOWS, WINDOW_BYTES, PLACES = 128, 32 << 10, 4
"""For line files: number of windows per round, bytes per window, positions per window."""
REMOTE_WINDOWS, REMOTE_WINDOW_BYTES, REMOTE_PLACES = 16, 128 << 10, 32
"""The same numbers for files at URLs, where the latency of a request dominates."""
ROUNDS, ENOUGH = 16, 0.0015
"""Maximum number of rounds in precise mode, and the relative error of the tokens that ends it."""
WHOLE_BYTES, PRECISE_WHOLE_BYTES = 1 << 20, 8 << 20
"""Up to this many stored bytes of files of one kind, every document is read.

The second number is for precise mode.
"""
PIECES, PIECE_TEXT_BYTES = 6, 256 << 10
"""For other files: number of splits (pieces) that are started, and stored bytes read from each."""
READ_BYTES = 128 << 20
"""Stored bytes of splits that precise mode reads whole, which takes a few seconds."""
SPACING = 2048
"""Target number of positions in the text that is read; four times as many in precise mode."""
HELD_BYTES, HELD_DOCUMENTS = 64 << 20, 1 << 20
"""Maximum text bytes and documents that one sample keeps in memory.

The rest is left out. 256 KiB of stored bytes may expand to any number of gigabytes.
"""


class Looked(NamedTuple):
    """The result of sampling the files of one kind. k documents were sampled."""

    held: float  # bytes that all their splits contain
    text_bytes: float  # text bytes of all their documents
    error: float  # standard error of their tokens
    sizes: np.ndarray  # int64[k]: text bytes
    tokens: np.ndarray  # float64[k]
    weights: np.ndarray  # float64[k]: number of documents that each one represents
    supervised: bool = False
    chat: bool = False
    read_s: float = 0.0  # estimated seconds on one core to read and render all of them

    @property
    def all_tokens(self) -> float:
        return float((self.weights * self.tokens).sum())


class Place(NamedTuple):
    """A sampled document and the position in it."""

    text: str
    conversation: Any
    at: float  # fraction of its bytes before the position; -1: all is used


Count = Callable[[Sequence[Place]], np.ndarray]
Supervise = Callable[[Batch], tuple[Batch, dict[int, Any]]]
"""A function that resolves supervision in a reader's batch.

It returns the batch with only texts, and the conversations of the supervised documents by number.
"""
Look = tuple[list[str], list[Any]]
"""Texts, and for each its conversation or None."""


def first_looks(
    source: PlannedSource,
    pieces: np.ndarray,
    kind: tuple[str, str],
    key: np.uint64,
    supervise: Supervise | None,
) -> Iterator[Look]:
    """Yield the first texts of the sample of splits of one kind, (format, compression).

    Uncompressed lines come window by window. If they are small, all lines are read.
    """
    if position_of(*kind) != "byte":
        for piece in _chosen(source, pieces, key, False):
            yield from _begin(source, piece, supervise).texts
        return
    starts, files = _starts_of(source, pieces)
    if int(starts[-1]) <= WHOLE_BYTES:
        for piece in pieces.tolist():
            yield from _read(source, source.slices_of(piece), supervise)
        return
    decode, last = (
        FORMATS[kind[0]].module.line_decoder(source.source.text_key, _fields(source, supervise)),
        _NO_LINE,
    )
    for lines in _windows(source, starts, files, key, 0):
        # A long line spans many windows.
        new = {line.begin: line for line, _ in lines if line[:2] != last[:2]}
        last = lines[-1][0]
        found = [_document(decode, line.data, supervise) for line in new.values()]
        yield _texts_and_conversations(found)


def _chosen(source: PlannedSource, pieces: np.ndarray, key: np.uint64, whole: bool) -> list[int]:
    """Return PIECES splits in keyed order, or up to READ_BYTES on disk with `whole`."""
    if not len(pieces):
        return []
    count = len(pieces) if whole else min(PIECES, len(pieces))
    chosen = pieces[permute(np.arange(count), len(pieces), key)].astype(np.int64)
    if whole:
        ends = np.cumsum(source.pieces.at(chosen).bytes)
        chosen = chosen[: int(np.searchsorted(ends, READ_BYTES)) + 1]
    found: list[int] = chosen.tolist()
    return found


# The first part samples uncompressed lines at positions across all files.


def look_at_lines(
    source: PlannedSource,
    pieces: np.ndarray,
    format: str,
    key: np.uint64,
    supervise: Supervise | None,
    count: Count,
    precise: bool,
    clock: Clock,
    tally: Tally,
) -> Looked:
    """Estimate the totals of uncompressed line files from positions in windows across all files.

    Precise mode adds windows until the error of the token count is small. Small files are read
    completely. Precise mode also reads larger files completely if that takes a few seconds.

    Args:
        source: The planned source.
        pieces: Numbers of the splits.
        format: The format of the files.
        key: Random key of the sample.
        supervise: Resolves supervision, or None.
        count: Counts the tokens of sampled documents.
        precise: Whether to sample until the error is small.
        clock: Receives the seconds of the stage "read".
        tally: Receives the counts of bad documents.
    """
    starts, files = _starts_of(source, pieces)
    held = int(starts[-1])
    if held <= (READ_BYTES if precise else WHOLE_BYTES):
        return look_at_pieces(
            source, pieces, False, key, supervise, count, precise, True, clock, tally
        )
    tally.is_whole = False
    decode = FORMATS[format].module.line_decoder(source.source.text_key, _fields(source, supervise))
    rates: list[float] = []  # tokens per byte, by window
    documents: list[tuple[int, float, float]] = []  # text bytes, tokens, bytes of the line
    text_rates: list[float] = []
    read_rates: list[float] = []  # seconds per byte
    supervised = chat = False
    looked_at, last, document, bad, read_s = 0, _NO_LINE, None, 0, 0.0
    for round_ in range(ROUNDS if precise else 1):
        for lines in _windows(source, starts, files, key, round_):
            found: list[tuple[str, Any] | None] = []
            seconds: list[float] = []
            stand_for, of_window, bad_places = 0.0, 0.0, 0
            for line, _ in lines:
                if line is not last:
                    rejects: list[Reject] = []
                    before = clock.seconds.get("read", 0.0)
                    with clock.stage("read"):
                        last, document = (
                            line,
                            _document(decode, line.data, supervise, rejects, line.begin),
                        )
                    read_s = clock.seconds["read"] - before
                    looked_at += len(line.data)
                    bad = tally.count(
                        int(document is not None or bool(rejects)), rejects, line.path
                    )
                found.append(document)
                seconds.append(read_s)
                bad_places += bad
                stand_for += (document is not None or bad) / (len(line.data) + 1)
                of_window += bad / (len(line.data) + 1)
            tally.add_unit(len(lines), bad_places, stand_for, of_window)
            whole = [document or ("", None) for document in found]
            places_ = [
                Place(text, conversation, at)
                for (text, conversation), (_, at) in zip(whole, lines, strict=True)
            ]
            supervised |= any(_is_limited(place.conversation) for place in places_)
            chat |= any(
                place.conversation is not None and place.conversation.chat for place in places_
            )
            tokens = count(places_)
            sizes = [_size(place.text, place.conversation) for place in places_]
            stored = np.array([len(line.data) + 1.0 for line, _ in lines])
            rates.append(float((tokens / stored).mean()))
            text_rates.append(float((sizes / stored).mean()))
            read_rates.append(float((np.array(seconds) / stored).mean()))
            documents += [
                (size, float(n), float(line_bytes))
                for size, n, line_bytes, document in zip(sizes, tokens, stored, found, strict=True)
                if document is not None
            ]
            if looked_at > READ_BYTES and len(rates) > 1:
                break
        error = float(np.std(rates, ddof=1)) / math.sqrt(len(rates))
        if error <= ENOUGH * float(np.mean(rates)) or looked_at > READ_BYTES:
            break
    places = len(rates) * len(lines)
    sizes_, tokens_, stored_ = np.array(documents, np.float64).reshape(-1, 3).T
    weights = held / places / stored_
    text_bytes, read_all_s = (held * float(np.mean(rates_)) for rates_ in (text_rates, read_rates))
    return Looked(
        held, text_bytes, held * error, sizes_, tokens_, weights, supervised, chat, read_all_s
    )


def _document(
    decode: Callable[[bytes], Outcome],
    line: bytes,
    supervise: Supervise | None,
    rejects: list[Reject] | None = None,
    position: int = -1,
) -> tuple[str, Any] | None:
    """Return the text of a line and its conversation, or None if it is blank, bad or too large.

    The conversation of an unsupervised line is None. A bad line is appended to `rejects` if it is
    given.
    """
    outcome = decode(line) if line and len(line) <= MAX_LINE_BYTES and not line.isspace() else None
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


def _is_limited(conversation: Any) -> bool:
    """Return whether a document says which part is trained, which limits the tasks it may draw."""
    return conversation is not None and conversation.limited


def _texts_and_conversations(found: Sequence[tuple[str, Any] | None]) -> Look:
    there = [document for document in found if document is not None]
    return [text for text, _ in there], [conversation for _, conversation in there]


def _starts_of(source: PlannedSource, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where the files of these splits start in their concatenation, and their numbers.

    The starts are int64[F + 1] and include the end of the last file. The numbers are int64[F].
    """
    files = np.unique(source.pieces.at(pieces).file) if len(pieces) else np.zeros(0, np.int64)
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(source.files.sizes[files]))), files


class _Line(NamedTuple):
    """The line of a file from `begin` to `end`.

    A line beyond MAX_LINE_BYTES has only the data around a position.
    """

    path: str
    begin: int
    end: int
    data: bytes


_NO_LINE = _Line("", 0, 0, b"")


def _windows(
    source: PlannedSource, starts: np.ndarray, files: np.ndarray, key: np.uint64, round_: int
) -> Iterator[list[tuple[_Line, float]]]:
    """Yield the lines at the positions of each window of a round, as `_lines_at` returns them.

    Windows are spaced evenly, and each is shifted by a random offset from the key.
    """
    # This does not depend on where the files are now, because the sample belongs to the plan.
    remote = source.planned_at_url
    windows, n_bytes, places = (
        (REMOTE_WINDOWS, REMOTE_WINDOW_BYTES, REMOTE_PLACES)
        if remote
        else (WINDOWS, WINDOW_BYTES, PLACES)
    )
    shifts = uniforms(key, CALIBRATION, round_ * windows + np.arange(windows))
    at = ((np.arange(windows) + shifts) * (int(starts[-1]) / windows)).astype(np.int64)

    def lines_of(place: int, last: _Line = _NO_LINE) -> list[tuple[_Line, float]]:
        number = int(np.searchsorted(starts, place, "right")) - 1
        i, first = int(files[number]), place - int(starts[number])
        size = int(source.files.sizes[i])
        wanted = [(first + k * n_bytes // places) % size for k in range(places)]
        return _lines_at(os.path.join(source.prefix, source.files.names[i]), size, wanted, last)

    if remote:
        with ThreadPoolExecutor(REMOTE_WINDOWS) as threads:
            yield from threads.map(lines_of, at.tolist())
        return
    last = _NO_LINE
    for place in at.tolist():
        lines = lines_of(place, last)
        last = lines[-1][0]
        yield lines


_BACK = 16 << 10  # Bytes read before a position at first. Most lines start within them.


def _lines_at(
    path: str, size: int, places: Sequence[int], last: _Line
) -> list[tuple[_Line, float]]:
    """Return (line, fraction of it before the position) for each position.

    The line is the whole line around the byte, without its end.

    Args:
        path: The file.
        size: Its size in bytes.
        places: The byte positions.
        last: The last line that was found. It is not searched for again.
    """
    lines: list[tuple[_Line, float]] = []
    with open_source(path, size) as file:
        for place in places:
            if last.path != path or not last.begin <= place < last.end:
                last = _line_at(file, path, size, place)
            lines.append((last, min((place - last.begin) / max(len(last.data), 1), 1.0)))
    return lines


def _line_at(file: BinaryIO, path: str, size: int, place: int) -> _Line:
    back = _BACK
    while True:
        begin = max(place - back, 0)
        file.seek(begin)
        data = file.read(place - begin + WINDOW_BYTES)
        first = data.rfind(b"\n", 0, place - begin) + 1
        if first or not begin or back > MAX_LINE_BYTES:
            break
        back *= 4
    end = data.find(b"\n", place - begin)
    if end < 0 and begin + len(data) < size:
        data += file.readline(MAX_LINE_BYTES)
        end = data.find(b"\n", place - begin)
    end = end if end >= 0 else len(data)
    line = data[first:end]
    return _Line(
        path, begin + first, begin + end + 1, line.removeprefix(BOM) if begin + first == 0 else line
    )


# The second part samples all other texts. It reads splits whole, or only their starts.


class _Piece(NamedTuple):
    """A split that is sampled, or its start."""

    held: float  # bytes that the sampled part contains
    whole: bool
    texts: Iterator[Look]


def _at_places(
    looks: Sequence[_Piece], distance: float, count: Count, clock: Clock
) -> tuple[Looked, list[int]]:
    """Sample the texts of splits at positions that are `distance` bytes apart.

    With a distance of 0, use all documents. Return the result and the text bytes of each split. The
    result covers only the text that was read. Its error is the sampling error, relative to the
    tokens.
    """
    # Each tuple has the sizes, the tokens and the weights.
    found = [(np.zeros(0, np.int64), np.zeros(0), np.zeros(0))]
    # This document represents all if the text is too short to contain a position.
    first: Place | None = None
    supervised = chat = False
    text_bytes, all_bytes, next_place = [0] * len(looks), 0, distance / 2
    for k, look in enumerate(looks):
        for texts, conversations in clock.steps("read", look.texts):
            supervised |= any(map(_is_limited, conversations))
            chat |= any(
                conversation is not None and conversation.chat for conversation in conversations
            )
            sizes = np.array([*map(_size, texts, conversations)], np.int64)
            if first is None and sizes.any():
                longest = int(sizes.argmax())
                first = Place(texts[longest], conversations[longest], -1.0)
            ends = all_bytes + np.cumsum(sizes)
            text_bytes[k] += int(sizes.sum())
            all_bytes += int(sizes.sum())
            here, at, stand_for = (
                np.arange(len(texts)),
                np.full(len(texts), -1.0),
                np.ones(len(texts)),
            )
            if distance:
                places = np.arange(next_place, all_bytes, distance)
                next_place += len(places) * distance
                here = np.searchsorted(ends, places, "right")
                at = 1 - (ends[here] - places) / sizes[here]
                stand_for = distance / sizes[here]
            if len(here):
                tokens = count(
                    [
                        Place(texts[i], conversations[i], part)
                        for i, part in zip(here, at, strict=True)
                    ]
                )
                found.append((sizes[here], tokens, stand_for))
    if first is not None and len(found) == 1:
        size = np.array([_size(first.text, first.conversation)], np.int64)
        found.append((size, count([first]), all_bytes / size))
    sizes, tokens, weights = (np.concatenate(column) for column in zip(*found, strict=True))
    error = 0.0
    if distance and all_bytes:
        at_places = weights * sizes
        rates = tokens / np.maximum(sizes, 1)
        mean = float(np.average(rates, weights=at_places))
        variance = float(np.average((rates - mean) ** 2, weights=at_places)) * distance / all_bytes
        error = math.sqrt(variance) / mean if mean else 0.0
    return Looked(0.0, all_bytes, error, sizes, tokens, weights, supervised, chat), text_bytes


def _fields(source: PlannedSource, supervise: Supervise | None) -> Fields | None:
    """Return the fields to read in addition to the text, or None without supervision."""
    return Fields.of(source.source, source.kinds) if supervise is not None else None


def _size(text: str, conversation: Any) -> int:
    """Return the bytes of a document. A media position counts as TOKEN_TEXT_BYTES."""
    slots = conversation.slots if conversation is not None else 0
    return len(text.encode()) + TOKEN_TEXT_BYTES * slots


def _read(
    source: PlannedSource,
    parts: Iterable[Slice],
    supervise: Supervise | None,
    tally: Tally | None = None,
) -> Iterator[Look]:
    documents = bad = 0
    for part in parts:
        for batch in read(part, source.source.text_key, fields=_fields(source, supervise)):
            batch, conversations = supervise(batch) if supervise else (batch, {})
            if tally is not None:
                of_batch = len(batch.texts) + len(batch.rejects)
                documents, bad = (
                    documents + of_batch,
                    bad + tally.count(of_batch, batch.rejects, part.path),
                )
            yield batch.texts, [conversations.get(i) for i in range(len(batch.texts))]
    if tally is not None:
        tally.add_unit(documents, bad, documents, bad)


def look_at_pieces(
    source: PlannedSource,
    pieces: np.ndarray,
    compressed: bool,
    key: np.uint64,
    supervise: Supervise | None,
    count: Count,
    precise: bool,
    whole: bool,
    clock: Clock,
    tally: Tally,
) -> Looked:
    """Estimate the totals of files of one kind from splits, or from the starts of a few.

    Args:
        source: The planned source.
        pieces: Numbers of the splits.
        compressed: Whether they are compressed line files.
        key: Random key of the sample.
        supervise: Resolves supervision, or None.
        count: Counts the tokens of sampled documents.
        precise: Whether to use more positions and record the sizes of compressed files.
        whole: Whether to read whole splits, for a few seconds at most.
        clock: Receives the seconds of the stage "read".
        tally: Receives the counts of bad documents.
    """
    chosen = _chosen(source, pieces, key, whole)
    before = clock.seconds.get("read", 0.0)
    if whole:
        looks = [
            _Piece(
                held_by(source, [piece]),
                True,
                _read(source, source.slices_of(piece), supervise, tally),
            )
            for piece in chosen
        ]
    else:
        with clock.stage("read"):
            looks = [_begin(source, piece, supervise, tally) for piece in chosen]
    # Text is assumed to be four times as large as its compressed form.
    expected = sum(look.held for look in looks) * (4 if compressed else 1)
    few = expected <= (PRECISE_WHOLE_BYTES if precise else WHOLE_BYTES)
    found, text_bytes = _at_places(
        looks, 0.0 if few else expected / (4 * SPACING if precise else SPACING), count, clock
    )
    noted = compressed and precise and len(pieces) > 0
    looked_at = _note(source, pieces, key, text_bytes) if noted else [look.held for look in looks]
    held, of_all, error = held_by(source, pieces), found.text_bytes, found.error
    if len(looks) < len(pieces) or not all(look.whole for look in looks):
        tally.is_whole = False
        of_all = held if noted else held * sum(text_bytes) / max(sum(looked_at), 1.0)
        error = math.hypot(_error_of_ratio(text_bytes, looked_at), error)
    part = of_all / found.text_bytes if found.text_bytes else 1.0
    read_s = (clock.seconds.get("read", 0.0) - before) * part
    found = found._replace(
        held=held, text_bytes=of_all, weights=found.weights * part, read_s=read_s
    )
    return found._replace(error=error * found.all_tokens)


def held_by(source: PlannedSource, pieces: Sequence[int] | np.ndarray) -> float:
    """Return the bytes that some splits contain."""
    found = source.pieces.at(np.asarray(pieces, np.int64))
    return float(source.files.held(found.file, found.part, found.bytes).sum())


def _note(
    source: PlannedSource, pieces: np.ndarray, key: np.uint64, text_bytes: Sequence[int]
) -> list[float]:
    """Record the text bytes of compressed files in `source.files`.

    Files that were read, the first in keyed order, get their measured size. The others get an
    estimate from their headers or trailers, or from their bytes on disk. Return the same estimate
    for the files that were read.
    """
    ordered = pieces[permute(np.arange(len(pieces)), len(pieces), key)].astype(np.int64)
    in_order: list[int] = source.pieces.at(ordered).file.tolist()
    expansion = sum(text_bytes) / max(
        1, sum(int(source.files.sizes[i]) for i in in_order[: len(text_bytes)])
    )
    said = []
    for i in in_order if len(in_order) > len(text_bytes) else ():
        path, size = os.path.join(source.prefix, source.files.names[i]), int(source.files.sizes[i])
        said.append(
            said_bytes(path, size, source.formats[i][1], size * expansion) or size * expansion
        )
    of_text = sum(text_bytes) / max(1.0, sum(said[: len(text_bytes)])) if said else 1.0
    for k, i in enumerate(in_order):
        source.files.note(i, [text_bytes[k] if k < len(text_bytes) else round(said[k] * of_text)])
    return [of_text * n_bytes for n_bytes in said[: len(text_bytes)]]


def _begin(
    source: PlannedSource, piece: int, supervise: Supervise | None, tally: Tally | None = None
) -> _Piece:
    """Return the start of a split: PIECE_TEXT_BYTES of it on disk, or all of it."""
    found = source.pieces.at(np.array([piece]))
    stored, i = max(1, int(found.bytes[0])), int(found.file[0])
    format, compression = source.formats[i]
    if position_of(format, compression) == "stream":
        path = os.path.join(source.prefix, source.files.names[i])
        lines, looked = _begin_of_stream(path, int(source.files.sizes[i]), compression)
        decode = FORMATS[format].module.line_decoder(
            source.source.text_key, _fields(source, supervise)
        )
        texts, share = _texts_of(decode, lines, supervise, path, tally)
        return _Piece(looked * share, looked >= stored and share == 1.0, iter([texts]))
    weight = 1 << 20
    hi = weight if stored <= PIECE_TEXT_BYTES else max(1, -(-PIECE_TEXT_BYTES * weight // stored))
    parts = list(source.slices_of(piece, 0, 0, hi, weight))
    held = held_by(source, [piece]) * hi / weight
    if position_of(format, compression) == "whole":  # These splits are whole files.
        held = float(sum(part.size for part in parts))
    texts_, share = _some(_read(source, parts, supervise, tally))
    return _Piece(held * share, hi == weight and share == 1.0, iter([texts_]))


def _some(found: Iterator[Look]) -> tuple[Look, float]:
    """Return the first texts and their fraction of all bytes.

    There are at most about HELD_BYTES and HELD_DOCUMENTS of them.
    """
    texts: list[str] = []
    conversations: list[Any] = []
    held = n_bytes = 0
    for some, of_some in found:
        n_bytes += sum(len(text.encode()) for text in some)
        if held < HELD_BYTES and len(texts) < HELD_DOCUMENTS:
            texts += some
            conversations += of_some
            held = n_bytes
    return (texts, conversations), held / n_bytes if n_bytes else 1.0


def _texts_of(
    decode: Callable[[bytes], Outcome],
    lines: bytes,
    supervise: Supervise | None,
    path: str,
    tally: Tally | None,
) -> tuple[Look, float]:
    """Return the texts of whole lines, at most HELD_DOCUMENTS, and their fraction of the bytes."""
    *some, rest = lines.removeprefix(BOM).split(b"\n", HELD_DOCUMENTS)
    share = 1 - len(rest) / len(lines) if len(some) == HELD_DOCUMENTS else 1.0
    rejects: list[Reject] = []
    own = some if share < 1 else [*some, rest]
    found = [_document(decode, line, supervise, rejects) for line in own]
    texts, conversations = _texts_and_conversations(found)
    if tally is not None:
        documents = len(texts) + len(rejects)
        bad = tally.count(documents, rejects, path)
        tally.add_unit(documents, bad, documents, bad)
    return (texts, conversations), share


def _begin_of_stream(path: str, size: int, compression: str) -> tuple[bytes, float]:
    """Return whole lines from the start of a compressed file, and the bytes they take on disk."""
    blocks: list[bytes] = []
    n_bytes, fed, ends = 0, 0, False
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
    lines = data[: data.rfind(b"\n") + 1]
    return lines, len(lines) * fed / max(n_bytes, 1)


_STEP_BYTES = 4 << 10  # Granularity of the mapping from stored bytes to decompressed blocks.


def _error_of_ratio(values: Sequence[float], looked_at: Sequence[float]) -> float:
    """Return the relative standard error of a ratio of sums, or 0 for fewer than two values."""
    if len(values) < 2 or not sum(values):
        return 0.0
    values_, stored = np.array(values, np.float64), np.array(looked_at, np.float64)
    residuals = values_ - values_.sum() / stored.sum() * stored
    return float(np.sqrt((residuals**2).sum() / (len(values) * (len(values) - 1))) / values_.mean())


# The third part samples tokens, whose lengths can be read directly.


def look_at_tokens(
    source: PlannedSource,
    pieces: np.ndarray,
    key: np.uint64,
    settings: DocumentKeys,
    vocabulary: Vocabulary,
    precise: bool,
    clock: Clock,
    tally: Tally,
) -> Looked:
    """Estimate the totals of files of tokens from some splits, or from the starts of a few.

    The size of a start is computed from the ids that were read, so that a few long documents do not
    bias the estimate.

    Args:
        source: The planned source.
        pieces: Numbers of the splits.
        key: Random key of the sample.
        settings: `[documents]` in the recipe.
        vocabulary: The vocabulary of the tokenizer.
        precise: Whether to read whole splits, for a few seconds at most.
        clock: Receives the seconds of the stage "read".
        tally: Receives the counts of bad documents.
    """
    looked_at: list[float] = []
    n_read: list[float] = []
    lengths: list[np.ndarray] = []
    whole, documents, supervised, in_lines = True, 0, False, False
    before = clock.seconds.get("read", 0.0)
    for piece in _chosen(source, pieces, key, precise):
        found = source.pieces.at(np.array([piece]))
        stored, weight = max(1, int(found.bytes[0])), 1 << 20
        hi = (
            weight
            if precise or stored <= PIECE_TEXT_BYTES
            else max(1, -(-PIECE_TEXT_BYTES * weight // stored))
        )
        position = position_of(*source.formats[int(found.file[0])])
        in_lines = position in ("byte", "stream")
        if position == "stream":  # at least one step of a compressed file
            hi = max(hi, -(-weight // -(-stored // source.step_bytes)))
        (part,) = source.slices_of(piece, 0, 0, hi, weight)
        count = of_piece = bad = 0
        fields = Fields.of(source.source) if settings.loss_spans == "use" else None
        for batch in clock.steps("read", read(part, source.source.text_key, fields=fields)):
            if batch.tokens is not None and documents < HELD_DOCUMENTS:
                count, documents = count + len(batch.tokens.ids), documents + len(batch.positions)
                taken = take_tokens(batch.tokens, settings, vocabulary)
                if batch.token_weights is not None:
                    lengths_of = np.diff(batch.tokens.offsets)
                    document = np.repeat(np.arange(len(lengths_of)), lengths_of)
                    is_change = np.diff(batch.token_weights) != 0
                    supervised |= bool((is_change & (np.diff(document) == 0)).any())
                lengths.append(np.diff(taken.offsets))
                positions = batch.positions.tolist()
                own = [
                    Reject(0, positions[i], reason, detail) for i, reason, detail in taken.rejected
                ]
                of_batch = len(positions) + len(batch.rejects)
                of_piece, bad = (
                    of_piece + of_batch,
                    bad + tally.count(of_batch, [*batch.rejects, *own], part.path),
                )
        tally.add_unit(of_piece, bad, of_piece, bad)
        all_of_it = documents < HELD_DOCUMENTS and hi == weight
        looked_at.append(
            held_by(source, [piece]) if all_of_it else _held_by_tokens(source, piece, part, count)
        )
        n_read.append(float(TOKEN_TEXT_BYTES * count))
        whole &= all_of_it
    if in_lines and not precise and not any(looked_at):  # each line is longer than a begin
        return look_at_tokens(source, pieces, key, settings, vocabulary, True, clock, tally)
    held = held_by(source, pieces)
    all_read = whole and len(looked_at) == len(pieces)
    tally.is_whole &= all_read
    text_bytes = held * sum(n_read) / sum(looked_at) if sum(looked_at) else 0.0
    found_lengths = np.concatenate([np.zeros(0, np.int64), *lengths])
    stand_for = text_bytes / sum(n_read) if sum(n_read) else 1.0
    weights, read_s = (
        np.full(len(found_lengths), stand_for),
        (clock.seconds.get("read", 0.0) - before) * stand_for,
    )
    looked = Looked(
        held,
        text_bytes,
        0.0,
        TOKEN_TEXT_BYTES * found_lengths,
        found_lengths.astype(float),
        weights,
    )
    looked = looked._replace(read_s=read_s, supervised=supervised)
    return looked._replace(
        error=0.0 if all_read else looked.all_tokens * _error_of_ratio(n_read, looked_at)
    )


def _held_by_tokens(source: PlannedSource, piece: int, part: Slice, tokens: int) -> float:
    """Return the bytes that a part of a piece holds for the tokens that were read of it."""
    if position_of(part.format, part.compression) in ("byte", "stream"):
        return float(line_bytes(part))
    per_token = bytes_per_token(part, source.source.text_key)
    return tokens * per_token if per_token else held_by(source, [piece])
