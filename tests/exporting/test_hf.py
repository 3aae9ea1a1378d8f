"""A folder for `datasets.load_from_disk`: its rows are packprep's, and `datasets` and the Hub take
it as it is."""

import json

import numpy as np
import pyarrow as pa
import pytest
from huggingface_hub import DatasetCard

from packprep import open_dataset
from packprep.errors import RecipeError
from packprep.exporting import hf
from packprep.exporting.export import export_dataset
from packprep.format.digests import digest_of
from packprep.storage import Remote
from tests import made
from tests.command_line import inside
from tests.exporting.conftest import CAUSAL_KINDS
from tests.exporting.plain import arrow_rows, trl_row


@pytest.mark.parametrize("trainer", hf.FORMS)
@pytest.mark.parametrize("kind", CAUSAL_KINDS)
def test_rows_are_those_of_the_dataset_in_files_that_are_not_too_large(
    known, tmp_path, kind, trainer, monkeypatch
):
    monkeypatch.setattr(hf, "FILE_SLOTS", 256 * 7)
    receipt = known(kind).export(tmp_path / "out", "hf", trainer=trainer)
    rows, dataset = arrow_rows(tmp_path / "out"), known(kind).dataset
    expected = [trl_row(dataset.row(i)) for i in range(len(dataset))]
    assert max(len(row["seq_lengths"]) for row in expected) > 1
    assert rows == [read_by(trainer, row, dataset) for row in expected]
    assert receipt["rows"] == len(rows) > 10 and {
        file.get("rows", 7) for file in receipt["files"]
    } <= set(range(8))
    shards = [entry["rows"] for entry in dataset.manifest["shards"]]
    assert len(receipt["files"]) == sum(-(-rows // 7) for rows in shards) + 2 > len(shards) + 2


def read_by(trainer, row, dataset):
    """A row for TRL as another trainer is given it."""
    if trainer == "trl":
        return row
    lengths, slots = row.pop("seq_lengths"), len(row["input_ids"])
    if trainer == "swift":
        return row | {"length": slots, "lengths": slots}
    if trainer == "axolotl":
        return row
    row["attention_mask"] = [
        number for number, length in enumerate(lengths, 1) for _ in range(length)
    ]
    fill = {"input_ids": dataset.pad_id, "labels": -100, "position_ids": 0, "attention_mask": 0}
    return {name: values + [fill[name]] * (256 - slots) for name, values in row.items()}


@pytest.mark.parametrize("trainer", hf.FORMS)
def test_datasets_loads_it_as_what_it_saves_itself(known, tmp_path, trainer):
    datasets = pytest.importorskip(
        "datasets", reason="datasets is not installed: pip install '.[trainers]'"
    )
    known("causal").export(tmp_path / "out", "hf", trainer=trainer)
    rows = datasets.load_from_disk(str(tmp_path / "out"))
    assert rows[:] == {
        name: [row[name] for row in arrow_rows(tmp_path / "out")] for name in rows.column_names
    }
    saved = datasets.Dataset.from_dict(rows[:], features=rows.features)
    saved.save_to_disk(str(tmp_path / "saved"))
    own, theirs = (
        {n: json.loads((tmp_path / f / n).read_bytes()) for n in (hf.INFO, hf.STATE)}
        for f in ("out", "saved")
    )
    assert own[hf.INFO] == theirs[hf.INFO] and own[hf.STATE].keys() == theirs[hf.STATE].keys()
    assert rows._fingerprint == datasets.load_from_disk(str(tmp_path / "out"))._fingerprint
    mapped = rows.map(lambda row: {"n": len(row["labels"])}, keep_in_memory=True)
    assert mapped["n"][:] == [len(ids) for ids in rows["input_ids"]]


@pytest.mark.parametrize(
    "trainer, told", [("trl", "padding_free=True"), ("llamafactory", "neat_packing: true")]
)
def test_the_command_writes_a_card_and_names_all_files(known, tmp_path, trainer, told):
    run = [
        "export",
        known("causal").out,
        "--to",
        "hf",
        "--out",
        tmp_path / "out",
        "--workers",
        1,
        "--trainer",
        trainer,
    ]
    assert "for datasets.load_from_disk" in inside(*run).out
    files = made.contents(tmp_path / "out")
    receipt = json.loads(files.pop(".export.json"))
    named = {file["file"]: (file["bytes"], file["digest"]) for file in receipt["files"]}
    assert named == {name: (len(data), digest_of(data)) for name, data in files.items()}
    card = DatasetCard(files["README.md"].decode())
    assert (
        card.data.pretty_name == "out"
        and "load_from_disk" in card.text
        and "open_dataset" not in card.text
    )
    assert told in card.text and all(
        f"| `{name}` |" in card.text for name in arrow_rows(tmp_path / "out")[0]
    )
    assert "nothing to make" in inside(*run).err
    for name in named:
        (tmp_path / "out" / name).unlink()
        assert inside(*run).status == 0
        assert {
            k: v for k, v in made.contents(tmp_path / "out").items() if k != ".export.json"
        } == files


def test_an_export_that_stopped_goes_on_and_workers_do_not_show(known, tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "FILE_SLOTS", 256 * 7)
    one, begun = known("causal"), tmp_path / "begun"
    one.export(tmp_path / "whole", "hf", workers=2)
    one.export(begun, "hf")
    whole = made.contents(tmp_path / "whole")
    assert made.contents(begun) == whole
    first, cut, short, empty, *_ = sorted(begun.glob("*.arrow"))
    (begun / ".export.json").rename(begun / ".export-begun.json")
    before = first.stat().st_ino
    (begun / "state.json").unlink()
    cut.write_bytes(cut.read_bytes()[:-100])
    with pa.ipc.open_stream(short) as reader:
        schema = reader.schema
    pa.ipc.new_stream(short, schema).close()
    empty.write_bytes(b"")
    one.export(begun, "hf")
    assert made.contents(begun) == whole and first.stat().st_ino == before
    remote = Remote("memory://exporting/hf")
    one.export(remote.url, "hf")
    assert {name: remote.read(name) for name, _ in remote.list()} == whole


def test_datasets_without_rows_and_with_empty_shards(without_rows, tmp_path):
    datasets = pytest.importorskip(
        "datasets", reason="datasets is not installed: pip install '.[trainers]'"
    )
    made.write_lines(tmp_path / "a.jsonl", ["one document", "x" * 3000, "another"])
    table = made.table("a.jsonl", output={"shard_text_bytes": 200}, tasks=[{"preset": "causal"}])
    made.build(table, tmp_path, tmp_path / "dataset")
    dataset = open_dataset(tmp_path / "dataset")
    assert 0 in {entry["rows"] for entry in dataset.manifest["shards"]}
    export_dataset(tmp_path / "dataset", "hf", tmp_path / "some", made.Silent())
    loaded = datasets.load_from_disk(str(tmp_path / "some"))
    assert np.array_equal(
        loaded["input_ids"][-1], trl_row(dataset.row(len(dataset) - 1))["input_ids"]
    )
    assert len(loaded) == len(dataset)
    export_dataset(without_rows, "hf", tmp_path / "none", made.Silent())
    assert len(datasets.load_from_disk(str(tmp_path / "none"))) == 0


def test_another_trainer_takes_another_folder(known, tmp_path):
    known("causal").export(tmp_path / "out", "hf")
    with pytest.raises(
        RecipeError, match="another export: trainer is 'trl' in .export.json and 'axolotl' here"
    ):
        known("causal").export(tmp_path / "out", "hf", trainer="axolotl")
    with pytest.raises(
        RecipeError,
        match="--columns is an option of --to parquet, not of --to hf\nhint: give --trainer trl or",
    ):
        known("causal").export(tmp_path / "out", "hf", columns="trl")
