"""Datasets that were written by earlier releases stay readable."""

import json
import shutil

import numpy as np
import pytest

import packprep
from packprep.building import distributed
from packprep.building.distributed import status_of
from packprep.errors import ArgumentError, PackprepError, PlanError
from packprep.format.digests import own_digest
from packprep.format.json_files import encode
from packprep.inspection.document import describe_document
from packprep.inspection.report import shards_shown, write_report
from packprep.inspection.row import describe_segment
from packprep.inspection.summary import describe_dataset
from packprep.recipe import load_recipe, read_recipe
from packprep.verification import PROMISES
from tests.golden import datasets
from tests.golden.datasets import LAW1, LAW2, LAW3, build_again, moved, refusal, verified

BOTH_LAWS = "law_version 1 and this packprep makes 2 and 3: use packprep 0.1.0, which made it"


@pytest.mark.long(beyond=3)
@pytest.mark.parametrize("name", datasets.FINISHED)
def test_a_dataset_of_law_2_is_verified_replayed_exported_gone_on_with_and_built_again(
    name, tmp_path
):
    datasets.check_finished(LAW2 / name, tmp_path)


@pytest.mark.parametrize("name", datasets.CHATS)
def test_a_dataset_of_this_law_is_verified_replayed_exported_gone_on_with_and_built_again(
    name, tmp_path
):
    datasets.check_finished(LAW3 / name, tmp_path)


def test_a_half_finished_one_of_law_2_is_gone_on_with(tmp_path):
    datasets.check_half(LAW2 / "half", tmp_path)


def test_the_datasets_are_what_they_are_there_for():
    kinds = {
        name: packprep.open_dataset(LAW2 / name / "dataset").manifest for name in datasets.FINISHED
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
        in packprep.open_dataset(LAW2 / "supervised" / "dataset")._at_hand(0)[2].layout
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


def test_a_dataset_of_law_1_is_read_and_what_would_make_its_bytes_is_refused(tmp_path):
    datasets.check_old_law(tmp_path)


def test_a_dataset_of_law_1_is_inspected(tmp_path):
    mix = LAW1 / "mix"
    assert describe_dataset(mix / "dataset")["rows"] == len(packprep.open_dataset(mix / "dataset"))
    segment = describe_segment(mix / "dataset", 0, 1, moved(mix))["segment"]
    assert BOTH_LAWS in segment["rebuilt"] and segment["original"]
    position = json.dumps(segment["document"])
    found = describe_document(mix / "dataset", segment["source"], position, moved(mix))["files"][0]
    assert BOTH_LAWS in found["not_read"] and found["uses"][0]["outcome"] == "used"
    html = tmp_path / "page.html"
    report = verified(mix)
    assert len(shards_shown(mix / "dataset")) == report["shards"]
    assert write_report(mix / "dataset", html, moved(mix), report, PROMISES)["faults"] == 0
    assert BOTH_LAWS in html.read_text("utf-8")


def test_a_half_finished_one_of_law_1_is_shown_and_not_gone_on_with(tmp_path):
    half = LAW1 / "half"
    shutil.copytree(half / "dataset", tmp_path / "out")
    assert status_of(tmp_path / "out")["missing"] == [1, 3]
    recipe = read_recipe(load_recipe(half / "recipe.toml"), half)
    for call in (
        lambda: distributed.begin(recipe, tmp_path / "out"),
        lambda: distributed.build_shard(tmp_path / "out", 1, moved(half)),
        lambda: distributed.finish(tmp_path / "out"),
    ):
        assert BOTH_LAWS in refusal(call)
    assert status_of(tmp_path / "out")["missing"] == [1, 3]


def test_a_mixture_of_both_laws_is_read_and_refused_with_redraw_alone(tmp_path):
    build_again(LAW1 / "mix", tmp_path / "now")
    mixed = packprep.open_dataset([LAW1 / "mix" / "dataset", tmp_path / "now"], shares=[1, 1])
    batch = next(mixed.batches(8, seed=3))
    assert batch["tokens"].shape == (8, 64)
    assert np.array_equal(mixed.batch([0])["tokens"], mixed.datasets[0].batch([0])["tokens"])
    with pytest.raises(ArgumentError, match=BOTH_LAWS):
        mixed.batches(8, redraw=True)
    packprep.open_dataset([LAW2 / "in_place" / "dataset"], shares=[1]).batches(8, redraw=True)


def test_a_law_newer_than_ours_is_refused_everywhere(tmp_path):
    shutil.copytree(LAW2 / "causal" / "dataset", tmp_path / "d")
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
        (lambda: verified(LAW2 / "causal", dataset=tmp_path / "d"), PackprepError),
        (lambda: describe_dataset(tmp_path / "d"), PackprepError),
        (lambda: build_again(LAW2 / "causal", tmp_path / "d"), PlanError),
    ):
        with pytest.raises(
            error,
            match="law_version 9 and this packprep makes 2 and 3: use packprep 7.0, which made it",
        ):
            call()
