"""examples/look_at_a_row.ipynb is stored without outputs, and runs."""

import json

import pytest

from packprep import open_dataset
from tests import made

pytestmark = pytest.mark.long

NOTEBOOK = made.ROOT / "examples" / "look_at_a_row.ipynb"


def test_it_is_stored_without_outputs():
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.parametrize("preset", ["ul2r", "llada"])
def test_it_opens_a_dataset_and_draws_a_row(tmp_path, monkeypatch, preset):
    for module in ("nbclient", "ipykernel", "matplotlib"):
        pytest.importorskip(module, reason=f"{module} is not installed: pip install '.[test]'")
    import nbformat
    from nbclient import NotebookClient

    made.write_lines(tmp_path / "a.jsonl", made.texts(30))
    table = made.table("a.jsonl", seq_length=256, tasks=[{"preset": preset}])
    made.build(table, tmp_path, tmp_path / "packed")
    for name in (
        "IPYTHONDIR",
        "JUPYTER_CONFIG_DIR",
        "JUPYTER_DATA_DIR",
        "JUPYTER_RUNTIME_DIR",
        "MPLCONFIGDIR",
    ):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("PYTHONPATH", str(made.ROOT))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()

    outputs = [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]
    said = "".join(output.text for output in outputs if output.output_type == "stream")
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    dataset = open_dataset(tmp_path / "packed")
    assert f"{len(dataset):,} rows of 256 slots, ids below 528" in said
    row = dataset.row(0)
    ends = row.segments["end"].tolist()
    listed = [line.split() for line in said.splitlines() if line.strip().endswith("trained")]
    assert [int(words[5]) for words in listed] == ends
    assert sum(int(words[-2]) for words in listed) == int(row.loss_mask.sum())
