"""Array tasks that share a folder and nothing else: one plan, one dataset, whoever comes first,
last or not at all."""

import json
import shutil

import pytest

from packprep.building.distributed import status_of
from packprep.errors import PlanError
from packprep.format.json_files import MANIFEST_NAME
from tests import made

TASKS = 16


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(folder, table, contents of the build by one process) of a small corpus with some thirty
    shards."""
    base = tmp_path_factory.mktemp("many")
    made.write_lines(base / "in" / "a.jsonl", made.texts(500))
    table = made.table("in/*", output={"shard_text_bytes": 4_000})
    outcome = made.build(table, base, base / "out")
    assert 25 < outcome.plan.shards < 64
    return base, table, made.contents(base / "out")


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setattr("packprep.building.run.LIST_AGAIN_S", 0)


def started(base, table, out, index, count):
    before = (
        f"import functools; made.build = functools.partial(made.build, array=({index}, {count}))"
    )
    return made.start_build(base, table, out, before=before)


@pytest.mark.long
def test_sixteen_fresh_tasks_at_once_write_one_plan_and_publish_one_dataset(small, tmp_path):
    base, table, expected = small
    other = {**table, "seed": 1}
    out = tmp_path / "out"
    tasks = [started(base, table, out, i, TASKS) for i in range(TASKS)]
    said = [task.communicate(timeout=300)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0] * TASKS, [text for text in said if text]
    # the last to end has found all receipts, published and tidied up
    assert made.contents(out) == expected
    stranger = started(base, other, out, 0, TASKS)
    assert "PlanError" in stranger.communicate(timeout=120)[0] and stranger.returncode == 2


def test_a_task_with_another_recipe_refuses_to_work_on_the_plan_that_stands(
    small, tmp_path, hurried
):
    base, table, _ = small
    made.build(table, base, tmp_path / "out", array=(3, TASKS))
    before = made.contents(tmp_path / "out")
    with pytest.raises(PlanError, match="seed is 1 here and 0 in the plan"):
        made.build({**table, "seed": 1}, base, tmp_path / "out", array=(4, TASKS))
    assert made.contents(tmp_path / "out") == before


def test_what_64_tasks_began_three_finish(small, tmp_path, hurried):
    base, table, expected = small
    out = tmp_path / "out"
    for i in (0, 5, 17, 40, 63):
        made.build(table, base, out, array=(i, 64))
    assert 0 < status_of(out)["done"] < 6
    published = [made.build(table, base, out, array=(i, 3)).manifest is not None for i in (2, 0, 1)]
    assert published == [False, False, True]
    assert made.contents(out) == expected


@pytest.mark.long
def test_what_64_tasks_began_one_process_finishes_where_the_files_lie_elsewhere(
    small, tmp_path, hurried
):
    base, table, expected = small
    out = tmp_path / "out"
    for i in range(20, 40):
        made.build(table, base, out, array=(i, 64))
    shutil.copytree(base / "in", tmp_path / "mount" / "in")
    moved = {"source0": str(tmp_path / "mount" / "in")}
    outcome = made.build(table, tmp_path, out, moved=moved)
    assert outcome.manifest is not None and outcome.made < outcome.plan.shards
    assert made.contents(out) == expected


def test_a_complete_build_without_a_manifest_has_a_name_and_any_task_or_build_publishes_it(
    small, tmp_path, hurried
):
    base, table, expected = small
    for name, array in (("task", (7, TASKS)), ("whole", (0, 1))):
        out = tmp_path / name
        shutil.copytree(base / "out", out)
        (out / MANIFEST_NAME).unlink()
        status = status_of(out)
        assert not status["missing"] and not status["published"]
        assert made.build(table, base, out, array=array).made == 0
        assert made.contents(out) == expected
        assert json.loads((out / MANIFEST_NAME).read_bytes())["format"] == "packprep"
