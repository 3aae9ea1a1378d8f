"""examples/build_on_ray.py on a local cluster gives the bytes of a build without Ray, also if the
machine loses one of Ray's workers in the middle."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

from tests import made

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "build_on_ray.py"
TASKS = 3


def ray_workers(begun_by):
    """The pids of Ray's workers that run a task of the example, below the process `begun_by`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes()
            if title.startswith(b"ray::build_part") and _is_below(int(folder.name), begun_by):
                found.append(int(folder.name))
        except (OSError, StopIteration):  # The process ended.
            continue
    return found


def _is_below(process, ancestor):
    while process > 1 and process != ancestor:
        status = Path(f"/proc/{process}/status").read_text().splitlines()
        process = int(next(line for line in status if line.startswith("PPid:")).split()[1])
    return process == ancestor


def test_a_build_on_ray_with_a_worker_killed_has_the_bytes_of_one_without_ray(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", made.texts(3000, 5, 900))
    recipe = made.write(
        tmp_path / "recipe.toml",
        b'seq_length = 128\ntokenizer = "bytes"\n[[sources]]\npaths = ["a.jsonl"]\n'
        b"[output]\nshard_text_bytes = 20000\n",
    )
    build = sys.executable, "-m", "packprep", "build", recipe, "--workers", "1"
    environment = made.environment(RAY_USAGE_STATS_ENABLED="0", RAY_DISABLE_IMPORT_WARNING="1")
    subprocess.run([*build, "--out", tmp_path / "alone"], env=environment, check=True)
    out = tmp_path / "packed"
    options = "--tasks", str(TASKS), "--cpus", "1"
    ray_build = subprocess.Popen(
        [sys.executable, EXAMPLE, recipe, out, *options],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    shards = len(list((tmp_path / "alone").glob("receipts/*/*")))
    until = time.monotonic() + 300
    while len(list(out.glob("receipts/*/*"))) < 3 and ray_build.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    killed = ray_workers(ray_build.pid)
    assert killed, ray_build.communicate()
    os.kill(killed[0], signal.SIGKILL)
    assert len(list(out.glob("receipts/*/*"))) < shards
    said, _ = ray_build.communicate(timeout=300)
    assert ray_build.returncode == 0, said
    wanted = made.contents(tmp_path / "alone")
    assert len(wanted) > 2 * shards > 100 and made.contents(out) == wanted
