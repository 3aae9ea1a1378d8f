r"""Export a dataset as JSON lines, one file per shard.

A line is a document as it was read, or a row as a model reads it.

    {"text": "Ein Satz.\n", "source": "web", "file": "a.jsonl", "position": 0, "use": 0, "start": 0,
    …}

    {"row": 7, "segments": [{"text": "Ein Satz.\n<eos>", "labels": "", "trained": [[0, 15]], "task":
    "causal", …}, …]}

For documents, the original tokens of all segments are restored and joined, without bos and eos. If
group_by joined a document, "records" has the position and the text of each record. A
dataset built from these lines has the same ids if the tokenizer decodes ids without loss. In a row,
each segment has a text. In a segment of a same-position task, the labels are a second text.
"""

import codecs
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from packprep.building.plan import stored_plan
from packprep.building.processes import Do, Report, one_by_one
from packprep.dataset.attention import RULES
from packprep.dataset.loader import Row, open_dataset
from packprep.dataset.manifest import Manifest, first_rows, is_in_place
from packprep.errors import DatasetError
from packprep.exporting.export import (
    Exporting,
    ShardToExport,
    each_shard,
    plan_of,
    restored,
    say_what_documents_lack,
    sound_shard,
)
from packprep.exporting.parquet import row_groups
from packprep.format.digests import digest_of
from packprep.format.json_files import PLAN_NAME, REMOVED_NAME, TOKENIZER_NAME
from packprep.restoring import RecordTexts
from packprep.storage import Folder, LocalCopy
from packprep.tokenizer.texts import ByteTable, TokenTexts, texts_of_dataset

# Name of a count in the receipt → (bytes to count in the lines, text of a warning). The bytes
# cannot occur inside a text, because JSON escapes the quotes of a text.
_MARKS = {
    "not_exact": (
        b'"exact":false',
        (
            'texts (those with "exact": false) have bytes that are not valid UTF-8, for example'
            " because a character was cut. \N{REPLACEMENT CHARACTER} replaces them"
        ),
    ),
    "trained_in_part": (
        b'"all_trained":false',
        (
            'documents (those with "all_trained": false) are only partly trained, by loss_spans'
            " or messages, and their texts do not show it\n"
            "hint: --what rows gives the trained part of each segment"
        ),
    ),
}


def check(exporting: Exporting) -> None:
    """Accept every dataset.

    If the text of a line cannot express everything, the line has a mark. `write` counts the lines
    with each mark.
    """


def write(exporting: Exporting) -> dict[str, Any]:
    """Write the files, and return entries for the receipt.

    The entries are `lines`, `not_exact`, `trained_in_part` and `files`.
    """
    if exporting.form == "documents":
        say_what_documents_lack(exporting)
    setup = _documents if exporting.form == "documents" else _rows
    written = dict(each_shard(exporting, setup, exporting.out, workers=exporting.workers))
    files = [written[b] for b in sorted(written)]
    counts = {key: sum(file[key] for file in files) for key in ("lines", *_MARKS)}
    for key, count in counts.items():
        if key in _MARKS and count:
            exporting.progress.say(f"warning: {count:,} {_MARKS[key][1]}")
    return {**counts, "files": files}


def said(result: Mapping[str, Any]) -> list[str]:
    """Return a line that describes the export."""
    return [f"{result['lines']:,} {result['what']}, one per line"]


def text_and_cuts(data: bytes, cuts: Sequence[int]) -> tuple[str, list[tuple[int, int]], bool]:
    """Decode bytes that should be UTF-8, and convert byte offsets to character offsets.

    Args:
        data: The bytes.
        cuts: Ascending byte offsets.

    Returns:
        (text, offsets of the cuts, exact). Each cut has two offsets in the text. If the cut is
        inside a character, they are before and after this character. Otherwise they are equal.
        `exact` is True if the text, encoded as UTF-8, is equal to the data.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    parts, character_cuts, position, count = [], [], 0, 0
    for cut in cuts:
        parts.append(decoder.decode(data[position:cut]))
        position, count = cut, count + len(parts[-1])
        character_cuts.append((count, count + bool(decoder.getstate()[0])))
    text = "".join(parts) + decoder.decode(data[position:], True)
    return text, character_cuts, "\N{REPLACEMENT CHARACTER}" not in text or text.encode() == data


def _texts(local: LocalCopy, manifest: Manifest) -> tuple[TokenTexts, ByteTable]:
    local.fetch(PLAN_NAME, TOKENIZER_NAME, REMOVED_NAME)
    texts = texts_of_dataset(local.folder, manifest)
    return texts, ByteTable(texts, manifest["vocab_size"])


def _files(local: LocalCopy) -> list[str]:
    """Return the names of the source files, indexed by segment_file, or [] without a plan."""
    plan = stored_plan(local.folder)
    return [file["name"] for file in plan["files"]] if plan else []


def _origin(
    manifest: Manifest,
    files: Sequence[str],
    arrays: Mapping[str, np.ndarray],
    segments: np.ndarray,
    path: str,
) -> Iterator[dict[str, Any]]:
    """Yield {source, file, position, use, start} for each of the given segments of a shard.

    Raises:
        DatasetError: If a segment's source is not in the manifest.
    """
    names = [source["name"] for source in manifest["sources"]]
    columns = [
        arrays[f"segment_{name}"][segments].tolist()
        for name in ("source", "file", "doc", "repeat", "start")
    ]
    for source, file, position, use, start in zip(*columns, strict=True):
        if source >= len(names):
            raise DatasetError(f"{path}: segment_source {source} is not a source of the manifest")
        where = files[file] if file < len(files) else f"file {file}"
        yield {
            "source": names[source],
            "file": where,
            "position": position,
            "use": use,
            "start": start,
        }


def _documents(local: LocalCopy, manifest: Manifest, out: Folder) -> Do:
    plan = plan_of(local, manifest)
    texts, table = _texts(local, manifest)
    records = RecordTexts(texts, manifest["vocab_size"])
    files = _files(local)

    def lines(item: ShardToExport, report: Report) -> Iterator[dict[str, Any]]:
        with sound_shard(local, manifest, item.number) as shard:
            documents = restored(plan, manifest, shard)
            origins = _origin(manifest, files, shard.arrays, documents.segment, str(shard.path))
            # The text of a document has neither bos nor eos.
            ends = np.cumsum(documents.lengths)
            begins = (ends - documents.lengths + documents.bos).tolist()
            trained, segments = (~documents.in_part).tolist(), documents.segment.tolist()
            entries = zip(
                begins, (ends - documents.eos).tolist(), trained, segments, origins, strict=True
            )
            for begin, end, all_trained, segment, origin in entries:
                data = table.decode(documents.tokens[begin:end])[0].tobytes()
                text, _, exact = text_and_cuts(data, ())
                # Only a text from its document's start can have the space that a tokenizer adds.
                text = text if origin["start"] else texts.without_added_space(text)
                line = {"text": text, **origin, "exact": exact, "all_trained": all_trained}
                own_records = records.of(shard.arrays, segment, documents.tokens[begin:end])
                if listed := [
                    {"position": position, "text": of_record}
                    for position, _, of_record in own_records
                ]:
                    line["records"] = listed
                yield line
            report(len(documents.lengths), shard.size, len(documents.tokens), 0)

    return one_by_one(_file_of(manifest, out, lines))


def _rows(local: LocalCopy, manifest: Manifest, out: Folder) -> Do:
    _, table = _texts(local, manifest)
    files, begins = _files(local), first_rows(manifest)
    dataset = open_dataset(local.folder, max_open=1)

    def lines(item: ShardToExport, report: Report) -> Iterator[dict[str, Any]]:
        with sound_shard(local, manifest, item.number) as shard:
            done_bytes = 0
            # Progress is reported once per group of rows.
            for rows in row_groups(shard.rows, shard.seq_length):
                for i in rows:
                    row = dataset.row(begins[item.number] + i)
                    indices = np.arange(*shard.segment_range(i))
                    origins = _origin(manifest, files, shard.arrays, indices, str(shard.path))
                    segments = [
                        _segment(table, manifest, row, k) | origin
                        for k, origin in enumerate(origins)
                    ]
                    yield {"row": row.index, "segments": segments}
                bytes_so_far = shard.size * rows.stop // shard.rows
                report(0, bytes_so_far - done_bytes, len(rows) * shard.seq_length, 0)
                done_bytes = bytes_so_far

    return one_by_one(_file_of(manifest, out, lines))


def _segment(table: ByteTable, manifest: Manifest, row: Row, k: int) -> dict[str, Any]:
    """Return a segment's text as a model reads it, with the trained ranges.

    The ranges refer to the labels of a same-position task, otherwise to the text. For block
    diffusion, the text is the noised half, and the clean half is its labels.

    Raises:
        DatasetError: If the segment's task is not in the manifest.
    """
    segments = row.segments
    if segments["task"][k] >= len(manifest["tasks"]):
        raise DatasetError(
            f"{row.dataset}: row {row.index}: segment_task {segments['task'][k]} is not a task of"
            " the manifest"
        )
    task = manifest["tasks"][segments["task"][k]]
    begin, end = int(segments["begin"][k]), int(segments["end"][k])
    # The first half of a segment of block diffusion is noised, and the second is clean.
    if RULES[task["attention"]].in_blocks:
        end = begin + (end - begin) // 2
    in_place = is_in_place(task)
    # A 0 at both ends gives each trained range a start and an end.
    mask = np.zeros(end - begin + 2, np.int8)
    is_same_position = task["label_alignment"] == "same_slot"
    trained = row.loss_mask[begin:end] if is_same_position else row.loss_mask[begin : end - 1]
    mask[end - begin + 1 - len(trained) : end - begin + 1] = (
        trained  # The mask is moved to the predicted tokens.
    )
    # `turns` alternates between starts and ends of trained ranges.
    turns = np.flatnonzero(np.diff(mask))

    def decoded(ids: np.ndarray, cuts: np.ndarray) -> tuple[str, list[tuple[int, int]], bool]:
        data, offsets = table.decode(ids[begin:end])
        return text_and_cuts(data.tobytes(), offsets[cuts].tolist())

    text, character_cuts, exact = decoded(row.tokens, turns[:0] if in_place else turns)
    labels = ""
    if in_place:
        # The labels of block diffusion may be shifted by one slot, so x_0 is read instead.
        half = int(segments["end"][k]) - end
        labels, character_cuts, exact_labels = decoded(
            row.tokens[half:] if half else row.labels, turns
        )
        exact &= exact_labels
    ranges = [
        [low, high]
        for (low, _), (_, high) in zip(character_cuts[::2], character_cuts[1::2], strict=True)
    ]
    return {"text": text, "labels": labels, "trained": ranges, "exact": exact, "task": task["name"]}


Lines = Callable[[ShardToExport, Report], Iterator[dict[str, Any]]]


def _file_of(
    manifest: Manifest, out: Folder, lines: Lines
) -> Callable[[ShardToExport, Report], dict[str, Any]]:
    """Return a function that writes the lines of a shard to a file.

    A file that an interrupted export completed is kept. A file appears only when it is complete.
    """
    encoder = msgspec.json.Encoder()

    def export(item: ShardToExport, report: Report) -> dict[str, Any]:
        name, entry = f"{item.number:06d}.jsonl", manifest["shards"][item.number]
        if out.exists(name):
            data = out.read(name)
            report(0, entry["bytes"], entry["rows"] * manifest["seq_length"], 0)
        else:
            buffer = bytearray()
            for line in lines(item, report):
                buffer += encoder.encode(line)
                buffer += b"\n"
            data = bytes(buffer)
            out.write(name, [data])
        counts = {
            "lines": data.count(b"\n"),
            **{key: data.count(mark) for key, (mark, _) in _MARKS.items()},
        }
        return {"file": name, "bytes": len(data), "digest": digest_of(data), **counts}

    return export
