"""Arrays on a real Slurm: whatever happens to their tasks, the bytes are those of one process."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import made
from tests.slurm.cluster import MAX_ARRAY_SIZE, NODES, quiet_environment

pytestmark = pytest.mark.long

SLOW = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "slow"), str(made.ROOT)])}
NODE_EACH = ["--", "--exclusive"]


class Prepared(NamedTuple):
    """What `packprep slurm` said, and the ids of the jobs that it submitted."""

    said: str
    jobs: list[str]


def packprep(cluster, *arguments, status=0, **changes) -> str:
    """What a packprep command prints where the cluster's Slurm is."""
    done = subprocess.run(
        [sys.executable, "-m", "packprep", *map(str, arguments)],
        env=quiet_environment(made.environment()) | cluster.environment | changes,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == status and "Traceback" not in done.stderr, done
    return done.stdout + done.stderr


def submitted(cluster, small, out, count, *options, **changes) -> Prepared:
    """An array over the small corpus, and the job after it."""
    arguments = [
        "slurm",
        small.recipe,
        "--out",
        out,
        "--array",
        count,
        "--workers",
        1,
        "--submit",
        *options,
    ]
    said = packprep(cluster, *arguments, **changes)
    return Prepared(said, re.findall(r"\.sh: job (\d+),", said))


def log(out: Path, name: str) -> str:
    return (out.with_name(f"{out.name}.slurm") / name).read_text()


def receipts(out: Path, task: int, count: int, shards: int) -> int:
    """The shards of an array task that are done."""
    done = (int(path.stem) for path in out.glob("receipts/*/[0-9]*.json"))
    return sum(b * count // shards == task for b in done)


def pids(out: Path, task: int) -> list[int]:
    """The processes of an array task, found by their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if (
            b"packprep" in words
            and os.fsencode(out) in words
            and words[0] == os.fsencode(sys.executable)
        ):
            at = words.index(b"--array-index")
            found += [int(folder.name)] if words[at + 1] == str(task).encode() else []
    return found


def node_of(cluster, job: str) -> str:
    return cluster.run("squeue", "-h", "-j", job, "-o", "%N").strip()


def test_an_array_over_four_nodes_gives_the_bytes_of_one_process_and_is_published_and_verified(
    cluster, small, out
):
    prepared = submitted(cluster, small, out, NODES, *NODE_EACH)
    array, finish = prepared.jobs
    assert f"packprep status {out} --array-count {NODES}" in prepared.said
    assert f"submitted as jobs {array} (build.sh), {finish} (finish.sh)" in packprep(
        cluster, "status", out, status=1
    )
    cluster.wait(array, finish)
    logs = [log(out, f"build-{i}.log") for i in range(NODES)]
    assert cluster.states(array) == ["COMPLETED"] * NODES, "\n".join(logs)
    assert cluster.states(finish) == ["COMPLETED"], log(out, "finish.log")
    ran_on = {re.findall(r"^job \S+ on (n\d), restart 0$", text, re.M)[0] for text in logs}
    assert ran_on == {f"n{i}" for i in range(NODES)}
    assert "every invariant holds" in log(out, "finish.log")
    assert made.contents(out) == small.expected
    assert "published" in packprep(cluster, "status", out)


@pytest.mark.long
def test_a_token_store_is_made_by_an_array_and_of_it_a_dataset(cluster, small, out):
    prepared = submitted(cluster, small, out, 3, "--command", "tokenize")
    cluster.wait(*prepared.jobs)
    assert "every invariant holds" in log(out, "finish.log"), log(out, "tokenize-0.log")
    assert made.contents(out) == small.tokens
    store, dataset = out, out.with_name("of-store")
    text = small.recipe.read_text().replace(
        'paths = ["*.jsonl*"]', f'format = "store"\npaths = ["{store}"]'
    )
    recipe = made.write(out.with_name("of-store.toml"), text.encode())
    prepared = submitted(cluster, small._replace(recipe=recipe), dataset, 3)
    cluster.wait(*prepared.jobs)
    assert "every invariant holds" in log(dataset, "finish.log"), log(dataset, "build-0.log")
    shards = {name: data for name, data in small.expected.items() if name.startswith("shards/")}
    assert made.contents(dataset, "shards/") == shards


@pytest.mark.long
def test_datasets_of_several_lengths_are_made_by_one_array(cluster, small, out):
    one = "--set", "seq_lengths=[256, 512]", "--seq-length", 256
    packprep(cluster, "build", small.recipe, "--out", out, "--workers", 1, *one)
    both = made.write(
        out.with_name("both.toml"),
        small.recipe.read_text()
        .replace("seq_length = 512", "seq_lengths = [256, 512]")
        .replace("*.jsonl*", f"{small.recipe.parent}/*.jsonl*")
        .encode(),
    )
    whole = out.with_name("whole")
    prepared = submitted(cluster, small._replace(recipe=both), whole, 3)
    cluster.wait(*prepared.jobs)
    assert log(whole, "finish.log").count("every invariant holds") == 3, log(whole, "build-0.log")
    assert (
        made.contents(whole / "seq_256") == made.contents(out) and (whole / "mixture.json").exists()
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ['o\'u "t" %a%% #1 $(touch x) `y`', "ou\nt\\ \t'"], ids=["quotes", "lines"]
)
def test_names_are_taken_as_they_are(cluster, small, out, name):
    out = out.with_name(name)
    array, finish = submitted(cluster, small, out, 2).jobs
    cluster.wait(array, finish)
    assert made.contents(out) == small.expected
    assert sorted(path.name for path in out.with_name(f"{name}.slurm").iterdir()) == [
        "build-0.log", "build-1.log", "build.sh", "finish.log", "finish.sh", "jobs.json"
    ]  # fmt: skip
    assert sorted(path.name for path in out.parent.iterdir()) == sorted([name, f"{name}.slurm"])


@pytest.mark.long
@pytest.mark.alike(1)
@pytest.mark.parametrize("command", ["build", "tokenize"])
def test_tasks_that_are_killed_cancelled_requeued_and_preempted_and_the_redo_list_of_the_rest(
    cluster, small, out, command
):
    options = "--command", command, *NODE_EACH, "--partition=spare"
    array, finish = submitted(cluster, small, out, NODES, *options, **SLOW).jobs
    cluster.until(lambda: all(receipts(out, i, NODES, small.shards) for i in range(NODES)))
    urgent = cluster.run(
        "sbatch",
        "--parsable",
        "--exclusive",
        f"--nodelist={node_of(cluster, f'{array}_0')}",
        "--output=/dev/null",
        "--wrap=sleep 1",
    ).strip()
    for pid in pids(out, 1):
        os.kill(pid, signal.SIGKILL)
    cluster.run("scancel", f"{array}_2")
    cluster.run("scontrol", "requeue", f"{array}_3")
    cluster.wait(array, finish, urgent)
    assert cluster.states(array) == ["COMPLETED", "FAILED", "CANCELLED", "COMPLETED"]
    assert cluster.states(finish) == ["CANCELLED"]  # it would have waited for ever
    for preempted_or_requeued in (0, 3):
        assert "restart 1" in log(out, f"{command}-{preempted_or_requeued}.log")
    assert "stopped: by a signal" in log(out, f"{command}-0.log")
    assert not (out / "dataset.json").exists()

    said = packprep(cluster, "status", out, "--array-count", NODES, status=1)
    (redo,) = re.findall(r"^if no job is running, finish it with: (.*)$", said, re.M)
    assert "--array=1-2%4" in redo and "--array=1-2\n" in said
    finish = cluster.run("bash", "-c", redo).split()[-1]
    cluster.wait(finish)
    assert cluster.states(finish) == ["COMPLETED"]
    assert made.contents(out) == (small.expected if command == "build" else small.tokens)


@pytest.mark.long
def test_a_signal_to_a_task_its_double_and_a_controller_that_dies(cluster, small, out):
    array, finish = submitted(cluster, small, out, NODES, *NODE_EACH, **SLOW).jobs
    cluster.until(lambda: receipts(out, 1, NODES, small.shards))
    double = subprocess.Popen(
        [sys.executable, "-m", "packprep", "build", small.recipe, "--out", out, "--workers", "1",
         "--array-index", "0", "--array-count", str(NODES)],
        env=made.environment(SLURM_JOB_ID=array, SLURM_ARRAY_JOB_ID=array, SLURM_ARRAY_TASK_ID="0"),
    )  # fmt: skip
    cluster.run("scancel", "--signal=USR1", f"{array}_1")
    cluster.until(lambda: cluster.states(f"{array}_1") == ["PENDING"])
    cluster.until_saved()
    cluster.kill_controller()
    assert double.wait(60) == 0
    cluster.start_controller()
    # Slurm may notice only later that a job ended while its controller was down.
    cluster.wait(array, finish, patience=400)
    logs = [log(out, f"build-{i}.log") for i in range(NODES)]
    assert cluster.states(array) == ["COMPLETED"] * NODES, "\n".join(logs)
    assert cluster.states(finish) == ["COMPLETED"], log(out, "finish.log")
    assert "packprep: stopped: by a signal" in log(out, "build-1.log") and "restart 1" in log(
        out, "build-1.log"
    )
    assert made.contents(out) == small.expected


@pytest.mark.long
def test_an_array_of_three_finishes_what_one_of_four_began(cluster, small, out):
    array, finish = submitted(cluster, small, out, NODES, **SLOW).jobs
    cluster.until(lambda: any(receipts(out, i, NODES, small.shards) for i in range(NODES)))
    cluster.run("scancel", array)
    cluster.wait(array, finish)
    prepared = submitted(cluster, small, out, 3)
    assert "build.sh had other text, which is now in build.sh.old" in prepared.said
    cluster.wait(*prepared.jobs)
    assert made.contents(out) == small.expected


@pytest.mark.long
def test_an_array_verifies_and_the_task_that_finds_a_fault_fails(cluster, small, out):
    shutil.copytree(small.recipe.parent / "out", out)
    path = sorted(out.glob("shards/*/*.safetensors"))[-1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    said = packprep(
        cluster,
        "slurm",
        "--command",
        "verify",
        "--out",
        out,
        "--array",
        2,
        "--workers",
        1,
        "--replay",
        "all",
        "--submit",
    )
    (array,) = re.findall(r"verify\.sh: job (\d+),", said)
    cluster.wait(array)
    assert cluster.states(array) == ["COMPLETED", "FAILED"]
    assert "every invariant holds" in log(out, "verify-0.log") and path.name in log(
        out, "verify-1.log"
    )


def test_an_array_beyond_the_site_s_limit_is_refused(cluster, small, out):
    said = packprep(
        cluster,
        "slurm",
        small.recipe,
        "--out",
        out,
        "--array",
        MAX_ARRAY_SIZE + 1,
        "--submit",
        status=2,
    )
    assert (
        f"--array {MAX_ARRAY_SIZE + 1} is more than this site's MaxArraySize of {MAX_ARRAY_SIZE}"
        in said
    )
    assert "a task makes many shards" in said and not out.with_name("out.slurm").exists()
