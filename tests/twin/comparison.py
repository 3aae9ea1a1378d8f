"""What the twin computes against what a shard holds, array by array."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.twin import objectives
from tests.twin.shard import (
    Document,
    Rendered,
    Segment,
    Twin,
    documents_of,
    laid_out,
    loss_weights,
    places_in,
    render,
    rendered_row,
    row_arrays,
    segments_of,
)

ROW_ARRAYS = ("tokens", "labels", "segment_ids", "loss_mask")
FILL = "segment_fill"  # is there only where one is above 0
MEDIA = [f"media_{name}" for name in ("offsets", "ref_offsets", "slot", "tokens", "kind", "ref")]
RECORDS = [f"record_{name}" for name in ("offsets", "position", "start", "tokens")]
WEIGHTS = "trained_weights"  # is there only where one is not 1
LOSS_WEIGHTS = (  # is there in later epochs alone, in the place of what shards store of blocks
    "loss_weights"
)
MAX_DIFFERENCES = 3
"""Differences of one array that are reported."""

Arrays = Mapping[str, np.ndarray]
Done = Callable[[int, int], None]
"""(done, of): so much of the shard's work is done."""


class Difference(NamedTuple):
    """Where the stored value is not the twin's."""

    message: str
    row: int | None = None
    slot: int | None = None
    stored: Any = None


def compare_plan(plan: Mapping[str, Any]) -> list[str]:
    """What is wrong with what a plan worked out for its tasks."""
    drawable = plan["vocabulary"]["vocab_size"] - len(set(plan["vocabulary"]["special_ids"]))
    kinds = [(task, objectives.of(task["objective"])) for task in plan["tasks"]]
    return [
        message
        for task, kind in kinds
        if hasattr(kind, "differences")
        for message in kind.differences(task, drawable)
    ]


def compare_shard(
    twin: Twin, shard: int, arrays: Arrays, done: Done, epoch: int = 0
) -> tuple[list[Difference], int]:
    """(differences, segments that were recomputed) of a whole shard: its documents, the order of
    its rows, every array.

    epoch: whose rows the arrays are. SourceError where a source file cannot be read.
    """
    documents = documents_of(twin, shard, None)
    of_rows = laid_out(twin, documents)
    count = sum(map(len, of_rows))
    if found := _differing_documents(twin, of_rows, arrays):
        return found, count
    if (found := _differing_names(twin, documents, of_rows, arrays)) or (
        found := _differing_counts(of_rows, arrays)
    ):
        return found, count
    supervised = twin.loss_weighting != "token" or any(d.has_ranges() for d in documents)
    reported: dict[str, int] = {}
    columns: dict[str, list[Any]] = {
        name: [] for name in arrays if name not in (*ROW_ARRAYS, LOSS_WEIGHTS)
    }
    for name in (
        "row_offsets",
        "block_offsets",
        "trained_offsets",
        "media_offsets",
        "media_ref_offsets",
        "record_offsets",
    ):
        if name in columns:
            columns[name].append(0)
    for r, row in enumerate(of_rows):
        made = rendered_row(twin, row, supervised, epoch)
        plain = row_arrays(
            [(one.slots, one.loss, one.labels) for one in made],
            twin.seq_length,
            twin.roles["pad"],
            twin.packing["pad_seq_to_mult"],
        )
        for name in ROW_ARRAYS:
            if name in arrays:
                found += _differences_of(name, arrays[name][r], plain[name], reported, r)
        if LOSS_WEIGHTS in arrays:
            weights = [0.0] * twin.seq_length
            for begin, segment, one in zip(
                plain["cu_seqlens_padded"] or plain["cu_seqlens"], row, made, strict=False
            ):
                weights[begin : begin + len(one.slots)] = loss_weights(
                    twin, segment, one, supervised
                )
            found += _differences_of(LOSS_WEIGHTS, arrays[LOSS_WEIGHTS][r], weights, reported, r)
        for name in ("cu_seqlens", "cu_seqlens_padded"):
            if name in columns:
                columns[name] += plain[name]
        columns["row_offsets"].append(columns["row_offsets"][-1] + len(row))
        for begin, segment, one in zip(
            plain["cu_seqlens_padded"] or plain["cu_seqlens"], row, made, strict=False
        ):
            _add_header(columns, segment, one)
            if "record_offsets" in columns:
                _add_records(columns, segment, one)
            if "media_offsets" in columns:
                _add_media(columns, begin, one, sorted(twin.media))
        done(r + 1, len(of_rows))
    if WEIGHTS in columns and set(columns[WEIGHTS]) <= {1.0} and WEIGHTS not in arrays:
        del columns[WEIGHTS]
    for name, values in columns.items():
        if name in arrays:
            found += _differences_of(name, arrays[name], values, reported, None)
        else:
            found.append(Difference(f"the array {name!r} is missing: it is the twin's"))
    return found, count


def _add_header(columns: dict[str, list[Any]], segment: Segment, one: Rendered) -> None:
    for name, value in _header(segment, one).items():
        if name in columns:
            columns[name].append(value)
    if "block_offsets" in columns:
        columns["block_offsets"].append(columns["block_offsets"][-1] + len(one.blocks))
    if "block_noise" in columns:
        columns["block_noise"] += [level for level, _ in one.blocks]
        columns["block_loss_weight"] += [weight for _, weight in one.blocks]
    if "trained_offsets" in columns:
        columns["trained_offsets"].append(columns["trained_offsets"][-1] + len(one.trainable))
        columns["trained_ranges"] += [(begin, end) for begin, end, _ in one.trainable]
        columns.setdefault(WEIGHTS, []).extend(weight for _, _, weight in one.trainable)


def _add_records(columns: dict[str, list[Any]], segment: Segment, one: Rendered) -> None:
    """The first segment of a document has all of its records, unless they were removed."""
    found = segment.document.records if segment.start == 0 and one.n else ()
    for position, start, n in found:
        columns["record_position"].append(position)
        columns["record_start"].append(start)
        columns["record_tokens"].append(n)
    columns["record_offsets"].append(columns["record_offsets"][-1] + len(found))


def _add_media(
    columns: dict[str, list[Any]], begin: int, one: Rendered, kinds: Sequence[str]
) -> None:
    for slot, place in one.media:
        ref = place.ref.encode()
        columns["media_slot"].append(begin + slot)
        columns["media_tokens"].append(place.slots)
        columns["media_kind"].append(kinds.index(place.kind))
        columns["media_ref"] += ref
        columns["media_ref_offsets"].append(columns["media_ref_offsets"][-1] + len(ref))
    columns["media_offsets"].append(columns["media_offsets"][-1] + len(one.media))


def _header(segment: Segment, one: Rendered) -> dict[str, Any]:
    document = segment.document
    return {
        "segment_doc": document.position,
        "segment_start": segment.document.base + segment.start,
        "segment_key": segment.key,
        "segment_tokens": one.n,
        "segment_prefix": one.prefix,
        "segment_noise": one.level,
        "segment_loss_weight": one.weight,
        "segment_file": document.file,
        "segment_task": segment.task,
        "segment_source": document.source,
        "segment_repeat": document.use,
        FILL: segment.fill,
    }


def _differences_of(
    name: str, stored: np.ndarray, values: Sequence[Any], reported: dict[str, int], row: int | None
) -> list[Difference]:
    """The first differences of an array, or of one row of it."""
    ours = np.array(values, stored.dtype).reshape(-1, *stored.shape[1:])
    if ours.shape != stored.shape:
        return [Difference(f"{name} has shape {list(stored.shape)}, the twin's {list(ours.shape)}")]
    found = []
    as_bits = f"u{stored.itemsize}"
    for location in np.argwhere(np.ascontiguousarray(stored).view(as_bits) != ours.view(as_bits)):
        reported[name] = reported.get(name, 0) + 1
        if reported[name] > MAX_DIFFERENCES:
            break
        at = tuple(int(i) for i in location)
        where = "" if row is not None else f"[{', '.join(map(str, at))}]"
        found.append(
            Difference(
                f"{name}{where}: the twin gives {ours[at]}",
                row,
                None if row is None else at[0],
                stored[at].item(),
            )
        )
    return found


def _locations(arrays: Arrays) -> list[tuple[int, int, int, int]]:
    names = ("source", "file", "doc", "repeat")
    return list(zip(*(arrays[f"segment_{name}"].tolist() for name in names), strict=True))


def _differing_documents(
    twin: Twin, of_rows: Sequence[Sequence[Segment]], arrays: Arrays
) -> list[Difference]:
    """Documents that the shard lacks, or has and should not."""
    stored = set(_locations(arrays))
    ours = {segment.document.location() for row in of_rows for segment in row}
    found = [
        Difference(
            f"{_document(twin, location)} is not there, and the twin finds it in this shard's part"
            " of the source"
        )
        for location in sorted(ours - stored)
    ]
    found += [
        Difference(
            f"{_document(twin, location)} is there, and the twin finds no such document in this"
            " shard's part"
        )
        for location in sorted(stored - ours)
    ]
    return found


def _document(twin: Twin, location: tuple[int, int, int, int]) -> str:
    source, file, position, use = location
    files = twin.plan["files"]
    name = files[file]["name"] if file < len(files) else f"file {file}"
    source_name = twin.sources[source]["name"] if source < len(twin.sources) else f"source {source}"
    return f"the document at {position} of {name!r} of source {source_name!r} (use {use})"


def _differing_names(
    twin: Twin, documents: Sequence[Document], of_rows: Sequence[Sequence[Segment]], arrays: Arrays
) -> list[Difference]:
    """Arrays that are there and should not be, or the other way round."""
    has_media = any(
        places_in(segment) and not twin.is_removed(segment.document)
        for row in of_rows
        for segment in row
    )
    supervised = twin.loss_weighting != "token" or any(d.has_ranges() for d in documents)
    compact = twin.recipe["output"]["columns"] != "full"
    expected = {
        "tokens": True,
        "labels": twin.with_labels,
        "segment_ids": not compact,
        "loss_mask": not compact or twin.in_place or supervised,
        "row_offsets": True,
        "cu_seqlens": True,
        "cu_seqlens_padded": twin.packing["pad_seq_to_mult"] > 1,
        "block_offsets": twin.with_blocks,
        **dict.fromkeys(
            ("block_noise", "block_loss_weight"), twin.with_blocks and LOSS_WEIGHTS not in arrays
        ),
        **dict.fromkeys(("trained_offsets", "trained_ranges"), supervised),
        **dict.fromkeys(MEDIA, has_media),
        **dict.fromkeys(RECORDS, any(source["group"][0] for source in twin.sources)),
        FILL: any(segment.fill for row in of_rows for segment in row),
    }
    ours = {name for name, is_expected in expected.items() if is_expected}
    stored = {
        name for name in arrays if not name.startswith("segment_") or name in ("segment_ids", FILL)
    } - {
        WEIGHTS,
        LOSS_WEIGHTS,
    }
    return [
        Difference(
            f"the array {name!r} is"
            f" {'not the twin' if name in stored else 'missing: it is the twin'}'s"
        )
        for name in sorted(ours ^ stored)
    ]


def _differing_counts(of_rows: Sequence[Sequence[Segment]], arrays: Arrays) -> list[Difference]:
    ours = len(of_rows), sum(map(len, of_rows))
    stored = len(arrays["tokens"]), len(arrays["segment_key"])
    if ours == stored:
        return []
    return [
        Difference(
            f"the shard has {stored[0]} rows and {stored[1]} segments, the twin {ours[0]} and"
            f" {ours[1]}"
        )
    ]


def compare_segments(
    twin: Twin, shard: int, arrays: Arrays, chosen: Sequence[int], done: Done, epoch: int = 0
) -> tuple[list[Difference], int]:
    """(differences, segments that were recomputed) of some of a shard's segments; where they lie is
    taken as stored. epoch: whose rows the arrays are.

    Under `concat` all of the shard's documents are read, for the cuts of one follow from those
    before it. SourceError where a source file cannot be read.
    """
    locations = _locations(arrays)
    concat = twin.packing["algorithm"] == "concat"
    documents = documents_of(twin, shard, None if concat else {locations[g] for g in chosen})
    if concat:
        segments = [segment for row in laid_out(twin, documents) for segment in row]
    else:
        segments = [segment for document in documents for segment in segments_of(twin, document)]
    known = {document.location() for document in documents}
    ours = {
        (*segment.document.location(), segment.document.base + segment.start): segment
        for segment in segments
    }
    row_of = np.repeat(np.arange(len(arrays["row_offsets"]) - 1), np.diff(arrays["row_offsets"]))
    found = []
    for i, g in enumerate(chosen):
        row, start = int(row_of[g]), int(arrays["segment_start"][g])
        segment = ours.get((*locations[g], start))
        if segment is not None:
            found += [
                difference._replace(message=f"segment {g}: {difference.message}")
                for difference in _of_segment(twin, arrays, g, row, segment, epoch)
            ]
        elif locations[g] in known:
            found.append(
                Difference(f"segment {g}: the twin does not cut its document at token {start}", row)
            )
        else:
            message = (
                f"segment {g}: the twin finds no such document in this shard's part:"
                f" {_document(twin, locations[g])}"
            )
            found.append(Difference(message, row))
        done(i + 1, len(chosen))
    return found, len(chosen)


def _of_segment(
    twin: Twin, arrays: Arrays, g: int, row: int, segment: Segment, epoch: int
) -> Iterator[Difference]:
    members = range(int(arrays["row_offsets"][row]), int(arrays["row_offsets"][row + 1]))
    alike = [h for h in members if arrays["segment_task"][h] == arrays["segment_task"][g]]
    in_row = [int(arrays["segment_key"][h]) for h in alike]
    supervised = "trained_offsets" in arrays
    if segment.document.has_ranges() and not supervised:
        yield Difference(
            "its document says how it is trained, and the shard has no trained ranges", row
        )
        return
    reported: dict[str, int] = {}
    if segment.task != arrays["segment_task"][g] or segment.key != arrays["segment_key"][g]:
        in_row, alike = [segment.key], [g]
    one = render(twin, segment, in_row, alike.index(g), supervised, epoch)
    header = _header(segment, one)
    if FILL not in arrays and not segment.fill:
        del header[FILL]
    for name, value in header.items():
        if name not in arrays:
            yield Difference(f"the array {name!r} is missing: the twin gives {value}", row)
            continue
        for difference in _differences_of(name, arrays[name][g : g + 1], [value], reported, None):
            yield difference._replace(message=f"{name}: the twin gives {value}", row=row)
    bound = row + g
    real = arrays["cu_seqlens"]
    slots = int(real[bound + 1] - real[bound])
    if slots != len(one.slots):
        yield Difference(f"it takes {slots} slots, the twin's {len(one.slots)}", row)
        return
    begin = int(arrays.get("cu_seqlens_padded", real)[bound])
    values: dict[str, Sequence[float]] = {
        "tokens": one.slots,
        "labels": one.labels,
        "loss_mask": one.loss,
    }
    if LOSS_WEIGHTS in arrays:
        values[LOSS_WEIGHTS] = loss_weights(twin, segment, one, supervised)
    for name in values.keys() & arrays.keys():
        for difference in _differences_of(
            name, arrays[name][row, begin : begin + slots], values[name], reported, row
        ):
            yield difference._replace(slot=begin + (difference.slot or 0))
    parts: dict[str, list[Any]] = {
        "block_noise": [level for level, _ in one.blocks],
        "block_loss_weight": [weight for _, weight in one.blocks],
        "trained_ranges": [(begin, end) for begin, end, _ in one.trainable],
        WEIGHTS: [weight for _, _, weight in one.trainable],
    }
    for name, ours in parts.items():
        if name in arrays or (name == WEIGHTS and supervised):
            first, last = arrays[f"{name.split('_')[0]}_offsets"][g : g + 2]
            stored = (
                arrays[name][first:last] if name in arrays else np.ones(last - first, np.float32)
            )
            for difference in _differences_of(name, stored, ours, reported, None):
                yield difference._replace(row=row)
    if RECORDS[0] in arrays:
        ours_of: dict[str, list[Any]] = {
            name: [0] if name == RECORDS[0] else [] for name in RECORDS
        }
        _add_records(ours_of, segment, one)
        first, last = arrays[RECORDS[0]][g : g + 2]
        for name in RECORDS[1:]:
            for difference in _differences_of(
                name, arrays[name][first:last], ours_of[name], reported, None
            ):
                yield difference._replace(row=row)
    media: dict[str, list[Any]] = {name: [0] if name.endswith("offsets") else [] for name in MEDIA}
    _add_media(media, begin, one, sorted(twin.media))
    first, last = arrays["media_offsets"][g : g + 2] if MEDIA[0] in arrays else (0, 0)
    if last - first != len(one.media):
        yield Difference(f"it has {last - first} places of media, the twin's {len(one.media)}", row)
    elif last > first:
        low, high = arrays["media_ref_offsets"][[first, last]]
        parts_of = {name: slice(first, last) for name in MEDIA} | {"media_ref": slice(low, high)}
        for name in MEDIA[2:]:
            for difference in _differences_of(
                name, arrays[name][parts_of[name]], media[name], reported, None
            ):
                yield difference._replace(row=row)
