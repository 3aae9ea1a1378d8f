"""examples/build.sbatch: it is what `packprep slurm` writes, and on a real Slurm it builds what one
process builds."""

import os
import re
import shutil
import signal
import sys

import pytest

from packprep.building.slurm import ArrayJob, scripts
from tests import made
from tests.docs.running import commands
from tests.slurm.cluster import quiet_environment
from tests.slurm.test_slurm import SLOW, pids

pytestmark = pytest.mark.long

EXAMPLE = made.ROOT / "examples" / "build.sbatch"
TASKS = 8


def options_of(script: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH (--[a-z-]+)(?:=(.*))?$", script, re.M))


def test_it_has_the_options_of_the_written_script_and_ends_as_it_does(tmp_path):
    job = ArrayJob("build", ("recipe.toml",), tmp_path / "packed", TASKS, at_once=4)
    written, example = scripts(job, tmp_path)["build.sh"], EXAMPLE.read_text("utf-8")
    own = {"--time", "--cpus-per-task", "--mem"}  # the site's
    ours, theirs = options_of(example), options_of(written)
    assert set(ours) == set(theirs) | own
    assert all(ours[name] == value for name, value in theirs.items() if name != "--output")
    # from the place where 75 is looked at to the end
    ends = [script[script.index('if [ "$status" = 75 ]') :] for script in (example, written)]
    assert ends[0] == ends[1]
    assert f"tasks={TASKS} " in example and f"--array=0-{TASKS - 1}%" in example
    for word in ("srun --nodes=1 --ntasks=1", "--array-index", "--array-count"):
        assert word in written and word in example
    assert example.count("|| status=$?\n") == 1


@pytest.mark.long
def test_it_builds_and_a_task_that_was_signalled_is_queued_again_and_goes_on(
    cluster, small, place, tmp_path
):
    folder = place / "sbatch"
    folder.mkdir()
    shutil.copy(EXAMPLE, folder)
    environment = quiet_environment(made.environment()) | cluster.environment | SLOW
    environment["PATH"] = os.pathsep.join([str(commands(folder / "bin")), environment["PATH"]])
    out = folder / "packed"
    said = ["sbatch", "--parsable", "build.sbatch", str(small.recipe), str(out)]
    array = cluster.run(*said, cwd=folder, env=environment).strip()
    log = folder / "packprep-build-1.log"
    cluster.until(lambda: log.exists() and "shards to make" in log.read_text())
    for pid in pids(out, 1):
        os.kill(pid, signal.SIGUSR1)
    cluster.wait(array)
    assert cluster.states(array) == ["COMPLETED"] * TASKS
    assert (
        log.read_text().count("shards to make") == 2 and "stopped: by a signal" in log.read_text()
    )
    if not (out / "dataset.json").exists():  # each of the last may have missed the other's receipt
        build = [sys.executable, "-m", "packprep", "build", str(small.recipe), "--out", str(out)]
        cluster.run(*build, env=quiet_environment(made.environment()))
    assert made.contents(out) == small.expected
