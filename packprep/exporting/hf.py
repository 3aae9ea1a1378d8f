"""Export a dataset in the format of Hugging Face `datasets`, for `load_from_disk`.

    data-NNNNN-of-NNNNN.arrow   rows in order, in Arrow's streaming format, uncompressed
    README.md                   the data card, with a description of the columns
    dataset_info.json           the features
    state.json                  the list of files, and the fingerprint

state.json is written last, because a folder without it cannot be loaded. The folder matches the
output of `save_to_disk`.

`--trainer` names a trainer. The folder has only the columns that this trainer reads, because
trainers do not ignore additional columns. LLaMA-Factory makes tensors of all columns. Axolotl
prefers the column attention_mask to position_ids, and packs rows again if the column length exists.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from packprep.building.processes import Do, Report, one_by_one
from packprep.dataset.loader import open_dataset
from packprep.dataset.manifest import Manifest, first_rows
from packprep.exporting.export import (
    Exporting,
    ShardToExport,
    each_shard,
    files_of_rows,
    sound_shard,
)
from packprep.exporting.parquet import (
    IGNORE_INDEX,
    KEY,
    TOLD_TRL,
    TRL_COLUMNS,
    refuse_for_trl,
    row_groups,
    trl_lists,
)
from packprep.format.digests import digest_of
from packprep.format.json_files import encode
from packprep.storage import Folder, LocalCopy

FILE_SLOTS = 1 << 24
"""Approximate number of slots per file. A worker needs 16 bytes of memory per slot."""
CARD, INFO, STATE = "README.md", "dataset_info.json", "state.json"
INT32 = pa.int32()


class Form(NamedTuple):
    """The columns and rows that one trainer reads.

    Attributes:
        columns: Names of the columns, which are keys of `_HOLDS`.
        filled: Whether rows are filled up to seq_length. Otherwise a row has no padding, and is as
            long as its segments together.
        told: Text that names the trainer's options for this folder. With these options, the trainer
            keeps segments apart.
    """

    columns: tuple[str, ...]
    filled: bool
    told: str


FORMS = {
    "trl": Form(TRL_COLUMNS, False, TOLD_TRL),
    "llamafactory": Form(
        ("input_ids", "labels", "position_ids", "attention_mask"),
        True,
        "LLaMA-Factory: tokenized_path and neat_packing: true. Without neat_packing it silently"
        " attends across documents",
    ),
    "axolotl": Form(
        ("input_ids", "labels", "position_ids"),
        False,
        "Axolotl: skip_prepare_dataset: true and sample_packing: false. In datasets, set path"
        " and leave type empty",
    ),
    "swift": Form(
        ("input_ids", "labels", "position_ids", "length", "lengths"),
        False,
        "ms-swift: --cached_dataset, --truncation_strategy split and --padding_free true."
        " Without padding_free it silently attends across documents",
    ),
}
_HOLDS = {
    "input_ids": "the segments of a row, one after another",
    "labels": (
        "not shifted: the token at this position if its prediction is trained, otherwise -100,"
        " as at the start of each segment"
    ),
    "position_ids": "from 0 in each segment",
    "seq_lengths": "the lengths of the segments",
    "attention_mask": ("the number of the position's segment in its row, from 1; 0 for padding"),
    "length": "the length of the row",
    "lengths": "the same as length",
}
_FILLED = {"labels": IGNORE_INDEX, "position_ids": 0, "attention_mask": 0}
_SCALARS = ("length", "lengths")
_USE = """\
This folder is an export of it as a Hugging Face dataset, a row for each row; packprep does not \
read it.

```python
from datasets import load_from_disk

rows = load_from_disk("FOLDER")  # a copy of this folder
```

{told}.

| column | holds |
| --- | --- |
{columns}
"""


def check(exporting: Exporting) -> None:
    """Check that a trainer that shifts labels and attends causally can train on the dataset.

    Raises:
        RecipeError: If a task needs another attention pattern, or is a same-position task.
    """
    refuse_for_trl(exporting, "--to hf", FORMS[exporting.form].told)


def write(exporting: Exporting) -> dict[str, Any]:
    """Write the files, and return the entries `rows` and `files` for the receipt."""
    manifest, out = exporting.manifest, exporting.out
    ranges = files_of_rows(manifest, FILE_SLOTS)
    written = dict(
        each_shard(exporting, _setup, out, ranges, exporting.form, workers=exporting.workers)
    )
    files = [file for shard in sorted(written) for file in written[shard]]
    form = FORMS[exporting.form]
    # `save_to_disk` writes the same keys and defaults.
    features = _features(form.columns)
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    state: dict[str, Any] = {
        "_data_files": [{"filename": file["file"]} for file in files],
        "_fingerprint": manifest["digest"],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    texts = {INFO: encode(info), STATE: encode(state)}
    if exporting.card is not None:
        column_lines = "\n".join(f"| `{name}` | {_HOLDS[name]} |" for name in form.columns)
        texts = {
            CARD: (
                exporting.card(
                    exporting.dataset, _USE.format(told=form.told, columns=column_lines)
                ).encode()
            )
        } | texts
    # state.json comes last, because a folder without it cannot be loaded.
    for name, data in texts.items():
        out.write(name, [data])
        files.append({"file": name, "bytes": len(data), "digest": digest_of(data)})
    return {"rows": first_rows(manifest)[-1], "files": files}


def said(result: Mapping[str, Any]) -> list[str]:
    """Return a line that describes the export."""
    return [f"{result['rows']:,} rows, for datasets.load_from_disk"]


def _setup(
    local: LocalCopy, manifest: Manifest, out: Folder, ranges: list[list[range]], trainer: str
) -> Do:
    dataset = open_dataset(local.folder, max_open=1)
    # Files are numbered across shards, so a shard needs the number of its first file.
    begins, first_file = first_rows(manifest), np.cumsum([0, *map(len, ranges)])
    count, seq_length, form = first_file[-1], manifest["seq_length"], FORMS[trainer]

    def export(item: ShardToExport, report: Report) -> list[dict[str, Any]]:
        entry, first_row, files = manifest["shards"][item.number], begins[item.number], []
        with sound_shard(local, manifest, item.number) as shard:
            done_bytes = 0
            for i, rows in enumerate(ranges[item.number], int(first_file[item.number])):
                name, schema = (
                    f"data-{i:05d}-of-{count:05d}.arrow",
                    _schema(manifest, item.number, rows, trainer),
                )
                # A file that an interrupted export completed is kept.
                data = _standing(out, name, schema, len(rows))
                if data is None:
                    sink = pa.BufferOutputStream()
                    with pa.ipc.new_stream(sink, schema) as writer:
                        # `group` counts rows from the start of the file, and `rows` from the start
                        # of the shard.
                        for group in row_groups(len(rows), seq_length):
                            lists = trl_lists(
                                dataset, shard, first_row, rows[group.start : group.stop]
                            )
                            arrays = _arrays(form, lists, seq_length, manifest["pad_id"])
                            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
                    data = sink.getvalue()
                    out.write(name, [data])
                bytes_so_far = entry["bytes"] * rows.stop // max(shard.rows, 1)
                report(0, bytes_so_far - done_bytes, len(rows) * seq_length, 0)
                done_bytes = bytes_so_far
                size = memoryview(data).nbytes
                files.append(
                    {"file": name, "bytes": size, "digest": digest_of(data), "rows": len(rows)}
                )
        return files

    return one_by_one(export)


def _arrays(form: Form, lists: list[pa.ListArray], seq_length: int, pad_id: int) -> list[pa.Array]:
    """Return the form's columns, made from the lists of `trl_lists`."""
    offsets = lists[0].offsets
    columns = dict(zip(TRL_COLUMNS, lists, strict=True))
    columns["attention_mask"] = pa.ListArray.from_arrays(offsets, _segment_numbers(lists[-1]))
    columns["length"] = columns["lengths"] = pa.array(np.diff(np.asarray(offsets)), INT32)
    if form.filled:
        return [
            _filled(columns[name], seq_length, _FILLED.get(name, pad_id)) for name in form.columns
        ]
    return [columns[name] for name in form.columns]


def _segment_numbers(seq_lengths: pa.ListArray) -> pa.Array:
    """Return the segment number of each slot of all rows, int32. Each row counts from 1."""
    lengths, counts = np.asarray(seq_lengths.values), np.diff(np.asarray(seq_lengths.offsets))
    numbers = np.arange(len(lengths)) - np.repeat(np.cumsum(counts) - counts, counts) + 1
    return pa.array(np.repeat(numbers, lengths), INT32)


def _filled(lists: pa.ListArray, width: int, value: int) -> pa.ListArray:
    """Return the lists, each filled with `value` up to `width` entries. No list may be longer."""
    offsets = np.asarray(lists.offsets)
    slots = np.full((len(lists), width), value, np.int32)
    slots[np.arange(width) < np.diff(offsets)[:, None]] = np.asarray(lists.values)
    every = pa.array(np.arange(len(lists) + 1) * width, INT32)
    return pa.ListArray.from_arrays(every, pa.array(slots.reshape(-1)))


def _features(columns: Sequence[str]) -> dict[str, Any]:
    """Return column name → type, in the form in which `datasets` stores the types."""
    value = {"_type": "Value", "dtype": "int32"}
    return {
        name: value if name in _SCALARS else {"_type": "List", "feature": value} for name in columns
    }


def _schema(manifest: Manifest, shard: int, rows: range, trainer: str) -> pa.Schema:
    about = {
        "trainer": trainer,
        "dataset": manifest["digest"],
        "shard_digest": manifest["shards"][shard]["digest"],
        "rows": [rows.start, rows.stop],
    }
    names = FORMS[trainer].columns
    features = {"info": {"features": _features(names)}}
    metadata = {b"huggingface": encode(features).rstrip(b"\n"), KEY: encode(about).rstrip(b"\n")}
    kinds = (INT32 if name in _SCALARS else pa.list_(INT32) for name in names)
    return pa.schema(
        [pa.field(name, kind) for name, kind in zip(names, kinds, strict=True)], metadata
    )


def _standing(out: Folder, name: str, schema: pa.Schema, rows: int) -> Any | None:
    """Return the content of file `name` if an interrupted export completed it, otherwise None."""
    if not out.exists(name):
        return None
    data = out.read(name)
    try:
        with pa.ipc.open_stream(pa.BufferReader(data)) as reader:
            row_count, metadata = sum(batch.num_rows for batch in reader), reader.schema.metadata
    except (pa.ArrowException, OSError):
        return None
    return data if row_count == rows and (metadata or {}).get(KEY) == schema.metadata[KEY] else None
