"""What a keyed sample of a source tells: text bytes per stored byte, tokens per text byte, documents' mean length.

The sample is some places of each format, chosen by keys: a few whole lines from any place of a line file, the begin of a
compressed file, of a row group or batch, a few text files. What is compared is the text of whole lines with the bytes of the
same lines, so that a few long documents, of which it is chance how many begin somewhere, do not mislead. The figures are
stored in the plan and only ever used as estimates: no document depends on them but through the number of shards and `share`.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from packprep.corpus.conversations import Marked, MarkReader
from packprep.corpus.engines.engine import Engine
from packprep.corpus.planning import Extent, PlannedSource, format_name
from packprep.corpus.readers import (
    MAX_DOCUMENT_BYTES,
    PIECE_BYTES,
    TOKEN_FORMATS,
    TOKEN_TEXT_BYTES,
    Part,
    bytes_per_token,
    read,
)
from packprep.corpus.readers.documents import open_source
from packprep.corpus.readers.json_lines import Outcome, line_decoder
from packprep.corpus.readers.lines import BOM
from packprep.corpus.readers.streams import decompressed
from packprep.corpus.token_documents import take_tokens
from packprep.corpus.training import tokenize_marked
from packprep.corpus.vocabulary import Vocabulary
from packprep.randomness import CALIBRATION, bits64, permute, text_key, uniforms
from packprep.recipe import Documents

PIECES = 6
PIECE_TEXT_BYTES = 256 << 10
PLACES = 12  # of line files
PLACE_BYTES = 128 << 10  # looked at from a place on, and one line at least
TOKENIZED_CHARACTERS = 64 << 10  # of each text: how many tokens a byte makes hardly changes on
FIRST_CHARACTERS = 128 << 10
HELD_BYTES, HELD_DOCUMENTS = 64 << 20, 1 << 20
"""Of a look, what is held; the rest is left out of it: 256 KiB of stored bytes may hold any number of gigabytes."""
MAX_RATIO = 1 << 24  # per 1024


@dataclass(frozen=True)
class Estimates:
    """Figures of one source. Ratios: text bytes per 1024 stored bytes, by format."""

    ratios: dict[str, int]
    tokens_per_byte: float
    document_bytes: float
    spread: float  # of document sizes: the mean of their squares over the square of their mean
    supervised: bool  # whether a document had loss_spans or messages
    chat: bool  # whether one had messages
    relative_error: float  # standard error of the estimated tokens of all documents, as a part of them

    def error_of(self, kept: float, repeat: float, documents: float) -> float:
        """The same of the tokens that are used: chance also decides which documents those are.

        kept: width of `sample`. documents: how many it keeps, each of which is used ⌊repeat⌋ times or once more.
        A sum of n independent terms, each size s with probability p, has the variance p (1 − p) Σ s².
        """
        once_more = repeat % 1
        chance = (1 - kept) + once_more * (1 - once_more) / repeat**2
        return math.hypot(self.relative_error, math.sqrt(self.spread * chance / max(documents, 1.0)))


def calibrate(
    source: PlannedSource, engine: Engine, vocabulary: Vocabulary, settings: Documents, marks: MarkReader | None = None
) -> Estimates:
    """Estimates of a source whose ratios are not known yet (`source.ratios` is not read).

    settings: the recipe's. marks: as in `readers.read`
    """
    ratios: dict[str, int] = {}
    seen: list[_Seen] = []
    for kind, of_tokens, own, key in _kinds(source):
        before = len(seen)
        if of_tokens:
            seen += _token_looks(source, own, key, settings, vocabulary)
        else:
            looks = _looks(source, own, key, marks)
            seen += (_tokenized(look, engine, vocabulary, settings.special_text) for look in looks)
        stored_seen, text_seen = (sum(look[i] for look in seen[before:]) for i in (0, 1))
        ratio = round(1024 * text_seen / stored_seen) if stored_seen and text_seen else 1024
        # A piece's weight, its bytes times the ratio, is to stay far below 2⁶³.
        most = min(MAX_RATIO, max(1 << 20, (1 << 56) // int(source.files.sizes.max(initial=1))))
        ratios[kind] = min(max(ratio, 1), most)
    text_bytes, documents = sum(look.text_bytes for look in seen), sum(look.documents for look in seen)
    return Estimates(
        ratios,
        sum(look.tokens for look in seen) / text_bytes if text_bytes else 1.0,
        text_bytes / documents if documents else 0.0,
        documents * sum(look.squares for look in seen) / text_bytes**2 if text_bytes else 1.0,
        any(look.supervised for look in seen),
        any(look.chat for look in seen),
        _relative_error([(look.tokens, look.stored) for look in seen]),
    )


def first_texts(source: PlannedSource, marks: MarkReader | None = None) -> Iterator[str]:
    """The first texts of what `calibrate` looks at, cut to FIRST_CHARACTERS together."""
    room = FIRST_CHARACTERS
    for _, of_tokens, own, key in _kinds(source):
        for look in () if of_tokens else _looks(source, own, key, marks):
            for text in look[1]:
                yield text[:room]
                room -= len(text)
                if room <= 0:
                    return


def _kinds(source: PlannedSource) -> Iterator[tuple[str, bool, np.ndarray, np.uint64]]:
    """(name, whether it is one of tokens, the pieces, the key of the sample) of each format of a source's files."""
    kinds = [format_name(*kind) for kind in source.files.kinds]
    for name in sorted(kinds):
        kind = kinds.index(name)
        key = bits64(text_key(source.seed, source.name, name), CALIBRATION)
        yield name, source.files.kinds[kind][0] in TOKEN_FORMATS, source.pieces_of_kind(kind), key


class _Seen(NamedTuple):
    """What one look came to."""

    stored: float  # bytes on disk
    text_bytes: int
    tokens: float
    documents: int
    squares: float  # of the documents' text bytes, summed
    supervised: bool = False
    chat: bool = False


def _tokenized(look: "_Look", engine: Engine, vocabulary: Vocabulary, special_text: str) -> _Seen:
    stored, texts, marked = look
    sizes = [len(text.encode()) for text in texts]
    n_bytes = sum(sizes)
    begins = [text if mark else text[:TOKENIZED_CHARACTERS] for text, mark in zip(texts, marked, strict=True)]
    of_texts, _ = tokenize_marked(engine, begins, marked, special_text, vocabulary)
    begun = sum(len(text.encode()) for text in begins)
    n_tokens = int(of_texts.offsets[-1]) * n_bytes / max(begun, 1)
    marks = [mark for mark in marked if mark is not None]
    squares = sum(float(size) ** 2 for size in sizes)
    return _Seen(stored, n_bytes, n_tokens, len(texts), squares, bool(marks), any(mark.chat for mark in marks))


def _token_looks(
    source: PlannedSource, pieces: np.ndarray, key: np.uint64, settings: Documents, vocabulary: Vocabulary
) -> Iterator[_Seen]:
    """Some of the `pieces`, all of one format of tokens.

    The stored bytes are those of the ids that are read, so that a few long documents do not mislead.
    """
    chosen = _chosen(pieces, PIECES, key)
    for piece in chosen.tolist():
        parts, looked = _begin(source, piece)
        n_read, n_tokens, n_documents, squares = 0, 0, 0, 0.0
        for part in parts:
            for batch in read(part, source.source.text_key):
                if batch.tokens is not None and n_documents < HELD_DOCUMENTS:
                    n_read, n_documents = n_read + len(batch.tokens.ids), n_documents + len(batch.positions)
                    n_tokens += len(take_tokens(batch.tokens, settings, vocabulary).ids)
                    squares += float((np.diff(batch.tokens.offsets).astype(np.float64) ** 2).sum())
        if (of_file := bytes_per_token(parts[0], source.source.text_key)) and n_read:
            looked = n_read * of_file
        yield _Seen(looked, TOKEN_TEXT_BYTES * n_read, n_tokens, n_documents, TOKEN_TEXT_BYTES**2 * squares)


def _chosen(pieces: np.ndarray, count: int, key: np.uint64) -> np.ndarray:
    """`count` of the pieces, or all, by the key."""
    return pieces[permute(np.arange(min(count, len(pieces))), len(pieces), key)] if len(pieces) else pieces


_Look = tuple[float, list[str], list[Marked | None]]


def _looks(source: PlannedSource, pieces: np.ndarray, key: np.uint64, marks: MarkReader | None) -> Iterator[_Look]:
    """(stored bytes looked at, the texts of these, what they say of their training) of some of the `pieces`, all of a kind."""
    chosen = _chosen(pieces, PLACES, key)
    if not len(chosen):
        return
    first = int(source.pieces.at(chosen[:1]).file[0])
    format, compression = source.formats[first]
    if format != "jsonl":
        yield from (_begin_of_piece(source, int(piece), marks) for piece in chosen[:PIECES])
        return
    decode = line_decoder(source.source.text_key, marks)
    if compression:
        for piece in chosen[:PIECES].tolist():
            i = int(source.pieces.at(np.array([piece])).file[0])
            path = os.path.join(source.prefix, source.files.names[i])
            yield _texts_of(decode, *_begin_of_stream(path, int(source.files.sizes[i]), compression))
        return
    seen = 0.0
    for k in range(PLACES):
        piece = int(chosen[k % len(chosen)])
        found = source.pieces.at(np.array([piece]))
        i, size = int(found.file[0]), int(found.bytes[0])
        begin = int(found.part[0]) * PIECE_BYTES
        whole = size <= PLACE_BYTES  # then looked at from its begin, once
        if k >= len(chosen) and (whole or seen > PLACES * PLACE_BYTES):
            continue
        place = begin + (0 if whole else int(float(uniforms(key, CALIBRATION, k)) * size))
        path = os.path.join(source.prefix, source.files.names[i])
        look = _texts_of(decode, *_lines_from(path, int(source.files.sizes[i]), place))
        seen += look[0]
        yield look


def _texts_of(decode: Callable[[bytes], Outcome], lines: bytes, stored: float) -> _Look:
    """The look of whole lines that take `stored` bytes on disk."""
    texts: list[str] = []
    marked: list[Marked | None] = []
    *some, rest = lines.removeprefix(BOM).split(b"\n", HELD_DOCUMENTS)
    if len(some) == HELD_DOCUMENTS:
        stored *= 1 - len(rest) / len(lines)
    else:
        some.append(rest)
    for line in some:
        outcome = decode(line) if line and not line.isspace() else None
        if isinstance(outcome, str):
            texts.append(outcome)
            marked.append(None)
        elif isinstance(outcome, Marked):
            texts.append(outcome.text)
            marked.append(outcome)
    return stored, texts, marked


def _lines_from(path: str, size: int, place: int) -> tuple[bytes, float]:
    """(whole lines that begin at `place` or behind, their bytes): PLACE_BYTES of them or one; b"" where there is none."""
    with open_source(path, size) as file:
        file.seek(max(place - 1, 0))
        begin = 0 if not place else len(file.readline(MAX_DOCUMENT_BYTES)) + place - 1
        file.seek(begin)
        lines = file.read(PLACE_BYTES)
        lines += file.readline(MAX_DOCUMENT_BYTES)
    if not lines.endswith(b"\n") and begin + len(lines) < size:  # a line beyond MAX_DOCUMENT_BYTES
        lines = lines[: lines.rfind(b"\n") + 1]
    return lines, len(lines)


def _begin_of_stream(path: str, size: int, compression: str) -> tuple[bytes, float]:
    """(whole lines from the begin of a compressed file, the bytes that they take on disk)."""
    blocks: list[bytes] = []
    n_bytes, fed, ends = 0, 0, False
    for block in decompressed(path, size, compression, _STEP_BYTES):
        if block.data:
            blocks.append(block.data)
            n_bytes, fed = n_bytes + len(block.data), min((block.label + 1) * _STEP_BYTES, size)
            ends |= b"\n" in block.data
        elif n_bytes >= MAX_DOCUMENT_BYTES or (ends and block.label * _STEP_BYTES >= PIECE_TEXT_BYTES):
            break
    else:
        return b"".join(blocks), size  # all of it
    data = b"".join(blocks)
    lines = data[: data.rfind(b"\n") + 1]
    return lines, len(lines) * fed / max(n_bytes, 1)


_STEP_BYTES = 4 << 10  # how exactly it is known which bytes on disk make a block


def _begin(source: PlannedSource, piece: int) -> tuple[list[Part], float]:
    """(the begin of a piece, PIECE_TEXT_BYTES of it or all, the bytes that this takes on disk)."""
    found = source.pieces.at(np.array([piece]))
    stored = max(1, int(found.bytes[0]))
    weight = 1 << 20
    hi = weight if stored <= PIECE_TEXT_BYTES else max(1, -(-PIECE_TEXT_BYTES * weight // stored))
    looked = stored * hi // weight
    parts = list(source.parts(Extent(piece, 0, 0, hi, weight)))
    if source.formats[int(found.file[0])][0] == "text":  # whole files
        looked = sum(part.size for part in parts)
    return parts, max(1, looked)


def _begin_of_piece(source: PlannedSource, piece: int, marks: MarkReader | None) -> _Look:
    parts, looked = _begin(source, piece)
    texts: list[str] = []
    marked: list[Marked | None] = []
    held = n_bytes = 0
    for part in parts:
        for batch in read(part, source.source.text_key, marks=marks):
            n_bytes += sum(len(text.encode()) for text in batch.texts)
            if held < HELD_BYTES and len(texts) < HELD_DOCUMENTS:
                texts += batch.texts
                marked += batch.marks
                held = n_bytes
    return looked * (held / n_bytes if n_bytes else 1.0), texts, marked


def _relative_error(rates: Sequence[tuple[float, float]]) -> float:
    """The standard error of a ratio estimate over pieces, divided by it; 0 where one piece was all there is."""
    if len(rates) < 2:
        return 0.0
    tokens, stored = np.array(rates, np.float64).T
    if not tokens.sum():
        return 0.0
    residuals = tokens - tokens.sum() / stored.sum() * stored
    return float(np.sqrt((residuals**2).sum() / (len(rates) * (len(rates) - 1))) / tokens.mean())
