"""The scripts without a Slurm: what the shell makes of them, with srun, sbatch, squeue and scontrol
that tell what they got."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packprep.building.slurm import (
    ArrayJob,
    arguments_of,
    default_at_once,
    prepare,
    print_prepared,
    redo_command,
    scripts,
)
from packprep.errors import BuildError, RecipeError
from tests.command_line import inside, refused

HOSTILE = "a b'c\"d\ne$(touch x)`y`%a\\ #-"
names = st.text(
    st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1, max_size=20
)


def programs(folder: Path, **texts: str) -> dict[str, str]:
    """An environment in which these programs, shell scripts, come first."""
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.fixture
def no_slurm(tmp_path, monkeypatch):
    (tmp_path / "none").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "none"))


def job(out: Path, **changes) -> ArrayJob:
    return ArrayJob(
        **{"command": "build", "arguments": ("r.toml",), "out": out, "count": 4, **changes}
    )


def ran(folder: Path, text: str, **environment: str) -> tuple[int, list[list[str]]]:
    """(exit status, words of each call of srun) of a script as task 3 of job 12."""
    calls = folder / "calls"
    calls.unlink(missing_ok=True)
    given = {
        "SLURM_JOB_ID": "15",
        "SLURM_ARRAY_JOB_ID": "12",
        "SLURM_ARRAY_TASK_ID": "3",
        "CALLS": str(calls),
        **environment,
    }
    done = subprocess.run(["bash", "-c", text], env={**os.environ, **given}, capture_output=True)
    lines = calls.read_bytes().split(b"\0\n") if calls.exists() else []
    return done.returncode, [
        [os.fsdecode(word) for word in line.split(b"\0")] for line in lines if line
    ]


SRUN = """printf '%s\\0' "$@" >>"$CALLS"; echo >>"$CALLS"; exit "${SRUN_STATUS:-0}" """


@given(out=names, words=st.lists(names, max_size=3))
def test_the_shell_gives_every_word_back(tmp_path_factory, out, words):
    folder = tmp_path_factory.getbasetemp() / "programs"
    environment = programs(folder, srun=SRUN)
    made = scripts(job(Path("/t") / out, arguments=("r.toml", *words)), folder)
    status, (call,) = ran(folder, made["build.sh"], **environment)
    start = [
        "--nodes=1",
        "--ntasks=1",
        "--cpus-per-task=1",
        sys.executable,
        "-m",
        "packprep",
        "build",
        "r.toml",
    ]
    assert status == 0
    assert call == [
        *start,
        *words,
        "--out",
        f"/t/{out}",
        "--array-index",
        "3",
        "--array-count",
        "4",
    ]


def test_an_odd_folder_s_logs_go_where_they_belong(tmp_path):
    out = tmp_path / HOSTILE
    environment = programs(tmp_path / "bin", srun=SRUN)
    prepare(job(out), False, print)
    script = out.with_name(f"{HOSTILE}.slurm") / "build.sh"
    assert "#SBATCH --output=/dev/null" in script.read_text()
    assert ran(tmp_path, script.read_text(), **environment)[0] == 0
    assert "job 12_3 on" in (script.parent / "build-3.log").read_text()


def test_sbatch_s_own_characters_are_escaped(tmp_path):
    text = scripts(
        job(tmp_path / 'a "b" %c', options=("--comment", 'say "x" \\', "-p", "main")),
        tmp_path / 'a "b" %c',
    )
    assert f'#SBATCH "--output={tmp_path}/a \\"b\\" %%c/build-%a.log"\n' in text["build.sh"]
    assert '#SBATCH --comment "say \\"x\\" \\\\"\n#SBATCH -p main\n' in text["build.sh"]


def test_without_options_no_cpus_memory_or_time_are_asked_for(tmp_path):
    for text in scripts(job(tmp_path / "out"), tmp_path).values():
        options = [
            line.split()[1].partition("=")[0]
            for line in text.splitlines()
            if line.startswith("#SBATCH")
        ]
        assert set(options) <= {
            "--job-name",
            "--array",
            "--output",
            "--open-mode",
            "--requeue",
            "--signal",
            "--kill-on-invalid-dep",
        }


@pytest.mark.parametrize(
    "status, state, requeued",
    [
        ("75", "RUNNING", True),
        ("75", "CANCELLED", False),
        ("2", "RUNNING", False),
        ("0", "RUNNING", False),
    ],
)
def test_status_75_of_a_running_job_is_queued_again(tmp_path, status, state, requeued):
    environment = programs(
        tmp_path / "bin",
        srun=SRUN,
        squeue=f'[ "$2" = --jobs=12_3 ] && echo {state}',
        scontrol=f'echo "$@" >{tmp_path}/said',
    )
    text = scripts(job(tmp_path / "out"), tmp_path)["build.sh"]
    assert ran(tmp_path, text, SRUN_STATUS=status, **environment)[0] == int(status)
    assert (tmp_path / "said").exists() == requeued
    if requeued:
        assert (tmp_path / "said").read_text() == "requeue 12_3\n"


def test_comments_of_scripts_are_full_sentences(tmp_path):
    for text in scripts(job(tmp_path / "out"), tmp_path).values():
        comments = re.findall("^# (.*)", text, re.MULTILINE)
        assert comments and all(re.match("([A-Z]|srun ).*[.]$", comment) for comment in comments)


def test_the_last_job_builds_what_is_missing_and_verifies_if_that_went_well(tmp_path):
    environment = programs(tmp_path / "bin", srun=SRUN)
    text = scripts(job(tmp_path / "out", workers=2), tmp_path)["finish.sh"]
    _, calls = ran(tmp_path, text, SLURM_CPUS_ON_NODE="8", **environment)
    out = str(tmp_path / "out")
    assert [call[2:3] + call[6:] for call in calls] == [
        ["--cpus-per-task=8", "build", "r.toml", "--out", out, "--workers", "2"],
        ["--cpus-per-task=8", "verify", out, "--workers", "2"],
    ]
    status, calls = ran(
        tmp_path,
        text,
        SRUN_STATUS="2",
        SLURM_CPUS_PER_TASK="3",
        SLURM_CPUS_ON_NODE="8",
        **environment,
    )
    assert status == 2 and [call[2] for call in calls] == ["--cpus-per-task=3"]


def test_verification_needs_the_folder_alone(tmp_path):
    environment = programs(tmp_path / "bin", srun=SRUN)
    given = arguments_of("verify", (), {"--replay": "all", "--seed": None})
    made = scripts(job(tmp_path / "out", command="verify", arguments=given), tmp_path)
    assert list(made) == ["verify.sh"]
    _, (call,) = ran(tmp_path, made["verify.sh"], **environment)
    assert call[6:] == [
        "verify",
        "--replay",
        "all",
        str(tmp_path / "out"),
        "--array-index",
        "3",
        "--array-count",
        "4",
    ]


def test_arguments_are_passed_on_and_paths_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.json").touch()
    flags = {
        "--tokenizer": "t.json",
        "--seed": 0,
        "--set": ["a=1", "b = 2"],
        "--source": ["web=w/x"],
        "--replay": None,
    }
    assert arguments_of("build", ["r.toml"], flags) == (
        f"{tmp_path}/r.toml",
        "--tokenizer",
        f"{tmp_path}/t.json",
        "--seed",
        "0",
        "--set",
        "a=1",
        "--set",
        "b = 2",
        "--source",
        f"web={tmp_path}/w/x",
    )
    assert arguments_of("build", ["*.jsonl"], {"--tokenizer": "bytes"}) == (
        "*.jsonl",
        "--tokenizer",
        "bytes",
    )
    with pytest.raises(
        RecipeError, match="--replay cannot be used with --command build\nhint: leave --replay out"
    ):
        arguments_of("build", ["r.toml"], {"--replay": "all"})


@pytest.mark.parametrize(
    "count, at_once", [(1, 1), (16, 16), (17, 16), (64, 16), (500, 125), (1001, 251)]
)
def test_a_quarter_runs_at_a_time_and_no_fewer_than_16(count, at_once):
    assert default_at_once(count) == at_once


def test_an_array_that_cannot_be_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(
        "PATH", programs(tmp_path / "bin", scontrol='echo "MaxArraySize            = 50"')["PATH"]
    )
    prepare(job(tmp_path / "out", count=50), False, print)
    with pytest.raises(
        RecipeError,
        match="--array 51 is more than this site's MaxArraySize of 50\nhint: use a smaller N; a task makes",
    ):
        prepare(job(tmp_path / "out", count=51), False, print)
    with pytest.raises(
        RecipeError, match="--at-once 5 is more than the 4 tasks of --array 4\nhint: leave"
    ):
        prepare(job(tmp_path / "out", at_once=5), False, print)
    for word in ("--array=3", "-a3"):
        with pytest.raises(RecipeError, match="set the array's size with --array N before the --"):
            prepare(job(tmp_path / "out", options=(word,)), False, print)
    with pytest.raises(RecipeError, match="an sbatch option in a script must be one line"):
        prepare(job(tmp_path / "out", options=("--comment", "a\nb")), False, print)
    with pytest.raises(RecipeError, match="this folder has no parent\nhint: give another"):
        prepare(job(Path("/")), False, print)


def test_where_no_slurm_is_a_large_array_is_told_of(tmp_path, no_slurm):
    said: list[str] = []
    prepare(job(tmp_path / "out", count=1001), False, said.append)
    assert said == []
    prepare(job(tmp_path / "out", count=1002), False, said.append)
    assert "MaxArraySize is unknown here, and often 1001" in said[0]
    with pytest.raises(
        BuildError,
        match="sbatch was not found\nhint: run sbatch .*/out.slurm/build.sh",
    ):
        prepare(job(tmp_path / "out"), True, said.append)


SBATCH = """echo "$@" >>"$(dirname "$0")/said"
[ -z "$REFUSE" ] || case "$*" in *$REFUSE*) echo no room >&2; exit 1;; esac
echo 7"""


def test_both_jobs_are_submitted_the_second_after_the_first(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", programs(tmp_path / "bin", sbatch=SBATCH, scontrol="exit 1")["PATH"])
    folder = tmp_path / "out.slurm"
    result = prepare(job(tmp_path / "out"), True, print)
    assert result["jobs"] == [
        {"script": "build.sh", "job": "7"},
        {"script": "finish.sh", "job": "7"},
    ]
    assert (tmp_path / "bin" / "said").read_text().splitlines() == [
        f"--parsable {folder}/build.sh", f"--parsable --dependency=afterok:7 {folder}/finish.sh"
    ]  # fmt: skip
    print_prepared(result)
    assert capsys.readouterr().out.splitlines() == [
        f"{folder}/build.sh: job 7, 4 tasks, 4 at a time",
        f"{folder}/finish.sh: job 7, publishes and verifies",
        f"status: packprep status {tmp_path}/out --array-count 4",
    ]
    said = inside("status", tmp_path / "out")
    assert said.status == 1 and said.out.splitlines() == [
        (
            f"{tmp_path}/out: no output yet; submitted as jobs 7 (build.sh), 7 (finish.sh), which"
            " are pending or have just started"
        ),
        "squeue --jobs=7,7 shows their state",
    ]
    assert inside("status", tmp_path / "out", "--json").json["jobs"] == result["jobs"]
    monkeypatch.setenv("REFUSE", "finish")
    with pytest.raises(
        BuildError,
        match=(
            r"the array is job 7, but the job after it was not submitted: sbatch .* failed: no room"
        ),
    ):
        prepare(job(tmp_path / "out"), True, print)
    assert inside("status", tmp_path / "out", "--json").json["jobs"] == [
        {"script": "build.sh", "job": "7"}
    ]
    (folder / "jobs.json").write_text("[7]")
    assert "no build was started here" in refused("status", tmp_path / "out")
    monkeypatch.setenv("REFUSE", "build")
    with pytest.raises(BuildError, match=r"^sbatch .*/build.sh failed: no room$"):
        prepare(job(tmp_path / "out"), True, print)
    (folder / "jobs.json").unlink()
    said = refused("status", tmp_path / "out")
    assert (
        "unless its jobs are waiting (see squeue), start it with"
        f" {prepare(job(tmp_path / 'out'), False, print)['submit']}" in said
    )


def test_a_script_that_was_changed_is_kept(tmp_path):
    said: list[str] = []
    prepare(job(tmp_path / "out"), False, said.append)
    prepare(job(tmp_path / "out"), False, said.append)
    assert said == []
    script = tmp_path / "out.slurm" / "build.sh"
    script.write_text("mine")
    prepare(job(tmp_path / "out"), False, said.append)
    assert said == [f"{script} had other text, which is now in build.sh.old"]
    assert (
        script.with_name("build.sh.old").read_text() == "mine"
        and "sbatch" not in script.read_text()
    )


@pytest.mark.parametrize("name", ["out", HOSTILE])
def test_the_redo_command_submits_what_is_missing_and_what_comes_after(tmp_path, name, monkeypatch):
    out = tmp_path / name
    assert redo_command(out, [1], 10) is None
    result = prepare(job(out, count=5, at_once=2), False, print)
    monkeypatch.setenv("PATH", programs(tmp_path / "bin", sbatch=SBATCH)["PATH"])
    folder = out.with_name(f"{name}.slurm")
    for command, array in (
        (redo_command(out, [2, 8, 9], 10), "--array=1,4%2 "),
        (result["submit"], ""),
    ):
        (tmp_path / "bin" / "said").unlink(missing_ok=True)
        assert command and subprocess.run(["bash", "-c", command]).returncode == 0
        said = (tmp_path / "bin" / "said").read_text()
        assert (
            said
            == f"--parsable {array}{folder}/build.sh\n--dependency=afterok:7 {folder}/finish.sh\n"
        )
    assert redo_command(out, [], 10) == shlex.join(["sbatch", str(folder / "finish.sh")])
    (folder / "finish.sh").unlink()
    assert redo_command(out, [], 10) is None
