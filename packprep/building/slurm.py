"""Build on many machines by Slurm, with plain sbatch scripts that a site can read and change.

An array job makes the shards. By default, it has up to four times as many tasks as may run at once.
Slurm gives the next task to the first free machine. Slow machines therefore get fewer tasks. If a
machine fails, its tasks run again. No other scheduler is needed. A final job publishes and
verifies.
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packprep.building.array_tasks import ranges, tasks_of
from packprep.building.plan import datasets_in, prefix_of, refuse_others
from packprep.errors import BuildError, DatasetError, RecipeError
from packprep.format.json_files import PLAN_NAME, decode, encode
from packprep.messages import put_line
from packprep.sources.files import absolute_prefix
from packprep.storage import folder_at, is_url
from packprep.storage.local import LocalFolder, write_error

COMMON_MAX_ARRAY_SIZE = 1001
"""The default of Slurm's MaxArraySize. Many sites keep it."""
TASKS_PER_RUNNING = 4
FEW_TASKS = 16
FINISH = "finish.sh"
JOBS = "jobs.json"


MAKE = ("build", "tokenize")
"""The commands that write an output folder."""


@dataclass(frozen=True)
class ArrayJob:
    """A Slurm array job whose tasks share the work of one command.

    Attributes:
        command: `build`, `tokenize` or `verify`.
        arguments: The arguments after the command, from `arguments_of`.
        out: The output folder, as a path or URL.
        count: Number of array tasks.
        at_once: Maximum number of tasks that run at once; None for `default_at_once`.
        workers: Processes per task; None for the CPUs that Slurm allocates to it.
        options: Options of sbatch, split into words.
    """

    command: str
    arguments: tuple[str, ...]
    out: str | os.PathLike
    count: int
    at_once: int | None = None
    workers: int | None = None
    options: tuple[str, ...] = ()

    @property
    def script(self) -> str:
        """Return the file name of the script that the array's tasks run, such as "build.sh"."""
        return f"{self.command}.sh"

    @property
    def throttle(self) -> int:
        """Return the maximum number of array tasks that run at once."""
        return self.at_once or default_at_once(self.count)


def arguments_of(command: str, inputs: Sequence[str], flags: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the arguments for a command in a script: its inputs and its flags.

    The paths of recipes, tokenizers and sources become absolute. --out, --workers and the array's
    flags are not included.

    Args:
        command: `build`, `tokenize` or `verify`.
        inputs: A recipe, or files and patterns. They are ignored for `verify`. Files and patterns
            stay relative, because the script first changes to the current folder.
        flags: Flag → its value, or a list of values for a repeated flag. Flags with None or [] are
            left out.

    Raises:
        RecipeError: If the command does not take a flag.
    """
    arguments = [
        absolute_prefix(name) if name.endswith(".toml") else name
        for name in inputs
        if command in MAKE
    ]
    for flag, value in flags.items():
        if value is None or value == []:
            continue
        if flag not in _FLAGS[command]:
            raise RecipeError(
                f"{flag} cannot be used with --command {command}\nhint: leave {flag} out"
            )
        for argument in value if isinstance(value, list) else [value]:
            text = str(argument)
            if flag == "--tokenizer" and os.path.exists(text):
                text = os.path.abspath(text)
            elif flag == "--source":
                name, _, prefix = text.partition("=")
                text = f"{name}={prefix_of(prefix)}"
            arguments += [flag, text]
    return tuple(arguments)


_FLAGS = {
    "tokenize": ("--tokenizer", "--text-key", "--set", "--source"),
    "build": (
        "--tokenizer",
        "--seq-length",
        "--tasks",
        "--text-key",
        "--seed",
        "--set",
        "--source",
    ),
    "verify": ("--replay", "--source"),
}


def default_at_once(count: int) -> int:
    """Return the default number of array tasks that run at once.

    A quarter of the tasks runs at once, but at least 16 tasks. If there are fewer than 16 tasks,
    all run at once. Waiting tasks balance the load of machines with different speeds, and the limit
    leaves resources for other users.
    """
    return min(count, max(FEW_TASKS, -(-count // TASKS_PER_RUNNING)))


def slurm_folder(out: str | os.PathLike) -> Path:
    """Return the folder of the scripts and logs: the output folder's path with suffix .slurm.

    For a URL, the folder of the scripts is in the current folder. Its name is the last part of the
    URL with suffix .slurm.

    Raises:
        RecipeError: If the output folder is /.
    """
    place = os.fspath(out)
    absolute_path = (
        Path.cwd() / place.rstrip("/").rpartition("/")[2]
        if is_url(place)
        else Path(os.path.abspath(place))
    )
    if not absolute_path.name:
        raise RecipeError(
            f"--out {out}: the scripts are written next to the output folder, and this folder has"
            " no parent\n"
            "hint: give another folder as --out"
        )
    return absolute_path.with_name(absolute_path.name + ".slurm")


def prepare(job: ArrayJob, submitted: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Write the scripts of an array job, and submit them if requested.

    Args:
        job: The array job.
        submitted: True to submit the scripts.
        say: Receives messages for the user.

    Returns:
        A dict with the keys out, folder, scripts, array, at_once, jobs and submit. `jobs` lists
        {script, job} for each submitted job. `submit` is the shell command that submits the
        scripts, or None if this call has submitted them.

    Raises:
        RecipeError: If this site cannot run such an array.
        PlanError: If a build cannot start in the output folder.
    """
    job = replace(job, out=absolute_prefix(os.fspath(job.out)))
    _check_size(job, say)
    folder, names = slurm_folder(job.out), list(scripts(job, slurm_folder(job.out)))
    out = folder_at(job.out)
    if job.command in MAKE and not out.exists(PLAN_NAME) and datasets_in(out) == [str(out)]:
        refuse_others(out)  # Fail here, and not in every task.
    for name in write_scripts(job):
        say(f"{folder / name} had other text, which is now in {name}.old")
    jobs = submit(job) if submitted else []
    return {
        "out": os.fspath(job.out),
        "folder": str(folder),
        "scripts": names,
        "array": job.count,
        "at_once": job.throttle,
        "jobs": [{"script": name, "job": number} for name, number in jobs],
        "submit": (
            None
            if submitted
            else _submission([str(folder / job.script)], folder / FINISH, FINISH in names)
        ),
    }


def print_prepared(result: Mapping[str, Any]) -> None:
    """Print the scripts, the jobs, and the next commands."""
    out = shlex.quote(result["out"])
    for name in result["scripts"]:
        about = (
            "publishes and verifies"
            if name == FINISH
            else f"{result['array']} tasks, {result['at_once']} at a time"
        )
        number = next(
            (f"job {job['job']}, " for job in result["jobs"] if job["script"] == name), ""
        )
        put_line(f"{result['folder']}/{name}: {number}{about}")
    if result["submit"]:
        put_line(f"submit: {result['submit']}")
    put_line(f"status: packprep status {out} --array-count {result['array']}")


def _check_size(job: ArrayJob, say: Callable[[str], None]) -> None:
    if job.at_once is not None and job.at_once > job.count:
        raise RecipeError(
            f"--at-once {job.at_once} is more than the {job.count} tasks of --array {job.count}\n"
            "hint: leave --at-once out"
        )
    limit = max_array_size()
    fewer = "a task makes many shards, so fewer tasks do the same work"
    if limit is not None and job.count > limit:
        raise RecipeError(
            f"--array {job.count} is more than this site's MaxArraySize of {limit}\n"
            f"hint: use a smaller N; {fewer}"
        )
    if limit is None and job.count > COMMON_MAX_ARRAY_SIZE:
        say(
            f"--array {job.count}: MaxArraySize is unknown here, and often"
            f" {COMMON_MAX_ARRAY_SIZE}\n"
            f"hint: if sbatch refuses, use a smaller N; {fewer}"
        )


def _submission(array: Sequence[str], finish: Path, finishes: bool) -> str:
    """Return the shell command that submits an array and, if `finishes`, its final job.

    `array` has the arguments of sbatch for the array, and `finish` is the script of the final job.
    """
    if not finishes:
        return shlex.join(["sbatch", *array])
    array_command = shlex.join(["sbatch", "--parsable", *array])
    return f'sbatch --dependency="afterok:$({array_command})" {shlex.quote(str(finish))}'


def max_array_size() -> int | None:
    """Return this site's maximum number of array tasks, or None if Slurm is not available."""
    if shutil.which("scontrol") is None:
        return None
    asked = subprocess.run(
        ["scontrol", "show", "config"], capture_output=True, text=True, errors="replace"
    )
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", asked.stdout, re.M)
    return int(match[1]) if match else None


def scripts(job: ArrayJob, folder: Path) -> dict[str, str]:
    """Return {file name: text} of the array's script and, for a build, of finish.sh."""
    texts_by_name = {job.script: _script(job, folder, job.command, _array_part(job))}
    if job.command in MAKE:
        texts_by_name[FINISH] = _script(job, folder, "finish", _finish_part(job))
    return texts_by_name


def write_scripts(job: ArrayJob) -> list[str]:
    """Write the scripts. If a script exists with other text, rename it to NAME.old first.

    Returns:
        The names of the scripts that were replaced.
    """
    folder, replaced = slurm_folder(job.out), []
    texts_by_name = scripts(job, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts_by_name.items():
            path, data = folder / name, os.fsencode(text)
            if path.exists() and path.read_bytes() != data:
                path.rename(folder / f"{name}.old")
                replaced.append(name)
            LocalFolder(folder).write(name, [data])
    except OSError as error:
        raise write_error(error.filename or folder, error) from None
    return replaced


def submit(job: ArrayJob) -> list[tuple[str, str]]:
    """Submit the array and, for a build, the final job, and record the job ids.

    Returns:
        The script name and the job id of each submitted job.
    """
    folder = slurm_folder(job.out)
    array = _sbatch([str(folder / job.script)])
    jobs = [(job.script, array)]
    _keep_jobs(folder, jobs)
    if job.command not in MAKE:
        return jobs
    after = [f"--dependency=afterok:{array.partition(';')[0]}", str(folder / FINISH)]
    try:
        jobs.append((FINISH, _sbatch(after)))
    except BuildError as error:
        raise BuildError(
            f"the array is job {array}, but the job after it was not submitted: {error}"
        ) from None
    _keep_jobs(folder, jobs)
    return jobs


def _keep_jobs(folder: Path, jobs: Sequence[tuple[str, str]]) -> None:
    LocalFolder(folder).write(
        JOBS, [encode([{"script": name, "job": number} for name, number in jobs])]
    )


def build_jobs(out: str | os.PathLike) -> list[dict[str, str]]:
    """Return the jobs of the last build that was submitted for an output, or [].

    Each job is a dict {script, job}. `job` is the job id.
    """
    try:
        path = slurm_folder(out) / JOBS
        jobs = decode(path.read_bytes(), str(path))
        submitted_jobs = [{"script": str(job["script"]), "job": str(job["job"])} for job in jobs]
    except (
        OSError,
        RecipeError,
        DatasetError,
        TypeError,
        KeyError,
    ):  # RecipeError means that the output folder is /.
        return []
    return (
        submitted_jobs
        if any(job["script"].removesuffix(".sh") in MAKE for job in submitted_jobs)
        else []
    )


def first_command(out: str | os.PathLike) -> str | None:
    """Return the shell command that submits the scripts of a whole build.

    Return None if `prepare` has not written these scripts.
    """
    with contextlib.suppress(RecipeError):  # The output folder is /.
        array, finish = _array_script(slurm_folder(out)), slurm_folder(out) / FINISH
        if array.exists() and finish.exists():
            return _submission([str(array)], finish, True)
    return None


def _array_script(folder: Path) -> Path:
    """Return the path of the array script in a folder: build.sh or tokenize.sh."""
    return next(
        (folder / f"{name}.sh" for name in MAKE if (folder / f"{name}.sh").exists()),
        folder / "build.sh",
    )


def redo_command(out: str | os.PathLike, missing: Sequence[int], shards: int) -> str | None:
    """Return the shell command that makes the missing shards and then publishes.

    Return None if the scripts of the build do not exist. An array task that runs again keeps its
    index in the original array. The size of the original array is read from the script.
    """
    folder = slurm_folder(out)
    array, finish = _array_script(folder), folder / FINISH
    try:
        text = os.fsdecode(array.read_bytes())
    except OSError:
        return None
    # The shards of a task depend on the size of the original array, which the script has.
    match = re.search(r"^#SBATCH --array=0-(\d+)(%\d+)?$", text, re.M)
    if match is None or not finish.exists():
        return None
    # All shards are done, so only the final job is left.
    if not missing:
        return shlex.join(["sbatch", str(finish)])
    tasks = ranges(tasks_of(missing, int(match[1]) + 1, shards))
    return _submission([f"--array={tasks}{match[2] or ''}", str(array)], finish, True)


def _sbatch(arguments: Sequence[str]) -> str:
    """Submit a job by sbatch and return its id.

    Raises:
        BuildError: If sbatch fails. The message has the error output of sbatch.
    """
    command = shlex.join(["sbatch", *arguments])
    try:
        result = subprocess.run(
            ["sbatch", "--parsable", *arguments], capture_output=True, text=True, errors="replace"
        )
    except FileNotFoundError:
        raise BuildError(
            f"sbatch was not found\nhint: run {command} on a machine with sbatch"
        ) from None
    if result.returncode:
        raise BuildError(f"{command} failed: {' '.join(result.stderr.split())}")
    return result.stdout.strip()


def _script(job: ArrayJob, folder: Path, name: str, body: str) -> str:
    """Return the text of one script: the options of sbatch, then the commands.

    The user's options are last, so that they override the others.
    """
    array = name == job.command
    log, to_log = _log(folder, f"{name}-%a.log" if array else f"{name}.log")
    # A signal 60 s before the time limit lets a task stop at a safe point and be requeued.
    options = [
        f"--job-name=packprep-{name}",
        *(
            [f"--array=0-{job.count - 1}%{job.throttle}"]
            if array
            else ["--kill-on-invalid-dep=yes"]
        ),
        f"--output={log}",
        "--open-mode=append",
        "--requeue",
        "--signal=USR1@60",
    ]
    lines = [f"#SBATCH {_word(option)}" for option in options]
    lines += [f"#SBATCH {' '.join(map(_word, words))}" for words in _by_option(job.options)]
    head = "\n".join(lines)
    return (
        f"#!/bin/bash\n{head}\n\n{to_log}cd -- {shlex.quote(os.getcwd())} || exit\n{_SAY}\n{body}"
    )


_SAY = """\
job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}"
echo "job $job on ${SLURMD_NODENAME:-$HOSTNAME}, restart ${SLURM_RESTART_COUNT:-0}"
# srun passes signals on to the program, and gives it the CPUs that this job has.
cpus="${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-1}}"
packprep() {
  srun --nodes=1 --ntasks=1 --cpus-per-task="$cpus" %s -m packprep "$@"
}
""" % shlex.quote(sys.executable)  # noqa: UP031  (braces are the shell's)

_REQUEUE = """\
# Status 75 means that a signal stopped packprep at a safe point, so the job is queued again. A \
cancelled job is no longer running and is not queued again.
if [ "$status" = 75 ] && [ "$(squeue --noheader --jobs="$job" --format=%T)" = RUNNING ]; then
  scontrol requeue "$job"
fi
exit "$status"
"""


def _array_part(job: ArrayJob) -> str:
    position = f'--array-index "$SLURM_ARRAY_TASK_ID" --array-count {job.count}'
    return f"status=0\npackprep {_command(job)} \\\n  {position} || status=$?\n{_REQUEUE}"


def _finish_part(job: ArrayJob) -> str:
    verify = shlex.join(["verify", os.fspath(job.out), *_workers(job)])
    return (
        "# Make missing shards, publish the output and verify it. No shard is missing if all tasks"
        " of the array have finished.\n"
        f"status=0\npackprep {_command(job)} &&\n  packprep {verify} || status=$?\n{_REQUEUE}"
    )


def _command(job: ArrayJob) -> str:
    where = ["--out", os.fspath(job.out)] if job.command in MAKE else [os.fspath(job.out)]
    return shlex.join([job.command, *job.arguments, *where, *_workers(job)])


def _workers(job: ArrayJob) -> list[str]:
    return [] if job.workers is None else ["--workers", str(job.workers)]


def _log(folder: Path, name: str) -> tuple[str, str]:
    """Return (value of sbatch's --output, shell line for the script). The line is usually "".

    Slurm drops backslashes and reads options line by line. If the folder's path has a backslash or
    a control character, --output is therefore /dev/null, and the shell line redirects the log.
    """
    where = str(folder)
    if not re.search(r"[\\\x00-\x1f\x7f]", where):
        return f"{where.replace('%', '%%')}/{name}", ""
    shell = name.replace("%a", "$SLURM_ARRAY_TASK_ID")
    return "/dev/null", f'exec >>{shlex.quote(where)}/"{shell}" 2>&1\n'


def _by_option(words: Sequence[str]) -> list[list[str]]:
    """Return the words of a command line as one list per option: [["-p", "gpu"], ["--mem=4G"]].

    Raises:
        RecipeError: If a word is --array or -a.
    """
    lines: list[list[str]] = []
    for word in words:
        if word.startswith("-") or not lines:
            lines.append([])
        lines[-1].append(word)
    for line in lines:
        if re.match(r"(--array(=|$)|-a)", line[0]):
            raise RecipeError(
                f"{' '.join(line)}: this option cannot come after the --\n"
                "hint: set the array's size with --array N before the --, and its throttle with"
                " --at-once K"
            )
    return lines


def _word(word: str) -> str:
    """Return a word of an sbatch option, in quotes if an #SBATCH line of a script needs them."""
    if "\n" in word:
        raise RecipeError(f"{word!r}: an sbatch option in a script must be one line")
    if re.fullmatch(r"[\w@%+=:,./\[\]-]+", word, re.A):
        return word
    return '"' + re.sub(r'(["\\])', r"\\\1", word) + '"'
