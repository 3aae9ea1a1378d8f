import itertools
import shutil

import pytest

from packprep.building.array_tasks import array_position, ranges, share_of, tasks_of
from packprep.building.distributed import status_of
from packprep.cli.printing import print_status
from packprep.errors import PlanError, RecipeError
from packprep.format.json_files import MANIFEST_NAME, receipt_name


def slurm(task, low, high, size):
    names = (
        "SLURM_ARRAY_TASK_ID",
        "SLURM_ARRAY_TASK_MIN",
        "SLURM_ARRAY_TASK_MAX",
        "SLURM_ARRAY_TASK_COUNT",
    )
    return dict(zip(names, map(str, (task, low, high, size)), strict=True))


def test_outside_of_an_array_all_work_is_one_task_s():
    assert array_position(None, None, {}) == (0, 1)
    assert array_position(None, None, {"SLURM_JOB_ID": "7"}) == (0, 1)


def test_a_whole_slurm_array_counts_from_its_least_number():
    assert array_position(None, None, slurm(0, 0, 3, 4)) == (0, 4)
    assert array_position(None, None, slurm(13, 10, 13, 4)) == (3, 4)
    assert array_position(None, None, slurm(5, 5, 5, 1)) == (0, 1)


def test_fault_30_a_sparse_redo_list_is_refused_with_the_flags_to_add():
    with pytest.raises(
        RecipeError,
        match=r"2 tasks numbered 3 … 7, so it is incomplete\nhint: add --array-index I --array-count N",
    ):
        array_position(None, None, slurm(3, 3, 7, 2))
    assert array_position(3, 8, slurm(3, 3, 7, 2)) == (3, 8)  # the flags win


@pytest.mark.parametrize("missing", ["ID", "MIN", "MAX", "COUNT"])
def test_fault_30_a_missing_variable_is_refused_by_name(missing):
    environment = slurm(0, 0, 3, 4)
    del environment[f"SLURM_ARRAY_TASK_{missing}"]
    with pytest.raises(
        RecipeError, match=f"SLURM_ARRAY_TASK_{missing} is missing.*\nhint: add --array-index"
    ):
        array_position(None, None, environment)


def test_fault_30_a_variable_that_is_no_number_or_outside_of_the_array_is_refused():
    with pytest.raises(RecipeError, match="add --array-index"):
        array_position(None, None, {**slurm(0, 0, 3, 4), "SLURM_ARRAY_TASK_ID": "x"})
    with pytest.raises(RecipeError, match="add --array-index"):
        array_position(None, None, slurm(9, 0, 3, 4))


def test_the_flags_go_together_and_win():
    assert array_position(2, 5, {**slurm(0, 0, 3, 4), "JOB_COMPLETION_INDEX": "1"}) == (2, 5)
    with pytest.raises(RecipeError, match="go together\nhint: give both"):
        array_position(2, None, {})
    with pytest.raises(RecipeError, match="go together\nhint: give both"):
        array_position(None, 5, {})
    with pytest.raises(RecipeError, match="--array-index 5 is not below --array-count 5"):
        array_position(5, 5, {})


def test_a_kubernetes_index_goes_with_array_count():
    assert array_position(None, 5, {"JOB_COMPLETION_INDEX": "4"}) == (4, 5)
    with pytest.raises(RecipeError, match="add --array-count N"):
        array_position(None, None, {"JOB_COMPLETION_INDEX": "4"})
    with pytest.raises(RecipeError, match="is not below --array-count 4"):
        array_position(None, 4, {"JOB_COMPLETION_INDEX": "4"})
    with pytest.raises(RecipeError, match="go together"):
        array_position(None, 4, {"JOB_COMPLETION_INDEX": ""})


def test_array_task_i_of_n_makes_the_shards_with_b_times_n_div_shards_equal_to_i():
    for shards, count in itertools.product(range(1, 40), range(1, 45)):
        owners = [b * count // shards for b in range(shards)]
        assert [list(share_of(i, count, shards)) for i in range(count)] == [
            [b for b in range(shards) if owners[b] == i] for i in range(count)
        ]
        for i in range(count):
            assert tasks_of(share_of(i, count, shards), count, shards) == (
                [i] if share_of(i, count, shards) else []
            )


def test_ranges_are_written_as_slurm_does():
    assert ranges([]) == "" and ranges([5]) == "5"
    assert ranges([0, 1, 2, 3, 7, 9, 10]) == "0-3,7,9-10"


@pytest.fixture
def out(built, tmp_path):
    shutil.copytree(built.out, tmp_path / "out")
    return tmp_path / "out"


def test_a_published_dataset_misses_nothing(out):
    status = status_of(out, 4)
    assert status == {
        **status,
        "missing": [],
        "published": True,
        "array": "",
        "done": status["shards"],
    }


def test_missing_shards_and_the_array_that_would_make_them_are_listed(out):
    shards = status_of(out)["shards"]
    for shard in (0, 3):
        (out / receipt_name(shard)).unlink()
    status = status_of(out, 3)
    assert status["missing"] == [0, 3] and status["done"] == shards - 2 and not status["published"]
    lacking = [i for i in range(3) if {0, 3} & set(share_of(i, 3, shards))]
    assert status["array"] == ranges(lacking)
    assert "array" not in status_of(out)


def test_a_complete_build_without_a_manifest_is_a_state_of_its_own(out, capsys):
    (out / MANIFEST_NAME).unlink()
    status = status_of(out)
    assert status["missing"] == [] and not status["published"]
    print_status(status)
    assert "complete, but not published" in capsys.readouterr().out


def test_the_status_is_printed_in_a_few_lines(out, capsys):
    print_status(status_of(out))
    assert capsys.readouterr().out.splitlines()[1:] == ["published"]
    (out / receipt_name(1)).unlink()
    shards = status_of(out)["shards"]
    print_status(status_of(out, shards))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(f"{shards - 1} of {shards} shards done") and lines[1:] == [
        "missing: 1",
        "--array=1",
    ]


def test_a_folder_where_nothing_was_begun_is_refused(tmp_path):
    with pytest.raises(
        PlanError, match="no build was started here\nhint: start one with `packprep build"
    ):
        status_of(tmp_path)
