"""Estimate the text bytes and tokens of a source from a keyed random sample of its documents.

A split is an independently readable part of a source. These values are estimated for each source:

- bytes of text per byte of a split's size, for each file format
- tokens per byte of text
- length of a document
- time to read a byte of text, and time to tokenize it

From the estimates, a plan computes the number of shards, the weights of splits, and the number of
passes that give each source its `share`. The plan stores the estimates except the times. If a
source has a `share`, the sample grows until the error of the estimated number of tokens is small
(`precise`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from packprep.clock import Clock
from packprep.conversations.supervision import Conversation
from packprep.conversations.training import tokenize_supervised
from packprep.documents.joining import Separators
from packprep.documents.sample import (
    Looked,
    Place,
    Sampling,
    Supervise,
    first_looks,
    look_at_lines,
    look_at_pieces,
    look_at_tokens,
)
from packprep.documents.sample_notes import SampleNotes
from packprep.documents.sampled_passes import FEW_KEPT, SampledPasses
from packprep.documents.tally import Tally
from packprep.errors import RecipeError
from packprep.randomness import CALIBRATION, bits64, text_key
from packprep.recipe import DocumentKeys, as_toml
from packprep.sources.first_look import begin_of
from packprep.sources.formats import FORMATS, position_of
from packprep.sources.formats.batch import Batch
from packprep.sources.formats.jsonl import BOM, kind_of, parse_object
from packprep.sources.slices import PlannedSource, format_name
from packprep.tokenizer.engines.engine import Engine
from packprep.tokenizer.roles import Vocabulary

TOKENIZED_CHARACTERS = 4 << 10
"""Characters of a window. If a text is longer than two windows, only one window is tokenized.

The number of tokens per byte hardly changes within a document.
"""
WARM_UP_CHARACTERS = 256
FIRST_CHARACTERS = 128 << 10
MAX_RATIO = 1 << 24  # text bytes per 1024 stored bytes


@dataclass(frozen=True)
class Estimates:
    """The estimates of one source.

    `ratios` maps the name of a format to the bytes of text per 1024 bytes of a split's size. For
    example, {"jsonl.zstd": 4096} means that compression reduces the text to a quarter.
    """

    ratios: dict[str, int]
    tokens_per_byte: float  # tokens per byte of the text that the ratios predict
    document_bytes: float  # mean text bytes of a document
    supervised: bool  # whether a sampled document limits which of its tokens are trained
    chat: bool  # whether a sampled document has messages
    sampling_error: (
        float  # relative standard error of the estimated number of tokens in all documents
    )
    lengths: np.ndarray  # int64[k]: tokens of the sampled documents
    length_weights: np.ndarray  # float64[k]: number of documents that each sampled one represents
    sizes: np.ndarray  # int64[k]: text bytes of the sampled documents
    read_s_per_byte: float = 0.0  # seconds on one core to read a byte of text, never stored
    tokenize_s_per_byte: float = 0.0  # seconds on one core to tokenize a byte of text
    tally: Tally | None = None  # counts of bad documents; None in a token store's estimates
    notes: SampleNotes = field(default_factory=SampleNotes)
    numbers: np.ndarray | None = None
    """float64[k], the number of passes of each sampled document. None if the source has no
    expressions. `length_weights` then counts each document in all its passes."""
    pass_shares: list[float] | None = None
    """For each pass, the text bytes relative to pass 0. None if `repeat` is not an expression."""

    def error_of(self, source: PlannedSource) -> float:
        """Return the relative standard error of the estimated number of tokens that a build reads.

        It combines the sampling error with the error from the build's random choice of documents.
        The hash split (`sample`) keeps each document independently. A fractional `repeat` keeps the
        fraction f of the n documents in each size class of each split. The number of kept documents
        differs from n · f by less than one, but they may have any length of their class. If
        `repeat` is an expression, each document draws the pass of its fraction independently.
        """
        low, high = source.source.sample
        # The variance of the token count has a term for each random choice of the build.
        rate, repeat, pieces = high - low, source.repeat, len(source.pieces)
        lengths, weights = self.lengths.astype(np.float64), self.length_weights
        total = float((weights * lengths).sum())
        if not total:
            return self.sampling_error
        if self.numbers is not None and self.pass_shares is not None:
            # Each document draws its last pass independently.
            once, fraction = weights / self.numbers, self.numbers % 1
            # `of_document` is the variance of a document's number of passes.
            of_document = rate * (1 - rate) * self.numbers**2 + rate * fraction * (1 - fraction)
            variance = float((once * of_document * lengths**2).sum())
            return math.hypot(self.sampling_error, math.sqrt(variance) / (rate * total))
        # `sample` keeps each document with probability `rate`, once for every pass.
        variance = rate * (1 - rate) * repeat**2 * float((weights * lengths**2).sum())
        chance = repeat % 1 * (1 - repeat % 1)
        # The classes of a Choice are the numbers of bits of the sizes, as docs/format.md says.
        of_class = np.frexp(self.sizes.astype(np.float64))[1]
        for bits in np.unique(of_class) if chance else ():
            class_weights, class_lengths = weights[of_class == bits], lengths[of_class == bits]
            # A class of a split keeps n · f documents, give or take less than one.
            per_piece, mean = (
                rate * class_weights.sum() / max(pieces, 1),
                float(np.average(class_lengths, weights=class_weights)),
            )
            # The documents of a class have different lengths, so the choice among them matters.
            within = float(np.average((class_lengths - mean) ** 2, weights=class_weights))
            variance += pieces * (
                min(per_piece * chance, 0.25) * mean**2 + per_piece * chance * within
            )
        return math.hypot(self.sampling_error, math.sqrt(variance) / (rate * repeat * total))


def calibrate(
    source: PlannedSource,
    engine: Engine,
    vocabulary: Vocabulary,
    settings: DocumentKeys,
    supervise: Supervise | None = None,
    precise: bool = False,
) -> Estimates:
    """Estimate the text bytes, tokens and document lengths of a source from a sample.

    `source.ratios` is not read, because the result of this function determines it.

    Args:
        source: The planned source.
        engine: The engine of the tokenizer.
        vocabulary: The vocabulary of the tokenizer.
        settings: `[documents]` in the recipe.
        supervise: Renders supervised documents. None ignores loss_spans and messages.
        precise: Whether to sample until the relative error of the number of tokens is a few
            thousandths. The text bytes of compressed files are then also recorded in
            `source.files.piece_bytes`.

    Returns:
        The estimates, including counts of bad documents and of problems in the sample.

    Raises:
        RecipeError: If no sampled record has a value of the field `group_by`.
    """
    tables = [i for i in source.files.piece_bytes if position_of(*source.formats[i]) == "number"]
    # Keep only the sizes of tables, because an earlier sample may have recorded other sizes.
    source.files.forget({i: source.files.piece_bytes[i] for i in tables})
    clock, notes, tally = Clock(), SampleNotes(), Tally()
    counter = _TokenCounter(engine, vocabulary, settings, clock, notes)
    if supervise is not None:
        supervise = _warmed(supervise, clock)
    ratios: dict[str, int] = {}
    looks: list[Looked] = []

    def look_at(sampling: Sampling, format: str, compression: str) -> Looked:
        if FORMATS[format].holds == "tokens":
            return look_at_tokens(sampling, settings, vocabulary)
        if (position := position_of(format, compression)) == "byte" and not source.grouping:
            return look_at_lines(sampling, format)
        is_precise = sampling.precise
        return look_at_pieces(sampling, compressed=position == "stream", whole=is_precise)

    # Each format is sampled on its own, because the ratio of text to stored bytes depends on it.
    for name, kind, pieces, key in _kinds(source):
        passes = None if source.passes is None else SampledPasses(source.passes)
        sampling = Sampling(
            source, pieces, key, supervise, counter.count, precise, clock, Tally(), passes
        )
        looked = look_at(sampling, *kind)
        if source.passes is not None and passes is not None:
            # A sample that used every document of the files is exact, however few it kept.
            uses_all = sampling.tally.is_whole and len(looked.sizes) == passes.kept
            if passes.kept < FEW_KEPT and not uses_all:
                passes = SampledPasses(source.passes, few=True)
                sampling = sampling._replace(precise=True, tally=Tally(), passes=passes)
                looked = look_at(sampling, *kind)
            notes.add_passes(passes, sampling.tally.is_whole)
        # The tally of a format counts sampled documents. The weights scale it to all documents.
        tally.join(sampling.tally, float(looked.weights.sum()))
        # The ratio describes pass 0. `pass_shares` scales it to the other passes.
        text_bytes = float(looked.bytes_of_passes(1)[0])
        is_known = looked.held and (text_bytes or passes is not None)
        ratio = round(1024 * text_bytes / looked.held) if is_known else 1024
        ratios[name] = min(max(ratio, 1), highest_ratio(source))
        looks.append(looked)
    # The names of the fields need another read of a file, so only a message triggers it.
    if notes.empty or notes.fault:
        notes.fields = _fields_in_words(source)
    # A misspelled `group_by` joins no records, so it is an error.
    if source.grouping and not tally.grouped and any(len(looked.sizes) for looked in looks):
        raise RecipeError(
            f"group_by = {as_toml(source.source.group_by)}: no record in the sample has a value of"
            " this field, so no document would be joined\n"
            "hint: name a field of the records, or leave group_by out",
            ("sources", source.index, "group_by"),
        )
    # The time per token is measured over all formats, because the tokenizer is the same.
    token_s = clock.seconds.get("tokenize", 0.0) / max(1, counter.tokens)
    return replace(_estimates(source, ratios, looks, token_s), tally=tally, notes=notes)


MOST_FIELDS = 50
"""Maximum number of fields that a message lists."""


def _fields_in_words(source: PlannedSource) -> str:
    """Return the fields of a source's first record with their types.

    Return "" if the source's first file does not begin with a JSON record.

    Example:
        "'score' (a number), 'meta.lang' (a string)"
    """
    format, compression = source.formats[0]
    if not FORMATS[format].json:
        return ""
    begin, _ = begin_of(source.path(0), int(source.files.sizes[0]), compression, has_lines=True)
    record = parse_object(begin.partition(b"\n")[0].removeprefix(BOM), has_numbers=True)
    if not isinstance(record, dict):
        return ""
    fields = [(key, value) for key, value in record.items() if not isinstance(value, dict)]
    for key, values in record.items():
        if isinstance(values, dict):
            fields += [(f"{key}.{name}", value) for name, value in values.items()]
    return ", ".join(f"{ascii(key[:40])} ({kind_of(value)})" for key, value in fields[:MOST_FIELDS])


def _estimates(
    source: PlannedSource, ratios: dict[str, int], looks: Sequence[Looked], token_s: float
) -> Estimates:
    """Return the estimates of a source, combined from one sample for each format of its files.

    Args:
        source: The planned source.
        ratios: Maps each format's name to its text bytes per 1024 bytes of a split.
        looks: The sample of each format, in the order of `ratios`.
        token_s: Seconds on one core to produce one token.
    """
    passes = source.passes
    uses = 1 if passes is None else passes.uses
    # `of_passes[p]` has the text bytes of pass p, over all formats.
    of_passes = sum((look.bytes_of_passes(uses) for look in looks), np.zeros(uses))
    text_bytes = float(of_passes.sum())
    documents = sum(float(look.uses.sum()) for look in looks)
    tokens = sum(look.all_tokens for look in looks)
    # The plan computes text bytes with the rounded ratios, so the rates use the same text bytes.
    planned_bytes = sum(
        look.held * ratio / 1024 for look, ratio in zip(looks, ratios.values(), strict=True)
    )
    pass_shares = None if passes is None else passes.shares(of_passes)
    if pass_shares is not None:
        planned_bytes *= sum(pass_shares)
    sizes, lengths, weights = (
        np.concatenate([np.zeros(0), *(getattr(look, name) for look in looks)])
        for name in ("sizes", "tokens", "uses")
    )
    # Windows give fractional counts. Documents without tokens are in no segment.
    lengths = np.rint(lengths)
    is_filled = lengths > 0
    numbers = None
    if passes is not None:
        numbers = np.concatenate([np.zeros(0), *(look.numbers for look in looks)])
    # Formats are sampled independently, so the squares of their errors are added.
    return Estimates(
        ratios=ratios,
        tokens_per_byte=tokens / planned_bytes if tokens and planned_bytes else 1.0,
        document_bytes=(text_bytes if passes is None else planned_bytes) / (documents or math.inf),
        supervised=any(look.supervised for look in looks),
        chat=any(look.chat for look in looks),
        sampling_error=math.sqrt(sum(look.error**2 for look in looks)) / tokens if tokens else 0.0,
        lengths=lengths[is_filled].astype(np.int64),
        length_weights=weights[is_filled],
        sizes=sizes[is_filled].astype(np.int64),
        read_s_per_byte=sum(look.read_s for look in looks) / max(1.0, planned_bytes),
        tokenize_s_per_byte=tokens * token_s / max(1.0, planned_bytes),
        numbers=None if numbers is None else numbers[is_filled],
        pass_shares=pass_shares,
    )


def highest_ratio(source: PlannedSource) -> int:
    """Return the upper limit for the ratios in `Estimates.ratios`.

    Higher ratios are reduced to this limit. The weight of a split is its bytes times the ratio, so
    with the limit, weights stay far below 2⁶³.
    """
    return min(MAX_RATIO, max(1 << 20, (1 << 56) // int(source.files.sizes.max(initial=1))))


def first_texts(source: PlannedSource, supervise: Supervise | None = None) -> Iterator[str]:
    """Yield texts from a quick sample of a source, at most FIRST_CHARACTERS characters in total.

    The last text may be cut. Files of tokens are skipped. `supervise` renders supervised documents.
    With None, only plain texts are read.
    """
    room = FIRST_CHARACTERS
    for _, kind, pieces_of_kind, key in _kinds(source):
        if FORMATS[kind[0]].holds == "tokens":
            continue
        for texts, *_ in first_looks(source, pieces_of_kind, kind, key, supervise):
            for text in texts:
                yield text[:room]
                room -= len(text)
                if room <= 0:
                    return


def _kinds(source: PlannedSource) -> Iterator[tuple[str, tuple[str, str], np.ndarray, np.uint64]]:
    """Yield (name, (format, compression), splits, key) for each distinct format of the files.

    `name` is the key of the format in `Estimates.ratios`. `splits` has the indices of the format's
    splits. `key` is the random key for sampling them.
    """
    kinds = [format_name(*kind) for kind in source.files.kinds]
    for name in sorted(kinds):
        kind = kinds.index(name)
        key = bits64(text_key(source.seed, source.name, name), CALIBRATION)
        yield name, source.files.kinds[kind], source.pieces_of_kind(kind), key


def _warmed(supervise: Supervise, clock: Clock) -> Supervise:
    """Return a function with the arguments and results of `supervise`.

    Before its first batch with supervised documents, the function renders one of them in the stage
    "warm-up" of `clock`. This loads the chat template, which takes long and must not count as
    reading time.
    """
    cold = [True]

    def timed(batch: Batch) -> tuple[Batch, dict[int, Any]]:
        if cold and batch.supervision:
            cold.clear()
            conversations = {0: next(iter(batch.supervision.values()))}
            with clock.stage("warm-up"):
                supervise(
                    Batch(
                        [conversations[0].text or ""],
                        np.zeros(1, np.int32),
                        np.zeros(1, np.int64),
                        [],
                        conversations,
                    )
                )
        return supervise(batch)

    return timed


class _Windows(NamedTuple):
    """The texts to tokenize for some sampled documents."""

    texts: list[str]
    conversations: dict[int, Conversation]  # by number of the text
    number: np.ndarray  # int64[n]: index in `texts`; -1 for the last text of the previous call
    scale: np.ndarray  # float64[n]: length of each document / length of its text in `texts`
    slots: np.ndarray  # float64[n]: number of media positions minus number of media


def _window_of(place: Place) -> tuple[str, Conversation | None]:
    """Return (text, conversation) to tokenize for a sampled document.

    For a long document, `text` is only a window of the document's text at the sampled position.
    `conversation` is then a chat without trained spans, or None if the document is not a chat.
    """
    text, conversation, position = place
    if isinstance(conversation, Separators):
        conversation = None
    if position >= 0 and len(text) > 2 * TOKENIZED_CHARACTERS:
        begin = int(position * (len(text) - TOKENIZED_CHARACTERS))
        window = text[begin : begin + TOKENIZED_CHARACTERS]
        is_chat = conversation is not None and conversation.chat
        return window, Conversation(window, (), chat=True) if is_chat else None
    return text, conversation


class _TokenCounter:
    """A counter of the tokens of sampled documents.

    If consecutive sampled positions are in the same conversation, the conversation is tokenized
    once, because it may have many spans. `tokens` is the number of tokens that all calls produced
    so far.
    """

    def __init__(
        self,
        engine: Engine,
        vocabulary: Vocabulary,
        settings: DocumentKeys,
        clock: Clock,
        notes: SampleNotes,
    ):
        """Create a counter.

        Args:
            engine: The engine of the tokenizer.
            vocabulary: The vocabulary of the tokenizer.
            settings: `[documents]` in the recipe.
            clock: Receives the seconds of the stage "tokenize".
            notes: Counts problems in the tokenized texts.
        """
        self.tokens = 0
        self._engine, self._vocabulary, self._settings = engine, vocabulary, settings
        self._clock, self._notes, self._is_warm = clock, notes, False
        # The last conversation of the previous call, and the conversation's number of tokens.
        self._last: Any = None
        self._last_tokens = 0

    def count(self, places: Sequence[Place]) -> np.ndarray:
        """Return the number of tokens of each sampled document, float64[n].

        For a long document, only a window of the text at the sampled position is tokenized. The
        window's token count is multiplied by (length of the document / length of the window).
        """
        windows, special_text = self._windows(places), self._settings.special_text
        if not self._is_warm and windows.texts:  # The first call of a library takes longer.
            short = windows.texts[0][:WARM_UP_CHARACTERS]
            conversations = (
                {0: Conversation(short, ((0, len(short)),))} if windows.conversations else {}
            )
            with self._clock.stage("warm-up"):
                tokenize_supervised(
                    self._engine, [short], conversations, special_text, self._vocabulary
                )
        self._is_warm = True
        # Only counts matter here, so the starts of messages are not searched.
        with self._clock.stage("tokenize"):
            tokens, trained = tokenize_supervised(
                self._engine,
                windows.texts,
                windows.conversations,
                special_text,
                self._vocabulary,
                math.inf,
            )
        self._notes.add(tokens, trained, windows.conversations, self._settings, self._vocabulary)
        self.tokens += len(tokens.ids)
        # Index −1 selects the appended count of the previous call's last conversation.
        counts = np.append(np.diff(tokens.offsets), self._last_tokens)[windows.number]
        if len(places):
            # The next call can reuse the count only if the conversation was tokenized whole.
            is_whole = windows.scale[-1] == 1.0
            self._last = places[-1].conversation if is_whole else None
            self._last_tokens = int(counts[-1])
        return counts * windows.scale + windows.slots

    def _windows(self, places: Sequence[Place]) -> _Windows:
        texts: list[str] = []
        conversations: dict[int, Conversation] = {}
        number = np.zeros(len(places), np.int64)
        scale, slots = np.ones(len(places)), np.zeros(len(places))
        # Maps a conversation that is tokenized whole to the index of its text.
        numbers = {id(self._last): -1}
        for i, place in enumerate(places):
            text, conversation = _window_of(place)
            number[i] = len(texts)
            if text:
                scale[i] = len(place.text) / len(text)
            if place.conversation is not None:
                slots[i] = place.conversation.slots - len(place.conversation.places)
                # A conversation that is tokenized whole has one text, even at several positions.
                if text is place.text:
                    number[i] = numbers.setdefault(id(place.conversation), len(texts))
            if number[i] == len(texts):
                if conversation is not None:
                    # Each medium has one token here. `slots` adds its other positions.
                    media = tuple(medium._replace(tokens=1) for medium in conversation.places)
                    conversations[len(texts)] = replace(conversation, places=media)
                texts.append(text)
        return _Windows(texts, conversations, number, scale, slots)
