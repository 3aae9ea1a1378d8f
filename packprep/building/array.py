"""Which part of a build this array task does: from the flags, else from Slurm's or Kubernetes' environment."""

from collections.abc import Mapping

from packprep.errors import RecipeError

_SLURM = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX", "SLURM_ARRAY_TASK_COUNT")


def array_position(index: int | None, count: int | None, environment: Mapping[str, str]) -> tuple[int, int]:
    """(index, count) of this array task; (0, 1) outside of one.

    The flags win. Slurm's variables count only when the array is whole (MAX − MIN + 1 == COUNT): a sparse redo list
    would silently do other work. JOB_COMPLETION_INDEX (Kubernetes) goes with --array-count.
    """
    if index is not None or count is not None:
        completion = environment.get("JOB_COMPLETION_INDEX", "")
        if index is None and completion.isdigit():
            index = int(completion)
        if index is None or count is None:
            raise RecipeError("--array-index and --array-count go together: give both")
        if index >= count:
            raise RecipeError(f"--array-index {index} is not below --array-count {count}")
        return index, count
    given = {name: environment[name] for name in _SLURM if name in environment}
    if not given:
        if "JOB_COMPLETION_INDEX" in environment:
            raise RecipeError("JOB_COMPLETION_INDEX is set and the number of tasks is not known: add --array-count N")
        return 0, 1
    flags = "add --array-index I --array-count N, with N the size of the whole array"
    missing = [name for name in _SLURM if name not in given]
    if missing or not all(value.isdigit() for value in given.values()):
        raise RecipeError(
            f"in a Slurm array, but {', '.join(missing) or 'a variable'} is missing or no number: {flags}"
        )
    task, low, high, size = (int(given[name]) for name in _SLURM)
    if high - low + 1 != size:
        raise RecipeError(f"this Slurm array has {size} tasks numbered {low} … {high}, so it is not whole: {flags}")
    if not low <= task <= high:
        raise RecipeError(f"SLURM_ARRAY_TASK_ID = {task} is not in the array's {low} … {high}: {flags}")
    return task - low, size
