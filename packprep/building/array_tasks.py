"""Assign shards to array tasks.

Array task `index` of `count` makes a range of consecutive shards. Both numbers come from flags, or
from the environment variables of a scheduler.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from packprep.errors import RecipeError


@dataclass(frozen=True)
class Scheduler:
    """The environment variables in which a scheduler numbers the tasks of an array.

    Attributes:
        name: Name for messages and the docs.
        index: Variable of the task's number.
        count: Variable of the number of tasks, or "".
        first: Variable of the first number, or the first number itself.
        last: Variable of the last number, or "".
        step: Variable of the difference between two numbers, or "" for 1.
        outside: Value of `index` in a job without an array. None if the variable is then missing.
    """

    name: str
    index: str
    count: str = ""
    first: str | int = 0
    last: str = ""
    step: str = ""
    outside: str | None = None


SCHEDULERS = (
    Scheduler(
        "Slurm",
        "SLURM_ARRAY_TASK_ID",
        "SLURM_ARRAY_TASK_COUNT",
        "SLURM_ARRAY_TASK_MIN",
        "SLURM_ARRAY_TASK_MAX",
    ),
    Scheduler("Kubernetes", "JOB_COMPLETION_INDEX"),
    Scheduler("AWS Batch", "AWS_BATCH_JOB_ARRAY_INDEX", "AWS_BATCH_JOB_ARRAY_SIZE"),
    Scheduler("AWS Batch (nodes)", "AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES"),
    Scheduler("Google Batch", "BATCH_TASK_INDEX", "BATCH_TASK_COUNT"),
    Scheduler("Cloud Run", "CLOUD_RUN_TASK_INDEX", "CLOUD_RUN_TASK_COUNT"),
    Scheduler(
        "Grid Engine",
        "SGE_TASK_ID",
        "",
        "SGE_TASK_FIRST",
        "SGE_TASK_LAST",
        "SGE_TASK_STEPSIZE",
        outside="undefined",
    ),
    Scheduler("PBS Professional", "PBS_ARRAY_INDEX"),
    Scheduler("Torque", "PBS_ARRAYID"),
    Scheduler("LSF", "LSB_JOBINDEX", "", 1, "LSB_JOBINDEX_END", "LSB_JOBINDEX_STEP", outside="0"),
    Scheduler("SkyPilot (jobs)", "SKYPILOT_JOB_RANK", "SKYPILOT_NUM_JOBS"),
    Scheduler("SkyPilot (nodes)", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
)

LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPI": ("PMI_RANK", "PMI_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}
"""Launcher → variables of a process' rank and of the number of processes.

A batch script of Slurm has SLURM_PROCID and SLURM_NTASKS too, but is one process. Only srun sets
SLURM_STEP_NUM_TASKS.
"""

_BOTH_FLAGS = "add --array-index I --array-count N, with N the size of the whole array"


@dataclass(frozen=True)
class _Task:
    """A task of an array, as the variables of a scheduler describe it.

    Attributes:
        scheduler: The scheduler.
        index: Index of the task, from 0.
        count: Number of tasks, or None if the variables do not give it.
    """

    scheduler: Scheduler
    index: int
    count: int | None

    def __str__(self) -> str:
        return f"{self.scheduler.name}'s task {self.index}" + (
            "" if self.count is None else f" of {self.count}"
        )


def array_position(
    index: int | None, count: int | None, environment: Mapping[str, str], is_build: bool = False
) -> tuple[int, int]:
    """Return this array task's index and the number of array tasks, or (0, 1) outside an array.

    The flags have precedence over the variables of SCHEDULERS. Several schedulers may set their
    variables, but must agree. With --array-count but without --array-index, the index comes from
    the variables.

    Args:
        index: The value of --array-index, or None.
        count: The value of --array-count, or None.
        environment: The environment variables.
        is_build: True for a command that makes shards. Outside an array, it then must not run in
            several processes of a launcher, because each process would make all shards.

    Raises:
        RecipeError: If the flags or variables are incomplete or contradict each other, or if a
            launcher started several processes.
    """
    # Both flags together override the variables, so that they can correct a wrong environment.
    if index is not None and count is not None:
        if index >= count:
            raise RecipeError(
                f"--array-index {index} is not below --array-count {count}\n"
                f"hint: use an index in 0 … {count - 1}"
            )
        return index, count
    tasks = [task for scheduler in SCHEDULERS if (task := _task_of(scheduler, environment))]
    if index is not None or (count is not None and not tasks):
        raise RecipeError(
            "--array-index and --array-count go together\n"
            "hint: give both, for example --array-index 0 --array-count 4"
        )
    # An array of one task does not divide the work, but another scheduler may divide it.
    tasks = [task for task in tasks if task.count != 1] or tasks[:1]
    position = _agreed_position(tasks, count) if tasks else (0, 1)
    if is_build and count is None and position == (0, 1):
        _refuse_launchers(environment)
    return position


def _agreed_position(tasks: Sequence[_Task], count: int | None) -> tuple[int, int]:
    """Return the index and the number of array tasks on which all `tasks` and the flag agree.

    Args:
        tasks: The task of each scheduler that set its variables, at least one.
        count: The value of --array-count, or None.

    Raises:
        RecipeError: If the number of tasks is unknown, or if there is a contradiction.
    """
    index, scheduler = tasks[0].index, tasks[0].scheduler
    counts = [task.count for task in tasks if task.count is not None]
    if count is None and not counts:
        raise RecipeError(
            f"{scheduler.index} is set, but the number of tasks is unknown\n"
            "hint: add --array-count N"
        )
    # The flag and all schedulers must agree. Otherwise no task might make some of the shards.
    task_count = counts[0] if count is None else count
    if {task.index for task in tasks} != {index} or not {*counts} <= {task_count}:
        words = [*map(str, tasks), *([] if count is None else [f"--array-count {count}"])]
        raise RecipeError(f"{' and '.join(words)} contradict each other\nhint: {_BOTH_FLAGS}")
    # Only --array-count can give fewer tasks than the scheduler started.
    if index >= task_count:
        numbers = f"{scheduler.first} … {int(scheduler.first) + task_count - 1}"
        raise RecipeError(
            f"{scheduler.index} gives the index {index}, which is not below"
            f" --array-count {task_count}\n"
            f"hint: number the tasks {numbers}, or add --array-index I"
        )
    return index, task_count


def _task_of(scheduler: Scheduler, environment: Mapping[str, str]) -> _Task | None:
    """Return the task that the variables of a scheduler describe, or None outside an array.

    An array with gaps is refused. It usually runs some tasks of a larger array again, and the size
    of the larger array is unknown.

    Raises:
        RecipeError: If a variable is missing, is not a number, or contradicts another variable.
    """
    start, number = scheduler.first, scheduler.index
    # If the first number is known in advance, the index is known without the other variables.
    needed = (
        [number] if isinstance(start, int) else [number, start, scheduler.last, scheduler.count]
    )
    other_names = [scheduler.last, scheduler.count, scheduler.step]
    names = [name for name in dict.fromkeys([*needed, *other_names]) if name]
    values = {name: environment[name] for name in names if name in environment}
    # A variable with the last number shows an array too. Its missing index is then an error, not a
    # whole build.
    in_array = values[number] != scheduler.outside if number in values else scheduler.last in values
    if not in_array:
        return None
    wrong_names = [
        name for name in names if not _is_number(values.get(name, "" if name in needed else "0"))
    ]
    if wrong_names:
        raise RecipeError(
            f"in {scheduler.name}, but {', '.join(wrong_names)} is missing or not a number\n"
            f"hint: {_BOTH_FLAGS}"
        )
    # Compute the number of tasks. Other tasks of the array divide the shards by the same number.
    numbers = {name: int(value) for name, value in values.items()}
    low = start if isinstance(start, int) else numbers[start]
    step = numbers.get(scheduler.step) or 1
    count = numbers.get(scheduler.count)
    if (last_number := numbers.get(scheduler.last)) is not None:
        if count is not None and last_number - low + 1 != count:
            raise RecipeError(
                f"this {scheduler.name} array has {count} tasks numbered {low} … {last_number}, so"
                f" it is incomplete\nhint: {_BOTH_FLAGS}"
            )
        count = (last_number - low) // step + 1
    # In steps of 2 from 1, the numbers 1, 3 and 5 have the indices 0, 1 and 2.
    index, remainder = divmod(numbers[number] - low, step)
    if remainder or index < 0 or (count is not None and index >= count):
        high = "" if count is None else low + (count - 1) * step
        by_step = f" in steps of {step}" if step > 1 else ""
        raise RecipeError(
            f"{number} = {numbers[number]} is not in the array's"
            f" {low} … {high}{by_step}\nhint: {_BOTH_FLAGS}"
        )
    return _Task(scheduler, index, count)


def _is_number(text: str) -> bool:
    return re.fullmatch("[0-9]{1,18}", text) is not None


def _refuse_launchers(environment: Mapping[str, str]) -> None:
    """Check that no launcher started several processes of this command.

    Raises:
        RecipeError: If the variables of a launcher give a rank and more than one process.
    """
    for name, (rank, size) in LAUNCHERS.items():
        processes = environment.get(size, "")
        if rank in environment and _is_number(processes) and int(processes) > 1:
            raise RecipeError(
                f"{name} started {int(processes)} processes ({size}={processes}), and each would"
                " make all shards\n"
                f"hint: run sh -c 'packprep … --array-index ${rank} --array-count ${size}' in them,"
                " or add --array-index 0 --array-count 1 to make all shards here"
            )


def share_of(index: int, count: int, shards: int) -> range:
    """Return the range of shards that array task `index` makes.

    They are the shards b with b · count div shards == index.
    """
    return range(-(-index * shards // count), -(-(index + 1) * shards // count))


def tasks_of(shards: Iterable[int], count: int, shard_count: int) -> list[int]:
    """Return the indices of the array tasks that make the given `shards`, ascending.

    Args:
        shards: Shard numbers.
        count: Number of array tasks.
        shard_count: Number of all shards of the build.
    """
    return sorted({b * count // shard_count for b in shards})


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers in Slurm's notation: [0, 1, 2, 3, 7] gives "0-3,7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, bounds)) for bounds in parts)
