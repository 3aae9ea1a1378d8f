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
    kinds = [format_name(*kind) for kind in source.files.kinds]
    for kind in sorted(kinds):
        own = source.pieces_of_kind(kinds.index(kind))
        stored_seen = text_seen = 0
        if len(own):
            key = bits64(text_key(source.seed, source.name, kind), CALIBRATION)
            for i in permute(np.arange(min(PIECES, len(own))), len(own), key):
                piece = int(own[i])
                stored, texts, marked = _look_at(source, piece, marks)
                for text in texts:
                    if room > 0:
                        first.append(text[:room])
                        room -= len(text)
                supervised |= any(mark is not None for mark in marked)
                n_bytes = sum(len(text.encode()) for text in texts)
                of_texts, _ = tokenize_marked(engine, texts, marked, special_text, vocabulary)
                n_tokens = int(of_texts.offsets[-1])
                stored_seen, text_seen = stored_seen + stored, text_seen + n_bytes
                tokens, text_bytes, documents = tokens + n_tokens, text_bytes + n_bytes, documents + len(texts)
                rates.append((n_tokens, stored))
        ratio = round(1024 * text_seen / stored_seen) if stored_seen and text_seen else 1024
        ratios[kind] = min(max(ratio, 1), 1 << 20)
    return Estimates(
        ratios,
        tokens / text_bytes if text_bytes else 1.0,
        text_bytes / documents if documents else 0.0,
        supervised,
        tuple(first),
        _relative_error(rates),
    )


def _look_at(source: PlannedSource, piece: int, marks: MarkReader | None) -> tuple[int, list[str], list[Marked | None]]:
    """(stored bytes looked at, texts that begin there, what they say of their training)."""
    found = source.pieces.at(np.array([piece]))
    stored = max(1, int(found.bytes[0]))
    weight = 1 << 20
    hi = weight if stored <= PIECE_TEXT_BYTES else max(1, -(-PIECE_TEXT_BYTES * weight // stored))
    first = int(found.file[0])
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
    batches = [batch for part in parts for batch in read(part, source.source.text_key, marks=marks)]
    texts = [text for batch in batches for text in batch.texts]
    return max(1, looked), texts, [mark for batch in batches for mark in batch.marks]


def _relative_error(rates: Sequence[tuple[int, int]]) -> float:
    """The standard error of a ratio estimate over pieces, divided by it; 0 where one piece was all there is."""
    if len(rates) < 2:
        return 0.0
    tokens, stored = np.array(rates, np.float64).T
    if not tokens.sum():
        return 0.0
    residuals = tokens - tokens.sum() / stored.sum() * stored
    return float(np.sqrt((residuals**2).sum() / (len(rates) * (len(rates) - 1))) / tokens.mean())
