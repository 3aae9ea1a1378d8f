"""Documents of several records (`group_by`), once more: all of a file is read and divided into
groups, and a slice has the groups whose first record it has."""

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tests.twin import reading, records
from tests.twin.reading import Slice
from tests.twin.records import MAX_TEXT

TOKEN_BYTES = 4  # that a token between records counts


class Record(NamedTuple):
    """A record that can be used: its position, text, what it is grouped by (its type and value;
    None: nothing), and what it is ordered by."""

    position: int
    text: str
    group: tuple[type, Any] | None
    order: tuple[int, Any]


class Joined(NamedTuple):
    """A document: its records in order, and the position of its group's first record."""

    records: list[Record]
    of_group: int

    @property
    def position(self) -> int:
        return min(record.position for record in self.records)


def between(twin: Any, source: dict[str, Any]) -> list[int]:
    """The ids between two records."""
    parsed = twin.tokenizer.parsed
    known = parsed["model"]["vocab"] if isinstance(parsed["model"].get("vocab"), dict) else {}
    known = {**known, **{entry["content"]: entry["id"] for entry in parsed["added_tokens"]}}
    given = source["group"][2]
    return [known[token] if isinstance(token, str) else token for token in given]


def joined(twin: Any, source: dict[str, Any], file: int) -> list[Joined]:
    """All documents of a file."""
    cache = source.setdefault("joined", {})
    if file not in cache:
        found: list[Joined] = []
        many = itertools.count()

        def same(record: Record) -> Any:
            return next(many) if record.group is None else record.group

        extra = TOKEN_BYTES * len(source["group"][2])
        every = [r for part in _parts(source, file) for r in _records(twin, source, part)]
        for _, group in itertools.groupby(every, same):
            members = list(group)
            of_group = members[0].position
            while members:
                size = n = 0
                for record in members:
                    size += max(1, len(record.text.encode()) + extra)
                    if n and size > MAX_TEXT:
                        break
                    n += 1
                found.append(Joined(members[:n], of_group))
                members = members[n:]
        cache[file] = [
            one._replace(records=sorted(one.records, key=lambda record: record.order))
            for one in found
        ]
    return cache[file]


def _parts(source: dict[str, Any], file: int) -> Iterator[Slice]:
    _, _, count = source["files"][file]
    return (Slice(file, piece, 0, 0, 1, 1) for piece in range(count))


def _records(twin: Any, source: dict[str, Any], part: Slice) -> list[Record]:
    """The records of a slice that can be used."""
    texts = dict(reading.documents(source, part, twin.reader, lambda position: True))
    group_by, order_by, _ = source["group"]
    found = []
    for position, record in _raw(source, part):
        if position in texts:
            group, order = records.at(record, group_by), records.at(record, order_by)
            group, order = (None if one != one else one for one in (group, order))
            rank = {bool: 0, int: 1, float: 1, type(None): 3}.get(type(order), 2)
            key = (rank, 0 if order is None else order)
            found.append(
                Record(
                    position,
                    texts[position].text,
                    None if group is None else (type(group), group),
                    key if order_by else (0, 0),
                )
            )
    return found


def _raw(source: dict[str, Any], part: Slice) -> Iterator[tuple[int, Any]]:
    """(position, record) of a slice."""
    name, size, _ = source["files"][part.file]
    path = os.path.join(source["prefix"], name)
    format, compression = reading.format_of(source, name)
    if format == "jsonl":
        for position, line in reading._lines(path, size, compression, source["step_bytes"], part):
            try:
                yield position, records.parsed((line or b"").decode())
            except ValueError:
                continue
        return
    names = [key for key in source["group"][:2] if key]
    names += [name.partition(".")[0] for name in names]
    first, table = reading._table(path, format, part.piece, names)
    columns = {
        name: reading._values(table.column(name)) for name in table.schema.names if name in names
    }
    for i in part.units(table.num_rows):
        yield first + i, {name: values[i] for name, values in columns.items()}


def owned(twin: Any, source: dict[str, Any], part: Slice) -> list[Joined]:
    """The documents of a slice."""
    inside = {record.position for record in _records(twin, source, part)}
    return [one for one in joined(twin, source, part.file) if one.of_group in inside]


def sizes(twin: Any, source: dict[str, Any], file: int, piece: int) -> list[tuple[int, int]]:
    """(position, bytes) of all documents of a piece."""
    extra = TOKEN_BYTES * len(source["group"][2])
    return [
        (
            # A pass chooses by the document's first usable record.
            one.position,
            sum(max(1, len(record.text.encode()) + extra) for record in one.records),
        )
        for one in owned(twin, source, Slice(file, piece, 0, 0, 1, 1))
    ]


def token_documents(
    twin: Any, source: dict[str, Any], part: Slice, wanted: Callable[[int], bool]
) -> Iterator[tuple[int, list[int], list[tuple[int, int, int]]]]:
    """(position, ids, (position, first token, tokens) of each record) of a slice's documents."""
    gap = between(twin, source)
    for one in owned(twin, source, part):
        if not wanted(one.position):
            continue
        encoded = []
        for record in one.records:
            found = twin.tokenizer.encode(reading.Text(record.text))
            if found is not None and source["marks"].isdisjoint(found[0]):
                encoded.append((record.position, found[0]))
        if not any(ids for _, ids in encoded):
            continue
        ids: list[int] = []
        of_records = []
        for i, (position, own) in enumerate(encoded):
            ids += gap if i else []
            of_records.append((position, len(ids), len(own)))
            ids += own
        yield min(position for position, _ in encoded), ids, of_records
