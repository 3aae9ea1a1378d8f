"""Read the work ranges of one shard, and tokenize their documents into column arrays.

A work range (`Slice`) is a shard's part of one split in one pass. No Python object per document
remains after this step.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import xxhash

from packprep.clock import Clock
from packprep.conversations.media import content_of, pieces_of, refuse_strays
from packprep.conversations.supervision import Conversation, read_supervised
from packprep.conversations.training import (
    Trained,
    Training,
    all_supervised,
    tokenize_supervised,
    trained_by_tokens,
    trained_by_weight,
    training_columns,
)
from packprep.dataset.boundaries import offsets_of
from packprep.dataset.segments import Records
from packprep.documents.joining import GROUP_CUTS, UNGROUPED, ids_between, join_records
from packprep.errors import BuildError, SourceError
from packprep.randomness import SAMPLE, bits64, segment_key, text_key
from packprep.recipe import DocumentKeys, Recipe
from packprep.sources.formats import (
    BAD_REASONS,
    TOKEN_TEXT_BYTES,
    Batch,
    Choice,
    Decoders,
    Groups,
    IdLists,
    Keep,
    Reject,
    Slice,
    by_fields,
    position_of,
)
from packprep.sources.passes import ByFields
from packprep.sources.slices import ALL, PlannedSource
from packprep.tokenizer.encoding import TEXT_REASONS, Tokens, tokenize
from packprep.tokenizer.engines.engine import Engine, EngineFault
from packprep.tokenizer.file import unknown_id
from packprep.tokenizer.proof import EngineDifference, chat_difference, compared, difference, fault
from packprep.tokenizer.roles import Vocabulary


def take_tokens(lists: IdLists, documents: DocumentKeys, vocabulary: Vocabulary) -> Tokens:
    """Return the content tokens of documents that are stored as lists of token ids.

    A document with an id outside [0, vocab_size) is rejected with reason "id_out_of_range". The
    settings in `documents` change the content as follows.

    - `append_eos`: If set, one trailing eos is removed, because packprep appends its own.
    - `prepend_bos`: If set, one leading bos is removed, because packprep prepends its own.
    - `special_text`: With "text" or "special", ids of special tokens are content. With "reject", a
      document that contains such an id is rejected with reason "special_text".
    """
    ids, offsets = lists
    rejected: dict[int, tuple[str, str]] = {}
    size = vocabulary.vocab_size
    # Two reductions are enough for a batch without invalid ids, which is the usual case.
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= size):
        for i, place in _firsts(np.flatnonzero((ids < 0) | (ids >= size)), offsets):
            token = f"token {place - int(offsets[i])} is {int(ids[place])}"
            rejected[i] = "id_out_of_range", f"{token}; the vocabulary has {size} ids"
    # Document i keeps ids[begin[i] : end[i]]. The steps below only make these ranges shorter.
    begin, end = offsets[:-1].copy(), offsets[1:].copy()
    # Clipping keeps the indices valid for empty documents at the ends of the batch.
    if documents.eos_after_document and len(ids):
        end -= (end > begin) & (ids[np.maximum(end - 1, 0)] == vocabulary.roles["eos"])
    if documents.prepend_bos and len(ids):
        begin += (end > begin) & (ids[np.minimum(begin, len(ids) - 1)] == vocabulary.roles["bos"])
    if documents.special_text == "reject":
        forbidden = _forbidden(vocabulary)
        places = np.flatnonzero(np.isin(ids, forbidden))
        # A bos or eos that was removed above is not content, so it does not cause a reject.
        owner = np.searchsorted(offsets, places, side="right") - 1
        places = places[(places >= begin[owner]) & (places < end[owner])]
        for i, place in _firsts(places, offsets):
            detail = f"token {place - int(offsets[i])} is the special id {int(ids[place])}"
            rejected.setdefault(i, ("special_text", detail))
    # A rejected document stays in the batch without tokens, so document numbers do not change.
    end[list(rejected)] = begin[list(rejected)]
    content_ids = _inside(ids, begin, end).astype(np.int32, copy=False)
    rejects = [(i, *rejected[i]) for i in sorted(rejected)]
    tokens = Tokens(content_ids, offsets_of(end - begin), rejects)
    return refuse_strays(tokens, vocabulary) if vocabulary.media else tokens


def _inside(ids: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the entries of `ids` with an index in one of the ranges [begin[i], end[i]).

    The ranges are ascending and do not overlap.
    """
    if int((end - begin).sum()) == len(ids):
        return ids
    # Mark the start of each range with +1 and its end with -1. The running sum is 1 inside the
    # ranges and 0 outside.
    change = np.zeros(len(ids) + 1, np.int8)
    np.add.at(change, begin, 1)
    np.add.at(change, end, -1)
    return ids[np.cumsum(change[:-1], dtype=np.int8).view(np.bool_)]


def _firsts(places: np.ndarray, offsets: np.ndarray) -> list[tuple[int, int]]:
    """Return (document number, index of a token) for each document with a token in `places`.

    `places` has ascending indices into the concatenated ids of all documents. The result has the
    first of these indices for each document. `offsets` has the start of each document in the ids.
    """
    owner = np.searchsorted(offsets, places, side="right") - 1
    documents, first_indices = np.unique(owner, return_index=True)
    return list(zip(documents.tolist(), places[first_indices].tolist(), strict=True))


@lru_cache(maxsize=4)
def _forbidden(vocabulary: Vocabulary) -> np.ndarray:
    """Return the ids of all special tokens except the unknown token, int64[k].

    Ordinary text may produce the unknown token.
    """
    unknown = unknown_id(vocabulary.tokenizer_json)
    return np.array([id for id in vocabulary.special_ids if id != unknown], np.int64)


EMPTY = "empty"
BELOW_MIN_TOKENS = "below_min_tokens"
UNTRAINED = "untrained"
SENTINEL_IN_TEXT = "sentinel_in_text"
DROP_REASONS = (EMPTY, BELOW_MIN_TOKENS, UNTRAINED, SENTINEL_IN_TEXT)
"""The reasons to drop a document after it was tokenized."""
MOST_DOCUMENTS = 1 << 22
"""Maximum number of documents in one shard.

A document, used or rejected, takes up to about 200 bytes of memory in addition to its text.
"""


@dataclass
class Rejected:
    """The rejected documents of a shard, with their locations and reasons.

    Each document becomes a line of the rejects file. The documents are stored as columns, because
    a file may have millions of bad lines. A document takes about 100 bytes.
    """

    # Columns: file, pass, position.
    places: Sequence[array] = field(default_factory=lambda: [array("q") for _ in range(3)])
    _reasons: array = field(default_factory=lambda: array("I"))
    _ends: array = field(default_factory=lambda: array("q"))
    _details: bytearray = field(default_factory=bytearray)
    # Maps a file's index to (name of its source, name of the file).
    _names: dict[int, tuple[str, str]] = field(default_factory=dict)
    _known: dict[str, int] = field(default_factory=dict)  # Maps a reason to its number.

    def __len__(self) -> int:
        return len(self._reasons)

    def add(
        self, source: PlannedSource, use: int, file: int, position: int, reason: str, detail: str
    ) -> None:
        """Record a rejected document that was read in pass `use`.

        `file` is an index into the plan's files.
        """
        if file not in self._names:
            self._names[file] = source.name, source.files.names[file - source.first_file]
        for column, value in zip(self.places, (file, use, position), strict=True):
            column.append(int(value))
        self._reasons.append(self._known.setdefault(reason, len(self._known)))
        self._details += detail.encode()
        self._ends.append(len(self._details))

    def records(self, order: Iterable[int] | None = None) -> Iterator[dict[str, Any]]:
        """Yield the record of each rejected document for the rejects file.

        `order` selects documents by number. The first call of `add` recorded document 0. With None,
        all records are yielded, sorted by source name, file name, pass and position. This order
        does not depend on how the work was batched.
        """
        if order is None:
            rank = {
                file: i
                for i, file in enumerate(sorted(self._names, key=lambda file: self._names[file]))
            }
            file, use, position = (np.array(column, np.int64) for column in self.places)
            # `ranks[file]` is the place of a file in the order of source and file names.
            ranks = np.zeros(max(rank, default=0) + 1, np.int64)
            ranks[list(rank)] = list(rank.values())
            order = np.lexsort((position, use, ranks[file]))
        reasons = list(self._known)
        for i in order:
            number, use, position = (column[i] for column in self.places)
            source, name = self._names[number]
            # The detail of document i starts where the detail of document i − 1 ends.
            detail = self._details[self._ends[i - 1] if i else 0 : self._ends[i]].decode()
            record = {"source": source, "file": name, "position": position, "repeat": use}
            yield {**record, "reason": reasons[self._reasons[i]], "detail": detail}

    def counts(self, source: str) -> dict[str, int]:
        """Return reason → number of rejected documents of the source named `source`."""
        own_files = [file for file, (name, _) in self._names.items() if name == source]
        of_source = np.isin(np.array(self.places[0], np.int64), own_files)
        counts_by_reason = np.bincount(
            np.array(self._reasons, np.int64)[of_source], minlength=len(self._known)
        )
        return {
            reason: int(count)
            for reason, count in zip(self._known, counts_by_reason, strict=True)
            if count
        }


class ReadDocuments(NamedTuple):
    """A batch of n consecutive tokenized documents of a work range."""

    positions: np.ndarray  # int64[n]: position of each document in its file
    tokens: Tokens
    trained: Mapping[int, Trained]  # document's number in the batch → its trained spans
    rejects: Sequence[Reject]  # further documents, which were rejected before tokenization
    text_bytes: np.ndarray  # int64[n], or longer if it includes the text of rejects
    # The documents that the n entries form, and the ids between the records of a document. None if
    # each entry is a document.
    groups: tuple[Groups, tuple[int, ...]] | None = None


@dataclass
class Documents:
    """The tokenized documents of a shard as columns, with the rejects and the counts per source.

    Attributes:
        ids: The tokens of all documents, concatenated. uint16 or int32[tokens].
        offsets: Start of each document in `ids`, int64[D + 1].
        position: Position of each document in its file, int64[D]: the byte of its line, its row
            number, or its number in an index.
        file: Index into the plan's files, int64[D].
        source: Index of the source, int64[D].
        repeat: Number of the pass, int64[D].
        file_key: Random key of (seed, source name, file name), uint64[D].
        training: Trained spans and weights. None if no document has spans or weights.
        rejected: The rejected documents.
        read: Number of documents read per source.
        passes: For each source with an expression in `where` or `repeat`, maps a number of passes
            to the number of documents with this many passes. Documents count in pass 0. Entry 0
            counts the filtered documents.
        dropped_tokens: Number of tokens in documents that were dropped after tokenization, by
            source and reason.
        text_digests: Digest per source: xxh3-128 of the text bytes that were read. For sources of
            tokens, the digest covers the content ids as int32. For token stores, it covers the
            stored ids and media spans, and has the prefix OF_TOKENS.
        records: The records of all documents. None if no source has group_by.
        grouped: For each source with group_by, the numbers GROUP_CUTS and UNGROUPED.
    """

    ids: np.ndarray  # uint16 or int32[tokens]
    offsets: np.ndarray  # int64[D + 1]
    position: np.ndarray  # int64[D]
    file: np.ndarray  # int64[D]
    source: np.ndarray  # int64[D]
    repeat: np.ndarray  # int64[D]
    file_key: np.ndarray  # uint64[D]
    training: Training | None = None
    rejected: Rejected = field(default_factory=Rejected)
    read: dict[str, int] = field(default_factory=dict)  # source → number of documents
    # Maps source → reason → number of tokens.
    dropped_tokens: dict[str, dict[str, int]] = field(default_factory=dict)
    text_digests: dict[str, str] = field(default_factory=dict)  # source → digest
    passes: dict[str, Counter[int]] = field(default_factory=dict)
    records: Records | None = None
    grouped: dict[str, dict[str, int]] = field(default_factory=dict)

    def positions_of(self, d: int) -> list[int]:
        """Return the positions of the records of document number `d`.

        This is the position of the document if its source has no group_by.
        """
        positions = [] if self.records is None else self.records.of(d).position.tolist()
        return positions or [int(self.position[d])]


def is_bad(reason: str) -> bool:
    """Return whether a document that is rejected for this reason is bad.

    `max_bad_fraction` limits the bad documents. Damaged documents and documents with forbidden
    special tokens are bad. Documents that a setting such as `min_tokens` leaves out are not bad.
    """
    return reason in BAD_REASONS or reason in TEXT_REASONS or reason == SENTINEL_IN_TEXT


def in_sample(source: PlannedSource, file: int, positions: np.ndarray) -> np.ndarray:
    """Return which documents of a file are in the source's hash split (`sample`), bool[n].

    A document is in the hash split if a hash of its file's relative name and its position is in the
    interval [low, high) of `source.sample`. The result does not depend on the seed or on the name
    of the source.

    Args:
        source: The planned source.
        file: Index into the plan's files.
        positions: Positions of the documents, int64[n].
    """
    low, high = source.sample
    name = source.files.names[file - source.first_file]
    u = (
        bits64(segment_key(text_key("sample", name), positions, 0, 0), SAMPLE) >> np.uint64(11)
    ).astype(np.int64)
    return (u >= low) & (u < high)


def file_key(source: PlannedSource, file: int) -> np.uint64:
    """Return the random key of a file. `file` is an index into the plan's files."""
    return text_key(source.seed, source.name, source.files.names[file - source.first_file])


def keeps_all(source: PlannedSource, use: int) -> bool:
    """Return whether pass `use` reads all documents of a source.

    The hash split (`sample`), a fractional `repeat` or an expression in `where` or `repeat` may
    leave out documents.
    """
    return source.passes is None and source.sample == ALL and source.kept_of_use(use) == 1


def keeper(source: PlannedSource, use: int, piece: int) -> Keep | None:
    """Return the selector of the documents that a pass keeps from a split, or None to keep all.

    The hash split (`sample`), the expressions of the source and a fractional `repeat` leave out
    documents. With expressions, the selector is a `ByFields`. With a fractional `repeat`, the
    selector of the last pass is a `Choice`. For a split of text files, the plan contains the sizes
    of the documents. Therefore `keeper` calls this Choice itself, and returns a function that looks
    up the results.

    Args:
        source: The planned source.
        use: Number of the pass.
        piece: Index of the split in the source.
    """
    sample = None if source.sample == ALL else partial(in_sample, source)
    passes = source.passes
    keep = ByFields(passes, use, partial(file_key, source), sample) if passes else sample
    kept_fraction = source.kept_of_use(use)
    if kept_fraction == 1:
        return keep
    # The key of u names the first file of the split and the split's number in this file.
    first_file = int(source.pieces.at(np.array([piece])).file[0])
    name, number = source.files.names[first_file], int(source.pieces.at(np.array([piece])).part[0])
    key = segment_key(text_key(source.seed, source.name, name), number, use, 0)
    choice = Choice(key, int(kept_fraction * 2**32), keep)
    if position_of(*source.formats[first_file]) != "whole":
        return choice
    # A Choice numbers the documents of all files of the split, so it is called in file order.
    chosen = {}
    for i in source.files_of_piece(piece):
        file = source.first_file + i
        chosen[file] = choice(file, np.zeros(1, np.int64), source.files.sizes[i : i + 1])
    return lambda file, positions: chosen[file]


def with_keeps(
    slices: Iterable[tuple[PlannedSource, Slice]],
) -> Iterator[tuple[PlannedSource, Slice, Keep | None]]:
    """Yield (source, work range, selector) for each work range.

    The selector is the result of `keeper`. Consecutive text files of one split get the same
    selector.
    """
    last_split, keep = None, None
    for source, work_range in slices:
        if keeps_all(source, work_range.use):
            yield source, work_range, None
            continue
        piece = source.pieces.of_file(work_range.file - source.first_file)[work_range.piece]
        if (
            last_split != (source.index, piece, work_range.use)
            or position_of(work_range.format, "") != "whole"
        ):
            last_split, keep = (
                (source.index, piece, work_range.use),
                keeper(source, work_range.use, piece),
            )
        yield source, work_range, keep


def _is_wanted(only: Mapping[int, np.ndarray], file: int, positions: np.ndarray) -> np.ndarray:
    return np.isin(positions, only[file])


def kept_by_plan(source: PlannedSource, use: int, file: int, positions: np.ndarray) -> np.ndarray:
    """Return which documents of a file pass `use` may keep, bool[n]. The file is not read.

    The hash split (`sample`) and the sizes of text files are known from the plan. If
    `chosen_by_content` returns True for the file, the pass keeps only some of the documents that
    have True in the result. Their sizes and fields, which are not in the plan, determine which.
    """
    piece = next(iter(source.pieces.of_file(file - source.first_file)), None)
    keep = None if piece is None else keeper(source, use, piece)
    while isinstance(keep, Choice | ByFields):
        keep = keep.sample
    return np.ones(len(positions), np.bool_) if keep is None else keep(file, positions)


def chosen_by_content(source: PlannedSource, use: int, file: int) -> bool:
    """Return whether the file must be read to know which of its documents pass `use` keeps.

    The expressions of a source select by fields. In the last pass of a fractional `repeat`, the
    sizes of the documents determine the selection. The plan contains these sizes only for text
    files.
    """
    is_text = position_of(*source.formats[file - source.first_file]) == "whole"
    return source.passes is not None or (not is_text and source.kept_of_use(use) < 1)


@dataclass(frozen=True)
class TextReader:
    """A reader that reads work ranges of files and tokenizes their documents.

    Attributes:
        settings: `[documents]` in the recipe.
        vocabulary: The vocabulary of the tokenizer.
        engine: The engine of the tokenizer. None if all sources are token stores.
        template: The chat template, or None.
        uncut_tokens: Documents with at most this many tokens are never cut.
        decoders: State that is kept between work ranges. It affects only the speed.
        clock: Receives the seconds of the stages "read" and "tokenize".
    """

    settings: DocumentKeys
    vocabulary: Vocabulary
    engine: Engine | None
    template: str | None = None
    uncut_tokens: int = 0
    decoders: Decoders | None = None
    clock: Clock = field(default_factory=Clock)

    def read(
        self, source: PlannedSource, work_range: Slice, keep: Keep | None, digest: "Digest"
    ) -> Iterator[ReadDocuments]:
        """Yield the tokenized documents of a work range in batches.

        Args:
            source: The planned source.
            work_range: The work range.
            keep: Selects the documents to read, or None for all.
            digest: Is updated with the documents' text, or with the content ids of token sources.
        """
        if source.in_store:
            yield from self._read_store(source, work_range, keep, digest)
            return
        place = source, work_range.file, work_range.use, file_key(source, work_range.file)
        reading_options = self.settings, self.template, keep
        batches = read_supervised(work_range, source, *reading_options, decoders=self.decoders)
        for batch, conversations in self.clock.steps("read", batches):
            if batch.tokens is not None:
                tokens, trained = self._take_tokens(batch)
                sizes = _add_content(digest, batch, {}, tokens.ids)
            else:
                tokens, trained = self._tokenize(batch, conversations, place)
                # Encoding is fast here, because the engine cached the UTF-8 form in each string.
                sizes = _add_content(digest, batch, conversations)
            # The texts are tokenized before records are joined, so tokens do not depend on
            # neighbours.
            groups = batch.groups and (batch.groups, ids_between(source.source, self.vocabulary))
            yield ReadDocuments(batch.positions, tokens, trained, batch.rejects, sizes, groups)

    def _read_store(
        self, source: PlannedSource, work_range: Slice, keep: Keep | None, digest: "Digest"
    ) -> Iterator[ReadDocuments]:
        """Yield the documents of a work range from the source's token store.

        `digest` is updated with the token ids and media spans.
        """
        batches = source.store.read(source, work_range, keep, self.vocabulary)
        for batch in self.clock.steps("read", batches):
            # A store has no text. Its digest covers the tokens and the media spans instead.
            digest.update(np.ascontiguousarray(batch.tokens.ids).data)
            for trained in batch.trained.values():
                for column in trained.places if len(trained.places.first) else ():
                    digest.update(np.ascontiguousarray(column).data)
            yield batch

    def _take_tokens(self, batch: Batch) -> tuple[Tokens, dict[int, Trained]]:
        """Return (tokens, trained) for a batch of token documents.

        `tokens` has the content tokens. `trained` maps the number of each document with weights or
        masks to its trained spans.
        """
        assert batch.tokens is not None
        with self.clock.stage("tokenize"):
            tokens = take_tokens(batch.tokens, self.settings, self.vocabulary)
        turned_away = {i for i, *_ in tokens.rejected}
        lengths = np.diff(tokens.offsets)
        weights = {i: weight for i, weight in batch.weights.items() if i not in turned_away}
        trained: dict[int, Trained] = {}
        if batch.token_weights is not None:
            for i in range(len(lengths)):
                if i not in turned_away:
                    # `pop` leaves only documents without token weights for `trained_by_weight`.
                    weight, of_token = weights.pop(i, 1.0), self._token_weights(batch, tokens, i)
                    if (
                        new_trained := trained_by_tokens(of_token, weight, int(lengths[i]))
                    ) is not None:
                        trained[i] = new_trained
        return tokens, trained | (trained_by_weight(weights, lengths) if weights else {})

    def _token_weights(self, batch: Batch, tokens: Tokens, i: int) -> np.ndarray:
        """Return the weights of the n content tokens of document `i`, then the weight of its eos.

        The result is float32[n + 1].
        """
        assert batch.tokens is not None and batch.token_weights is not None
        begin, end = batch.tokens.offsets[i : i + 2].tolist()
        weights, n = batch.token_weights[begin:end], int(np.diff(tokens.offsets[i : i + 2])[0])
        roles, ids = self.vocabulary.roles, batch.tokens.ids
        # `take_tokens` removed the bos and eos that packprep adds itself.
        has_bos = self.settings.prepend_bos and begin < end and ids[begin] == roles["bos"]
        if has_bos and len(weights) > n:
            weights = weights[1:]
        # The weight of a removed eos applies to the eos that packprep appends. Without eos, the
        # last token's weight applies.
        of_end = weights[n] if len(weights) > n else (weights[-1] if n else 0)
        return np.append(weights[:n], np.float32(of_end))

    def _tokenize(
        self,
        batch: Batch,
        conversations: Mapping[int, Conversation],
        place: tuple[PlannedSource, int, int, np.uint64],
    ) -> tuple[Tokens, dict[int, Trained]]:
        """Tokenize the texts of a batch.

        Returns (tokens, trained). `trained` maps the number of each supervised document in the
        batch to its trained spans.

        Args:
            batch: The batch of texts.
            conversations: Maps the number of each supervised document to its conversation.
            place: (source, file, pass, key of the file).

        Raises:
            BuildError: If the engine's ids differ from the reference's.
        """
        source, file, repeat, file_key = place
        engine, special_text = self.engine, self.settings.special_text
        assert engine is not None
        try:
            with self.clock.stage("tokenize"):
                tokenized = tokenize_supervised(
                    engine,
                    batch.texts,
                    conversations,
                    special_text,
                    self.vocabulary,
                    self.uncut_tokens,
                )
        except EngineFault as error:
            # The engine reports only the text that failed, so this finds the first document with
            # it.
            i = next(i for i, text in enumerate(batch.texts) if error.text in text)
            where = source, file, batch.positions[i]
            raise _differs(engine, *where, fault(engine, error)) from error
        # The choice depends on keys only, so every run compares the same documents.
        if engine.reference is not None:
            with self.clock.stage("compare"):
                for i in compared(file_key, batch.positions, repeat).tolist():
                    conversation = conversations.get(i)
                    differs = self._difference(batch.texts[i], conversation, tokenized[0], i)
                    if differs:
                        raise _differs(engine, source, file, batch.positions[i], differs)
        return tokenized

    def _difference(
        self, text: str, conversation: Conversation | None, tokens: Tokens, i: int
    ) -> EngineDifference | None:
        """Return the first difference between the engine and the reference in a document's ids.

        Return None if the ids are equal. `text` is the text of document `i`, and `tokens` has the
        engine's ids of all documents in the batch.
        """
        engine, encoding_options = self.engine, (self.settings.special_text, self.vocabulary)
        assert engine is not None
        if conversation is None or not conversation.limited:
            return difference(engine, text, tokens, i, *encoding_options)
        if conversation.trains_all and conversation.places:
            # The text was tokenized in pieces between its media spans, so each piece is compared
            # separately.
            for piece in pieces_of(text, conversation.places):
                alone = tokenize(engine, [piece], *encoding_options)
                if differs := difference(engine, piece, alone, 0, *encoding_options):
                    return differs
        elif conversation.parts and tokens.offsets[i] < tokens.offsets[i + 1]:
            # Each text was tokenized separately. A rejected document has no tokens to compare.
            for text_part in conversation.parts:
                alone = tokenize(
                    engine, [text_part.text], *encoding_options, True, [text_part.strings]
                )
                if differs := chat_difference(engine, text_part.text, alone, 0, True):
                    return differs
        elif not conversation.places and tokens.offsets[i] < tokens.offsets[i + 1]:
            return chat_difference(engine, text, tokens, i, conversation.chat)
        return None


class _Batch(NamedTuple):
    """The documents of a batch that a `DocumentsBuilder` uses."""

    source: int  # index of the source
    ids: np.ndarray  # as `Documents.ids`
    columns: tuple[np.ndarray, ...]  # lengths, position, file, source, repeat, file_key
    trained: dict[int, Trained]  # document's number among these documents → its trained spans
    records: Records | None = None  # None if each document is one record without group_by


class _Digests(NamedTuple):
    """Several running digests that are updated with the same data."""

    digests: Sequence[xxhash.xxh3_128]

    def update(self, data: Any) -> None:
        for digest in self.digests:
            digest.update(data)


Digest = xxhash.xxh3_128 | _Digests


class DocumentsBuilder:
    """A builder that collects the documents of a shard batch by batch."""

    def __init__(
        self,
        recipe: Recipe,
        sources: Sequence[PlannedSource],
        token_dtype: np.dtype,
        marks: Sequence[tuple[np.ndarray, np.ndarray]] | None = None,
        most_bytes: int | None = None,
    ):
        """Create an empty builder.

        Args:
            recipe: The recipe.
            sources: The planned sources of the shard.
            token_dtype: Dtype of the stored tokens.
            marks: For each source, the ids that only tasks may insert, such as the ids of FIM
                tokens, as `objectives.tasks.Marks`. A document that already contains one of these
                ids is rejected. With None, this is not checked.
            most_bytes: Maximum number of text bytes, or None for no limit.
        """
        self._most_bytes = most_bytes
        self._settings, self._sources = recipe.documents, sources
        self._token_dtype, self._marks = token_dtype, marks
        none = (np.empty(0, np.int64),) * 5
        columns = (*none, np.empty(0, np.uint64))
        # The empty batch gives the columns their dtypes if no document is added.
        self._batches = [_Batch(0, np.empty(0, token_dtype), columns, {})]
        self._file_keys: dict[int, np.uint64] = {}
        self._digests = {source.name: xxhash.xxh3_128() for source in sources}
        self.rejected = Rejected()
        self.read = {source.name: 0 for source in sources}
        self.dropped: dict[str, dict[str, int]] = {source.name: {} for source in sources}
        self.text_bytes = 0
        self._passes: dict[str, Counter[int]] = {
            source.name: Counter() for source in sources if source.passes is not None
        }
        self._grouped = {
            source.name: {GROUP_CUTS: 0, UNGROUPED: 0} for source in sources if source.grouping
        }

    def digest(self, source: PlannedSource) -> xxhash.xxh3_128:
        """Return the running digest of the data that was read from a source."""
        return self._digests[source.name]

    def add(self, source: PlannedSource, work_range: Slice, batch: ReadDocuments) -> None:
        """Add a batch of documents of a work range. Documents that cannot be used become rejects.

        Raises:
            SourceError: If there are more than `most_bytes` of text or more than MOST_DOCUMENTS
                documents, or if a document is bad and `bad_documents` is "fail".
        """
        # Records are counted before they are joined, because the ledger counts each record as read.
        rejects_before, n_records = len(self.rejected), len(batch.positions)
        for i, reason, detail in batch.tokens.rejected:
            self.rejected.add(
                source, work_range.use, work_range.file, batch.positions[i], reason, detail
            )
        records: Records | None = None
        if batch.groups is not None:
            batch, records = self._joined(source, work_range, batch)
        lengths = np.diff(batch.tokens.offsets)
        # Other weightings scale the weights of trained spans, so every document needs spans.
        if self._settings.loss_weighting != "token":
            batch = batch._replace(trained=all_supervised(batch.trained, lengths))
        for reject in batch.rejects:
            self.rejected.add(
                source, work_range.use, reject.file, reject.position, reject.reason, reject.detail
            )
        used = lengths >= self._settings.min_tokens
        if (unused := self._unused(source, batch, lengths, used)) or not used.all():
            used[list(unused)] = False
            self._reject(source, work_range, batch, unused, records)
        # Only the rejects of this batch are new, so only these are checked.
        if self._settings.bad_documents == "fail":
            fail_on_bad(
                self.rejected.records(range(rejects_before, len(self.rejected))), work_range.path
            )
        self._append(source, work_range, batch, used, records)
        self.read[source.name] += n_records + len(batch.rejects)
        self.text_bytes += int(batch.text_bytes.sum())
        if self._most_bytes is not None:
            n_read = sum(self.read.values())
            refuse_beyond(work_range.path, n_read, self.text_bytes, self._most_bytes)

    def add_passes(self, source: PlannedSource, counts: Mapping[int, int]) -> None:
        """Add the `ByFields.counts` of a work range."""
        self._passes[source.name].update(counts)

    def _unused(
        self, source: PlannedSource, batch: ReadDocuments, lengths: np.ndarray, used: np.ndarray
    ) -> dict[int, tuple[str, str]]:
        """Return the tokenized documents that must be dropped, for example {3: (reason, detail)}.

        The keys are document numbers in the batch. `lengths`, int64[n], has the number of tokens of
        each document. `used`, bool[n], says which documents have at least `min_tokens` tokens.
        """
        unused: dict[int, tuple[str, str]] = {}
        if not used.all():
            fewest = self._settings.min_tokens
            # Rejected documents have no tokens either, but they already have another reason.
            turned_away = {i for i, _, _ in batch.tokens.rejected}
            for i in np.flatnonzero(~used).tolist():
                if i not in turned_away:
                    detail = f"{lengths[i]} tokens; documents.min_tokens = {fewest}"
                    is_empty = lengths[i] == 0
                    unused[i] = (EMPTY, "no text, or no token of it") if is_empty else (
                        BELOW_MIN_TOKENS, detail
                    )  # fmt: skip
        # `trained` has supervised documents only. Without spans, none of their tokens is trained.
        for i, trained in batch.trained.items():
            if used[i] and not len(trained.spans):
                unused[i] = UNTRAINED, "none of its tokens begins inside of what is trained"
        # An earlier reason is kept, because each document is rejected once.
        if self._marks is not None:
            marked = _marked(batch.tokens, batch.trained, *self._marks[source.index])
            for i, detail in marked.items():
                if used[i] and i not in unused:
                    unused[i] = SENTINEL_IN_TEXT, detail
        return unused

    def _reject(
        self,
        source: PlannedSource,
        work_range: Slice,
        batch: ReadDocuments,
        unused: Mapping[int, tuple[str, str]],
        records: Records | None = None,
    ) -> None:
        """Record the documents in `unused` as rejects, and count their tokens as dropped.

        If `records` is not None, each record of such a document is a reject.
        """
        dropped, lengths = self.dropped[source.name], np.diff(batch.tokens.offsets)
        for i, (reason, detail) in sorted(unused.items()):
            positions = batch.positions[i : i + 1] if records is None else records.of(i).position
            for position in positions.tolist():
                self.rejected.add(source, work_range.use, work_range.file, position, reason, detail)
            if n := int(lengths[i]):
                dropped[reason] = dropped.get(reason, 0) + n

    def _joined(
        self, source: PlannedSource, work_range: Slice, batch: ReadDocuments
    ) -> tuple[ReadDocuments, Records]:
        """Join the records of a batch to documents, and return the documents and their records.

        A record that cannot be used becomes a reject, and its document goes on without it.
        """
        assert batch.groups is not None
        groups, between = batch.groups
        counts, tokens = self._grouped[source.name], batch.tokens
        counts[GROUP_CUTS] += groups.cuts
        counts[UNGROUPED] += groups.alone
        used = np.ones(len(batch.positions), np.bool_)
        used[[i for i, *_ in tokens.rejected]] = False
        if self._marks is not None:
            # Records of groups are never supervised, so the marks of plain documents apply.
            marked = _marked(tokens, {}, *self._marks[source.index])
            details = {i: (SENTINEL_IN_TEXT, marked[i]) for i in marked if used[i]}
            self._reject(source, work_range, batch, details)
            used[list(details)] = False
        joined = join_records(tokens, batch.positions, groups.number, used, between)
        documents = batch._replace(positions=joined.positions, tokens=joined.tokens)
        return documents, joined.records

    def _append(
        self,
        source: PlannedSource,
        work_range: Slice,
        batch: ReadDocuments,
        used: np.ndarray,
        records: Records | None,
    ) -> None:
        """Append the documents of a batch where `used`, bool[n], is True.

        `records` has the records of all documents of the batch, if the source has group_by.
        """
        lengths = np.diff(batch.tokens.offsets)
        ids = batch.tokens.ids if used.all() else batch.tokens.ids[np.repeat(used, lengths)]
        if work_range.file not in self._file_keys:
            self._file_keys[work_range.file] = file_key(source, work_range.file)
        # `numbers[i]` is the number of document i among the used documents.
        numbers = np.cumsum(used) - 1
        trained = {int(numbers[i]): t for i, t in batch.trained.items() if used[i]}
        same = work_range.file, source.index, work_range.use, self._file_keys[work_range.file]
        repeated = (np.repeat(value, int(used.sum())) for value in same)
        columns = (lengths[used], batch.positions[used], *repeated)
        if records is not None:
            # Records of unused documents are left out, since the rejects list these records.
            counts = np.diff(records.offsets)[used]
            records = Records(offsets_of(counts), *records.within(used)[1:])
        added_batch = _Batch(source.index, ids.astype(self._token_dtype), columns, trained, records)
        self._batches.append(added_batch)

    def documents(self) -> Documents:
        """Return all documents that were added, as arrays.

        The documents are in the order of their sources. In a source, they are in the order in which
        they were added.
        """
        # The sort is stable, so batches of one source keep their order.
        batches = sorted(self._batches, key=lambda batch: batch.source)
        lengths, position, file, source, repeat, file_key = map(
            np.concatenate, zip(*(batch.columns for batch in batches), strict=True)
        )
        # In batches, document numbers start at 0. In the result, they count all documents.
        trained: dict[int, Trained] = {}
        first_document = 0
        for batch in batches:
            trained |= {first_document + i: t for i, t in batch.trained.items()}
            first_document += len(batch.columns[0])
        training = None
        if trained or self._settings.loss_weighting != "token":
            training = training_columns(trained, len(position), self._settings.long_answers)
        return Documents(
            np.concatenate([batch.ids for batch in batches]),
            offsets_of(lengths),
            position,
            file,
            source,
            repeat,
            file_key,
            training,
            self.rejected,
            self.read,
            self.dropped,
            {source.name: _said(self._digests[source.name], source) for source in self._sources},
            self._passes,
            _records_of(batches) if self._grouped else None,
            self._grouped,
        )


def _records_of(batches: Sequence[_Batch]) -> Records:
    """Return the records of all documents of some batches."""
    none = np.zeros(0, np.int64)
    counts, records_of_batches = [none], [Records(none, none, none, none)]
    for batch in batches:
        n_documents = len(batch.columns[0])
        # A source without group_by stores no records, so its documents have empty ranges.
        if batch.records is None:
            counts.append(np.zeros(n_documents, np.int64))
        else:
            counts.append(np.diff(batch.records.offsets))
            records_of_batches.append(batch.records)
    columns = zip(*(records[1:] for records in records_of_batches), strict=True)
    return Records(offsets_of(np.concatenate(counts)), *map(np.concatenate, columns))


def read_documents(
    builder: DocumentsBuilder,
    reader: TextReader,
    slices: Iterable[tuple[PlannedSource, Slice]],
    only: Mapping[int, np.ndarray] | None = None,
    progress: Callable[[int, int, int, int], None] | None = None,
) -> Documents:
    """Read and tokenize the documents of a shard's work ranges, in order.

    Args:
        builder: An empty builder that collects the documents.
        reader: The reader for the work ranges.
        slices: (source, work range) pairs.
        only: Maps the index of a file in the plan to the positions of the documents that are read
            from this file. Other files are skipped. None reads the documents that `sample` and
            `repeat` keep.
        progress: Called with the numbers of documents, text bytes, tokens and rejects of each
            batch.

    Returns:
        The documents, with bad documents among the rejects.

    Raises:
        SourceError: As in `DocumentsBuilder.add`.
    """
    taken: Iterable[tuple[PlannedSource, Slice, Keep | None]] = with_keeps(slices)
    if only is not None:
        is_wanted = partial(_is_wanted, only)
        taken = (
            (source, work_range, is_wanted)
            for source, work_range in slices
            if work_range.file in only
        )
    for source, work_range, keep in taken:
        read_into([builder], reader, source, work_range, keep, progress)
    return builder.documents()


def read_into(
    builders: Sequence[DocumentsBuilder],
    reader: TextReader,
    source: PlannedSource,
    work_range: Slice,
    keep: Keep | None,
    progress: Callable[[int, int, int, int], None] | None,
) -> None:
    """Read and tokenize the documents of a work range once, and add them to one or more builders.

    `keep` is the result of `keeper`, and the other arguments are as in `read_documents`.
    """
    first_builder, *_ = builders
    for batch in reader.read(
        source, work_range, keep, _Digests([b.digest(source) for b in builders])
    ):
        rejects_before = len(first_builder.rejected)
        for builder in builders:
            builder.add(source, work_range, batch)
        if progress:
            count = len(batch.positions) + len(batch.rejects)
            tokens = int(batch.tokens.offsets[-1] - batch.tokens.offsets[0])
            n_bytes = int(batch.text_bytes.sum())
            progress(count, n_bytes, tokens, len(first_builder.rejected) - rejects_before)
    # The counts are complete only after the last batch of the work range.
    if (chosen := by_fields(keep)) is not None:
        for builder in builders:
            builder.add_passes(source, chosen.counts)


def _marked(
    tokens: Tokens, trained: Mapping[int, Trained], of_plain: np.ndarray, of_supervised: np.ndarray
) -> dict[int, str]:
    """Return the documents with an id that only tasks may insert, as document number → detail.

    `detail` is the text for the reject. A document is limited if `Trained.limited` is True for it.
    Limited documents draw from fewer tasks, so fewer ids are forbidden in them.

    Args:
        tokens: The documents.
        trained: Maps a document's number to its trained spans.
        of_plain: Ascending ids that are forbidden in documents that are not limited.
        of_supervised: Ids that are forbidden in limited documents. All are also in `of_plain`.
    """
    # `of_plain` is sorted, so the smallest and largest id decide for most batches.
    ids, offsets = tokens.ids, tokens.offsets
    if not (len(of_plain) and len(ids)) or ids.max() < of_plain[0] or ids.min() > of_plain[-1]:
        return {}
    places = np.flatnonzero(np.isin(ids, of_plain))
    supervised = np.zeros(len(offsets) - 1, np.bool_)
    supervised[[i for i, t in trained.items() if t.limited]] = True
    owner = np.searchsorted(offsets, places, side="right") - 1
    places = places[~supervised[owner] | np.isin(ids[places], of_supervised)]
    reason = "which a task that its source draws writes itself"
    return {
        i: f"token {place - int(offsets[i])} is the special id {int(ids[place])}, {reason}"
        for i, place in _firsts(places, offsets)
    }


def refuse_beyond(path: str, documents: int, text_bytes: int, most_bytes: int) -> None:
    """Check that a shard has neither too many documents nor too much text.

    Args:
        path: The file that was read last, for messages.
        documents: Number of documents so far.
        text_bytes: Number of text bytes so far.
        most_bytes: Maximum number of text bytes.

    Raises:
        SourceError: If the shard has more than MOST_DOCUMENTS documents or more than `most_bytes`
            of text.
    """
    if documents > MOST_DOCUMENTS:
        raise SourceError(
            f"{path}: a shard with this file has more than {MOST_DOCUMENTS} documents\n"
            "hint: lower output.shard_text_bytes or leave out empty documents, and build into"
            " another folder"
        )
    if text_bytes > most_bytes:
        raise SourceError(
            f"{path}: a shard with this file has more than {most_bytes} bytes of text, many times"
            " the estimate from a sample. The file expands too much\n"
            "hint: check the file, and remove it from the recipe or raise output.shard_text_bytes."
            " Then build into another folder"
        )


def _said(digest: xxhash.xxh3_128, source: PlannedSource) -> str:
    return f"{OF_TOKENS}{digest.hexdigest()}" if source.in_store else digest.hexdigest()


OF_TOKENS = "tokens-"
"""The prefix of a digest that covers the tokens of a store, and not the text of a source."""


def _add_content(
    digest: Digest,
    batch: Batch,
    conversations: Mapping[int, Conversation],
    ids: np.ndarray | None = None,
) -> np.ndarray:
    """Add a batch to a source's digest, and return the text bytes of each document, int64[n].

    For a batch of texts, the texts and media spans are added. For a batch of tokens, the content
    tokens in `ids` are added. A media position or a stored token counts as TOKEN_TEXT_BYTES.
    """
    if batch.tokens is not None:
        assert ids is not None
        # A fixed dtype and byte order give the same digest for every machine and stored dtype.
        digest.update(ids.astype("<i4", copy=False).data)
        return TOKEN_TEXT_BYTES * np.diff(batch.tokens.offsets)
    sizes = np.empty(len(batch.texts), np.int64)
    for i, text in enumerate(batch.texts):
        encoded = text.encode()
        digest.update(encoded)
        sizes[i] = len(encoded)
        if i in conversations and (places := conversations[i].places):
            digest.update(content_of(places))
            sizes[i] += TOKEN_TEXT_BYTES * conversations[i].slots
    return sizes


def text_digest(
    recipe: Recipe,
    source: PlannedSource,
    slices: Iterable[Slice],
    vocabulary: Vocabulary,
    decoders: Decoders,
    template: str | None,
) -> str:
    """Return the digest of the text in a source's work ranges.

    It equals the digest in `Documents.text_digests`, but the texts are not tokenized.
    """
    digest = xxhash.xxh3_128()
    for _, work_range, keep in with_keeps((source, work_range) for work_range in slices):
        reading_options = recipe.documents, template, keep
        for batch, conversations in read_supervised(
            work_range, source, *reading_options, decoders=decoders
        ):
            tokens = (
                None
                if batch.tokens is None
                else take_tokens(batch.tokens, recipe.documents, vocabulary).ids
            )
            _add_content(digest, batch, conversations, tokens)
    return digest.hexdigest()


def _differs(
    engine: Engine,
    source: PlannedSource,
    file: int,
    position: int,
    engine_difference: EngineDifference,
) -> BuildError:
    """Return the error for a document if the engine's ids differ from the reference's ids."""
    name = source.files.names[file - source.first_file]
    return BuildError(
        f"engine {engine.name} {engine.version} differs from the reference in the document at"
        f" {position} of {name!r} "
        f"of source {source.name!r}: {engine_difference}\n"
        'hint: set engine = "reference", and build into another folder'
    )


def fail_on_bad(records: Iterable[dict[str, Any]], path: str) -> None:
    """Check that none of a file's rejected documents is bad, as `is_bad` defines it.

    Args:
        records: Records of rejected documents, as for the rejects file.
        path: Path or URL of the file, for the message.

    Raises:
        SourceError: For the first bad document.
    """
    for record in records:
        if is_bad(record["reason"]):
            raise SourceError(
                f"{path}: document at {record['position']}: {record['reason']}:"
                f" {record['detail']}\n"
                'hint: fix the file, or set documents.bad_documents = "reject" to count and log'
                " such documents"
            )
