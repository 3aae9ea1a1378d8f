"""Shards made by engines of others: the same bytes, whoever makes them, in any order, twice too."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from packprep.building import distributed
from packprep.building.distributed import begin, build_shard, finish
from packprep.errors import ArgumentError, BuildError, PlanError
from packprep.format.json_files import receipt_name
from packprep.recipe import read_recipe
from tests import made


@pytest.fixture
def small(tmp_path):
    """(recipe, output folder, contents of the same build by one process) over a small corpus."""
    made.write_lines(tmp_path / "in" / "a.jsonl", made.texts(200))
    recipe = read_recipe(made.table("in/a.jsonl", output={"shard_text_bytes": 6_000}), tmp_path)
    made.build(
        made.table("in/a.jsonl", output={"shard_text_bytes": 6_000}),
        tmp_path,
        tmp_path / "expected",
    )
    return recipe, tmp_path / "out", made.contents(tmp_path / "expected")


def shard_and_process(out: Path, number: int) -> tuple[int, int]:
    """What a pool's process runs: the receipt's shard, and the process."""
    return build_shard(out, number)["shard"], os.getpid()


@pytest.mark.long
def test_a_pool_of_fresh_processes_makes_the_dataset_in_any_order_and_some_shards_twice(small):
    recipe, out, expected = small
    shards = begin(recipe, out).shards
    assert shards > 6
    order = [*reversed(range(shards)), 0, shards // 2]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        done = list(pool.map(shard_and_process, [out] * len(order), order))
    assert [number for number, _ in done] == order and os.getpid() not in {
        process for _, process in done
    }
    manifest = finish(out)
    assert len(manifest["shards"]) == shards
    assert made.contents(out) == expected


def test_it_and_a_build_go_on_with_each_other_s_work(small):
    recipe, out, expected = small
    shards = begin(recipe, out).shards
    receipt = build_shard(out, 2)
    assert (
        (out / receipt_name(2)).exists()
        and receipt["shard"] == 2
        and receipt == build_shard(out, 2)
    )
    with pytest.raises(
        BuildError,
        match=rf"{shards - 1} of {shards} shards are missing \(0, 1, 3, 4.*\nhint: make them first",
    ):
        finish(out)
    made.build(made.table("in/a.jsonl", output={"shard_text_bytes": 6_000}), out.parent, out)
    assert begin(recipe, out).shards == shards
    finish(out)
    assert made.contents(out) == expected


def test_files_that_lie_elsewhere_here_change_no_byte(small):
    recipe, out, expected = small
    shards = begin(recipe, out).shards
    os.rename(out.parent / "in", out.parent / "far")
    for number in range(shards):
        build_shard(out, number, {"source0": str(out.parent / "far")})
    finish(out)
    assert made.contents(out) == expected


def test_what_cannot_be_is_refused(small, monkeypatch):
    recipe, out, _ = small
    with pytest.raises(PlanError, match="no plan.json"):
        build_shard(out, 0)
    shards = begin(recipe, out).shards
    for number in (-1, shards):
        with pytest.raises(
            ArgumentError, match=f"shard {number} does not exist: .* has 0 … {shards - 1}"
        ):
            build_shard(out, number)
    other = read_recipe(
        made.table("in/a.jsonl", seed=1, output={"shard_text_bytes": 6_000}), out.parent
    )
    with pytest.raises(PlanError, match="seed is 1 here and 0 in the plan"):
        begin(other, out)
    limits = []
    monkeypatch.setattr(
        distributed, "publish", lambda out, plan: limits.append(plan.max_bad_fraction)
    )
    for limit, count, listed in ((None, 10, "0, 1.*, 9"), (0.25, 11, "0, 1.*, 9, …")):
        monkeypatch.setattr(distributed, "missing_shards", lambda *given, n=count: [*range(n)])
        with pytest.raises(
            BuildError, match=rf"{count} of {shards} shards are missing \({listed}\)"
        ):
            finish(out, limit)
    assert limits == [recipe.documents.max_bad_fraction, 0.25]
