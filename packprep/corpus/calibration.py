"""What a keyed sample of a source tells: text bytes per stored byte, tokens per text byte, documents' mean length.

The sample is a few pieces of each format, chosen by their keys and entered at their begin; its figures are stored in the plan
and only ever used as estimates: no document depends on them but through the number of shards and `share`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from packprep.corpus.conversations import Marked, MarkReader
from packprep.corpus.engines.engine import Engine
from packprep.corpus.planning import Extent, PlannedSource, format_name
from packprep.corpus.readers import read
from packprep.corpus.training import tokenize_marked
from packprep.corpus.vocabulary import Vocabulary
from packprep.randomness import CALIBRATION, bits64, permute, text_key

PIECES = 6
PIECE_TEXT_BYTES = 256 << 10
FIRST_CHARACTERS = 128 << 10
HELD_BYTES, HELD_DOCUMENTS = 64 << 20, 1 << 20
"""Of a piece, what is tokenized; beyond it text is only counted: 256 KiB of stored bytes may hold any number of gigabytes."""
MAX_RATIO = 1 << 24  # per 1024


@dataclass(frozen=True)
class Estimates:
    """Figures of one source. Ratios: text bytes per 1024 stored bytes, by format."""

    ratios: dict[str, int]
    tokens_per_byte: float
    document_bytes: float
    supervised: bool  # whether a document had loss_spans or messages
    texts: tuple[str, ...]  # the first that were read, cut to FIRST_CHARACTERS together
    relative_error: float  # standard error of the source's estimated tokens, as a part of them


def calibrate(
    source: PlannedSource, engine: Engine, vocabulary: Vocabulary, special_text: str, marks: MarkReader | None = None
) -> Estimates:
    """Estimates of a source whose ratios are not known yet (`source.ratios` is not read). marks: as in `readers.read`."""
    ratios: dict[str, int] = {}
    tokens = text_bytes = documents = 0
    supervised = False
    first: list[str] = []
    room = FIRST_CHARACTERS
    rates: list[tuple[int, int]] = []  # (tokens, stored bytes) of each piece looked at
    kinds = [format_name(*f) for f in source.formats]
    of_piece = np.array([kinds.index(kinds[f]) for f in source.pieces.file], np.int64)
    for kind in sorted(set(kinds)):
        own = np.flatnonzero(of_piece == kinds.index(kind)) if len(of_piece) else of_piece
        stored_seen = text_seen = 0
        if len(own):
            key = bits64(text_key(source.seed, source.name, kind), CALIBRATION)
            for i in permute(np.arange(min(PIECES, len(own))), len(own), key):
                piece = int(own[i])
                stored, texts, marked, n_bytes, n_documents = _look_at(source, piece, marks)
                for text in texts:
                    if room > 0:
                        first.append(text[:room])
                        room -= len(text)
                supervised |= any(mark is not None for mark in marked)
                of_texts, _ = tokenize_marked(engine, texts, marked, special_text, vocabulary)
                n_tokens = int(of_texts.offsets[-1])
                if len(texts) < n_documents:
                    n_tokens = n_tokens * n_bytes // max(1, sum(len(text.encode()) for text in texts))
                stored_seen, text_seen = stored_seen + stored, text_seen + n_bytes
                tokens, text_bytes, documents = tokens + n_tokens, text_bytes + n_bytes, documents + n_documents
                rates.append((n_tokens, stored))
        ratio = round(1024 * text_seen / stored_seen) if stored_seen and text_seen else 1024
        # A piece's weight, its bytes times the ratio, is to stay far below 2⁶³.
        most = min(MAX_RATIO, max(1 << 20, (1 << 56) // int(source.pieces.bytes.max(initial=1))))
        ratios[kind] = min(max(ratio, 1), most)
    return Estimates(
        ratios,
        tokens / text_bytes if text_bytes else 1.0,
        text_bytes / documents if documents else 0.0,
        supervised,
        tuple(first),
        _relative_error(rates),
    )


def _look_at(
    source: PlannedSource, piece: int, marks: MarkReader | None
) -> tuple[int, list[str], list[Marked | None], int, int]:
    """(stored bytes looked at, texts that begin there, what they say of their training, bytes and number of all texts)."""
    stored = max(1, int(source.pieces.bytes[piece]))
    weight = 1 << 20
    hi = weight if stored <= PIECE_TEXT_BYTES else max(1, -(-PIECE_TEXT_BYTES * weight // stored))
    first = int(source.pieces.file[piece])
    format, compression = source.formats[first]
    if compression and format != "text":  # whole steps
        steps = -(-stored // source.step_bytes)
        wanted = min(steps, -(-PIECE_TEXT_BYTES // source.step_bytes))
        hi, weight, looked = wanted, steps, min(stored, wanted * source.step_bytes)
    else:
        looked = stored * hi // weight
    parts = list(source.parts(Extent(piece, 0, 0, hi, weight)))
    if format == "text":  # whole files
        looked = sum(part.size for part in parts)
    texts: list[str] = []
    marked: list[Marked | None] = []
    n_bytes = n_documents = 0
    for part in parts:
        for batch in read(part, source.source.text_key, marks=marks):
            if n_bytes < HELD_BYTES and n_documents < HELD_DOCUMENTS:
                texts += batch.texts
                marked += batch.marks
            n_bytes += sum(len(text.encode()) for text in batch.texts)
            n_documents += len(batch.texts)
    return max(1, looked), texts, marked, n_bytes, n_documents


def _relative_error(rates: Sequence[tuple[int, int]]) -> float:
    """The standard error of a ratio estimate over pieces, divided by it; 0 where one piece was all there is."""
    if len(rates) < 2:
        return 0.0
    tokens, stored = np.array(rates, np.float64).T
    if not tokens.sum():
        return 0.0
    residuals = tokens - tokens.sum() / stored.sum() * stored
    return float(np.sqrt((residuals**2).sum() / (len(rates) * (len(rates) - 1))) / tokens.mean())
