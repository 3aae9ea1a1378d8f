"""Datasets that an earlier version with the same law_version wrote stay readable."""

import json
import shutil

import numpy as np
import pytest

import packprep
from packprep.building import distributed
from packprep.building.distributed import status_of
from packprep.errors import PackprepError, PlanError
from packprep.format.digests import own_digest
from packprep.format.json_files import encode
from packprep.inspection.summary import describe_dataset
from packprep.recipe import load_recipe, read_recipe
from tests import made
from tests.golden import datasets
from tests.golden.datasets import LAW3, build_again, moved, refusal, verified

PRE_RELEASE = "was built by a pre-release version of packprep (law_version 2)\nhint: build it again"


@pytest.mark.parametrize("name", datasets.FINISHED)
def test_a_dataset_is_verified_rebuilt_exported_resumed_and_built_again(name, tmp_path):
    datasets.check_finished(LAW3 / name, tmp_path)


def test_a_half_finished_dataset_is_resumed(tmp_path):
    datasets.check_half(LAW3 / "half", tmp_path)


def test_the_datasets_are_what_they_are_there_for():
    kinds = {
        name: packprep.open_dataset(LAW3 / name / "dataset").manifest for name in datasets.FINISHED
    }
    objectives = {
        name: {t["objective"] for t in m["tasks"] if t["weight"]} for name, m in kinds.items()
    }
    assert objectives["in_place"] == {"masked_diffusion", "uniform_diffusion", "block_diffusion"}
    assert kinds["ul2r"]["tasks"][0]["parameters"]["random_roll"]
    assert [len(m["shards"]) > 1 for m in kinds.values()].count(True) > 2
    drawn = [
        count
        for m in kinds.values()
        for name, count in m["ledger"]["tasks"].items()
        if name != "too_short"
    ]
    assert min(count["segments"] for count in drawn) > 2
    assert (
        "trained_ranges"
        in packprep.open_dataset(LAW3 / "supervised" / "dataset")._at_hand(0)[2].layout
    )
    calls = packprep.open_dataset(LAW3 / "calls" / "dataset")
    assert (
        "trained_weights" in calls._at_hand(0)[2].layout
        and calls.manifest["ledger"]["tasks"]["masked_diffusion"]
    )
    assert not any(
        source["documents"]["rejected"] for source in calls.manifest["ledger"]["sources"].values()
    )
    record = json.loads((LAW3 / "calls/sources/calls.jsonl").read_text().splitlines()[7])
    assert (
        record["tools"]
        and record["weight"] == 0.25
        and record["messages"][1].keys() >= {"tool_calls", "weight"}
    )
    assert record["messages"][1]["content"] is None


def with_law(folder, law, **changes):
    """Sign plan.json and dataset.json again, with another law_version."""
    for name in ("plan.json", "dataset.json"):
        path = folder / name
        if path.exists():
            value = {**json.loads(path.read_text()), "law_version": law, **changes}
            path.write_bytes(encode({**value, "digest": own_digest(value)}))


def test_a_dataset_of_an_earlier_law_is_refused_everywhere(tmp_path):
    shutil.copytree(LAW3 / "causal" / "dataset", tmp_path / "d")
    with_law(tmp_path / "d", 2)
    for call in (
        lambda: packprep.open_dataset(tmp_path / "d"),
        lambda: packprep.open_dataset([tmp_path / "d"], shares=[1]),
        lambda: status_of(tmp_path / "d"),
        lambda: verified(LAW3 / "causal", dataset=tmp_path / "d"),
        lambda: describe_dataset(tmp_path / "d"),
        lambda: build_again(LAW3 / "causal", tmp_path / "d"),
    ):
        assert PRE_RELEASE in refusal(call)


def test_a_half_finished_one_of_an_earlier_law_is_not_resumed(tmp_path):
    shutil.copytree(LAW3 / "half" / "dataset", tmp_path / "out")
    with_law(tmp_path / "out", 2)
    recipe = read_recipe(load_recipe(LAW3 / "half" / "recipe.toml"), LAW3 / "half")
    before = made.contents(tmp_path / "out")
    for call in (
        lambda: distributed.begin(recipe, tmp_path / "out"),
        lambda: distributed.build_shard(tmp_path / "out", 1, moved(LAW3 / "half")),
        lambda: distributed.finish(tmp_path / "out"),
        lambda: status_of(tmp_path / "out"),
    ):
        assert PRE_RELEASE in refusal(call)
    assert made.contents(tmp_path / "out") == before


def test_a_token_store_of_an_earlier_law_is_refused(tmp_path):
    made.write_lines(tmp_path / "in.jsonl", made.texts(20))
    table = made.table("in.jsonl")
    made.build(table, tmp_path, tmp_path / "store", is_store=True)
    with_law(tmp_path / "store", 2)
    sources = [{"name": "source0", "paths": ["store"], "format": "store"}]
    assert PRE_RELEASE in refusal(
        lambda: made.build({**table, "sources": sources}, tmp_path, tmp_path / "out")
    )


def test_a_dataset_without_a_key_that_was_added_later_is_read(tmp_path):
    """`continues` says which tokens begin inside a character; tokenizer.json says so too."""
    shutil.copytree(LAW3 / "compact" / "dataset", tmp_path / "d")
    path = tmp_path / "d" / "dataset.json"
    value = json.loads(path.read_text())
    del value["continues"]
    path.write_bytes(encode({**value, "digest": own_digest(value)}))
    assert verified(LAW3 / "compact", datasets.ALL, dataset=tmp_path / "d", epoch=3)["replayed"]
    folders = (LAW3 / "compact" / "dataset", tmp_path / "d")
    with_key, without_key = (
        packprep.open_dataset(folder).batch([0, 1], epochs=[2, 2])["tokens"] for folder in folders
    )
    assert np.array_equal(with_key, without_key)


def test_a_law_newer_than_ours_is_refused_everywhere(tmp_path):
    shutil.copytree(LAW3 / "causal" / "dataset", tmp_path / "d")
    for name in ("plan.json", "dataset.json"):
        value = json.loads((tmp_path / "d" / name).read_text())
        newer = {
            **value,
            "law_version": 9,
            "colour": 1,
            "made_with": {**value["made_with"], "packprep": "7.0"},
        }
        (tmp_path / "d" / name).write_bytes(encode({**newer, "digest": own_digest(newer)}))
    for call, error in (
        (lambda: packprep.open_dataset(tmp_path / "d"), PackprepError),
        (lambda: status_of(tmp_path / "d"), PlanError),
        (lambda: verified(LAW3 / "causal", dataset=tmp_path / "d"), PackprepError),
        (lambda: describe_dataset(tmp_path / "d"), PackprepError),
        (lambda: build_again(LAW3 / "causal", tmp_path / "d"), PlanError),
    ):
        with pytest.raises(
            error,
            match="law_version 9 and this packprep makes 3\nhint: use packprep 7.0, which made it",
        ):
            call()
