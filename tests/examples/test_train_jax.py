"""examples/train_jax.py on a small dataset of the ul2r and llada mixes: it learns, and a kill
leaves no trace."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import made

pytestmark = pytest.mark.long

pytest.importorskip("jax", reason="JAX is not installed: pip install 'packprep[jax]'")

SCRIPT = made.ROOT / "examples" / "train_jax.py"
SMALL = ["--batch-size", "4", "--width", "32", "--layers", "1", "--heads", "2", "--save-every", "4"]


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("train_jax")
    made.write_lines(folder / "a.jsonl", made.texts(80))
    table = made.table("a.jsonl", seq_length=128, tasks=[{"preset": "ul2r"}, {"preset": "llada"}])
    made.build(table, folder, folder / "packed")
    return folder / "packed"


def start(packed: Path, *arguments: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(packed), *SMALL, *map(str, arguments)],
        env=made.environment(JAX_PLATFORMS="cpu"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def losses(out: str) -> dict[int, str]:
    return {
        int(step): loss for step, loss in re.findall(r"^step (\d+) loss (\S+)$", out, re.MULTILINE)
    }


def run(packed: Path, *arguments: object) -> dict[int, str]:
    out, errors = start(packed, *arguments).communicate(timeout=120)
    assert losses(out), errors
    return losses(out)


def test_it_learns_and_goes_on_after_a_kill_with_the_same_losses(packed, tmp_path):
    whole = run(packed, "--steps", 60)
    assert list(whole) == list(range(1, 61))
    values = [float(loss) for loss in whole.values()]
    assert sum(values[-10:]) < 0.8 * sum(values[:10])

    checkpoint = tmp_path / "small.npz"
    process = start(packed, "--steps", 60, "--checkpoint", checkpoint)
    assert process.stdout is not None
    seen = ""
    while 11 not in losses(seen):
        line = process.stdout.readline()
        assert line, process.stderr.read()
        seen += line
    process.kill()
    assert process.wait(timeout=30) == -signal.SIGKILL
    rest = run(packed, "--steps", 60, "--checkpoint", checkpoint)
    first = min(rest)
    assert 9 <= first <= 60 and first % 4 == 1
    assert rest == {step: loss for step, loss in whole.items() if step >= first}
    assert {**losses(seen), **rest} == whole
    assert (
        list(tmp_path.iterdir()) == [checkpoint] or (tmp_path / f".{checkpoint.name}.tmp").exists()
    )


@pytest.mark.long
def test_splash_attention_gives_the_same_losses_but_for_rounding(packed):
    by_path = [run(packed, "--steps", 2, "--attention", path) for path in ("dense", "splash")]
    for a, b in zip(*(steps.values() for steps in by_path), strict=True):
        assert float(a) == pytest.approx(float(b), rel=1e-4)
