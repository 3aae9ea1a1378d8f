"""Export a dataset as a folder of MosaicML's StreamingDataset, in its format MDS.

Each row is a sample with the loader's columns.

    shard.NNNNN.mds   u32 samples   u32[samples + 1] first bytes   JSON of the columns   samples
    index.json        the files, with their samples, bytes and xxh3-128, written last

All numbers are little-endian. The JSON gives the dtype and the shape of each column, which are the
same in all samples. A sample is the concatenated bytes of its columns, in order of their names. The
format follows `streaming.base.format.mds` (mosaicml-streaming 0.13).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from packprep.building.processes import Do, Report, one_by_one
from packprep.dataset.attention import RULES
from packprep.dataset.loader import open_dataset
from packprep.dataset.manifest import (
    Manifest,
    block_columns,
    drawn_tasks,
    first_rows,
    has_weighted_spans,
    is_in_place,
)
from packprep.exporting.export import (
    Exporting,
    ShardToExport,
    each_shard,
    files_of_rows,
    sound_shard,
)
from packprep.format.digests import digest_of
from packprep.format.json_files import encode
from packprep.storage import Folder, LocalCopy

FILE_SLOTS = 1 << 22
"""Approximate number of slots per file.

A slot takes 17 to 29 bytes. A file has about 64 MiB, as with streaming's own writer, because a
trainer fetches whole files.
"""
INDEX, HASH = "index.json", "xxh3_128"


def columns_of(manifest: Manifest) -> dict[str, np.dtype]:
    """Return column name → dtype, sorted by name.

    The columns are the loader's. `loss_weights` is present only if there is a same-position task
    or documents give weights. `prefix_ends`, `block_lengths` and `block_starts` are present only if
    a task needs them.
    """
    tasks = drawn_tasks(manifest)
    rules = [RULES[task["attention"]] for task in tasks]
    dtypes = dict.fromkeys(("tokens", "labels", "segment_ids", "position_ids"), "<i4") | {
        "loss_mask": "u1"
    }
    if has_weighted_spans(manifest) or any(is_in_place(task) for task in tasks):
        dtypes["loss_weights"] = "<f4"
    if any(rule.ahead != "never" for rule in rules):
        dtypes["prefix_ends"] = "<i4"
    dtypes |= dict.fromkeys(block_columns(manifest), "<i4")
    return {name: np.dtype(dtypes[name]) for name in sorted(dtypes)}


def check(exporting: Exporting) -> None:
    """Accept every dataset, since labels are pre-shifted and a column marks the trained slots."""


def write(exporting: Exporting) -> dict[str, Any]:
    """Write the files, and return the entries `columns`, `rows` and `files` for the receipt."""
    manifest, out = exporting.manifest, exporting.out
    # A shard without rows has no file.
    ranges = [
        [rows for rows in of_shard if rows] for of_shard in files_of_rows(manifest, FILE_SLOTS)
    ]
    written = dict(each_shard(exporting, _setup, out, ranges, workers=exporting.workers))
    files = [file for shard in sorted(written) for file in written[shard]]
    shared = _columns_as_stored(manifest) | {"compression": None, "zip_data": None}
    shards = [
        shared | {"samples": file["rows"], "raw_data": {
            "basename": file["file"], "bytes": file["bytes"], "hashes": {HASH: file["digest"]},
        }}
        for file in files
    ]  # fmt: skip
    index = encode({"version": 2, "shards": shards})
    out.write(INDEX, [index])
    files.append({"file": INDEX, "bytes": len(index), "digest": digest_of(index)})
    return {"columns": list(columns_of(manifest)), "rows": first_rows(manifest)[-1], "files": files}


def said(result: Mapping[str, Any]) -> list[str]:
    """Return a line that describes the export."""
    return [
        f"{result['rows']:,} rows, {', '.join(result['columns'])}, for streaming.StreamingDataset"
    ]


def _columns_as_stored(manifest: Manifest) -> dict[str, Any]:
    """Return the description of the columns that each .mds file and index.json contain."""
    columns, length = columns_of(manifest), manifest["seq_length"]
    return {
        "column_encodings": [f"ndarray:{dtype.name}:{length}" for dtype in columns.values()],
        "column_names": list(columns),
        "column_sizes": [dtype.itemsize * length for dtype in columns.values()],
        "format": "mds",
        "hashes": [HASH],
        "size_limit": None,
        "version": 2,
    }


def _setup(local: LocalCopy, manifest: Manifest, out: Folder, ranges: list[list[range]]) -> Do:
    dataset = open_dataset(local.folder, max_open=1)
    # Files are numbered across shards, so a shard needs the number of its first file.
    begins, first_file = first_rows(manifest), np.cumsum([0, *map(len, ranges)])
    columns, length = columns_of(manifest), manifest["seq_length"]
    # All samples have the same size, so offsets are known before the samples.
    sample = np.dtype([(name, dtype, (length,)) for name, dtype in columns.items()])
    said_of_columns = encode({"compression": None, **_columns_as_stored(manifest)}).rstrip(b"\n")

    def export(item: ShardToExport, report: Report) -> list[dict[str, Any]]:
        entry, first_row, files = manifest["shards"][item.number], begins[item.number], []
        with sound_shard(local, manifest, item.number) as shard:
            done_bytes = 0
            for i, rows in enumerate(ranges[item.number], int(first_file[item.number])):
                name, n = f"shard.{i:05d}.mds", len(rows)
                # The head has the number of samples, n + 1 offsets and the JSON of the columns.
                head = 4 * (n + 2) + len(said_of_columns)
                offsets = head + sample.itemsize * np.arange(n + 1)
                header = b"".join((np.array([n, *offsets], "<u4").tobytes(), said_of_columns))
                # The head and the size show whether an interrupted export completed the file.
                data = _standing(out, name, header, int(offsets[-1]))
                if data is None:
                    samples = np.empty(n, sample)
                    batch = dataset.batch(first_row + np.array(rows), columns=list(columns))
                    for column in columns:
                        # `pop` frees each column after it is copied.
                        samples[column] = batch.pop(column)
                    data = header + samples.tobytes()
                    out.write(name, [data])
                bytes_so_far = entry["bytes"] * rows.stop // shard.rows
                report(0, bytes_so_far - done_bytes, n * length, 0)
                done_bytes = bytes_so_far
                files.append(
                    {"file": name, "bytes": len(data), "digest": digest_of(data), "rows": n}
                )
        return files

    return one_by_one(export)


def _standing(out: Folder, name: str, header: bytes, size: int) -> bytes | None:
    """Return the content of file `name` if an interrupted export completed it, otherwise None."""
    if out.size(name) != size:
        return None
    data = out.read(name)
    return data if data.startswith(header) else None
