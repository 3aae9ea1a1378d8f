"""A dataset without what its headers determine reads, and is verified, as the one that has it."""

import json
import shutil
from functools import cache

import numpy as np
import pytest

from packprep import open_dataset
from packprep.dataset import attention, manifest, rows, shard
from packprep.dataset.rows import COLUMNS, MORE_COLUMNS
from packprep.errors import DatasetError
from packprep.inspection.row import describe_row
from packprep.inspection.summary import describe_dataset
from tests import made
from tests.dataset.synthetic import PAD, make_shard, tasks
from tests.verification.damage import edit_manifest, faults_of, promises_of, put_shard, resigned

MASKED, BLOCKS = (
    {"objective": "masked_diffusion"},
    {"objective": "block_diffusion", "block_length": 8},
)
BOS = {"documents": {"prepend_bos": True}}

# name → (tasks, changes of the recipe, whether some documents say what is trained)
KINDS = {
    "next_token": ([{"preset": "ul2r"}, {"objective": "prefix_lm"}], BOS, False),
    "padded": (
        [{"preset": "ul2r"}, {"objective": "prefix_lm"}],
        {**BOS, "packing": {"pad_seq_to_mult": 8}},
        False,
    ),
    "concat": ([{"preset": "causal"}], {"packing": {"algorithm": "concat"}}, False),
    "in_place": ([MASKED, BLOCKS, {"preset": "ul2r"}], BOS, False),
    "blocks_of_one": ([{**BLOCKS, "block_length": 1}], BOS, False),
    "blocks_once": (
        [BLOCKS, {**BLOCKS, "name": "shifted", "shift": True}, {"preset": "causal"}],
        BOS,
        False,
    ),
    "blocks_once_padded": ([{**BLOCKS, "shift": True}], {"packing": {"pad_seq_to_mult": 8}}, False),
    "blocks_once_in_place": ([BLOCKS, MASKED, {"preset": "causal"}], {}, False),  # labels stay
    "in_place_padded": (
        [MASKED, BLOCKS, {"preset": "causal"}],
        {"packing": {"pad_seq_to_mult": 8}},
        False,
    ),
    "supervised": ([{"preset": "causal"}, {"objective": "prefix_lm"}], BOS, True),
    "supervised_in_place": ([MASKED, {"preset": "causal"}], {}, True),
}
LEAST = ("blocks_once", "blocks_once_padded", "blocks_once_in_place")
"""Kinds whose compact dataset has the least columns."""
DRAWN_ANEW = ("concat", "in_place_padded", "supervised_in_place", *LEAST)
"""Kinds whose tasks, but for causal ones, are all noised in place: redraw refuses the others."""
LEFT_OUT = {
    kind: (
        {"segment_ids"} if "in_place" in kind or "blocks" in kind else {"segment_ids", "loss_mask"}
    )
    for kind in KINDS
}
LEFT_OUT |= dict.fromkeys(LEAST[:2], {"segment_ids", "labels"})


def build(kind, base):
    tasks, changes, supervised = KINDS[kind]
    made.write_lines(base / "plain.jsonl", made.texts(90, mean_bytes=300))
    sources = [{"name": "plain", "paths": ["plain.jsonl"]}]
    if supervised:
        with open(base / "chosen.jsonl", "w", encoding="utf-8") as file:
            for i, text in enumerate(made.texts(60, seed=5)):
                n = len(text)
                spans = {"loss_spans": [[n // 3, n // 2], [2 * n // 3, n]]} if i < 8 else {}
                file.write(json.dumps({"text": text, **spans}) + "\n")
        sources.append({"name": "chosen", "paths": ["chosen.jsonl"]})
    for columns in ("full", "compact"):
        chosen = "least" if columns == "compact" and kind in LEAST else columns
        output = {"shard_text_bytes": 14_000, "columns": chosen}
        made.build(made.table(sources, tasks=tasks, output=output, **changes), base, base / columns)
    return base / "full", base / "compact"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """name of a kind → directories of the full and of the compact dataset, built at their first
    use."""
    return cache(lambda kind: build(kind, tmp_path_factory.mktemp(kind)))


def shards_of(directory):
    value = manifest.read_manifest(directory)
    return [
        shard.open_shard(directory / entry["file"], value["seq_length"], value["token_dtype"])
        for entry in value["shards"]
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_just_what_the_header_determines_is_left_out_and_the_rest_is_the_same(pairs, kind):
    full, compact = map(shards_of, pairs(kind))
    assert len(full) == len(compact) > 1
    for a, b in zip(full, compact, strict=True):
        left_out = LEFT_OUT[kind] - ({"loss_mask"} if "trained_ranges" in a.layout else set())
        assert set(a.layout) - set(b.layout) == left_out and set(b.layout) < set(a.layout)
        assert b.size < a.size
        for name, array in b.arrays.items():
            assert array.dtype == a.arrays[name].dtype and np.array_equal(array, a.arrays[name])
    if "supervised" in kind:  # some shards have trained ranges, and so a loss_mask
        assert {"trained_ranges" in b.layout for b in compact} == {False, True}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_read_equal(pairs, kind):
    full, compact = map(open_dataset, pairs(kind))
    assert len(full) == len(compact)
    for i in range(len(full)):
        a, b = full.row(i), compact.row(i)
        names = [*COLUMNS, "loss_weights", "cu_seqlens", "cu_seqlens_padded"]
        if -1 not in a.segments["prefix"]:
            names.append("prefix_ends")
        for name in names:
            x, y = getattr(a, name), getattr(b, name)
            assert np.array_equal(x, y) and getattr(x, "dtype", None) == getattr(
                y, "dtype", None
            ), name
            assert y is None or not y.flags.writeable
        for x, y in zip(
            attention.thd(a.segment_ids, 600), attention.thd(b.segment_ids, 600), strict=True
        ):
            assert np.array_equal(x, y)
        x, y = (
            attention.next_token_labels(r.tokens, r.segment_ids, r.loss_mask, distance=2)
            for r in (a, b)
        )
        assert np.array_equal(x, y)
        x, y = (
            attention.label_counts(r.loss_mask, r.cu_seqlens, r.cu_seqlens_padded) for r in (a, b)
        )
        assert np.array_equal(x, y)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_read_equal_with_all_columns_anew_and_with_loss_on_some(pairs, kind):
    datasets = list(map(open_dataset, pairs(kind)))
    everything, columns = range(len(datasets[0])), [*COLUMNS, *MORE_COLUMNS[:1]]
    some = {"source": "plain", "task": datasets[0].tasks[0]["name"]}
    ahead = kind not in ("blocks_of_one", "blocks_once_padded")  # which have nothing ahead
    more = ["labels_3", "loss_mask_3", "loss_weights_3"] if ahead else []
    more += ["seq_idx"] * (kind == "concat")  # which is causal alone
    for prepared, names in (
        (lambda ds: ds, columns + more),
        (lambda ds: ds.with_loss_on(**some), columns),
    ):
        anew = [{"epochs": [1] * len(everything)}] if kind in DRAWN_ANEW else []
        for given in ({}, *anew, {"dtype": {"loss_mask": "f4", "segment_ids": "i8"}}):
            a, b = (prepared(ds).batch(everything, columns=names, **given) for ds in datasets)
            assert list(a) == list(b) == names
            for name in names:
                assert a[name].dtype == b[name].dtype and np.array_equal(a[name], b[name]), (
                    name,
                    given,
                )
    a, b = (next(ds.batches(7, seed=3)) for ds in datasets)
    for flat in (attention.flatten(a), attention.flatten(b, "segment")):
        for x, y in zip(flat[0].values(), attention.flatten(a)[0].values(), strict=True):
            assert np.array_equal(x, y)


@pytest.mark.parametrize("kind", KINDS)
def test_both_are_verified_whole_and_described_the_same(pairs, kind):
    full, compact = pairs(kind)
    for directory in (full, compact):
        assert faults_of(directory, replay=-1) == []
        assert faults_of(directory, replay=20) == []
    a, b = describe_dataset(full), describe_dataset(compact)
    changing = {"directory", "bytes", "fingerprint"}
    assert {k: v for k, v in a.items() if k not in changing} == {
        k: v for k, v in b.items() if k not in changing
    }
    assert b["bytes"] < a["bytes"]
    row = {**describe_row(full, 1, {}, True), "directory": ""}
    assert row == {**describe_row(compact, 1, {}, True), "directory": ""}
    assert all(segment["rebuilt"] == "identical" for segment in row["segments"])


@pytest.mark.parametrize("kind", ["next_token", "in_place"])
def test_any_number_of_rows_of_any_shards_is_derived_alike(pairs, kind):
    full, compact = map(open_dataset, pairs(kind))
    chance = np.random.default_rng(0)
    for size in (0, 1, 2, 9):
        indices = chance.integers(0, len(full), size)
        a, b = full.batch(indices), compact.batch(indices)
        assert all(np.array_equal(a[name], b[name]) for name in COLUMNS)


# Damage


@pytest.fixture
def damaged(pairs, tmp_path):
    def of(kind):
        return shutil.copytree(pairs(kind)[1], tmp_path / kind)

    return of


def test_an_array_too_many_is_refused_by_name(damaged):
    directory = damaged("next_token")
    [first, *_] = shards_of(directory)
    mask = np.zeros(first.arrays["tokens"].shape, np.uint8)
    with pytest.raises(DatasetError, match="'loss_mask' is present, but 'segment_ids' is missing"):
        shard.encode({**first.arrays, "loss_mask": mask})
    whole = {**first.arrays, "loss_mask": mask, "segment_ids": mask.astype("u2")}
    put_shard(directory, b"".join(shard.encode(whole)))
    [fault] = faults_of(directory)
    assert (
        fault["promise"] == "P3"
        and "'segment_ids' is present" in fault["message"]
        and "compact" in fault["message"]
    )
    with pytest.raises(DatasetError, match="000000.safetensors: array 'segment_ids' is present"):
        open_dataset(directory).row(0)


def test_an_array_too_few_is_refused_by_name(pairs, damaged, tmp_path):
    directory = damaged("in_place")
    [first, *_] = shards_of(directory)
    with pytest.raises(DatasetError, match="'loss_mask' is missing"):
        shard.encode({name: array for name, array in first.arrays.items() if name != "loss_mask"})
    full = shutil.copytree(pairs("next_token")[0], tmp_path / "full")
    put_shard(full, b"".join(shard.encode(shard.compacted(shards_of(full)[0].arrays))))
    [fault] = faults_of(full)
    assert (
        fault["promise"] == "P3"
        and "'segment_ids' is missing" in fault["message"]
        and "full" in fault["message"]
    )
    with pytest.raises(DatasetError, match="000000.safetensors: array 'segment_ids' is missing"):
        open_dataset(full).row(0)


def test_a_manifest_that_calls_a_compact_dataset_full_is_found(damaged):
    directory = damaged("next_token")

    def change(value):
        value["recipe"]["output"]["columns"] = "full"

    edit_manifest(directory, change)
    assert "P2" in promises_of(faults_of(directory))
    with pytest.raises(DatasetError, match="'segment_ids' is missing"):
        open_dataset(directory)[0]


@pytest.mark.parametrize(
    "name, promise",
    [("tokens", {"P17"}), ("segment_prefix", {"P13"}), ("cu_seqlens", {"P5", "P12", "P7", "P16"})],
)
def test_a_wrong_number_is_found(damaged, name, promise):
    directory = damaged("next_token")
    with resigned(directory) as arrays:
        if name == "tokens":
            row, slot = np.argwhere(arrays["tokens"] < 256)[40]
            arrays["tokens"][row, slot] ^= 1
        elif name == "segment_prefix":
            arrays["segment_prefix"][np.argmax(arrays["segment_prefix"] > 2)] -= 1
        else:
            arrays["cu_seqlens"][arrays["row_offsets"][1]] += 1
    found = promises_of(faults_of(directory, replay=-1))
    assert found and found & promise, found


@pytest.mark.parametrize("options", [{}, {"pad_to": 8}])
def test_what_is_derived_is_what_a_walk_over_the_segments_gives(options):
    arrays = make_shard(np.random.default_rng(2), 40, **options)
    n_rows, length = arrays["tokens"].shape
    opened = shard.Shard(
        "made", n_rows, len(arrays["segment_key"]), length, {k: () for k in arrays}, 0, 0
    )
    opened.__dict__["arrays"] = arrays
    facts = rows.Facts("made", length, PAD, arrays["tokens"].dtype, tasks(), False)
    found = rows.RowSegments(facts, [(opened, r) for r in range(n_rows)])
    for name in ("segment_ids", "loss_mask"):
        assert np.array_equal(rows.SLOTS[name].derived(found).reshape(n_rows, length), arrays[name])
    assert np.array_equal(found.gaps, np.flatnonzero(arrays["segment_ids"] == 0))
    ids = arrays["segment_ids"].reshape(-1)
    positions = [0] * len(ids)
    for i in range(len(ids)):
        if ids[i] and i % length and ids[i] == ids[i - 1]:
            positions[i] = positions[i - 1] + 1
    assert found.position_ids().tolist() == positions and found.position_ids().dtype == np.int32
