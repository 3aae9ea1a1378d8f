"""examples/train_torch.py learns, and killed it goes on with the same losses."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[trainers]'")

from packprep.dataset.loader import write_mixture
from tests import made

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_torch.py"
SMALL = ["--width", "32", "--layers", "1", "--heads", "2", "--batch-size", "4", "--device", "cpu"]
_STEP = re.compile(r"^step +(\d+)  loss ([\d.]+)", re.M)


@pytest.fixture(scope="module", params=["ul2r", "llada"])
def packed(tmp_path_factory, request):
    """The text of the quickstart's recipe in short rows of one of its mixes."""
    base = tmp_path_factory.mktemp(request.param)
    table = made.table(
        [{"name": "packprep", "paths": [str(made.ROOT / "packprep" / "dataset" / "*.py")]}],
        seq_length=128,
        tasks=[{"preset": request.param}],
    )
    made.build(table, base, base / "packed")
    return base / "packed"


def start(packed, *options):
    # One thread: sums of floats depend on how they are split.
    environment = made.environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, str(EXAMPLE), str(packed), *SMALL, *options]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def losses(said):
    """Step → loss as printed."""
    return {int(step): loss for step, loss in _STEP.findall(said)}


def test_the_loss_goes_down_and_a_killed_run_goes_on_with_the_same_losses(packed, tmp_path):
    whole = start(packed, "--steps", "120")
    said, _ = whole.communicate(timeout=300)
    assert whole.returncode == 0, said
    expected = losses(said)
    values = [float(loss) for loss in expected.values()]
    assert len(values) == 120 and sum(values[-20:]) < 0.8 * sum(values[:20])
    assert re.search(r"ms a step, [\d.]+ % of it for its batch", said)

    options = ["--steps", "120", "--checkpoint", str(tmp_path / "model.pt"), "--save-every", "7"]
    killed = start(packed, *options)
    seen = ""
    assert killed.stdout is not None
    for line in killed.stdout:
        seen += line
        if line.startswith("step    40"):
            os.kill(killed.pid, signal.SIGKILL)
            break
    assert killed.wait() == -signal.SIGKILL
    again = start(packed, *options)
    said, _ = again.communicate(timeout=300)
    assert again.returncode == 0, said
    step = int(re.search(r"going on after step (\d+)", said)[1])
    assert step >= 35 and step % 7 == 0 and list(losses(said)) == list(range(step + 1, 121))
    for got in (losses(seen), losses(said)):
        assert got.items() <= expected.items()


def test_rows_of_two_lengths_are_trained_together_and_gone_on_with(tmp_path):
    for length in (64, 128):
        sources = [
            {"name": "packprep", "paths": [str(made.ROOT / "packprep" / "dataset" / "*.py")]}
        ]
        made.build(
            made.table(sources, seq_length=length, tasks=[{"preset": "causal"}]),
            tmp_path,
            tmp_path / str(length),
        )
    changing = [(0, [1, 0]), (12, [1, 1]), (24, [0, 1])]
    folders = [tmp_path / "64", tmp_path / "128"]
    write_mixture(tmp_path / "mixture.json", folders, shares=changing, interpolate="linear")
    options = [
        "--batch-tokens",
        "512",
        "--checkpoint",
        str(tmp_path / "model.pt"),
        "--save-every",
        "10",
    ]
    seen = {}
    for steps in (20, 40):
        said, _ = start(tmp_path / "mixture.json", "--steps", str(steps), *options).communicate(
            timeout=300
        )
        seen |= losses(said)
    assert "going on after step 20" in said and len(seen) == 40
    values = [float(loss) for loss in seen.values()]
    assert sum(values[-10:]) < 0.9 * sum(values[:10])


def test_the_gpu_is_taken_where_there_is_one(packed):
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no GPU: torch.cuda.is_available() is False")
    command = [sys.executable, str(EXAMPLE), str(packed), "--steps", "3", "--batch-size", "4"]
    done = subprocess.run(
        command, env=made.environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "on cuda" in done.stdout, done.stderr
