"""Rows as Parquet: what a reader trains on, slot by slot, is what packprep's own loader gives."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from packprep import open_dataset
from packprep.dataset.rows import COLUMNS
from packprep.errors import RecipeError
from packprep.exporting import parquet
from packprep.exporting.export import export_dataset
from tests import made
from tests.exporting.conftest import CAUSAL_KINDS, MIXED_KINDS, NEXT_TOKEN_KINDS
from tests.exporting.plain import (
    described,
    parquet_rows,
    trained_by_nemo,
    trained_by_packprep,
    trl_row,
)
from tests.weights_made import TASKS, build, records

PAD, EOS = 256, 258


@pytest.mark.parametrize("kind", NEXT_TOKEN_KINDS)
def test_a_nemo_reader_trains_on_the_same_pairs(known, tmp_path, kind):
    known(kind).export(tmp_path / "out", "parquet")
    rows, dataset = parquet_rows(tmp_path / "out"), known(kind).dataset
    assert len(rows) == len(dataset) > 10
    trained = 0
    for i, row in enumerate(rows):
        own = trained_by_packprep(dataset.row(i))
        assert trained_by_nemo(row) == own
        trained += len(own)
    assert trained > 5000


@pytest.mark.parametrize("kind", NEXT_TOKEN_KINDS)
def test_a_row_holds_its_segments_one_after_the_other(known, tmp_path, kind):
    known(kind).export(tmp_path / "out", "parquet")
    dataset = known(kind).dataset
    multiple = known(kind).table.get("packing", {}).get("pad_seq_to_mult", 1)
    for i, row in enumerate(parquet_rows(tmp_path / "out")):
        view = dataset.row(i)
        tokens, starts = [], []
        for begin, end in zip(view.segments["begin"], view.segments["end"], strict=True):
            starts.append(len(tokens))
            tokens += view.tokens[begin:end].tolist()
            while multiple > 1 and (len(tokens) - starts[-1] - 1) % multiple:
                tokens.append(EOS)
        assert row["input_ids"] == tokens and row["seq_start_id"] == starts
        inputs = len(tokens) - len(starts)  # a reader drops the last token of each
        assert inputs <= dataset.seq_length and inputs % multiple == 0


def test_supervised_documents_keep_what_is_trained_of_them(known, tmp_path):
    one = known("mixed")
    table = {**one.table, "tasks": [{"preset": "causal"}, {"preset": "prefix_lm"}]}
    table["sources"] = [
        {k: v for k, v in source.items() if k != "tasks"} for source in table["sources"]
    ]
    made.build(table, one.out.parent, tmp_path / "dataset")
    export_dataset(tmp_path / "dataset", "parquet", tmp_path / "out", made.Silent())
    dataset = open_dataset(tmp_path / "dataset")
    masks = []
    for i, row in enumerate(parquet_rows(tmp_path / "out")):
        assert trained_by_nemo(row) == trained_by_packprep(dataset.row(i))
        masks += row["loss_mask"]
    assert 0.2 < np.mean(masks) < 0.95
    made.build({**table, "tasks": table["tasks"][:1]}, one.out.parent, tmp_path / "causal")
    export_dataset(tmp_path / "causal", "parquet", tmp_path / "trl", made.Silent(), columns="trl")
    dataset, rows = open_dataset(tmp_path / "causal"), parquet_rows(tmp_path / "trl")
    assert rows == [trl_row(dataset.row(i)) for i in range(len(dataset))]
    assert 0.05 < np.mean(np.concatenate([row["labels"] for row in rows]) == -100) < 0.8


@pytest.mark.parametrize("kind", [*CAUSAL_KINDS, "concat"])
def test_trl_is_given_each_token_its_own_label_and_no_padding(known, tmp_path, kind, monkeypatch):
    monkeypatch.setattr(parquet, "SLOTS_AT_ONCE", 256 * 7)
    known(kind).export(tmp_path / "out", "parquet", columns="trl")
    rows, dataset = parquet_rows(tmp_path / "out"), known(kind).dataset
    assert rows == [trl_row(dataset.row(i)) for i in range(len(dataset))] and len(rows) > 10
    trained = sum(label != -100 for row in rows for label in row["labels"])
    assert (
        trained
        == dataset.batch(range(len(dataset)), columns=["loss_mask"])["loss_mask"].sum()
        > 5000
    )
    about = described(tmp_path / "out/000000.parquet")
    assert (about["columns"], about["loss_alignment"]) == ("trl", "target_slot")


@pytest.mark.parametrize("to, option", [("parquet", "--columns trl"), ("hf", "--to hf")])
def test_what_trl_cannot_train_is_refused_by_name(known, tmp_path, to, option):
    columns = {"columns": "trl"} if to == "parquet" else {}
    for dataset, names in (
        (
            known("mixed").out,
            "llada, mdlm, .* quiet, counted predict the tokens of noised positions",
        ),
        (known("repeated").out, "r, x-long, .* attend bidirectionally to their prefixes"),
    ):
        with pytest.raises(
            RecipeError, match=f"{option}: .* but {names}\nhint: give --to parquet --columns full"
        ):
            export_dataset(dataset, to, tmp_path / "exported", made.Silent(), **columns)
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize("kind", [*MIXED_KINDS, "compact", "padded", "large_vocabulary"])
def test_the_full_columns_are_the_loaders(known, tmp_path, kind, monkeypatch):
    monkeypatch.setattr(parquet, "SLOTS_AT_ONCE", 256 * 7)
    receipt = known(kind).export(tmp_path / "out", "parquet", columns="full")
    rows, dataset = parquet_rows(tmp_path / "out"), known(kind).dataset
    assert receipt["rows"] == len(rows) == len(dataset)
    has_blocks = any(task["attention"] == "block_diffusion" for task in dataset.tasks)
    names = [*COLUMNS, "loss_weights", "prefix_ends", *["block_lengths"] * has_blocks]
    assert has_blocks == (kind in MIXED_KINDS)
    batch = dataset.batch(np.arange(len(dataset)), columns=names)
    for i, row in enumerate(rows):
        for name in names:
            assert row[name] == batch[name][i].tolist(), (i, name)
        segments = dataset.row(i).segments
        assert (
            row["segment_begin"] == segments["begin"].tolist()
            and row["segment_end"] == segments["end"].tolist()
        )
        assert row["segment_task"] == [dataset.tasks[t]["name"] for t in segments["task"]]
        assert row["segment_source"] == [
            dataset.manifest["sources"][s]["name"] for s in segments["source"]
        ]
    assert row.keys() == {*names, "segment_begin", "segment_end", "segment_task", "segment_source"}


def test_what_predicts_in_place_is_refused_by_name_for_a_reader_that_shifts(known, tmp_path):
    with pytest.raises(
        RecipeError,
        match=(
            "llada, mdlm, mlm, dllm, duo, bd3, quiet, counted predict the tokens of noised"
            " positions\nhint: give --columns full"
        ),
    ):
        known("mixed").export(tmp_path / "out", "parquet")
    with pytest.raises(RecipeError, match="the targets of llada, mdlm.* would be lost"):
        known("mixed").export(tmp_path / "out", "megatron", what="rows")
    assert not (tmp_path / "out").exists()


def test_files_say_what_they_are(known, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "SLOTS_AT_ONCE", 256 * 5)
    one = known("padded")
    receipt = one.export(tmp_path / "out", "parquet")
    manifest = one.dataset.manifest
    assert [file["file"] for file in receipt["files"]] == [
        f"{b:06d}.idx.parquet" for b in range(len(manifest["shards"]))
    ]
    for b, file in enumerate(receipt["files"]):
        path = tmp_path / "out" / file["file"]
        assert described(path) == {
            "columns": "nemo",
            "dataset": manifest["digest"],
            "fingerprint": manifest["fingerprint"],
            "shard": b,
            "shard_digest": manifest["shards"][b]["digest"],
            "seq_length": 256,
            "pad_seq_to_mult": 8,
            "vocab_size": 528,
            "pad_id": PAD,
            "loss_alignment": "predicting_slot",
            "labels": "the next token of the segment",
        }
        read = pq.ParquetFile(path).metadata
        assert read.num_rows == manifest["shards"][b]["rows"] == file[
            "rows"
        ] and read.num_row_groups == -(-read.num_rows // 5)
        assert {str(read.row_group(0).column(c).compression) for c in range(3)} == {"ZSTD"}


def test_two_eos_in_a_segment_are_counted_and_said(tmp_path):
    made.write_lines(
        tmp_path / "a.jsonl", ["one</s>two" * 3 + "<eos>x<eos>", "three", "a<eos>", "<eos>"]
    )
    table = made.table(
        "a.jsonl", tasks=[{"preset": "causal"}], documents={"special_text": "special"}
    )
    made.build(table, tmp_path, tmp_path / "dataset")
    progress = made.Silent()
    receipt = export_dataset(tmp_path / "dataset", "parquet", tmp_path / "out", progress)
    wanted = 0
    for row in parquet_rows(tmp_path / "out"):
        for begin, end in zip(
            row["seq_start_id"], [*row["seq_start_id"][1:], len(row["input_ids"])], strict=True
        ):
            wanted += row["input_ids"][begin : end - 1].count(EOS) > 1
    assert wanted == 1 and [file["segments_with_eos_inside"] for file in receipt["files"]] == [1]
    assert any("1 segments contain eos" in line for line in progress.said)


def test_prefixes_are_said_to_be_read_causally(known, tmp_path):
    progress = made.Silent()
    export_dataset(known("repeated").out, "parquet", tmp_path / "out", progress)
    assert any(
        "attend causally, even inside the prefixes of r, x-long" in line for line in progress.said
    )


@pytest.mark.parametrize(
    "to, options, told",
    [
        ("parquet", {"columns": "trl"}, "TRL: set padding_free"),
        ("hf", {}, "TRL: set padding_free"),
        ("hf", {"trainer": "llamafactory"}, "neat_packing: true"),
        ("hf", {"trainer": "axolotl"}, "sample_packing: false"),
        ("hf", {"trainer": "swift"}, "--padding_free true"),
    ],
)
def test_rows_of_several_documents_are_said_to_need_a_trainer_that_is_told(
    known, tmp_path, to, options, told
):
    progress = made.Silent()
    export_dataset(known("causal").out, to, tmp_path / "out", progress, **options)
    assert any("several documents" in line and told in line for line in progress.said)


@pytest.mark.parametrize("form", ["nemo", "full"])
def test_datasets_without_rows_and_with_empty_shards(
    without_rows, with_empty_shards, tmp_path, form
):
    receipt = export_dataset(
        without_rows, "parquet", tmp_path / "none", made.Silent(), columns=form
    )
    assert (
        receipt["rows"] == 0
        and parquet_rows(tmp_path / "none") == []
        and len(receipt["files"]) == 1
    )
    receipt = export_dataset(
        with_empty_shards, "parquet", tmp_path / "some", made.Silent(), columns=form
    )
    assert len(parquet_rows(tmp_path / "some")) == len(open_dataset(with_empty_shards))
    assert len(receipt["files"]) == len(open_dataset(with_empty_shards).manifest["shards"])


@pytest.mark.long
def test_workers_do_not_show(known, tmp_path):
    for workers in (1, 2):
        known("repeated").export(tmp_path / str(workers), "parquet", workers=workers)
    assert made.contents(tmp_path / "1") == made.contents(tmp_path / "2")


def test_weights_that_documents_give_are_exported_in_full(tmp_path):
    build(tmp_path, records(1, 60), [TASKS["causal"]], seq_length=64)
    export_dataset(tmp_path / "out", "parquet", tmp_path / "full", made.Silent(), columns="full")
    dataset = open_dataset(tmp_path / "out")
    own = dataset.batch(range(len(dataset)), columns=["loss_weights"])["loss_weights"]
    assert np.array_equal([row["loss_weights"] for row in parquet_rows(tmp_path / "full")], own)
