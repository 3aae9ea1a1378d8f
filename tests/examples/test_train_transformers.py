"""examples/train_transformers.py learns with the Trainer, and goes on from its checkpoint."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[trainers]'")
pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install '.[trainers]'"
)
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install '.[trainers]'")

from tests import made

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_transformers.py"
SMALL = ["--width", "32", "--layers", "1", "--batch-size", "4", "--save-every", "20"]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    base = tmp_path_factory.mktemp("trainer")
    source = {"name": "packprep", "paths": [str(made.ROOT / "packprep" / "dataset" / "*.py")]}
    made.build(made.table([source], seq_length=128), base, base / "packed")
    return base / "packed"


def test_the_loss_goes_down_and_a_run_goes_on_from_its_checkpoint(packed, tmp_path):
    main = runpy.run_path(str(EXAMPLE))["main"]
    losses = main([str(packed), "--out", str(tmp_path / "out"), "--steps", "60", *SMALL])
    assert len(losses) == 60 and sum(losses[-10:]) < 0.9 * sum(losses[:10])
    for checkpoint in ("checkpoint-60", "checkpoint-40"):
        (tmp_path / "out" / checkpoint).rename(tmp_path / checkpoint)
    again = main([str(packed), "--out", str(tmp_path / "out"), "--steps", "60", *SMALL])
    assert again == pytest.approx(losses, rel=1e-3)
