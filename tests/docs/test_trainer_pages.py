"""The code of the pages about trainers runs, from a page's first block to its last, on a small dataset."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[trainers]'")

from tests import made

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a dataset called packed."""
    folder = tmp_path_factory.mktemp("pages")
    source = {"name": "packprep", "paths": [str(made.ROOT / "packprep" / "dataset" / "*.py")]}
    made.build(made.table([source], seq_length=256), folder, folder / "packed")
    return folder


@pytest.mark.parametrize("page, needs", [("torch.md", None), ("huggingface.md", "transformers")])
def test_the_code_of_a_page_runs(folder, page, needs, monkeypatch):
    if needs:
        pytest.importorskip(needs, reason=f"{needs} is not installed: pip install '.[trainers]'")
    monkeypatch.chdir(folder)
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text("utf-8"), re.S | re.M)
    assert blocks
    names: dict = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
