"""What one shard reads: parts of files → token documents, as columns. After this there is no Python object per document."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import xxhash

from packprep.buffers import Buffers, Column
from packprep.clock import Clock
from packprep.corpus.conversations import MarkReader
from packprep.corpus.engines.engine import Engine, EngineFault
from packprep.corpus.planning import Extent, PlannedSource
from packprep.corpus.proof import EngineDifference, compared, difference, fault
from packprep.corpus.readers import BAD_REASONS, TOKEN_TEXT_BYTES, Batch, Choice, Decoders, Keep, read
from packprep.corpus.token_documents import take_tokens
from packprep.corpus.tokenization import TEXT_REASONS, Tokens
from packprep.corpus.training import Trained, Training, tokenize_marked, training_columns
from packprep.corpus.vocabulary import Vocabulary
from packprep.errors import EngineRevoked, SourceError
from packprep.randomness import REPEAT, SAMPLE, bits64, segment_key, text_key
from packprep.recipe import Recipe

EMPTY = "empty"
BELOW_MIN_TOKENS = "below_min_tokens"
UNTRAINED = "untrained"
MOST_DOCUMENTS = 1 << 22
"""Of one shard: a document, used or rejected, takes up to some 200 bytes in memory beside its text."""


class Documents(NamedTuple):
    """Token documents, one array a column."""

    ids: np.ndarray  # uint16 or int32[tokens]: all documents, one after the other
    offsets: np.ndarray  # int64[D + 1]: where each begins
    position: np.ndarray  # int64[D]: byte of its line, row number, or number in an index
    file: np.ndarray  # int64[D]: index into the plan's files
    source: np.ndarray  # int64[D]
    repeat: np.ndarray  # int64[D]: which use
    file_key: np.ndarray  # uint64[D]: key of (seed, source name, file name)
    training: Training | None = None  # None: no document says what of it is trained


class Rejected:
    """Documents that could not be used: where and why; one record a line of the rejects file.

    They are kept as columns: a file of millions of bad lines costs some 100 bytes for each, not an object.
    """

    def __init__(self) -> None:
        self._places = [array("q") for _ in range(3)]  # file, use, position
        self._reasons, self._ends = array("I"), array("q")
        self._details = bytearray()
        self._names: dict[int, tuple[str, str]] = {}  # file → its source's name and its own
        self._known: dict[str, int] = {}  # reason → its number

    def __len__(self) -> int:
        return len(self._reasons)

    def add(self, source: PlannedSource, use: int, file: int, position: int, reason: str, detail: str) -> None:
        """Note one document. `file` is the index into the plan's files."""
        if file not in self._names:
            self._names[file] = source.name, source.files[file - source.first_file].name
        for column, value in zip(self._places, (file, use, position), strict=True):
            column.append(int(value))
        self._reasons.append(self._known.setdefault(reason, len(self._known)))
        self._details += detail.encode()
        self._ends.append(len(self._details))

    def _records(self, order: Iterable[int]) -> Iterator[dict[str, Any]]:
        reasons = list(self._known)
        for i in order:
            file, use, position = (column[i] for column in self._places)
            source, name = self._names[file]
            detail = self._details[self._ends[i - 1] if i else 0 : self._ends[i]].decode()
            record = {"source": source, "file": name, "position": position, "repeat": use}
            yield {**record, "reason": reasons[self._reasons[i]], "detail": detail}

    def since(self, first: int) -> Iterator[dict[str, Any]]:
        """The records from number `first` on, as they were noted."""
        return self._records(range(first, len(self)))

    def in_order(self) -> Iterator[dict[str, Any]]:
        """All records by source, file, use and position: independent of how the work was batched."""
        rank = {file: i for i, file in enumerate(sorted(self._names, key=lambda file: self._names[file]))}
        file, use, position = self.places()
        ranks = np.zeros(max(rank, default=0) + 1, np.int64)
        ranks[list(rank)] = list(rank.values())
        return self._records(np.lexsort((position, use, ranks[file])))

    def places(self) -> list[np.ndarray]:
        """[file, use, position], int64 each, of the records as they were noted."""
        return [np.array(column, np.int64) for column in self._places]

    def counts(self, source: str) -> dict[str, int]:
        """reason → how many documents of a source."""
        own = [file for file, (name, _) in self._names.items() if name == source]
        of_source = np.isin(self.places()[0], own)
        found = np.bincount(np.array(self._reasons, np.int64)[of_source], minlength=len(self._known))
        return {reason: int(count) for reason, count in zip(self._known, found, strict=True) if count}


def is_bad(reason: str) -> bool:
    """Whether a reject counts against `max_bad_fraction`: a damaged document, not one that the recipe leaves out."""
    return reason in BAD_REASONS or reason in TEXT_REASONS


def _sample_bounds(source: PlannedSource) -> tuple[int, int]:
    low, high = (int(Fraction(bound) * 2**53) for bound in source.source.sample)
    return low, high


def in_sample(source: PlannedSource, file: int, positions: np.ndarray) -> np.ndarray:
    """bool[n]: the documents that `sample` keeps: u(file's relative name, position) in [low, high), whatever the seed and
    the source's name. file: of the plan; positions: int64[n]."""
    low, high = _sample_bounds(source)
    name = source.files[file - source.first_file].name
    u = (bits64(segment_key(text_key("sample", name), positions, 0, 0), SAMPLE) >> np.uint64(11)).astype(np.int64)
    return (u >= low) & (u < high)


def keeps_all(source: PlannedSource, use: int) -> bool:
    """Whether neither `sample` nor a fractional `repeat` leaves documents of a use out."""
    return _samples_all(source) and source.kept_of_use(use) == 1


def keeper(source: PlannedSource, use: int, piece: int) -> Keep | None:
    """The documents of a piece that `sample` and a fractional `repeat` keep in one use; None: all.

    The fraction is a Choice; of text files, whose sizes the plan has, what it comes to. In a plan of law 1 it is a coin for
    each document.
    """
    sample = None if _samples_all(source) else partial(in_sample, source)
    part = source.kept_of_use(use)
    if part == 1:
        return sample
    if source.law == 1:
        return partial(_kept_by_coin, source, use)
    first = int(source.pieces.at(np.array([piece])).file[0])
    name, number = source.files.names[first], int(source.pieces.at(np.array([piece])).part[0])
    key = segment_key(text_key(source.seed, source.name, name), number, use, 0)
    choice = Choice(key, int(part * 2**32), sample)
    if source.formats[first][0] != "text":
        return choice
    chosen = {}
    for i in source.files_of_piece(piece):
        file = source.first_file + i
        chosen[file] = choice(file, np.zeros(1, np.int64), source.files.sizes[i : i + 1])
    return lambda file, positions: chosen[file]


def kept_by_plan(source: PlannedSource, use: int, file: int, positions: np.ndarray) -> np.ndarray:
    """bool[n]: which documents of a file of the plan a use may keep, as far as the plan tells: by `sample`, by the sizes of
    text files, in a plan of law 1 by their keys. Where `chosen_by_size`, only the file tells the rest."""
    piece = next(iter(source.pieces.of_file(file - source.first_file)), None)
    keep = None if piece is None else keeper(source, use, piece)
    if isinstance(keep, Choice):
        keep = keep.sample
    return np.ones(len(positions), np.bool_) if keep is None else keep(file, positions)


def chosen_by_size(source: PlannedSource, use: int, file: int) -> bool:
    """Whether which documents of a file a use keeps follows from their sizes, which the plan does not have."""
    is_text = source.formats[file - source.first_file][0] == "text"
    return source.law > 1 and not is_text and source.kept_of_use(use) < 1


def _samples_all(source: PlannedSource) -> bool:
    return _sample_bounds(source) == (0, 2**53)


def _kept_by_coin(source: PlannedSource, use: int, file: int, positions: np.ndarray) -> np.ndarray:
    """Law 1's choice: u(key of the document in its last use) < fraction."""
    kept = in_sample(source, file, positions)
    name = source.files[file - source.first_file].name
    key = segment_key(text_key(source.seed, source.name, name), positions, use, 0)
    return kept & ((bits64(key, REPEAT) >> np.uint64(11)).astype(np.int64) < int(source.kept_of_use(use) * 2**53))


def _keep_only(only: Mapping[int, np.ndarray]) -> Callable[[int, np.ndarray], np.ndarray]:
    return lambda file, positions: np.isin(positions, only[file])


@dataclass
class Reading:
    """What reading one shard gives: documents, rejects, and each source's counts and digest of the text bytes read."""

    documents: Documents
    rejected: Rejected
    read: dict[str, int]  # source → documents read
    dropped_tokens: dict[str, dict[str, int]]  # source → reason → tokens of documents left out after tokenization
    text_digests: dict[str, str]  # source → xxh3-128 of the text bytes; of tokens, of the content's ids as int32
    text_bytes: dict[str, int]  # source → text bytes; a token of a source of tokens counts as TOKEN_TEXT_BYTES


def read_documents(
    recipe: Recipe,
    sources: Sequence[PlannedSource],
    extents: Iterable[tuple[PlannedSource, Extent]],
    engine: Engine,
    vocabulary: Vocabulary,
    token_dtype: np.dtype,
    decoders: Decoders | None = None,
    progress: Callable[[int, int, int, int], None] | None = None,
    marks: MarkReader | None = None,
    only: Mapping[int, np.ndarray] | None = None,
    clock: Clock | None = None,
    most_bytes: int | None = None,
    buffers: Buffers | None = None,
    expected_tokens: int = 1024,
) -> Reading:
    """Read and tokenize the documents of `extents`, in order.

    marks: reads loss_spans and messages; None: they are not looked at.
    only: file → positions of the documents to read, of those files alone; None: what `sample` and `repeat` keep.
    progress: called with (documents, text bytes, tokens, rejects) of each batch.
    clock: gets the seconds of the stages read and tokenize. buffers: hold the documents' columns; None: their own.
    expected_tokens: about how many there will be; only speed depends on it.
    most_bytes: SourceError once the text is more than that, or there are more than MOST_DOCUMENTS; None: any amount.
    A bad document is a reject; with bad_documents = "fail" it is a SourceError that names file and position.
    """
    clock, buffers = clock or Clock(), buffers or Buffers()
    ids, offsets = Column(buffers, "ids", token_dtype, expected_tokens), Column(buffers, "offsets", np.int64)
    columns = [Column(buffers, name, np.int64) for name in ("position", "file", "source", "repeat")]
    keys = Column(buffers, "file_key", np.uint64)
    offsets.extend(np.zeros(1, np.int64))
    rejected = Rejected()
    counts = {source.name: 0 for source in sources}
    dropped: dict[str, dict[str, int]] = {source.name: {} for source in sources}
    digests = {source.name: xxhash.xxh3_128() for source in sources}
    text_bytes = {source.name: 0 for source in sources}
    file_keys: dict[int, np.uint64] = {}
    fewest = recipe.documents.min_tokens
    special_text = recipe.documents.special_text
    trained: dict[int, Trained] = {}
    for source, extent in extents:
        keep = keeper(source, extent.use, extent.piece) if only is None else _keep_only(only)
        for part in source.parts(extent):
            if only is not None and part.file not in only:
                continue
            if part.file not in file_keys:
                name = source.files[part.file - source.first_file].name
                file_keys[part.file] = text_key(source.seed, source.name, name)
            for batch in clock.steps("read", read(part, source.source.text_key, keep, decoders=decoders, marks=marks)):
                before = len(rejected)
                for reject in batch.rejects:
                    rejected.add(source, extent.use, reject.file, reject.position, reject.reason, reject.detail)
                marked: dict[int, Trained] = {}
                if batch.tokens is not None:
                    with clock.stage("tokenize"):
                        tokens = take_tokens(batch.tokens, recipe.documents, vocabulary)
                    batch_bytes = _add_content(digests[source.name], batch, tokens.ids)
                else:
                    place = source, part.file, extent.use, file_keys[part.file]
                    tokens, marked = _tokenized(batch, place, engine, special_text, vocabulary, clock)
                    # After the engine, which leaves the UTF-8 of a text with the text.
                    batch_bytes = _add_content(digests[source.name], batch)
                for i, reason, detail in tokens.rejected:
                    rejected.add(source, extent.use, part.file, batch.positions[i], reason, detail)
                if recipe.documents.bad_documents == "fail":
                    _fail_on_bad(rejected.since(before), part.path)
                lengths, ids_before = np.diff(tokens.offsets), ids.size
                used = lengths >= fewest
                untrained = [i for i, part_trained in marked.items() if used[i] and not len(part_trained.spans)]
                used[untrained] = False
                if not used.all():
                    turned_away = {i for i, _, _ in tokens.rejected}
                    for i in map(int, np.flatnonzero(~used)):
                        if i in turned_away:
                            continue
                        n = int(lengths[i])
                        reason = EMPTY if n == 0 else BELOW_MIN_TOKENS
                        detail = f"{n} tokens; documents.min_tokens = {fewest}" if n else "no text, or no token of it"
                        if i in untrained:
                            reason, detail = UNTRAINED, "none of its tokens begins inside of what is trained"
                        rejected.add(source, extent.use, part.file, batch.positions[i], reason, detail)
                        if n:
                            dropped[source.name][reason] = dropped[source.name].get(reason, 0) + n
                    ids.extend(tokens.ids[np.repeat(used, lengths)])
                else:
                    ids.extend(tokens.ids)
                offsets.extend(np.cumsum(lengths[used]) + ids_before)
                count = int(used.sum())
                if marked:
                    numbers = columns[0].size + np.cumsum(used) - 1
                    trained.update({int(numbers[i]): marked[i] for i in marked if used[i]})
                columns[0].extend(batch.positions[used])
                for column, value in zip(columns[1:], (part.file, source.index, extent.use), strict=True):
                    column.extend(value, count)
                keys.extend(file_keys[part.file], count)
                counts[source.name] += len(batch.positions) + len(batch.rejects)
                if most_bytes is not None and sum(counts.values()) > MOST_DOCUMENTS:
                    raise SourceError(
                        f"{part.path}: one shard's part of it and of other files has more than {MOST_DOCUMENTS} documents. Set "
                        "output.shard_text_bytes to less, or leave empty documents out, and build into another folder"
                    )
                text_bytes[source.name] += batch_bytes
                if most_bytes is not None and sum(text_bytes.values()) > most_bytes:
                    raise SourceError(
                        f"{part.path}: one shard's part of it and of other files holds more than {most_bytes} bytes of text, "
                        "many times what a sample let expect: the file expands beyond measure. Look at it, take it out of "
                        "the recipe, or build with a larger output.shard_text_bytes into another folder"
                    )
                if progress:
                    read_now = len(batch.positions) + len(batch.rejects)
                    progress(read_now, batch_bytes, int(lengths.sum()), len(rejected) - before)
    position, file, source_index, repeat = (column.array() for column in columns)
    training = training_columns(trained, len(position))
    return Reading(
        Documents(ids.array(), offsets.array(), position, file, source_index, repeat, keys.array(), training),
        rejected,
        counts,
        dropped,
        {name: digest.hexdigest() for name, digest in digests.items()},
        text_bytes,
    )


def _add_content(digest: xxhash.xxh3_128, batch: Batch, ids: np.ndarray | None = None) -> int:
    """Add a batch's texts to the digest of a source, or its content's ids where it has tokens; their text bytes."""
    if batch.tokens is not None:
        assert ids is not None
        digest.update(ids.astype("<i4", copy=False).data)
        return TOKEN_TEXT_BYTES * len(batch.tokens.ids)
    size = 0
    for text in batch.texts:
        encoded = text.encode()
        digest.update(encoded)
        size += len(encoded)
    return size


def text_digest(
    recipe: Recipe,
    source: PlannedSource,
    extents: Iterable[Extent],
    vocabulary: Vocabulary,
    decoders: Decoders,
    marks: MarkReader | None,
) -> str:
    """The digest in `text_digests` that `read_documents` gives of these extents of a source, without tokenization."""
    digest = xxhash.xxh3_128()
    for extent in extents:
        keep = keeper(source, extent.use, extent.piece)
        for part in source.parts(extent):
            for batch in read(part, source.source.text_key, keep, decoders=decoders, marks=marks):
                tokens = None if batch.tokens is None else take_tokens(batch.tokens, recipe.documents, vocabulary).ids
                _add_content(digest, batch, tokens)
    return digest.hexdigest()


def _tokenized(
    batch: Batch,
    place: tuple[PlannedSource, int, int, np.uint64],
    engine: Engine,
    special_text: str,
    vocabulary: Vocabulary,
    clock: Clock,
) -> tuple[Tokens, dict[int, Trained]]:
    """The ids of a batch's texts, and what is trained of them; EngineRevoked where the engine is caught in a difference.

    place: source, file, use, key of the file
    """
    source, file, use, file_key = place
    try:
        with clock.stage("tokenize"):
            tokens, marked = tokenize_marked(engine, batch.texts, batch.marks, special_text, vocabulary)
    except EngineFault as error:
        position = batch.positions[batch.texts.index(error.text)]
        raise _revoked(engine, source, file, use, position, fault(engine, error)) from error
    if engine.reference is not None:
        with clock.stage("compare"):
            for i in compared(file_key, batch.positions, use).tolist():
                text, mark = batch.texts[i], batch.marks[i]
                if mark is None and (found := difference(engine, text, tokens, i, special_text, vocabulary)):
                    raise _revoked(engine, source, file, use, batch.positions[i], found)
    return tokens, marked


def _revoked(
    engine: Engine, source: PlannedSource, file: int, use: int, position: int, found: EngineDifference
) -> EngineRevoked:
    """The error of a document of which an engine and the reference make different things."""
    name = source.files[file - source.first_file].name
    note = {
        "engine": engine.name, "version": engine.version, "source": source.name, "file": name,
        "position": int(position), "repeat": int(use), **found._asdict(),
    }  # fmt: skip
    return EngineRevoked(
        f"engine {engine.name} {engine.version} differs from the reference in the document at {position} of {name!r} "
        f"of source {source.name!r}: {found}. The build stops; run the same command again, and it begins anew with the "
        "reference engine",
        note,
    )


def _fail_on_bad(records: Iterable[dict[str, Any]], path: str) -> None:
    for record in records:
        if is_bad(record["reason"]):
            raise SourceError(
                f"{path}: document at {record['position']}: {record['reason']}: {record['detail']}; "
                'mend the file, or set documents.bad_documents = "reject" to count and log such documents'
            )
