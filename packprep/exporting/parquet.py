"""A dataset as Parquet: packed rows, a file for each shard, in one of the forms of `columns`."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from packprep.building.output import Nearby, Output
from packprep.building.processes import Do, Report, one_by_one, spread
from packprep.building.run import Progress
from packprep.building.signals import stoppable
from packprep.dataset.json_files import encode
from packprep.dataset.loader import open_dataset
from packprep.dataset.manifest import Manifest, first_rows
from packprep.digests import digest_of
from packprep.errors import RecipeError
from packprep.exporting.columns import full_table, nemo_table, row_groups, schema_of
from packprep.exporting.shards import ShardToExport, drawn_tasks, sound_shard

KEY, EOS_INSIDE = b"packprep", b"packprep.segments_with_eos_inside"
COMPRESSION, LEVEL = "zstd", 3


def file_name(columns: str, shard: int) -> str:
    """NNNNNN.idx.parquet, by which Megatron-Bridge knows packed sequences; NNNNNN.parquet in the other form."""
    return f"{shard:06d}.{'idx.' if columns == 'nemo' else ''}parquet"


def check_columns(manifest: Manifest, columns: str, progress: Progress) -> None:
    """RecipeError where a reader that shifts would train on the wrong targets; what else it reads differently is said."""
    tasks = drawn_tasks(manifest)
    in_place = [task["name"] for task in tasks if task["label_alignment"] == "same_slot"]
    prefix = [task["name"] for task in tasks if task["attention"] == "prefix"]
    if columns == "nemo" and in_place:
        raise RecipeError(
            f"--columns nemo: its readers predict the next token, and {', '.join(in_place)} predict in place. Give "
            "--columns full, which has labels at the slot that predicts them, or train from the dataset by packprep's loader"
        )
    if columns == "nemo" and prefix:
        progress.say(
            f"warning: the readers of these columns attend causally, also inside the prefixes of {', '.join(prefix)}"
        )


def export_parquet(
    near: Nearby, manifest: Manifest, out: Output, columns: str, workers: int, progress: Progress
) -> dict[str, Any]:
    """Write the files; gives what the receipt says of them: rows, files."""
    entries = manifest["shards"]
    files: dict[int, dict[str, Any]] = {}
    with stoppable() as stop_asked:
        progress.begin(sum(entry["bytes"] for entry in entries), len(entries), len(entries))
        try:
            items = [ShardToExport(b) for b in range(len(entries))]
            arguments = (near, manifest, out, columns)
            for item, file in spread(
                _setup, arguments, items, workers, progress.add, stop_asked, out.remove_temporaries
            ):
                files[item.number] = file
        finally:
            progress.end()
    inside = sum(file["segments_with_eos_inside"] for file in files.values())
    if inside and columns == "nemo":
        progress.say(
            f"warning: {inside:,} segments have eos inside; Megatron-Bridge takes the second eos of a sequence for the begin of "
            "its padding, and gives such a length as cu_seqlens_unpadded"
        )
    return {"rows": first_rows(manifest)[-1], "files": [files[b] for b in range(len(entries))]}


def _setup(near: Nearby, manifest: Manifest, out: Output, columns: str) -> Do:
    dataset = open_dataset(near.folder, max_open=1)
    multiple = manifest["recipe"].get("packing", {}).get("pad_seq_to_mult", 1)
    has_blocks = any(task["attention"] == "block_diffusion" for task in manifest["tasks"])
    begins = first_rows(manifest)

    def export(item: ShardToExport, report: Report) -> dict[str, Any]:
        entry, name, first = manifest["shards"][item.number], file_name(columns, item.number), begins[item.number]
        metadata = {KEY: encode(_metadata(manifest, columns, item.number)).rstrip(b"\n")}
        schema = schema_of(columns, has_blocks, metadata)
        standing = _standing(out, name, schema, entry["rows"])
        if standing is not None:
            report(0, entry["bytes"], entry["rows"] * manifest["seq_length"], 0)
            return standing
        sink, inside = pa.BufferOutputStream(), 0
        with (
            sound_shard(near, manifest, item.number) as shard,
            pq.ParquetWriter(sink, schema, compression=COMPRESSION, compression_level=LEVEL) as writer,
        ):
            done = 0
            for rows in row_groups(shard.rows, shard.seq_length):
                if columns == "nemo":
                    table, more = nemo_table(dataset, shard, first, rows, multiple, schema)
                    inside += more
                else:
                    table = full_table(dataset, shard, first, rows, schema)
                writer.write_table(table, row_group_size=len(rows))
                now = entry["bytes"] * rows.stop // shard.rows
                report(0, now - done, len(rows) * shard.seq_length, 0)
                done = now
            writer.add_key_value_metadata({EOS_INSIDE: str(inside).encode()})
        data = sink.getvalue()
        out.write_whole(name, [data])
        return _file(name, data, entry["rows"], inside)

    return one_by_one(export)


def _standing(out: Output, name: str, schema: pa.Schema, rows: int) -> dict[str, Any] | None:
    """What the receipt says of a file that an export that stopped left whole; None where it is to be made."""
    if not out.exists(name):
        return None
    data = out.read(name)
    try:
        found = pq.read_metadata(pa.BufferReader(data))
    except (pa.ArrowException, OSError):
        return None
    written = found.metadata or {}
    if found.num_rows != rows or written.get(KEY) != schema.metadata[KEY] or EOS_INSIDE not in written:
        return None
    return _file(name, data, rows, int(written[EOS_INSIDE]))


def _file(name: str, data: Any, rows: int, inside: int) -> dict[str, Any]:
    size = memoryview(data).nbytes
    return {"file": name, "bytes": size, "digest": digest_of(data), "rows": rows, "segments_with_eos_inside": inside}


def _metadata(manifest: Manifest, columns: str, shard: int) -> Mapping[str, Any]:
    """What a file says of itself."""
    return {
        "columns": columns,
        "dataset": manifest["digest"],
        "fingerprint": manifest["fingerprint"],
        "shard": shard,
        "shard_digest": manifest["shards"][shard]["digest"],
        "seq_length": manifest["seq_length"],
        "pad_seq_to_mult": manifest["recipe"].get("packing", {}).get("pad_seq_to_mult", 1),
        "vocab_size": manifest["vocab_size"],
        "pad_id": manifest["pad_id"],
        "loss_alignment": "predicting_slot",
        "labels": "the next token of the segment" if columns == "nemo" else "labels, at the predicting slot",
    }
