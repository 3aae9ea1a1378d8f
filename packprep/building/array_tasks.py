"""Assign shards to array tasks.

Array task `index` of `count` makes a range of consecutive shards.
"""

from collections.abc import Iterable, Mapping, Sequence

from packprep.errors import RecipeError

_SLURM = (
    "SLURM_ARRAY_TASK_ID",
    "SLURM_ARRAY_TASK_MIN",
    "SLURM_ARRAY_TASK_MAX",
    "SLURM_ARRAY_TASK_COUNT",
)


def array_position(
    index: int | None, count: int | None, environment: Mapping[str, str]
) -> tuple[int, int]:
    """Return this array task's index and the number of array tasks, or (0, 1) outside an array.

    The flags have precedence over Slurm's variables. SLURM_ARRAY_TASK_* are used only if the task
    numbers have no gaps (MAX − MIN + 1 == COUNT). An array with gaps usually runs some tasks of a
    larger array again. The size of the larger array is unknown here. With --array-count but without
    --array-index, the index is Kubernetes' JOB_COMPLETION_INDEX.

    Args:
        index: The value of --array-index, or None.
        count: The value of --array-count, or None.
        environment: The environment variables.

    Raises:
        RecipeError: If the flags or variables are incomplete or contradict each other.
    """
    if index is not None or count is not None:
        completion = environment.get("JOB_COMPLETION_INDEX", "")
        if index is None and completion.isdigit():
            index = int(completion)
        if index is None or count is None:
            raise RecipeError(
                "--array-index and --array-count go together\n"
                "hint: give both, for example --array-index 0 --array-count 4"
            )
        if index >= count:
            raise RecipeError(
                f"--array-index {index} is not below --array-count {count}\n"
                f"hint: use an index in 0 … {count - 1}"
            )
        return index, count
    given = {name: environment[name] for name in _SLURM if name in environment}
    if not given:
        if "JOB_COMPLETION_INDEX" in environment:
            raise RecipeError(
                "JOB_COMPLETION_INDEX is set, but the number of tasks is unknown\n"
                "hint: add --array-count N"
            )
        return 0, 1
    flags = "add --array-index I --array-count N, with N the size of the whole array"
    missing = [name for name in _SLURM if name not in given]
    if missing or not all(value.isdigit() for value in given.values()):
        raise RecipeError(
            f"in a Slurm array, but {', '.join(missing) or 'a variable'} is missing or not a"
            " number\n"
            f"hint: {flags}"
        )
    task, low, high, size = (int(given[name]) for name in _SLURM)
    if high - low + 1 != size:
        raise RecipeError(
            f"this Slurm array has {size} tasks numbered {low} … {high}, so it is incomplete\n"
            f"hint: {flags}"
        )
    if not low <= task <= high:
        raise RecipeError(
            f"SLURM_ARRAY_TASK_ID = {task} is not in the array's {low} … {high}\nhint: {flags}"
        )
    return task - low, size


def share_of(index: int, count: int, shards: int) -> range:
    """Return the range of shards that array task `index` makes.

    They are the shards b with b · count div shards == index.
    """
    return range(-(-index * shards // count), -(-(index + 1) * shards // count))


def tasks_of(shards: Iterable[int], count: int, of: int) -> list[int]:
    """Return the indices of the array tasks that make the given `shards`, ascending.

    Args:
        shards: Shard numbers.
        count: Number of array tasks.
        of: Number of all shards of the build.
    """
    return sorted({b * count // of for b in shards})


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers in Slurm's notation: [0, 1, 2, 3, 7] gives "0-3,7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
