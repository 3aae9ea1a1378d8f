"""A small valid dataset on disk, made without the builder: random segments that keep every promise
of the format."""

from pathlib import Path

import numpy as np

from packprep.dataset import shard
from packprep.format import json_files
from packprep.format.digests import digest_of

SOURCES = ["web", "code", "chat"]
PAD = 1
HEADER = (
    "doc",
    "start",
    "key",
    "tokens",
    "prefix",
    "noise",
    "loss_weight",
    "file",
    "task",
    "source",
    "repeat",
)


def task(
    name, attention="causal", alignment="next_token", weight=1.0, mode_token=None, **parameters
):
    return {
        "name": name,
        "objective": (
            {"bidirectional": "masked_diffusion", "prefix": "span_corruption"}.get(
                attention, attention
            )
        ),
        "weight": weight,
        "attention": attention,
        "label_alignment": alignment,
        "mode_token": mode_token,
        "parameters": parameters,
    }


def tasks(in_place=False, blocks=False):
    table = [
        task("causal"),
        task(
            "x", "prefix", mode_token=7, noise_density=0.15, mean_span_length=32, random_roll=True
        ),
    ]
    if in_place:
        table.append(task("masked", "bidirectional", "same_slot"))
    if blocks:
        table.append(task("bd3", "block_diffusion", "same_slot", block_length=4))
    return [*table, task("too_short", weight=0.0)]


def make_shard(
    rng,
    rows,
    seq_length=64,
    token_dtype="uint16",
    pad_to=1,
    in_place=False,
    blocks=False,
    trained=False,
):
    """name → array for a shard of `rows` rows; a segment's physical slots are a multiple of
    pad_to."""
    table = tasks(in_place, blocks)
    labels_stored = in_place or blocks
    tokens = np.full((rows, seq_length), PAD, token_dtype)
    labels, ids, mask = (
        tokens.copy(),
        np.zeros((rows, seq_length), "u2"),
        np.zeros((rows, seq_length), "u1"),
    )
    row_offsets, cu, cu_padded = [0], [], []
    header = {name: [] for name in HEADER}
    block_offsets, block_noise, block_weight, trained_offsets, trained_ranges = [0], [], [], [0], []
    for r in range(rows):
        at, real, segment = 0, 0, 0
        cu.append(0)
        cu_padded.append(0)
        while seq_length - at >= 8 and rng.random() < 0.9:
            kind = int(rng.integers(len(table)))
            n = int(rng.integers(1, min(seq_length - at, 24) + 1))
            rule = table[kind]["attention"]
            if rule == "block_diffusion":
                n = max(2, n // 2 * 2)
            segment += 1
            slots = slice(at, at + n)
            tokens[r, slots] = rng.integers(2, 500, n)
            ids[r, slots] = segment
            prefix = {
                "causal": 0,
                "prefix": max(1, n // 2),
                "bidirectional": n,
                "block_diffusion": -1,
            }[rule]
            if table[kind]["label_alignment"] == "same_slot":
                labels[r, slots] = rng.integers(2, 500, n)
                mask[r, at : at + (n // 2 if prefix < 0 else n)] = rng.integers(
                    0, 2, n // 2 if prefix < 0 else n
                )
            else:
                labels[r, at : at + n - 1] = tokens[r, at + 1 : at + n]
                mask[r, at + max(prefix - 1, 0) : at + n - 1] = 1
            values = {
                "doc": rng.integers(1 << 40),
                "start": rng.integers(1 << 20),
                "key": rng.integers(1 << 64, dtype=np.uint64),
                "tokens": n,
                "prefix": prefix,
                "noise": rng.random(),
                "loss_weight": 1 + rng.random(),
                "file": rng.integers(9),
                "task": kind,
                "source": rng.integers(len(SOURCES)),
                "repeat": rng.integers(3),
            }
            for name, value in values.items():
                header[name].append(value)
            n_blocks = -(-(n // 2) // 4) if prefix < 0 else 0
            block_noise += rng.random(n_blocks).tolist()
            block_weight += (1 + rng.random(n_blocks)).tolist()
            block_offsets.append(len(block_noise))
            if n > 2 and rng.random() < 0.5:
                trained_ranges.append((1, n - 1))
            trained_offsets.append(len(trained_ranges))
            at += -(-n // pad_to) * pad_to
            real += n
            cu.append(real)
            cu_padded.append(at)
        row_offsets.append(row_offsets[-1] + segment)
    values = {
        "tokens": tokens,
        "labels": labels,
        "segment_ids": ids,
        "loss_mask": mask,
        "row_offsets": row_offsets,
        "cu_seqlens": cu,
        "cu_seqlens_padded": cu_padded,
        **{f"segment_{name}": column for name, column in header.items()},
        "block_offsets": block_offsets,
        "block_noise": block_noise,
        "block_loss_weight": block_weight,
        "trained_offsets": trained_offsets,
        "trained_ranges": trained_ranges,
    }
    layout = shard.layout(
        rows,
        len(header["doc"]),
        seq_length,
        token_dtype,
        labels=labels_stored,
        padded=pad_to > 1,
        blocks=len(block_noise) if blocks else None,
        trained=len(trained_ranges) if trained else None,
    )
    return {
        name: np.array(values[name], dtype).reshape(shape)
        for name, (dtype, shape) in layout.items()
    }


def make_dataset(
    directory, rows_per_shard=(5, 0, 7), seed=0, seq_length=64, token_dtype="uint16", **options
):
    """Write a dataset into `directory` and give its shards, name → array each; options as of
    make_shard."""
    directory, rng = Path(directory), np.random.default_rng(seed)
    shards, entries = [], []
    for b, rows in enumerate(rows_per_shard):
        arrays = make_shard(rng, rows, seq_length, token_dtype, **options)
        path = directory / json_files.shard_name(b)
        path.parent.mkdir(parents=True, exist_ok=True)
        data = b"".join(shard.encode(arrays))
        path.write_bytes(data)
        shards.append(arrays)
        entries.append(
            {
                "file": json_files.shard_name(b),
                "rows": rows,
                "segments": len(arrays["segment_key"]),
                "tokens": int((arrays["segment_ids"] > 0).sum()),
                "bytes": len(data),
                "digest": digest_of(data),
                "receipt_digest": digest_of(b""),
            }
        )
    value = {
        "format": json_files.FORMAT,
        "version": json_files.VERSION,
        "law_version": json_files.LAW_VERSION,
        "seq_length": seq_length,
        "token_dtype": token_dtype,
        "vocab_size": 528,
        "pad_id": PAD,
        "specials": {"pad": PAD, "sentinels": [500, 501]},
        "added_tokens": [{"id": 501, "text": "<é>", "role": "sentinels"}],
        "tokenizer": {"file": "tokenizer.json", "digest": digest_of(b"t")},
        "plan": {"file": "plan.json", "digest": digest_of(b"p")},
        "tasks": tasks(options.get("in_place", False), options.get("blocks", False)),
        "sources": [{"name": name} for name in SOURCES],
        "recipe": {"seed": seed, "seq_length": seq_length},
        "fingerprint": digest_of(repr((seed, rows_per_shard, options)).encode()),
        "engine": "reference",
        "made_with": {"numpy": "2"},
        "shards": entries,
        "ledger": {},
    }
    value["digest"] = digest_of(json_files.encode(value))
    (directory / json_files.MANIFEST_NAME).write_bytes(json_files.encode(value))
    return shards


def slots_ahead(values, segment_ids, distance, dataset, rows, none, prefix_ends):
    """[B, T]: what `values` has distance − 1 slots on, by a walk; `none` beyond the segment, on
    padding and in place.

    none None: that is 0, and so it is in a two-way prefix before its last slot.
    """
    in_place = slots_of_tasks(dataset, rows, lambda task: task["label_alignment"] == "same_slot")
    two_way = slots_of_tasks(dataset, rows, lambda task: task["attention"] == "prefix")
    in_prefix = two_way & (np.arange(values.shape[1]) < prefix_ends - 1)
    left_out, none = (in_place, none) if none is not None else (in_place | in_prefix, 0)
    found = np.full_like(values, none)
    for r, t in np.ndindex(values.shape):
        there = t + distance - 1
        if (
            there < values.shape[1]
            and segment_ids[r, t] == segment_ids[r, there] > 0
            and not left_out[r, t]
        ):
            found[r, t] = values[r, there]
    return found


def slots_of_tasks(dataset, rows, chosen):
    """bool[B, T]: the slots of segments whose task is `chosen`."""
    tasks = np.array([chosen(task) for task in dataset.tasks])
    views = [dataset.row(i) for i in rows]
    return np.array(
        [
            np.append(tasks[row.segments["task"]], False)[row.segment_ids.astype(int) - 1]
            for row in views
        ]
    )


def replace_in_manifest(directory, **changes):
    """Change keys of a dataset's manifest, whatever that makes of it."""
    path = Path(directory) / json_files.MANIFEST_NAME
    value = json_files.decode(path.read_bytes(), str(path))
    path.write_bytes(json_files.encode({**value, **changes}))
