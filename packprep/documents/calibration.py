"""What a keyed sample of a source tells: text bytes per byte that its pieces hold, tokens per text
byte, documents' lengths.

The figures are only ever used as estimates: no document depends on them but through the number of
shards and `share`. The plan stores them, except the time that the sample took. Where sources have
shares, they are looked at until their tokens are known well enough (`precise`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from packprep.clock import Clock
from packprep.conversations.supervision import Conversation
from packprep.conversations.training import tokenize_supervised
from packprep.documents.sample import (
    Count,
    Looked,
    Place,
    Supervise,
    first_looks,
    look_at_lines,
    look_at_pieces,
    look_at_tokens,
)
from packprep.documents.sample_notes import SampleNotes
from packprep.documents.tally import Tally
from packprep.randomness import CALIBRATION, bits64, text_key
from packprep.recipe import DocumentKeys
from packprep.sources.formats import FORMATS, position_of
from packprep.sources.formats.batch import Batch
from packprep.sources.slices import PlannedSource, format_name
from packprep.tokenizer.engines.engine import Engine
from packprep.tokenizer.roles import Vocabulary

TOKENIZED_CHARACTERS = 4 << 10
"""Of a text longer than two of them, a window: how many tokens a byte makes hardly changes within a
document."""
WARM_UP_CHARACTERS = 256
FIRST_CHARACTERS = 128 << 10
MAX_RATIO = 1 << 24  # per 1024


@dataclass(frozen=True)
class Estimates:
    """Figures of one source. Ratios: text bytes per 1024 bytes that pieces hold, by format."""

    ratios: dict[str, int]
    tokens_per_byte: float  # of the text that the ratios come to
    document_bytes: float
    supervised: bool  # whether a document had loss_spans or messages
    chat: bool  # whether one had messages
    sampling_error: (
        float  # standard error of the estimated tokens of all documents, as a part of them
    )
    lengths: np.ndarray  # int64[k]: tokens of the documents that were looked at
    length_weights: np.ndarray  # float64[k]: how many documents of the source each stands for
    sizes: np.ndarray  # int64[k]: their text bytes
    read_s_per_byte: float = 0.0  # of that text: what a core took for the sample; never stored
    tokenize_s_per_byte: float = 0.0  # the same to tokenize it
    tally: Tally | None = None  # of the bad ones; None where a token store's sample tells the rest
    notes: SampleNotes = field(default_factory=SampleNotes)

    def error_of(self, source: PlannedSource) -> float:
        """The standard error of the tokens that are used, as a part of them: chance also decides
        which documents those are.

        `sample` is a coin for each document. The fraction of `repeat` takes documents evenly by
        class of size in each of the
        pieces: of n documents of a class, n f but for less than one, of any length in the class.
        """
        low, high = source.source.sample
        kept, repeat, pieces = high - low, source.repeat, len(source.pieces)
        lengths, weights = self.lengths.astype(np.float64), self.length_weights
        total = float((weights * lengths).sum())
        if not total:
            return self.sampling_error
        variance = kept * (1 - kept) * repeat**2 * float((weights * lengths**2).sum())
        chance = repeat % 1 * (1 - repeat % 1)
        of_class = np.frexp(self.sizes.astype(np.float64))[1]
        for bits in np.unique(of_class) if chance else ():
            own, own_lengths = weights[of_class == bits], lengths[of_class == bits]
            per_piece, mean = (
                kept * own.sum() / max(pieces, 1),
                float(np.average(own_lengths, weights=own)),
            )
            within = float(np.average((own_lengths - mean) ** 2, weights=own))
            variance += pieces * (
                min(per_piece * chance, 0.25) * mean**2 + per_piece * chance * within
            )
        return math.hypot(self.sampling_error, math.sqrt(variance) / (kept * repeat * total))


def calibrate(
    source: PlannedSource,
    engine: Engine,
    vocabulary: Vocabulary,
    settings: DocumentKeys,
    supervise: Supervise | None = None,
    precise: bool = False,
) -> Estimates:
    """Estimates of a source whose ratios are not known yet (`source.ratios` is not read).

    settings: the recipe's. supervise: as in `supervision`, with a template; None: loss_spans and
    messages are not looked at.
    precise: look until the tokens are known to some thousandths; what compressed files hold is
    noted in `source.files.piece_bytes` then.
    """
    tables = [i for i in source.files.piece_bytes if position_of(*source.formats[i]) == "number"]
    # what an earlier sample noted
    source.files.forget({i: source.files.piece_bytes[i] for i in tables})
    clock, counted, notes = Clock(), list[int](), SampleNotes()
    count = _counter(engine, vocabulary, settings, clock, counted, notes)
    if supervise is not None:
        supervise = _warmed(supervise, clock)
    ratios: dict[str, int] = {}
    seen: list[Looked] = []
    tally = Tally()
    for name, (format, compression), own, key in _kinds(source):
        of_kind = Tally()
        if FORMATS[format].holds == "tokens":
            looked = look_at_tokens(source, own, key, settings, vocabulary, precise, clock, of_kind)
        elif (position := position_of(format, compression)) == "byte":
            looked = look_at_lines(
                source, own, format, key, supervise, count, precise, clock, of_kind
            )
        else:
            streams = position == "stream"
            looked = look_at_pieces(
                source, own, streams, key, supervise, count, precise, precise, clock, of_kind
            )
        tally.join(of_kind, float(looked.weights.sum()))
        ratio = (
            round(1024 * looked.text_bytes / looked.held)
            if looked.held and looked.text_bytes
            else 1024
        )
        ratios[name] = min(max(ratio, 1), highest_ratio(source))
        seen.append(looked)
    text_bytes, documents = (
        sum(look.text_bytes for look in seen),
        sum(float(look.weights.sum()) for look in seen),
    )
    tokens = sum(look.all_tokens for look in seen)
    as_planned = sum(
        look.held * ratio / 1024 for look, ratio in zip(seen, ratios.values(), strict=True)
    )
    sizes, lengths, weights = (
        np.concatenate([np.zeros(0), *(getattr(look, name) for look in seen)])
        for name in ("sizes", "tokens", "weights")
    )
    filled = np.rint(lengths) > 0
    tokenize_s = tokens * clock.seconds.get("tokenize", 0.0) / max(1, sum(counted))
    return Estimates(
        ratios,
        tokens / as_planned if tokens and as_planned else 1.0,
        text_bytes / documents if documents else 0.0,
        any(look.supervised for look in seen),
        any(look.chat for look in seen),
        math.sqrt(sum(look.error**2 for look in seen)) / tokens if tokens else 0.0,
        np.rint(lengths[filled]).astype(np.int64),
        weights[filled],
        sizes[filled].astype(np.int64),
        sum(look.read_s for look in seen) / max(1.0, as_planned),
        tokenize_s / max(1.0, as_planned),
        tally,
        notes,
    )


def highest_ratio(source: PlannedSource) -> int:
    """The most that a ratio may be: a piece's weight, its bytes times the ratio, is to stay far
    below 2⁶³."""
    return min(MAX_RATIO, max(1 << 20, (1 << 56) // int(source.files.sizes.max(initial=1))))


def first_texts(source: PlannedSource, supervise: Supervise | None = None) -> Iterator[str]:
    """The first texts of what `calibrate` looks at, cut to FIRST_CHARACTERS together."""
    room = FIRST_CHARACTERS
    for _, kind, own, key in _kinds(source):
        if FORMATS[kind[0]].holds == "tokens":
            continue
        for texts, _ in first_looks(source, own, kind, key, supervise):
            for text in texts:
                yield text[:room]
                room -= len(text)
                if room <= 0:
                    return


def _kinds(source: PlannedSource) -> Iterator[tuple[str, tuple[str, str], np.ndarray, np.uint64]]:
    """(name, (format, compression), the pieces, the key of the sample) of each kind of a source's
    files."""
    kinds = [format_name(*kind) for kind in source.files.kinds]
    for name in sorted(kinds):
        kind = kinds.index(name)
        key = bits64(text_key(source.seed, source.name, name), CALIBRATION)
        yield name, source.files.kinds[kind], source.pieces_of_kind(kind), key


def _warmed(supervise: Supervise, clock: Clock) -> Supervise:
    """Return `supervise` that runs its first document once untimed: loading a template takes
    long."""
    cold = [True]

    def timed(batch: Batch) -> tuple[Batch, dict[int, Any]]:
        if cold and batch.supervision:
            cold.clear()
            first = {0: next(iter(batch.supervision.values()))}
            with clock.stage("warm-up"):
                supervise(
                    Batch(
                        [first[0].text or ""],
                        np.zeros(1, np.int32),
                        np.zeros(1, np.int64),
                        [],
                        first,
                    )
                )
        return supervise(batch)

    return timed


def _counter(
    engine: Engine,
    vocabulary: Vocabulary,
    settings: DocumentKeys,
    clock: Clock,
    counted: list[int],
    notes: SampleNotes,
) -> Count:
    """Return a function that gives float64[n]: the tokens of documents, of long ones in proportion
    to those of a window around the place. A document with a conversation that lies at several
    places in turn is tokenized once: it may have many spans.

    clock: gets the seconds of the stage tokenize. counted: gets the number of tokens they made.
    notes: gets what they show.
    """
    special_text = settings.special_text
    last: Any = None  # the last conversation of the call before, and its tokens
    last_tokens = 0

    def count(places: Sequence[Place]) -> np.ndarray:
        nonlocal last, last_tokens
        windows: list[str] = []
        conversations: dict[int, Conversation] = {}
        parts, slots, number = (
            np.ones(len(places)),
            np.zeros(len(places)),
            np.zeros(len(places), np.int64),
        )
        whole = {id(last): -1}  # conversation → the number of its window, which is all of its text
        for i, (text, conversation, at) in enumerate(places):
            number[i], window, own = len(windows), text, conversation
            if conversation is not None:
                slots[i] = conversation.slots - len(conversation.places)
            if at >= 0 and len(text) > 2 * TOKENIZED_CHARACTERS:
                begin = int(at * (len(text) - TOKENIZED_CHARACTERS))
                window = text[begin : begin + TOKENIZED_CHARACTERS]
                parts[i] = len(text) / len(window)
                # Its tokens are counted, no more.
                own = (
                    Conversation(window, (), chat=True)
                    if conversation is not None and conversation.chat
                    else None
                )
            elif conversation is not None:
                number[i] = whole.setdefault(id(conversation), len(windows))
                if number[i] == len(windows) and conversation.places:
                    own = replace(
                        conversation,
                        places=tuple(one._replace(tokens=1) for one in conversation.places),
                    )
            if number[i] == len(windows):
                if own is not None:
                    conversations[len(windows)] = own
                windows.append(window)
        if not counted and windows:  # the first call of a library takes longer
            short = windows[0][:WARM_UP_CHARACTERS]
            first = {0: Conversation(short, ((0, len(short)),))} if conversations else {}
            with clock.stage("warm-up"):
                tokenize_supervised(engine, [short], first, special_text, vocabulary)
        with clock.stage("tokenize"):
            tokens, trained = tokenize_supervised(
                engine, windows, conversations, special_text, vocabulary, math.inf
            )
        notes.add(tokens, trained, conversations, settings, vocabulary)
        counted.append(len(tokens.ids))
        found = np.append(np.diff(tokens.offsets), last_tokens)[number]
        if len(places):
            last = places[-1].conversation if id(places[-1].conversation) in whole else None
            last_tokens = int(found[-1])
        return found * parts + slots

    return count
