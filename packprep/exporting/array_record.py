r"""Export a dataset as ArrayRecord files for Grain and MaxText, one file per shard.

A record is a serialized `tf.train.Example`. Its features are lists of integers:

    documents   tokens: ids of the document, with the recipe's bos and eos
    rows        inputs, inputs_position, inputs_segmentation, targets, targets_position,
                targets_segmentation, and the other columns of the loader that a task needs

In rows, targets are already shifted, and targets_segmentation is 0 at untrained positions, as in a
batch of MaxText. MaxText's Grain pipeline reads one column and packs its lists itself, so it reads
documents.

The message is small, so this file writes it without TensorFlow (example.proto and feature.proto):

    Example { 1: Features { 1: entry { 1: name  2: Feature { 3: Int64List { 1: packed varints }}}}}
                                                Feature { 2: FloatList { 1: packed float32 }}

The files have the options that Grain's documentation asks for: each record is a group of its own.
"""

import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from packprep.building.processes import Do, Report, one_by_one
from packprep.dataset.boundaries import offsets_of
from packprep.dataset.loader import open_dataset
from packprep.dataset.manifest import Manifest, first_rows
from packprep.errors import RecipeError
from packprep.exporting.export import (
    Exporting,
    ShardToExport,
    each_shard,
    plan_of,
    restored,
    say_what_documents_lack,
    sound_shard,
)
from packprep.exporting.mds import columns_of
from packprep.exporting.parquet import row_groups
from packprep.format.digests import digest_of
from packprep.storage import Folder, LocalCopy

OPTIONS = "group_size:1"
DOCUMENT_COLUMN = "tokens"
_NAMES = {
    "tokens": ("inputs",),
    "labels": ("targets",),
    "segment_ids": ("inputs_segmentation",),
    "position_ids": ("inputs_position", "targets_position"),
    "loss_mask": ("targets_segmentation",),
}
"""Maps a column of the loader to its features. A column without an entry keeps its name."""
_LENGTH_DELIMITED = 2  # wire type of strings, messages and packed lists


def check(exporting: Exporting) -> None:
    """Check that the package array_record is installed.

    Raises:
        RecipeError: If it is not installed.
    """
    try:
        import array_record.python.array_record_module  # noqa: F401
    except ImportError as error:
        raise RecipeError(
            f"--to array_record needs the package array_record, which cannot be imported: {error}\n"
            "hint: install it, as with pip install 'packprep[array_record]'"
        ) from None


def write(exporting: Exporting) -> dict[str, Any]:
    """Write the files, and return the entries `features`, `records` and `files` of the receipt."""
    of_documents = exporting.form == "documents"
    if of_documents:
        say_what_documents_lack(exporting)
    setup = _documents if of_documents else _rows
    written = dict(each_shard(exporting, setup, exporting.out, workers=exporting.workers))
    files = [written[b] for b in sorted(written)]
    if in_part := sum(file.pop("in_part") for file in files):
        exporting.progress.say(
            f"warning: {in_part:,} documents are only partly trained, by loss_spans or messages. A"
            " list of ids cannot express this, so a trainer trains on all of them\n"
            "hint: --what rows has the trained positions"
        )
    features = (
        [DOCUMENT_COLUMN]
        if of_documents
        else sorted(
            name
            for column in columns_of(exporting.manifest)
            for name in _NAMES.get(column, (column,))
        )
    )
    return {
        "features": features,
        "records": sum(file["records"] for file in files),
        "files": files,
    }


def said(result: Mapping[str, Any]) -> list[str]:
    """Return a line that describes the export, and a line with MaxText's options for documents."""
    summary = f"{result['records']:,} {result['what']}, {', '.join(result['features'])}"
    if result["what"] != "documents":
        return [summary]
    options = (
        "dataset_type=grain",
        "grain_file_type=arrayrecord",
        f"grain_train_files={result['out']}/*.array_record",
        f"train_data_columns=[{DOCUMENT_COLUMN}]",
        "tokenize_train_data=False",
        "grain_packing_type=concat_then_split",
    )
    return [summary, f"MaxText: {shlex.join(options)}"]


def example(features: Mapping[str, np.ndarray]) -> bytes:
    """Return a serialized `tf.train.Example` with lists of numbers.

    Args:
        features: Maps a name to integers or floats, [n]. Floats are stored as float32.
    """
    entries = bytearray()
    for name in sorted(features):
        values = features[name]
        if values.dtype.kind == "f":
            kind, packed = 2, values.astype("<f4").tobytes()
        else:
            kind, packed = 3, _varints(values)
        feature = _field(kind, _field(1, packed))
        entries += _field(1, _field(1, name.encode()) + _field(2, feature))
    return _field(1, bytes(entries))


def _field(number: int, data: bytes) -> bytes:
    """Return a length-delimited field of a message."""
    return bytes([number << 3 | _LENGTH_DELIMITED]) + _varints(np.array([len(data)])) + data


def _varints(values: np.ndarray) -> bytes:
    """Return integers as concatenated varints. A negative integer takes ten bytes."""
    numbers = values.astype(np.int64).view(np.uint64)
    most_bits = int(numbers.max()).bit_length() if len(numbers) else 0
    shifts = np.arange(0, max(most_bits, 1), 7, dtype=np.uint64)
    groups = numbers[:, None] >> shifts
    # An integer takes a byte per seven bits, up to its highest bit. Each byte except the last one
    # of an integer has its highest bit set.
    is_used = groups != 0
    is_used[:, 0] = True
    is_followed = np.zeros_like(is_used)
    is_followed[:, :-1] = is_used[:, 1:]
    stored = (groups & np.uint64(0x7F)).astype(np.uint8) | is_followed.astype(np.uint8) << 7
    return stored[is_used].tobytes()


Records = Callable[[ShardToExport, Report], Iterator[tuple[bytes, bool]]]
"""Yields the records of a shard, and whether the record is of a document trained in part."""


def _documents(local: LocalCopy, manifest: Manifest, out: Folder) -> Do:
    plan = plan_of(local, manifest)

    def records(item: ShardToExport, report: Report) -> Iterator[tuple[bytes, bool]]:
        with sound_shard(local, manifest, item.number) as shard:
            documents = restored(plan, manifest, shard)
        bounds = offsets_of(documents.lengths).tolist()
        for begin, end, in_part in zip(
            bounds[:-1], bounds[1:], documents.in_part.tolist(), strict=True
        ):
            yield example({DOCUMENT_COLUMN: documents.tokens[begin:end]}), in_part
        report(len(documents.lengths), shard.size, len(documents.tokens), 0)

    return one_by_one(_file_of(out, records))


def _rows(local: LocalCopy, manifest: Manifest, out: Folder) -> Do:
    dataset, begins = open_dataset(local.folder, max_open=1), first_rows(manifest)
    columns = list(columns_of(manifest))

    def records(item: ShardToExport, report: Report) -> Iterator[tuple[bytes, bool]]:
        with sound_shard(local, manifest, item.number) as shard:
            done_bytes = 0
            for rows in row_groups(shard.rows, shard.seq_length):
                batch = dataset.batch(begins[item.number] + np.array(rows), columns=columns)
                # MaxText trains positions where targets_segmentation is not 0.
                batch["loss_mask"] = np.where(batch["loss_mask"], batch["segment_ids"], 0)
                for i in range(len(rows)):
                    row = {
                        name: batch[column][i]
                        for column in columns
                        for name in _NAMES.get(column, (column,))
                    }
                    yield example(row), False
                bytes_so_far = shard.size * rows.stop // max(1, shard.rows)
                report(0, bytes_so_far - done_bytes, len(rows) * shard.seq_length, 0)
                done_bytes = bytes_so_far

    return one_by_one(_file_of(out, records))


def _file_of(out: Folder, records: Records) -> Callable[[ShardToExport, Report], dict[str, Any]]:
    """Return a function that writes the records of a shard to a file of `out`.

    The library writes and reads only files with a path. So the file is made in a temporary folder.
    """
    from array_record.python.array_record_module import ArrayRecordWriter

    def export(item: ShardToExport, report: Report) -> dict[str, Any]:
        name = f"{item.number:06d}.array_record"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            writer, count, in_part = ArrayRecordWriter(str(path), OPTIONS), 0, 0
            for record, is_in_part in records(item, report):
                writer.write(record)
                count, in_part = count + 1, in_part + is_in_part
            writer.close()
            data = path.read_bytes()
        out.write(name, [data])
        return {
            "file": name,
            "bytes": len(data),
            "digest": digest_of(data),
            "records": count,
            "in_part": in_part,
        }

    return export
