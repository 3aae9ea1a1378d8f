"""Where a document went: the segments that hold it, or why none does.

```
source, file, position ─► shards that may hold it (arithmetic of the plan) ─► their segment_file, segment_doc; rejects
                       └► the source file, if it is at hand: its text, its tokens, its neighbours
```
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from packprep.building.job import Job
from packprep.building.output import Output
from packprep.building.replay import documents_at
from packprep.corpus.planning import Extent, PlannedSource
from packprep.corpus.readers import PIECE_BYTES, read
from packprep.corpus.reading import chosen_by_size, in_sample, kept_by_plan
from packprep.dataset.json_files import decode, rejects_name
from packprep.errors import DatasetError, PackprepError, RecipeError
from packprep.inspection.opened import Opened, check_source, nearest, opened
from packprep.inspection.originals import stored_of

MOST_FILES = 20  # of a source that have a document at the position, that are described
SHOWN_CHARACTERS = 400  # of the document's beginning
END = np.iinfo(np.int64).max


def describe_document(
    directory: str | os.PathLike | Output,
    name: str | None,
    place: str,
    moved: Mapping[str, str],
    from_plan: bool = False,
) -> dict[str, Any]:
    """Where a document went, as plain values.

    name: its source; None for a dataset's only one. place: "FILE:POSITION" with the file's name as the plan has it, or
    "POSITION" for every file of the source. moved, from_plan: as in `describe_row`.
    Gives {directory, source, position, shards, shards_searched, more_files: how many of those with such a document are not
    described, files: [{file, text: its beginning, tokens, not_read: why these two are null, before, after: the nearest
    positions known of documents where there is none at this one, uses}]}. uses: [{use, outcome, why, segments, left_out}];
    outcome: "used" | "rejected" | "not sampled" | "not repeated" | "absent" | "lost".
    Raises RecipeError for a source or a file that there is not, or a place that is none; DatasetError for a damaged dataset.
    """
    with opened(directory, moved, from_plan) as data:
        job = data.usable_job
        source = _source(job, name)
        file, position = _place(source, place)
        wanted = [file] if file is not None else _files_that_reach(source, position)
        shards = source.shards_of(_pieces_of(source, wanted, position), job.shards).tolist()
        found = _Found(data, source, wanted, position)
        for number in shards:
            found.search(number)
        held = [file] if file is not None else found.files()
        if not held and len(source.files) == 1:
            held = [0]
        return {
            "directory": str(data.near.out),
            "source": source.name,
            "position": position,
            "shards": job.shards,
            "shards_searched": len(shards),
            "more_files": max(0, len(held) - MOST_FILES),
            "files": [found.describe(job, i) for i in held[:MOST_FILES]],
        }


def _source(job: Job, name: str | None) -> PlannedSource:
    names = [source.name for source in job.sources]
    if name is None:
        if len(names) > 1:
            raise RecipeError(f"--doc: of which source? give --source NAME, one of {', '.join(names)}")
        return job.sources[0]
    check_source(name, names)
    return job.sources[names.index(name)]


def _place(source: PlannedSource, place: str) -> tuple[int | None, int]:
    """(the file's place in the source or None, position)."""
    file, colon, text = place.rpartition(":")
    if not text.isascii() or not text.isdecimal() or int(text) >= END or (colon and not file):
        raise RecipeError(
            f"--doc {place}: expected POSITION or FILE:POSITION; a position is the byte at which a document's line begins, "
            "its row number, or 0 of a text file"
        )
    if not colon:
        return None, int(text)
    names = source.files.names
    if file not in names:
        raise RecipeError(
            f"--doc {place}: source {source.name!r} has no file {file!r}, named relative to its prefix; it has "
            f"{nearest(file, names)}"
        )
    return list(names).index(file), int(text)


def _files_that_reach(source: PlannedSource, position: int) -> list[int]:
    """The files of a source that may have a document at a position, by what their format and size say."""
    reach = []
    for i, (format, compression) in enumerate(source.formats):
        plain_lines = format == "jsonl" and not compression
        if position == 0 or (format != "text" and (not plain_lines or position < int(source.files.sizes[i]))):
            reach.append(i)
    return reach


def _pieces_of(source: PlannedSource, files: list[int], position: int) -> np.ndarray:
    """int64[n]: the pieces of files that may hold a document at a position."""
    if len(files) == len(source.files) > 1000:
        return np.arange(len(source.pieces))
    pieces: list[int] = []
    for i in files:
        pieces += _pieces_at(source, i, position)
    return np.array(pieces, np.int64)


def _pieces_at(source: PlannedSource, i: int, position: int) -> range:
    pieces = source.pieces.of_file(i)
    if source.formats[i] == ("jsonl", ""):
        return pieces[position // PIECE_BYTES : position // PIECE_BYTES + 1]
    return pieces


class _Found:
    """What the shards say of the documents at one position of some files of a source."""

    def __init__(self, data: Opened, source: PlannedSource, files: list[int], position: int):
        self._data, self._source, self._position = data, source, position
        self._files = np.array(files, np.int64) + source.first_file
        self._segments: dict[tuple[int, int], list[dict[str, Any]]] = {}  # (file of the plan, use)
        self._rejects: dict[tuple[int, int], dict[str, Any]] = {}
        self._before: dict[int, int] = {}
        self._after: dict[int, int] = {}

    def files(self) -> list[int]:
        """The files of the source that have a document at the position, used or rejected; ascending."""
        held = {file for file, _ in (*self._segments, *self._rejects)}
        return sorted(file - self._source.first_file for file in held)

    def search(self, number: int) -> None:
        """Look through a shard and its rejects."""
        with self._data.shard(number) as shard:
            arrays = shard.arrays
            file, doc = arrays["segment_file"], arrays["segment_doc"]
            at = np.flatnonzero(doc == self._position)
            at = at[np.isin(file[at], self._files)]
            if len(self._files) == 1:
                self._note_neighbours(int(self._files[0]), doc[file == self._files[0]])
            if len(at):
                stored = stored_of(self._data.usable_job, shard)
                for g in at.tolist():
                    self._note(number, shard, stored, g)
        for record in _rejects(self._data, number):
            if record["source"] == self._source.name:
                self._note_reject(record)

    def _note_neighbours(self, file: int, positions: np.ndarray) -> None:
        before, after = positions[positions < self._position], positions[positions > self._position]
        if len(before):
            self._before[file] = max(int(before.max()), self._before.get(file, 0))
        if len(after):
            self._after[file] = min(int(after.min()), self._after.get(file, END))

    def _note(self, number: int, shard: Any, stored: Any, g: int) -> None:
        arrays, data = shard.arrays, self._data
        in_shard = int(stored.row[g])
        row = int(data.first_rows[number]) + in_shard
        begin, slots = int(stored.begin[g]), int(stored.slots[g])
        start, n = int(arrays["segment_start"][g]), int(arrays["segment_tokens"][g])
        use = int(arrays["segment_repeat"][g])
        self._segments.setdefault((int(arrays["segment_file"][g]), use), []).append(
            {
                "tokens": [start, start + n],
                "row": row,
                "segment": g - int(arrays["row_offsets"][in_shard]) + 1,
                "slots": [begin, begin + slots],
                "task": data.dataset.tasks[int(arrays["segment_task"][g])]["name"],
                "trained": int(data.dataset.row(row).loss_mask[begin : begin + slots].sum()),
                "shard": data.dataset.manifest["shards"][number]["file"],
                "ends_document": bool(stored.eos[g]),
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

    def describe(self, job: Job, i: int) -> dict[str, Any]:
        """What became of the document of file i of the source."""
        source, file = self._source, self._source.first_file + i
        seen = any((file, use) in self._segments or (file, use) in self._rejects for use in range(source.uses))
        there, text, tokens, not_read, before, after = _read_again(job, source, i, self._position, bool(self._segments))
        exists = seen or there
        if before is None and after is None and not exists:
            before, after = self._before.get(file), self._after.get(file)
        uses = [self._use(job, file, use, tokens, exists) for use in range(source.uses)]
        return {
            "file": source.files.names[i],
            "text": text,
            "tokens": tokens,
            "not_read": not_read,
            "before": None if exists else before,
            "after": None if exists else after,
            "uses": uses,
        }

    def _use(self, job: Job, file: int, use: int, tokens: int | None, exists: bool | None) -> dict[str, Any]:
        described: dict[str, Any] = {"use": use, "why": None, "segments": [], "left_out": []}
        if segments := self._segments.get((file, use)):
            segments.sort(key=lambda segment: segment["tokens"])
            left_out = list(_left_out(job, segments, tokens))
            return {**described, "outcome": "used", "segments": segments, "left_out": left_out}
        if record := self._rejects.get((file, use)):
            return {**described, "outcome": "rejected", "why": f"{record['reason']}: {record['detail']}"}
        if exists is False:
            return {**described, "outcome": "absent", "why": "the file has no document at this position"}
        at = np.array([self._position], np.int64)
        if not in_sample(self._source, file, at)[0]:
            low, high = self._source.source.sample
            why = f"the source's sample keeps documents whose u lies in [{low:g}, {high:g}), and this one's does not"
            return {**described, "outcome": "not sampled", "why": why}
        if not kept_by_plan(self._source, use, file, at)[0] or chosen_by_size(self._source, use, file):
            why = f"repeat = {self._source.repeat:g}: use {use} takes a part of the documents, and this one is not of them"
            return {**described, "outcome": "not repeated", "why": why}
        if exists is None:
            return {**described, "outcome": "absent", "why": "no segment and no reject names this position"}
        why = "it is in no segment and not among the rejects: `packprep verify` says what is damaged"
        return {**described, "outcome": "lost", "why": why}


def _rejects(data: Opened, number: int) -> Iterator[dict[str, Any]]:
    name = rejects_name(number)
    try:
        lines = data.near.out.read(name).splitlines(keepends=True)
    except FileNotFoundError:
        return
    except OSError as error:
        raise DatasetError(f"{data.near.out.place(name)}: {error.strerror}; see to it, or put the file back") from None
    for line in lines:
        record = decode(line, data.near.out.place(name))
        if not isinstance(record, dict) or not {"source", "file", "position", "repeat", "reason", "detail"} <= set(
            record
        ):
            raise DatasetError(f"{data.near.out.place(name)}: a record is no reject; `packprep verify` says where else")
        yield record


def _left_out(job: Job, segments: list[dict[str, Any]], tokens: int | None) -> Iterator[dict[str, Any]]:
    """The token ranges of a used document that are in no segment, with what is known of why; end null: not known."""
    documents = job.recipe.documents
    at = 0
    for segment in segments:
        if segment["tokens"][0] > at:
            yield _range(at, segment["tokens"][0], "dropped: none of them may be trained (untrained_segment)")
        at = segment["tokens"][1]
    if tokens is None and documents.append_eos and not segments[-1]["ends_document"]:
        yield _range(at, None, _why_cut(documents.long))
    elif tokens is not None and tokens > at:
        yield _range(at, tokens, _why_cut(documents.long))


def _why_cut(long: str) -> str:
    if long == "truncate":
        return 'truncated: documents.long = "truncate" keeps what fits a row'
    return "dropped: none of them may be trained (untrained_segment)"


def _range(begin: int, end: int | None, why: str) -> dict[str, Any]:
    return {"tokens": [begin, end], "why": why}


def _read_again(
    job: Job, source: PlannedSource, i: int, position: int, used: bool
) -> tuple[bool | None, str | None, int | None, str | None, int | None, int | None]:
    """What the source file says, if it is at hand: (whether there is a document, its beginning, its tokens, or why the
    file was not read, the nearest positions before and after)."""
    file, nearest = source.first_file + i, [-1, END]

    def keep(_: int, positions: np.ndarray) -> np.ndarray:
        nearest[0] = max([nearest[0], *positions[positions < position][-1:].tolist()])
        nearest[1] = min([nearest[1], *positions[positions > position][:1].tolist()])
        return positions == position

    there, text, tokens = False, None, None
    try:
        for part in _parts_at(source, i, position):
            for batch in read(part, source.source.text_key, keep, batch_bytes=1 << 16, marks=job.marks):
                there = True
                text = batch.texts[0][:SHOWN_CHARACTERS] if batch.texts else text
            if there:
                break
        if there and used:
            found = documents_at(job, source, file, 0, np.array([position]))
            tokens = int(found.offsets[-1])
    except PackprepError as error:
        return None, None, None, str(error), None, None
    before, after = (None if at in (-1, END) else at for at in nearest)
    return there, text, tokens, None, before, after


def _parts_at(source: PlannedSource, i: int, position: int) -> Iterator[Any]:
    for piece in _pieces_at(source, i, position):
        for part in source.parts(Extent(int(piece), 0, 0, 1, 1)):
            if part.file == source.first_file + i:
                yield part
