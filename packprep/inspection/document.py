"""Find a document: the segments that contain it, or the reason why none does.

`first_document` shows in one line how the first document was read.

```
source, file, position ─┬► shards that may hold it, by the plan ─► its segments, rejects
                        └► the source file, if available: its text, its tokens, its neighbours
```
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from packprep.building.plan import Plan
from packprep.building.removal import REMOVED
from packprep.conversations.supervision import Conversation, read_supervised
from packprep.conversations.training import tokenize_supervised
from packprep.dataset.segments import Records, Segments
from packprep.documents.reading import (
    ReadDocuments,
    chosen_by_content,
    file_key,
    in_sample,
    kept_by_plan,
    take_tokens,
    with_keeps,
)
from packprep.errors import DatasetError, PackprepError, RecipeError
from packprep.format.json_files import decode, rejects_name
from packprep.inspection.opened import OpenedDataset, check_source, opened
from packprep.inspection.terminal import DIM, HEAD, Page, page
from packprep.inspection.text import special
from packprep.messages import counted, one_line, visible
from packprep.restoring import documents_at, sound_segments
from packprep.sources.formats import Batch, Reject, position_of
from packprep.sources.passes import ByFields, ReadFields
from packprep.sources.slices import PlannedSource, place_of
from packprep.storage import Folder
from packprep.tokenizer.texts import SPECIAL, TextPiece, TokenTexts

MOST_FILES = 20  # Maximum number of described files that have a document at the position.
SHOWN_CHARACTERS = 400  # Number of characters kept from the start of the document.
END = np.iinfo(np.int64).max


def describe_document(
    directory: str | os.PathLike | Folder,
    name: str | None,
    place: str,
    moved: Mapping[str, str],
    from_plan: bool = False,
) -> dict[str, Any]:
    """Return the segments of a document, or why it has none, as JSON-compatible values.

    Args:
        directory: Directory or URL of the dataset.
        name: Name of the source, or None if the dataset has only one.
        place: "FILE:POSITION", with the file's name in the plan, or "POSITION" for all files.
        moved: As in `describe_row`.
        from_plan: As in `describe_row`.

    Returns:
        A dict with these keys:

        - directory, source, position, shards, shards_searched
        - more_files: number of further files that have a document at the position, but are not in
          `files`
        - files: [{file, document, text, tokens, not_read, before, after, uses}]

        `document` is the position of the document. It differs from `position` if group_by joined
        the record at `position` to another record. `text` is the start of the document. If the file
        was not read, `text` and `tokens` are None, and `not_read` has the reason. If no document is
        at the position, `before` and `after` are the nearest known positions.

        `uses` is [{use, outcome, why, segments, left_out, records}], with an entry per pass. The
        outcome is "used", "removed", "rejected", "not sampled", "filtered", "not repeated",
        "absent" or "lost". `records` is [{position, tokens}], the records that group_by joined,
        otherwise [].

    Raises:
        RecipeError: If the source or file does not exist, or `place` is invalid.
        DatasetError: If the dataset is damaged.
    """
    with opened(directory, moved, from_plan) as data:
        plan = data.usable_plan
        source = _source(plan, name)
        # The plan says which shards read a position, so no other shard is searched.
        file, position = place_of(source, place)
        wanted_files = [file] if file is not None else _files_that_reach(source, position)
        shards = source.shards_of(_pieces_of(source, wanted_files, position), plan.shards).tolist()
        uses = _Found(data, source, wanted_files, position)
        for number in shards:
            uses.search(number)
        # A file is described if its document was found, or if no other file is possible.
        file_indices = [file] if file is not None else uses.files()
        if not file_indices and len(source.files) == 1:
            file_indices = [0]
        return {
            "directory": str(data.local.out),
            "source": source.name,
            "position": position,
            "shards": plan.shards,
            "shards_searched": len(shards),
            "more_files": max(0, len(file_indices) - MOST_FILES),
            "files": [uses.describe(plan, i) for i in file_indices[:MOST_FILES]],
        }


def _source(plan: Plan, name: str | None) -> PlannedSource:
    names = [source.name for source in plan.sources]
    if name is None:
        if len(names) > 1:
            raise RecipeError(
                f"--doc: the dataset has several sources: {', '.join(names)}"
                "\nhint: add --source NAME"
            )
        return plan.sources[0]
    check_source(name, names)
    return plan.sources[names.index(name)]


def _files_that_reach(source: PlannedSource, position: int) -> list[int]:
    """Return the indices of files that may have a document at `position`.

    The format and the size of a file determine whether this is possible.
    """
    reach = []
    for i, kind in enumerate(source.formats):
        counted = position_of(*kind)
        if position == 0 or (
            counted != "whole" and (counted != "byte" or position < int(source.files.sizes[i]))
        ):
            reach.append(i)
    return reach


def _pieces_of(source: PlannedSource, files: list[int], position: int) -> np.ndarray:
    """Return the indices of the splits of `files` that may contain `position`, int64[n]."""
    if len(files) == len(source.files) > 1000:
        return np.arange(len(source.pieces))
    pieces: list[int] = []
    for i in files:
        pieces += source.pieces_at(i, np.array([position])).tolist()
    return np.array(pieces, np.int64)


class _Found:
    """The segments and rejects that were found for one position.

    The position is searched in several files of a source. Each file may have one document at the
    position.
    """

    def __init__(self, data: OpenedDataset, source: PlannedSource, files: list[int], position: int):
        self._data, self._source, self._position = data, source, position
        self._eos_after_segment = data.usable_plan.recipe.documents.eos_after_segment
        self._files = np.array(files, np.int64) + source.first_file
        # Keys are (file of the plan, pass).
        self._segments: dict[tuple[int, int], list[dict[str, Any]]] = {}
        self._rejects: dict[tuple[int, int], dict[str, Any]] = {}
        self._records: dict[tuple[int, int], list[dict[str, Any]]] = {}
        self._document_of: dict[int, int] = {}  # file of the plan → position of its document
        self._before: dict[int, int] = {}
        self._after: dict[int, int] = {}

    def files(self) -> list[int]:
        """Return the indices in the source of the files with a document at the position, ascending.

        A file is included if its document is used or rejected.
        """
        file_indices = {file for file, _ in (*self._segments, *self._rejects)}
        return sorted(file - self._source.first_file for file in file_indices)

    def search(self, number: int) -> None:
        """Search shard `number` and its rejects file for documents at the position."""
        with self._data.shard(number) as shard:
            segments = Segments.of_arrays(shard.arrays)
            file, doc = segments.file, segments.doc
            of_document = (doc == self._position) & np.isin(file, self._files)
            if segments.records is not None:
                of_document = self._joined(segments, segments.records)
            chosen = np.flatnonzero(of_document & segments.has_tokens)
            if len(self._files) == 1:
                self._note_neighbours(int(self._files[0]), doc[file == self._files[0]])
            if len(chosen):
                # Most shards have no match, and only a match needs the computed columns.
                stored = sound_segments(self._data.usable_plan, shard)
                for g in chosen.tolist():
                    self._note(number, stored, g)
        for record in _rejects(self._data, number):
            if record["source"] == self._source.name:
                self._note_reject(record)

    def _joined(self, segments: Segments, records: Records) -> np.ndarray:
        """Return which segments have a document with a record at the position, bool[m].

        The records of these documents are noted.
        """
        of_document, owner = np.zeros(len(segments), np.bool_), records.owner
        has_position = (records.position == self._position) & np.isin(
            segments.file[owner], self._files
        )
        for g in owner[has_position].tolist():
            key = file, use = int(segments.file[g]), int(segments.repeat[g])
            self._document_of[file] = doc = int(segments.doc[g])
            self._records[key] = records.of(g).listed()
            of_document |= (
                (segments.file == file) & (segments.repeat == use) & (segments.doc == doc)
            )
        alone = (segments.doc == self._position) & np.isin(segments.file, self._files)
        return of_document | alone

    def _note_neighbours(self, file: int, positions: np.ndarray) -> None:
        positions_before, positions_after = (
            positions[positions < self._position],
            positions[positions > self._position],
        )
        if len(positions_before):
            self._before[file] = max(int(positions_before.max()), self._before.get(file, 0))
        if len(positions_after):
            self._after[file] = min(int(positions_after.min()), self._after.get(file, END))

    def _note(self, number: int, stored: Segments, g: int) -> None:
        data = self._data
        in_shard = int(stored.row[g])
        row = int(data.first_rows[number]) + in_shard
        begin, slots = int(stored.first_slot[g]), int(stored.slots[g])
        start, use = int(stored.start[g]), int(stored.repeat[g])
        self._segments.setdefault((int(stored.file[g]), use), []).append(
            {
                "tokens": [start, start + int(stored.tokens[g])],
                "row": row,
                "segment": g - int(np.searchsorted(stored.row, in_shard)) + 1,
                "slots": [begin, begin + slots],
                "task": data.dataset.tasks[int(stored.task[g])]["name"],
                "trained": int(data.dataset.row(row).loss_mask[begin : begin + slots].sum()),
                "shard": data.dataset.manifest["shards"][number]["file"],
                "ends_document": None if self._eos_after_segment else bool(stored.eos[g]),
            }
        )

    def _note_reject(self, record: Mapping[str, Any]) -> None:
        names = self._source.files.names
        for file in self._files.tolist():
            if names[file - self._source.first_file] != record["file"]:
                continue
            if record["position"] == self._position:
                self._rejects[file, record["repeat"]] = dict(record)
            elif len(self._files) == 1:
                self._note_neighbours(file, np.array([record["position"]]))

    def describe(self, plan: Plan, i: int) -> dict[str, Any]:
        """Return the description of the document in file i of the source."""
        source, file = self._source, self._source.first_file + i
        seen = any(
            (file, use) in self._segments or (file, use) in self._rejects
            for use in range(source.uses)
        )
        # With group_by, the record may belong to a document at another position.
        position = self._document_of.get(file, self._position)
        read = _read_again(plan, source, i, position, bool(self._segments))
        exists = seen or read.exists
        # The file itself gives the best neighbours. Without it, segments and rejects give some.
        position_before, position_after = read.before, read.after
        if position_before is None and position_after is None and not exists:
            position_before, position_after = self._before.get(file), self._after.get(file)
        uses = [self._use(plan, file, use, read, exists) for use in range(source.uses)]
        return {
            "file": source.files.names[i],
            "document": position,
            "text": read.text,
            "tokens": read.tokens,
            "not_read": read.error,
            "before": None if exists else position_before,
            "after": None if exists else position_after,
            "uses": uses,
        }

    def _use(
        self, plan: Plan, file: int, use: int, read: "_ReadAgain", exists: bool | None
    ) -> dict[str, Any]:
        described: dict[str, Any] = {"use": use, "why": None, "segments": [], "left_out": []}
        described["records"] = self._records.get((file, use), [])
        # Segments and rejects are certain. All other outcomes are derived from the plan.
        if segments := self._segments.get((file, use)):
            segments.sort(key=lambda segment: segment["tokens"])
            left_out = list(_left_out(plan, segments, read.tokens))
            return {**described, "outcome": "used", "segments": segments, "left_out": left_out}
        if record := self._rejects.get((file, use)):
            if record["reason"] == REMOVED:
                return {**described, "outcome": REMOVED, "why": record["detail"]}
            return {
                **described,
                "outcome": "rejected",
                "why": f"{record['reason']}: {record['detail']}",
            }
        if exists is False:
            return {
                **described,
                "outcome": "absent",
                "why": "the file has no document at this position",
            }
        # The document exists, but has no segment and no reject. So the plan should exclude it.
        positions = np.array([self._position], np.int64)
        if not in_sample(self._source, file, positions)[0]:
            low, high = self._source.source.sample
            why = (
                f"the source's hash split keeps documents with u in [{low:g}, {high:g}), but not"
                " this document"
            )
            return {**described, "outcome": "not sampled", "why": why}
        if why := _why_filtered(self._source, use, read):
            outcome = "not repeated" if read.passes else "filtered"
            return {**described, "outcome": outcome, "why": why}
        if not kept_by_plan(self._source, use, file, positions)[0] or chosen_by_content(
            self._source, use, file
        ):
            why = (
                f"repeat = {self._source.repeat:g}: pass {use} uses only some documents, but not"
                " this document"
            )
            return {**described, "outcome": "not repeated", "why": why}
        if exists is None:
            return {
                **described,
                "outcome": "absent",
                "why": "no segment or reject has this position",
            }
        # Nothing excludes the document, so it should have been in a segment or a reject.
        why = "not in any segment or reject; `packprep verify` shows the damage"
        return {**described, "outcome": "lost", "why": why}


def _rejects(data: OpenedDataset, number: int) -> Iterator[dict[str, Any]]:
    name = rejects_name(number)
    try:
        lines = data.local.out.read(name).splitlines(keepends=True)
    except FileNotFoundError:
        return
    except OSError as error:
        raise DatasetError(
            f"{data.local.out.path_of(name)}: {error.strerror}\nhint: restore the file"
        ) from None
    for line in lines:
        record = decode(line, data.local.out.path_of(name))
        if not isinstance(record, dict) or not {
            "source",
            "file",
            "position",
            "repeat",
            "reason",
            "detail",
        } <= set(record):
            raise DatasetError(
                f"{data.local.out.path_of(name)}: invalid reject record"
                "\nhint: run `packprep verify` to find all damage"
            )
        yield record


def _left_out(
    plan: Plan, segments: list[dict[str, Any]], tokens: int | None
) -> Iterator[dict[str, Any]]:
    """For a used document, yield the token ranges that are in no segment, each with the reason.

    The end of a range is None if the document's number of tokens is unknown.
    """
    documents = plan.recipe.documents
    end = 0
    for segment in segments:
        if segment["tokens"][0] > end:
            yield _range(end, segment["tokens"][0], _why_dropped(documents.long))
        end = segment["tokens"][1]
    if tokens is None and documents.eos_after_document and segments[-1]["ends_document"] is False:
        yield _range(end, None, _why_cut(documents.long))
    elif tokens is not None and tokens > end:
        yield _range(end, tokens, _why_cut(documents.long))


def _why_cut(long: str) -> str:
    if long == "truncate":
        return 'truncated: documents.long = "truncate" keeps only tokens that fit in a row'
    return _why_dropped(long)


def _why_dropped(long: str) -> str:
    if long == "decompose":
        return "dropped: used in rows of other lengths (other_length)"
    return "dropped: not trainable (untrained_segment)"


def _range(begin: int, end: int | None, why: str) -> dict[str, Any]:
    return {"tokens": [begin, end], "why": why}


class _ReadAgain(NamedTuple):
    """The document at a position, as it was read again. Unknown values are None.

    Attributes:
        exists: Whether the file has a document at the position.
        text: The start of the document's text.
        tokens: Number of tokens. It is computed only if the document is used.
        error: The reason why the file cannot be read.
        before: The nearest position of an earlier document.
        after: The nearest position of a later document.
        number: The number of passes that the source's expressions give.
        passes: Number of passes of the document, if the source has expressions.
    """

    exists: bool | None = None
    text: str | None = None
    tokens: int | None = None
    error: str | None = None
    before: int | None = None
    after: int | None = None
    number: float | None = None
    passes: int | None = None


def _why_filtered(source: PlannedSource, use: int, read: _ReadAgain) -> str:
    """Return why the source's expressions leave a document out of a pass, or ""."""
    passes = source.passes
    least = 0 if passes is None or passes.repeat is None else use
    if passes is None or (read.passes is not None and read.passes > least):
        return ""
    if read.passes is None:
        return f"{passes} may leave out this document, but its source was not read"
    if not read.number and passes.where is not None:
        return f"{passes} leaves out this document"
    return f"{passes} gives {read.number:g} passes, and this document has {read.passes} of them"


class _AtPosition:
    """A selector of the document at one position of a file. It notes what it is called with.

    Attributes:
        before: The nearest position of an earlier document, or -1.
        after: The nearest position of a later document, or END.
    """

    def __init__(self, position: int):
        self._position = position
        self.before, self.after = -1, END

    def __call__(self, file: int, positions: np.ndarray) -> np.ndarray:
        """Return which document is at the position, bool[n]."""
        earlier, later = positions < self._position, positions > self._position
        self.before = max([self.before, *positions[earlier][-1:].tolist()])
        self.after = min([self.after, *positions[later][:1].tolist()])
        return positions == self._position


class _PassesAt(ByFields):
    """A selector like `_AtPosition`, which also notes the passes of the document.

    Attributes:
        number: The number that the expressions give, or None.
        of_document: Number of passes of the document, or None.
    """

    def __init__(self, source: PlannedSource, at_position: _AtPosition):
        assert source.passes is not None
        super().__init__(source.passes, 0, partial(file_key, source))
        self.at = at_position
        self.number: float | None = None
        self.of_document: int | None = None

    def __call__(
        self, file: int, positions: np.ndarray, read_fields: ReadFields, is_own: np.ndarray
    ) -> np.ndarray:
        """Return which document is at the position, bool[n]."""
        chosen = self.at(file, positions)
        if chosen.any():
            numbers = self.numbers(positions, read_fields)
            self.of_document = int(self.drawn(file, positions, numbers)[chosen][0])
            self.number = float(numbers[chosen][0])
        return chosen


def _read_again(plan: Plan, source: PlannedSource, i: int, position: int, used: bool) -> _ReadAgain:
    """Read the document at a position in file i of a source. `used` says whether it is used."""
    file, at_position = source.first_file + i, _AtPosition(position)
    keep = at_position if source.passes is None else _PassesAt(source, at_position)
    exists, text, tokens = False, None, None
    try:
        for work_range in _parts_at(source, i, position):
            for batch, _ in read_supervised(
                work_range,
                source,
                plan.recipe.documents,
                plan.stored["chat_template"],
                keep,
                1 << 16,
            ):
                exists = True
                text = batch.texts[0][:SHOWN_CHARACTERS] if batch.texts else text
            if exists:
                break
        # Counting tokens needs the tokenizer, so only a document with segments is tokenized.
        if exists and used:
            documents = documents_at(plan, source, file, 0, np.array([position]))
            tokens = int(documents.offsets[-1])
    except PackprepError as error:
        return _ReadAgain(error=str(error))
    position_before, position_after = (
        None if near in (-1, END) else near for near in (at_position.before, at_position.after)
    )
    chosen = (keep.number, keep.of_document) if isinstance(keep, _PassesAt) else (None, None)
    return _ReadAgain(exists, text, tokens, None, position_before, position_after, *chosen)


def _parts_at(source: PlannedSource, i: int, position: int) -> Iterator[Any]:
    # The last split has the document, unless group_by joined it from an earlier split on.
    for piece in reversed(source.pieces_at(i, np.array([position])).tolist()):
        for work_range in source.slices_of(int(piece)):
            if work_range.file == source.first_file + i:
                yield work_range


SHOWN = 160  # Number of characters shown from the start of the document.
MOST_SEGMENTS = 50  # Maximum number of segments, and of records, shown per pass.


def print_document(described: Mapping[str, Any]) -> None:
    """Print the description of a document as text.

    In a terminal, the output has colours and the terminal's width. Otherwise it is plain and 100
    columns wide.
    """
    with page() as drawn:
        _draw(drawn, described)


def _draw(page: Page, described: Mapping[str, Any]) -> None:
    position = described["position"]
    for file in described["files"]:
        where = f"{described['source']} {visible(file['file'])} at {file['document']:,}"
        if file["document"] != position:
            where += f", with the record at {position:,}"
        size = "" if file["tokens"] is None else f" · {counted(file['tokens'], 'token')}"
        page.wrap(f"{where}{size}", HEAD)
        if file["text"] is not None:
            ellipsis = " …" if len(file["text"]) > SHOWN else ""
            page.wrap(f"  {visible(file['text'][:SHOWN])}{ellipsis}", indent=2)
        elif file["not_read"]:
            page.wrap(f"  its source was not read: {one_line(file['not_read'])}", DIM, indent=2)
        for use in file["uses"]:
            _draw_use(page, use)
        near = [f"{word} {file[word]:,}" for word in ("before", "after") if file[word] is not None]
        if near:
            page.put(f"  nearest known documents: {', '.join(near)}")
        page.put()
    if not described["files"]:
        page.wrap(
            f"{described['source']}: no file has a used or rejected document at {position:,};"
            " give --doc FILE:POSITION"
        )
        page.put()
    if described["more_files"]:
        page.wrap(
            f"… and {counted(described['more_files'], 'more file')} with a document at this"
            " position; give --doc FILE:POSITION to select a file"
        )
    page.put(
        f"{described['shards_searched']:,} of {counted(described['shards'], 'shard')} searched", DIM
    )


def _draw_use(page: Page, use: Mapping[str, Any]) -> None:
    detail = (
        f": {visible(use['why'])}"
        if use["why"]
        else f" in {counted(len(use['segments']), 'segment')}"
    )
    page.wrap(f"  pass {use['use']}: {use['outcome']}{detail}", indent=2)
    segments = use["segments"]
    if segments:
        page.table(
            ("  task", "tokens", "row", "segment", "slots", "trained", "shard"),
            [
                (
                    f"  {segment['task']}",
                    _in_words(segment["tokens"]),
                    f"{segment['row']:,}",
                    f"{segment['segment']:,}",
                    _in_words(segment["slots"]),
                    f"{segment['trained']:,}",
                    segment["shard"].removeprefix("shards/").removesuffix(".safetensors"),
                )
                for segment in segments[:MOST_SEGMENTS]
            ],
            text_columns=1,
        )
    if len(segments) > MOST_SEGMENTS:
        page.put(
            f"  … and {counted(len(segments) - MOST_SEGMENTS, 'more segment')}; --json lists all"
        )
    for record in use["records"][:MOST_SEGMENTS]:
        begin, end = record["tokens"]
        tokens = f"tokens {_in_words([begin, end])}" if end > begin else "no tokens"
        page.put(f"  record at {record['position']:,}: {tokens}")
    if (more_records := len(use["records"]) - MOST_SEGMENTS) > 0:
        page.put(f"  … and {counted(more_records, 'more record')}; --json lists all")
    for left_out in use["left_out"]:
        begin, end = left_out["tokens"]
        tokens = f"tokens from {begin:,}" if end is None else f"tokens {_in_words([begin, end])}"
        page.wrap(f"  {tokens} {left_out['why']}", indent=2)


def _in_words(bounds: list[int]) -> str:
    return f"{bounds[0]:,} … {bounds[1] - 1:,}"


SHOWN_TOKENS = 8  # Number of tokens shown at each end of document 1.


def first_document(plan: Plan) -> str:
    """Return one line that shows how document 1 was read.

    Document 1 is the first document of shard 0 with tokens. The line lists its first and last
    tokens.

        document 1: web a.jsonl at 0: 1,234 tokens: The│ cat│ sat … on│ the│ mat│.│‹eos›

    For a document with trained ranges, it says "1,234 tokens, 56 of them trained: …".

    Raises:
        SourceError: If the document's file cannot be read.
    """
    first_reject: tuple[PlannedSource, Reject] | None = None
    documents, vocabulary = plan.recipe.documents, plan.vocabulary
    slices = (
        (source, work_range)
        for source in plan.sources
        for work_range in source.slices(0, plan.shards)
    )
    for source, work_range, keep in with_keeps(slices):
        for positions, rejects, contents in _first_looks(plan, source, work_range, keep):
            if rejects and first_reject is None:
                first_reject = source, rejects[0]
            for position, (ids, n_trained) in zip(positions.tolist(), contents, strict=False):
                if ids:
                    trained_in_words = "" if n_trained is None else f", {n_trained:,} trained"
                    where = f"{source.name} {_name_of(source, work_range.file)} at {position}"
                    head = [vocabulary.roles["bos"]] if documents.prepend_bos else []
                    tail = [vocabulary.roles["eos"]] if documents.eos_after_document else []
                    return (
                        f"document 1: {where}: {len(ids):,} tokens{trained_in_words}:"
                        f" {_ends(plan, [*head, *ids, *tail])}"
                    )
    if first_reject is None:
        return "document 1: shard 0 has no document with tokens"
    source, reject = first_reject
    where = f"{source.name} {_name_of(source, reject.file)} at {reject.position}"
    return (
        f"document 1: shard 0 has no usable document; the first is {where}: {reject.reason}:"
        f" {reject.detail}"
    )


def _first_looks(
    plan: Plan, source: PlannedSource, work_range: Any, keep: Any
) -> Iterator[tuple[np.ndarray, Sequence[Reject], Iterator[tuple[list[int], int | None]]]]:
    """Yield (positions, rejects, contents) for each batch of documents in a work range.

    The documents come from the source file or from a token store. `contents` yields (token ids,
    number of trained ids) for each document that is not rejected. The number is None if the
    document has no trained ranges.
    """
    documents = plan.recipe.documents
    if source.in_store:
        for read in source.store.read(source, work_range, keep, plan.vocabulary):
            yield read.positions, read.rejects, _stored_contents(read)
        return
    for batch, conversations in read_supervised(
        work_range,
        source,
        documents,
        plan.stored["chat_template"],
        keep,
        1 << 16,
    ):
        yield batch.positions, batch.rejects, _contents(plan, batch, conversations)


def _stored_contents(read: ReadDocuments) -> Iterator[tuple[list[int], int | None]]:
    for i, (a, b) in enumerate(pairwise(read.tokens.offsets.tolist())):
        trained = read.trained.get(i)
        yield (
            read.tokens.ids[a:b].tolist(),
            None if trained is None else int(np.diff(trained.spans).sum()),
        )


def _contents(
    plan: Plan, batch: Batch, conversations: Mapping[int, Conversation]
) -> Iterator[tuple[list[int], int | None]]:
    """For each document that is not rejected, yield (token ids, number of trained ids).

    The number is None if the document has no trained ranges.
    """
    if batch.tokens is not None:
        tokens = take_tokens(batch.tokens, plan.recipe.documents, plan.vocabulary)
        yield from ((tokens.ids[a:b].tolist(), None) for a, b in pairwise(tokens.offsets.tolist()))
    special_text = plan.recipe.documents.special_text
    for i, text in enumerate(batch.texts):
        own_conversations = {0: conversations[i]} if i in conversations else {}
        tokens, trained = tokenize_supervised(
            plan.engine, [text], own_conversations, special_text, plan.vocabulary
        )
        yield tokens.ids.tolist(), int(np.diff(trained[0].spans).sum()) if trained else None


def _name_of(source: PlannedSource, file: int) -> str:
    return visible(source.files[file - source.first_file].name)


def _ends(plan: Plan, ids: Sequence[int]) -> str:
    """Return the first and last SHOWN_TOKENS tokens as text, with a bar between tokens."""
    ends = [ids] if len(ids) <= 2 * SHOWN_TOKENS else [ids[:SHOWN_TOKENS], ids[-SHOWN_TOKENS:]]
    engine = plan.text_engine
    tokens = engine.tokens_of([id for end in ends for id in end]) if engine else None
    texts = TokenTexts(plan.vocabulary.tokenizer_json, plan.vocabulary.special_ids, tokens)
    return " … ".join("│".join(map(_shown, texts.one_by_one(end))) for end in ends)


def _shown(piece: TextPiece) -> str:
    return special(piece.text) if piece.kind == SPECIAL else visible(piece.text)
