"""Export a dataset as Parquet files of packed rows, one file per shard.

`--columns` selects a form:

- `nemo` has `input_ids`, `loss_mask` and `seq_start_id`, for the packed-sequence readers of NVIDIA
  NeMo and Megatron-Bridge. The readers make inputs [:-1], targets [1:] and mask [:-1] of each
  segment (`GPTSFTPackedDataset.collate_fn` and `_build_loss_mask`). So the mask is at the
  predicting slot, as in packprep, and no target crosses a segment.
- `trl` has `input_ids`, `labels`, `position_ids` and `seq_lengths`, for a packed dataset of TRL's
  SFTTrainer. Transformers shifts these labels.
- `full` has the loader's columns at every slot, including pre-shifted labels, and the segments of
  each row.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packprep.building.processes import Do, Report, one_by_one
from packprep.dataset.attention import RULES
from packprep.dataset.boundaries import offsets_of
from packprep.dataset.loader import Dataset, open_dataset
from packprep.dataset.manifest import (
    Manifest,
    block_columns,
    drawn_tasks,
    first_rows,
    is_in_place,
)
from packprep.dataset.rows import RowSegments
from packprep.dataset.shard import Shard
from packprep.errors import RecipeError
from packprep.exporting.export import Exporting, ShardToExport, each_shard, sound_shard
from packprep.format.digests import digest_of
from packprep.format.json_files import encode
from packprep.storage import Folder, LocalCopy

SLOTS_AT_ONCE = 1 << 20
"""Approximate number of slots per row group. Reading one row decodes its whole row group."""
_FULL = (
    "tokens",
    "labels",
    "loss_mask",
    "loss_weights",
    "segment_ids",
    "position_ids",
    "prefix_ends",
)
TRL_COLUMNS = ("input_ids", "labels", "position_ids", "seq_lengths")
TOLD_TRL = "TRL: set padding_free=True. Without it, TRL silently attends across documents"
IGNORE_INDEX = -100
"""Label of untrained slots, in Transformers and PyTorch."""
# torch supports few operations on uint16.
_TYPES = {"tokens": "i4", "labels": "i4", "segment_ids": "i4"}


def row_groups(rows: int, seq_length: int) -> list[range]:
    """Return the range of rows in each row group of a file with `rows` rows."""
    rows_per_group = max(1, SLOTS_AT_ONCE // seq_length)
    return [
        range(begin, min(begin + rows_per_group, rows)) for begin in range(0, rows, rows_per_group)
    ]


def schema_of(columns: str, more_columns: Sequence[str], metadata: dict[bytes, bytes]) -> pa.Schema:
    """Return the Arrow schema of a form.

    Args:
        columns: "nemo", "trl" or "full".
        more_columns: The result of `block_columns`, for "full".
        metadata: Key-value metadata of the file.
    """
    i4, u1, f4, name = pa.int32(), pa.uint8(), pa.float32(), pa.string()
    if columns == "nemo":
        types = {"input_ids": i4, "loss_mask": u1, "seq_start_id": i4}
    elif columns == "trl":
        types = dict.fromkeys(TRL_COLUMNS, i4)
    else:
        types = {
            column: {"loss_mask": u1, "loss_weights": f4}.get(column, i4)
            for column in (*_FULL, *more_columns)
        }
        types |= {
            "segment_begin": i4,
            "segment_end": i4,
            "segment_task": name,
            "segment_source": name,
        }
    return pa.schema(
        [pa.field(key, pa.list_(kind), nullable=False) for key, kind in types.items()], metadata
    )


class Joined(NamedTuple):
    """Segments of several rows, concatenated without the rows' padding.

    Attributes:
        tokens: int32[Σ lengths].
        mask: uint8[Σ lengths], 1 where the prediction of a slot is trained.
        lengths: int64[segments], number of tokens of each segment, including the eos tokens that
            fill it up.
        begins: int64[segments], index of the first token of each segment.
        slots: int64[segments], number of tokens of each segment, without the eos tokens that fill
            it up.
        by_row: int64[rows + 1], index of the first token of each row, and the total.
        segments_by_row: int64[rows + 1], index of the first segment of each row, and the total.
    """

    tokens: np.ndarray
    mask: np.ndarray
    lengths: np.ndarray
    begins: np.ndarray
    slots: np.ndarray
    by_row: np.ndarray
    segments_by_row: np.ndarray


def joined(
    dataset: Dataset, shard: Shard, first_row: int, rows: range, multiple: int = 1
) -> Joined:
    """Concatenate the segments of some rows of a shard.

    Args:
        dataset: The dataset.
        shard: The shard.
        first_row: Index in the dataset of the shard's row 0.
        rows: Rows of the shard.
        multiple: If above 1, untrained eos tokens fill each segment up to k · multiple + 1 tokens.
    """
    batch = dataset.batch(_numbers(first_row, rows), columns=("tokens", "loss_mask"))
    segments = RowSegments(dataset.facts, [(shard, row) for row in rows])
    slots = segments.slots
    # With multiple 4, a segment of 5 tokens keeps 5, and a segment of 6 gets 9.
    lengths = -(-(slots - 1) // multiple) * multiple + 1 if multiple > 1 else slots
    begins = np.cumsum(lengths) - lengths
    # `source` has indices in the flat rows, and `target` in the concatenation.
    within = np.arange(int(slots.sum())) - np.repeat(np.cumsum(slots) - slots, slots)
    source, target = np.repeat(segments.at, slots) + within, np.repeat(begins, slots) + within
    # Positions that are not copied keep eos or padding, and are untrained.
    tokens = np.full(
        int(lengths.sum()), dataset.manifest["specials"].get("eos", dataset.pad_id), np.int32
    )
    mask = np.zeros(len(tokens), np.uint8)
    tokens[target] = batch["tokens"].reshape(-1)[source]
    mask[target] = batch["loss_mask"].reshape(-1)[source]
    by_row = offsets_of(np.bincount(segments.row, lengths, len(rows)).astype(np.int64))
    segments_by_row = offsets_of(np.bincount(segments.row, minlength=len(rows)))
    return Joined(tokens, mask, lengths, begins, slots, by_row, segments_by_row)


def nemo_table(
    dataset: Dataset, shard: Shard, first_row: int, rows: range, multiple: int, schema: pa.Schema
) -> tuple[pa.Table, int]:
    """Return the table of some rows, and how many segments have more than one eos in their inputs.

    The rows have no padding. If `multiple` is above 1, each segment is filled with eos up to k ·
    multiple + 1 tokens. The extra token is needed because the last token of a segment is not an
    input. This matches `pad_seq_to_mult` of Megatron-Bridge, for context parallelism.
    Megatron-Bridge treats trailing eos as filling.

    Args:
        dataset: The dataset.
        shard: The shard.
        first_row: Index in the dataset of the shard's row 0.
        rows: Rows of the shard.
        multiple: The recipe's pad_seq_to_mult.
        schema: Schema of the table.
    """
    joined_rows = joined(dataset, shard, first_row, rows, multiple)
    # Starts count from the first token of their row.
    starts = (
        joined_rows.begins
        - np.repeat(joined_rows.by_row[:-1], np.diff(joined_rows.segments_by_row))
    ).astype(np.int32)
    lists = [
        _lists(joined_rows.by_row, joined_rows.tokens),
        _lists(joined_rows.by_row, joined_rows.mask),
        _lists(joined_rows.segments_by_row, starts),
    ]
    eos_before = offsets_of(
        (joined_rows.tokens == dataset.manifest["specials"].get("eos", -1)).astype(np.int64)
    )
    # The last token of a segment is not an input, so its eos does not count.
    inside = (
        eos_before[joined_rows.begins + joined_rows.slots - 1] - eos_before[joined_rows.begins] > 1
    )
    return pa.Table.from_arrays(lists, schema=schema), int(inside.sum())


def trl_lists(dataset: Dataset, shard: Shard, first_row: int, rows: range) -> list[pa.ListArray]:
    """Return the lists of TRL_COLUMNS, int32, for a model that shifts labels.

    Segments are concatenated without padding.

        tokens of a row    a   b   c | d   e   f          two segments; c, e and f are trained, so
        loss_mask          .   1   . | 1   1   .          at the predicting slot, in packprep
        labels             .   .   c | .   e   f          at the target's own slot; . is -100
        position_ids       0   1   2 | 0   1   2
        seq_lengths        3           3
    """
    joined_rows = joined(dataset, shard, first_row, rows)
    labels = np.full(len(joined_rows.tokens), IGNORE_INDEX, np.int32)
    # The last slot of a segment is never trained.
    np.copyto(labels[1:], joined_rows.tokens[1:], where=joined_rows.mask[:-1] == 1)
    positions = np.arange(len(labels)) - np.repeat(joined_rows.begins, joined_rows.lengths)
    by_slot = [
        _lists(joined_rows.by_row, values.astype(np.int32))
        for values in (joined_rows.tokens, labels, positions)
    ]
    return [*by_slot, _lists(joined_rows.segments_by_row, joined_rows.lengths.astype(np.int32))]


def full_table(
    dataset: Dataset, shard: Shard, first_row: int, rows: range, schema: pa.Schema
) -> pa.Table:
    """Return the table of some rows: all slots, including padding, and the rows' segments."""
    names = [
        name for name in schema.names if not name.startswith("segment_") or name == "segment_ids"
    ]
    batch = dataset.batch(_numbers(first_row, rows), columns=names, dtype=_TYPES)
    segments = RowSegments(dataset.facts, [(shard, row) for row in rows])
    counts = offsets_of(np.bincount(segments.row, minlength=len(rows)))
    every = offsets_of(np.full(len(rows), dataset.seq_length))
    # Bounds of segments count from the start of their row.
    begin = segments.at - segments.row * dataset.seq_length
    lists = [_lists(every, batch[name].reshape(-1)) for name in names]
    lists += [_lists(counts, values.astype(np.int32)) for values in (begin, begin + segments.slots)]
    for column, entries in (("task", dataset.tasks), ("source", dataset.manifest["sources"])):
        index = segments.looked_up(column, np.arange(len(entries), dtype=np.int32))
        lists.append(
            _lists(
                counts,
                pa.array([entry["name"] for entry in entries], pa.string()).take(pa.array(index)),
            )
        )
    return pa.Table.from_arrays(lists, schema=schema)


def _numbers(first_row: int, rows: Sequence[int]) -> np.ndarray:
    return first_row + np.asarray(rows, np.int64)


def _lists(offsets: np.ndarray, values: Any) -> pa.ListArray:
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), values if isinstance(values, pa.Array) else pa.array(values)
    )


KEY, EOS_INSIDE = b"packprep", b"packprep.segments_with_eos_inside"
COMPRESSION, LEVEL = "zstd", 3


def file_name(columns: str, shard: int) -> str:
    """Return NNNNNN.idx.parquet for "nemo", otherwise NNNNNN.parquet.

    Megatron-Bridge recognizes packed sequences by the ending .idx.parquet.
    """
    return f"{shard:06d}.{'idx.' if columns == 'nemo' else ''}parquet"


def check(exporting: Exporting) -> None:
    """Check that the form's readers train on the right targets, and print warnings.

    Raises:
        RecipeError: If a reader that shifts labels would train on the wrong targets.
    """
    if exporting.form == "trl":
        refuse_for_trl(exporting, "--columns trl", TOLD_TRL)
    if exporting.form != "nemo":
        return
    in_place, prefix = _not_causal(exporting.manifest)
    if in_place:
        raise RecipeError(
            f"--columns nemo: its readers predict the next token, but {', '.join(in_place)}"
            " predict the tokens of noised positions\n"
            "hint: give --columns full, which has labels at the predicting position, or train"
            " with packprep's loader"
        )
    if prefix:
        exporting.progress.say(
            "warning: the readers of these columns attend causally, even inside the prefixes of"
            f" {', '.join(prefix)}"
        )


def refuse_for_trl(exporting: Exporting, option: str, trl_hint: str) -> None:
    """Check that TRL_COLUMNS can express the tasks, and warn if rows have several documents.

    Args:
        exporting: The export.
        option: The option that selects this form, for error messages.
        trl_hint: The trainer's option that keeps documents apart.

    Raises:
        RecipeError: If a task is a same-position task, or attends bidirectionally to its prefix.
    """
    in_place, prefix = _not_causal(exporting.manifest)
    for names, reason in (
        (in_place, "predict the tokens of noised positions"),
        (prefix, "attend bidirectionally to their prefixes"),
    ):
        if names:
            raise RecipeError(
                f"{option}: its readers predict the next token and attend causally, but"
                f" {', '.join(names)} {reason}\n"
                "hint: give --to parquet --columns full, or train with packprep's loader"
            )
    if any(entry["segments"] > entry["rows"] for entry in exporting.manifest["shards"]):
        exporting.progress.say(
            "warning: rows contain several documents, which the trainer has to keep apart\n"
            f"hint: {trl_hint}"
        )


def _not_causal(manifest: Manifest) -> tuple[list[str], list[str]]:
    """Return the names of the same-position tasks and of the tasks with a bidirectional prefix."""
    tasks = drawn_tasks(manifest)
    in_place = [task["name"] for task in tasks if is_in_place(task)]
    return in_place, [task["name"] for task in tasks if RULES[task["attention"]].ahead == "prefix"]


def write(exporting: Exporting) -> dict[str, Any]:
    """Write the files, and return the entries `rows` and `files` for the receipt."""
    written = dict(
        each_shard(exporting, _setup, exporting.out, exporting.form, workers=exporting.workers)
    )
    files = [written[b] for b in sorted(written)]
    inside = sum(file["segments_with_eos_inside"] for file in files)
    if inside and exporting.form == "nemo":
        exporting.progress.say(
            f"warning: {inside:,} segments contain eos. Megatron-Bridge takes the second eos of a"
            " sequence for the start of its padding, so its cu_seqlens_unpadded is wrong there"
        )
    return {"rows": first_rows(exporting.manifest)[-1], "files": files}


def said(result: Mapping[str, Any]) -> list[str]:
    """Return a line that describes the export."""
    return [f"{result['rows']:,} rows, columns {result['columns']}"]


def _setup(local: LocalCopy, manifest: Manifest, out: Folder, columns: str) -> Do:
    dataset = open_dataset(local.folder, max_open=1)
    multiple = manifest["recipe"].get("packing", {}).get("pad_seq_to_mult", 1)
    more_columns = block_columns(manifest)
    begins = first_rows(manifest)

    def export(item: ShardToExport, report: Report) -> dict[str, Any]:
        entry, name, first_row = (
            manifest["shards"][item.number],
            file_name(columns, item.number),
            begins[item.number],
        )
        # The metadata names dataset, shard and settings, so files of other exports do not match.
        metadata = {KEY: encode(_metadata(manifest, columns, item.number)).rstrip(b"\n")}
        schema = schema_of(columns, more_columns, metadata)
        standing = _standing(out, name, schema, entry["rows"])
        if standing is not None:
            report(0, entry["bytes"], entry["rows"] * manifest["seq_length"], 0)
            return standing
        sink, inside = pa.BufferOutputStream(), 0
        with (
            sound_shard(local, manifest, item.number) as shard,
            pq.ParquetWriter(
                sink, schema, compression=COMPRESSION, compression_level=LEVEL
            ) as writer,
        ):
            done_bytes = 0
            for rows in row_groups(shard.rows, shard.seq_length):
                if columns == "nemo":
                    table, count = nemo_table(dataset, shard, first_row, rows, multiple, schema)
                    inside += count
                elif columns == "trl":
                    table = pa.Table.from_arrays(
                        trl_lists(dataset, shard, first_row, rows), schema=schema
                    )
                else:
                    table = full_table(dataset, shard, first_row, rows, schema)
                writer.write_table(table, row_group_size=len(rows))
                # Bytes of the shard are reported in proportion to its rows.
                bytes_so_far = entry["bytes"] * rows.stop // shard.rows
                report(0, bytes_so_far - done_bytes, len(rows) * shard.seq_length, 0)
                done_bytes = bytes_so_far
            # The count is known only after the last row group.
            writer.add_key_value_metadata({EOS_INSIDE: str(inside).encode()})
        data = sink.getvalue()
        out.write(name, [data])
        return _file(name, data, entry["rows"], inside)

    return one_by_one(export)


def _standing(out: Folder, name: str, schema: pa.Schema, rows: int) -> dict[str, Any] | None:
    """Return the receipt's entry of file `name` if an interrupted export completed it, or None."""
    if not out.exists(name):
        return None
    data = out.read(name)
    try:
        metadata = pq.read_metadata(pa.BufferReader(data))
    except (pa.ArrowException, OSError):
        return None
    written = metadata.metadata or {}
    if (
        metadata.num_rows != rows
        or written.get(KEY) != schema.metadata[KEY]
        or EOS_INSIDE not in written
    ):
        return None
    return _file(name, data, rows, int(written[EOS_INSIDE]))


def _file(name: str, data: Any, rows: int, inside: int) -> dict[str, Any]:
    size = memoryview(data).nbytes
    return {
        "file": name,
        "bytes": size,
        "digest": digest_of(data),
        "rows": rows,
        "segments_with_eos_inside": inside,
    }


def _metadata(manifest: Manifest, columns: str, shard: int) -> Mapping[str, Any]:
    """Return the metadata that is stored in the Parquet file of a shard."""
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
        "loss_alignment": "target_slot" if columns == "trl" else "predicting_slot",
        "labels": _LABELS[columns],
    }


_LABELS = {
    "nemo": "the next token of the segment",
    "trl": "labels, at the target's position",
    "full": "labels, at the predicting position",
}
