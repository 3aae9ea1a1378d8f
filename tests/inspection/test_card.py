"""Data cards: as the Hub reads them, the same each time, and enough to make the dataset again."""

import hashlib
import json
import re
import shlex
import shutil
import sys

import pytest
import yaml
from huggingface_hub import DatasetCard

from packprep import open_dataset
from packprep.errors import ArgumentError
from packprep.inspection.card import SIZES, write_card
from tests import made
from tests.command_line import inside, packprep, refused


def card_of(directory, path):
    assert inside("inspect", directory, "--card", path).status == 0
    return path.read_text("utf-8")


def test_the_hub_reads_it(folder, tmp_path):
    text = card_of(folder / "ul2r", tmp_path / "README.md")
    card = DatasetCard(text)
    rows = len(open_dataset(folder / "ul2r"))
    assert card.data.to_dict() == {
        "pretty_name": "ul2r",
        "task_categories": ["text-generation"],
        "size_categories": ["n<1K"],
        "tags": ["packprep", "prefix_lm", "span_corruption"],
        "viewer": False,
    }
    assert (
        DatasetCard.load(tmp_path / "README.md").text.startswith("\n# ul2r\n")
        and f"\n{rows} rows of 256" in card.text
    )
    assert yaml.safe_load(text.split("---\n")[1]) == card.data.to_dict()


@pytest.mark.parametrize(
    ("rows", "size"),
    [(0, "n<1K"), (999, "n<1K"), (1000, "1K<n<10K"), (10**6, "1M<n<10M"), (10**13, "n>1T")],
)
def test_sizes_are_the_hubs(rows, size, folder, monkeypatch):
    from packprep.building.plan import stored_plan
    from packprep.dataset.manifest import read_manifest
    from packprep.inspection import card as module

    real = module.describe_manifest
    monkeypatch.setattr(module, "describe_manifest", lambda *given: {**real(*given), "rows": rows})
    text = module.card_of("x", read_manifest(folder / "ul2r"), stored_plan(folder / "ul2r"))
    assert DatasetCard(text).data.size_categories == [size] and len(set(SIZES)) == 11


def test_it_says_what_the_dataset_says_and_is_the_same_from_anywhere(folder, tmp_path):
    text = card_of(folder / "causal", tmp_path / "a.md")
    manifest = open_dataset(folder / "causal").manifest
    for value in (
        manifest["digest"],
        manifest["fingerprint"],
        manifest["plan"]["digest"],
        manifest["tokenizer"]["digest"],
    ):
        assert value in text
    for name, own in manifest["ledger"]["sources"].items():
        tokens, documents = own["tokens"]["used"], own["documents"]["used"]
        assert re.search(
            rf"^\| {name} \| 1 \| [\d,]+ \| 1 \| {documents:,} \| {tokens:,} \| ",
            text,
            re.MULTILINE,
        )
    assert f"packprep {manifest['made_with']['packprep']}, " in text and str(folder) not in text
    shutil.copytree(folder / "causal", tmp_path / "elsewhere/causal")
    assert card_of(tmp_path / "elsewhere/causal", tmp_path / "b.md") == text


@pytest.mark.long
def test_its_command_makes_the_dataset_again(folder, tmp_path):
    text = card_of(folder / "causal", tmp_path / "a.md")
    recipe, command = (
        re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)[-1] for language in ("toml", "sh")
    )
    (tmp_path / "recipe.toml").write_text(recipe, "utf-8")
    words = shlex.split(command.replace("FOLDER", shlex.quote(str(folder / "corpus"))))
    assert words[:2] == ["packprep", "build"]
    assert packprep(*words[1:], at=tmp_path).status == 0
    again, first = (open_dataset(place / "causal") for place in (tmp_path, folder))
    assert again.fingerprint == first.fingerprint
    assert [s["digest"] for s in again.manifest["shards"]] == [
        s["digest"] for s in first.manifest["shards"]
    ]


@pytest.mark.long
def test_hostile_names_stay_names(tmp_path):
    name = '"] --- ```|<script>alert(1)</script>\\'
    made.write_lines(tmp_path / "a```.jsonl", ["some text"] * 3)
    table = {
        "tokenizer": "bytes",
        "seq_length": 64,
        "sources": [{"name": name, "paths": ["*.jsonl"]}],
    }
    made.build(table, tmp_path, tmp_path / "a\n---\nb|")
    text = card_of(tmp_path / "a\n---\nb|", tmp_path / "card.md")
    card = DatasetCard(text)
    assert card.data.pretty_name == "a↵---↵b|" and card.data.tags == ["packprep", "causal"]
    assert "\n# a↵---↵b\\|\n" in card.text and "\\<script\\>" in card.text
    assert re.findall(r"^````toml\n.*?^````$", text, re.MULTILINE | re.DOTALL)
    without_code = re.sub(r"^(````*)\w+\n.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert "<script>" not in without_code


def test_what_it_refuses(folder, tmp_path):
    card_of(folder / "ul2r", tmp_path / "a.md")
    before = (tmp_path / "a.md").read_bytes()
    assert "already exists" in refused("inspect", folder / "ul2r", "--card", tmp_path / "a.md")
    assert (tmp_path / "a.md").read_bytes() == before
    assert "no such folder" in refused("inspect", folder / "ul2r", "--card", tmp_path / "no/a.md")
    assert "already exists" in refused("inspect", folder / "ul2r", "--card", tmp_path)
    assert "one view at a time" in refused(
        "inspect", folder / "ul2r", "--card", tmp_path / "b.md", "--row", "1"
    )
    own = shutil.copytree(folder / "ul2r", tmp_path / "own")
    (own / "plan.json").unlink()
    assert "| source0 | unknown | unknown |" in card_of(own, tmp_path / "c.md")


def test_croissant_s_own_validator_accepts_what_is_next_to_the_card(folder, tmp_path):
    mlcroissant = pytest.importorskip("mlcroissant", reason="mlcroissant is in the extra test")
    written = write_card(folder / "ul2r", tmp_path / "README.md")
    path = tmp_path / "README.croissant.json"
    assert written["croissant"] == str(path)
    metadata = mlcroissant.Dataset(jsonld=path).metadata  # This raises if the metadata are invalid.
    assert not metadata.ctx.issues.errors and metadata.name == "ul2r"
    [manifest] = metadata.file_objects
    data = (folder / "ul2r" / "dataset.json").read_bytes()
    assert manifest.sha256 == hashlib.sha256(data).hexdigest()
    [shards] = metadata.file_sets
    assert [*(folder / "ul2r").glob(shards.includes[0])]
    first = path.read_bytes()
    (tmp_path / "README.md").unlink()
    with pytest.raises(ArgumentError, match=r"README\.croissant\.json already exists"):
        write_card(folder / "ul2r", tmp_path / "README.md")
    write_card(folder / "ul2r", tmp_path / "again.md")
    assert (tmp_path / "again.croissant.json").read_bytes() == first
    assert json.loads(first)["keywords"] == ["packprep", "prefix_lm", "span_corruption"]


def test_without_mlcroissant_only_the_card_is_written(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlcroissant", None)
    assert "croissant" not in write_card(folder / "ul2r", tmp_path / "README.md")
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
