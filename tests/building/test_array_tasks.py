import itertools
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from packprep.building.array_tasks import (
    LAUNCHERS,
    SCHEDULERS,
    array_position,
    ranges,
    share_of,
    tasks_of,
)
from packprep.building.distributed import status_of
from packprep.cli.printing import print_status
from packprep.errors import PlanError, RecipeError
from packprep.format.json_files import MANIFEST_NAME, receipt_name
from tests.command_line import inside, packprep, refused
from tests.made import contents, texts, write_lines


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
    with pytest.raises(RecipeError, match="JOB_COMPLETION_INDEX is missing or not a number"):
        array_position(None, 4, {"JOB_COMPLETION_INDEX": ""})


# The variables of task `i` of four, for each scheduler that gives both numbers.
COMPLETE = {
    "Slurm": lambda i: slurm(i + 10, 10, 13, 4),
    "AWS Batch": lambda i: {
        "AWS_BATCH_JOB_ARRAY_INDEX": str(i),
        "AWS_BATCH_JOB_ARRAY_SIZE": "4",
    },
    "AWS Batch (nodes)": lambda i: {
        "AWS_BATCH_JOB_NODE_INDEX": str(i),
        "AWS_BATCH_JOB_NUM_NODES": "4",
        "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    },
    "Google Batch": lambda i: {"BATCH_TASK_INDEX": str(i), "BATCH_TASK_COUNT": "4"},
    "Cloud Run": lambda i: {"CLOUD_RUN_TASK_INDEX": str(i), "CLOUD_RUN_TASK_COUNT": "4"},
    "Grid Engine": lambda i: sge(3 + 2 * i, 3, 9, 2),
    "LSF": lambda i: lsf(1 + i, 4, 1),
    "SkyPilot (jobs)": lambda i: {
        "SKYPILOT_JOB_RANK": str(i),
        "SKYPILOT_NUM_JOBS": "4",
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NUM_NODES": "1",
    },
    "SkyPilot (nodes)": lambda i: {"SKYPILOT_NODE_RANK": str(i), "SKYPILOT_NUM_NODES": "4"},
}
# The variable of the number, and the first number, for each scheduler that gives no number of tasks.
INDEX_ALONE = {
    "Kubernetes": ("JOB_COMPLETION_INDEX", 0),
    "PBS Professional": ("PBS_ARRAY_INDEX", 0),
    "Torque": ("PBS_ARRAYID", 0),
}


def sge(task, first, last, step):
    names = ("SGE_TASK_ID", "SGE_TASK_FIRST", "SGE_TASK_LAST", "SGE_TASK_STEPSIZE")
    return dict(zip(names, map(str, (task, first, last, step)), strict=True))


def lsf(task, last, step):
    names = ("LSB_JOBINDEX", "LSB_JOBINDEX_END", "LSB_JOBINDEX_STEP")
    return dict(zip(names, map(str, (task, last, step)), strict=True))


@pytest.mark.every_case
@pytest.mark.parametrize("name", [scheduler.name for scheduler in SCHEDULERS])
def test_the_variables_of_a_scheduler_give_each_task_its_place(name):
    if name in INDEX_ALONE:
        variable, first = INDEX_ALONE[name]
        for i in range(4):
            assert array_position(None, 4, {variable: str(first + i)}) == (i, 4)
        with pytest.raises(
            RecipeError,
            match=f"{variable} is set, but the number of tasks is unknown\nhint: add --array-count N",
        ):
            array_position(None, None, {variable: "3"})
        with pytest.raises(RecipeError, match=f"{variable} gives the index 4, which is not below"):
            array_position(None, 4, {variable: str(first + 4)})
        return
    for i in range(4):
        assert array_position(None, None, COMPLETE[name](i)) == (i, 4)
        assert array_position(None, 4, COMPLETE[name](i)) == (i, 4)
    assert array_position(0, 1, COMPLETE[name](3)) == (0, 1)  # the flags win
    with pytest.raises(RecipeError, match=r"of 4 and --array-count 5 contradict each other"):
        array_position(None, 5, COMPLETE[name](3))
    with pytest.raises(RecipeError, match="is not in the array's"):
        array_position(None, None, COMPLETE[name](4))


@pytest.mark.parametrize(
    "environment",
    [
        sge("undefined", "undefined", "undefined", "undefined"),
        lsf(0, 0, 0),
        {"LSB_JOBINDEX": "0"},
        {"LSB_JOBINDEX": "0", "LSB_JOBINDEX_END": "", "LSB_JOBINDEX_STEP": ""},
        {"AWS_BATCH_JOB_ARRAY_SIZE": "4"},
        {"CLOUD_RUN_TASK_INDEX": "0", "CLOUD_RUN_TASK_COUNT": "1"},
    ],
)
def test_variables_outside_of_an_array_divide_nothing(environment):
    assert array_position(None, None, environment, is_build=True) == (0, 1)


def test_steps_divide_the_numbers_of_tasks():
    assert array_position(None, None, sge(7, 1, 9, 3)) == (2, 3)
    assert array_position(None, None, lsf(9, 10, 4)) == (2, 3)
    with pytest.raises(
        RecipeError, match=r"SGE_TASK_ID = 8 is not in the array's 1 … 7 in steps of 3"
    ):
        array_position(None, None, sge(8, 1, 9, 3))
    with pytest.raises(RecipeError, match=r"LSB_JOBINDEX = 4 is not in the array's 1 … 9 in steps"):
        array_position(None, None, lsf(4, 10, 4))
    with pytest.raises(RecipeError, match="LSB_JOBINDEX = 5 is not in the array's 1 … 4\n"):
        array_position(None, None, lsf(5, 4, 1))
    with pytest.raises(
        RecipeError, match="LSB_JOBINDEX = 2 is not in the array's 1 …  in steps of"
    ):
        array_position(None, 4, {"LSB_JOBINDEX": "2", "LSB_JOBINDEX_STEP": "2"})


@pytest.mark.parametrize(
    "missing, hint",
    [
        ("SGE_TASK_LAST", "SGE_TASK_LAST is missing.*\nhint: add --array-index I --array-count N"),
        (
            "AWS_BATCH_JOB_ARRAY_SIZE",
            "AWS_BATCH_JOB_ARRAY_INDEX is set.*\nhint: add --array-count N",
        ),
        ("LSB_JOBINDEX_END", "LSB_JOBINDEX is set, but .* unknown\nhint: add --array-count N"),
        ("BATCH_TASK_COUNT", "BATCH_TASK_INDEX is set, but .* unknown\nhint: add --array-count N"),
    ],
)
def test_an_incomplete_set_is_refused_with_the_flags_to_add(missing, hint):
    (environment,) = (made(3) for made in COMPLETE.values() if missing in made(3))
    del environment[missing]
    with pytest.raises(RecipeError, match=hint):
        array_position(None, None, environment)
    if "--array-index" not in hint:
        assert array_position(None, 4, environment) == (3, 4)


@pytest.mark.parametrize("value", ["", "x", "-1", "²", "1.0", " 1", "1" * 19])
def test_a_number_that_is_none_is_refused_by_its_variable(value):
    environment = {**COMPLETE["Google Batch"](1), "BATCH_TASK_COUNT": value}
    with pytest.raises(
        RecipeError, match="in Google Batch, but BATCH_TASK_COUNT is missing or not"
    ):
        array_position(None, None, environment)


def test_two_schedulers_must_agree():
    both = {**COMPLETE["Slurm"](2), **COMPLETE["AWS Batch"](2)}
    assert array_position(None, None, both) == (2, 4)
    assert array_position(None, None, {**both, "JOB_COMPLETION_INDEX": "2"}) == (2, 4)
    for other in (COMPLETE["AWS Batch"](1), lsf(3, 8, 1), {"JOB_COMPLETION_INDEX": "1"}):
        with pytest.raises(
            RecipeError,
            match="Slurm's task 2 of 4 and .* contradict each other\nhint: add --array-index I",
        ):
            array_position(None, None, {**COMPLETE["Slurm"](2), **other})
        assert array_position(5, 8, {**COMPLETE["Slurm"](2), **other}) == (5, 8)
    one_node = {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1"}
    assert array_position(None, None, {**COMPLETE["Slurm"](2), **one_node}) == (2, 4)
    assert array_position(None, 4, {"JOB_COMPLETION_INDEX": "3", **one_node}) == (3, 4)
    assert array_position(None, 1, one_node) == (0, 1)
    with pytest.raises(RecipeError, match="task 0 of 1 and --array-count 4 contradict each other"):
        array_position(None, 4, one_node)


# The variables of one of several processes.
STARTED = {
    "torchrun": {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
    "Open MPI": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
    "MPI": {"PMI_RANK": "0", "PMI_SIZE": "2"},
    "srun": {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"},
}


@pytest.mark.every_case
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_several_processes_of_a_launcher_build_nothing_without_an_array(launcher):
    environment = STARTED[launcher]
    size = LAUNCHERS[launcher][1]
    with pytest.raises(
        RecipeError,
        match=rf"^{launcher} started 2 processes \({size}=2\)(.|\n)*add --array-index 0 --array-count 1",
    ):
        array_position(None, None, environment, is_build=True)
    assert array_position(None, None, environment) == (0, 1)  # for verify
    assert array_position(0, 1, environment, is_build=True) == (0, 1)
    for made in COMPLETE.values():
        assert array_position(None, None, {**environment, **made(3)}, is_build=True) == (3, 4)
    for changes in ({size: "1"}, {size: "all"}, {size: ""}):
        assert array_position(None, None, {**environment, **changes}, is_build=True) == (0, 1)


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"},
        {"WORLD_SIZE": "8"},
    ],
)
def test_a_batch_script_and_one_task_of_srun_may_build(environment):
    assert array_position(None, None, environment, is_build=True) == (0, 1)


@pytest.mark.long
def test_build_and_tokenize_are_refused_in_several_processes_and_verify_is_not(divided, tmp_path):
    for command in ("build", "tokenize"):
        message = refused(command, divided.recipe, "--out", tmp_path / "out", **STARTED["MPI"])
        assert "MPI started 2 processes" in message and not (tmp_path / "out").exists()
    assert inside("verify", divided.out, **STARTED["MPI"]).status == 0
    assert inside("inspect", divided.out, **STARTED["MPI"]).status == 0


class Divided(NamedTuple):
    """A recipe of several shards, and the dataset that one process builds of it."""

    recipe: Path
    out: Path


@pytest.fixture(scope="module")
def divided(tmp_path_factory) -> Divided:
    folder = tmp_path_factory.mktemp("divided")
    write_lines(folder / "a.jsonl", texts(60, 1))
    recipe, out = folder / "recipe.toml", folder / "out"
    recipe.write_text(
        'seq_length = 128\ntokenizer = "bytes"\n[[sources]]\npaths = ["a.jsonl"]\n'
        '[[tasks]]\npreset = "causal"\n[output]\nshard_text_bytes = 2000\n'
    )
    assert packprep("build", recipe, "--out", out).status == 0
    assert len(contents(out, "shards")) > 4
    return Divided(recipe, out)


@pytest.mark.long
@pytest.mark.parametrize("name", COMPLETE)
def test_four_processes_with_the_variables_of_a_scheduler_build_the_same_bytes(
    divided, tmp_path, name
):
    command = ["build", divided.recipe, "--out", tmp_path / "out", "--json"]
    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(lambda i: packprep(*command, **COMPLETE[name](i)), range(4)))
    assert [one.status for one in said] == [0] * 4, said
    shards = len(contents(divided.out, "shards"))
    made = [share_of(i, 4, shards) for i in range(4)]
    assert [
        f"this array task's {len(share)} shards to make" in one.err
        for one, share in zip(said, made, strict=True)
    ] == [True] * 4
    # Tasks that end at the same time may all miss the last shard, so any later build publishes.
    assert packprep(*command).status == 0
    assert contents(tmp_path / "out") == contents(divided.out)


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
