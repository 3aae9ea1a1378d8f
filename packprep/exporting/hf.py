"""A dataset as a folder of Hugging Face `datasets`: what its `save_to_disk` writes and `load_from_disk` takes.

    data-NNNNN-of-NNNNN.arrow   rows in their order, Arrow's streaming format, not compressed: they are mapped, not read
    README.md                   the data card, and what the columns are
    dataset_info.json           the features
    state.json                  which files, and the fingerprint; the last, since no folder is loaded without it

Columns are TRL's (`packprep.exporting.parquet.trl_lists`), and an attention_mask of each segment's number, as LLaMA-Factory and
Axolotl pack: where it is read as a mask it keeps segments apart, and where it is made bool it is one of ones.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from packprep.building.processes import Do, Report, one_by_one
from packprep.dataset.loader import open_dataset
from packprep.dataset.manifest import Manifest, first_rows
from packprep.exporting.export import Exporting, ShardToExport, each_shard, files_of_rows, sound_shard
from packprep.exporting.parquet import KEY, TRL_COLUMNS, refuse_for_trl, row_groups, trl_lists
from packprep.format.digests import digest_of
from packprep.format.json_files import encode
from packprep.storage import Folder, LocalCopy

FILE_SLOTS = 1 << 24
"""Slots of a file, about: 16 bytes each, which a worker holds in memory."""
CARD, INFO, STATE = "README.md", "dataset_info.json", "state.json"
_TYPES = dict.fromkeys(("attention_mask", *TRL_COLUMNS), pa.int32())
_FEATURES = {
    name: {"_type": "List", "feature": {"_type": "Value", "dtype": str(kind)}} for name, kind in _TYPES.items()
}
_USE = """\
This folder is an export of it as a Hugging Face dataset, a row for each row, without padding; packprep does not read it.

```python
from datasets import load_from_disk

rows = load_from_disk("FOLDER")  # a copy of this folder
```

| column | holds |
| --- | --- |
| `input_ids` | a row's segments, one after the other |
| `labels` | not shifted: the token itself where its prediction is trained, else -100, as at the begin of each segment |
| `position_ids` | from 0 in each segment |
| `seq_lengths` | the lengths of the segments |
| `attention_mask` | the number of the slot's segment in its row, from 1 |
"""


def check(exporting: Exporting) -> None:
    """RecipeError for what labels that a model shifts, and causal attention, cannot say."""
    refuse_for_trl(exporting, "--to hf")


def write(exporting: Exporting) -> dict[str, Any]:
    """Write the files; gives what the receipt says of them: rows, files."""
    manifest, out = exporting.manifest, exporting.out
    ranges = files_of_rows(manifest, FILE_SLOTS)
    written = dict(each_shard(exporting, _setup, out, ranges, workers=exporting.workers))
    files = [file for shard in sorted(written) for file in written[shard]]
    whole = {"citation": "", "description": "", "features": _FEATURES, "homepage": "", "license": ""}
    state: dict[str, Any] = {
        "_data_files": [{"filename": file["file"]} for file in files],
        "_fingerprint": manifest["digest"],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    texts = {INFO: encode(whole), STATE: encode(state)}
    if exporting.card is not None:
        texts = {CARD: exporting.card(exporting.dataset, _USE).encode()} | texts
    for name, data in texts.items():
        out.write(name, [data])
        files.append({"file": name, "bytes": len(data), "digest": digest_of(data)})
    return {"rows": first_rows(manifest)[-1], "files": files}


def located(receipt: Mapping[str, Any], out: Folder) -> dict[str, Any]:
    """The receipt as it is: its files are named relative to `out`."""
    return dict(receipt)


def said(result: Mapping[str, Any]) -> list[str]:
    """What was made."""
    return [f"{result['rows']:,} rows, for datasets.load_from_disk"]


def _setup(local: LocalCopy, manifest: Manifest, out: Folder, ranges: list[list[range]]) -> Do:
    dataset = open_dataset(local.folder, max_open=1)
    begins, first_file = first_rows(manifest), np.cumsum([0, *map(len, ranges)])
    count, seq_length = first_file[-1], manifest["seq_length"]

    def export(item: ShardToExport, report: Report) -> list[dict[str, Any]]:
        entry, first, files = manifest["shards"][item.number], begins[item.number], []
        with sound_shard(local, manifest, item.number) as shard:
            done = 0
            for i, rows in enumerate(ranges[item.number], int(first_file[item.number])):
                name, schema = f"data-{i:05d}-of-{count:05d}.arrow", _schema(manifest, item.number, rows)
                data = _standing(out, name, schema, len(rows))
                if data is None:
                    sink = pa.BufferOutputStream()
                    with pa.ipc.new_stream(sink, schema) as writer:
                        for group in row_groups(len(rows), seq_length):
                            lists = trl_lists(dataset, shard, first, rows[group.start : group.stop])
                            mask = pa.ListArray.from_arrays(lists[0].offsets, _segment_numbers(lists[-1]))
                            writer.write_batch(pa.RecordBatch.from_arrays([mask, *lists], schema=schema))
                    data = sink.getvalue()
                    out.write(name, [data])
                now = entry["bytes"] * rows.stop // max(shard.rows, 1)
                report(0, now - done, len(rows) * seq_length, 0)
                done = now
                size = memoryview(data).nbytes
                files.append({"file": name, "bytes": size, "digest": digest_of(data), "rows": len(rows)})
        return files

    return one_by_one(export)


def _segment_numbers(seq_lengths: pa.ListArray) -> pa.Array:
    """int32 for each slot of the rows whose segments have these lengths: 1, 2, … by segment, from 1 in each row."""
    lengths, counts = np.asarray(seq_lengths.values), np.diff(np.asarray(seq_lengths.offsets))
    numbers = np.arange(len(lengths)) - np.repeat(np.cumsum(counts) - counts, counts) + 1
    return pa.array(np.repeat(numbers, lengths), pa.int32())


def _schema(manifest: Manifest, shard: int, rows: range) -> pa.Schema:
    about = {
        "columns": "hf",
        "dataset": manifest["digest"],
        "shard_digest": manifest["shards"][shard]["digest"],
        "rows": [rows.start, rows.stop],
    }
    features = {"info": {"features": _FEATURES}}
    metadata = {b"huggingface": encode(features).rstrip(b"\n"), KEY: encode(about).rstrip(b"\n")}
    return pa.schema([pa.field(name, pa.list_(kind)) for name, kind in _TYPES.items()], metadata)


def _standing(out: Folder, name: str, schema: pa.Schema, rows: int) -> Any | None:
    """The bytes of a file that an export that stopped left whole; None where it is to be made."""
    if not out.exists(name):
        return None
    data = out.read(name)
    try:
        with pa.ipc.open_stream(pa.BufferReader(data)) as reader:
            found, metadata = sum(batch.num_rows for batch in reader), reader.schema.metadata
    except (pa.ArrowException, OSError):
        return None
    return data if found == rows and (metadata or {}).get(KEY) == schema.metadata[KEY] else None
