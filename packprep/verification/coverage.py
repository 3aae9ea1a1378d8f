"""Check P21: in each pass, each document is in exactly one shard, in segments or in the rejects.

Without the sources, the documents of a shard are compared with the plan. For each shard, the plan
determines the files that are read. For line files, it also determines the byte ranges. Row numbers
of a table must follow one another without a gap. Shards that read the same file must read separate
parts of it. With `--replay all`, the documents are also compared with the documents of a rebuilt
shard.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from packprep.building.commit import Receipt
from packprep.building.ledger import PASSES, Ledger
from packprep.building.plan import Plan
from packprep.building.plan_form import MOST_USES
from packprep.building.removal import REMOVED
from packprep.building.work import OTHER_LENGTH, PLACE_TOO_LONG, TOO_LONG, Made
from packprep.dataset.boundaries import owners, ranks
from packprep.dataset.segments import Arrays, Segments
from packprep.documents.joining import JOINED
from packprep.documents.reading import (
    DROP_REASONS,
    Documents,
    in_sample,
    keeps_all,
    kept_by_plan,
)
from packprep.errors import DatasetError
from packprep.format import read_file
from packprep.format.json_files import (
    MANIFEST_NAME,
    decode,
    receipt_name,
    rejects_name,
    shard_name,
)
from packprep.sources.formats import BAD_REASONS, PIECE_BYTES, Slice, position_of
from packprep.sources.slices import PlannedSource
from packprep.tokenizer.encoding import TEXT_REASONS
from packprep.verification.faults import MAX_LISTED, Faults

REASONS = (
    *BAD_REASONS,
    *TEXT_REASONS,
    *DROP_REASONS,
    TOO_LONG,
    OTHER_LENGTH,
    PLACE_TOO_LONG,
    REMOVED,
)
_AT_ONCE = 1 << 18  # Number of splits that are processed at a time.
_END = np.iinfo(np.int64).max
_RECORD = {"source": str, "file": str, "position": int, "repeat": int, "reason": str, "detail": str}


class Locations(NamedTuple):
    """The locations of documents, sorted by file, pass and position. Each column is int64[k].

    Attributes:
        file: Index into the plan's files.
        use: Index of the pass.
        position: Position of the document in its file.
    """

    file: np.ndarray
    use: np.ndarray
    position: np.ndarray

    def at(self, selection: np.ndarray) -> "Locations":
        """Return the locations that a mask or an array of indices selects."""
        return Locations(*(column[selection] for column in self))


class Runs(NamedTuple):
    """Parts of files that were read to build one shard. Each column is int64[k].

    Attributes:
        file: Index into the plan's files.
        use: Index of the pass.
        first: Position of the first document in the part.
        last: Position of the last document in the part.
    """

    file: np.ndarray
    use: np.ndarray
    first: np.ndarray
    last: np.ndarray


NO_RUNS = Runs(*(np.zeros(0, np.int64) for _ in Runs._fields))


class _Extents(NamedTuple):
    """The ranges of files that a shard reads according to the plan. Each column is int64[k].

    The ranges are sorted by file, pass and begin. A range contains the document positions begin …
    end − 1. If the plan does not determine positions, the range covers the whole file.
    """

    file: np.ndarray
    use: np.ndarray
    begin: np.ndarray
    end: np.ndarray


def _sorted(file: Any, use: Any, position: Any) -> Locations:
    locations = Locations(*(np.asarray(column, np.int64) for column in (file, use, position)))
    return locations.at(np.lexsort((locations.position, locations.use, locations.file)))


def _repeated(locations: Locations) -> np.ndarray:
    """Return whether each location equals the one before it, bool[k]."""
    same = np.zeros(len(locations.file), np.bool_)
    same[1:] = np.logical_and.reduce([column[1:] == column[:-1] for column in locations])
    return same


def used_documents(arrays: Arrays) -> Locations:
    """Return the documents that have a segment with tokens in a shard, each once per pass."""
    segments = Segments.of_arrays(arrays)
    used = segments.select(segments.has_tokens)
    locations = _sorted(used.file, used.repeat, used.doc)
    return locations.at(~_repeated(locations))


def used_records(plan: Plan, arrays: Arrays) -> Locations:
    """Return the records that the used documents of a shard were joined from, sorted.

    A document of a source without group_by is one record. A record that is used twice is in the
    result twice.
    """
    documents, records = used_documents(arrays), Segments.of_arrays(arrays).records
    if records is None:
        return documents
    segments = Segments.of_arrays(arrays).select(records.owner)
    alone = _ungrouped(plan, documents)
    of_records = segments.file, segments.repeat, records.position
    return _sorted(*(np.concatenate(pair) for pair in zip(alone, of_records, strict=True)))


def read_rejects(
    directory: Path,
    shard: int,
    plan: Plan,
    receipt: Receipt,
    faults: Faults,
    reason: str | None = None,
) -> Locations | None:
    """Return the documents in a shard's rejects file, or None if the file cannot be read.

    A record is a fault if its document is not in the plan, or if its reason is unknown. P1 or P2
    reports an unreadable file.

    Args:
        directory: Directory of the dataset.
        shard: Number of the shard.
        plan: The dataset's plan.
        receipt: The shard's receipt.
        faults: Receives the faults.
        reason: Return only documents rejected for this reason, or all if None.
    """
    name = rejects_name(shard)
    if receipt["rejects"] is None:
        return _sorted([], [], [])
    # A rejects file names source and file, but locations have the number of the file in the plan.
    numbers = {
        (s.name, f.name): s.first_file + i for s in plan.sources for i, f in enumerate(s.files)
    }
    uses = {source.name: source.uses for source in plan.sources}
    rejects = []
    try:
        # A wrong record is reported and skipped, so that all other records are still compared.
        for i, line in enumerate(read_file(directory / name).splitlines(keepends=True)):
            record = decode(line, name)
            problem = ""
            if record.keys() != _RECORD.keys() or any(
                type(record[key]) is not kind for key, kind in _RECORD.items()
            ):
                problem = "does not have the keys and values of a reject"
            elif (record["source"], record["file"]) not in numbers:
                problem = "names an unknown source or file"
            elif not (
                0 <= record["repeat"] < uses[record["source"]] and 0 <= record["position"] < _END
            ):
                problem = "names an unknown pass or position"
            elif record["reason"] not in REASONS:
                problem = f"has the unknown reason {record['reason']!r:.40}"
            if problem:
                faults.add("P21", name, f"record {i} {problem}")
            elif reason in (None, record["reason"]):
                file = numbers[record["source"], record["file"]]
                rejects.append((file, record["repeat"], record["position"]))
    except (OSError, DatasetError, AttributeError):
        return None
    return _sorted(*np.array(rejects, np.int64).reshape(-1, 3).T)


def check_documents(
    plan: Plan,
    shard: int,
    arrays: Arrays,
    rejects: Locations,
    receipt: Receipt,
    faults: Faults,
) -> Runs:
    """Check P21 of one shard against the plan. The shard's `segment_*` arrays must be valid.

    Args:
        plan: The dataset's plan.
        shard: Number of the shard.
        arrays: The shard's arrays.
        rejects: The result of `read_rejects`.
        receipt: The shard's receipt.
        faults: Receives the faults.

    Returns:
        The parts of compressed files and tables that the build of the shard read, and of line files
        of sources with group_by. `check_apart` compares them with the parts of other shards.
    """
    documents, used = used_documents(arrays), used_records(plan, arrays)
    _check_counts(plan, documents, used, faults, (shard, receipt))
    for i in np.flatnonzero(_repeated(used))[:MAX_LISTED]:
        message = f"{in_words(plan, used, i)} is in two documents"
        faults.add("P21", shard_name(shard), message)
    # Each of the next checks reports a repetition and removes it, so that no fault is reported
    # twice.
    used = used.at(~_repeated(used))
    for i in np.flatnonzero(_repeated(rejects))[:MAX_LISTED]:
        faults.add("P21", rejects_name(shard), f"{in_words(plan, rejects, i)} is listed twice")
    # Together, segments and rejects must have each document once.
    every = _sorted(
        *(
            np.concatenate(columns)
            for columns in zip(used, rejects.at(~_repeated(rejects)), strict=True)
        )
    )
    for i in np.flatnonzero(_repeated(every))[:MAX_LISTED]:
        faults.add(
            "P21",
            rejects_name(shard),
            f"{in_words(plan, every, i)} is both in segments and in the rejects",
        )
    every = every.at(~_repeated(every))
    # The plan says which ranges of files this shard reads. Each document must be in one of them.
    inside = np.zeros(len(every.file), np.bool_)
    keys = np.unique(_uses_of_files(every.file, every.use))
    counts = np.zeros(len(keys), np.int64)  # Number of extents per file and pass.
    all_extents = []
    for extents in _extents(plan, shard):
        if grouped_sources(plan).any():
            all_extents.append(extents)
        inside |= _inside(every, _with_ends_of_groups(plan, extents))
        # The number of ranges limits the gaps that `_runs` accepts in a file.
        ends = _uses_of_files(extents.file, extents.use)
        counts += np.searchsorted(ends, keys, "right") - np.searchsorted(ends, keys)
        _check_texts(plan, shard, every, extents, faults)
    foreign = ~inside
    for i in np.flatnonzero(foreign)[:MAX_LISTED]:
        message = f"{in_words(plan, every, i)} is not in the part of the plan for this shard"
        faults.add("P21", shard_name(shard), message)
    # With group_by, a rejected record is in a pass if the first record of its document is.
    _check_kept(plan, shard, documents, faults)
    _check_kept(plan, shard, _ungrouped(plan, rejects), faults)
    parts = dict(zip(keys.tolist(), counts.tolist(), strict=True))
    runs = _runs(plan, shard, every.at(~foreign), parts, faults)
    of_lines = _runs_of_lines(plan, every.at(~foreign), all_extents)
    return Runs(*(np.concatenate(pair) for pair in zip(runs, of_lines, strict=True)))


def _check_counts(
    plan: Plan,
    documents: Locations,
    records: Locations,
    faults: Faults,
    of_shard: tuple[int, Receipt],
) -> None:
    """Check P21: the ledger counts the used documents and the joined records of a shard.

    `records` are the records of `documents`, and `of_shard` has the shard's number and receipt.
    """
    (shard, receipt), owner = of_shard, sources_of_files(plan)
    for s, source in enumerate(plan.sources):
        counts = receipt["ledger"]["sources"][source.name]["documents"]
        n_documents = int((owner[documents.file] == s).sum())
        joined = int((owner[records.file] == s).sum()) - n_documents
        for ledger_count, segment_count, noun in (
            (counts["used"], n_documents, "used documents"),
            (counts.get(JOINED, 0), joined, "joined records"),
        ):
            if ledger_count != segment_count:
                message = (
                    f"source {source.name}: the ledger counts {ledger_count} {noun}, but the"
                    f" segments have {segment_count}"
                )
                faults.add("P21", receipt_name(shard), message)


def check_apart(
    plan: Plan, runs: Sequence[tuple[int, Runs]], is_whole: bool, faults: Faults
) -> None:
    """Check P21 across shards: their parts of files do not overlap, and every table row is read.

    Args:
        plan: The dataset's plan.
        runs: (number of a shard, the result of `check_documents` for it).
        is_whole: Whether `runs` has all shards. Otherwise missing table rows are not checked.
        faults: Receives the faults.
    """
    columns = [
        np.concatenate(column) for column in zip(*(of_shard for _, of_shard in runs), strict=True)
    ] or list(NO_RUNS)
    shards = np.repeat([b for b, _ in runs], [len(of_shard.file) for _, of_shard in runs])
    # In this order, a part that overlaps an earlier part of its file starts before that part ends.
    order = np.lexsort((columns[2], columns[1], columns[0]))
    file, use, first_position, last_position = (column[order] for column in columns)
    same = np.zeros(len(file), np.bool_)
    same[1:] = (file[1:] == file[:-1]) & (use[1:] == use[:-1])
    # The first part of a file may start at position 0, so −1 is before it.
    previous_last = np.where(same, np.roll(last_position, 1), -1)
    # Row numbers have no gaps, so missing rows show. A pass that excludes documents has gaps on
    # purpose.
    tables = np.array([_is_table(plan, int(f)) for f in file], np.bool_)
    keeps_all = np.array(
        [_keeps_all(plan, int(f), int(u)) for f, u in zip(file, use, strict=True)], np.bool_
    )
    for i in np.flatnonzero(first_position <= previous_last)[:MAX_LISTED]:
        location = in_words(plan, Locations(file, use, first_position), i)
        neighbour = shard_name(int(shards[order[i - 1]]))
        faults.add(
            "P21",
            shard_name(int(shards[order[i]])),
            f"{location} is also in {neighbour}",
        )
    for i in (
        np.flatnonzero(tables & keeps_all & (first_position > previous_last + 1))[:MAX_LISTED]
        if is_whole
        else ()
    ):
        location = in_words(plan, Locations(file, use, first_position - 1), i)
        faults.add(
            "P21",
            shard_name(int(shards[order[i]])),
            f"{location} is in no shard and in no rejects file",
        )


def documents_of_passes(plan: Plan, arrays: Arrays, rejects: Locations) -> Counter[tuple[str, int]]:
    """Count the used and rejected documents of a shard by (source name, pass).

    Only sources whose `repeat` is an expression are counted. The arguments are as in
    `check_documents`.
    """
    counts: Counter[tuple[str, int]] = Counter()
    by_fields = [s for s, source in enumerate(plan.sources) if source.pass_shares is not None]
    owner = sources_of_files(plan) if by_fields else np.zeros(0, np.int64)
    for locations in (used_documents(arrays), rejects) if by_fields else ():
        of_source = owner[locations.file]
        for s in by_fields:
            uses, numbers = np.unique(locations.use[of_source == s], return_counts=True)
            name = plan.sources[s].name
            counts.update(
                {(name, u): n for u, n in zip(uses.tolist(), numbers.tolist(), strict=True)}
            )
    return counts


def check_passes(
    plan: Plan, total: Ledger, counts: Mapping[tuple[str, int], int], faults: Faults
) -> None:
    """Check P21 across shards: each pass has as many documents as the ledger's numbers of passes.

    A document with k passes is in the passes 0 … k − 1.

    Args:
        plan: The dataset's plan.
        total: The sum of the ledgers of all shards.
        counts: The sum of the results of `documents_of_passes` for all shards.
        faults: Receives the faults.
    """
    for source in plan.sources:
        if source.pass_shares is None:
            continue
        passes = total["sources"][source.name]["documents"].get(PASSES, {})
        for use in range(source.uses):
            expected = sum(count for number, count in passes.items() if int(number) > use)
            actual = counts.get((source.name, use), 0)
            if actual != expected:
                message = (
                    f"source {source.name}: pass {use} has {actual} documents, but the ledger has"
                    f" {expected} with more than {use} passes"
                )
                faults.add("P21", MANIFEST_NAME, message)


def check_read(
    plan: Plan,
    shard: int,
    arrays: Arrays,
    rejects: Locations,
    rebuilt_shard: Made,
    faults: Faults,
) -> None:
    """Check P21 with a rebuilt shard: it uses and rejects the same documents as the stored shard.

    Args:
        plan: The dataset's plan.
        shard: Number of the shard.
        arrays: The stored arrays.
        rejects: The documents in the stored rejects.
        rebuilt_shard: The rebuilt shard.
        faults: Receives the faults.
    """
    documents = rebuilt_shard.documents
    used = np.unique(rebuilt_shard.segments.document[rebuilt_shard.segments.has_tokens])
    rebuilt_records = _records_of(documents, used)
    turned_away = _sorted(*rebuilt_shard.documents.rejected.places)
    # Every document that was read must be used or rejected, or the build itself has a bug.
    count = sum(rebuilt_shard.documents.read.values())
    if count != len(rebuilt_records.file) + len(turned_away.file):
        faults.add(
            "P21",
            shard_name(shard),
            f"{count} documents were read, but {len(rebuilt_records.file)} are used and"
            f" {len(turned_away.file)} rejected: this is a bug in packprep; please report it",
        )
    for file, stored, rebuilt, place in (
        (shard_name(shard), used_records(plan, arrays), rebuilt_records, "in its segments"),
        (rejects_name(shard), rejects, turned_away, "in the rejects"),
    ):
        # A document that is on both sides has an equal neighbour. All others are differences.
        stored_and_rebuilt = _sorted(
            *(np.concatenate(columns) for columns in zip(stored, rebuilt, strict=True))
        )
        alone = ~_repeated(stored_and_rebuilt)
        alone[:-1] &= ~_repeated(stored_and_rebuilt)[1:]
        odd = stored_and_rebuilt.at(alone)
        is_stored = _inside(odd, _Extents(*stored, stored.position + 1))
        for i in range(min(len(odd.file), MAX_LISTED)):
            message = (
                f"is {place}, but should not be"
                if is_stored[i]
                else f"should be {place}, but is not"
            )
            faults.add("P21", file, f"{in_words(plan, odd, i)} {message}")


def _records_of(documents: Documents, used: np.ndarray) -> Locations:
    """Return the records of some documents, given by their numbers. See `used_records`."""
    positions = [documents.positions_of(d) for d in used.tolist()]
    counts = [len(of_document) for of_document in positions]
    file, use = (np.repeat(column[used], counts) for column in (documents.file, documents.repeat))
    return _sorted(file, use, np.fromiter(chain(*positions), np.int64, sum(counts)))


def _ungrouped(plan: Plan, locations: Locations) -> Locations:
    """Return the locations in files of sources without group_by."""
    is_grouped = grouped_sources(plan)
    return locations.at(~is_grouped[sources_of_files(plan)[locations.file]])


def grouped_sources(plan: Plan) -> np.ndarray:
    """Return which sources of the plan have group_by, bool[sources]."""
    return np.array([source.grouping is not None for source in plan.sources], np.bool_)


def sources_of_files(plan: Plan) -> np.ndarray:
    """Return the index of the source of each file in the plan, int64[files]."""
    return owners(np.array([len(source.files) for source in plan.sources]))


def _source_of(plan: Plan, file: int) -> PlannedSource:
    return plan.sources[bisect_right(plan.sources, file, key=lambda source: source.first_file) - 1]


def _format(plan: Plan, file: int) -> tuple[str, str]:
    source = _source_of(plan, file)
    return source.formats[file - source.first_file]


def _is_table(plan: Plan, file: int) -> bool:
    return position_of(*_format(plan, file)) == "number"


def _keeps_all(plan: Plan, file: int, use: int) -> bool:
    """Return whether pass `use` has all documents of the file's source.

    `sample`, a fractional `repeat` and expressions may exclude documents.
    """
    return keeps_all(_source_of(plan, file), use)


def in_words(plan: Plan, locations: Locations, i: int) -> str:
    """Return location i as words, such as "the document at 3 of 'a.jsonl' of web (pass 0)"."""
    file, use, position = (int(column[i]) for column in locations)
    source = _source_of(plan, file)
    return (
        f"the document at {position} of {source.files[file - source.first_file].name!r} of"
        f" {source.name} (pass {use})"
    )


def _extents(plan: Plan, shard: int) -> Iterator[_Extents]:
    """Yield the ranges of files that a shard reads according to the plan.

    They are divided among several `_Extents`, because a plan may list millions of ranges.
    """
    tables: list[np.ndarray] = []

    def taken() -> _Extents:
        table = np.concatenate([np.zeros((4, 0), np.int64), *tables], axis=1)
        tables.clear()
        return _Extents(*table[:, np.lexsort(table[2::-1])])

    for source in plan.sources:
        locations = source.places(shard, plan.shards)
        # The shard may take only a part of its first and last split.
        for location in {*locations[:1], *locations[-1:]}:
            taken_pieces = source.taken(shard, plan.shards, [location])
            tables.append(
                _in_part(
                    work_range
                    for of_piece in taken_pieces
                    for work_range in source.slices_of(*of_piece)
                )
            )
        whole_pieces = locations[1:-1]
        for i in range(0, len(whole_pieces), _AT_ONCE):
            tables.append(_whole(source, whole_pieces[i : i + _AT_ONCE]))
            if sum(table.shape[1] for table in tables) >= _AT_ONCE:
                yield taken()
    yield taken()


def _whole(source: PlannedSource, locations: range) -> np.ndarray:
    """Return the ranges of files that the given splits contain, int64[4, n].

    The four rows are file, pass, first position and end position. A split of several files gives
    one range per file. `locations` selects the splits. It is a part of a range that `source.places`
    returned. The shard must read these splits completely.
    """
    pieces, uses = source.at_places(locations)
    columns = source.pieces.at(pieces)
    file, uses, piece_number, size = (
        np.repeat(column, columns.files)
        for column in (columns.file, uses, columns.part, columns.bytes)
    )
    file += ranks(columns.files)
    # Line files are read by bytes, and a text file is one document at position 0. Other positions
    # are unknown.
    format, end = _formats(source)[file], np.full(len(file), _END)
    begin = np.where(format == _LINES, piece_number * PIECE_BYTES, 0)
    end[format == _LINES] = (begin + size)[format == _LINES]
    end[format == _TEXT] = 1
    return np.stack([file + source.first_file, uses, begin, end])[:, begin < end]


def _in_part(slices: Iterable[Slice]) -> np.ndarray:
    """Return the ranges of files that the given work ranges contain, int64[4, n].

    The four rows are file, pass, first position and end position. Empty ranges are omitted.
    """
    extents = []
    for work_range in slices:
        begin, end = 0, _END
        position = position_of(work_range.format, work_range.compression)
        if position == "whole":
            begin, end = work_range.range(1)
        elif position == "byte":
            first_byte = work_range.piece * work_range.piece_bytes
            begin, end = (
                first_byte + bound
                for bound in work_range.range(
                    min(work_range.piece_bytes, work_range.size - first_byte)
                )
            )
        if begin < end:
            extents.append((work_range.file, work_range.use, begin, end))
    return np.array(extents, np.int64).reshape(-1, 4).T


_OTHER, _LINES, _TEXT = range(3)


def _formats(source: PlannedSource) -> np.ndarray:
    """Return _LINES, _TEXT or _OTHER for each file of a source, int64[files].

    _LINES means that splits are byte ranges, and _TEXT that the file is one document.
    """
    kinds_by_position = {"byte": _LINES, "whole": _TEXT}
    return np.array(
        [kinds_by_position.get(position_of(*kind), _OTHER) for kind in source.files.kinds], np.int64
    )[source.files.kind]


def _uses_of_files(file: Any, use: Any) -> Any:
    """Return a number for each pair of file and pass.

    The order of these numbers is by file, then by pass. Arguments and result are ints or int64
    arrays.
    """
    return file * MOST_USES + use


def _inside(locations: Locations, extents: _Extents) -> np.ndarray:
    """Return whether each location is inside an extent, bool[k]. Both arguments are sorted."""
    inside = np.zeros(len(locations.file), np.bool_)
    keys = _uses_of_files(extents.file, extents.use)
    # Most locations are in other files than these extents, so they are left out first.
    near = np.flatnonzero(np.isin(_uses_of_files(locations.file, locations.use), keys))
    for file, use, location_slice in _groups(locations.at(near)):
        first_extent, end = np.searchsorted(keys, _uses_of_files(file, np.array([use, use + 1])))
        position = locations.position[near[location_slice]]
        # The last extent that begins at this position or before it.
        last_extent = np.searchsorted(extents.begin[first_extent:end], position, "right") - 1
        inside[near[location_slice]] = (last_extent >= 0) & (
            position < extents.end[first_extent:end][last_extent]
        )
    return inside


def _with_ends_of_groups(plan: Plan, extents: _Extents) -> _Extents:
    """Return the extents, each extended to the next extent of its file and pass, or to the end.

    Only extents in files of sources with group_by are extended. A shard reads the last document of
    an extent completely, and the plan does not determine where this document ends.
    """
    is_grouped = grouped_sources(plan)
    if not is_grouped.any():
        return extents
    of_next = np.full(len(extents.end), _END)
    keys = _uses_of_files(extents.file, extents.use)
    goes_on = keys[1:] == keys[:-1]
    of_next[:-1][goes_on] = extents.begin[1:][goes_on]
    in_group = is_grouped[sources_of_files(plan)[extents.file]]
    return extents._replace(end=np.where(in_group, np.maximum(extents.end, of_next), extents.end))


def _groups(locations: Locations) -> list[tuple[int, int, slice]]:
    """Return (file, pass, slice) for each file and pass.

    The slice selects the locations in this file and pass.
    """
    if not len(locations.file):
        return []
    changes = [np.diff(column, prepend=-1) != 0 for column in (locations.file, locations.use)]
    begins = np.flatnonzero(changes[0] | changes[1])
    ends = np.append(begins[1:], len(locations.file))
    return [
        (int(locations.file[b]), int(locations.use[b]), slice(b, e))
        for b, e in zip(begins, ends, strict=True)
    ]


def _check_kept(plan: Plan, shard: int, every: Locations, faults: Faults) -> None:
    """Check P21: the plan does not exclude any document of `every` from its pass.

    The plan determines which documents `sample` excludes. For text files, it also determines which
    documents a fractional `repeat` excludes.
    """
    # The last pass keeps the fewest documents. If it keeps all of them, every pass does.
    if all(keeps_all(source, source.uses - 1) for source in plan.sources):
        return
    for file, use, location_slice in _groups(every):
        is_kept = kept_by_plan(_source_of(plan, file), use, file, every.position[location_slice])
        for i in np.flatnonzero(~is_kept)[:MAX_LISTED] + location_slice.start:
            faults.add(
                "P21",
                shard_name(shard),
                f"{in_words(plan, every, i)} is excluded by the source's sample or repeat",
            )


def _check_texts(
    plan: Plan, shard: int, every: Locations, extents: _Extents, faults: Faults
) -> None:
    """Check P21: each text file in `extents` is a document of the shard, at position 0.

    Files that `sample` or a fractional `repeat` excludes are skipped.
    """
    is_text = np.concatenate([_formats(source) == _TEXT for source in plan.sources])
    wanted_files = Locations(*extents[:3]).at(is_text[extents.file])
    files_at_start = every.at(every.position == 0)
    lacking = wanted_files.at(
        ~np.isin(_uses_of_files(*wanted_files[:2]), _uses_of_files(*files_at_start[:2]))
    )
    start = np.zeros(1, np.int64)
    # A file may be missing from several passes, but `sample` gives the same answer for each pass.
    files, file_indices = np.unique(lacking.file, return_inverse=True)
    sampled = np.array(
        [in_sample(_source_of(plan, file), file, start)[0] for file in files.tolist()], np.bool_
    )
    lacking, fault_count = lacking.at(sampled[file_indices]), 0
    for i in range(len(lacking.file)):
        file, use = int(lacking.file[i]), int(lacking.use[i])
        if kept_by_plan(_source_of(plan, file), use, file, start)[0]:
            faults.add(
                "P21",
                shard_name(shard),
                f"{in_words(plan, lacking, i)} is not in a segment and not in the rejects",
            )
            fault_count += 1
        if fault_count == MAX_LISTED:
            return


def _runs(
    plan: Plan, shard: int, every: Locations, parts: Mapping[int, int], faults: Faults
) -> Runs:
    """Return the parts of compressed files and tables that the shard reads.

    The plan does not determine the positions in such files, so they come from the documents. Also
    check P21 of tables: no row is missing inside a part.

    Args:
        plan: The dataset's plan.
        shard: Number of the shard.
        every: The documents of the shard's segments and rejects.
        parts: Result of `_uses_of_files` for a file and a pass → number of parts of this file that
            the shard reads in this pass.
        faults: Receives the faults.
    """
    runs = []
    for file, use, location_slice in _groups(every):
        if position_of(*_format(plan, file)) in ("whole", "byte"):
            continue
        position = every.position[location_slice]
        count = parts[_uses_of_files(file, use)]
        gaps = np.flatnonzero(np.diff(position) > 1)
        # Between `count` parts are at most count − 1 gaps. A further gap means that a row is
        # missing.
        if _is_table(plan, file) and len(gaps) >= count and _keeps_all(plan, file, use):
            lost = Locations(
                *(np.array([value], np.int64) for value in (file, use, position[gaps[0]] + 1))
            )
            message = (
                f"{in_words(plan, lost, 0)}, or another row of the file, is not in a segment and"
                " not in the rejects"
            )
            faults.add("P21", shard_name(shard), message)
        elif count == 1:
            runs.append((file, use, position[0], position[-1]))
        # Documents without a gap between them are treated as one part.
        elif len(gaps) < count:
            begins = np.concatenate(([0], gaps + 1))
            ends = np.append(gaps, len(position) - 1)
            runs += [
                (file, use, position[b], position[e]) for b, e in zip(begins, ends, strict=True)
            ]
    return Runs(*np.array(runs, np.int64).reshape(-1, 4).T)


def _runs_of_lines(plan: Plan, every: Locations, extents: Sequence[_Extents]) -> Runs:
    """Return the parts of uncompressed line files that the shard reads, for sources with group_by.

    A shard reads the last document of an extent completely. The plan does not determine where this
    document ends, so the end of each part comes from the documents.
    """
    runs = []
    for file, use, location_slice in _groups(every):
        is_grouped = _source_of(plan, file).grouping is not None
        if not is_grouped or position_of(*_format(plan, file)) != "byte":
            continue
        begins = [extent.begin[(extent.file == file) & (extent.use == use)] for extent in extents]
        position = every.position[location_slice]
        # A document belongs to the last extent that begins before it or at it.
        number = np.searchsorted(np.sort(np.concatenate(begins)), position, "right")
        for run_positions in np.split(position, np.flatnonzero(np.diff(number)) + 1):
            runs.append((file, use, run_positions[0], run_positions[-1]))
    return Runs(*np.array(runs, np.int64).reshape(-1, 4).T)
