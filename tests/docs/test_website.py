"""The site: every page is in it, links out of docs/ lead to pages, a warning ends the build, and
nothing is fetched."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.modules import module
from tests.made import ROOT

website = module("website")
CONFIG = (ROOT / "mkdocs.yml").read_text("utf-8")
HEAD, _, NAV = CONFIG.partition("\nnav:\n")


def test_the_navigation_names_every_page_once():
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    named = re.findall(r"[\w/]+\.md", NAV)
    assert sorted(named) == sorted(pages | {f"api/{name}.md" for name in website.API})


def test_a_page_is_led_to_what_it_links_to_and_has_no_comments():
    linked: set[str] = set()
    page = (
        "<!-- needs: torch -->\n# A\n\n[a](../torch.md#batches) [b](../../examples/train_torch.py)"
        " [c](https://d.org) [e](#f)\n[tests](../../tests/crash) [g](../../CONTRIBUTING.md)\n\n<!--"
        " not run:\nso -->\n```sh\n[k](../../x.py) <!-- kept -->\n```\n"
    )
    made = website.page(page, "docs/guides/a.md", "guides/a.md", linked)
    assert (
        made == "# A\n\n[a](../torch.md#batches) [b](../source/examples/train_torch.py.md)"
        " [c](https://d.org) [e](#f)\n[tests](../source/tests/crash.md)"
        " [g](../source/CONTRIBUTING.md)\n\n```sh\n[k](../../x.py) <!-- kept -->\n```\n"
    )
    assert linked == {"examples/train_torch.py", "tests/crash", "CONTRIBUTING.md"}


def test_a_drawing_stands_in_its_page_without_a_colour_of_its_own():
    made = website.page("![A row](drawings/row.svg)\n", "docs/index.md", "index.md", set())
    assert (
        made.startswith('<div class="drawing"><svg')
        and "<style>" not in made
        and "currentColor" in made
    )
    assert "\n\n" not in made, "an empty line would end the block of HTML"


def test_examples_of_docstrings_become_code():
    pytest.importorskip("griffe", reason="griffe is not installed: pip install '.[docs]'")
    docstrings = module("docstrings")
    text = 'What it does.\n\nExample:\n    a = f()\n\n    b = a["x"]\n\nMore.'
    code = '    ```python\n    a = f()\n\n    b = a["x"]\n    ```\n'
    found = docstrings._EXAMPLE.sub(docstrings.fenced, text)
    assert found == f"What it does.\n\nExample:\n{code}\nMore."
    told = "Example:\n    Two tokens:\n\n        a, b\n"
    assert docstrings._EXAMPLE.sub(docstrings.fenced, told) == told


@pytest.mark.skipif(
    importlib.util.find_spec("zensical") is None,
    reason="zensical is not installed: pip install '.[docs]'",
)
@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("[good](#a)\n\n::: packprep.errors\n", ""),
        ("[bad](nowhere.md)\n", "page does not exist"),
        ("[bad](#nowhere)\n", "anchor does not exist"),
    ],
)
def test_a_link_that_leads_nowhere_ends_the_build_and_a_good_site_fetches_nothing(
    tmp_path, page, said
):
    (tmp_path / "mkdocs.yml").write_text(HEAD)
    for name, text in (("index.md", f"# A\n\n{page}"), ("site.css", "")):
        (tmp_path / ".site").mkdir(exist_ok=True)
        (tmp_path / ".site" / name).write_text(text)
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "docstrings.py", tmp_path / "docs")
    (tmp_path / "packprep").symlink_to(ROOT / "packprep")
    command = [
        sys.executable,
        "-m",
        "zensical",
        "build",
        "--strict",
        "--config-file",
        str(tmp_path / "mkdocs.yml"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode != 0) == bool(said) and said in done.stdout + done.stderr, (
        done.stdout + done.stderr
    )
    if not said:
        html = (tmp_path / "site" / "index.html").read_text("utf-8")
        assert "PackprepError" in html
        assert not re.findall(
            r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"']?(?:https?:)?//[^>]+>", html
        )
        for style in Path(tmp_path / "site").rglob("*.css"):
            assert not re.search(r"url\([\"']?https?:|@import", style.read_text("utf-8")), style
